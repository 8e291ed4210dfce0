"""How many no-op items per second: plain procrastinate jobs against a fan-out, side by side.

    python -m tests.benchmarks.throughput --items 10000 --processes 2 --concurrency 50

Both kinds run on one server in one go, in ABBA order, by worker processes of the same settings that
were started and idle before the clock starts. The clock runs from the trigger (deferring all plain
jobs in bulk; deferring the manager) until everything is final: every plain job succeeded, the
run closed with every item counted and its result stored. The median of the pairs' ratios is last.
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
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import procrastinate
import psycopg

from fanout_procrastinate import FanOut, Progress, schema
from tests import databases, installations, servers, workers

_CHUNK = 1000
_POLL_SECONDS = 0.01
_TIMEOUT_SECONDS = 900.0
# Nothing that a production server would not do, but in the same way for both kinds.
_DURABLE = {"fsync": "on", "full_page_writes": "on", "synchronous_commit": "on"}


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is compared: named in the output."""

    items: int
    processes: int
    concurrency: int
    rounds: int


class Bench:
    """One database with idle workers of both kinds."""

    def __init__(self, dsn: str, settings: Settings) -> None:
        self.dsn = dsn
        self.settings = settings

    async def plain(self) -> float:
        """Run all items as plain jobs; seconds from the first deferral to the last success."""
        from tests.benchmarks import throughput_app  # noqa: PLC0415 - reads libpq's environment

        with psycopg.connect(self.dsn, autocommit=True) as connection:
            query = "SELECT coalesce(max(id), 0) FROM procrastinate_jobs"
            first = connection.execute(query).fetchone()
            start = time.perf_counter()
            for chunk in range(0, self.settings.items, _CHUNK):
                end = min(chunk + _CHUNK, self.settings.items)
                await throughput_app.plain.batch_defer_async(
                    *({"item": item} for item in range(chunk, end))
                )
            await self._until(connection, first)
            return time.perf_counter() - start

    async def _until(self, connection: psycopg.Connection[Any], first: Any) -> None:
        deadline = time.monotonic() + _TIMEOUT_SECONDS
        pause = max(_POLL_SECONDS, self.settings.items / 1_000_000)
        while time.monotonic() < deadline:
            row = connection.execute(
                "SELECT count(*) FROM procrastinate_jobs WHERE id > %s AND queue_name = 'plain'"
                " AND status = 'succeeded'",
                first,
            ).fetchone()
            if row and row[0] >= self.settings.items:
                return
            await asyncio.sleep(pause)
        raise TimeoutError("the plain jobs did not end")

    async def fanout(self) -> float:
        """Run all items as a fan-out; seconds from the trigger to the close."""
        from tests.benchmarks import throughput_app  # noqa: PLC0415 - reads libpq's environment

        start = time.perf_counter()
        run = await throughput_app.light_run.defer_async(items=self.settings.items)
        progress = await run.wait_async(timeout=_TIMEOUT_SECONDS)
        seconds = time.perf_counter() - start
        _check(progress, self.settings.items)
        return seconds


def _check(progress: Progress, items: int) -> None:
    if progress.succeeded != items or progress.total != items:
        raise AssertionError(f"not everything was counted: {progress}")


async def measure(dsn: str, settings: Settings) -> list[tuple[float, float]]:
    """Return pairs of seconds: plain, fan-out."""
    from tests.benchmarks import throughput_app  # noqa: PLC0415 - reads libpq's environment

    bench = Bench(dsn, settings)
    pairs: list[tuple[float, float]] = []
    async with throughput_app.app.open_async():
        await bench.fanout()  # a warm-up of both, not counted
        for number in range(settings.rounds):
            if number % 2:
                fan = await bench.fanout()
                plain = await bench.plain()
            else:
                plain = await bench.plain()
                fan = await bench.fanout()
            pairs.append((plain, fan))
            print(f"  pair {number + 1}: {plain:.2f} s, {fan:.2f} s", file=sys.stderr, flush=True)
        await FanOut.of(throughput_app.app).close_async()
    return pairs


def report(settings: Settings, pairs: list[tuple[float, float]], server: str) -> dict[str, Any]:
    """Return the figures: medians, and the ratio as the median of the pairs' ratios."""
    plain = [settings.items / pair[0] for pair in pairs]
    fan = [settings.items / pair[1] for pair in pairs]
    return {
        "settings": dataclasses.asdict(settings) | {"server": server, "time_slice": 1.0},
        "plain_jobs_per_second": round(statistics.median(plain), 1),
        "fanout_items_per_second": round(statistics.median(fan), 1),
        "plain_range": [round(min(plain), 1), round(max(plain), 1)],
        "fanout_range": [round(min(fan), 1), round(max(fan), 1)],
        "ratio": round(statistics.median(a / b for a, b in pairs), 2),
    }


def prepare(dsn: str) -> str:
    """Apply both schemas and say what server it is."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(procrastinate.schema.SchemaManager.get_schema().encode())
        schema.apply(connection)
        row = connection.execute("SHOW server_version").fetchone()
        flush = connection.execute("SHOW fsync").fetchone()
    assert row and flush
    return f"PostgreSQL {row[0]}, fsync {flush[0]}"


@contextlib.contextmanager
def served(place: Path | None = None) -> Iterator[str]:
    """Yield the DSN of an empty database: on the server given, else on one of our own."""
    if dsn := os.environ.get("FANOUT_TEST_DSN"):
        maker = databases.Databases(dsn)
        name = f"fanout_bench_{os.getpid()}"
        try:
            yield maker.create(name)
        finally:
            maker.drop(name)
            maker.close()
        return
    installation = installations.find(18)
    if installation is None:
        raise SystemExit(f"PostgreSQL 18 is not on this machine: {installations.remedy(18)}")
    place = place or Path(tempfile.gettempdir())
    with servers.Server(installation, settings=_DURABLE, place=place) as server:
        yield server.dsn


@contextlib.contextmanager
def working(dsn: str, processes: int, concurrency: int) -> Iterator[None]:
    """Keep idle workers of both kinds, and point this process to the same database."""
    os.environ.update(databases.environment(dsn))
    with contextlib.ExitStack() as stack:
        running = [
            stack.enter_context(
                workers.Worker(
                    dsn,
                    "tests.benchmarks.throughput_app.app",
                    queues=["plain", "fanout"],
                    concurrency=concurrency,
                )
            )
            for _ in range(processes)
        ]
        for worker in running:
            worker.wait_ready()
        yield


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--items", type=int, default=10_000)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--concurrency", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--place", type=Path, help="folder for the server's data")
    given = parser.parse_args()
    settings = Settings(given.items, given.processes, given.concurrency, given.rounds)
    with served(given.place) as dsn:
        server = prepare(dsn)
        with working(dsn, settings.processes, settings.concurrency):
            figures = report(settings, asyncio.run(measure(dsn, settings)), server)
    if given.json:
        print(json.dumps(figures))
        return
    for name, value in figures["settings"].items():
        print(f"{name}: {value}")
    print(f"plain jobs/s, median: {figures['plain_jobs_per_second']} {figures['plain_range']}")
    print(
        f"fan-out items/s, median: {figures['fanout_items_per_second']} {figures['fanout_range']}"
    )
    print(f"ratio: {figures['ratio']}")


if __name__ == "__main__":
    main()
