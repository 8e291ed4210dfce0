"""Functions of the user's that are told what happens, in the process where it happens.

They run one after another in a thread of their own, or on the event loop that they are declared
for: whatever they do, the work goes on.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import inspect
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from fanout_procrastinate import sanitise, settings

logger = logging.getLogger(__name__)

HIDDEN = "[could not be redacted]"

_WAITING = 1000
_AGAIN_SECONDS = 3600.0
_LAST_SECONDS = 5.0


def redacted(configured: settings.Settings, value: Any) -> Any:
    """Return a payload, a result or the data of a log line as it may be shown: plain JSON types.

    The app's ``redact`` gets a copy, and where it raises, a text stands in its place.
    """
    shown = sanitise.plain(value)
    if configured.redact is None:
        return shown
    try:
        return sanitise.plain(configured.redact(shown))
    except BaseException:  # whatever it does, nothing unredacted is shown
        logger.exception("Redaction failed", extra={"action": "hook_failed", "hook": "redact"})
        return HIDDEN


class Hooks:
    """Call the app's hooks without being held up by them.

    Args:
        configured: the app's settings, which have them.
        loop: where async hooks run; ``None`` = on a loop of their own.
    """

    def __init__(
        self, configured: settings.Settings, loop: asyncio.AbstractEventLoop | None = None
    ) -> None:
        self._settings = configured
        self._loop = loop
        self._calls: collections.deque[tuple[str, Callable[..., Any], Mapping[str, Any]]] = (
            collections.deque()
        )
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._running: concurrent.futures.Future[BaseException | None] | None = None
        self._told_at: dict[int, float] = {}
        self._busy = False
        self._closing = False
        self._ending = False

    def item_failed(
        self, run_id: int, position: int, key: str | None, error: Mapping[str, Any]
    ) -> None:
        """Tell that an item failed for good."""
        hook = self._settings.on_item_failed
        if hook is not None:
            about = {"run_id": run_id, "position": position, "key": key, "error": error}
            self._add("on_item_failed", hook, about)

    def stuck(self, run_id: int, closed: bool, reason: str) -> None:
        """Tell that a run was closed as stuck, or once an hour that it waits for a worker."""
        hook = self._settings.on_stuck
        if hook is None or not (closed or self._is_news(run_id)):
            return
        self._add("on_stuck", hook, {"run_id": run_id, "closed": closed, "reason": reason})

    def _is_news(self, run_id: int) -> bool:
        now = time.monotonic()
        with self._changed:
            for told, at in list(self._told_at.items()):
                if now - at >= _AGAIN_SECONDS:
                    del self._told_at[told]
            return self._told_at.setdefault(run_id, now) == now

    def drain(self) -> None:
        """Wait a while for what is still to be called; not on the loop of the async ones."""
        with self._changed:
            self._changed.wait_for(lambda: not self._calls and not self._busy, _LAST_SECONDS)

    def close(self) -> None:
        """Wait a while for what is still to be called, and for the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None and thread.is_alive():
            thread.join(_LAST_SECONDS)

    def abandon(self) -> None:
        """Close where the loop is ending: async hooks are cancelled."""
        with self._changed:
            self._ending = True
            if self._running is not None:
                self._running.cancel()
        self.close()

    def _add(self, name: str, hook: Callable[..., Any], about: Mapping[str, Any]) -> None:
        with self._changed:
            if len(self._calls) >= _WAITING:
                logger.warning(
                    "Hook left out: too many wait already",
                    extra={"action": "hook_left_out", "hook": name, "run_id": about["run_id"]},
                )
                return
            self._calls.append((name, hook, about))
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="fanout-hooks", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                while not self._calls:
                    if self._closing:
                        return
                    self._changed.wait()
                name, hook, about = self._calls.popleft()
                self._busy = True
            try:
                self._call(hook, about)
            except BaseException:  # SystemExit too: later ones are called
                logger.exception(
                    "Hook failed",
                    extra={"action": "hook_failed", "hook": name, "run_id": about["run_id"]},
                )

    def _call(self, hook: Callable[..., Any], about: Mapping[str, Any]) -> None:
        result = hook(**about)
        if not inspect.isawaitable(result):
            return

        async def awaited() -> BaseException | None:
            try:
                await result
            except asyncio.CancelledError:
                if self._ending:
                    raise
                return asyncio.CancelledError("the hook cancelled itself")
            except BaseException as exc:  # noqa: BLE001 - it would break through the loop
                return exc
            return None

        raised = asyncio.run(awaited()) if self._loop is None else self._on_loop(awaited())
        if raised is not None:
            raise raised

    def _on_loop(self, code: Coroutine[Any, Any, BaseException | None]) -> BaseException | None:
        assert self._loop is not None  # noqa: S101 - asked before
        with self._changed:
            self._running = asyncio.run_coroutine_threadsafe(code, self._loop)
            if self._ending:
                self._running.cancel()
        return self._running.result()
