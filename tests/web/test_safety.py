"""Safe by default: each rule is shown to refuse, and what it lets through."""

import asyncio
import html
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import procrastinate
import pytest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.routing import Mount
from starlette.types import Receive, Scope, Send

from fanout_procrastinate import (
    ConfigurationError,
    FanOut,
    ItemContext,
    Limit,
    Run,
    fanout_child,
    web,
)
from fanout_procrastinate.web import access, guard
from tests.apps.shown import HOSTILE
from tests.support import finished, opened, serving, unconnected, working
from tests.waiting import wait_until_async

# No server decides anything here.
pytestmark = pytest.mark.pg18_only

TOKEN = "the-token-of-these-tests"  # noqa: S105
BEARER = {"authorization": f"Bearer {TOKEN}"}
FORM = {"content-type": "application/x-www-form-urlencoded"}


class Site:
    """An app with a paused run, and its dashboards."""

    def __init__(self, app: procrastinate.App, run: Run) -> None:
        self.app = app
        self.run = run
        self.pause = f"/api/runs/{run.id}/pause"
        self.page_pause = f"/runs/{run.id}/control/pause"

    def client(self, host: str = "http://localhost", **options: Any) -> httpx.AsyncClient:
        transport = httpx.ASGITransport(web.create_app(self.app, **options))
        return httpx.AsyncClient(transport=transport, base_url=host)

    async def paused(self) -> bool:
        """Whether it was paused; it is resumed."""
        found = (await self.run.progress_async()).paused
        await self.run.resume_async()
        return found


@pytest.fixture
async def site(app: procrastinate.App) -> AsyncIterator[Site]:
    @fanout_child(app)
    async def child(item: str) -> str:
        return item

    async with opened(app):
        yield Site(app, await child.map_async(["a", "b"]))


async def logged_in(client: httpx.AsyncClient) -> str:
    """Enter the token as a browser does; return the secret of its forms."""
    await client.get("/login")
    csrf = client.cookies[access.CSRF_COOKIE]
    response = await client.post("/login", data={"token": TOKEN, "csrf": csrf})
    assert response.status_code == 303, response.text
    return csrf


async def test_without_a_token_nobody_controls(site: Site) -> None:
    async with site.client() as client:
        await client.get("/")
        csrf = client.cookies[access.CSRF_COOKIE]
        for headers in ({}, BEARER, {"x-fanout-csrf": csrf}):
            response = await client.post(site.pause, headers=headers)
            assert (response.status_code, "with a token" in response.json()["error"]) == (403, True)
        assert not await site.paused()
        assert "ask-pause" not in (await client.get(f"/runs/{site.run.id}")).text


async def test_token_of_programs(site: Site) -> None:
    async with site.client(token=TOKEN) as client:
        for wrong in (
            "",
            "Bearer",
            "Bearer x",
            f"Basic {TOKEN}",
            f"Bearer {TOKEN}x",
            "Bearer \u00e9",
        ):
            given = {"authorization": wrong.encode("latin-1")}
            response = await client.post(site.pause, headers=given)
            assert response.status_code == 403
        assert not await site.paused()
        assert (await client.post(site.pause, headers=BEARER)).status_code == 200
        assert await site.paused()


async def test_session_of_people(site: Site) -> None:
    async with site.client(token=TOKEN) as client:
        csrf = await logged_in(client)
        assert "ask-pause" in (await client.get(f"/runs/{site.run.id}")).text
        response = await client.post(site.page_pause, data={"csrf": csrf})
        assert response.headers["location"] == f"/runs/{site.run.id}?told=pause"
        assert await site.paused()
        await client.post("/logout", data={"csrf": csrf})
        assert (await client.post(site.page_pause, data={"csrf": csrf})).status_code == 403
        assert not await site.paused()


async def test_cookies_are_kept_from_scripts_and_other_sites(site: Site) -> None:
    async with site.client("https://localhost", token=TOKEN) as client:
        await client.get("/login")
        csrf = client.cookies[access.CSRF_COOKIE]
        response = await client.post("/login", data={"token": TOKEN, "csrf": csrf})
        (cookie,) = response.headers.get_list("set-cookie")
        assert {"HttpOnly", "Path=/", "SameSite=strict", "Secure"} <= set(cookie.split("; "))


async def test_wrong_token_at_the_door(site: Site) -> None:
    async with site.client(token=TOKEN) as client:
        await client.get("/login")
        form = {"token": "wrong" + TOKEN, "csrf": client.cookies[access.CSRF_COOKIE]}
        response = await client.post("/login", data=form)
        assert response.status_code == 403 and "not the token" in response.text
        assert access.SESSION_COOKIE not in client.cookies
        # Nobody is logged in as somebody else from another site.
        response = await client.post("/login", data={"token": TOKEN})
        assert response.status_code == 403
        assert access.SESSION_COOKIE not in client.cookies


async def test_forged_sessions(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    async with site.client(token=TOKEN) as client:
        csrf = await logged_in(client)
        good = client.cookies[access.SESSION_COOKIE]
        until, nonce, signature = good.split(".")
        forged = [
            f"{int(until) + 1}.{nonce}.{signature}",
            f"{until}.{nonce}x.{signature}",
            f"{until}.{nonce}.{'0' * 64}",
            f"{until}.{nonce}.",
            "..",
            "x",
        ]
        for value in [*forged, good]:
            client.cookies.set(access.SESSION_COOKIE, value, domain="localhost.local", path="/")
            response = await client.post(site.page_pause, data={"csrf": csrf})
            assert response.status_code == (303 if value == good else 403), value
        assert await site.paused()
        # It ends by itself, and with the token that signed it.
        cookies = f"{access.SESSION_COOKIE}={good}; {access.CSRF_COOKIE}={csrf}"

    async def status(now: int, token: str) -> int:
        async with site.client(token=token) as late:
            with monkeypatch.context() as patch:
                patch.setattr(access.time, "time", lambda: float(now))
                response = await late.post(
                    site.page_pause, data={"csrf": csrf}, headers={"cookie": cookies}
                )
                return response.status_code

    assert await status(int(until), TOKEN) == 403
    assert await status(int(until) - 1, TOKEN + "2") == 403
    assert not await site.paused()
    assert await status(int(until) - 1, TOKEN) == 303


async def test_forged_requests(site: Site) -> None:
    """A page elsewhere makes the browser of somebody logged in send a form: refused."""
    async with site.client(token=TOKEN) as client:
        csrf = await logged_in(client)
        host = "http://localhost"
        refused: list[tuple[dict[str, str], dict[str, str]]] = [
            ({}, {}),
            ({"csrf": "guess"}, {}),
            ({"csrf": ""}, {}),
            ({"csrf": csrf}, {"origin": "http://evil.example"}),
            ({"csrf": csrf}, {"origin": "null"}),
            ({"csrf": csrf}, {"origin": "http://localhost:81"}),
            ({"csrf": csrf}, {"origin": "http://[localhost"}),
            ({"csrf": csrf}, {"referer": "http://evil.example/localhost"}),
            ({"csrf": csrf}, {"sec-fetch-site": "cross-site"}),
            ({"csrf": csrf}, {"sec-fetch-site": "same-site", "origin": host}),
        ]
        for form, headers in refused:
            response = await client.post(site.page_pause, data=form, headers=headers)
            assert response.status_code == 403, (form, headers)
            response = await client.post(
                site.pause, headers=headers | {"x-fanout-csrf": form.get("csrf", "")}
            )
            assert response.status_code == 403, (form, headers)
        assert not await site.paused()
        let_through = {"origin": host, "sec-fetch-site": "same-origin", "x-fanout-csrf": csrf}
        assert (await client.post(site.pause, headers=let_through)).status_code == 200
        assert await site.paused()
        # Reading a link is no control.
        assert (await client.get(site.page_pause)).status_code == 405


async def test_read_only_for_everybody(site: Site) -> None:
    async with site.client(token=TOKEN, read_only=True) as client:
        csrf = await logged_in(client)
        for response in (
            await client.post(site.pause, headers=BEARER),
            await client.post(site.page_pause, data={"csrf": csrf}),
        ):
            assert response.status_code == 403 and "read-only" in response.text
        assert not await site.paused()
        assert "ask-pause" not in (await client.get(f"/runs/{site.run.id}")).text


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_rule_of_the_application(site: Site, kind: str) -> None:
    asked: list[tuple[str, int | None]] = []
    allowed = {"read", "pause"}

    def sync_rule(request: Request, action: str, run_id: int | None) -> bool:
        asked.append((action, run_id))
        return action in allowed and request.headers.get("x-user") == "anna"

    async def async_rule(request: Request, action: str, run_id: int | None) -> bool:
        return sync_rule(request, action, run_id)

    rule = sync_rule if kind == "sync" else async_rule
    run_id = site.run.id
    async with site.client(authorize=rule) as client:
        assert (await client.get("/api/runs")).status_code == 403
        assert (await client.get(f"/runs/{run_id}")).status_code == 403
        client.headers["x-user"] = "anna"
        await client.get("/")
        csrf = {"x-fanout-csrf": client.cookies[access.CSRF_COOKIE]}
        for path in ("", "/items", "/items/0", "/errors"):
            assert (await client.get(f"/api/runs/{run_id}{path}")).status_code == 200
        asked.clear()
        assert (await client.post(site.pause)).status_code == 403  # may be forged
        assert asked == []
        assert (await client.post(site.pause, headers=csrf)).status_code == 200
        assert await site.paused()
        page = (await client.get(f"/runs/{run_id}")).text
        assert "ask-pause" in page and "ask-cancel" not in page
        asked[1:] = []
        cancel = f"/api/runs/{run_id}/cancel"
        assert (await client.post(cancel, headers=csrf)).status_code == 403
        assert asked == [("pause", run_id), ("cancel", run_id)]
        allowed.remove("read")
        for path in ("", "/items", "/items/0", "/errors", "/events"):
            assert (await client.get(f"/api/runs/{run_id}{path}")).status_code == 403
        for path in ("/", "/fragments/runs", f"/runs/{run_id}/fragments/items", "/api/events"):
            assert (await client.get(path)).status_code == 403
    assert not (await site.run.progress_async()).closed


async def test_rule_must_say_true(site: Site) -> None:
    """Something that is merely not false, such as a forgotten await, lets nobody in."""
    async with site.client(authorize=lambda *_: "yes") as client:
        assert (await client.get("/")).status_code == 403


@pytest.mark.parametrize("refusal", [False, HTTPException(403, "not yours")], ids=["no", "raised"])
async def test_limits_name_no_runs_that_may_not_be_read(
    app: procrastinate.App, refusal: bool | HTTPException
) -> None:
    """A limit is shared: of others' runs it shows how many they are, no ids and no keys."""
    limit, gate = Limit("llm", concurrency=2), asyncio.Event()

    @fanout_child(app, name="whole", limits=[limit])
    async def whole(item: str) -> None:
        await gate.wait()

    @fanout_child(app, name="part", pass_context=True)
    async def part(context: ItemContext, item: str) -> None:
        async with context.permit(limit):
            await gate.wait()

    def rule(request: Request, action: str, run_id: int | None) -> bool:
        if run_id != mine.id and isinstance(refusal, HTTPException):
            raise refusal
        return run_id == mine.id

    async def both_held() -> bool:
        return [len(one.holders) for one in await FanOut.of(app).limits_async()] == [2]

    transport = httpx.ASGITransport(web.create_app(app, authorize=rule))
    async with (
        serving(app, concurrency=6),
        httpx.AsyncClient(transport=transport, base_url="http://localhost") as client,
    ):
        others = [
            await child.map_async(["x"], item_key=lambda _: "patient-anna")
            for child in (whole, part)
        ]
        try:
            await wait_until_async(both_held)
            mine = await whole.map_async(["y", "z"], item_key=str)
            waiting = await whole.map_async(["x"], item_key=lambda _: "patient-bob")
            assert (await client.get(f"/api/runs/{others[0].id}")).status_code == 403
            answer = await client.get(f"/api/runs/{mine.id}")
            page = (await client.get(f"/runs/{mine.id}")).text
        finally:
            gate.set()
        for run in (*others, mine, waiting):
            await finished(run)
    (shown,) = answer.json()["limits"]
    assert (shown["used"], shown["holders"], shown["others"]) == (2, [], 2)
    assert [line.startswith(f"run {mine.id}:") for line in shown["queue"]] == [True]
    assert shown["others_waiting"] == 1
    assert "patient" not in answer.text + page
    assert "2 others" in page and "and 1 more" in page


async def test_answer_of_the_rule_keeps_its_headers(site: Site) -> None:
    """It may lead to a login of the application's own, or ask for a password."""
    for answer, name in (
        (HTTPException(302, headers={"Location": "/sign-in"}), "location"),
        (HTTPException(401, headers={"WWW-Authenticate": "Basic"}), "www-authenticate"),
    ):

        def rule(*_: Any, answer: HTTPException = answer) -> bool:
            raise answer

        async with site.client(authorize=rule) as client:
            for path in ("/", "/api/runs"):
                response = await client.get(path)
                assert response.status_code == answer.status_code
                assert response.headers[name] == next(iter((answer.headers or {}).values()))
                assert "frame-ancestors" in response.headers["content-security-policy"]


async def test_what_is_allowed_instead(site: Site) -> None:
    async with site.client() as client:
        for path, more in (("/", set()), ("/api/runs", set()), ("/login", {"POST"})):
            response = await client.put(path)
            assert response.status_code == 405
            assert set(response.headers["allow"].split(", ")) == {"GET", "HEAD"} | more


async def test_token_to_read(site: Site) -> None:
    async with site.client(token=TOKEN, token_to_read=True) as client:
        paths = ["/api/runs", "/api/events", f"/api/runs/{site.run.id}/items/0"]
        for path in paths:
            assert (await client.get(path)).status_code == 403
        assert (await client.get("/api/runs", headers=BEARER)).status_code == 200
        response = await client.get(f"/runs/{site.run.id}")
        assert response.headers["location"] == f"/login?next=/runs/{site.run.id}"
        await logged_in(client)
        assert (await client.get(f"/runs/{site.run.id}")).status_code == 200


@pytest.mark.parametrize(
    ("wanted", "leads_to"),
    [
        ("/runs/1", "/runs/1"),
        ("//evil.example", "/"),
        ("https://evil.example", "/"),
        ("/runs/\\evil", "/"),
        ("/runs/%0d%0aset-cookie:x=1", "/"),
        ("javascript:alert(1)", "/"),
    ],
)
async def test_login_leads_nowhere_else(wanted: str, leads_to: str) -> None:
    transport = httpx.ASGITransport(web.create_app(unconnected(), token=TOKEN))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        await client.get("/login")
        form = {"token": TOKEN, "csrf": client.cookies[access.CSRF_COOKIE]}
        response = await client.post(f"/login?next={wanted}", data=form)
        assert response.headers["location"] == leads_to


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("localhost:8080", 200),
        ("127.0.0.1:8080", 200),
        ("[::1]:8080", 200),
        ("LOCALHOST.", 200),
        ("evil.example", 400),
        ("localhost.evil.example", 400),
        ("evil.example:localhost", 400),
        ("localhost@evil.example", 400),
        ("", 400),
    ],
)
async def test_unknown_host_names_are_refused(host: str, status: int) -> None:
    """A stranger's name that resolves to this machine does not make us read out to him."""
    transport = httpx.ASGITransport(web.create_app(unconnected(), token=TOKEN))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        response = await client.get("/login", headers={"host": host})
    assert response.status_code == status
    assert response.headers["x-content-type-options"] == "nosniff"


async def test_named_hosts() -> None:
    dashboard = web.create_app(unconnected(), allowed_hosts=["Example.org"])
    transport = httpx.ASGITransport(dashboard)
    async with httpx.AsyncClient(transport=transport, base_url="http://example.org") as client:
        assert (await client.get("/login")).status_code == 200
        assert (await client.get("/login", headers={"host": "localhost"})).status_code == 400


async def test_every_response_has_its_headers(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    async with site.client(token=TOKEN) as client:
        paths = ["/", "/api/runs", "/static/dashboard.js", "/nothing", "/login", "/api/runs/9"]
        for path in paths:
            found = (await client.get(path)).headers
            policy = found["content-security-policy"]
            assert "script-src 'self';" in policy and "unsafe" not in policy, path
            assert "frame-ancestors 'none'" in policy and "default-src 'none'" in policy
            assert found["x-content-type-options"] == "nosniff"
            assert found["referrer-policy"] == "same-origin"
            assert found["cache-control"] == ("no-cache" if "static" in path else "no-store")

    # What nobody foresaw, too; and it says nothing of itself.
    async def broken(*_: Any) -> None:
        raise ZeroDivisionError("the secret")

    monkeypatch.setattr(FanOut, "runs_async", broken)
    transport = httpx.ASGITransport(web.create_app(site.app), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        for path in ("/", "/api/runs"):
            response = await client.get(path)
            assert response.status_code == 500 and "secret" not in response.text
            assert "frame-ancestors 'none'" in response.headers["content-security-policy"]


async def test_everything_is_escaped(app: procrastinate.App) -> None:
    """Names, keys, payloads, results, errors, tags, reasons and searches are text."""

    @fanout_child(app, name=f"child {HOSTILE}", max_attempts=1)
    async def child(item: str) -> str:
        if item.endswith("bad"):
            raise ValueError(item)
        return item

    async with opened(app):
        run = await child.map_async(
            [HOSTILE, HOSTILE + "bad"], item_key=str, tags=[HOSTILE], max_in_flight=1
        )
        async with working(app):
            await finished(run)
        other = await child.map_async([HOSTILE])
        await other.cancel_async(reason=HOSTILE)
        transport = httpx.ASGITransport(web.create_app(app, token=TOKEN))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            await logged_in(client)
            for path in (
                "/",
                f"/runs/{run.id}",
                f"/runs/{other.id}",
                f"/runs/{run.id}/items/0",
                f"/runs/{run.id}/items/1",
                f"/runs/{run.id}?search={HOSTILE}",
                f"/?name={HOSTILE}&tag={HOSTILE}",
                f"/runs/{HOSTILE}",
                f"/?status={HOSTILE}",
            ):
                page = (await client.get(path)).text
                assert "<script>" not in page and "<img" not in page, path
            assert "&lt;script&gt;" in (await client.get(f"/runs/{run.id}")).text


async def test_mounted_below_a_path(site: Site) -> None:
    """Its links, cookies and redirects stay below the path; what mounts it may be anything."""
    dashboard = web.create_app(site.app, token=TOKEN)
    transport = httpx.ASGITransport(Starlette(routes=[Mount("/ops/fanout", dashboard)]))
    async with httpx.AsyncClient(
        transport=transport, base_url="http://localhost/ops/fanout"
    ) as client:
        csrf = await logged_in(client)
        page = (await client.get("/")).text
        assert f'href="/ops/fanout/runs/{site.run.id}"' in page
        assert 'src="/ops/fanout/static/dashboard.js"' in page
        assert 'href="/"' not in page and 'action="/"' not in page
        assert (await client.get("/static/dashboard.js")).status_code == 200
        assert (await client.get("/api/nothing")).json()["error"]
        response = await client.post(site.page_pause, data={"csrf": csrf})
        assert response.headers["location"] == f"/ops/fanout/runs/{site.run.id}?told=pause"
        assert await site.paused()


@pytest.mark.parametrize(
    ("path", "encoded"), [("/fan out", "/fan%20out"), ("/é", "/%C3%A9"), ("/a(b)/c", "/a(b)/c")]
)
async def test_cookies_of_a_path_with_odd_letters(site: Site, path: str, encoded: str) -> None:
    """Browsers compare a cookie's path with the address as they send it."""
    dashboard = web.create_app(site.app, token=TOKEN)
    transport = httpx.ASGITransport(Starlette(routes=[Mount(path, dashboard)]))
    async with httpx.AsyncClient(transport=transport, base_url=f"http://localhost{path}") as client:
        response = await client.get("/login")
        (cookie,) = response.headers.get_list("set-cookie")
        assert f"Path={encoded}" in cookie.split("; ")
        assert await logged_in(client)


@pytest.mark.parametrize("base", ["/fanout", "/ops/fanout", "/api", "/runs", "/login", "/static"])
async def test_base_path_that_a_proxy_cuts_off(site: Site, base: str) -> None:
    """Whatever a page leads to is found, as the browser asks and the proxy passes it on."""
    dashboard = web.create_app(site.app, token=TOKEN, base_path=base)

    async def proxy(scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["path"].startswith(f"{base}/")
        await dashboard({**scope, "path": scope["path"].removeprefix(base)}, receive, send)

    transport = httpx.ASGITransport(proxy)  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url=f"http://localhost{base}") as client:
        csrf = await logged_in(client)
        page = f"/runs/{site.run.id}"
        for path in ("/", page, f"{page}/items/0", "/login", "/nothing", "/static/nothing"):
            found = _led_to((await client.get(path)).text)
            assert f"{base}/static/dashboard.js" in found, path
            for link in found:
                assert link.startswith(f"{base}/"), (path, link)
                answer = await client.head(f"http://localhost{link}")
                assert answer.status_code == 200, (path, link)
        assert (await client.get("/api/nothing")).json()["error"]
        assert (await client.get(f"{page}/")).headers["location"] == f"http://localhost{base}{page}"
        response = await client.post(site.page_pause, data={"csrf": csrf})
        assert response.headers["location"] == f"{base}{page}?told=pause"
        assert await site.paused()


def _led_to(page: str) -> list[str]:
    found = re.findall(r'(?:href|src|hx-get|sse-connect)="([^"#]+)', page)
    return [html.unescape(link) for link in found]


@pytest.mark.parametrize("root", ["", "/ops", "/fanout"])
async def test_base_path_that_is_still_there(site: Site, root: str) -> None:
    """The proxy leaves it, or the server knows of a path itself."""
    dashboard = web.create_app(site.app, base_path="/fanout")
    transport = httpx.ASGITransport(dashboard, root_path=root)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        for before in {root, "/fanout"}:
            for path in ("/", "/static/dashboard.js", f"/runs/{site.run.id}"):
                answer = await client.get(before + path)
                assert answer.status_code == 200, (before, path)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"token": "short"}, "at least 16"),
        *(({"token": f"a token{odd}of these tests"}, "take them out") for odd in " \n\t\x7f\ud800"),
        ({"token": TOKEN + "\n"}, "take them out"),
        ({"token_to_read": True}, "give token="),
        ({"allowed_hosts": "localhost"}, "a list of names"),
        ({"base_path": "fanout"}, "such as '/fanout'"),
        ({"base_path": "/fanout/"}, "such as '/fanout'"),
    ],
)
def test_settings_that_cannot_work(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        web.create_app(unconnected(), **options)


def test_loopback_by_default() -> None:
    assert set(guard.LOOPBACK) == {"127.0.0.1", "localhost", "::1"}


async def test_opens_and_closes_the_app_when_served_alone(app: procrastinate.App) -> None:
    dashboard = web.create_app(app)
    transport = httpx.ASGITransport(dashboard)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        async with dashboard.router.lifespan_context(dashboard):
            assert (await client.get("/api/runs")).json() == {"runs": []}
        assert (await client.get("/api/runs")).status_code == 503
