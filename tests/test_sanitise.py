"""Whatever the value: JSON text that PostgreSQL stores and Python reads back."""

import collections
import decimal
import enum
import json
import math
import sys

import psycopg
import pydantic_core
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fanout_procrastinate import sanitise
from fanout_procrastinate.sanitise import clean, cut_text, encode

anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters() | st.sampled_from("\x00\ud800\udfff\\u0000"))
    | st.binary()
    | st.builds(object),
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(), inner
        )
    ),
    max_leaves=20,
)
storable_text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"))
plain_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | storable_text,
    lambda inner: st.lists(inner) | st.dictionaries(storable_text, inner),
    max_leaves=20,
)


def texts_in(value):
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for member in value:
            yield from texts_in(member)
    elif isinstance(value, dict):
        for key, member in value.items():
            yield key
            yield from texts_in(member)


def refuse(constant):
    raise AssertionError(f"{constant} is no JSON")


def assert_storable(text):
    parsed = json.loads(text.encode(), parse_constant=refuse)  # encoding refuses surrogates
    assert not any("\x00" in each for each in texts_in(parsed))
    pydantic_core.from_json(text)
    return parsed


class Shout(str):
    __slots__ = ()

    def __str__(self):
        raise RuntimeError("never asked")


class Colour(enum.StrEnum):
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


class Hostile:
    __hash__ = object.__hash__

    @property
    def __class__(self):
        raise RuntimeError("no class")

    def __repr__(self):
        raise SystemExit(3)


class HostileDict(dict):
    def items(self):
        raise RuntimeError("never asked")

    __iter__ = keys = values = items


def nested(depth, kind=list):
    value = kind()
    for _ in range(depth - 1):
        value = [value] if kind is list else {"a": value}
    return value


class TestEncode:
    """D05: recording an outcome cannot fail because of its text."""

    @given(anything)
    def test_storable_whatever_it_is(self, value):
        assert_storable(encode(value).text)

    @given(plain_json)
    def test_plain_json_is_kept(self, value):
        encoded = encode(value)
        assert json.loads(encoded.text) == value
        assert not encoded.cleaned
        assert clean(value) == (value, False)

    @given(anything)
    def test_cleaning_twice_changes_nothing(self, value):
        once, _ = clean(value)
        assert clean(once) == (once, False)

    @pytest.mark.parametrize(
        ("value", "text", "cleaned"),
        [
            ({"x": math.nan, "k\x00": math.inf}, '{"k\ufffd":null,"x":null}', True),
            ("a\x00b", '"a\ufffdb"', True),
            ("\ud800", '"\ufffd"', True),
            ({"\udcff": ["\x00"]}, '{"\ufffd":["\ufffd"]}', True),
            (-math.inf, "null", True),
            ("\\u0000", '"\\\\u0000"', False),
            ("\\\x00", '"\\\\\ufffd"', True),
            ("NaN", '"NaN"', False),
            ({"b": 1, "a": (2, 3)}, '{"a":[2,3],"b":1}', False),
            ("é😀", '"é😀"', False),
            ("\x01\n", '"\\u0001\\n"', False),
            ({1: "x"}, '{"1":"x"}', False),
            ({True: 1, None: 2}, '{"null":2,"true":1}', False),
            (10**300, str(10**300), False),
            (1e308, "1e+308", False),
            ({Colour.RED: Level.HIGH}, '{"red":3}', False),
            ({3}, "[3]", True),
            (object, "\"<class 'object'>\"", True),
            (b"\xff", "\"b'\\\\xff'\"", True),
        ],
        ids=repr,
    )
    def test_examples(self, value, text, cleaned):
        assert encode(value) == sanitise.Encoded(text, cleaned)

    @pytest.mark.parametrize(
        "make",  # pytest itself would fall over some of the values
        [
            Hostile,
            lambda: [Hostile()],
            lambda: {"a": Hostile()},
            lambda: {Hostile(): 1},
            lambda: HostileDict(a=1),
            lambda: Shout("\x00"),
            lambda: collections.UserDict(a=1),
            type("NoRepr", (), {"__repr__": lambda self: 3}),
            lambda: (each for each in "ab"),
        ],
        ids=range(9),
    )
    def test_hostile_objects(self, make):
        assert_storable(encode(make()).text)

    def test_subclasses_do_not_hide_their_contents(self):
        assert clean(HostileDict(a=Shout("x\x00"))) == ({"a": "x\ufffd"}, True)

    def test_size_is_bytes_of_utf8(self):
        assert encode("é").size == 4
        assert sanitise.json_size("a") == 1
        assert sanitise.json_size("\ud800") == 3

    def test_equal_values_give_equal_texts(self):
        assert encode({"a": 1, "b": 2}) == encode({"b": 2, "a": 1})


@pytest.fixture(scope="module")
def stored(server):
    """Call it with JSON text to learn what the server makes of it."""
    with psycopg.connect(server.dsn, autocommit=True) as connection:
        yield lambda text: connection.execute("SELECT %s::jsonb::text", [text]).fetchone()[0]


def exact(text):
    """Parse JSON with exact numbers: jsonb writes 1e+20 with all its zeros."""
    return json.loads(text, parse_int=decimal.Decimal, parse_float=decimal.Decimal)


class TestPostgreSQL:
    """D05: what the server really says to the text."""

    @given(value=anything)
    def test_takes_and_returns_whatever_is_encoded(self, stored, value):
        text = encode(value).text
        assert exact(stored(text)) == exact(text)

    @pytest.mark.parametrize(
        "value",
        [{"x": math.nan, "k\x00": math.inf}, "\ud800", 10**140_000, 10**4299, 1e308, 5e-324],
        ids=range(6),
    )
    def test_takes_the_known_offenders(self, stored, value):
        text = encode(value).text
        assert exact(stored(text)) == exact(text)

    def test_takes_the_deepest_nesting(self, stored):
        value = nested(200, dict)
        assert json.loads(stored(encode(value).text)) == value


class TestNumbers:
    @pytest.mark.parametrize("digits", [4301, 5000, 140_000])
    def test_integers_that_python_would_not_read_back(self, digits):
        for number in (10**digits, -(10**digits)):
            encoded = encode([number])
            assert encoded.cleaned
            assert_storable(encoded.text)
            assert "digits]" in encoded.text

    def test_also_where_the_process_has_lifted_the_limit(self):
        before = sys.get_int_max_str_digits()
        sys.set_int_max_str_digits(0)
        try:
            encoded = encode([10**140_000])
        finally:
            sys.set_int_max_str_digits(before)
        assert encoded.cleaned
        assert_storable(encoded.text)

    def test_the_last_resort_where_the_process_has_lowered_the_limit(self):
        before = sys.get_int_max_str_digits()
        sys.set_int_max_str_digits(640)
        try:
            assert encode([10**1000]) == sanitise.Encoded(f'"{sanitise.UNREADABLE}"', True)
        finally:
            sys.set_int_max_str_digits(before)

    def test_long_runs_of_digits_in_text_are_text(self):
        assert encode("7" * 10_000) == sanitise.Encoded(f'"{"7" * 10_000}"')

    def test_largest_integer_that_is_kept(self):
        number = 10**4299
        assert json.loads(encode(number).text) == number


class TestShape:
    @pytest.mark.parametrize("kind", [list, dict])
    @pytest.mark.parametrize("depth", [1, 199, 200])
    def test_depth_that_is_kept(self, kind, depth):
        value = nested(depth, kind)
        assert encode(value).cleaned is False
        assert json.loads(encode(value).text) == value

    @pytest.mark.parametrize("kind", [list, dict])
    @pytest.mark.parametrize("depth", [202, 500, 50_000])
    def test_depth_that_is_cut(self, kind, depth):
        encoded = encode(nested(depth, kind))
        assert encoded.cleaned
        assert_storable(encoded.text)
        assert "[nested too deep]" in encoded.text

    def test_many_brackets_are_not_depth(self):
        value = [[[]]] * 1000
        assert encode(value).cleaned is False

    def test_cycles(self):
        ring = {"name": "ring"}
        ring["self"] = [ring, {"again": ring}]
        text = encode(ring).text
        assert json.loads(text) == {"name": "ring", "self": ["[cycle]", {"again": "[cycle]"}]}

    def test_shared_parts_are_no_cycles(self):
        part = [1]
        assert encode([part, part, "\x00"]).text == '[[1],[1],"\ufffd"]'

    def test_near_the_end_of_the_stack(self):
        def deeper(levels):
            return encode([[["\x00"]]]) if levels == 0 else deeper(levels - 1)

        used = 0
        frame = sys._getframe()
        while frame is not None:
            used, frame = used + 1, frame.f_back
        for spare in range(40):
            encoded = None
            try:
                encoded = deeper(sys.getrecursionlimit() - used - 40 + spare)
            except RecursionError:
                break  # the call itself no longer fitted
            assert encoded.cleaned
            assert_storable(encoded.text)


class TestKeys:
    """No value is lost when two keys become one."""

    @pytest.mark.parametrize(
        ("value", "expected"),
        [
            ({1: "a", "1": "b"}, {"1": "a", "1~2": "b"}),
            ({"\x00": 1, "\ufffd": 2}, {"\ufffd": 1, "\ufffd~2": 2}),
            ({"\x00": 1, chr(0xD800): 2, "x": 3}, {"\ufffd": 1, "\ufffd~2": 2, "x": 3}),
            ({None: 1, "null": 2}, {"null": 1, "null~2": 2}),
            ({True: 1, "true": 2}, {"true": 1, "true~2": 2}),
            ({1.5: 1, "1.5": 2}, {"1.5": 1, "1.5~2": 2}),
            ({"a~2": 0, "a\x00": 1}, {"a~2": 0, "a\ufffd": 1}),
            ({1: 0, "1~2": 1, "1": 2}, {"1": 0, "1~2": 1, "1~3": 2}),
        ],
        ids=repr,
    )
    def test_clashes_get_a_suffix(self, value, expected):
        encoded = encode(value)
        assert json.loads(encoded.text) == expected
        assert encoded.cleaned is (list(value) != list(expected))

    @given(st.lists(st.text(st.sampled_from("a\x00\ud800\ufffd~2")), unique=True))
    def test_as_many_values_come_out(self, keys):
        assert len(json.loads(encode(dict.fromkeys(keys)).text)) == len(keys)

    def test_many_clashes_take_no_square_time(self):
        value = {"\ud800" * 3 + chr(0xD800 + n % 2048) + "\x00": n for n in range(2048)}
        assert len(clean(value)[0]) == 2048

    def test_objects_as_keys(self):
        assert clean({(1, 2): "x"}) == ({"(1, 2)": "x"}, True)


def test_keep_objects_leaves_what_another_encoder_knows():
    thing = object()
    assert clean([thing, "\x00"], keep_objects=True) == ([thing, "\ufffd"], True)


class TestCutText:
    """D07: cut at a character boundary, with a marker."""

    def test_what_fits_is_kept(self):
        assert cut_text("abc", 3) == ("abc", False)
        assert cut_text("", 0) == ("", False)

    @pytest.mark.parametrize("keep_end", [False, True])
    def test_ten_megabytes(self, keep_end):
        text, was_cut = cut_text("é" * 5_000_000, 1000, keep_end=keep_end)
        assert was_cut
        assert 990 <= sanitise.json_size(text) <= 1000
        assert sanitise.CUT_MARK in text

    @given(st.text(st.characters(exclude_categories=["Cs"])), st.integers(0, 40), st.booleans())
    def test_properties(self, text, limit, keep_end):
        cut, was_cut = cut_text(text, limit, keep_end=keep_end)
        inside_json = json.dumps(cut, ensure_ascii=False)[1:-1]
        assert len(inside_json.encode()) <= limit
        assert was_cut is (cut != text)
        if was_cut and cut:
            kept = (
                cut.removeprefix(sanitise.CUT_MARK)
                if keep_end
                else cut.removesuffix(sanitise.CUT_MARK)
            )
            assert text.endswith(kept) if keep_end else text.startswith(kept)
