"""The dashboard as one ASGI application; the composition root of this package."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import procrastinate
from procrastinate.exceptions import ProcrastinateException
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.staticfiles import StaticFiles
from starlette.types import ExceptionHandler, Scope

from fanout_procrastinate import errors, fanout
from fanout_procrastinate.web import access, api, failures, guard, pages, reading, streams

_STATIC = Path(__file__).parent / "static"


def create_app(
    app: procrastinate.App,
    *,
    token: str | None = None,
    authorize: access.Authorize | None = None,
    read_only: bool = False,
    allowed_hosts: Iterable[str] = guard.LOOPBACK,
    base_path: str = "",
    token_to_read: bool = False,
    send_timeout: float = streams.SEND_TIMEOUT_SECONDS,
) -> Starlette:
    """Return the dashboard of an app, to be served alone or mounted in another application.

    Without `token` and `authorize` it only reads. Served alone it opens the app, and closes it at
    the end; an application that mounts it has to open the app itself, on the same event loop.

    Args:
        app: the procrastinate app.
        token: a secret of at least 16 characters. Whoever knows it may control runs: programs send
            it as ``Authorization: Bearer ...``, people enter it once for twelve hours.
        authorize: ``authorize(request, action, run_id) -> bool``, sync or async, asked for each
            request; `action` is ``read``, ``cancel``, ``pause``, ``resume``, ``retry`` or
            ``update``; `run_id` is ``None`` for the list of runs. Beside a token, both must agree.
        read_only: refuse all control, whoever asks.
        allowed_hosts: names by which this may be reached, without ports; ``"*"`` allows all.
        base_path: the path it is reached under, such as ``/fanout``, where a proxy cuts that off.
        token_to_read: ask for the token before anything is shown.
        send_timeout: seconds until a live client that does not read is dropped.

    Raises:
        ConfigurationError: the token is too short, or an argument cannot work.

    Example:
        >>> from fanout_procrastinate.web import create_app
        >>> main.mount("/fanout", create_app(app, allowed_hosts=["example.org"]))  # doctest: +SKIP
    """
    if isinstance(allowed_hosts, str):
        raise errors.ConfigurationError(f"allowed_hosts={allowed_hosts!r}: give a list of names")
    if base_path and (not base_path.startswith("/") or base_path.endswith("/")):
        raise errors.ConfigurationError(f"base_path={base_path!r}: give a path such as '/fanout'")
    rules = access.Access(
        token=token, authorize=authorize, read_only=read_only, token_to_read=token_to_read
    )
    owner = fanout.FanOut.of(app)
    source = reading.Reading(owner)
    live = streams.Streams(source=source, send_timeout=send_timeout)
    shown = pages.Pages(source, rules)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with app.open_async():
            yield
            await owner.close_async()

    return Starlette(
        routes=[
            *api.Api(source, rules, live).routes(),
            Route("/static/{path:path}", _Static(directory=_STATIC)),
            *shown.routes(),
        ],
        middleware=[Middleware(guard.Guard, allowed_hosts=allowed_hosts, base_path=base_path)],
        exception_handlers=_handlers(shown),
        lifespan=lifespan,
    )


class _Static(StaticFiles):
    """Files that browsers keep, and ask about: a new version shows at once.

    A route and no mount: the links of the page that says what is missing stay where they were.
    """

    def get_path(self, scope: Scope) -> str:
        asked: str = scope["path_params"]["path"]
        return os.path.normpath(asked)

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        response = super().file_response(*args, **kwargs)
        response.headers["Cache-Control"] = "no-cache"
        return response


def _handlers(shown: pages.Pages) -> dict[Any, ExceptionHandler]:
    async def answer(request: Request, exc: Exception) -> Response:
        failure = failures.failure_of(exc)
        response = await _answer(shown, request, failure)
        response.headers.update(failure.headers)
        guard.complete(response.headers)  # the last resort is outside the guard
        return response

    kinds = (failures.Refused, HTTPException, errors.FanoutError, ProcrastinateException, Exception)
    return dict.fromkeys(kinds, answer)


async def _answer(shown: pages.Pages, request: Request, failure: failures.Failure) -> Response:
    root = request.scope.get("root_path", "")
    here = request.url.path.removeprefix(root)
    if here.startswith("/api/"):
        return JSONResponse({"error": failure.message}, failure.status)
    if failure.login and request.method == "GET":
        return RedirectResponse(f"{root}/login?next={here}", 303)
    return await shown.failure(request, failure)
