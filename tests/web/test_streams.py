"""Event streams: what they hold, in which order, and what clients cannot do to them."""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import procrastinate
import psycopg
import pytest
from starlette.middleware.gzip import GZipMiddleware

from fanout_procrastinate import (
    FanOut,
    ItemContext,
    PermanentError,
    Run,
    errors,
    fanout_child,
    models,
    subscriptions,
    web,
)
from fanout_procrastinate.web import streams
from tests.apps.shown import Page
from tests.support import opened, work_off, working
from tests.waiting import wait_until_async
from tests.web.conftest import Stage
from tests.web.streaming import Connection, Stream, no_watcher

pytestmark = pytest.mark.pg18_only

Clients = Callable[..., Awaitable[Connection]]
ROWS = "one\ntwo\r\nthree\rfour \u2028 five"


@pytest.fixture
async def declared(app: procrastinate.App) -> AsyncIterator[Any]:
    """A child that logs each item and fails for one."""

    @fanout_child(app, pass_context=True, max_attempts=1)
    async def child(context: ItemContext, item: str) -> str:
        await context.log_async(item, letters=len(item))
        if item == "bad":
            raise PermanentError("bad")
        return item

    async with opened(app):
        yield child
        await no_watcher()


async def test_head_of_a_stream_ends(app: procrastinate.App, declared: Any) -> None:
    run = await declared.map_async(["last"])
    for path in ("/api/events", f"/api/runs/{run.id}/events"):
        async with Stream(web.create_app(app), path, method="HEAD") as stream:
            await stream.ended()
            assert (stream.status, stream.body) == (200, b"")
            assert stream.headers["content-type"].startswith("text/event-stream")


async def test_snapshot_then_deltas_then_the_close(app: procrastinate.App, declared: Any) -> None:
    """G08, G13: subscribed before the snapshot; framed whatever is said; ended with the run."""
    run = await declared.map_async([ROWS, "bad", "last"])
    async with Stream(web.create_app(app), f"/api/runs/{run.id}/events") as stream:
        assert (await stream.until("snapshot")).data["status"] == "processing"
        async with working(app, concurrency=1):
            await run.wait_async(timeout=10)
            closed = await stream.until("closed")
            await stream.ended()
    assert (stream.kinds[0], stream.kinds[-1]) == ("snapshot", "closed")
    assert closed.data | {"total": 3, "succeeded": 2, "failed": 1, "run_id": str(run.id)} == (
        closed.data
    )
    done = [one.data["done"] if "done" in one.data else _done(one.data) for one in _states(stream)]
    assert done == sorted(done) and done[-1] == 3
    for one in stream.sent:
        assert (one.id is not None) == (one.kind in ("snapshot", "progress", "closed")), one
        for line in one.text.split("\n"):
            assert re.match(r"(event|data|id|retry): ", line), one


def live(app: procrastinate.App) -> list[Any]:
    """Return the subscriptions that still wait for events."""
    return [one for one in FanOut.of(app).events._subscribers if not one.ended]


def _states(stream: Stream) -> list[Any]:
    return [one for one in stream.sent if one.kind in ("snapshot", "progress", "closed")]


def _done(progress: dict[str, Any]) -> int:
    return int(progress["succeeded"] + progress["failed"] + progress["cancelled"])


async def test_log_lines_and_failures(app: procrastinate.App, declared: Any) -> None:
    run = await declared.map_async([ROWS, "bad"], item_key=lambda item: item[:3])
    other = await declared.map_async(["other"])
    await run.pause_async()
    async with Stream(web.create_app(app), f"/api/runs/{run.id}/events") as stream:
        await stream.until("snapshot")
        await run.resume_async()
        async with working(app, concurrency=1):
            await other.wait_async(timeout=10)
            await stream.until("closed")
    lines = [one.data for one in stream.sent if one.kind == "log"]
    assert [(line["key"], line["message"]) for line in lines] in (
        [("one", ROWS), ("bad", "bad")],
        [("one", ROWS)],  # the last may come after the close: events are hints
        [],
    )


async def test_headers(app: procrastinate.App, declared: Any) -> None:
    """G13: not held back by caches, proxies or a layer that compresses."""
    run = await declared.map_async(["a"])
    compressed = GZipMiddleware(web.create_app(app), minimum_size=0)
    async with Stream(compressed, f"/api/runs/{run.id}/events") as stream:
        await stream.until("snapshot", timeout=1.0)
        expected = {
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-cache",
            "x-accel-buffering": "no",
            "x-content-type-options": "nosniff",
        }
        assert stream.headers | expected == stream.headers
        assert not {"content-encoding", "connection", "content-length"} & set(stream.headers)
        assert "retry: 2000" in stream.sent[0].text


async def test_pings_are_comments(
    app: procrastinate.App, declared: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G12, G13: they keep proxies awake, have no id, and mean nothing."""
    assert streams.PING_SECONDS == 15
    monkeypatch.setattr(streams, "PING_SECONDS", 0.05)
    run = await declared.map_async(["a"])
    async with Stream(web.create_app(app), f"/api/runs/{run.id}/events") as stream:
        await wait_until_async(lambda: stream.body.count(b": ping") >= 3)
    pings = [one for one in stream.sent if not one.kind]
    assert {(one.text, one.id, one.data) for one in pings} == {(": ping", None, None)}


async def test_closed_before_it_was_asked_for(app: procrastinate.App, declared: Any) -> None:
    """G08: the last state comes at once; who has it is told not to come back."""
    run = await declared.map_async(["a"])
    await work_off(app, run)
    dashboard, path = web.create_app(app), f"/api/runs/{run.id}/events"
    async with Stream(dashboard, path) as stream:
        await stream.ended()
    assert stream.kinds == ["snapshot", "closed"]
    last = {"last-event-id": stream.sent[-1].id or ""}
    async with Stream(dashboard, path, headers=last) as again:
        await again.ended()
    assert (again.status, again.body) == (204, b"")
    # From an earlier point, or another generation, everything comes again.
    async with Stream(dashboard, path, headers={"last-event-id": "1-0"}) as earlier:
        await earlier.ended()
    assert earlier.kinds == ["snapshot", "closed"]


async def test_run_that_is_removed_meanwhile(
    app: procrastinate.App, declared: Any, conn: psycopg.Connection[Any]
) -> None:
    run = await declared.map_async(["a"])
    async with Stream(web.create_app(app), f"/api/runs/{run.id}/events") as stream:
        await stream.until("snapshot")
        conn.execute("DELETE FROM fanout_runs")
        await stream.ended()
    assert stream.status == 200


async def test_progress_never_goes_backwards(app: procrastinate.App, declared: Any) -> None:
    """G14: what was read earlier and arrives later is left out, unless the run was reopened."""
    run = await declared.map_async(["a", "b", "c"])
    now = (await run.progress_async()).as_dict()

    def tell(**fields: Any) -> None:
        progress = models.Progress.from_json(now | fields)
        (subscription,) = live(app)
        subscription.put(
            subscriptions.Event(
                run_id=run.id,
                kind="progress",
                data={"progress": progress},
                at=subscriptions.now(),
            )
        )

    async with Stream(web.create_app(app), f"/api/runs/{run.id}/events") as stream:
        await stream.until("snapshot")
        for fields in (
            {"succeeded": 2},
            {"succeeded": 1},
            {"failed": 2},
            {"generation": 2},
            {"generation": 1, "succeeded": 3},
            {"generation": 2, "succeeded": 1},
        ):
            before = len(stream.sent)
            tell(**fields)
            if fields.get("generation") == 2 or fields in ({"succeeded": 2}, {"failed": 2}):
                await wait_until_async(lambda n=before: len(stream.sent) > n)
    places = [(one.data["generation"], one.data["done"]) for one in _states(stream)]
    assert places == sorted(places)
    assert {(1, 2), (2, 0), (2, 1)} <= set(places)


async def test_resync_tells_the_state(app: procrastinate.App, declared: Any) -> None:
    """G12: whoever missed events is given the whole state."""
    run = await declared.map_async(["a", "b"])
    async with Stream(web.create_app(app), f"/api/runs/{run.id}/events") as stream:
        await stream.until("snapshot")
        for subscription in live(app):
            subscription.missed()
        assert (await stream.until("resync")).data["pending"] == 2


async def test_database_that_goes_away_ends_the_stream_in_order(
    app: procrastinate.App, declared: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client comes back by itself, and nobody finds a traceback in the log."""

    async def broken(*_: Any) -> None:
        raise errors.DatabaseError("server closed the connection unexpectedly")

    run = await declared.map_async(["a"])
    async with Stream(web.create_app(app), f"/api/runs/{run.id}/events") as stream:
        await stream.until("snapshot")
        monkeypatch.setattr(Run, "progress_async", broken)
        for subscription in live(app):
            subscription.missed()
        await stream.ended()
    assert stream.complete and "closed" not in stream.kinds


async def test_client_that_does_not_read_is_dropped(app: procrastinate.App, declared: Any) -> None:
    """G12: after the send time-out; nothing of it is left, and the others go on."""
    run = await declared.map_async(["a"])
    dashboard, path = web.create_app(app, send_timeout=0.2), f"/api/runs/{run.id}/events"
    async with Stream(dashboard, path) as other:
        async with Stream(dashboard, path, stalls_after=1) as stalled:
            await stalled.ended(timeout=3.0)
        assert len(live(app)) == 1
        async with working(app):
            await other.until("closed")


async def test_client_that_leaves(app: procrastinate.App, declared: Any) -> None:
    run = await declared.map_async(["a"])
    dashboard = web.create_app(app)
    for path in (f"/api/runs/{run.id}/events", "/api/events"):
        async with Stream(dashboard, path) as stream:
            await stream.until("snapshot")
            assert len(live(app)) == 1
        assert not live(app)


async def test_too_many_streams(
    app: procrastinate.App, declared: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "MOST_STREAMS", 1)
    run = await declared.map_async(["a"])
    dashboard, path = web.create_app(app), f"/api/runs/{run.id}/events"
    async with Stream(dashboard, path) as first:
        await first.until("snapshot")
        async with Stream(dashboard, path) as second:
            await second.ended()
        assert second.status == 503 and b"too many" in second.body
    async with Stream(dashboard, path) as third:
        await third.until("snapshot")


async def test_changes_of_all_runs(app: procrastinate.App, declared: Any) -> None:
    """The list of runs is told which have moved, at most once a second."""
    runs = [await declared.map_async(["a", "b"]) for _ in range(3)]
    async with Stream(web.create_app(app), "/api/events") as stream:
        await stream.until("snapshot")
        await work_off(app, *runs)
        await wait_until_async(
            lambda: (
                {run for one in stream.sent[1:] for run in one.data["runs"]}
                >= {str(run.id) for run in runs}
            )
        )
    assert set(stream.kinds) == {"snapshot", "changed"}


# -- over real connections


@pytest.fixture
async def clients() -> AsyncIterator[Clients]:
    """Call it to open a stream over a connection, closed with the test."""
    opened: list[Connection] = []

    async def open_one(port: int, path: str, **options: Any) -> Connection:
        opened.append(await Connection(port, path).open(**options))
        return opened[-1]

    yield open_one
    for one in opened:
        one.vanish()
    await asyncio.sleep(0)  # they are gone now


def _listeners(conn: psycopg.Connection[Any]) -> int:
    return len(
        conn.execute(
            "SELECT pid FROM pg_stat_activity WHERE query = 'LISTEN fanout_v1'"
            " AND datname = current_database()"
        ).fetchall()
    )


@pytest.mark.acceptance
async def test_two_hundred_clients(
    stage: Stage, conn: psycopg.Connection[Any], clients: Clients
) -> None:
    """G11, G12: one LISTEN connection, none of the pool's three held, and nobody in the way."""
    run = await asyncio.to_thread(
        stage.run, [Page(name=f"page {n}", says="x" * 500, sleep=0.01) for n in range(400)]
    )
    served = await asyncio.to_thread(stage.dashboard)
    path = f"/api/runs/{run.id}/events"
    readers = [await clients(served.port, path) for _ in range(180)]
    for _ in range(10):  # they never read
        await clients(served.port, path, receive_buffer=2048)
    vanishing = [await clients(served.port, path) for _ in range(10)]
    await asyncio.gather(*(one.snapshot() for one in readers + vanishing))
    assert _listeners(conn) == 1
    async with httpx.AsyncClient(base_url=served.url, timeout=10) as client:
        answers = await asyncio.gather(*(client.get("/api/runs") for _ in range(20)))
    assert [one.status_code for one in answers] == [200] * 20
    before = served.memory()

    await asyncio.to_thread(stage.worker, concurrency=8)
    for one in vanishing:
        one.vanish()
    async with asyncio.timeout(30):
        heard = await asyncio.gather(*(one.to_the_end() for one in readers))
    for sent in heard:
        assert (sent[0].kind, sent[-1].kind) == ("snapshot", "closed")
        assert sent[-1].data["succeeded"] == 400
        done = [_done(one.data) for one in sent if one.kind in ("snapshot", "progress", "closed")]
        assert done == sorted(done)
    assert sum(len(sent) for sent in heard) / len(heard) > 20
    assert served.memory() - before < 25_000_000


@pytest.mark.acceptance
async def test_two_dashboards_and_two_workers(stage: Stage, clients: Clients) -> None:
    """G08: what any worker says reaches a client of any process."""
    pages = [Page(name=f"page {n}", says="working", waits_for="gate") for n in range(8)]
    run = await asyncio.to_thread(stage.run, pages, max_in_flight=8)
    dashboards = [await asyncio.to_thread(stage.dashboard) for _ in range(2)]
    path = f"/api/runs/{run.id}/events"
    watching = [await clients(one.port, path) for one in dashboards]
    await asyncio.gather(*(one.snapshot() for one in watching))
    workers = [await asyncio.to_thread(stage.worker, concurrency=4) for _ in range(2)]
    expected = {worker.pid for worker in workers}

    async def heard_all(client: Connection) -> None:
        async for _ in client.news():
            lines = [one.data for one in client.sent() if one.kind == "log"]
            if {line["data"]["pid"] for line in lines if "data" in line} == expected:
                return

    async with asyncio.timeout(20):
        await asyncio.gather(*map(heard_all, watching))
        stage.log.arrive("gate")
        ends = await asyncio.gather(*(one.to_the_end() for one in watching))
    assert [end[-1].data["succeeded"] for end in ends] == [8, 8]
