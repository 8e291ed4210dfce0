"""What an exception means for its item, and how long to wait before the next try."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
from procrastinate import exceptions as host_errors

from fanout_procrastinate import errors, responses

TRANSIENT_STATUSES = frozenset({408, 425, 429})
DEFAULT_RULE = "default"

_MAX_LINKS = 50
_MAX_VISITS = 10_000
_MAX_WAIT_SECONDS = 366 * 86400.0

_DATABASE_ERRORS = (
    psycopg.OperationalError,
    psycopg.InterfaceError,
    host_errors.ConnectorException,
)
# Tried in this order: (types, permanent). The four before OSError are its exceptions.
_TYPE_RULES: tuple[tuple[tuple[type[BaseException], ...], bool], ...] = (
    ((ConnectionError, TimeoutError, *_DATABASE_ERRORS), False),
    ((FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError), True),
    ((OSError,), False),
    (
        (
            ValueError,
            TypeError,
            AttributeError,
            LookupError,
            NotImplementedError,
            AssertionError,
        ),
        True,
    ),
)

ExceptionTypes = tuple[type[BaseException], ...]


@dataclasses.dataclass(frozen=True)
class Backoff:
    """Say how long a released item waits before its next try.

    Args:
        initial: seconds after the first failure.
        factor: by what each further wait is longer.
        maximum: the longest wait in seconds, before jitter.
        jitter: the share by which a wait is lengthened or shortened at random, so that items
            that failed together do not come back together.

    Raises:
        ConfigurationError: a number cannot work.

    Example:
        >>> [Backoff(jitter=0).delay(failures) for failures in (1, 2, 3, 1000)]
        [10.0, 20.0, 40.0, 3600.0]
    """

    initial: float = 10.0
    factor: float = 2.0
    maximum: float = 3600.0
    jitter: float = 0.1

    def __post_init__(self) -> None:
        self._check("initial", 0.0, _MAX_WAIT_SECONDS, "seconds")
        self._check("factor", 1.0, 1e6, "1 for waits of equal length, 2 to double each")
        self._check("maximum", 0.0, _MAX_WAIT_SECONDS, "seconds")
        self._check("jitter", 0.0, 1.0, "a share such as 0.1")
        if self.maximum < self.initial:
            raise errors.ConfigurationError(
                f"Backoff(maximum={self.maximum!r}) is below initial={self.initial!r}; "
                "raise maximum or lower initial"
            )

    def _check(self, name: str, low: float, high: float, remedy: str) -> None:
        value = getattr(self, name)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not low <= value <= high:
            raise errors.ConfigurationError(
                f"Backoff({name}={value!r}): give a number from {low:g} to {high:g} ({remedy})"
            )

    def delay(self, failures: int, *, random: Callable[[], float] = random.random) -> float:
        """Return the seconds to wait after so many failures (1 = the first).

        The wait is capped before it is computed, so any count is safe.

        Args:
            failures: how often the item has failed by now.
            random: gives the jitter, from 0 (shortest wait) to 1 (longest).
        """
        swing = self.jitter * (2.0 * min(max(random(), 0.0), 1.0) - 1.0)
        return float(self._base(max(failures, 1) - 1) * (1.0 + swing))

    def _base(self, steps: int) -> float:
        if self.initial == 0 or self.factor == 1 or steps == 0:
            return self.initial
        steps_to_cap = (math.log(self.maximum) - math.log(self.initial)) / math.log(self.factor)
        if steps >= steps_to_cap:
            return self.maximum
        return min(self.maximum, self.initial * self.factor**steps)


@dataclasses.dataclass(frozen=True, slots=True)
class Classification:
    """Hold what an exception means for its item.

    Attributes:
        permanent: fail the item at once; otherwise try again, up to ``max_attempts`` tries.
        retry_in: seconds to wait in place of the backoff, where the exception asks for it.
        rule: the rule that fitted, for people: ``status 429``, ``type ValueError``, ``default``.
    """

    permanent: bool
    retry_in: float | None = None
    rule: str = DEFAULT_RULE

    @property
    def name(self) -> str:
        """Return ``permanent`` or ``transient``."""
        return "permanent" if self.permanent else "transient"


def classify(
    exc: BaseException, *, permanent: ExceptionTypes = (), transient: ExceptionTypes = ()
) -> Classification:
    """Say whether another try can help. Never raises.

    The exception is looked at first, then its ``__cause__`` and so on; the nearest one that a rule
    fits decides. For each the rules are, in this order: raised as ``PermanentError`` or
    ``TransientError``; declared (of several types the most derived); the HTTP status; the type.
    A group is transient if any member is, and waits as long as the most patient of them. Without
    a fitting rule an exception is transient.

    Args:
        exc: what the child or manager raised.
        permanent: types declared as permanent.
        transient: types declared as transient.

    Example:
        >>> classify(FileNotFoundError("a.pdf")).permanent
        True
        >>> classify(KeyError("id"), transient=(KeyError,)).rule
        'declared KeyError'
    """
    try:
        found = _Judge(permanent, transient).judge(exc)
    except Exception:  # noqa: BLE001 - an outcome must be recorded, whatever the exception does
        found = None
    return found or Classification(permanent=False)


class _Judge:
    """Classes one exception; counts its steps, since causes and groups may be endless."""

    def __init__(self, permanent: ExceptionTypes, transient: ExceptionTypes) -> None:
        self._declared = [(kind, True) for kind in permanent]
        self._declared += [(kind, False) for kind in transient]
        self._visits = 0

    def judge(self, exc: BaseException) -> Classification | None:
        """Return the verdict of the nearest rule that fits; ``None`` if none does."""
        chain = self._chain(exc)
        for link in chain:
            found = self._rule(link)
            if found is None:
                continue
            if not found.permanent and found.retry_in is None:
                hints = (_wait_of(each) for each in (link, *chain))
                wait = next((hint for hint in hints if hint is not None), None)
                return dataclasses.replace(found, retry_in=wait)
            return found
        return None

    def _chain(self, exc: BaseException) -> Iterator[BaseException]:
        seen: set[int] = set()
        link: Any = exc
        while issubclass(type(link), BaseException) and id(link) not in seen:
            self._visits += 1
            if len(seen) >= _MAX_LINKS or self._visits > _MAX_VISITS:
                return
            seen.add(id(link))
            yield link
            link = link.__cause__

    def _rule(self, exc: BaseException) -> Classification | None:
        if issubclass(type(exc), BaseExceptionGroup):
            return self._declared_rule(exc, BaseExceptionGroup) or self._group_rule(exc)
        return (
            _raised_rule(exc)
            or self._declared_rule(exc, BaseException)
            or _status_rule(exc)
            or _type_rule(exc)
        )

    def _declared_rule(
        self, exc: BaseException, within: type[BaseException]
    ) -> Classification | None:
        """Return the rule of the most derived type declared; permanent where two are equal.

        For a group only types of groups count: `permanent=(Exception,)` speaks of its members.
        """
        kind = type(exc)
        fits = [
            (_distance(kind, declared), not permanent, declared.__name__)
            for declared, permanent in self._declared
            if issubclass(kind, declared) and issubclass(declared, within)
        ]
        if not fits:
            return None
        _, is_transient, name = min(fits)
        return Classification(not is_transient, rule=f"declared {name}")

    def _group_rule(self, group: Any) -> Classification | None:
        verdicts: list[Classification | None] = []
        for member in _leaves(group):
            if self._visits > _MAX_VISITS:
                verdicts.append(None)  # unknown, like any exception without a rule
                break
            verdicts.append(self.judge(member))
        if all(verdict is None for verdict in verdicts):
            return None
        known = [verdict or Classification(permanent=False) for verdict in verdicts]
        chosen = max(known, key=_patience)
        return dataclasses.replace(chosen, rule=f"group: {chosen.rule}")


def _patience(verdict: Classification) -> tuple[bool, float, bool]:
    """Order verdicts: transient above permanent, then by the wait, then a rule above none."""
    wait = -1.0 if verdict.retry_in is None else verdict.retry_in
    return not verdict.permanent, wait, verdict.rule != DEFAULT_RULE


def _leaves(group: Any) -> Iterator[BaseException]:
    """Yield the members, those of nested groups in their place; no recursion, no repeats."""
    seen = {id(group)}
    waiting = list(reversed(group.exceptions))
    while waiting:
        member = waiting.pop()
        if id(member) in seen:
            continue
        seen.add(id(member))
        if issubclass(type(member), BaseExceptionGroup):
            waiting.extend(reversed(member.exceptions))
        else:
            yield member


def _distance(kind: type, declared: type) -> int:
    """Return how far up the declared type stands; behind all for one registered by an ABC."""
    return kind.__mro__.index(declared) if declared in kind.__mro__ else len(kind.__mro__)


def _raised_rule(exc: BaseException) -> Classification | None:
    kind = type(exc)
    if issubclass(kind, errors.PermanentError):
        return Classification(True, rule="raised PermanentError")
    if issubclass(kind, errors.TransientError):
        return Classification(False, rule="raised TransientError")
    return None


def _status_rule(exc: BaseException) -> Classification | None:
    status = responses.status_of(exc)
    if status is None or status < 400:
        return None
    passing = status >= 500 or status in TRANSIENT_STATUSES
    return Classification(not passing, rule=f"status {status}")


def _type_rule(exc: BaseException) -> Classification | None:
    kind = type(exc)
    if issubclass(kind, errors.DatabaseError):
        again = getattr(exc, "transient", False) is True
        return Classification(False, rule="type DatabaseError") if again else None
    for kinds, permanent in _TYPE_RULES:
        for known in kinds:
            if issubclass(kind, known):
                return Classification(permanent, rule=f"type {known.__name__}")
    return None


def _wait_of(exc: BaseException) -> float | None:
    """Return the seconds that this exception itself asks for."""
    if issubclass(type(exc), errors.TransientError):
        asked = errors.clamp_seconds(getattr(exc, "retry_in", None))
        if asked is not None:
            return asked
    return responses.retry_after(exc)
