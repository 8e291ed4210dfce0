"""Coalescing: per ledger and process at most one report is on its way; the rest goes with the next.

There is no timer. A reply that is lost is asked for again until the verdict is known.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import random
import time
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from fanout_procrastinate import errors, models, steps, store

logger = logging.getLogger(__name__)

T = TypeVar("T")

_FIRST_PAUSE_SECONDS = 0.05
_LONGEST_PAUSE_SECONDS = 5.0
_REFUSED = json.dumps(
    {
        "type": "OutcomeRefused",
        "class": "permanent",
        "traceback": "",
        "message": "the database refused to store this outcome; see the worker's log",
    }
)


class Suspicion:
    """Who in this process works on a suspect: an item whose worker died before. One at a time.

    A holder is a slot's epoch: a slot's number may be dealt again before its job has ended.
    """

    def __init__(self) -> None:
        self._holder: object | None = None
        self._freed = asyncio.Event()

    def reserve(self, owner: object) -> bool:
        """Reserve the one place; false where it is taken."""
        if self._holder is not None:
            return False
        self._holder = owner
        return True

    def settle(self, owner: object, holder: object | None) -> None:
        """Turn a reservation into a hold, or give it back."""
        if self._holder is owner:
            self._holder = holder
            if holder is None:
                self._free()

    def release(self, holder: object) -> None:
        """Give back the place if this one has it."""
        if self._holder == holder:
            self._holder = None
            self._free()

    async def freed(self, timeout: float) -> None:
        """Wait until the place becomes free, `timeout` seconds at most."""
        try:
            async with asyncio.timeout(timeout):
                await self._freed.wait()
        except TimeoutError:
            pass

    def _free(self) -> None:
        self._freed.set()
        self._freed = asyncio.Event()


@dataclasses.dataclass(frozen=True, slots=True)
class Recorded:
    """Tell of an outcome that the database has recorded.

    Args:
        run_id: the run.
        reply: the hand-out of the item.
        entry: what was reported.
        seconds: from the hand-out to the answer.
    """

    run_id: int
    reply: models.Reply
    entry: models.Entry
    seconds: float


class Watcher(Protocol):
    """Who is told what a process works on; nothing of it may block or raise."""

    async def begin(self, run_id: int) -> None:
        """Hear that a slot of this run is about to begin."""

    def handed(self, run_id: int, reply: models.Reply) -> None:
        """Hear of an item, in the context of the job that works on it."""

    def recorded(self, outcomes: Sequence[Recorded]) -> None:
        """Hear of the outcomes of one report, recorded by the database."""

    def over(self, epoch: int) -> None:
        """Hear that a slot is over."""


@dataclasses.dataclass(eq=False)
class _Sending:
    entry: models.Entry
    reply: asyncio.Future[models.Reply]


class Reporter:
    """Send the outcomes and wishes of this process's slots of one run.

    Args:
        run: runs one call without blocking the loop.
        run_id: the run.
        suspicion: shared by all reporters of the process.
        watcher: told what this process works on; ``None`` = nobody asks.
    """

    def __init__(
        self,
        run: store.RunCall,
        run_id: int,
        suspicion: Suspicion,
        watcher: Watcher | None = None,
    ) -> None:
        self._run = run
        self.run_id = run_id
        self._suspicion = suspicion
        self._waiting: dict[int, list[_Sending]] = {}
        self._senders: dict[int, asyncio.Task[None]] = {}
        self._ledger: int | None = None
        self._stop_sent = False
        self._passing: asyncio.Task[None] | None = None
        self._freed = False
        self._watcher = watcher
        self._in_hand: dict[tuple[int, int | None], tuple[models.Reply, float]] = {}
        self.slots = 0

    async def begin(
        self,
        slot: int,
        job_id: int,
        token: str,
        on_begun: Callable[[models.Reply], None] = lambda reply: None,
    ) -> models.Reply:
        """Bind a job to its slot; asks for the ledger on which this process works already.

        `on_begun` is told the reply in the thread that got it, even while the loop is blocked.
        """
        if self._watcher is not None:
            await self._watcher.begin(self.run_id)
        ledger = random.randrange(16) if self._ledger is None else self._ledger  # noqa: S311
        reservation = object()
        suspect = self._suspicion.reserve(reservation)
        replies: list[models.Reply] = []
        call = store.begin(self.run_id, slot, job_id, token=token, ledger=ledger, suspect=suspect)

        def parse(rows: store.Rows) -> models.Reply:
            reply = call.parse(rows)
            on_begun(reply)
            return reply

        try:
            reply = await self._until_known(dataclasses.replace(call, parse=parse))
            replies.append(reply)
        finally:
            self._settle(reservation, replies)
        self._note(reply)
        if reply.freed:
            self._pass_on()
        return self._handed(reply)

    async def report(self, ledger: int, entry: models.Entry) -> models.Reply:
        """Send one slot's outcome and wish with the next report on this ledger."""
        sending = _Sending(entry, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(ledger, []).append(sending)
        if ledger not in self._senders:
            task = asyncio.create_task(self._send(ledger), name=f"fanout-report-{self.run_id}")
            self._senders[ledger] = task
        reply = await sending.reply
        return reply if entry.keeps() else self._handed(reply)

    def begun(self, reply: models.Reply) -> None:
        """Hear that an item that was kept ready is at work now."""
        self._note(reply)
        self._handed(reply)

    async def close(self) -> None:
        """Wait for the reports on their way."""
        while self._senders:
            await asyncio.wait(set(self._senders.values()))
        await self.passed_on()

    async def passed_on(self) -> None:
        """Wait until what became free is passed on."""
        if self._passing is not None:
            await asyncio.wait({self._passing})

    def _pass_on(self) -> None:
        """Pass on what became free in a limit, in statements of their own; one at a time."""
        self._freed = True
        if self._passing is None or self._passing.done():
            name = f"fanout-pass-on-{self.run_id}"
            self._passing = asyncio.create_task(self._passes_on(), name=name)

    async def _passes_on(self) -> None:
        try:
            while self._freed:
                self._freed = False
                await steps.drive_async(self._run, steps.pass_on(self.run_id))
        except errors.FanoutError as exc:  # a sweep does it then
            logger.warning(
                "Free places were not passed on: %s",
                exc,
                extra={"action": "pass_on_failed", "run_id": self.run_id, "exception": str(exc)},
            )

    async def _send(self, ledger: int) -> None:
        try:
            await asyncio.sleep(0)  # what ends in the same turn of the loop goes along
            while batch := self._waiting.pop(ledger, None):
                await self._send_batch(ledger, batch)
        finally:
            del self._senders[ledger]
            for sending in self._waiting.pop(ledger, ()):
                sending.reply.cancel()

    async def _send_batch(self, ledger: int, batch: Sequence[_Sending]) -> None:
        try:
            replies = await self._replies(ledger, [sending.entry for sending in batch])
        except errors.DatabaseError as exc:
            await self._isolate(ledger, batch, exc)
            return
        except BaseException as exc:
            for sending in batch:
                if not sending.reply.done():
                    if isinstance(exc, Exception):
                        sending.reply.set_exception(exc)
                    else:
                        sending.reply.cancel()
            if isinstance(exc, Exception):
                return
            raise
        # By epoch: a slot may be here twice, once for the holder it was taken from.
        answers = {(reply.slot, reply.epoch): reply for reply in replies}
        for sending in batch:
            if not sending.reply.done():
                entry = sending.entry
                sending.reply.set_result(answers[entry.slot, entry.epoch])

    async def _isolate(
        self, ledger: int, batch: Sequence[_Sending], exc: errors.DatabaseError
    ) -> None:
        """Split a refused report until the culprit stands alone; only that item fails."""
        if len(batch) > 1:
            middle = len(batch) // 2
            await self._send_batch(ledger, batch[:middle])
            await self._send_batch(ledger, batch[middle:])
            return
        (sending,) = batch
        if sending.entry.error == _REFUSED or sending.entry.outcome is None:
            if not sending.reply.done():
                sending.reply.set_exception(exc)
            return
        logger.error(
            "Outcome refused by the database",
            extra={
                "action": "outcome_refused",
                "run_id": self.run_id,
                "position": sending.entry.position,
                "exception": str(exc),
            },
        )
        sending.entry = dataclasses.replace(
            sending.entry, outcome="failed", result=None, error=_REFUSED, sanitised=False
        )
        await self._send_batch(ledger, [sending])

    async def _replies(self, ledger: int, entries: Sequence[models.Entry]) -> list[models.Reply]:
        for entry in entries:
            self._suspicion.release(entry.epoch)
        reservation = object()
        suspect = self._suspicion.reserve(reservation)
        replies: list[models.Reply] = []
        try:
            replies = await self._until_known(
                store.report(self.run_id, ledger, entries, suspect=suspect)
            )
        finally:
            self._settle(reservation, replies)
        if self._watcher is not None:
            self._tell_recorded(self._watcher, entries, replies)
        for reply in replies:
            self._note(reply)
        if any(reply.freed for reply in replies):
            self._pass_on()
        if any(reply.stop for reply in replies) and not self._stop_sent:
            self._stop_sent = True
            await self._until_known(
                store.stop(self.run_id, status="failed", reason=None, abort=False)
            )
        return replies

    def _settle(self, reservation: object, replies: Sequence[models.Reply]) -> None:
        holder = next((reply.epoch for reply in replies if reply.crashes), None)
        self._suspicion.settle(reservation, holder)

    def release_suspect(self, epoch: int) -> None:
        """Give back the place for suspects, if this slot has it."""
        self._suspicion.release(epoch)
        for place in [place for place in self._in_hand if place[0] == epoch]:
            del self._in_hand[place]
        if self._watcher is not None:
            self._watcher.over(epoch)

    def _note(self, reply: models.Reply) -> None:
        if reply.verdict in ("item", "move"):
            self._ledger = reply.ledger
        if reply.verdict == "item" and reply.epoch is not None and self._watcher is not None:
            self._in_hand[reply.epoch, reply.position] = (reply, time.monotonic())

    def _handed(self, reply: models.Reply) -> models.Reply:
        if self._watcher is not None and reply.verdict == "item":
            self._watcher.handed(self.run_id, reply)
        return reply

    def _tell_recorded(
        self,
        watcher: Watcher,
        entries: Sequence[models.Entry],
        replies: Sequence[models.Reply],
    ) -> None:
        now = time.monotonic()
        lost = {reply.epoch for reply in replies if reply.verdict == "lost"}
        recorded = []
        for entry in entries:
            reply, since = self._in_hand.pop((entry.epoch, entry.position), (None, now))
            if reply is None or entry.outcome is None or entry.epoch in lost:
                continue
            recorded.append(Recorded(self.run_id, reply, entry, now - since))
        if recorded:
            watcher.recorded(recorded)

    async def _until_known(self, call: store.Call[T]) -> T:
        return await until_known(self._run, call, self.run_id)


async def until_known(run: store.RunCall, call: store.Call[T], run_id: int) -> T:
    """Run a call that may be sent twice; it is sent again until its answer is known.

    Args:
        run: runs one call without blocking the loop.
        call: about a run.
        run_id: the run.

    Raises:
        DatabaseError: the database refuses it.
    """
    pause = _FIRST_PAUSE_SECONDS
    while True:
        try:
            result: T = await run(call)
            return result
        except errors.DatabaseError as exc:
            if not exc.transient:
                raise
            logger.warning(
                "The database did not answer; asking again",
                extra={
                    "action": "report_resent",
                    "run_id": run_id,
                    "call": call.name,
                    "exception": str(exc),
                },
            )
        await asyncio.sleep(pause * (0.5 + random.random()))  # noqa: S311 - jitter
        pause = min(pause * 2, _LONGEST_PAUSE_SECONDS)
