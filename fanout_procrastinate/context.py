"""What a child that asks for it is told about its item."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

from fanout_procrastinate import database, models, store

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

    def should_stop(self) -> bool:
        """Return whether to end soon: the run is being stopped, or the item was taken over."""
        return self._stopping

    def still_mine(self) -> bool:
        """Ask the database whether an outcome of this item would still be recorded.

        False once another worker has taken the item over, for this process was silent for longer
        than a lease.

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
        """Log a line with the item's ids."""
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

    async def log_async(self, message: str, **data: Any) -> None:
        """Log a line with the item's ids."""
        self.log(message, **data)

    def _told(self, verdict: str) -> None:
        self._stopping = True
