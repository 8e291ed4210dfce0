"""The same no-op work as plain procrastinate jobs and as a fan-out."""

from __future__ import annotations

import procrastinate

from fanout_procrastinate import FanOut, fanout_child, fanout_manager

app = procrastinate.App(connector=procrastinate.PsycopgConnector())
FanOut(app)


@app.task(queue="plain", name="plain")
async def plain(item: int) -> None:
    """Do nothing."""


@fanout_child(app, queue="fanout", name="light")
async def light(item: int) -> None:
    """Do nothing."""


@fanout_manager(app, child=light, name="light_run")
def light_run(items: int):
    """List the items."""
    yield from range(items)
