"""An app whose children do little, so that reports come thick and fast."""

import asyncio

import procrastinate

from fanout_procrastinate import FanOut, fanout_child

QUEUE = "controlled"

app = procrastinate.App(connector=procrastinate.PsycopgConnector())
fanout = FanOut(app, lease=30.0)


@fanout_child(app, queue=QUEUE)
async def light(item: int) -> int:
    await asyncio.sleep(0.1)
    return item
