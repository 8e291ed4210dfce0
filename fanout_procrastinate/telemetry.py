"""OpenTelemetry: measures, and one trace from the trigger to each item. Silent without it.

The trace context travels in the run's own row, so that a worker on any machine can link to what
triggered the run.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

try:
    from opentelemetry import context as otel_context
    from opentelemetry import metrics, propagate, trace
except ImportError:  # the extra `otel` is not installed
    INSTALLED = False
else:
    INSTALLED = True

_NAME = "fanout_procrastinate"


@dataclasses.dataclass(slots=True)
class InHand:
    """The span of the item that a job works on."""

    span: Any = None


in_hand: contextvars.ContextVar[InHand | None] = contextvars.ContextVar(
    "fanout_item_span", default=None
)


@contextlib.contextmanager
def working() -> Iterator[None]:
    """Make the span of the item in hand the current one inside this block."""
    holder = in_hand.get()
    if holder is None or holder.span is None:
        yield
        return
    token = otel_context.attach(trace.set_span_in_context(holder.span))
    try:
        yield
    finally:
        otel_context.detach(token)


class Telemetry:
    """The measures and spans of one process. Without OpenTelemetry nothing happens here."""

    def __init__(self) -> None:
        self._closes: Callable[[], Mapping[str, int]] = dict
        if not INSTALLED:
            return
        meter = metrics.get_meter(_NAME)
        self._items = meter.create_counter(
            "fanout.items", unit="{item}", description="outcomes recorded, by outcome"
        )
        self._durations = meter.create_histogram(
            "fanout.item.duration", unit="s", description="from hand-out to recorded outcome"
        )
        self._reports = meter.create_counter(
            "fanout.reports", unit="{report}", description="reports that the database answered"
        )
        self._waits = meter.create_histogram(
            "fanout.queue.wait", unit="s", description="from trigger or schedule to the manager"
        )
        self._rescues = meter.create_counter(
            "fanout.rescues", unit="{slot}", description="slots taken over from dead workers"
        )
        meter.create_observable_counter(
            "fanout.runs.closed",
            callbacks=[self._observed_closes],
            unit="{run}",
            description="closes on record in the database, by status",
        )

    @property
    def active(self) -> bool:
        """Return whether measures or spans go anywhere."""
        return self.tracing or (
            INSTALLED and "Proxy" not in type(metrics.get_meter_provider()).__name__
        )

    @property
    def tracing(self) -> bool:
        """Return whether spans go anywhere."""
        return INSTALLED and not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)

    # -- measures

    def reported(self, task: str, outcomes: Mapping[str, int]) -> None:
        """Count one report, and its outcomes."""
        if not INSTALLED:
            return
        self._reports.add(1, {"task": task})
        for outcome, count in outcomes.items():
            self._items.add(count, {"task": task, "outcome": outcome})

    def took(self, task: str, outcome: str, seconds: float) -> None:
        """Measure how long an item was in hand."""
        if INSTALLED:
            self._durations.record(seconds, {"task": task, "outcome": outcome})

    def waited(self, task: str, seconds: float) -> None:
        """Measure how long a manager job waited in the queue."""
        if INSTALLED:
            self._waits.record(max(0.0, seconds), {"task": task})

    def swept(self, done: Mapping[str, int]) -> None:
        """Count what a sweep took over from dead workers."""
        for what, count in done.items() if INSTALLED else ():
            if what.startswith("rescued_"):
                self._rescues.add(count, {"outcome": what.removeprefix("rescued_")})

    def observe_closes(self, read: Callable[[], Mapping[str, int]]) -> None:
        """Have the closes read, by status, whenever measures are collected."""
        self._closes = read

    def _observed_closes(self, options: Any) -> Iterator[Any]:
        for status, count in self._closes().items():
            yield metrics.Observation(count, {"status": status})

    # -- spans

    def trigger(self, name: str) -> tuple[Any, dict[str, str]]:
        """Begin the span of a trigger; return it, and what a worker needs to link to it."""
        if not self.tracing:
            return None, {}
        span = trace.get_tracer(_NAME).start_span(
            f"trigger {name}", kind=trace.SpanKind.PRODUCER, attributes={"fanout.name": name}
        )
        carrier: dict[str, str] = {}
        propagate.inject(carrier, trace.set_span_in_context(span))
        return span, carrier

    def end_trigger(self, span: Any, run_id: int) -> None:
        """End the span of a trigger, for its run is known."""
        if span is not None:
            span.set_attribute("fanout.run_id", run_id)
            span.end()

    @contextlib.contextmanager
    def manager(self, name: str, run_id: int, carrier: Mapping[str, str]) -> Iterator[None]:
        """Make a manager job's span the current one; it continues the trigger's trace."""
        if not self.tracing:
            yield
            return
        tracer = trace.get_tracer(_NAME)
        with tracer.start_as_current_span(
            f"manager {name}",
            context=propagate.extract(carrier) if carrier else None,
            kind=trace.SpanKind.CONSUMER,
            attributes={"fanout.name": name, "fanout.run_id": run_id},
        ):
            yield

    def begin_item(
        self, name: str, carrier: Mapping[str, str], attributes: Mapping[str, Any]
    ) -> Any:
        """Begin the span of an item, in a trace of its own that is linked to the trigger."""
        if not self.tracing:
            return None
        parent = trace.get_current_span(propagate.extract(carrier)).get_span_context()
        known = {key: value for key, value in attributes.items() if value is not None}
        return trace.get_tracer(_NAME).start_span(
            f"item {name}",
            context=otel_context.Context(),
            kind=trace.SpanKind.CONSUMER,
            links=[trace.Link(parent)] if parent.is_valid else [],
            attributes={"fanout.name": name, **known},
        )

    def end_item(self, span: Any, outcome: str, error: Mapping[str, Any] | None) -> None:
        """End the span of an item."""
        if span is None:
            return
        span.set_attribute("fanout.outcome", outcome)
        if error is not None:
            span.set_attribute("error.type", str(error.get("type")))
            if outcome == "failed":
                span.set_status(trace.StatusCode.ERROR, str(error.get("message", ""))[:200])
        span.end()
