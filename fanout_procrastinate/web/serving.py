"""Serve the dashboard alone, with uvicorn."""

from __future__ import annotations

import socket
from collections.abc import Callable

import uvicorn
from starlette.types import ASGIApp

from fanout_procrastinate import errors

_END_SECONDS = 3
_LARGEST_PORT = 65_535
_SILENT_MILLISECONDS = 30_000


def serve(dashboard: ASGIApp, *, host: str, port: int, announce: Callable[[str], object]) -> None:
    """Serve until the process is told to end.

    Args:
        dashboard: what `create_app` returned.
        host: the address to listen on.
        port: the port; 0 takes a free one.
        announce: told the address as soon as it is taken.

    Raises:
        ConfigurationError: nothing can listen there.
    """
    listening = _listening(host, port)
    with listening:
        address, chosen = listening.getsockname()[:2]
        shown = f"[{address}]" if ":" in address else address
        announce(f"http://{shown}:{chosen}/")
        config = uvicorn.Config(
            dashboard,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=_END_SECONDS,
            server_header=False,
        )
        uvicorn.Server(config).run(sockets=[listening])


def _listening(host: str, port: int) -> socket.socket:
    """Return a socket that listens; what it accepts is cut off when the other side is silent."""
    if not 0 <= port <= _LARGEST_PORT:  # the resolver would cut it
        raise errors.ConfigurationError(f"cannot listen on {host}:{port}: there is no such port")
    try:
        family, kind, number, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        made = socket.socket(family, kind, number)
    except (OSError, UnicodeError) as exc:
        raise errors.ConfigurationError(f"cannot listen on {host}:{port}: {exc}") from exc
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            # Clients that vanished, or stopped reading, do not hold their connection for ever.
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENT_MILLISECONDS)
        made.bind(address)
        made.listen(1024)
    except OSError as exc:
        made.close()
        raise errors.ConfigurationError(f"cannot listen on {host}:{port}: {exc}") from exc
    return made
