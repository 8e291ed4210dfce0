"""Many items: the cost of each does not depend on how many there are."""

import time

import pytest

from tests.acceptance.scene import Scene
from tests.apps import scripted
from tests.apps.scripted import Step
from tests.waiting import wait_until

pytestmark = [pytest.mark.acceptance, pytest.mark.measured]

MANY = 100_000
MAX_GROWTH_BYTES = 60 * 2**20
MAX_ARGS_BYTES = 300


@pytest.mark.slow
@pytest.mark.pg18_only  # a matter of this side of the wire
@pytest.mark.timeout(400)
def test_a_hundred_thousand_items(scene: Scene) -> None:
    """A17, B07, invariants 1 and 2: flat memory in the manager, small jobs, everything counted."""
    for _ in range(2):
        scene.worker(concurrency=20, chunk=2000, lease=30)
    run = scripted.records.defer(count=MANY)
    started = time.monotonic()
    wait_until(lambda: run.progress().total == MANY, 120)
    sealed = time.monotonic()
    run.wait(timeout=240)
    closed = time.monotonic()
    (listed,) = scene.log.read("listed")
    print(
        f"staged in {sealed - started:.1f} s, manager grew by {listed['growth'] / 2**20:.1f} MB,"
        f" {MANY / (closed - sealed):.0f} items/s"
    )
    assert listed["growth"] < MAX_GROWTH_BYTES
    progress = run.progress()
    assert (progress.status, progress.total, progress.succeeded) == ("completed", MANY, MANY)
    (counted,) = scene.query(
        "SELECT count(*) AS items, min(claim) AS least, max(claim) AS most,"
        " count(*) FILTER (WHERE result = payload->'number') AS right, max(position) AS last,"
        " min(length(payload::text)) AS payload, max(crashes + failures) AS charged"
        " FROM fanout_items"
    )
    assert counted.pop("payload") > 200
    assert counted == {
        "items": MANY,
        "least": 1,
        "most": 1,
        "right": MANY,
        "last": MANY - 1,
        "charged": 0,
    }
    assert scene.value("SELECT count(*) FROM fanout_closes") == 1
    assert scene.value("SELECT max(length(args::text)) FROM procrastinate_jobs") < MAX_ARGS_BYTES
    assert len(scene.jobs("measure")) < MANY / 100


def test_items_that_wait_for_their_turn_are_left_alone(scene: Scene) -> None:
    """B06, invariant 6: 500 items, one worker, a lease of 1 s, sweeps all the time.

    The last items wait for five leases; no sweep finds anything to do.
    """
    scene.worker(concurrency=5, lease=1.0)
    run = scene.steps(Step(name=str(number), sleep=0.05) for number in range(500))
    scene.wait_done(run, 1)
    sweeps = 0

    def is_closed() -> bool:
        nonlocal sweeps
        assert not scripted.fanout.sweep().done
        sweeps += 1
        last = scene.value(
            "SELECT (status, claim, crashes)::text FROM fanout_items WHERE position = 499"
        )
        assert last in ("(pending,0,0)", "(processing,1,0)", "(succeeded,1,0)")
        return run.progress().closed

    wait_until(is_closed, 30)
    assert sweeps > 50
    scene.assert_closed_once(run, succeeded=500)
    assert set(scene.starts(run).values()) == {1}
    items = scene.items(run).values()
    assert {(row["claim"], row["crashes"], row["failures"]) for row in items} == {(1, 0, 0)}
