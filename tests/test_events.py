"""Live events: whoever watches ends on the truth, is never slow for others, and loses no close."""

import asyncio
import gc
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import procrastinate
import psycopg
import pytest

from fanout_procrastinate import (
    ConfigurationError,
    FanOut,
    RunNotFound,
    SchemaError,
    database,
    events,
    fanout_child,
    hub,
    models,
    store,
    telling,
)
from fanout_procrastinate.subscriptions import Event, Subscription, now
from tests.apps import told as told_app
from tests.support import (
    QUICK,
    Recorder,
    begun,
    counts,
    direct,
    entry,
    finished,
    opened,
    sealed,
    serving,
    started,
)
from tests.waiting import wait_until, wait_until_async
from tests.workers import Worker

Conn = psycopg.Connection[dict[str, Any]]


@pytest.fixture
def fanout(app: procrastinate.App) -> Iterator[FanOut]:
    found = FanOut.of(app)
    yield found
    found.close()


@pytest.fixture
def own(dsn: str) -> Iterator[database.Database]:
    with direct(dsn) as found:
        yield found


def notify(conn: Conn, **event: Any) -> None:
    conn.execute("SELECT pg_notify('fanout_v1', %s)", [json.dumps(event)])


def taken(subscription: Subscription, *, until: str, timeout: float = 10.0) -> list[Event]:
    """Take events until one of this kind."""
    found: list[Event] = []
    while not found or found[-1].kind != until:
        event = subscription.get(timeout)
        assert event is not None, found
        found.append(event)
    return found


def threads() -> list[str]:
    names = {thread.name for thread in threading.enumerate()}
    return sorted(names & {"fanout-feed", "fanout-events", "fanout-hints"})


def complete(own: database.Database, conn: Conn, run_id: int, outcome: str = "succeeded") -> None:
    """Work off what is left of a run of few items."""
    reply = begun(own, run_id, conn)
    while reply.verdict == "item":
        columns = {} if outcome == "succeeded" else {"result": None, "error": '{"type": "E"}'}
        (reply,) = own.run(
            store.report(run_id, reply.ledger, [entry(reply, outcome, **columns)], suspect=True)
        )


def progress(run_id: int = 1, **values: Any) -> models.Progress:
    """Return a progress of one item of two done, or as the test says."""
    given: dict[str, Any] = {
        "run_id": run_id,
        "name": "child",
        "status": "processing",
        "total": 2,
        "generation": 1,
        "succeeded": 1,
        "pending": 1,
        "created_at": "2026-01-02T03:04:05+00:00",
    }
    zeros = dict.fromkeys(("waiting", "processing", "failed", "cancelled", "duplicates"), 0)
    return models.Progress.from_json(zeros | given | values)


def told(kind: Any = "log", run_id: int = 1, **data: Any) -> Event:
    return Event(run_id=run_id, kind=kind, data=data, at=now())


# -- the queue of one subscriber


def test_latest_progress_replaces_those_before() -> None:
    """G12: of several progress events of a run only the latest waits."""
    one = Subscription()
    one.put(told("progress", n=1))
    one.put(told(n=2))
    one.put(told("progress", run_id=2, n=3))
    one.put(told("progress", n=4))
    one.put(told("closed", n=5))
    found = [one.get(0) for _ in range(5)]
    assert [event and event.data["n"] for event in found] == [2, 3, 4, 5, None]


def test_a_progress_that_replaces_another_tells_its_fractions_too() -> None:
    """The latest of each item, and a bounded number of them."""
    one = Subscription(7)
    one.put(told("progress", run_id=7, items={1: 0.1, 2: 0.2}))
    one.put(told("progress", run_id=7, items={2: 0.5}))
    one.put(told("progress", run_id=7))
    event = one.get(0)
    assert event is not None and event.data["items"] == {1: 0.1, 2: 0.5}
    for n in range(1500):
        one.put(told("progress", run_id=7, items={n: 0.5}))
    event = one.get(0)
    assert event is not None and list(event.data["items"]) == list(range(500, 1500))


def test_overflow_drops_the_oldest_lines_and_says_so() -> None:
    """G12: bounded, never blocking; the state is not lost."""
    one = Subscription(7, limit=10)
    for n in range(100):
        one.put(told(run_id=7, n=n))
    one.put(told("progress", run_id=7, n=100))
    one.put(told("closed", run_id=7, n=101))
    first, *rest = [one.get(0) for _ in range(11)]
    assert first is not None and (first.run_id, first.kind) == (7, "resync")
    assert first.data == {"reason": "overflow", "dropped": 92}
    assert [event and event.data["n"] for event in rest] == [100, *range(92, 100), 101]
    assert one.get(0) is None


def test_how_a_run_stands_comes_before_what_was_told_while_it_was_read() -> None:
    """G08: also where a second reading replaces the first before anybody took it."""
    one = Subscription(7)
    one.put(told(run_id=7, n=1))
    assert one.get(0) is None
    for n in (2, 3):
        one.put(told("progress", run_id=7, n=n))
    one.put(told(run_id=7, n=4))
    found = [one.get(0) for _ in range(4)]
    assert [event and event.data["n"] for event in found] == [3, 1, 4, None]


def test_overflow_of_state_keeps_the_closes() -> None:
    """G12: the last resort of a subscriber to thousands of runs."""
    one = Subscription(limit=3)
    for run_id in range(5):
        one.put(told("progress", run_id=run_id))
    one.put(told("closed", run_id=9))
    found = [one.get(0) for _ in range(4)]
    assert [(event and event.kind, event and event.run_id) for event in found] == [
        ("resync", 0),
        ("progress", 3),
        ("progress", 4),
        ("closed", 9),
    ]


def test_only_the_kinds_asked_for() -> None:
    one = Subscription(kinds={"log"}, until_closed=True)
    for kind in ("progress", "item_failed", "closed", "log"):
        assert one.wants(1, kind) == (kind in ("log", "closed"))
    one.put(told("log"))
    one.put(told("closed"))
    assert [event.kind for event in one] == ["log"]  # the close ends it all the same
    assert Subscription(7).wants(8, "log") is False
    with pytest.raises(ConfigurationError, match="kind logs; choose of"):
        Subscription(kinds=["logs"])


async def test_waiting_ends_with_an_event_a_timeout_or_the_end() -> None:
    one = Subscription()
    assert one.get(0.01) is None and await one.get_async(0.01) is None and not one.ended
    taker = asyncio.create_task(one.get_async(), name="taker")
    blocked = asyncio.create_task(asyncio.to_thread(one.get, 10), name="blocked")
    await asyncio.sleep(0)
    one.put(told(n=1))
    one.put(told(n=2))
    both = {(await taker).data["n"], (await blocked).data["n"]}  # type: ignore[union-attr]
    assert both == {1, 2}
    taker = asyncio.create_task(one.get_async(), name="taker")
    await asyncio.sleep(0)
    one.close()
    assert await taker is None and one.ended
    one.put(told())
    assert [event async for event in one] == [] and list(one) == []


async def test_cancelled_wait_loses_nothing() -> None:
    one = Subscription()
    taker = asyncio.create_task(one.get_async(), name="taker")
    await asyncio.sleep(0)
    taker.cancel()
    with pytest.raises(asyncio.CancelledError):
        await taker
    one.put(told(n=1))
    event = await one.get_async()
    assert event is not None and event.data == {"n": 1} and one._sleepers == set()


def test_an_error_comes_after_what_waits() -> None:
    one = Subscription(7)
    one.put(told())
    one.fail(RunNotFound(7))
    assert one.get() is not None
    with pytest.raises(RunNotFound):
        one.get()
    assert one.get() is None


def test_events_as_plain_json() -> None:
    """For a browser; what is read from the database included."""
    event = told("progress", progress=progress(), items={3: 0.5})
    plain = json.loads(json.dumps(event.as_dict()))
    assert plain["data"]["progress"]["succeeded"] == 1 and plain["kind"] == "progress"
    assert event.progress == event.data["progress"] and told().progress is None
    with pytest.raises(AttributeError):
        event.run_id = 2  # type: ignore[misc]


# -- what a subscriber is told of a run


class Frozen:
    """A database that knows the closes of earlier generations."""

    def run(self, call: store.Call[Any]) -> models.Progress:
        return progress(status="completed", generation=call.params["generation"], succeeded=2)


def advanced(one: Subscription, *readings: models.Progress) -> list[tuple[str, int]]:
    for reading in readings:
        telling.advance(Frozen(), one, reading, {})  # type: ignore[arg-type]
    found: list[tuple[str, int]] = []
    while (event := one.get(0)) is not None:
        assert event.progress is not None
        found.append((event.kind, event.progress.generation))
    return found


def test_each_close_once_whatever_was_missed() -> None:
    """G08: closed, reopened and closed again between two readings."""
    one = Subscription(1)
    assert advanced(one, progress()) == [("progress", 1)]
    assert advanced(one, progress()) == []  # nothing new
    closed = progress(status="completed", generation=3, succeeded=2)
    assert advanced(one, closed, closed) == [
        ("closed", 1),
        ("closed", 2),
        ("progress", 3),
        ("closed", 3),
    ]
    again = progress(generation=4, succeeded=0)
    assert advanced(one, again) == [("progress", 4)]


def test_rate_alone_is_no_news() -> None:
    one = Subscription(1)
    assert advanced(one, progress(rate=1.0)) == [("progress", 1)]
    assert advanced(one, progress(rate=2.0)) == []


# -- from the database


def test_snapshot_first_and_the_end_of_a_closed_run(
    fanout: FanOut, own: database.Database, conn: Conn
) -> None:
    """G08: (a) closed before; both worlds."""
    with fanout.app.open():
        run_id = sealed(own, "1", "2")
        complete(own, conn, run_id)
        run = fanout.get_run(run_id)
        first, last = run.events()
        assert (first.kind, last.kind) == ("progress", "closed")
        assert first.progress is not None and counts(first.progress) == {"succeeded": 2, "total": 2}
        assert last.data["status"] == "completed" and last.data["generation"] == 1
        assert last.run_id == run_id and last.at == first.progress.closed_at

        async def watched() -> list[str]:
            return [event.kind async for event in run.events()]

        assert asyncio.run(watched()) == ["progress", "closed"]
        assert [event.kind for event in run.events({"closed"})] == ["closed"]


async def test_sync_loop_over_events_in_the_apps_own_loop_is_refused(
    fanout: FanOut, own: database.Database
) -> None:
    """It would stop the loop in which the events are made."""
    run_id = sealed(own, "1")
    async with fanout.app.open_async():
        run = await fanout.get_run_async(run_id)
        with pytest.raises(ConfigurationError, match=r"loop runs in this thread.*async for"):
            next(iter(run.events()))
        with fanout.events.subscribe() as everything:
            with pytest.raises(ConfigurationError, match="async for"):
                list(everything)
            everything.get(0)  # does not wait
        elsewhere = await asyncio.to_thread(lambda: next(iter(run.events())))
        assert elsewhere.kind == "progress"
    with fanout.app.open():  # as in a notebook, whose loop does nothing for the app
        assert next(iter(run.events())).kind == "progress"


def test_closed_between_subscription_and_snapshot(
    fanout: FanOut, own: database.Database, conn: Conn
) -> None:
    """G08: (b) nothing is lost between the two, wherever the close falls."""
    for number in range(5):
        run_id = sealed(own, "1")
        with fanout.events.subscribe(run_id, until_closed=True) as watching:
            if number % 2:
                assert watching.get(10) is not None
            complete(own, conn, run_id)
            found = taken(watching, until="closed")
            final = found[-2].progress if len(found) > 1 else found[-1].progress
            assert final is not None and counts(final) == {"succeeded": 1, "total": 1}
            assert list(watching) == []


def test_closed_while_nobody_listened(
    fanout: FanOut, own: database.Database, conn: Conn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G08: (c) the listening connection is gone while the run closes."""
    monkeypatch.setattr(hub, "_FIRST_PAUSE_SECONDS", 0.5)
    run_id = sealed(own, "1")
    with fanout.events.subscribe(run_id) as watching:
        wait_until(lambda: fanout.hub.listening)
        taken(watching, until="progress")
        listener = conn.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE query LIKE 'LISTEN%' AND datname = current_database()"
        ).fetchall()
        assert len(listener) == 1
        wait_until(lambda: not fanout.hub.listening)
        complete(own, conn, run_id)
        kinds = [event.kind for event in taken(watching, until="closed")]
        assert kinds.count("closed") == 1
        # What was missed meanwhile is said once it listens again.
        kinds += (
            [event.kind for event in taken(watching, until="resync")]
            if ("resync" not in kinds)
            else []
        )
        assert kinds.count("resync") == 1 and kinds.count("closed") == 1


def test_unknown_and_removed_runs(fanout: FanOut, own: database.Database, conn: Conn) -> None:
    """G08: (d) older than the retention: an error that says so, not silence."""
    with fanout.events.subscribe(99) as watching, pytest.raises(RunNotFound):
        watching.get(10)
    run_id = sealed(own, "1")
    complete(own, conn, run_id)
    with fanout.events.subscribe(run_id) as watching:
        taken(watching, until="closed")
        while own.run(store.prune(0.0, 100)):
            pass
        notify(conn, run=run_id, event="progress")
        with pytest.raises(RunNotFound):
            watching.get(10)


@pytest.mark.parametrize("limit", [0, -1, 1.5, True, "1", None, 2**31])
def test_limits_that_cannot_work(fanout: FanOut, limit: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"limit=.*whole number from 1"):
        fanout.events.subscribe(1, limit=limit)
    assert threads() == []


@pytest.mark.parametrize("run_id", ["1", 1.5, True])
def test_what_is_no_id_is_refused_at_once(fanout: FanOut, run_id: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"run_id=.*whole number"):
        fanout.events.subscribe(run_id)
    assert threads() == []


@pytest.mark.parametrize("run_id", [2**63, -1, 0])
def test_an_id_that_no_run_can_have_ends_nobody_else(
    fanout: FanOut, own: database.Database, run_id: int
) -> None:
    watched = sealed(own, "1")
    with fanout.events.subscribe(watched) as one, fanout.events.subscribe() as all_of_them:
        taken(one, until="progress")
        taken(all_of_them, until="progress")
        with (
            fanout.events.subscribe(run_id) as wrong,
            pytest.raises(RunNotFound, match=str(run_id)),
        ):
            wrong.get(5)
        own.run(store.pause(watched))
        for good in (one, all_of_them):
            event = taken(good, until="progress")[-1]
            assert event.progress is not None and event.progress.paused


@pytest.mark.parametrize("timeout", [float("nan"), "1", True, 10**400, object()])
async def test_timeouts_that_cannot_work(timeout: Any) -> None:
    one = Subscription()
    with pytest.raises(ConfigurationError, match="give seconds"):
        one.get(timeout)
    with pytest.raises(ConfigurationError, match="give seconds"):
        await one.get_async(timeout)


@pytest.mark.parametrize("fault", ["cannot listen", "hears nothing"])
def test_polling_goes_on_where_nothing_can_listen(
    fanout: FanOut,
    own: database.Database,
    conn: Conn,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fault: str,
) -> None:
    """G07: behind a pooler LISTEN is refused, or accepted and of no effect."""

    def refuse() -> Any:
        raise psycopg.OperationalError("not here")

    if fault == "cannot listen":
        monkeypatch.setattr(fanout.hub, "_connect", refuse)
    else:
        monkeypatch.setattr(hub, "CHANNEL", "elsewhere")
    run_id = sealed(own, "1", "2")
    with fanout.events.subscribe(run_id) as one, fanout.events.subscribe() as everything:
        taken(one, until="progress")
        complete(own, conn, run_id)
        for watching in (one, everything):
            found = taken(watching, until="closed", timeout=5.0)
            final = found[-1].progress
            assert final is not None and counts(final) == {"succeeded": 2, "total": 2}
        other = sealed(own, "1")  # that nobody tells of
        found = taken(everything, until="progress", timeout=5.0)
        assert found[-1].run_id == other


def test_one_listener_and_one_reader_for_fifty(
    fanout: FanOut, own: database.Database, conn: Conn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G06: the listener is idle, holds nothing back, and everybody hears; all ends by itself."""
    monkeypatch.setattr(hub, "_LINGER_SECONDS", 0.0)
    monkeypatch.setattr(events, "_LINGER_SECONDS", 0.0)
    run_id = sealed(own, "1")
    everyone = [fanout.events.subscribe(run_id) for _ in range(50)]
    wait_until(lambda: fanout.hub.listening)
    complete(own, conn, run_id)
    for one in everyone:
        taken(one, until="closed")
    sessions = conn.execute(
        "SELECT state, backend_xmin, query FROM pg_stat_activity"
        " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        " AND (query LIKE 'LISTEN%' OR query LIKE '%fanout_progress_v1(r.id)%')"
    ).fetchall()
    assert len(sessions) == 2
    assert {(one["state"], one["backend_xmin"]) for one in sessions} == {("idle", None)}
    assert threads() == ["fanout-events", "fanout-feed"]
    for one in everyone[:25]:
        one.close()
    del everyone, one  # the others leave without a word
    gc.collect()
    wait_until(lambda: not threads())


def test_slow_reader_holds_up_nobody(fanout: FanOut, own: database.Database, conn: Conn) -> None:
    """G06: nobody takes what comes; the server's queue stays empty, the other hears all."""
    run_id = sealed(own, "1")
    line = {"position": 0, "key": None, "message": "x", "data": {}}
    with fanout.events.subscribe(run_id) as stalled, fanout.events.subscribe(run_id) as awake:
        wait_until(lambda: fanout.hub.listening)
        payload = json.dumps({"run": run_id, "event": "log", "lines": [line] * 50})
        for _ in range(100):
            # Not four times the same, which the server would send once.
            conn.execute(
                "SELECT pg_notify('fanout_v1', %s || repeat(' ', n)) FROM generate_series(1, 4) n",
                [payload],
            )
        heard = 0
        while heard < 20_000:
            event = awake.get(10)
            assert event is not None
            heard += {"log": 1, "resync": event.data.get("dropped")}.get(event.kind) or 0
        usage = conn.execute("SELECT pg_notification_queue_usage() AS used").fetchone()
        assert usage is not None and usage["used"] < 0.01
        complete(own, conn, run_id)
        taken(awake, until="closed")
        waiting = taken(stalled, until="closed")
        assert waiting[0].kind == "resync" and len(waiting) <= 1001
        assert waiting[0].data["dropped"] + len(waiting) - 1 >= 20_000


def test_lines_and_failures_arrive_one_by_one(
    fanout: FanOut, own: database.Database, conn: Conn
) -> None:
    """What is no event is passed over; who asks for lines alone costs no reading."""
    run_id = sealed(own, "1")
    with fanout.events.subscribe(run_id, kinds={"log", "item_failed"}) as watching:
        wait_until(lambda: fanout.hub.listening)
        at = "2026-01-02T03:04:05+00:00"
        notify(conn, run=run_id, event="log", lines=[{"message": "a", "at": at}, 7], dropped=3)
        notify(conn, run="x", event="log", lines=[{"message": "b"}])
        notify(conn, run=run_id, event="log", lines=5)
        notify(conn, run=run_id + 1, event="log", lines=[{"message": "c"}])
        notify(conn, run=run_id, event="progress", items={"x": 1})
        notify(conn, run=run_id, event="item_failed", items=[{"position": 4, "at": 7}], more=2)
        found = [watching.get(10) for _ in range(4)]
        assert [(event and event.kind, event and event.data) for event in found] == [
            ("log", {"message": "a"}),
            ("log", {"dropped": 3}),
            ("item_failed", {"position": 4}),
            ("item_failed", {"more": 2}),
        ]
        assert found[0] is not None and found[0].at.isoformat() == at
        assert watching.get(0) is None and fanout.events._runs == {}


def test_progress_is_read_five_times_a_second_for_all(
    fanout: FanOut, own: database.Database, conn: Conn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G05: whatever the number of hints and of subscribers; the last reading is the truth."""
    calls = Recorder(monkeypatch)
    run_id = sealed(own, "1")
    everyone = [fanout.events.subscribe(run_id) for _ in range(10)]
    wait_until(lambda: fanout.hub.listening)
    begin = time.monotonic()
    while time.monotonic() - begin < 1.0:
        notify(conn, run=run_id, event="progress")
    readings = len(calls.of("progresses"))
    assert 3 <= readings <= 8
    complete(own, conn, run_id)
    for one in everyone:
        assert taken(one, until="closed")[-1].data["status"] == "completed"
        one.close()


def test_readings_that_fail_are_tried_again(
    fanout: FanOut,
    own: database.Database,
    conn: Conn,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """G07: the database is away for a while; said once."""
    monkeypatch.setattr(events, "_POLL_SECONDS", 0.05)
    monkeypatch.setattr(events, "_LINGER_SECONDS", 0.05)
    calls = Recorder(monkeypatch)
    calls.fail("progresses", 4, before=True)
    run_id = sealed(own, "1")
    with fanout.events.subscribe(run_id) as watching:
        assert taken(watching, until="progress")
    assert caplog.text.count("Progress cannot be read") == 1


def test_missing_tables_are_an_error_not_silence(bare_dsn: str) -> None:
    app = procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=bare_dsn))
    fanout = FanOut(app)
    with fanout.events.subscribe(1) as watching, pytest.raises(SchemaError):
        watching.get(10)
    fanout.close()


def test_close_ends_every_subscription(fanout: FanOut, own: database.Database) -> None:
    one = fanout.events.subscribe(sealed(own, "1"))
    waiting = threading.Thread(target=lambda: list(one))
    waiting.start()
    wait_until(lambda: fanout.hub.listening)
    fanout.close()
    waiting.join(10)
    assert one.ended and not waiting.is_alive() and not threads()
    again = fanout.events.subscribe(started(own))  # and begins anew
    assert again.get(10) is not None


# -- a whole fan-out


async def test_progress_never_goes_back_and_the_last_one_comes(app: procrastinate.App) -> None:
    """G14: 199 items, some retried, the run reopened: each generation ends on its truth."""
    broken = True

    @fanout_child(app, backoff=QUICK, max_attempts=2)
    async def child(item: int) -> None:
        await asyncio.sleep(0.005)
        if item % 10 == 0 and broken:
            raise ConnectionError

    async with serving(app):
        with FanOut.of(app).events.subscribe() as watching:
            run = await child.map_async(range(199))
            seen: list[models.Progress] = []
            for generation in (1, 2):
                closes = 0
                while not closes:
                    event = await watching.get_async(20)
                    assert event is not None
                    if event.progress is not None:
                        seen.append(event.progress)
                    closes += event.kind == "closed"
                assert seen[-1].generation == generation and seen[-1].done == 199
                broken = False
                if generation == 1:
                    assert counts(seen[-1]) == {"succeeded": 179, "failed": 20, "total": 199}
                    assert await run.retry_failed_async() == 20
            assert counts(seen[-1]) == {"succeeded": 199, "total": 199}
            await finished(run)
    for before, after in itertools.pairwise(seen):
        assert 0 <= after.done <= 199 and after.generation >= before.generation
        if before.generation == after.generation:
            assert after.done >= before.done and after.percent >= before.percent


async def test_run_events_follow_a_run_to_its_end(app: procrastinate.App) -> None:
    """G08: begins with a snapshot, ends after the close, with lines and failures between."""

    @fanout_child(app, pass_context=True)
    async def child(context: Any, item: int) -> None:
        context.log("at work", item=item)
        context.progress(0.5)
        await told_of.wait()
        if item == 0:
            raise ValueError("n" * 1000)
        await failed.wait()

    told_of, failed = asyncio.Event(), asyncio.Event()
    found: list[Event] = []
    async with serving(app):
        run = await child.map_async([0, 1], item_key=lambda item: f"k{item}")
        async for event in run.events():
            found.append(event)
            kinds = {event.kind for event in found}
            fractions = {place for event in found for place in event.data.get("items", ())}
            if "log" in kinds and fractions == {0, 1}:
                told_of.set()
            if "item_failed" in kinds:
                failed.set()
    assert (found[0].kind, found[-1].kind) == ("progress", "closed")
    assert found[-1].progress is not None
    assert counts(found[-1].progress) == {"succeeded": 1, "failed": 1, "total": 2}
    lines = [event.data for event in found if event.kind == "log"]
    assert {"position": 0, "key": "k0", "message": "at work", "data": {"item": 0}} in lines
    (failure,) = [event.data for event in found if event.kind == "item_failed"]
    assert failure == {"position": 0, "key": "k0", "type": "ValueError", "message": "n" * 200}


async def test_the_last_failure_comes_before_the_end(app: procrastinate.App) -> None:
    """G08: a run of one item, which fails: its hint is sent after the close."""

    @fanout_child(app, pass_context=True)
    async def child(context: Any, item: int) -> None:
        context.log("begins")
        await asyncio.sleep(
            0.05
        )  # the line goes at once, and what follows a fifth of a second later
        raise ValueError("the only one")

    async with serving(app):
        for _ in range(3):
            run = await child.map_async([1])
            kinds = [event.kind async for event in run.events()]
            assert kinds.count("closed") == 1 and kinds[-1] == "closed"
            assert kinds.count("item_failed") == 1


async def test_without_events_only_polls_tell(
    app: procrastinate.App, connect: Callable[..., Conn]
) -> None:
    """G05: switched off, a worker notifies of closes alone."""
    FanOut(app, events=False)

    @fanout_child(app, pass_context=True)
    async def child(context: Any, item: int) -> None:
        context.log("unheard")
        context.progress(0.5)

    listening = connect()
    listening.execute("LISTEN fanout_v1")
    async with serving(app):
        run = await child.map_async(range(20))
        kinds = [event.kind async for event in run.events()]
    assert kinds[-1] == "closed" and set(kinds) == {"progress", "closed"}
    names = [json.loads(note.payload)["event"] for note in listening.notifies(timeout=0.1)]
    assert names == ["closed"]


async def test_events_are_small_whatever_happened(
    app: procrastinate.App, conn: Conn, connect: Callable[..., Conn]
) -> None:
    """G01: a notification over the limit would undo what it tells of."""
    FanOut(app, max_item_bytes=10**6)

    @fanout_child(app, pass_context=True)
    async def child(context: Any, item: dict[str, str]) -> None:
        context.log("\N{SNOWMAN}" * 10_000, **{"\N{SNOWMAN}": "\x00\ud800" * 10_000})
        raise ValueError("\N{SNOWMAN}" * 100_000)

    listening = connect()
    listening.execute("LISTEN fanout_v1")
    async with serving(app):
        run = await child.map_async(
            [{"x": "p" * 20_000}], item_key=lambda item: "k" * 1000, tags=["t" * 5000]
        )
        assert counts(await finished(run)) == {"failed": 1, "total": 1}
    payloads = [note.payload for note in listening.notifies(timeout=0.1)]
    assert max(len(payload.encode()) for payload in payloads) <= 7000
    told = {event["event"]: event for event in map(json.loads, payloads)}
    assert set(told) == {"log", "progress", "item_failed", "closed"}
    assert told["log"]["lines"][0]["message"].endswith(" …[cut]")
    assert told["log"]["lines"][0]["data"]["cut"].endswith(" …[cut]")
    assert told["item_failed"]["items"][0]["message"] == "\N{SNOWMAN}" * 200
    assert told["closed"] == {
        "run": run.id,
        "event": "closed",
        "status": "completed",
        "generation": 1,
    }


async def test_what_cannot_be_sent_harms_nothing(
    app: procrastinate.App, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """G01: every hint fails, and the work does not notice; said once."""
    calls = Recorder(monkeypatch)
    calls.fail("hint", 1000, before=True)

    @fanout_child(app, pass_context=True)
    async def child(context: Any, item: int) -> None:
        context.log("unheard")
        await asyncio.sleep(0.02)

    async with serving(app):
        progress = await finished(await child.map_async(range(200)))
        assert counts(progress) == {"succeeded": 200, "total": 200}
    assert len(calls.of("hint")) > 1
    assert caplog.text.count("Events could not be sent") == 1


async def test_wait_is_not_woken_by_progress(
    app: procrastinate.App, conn: Conn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G05: ten thousand hints must not become ten thousand readings."""
    async with opened(app):
        with direct(conn.info.dsn) as own:
            run_id = sealed(own, "1")
            run = await FanOut.of(app).get_run_async(run_id)
            read = 0
            original = run.progress_async

            async def counted() -> models.Progress:
                nonlocal read
                read += 1
                return await original()

            monkeypatch.setattr(run, "progress_async", counted)
            waiting = asyncio.create_task(run.wait_async(timeout=10), name="waiting")
            await wait_until_async(lambda: FanOut.of(app).hub.listening)

            def work() -> None:
                for _ in range(1000):
                    notify(conn, run=run_id, event="progress")
                complete(own, conn, run_id)

            await asyncio.to_thread(work)
            assert (await waiting).status == "completed"
            assert read < 20


@pytest.mark.acceptance
def test_events_cross_processes(dsn: str, conn: Conn, workers: Callable[..., Worker]) -> None:
    """G05: two worker processes tell a third; few notifications, and the final state of all."""
    for _ in range(2):
        workers("tests.apps.told.app", queues=told_app.QUEUE, concurrency=20).wait_ready()
    app = procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=dsn))
    fanout = FanOut(app)

    @fanout_child(app, name="tell", queue=told_app.QUEUE)
    async def tell(seconds: float) -> None: ...

    conn.execute("LISTEN fanout_v1")
    with app.open(), fanout.events.subscribe() as everything:
        wait_until(lambda: fanout.hub.listening)
        begin = time.monotonic()
        run = tell.map([0.05] * 200, max_in_flight=40)
        found = list(run.events())
        seconds = time.monotonic() - begin
        final = found[-1].progress
        assert found[-1].kind == "closed" and final is not None
        assert counts(final) == {"succeeded": 199, "failed": 1, "total": 200}
        # The last hints may come after the close: who watches on hears them.
        heard: list[Event] = []
        while {"item_failed", "closed"} - {event.kind for event in heard}:
            event = everything.get(10)
            assert event is not None
            heard.append(event)
        lines = [event.data for event in heard + found if event.kind == "log"]
        assert {"begins"} == {line["message"] for line in lines if "message" in line}
        assert any(event.data.get("items") for event in heard if event.kind == "progress")
    fanout.close()
    told = [json.loads(note.payload)["event"] for note in conn.notifies(timeout=0.5)]
    assert told.count("closed") == 1
    assert told.count("progress") <= 2 * (seconds / 0.2 + 3)
    assert told.count("log") <= 2 * (seconds / 0.2 + 3) * 2
