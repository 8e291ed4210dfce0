"""The processes of isolated children, as the worker sees them, and the pool that keeps them.

They are forked from one that has a single thread and this library loaded (`forking`). Every process
has two sockets of its own and shares nothing, so that its death, at whatever moment, cannot touch
another. Pools with a common pipe cannot promise that: with pebble 5.2 a process that dies while it
holds the pipe's lock stops all others, and the future of one that calls ``os._exit(0)`` never ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import struct
import subprocess
import sys
from typing import Any

logger = logging.getLogger(__name__)

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
                "A child process does not end",
                extra={"action": "child_process_stays", "pid": self.pid},
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
