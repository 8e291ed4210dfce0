"""The scripted app, telling how long each of its reports took."""

import time
from typing import Any

from fanout_procrastinate import database
from tests.apps import scripted

app = scripted.app

_run_async = database.Database.run_async


async def _timed(self: database.Database, call: Any) -> Any:
    started = time.perf_counter()
    try:
        return await _run_async(self, call)
    finally:
        seconds = time.perf_counter() - started
        scripted.log.write("call", name=call.name, seconds=seconds)


database.Database.run_async = _timed  # type: ignore[method-assign]
