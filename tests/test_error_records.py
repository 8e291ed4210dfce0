"""The stored record of an error: bounded, clean, and made whatever the error does."""

import asyncio
import json
import sys

import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fanout_procrastinate import error_records, errors, outcomes, sanitise
from fanout_procrastinate.error_records import describe

KEYS = {"type", "message", "traceback", "class", "rule", "truncated", "cleaned"}


def raised(exc):
    """Return the error with a traceback."""
    try:
        raise exc
    except BaseException as caught:  # noqa: BLE001 - any error is wanted
        return caught


def assert_sound(record, max_bytes=error_records.DEFAULT_ERROR_BYTES):
    assert set(record) == KEYS
    encoded = sanitise.encode(record)
    assert encoded.cleaned is False, "the record must be storable as it is"
    assert encoded.size <= max_bytes
    assert json.loads(encoded.text) == record


class Quiet(Exception):
    def __str__(self):
        raise RuntimeError("no text")


class Exiting(Exception):
    def __str__(self):
        raise SystemExit(3)

    __repr__ = __str__


class NotText(Exception):
    def __str__(self):
        return 3  # noqa: PLE0307 - the case under test


class Meta(type):
    def __getattribute__(cls, name):
        if name in ("__qualname__", "__module__", "__name__"):
            raise RuntimeError("no name")
        return super().__getattribute__(name)


class Nameless(Exception, metaclass=Meta):
    pass


class Liar(Exception):
    @property
    def __class__(self):
        raise RuntimeError("no class")

    @property
    def __traceback__(self):
        raise RuntimeError("no traceback")


def test_an_ordinary_error():
    record = describe(raised(ValueError("no pages")))
    assert_sound(record)
    assert record["type"] == "ValueError"
    assert record["message"] == "no pages"
    assert record["class"] == "permanent"
    assert record["rule"] == "type ValueError"
    assert record["traceback"].startswith("Traceback")
    assert record["traceback"].endswith("ValueError: no pages")
    assert record["truncated"] is record["cleaned"] is False


def test_names_foreign_types_in_full():
    assert describe(json.JSONDecodeError("x", "y", 0))["type"] == "json.decoder.JSONDecodeError"


def test_keeps_the_verdict_it_is_given():
    verdict = outcomes.Classification(False, 3.0, "declared ValueError")
    record = describe(ValueError(), classification=verdict)
    assert (record["class"], record["rule"]) == ("transient", "declared ValueError")


@pytest.mark.parametrize("text", ["a\x00b", "a\ud800b"])
def test_text_that_cannot_be_stored(text):
    """D05: an error message with a NUL."""
    record = describe(raised(RuntimeError(text)))
    assert_sound(record)
    assert record["message"] == "a\ufffdb"
    assert record["cleaned"] is True


@pytest.mark.parametrize("unit", ["x", "é", "😀", '"', "\n", "\x01", "\x00", "\ud800"])
@pytest.mark.parametrize("max_bytes", [1024, 16384])
def test_ten_million_characters(unit, max_bytes):
    """D07: the stored error is within its bytes, whatever JSON makes of the characters."""
    record = describe(raised(RuntimeError(unit * 10_000_000)), max_bytes=max_bytes)
    assert_sound(record, max_bytes)
    assert record["truncated"] is True
    assert record["message"].endswith(sanitise.CUT_MARK)


@given(st.text(max_size=3000), st.integers(0, 4000))
def test_any_message_within_any_size(text, max_bytes):
    assert_sound(describe(raised(RuntimeError(text)), max_bytes=max_bytes), max(max_bytes, 1024))


def test_a_traceback_of_five_thousand_frames_keeps_its_end():
    """D07."""

    def first(depth):
        return second(depth - 1) if depth else 1 / 0

    def second(depth):  # two functions, for a repeated frame is folded
        return first(depth - 1) if depth else 1 / 0

    before = sys.getrecursionlimit()
    sys.setrecursionlimit(7000)
    try:
        first(5000)
    except ZeroDivisionError as exc:
        record = describe(exc)
    finally:
        sys.setrecursionlimit(before)
    assert_sound(record)
    assert record["traceback"].endswith("ZeroDivisionError: division by zero")
    assert record["truncated"] is True


def test_endless_recursion():
    def again():
        again()

    with pytest.raises(RecursionError) as caught:
        again()
    assert_sound(describe(caught.value))


@pytest.mark.parametrize(
    "make",  # pytest itself would fall over some of the errors
    [
        Quiet,
        Exiting,
        NotText,
        Nameless,
        Liar,
        lambda: type("Odd\x01Name", (Exception,), {"__module__": "a\x00\ud800"})("x"),
        lambda: type("Long" * 50_000, (Exception,), {})("x"),
        lambda: type("Named", (Exception,), {"__module__": 3})("x"),
        KeyboardInterrupt,
        lambda: SystemExit("\x00"),
        GeneratorExit,
        asyncio.CancelledError,
        lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "\x00"),
        lambda: SyntaxError("bad", ("\x00.py", 1, 1, "\ud800", 1, 2)),
        lambda: OSError(2, "gone", "\udcff.pdf"),
        lambda: errors.ItemTooLarge(2, 1, position=3, key="k\x00"),
    ],
    ids=range(16),
)
def test_odd_errors(make):
    record = describe(raised(make()))
    assert_sound(record)
    assert isinstance(record["type"], str)
    assert record["type"]


def test_a_validation_error_of_pydantic():
    with pytest.raises(pydantic.ValidationError) as caught:
        pydantic.TypeAdapter(dict[str, int]).validate_python({str(n): "x" for n in range(5000)})
    record = describe(caught.value)
    assert_sound(record)
    assert record["type"].endswith("ValidationError")


def test_groups_and_chains_without_end():
    wide = ExceptionGroup("wide", [ValueError(n) for n in range(5000)])
    deep = ExceptionGroup("deep", [ValueError()])
    for _ in range(3000):
        deep = ExceptionGroup("deep", [deep])
    looping = RuntimeError("loop")
    looping.__cause__ = ExceptionGroup("loop", [looping])
    chain = ValueError("first")
    for n in range(2000):
        later = RuntimeError(n)
        later.__cause__ = chain
        chain = later
    for exc in (wide, deep, looping, chain):
        assert_sound(describe(raised(exc)))
