"""What a command of the command line is, how it may end, and what its arguments may be."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import enum
import re
from collections.abc import Callable, Sequence
from typing import Any

from fanout_procrastinate import subscriptions
from fanout_procrastinate.cli import session

_LARGEST_LIMIT = 2**31 - 1
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


class Exit(enum.IntEnum):
    """Name the exit codes."""

    OK = 0
    FINDING = 1
    USAGE = 2
    UNKNOWN_RUN = 3
    RUN_CLOSED = 4
    NO_SCHEMA = 5
    DATABASE = 6
    NO_APP = 7
    UNCLEAN = 8
    NO_OUTPUT = 9
    INTERRUPTED = 130
    BROKEN_PIPE = 141


Argument = Callable[[argparse.ArgumentParser], object]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
    """One command of the command line.

    Args:
        name: what the user types.
        function: does it; returns the exit code. Its docstring is the help.
        example: what follows ``fanout --app=papers.app`` in the help.
        arguments: each adds an argument of the command's own to its parser.
    """

    name: str
    function: Callable[[session.Session], Exit]
    example: str
    arguments: Sequence[Argument] = ()

    @property
    def help(self) -> str:
        return "\n".join(
            line.strip() for line in (self.function.__doc__ or "").strip().splitlines()
        )


def argument(*names: str, **options: Any) -> Argument:
    """Return an argument, in `argparse`'s words."""
    return lambda parser: parser.add_argument(*names, **options)


def one_of(dest: str, **texts: str) -> Argument:
    """Return flags that exclude each other, one of which must be given."""

    def add(parser: argparse.ArgumentParser) -> None:
        group = parser.add_mutually_exclusive_group(required=True)
        for name, text in texts.items():
            group.add_argument(f"--{name}", dest=dest, action="store_const", const=name, help=text)

    return add


def run_id(text: str) -> int:
    """Read a run's id."""
    complaint = f"{text!r} is no run id; give a whole number such as 1"
    return _whole(text, subscriptions.LARGEST_ID, complaint)


def limit(default: int | None, text: str) -> Argument:
    """Return the argument that says how many to show at most."""

    def read(given: str) -> int:
        return _whole(given, _LARGEST_LIMIT, f"{given!r}: give a whole number from 1")

    return argument("--limit", metavar="N", type=read, default=default, help=text)


def span(text: str) -> datetime.timedelta | None:
    """Read a span of time such as ``90s``, ``30m``, ``2h`` or ``1d``; ``None`` for other text."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smhd])", text)
    if match is None:
        return None
    try:
        return datetime.timedelta(seconds=float(match[1]) * _SECONDS[match[2]])
    except OverflowError:
        raise argparse.ArgumentTypeError(f"{text!r} is too long a time") from None


def _whole(text: str, largest: int, complaint: str) -> int:
    if text.isascii() and text.isdecimal() and len(text) < 20 and 0 < int(text) <= largest:
        return int(text)
    raise argparse.ArgumentTypeError(complaint)


RUN = argument("run", metavar="ID", type=run_id, help="the run's id, as `runs` shows it")
