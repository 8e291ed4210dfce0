"""Running user code: in its own task or thread, within a time limit, whatever it raises."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import inspect
import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import asgiref.sync

from fanout_procrastinate import telemetry

logger = logging.getLogger(__name__)

_GRACE_SECONDS = 5.0


@dataclasses.dataclass(frozen=True, slots=True)
class Returned:
    """The function returned this."""

    value: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Raised:
    """The function raised this, be it an `Exception` or not."""

    error: BaseException


class Stopped(Exception):
    """We were told to give the item up; its code was cancelled."""


@dataclasses.dataclass(eq=False)
class Execution:
    """One call of a user's function.

    Args:
        function: sync or async.
        threads: where a sync function runs.
    """

    function: Callable[..., Any]
    threads: concurrent.futures.ThreadPoolExecutor | None = None
    _task: asyncio.Task[Returned | Raised] | None = None
    _thread_done: asyncio.Event | None = None
    _told: asyncio.Future[None] | None = None
    ended: Returned | Raised | None = None
    """How the function had ended already when the caller of `run` was cancelled."""

    async def run(self, *args: Any, timeout: float | None, **kwargs: Any) -> Returned | Raised:
        """Call the function and wait for its end, `timeout` seconds at most.

        Past the limit an async function is cancelled; a thread cannot be, and goes on: see
        `leftover`.

        Raises:
            Stopped: `give_up` was called.
            CancelledError: the caller was cancelled; the function's task was, too.
        """
        if inspect.iscoroutinefunction(self.function):
            code = _guarded_async(self.function, args, kwargs)
        else:
            code = self._in_thread(args, kwargs)
        with telemetry.working():
            self._task = asyncio.create_task(code, name="fanout-item")
        self._told = asyncio.get_running_loop().create_future()
        ends: set[asyncio.Future[Any]] = {self._task, self._told}
        try:
            await asyncio.wait(ends, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            if self._task.done():
                self.ended = _outcome(self._task)
            await self._cancel()
            raise
        if self._told.done():
            await self._cancel()
            raise Stopped
        if self._task.done():
            return _outcome(self._task)
        await self._cancel()
        return Raised(TimeoutError(f"its time limit of {timeout:g} s passed"))

    def give_up(self) -> None:
        """Cancel the function; from the event loop only."""
        if self._task is None or self._told is None or self._task.done():
            return
        self._task.cancel()
        if not self._told.done():
            self._told.set_result(None)

    def thread_stuck(self) -> bool:
        """Return whether a thread of this call still runs."""
        return self._thread_done is not None and not self._thread_done.is_set()

    async def leftover(self) -> None:
        """Wait for a thread that outlived its limit: until then the worker's place is taken."""
        if self._thread_done is not None:
            await self._thread_done.wait()

    async def _cancel(self) -> None:
        assert self._task is not None  # noqa: S101 - set by run
        if self._task.done():
            return
        self._task.cancel()
        await asyncio.wait({self._task}, timeout=_GRACE_SECONDS)
        if not self._task.done():
            logger.warning("A cancelled child goes on", extra={"action": "cancel_ignored"})

    async def _in_thread(self, args: Any, kwargs: Any) -> Returned | Raised:
        loop = asyncio.get_running_loop()
        done = self._thread_done = asyncio.Event()
        beginning = threading.Lock()  # taken by the thread that begins, or by who gives up before

        def guarded() -> Returned | Raised:
            if not beginning.acquire(blocking=False):
                return Raised(asyncio.CancelledError("it never began"))
            try:
                return _guarded(self.function, args, kwargs)
            finally:
                _tell(loop, done)

        call = asgiref.sync.sync_to_async(guarded, thread_sensitive=False, executor=self.threads)
        try:
            result: Returned | Raised = await call()
        except asyncio.CancelledError:
            if beginning.acquire(blocking=False):
                done.set()  # it waited behind others, and will not begin any more
            raise
        except BaseException as exc:  # noqa: BLE001 - e.g. the pool was shut down
            done.set()
            return Raised(exc)
        if isinstance(result, Returned) and _is_awaitable(result.value):
            return await _awaited(result.value)  # async after all: an object, a wrapper
        return result


def _is_awaitable(value: Any) -> bool:
    try:
        return inspect.isawaitable(value)
    except BaseException:  # noqa: BLE001 - it asks the value's own code for its class
        return False


def _tell(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
        loop.call_soon_threadsafe(event.set)


def _guarded(function: Callable[..., Any], args: Any, kwargs: Any) -> Returned | Raised:
    try:
        return Returned(function(*args, **kwargs))
    except BaseException as exc:  # noqa: BLE001 - SystemExit of user code must not end the worker
        return Raised(exc)


async def _guarded_async(
    function: Callable[..., Coroutine[Any, Any, Any]], args: Any, kwargs: Any
) -> Returned | Raised:
    try:
        return Returned(await function(*args, **kwargs))
    except BaseException as exc:  # noqa: BLE001 - SystemExit of user code must not end the worker
        return Raised(exc)


async def _awaited(value: Awaitable[Any]) -> Returned | Raised:
    try:
        return Returned(await value)
    except BaseException as exc:  # noqa: BLE001 - SystemExit of user code must not end the worker
        return Raised(exc)


def _outcome(task: asyncio.Task[Returned | Raised]) -> Returned | Raised:
    if task.cancelled():
        return Raised(asyncio.CancelledError("the child cancelled itself"))
    return task.result()
