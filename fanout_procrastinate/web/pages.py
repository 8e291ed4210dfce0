"""The pages: rendered here, kept up to date by fragments of themselves."""

from __future__ import annotations

import functools
from typing import Any
from urllib.parse import urlencode

import jinja2
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from fanout_procrastinate import models, run
from fanout_procrastinate.web import access, asked, control, failures, reading, words

_RUNS = 50
_ITEMS = 50
_TOLD = {
    "cancel": "The run is being cancelled.",
    "pause": "The run is paused.",
    "resume": "The run goes on.",
    "retry": "The failed items are tried again.",
    "update": "The run was changed.",
}


@functools.cache
def _environment() -> jinja2.Environment:
    made = jinja2.Environment(
        loader=jinja2.PackageLoader("fanout_procrastinate.web"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {
        name: getattr(words, name)
        for name in ("duration", "moment", "number", "rate", "share", "pretty", "cut", "dotted")
    }
    made.globals["took"] = words.took
    made.globals["RUN_STATUSES"] = [str(one) for one in models.RunStatus]
    made.globals["ITEM_STATUSES"] = [str(one) for one in models.ItemStatus]
    return made


class Pages:
    """Serve the pages of one dashboard.

    Args:
        source: reads.
        rules: says who may do what.
    """

    def __init__(self, source: reading.Reading, rules: access.Access) -> None:
        self._source = source
        self._rules = rules

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [
            Route("/", self._runs),
            Route("/fragments/runs", self._runs_fragment),
            Route("/login", self._login, methods=["GET", "POST"]),
            Route("/logout", self._log_out, methods=["POST"]),
            Route("/runs/{run_id:fanout_id}", self._run),
            Route("/runs/{run_id:fanout_id}/fragments/overview", self._overview),
            Route("/runs/{run_id:fanout_id}/fragments/items", self._items),
            Route("/runs/{run_id:fanout_id}/items/{position:fanout_id}", self._item),
            Route("/runs/{run_id:fanout_id}/control/{action}", self._act, methods=["POST"]),
        ]

    async def failure(self, request: Request, failure: failures.Failure) -> Response:
        """Return the page that says what went wrong."""
        response = await self._page(request, "failure.html", failure=failure)
        response.status_code = failure.status
        return response

    # -- the list of runs

    @failures.in_time()
    async def _runs(self, request: Request) -> Response:
        await self._rules.check_read(request)
        return await self._page(request, "runs.html", **await self._runs_context(request))

    @failures.in_time()
    async def _runs_fragment(self, request: Request) -> Response:
        await self._rules.check_read(request)
        return await self._page(request, "_runs.html", **await self._runs_context(request))

    async def _runs_context(self, request: Request) -> dict[str, Any]:
        wanted = {
            "name": asked.text(request, "name"),
            "status": asked.run_status(request),
            "tag": asked.text(request, "tag"),
        }
        limit = asked.whole(request, "limit", _RUNS, least=1, most=reading.MOST_RUNS)
        found = await self._source.runs(**wanted, limit=limit)
        return {"runs": found, "wanted": wanted, "limit": limit, "more": len(found) == limit}

    # -- one run

    @failures.in_time()
    async def _run(self, request: Request) -> Response:
        one = await self._readable(request)
        told = _TOLD.get(request.query_params.get("told", ""), "")
        context = await self._overview_context(request, one) | await self._items_context(
            request, one
        )
        context["may"] = await self._rules.allowed(request, one.id, control.ACTIONS)
        facts = await one.facts_async()
        args = self._source.shown(dict(facts.args))
        return await self._page(request, "run.html", facts=facts, args=args, told=told, **context)

    @failures.in_time()
    async def _overview(self, request: Request) -> Response:
        context = await self._overview_context(request, await self._readable(request))
        # What the page knows already; nobody gains anything by asking for more buttons.
        context["may"] = request.query_params.get("may", "").split(",")
        return await self._page(request, "_overview.html", **context)

    async def _overview_context(self, request: Request, one: run.Run) -> dict[str, Any]:
        progress = await one.progress_async()
        return {
            "progress": progress,
            "figures": await self._source.figures(one, progress),
            "slots": await self._source.slots(one),
            "limits": await reading.limits_of(
                self._source, one, functools.partial(self._rules.readable, request)
            ),
            "stopping": run.stopping(progress),
        }

    @failures.in_time()
    async def _items(self, request: Request) -> Response:
        one = await self._readable(request)
        context = await self._items_context(request, one)
        return await self._page(request, "_items.html", progress={"run_id": one.id}, **context)

    async def _items_context(self, request: Request, one: run.Run) -> dict[str, Any]:
        status, search = asked.item_status(request), asked.text(request, "search")
        after = asked.after(request)
        page = await self._source.items(
            one, status=status, search=search, after=after, limit=_ITEMS
        )
        wanted = {"status": status or "", "search": search or ""}
        following = None if page.next is None else urlencode(wanted | {"after": page.next})
        return {"items": page.items, "filter": wanted, "after": after, "following": following}

    @failures.in_time()
    async def _item(self, request: Request) -> Response:
        one = await self._readable(request)
        item = await self._source.item(one, request.path_params["position"])
        if item is None:
            raise failures.Refused(f"run {one.id} has no such item", 404)
        return await self._page(
            request,
            "item.html",
            facts=await one.facts_async(),
            item=item,
            payload=self._source.shown(item.payload),
            result=self._source.shown(item.result),
        )

    # -- control

    async def _act(self, request: Request) -> Response:
        run_id: int = request.path_params["run_id"]
        action: str = request.path_params["action"]
        form = dict(await asked.form_body(request))
        await self._rules.check_control(request, action, run_id, form.pop(access.CSRF_FIELD, None))
        async with failures.in_time():
            one = await self._source.find(run_id)
        options = _options(action, form)
        with failures.fate_told():
            await control.act(one, action, options)
        return RedirectResponse(_url(request, f"/runs/{run_id}?told={action}"), 303)

    async def _login(self, request: Request) -> Response:
        if request.method == "POST":
            return await self._log_in(request)
        return await self._page(request, "login.html", wrong=False, next=_next(request))

    async def _log_in(self, request: Request) -> Response:
        form = await asked.form_body(request)
        access.check_same_origin(request)
        access.check_csrf(request, form.get(access.CSRF_FIELD))
        if not self._rules.matches(form.get("token", "")):
            page = await self._page(request, "login.html", wrong=True, next=_next(request))
            page.status_code = 403
            return page
        response = RedirectResponse(_url(request, _next(request)), 303)
        self._rules.remember(request, response)
        return response

    async def _log_out(self, request: Request) -> Response:
        form = await asked.form_body(request)
        access.check_same_origin(request)
        access.check_csrf(request, form.get(access.CSRF_FIELD))
        response = RedirectResponse(_url(request, "/"), 303)
        self._rules.forget(request, response)
        return response

    # -- pages

    async def _readable(self, request: Request) -> run.Run:
        run_id: int = request.path_params["run_id"]
        await self._rules.check_read(request, run_id)
        return await self._source.find(run_id)

    async def _page(self, request: Request, template: str, **context: Any) -> Response:
        body = (
            _environment()
            .get_template(template)
            .render(
                base=request.scope.get("root_path", ""),
                csrf=access.csrf_of(request),
                offers_control=self._rules.offers_control,
                has_token=self._rules.token is not None,
                logged_in=self._rules.token is not None and self._rules.knows_token(request),
                here=request.url.path.removeprefix(request.scope.get("root_path", "")),
                **context,
            )
        )
        response = HTMLResponse(body)
        access.send_csrf(request, response)
        return response


def _options(action: str, form: dict[str, str]) -> dict[str, Any]:
    """Return a form's fields as the options of an action; empty ones are not given."""
    given: dict[str, Any] = {name: value.strip() for name, value in form.items() if value.strip()}
    if "abort" in given:
        given["abort"] = True
    if action == "update" and "max_in_flight" in given:
        text = given["max_in_flight"]
        if not (text.isascii() and text.isdecimal() and len(text) < 20):
            raise failures.Refused(f"max_in_flight={text}: give a whole number from 1", 400)
        given["max_in_flight"] = int(text)
    return given


def _url(request: Request, path: str) -> str:
    return f"{request.scope.get('root_path', '')}{path}"


def _next(request: Request) -> str:
    """Return where to go after the login: a path of ours, never another site."""
    wanted = request.query_params.get("next", "/")
    ours = wanted.startswith("/runs/") and wanted.isascii() and wanted.isprintable()
    return wanted if ours and "\\" not in wanted else "/"
