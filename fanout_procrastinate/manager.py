"""The manager job: list the items, stage them in chunks, seal. It never waits for children."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import functools
import inspect
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any, TypeVar

import procrastinate

from fanout_procrastinate import (
    error_records,
    errors,
    execution,
    keeper,
    models,
    outcomes,
    reporter,
    runtime,
    settings,
    staging,
    store,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")

_REASON_CHARS = 2000
_STAGED = object()


@dataclasses.dataclass(eq=False, kw_only=True)
class Listing:
    """One execution of a manager.

    Args:
        function: the user's function.
        options: as declared.
        make_packer: returns what checks the items and packs them.
        runtime: of this process.
        run_id: the run.
        claim: this execution's fence, and the run's arguments.
    """

    function: Callable[..., Any]
    options: settings.ManagerOptions
    make_packer: Callable[[], staging.Packer]
    runtime: runtime.Runtime
    run_id: int
    claim: models.ManagerClaim
    _lost: bool = False
    _ending: bool = False

    @functools.cached_property
    def packer(self) -> staging.Packer:
        return self.make_packer()

    async def execute(self) -> None:
        """Stage everything and seal; an error is classed, and the manager runs again or fails.

        Raises:
            Exception: what the manager raised, so that its job shows it.
        """
        hold = keeper.Hold(
            renew_call=store.renew_manager(self.run_id, self.claim.fence),
            on_verdict=self._told_by(asyncio.get_running_loop(), asyncio.current_task()),
        )
        if self.options.timeout is not None:
            hold.renew_until = time.monotonic() + self.options.timeout + 10.0
        self.runtime.keeper.add(hold)
        try:
            await self._within_limit()
        except errors.StaleManager:
            self._log_stale()
        except asyncio.CancelledError as exc:
            if self._lost:
                self._log_stale()
                return
            if not _cancelled_from_outside():
                await self._classed(exc)  # the manager's own doing, like any other error
                raise
            call = self._fail_call("its worker stopped", 0.0, charge=False)
            await asyncio.shield(self.runtime.database.run_async(call))
            raise
        except BaseException as exc:
            await self._classed(exc)
            raise
        finally:
            self.runtime.keeper.remove(hold)

    async def _within_limit(self) -> None:
        limit = self.options.timeout
        try:
            async with asyncio.timeout(limit):
                await self._stage()
        except TimeoutError as exc:
            if isinstance(exc.__cause__, asyncio.CancelledError):
                raise TimeoutError(f"its time limit of {limit:g} s passed") from exc
            raise
        finally:
            self._ending = True

    async def _stage(self) -> None:
        if _is_async(self.function):
            await self._stage_async(self.function(**self.claim.args))
        else:
            listed = await self._stage_in_thread()
            if listed is not _STAGED:
                await self._stage_async(listed)
        self._ending = True
        sealed = await self._until_known(store.seal(self.run_id, self.claim.fence))
        if sealed is None:
            raise errors.StaleManager(self.run_id)

    async def _stage_async(self, listed: Any) -> None:
        if inspect.isawaitable(listed):
            listed = await listed
        async with contextlib.aclosing(_items_async(listed)) as items:
            async for value in items:
                if chunk := self.packer.add(value):
                    await self._append(chunk)
        if chunk := self.packer.rest():
            await self._append(chunk)

    async def _append(self, chunk: staging.Chunk) -> None:
        self._check(await self.runtime.database.run_async(self._append_call(chunk)))

    def _append_call(self, chunk: staging.Chunk) -> store.Call[int | None]:
        return store.append(self.run_id, self.claim.fence, chunk.keys, chunk.payloads, chunk.lanes)

    def _check(self, staged: int | None) -> None:
        if staged is None:
            raise errors.StaleManager(self.run_id)

    async def _stage_in_thread(self) -> Any:
        """Stage what a sync function lists; returns what it gave that is no iterable."""
        stopped = False

        def stage() -> Any:
            listed = self.function(**self.claim.args)
            if not staging.is_iterable(listed):
                return listed
            for chunk in self.packer.chunks(_items(listed)):
                if stopped:
                    break
                self._check(self.runtime.database.run(self._append_call(chunk)))
            return _STAGED

        # One thread from the first item to the last: generators over a database cursor and the
        # like belong to the thread that made them. A thread that goes on past its limit stages
        # nothing more, and nobody waits for it.
        thread = concurrent.futures.ThreadPoolExecutor(1, "fanout-manager")
        try:
            end = await execution.Execution(stage, thread).run(timeout=None)
        finally:
            stopped = True
            thread.shutdown(wait=False)
        if isinstance(end, execution.Raised):
            raise end.error
        return end.value

    async def _classed(self, exc: BaseException) -> None:
        verdict = outcomes.classify(exc)
        permanent = verdict.permanent or isinstance(exc, errors.InvalidItem)
        wait = verdict.retry_in
        if wait is None:
            wait = self.options.backoff.delay(self.claim.attempt)
        record = error_records.describe(exc, classification=verdict)
        reason = f"its manager failed: {record['type']}: {record['message']}"[:_REASON_CHARS]
        again = await asyncio.shield(
            self._until_known(self._fail_call(reason, None if permanent else wait))
        )
        logger.error(
            "Manager failed",
            extra={
                "action": "manager_failed",
                "run_id": self.run_id,
                "attempt": self.claim.attempt,
                "again": bool(again),
                "exception": reason,
            },
        )

    def _fail_call(
        self, reason: str, retry_in: float | None, *, charge: bool = True
    ) -> store.Call[bool | None]:
        return store.manager_fail(
            self.run_id, self.claim.fence, reason=reason, retry_in=retry_in, charge=charge
        )

    async def _until_known(self, call: store.Call[T]) -> T:
        return await reporter.until_known(self.runtime.database.run_async, call, self.run_id)

    def _told_by(
        self, loop: asyncio.AbstractEventLoop, task: asyncio.Task[Any] | None
    ) -> Callable[[str], None]:
        def give_up() -> None:
            # A sealed run wants no manager either: once the seal is on its way, its answer decides.
            if task is not None and not self._ending:
                self._lost = True
                task.cancel()

        def told(verdict: str) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(give_up)

        return told

    def _log_stale(self) -> None:
        logger.warning(
            "Manager overtaken: a newer execution owns the run, or it is closed",
            extra={"action": "manager_stale", "run_id": self.run_id},
        )


def _cancelled_from_outside() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)


def _items(listed: Any) -> Iterator[Any]:
    if isinstance(listed, str | bytes):
        raise errors.PermanentError("the manager returned text; return a list of items")
    return iter(listed)


async def _items_async(listed: Any) -> AsyncGenerator[Any, None]:
    if hasattr(listed, "__aiter__"):
        async with staging.closed_at_the_end(aiter(listed)) as items:
            async for value in items:
                yield value
    elif staging.is_iterable(listed):
        for value in _items(listed):
            yield value
    else:
        raise errors.PermanentError(
            f"the manager returned {type(listed).__name__}; yield the items or return an iterable"
        )


async def run_job(
    *,
    function: Callable[..., Any],
    options: settings.ManagerOptions,
    make_packer: Callable[[], staging.Packer],
    shared: runtime.Runtime,
    job: procrastinate.JobContext,
    run_id: int,
) -> None:
    """Execute one manager job."""
    assert job.job.id is not None  # noqa: S101 - a job that runs has an id
    # Executed twice it claims twice, and what was claimed first is void.
    claim = await reporter.until_known(
        shared.database.run_async, store.manager_begin(run_id, job.job.id), run_id
    )
    if claim is None:
        logger.info(
            "Nothing to list: the run is sealed or closed",
            extra={"action": "manager_not_wanted", "run_id": run_id},
        )
        return
    listing = Listing(
        function=function,
        options=options,
        make_packer=make_packer,
        runtime=shared,
        run_id=run_id,
        claim=claim,
    )
    trace = await shared.recorder.trace(run_id)
    shared.telemetry.waited(trace.name, trace.waited)
    with shared.telemetry.manager(trace.name, run_id, trace.carrier):
        await listing.execute()
