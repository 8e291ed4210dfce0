"""The one tree of errors: what the library raises, and the two errors that users raise."""

from __future__ import annotations

import datetime
import math
import signal
from typing import Any

MAX_RETRY_IN_SECONDS = 7 * 86400.0
"""The longest wait that an error may ask for: seven days."""


class FanoutError(Exception):
    """Catch this to catch every error that the library defines."""


class ConfigurationError(FanoutError, ValueError):
    """Report a declaration or setting that cannot work; the message names the remedy."""


class SchemaError(FanoutError):
    """Report tables that are missing or outdated in the database.

    Example:
        >>> str(SchemaError("the table fanout_runs is missing"))
        'the table fanout_runs is missing; run: fanout --app=... schema --apply'
    """

    def __init__(self, detail: str = "the fan-out tables are missing or outdated") -> None:
        super().__init__(detail)
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.detail}; run: fanout --app=... schema --apply"


class RunNotFound(FanoutError, LookupError):
    """Report that no run with this id (or this name and run key) is kept."""

    def __init__(self, run: object = None) -> None:
        super().__init__(run)
        self.run = run

    def __str__(self) -> str:
        return f"there is no run {self.run!r}: it never existed, or retention has removed it"


class RunClosed(FanoutError):
    """Report a change that a closed run cannot take."""

    def __init__(self, run_id: int | None = None, status: str = "closed") -> None:
        super().__init__(run_id, status)
        self.run_id = run_id
        self.status = status

    def __str__(self) -> str:
        return (
            f"run {self.run_id} is closed ({self.status}) and cannot be changed; "
            "start a new run, or reopen this one with retry_failed()"
        )


class RunKeyConflict(FanoutError):
    """Report a run key that is already in use with other arguments."""

    def __init__(self, name: str = "", run_key: str = "") -> None:
        super().__init__(name, run_key)
        self.name = name
        self.run_key = run_key

    def __str__(self) -> str:
        return (
            f"{self.name} already has a run with run_key {self.run_key!r} and other arguments; "
            'choose another run_key, or pass if_closed="replace" once that run is closed'
        )


class RunFailed(FanoutError):
    """Report a run that did not complete without failures; raised by ``wait`` when asked to.

    Attributes:
        progress: the run's last ``Progress`` (its class lives in a higher layer).
    """

    def __init__(self, message: str = "the run failed", progress: Any = None) -> None:
        super().__init__(message)
        self.progress = progress


class WaitTimeout(FanoutError, TimeoutError):
    """Report that a run was still open when the time given to ``wait`` was over.

    The run itself goes on. ``progress`` is the last reading.
    """

    def __init__(
        self, message: str = "the run is still open; wait longer", progress: Any = None
    ) -> None:
        super().__init__(message)
        self.progress = progress


class LimitTimeout(FanoutError, TimeoutError):
    """Report that no permit was to be had in the time given; a child that meets it is tried again.

    Attributes:
        names: of the limits.
        seconds: how long it waited.
        reason: which limit had no room, in words, where known.

    Example:
        >>> str(LimitTimeout(("llm",), 5.0, "limit llm is full: 2 of 2"))
        'no permit of llm within 5 s: limit llm is full: 2 of 2'
    """

    def __init__(
        self, names: tuple[str, ...] = (), seconds: float = 0.0, reason: str | None = None
    ) -> None:
        super().__init__(names, seconds, reason)
        self.names = names
        self.seconds = seconds
        self.reason = reason

    def __str__(self) -> str:
        text = f"no permit of {', '.join(self.names)} within {self.seconds:g} s"
        return text if self.reason is None else f"{text}: {self.reason}"


class InvalidValue(FanoutError, ValueError):
    """Report a value that does not fit its annotation, or that cannot become JSON."""


class InvalidItem(FanoutError, ValueError):
    """Report an item that a run cannot take: which one, and why.

    Attributes:
        reason: what is wrong, in one line.
        position: place in the manager's output, counted from 0, where known.
        key: the item's key, where known.

    Example:
        >>> str(InvalidItem("pages: a valid integer is needed", position=3, key="p-17"))
        "item 3 (key 'p-17'): pages: a valid integer is needed"
    """

    def __init__(
        self, reason: str = "invalid", *, position: int | None = None, key: str | None = None
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.position = position
        self.key = key

    def __str__(self) -> str:
        place = "item" if self.position is None else f"item {self.position}"
        if self.key is not None:
            shown = self.key if len(self.key) <= 80 else self.key[:80] + "…"
            place += f" (key {shown!r})"
        return f"{place}: {self.reason}"


class ItemTooLarge(InvalidItem):
    """Report an item whose JSON is larger than ``max_item_bytes`` (bytes of UTF-8)."""

    def __init__(
        self,
        size: int = 0,
        limit: int = 0,
        *,
        position: int | None = None,
        key: str | None = None,
    ) -> None:
        reason = (
            f"{size} bytes of JSON, {limit} are allowed; give the child a reference "
            "(a path, an id) instead of the contents, or raise FanOut(max_item_bytes=)"
        )
        super().__init__(reason, position=position, key=key)
        self.args = (size, limit)
        self.size = size
        self.limit = limit


class ResultTooLarge(FanoutError, ValueError):
    """Report a child's result larger than ``max_result_bytes`` (bytes of UTF-8 JSON)."""

    def __init__(self, size: int = 0, limit: int = 0) -> None:
        super().__init__(size, limit)
        self.size = size
        self.limit = limit

    def __str__(self) -> str:
        return (
            f"the result is {self.size} bytes of JSON, {self.limit} are allowed; store it "
            "elsewhere and return a reference, or raise FanOut(max_result_bytes=)"
        )


class ChildProcessDied(FanoutError):
    """Report that the process of an isolated child died with an item in hand.

    Attributes:
        exit_code: of the process; negative: the signal that ended it; ``None``: not known.
        pid: of the process, where known.

    Example:
        >>> str(ChildProcessDied(-11, 4711))
        'the process of the isolated child (pid 4711) was ended by SIGSEGV'
    """

    def __init__(self, exit_code: int | None = None, pid: int | None = None) -> None:
        super().__init__(exit_code, pid)
        self.exit_code = exit_code
        self.pid = pid

    def __str__(self) -> str:
        whose = "" if self.pid is None else f" (pid {self.pid})"
        return f"the process of the isolated child{whose} {self._how()}"

    def _how(self) -> str:
        if self.exit_code is None:
            return "could not be started, or was ended together with its siblings"
        if self.exit_code >= 0:
            return f"ended by itself with exit code {self.exit_code}"
        try:
            name = signal.Signals(-self.exit_code).name
        except ValueError:
            name = f"signal {-self.exit_code}"
        hint = ", perhaps by the system for want of memory" if name == "SIGKILL" else ""
        return f"was ended by {name}{hint}"


class StaleManager(FanoutError):
    """Report that an older execution of a run's manager was refused: a newer one owns the run."""

    def __init__(self, run_id: int | None = None) -> None:
        super().__init__(run_id)
        self.run_id = run_id

    def __str__(self) -> str:
        return (
            f"a newer execution of the manager owns run {self.run_id}; "
            "nothing is to be done, this one may end"
        )


class DatabaseError(FanoutError):
    """Report an error of the database driver.

    Attributes:
        sqlstate: the five-character code, where the server sent one.
        transient: whether the same statement may succeed when tried again.
    """

    def __init__(
        self,
        message: str = "the database refused the statement",
        *,
        sqlstate: str | None = None,
        transient: bool = False,
    ) -> None:
        super().__init__(message)
        self.sqlstate = sqlstate
        self.transient = transient


class PermanentError(FanoutError):
    """Raise this in a child or manager when another try cannot help.

    The item fails and is counted at once.

    Example:
        >>> raise PermanentError("the file is encrypted")
        Traceback (most recent call last):
            ...
        fanout_procrastinate.errors.PermanentError: the file is encrypted
    """


class TransientError(FanoutError):
    """Raise this in a child or manager when a later try may succeed.

    Args:
        message: what happened.
        retry_in: seconds (or a ``timedelta``) to wait, in place of the backoff. Building the
            error never raises: the value is brought into 0 .. 7 days, and one that is no number
            counts as ``None`` (wait as the backoff says).

    Example:
        >>> TransientError("the service is busy", retry_in=30).retry_in
        30.0
    """

    def __init__(
        self, message: object = "", retry_in: float | datetime.timedelta | None = None
    ) -> None:
        super().__init__(message)
        self.retry_in = clamp_seconds(retry_in)


def clamp_seconds(value: Any) -> float | None:
    """Bring a wait (a number, its text, a ``timedelta``) into 0 .. 7 days. Never raises.

    Returns ``None`` for what is no number.
    """
    try:
        if isinstance(value, datetime.timedelta):
            value = value.total_seconds()
        if isinstance(value, int):
            value = min(max(value, 0), int(MAX_RETRY_IN_SECONDS))  # may be too long for a float
        seconds = float(value)
    except Exception:  # noqa: BLE001 - it runs in `except` blocks of users, with whatever they have
        return None
    return None if math.isnan(seconds) else min(max(seconds, 0.0), MAX_RETRY_IN_SECONDS)
