"""The example in one command: `python -m examples.llm_limits.demo`.

It starts a PostgreSQL server, the pretended model and worker processes, and ends with what the
model has seen. `--careless` does without the limit.
"""

import argparse
import asyncio
import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from examples import processes
from examples.embedded import EmbeddedPostgres
from examples.llm_limits.service import Service
from fanout_procrastinate import Child, FanOut, Progress

CHECKOUT = Path(__file__).resolve().parents[2]
TIMEOUT_SECONDS = 120.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the example; 0 if every item succeeded."""
    parser = argparse.ArgumentParser(prog="python -m examples.llm_limits.demo")
    parser.add_argument("--items", type=int, default=60, help="questions of each kind")
    parser.add_argument("--processes", type=int, default=3, help="worker processes")
    parser.add_argument("--concurrency", type=int, default=10, help="places of each process")
    parser.add_argument("--seconds", type=float, default=0.1, help="that an answer takes")
    parser.add_argument("--careless", action="store_true", help="ask without the limit")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    for name in [name for name in os.environ if name.startswith("PG")]:
        del os.environ[name]  # they would lead to another server than ours
    print("Starting PostgreSQL, the model and the workers", flush=True)
    with EmbeddedPostgres() as server, Service(at_once=4, seconds=options.seconds) as service:
        os.environ["FANOUT_EXAMPLE_DSN"] = server.conninfo
        os.environ["FANOUT_EXAMPLE_LLM"] = service.url
        progresses = asyncio.run(_work(options))
    for progress in progresses:
        print(f"{progress.name}: {progress.succeeded} of {progress.total} answered")
    print(f"The model was asked by {service.most} at most at the same time")
    print(f"It answered {service.answered} times and refused {service.refused} times")
    return 0 if all(one.succeeded == one.total for one in progresses) else 1


async def _work(options: argparse.Namespace) -> list[Progress]:
    from examples.llm_limits.app import app, careless, review, summarise  # noqa: PLC0415 - the DSN

    async with app.open_async():
        await app.schema_manager.apply_schema_async()
        await FanOut.of(app).apply_schema_async()
        texts = [f"This is question number {number}" for number in range(options.items)]
        with _workers(options):
            children: list[Child[..., int]]
            children = [careless] if options.careless else [summarise, review]
            runs = [await child.map_async(texts) for child in children]
            ended = [await run.wait_async(timeout=TIMEOUT_SECONDS) for run in runs]
        await FanOut.of(app).close_async()
        return ended


@contextlib.contextmanager
def _workers(options: argparse.Namespace) -> Iterator[None]:
    """Worker processes; stopped at the end."""
    command = [
        *(sys.executable, "-m", "procrastinate", "--app=examples.llm_limits.app.app"),
        *("worker", "--queues=llm", f"--concurrency={options.concurrency}"),
    ]
    with tempfile.TemporaryFile() as log:
        started = [
            processes.spawn(command, output=log.fileno(), directory=CHECKOUT)
            for _ in range(options.processes)
        ]
        try:
            yield
        finally:
            processes.stop(started, signal.SIGTERM, seconds_each=5.0)


if __name__ == "__main__":
    sys.exit(main())
