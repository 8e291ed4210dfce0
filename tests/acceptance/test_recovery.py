"""How soon a run goes on after its worker died, slept or was replaced; and that nothing is lost."""

import contextlib
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from fanout_procrastinate import Run
from fanout_procrastinate.fanout import SWEEP_TASK
from tests import invariants
from tests.acceptance.scene import Scene
from tests.apps import handled, scripted
from tests.apps.scripted import Step
from tests.waiting import wait_until
from tests.workers import Worker

pytestmark = pytest.mark.acceptance

LEASE = scripted.LEASE_SECONDS
IN_HAND = 50
SOON = 6.0
POLLS = ["--fetch-job-polling-interval=0.2"]
SWEPT = [handled.LISTING_QUEUE, scripted.QUEUE]
SWEEPING: dict[str, Any] = {"app": "handled", "queues": ",".join(SWEPT)}
"""Serves managers and sweeps, and no child job of the handled app."""
CLOCKS = Path(scripted.__file__).parent / "clocks"


def _light(count: int, seconds: float) -> list[Step]:
    return [Step(name=str(number), sleep=seconds) for number in range(count)]


def _assert_untouched(scene: Scene, run: Run) -> None:
    """Assert that each item was begun once, and charged nothing."""
    assert set(scene.starts(run).values()) == {1}
    items = scene.items(run).values()
    assert {(row["claim"], row["failures"], row["crashes"]) for row in items} == {(1, 0, 0)}


# -- deaths


def test_the_only_worker_dies_with_fifty_items_in_hand(scene: Scene) -> None:
    """R9, invariants 2 and 5: kill -9 of the only worker, a new one at once, a lease of 2 s.

    An item of the dead worker starts again within 6 s, and each of them was charged one crash.
    """
    victim = scene.worker(concurrency=IN_HAND, arguments=POLLS)
    # They wait for one another until the first of them is begun again.
    steps = [Step(name=str(number), barrier=IN_HAND + 1) for number in range(IN_HAND)]
    run = scene.steps([*steps, *(Step(name=f"late {n}") for n in range(10))], max_in_flight=IN_HAND)
    scene.wait_started(run, IN_HAND)
    victim.kill()
    killed = time.time()
    scene.worker_again(victim, concurrency=IN_HAND, arguments=POLLS)
    run.wait(timeout=30)
    closed = time.time()
    scene.assert_closed_once(run, succeeded=IN_HAND + 10)
    starts = [line["at"] - killed for line in scene.log.read("start", run=run.id)]
    again = [at for at in starts if at > 0]
    print(f"50 in hand, lease 2 s: {again[0]:.1f} s to the first, {closed - killed:.1f} s to all")
    assert len(again) == IN_HAND + 10
    assert again[0] < SOON
    for name, row in scene.items(run).items():
        crashes = 0 if name.startswith("late") else 1
        assert (row["crashes"], row["failures"], scene.starts(run)[name]) == (
            crashes,
            0,
            1 + crashes,
        )

    # The dead worker's jobs, put back by hand afterwards, find nothing to do.
    failed = [job["id"] for job in scene.jobs("work", run) if job["status"] == "failed"]
    assert len(failed) == IN_HAND
    before = _written(scene)
    for job in failed:
        scene.query("SELECT procrastinate_retry_job_v2(%(job)s, now(), NULL, NULL, NULL)", job=job)
    wait_until(lambda: not _left(scene, failed), 20, "they have ended again")
    assert _written(scene) == before
    scene.assert_closed_once(run, succeeded=IN_HAND + 10)


def _left(scene: Scene, jobs: list[int]) -> list[Any]:
    return scene.query(
        "SELECT id FROM procrastinate_jobs WHERE id = ANY(%(jobs)s) AND status <> 'succeeded'",
        jobs=jobs,
    )


def _written(scene: Scene) -> list[dict[str, Any]]:
    tables = ("fanout_runs", "fanout_ledgers", "fanout_items", "fanout_closes", "fanout_slots")
    return [row for row in invariants.written(scene.conn) if row["name"] in tables]


def test_a_woken_worker_records_nothing_and_pulls_nothing(scene: Scene) -> None:
    """C05, invariant 2: SIGSTOP for longer than a lease, then SIGCONT while another has its items.

    What wakes up learns that its items are not its own, says so, and lets the new holder be.
    """
    sleeper = scene.worker(app="witness", concurrency=8, arguments=POLLS)
    runs = [scene.steps(_light(1, 1.5)), scene.steps_in_threads(_light(2, 1.5))]
    for run, count in zip(runs, (1, 2), strict=True):
        scene.wait_started(run, count)
    sleeper.kill(signal.SIGSTOP)
    slots = scene.query("SELECT epoch, job_id FROM fanout_slots WHERE held IS NOT NULL")
    epochs, jobs = ([slot[name] for slot in slots] for name in ("epoch", "job_id"))
    assert len(epochs) == 3
    other = scene.worker(app="witness", arguments=POLLS)
    held = "SELECT slot FROM fanout_slots WHERE epoch = ANY(%(epochs)s)"
    wait_until(lambda: not scene.query(held, epochs=epochs), 20, "its slots are taken over")
    wait_until(lambda: scene.log.read("start", pid=other.pid), 20, "its items are begun again")
    sleeper.kill(signal.SIGCONT)
    woken = time.time()
    wait_until(lambda: sleeper.output().count("Slot lost") == 3, 10, "it says that it lost them")
    wait_until(
        lambda: [told["mine"] for told in _told(scene, sleeper, runs[1])][:2] == [False] * 2,
        message="its threads learn that their items are not theirs",
    )
    for run, count in zip(runs, (1, 2), strict=True):
        run.wait(timeout=20)
        scene.assert_closed_once(run, succeeded=count)
        assert {(item.attempts, item.crashes) for item in run.items()} == {(1, 1)}
        assert set(scene.starts(run).values()) == {2}
    # Its old slots were handed nothing, and what they sent was refused.
    heard = [line for line in scene.log.read("verdict", pid=sleeper.pid) if line["epoch"] in epochs]
    assert {line["verdict"] for line in heard if line["at"] > woken} <= {"lost"}
    # Each item was recorded by who held it then, and its old job was finished as failed, once.
    ended = scene.query("SELECT status FROM procrastinate_jobs WHERE id = ANY(%(j)s)", j=jobs)
    assert {job["status"] for job in ended} == {"failed"}
    assert sleeper.is_running()
    assert other.is_running()
    assert "lost" not in other.output()


def _told(scene: Scene, worker: Worker, run: Run) -> list[dict[str, Any]]:
    return scene.log.read("mine", pid=worker.pid, run=run.id)


# -- replacement


def test_a_rolling_restart_costs_nothing(scene: Scene) -> None:
    """C11: three workers replaced one after the other under 2,000 items; nothing is done twice.

    About one every 5 s (on the second server: fewer items, one every 2 s). An old one is asked to
    stop when its successor has registered.
    """
    count = 2000 if scene.conn.info.server_version >= 180000 else 800
    workers = [scene.worker() for _ in range(3)]
    run = scene.steps(_light(count, 0.1), max_in_flight=12)
    seconds = []
    for number, old in enumerate(workers):
        known = _registered(scene)
        successor = scene.worker(ready=False)
        wait_until(lambda: _registered(scene) - known, 20, "the successor has registered")  # noqa: B023
        scene.wait_done(run, count * (number + 1) // 4, 60)
        old.kill(signal.SIGTERM)
        told = time.monotonic()
        assert old.wait(10) == 0
        seconds.append(time.monotonic() - told)
        assert successor.is_running()
        assert not run.progress().closed
    run.wait(timeout=30)
    print("a worker ends", [round(one, 2) for one in seconds], "s after SIGTERM")
    scene.assert_closed_once(run, succeeded=count)
    _assert_untouched(scene, run)
    assert {item.attempts for item in run.items()} == {1}
    assert len({line["pid"] for line in scene.log.read("end", run=run.id)}) == 6
    assert len(scene.jobs("closed", run)) == 1


def _registered(scene: Scene) -> set[int]:
    return {row["id"] for row in scene.query("SELECT id FROM procrastinate_workers")}


# -- the sweep itself


@contextlib.contextmanager
def _held(scene: Scene, run: Run) -> Iterator[psycopg.Connection[Any]]:
    """Hold a run's locks meanwhile, as no program of ours ever does."""
    conn = scene.connect()
    with conn.transaction():
        conn.execute("SELECT FROM fanout_ledgers WHERE run_id = %s FOR UPDATE", [run.id])
        yield conn


def _sweeping(scene: Scene) -> list[dict[str, Any]]:
    """Return the sessions in the middle of a sweep of one run."""
    return scene.query(
        "SELECT pid FROM pg_stat_activity WHERE datname = current_database()"
        " AND query LIKE '%%fanout_sweep_run%%' AND wait_event_type = 'Lock'"
    )


def _waiting(scene: Scene, name: str) -> Run:
    """Start a run of three items whose jobs wait: the workers here serve its manager, and sweep."""
    run = handled.listing.defer(name=name, count=3)
    wait_until(lambda: len(_queued(scene, run)) == 3, 20, "it is sealed")
    return run


def _queued(scene: Scene, run: Run) -> list[dict[str, Any]]:
    return [job for job in scene.jobs("handled.work", run) if job["status"] == "todo"]


def _damage(scene: Scene, run: Run) -> None:
    """Take away the waiting jobs of a run's slots."""
    assert scene.query(
        "DELETE FROM procrastinate_jobs WHERE id IN (SELECT job_id FROM fanout_slots"
        " WHERE run_id = %(run)s) RETURNING id",
        run=run.id,
    )


def _assert_goes_on(scene: Scene, *runs: Run) -> None:
    """Assert that the runs have what they need, no more, and close when somebody serves them."""
    for run in runs:
        invariants.check(scene.conn, run.id)
    scene.worker(app="handled", queues=handled.QUEUE, arguments=POLLS)
    for run in runs:
        run.wait(timeout=20)
        scene.assert_closed_once(run, succeeded=3)
        rows = scene.query("SELECT claim FROM fanout_items WHERE run_id = %(run)s", run=run.id)
        assert [row["claim"] for row in rows] == [1] * 3


def test_a_sweep_that_is_killed_keeps_nobody_else_from_sweeping(scene: Scene) -> None:
    """C07, C04: SIGKILL in the middle of a sweep, with two more workers that sweep.

    All other runs are repaired within two intervals; the dead sweep's session waits for no lock
    longer than an eighth of a lease, and its run is repaired next. None is dealt a slot too many.
    """
    victim = scene.worker(**SWEEPING)
    stuck, free = _waiting(scene, "stuck"), _waiting(scene, "free")
    others = [scene.worker(**SWEEPING, ready=False) for _ in range(2)]
    with _held(scene, stuck):
        _damage(scene, stuck)
        (session, *_) = wait_until(lambda: _sweeping(scene), 10, "a sweep waits for the run")
        victim.kill()
        assert victim.wait() == -9
        for other in others:
            other.wait_ready()
        _damage(scene, free)
        damaged = time.monotonic()
        wait_until(lambda: len(_queued(scene, free)) == 3, 20, "another run is repaired")
        print(f"repaired beside a dead sweep: {time.monotonic() - damaged:.1f} s")
        assert time.monotonic() - damaged < 1.0 + 2 * LEASE
        assert not _queued(scene, stuck)
        wait_until(lambda: session not in _sweeping(scene), 10, "the dead session is gone")
    released = time.monotonic()
    wait_until(lambda: len(_queued(scene, stuck)) == 3, 20, "its run is repaired")
    assert time.monotonic() - released < 2 * LEASE
    _assert_goes_on(scene, stuck, free)


@pytest.mark.pg18_only  # the host's periodic tasks
def test_a_stranded_periodic_sweep_is_followed_by_another(scene: Scene) -> None:
    """C07: the periodic sweep died with its worker, and the record of its next turn has no job.

    A worker that starts sweeps without it; and the first turn that has a job sweeps again.
    """
    victim = scene.worker(**SWEEPING)
    run = _waiting(scene, "run")
    victim.kill()
    assert victim.wait() == -9
    scene.query(
        "INSERT INTO procrastinate_jobs (queue_name, task_name, priority, status, queueing_lock,"
        " args) SELECT queue, %(task)s, 0, 'doing', 'fanout_sweep:' || queue,"
        " jsonb_build_object('timestamp', 0) FROM unnest(%(queues)s::text[]) queue RETURNING id",
        task=SWEEP_TASK,
        queues=SWEPT,
    )
    _damage(scene, run)
    successor = scene.worker(**SWEEPING, ready=False)
    turns = scene.query(
        "INSERT INTO procrastinate_periodic_defers (task_name, defer_timestamp, periodic_id)"
        " SELECT %(task)s, floor(extract(epoch FROM now()))::bigint + n, queue"
        " FROM unnest(%(queues)s::text[]) queue, generate_series(-2, 3) n"
        " ON CONFLICT DO NOTHING RETURNING defer_timestamp AS at",
        task=SWEEP_TASK,
        queues=SWEPT,
    )
    last = max(turn["at"] for turn in turns)
    successor.wait_ready()
    ready = time.time()
    wait_until(lambda: len(_queued(scene, run)) == 3, 20, "it is swept")
    assert time.time() - ready < 2.0
    swept = (
        "SELECT FROM procrastinate_jobs WHERE task_name = %(task)s AND status = 'succeeded'"
        " AND (args->>'timestamp')::bigint > %(last)s"
    )
    wait_until(lambda: scene.query(swept, task=SWEEP_TASK, last=last), 20, "its turn sweeps")
    late = time.time() - max(ready, last + 1)
    print(f"swept {late:.1f} s after the first turn with a job")
    assert -0.1 < late < 2.0
    _assert_goes_on(scene, run)


def test_workers_that_never_had_a_job_of_ours_sweep(scene: Scene) -> None:
    """R9: those that hold all places die at once; who started meanwhile had nothing to do yet.

    They sweep from their start on, and do not wait for a turn of the periodic sweep.
    """
    victim = scene.worker(sweep=scripted.NEVER)
    # They wait for one another until the first of them is begun again.
    steps = [Step(name=str(number), barrier=5) for number in range(4)]
    run = scene.steps(steps, max_in_flight=4)
    scene.wait_started(run, 4)
    idle = [scene.worker(sweep=scripted.NEVER) for _ in range(2)]
    victim.kill()
    killed = time.monotonic()
    run.wait(timeout=20)
    print(f"closed {time.monotonic() - killed:.1f} s after all places were lost")
    assert time.monotonic() - killed < SOON
    scene.assert_closed_once(run, succeeded=4)
    assert not scene.jobs("sweep")
    assert {item.crashes for item in run.items()} == {1}
    ended = {line["pid"] for line in scene.log.read("end", run=run.id)}
    assert ended <= {worker.pid for worker in idle}


# -- clocks


def _clocked(scene: Scene, monkeypatch: pytest.MonkeyPatch, clock: str) -> Worker:
    """Start a worker whose clock is wrong."""
    with monkeypatch.context() as patch:
        patch.setenv("FANOUT_TEST_CLOCK", clock)
        patch.setenv("PYTHONPATH", str(CLOCKS))
        queues = f"{handled.QUEUE},{handled.LISTING_QUEUE}"
        return scene.worker(app="handled", queues=queues, arguments=POLLS, ready=False)


@pytest.mark.pg18_only  # each server has one clock
@pytest.mark.parametrize(("clock", "victims"), [("600", "-600"), ("-600", "jumps")])
def test_wrong_clocks_change_nothing(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, clock: str, victims: str
) -> None:
    """C12: a worker ten minutes early beside one ten minutes late, or with a clock that jumps.

    Neither takes the other's items as long as they are renewed, nor much later than a lease.
    """
    survivor, victim = (_clocked(scene, monkeypatch, one) for one in (clock, victims))
    for worker in (survivor, victim):
        worker.wait_ready()
    run = handled.listing.defer(name="run", held="child", count=8)

    def begun() -> list[dict[str, Any]]:
        return scene.log.read("reached", role="child")

    wait_until(lambda: len(begun()) == 8, 20, "all items are at work")
    full = time.monotonic()
    assert Counter(line["pid"] for line in begun()) == {survivor.pid: 4, victim.pid: 4}
    shifts = {line["pid"]: line["at"] - time.time() for line in begun()}
    assert shifts[survivor.pid] * float(clock) > 0, "its clock is wrong indeed"
    assert abs(shifts[victim.pid]) > 300
    wait_until(lambda: time.monotonic() > full + 1.5 * LEASE, 20)
    assert _crashes(scene, run) == {0: 8}, "all are renewed"
    assert len(begun()) == 8

    victim.kill()
    killed = time.monotonic()
    wait_until(lambda: _crashes(scene, run)[1], 20, "an item is taken over")
    seconds = time.monotonic() - killed
    print(f"taken over after {seconds:.1f} s; the clocks are at {clock} and {victims}")
    # Rescued when silent for three quarters of a lease; renewed a quarter before the kill at most.
    assert LEASE / 2 < seconds < SOON
    scene.log.arrive("child-run")
    run.wait(timeout=20)
    scene.assert_closed_once(run, succeeded=8)
    assert _crashes(scene, run) == {0: 4, 1: 4}


def _crashes(scene: Scene, run: Run) -> Counter[int]:
    rows = scene.query("SELECT crashes FROM fanout_items WHERE run_id = %(run)s", run=run.id)
    return Counter(row["crashes"] for row in rows)
