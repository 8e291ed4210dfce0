"""What the runs of a round consist of, and what must become of each of their items."""

import dataclasses
import itertools
import random
from collections.abc import Iterator
from typing import Literal

import pydantic

Deed = Literal[
    "ok", "slow", "blocks", "dirty", "transient", "exhausted", "permanent", "exits", "poison",
    "dies once", "overtime",
]  # fmt: skip
Listing = Literal["light", "threads", "apart", "hurried", "intolerant"]
Stumble = Literal["", "raises", "dies"]

MAX_ATTEMPTS = 3
MAX_CRASHES = 3
TIME_LIMIT_SECONDS = 2.0
"""Of children of the listing ``hurried``."""
TOLERATED = 2
"""Failed items of a run of the listing ``intolerant``."""

_COMMON: dict[Deed, int] = {
    "ok": 200, "slow": 10, "dirty": 5, "transient": 20, "exhausted": 5, "permanent": 8, "exits": 2,
}  # fmt: skip


class Piece(pydantic.BaseModel):
    """One item: what its child does, and for how many seconds before that."""

    name: str
    deed: Deed = "ok"
    seconds: float = 0.0
    times: int = 0
    """How many tries raise a transient error before one succeeds."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
    """One run of a round; `seed` makes its pieces."""

    number: int
    listing: Listing
    count: int
    seed: str
    stumble: Stumble = ""
    """What the manager does in the middle of its first listing."""
    max_in_flight: int = 20


def specs(seed: int) -> Iterator[Spec]:
    """Return the runs of a round, without end, in the order in which they are started."""
    dice = random.Random(f"{seed}:runs")
    kinds: list[Listing] = []
    for number in itertools.count(1):
        if not kinds:
            kinds = ["light", "threads", "light", "threads", "apart", "hurried", "intolerant"]
            dice.shuffle(kinds)
        yield Spec(
            number=number,
            listing=kinds.pop(),
            count=dice.choice([0, 1, 20, 50, 100, 100, 200, 400]),
            seed=f"{seed}:run {number}",
            stumble=dice.choice(["", "", "raises", "dies"]),
            max_in_flight=dice.choice([4, 10, 20, 40]),
        )


def pieces(listing: Listing, count: int, seed: str) -> list[Piece]:
    """Return the items of a run."""
    dice = random.Random(seed)
    deeds = [_deed(listing, dice) for _ in range(count)]
    if listing in ("light", "threads", "apart") and count >= 20 and dice.random() < 0.3:
        deeds[dice.randrange(count)] = dice.choice(["poison", "dies once"])
    if listing == "light" and count >= 20 and dice.random() < 0.5:
        deeds[dice.randrange(count)] = "blocks"
    return [
        Piece(
            name=f"piece {number}",
            deed=deed,
            seconds=round(_seconds(deed, dice), 3),
            times=dice.randint(1, MAX_ATTEMPTS - 1) if deed == "transient" else 0,
        )
        for number, deed in enumerate(deeds)
    ]


def _deed(listing: Listing, dice: random.Random) -> Deed:
    if listing == "hurried":
        return dice.choices(["ok", "overtime"], [15, 1])[0]
    if listing == "intolerant":
        return dice.choices(["ok", "permanent"], [12, 1])[0]
    return dice.choices(list(_COMMON), list(_COMMON.values()))[0]


def _seconds(deed: Deed, dice: random.Random) -> float:
    if deed == "slow":
        return dice.uniform(1.0, 4.0)
    return dice.choice([0.0, dice.uniform(0.0, 0.2)])
