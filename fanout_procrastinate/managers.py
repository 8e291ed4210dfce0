"""A declared manager: starting its runs, its callbacks, and its job."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Generic, ParamSpec, TypedDict, TypeVar, Unpack, overload

import procrastinate

from fanout_procrastinate import (
    callbacks,
    child,
    children,
    errors,
    fanout,
    manager,
    models,
    outcomes,
    registration,
    run,
    settings,
    starting,
    store,
)

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[[run.Run], Any])


class CallbackOptions(TypedDict, total=False):
    """The options of a callback; see `Manager.on_complete`."""

    name: str | None
    queue: str | None
    priority: int | None
    max_attempts: int
    backoff: outcomes.Backoff | None


class Manager(Generic[P, R]):
    """A declared manager. `defer` starts a run; call it like the function that it is."""

    def __init__(
        self,
        app: registration.Target,
        function: Callable[P, R],
        one: children.Child[..., Any],
        item_key: Callable[[Any], str] | None,
        options: settings.ManagerOptions,
    ) -> None:
        registration.check_target(app)
        if not isinstance(one, children.Child):
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
        self.queue = options.queue or one.queue
        self._callbacks: list[tuple[str, Any]] = []
        name = registration.name_of(function, options.name)
        self.task = registration.register(app, self._job(), self, name, options, self.queue)
        registration.settle(self.task.blueprint)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<manager {self.task.name}>"

    @property
    def name(self) -> str:
        """Return its task's name, with the namespace of its blueprint once that is in an app."""
        name: str = self.task.name
        return name

    def defer(self, /, *positional: P.args, **args: P.kwargs) -> run.Run:
        """Start a run and return at once.

        Args:
            **args: the manager's arguments, as JSON: ids and paths, never contents.

        Raises:
            TypeError: the manager does not take these arguments, or they do not come by name.
            InvalidValue: an argument is no JSON.
            SchemaError: the tables are missing.
        """
        return self.configure().defer(*positional, **args)

    async def defer_async(self, /, *positional: P.args, **args: P.kwargs) -> run.Run:
        """Start a run and return at once; otherwise like `defer`."""
        return await self.configure().defer_async(*positional, **args)

    def configure(self, **options: Unpack[starting.RunOptions]) -> Deferrer[P]:
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
            weight: among runs that share a limit.
            schedule_at: an aware datetime before which the manager does not start.
            schedule_in: seconds, a timedelta, or a dict for one, before the manager starts.
            connection: your own connection: the run joins its transaction.

        Raises:
            ConfigurationError: an option cannot work.
        """
        return Deferrer(self, self._plan(options))

    def _plan(self, options: Mapping[str, Any]) -> starting.Plan:
        registration.app_of(self.child.task)
        _check_same_app(registration.app_of(self.task), self.child)
        columns = {
            **self.child.columns(),
            **starting.manager_columns(self.options),
            "manager_task": registration.stored_name(self.task),
            "manager_queue": self.queue,
            "callbacks": self.callback_columns(),
        }
        return starting.Plan.of(self.task, columns, options)

    @overload
    def on_complete(self, function: F) -> F: ...
    @overload
    def on_complete(self, **options: Unpack[CallbackOptions]) -> Callable[[F], F]: ...
    def on_complete(self, function: Any = None, **options: Any) -> Any:
        """Call this function with the `Run` when a run closes, however it closes.

        Args:
            function: sync or async, of one `Run`.
            **options: ``name``, ``queue``, ``priority``, ``max_attempts`` (6, the first try
                included), ``backoff``.
        """
        return self._decorated("complete", function, options)

    @overload
    def on_success(self, function: F) -> F: ...
    @overload
    def on_success(self, **options: Unpack[CallbackOptions]) -> Callable[[F], F]: ...
    def on_success(self, function: Any = None, **options: Any) -> Any:
        """Call this function when a run completes with every item done; see `on_complete`."""
        return self._decorated("success", function, options)

    @overload
    def on_failure(self, function: F) -> F: ...
    @overload
    def on_failure(self, **options: Unpack[CallbackOptions]) -> Callable[[F], F]: ...
    def on_failure(self, function: Any = None, **options: Any) -> Any:
        """Call this function when a run closes otherwise; see `on_complete`."""
        return self._decorated("failure", function, options)

    def callback_columns(self) -> list[dict[str, Any]]:
        """Return the declared callbacks as a run stores them.

        Raises:
            ConfigurationError: the name of one became too long.
        """
        return [
            {
                "task": registration.stored_name(task),
                "on": on,
                "queue": task.queue,
                "priority": task.priority,
            }
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
        task_name = registration.name_of(function, name)
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
        async def job(
            context: procrastinate.JobContext, run_id: int | None = None, **others: Any
        ) -> None:
            if run_id is None or others:
                raise children.not_a_start(self.name)
            owner = fanout.FanOut.of(context.app)
            async with owner.runtime().job() as shared:
                await manager.run_job(
                    function=self.function,
                    options=self.options,
                    make_packer=lambda: self.child.packer(owner, self.item_key),
                    shared=shared,
                    job=context,
                    run_id=run_id,
                )

        return job


def _check_callback(function: Any) -> None:
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise errors.ConfigurationError(
            f"the callback {function.__qualname__} yields, so calling it would do nothing; "
            "let it return"
        )
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


def _check_same_app(app: registration.Target, one: children.Child[..., Any]) -> None:
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


class Deferrer(Generic[P]):
    """A configured run, ready to be started."""

    def __init__(self, lister: Manager[P, Any], plan: starting.Plan) -> None:
        self._lister = lister
        self._plan = plan

    def defer(self, /, *positional: P.args, **args: P.kwargs) -> run.Run:
        """Start the run and return at once; see `Manager.defer`.

        Raises:
            RunKeyConflict: the run key is taken by a run with other arguments.
        """
        plan = self._plan
        call = self._call(positional, args)
        started = plan.owner.host.run(call, connection=plan.connection)
        return plan.owner.started(started, plan.name, plan.run_key)

    async def defer_async(self, /, *positional: P.args, **args: P.kwargs) -> run.Run:
        """Start the run and return at once; see `Manager.defer`.

        Raises:
            RunKeyConflict: the run key is taken by a run with other arguments.
        """
        plan = self._plan
        call = self._call(positional, args)
        started = await plan.owner.host.run_async(call, connection=plan.connection)
        return plan.owner.started(started, plan.name, plan.run_key)

    def _call(
        self, positional: tuple[Any, ...], args: dict[str, Any]
    ) -> store.Call[models.Started]:
        if positional:
            raise TypeError(f"{self._lister.name}: a run's arguments are given by name")
        try:
            inspect.signature(self._lister.function).bind(**args)
        except TypeError as exc:
            raise TypeError(f"{self._lister.name}: {exc}") from None
        return self._plan.start_call(args)
