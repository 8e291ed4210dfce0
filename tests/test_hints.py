"""What a worker tells whoever watches: few and small statements, in nobody's way."""

import contextlib
import itertools
import json
import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

import procrastinate
import psycopg
import pytest

from fanout_procrastinate import (
    FanOut,
    ItemContext,
    errors,
    fanout_child,
    hints,
    settings,
    store,
)
from tests.support import QUICK, Recorder, counts, direct, finished, serving
from tests.waiting import wait_until

Conn = psycopg.Connection[dict[str, Any]]


class Told:
    """Stands where the database is, and remembers what it was told, and when."""

    def __init__(self) -> None:
        self.statements: list[tuple[float, list[str]]] = []
        self.fails = 0
        self.gate = threading.Event()
        self.gate.set()

    def run(self, call: store.Call[Any]) -> Any:
        assert self.gate.wait(10)
        if self.fails:
            self.fails -= 1
            raise errors.DatabaseError("the connection was lost", transient=True)
        self.statements.append((time.monotonic(), call.params["events"]))

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(text) for _, texts in self.statements for text in texts]

    def of(self, event: str) -> list[dict[str, Any]]:
        return [one for one in self.events if one["event"] == event]


@contextlib.contextmanager
def sending(told: Told, **options: Any) -> Iterator[hints.Sender]:
    made = hints.Sender(told.run, **options)
    yield made
    told.gate.set()
    made.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "fanout-hints"]


def test_hints_of_a_run_are_coalesced() -> None:
    """G05: at most one notification a run in 200 ms, at once at first, and always the last."""
    told = Told()
    begin = time.monotonic()
    with sending(told) as sender:
        while time.monotonic() - begin < 0.7:
            for run_id in (1, 2):
                sender.changed(run_id)
    for run_id in (1, 2):
        times = [at for at, texts in told.statements if f'"run":{run_id}}}' in "".join(texts)]
        assert times[0] - begin < 0.15 and 3 <= len(times) <= 5
        gaps = [after - before for before, after in itertools.pairwise(times[:-1])]
        assert min(gaps) >= 0.19  # the last one was sent by the end
    assert told.events[0] == {"run": 1, "event": "progress"}


def test_many_runs_go_in_one_statement() -> None:
    """G05: 16 runs are not 16 commits."""
    told = Told()
    with sending(told) as sender:
        told.gate.clear()
        sender.changed(0)
        for run_id in range(1, 17):
            sender.changed(run_id)
        told.gate.set()
        wait_until(lambda: len(told.events) == 17)
    assert len(told.statements) <= 3


def test_failures_beyond_twenty_a_second_are_counted() -> None:
    told = Told()
    error = {"type": "papers.NoText", "message": "m" * 1000, "traceback": "t" * 10_000}
    with sending(told) as sender:
        for position in range(100):
            sender.failed(7, position, f"k{position}", error)
    items = [item for event in told.of("item_failed") for item in event["items"]]
    assert [item["position"] for item in items] == list(range(20))
    assert items[0]["message"] == "m" * 200 and items[0]["type"] == "papers.NoText"
    assert sum(event.get("more", 0) for event in told.of("item_failed")) == 80


def test_lines_beyond_fifty_a_second_are_counted() -> None:
    """Whatever the number of runs: the limit is the process's."""
    told = Told()
    with sending(told) as sender:
        for n in range(200):
            sender.log(n % 2, 3, None, f"line {n}", {"n": n})
    lines = [line for event in told.of("log") for line in event["lines"]]
    assert len(lines) == 50 and sum(event.get("dropped", 0) for event in told.of("log")) == 150
    assert {line["message"] for line in lines} == {f"line {n}" for n in range(50)}


def test_the_latest_fraction_of_each_item() -> None:
    told = Told()
    with sending(told) as sender:
        told.gate.clear()
        sender.changed(7)
        for fraction in (0.1, 0.2, 1 / 3):
            for position in range(150):
                sender.progress(7, position, fraction)
    found: dict[str, float] = {}
    for event in told.of("progress"):
        assert len(event.get("items", {})) <= 100
        found |= event.get("items", {})
    assert found == {str(position): 0.3333 for position in range(150)}


@pytest.mark.parametrize("letter", ["a", '"', "\N{SNOWMAN}", "\N{PILE OF POO}", "\x00\ud800\n"])
def test_never_too_large_and_always_json(letter: str) -> None:
    """G01: cut at a character boundary, and marked."""
    told = Told()
    long = letter * 20_000
    with sending(told) as sender:
        for n in range(30):
            sender.log(7, n, long, long, {"text": long})
            sender.failed(7, n, long, {"type": long, "message": long})
    texts = [text for _, texts in told.statements for text in texts]
    assert max(len(text.encode()) for text in texts) <= hints.MAX_BYTES
    (first, *_) = [line for event in told.of("log") for line in event["lines"]]
    assert first["message"].endswith(" …[cut]") and first["key"].endswith(" …[cut]")
    assert first["data"]["cut"].endswith(" …[cut]")
    assert len([line for event in told.of("log") for line in event["lines"]]) == 30
    failures = told.of("item_failed")
    assert sum(len(event["items"]) + event.get("more", 0) for event in failures) == 30


def test_a_database_that_does_not_answer_bounds_what_waits() -> None:
    """G12: nothing grows in the worker, and nobody in it waits."""
    told = Told()
    with sending(told) as sender:
        told.gate.clear()
        sender.changed(7)
        sender._lines._limit = 10**6
        for n in range(1000):
            sender.progress(7, n, 0.5)
            sender.log(7, n, None, "line", {})
        assert len(sender._runs[7].lines) <= 200 and len(sender._runs[7].fractions) <= 200


def test_trouble_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    told = Told()
    told.fails = 2
    with sending(told) as sender:
        for round_ in range(4):
            sender.changed(round_)
            wait_until(
                lambda n=round_: (
                    told.fails == max(0, 1 - n)
                    and not any(run.pending() for run in list(sender._runs.values()))
                )
            )
    assert caplog.text.count("Events could not be sent") == 1
    assert [event["run"] for event in told.events] == [2, 3]


def test_the_server_sends_what_it_can(dsn: str, conn: Conn) -> None:
    """G01: one that is too large takes no other along, and raises nothing."""
    conn.execute("LISTEN fanout_v1")
    with direct(dsn) as own:
        assert own.run(store.hint(['{"n": 1}', "x" * 9000, '{"n": 2}'])) == 2
    heard = [note.payload for note in conn.notifies(timeout=2.0, stop_after=2)]
    assert heard == ['{"n": 1}', '{"n": 2}']


def test_context_without_a_sender() -> None:
    """As a test of a child of the user's makes it."""
    one = ItemContext(run_id=7, position=3, key="k", attempt=2, run_args={})
    one.log("line")
    one.progress(0.5)
    for wrong in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match="fraction from 0 to 1"):
            one.progress(wrong)


async def test_context_tells_from_wherever_the_child_runs(
    app: procrastinate.App, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Async, in a thread, and the log record stays as it was."""
    caplog.set_level(logging.INFO)
    calls = Recorder(monkeypatch)
    FanOut(app, redact=lambda value: {**value, "secret": "hidden"})

    @fanout_child(app, pass_context=True)
    async def child(context: ItemContext, item: int) -> None:
        await context.log_async("async", secret="s3cr3t")
        await context.progress_async(0.25)

    @fanout_child(app, pass_context=True)
    def threaded(context: ItemContext, item: int) -> None:
        context.log("sync", secret="s3cr3t")
        context.progress(0.75)

    async with serving(app):
        for declared in (child, threaded):
            await finished(await declared.map_async([1]))
    events = [json.loads(text) for call in calls.of("hint") for text in call.params["events"]]
    lines = [line for event in events for line in event.get("lines", ())]
    assert [(line["message"], line["data"]) for line in lines] == [
        ("async", {"secret": "hidden"}),
        ("sync", {"secret": "hidden"}),
    ]
    fractions = [event["items"] for event in events if "items" in event]
    assert fractions == [{"0": 0.25}, {"0": 0.75}]
    logged = [record for record in caplog.records if vars(record).get("action") == "item_log"]
    assert [vars(record)["data"] for record in logged] == [{"secret": "s3cr3t"}] * 2


async def test_hints_come_after_the_report_and_outside_of_it(
    app: procrastinate.App, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """G05: the counting statement notifies nobody but of a close; hints are few."""
    caplog.set_level(logging.INFO)
    calls = Recorder(monkeypatch)

    @fanout_child(app, backoff=QUICK)
    async def child(item: int) -> None:
        if item == 5:
            raise ValueError("no five")

    async with serving(app):
        begin = time.monotonic()
        run = await child.map_async(range(500), item_key=lambda item: f"k{item}")
        assert counts(await finished(run)) == {"succeeded": 499, "failed": 1, "total": 500}
        seconds = time.monotonic() - begin
    names = [call.name for call in calls.calls]
    assert names.index("report") < names.index("hint")
    assert len(calls.of("hint")) <= seconds / 0.2 + 2
    (record,) = [one for one in caplog.records if vars(one).get("action") == "item_failed"]
    about = {name: vars(record)[name] for name in ("run_id", "position", "item_key", "error")}
    assert about == {"run_id": run.id, "position": 5, "item_key": "k5", "error": "ValueError"}


def test_settings_of_events() -> None:
    assert settings.Settings().events is True
    for name in ("on_item_failed", "on_stuck", "redact"):
        with pytest.raises(errors.ConfigurationError, match="give a function"):
            settings.Settings(**{name: 7})
    with pytest.raises(errors.ConfigurationError, match="True or False"):
        settings.Settings(events=1)  # type: ignore[arg-type]
