"""Settings and options: defaults as documented, and impossible values refused with a remedy."""

import dataclasses
import math

import procrastinate.manager
import pytest

from fanout_procrastinate import errors, outcomes, settings
from fanout_procrastinate.settings import ChildOptions, ManagerOptions, Settings


def test_defaults_of_an_app():
    defaults = Settings()
    assert dataclasses.asdict(defaults) == {
        "time_slice": 1.0,
        "lease": 30.0,
        "sweep_cron": "* * * * *",
        "max_item_bytes": 65536,
        "max_result_bytes": 1048576,
        "retention": None,
        "connection_factory": None,
        "chunk_size": 2000,
        "events": True,
        "on_item_failed": None,
        "on_stuck": None,
        "redact": None,
    }
    assert defaults.renew_interval == 7.5
    assert defaults.sweep_interval == 10.0


def test_defaults_of_a_child():
    child = ChildOptions()
    assert (child.queue, child.priority, child.max_attempts) == ("default", 0, 4)
    assert (child.timeout, child.max_crashes) == (1800.0, 3)
    assert child.backoff == outcomes.Backoff(initial=10, factor=2, maximum=3600, jitter=0.1)


def test_defaults_of_a_manager():
    manager = ManagerOptions()
    assert (manager.queue, manager.priority, manager.max_attempts) == (None, 0, 3)
    assert (manager.max_in_flight, manager.tolerate) == (100, None)
    assert (manager.timeout, manager.stuck_after) == (3600.0, 7200.0)


@pytest.mark.parametrize("kind", [Settings, ChildOptions, ManagerOptions])
def test_frozen_and_keyword_only(kind):
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(kind(), dataclasses.fields(kind)[0].name, None)
    with pytest.raises(TypeError):
        kind(1)


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (Settings, {"time_slice": 0, "lease": 1, "retention": 30 * 86400}),
        (Settings, {"sweep_cron": "*/5 * * * * */10", "connection_factory": print}),
        (ChildOptions, {"timeout": None, "max_attempts": 1, "priority": -(2**31)}),
        (ChildOptions, {"name": "papers.extract", "aliases": ["old.name"], "isolate": True}),
        (ManagerOptions, {"tolerate": 0, "queue": "papers"}),
        (ManagerOptions, {"tolerate": 1.0, "timeout": None, "max_in_flight": 1}),
        (ManagerOptions, {"tolerate": 0.0}),
        (ManagerOptions, {"tolerate": 500, "priority": 2**31 - 1}),
    ],
)
def test_possible_values(kind, values):
    built = kind(**values)
    for name, value in values.items():
        assert getattr(built, name) == (tuple(value) if isinstance(value, list) else value)


SECONDS = [-1, math.nan, math.inf, "30", True, 1e12]
COUNTS = [0, -1, 1.0, "3", None, True, 2**31]
IMPOSSIBLE = [
    (Settings, {"time_slice": [*SECONDS, None], "lease": [*SECONDS, 0.5, None]}, "give seconds"),
    (Settings, {"retention": [*SECONDS, 0]}, "None to keep runs for ever"),
    (Settings, {"max_item_bytes": [0, -1, 1.5, None, True, 2**28]}, "give a whole number"),
    (Settings, {"max_result_bytes": [0, 2**31], "chunk_size": [0, 10**6]}, "give a whole number"),
    (Settings, {"connection_factory": ["dsn", 3]}, "give a function"),
    (
        Settings,
        {"sweep_cron": ["", "*", "* * * *", "* * * * * * *", "61 * * * *", "a b c d e", 3, None]},
        "give five columns",
    ),
    (Settings, {"sweep_cron": ["0 0 31 2 *", "H * * * *", "@hourly"]}, "give five columns"),
    (ChildOptions, {"max_attempts": COUNTS, "max_crashes": COUNTS}, "give a whole number from 1"),
    (ChildOptions, {"timeout": [*SECONDS, 0]}, "None for no limit"),
    (ChildOptions, {"priority": [2**31, 1.5, None, True]}, "give a whole number"),
    (ChildOptions, {"backoff": [None, 10, outcomes.Backoff]}, "give a Backoff"),
    (ChildOptions, {"isolate": [1, None], "pass_context": ["yes"]}, "give True or False"),
    (ChildOptions, {"permanent": [KeyError, "KeyError", None]}, r"write permanent=\(.*,\)"),
    (ChildOptions, {"transient": [(KeyError(),), ("KeyError",), (int,)]}, "give classes"),
    (ChildOptions, {"queue": ["a.b", "a-b", "a b", "", "é", "a\n", 3, None]}, "only ASCII letters"),
    (ChildOptions, {"queue": ["q" * 41]}, "shorten it to 40"),
    (ChildOptions, {"name": ["", "a\nb", "\x00", "\ud800", 3]}, "give a printable name"),
    (ChildOptions, {"name": ["n" * 129], "aliases": [("n" * 129,)]}, "name= of at most 128"),
    (ChildOptions, {"aliases": ["old", 3, None]}, r"write aliases=\(.*,\)"),
    (ManagerOptions, {"queue": ["papers.eu"]}, "only ASCII letters"),
    (ManagerOptions, {"max_in_flight": COUNTS}, "pause"),
    (ManagerOptions, {"max_attempts": COUNTS}, "give a whole number from 1"),
    (ManagerOptions, {"timeout": [*SECONDS, 0]}, "None for no limit"),
    (ManagerOptions, {"stuck_after": [*SECONDS, 0, None]}, "give seconds"),
    (ManagerOptions, {"priority": [2**31]}, "give a whole number"),
    (ManagerOptions, {"backoff": ["fast"]}, "give a Backoff"),
    (
        ManagerOptions,
        {"tolerate": [-1, -0.1, 1.1, math.nan, math.inf, True, False, "10%", 2**31]},
        "give a count of failed items",
    ),
]


@pytest.mark.parametrize(
    ("kind", "name", "value", "remedy"),
    [
        pytest.param(kind, name, value, remedy, id=f"{kind.__name__}-{name}-{number}")
        for kind, wrong, remedy in IMPOSSIBLE
        for name, values in wrong.items()
        for number, value in enumerate(values)
    ],
)
def test_impossible_values(kind, name, value, remedy):
    with pytest.raises(errors.ConfigurationError, match=remedy):
        kind(**{name: value})


def test_an_exception_cannot_be_both():
    with pytest.raises(errors.ConfigurationError, match="KeyError is declared permanent and"):
        ChildOptions(permanent=(KeyError, OSError), transient=[KeyError])


class TestNames:
    """R13: queue names that route, task names that can be stored."""

    def test_the_longest_queue_name_fits_the_channel_of_the_host(self):
        longest = settings.check_queue_name("q" * settings.MAX_QUEUE_NAME_BYTES)
        (channel,) = procrastinate.manager.get_channel_for_queues([longest])
        assert len(channel.encode()) == 63  # PostgreSQL cuts identifiers here

    def test_queue_names_that_work(self):
        for name in ("default", "papers_2", "A", "_"):
            assert settings.check_queue_name(name) == name

    def test_task_names_count_characters_not_bytes(self):
        assert settings.check_task_name("é" * 128)
        with pytest.raises(errors.ConfigurationError, match="129 characters"):
            settings.check_task_name("é" * 129)

    def test_room_for_what_is_appended(self):
        assert settings.check_task_name("n" * 100, limit=100)
        with pytest.raises(errors.ConfigurationError, match="at most 100"):
            settings.check_task_name("n" * 101, limit=100)


def test_values_changed_while_a_run_is_open_are_checked_alike():
    assert settings.check_max_in_flight(5) == 5
    assert settings.check_tolerate(0.25) == 0.25
    assert settings.check_tolerate(None) is None
    assert settings.check_priority(-3) == -3
    for check in (settings.check_max_in_flight, settings.check_tolerate, settings.check_priority):
        with pytest.raises(errors.ConfigurationError):
            check("many")
