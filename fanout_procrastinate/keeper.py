"""A thread of its own in every worker process: it renews and it sweeps.

The host worker's heartbeat will not do: it stops during a graceful shutdown, and whatever runs on
the event loop is silent while a child blocks that loop.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import random
import threading
import time
from collections.abc import Callable
from typing import Any

from fanout_procrastinate import errors, models, store, sweeper

logger = logging.getLogger(__name__)

_NO_SCHEMA_SECONDS = 60.0


@dataclasses.dataclass(eq=False, kw_only=True)
class Hold:
    """Something that this process holds as long as it renews it.

    Args:
        renew_call: the renewal, for what is not a slot; it answers whether we still hold it.
        holding: the slot, for slots; these are renewed all together.
        on_verdict: told ``lost``, ``stop`` or ``abort``, from the keeper's thread.
        renew_until: ``time.monotonic()`` after which it is renewed no more: past its time limit
            an item may be taken over, whatever its thread still does. ``None`` = no limit.
    """

    on_verdict: Callable[[str], None]
    holding: models.Holding | None = None
    renew_call: store.Call[bool] | None = None
    renew_until: float | None = None

    def expired(self, now: float) -> bool:
        return self.renew_until is not None and now > self.renew_until


class Keeper:
    """Time the renewals and sweeps of one process.

    Args:
        run: runs one call on a connection that nobody else uses.
        make_sweeper: makes the sweeper, told how it is to run its calls.
        renew_interval: seconds between renewals.
        sweep_interval: seconds between sweeps; in the middle between two, it is looked for who is
            silent.
        renew_besides: renews what is neither a slot nor a hold.
        abandoned: whether nobody can end what is held here any more: nothing is renewed then.
    """

    def __init__(
        self,
        run: store.RunCall,
        make_sweeper: Callable[[store.RunCall], sweeper.Sweeper],
        *,
        renew_interval: float,
        sweep_interval: float,
        renew_besides: Callable[[], None] = lambda: None,
        abandoned: Callable[[], bool] = lambda: False,
    ) -> None:
        self._run = run
        self.sweeper = make_sweeper(self._run_in_sweep)
        self._renew_interval = renew_interval
        self._look_interval = sweep_interval / 2
        self._renew_besides = renew_besides
        self._abandoned = abandoned
        self._holds: set[Hold] = set()
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._stopping = False
        self._next_renewal = math.inf
        self._thread = threading.Thread(target=self._loop, name="fanout-keeper", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout: float = 3.0) -> None:
        """Stop the thread and wait for it, `timeout` seconds at most."""
        self._stopping = True
        self._wake.set()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def add(self, hold: Hold) -> None:
        """Renew this from now on."""
        with self._lock:
            self._holds.add(hold)

    def remove(self, hold: Hold) -> None:
        """Renew this no more."""
        with self._lock:
            self._holds.discard(hold)

    def renew_once(self) -> None:
        """Renew everything held, and pass on what the database says of it."""
        now = time.monotonic()
        with self._lock:
            holds = [hold for hold in self._holds if not hold.expired(now)]
        slots = {hold.holding: hold for hold in holds if hold.holding is not None}
        if slots:
            for holding, verdict in self._run(store.renew(list(slots), self._renew_interval / 2)):
                slots[holding].on_verdict(verdict)
        for hold in holds:
            if hold.renew_call is not None and not self._run(hold.renew_call):
                with self._lock:
                    held = hold in self._holds
                if held:
                    hold.on_verdict("lost")
        self._renew_besides()

    def sweep_once(self, *, whole: bool = True) -> float:
        """Sweep, or only look for who is silent; return the seconds until the next look."""
        try:
            report = self.sweeper.sweep_once() if whole else self.sweeper.look_once()
        except errors.SchemaError as exc:
            _log_failure("sweep_failed", exc)
            return max(self._look_interval, _NO_SCHEMA_SECONDS)
        # Who was found silent is looked at again as soon as that may decide.
        return self.sweeper.second_look if report.done.get("marked") else self._look_interval

    def _loop(self) -> None:
        self._next_renewal = time.monotonic() + self._renew_interval
        # At the start too, at a time of its own for each process.
        next_look = time.monotonic() + min(1.0, self._look_interval) * random.random()  # noqa: S311
        whole = True
        while not self._stop_requested():
            self._wake.wait(max(0.0, min(self._next_renewal, next_look) - time.monotonic()))
            if self._stop_requested() or self._abandoned():
                return
            if not self._renew_if_due() and time.monotonic() >= next_look:
                step = functools.partial(self.sweep_once, whole=whole)
                wait = self._guarded(step, "sweep_failed")
                next_look = time.monotonic() + (self._look_interval if wait is None else wait)
                whole = not whole

    def _run_in_sweep(self, call: store.Call[Any]) -> Any:
        # However long a sweep is, no renewal waits for it.
        self._renew_if_due()
        return self._run(call)

    def _renew_if_due(self) -> bool:
        if time.monotonic() < self._next_renewal or self._stop_requested() or self._abandoned():
            return False
        self._next_renewal = time.monotonic() + self._renew_interval
        if self._guarded(self.renew_once, "renewal_failed") is None:
            # After an outage nobody may be judged before he had the chance to renew.
            self._next_renewal = time.monotonic() + min(1.0, self._renew_interval / 2)
        return True

    def _stop_requested(self) -> bool:
        return self._stopping

    def _guarded(self, step: Callable[[], Any], action: str) -> Any:
        try:
            result = step()
        except errors.FanoutError as exc:
            _log_failure(action, exc)
            return None
        except Exception:
            logger.exception("Unexpected error", extra={"action": action})
            return None
        return True if result is None else result


def _log_failure(action: str, error: errors.FanoutError) -> None:
    words = action.replace("_", " ").capitalize()
    extra = {"action": action, "exception": str(error)}
    logger.warning("%s: %s", words, error, extra=extra)
