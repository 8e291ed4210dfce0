"""Transient errors and what comes due: counted at every moment, served in time."""

from typing import Any

import pytest

from fanout_procrastinate import Run
from tests.acceptance.scene import Scene
from tests.apps import scripted
from tests.apps.scripted import Step
from tests.waiting import wait_until

pytestmark = pytest.mark.acceptance

TRIES = 3
FINAL = ("succeeded", "failed", "cancelled")
POLL_SECONDS = 5.0
"""The host announces no scheduled job when it falls due."""


def test_counts_are_right_at_every_moment(scene: Scene) -> None:
    """Invariant 1: every item retried twice, one exhausted; never early, never more than total."""
    items = 40
    steps = [Step(name=str(number), sleep=0.02, fails=2) for number in range(items - 1)]
    run = scene.steps([*steps, Step(name="exhausted", fails=TRIES)])
    for _ in range(2):
        scene.worker(concurrency=6, ready=False)
    seen = _watch(scene, run.id)
    assert len(seen) > 100
    sealed = [progress for progress in seen if progress["total"] is not None]
    for progress in sealed:
        assert progress["total"] == items
        assert sum(progress[name] for name in ("pending", "processing", *FINAL)) == items
        assert progress["waiting"] <= progress["pending"]
        done = sum(progress[name] for name in FINAL)
        assert (progress["status"] == "completed") == (done == items)
    for name in FINAL:
        counts = [progress[name] for progress in seen]
        assert counts == sorted(counts), f"{name} went back"
    scene.assert_closed_once(run, succeeded=items - 1, failed=1)
    assert set(scene.starts(run).values()) == {TRIES}
    assert {row["crashes"] for row in scene.items(run).values()} == {0}
    assert [item.attempts for item in run.items()] == [TRIES] * items


def _watch(scene: Scene, run_id: int) -> list[dict[str, Any]]:
    """Read the progress again and again until the run is closed."""
    seen: list[dict[str, Any]] = []

    def is_closed() -> bool:
        for _ in range(20):
            seen.append(scene.value("SELECT fanout_progress_v1(%(run)s)", run=run_id))
        return seen[-1]["status"] == "completed"

    wait_until(is_closed, 30)
    return seen


def test_waiting_for_a_retry_is_not_finished(scene: Scene) -> None:
    """A16: released items are pending until they run again; the run stays open for them."""
    steps = [Step(name=str(n), fails=2 if n in (2, 4) else 0, retry_in=1.2) for n in range(1, 6)]
    scene.worker()
    run = scene.steps(steps)
    for failures in (1, 2):
        wait_until(lambda: _is_between_tries(scene, run, failures))  # noqa: B023 - called here
        progress = run.progress()
        assert (progress.status, progress.done, progress.processing) == ("processing", 3, 0)
        items = scene.items(run)
        assert [items[name]["status"] for name in "12345"] == [
            "succeeded",
            "pending",
            "succeeded",
            "pending",
            "succeeded",
        ]
    run.wait(timeout=10)
    scene.assert_closed_once(run, succeeded=5)
    assert [item.attempts for item in run.items()] == [1, TRIES, 1, TRIES, 1]
    assert len(scene.jobs("closed")) == 1


def _is_between_tries(scene: Scene, run: Run, failures: int) -> bool:
    failed = [row["failures"] for row in scene.items(run).values()]
    progress = run.progress()
    return failed.count(failures) == progress.waiting == 2 and progress.done == 3


def test_what_is_due_soon_does_not_wait_for_what_is_due_later(scene: Scene) -> None:
    """Invariant 3: a retry due in 3 s, and one due in 12 s, beside one due in an hour.

    No sweep helps: the slots alone must be dealt right.
    """
    scene.worker(concurrency=4, lease=300, sweep=scripted.NEVER)
    runs = {
        (wait, limit): scene.steps(
            [
                Step(name="later", fails=1, retry_in=3600),
                Step(name="soon", fails=1, retry_in=wait),
            ],
            max_in_flight=limit,
        )
        for wait in (3, 12)
        for limit in (1, 2)
    }
    for (wait, limit), run in runs.items():
        scene.wait_done(run, 1, timeout=wait + POLL_SECONDS + 5)
        first, second = scene.log.read("start", run=run.id, item="soon")
        late = second["at"] - first["at"] - wait
        assert 0 <= late < POLL_SECONDS + 1.5, f"in {wait} s, {limit} in flight: {late} s late"
        if wait < 10:
            assert late < 2.0, "an active slot waits for what is due within 10 s"
        run.cancel()
        scene.assert_closed_once(run, status="cancelled", succeeded=1, cancelled=1)


def test_a_crashed_item_does_not_wait_for_what_is_due_later(scene: Scene) -> None:
    """Invariants 3 and 5: a crashed item is due now, beside a retry due in an hour."""
    steps = [Step(name="later", fails=1, retry_in=3600), Step(name="crash", exits=1, sleep=0.3)]
    one, two = scene.worker(), scene.worker()
    run = scene.steps(steps, max_in_flight=1)
    scene.wait_done(run, 1)
    assert [one.is_running(), two.is_running()].count(True) == 1
    first, second = scene.log.read("start", run=run.id, item="crash")
    lease = scripted.LEASE_SECONDS
    assert second["at"] - first["at"] < lease + lease / 2 + lease / 3 + 2.0
    run.cancel()
    scene.assert_closed_once(run, status="cancelled", succeeded=1, cancelled=1)
    assert scene.items(run)["crash"]["crashes"] == 1
