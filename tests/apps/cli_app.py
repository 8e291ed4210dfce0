"""An app for the command line: its database is whatever libpq's environment names."""

from collections.abc import Iterator
from typing import Any

import procrastinate
from procrastinate import testing

from fanout_procrastinate import PermanentError, Run, fanout_child, fanout_manager

HOSTILE = "\x1b[2J\x07bad\r\n\u202eend\x9b"

print("this module is talkative")


class Hostile(Exception):
    """Its name, too, is no friend of terminals."""


Hostile.__qualname__ = "Hostile\x1b[31m"


def declare(app: procrastinate.App) -> tuple[Any, Any]:
    """Give an app a child that fails for items below zero, and its manager."""

    @fanout_child(app, name="half", queue="cli", max_attempts=1)
    async def half(item: int) -> int:
        if item == -1:
            raise PermanentError(HOSTILE)
        if item == -2:
            raise Hostile(HOSTILE)
        if item < 0:
            raise ValueError("below zero")
        return item // 2

    @fanout_manager(app, child=half, name="halves", item_key=lambda item: f"{item}{HOSTILE}")
    def halves(items: list[int], note: str = HOSTILE) -> Iterator[int]:
        yield from items

    @halves.on_complete
    def told(run: Run) -> None:
        pass

    return half, halves


app = procrastinate.App(connector=procrastinate.PsycopgConnector())
sync_app = procrastinate.App(connector=procrastinate.SyncPsycopgConnector())
memory_app = procrastinate.App(connector=testing.InMemoryConnector())
no_app = object()
declare(app)
