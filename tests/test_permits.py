"""Permits: who gets one, in which order, what becomes of it; seeing and changing limits."""

import asyncio
import concurrent.futures
import contextvars
import json
import logging
import threading
import time
import uuid
from collections.abc import Coroutine, Iterator
from typing import Any

import procrastinate
import psycopg
import pytest

from fanout_procrastinate import (
    ConfigurationError,
    DatabaseError,
    FanOut,
    ItemContext,
    Limit,
    LimitTimeout,
    Run,
    database,
    fanout_child,
    fanout_manager,
    models,
    outcomes,
    permits,
    store,
)
from fanout_procrastinate.testing import run_inline, run_inline_async
from tests.support import (
    QUICK,
    begun,
    counts,
    direct,
    entry,
    finished,
    opened,
    sealed,
    serving,
    unconnected,
)
from tests.waiting import wait_until, wait_until_async

Conn = psycopg.Connection[dict[str, Any]]

LLM = Limit("llm", concurrency=2)
ONE = Limit("one", concurrency=1)
TENANT = Limit("tenant", concurrency=1, key=str)
LIMITED: dict[str, Any] = {"limits": ["llm"], "limit_specs": [LLM.spec()]}


@pytest.fixture
def own(dsn: str) -> Iterator[database.Database]:
    with direct(dsn) as made:
        yield made


@pytest.fixture
def fanout(app: procrastinate.App) -> Iterator[FanOut]:
    """The app's, for sync use: opened and closed."""
    with app.open():
        yield FanOut.of(app)
        FanOut.of(app).close()


class Line:
    """Takes and gives permits statement by statement, each under a name."""

    def __init__(self, own: database.Database, *wanted: Limit) -> None:
        self.own = own
        self.specs = [one.spec() for one in wanted]
        self.holders: dict[str, str] = {}

    def take(self, name: str, *wanted: Limit, **given: Any) -> models.PermitReply:
        specs = [one.spec() for one in wanted] or self.specs
        holder = self.holders.setdefault(name, str(uuid.uuid4()))
        options: dict[str, Any] = {"key": None, "run_id": None, "position": None, "lease": 30.0}
        call = store.take_permit(specs, holder=holder, label=name, **options | given)
        return self.own.run(call)

    def give(self, name: str) -> list[int]:
        return self.own.run(store.give_permit(self.holders[name]))

    def granted(self, *names: str, **given: Any) -> list[bool]:
        return [self.take(name, **given).granted for name in names]

    def silent(self, conn: Conn, *names: str) -> None:
        """Let holders be silent for an hour."""
        for name in names:
            conn.execute(
                "UPDATE fanout_permits SET seen_at = seen_at - interval '1 hour' WHERE label = %s",
                [name],
            )


def rows(conn: Conn) -> list[dict[str, Any]]:
    return conn.execute("SELECT * FROM fanout_permits ORDER BY ticket").fetchall()


# -- the line, in SQL


def test_the_line_is_served_in_order(own: database.Database) -> None:
    """E04: no more than fit; the others wait in the order of coming and are let in in it."""
    line = Line(own, LLM)
    assert line.granted("a", "b", "c", "d") == [True, True, False, False]
    assert [line.take(name).place for name in "cd"] == [1, 2]
    assert line.take("c").reason == "limit llm is full: 2 of 2"
    assert line.take("a").granted  # sent again, the same answer
    line.give("b")
    assert line.granted("d", "c") == [False, True]
    assert line.take("d").place == 1
    line.give("c")
    line.give("c")  # sent again
    assert line.granted("d") == [True]


def test_who_waits_is_granted_and_told_by_the_one_who_gives(
    own: database.Database, conn: Conn
) -> None:
    line = Line(own, ONE)
    assert line.granted("a", "b") == [True, False]
    conn.execute("LISTEN fanout_v1")
    line.give("a")
    (told,) = conn.notifies(timeout=5, stop_after=1)
    assert line.holders["b"] in told.payload
    assert [(row["label"], row["granted_at"] is None) for row in rows(conn)] == [("b", False)]


def test_nobody_passes_who_stands_earlier(own: database.Database) -> None:
    """One that wants two limits is not passed in either by those who want one of them."""
    line = Line(own)
    a, b = Limit("a", concurrency=1), Limit("b", concurrency=1)
    assert line.take("x", b).granted
    assert not line.take("both", a, b).granted
    assert not line.take("only a", a).granted
    line.give("x")
    assert line.take("both", a, b).granted
    line.give("both")
    assert line.take("only a", a).granted


def test_who_has_one_and_wants_the_next_is_not_kept_waiting_in_a_circle(
    own: database.Database,
) -> None:
    """One that waits for both stands earlier in the line of the second: it makes room."""
    line = Line(own)
    a, b, c = (Limit(name, concurrency=1) for name in "abc")
    assert line.take("has a", a).granted
    assert line.take("has c", c).granted
    assert not line.take("all", a, b, c).granted
    assert line.take("wants b", b).granted
    line.give("has c")
    assert line.take("wants c", c).granted
    for name in ("has a", "wants b", "wants c"):
        line.give(name)
    assert line.take("all", a, b, c).granted


def test_who_stands_behind_one_that_lacks_another_limit_asks_for_room(
    own: database.Database,
) -> None:
    """The one before waits for a limit that this one has: nobody else would ask the run."""
    line = Line(own)
    a, b = Limit("a", concurrency=1), Limit("b", concurrency=1)
    assert line.take("has a", a).granted
    assert not line.take("wants a", a).granted
    assert not line.take("wants both", a, b).granted
    run_id = sealed(own, "1", limits=["b"], limit_specs=[b.spec()])
    answer = line.take("has a, wants b", b)
    assert (answer.granted, answer.place, answer.crowds) == (False, 2, run_id)
    while own.run(store.pass_on(run_id)):
        pass
    assert line.take("has a, wants b", b).granted


def test_a_long_line_of_one_key_keeps_no_other_waiting(own: database.Database) -> None:
    line = Line(own, TENANT)
    crowd = [f"x{n}" for n in range(150)]
    assert line.granted("x", *crowd, key="x") == [True, *[False] * 150]
    assert line.granted("y", "y2", key="y") == [True, False]
    answer = line.take("y2", key="y")
    assert (answer.place, answer.reason) == (1, "limit tenant is full for key y: 1")
    line.give("y")
    assert line.take("y2", key="y").granted
    line.give("x")
    assert line.granted("x1", "x0", key="x") == [False, True]


def test_a_dead_permit_counts_no_more(own: database.Database, conn: Conn) -> None:
    """E01: silent for its lease it is nobody's, without any counter given back."""
    line = Line(own, LLM)
    assert line.granted("a", "b", "c", "d") == [True, True, False, False]
    line.silent(conn, "a", "c")
    assert line.granted("d") == [True]
    assert {row["label"] for row in rows(conn)} == {"b", "d"}
    lost = own.run(store.renew_permits([line.holders[name] for name in "abc"]))
    assert sorted(lost) == sorted([line.holders["a"], line.holders["c"]])
    # Whoever comes back stands at the end of the line.
    assert line.take("a").place == 1


def test_renewal_keeps_a_permit(own: database.Database, conn: Conn) -> None:
    line = Line(own, ONE)
    assert line.granted("a", "b", lease=5.0) == [True, False]
    conn.execute("UPDATE fanout_permits SET seen_at = seen_at - interval '4 s'")
    assert own.run(store.renew_permits([line.holders["a"]])) == []
    conn.execute("UPDATE fanout_permits SET seen_at = seen_at - interval '4 s'")
    assert line.granted("b") == [False]


def test_slots_count_too(own: database.Database, conn: Conn, app: procrastinate.App) -> None:
    """E04: what a run's slots have, no permit gets, and the other way round."""
    run_id = sealed(own, "1", "2", "3", **LIMITED)
    assert slots(conn, run_id) == 2
    line = Line(own, LLM)
    assert line.granted("a") == [False]
    own.run(store.stop(run_id, status="cancelled", reason=None, abort=False))
    assert line.granted("a", "b", "c") == [True, True, False]
    other = sealed(own, "1", "2", "3", **LIMITED)
    assert slots(conn, other) == 0
    assert line.give("a") == []  # c has it, and stood in line first
    assert line.granted("c") == [True]
    assert line.give("b") == [other]
    while own.run(store.pass_on(other)):
        pass
    assert slots(conn, other) == 1


def slots(conn: Conn, run_id: int) -> int:
    (row,) = conn.execute("SELECT count(*) FROM fanout_slots WHERE run_id = %s", [run_id])
    return int(row["count"])


def test_each_key_has_places_of_its_own(own: database.Database) -> None:
    line = Line(own, TENANT)
    assert line.take("a", key="x").granted
    assert line.take("b", key="y").granted
    assert not line.take("c", key="x").granted
    assert line.take("c", key="x").reason == "limit tenant is full for key x: 1"
    assert not line.take("d", key="y").granted
    line.give("b")
    assert line.take("d", key="y").granted
    assert not line.take("c", key="x").granted


def test_a_rate_keeps_a_start_for_each(own: database.Database) -> None:
    """A rate of 2 a second, one at a time: the starts lie half a second apart."""
    line = Line(own, Limit("rated", rate=2, per=1.0, burst=1))
    answers = [line.take(name) for name in "abcdefgh"]
    waits = [answer.wait_seconds or 0.0 for answer in answers if answer.granted]
    # Two starts ahead are kept; who comes later stands in line.
    assert waits == pytest.approx([0.0, 0.5, 1.0], abs=0.2)
    waiting = [answer for answer in answers if not answer.granted]
    assert [answer.place for answer in waiting] == list(range(1, len(waiting) + 1))
    assert all(0 < (answer.wait_seconds or 0) <= 1 for answer in waiting)
    assert line.take("b").wait_seconds == pytest.approx(waits[1], abs=0.2)


def test_a_paused_limit_lets_nobody_in(own: database.Database) -> None:
    line = Line(own, LLM)
    assert line.granted("a") == [True]
    own.run(store.pause_limit(LLM.spec(), 60.0))
    answer = line.take("b")
    assert not answer.granted and "limit llm is paused until" in (answer.reason or "")
    own.run(store.update_limit("llm", pause=0.0))
    assert line.granted("b") == [True]


def test_the_child_s_own_limits_come_first(own: database.Database, conn: Conn) -> None:
    """A permit of an earlier name than a limit of the child could wait in a circle: refused."""
    run_id = sealed(own, "1", **LIMITED)
    line = Line(own)
    assert line.take("a", ONE, run_id=run_id).granted
    for name, wanted in (("b", LLM), ("c", Limit("aaa", concurrency=1))):
        answer = line.take(name, wanted, run_id=run_id)
        assert (answer.granted, answer.refused) == (False, "llm")


@pytest.mark.timeout(60)
def test_opposite_orders_do_not_deadlock_the_server(own: database.Database, dsn: str) -> None:
    """Rows are locked in ascending order, whoever waits for whatever in whichever line."""
    a, b = Limit("a", concurrency=1), Limit("b", concurrency=1)
    failures: list[BaseException] = []

    def play(number: int) -> None:
        line = Line(own)
        wanted = ([a, b], [b, a], [a], [b])[number % 4]
        try:
            for turn in range(15):
                name = f"{number}-{turn}"
                wait_until(lambda: line.take(name, *wanted).granted)  # noqa: B023
                line.give(name)
        except (Exception, AssertionError) as exc:  # noqa: BLE001 - told by the test's own thread
            failures.append(exc)

    threads = [threading.Thread(target=play, args=[number]) for number in range(6)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert failures == []
    with psycopg.connect(dsn) as connection:
        (left,) = connection.execute("SELECT count(*) FROM fanout_permits").fetchall()
        (deadlocks,) = connection.execute(
            "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
        ).fetchall()
    assert (left, deadlocks) == ((0,), (0,))


# -- sweep and audit


def test_the_sweep_removes_dead_permits_and_serves_the_line(
    own: database.Database, conn: Conn, fanout: FanOut
) -> None:
    """E01: the dead leave nothing behind, and who waits is let in."""
    line = Line(own, ONE)
    assert line.granted("a", "b") == [True, False]
    assert "dead_permits" not in fanout.sweep().done
    line.silent(conn, "a")
    assert fanout.sweep().done["dead_permits"] == 1
    assert [(row["label"], row["granted_at"] is None) for row in rows(conn)] == [("b", False)]


def test_the_audit_finds_shut_limits_and_dead_permits(
    own: database.Database, conn: Conn, fanout: FanOut
) -> None:
    line = Line(own, ONE)
    line.take("a")
    run_id = sealed(own, "1", **LIMITED)
    assert fanout.audit() == []
    line.silent(conn, "a")
    fanout.update_limit("llm", concurrency=0)
    line.take("w", LLM)
    found = {(one.kind, one.run_id, one.subject, one.repairable) for one in fanout.audit()}
    assert found == {
        ("shut_limit", run_id, "limit llm", False),
        ("shut_limit", None, "limit llm", False),
        ("dead_permit", None, "limit one", True),
    }
    assert {one.kind for one in fanout.audit(run_id)} == {"shut_limit"}
    fanout.sweep()
    assert {one.kind for one in fanout.audit()} == {"shut_limit"}


# -- in Python


def counted(fanout: FanOut, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the calls that are sent from now on."""
    sent: list[str] = []
    run = database.Database.run

    def noted(self: database.Database, call: store.Call[Any]) -> Any:
        sent.append(call.name)
        return run(self, call)

    monkeypatch.setattr(database.Database, "run", noted)
    return sent


def test_a_free_permit_costs_two_round_trips(
    fanout: FanOut, conn: Conn, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = counted(fanout, monkeypatch)
    with fanout.permit(LLM) as permit:
        assert not permit.lost
        assert [row["label"] for row in rows(conn)] == [permits.program()]
    assert sent == ["take_permit", "give_permit"]
    assert rows(conn) == []


async def test_waiting_async(app: procrastinate.App, conn: Conn) -> None:
    """Woken by who gives back, in the order of coming, long before the poll."""
    async with opened(app):
        fanout, order = FanOut.of(app), list[int]()

        async def wait(number: int) -> None:
            async with fanout.permit(ONE):
                order.append(number)

        tasks = []
        async with fanout.permit(ONE):
            for number in range(5):
                tasks.append(asyncio.create_task(wait(number), context=contextvars.Context()))
                await wait_until_async(lambda: len(rows(conn)) == len(tasks) + 1)
            await wait_until_async(lambda: fanout.hub.listening)
        begun_at = time.monotonic()
        await asyncio.gather(*tasks)
        # Five in a row by polling alone would take seconds.
        assert time.monotonic() - begun_at < 2.0
        assert order == [0, 1, 2, 3, 4]
        assert rows(conn) == []


async def test_time_out(app: procrastinate.App, conn: Conn) -> None:
    """Who gives up stands in no line, and a child that meets it is tried again."""
    async with opened(app):
        fanout = FanOut.of(app)
        async with fanout.permit(ONE):
            for timeout in (0, 0.3):
                permit = fanout.permit(ONE, timeout=timeout)
                with pytest.raises(LimitTimeout, match=r"no permit of one within .*: limit one is"):
                    await elsewhere(permit.__aenter__())
                assert len(rows(conn)) == 1
    assert not outcomes.classify(LimitTimeout(("one",), 1.0)).permanent


async def elsewhere(work: Coroutine[Any, Any, Any]) -> Any:
    """Run something in a task that holds nothing."""
    return await asyncio.create_task(work, context=contextvars.Context())


async def test_a_wait_that_is_cancelled_leaves_the_line(app: procrastinate.App, conn: Conn) -> None:
    async with opened(app):
        fanout = FanOut.of(app)
        async with fanout.permit(ONE):
            task = asyncio.create_task(
                fanout.permit(ONE).__aenter__(), context=contextvars.Context()
            )
            await wait_until_async(lambda: len(rows(conn)) == 2)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert len(rows(conn)) == 1


def test_the_order_rule(fanout: FanOut, conn: Conn) -> None:
    """One permit beside another only in ascending order; else it is refused at once."""
    a, b = Limit("a", concurrency=1), Limit("b", concurrency=1)
    with fanout.permit(a), fanout.permit(b):
        assert len(rows(conn)) == 2
        with pytest.raises(ConfigurationError, match="Take them together"):
            fanout.permit(a).__enter__()
    with fanout.permit(b):
        with pytest.raises(ConfigurationError, match="permit of 'a' while 'b' is held"):
            fanout.permit(a).__enter__()
        with pytest.raises(ConfigurationError, match="permit of 'b' while 'b' is held"):
            fanout.permit(b).__enter__()
        # What another thread holds is no matter of this one.
        with concurrent.futures.ThreadPoolExecutor() as pool:
            other = fanout.permit(a)
            pool.submit(other.__enter__).result()
            pool.submit(other.__exit__, None, None, None).result()
    with fanout.permit(b, a) as both:
        assert both.names == ("a", "b")
    with fanout.permit(a):
        assert len(rows(conn)) == 1
    assert rows(conn) == []


async def test_tasks_know_what_their_maker_holds(app: procrastinate.App) -> None:
    a, b = Limit("a", concurrency=1), Limit("b", concurrency=1)
    async with opened(app):
        fanout = FanOut.of(app)
        go = asyncio.Event()

        async def late() -> str:
            await go.wait()
            async with fanout.permit(a):
                return "had it"

        async with fanout.permit(b):
            with pytest.raises(ConfigurationError):
                await asyncio.create_task(fanout.permit(a).__aenter__())
            task = asyncio.create_task(late())
        go.set()
        assert await task == "had it"  # its maker holds nothing any more


def test_what_cannot_be_asked_for(fanout: FanOut) -> None:
    for wanted, options in (
        ((), {}),
        (("llm",), {}),
        ((LLM, LLM), {}),
        ((LLM,), {"key": "x"}),
        ((TENANT,), {}),
        ((TENANT,), {"key": 7}),
        ((LLM,), {"timeout": -1}),
    ):
        with pytest.raises(ConfigurationError):
            fanout.permit(*wanted, **options)  # type: ignore[arg-type]
    with fanout.permit(LLM) as permit, pytest.raises(ConfigurationError, match="in use"):
        permit.__enter__()


async def test_a_thread_s_permit_would_block_the_loop(app: procrastinate.App) -> None:
    async with opened(app):
        with pytest.raises(ConfigurationError, match="async with"):
            FanOut.of(app).permit(LLM).__enter__()


@pytest.fixture
def short(dsn: str) -> Iterator[FanOut]:
    """An app with the shortest lease."""
    app = procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=dsn))
    made = FanOut(app, lease=1.0)
    with app.open():
        yield made
        made.close()


def test_a_held_permit_is_renewed(short: FanOut, conn: Conn) -> None:
    with short.permit(ONE) as permit:
        (before,) = rows(conn)
        wait_until(lambda: rows(conn)[0]["seen_at"] > before["seen_at"])
        assert not permit.lost


def test_a_lost_permit_is_told(short: FanOut, conn: Conn, caplog: pytest.LogCaptureFixture) -> None:
    with short.permit(ONE) as permit:
        conn.execute("UPDATE fanout_permits SET seen_at = seen_at - interval '1 hour'")
        wait_until(lambda: permit.lost and caplog.records)
        assert permit.lost
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and vars(record)["action"] == "permit_lost"
    assert rows(conn) == []


def test_without_a_database_it_is_lost_after_a_lease(
    short: FanOut, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = database.Database.run

    def refusing(self: database.Database, call: store.Call[Any]) -> Any:
        if call.name == "renew_permits":
            raise DatabaseError("gone", transient=True)
        return run(self, call)

    monkeypatch.setattr(database.Database, "run", refusing)
    with short.permit(ONE) as permit:
        assert not permit.lost
        wait_until(lambda: permit.lost)
    assert "Permits were not renewed: gone" in caplog.text


def test_a_permit_that_cannot_be_given_back_ends_with_its_lease(
    short: FanOut, conn: Conn, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """E01: the release itself meets an error; nothing is held for ever."""
    run = database.Database.run

    def refusing(self: database.Database, call: store.Call[Any]) -> Any:
        if call.name == "give_permit":
            raise DatabaseError("gone", transient=True)
        return run(self, call)

    with monkeypatch.context() as patch:
        patch.setattr(database.Database, "run", refusing)
        with short.permit(ONE):
            pass
    assert "was not given back" in caplog.text and len(rows(conn)) == 1
    with short.permit(ONE, timeout=5.0):
        assert len(rows(conn)) == 1


# -- in children


async def test_children_take_permits(app: procrastinate.App, conn: Conn) -> None:
    """E01, E04: permits in async and sync children, and slots, never exceed the limit together."""
    now, most = 0, 0
    lock = threading.Lock()

    def note(step: int) -> None:
        nonlocal now, most
        with lock:
            now += step
            most = max(most, now)

    @fanout_child(app, name="a", pass_context=True)
    async def child(context: ItemContext, item: int) -> None:
        async with context.permit(LLM):
            note(1)
            await asyncio.sleep(0.01)
            note(-1)

    @fanout_child(app, name="s", pass_context=True)
    def child_in_thread(context: ItemContext, item: int) -> None:
        with context.permit(LLM):
            note(1)
            (row,) = [
                one
                for one in rows(conn)
                if one["position"] == context.position and one["run_id"] == context.run_id
            ]
            assert row["label"] == f"item {context.position}"
            note(-1)

    @fanout_child(app, name="l", limits=[LLM])
    async def child_limited(item: int) -> None:
        note(1)
        await asyncio.sleep(0.01)
        note(-1)

    async with serving(app):
        children = (child, child_in_thread, child_limited)
        runs = [await one.map_async(range(20)) for one in children]
        for run in runs:
            assert counts(await finished(run)) == {"succeeded": 20, "total": 20}
    assert (now, most) == (0, 2)
    assert rows(conn) == []


async def test_a_run_makes_room_for_who_waits(app: procrastinate.App) -> None:
    """E04: a long run has all places and asks for no more; a permit is let in after one item."""

    @fanout_child(app, limits=[ONE])
    async def child(item: int) -> None:
        await asyncio.sleep(0.02)

    async with serving(app):
        run = await child.map_async(range(80), max_in_flight=1)
        before = await wait_until_async(lambda: done(run))
        async with FanOut.of(app).permit(ONE):
            assert (await run.progress_async()).done < before + 20
        assert counts(await finished(run)) == {"succeeded": 80, "total": 80}


async def done(run: Run) -> int:
    return (await run.progress_async()).done


async def test_a_slot_that_ends_calls_who_waits(app: procrastinate.App) -> None:
    """E04: woken by the run's end, not by the poll."""

    @fanout_child(app, limits=[ONE])
    async def child(item: int) -> None:
        await go.wait()

    go = asyncio.Event()
    async with serving(app):
        fanout = FanOut.of(app)
        run = await child.map_async([1])
        await wait_until_async(lambda: at_work(run))
        permit = fanout.permit(ONE)
        task = asyncio.create_task(permit.__aenter__())
        await wait_until_async(lambda: fanout.hub.listening)
        go.set()
        await finished(run)
        ended = time.monotonic()
        await task
        assert time.monotonic() - ended < 0.7
        await permit.__aexit__(None, None, None)


async def at_work(run: Run) -> bool:
    return (await run.progress_async()).processing > 0


async def test_a_child_that_finds_no_room_in_time_is_tried_again(app: procrastinate.App) -> None:
    attempts: list[int] = []

    @fanout_child(app, pass_context=True, backoff=QUICK)
    async def child(context: ItemContext, item: int) -> None:
        attempts.append(context.attempt)
        async with context.permit(ONE, timeout=0.1):
            pass

    async with serving(app):
        async with FanOut.of(app).permit(ONE):
            run = await child.map_async([1])
            await wait_until_async(lambda: attempts == [1, 2])
        assert counts(await finished(run)) == {"succeeded": 1, "total": 1}


@pytest.mark.parametrize("how", ["context", "app"])
async def test_a_child_s_declared_limits_are_held_too(app: procrastinate.App, how: str) -> None:
    """Two limits taken in different orders by many children are refused, and never deadlock."""

    @fanout_child(app, pass_context=True, limits=[Limit("b", concurrency=2)])
    async def child(context: ItemContext, item: int) -> None:
        a = Limit("a", concurrency=2)
        permit = context.permit(a) if how == "context" else FanOut.of(app).permit(a)
        async with permit:
            pass

    async with serving(app):
        run = await child.map_async(range(4))
        assert counts(await finished(run)) == {"failed": 4, "total": 4}
        (group,) = await run.errors_async()
        assert group.error_type.endswith("ConfigurationError")
        assert "while 'b' is held" in group.message and "limits=" in group.message


async def test_a_child_pauses_its_limit(app: procrastinate.App, conn: Conn) -> None:
    rated = Limit("rated", concurrency=5)

    @fanout_child(app)
    async def child(item: int) -> None:
        await rated.pause_async(60.0)

    @fanout_child(app, name="sync")
    def child_in_thread(item: int) -> None:
        rated.pause(120.0)

    async with serving(app):
        paused = []
        for one in (child, child_in_thread):
            run = await one.map_async([1])
            assert counts(await finished(run)) == {"succeeded": 1, "total": 1}
            (state,) = await FanOut.of(app).limits_async()
            assert state.paused_until is not None
            paused.append(state.paused_until)
        assert 50 < (paused[1] - paused[0]).total_seconds() < 70
    with pytest.raises(ConfigurationError, match="pause_limit"):
        rated.pause(1.0)


def test_inline_runs_know_no_limits() -> None:
    app = unconnected()

    @fanout_child(app, pass_context=True)
    async def child(context: ItemContext, item: int) -> int:
        async with context.permit(LLM):
            await LLM.pause_async(60.0)
        return item

    @fanout_manager(app, child=child)
    def manager() -> list[int]:
        return [1]

    assert run_inline(manager).results == (1,)
    assert asyncio.run(run_inline_async(manager)).results == (1,)


def test_without_a_job_everything_is_granted() -> None:
    """As a test of a child of the user's makes its context."""
    context = ItemContext(run_id=7, position=3, key="k", attempt=1, run_args={})
    with context.permit(LLM) as permit:
        assert not permit.lost
        with pytest.raises(ConfigurationError):  # the rule is kept there too
            context.permit(LLM).__enter__()


# -- seeing and changing


def test_limits_say_who_has_them(fanout: FanOut, own: database.Database, conn: Conn) -> None:
    """E01: status shows who holds what, who waits, and why."""
    run_id = sealed(own, "1", "2", "3", **LIMITED)
    reply = begun(own, run_id, conn)
    line = Line(own, LLM)
    line.take("w")
    (state,) = fanout.limits()
    assert (state.name, state.kind, state.concurrency, state.used) == ("llm", "shared", 2, 2)
    assert [(use.label, use.run_id, use.slot, use.position, use.key) for use in state.holders] == [
        ("queued", run_id, 1 - reply.slot, None, None),
        ("item", run_id, reply.slot, reply.position, f"k{reply.position}"),
    ]
    assert [use.label for use in state.waiting] == ["w"]
    (want,) = state.wanting
    assert (want.run_id, want.wants, want.reason) == (run_id, 1, "limit llm is full: 2 of 2")
    assert fanout.get_run(run_id).progress().waiting_for == "limit llm is full: 2 of 2"
    json.dumps(state.as_dict())


async def test_a_change_takes_effect_at_once(
    app: procrastinate.App, own: database.Database, conn: Conn
) -> None:
    """E03: raised, places are dealt at once; lowered, none is killed and none begins."""
    async with opened(app):
        fanout = FanOut.of(app)
        run_id = sealed(own, *"123456", **LIMITED)
        assert slots(conn, run_id) == 2
        state = await fanout.update_limit_async(LLM, concurrency=5)
        assert (state.concurrency, slots(conn, run_id)) == (5, 5)
        replies = [begun(own, run_id, conn) for _ in range(5)]
        await fanout.update_limit_async("llm", concurrency=2)
        assert slots(conn, run_id) == 5
        assert not Line(own, LLM).take("w").granted
        # Those that are too many end after the item in hand, and nothing begins instead.
        verdicts = []
        for reply in replies:
            (answer,) = own.run(store.report(run_id, reply.ledger, [entry(reply)], suspect=False))
            verdicts.append(answer.verdict)
        assert verdicts.count("ended") >= 3
        await fanout.pause_limit_async("llm", 60.0)
        assert (await fanout.limits_async())[0].paused_until is not None
        assert (await fanout.resume_limit_async("llm")).paused_until is None


def test_a_raise_lets_in_who_waits(fanout: FanOut, own: database.Database) -> None:
    line = Line(own, ONE)
    assert line.granted("a", "b", "c") == [True, False, False]
    assert fanout.update_limit("one", concurrency=2).used == 2
    assert line.granted("b", "c") == [True, False]
    assert fanout.update_limit("one", concurrency=None).used == 3


def test_changes_that_cannot_work(fanout: FanOut, own: database.Database) -> None:
    Line(own, LLM).take("a")
    Line(own, TENANT).take("a", key="x")
    for name, changes in (
        ("llm", {}),
        ("llm", {"concurrency": -1}),
        ("llm", {"rate": 0}),
        ("llm", {"per": None}),
        ("llm", {"burst": 0}),
        ("unknown", {"concurrency": 1}),
        ("tenant", {"rate": 1.0}),
        ("tenant", {"concurrency": None}),
    ):
        with pytest.raises(ConfigurationError):
            fanout.update_limit(name, **changes)
    for seconds in (0, -1, float("nan"), True):
        with pytest.raises(ConfigurationError):
            fanout.pause_limit("llm", seconds)
    with pytest.raises(ConfigurationError, match="no limit 'unknown'"):
        fanout.resume_limit("unknown")
    state = fanout.update_limit("llm", rate=60, per=60.0)
    assert (state.rate, state.per, state.burst) == (60, 60, 6)
