"""An app whose children have processes of their own, and do to them what an item says."""

import asyncio
import contextlib
import ctypes
import logging
import os
import resource
import signal
import subprocess
import sys
import time
from typing import Any

import procrastinate
import pydantic

from fanout_procrastinate import (
    Backoff,
    FanOut,
    ItemContext,
    PermanentError,
    TransientError,
    fanout_child,
    fanout_manager,
)
from tests.apps import journal

QUEUE = "isolated"
LEASE_SECONDS = 30.0
LIMIT_SECONDS = 1.0
MEMORY_LIMIT = 512 * 2**20

app = procrastinate.App(connector=procrastinate.PsycopgConnector())
fanout = FanOut(app, lease=LEASE_SECONDS)
log = journal.of_environment()


class Deed(pydantic.BaseModel):
    """What an item has done; `first_only`: at its first try."""

    name: str
    what: str = ""
    number: float = 0.0
    text: str = ""
    first_only: bool = False


class Stubborn(Exception):
    """Cannot be pickled, nor turned into text."""

    def __init__(self, one: Any, two: Any) -> None:
        super().__init__(lambda: one)
        self.status_code = 503
        self.response = Response()

    def __str__(self) -> str:
        raise RuntimeError("no text either")


class Response:
    headers = {"Retry-After": "0.05"}  # noqa: RUF012


class Unlucky(Exception):
    """Declared permanent."""


def _segfault(deed: Deed) -> None:
    ctypes.string_at(0)


def _exit(deed: Deed) -> None:
    os._exit(int(deed.number))


def _allocate(deed: Deed) -> str:
    return "x" * (2 * MEMORY_LIMIT)


def _spin(deed: Deed) -> None:
    while True:
        pass


def _hold_the_interpreter(deed: Deed) -> None:
    """Stay in C with the GIL held, and signals left alone."""
    ctypes.PyDLL(None).usleep(ctypes.c_uint(0))
    signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals) - {signal.SIGKILL})
    ctypes.PyDLL(None).pause()


def _start_others(deed: Deed) -> None:
    other = subprocess.Popen(["sleep", "600"])  # noqa: S607
    log.write("started", name=deed.name, other=other.pid)
    time.sleep(600)


def _wait(deed: Deed) -> None:
    while not log.arrived(deed.text)[0]:
        time.sleep(0.05)


def _warn(deed: Deed) -> None:
    logging.getLogger("papers").warning(deed.text)


def _scribble(deed: Deed) -> None:
    """Write into whatever is open, as damaged memory may do."""
    for descriptor in range(3, 100):
        with contextlib.suppress(OSError):
            os.write(descriptor, b"\0\0\0\7garbage")
    os._exit(1)


def _limit(deed: Deed) -> int:
    return resource.getrlimit(resource.RLIMIT_DATA)[0]


def _leave_a_fork(deed: Deed) -> None:
    """Die, and leave somebody in a session of his own who holds all that we had open."""
    if os.fork() == 0:
        os.setsid()
        time.sleep(3)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)


def _raise(deed: Deed) -> None:
    kinds: dict[str, BaseException] = {
        "stubborn": Stubborn(1, 2),
        "unlucky": Unlucky("as declared"),
        "permanent": PermanentError("for good"),
        "transient": TransientError("not yet", retry_in=0.05),
        "value": ValueError("wrong"),
        "exit": SystemExit(3),
        "interrupt": KeyboardInterrupt(),
        "cancelled": asyncio.CancelledError(),
        "connection": ConnectionError("away"),
    }
    raise kinds[deed.text]


DEEDS = {
    "segfault": _segfault,
    "exit": _exit,
    "allocate": _allocate,
    "spin": _spin,
    "hold the interpreter": _hold_the_interpreter,
    "start others": _start_others,
    "wait": _wait,
    "warn": _warn,
    "scribble": _scribble,
    "limit": _limit,
    "leave a fork": _leave_a_fork,
    "raise": _raise,
    "sleep": lambda deed: time.sleep(deed.number),
    "big": lambda deed: "x" * int(deed.number),
    "object": lambda deed: object(),
    "pid": lambda deed: os.getpid(),
    "": lambda deed: deed.name,
}


def _does(context: ItemContext, deed: Deed) -> Any:
    log.write("start", run=context.run_id, item=deed.name, attempt=context.attempt)
    if deed.first_only and context.attempt > 1:
        return deed.name
    return DEEDS[deed.what](deed)


OPTIONS: Any = {
    "queue": QUEUE,
    "isolate": True,
    "max_attempts": 2,
    "backoff": Backoff(initial=0.05, maximum=0.05, jitter=0.0),
    "permanent": [Unlucky],
    "pass_context": True,
}


@fanout_child(app, timeout=LIMIT_SECONDS, memory_limit=MEMORY_LIMIT, **OPTIONS)
def act(context: ItemContext, deed: Deed) -> Any:
    try:
        return _does(context, deed)
    finally:
        log.write("end", run=context.run_id, item=deed.name)


@fanout_child(app, timeout=60, **OPTIONS)
def act_unhurried(context: ItemContext, deed: Deed) -> Any:
    return _does(context, deed)


@fanout_child(app, timeout=60, **OPTIONS)
async def act_async(context: ItemContext, deed: Deed) -> Any:
    await asyncio.sleep(0)
    return _does(context, deed)


@fanout_child(app, **OPTIONS | {"pass_context": False, "max_attempts": 1})
async def echo(deed: Deed) -> Deed:
    return deed.model_copy(update={"number": len(deed.text)})


@fanout_child(app, timeout=60, **OPTIONS)
def look(context: ItemContext, deed: Deed) -> dict[str, Any]:
    """Tell what the context tells, once the test has set the stage."""
    while deed.what and not log.arrived(deed.what)[0]:
        time.sleep(0.01)
    context.log("looked", name=deed.name)
    return {
        "run_id": context.run_id,
        "position": context.position,
        "key": context.key,
        "attempt": context.attempt,
        "run_args": context.run_args,
        "should_stop": context.should_stop(),
        "still_mine": context.still_mine(),
        "pid": os.getpid(),
    }


@fanout_manager(app, child=look, item_key=lambda deed: deed.name)
def looks(names: list[str], what: str = "") -> Any:
    return [Deed(name=name, what=what) for name in names]


@fanout_child(app, timeout=60, **OPTIONS)
def advance(context: ItemContext, deed: Deed) -> str:
    """Tell how far it is, and what it is told where that cannot be."""
    context.progress(0.5)
    try:
        context.progress(2)
    except ValueError as exc:
        return str(exc)
    return ""


under_another_name = fanout_child(app, **OPTIONS | {"name": "other", "pass_context": False})


def _plain(deed: Deed) -> str:
    return f"{deed.name} in {sys._getframe().f_code.co_name}"


renamed = under_another_name(_plain)


class Inside:
    @staticmethod
    @fanout_child(app, **OPTIONS)
    def inner(context: ItemContext, deed: Deed) -> str:
        return deed.name
