"""The faults of a round: which, when, and how hard; made from the seed before anything starts."""

import dataclasses
import random
from collections.abc import Mapping

WEIGHTS: Mapping[str, int] = {
    # workers
    "kill": 5,
    "zombie": 4,
    "term": 4,
    # the server
    "terminate some": 3,
    "terminate all": 2,
    "restart fast": 2,
    "restart immediate": 1,
    "restart kill": 1,
    "read only": 1,
    "timeouts": 1,
    "serializable": 1,
    "hold locks": 2,
    # the network
    "cut": 3,
    "lose replies": 4,
    "lose requests": 3,
    "swallow": 2,
    "freeze": 2,
    "delay": 2,
    "refuse": 2,
    # hands on the queue
    "delete job": 2,
    "cancel job": 2,
    "abort job": 2,
    "retry job": 2,
    "retry finished": 2,
    "cancel manager": 1,
    "delete callback": 1,
    "retry stalled": 1,
    "remove old jobs": 1,
    "prune workers": 1,
    # operators
    "pause": 2,
    "limit": 2,
    "retry failed": 2,
    "cancel run": 1,
}
_FIRST_SECONDS = 2.0
_GAP_SECONDS = (0.7, 2.3)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault: at `at` seconds into the round, for `leases` leases where it lasts."""

    number: int
    at: float
    kind: str
    leases: float
    seed: str
    """Chooses what is hit among what is there then."""

    @property
    def dice(self) -> random.Random:
        return random.Random(self.seed)


def plan(seed: int, seconds: float) -> list[Fault]:
    """Return the faults of a round in their order. Each kind comes before any comes too often."""
    dice = random.Random(f"{seed}:faults")
    faults: list[Fault] = []
    bag: list[str] = []
    at = _FIRST_SECONDS
    while at < seconds:
        bag = bag or _shuffled(dice)
        faults.append(
            Fault(
                number=len(faults),
                at=round(at, 2),
                kind=bag.pop(),
                leases=round(dice.choice([0.2, 0.5, 1.0, 1.6, 2.5]), 2),
                seed=f"{seed}:fault {len(faults)}",
            )
        )
        at += dice.uniform(*_GAP_SECONDS)
    return faults


def _shuffled(dice: random.Random) -> list[str]:
    """Return a bag of kinds by their weights: one of each on top, the rest below."""
    rest = [kind for kind, weight in WEIGHTS.items() for _ in range(weight - 1)]
    first = list(WEIGHTS)
    dice.shuffle(rest)
    dice.shuffle(first)
    return rest + first
