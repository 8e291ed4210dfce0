"""What the tests of faults share: a supervisor, a proxy to order, a server that may be stopped."""

import contextlib
import signal
import time
from collections.abc import Callable
from typing import Any

import psycopg
from psycopg import conninfo
from psycopg.rows import dict_row

from fanout_procrastinate import Run
from tests import servers
from tests.acceptance.scene import Scene
from tests.apps import journal
from tests.apps.scripted import Step
from tests.chaos.proxy import Link, Proxy
from tests.conftest import Connection
from tests.waiting import wait_until
from tests.workers import Worker

UNHARMED = " ".join(
    f"-c {setting}"
    for setting in (
        "default_transaction_read_only=off",
        "statement_timeout=0",
        "lock_timeout=0",
    )
)
"""What the test's own connections do not share with the workers."""


def everywhere() -> bool:
    return True


def steps(count: int, seconds: float, **options: Any) -> list[Step]:
    return [Step(name=str(number), sleep=seconds, **options) for number in range(count)]


def assert_done_once(scene: Scene, run: Run, count: int) -> None:
    """Assert that each item was begun once, recorded once, and charged nothing."""
    scene.assert_closed_once(run, succeeded=count)
    items = scene.items(run).values()
    assert {(row["claim"], row["failures"], row["crashes"]) for row in items} == {(1, 0, 0)}
    assert set(scene.starts(run).values()) == {1}
    assert len(scene.log.read("end", run=run.id)) == count
    assert len(scene.jobs("closed", run)) == 1


def is_closed(scene: Scene, run: Run) -> bool:
    return bool(
        scene.query("SELECT generation FROM fanout_closes WHERE run_id = %(run)s", run=run.id)
    )


def supervise(
    scene: Scene,
    crew: list[Worker],
    condition: Callable[[], object],
    *,
    timeout: float = 20.0,
    **options: Any,
) -> int:
    """Wait for something, and start a worker for each that has ended, as a supervisor does.

    procrastinate's worker stops, in good order, when it cannot listen or fetch. Returns how many
    have.
    """
    ended = 0

    def is_so() -> object:
        nonlocal ended
        for number, worker in enumerate(crew):
            if not worker.is_running():
                ended += 1
                crew[number] = scene.worker(ready=False, **options)
        return condition()

    wait_until(is_so, timeout)
    return ended


def until_closed(scene: Scene, run: Run, crew: list[Worker], **options: Any) -> int:
    return supervise(scene, crew, lambda: is_closed(scene, run), **options)


def assert_stops(*workers: Worker, within: float) -> None:
    """Assert that workers end on SIGTERM, and soon."""
    begun = time.monotonic()
    for worker in workers:
        worker.kill(signal.SIGTERM)
    for worker in workers:
        assert worker.wait(within) in (0, -signal.SIGTERM)
    print(f"stopped {time.monotonic() - begun:.2f} s after SIGTERM")


class Tap(Proxy):
    """A proxy whose harm ends when the test says so."""

    def swallow_all(self) -> None:
        """Swallow the replies to all that is sent."""

        def arm(link: Link) -> None:
            link.loses_replies = True

        self._on_links(everywhere, arm)

    def cut_the_robbed(self) -> None:
        """Cut the links that lost a reply, and swallow nothing more."""

        def release(link: Link) -> None:
            link.loses_replies = False
            if link.lost:
                link.cut()

        self._on_links(everywhere, release)


class Outdoors(Scene):
    """A scene on a server of its own, which the test stops and starts, and gives settings."""

    def __init__(
        self,
        server: servers.Server,
        dsn: str,
        workers: Callable[..., Worker],
        log: journal.Journal,
    ) -> None:
        self.server = server
        self._dsn = conninfo.make_conninfo(dsn, options=UNHARMED)
        super().__init__(self.open, workers, log)
        self.conn.close()

    def open(self, **options: Any) -> Connection:
        """Connect; the server's settings of the day do not matter here."""
        return psycopg.connect(self._dsn, autocommit=True, row_factory=dict_row, **options)

    def query(self, sql: str, **values: Any) -> list[dict[str, Any]]:
        with contextlib.closing(self.open()) as connection:
            cursor = connection.execute(sql.encode(), values)
            return cursor.fetchall() if cursor.description else []

    def reload(self, setting: str) -> None:
        """Change a setting of the server, for all sessions that run already, too."""
        self.query(f"ALTER SYSTEM {setting}")
        self.query("SELECT pg_reload_conf()")

    def others(self) -> list[dict[str, Any]]:
        """Return the other sessions of this database."""
        return self.query(
            "SELECT pid, query FROM pg_stat_activity WHERE datname = current_database()"
            " AND pid <> pg_backend_pid()"
        )
