"""Live events of a process: hints from the database, and progress read once for all subscribers.

Notifications say what to look at; beside them every run that somebody watches is read once a
second, so that all goes on, only later, where nothing can listen.
"""

from __future__ import annotations

import dataclasses
import datetime
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from fanout_procrastinate import database, errors, hub, models, store, subscriptions, telling

logger = logging.getLogger(__name__)

_READ_SECONDS = 0.2
_POLL_SECONDS = 1.0
_CLOSED_POLL_SECONDS = 5.0
_LINGER_SECONDS = 1.0
_RUNS = 200


@dataclasses.dataclass(slots=True)
class _Watched:
    """A run that somebody watches."""

    read_at: float = float("-inf")
    changed: bool = True
    closed: bool = False
    items: dict[int, float] = dataclasses.field(default_factory=dict)

    def due_at(self) -> float:
        poll = _CLOSED_POLL_SECONDS if self.closed else _POLL_SECONDS
        return self.read_at + (_READ_SECONDS if self.changed else poll)


class Events:
    """Give live events to any number of subscribers, over one connection that listens.

    Get it as ``FanOut.of(app).events``. A thread and a connection of the library's own read the
    progress of what is watched, at most five times a second for each run, however many watch it.

    Args:
        connect: opens a connection of the library's own.
        listening: the process's hub.
        before_sync: called where a ``for`` is about to wait; it raises where that may not be.

    Example:
        >>> with FanOut.of(app).events.subscribe(kinds={"log"}) as lines:  # doctest: +SKIP
        ...     for line in lines:
        ...         print(line.run_id, line.data)
    """

    def __init__(
        self,
        connect: database.Connect,
        listening: hub.Hub,
        before_sync: Callable[[], None] = lambda: None,
    ) -> None:
        self._connect = connect
        self._hub = listening
        self._before_sync = before_sync
        self._changed = threading.Condition()
        self._subscribers: weakref.WeakSet[subscriptions.Subscription] = weakref.WeakSet()
        self._runs: dict[int, _Watched] = {}
        self._thread: threading.Thread | None = None
        self._closing = False
        self._woken = False
        self._heard_before = False
        self._listed_at = float("-inf")
        self._failing = False

    def subscribe(
        self,
        run_id: int | None = None,
        *,
        kinds: Iterable[str] | None = None,
        limit: int = subscriptions.LIMIT,
        until_closed: bool = False,
    ) -> subscriptions.Subscription:
        """Return a subscription to the events of one run, or of all, from now on.

        A run's progress as it stands comes first, of all runs that of the open ones. ``closed``
        comes once for each generation, after its last progress.

        Args:
            run_id: the run; ``None`` = all of them.
            kinds: only events of these kinds, and ``resync``.
            limit: how many events may wait to be taken.
            until_closed: end it after ``closed``, of a subscription to one run.

        Raises:
            ConfigurationError: there is no such kind, or a value cannot work.
        """
        made = subscriptions.Subscription(
            run_id,
            kinds=kinds,
            limit=limit,
            until_closed=until_closed,
            before_sync=self._before_sync,
        )
        if made.ended:  # no run can have this id: it would fail the reading of all others
            return made
        with self._changed:
            self._closing = False
            self._subscribers.add(made)
            if run_id is None:
                self._listed_at = float("-inf")
            elif run_id in self._runs:
                self._runs[run_id].changed = True
            if self._thread is None:
                self._begin()
            self._wake()
        return made

    def close(self) -> None:
        """End all subscriptions, and wait for the thread."""
        with self._changed:
            self._closing = True
            ended, thread = list(self._subscribers), self._thread
            self._subscribers.clear()
            self._wake()
        for one in ended:
            one.close()
        if thread is not None and thread.is_alive():
            thread.join(10.0)

    # -- what the hub hears, in its thread

    def _heard(self, raw: Mapping[str, Any]) -> None:
        kind, run_id = raw.get("event"), raw.get("run")
        if kind == "listening":
            self._look_again()
        elif not isinstance(run_id, int):
            return
        elif kind == "item_failed":
            self._tell_each(run_id, "item_failed", raw.get("items"), raw.get("more"), "more")
        elif kind == "log":
            self._tell_each(run_id, "log", raw.get("lines"), raw.get("dropped"), "dropped")
        else:
            self._note(run_id, raw.get("items"))

    def _look_again(self) -> None:
        with self._changed:
            again, self._heard_before = self._heard_before, True
            for watched in self._runs.values():
                watched.changed = True
            self._listed_at = float("-inf")
            self._wake()
            subscribers = list(self._subscribers)
        if again:
            for one in subscribers:
                one.missed()

    def _tell_each(
        self, run_id: int, kind: subscriptions.Kind, listed: Any, rest: Any, rest_name: str
    ) -> None:
        found = [dict(one) for one in listed or () if isinstance(one, Mapping)]
        if rest:
            found.append({rest_name: rest})
        with self._changed:
            subscribers = [one for one in self._subscribers if one.wants(run_id, kind)]
        for data in found:
            event = subscriptions.Event(
                run_id=run_id, kind=kind, at=_moment(data.pop("at", None)), data=data
            )
            for one in subscribers:
                one.put(event)

    def _note(self, run_id: int, fractions: Any) -> None:
        with self._changed:
            if not any(_watches(one, run_id) for one in self._subscribers):
                return
            watched = self._runs.setdefault(run_id, _Watched())
            watched.changed = True
            if isinstance(fractions, Mapping):
                watched.items.update((int(place), value) for place, value in fractions.items())
            self._wake()

    def _wake(self) -> None:
        self._woken = True
        self._changed.notify_all()

    # -- the thread that reads

    def _begin(self) -> None:
        self._heard_before = self._hub.listening
        self._hub.subscribe(self._heard)
        self._thread = threading.Thread(target=self._loop, name="fanout-feed", daemon=True)
        self._thread.start()

    def _loop(self) -> None:
        own = database.Database(self._connect, size=1)
        left_at = time.monotonic()
        try:
            while True:
                with self._changed:
                    if self._subscribers:
                        left_at = time.monotonic()
                    elif self._closing or time.monotonic() - left_at > _LINGER_SECONDS:
                        self._thread = None
                        self._runs.clear()
                        self._hub.unsubscribe(self._heard)
                        return
                self._read(own)
                with self._changed:
                    if not self._woken:
                        self._changed.wait(self._pause())
                    self._woken = False
        finally:
            own.close()

    def _pause(self) -> float:
        # Those who left without a word are noticed by a look now and then.
        due = [watched.due_at() for watched in self._runs.values()]
        left = min(due, default=float("inf")) - time.monotonic()
        return max(0.0, min(left, _LINGER_SECONDS / 2))

    def _read(self, own: database.Database) -> None:
        """Read what is due and tell it; an error is tried again a second later."""
        try:
            self._list_open(own)
            if due := self._due():
                found = own.run(store.progresses(list(due)))
                self._failing = False
                for run_id, items in due.items():
                    self._tell(own, run_id, found.get(run_id), items)
        except errors.DatabaseError as exc:
            if exc.transient:
                self._log_failing(exc)
            else:
                self._fail_all(exc)
        except errors.FanoutError as exc:
            self._fail_all(exc)
        except Exception:
            logger.exception("Unexpected error", extra={"action": "events_read_failed"})

    def _list_open(self, own: database.Database) -> None:
        with self._changed:
            if not any(one.run_id is None and one.wants_progress for one in self._subscribers):
                return
            watched = sum(not one.closed for one in self._runs.values())
            if time.monotonic() - self._listed_at < _POLL_SECONDS * max(1.0, watched / 50):
                return
            self._listed_at = time.monotonic()
        listed = own.run(store.open_runs(_RUNS))
        with self._changed:
            for run_id in listed:
                self._runs.setdefault(run_id, _Watched())

    def _due(self) -> dict[int, dict[int, float]]:
        """Return the runs to be read now, each with the fractions told of its items."""
        now = time.monotonic()
        due: dict[int, dict[int, float]] = {}
        with self._changed:
            named = {one.run_id for one in self._subscribers if one.wants_progress}
            for run_id in named - {None} - set(self._runs):
                assert run_id is not None  # noqa: S101 - taken out above
                self._runs[run_id] = _Watched()
            for run_id, watched in list(self._runs.items()):
                if None not in named and run_id not in named:
                    del self._runs[run_id]
                elif watched.due_at() <= now:
                    due[run_id], watched.items = watched.items, {}
                    watched.read_at, watched.changed = now, False
        return due

    def _tell(
        self,
        own: database.Database,
        run_id: int,
        progress: models.Progress | None,
        items: Mapping[int, float],
    ) -> None:
        with self._changed:
            subscribers = [one for one in self._subscribers if _watches(one, run_id)]
            if run_id in self._runs:
                self._runs[run_id].closed = progress is not None and progress.closed
            if progress is None or (
                progress.closed and all(one.run_id is None for one in subscribers)
            ):
                self._runs.pop(run_id, None)
        again = False
        for one in subscribers:
            if progress is not None:
                again = not telling.advance(own, one, progress, items) or again
            elif one.run_id is not None:
                one.fail(errors.RunNotFound(run_id))
        if again:
            with self._changed:
                self._runs.setdefault(run_id, _Watched()).changed = True

    def _log_failing(self, exc: errors.FanoutError) -> None:
        if not self._failing:
            logger.warning(
                "Progress cannot be read for those who watch; trying again: %s",
                exc,
                extra={"action": "events_read_failed", "exception": str(exc)},
            )
        self._failing = True

    def _fail_all(self, exc: errors.FanoutError) -> None:
        with self._changed:
            subscribers = [one for one in self._subscribers if one.wants_progress]
        for one in subscribers:
            one.fail(exc)
            with self._changed:
                self._subscribers.discard(one)


def _watches(one: subscriptions.Subscription, run_id: int) -> bool:
    return one.run_id in (None, run_id) and one.wants_progress and not one.ended


def _moment(told: Any) -> datetime.datetime:
    try:
        return datetime.datetime.fromisoformat(told)
    except (TypeError, ValueError):
        return subscriptions.now()
