"""Show the fan-out from nothing: `python -m examples.extract_papers.demo [FOLDER]`.

Starts a PostgreSQL server of its own and worker processes, reads all PDF files of the folder, and
takes everything down again.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

import procrastinate

from examples import processes
from examples.embedded import EmbeddedPostgres, EmbeddedPostgresError
from fanout_procrastinate import FanOut, Progress, Run

from . import report
from .display import Display

CHECKOUT = Path(__file__).resolve().parents[2]
PAPERS = Path(__file__).with_name("papers")
REPORTS = ("report.html", "results.jsonl")
CLOSED = ("completed", "failed", "cancelled")
POLL_SECONDS = 0.2
REPORT_SECONDS = 30.0
STOP_SECONDS = 10.0


class DemoError(Exception):
    """Raised when the demonstration cannot go on; the message is for the person who runs it."""


@dataclasses.dataclass(frozen=True)
class Worker:
    """A worker process and where it writes its log."""

    process: subprocess.Popen[bytes]
    log: Path


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demonstration; 0 if the run completed, 1 if not, 2 if it could not be tried."""
    options = _options(arguments)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)
    try:
        return _demonstrate(options, Display())
    except (DemoError, EmbeddedPostgresError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("demo: interrupted; the server and the workers are gone", file=sys.stderr)
        return 130


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="demo", description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=PAPERS, help="with PDF files")
    parser.add_argument("--out", type=Path, default=Path("build/extract_papers"), metavar="DIR")
    parser.add_argument("--processes", type=_positive, default=2, metavar="N")
    parser.add_argument("--concurrency", type=_positive, default=4, metavar="N", help="per process")
    options = parser.parse_args(arguments)
    if not options.folder.is_dir():
        parser.error(f"no such folder: {options.folder}")
    options.folder, options.out = options.folder.resolve(), options.out.resolve()
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        for name in REPORTS:
            (options.out / name).unlink(missing_ok=True)
    except OSError as error:
        parser.error(f"cannot write to {options.out}: {error.strerror}")
    return options


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"not a positive number: {text}")
    return int(text)


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    """Turn a signal into an orderly end, through all `with` blocks."""
    sys.exit(128 + number)


def _demonstrate(options: argparse.Namespace, display: Display) -> int:
    for name in [name for name in os.environ if name.startswith("PG")]:
        del os.environ[name]  # they would lead to another server than ours
    display.say("Starting PostgreSQL and the workers")
    with EmbeddedPostgres() as server:
        os.environ["FANOUT_EXAMPLE_DSN"] = server.conninfo
        from .app import app, extract_folder, path_to_text  # noqa: PLC0415 - reads the DSN

        async def trigger() -> Run:
            folder, output = path_to_text(options.folder), path_to_text(options.out)
            return await extract_folder.defer_async(folder=folder, output=output)

        asyncio.run(_apply_schemas(app))
        with _workers(options) as workers:
            progress = asyncio.run(_follow(app, trigger, options, display, workers))
    display.last_line(progress)
    return 0 if progress.status == "completed" else 1


async def _apply_schemas(app: procrastinate.App) -> None:
    async with app.open_async():
        await app.schema_manager.apply_schema_async()
        await FanOut.of(app).apply_schema_async()


@contextlib.contextmanager
def _workers(options: argparse.Namespace) -> Iterator[list[Worker]]:
    """Worker processes, each with a log file; stopped at the end."""
    command = [
        *(sys.executable, "-m", "procrastinate", "--app=examples.extract_papers.app.app"),
        *("worker", "--queues=papers", f"--concurrency={options.concurrency}"),
    ]
    workers: list[Worker] = []
    try:
        for number in range(1, options.processes + 1):
            log = options.out / f"worker-{number}.log"
            with log.open("wb") as output:
                process = processes.spawn(command, output=output.fileno(), directory=CHECKOUT)
            workers.append(Worker(process, log))
        yield workers
    finally:
        children = [worker.process for worker in workers]
        processes.stop(children, signal.SIGTERM, seconds_each=STOP_SECONDS)


async def _follow(
    app: procrastinate.App,
    trigger: Callable[[], Awaitable[Run]],
    options: argparse.Namespace,
    display: Display,
    workers: Sequence[Worker],
) -> Progress:
    async with app.open_async():
        run = await trigger()
        with display.live():
            progress = await _until(_closed, run, display, workers)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REPORT_SECONDS):
                    progress = await _until(_called_back, run, display, workers)
        rows = [report.row_of(item) async for item in run.items()]
    if not rows:
        display.say(f"There is no *.pdf below {options.folder}")
    display.results(rows)
    if progress.reason:
        display.say(f"Reason: {progress.reason}")
    for name in REPORTS:
        written = (options.out / name).exists()
        missing = "" if written else f" was not written, see {workers[0].log}"
        display.say(f"Report: {options.out / name}{missing}")
    return progress


async def _until(
    reached: Callable[[Progress], bool], run: Run, display: Display, workers: Sequence[Worker]
) -> Progress:
    while True:
        progress = await run.progress_async()
        display.update(progress)
        if reached(progress):
            return progress
        if all(worker.process.poll() is not None for worker in workers):
            raise DemoError(f"all workers have ended, see {workers[0].log}")
        await asyncio.sleep(POLL_SECONDS)


def _closed(progress: Progress) -> bool:
    return progress.status in CLOSED


def _called_back(progress: Progress) -> bool:
    return all(state in ("done", "failed") for state in progress.callbacks.values())


if __name__ == "__main__":
    sys.exit(main())
