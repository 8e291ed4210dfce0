"""The same no-op fan-outs for workers with live events and for workers without."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import procrastinate

from fanout_procrastinate import FanOut, fanout_child, fanout_manager

app = procrastinate.App(connector=procrastinate.PsycopgConnector())
FanOut(app, events=os.environ.get("FANOUT_BENCH_EVENTS") == "on")


def _declared(queue: str) -> Any:
    @fanout_child(app, queue=queue, name=f"light_{queue}")
    async def light(item: int) -> None:
        """Do nothing."""

    @fanout_manager(app, child=light, name=f"light_run_{queue}")
    def light_run(items: int) -> Iterator[int]:
        """List the items."""
        yield from range(items)

    return light_run


managers = {queue: _declared(queue) for queue in ("off", "on")}
