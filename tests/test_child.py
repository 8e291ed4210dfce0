"""The child job: each item worked on, every outcome recorded, slots that come and go."""

import asyncio
import collections
import dataclasses
import functools
import threading
import time
import typing
from collections.abc import Callable, Iterator
from typing import Any

import procrastinate
import psycopg
import pydantic
import pytest

from fanout_procrastinate import (
    Backoff,
    Child,
    ConfigurationError,
    FanOut,
    Item,
    PermanentError,
    Progress,
    Run,
    TransientError,
    codec,
    execution,
    fanout_child,
    fanout_manager,
    settings,
)
from fanout_procrastinate import child as child_module
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


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Open it, and sync children that wait for it go on."""
    made = threading.Event()
    yield made
    made.set()


async def worked(
    app: procrastinate.App, function: Callable[..., Any], items: Any, **options: Any
) -> tuple[Progress, list[Item], Run]:
    """Work on these items with this function, to the run's end."""
    given: dict[str, Any] = {"name": "child", "backoff": QUICK} | options
    child = fanout_child(app, **given)(function)
    async with serving(app):
        run = await child.map_async(items)
        progress = await finished(run)
        return progress, [item async for item in run.items()], run


# -- shapes and types


class Paper(pydantic.BaseModel):
    id: str
    pages: int = 1


@dataclasses.dataclass
class Point:
    x: int


class Inner(typing.TypedDict):
    depth: int


class Dict(typing.TypedDict, total=False):
    title: typing.Required[str]
    inner: Inner
    more: "list[Inner]"


async def echo(item: Any) -> Any:
    return item


class Called:
    async def __call__(self, item: Any) -> Any:
        return item


@pytest.mark.parametrize(
    "function",
    [echo, lambda item: item, functools.partial(echo), Called(), lambda item: echo(item)],  # noqa: PLW0108
    ids=["async", "sync", "partial", "object", "returns a coroutine"],
)
async def test_functions_of_every_shape(app: procrastinate.App, function: Any) -> None:
    progress, items, _ = await worked(app, function, [1, "x", None, {"a": [1.5]}])
    assert counts(progress) == {"succeeded": 4, "total": 4}
    assert [item.result for item in items] == [1, "x", None, {"a": [1.5]}]


@pytest.mark.parametrize(
    ("kind", "given", "stored"),
    [
        (Paper, [Paper(id="a"), {"id": "b", "pages": "7"}], {"id": "a", "pages": 1}),
        (Point, [Point(3), {"x": "3"}], {"x": 3}),
        (Dict, [{"title": "t", "inner": {"depth": "3"}}], {"title": "t", "inner": {"depth": 3}}),
        (list[Point], [[Point(3)], [{"x": 3}]], [{"x": 3}]),
        (int | None, [None, "7"], None),
    ],
    ids=["pydantic", "dataclass", "TypedDict", "list", "union"],
)
async def test_items_and_results_are_typed(
    app: procrastinate.App, kind: Any, given: list[Any], stored: Any
) -> None:
    seen: list[Any] = []

    def child(item: Any) -> Any:
        seen.append(item)
        return item

    child.__annotations__ = {"item": kind, "return": kind}
    progress, items, run = await worked(app, child, given)
    assert counts(progress) == {"succeeded": len(given), "total": len(given)}
    assert items[0].payload == items[0].result == stored
    async with opened(app):
        typed = [result async for result in run.results()]
    expected = codec.Codec(kind).validate(given[0])
    assert typed[0] == expected and expected in seen
    assert type(typed[0]) is type(expected)


async def test_result_that_does_not_fit_fails_its_item(app: procrastinate.App) -> None:
    def child(item: Any) -> Paper:
        return item  # type: ignore[no-any-return]

    progress, items, _ = await worked(app, child, [{"id": "a"}, {"pages": 3}, "x"])
    assert counts(progress) == {"succeeded": 1, "failed": 2, "total": 3}
    assert items[1].error is not None and items[1].attempts == 1
    assert "does not fit Paper: id: Field required" in items[1].error["message"]


async def test_annotation_that_cannot_work_fails_at_the_start(app: procrastinate.App) -> None:
    def unknown_item(item: "Nowhere") -> None: ...  # type: ignore[name-defined]  # noqa: F821
    def unknown_result(item: int) -> "Nowhere": ...  # type: ignore[name-defined]  # noqa: F821
    def no_json(item: int) -> threading.Thread: ...  # type: ignore[empty-body]

    async with opened(app):
        for function in (unknown_item, unknown_result, no_json):
            child: Child[Any, Any] = fanout_child(app)(function)
            manager = fanout_manager(app, child=child, name=f"{function.__name__}_lister")(
                lambda: []
            )
            with pytest.raises(ConfigurationError, match=r"Nowhere|Thread"):
                await child.map_async([])
            with pytest.raises(ConfigurationError, match=r"Nowhere|Thread"):
                manager.configure()
        assert await FanOut.of(app).runs_async() == []


# -- outcomes


def work(**options: Any) -> child_module.Work:
    return child_module.Work(
        function=echo,
        options=settings.ChildOptions(**options),
        items=codec.Codec(Any),
        results=codec.Codec(Any),
        max_result_bytes=100,
    )


def test_wait_before_the_next_try_is_always_finite() -> None:
    """D01: capped before it is computed, whatever the attempt."""
    hard = work(max_attempts=3000, backoff=Backoff(initial=5, maximum=3600, jitter=0.1))
    waits = [hard.failure(ConnectionError(), attempt)["retry_in"] for attempt in range(1, 2001)]
    assert min(waits) >= 4.5 and max(waits) <= 3600 * 1.1
    assert hard.failure(ConnectionError(), 3000)["outcome"] == "failed"


def test_declared_classes_and_asked_for_waits() -> None:
    one = work(permanent=(ConnectionError,), transient=(ValueError,), max_attempts=2)
    assert one.failure(ConnectionResetError(), 1)["outcome"] == "failed"
    assert one.failure(ValueError(), 1)["outcome"] == "released"
    assert one.failure(ValueError(), 2)["outcome"] == "failed"
    assert one.failure(PermanentError("x"), 1)["outcome"] == "failed"
    assert one.failure(TransientError("x", retry_in=77), 1)["retry_in"] == 77
    assert one.failure(TransientError("x", retry_in=-7), 1)["retry_in"] == 0


def test_result_that_is_no_result() -> None:
    for value, error in (("x" * 99, "ResultTooLarge"), (threading.Lock(), "InvalidValue")):
        columns = work().outcome_of(execution.Returned(value), 1)
        assert columns["outcome"] == "failed" and error in columns["error"]
    assert work().outcome_of(execution.Returned("x" * 98), 1)["outcome"] == "succeeded"
    columns = work().outcome_of(execution.Returned({"x": float("nan"), "y": "a\0b"}), 1)
    assert columns == {
        "outcome": "succeeded",
        "result": '{"x":null,"y":"a\ufffdb"}',
        "sanitised": True,
    }


class Odd(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


class Deep(Exception):
    pass


def deep(levels: int) -> None:
    if levels == 0:
        raise Deep("at the bottom")
    deep(levels - 1)


def chained() -> None:
    try:
        raise ConnectionResetError("the wire")
    except ConnectionResetError as exc:
        raise RuntimeError("could not fetch") from exc


ERRORS: list[tuple[str, Any, str, int]] = [
    # what, what is raised, the type as it shows, tries of three
    ("value", ValueError("x"), "ValueError", 1),
    ("unknown", RuntimeError("x"), "RuntimeError", 3),
    ("wire", ConnectionError("x"), "ConnectionError", 3),
    ("permanent", PermanentError("x"), "fanout_procrastinate.errors.PermanentError", 1),
    ("transient", TransientError("x", retry_in=0), "fanout_procrastinate.errors.TransientError", 3),
    ("no text", Odd(), "tests.test_child.Odd", 3),
    ("exit", SystemExit(1), "SystemExit", 3),
    ("interrupt", KeyboardInterrupt(), "KeyboardInterrupt", 3),
    ("cancelled", asyncio.CancelledError("mine"), "asyncio.exceptions.CancelledError", 3),
    ("generator", GeneratorExit(), "GeneratorExit", 3),
    ("group", ExceptionGroup("g", [ValueError("x"), TypeError("y")]), "ExceptionGroup", 1),
    (
        "mixed group",
        BaseExceptionGroup("g", [ValueError("x"), KeyboardInterrupt()]),
        "BaseExceptionGroup",
        3,
    ),
    ("nul", ValueError("a\0b\ud800"), "ValueError", 1),
    ("huge", ValueError("é" * 10_000_000), "ValueError", 1),
    ("timeout", TimeoutError("mine"), "TimeoutError", 3),
]


class Unbound:
    """What stands for something else, and is bound to nothing yet."""

    @property
    def __class__(self) -> Any:
        raise KeyboardInterrupt

    @__class__.setter
    def __class__(self, value: Any) -> None:
        raise KeyboardInterrupt


async def test_result_that_resists_every_look_at_it(app: procrastinate.App, conn: Conn) -> None:
    def child(item: int) -> Any:
        return Unbound()

    progress, (item,), run = await worked(app, child, [1], max_attempts=1)
    assert counts(progress) in ({"failed": 1, "total": 1}, {"succeeded": 1, "total": 1})
    assert (item.attempts, item.crashes) == (1, 0)
    invariants.check(conn, run.id)


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_every_way_of_leaving_is_recorded(
    app: procrastinate.App, conn: Conn, kind: str
) -> None:
    """D02, D05, D07: none stays at work, none is lost, and the worker lives on."""
    tries: collections.Counter[int] = collections.Counter()

    def child(item: int) -> None:
        tries[item] += 1
        raise ERRORS[item][1]

    async def child_async(item: int) -> None:
        child(item)

    progress, items, run = await worked(
        app, child if kind == "sync" else child_async, range(len(ERRORS)), max_attempts=3
    )
    assert counts(progress) == {"failed": len(ERRORS), "total": len(ERRORS)}
    for item, (what, _, name, expected) in zip(items, ERRORS, strict=True):
        assert item.error is not None
        assert (what, item.error["type"]) == (what, name)
        assert (what, item.attempts, tries[item.position]) == (what, expected, expected)
        assert set(item.error) >= {"type", "message", "traceback", "class", "rule"}
    by_name = {what: item for item, (what, *_) in zip(items, ERRORS, strict=True)}
    nul, huge = by_name["nul"], by_name["huge"]
    assert nul.error is not None and nul.error["message"] == "a\ufffdb\ufffd"
    assert nul.sanitised and not by_name["value"].sanitised
    assert huge.error is not None and "…[cut]" in huge.error["message"]
    (row,) = conn.execute("SELECT max(length(error::text)) AS longest FROM fanout_items").fetchall()
    assert row["longest"] < 17_000
    invariants.check(conn, run.id)


async def test_stop_iteration_and_causes(app: procrastinate.App) -> None:
    def child(item: str) -> Any:
        if item == "deep":
            deep(300)
        if item == "chained":
            chained()
        return next(iter([]))

    progress, items, _ = await worked(
        app, child, ["stop", "deep", "chained"], max_attempts=2, permanent=(Deep,)
    )
    assert counts(progress) == {"failed": 3, "total": 3}
    stop_, bottom, wire = [item.error for item in items]
    assert stop_ and stop_["type"] == "StopIteration"
    assert bottom and bottom["type"] == "tests.test_child.Deep" and bottom["truncated"]
    assert "at the bottom" in bottom["traceback"]
    assert wire and wire["class"] == "transient" and "ConnectionResetError" in wire["traceback"]


async def test_results_of_every_kind(app: procrastinate.App, conn: Conn) -> None:
    """D05, D07: text that the database refuses, numbers that JSON has none for, sizes."""
    cycle: list[Any] = []
    results: dict[str, Any] = {
        "nul": {"k\0": ["a\0b", "\ud800"]},
        "nan": {"x": float("nan"), "y": [float("inf")]},
        "huge": "x" * 10_000_000,
        "foreign": {"x": threading.Lock()},
        "cycle": cycle,
        "plain": {"é": [1, 2.5, None, True]},
    }
    cycle.append(cycle)

    async def child(item: str) -> Any:
        return results[item]

    progress, items, _ = await worked(app, child, list(results))
    found = {item.payload: item for item in items}
    assert found["nul"].result == {"k\ufffd": ["a\ufffdb", "\ufffd"]} and found["nul"].sanitised
    assert found["nan"].result == {"x": None, "y": [None]} and found["nan"].sanitised
    assert found["plain"].result == results["plain"] and not found["plain"].sanitised
    for name, error, words in (
        ("huge", "ResultTooLarge", "10000002 bytes of JSON, 1048576 are allowed"),
        ("foreign", "InvalidValue", "cannot become JSON"),
    ):
        item = found[name]
        assert item.status == "failed" and item.attempts == 1 and item.error is not None
        assert item.error["type"].endswith(error) and words in item.error["message"]
    assert found["cycle"].result == [["[cycle]"]] and found["cycle"].sanitised
    assert counts(progress) == {"succeeded": 4, "failed": 2, "total": 6}
    invariants.check(conn)


async def test_transient_errors_are_tried_again_and_counted(
    app: procrastinate.App, conn: Conn
) -> None:
    """A16: waiting for a retry is not finished; every item retried twice, one exhausted."""
    tries: collections.Counter[int] = collections.Counter()

    async def child(item: int) -> int:
        tries[item] += 1
        if item == 3 or tries[item] <= 2:
            raise ConnectionError(f"try {tries[item]}")
        return item

    progress, items, _ = await worked(app, child, range(6), max_attempts=3)
    assert counts(progress) == {"succeeded": 5, "failed": 1, "total": 6}
    assert [item.attempts for item in items] == [3] * 6
    assert items[3].error is not None and items[3].error["message"] == "try 3"
    assert items[0].error is None
    invariants.check(conn)


async def test_snapshot_that_cannot_be_read_fails_once(app: procrastinate.App, conn: Conn) -> None:
    """F10: corrupt, or of an older form: permanent, counted, and the run closes."""
    called: list[int] = []

    @fanout_child(app)
    async def child(item: Paper) -> None:
        called.append(item.pages)

    async with opened(app):
        run = await child.map_async([Paper(id=str(n), pages=n) for n in range(4)])
        conn.execute("UPDATE fanout_items SET payload = '{\"pages\": 3}' WHERE position = 0")
        conn.execute("UPDATE fanout_items SET payload = NULL WHERE position = 1")
        (progress,) = await work_off(app, run)
        assert counts(progress) == {"succeeded": 2, "failed": 2, "total": 4}
        first, second, *_ = [item async for item in run.items()]
    assert sorted(called) == [2, 3]
    for item in (first, second):
        assert item.attempts == 1 and item.error is not None and item.error["class"] == "permanent"
        assert "its stored item no longer fits Paper" in item.error["message"]


# -- limits


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_time_limit_is_a_failed_attempt(app: procrastinate.App, kind: str) -> None:
    let_go = threading.Event()
    tries: list[int] = []

    def child(item: int) -> int:
        if item == 1 and len(tries) < 2:
            tries.append(item)
            let_go.wait(5)
        return item

    async def child_async(item: int) -> int:
        if item == 1 and len(tries) < 2:
            tries.append(item)
            await asyncio.Event().wait()
        return item

    function = child if kind == "sync" else child_async
    declared = fanout_child(app, timeout=0.1, backoff=QUICK)(function)
    async with serving(app):
        run = await declared.map_async([0, 1, 2])
        progress = await finished(run)
        assert counts(progress) == {"succeeded": 3, "total": 3}
        assert [item.attempts async for item in run.items()] == [1, 3, 1]
        let_go.set()


async def test_failed_for_its_time_limit_says_so(app: procrastinate.App) -> None:
    async def child(item: int) -> None:
        await asyncio.Event().wait()

    _, (item,), _ = await worked(app, child, [1], timeout=0.05, max_attempts=1)
    assert item.error is not None and item.error["type"] == "TimeoutError"
    assert item.error["message"] == "its time limit of 0.05 s passed"


async def test_stuck_thread_lowers_the_capacity_and_not_the_run(
    app: procrastinate.App, conn: Conn, gate: threading.Event
) -> None:
    at_work: list[int] = []
    most: list[int] = []

    @fanout_child(app, timeout=0.1, max_attempts=1)
    def child(item: int) -> int:
        if item == 0:
            gate.wait(20)
            return 0
        at_work.append(item)
        most.append(len(at_work))
        time.sleep(0.005)
        at_work.remove(item)
        return item

    async with serving(app, concurrency=2):
        run = await child.map_async(range(20))
        progress = await finished(run)
        assert counts(progress) == {"succeeded": 19, "failed": 1, "total": 20}
        # Its place stays taken: the worker runs one sync child less, until it ends.
        await wait_until_async(lambda: len(jobs(conn, status="doing")) == 1)
        second = await child.map_async(range(1, 9))
        del most[:]
        await finished(second)
        assert max(most) == 1
        gate.set()
        await wait_until_async(lambda: not jobs(conn, status="doing"))
    invariants.check(conn)


async def test_never_more_than_max_in_flight(app: procrastinate.App, conn: Conn) -> None:
    at_work: set[int] = set()
    most: list[int] = []

    @fanout_child(app)
    async def child(item: int) -> None:
        at_work.add(item)
        most.append(len(at_work))
        await asyncio.sleep(0.002)
        at_work.discard(item)

    async with serving(app, concurrency=10):
        run = await child.map_async(range(60), max_in_flight=3)
        assert counts(await finished(run)) == {"succeeded": 60, "total": 60}
    assert max(most) == 3


async def test_workers_on_one_loop_have_threads_for_all_their_places(
    app: procrastinate.App,
) -> None:
    @fanout_child(app, timeout=1.0, max_attempts=1)
    def child(item: int) -> None:
        time.sleep(0.6)

    async with serving(app, concurrency=1), working(app, concurrency=1):
        run = await child.map_async(range(4))
        assert counts(await finished(run)) == {"succeeded": 4, "total": 4}


# -- given back at no charge


async def test_an_aborted_thread_keeps_its_place_and_nobody_elses(
    app: procrastinate.App, conn: Conn, gate: threading.Event
) -> None:
    """What is handed out next does not wait behind it while its own time limit counts."""

    @fanout_child(app, timeout=0.5, max_attempts=1)
    def child(item: int) -> int:
        if item == 0:
            gate.wait(20)
        return item

    async with serving(app, concurrency=1, abort_job_polling_interval=0.05):
        run = await child.map_async([0], max_in_flight=1)
        await wait_until_async(lambda: jobs(conn, status="doing"))
        (job,) = jobs(conn, status="doing")
        await asyncio.sleep(0.1)
        await app.job_manager.cancel_job_by_id_async(job["id"], abort=True)
        other = await child.map_async([1, 2, 3])
        await wait_until_async(
            lambda: conn.execute(
                "SELECT FROM fanout_items WHERE claim > 1 OR due < now()"
            ).fetchall()
        )
        await asyncio.sleep(0.6)
        gate.set()
        for one, count in ((other, 3), (run, 1)):
            assert counts(await finished(one)) == {"succeeded": count, "total": count}
            assert {item.attempts async for item in one.items()} == {1}


async def test_a_thread_that_outlives_its_worker_is_not_waited_for(
    app: procrastinate.App, conn: Conn, gate: threading.Event
) -> None:
    @fanout_child(app, timeout=1.0, max_attempts=1)
    def child(item: int) -> int:
        if not gate.is_set():
            begun.set()
            gate.wait(20)
        return item

    begun = threading.Event()
    async with opened(app):
        async with working(app, concurrency=1, shutdown_graceful_timeout=0.05):
            run = await child.map_async([1])
            await wait_until_async(begun.is_set)
        waiting, gate.wait = gate.wait, lambda timeout=None: True  # type: ignore[method-assign]
        try:
            async with working(app, concurrency=1):
                assert counts(await finished(run)) == {"succeeded": 1, "total": 1}
        finally:
            gate.wait = waiting  # type: ignore[method-assign]


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_aborted_job_gives_its_item_back(
    app: procrastinate.App, conn: Conn, gate: threading.Event, kind: str
) -> None:
    calls: list[str] = []

    def child(item: int) -> str:
        calls.append("begun")
        if len(calls) == 1:
            gate.wait(10)
            calls.append("late")
            return "late"
        return "second"

    async def child_async(item: int) -> str:
        calls.append("begun")
        if len(calls) == 1:
            await asyncio.Event().wait()
        return "second"

    declared = fanout_child(app)(child if kind == "sync" else child_async)
    async with serving(app):
        run = await declared.map_async([1])
        await wait_until_async(lambda: calls)
        (job,) = jobs(conn)
        await app.job_manager.cancel_job_by_id_async(job["id"], abort=True)
        progress = await finished(run)
        gate.set()
        assert counts(progress) == {"succeeded": 1, "total": 1}
        (item,) = [item async for item in run.items()]
        assert (item.result, item.attempts, item.crashes) == ("second", 1, 0)
        await wait_until_async(lambda: not jobs(conn, status="doing"))
    assert [job["status"] for job in jobs(conn)] == ["aborted", "succeeded"]
    invariants.check(conn)


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_shutdown_gives_items_back(
    app: procrastinate.App, conn: Conn, gate: threading.Event, kind: str
) -> None:
    """D02: released without an attempt, nothing stays at work, the late result is refused."""
    begun: list[int] = []

    def child(item: int) -> int:
        begun.append(item)
        gate.wait(10)
        return item

    async def child_async(item: int) -> int:
        begun.append(item)
        await wait_until_async(gate.is_set)
        return item

    declared = fanout_child(app)(child if kind == "sync" else child_async)
    async with opened(app):
        run = await declared.map_async(range(4))
        async with working(app, concurrency=2, shutdown_graceful_timeout=0.05) as worker:
            await wait_until_async(lambda: len(begun) == 2)
            await stop(worker)
        assert counts(await run.progress_async()) == {"pending": 4, "total": 4}
        assert [item.attempts async for item in run.items()] == [0] * 4
        invariants.check(conn)
        gate.set()
        (progress,) = await work_off(app, run)
        assert counts(progress) == {"succeeded": 4, "total": 4}
        assert [item.attempts async for item in run.items()] == [1] * 4


async def test_worker_that_stops_takes_no_other_item(
    app: procrastinate.App, conn: Conn, gate: threading.Event
) -> None:
    """C11: without a time limit the item in hand ends first, and none is begun after it."""
    begun: list[int] = []

    @fanout_child(app)
    def child(item: int) -> int:
        begun.append(item)
        gate.wait(10)
        return item

    async with opened(app):
        run = await child.map_async(range(5))
        async with working(app, concurrency=1) as worker:
            await wait_until_async(lambda: begun)
            worker.cancel()
            await asyncio.sleep(0)
            gate.set()
            await stop(worker)
        assert counts(await run.progress_async()) == {"succeeded": 1, "pending": 4, "total": 5}
        assert len(begun) == 1
        (progress,) = await work_off(app, run)
        assert counts(progress) == {"succeeded": 5, "total": 5}


@pytest.mark.parametrize("name", ["begin", "report"])
async def test_answer_that_comes_during_the_shutdown_is_given_back(
    app: procrastinate.App,
    conn: Conn,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    name: str,
) -> None:
    caplog.set_level("INFO")
    recorder = Recorder(monkeypatch)

    @fanout_child(app)
    async def child(item: int) -> int:
        return item

    async with opened(app):
        run = await child.map_async(range(4), max_in_flight=1)
        async with working(app, shutdown_graceful_timeout=0.05) as worker:
            with recorder.held(name):
                await wait_until_async(lambda: recorder.of(name))
                stopping = asyncio.create_task(stop(worker))
                # Past the worker's patience: the job is cancelled while it waits.
                await wait_until_async(lambda: "Aborting them" in caplog.text)
            await stopping
        done = 1 if name == "report" else 0
        progress = await run.progress_async()
        assert (progress.succeeded, progress.pending, progress.processing) == (done, 4 - done, 0)
        invariants.check(conn)
        (progress,) = await work_off(app, run)
        assert counts(progress) == {"succeeded": 4, "total": 4}
        assert [item.attempts async for item in run.items()] == [1] * 4


async def test_answer_that_never_comes_is_left_to_the_sweep(
    app: procrastinate.App, conn: Conn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_module, "_LAST_ANSWER_SECONDS", 0.05)
    recorder = Recorder(monkeypatch)

    @fanout_child(app)
    async def child(item: int) -> int:
        return item

    async with opened(app):
        run = await child.map_async([1])
        with recorder.held("begin"):
            async with working(app, shutdown_graceful_timeout=0.05) as worker:
                await wait_until_async(lambda: recorder.of("begin"))
                await stop(worker)
            assert [job["status"] for job in jobs(conn)] == ["aborted"]
        await FanOut.of(app).close_async()  # what was on its way has ended
        (progress,) = await FanOut.of(app).runs_async()
        assert progress.processing == 1
        for column in ("seen_at", "suspect_since"):
            conn.execute(f"UPDATE fanout_slots SET {column} = clock_timestamp() - interval '1 h'")
        report = await FanOut.of(app).sweep_async()
        assert report.done == {"rescued_released": 1, "dealt": 1}
        (progress,) = await work_off(app, run)
        assert counts(progress) == {"succeeded": 1, "total": 1}


# -- slots


async def test_light_items_share_a_job(app: procrastinate.App, conn: Conn) -> None:
    _, items, _ = await worked(app, echo, range(300))
    assert [item.result for item in items] == list(range(300))
    assert len(jobs(conn)) <= 30


async def test_slot_waits_for_an_item_that_is_due_soon(app: procrastinate.App, conn: Conn) -> None:
    """The host looks for scheduled jobs every five seconds only."""
    tries: list[int] = []

    async def child(item: int) -> None:
        tries.append(item)
        if len(tries) < 4:
            raise TransientError("again", retry_in=0.1)

    started = time.monotonic()
    progress, _, _ = await worked(app, child, [1])
    assert counts(progress) == {"succeeded": 1, "total": 1} and time.monotonic() - started < 4
    assert len(jobs(conn)) == 1


async def test_slot_that_waits_is_aborted_like_any_other(
    app: procrastinate.App, conn: Conn
) -> None:
    waits = asyncio.Event()

    @fanout_child(app)
    async def child(item: int) -> None:
        raise TransientError("again", retry_in=5)

    async with serving(app, shutdown_graceful_timeout=0.05):
        suspicion = FanOut.of(app).runtime().suspicion
        freed = suspicion.freed

        async def noted(seconds: float) -> None:
            waits.set()
            await freed(seconds)

        suspicion.freed = noted  # type: ignore[method-assign]
        await child.map_async([1])
        await waits.wait()
    assert [job["status"] for job in jobs(conn)] == ["aborted", "todo"]
    invariants.check(conn)


async def test_time_slice_gives_others_their_turn(app: procrastinate.App, conn: Conn) -> None:
    """E04: a small run and a plain task beside a large one, on a worker with one place."""
    FanOut(app, time_slice=0.0)
    order: list[Any] = []

    @fanout_child(app, queue="papers")
    async def child(item: str) -> None:
        order.append(item)

    @app.task(queue="papers", name="plain")
    async def plain() -> None:
        order.append("plain")

    async with opened(app):
        large = await child.map_async(["large"] * 60)
        small = await child.map_async(["small"] * 3)
        await plain.defer_async()
        await work_off(app, large, small, concurrency=1)
    assert order.count("large") == 60 and order.count("small") == 3
    assert order.index("plain") < 25 and order[::-1].index("small") > 25
    invariants.check(conn)


async def test_time_slice_is_not_used_where_nobody_waits(
    app: procrastinate.App, conn: Conn
) -> None:
    FanOut(app, time_slice=0.0)
    progress, _, _ = await worked(app, echo, range(60))
    assert progress.succeeded == 60 and len(jobs(conn)) <= 20


async def test_within_its_slice_a_slot_keeps_its_place(app: procrastinate.App, conn: Conn) -> None:
    FanOut(app, time_slice=30.0)
    order: list[str] = []

    @fanout_child(app)
    async def child(item: str) -> None:
        order.append(item)

    async with opened(app):
        first = await child.map_async(["first"] * 30, max_in_flight=1)
        second = await child.map_async(["second"] * 3)
        await work_off(app, first, second, concurrency=1)
    assert order == ["first"] * 30 + ["second"] * 3


async def test_reports_are_coalesced(
    app: procrastinate.App, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(monkeypatch)

    @fanout_child(app)
    async def child(item: int) -> None: ...

    async with serving(app, concurrency=20):
        run = await child.map_async(range(400))
        assert counts(await finished(run)) == {"succeeded": 400, "total": 400}
    assert len(recorder.of("report")) < 150


@pytest.mark.parametrize("before", [True, False], ids=["not executed", "reply lost"])
@pytest.mark.parametrize("name", ["begin", "report"])
async def test_lost_statements(
    app: procrastinate.App, conn: Conn, monkeypatch: pytest.MonkeyPatch, name: str, before: bool
) -> None:
    recorder = Recorder(monkeypatch)
    recorder.fail(name, 3, before=before)
    tries: collections.Counter[int] = collections.Counter()

    async def child(item: int) -> int:
        tries[item] += 1
        if item % 7 == 3 and tries[item] == 1:
            raise ConnectionError
        return item

    progress, items, run = await worked(app, child, range(40))
    assert counts(progress) == {"succeeded": 40, "total": 40}
    assert [item.attempts for item in items] == [1 + (n % 7 == 3) for n in range(40)]
    assert tries == {n: 1 + (n % 7 == 3) for n in range(40)}
    invariants.check(conn, run.id)


async def test_job_delivered_again_counts_nothing(app: procrastinate.App, conn: Conn) -> None:
    """A01: however often a job is delivered, its item counts once."""
    calls: list[int] = []

    @fanout_child(app)
    async def child(item: int) -> None:
        calls.append(item)

    async with serving(app):
        run = await child.map_async(range(5))
        await finished(run)
        # Not on the loop: the host may just be finishing one of them, in a transaction of its own.
        await asyncio.to_thread(
            conn.execute,
            "UPDATE procrastinate_jobs SET status = 'todo', queueing_lock = NULL"
            " WHERE args ? 'slot'",
        )
        await wait_until_async(lambda: not jobs(conn, status="todo"), timeout=10)
        await wait_until_async(lambda: not jobs(conn, status="doing"), timeout=10)
        assert counts(await run.progress_async()) == {"succeeded": 5, "total": 5}
    assert sorted(calls) == list(range(5))
    assert {job["status"] for job in jobs(conn)} == {"succeeded"}
    invariants.check(conn)


async def test_job_of_a_run_that_is_gone_ends(app: procrastinate.App, conn: Conn) -> None:
    @fanout_child(app, pass_context=True)
    async def child(context: Any, item: int) -> None: ...

    async with serving(app):
        for run_id in (77, 78):
            await app.configure_task(child.task.name).defer_async(run_id=run_id, slot=0)
        await wait_until_async(lambda: [job["status"] for job in jobs(conn)] == ["succeeded"] * 2)


async def test_slot_that_was_lost_is_told_in_the_log(
    app: procrastinate.App, conn: Conn, caplog: pytest.LogCaptureFixture
) -> None:
    """Its outcome is dropped, and nothing is counted."""
    calls: list[int] = []

    @fanout_child(app)
    async def child(item: int) -> str:
        calls.append(item)
        if len(calls) == 1:
            conn.execute("SELECT fanout_rescue_v1(run_id, slot) FROM fanout_slots WHERE active")
            conn.execute("SELECT fanout_top_up_v1(id) FROM fanout_runs")
            return "first"
        return "second"

    async with serving(app):
        run = await child.map_async([1])
        assert counts(await finished(run)) == {"succeeded": 1, "total": 1}
        assert [result async for result in run.results()] == ["second"]
    lost = [vars(record) for record in caplog.records if record.message.startswith("Slot lost")]
    assert [(one["action"], one["run_id"]) for one in lost] == [("slot_lost", run.id)]
    invariants.check(conn)


@pytest.mark.database_settings(idle_in_transaction_session_timeout="1s")
async def test_no_transaction_is_open_while_children_work(
    app: procrastinate.App, conn: Conn
) -> None:
    """D11: claim, commit, run, then a short settling transaction."""
    begun: list[int] = []
    gate = asyncio.Event()

    @fanout_child(app)
    async def child(item: int) -> None:
        begun.append(item)
        await gate.wait()

    async with serving(app):
        run = await child.map_async(range(10))
        await wait_until_async(lambda: len(begun) == 10)

        def in_transaction() -> list[Any]:
            return conn.execute(
                "SELECT query FROM pg_stat_activity WHERE datname = current_database()"
                " AND pid <> pg_backend_pid() AND state LIKE 'idle in transaction%'"
            ).fetchall()

        await wait_until_async(lambda: not in_transaction(), timeout=1)
        gate.set()
        assert counts(await finished(run)) == {"succeeded": 10, "total": 10}


async def test_waiting_items_stay_as_they_are(app: procrastinate.App, conn: Conn) -> None:
    """B06: a lease begins with the claim; what only waits is never swept."""
    FanOut(app, lease=1.0)

    @fanout_child(app)
    async def child(item: int) -> None:
        await asyncio.sleep(0.01)

    async with serving(app, concurrency=1):
        run = await child.map_async(range(150), max_in_flight=5)
        assert counts(await finished(run)) == {"succeeded": 150, "total": 150}
        assert {(item.attempts, item.crashes) async for item in run.items()} == {(1, 0)}


# -- odds and ends


def test_outside_of_a_worker_there_is_no_end() -> None:
    assert not child_module.worker_stops()


async def test_work_that_waits_for_a_suspect_to_end(app: procrastinate.App, conn: Conn) -> None:
    """Two items whose worker died: this process takes one after the other, and loses none."""
    at_work: list[int] = []
    most: list[int] = []

    @fanout_child(app)
    async def child(item: int) -> None:
        at_work.append(item)
        most.append(len(at_work))
        await asyncio.sleep(0.05)
        at_work.remove(item)

    async with opened(app):
        run = await child.map_async(range(4))
        conn.execute("UPDATE fanout_items SET crashes = 1, ledger = 0, due = clock_timestamp()")
        conn.execute("UPDATE fanout_ledgers SET cursor = 4, waiting = 4")
        (progress,) = await work_off(app, run)
        assert counts(progress) == {"succeeded": 4, "total": 4}
    assert max(most) == 1
    invariants.check(conn)
