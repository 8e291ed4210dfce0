"""One LISTEN connection per process for any number of subscribers. Notifications are hints.

A notification means "look again": every subscriber has a poll beside it, and losing one never
harms. The connection is the library's own, autocommit, always reading, and does nothing else.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import psycopg

from fanout_procrastinate import database, errors

logger = logging.getLogger(__name__)

CHANNEL = "fanout_v1"

_LINGER_SECONDS = 1.0
_READ_SECONDS = 0.25
_FIRST_PAUSE_SECONDS = 0.5
_LONGEST_PAUSE_SECONDS = 30.0

Subscriber = Callable[[dict[str, Any]], None]


class Hub:
    """Listen while somebody is subscribed, and a moment longer, in a thread of its own.

    Args:
        connect: opens a connection of the library's own.
    """

    def __init__(self, connect: database.Connect) -> None:
        self._connect = connect
        self._lock = threading.Lock()
        self._subscribers: set[Subscriber] = set()
        self._thread: threading.Thread | None = None
        self._alone = threading.Event()
        self._closing = False
        self._listening = False

    @property
    def listening(self) -> bool:
        """Return whether events arrive at present."""
        return self._listening

    def subscribe(self, subscriber: Subscriber) -> None:
        """Call this with each event from now on, from the hub's thread; it must not block.

        After each (re)connection it is called with ``{"event": "listening"}``: look again.
        """
        with self._lock:
            self._closing = False
            self._alone.clear()
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
            if not self._subscribers:
                self._alone.set()

    def close(self) -> None:
        """Stop listening, and wait for the thread."""
        with self._lock:
            self._closing = True
            self._subscribers.clear()
            self._alone.set()
            thread = self._thread
        if thread is not None and thread.is_alive():
            thread.join(10.0)

    def _loop(self) -> None:
        pause = _FIRST_PAUSE_SECONDS
        while not self._ended():
            try:
                with self._connect() as connection:
                    connection.autocommit = True
                    connection.execute(f"LISTEN {CHANNEL}")
                    pause = _FIRST_PAUSE_SECONDS
                    self._listening = True
                    self._publish({"event": "listening"})
                    self._read(connection)
                continue
            except (psycopg.Error, OSError, errors.FanoutError) as exc:
                logger.warning(
                    "Not listening for events; polling goes on",
                    extra={"action": "listen_failed", "exception": str(exc)},
                )
            except Exception:
                logger.exception("Unexpected error", extra={"action": "listen_failed"})
            finally:
                self._listening = False
            self._alone.wait(pause)
            pause = min(pause * 2, _LONGEST_PAUSE_SECONDS)

    def _ended(self) -> bool:
        """Whether nobody is left; the thread says so under the lock, for a new one to start."""
        with self._lock:
            if self._subscribers:
                return False
            self._thread = None
            return True

    def _read(self, connection: psycopg.Connection[Any]) -> None:
        left_at = time.monotonic()
        while True:
            # A wait that follows another finds the connection still there.
            if self._subscribers:
                left_at = time.monotonic()
            elif self._closing or time.monotonic() - left_at > _LINGER_SECONDS:
                return
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
