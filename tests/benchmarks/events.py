"""What live events cost: the same fan-outs with events and without, side by side.

    python -m tests.benchmarks.events --items 5000 --runs 16 --processes 2 --rounds 4

Sixteen runs of no-op items at once by default, so that many writers finish items of different
runs. Each kind has worker processes of its own, which are idle while the other kind works, and
somebody watches every run of those with events. In ABBA order; the median of the pairs' ratios is
last: the throughput with events as a share of that without. Counted is also how often the server
was notified.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import psycopg

from fanout_procrastinate import FanOut, subscriptions
from tests import databases, workers
from tests.benchmarks import throughput

APP = "tests.benchmarks.events_app.app"
EVENTS_VARIABLE = "FANOUT_BENCH_EVENTS"
_TIMEOUT_SECONDS = 900.0


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is compared: named in the output."""

    items: int
    runs: int
    processes: int
    concurrency: int
    rounds: int


class Heard:
    """Counts the notifications of the channel, on a connection of its own."""

    def __init__(self, dsn: str) -> None:
        self._connection = psycopg.connect(dsn, autocommit=True)
        self._connection.execute("LISTEN fanout_v1")
        self._stopping = False
        self.count = 0
        self._thread = threading.Thread(target=self._listen, name="heard", daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        while not self._stopping:
            for _ in self._connection.notifies(timeout=0.1):
                self.count += 1

    def close(self) -> None:
        self._stopping = True
        self._thread.join()
        self._connection.close()


async def once(settings: Settings, kind: str) -> float:
    """Return the seconds from the first trigger to the last close of so many runs."""
    from tests.benchmarks import events_app  # noqa: PLC0415 - reads libpq's environment

    fanout = FanOut.of(events_app.app)
    declared = events_app.managers[kind]
    each = settings.items // settings.runs
    with contextlib.ExitStack() as stack:
        watching: list[subscriptions.Subscription] = []
        start = time.perf_counter()
        runs = [await declared.defer_async(items=each) for _ in range(settings.runs)]
        if kind == "on":
            watching = [stack.enter_context(fanout.events.subscribe(one.id)) for one in runs]
        for one in runs:
            progress = await one.wait_async(timeout=_TIMEOUT_SECONDS)
            if progress.succeeded != each:
                raise AssertionError(f"not everything was counted: {progress}")
        seconds = time.perf_counter() - start
        for one in watching:
            while (event := await one.get_async(10)) is not None and event.kind != "closed":
                pass
            if event is None or event.progress is None or event.progress.succeeded != each:
                raise AssertionError(f"not told of the close: {event}")
    return seconds


async def measure(dsn: str, settings: Settings) -> tuple[list[tuple[float, float]], float]:
    """Return pairs of seconds, without and with events; and notifications per run and second."""
    from tests.benchmarks import events_app  # noqa: PLC0415 - reads libpq's environment

    pairs: list[tuple[float, float]] = []
    rates: list[float] = []
    async with events_app.app.open_async():
        for kind in ("off", "on"):
            await once(settings, kind)  # a warm-up, not counted
        for number in range(settings.rounds):
            found: dict[str, float] = {}
            for kind in ("on", "off") if number % 2 else ("off", "on"):
                heard = Heard(dsn)
                found[kind] = await once(settings, kind)
                heard.close()
                if kind == "on":
                    rates.append(heard.count / settings.runs / found[kind])
            pairs.append((found["off"], found["on"]))
            print(
                f"  pair {number + 1}: off {pairs[-1][0]:.2f} s, on {pairs[-1][1]:.2f} s",
                file=sys.stderr,
                flush=True,
            )
        await FanOut.of(events_app.app).close_async()
    return pairs, statistics.median(rates)


def report(
    settings: Settings, pairs: list[tuple[float, float]], rate: float, server: str
) -> dict[str, Any]:
    """Return the figures."""
    return {
        "settings": dataclasses.asdict(settings) | {"server": server},
        "off_items_per_second": round(settings.items / statistics.median(a for a, _ in pairs), 1),
        "on_items_per_second": round(settings.items / statistics.median(b for _, b in pairs), 1),
        "notifications_per_run_and_second": round(rate, 2),
        "share": round(statistics.median(a / b for a, b in pairs), 3),
    }


@contextlib.contextmanager
def working(dsn: str, settings: Settings) -> Iterator[None]:
    """Keep idle workers of both kinds, and point this process to the same database."""
    os.environ.update(databases.environment(dsn))
    with contextlib.ExitStack() as stack:
        running = [
            stack.enter_context(
                workers.Worker(
                    dsn,
                    APP,
                    queues=kind,
                    concurrency=settings.concurrency,
                    env={EVENTS_VARIABLE: kind},
                )
            )
            for kind in ("off", "on")
            for _ in range(settings.processes)
        ]
        for worker in running:
            worker.wait_ready()
        yield


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--items", type=int, default=8000)
    parser.add_argument("--runs", type=int, default=16)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    settings = Settings(given.items, given.runs, given.processes, given.concurrency, given.rounds)
    with throughput.served() as dsn:
        server = throughput.prepare(dsn)
        with working(dsn, settings):
            figures = report(settings, *asyncio.run(measure(dsn, settings)), server)
    if given.json:
        print(json.dumps(figures))
        return
    for name, value in (figures.pop("settings") | figures).items():
        print(f"{name}: {value}")


if __name__ == "__main__":
    main()
