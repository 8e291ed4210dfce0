"""The scripted app, with a manager, a child and a callback that wait to be let go."""

import asyncio
from collections.abc import AsyncIterator

from fanout_procrastinate import ItemContext, Run, fanout_child, fanout_manager
from tests.apps import scripted

QUEUE = "handled"
LISTING_QUEUE = "handled_listing"

app = scripted.app


async def _pass(role: str, name: str, held: str, what: str = "") -> None:
    facts = {"role": role, "name": name, "what": what}
    scripted.log.write("reached", **facts)
    # No event: the test is another process.
    while role == held and not scripted.log.arrived(f"{role}-{name}")[0]:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    scripted.log.write("passed", **facts)


@fanout_child(app, queue=QUEUE, pass_context=True)
async def work(context: ItemContext, number: int) -> int:
    run_args = context.run_args
    await _pass("child", run_args["name"], run_args.get("held", ""), str(number))
    return number


@fanout_manager(app, child=work, item_key=str, queue=LISTING_QUEUE)
async def listing(name: str, held: str = "", count: int = 2) -> AsyncIterator[int]:
    """List so many items; `held`: the role that waits to be let go."""
    await _pass("manager", name, held)
    for number in range(count):
        yield number


@listing.on_complete
async def told(run: Run) -> None:
    await _pass("callback", run.args["name"], run.args.get("held", ""))
