"""Commands that change a run: cancel, pause, resume, retry, update."""

from __future__ import annotations

import argparse
import contextlib
import datetime
from collections.abc import Iterator

from fanout_procrastinate import errors, models, run
from fanout_procrastinate.cli import command, display, session, views


class Closed(errors.RunClosed):
    """Report a closed run in the command line's words."""

    def __init__(self, run_id: int, status: str, remedy: str) -> None:
        super().__init__(run_id, status)
        self.remedy = remedy

    def __str__(self) -> str:
        return f"run {self.run_id} is closed ({self.status}) {self.remedy}"


def _cancel(use: session.Session) -> command.Exit:
    """Close a run early: nothing more is handed out, items at work end first."""
    # The wish of whoever cancels a cancelled run has come true.
    chosen = _open(use, unless=models.RunStatus.CANCELLED)
    return _told(use, chosen.cancel(abort=use.options.abort, reason=use.options.reason))


def _pause(use: session.Session) -> command.Exit:
    """Hand out nothing more of a run until it is resumed; items at work end."""
    return _told(use, _open(use).pause())


def _resume(use: session.Session) -> command.Exit:
    """Hand out the items of a paused run again."""
    return _told(use, _open(use).resume())


def _retry(use: session.Session) -> command.Exit:
    """Make a run's failed items due now, as if never tried; a closed run opens again.

    The exit code is 1 if no item failed with the given type of error.
    """
    chosen = use.run
    error_type = use.options.error_type
    try:
        items = chosen.retry_failed(error_type=error_type)
    except errors.RunClosed as exc:
        raise Closed(
            chosen.id,
            exc.status,
            "for good: its key was replaced, or it is being stopped; start a new run",
        ) from exc
    if items:
        note = f"items tried again: {items}"
    elif error_type is None:
        note = "no failed items"
    else:
        note = f"no failed items of type {error_type}: `errors {chosen.id}` shows the types"
    told = _told(use, chosen.progress(), note, retried=items)
    return command.Exit.FINDING if error_type is not None and not items else told


def _update(use: session.Session) -> command.Exit:
    """Change an open run: at least one of the options."""
    names = ("max_in_flight", "tolerate", "deadline", "priority")
    changes = {name: getattr(use.options, name) for name in names if name in use.options}
    if not changes:
        raise errors.ConfigurationError(
            "update what? give --max-in-flight, --tolerate, --deadline or --priority"
        )
    chosen = use.run
    with _closed_explained(chosen):
        progress = chosen.update(**changes)
    note = ", ".join(f"{name}: {'none' if new is None else new}" for name, new in changes.items())
    return _told(use, progress, note)


def _open(use: session.Session, unless: models.RunStatus | None = None) -> run.Run:
    chosen = use.run
    status = chosen.progress().status
    with _closed_explained(chosen):
        if status.closed and status is not unless:
            raise errors.RunClosed(chosen.id, status)
    return chosen


@contextlib.contextmanager
def _closed_explained(chosen: run.Run) -> Iterator[None]:
    try:
        yield
    except errors.RunClosed as exc:
        remedy = "and cannot be changed; start a new run"
        if chosen.progress().failed:
            remedy += f", or reopen this one: fanout retry {chosen.id}"
        raise Closed(chosen.id, exc.status, remedy) from exc


def _told(
    use: session.Session, progress: models.Progress, note: str = "", **more: object
) -> command.Exit:
    def show(screen: display.Screen) -> None:
        if note:
            screen.line(note)
        screen.line(views.summary(progress))

    use.answer(progress.as_dict() | more, show)
    return command.Exit.OK


def tolerance(text: str) -> int | float | None:
    """Read a tolerance: ``10``, ``0.05``, ``5%`` or ``none``."""
    if text.lower() == "none":
        return None
    try:
        if text.endswith("%"):
            return float(text[:-1]) / 100
        return int(text) if text.isdecimal() else float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r}: give a count such as 10, a share such as 0.05 or 5%, or none"
        ) from None


def deadline(text: str) -> datetime.datetime | datetime.timedelta | None:
    """Read a deadline: ``2h``, ``90s``, ``2026-12-24T18:00+01:00`` or ``none``."""
    if text.lower() == "none":
        return None
    if (span := command.span(text)) is not None:
        return span
    try:
        moment = datetime.datetime.fromisoformat(text)
    except ValueError:
        moment = None
    if moment is None or moment.utcoffset() is None:
        raise argparse.ArgumentTypeError(
            f"{text!r}: give a time from now such as 90s, 30m, 2h or 1d, a time with its zone such "
            "as 2026-12-24T18:00+01:00, or none"
        )
    return moment


COMMANDS = (
    command.Command(
        name="cancel",
        function=_cancel,
        example='cancel 1 --reason="wrong folder"',
        arguments=(
            command.RUN,
            command.argument(
                "--abort", action="store_true", help="tell the items at work to end now"
            ),
            command.argument("--reason", metavar="TEXT", help="shown with the run"),
        ),
    ),
    command.Command(name="pause", function=_pause, example="pause 1", arguments=(command.RUN,)),
    command.Command(name="resume", function=_resume, example="resume 1", arguments=(command.RUN,)),
    command.Command(
        name="retry",
        function=_retry,
        example="retry 1 --error-type=TimeoutError",
        arguments=(
            command.RUN,
            command.argument(
                "--error-type", metavar="TYPE", help="only items that failed so, as in `errors`"
            ),
        ),
    ),
    command.Command(
        name="update",
        function=_update,
        example="update 1 --max-in-flight=20 --tolerate=5%",
        arguments=(
            command.RUN,
            command.argument(
                "--max-in-flight",
                metavar="N",
                type=int,
                default=argparse.SUPPRESS,
                help="items at work at the same time, at most",
            ),
            command.argument(
                "--tolerate",
                metavar="X",
                type=tolerance,
                default=argparse.SUPPRESS,
                help="failed items before the run is stopped: a count (10), a share (0.05, 5%%), "
                "or none for any number",
            ),
            command.argument(
                "--deadline",
                metavar="WHEN",
                type=deadline,
                default=argparse.SUPPRESS,
                help="when it is stopped at the latest: from now (30m, 2h), a time with its zone, "
                "or none",
            ),
            command.argument(
                "--priority",
                metavar="P",
                type=int,
                default=argparse.SUPPRESS,
                help="of the jobs dealt from now on, the queued ones included",
            ),
        ),
    ),
)
