"""Limits over all machines: how many at once, how many in a time, per key of an item."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

from fanout_procrastinate import errors, sanitise

MAX_NAME_BYTES = 200
"""The longest name of a limit, in bytes of UTF-8."""

KIND = "max_running:"
"""What stands before a child's task in the name of its own limit."""

_MOST = 1_000_000
_LONGEST_PAUSE_SECONDS = 1e9


class Pauser(Protocol):
    """What slows a resource down; each child finds its app's by `in_use`."""

    def pause(self, limit: Limit, seconds: float) -> None: ...

    async def pause_async(self, limit: Limit, seconds: float) -> None: ...


in_use: contextvars.ContextVar[Pauser | None] = contextvars.ContextVar(
    "fanout_limits", default=None
)
"""What the child that runs here asks to pause a limit."""


class _Nowhere:
    def pause(self, limit: Limit, seconds: float) -> None:
        """Do nothing."""

    async def pause_async(self, limit: Limit, seconds: float) -> None:
        """Do nothing."""


@contextlib.contextmanager
def nowhere() -> Iterator[None]:
    """Let pauses do nothing inside this block, which has no database."""
    token = in_use.set(_Nowhere())
    try:
        yield
    finally:
        in_use.reset(token)


@dataclasses.dataclass(frozen=True, init=False)
class Limit:
    """Declare a resource that many share: a service, a licence, a tenant's allowance.

    All processes on all machines together keep it. The same name means the same limit; declare it
    once and import it. What an operator changes holds until the declaration itself changes.

    Example:
        >>> llm = Limit("llm", concurrency=5, rate=60, per=60.0)

    Args:
        name: of the resource.
        concurrency: how many may hold it at once; per key where there is one. ``None`` = any
            number, 0 = nobody.
        rate: how many may begin with it in `per` seconds. ``None`` = any number.
        per: seconds, for `rate`.
        burst: how many of these may begin at once after a quiet time; by default a tenth of
            `rate`, and one at least.
        key: item -> str; each key has `concurrency` of its own.

    Raises:
        ConfigurationError: a value cannot work; the message names the remedy.
    """

    name: str
    concurrency: int | None
    rate: float | None
    per: float
    burst: int
    key: Callable[[Any], str] | None

    def __init__(
        self,
        name: str,
        *,
        concurrency: int | None = None,
        rate: float | None = None,
        per: float = 1.0,
        burst: int | None = None,
        key: Callable[[Any], str] | None = None,
    ) -> None:
        check_name(name)
        check_concurrency(concurrency)
        check_rate(rate, per, burst)
        if concurrency is None and rate is None:
            raise errors.ConfigurationError(
                f"the limit {name!r} limits nothing; give concurrency=, or rate= and per="
            )
        if key is not None and not callable(key):
            raise errors.ConfigurationError(
                f"key={key!r} of the limit {name!r} cannot be called; give a function: item -> str"
            )
        if key is not None and (concurrency is None or rate is not None):
            raise errors.ConfigurationError(
                f"the limit {name!r} has a key: it takes concurrency=, and no rate="
            )
        put = object.__setattr__
        put(self, "name", name)
        put(self, "concurrency", concurrency)
        put(self, "rate", None if rate is None else float(rate))
        put(self, "per", float(per))
        put(self, "burst", default_burst(rate) if burst is None else burst)
        put(self, "key", key)

    def pause(self, seconds: float) -> None:
        """Let nothing begin with it for so long, on no machine: after a 429 with Retry-After.

        What has begun goes on. A longer pause stays as it is. Inside a child it finds its app;
        elsewhere use ``FanOut.of(app).pause_limit(limit, seconds)``.

        Raises:
            ConfigurationError: it is called elsewhere, or the seconds are no number above 0.
            DatabaseError: the database did not answer.
        """
        self._pauser().pause(self, check_pause(seconds))

    async def pause_async(self, seconds: float) -> None:
        """Let nothing begin with it for so long; otherwise like `pause`."""
        await self._pauser().pause_async(self, check_pause(seconds))

    def _pauser(self) -> Pauser:
        found = in_use.get()
        if found is None:
            raise errors.ConfigurationError(
                f"outside of a child the limit {self.name!r} does not know its app; call "
                "FanOut.of(app).pause_limit(limit, seconds)"
            )
        return found

    def spec(self) -> dict[str, Any]:
        """Return it as the database keeps it."""
        return {
            "name": self.name,
            "concurrency": self.concurrency,
            "rate": self.rate,
            "per": self.per,
            "burst": self.burst,
            "keyed": self.key is not None,
        }

    def key_of(self, item: Any) -> str:
        """Return an item's key.

        Raises:
            InvalidValue: the function raised, or gave no usable str.
        """
        assert self.key is not None  # noqa: S101 - asked of limits with a key
        try:
            found: object = self.key(item)
        except Exception as exc:  # it is the user's code
            raise errors.InvalidValue(
                f"key of the limit {self.name!r} raised {type(exc).__name__}: {exc}"
            ) from exc
        if not _is_key(found):
            raise errors.InvalidValue(
                f"key of the limit {self.name!r} gave {found!r}; let it return a str of at most "
                f"{MAX_NAME_BYTES} bytes, without NUL characters and lone surrogates"
            )
        return str(found)


def _is_key(value: object) -> bool:
    return (
        isinstance(value, str)
        and sanitise.clean_text(value) == value
        and len(value.encode()) <= MAX_NAME_BYTES
    )


def default_burst(rate: float | None) -> int:
    """Return a tenth of a rate, and one at least."""
    return 1 if rate is None else max(1, round(rate / 10))


def kind_spec(task: str, max_running: int) -> dict[str, Any]:
    """Return the limit of a child over all runs as the database keeps it."""
    return {
        "name": KIND + task,
        "concurrency": max_running,
        "rate": None,
        "per": 1.0,
        "burst": 1,
        "keyed": False,
    }


def check_set(limits: Any) -> tuple[Limit, ...]:
    """Return a child's limits, checked, ascending by name.

    Raises:
        ConfigurationError: they cannot be taken together.
    """
    listed = isinstance(limits, Iterable) and not isinstance(limits, str)
    found = tuple(limits) if listed else ()
    if not listed or not all(isinstance(limit, Limit) for limit in found):
        raise errors.ConfigurationError(f"limits={limits!r}: give a list of Limit")
    names = [limit.name for limit in found]
    for name in names:
        if names.count(name) > 1:
            raise errors.ConfigurationError(f"limits= names {name!r} twice; name it once")
    if sum(limit.key is not None for limit in found) > 1:
        raise errors.ConfigurationError(
            "limits= has several limits with a key; a child takes one. Join them into one key"
        )
    return tuple(sorted(found, key=lambda limit: limit.name))


def check_permit(limits: Iterable[Any], key: object) -> tuple[Limit, ...]:
    """Return the limits of a permit, checked, ascending by name.

    Raises:
        ConfigurationError: they cannot be taken together, or the key does not fit.
    """
    found = check_set(tuple(limits))
    if not found:
        raise errors.ConfigurationError("a permit of what? give a Limit, or several")
    keyed = next((limit for limit in found if limit.key is not None), None)
    if keyed is None and key is not None:
        raise errors.ConfigurationError(
            f"key={key!r}: {', '.join(limit.name for limit in found)} takes no key; leave it out"
        )
    if keyed is not None and not _is_key(key):
        raise errors.ConfigurationError(
            f"the limit {keyed.name!r} has a key; give permit(..., key=) a str of at most "
            f"{MAX_NAME_BYTES} bytes, not {key!r}"
        )
    return found


def check_pause(seconds: object) -> float:
    """Return for how long a limit is paused, checked.

    Raises:
        ConfigurationError: it is no number above 0.
    """
    if (
        not isinstance(seconds, int | float)
        or isinstance(seconds, bool)
        or not 0 < seconds <= _LONGEST_PAUSE_SECONDS
    ):
        raise errors.ConfigurationError(f"{seconds!r}: pause for a number of seconds above 0")
    return float(seconds)


def check_name(name: object) -> str:
    """Return the name of a limit if it can be one.

    Raises:
        ConfigurationError: it cannot.
    """
    if (
        not isinstance(name, str)
        or not 0 < len(name.encode(errors="replace")) <= MAX_NAME_BYTES
        or sanitise.clean_text(name) != name
        or name.startswith(KIND)
    ):
        raise errors.ConfigurationError(
            f"{name!r} cannot name a limit; give a str of 1 to {MAX_NAME_BYTES} bytes that does "
            f"not begin with {KIND!r}"
        )
    return name


def check_concurrency(value: object, name: str = "concurrency") -> int | None:
    """Return how many may hold a limit, checked.

    Raises:
        ConfigurationError: it is no such number.
    """
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MOST:
        raise errors.ConfigurationError(f"{name}={value!r}: give an int from 0 to {_MOST:,}")
    return value


def check_rate(rate: object, per: object, burst: object) -> None:
    """Check a rate.

    Raises:
        ConfigurationError: a value cannot work.
    """
    for name, value in (("rate", rate), ("per", per)):
        if value is None and name == "rate":
            continue
        if (
            not isinstance(value, int | float)
            or isinstance(value, bool)
            or not math.isfinite(value)
            or not 1e-6 <= value <= 1e9
        ):
            raise errors.ConfigurationError(f"{name}={value!r}: give a number above 0")
    if burst is not None and (
        rate is None
        or not isinstance(burst, int)
        or isinstance(burst, bool)
        or not 1 <= burst <= _MOST
    ):
        raise errors.ConfigurationError(
            f"burst={burst!r}: give an int of at least 1, together with rate="
        )
