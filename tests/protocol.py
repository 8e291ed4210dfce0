"""The protocol's functions as Python methods, and a clock that tests set as they like."""

import dataclasses
import datetime
import json
import secrets
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg.rows import dict_row, tuple_row

Row = dict[str, Any]

# Functions find these before PostgreSQL's own where `fanout_clock` stands first in the search
# path. So time moves only when a test says so, and a failing example fails again.
CLOCK = """
CREATE SCHEMA fanout_clock;
CREATE FUNCTION fanout_clock.clock_timestamp() RETURNS timestamptz LANGUAGE sql VOLATILE AS
    $$ SELECT pg_catalog.current_setting('fanout_test.now')::timestamptz $$;
CREATE FUNCTION fanout_clock.now() RETURNS timestamptz LANGUAGE sql STABLE AS
    $$ SELECT pg_catalog.current_setting('fanout_test.now')::timestamptz $$;
CREATE FUNCTION fanout_clock.random() RETURNS double precision LANGUAGE sql VOLATILE AS
    $$ SELECT 0.5::double precision $$;
SET search_path = fanout_clock, public, pg_catalog;
ALTER TABLE fanout_runs ALTER created_at SET DEFAULT clock_timestamp();
ALTER TABLE fanout_ledgers ALTER updated_at SET DEFAULT clock_timestamp();
ALTER TABLE fanout_slots ALTER seen_at SET DEFAULT clock_timestamp();
ALTER TABLE fanout_callbacks ALTER seen_at SET DEFAULT clock_timestamp();
ALTER TABLE fanout_permits ALTER seen_at SET DEFAULT clock_timestamp();
ALTER TABLE procrastinate_events ALTER at SET DEFAULT now();
ALTER TABLE procrastinate_workers ALTER last_heartbeat SET DEFAULT now();
"""

# The host refuses every job whose queueing lock or task begins with this setting.
REFUSAL = """
CREATE FUNCTION fanout_refuse() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.task_name = ANY (string_to_array(current_setting('fanout_test.refused', true), ',')) THEN
        RAISE EXCEPTION 'the host refuses jobs of task %', NEW.task_name;
    END IF;
    RETURN NEW;
END;
$$;
CREATE TRIGGER fanout_refuse BEFORE INSERT ON procrastinate_jobs
    FOR EACH ROW EXECUTE FUNCTION fanout_refuse();
"""

_REPLY_COLUMNS = (
    "slot, verdict, epoch, ledger, position, claim, failures, crashes, item_key, payload,"
    " wait_seconds, stop, freed, ahead"
)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One slot's part of a report."""

    slot: int
    epoch: int
    wish: str = "next"
    position: int | None = None
    claim: int | None = None
    outcome: str | None = None
    retry_in: float | None = None
    result: str | None = None
    error: str | None = None
    sanitised: bool | None = None
    ahead: int | None = None


@dataclass(frozen=True, kw_only=True)
class Reply:
    """The answer to it."""

    slot: int
    verdict: str
    epoch: int | None
    ledger: int
    position: int | None
    claim: int | None
    failures: int | None
    crashes: int | None
    item_key: str | None
    payload: str | None
    wait_seconds: float | None
    stop: bool
    freed: bool = False
    ahead: bool = False

    def entry(self, outcome: str | None = None, **columns: Any) -> Entry:
        """Return what its receiver reports next."""
        if self.position is not None and outcome is not None:
            columns |= {"position": self.position, "claim": self.claim, "outcome": outcome}
            if outcome == "succeeded":
                columns.setdefault("result", json.dumps({"position": self.position}))
            elif outcome != "returned":
                columns.setdefault("error", '{"type": "Broken", "message": "out of order"}')
        assert self.epoch is not None
        return Entry(slot=self.slot, epoch=self.epoch, **columns)


def spec(**changes: Any) -> Row:
    """Return a run's columns, as `FanOut` would send them."""
    return {
        "name": "tests.manager",
        "run_key": None,
        "args_digest": None,
        "args": {},
        "manager_task": None,
        "manager_queue": "papers",
        "child_task": "child",
        "child_queue": "papers",
        "callbacks": [],
        "max_in_flight": 4,
    } | changes


def callback(task: str, on: str = "complete") -> Row:
    return {"task": task, "on": on, "queue": "papers", "priority": 0}


class Protocol:
    """One connection's view of the protocol."""

    def __init__(self, conn: psycopg.Connection[Any]) -> None:
        self.conn = conn

    def rows(self, query: str, *params: Any) -> list[Row]:
        with self.conn.cursor(row_factory=dict_row) as cursor:
            return cursor.execute(query, params).fetchall()  # type: ignore[call-overload]

    def row(self, query: str, *params: Any) -> Row | None:
        rows = self.rows(query, *params)
        return rows[0] if rows else None

    def value(self, query: str, *params: Any) -> Any:
        row = self.row(query, *params)
        return None if row is None else next(iter(row.values()))

    def execute(self, query: str, *params: Any) -> int:
        return self.conn.execute(query, params).rowcount  # type: ignore[call-overload]

    # -- starting

    def start(self, spec: Mapping[str, Any]) -> Row:
        row = self.row("SELECT * FROM fanout_start_v1(%s::jsonb)", json.dumps(spec))
        assert row is not None
        return row

    def manager_begin(self, run: int, job: int) -> Row | None:
        return self.row("SELECT * FROM fanout_manager_begin_v1(%s, %s)", run, job)

    def append(
        self, run: int, fence: int, keys: Sequence[str | None], payloads: Sequence[str] = ()
    ) -> Row | None:
        payloads = payloads or [json.dumps({"key": key}) for key in keys]
        return self.row(
            "SELECT * FROM fanout_append_v1(%s, %s, %s::text[], %s::jsonb[], NULL)",
            run,
            fence,
            list(keys),
            list(payloads),
        )

    def seal(self, run: int, fence: int) -> str | None:
        return self.value("SELECT fanout_seal_v1(%s, %s)", run, fence)

    def manager_fail(
        self, run: int, fence: int, retry_in: float | None, *, charge: bool = True
    ) -> bool | None:
        return self.value(
            "SELECT fanout_manager_fail_v1(%s, %s, 'it raised', %s::double precision, %s)",
            run,
            fence,
            retry_in,
            charge,
        )

    def stage(self, items: int | Sequence[str | None], **changes: Any) -> int:
        """Start a run, store its items and seal it, as `.map` does; return its id."""
        keys = [None] * items if isinstance(items, int) else items
        run: int = self.start(spec(**changes))["run_id"]
        if keys:
            assert self.append(run, 1, keys) is not None
        assert self.seal(run, 1) in ("processing", "completed")
        return run

    def callback_begin(self, run: int, generation: int, task: str, job: int) -> int | None:
        return self.value(
            "SELECT attempt FROM fanout_callback_begin_v1(%s, %s, %s, %s)",
            run,
            generation,
            task,
            job,
        )

    def callback_end(
        self,
        run: int,
        generation: int,
        task: str,
        job: int,
        error: str | None = None,
        retry_in: float | None = None,
    ) -> bool:
        return bool(
            self.value(
                "SELECT fanout_callback_end_v1(%s, %s, %s, %s, %s::jsonb, %s::double precision)",
                run,
                generation,
                task,
                job,
                error,
                retry_in,
            )
        )

    # -- slots

    def begin(
        self,
        run: int,
        slot: int,
        job: int,
        token: uuid.UUID | None = None,
        *,
        ledger: int | None = 0,
        suspect: bool = True,
    ) -> Reply:
        (row,) = self.rows(
            f"SELECT {_REPLY_COLUMNS} FROM fanout_begin_v1(%s, %s, %s, %s, %s, %s)",
            run,
            slot,
            job,
            token or uuid.UUID(bytes=secrets.token_bytes(16)),
            ledger,
            suspect,
        )
        return Reply(**row)

    def report(
        self,
        run: int,
        ledger: int,
        *entries: Entry,
        suspect: bool = True,
    ) -> list[Reply]:
        """Send one report; the replies come in the order of the entries."""
        columns = [list(column) for column in zip(*map(dataclasses.astuple, entries), strict=True)]
        rows = self.rows(
            f"SELECT {_REPLY_COLUMNS} FROM fanout_report_v1(%s, %s, false, %s, %s::integer[],"
            " %s::bigint[], %s::text[], %s::bigint[], %s::bigint[], %s::text[],"
            " %s::double precision[], %s::jsonb[], %s::jsonb[], %s::boolean[], %s::bigint[])",
            run,
            ledger,
            suspect,
            *columns,
        )
        replies = {(row["slot"], row["epoch"]): Reply(**row) for row in rows}
        assert len(replies) == len(rows) == len(entries), "one reply for each slot"
        return [replies[entry.slot, entry.epoch] for entry in entries]

    def renew(
        self, holdings: Sequence[tuple[int, int, int]], fresh: float = 0.0
    ) -> dict[tuple[int, int, int], str]:
        rows = self.rows(
            "SELECT * FROM fanout_renew_v1(%s::bigint[], %s::integer[], %s::bigint[], %s)",
            [run for run, _, _ in holdings],
            [slot for _, slot, _ in holdings],
            [epoch for _, _, epoch in holdings],
            fresh,
        )
        return {(row["run_id"], row["slot"], row["epoch"]): row["verdict"] for row in rows}

    # -- sweeping

    def sweep_plan(self, lease: float = 30.0) -> dict[int, str]:
        rows = self.rows("SELECT * FROM fanout_sweep_plan_v1(%s, 1000)", lease)
        return {row["run_id"]: row["finding"] for row in rows}

    def sweep_run(self, run: int, lease: float = 30.0) -> Row:
        done: Row = self.value("SELECT fanout_sweep_run_v1(%s, %s)", run, lease)
        return done

    def sweep(self, lease: float = 30.0) -> dict[int, Row]:
        """Sweep once; return what was done to each run that had a finding."""
        return {run: self.sweep_run(run, lease) for run in self.sweep_plan(lease)}

    def tidy(self, run: int, limit: int = 1000) -> int:
        rows: int = self.value("SELECT fanout_tidy_v1(%s, %s)", run, limit)
        return rows

    # -- control

    def stop(
        self,
        run: int,
        status: str = "cancelled",
        reason: str | None = "by hand",
        *,
        abort: bool = False,
    ) -> str | None:
        return self.value("SELECT fanout_stop_v1(%s, %s, %s, %s)", run, status, reason, abort)

    def pause(self, run: int) -> str | None:
        return self.value("SELECT fanout_pause_v1(%s)", run)

    def resume(self, run: int) -> str | None:
        return self.value("SELECT fanout_resume_v1(%s)", run)

    def update(self, run: int, **changes: Any) -> str | None:
        return self.value("SELECT fanout_update_v1(%s, %s::jsonb)", run, json.dumps(changes))

    def retry_failed(
        self,
        run: int,
        statuses: Sequence[str] = ("failed", "cancelled"),
        error_type: str | None = None,
    ) -> int | None:
        return self.value(
            "SELECT fanout_retry_failed_v1(%s, %s::text[], %s::text)",
            run,
            list(statuses),
            error_type,
        )

    # -- reading

    def progress(self, run: int) -> Row:
        progress: Row = self.value("SELECT fanout_progress_v1(%s)", run)
        return progress

    def run(self, run: int) -> Row:
        row = self.row("SELECT * FROM fanout_runs WHERE id = %s", run)
        assert row is not None
        return row

    def item(self, run: int, position: int) -> Row:
        row = self.row(
            "SELECT * FROM fanout_items WHERE run_id = %s AND position = %s", run, position
        )
        assert row is not None
        return row

    def slots(self, run: int) -> list[Row]:
        return self.rows("SELECT * FROM fanout_slots WHERE run_id = %s ORDER BY slot", run)

    def counts(self, run: int) -> dict[str, int]:
        """Return how many items are in each state that has any."""
        names = ("pending", "processing", "succeeded", "failed", "cancelled")
        return {name: n for name, n in self.progress(run).items() if name in names and n}

    # -- the host

    def worker(self) -> int:
        worker: int = self.value("INSERT INTO procrastinate_workers DEFAULT VALUES RETURNING id")
        return worker

    def beat(self, worker: int) -> None:
        self.execute(
            "UPDATE procrastinate_workers SET last_heartbeat = clock_timestamp() WHERE id = %s",
            worker,
        )

    def fetch(self, worker: int | None = None, queue: str = "papers") -> Row | None:
        job = self.row(
            "SELECT * FROM procrastinate_fetch_job_v2(ARRAY[%s]::varchar[], %s)", queue, worker
        )
        return job if job and job["id"] is not None else None

    def finish(self, job: int, status: str = "succeeded") -> None:
        """End a job as the host does, which raises where the job is no longer at work."""
        self.execute("SELECT procrastinate_finish_job_v1(%s, %s, false)", job, status)

    def defer(self, task: str, queueing_lock: str | None = None, queue: str = "papers") -> int:
        job: int = self.value(
            "SELECT (procrastinate_defer_jobs_v1(ARRAY[ROW(%s, %s, 0, NULL, %s, '{}'::jsonb, NULL)"
            "::procrastinate_job_to_defer_v1]))[1]",
            queue,
            task,
            queueing_lock,
        )
        return job

    def retry_job(self, job: int) -> None:
        self.execute(
            "SELECT procrastinate_retry_job_v2(%s, clock_timestamp(), NULL, NULL, NULL)", job
        )

    def cancel_job(self, job: int) -> None:
        self.execute("SELECT procrastinate_cancel_job_v1(%s, false, false)", job)

    def delete_job(self, job: int) -> None:
        self.execute("DELETE FROM procrastinate_jobs WHERE id = %s", job)

    def jobs(self, task: str, status: str = "todo") -> list[Row]:
        return self.rows(
            "SELECT * FROM procrastinate_jobs WHERE task_name = %s AND status::text = %s"
            " ORDER BY id",
            task,
            status,
        )


class Clocked(Protocol):
    """The protocol on a clock that stands until `advance`."""

    def __init__(self, conn: psycopg.Connection[Any]) -> None:
        super().__init__(conn)
        self.conn.execute(CLOCK)
        self.now = datetime.datetime(2031, 1, 1, tzinfo=datetime.UTC)
        self.advance(0.0)

    def advance(self, seconds: float) -> None:
        """Let time pass for all that PostgreSQL does on this connection."""
        self.now += datetime.timedelta(seconds=seconds)
        self.execute("SELECT set_config('fanout_test.now', %s, false)", self.now.isoformat())


def small_ledgers(conn: psycopg.Connection[Any], items: int = 3) -> None:
    """Give each run one ledger for so many items, so that small runs have several."""
    replace(conn, "fanout_seal_v1", "r.staged / 1000", f"r.staged / {items}")


def replace(conn: psycopg.Connection[Any], function: str, old: str, new: str) -> None:
    """Change the text of a function in this test's database."""
    with conn.cursor(row_factory=tuple_row) as cursor:
        row = cursor.execute("SELECT pg_get_functiondef(%s::regproc)", [function]).fetchone()
        assert row is not None
        (text,) = row
        assert text.count(old) >= 1, f"{function} has changed"
        cursor.execute(text.replace(old, new))
