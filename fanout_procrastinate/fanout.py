"""FanOut: an app's settings, its sweeper, its runs; the composition root."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import functools
import logging
import threading
from collections.abc import Mapping
from typing import Any

import procrastinate
from procrastinate import periodic

from fanout_procrastinate import (
    auditor,
    child,
    codec,
    database,
    errors,
    events,
    hooks,
    host,
    hub,
    limit_control,
    models,
    permits,
    run,
    runtime,
    schema,
    settings,
    store,
    subscriptions,
    sweeper,
    telemetry,
)

logger = logging.getLogger(__name__)

SWEEP_TASK = "fanout_procrastinate.sweep"

_ATTRIBUTE = "_fanout_procrastinate"
_TOP_PRIORITY = 2**31 - 1
_DEFERRER = "deferrer"  # a worker's task that defers what is periodic
_DAY = 86400
_LONGEST_AGE = 1e9  # seconds; no time of the database overflows


class FanOut(limit_control.LimitControl):
    """Hold the fan-out settings of an app and give access to its runs.

    Create it before the app's first decorator; otherwise the defaults hold.

    Args:
        app: the procrastinate app.
        **options: see `Settings`: ``time_slice``, ``lease`` (seconds), ``sweep_cron``,
            ``max_item_bytes``, ``max_result_bytes`` (bytes of UTF-8 JSON), ``retention``
            (seconds), ``connection_factory``, ``chunk_size`` (items), ``events``,
            ``on_item_failed``, ``on_stuck``, ``redact``.

    Raises:
        ConfigurationError: an option cannot work, the app is a blueprint, or it has its settings
            already.

    Example:
        >>> import procrastinate
        >>> app = procrastinate.App(connector=procrastinate.PsycopgConnector())
        >>> FanOut(app, lease=10).settings.lease
        10
    """

    def __init__(self, app: procrastinate.App, **options: Any) -> None:
        app = _behind_proxy(app)
        if not isinstance(app, procrastinate.App):
            raise errors.ConfigurationError(
                f"FanOut needs an App, not a {type(app).__name__}; blueprints take the settings "
                "of the app that they are added to"
            )
        if getattr(app, _ATTRIBUTE, None) is not None:
            raise errors.ConfigurationError(
                "this app has its fan-out settings already; create FanOut(app, ...) once, before "
                "the app's first fan-out decorator"
            )
        unknown = set(options) - {field.name for field in dataclasses.fields(settings.Settings)}
        if unknown:
            raise errors.ConfigurationError(
                f"FanOut has no option {', '.join(sorted(unknown))}; see "
                f"{', '.join(field.name for field in dataclasses.fields(settings.Settings))}"
            )
        self.app = app
        self.settings = settings.Settings(**options)
        self.connect: database.Connect = self.settings.connection_factory or host.connect_as(app)
        self.host = host.Host(app, self.connect)
        self.hub = hub.Hub(self.connect)
        loop_remedy = "iterate over these events with async for instead"
        self.events = events.Events(
            self.connect, self.hub, lambda: self.host.refuse_in_loop(loop_remedy)
        )
        self.own_permits = permits.OwnPermits(self.connect, self.hub, lease=self.settings.lease)
        self._access = run.Access(
            host=self.host, hub=self.hub, events=self.events, result_codec=self._result_codec
        )
        self.telemetry = telemetry.Telemetry()
        self._runtimes: dict[asyncio.AbstractEventLoop, runtime.Runtime] = {}
        self._lock = threading.Lock()
        setattr(app, _ATTRIBUTE, self)
        self._register_sweep()

    @classmethod
    def of(cls, app: procrastinate.App) -> FanOut:
        """Return the app's `FanOut`, with the default settings where none was created.

        Raises:
            ConfigurationError: the app is a blueprint.
        """
        found: FanOut | None = getattr(app, _ATTRIBUTE, None)
        if found is not None:
            return found
        registry = getattr(app, "periodic_registry", None)
        if not isinstance(registry, _SweepRegistry):
            return cls(app)
        # A copy, by `with_connector`, of an app that has its settings.
        given = registry.fanout.settings
        names = [field.name for field in dataclasses.fields(given)]
        return cls(app, **{name: getattr(given, name) for name in names})

    # -- runs

    def get_run(self, run_id: int) -> run.Run:
        """Return a run by its id.

        Raises:
            RunNotFound: it is not kept.
            ConfigurationError: this is no id.
        """
        call = store.run(subscriptions.check_run_id(run_id))
        return self.run_of(self._found(run_id, self.host.run(call)))

    async def get_run_async(self, run_id: int) -> run.Run:
        """Return a run by its id; otherwise like `get_run`."""
        call = store.run(subscriptions.check_run_id(run_id))
        return self.run_of(self._found(run_id, await self.host.run_async(call)))

    def find_run(self, name: str, run_key: str) -> run.Run:
        """Return the run that holds a run key.

        Args:
            name: the manager's task name.
            run_key: its key.

        Raises:
            RunNotFound: no kept run holds it.
            ConfigurationError: name or key is no text.
        """
        found = self.host.run(self._find(name, run_key))
        return self.get_run(self._found(run_key, found))

    async def find_run_async(self, name: str, run_key: str) -> run.Run:
        """Return the run that holds a run key; otherwise like `find_run`."""
        found = await self.host.run_async(self._find(name, run_key))
        return await self.get_run_async(self._found(run_key, found))

    def runs(
        self,
        name: str | None = None,
        status: str | None = None,
        tag: str | None = None,
        limit: int = 50,
    ) -> list[models.Progress]:
        """Return the latest runs' progress, the newest first.

        Args:
            name: only runs of this manager's task name.
            status: only runs in this state.
            tag: only runs with this tag.
            limit: at most so many.

        Raises:
            ValueError: there is no such status.
            ConfigurationError: another value cannot work.
        """
        return self.host.run(self._runs(name, status, tag, limit))

    async def runs_async(
        self,
        name: str | None = None,
        status: str | None = None,
        tag: str | None = None,
        limit: int = 50,
    ) -> list[models.Progress]:
        """Return the latest runs' progress; otherwise like `runs`."""
        return await self.host.run_async(self._runs(name, status, tag, limit))

    def run_of(
        self,
        facts: models.RunFacts,
        *,
        closed_progress: models.Progress | None = None,
    ) -> run.Run:
        """Return the object for a run whose facts are read already."""
        return run.Run(facts.run_id, self._access, facts=facts, closed_progress=closed_progress)

    def started(self, started: models.Started, name: str, run_key: str | None) -> run.Run:
        """Return the object for a run that was just started or found.

        Raises:
            RunKeyConflict: its key is taken by a run with other arguments.
        """
        if started.outcome == "conflict":
            raise errors.RunKeyConflict(name, run_key or "")
        return run.Run(started.run_id, self._access, created=started.outcome == "created")

    # -- maintenance

    def apply_schema(self) -> list[str]:
        """Create or upgrade the fan-out tables; procrastinate's own must be there.

        Returns the names of the parts that were applied; empty when all were there.

        Raises:
            DatabaseError: the database refused it or did not answer.
        """
        try:
            with self.connect() as connection:
                return schema.apply(connection)
        except database.DriverError as exc:
            raise database.mapped(exc) from exc

    async def apply_schema_async(self) -> list[str]:
        """Create or upgrade the fan-out tables; otherwise like `apply_schema`."""
        return await asyncio.to_thread(self.apply_schema)

    def missing_schema(self) -> list[str]:
        """Return the names of the parts of the schema that the database lacks."""
        try:
            with self.connect() as connection:
                return schema.missing(connection)
        except database.DriverError as exc:
            raise database.mapped(exc) from exc

    def sweep(self) -> models.SweepReport:
        """Sweep once, now: repair what crashes and hands on the queue have left.

        Workers sweep by themselves; on a healthy system nothing is written.

        Raises:
            SchemaError: the tables are missing.
            DatabaseError: the database did not answer.
        """
        own = database.Database(self.connect, size=1)
        called = hooks.Hooks(self.settings)
        try:
            return sweeper.Sweeper(
                run=own.run,
                lease=self.settings.lease,
                retention=self.settings.retention,
                tasks=self._task_names(),
                on_stuck=called.stuck if self.settings.on_stuck is not None else None,
                on_swept=self.telemetry.swept,
            ).sweep_once()
        finally:
            called.close()
            own.close()

    async def sweep_async(self) -> models.SweepReport:
        """Sweep once, now; otherwise like `sweep`."""
        return await asyncio.to_thread(self.sweep)

    def prune(self, older_than: float | datetime.timedelta) -> dict[str, int]:
        """Remove runs that closed long ago, as `retention` does, until none of them is left.

        Runs that still owe a callback are kept. The library's own jobs that ended so long ago go
        too. It works in batches, each in a transaction of its own.

        Args:
            older_than: seconds since the close, or a ``timedelta``: at least a second.

        Returns how many rows were removed: ``pruned`` of runs and their items, ``pruned_jobs``.

        Raises:
            ConfigurationError: it is no such time.
            SchemaError: the tables are missing.
            DatabaseError: the database did not answer.
        """
        age = _age(older_than)
        own = database.Database(self.connect, size=1)
        try:
            return sweeper.Sweeper(
                run=own.run, lease=self.settings.lease, tasks=self._task_names()
            ).prune(age)
        finally:
            own.close()

    async def prune_async(self, older_than: float | datetime.timedelta) -> dict[str, int]:
        """Remove runs that closed long ago; otherwise like `prune`."""
        return await asyncio.to_thread(self.prune, older_than)

    def audit(self, run_id: int | None = None, *, timeout: float = 30.0) -> list[models.Finding]:
        """Check the invariants on the live database: counters, slots, jobs, closes, callbacks.

        It reads only, and keeps nobody waiting. On a healthy system it finds nothing, however busy
        that is.

        Args:
            run_id: only this run.
            timeout: seconds that it may take. Open runs and those closed last come first; what
                there was no time for is a finding of kind ``unchecked``.

        Raises:
            RunNotFound: the run is not kept.
            ConfigurationError: the timeout is not a number of seconds, up to a day, or this is no
                id.
            SchemaError: the tables are missing.
            DatabaseError: the database did not answer.
        """
        if run_id is not None:
            subscriptions.check_run_id(run_id)
        if not 0 < timeout <= _DAY:
            raise errors.ConfigurationError(
                f"timeout={timeout!r}: give seconds, a number above 0 and up to {_DAY}"
            )
        with database.Reader(self.connect) as reader:
            mine = auditor.Auditor(read=reader.run, lease=self.settings.lease)
            return mine.audit_once(run_id, timeout)

    async def audit_async(
        self, run_id: int | None = None, *, timeout: float = 30.0
    ) -> list[models.Finding]:
        """Check the invariants on the live database; otherwise like `audit`."""
        return await asyncio.to_thread(self.audit, run_id, timeout=timeout)

    def close(self) -> None:
        """End all subscriptions to events, and close what listens; it opens again when needed."""
        self.own_permits.close()
        self.events.close()
        self.hub.close()

    async def close_async(self) -> None:
        """Close what this process holds open for fan-outs on this loop, once it is idle."""
        await asyncio.to_thread(self.close)
        mine = self._runtimes.get(asyncio.get_running_loop())
        if mine is not None:
            await mine.close()

    # -- for our own jobs

    def runtime(self) -> runtime.Runtime:
        """Return what our jobs share on the running event loop."""
        loop = asyncio.get_running_loop()
        with self._lock:
            found = self._runtimes.get(loop)
            if found is None:
                found = runtime.Runtime(
                    self.connect,
                    self.settings,
                    self._task_names(),
                    self.telemetry,
                    on_close=functools.partial(self._forget, loop),
                    listening=self.hub,
                )
                self._runtimes[loop] = found
            return found

    def _attend_worker(self) -> None:
        """Sweep from its start on in a process whose worker asks for what is to be done when."""
        if not host.in_a_loop() or not host.is_open(self.app.connector):
            return
        worker = asyncio.current_task()
        # Adding tasks asks too.
        if worker is not None and worker.get_name() == _DEFERRER:
            self.runtime().attend(worker)

    def _forget(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._lock:
            self._runtimes.pop(loop, None)

    def declared(self) -> list[Any]:
        """Return what our decorators have declared on this app and its blueprints."""
        found = [getattr(task.func, "fanout_declared", None) for task in self.app.tasks.values()]
        return [one for one in found if one is not None]

    def _task_names(self) -> list[str]:
        tasks = self.app.tasks.items()
        declared = [name for name, task in tasks if hasattr(task.func, "fanout_declared")]
        return [SWEEP_TASK, *declared]

    def _result_codec(self, child_task: str) -> codec.Codec | None:
        self.app.perform_import_paths()  # type: ignore[no-untyped-call]
        task = self.app.tasks.get(child_task)
        declared = getattr(getattr(task, "func", None), "fanout_declared", None)
        found: codec.Codec | None = getattr(declared, "result_codec", None)
        return found

    def _found(self, run_id: Any, value: Any) -> Any:
        if value is None:
            raise errors.RunNotFound(run_id)
        return value

    def _find(self, name: str, run_key: str) -> store.Call[int | None]:
        for argument, value in (("name", name), ("run_key", run_key)):
            if run.check_text(argument, value) != value:
                raise errors.RunNotFound(run_key)  # no key has what a database cannot store
        return store.find_run(name, run_key)

    def _runs(
        self, name: str | None, status: str | None, tag: str | None, limit: int
    ) -> store.Call[list[models.Progress]]:
        wanted = None if status is None else str(models.RunStatus(status))
        return store.runs(
            name=None if name is None else run.check_text("name", name),
            status=wanted,
            tag=None if tag is None else run.check_text("tag", tag),
            limit=subscriptions.check_limit(limit),
        )

    # -- the periodic sweep

    def _register_sweep(self) -> None:
        task = self.app.tasks.get(SWEEP_TASK)
        if task is None:
            task = self.app.task(
                name=SWEEP_TASK,
                pass_context=True,
                priority=_TOP_PRIORITY,
                task_middleware=[child.note_worker],
            )(_sweep_job)
        registry = self.app.periodic_registry
        self.app.periodic_registry = _SweepRegistry(
            registry.periodic_tasks, self, task, self.settings.sweep_cron
        )


def _behind_proxy(app: Any) -> Any:
    """Return the app, or blueprint, behind Django's proxy: the one that its methods belong to."""
    return getattr(getattr(app, "add_tasks_from", None), "__self__", app)


def _age(older_than: Any) -> float:
    seconds = older_than
    if isinstance(older_than, datetime.timedelta):
        seconds = older_than.total_seconds()
    number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not number or not 1 <= seconds <= _LONGEST_AGE:
        raise errors.ConfigurationError(
            f"older_than={older_than!r}: give seconds, a number from 1 to {_LONGEST_AGE:g}, or a "
            "timedelta"
        )
    return float(seconds)


class _SweepRegistry(periodic.PeriodicRegistry):
    """The app's periodic tasks, and one sweep for each queue that a child is declared in.

    Blueprints may be added after the app's settings were made: the queues are looked up when the
    host asks, not before. A worker may name only some queues, and a job elsewhere never runs.
    """

    def __init__(
        self,
        periodic_tasks: dict[tuple[str, str], periodic.PeriodicTask[..., Any, ...]],
        fanout: FanOut,
        task: Any,
        cron: str,
    ) -> None:
        self._tasks = periodic_tasks
        self.fanout = fanout
        self._task = task
        self._cron = cron

    @property
    def periodic_tasks(  # type: ignore[override]
        self,
    ) -> Mapping[tuple[str, str], periodic.PeriodicTask[..., Any, ...]]:
        queues = {one.queue for one in self.fanout.declared() if hasattr(one, "queue")}
        for queue in sorted(queues):
            key = (SWEEP_TASK, queue)
            if key not in self._tasks:
                self._tasks[key] = periodic.PeriodicTask(
                    task=self._task,
                    cron=self._cron,
                    periodic_id=queue,
                    configure_kwargs={
                        "queue": queue,
                        "priority": _TOP_PRIORITY,
                        "queueing_lock": f"fanout_sweep:{queue}",
                    },
                )
        if queues:
            # There is no hook at a worker's start; but each asks this first of all.
            self.fanout._attend_worker()
        return self._tasks


async def _sweep_job(context: procrastinate.JobContext, timestamp: int) -> None:
    if host.is_in_memory(context.app.connector):
        return  # the tests of an app that has other tasks too
    fanout = FanOut.of(context.app)
    async with fanout.runtime().job() as shared:
        loop = asyncio.get_running_loop()
        report = await loop.run_in_executor(None, shared.keeper.sweeper.sweep_once)
    logger.info(
        "Swept: %s runs looked at closely, %s not repaired; done: %s",
        len(report.runs),
        len(report.errors),
        ", ".join(f"{name} {count}" for name, count in report.done.items()) or "nothing",
        extra={"action": "sweep", "timestamp": timestamp, "report": report.as_dict()},
    )
