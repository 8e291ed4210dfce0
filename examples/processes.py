"""Child processes that never outlive their parent, whatever ends it."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

_PR_SET_PDEATHSIG = 1
# Loaded here, because little may be done between fork and exec.
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def spawn(
    command: Sequence[str],
    *,
    output: IO[bytes] | int,
    death_signal: signal.Signals = signal.SIGKILL,
    environment: Mapping[str, str] | None = None,
    directory: Path | None = None,
    user: int | None = None,
    group: int | None = None,
) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own: Ctrl-C reaches the parent only, which decides.

    On Linux the kernel sends it `death_signal` when the parent dies, even by SIGKILL. To the kernel
    the parent is the thread that calls this: call it in the main thread. `user` and `group` need
    root.
    """
    options: dict[str, Any] = {}
    if user is not None:
        options |= {"user": user, "group": group, "extra_groups": []}
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        cwd=directory,
        env=dict(os.environ if environment is None else environment),
        start_new_session=True,
        # One system call: no lock that another thread could hold at the fork.
        preexec_fn=_die_with_parent(os.getpid(), death_signal),  # noqa: PLW1509
        **options,
    )


def stop(
    children: Sequence[subprocess.Popen[bytes]], *signals: signal.Signals, seconds_each: float
) -> None:
    """End processes: send all of them the signals in turn, as far as needed, SIGKILL at last."""
    for number in (*signals, signal.SIGKILL):
        for child in children:
            if child.poll() is None:
                child.send_signal(number)
        deadline = time.monotonic() + seconds_each
        for child in children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(timeout=max(0.0, deadline - time.monotonic()))


def _die_with_parent(parent: int, death_signal: signal.Signals) -> Callable[[], None] | None:
    if _libc is None:
        return None
    libc, number = _libc, int(death_signal)

    def before_exec() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
        if os.getppid() != parent:  # it died before the kernel was told
            os._exit(1)

    return before_exec
