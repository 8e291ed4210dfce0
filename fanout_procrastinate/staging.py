"""Turning what a manager lists into staged items: checked, keyed, in chunks, with flat memory."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Any

from fanout_procrastinate import codec, errors, limits, sanitise

MAX_KEY_BYTES = 1000
"""The longest item key, in bytes of UTF-8: a B-tree entry holds 2,704."""

_MAX_CHUNK_BYTES = 2**21


@dataclasses.dataclass
class Chunk:
    """Items that are staged in one statement."""

    keys: list[str | None] = dataclasses.field(default_factory=list)
    lanes: list[str] | None = None
    payloads: list[str] = dataclasses.field(default_factory=list)
    size: int = 0


@dataclasses.dataclass(kw_only=True)
class Packer:
    """Check items and pack them into chunks.

    Args:
        items: the child's item codec.
        item_key: item -> key, or ``None``.
        key_limit: the limit by a key of the item, if the child has one.
        max_item_bytes: the most that an item may have, as bytes of UTF-8 JSON.
        chunk_size: items per chunk.
        chunk_seconds: a chunk that took this long to fill is sent as it is.
    """

    items: codec.Codec
    item_key: Callable[[Any], str] | None
    max_item_bytes: int
    chunk_size: int
    chunk_seconds: float
    key_limit: limits.Limit | None = None
    listed: int = 0
    _chunk: Chunk = dataclasses.field(default_factory=Chunk)
    _opened: float = dataclasses.field(default_factory=time.monotonic)

    def add(self, value: Any) -> Chunk | None:
        """Take one item; answers a chunk when one is full.

        Raises:
            InvalidItem: it does not fit the child, or its key cannot be one.
            ItemTooLarge: it has more than `max_item_bytes`.
        """
        key = None
        try:
            valid = self.items.validate(value)
            key = self._key(valid)
            lane = self.key_limit.key_of(valid) if self.key_limit else None
            payload = self.items.dump_item(valid)
        except errors.InvalidValue as exc:
            raise errors.InvalidItem(str(exc), position=self.listed, key=key) from exc
        size = sanitise.json_size(payload)
        if size > self.max_item_bytes:
            raise errors.ItemTooLarge(size, self.max_item_bytes, position=self.listed, key=key)
        self.listed += 1
        self._chunk.keys.append(key)
        if lane is not None:
            self._chunk.lanes = [*(self._chunk.lanes or ()), lane]
        self._chunk.payloads.append(payload)
        self._chunk.size += size
        if (
            len(self._chunk.keys) >= self.chunk_size
            or self._chunk.size >= _MAX_CHUNK_BYTES
            or time.monotonic() - self._opened >= self.chunk_seconds
        ):
            return self.rest()
        return None

    def rest(self) -> Chunk | None:
        """Return what is not sent yet."""
        chunk, self._chunk = self._chunk, Chunk()
        self._opened = time.monotonic()
        return chunk if chunk.keys else None

    def chunks(self, values: Iterator[Any]) -> Iterator[Chunk]:
        """Pack a whole iterator; a generator is closed at once where the listing breaks off."""
        try:
            for value in values:
                if chunk := self.add(value):
                    yield chunk
        except BaseException:
            if inspect.isgenerator(values):
                with contextlib.suppress(Exception):  # it must not hide why the listing broke off
                    values.close()
            raise
        if chunk := self.rest():
            yield chunk

    def _key(self, item: Any) -> str | None:
        if self.item_key is None:
            return None
        key: object
        try:
            key = self.item_key(item)
        except Exception as exc:  # item_key is the user's code
            raise errors.InvalidItem(
                f"item_key raised {type(exc).__name__}: {exc}", position=self.listed
            ) from exc
        if not isinstance(key, str):
            raise errors.InvalidItem(
                f"its key {key!r} is no str; let item_key return one", position=self.listed
            )
        if sanitise.clean_text(key) != key:
            raise errors.InvalidItem(
                "its key contains a NUL character or a lone surrogate", position=self.listed
            )
        if len(key.encode()) > MAX_KEY_BYTES:
            raise errors.InvalidItem(
                f"its key is longer than {MAX_KEY_BYTES} bytes; use a short id, or a digest",
                position=self.listed,
                key=key,
            )
        return key


def is_iterable(value: Any) -> bool:
    """Return whether ``iter`` takes it: also what has only items by number, ``__getitem__``."""
    if isinstance(value, Iterable):
        return True
    try:
        iter(value)  # without `__iter__` this calls nothing of the user's
    except TypeError:
        return False
    return True


@contextlib.asynccontextmanager
async def closed_at_the_end(iterator: AsyncIterator[Any]) -> AsyncIterator[AsyncIterator[Any]]:
    """Close a generator at once where the listing breaks off, not when it is collected."""
    try:
        yield iterator
    except BaseException:
        if inspect.isasyncgen(iterator):
            with contextlib.suppress(Exception):  # it must not hide why the listing broke off
                await iterator.aclose()
        raise
