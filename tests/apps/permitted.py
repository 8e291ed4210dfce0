"""An app whose children call a service that counts, each with a permit of its limit."""

import asyncio
import os
import threading
from typing import Any

import procrastinate
import pydantic

from fanout_procrastinate import Backoff, FanOut, ItemContext, Limit, fanout_child
from tests.apps import journal, scripted
from tests.apps.limited import call_service

QUEUE = "permitted"

app = procrastinate.App(connector=procrastinate.PsycopgConnector())
fanout = FanOut(
    app,
    lease=float(os.environ.get(scripted.LEASE_VARIABLE, scripted.LEASE_SECONDS)),
    sweep_cron=os.environ.get(scripted.SWEEP_VARIABLE, scripted.EACH_SECOND),
)
log = journal.of_environment()

few = Limit("few", concurrency=3)
pace = Limit("pace", rate=50, burst=5)
first = Limit("first", concurrency=1)
second = Limit("second", concurrency=1)


class Call(pydantic.BaseModel):
    """One call of the service, which takes so many seconds."""

    name: str
    service: str
    seconds: float = 0.02


async def _call(call: Call) -> None:
    await call_service(call.service, call.seconds)


@fanout_child(app, queue=QUEUE, pass_context=True, max_crashes=20)
async def call_few(context: ItemContext, call: Call) -> None:
    async with context.permit(few):
        log.write("start", run=context.run_id, item=call.name)
        await _call(call)


@fanout_child(app, queue=QUEUE, pass_context=True)
async def call_paced(context: ItemContext, call: Call) -> None:
    async with context.permit(pace):
        await _call(call)


@fanout_child(app, queue=QUEUE, pass_context=True)
async def call_crossed(context: ItemContext, call: Call) -> str:
    """Take two limits one after the other, every second item in the wrong order."""
    limits = (first, second) if context.position % 2 else (second, first)
    async with context.permit(limits[0]):
        await asyncio.sleep(0.01)
        async with context.permit(limits[1]):
            return "both"


@fanout_child(app, queue=QUEUE, pass_context=True)
async def call_declared(context: ItemContext, call: Call) -> str:
    """Take two limits together."""
    async with context.permit(second, first):
        await asyncio.sleep(0.01)
        return "both"


@fanout_child(app, queue=QUEUE, isolate=True, pass_context=True, backoff=Backoff(initial=0.1))
def call_apart(context: ItemContext, call: Call) -> Any:
    """Take a permit in a process of its own; a call named so dies with it."""
    with context.permit(few) as permit:
        if call.name == "dies" and log.is_first("died"):
            os._exit(9)
        threading.Event().wait(call.seconds)
        few.pause(0.01)
        return permit.lost
