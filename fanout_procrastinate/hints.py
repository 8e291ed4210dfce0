"""Hints of a worker process for whoever watches: few, small, and never in the work's way.

What happened is only noted where it happens. A thread of its own sends it, at most five times a
second for each run, in a statement of its own: no event can undo state, or hold it up.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from fanout_procrastinate import errors, sanitise, store, subscriptions

logger = logging.getLogger(__name__)

MAX_BYTES = 7000
"""Of UTF-8 JSON in one notification; the server takes fewer than 8,000."""

_SEND_SECONDS = 0.2
_FAILURES_PER_SECOND = 20
_LINES_PER_SECOND = 50
_FRACTIONS_PER_HINT = 100
_MESSAGE_CHARS = 200
_KEY_BYTES = 500
_LINE_BYTES = 3000
_TEXTS_PER_STATEMENT = 200
_WAITING = 200  # of a kind and run, while the database does not answer
_LAST_SECONDS = 5.0

current: contextvars.ContextVar[Sender | None] = contextvars.ContextVar(
    "fanout_hints", default=None
)
"""The sender of the process whose job runs here."""


class _Rate:
    """Allow so many of something in each second."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._begun = float("-inf")
        self._count = 0

    def allows(self, now: float) -> bool:
        if now - self._begun >= 1.0:
            self._begun, self._count = now, 0
        self._count += 1
        return self._count <= self._limit


@dataclasses.dataclass(slots=True)
class _Run:
    """What is to be told of one run."""

    failures: _Rate = dataclasses.field(default_factory=lambda: _Rate(_FAILURES_PER_SECOND))
    sent_at: float = float("-inf")
    changed: bool = False
    fractions: dict[int, float] = dataclasses.field(default_factory=dict)
    failed: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    more: int = 0
    lines: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    dropped: int = 0

    def pending(self) -> bool:
        return bool(
            self.changed or self.fractions or self.failed or self.more or self.lines or self.dropped
        )

    def texts(self, run_id: int) -> Iterator[str]:
        """Yield the notifications, and forget what they tell."""
        if self.changed or self.fractions:
            places = list(itertools.islice(self.fractions, _FRACTIONS_PER_HINT))
            items = {str(place): self.fractions.pop(place) for place in places}
            told = {"run": run_id, "event": "progress"} | ({"items": items} if items else {})
            yield sanitise.to_json(told)
        failed, more, self.failed, self.more = self.failed, self.more, [], 0
        lines, dropped, self.lines, self.dropped = self.lines, self.dropped, [], 0
        head = {"run": run_id, "event": "item_failed"}
        yield from packed(head, "items", failed, {"more": more} if more else {})
        head = {"run": run_id, "event": "log"}
        yield from packed(head, "lines", lines, {"dropped": dropped} if dropped else {})
        self.changed = False


class Sender:
    """Send the hints of one process, from a thread that is started by the first.

    Args:
        run: runs one call on a connection of the library's own, autocommit.
        redact: what log lines carry is passed through it; it returns plain JSON types.
    """

    def __init__(
        self,
        run: store.RunCall,
        redact: Callable[[Any], Any] = sanitise.plain,
    ) -> None:
        self._run = run
        self._redact = redact
        self._noted = threading.Condition()
        self._runs: dict[int, _Run] = {}
        self._lines = _Rate(_LINES_PER_SECOND)
        self._thread: threading.Thread | None = None
        self._closing = False
        self._failing = False

    def changed(self, run_id: int) -> None:
        """Tell that the run has moved."""
        with self._noting(run_id) as run:
            run.changed = True

    def failed(self, run_id: int, position: int, key: str | None, error: Mapping[str, Any]) -> None:
        """Tell that an item failed for good; beyond 20 a second the rest are only counted."""
        with self._noting(run_id) as run:
            if len(run.failed) >= _WAITING or not run.failures.allows(time.monotonic()):
                run.more += 1
                return
            run.failed.append(
                {
                    "position": position,
                    "key": _cut(key, _KEY_BYTES),
                    "type": _cut(str(error.get("type")), _KEY_BYTES),
                    "message": str(error.get("message", ""))[:_MESSAGE_CHARS],
                    "at": subscriptions.now().isoformat(),
                }
            )

    def log(
        self, run_id: int, position: int, key: str | None, message: str, data: Mapping[str, Any]
    ) -> None:
        """Tell a line of a child's; beyond 50 a second the rest are only counted."""
        with self._noting(run_id) as run:
            if len(run.lines) >= _WAITING or not self._lines.allows(time.monotonic()):
                run.dropped += 1
                return
        line = {
            "position": position,
            "key": _cut(key, _KEY_BYTES),
            "message": _cut(str(message), _LINE_BYTES),
            "data": _fitting(self._redact(dict(data)), _LINE_BYTES),
            "at": subscriptions.now().isoformat(),
        }
        with self._noting(run_id) as run:
            run.lines.append(line)

    def progress(self, run_id: int, position: int, fraction: float) -> None:
        """Tell how far an item is; of several only the latest is sent."""
        with self._noting(run_id) as run:
            run.fractions.pop(position, None)
            run.fractions[position] = round(fraction, 4)
            if len(run.fractions) > _WAITING:
                del run.fractions[next(iter(run.fractions))]

    def close(self) -> None:
        """Send what is left, and wait for the thread."""
        with self._noted:
            self._closing = True
            self._noted.notify_all()
            thread = self._thread
        if thread is not None and thread.is_alive():
            thread.join(_LAST_SECONDS)

    @contextlib.contextmanager
    def _noting(self, run_id: int) -> Iterator[_Run]:
        """Hold the lock while something is noted of a run, and see to it that it is sent."""
        with self._noted:
            run = self._runs.setdefault(run_id, _Run())
            pending = run.pending()
            yield run
            if pending or self._closing:
                return
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name="fanout-hints", daemon=True)
                self._thread.start()
            self._noted.notify()

    def _loop(self) -> None:
        while True:
            with self._noted:
                texts = self._due()
                if not texts:
                    if self._closing:
                        return
                    self._noted.wait(self._pause())
                    continue
            for first in range(0, len(texts), _TEXTS_PER_STATEMENT):
                self._send(texts[first : first + _TEXTS_PER_STATEMENT])

    def _due(self) -> list[str]:
        now = time.monotonic()
        texts: list[str] = []
        for run_id, run in list(self._runs.items()):
            rested = now - run.sent_at
            if run.pending():
                if rested >= _SEND_SECONDS or self._closing:
                    run.sent_at = now
                    texts += run.texts(run_id)
            elif rested > 1.0:  # its rates are of no use any more
                del self._runs[run_id]
        return texts

    def _pause(self) -> float | None:
        due = [run.sent_at + _SEND_SECONDS for run in self._runs.values() if run.pending()]
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _send(self, texts: list[str]) -> None:
        try:
            self._run(store.hint(texts))
        except errors.FanoutError as exc:
            if not self._failing:
                logger.warning(
                    "Events could not be sent; whoever watches sees them late or not: %s",
                    exc,
                    extra={"action": "hint_failed", "exception": str(exc)},
                )
            self._failing = True
        except Exception:
            logger.exception("Unexpected error", extra={"action": "hint_failed"})
        else:
            self._failing = False


def packed(
    head: Mapping[str, Any], name: str, listed: Iterable[Mapping[str, Any]], rest: Mapping[str, Any]
) -> Iterator[str]:
    """Yield JSON texts of at most `MAX_BYTES` that list these; the last one tells the rest."""
    room = MAX_BYTES - sanitise.json_size(sanitise.to_json({**head, name: [], **rest}))
    parts: list[Any] = []
    size = 0
    for one in listed:
        bytes_ = sanitise.json_size(sanitise.encode(one).text) + 1
        if parts and size + bytes_ > room:
            yield sanitise.encode({**head, name: parts}).text
            parts, size = [], 0
        parts.append(one)
        size += bytes_
    if parts or rest:
        yield sanitise.encode({**head, name: parts, **rest}).text


def _cut(text: str | None, max_bytes: int) -> str | None:
    if text is None:
        return None
    # Cleaning ten megabytes of which two kilobytes are kept would be a waste.
    return sanitise.cut_text(sanitise.clean_text(text[: max_bytes + 1]), max_bytes)[0]


def _fitting(value: Any, max_bytes: int) -> Any:
    """Return plain JSON types as they are; what is too large as the start of its text."""
    text = sanitise.encode(value).text
    if sanitise.json_size(text) <= max_bytes:
        return value
    return {"cut": sanitise.cut_text(text, max_bytes)[0]}
