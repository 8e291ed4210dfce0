"""What a round has left behind: rows, histories and journal, read once for the judges."""

import dataclasses
import datetime
import itertools
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from tests.chaos.crew import Life
from tests.chaos.faults import Span
from tests.chaos.pieces import Spec
from tests.chaos.stage import Row, Stage

Place = tuple[int, int]
"""An item: its run and its position."""

FINAL = ("succeeded", "failed", "cancelled")

_ITEMS = """
SELECT i.run_id, i.position, i.claim, i.failures, i.crashes, i.result, i.error, i.error_type,
    i.payload, i.sanitised, i.status AS stored,
    CASE WHEN i.status = 'pending' AND l.stopped THEN 'cancelled' ELSE i.status END AS status
FROM fanout_items i JOIN fanout_runs r ON r.id = i.run_id
LEFT JOIN fanout_ledgers l
    ON l.run_id = i.run_id AND l.ledger = i.position %% nullif(r.ledgers, 0)
WHERE r.sealed_at IS NOT NULL
ORDER BY i.run_id, i.position
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """One round, after its end.

    `specs` are the runs that were started, `cancelled` those that an operator cancelled; `lines`
    is the journal, `lives` are those of the workers, `spans` the faults; the rest are rows of the
    tables and of the histories that triggers wrote.
    """

    lease: float
    specs: Mapping[int, Spec]
    cancelled: frozenset[int]
    lines: Sequence[Mapping[str, Any]]
    lives: Sequence[Life]
    spans: Sequence[Span]
    runs: Sequence[Row]
    items: Sequence[Row]
    callbacks: Sequence[Row]
    item_changes: Sequence[Row]
    run_changes: Sequence[Row]
    callback_changes: Sequence[Row]

    @classmethod
    def read(cls, stage: Stage, **known: Any) -> "Record":
        """Read the tables, and add what is known."""
        return cls(
            runs=stage.query("SELECT * FROM fanout_runs ORDER BY id"),
            items=stage.query(_ITEMS),
            callbacks=stage.query("SELECT * FROM fanout_callbacks ORDER BY 1, 2, 3"),
            item_changes=stage.query("SELECT * FROM chaos_items ORDER BY id"),
            run_changes=stage.query("SELECT * FROM chaos_runs ORDER BY id"),
            callback_changes=stage.query("SELECT * FROM chaos_callbacks ORDER BY id"),
            **known,
        )

    def events(self, name: str) -> list[Mapping[str, Any]]:
        """Return the journal's lines of one kind."""
        return [line for line in self.lines if line["event"] == name]

    def ends(self) -> Mapping[Place, Mapping[str, Mapping[str, Any]]]:
        """Return the ends in the journal, by item and by the mark of the try."""
        found: dict[Place, dict[str, Mapping[str, Any]]] = defaultdict(dict)
        for line in self.events("end"):
            found[line["run"], line["position"]][line["mark"]] = line
        return found

    def rescues(self) -> list[Row]:
        """Return the changes by which an item was charged a crash."""
        return [row for row in self.item_changes if row["crashes"] > row["was_crashes"]]

    def holders(self) -> Mapping[tuple[int, int, int], Life]:
        """Return the worker that each claim was handed to, by item and claim."""
        lives = {life.name: life for life in self.lives}
        return {
            (row["run_id"], row["position"], row["claim"]): lives[row["by"]]
            for row in self.item_changes
            if row["status"] == "processing" and row["by"] in lives
        }

    def rescues_from_the_well(self) -> list[Row]:
        """Return those from a worker that had neither died nor been stopped."""
        holders = self.holders()
        found = []
        for row in self.rescues():
            holder = holders.get((row["run_id"], row["position"], row["claim"] - 1))
            at = row["at"].timestamp()
            if holder is not None and holder.well_at(at):
                # What it could not give back was lost to the faults before its own end.
                found.append(row | {"held_until": min(at, holder.ended or at)})
        return found

    def figures(self) -> Counter[str]:
        """Return how much was done."""
        states: Counter[str] = Counter(row["status"] for row in self.items)
        return Counter(
            runs=len(self.runs),
            generations=sum(row["generation"] for row in self.runs),
            items=len(self.items),
            attempts=len(self.events("start")),
            rescues=len(self.rescues()),
            rescues_from_the_well=len(self.rescues_from_the_well()),
            listings=len(self.events("listing")),
            callbacks=len(self.events("called")),
            **states,
        )

    def longest_stall(self) -> float:
        """Return the longest time, in seconds, in which no item became final."""
        times = [row["at"] for row in self.item_changes if row["status"] in FINAL]
        gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
        return max(gaps, default=datetime.timedelta()).total_seconds()
