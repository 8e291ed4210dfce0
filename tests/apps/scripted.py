"""An app whose items say what their child does: sleep, fail, block, or take its process along."""

import asyncio
import contextvars
import os
import resource
import threading
import time
from pathlib import Path
from typing import Any

import procrastinate
import pydantic

from fanout_procrastinate import (
    Backoff,
    FanOut,
    ItemContext,
    PermanentError,
    Run,
    TransientError,
    fanout_child,
    fanout_manager,
)
from tests.apps import journal

QUEUE = "scripted"
LEASE_VARIABLE = "FANOUT_TEST_LEASE"
LEASE_SECONDS = 2.0
SWEEP_VARIABLE = "FANOUT_TEST_SWEEP"
EACH_SECOND = "* * * * * */1"
EACH_MINUTE = "* * * * *"
NEVER = "0 0 1 1 *"
CHUNK_VARIABLE = "FANOUT_TEST_CHUNK"
CHUNK_SIZE = 10
KILLED = 137

app = procrastinate.App(connector=procrastinate.PsycopgConnector())
fanout = FanOut(
    app,
    lease=float(os.environ.get(LEASE_VARIABLE, LEASE_SECONDS)),
    sweep_cron=os.environ.get(SWEEP_VARIABLE, EACH_SECOND),
    chunk_size=int(os.environ.get(CHUNK_VARIABLE, CHUNK_SIZE)),
)
log = journal.of_environment()
ambient: contextvars.ContextVar[str] = contextvars.ContextVar("ambient", default="")


exiting = threading.Event()
"""This process ends when the run is closed."""


class Step(pydantic.BaseModel):
    """What one item does, in this order; times are in seconds."""

    name: str
    barrier: int = 0
    """Wait until so many items of the run are at work, then go on with them in one instant."""
    blocks: float = 0.0
    """Block the event loop."""
    sleep: float = 0.0
    exits: int = 0
    """Take the whole process along, so many times."""
    exits_at_close: bool = False
    """End, and take the process along as soon as the run is closed."""
    fails: int = 0
    """Raise a transient error at so many tries."""
    retry_in: float = 0.2
    broken: bool = False
    """Raise a permanent error."""


def _start(context: ItemContext, step: Step) -> None:
    log.write(
        "start",
        run=context.run_id,
        item=step.name,
        attempt=context.attempt,
        ambient=ambient.get(),
    )


def _end(context: ItemContext, step: Step) -> str:
    if any(log.is_first(f"exit-{context.run_id}-{step.name}-{n}") for n in range(step.exits)):
        os._exit(KILLED)
    if step.exits_at_close:
        exiting.set()
        threading.Thread(target=_exit_at_close, args=[context.run_id], daemon=True).start()
    if context.attempt <= step.fails:
        raise TransientError("not yet", retry_in=step.retry_in)
    if step.broken:
        raise PermanentError("broken")
    log.write("end", run=context.run_id, item=step.name, attempt=context.attempt)
    return step.name


def _exit_at_close(run_id: int) -> None:
    with fanout.connect() as connection:
        connection.autocommit = True
        while not connection.execute(
            "SELECT FROM fanout_closes WHERE run_id = %s", [run_id]
        ).fetchall():
            pass
    os._exit(KILLED)


async def _rendezvous(name: str, count: int) -> None:
    log.arrive(name)
    # No event: the others are in other processes.
    while (found := log.arrived(name))[0] < count:  # noqa: ASYNC110
        await asyncio.sleep(0.002)
    await asyncio.sleep(max(0.0, found[1] + 0.02 - time.time()))


@fanout_child(
    app, queue=QUEUE, max_attempts=3, pass_context=True, backoff=Backoff(initial=0.2, jitter=0.0)
)
async def work(context: ItemContext, step: Step) -> str:
    _start(context, step)
    if step.barrier:
        await _rendezvous(f"barrier-{context.run_id}", step.barrier)
    time.sleep(step.blocks)  # noqa: ASYNC251 - on purpose
    await asyncio.sleep(step.sleep)
    return _end(context, step)


@fanout_child(app, queue=QUEUE, max_attempts=3, pass_context=True)
def work_in_thread(context: ItemContext, step: Step) -> str:
    _start(context, step)
    time.sleep(step.sleep)
    return _end(context, step)


@fanout_child(
    app, queue=QUEUE, max_attempts=2, timeout=0.3, backoff=Backoff(initial=0.2, jitter=0.0)
)
async def endless(name: str) -> None:
    await asyncio.Event().wait()


@fanout_manager(app, child=work, item_key=lambda step: step.name)
def steps(steps: list[dict[str, Any]], callback: str = "") -> Any:
    for step in steps:
        yield Step(**step)


@fanout_manager(app, child=work_in_thread)
def steps_in_thread(steps: list[dict[str, Any]]) -> Any:
    return [Step(**step) for step in steps]


@steps.on_complete
async def closed(run: Run) -> None:
    progress = run.closed_progress
    log.write(
        "closed",
        run=run.id,
        generation=progress.generation,
        status=progress.status,
        succeeded=progress.succeeded,
        failed=progress.failed,
        total=progress.total,
    )
    if run.args["callback"] == "dies" and log.is_first(f"callback-{run.id}"):
        os._exit(KILLED)
    if exiting.is_set():
        await asyncio.sleep(60)  # the process goes before it has told anything
    log.write("told", run=run.id, generation=progress.generation)


@steps.on_success
def succeeded(run: Run) -> None:
    log.write("success", run=run.id)


@steps.on_failure
def failed(run: Run) -> None:
    log.write("failure", run=run.id, errors=[group.message for group in run.errors()])


@fanout_manager(
    app, child=work, item_key=lambda step: step.name, backoff=Backoff(initial=0.2, jitter=0.0)
)
def stumbling(count: int, stumbles_at: int, how: str, always: bool = False) -> Any:
    """List so many items; stumble before the one of this number (past the last: at the end)."""
    for number in range(count + 1):
        if number == stumbles_at:
            _stumble(f"manager-{count}-{stumbles_at}-{how}", how, always)
        if number < count:
            yield Step(name=str(number))


def _stumble(name: str, how: str, always: bool) -> None:
    log.write("listing", name=name)
    if not always and not log.is_first(name):
        return
    if how == "waits":
        while not log.arrived("go")[0]:
            time.sleep(0.01)
        return
    if how == "dies":
        os._exit(KILLED)
    raise (PermanentError if how == "gives up" else TransientError)("stumbled")


@app.task(queue=QUEUE)
def unrelated(name: str) -> None:
    log.write("unrelated", name=name)


@fanout_child(app, queue=QUEUE)
async def start_more(name: str) -> int:
    ambient.set(name)
    await unrelated.defer_async(name=name)
    run = await steps.defer_async(steps=[{"name": "x"}, {"name": "y"}], callback="")
    log.write("nested", run=run.id, name=name)
    return run.id


@fanout_manager(app, child=start_more)
def nest(count: int) -> Any:
    return [str(number) for number in range(count)]


class Record(pydantic.BaseModel):
    """An item of four fields, some 250 bytes of JSON."""

    number: int
    path: str
    tags: list[str]
    notes: dict[str, str]


@fanout_child(app, queue=QUEUE)
async def measure(record: Record) -> int:
    return record.number


@fanout_manager(app, child=measure, item_key=lambda record: str(record.number))
def records(count: int) -> Any:
    """List so many records, and tell by how many bytes this process grew meanwhile, at most."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    before = pages * resource.getpagesize()
    for number in range(count):
        yield Record(
            number=number,
            path=f"/archive/{number:020d}/document.pdf",
            tags=["a", "b"],
            notes={"text": "x" * 120},
        )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    log.write("listed", count=count, growth=peak - before)
