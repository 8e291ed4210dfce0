"""The item that a slot keeps ready, where how many at once is limited: begun in time, or not."""

import asyncio
import types
from typing import Any

import procrastinate
import psycopg
import pytest

from fanout_procrastinate import DatabaseError, Limit, fanout_child
from fanout_procrastinate import child as child_module
from tests import invariants
from tests.support import counts, finished, serving
from tests.waiting import wait_until_async

Conn = psycopg.Connection[Any]


async def test_one_at_once_also_by_the_times_of_the_items(
    app: procrastinate.App, conn: Conn
) -> None:
    """What is ready has not begun: not by its times, and not in the progress."""
    most = 0

    @fanout_child(app, max_running=1)
    async def work(item: int) -> int:
        await asyncio.sleep(0.02)
        return item

    async with serving(app):
        run = await work.map_async(range(40))
        while not (progress := await run.progress_async()).closed_at:
            most = max(most, progress.processing)
    assert most == 1
    overlapping = conn.execute(
        "SELECT a.position FROM fanout_items a JOIN fanout_items b ON b.run_id = a.run_id"
        " AND b.started_at < a.started_at AND b.finished_at > a.started_at + interval '5 ms'"
    ).fetchall()
    assert not overlapping


async def test_an_abort_ends_what_is_at_work_and_begins_nothing(
    app: procrastinate.App, conn: Conn, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots: list[child_module.Slot] = []
    serve = child_module.Slot.serve

    async def noted(slot: child_module.Slot) -> None:
        slots.append(slot)
        await serve(slot)

    monkeypatch.setattr(child_module.Slot, "serve", noted)
    begun: list[int] = []

    @fanout_child(app, limits=[Limit("svc", concurrency=1)])
    async def work(item: int) -> int:
        begun.append(item)
        await asyncio.sleep(0.02 if item < 10 else 60)
        return item

    async with serving(app):
        run = await work.map_async(range(60))
        await wait_until_async(lambda: len(begun) == 11)
        ready = "SELECT FROM fanout_slots WHERE ready IS NOT NULL"
        await wait_until_async(lambda: conn.execute(ready).fetchall())
        await run.cancel_async(abort=True)
        slots[-1]._told_by(asyncio.get_running_loop())("abort")  # as the keeper does
        progress = await finished(run)
    assert begun == list(range(11))
    assert counts(progress) == {"succeeded": 10, "cancelled": 50, "total": 60}
    invariants.check(conn)


async def test_who_pauses_a_limit_begins_nothing_more(app: procrastinate.App) -> None:
    """A 429: not even the item that is ready."""
    loop = asyncio.get_running_loop()
    limit = Limit("svc", concurrency=1)
    begun: list[tuple[int, float]] = []
    paused: list[float] = []

    @fanout_child(app, limits=[limit])
    async def work(item: int) -> int:
        begun.append((item, loop.time()))
        await asyncio.sleep(0.02)
        if item == 10:
            await limit.pause_async(1.0)
            paused.append(loop.time())
        return item

    async with serving(app):
        await finished(await work.map_async(range(15)))
    assert sorted(item for item, _ in begun) == list(range(15))
    assert not [item for item, at in begun if paused[0] < at < paused[0] + 0.9]


async def test_an_outcome_is_reported_although_giving_back_is_refused(
    app: procrastinate.App, conn: Conn, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refused(*_: Any) -> Any:
        raise DatabaseError("refused", transient=False)

    monkeypatch.setattr(child_module.Slot, "_give_back", refused)

    @fanout_child(app, limits=[Limit("svc", concurrency=1)])
    async def work(item: int) -> int:
        await asyncio.sleep(0.02 if item < 10 else 0.5)
        return item

    async with serving(app):
        run = await work.map_async(range(14))
        await wait_until_async(
            lambda: conn.execute(
                "SELECT FROM fanout_items WHERE position = 10 AND status = 'succeeded'"
            ).fetchall()
        )
        await run.cancel_async()
        conn.execute("DELETE FROM fanout_slots")


async def test_a_shutdown_does_not_wait_for_an_answer_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The question is cancelled once the last answer is overdue."""
    monkeypatch.setattr(child_module, "_LAST_ANSWER_SECONDS", 0.05)
    slot: Any = types.SimpleNamespace(cancelled=False)
    question: asyncio.Task[Any] = asyncio.create_task(asyncio.Event().wait())
    waiting = asyncio.create_task(child_module.Slot._settled(slot, question))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(waiting, 5)
    assert slot.cancelled and question.cancelled()
