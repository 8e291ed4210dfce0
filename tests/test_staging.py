"""Packing what a manager lists: checked, keyed, in chunks."""

import dataclasses
import time
from typing import Any

import pytest

from fanout_procrastinate import InvalidItem, ItemTooLarge, codec, staging
from fanout_procrastinate.staging import Packer


@dataclasses.dataclass
class Paper:
    id: Any
    pages: int = 1


def packer(annotation: Any = Any, **options: Any) -> Packer:
    given = {
        "item_key": None,
        "max_item_bytes": 1000,
        "chunk_size": 3,
        "chunk_seconds": 60.0,
    } | options
    return Packer(items=codec.Codec(annotation), **given)


def test_chunks_have_the_size_asked_for() -> None:
    chunks = list(packer(int).chunks(iter(range(8))))
    assert [chunk.payloads for chunk in chunks] == [
        ["0", "1", "2"],
        ["3", "4", "5"],
        ["6", "7"],
    ]
    assert [chunk.keys for chunk in chunks] == [[None] * 3, [None] * 3, [None] * 2]
    assert [len(chunk.payloads) for chunk in packer(chunk_size=1).chunks(iter("ab"))] == [1, 1]
    assert list(packer().chunks(iter([]))) == []


def test_chunks_are_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "_MAX_CHUNK_BYTES", 100)
    # A character may take several bytes.
    chunks = list(packer(str, chunk_size=1000).chunks(iter(["é" * 20] * 5)))
    assert [len(chunk.payloads) for chunk in chunks] == [3, 2]
    assert chunks[0].size == 3 * 42


def test_slow_source_is_sent_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    slow = packer(int, chunk_size=1000, chunk_seconds=10.0)
    slow._opened = 0.0
    assert slow.add(1) is None
    now[0] = 9.0
    assert slow.add(2) is None
    now[0] = 10.0
    chunk = slow.add(3)
    assert chunk is not None and chunk.payloads == ["1", "2", "3"]
    now[0] = 19.0
    assert slow.add(4) is None and slow.rest() is not None and slow.rest() is None


def test_items_are_validated_and_keyed_as_the_child_sees_them() -> None:
    pack = packer(Paper, item_key=lambda paper: f"p{paper.id}")
    (chunk,) = pack.chunks(iter([{"id": 1, "pages": "7"}, Paper(2)]))
    assert chunk.keys == ["p1", "p2"]
    assert chunk.payloads == ['{"id":1,"pages":7}', '{"id":2,"pages":1}']


def refused(pack: Packer, *values: Any) -> InvalidItem:
    with pytest.raises(InvalidItem) as got:
        list(pack.chunks(iter(values)))
    return got.value


def test_invalid_item_is_named_with_its_reason() -> None:
    exc = refused(packer(Paper), Paper(0), {"id": 1, "pages": "many"})
    assert str(exc) == (
        "item 1: does not fit Paper: pages: Input should be a valid integer, unable to parse "
        "string as an integer"
    )
    assert (exc.position, exc.key) == (1, None)


def test_item_that_cannot_be_stored_is_named_with_its_key() -> None:
    keyed = packer(Paper, item_key=lambda paper: f"p{paper.pages}")
    for bad, words in (
        ("a\0b", "NUL character"),
        (float("nan"), "NaN"),
        (object(), "cannot become JSON"),
        ("\ud800", "surrogate"),
    ):
        exc = refused(dataclasses.replace(keyed), Paper(bad, 5))
        assert str(exc).startswith("item 0 (key 'p5'): ") and words in str(exc)
        assert (exc.position, exc.key) == (0, "p5")


def test_item_has_a_largest_size() -> None:
    pack = packer(str, max_item_bytes=10, item_key=lambda item: item[:2])
    exc = refused(pack, "12345678", "é" * 5)
    assert isinstance(exc, ItemTooLarge) and (exc.size, exc.limit) == (12, 10)
    assert str(exc).startswith("item 1 (key 'éé'): 12 bytes of JSON, 10 are allowed; give the")


def test_keys_are_checked() -> None:
    def keyed(key: Any) -> Packer:
        return packer(Any, item_key=lambda _: key)

    for key, words in (
        (7, "its key 7 is no str; let item_key return one"),
        (None, "its key None is no str"),
        (b"k", "is no str"),
        ("a\0b", "its key contains a NUL"),
        ("\ud800", "lone surrogate"),
        ("é" * 501, "its key is longer than 1000 bytes; use a short id, or a digest"),
        ("k" * 10**6, "longer than 1000 bytes"),
    ):
        assert words in str(refused(keyed(key), 1))
    for key in ("", "é" * 500, "with \\u0000 in it", "4" * 999):
        (chunk,) = keyed(key).chunks(iter([1]))
        assert chunk.keys == [key]


def test_item_key_that_raises_is_named() -> None:
    exc = refused(packer(dict, item_key=lambda item: item["id"]), {"id": "a"}, {})
    assert str(exc) == "item 1: item_key raised KeyError: 'id'"
    assert isinstance(exc.__cause__, KeyError)


def test_positions_count_what_was_listed() -> None:
    pack = packer(int)
    for value in range(5):
        pack.add(value)
    assert pack.listed == 5
    assert refused(pack, "x").position == 5
