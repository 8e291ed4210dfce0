"""Who may do what: tokens, sessions, the application's own rule, and no forged requests."""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import inspect
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any
from urllib.parse import quote, urlsplit

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from fanout_procrastinate import errors
from fanout_procrastinate.web import failures

Authorize = Callable[[Request, str, int | None], bool | Awaitable[bool]]

READ = "read"
SESSION_COOKIE = "fanout_session"
CSRF_COOKIE = "fanout_csrf"
CSRF_HEADER = "x-fanout-csrf"
CSRF_FIELD = "csrf"
SESSION_SECONDS = 12 * 3600

_SHORTEST_TOKEN = 16
_RUNS_ASKED = 100
# What browsers leave as it is in a path; a cookie's path is compared with that.
_PATH_LETTERS = "/:@!$&'()*+,=~|^[]"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Access:
    """Decide about requests.

    Args:
        token: opens control to whoever knows it.
        authorize: asked for each action, ``read`` included.
        read_only: refuse all control.
        token_to_read: whether reading needs the token too.

    Raises:
        ConfigurationError: the token is too short to be a secret, cannot be sent in a header, or is
            missing where it is needed.
    """

    token: str | None = None
    authorize: Authorize | None = None
    read_only: bool = False
    token_to_read: bool = False

    def __post_init__(self) -> None:
        if self.token is not None and len(self.token) < _SHORTEST_TOKEN:
            raise errors.ConfigurationError(
                f"the dashboard's token has {len(self.token)} characters; take at least "
                f'{_SHORTEST_TOKEN}: python -c "import secrets; print(secrets.token_urlsafe())"'
            )
        if self.token is not None and not _can_be_sent(self.token):
            raise errors.ConfigurationError(
                "the dashboard's token has white space or control characters, a line's end "
                "perhaps, and no header can carry it; take them out"
            )
        if self.token_to_read and self.token is None:
            raise errors.ConfigurationError("reading needs a token, but there is none: give token=")

    @property
    def offers_control(self) -> bool:
        """Return whether anybody may control at all."""
        return not self.read_only and (self.token is not None or self.authorize is not None)

    async def check_read(self, request: Request, run_id: int | None = None) -> None:
        """Let a request read.

        Raises:
            Refused: it may not.
        """
        if self.token_to_read and not self.knows_token(request):
            raise failures.Refused("enter the token to read here", login=True)
        if not await self._authorized(request, READ, run_id):
            raise failures.Refused("you may not read this")

    async def check_control(
        self, request: Request, action: str, run_id: int, csrf: str | None
    ) -> None:
        """Let a request change a run.

        Args:
            csrf: what the form holds in its field of that name, if anything.

        Raises:
            Refused: it may not, or it may be forged.
        """
        if self.read_only:
            raise failures.Refused("this dashboard is read-only")
        if not self.offers_control:
            raise failures.Refused("control is off: start the dashboard with a token")
        if not self._bears_token(request):
            check_same_origin(request)
            check_csrf(request, csrf)
        if not self.knows_token(request):
            raise failures.Refused("enter the token to control runs", login=True)
        if not await self._authorized(request, action, run_id):
            raise failures.Refused(f"you may not {action} this run")

    async def allowed(self, request: Request, run_id: int, actions: Iterable[str]) -> Sequence[str]:
        """Return the actions worth showing a button for; each is checked again when pressed."""
        if not self.offers_control or not self.knows_token(request):
            return []
        return [one for one in actions if await self._says_yes(request, one, run_id)]

    async def readable(
        self, request: Request, run_ids: Iterable[int | None]
    ) -> frozenset[int | None]:
        """Return which runs a request may read; ``None`` stands for what belongs to no run.

        Each is asked for once, and no more than a hundred of them: of the others it may read none.
        """
        distinct = list(dict.fromkeys(run_ids))
        if self.authorize is None:
            return frozenset(distinct)
        asked = distinct[:_RUNS_ASKED]
        return frozenset([one for one in asked if await self._says_yes(request, READ, one)])

    def knows_token(self, request: Request) -> bool:
        """Return whether a request proves that it knows the token, if there is one."""
        return self.token is None or self._bears_token(request) or self._has_session(request)

    def matches(self, given: str) -> bool:
        """Return whether this is the token, in a time that does not tell how much of it is."""
        return self.token is not None and hmac.compare_digest(_digest(given), _digest(self.token))

    def remember(self, request: Request, response: Response) -> None:
        """Start a session: a signed cookie that scripts cannot read."""
        begun = f"{int(time.time()) + SESSION_SECONDS}.{secrets.token_urlsafe(12)}"
        _set_cookie(request, response, SESSION_COOKIE, f"{begun}.{self._signature(begun)}")

    def forget(self, request: Request, response: Response) -> None:
        """End a session in this browser."""
        response.delete_cookie(SESSION_COOKIE, path=_path(request))

    def _bears_token(self, request: Request) -> bool:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and self.matches(given.strip())

    def _has_session(self, request: Request) -> bool:
        begun, _, signature = request.cookies.get(SESSION_COOKIE, "").rpartition(".")
        until = begun.partition(".")[0]
        return (
            until.isascii()
            and until.isdecimal()
            and len(until) < 12
            and hmac.compare_digest(signature.encode(), self._signature(begun).encode())
            and time.time() < int(until)
        )

    def _signature(self, text: str) -> str:
        key = _digest(f"fanout dashboard session {self.token}")
        return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()

    async def _says_yes(self, request: Request, action: str, run_id: int | None) -> bool:
        """Ask beside the request itself: an answer in place of it means no."""
        try:
            return await self._authorized(request, action, run_id)
        except HTTPException:
            return False

    async def _authorized(self, request: Request, action: str, run_id: int | None) -> bool:
        if self.authorize is None:
            return True
        answer: Any
        if inspect.iscoroutinefunction(self.authorize):
            answer = await self.authorize(request, action, run_id)
        else:  # it may ask a database, and must not block the loop
            answer = await run_in_threadpool(self.authorize, request, action, run_id)
            answer = await answer if inspect.isawaitable(answer) else answer
        return answer is True


def check_same_origin(request: Request) -> None:
    """Refuse what another site's page has sent.

    Raises:
        Refused: it has.
    """
    host = request.headers.get("host", "")
    source = request.headers.get("origin") or request.headers.get("referer")
    site = request.headers.get("sec-fetch-site", "same-origin")
    foreign = source is not None and _netloc(source) != host.lower()
    if foreign or site not in ("same-origin", "none"):
        raise failures.Refused("this request comes from another site")


def check_csrf(request: Request, field: str | None) -> None:
    """Refuse what does not repeat its cookie: only our own pages, and no forms elsewhere, can.

    Raises:
        Refused: the cookie is missing, or not repeated.
    """
    cookie = request.cookies.get(CSRF_COOKIE, "")
    given = request.headers.get(CSRF_HEADER) or field or ""
    if not cookie or not hmac.compare_digest(cookie.encode(), given.encode()):
        raise failures.Refused(
            "the form is out of date: load the page again (programs send the token as "
            "'Authorization: Bearer ...')"
        )


def csrf_of(request: Request) -> str:
    """Return the browser's secret for its forms: the cookie's, or a new one for `send_csrf`."""
    cookie = request.cookies.get(CSRF_COOKIE, "")
    if len(cookie) >= _SHORTEST_TOKEN:
        return cookie
    if not hasattr(request.state, "fanout_csrf"):
        request.state.fanout_csrf = secrets.token_urlsafe(24)
    made: str = request.state.fanout_csrf
    return made


def send_csrf(request: Request, response: Response) -> None:
    """Give a browser its secret, if it has none yet."""
    if hasattr(request.state, "fanout_csrf"):
        _set_cookie(request, response, CSRF_COOKIE, request.state.fanout_csrf)


def _set_cookie(request: Request, response: Response, name: str, value: str) -> None:
    response.set_cookie(
        name,
        value,
        max_age=SESSION_SECONDS,
        path=_path(request),
        secure=request.url.scheme == "https",
        httponly=True,
        samesite="strict",
    )


def _path(request: Request) -> str:
    return quote(request.scope.get("root_path") or "/", safe=_PATH_LETTERS)


def _netloc(url: str) -> str:
    try:
        return urlsplit(url).netloc.lower()
    except ValueError:
        return ""


def _can_be_sent(token: str) -> bool:
    return all(one.isprintable() and not one.isspace() for one in token)


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
