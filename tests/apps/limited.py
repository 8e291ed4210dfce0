"""An app whose children call a service that counts, under limits of each kind."""

import asyncio
import os

import procrastinate
import pydantic

from fanout_procrastinate import FanOut, Limit, fanout_child
from tests import meter
from tests.apps import journal, scripted

QUEUE = "limited"

app = procrastinate.App(connector=procrastinate.PsycopgConnector())
fanout = FanOut(
    app,
    lease=float(os.environ.get(scripted.LEASE_VARIABLE, scripted.LEASE_SECONDS)),
    sweep_cron=os.environ.get(scripted.SWEEP_VARIABLE, scripted.EACH_MINUTE),
)
log = journal.of_environment()

few = Limit("few", concurrency=5)
pace = Limit("pace", rate=100, burst=10)
tenant = Limit("tenant", concurrency=3, key=lambda item: item.tenant)


class Call(pydantic.BaseModel):
    """One call of the service, which takes so many seconds."""

    name: str
    service: str
    seconds: float = 0.02
    tenant: str = ""


_free: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
"""Connections of this process to the service that nobody uses."""


async def call_service(name: str, seconds: float) -> None:
    """Call the service, which takes its time."""
    if _free:
        reader, writer = _free.pop()
    else:
        reader, writer = await asyncio.open_unix_connection(os.environ[meter.VARIABLE])
    try:
        writer.write(f"{name} {seconds}\n".encode())
        await reader.readline()
    except BaseException:
        writer.close()
        raise
    _free.append((reader, writer))


async def _call(call: Call) -> str:
    await call_service(call.service, call.seconds)
    return call.name


@fanout_child(app, queue=QUEUE, limits=[few], max_crashes=20)
async def call_few(call: Call) -> str:
    return await _call(call)


@fanout_child(app, queue=QUEUE, limits=[pace])
async def call_paced(call: Call) -> str:
    return await _call(call)


@fanout_child(app, queue=QUEUE, max_running=10)
async def call_shared(call: Call) -> str:
    return await _call(call)


@fanout_child(app, queue=QUEUE, limits=[tenant])
async def call_tenant(call: Call) -> str:
    return await _call(call)


@fanout_child(app, queue=QUEUE)
async def call_freely(call: Call) -> str:
    return await _call(call)


CHILDREN = (call_few, call_paced, call_shared, call_tenant, call_freely)
