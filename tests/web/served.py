"""Dashboards served by processes of their own, as users start them."""

import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import psutil

from tests.databases import environment
from tests.guarded import Guarded
from tests.waiting import wait_until
from tests.workers import ROOT

TOKEN = "a-token-for-the-tests"  # noqa: S105 - of throw-away dashboards
APP = "tests.apps.shown.app"


class Served:
    """A process that serves a dashboard: the command `fanout dashboard`, or another given.

    Args:
        dsn: the database.
        arguments: further options of the command.
        command: what Python is to run in place of it.
        env: further variables of its environment.
        cwd: where it runs.
    """

    def __init__(
        self,
        dsn: str,
        arguments: Iterable[str] = (),
        command: Iterable[str] | None = None,
        env: Mapping[str, str] | None = None,
        cwd: Path = ROOT,
    ) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="fanout-web-"))
        self._log = self._folder / "log"
        ours = ["-m", "fanout_procrastinate", f"--app={APP}", "dashboard", "--port=0"]
        self._guarded = Guarded(
            [sys.executable, *(command or [*ours, f"--token={TOKEN}", *arguments])],
            log=self._log,
            env={**own_environment(), **environment(dsn), **(env or {})},
            cwd=cwd,
            end_signal=signal.SIGTERM,
            grace=5.0,
            remove=[self._folder],
        )
        self.pid = self._guarded.pid
        self.url = ""

    def wait_ready(self) -> "Served":
        """Wait until it listens, and learn its address."""
        self.url = self.wait_output(r"""(?:Dashboard:|running on|"url":) "?(http://[^/\s]+)""")
        return self

    def wait_output(self, pattern: str) -> str:
        """Wait until it has said something, and return the first group of that."""

        def said() -> str:
            if self.code() is not None:
                raise AssertionError(f"it ended by itself:\n{self.output()}")
            whole = self.output().rpartition("\n")[0]  # not in the middle of a line
            found = re.search(pattern, whole)
            return found[1] if found else ""

        return wait_until(said, 30.0, f"it says {pattern}")

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def output(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def code(self) -> int | None:
        """Return its exit code, or None while it runs."""
        return self._guarded.poll()

    def memory(self) -> int:
        """Return the bytes it holds."""
        held: int = psutil.Process(self.pid).memory_info().rss
        return held

    def close(self) -> None:
        self._guarded.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def own_environment() -> dict[str, str]:
    """Ours (coverage needs it), less libpq's variables."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
    return {**ours, "PYTHONUNBUFFERED": "1"}
