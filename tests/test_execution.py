"""Running user code: whatever it does, there is an end that can be recorded."""

import asyncio
import concurrent.futures
import contextlib
import contextvars
import functools
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import asgiref.sync
import pytest

from fanout_procrastinate import execution
from fanout_procrastinate.execution import Execution, Raised, Returned, Stopped
from tests.waiting import wait_until, wait_until_async


@pytest.fixture
def threads() -> Iterator[concurrent.futures.ThreadPoolExecutor]:
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        yield pool


class Odd(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


EVERYTHING = [
    ValueError("x"),
    Odd(),
    SystemExit(3),
    KeyboardInterrupt(),
    GeneratorExit(),
    asyncio.CancelledError("of its own"),
    TimeoutError("of its own"),
    BaseExceptionGroup("g", [ValueError("x"), KeyboardInterrupt()]),
    ExceptionGroup("g", [ValueError("x")]),
]


@pytest.mark.parametrize("error", EVERYTHING, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_whatever_is_raised_is_an_end(
    threads: concurrent.futures.ThreadPoolExecutor, error: BaseException, kind: str
) -> None:
    def raising() -> None:
        raise error

    async def raising_async() -> None:
        await asyncio.sleep(0)
        raise error

    call = Execution(raising if kind == "sync" else raising_async, threads)
    assert await call.run(timeout=5) == Raised(error)


async def test_stop_iteration(threads: concurrent.futures.ThreadPoolExecutor) -> None:
    def raising() -> None:
        next(iter([]))

    async def raising_async() -> None:
        next(iter([]))

    end = await Execution(raising, threads).run(timeout=5)
    assert isinstance(end, Raised) and isinstance(end.error, StopIteration)
    end = await Execution(raising_async).run(timeout=5)
    assert isinstance(end, Raised) and isinstance(end.error, RuntimeError)


class Called:
    async def __call__(self, x: int) -> int:
        await asyncio.sleep(0)
        return x


async def echo(x: int, *, more: int = 0) -> int:
    await asyncio.sleep(0)
    return x + more


def disguised(x: int) -> Any:
    return echo(x)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x,
        echo,
        functools.partial(echo, more=0),
        # Whether these are async shows only once they were called.
        Called(),
        functools.wraps(echo)(lambda *args: echo(*args)),  # noqa: PLW0108 - no coroutine function
    ],
    ids=["sync", "async", "partial", "object", "returns a coroutine"],
)
async def test_functions_of_every_shape(
    threads: concurrent.futures.ThreadPoolExecutor, function: Callable[[int], Any]
) -> None:
    assert await Execution(function, threads).run(7, timeout=5) == Returned(7)


async def test_limit_of_an_async_function() -> None:
    ended: list[str] = []

    async def slow() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("cancelled")

    call = Execution(slow)
    end = await call.run(timeout=0.01)
    assert isinstance(end, Raised) and isinstance(end.error, TimeoutError)
    assert str(end.error) == "its time limit of 0.01 s passed"
    assert ended == ["cancelled"] and not call.thread_stuck()


async def test_function_that_ignores_its_cancellation(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(execution, "_GRACE_SECONDS", 0.02)
    let_go = asyncio.Event()

    async def stubborn() -> None:
        while not let_go.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await let_go.wait()

    end = await Execution(stubborn).run(timeout=0.01)
    assert isinstance(end, Raised) and isinstance(end.error, TimeoutError)
    assert [record.message for record in caplog.records] == ["A cancelled child goes on"]
    let_go.set()
    await wait_until_async(lambda: len(asyncio.all_tasks()) == 1)


async def test_result_that_comes_with_the_cancellation_is_late() -> None:
    async def slow() -> str:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return "late"
        return "never"

    end = await Execution(slow).run(timeout=0.01)
    assert isinstance(end, Raised) and isinstance(end.error, TimeoutError)


async def test_thread_past_its_limit_goes_on(
    threads: concurrent.futures.ThreadPoolExecutor,
) -> None:
    let_go = threading.Event()
    call = Execution(let_go.wait, threads)
    end = await call.run(10, timeout=0.02)
    assert isinstance(end, Raised) and isinstance(end.error, TimeoutError)
    assert call.thread_stuck()
    left = asyncio.create_task(call.leftover())
    await asyncio.sleep(0)
    assert not left.done()
    let_go.set()
    await left
    assert not call.thread_stuck()


async def test_result_that_came_before_the_cancellation_is_kept() -> None:
    """Both in one turn of the loop: the caller is cancelled, and can still record what is done."""

    async def function() -> int:
        return 5

    call = Execution(function)
    running = asyncio.create_task(call.run(timeout=None))
    await asyncio.sleep(0)  # it begins, and
    await asyncio.sleep(0)  # ends
    assert call._task is not None and call._task.done()
    assert not running.done()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert call.ended == Returned(5)


@pytest.mark.parametrize("end", ["limit", "given up", "cancelled", "shut down"])
async def test_call_that_never_began_leaves_nothing(end: str) -> None:
    """It waited behind a thread that is stuck: nobody may wait for it."""
    let_go, called = threading.Event(), []
    pool = concurrent.futures.ThreadPoolExecutor(1)
    ahead = asyncio.create_task(Execution(let_go.wait, pool).run(10, timeout=None))
    await wait_until_async(lambda: pool._work_queue.empty() and pool._threads)
    call = Execution(lambda: called.append(1), pool)
    running = asyncio.create_task(call.run(timeout=0.02 if end == "limit" else None))
    await wait_until_async(lambda: not pool._work_queue.empty())
    if end == "given up":
        call.give_up()
    elif end == "cancelled":
        running.cancel()
    elif end == "shut down":
        pool.shutdown(wait=False, cancel_futures=True)
    (ended,) = await asyncio.gather(running, return_exceptions=True)
    expected: dict[str, type[BaseException]] = {
        "limit": TimeoutError,
        "given up": Stopped,
        "cancelled": asyncio.CancelledError,
        "shut down": asyncio.CancelledError,
    }
    assert isinstance(getattr(ended, "error", ended), expected[end])
    assert not call.thread_stuck()
    async with asyncio.timeout(1):
        await call.leftover()
    let_go.set()
    await ahead
    pool.shutdown()
    assert called == []


async def test_nothing_is_left_of_a_call_that_ended(
    threads: concurrent.futures.ThreadPoolExecutor,
) -> None:
    for function in (lambda: None, functools.partial(echo, 1)):
        call = Execution(function, threads)
        assert not call.thread_stuck()
        await call.run(timeout=5)
        assert not call.thread_stuck()
        await call.leftover()
        call.give_up()  # too late: no effect


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_giving_up(threads: concurrent.futures.ThreadPoolExecutor, kind: str) -> None:
    let_go, begun = threading.Event(), threading.Event()

    def slow() -> None:
        begun.set()
        let_go.wait(10)

    async def slow_async() -> None:
        begun.set()
        await asyncio.Event().wait()

    call = Execution(slow if kind == "sync" else slow_async, threads)
    call.give_up()  # nothing to give up yet
    running = asyncio.create_task(call.run(timeout=None))
    await wait_until_async(begun.is_set)
    call.give_up()
    with pytest.raises(Stopped):
        await running
    let_go.set()
    await call.leftover()


async def test_giving_up_what_refuses_to_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(execution, "_GRACE_SECONDS", 0.02)
    begun, let_go = asyncio.Event(), asyncio.Event()

    async def stubborn() -> str:
        begun.set()
        while not let_go.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await let_go.wait()
        return "after all"

    call = Execution(stubborn)
    running = asyncio.create_task(call.run(timeout=30))
    await begun.wait()
    call.give_up()
    # Its verdict stands: the place is given back although the code goes on.
    with pytest.raises(Stopped):
        async with asyncio.timeout(5):
            await running
    assert [record.message for record in caplog.records] == ["A cancelled child goes on"]
    let_go.set()
    await wait_until_async(lambda: len(asyncio.all_tasks()) == 1)


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_cancelled_caller(threads: concurrent.futures.ThreadPoolExecutor, kind: str) -> None:
    let_go, begun, ended = threading.Event(), threading.Event(), threading.Event()

    def slow() -> None:
        begun.set()
        let_go.wait(10)

    async def slow_async() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    call = Execution(slow if kind == "sync" else slow_async, threads)
    running = asyncio.create_task(call.run(timeout=None))
    await wait_until_async(begun.is_set)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert call.thread_stuck() is (kind == "sync") and ended.is_set() is (kind == "async")
    let_go.set()
    await call.leftover()


async def test_thread_may_call_back_into_the_loop(
    threads: concurrent.futures.ThreadPoolExecutor,
) -> None:
    """The host's sync `defer()` does: it hangs in a bare executor."""

    def child() -> int:
        return asgiref.sync.async_to_sync(echo)(7)

    assert await Execution(child, threads).run(timeout=5) == Returned(7)


async def test_context_variables_are_seen_and_kept_apart(
    threads: concurrent.futures.ThreadPoolExecutor,
) -> None:
    variable = contextvars.ContextVar("variable", default="outside")
    variable.set("given")

    def child() -> str:
        seen = variable.get()
        variable.set("changed")
        return seen

    async def async_child() -> str:
        return child()

    assert await Execution(async_child).run(timeout=5) == Returned("given")
    assert variable.get() == "given"
    assert await Execution(child, threads).run(timeout=5) == Returned("given")


async def test_threads_that_are_gone() -> None:
    pool = concurrent.futures.ThreadPoolExecutor(1)
    pool.shutdown()
    call = Execution(lambda: None, pool)
    end = await call.run(timeout=5)
    assert isinstance(end, Raised) and isinstance(end.error, RuntimeError)
    assert not call.thread_stuck()


def test_thread_that_outlives_its_loop(caplog: pytest.LogCaptureFixture) -> None:
    let_go, ended = threading.Event(), threading.Event()
    pool = concurrent.futures.ThreadPoolExecutor(1)

    def slow() -> None:
        let_go.wait(10)
        ended.set()

    async def program() -> None:
        await Execution(slow, pool).run(timeout=0.01)

    asyncio.run(program())
    let_go.set()
    wait_until(ended.is_set)
    pool.shutdown()
    assert [r for r in caplog.records if r.levelno >= logging.ERROR] == []
