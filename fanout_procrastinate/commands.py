"""The commands: what each asks of the library, and how it shows the answer."""

from __future__ import annotations

import argparse
import dataclasses
import enum
import itertools
import json
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from fanout_procrastinate import display, errors, models, run, schema, session

_POLL_SECONDS = 0.5
_ITEMS_SHOWN = 50
_ERRORS_SHOWN = 5
_LONGEST_MESSAGE = 200
_LARGEST_ID = 2**63 - 1


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
    INTERRUPTED = 130
    BROKEN_PIPE = 141


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
    """One command of the command line.

    Args:
        function: does it; returns the exit code, ``None`` for 0. Its name is the command's, the
            first line of its docstring the help.
        example: what follows ``fanout --app=papers.app`` in the example of its help.
        arguments: adds its own arguments to a parser.
    """

    function: Callable[[session.Session], Exit | None]
    example: str
    arguments: Callable[[argparse.ArgumentParser], None]

    @property
    def name(self) -> str:
        return self.function.__name__

    @property
    def help(self) -> str:
        return (self.function.__doc__ or "").strip()


# -- the schema


def apply_or_check_schema(parser: argparse.ArgumentParser) -> None:
    group = parser.add_mutually_exclusive_group(required=True)
    for action, text in (
        ("apply", "create or upgrade the tables and functions"),
        ("check", "tell what is missing; the exit code is 1 if anything is"),
        ("read", "print the SQL; needs neither an app nor a server"),
    ):
        group.add_argument(
            f"--{action}", dest="action", action="store_const", const=action, help=text
        )


def schema_(use: session.Session) -> Exit | None:
    """Create, check or print the fan-out tables and functions in the database.

    procrastinate's own schema must be there first: procrastinate --app=... schema --apply
    """
    if use.options.action == "read":
        sql = schema.read()
        use.answer({"sql": sql}, lambda screen: screen.text(sql))
    elif use.options.action == "apply":
        applied = use.loaded.apply_schema()
        use.answer({"applied": applied}, _listing("applied: ", applied))
    else:
        missing = use.loaded.missing_schema()
        use.answer({"missing": missing}, _listing("missing: ", missing))
        return Exit.FINDING if missing else Exit.OK
    return None
