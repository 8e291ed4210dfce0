"""Registering our jobs as tasks of the host's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import procrastinate
from procrastinate import utils

from fanout_procrastinate import child, errors, fanout, settings

Target = Any
"""An App, a Blueprint, or Django's proxy for either."""


def app_of(task: procrastinate.tasks.Task[..., Any, ...]) -> procrastinate.App:
    """Return the app that a task belongs to.

    Raises:
        ConfigurationError: it is on a blueprint that no app has.
    """
    app = task.blueprint
    if not isinstance(app, procrastinate.App):
        raise errors.ConfigurationError(
            f"{task.name} belongs to a blueprint that no app has; call "
            "app.add_tasks_from(blueprint, namespace=...) first"
        )
    return app


def check_target(app: Any) -> None:
    """Refuse what no task can be registered on.

    Raises:
        ConfigurationError: it is no App, no Blueprint and no proxy for one.
    """
    if not callable(getattr(app, "task", None)) or not hasattr(app, "add_tasks_from"):
        raise errors.ConfigurationError(
            f"{app!r} is neither a procrastinate App nor a Blueprint; give one of these first"
        )


def settle(app: Any) -> None:
    """Make sure that an App has its settings, and with them its sweeper."""
    if isinstance(app, procrastinate.App):
        fanout.FanOut.of(app)


def name_of(function: Callable[..., Any], name: str | None) -> str:
    """Return the name for a function's task: the given one, else its dotted path.

    Raises:
        ConfigurationError: it has none, or a name that the host cannot store.
    """
    if not name:
        try:
            name = utils.get_full_path(function)
        except procrastinate.exceptions.FunctionPathError as exc:
            raise errors.ConfigurationError(
                f"{function!r} has no name of its own; give a name= for its task"
            ) from exc
    return settings.check_task_name(name)


def stored_name(task: procrastinate.tasks.Task[..., Any, ...]) -> str:
    """Return a task's name as its jobs carry it, with the namespace that its blueprint was given.

    Raises:
        ConfigurationError: with its namespace it is longer than the host can store.
    """
    name: str = task.name
    if len(name) > settings.MAX_TASK_NAME_CHARS:
        raise errors.ConfigurationError(
            f"task name {name!r} has {len(name)} characters with its namespace; shorten its name= "
            "or the namespace= of app.add_tasks_from(), so that both have at most "
            f"{settings.MAX_TASK_NAME_CHARS}"
        )
    return settings.check_task_name(name)


def register(
    app: Target, job: Callable[..., Any], declared: Any, name: str, options: Any, queue: str
) -> Any:
    """Register a job of ours as a task of the host's, and remember what declared it."""
    job.fanout_declared = declared  # type: ignore[attr-defined]
    return app.task(
        name=name,
        aliases=list(options.aliases),
        queue=queue,
        priority=options.priority,
        pass_context=True,
        task_middleware=[child.note_worker],
    )(job)
