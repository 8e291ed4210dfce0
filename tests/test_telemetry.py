"""OpenTelemetry: one trace from the trigger to each item, and the measures; nothing without it."""

import logging
from collections.abc import Iterator
from typing import Any

import procrastinate
import psycopg
import pytest
from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from fanout_procrastinate import FanOut, fanout_child, fanout_manager, store, telemetry
from tests.support import QUICK, Recorder, counts, finished, serving
from tests.waiting import wait_until_async

Conn = psycopg.Connection[dict[str, Any]]


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """Where all spans go."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    yield exporter
    provider.shutdown()


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemoryMetricReader]:
    """Where all measures go."""
    found = InMemoryMetricReader()
    provider = MeterProvider([found], shutdown_on_exit=False)
    monkeypatch.setattr(metrics._internal, "_METER_PROVIDER", provider)
    yield found
    provider.shutdown()


def named(exporter: InMemorySpanExporter, name: str) -> list[ReadableSpan]:
    return [span for span in exporter.get_finished_spans() if span.name == name]


def measured(reader: InMemoryMetricReader, name: str) -> dict[tuple[str, ...], Any]:
    """Return the points of one measure by the values of their attributes, in their names' order."""
    data = reader.get_metrics_data()
    assert data is not None
    return {
        tuple(str(value) for _, value in sorted(point.attributes.items())): point
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
        if metric.name == name
        for point in metric.data.data_points
    }


async def test_one_trace_from_the_trigger_to_each_item(
    app: procrastinate.App, spans: InMemorySpanExporter
) -> None:
    inside: list[int] = []

    @fanout_child(app, name="child", backoff=QUICK, max_attempts=2)
    async def child(item: int) -> None:
        inside.append(trace.get_current_span().get_span_context().span_id)
        if item == 1:
            raise ConnectionError("no route")

    @fanout_child(app, name="threaded")
    def threaded(item: int) -> None:
        inside.append(trace.get_current_span().get_span_context().span_id)

    @fanout_manager(app, child=child, name="lister", item_key=lambda item: f"k{item}")
    def lister() -> Any:
        return range(2)

    async with serving(app):
        with trace.get_tracer("test").start_as_current_span("request") as request:
            run = await lister.defer_async()
        assert counts(await finished(run)) == {"succeeded": 1, "failed": 1, "total": 2}
        (trigger,) = named(spans, "trigger lister")
        assert trigger.parent is not None and trigger.attributes is not None
        assert trigger.parent.span_id == request.get_span_context().span_id
        assert trigger.attributes["fanout.run_id"] == run.id
        (manager,) = named(spans, "manager lister")
        assert manager.parent is not None and manager.parent.span_id == trigger.context.span_id
        # The last outcome is passed on a moment after the close.
        await wait_until_async(lambda: len(named(spans, "item child")) == 3)
        items = named(spans, "item child")
        assert {link.context.span_id for span in items for link in span.links} == {
            trigger.context.span_id
        }
        assert {span.context.trace_id for span in items}.isdisjoint({trigger.context.trace_id})
        # What a child traces itself stands below its item's span.
        assert sorted(inside) == sorted(span.context.span_id for span in items)
        told = sorted(
            (span.attributes["fanout.key"], span.attributes["fanout.outcome"])
            for span in items
            if span.attributes is not None
        )
        assert told == [("k0", "succeeded"), ("k1", "failed"), ("k1", "released")]
        (broken,) = [span for span in items if not span.status.is_unset]
        assert broken.status.description == "no route"
        # A sync child in its thread, and a run without a manager.
        inside.clear()
        await finished(await threaded.map_async([1]))
        (item,) = await wait_until_async(lambda: named(spans, "item threaded"))
        assert inside == [item.context.span_id] and len(item.links) == 1


async def test_trace_is_no_callback(app: procrastinate.App, spans: InMemorySpanExporter) -> None:
    """It travels among the run's callbacks, and no close calls it."""

    @fanout_child(app)
    async def child(item: int) -> None: ...

    async with serving(app):
        run = await child.map_async([1])
        progress = await finished(run)
        assert progress.callbacks == {} and progress.status == "completed"
        assert await FanOut.of(app).audit_async(run.id) == []
        found = await FanOut.of(app).host.run_async(store.trace(run.id))
        assert found is not None and list(found.carrier) == ["traceparent"]


async def test_measures(app: procrastinate.App, conn: Conn, reader: InMemoryMetricReader) -> None:
    @fanout_child(app, name="child", backoff=QUICK, max_attempts=2)
    async def child(item: int) -> None:
        if item == 1:
            raise ConnectionError("no route")

    @fanout_manager(app, child=child, name="lister")
    def lister() -> Any:
        return range(3)

    async with serving(app):
        run = await lister.defer_async()
        await finished(run)
        await wait_until_async(
            lambda: sum(one.value for one in measured(reader, "fanout.items").values()) == 4
        )
        items = {key: point.value for key, point in measured(reader, "fanout.items").items()}
        assert items == {
            ("succeeded", "child"): 2,
            ("released", "child"): 1,
            ("failed", "child"): 1,
        }
        durations = measured(reader, "fanout.item.duration")
        assert {key: point.count for key, point in durations.items()} == items
        assert 1 <= measured(reader, "fanout.reports")["child",].value <= 4
        (wait,) = measured(reader, "fanout.queue.wait").values()
        assert wait.count == 1 and 0 <= wait.sum < 60
        assert measured(reader, "fanout.runs.closed")["completed",].value == 1


async def test_what_raises_harms_nothing(
    app: procrastinate.App,
    spans: InMemorySpanExporter,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """G01: whatever a processor of the user's does, outcomes are recorded and slots go on."""

    @fanout_child(app)
    async def child(item: int) -> None: ...

    def refuse(*of_no_interest: Any) -> None:
        raise ZeroDivisionError

    async with serving(app):
        for name in ("begin_item", "end_item"):
            with monkeypatch.context() as patch:
                patch.setattr(telemetry.Telemetry, name, refuse)
                progress = await finished(await child.map_async(range(3)))
                assert counts(progress) == {"succeeded": 3, "total": 3}
    assert caplog.text.count("Watching failed") >= 4  # once for each begin, and for each report


async def test_rescues_are_counted(app: procrastinate.App, reader: InMemoryMetricReader) -> None:
    found = FanOut.of(app).telemetry
    found.swept({"rescued_released": 2, "rescued_failed": 1, "marked": 3})
    points = measured(reader, "fanout.rescues")
    assert {key: point.value for key, point in points.items()} == {
        ("released",): 2,
        ("failed",): 1,
    }


async def test_silent_without_opentelemetry(
    app: procrastinate.App,
    spans: InMemorySpanExporter,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(telemetry, "INSTALLED", False)

    @fanout_child(app)
    async def child(item: int) -> None: ...

    @fanout_manager(app, child=child)
    def lister() -> Any:
        return range(3)

    async with serving(app):
        run = await lister.defer_async()
        assert counts(await finished(run)) == {"succeeded": 3, "total": 3}
        await FanOut.of(app).sweep_async()
        found = await FanOut.of(app).host.run_async(store.trace(run.id))
        assert found is not None and found.carrier == {}
    assert spans.get_finished_spans() == () and caplog.records == []


async def test_installed_but_not_configured_costs_no_query(
    app: procrastinate.App, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Recorder(monkeypatch)
    assert telemetry.INSTALLED and FanOut.of(app).telemetry.trigger("x") == (None, {})

    @fanout_child(app)
    async def child(item: int) -> None: ...

    async with serving(app):
        await finished(await child.map_async([1]))
    assert calls.of("report") and not calls.of("trace")
