"""The JSON API: what the pages show, for programs."""

from __future__ import annotations

import functools
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from fanout_procrastinate.web import access, asked, control, failures, reading, streams

_ITEMS = 100
_RUNS = 50


class Api:
    """Serve the JSON API of one dashboard.

    Args:
        source: reads.
        rules: says who may do what.
        live: streams events.
    """

    def __init__(
        self, source: reading.Reading, rules: access.Access, live: streams.Streams
    ) -> None:
        self._source = source
        self._rules = rules
        self._live = live

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [
            Route("/api/runs", self._runs),
            Route("/api/events", self._all_events),
            Route("/api/runs/{run_id:fanout_id}", self._run),
            Route("/api/runs/{run_id:fanout_id}/items", self._items),
            Route("/api/runs/{run_id:fanout_id}/items/{position:fanout_id}", self._item),
            Route("/api/runs/{run_id:fanout_id}/errors", self._errors),
            Route("/api/runs/{run_id:fanout_id}/events", self._events),
            Route("/api/runs/{run_id:fanout_id}/{action}", self._act, methods=["POST"]),
        ]

    @failures.in_time()
    async def _runs(self, request: Request) -> Response:
        await self._rules.check_read(request)
        found = await self._source.runs(
            name=asked.text(request, "name"),
            status=asked.run_status(request),
            tag=asked.text(request, "tag"),
            limit=asked.whole(request, "limit", _RUNS, least=1, most=reading.MOST_RUNS),
        )
        return JSONResponse({"runs": [reading.progress_json(one) for one in found]})

    @failures.in_time()
    async def _run(self, request: Request) -> Response:
        one = await self._source.find(await self._readable(request))
        facts, slots = await one.facts_async(), await self._source.slots(one)
        data = reading.progress_json(await one.progress_async())
        data |= reading.facts_json(self._source, facts)
        data["slots"] = [reading.slot_json(slot) for slot in slots]
        data["limits"] = await reading.limits_of(
            self._source, one, functools.partial(self._rules.readable, request)
        )
        return JSONResponse(data)

    @failures.in_time()
    async def _items(self, request: Request) -> Response:
        one = await self._source.find(await self._readable(request))
        page = await self._source.items(
            one,
            status=asked.item_status(request),
            search=asked.text(request, "search"),
            after=asked.after(request),
            limit=asked.whole(request, "limit", _ITEMS, least=1, most=reading.MOST_ITEMS),
        )
        rows = [reading.item_row_json(item) for item in page.items]
        return JSONResponse({"items": rows, "next": page.next})

    @failures.in_time()
    async def _item(self, request: Request) -> Response:
        one = await self._source.find(await self._readable(request))
        item = await self._source.item(one, request.path_params["position"])
        if item is None:
            raise failures.Refused(f"run {one.id} has no such item", 404)
        return JSONResponse(reading.item_json(self._source, item))

    @failures.in_time()
    async def _errors(self, request: Request) -> Response:
        one = await self._source.find(await self._readable(request))
        limit = asked.whole(request, "limit", reading.ERRORS_SHOWN, least=1, most=1000)
        groups = await one.errors_async(limit)
        return JSONResponse({"errors": [group.as_dict() for group in groups]})

    @failures.in_time()
    async def _events(self, request: Request) -> Response:
        return await self._live.of_run(request, await self._readable(request))

    async def _all_events(self, request: Request) -> Response:
        await self._rules.check_read(request)
        return self._live.of_all(request)

    async def _act(self, request: Request) -> Response:
        run_id: int = request.path_params["run_id"]
        action: str = request.path_params["action"]
        if action not in control.ACTIONS:
            raise failures.Refused(f"there is no action {action!r}", 404)
        await self._rules.check_control(request, action, run_id, None)
        async with failures.in_time():
            one = await self._source.find(run_id)
        options = await asked.json_body(request)
        with failures.fate_told():
            retried = await control.act(one, action, options)
            data: dict[str, Any] = reading.progress_json(await one.progress_async())
        return JSONResponse(data if retried is None else data | {"retried": retried})

    async def _readable(self, request: Request) -> int:
        run_id: int = request.path_params["run_id"]
        await self._rules.check_read(request, run_id)
        return run_id
