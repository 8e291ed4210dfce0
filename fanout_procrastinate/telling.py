"""What one subscriber is told of a run, from one reading to the next."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping

from fanout_procrastinate import database, models, store, subscriptions

_LAST_HINTS_SECONDS = 0.3  # workers send the last ones a fifth of a second after the close
_REMEMBERED = 10_000


def advance(
    own: database.Database,
    one: subscriptions.Subscription,
    progress: models.Progress,
    items: Mapping[int, float],
) -> bool:
    """Tell one subscriber how far a run is, and each close that he has not been told of.

    Returns false where he is to be told again soon: the last hints of a run that has just closed
    are on their way.
    """
    run_id = progress.run_id
    seen = one.seen.get(run_id)
    if seen is None:
        seen = one.seen[run_id] = subscriptions.Seen(progress.generation)
        while len(one.seen) > _REMEMBERED:
            one.seen.popitem(last=False)
    _tell_missed(own, one, seen, progress)
    if seen.closed:
        return True
    state, before = dataclasses.replace(progress, rate=0.0), seen.state
    if state != before or items:
        seen.state = state
        _put(one, progress, items)
    if progress.closed:
        if before is not None and seen.closing_since is None and one.waits_for_hints:
            seen.closing_since = time.monotonic()
        if time.monotonic() - (seen.closing_since or 0.0) < _LAST_HINTS_SECONDS:
            return False
        seen.closed, seen.closing_since = True, None
        _put_closed(one, progress)
    return True


def _tell_missed(
    own: database.Database,
    one: subscriptions.Subscription,
    seen: subscriptions.Seen,
    progress: models.Progress,
) -> None:
    """Tell the closes of earlier generations, of a run that was opened again meanwhile."""
    while seen.generation < progress.generation:
        if not seen.closed:
            frozen = own.run(store.closed_progress(progress.run_id, seen.generation))
            if frozen is not None:
                _put(one, frozen, {})
                _put_closed(one, frozen)
        seen.generation, seen.closed = seen.generation + 1, False
        seen.closing_since = None


def _put(
    one: subscriptions.Subscription, progress: models.Progress, items: Mapping[int, float]
) -> None:
    if one.wants(progress.run_id, "progress"):
        data = {"progress": progress, "items": dict(items)}
        one.put(
            subscriptions.Event(
                run_id=progress.run_id, kind="progress", data=data, at=subscriptions.now()
            )
        )


def _put_closed(one: subscriptions.Subscription, progress: models.Progress) -> None:
    if one.wants(progress.run_id, "closed"):
        data = {
            "status": str(progress.status),
            "generation": progress.generation,
            "reason": progress.reason,
            "progress": progress,
        }
        one.put(
            subscriptions.Event(
                run_id=progress.run_id,
                kind="closed",
                data=data,
                at=progress.closed_at or subscriptions.now(),
            )
        )
