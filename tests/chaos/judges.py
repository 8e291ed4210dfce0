"""What must hold after a round. Each judge reads the record and names what contradicts it."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tests.chaos import pieces
from tests.chaos.record import FINAL, Place, Record
from tests.chaos.stage import Row

Findings = Iterator[str]
Judge = Callable[[Record], Findings]

LOST = "WorkerLost"
_DIED = "ChildProcessDied"


def runs_are_closed(record: Record) -> Findings:
    """Every run is closed, as it may be, with all that its manager lists."""
    found = {row["id"]: row for row in record.runs}
    for run_id, spec in record.specs.items():
        row = found.get(run_id)
        if row is None:
            yield f"run {run_id} is gone"
        elif row["status"] not in _statuses(record, row, spec):
            yield f"run {run_id} ({spec}) is {row['status']}: {row['reason']}"
        elif row["sealed_at"] is not None and row["total"] != spec.count:
            yield f"run {run_id} has {row['total']} items instead of {spec.count}"


def _statuses(record: Record, row: Row, spec: pieces.Spec) -> set[str]:
    allowed = {"completed"}
    failed = sum(item["status"] == "failed" for item in record.items if item["run_id"] == row["id"])
    if spec.listing == "intolerant" and failed > pieces.TOLERATED:
        allowed = {"failed"}
    return allowed | ({"cancelled"} if row["id"] in record.cancelled else set())


def items_are_final(record: Record) -> Findings:
    """Every item of a closed run is final; cancelled only where its run was stopped.

    What a stop cancelled stays so when the failed items alone are retried and the run completes.
    """
    stopped = {row["id"] for row in record.runs if row["status"] != "completed"}
    stopped |= record.cancelled
    for item in record.items:
        if item["status"] not in FINAL:
            yield f"{_named(item)} is {item['status']}"
        elif item["status"] == "cancelled" and item["run_id"] not in stopped:
            yield f"{_named(item)} is cancelled in a run that nobody stopped"


def items_end_once(record: Record) -> Findings:
    """An item that is final stays so, unless somebody retries it; its claims only grow."""
    last: dict[Place, Row] = {}
    for row in record.item_changes:
        place = row["run_id"], row["position"]
        before = last.get(place)
        if row["was"] == "succeeded" or (row["was"] in FINAL and row["status"] != "pending"):
            yield f"{_named(row)} went from {row['was']} to {row['status']}: {row}"
        if before and row["claim"] < before["claim"]:
            yield f"{_named(row)} went back from claim {before['claim']} to {row['claim']}"
        if before and before["status"] != row["was"]:
            yield f"{_named(row)} was {before['status']}, then {row['was']}: {row}"
        last[place] = row


def claims_are_begun_once(record: Record) -> Findings:
    """No hand-out of an item was begun twice."""
    starts = Counter(
        (line["run"], line["position"], line["claim"])
        for line in record.events("start")
        if line["claim"]
    )
    for (run, position, claim), count in starts.items():
        if count > 1:
            yield f"run {run} item {position}: claim {claim} was begun {count} times"


def outcomes_are_of_the_last_try(record: Record) -> Findings:
    """What is stored of an item is what its last try wrote down."""
    ends = record.ends()
    for item in record.items:
        tries = ends.get((item["run_id"], item["position"]), {})
        reason = _disagreement(item, tries)
        if reason:
            yield f"{_named(item)} is {item['status']}, {reason}: {item}; tries {tries}"


def _disagreement(item: Row, tries: Mapping[str, Mapping[str, Any]]) -> str | None:
    if item["status"] not in ("succeeded", "failed"):
        return None
    if item["error_type"] == LOST:
        enough = item["crashes"] >= pieces.MAX_CRASHES
        return None if enough else "lost its worker too few times"
    if item["status"] == "failed" and _end(item) in ("TimeoutError", _DIED):
        return None if item["failures"] == pieces.MAX_ATTEMPTS else "failed too soon"
    text = str(item["result"] or item["error"])
    line = next((line for mark, line in tries.items() if mark in text), None)
    if line is None:
        return "but no try has written that down"
    if (line["outcome"] == "ok") != (item["status"] == "succeeded"):
        return f"but its try ended as {line['outcome']}"
    if line["claim"] not in (0, item["claim"]):
        return f"but by claim {line['claim']}"
    if line["attempt"] != item["failures"] + (item["status"] == "succeeded"):
        return f"but by attempt {line['attempt']}"
    return None


def items_end_as_they_must(record: Record) -> Findings:
    """An item ends as its deed says, unless its workers died too often."""
    for item in record.items:
        spec = record.specs.get(item["run_id"])
        if spec is None or item["status"] == "cancelled":
            continue
        piece = pieces.Piece.model_validate(item["payload"])
        end = _end(item)
        if end not in _ends(spec, piece):
            yield f"{_named(item)} ({piece}) ended as {end}: {item['error']}"


def _end(item: Row) -> str:
    """Return the type of an item's error without its module, or its status."""
    return str(item["error_type"] or item["status"]).rsplit(".")[-1]


def _ends(spec: pieces.Spec, piece: pieces.Piece) -> set[str]:
    expected = {
        "exhausted": {"TransientError"},
        "permanent": {"ValueError"},
        "exits": {"SystemExit"},
        "overtime": {"TimeoutError"},
        "poison": {_DIED} if spec.listing == "apart" else set[str](),
    }.get(piece.deed, {"succeeded"})
    if spec.listing == "hurried":  # a stopped process may let anything pass its time limit
        expected = expected | {"TimeoutError"}
    return expected | {LOST}


def runs_close_no_more_than_once(record: Record) -> Findings:
    """A run does not close twice in a generation."""
    closes = Counter(
        (row["run_id"], row["generation"])
        for row in record.run_changes
        if row["status"] not in ("pending", "processing")
    )
    for row in record.runs:
        for generation in range(1, row["generation"] + 1):
            count = closes[row["id"], generation]
            if count > 1:
                yield f"run {row['id']} closed {count} times in generation {generation}"


def callbacks_are_done_once(record: Record) -> Findings:
    """Each callback that is owed ends as done, once, and its body has ended at least once."""
    done = Counter(
        (row["run_id"], row["generation"], row["task"])
        for row in record.callback_changes
        if row["state"] == "done"
    )
    called = Counter(
        (line["run"], line["generation"], line["task"]) for line in record.events("called")
    )
    for row in record.callbacks:
        key = row["run_id"], row["generation"], row["task"]
        times = called[key[0], key[1], key[2].rsplit(".")[-1]]
        if row["state"] != "done" or done[key] != 1 or times < 1:
            yield f"callback {key} is {row['state']}, done {done[key]} times, called {times} times"


def callbacks_rest_when_done(record: Record) -> Findings:
    """Nobody begins a callback that is recorded as done."""
    done = {
        (row["run_id"], row["generation"], row["task"].rsplit(".")[-1]): row["at"].timestamp()
        for row in record.callback_changes
        if row["state"] == "done"
    }
    for line in record.events("call"):
        at = done.get((line["run"], line["generation"], line["task"]))
        if at is not None and line["at"] > at:
            yield f"callback begun {line['at'] - at:.2f} s after it was done: {dict(line)}"


def innocents_are_charged_little(record: Record) -> Findings:
    """When a process dies, only one of the items that were suspects already is charged again."""
    holders = record.holders()
    charged: dict[tuple[str, int], list[str]] = defaultdict(list)
    for row in record.rescues():
        holder = holders.get((row["run_id"], row["position"], row["claim"] - 1))
        if holder is not None and row["was_crashes"] > 0:
            # All that one death costs is found by one sweep of each run, a moment apart.
            charged[holder.name, int(row["at"].timestamp()) // 4].append(_named(row))
    for (worker, _), names in charged.items():
        if len(names) > 1:
            yield f"the end of {worker} was charged to {len(names)} suspects: {names}"


def nobody_is_charged_for_nothing(record: Record) -> Findings:
    """An item is taken from a worker that died, was stopped, or was cut off for about a lease.

    A worker that ends in good order gives back what it holds, at no charge.
    """
    for row in record.rescues_from_the_well():
        ended = row["held_until"]
        began = ended - 2.5 * record.lease
        if sum(span.silence(began, ended) for span in record.spans) < record.lease / 2:
            yield f"{_named(row)} was taken from a worker that was well: {row}"


def nobody_is_alarmed(record: Record) -> Findings:
    """The library reports no error that it should not meet, such as counters that were wrong."""
    for line in record.events("alarm"):
        yield f"{line['action']} in process {line['pid']}: {line['message']}"


JUDGES: tuple[Judge, ...] = (
    runs_are_closed,
    items_are_final,
    items_end_once,
    claims_are_begun_once,
    outcomes_are_of_the_last_try,
    items_end_as_they_must,
    runs_close_no_more_than_once,
    callbacks_are_done_once,
    callbacks_rest_when_done,
    innocents_are_charged_little,
    nobody_is_charged_for_nothing,
    nobody_is_alarmed,
)
LOSSES = (runs_are_closed, items_are_final, callbacks_are_done_once)
DOUBLES = (
    items_end_once, claims_are_begun_once, runs_close_no_more_than_once, callbacks_rest_when_done
)  # fmt: skip


def _named(row: Row) -> str:
    return f"run {row['run_id']} item {row['position']}"
