"""The sweep: what it repairs, what it leaves alone, and that it never stands in its own way."""

import logging
import threading
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from fanout_procrastinate import DatabaseError, SchemaError, database, models, store, sweeper
from fanout_procrastinate.sweeper import Sweeper
from tests import invariants
from tests.support import begun, counts, direct, entry, jobs, sealed, started

Conn = psycopg.Connection[dict[str, Any]]


@pytest.fixture
def own(dsn: str) -> Iterator[database.Database]:
    with direct(dsn, size=1) as made:
        yield made


@pytest.fixture
def sweep(own: database.Database) -> Sweeper:
    return Sweeper(run=own.run, lease=30.0)


def progress(own: database.Database, run_id: int) -> models.Progress:
    found = own.run(store.progress(run_id))
    assert found is not None
    return found


def age(conn: Conn, table: str, *columns: str, by: str = "1 hour") -> None:
    """Move times of a table's rows into the past."""
    moved = ", ".join(f"{column} = {column} - interval '{by}'" for column in columns)
    conn.execute(f"UPDATE {table} SET {moved}")


def test_healthy_system_is_only_read(own: database.Database, conn: Conn, dsn: str) -> None:
    """Invariant 6: it writes nothing and locks nothing, or this server would refuse it."""
    callbacks = [{"task": "done", "on": "complete", "queue": "papers", "priority": 0}]
    working = sealed(own, *map(str, range(30)), callbacks=callbacks)
    replies = [begun(own, working, conn) for _ in range(5)]
    outcomes = [
        entry(replies[0], "released", retry_in=3600.0, error="{}", result=None, wish="end"),
        entry(replies[1], "failed", error='{"type": "E"}', result=None),
        entry(replies[2], "returned", result=None, wish="end"),
        entry(replies[3]),
    ]
    own.run(store.report(working, 0, outcomes, suspect=True))
    sealed(own, callbacks=callbacks)  # closed, its callback owed
    started(own)  # still being listed
    started(own, manager_task="lister")
    paused = sealed(own, "1", "2")
    own.run(store.pause(paused))
    stopped = sealed(own, "1", "2")
    begun(own, stopped, conn)
    own.run(store.stop(stopped, status="cancelled", reason="x", abort=False))
    own.run(store.tidy(stopped, 100))
    before = invariants.written(conn)
    with direct(f"{dsn} options='-c default_transaction_read_only=on'") as reading:
        sweep = Sweeper(run=reading.run, lease=30.0)
        for report in (sweep.sweep_once(), sweep.look_once()):
            assert report == models.SweepReport() and not report.changed
    assert invariants.written(conn) == before
    invariants.check(conn)


@pytest.mark.parametrize("step", ["sweep_once", "look_once"])
def test_silent_slot_is_rescued_at_the_second_look(
    own: database.Database,
    conn: Conn,
    sweep: Sweeper,
    caplog: pytest.LogCaptureFixture,
    step: str,
) -> None:
    look = getattr(sweep, step)
    run_id = sealed(own, "1", "2")
    lost, kept = begun(own, run_id, conn), begun(own, run_id, conn)
    age(conn, "fanout_slots", "seen_at")
    report = look()
    assert report.runs == {run_id: "silent slot"} and report.done == {"marked": 2}
    assert not look().changed  # too soon to decide
    # One of them gives a sign of life: a server's outage costs nobody a crash.
    assert kept.epoch is not None and lost.epoch is not None
    own.run(store.renew([models.Holding(run_id, kept.slot, kept.epoch)], 10.0))
    age(conn, "fanout_slots", "suspect_since", by="8 s")
    report = look()
    assert report.done == {"rescued_released": 1, "dealt": 1}
    items = own.run(store.items(run_id, status=None, after=-1, limit=9))
    assert [(item.status, item.crashes) for item in items] == [("pending", 1), ("processing", 0)]
    # The dead worker's job is never put back, and what it still sends is refused.
    assert [job["status"] for job in jobs(conn)] == ["failed", "doing", "todo"]
    (reply,) = own.run(store.report(run_id, 0, [entry(lost)], suspect=True))
    assert reply.verdict == "lost"
    assert not look().changed
    assert [vars(record)["done"] for record in caplog.records] == [{"marked": 2}, report.done]
    assert [record.message for record in caplog.records] == [
        f"Run {run_id} repaired (silent slot): marked 2",
        f"Run {run_id} repaired (silent slot): dealt 1, rescued_released 1",
    ]
    invariants.check(conn, run_id)


def test_item_that_dies_alone_too_often_fails(
    own: database.Database, conn: Conn, sweep: Sweeper
) -> None:
    run_id = sealed(own, "1", max_crashes=2)
    for outcome in ("rescued_released", "rescued_failed"):
        begun(own, run_id, conn)
        age(conn, "fanout_slots", "seen_at")
        sweep.sweep_once()
        age(conn, "fanout_slots", "suspect_since", by="11 s")
        assert sweep.sweep_once().done[outcome] == 1
    assert counts(progress(own, run_id)) == {"failed": 1, "total": 1}
    assert progress(own, run_id).closed
    (group,) = own.run(store.errors(run_id, 5))
    assert group.error_type == "WorkerLost" and "died 2 times" in group.message


@pytest.mark.parametrize("wrong", [0, -1, 1], ids=["right", "one too low", "one too high"])
def test_missed_close_is_made_up_for(
    own: database.Database,
    conn: Conn,
    sweep: Sweeper,
    caplog: pytest.LogCaptureFixture,
    wrong: int,
) -> None:
    """A08: the tables say that all is done, and nobody looks at the run again."""
    callbacks = [{"task": "done", "on": "complete", "queue": "papers", "priority": 0}]
    run_id = sealed(own, "1", "2", "3", "4", callbacks=callbacks)
    conn.execute(
        "UPDATE fanout_items SET status = 'succeeded', claim = 1,"
        " finished_at = clock_timestamp(), result = '1'"
    )
    conn.execute(
        "UPDATE fanout_items SET status = 'failed', error_type = 'E', result = NULL,"
        ' error = \'{"type": "E"}\' WHERE position = 3'
    )
    conn.execute(
        "UPDATE fanout_ledgers SET cursor = 4, succeeded = 3 + %s, failed = 1, open = %s",
        [wrong, wrong < 0],
    )
    conn.execute("UPDATE fanout_runs SET open_ledgers = %s", [int(wrong < 0)])
    conn.execute("DELETE FROM fanout_slots")
    conn.execute("DELETE FROM procrastinate_jobs")
    report = sweep.sweep_once()
    assert report.done["closed"] == 1
    assert counts(progress(own, run_id)) == {"succeeded": 3, "failed": 1, "total": 4}
    assert progress(own, run_id).status == "completed"
    assert [job["task_name"] for job in jobs(conn)] == ["done"]
    assert not sweep.sweep_once().changed and len(jobs(conn)) == 1
    disagreed = "counters disagreed with its items" in caplog.text
    assert disagreed is (wrong != 0)
    invariants.check(conn, run_id)


def test_run_that_cannot_be_repaired_does_not_stop_the_others(
    own: database.Database, conn: Conn, sweep: Sweeper, caplog: pytest.LogCaptureFixture
) -> None:
    """C04: recovery is independent per run, and goes on when the obstacle is gone."""
    runs = [sealed(own, "1", "2") for _ in range(5)]
    age(conn, "fanout_slots", "seen_at")
    conn.execute("DELETE FROM procrastinate_jobs")
    conn.execute(f"""
        CREATE FUNCTION obstacle() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            IF OLD.run_id = {runs[2]} THEN RAISE 'not this one' USING ERRCODE = '23514'; END IF;
            RETURN OLD;
        END $$""")
    conn.execute(
        "CREATE TRIGGER obstacle BEFORE DELETE ON fanout_slots"
        " FOR EACH ROW EXECUTE FUNCTION obstacle()"
    )
    report = sweep.sweep_once()
    assert set(report.runs) == set(runs)
    assert list(report.errors) == [runs[2]] and "not this one" in report.errors[runs[2]]
    assert report.done == {"lost_jobs": 8, "dealt": 8}
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert vars(record)["run_id"] == runs[2]
    assert record.message.startswith(f"Run {runs[2]} could not be repaired (")
    assert "not this one" in record.message
    conn.execute("DROP TRIGGER obstacle ON fanout_slots")
    report = sweep.sweep_once()
    assert set(report.runs) == {runs[2]} and report.done == {"lost_jobs": 2, "dealt": 2}
    assert not sweep.sweep_once().changed


def test_database_that_does_not_answer_at_all(bare_dsn: str) -> None:
    with direct(bare_dsn) as bare, pytest.raises(SchemaError):
        Sweeper(run=bare.run, lease=30.0).sweep_once()
    gone = database.Database(lambda: psycopg.connect("host=/nowhere"))
    with pytest.raises(DatabaseError):
        Sweeper(run=gone.run, lease=30.0).sweep_once()
    gone.close()


def test_sweepers_at_once_repair_each_item_once(
    own: database.Database, conn: Conn, dsn: str
) -> None:
    """C04, C07: ten sweeps over the same dead workers charge each item one crash."""
    runs = [sealed(own, *map(str, range(8)), max_in_flight=8) for _ in range(4)]
    for run_id in runs:
        for _ in range(8):
            begun(own, run_id, conn)
    age(conn, "fanout_slots", "seen_at")
    conn.execute("UPDATE fanout_slots SET suspect_since = clock_timestamp() - interval '11 s'")
    reports: list[models.SweepReport] = []
    barrier = threading.Barrier(10)

    def sweep_once() -> None:
        with direct(dsn, size=1) as mine:
            mine.run(store.untidy(1))
            barrier.wait(10)
            reports.append(Sweeper(run=mine.run, lease=30.0).sweep_once())

    threads = [threading.Thread(target=sweep_once) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(report.done.get("rescued_released", 0) for report in reports) == 32
    assert not any(report.errors for report in reports)
    rows = conn.execute("SELECT DISTINCT crashes, status FROM fanout_items").fetchall()
    assert rows == [{"crashes": 1, "status": "pending"}]
    invariants.check(conn)


def test_job_rows_that_are_gone_are_dealt_again(
    own: database.Database, conn: Conn, sweep: Sweeper
) -> None:
    """A11: jobs deleted or cancelled by hand."""
    run_id = sealed(own, "1", "2", "3")
    conn.execute(
        "DELETE FROM procrastinate_jobs WHERE id = (SELECT min(id) FROM procrastinate_jobs)"
    )
    conn.execute(
        "SELECT procrastinate_cancel_job_v1(max(id), false, false) FROM procrastinate_jobs"
    )
    age(conn, "fanout_slots", "seen_at", by="2 s")
    report = sweep.sweep_once()
    assert report.done == {"lost_jobs": 2, "dealt": 2}
    invariants.check(conn, run_id)


def test_unfinished_stop_and_deadline(own: database.Database, conn: Conn, sweep: Sweeper) -> None:
    late = sealed(own, "1", "2", deadline="2020-01-01T00:00:00Z")
    marked = sealed(own, "1", "2")
    conn.execute(
        "UPDATE fanout_runs SET closing = 'failed', reason = 'tolerance' WHERE id = %s", [marked]
    )
    report = sweep.sweep_once()
    assert report.runs == {late: "deadline", marked: "stop pending"}
    for run_id, words in ((late, "its deadline passed"), (marked, "tolerance")):
        found = progress(own, run_id)
        assert found.status == "failed" and words in (found.reason or "")
        assert counts(found) == {"cancelled": 2, "total": 2}
    # What is left is rewritten in the same pass.
    assert report.done["tidied"] == 4
    assert conn.execute("SELECT DISTINCT status FROM fanout_items").fetchall() == [
        {"status": "cancelled"}
    ]


def test_rows_of_stopped_runs_are_rewritten_in_batches(
    own: database.Database, conn: Conn, sweep: Sweeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweeper, "_ROWS_PER_BATCH", 10)
    monkeypatch.setattr(sweeper, "_BATCHES_PER_SWEEP", 3)
    runs = [sealed(own, *map(str, range(45))) for _ in range(2)]
    for run_id in runs:
        own.run(store.stop(run_id, status="cancelled", reason="x", abort=False))
    assert sweep.sweep_once().done == {"tidied": 60}
    assert sweep.sweep_once().done == {"tidied": 30}
    assert not sweep.sweep_once().changed
    # A reader never saw anything else.
    items = own.run(store.items(runs[0], status="cancelled", after=-1, limit=99))
    assert len(items) == 45


def test_old_runs_are_removed_in_batches(
    own: database.Database, conn: Conn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweeper, "_ROWS_PER_BATCH", 10)
    monkeypatch.setattr(sweeper, "_BATCHES_PER_SWEEP", 3)
    keeping = Sweeper(run=own.run, lease=30.0, retention=60.0, tasks=["child"])
    for _ in range(2):
        run_id = sealed(own, *map(str, range(25)))
        own.run(store.stop(run_id, status="cancelled", reason="x", abort=False))
    keeping.sweep_once()
    age(conn, "fanout_runs", "closed_at")
    age(conn, "procrastinate_events", "at")
    before = len(jobs(conn))
    first = keeping.sweep_once()
    assert first.done["pruned"] <= 30 and first.done["pruned_jobs"] == before
    while keeping.sweep_once().changed:
        pass
    for table in ("runs", "items", "ledgers", "slots", "closes", "callbacks"):
        assert conn.execute(f"SELECT * FROM fanout_{table}").fetchall() == []
    assert jobs(conn) == []


def test_run_that_could_move_and_does_not_is_closed(
    own: database.Database, conn: Conn, sweep: Sweeper
) -> None:
    """A12: no unbounded waiting, and a reason that says so."""
    run_id = sealed(own, "1", "2", stuck_after=5.0)
    conn.execute("DELETE FROM procrastinate_jobs")
    age(conn, "fanout_slots", "seen_at")
    conn.execute("""
        CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN RAISE 'the host takes no jobs'; END $$""")
    conn.execute(
        "CREATE TRIGGER refuse BEFORE INSERT ON procrastinate_jobs"
        " FOR EACH ROW EXECUTE FUNCTION refuse()"
    )
    assert sweep.sweep_once().done == {"lost_jobs": 2, "idle": 1}
    age(conn, "fanout_runs", "idle_seen_at", by="10 s")
    report = sweep.sweep_once()
    assert "stuck" in report.runs[run_id] and report.done["stopped"] == 1
    found = progress(own, run_id)
    assert found.status == "failed" and counts(found) == {"cancelled": 2, "total": 2}
    assert "stuck: no progress for 5 s" in (found.reason or "")
    assert not sweep.sweep_once().changed
