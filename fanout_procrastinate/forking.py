"""The process that forks those of isolated children: one thread, and nothing else to do.

A worker has threads, and a fork of it could stand still for ever in a lock that one of them held.
Forking from here is safe, takes milliseconds, and shares the memory of what is loaded. When the
worker is gone, whatever its death, so are these processes, and what they have started.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

from fanout_procrastinate import isolated

logger = logging.getLogger(__name__)

_GRACE_SECONDS = 0.5
_OWNER_DIED = signal.SIGUSR2
_PR_SET_PDEATHSIG = 1
_OOM_SCORE = 500  # of 1000: ended before the worker is, where memory is short


class Forking:
    """Fork a process for each request, tell of its end, and end it when asked to.

    Args:
        control: a byte and two sockets for each request: to talk to the process, and of its life.
            Its end is the worker's.
    """

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._lives: dict[int, socket.socket] = {}
        self._selector = selectors.DefaultSelector()
        self._wake, self._waker = socket.socketpair()
        self._over = False
        self._pid = os.getpid()

    def serve(self) -> None:
        """Fork and watch until the worker is gone."""
        self._listen()
        try:
            while not self._over:
                for key, _ in self._selector.select():
                    key.data()
        finally:
            self._end_all()

    def close(self) -> None:
        """Close what only this process has open."""
        self._selector.close()
        for one in (self._control, self._wake, self._waker, *self._lives.values()):
            one.close()

    def _listen(self) -> None:
        self._wake.setblocking(False)
        self._waker.setblocking(False)
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM):
            signal.signal(number, _ignore)
        signal.signal(_OWNER_DIED, self._on_owner_died)
        _die_with_parent(_OWNER_DIED)
        self._watch(self._wake, self._collect)
        self._watch(self._control, self._on_request)

    def _watch(self, source: socket.socket, action: Callable[[], None]) -> None:
        self._selector.register(source, selectors.EVENT_READ, action)

    def _on_owner_died(self, number: int, frame: FrameType | None) -> None:
        self._over = True

    def _on_request(self) -> None:
        try:
            request, descriptors, _, _ = socket.recv_fds(self._control, 1, 2)
        except OSError:
            request, descriptors = b"", []
        if not request:
            self._over = True
            return
        talk, life = (socket.socket(fileno=one) for one in descriptors)
        with talk:
            try:
                pid = os.fork()
            except OSError as exc:
                self._refuse(life, exc)
                return
            if pid == 0:
                self._become_child(talk, life)
        # Here and in the child, whoever comes first.
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)
        self._lives[pid] = life
        self._watch(life, lambda: self._on_end_wanted(pid, life))
        _tell(life, "pid", pid)

    def _refuse(self, life: socket.socket, exc: OSError) -> None:
        with life:
            logger.error(
                "No process for an isolated child",
                extra={"action": "child_process_refused", "exception": str(exc)},
            )

    def _on_end_wanted(self, pid: int, life: socket.socket) -> None:
        """End a process: the worker has asked for it, or has closed its side."""
        if self._lives.get(pid) is life:  # it may have ended since the selector saw this
            self._selector.unregister(life)
            _end(pid)

    def _collect(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake.recv(4096)
        for pid in list(self._lives):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                _end(pid, group_only=True)  # what it has started goes along
                with self._lives.pop(pid) as life:
                    with contextlib.suppress(KeyError):
                        self._selector.unregister(life)
                    _tell(life, "exit", os.waitstatus_to_exitcode(status))

    def _end_all(self) -> None:
        """Let the idle ones end, for they see the end of their socket; then end the rest."""
        deadline = time.monotonic() + _GRACE_SECONDS
        while self._lives and time.monotonic() < deadline:
            self._collect()
            time.sleep(0.005)
        for pid in self._lives:
            _end(pid)
        for pid in self._lives:
            os.waitpid(pid, 0)

    def _become_child(self, talk: socket.socket, life: socket.socket) -> NoReturn:
        code = 1
        try:
            os.setpgid(0, 0)
            _die_with_parent(signal.SIGKILL)
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, _OWNER_DIED):
                signal.signal(number, signal.SIG_DFL)
            self.close()
            life.close()
            if os.getppid() == self._pid:
                _volunteer_for_oom()
                isolated.main(talk)
                code = 0
        except BaseException:
            logger.exception("A child process failed", extra={"action": "child_process_failed"})
        finally:
            # Not further: the frames below are those of the process that was forked.
            logging.shutdown()
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):
                    stream.flush()
            os._exit(code)


def _ignore(number: int, frame: FrameType | None) -> None:
    """Do nothing: Ctrl+C and a supervisor's SIGTERM are for the worker, which ends us in time.

    A handler, for unlike `SIG_IGN` it is not inherited by the programs that a child starts.
    """


def _tell(life: socket.socket, what: str, number: int) -> None:
    with contextlib.suppress(OSError):  # the worker is gone, or waits for it no more
        life.sendall(f"{what} {number}\n".encode())


def _end(pid: int, *, group_only: bool = False) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    if not group_only:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _die_with_parent(number: int) -> None:
    """Have the kernel send this signal when the parent ends (Linux), whatever we do then."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)


def _volunteer_for_oom() -> None:
    with contextlib.suppress(OSError, ValueError), open("/proc/self/oom_score_adj", "r+") as score:
        own = int(score.read())
        score.seek(0)
        score.write(str(min(1000, own + _OOM_SCORE)))


def main(descriptor: int) -> None:
    """Serve the worker at the other end of this socket."""
    gc.collect()
    gc.freeze()  # shared memory stays so
    with contextlib.closing(Forking(socket.socket(fileno=descriptor))) as program:
        program.serve()
