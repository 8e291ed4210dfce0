"""Permits: a limit held for a part of an item's work, or by any other code that has the app."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import dataclasses
import logging
import os
import random
import socket
import threading
import time
import uuid
from collections.abc import Callable, Generator, Sequence
from types import TracebackType
from typing import Any, Protocol, Self

from fanout_procrastinate import database, errors, host, hub, limits, models, steps, store

logger = logging.getLogger(__name__)

POLL_SECONDS = 1.0
"""Who waits looks again so often, beside being woken."""

_LINGER_SECONDS = 2.0

held: contextvars.ContextVar[tuple[Permit, ...]] = contextvars.ContextVar(
    "fanout_permits_held", default=()
)
"""What this task or thread, or who started it, has taken."""


class Service(Protocol):
    """What a permit needs of its process."""

    @property
    def lease(self) -> float: ...

    @property
    def poll_seconds(self) -> float: ...

    def run(self, call: store.Call[Any]) -> Any: ...

    async def run_async(self, call: store.Call[Any]) -> Any: ...

    def begin(self, permit: Permit, wake: Callable[[], None]) -> None: ...

    def watch(self, permit: Permit) -> None: ...

    def hold(self, permit: Permit) -> None: ...

    def end(self, permit: Permit) -> None: ...

    def is_lost(self, permit: Permit) -> bool: ...


class Renewable(Protocol):
    """What is renewed: a permit of this process, or of an isolated child's."""

    holder: str
    renewed_at: float

    def tell_lost(self) -> None: ...


@dataclasses.dataclass(frozen=True, slots=True)
class _Wait:
    """Wait so long, or until we are woken."""

    seconds: float
    wakes: bool = True


_Steps = Generator["store.Call[Any] | _Wait", Any, None]


class Permit:
    """Hold one or several limits while a ``with`` or ``async with`` block runs.

    Several are taken together. Who finds no room stands in a line, in the order of coming. The
    permit is renewed by a thread of its own; it dies with this process, after a lease.

    Get it by ``ItemContext.permit`` or ``FanOut.permit``.
    """

    def __init__(
        self,
        service: Service | None,
        wanted: Sequence[limits.Limit],
        *,
        key: str | None = None,
        timeout: float | None = None,
        label: str = "",
        run_id: int | None = None,
        position: int | None = None,
    ) -> None:
        self._service = service
        self.limits = limits.check_permit(wanted, key)
        self._key = key
        self._timeout = _checked_timeout(timeout)
        self._label = label
        self._item = (run_id, position)
        self.holder = ""
        self._state = "new"
        self.told_lost = False
        self.renewed_at = 0.0

    def __repr__(self) -> str:
        return f"<permit of {', '.join(self.names)}: {self._state}>"

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of its limits, ascending."""
        return tuple(limit.name for limit in self.limits)

    @property
    def lost(self) -> bool:
        """Return whether it counts no more: this process was silent for longer than a lease.

        Others may have been let in. What the block does from now on may be one too many.
        """
        if not self.told_lost and self._service is not None and self._state == "held":
            return self._service.is_lost(self)
        return self.told_lost

    def tell_lost(self) -> None:
        """Hear that it is lost."""
        if self.told_lost or self._state != "held":
            return
        self.told_lost = True
        logger.warning(
            "Permit of %s lost: this process was silent for longer than its lease",
            ", ".join(self.names),
            extra={
                "action": "permit_lost",
                "limits": list(self.names),
                "run_id": self._item[0],
                "position": self._item[1],
            },
        )

    # -- in threads

    def __enter__(self) -> Self:
        if host.in_a_loop():
            raise errors.ConfigurationError(
                "an event loop runs in this thread, and waiting would block it; write "
                "`async with` for this permit"
            )
        woken = threading.Event()
        self._begin(woken.set)
        try:
            self._drive(self._taking(), woken)
        except BaseException:
            self._give()
            raise
        self._entered()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._give()

    def _drive(self, taking: _Steps, woken: threading.Event) -> None:
        answer: Any = None
        while True:
            try:
                step = taking.send(answer)
            except StopIteration:
                return
            if isinstance(step, _Wait):
                answer = None
                if step.wakes:
                    woken.wait(step.seconds)
                    woken.clear()
                else:
                    time.sleep(step.seconds)
                continue
            assert self._service is not None  # noqa: S101 - else there are no steps
            try:
                answer = self._service.run(step)
            except errors.DatabaseError as exc:
                answer = exc

    def _give(self) -> None:
        self._end()
        if self._service is None:
            return
        with self._forgiven():
            steps.drive(self._service.run, self._giving())

    # -- on event loops

    async def __aenter__(self) -> Self:
        loop, woken = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(woken.set)

        self._begin(wake)
        try:
            await self._drive_async(self._taking(), woken)
        except BaseException:
            await self._give_async()
            raise
        self._entered()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._give_async()

    async def _drive_async(self, taking: _Steps, woken: asyncio.Event) -> None:
        answer: Any = None
        while True:
            try:
                step = taking.send(answer)
            except StopIteration:
                return
            if isinstance(step, _Wait):
                answer = None
                if step.wakes:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(step.seconds):
                            await woken.wait()
                    woken.clear()
                else:
                    await asyncio.sleep(step.seconds)
                continue
            assert self._service is not None  # noqa: S101 - else there are no steps
            try:
                answer = await _to_its_end(self._service.run_async(step))
            except errors.DatabaseError as exc:
                answer = exc

    async def _give_async(self) -> None:
        self._end()
        if self._service is not None:
            await _to_its_end(self._give_in_task(self._service))

    async def _give_in_task(self, service: Service) -> None:
        with self._forgiven():
            await steps.drive_async(service.run_async, self._giving())

    # -- the same for both

    def _begin(self, wake: Callable[[], None]) -> None:
        if self._state not in ("new", "over"):
            raise errors.ConfigurationError(
                f"this permit of {', '.join(self.names)} is in use; ask for another one"
            )
        _check_order(self.names)
        self._state, self.told_lost = "waiting", False
        self.holder = str(uuid.uuid4())
        if self._service is not None:
            self._service.begin(self, wake)

    def _entered(self) -> None:
        self._state = "held"
        held.set((*(one for one in held.get() if one._state == "held"), self))

    def _end(self) -> None:
        held.set(tuple(one for one in held.get() if one is not self))
        self._state = "over"
        if self._service is not None:
            self._service.end(self)

    def _taking(self) -> _Steps:
        """Ask until it is granted, and wait for the start that is kept."""
        if self._service is None:
            return
        begun = time.monotonic()
        ends = float("inf") if self._timeout is None else begun + self._timeout
        reply = yield from self._asked(ends)
        watched = False
        while not reply.granted:
            if time.monotonic() >= ends:
                raise errors.LimitTimeout(self.names, self._timeout or 0.0, reply.reason)
            if reply.crowds is not None:
                # The items at work end first.
                yield store.pass_on(reply.crowds)
            if watched:
                poll = self._service.poll_seconds
                seconds = min(reply.wait_seconds or poll, poll)
                seconds *= random.uniform(0.95, 1.0)  # noqa: S311 - not all at the same time
                yield _Wait(max(0.0, min(seconds, ends - time.monotonic())))
            else:
                # What was granted before we listened is seen by looking once more.
                self._service.watch(self)
                watched = True
            reply = yield from self._asked(ends)
        starts = time.monotonic() + (reply.wait_seconds or 0.0)
        if starts > ends:
            yield _Wait(max(0.0, ends - time.monotonic()), wakes=False)
            raise errors.LimitTimeout(
                self.names, self._timeout or 0.0, "its start would have been later"
            )
        if reply.wait_seconds:
            yield _Wait(reply.wait_seconds, wakes=False)

    def _asked(self, ends: float) -> Generator[store.Call[Any] | _Wait, Any, models.PermitReply]:
        """Ask once; for a lease at most it is asked again where the database does not answer."""
        assert self._service is not None  # noqa: S101 - else there are no steps
        gives_up = min(ends, time.monotonic() + self._service.lease)
        while True:
            at = time.monotonic()
            answer = yield store.take_permit(
                [limit.spec() for limit in self.limits],
                key=self._key,
                holder=self.holder,
                label=self._label,
                run_id=self._item[0],
                position=self._item[1],
                lease=self._service.lease,
            )
            if not isinstance(answer, errors.DatabaseError):
                break
            if not answer.transient or time.monotonic() >= gives_up:
                raise answer
            yield _Wait(POLL_SECONDS * random.uniform(0.2, 0.5), wakes=False)  # noqa: S311
        reply: models.PermitReply = answer
        if reply.refused is not None:
            raise _out_of_order(self.names, (reply.refused,))
        if reply.granted:
            self.renewed_at = at
            self._service.hold(self)
        return reply

    def _giving(self) -> steps.Steps[None]:
        """Give it back, or the place in the line, and pass on what runs may have use for."""
        runs = yield store.give_permit(self.holder)
        for run_id in runs:
            yield from steps.pass_on(run_id)

    @contextlib.contextmanager
    def _forgiven(self) -> Generator[None, None, None]:
        try:
            yield
        except errors.FanoutError as exc:  # it dies by its lease then
            logger.warning(
                "Permit of %s was not given back; it ends with its lease: %s",
                ", ".join(self.names),
                exc,
                extra={
                    "action": "permit_not_given",
                    "limits": list(self.names),
                    "exception": str(exc),
                },
            )


def _checked_timeout(value: object) -> float | None:
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1e9:
        raise errors.ConfigurationError(
            f"timeout={value!r}: give seconds, a number of 0 or more, or None for no limit"
        )
    return float(value)


async def _to_its_end(work: Any) -> Any:
    """Wait for a statement even when cancelled meanwhile: what it does must be known."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        if not task.cancelled():
            task.exception()
        raise


def _check_order(names: tuple[str, ...]) -> None:
    """Refuse what could wait in a circle with others: names are taken in ascending order."""
    taken = [name for one in held.get() if one._state == "held" for name in one.names]
    later = tuple(name for name in taken if name >= names[0])
    if later:
        raise _out_of_order(names, later)


def _out_of_order(names: tuple[str, ...], later: Sequence[str]) -> errors.ConfigurationError:
    return errors.ConfigurationError(
        f"a permit of {names[0]!r} while {later[-1]!r} is held could wait for ever: limits are "
        f"taken in ascending order of their names. Take them together, permit(a, b), or declare "
        "all of them in limits= of the child"
    )


class Permits:
    """The permits of one process: who is renewed, who waits to be woken.

    Args:
        own: runs calls.
        listening: the process's hub.
        lease: seconds of silence after which a permit is lost.
    """

    def __init__(self, own: database.Database, listening: hub.Hub, *, lease: float) -> None:
        self._database = own
        self.hub = listening
        self._lease = lease
        self.pauses = 0
        """How often a limit was paused from here."""
        self._lock = threading.Lock()
        self._holding: dict[str, Renewable] = {}
        self._wakes: dict[str, Callable[[], None]] = {}
        self._watching: set[str] = set()

    @property
    def lease(self) -> float:
        """Return the seconds of silence after which a permit is lost."""
        return self._lease

    @property
    def poll_seconds(self) -> float:
        """Return how often who waits looks again."""
        return POLL_SECONDS

    def run(self, call: store.Call[Any]) -> Any:
        """Run a call in this thread."""
        return self._database.run(call)

    async def run_async(self, call: store.Call[Any]) -> Any:
        """Run a call without blocking the loop."""
        return await self._database.run_async(call)

    def begin(self, permit: Permit, wake: Callable[[], None]) -> None:
        """Hear that somebody is about to take a permit."""
        with self._lock:
            self._wakes[permit.holder] = wake

    def watch(self, permit: Permit) -> None:
        """Wake whoever waits for this one when it is granted."""
        with self._lock:
            self._watching.add(permit.holder)
            if len(self._watching) == 1:
                self.hub.subscribe(self._heard)

    def hold(self, permit: Renewable) -> None:
        """Renew this permit from now on."""
        with self._lock:
            self._holding[permit.holder] = permit
            self._unwatch(permit)

    def end(self, permit: Renewable) -> None:
        """Hear that a permit, or the wait for it, is over."""
        with self._lock:
            self._holding.pop(permit.holder, None)
            self._wakes.pop(permit.holder, None)
            self._unwatch(permit)

    def is_lost(self, permit: Renewable) -> bool:
        """Return whether a permit that was not told so must be taken for lost."""
        return time.monotonic() - permit.renewed_at > self._lease

    def renew_once(self, run: store.RunCall | None = None) -> None:
        """Renew all permits of this process, and tell those that are lost.

        Raises:
            DatabaseError: the database did not answer.
        """
        with self._lock:
            holding = dict(self._holding)
        if not holding:
            return
        at = time.monotonic()
        lost = set((run or self.run)(store.renew_permits(list(holding))))
        for holder, permit in holding.items():
            if holder not in lost:
                permit.renewed_at = at
            elif holder in self._holding:
                permit.tell_lost()

    def pause(self, limit: limits.Limit, seconds: float) -> None:
        """Let nothing begin with a limit for so long."""
        self.pauses += 1
        self.run(store.pause_limit(limit.spec(), seconds))

    async def pause_async(self, limit: limits.Limit, seconds: float) -> None:
        """Let nothing begin with a limit for so long."""
        self.pauses += 1
        await self.run_async(store.pause_limit(limit.spec(), seconds))

    def _unwatch(self, permit: Renewable) -> None:
        if permit.holder in self._watching:
            self._watching.discard(permit.holder)
            if not self._watching:
                self.hub.unsubscribe(self._heard)

    def _heard(self, event: dict[str, Any]) -> None:
        kind = event.get("event")
        if kind == "listening":
            with self._lock:
                woken = list(self._wakes.values())
        elif kind == "permit":
            with self._lock:
                woken = [self._wakes[one] for one in event["holders"] if one in self._wakes]
        else:
            return
        for wake in woken:
            wake()


class OwnPermits:
    """Permits outside of our jobs: connections and a thread while there are any.

    Args:
        connect: opens a connection of the library's own.
        listening: the process's hub.
        lease: seconds of silence after which a permit is lost.
    """

    def __init__(self, connect: database.Connect, listening: hub.Hub, *, lease: float) -> None:
        self._connect = connect
        self._hub = listening
        self.lease = lease
        self.poll_seconds = POLL_SECONDS
        self._lock = threading.Lock()
        self._permits: Permits | None = None
        self._thread: threading.Thread | None = None
        self._users = 0
        self._closing = False
        self._wake = threading.Event()

    def run(self, call: store.Call[Any]) -> Any:
        """Run a call in this thread."""
        with self._used() as permits:
            return permits.run(call)

    async def run_async(self, call: store.Call[Any]) -> Any:
        """Run a call without blocking the loop."""
        with self._used() as permits:
            return await permits.run_async(call)

    def begin(self, permit: Permit, wake: Callable[[], None]) -> None:
        """Hear that somebody is about to take a permit."""
        self._enter().begin(permit, wake)

    def watch(self, permit: Permit) -> None:
        """Wake whoever waits for this one when it is granted."""
        with self._used() as permits:
            permits.watch(permit)

    def hold(self, permit: Permit) -> None:
        """Renew this permit from now on."""
        with self._used() as permits:
            permits.hold(permit)

    def end(self, permit: Permit) -> None:
        """Hear that a permit, or the wait for it, is over."""
        with self._used() as permits:
            permits.end(permit)
        self._leave()

    def is_lost(self, permit: Permit) -> bool:
        """Return whether a permit that was not told so must be taken for lost."""
        with self._used() as permits:
            return permits.is_lost(permit)

    def close(self) -> None:
        """Close the connections now, or when the last permit is given back."""
        with self._lock:
            self._closing = True
            self._wake.set()
            thread = None if self._users else self._thread
        if thread is not None:
            thread.join(10.0)

    @contextlib.contextmanager
    def _used(self) -> Generator[Permits, None, None]:
        permits = self._enter()
        try:
            yield permits
        finally:
            self._leave()

    def _enter(self) -> Permits:
        with self._lock:
            self._users += 1
            self._closing = False
            if self._permits is None:
                own = database.Database(self._connect)
                self._permits = Permits(own, self._hub, lease=self.lease)
                self._thread = threading.Thread(
                    target=self._loop,
                    args=[self._permits, own],
                    name="fanout-permits",
                    daemon=True,
                )
                self._thread.start()
            return self._permits

    def _leave(self) -> None:
        with self._lock:
            self._users -= 1
            if self._closing:
                self._wake.set()

    def _loop(self, permits: Permits, own: database.Database) -> None:
        used_at = time.monotonic()
        next_renewal = used_at + self.lease / 3
        while True:
            self._wake.wait(min(0.5, self.lease / 6))
            self._wake.clear()
            now = time.monotonic()
            with self._lock:
                if self._users:
                    used_at = now
                elif self._closing or now - used_at > _LINGER_SECONDS:
                    self._permits = self._thread = None
                    break
            if now >= next_renewal:
                renewed = _renewed(permits)
                next_renewal = now + (self.lease / 3 if renewed else min(1.0, self.lease / 3))
        own.close()


def _renewed(permits: Permits) -> bool:
    try:
        permits.renew_once()
    except errors.FanoutError as exc:
        logger.warning(
            "Permits were not renewed: %s",
            exc,
            extra={"action": "renewal_failed", "exception": str(exc)},
        )
        return False
    except Exception:
        logger.exception("Unexpected error", extra={"action": "renewal_failed"})
        return False
    return True


@dataclasses.dataclass(eq=False)
class _Remote:
    """A permit of an isolated child, as its worker renews it."""

    holder: str
    renewed_at: float
    told_lost: bool = False

    def tell_lost(self) -> None:
        self.told_lost = True


class Apart:
    """The permits of one isolated item: its process asks, the worker renews and gives back.

    Args:
        permits: of the worker.
        run_id: the run.
        position: of the item.
    """

    _QUESTIONS = ("take_permit", "give_permit", "pass_on", "pause_limit")

    def __init__(self, permits: Permits, run_id: int, position: int) -> None:
        self._permits = permits
        self._item = {"run_id": run_id, "position": position}
        self._holding: dict[str, _Remote] = {}

    def is_lost(self, holder: str) -> bool:
        """Return whether a permit is held no more."""
        mine = self._holding.get(holder)
        return mine is None or mine.told_lost or self._permits.is_lost(mine)

    async def ask(self, name: str, params: dict[str, Any]) -> list[dict[str, Any]]:
        """Answer a statement's rows.

        Raises:
            DatabaseError: the database did not answer.
        """
        if name not in self._QUESTIONS:
            raise errors.ConfigurationError(f"an isolated child cannot ask for {name}")
        at = time.monotonic()
        if name == "take_permit":
            params = params | self._item | {"lease": self._permits.lease}
        call: store.Call[list[dict[str, Any]]] = store.Call(
            name, params, lambda rows: [dict(row) for row in rows]
        )
        holder = params.get("holder", "")
        if name == "give_permit":
            self._forget(holder)
        rows = await _to_its_end(self._permits.run_async(call))
        if name == "take_permit" and rows[0]["granted"]:
            mine = self._holding[holder] = _Remote(holder, at)
            self._permits.hold(mine)
        return list(rows)

    async def over(self) -> None:
        """Give back what the process has left."""
        for holder in list(self._holding):
            self._forget(holder)
            try:
                await self._permits.run_async(store.give_permit(holder))
            except errors.FanoutError as exc:  # it dies by its lease then
                logger.warning(
                    "Permit was not given back; it ends with its lease: %s",
                    exc,
                    extra={"action": "permit_not_given", "exception": str(exc)},
                )

    def _forget(self, holder: str) -> None:
        mine = self._holding.pop(holder, None)
        if mine is not None:
            self._permits.end(mine)


@dataclasses.dataclass(slots=True)
class Here:
    """What runs here: the process's permits, and the item that a job works on."""

    permits: Permits
    run_id: int | None = None
    position: int | None = None


here: contextvars.ContextVar[Here | None] = contextvars.ContextVar("fanout_here", default=None)
"""Where the code of a child finds its process's permits."""


def of_job() -> Permits | None:
    """Return the permits of the process whose job runs here."""
    found = here.get()
    return None if found is None else found.permits


def note_item(run_id: int, position: int | None) -> None:
    """Note the item that the job that runs here works on."""
    found = here.get()
    if found is not None:
        found.run_id, found.position = run_id, position


def program() -> str:
    """Return who we are, for people: the machine and the process."""
    return f"{socket.gethostname()}:{os.getpid()}"
