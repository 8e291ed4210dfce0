"""A declared child: how its items and results are read and written, and its job."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterable, Callable, Iterable, Mapping
from typing import Any, Generic, ParamSpec, TypeVar, Unpack

import procrastinate

from fanout_procrastinate import (
    child,
    codec,
    errors,
    fanout,
    isolation,
    limits,
    mapping,
    registration,
    run,
    settings,
    signatures,
    staging,
    starting,
)

P = ParamSpec("P")
R = TypeVar("R")


class Child(Generic[P, R]):
    """A declared child. Call it like the function that it is; `map` starts a run over a list."""

    def __init__(
        self,
        app: registration.Target,
        function: Callable[P, R],
        options: settings.ChildOptions,
        namespace: Mapping[str, Any],
    ) -> None:
        registration.check_target(app)
        signatures.check_child_signature(function, options.pass_context)
        functools.update_wrapper(self, function)  # first: it copies the function's attributes
        self.function = function
        self.options = options
        self.queue = options.queue
        self._namespace = namespace
        name = registration.name_of(function, options.name)
        self.address = isolation.Address.of(function, name, namespace) if options.isolate else None
        self.task = registration.register(app, self._job(), self, name, options, options.queue)
        registration.settle(self.task.blueprint)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<child {self.task.name}>"

    @property
    def name(self) -> str:
        """Return its task's name, with the namespace of its blueprint once that is in an app."""
        name: str = self.task.name
        return name

    @functools.cached_property
    def item_codec(self) -> codec.Codec:
        """The codec of the items, by the function's annotation."""
        return codec.item_codec(self.function, self.options.pass_context, namespace=self._namespace)

    @functools.cached_property
    def result_codec(self) -> codec.Codec:
        """The codec of the results, by the function's annotation."""
        return codec.result_codec(self.function, namespace=self._namespace)

    def map(
        self,
        items: Iterable[Any],
        *,
        item_key: Callable[[Any], str] | None = None,
        **options: Unpack[starting.MapOptions],
    ) -> run.Run:
        """Start a run straight from a list or any iterable, without a manager.

        The items are stored before this returns. Where listing them raises, the run is closed as
        failed and nothing is dispatched. Where a kept run has the ``run_key`` already, that run is
        returned and the items are not looked at.

        Args:
            items: what the child takes, one by one.
            item_key: item -> str, unique within the run; a repeated key is skipped.
            **options: as `Manager.configure` takes: ``run_key``, ``if_closed``,
                ``max_in_flight``, ``tolerate``, ``deadline``, ``priority``, ``queue``, ``tags``,
                ``weight``.

        Raises:
            InvalidValue: this is no iterable, or an async one, which `map_async` takes.
            InvalidItem: an item does not fit the child.
            RunKeyConflict: as for `Manager.configure`.
        """
        _check_iterable(items, "map")
        if not staging.is_iterable(items):
            raise errors.InvalidValue(
                f"map takes no async iterable such as this {type(items).__name__}; await "
                "map_async instead"
            )
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
        **options: Unpack[starting.MapOptions],
    ) -> run.Run:
        """Start a run straight from a list, iterable or async iterable; otherwise like `map`."""
        _check_iterable(items, "map_async")
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
            key_limit=next((one for one in self.options.limits if one.key is not None), None),
            max_item_bytes=owner.settings.max_item_bytes,
            chunk_size=owner.settings.chunk_size,
            chunk_seconds=owner.settings.renew_interval,
        )

    def work(self, owner: fanout.FanOut) -> child.Work:
        """Return how to work on one item."""
        fault = None
        try:
            items, results = self.item_codec, self.result_codec
        except errors.ConfigurationError as exc:
            # A job that failed before its slot began would be dealt again for ever.
            fault, items, results = exc, codec.Codec(), codec.Codec()
        return child.Work(
            fault=fault,
            function=self.function,
            options=self.options,
            items=items,
            results=results,
            max_result_bytes=owner.settings.max_result_bytes,
            address=self.address,
        )

    def _plan(self, options: Mapping[str, Any]) -> starting.Plan:
        forbidden = {"schedule_at", "schedule_in", "connection"} & set(options)
        if forbidden:
            raise errors.ConfigurationError(
                f"map stages its items at once and takes no {', '.join(sorted(forbidden))}; "
                "declare a manager for that"
            )
        columns = self.columns() | starting.manager_columns(settings.ManagerOptions())
        return starting.Plan.of(self.task, columns | {"manager_queue": self.queue}, options)

    def columns(self) -> dict[str, Any]:
        """Return what a run stores of its child.

        Raises:
            ConfigurationError: an annotation cannot be resolved, or the task's name became too
                long. They are resolved late, but not later than at the trigger.
        """
        _ = self.item_codec, self.result_codec
        return {
            "child_task": registration.stored_name(self.task),
            "child_queue": self.queue,
            "child_priority": self.options.priority,
            "max_crashes": self.options.max_crashes,
            **self._limit_columns(),
        }

    def _limit_columns(self) -> dict[str, Any]:
        specs = [limit.spec() for limit in self.options.limits]
        if self.options.max_running is not None:
            specs.append(limits.kind_spec(self.task.name, self.options.max_running))
        if not specs:
            return {}
        names = sorted(spec["name"] for spec in specs if not spec["keyed"])
        return {
            "limit_specs": specs,
            "limits": names or None,
            "key_limit": next((spec["name"] for spec in specs if spec["keyed"]), None),
        }

    def _job(self) -> Callable[..., Any]:
        async def job(
            context: procrastinate.JobContext,
            run_id: int | None = None,
            slot: int | None = None,
            **others: Any,
        ) -> None:
            if run_id is None or slot is None or others:
                raise not_a_start(self.name)
            owner = fanout.FanOut.of(context.app)
            async with owner.runtime().job() as shared:
                await child.run_job(self.work(owner), shared, context, run_id, slot)

        return job


def not_a_start(name: str) -> errors.ConfigurationError:
    """Return the error for a job of ours that somebody deferred by hand, with other arguments."""
    return errors.ConfigurationError(
        f"this job of {name} is no part of a run: a start runs with .defer() of the manager (or "
        ".map() of a child), not through the queue"
    )


def _check_iterable(items: Any, call: str) -> None:
    listed = isinstance(items, AsyncIterable) or staging.is_iterable(items)
    if isinstance(items, str | bytes) or not listed:
        raise errors.InvalidValue(
            f"{call} takes an iterable of items, not a {type(items).__name__}; give a list"
        )
