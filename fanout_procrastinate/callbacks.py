"""Callback jobs: enqueued by the close, retried on their own, ending in a state that shows."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import procrastinate

from fanout_procrastinate import (
    error_records,
    errors,
    execution,
    keeper,
    outcomes,
    reporter,
    run,
    runtime,
    sanitise,
    store,
)

logger = logging.getLogger(__name__)

_LAST_ANSWER_SECONDS = 30.0
_Names = tuple[int, int, str, int]
"""Run, generation, task, job."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Callback:
    """A declared callback.

    Args:
        function: the user's function of a `Run`.
        max_attempts: the first try included.
        backoff: seconds between the tries.
    """

    function: Callable[[run.Run], Any]
    max_attempts: int = 6
    backoff: outcomes.Backoff = dataclasses.field(default_factory=outcomes.Backoff)

    async def execute(
        self,
        shared: runtime.Runtime,
        job: procrastinate.JobContext,
        closed: run.Run,
        generation: int,
    ) -> None:
        """Execute one callback job.

        Raises:
            Exception: what the callback raised, so that its job shows it.
        """
        job_id = job.job.id
        assert job_id is not None  # noqa: S101 - a job that runs has an id
        names = (closed.id, generation, job.job.task_name, job_id)
        attempt = await shared.database.run_async(store.callback_begin(*names))
        if attempt is None:
            return
        hold = keeper.Hold(renew_call=store.renew_callback(*names), on_verdict=lambda verdict: None)
        shared.keeper.add(hold)
        try:
            error = await self._called(shared, names, attempt, closed)
        finally:
            shared.keeper.remove(hold)
        if error is not None:
            raise error

    async def _called(
        self, shared: runtime.Runtime, names: _Names, attempt: int, closed: run.Run
    ) -> BaseException | None:
        """Call the function and have its end recorded; return what it raised."""
        try:
            end = await execution.Execution(self.function).run(closed, timeout=None)
        except asyncio.CancelledError:
            await _for_a_while(
                self._ended(shared, names, attempt, TimeoutError("its worker stopped"), wait=0.0)
            )
            raise
        error = end.error if isinstance(end, execution.Raised) else None
        report = asyncio.create_task(
            self._ended(shared, names, attempt, error), name="fanout-callback-end"
        )
        try:
            await asyncio.shield(report)
        except asyncio.CancelledError:
            # It has ended: its worker's end does not undo that.
            await _for_a_while(report)
            raise
        return error

    async def _ended(
        self,
        shared: runtime.Runtime,
        names: _Names,
        attempt: int,
        error: BaseException | None,
        wait: float | None = None,
    ) -> None:
        record = None if error is None else sanitise.to_json(error_records.describe(error))
        final = attempt >= self.max_attempts or isinstance(error, errors.PermanentError)
        if wait is None:
            wait = self.backoff.delay(attempt)
        # Renewed meanwhile, and sent until the answer is known: what is done is not done again.
        await reporter.until_known(
            shared.database.run_async,
            store.callback_end(*names, error=record, retry_in=None if final else wait),
            names[0],
        )
        if error is not None:
            logger.error(
                "Callback failed",
                extra={
                    "action": "callback_failed",
                    "run_id": names[0],
                    "task": names[2],
                    "attempt": attempt,
                    "again": not final,
                    "exception": repr(error),
                },
            )


async def _for_a_while(report: Awaitable[None]) -> None:
    """Wait for an answer that the worker's end must not wait for without end."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(report, _LAST_ANSWER_SECONDS)
