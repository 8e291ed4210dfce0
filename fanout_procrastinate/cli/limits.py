"""The command about limits: who has them and who waits; change them, pause them."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

from fanout_procrastinate import errors, models
from fanout_procrastinate.cli import command, display, session, views

_HEADS = ("limit", "kind", "at once>", "used>", "rate", "line>", "runs in want>", "paused until")
_SPARE = ("line>", "rate", "paused until", "kind", "runs in want>")
_USES = ("run>", "slot>", "item>", "key", "since")
_USES_SPARE = ("key", "item>", "slot>", "since")
_CHANGES = ("concurrency", "rate", "per", "burst")


def _limits(use: session.Session) -> command.Exit:
    """List the limits; show one, change it, pause it.

    With a name alone it shows who has the limit, who waits for it, and why. A change holds until
    the declaration in the code changes; where there is more room it is filled at once.
    """
    options, name = use.options, use.options.limit
    changes = {one: getattr(options, one) for one in _CHANGES if one in options}
    if name is None:
        if changes or options.pause is not None or options.resume:
            raise errors.ConfigurationError("which limit? give its name, as `limits` shows it")
        return _listed(use)
    for step in _steps(use, name, changes):
        state = step
    use.answer(state.as_dict(), lambda screen: _show(screen, state))
    return command.Exit.OK


def _steps(use: session.Session, name: str, changes: dict[str, Any]) -> Iterator[models.LimitState]:
    options = use.options
    found = next((one for one in use.owner.limits() if one.name == name), None)
    if found is None:
        raise errors.ConfigurationError(f"there is no limit {name!r}; `limits` shows them")
    yield found
    if changes:
        yield use.owner.update_limit(name, **changes)
    if options.resume:
        yield use.owner.resume_limit(name)
    if options.pause is not None:
        yield use.owner.pause_limit(name, options.pause)


def _listed(use: session.Session) -> command.Exit:
    found = use.owner.limits()

    def show(screen: display.Screen) -> None:
        if found:
            screen.table(_HEADS, map(_row, found), _SPARE)
        else:
            screen.line("no limits: one gets here with the first run, or permit, that uses it")

    use.answer([one.as_dict() for one in found], show)
    return command.Exit.OK


def _row(state: models.LimitState) -> Sequence[object]:
    return (
        state.name,
        state.kind,
        _any(state.concurrency),
        state.used,
        _rate(state),
        len(state.waiting),
        len(state.wanting),
        views.moment(state.paused_until),
    )


def _any(number: int | None) -> object:
    return "any" if number is None else number


def _rate(state: models.LimitState) -> str:
    if state.rate is None:
        return ""
    return f"{state.rate:g} in {views.duration(state.per)}, {state.burst} at once"


def _show(screen: display.Screen, state: models.LimitState) -> None:
    screen.line(f"limit {state.name}: {state.used} in use, {_any(state.concurrency)} allowed")
    screen.fields(
        [
            ("kind", state.kind),
            ("rate", _rate(state)),
            ("next start", views.dated(state.next_start)),
            ("paused until", views.dated(state.paused_until)),
        ]
    )
    if state.holders:
        screen.table(("held by", *_USES), _uses(state.holders), _USES_SPARE)
    if state.waiting:
        screen.table(("waits", *_USES), _uses(state.waiting), _USES_SPARE)
    if state.wanting:
        rows = [(one.run_id, one.name, one.wants, one.reason) for one in state.wanting]
        screen.table(("run>", "name", "wants>", "waits for"), rows, ("name",))


def _uses(uses: Sequence[models.LimitUse]) -> Iterator[Sequence[object]]:
    for use in uses:
        key = use.lane if use.lane is not None else use.key
        yield use.label, use.run_id, use.slot, use.position, key, views.moment(use.since)


def _number_or_none(text: str) -> float | None:
    if text.lower() == "none":
        return None
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: give a number, or none") from None


def _whole_or_none(text: str) -> int | None:
    if text.lower() == "none":
        return None
    if not text.isascii() or not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}: give a whole number, or none")
    return int(text)


COMMANDS = (
    command.Command(
        name="limits",
        function=_limits,
        example="limits llm --concurrency=3",
        arguments=(
            command.argument(
                "limit", metavar="NAME", nargs="?", help="only this one (default: list all)"
            ),
            command.argument(
                "--concurrency",
                metavar="N",
                type=_whole_or_none,
                default=argparse.SUPPRESS,
                help="how many may have it at once; none for any number",
            ),
            command.argument(
                "--rate",
                metavar="R",
                type=_number_or_none,
                default=argparse.SUPPRESS,
                help="how many may begin with it in --per seconds; none for any number",
            ),
            command.argument(
                "--per", metavar="S", type=float, default=argparse.SUPPRESS, help="seconds"
            ),
            command.argument(
                "--burst",
                metavar="B",
                type=int,
                default=argparse.SUPPRESS,
                help="how many of these may begin at once (default: a tenth of --rate)",
            ),
            command.argument(
                "--pause",
                metavar="SECONDS",
                type=float,
                help="let nothing begin with it for so long; what has begun goes on",
            ),
            command.argument("--resume", action="store_true", help="end its pause"),
        ),
    ),
)
