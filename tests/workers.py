"""Real worker processes: `python -m procrastinate ... worker`, surely ended."""

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.databases import environment
from tests.guarded import Guarded
from tests.waiting import wait_until

ROOT = Path(__file__).parent.parent


class Worker:
    """A worker of the app at `app_path`, started at once: `with Worker(...) as worker`.

    The app finds its database as a user's would, by `PsycopgConnector()` and libpq's environment.
    `arguments` are further options of `procrastinate worker`. Nothing of it outlives this process.
    """

    def __init__(
        self,
        dsn: str,
        app_path: str,
        *,
        queues: str | Iterable[str] = (),
        concurrency: int = 1,
        arguments: Iterable[str] = (),
        env: Mapping[str, str] | None = None,
        grace: float = 5.0,
    ) -> None:
        queues = queues if isinstance(queues, str) else ",".join(queues)
        options = [f"--queues={queues}", f"--concurrency={concurrency}", *arguments]
        self._grace = grace
        self._folder = Path(tempfile.mkdtemp(prefix="fanout-worker-"))
        self._log = self._folder / "log"
        self._guarded = Guarded(
            [sys.executable, "-m", "procrastinate", f"--app={app_path}", "worker", *options],
            log=self._log,
            env={**_own_environment(), **environment(dsn), **(env or {})},
            cwd=ROOT,
            remove=[self._folder],
        )
        self.pid = self._guarded.pid

    def wait_ready(self, timeout: float = 30.0) -> Self:
        """Wait until it looks for jobs."""
        wait_until(self._is_ready, timeout, f"worker {self.pid} looks for jobs")
        return self

    def output(self) -> str:
        """Return what it has printed and logged."""
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def is_running(self) -> bool:
        return self._guarded.poll() is None

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to the worker process alone (SIGSTOP and SIGCONT: a zombie)."""
        self._guarded.send_signal(number)

    def wait(self, timeout: float = 10.0) -> int:
        """Wait for its end and return the exit code (negative: the signal that killed it)."""
        code = self._guarded.wait(timeout)
        if code is None:
            raise AssertionError(
                f"worker {self.pid} still runs after {timeout} s:\n{self.output()}"
            )
        return code

    def stop(self) -> int:
        """Ask it to stop as a deployment does, insist after `grace` seconds; return its code."""
        self.kill(signal.SIGCONT)
        self.kill(signal.SIGTERM)
        if self._guarded.wait(self._grace) is None:
            self.kill(signal.SIGKILL)
        return self.wait()

    def close(self) -> None:
        """Stop it, end what it left in its process group, and remove its output."""
        try:
            self.stop()
        finally:
            self._guarded.close()
            shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _is_ready(self) -> bool:
        if not self.is_running():
            raise AssertionError(f"the worker ended by itself:\n{self.output()}")
        return "Starting worker on" in self.output()


def _own_environment() -> dict[str, str]:
    """Ours (coverage needs it), less libpq's variables, which would point elsewhere."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
    return {**ours, "PYTHONUNBUFFERED": "1"}
