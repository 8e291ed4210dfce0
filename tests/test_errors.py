"""The tree of errors: what it contains, what it says, and that it survives pickling."""

import datetime
import decimal
import inspect
import math
import pickle

import pytest

from fanout_procrastinate import errors

SEVEN_DAYS = 7 * 86400.0
CLASSES = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, BaseException)
]


@pytest.mark.parametrize("kind", CLASSES)
def test_one_tree(kind):
    assert issubclass(kind, errors.FanoutError)
    assert kind.__doc__


EXAMPLES = [
    errors.ConfigurationError("queue: shorten it"),
    errors.SchemaError("the table fanout_runs is missing"),
    errors.RunNotFound(12),
    errors.RunClosed(12, "cancelled"),
    errors.RunKeyConflict("papers.extract", "monday"),
    errors.RunFailed("run 12 failed", progress={"failed": 3}),
    errors.WaitTimeout("run 12 is open after 5 s", progress={"pending": 3}),
    errors.LimitTimeout(("llm",), 5.0, "limit llm is full: 2 of 2"),
    errors.InvalidValue("does not fit"),
    errors.InvalidItem("does not fit", position=3, key="p-17"),
    errors.ItemTooLarge(70_000, 65_536, position=3, key="p-17"),
    errors.ResultTooLarge(2_000_000, 1_048_576),
    errors.ChildProcessDied(-11, 4711),
    errors.StaleManager(12),
    errors.DatabaseError("the server went away", sqlstate="57P01", transient=True),
    errors.PermanentError("corrupt", 3),
    errors.TransientError("busy", retry_in=30),
]


def test_examples_cover_the_tree():
    assert {type(example) for example in EXAMPLES} == set(CLASSES) - {errors.FanoutError}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: type(example).__name__)
def test_survives_pickling(example):
    copy = pickle.loads(pickle.dumps(example))  # noqa: S301 - our own bytes
    assert type(copy) is type(example)
    assert str(copy) == str(example)
    assert vars(copy) == vars(example)


@pytest.mark.parametrize("kind", CLASSES)
def test_can_be_built_without_arguments(kind):
    assert isinstance(str(kind()), str)


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (errors.SchemaError(), "fanout --app=... schema --apply"),
        (errors.RunClosed(1), "retry_failed()"),
        (errors.RunKeyConflict("papers.extract", "monday"), "if_closed="),
        (errors.ItemTooLarge(2, 1), "FanOut(max_item_bytes=)"),
        (errors.ResultTooLarge(2, 1), "FanOut(max_result_bytes=)"),
        (errors.InvalidItem("bad", position=3, key="p"), "item 3 (key 'p'): bad"),
        (errors.InvalidItem("bad"), "item: bad"),
    ],
)
def test_message_names_the_remedy_or_place(error, remedy):
    assert remedy in str(error)


def test_a_huge_key_does_not_flood_the_message():
    assert len(str(errors.InvalidItem("bad", position=0, key="k" * 1_000_000))) < 200


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (errors.WaitTimeout, TimeoutError),
        (errors.RunNotFound, LookupError),
        (errors.ConfigurationError, ValueError),
        (errors.InvalidItem, ValueError),
        (errors.InvalidValue, ValueError),
        (errors.ResultTooLarge, ValueError),
        (errors.ItemTooLarge, errors.InvalidItem),
    ],
)
def test_errors_are_what_users_expect_to_catch(kind, builtin):
    assert issubclass(kind, builtin)


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        (None, None),
        (30, 30.0),
        (0.5, 0.5),
        ("120", 120.0),
        (decimal.Decimal("1.5"), 1.5),
        (datetime.timedelta(minutes=1), 60.0),
        (-5, 0.0),
        (-math.inf, 0.0),
        (1e12, SEVEN_DAYS),
        (10**400, SEVEN_DAYS),
        (-(10**400), 0.0),
        (math.inf, SEVEN_DAYS),
        (math.nan, None),
        ("soon", None),
        (object(), None),
        ([1], None),
    ],
)
def test_retry_in_is_clamped_and_never_raises(given, seconds):
    """D03: a wait of -5 or 10^12 seconds is clamped."""
    assert errors.TransientError("busy", given).retry_in == seconds
