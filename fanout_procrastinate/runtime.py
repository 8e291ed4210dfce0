"""What one process shares between all of our jobs on one event loop.

It is opened by a worker that starts, or by the first of our jobs, and closed a while after the last
of these has ended: who dies while we end our last job is silent for most of a lease before it can
be rescued, and until then somebody must sweep.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from fanout_procrastinate import (
    database,
    hints,
    hooks,
    hub,
    keeper,
    limits,
    permits,
    processes,
    recording,
    reporter,
    settings,
    store,
    sweeper,
    telemetry,
)

logger = logging.getLogger(__name__)

_LINGER_LEASES = 2.0
_MOST_THREADS = 10_000


class Runtime:
    """Hold the connections, the keeper, the reporters, the threads and the child processes.

    Args:
        connect: opens a connection of the library's own.
        configured: the app's settings.
        tasks: names of the library's own tasks, for retention.
        measures: of the process.
        on_close: called once it is closed.
        listening: the process's hub.
    """

    def __init__(
        self,
        connect: database.Connect,
        configured: settings.Settings,
        tasks: Sequence[str],
        measures: telemetry.Telemetry,
        on_close: Callable[[], None],
        listening: hub.Hub,
    ) -> None:
        self.settings = configured
        self.suspicion = reporter.Suspicion()
        self.processes = processes.Pool()
        self.database = database.Database(connect)
        self._keeper_database = database.Database(connect, size=1)
        self.permits = permits.Permits(self.database, listening, lease=configured.lease)
        self.hints = (
            hints.Sender(self.database.run, functools.partial(hooks.redacted, configured))
            if configured.events
            else None
        )
        self.hooks = hooks.Hooks(configured, asyncio.get_running_loop())
        self.recorder = recording.Recorder(
            configured, self.hints, self.hooks, measures, self.database.run_async
        )
        self.telemetry = measures
        measures.observe_closes(lambda: self.database.run(store.closes()))
        self.keeper = keeper.Keeper(
            self._keeper_database.run,
            lambda run: sweeper.Sweeper(
                run=run,
                lease=configured.lease,
                retention=configured.retention,
                tasks=tasks,
                on_stuck=self.hooks.stuck if configured.on_stuck is not None else None,
                on_swept=measures.swept,
            ),
            renew_interval=configured.renew_interval,
            sweep_interval=configured.sweep_interval,
            renew_besides=functools.partial(self.permits.renew_once, self._keeper_database.run),
            abandoned=self._abandoned,
        )
        self._loop = asyncio.get_running_loop()
        self._on_close = on_close
        self._jobs = 0
        self._jobs_ended = 0
        self._workers: set[asyncio.Task[Any]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._closing = asyncio.Event()
        self._reporters: dict[int, reporter.Reporter] = {}
        self._owner: asyncio.Task[None] | None = None

    def attend(self, worker: asyncio.Task[Any]) -> None:
        """Stay open, and sweep, as long as this task of a worker runs."""
        if worker not in self._workers:
            self._workers.add(worker)
            worker.add_done_callback(self._workers.discard)
        self._open()

    @contextlib.asynccontextmanager
    async def job(self) -> AsyncIterator[Runtime]:
        """Keep the runtime open during one of our jobs."""
        self._jobs += 1
        self._idle.clear()
        self._open()
        hints.current.set(self.hints)
        permits.here.set(permits.Here(self.permits))
        limits.in_use.set(self.permits)
        telemetry.in_hand.set(telemetry.InHand())
        try:
            yield self
        finally:
            self._jobs -= 1
            self._jobs_ended += 1
            if self._jobs == 0:
                self._idle.set()

    @contextlib.contextmanager
    def reporter(self, run_id: int) -> Any:
        """Lend the reporter of a run to one of its slots."""
        mine = self._reporters.get(run_id)
        if mine is None:
            mine = reporter.Reporter(self.database.run_async, run_id, self.suspicion, self.recorder)
            self._reporters[run_id] = mine
        mine.slots += 1
        try:
            yield mine
        finally:
            mine.slots -= 1
            if mine.slots == 0:
                self._reporters.pop(run_id, None)

    @functools.cached_property
    def threads(self) -> concurrent.futures.ThreadPoolExecutor:
        """Threads of sync children: as many as are at work, which the workers' places limit.

        One that goes on after it was given up takes no other child's thread.
        """
        return concurrent.futures.ThreadPoolExecutor(
            max_workers=_MOST_THREADS, thread_name_prefix="fanout-child"
        )

    async def close(self) -> None:
        """Close at once what is idle; a job that still runs keeps it open."""
        self._closing.set()
        if self._owner is not None:
            await asyncio.wait({self._owner})

    def _open(self) -> None:
        if self._owner is None:
            self.keeper.start()
            self._owner = asyncio.create_task(self._own(), name="fanout-runtime")

    async def _own(self) -> None:
        try:
            await self._until_idle()
        except BaseException:
            # The loop is ending, and waits for nobody.
            self._on_close()
            self._close()
            raise
        self._on_close()
        await asyncio.to_thread(self._close)

    async def _until_idle(self) -> None:
        while True:
            await self._idle.wait()
            ended = self._jobs_ended
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LINGER_LEASES * self.settings.lease):
                    await self._closing.wait()
            await asyncio.to_thread(self.hooks.drain)
            idle = not self._workers and self._jobs_ended == ended
            if self._jobs == 0 and (self._closing.is_set() or idle):
                return

    def _abandoned(self) -> bool:
        """Close, in the keeper's thread, where the loop was closed without ending its tasks."""
        if not self._loop.is_closed():
            return False
        self._on_close()
        self._close()
        return True

    def _close(self) -> None:
        self.processes.close()
        self.keeper.stop()
        self.hooks.abandon()
        self.telemetry.observe_closes(dict)
        if self.hints is not None:
            self.hints.close()
        self.database.close()
        self._keeper_database.close()
        if "threads" in vars(self):
            self.threads.shutdown(wait=False)
