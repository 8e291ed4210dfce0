"""The audit: what contradicts the invariants on a live database. It reads, and disturbs nobody."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from fanout_procrastinate import errors, models, store

_RUNS_PER_CALL = 100
_SECONDS_BETWEEN_LOOKS = 1.0

# What is said of the host's job rows may be about a moment: a job on its way from the queue to its
# begin has lost its slot already, or is gone before its begin has arrived.
_FLEETING = (
    models.FindingKind.LOST_JOB,
    models.FindingKind.STRAY_JOB,
    models.FindingKind.MANAGER_LOST,
    models.FindingKind.CALLBACK_LOST,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Auditor:
    """Look for what should not be there.

    Args:
        read: runs one call on one snapshot, in at most so many seconds; raises `TimeoutError`.
        lease: seconds of silence after which a worker counts as dead.
    """

    read: Callable[[store.Call[Any], float], Any]
    lease: float

    def audit_once(self, run_id: int | None, timeout: float) -> list[models.Finding]:
        """Look at every run, or at one: the open ones first, then those closed last.

        What needs no look at the items comes first for all of them. What there was no time for
        becomes a finding of its own.

        Raises:
            RunNotFound: the run is not kept.
            SchemaError: the tables are missing.
            DatabaseError: the database did not answer.
        """
        return _Audit(self, run_id, timeout).findings()


class _Audit:
    """One audit and its time."""

    def __init__(self, auditor: Auditor, run_id: int | None, timeout: float) -> None:
        self._auditor = auditor
        self._run_id = run_id
        self._between = min(_SECONDS_BETWEEN_LOOKS, timeout / 8)
        self._ends = time.monotonic() + timeout - 2 * self._between
        self._unchecked: list[models.Finding] = []

    def findings(self) -> list[models.Finding]:
        try:
            runs = self._read(store.audit_runs(self._run_id))
        except TimeoutError:
            return [self._too_late("no run was looked at")]
        if self._run_id is not None and not runs:
            raise errors.RunNotFound(self._run_id)
        state = list(self._state(runs))
        looked_at = time.monotonic()
        found = [*state, *self._limits(), *self._orphans(), *self._items(runs)]
        self._ends += 2 * self._between
        kept = self._confirmed(state, looked_at)
        found = [one for one in found if one.kind not in _FLEETING or _key(one) in kept]
        return [*_in_order(found, runs), *self._unchecked]

    def _read(self, call: store.Call[Any]) -> Any:
        return self._auditor.read(call, self._ends - time.monotonic())

    def _state(self, runs: Sequence[int]) -> Iterator[models.Finding]:
        for first in range(0, len(runs), _RUNS_PER_CALL):
            some = runs[first : first + _RUNS_PER_CALL]
            try:
                yield from self._read(store.audit_state(some, self._auditor.lease))
            except TimeoutError:
                self._too_late(f"{len(runs) - first} of {len(runs)} runs were not looked at")
                return

    def _limits(self) -> list[models.Finding]:
        try:
            found: list[models.Finding] = self._read(store.audit_limits())
        except TimeoutError:
            self._too_late("nobody looked at the limits")
            return []
        return [one for one in found if self._run_id in (None, one.run_id)]

    def _orphans(self) -> list[models.Finding]:
        if self._run_id is not None:
            return []
        try:
            found: list[models.Finding] = self._read(store.audit_orphans())
        except TimeoutError:
            self._too_late("nobody looked for rows without a run")
            return []
        return found

    def _items(self, runs: Sequence[int]) -> Iterator[models.Finding]:
        for number, run_id in enumerate(runs):
            left = self._ends - time.monotonic()
            try:
                # It ends by itself a little before the server would end it.
                yield from self._read(store.audit_items(run_id, max(left - 0.5, left / 2)))
            except TimeoutError:
                self._too_late(f"the items of {len(runs) - number} of {len(runs)} runs")
                return

    def _confirmed(self, first: Iterable[models.Finding], looked_at: float) -> set[Any]:
        """Look a second time at what may have been a moment; return what is still there."""
        seen = [one for one in first if one.kind in _FLEETING]
        if not seen:
            return set()
        time.sleep(max(0.0, looked_at + self._between - time.monotonic()))
        runs = sorted({one.run_id for one in seen if one.run_id is not None})
        return set(map(_key, seen)) & set(map(_key, self._state(runs)))

    def _too_late(self, what: str) -> models.Finding:
        self._unchecked.append(
            models.Finding(
                run_id=self._run_id,
                kind=models.FindingKind.UNCHECKED,
                subject="runs",
                detail=f"the time was not enough: {what}",
                repairable=False,
            )
        )
        return self._unchecked[-1]


def _key(finding: models.Finding) -> tuple[int | None, models.FindingKind, str]:
    return finding.run_id, finding.kind, finding.subject


def _in_order(found: Iterable[models.Finding], runs: Sequence[int]) -> list[models.Finding]:
    """Return each once, run by run."""
    places = {run_id: place for place, run_id in enumerate(runs)}
    once = {_key(one): one for one in reversed(list(found))}
    return sorted(reversed(once.values()), key=lambda one: places.get(one.run_id or 0, len(places)))
