"""How runs, items and errors read: in one line, as rows, as named values."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator, Sequence
from typing import Any

from fanout_procrastinate import durations, models, run, subscriptions

_LONGEST_KEY = 40
_LONGEST_MESSAGE = 200
_LONGEST_RESULT = 60
duration = durations.duration

Fields = Iterator[tuple[str, object]]


# -- words


def cut(text: object, length: int) -> str:
    """Return text of at most so many characters; a mark shows where it was cut."""
    whole = str(text)
    return whole if len(whole) <= length else whole[: length - 1] + "…"


def compact(value: Any, length: int) -> str:
    """Return JSON on one line, cut."""
    return cut(json.dumps(value, ensure_ascii=False), length)


def moment(when: datetime.datetime | None) -> str:
    """Return a time in the reader's time zone."""
    return "" if when is None else when.astimezone().strftime("%Y-%m-%d %H:%M:%S")


def dated(when: datetime.datetime | None) -> str:
    """Return a time in the reader's time zone, and which that is."""
    return "" if when is None else f"{moment(when)} {when.astimezone():%z}"


def now() -> datetime.datetime:
    """Return this machine's time: near enough for people to read."""
    return datetime.datetime.now(tz=datetime.UTC)


def wait(queue: str, due: datetime.datetime | None) -> str:
    """Return what a run waits for whose manager job is not at work yet."""
    if due is not None and due > now():
        return f"waits until {dated(due)}"
    return f"waits for a worker on queue {queue}"


def took(start: datetime.datetime | None, end: datetime.datetime | None) -> str:
    """Return in words how long something took, once it has ended."""
    return "" if start is None or end is None else duration((end - start).total_seconds())


# -- a run in one line


def counts(progress: models.Progress) -> str:
    """Return how many items of an open run are final, or listed."""
    if progress.total is None:
        return f"{progress.pending} listed so far"
    told = progress.total or progress.status is models.RunStatus.COMPLETED
    share = f" ({progress.percent:.0f} %)" if told else ""  # of nothing, unless that is all
    return f"{progress.done} of {progress.total}{share}"


def pace(progress: models.Progress) -> str:
    """Return how fast an open run goes and how long it will take."""
    parts = [f"stopping: {progress.reason}"] if run.stopping(progress) else []
    parts += ["paused"] if progress.paused else []
    if progress.rate >= 0.05:
        parts.append(f"{progress.rate:.1f}/s")
    if progress.eta is not None:
        parts.append(f"{duration(progress.eta)} left")
    if progress.waiting_for:
        parts.append(progress.waiting_for)
    return ", ".join(parts)


def summary(progress: models.Progress) -> str:
    """Return a run in one line.

    A closed run reads ``run 1: completed, 22 items, 18 succeeded, 4 failed``.
    """
    told = not progress.reason or run.stopping(progress)
    reason = "" if told else f": {progress.reason}"
    return f"run {progress.run_id}: {progress.status}, {_totals(progress)}{reason}"


def _totals(progress: models.Progress) -> str:
    if progress.closed:
        line = f"{progress.total or 0} items, {progress.succeeded} succeeded"
        line += f", {progress.failed} failed"
        return line + (f", {progress.cancelled} cancelled" if progress.cancelled else "")
    parts = [counts(progress)]
    numbers = {"failed": progress.failed, "waiting": progress.waiting}
    parts += [f"{number} {word}" for word, number in numbers.items() if number]
    return ", ".join(filter(None, [*parts, pace(progress)]))


def happening(event: subscriptions.Event) -> str | None:
    """Return a log line or a failure of an item in one line; nothing of other events.

    A line reads ``run 1: item 4 (k4): page read {"page": 7}``.
    """
    data = event.data
    if event.kind == "log":
        if "dropped" in data:
            return f"run {event.run_id}: {data['dropped']} more lines are left out"
        more = f" {compact(data['data'], _LONGEST_MESSAGE)}" if data.get("data") else ""
        return f"{_item(event)}: {data.get('message')}{more}"
    if event.kind == "item_failed":
        if "more" in data:
            return f"run {event.run_id}: {data['more']} more items failed"
        return f"{_item(event)} failed: {data.get('type')}: {data.get('message')}"
    return None


def _item(event: subscriptions.Event) -> str:
    key = event.data.get("key")
    named = f" ({cut(key, _LONGEST_KEY)})" if key is not None else ""
    return f"run {event.run_id}: item {event.data.get('position')}{named}"


# -- tables; the spare heads of each, the first of them the last to go where there is no room

RUNS = ("run>", "name", "status", "done>", "total>", "failed>", "created>", "took>")
RUNS_SPARE = ("name", "failed>", "done>", "total>", "created>", "took>")
ITEMS_SPARE = ("outcome", "attempts>", "took>", "crashes>", "payload")
ERRORS = ("failed>", "error", "item>", "key", "sample")
ERRORS_SPARE = ("item>", "key")


def run_row(progress: models.Progress) -> Sequence[object]:
    """Return a row of `RUNS`."""
    return (
        progress.run_id,
        progress.name,
        progress.status,
        progress.done,
        "?" if progress.total is None else progress.total,
        progress.failed,
        moment(progress.created_at),
        took(progress.started_at or progress.created_at, progress.closed_at),
    )


def item_columns(items: Sequence[models.Item]) -> dict[str, Sequence[object]]:
    """Return the columns of a table of items by head.

    Payloads are shown where keys do not tell the items apart, crashes where there are any. What is
    at work has taken the time since its start.
    """
    columns: dict[str, Sequence[object]] = {
        "item>": [item.position for item in items],
        "key": [cut(item.key or "", _LONGEST_KEY) for item in items],
    }
    if any(item.key is None for item in items):
        columns["payload"] = [compact(item.payload, _LONGEST_KEY) for item in items]
    columns["status"] = [item.status for item in items]
    columns["attempts>"] = [item.attempts for item in items]
    if any(item.crashes for item in items):
        columns["crashes>"] = [item.crashes for item in items]
    return columns | {
        "took>": [_item_took(item) for item in items],
        "outcome": [_outcome(item) for item in items],
    }


def _item_took(item: models.Item) -> str:
    at_work = item.status is models.ItemStatus.PROCESSING
    return took(item.started_at, now() if at_work else item.finished_at)


def _outcome(item: models.Item) -> str:
    if item.error is not None:
        return cut(f"{item.error.get('type')}: {item.error.get('message')}", _LONGEST_MESSAGE)
    if item.status is models.ItemStatus.SUCCEEDED:
        return compact(item.result, _LONGEST_RESULT)
    return ""


def error_row(group: models.ErrorGroup) -> Sequence[object]:
    """Return a row of `ERRORS`."""
    return (
        group.count,
        group.error_type,
        group.position,
        cut(group.key or "", _LONGEST_KEY),
        cut(group.message, _LONGEST_MESSAGE),
    )


# -- a run at length


def run_fields(facts: models.RunFacts, progress: models.Progress, waits: str = "") -> Fields:
    """Return everything about a run as named values; what is not there is empty."""
    yield "name", facts.name
    yield "run key", facts.run_key
    yield "tags", ", ".join(facts.tags)
    yield "arguments", compact(dict(facts.args), _LONGEST_MESSAGE)
    yield "child", f"{facts.child_task} in queue {facts.child_queue}"
    yield "manager", waits
    yield from _counts(progress)
    yield from _times(progress)


def _counts(progress: models.Progress) -> Fields:
    yield (
        "items",
        f"{progress.pending} pending ({progress.waiting} waiting), {progress.processing} at work, "
        f"{progress.succeeded} succeeded, {progress.failed} failed, "
        f"{progress.cancelled} cancelled",
    )
    yield "duplicates", progress.duplicates or None
    yield "at once", f"{progress.max_in_flight} at most"
    yield "waits for", progress.waiting_for
    yield "rate", f"{progress.rate:.1f}/s"
    yield "callbacks", ", ".join(f"{name} {state}" for name, state in progress.callbacks.items())
    yield "generation", progress.generation if progress.generation > 1 else None


def _times(progress: models.Progress) -> Fields:
    yield "created", dated(progress.created_at)
    yield "scheduled", dated(progress.scheduled_at)
    yield "started", dated(progress.started_at)
    yield "deadline", dated(progress.deadline)
    yield "closed", dated(progress.closed_at)
    yield "took", took(progress.started_at, progress.closed_at)
