"""Apps at work inside the test's own process, and what looks into their database."""

import asyncio
import contextlib
import dataclasses
import threading
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

import procrastinate
import psycopg
import pytest
from psycopg.rows import dict_row

from fanout_procrastinate import (
    Backoff,
    FanOut,
    Progress,
    Run,
    database,
    errors,
    models,
    store,
)
from fanout_procrastinate.fanout import SWEEP_TASK

QUICK = Backoff(initial=0.01, maximum=0.01, jitter=0)
"""Tries again at once."""


@contextlib.asynccontextmanager
async def opened(app: procrastinate.App) -> AsyncIterator[procrastinate.App]:
    """Open an app; at the end everything of ours is closed, and the app."""
    async with app.open_async():
        try:
            yield app
        finally:
            await FanOut.of(app).close_async()


@contextlib.asynccontextmanager
async def working(app: procrastinate.App, **options: Any) -> AsyncIterator[asyncio.Task[None]]:
    """Let a worker of an open app work while the block runs."""
    given: dict[str, Any] = {"concurrency": 10, "fetch_job_polling_interval": 0.2} | options
    worker = asyncio.create_task(
        app.run_worker_async(wait=True, install_signal_handlers=False, **given), name="test-worker"
    )
    try:
        yield worker
    finally:
        await stop(worker)


async def stop(worker: asyncio.Task[None]) -> None:
    """Ask a worker to stop, and wait until it has: jobs at work end first."""
    worker.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await worker


@contextlib.asynccontextmanager
async def serving(app: procrastinate.App, **options: Any) -> AsyncIterator[asyncio.Task[None]]:
    """Open an app and let a worker work while the block runs."""
    async with opened(app), working(app, **options) as worker:
        yield worker


async def finished(run: Run, timeout: float = 20.0) -> Progress:
    """Wait for the run's close and for its callbacks."""
    await run.wait_async(timeout=timeout)
    async with asyncio.timeout(timeout):
        while True:
            progress = await run.progress_async()
            if set(progress.callbacks.values()) <= {"done", "failed"}:
                return progress
            await asyncio.sleep(0.01)


async def work_off(app: procrastinate.App, *runs: Run, **options: Any) -> list[Progress]:
    """Let a worker of an open app finish these runs."""
    async with working(app, **options):
        return [await finished(run) for run in runs]


def counts(progress: Progress) -> Mapping[str, int]:
    """Return the counters that are not zero, and the total."""
    names = ("pending", "processing", "succeeded", "failed", "cancelled", "duplicates")
    found = {name: getattr(progress, name) for name in names if getattr(progress, name)}
    return found | {"total": progress.total if progress.total is not None else -1}


def jobs(conn: psycopg.Connection[Any], **where: Any) -> list[dict[str, Any]]:
    """Return the host's job rows, the oldest first, without sweeps; narrowed by equal columns."""
    condition = " AND ".join(
        [f"task_name <> '{SWEEP_TASK}'", *(f"{column} = %({column})s" for column in where)]
    )
    with conn.cursor(row_factory=dict_row) as cursor:
        return cursor.execute(
            f"SELECT * FROM procrastinate_jobs WHERE {condition} ORDER BY id", where
        ).fetchall()


def unconnected() -> procrastinate.App:
    """Return an app for tests that never reach a database."""
    return procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo="host=/nowhere"))


@dataclasses.dataclass(frozen=True)
class Probe(store.Call[Any]):
    """A call of the test's own; answers its rows."""

    text: str = ""

    @property
    def sql(self) -> str:
        return self.text


def probe(sql: str, **params: Any) -> Probe:
    """Return a call of the test's own: `probe("SELECT %(x)s AS x", x=1)`."""
    return Probe("probe", params, list, sql)


def flaky(conn: psycopg.Connection[Any], code: str, times: int) -> Probe:
    """Return a call that fails so often with this SQLSTATE, and then answers."""
    conn.execute("CREATE SEQUENCE IF NOT EXISTS tries")
    conn.execute("ALTER SEQUENCE tries RESTART")
    conn.execute(f"""
        CREATE OR REPLACE FUNCTION flaky() RETURNS bigint LANGUAGE plpgsql AS $$
        DECLARE n bigint := nextval('tries');
        BEGIN
            IF n <= {times} THEN
                RAISE EXCEPTION 'try % of fanout', n USING ERRCODE = '{code}';
            END IF;
            RETURN n;
        END $$""")
    return probe("SELECT flaky() AS n")


@contextlib.contextmanager
def direct(dsn: str, size: int = 4) -> Iterator[database.Database]:
    """Run calls of the store on connections of the test's own."""
    own = database.Database(lambda: psycopg.connect(dsn), size=size)
    try:
        yield own
    finally:
        own.close()


def started(own: database.Database, **columns: Any) -> int:
    """Start a run without a manager job: the test stages, as `map` does."""
    spec = {
        "name": "child",
        "child_task": "child",
        "child_queue": "papers",
        "manager_queue": "papers",
        "max_in_flight": 10,
    }
    return own.run(store.start(spec | columns)).run_id


def sealed(own: database.Database, *payloads: str, **columns: Any) -> int:
    """Start, stage and seal a run."""
    run_id = started(own, **columns)
    own.run(store.append(run_id, 1, [f"k{n}" for n in range(len(payloads))], payloads))
    assert own.run(store.seal(run_id, 1)) is not None
    return run_id


def begun(own: database.Database, run_id: int, conn: psycopg.Connection[Any]) -> models.Reply:
    """Fetch and begin a queued slot of the run, as a worker and its job would."""
    (slot, *_) = conn.execute(
        "SELECT slot, job_id FROM fanout_slots WHERE run_id = %s AND NOT active ORDER BY slot",
        [run_id],
    ).fetchall()
    conn.execute("UPDATE procrastinate_jobs SET status = 'doing' WHERE id = %s", [slot["job_id"]])
    return own.run(
        store.begin(
            run_id, slot["slot"], slot["job_id"], token=str(uuid.uuid4()), ledger=None, suspect=True
        )
    )


def entry(reply: models.Reply, outcome: str | None = "succeeded", **columns: Any) -> models.Entry:
    """Return an outcome of the item in hand."""
    assert reply.epoch is not None
    return models.Entry(
        slot=reply.slot,
        epoch=reply.epoch,
        position=reply.position,
        claim=reply.claim,
        outcome=outcome,
        **{"wish": "next", "result": "1"} | columns,
    )


class Recorder:
    """Sees every call on the library's own connections; fails or holds some where told to.

    It is the real store, with one verb that fails so many times.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[store.Call[Any]] = []
        self._failures: dict[tuple[str, bool], int] = {}
        self._held: dict[str, threading.Event] = {}
        original = database.Database.run

        def run(own: database.Database, call: store.Call[Any]) -> Any:
            self.calls.append(call)
            if call.name in self._held:
                assert self._held[call.name].wait(20)
            self._perhaps_fail(call.name, before=True)
            result = original(own, call)
            self._perhaps_fail(call.name, before=False)
            return result

        monkeypatch.setattr(database.Database, "run", run)

    def fail(self, name: str, times: int, *, before: bool) -> None:
        """Fail the next calls of this name before they are executed, or lose their replies."""
        self._failures[name, before] = times

    @contextlib.contextmanager
    def held(self, name: str) -> Iterator[None]:
        """Hold calls of this name until the block ends."""
        gate = self._held[name] = threading.Event()
        try:
            yield
        finally:
            del self._held[name]
            gate.set()

    def of(self, name: str) -> list[store.Call[Any]]:
        """Return the calls of this name."""
        return [call for call in self.calls if call.name == name]

    def _perhaps_fail(self, name: str, *, before: bool) -> None:
        left = self._failures.get((name, before), 0)
        if left:
            self._failures[name, before] = left - 1
            raise errors.DatabaseError("the connection was lost", transient=True)
