"""Limits as operators and other programs use them: see, change, pause; permits outside of children.

The part of `FanOut` that is about limits.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from fanout_procrastinate import (
    errors,
    host,
    hub,
    models,
    permits,
    steps,
    store,
)
from fanout_procrastinate import limits as limits_module

logger = logging.getLogger(__name__)

_KEPT: Any = object()


class LimitControl:
    """Give access to an app's limits; `FanOut` is one."""

    host: host.Host
    hub: hub.Hub
    own_permits: permits.OwnPermits

    def permit(
        self,
        *wanted: limits_module.Limit,
        key: str | None = None,
        timeout: float | None = None,
        label: str | None = None,
    ) -> permits.Permit:
        """Return a permit of one or several limits, for a ``with`` or ``async with`` block.

        For any code that has the app: a script, a web application, a plain job. Several limits are
        taken together; one alone while another is held only in ascending order of their names.

        Args:
            *wanted: the limits.
            key: for a limit with a key: whose places are meant.
            timeout: seconds to wait; ``None`` = as long as it takes.
            label: who that is, for people; by default the machine and the process.

        Raises (when the block is entered):
            LimitTimeout: there was no room in time.
            ConfigurationError: it could wait for ever for what others hold.
            DatabaseError: the database did not answer.

        Example:
            >>> with FanOut.of(app).permit(llm, timeout=30):  # doctest: +SKIP
            ...     answer = ask(prompt)
        """
        here = permits.here.get()
        if here is not None and here.permits.hub is self.hub:
            item = f"item {here.position}" if here.position is not None else permits.program()
            return permits.Permit(
                here.permits,
                wanted,
                key=key,
                timeout=timeout,
                label=label or item,
                run_id=here.run_id,
                position=here.position,
            )
        return permits.Permit(
            self.own_permits, wanted, key=key, timeout=timeout, label=label or permits.program()
        )

    def limits(self) -> list[models.LimitState]:
        """Return all limits that were ever declared to this database, by name, and who has each.

        A limit gets there with the first run, or permit, that uses it.

        Raises:
            SchemaError: the tables are missing.
            DatabaseError: the database did not answer.
        """
        return self.host.run(store.limits())

    async def limits_async(self) -> list[models.LimitState]:
        """Return all limits; otherwise like `limits`."""
        return await self.host.run_async(store.limits())

    def update_limit(
        self,
        limit: limits_module.Limit | str,
        *,
        concurrency: int | None = _KEPT,
        rate: float | None = _KEPT,
        per: float = _KEPT,
        burst: int = _KEPT,
    ) -> models.LimitState:
        """Change a limit, for all machines at once.

        It holds until the declaration in the code changes. Where there is more room now, it is
        filled at once; where there is less, what is at work ends its item first.

        Args:
            limit: the limit, or its name; ``max_running:`` and a task name for a child's own.
            concurrency: how many may have it at once; ``None`` = any number, 0 = nobody.
            rate: starts in `per` seconds; ``None`` = any number.
            per: seconds.
            burst: starts that may come at once.

        Raises:
            ConfigurationError: a value cannot work, or there is no such limit.
            DatabaseError: the database did not answer.
        """
        given = {"concurrency": concurrency, "rate": rate, "per": per, "burst": burst}
        return self.host.control(_updated(_name_of(limit), _checked(given)))

    async def update_limit_async(
        self,
        limit: limits_module.Limit | str,
        *,
        concurrency: int | None = _KEPT,
        rate: float | None = _KEPT,
        per: float = _KEPT,
        burst: int = _KEPT,
    ) -> models.LimitState:
        """Change a limit, for all machines at once; otherwise like `update_limit`."""
        given = {"concurrency": concurrency, "rate": rate, "per": per, "burst": burst}
        return await self.host.control_async(_updated(_name_of(limit), _checked(given)))

    def pause_limit(self, limit: limits_module.Limit | str, seconds: float) -> models.LimitState:
        """Let nothing begin with a limit for so long, on no machine; what has begun goes on.

        A longer pause stays as it is.

        Args:
            limit: the limit, or the name of one that is known.
            seconds: from now.

        Raises:
            ConfigurationError: the seconds are no number above 0, or there is no such limit.
            DatabaseError: the database did not answer.
        """
        return self.host.control(_paused(limit, limits_module.check_pause(seconds)))

    async def pause_limit_async(
        self, limit: limits_module.Limit | str, seconds: float
    ) -> models.LimitState:
        """Let nothing begin with a limit for so long; otherwise like `pause_limit`."""
        return await self.host.control_async(_paused(limit, limits_module.check_pause(seconds)))

    def resume_limit(self, limit: limits_module.Limit | str) -> models.LimitState:
        """End a limit's pause, and let begin what waits.

        Raises:
            ConfigurationError: there is no such limit.
            DatabaseError: the database did not answer.
        """
        return self.host.control(_resumed(_name_of(limit)))

    async def resume_limit_async(self, limit: limits_module.Limit | str) -> models.LimitState:
        """End a limit's pause; otherwise like `resume_limit`."""
        return await self.host.control_async(_resumed(_name_of(limit)))


def _name_of(limit: limits_module.Limit | str) -> str:
    return limit.name if isinstance(limit, limits_module.Limit) else limit


def _checked(given: Mapping[str, Any]) -> dict[str, Any]:
    changes = {name: value for name, value in given.items() if value is not _KEPT}
    if not changes:
        raise errors.ConfigurationError("change what? give concurrency=, rate=, per= or burst=")
    limits_module.check_concurrency(changes.get("concurrency"))
    for name in ("per", "burst"):
        if name in changes and changes[name] is None:
            raise errors.ConfigurationError(f"{name}=None: give a number above 0")
    limits_module.check_rate(changes.get("rate"), changes.get("per", 1.0), None)
    if "burst" in changes:
        limits_module.check_rate(1.0, 1.0, changes["burst"])
    elif changes.get("rate") is not None:
        changes["burst"] = limits_module.default_burst(changes["rate"])
    return changes


def _updated(name: str, changes: Mapping[str, Any]) -> steps.Steps[models.LimitState]:
    before = yield from _state(name)
    concurrency = changes.get("concurrency", before.concurrency)
    rate = changes.get("rate", before.rate)
    if before.keyed and (concurrency is None or rate is not None):
        raise errors.ConfigurationError(
            f"the limit {name!r} has a key: it takes a concurrency, and no rate"
        )
    yield store.update_limit(name, changes)
    logger.info(
        "Limit %s changed: %s",
        name,
        ", ".join(f"{key} {value}" for key, value in changes.items()),
        extra={"action": "update_limit", "limit": name, "changes": dict(changes)},
    )
    return (yield from _served(name))


def _paused(limit: limits_module.Limit | str, seconds: float) -> steps.Steps[models.LimitState]:
    name = _name_of(limit)
    if isinstance(limit, limits_module.Limit):
        yield store.pause_limit(limit.spec(), seconds)
    else:
        yield from _state(name)
        yield store.update_limit(name, pause=seconds)
    logger.info(
        "Limit %s paused for %g s",
        name,
        seconds,
        extra={"action": "pause_limit", "limit": name, "seconds": seconds},
    )
    return (yield from _state(name))


def _resumed(name: str) -> steps.Steps[models.LimitState]:
    yield from _state(name)
    yield store.update_limit(name, pause=0.0)
    logger.info("Limit %s resumed", name, extra={"action": "resume_limit", "limit": name})
    return (yield from _served(name))


def _served(name: str) -> steps.Steps[models.LimitState]:
    """Let in whoever waits for a permit, then deal to the runs, or end what is too much."""
    runs: list[int] = yield store.serve_lines(name)
    if not runs:
        state = yield from _state(name)
        runs = [use.run_id for use in state.holders if use.run_id is not None]
    for run_id in runs[:1]:
        yield from steps.pass_on(run_id)
    return (yield from _state(name))


def _state(name: str) -> steps.Steps[models.LimitState]:
    found: list[models.LimitState] = yield store.limits(name)
    if not found:
        raise errors.ConfigurationError(
            f"there is no limit {name!r} in this database; it gets there with the first run, or "
            "permit, that uses it"
        )
    return found[0]
