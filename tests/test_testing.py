"""`drain` and `run_inline`, as users' tests call them."""

import asyncio
import dataclasses
import datetime
import json
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import procrastinate
import pydantic
import pytest

from fanout_procrastinate import (
    Backoff,
    ConfigurationError,
    FanOut,
    InvalidItem,
    ItemContext,
    PermanentError,
    Run,
    TransientError,
    fanout_child,
    fanout_manager,
)
from fanout_procrastinate.testing import drain, drain_async, run_inline, run_inline_async
from tests import invariants
from tests.conftest import Connection
from tests.waiting import wait_until


class Paper(pydantic.BaseModel):
    name: str
    pages: int = 1


@dataclasses.dataclass
class Declared:
    """An app with a bit of everything, and what its functions have seen."""

    app: procrastinate.App
    tries: list[str] = dataclasses.field(default_factory=list)
    closed: list[int] = dataclasses.field(default_factory=list)
    papers: Any = None
    wait: Any = None
    nested: Any = None

    def read(self, paper: Paper) -> int:
        self.tries.append(paper.name)
        tries = self.tries.count(paper.name)
        if paper.name == "broken":
            raise PermanentError("broken")
        if paper.name == "late" and tries < 3:
            raise TransientError("late")
        if paper.name == "tomorrow" and tries < 2:
            raise TransientError("tomorrow", retry_in=86400)
        return paper.pages


def declare(app: procrastinate.App) -> Declared:
    declared = Declared(app)
    FanOut(app, lease=2.0)

    @fanout_child(app, queue="papers", max_attempts=3, backoff=Backoff(initial=0.1, jitter=0))
    def read(paper: Paper) -> int:
        return declared.read(paper)

    @fanout_manager(app, child=read, item_key=lambda paper: paper.name)
    def papers(names: list[str]) -> Iterator[dict[str, str]]:
        for name in names:
            yield {"name": name}

    @papers.on_complete
    async def on_complete(run: Run) -> None:
        declared.closed.append(run.id)

    @fanout_child(app, queue="papers")
    async def wait(number: int) -> None:
        await asyncio.sleep(60)

    @fanout_child(app, queue="papers")
    async def nest(name: str) -> int:
        run = await papers.defer_async(names=[name])
        return run.id

    @fanout_manager(app, child=nest)
    def nested(names: list[str]) -> list[str]:
        return names

    @app.periodic(cron="* * * * *")
    @app.task(queue="papers")
    def tick(timestamp: int) -> None:
        declared.tries.append("tick")

    declared.papers, declared.wait, declared.nested = papers, wait, nested
    return declared


def test_drain_works_until_nothing_is_due(app: procrastinate.App, conn: Connection) -> None:
    declared = declare(app)
    with app.open():
        run = declared.papers.defer(names=["a", "late", "broken", "b", "tomorrow", "a"])
        other = declared.papers.defer(names=[])
        drain(app)
        progress = run.progress()
        assert (progress.succeeded, progress.failed, progress.waiting) == (3, 1, 1)
        assert progress.duplicates == 1
        assert list(other.progress().callbacks.values()) == ["done"]
        assert declared.tries.count("late") == 3
        assert "tick" not in declared.tries
        assert declared.closed == [other.id]
        conn.execute("UPDATE fanout_items SET due = now() WHERE due IS NOT NULL")
        FanOut.of(app).sweep()
        drain(app)
        assert run.progress().status == "completed"
        assert declared.closed == [other.id, run.id]
    invariants.check(conn)


def test_drain_leaves_nothing(app: procrastinate.App, conn: Connection) -> None:
    declared = declare(app)
    connected = (
        "SELECT count(*) AS n FROM pg_stat_activity WHERE datname = current_database()"
        " AND application_name = 'drained'"
    )
    connector = app.connector
    with app.open():
        declared.papers.defer(names=["a", "b"])
        conninfo = conn.info.dsn + " application_name=drained"
        with app.replace_connector(procrastinate.PsycopgConnector(conninfo=conninfo)):
            drain(app)
    wait_until(lambda: conn.execute(connected).fetchone() == {"n": 0})
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("fanout")]
    assert app.connector is app.job_manager.connector is connector
    assert len(app.periodic_registry.periodic_tasks) == 2


def test_drain_on_a_sync_connector(dsn: str) -> None:
    app = procrastinate.App(connector=procrastinate.SyncPsycopgConnector(conninfo=dsn))
    declared = declare(app)
    with app.open():
        run = declared.papers.defer(names=["a"])
        drain(app, queues=["elsewhere"])
        assert run.progress().status == "pending"
        drain(app, queues=["papers"])
        assert run.progress().status == "completed"


def test_drain_without_an_open_app(app: procrastinate.App) -> None:
    declared = declare(app)
    with app.open():
        run = declared.papers.defer(names=["a"])
    drain(app)
    with app.open():
        assert run.progress().status == "completed"


async def test_drain_async_follows_what_the_jobs_start(app: procrastinate.App) -> None:
    declared = declare(app)
    async with app.open_async():
        run = await declared.nested.defer_async(names=["a", "late"])
        waiting = asyncio.create_task(run.wait_async(timeout=20))
        await drain_async(app)
        assert (await waiting).succeeded == 2
        for run_id in [result async for result in run.results()]:
            nested = await FanOut.of(app).get_run_async(run_id)
            assert (await nested.progress_async()).succeeded == 1
        await FanOut.of(app).close_async()


async def test_drain_async_with_one_item_in_flight_is_one_pass(app: procrastinate.App) -> None:
    declared = declare(app)
    async with app.open_async():
        names = [str(number) for number in range(300)]
        run = await declared.papers.configure(max_in_flight=1).defer_async(names=names)
        await drain_async(app, timeout=20)
        assert (await run.progress_async()).succeeded == 300
        jobs = await app.job_manager.list_jobs_async(task=declared.papers.child.name)
        assert 0 < len(jobs) < 20


async def test_drain_async_that_takes_too_long(app: procrastinate.App, conn: Connection) -> None:
    declared = declare(app)
    async with app.open_async():
        run = await declared.wait.map_async([1, 2])
        with pytest.raises(TimeoutError, match=r"still at work after 0\.5 s: .*wait"):
            await drain_async(app, timeout=0.5)
        progress = await run.progress_async()
        assert (progress.pending, progress.processing) == (2, 0)
    rows = conn.execute("SELECT failures, crashes FROM fanout_items").fetchall()
    assert [(row["failures"], row["crashes"]) for row in rows] == [(0, 0), (0, 0)]


async def test_drain_in_a_loop_names_its_twin(app: procrastinate.App) -> None:
    with pytest.raises(RuntimeError, match="await drain_async"):
        drain(app)


def test_without_a_database_the_remedy_is_run_inline() -> None:
    app = procrastinate.App(connector=procrastinate.testing.InMemoryConnector())
    fanout = FanOut(app)
    for call in (lambda: drain(app), fanout.sweep, fanout.audit, fanout.apply_schema):
        with pytest.raises(ConfigurationError, match=r"testing\.run_inline, which needs"):
            call()


# -- run_inline


def inline_app() -> procrastinate.App:
    return procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo="host=/nowhere"))


def test_inline_counts_as_a_run_does() -> None:
    declared = declare(inline_app())
    progress = run_inline(declared.papers, names=["a", "late", "broken", "a"])
    assert (progress.status, progress.total, progress.duplicates) == ("completed", 3, 1)
    assert (progress.succeeded, progress.failed, progress.pending) == (2, 1, 0)
    assert progress.results == (1, 1)
    assert progress.errors.keys() == {2}
    assert progress.errors[2]["message"] == "broken"
    assert progress.errors[2]["type"].endswith("PermanentError")
    assert [(item.key, item.attempts, str(item.status)) for item in progress.items] == [
        ("a", 1, "succeeded"),
        ("late", 3, "succeeded"),
        ("broken", 1, "failed"),
    ]
    assert progress.closed
    assert json.loads(json.dumps(progress.as_dict()))["succeeded"] == 2
    assert not declared.closed, "callbacks are not called"


def test_inline_uses_up_the_attempts_without_waiting() -> None:
    app = inline_app()

    @fanout_child(app, max_attempts=4)
    def fail(number: int) -> None:
        raise ConnectionError(number)

    @fanout_manager(app, child=fail)
    def numbers(count: int) -> range:
        return range(count)

    progress = run_inline(numbers, count=2)
    assert [item.attempts for item in progress.items] == [4, 4]
    assert [record["type"] for record in progress.errors.values()] == ["ConnectionError"] * 2


@pytest.mark.parametrize(("tolerate", "failed"), [(0, 1), (2, 3), (0.5, 6), (1.0, 10), (None, 10)])
def test_inline_tolerates_as_told(tolerate: Any, failed: int) -> None:
    app = inline_app()

    @fanout_child(app)
    def fail(number: int) -> None:
        raise PermanentError(number)

    @fanout_manager(app, child=fail, tolerate=tolerate)
    def numbers() -> range:
        return range(10)

    progress = run_inline(numbers)
    assert (progress.failed, progress.cancelled) == (failed, 10 - failed)
    stopped = failed < 10
    assert progress.status == ("failed" if stopped else "completed")
    assert (progress.reason is not None) == stopped


def test_inline_serialises_as_a_run_does() -> None:
    app = procrastinate.Blueprint()

    @dataclasses.dataclass
    class Result:
        day: datetime.date
        run_args: dict[str, Any]
        attempt: int

    @fanout_child(app, pass_context=True)
    def child(context: ItemContext, paper: Paper) -> Result:
        assert context.still_mine()
        if paper.name == "object":
            return object()  # type: ignore[return-value]
        return Result(datetime.date(2024, 5, 1), dict(context.run_args), context.attempt)

    @fanout_manager(app, child=child)
    def papers(names: Any) -> list[dict[str, Any]]:
        return [{"name": name, "pages": "3"} for name in names]

    progress = run_inline(papers, names=("a", "object"))
    assert progress.results == (Result(datetime.date(2024, 5, 1), {"names": ["a", "object"]}, 1),)
    assert progress.items[0].payload == {"name": "a", "pages": 3}
    assert progress.errors[1]["type"].endswith("InvalidValue")


def test_inline_refuses_what_a_run_would() -> None:
    declared = declare(inline_app())
    with pytest.raises(InvalidItem, match="item 1"):
        run_inline(declared.papers, names=["a", 5])
    assert not declared.tries
    with pytest.raises(TypeError, match="missing a required argument"):
        run_inline(declared.papers, title="a")


def async_app() -> tuple[Any, list[str]]:
    app = inline_app()
    threads: list[str] = []

    @fanout_child(app, timeout=0.2)
    async def child(seconds: float) -> float:
        threads.append(threading.current_thread().name)
        await asyncio.sleep(seconds)
        return seconds

    @fanout_manager(app, child=child)
    async def seconds() -> AsyncIterator[float]:
        for number in (0.0, 5.0):
            yield number

    return seconds, threads


def check_async(progress: Any) -> None:
    assert progress.results == (0.0,)
    assert progress.errors[1]["type"] == "TimeoutError"
    assert progress.items[1].attempts == 4


def test_inline_runs_async_functions() -> None:
    seconds, threads = async_app()
    check_async(run_inline(seconds))
    assert set(threads) == {"MainThread"}


async def test_inline_async_runs_async_functions() -> None:
    seconds, _ = async_app()
    check_async(await run_inline_async(seconds))


async def test_inline_async_runs_sync_functions() -> None:
    declared = declare(inline_app())
    progress = await run_inline_async(declared.papers, names=["a", "late", "broken"])
    assert (progress.succeeded, progress.failed) == (2, 1)
    with pytest.raises(RuntimeError, match="await run_inline_async"):
        run_inline(declared.papers, names=[])


@pytest.mark.parametrize("kind", [SystemExit, GeneratorExit])
def test_inline_takes_every_error_of_a_child(kind: type[BaseException]) -> None:
    app = inline_app()

    @fanout_child(app, permanent=(kind,))
    def child(number: int) -> None:
        raise kind

    @fanout_manager(app, child=child)
    def numbers() -> list[int]:
        return [1]

    assert run_inline(numbers).errors[0]["type"] == kind.__name__


def test_inline_lets_ctrl_c_through() -> None:
    app = inline_app()

    @fanout_child(app)
    def child(number: int) -> None:
        raise KeyboardInterrupt

    @fanout_manager(app, child=child)
    def numbers() -> list[int]:
        return [1]

    with pytest.raises(KeyboardInterrupt):
        run_inline(numbers)
