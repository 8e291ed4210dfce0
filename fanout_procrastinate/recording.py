"""What a process works on, and how it ends: for hints, hooks, the log, measures and spans."""

from __future__ import annotations

import collections
import contextlib
import json
import logging
from collections.abc import Iterator, Sequence
from typing import Any

from fanout_procrastinate import (
    errors,
    hints,
    hooks,
    models,
    permits,
    reporter,
    settings,
    store,
    telemetry,
)

logger = logging.getLogger(__name__)

_TRACES = 1000
_UNKNOWN = models.Trace(name="unknown", child_task="unknown", waited=0.0, carrier={})


class Recorder:
    """Pass on what happens to all who want to know; none of them holds the work up.

    Args:
        configured: the app's settings.
        sender: of hints; ``None`` = events are off.
        called: the app's hooks.
        measures: of the process.
        run: runs one call without blocking the loop.
    """

    def __init__(
        self,
        configured: settings.Settings,
        sender: hints.Sender | None,
        called: hooks.Hooks,
        measures: telemetry.Telemetry,
        run: store.RunCall,
    ) -> None:
        self._hints = sender
        self._hooks = called if configured.on_item_failed is not None else None
        self._measures = measures
        self._run = run
        self._traces: collections.OrderedDict[int, models.Trace] = collections.OrderedDict()
        self._spans: dict[tuple[int | None, int | None], Any] = {}

    async def trace(self, run_id: int) -> models.Trace:
        """Return what spans and measures of a run carry; of an unknown one nothing."""
        found = self._traces.get(run_id)
        if found is None and self._measures.active:
            try:
                found = await self._run(store.trace(run_id))
            except errors.FanoutError as exc:
                logger.info(
                    "Spans of run %s are without a link: %s",
                    run_id,
                    exc,
                    extra={"action": "trace_unknown", "run_id": run_id, "exception": str(exc)},
                )
            if found is not None:
                self._traces[run_id] = found
                while len(self._traces) > _TRACES:
                    self._traces.popitem(last=False)
        return found or _UNKNOWN

    # -- what a reporter tells

    async def begin(self, run_id: int) -> None:
        """Get ready for a run."""
        await self.trace(run_id)

    def handed(self, run_id: int, reply: models.Reply) -> None:
        """Begin the item's span, for the job that works on it."""
        permits.note_item(run_id, reply.position)
        holder = telemetry.in_hand.get()
        if holder is None or reply.epoch is None or not self._measures.tracing:
            return
        trace = self._traces.get(run_id, _UNKNOWN)
        about = {
            "fanout.run_id": run_id,
            "fanout.position": reply.position,
            "fanout.key": reply.item_key,
            "fanout.attempt": (reply.failures or 0) + 1,
        }
        with _harmless(run_id):
            span = self._measures.begin_item(trace.child_task, trace.carrier, about)
            holder.span = self._spans[reply.epoch, reply.position] = span

    def recorded(self, outcomes: Sequence[reporter.Recorded]) -> None:
        """Pass on the outcomes of one report."""
        run_id = outcomes[0].run_id
        with _harmless(run_id):
            for one in outcomes:
                if one.entry.outcome == "failed":
                    self._failed(one)
            if self._hints is not None:
                self._hints.changed(run_id)
        with _harmless(run_id):
            if self._measures.active:
                self._measure(self._traces.get(run_id, _UNKNOWN).child_task, outcomes)

    def over(self, epoch: int) -> None:
        """End the span of an item whose outcome was not recorded."""
        with _harmless(None):
            for place in [place for place in self._spans if place[0] == epoch]:
                self._measures.end_item(self._spans.pop(place), "lost", None)

    def _measure(self, task: str, outcomes: Sequence[reporter.Recorded]) -> None:
        counts = collections.Counter(one.entry.outcome or "" for one in outcomes)
        self._measures.reported(task, counts)
        for one in outcomes:
            outcome = one.entry.outcome or ""
            self._measures.took(task, outcome, one.seconds)
            span = self._spans.pop((one.entry.epoch, one.entry.position), None)
            self._measures.end_item(span, outcome, _record(one) if one.entry.error else None)

    def _failed(self, one: reporter.Recorded) -> None:
        position, key = one.reply.position or 0, one.reply.item_key
        error = _record(one)
        logger.info(
            "Item failed",
            extra={
                "action": "item_failed",
                "run_id": one.run_id,
                "position": position,
                "item_key": key,
                "attempt": (one.reply.failures or 0) + 1,
                "error": error.get("type"),
            },
        )
        if self._hints is not None:
            self._hints.failed(one.run_id, position, key, error)
        if self._hooks is not None:
            self._hooks.item_failed(one.run_id, position, key, error)


@contextlib.contextmanager
def _harmless(run_id: int | None) -> Iterator[None]:
    """Log whatever is raised inside: exporters and the like may be the user's."""
    try:
        yield
    except Exception:
        logger.exception(
            "Watching failed; the work goes on",
            extra={"action": "watching_failed", "run_id": run_id},
        )


def _record(one: reporter.Recorded) -> dict[str, Any]:
    return dict(json.loads(one.entry.error or "{}"))
