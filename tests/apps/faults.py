"""An app whose connections are few, or go through a pooler; the environment says which."""

import asyncio
import json
import os
from typing import Any

import procrastinate
import psycopg
import pydantic

from fanout_procrastinate import (
    Backoff,
    FanOut,
    ItemContext,
    Run,
    TransientError,
    fanout_child,
    fanout_manager,
    host,
)
from tests.apps import journal, scripted

CONNECTOR_VARIABLE = "FANOUT_TEST_CONNECTOR"
"""The connector's options, as JSON."""
OWN_VARIABLE = "FANOUT_TEST_OWN_DSN"
"""Where the library's own connections go; without it, where the connector's go."""


app = procrastinate.App(
    connector=procrastinate.PsycopgConnector(**json.loads(os.environ.get(CONNECTOR_VARIABLE, "{}")))
)


def connect() -> psycopg.Connection[Any]:
    """Open one of the library's own connections, with the driver's defaults."""
    dsn = os.environ.get(OWN_VARIABLE)
    return psycopg.connect(dsn) if dsn else host.connect_as(app)()


fanout = FanOut(
    app,
    lease=scripted.LEASE_SECONDS,
    sweep_cron=scripted.EACH_SECOND,
    chunk_size=scripted.CHUNK_SIZE,
    connection_factory=connect,
)
log = journal.of_environment()


class Step(pydantic.BaseModel):
    """What one item does; times are in seconds."""

    name: str
    sleep: float = 0.0
    holds: bool = False
    """Hold a connection of the app's pool meanwhile, and ask whether the item is still ours."""
    fails: int = 0
    """Raise a transient error at so many tries."""


@fanout_child(
    app,
    queue=scripted.QUEUE,
    max_attempts=3,
    pass_context=True,
    backoff=Backoff(initial=0.2, jitter=0.0),
)
async def work(context: ItemContext, step: Step) -> str:
    log.write("start", run=context.run_id, item=step.name, attempt=context.attempt)
    if step.holds:
        connector = app.connector
        assert isinstance(connector, procrastinate.PsycopgConnector)
        async with connector.pool.connection():
            await asyncio.sleep(step.sleep)
            assert await context.still_mine_async()
    else:
        await asyncio.sleep(step.sleep)
    if context.attempt <= step.fails:
        raise TransientError("not yet", retry_in=0.2)
    log.write("end", run=context.run_id, item=step.name)
    return step.name


@fanout_manager(app, child=work, item_key=lambda step: step.name)
def steps(steps: list[dict[str, Any]]) -> Any:
    return [Step(**step) for step in steps]


@steps.on_complete
async def closed(run: Run) -> None:
    log.write("closed", run=run.id, succeeded=run.closed_progress.succeeded)
