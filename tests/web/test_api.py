"""The JSON API: what it answers, and what it says when it cannot."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import procrastinate
import psycopg
import psycopg_pool
import pytest

from fanout_procrastinate import (
    FanOut,
    Limit,
    PermanentError,
    Run,
    errors,
    fanout_child,
    fanout_manager,
    web,
)
from fanout_procrastinate.web import failures
from tests.support import begun, direct, finished, opened, working

TOKEN = "the-token-of-these-tests"  # noqa: S105
BEARER = {"authorization": f"Bearer {TOKEN}"}


def hide_secrets(value: Any) -> Any:
    return {**value, "secret": "***"} if isinstance(value, dict) and "secret" in value else value


@pytest.fixture
def declared(app: procrastinate.App) -> Any:
    FanOut(app, redact=hide_secrets)

    @fanout_child(app, name="read", max_attempts=1)
    async def read(item: dict[str, Any]) -> dict[str, Any]:
        if item["n"] % 3 == 0:
            raise PermanentError(f"page {item['n']} is torn")
        return item

    @fanout_manager(app, child=read, name="read_all", item_key=lambda item: f"page-{item['n']}")
    def read_all(count: int) -> Any:
        return [{"n": n, "secret": "s3cret"} for n in range(count)]

    return read_all


@pytest.fixture
async def client(app: procrastinate.App, declared: Any) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(web.create_app(app, token=TOKEN))
    async with (
        opened(app),
        httpx.AsyncClient(transport=transport, base_url="http://localhost") as made,
    ):
        yield made


async def closed_run(app: procrastinate.App, declared: Any, count: int = 10, **options: Any) -> Run:
    run: Run = await declared.configure(**options).defer_async(count=count)
    async with working(app):
        await finished(run)
    return run


async def got(client: httpx.AsyncClient, path: str) -> Any:
    response = await client.get(path)
    assert response.status_code == 200, response.text
    return response.json()


async def test_runs_are_listed_and_filtered(
    client: httpx.AsyncClient, app: procrastinate.App, declared: Any
) -> None:
    first = await closed_run(app, declared, tags=["nightly"])
    second = await declared.defer_async(count=2)
    runs = (await got(client, "/api/runs"))["runs"]
    assert [run["run_id"] for run in runs] == [str(second.id), str(first.id)]
    assert runs[1] | {"status": "completed", "failed": 4, "total": 10, "percent": 100.0} == runs[1]
    for query, found in {
        "status=pending": [second],
        "tag=nightly": [first],
        "name=read_all&limit=1": [second],
        "name=other": [],
    }.items():
        runs = (await got(client, f"/api/runs?{query}"))["runs"]
        assert [run["run_id"] for run in runs] == [str(run.id) for run in found], query


async def test_run_with_all_it_has(
    client: httpx.AsyncClient, app: procrastinate.App, declared: Any
) -> None:
    run = await closed_run(app, declared, tags=["nightly"], run_key="today")
    shown = await got(client, f"/api/runs/{run.id}")
    expected = {
        "run_id": str(run.id),
        "args": {"count": 10},
        "tags": ["nightly"],
        "run_key": "today",
        "child_task": "read",
        "slots": [],
        "limits": [],
        "succeeded": 6,
    }
    assert shown | expected == shown
    (group,) = (await got(client, f"/api/runs/{run.id}/errors"))["errors"]
    assert (group["count"], group["position"], group["message"]) == (4, 0, "page 0 is torn")


async def test_items_page_by_page(
    client: httpx.AsyncClient, app: procrastinate.App, declared: Any
) -> None:
    run = await closed_run(app, declared)
    path = f"/api/runs/{run.id}/items"
    seen, after = [], -1
    while after is not None:
        page = await got(client, f"{path}?limit=4&after={after}")
        assert len(page["items"]) <= 4
        seen += [item["position"] for item in page["items"]]
        after = page["next"]
    assert seen == list(range(10))
    for query, positions in {
        "status=failed": [0, 3, 6, 9],
        "status=failed&after=3&limit=1": [6],
        "search=TORN": [0, 3, 6, 9],
        "search=page-7": [7],
        "search=page%206&status=failed": [6],
        "status=succeeded&search=page-6": [],
        "status=processing": [],
    }.items():
        found = (await got(client, f"{path}?{query}"))["items"]
        assert [item["position"] for item in found] == positions, query
    assert not {"payload", "result"} & set(found[0] if found else {})


async def test_search_goes_on_where_a_page_stopped(
    client: httpx.AsyncClient,
    app: procrastinate.App,
    declared: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A search in a large run takes a moment at most; `next` says where to go on."""
    run = await closed_run(app, declared)
    monkeypatch.setattr("fanout_procrastinate.web.reading._WINDOW", 3)
    path = f"/api/runs/{run.id}/items?search=page-8"
    assert [item["position"] for item in (await got(client, path))["items"]] == [8]
    monkeypatch.setattr("fanout_procrastinate.web.reading._SEARCH_SECONDS", 0)
    assert await got(client, path) == {"items": [], "next": 2}
    (item,) = (await got(client, f"{path}&after=6"))["items"]
    assert item["position"] == 8


async def test_item_with_all_it_has(
    client: httpx.AsyncClient, app: procrastinate.App, declared: Any
) -> None:
    """Payload and result pass through the app's `redact`."""
    run = await closed_run(app, declared)
    item = await got(client, f"/api/runs/{run.id}/items/1")
    assert (item["key"], item["status"], item["attempts"]) == ("page-1", "succeeded", 1)
    assert item["payload"] == item["result"] == {"n": 1, "secret": "***"}
    failed = await got(client, f"/api/runs/{run.id}/items/3")
    assert failed["result"] is None and "torn" in failed["error"]["traceback"]
    page = await client.get(f"/runs/{run.id}/items/1")
    assert page.status_code == 200 and "s3cret" not in page.text


async def test_slots_say_what_they_work_on(
    client: httpx.AsyncClient, app: procrastinate.App, declared: Any, conn: Any
) -> None:
    run = await declared.configure(max_in_flight=2).defer_async(count=3)
    async with working(app):
        await finished(run)
    await FanOut.of(app).runtime().close()  # it would sweep what follows away
    conn.execute(
        "INSERT INTO fanout_slots (run_id, slot, job_id, active, held) VALUES"
        " (%(run)s, 0, 9007199254741003, true, 1), (%(run)s, 1, 7, false, NULL)",
        {"run": run.id},
    )
    active, queued = (await got(client, f"/api/runs/{run.id}"))["slots"]
    assert (active["job_id"], active["key"]) == ("9007199254741003", "page-1")
    assert (queued["active"], queued["position"]) == (False, None)
    page = await client.get(f"/runs/{run.id}")
    assert "waits for a worker" in page.text
    conn.execute("DELETE FROM fanout_slots")


async def test_limits_have_their_section(
    client: httpx.AsyncClient, app: procrastinate.App, declared: Any, conn: psycopg.Connection[Any]
) -> None:
    """Who holds a limit, and who waits for it."""
    run = await declared.defer_async(count=1)
    assert "limits-title" not in (await client.get(f"/runs/{run.id}")).text
    service = Limit("crossref", concurrency=1, rate=50, per=60.0)

    @fanout_child(app, name="look_up", queue="papers", limits=[service])
    async def look_up(item: int) -> int:
        return item

    first, second = [await look_up.map_async([1, 2]) for _ in range(2)]
    (limit,) = (await got(client, f"/api/runs/{first.id}"))["limits"]
    assert (limit["name"], limit["used"], limit["concurrency"]) == ("crossref", 1, 1)
    assert limit["waiting"] >= 2
    assert limit["holders"] == [f"queued: run {first.id}"]
    assert any(line.startswith(f"run {second.id}:") for line in limit["queue"])
    page = (await client.get(f"/runs/{second.id}")).text
    assert "limits-title" in page and "50 in 1 min 00 s" in page
    assert f"queued: run {first.id}" in page
    assert (limit["others"], limit["others_waiting"]) == (0, 0)
    for run in (first, second):
        await run.cancel_async()


async def test_control(client: httpx.AsyncClient, app: procrastinate.App, declared: Any) -> None:
    """F09: each action is done, and answered with the progress."""
    run = await declared.defer_async(count=4)

    async def post(action: str, **body: Any) -> Any:
        response = await client.post(f"/api/runs/{run.id}/{action}", json=body, headers=BEARER)
        assert response.status_code == 200, response.text
        return response.json()

    assert (await post("pause"))["paused"] is True
    assert (await post("resume"))["paused"] is False
    assert (await post("update", max_in_flight=3, tolerate=0.5))["max_in_flight"] == 3
    async with working(app):
        await finished(run)
    retried = await post("retry")
    assert (retried["retried"], retried["generation"]) == (2, 2)
    cancelled = await post("cancel", reason="wrong folder")
    assert (cancelled["status"], cancelled["reason"]) == ("cancelled", "wrong folder")
    assert (await post("cancel"))["status"] == "cancelled"  # the wish has come true


IMPOSSIBLE: list[tuple[str, Any, int, str]] = [
    ("pause", {}, 409, "is closed"),
    ("resume", {}, 409, "is closed"),
    ("cancel", {}, 409, "is closed"),
    ("update", {"max_in_flight": 1}, 409, "is closed"),
    ("update", {}, 400, "update what"),
    ("update", {"max_in_flight": 0}, 400, "max_in_flight"),
    ("update", {"max_in_flight": True}, 400, "max_in_flight"),
    ("update", {"colour": 1}, 400, "no option"),
    ("cancel", {"reason": 7}, 400, "reason"),
    ("cancel", {"reason": "x" * 501}, 400, "at most 500"),
    ("retry", {"error_type": []}, 400, "error_type"),
    ("retry", [1], 400, "JSON object"),
    ("explode", {}, 404, "no action"),
]
ODD: list[tuple[str, str, int]] = [
    ("retry", '{"error_type": "\\ud800"}', 200),
    ("retry", '{"error_type": "a\\u0000"}', 200),
    ("update", '{"deadline": NaN}', 400),
    ("update", '{"deadline": 1e400}', 400),
    ("update", '{"tolerate": 1e400}', 400),
    ("update", '{"priority": ' + "9" * 4000 + "}", 400),
    ("update", '{"priority": ' + "9" * 5000 + "}", 400),
    ("update", '{"\\ud800": 1}', 400),
    ("cancel", '{"reason": "\\ud800\\u0000"}', 200),
]


async def test_control_that_cannot_be(
    client: httpx.AsyncClient, app: procrastinate.App, declared: Any
) -> None:
    run = await closed_run(app, declared, count=1)
    for action, body, status, words in IMPOSSIBLE:
        response = await client.post(f"/api/runs/{run.id}/{action}", json=body, headers=BEARER)
        assert response.status_code == status, response.text
        assert words in response.json()["error"]
    assert (await run.progress_async()).generation == 1


async def test_odd_text_and_numbers_break_nothing(
    client: httpx.AsyncClient, app: procrastinate.App, declared: Any
) -> None:
    run = await declared.defer_async(count=3)
    for action, body, status in ODD:
        response = await client.post(f"/api/runs/{run.id}/{action}", content=body, headers=BEARER)
        assert response.status_code == status, (action, body[:40], response.text)
    other = await declared.defer_async(count=3)
    await client.get("/login")
    headers = BEARER | {"content-type": "application/x-www-form-urlencoded"}
    for action, form in {"retry": b"error_type=%00%ED%A0%80", "cancel": b"reason=%00%FF"}.items():
        path = f"/runs/{other.id}/control/{action}"
        assert (await client.post(path, content=form, headers=headers)).status_code == 303


async def test_closed_run_names_the_retry_where_something_failed(
    client: httpx.AsyncClient, app: procrastinate.App, declared: Any
) -> None:
    failed = await closed_run(app, declared, count=2)
    clean = await declared.defer_async(count=2)
    await clean.cancel_async()
    for run, words in ((failed, "start a new run, or retry its failed items"), (clean, "new run")):
        response = await client.post(f"/api/runs/{run.id}/pause", headers=BEARER)
        assert response.status_code == 409
        assert response.json()["error"].endswith(words), response.text
        assert "start a new run" in response.text


async def test_stop_that_waits_for_the_items_at_work_is_shown(
    client: httpx.AsyncClient, app: procrastinate.App, declared: Any, conn: Any, dsn: str
) -> None:
    run = await declared.child.map_async([{"n": n} for n in range(3)])
    with direct(dsn, size=1) as own:
        begun(own, run.id, conn)
    await run.cancel_async(reason="wrong folder")
    assert (await run.progress_async()).status == "processing"
    assert "Stopping: wrong folder" in (await client.get(f"/runs/{run.id}")).text


async def test_client_that_goes_away_within_a_body(app: procrastinate.App, declared: Any) -> None:
    """Nobody is there to be answered, and nothing is to be logged."""
    parts = iter([{"type": "http.request", "body": b"{", "more_body": True}])
    answered = []

    async def receive() -> Any:
        return next(parts, {"type": "http.disconnect"})

    async def send(message: Any) -> None:
        answered.append(message.get("status"))

    async with opened(app):
        run = await declared.defer_async(count=1)
        path = f"/api/runs/{run.id}/pause"
        names = {"host": "localhost"} | BEARER
        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "scheme": "http",
            "root_path": "",
            "headers": [(name.encode(), value.encode()) for name, value in names.items()],
        }
        await web.create_app(app, token=TOKEN)(scope, receive, send)
        assert answered[0] == 400
        assert not (await run.progress_async()).paused


async def test_large_bodies_are_refused(
    client: httpx.AsyncClient, app: procrastinate.App, declared: Any
) -> None:
    run = await declared.defer_async(count=1)
    response = await client.post(
        f"/api/runs/{run.id}/cancel", content=b" " * 100_000, headers=BEARER
    )
    assert response.status_code == 413


MISSING = {
    "runs/999": 404,
    "runs/999/items": 404,
    "runs/999/items/0": 404,
    "runs/999/errors": 404,
    "runs/999/events": 404,
    "runs/0": 404,
    "runs/9223372036854775808": 404,
    "runs/" + "1" * 5000: 404,
    "runs/1/items/" + "1" * 5000: 404,
    "runs/x": 404,
    "nothing": 404,
    "runs?status=odd": 400,
    "runs?limit=0": 400,
    "runs?limit=" + "9" * 5000: 400,
    "runs?name=%00": 400,
}


async def test_what_is_not_there(client: httpx.AsyncClient) -> None:
    """Programs are answered in JSON, people by a page; both with the same status."""
    for path, status in MISSING.items():
        response = await client.get(f"/api/{path}")
        assert (response.status_code, bool(response.json()["error"])) == (status, True), path
        page = await client.get(f"/{path.replace('runs?', '?')}")
        assert (page.status_code, page.headers["content-type"][:9]) == (status, "text/html"), path
        assert "<h1" in page.text


async def test_item_that_is_not_there(
    client: httpx.AsyncClient, app: procrastinate.App, declared: Any
) -> None:
    run = await closed_run(app, declared, count=1)
    for position in ("1", "9223372036854775808", "0" * 400 + "5"):
        assert (await client.get(f"/api/runs/{run.id}/items/{position}")).status_code == 404


async def test_ids_of_64_bits(
    client: httpx.AsyncClient, app: procrastinate.App, declared: Any, conn: psycopg.Connection[Any]
) -> None:
    """F07: ids beyond 2^53 reach JavaScript as text, and find their way back."""
    conn.execute("ALTER TABLE fanout_runs ALTER COLUMN id RESTART WITH 9007199254740993")
    run = await closed_run(app, declared, count=2)
    assert run.id == 2**53 + 1
    (listed,) = (await got(client, "/api/runs"))["runs"]
    assert json.dumps(listed["run_id"]) == '"9007199254740993"'
    assert (await got(client, f"/api/runs/{listed['run_id']}"))["run_id"] == listed["run_id"]
    assert (await got(client, f"/api/runs/{run.id}/items"))["items"][1]["key"] == "page-1"
    page = await client.get(f"/runs/{run.id}")
    assert 'data-run="9007199254740993"' in page.text


async def test_app_that_is_not_open(app: procrastinate.App, declared: Any) -> None:
    """Whoever mounts the dashboard has to open the app, and is told so."""
    transport = httpx.ASGITransport(web.create_app(app, token=TOKEN))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        response = await client.get("/api/runs")
        assert response.status_code == 503 and "open_async" in response.json()["error"]


async def test_sync_connector() -> None:
    sync = procrastinate.App(connector=procrastinate.SyncPsycopgConnector(conninfo="host=/no"))
    transport = httpx.ASGITransport(web.create_app(sync))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        response = await client.get("/api/runs")
        assert response.status_code == 503 and "PsycopgConnector" in response.json()["error"]


async def test_server_that_went_away(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What the driver says is for the log, not for whoever asks."""

    async def broken(*_: Any, **__: Any) -> None:
        raise errors.DatabaseError("connection to 10.0.0.7 failed")

    monkeypatch.setattr(FanOut, "runs_async", broken)
    response = await client.get("/api/runs")
    assert response.status_code == 503 and "10.0.0.7" not in response.text
    (record,) = (one for one in caplog.records if getattr(one, "action", "") == "dashboard_failed")
    assert "10.0.0.7" in record.exception  # type: ignore[attr-defined]


async def test_reads_do_not_wait_for_a_database_that_does_not_answer(
    dsn: str, app: procrastinate.App, declared: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They give up long before the pool does, and leave it whole."""
    monkeypatch.setattr(failures, "ANSWER_SECONDS", 0.3)
    pool = psycopg_pool.AsyncConnectionPool(dsn, open=False, min_size=1, max_size=1)
    transport = httpx.ASGITransport(web.create_app(app, token=TOKEN))
    async with (
        pool,
        app.open_async(pool),
        httpx.AsyncClient(transport=transport, base_url="http://localhost") as client,
    ):
        run = await declared.defer_async(count=1)
        one = f"/runs/{run.id}"
        api = ["/api/runs", *(f"/api{one}{end}" for end in ("", "/items", "/items/0", "/errors"))]
        pages = ["/", "/fragments/runs", one, f"{one}/items/0"]
        fragments = [f"{one}/fragments/overview", f"{one}/fragments/items"]
        async with pool.connection():
            for path in (*api, f"/api{one}/events", *pages, *fragments):
                response = await asyncio.wait_for(client.get(path), 5.0)
                assert response.status_code == 503, path
                assert "does not answer; try again" in response.text, path
            response = await client.post(f"/api{one}/pause", headers=BEARER)
            assert (response.status_code, "try again" in response.text) == (503, True)
        assert not (await got(client, f"/api{one}"))["paused"]
        assert pool.get_stats()["pool_size"] == pool.get_stats()["pool_available"] == 1


async def test_control_is_not_cut_off(
    client: httpx.AsyncClient,
    app: procrastinate.App,
    declared: Any,
    conn: psycopg.Connection[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What changes a run takes the time it takes; only what becomes of it is the answer."""
    monkeypatch.setattr(failures, "ANSWER_SECONDS", 0.3)
    run = await declared.defer_async(count=1)
    with conn.transaction():
        conn.execute("SELECT 1 FROM fanout_runs WHERE id = %s FOR UPDATE", [run.id])
        asked = asyncio.create_task(client.post(f"/api/runs/{run.id}/pause", headers=BEARER))
        done, _ = await asyncio.wait([asked], timeout=1.0)
        assert not done
    assert (await asked).json()["paused"] is True


@pytest.mark.parametrize("where", ["/api/runs/{}/pause", "/runs/{}/control/pause"])
async def test_control_whose_fate_is_unknown_says_so(
    client: httpx.AsyncClient,
    app: procrastinate.App,
    declared: Any,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
) -> None:
    run = await declared.defer_async(count=1)

    async def broken(*_: Any, **__: Any) -> None:
        raise errors.DatabaseError("server closed the connection unexpectedly")

    monkeypatch.setattr(Run, "pause_async", broken)
    response = await client.post(where.format(run.id), headers=BEARER)
    assert (response.status_code, "is unknown; look" in response.text) == (503, True)
    assert "closed the connection" not in response.text


async def test_missing_tables(bare_dsn: str) -> None:
    bare = procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=bare_dsn))
    transport = httpx.ASGITransport(web.create_app(bare))
    async with (
        opened(bare),
        httpx.AsyncClient(transport=transport, base_url="http://localhost") as client,
    ):
        response = await client.get("/")
        assert response.status_code == 503 and "schema --apply" in response.text
