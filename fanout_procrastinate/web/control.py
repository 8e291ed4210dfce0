"""What a dashboard does to runs: cancel, pause, resume, retry, update."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fanout_procrastinate import errors, models, run
from fanout_procrastinate.web import failures

ACTIONS = ("cancel", "pause", "resume", "retry", "update")

_OPTIONS: dict[str, dict[str, Any]] = {
    "cancel": {"abort": bool, "reason": str},
    "pause": {},
    "resume": {},
    "retry": {"error_type": str},
    "update": {"max_in_flight": int, "tolerate": int | float, "priority": int, "deadline": float},
}
_LONGEST_REASON = 500
_MAY_BE_NONE = {"reason", "error_type", "tolerate", "deadline"}


async def act(one: run.Run, action: str, options: Mapping[str, Any]) -> int | None:
    """Do something to a run; returns how many items are tried again, if that was asked for.

    Raises:
        Refused: there is no such action, it does not take these options, or the run is closed and
            a closed run cannot take it.
        ConfigurationError: a value cannot work.
    """
    given = _checked(action, options)
    try:
        return await _done(one, action, given)
    except errors.RunClosed as exc:
        raise failures.Refused(await _closed_words(one, action, exc), 409) from exc


async def _closed_words(one: run.Run, action: str, exc: errors.RunClosed) -> str:
    closed = f"run {one.id} is closed ({exc.status})"
    if action == "retry":
        return f"{closed} for good; start a new run"
    remedy = ", or retry its failed items" if (await one.progress_async()).failed else ""
    return f"{closed} and cannot be changed; start a new run{remedy}"


async def _done(one: run.Run, action: str, given: Mapping[str, Any]) -> int | None:
    if action == "retry":
        return await one.retry_failed_async(**given)
    if action == "update":
        await one.update_async(**given)
        return None
    status = (await one.progress_async()).status
    # The wish of whoever cancels a cancelled run has come true.
    if status.closed and not (action == "cancel" and status is models.RunStatus.CANCELLED):
        raise errors.RunClosed(one.id, status)
    if action == "cancel":
        await one.cancel_async(**given)
    elif action == "pause":
        await one.pause_async()
    else:
        await one.resume_async()
    return None


def _checked(action: str, options: Mapping[str, Any]) -> dict[str, Any]:
    if action not in _OPTIONS:
        raise failures.Refused(f"there is no action {action!r}: {', '.join(ACTIONS)}", 404)
    known = _OPTIONS[action]
    for name, value in options.items():
        if name not in known:
            raise failures.Refused(f"{action} has no option {name!r}", 400)
        if value is None and name in _MAY_BE_NONE:
            continue
        wanted = known[name]
        accepted = int | float if wanted is float else wanted
        if not isinstance(value, accepted) or (isinstance(value, bool) and wanted is not bool):
            raise failures.Refused(f"{name}={value!r} is not what {action} takes", 400)
    if len(options.get("reason") or "") > _LONGEST_REASON:
        raise failures.Refused(f"reason: give at most {_LONGEST_REASON} characters", 400)
    if action == "update" and not options:
        raise failures.Refused(f"update what? give {', '.join(known)}", 400)
    return dict(options)
