"""How runs close: exactly once, at the right moment, whoever comes last."""

import statistics
from collections import Counter, defaultdict
from typing import Any

import pytest

from fanout_procrastinate import Run
from tests.acceptance.scene import Scene
from tests.apps.scripted import Step
from tests.waiting import wait_until

pytestmark = pytest.mark.acceptance

ROUNDS = 200
CHILDREN = 20


@pytest.mark.timeout(180)
def test_children_that_finish_in_the_same_instant_close_once(scene: Scene) -> None:
    """A04, invariants 1, 2 and 4: 20 children over 4 processes end together, 200 times."""
    for _ in range(4):
        scene.worker(concurrency=6)
    runs: list[Run] = []
    for _ in range(ROUNDS):
        steps = [Step(name=str(number), barrier=CHILDREN) for number in range(CHILDREN)]
        runs.append(scene.steps(steps))
        assert runs[-1].wait(timeout=15).status == "completed"
    wait_until(lambda: len(scene.log.read("told")) >= ROUNDS)
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
    spreads = [max(x["at"] for x in lines) - min(x["at"] for x in lines) for lines in rounds.values()]
    print("spread", statistics.median(spreads), max(spreads), Counter(len({x["pid"] for x in lines}) for lines in rounds.values()))
    assert statistics.median(spreads) < 0.02
    assert statistics.median(len({line["pid"] for line in lines}) for lines in rounds.values()) == 4
