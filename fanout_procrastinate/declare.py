"""The two decorators."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

from fanout_procrastinate import children, managers, outcomes, registration, settings
from fanout_procrastinate import limits as limits_module

P = ParamSpec("P")
R = TypeVar("R")


def fanout_child(
    app: registration.Target,
    *,
    name: str | None = None,
    aliases: Iterable[str] = (),
    queue: str = "default",
    priority: int = 0,
    max_attempts: int = 4,
    backoff: outcomes.Backoff | None = None,
    timeout: float | None = 1800.0,
    permanent: Any = (),
    transient: Any = (),
    max_crashes: int = 3,
    isolate: bool = False,
    memory_limit: int | None = None,
    pass_context: bool = False,
    max_running: int | None = None,
    limits: Iterable[limits_module.Limit] = (),
) -> Callable[[Callable[P, R]], children.Child[P, R]]:
    """Declare a function of one item as a child.

    Args:
        app: an App, a Blueprint, or Django's proxy.
        name: of its task; the function's dotted path by default.
        aliases: earlier names, under which jobs may still wait.
        queue: of its jobs: letters, digits and underscores.
        priority: of its jobs; the higher the sooner.
        max_attempts: tries of an item, the first included.
        backoff: seconds between the tries.
        timeout: seconds for one try; ``None`` = no limit.
        permanent: exceptions after which no other try is made.
        transient: exceptions after which another try is made.
        max_crashes: an item whose worker died so often fails.
        isolate: run each try in a process of its own (POSIX): if it crashes or passes its time
            limit, the process ends at once, and with it what it has started. It imports the
            function's module anew, and the app is not open in it.
        memory_limit: bytes that the process may have in all (Linux: its own memory, elsewhere the
            address space); beyond, allocations fail. Only with ``isolate``.
        pass_context: the function's first argument is an `ItemContext`.
        max_running: items of this child at work at the same time, over all runs and machines.
            Runs share it in equal turns, or by ``weight``.
        limits: resources that each item takes for as long as it is at work; an item waits for
            them before it begins, at no cost.

    Raises:
        ConfigurationError: something in the declaration cannot work; the message names the remedy.
    """
    options = settings.ChildOptions(
        name=name,
        aliases=aliases if isinstance(aliases, str) else tuple(aliases),  # type: ignore[arg-type]
        queue=queue,
        priority=priority,
        max_attempts=max_attempts,
        backoff=backoff or outcomes.Backoff(),
        timeout=timeout,
        permanent=permanent,
        transient=transient,
        max_crashes=max_crashes,
        isolate=isolate,
        memory_limit=memory_limit,
        pass_context=pass_context,
        max_running=max_running,
        limits=limits,  # type: ignore[arg-type]
    )
    frame = inspect.currentframe()
    caller = frame.f_back if frame is not None else None
    namespace = dict(caller.f_locals) if caller is not None else {}

    def decorate(function: Callable[P, R]) -> children.Child[P, R]:
        return children.Child(app, function, options, namespace)

    return decorate


def fanout_manager(
    app: registration.Target,
    *,
    child: children.Child[..., Any],
    item_key: Callable[[Any], str] | None = None,
    name: str | None = None,
    aliases: Iterable[str] = (),
    queue: str | None = None,
    priority: int = 0,
    max_in_flight: int = 100,
    timeout: float | None = 3600.0,
    tolerate: int | float | None = None,
    stuck_after: float = 7200.0,
    max_attempts: int = 3,
    backoff: outcomes.Backoff | None = None,
    weight: float = 1.0,
) -> Callable[[Callable[P, R]], managers.Manager[P, R]]:
    """Declare a function that lists a run's items as a manager.

    The function is a sync or async generator, or returns an iterable, of what the child takes.

    Args:
        app: an App, a Blueprint, or Django's proxy.
        child: the declared child.
        item_key: item -> str, unique within the run; a repeated key is skipped and counted.
        name: of its task; the function's dotted path by default.
        aliases: earlier names, under which jobs may still wait.
        queue: of its jobs; the child's by default.
        priority: of its jobs.
        max_in_flight: items at work at the same time, over all machines.
        timeout: seconds for the listing; ``None`` = no limit.
        tolerate: failed items (int) or their share of the total (float) that a run may have
            before it is stopped and closed as failed; ``None`` = any number.
        stuck_after: seconds without progress, although it could move, after which a run is closed.
        max_attempts: tries of the listing, the first included.
        backoff: seconds between the tries.
        weight: of its runs among others that share a limit: one of weight 2 has two places where
            one of weight 1 has one.

    Raises:
        ConfigurationError: something in the declaration cannot work; the message names the remedy.
    """
    options = settings.ManagerOptions(
        name=name,
        aliases=aliases if isinstance(aliases, str) else tuple(aliases),  # type: ignore[arg-type]
        queue=queue,
        priority=priority,
        max_in_flight=max_in_flight,
        timeout=timeout,
        tolerate=tolerate,
        stuck_after=stuck_after,
        max_attempts=max_attempts,
        backoff=backoff or outcomes.Backoff(),
        weight=weight,
    )

    def decorate(function: Callable[P, R]) -> managers.Manager[P, R]:
        return managers.Manager(app, function, child, item_key, options)

    return decorate
