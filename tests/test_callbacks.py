"""Callbacks: which are owed by which close, their own retries, the state that shows."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import procrastinate
import psycopg
import pytest

from fanout_procrastinate import (
    Backoff,
    FanOut,
    Manager,
    PermanentError,
    Run,
    RunClosed,
    fanout_child,
    fanout_manager,
)
from tests import invariants
from tests.support import (
    QUICK,
    Recorder,
    counts,
    finished,
    jobs,
    opened,
    serving,
    stop,
    work_off,
    working,
)
from tests.waiting import wait_until_async

Conn = psycopg.Connection[dict[str, Any]]


def declare(app: procrastinate.App, **options: Any) -> Manager[Any, Any]:
    """Declare a manager of items that fail where they are negative."""

    @fanout_child(app, name="child", queue="papers")
    async def child(item: int) -> int:
        if item < 0:
            raise ValueError(item)
        return item

    @fanout_manager(app, child=child, name="lister", **options)
    def manager(items: list[Any]) -> Any:
        if items == ["broken"]:
            raise ValueError("nothing to list")
        return items

    return manager


@pytest.mark.parametrize(
    ("items", "options", "status", "fired"),
    [
        ([1, 2], {}, "completed", {"on_complete", "on_success"}),
        ([], {}, "completed", {"on_complete", "on_success"}),
        ([1, -2], {}, "completed", {"on_complete", "on_failure"}),
        ([-1, -2], {"tolerate": 0}, "failed", {"on_complete", "on_failure"}),
        (["broken"], {}, "failed", {"on_complete", "on_failure"}),
        ([1], {"cancelled": "before the seal"}, "cancelled", {"on_complete", "on_failure"}),
        ([1], {"cancelled": "after the seal"}, "cancelled", {"on_complete", "on_failure"}),
        ([1], {"deadline": -1}, "failed", {"on_complete", "on_failure"}),
    ],
    ids=["clean", "empty", "failures", "tolerance", "manager", "early", "cancelled", "deadline"],
)
async def test_which_callbacks_fire(
    app: procrastinate.App,
    conn: Conn,
    items: list[Any],
    options: dict[str, Any],
    status: str,
    fired: set[str],
) -> None:
    manager = declare(app)
    called: list[tuple[str, str, int]] = []

    def note(name: str, run: Run) -> None:
        closed = run.closed_progress
        assert closed is not None and closed.closed
        called.append((name, closed.status, closed.generation))

    @manager.on_complete
    def on_complete(run: Run) -> None:
        note("on_complete", run)

    @manager.on_success
    async def on_success(run: Run) -> None:
        note("on_success", run)

    @manager.on_failure
    def on_failure(run: Run) -> None:
        note("on_failure", run)

    cancelled = options.pop("cancelled", None)
    async with opened(app):
        run = await manager.configure(**options).defer_async(items=items)
        if cancelled == "after the seal":
            await work_off_manager(app, run)
        if cancelled:
            await run.cancel_async()
        if "deadline" in options:
            await FanOut.of(app).sweep_async()
        (progress,) = await work_off(app, run)
        assert progress.status == status
        assert dict(progress.callbacks) == {f"{__name__}.{name}": "done" for name in fired}
        assert sorted(called) == sorted((name, status, 1) for name in fired)
        frozen = await run.closed_progress_async()
        assert frozen is not None and frozen.total == progress.total
    invariants.check(conn)
    assert {job["queueing_lock"] for job in jobs(conn) if "on_" in job["task_name"]} == {None}


async def work_off_manager(app: procrastinate.App, run: Run) -> None:
    """Let the manager list, and nobody work: the run is paused."""
    await run.pause_async()
    async with working(app):

        async def listed() -> bool:
            return (await run.progress_async()).total is not None

        await wait_until_async(listed)


async def test_callback_gets_its_run(app: procrastinate.App) -> None:
    manager = declare(app)
    seen: list[Any] = []

    @manager.on_complete
    async def report(run: Run) -> None:
        seen.append((run.id, run.args, (await run.facts_async()).tags, run.created))
        seen.append([result async for result in run.results()])
        seen.append([group.error_type for group in await run.errors_async()])
        seen.append(dict((await run.progress_async()).callbacks))

    async with serving(app):
        run = await manager.configure(tags=["t"]).defer_async(items=[1, -1, 2])
        await finished(run)
    assert seen == [
        (run.id, {"items": [1, -1, 2]}, ("t",), False),
        [1, 2],
        ["ValueError"],
        {f"{__name__}.report": "running"},
    ]


async def test_states_from_owed_to_done(app: procrastinate.App, conn: Conn) -> None:
    manager = declare(app)
    begun, let_go = asyncio.Event(), asyncio.Event()

    @manager.on_complete(name="report", queue="reports")
    async def report(run: Run) -> None:
        begun.set()
        await let_go.wait()

    async def state(run: Run) -> str:
        return (await run.progress_async()).callbacks["report"]

    async with opened(app):
        async with working(app, queues=["papers"]):
            run = await manager.defer_async(items=[])
            await run.wait_async(timeout=10)
        assert await state(run) == "owed"
        async with working(app, queues=["reports"]):
            await begun.wait()
            assert await state(run) == "running"
            let_go.set()
            await finished(run)
            assert await state(run) == "done"
    (job,) = jobs(conn, task_name="report")
    assert (job["queue_name"], job["status"]) == ("reports", "succeeded")


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_callback_that_raises_is_tried_again(
    app: procrastinate.App, conn: Conn, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    manager = declare(app)
    tries: list[int] = []

    def failing(run: Run) -> None:
        tries.append(len(tries))
        if len(tries) < 4:
            raise ValueError("not yet")  # of whatever class: its own retries

    async def failing_async(run: Run) -> None:
        failing(run)

    callback = failing if kind == "sync" else failing_async
    manager.on_complete(name="report", backoff=QUICK)(callback)
    others: list[int] = []

    @manager.on_success
    def other(run: Run) -> None:
        others.append(run.id)

    async with serving(app):
        run = await manager.defer_async(items=[1])
        progress = await finished(run)
    assert dict(progress.callbacks) == {"report": "done", f"{__name__}.other": "done"}
    assert len(tries) == 4 and others == [run.id]
    assert [job["status"] for job in jobs(conn, task_name="report")] == [
        "failed",
        "failed",
        "failed",
        "succeeded",
    ]
    failures = [vars(record) for record in caplog.records if record.message == "Callback failed"]
    assert [(one["attempt"], one["again"]) for one in failures] == [(1, True), (2, True), (3, True)]


class Odd(BaseException):
    def __str__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(
    ("error", "tries"),
    [
        (ValueError("x\0y"), 3),
        (PermanentError("never"), 1),
        (SystemExit(1), 3),
        (KeyboardInterrupt(), 3),
        (asyncio.CancelledError(), 3),
        (Odd(), 3),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
async def test_callback_that_never_works_ends_as_failed(
    app: procrastinate.App, conn: Conn, error: BaseException, tries: int
) -> None:
    manager = declare(app)
    called: list[int] = []

    @manager.on_complete(name="report", backoff=QUICK, max_attempts=3)
    async def report(run: Run) -> None:
        called.append(1)
        raise error

    async with serving(app):
        run = await manager.defer_async(items=[1])
        progress = await finished(run)
        assert dict(progress.callbacks) == {"report": "failed"} and len(called) == tries
        assert progress.status == "completed"  # the run's own end stands
        assert not (await FanOut.of(app).sweep_async()).changed
    (row,) = conn.execute("SELECT error->>'type' AS type FROM fanout_callbacks").fetchall()
    assert row["type"].rpartition(".")[2] == type(error).__name__
    assert {job["status"] for job in jobs(conn, task_name="report")} <= {"failed", "aborted"}
    invariants.check(conn)


async def test_callback_of_a_stopped_worker_is_owed_again(
    app: procrastinate.App, conn: Conn
) -> None:
    manager = declare(app)
    begun = asyncio.Event()
    calls: list[str] = []

    @manager.on_complete(name="report", backoff=Backoff(initial=60))
    async def report(run: Run) -> None:
        calls.append("begun")
        begun.set()
        if len(calls) == 1:
            await asyncio.Event().wait()

    async with opened(app):
        async with working(app, shutdown_graceful_timeout=0.05) as worker:
            run = await manager.defer_async(items=[])
            await begun.wait()
            await stop(worker)
        assert (await run.progress_async()).callbacks["report"] == "owed"
        # No wait and no charge: it did nothing wrong.
        (progress,) = await work_off(app, run)
        assert progress.callbacks["report"] == "done" and len(calls) == 2
    invariants.check(conn)


async def test_callback_whose_worker_died_runs_again(app: procrastinate.App, conn: Conn) -> None:
    """A07 (c): what it did before has to be repeatable; the run is closed all the same."""
    manager = declare(app)
    called: list[int] = []

    @manager.on_complete(name="report")
    def report(run: Run) -> None:
        called.append(run.id)

    async with opened(app):
        run = await manager.defer_async(items=[])
        async with working(app, queues=["papers"]):
            await finished(run)
        await FanOut.of(app).close_async()  # nobody else sweeps
        conn.execute(
            "UPDATE fanout_callbacks SET state = 'running',"
            " seen_at = clock_timestamp() - interval '1 hour',"
            " suspect_since = clock_timestamp() - interval '1 min'"
        )
        assert (await FanOut.of(app).sweep_async()).done == {"callbacks": 1}
        (progress,) = await work_off(app, run)
        assert progress.callbacks["report"] == "done" and called == [run.id] * 2


@pytest.mark.parametrize("before", [True, False], ids=["not executed", "reply lost"])
async def test_end_of_a_callback_is_sent_until_it_is_known(
    app: procrastinate.App, conn: Conn, monkeypatch: pytest.MonkeyPatch, before: bool
) -> None:
    """The database is away when the callback ends: what is done is not done again."""
    manager = declare(app)
    called: list[int] = []
    recorder = Recorder(monkeypatch)
    recorder.fail("callback_end", 3, before=before)

    @manager.on_complete(name="report")
    def report(run: Run) -> None:
        called.append(run.id)

    async with serving(app):
        run = await manager.defer_async(items=[])
        progress = await finished(run)
    assert progress.callbacks["report"] == "done" and called == [run.id]
    assert [job["status"] for job in jobs(conn, task_name="report")] == ["succeeded"]


async def test_callback_is_held_until_its_end_is_recorded(
    app: procrastinate.App, conn: Conn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long that takes: nobody takes it over and calls it again."""
    FanOut(app, lease=1.0)
    manager = declare(app)
    called: list[int] = []
    recorder = Recorder(monkeypatch)

    @manager.on_complete(name="report")
    def report(run: Run) -> None:
        called.append(run.id)

    seen = "SELECT clock_timestamp() - seen_at < interval '1 s' AS fresh FROM fanout_callbacks"
    async with serving(app):
        with recorder.held("callback_end"):
            run = await manager.defer_async(items=[])
            await wait_until_async(lambda: bool(recorder.of("callback_end")))
            at = time.monotonic()
            await wait_until_async(lambda: time.monotonic() > at + 2.5)
            assert conn.execute(seen).fetchall() == [{"fresh": True}]
        assert (await finished(run)).callbacks["report"] == "done"
    assert called == [run.id]


async def test_worker_that_stops_records_what_has_ended(
    app: procrastinate.App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked to end while the database is away: it tries for a while, and the callback is done."""
    manager = declare(app)
    called: list[int] = []
    recorder = Recorder(monkeypatch)
    recorder.fail("callback_end", 4, before=True)

    @manager.on_complete(name="report")
    def report(run: Run) -> None:
        called.append(run.id)

    async with opened(app):
        async with working(app, shutdown_graceful_timeout=0.05) as worker:
            run = await manager.defer_async(items=[])
            await wait_until_async(lambda: bool(recorder.of("callback_end")))
            await stop(worker)
        assert (await run.progress_async()).callbacks["report"] == "done"
    assert called == [run.id]


async def test_job_of_a_callback_that_is_not_owed_does_nothing(
    app: procrastinate.App, conn: Conn
) -> None:
    manager = declare(app)
    called: list[int] = []

    @manager.on_complete(name="report", queue="reports")
    def report(run: Run) -> None:
        called.append(run.id)

    async with opened(app):
        run, removed = [await manager.defer_async(items=[]) for _ in range(2)]
        async with working(app, queues=["papers"]):
            await run.wait_async(timeout=10)
            await removed.wait_async(timeout=10)
        conn.execute("DELETE FROM fanout_runs WHERE id = %s", [removed.id])
        conn.execute("DELETE FROM fanout_callbacks WHERE run_id = %s", [removed.id])
        # Retried by hand, and that of a run which retention has removed.
        await app.configure_task("report", queue="reports").defer_async(run_id=run.id, generation=1)
        async with working(app, queues=["reports"]):
            await finished(run)
            await wait_until_async(lambda: not jobs(conn, status="todo"))
        assert called == [run.id]
    assert {job["status"] for job in jobs(conn, task_name="report")} == {"succeeded"}


async def test_each_generation_has_its_callbacks(app: procrastinate.App, conn: Conn) -> None:
    """A15: exactly once per close."""
    manager = declare(app)
    called: list[tuple[str, int, int]] = []

    @manager.on_failure
    async def bad(run: Run) -> None:
        closed = await run.closed_progress_async()
        assert closed is not None
        called.append(("bad", closed.generation, closed.failed))

    @manager.on_success
    def good(run: Run) -> None:
        closed = run.closed_progress
        assert closed is not None
        called.append(("good", closed.generation, closed.failed))

    async with opened(app):
        run = await manager.defer_async(items=[1, -1])
        await work_off(app, run)
        assert await run.retry_failed_async() == 1
        assert dict((await run.progress_async()).callbacks) == {}
        await work_off(app, run)
        assert await run.retry_failed_async() == 1
        conn.execute("UPDATE fanout_items SET payload = '5'")
        await work_off(app, run)
    assert called == [("bad", 1, 1), ("bad", 2, 1), ("good", 3, 0)]
    invariants.check(conn)


async def test_callback_may_start_and_reopen_runs(app: procrastinate.App) -> None:
    """A14: a closed run takes no more items; a new run from a callback works."""
    manager = declare(app)
    following: list[Run] = []
    refused: list[Exception] = []
    calls: list[int] = []

    @manager.on_success
    def report(run: Run) -> None:
        calls.append(run.id)
        if run.args["items"] == [1]:
            following.append(manager.defer(items=[1, 2]))
            try:
                run.update(max_in_flight=3)
            except RunClosed as exc:
                refused.append(exc)

    async with serving(app):
        run = await manager.defer_async(items=[1])
        await finished(run)
        (second,) = following
        assert counts(await finished(second)) == {"succeeded": 2, "total": 2}
    assert calls == [run.id, second.id] and len(refused) == 1


async def test_callbacks_are_those_of_the_start(app: procrastinate.App, conn: Conn) -> None:
    """A run keeps what was declared when it was started."""
    manager = declare(app)
    called: list[int] = []
    async with opened(app):
        before = await manager.defer_async(items=[])

        @manager.on_complete
        def late(run: Run) -> None:
            called.append(run.id)

        after = await manager.defer_async(items=[])
        await work_off(app, before, after)
    assert called == [after.id]


async def test_close_does_not_wait_for_a_callback_that_the_host_refuses(
    app: procrastinate.App, conn: Conn, connect: Callable[..., Conn]
) -> None:
    manager = declare(app)

    @manager.on_complete(name="report", queue="reports")
    def report(run: Run) -> None: ...

    conn.execute("""
        CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN RAISE 'the host takes no such job'; END $$""")
    conn.execute(
        "CREATE TRIGGER refuse BEFORE INSERT ON procrastinate_jobs FOR EACH ROW"
        " WHEN (NEW.queue_name = 'reports') EXECUTE FUNCTION refuse()"
    )
    async with opened(app):
        run = await manager.defer_async(items=[1])
        async with working(app, queues=["papers"]):
            progress = await run.wait_async(timeout=10)
        assert progress.status == "completed" and progress.callbacks == {"report": "owed"}
        conn.execute("DROP TRIGGER refuse ON procrastinate_jobs")
        assert (await FanOut.of(app).sweep_async()).done == {"callbacks": 1}
        (progress,) = await work_off(app, run)
        assert progress.callbacks == {"report": "done"}
