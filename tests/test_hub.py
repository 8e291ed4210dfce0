"""The hub: one LISTEN connection for everybody who wants to hear, and only while somebody does."""

import threading
from collections.abc import Iterator
from typing import Any

import procrastinate
import psycopg
import pytest

from fanout_procrastinate import FanOut, fanout_child
from fanout_procrastinate import hub as hub_module
from fanout_procrastinate.hub import Hub
from tests.support import serving
from tests.waiting import wait_until, wait_until_async

Conn = psycopg.Connection[dict[str, Any]]
NAME = "the-hub"


@pytest.fixture
def hub(dsn: str) -> Iterator[Hub]:
    made = Hub(lambda: psycopg.connect(dsn, application_name=NAME))
    yield made
    made.close()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub that does not linger, and tries again at once."""
    monkeypatch.setattr(hub_module, "_LINGER_SECONDS", 0.0)
    monkeypatch.setattr(hub_module, "_READ_SECONDS", 0.02)
    monkeypatch.setattr(hub_module, "_FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(hub_module, "_LONGEST_PAUSE_SECONDS", 0.02)


def notify(conn: Conn, payload: str) -> None:
    conn.execute("SELECT pg_notify('fanout_v1', %s)", [payload])


def listeners(conn: Conn) -> list[dict[str, Any]]:
    return conn.execute(
        "SELECT pid, state, backend_xmin FROM pg_stat_activity WHERE application_name = %s", [NAME]
    ).fetchall()


def subscribed(hub: Hub) -> list[dict[str, Any]]:
    """Subscribe a list, and wait until it is told that somebody listens."""
    heard: list[dict[str, Any]] = []
    hub.subscribe(heard.append)
    wait_until(lambda: hub.listening)
    return heard


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "fanout-events"]


def test_one_connection_for_many(hub: Hub, conn: Conn) -> None:
    heard = [subscribed(hub) for _ in range(50)]
    notify(conn, '{"run": 7, "event": "closed"}')
    wait_until(lambda: all(one and one[-1] == {"run": 7, "event": "closed"} for one in heard))
    # Not in a transaction, holding nothing back.
    (session,) = listeners(conn)
    assert (session["state"], session["backend_xmin"]) == ("idle", None)
    assert len(threads()) == 1


def test_first_event_says_that_it_listens(hub: Hub, conn: Conn) -> None:
    heard = subscribed(hub)
    wait_until(lambda: heard == [{"event": "listening"}])


def test_what_is_no_event_is_passed_over(
    hub: Hub, conn: Conn, caplog: pytest.LogCaptureFixture
) -> None:
    heard = subscribed(hub)

    def broken(event: dict[str, Any]) -> None:
        raise ZeroDivisionError

    wait_until(lambda: heard)  # of the listening
    hub.subscribe(broken)
    for payload in ("", "no JSON", "[1]", "7", '{"n": 1}'):
        notify(conn, payload)
    wait_until(lambda: heard and heard[-1] == {"n": 1})
    assert len(heard) == 2
    wait_until(lambda: caplog.records)  # the other subscriber's turn may come later
    assert [record.message for record in caplog.records] == ["Subscriber failed"]
    assert len(listeners(conn)) == 1


def test_unsubscribed_hear_no_more(hub: Hub, conn: Conn) -> None:
    heard, others = subscribed(hub), subscribed(hub)
    hub.unsubscribe(heard.append)  # an equal method, as bound methods are
    notify(conn, '{"n": 1}')
    wait_until(lambda: {"n": 1} in others)
    assert {"n": 1} not in heard
    hub.unsubscribe(heard.append)


def test_ends_when_nobody_is_left(hub: Hub, conn: Conn, quick: None) -> None:
    heard = subscribed(hub)
    hub.unsubscribe(heard.append)
    wait_until(lambda: not threads() and not listeners(conn))
    assert not hub.listening
    again = subscribed(hub)  # and begins anew
    notify(conn, '{"n": 1}')
    wait_until(lambda: {"n": 1} in again)


def test_lingers_for_the_next_one(hub: Hub, conn: Conn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "_LINGER_SECONDS", 60.0)
    subscribed(hub)
    (session,) = listeners(conn)
    for _ in range(5):
        heard = subscribed(hub)
        hub.unsubscribe(heard.append)
    assert listeners(conn) == [session]
    hub.close()
    assert not threads()
    wait_until(lambda: not listeners(conn))


def test_reconnects(hub: Hub, conn: Conn, quick: None, caplog: pytest.LogCaptureFixture) -> None:
    heard = subscribed(hub)
    for round_ in range(3):
        wait_until(lambda: hub.listening and listeners(conn))
        conn.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = %s",
            [NAME],
        )
        # Told to look again: what was sent meanwhile is lost.
        wait_until(lambda n=round_: heard.count({"event": "listening"}) == n + 2)
    notify(conn, '{"n": 1}')
    wait_until(lambda: {"n": 1} in heard)
    assert len(listeners(conn)) == 1
    assert "polling goes on" in caplog.text


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError("no route"), "polling goes on"),
        (psycopg.OperationalError("refused"), "polling goes on"),
        (RuntimeError("odd"), "Unexpected error"),
    ],
)
def test_tries_again_until_it_listens(
    dsn: str,
    conn: Conn,
    quick: None,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    words: str,
) -> None:
    tries: list[int] = []

    def connect() -> psycopg.Connection[Any]:
        tries.append(len(tries))
        if len(tries) < 4:
            raise error
        return psycopg.connect(dsn, application_name=NAME)

    hub = Hub(connect)
    subscribed(hub)
    assert len(tries) == 4 and caplog.text.count(words) == 3
    hub.close()


def test_pauses_between_tries_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float | None] = []
    hub = Hub(lambda: psycopg.connect("host=/nowhere"))

    def wait(timeout: float | None = None) -> bool:
        pauses.append(timeout)
        if len(pauses) == 9:
            hub._subscribers.clear()
        return False

    monkeypatch.setattr(hub._alone, "wait", wait)
    hub.subscribe(lambda event: None)
    wait_until(lambda: not threads())
    assert pauses == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]


def test_long_pause_ends_with_the_last_subscriber(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hub_module, "_FIRST_PAUSE_SECONDS", 60.0)
    hub = Hub(lambda: psycopg.connect("host=/nowhere"))
    heard: list[Any] = []
    hub.subscribe(heard.append)
    wait_until(lambda: "polling goes on" in caplog.text)
    hub.unsubscribe(heard.append)
    wait_until(lambda: not threads())
    assert heard == []
    # A new one need not wait for the end of that pause either.
    hub.subscribe(heard.append)
    wait_until(lambda: caplog.text.count("polling goes on") == 2)
    hub.close()
    assert not threads()


def test_close_is_at_once_and_may_come_twice(hub: Hub, conn: Conn) -> None:
    hub.close()
    subscribed(hub)
    hub.close()
    hub.close()
    assert not threads() and not hub.listening


def test_subscribers_come_and_go(hub: Hub, conn: Conn, quick: None) -> None:
    """Whoever is there when the thread ends finds a new one."""
    failures: list[str] = []

    def visit() -> None:
        for _ in range(15):
            heard = threading.Event()

            def tell(event: dict[str, Any], heard: threading.Event = heard) -> None:
                if "n" in event:
                    heard.set()

            hub.subscribe(tell)
            if not heard.wait(10):
                failures.append("heard nothing")
            hub.unsubscribe(tell)

    visitors = [threading.Thread(target=visit) for _ in range(4)]
    for visitor in visitors:
        visitor.start()
    while any(visitor.is_alive() for visitor in visitors):
        notify(conn, '{"n": 1}')
    assert failures == []
    wait_until(lambda: not threads() and not listeners(conn))


async def test_stop_and_close_are_announced(app: procrastinate.App, conn: Conn) -> None:
    hub = FanOut.of(app).hub
    heard: list[dict[str, Any]] = []

    @fanout_child(app)
    async def child(item: int) -> None:
        await started(item)

    async def started(item: int) -> None:
        await wait_until_async(lambda: {"run": run.id, "event": "stop"} in heard)

    async with serving(app, concurrency=1):
        hub.subscribe(heard.append)
        await wait_until_async(lambda: hub.listening)
        run = await child.map_async([1, 2], max_in_flight=1)

        async def at_work() -> bool:
            return (await run.progress_async()).processing == 1

        await wait_until_async(at_work)
        await run.cancel_async()
        await run.wait_async(timeout=10)
        await wait_until_async(lambda: any(event.get("event") == "closed" for event in heard))
        hub.unsubscribe(heard.append)
    told = [event["event"] for event in heard if event["event"] != "progress"]
    assert told == ["listening", "stop", "closed"]
