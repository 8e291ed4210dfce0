"""Commands that read: the runs, one run, its items and errors, and a run as it goes."""

from __future__ import annotations

import contextlib
import itertools
import sys
import time
from collections.abc import Container, Iterable, Sequence

from fanout_procrastinate import fanout, models, run, subscriptions
from fanout_procrastinate.cli import command, display, session, views

_POLL_SECONDS = 0.5
_LINES = ("log", "item_failed")
_ITEMS_SHOWN = 50
_RUNS_SHOWN = 20
_ERRORS_SHOWN = 5


def _runs(use: session.Session) -> command.Exit:
    """List the latest runs, the newest first."""
    options = use.options
    found = use.owner.runs(
        name=options.name, status=options.status, tag=options.tag, limit=options.limit
    )

    def show(screen: display.Screen) -> None:
        if found:
            screen.table(views.RUNS, map(views.run_row, found), views.RUNS_SPARE)
        else:
            screen.line("no runs")
            if options.name and "." not in options.name:
                screen.line(
                    "--name wants the manager's whole task name, such as papers.extract_folder"
                )

    use.answer([progress.as_dict() for progress in found], show)
    return command.Exit.OK


def _show(use: session.Session) -> command.Exit:
    """Show a run: progress, times, callbacks, and its most frequent errors."""
    shown = use.run
    facts, progress, groups = shown.facts, shown.progress(), shown.errors(_ERRORS_SHOWN)
    waits = _wait(use, facts, progress)
    data = progress.as_dict() | {
        "run_key": facts.run_key,
        "args": dict(facts.args),
        "tags": list(facts.tags),
        "child_task": facts.child_task,
        "child_queue": facts.child_queue,
        "errors": [group.as_dict() for group in groups],
    }

    def show(screen: display.Screen) -> None:
        screen.line(views.summary(progress))
        screen.fields(views.run_fields(facts, progress, waits))
        if groups:
            screen.table(views.ERRORS, map(views.error_row, groups), views.ERRORS_SPARE)

    use.answer(data, show)
    return command.Exit.OK


def _wait(use: session.Session, facts: models.RunFacts, progress: models.Progress) -> str:
    """What a run waits for whose manager has not begun; else nothing."""
    if facts.manager_task is None or progress.status is not models.RunStatus.PENDING:
        return ""
    jobs = use.owner.app.job_manager.list_jobs(task=facts.manager_task, status="todo")
    mine = (job for job in jobs if job.task_kwargs.get("run_id") == facts.run_id)
    return next((views.wait(job.queue, job.scheduled_at) for job in mine), "")


def _items(use: session.Session) -> command.Exit:
    """List a run's items in order."""
    items, limit = use.run.items(use.options.status), use.options.limit
    use.answer(
        (item.as_dict() for item in itertools.islice(items, limit)),
        lambda screen: _show_items(screen, items, limit or _ITEMS_SHOWN),
    )
    return command.Exit.OK


def _show_items(screen: display.Screen, items: Iterable[models.Item], limit: int) -> None:
    found = list(itertools.islice(items, limit + 1))
    if not found:
        screen.line("no items")
        return
    columns = views.item_columns(found[:limit])
    rows = zip(*columns.values(), strict=True)
    screen.table(tuple(columns), rows, views.ITEMS_SPARE)
    if len(found) > limit:
        screen.line(f"only the first {limit} are shown: --limit=N shows more")


def _errors(use: session.Session) -> command.Exit:
    """Show a run's failed items by type of error, each with a sample, the most frequent first."""
    groups = use.run.errors(use.options.limit)

    def show(screen: display.Screen) -> None:
        if groups:
            screen.table(views.ERRORS, map(views.error_row, groups), views.ERRORS_SPARE)
        else:
            screen.line("no failed items")

    use.answer([group.as_dict() for group in groups], show)
    return command.Exit.OK


def _watch(use: session.Session) -> command.Exit:
    """Follow one or several runs until all are closed; their children's log lines come below.

    The exit code is 0 if all of them completed with every item done, otherwise 8. With --json
    nothing is printed before the end, then an array of their progress.
    """
    owner = use.owner
    watched = [owner.get_run(run_id) for run_id in dict.fromkeys(use.options.runs)]
    if not use.options.json:
        _say_what_waits(use, watched)
    with use.live() as live:
        latest = _until_closed(owner, watched, live)
    if use.options.json:
        use.answer([latest[one.id].as_dict() for one in watched], lambda screen: None)
    clean = all(one.clean for one in latest.values())
    return command.Exit.OK if clean else command.Exit.UNCLEAN


def _say_what_waits(use: session.Session, watched: Sequence[run.Run]) -> None:
    screen = display.screen(sys.stdout)
    for one in watched:
        if waits := _wait(use, one.facts, one.progress()):
            screen.line(f"run {one.id}: {waits}")


def _until_closed(
    owner: fanout.FanOut, watched: Sequence[run.Run], live: display.Live
) -> dict[int, models.Progress]:
    latest: dict[int, models.Progress] = {}
    still_open = list(watched)
    with contextlib.ExitStack() as stack:
        told: subscriptions.Subscription | None = None
        while True:
            for one in still_open:
                latest[one.id] = one.progress()
                live(latest[one.id])
            _show_lines(told, latest, live)
            still_open = [one for one in still_open if not latest[one.id].closed]
            if not still_open:
                return latest
            if told is None:
                told = stack.enter_context(owner.events.subscribe(kinds=_LINES))
            time.sleep(_POLL_SECONDS)


def _show_lines(
    told: subscriptions.Subscription | None, watched: Container[int], live: display.Live
) -> None:
    while told is not None and (event := told.get(0)) is not None:
        line = views.happening(event)
        if line is not None and event.run_id in watched:
            live.log(line)


COMMANDS = (
    command.Command(
        name="runs",
        function=_runs,
        example="runs --status=processing",
        arguments=(
            command.argument("--name", help="only runs of this manager (its task name)"),
            command.argument(
                "--status", choices=[str(one) for one in models.RunStatus], help="only these"
            ),
            command.argument("--tag", help="only runs with this tag"),
            command.limit(_RUNS_SHOWN, "at most so many (default: %(default)s)"),
        ),
    ),
    command.Command(name="show", function=_show, example="show 1", arguments=(command.RUN,)),
    command.Command(
        name="items",
        function=_items,
        example="items 1 --status=failed",
        arguments=(
            command.RUN,
            command.argument(
                "--status", choices=[str(one) for one in models.ItemStatus], help="only these"
            ),
            command.limit(
                None, f"at most so many (default: {_ITEMS_SHOWN}; all of them with --json)"
            ),
        ),
    ),
    command.Command(
        name="errors",
        function=_errors,
        example="errors 1",
        arguments=(command.RUN, command.limit(10, "at most so many types (default: %(default)s)")),
    ),
    command.Command(
        name="watch",
        function=_watch,
        example="watch 1 2",
        arguments=(
            command.argument(
                "runs", metavar="ID", type=command.run_id, nargs="+", help="the runs' ids"
            ),
        ),
    ),
)
