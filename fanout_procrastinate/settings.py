"""Settings and options: frozen, and checked where they are built."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any

import croniter  # type: ignore[import-untyped]

from fanout_procrastinate import errors, limits, outcomes

MAX_QUEUE_NAME_BYTES = 40
"""PostgreSQL's 63 bytes for a channel name less the host's prefix ``procrastinate_queue_v1#``."""
MAX_TASK_NAME_CHARS = 128
"""The width of the host's column ``task_name``."""
MIN_MEMORY_LIMIT = 64 * 2**20
"""Bytes: below it the library itself would hardly run."""

_MAX_INT = 2**31 - 1
_MAX_SECONDS = 1e9  # about 31 years: no date or interval overflows
_MAX_BYTES = 2**28 - 1  # one jsonb value cannot be larger
_QUEUE_NAME = re.compile(r"[A-Za-z0-9_]+", re.ASCII)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Hold the settings of an app's fan-outs.

    Args:
        time_slice: seconds after which a child job makes room for other runs, 0 = after each item.
        lease: seconds within which what a silent worker has in hand is taken over.
        sweep_cron: when the periodic sweep runs; a sixth column, seconds, may stand at the end.
        max_item_bytes: the most bytes of UTF-8 JSON that an item may have.
        max_result_bytes: the most bytes of UTF-8 JSON that a result may have.
        retention: seconds for which closed runs are kept; ``None`` = for ever.
        connection_factory: opens the library's own connections; ``None`` = from the settings of
            the app's connector.
        chunk_size: items that the manager stages in one statement.
        events: whether this process tells whoever watches what happens in it, as it happens.
            Otherwise they see it by polling, once a second.
        on_item_failed: called with ``run_id``, ``position``, ``key`` and ``error`` (its record)
            when an item has failed for good, in the worker that reported it. Sync or async.
        on_stuck: called with ``run_id``, ``closed`` and ``reason`` by the process whose sweep
            closed a run as stuck, or found it waiting for a worker. Sync or async.
        redact: a function of payloads, results and the data of log lines, each a copy made of
            plain JSON types, that returns what of them may be shown on the dashboard and in events.

    Raises:
        ConfigurationError: a value cannot work; the message names the remedy.

    Example:
        >>> Settings(lease=12).renew_interval
        3.0
    """

    time_slice: float = 1.0
    lease: float = 30.0
    sweep_cron: str = "* * * * *"
    max_item_bytes: int = 65536
    max_result_bytes: int = 1048576
    retention: float | None = None
    connection_factory: Callable[..., Any] | None = None
    chunk_size: int = 2000
    events: bool = True
    on_item_failed: Callable[..., Any] | None = None
    on_stuck: Callable[..., Any] | None = None
    redact: Callable[[Any], Any] | None = None

    def __post_init__(self) -> None:
        _check_seconds("time_slice", self.time_slice, 0.0)
        _check_seconds("lease", self.lease, 1.0)
        _check_cron(self.sweep_cron)
        check_int("max_item_bytes", self.max_item_bytes, 1, _MAX_BYTES)
        check_int("max_result_bytes", self.max_result_bytes, 1, _MAX_BYTES)
        if self.retention is not None:
            _check_seconds("retention", self.retention, 1.0, "None to keep runs for ever")
        if self.connection_factory is not None and not callable(self.connection_factory):
            raise errors.ConfigurationError(
                f"connection_factory={self.connection_factory!r} cannot be called; "
                "give a function that opens a connection"
            )
        check_int("chunk_size", self.chunk_size, 1, 100_000)
        check_bool("events", self.events)
        for name in ("on_item_failed", "on_stuck", "redact"):
            given = getattr(self, name)
            if given is not None and not callable(given):
                raise errors.ConfigurationError(
                    f"{name}={given!r} cannot be called; give a function"
                )

    @property
    def renew_interval(self) -> float:
        """Return the seconds between two renewals of a process's slots."""
        return self.lease / 4

    @property
    def sweep_interval(self) -> float:
        """Return the seconds between two sweeps of a process."""
        return self.lease / 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChildOptions:
    """Hold the options of a child, as ``fanout_child`` documents them; times are in seconds.

    Raises:
        ConfigurationError: a value cannot work; the message names the remedy.
    """

    name: str | None = None
    aliases: tuple[str, ...] = ()
    queue: str = "default"
    priority: int = 0
    max_attempts: int = 4
    backoff: outcomes.Backoff = dataclasses.field(default_factory=outcomes.Backoff)
    timeout: float | None = 1800.0
    permanent: outcomes.ExceptionTypes = ()
    transient: outcomes.ExceptionTypes = ()
    max_crashes: int = 3
    isolate: bool = False
    memory_limit: int | None = None
    pass_context: bool = False
    max_running: int | None = None
    limits: tuple[limits.Limit, ...] = ()

    def __post_init__(self) -> None:
        _check_names(self)
        check_queue_name(self.queue)
        check_priority(self.priority)
        limits.check_concurrency(self.max_running, "max_running")
        object.__setattr__(self, "limits", limits.check_set(self.limits))
        check_int("max_attempts", self.max_attempts, 1)
        _check_backoff(self.backoff)
        _check_timeout(self.timeout)
        _freeze_types(self, "permanent")
        _freeze_types(self, "transient")
        both = set(self.permanent) & set(self.transient)
        if both:
            names = ", ".join(sorted(kind.__name__ for kind in both))
            raise errors.ConfigurationError(
                f"{names} is declared permanent and transient; keep it in one of the two"
            )
        check_int("max_crashes", self.max_crashes, 1)
        check_bool("isolate", self.isolate)
        _check_memory_limit(self)
        check_bool("pass_context", self.pass_context)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ManagerOptions:
    """Hold the options of a manager, as ``fanout_manager`` documents them; times are in seconds.

    Raises:
        ConfigurationError: a value cannot work; the message names the remedy.
    """

    name: str | None = None
    aliases: tuple[str, ...] = ()
    queue: str | None = None
    priority: int = 0
    max_in_flight: int = 100
    timeout: float | None = 3600.0
    tolerate: int | float | None = None
    stuck_after: float = 7200.0
    max_attempts: int = 3
    backoff: outcomes.Backoff = dataclasses.field(default_factory=outcomes.Backoff)
    weight: float = 1.0

    def __post_init__(self) -> None:
        _check_names(self)
        if self.queue is not None:
            check_queue_name(self.queue)
        check_priority(self.priority)
        check_max_in_flight(self.max_in_flight)
        _check_timeout(self.timeout)
        check_tolerate(self.tolerate)
        _check_seconds("stuck_after", self.stuck_after, 1.0)
        check_weight(self.weight)
        check_int("max_attempts", self.max_attempts, 1)
        _check_backoff(self.backoff)


def check_weight(weight: object) -> float:
    """Return a run's weight among others that share its limits, checked.

    Raises:
        ConfigurationError: it is no such number.
    """
    if (
        not isinstance(weight, int | float)
        or isinstance(weight, bool)
        or not math.isfinite(weight)
        or not 0.001 <= weight <= 1000
    ):
        raise errors.ConfigurationError(f"weight={weight!r}: give a number from 0.001 to 1000")
    return float(weight)


def check_queue_name(name: object) -> str:
    """Return the queue name if workers can listen for it.

    Raises:
        ConfigurationError: it has other characters than letters, digits and underscores, or is
            longer than 40 bytes. PostgreSQL would refuse or cut the name of its channel.
    """
    if not isinstance(name, str) or not _QUEUE_NAME.fullmatch(name):
        raise errors.ConfigurationError(
            f"queue {name!r}: use only ASCII letters, digits and underscores"
        )
    if len(name) > MAX_QUEUE_NAME_BYTES:
        raise errors.ConfigurationError(
            f"queue {name!r} has {len(name)} bytes; shorten it to {MAX_QUEUE_NAME_BYTES}, "
            "what PostgreSQL leaves for it in a channel name"
        )
    return name


def check_task_name(name: object, *, limit: int = MAX_TASK_NAME_CHARS) -> str:
    """Return the task name if the host can store it.

    Args:
        name: the task's name.
        limit: characters allowed; below 128 where something will be appended to the name.

    Raises:
        ConfigurationError: it is empty, longer, or not storable text.
    """
    if not isinstance(name, str) or not name or not name.isprintable():
        raise errors.ConfigurationError(f"task name {name!r}: give a printable name")
    if len(name) > limit:
        raise errors.ConfigurationError(
            f"task name {name!r} has {len(name)} characters; give a name= of at most {limit}"
        )
    return name


def check_priority(value: int) -> int:
    """Return the priority if it fits the host's column (32 bits).

    Raises:
        ConfigurationError: it does not.
    """
    check_int("priority", value, -_MAX_INT - 1)
    return value


def check_max_in_flight(value: int) -> int:
    """Return the number of children allowed at work at once, if it is one.

    Raises:
        ConfigurationError: it is below 1.
    """
    check_int("max_in_flight", value, 1, remedy="pause() stops a run from handing out items")
    return value


def check_tolerate(value: int | float | None) -> int | float | None:
    """Return how many failed items (int) or which share of them (float) a run may have.

    Raises:
        ConfigurationError: it is neither a count, a share from 0 to 1, nor ``None``.
    """
    if value is None:
        return None
    counts = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_INT
    shares = isinstance(value, float) and 0.0 <= value <= 1.0
    if not counts and not shares:
        raise errors.ConfigurationError(
            f"tolerate={value!r}: give a count of failed items such as 10, a share from 0.0 to "
            "1.0, 0 to stop at the first, or None for any number"
        )
    return value


def check_int(name: str, value: Any, low: int, high: int = _MAX_INT, remedy: str = "") -> None:
    """Check a whole number.

    Raises:
        ConfigurationError: it is none, or out of bounds.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise errors.ConfigurationError(
            f"{name}={value!r}: give a whole number from {low} to {high}"
            + (f"; {remedy}" if remedy else "")
        )


def _check_seconds(name: str, value: Any, low: float, otherwise: str = "") -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or not low <= value <= _MAX_SECONDS:
        raise errors.ConfigurationError(
            f"{name}={value!r}: give seconds, a number from {low:g} to {_MAX_SECONDS:g}"
            + (f", or {otherwise}" if otherwise else "")
        )


def _check_timeout(value: Any) -> None:
    if value is not None:
        _check_seconds("timeout", value, 0.001, "None for no limit")


def check_bool(name: str, value: Any) -> None:
    """Check a truth value.

    Raises:
        ConfigurationError: it is none.
    """
    if not isinstance(value, bool):
        raise errors.ConfigurationError(f"{name}={value!r}: give True or False")


def _check_memory_limit(options: ChildOptions) -> None:
    if options.memory_limit is None:
        return
    if not options.isolate:
        raise errors.ConfigurationError(
            f"memory_limit={options.memory_limit!r} needs isolate=True: a limit holds for a process"
        )
    remedy = "an interpreter needs about half of the least that is allowed"
    check_int("memory_limit", options.memory_limit, MIN_MEMORY_LIMIT, 2**62, remedy)


def _check_backoff(value: Any) -> None:
    if not isinstance(value, outcomes.Backoff):
        raise errors.ConfigurationError(
            f"backoff={value!r}: give a Backoff, such as Backoff(initial=10, maximum=3600)"
        )


def _check_names(options: ChildOptions | ManagerOptions) -> None:
    if options.name is not None:
        check_task_name(options.name)
    given: object = options.aliases
    if not isinstance(given, tuple | list):
        raise errors.ConfigurationError(f"aliases wants several names; write aliases=({given!r},)")
    object.__setattr__(options, "aliases", tuple(check_task_name(alias) for alias in given))


def _freeze_types(options: ChildOptions, name: str) -> None:
    given = getattr(options, name)
    if not isinstance(given, tuple | list):
        shown = getattr(given, "__name__", repr(given))
        raise errors.ConfigurationError(f"{name} wants several types; write {name}=({shown},)")
    for kind in given:
        if not isinstance(kind, type) or not issubclass(kind, BaseException):
            raise errors.ConfigurationError(
                f"{name} contains {kind!r}; give classes of exceptions, such as ConnectionError"
            )
    object.__setattr__(options, name, tuple(given))


def _check_cron(cron: Any) -> None:
    remedy = 'give five columns such as "* * * * *", or six with the seconds at the end'
    if not isinstance(cron, str) or len(cron.split()) not in (5, 6):
        raise errors.ConfigurationError(f"sweep_cron={cron!r}: {remedy}")
    try:
        croniter.croniter(cron).get_next(float)
    except (ValueError, KeyError, TypeError) as exc:
        raise errors.ConfigurationError(f"sweep_cron={cron!r} ({exc}): {remedy}") from exc
