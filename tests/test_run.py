"""Run: reading, waiting, control, on an app opened sync and async."""

import asyncio
import datetime
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import procrastinate
import psycopg
import pydantic
import pytest

from fanout_procrastinate import (
    ConfigurationError,
    FanOut,
    Item,
    ItemStatus,
    Manager,
    Progress,
    Run,
    RunClosed,
    RunFailed,
    RunNotFound,
    RunStatus,
    WaitTimeout,
    fanout_child,
    fanout_manager,
    models,
    starting,
)
from fanout_procrastinate import run as run_module
from fanout_procrastinate.run import moment, run_columns
from tests.support import QUICK, counts, finished, jobs, opened, serving, work_off, working
from tests.waiting import wait_until, wait_until_async

Conn = psycopg.Connection[dict[str, Any]]


class Page(pydantic.BaseModel):
    number: int


def declare(app: procrastinate.App, **options: Any) -> Manager[Any, Any]:
    """Declare a child that fails where told to."""

    @fanout_child(app, name="child", backoff=QUICK, max_attempts=2)
    async def child(item: int) -> Page:
        if item % 10 == 1:
            raise ValueError(f"bad {item}")
        if item % 10 == 2:
            raise KeyError(item)
        return Page(number=item)

    @fanout_manager(app, child=child, name="lister", item_key=lambda item: f"k{item}", **options)
    def manager(items: list[int]) -> Any:
        return items

    return manager


# -- progress and waiting


async def test_life_of_a_run(app: procrastinate.App) -> None:
    manager = declare(app)
    async with opened(app):
        before = datetime.datetime.now(tz=datetime.UTC) - datetime.timedelta(minutes=1)
        run = await manager.configure(deadline=600).defer_async(items=[0, 3, 1, 0])
        pending = await run.progress_async()
        assert (pending.status, pending.total) == (RunStatus.PENDING, None)
        assert (pending.percent, pending.eta, pending.closed) == (0.0, None, False)
        assert before < pending.created_at and pending.deadline is not None
        assert (pending.started_at, pending.closed_at) == (None, None)
        assert [item async for item in run.items()] == []
        assert await run.closed_progress_async() is None
        (closed,) = await work_off(app, run)
        assert counts(closed) == {"succeeded": 2, "failed": 1, "duplicates": 1, "total": 3}
        assert (closed.status, closed.percent, closed.eta) == (RunStatus.COMPLETED, 100.0, 0.0)
        assert closed.closed_at is not None and closed.rate > 0 and closed.generation == 1
        frozen = await run.closed_progress_async()
        assert frozen is not None and frozen.closed_at == closed.closed_at


async def test_progress_adds_up_at_every_reading(app: procrastinate.App) -> None:
    """A16: what waits for its next try is pending, neither processing nor final."""
    gate = asyncio.Event()
    tries: dict[int, int] = {}

    @fanout_child(app, backoff=QUICK)
    async def child(item: int) -> None:
        tries[item] = tries.get(item, 0) + 1
        if item in (2, 4) and tries[item] <= 2:
            raise ConnectionError
        if item == 5:
            await gate.wait()

    async with serving(app):
        run = await child.map_async([1, 2, 3, 4, 5])
        seen: list[Progress] = []

        async def all_but_one() -> bool:
            seen.append(await run.progress_async())
            return seen[-1].succeeded == 4

        await wait_until_async(all_but_one)
        gate.set()
        seen.append(await finished(run))
        items = [item async for item in run.items()]
    done = [progress.done for progress in seen]
    assert done == sorted(done)
    for one in seen:
        whole = one.pending + one.processing + one.done
        assert whole == one.total == 5 and one.waiting <= one.pending
        assert one.closed == (one.done == 5)
    assert [item.attempts for item in items] == [1, 3, 1, 3, 1]


async def test_wait_returns_at_the_close_although_the_poll_is_slow(
    app: procrastinate.App, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "_FIRST_POLL_SECONDS", 60.0)
    monkeypatch.setattr(run_module, "_LONGEST_POLL_SECONDS", 60.0)
    gate = asyncio.Event()

    @fanout_child(app)
    async def child(item: int) -> None:
        await gate.wait()

    async with serving(app):
        run = await child.map_async([1])
        waiting = asyncio.create_task(run.wait_async(timeout=30))
        await wait_until_async(lambda: FanOut.of(app).hub.listening)
        started = time.monotonic()
        gate.set()
        progress = await waiting
        assert progress.closed and time.monotonic() - started < 1.0


async def test_wait_polls_where_nothing_can_listen(
    app: procrastinate.App, dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    """F05: LISTEN is refused; the wait ends all the same, and the log says why it polls."""
    refused: list[str] = []

    class Refusing(psycopg.Connection[Any]):
        def execute(self, query: Any, *args: Any, **kwargs: Any) -> Any:
            if str(query).startswith("LISTEN"):
                refused.append(str(query))
                raise psycopg.errors.FeatureNotSupported("cannot LISTEN here")
            return super().execute(query, *args, **kwargs)

    FanOut(app, connection_factory=lambda: Refusing.connect(dsn))
    manager = declare(app)
    async with serving(app):
        run = await manager.defer_async(items=[0, 3])
        progress = await run.wait_async(timeout=10)
        assert counts(progress) == {"succeeded": 2, "total": 2}
    assert refused and "polling goes on" in caplog.text


async def test_wait_has_an_end_of_its_own(app: procrastinate.App) -> None:
    manager = declare(app)
    async with opened(app):
        run = await manager.defer_async(items=[0])
        for timeout in (0, 0.05):
            with pytest.raises(WaitTimeout, match=r"is still pending after .* wait longer") as got:
                await run.wait_async(timeout=timeout)
            assert got.value.progress.run_id == run.id
        await run.cancel_async()
        assert (await run.wait_async(timeout=0)).status == "cancelled"


async def test_wait_can_insist_on_success(app: procrastinate.App) -> None:
    manager = declare(app)
    async with serving(app):
        good = await manager.defer_async(items=[0])
        assert (await good.wait_async(timeout=10, raise_on_failure=True)).succeeded == 1
        bad = await manager.defer_async(items=[0, 1])
        with pytest.raises(RunFailed, match=r"is completed with 1 failed of 2 items") as got:
            await bad.wait_async(timeout=10, raise_on_failure=True)
        assert got.value.progress.failed == 1
        cancelled = await manager.configure(schedule_in=600).defer_async(items=[0])
        await cancelled.cancel_async(reason="not today")
        with pytest.raises(RunFailed, match=r"is cancelled with 0 failed of 0 items: not today"):
            await cancelled.wait_async(raise_on_failure=True)


async def test_cancelled_wait_leaves_nobody_subscribed(app: procrastinate.App) -> None:
    manager = declare(app)
    hub = FanOut.of(app).hub
    async with opened(app):
        run = await manager.defer_async(items=[0])
        # So many that some are cancelled just when it is their turn at the pool.
        for _ in range(10):
            waits = [asyncio.create_task(run.wait_async()) for _ in range(20)]
            await wait_until_async(lambda: len(hub._subscribers) == 20)
            for wait in waits:
                wait.cancel()
            async with asyncio.timeout(5):
                ends = await asyncio.gather(*waits, return_exceptions=True)
            assert {type(end) for end in ends} == {asyncio.CancelledError}
            assert not hub._subscribers


async def test_unknown_run(app: procrastinate.App, conn: Conn) -> None:
    manager = declare(app)
    async with opened(app):
        run = await manager.defer_async(items=[0])
        conn.execute("DELETE FROM fanout_runs")
        for call in (
            run.progress_async(),
            run.wait_async(timeout=5),
            run.cancel_async(),
            run.pause_async(),
            run.resume_async(),
            run.retry_failed_async(),
            run.update_async(max_in_flight=3),
            run.facts_async(),
            run.closed_progress_async(),
        ):
            with pytest.raises(RunNotFound, match=f"no run {run.id}: it never existed, or"):
                await call
        with pytest.raises(RunNotFound):
            await run.errors_async()
        for pages in (run.items(), run.results()):
            with pytest.raises(RunNotFound):
                _ = [row async for row in pages]
    with app.open():
        for pages in (run.items(), run.results()):
            with pytest.raises(RunNotFound):
                list(pages)
        for sync_call in (
            run.errors,
            run.progress,
            run.cancel,
            run.pause,
            run.resume,
            run.retry_failed,
        ):
            with pytest.raises(RunNotFound):
                sync_call()
        with pytest.raises(RunNotFound):
            run.update(priority=1)
        with pytest.raises(RunNotFound):
            _ = run.facts
        with pytest.raises(RunNotFound):
            _ = run.args
        with pytest.raises(RunNotFound):
            _ = run.closed_progress


# -- items, results, errors


async def test_items_are_paged(app: procrastinate.App, conn: Conn) -> None:
    manager = declare(app)
    child: Any = manager.child
    async with opened(app):
        run = await child.map_async(range(1203), item_key=str)
        found = [item async for item in run.items()]
        assert [item.position for item in found] == list(range(1203))
        assert {item.status for item in found} == {ItemStatus.PENDING}
        assert found[7] == Item(
            position=7,
            key="7",
            status=ItemStatus.PENDING,
            payload=7,
            result=None,
            error=None,
            attempts=0,
            crashes=0,
            sanitised=False,
            due=None,
            started_at=None,
            finished_at=None,
        )
        # What changes meanwhile disturbs nobody: pages go on behind the last position.
        seen = []
        async for item in run.items_async():
            seen.append(item.position)
            if item.position == 499:
                conn.execute("DELETE FROM fanout_items WHERE position BETWEEN 400 AND 599")
        assert seen == [*range(500), *range(600, 1203)]


async def test_items_by_status(app: procrastinate.App) -> None:
    manager = declare(app)
    async with opened(app):
        run = await manager.defer_async(items=[0, 1, 2, 3, 11])
        await work_off(app, run)

        async def positions(status: str | None) -> list[int]:
            return [item.position async for item in run.items(status)]

        assert await positions(None) == [0, 1, 2, 3, 4]
        assert await positions("succeeded") == [0, 3]
        assert await positions("failed") == [1, 2, 4]
        assert await positions("pending") == []
        with pytest.raises(ValueError, match="asleep"):
            run.items("asleep")
        (failed, *_) = [item async for item in run.items("failed")]
        assert failed.error is not None and failed.attempts == 1
        assert failed.error["type"] == "ValueError" and failed.error["message"] == "bad 1"
        assert failed.as_dict()["status"] == "failed"


async def test_results_are_typed_where_the_child_is_known(
    app: procrastinate.App, dsn: str, conn: Conn
) -> None:
    manager = declare(app)
    async with opened(app):
        run = await manager.defer_async(items=[0, 1, 3])
        await work_off(app, run)
        assert [page async for page in run.results()] == [Page(number=0), Page(number=3)]
        conn.execute("UPDATE fanout_items SET result = '\"old\"' WHERE position = 0")
        # Stored by an older version of the child: raw.
        assert [page async for page in run.results_async()] == ["old", Page(number=3)]
    elsewhere = procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=dsn))
    async with opened(elsewhere):
        found = await FanOut.of(elsewhere).get_run_async(run.id)
        assert [page async for page in found.results()] == ["old", {"number": 3}]


async def test_errors_are_grouped(app: procrastinate.App) -> None:
    manager = declare(app)
    async with opened(app):
        run = await manager.defer_async(items=[0, 1, 11, 21, 2, 12])
        await work_off(app, run)
        one, two = await run.errors_async()
        assert (one.error_type, one.count, one.position, one.key) == ("ValueError", 3, 1, "k1")
        assert (two.error_type, two.count, two.message) == ("KeyError", 2, "2")
        assert [group.error_type for group in await run.errors_async(limit=1)] == ["ValueError"]
        assert one.as_dict()["count"] == 3


# -- control


async def test_cancel_counts_what_was_not_begun(app: procrastinate.App, conn: Conn) -> None:
    manager = declare(app)
    async with opened(app):
        run = await manager.defer_async(items=[0, 1, 3])
        child: Any = manager.child
        other = await child.map_async([0, 3, 4])
        assert counts(await run.cancel_async(reason="why\0not")) == {"total": 0}
        progress = await run.progress_async()
        assert (progress.status, progress.reason) == (RunStatus.CANCELLED, "why\ufffdnot")
        progress = await other.cancel_async()
        assert counts(progress) == {"cancelled": 3, "total": 3}
        assert progress.reason == "cancelled by an operator"
        assert [item.status async for item in other.items()] == ["cancelled"] * 3
        assert {job["status"] for job in jobs(conn)} == {"cancelled"}
        # A closed run's progress comes back unchanged.
        for call in (other.cancel_async, other.pause_async, other.resume_async):
            assert await call() == progress
        with pytest.raises(RunClosed, match=r"run \d+ is closed \(cancelled\).*retry_failed"):
            await other.update_async(max_in_flight=3)


async def test_cancel_waits_for_the_items_at_work(app: procrastinate.App) -> None:
    gate, stops = asyncio.Event(), []

    @fanout_child(app, pass_context=True)
    async def child(context: Any, item: int) -> int:
        await gate.wait()
        stops.append(context.should_stop())
        return item

    FanOut.of(app)
    async with serving(app, concurrency=2):
        run = await child.map_async(range(10), max_in_flight=2)

        async def at_work() -> bool:
            return (await run.progress_async()).processing == 2

        await wait_until_async(at_work)
        progress = await run.cancel_async()
        assert counts(progress) == {"processing": 2, "cancelled": 8, "total": 10}
        assert progress.status == "processing" and progress.reason == "cancelled by an operator"
        gate.set()
        progress = await finished(run)
        assert counts(progress) == {"succeeded": 2, "cancelled": 8, "total": 10}
        assert progress.status == "cancelled"


async def test_abort_ends_the_items_at_work(app: procrastinate.App) -> None:
    FanOut(app, lease=1.0)
    ended: list[str] = []

    @fanout_child(app)
    async def child(item: int) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    async with serving(app):
        run = await child.map_async([1, 2])

        async def at_work() -> bool:
            return (await run.progress_async()).processing == 2

        await wait_until_async(at_work)
        await run.cancel_async(abort=True)
        progress = await run.wait_async(timeout=10)
        assert counts(progress) == {"cancelled": 2, "total": 2} and ended == ["cancelled"] * 2
        assert [item.attempts async for item in run.items()] == [0, 0]


async def test_pause_and_resume(app: procrastinate.App, conn: Conn) -> None:
    manager = declare(app)
    child: Any = manager.child
    async with opened(app):
        run = await child.map_async([0, 3, 4])
        assert (await run.pause_async()).paused
        assert {job["status"] for job in jobs(conn)} == {"cancelled"}
        assert (await run.pause_async()).paused  # twice is once
        progress = await run.resume_async()
        assert not progress.paused and progress.pending == 3
        (progress,) = await work_off(app, run)
        assert progress.succeeded == 3


async def test_update(app: procrastinate.App, conn: Conn) -> None:
    manager = declare(app)
    child: Any = manager.child
    async with opened(app):
        run = await child.map_async([0, 1, 2, 3], deadline=600)
        progress = await run.update_async(max_in_flight=2, priority=7, tolerate=0, deadline=None)
        assert progress.max_in_flight == 2 and progress.deadline is None
        waiting = jobs(conn, status="todo")
        assert [job["priority"] for job in waiting] == [7, 7]
        (row,) = conn.execute("SELECT tolerate_count, tolerate_share FROM fanout_runs").fetchall()
        assert row == {"tolerate_count": 0, "tolerate_share": None}
        await run.update_async(tolerate=0.5)
        (row,) = conn.execute("SELECT tolerate_count, tolerate_share FROM fanout_runs").fetchall()
        assert row == {"tolerate_count": None, "tolerate_share": 0.5}
        at = datetime.datetime.now(tz=datetime.UTC) + datetime.timedelta(hours=1)
        assert (await run.update_async(deadline=at)).deadline == at
        for changes, words in (
            ({"max_in_flight": 0}, "max_in_flight"),
            ({"tolerate": "all"}, "tolerate"),
            ({"queue": "other"}, "no option 'queue'"),
            ({"deadline": datetime.datetime(2026, 1, 1)}, "no time zone"),
            ({"max_in_flight": None}, "max_in_flight"),
        ):
            with pytest.raises(ConfigurationError, match=words):
                await run.update_async(**changes)
        await run.update_async(tolerate=None)
        (progress,) = await work_off(app, run)
        assert counts(progress) == {"succeeded": 2, "failed": 2, "total": 4}


async def test_tolerance_stops_the_run(app: procrastinate.App) -> None:
    manager = declare(app, tolerate=1)
    async with opened(app):
        run = await manager.configure(max_in_flight=1).defer_async(items=[1, 11, *range(100, 150)])
        async with working(app):
            progress = await finished(run)
        assert progress.status == "failed" and progress.failed == 2
        assert progress.reason == "more failed items than tolerated: 2 of 52, tolerated: 1"
        assert progress.cancelled + progress.succeeded == 50


async def test_retry_failed_opens_the_next_generation(app: procrastinate.App) -> None:
    """A15: the next generation has a close, and a frozen progress, of its own."""
    broken = {1, 2}

    @fanout_child(app)
    async def child(item: int) -> int:
        if item in broken:
            raise ValueError(item) if item == 1 else KeyError(item)
        return item

    async with opened(app):
        run = await child.map_async([0, 1, 2])
        held = await FanOut.of(app).get_run_async(run.id)
        await work_off(app, run)
        assert await run.retry_failed_async("OSError") == 0
        assert (await run.progress_async()).closed
        assert await run.retry_failed_async("ValueError") == 1
        reopened = await run.progress_async()
        assert (reopened.status, reopened.generation) == (RunStatus.PROCESSING, 2)
        assert counts(reopened) == {"pending": 1, "succeeded": 1, "failed": 1, "total": 3}
        assert await held.closed_progress_async() is None  # open again
        broken.clear()
        await work_off(app, run)
        assert await run.retry_failed_async() == 1
        (progress,) = await work_off(app, run)
        assert counts(progress) == {"succeeded": 3, "total": 3} and progress.generation == 3
        for each in (run, held):
            frozen = await each.closed_progress_async()
            assert frozen is not None and frozen.generation == 3
        assert [item.attempts async for item in run.items()] == [1, 1, 1]


async def test_replaced_run_cannot_be_reopened(app: procrastinate.App) -> None:
    manager = declare(app)
    async with opened(app):
        run = await manager.configure(run_key="k").defer_async(items=[1])
        await work_off(app, run)
        await manager.configure(run_key="k", if_closed="replace").defer_async(items=[1])
        with pytest.raises(RunClosed, match="replaced or being stopped"):
            await run.retry_failed_async()
        assert (await run.progress_async()).closed


# -- the sync twins


@pytest.fixture
def in_background(app: procrastinate.App) -> Any:
    """Call it to let a worker work in a thread of its own, on an app of its own loop."""
    stopped: list[Callable[[], None]] = []

    def start() -> None:
        ready, end = threading.Event(), asyncio.Event()
        loops: list[asyncio.AbstractEventLoop] = []

        async def work() -> None:
            loops.append(asyncio.get_running_loop())
            async with serving(app):
                ready.set()
                await end.wait()

        thread = threading.Thread(target=lambda: asyncio.run(work()), name="test-worker")
        thread.start()
        assert ready.wait(10)

        def stop() -> None:
            loops[0].call_soon_threadsafe(end.set)
            thread.join(20)
            assert not thread.is_alive()

        stopped.append(stop)

    yield start
    for stop in stopped:
        stop()


def test_sync_twins(
    app: procrastinate.App, dsn: str, in_background: Callable[[], None], conn: Conn
) -> None:
    # A program of its own, with a sync connector, beside the worker's.
    mine = procrastinate.App(connector=procrastinate.SyncPsycopgConnector(conninfo=dsn))
    manager = declare(mine, tolerate=0.9)
    declare(app, tolerate=0.9)
    with mine.open():
        run = manager.configure(run_key="k").defer(items=[0, 1, 3, 11])
        with pytest.raises(WaitTimeout):
            run.wait(timeout=0.01)
        assert run.args == {"items": [0, 1, 3, 11]} and run.facts.run_key == "k"
        assert run.closed_progress is None
        assert run.pause().paused and not run.resume().paused
        assert run.update(max_in_flight=5).max_in_flight == 5
        in_background()
        progress = run.wait(timeout=10)
        assert counts(progress) == {"succeeded": 2, "failed": 2, "total": 4}
        with pytest.raises(RunFailed):
            run.wait(timeout=10, raise_on_failure=True)
        assert run.closed_progress is not None
        assert [item.position for item in run.items("failed")] == [1, 3]
        assert [item.position for item in run.items_async()] == [0, 1, 2, 3]
        assert list(run.results()) == [Page(number=0), Page(number=3)]
        assert [group.count for group in run.errors()] == [2]
        assert run.retry_failed() == 2
        assert run.wait(timeout=10).generation == 2
        assert run.cancel() == run.progress()
        with pytest.raises(RunClosed):
            run.update(priority=1)
        later = manager.configure(schedule_in=600).defer(items=[0])
        assert later.cancel(reason="no").reason == "no"
        FanOut.of(mine).close()


def test_sync_wait_is_prompt(
    app: procrastinate.App,
    dsn: str,
    in_background: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run_module, "_FIRST_POLL_SECONDS", 60.0)
    monkeypatch.setattr(run_module, "_LONGEST_POLL_SECONDS", 60.0)
    mine = procrastinate.App(connector=procrastinate.SyncPsycopgConnector(conninfo=dsn))
    manager = declare(mine)
    declare(app)
    with mine.open():
        run = manager.defer(items=[0])
        threading.Thread(
            target=lambda: wait_until(lambda: FanOut.of(mine).hub.listening) and in_background()
        ).start()
        started = time.monotonic()
        assert run.wait(timeout=20).succeeded == 1
        assert time.monotonic() - started < 10
        FanOut.of(mine).close()


async def test_sync_calls_on_the_loop_are_refused(app: procrastinate.App) -> None:
    manager = declare(app)
    async with opened(app):
        run = await manager.defer_async(items=[0])
        with pytest.raises(ConfigurationError, match="await the _async twin"):
            run.progress()


# -- options as columns


def test_moment() -> None:
    now = datetime.datetime.now(tz=datetime.UTC)
    for value, seconds in (
        (now + datetime.timedelta(seconds=90), 90),
        (datetime.timedelta(seconds=90), 90),
        (90, 90),
        (1.5, 1.5),
        ({"minutes": 1, "seconds": 30}, 90),
    ):
        assert abs((moment(value, "at") - now).total_seconds() - seconds) < 5
    for value in (True, "soon", datetime.datetime(2026, 1, 1), None, float("inf"), {"a": 1}, 1e20):
        with pytest.raises(ConfigurationError, match="at="):
            moment(value, "at")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("9999-12-31T23:59:59-14:00", "from 0001-01-02 to 9999-12-31 in UTC"),
        ("0001-01-01T00:00:00+14:00", "from 0001-01-02 to 9999-12-31 in UTC"),
        ("0001-01-01T23:59:59+00:00", "from 0001-01-02 to 9999-12-31 in UTC"),
        (datetime.timedelta(days=366_000), "less than 1,000 years"),
        ({"days": -366_000}, "less than 1,000 years"),
        (251_000_000_000, "less than 1,000 years"),
        (-70_000_000_000, "less than 1,000 years"),
    ],
)
async def test_times_that_could_not_be_read_again_are_refused(
    app: procrastinate.App, value: Any, words: str
) -> None:
    if isinstance(value, str):
        value = datetime.datetime.fromisoformat(value)
    with pytest.raises(ConfigurationError, match=f"at=.*{words}"):
        moment(value, "at")
    async with opened(app):
        run = await declare(app).configure(deadline=600).defer_async(items=[0])
        before = (await run.progress_async()).deadline
        with pytest.raises(ConfigurationError, match=f"deadline=.*{words}"):
            await run.update_async(deadline=value)
        assert (await run.progress_async()).deadline == before


def test_the_last_times_that_are_taken() -> None:
    for text in ("9999-12-31T23:59:59+00:00", "0001-01-02T00:00:00+00:00"):
        assert moment(datetime.datetime.fromisoformat(text), "at").isoformat() == text


@pytest.mark.parametrize(
    ("stored", "read"),
    [
        ("10000-01-01T13:59:59+00:00", models.LATEST),
        ("0044-03-15T12:00:00+00:00 BC", models.EARLIEST),
        ("infinity", models.LATEST),
        ("-infinity", models.EARLIEST),
    ],
)
async def test_times_that_python_cannot_hold_do_not_stop_the_reading(
    app: procrastinate.App, conn: Conn, stored: str, read: datetime.datetime
) -> None:
    async with opened(app):
        run = await declare(app).defer_async(items=[0])
        conn.execute("UPDATE fanout_runs SET deadline = %s, scheduled_at = %s", [stored, stored])
        progress = await run.progress_async()
        assert progress.deadline == progress.scheduled_at == read
        (listed,) = await FanOut.of(app).runs_async()
        assert listed.deadline == read and listed.as_dict()["deadline"] == read.isoformat()


async def test_values_that_cannot_work(app: procrastinate.App) -> None:
    manager = declare(app)
    nan = float("nan")
    wrong: list[tuple[str, dict[str, Any], str]] = [
        *(("wait", {"timeout": value}, "timeout=") for value in (nan, "3", True, 10**400)),
        *(("errors", {"limit": value}, "limit=") for value in (0, -1, True, "3", 2**63)),
        ("retry_failed", {"error_type": 3}, "error_type="),
        ("cancel", {"reason": 3}, "reason="),
        ("cancel", {"abort": "no"}, "abort="),
    ]
    async with opened(app):
        run = await manager.defer_async(items=[0])
        async with asyncio.timeout(10):
            for name, options, words in wrong:
                with pytest.raises(ConfigurationError, match=words):
                    await getattr(run, f"{name}_async")(**options)
    with app.open():
        for name, options, words in wrong:
            with pytest.raises(ConfigurationError, match=words):
                getattr(run, name)(**options)
        assert not run.progress().closed
        FanOut.of(app).close()


async def test_error_types_that_no_database_holds(app: procrastinate.App) -> None:
    manager = declare(app)
    async with opened(app):
        run = await manager.defer_async(items=[0, 1])
        await work_off(app, run)
        for odd in ("a\0", "\ud800"):
            assert await run.retry_failed_async(odd) == 0
    with app.open():
        assert run.retry_failed("a\0") == 0
        FanOut.of(app).close()


async def test_options_that_a_run_does_not_have(app: procrastinate.App) -> None:
    """The message lists what this call takes, no less and no more."""
    manager: Any = declare(app)
    async with opened(app):
        with pytest.raises(ConfigurationError, match=r"'run_kye'; there are .*priority, run_key, "):
            manager.configure(run_kye="k")
        run = await manager.defer_async(items=[0])
        with pytest.raises(ConfigurationError, match=r"are .*, deadline, priority$"):
            await run.update_async(run_key="k")
    assert set(run_module.START_OPTIONS) == set(starting.RunOptions.__annotations__)


@pytest.mark.parametrize(
    ("status", "values", "seen"),
    [
        ("processing", {"reason": "enough", "cancelled": 2}, True),
        ("processing", {"reason": "enough"}, True),
        ("pending", {"reason": "the first try of the manager failed"}, False),
        ("processing", {"cancelled": 2}, False),
        ("cancelled", {"reason": "enough", "cancelled": 2}, False),
    ],
)
def test_a_run_that_is_being_stopped(status: str, values: dict[str, Any], seen: bool) -> None:
    zeros = dict.fromkeys(
        ("pending", "waiting", "processing", "succeeded", "failed", "cancelled"), 0
    )
    found = Progress.from_json({"run_id": 1, "name": "x", "status": status, **zeros, **values})
    assert run_module.stopping(found) is seen


def test_run_columns() -> None:
    assert run_columns({"tolerate": 3}) == {"tolerate_count": 3, "tolerate_share": None}
    assert run_columns({"tolerate": 0.5}) == {"tolerate_count": None, "tolerate_share": 0.5}
    assert run_columns({"tolerate": None}) == {"tolerate_count": None, "tolerate_share": None}
    assert run_columns({"deadline": None, "priority": -3}) == {"deadline": None, "priority": -3}


def test_runs_compare_by_id(app: procrastinate.App) -> None:
    access = FanOut.of(app)._access
    one, same, other = Run(1, access), Run(1, access, created=True), Run(2, access)
    assert one == same != other and len({one, same, other}) == 2
    assert one != 1
    logging.getLogger(__name__).debug("%r", one)
