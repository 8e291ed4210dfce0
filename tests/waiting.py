"""Waiting for a condition: the only place where tests sleep."""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")

INTERVAL = 0.01


def wait_until(condition: Callable[[], T], timeout: float = 10.0, message: str = "") -> T:
    """Call `condition` until it returns something true, and return that.

    Raises `AssertionError` with the last value after `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise _given_up(condition, timeout, message, value)
        time.sleep(INTERVAL)
    return value


async def wait_until_async(
    condition: Callable[[], Awaitable[T]] | Callable[[], T],
    timeout: float = 10.0,
    message: str = "",
) -> T:
    """Do the same for a sync or async `condition`, and let the loop run meanwhile."""
    deadline = time.monotonic() + timeout
    while True:
        value = condition()
        if inspect.isawaitable(value):
            value = await value
        if value:
            return value
        if time.monotonic() > deadline:
            raise _given_up(condition, timeout, message, value)
        await asyncio.sleep(INTERVAL)


def _given_up(
    condition: Callable[[], object], timeout: float, message: str, value: object
) -> AssertionError:
    what = message or getattr(condition, "__qualname__", repr(condition))
    return AssertionError(f"not within {timeout} s: {what} (last seen: {value!r})")
