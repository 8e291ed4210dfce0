"""The manager job: whatever shape it has, each item is staged once, or the run says why not."""

import asyncio
import functools
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import procrastinate
import psycopg
import pydantic
import pytest

from fanout_procrastinate import (
    Child,
    FanOut,
    PermanentError,
    Progress,
    Run,
    TransientError,
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
from tests.waiting import wait_until, wait_until_async

Conn = psycopg.Connection[dict[str, Any]]


class Paper(pydantic.BaseModel):
    id: str
    pages: int = 1


@pytest.fixture
def child(app: procrastinate.App) -> Child[Any, Any]:
    FanOut(app, chunk_size=5, lease=1.0, max_item_bytes=1000)

    @fanout_child(app, name="child")
    async def child(item: Paper) -> str:
        return item.id

    return child


def papers(n: int) -> Iterator[Paper]:
    for number in range(n):
        yield Paper(id=f"p{number}")


async def listed(
    app: procrastinate.App,
    child: Child[Any, Any],
    function: Callable[..., Any],
    *,
    args: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[Run, Progress]:
    """Run this function as a manager, to the run's end."""
    given: dict[str, Any] = {"name": "lister", "item_key": lambda p: p.id, "backoff": QUICK}
    manager = fanout_manager(app, child=child, **given | options)(function)
    async with opened(app):
        run = await manager.defer_async(**args or {})
        (progress,) = await work_off(app, run)
    return run, progress


def managers(conn: Conn) -> list[str]:
    """Return the ends of the manager's jobs."""
    return [job["status"] for job in jobs(conn, task_name="lister")]


# -- shapes


def generator(n: int) -> Iterator[Paper]:
    yield from papers(n)


async def async_generator(n: int) -> AsyncIterator[Paper]:
    for paper in papers(n):
        await asyncio.sleep(0)
        yield paper


def a_list(n: int) -> list[Paper]:
    return list(papers(n))


async def coroutine(n: int) -> list[Paper]:
    await asyncio.sleep(0)
    return list(papers(n))


async def coroutine_of_generator(n: int) -> AsyncIterator[Paper]:
    return async_generator(n)


def async_iterable(n: int) -> AsyncIterator[Paper]:
    return async_generator(n)


def awaitable(n: int) -> Any:
    return coroutine(n)


def plain_dicts(n: int) -> Any:
    return ({"id": f"p{number}", "pages": str(number)} for number in range(n))


class ByNumber:
    """What has its items by number alone."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __getitem__(self, number: int) -> Paper:
        if number == self.n:
            raise IndexError(number)
        return Paper(id=f"p{number}")


async def coroutine_by_number(n: int) -> Any:
    return ByNumber(n)


class Lister:
    async def __call__(self, n: int) -> Any:
        return papers(n)


SHAPES: list[Any] = [
    generator,
    async_generator,
    a_list,
    coroutine,
    coroutine_of_generator,
    async_iterable,
    awaitable,
    plain_dicts,
    ByNumber,
    coroutine_by_number,
    functools.partial(async_generator),
    functools.partial(generator),
    Lister(),
]


@pytest.mark.parametrize("function", SHAPES, ids=lambda f: getattr(f, "__name__", type(f).__name__))
async def test_managers_of_every_shape(
    app: procrastinate.App, child: Child[Any, Any], function: Any
) -> None:
    """B01 too: no item, or one, is nothing special."""
    manager = fanout_manager(app, child=child, name="lister", item_key=lambda p: p.id)(function)
    async with serving(app):
        for n in (0, 1, 5, 12):
            run = await manager.defer_async(n=n)
            progress = await run.wait_async(timeout=10)
            assert progress.succeeded == progress.total == n and progress.status == "completed"
            assert [result async for result in run.results()] == [f"p{i}" for i in range(n)]


async def test_manager_without_items_leaves_no_job(
    app: procrastinate.App, child: Child[Any, Any], conn: Conn
) -> None:
    _, progress = await listed(app, child, lambda: [])
    assert (progress.status, progress.total) == ("completed", 0)
    assert [job["task_name"] for job in jobs(conn)] == ["lister"]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("papers", "the manager returned text; return a list of items"),
        (b"papers", "the manager returned text"),
        (None, "the manager returned NoneType; yield the items or return an iterable"),
        (7, "the manager returned int; yield"),
    ],
)
@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_what_is_no_list_is_refused(
    app: procrastinate.App, child: Child[Any, Any], conn: Conn, value: Any, words: str, kind: str
) -> None:
    async def returns_async() -> Any:
        return value

    function = returns_async if kind == "async" else lambda: value
    _, progress = await listed(app, child, function)
    assert progress.status == "failed" and words in (progress.reason or "")
    assert managers(conn) == ["failed"]


async def test_sync_manager_stays_in_one_thread(
    app: procrastinate.App, child: Child[Any, Any]
) -> None:
    """Generators over a database cursor belong to the thread that made them."""
    seen: set[int] = set()

    def lister() -> Iterator[Paper]:
        for paper in papers(30):
            seen.add(threading.get_ident())
            yield paper
        seen.add(threading.get_ident())

    _, progress = await listed(app, child, lister)
    assert progress.succeeded == 30
    assert len(seen) == 1 and threading.get_ident() not in seen


async def test_sync_manager_may_use_the_librarys_sync_calls(
    app: procrastinate.App, child: Child[Any, Any]
) -> None:
    other: list[Run] = []

    def lister() -> Iterator[Paper]:
        other.append(child.map([Paper(id="x")]))
        yield Paper(id=str(other[0].progress().total))

    run, progress = await listed(app, child, lister)
    assert progress.succeeded == 1
    async with opened(app):
        assert [result async for result in run.results()] == ["1"]


# -- chunks and the seal


async def test_items_are_staged_in_chunks(
    app: procrastinate.App,
    child: Child[Any, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorder = Recorder(monkeypatch)
    for n, sizes in ((0, []), (5, [5]), (12, [5, 5, 2])):
        recorder.calls.clear()
        await listed(app, child, lambda n=n: papers(n), name=f"lister{n}")
        assert [len(call.params["payloads"]) for call in recorder.of("append")] == sizes
        assert len(recorder.of("seal")) == 1


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_nothing_is_dispatched_before_the_seal(
    app: procrastinate.App, child: Child[Any, Any], conn: Conn, kind: str
) -> None:
    """A05: closing is judged against a sealed total."""
    let_go = threading.Event()

    def lister() -> Iterator[Paper]:
        yield from papers(12)
        assert let_go.wait(10)

    async def lister_async() -> AsyncIterator[Paper]:
        for paper in papers(12):
            yield paper
        await wait_until_async(let_go.is_set)

    function = lister if kind == "sync" else lister_async
    manager = fanout_manager(app, child=child, name="lister")(function)
    async with serving(app):
        run = await manager.defer_async()
        await wait_until_async(
            lambda: conn.execute("SELECT FROM fanout_runs WHERE staged = 10").fetchall()
        )
        progress = await run.progress_async()
        assert (progress.status, progress.total, progress.pending) == ("pending", None, 10)
        assert jobs(conn, task_name="child") == []
        assert conn.execute("SELECT FROM fanout_slots").fetchall() == []
        let_go.set()
        assert counts(await finished(run)) == {"succeeded": 12, "total": 12}


async def test_duplicates_over_chunks(app: procrastinate.App, child: Child[Any, Any]) -> None:
    _, progress = await listed(app, child, lambda: [*papers(12), *papers(7)])
    assert counts(progress) == {"succeeded": 12, "duplicates": 7, "total": 12}


# -- items that cannot be


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"pages": 1}, "InvalidItem: item 7: does not fit Paper: id: Field required"),
        (
            {"id": "a\0b"},
            "InvalidItem: item 7: its key contains a NUL character or a lone surrogate",
        ),
        ({"id": "k" * 1001}, "longer than 1000 bytes; use a short id, or a digest"),
        ({"id": "k", "pages": "many"}, "item 7: does not fit Paper: pages: "),
    ],
)
@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_bad_item_fails_the_run_and_says_which(
    app: procrastinate.App, child: Child[Any, Any], conn: Conn, bad: Any, words: str, kind: str
) -> None:
    def lister() -> Iterator[Any]:
        yield from papers(7)
        yield bad

    async def lister_async() -> AsyncIterator[Any]:
        for paper in lister():
            yield paper

    _, progress = await listed(app, child, lister if kind == "sync" else lister_async)
    assert progress.status == "failed" and progress.total == 0
    assert words in (progress.reason or "")
    # Another try would find the same item.
    assert managers(conn) == ["failed"] and jobs(conn, task_name="child") == []


async def test_item_that_is_too_large(
    app: procrastinate.App, child: Child[Any, Any], conn: Conn
) -> None:
    other = fanout_child(app, name="other")(lambda item: item)
    _, progress = await listed(
        app, other, lambda: ["x", "y" * 999], item_key=lambda item: item[0] * 3
    )
    assert "ItemTooLarge: item 1 (key 'yyy'): 1001 bytes of JSON" in (progress.reason or "")


async def test_key_that_is_no_text(app: procrastinate.App, child: Child[Any, Any]) -> None:
    _, progress = await listed(app, child, lambda: papers(3), item_key=lambda paper: 7)
    assert "item 0: its key 7 is no str" in (progress.reason or "")


# -- errors


@pytest.mark.parametrize("after", [0, 4, 5, 10], ids=lambda n: f"after {n}")
@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_manager_that_raises_lists_again(
    app: procrastinate.App, child: Child[Any, Any], conn: Conn, after: int, kind: str
) -> None:
    """B03: the fan-out is repeated, and each item stands there once."""
    tries: list[int] = []

    def lister() -> Iterator[Paper]:
        tries.append(1)
        for number, paper in enumerate(papers(10)):
            if number == after and len(tries) < 3:
                raise ConnectionError("the source is away")
            yield paper
        if after == 10 and len(tries) < 3:
            raise TransientError("at the very end", retry_in=0)

    async def lister_async() -> AsyncIterator[Paper]:
        for paper in lister():
            yield paper

    run, progress = await listed(app, child, lister if kind == "sync" else lister_async)
    assert counts(progress) == {"succeeded": 10, "total": 10} and len(tries) == 3
    assert managers(conn) == ["failed", "failed", "succeeded"]
    async with opened(app):
        items = [item async for item in run.items()]
    assert [(item.key, item.attempts) for item in items] == [(f"p{n}", 1) for n in range(10)]
    invariants.check(conn)


@pytest.mark.parametrize(
    ("error", "tries"),
    [
        (ValueError("no such folder"), 1),
        (PermanentError("never"), 1),
        (FileNotFoundError("gone"), 1),
        (RuntimeError("odd"), 3),
        (ConnectionError("away"), 3),
        (SystemExit(3), 3),
        (KeyboardInterrupt(), 3),
        (ExceptionGroup("several", [ValueError("x"), ConnectionError("y")]), 3),
        (ValueError("a\0b" + "x" * 10_000), 1),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_manager_that_never_works_fails_the_run(
    app: procrastinate.App,
    child: Child[Any, Any],
    conn: Conn,
    error: BaseException,
    tries: int,
    kind: str,
) -> None:
    def lister() -> Iterator[Paper]:
        yield from papers(7)
        raise error

    async def lister_async() -> AsyncIterator[Paper]:
        for paper in papers(7):
            yield paper
        raise error

    _, progress = await listed(app, child, lister if kind == "sync" else lister_async)
    assert progress.status == "failed" and progress.total == 0
    reason = progress.reason or ""
    assert f"{type(error).__name__}: " in reason and reason.startswith("its manager failed: ")
    assert len(reason) <= 2000 and "\0" not in reason
    assert managers(conn) == ["failed"] * tries and jobs(conn, task_name="child") == []
    invariants.check(conn)


async def test_reason_shows_while_the_next_try_is_due(
    app: procrastinate.App, child: Child[Any, Any], conn: Conn
) -> None:
    def lister() -> Any:
        raise TransientError("busy", retry_in=600)

    manager = fanout_manager(app, child=child, name="lister")(lister)
    async with serving(app):
        run = await manager.defer_async()

        async def failed_once() -> Any:
            return (await run.progress_async()).reason

        assert await wait_until_async(failed_once) == (
            "its manager failed: fanout_procrastinate.errors.TransientError: busy"
        )
        assert (await run.progress_async()).status == "pending"
        assert not (await FanOut.of(app).sweep_async()).changed
        (waiting,) = jobs(conn, task_name="lister", status="todo")
        (row,) = conn.execute("SELECT clock_timestamp() AS now").fetchall()
        assert 500 < (waiting["scheduled_at"] - row["now"]).total_seconds() < 601


# -- limits


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_time_limit(
    app: procrastinate.App, child: Child[Any, Any], conn: Conn, kind: str
) -> None:
    let_go = threading.Event()

    def lister() -> Iterator[Paper]:
        yield from papers(7)
        let_go.wait(10)
        yield from papers(100)

    async def lister_async() -> AsyncIterator[Paper]:
        for paper in papers(7):
            yield paper
        await asyncio.Event().wait()

    turns = asyncio.create_task(longest_turn())
    try:
        _, progress = await listed(
            app,
            child,
            lister if kind == "sync" else lister_async,
            timeout=0.1,
            max_attempts=1,
        )
    finally:
        let_go.set()
        turns.cancel()
    assert progress.status == "failed"
    assert "TimeoutError: its time limit of 0.1 s passed" in (progress.reason or "")
    # A thread that cannot be stopped does not stop the loop either.
    (longest,) = await asyncio.gather(turns)
    assert longest < 2.0
    await wait_until_async(lambda: not stray_threads())


async def longest_turn() -> float:
    longest, last = 0.0, time.monotonic()
    try:
        while True:
            await asyncio.sleep(0.01)
            longest, last = max(longest, time.monotonic() - last), time.monotonic()
    except asyncio.CancelledError:
        return longest


def stray_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("fanout-manager")]


async def test_timeout_error_of_its_own_is_told_apart(
    app: procrastinate.App, child: Child[Any, Any]
) -> None:
    async def lister() -> AsyncIterator[Paper]:
        yield Paper(id="a")
        raise TimeoutError("the source is slow")

    _, progress = await listed(app, child, lister, max_attempts=1)
    assert "TimeoutError: the source is slow" in (progress.reason or "")


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_slow_manager_is_not_taken_for_a_dead_one(
    app: procrastinate.App, child: Child[Any, Any], conn: Conn, kind: str
) -> None:
    """More than two leases between two items, while this very process sweeps."""
    until = time.monotonic() + 2.5

    def lister() -> Iterator[Paper]:
        yield Paper(id="first")
        wait_until(lambda: time.monotonic() > until)
        yield Paper(id="last")

    async def lister_async() -> AsyncIterator[Paper]:
        yield Paper(id="first")
        await wait_until_async(lambda: time.monotonic() > until)
        yield Paper(id="last")

    _, progress = await listed(app, child, lister if kind == "sync" else lister_async)
    assert counts(progress) == {"succeeded": 2, "total": 2}
    assert managers(conn) == ["succeeded"]


# -- ends from outside


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_cancelled_run_ends_its_manager(
    app: procrastinate.App, child: Child[Any, Any], conn: Conn, kind: str
) -> None:
    ended: list[str] = []

    def lister() -> Iterator[Paper]:
        yield from papers(5)
        try:
            for number in range(10**9):
                time.sleep(0.01)
                yield Paper(id=f"more{number}")
        finally:
            ended.append("closed")

    async def lister_async() -> AsyncIterator[Paper]:
        for paper in papers(5):
            yield paper
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("closed")

    function = lister if kind == "sync" else lister_async
    manager = fanout_manager(app, child=child, name="lister")(function)
    async with serving(app):
        run = await manager.defer_async()
        await wait_until_async(
            lambda: conn.execute("SELECT FROM fanout_runs WHERE staged >= 5").fetchall()
        )
        progress = await run.cancel_async()
        assert (progress.status, progress.total) == ("cancelled", 0)
        await wait_until_async(lambda: managers(conn) == ["succeeded"])
        await wait_until_async(lambda: ended == ["closed"])
        # What it had staged is removed, and nothing comes after.
        await wait_until_async(lambda: not conn.execute("SELECT FROM fanout_items").fetchall())
    invariants.check(conn)


async def test_manager_of_a_stopped_worker_runs_again_at_no_charge(
    app: procrastinate.App, child: Child[Any, Any], conn: Conn
) -> None:
    tries: list[str] = []

    async def lister() -> AsyncIterator[Paper]:
        tries.append("begun")
        for paper in papers(12):
            yield paper
        if len(tries) < 4:
            await asyncio.Event().wait()

    manager = fanout_manager(app, child=child, name="lister", max_attempts=1)(lister)
    async with opened(app):
        run = await manager.defer_async()
        for n in range(1, 4):
            async with working(app, shutdown_graceful_timeout=0.05) as worker:
                await wait_until_async(
                    lambda n=n: (
                        len(tries) == n
                        and conn.execute("SELECT FROM fanout_runs WHERE staged = 10").fetchall()
                    )
                )
                await stop(worker)
        (progress,) = await work_off(app, run)
    assert counts(progress) == {"succeeded": 12, "total": 12}
    assert managers(conn) == ["aborted"] * 3 + ["succeeded"]


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_overtaken_manager_stages_nothing_more(
    app: procrastinate.App,
    child: Child[Any, Any],
    conn: Conn,
    caplog: pytest.LogCaptureFixture,
    kind: str,
) -> None:
    """It was silent for a lease; a newer one owns the run: what it still sends is refused."""
    begun, let_go = threading.Event(), threading.Event()
    tries: list[int] = []

    def lister() -> Iterator[Paper]:
        tries.append(1)
        first = len(tries) == 1
        yield from papers(5)
        if first:
            begun.set()
            assert let_go.wait(10)
            for number in range(20):
                yield Paper(id=f"late{number}")

    async def lister_async() -> AsyncIterator[Paper]:
        for paper in lister() if tries else papers(5):
            yield paper
        if not begun.is_set():
            tries.append(1)
            begun.set()
            await wait_until_async(let_go.is_set)
            for number in range(20):
                yield Paper(id=f"late{number}")

    function = lister if kind == "sync" else lister_async
    manager = fanout_manager(app, child=child, name="lister")(function)
    async with serving(app):
        run = await manager.defer_async()
        await wait_until_async(begun.is_set)
        conn.execute("UPDATE fanout_runs SET fence = fence + 1")
        conn.execute(
            "UPDATE procrastinate_jobs SET queueing_lock = NULL WHERE task_name = 'lister'"
        )
        conn.execute("SELECT fanout_deal_manager_v1(%s, NULL)", [run.id])
        progress = await finished(run)
        let_go.set()
        await wait_until_async(lambda: set(managers(conn)) == {"succeeded"})
    assert counts(progress) == {"succeeded": 5, "total": 5}
    assert "Manager overtaken" in caplog.text
    invariants.check(conn)


async def test_a_job_of_ours_that_somebody_deferred_is_no_start(
    app: procrastinate.App, child: Child[Any, Any], conn: Conn, caplog: pytest.LogCaptureFixture
) -> None:
    """As `procrastinate defer` would: it says how to start, and nothing is listed."""

    def lister(folder: str) -> Iterator[Paper]:
        yield from papers(3)

    fanout_manager(app, child=child, name="lister")(lister)
    by_hand: list[tuple[str, dict[str, Any]]] = [
        ("lister", {"folder": "papers"}),
        ("lister", {}),
        ("child", {"item": 1}),
    ]
    async with serving(app):
        for name, args in by_hand:
            await app.configure_task(name).defer_async(**args)
        await wait_until_async(lambda: {job["status"] for job in jobs(conn)} == {"failed"})
    failures = [str(line.exc_info[1]) for line in caplog.records if line.exc_info]
    assert len(failures) == len(by_hand)
    assert all("a start runs with .defer() of the manager" in failure for failure in failures)
    assert conn.execute("SELECT FROM fanout_runs").fetchall() == []


async def test_manager_job_retried_by_hand_lists_nothing(
    app: procrastinate.App, child: Child[Any, Any], conn: Conn
) -> None:
    tries: list[int] = []

    def lister() -> Iterator[Paper]:
        tries.append(1)
        yield from papers(3)

    manager = fanout_manager(app, child=child, name="lister")(lister)
    async with serving(app):
        run = await manager.defer_async()
        await finished(run)
        for run_id in (run.id, 77):
            await app.configure_task("lister", queue="default").defer_async(run_id=run_id)
        await wait_until_async(lambda: managers(conn) == ["succeeded"] * 3)
        assert counts(await run.progress_async()) == {"succeeded": 3, "total": 3}
    assert tries == [1]


# -- a database that does not answer


async def test_end_of_a_manager_that_failed_is_sent_until_it_is_known(
    app: procrastinate.App, child: Child[Any, Any], conn: Conn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lists again at once, not when a sweep has found it silent; and is charged once."""
    recorder = Recorder(monkeypatch)
    recorder.fail("manager_fail", 2, before=True)
    tries: list[int] = []

    def lister() -> Iterator[Paper]:
        tries.append(1)
        if len(tries) == 1:
            raise ConnectionError("the source is away")
        yield from papers(3)

    _, progress = await listed(app, child, lister)
    assert counts(progress) == {"succeeded": 3, "total": 3}
    assert len(tries) == 2
    charged = "SELECT manager_failures, manager_crashes FROM fanout_runs"
    assert conn.execute(charged).fetchall() == [{"manager_failures": 1, "manager_crashes": 0}]


@pytest.mark.parametrize("before", [True, False], ids=["not executed", "reply lost"])
@pytest.mark.parametrize("name", ["manager_begin", "append", "seal"])
@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_lost_statements(
    app: procrastinate.App,
    child: Child[Any, Any],
    conn: Conn,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    before: bool,
    kind: str,
) -> None:
    """Whatever was lost: the run ends well, and each item stands there once."""
    recorder = Recorder(monkeypatch)
    recorder.fail(name, 1, before=before)

    def lister() -> Iterator[Paper]:
        yield from papers(12)

    run, progress = await listed(
        app, child, lister if kind == "sync" else functools.partial(async_generator, 12)
    )
    assert counts(progress) == {"succeeded": 12, "total": 12}
    async with opened(app):
        assert [item.key async for item in run.items()] == [f"p{n}" for n in range(12)]
    invariants.check(conn)
