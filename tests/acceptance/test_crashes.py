"""Workers that die: their runs go on by themselves, and nothing is counted twice."""

import time
from collections import Counter
from typing import Any

import pytest

from fanout_procrastinate import Run
from tests.acceptance.scene import Scene
from tests.apps import scripted
from tests.apps.scripted import Step
from tests.waiting import wait_until

pytestmark = pytest.mark.acceptance

LEASE = scripted.LEASE_SECONDS
RESCUE = LEASE + LEASE / 2 + LEASE / 3
"""Silent for a lease, seen by the next sweep, seen again by the one after it."""
SLACK = 15.0


def _light(count: int, seconds: float = 0.1) -> list[Step]:
    return [Step(name=str(number), sleep=seconds) for number in range(count)]


def _assert_recorded_once(scene: Scene, run: Run, crashed_at_most: int) -> None:
    """Assert that only what a dead worker held was begun again, and once."""
    scene.assert_closed_once(run, succeeded=200)
    items = scene.items(run)
    crashed = {name for name, row in items.items() if row["crashes"]}
    again = {name for name, count in scene.starts(run).items() if count > 1}
    assert 0 < len(crashed) <= crashed_at_most
    assert again <= crashed
    assert {row["crashes"] for row in items.values()} <= {0, 1}
    assert {row["failures"] for row in items.values()} == {0}
    assert len(scene.jobs("closed", run)) == 1


def test_a_killed_worker_does_not_stop_the_run(scene: Scene) -> None:
    """Invariants 1, 2 and 5: kill -9 of one of two workers in the middle of 200 items."""
    victim, _ = scene.worker(concurrency=5), scene.worker(concurrency=5)
    run = scene.steps(_light(200))
    scene.wait_done(run, 60)
    victim.kill()
    killed = time.monotonic()
    run.wait(timeout=LEASE + LEASE / 2 + SLACK)
    print(f"closed {time.monotonic() - killed:.1f} s after the kill")
    _assert_recorded_once(scene, run, crashed_at_most=5)


@pytest.mark.slow
@pytest.mark.pg18_only  # a minute of waiting for the default lease
def test_a_killed_worker_does_not_stop_the_run_with_the_defaults(scene: Scene) -> None:
    """Invariants 1, 2 and 5: the same with a lease of 30 s and a periodic sweep each minute."""
    options: dict[str, Any] = {"concurrency": 10, "lease": 30, "sweep": scripted.EACH_MINUTE}
    victim, _ = scene.worker(**options), scene.worker(**options)
    run = scene.steps(_light(200))
    scene.wait_done(run, 60)
    victim.kill()
    killed = time.monotonic()
    run.wait(timeout=30 + 30 / 2 + SLACK)
    print(f"closed {time.monotonic() - killed:.1f} s after the kill")
    _assert_recorded_once(scene, run, crashed_at_most=10)


def test_a_rescue_needs_no_free_place(scene: Scene) -> None:
    """Invariants 3 and 5: every place of the survivor is taken by items longer than a rescue."""
    long = RESCUE + 5.0
    scene.worker(concurrency=4)
    other = scene.steps([Step(name=str(number), sleep=long) for number in range(4)])
    wait_until(lambda: other.progress().processing == 4)
    begun = time.monotonic()
    victim = scene.worker(concurrency=4)
    run = scene.steps(_light(200, 0.02))
    scene.wait_done(run, 60)
    victim.kill()
    killed = time.monotonic()
    wait_until(lambda: sum(row["crashes"] for row in scene.items(run).values()), RESCUE + 2.0)
    rescued = time.monotonic() - killed
    assert other.progress().processing == 4, "rescued while no place was free"
    run.wait(timeout=LEASE + LEASE / 2 + SLACK)
    print(f"rescued {rescued:.1f} s, closed {time.monotonic() - killed:.1f} s after the kill")
    assert time.monotonic() - begun > long
    _assert_recorded_once(scene, run, crashed_at_most=4)
    scene.assert_closed_once(other, succeeded=4)


@pytest.mark.timeout(180)
def test_an_item_that_kills_its_process_fails_alone(scene: Scene) -> None:
    """C10, invariant 2: 1 poison item among 200, one worker of 20 places started each time."""
    run = scene.steps([*_light(120, 0.02), Step(name="poison", exits=99), *_light(199, 0.02)[120:]])
    worker = scene.worker(concurrency=20)
    deaths = 0
    while not run.progress().closed:
        if not worker.is_running():
            deaths += 1
            worker = scene.worker_again(worker, concurrency=20)
        scene.conn.execute("SELECT pg_sleep(0.05)")
    scene.assert_closed_once(run, succeeded=199, failed=1)
    items = scene.items(run)
    poison = items.pop("poison")
    assert poison["error"]["type"] == "WorkerLost"
    assert (deaths, poison["crashes"], scene.starts(run)["poison"]) == (3, 3, 3)
    assert Counter(row["crashes"] for row in items.values()).keys() <= {0, 1}
    wait_until(lambda: scene.log.read("failure", run=run.id))


def test_a_job_delivered_again_changes_nothing(scene: Scene) -> None:
    """A01, invariant 2: a child job started twice at once, and once more after its end."""
    for _ in range(2):
        scene.worker(concurrency=6, lease=30)
    run = scene.steps([Step(name="quick"), *_light(4, 2.0)], max_in_flight=5)
    wait_until(lambda: run.progress().processing == 4 and run.progress().done == 1)
    active = [row["job_id"] for row in scene.query("SELECT job_id FROM fanout_slots WHERE active")]
    ended = [job["id"] for job in scene.jobs("work", run) if job["id"] not in active]
    assert len(active) == 4
    assert ended
    again = [active[0], *ended]
    scene.query(
        "UPDATE procrastinate_jobs SET status = 'todo' WHERE id = ANY(%(ids)s) RETURNING id",
        ids=again,
    )
    scene.query("SELECT pg_notify('procrastinate_any_queue_v1', '{\"type\": \"job_inserted\"}')")
    wait_until(
        lambda: (
            {job["status"] for job in scene.jobs("work", run) if job["id"] in again}
            == {"succeeded"}
        )
    )
    assert run.progress().done == 1
    run.wait(timeout=10)
    scene.assert_closed_once(run, succeeded=5)
    assert set(scene.starts(run).values()) == {1}
    assert {row["claim"] for row in scene.items(run).values()} == {1}
    assert len(scene.jobs("closed", run)) == 1


def test_a_callback_is_owed_until_it_is_done(scene: Scene) -> None:
    """A07 (b, c), invariant 4: the process dies after the close, before and in the callback."""
    run = scene.steps(_light(3, 0.0), callback="dies")
    worker = scene.worker(concurrency=1)
    assert worker.wait(20) == scripted.KILLED  # (c): in the middle of the callback
    assert run.progress().closed
    assert set(run.progress().callbacks.values()) != {"done"}
    scene.worker(concurrency=1)
    wait_until(lambda: set(run.progress().callbacks.values()) == {"done"}, 20)
    assert [line["generation"] for line in scene.log.read("closed", run=run.id)] == [1, 1]
    assert len(scene.log.read("told", run=run.id)) == 1
    scene.assert_closed_once(run, succeeded=3)


def test_the_last_item_takes_the_process_along_after_the_close(scene: Scene) -> None:
    """A07 (b), invariant 4: dead between the close and the start of its callbacks."""
    for _ in range(3):
        run = scene.steps([Step(name="last", lingers_for_close=True)])
        worker = scene.worker(concurrency=1)
        assert worker.wait(20) == scripted.KILLED
        assert run.progress().closed
        told = scene.log.read("told", run=run.id)
        scene.worker(concurrency=1)
        wait_until(lambda: set(run.progress().callbacks.values()) == {"done"}, 20)  # noqa: B023
        scene.assert_closed_once(run, succeeded=1)
        assert len(scene.log.read("told", run=run.id)) == 1, told


@pytest.mark.parametrize("last", ["broken", "poison", "fine"])
def test_a_final_failure_is_a_completion(scene: Scene, last: str) -> None:
    """A09: a permanent error, an item whose worker dies, two fine ones, each coming last."""
    steps = [
        Step(name="broken", broken=True),
        Step(name="poison", exits=99),
        Step(name="fine"),
        Step(name="fine too"),
    ]
    steps.sort(key=lambda step: step.name == last)
    run = scene.steps(steps, max_in_flight=1)
    worker = scene.worker(concurrency=1)
    while not run.progress().closed:
        if not worker.is_running():
            worker = scene.worker_again(worker, concurrency=1)
        scene.conn.execute("SELECT pg_sleep(0.05)")
    scene.assert_closed_once(run, succeeded=2, failed=2)
    wait_until(lambda: scene.log.read("failure", run=run.id))
    (failure,) = scene.log.read("failure", run=run.id)
    assert len(failure["errors"]) == 2
    assert len(scene.jobs("closed", run)) == 1
