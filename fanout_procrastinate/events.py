"""One LISTEN connection per process for any number of subscribers. Events are hints.

A notification means "look again": every subscriber has a poll beside it, and losing one never
harms. The connection is the library's own, autocommit, always reading, and does nothing else.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from typing import Any

import psycopg

from fanout_procrastinate import database

logger = logging.getLogger(__name__)

CHANNEL = "fanout_v1"

_LINGER_SECONDS = 1.0
_READ_SECONDS = 0.5
_LONGEST_PAUSE_SECONDS = 30.0

Subscriber = Callable[[dict[str, Any]], None]


class Hub:
    """Listen while somebody is subscribed, in a thread of its own.

    Args:
        connect: opens a connection of the library's own.
    """

    def __init__(self, connect: database.Connect) -> None:
        self._connect = connect
        self._lock = threading.Lock()
        self._subscribers: set[Subscriber] = set()
        self._thread: threading.Thread | None = None
        self._changed = threading.Event()
        self._closing = False

    def subscribe(self, subscriber: Subscriber) -> None:
        """Call this with each event from now on, from the hub's thread; it must not block.

        After each (re)connection it is called with ``{"event": "listening"}``: look again.
        """
        with self._lock:
            self._closing = False
            self._subscribers.add(subscriber)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._loop, name="fanout-events", daemon=True
                )
                self._thread.start()

    def unsubscribe(self, subscriber: Subscriber) -> None:
        """Call this no more."""
        with self._lock:
            self._subscribers.discard(subscriber)
        self._changed.set()

    def close(self) -> None:
        """Stop listening, and wait for the thread."""
        with self._lock:
            self._closing = True
            self._subscribers.clear()
            thread = self._thread
        self._changed.set()
        if thread is not None:
            thread.join(10.0)

    def _loop(self) -> None:
        pause = 0.5
        while not self._ended():
            try:
                with self._connect() as connection:
                    connection.autocommit = True
                    connection.execute(f"LISTEN {CHANNEL}")
                    pause = 0.5
                    self._publish({"event": "listening"})
                    self._read(connection)
            except (psycopg.Error, OSError) as exc:
                logger.warning(
                    "Not listening for events; polling goes on",
                    extra={"action": "listen_failed", "exception": str(exc)},
                )
                self._changed.wait(pause)
                pause = min(pause * 2, _LONGEST_PAUSE_SECONDS)
            except Exception:
                logger.exception("Unexpected error", extra={"action": "listen_failed"})
                self._changed.wait(pause)
                pause = min(pause * 2, _LONGEST_PAUSE_SECONDS)

    def _ended(self) -> bool:
        """Whether nobody is left; the thread says so under the lock, for a new one to start."""
        self._changed.clear()
        if not self._subscribers and not self._closing:
            self._changed.wait(_LINGER_SECONDS)
        with self._lock:
            if self._subscribers:
                return False
            self._thread = None
            return True

    def _read(self, connection: psycopg.Connection[Any]) -> None:
        while self._subscribers:
            for notification in connection.notifies(timeout=_READ_SECONDS, stop_after=1):
                try:
                    event = json.loads(notification.payload)
                except ValueError:
                    continue
                if isinstance(event, dict):
                    self._publish(event)

    def _publish(self, event: dict[str, Any]) -> None:
        with self._lock:
            subscribers = list(self._subscribers)
        for subscriber in subscribers:
            try:
                subscriber(event)
            except Exception:
                logger.exception("Subscriber failed", extra={"action": "event_failed"})
