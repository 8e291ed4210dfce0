"""What was done long ago costs nothing; and it is removed bit by bit."""

import os
import statistics
import time
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from fanout_procrastinate import DatabaseError, database, models, store
from fanout_procrastinate.sweeper import Sweeper
from tests import invariants, protocol, support
from tests.conftest import Connection

pytestmark = [pytest.mark.acceptance, pytest.mark.measured]

FINISHED_RUNS = 20
MAX_SECONDS = 0.020
MAX_SWEEP_SECONDS = 0.5
CHUNK = 2000
RETENTION = 3600.0

# As a finished run is left behind, and the jobs that served it, each with an event; a day ago.
_FINISH = """
UPDATE fanout_ledgers SET cursor = size, succeeded = size, open = false WHERE run_id = %(run)s;
DELETE FROM procrastinate_jobs WHERE (args->>'run_id')::bigint = %(run)s;
DELETE FROM fanout_slots WHERE run_id = %(run)s;
UPDATE fanout_runs SET status = 'completed', open_ledgers = 0,
    closed_at = clock_timestamp() - interval '1 day' WHERE id = %(run)s;
INSERT INTO fanout_closes (run_id, generation, status, progress, closed_at)
SELECT id, 1, 'completed', fanout_progress_v1(id), closed_at FROM fanout_runs WHERE id = %(run)s;
"""
_JOBS = """
SET session_replication_role = replica;
WITH finished AS (
    INSERT INTO procrastinate_jobs (queue_name, task_name, status, args)
    SELECT 'papers', 'child', 'succeeded', '{}' FROM generate_series(1, %(finished)s) RETURNING id)
INSERT INTO procrastinate_events (job_id, type, at)
SELECT id, 'succeeded', clock_timestamp() - interval '1 day' FROM finished;
INSERT INTO procrastinate_jobs (queue_name, task_name, status, args)
SELECT 'other', 'other', 'todo', '{}' FROM generate_series(1, %(open)s);
SET session_replication_role = origin;
"""


FEWER = (40_000, 4_000)
MANY = (200_000, 20_000) if os.environ.get("FANOUT_TEST_PG", "18") == "18" else FEWER
"""How many are finished and open."""


def _stage(driver: protocol.Protocol, count: int, status: str = "pending") -> int:
    run = driver.start(protocol.spec(max_in_flight=8))["run_id"]
    driver.execute(
        "INSERT INTO fanout_items (run_id, position, item_key, payload, status, claim)"
        " SELECT %s, n, 'key-' || n, jsonb_build_object('id', n), %s, %s"
        " FROM generate_series(0, %s) n",
        run,
        status,
        int(status != "pending"),
        count - 1,
    )
    driver.execute("UPDATE fanout_runs SET staged = %s, fence = 1 WHERE id = %s", count, run)
    driver.seal(run, 1)
    return int(run)


@pytest.fixture
def history(conn: Connection, request: pytest.FixtureRequest) -> int:
    """So many finished items and jobs, and open ones; the run that is open."""
    finished, left = request.param
    driver = protocol.Protocol(conn)
    with psycopg.ClientCursor(conn) as cursor:
        for _ in range(FINISHED_RUNS):
            run = _stage(driver, finished // FINISHED_RUNS, "succeeded")
            cursor.execute(_FINISH, {"run": run})
        cursor.execute(_JOBS, {"finished": finished, "open": left})
    return _stage(driver, left)


@pytest.fixture
def own(dsn: str) -> Iterator[database.Database]:
    with support.direct(dsn) as own:
        yield own


def _sequential(conn: Connection) -> dict[str, int]:
    """How often each large table was read as a whole."""
    conn.execute("SELECT pg_stat_force_next_flush()")
    rows = conn.execute(
        "SELECT relname, seq_scan FROM pg_stat_user_tables WHERE relname IN"
        " ('fanout_items', 'procrastinate_jobs', 'procrastinate_events')"
    )
    return {row["relname"]: row["seq_scan"] for row in rows}


def _timed(own: database.Database, call: store.Call[Any], seconds: list[float]) -> Any:
    begun = time.perf_counter()
    answer = own.run(call)
    seconds.append(time.perf_counter() - begun)
    return answer


@pytest.mark.parametrize("history", [MANY], indirect=True)
def test_the_cost_follows_the_open_work(
    conn: Connection, own: database.Database, history: int
) -> None:
    """F06: begin, report and sweep read no large table as a whole, and take their usual time."""
    before = _sequential(conn)
    begins: list[float] = []
    reports: list[float] = []
    sweeps: list[float] = []
    sweep = Sweeper(run=own.run, lease=30.0)
    for _ in range(5):
        begun = time.perf_counter()
        assert not sweep.sweep_once().changed
        sweeps.append(time.perf_counter() - begun)
    while True:
        slots = [slot for slot in protocol.Protocol(conn).slots(history) if not slot["active"]]
        if not slots:
            break
        for slot in slots:
            call = store.begin(
                history,
                slot["slot"],
                slot["job_id"],
                token="00000000-0000-0000-0000-000000000001",
                ledger=0,
                suspect=True,
            )
            reply: models.Reply = _timed(own, call, begins)
            for _ in range(40):
                entry = support.entry(reply)
                call = store.report(history, reply.ledger, [entry], suspect=True)
                (reply,) = _timed(own, call, reports)
    own.run(support.probe("SELECT pg_stat_force_next_flush()::text AS x"))
    assert _sequential(conn) == before
    p95 = statistics.quantiles(begins + reports, n=20)[-1]
    print(f"{len(begins)} begins, {len(reports)} reports: p95 {p95 * 1000:.2f} ms")
    assert p95 < MAX_SECONDS
    print(f"sweep: {max(sweeps) * 1000:.1f} ms at most")
    assert max(sweeps) < MAX_SWEEP_SECONDS


@pytest.mark.parametrize("history", [FEWER], indirect=True)
def test_retention_goes_on_where_it_was_interrupted(
    conn: Connection, own: database.Database, history: int
) -> None:
    """F06: small statements, any of which may be the last; what is open stays."""
    finished, left = FEWER
    taken: list[tuple[float, int]] = []
    interrupted_at = finished // CHUNK // 2

    def run(call: store.Call[Any]) -> Any:
        if not call.name.startswith("prune"):
            return own.run(call)
        if len(taken) == interrupted_at:
            taken.append((0.0, 0))
            raise DatabaseError("the connection is lost", transient=True)
        begun = time.perf_counter()
        rows = own.run(call)
        taken.append((time.perf_counter() - begun, rows))
        return rows

    sweep = Sweeper(run=run, lease=30.0, retention=RETENTION, tasks=["child"])
    with pytest.raises(DatabaseError):
        sweep.sweep_once()
    items = "SELECT count(*) AS n FROM fanout_items WHERE run_id <> %s"
    assert 0 < _count(conn, items, history) < finished
    sweeps = 1
    while sweep.sweep_once().changed:
        sweeps += 1
    print(
        f"{len(taken)} statements in {sweeps} sweeps, {sum(s for s, _ in taken):.1f} s,"
        f" {max(s for s, _ in taken) * 1000:.0f} ms at most"
    )
    assert max(rows for _, rows in taken) <= CHUNK + 1
    assert max(seconds for seconds, _ in taken) < 1.0
    assert _count(conn, items, history) == 0
    assert _count(conn, "SELECT count(*) AS n FROM fanout_items") == left
    assert _count(conn, "SELECT count(*) AS n FROM fanout_runs") == 1
    jobs = "SELECT count(*) AS n FROM procrastinate_jobs WHERE status = 'succeeded'"
    assert _count(conn, jobs) == 0
    other = "SELECT count(*) AS n FROM procrastinate_jobs WHERE task_name = 'other'"
    assert _count(conn, other) == left
    invariants.check(conn)


def _count(conn: Connection, query: str, *params: Any) -> int:
    row = conn.execute(query.encode(), params).fetchone()
    assert row is not None
    return int(row["n"])
