"""The child job: one slot, one item at a time, until there is none or somebody else's turn."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import dataclasses
import logging
import time
import uuid
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import procrastinate

from fanout_procrastinate import (
    codec,
    context,
    error_records,
    errors,
    execution,
    isolation,
    keeper,
    models,
    outcomes,
    reporter,
    runtime,
    sanitise,
    settings,
    store,
)

logger = logging.getLogger(__name__)

_RENEWAL_GRACE_SECONDS = 10.0
_LAST_ANSWER_SECONDS = 30.0
# Only behind items that take no longer than that one more is kept ready, and that long at most.
_QUICK_SECONDS = 0.25
_KEPT_SECONDS = 0.3

worker_of_job: contextvars.ContextVar[Any] = contextvars.ContextVar("fanout_worker", default=None)
"""The host's worker, as a task middleware sees it: it alone tells of its shutdown."""


async def note_worker(call_next: Callable[[], Any], job: Any, worker: Any) -> Any:
    """Remember the worker while one of our jobs runs; a task middleware of the host's."""
    worker_of_job.set(worker)
    return await call_next()


def worker_stops() -> bool:
    """Return whether the worker that runs this job was asked to stop."""
    event = getattr(worker_of_job.get(), "_stop_event", None)
    return event is not None and bool(event.is_set())


@dataclasses.dataclass(eq=False, kw_only=True)
class Work:
    """How to work on one item of a child: everything but the slot.

    Args:
        function: the user's function.
        options: as declared.
        items: reads payloads.
        results: writes results.
        max_result_bytes: the most that a result may have, as bytes of UTF-8 JSON.
        address: where a process of its own finds the child; `None` = it runs in this one.
        fault: why its annotations cannot be used: then every item fails with that reason.
    """

    function: Callable[..., Any]
    options: settings.ChildOptions
    items: codec.Codec
    results: codec.Codec
    max_result_bytes: int
    address: isolation.Address | None = None
    fault: errors.ConfigurationError | None = None

    def load(self, payload: str) -> Any:
        """Return a stored item as the function takes it.

        Raises:
            PermanentError: it no longer fits.
        """
        try:
            return self.items.load(payload)
        except errors.InvalidValue as exc:
            raise errors.PermanentError(f"its stored item {exc}") from exc

    def outcome_of(
        self, end: execution.Returned | execution.Raised, attempt: int
    ) -> dict[str, Any]:
        """Return an end of the function as the columns of a report."""
        if isinstance(end, execution.Raised):
            return self.failure(end.error, attempt)
        try:
            encoded = self.results.dump_result(end.value)
            if encoded.size > self.max_result_bytes:
                raise errors.ResultTooLarge(encoded.size, self.max_result_bytes)
        except BaseException as exc:  # noqa: BLE001 - serialisers may be the user's code
            return self.failure(exc, attempt)
        return {"outcome": "succeeded", "result": encoded.text, "sanitised": encoded.cleaned}

    def failure(self, error: BaseException, attempt: int) -> dict[str, Any]:
        """Class an error: failed for good, or released to be tried again."""
        options = self.options
        verdict = outcomes.classify(error, permanent=options.permanent, transient=options.transient)
        record = error_records.describe(error, classification=verdict)
        columns = {"error": sanitise.to_json(record), "sanitised": record["cleaned"]}
        if verdict.permanent or attempt >= options.max_attempts:
            return columns | {"outcome": "failed"}
        wait = options.backoff.delay(attempt) if verdict.retry_in is None else verdict.retry_in
        return columns | {"outcome": "released", "retry_in": wait}


@dataclasses.dataclass(eq=False, kw_only=True)
class Slot:
    """One execution of a child job."""

    work: Work
    runtime: runtime.Runtime
    reporter: reporter.Reporter
    job_id: int
    slot: int
    time_slice: float
    run_args: Mapping[str, Any]
    hold: keeper.Hold | None = None
    epoch: int = 0
    lost: bool = False
    cancelled: bool = False
    over: bool = False
    current: execution.Execution | isolation.Execution | None = None
    item: context.ItemContext | None = None
    slice_ends: float = 0.0
    quick: float | None = None
    told_end: bool = False

    async def serve(self) -> None:
        """Work on items until the slot is over."""
        loop = asyncio.get_running_loop()

        def begun(reply: models.Reply) -> None:
            # Renewed from the moment it is ours: the loop may be blocked when the answer comes.
            if reply.epoch is not None and reply.verdict not in ("ended", "lost"):
                holding = models.Holding(self.reporter.run_id, self.slot, reply.epoch)
                self.hold = keeper.Hold(holding=holding, on_verdict=self._told_by(loop))
                self.runtime.keeper.add(self.hold)
                if self.over:
                    self.runtime.keeper.remove(self.hold)

        try:
            token = str(uuid.uuid4())
            reply = await self._asked(self.reporter.begin(self.slot, self.job_id, token, begun))
            if reply.epoch is None:
                return
            self.epoch = reply.epoch
            self.slice_ends = time.monotonic() + self.time_slice
            while reply.verdict not in ("ended", "lost"):
                reply = await (self._ahead(reply) if self._may_keep(reply) else self._turn(reply))
            if reply.verdict == "lost":
                self._log_lost()
        finally:
            self.over = True
            if self.hold is not None:
                self.runtime.keeper.remove(self.hold)
            self.reporter.release_suspect(self.epoch)
        if self.current is not None and not (self.cancelled and worker_stops()):
            # Until its thread has ended, the worker's place is taken.
            await self.current.leftover()
        if self.cancelled:
            raise asyncio.CancelledError

    async def _turn(self, reply: models.Reply) -> models.Reply:
        if reply.verdict == "item":
            return await self._item_turn(reply)
        if reply.verdict == "wait" and not self._ending():
            try:
                await self.runtime.suspicion.freed(reply.wait_seconds or 0.05)
            except asyncio.CancelledError:
                self.cancelled = True
        return await self._report(reply.ledger, {})

    def _may_keep(self, reply: models.Reply) -> bool:
        """Whether to keep the next item ready while working on this one."""
        quick = self.quick is not None and self.quick < _QUICK_SECONDS
        return reply.verdict == "item" and reply.ahead and quick and not reply.crashes

    async def _ahead(self, reply: models.Reply) -> models.Reply:
        """Work on items with the next one ready, so that a limit is not kept waiting for reports.

        The report of an item is on its way while the next one is at work.
        """
        question = self._report(reply.ledger, {"wish": "ahead"})
        while True:
            ended = asyncio.Event()
            pauses = self.runtime.permits.pauses
            keeping = asyncio.create_task(self._keep(question, ended), name="fanout-ahead")
            columns = await self._worked_or_not(reply)
            ended.set()
            try:
                ready = await self._settled(keeping)
                if ready.verdict == "item" and self.runtime.permits.pauses != pauses:
                    ready = await self._give_back(ready)
            except errors.DatabaseError as exc:
                # Nothing is known to be ready; the outcome is reported all the same.
                extra = {"run_id": self.reporter.run_id, "exception": str(exc)}
                logger.warning(
                    "No item kept ready: %s", exc, extra={"action": "ahead_failed", **extra}
                )
                ready = dataclasses.replace(reply, verdict="last")
            if self.lost or ready.verdict == "lost":
                return dataclasses.replace(reply, verdict="lost")
            columns |= {"position": reply.position, "claim": reply.claim}
            if ready.verdict != "item":
                return await self._report(reply.ledger, columns)
            question = self._report(reply.ledger, columns | {"ahead": ready.position})
            if self._ending():
                answer = await question
                if answer.verdict != "last":  # `end` asks for nothing more to keep
                    return dataclasses.replace(answer, verdict="lost")
                gone = {"outcome": "returned", "position": ready.position, "claim": ready.claim}
                return await self._report(ready.ledger, gone)
            self.reporter.begun(ready)
            reply = ready

    async def _keep(
        self, question: Coroutine[Any, Any, models.Reply], ended: asyncio.Event
    ) -> models.Reply:
        """Ask for an item to keep ready; it is given back if the one in hand takes too long."""
        ready = await question
        if ready.verdict != "item" or ready.position is None or self.hold is None:
            return ready
        try:
            async with asyncio.timeout(_KEPT_SECONDS):
                await ended.wait()
        except TimeoutError:
            return await self._give_back(ready)
        return ready

    async def _give_back(self, ready: models.Reply) -> models.Reply:
        """Give back what is ready, at no charge."""
        assert self.hold is not None and self.hold.holding is not None  # noqa: S101 - a slot's
        call = store.give_back(self.hold.holding, ready.position or 0)
        run = self.runtime.database.run_async
        await reporter.until_known(run, call, self.reporter.run_id)
        return dataclasses.replace(ready, verdict="last")

    async def _settled(self, task: asyncio.Task[models.Reply]) -> models.Reply:
        """Wait for an answer even when cancelled meanwhile, but then not for ever."""
        while not task.done() and not self.cancelled:
            try:
                await asyncio.wait({task})
            except asyncio.CancelledError:
                self.cancelled = True
        if not task.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait({task}, timeout=_LAST_ANSWER_SECONDS)
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=1.0)
            raise asyncio.CancelledError
        return task.result()

    async def _worked_or_not(self, reply: models.Reply) -> dict[str, Any]:
        """Return the columns of an item's outcome."""
        # The worker is shutting down, or somebody aborted the job: given back at no charge.
        columns: dict[str, Any] = {"outcome": "returned"}
        if not self.cancelled:
            begun = time.monotonic()
            try:
                columns = await self._worked(reply)
            except asyncio.CancelledError:
                self.cancelled = True
                if isinstance(self.current, execution.Execution) and self.current.ended:
                    # It was done in the same turn of the loop.
                    columns = self.work.outcome_of(self.current.ended, (reply.failures or 0) + 1)
            except execution.Stopped:
                pass
            self.quick = time.monotonic() - begun
        return columns

    async def _item_turn(self, reply: models.Reply) -> models.Reply:
        columns = await self._worked_or_not(reply)
        if self.lost:
            return dataclasses.replace(reply, verdict="lost")
        return await self._report(
            reply.ledger, columns | {"position": reply.position, "claim": reply.claim}
        )

    async def _worked(self, reply: models.Reply) -> dict[str, Any]:
        work, options = self.work, self.work.options
        attempt = (reply.failures or 0) + 1
        if work.fault is not None:
            return work.failure(work.fault, attempt)
        if work.address is not None:
            return await self._worked_apart(work.address, reply, attempt)
        try:
            args = [work.load(reply.payload or "null")]
        except errors.PermanentError as exc:
            return work.failure(exc, attempt)
        if options.pass_context:
            self.item = self._context(reply, attempt)
            args.insert(0, self.item)
        self.current = execution.Execution(work.function, self.runtime.threads)
        assert self.hold is not None  # noqa: S101 - set by serve
        if options.timeout is not None:
            self.hold.renew_until = time.monotonic() + options.timeout + _RENEWAL_GRACE_SECONDS
        end = await self.current.run(*args, timeout=options.timeout)
        self.hold.renew_until = None
        return work.outcome_of(end, attempt)

    async def _worked_apart(
        self, address: isolation.Address, reply: models.Reply, attempt: int
    ) -> dict[str, Any]:
        """Have a process of its own do it, from the payload to the columns."""
        work, options = self.work, self.work.options
        item = self.item = self._context(reply, attempt)
        facts = ("run_id", "position", "key", "run_args")
        self.current = isolation.Execution(
            pool=self.runtime.processes,
            context=item,
            request={
                "address": dataclasses.asdict(address),
                "payload": reply.payload or "null",
                "attempt": attempt,
                "context": {name: getattr(item, name) for name in facts},
                "max_result_bytes": work.max_result_bytes,
                "max_attempts": options.max_attempts,
                "backoff": dataclasses.asdict(options.backoff),
            },
        )
        # Renewed without an end: a process past its limit does not go on.
        end = await self.current.run(timeout=options.timeout)
        return work.failure(end.error, attempt) if isinstance(end, execution.Raised) else end

    def _context(self, reply: models.Reply, attempt: int) -> context.ItemContext:
        assert self.hold is not None and reply.position is not None  # noqa: S101
        return context.ItemContext(
            run_id=self.reporter.run_id,
            position=reply.position,
            key=reply.item_key,
            attempt=attempt,
            run_args=self.run_args,
            _database=self.runtime.database,
            _holding=self.hold.holding,
            _claim=reply.claim or 0,
        )

    async def _report(self, ledger: int, columns: dict[str, Any]) -> models.Reply:
        wish = {"wish": self._wish()}
        entry = models.Entry(slot=self.slot, epoch=self.epoch, **wish | columns)
        reply = await self._asked(self.reporter.report(ledger, entry))
        if reply.verdict == "item" and time.monotonic() >= self.slice_ends:
            self.slice_ends = time.monotonic() + self.time_slice
        return reply

    async def _asked(self, question: Coroutine[Any, Any, models.Reply]) -> models.Reply:
        """Wait for an answer even when cancelled meanwhile: what it hands out is given back."""
        task = asyncio.create_task(question, name="fanout-ask")
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            self.cancelled = True
            await asyncio.wait({task}, timeout=_LAST_ANSWER_SECONDS)
            if not task.done() or task.cancelled():
                task.cancel()
                raise
            return task.result()

    def _wish(self) -> str:
        if self._ending():
            return "end"
        return "slice" if time.monotonic() >= self.slice_ends else "next"

    def _ending(self) -> bool:
        thread_stuck = self.current is not None and self.current.thread_stuck()
        return self.cancelled or self.told_end or thread_stuck or worker_stops()

    def _told_by(self, loop: asyncio.AbstractEventLoop) -> Callable[[str], None]:
        def told(verdict: str) -> None:
            # From the keeper's thread: a blocked loop must not hide it from the child.
            if self.item is not None:
                self.item._told(verdict)
            # Its run is being stopped: no other item is begun, not even one that is ready.
            self.told_end = True
            if verdict in ("lost", "abort"):
                self.lost = self.lost or verdict == "lost"
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    loop.call_soon_threadsafe(self._give_up)

        return told

    def _give_up(self) -> None:
        if self.current is not None:
            self.current.give_up()

    def _log_lost(self) -> None:
        logger.warning(
            "Slot lost: another worker took over its item; nothing was recorded",
            extra={
                "action": "slot_lost",
                "run_id": self.reporter.run_id,
                "slot": self.slot,
                "job_id": self.job_id,
            },
        )


async def run_job(
    work: Work, shared: runtime.Runtime, job: procrastinate.JobContext, run_id: int, slot: int
) -> None:
    """Execute one child job."""
    assert job.job.id is not None  # noqa: S101 - a job that runs has an id
    with shared.reporter(run_id) as mine:
        run_args: Mapping[str, Any] = {}
        if work.options.pass_context:
            facts = await shared.database.run_async(store.run(run_id))
            run_args = facts.args if facts else {}
        await Slot(
            work=work,
            runtime=shared,
            reporter=mine,
            job_id=job.job.id,
            slot=slot,
            time_slice=shared.settings.time_slice,
            run_args=run_args,
        ).serve()
        await mine.passed_on()
