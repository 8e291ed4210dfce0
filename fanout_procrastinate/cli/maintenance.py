"""Commands that keep the database in order: its schema, the sweep, pruning, and the audit."""

from __future__ import annotations

import argparse
import datetime
from collections.abc import Callable, Sequence

from fanout_procrastinate import errors, schema
from fanout_procrastinate.cli import command, display, session


class NoHostSchema(errors.SchemaError):
    """Report that procrastinate's own tables are missing, which come first."""

    def __str__(self) -> str:
        return self.detail


def _schema(use: session.Session) -> command.Exit:
    """Create, check or print the fan-out tables and functions in the database.

    procrastinate's own must be there first: python -m procrastinate --app=... schema --apply
    """
    if use.options.action == "read":
        sql = schema.read()
        use.answer({"sql": sql}, lambda screen: screen.block(sql))
        return command.Exit.OK
    if use.options.action == "apply":
        applied = _applied(use)
        use.answer({"applied": applied}, _listing("applied", applied))
        return command.Exit.OK
    missing = use.reached.missing_schema()
    use.answer({"missing": missing}, _listing("missing", missing))
    return command.Exit.FINDING if missing else command.Exit.OK


def _applied(use: session.Session) -> list[str]:
    owner = use.reached
    try:
        return owner.apply_schema()
    except errors.ConfigurationError as exc:
        raise NoHostSchema(str(exc)) from exc


def _listing(word: str, names: Sequence[str]) -> Callable[[display.Screen], None]:
    def show(screen: display.Screen) -> None:
        for name in names:
            screen.line(f"{word}: {name}")
        if not names:
            screen.line("up to date")

    return show


def _sweep(use: session.Session) -> command.Exit:
    """Sweep once, now: repair what crashes have left. Workers do so by themselves.

    The exit code is 1 if a run could not be repaired.
    """
    report = use.reached.sweep()

    def show(screen: display.Screen) -> None:
        for run_id, finding in report.runs.items():
            screen.line(f"run {run_id}: {finding}")
        for name, count in report.done.items():
            screen.line(f"{name}: {count}")
        for run_id, error in report.errors.items():
            screen.line(f"run {run_id} could not be repaired: {error}")
        if not report.changed and not report.errors:
            screen.line("nothing to repair")

    use.answer(report.as_dict(), show)
    return command.Exit.FINDING if report.errors else command.Exit.OK


def _prune(use: session.Session) -> command.Exit:
    """Remove the runs that closed long ago, and the library's own jobs that ended as long ago.

    Runs whose callbacks still have to run are kept. Workers do so by themselves, where the app
    has the setting `retention`.
    """
    done = use.reached.prune(use.options.older_than)

    def show(screen: display.Screen) -> None:
        for name, count in done.items():
            screen.line(f"{name}: {count}")

    use.answer(done, show)
    return command.Exit.OK


def _older_than(text: str) -> datetime.timedelta:
    span = command.span(text)
    if span is None:
        raise argparse.ArgumentTypeError(f"{text!r}: give a time such as 90s, 30m, 2h or 30d")
    return span


def _audit(use: session.Session) -> command.Exit:
    """Check the invariants of all runs, or of one, on the live database; it only reads.

    The exit code is 1 if anything was found, or the time was not enough to look at everything.
    """
    found = use.reached.audit(use.options.run, timeout=use.options.timeout)

    def show(screen: display.Screen) -> None:
        for one in found:
            where = "" if one.run_id is None else f"run {one.run_id}: "
            remedy = " (the next sweeps repair it)" if one.repairable else ""
            screen.line(f"{where}{one.kind}: {one.subject}: {one.detail}{remedy}")
        if not found:
            screen.line("nothing found")

    use.answer([one.as_dict() for one in found], show)
    return command.Exit.FINDING if found else command.Exit.OK


COMMANDS = (
    command.Command(
        name="schema",
        function=_schema,
        example="schema --apply",
        arguments=(
            command.one_of(
                "action",
                apply="create or upgrade what is missing",
                check="tell what is missing; the exit code is 1 if anything is",
                read="print the SQL; needs neither an app nor a server",
            ),
        ),
    ),
    command.Command(name="sweep", function=_sweep, example="sweep"),
    command.Command(
        name="prune",
        function=_prune,
        example="prune --older-than=30d",
        arguments=(
            command.argument(
                "--older-than",
                metavar="TIME",
                type=_older_than,
                required=True,
                help="how long ago a run closed at least: 90s, 30m, 2h, 30d",
            ),
        ),
    ),
    command.Command(
        name="audit",
        function=_audit,
        example="audit",
        arguments=(
            command.argument(
                "run",
                metavar="ID",
                type=command.run_id,
                nargs="?",
                help="only this run (default: all)",
            ),
            command.argument(
                "--timeout",
                metavar="SECONDS",
                type=float,
                default=30.0,
                help="look no longer than that (default: %(default)g)",
            ),
        ),
    ),
)
