"""The app that the harness's workers run; its children write down each start and each end."""

import asyncio
import logging
import os
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Any

import procrastinate
import pydantic

from fanout_procrastinate import (
    Backoff,
    FanOut,
    ItemContext,
    Run,
    TransientError,
    fanout_child,
    fanout_manager,
)
from tests.apps import journal
from tests.chaos import pieces
from tests.chaos.pieces import Piece

QUEUE = "chaos"
LEASE_VARIABLE = "FANOUT_CHAOS_LEASE"
LEASE_SECONDS = 2.0
EXIT_CODE = 99
"""Of a worker that an item or a manager took along."""

# Without a time limit of its own a worker that has lost its listener takes 30 s to end.
app = procrastinate.App(connector=procrastinate.PsycopgConnector(timeout=5.0))
fanout = FanOut(
    app,
    lease=float(os.environ.get(LEASE_VARIABLE, LEASE_SECONDS)),
    time_slice=0.5,
    sweep_cron="* * * * * */3",
    chunk_size=20,
)
log = journal.of_environment()
_PACE_SECONDS = 0.015
"""Between two items of a listing, so that faults find managers at work."""
_soon = Backoff(initial=0.2, maximum=2.0)
_child: dict[str, Any] = {
    "queue": QUEUE,
    "max_attempts": pieces.MAX_ATTEMPTS,
    "max_crashes": pieces.MAX_CRASHES,
    "backoff": _soon,
    "pass_context": True,
}
_manager: dict[str, Any] = {
    "item_key": lambda piece: piece.name,
    # Each execution that a fault ends counts, and each may be hit.
    "max_attempts": 30,
    "backoff": _soon,
}


class _Alarm(logging.Handler):
    """Write down the errors that the library logs where no fault of ours explains them."""

    _EXPECTED = ("callback_failed", "manager_failed", "sweep_failed")

    def emit(self, record: logging.LogRecord) -> None:
        action = getattr(record, "action", "")
        if action not in self._EXPECTED:
            log.write("alarm", action=action, message=self.format(record))


logging.getLogger("fanout_procrastinate").addHandler(_Alarm(logging.ERROR))


class Done(pydantic.BaseModel):
    """A result; the mark is of the try that it is the result of."""

    mark: str
    text: str = ""


class _Try:
    """One try of an item, in the journal."""

    def __init__(self, context: ItemContext, piece: Piece) -> None:
        self.mark = uuid.uuid4().hex
        self._piece = piece
        self._attempt = context.attempt
        self._facts = {
            "run": context.run_id,
            "position": context.position,
            "attempt": context.attempt,
            "claim": getattr(context, "_claim", 0),
            "mark": self.mark,
        }
        self._write("start")

    def end(self) -> Done:
        """Do what the piece says, and write it down before."""
        deed = self._piece.deed
        if deed == "poison" or (deed == "dies once" and log.is_first(self._name("death"))):
            self._write("end", outcome="exit")
            os._exit(EXIT_CODE)
        if deed == "exhausted" or self._attempt <= self._piece.times:
            self._write("end", outcome="transient")
            raise TransientError(f"not yet ({self.mark})", retry_in=0.2)
        if deed in ("permanent", "exits"):
            self._write("end", outcome="permanent")
            raise (ValueError if deed == "permanent" else SystemExit)(self.mark)
        self._write("end", outcome="ok")
        return Done(mark=self.mark, text="a\x00b" if deed == "dirty" else "")

    def _name(self, what: str) -> str:
        return f"{what}-{self._facts['run']}-{self._facts['position']}"

    def _write(self, event: str, **facts: Any) -> None:
        log.write(event, **self._facts, **facts)


def _work(context: ItemContext, piece: Piece) -> Done:
    this = _Try(context, piece)
    time.sleep(pieces.TIME_LIMIT_SECONDS + 1.0 if piece.deed == "overtime" else piece.seconds)
    return this.end()


@fanout_child(app, **_child)
async def work(context: ItemContext, piece: Piece) -> Done:
    this = _Try(context, piece)
    if piece.deed == "blocks":
        time.sleep(LEASE_SECONDS * 1.5)  # noqa: ASYNC251 - on purpose
    await asyncio.sleep(piece.seconds)
    return this.end()


@fanout_child(app, **_child)
def work_in_thread(context: ItemContext, piece: Piece) -> Done:
    return _work(context, piece)


@fanout_child(app, isolate=True, **_child)
def work_apart(context: ItemContext, piece: Piece) -> Done:
    return _work(context, piece)


@fanout_child(app, timeout=pieces.TIME_LIMIT_SECONDS, **_child)
def work_hurried(context: ItemContext, piece: Piece) -> Done:
    return _work(context, piece)


def _list(listing: pieces.Listing, count: int, seed: str, stumble: str) -> Iterator[Piece]:
    log.write("listing", seed=seed)
    for number, piece in enumerate(pieces.pieces(listing, count, seed)):
        if stumble and number == count // 2 and log.is_first(f"stumble-{seed}"):
            if stumble == "dies":
                os._exit(EXIT_CODE)
            raise TransientError("stumbled")
        yield piece


@fanout_manager(app, child=work, **_manager)
async def light(count: int, seed: str, stumble: str) -> AsyncIterator[Piece]:
    for piece in _list("light", count, seed, stumble):
        await asyncio.sleep(_PACE_SECONDS)
        yield piece


@fanout_manager(app, child=work_in_thread, **_manager)
def threads(count: int, seed: str, stumble: str) -> Iterator[Piece]:
    for piece in _list("threads", count, seed, stumble):
        time.sleep(_PACE_SECONDS)
        yield piece


@fanout_manager(app, child=work_apart, **_manager)
def apart(count: int, seed: str, stumble: str) -> Iterator[Piece]:
    return _list("apart", count, seed, stumble)


@fanout_manager(app, child=work_hurried, **_manager)
def hurried(count: int, seed: str, stumble: str) -> list[Piece]:
    return list(_list("hurried", count, seed, stumble))


@fanout_manager(app, child=work, tolerate=pieces.TOLERATED, **_manager)
def intolerant(count: int, seed: str, stumble: str) -> Iterator[Piece]:
    yield from _list("intolerant", count, seed, stumble)


MANAGERS: dict[str, Any] = {
    "light": light,
    "threads": threads,
    "apart": apart,
    "hurried": hurried,
    "intolerant": intolerant,
}


def _tell(run: Run, task: str, event: str) -> None:
    progress = run.closed_progress
    assert progress is not None
    log.write(event, run=run.id, generation=progress.generation, task=task)


async def complete(run: Run) -> None:
    _tell(run, "complete", "call")
    await asyncio.sleep(0.2)
    _tell(run, "complete", "called")


def success(run: Run) -> None:
    _tell(run, "success", "call")
    time.sleep(0.2)
    _tell(run, "success", "called")


async def failure(run: Run) -> None:
    _tell(run, "failure", "call")
    # Looking at the run is what callbacks do.
    await run.errors_async()
    if log.is_first(f"callback-{run.id}"):
        raise PermissionError("a callback that fails once")
    _tell(run, "failure", "called")


for _one in MANAGERS.values():
    _one.on_complete(complete)
    _one.on_success(success)
    _one.on_failure(failure, backoff=_soon)
