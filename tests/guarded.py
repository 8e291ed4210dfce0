"""Processes that cannot outlive the one that started them.

Between a `Guarded` and its command stands a small guard: this file, run as a script. It starts the
command in a session of its own and then reads its standard input until that ends, because `close()`
was called or because the owner died, whatever its death. Then it ends the command with its process
group, and removes the directories it was given.
"""

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

KEEP = b"keep"


class Guarded:
    """Start `command`, its output going to the file `log`.

    `user` and `group` are the ids to run as. When the owner is gone, the command gets `end_signal`,
    then SIGKILL after `grace` seconds, and the directories `remove` are removed.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        log: Path,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        user: int | None = None,
        group: int | None = None,
        end_signal: signal.Signals = signal.SIGKILL,
        grace: float = 10.0,
        remove: Sequence[Path] = (),
    ) -> None:
        spec = {
            "command": list(command),
            "log": str(log),
            "user": user,
            "group": group,
            "end_signal": int(end_signal),
            "grace": grace,
            "remove": [str(folder) for folder in remove],
        }
        # Unbuffered, so that select() tells the truth about what can be read.
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, json.dumps(spec)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env=env,
            cwd=cwd,
            start_new_session=True,
        )
        self._code: int | None = None
        first = self._read_line()
        if not first:
            self.close()
            raise RuntimeError(f"could not start {command[0]}: see the message of its guard above")
        self.pid = int(first)

    def poll(self) -> int | None:
        """Return the exit code (negative: the signal that killed it), or None while it runs."""
        return self.wait(timeout=0)

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait for the end and return the exit code, or None when `timeout` passes first."""
        if self._code is None and select.select([self._guard.stdout], [], [], timeout)[0]:
            self._code = int(self._read_line() or -signal.SIGKILL)
        return self._code

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the command alone; nothing happens if it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def close(self, *, keep: bool = False) -> None:
        """End the command and what it left in its process group; `keep` spares the directories."""
        if self._guard.stdin is None or self._guard.stdin.closed:
            return
        with contextlib.suppress(
            BrokenPipeError
        ):  # the guard is gone: it could not start the command
            self._guard.stdin.write(KEEP if keep else b"")
        self._guard.stdin.close()
        self.wait()
        self._guard.wait()
        assert self._guard.stdout is not None
        self._guard.stdout.close()

    def _read_line(self) -> bytes:
        assert self._guard.stdout is not None
        return self._guard.stdout.readline()


def guard(spec: dict[str, Any]) -> None:
    """Run the command of `spec` until it ends and standard input does."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    identity = {}
    if spec["user"] is not None:
        identity = {"user": spec["user"], "group": spec["group"], "extra_groups": []}
    with open(spec["log"], "ab") as log:
        child = subprocess.Popen(
            spec["command"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            **identity,
        )
    keep = False
    try:
        tell(child.pid)
        threading.Thread(target=lambda: tell(child.wait())).start()
        keep = sys.stdin.buffer.read() == KEEP
    finally:
        end(child, spec["end_signal"], spec["grace"])
        for folder in () if keep else spec["remove"]:
            shutil.rmtree(folder, ignore_errors=True)


def tell(number: int) -> None:
    """Write one number for the owner, who may be gone."""
    with contextlib.suppress(BrokenPipeError):
        os.write(sys.stdout.fileno(), b"%d\n" % number)


def end(child: subprocess.Popen[bytes], end_signal: int, grace: float) -> None:
    """End the child, and then whatever is left in its process group."""
    child.send_signal(end_signal)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(grace)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


if __name__ == "__main__":
    guard(json.loads(sys.argv[1]))
