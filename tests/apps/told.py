"""An app whose children tell how they are, for whoever watches in another process."""

import asyncio

import procrastinate

from fanout_procrastinate import FanOut, ItemContext, fanout_child

QUEUE = "told"

app = procrastinate.App(connector=procrastinate.PsycopgConnector())
FanOut(app, lease=2.0, sweep_cron="0 0 1 1 *")


@fanout_child(app, queue=QUEUE, name="tell", pass_context=True, max_attempts=1)
async def tell(context: ItemContext, seconds: float) -> None:
    context.log("begins", seconds=seconds)
    context.progress(0.5)
    await asyncio.sleep(seconds)
    if context.position == 0:
        raise ValueError("the first one")
