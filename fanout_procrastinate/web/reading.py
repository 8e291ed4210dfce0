"""What the API and the pages read of runs: by the async API, in words that JSON can carry.

Ids have 64 bits and go out as text: JavaScript's numbers have 53.
"""

from __future__ import annotations

import dataclasses
import datetime
import time
from collections.abc import Awaitable, Callable, Container, Iterable, Mapping, Sequence
from typing import Any

from fanout_procrastinate import fanout, hooks, models, run, store, subscriptions

LARGEST_ID = subscriptions.LARGEST_ID
MOST_ITEMS = 500
MOST_RUNS = 500
SLOTS_SHOWN = 100
ERRORS_SHOWN = 20

_WINDOW = 20_000
_SEARCH_SECONDS = 1.5
_SAMPLE = 2000
_BUCKETS = 60
_LEAST_SECONDS = 0.25
_FIGURES_SECONDS = 2.0
_FIGURES_KEPT = 200
_HOLDERS_SHOWN = 10

Readable = Callable[[Iterable[int | None]], Awaitable[Container[int | None]]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ItemPage:
    """Some items of a run, in order.

    Args:
        items: without their payloads and results.
        next: where to go on: the position after which the next page begins; ``None`` at the end.
            A page may be short, even empty, and have a next one: a search looks only so long.
    """

    items: Sequence[models.Item]
    next: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pace:
    """How many items of a run ended, over time, in parts of equal length.

    Args:
        seconds: the length of a part.
        ended: all items that ended in each part.
        failed: those of them that failed.
    """

    seconds: float
    ended: Sequence[int]
    failed: Sequence[int]

    @property
    def peak(self) -> float:
        """Return the highest rate of a part, in items per second."""
        return max(self.ended, default=0) / self.seconds if self.seconds else 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figures:
    """What a page shows of a run beside its progress.

    Args:
        state: what the run's progress was.
        read_at: when, by the local clock.
        pace: how it has gone over time, if that is known.
        groups: its failed items by type of error.
    """

    state: tuple[object, ...]
    read_at: float
    pace: Pace | None
    groups: Sequence[models.ErrorGroup]


class Reading:
    """Read an app's runs for one dashboard.

    Args:
        owner: the app's fan-outs.
    """

    def __init__(self, owner: fanout.FanOut) -> None:
        self.owner = owner
        self._figures: dict[int, Figures] = {}

    async def runs(
        self, *, name: str | None, status: str | None, tag: str | None, limit: int
    ) -> list[models.Progress]:
        """Return the latest runs' progress, the newest first."""
        return await self.owner.runs_async(name=name, status=status, tag=tag, limit=limit)

    async def find(self, run_id: int) -> run.Run:
        """Return a run.

        Raises:
            RunNotFound: it is not kept.
        """
        return await self.owner.get_run_async(run_id)

    async def limits(self, run_id: int) -> list[models.LimitState]:
        """Return the limits that a run's items take, and who has each."""
        return await self.owner.host.run_async(store.run_limits(run_id))

    async def items(
        self, one: run.Run, *, status: str | None, search: str | None, after: int, limit: int
    ) -> ItemPage:
        """Return a page of items.

        Looking for rare ones in a large run goes on for a moment only; see `ItemPage`.
        """
        progress = await one.progress_async()
        last = (progress.total or 0) - 1
        whole = (status is None and search is None) or status == models.ItemStatus.FAILED
        found: list[models.Item] = []
        end = time.monotonic() + _SEARCH_SECONDS
        while after < last:
            until = last if whole else min(after + _WINDOW, last)
            wanted = limit - len(found)
            page = await self.owner.host.run_async(
                store.item_list(
                    one.id, status=status, search=search, after=after, until=until, limit=wanted
                )
            )
            found += page
            after = page[-1].position if len(page) == wanted else until
            if len(found) == limit or time.monotonic() > end:
                break
        return ItemPage(items=found, next=after if after < last else None)

    async def item(self, one: run.Run, position: int) -> models.Item | None:
        """Return one item with all it has, or nothing."""
        if position > LARGEST_ID:
            return None
        call = store.items(one.id, status=None, after=position - 1, limit=1)
        found = await self.owner.host.run_async(call)
        return found[0] if found and found[0].position == position else None

    async def slots(self, one: run.Run) -> list[models.Slot]:
        """Return the run's slots, the active ones first."""
        return await self.owner.host.run_async(store.slots(one.id, SLOTS_SHOWN))

    async def figures(self, one: run.Run, progress: models.Progress) -> Figures:
        """Return what costs more to read than progress; not anew for each reader of a page."""
        now = time.monotonic()
        known = self._figures.get(one.id)
        state = (progress.generation, progress.status, progress.done, progress.failed)
        if known is not None and (
            known.state == state or (not progress.closed and now - known.read_at < _FIGURES_SECONDS)
        ):
            return known
        self._figures[one.id] = made = Figures(
            state=state,
            read_at=now,
            pace=await self._pace(one, progress),
            groups=await one.errors_async(ERRORS_SHOWN) if progress.failed else [],
        )
        while len(self._figures) > _FIGURES_KEPT:
            del self._figures[next(iter(self._figures))]
        return made

    async def _pace(self, one: run.Run, progress: models.Progress) -> Pace | None:
        """Return how a run has gone over time, from a sample of its items; ``None`` if unknown."""
        if not progress.total or progress.started_at is None:
            return None
        stride = -(-progress.total // _SAMPLE)
        call = store.pace(one.id, last=progress.total - 1, stride=stride)
        begun = progress.started_at.timestamp()
        ended = [(at, how) for at, how in await self.owner.host.run_async(call) if at >= begun]
        if not ended:
            return None
        until = (progress.closed_at or datetime.datetime.now(tz=datetime.UTC)).timestamp()
        return _pace(ended, begun, max(until, ended[-1][0]), stride)

    def shown(self, value: Any) -> Any:
        """Return a payload, result or argument as people may see it."""
        return hooks.redacted(self.owner.settings, value)


def _pace(ended: Sequence[tuple[float, str]], begun: float, until: float, stride: int) -> Pace:
    seconds = max((until - begun) / _BUCKETS, _LEAST_SECONDS)
    counts, failed = [0] * _BUCKETS, [0] * _BUCKETS
    for at, how in ended:
        part = min(int((at - begun) / seconds), _BUCKETS - 1)
        counts[part] += stride
        if how == models.ItemStatus.FAILED:
            failed[part] += stride
    return Pace(seconds=seconds, ended=counts, failed=failed)


async def limits_of(source: Reading, one: run.Run, readable: Readable) -> list[Mapping[str, Any]]:
    """Return the limits that a run's items share with others, for the page's section of that name.

    Each has ``name``, ``used``, ``concurrency`` (or ``None``), ``rate`` (or ``None``), ``per``
    (seconds), ``waiting`` (how many), ``paused_until`` (a time, or ``None``), ``holders`` and
    ``queue`` (the first who have it, and who wait for it, in words), ``others`` and
    ``others_waiting`` (how many more there are, those of runs that may not be read among them).

    Args:
        source: reads.
        one: the run.
        readable: told runs, says which of them may be read; ``None`` is what belongs to no run.
    """
    states = await source.limits(one.id)
    runs: list[int | None] = [one.id]
    for state in states:
        runs += [use.run_id for use in (*state.holders, *state.waiting)]
        runs += [want.run_id for want in state.wanting]
    allowed = await readable(runs)
    return [_limit(state, allowed) for state in states]


def _limit(state: models.LimitState, allowed: Container[int | None]) -> Mapping[str, Any]:
    holders = [use for use in state.holders if use.run_id in allowed][:_HOLDERS_SHOWN]
    line = [use for use in state.waiting if use.run_id in allowed][:_HOLDERS_SHOWN]
    wanting = [want for want in state.wanting if want.run_id in allowed][:_HOLDERS_SHOWN]
    waiting = len(state.waiting) + sum(want.wants for want in state.wanting)
    return {
        "name": state.name,
        "used": state.used,
        "concurrency": state.concurrency,
        "rate": state.rate,
        "per": state.per,
        "waiting": waiting,
        "paused_until": state.paused_until and state.paused_until.isoformat(),
        "holders": [_use(use) for use in holders],
        "others": len(state.holders) - len(holders),
        "queue": [_use(use) for use in line]
        + [f"run {want.run_id}: {want.wants} more" for want in wanting],
        "others_waiting": waiting - len(line) - sum(want.wants for want in wanting),
    }


def _use(use: models.LimitUse) -> str:
    """Say who has a place, or waits for one."""
    where = [f"run {use.run_id}"] if use.run_id is not None else []
    if use.position is not None:
        where.append(f"item {use.position}" + (f" ({use.key})" if use.key else ""))
    if use.lane is not None:
        where.append(f"for {use.lane}")
    text = ", ".join(where)
    return text if use.label == "item" and text else f"{use.label}: {text}" if text else use.label


# -- as JSON


def progress_json(progress: models.Progress) -> dict[str, Any]:
    """Return a run's progress as JSON."""
    return progress.as_dict() | {"run_id": str(progress.run_id), "done": progress.done}


def facts_json(reading: Reading, facts: models.RunFacts) -> dict[str, Any]:
    """Return what never changes about a run as JSON."""
    return {
        "run_key": facts.run_key,
        "args": reading.shown(dict(facts.args)),
        "tags": list(facts.tags),
        "child_task": facts.child_task,
        "child_queue": facts.child_queue,
    }


def item_row_json(item: models.Item) -> dict[str, Any]:
    """Return an item as JSON, without its payload and result."""
    row = item.as_dict()
    del row["payload"], row["result"]
    return row


def item_json(reading: Reading, item: models.Item) -> dict[str, Any]:
    """Return an item as JSON, with all it has."""
    shown = {"payload": reading.shown(item.payload), "result": reading.shown(item.result)}
    return item.as_dict() | shown


def slot_json(slot: models.Slot) -> dict[str, Any]:
    """Return a slot as JSON."""
    return slot.as_dict() | {"job_id": str(slot.job_id)}
