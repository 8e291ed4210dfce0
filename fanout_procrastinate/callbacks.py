"""Callback jobs: enqueued by the close, retried on their own, ending in a state that shows."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import procrastinate

from fanout_procrastinate import (
    error_records,
    errors,
    execution,
    keeper,
    outcomes,
    run,
    runtime,
    sanitise,
    store,
)

logger = logging.getLogger(__name__)


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
            end = await execution.Execution(self.function).run(closed, timeout=None)
        except asyncio.CancelledError:
            await asyncio.shield(
                self._ended(shared, names, attempt, TimeoutError("its worker stopped"), wait=0.0)
            )
            raise
        finally:
            shared.keeper.remove(hold)
        error = end.error if isinstance(end, execution.Raised) else None
        await self._ended(shared, names, attempt, error)
        if error is not None:
            raise error

    async def _ended(
        self,
        shared: runtime.Runtime,
        names: tuple[int, int, str, int],
        attempt: int,
        error: BaseException | None,
        wait: float | None = None,
    ) -> None:
        record = None if error is None else sanitise.to_json(error_records.describe(error))
        final = attempt >= self.max_attempts or isinstance(error, errors.PermanentError)
        if wait is None:
            wait = self.backoff.delay(attempt)
        await shared.database.run_async(
            store.callback_end(*names, error=record, retry_in=None if final else wait)
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
