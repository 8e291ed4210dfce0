"""The decorators, and what they return: children, managers and their callbacks."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import json
from collections.abc import AsyncIterable, Callable, Iterable, Mapping
from typing import Any, Generic, ParamSpec, TypeVar

import procrastinate
from procrastinate import utils

from fanout_procrastinate import (
    callbacks,
    child,
    codec,
    errors,
    fanout,
    isolation,
    manager,
    mapping,
    outcomes,
    run,
    sanitise,
    settings,
    signatures,
    staging,
    store,
)

P = ParamSpec("P")
R = TypeVar("R")
Target = Any
"""An App, a Blueprint, or Django's proxy for either."""


def _app_of(task: procrastinate.tasks.Task[..., Any, ...]) -> procrastinate.App:
    app = task.blueprint
    if not isinstance(app, procrastinate.App):
        raise errors.ConfigurationError(
            f"{task.name} belongs to a blueprint that no app has; call "
            "app.add_tasks_from(blueprint, namespace=...) first"
        )
    return app


def _settle(app: Any) -> None:
    """Make sure that an App has its settings, and with them its sweeper."""
    if isinstance(app, procrastinate.App):
        fanout.FanOut.of(app)


def _name_of(function: Callable[..., Any], name: str | None) -> str:
    if not name:
        try:
            name = utils.get_full_path(function)
        except procrastinate.exceptions.FunctionPathError as exc:
            raise errors.ConfigurationError(
                f"{function!r} has no name of its own; give a name= for its task"
            ) from exc
    return settings.check_task_name(name)


def _register(app: Target, job: Callable[..., Any], declared: Any, options: Any, queue: str) -> Any:
    job.fanout_declared = declared  # type: ignore[attr-defined]
    return app.task(
        name=declared.name,
        aliases=list(options.aliases),
        queue=queue,
        priority=options.priority,
        pass_context=True,
        task_middleware=[child.note_worker],
    )(job)


class Child(Generic[P, R]):
    """A declared child. Call it like the function that it is; `map` starts a run over a list."""

    def __init__(
        self,
        app: Target,
        function: Callable[P, R],
        options: settings.ChildOptions,
        namespace: Mapping[str, Any],
    ) -> None:
        signatures.check_child_signature(function, options.pass_context)
        functools.update_wrapper(self, function)  # first: it copies the function's attributes
        self.function = function
        self.options = options
        self.name = _name_of(function, options.name)
        self.queue = options.queue
        self._namespace = namespace
        self.address = (
            isolation.Address.of(function, self.name, namespace) if options.isolate else None
        )
        self.task = _register(app, self._job(), self, options, options.queue)
        _settle(self.task.blueprint)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<child {self.task.name}>"

    @functools.cached_property
    def item_codec(self) -> codec.Codec:
        """The codec of the items, by the function's annotation."""
        return codec.item_codec(self.function, self.options.pass_context, namespace=self._namespace)

    @functools.cached_property
    def result_codec(self) -> codec.Codec:
        """The codec of the results, by the function's annotation."""
        return codec.result_codec(self.function, namespace=self._namespace)

    def map(
        self, items: Iterable[Any], *, item_key: Callable[[Any], str] | None = None, **options: Any
    ) -> run.Run:
        """Start a run straight from a list or any iterable, without a manager.

        The items are stored before this returns. Where listing them raises, the run is closed as
        failed and nothing is dispatched.

        Args:
            items: what the child takes, one by one.
            item_key: item -> str, unique within the run; a repeated key is skipped.
            **options: as `Manager.configure` takes: ``run_key``, ``if_closed``,
                ``max_in_flight``, ``tolerate``, ``deadline``, ``priority``, ``queue``, ``tags``.

        Raises:
            InvalidItem: an item does not fit the child.
            RunKeyConflict: as for `Manager.configure`.
        """
        plan = self._plan(options)
        started = plan.owner.host.run(plan.start_call())
        found = plan.owner.started(started, plan.name, plan.run_key)
        if found.created:
            with mapping.Mapping(plan.owner, found.id, self.packer(plan.owner, item_key)) as stage:
                stage.all(items)
        return found

    async def map_async(
        self,
        items: Iterable[Any] | AsyncIterable[Any],
        *,
        item_key: Callable[[Any], str] | None = None,
        **options: Any,
    ) -> run.Run:
        """Start a run straight from a list, iterable or async iterable; otherwise like `map`."""
        plan = self._plan(options)
        started = await plan.owner.host.run_async(plan.start_call())
        found = plan.owner.started(started, plan.name, plan.run_key)
        if found.created:
            mapped = mapping.Mapping(plan.owner, found.id, self.packer(plan.owner, item_key))
            async with mapped as stage:
                await stage.all_async(items)
        return found

    def packer(self, owner: fanout.FanOut, item_key: Callable[[Any], str] | None) -> staging.Packer:
        """Return what checks and packs items for this child."""
        return staging.Packer(
            items=self.item_codec,
            item_key=item_key,
            max_item_bytes=owner.settings.max_item_bytes,
            chunk_size=owner.settings.chunk_size,
            chunk_seconds=owner.settings.renew_interval,
        )

    def work(self, owner: fanout.FanOut) -> child.Work:
        """Return how to work on one item."""
        return child.Work(
            function=self.function,
            options=self.options,
            items=self.item_codec,
            results=self.result_codec,
            max_result_bytes=owner.settings.max_result_bytes,
            address=self.address,
        )

    def _plan(self, options: dict[str, Any]) -> Plan:
        forbidden = {"schedule_at", "schedule_in", "connection"} & set(options)
        if forbidden:
            raise errors.ConfigurationError(
                f"map stages its items at once and takes no {', '.join(sorted(forbidden))}; "
                "declare a manager for that"
            )
        return Plan.of(self, None, options)

    def _job(self) -> Callable[..., Any]:
        async def job(context: procrastinate.JobContext, run_id: int, slot: int) -> None:
            owner = fanout.FanOut.of(context.app)
            async with owner.runtime().job() as shared:
                await child.run_job(self.work(owner), shared, context, run_id, slot)

        return job


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """A run about to be started."""

    owner: fanout.FanOut
    name: str
    run_key: str | None
    columns: Mapping[str, Any]
    connection: Any = None

    @classmethod
    def of(cls, one: Child[..., Any], lister: Manager[..., Any] | None, given: Any) -> Plan:
        """Check the options of a start and return it as columns.

        Raises:
            ConfigurationError: an option cannot work.
        """
        given = dict(given)
        connection = given.pop("connection", None)
        task = one.task if lister is None else lister.task
        app = _app_of(task)
        owner = fanout.FanOut.of(app)
        options = settings.ManagerOptions() if lister is None else lister.options
        if _app_of(one.task) is not app:
            raise errors.ConfigurationError(
                f"{task.name} and its child {one.task.name} belong to different apps; "
                "declare both on the same one"
            )
        columns: dict[str, Any] = {
            "name": task.name,
            "child_task": one.task.name,
            "child_queue": one.queue,
            "child_priority": one.options.priority,
            "manager_task": None if lister is None else lister.task.name,
            "manager_queue": one.queue if lister is None else lister.queue,
            "manager_priority": options.priority,
            "max_in_flight": options.max_in_flight,
            "max_crashes": one.options.max_crashes,
            "stuck_after": options.stuck_after,
            "manager_max_attempts": options.max_attempts,
            "callbacks": [] if lister is None else lister.callback_columns(),
        }
        columns |= run.tolerance_columns(options.tolerate)
        columns |= _start_columns(given)
        return cls(
            owner=owner,
            name=task.name,
            run_key=columns.get("run_key"),
            columns=columns,
            connection=connection,
        )

    def start_call(self, args: Mapping[str, Any] | None = None) -> Any:
        """Return the call that starts it.

        Raises:
            InvalidValue: the arguments are no JSON.
        """
        text = _args_json(args or {})
        return store.start(
            dict(self.columns)
            | {"args": json.loads(text), "args_digest": hashlib.sha256(text.encode()).hexdigest()}
        )


def _start_columns(given: dict[str, Any]) -> dict[str, Any]:
    columns: dict[str, Any] = {}
    run_key = given.pop("run_key", None)
    if run_key is not None:
        columns["run_key"] = _checked_run_key(run_key)
    if_closed = given.pop("if_closed", "return")
    if if_closed not in ("return", "replace"):
        raise errors.ConfigurationError(f'if_closed={if_closed!r}: use "return" or "replace"')
    columns["if_closed"] = if_closed
    columns["tags"] = _tags(given.pop("tags", ()))
    at, after = given.pop("schedule_at", None), given.pop("schedule_in", None)
    if at is not None and after is not None:
        raise errors.ConfigurationError("schedule_at and schedule_in exclude each other")
    if at is not None or after is not None:
        name = "schedule_in" if at is None else "schedule_at"
        columns["scheduled_at"] = run.moment(after if at is None else at, name).isoformat()
    queue = given.pop("queue", None)
    if queue is not None:
        columns["child_queue"] = columns["manager_queue"] = settings.check_queue_name(queue)
    if given.get("priority") is not None:
        columns["child_priority"] = columns["manager_priority"] = given["priority"]
    return columns | {
        name: value
        for name, value in run.run_columns(
            # For a tolerance None says something: any number.
            {
                name: value
                for name, value in given.items()
                if value is not None or name == "tolerate"
            }
        ).items()
        if name != "priority"
    }


def _checked_run_key(run_key: Any) -> str:
    if not _is_plain_text(run_key) or not 0 < len(run_key.encode()) <= staging.MAX_KEY_BYTES:
        raise errors.ConfigurationError(
            f"run_key={run_key!r}: give a str of 1 to {staging.MAX_KEY_BYTES} bytes, without NUL "
            "characters and lone surrogates"
        )
    return str(run_key)


def _tags(tags: Any) -> list[str]:
    listed = isinstance(tags, Iterable) and not isinstance(tags, str)
    found = list(tags) if listed else []
    if not listed or not all(map(_is_plain_text, found)):
        raise errors.ConfigurationError(
            f"tags={tags!r}: give a list of str, without NUL characters and lone surrogates"
        )
    return found


def _is_plain_text(text: Any) -> bool:
    return isinstance(text, str) and sanitise.clean_text(text) == text


def _args_json(args: Mapping[str, Any]) -> str:
    for name, value in args.items():
        try:
            text = sanitise.to_json(value)
        except (TypeError, ValueError, RecursionError) as exc:
            raise errors.InvalidValue(
                f"argument {name!r} is no JSON ({exc}); pass ids, text, numbers, lists and dicts"
            ) from exc
        if not sanitise.is_storable(text):
            raise errors.InvalidValue(
                f"argument {name!r} contains a NUL character, a lone surrogate or a number that "
                "the database cannot store; remove it"
            )
    return sanitise.to_json(dict(args))


class Manager(Generic[P, R]):
    """A declared manager. `defer` starts a run; call it like the function that it is."""

    def __init__(
        self,
        app: Target,
        function: Callable[P, R],
        one: Child[..., Any],
        item_key: Callable[[Any], str] | None,
        options: settings.ManagerOptions,
    ) -> None:
        if not isinstance(one, Child):
            raise errors.ConfigurationError(
                f"child={one!r} is not declared; decorate it with @fanout_child(app) first"
            )
        if item_key is not None and not callable(item_key):
            raise errors.ConfigurationError(
                f"item_key={item_key!r} cannot be called; give a function: item -> str"
            )
        _check_parameters(function)
        _check_same_app(app, one)
        functools.update_wrapper(self, function)  # first: it copies the function's attributes
        self.function = function
        self.child = one
        self.item_key = item_key
        self.options = options
        self.name = _name_of(function, options.name)
        self.queue = options.queue or one.queue
        self._callbacks: list[tuple[str, Any]] = []
        self.task = _register(app, self._job(), self, options, self.queue)
        _settle(self.task.blueprint)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<manager {self.task.name}>"

    def defer(self, *positional: P.args, **args: P.kwargs) -> run.Run:
        """Start a run and return at once.

        Args:
            **args: the manager's arguments, as JSON: ids and paths, never contents.

        Raises:
            TypeError: the manager does not take these arguments, or they do not come by name.
            InvalidValue: an argument is no JSON.
            SchemaError: the tables are missing.
        """
        self._check_named(positional)
        return self.configure().defer(**args)

    async def defer_async(self, *positional: P.args, **args: P.kwargs) -> run.Run:
        """Start a run and return at once; otherwise like `defer`."""
        self._check_named(positional)
        return await self.configure().defer_async(**args)

    def _check_named(self, positional: tuple[Any, ...]) -> None:
        if positional:
            raise TypeError(f"{self.name}: a run's arguments are given by name")

    def configure(self, **options: Any) -> Deferrer:
        """Set options of the run about to be started; then call ``defer`` on what it returns.

        Args:
            run_key: unique per manager among kept runs: the same key returns the same run.
            if_closed: ``return`` a closed run that holds the key, or ``replace`` it by a new one.
            max_in_flight: items at work at the same time, over all machines.
            tolerate: failed items (int) or their share of the total (float) that the run may have.
            deadline: an aware datetime, a timedelta, or seconds from now.
            priority: of the run's jobs.
            queue: of the run's jobs.
            tags: a list of str.
            schedule_at: an aware datetime before which the manager does not start.
            schedule_in: seconds, a timedelta, or a dict for one, before the manager starts.
            connection: your own connection: the run joins its transaction.

        Raises:
            ConfigurationError: an option cannot work.
        """
        return Deferrer(self, Plan.of(self.child, self, options))

    def on_complete(self, function: Any = None, **options: Any) -> Any:
        """Call this function with the `Run` when a run closes, however it closes.

        Args:
            function: sync or async, of one `Run`.
            **options: ``name``, ``queue``, ``priority``, ``max_attempts`` (6, the first try
                included), ``backoff``.
        """
        return self._decorated("complete", function, options)

    def on_success(self, function: Any = None, **options: Any) -> Any:
        """Call this function when a run completes without a failed item; see `on_complete`."""
        return self._decorated("success", function, options)

    def on_failure(self, function: Any = None, **options: Any) -> Any:
        """Call this function when a run closes otherwise; see `on_complete`."""
        return self._decorated("failure", function, options)

    def callback_columns(self) -> list[dict[str, Any]]:
        """Return the declared callbacks as a run stores them."""
        return [
            {"task": task.name, "on": on, "queue": task.queue, "priority": task.priority}
            for on, task in self._callbacks
        ]

    def _decorated(self, on: str, function: Any, options: dict[str, Any]) -> Any:
        if function is None:
            return functools.partial(self._decorated, on, options=options)
        self._callbacks.append((on, self._callback_task(function, **options)))
        return function

    def _callback_task(
        self,
        function: Callable[[run.Run], Any],
        *,
        name: str | None = None,
        queue: str | None = None,
        priority: int | None = None,
        max_attempts: int = 6,
        backoff: outcomes.Backoff | None = None,
    ) -> Any:
        _check_callback(function)
        task_name = _name_of(function, name)
        target = self.task.blueprint
        for task in target.tasks.values():
            declared = getattr(task.func, "fanout_declared", None)
            if isinstance(declared, callbacks.Callback) and declared.function is function:
                return task
        options = settings.ManagerOptions(
            name=name,
            queue=queue or self.child.queue,
            priority=self.child.options.priority if priority is None else priority,
            max_attempts=max_attempts,
            backoff=backoff or outcomes.Backoff(),
        )
        declared = callbacks.Callback(
            function=function, max_attempts=options.max_attempts, backoff=options.backoff
        )
        job = _callback_job(declared)
        job.fanout_declared = declared  # type: ignore[attr-defined]
        return target.task(
            name=task_name,
            queue=options.queue,
            priority=options.priority,
            pass_context=True,
            task_middleware=[child.note_worker],
        )(job)

    def _job(self) -> Callable[..., Any]:
        async def job(context: procrastinate.JobContext, run_id: int) -> None:
            owner = fanout.FanOut.of(context.app)
            async with owner.runtime().job() as shared:
                await manager.run_job(
                    function=self.function,
                    options=self.options,
                    packer=self.child.packer(owner, self.item_key),
                    shared=shared,
                    job=context,
                    run_id=run_id,
                )

        return job


def _check_callback(function: Any) -> None:
    try:
        inspect.signature(function).bind(None)
    except (TypeError, ValueError) as exc:
        raise errors.ConfigurationError(
            f"a callback is called with one Run, which {function!r} does not take ({exc})"
        ) from exc


def _callback_job(declared: callbacks.Callback) -> Callable[..., Any]:
    async def job(context: procrastinate.JobContext, run_id: int, generation: int) -> None:
        owner = fanout.FanOut.of(context.app)
        facts = await owner.host.run_async(store.run(run_id))
        if facts is None:
            return
        closed = await owner.host.run_async(store.closed_progress(run_id, generation))
        async with owner.runtime().job() as shared:
            await declared.execute(
                shared, context, owner.run_of(facts, closed_progress=closed), generation
            )

    return job


def _check_same_app(app: Target, one: Child[..., Any]) -> None:
    """Refuse a child of another app; of a blueprint nobody can tell before a run starts."""
    theirs = one.task.blueprint
    both = isinstance(app, procrastinate.App) and isinstance(theirs, procrastinate.App)
    if both and theirs is not app:
        raise errors.ConfigurationError(
            f"the child {one.task.name} belongs to another app; declare both on the same one"
        )


def _check_parameters(function: Callable[..., Any]) -> None:
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
            raise errors.ConfigurationError(
                f"the manager's parameter {parameter.name!r} is positional-only; arguments "
                "come by name: remove the /"
            )


class Deferrer:
    """A configured run, ready to be started."""

    def __init__(self, lister: Manager[..., Any], plan: Plan) -> None:
        self._lister = lister
        self._plan = plan

    def defer(self, **args: Any) -> run.Run:
        """Start the run and return at once; see `Manager.defer`.

        Raises:
            RunKeyConflict: the run key is taken by a run with other arguments.
        """
        plan = self._plan
        started = plan.owner.host.run(self._call(args), connection=plan.connection)
        return plan.owner.started(started, plan.name, plan.run_key)

    async def defer_async(self, **args: Any) -> run.Run:
        """Start the run and return at once; see `Manager.defer`.

        Raises:
            RunKeyConflict: the run key is taken by a run with other arguments.
        """
        plan = self._plan
        started = await plan.owner.host.run_async(self._call(args), connection=plan.connection)
        return plan.owner.started(started, plan.name, plan.run_key)

    def _call(self, args: dict[str, Any]) -> Any:
        try:
            inspect.signature(self._lister.function).bind(**args)
        except TypeError as exc:
            raise TypeError(f"{self._lister.name}: {exc}") from None
        return self._plan.start_call(args)


def fanout_child(
    app: Target,
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
) -> Callable[[Callable[P, R]], Child[P, R]]:
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

    Raises:
        ConfigurationError: something in the declaration cannot work; the message names the remedy.
    """
    options = settings.ChildOptions(
        name=name,
        aliases=tuple(aliases),
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
    )
    frame = inspect.currentframe()
    caller = frame.f_back if frame is not None else None
    namespace = dict(caller.f_locals) if caller is not None else {}

    def decorate(function: Callable[P, R]) -> Child[P, R]:
        return Child(app, function, options, namespace)

    return decorate


def fanout_manager(
    app: Target,
    *,
    child: Child[..., Any],
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
) -> Callable[[Callable[P, R]], Manager[P, R]]:
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

    Raises:
        ConfigurationError: something in the declaration cannot work; the message names the remedy.
    """
    options = settings.ManagerOptions(
        name=name,
        aliases=tuple(aliases),
        queue=queue,
        priority=priority,
        max_in_flight=max_in_flight,
        timeout=timeout,
        tolerate=tolerate,
        stuck_after=stuck_after,
        max_attempts=max_attempts,
        backoff=backoff or outcomes.Backoff(),
    )

    def decorate(function: Callable[P, R]) -> Manager[P, R]:
        return Manager(app, function, child, item_key, options)

    return decorate
