"""What a subscriber is told, and the bounded queue between him and who tells it."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import datetime
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, Literal, Self, get_args

from fanout_procrastinate import errors, models, settings

Kind = Literal["progress", "item_failed", "log", "closed", "resync"]
KINDS: frozenset[str] = frozenset(get_args(Kind))
LIMIT = 1000
_FRACTIONS = 1000
LARGEST_ID = 2**63 - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Event:
    """Tell of one thing that happened. Events are hints: losing one changes no outcome.

    Args:
        run_id: the run; 0 for a ``resync`` that concerns all.
        kind: see below.
        data: what there is to say, by kind:

            ``progress``
                ``progress``, the run's `Progress`; ``items``, the latest fraction by position of
                the items that told theirs since the event before.
            ``item_failed``
                ``position``, ``key``, ``type`` and ``message`` (200 characters); or only
                ``more``, how many further ones are left out.
            ``log``
                ``position``, ``key``, ``message`` and ``data`` of a line; or only ``dropped``,
                how many lines are left out.
            ``closed``
                ``status``, ``generation``, ``reason`` and ``progress``, the last one.
            ``resync``
                ``reason``: ``overflow``, events were dropped because nobody took them, or
                ``reconnected``, some may have been missed; ``dropped``, how many. Read again what
                you show.
        at: when, by the clock of who tells it.
    """

    run_id: int
    kind: Kind
    data: Mapping[str, Any]
    at: datetime.datetime

    @property
    def progress(self) -> models.Progress | None:
        """Return the run's `Progress`, of ``progress`` and ``closed`` events."""
        found: models.Progress | None = self.data.get("progress")
        return found

    def as_dict(self) -> dict[str, Any]:
        """Return plain JSON types; times are ISO 8601."""
        data = dict(self.data)
        if self.progress is not None:
            data["progress"] = self.progress.as_dict()
        return {
            "run_id": self.run_id,
            "kind": self.kind,
            "data": data,
            "at": self.at.isoformat(),
        }


def now() -> datetime.datetime:
    """Return this machine's time: events are read by people, not compared."""
    return datetime.datetime.now(tz=datetime.UTC)


@dataclasses.dataclass(slots=True)
class Seen:
    """What a subscriber was told of one run."""

    generation: int
    closed: bool = False
    state: object = None
    closing_since: float | None = None
    """When it was first read as closed, of a run that was open before."""


class Subscription:
    """Iterate over events with ``for`` or ``async for``; leaving its ``with`` block ends it.

    At most `limit` events wait. Of several ``progress`` events of a run only the latest is kept;
    beyond the limit the oldest of the others are dropped, and one ``resync`` says so. Whoever
    produces events never waits.

    Example:
        >>> with fanout.events.subscribe(run.id) as events:  # doctest: +SKIP
        ...     for event in events:
        ...         print(event.kind, event.data)
    """

    def __init__(
        self,
        run_id: int | None = None,
        *,
        kinds: Iterable[str] | None = None,
        limit: int = LIMIT,
        until_closed: bool = False,
        before_sync: Callable[[], None] = lambda: None,
    ) -> None:
        self.run_id = run_id
        self.kinds = _checked_kinds(kinds)
        self.seen: collections.OrderedDict[int, Seen] = collections.OrderedDict()
        self._limit = check_limit(limit)
        self._until_closed = until_closed
        self._before_sync = before_sync
        self._lock = threading.Condition()
        self._numbers = 0
        self._progress: dict[int, tuple[int, Event]] = {}
        self._closes: collections.deque[tuple[int, Event]] = collections.deque()
        self._others: collections.deque[tuple[int, Event]] = collections.deque()
        self._dropped = 0
        self._reason: str | None = None
        self._snapshot_due = run_id is not None and "progress" in self.kinds
        self._sleepers: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = set()
        self._ended = False
        self._error: errors.FanoutError | None = None
        if run_id is not None:
            try:
                check_run_id(run_id)
            except errors.RunNotFound as exc:
                self.fail(exc)

    # -- taking events

    def get(self, timeout: float | None = None) -> Event | None:
        """Return the next event; ``None`` after `timeout` seconds, or when it has `ended`.

        Raises:
            RunNotFound: the run is not kept.
            ConfigurationError: the timeout is no number of seconds.
        """
        timeout = check_timeout(timeout)
        end = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            while True:
                event = self._next()
                if event is not None or self._ended:
                    return event
                left = None if end is None else end - time.monotonic()
                if left is not None and left <= 0:
                    return None
                self._lock.wait(left)

    async def get_async(self, timeout: float | None = None) -> Event | None:
        """Return the next event without blocking the loop; otherwise like `get`."""
        timeout = check_timeout(timeout)
        awake = asyncio.Event()
        sleeper = (asyncio.get_running_loop(), awake)
        try:
            async with asyncio.timeout(timeout):
                while True:
                    with self._lock:
                        awake.clear()
                        event = self._next()
                        if event is not None or self._ended:
                            return event
                        self._sleepers.add(sleeper)
                    await awake.wait()
        except TimeoutError:
            return None
        finally:
            with self._lock:
                self._sleepers.discard(sleeper)

    @property
    def ended(self) -> bool:
        """Return whether nothing more will come."""
        with self._lock:
            return self._ended and not self._waiting()

    def close(self) -> None:
        """End it: nothing more comes, and whoever waits goes on."""
        with self._lock:
            self._progress.clear()
            self._closes.clear()
            self._others.clear()
            self._dropped, self._reason = 0, None
            self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Event:
        self._before_sync()
        event = self.get()
        if event is None:
            raise StopIteration
        return event

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        event = await self.get_async()
        if event is None:
            raise StopAsyncIteration
        return event

    # -- telling, from any thread

    def wants(self, run_id: int, kind: str) -> bool:
        """Return whether to tell this subscriber."""
        if self.run_id is not None and run_id != self.run_id:
            return False
        return kind in self.kinds or (kind == "closed" and self._until_closed)

    @property
    def wants_progress(self) -> bool:
        """Return whether runs are to be read for this subscriber."""
        return self._until_closed or bool({"progress", "closed"} & self.kinds)

    @property
    def waits_for_hints(self) -> bool:
        """Return whether the end is to wait a little for the last lines and failures."""
        return self._until_closed and bool({"log", "item_failed"} & self.kinds)

    def put(self, event: Event) -> None:
        """Add an event, at once, whoever takes it or not."""
        with self._lock:
            if self._ended:
                return
            self._numbers += 1
            numbered = (self._numbers, event)
            if event.kind == "progress":
                if replaced := self._progress.pop(event.run_id, None):
                    numbered = (self._numbers, _with_fractions(event, replaced[1]))
                self._progress[event.run_id] = numbered
            elif event.kind == "closed":
                self._closes.append(numbered)
            else:
                self._others.append(numbered)
            while self._waiting() > self._limit:
                self._drop()
            self._wake()

    def missed(self) -> None:
        """Say that events may have been missed."""
        with self._lock:
            if not self._ended:
                self._reason = self._reason or "reconnected"
                self._wake()

    def fail(self, error: errors.FanoutError) -> None:
        """End it with an error, after what waits already."""
        with self._lock:
            if not self._ended:
                self._error = error
                self._end()

    # -- with the lock held

    def _waiting(self) -> int:
        return len(self._progress) + len(self._closes) + len(self._others)

    def _drop(self) -> None:
        self._dropped += 1
        self._reason = "overflow"
        if self._others:
            self._others.popleft()
        elif self._progress:
            self._progress.pop(next(iter(self._progress)))
        else:
            self._closes.popleft()

    def _next(self) -> Event | None:
        while True:
            event = self._taken()
            if event is None and self._error is not None:
                error, self._error = self._error, None
                raise error
            if event is not None and event.kind == "closed" and self._until_closed:
                self._end()
            if event is None or event.kind in self.kinds:
                return event

    def _taken(self) -> Event | None:
        if self._reason is not None:
            data = {"reason": self._reason, "dropped": self._dropped}
            self._dropped, self._reason = 0, None
            return Event(run_id=self.run_id or 0, kind="resync", data=data, at=now())
        queues = [queue for queue in (self._closes, self._others) if queue]
        first = next(iter(self._progress.values()), None)
        if self._snapshot_due and not self._ended:
            # How the run stands comes first, whatever was told while that was read.
            if first is None and not self._closes:
                return None
            self._snapshot_due = False
            queues = [] if first is not None else queues
        oldest = min(queues, key=lambda queue: queue[0][0], default=None)
        if first is not None and (oldest is None or first[0] < oldest[0][0]):
            return self._progress.pop(first[1].run_id)[1]
        return None if oldest is None else oldest.popleft()[1]

    def _end(self) -> None:
        self._ended = True
        self._wake()

    def _wake(self) -> None:
        self._lock.notify_all()
        for loop, awake in self._sleepers:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(awake.set)


def _with_fractions(event: Event, before: Event) -> Event:
    """Add to an event the fractions of one that it takes the place of, the latest of them."""
    if not before.data.get("items"):
        return event
    latest = event.data.get("items", {})
    items = {place: told for place, told in before.data["items"].items() if place not in latest}
    items |= latest
    for place in list(items)[:-_FRACTIONS]:
        del items[place]
    return dataclasses.replace(event, data={**event.data, "items": items})


def check_run_id(run_id: Any) -> int:
    """Return a run's id, if it may be one.

    Raises:
        ConfigurationError: it is no whole number.
        RunNotFound: no run can have it.
    """
    if not isinstance(run_id, int) or isinstance(run_id, bool):
        raise errors.ConfigurationError(
            f"run_id={run_id!r}: give a run's id, a whole number; int() makes one of its text"
        )
    if not 0 < run_id <= LARGEST_ID:
        raise errors.RunNotFound(run_id)
    return run_id


def check_limit(limit: Any) -> int:
    """Return how many are wanted at most, if that is a number of things.

    Raises:
        ConfigurationError: it is not.
    """
    settings.check_int("limit", limit, 1)
    return int(limit)


def check_timeout(timeout: Any) -> float | None:
    """Return how long to wait, if that is a number of seconds; ``None`` = for ever.

    Raises:
        ConfigurationError: it is not.
    """
    if timeout is None:
        return None
    try:
        seconds = float("nan") if isinstance(timeout, bool | str) else float(timeout)
    except (TypeError, ValueError, OverflowError):
        seconds = float("nan")
    if math.isnan(seconds):
        raise errors.ConfigurationError(
            f"timeout={timeout!r}: give seconds, or None to wait for ever"
        )
    return seconds


def _checked_kinds(kinds: Iterable[str] | None) -> frozenset[str]:
    found = KINDS if kinds is None else frozenset([kinds] if isinstance(kinds, str) else kinds)
    if found - KINDS:
        raise errors.ConfigurationError(
            f"there are no events of kind {', '.join(sorted(found - KINDS))}; choose of "
            f"{', '.join(sorted(KINDS))}"
        )
    return found | {"resync"}
