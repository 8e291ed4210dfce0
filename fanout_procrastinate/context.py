"""What a child that asks for it is told about its item."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

from fanout_procrastinate import database, hints, limits, models, permits, store

logger = logging.getLogger(__name__)


@dataclasses.dataclass(eq=False, kw_only=True)
class ItemContext:
    """Tell a child about the item in hand.

    Args:
        run_id: the run.
        position: the item's place in the run, from 0.
        key: the item's key, where the manager gave one.
        attempt: 1 at the first try, and one more after each failed one.
        run_args: the arguments that the run was triggered with.
    """

    run_id: int
    position: int
    key: str | None
    attempt: int
    run_args: Mapping[str, Any]
    _database: database.Database | None = None
    _holding: models.Holding | None = None
    _claim: int = 0
    _stopping: bool = False
    _hints: hints.Sender | None = dataclasses.field(default_factory=hints.current.get)
    _permits: permits.Service | None = dataclasses.field(default_factory=permits.of_job)
    _permits_apart: permits.Apart | None = None

    def should_stop(self) -> bool:
        """Return whether to end soon: the run is being stopped, or the item was taken over."""
        return self._stopping

    def still_mine(self) -> bool:
        """Ask the database whether an outcome of this item would still be recorded.

        False once another worker has taken the item over, for this process was silent for too
        long.

        Raises:
            DatabaseError: the database did not answer.
        """
        if self._database is None or self._holding is None:
            return True
        return self._database.run(store.still_mine(self._holding, self.position, self._claim))

    async def still_mine_async(self) -> bool:
        """Ask without blocking the loop; otherwise like `still_mine`."""
        return await asyncio.get_running_loop().run_in_executor(None, self.still_mine)

    def log(self, message: str, **data: Any) -> None:
        """Log a line with the item's ids, and show it to whoever watches the run.

        Args:
            message: the line.
            **data: JSON that belongs to it.

        Watchers get at most 50 lines a second of each process, and long ones cut. The data passes
        through the app's ``redact`` on its way to them.
        """
        logger.info(
            message,
            extra={
                "action": "item_log",
                "run_id": self.run_id,
                "position": self.position,
                "item_key": self.key,
                "data": data,
            },
        )
        if self._hints is not None:
            self._hints.log(self.run_id, self.position, self.key, message, data)

    async def log_async(self, message: str, **data: Any) -> None:
        """Log a line with the item's ids; otherwise like `log`, which does not block either."""
        self.log(message, **data)

    def progress(self, fraction: float) -> None:
        """Show whoever watches the run how far this item is; nothing is stored.

        Args:
            fraction: from 0 to 1. Of several in a fifth of a second only the last is sent.

        Raises:
            ValueError: it is not.
        """
        checked = checked_fraction(fraction)
        if self._hints is not None:
            self._hints.progress(self.run_id, self.position, checked)

    async def progress_async(self, fraction: float) -> None:
        """Show how far this item is; otherwise like `progress`, which does not block either."""
        self.progress(fraction)

    def permit(
        self, *wanted: limits.Limit, key: str | None = None, timeout: float | None = None
    ) -> permits.Permit:
        """Return a permit of one or several limits, for a ``with`` or ``async with`` block.

        Use it where only a part of the work needs the resource; where all of it does, declare
        ``limits=`` of the child: then nothing waits in a worker's place. While it waits the item's
        time limit goes on. Several are taken together; one alone while another is held only in
        ascending order of their names.

        Args:
            *wanted: the limits.
            key: for a limit with a key: whose places are meant.
            timeout: seconds to wait; ``None`` = as long as it takes.

        Raises (when the block is entered):
            LimitTimeout: there was no room in time; the item is tried again.
            ConfigurationError: it could wait for ever for what others hold who wait for this item.
            DatabaseError: the database did not answer.

        Example:
            >>> async with context.permit(llm):  # doctest: +SKIP
            ...     answer = await ask(prompt)
        """
        return permits.Permit(
            self._permits,
            wanted,
            key=key,
            timeout=timeout,
            label=f"item {self.position}",
            run_id=self.run_id,
            position=self.position,
        )

    # -- for an isolated child, whose process asks

    async def permit_asked(self, name: str, params: dict[str, Any]) -> Any:
        """Answer the rows of a statement about permits."""
        if self._permits_apart is None:
            assert isinstance(self._permits, permits.Permits)  # noqa: S101 - a job has them
            self._permits_apart = permits.Apart(self._permits, self.run_id, self.position)
        return await self._permits_apart.ask(name, params)

    def permit_lost(self, holder: str) -> bool:
        """Return whether a permit of the process is held no more."""
        return self._permits_apart is None or self._permits_apart.is_lost(holder)

    async def permits_over(self) -> None:
        """Give back what the process has left."""
        if self._permits_apart is not None:
            await self._permits_apart.over()

    def _told(self, verdict: str) -> None:
        self._stopping = True


def checked_fraction(fraction: Any) -> float:
    """Return how far an item is, if that is a number from 0 to 1.

    Raises:
        ValueError: it is not.
    """
    try:
        fits = bool(0.0 <= fraction <= 1.0)
    except (TypeError, ValueError):  # it does not compare with numbers
        fits = False
    if not fits:
        raise ValueError(f"progress({fraction!r}): give a fraction from 0 to 1")
    return float(fraction)
