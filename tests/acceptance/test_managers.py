"""Managers that stumble or die: their runs hold each item exactly once, or end with a reason."""

import json

import pytest
from psycopg import Connection as Connected

from fanout_procrastinate import Run
from tests.acceptance.scene import Row, Scene
from tests.apps import scripted
from tests.apps.scripted import Step
from tests.waiting import wait_until

pytestmark = pytest.mark.acceptance

CHUNKS = 4
ITEMS = CHUNKS * scripted.CHUNK_SIZE


def _stumbling(
    count: int, at: int, how: str, *, always: bool = False, queue: str | None = None
) -> Run:
    return scripted.stumbling.configure(queue=queue).defer(
        count=count, stumbles_at=at, how=how, always=always
    )


def _assert_worked_on_once(scene: Scene, run: Run, count: int) -> None:
    scene.assert_closed_once(run, succeeded=count)
    assert [item.position for item in run.items()] == list(range(count))
    assert scene.items(run).keys() == {str(number) for number in range(count)}
    assert set(scene.starts(run).values()) == {1}


def _own_jobs(scene: Scene) -> list[Row]:
    """Return all jobs but the periodic sweeps."""
    return scene.query("SELECT * FROM procrastinate_jobs WHERE task_name NOT LIKE '%%sweep'")


def test_a_killed_manager_is_run_again(scene: Scene) -> None:
    """B03, invariant 2: dead after 0, 1, half and all of 4 chunks; then each item exactly once."""
    size = scripted.CHUNK_SIZE
    runs = {
        f"lane{at}": _stumbling(ITEMS, at, "dies", queue=f"lane{at}")
        for at in (0, size, ITEMS // 2, ITEMS)
    }
    dead = [scene.worker(concurrency=1, queues=lane, ready=False) for lane in runs]
    assert [worker.wait(20) for worker in dead] == [scripted.KILLED] * len(dead)
    staged = [run.progress().pending for run in runs.values()]
    assert staged == [0, size, ITEMS // 2, ITEMS]
    assert not scene.jobs("work")
    scene.worker(concurrency=8, queues=",".join([scripted.QUEUE, *runs]))
    for run in runs.values():
        run.wait(timeout=20)
        _assert_worked_on_once(scene, run, ITEMS)
        assert len(scene.jobs("stumbling", run)) == 2


def test_a_failing_manager_is_run_again(scene: Scene) -> None:
    """B03, B07, A12: it raises after item 4 and after all; for good in chunk 3; each time."""
    after_four = _stumbling(10, 4, "raises")
    after_all = _stumbling(10, 10, "raises")
    for_good = _stumbling(ITEMS, 2 * scripted.CHUNK_SIZE + 5, "gives up")
    always = _stumbling(10, 5, "raises", always=True)
    scene.worker()
    for run in (after_four, after_all):
        run.wait(timeout=10)
        _assert_worked_on_once(scene, run, 10)
    for run in (for_good, always):
        run.wait(timeout=10)
        scene.assert_closed_once(run, status="failed")
        assert "stumbled" in run.progress().reason
        assert not list(run.items())
        assert not scene.jobs("work", run)
    assert len(scene.jobs("stumbling", always)) == 3


def test_nothing_defers_itself_for_ever(scene: Scene) -> None:
    """A12: a manager that always dies and an item that never ends; the queue does not grow."""
    lost = _stumbling(10, 5, "dies", always=True, queue="deadly")
    endless = scripted.endless.map(["never"])
    scene.worker()
    worker = scene.worker(concurrency=1, queues="deadly")
    waiting = []

    def are_closed() -> bool:
        nonlocal worker
        if not worker.is_running():
            worker = scene.worker_again(worker, concurrency=1, queues="deadly")
        waiting.append([job["status"] for job in _own_jobs(scene)])
        return lost.progress().closed and endless.progress().closed

    wait_until(are_closed, 30)
    assert max(one.count("todo") + one.count("doing") for one in waiting) <= 4
    scene.assert_closed_once(lost, status="failed")
    assert "lost 3 times" in lost.progress().reason
    scene.assert_closed_once(endless, failed=1)
    (group,) = endless.errors()
    assert group.error_type == "TimeoutError"
    assert len(_own_jobs(scene)) <= 10


def test_a_run_becomes_visible_with_its_transaction(scene: Scene) -> None:
    """B08: started in a transaction held open for 2 s, with 4 idle places; and rolled back."""
    for _ in range(2):
        scene.worker(concurrency=2)
    own: Connected[object] = scene.connect()
    steps = [Step(name=str(number)).model_dump() for number in range(4)]
    with own.transaction():
        run = scripted.steps.configure(connection=own).defer(steps=steps, callback="")
        own.execute("SELECT pg_sleep(2)")
        assert not scene.log.read()
        assert not scene.query("SELECT id FROM fanout_runs")
    run.wait(timeout=3)
    scene.assert_closed_once(run, succeeded=4)
    listened: Connected[object] = scene.connect()
    listened.execute("LISTEN fanout_v1")
    before = len(
        scene.query("SELECT id FROM procrastinate_jobs WHERE task_name NOT LIKE '%%sweep'")
    )
    with own.transaction(force_rollback=True):
        scripted.steps.configure(connection=own).defer(steps=steps, callback="")
    told = [json.loads(one.payload) for one in listened.notifies(timeout=1.0)]
    assert {event.get("run") for event in told} <= {run.id}, "hints of the first run may be late"
    assert len(scene.query("SELECT id FROM fanout_runs")) == 1
    assert len(_own_jobs(scene)) == before
