"""Control of a run of a million items while a hundred are at work: at once, and exact."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import procrastinate
import pytest

from fanout_procrastinate import Run
from tests import invariants
from tests.apps import controlled
from tests.conftest import Connection
from tests.waiting import wait_until
from tests.workers import Worker

pytestmark = [pytest.mark.acceptance, pytest.mark.measured]

MILLION = 1_000_000
AT_WORK = 100
MAX_SECONDS = 0.1


class Plant:
    """Two workers with fifty places each, and a run of a million light items between them."""

    def __init__(
        self, conn: Connection, watching: Connection, workers: Callable[..., Worker], run: Run
    ) -> None:
        self.conn = conn
        self.watching = watching
        self.run = run
        for _ in range(2):
            workers(
                "tests.apps.controlled.app", queues=controlled.QUEUE, concurrency=AT_WORK // 2
            ).wait_ready()
        wait_until(lambda: self.at_work() == AT_WORK, 30)

    def at_work(self) -> int:
        return self.value("SELECT count(held) FROM fanout_slots WHERE run_id = %(run)s AND active")

    def claims(self) -> int:
        """Return how many hand-outs there were."""
        return self.value("SELECT sum(cursor) FROM fanout_ledgers WHERE run_id = %(run)s")

    def value(self, sql: str) -> int:
        row = self.conn.execute(sql.encode(), {"run": self.run.id}).fetchone()
        assert row is not None
        return int(next(iter(row.values())) or 0)

    def timed(self, function: Callable[[], Any]) -> float:
        begin = time.monotonic()
        function()
        return time.monotonic() - begin


@pytest.fixture
def plant(
    dsn: str, connect: Callable[..., Connection], workers: Callable[..., Worker]
) -> Iterator[Plant]:
    conn = connect()
    connector = procrastinate.SyncPsycopgConnector(conninfo=dsn)
    with controlled.app.replace_connector(connector), controlled.app.open():
        run = controlled.light.map([0], max_in_flight=AT_WORK)
        # As a manager stages them, but in one statement; the run is sealed anew over all of them.
        conn.execute("DELETE FROM fanout_slots WHERE run_id = %s", [run.id])
        conn.execute("DELETE FROM procrastinate_jobs WHERE args->>'run_id' = %s", [str(run.id)])
        conn.execute("DELETE FROM fanout_ledgers WHERE run_id = %s", [run.id])
        conn.execute(
            "INSERT INTO fanout_items (run_id, position, payload)"
            " SELECT %s, n, '0' FROM generate_series(1, %s) n",
            [run.id, MILLION - 1],
        )
        conn.execute(
            "UPDATE fanout_runs SET status = 'pending', sealed_at = NULL, total = NULL,"
            " staged = %s WHERE id = %s",
            [MILLION, run.id],
        )
        conn.execute("SELECT fanout_seal_v1(%s, 1)", [run.id])
        yield Plant(conn, connect(), workers, run)
        run.cancel()
        run.wait(timeout=30)
        controlled.fanout.close()
    invariants.check(connect(), damaged=True)


@pytest.mark.timeout(180)
def test_a_million_items(plant: Plant) -> None:
    """F09: pause, resume, a lowered limit and cancel, each below 0.1 s; nothing against them.

    While each takes the run's locks, no report of the hundred at work waits longer than that.
    """
    waits = _longest_reports(plant)
    try:
        paused = plant.timed(plant.run.pause)
        wait_until(lambda: plant.at_work() == 0, 20)
        claims = plant.claims()
        assert plant.run.progress().paused
        assert plant.claims() == claims
        resumed = plant.timed(plant.run.resume)
        wait_until(lambda: plant.at_work() == AT_WORK, 20)
        lowered = plant.timed(lambda: plant.run.update(max_in_flight=7))
        wait_until(lambda: plant.at_work() <= 7, 20)
        claims = plant.claims()
        wait_until(lambda: plant.claims() > claims + 50, 20)
        assert plant.at_work() <= 7
        raised = plant.timed(lambda: plant.run.update(max_in_flight=AT_WORK))
        wait_until(lambda: plant.at_work() == AT_WORK, 20)
        cancelled = plant.timed(plant.run.cancel)
        after = plant.run.progress()
    finally:
        longest = waits()
    final = plant.run.wait(timeout=30)
    figures = {
        "pause": paused,
        "resume": resumed,
        "lower": lowered,
        "raise": raised,
        "cancel": cancelled,
        "longest lock wait": longest,
    }
    print(", ".join(f"{name} {seconds * 1000:.0f} ms" for name, seconds in figures.items()))
    assert max(figures.values()) < MAX_SECONDS
    assert after.processing <= AT_WORK and after.pending == 0
    assert final.status == "cancelled"
    assert final.succeeded + final.cancelled == MILLION
    ended = plant.value(
        "SELECT count(*) FROM fanout_items WHERE run_id = %(run)s AND status = 'succeeded'"
    )
    assert ended == final.succeeded
    assert final.succeeded - after.succeeded == after.processing, "who was at work has ended"


def _longest_reports(plant: Plant) -> Callable[[], float]:
    """Watch how long sessions wait for locks of others; return what asks for the longest wait."""
    over = threading.Event()
    longest = [0.0]
    begun: dict[int, float] = {}

    def watch() -> None:
        while not over.wait(0.002):
            rows = plant.watching.execute(
                "SELECT pid FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
                " AND datname = current_database()"
            ).fetchall()
            now = time.monotonic()
            waiting = {row["pid"] for row in rows}
            for pid in list(begun):
                if pid not in waiting:
                    del begun[pid]
            for pid in waiting:
                longest[0] = max(longest[0], now - begun.setdefault(pid, now))

    watcher = threading.Thread(target=watch)
    watcher.start()

    def stop() -> float:
        over.set()
        watcher.join(10)
        return longest[0]

    return stop
