"""How runs close: exactly once, at the right moment, whoever comes last."""

import os
import statistics
from collections import defaultdict
from typing import Any

import pytest

from fanout_procrastinate import Run
from tests.acceptance.scene import Scene
from tests.apps import scripted
from tests.apps.scripted import Step
from tests.waiting import wait_until

pytestmark = pytest.mark.acceptance

# The second server is asked for fewer.
ROUNDS = 200 if os.environ.get("FANOUT_TEST_PG", "18") == "18" else 50
CHILDREN = 20


@pytest.mark.measured
@pytest.mark.timeout(180)
def test_children_that_finish_in_the_same_instant_close_once(scene: Scene) -> None:
    """A04, invariants 1, 2 and 4: 20 children over 4 processes end together, round after round."""
    for _ in range(4):
        scene.worker(concurrency=6)
    runs: list[Run] = []
    for _ in range(ROUNDS):
        steps = [Step(name=str(number), barrier=CHILDREN) for number in range(CHILDREN)]
        runs.append(scene.steps(steps))
        assert runs[-1].wait(timeout=15).status == "completed"
    wait_until(lambda: len(scene.log.read("told")) >= ROUNDS)
    wait_until(lambda: len(scene.log.read("success")) >= ROUNDS)
    for run in runs:
        scene.assert_closed_once(run, succeeded=CHILDREN)
    assert len(scene.jobs("closed")) == len(scene.log.read("told")) == ROUNDS
    assert len(scene.log.read("success")) == ROUNDS
    assert not scene.jobs("failed")
    _assert_simultaneous(scene.log.read("end"))


def _assert_simultaneous(ends: list[dict[str, Any]]) -> None:
    """Assert that each item was worked on once, and that the ends of a round came together."""
    rounds: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for line in ends:
        rounds[line["run"]].append(line)
    assert all(len({line["item"] for line in lines}) == CHILDREN for lines in rounds.values())
    assert len(ends) == ROUNDS * CHILDREN
    instants = [[line["at"] for line in lines] for lines in rounds.values()]
    spreads = [max(instant) - min(instant) for instant in instants]
    processes = [len({line["pid"] for line in lines}) for lines in rounds.values()]
    print(f"the 20 ends come within {statistics.median(spreads) * 1000:.1f} ms")
    assert statistics.median(spreads) < 0.02
    assert statistics.median(processes) == 4


def test_runs_of_no_item_and_of_one(scene: Scene) -> None:
    """B01, A09: an empty set closes at once and tells so; a set of one is not special."""
    scene.worker()
    empty = scene.steps([])
    fine = scene.steps([Step(name="fine")])
    broken = scene.steps([Step(name="broken", broken=True)])
    late = scene.steps([Step(name="late", fails=2)])
    for run in (empty, fine, broken, late):
        run.wait(timeout=10)
        wait_until(lambda: scene.log.read("told", run=run.id))  # noqa: B023 - called here
    scene.assert_closed_once(empty)
    scene.assert_closed_once(fine, succeeded=1)
    scene.assert_closed_once(broken, failed=1)
    scene.assert_closed_once(late, succeeded=1)
    assert not scene.jobs("work", empty)
    assert [line["total"] for line in scene.log.read("closed", run=empty.id)] == [0]
    assert {line["run"] for line in scene.log.read("success")} == {empty.id, fine.id, late.id}
    (failure,) = scene.log.read("failure")
    assert (failure["run"], failure["errors"]) == (broken.id, ["broken"])
    assert scene.items(late)["late"]["failures"] == 2
    assert empty.progress().percent == 100.0


def test_nothing_is_judged_before_the_seal(scene: Scene) -> None:
    """A05 (b): while the manager pauses before its seal no child runs, and nothing closes.

    Children cannot finish before the seal, unlike in the case: nothing is handed out until then.
    """
    scene.worker()
    run = scripted.stumbling.defer(count=10, stumbles_at=10, how="waits")
    wait_until(lambda: run.progress().pending == 10)
    assert (run.progress().status, run.progress().total) == ("pending", None)
    assert not scene.jobs("work")
    scene.log.arrive("go")
    run.wait(timeout=10)
    scene.assert_closed_once(run, succeeded=10)
    assert set(scene.starts(run).values()) == {1}


def test_an_older_check_in_the_queue_keeps_nothing_open(scene: Scene) -> None:
    """A06, A09: each final state of the last item closes, though an earlier sweep still waits."""
    scripted.app.configure_task(
        "fanout_procrastinate.sweep",
        queue=scripted.QUEUE,
        queueing_lock=f"fanout_sweep:{scripted.QUEUE}",
        schedule_in={"hours": 1},
    ).defer(timestamp=0)
    scene.worker(lease=30)
    first = [Step(name="a"), Step(name="b")]
    fine = scene.steps([*first, Step(name="last", sleep=0.5)])
    broken = scene.steps([*first, Step(name="last", sleep=0.5, broken=True)])
    stopped = scene.steps([*first, Step(name="last", sleep=1.0, fails=1)])
    scene.wait_done(stopped, 2)
    stopped.cancel()
    for run in (fine, broken, stopped):
        run.wait(timeout=10)
        ends = {name: row["finished_at"] for name, row in scene.items(run).items()}
        assert max(ends, key=ends.__getitem__) == "last"
    scene.assert_closed_once(fine, succeeded=3)
    scene.assert_closed_once(broken, succeeded=2, failed=1)
    scene.assert_closed_once(stopped, status="cancelled", succeeded=2, cancelled=1)
    wait_until(lambda: len(scene.log.read("told")) == 3)
    assert len(scene.jobs("closed")) == 3


def test_children_that_start_more_move_only_their_own_run(scene: Scene) -> None:
    """A03: each child defers a job and starts a run of two; ambient variables stay outside."""
    scene.worker()
    outer = scripted.nest.defer(count=4)
    outer.wait(timeout=10)
    nested = [scripted.fanout.get_run(line["run"]) for line in scene.log.read("nested")]
    for run in nested:
        run.wait(timeout=10)
        scene.assert_closed_once(run, succeeded=2)
    scene.assert_closed_once(outer, succeeded=4)
    assert sorted(outer.results()) == sorted(run.id for run in nested)
    wait_until(lambda: len(scene.log.read("unrelated")) == 4)
    assert {line["ambient"] for line in scene.log.read("start")} == {""}
