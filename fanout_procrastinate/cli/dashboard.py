"""The command that serves the dashboard."""

from __future__ import annotations

import functools
import os
import sys

import procrastinate.connector

from fanout_procrastinate import errors
from fanout_procrastinate.cli import command, session

_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_TOKEN_VARIABLE = "FANOUT_DASHBOARD_TOKEN"  # noqa: S105 - the name of a variable


def _dashboard(use: session.Session) -> command.Exit:
    """Serve the dashboard: watch runs in a browser, and control them with a token.

    It needs the extra `web`. On other addresses than the machine's own it needs a token, which is
    then asked for before anything is shown.
    """
    try:
        # The extra may be missing, and no other command needs to wait for these.
        from fanout_procrastinate import web  # noqa: PLC0415
        from fanout_procrastinate.web import serving  # noqa: PLC0415
    except ImportError as exc:
        raise errors.ConfigurationError(
            f'the dashboard needs {exc.name}; run: pip install "fanout_procrastinate[binary,web]"'
        ) from exc
    options = use.options
    token = options.token or os.environ.get(_TOKEN_VARIABLE) or None
    public = options.host not in _LOOPBACK
    if public and token is None:
        raise errors.ConfigurationError(
            f"--host={options.host} opens payloads and errors to the network: give --token, or "
            f"{_TOKEN_VARIABLE} in the environment"
        )
    app = use.reached.app
    if not isinstance(app.connector, procrastinate.connector.BaseAsyncConnector):
        raise errors.ConfigurationError(
            f"the dashboard needs an async connector, and the app has a "
            f"{type(app.connector).__name__}; give it a PsycopgConnector"
        )
    dashboard = web.create_app(
        app,
        token=token,
        read_only=options.read_only,
        allowed_hosts=[*_LOOPBACK, options.host, *options.allowed_host],
        token_to_read=public,
    )
    announce = functools.partial(_announce, use)
    serving.serve(dashboard, host=options.host, port=options.port, announce=announce)
    return command.Exit.OK


def _announce(use: session.Session, url: str) -> None:
    use.answer({"url": url}, lambda screen: screen.line(f"Dashboard: {url}"))
    sys.stdout.flush()


COMMANDS = (
    command.Command(
        name="dashboard",
        function=_dashboard,
        example="dashboard --port=8080",
        arguments=(
            command.argument(
                "--host", default="127.0.0.1", help="address to listen on (default: %(default)s)"
            ),
            command.argument(
                "--port", type=int, default=8080, help="port to listen on (default: %(default)s)"
            ),
            command.argument(
                "--token",
                metavar="SECRET",
                help="whoever knows it may control runs; at least 16 characters "
                f"(or by {_TOKEN_VARIABLE}, which others on the machine do not see)",
            ),
            command.argument(
                "--read-only", action="store_true", help="refuse all control, whoever asks"
            ),
            command.argument(
                "--allowed-host",
                metavar="NAME",
                action="append",
                default=[],
                help="a further name by which it may be reached; may be given several times",
            ),
        ),
    ),
)
