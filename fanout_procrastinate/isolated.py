"""Isolated children, their own process: it finds the child, works on items, and tells how it was.

What goes over is text. The item is loaded here by the child's codec; the outcome is classed,
described and encoded here, so that no object of the user's has to be pickled.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import dataclasses
import faulthandler
import functools
import importlib
import inspect
import json
import logging
import operator
import re
import resource
import runpy
import socket
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from fanout_procrastinate import (
    child,
    children,
    codec,
    context,
    errors,
    execution,
    isolation,
    limits,
    outcomes,
    permits,
    processes,
    sanitise,
    settings,
    store,
)

_MAIN = "__mp_main__"  # the name that multiprocessing has made known


class Line:
    """The socket to the worker: requests come in, outcomes go out, questions wait for an answer."""

    def __init__(self, talk: socket.socket) -> None:
        self._talk = talk
        self._lock = threading.Lock()
        self._answers = False

    def receive(self) -> processes.Message | None:
        """Return the next message; `None` when the worker is gone."""
        header = self._read(processes.HEADER.size)
        body = header and self._read(*processes.HEADER.unpack(header))
        return dict(json.loads(body)) if body else None

    def begin(self) -> None:
        """Tell that the time limit begins to count; from now on questions are answered."""
        self._send({"begun": True})
        self._answers = True

    def end(self, columns: Mapping[str, Any], reusable: bool) -> None:
        """Tell the outcome; from now on nobody answers."""
        with self._lock:
            self._answers = False
            self._send({"end": columns, "reusable": reusable})

    def ask(self, question: str, **about: Any) -> Any:
        """Ask the worker, from any thread.

        Raises:
            DatabaseError: it could not find out.
            RuntimeError: the item is over.
        """
        with self._lock:
            if not self._answers:
                raise RuntimeError("the item is over, and its context with it")
            self._send({"ask": question, "about": about})
            answer = self.receive()
        if answer is None or "error" in answer:
            text = "the worker is gone" if answer is None else answer["error"]
            raise errors.DatabaseError(text, transient=True)
        return answer["answer"]

    def _send(self, message: processes.Message) -> None:
        data = json.dumps(message, default=repr).encode()
        with contextlib.suppress(OSError):  # the worker is gone, as the next reading tells
            self._talk.sendall(processes.HEADER.pack(len(data)) + data)

    def _read(self, size: int) -> bytes | None:
        found = bytearray()
        while len(found) < size:
            try:
                data = self._talk.recv(size - len(found))
            except OSError:
                return None
            if not data:
                return None
            found += data
        return bytes(found)


class Permits:
    """The permits of an isolated item: the worker takes, renews and gives them."""

    lease = 30.0  # the worker puts its own in the place of it
    poll_seconds = 0.25

    def __init__(self, line: Line) -> None:
        self._line = line

    def run(self, call: store.Call[Any]) -> Any:
        """Have the worker run a call."""
        return call.parse(self._line.ask("permit", name=call.name, params=dict(call.params)))

    async def run_async(self, call: store.Call[Any]) -> Any:
        """Have the worker run a call, without blocking the loop."""
        return await asyncio.to_thread(self.run, call)

    def pause(self, limit: limits.Limit, seconds: float) -> None:
        """Let nothing begin with a limit for so long."""
        self.run(store.pause_limit(limit.spec(), seconds))

    async def pause_async(self, limit: limits.Limit, seconds: float) -> None:
        """Let nothing begin with a limit for so long."""
        await self.run_async(store.pause_limit(limit.spec(), seconds))

    def is_lost(self, permit: permits.Permit) -> bool:
        """Return whether a permit is held no more."""
        return bool(self._line.ask("permit_lost", holder=permit.holder))

    def begin(self, permit: permits.Permit, wake: Callable[[], None]) -> None:
        """Do nothing: nobody is woken here, so that the poll is shorter."""

    def watch(self, permit: permits.Permit) -> None:
        """Do nothing; see `begin`."""

    def hold(self, permit: permits.Permit) -> None:
        """Do nothing: the worker renews what it has taken for us."""

    def end(self, permit: permits.Permit) -> None:
        """Do nothing: the worker sees what we give back."""


class Context(context.ItemContext):
    """The context of an isolated item: what it has to look up, it asks the worker."""

    def __init__(self, line: Line, **facts: Any) -> None:
        super().__init__(**facts, _permits=Permits(line))
        self._line = line

    def should_stop(self) -> bool:
        """Return whether to end soon; see `ItemContext.should_stop`."""
        return bool(self._line.ask("should_stop"))

    def still_mine(self) -> bool:
        """Return whether an outcome would be recorded; see `ItemContext.still_mine`."""
        return bool(self._line.ask("still_mine"))

    def log(self, message: str, **data: Any) -> None:
        """Log a line with the item's ids, in the worker."""
        self._line.ask("log", message=message, data=sanitise.plain(data))

    def progress(self, fraction: float) -> None:
        """Show how far this item is; see `ItemContext.progress`."""
        self._line.ask("progress", fraction=context.checked_fraction(fraction))


@dataclasses.dataclass(eq=False, kw_only=True)
class Item:
    """One try of one item.

    Args:
        request: ``address`` of the child, ``payload`` as stored, ``attempt``, ``context`` (facts
            of the item), ``max_result_bytes``; of the options what holds while the child is not
            found, ``max_attempts`` and ``backoff``; of the worker ``log_level`` and ``django``.
        line: to the worker.
        runner: runs async children.
    """

    request: processes.Message
    line: Line
    runner: asyncio.Runner

    def work(self) -> None:
        """Work on it, and tell the outcome."""
        attempt = self.request["attempt"]
        work = self._work(None)
        try:
            work = self._work(find(self.request))
            args = self._args(work)
            _log_to_stderr(self.request["log_level"])
        except BaseException as exc:  # noqa: BLE001 - modules and validators are the user's code
            # Half an import may be left; an item that no longer fits leaves nothing.
            reusable = isinstance(exc, errors.PermanentError)
            self.line.end(work.failure(exc, attempt), reusable=reusable)
            return
        limit = work.options.memory_limit
        inside = contextvars.copy_context()  # nothing of it is seen by the next item
        inside.run(limits.in_use.set, Permits(self.line))
        self.line.begin()
        with memory_limited(limit):
            end = _call(work.function, args, self.runner, inside)
        error = end.error if isinstance(end, execution.Raised) else None
        if isinstance(error, MemoryError) and limit is not None and not error.args:
            error.args = (f"its memory limit of {limit} bytes was reached",)
        reusable = not isinstance(error, MemoryError)
        self.line.end(work.outcome_of(end, attempt), reusable)

    def _work(self, declared: children.Child[..., Any] | None) -> child.Work:
        request = self.request
        if declared is None:
            backoff = outcomes.Backoff(**request["backoff"])
            options = settings.ChildOptions(max_attempts=request["max_attempts"], backoff=backoff)
            function, items = _not_found, codec.Codec()
        else:
            options, function, items = declared.options, declared.function, declared.item_codec
        return child.Work(
            function=function,
            options=options,
            items=items,
            results=items if declared is None else declared.result_codec,
            max_result_bytes=request["max_result_bytes"],
        )

    def _args(self, work: child.Work) -> list[Any]:
        args = [work.load(self.request["payload"])]
        if work.options.pass_context:
            facts = self.request["context"]
            args.insert(0, Context(self.line, attempt=self.request["attempt"], **facts))
        return args


def find(request: processes.Message) -> children.Child[..., Any]:
    """Return the child at the address of a request; import its module where it is not yet.

    Raises:
        ConfigurationError: there is no such child.
    """
    if request["django"]:
        _set_up_django()
    address = isolation.Address(**request["address"])
    main = None if address.main is None else tuple(address.main)
    # What was started has another name here, and so have its children that were given none.
    names = {address.name, re.sub("^__main__[.]", f"{_MAIN}.", address.name)}
    for name in dict.fromkeys((address.declared_in, address.module)):
        module = _load_main(*main) if name == "__main__" and main else importlib.import_module(name)
        for value in (*vars(module).values(), _attribute(module, address.qualname)):
            # Not isinstance, which would wake up lazy objects.
            if issubclass(type(value), children.Child) and _declared_name(value) in names:
                found: children.Child[..., Any] = value
                return found
    raise errors.ConfigurationError(
        f"the child {address.name} is not to be found in {address.declared_in}; keep what "
        "fanout_child returns under a name of that module"
    )


def _declared_name(value: children.Child[..., Any]) -> str | None:
    """Return the name that an isolated child was declared with, whatever its namespace."""
    return None if value.address is None else value.address.name


def _attribute(module: types.ModuleType, qualname: str) -> Any:
    try:
        return operator.attrgetter(qualname)(module)
    except AttributeError:
        return None


@functools.cache
def _load_main(how: str, what: str) -> types.ModuleType:
    """Run what the worker was started as under another name, as multiprocessing does."""
    module = types.ModuleType(_MAIN)
    run: Callable[..., dict[str, Any]] = runpy.run_module if how == "module" else runpy.run_path
    module.__dict__.update(run(what, run_name=_MAIN))
    sys.modules[_MAIN] = sys.modules["__main__"] = module
    return module


@functools.cache
def _set_up_django() -> None:
    importlib.import_module("django").setup()


@functools.cache
def _log_to_stderr(level: int) -> None:
    logging.basicConfig(level=level)  # nothing where the child's module has set up its own


def _not_found(item: Any) -> None:
    raise AssertionError("never called")


@contextlib.contextmanager
def memory_limited(limit: int | None) -> Iterator[None]:
    """Let this process have so many bytes of memory, all in all, while the block runs."""
    if limit is None:
        yield
        return
    # What is its own and writable (Linux); elsewhere all that is mapped.
    kind = resource.RLIMIT_DATA if sys.platform == "linux" else resource.RLIMIT_AS
    soft, hard = resource.getrlimit(kind)
    bounded = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(kind, (bounded, hard))
    try:
        yield
    finally:
        resource.setrlimit(kind, (soft, hard))


def _call(
    function: Callable[..., Any],
    args: list[Any],
    runner: asyncio.Runner,
    inside: contextvars.Context,
) -> execution.Returned | execution.Raised:
    try:
        if inspect.iscoroutinefunction(function):
            return runner.run(_awaited(function, args), context=inside)
        return execution.Returned(inside.run(function, *args))
    except BaseException as exc:  # noqa: BLE001 - SystemExit of user code is an outcome
        return execution.Raised(exc)


async def _awaited(
    function: Callable[..., Any], args: list[Any]
) -> execution.Returned | execution.Raised:
    try:
        return execution.Returned(await function(*args))
    except BaseException as exc:  # noqa: BLE001 - as above; it would break through the loop
        return execution.Raised(exc)


def main(talk: socket.socket) -> None:
    """Work on one item after the other, until the worker is gone."""
    faulthandler.enable()  # a segmentation fault says where it was
    line, runner = Line(talk), asyncio.Runner()
    while (request := line.receive()) is not None:
        Item(request=request, line=line, runner=runner).work()
