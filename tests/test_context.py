"""What a child is told about its item, and whether it is still its own."""

import asyncio
import decimal
import fractions
import logging
import re
from typing import Any

import procrastinate
import psycopg
import pytest

from fanout_procrastinate import FanOut, ItemContext, fanout_child, fanout_manager
from tests.support import QUICK, counts, finished, serving
from tests.waiting import wait_until, wait_until_async

Conn = psycopg.Connection[dict[str, Any]]


def context() -> ItemContext:
    return ItemContext(run_id=7, position=3, key="k", attempt=2, run_args={"folder": "papers"})


async def test_without_a_database() -> None:
    """As a test of a child of the user's makes it."""
    one = context()
    assert (one.run_id, one.position, one.key, one.attempt) == (7, 3, "k", 2)
    assert one.run_args == {"folder": "papers"}
    assert one.still_mine() and await one.still_mine_async() and not one.should_stop()


@pytest.mark.parametrize("fraction", ["0.5", None, 1.1, -0.1, float("nan"), 1j])
async def test_progress_that_is_no_fraction(fraction: Any) -> None:
    one, words = (
        context(),
        rf"^progress\({re.escape(repr(fraction))}\): give a fraction from 0 to 1$",
    )
    with pytest.raises(ValueError, match=words):
        one.progress(fraction)
    with pytest.raises(ValueError, match=words):
        await one.progress_async(fraction)
    for good in (0, 0.5, True, fractions.Fraction(1, 3), decimal.Decimal(1)):
        one.progress(good)  # type: ignore[arg-type]


async def test_log_lines_carry_the_ids(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    one = context()
    one.log("page read", page=4)
    await one.log_async("done")
    first, second = caplog.records
    assert (first.message, second.message) == ("page read", "done")
    shown = {name: vars(first)[name] for name in ("action", "run_id", "position", "item_key")}
    assert shown == {"action": "item_log", "run_id": 7, "position": 3, "item_key": "k"}
    assert vars(first)["data"] == {"page": 4}


async def test_children_see_their_item(app: procrastinate.App) -> None:
    seen: list[tuple[Any, ...]] = []

    @fanout_child(app, pass_context=True, backoff=QUICK)
    def child(context: ItemContext, item: int) -> None:
        seen.append((context.position, context.key, context.attempt, dict(context.run_args), item))
        assert context.still_mine() and not context.should_stop()
        if item == 1 and context.attempt == 1:
            raise ConnectionError

    @fanout_manager(app, child=child, item_key=lambda item: f"k{item}")
    def manager(n: int) -> Any:
        return range(n)

    async with serving(app):
        run = await manager.defer_async(n=2)
        assert counts(await finished(run)) == {"succeeded": 2, "total": 2}
    assert sorted(seen) == [
        (0, "k0", 1, {"n": 2}, 0),
        (1, "k1", 1, {"n": 2}, 1),
        (1, "k1", 2, {"n": 2}, 1),
    ]


async def test_child_learns_that_its_item_was_taken_over(
    app: procrastinate.App, conn: Conn
) -> None:
    """C05: the first holder can find out, and what it returns is refused."""
    FanOut(app, lease=1.0)
    holders: list[ItemContext] = []

    @fanout_child(app, pass_context=True)
    def child(context: ItemContext, item: int) -> str:
        holders.append(context)
        if len(holders) > 1:
            return "second"
        assert context.still_mine()
        # What a sweep does once this process was silent for a lease.
        conn.execute("SELECT fanout_rescue_v1(%s, 0)", [context.run_id])
        conn.execute("SELECT fanout_top_up_v1(%s)", [context.run_id])
        assert not context.still_mine()
        wait_until(context.should_stop)
        return "first"

    async with serving(app):
        run = await child.map_async([1])
        assert counts(await finished(run)) == {"succeeded": 1, "total": 1}
        (item,) = [item async for item in run.items()]
    assert (item.result, item.crashes, item.attempts) == ("second", 1, 1)
    assert len(holders) == 2


async def test_child_is_told_to_stop(app: procrastinate.App) -> None:
    FanOut(app, lease=1.0)
    working = asyncio.Event()

    @fanout_child(app, pass_context=True)
    async def child(context: ItemContext, item: int) -> str:
        working.set()
        await wait_until_async(context.should_stop)
        assert await context.still_mine_async()
        return "ended early"

    async with serving(app):
        run = await child.map_async([1])
        await working.wait()
        await run.cancel_async()
        progress = await finished(run)
        assert counts(progress) == {"succeeded": 1, "total": 1}
        assert progress.status == "cancelled"
