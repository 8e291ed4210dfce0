"""Which errors are tried again, and when: the rules as a table, backoff as properties."""

import asyncio
import concurrent.futures
import io
import json
import math
import ssl
import subprocess
import urllib.error
import zipfile
from functools import partial

import httpx
import procrastinate.exceptions
import psycopg
import psycopg_pool
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fanout_procrastinate import errors, outcomes
from fanout_procrastinate.outcomes import Backoff, classify

REQUEST = httpx.Request("GET", "https://api.example")


class ApiError(Exception):
    def __init__(self, status=None, headers=None):
        super().__init__(status)
        self.status = status
        self.headers = headers or {}


class RateLimit(Exception):
    pass


class OddValue(ValueError):
    pass


def made_by(function, *args, **kwargs):
    """Return the error that a call really raises."""
    try:
        function(*args, **kwargs)
    except BaseException as exc:  # noqa: BLE001 - any error is wanted
        return exc
    raise AssertionError("it did not raise")


def caused(exc, cause):
    exc.__cause__ = cause
    return exc


PERMANENT = [
    *(ApiError(status) for status in (400, 401, 403, 404, 405, 409, 410, 413, 422, 451, 499)),
    FileNotFoundError("a.pdf"),
    IsADirectoryError(),
    NotADirectoryError(),
    PermissionError(),
    made_by(open, "/nowhere/at/all"),
    ValueError("bad"),
    OddValue("a subclass of a listed class"),
    TypeError(),
    AttributeError(),
    LookupError(),
    KeyError("id"),
    IndexError(),
    NotImplementedError(),
    AssertionError(),
    made_by(json.loads, "{"),
    made_by(bytes.decode, b"\xff"),
    made_by(str.encode, "\ud800"),
    made_by(pydantic.TypeAdapter(int).validate_python, "x"),
    errors.PermanentError("corrupt"),
    errors.InvalidValue("result does not fit"),
    errors.ResultTooLarge(2, 1),
    errors.ConfigurationError("no such type"),
    errors.RunNotFound(3),
]

TRANSIENT_BY_RULE = [
    *(ApiError(status) for status in (408, 425, 429, 500, 502, 503, 504, 529, 599)),
    ConnectionError(),
    ConnectionResetError(),
    ConnectionRefusedError(),
    BrokenPipeError(),
    TimeoutError(),
    concurrent.futures.TimeoutError(),
    BlockingIOError(),
    OSError("no space left"),
    io.UnsupportedOperation("an OSError before it is a ValueError"),
    ssl.SSLError(),
    ssl.SSLCertVerificationError(),
    urllib.error.URLError("no route"),
    type("RequestException", (OSError,), {})(),  # as of requests
    psycopg.OperationalError(),
    psycopg.InterfaceError(),
    psycopg.errors.SerializationFailure(),
    psycopg_pool.PoolTimeout(),
    procrastinate.exceptions.ConnectorException(),
    errors.DatabaseError("gone", transient=True),
    errors.WaitTimeout(),
    errors.TransientError("busy"),
]

BY_DEFAULT = [
    Exception("?"),
    RuntimeError(),
    RecursionError(),
    MemoryError(),
    EOFError(),
    StopIteration(),
    zipfile.BadZipFile(),
    subprocess.CalledProcessError(1, "pdftotext"),
    asyncio.IncompleteReadError(b"", 3),
    asyncio.CancelledError(),
    SystemExit(1),
    SystemExit(404),
    KeyboardInterrupt(),
    GeneratorExit(),
    httpx.ConnectTimeout("slow"),  # no OSError, and yet it must be tried again
    httpx.ReadError("cut"),
    httpx.RemoteProtocolError("cut"),
    ApiError(None),
    ApiError(200),
    ApiError(302),
    psycopg.errors.UniqueViolation(),
    errors.DatabaseError("refused"),
    errors.RunClosed(3),
]


def name_of(exc):
    return f"{type(exc).__name__}-{exc}"[:40]


class TestTable:
    """D03: stated classes and a safe default."""

    @pytest.mark.parametrize("exc", PERMANENT, ids=name_of)
    def test_permanent(self, exc):
        assert classify(exc).permanent
        assert classify(exc).name == "permanent"
        assert classify(exc).rule != outcomes.DEFAULT_RULE

    @pytest.mark.parametrize("exc", TRANSIENT_BY_RULE, ids=name_of)
    def test_transient(self, exc):
        assert not classify(exc).permanent
        assert classify(exc).name == "transient"
        assert classify(exc).rule != outcomes.DEFAULT_RULE

    @pytest.mark.parametrize("exc", BY_DEFAULT, ids=name_of)
    def test_anything_else_is_transient(self, exc):
        """D02: also what is no Exception: cancellation, exits, generators closed."""
        assert classify(exc) == outcomes.Classification(permanent=False, rule="default")

    @pytest.mark.parametrize(
        ("exc", "rule"),
        [
            (ApiError(404), "status 404"),
            (OddValue(), "type ValueError"),
            (ConnectionResetError(), "type ConnectionError"),
            (errors.PermanentError(), "raised PermanentError"),
            (errors.TransientError(), "raised TransientError"),
        ],
        ids=name_of,
    )
    def test_names_its_rule(self, exc, rule):
        assert classify(exc).rule == rule


class TestDeclared:
    """D03: what the user declares comes before the tables."""

    def test_before_status_and_type(self):
        assert classify(ApiError(503), permanent=(ApiError,)).permanent
        assert not classify(KeyError(), transient=(KeyError,)).permanent
        assert classify(KeyError(), transient=(LookupError,)).rule == "declared LookupError"

    def test_after_what_is_raised_on_purpose(self):
        declared = {"permanent": (Exception,), "transient": ()}
        assert not classify(errors.TransientError(), **declared).permanent
        assert classify(errors.PermanentError(), transient=(Exception,)).permanent

    @pytest.mark.parametrize("general_first", [True, False])
    def test_the_most_derived_type_wins(self, general_first):
        general, special = ((OSError,), (ConnectionError,))
        if general_first:
            found = classify(ConnectionResetError(), permanent=general, transient=special)
        else:
            found = classify(ConnectionResetError(), permanent=special, transient=general)
        assert found.rule == "declared ConnectionError"
        assert found.permanent is not general_first

    def test_permanent_wins_for_equals(self):
        assert classify(KeyError(), permanent=(KeyError,), transient=(KeyError,)).permanent

    def test_base_exceptions_may_be_declared(self):
        assert classify(SystemExit(2), permanent=(SystemExit,)).permanent

    def test_honours_retry_after_of_a_declared_transient_error(self):
        exc = ApiError(403, {"Retry-After": "9"})
        assert classify(exc, transient=(ApiError,)).retry_in == 9.0


class TestChain:
    """The nearest along `__cause__` that a rule fits decides."""

    def test_a_cause_decides_for_an_exception_without_a_rule(self):
        assert classify(caused(RuntimeError(), ValueError())).rule == "type ValueError"
        assert classify(caused(RuntimeError(), ApiError(404))).permanent

    def test_the_nearer_one_wins(self):
        assert classify(caused(ValueError(), ApiError(503))).permanent
        assert not classify(caused(ApiError(503), ValueError())).permanent
        assert classify(caused(ValueError(), RateLimit()), transient=(RateLimit,)).permanent

    def test_a_declared_cause_of_an_unknown_exception(self):
        exc = caused(RuntimeError(), caused(RuntimeError(), RateLimit()))
        assert classify(exc, permanent=(RateLimit,)).rule == "declared RateLimit"

    def test_raise_from_none_and_context_do_not_count(self):
        def suppressed():
            try:
                raise ValueError("inner")
            except ValueError:
                raise RuntimeError("outer") from None

        def in_context():
            try:
                raise ValueError("inner")
            except ValueError:
                raise RuntimeError("outer")  # noqa: B904 - the case under test

        assert classify(made_by(suppressed)).rule == "default"
        assert classify(made_by(in_context)).rule == "default"

    def test_the_wait_of_a_cause_is_honoured(self):
        limited = ApiError(429, {"Retry-After": "120"})
        assert classify(caused(RuntimeError(), limited)).retry_in == 120.0
        assert classify(caused(errors.TransientError("busy"), limited)).retry_in == 120.0
        assert classify(caused(errors.TransientError("busy", 5), limited)).retry_in == 5.0

    def test_cycles_end(self):
        first, second = RuntimeError(), RuntimeError()
        first.__cause__, second.__cause__ = second, first
        assert classify(first).rule == "default"

    def test_long_chains_are_bounded(self):
        exc = ValueError("too far down")
        for _ in range(100_000):
            exc = caused(RuntimeError(), exc)
        assert classify(exc).rule == "default"


class TestGroups:
    """D03: a group is transient if any member is."""

    @pytest.mark.parametrize(
        ("members", "permanent"),
        [
            ([ValueError(), KeyError()], True),
            ([ValueError(), ApiError(503)], False),
            ([ValueError(), RuntimeError()], False),
            ([RuntimeError()], False),
            ([ValueError(), ExceptionGroup("inner", [TypeError(), ApiError(404)])], True),
            ([ValueError(), ExceptionGroup("inner", [TypeError(), TimeoutError()])], False),
            ([caused(RuntimeError(), ValueError())], True),
        ],
    )
    def test_members_decide(self, members, permanent):
        assert classify(ExceptionGroup("several", members)).permanent is permanent

    def test_waits_as_long_as_the_most_patient_member(self):
        members = [
            ApiError(429, {"Retry-After": "7"}),
            errors.TransientError("busy", retry_in=30),
            TimeoutError(),
            ApiError(404, {"Retry-After": "999"}),
        ]
        found = classify(ExceptionGroup("several", members))
        assert found == outcomes.Classification(False, 30.0, "group: raised TransientError")

    def test_declared_types_are_about_the_members(self):
        group = ExceptionGroup("several", [RateLimit(), KeyError()])
        assert classify(group, transient=(RateLimit,)).rule == "group: declared RateLimit"
        assert classify(group, permanent=(Exception,)).rule == "group: declared Exception"
        mixed = ExceptionGroup("several", [ConnectionResetError(), KeyError()])
        declared = {"permanent": (Exception,), "transient": (ConnectionError,)}
        assert not classify(mixed, **declared).permanent

    def test_a_group_may_be_declared_itself(self):
        group = ExceptionGroup("several", [TimeoutError()])
        assert classify(group, permanent=(ExceptionGroup,)).rule == "declared ExceptionGroup"

    def test_a_group_along_the_chain(self):
        group = ExceptionGroup("several", [ValueError()])
        assert classify(caused(RuntimeError(), group)).permanent
        unknown = ExceptionGroup("several", [RuntimeError()])
        assert classify(caused(unknown, ValueError())).rule == "type ValueError"

    def test_base_exception_groups(self):
        group = BaseExceptionGroup("several", [KeyboardInterrupt(), ValueError()])
        assert not classify(group).permanent

    def test_huge_and_deep_groups_are_bounded(self):
        assert not classify(ExceptionGroup("wide", [ValueError()] * 5 + [TimeoutError()])).permanent
        wide = ExceptionGroup("wide", [ValueError(n) for n in range(30_000)])
        assert not classify(wide).permanent  # not all were looked at, so another try is due
        deep = ExceptionGroup("deep", [ValueError()])
        for _ in range(20_000):
            deep = ExceptionGroup("deep", [deep])
        assert classify(deep).permanent
        looping = RuntimeError()
        looping.__cause__ = ExceptionGroup("loop", [looping, RuntimeError()])
        assert classify(looping).rule == "default"


def test_retry_after_of_a_real_client():
    """D03: 429 with Retry-After 120 is not tried before 120 s."""
    response = httpx.Response(429, headers={"Retry-After": "120"}, request=REQUEST)
    found = classify(made_by(response.raise_for_status))
    assert found == outcomes.Classification(False, 120.0, "status 429")


def test_permanent_errors_carry_no_wait():
    assert classify(ApiError(404, {"Retry-After": "120"})).retry_in is None


class TestHostile:
    def test_class_that_lies(self):
        class Liar(Exception):
            @property
            def __class__(self):
                raise RuntimeError("no class")

            @property
            def __cause__(self):
                raise RuntimeError("no cause")

        assert classify(Liar()).rule == "default"
        assert classify(Liar(), permanent=(Liar,)).permanent

    def test_declared_type_that_raises(self):
        class Meta(type):
            def __subclasscheck__(cls, kind):
                raise RuntimeError("no answer")

        class Odd(Exception, metaclass=Meta):
            pass

        assert classify(ValueError(), permanent=(Odd,)).rule == "default"

    def test_retry_in_spoilt_after_building(self):
        exc = errors.TransientError("busy", retry_in=5)
        for junk in (-3, math.inf, math.nan, "x", None, object()):
            exc.retry_in = junk
            assert classify(exc).retry_in in (None, 0.0, errors.MAX_RETRY_IN_SECONDS)


class TestBackoff:
    def test_default_waits(self):
        """R8: 10, 20, 40 seconds."""
        waits = [Backoff(jitter=0).delay(failures) for failures in (1, 2, 3)]
        assert waits == [10.0, 20.0, 40.0]

    def test_base_five_over_two_thousand_failures(self):
        """D01: finite, non-decreasing up to the cap, never above cap + jitter."""
        backoff = Backoff(initial=5, factor=5, maximum=3600, jitter=0.1)
        waits = [backoff.delay(failures, random=lambda: 0.5) for failures in range(1, 2001)]
        assert waits == sorted(waits)
        assert waits[-1] == 3600.0
        assert all(backoff.delay(n, random=lambda: 1.0) <= 3600 * 1.1 for n in range(1, 2001))

    @pytest.mark.parametrize("failures", [10**9, 10**400])
    def test_any_number_of_failures(self, failures):
        assert Backoff(jitter=0).delay(failures) == 3600.0
        assert Backoff(factor=1, jitter=0).delay(failures) == 10.0
        assert Backoff(initial=0, jitter=0).delay(failures) == 0.0

    @pytest.mark.parametrize("failures", [0, -1])
    def test_no_failure_waits_as_after_the_first(self, failures):
        assert Backoff(jitter=0).delay(failures) == 10.0

    def test_jitter_spreads_both_ways(self):
        backoff = Backoff(initial=100, jitter=0.25)
        waits = [backoff.delay(1, random=partial(float, chance)) for chance in (0.0, 0.5, 1.0)]
        assert waits == [75.0, 100.0, 125.0]
        assert len({Backoff().delay(1) for _ in range(20)}) > 1

    def test_a_broken_source_of_chance_is_contained(self):
        for chance in (-5.0, 7.0, math.inf, -math.inf):
            assert 9.0 <= Backoff().delay(1, random=partial(float, chance)) <= 11.0

    @given(
        initial=st.floats(0, 1e7),
        factor=st.floats(1, 1e6),
        more=st.floats(0, 1e7),
        jitter=st.floats(0, 1),
        failures=st.integers(-10, 10**9),
        chance=st.floats(0, 1),
    )
    def test_properties(self, initial, factor, more, jitter, failures, chance):
        backoff = Backoff(initial, factor, initial + more, jitter)
        wait = backoff.delay(failures, random=lambda: chance)
        assert 0 <= wait <= backoff.maximum * (1 + jitter)
        assert wait <= backoff.delay(failures + 1, random=lambda: chance)

    @pytest.mark.parametrize(
        "wrong",
        [
            {"initial": -1},
            {"initial": math.nan},
            {"initial": math.inf},
            {"initial": "10"},
            {"initial": True},
            {"initial": None},
            {"factor": 0.5},
            {"factor": math.inf},
            {"maximum": 5},
            {"maximum": 1e12},
            {"jitter": -0.1},
            {"jitter": 1.5},
            {"jitter": math.nan},
        ],
        ids=str,
    )
    def test_impossible_numbers(self, wrong):
        (name,) = wrong
        with pytest.raises(errors.ConfigurationError, match=f"Backoff.{name}=.*(give|raise)"):
            Backoff(**wrong)
