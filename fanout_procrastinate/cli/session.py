"""What a command works with: the app, found, opened and closed; its options; its answer."""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Self

import procrastinate

from fanout_procrastinate import database, errors, fanout, run
from fanout_procrastinate.cli import display


class AppNotLoaded(errors.ConfigurationError):
    """Report an app that cannot be imported, or that the command line cannot work with."""


class Session:
    """Give a command its options and the app; close with the block what it has opened.

    Args:
        options: the command line, read.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self._cleanup = contextlib.ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._cleanup.close()

    @functools.cached_property
    def reached(self) -> fanout.FanOut:
        """The app's fan-outs; the app is not open, but its server has answered.

        Raises:
            AppNotLoaded: it cannot be imported, or does not tell how to connect.
            DatabaseError: the server does not answer.
        """
        owner = fanout.FanOut.of(load(self.options.app))
        try:
            # A wrong address shows here and now; the app's pool would try for half a minute.
            owner.missing_schema()
        except errors.ConfigurationError as exc:
            raise AppNotLoaded(f"cannot use the app {self.options.app}: {exc}") from exc
        return owner

    @functools.cached_property
    def owner(self) -> fanout.FanOut:
        """The app's fan-outs, with the app open until the session ends.

        Raises:
            AppNotLoaded, DatabaseError: as for `reached`.
        """
        owner = self.reached
        self._cleanup.callback(owner.app.close)
        try:
            owner.app.open()
        except database.DriverError as exc:
            raise database.mapped(exc) from exc
        self._cleanup.callback(owner.close)
        return owner

    @property
    def run(self) -> run.Run:
        """The run that the command line names.

        Raises:
            RunNotFound: it is not kept.
        """
        return self.owner.get_run(self.options.run)

    def answer(self, data: Any, show: Callable[[display.Screen], None]) -> None:
        """Write the answer: the data as JSON where that was asked for, or else as it is shown."""
        if self.options.json:
            display.write_json(sys.stdout, data)
        else:
            show(display.screen(sys.stdout))

    @contextlib.contextmanager
    def live(self) -> Iterator[display.Live]:
        """Show progress inside this block; with ``--json`` show nothing."""
        if self.options.json:
            yield display.Lines(lambda line: None)
        else:
            with display.screen(sys.stdout).live() as live:
                yield live


def load(path: str) -> procrastinate.App:
    """Import an app by its dotted path, from the current directory too.

    Raises:
        AppNotLoaded: it is not there, is no app, or its module raised something.
    """
    if not path:
        raise errors.ConfigurationError(
            "which app? give --app=module.attribute, such as --app=papers.app, or set FANOUT_APP"
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        # What the module prints must not stand in the way of our JSON.
        with contextlib.redirect_stdout(sys.stderr):
            app = procrastinate.App.from_path(path)
            app.perform_import_paths()  # type: ignore[no-untyped-call]
    except procrastinate.exceptions.LoadFromPathError as exc:
        raise AppNotLoaded(f"cannot load the app {path}: {exc}; {_remedy(path, exc)}") from exc
    except (Exception, SystemExit) as exc:  # a user's module
        raise AppNotLoaded(
            f"cannot load the app {path}: {type(exc).__name__}: {exc} (--verbose shows where)"
        ) from exc
    return app


def _remedy(path: str, exc: BaseException) -> str:
    """What to do about an app that is not found: itself, or what its module imports."""
    cause = exc.__cause__
    missing = cause.name if isinstance(cause, ModuleNotFoundError) else None
    if missing and not f"{path}.".startswith(f"{missing}."):
        return f"its module imports {missing}: install that, or start from the folder that holds it"
    if isinstance(cause, ImportError) and missing is None:
        return "its module cannot import that (--verbose shows where)"
    return "give --app=module.attribute, and start from the folder that holds the module"
