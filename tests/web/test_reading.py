"""What pages read: cheap in large runs, whatever the planner believes, and once for all readers."""

from typing import Any

import httpx
import procrastinate
import psycopg
import pytest

from fanout_procrastinate import (
    FanOut,
    PermanentError,
    fanout_child,
    fanout_manager,
    models,
    store,
    web,
)
from fanout_procrastinate.web import reading, words
from tests import protocol
from tests.support import finished, opened, work_off, working
from tests.test_plans import Measured

MANY = 100_000


@pytest.fixture
def large(conn: psycopg.Connection[Any]) -> tuple[int, Measured]:
    """A run of many items; the connection has planned everything while there were ten."""
    for table in ("runs", "ledgers", "items", "slots"):
        conn.execute(f"ALTER TABLE fanout_{table} SET (autovacuum_enabled = false)".encode())
    driver, measured = protocol.Protocol(conn), Measured(conn)
    for _ in range(8):  # past the five executions after which a plan may become generic
        run_id = driver.stage(10, max_in_flight=4)
        for call in calls(run_id, 10):
            measured(call)
    run_id = driver.start(protocol.spec(max_in_flight=8))["run_id"]
    conn.execute(
        "INSERT INTO fanout_items (run_id, position, item_key, payload, status, error_type, error,"
        " started_at, finished_at)"
        " SELECT %(run)s, n, 'key-' || n, '{}', 'failed', 'builtins.ValueError',"
        " jsonb_build_object('message', repeat('x', 100)), now(), now()"
        " FROM generate_series(0, %(last)s) n",
        {"run": run_id, "last": MANY - 1},
    )
    conn.execute("UPDATE fanout_runs SET staged = %s, fence = 1 WHERE id = %s", [MANY, run_id])
    driver.seal(run_id, 1)
    return run_id, measured


def calls(run_id: int, count: int) -> list[store.Call[Any]]:
    middle = count // 2
    common: dict[str, Any] = {"search": None, "after": middle, "limit": 50}
    return [
        store.item_list(run_id, status=None, until=count, **common),
        store.item_list(run_id, status="pending", until=middle + 500, **common),
        store.slots(run_id, 100),
        store.pace(run_id, last=count - 1, stride=max(count // 100, 1)),
    ]


@pytest.mark.slow
def test_plans_hold_in_a_large_run(large: tuple[int, Measured]) -> None:
    """F06: what is read follows what is shown, not the size of the run."""
    run_id, measured = large
    page, window, slots, pace = (measured(call)[1] for call in calls(run_id, MANY))
    assert page < 300
    assert window < 1000  # 500 positions are looked at
    assert slots < 200
    assert pace < 800  # 100 items, one by one


async def test_sample_of_the_pace(app: procrastinate.App, conn: Any) -> None:
    """A sample stands for all: the counts add up to about the total."""

    @fanout_child(app, max_attempts=1)
    async def child(item: int) -> int:
        if item % 2:
            raise PermanentError("odd")
        return item

    async with opened(app):
        run = await child.map_async(range(20))
        source = reading.Reading(FanOut.of(app))
        before = await source.figures(run, await run.progress_async())
        assert (before.pace, before.groups) == (None, [])
        await work_off(app, run)
        conn.execute(
            "UPDATE fanout_items SET finished_at = r.started_at + position * interval '3 seconds'"
            " FROM fanout_runs r WHERE r.id = run_id"
        )
        progress = await run.progress_async()
        figures = await source.figures(run, progress)
        assert figures.pace is not None
        assert (sum(figures.pace.ended), sum(figures.pace.failed)) == (20, 10)
        assert figures.pace.ended[0] == 1 and figures.pace.ended[-1] == 1
        assert figures.pace.seconds == pytest.approx(57 / 60)
        assert [group.count for group in figures.groups] == [10]


async def test_figures_are_read_once_for_all_readers(
    app: procrastinate.App, monkeypatch: pytest.MonkeyPatch
) -> None:
    @fanout_child(app, max_attempts=1)
    async def child(item: int) -> int:
        raise PermanentError("no")

    async with opened(app):
        run = await child.map_async([1])
        source = reading.Reading(FanOut.of(app))
        await source.figures(run, await run.progress_async())
        (closed,) = await work_off(app, run)
        last = await source.figures(run, closed)
        assert len(last.groups) == 1  # the last state is never an old one
        assert await source.figures(run, closed) is last
        monkeypatch.setattr(reading, "_FIGURES_KEPT", 1)
        other = await child.map_async([1, 2])
        progress = await other.progress_async()
        first = await source.figures(other, progress)
        assert set(source._figures) == {other.id}
        moved = models.Progress.from_json(progress.as_dict() | {"succeeded": 1})
        assert await source.figures(other, moved) is first
        monkeypatch.setattr(reading, "_FIGURES_SECONDS", 0.0)
        assert await source.figures(other, moved) is not first


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, ""),
        (-1, "0.0 s"),
        (0.42, "0.4 s"),
        (59.6, "1 min 00 s"),
        (3723, "1 h 02 min"),
        (90000, "1 d 01 h"),
    ],
)
def test_durations(seconds: float | None, text: str) -> None:
    assert words.duration(seconds) == text


async def test_run_that_never_had_items_is_not_all_done(app: procrastinate.App) -> None:
    @fanout_child(app)
    async def child(item: int) -> int:
        return item

    @fanout_manager(app, child=child, max_attempts=1)
    def broken() -> list[int]:
        raise PermanentError("no such folder")

    transport = httpx.ASGITransport(web.create_app(app))
    async with (
        opened(app),
        httpx.AsyncClient(transport=transport, base_url="http://localhost") as client,
    ):
        failed, empty = await broken.defer_async(), await child.map_async([])
        async with working(app):
            await finished(failed)
            await finished(empty)
        page = (await client.get(f"/runs/{failed.id}")).text
        assert "<small>%</small>" not in page and 'data-percent=""' in page
        assert "being listed" not in page
        page = (await client.get(f"/runs/{empty.id}")).text
        assert "100<small>%</small>" in page and "0 of 0 items" in page


def test_long_json_is_cut() -> None:
    shown = words.pretty("x" * 200_000)
    assert len(shown) < 100_100 and shown.endswith("more characters")


def test_dotted_names_are_escaped() -> None:
    assert words.dotted("a.<b>") == "a.<wbr>&lt;b&gt;"
