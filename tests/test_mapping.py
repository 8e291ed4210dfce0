"""`map`: a run straight from what the program has."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import procrastinate
import psycopg
import pydantic
import pytest

from fanout_procrastinate import (
    Child,
    FanOut,
    InvalidItem,
    ItemTooLarge,
    Progress,
    Run,
    RunStatus,
    errors,
    fanout_child,
)
from tests.support import counts, finished, jobs, opened, serving
from tests.waiting import wait_until, wait_until_async

Conn = psycopg.Connection[dict[str, Any]]


class Paper(pydantic.BaseModel):
    id: str
    pages: int = 1


@pytest.fixture
def child(app: procrastinate.App) -> Child[Any, Any]:
    FanOut(app, chunk_size=10, lease=2.0, max_item_bytes=1000)
    return fanout_child(app, name="child")(work)


async def work(item: Paper) -> str:
    return item.id


def papers(n: int) -> Iterator[Paper]:
    for number in range(n):
        yield Paper(id=str(number))


async def papers_async(n: int) -> AsyncIterator[Paper]:
    for paper in papers(n):
        await asyncio.sleep(0)
        yield paper


class AsyncOnly:
    """An async iterable that is no generator."""

    def __aiter__(self) -> AsyncIterator[Paper]:
        return papers_async(3)


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ([Paper(id="a"), {"id": "b", "pages": "3"}], 2),
        (tuple(papers(3)), 3),
        ({"one": Paper(id="a")}.values(), 1),
        ([], 0),
    ],
)
async def test_lists(
    app: procrastinate.App, child: Child[Any, Any], items: Any, expected: int
) -> None:
    async with serving(app):
        run = await child.map_async(items)
        assert run.created
        progress = await finished(run)
        assert progress.total == progress.succeeded == expected
        assert progress.name == "child" and progress.status == "completed"


@pytest.mark.parametrize("source", [papers, papers_async])
async def test_generators(app: procrastinate.App, child: Child[Any, Any], source: Any) -> None:
    async with serving(app):
        for n in (0, 1, 9, 10, 11, 35):
            run = await child.map_async(source(n), item_key=lambda paper: paper.id)
            expected = [str(number) for number in range(n)]
            assert [item.key async for item in run.items()] == expected
            progress = await finished(run)
            assert progress.succeeded == progress.total == n
            assert [result async for result in run.results()] == expected


async def test_async_iterable(app: procrastinate.App, child: Child[Any, Any]) -> None:
    async with opened(app):
        assert (await (await child.map_async(AsyncOnly())).progress_async()).total == 3


class ByNumber:
    """What has its items by number alone."""

    def __getitem__(self, number: int) -> Paper:
        if number == 3:
            raise IndexError(number)
        return Paper(id=str(number))


def test_items_by_number(app: procrastinate.App, child: Child[Any, Any]) -> None:
    with app.open():
        assert child.map(ByNumber()).progress().total == 3  # type: ignore[arg-type]


def test_sync_map_refuses_an_async_iterable_before_the_start(
    app: procrastinate.App, child: Child[Any, Any], conn: Conn
) -> None:
    sources: tuple[Any, ...] = (AsyncOnly(), papers_async(3))
    with app.open():
        for source in sources:
            with pytest.raises(errors.InvalidValue, match="await map_async instead"):
                child.map(source)
    assert conn.execute("SELECT id FROM fanout_runs").fetchall() == []


def test_sync_map(app: procrastinate.App, child: Child[Any, Any], conn: Conn) -> None:
    with app.open():
        for items, n in (([], 0), (papers(25), 25), (list(papers(3)), 3)):
            run = child.map(items)
            assert run.progress().total == n
        assert run.facts.manager_task is None
    assert len(jobs(conn)) > 0


async def test_empty_run_closes_at_once(
    app: procrastinate.App, child: Child[Any, Any], conn: Conn
) -> None:
    """B01: no job, no waiting."""
    async with opened(app):
        run = await child.map_async([])
        progress = await run.wait_async(timeout=0)
        assert (progress.status, progress.total, progress.percent) == ("completed", 0, 100.0)
    assert jobs(conn) == []


async def test_duplicates_are_skipped_and_counted(
    app: procrastinate.App, child: Child[Any, Any]
) -> None:
    """B04: in one chunk and over several."""
    async with opened(app):
        ids = ["a", "b", "a", "c", *map(str, range(20)), "a", "7"]
        run = await child.map_async(
            [Paper(id=one, pages=n) for n, one in enumerate(ids)], item_key=lambda p: p.id
        )
        progress = await run.progress_async()
        assert counts(progress) == {"pending": 23, "duplicates": 3, "total": 23}
        found = [item async for item in run.items()]
        assert [item.position for item in found] == list(range(23))
        assert (found[0].key, found[0].payload) == ("a", {"id": "a", "pages": 0})
        # Without keys nothing is a duplicate.
        plain = await child.map_async([Paper(id="a")] * 3)
        assert counts(await plain.progress_async()) == {"pending": 3, "total": 3}


async def test_runs_do_not_share_items(app: procrastinate.App, child: Child[Any, Any]) -> None:
    """B05: the same keys in two runs at once, and in a third after they ended."""
    async with serving(app):

        async def start() -> Run:
            return await child.map_async(papers(5), item_key=lambda paper: paper.id)

        runs = [await start(), await start()]
        for run in runs:
            assert counts(await finished(run)) == {"succeeded": 5, "total": 5}
        runs.append(await start())
        assert counts(await finished(runs[2])) == {"succeeded": 5, "total": 5}
    assert len(set(runs)) == 3


@pytest.mark.slow
def test_size_of_a_run_is_not_bounded_by_parameters(app: procrastinate.App, conn: Conn) -> None:
    """B07: more items than a statement may have parameters, keyed, in bounded chunks."""
    many = fanout_child(app, name="many")(lambda item: item)
    with app.open():
        run = many.map(
            ({"id": n, "a": n, "b": str(n), "c": None} for n in range(70_000)),
            item_key=lambda item: str(item["id"]),
        )
        assert counts(run.progress()) == {"pending": 70_000, "total": 70_000}
    # However many: at most eight slots are queued at once.
    assert len(jobs(conn)) == 8


async def only_run(app: procrastinate.App) -> tuple[Run, Progress]:
    (progress,) = await FanOut.of(app).runs_async()
    return await FanOut.of(app).get_run_async(progress.run_id), progress


async def assert_nothing_was_dispatched(app: procrastinate.App, conn: Conn, words: str) -> None:
    run, progress = await only_run(app)
    assert progress.status == RunStatus.FAILED and progress.total == 0
    assert progress.reason is not None and words in progress.reason
    assert [item async for item in run.items()] == []
    assert jobs(conn) == []


async def test_invalid_item_fails_the_run_and_says_which(
    app: procrastinate.App, child: Child[Any, Any], conn: Conn
) -> None:
    async with opened(app):
        with pytest.raises(InvalidItem, match="item 21: does not fit Paper: id: Field required"):
            await child.map_async([*papers(21), {"pages": 3}])
        await assert_nothing_was_dispatched(app, conn, "item 21: does not fit Paper")


async def test_invalid_item_names_its_key(
    app: procrastinate.App, child: Child[Any, Any], conn: Conn
) -> None:
    async with opened(app):
        with pytest.raises(ItemTooLarge, match=r"item 1 \(key 'xxx"):
            await child.map_async(
                [Paper(id="a"), Paper(id="x" * 1001)], item_key=lambda paper: paper.id[:9]
            )
        await assert_nothing_was_dispatched(app, conn, "item 1 (key 'xxxxxxxxx'): 1020 bytes")


def test_invalid_item_sync(app: procrastinate.App, child: Child[Any, Any], conn: Conn) -> None:
    with app.open():
        with pytest.raises(InvalidItem, match="item 12: its key"):
            child.map(papers(30), item_key=lambda p: p.id if p.id != "12" else 12)  # type: ignore[arg-type,return-value]
        (progress,) = FanOut.of(app).runs()
    assert progress.status == "failed" and "item 12" in (progress.reason or "")
    assert jobs(conn) == []


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_source_that_raises(
    app: procrastinate.App, child: Child[Any, Any], conn: Conn, kind: str
) -> None:
    def broken() -> Iterator[Paper]:
        yield from papers(15)
        raise ConnectionError("the source\0 went away")

    async def broken_async() -> AsyncIterator[Paper]:
        for paper in broken():
            yield paper

    async with opened(app):
        with pytest.raises(ConnectionError):
            await child.map_async(broken() if kind == "sync" else broken_async())
        await assert_nothing_was_dispatched(
            app, conn, "listing its items failed: ConnectionError: the source\ufffd went away"
        )


async def test_cancelled_map_closes_its_run(
    app: procrastinate.App, child: Child[Any, Any], conn: Conn
) -> None:
    closed: list[str] = []

    async def endless() -> AsyncIterator[Paper]:
        try:
            for paper in papers(12):
                yield paper
            await asyncio.Event().wait()
        finally:
            closed.append("source")

    async with opened(app):
        mapping = asyncio.create_task(child.map_async(endless()))
        await wait_until_async(
            lambda: conn.execute("SELECT FROM fanout_runs WHERE staged = 10").fetchall()
        )
        mapping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await mapping
        assert closed == ["source"]
        await assert_nothing_was_dispatched(app, conn, "CancelledError")


async def test_slow_source_is_not_taken_for_a_dead_one(
    app: procrastinate.App, child: Child[Any, Any], conn: Conn
) -> None:
    """More than a lease between two items, with a worker that sweeps beside it."""

    async def slow() -> AsyncIterator[Paper]:
        yield Paper(id="first")
        until = time.monotonic() + 3.0
        await wait_until_async(lambda: time.monotonic() > until)
        yield Paper(id="last")

    other = fanout_child(app, name="other")(work)
    async with serving(app):
        keeping = await other.map_async(papers(1))  # lets the worker's sweeper start
        run = await child.map_async(slow())
        assert counts(await finished(run)) == {"succeeded": 2, "total": 2}
        assert (await keeping.progress_async()).closed


def test_slow_source_sync(app: procrastinate.App, child: Child[Any, Any], conn: Conn) -> None:
    owner = FanOut.of(app)

    def slow() -> Iterator[Paper]:
        yield Paper(id="first")
        deadline = time.monotonic() + 3.0
        while time.monotonic() < deadline:
            owner.sweep()
        yield Paper(id="last")

    with app.open():
        assert child.map(slow()).progress().total == 2


async def test_program_that_dies_is_noticed(
    app: procrastinate.App, child: Child[Any, Any], conn: Conn
) -> None:
    """The run of a program that is gone closes by itself; what comes late is refused."""

    async def interrupted() -> AsyncIterator[Paper]:
        for paper in papers(10):
            yield paper
        conn.execute(
            "UPDATE fanout_runs SET manager_seen_at = clock_timestamp() - interval '1 min',"
            " manager_suspect_since = clock_timestamp() - interval '30 s'"
        )
        # By this sweep, or by that of the mapping itself.
        await FanOut.of(app).sweep_async()
        yield Paper(id="late")

    async with opened(app):
        with pytest.raises(errors.StaleManager):
            await child.map_async(interrupted())
        _, progress = await only_run(app)
        assert progress.status == "failed"
        assert progress.reason == "the program that listed its items died before all were stored"


def test_many_maps_at_once(app: procrastinate.App, child: Child[Any, Any]) -> None:
    runs: list[Run] = []
    with app.open():
        threads = [
            threading.Thread(target=lambda: runs.append(child.map(papers(30)))) for _ in range(5)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        wait_until(lambda: len(runs) == 5)
        assert [run.progress().total for run in runs] == [30] * 5
        assert threading.active_count() < 30
