"""From what the user typed to an exit code."""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib.metadata
import io
import logging
import os
import shlex
import sys
import traceback
from collections.abc import Sequence
from typing import TextIO

from fanout_procrastinate import errors
from fanout_procrastinate.cli import (
    command,
    control,
    dashboard,
    display,
    limits,
    maintenance,
    reading,
    session,
)

_PROGRAM = "fanout"
COMMANDS = (
    *maintenance.COMMANDS,
    *reading.COMMANDS,
    *control.COMMANDS,
    *limits.COMMANDS,
    *dashboard.COMMANDS,
)
_APP_VARIABLES = ("FANOUT_APP", "PROCRASTINATE_APP")
_EXIT_CODES = """\
exit codes:
  0    done
  1    something was found: `schema --check` misses parts, `sweep` could not repair a run,
       `audit` found a contradiction; or nothing was: `retry --error-type` found no such item
  2    the command line cannot be understood, or a value cannot work
  3    there is no such run
  4    the run is closed
  5    the fan-out tables are missing: fanout --app=... schema --apply; or procrastinate's own
  6    the database does not answer, or refused
  7    the app cannot be loaded
  8    `watch`: not every run completed with every item done
  9    the output cannot be written: the disk is full, or there is no standard output
  130  interrupted; 141 if whoever read the output went away
"""
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)
# The first that fits.
_EXITS = (
    (session.AppNotLoaded, command.Exit.NO_APP),
    (errors.RunNotFound, command.Exit.UNKNOWN_RUN),
    (errors.RunClosed, command.Exit.RUN_CLOSED),
    (errors.SchemaError, command.Exit.NO_SCHEMA),
    (errors.DatabaseError, command.Exit.DATABASE),
    (errors.FanoutError, command.Exit.USAGE),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; see ``fanout --help``.

    Args:
        argv: what follows the program's name; ``None`` = from ``sys.argv``.

    Raises:
        SystemExit: as `argparse` does, after ``--help`` (0) and on a wrong command line (2).
    """
    if sys.stderr is None:  # it was closed before the start; print would take standard output
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - to the end of the process
    try:
        return _main(argv)
    finally:
        _settle_errors()


def _main(argv: Sequence[str] | None) -> int:
    if sys.stdout is None:
        _say(f"{_PROGRAM}: there is no standard output to write to")
        return command.Exit.NO_OUTPUT
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # for terminals that know few letters
    options = _parsed(sys.argv[1:] if argv is None else argv)
    _log(options.verbose)
    try:
        code = _run(options)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return command.Exit.INTERRUPTED
    except BrokenPipeError:
        _drop(sys.stdout)
        return command.Exit.BROKEN_PIPE
    except OSError as exc:
        if exc.errno not in _UNWRITABLE:
            raise
        _drop(sys.stdout)
        _say(f"{_PROGRAM}: the output cannot be written: {exc.strerror}")
        return command.Exit.NO_OUTPUT


def _settle_errors() -> None:
    """See to it that what standard error does not take changes no exit code."""
    try:
        sys.stderr.flush()
    except OSError:
        _drop(sys.stderr)


def _drop(stream: TextIO) -> None:
    """Let what is left go nowhere: Python would complain when it flushes at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _parsed(argv: Sequence[str]) -> argparse.Namespace:
    top = parser()
    if any("\ud800" <= letter <= "\udfff" for word in argv for letter in word):
        top.error("the command line is no valid text in this terminal's encoding")
    return top.parse_args(argv)


def _run(options: argparse.Namespace) -> int:
    chosen: command.Command = options.command
    try:
        with session.Session(options) as use:
            return chosen.function(use)
    except errors.FanoutError as exc:
        if options.verbose:
            _say(traceback.format_exc())
        text = str(exc)
        if options.app:
            text = text.replace("--app=...", f"--app={shlex.quote(options.app)}")
        _say(f"{_PROGRAM}: {text}")
        return next(code for kind, code in _EXITS if isinstance(exc, kind))


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # the exit code tells as well
        for line in text.splitlines():
            print(display.visible(line), file=sys.stderr)


class _Formatter(logging.Formatter):
    """Log lines may quote what anybody wrote into a database."""

    def format(self, record: logging.LogRecord) -> str:
        return "\n".join(map(display.visible, super().format(record).splitlines()))


def _log(verbose: bool) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(_Formatter("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.DEBUG if verbose else logging.WARNING, handlers=[handler])


def parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    top = argparse.ArgumentParser(
        prog=_PROGRAM,
        description="Watch and control the fan-outs of a procrastinate app.",
        epilog=f"example:\n  {_PROGRAM} --app=papers.app runs\n\n{_EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    version = importlib.metadata.version("fanout_procrastinate")
    top.add_argument("--version", action="version", version=f"{_PROGRAM} {version}")
    _add_global(top, app=_app_of_environment(), json=False, verbose=False)
    commands_of = top.add_subparsers(metavar="COMMAND", required=True)
    for one in COMMANDS:
        own = commands_of.add_parser(
            one.name,
            help=one.help.splitlines()[0],
            description=one.help,
            epilog=f"example:\n  {_PROGRAM} --app=papers.app {one.example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        for add in one.arguments:
            add(own)
        # Not given after the command, they must not undo what was given before it.
        _add_global(own, **dict.fromkeys(("app", "json", "verbose"), argparse.SUPPRESS))
        own.set_defaults(command=one)
    return top


def _add_global(to: argparse.ArgumentParser, *, app: object, json: object, verbose: object) -> None:
    group = to.add_argument_group("for every command")
    group.add_argument(
        "--app",
        metavar="MODULE.ATTRIBUTE",
        default=app,
        help=f"the procrastinate app, such as papers.app (or by {' or '.join(_APP_VARIABLES)})",
    )
    group.add_argument("--json", action="store_true", default=json, help="print JSON, nothing else")
    group.add_argument(
        "--verbose", action="store_true", default=verbose, help="log everything to standard error"
    )


def _app_of_environment() -> str:
    return next(filter(None, map(os.environ.get, _APP_VARIABLES)), "")
