"""Calls that follow one another, written once for sync and async callers.

A generator yields each call and is sent its answer; what it returns is the result.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from typing import Any, TypeVar

from fanout_procrastinate import store

T = TypeVar("T")
Steps = Generator["store.Call[Any]", Any, T]

_MOST_RUNS = 50


def drive(run: store.RunCall, steps: Steps[T]) -> T:
    """Run the calls one by one and return the result."""
    answer: Any = None
    while True:
        try:
            call = steps.send(answer)
        except StopIteration as end:
            result: T = end.value
            return result
        answer = run(call)


async def drive_async(run: Callable[[store.Call[Any]], Awaitable[Any]], steps: Steps[T]) -> T:
    """Run the calls one by one without blocking the loop, and return the result."""
    answer: Any = None
    while True:
        try:
            call = steps.send(answer)
        except StopIteration as end:
            result: T = end.value
            return result
        answer = await run(call)


def pass_on(run_id: int) -> Steps[int]:
    """Give what is free in a run's limits to the runs that wait, one transaction for each run.

    Returns how many were given something.
    """
    for served in range(_MOST_RUNS):
        if not (yield store.pass_on(run_id)):
            return served
    return _MOST_RUNS
