"""Hands on the queue: jobs cancelled, deleted, retried, put back while a run needs them."""

import contextlib
import datetime
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from fanout_procrastinate import Run
from tests import invariants
from tests.acceptance.scene import Scene
from tests.apps import handled, scripted
from tests.apps.scripted import Step
from tests.waiting import wait_until

pytestmark = pytest.mark.acceptance

LEASE = scripted.LEASE_SECONDS
QUEUES = f"{handled.QUEUE},{handled.LISTING_QUEUE}"
ROLES = ("manager", "child", "callback")
JOBS = {
    "manager": "SELECT manager_job_id AS id FROM fanout_runs WHERE id = %(run)s",
    "child": "SELECT job_id AS id FROM fanout_slots WHERE run_id = %(run)s ORDER BY slot",
    "callback": "SELECT job_id AS id FROM fanout_callbacks WHERE run_id = %(run)s",
}
UNRELATED = "tests.apps.scripted.unrelated"
TIME_SLICE = 1.1
POLLS = ["--fetch-job-polling-interval=0.2"]


def _jobs(scene: Scene, role: str, run: Run) -> list[int]:
    """Return the jobs that a run has for a role now."""
    return [row["id"] for row in scene.query(JOBS[role], run=run.id)]


def _run(name: str, **args: Any) -> Run:
    return handled.listing.defer(name=name, **args)


def _cancel(scene: Scene, job: int) -> None:
    assert scripted.app.job_manager.cancel_job_by_id(job)


def _cancel_and_delete(scene: Scene, job: int) -> None:
    assert scripted.app.job_manager.cancel_job_by_id(job, delete_job=True)


def _abort(scene: Scene, job: int) -> None:
    assert scripted.app.job_manager.cancel_job_by_id(job, abort=True)


def _delete(scene: Scene, job: int) -> None:
    assert scene.query("DELETE FROM procrastinate_jobs WHERE id = %(job)s RETURNING id", job=job)


def _retry(scene: Scene, job: int) -> None:
    now = datetime.datetime.now(datetime.UTC)
    scripted.app.job_manager.retry_job_by_id(job, now)


Hand = Callable[[Scene, int], None]
ON_QUEUED: dict[str, Hand] = {"cancel": _cancel, "delete": _cancel_and_delete}
ON_RUNNING: dict[str, Hand] = {"abort": _abort, "delete": _delete, "retry": _retry}


def _reached(scene: Scene, role: str, name: str) -> int:
    return len(scene.log.read("reached", role=role, name=name))


def _assert_once(scene: Scene, runs: dict[str, Run], items: Counter[str]) -> None:
    """Assert that each item was done once, each run closed once, each callback ended once."""
    for name, run in runs.items():
        run.wait(timeout=20)
        wait_until(
            lambda: set(run.progress().callbacks.values()) == {"done"},  # noqa: B023 - called here
            20,
            f"the callback of {name} is done",
        )
        scene.assert_closed_once(run, succeeded=items[name])
        rows = scene.items(run).values()
        assert {(row["failures"], row["crashes"]) for row in rows} <= {(0, 0)}
        done = Counter(line["what"] for line in scene.log.read("passed", role="child", name=name))
        assert done == Counter(str(number) for number in range(items[name])), name
        assert len(scene.log.read("passed", role="callback", name=name)) == 1, name


@pytest.mark.parametrize("delete_jobs", ["never", "always"])
def test_hands_on_what_is_at_work(scene: Scene, delete_jobs: str) -> None:
    """A11, A15, invariants 1 to 5: running jobs of each kind aborted, deleted, put back.

    Once with a worker that removes its jobs as they end.
    """
    worker = scene.worker(
        app="handled",
        queues=QUEUES,
        concurrency=40,
        lease=30,  # nobody dies here, however slow the machine is; sweeps come each second
        arguments=[f"--delete-jobs={delete_jobs}", *POLLS],
    )
    cases = {f"{role}-{hand}": (role, hand) for role in ROLES for hand in ON_RUNNING}
    runs = {name: _run(name, held=role) for name, (role, _) in cases.items()}
    at_once = {name: 2 if role == "child" else 1 for name, (role, _) in cases.items()}
    for name, (role, hand) in cases.items():
        wait_until(lambda: _reached(scene, role, name) == at_once[name], 20, name)  # noqa: B023
        jobs = _jobs(scene, role, runs[name])
        assert len(jobs) == at_once[name]
        for job in jobs:
            ON_RUNNING[hand](scene, job)
    # What was aborted is begun again; what was put back is fetched again. Nothing else happens.
    for name, (role, hand) in cases.items():
        again = hand == "abort" or (role, hand) == ("manager", "retry")
        times = at_once[name] * (2 if again else 1)
        wait_until(lambda: _reached(scene, role, name) >= times, 20, name)  # noqa: B023
    wait_until(lambda: not _ours(scene, "todo"), 20, "what was put back is fetched")
    for name, (role, _) in cases.items():
        scene.log.arrive(f"{role}-{name}")
    _assert_once(scene, runs, Counter(dict.fromkeys(runs, 2)))
    for name, (role, hand) in cases.items():
        again = hand == "abort" or (role, hand) == ("manager", "retry")
        assert _reached(scene, role, name) == at_once[name] * (2 if again else 1), name
    assert worker.is_running()
    wait_until(lambda: not _ours(scene, "todo", "doing"), 20, "all jobs have ended")
    if delete_jobs == "always":
        # A sweep that came before the fetch has cancelled what was put back.
        assert {job["status"] for job in _ours(scene)} <= {"cancelled"}
        return

    # Ended jobs put back by hand, after the close; the host refuses a second one with one lock.
    before = _written(scene)
    put_back = 0
    for job in _ours(scene):
        with contextlib.suppress(psycopg.errors.UniqueViolation):
            scene.query(
                "UPDATE procrastinate_jobs SET status = 'todo' WHERE id = %(id)s RETURNING id",
                id=job["id"],
            )
            put_back += 1
    assert put_back > 20
    wait_until(lambda: not _ours(scene, "todo", "doing"), 20, "all have ended again")
    assert _written(scene) == before
    _assert_once(scene, runs, Counter(dict.fromkeys(runs, 2)))


def _ours(scene: Scene, *statuses: str) -> list[dict[str, Any]]:
    """Return the jobs of the handled app, sweeps left out: those with these statuses."""
    rows = scene.query(
        "SELECT id, status FROM procrastinate_jobs WHERE task_name LIKE '%%.handled.%%'"
    )
    return [row for row in rows if not statuses or row["status"] in statuses]


def _written(scene: Scene) -> list[dict[str, Any]]:
    """Return what names each present row of the tables that say what became of a run."""
    return [row for row in invariants.written(scene.conn) if row["name"] != "procrastinate_jobs"]


def test_hands_on_what_is_queued(scene: Scene) -> None:
    """A11, invariants 1 to 5: waiting jobs of managers, children and callbacks taken away."""
    listing = scene.worker(app="handled", queues=handled.LISTING_QUEUE)
    cases = {f"{role}-{hand}": (role, hand) for role in ROLES for hand in ON_QUEUED}
    items = Counter({name: 0 if role == "callback" else 2 for name, (role, _) in cases.items()})
    runs = {
        name: _run(name, count=items[name])
        for name, (role, _) in cases.items()
        if role != "manager"
    }
    for name, run in runs.items():
        wait_until(lambda: _jobs(scene, cases[name][0], run), 20, name)  # noqa: B023
    assert listing.stop() == 0
    runs |= {name: _run(name) for name, (role, _) in cases.items() if role == "manager"}
    for name, (role, hand) in cases.items():
        for job in _jobs(scene, role, runs[name]):
            ON_QUEUED[hand](scene, job)
    assert not _ours(scene, "todo")
    scene.worker(app="handled", queues=QUEUES, concurrency=10, lease=30, arguments=POLLS)
    _assert_once(scene, runs, items)


def test_housekeeping_without_patience(scene: Scene) -> None:
    """A11, invariants 1 to 5: stalled jobs put back every 2 s, ended ones removed each second.

    The host's own tools do it, too soon: living workers look stalled. Of two workers one is killed;
    the other is pruned while it works, and so the host ends it at its next fetch.
    """
    options: dict[str, Any] = {"app": "meddled", "concurrency": 6, "lease": 3.0, "arguments": POLLS}
    killed, pruned = scene.worker(**options), scene.worker(**options)
    steps = [Step(name=str(n), sleep=0.2, fails=n % 20 == 0) for n in range(200)]
    run = scene.steps(steps, max_in_flight=8)
    scene.wait_done(run, 50)
    wait_until(lambda: scene.log.read("stalled", task="tests.apps.scripted.work"), 20)
    killed.kill()
    scene.wait_done(run, 100)
    assert scene.query("SELECT procrastinate_prune_stalled_workers_v1(0)")
    assert pruned.wait(20) != 0
    assert "worker_id_fkey" in pruned.output()
    scene.worker(**options)
    run.wait(timeout=30)
    wait_until(lambda: set(run.progress().callbacks.values()) == {"done"}, 20)
    scene.assert_closed_once(run, succeeded=200)
    items = scene.items(run)
    crashed = {name for name, row in items.items() if row["crashes"]}
    assert {row["crashes"] for row in items.values()} <= {0, 1}
    assert len(crashed) <= 6, "only the killed one's; the pruned one's items ended"
    assert {name for name, row in items.items() if row["failures"]} == {
        step.name for step in steps if step.fails
    }
    times = scene.starts(run)
    assert all(times[s.name] <= 1 + s.fails + (s.name in crashed) for s in steps)
    assert len(scene.log.read("told", run=run.id)) == 1
    # Ended jobs of the run are gone: of some dozens the last ones are left.
    assert len(scene.jobs("work", run)) < 20


@pytest.mark.pg18_only  # the host's retry
def test_a_sibling_that_holds_the_lock_of_a_retry(scene: Scene) -> None:
    """C08: an item is to be tried again while a foreign job holds its slot's queueing lock.

    The host's own retry would be refused, and leave the job `doing` under a living worker.
    """
    worker = scene.worker(concurrency=1, sweep=scripted.NEVER, lease=30, arguments=POLLS)
    step = Step(name="held", barrier=2, sleep=TIME_SLICE, fails=1, retry_in=0.1)
    run = scene.steps([step], max_in_flight=1)
    scene.wait_started(run, 1)
    # A sweep would cancel the sibling. The first is within a second, the next one after 15.
    begun = time.monotonic()
    wait_until(lambda: time.monotonic() > begun + 1.1)
    (job,) = scene.jobs("work", run)
    unrelated = scripted.app.configure_task
    sibling = unrelated(
        UNRELATED, queueing_lock=job["queueing_lock"], schedule_in={"hours": 1}
    ).defer(name="sibling")
    unrelated(UNRELATED, queue=scripted.QUEUE).defer(name="due")  # the slot makes room for it
    scene.log.arrive(f"barrier-{run.id}")
    wait_until(lambda: scene.items(run)["held"]["failures"] == 1, TIME_SLICE + LEASE)
    run.wait(timeout=10)
    scene.assert_closed_once(run, succeeded=1)
    (item,) = run.items()
    assert (item.attempts, item.crashes) == (2, 0)
    assert worker.is_running()
    # The second try came with a job of its own, under another lock.
    first, second = scene.jobs("work", run)
    assert first["id"] == job["id"]
    assert second["queueing_lock"] != first["queueing_lock"] == job["queueing_lock"]
    assert {one["attempts"] for one in (first, second)} == {1}, "none was retried by the host"
    (left,) = [one for one in scene.jobs("unrelated") if one["id"] == sibling]
    assert left["status"] == "todo"
