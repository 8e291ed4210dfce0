"""Values and statuses that users read: all frozen, all read from one snapshot."""

from __future__ import annotations

import dataclasses
import datetime
import enum
from collections.abc import Mapping
from typing import Any

EARLIEST = datetime.datetime(1, 1, 2, tzinfo=datetime.UTC)
LATEST = datetime.datetime(9999, 12, 30, tzinfo=datetime.UTC)
"""A day within what Python can hold: they can be shown in any time zone."""


def moment(text: str) -> datetime.datetime:
    """Return a time of the database's; one that Python cannot hold becomes the nearest it can."""
    try:
        return min(max(datetime.datetime.fromisoformat(text), EARLIEST), LATEST)
    except ValueError:  # a year of five digits, a year before 1, an infinity
        return EARLIEST if text.startswith("-") or text.endswith("BC") else LATEST


class RunStatus(enum.StrEnum):
    """Name the states of a run."""

    PENDING = "pending"
    """Its manager has not sealed it yet."""
    PROCESSING = "processing"
    """Its items are being worked on."""
    COMPLETED = "completed"
    """Every item is final, failed ones included."""
    FAILED = "failed"
    """Closed early: the manager failed, tolerance exceeded, deadline passed, or stuck."""
    CANCELLED = "cancelled"
    """Closed early by an operator."""

    @property
    def closed(self) -> bool:
        return self in (RunStatus.COMPLETED, RunStatus.FAILED, RunStatus.CANCELLED)


class ItemStatus(enum.StrEnum):
    """Name the states of an item."""

    PENDING = "pending"
    PROCESSING = "processing"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Progress:
    """Show where a run stands, at one moment.

    ``pending + processing + succeeded + failed + cancelled == total`` at every reading of a sealed
    run; before the seal ``total`` is ``None`` and ``pending`` counts the items staged so far.

    Args:
        run_id: the run.
        name: its manager's task name (its child's, for ``.map``).
        status: where the run stands; ``status.closed`` tells whether it is final.
        total: items of the run; ``None`` until the manager has listed them all.
        pending: items not at work, the waiting ones included.
        waiting: released items, due again now or later.
        processing: items at work.
        succeeded: items that ended well.
        failed: items that failed for good.
        cancelled: items that a stop left undone.
        duplicates: items that the manager listed again under the same key, and that were skipped.
        paused: whether nothing is handed out until the run is resumed.
        generation: 1, and one more each time ``retry_failed`` reopened the run.
        rate: outcomes per second: decayed over half a minute, or the mean of a closed run.
        reason: why the run was closed early, or is being stopped.
        callbacks: the state of this generation's callbacks by task name: ``owed``, ``running``,
            ``done`` or ``failed``.
        max_in_flight: items at work at the same time, at most.
        waiting_for: which limit keeps it from more places, in words; ``None`` while none does.
    """

    run_id: int
    name: str
    status: RunStatus
    total: int | None
    pending: int
    waiting: int
    processing: int
    succeeded: int
    failed: int
    cancelled: int
    duplicates: int
    paused: bool
    generation: int
    rate: float
    reason: str | None
    callbacks: Mapping[str, str]
    max_in_flight: int
    created_at: datetime.datetime
    scheduled_at: datetime.datetime | None
    deadline: datetime.datetime | None
    started_at: datetime.datetime | None
    closed_at: datetime.datetime | None
    last_activity_at: datetime.datetime | None
    waiting_for: str | None = None

    @property
    def done(self) -> int:
        """Return how many items are final."""
        return self.succeeded + self.failed + self.cancelled

    @property
    def percent(self) -> float:
        """Return the final items' share in percent: 0 before the seal, 100 for an empty run."""
        if self.total is None:
            return 0.0
        return 100.0 * self.done / self.total if self.total else 100.0

    @property
    def eta(self) -> float | None:
        """Return the seconds left at the present rate; ``None`` while nobody can tell."""
        if self.status.closed:
            return 0.0
        if self.total is None or self.paused or self.rate <= 1e-9:
            return None
        return (self.total - self.done) / self.rate

    @property
    def clean(self) -> bool:
        """Return whether it completed and no item failed or was cancelled."""
        return self.status is RunStatus.COMPLETED and not self.failed and not self.cancelled

    @property
    def closed(self) -> bool:
        """Return whether the run is final."""
        return self.status.closed

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Progress:
        """Build it from the database's JSON."""
        values: dict[str, Any] = {
            field.name: data.get(field.name) for field in dataclasses.fields(cls)
        }
        values["status"] = RunStatus(data["status"])
        for name, value in values.items():
            if name.endswith("_at") or name == "deadline":
                values[name] = None if value is None else moment(value)
        values["callbacks"] = dict(data.get("callbacks") or {})
        values["rate"] = float(data.get("rate") or 0.0)
        return cls(**values)

    def as_dict(self) -> dict[str, Any]:
        """Return plain JSON types; times are ISO 8601, derived figures included."""
        values: dict[str, Any] = {
            name: value.isoformat() if isinstance(value, datetime.datetime) else value
            for name, value in dataclasses.asdict(self).items()
        }
        return values | {
            "status": str(self.status),
            "percent": round(self.percent, 2),
            "eta": None if self.eta is None else round(self.eta, 1),
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Item:
    """Show one item of a run.

    Args:
        position: its place in the run, from 0.
        key: its key, where the manager gave one.
        status: where it stands.
        payload: what the manager listed, as JSON.
        result: what the child returned, as JSON; ``None`` unless it succeeded.
        error: the last error (``type``, ``message``, ``traceback``, ``class``), or ``None``.
        attempts: tries that ended in an outcome, the running one included: 0 = never tried.
            Releases at no charge and crashes do not count.
        crashes: how often its worker died while working on it.
        sanitised: whether something the database cannot store was replaced in its result.
        due: when it is tried again, while it waits for that.
    """

    position: int
    key: str | None
    status: ItemStatus
    payload: Any
    result: Any
    error: Mapping[str, Any] | None
    attempts: int
    crashes: int
    sanitised: bool
    due: datetime.datetime | None
    started_at: datetime.datetime | None
    finished_at: datetime.datetime | None

    def as_dict(self) -> dict[str, Any]:
        """Return plain JSON types; times are ISO 8601."""
        return {
            name: value.isoformat() if isinstance(value, datetime.datetime) else value
            for name, value in dataclasses.asdict(self).items()
        } | {"status": str(self.status)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ErrorGroup:
    """Show the failed items of one type of error, with one of them as a sample."""

    error_type: str
    count: int
    message: str
    position: int
    key: str | None

    def as_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slot:
    """Show one slot of a run, and what it works on.

    Args:
        slot: its number.
        job_id: the job that holds it, or waits to.
        active: whether the job works; otherwise it waits in the queue.
        position: of the item in hand.
        key: the key of that item.
        started_at: when that item was handed out.
        seen_at: when its worker was last heard of.
        scheduled_at: when a waiting job is due, if not at once.
        suspected: whether its worker has been silent for a lease.
    """

    slot: int
    job_id: int
    active: bool
    position: int | None
    key: str | None
    started_at: datetime.datetime | None
    seen_at: datetime.datetime | None
    scheduled_at: datetime.datetime | None
    suspected: bool

    def as_dict(self) -> dict[str, Any]:
        """Return plain JSON types; times are ISO 8601."""
        return {
            name: value.isoformat() if isinstance(value, datetime.datetime) else value
            for name, value in dataclasses.asdict(self).items()
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepReport:
    """Show what one sweep did.

    Args:
        runs: the runs that were looked at closely, and what each was suspected of.
        done: what was done, as counts by name; empty on a healthy system.
        errors: the runs that could not be repaired, and why; the sweep went on with the others.
    """

    runs: Mapping[int, str] = dataclasses.field(default_factory=dict)
    done: Mapping[str, int] = dataclasses.field(default_factory=dict)
    errors: Mapping[int, str] = dataclasses.field(default_factory=dict)

    @property
    def changed(self) -> bool:
        """Return whether anything was written."""
        return bool(self.done)

    def as_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return {
            "runs": {str(run): finding for run, finding in self.runs.items()},
            "done": dict(self.done),
            "errors": {str(run): error for run, error in self.errors.items()},
        }


class FindingKind(enum.StrEnum):
    """Name what an audit can find."""

    COUNTERS = "counters"
    """A ledger's counters are impossible, or differ from the states of its items."""
    ITEMS = "items"
    """Items are missing, or there are too many."""
    TOTAL = "total"
    """A run's total is not what was staged."""
    SIZES = "sizes"
    """A ledger's size is not its share of the total."""
    LEDGERS = "ledgers"
    """Ledgers are missing, or there are too many."""
    OPEN_LEDGERS = "open_ledgers"
    """A complete ledger counts as open, or an incomplete one does not."""
    CURSOR = "cursor"
    """A ledger's cursor stands before items that were handed out."""
    UNREACHABLE = "unreachable"
    """An unfinished item is neither ahead of the cursor nor due: nobody will take it."""
    UNHELD = "unheld"
    """An item is at work, but no slot holds it."""
    HELD = "held"
    """A slot holds an item that is not at work under its claim, or that another slot holds."""
    STATE = "state"
    """An item's status contradicts its claim, its end or its error."""
    UNTIDY = "untidy"
    """Item rows that a stop left behind will not be rewritten or removed."""
    SILENT_SLOT = "silent_slot"
    """An active slot has not been renewed for three leases, and no sweep has come."""
    MISSING_SLOTS = "missing_slots"
    """A run has items to hand out, but too few slots that will take them."""
    OVER_LIMIT = "over_limit"
    """More slots are active than may be."""
    LEFTOVER_SLOT = "leftover_slot"
    """A run that is closed, or not sealed yet, has slots."""
    LOST_JOB = "lost_job"
    """The job of a queued slot is gone, final, or was fetched by a worker that died."""
    STRAY_JOB = "stray_job"
    """A waiting job owns no slot, but holds a slot's queueing lock."""
    MANAGER_LOST = "manager_lost"
    """A run is not sealed, and nobody lists its items or ever will."""
    STOP_PENDING = "stop_pending"
    """A run is to close early, but nobody has stopped it."""
    MISSED_CLOSE = "missed_close"
    """Every item of a run is final, but the run is open."""
    CLOSED_UNFINISHED = "closed_unfinished"
    """A run is closed, but not all of its items are final."""
    CLOSE_UNRECORDED = "close_unrecorded"
    """A generation closed without a record of it, or has a record of another close."""
    CALLBACK_MISSING = "callback_missing"
    """A close does not owe a callback that it should, or owes one that it should not."""
    CALLBACK_LOST = "callback_lost"
    """A callback is owed or running, but nobody will run or finish it."""
    SHUT_LIMIT = "shut_limit"
    """Nobody may have a limit (concurrency 0), and runs or programs want it."""
    DEAD_PERMIT = "dead_permit"
    """A permit's holder has been silent for three leases, and no sweep has come."""
    ORPHANS = "orphans"
    """There are rows of a run that is not there."""
    UNCHECKED = "unchecked"
    """The time was not enough to look at everything; says nothing about damage."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """Show one contradiction that an audit found.

    Args:
        run_id: the run; ``None`` for what concerns several (``unchecked``).
        kind: what kind of contradiction.
        subject: the ledger, slot, items, job or callback that it is about.
        detail: a sentence with the figures.
        repairable: whether the next sweeps repair it. Otherwise somebody has to look at it.
    """

    run_id: int | None
    kind: FindingKind
    subject: str
    detail: str
    repairable: bool

    def as_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return dataclasses.asdict(self) | {"kind": str(self.kind)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LimitUse:
    """Show who has a place of a limit, or waits for one.

    Args:
        label: ``item``, ``queued`` (a slot that is about to begin), or what a permit was taken for.
        run_id: the run, where it is one.
        slot: its slot, for what is no permit.
        position: of the item.
        key: of the item.
        lane: the key of the limit, where it has one.
        since: when.
    """

    label: str
    run_id: int | None
    slot: int | None
    position: int | None
    key: str | None
    lane: str | None
    since: datetime.datetime

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> LimitUse:
        """Build it from the database's JSON."""
        names = ("run_id", "slot", "position", "key", "lane")
        return cls(
            label=data["label"],
            since=moment(data["since"]),
            **{name: data.get(name) for name in names},
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LimitWant:
    """Show a run that wants more places of a limit than it has.

    Args:
        run_id: the run.
        name: its manager's task name.
        wants: how many more.
        reason: which limit keeps it waiting, in words.
    """

    run_id: int
    name: str
    wants: int
    reason: str | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class LimitState:
    """Show a limit, and who has it.

    Args:
        name: of the resource; ``max_running:`` and a task name for a child's own.
        kind: ``shared``, ``keyed`` (each key has places of its own) or ``child``
            (``max_running``).
        concurrency: how many may have it at once, per key where it is keyed; ``None`` = any number.
        rate: starts in `per` seconds; ``None`` = any number.
        per: seconds, for `rate`.
        burst: starts that may come at once.
        keyed: whether it is kept per key.
        paused_until: nothing begins before; ``None`` = it is not paused.
        next_start: when the next start of a rate is free.
        used: places that are taken.
        holders: who has them, the first 200.
        waiting: who stands in line for a permit, in that order, the first 200.
        wanting: the runs that want more places, the first 200.
    """

    name: str
    kind: str
    concurrency: int | None
    rate: float | None
    per: float
    burst: int
    keyed: bool
    paused_until: datetime.datetime | None
    next_start: datetime.datetime | None
    used: int
    holders: tuple[LimitUse, ...]
    waiting: tuple[LimitUse, ...]
    wanting: tuple[LimitWant, ...]

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> LimitState:
        """Build it from the database's JSON."""
        values = dict(data)
        for name in ("paused_until", "next_start"):
            if values[name] is not None:
                values[name] = moment(values[name])
        for name in ("holders", "waiting"):
            values[name] = tuple(map(LimitUse.from_json, values[name]))
        values["wanting"] = tuple(LimitWant(**one) for one in values["wanting"])
        return cls(**values)

    def as_dict(self) -> dict[str, Any]:
        """Return plain JSON types; times are ISO 8601."""
        plain: dict[str, Any] = _plain(dataclasses.asdict(self))
        return plain


def _plain(value: Any) -> Any:
    if isinstance(value, datetime.datetime):
        return value.isoformat()
    if isinstance(value, Mapping):
        return {name: _plain(one) for name, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PermitReply:
    """Hold the database's answer to who takes a permit.

    Args:
        granted: whether it is held, from in `wait_seconds` on.
        place: in the line, from 1.
        wait_seconds: until the start, or until the next look.
        reason: why it waits.
        refused: the limit that the run has already and that comes later by name.
        crowds: a run that is to make room for those in line.
    """

    granted: bool
    place: int | None
    wait_seconds: float | None
    reason: str | None
    refused: str | None
    crowds: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunFacts:
    """Hold what never changes about a run."""

    run_id: int
    name: str
    run_key: str | None
    args: Mapping[str, Any]
    tags: tuple[str, ...]
    manager_task: str | None
    child_task: str
    child_queue: str
    ledgers: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trace:
    """Hold what spans and measures of a run carry.

    Args:
        name: of its manager's task (its child's, for ``.map``).
        child_task: its child's task name.
        waited: seconds since its trigger, or the time it was scheduled for.
        carrier: the trace context of its trigger, as OpenTelemetry injects it.
    """

    name: str
    child_task: str
    waited: float
    carrier: Mapping[str, str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Started:
    """Tell what became of a call that starts a run."""

    run_id: int
    outcome: str
    status: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class ManagerClaim:
    """Hold one execution of a manager: its fence, and what it works with."""

    fence: int
    args: Mapping[str, Any]
    attempt: int
    child_task: str


@dataclasses.dataclass(frozen=True, slots=True)
class Reply:
    """Hold the database's answer for one slot; see ``fanout_reply_v1`` for the verdicts."""

    slot: int
    verdict: str
    epoch: int | None
    ledger: int
    position: int | None
    claim: int | None
    failures: int | None
    crashes: int | None
    item_key: str | None
    payload: str | None
    wait_seconds: float | None
    stop: bool
    freed: bool = False
    ahead: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Hold one slot's part of a report: the outcome of the item in hand, if any, and its wish."""

    slot: int
    epoch: int
    wish: str
    position: int | None = None
    claim: int | None = None
    outcome: str | None = None
    retry_in: float | None = None
    result: str | None = None
    error: str | None = None
    sanitised: bool = False
    ahead: int | None = None

    def keeps(self) -> bool:
        """Return whether the item that answers it is kept ready, behind another one."""
        return self.wish == "ahead" or self.ahead is not None


@dataclasses.dataclass(frozen=True, slots=True)
class Holding:
    """Hold an active slot's identity, for renewal."""

    run_id: int
    slot: int
    epoch: int
