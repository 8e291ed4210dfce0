"""Isolated children, the worker's side: a process for each place, and what goes to and fro.

The processes are forked from one that has a single thread and this library loaded (`forking`); in
each of them works `isolated`. Every process has two sockets of its own and shares nothing, so that
its death, at whatever moment, cannot touch another. Pools with a common pipe cannot promise that:
with pebble 5.2 a process that dies while it holds the pipe's lock stops all others, and the future
of one that calls ``os._exit(0)`` never ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from fanout_procrastinate import errors, execution

logger = logging.getLogger(__name__)

READY_SECONDS = 120.0
"""For loading the child's module and the item, before the time limit begins to count."""

HEADER = struct.Struct(">I")
"""Before each message: how many bytes of JSON follow."""

_END_SECONDS = 5.0
_CHUNK_BYTES = 1 << 18
_FORKING = (
    "import json, sys; control = int(sys.argv[1]); "
    "sys.path[:], sys.argv[:] = json.loads(sys.argv[2]); "
    "from fanout_procrastinate import forking; forking.main(control)"
)

Message = dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where another process finds a child again.

    Args:
        name: of its task, as declared.
        declared_in: the module that was being imported, where that is known.
        module: of the function.
        qualname: of the function.
        main: what was started, for what stands in ``__main__``: ``["module", its name]`` or
            ``["path", its file]``.
    """

    name: str
    declared_in: str
    module: str
    qualname: str
    main: tuple[str, str] | None = None

    @classmethod
    def of(cls, function: Callable[..., Any], name: str, namespace: Mapping[str, Any]) -> Address:
        """Return the address of a child about to be declared.

        Args:
            function: the user's.
            name: of its task.
            namespace: what stands around the declaration.

        Raises:
            ConfigurationError: no other process can find it, or there can be none.
        """
        if not hasattr(os, "fork") or not hasattr(socket, "send_fds"):
            raise errors.ConfigurationError(
                "isolate=True needs a POSIX system, for it forks; leave it out here"
            )
        module = getattr(function, "__module__", None) or ""
        qualname = getattr(function, "__qualname__", "")
        if "<" in qualname:
            raise errors.ConfigurationError(
                f"isolate=True: another process cannot find {qualname}; define the child with "
                "def at the top level of a module"
            )
        declared_in = namespace.get("__name__") or namespace.get("__module__") or module
        main = _main() if "__main__" in (module, declared_in) else None
        return cls(name=name, declared_in=declared_in, module=module, qualname=qualname, main=main)


def _main() -> tuple[str, str]:
    started = sys.modules["__main__"]
    if started.__spec__ is not None:
        return ("module", started.__spec__.name)
    path = getattr(started, "__file__", None)
    if path is None:
        raise errors.ConfigurationError(
            "isolate=True: another process cannot find what was typed into this one; define the "
            "child in a module"
        )
    return ("path", os.path.abspath(path))


class Process:
    """One process for isolated children, as the worker sees it; belongs to one event loop.

    Args:
        talk: to the process: requests, questions, outcomes.
        life: to what forked it, which says its pid and its end, and ends it when asked to.
    """

    def __init__(self, talk: socket.socket, life: socket.socket) -> None:
        self.pid: int | None = None
        self.exit_code: int | None = None
        self.gone = asyncio.Event()
        self.used = False
        self._talk = talk
        self._life = life
        self._received = bytearray()
        self._news = b""
        self._loop = asyncio.get_running_loop()
        for one in (talk, life):
            one.setblocking(False)
        self._loop.add_reader(life, self._on_news)

    async def send(self, message: Message) -> bool:
        """Send a message; return whether the process was there to take it."""
        data = json.dumps(message, default=repr).encode()
        try:
            await self._loop.sock_sendall(self._talk, HEADER.pack(len(data)) + data)
        except OSError:
            return False
        return True

    async def receive(self) -> Message | None:
        """Return the next message; `None` when there will be none, for the process died."""
        header = await self._read(HEADER.size)
        body = header and await self._read(*HEADER.unpack(header))
        try:
            return dict(json.loads(body)) if body else None
        except ValueError:  # its memory was damaged before it died
            return None

    def end(self) -> None:
        """Have the process ended at once, with all that it has started."""
        with contextlib.suppress(OSError):
            self._life.send(b"e")

    async def ended(self) -> None:
        """Have the process ended, and wait until it is."""
        self.end()
        try:
            async with asyncio.timeout(_END_SECONDS):
                await self.gone.wait()
        except TimeoutError:
            logger.warning(
                "A child process does not end", extra={"action": "child_process_stays", "pid": self.pid}
            )
        finally:
            self.close()

    def hang_up(self) -> None:
        """Let the process end by itself, for it is idle."""
        self._talk.close()

    def close(self) -> None:
        """Close the sockets; the process is ended if it is still there."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.remove_reader(self._life)
        self._life.close()
        self._talk.close()

    async def _read(self, size: int) -> bytes | None:
        while len(self._received) < size:
            try:
                data = await self._loop.sock_recv(self._talk, _CHUNK_BYTES)
            except OSError:
                return None
            if not data:
                return None
            self._received += data
        taken = bytes(self._received[:size])
        del self._received[:size]
        return taken

    def _on_news(self) -> None:
        try:
            data = self._life.recv(_CHUNK_BYTES)
        except OSError:
            data = b""
        *lines, self._news = (self._news + data).split(b"\n")
        for line in lines:
            what, _, number = line.decode().partition(" ")
            if what == "pid":
                self.pid = int(number)
            else:
                self.exit_code = int(number)
        if not data:
            self._loop.remove_reader(self._life)
            # What it has sent can still be read. Something that it has forked may hold its end.
            with contextlib.suppress(OSError):
                self._talk.shutdown(socket.SHUT_RD)
            self.gone.set()


class Pool:
    """The processes of one event loop: as many as there were isolated children at the same time.

    They are started when needed, used again, and gone when this process is.
    """

    def __init__(self) -> None:
        self._forking: _Forking | None = None
        self._idle: list[Process] = []

    def take(self, *, fresh: bool = False) -> Process:
        """Return an idle process or a new one.

        Raises:
            OSError: the system has no room for another.
        """
        while self._idle and not fresh:
            process = self._idle.pop()
            if not process.gone.is_set():
                return process
            process.close()
        if self._forking is None or self._forking.is_over():
            return self._begin_forking().fork()
        try:
            return self._forking.fork()
        except ConnectionError:  # it died a moment ago
            return self._begin_forking().fork()

    def give_back(self, process: Process) -> None:
        """Keep a process for the next item."""
        process.used = True
        self._idle.append(process)

    def _begin_forking(self) -> _Forking:
        if self._forking is not None:
            self._forking.close()
        self._forking = _Forking()
        return self._forking

    def close(self) -> None:
        """End all processes, and wait until they are gone."""
        for process in self._idle:
            process.hang_up()
        if self._forking is not None:
            self._forking.close()
            self._forking = None
        for process in self._idle:
            process.close()
        self._idle.clear()


class _Forking:
    """The process that forks the others: `forking`."""

    def __init__(self) -> None:
        with contextlib.ExitStack() as on_error:
            self._control, theirs = socket.socketpair()
            on_error.push(self._control)
            with theirs:
                self._program = _start(theirs.fileno())
            on_error.pop_all()

    def is_over(self) -> bool:
        return self._program.poll() is not None

    def fork(self) -> Process:
        with contextlib.ExitStack() as on_error, contextlib.ExitStack() as theirs:
            talk, their_talk = socket.socketpair()
            on_error.push(talk)
            theirs.push(their_talk)
            life, their_life = socket.socketpair()
            on_error.push(life)
            theirs.push(their_life)
            descriptors = [their_talk.fileno(), their_life.fileno()]
            socket.send_fds(self._control, [b"f"], descriptors)
            process = Process(talk, life)
            on_error.pop_all()
        return process

    def close(self) -> None:
        self._control.close()
        try:
            self._program.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._program.kill()
            self._program.wait()


def _start(descriptor: int) -> subprocess.Popen[bytes]:
    facts = json.dumps([sys.path, sys.argv])
    return subprocess.Popen(  # noqa: S603 - our own code
        [sys.executable, *_interpreter_options(), "-c", _FORKING, str(descriptor), facts],
        stdin=subprocess.DEVNULL,
        pass_fds=[descriptor],
        process_group=0,  # Ctrl+C is for the worker
    )


def _interpreter_options() -> list[str]:
    """Return this interpreter's options that change what code does."""
    options = ["-O"] * sys.flags.optimize
    options += [f"-W{one}" for one in sys.warnoptions]
    return options + [
        f"-X{name}" if value is True else f"-X{name}={value}"
        for name, value in sys._xoptions.items()
    ]


class Context(Protocol):
    """What the worker knows of the item; the `ItemContext` of the process asks for it."""

    def should_stop(self) -> bool: ...

    async def still_mine_async(self) -> bool: ...

    def log(self, message: str, **data: Any) -> None: ...


@dataclasses.dataclass(eq=False, kw_only=True)
class Execution:
    """One try of an isolated child.

    Args:
        pool: has the processes.
        request: what the process needs to know, see `isolated`.
        context: answers the questions of the child.
    """

    pool: Pool
    request: Message
    context: Context
    _process: Process | None = None
    _begun: bool = False
    _given_up: bool = False

    async def run(self, *, timeout: float | None) -> Message | execution.Raised:
        """Have one process work on the item; return the columns of its outcome.

        Past `timeout` seconds the process is ended; the time that loading takes does not count.

        Raises:
            Stopped: `give_up` was called; the process is ended.
            CancelledError: the caller was cancelled; the process is ended.
        """
        for fresh in (False, True):
            try:
                process = self._process = self.pool.take(fresh=fresh)
            except OSError as exc:
                return execution.Raised(exc)
            end = await self._tried(process, timeout)
            if self._given_up:
                raise execution.Stopped
            if isinstance(end, TimeoutError):
                return execution.Raised(end)
            if end is not None:
                return dict(end["end"])
            # One that died while it was idle is not the item's fault.
            if self._begun or not process.used:
                break
        return execution.Raised(_died(process))

    def give_up(self) -> None:
        """End the process; from the event loop only."""
        self._given_up = True
        if self._process is not None:
            self._process.end()

    def thread_stuck(self) -> bool:
        """Return False: what was ended does not go on."""
        return False

    async def leftover(self) -> None:
        """Return at once: nothing is left over."""

    async def _tried(
        self, process: Process, timeout: float | None
    ) -> Message | TimeoutError | None:
        reusable = False
        try:
            end = None if self._given_up else await self._exchange(process, timeout)
            reusable = end is not None and end["reusable"] and not self._given_up
            return end
        except TimeoutError as exc:
            return exc
        finally:
            if reusable:
                self.pool.give_back(process)
            else:
                await process.ended()

    async def _exchange(self, process: Process, timeout: float | None) -> Message | None:
        """Return how the item ended; `None` where the process died."""
        try:
            async with asyncio.timeout(READY_SECONDS):
                sent = await process.send(self.request | _facts())
                message = await self._heard(process) if sent else None
            if message is None or "end" in message:
                return message
            self._begun = True
            async with asyncio.timeout(timeout):
                return await self._heard(process)
        except TimeoutError:
            if self._begun:
                raise TimeoutError(f"its time limit of {timeout:g} s passed") from None
            raise TimeoutError(
                f"its module and item were not loaded within {READY_SECONDS:g} s"
            ) from None

    async def _heard(self, process: Process) -> Message | None:
        """Return the next message that is not a question, for these are answered."""
        while (message := await process.receive()) is not None:
            if "ask" not in message:
                return message
            await process.send(await self._answer(message["ask"], message["about"]))
        return None

    async def _answer(self, question: str, about: Message) -> Message:
        try:
            if question == "should_stop":
                return {"answer": self.context.should_stop()}
            if question == "still_mine":
                return {"answer": await self.context.still_mine_async()}
            self.context.log(about["message"], **about["data"])
        except Exception as exc:  # noqa: BLE001 - no answer may cost the item its outcome
            return {"error": str(exc)}
        return {"answer": None}


def _facts() -> Message:
    """Return what the process must know of this one."""
    django = sys.modules.get("django.apps")
    return {
        "log_level": logging.getLogger().level,
        "django": django is not None and bool(django.apps.ready),
    }


def _died(process: Process) -> errors.ChildProcessDied:
    error = errors.ChildProcessDied(process.exit_code, process.pid)
    logger.warning(
        "The process of an isolated child died",
        extra={
            "action": "child_process_died",
            "pid": process.pid,
            "exit_code": process.exit_code,
        },
    )
    return error
