"""An app whose runs are watched on the dashboard; its database is libpq's environment's."""

import asyncio
import os
from collections.abc import Iterator

import procrastinate
import pydantic

from fanout_procrastinate import (
    FanOut,
    ItemContext,
    PermanentError,
    fanout_child,
    fanout_manager,
)
from tests.apps import journal

QUEUE = "shown"
HOSTILE = "<script>document.title='stolen'</script><img src=x onerror=alert(1)>"

app = procrastinate.App(connector=procrastinate.PsycopgConnector(min_size=1, max_size=3))
FanOut(app, lease=2.0, sweep_cron="* * * * * */1")
log = journal.of_environment() if os.environ.get(journal.VARIABLE) else None


class Page(pydantic.BaseModel):
    """What one item does, in this order."""

    name: str
    says: str = ""
    tells: float = 0.0
    """How far it is."""
    waits_for: str = ""
    """Wait until somebody has arrived there (see `Journal`)."""
    sleep: float = 0.0
    fails: str = ""


@fanout_child(app, name="shown.read_page", queue=QUEUE, max_attempts=1, pass_context=True)
async def read_page(context: ItemContext, page: Page) -> dict[str, int | str]:
    if page.says:
        await context.log_async(page.says, pid=os.getpid())
    if page.tells:
        await context.progress_async(page.tells)
    # No event: who opens the gate is another process.
    while page.waits_for and log is not None and not log.arrived(page.waits_for)[0]:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    await asyncio.sleep(page.sleep)
    if page.fails:
        raise PermanentError(page.fails)
    return {"letters": len(page.name), "name": page.name}


@fanout_manager(app, child=read_page, name="shown.read_pages", item_key=lambda page: page.name)
def read_pages(pages: list[Page]) -> Iterator[Page]:
    for page in pages:
        yield Page.model_validate(page)


@read_pages.on_complete
async def told(run: object) -> None:
    pass
