"""What holds for every request and response: known host names, and the headers of a safe page."""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOOPBACK = ("127.0.0.1", "localhost", "::1")

_FIRST_PARTS = ("api", "fragments", "login", "logout", "runs", "static")

_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
        "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    # Not no-referrer: browsers would then send forms with "Origin: null".
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}


def host_name(host: str) -> str:
    """Return a Host header's name, without its port.

    Example:
        >>> host_name("Example.org:8080"), host_name("[::1]:80")
        ('example.org', '::1')
    """
    try:
        return (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return ""


class Guard:
    """Refuse requests to other host names, and give each response its headers.

    A page of a stranger can make its own name resolve to this machine, and so read what is served
    here as its own; the Host header tells.

    Args:
        app: what is guarded.
        allowed_hosts: host names without ports; ``*`` allows all, for applications that check them
            elsewhere.
        base_path: the path that this is reached under, where the server does not know. It may
            still stand before a request's path, unless a path of ours begins like it.
    """

    def __init__(self, app: ASGIApp, *, allowed_hosts: Iterable[str], base_path: str) -> None:
        self._app = app
        self._hosts = {host.lower().strip("[]") for host in allowed_hosts}
        self._base_path = base_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if self._base_path:
            scope = {**scope, "root_path": self._base_path, "path": self._whole_path(scope)}

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                complete(MutableHeaders(scope=message))
            await send(message)

        answer = self._app if self._knows(scope) else _UNKNOWN_HOST
        await answer(scope, receive, send_with_headers)

    def _whole_path(self, scope: Scope) -> str:
        """Return the path with the base path before it, as ASGI has it."""
        path = _below(scope.get("root_path", ""), scope["path"])
        if self._base_path.split("/")[1] not in _FIRST_PARTS:
            path = _below(self._base_path, path)
        return self._base_path + path

    def _knows(self, scope: Scope) -> bool:
        hosts = Headers(scope=scope).getlist("host")
        return "*" in self._hosts or (len(hosts) == 1 and host_name(hosts[0]) in self._hosts)


_UNKNOWN_HOST = PlainTextResponse(
    "This host name is not allowed here; add it: allowed_hosts=[...], or --allowed-host=...\n",
    status_code=400,
)


def _below(root: str, path: str) -> str:
    """Return what follows the root in a path, if it stands there."""
    rest = path.removeprefix(root)
    return rest if rest.startswith("/") or not rest else path


def complete(headers: MutableHeaders) -> None:
    """Give a response its headers."""
    for name, value in _HEADERS.items():
        headers[name] = value
    headers.setdefault("Cache-Control", "no-store")
    if headers.get("content-type", "").startswith("text/event-stream"):
        # Belongs to the server: HTTP/2 forbids it.
        del headers["connection"]
