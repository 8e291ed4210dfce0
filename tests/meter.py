"""A service that counts: how many calls are open at once, and when each began. In a thread."""

import asyncio
import contextlib
import dataclasses
import threading
import time
from collections import Counter
from pathlib import Path
from types import TracebackType
from typing import Self

VARIABLE = "FANOUT_TEST_METER"


@dataclasses.dataclass
class Call:
    """One call, as the service saw it; times are seconds on its clock."""

    name: str
    began: float
    ended: float | None = None


class Meter:
    """`with Meter(folder) as meter`; a caller sends a line to `path`, what it calls and how many
    seconds that takes, and waits for the answer; then perhaps the next one.

    The end of a caller's process ends its calls.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "meter"
        self.calls: list[Call] = []
        self.open: Counter[str] = Counter()
        self.most: Counter[str] = Counter()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(10)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def began(self, name: str) -> list[float]:
        """Return when the calls of this name began, ascending."""
        return sorted(call.began for call in self.calls if call.name == name)

    async def _listen(self) -> None:
        self._server = await asyncio.start_unix_server(self._serve, self.path)

    async def _end(self) -> None:
        self._server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Cancelled at the end, when callers hold their connections still.
        ended = contextlib.suppress(ConnectionError, asyncio.CancelledError)
        with contextlib.closing(writer), ended:
            while line := await reader.readline():
                name, _, seconds = line.decode().strip().partition(" ")
                await self._call(name, float(seconds), reader)
                writer.write(b"done\n")

    async def _call(self, name: str, seconds: float, reader: asyncio.StreamReader) -> None:
        call = Call(name, time.monotonic())
        self.calls.append(call)
        self.open[name] += 1
        self.most[name] = max(self.most[name], self.open[name])
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(self._loop.time() + seconds):
                    await reader.read(1)  # until the caller dies
        finally:
            self.open[name] -= 1
            call.ended = time.monotonic()


def most_in_window(times: list[float], seconds: float) -> int:
    """Return the most of these times that lie in any window of so many seconds."""
    most = first = 0
    for last, moment in enumerate(times):
        while times[first] <= moment - seconds:
            first += 1
        most = max(most, last - first + 1)
    return most
