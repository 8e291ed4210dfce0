"""Workers that die: their runs go on by themselves, and nothing is counted twice."""

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import procrastinate
import psycopg
import pytest
from psycopg.rows import dict_row

from fanout_procrastinate import Run
from tests import invariants
from tests.acceptance.scene import Scene
from tests.apps import journal, scripted
from tests.apps.scripted import Step
from tests.databases import Databases
from tests.waiting import wait_until
from tests.workers import Worker

pytestmark = pytest.mark.acceptance

LEASE = scripted.LEASE_SECONDS
RESCUE = LEASE + LEASE / 2 + LEASE / 3
"""Silent for a lease, seen by the next sweep, seen again by the one after it."""
SLACK = 15.0


class Elsewhere(Scene):
    """The stage on a second database, to which the scripted app here is only connected at times."""

    connector: procrastinate.SyncPsycopgConnector


@pytest.fixture
def elsewhere(databases: Databases, template: str, tmp_path: Path) -> Iterator[Elsewhere]:
    name = f"{template}_elsewhere"
    dsn = databases.create(name, template)

    def connect(**options: Any) -> Any:
        options |= {"autocommit": True, "row_factory": dict_row}
        return stack.enter_context(psycopg.connect(dsn, **options))

    def start(app_path: str, **options: Any) -> Worker:
        return stack.enter_context(Worker(dsn, app_path, **options))

    with contextlib.ExitStack() as stack:
        stack.callback(databases.drop, name)
        second = Elsewhere(connect, start, journal.Journal(tmp_path / "elsewhere"))
        second.connector = procrastinate.SyncPsycopgConnector(conninfo=dsn)
        yield second


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
@pytest.mark.timeout(180)
@pytest.mark.pg18_only  # a minute of waiting for the default lease
def test_a_killed_worker_does_not_stop_the_run_with_the_defaults(
    scene: Scene, elsewhere: Elsewhere
) -> None:
    """Invariants 1, 2 and 5, R9: the same with a lease of 30 s and a periodic sweep each minute.

    A worker sweeps from its start on: the lease alone counts. And on a database of its own, so that
    nobody else sweeps: the only worker with 50 items in hand, and a new one started in its place.
    """
    # A worker that misses a notification looks again after 5 s, which is no matter of ours.
    options: dict[str, Any] = {
        "lease": 30,
        "sweep": scripted.EACH_MINUTE,
        "arguments": ["--fetch-job-polling-interval=0.5"],
    }
    victim, _ = (scene.worker(concurrency=10, **options) for _ in range(2))
    only = elsewhere.worker(concurrency=50, **options)
    with scripted.app.replace_connector(elsewhere.connector), scripted.app.open():
        # They wait for one another until the first of them is begun again.
        in_hand = elsewhere.steps(Step(name=str(n), barrier=51) for n in range(50))
    elsewhere.wait_started(in_hand, 50)
    run = scene.steps(_light(200))
    scene.wait_done(run, 60)
    victim.kill()
    only.kill()
    killed, at = time.monotonic(), time.time()
    elsewhere.worker_again(only, concurrency=50, **options)
    run.wait(timeout=30 + SLACK)
    print(f"closed {time.monotonic() - killed:.1f} s after the kill")
    _assert_recorded_once(scene, run, crashed_at_most=10)

    status = "SELECT status FROM fanout_runs WHERE id = %(run)s"
    wait_until(
        lambda: elsewhere.value(status, run=in_hand.id) == "completed",
        30 + SLACK,
        "the one whose only worker was killed is closed",
    )
    again = [line["at"] - at for line in elsewhere.log.read("start") if line["at"] > at]
    print(f"the only worker killed: {again[0]:.1f} s to the first item, {again[-1]:.1f} s to all")
    assert again[0] < 30 + SLACK
    assert len(again) == 50
    items = elsewhere.items(in_hand).values()
    assert Counter((row["status"], row["crashes"], row["failures"]) for row in items) == {
        ("succeeded", 1, 0): 50
    }
    invariants.check(elsewhere.conn, damaged=True)


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
    steps = _light(199, 0.02)
    run = scene.steps([*steps[:120], Step(name="poison", exits=99), *steps[120:]])
    deaths = _restart_until_closed(scene, {"run": run}, lambda _: scene.worker(concurrency=20))
    scene.assert_closed_once(run, succeeded=199, failed=1)
    items = scene.items(run)
    poison = items.pop("poison")
    assert poison["error"]["type"] == "WorkerLost"
    assert (deaths["run"], poison["crashes"], scene.starts(run)["poison"]) == (3, 3, 3)
    assert {row["crashes"] for row in items.values()} <= {0, 1}
    wait_until(lambda: scene.log.read("failure", run=run.id))


def test_a_job_delivered_again_changes_nothing(scene: Scene) -> None:
    """A01, invariant 2: a child job started twice at once, and once more after its end."""
    for _ in range(2):
        scene.worker(concurrency=6, lease=30, arguments=["--fetch-job-polling-interval=0.2"])
    run = scene.steps([Step(name="quick"), *_light(4, 6.0)], max_in_flight=5)
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
    # What owns no slot may be cancelled by a sweep before a worker has it.
    wait_until(
        lambda: (
            {job["status"] for job in scene.jobs("work", run) if job["id"] in again}
            <= {"succeeded", "cancelled"}
        ),
        timeout=30.0,
    )
    run.wait(timeout=30)
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


@pytest.mark.timeout(240)
def test_the_last_item_takes_the_process_along_after_the_close(scene: Scene) -> None:
    """A07 (b), invariant 4: dead between the close and the start of its callbacks, or at it.

    A job that was fetched and never begun is missed when its worker's heartbeat is 30 s old.
    """
    for _ in range(3):
        run = scene.steps([Step(name="last", exits_at_close=True)])
        worker = scene.worker(concurrency=1)
        assert worker.wait(20) == scripted.KILLED
        assert run.progress().closed
        worker = scene.worker(concurrency=1)
        wait_until(lambda: set(run.progress().callbacks.values()) == {"done"}, 60)  # noqa: B023
        scene.assert_closed_once(run, succeeded=1)
        assert len(scene.log.read("told", run=run.id)) == 1
        worker.stop()


def test_a_final_failure_is_a_completion(scene: Scene) -> None:
    """A09: a permanent error, an item whose worker dies, two fine ones; each of them last once."""
    steps = [
        Step(name="broken", broken=True),
        Step(name="poison", exits=99),
        Step(name="fine"),
        Step(name="fine too"),
    ]
    lanes = {
        f"lane{number}": scene.steps(
            sorted(steps, key=lambda step: step.name == last),
            max_in_flight=1,
            queue=f"lane{number}",
        )
        for number, last in enumerate(["broken", "poison", "fine"])
    }
    _restart_until_closed(
        scene, lanes, lambda lane: scene.worker(concurrency=1, queues=f"{lane},{scripted.QUEUE}")
    )
    for run in lanes.values():
        scene.assert_closed_once(run, succeeded=2, failed=2)
        wait_until(lambda: scene.log.read("failure", run=run.id))  # noqa: B023 - called here
        (failure,) = scene.log.read("failure", run=run.id)
        assert len(failure["errors"]) == 2
        assert len(scene.jobs("closed", run)) == 1


def _restart_until_closed(
    scene: Scene, runs: Mapping[str, Run], start: Callable[[str], Worker]
) -> Counter[str]:
    """Start one worker for each run, and another whenever one dies; count the deaths."""
    workers = {name: start(name) for name in runs}
    deaths: Counter[str] = Counter()

    def are_closed() -> bool:
        for name, worker in workers.items():
            if not worker.is_running():
                assert worker.wait() == scripted.KILLED, worker.output()
                deaths[name] += 1
                workers[name] = start(name)
        return all(run.progress().closed for run in runs.values())

    wait_until(are_closed, 120)
    return deaths
