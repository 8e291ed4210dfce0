"""Staging a run straight from a program's own iterable: the caller plays the manager."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterable, Iterable
from types import TracebackType
from typing import Any, Self

from fanout_procrastinate import (
    database,
    error_records,
    errors,
    fanout,
    keeper,
    staging,
    store,
    sweeper,
)

_FENCE = 1


@dataclasses.dataclass(eq=False)
class Mapping:
    """Stage items while renewing the run, so that a slow source is not taken for a dead one.

    Args:
        owner: the app's `FanOut`.
        run_id: the run, just started.
        packer: checks the items and packs them.
    """

    owner: fanout.FanOut
    run_id: int
    packer: staging.Packer
    _database: database.Database | None = None
    _keeper: keeper.Keeper | None = None

    def __enter__(self) -> Self:
        configured = self.owner.settings
        self._database = database.Database(self.owner.connect, size=1)
        self._keeper = keeper.Keeper(
            self._database.run,
            lambda run: sweeper.Sweeper(run=run, lease=configured.lease),
            renew_interval=configured.renew_interval,
            sweep_interval=configured.sweep_interval,
        )
        self._keeper.add(
            keeper.Hold(
                renew_call=store.renew_manager(self.run_id, _FENCE),
                on_verdict=lambda verdict: None,
            )
        )
        self._keeper.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._keeper is not None and self._database is not None  # noqa: S101
        self._keeper.stop()
        try:
            if exc is not None and not isinstance(exc, errors.StaleManager):
                record = error_records.describe(exc)
                reason = f"listing its items failed: {record['type']}: {record['message']}"[:2000]
                self._database.run(
                    store.manager_fail(self.run_id, _FENCE, reason=reason, retry_in=None)
                )
        finally:
            self._database.close()

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # The loop goes on while the keeper ends.
        await asyncio.shield(asyncio.to_thread(self.__exit__, kind, exc, trace))

    def all(self, items: Iterable[Any]) -> None:
        """Stage everything and seal."""
        for chunk in self.packer.chunks(iter(items)):
            self._checked(self.owner.host.run(self._append(chunk)))
        self._checked(self.owner.host.run(store.seal(self.run_id, _FENCE)))

    async def all_async(self, items: Iterable[Any] | AsyncIterable[Any]) -> None:
        """Stage everything and seal."""
        run = self.owner.host.run_async
        if isinstance(items, AsyncIterable):
            async with staging.closed_at_the_end(aiter(items)) as source:
                async for value in source:
                    if chunk := self.packer.add(value):
                        self._checked(await run(self._append(chunk)))
            if rest := self.packer.rest():
                self._checked(await run(self._append(rest)))
        else:
            for chunk in self.packer.chunks(iter(items)):
                self._checked(await run(self._append(chunk)))
                await asyncio.sleep(0)
        self._checked(await run(store.seal(self.run_id, _FENCE)))

    def _append(self, chunk: staging.Chunk) -> store.Call[int | None]:
        return store.append(self.run_id, _FENCE, chunk.keys, chunk.payloads, chunk.lanes)

    def _checked(self, answer: Any) -> None:
        if answer is None:
            raise errors.StaleManager(self.run_id)
