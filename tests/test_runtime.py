"""What a process holds open for our jobs: opened by a worker's start, closed without harm."""

import asyncio
import itertools
import threading
import time
from typing import Any

import procrastinate
from procrastinate import testing

from fanout_procrastinate import FanOut, fanout_child
from fanout_procrastinate.fanout import SWEEP_TASK
from tests.databases import run_script
from tests.support import counts, finished, opened, serving, unconnected, working
from tests.waiting import wait_until_async


def keepers() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name == "fanout-keeper"]


def declare(app: procrastinate.App) -> Any:
    @fanout_child(app, name="child")
    async def child(item: float) -> float:
        await asyncio.sleep(item)
        return item

    return child


async def test_a_worker_sweeps_from_its_start_to_its_end(app: procrastinate.App) -> None:
    """Whether it has a job of ours or not."""
    declare(app)
    owner = FanOut.of(app)
    async with opened(app):
        async with working(app, queues=["elsewhere"]):
            await wait_until_async(keepers)
            shared = owner.runtime()
            assert len(shared._workers) == 1
        await wait_until_async(lambda: not shared._workers)
        await owner.close_async()
        assert not keepers() and owner.runtime() is not shared


async def test_who_asks_what_is_periodic_and_is_no_worker_sweeps_nothing(
    app: procrastinate.App,
) -> None:
    declare(app)
    blueprint = procrastinate.Blueprint()

    @blueprint.periodic(cron="0 0 * * *")
    @blueprint.task(name="nightly")
    async def nightly(timestamp: int) -> None: ...

    async with opened(app):
        app.add_tasks_from(blueprint, namespace="other")
        assert len(app.periodic_registry.periodic_tasks) == 2
        assert not FanOut.of(app)._runtimes and not keepers()


async def test_closing_does_not_block_the_loop(app: procrastinate.App) -> None:
    child = declare(app)
    owner = FanOut.of(app)
    async with serving(app):
        await finished(await child.map_async([0.0]))
        stop = owner.runtime().keeper.stop

        def slow() -> None:
            time.sleep(0.5)
            stop()

        owner.runtime().keeper.stop = slow  # type: ignore[method-assign]
        closing = asyncio.create_task(owner.close_async())
        times = [time.monotonic()]
        while not closing.done():
            await asyncio.sleep(0.01)
            times.append(time.monotonic())
        assert times[-1] - times[0] > 0.5
        assert max(b - a for a, b in itertools.pairwise(times)) < 0.3
        # A worker that is still there goes on.
        assert counts(await finished(await child.map_async([0.0]))) == {"succeeded": 1, "total": 1}


_CLOSED_BY_HAND = """
import asyncio, threading, time
import procrastinate
from fanout_procrastinate import FanOut, fanout_child

app = procrastinate.App(connector=procrastinate.PsycopgConnector())
owner = FanOut(app, lease=1.0, sweep_cron="0 0 1 1 *")
begun = []

@fanout_child(app, name="child")
async def child(item: float) -> float:
    begun.append(item)
    await asyncio.sleep(60)
    return item

async def left():
    await app.open_async()
    asyncio.create_task(app.run_worker_async(install_signal_handlers=False))
    await child.map_async([1])
    while not begun:
        await asyncio.sleep(0.01)

loop = asyncio.new_event_loop()
loop.run_until_complete(left())
loop.close()
ends = time.monotonic() + 5
while any(one.name == "fanout-keeper" for one in threading.enumerate()):
    assert time.monotonic() < ends, "its items are renewed still"
    time.sleep(0.01)
assert not owner._runtimes
"""


async def test_what_a_loop_held_that_was_closed_by_hand_is_let_go(
    app: procrastinate.App, dsn: str
) -> None:
    """Nobody can end its items: they are not renewed, and another worker takes them over."""
    FanOut(app, lease=1.0, sweep_cron="0 0 1 1 *")

    @fanout_child(app, name="child")
    async def child(item: float) -> float:
        return item

    await asyncio.to_thread(run_script, _CLOSED_BY_HAND, dsn)
    async with serving(app):
        (run,) = await FanOut.of(app).runs_async()
        await (await FanOut.of(app).get_run_async(run.run_id)).wait_async(timeout=10)
        (item,) = [one async for one in (await FanOut.of(app).get_run_async(1)).items()]
        assert (item.status, item.attempts, item.crashes) == ("succeeded", 1, 1)


def test_a_copy_of_an_app_has_its_settings() -> None:
    app = unconnected()
    owner = FanOut(app, lease=7.0, time_slice=3.0)
    declare(app)
    copy = app.with_connector(procrastinate.PsycopgConnector())
    assert FanOut.of(copy) is not owner
    assert FanOut.of(copy) is FanOut.of(copy)
    assert FanOut.of(copy).settings == owner.settings


async def test_without_a_database_the_sweep_is_no_failure() -> None:
    """The tests of an app with other tasks run its jobs in memory."""
    memory = testing.InMemoryConnector()
    app = procrastinate.App(connector=memory)
    declare(app)
    async with app.open_async():
        for one in app.periodic_registry.periodic_tasks.values():
            await one.task.configure(queue="default").defer_async(timestamp=1)
        await app.run_worker_async(wait=False, install_signal_handlers=False)
    swept = [job for job in memory.jobs.values() if job["task_name"] == SWEEP_TASK]
    assert swept and {job["status"] for job in swept} == {"succeeded"}
    assert not keepers()
