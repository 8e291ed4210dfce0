"""A worker that is asked to stop, as each deployment does."""

import signal
import time

import pytest

from fanout_procrastinate import Run
from tests.acceptance.scene import Scene
from tests.apps.scripted import Step
from tests.waiting import wait_until

pytestmark = pytest.mark.acceptance


def _assert_charged_nothing(scene: Scene, run: Run) -> None:
    items = scene.items(run).values()
    assert {(row["failures"], row["crashes"]) for row in items} == {(0, 0)}


def test_a_stopping_worker_ends_its_items_and_takes_no_more(scene: Scene) -> None:
    """C11, invariant 2: SIGTERM; running items end, slots pull no more, another worker goes on."""
    stopped, other = scene.worker(), scene.worker()
    run = scene.steps(Step(name=str(number), sleep=0.5) for number in range(40))
    wait_until(lambda: len({line["pid"] for line in scene.log.read("end", run=run.id)}) == 2)
    stopped.kill(signal.SIGTERM)
    told = time.time()
    assert stopped.wait() == 0
    assert other.is_running()
    run.wait(timeout=20)
    scene.assert_closed_once(run, succeeded=40)
    _assert_charged_nothing(scene, run)
    assert set(scene.starts(run).values()) == {1}
    # An answer that was on its way may still have brought an item; nobody asked for more.
    begun = [line["at"] - told for line in scene.log.read("start", pid=stopped.pid)]
    assert max(begun) < 1.0
    assert len(scene.log.read("end", pid=other.pid)) > 20
    assert len(scene.log.read("end", pid=stopped.pid)) < 20


def test_items_beyond_the_grace_are_given_back_at_no_charge(scene: Scene) -> None:
    """C11, D02, invariants 2 and 5: the grace ends before the items, in the loop and in threads."""
    stopped = scene.worker(concurrency=8, arguments=["--shutdown-graceful-timeout=0.3"], lease=30)
    steps = [Step(name=str(number), sleep=2.5) for number in range(4)]
    runs = [scene.steps(steps), scene.steps_in_threads(steps)]
    for run in runs:
        scene.wait_started(run, 4)
    scene.worker(concurrency=8, lease=30)
    stopped.kill(signal.SIGTERM)
    assert stopped.wait() == 0
    for run in runs:
        run.wait(timeout=15)
        scene.assert_closed_once(run, succeeded=4)
        _assert_charged_nothing(scene, run)
        assert set(scene.starts(run).values()) == {2}
        assert [item.attempts for item in run.items()] == [1] * 4
