"""Isolated children, the worker's side: where a process finds one, and one try of it.

In the process works `isolated`. What goes to and fro is text.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import socket
import sys
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from fanout_procrastinate import errors, execution, processes

logger = logging.getLogger(__name__)

READY_SECONDS = 120.0
"""For loading the child's module and the item, before the time limit begins to count."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where another process finds a child again.

    Args:
        name: of its task, as declared.
        declared_in: the module that was being imported, where that is known.
        module: of the function.
        qualname: of the function.
        main: what was started, for what stands in ``__main__``: ``["module", its name]`` or
            ``["path", its file]``.
    """

    name: str
    declared_in: str
    module: str
    qualname: str
    main: tuple[str, str] | None = None

    @classmethod
    def of(cls, function: Callable[..., Any], name: str, namespace: Mapping[str, Any]) -> Address:
        """Return the address of a child about to be declared.

        Args:
            function: the user's.
            name: of its task.
            namespace: what stands around the declaration.

        Raises:
            ConfigurationError: no other process can find it, or there can be none.
        """
        if not hasattr(os, "fork") or not hasattr(socket, "send_fds"):
            raise errors.ConfigurationError(
                "isolate=True needs a POSIX system, for it forks; leave it out here"
            )
        module = getattr(function, "__module__", None) or ""
        qualname = getattr(function, "__qualname__", "")
        if "<" in qualname:
            raise errors.ConfigurationError(
                f"isolate=True: another process cannot find {qualname}; define the child with "
                "def at the top level of a module"
            )
        declared_in = namespace.get("__name__") or namespace.get("__module__") or module
        main = _main() if "__main__" in (module, declared_in) else None
        return cls(name=name, declared_in=declared_in, module=module, qualname=qualname, main=main)


def _main() -> tuple[str, str]:
    started = sys.modules["__main__"]
    if started.__spec__ is not None:
        return ("module", started.__spec__.name)
    path = getattr(started, "__file__", None)
    if path is None:
        raise errors.ConfigurationError(
            "isolate=True: another process cannot find what was typed into this one; define the "
            "child in a module"
        )
    return ("path", os.path.abspath(path))


class Context(Protocol):
    """What the worker knows of the item; the `ItemContext` of the process asks for it."""

    def should_stop(self) -> bool: ...

    async def still_mine_async(self) -> bool: ...

    def log(self, message: str, **data: Any) -> None: ...

    def progress(self, fraction: float) -> None: ...

    async def permit_asked(self, name: str, params: dict[str, Any]) -> Any: ...

    def permit_lost(self, holder: str) -> bool: ...

    async def permits_over(self) -> None: ...


@dataclasses.dataclass(eq=False, kw_only=True)
class Execution:
    """One try of an isolated child.

    Args:
        pool: has the processes.
        request: what the process needs to know, see `isolated`.
        context: answers the questions of the child.
    """

    pool: processes.Pool
    request: processes.Message
    context: Context
    _process: processes.Process | None = None
    _begun: bool = False
    _given_up: bool = False

    async def run(self, *, timeout: float | None) -> processes.Message | execution.Raised:
        """Have one process work on the item; return the columns of its outcome.

        Past `timeout` seconds the process is ended; the time that loading takes does not count.

        Raises:
            Stopped: `give_up` was called; the process is ended.
            CancelledError: the caller was cancelled; the process is ended.
        """
        for fresh in (False, True):
            try:
                process = self._process = self.pool.take(fresh=fresh)
            except OSError as exc:
                return execution.Raised(exc)
            end = await self._tried(process, timeout)
            if self._given_up:
                raise execution.Stopped
            if isinstance(end, TimeoutError):
                return execution.Raised(end)
            if end is not None:
                return dict(end["end"])
            # One that died while it was idle is not the item's fault.
            if self._begun or not process.used:
                break
        return execution.Raised(_died(process))

    def give_up(self) -> None:
        """End the process; from the event loop only."""
        self._given_up = True
        if self._process is not None:
            self._process.end()

    def thread_stuck(self) -> bool:
        """Return False: what was ended does not go on."""
        return False

    async def leftover(self) -> None:
        """Return at once: nothing is left over."""

    async def _tried(
        self, process: processes.Process, timeout: float | None
    ) -> processes.Message | TimeoutError | None:
        reusable = False
        try:
            end = None if self._given_up else await self._exchange(process, timeout)
            reusable = end is not None and end["reusable"] and not self._given_up
            return end
        except TimeoutError as exc:
            return exc
        finally:
            if reusable:
                self.pool.give_back(process)
            else:
                await process.ended()
            await self.context.permits_over()

    async def _exchange(
        self, process: processes.Process, timeout: float | None
    ) -> processes.Message | None:
        """Return how the item ended; `None` where the process died."""
        try:
            async with asyncio.timeout(READY_SECONDS):
                sent = await process.send(self.request | _facts())
                message = await self._heard(process) if sent else None
            if message is None or "end" in message:
                return message
            self._begun = True
            async with asyncio.timeout(timeout):
                return await self._heard(process)
        except TimeoutError:
            if self._begun:
                raise TimeoutError(f"its time limit of {timeout:g} s passed") from None
            raise TimeoutError(
                f"its module and item were not loaded within {READY_SECONDS:g} s"
            ) from None

    async def _heard(self, process: processes.Process) -> processes.Message | None:
        """Return the next message that is not a question, for these are answered."""
        while (message := await process.receive()) is not None:
            if "ask" not in message:
                return message
            await process.send(await self._answer(message["ask"], message["about"]))
        return None

    async def _answer(self, question: str, about: processes.Message) -> processes.Message:
        try:
            if question == "should_stop":
                return {"answer": self.context.should_stop()}
            if question == "still_mine":
                return {"answer": await self.context.still_mine_async()}
            if question == "permit":
                return {"answer": await self.context.permit_asked(about["name"], about["params"])}
            if question == "permit_lost":
                return {"answer": self.context.permit_lost(about["holder"])}
            if question == "progress":
                self.context.progress(about["fraction"])
            else:
                self.context.log(about["message"], **about["data"])
        except Exception as exc:  # noqa: BLE001 - no answer may cost the item its outcome
            return {"error": str(exc)}
        return {"answer": None}


def _facts() -> processes.Message:
    """Return what the process must know of this one."""
    django = sys.modules.get("django.apps")
    return {
        "log_level": logging.getLogger().level,
        "django": django is not None and bool(django.apps.ready),
    }


def _died(process: processes.Process) -> errors.ChildProcessDied:
    error = errors.ChildProcessDied(process.exit_code, process.pid)
    logger.warning(
        "The process of an isolated child died",
        extra={
            "action": "child_process_died",
            "pid": process.pid,
            "exit_code": process.exit_code,
        },
    )
    return error
