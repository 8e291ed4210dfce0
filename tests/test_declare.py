"""The decorators: what they refuse and say, what they register, and what they leave callable."""

import dataclasses
import datetime
import functools
import json
import re
import sys
import typing
from typing import Any

import procrastinate
import psycopg
import pytest

from fanout_procrastinate import (
    Backoff,
    ConfigurationError,
    FanOut,
    InvalidItem,
    InvalidValue,
    ItemContext,
    Manager,
    Run,
    RunKeyConflict,
    SchemaError,
    codec,
    fanout_child,
    fanout_manager,
)
from fanout_procrastinate.fanout import SWEEP_TASK
from tests.support import counts, finished, jobs, opened, serving, unconnected, work_off, working

EAST, WEST = (datetime.timezone(datetime.timedelta(hours=hours)) for hours in (14, -14))


@pytest.fixture
def far() -> procrastinate.App:
    """An app that never reaches a database."""
    return unconnected()


def work(item: int) -> int:
    return item


def listing(n: int) -> Any:
    yield from range(n)


# -- what the declarations refuse


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"queue": "a.b"}, "letters, digits and underscores"),
        ({"queue": ""}, "letters, digits and underscores"),
        ({"queue": "q" * 41}, "shorten it to 40"),
        ({"name": "n" * 129}, "at most 128"),
        ({"name": "a\0b"}, "printable"),
        ({"aliases": ["n" * 129]}, "at most 128"),
        ({"max_attempts": 0}, "max_attempts=0: give a whole number from 1"),
        ({"max_attempts": 2.5}, "whole number"),
        ({"max_crashes": 0}, "max_crashes=0"),
        ({"priority": 2**31}, "priority"),
        ({"timeout": 0}, "None for no limit"),
        ({"timeout": float("nan")}, "None for no limit"),
        ({"backoff": 3}, "give a Backoff"),
        ({"permanent": ValueError}, "permanent=(ValueError,)"),
        ({"transient": ("ValueError",)}, "classes of exceptions"),
        ({"permanent": (OSError,), "transient": (OSError,)}, "one of the two"),
        ({"isolate": 1}, "True or False"),
        ({"pass_context": "yes"}, "True or False"),
    ],
)
def test_child_refuses_what_cannot_work(
    far: procrastinate.App, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(words)):
        fanout_child(far, **options)(work)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"queue": "a-b"}, "letters, digits and underscores"),
        ({"name": "n" * 129}, "at most 128"),
        ({"max_in_flight": 0}, "pause"),
        ({"max_in_flight": True}, "max_in_flight"),
        ({"timeout": -1}, "None for no limit"),
        ({"tolerate": -1}, "count of failed items"),
        ({"tolerate": 1.5}, "share from 0.0 to 1.0"),
        ({"stuck_after": 0}, "stuck_after"),
        ({"max_attempts": 0}, "max_attempts"),
        ({"backoff": None, "priority": "high"}, "priority"),
        ({"item_key": "id"}, "give a function: item -> str"),
    ],
)
def test_manager_refuses_what_cannot_work(
    far: procrastinate.App, options: dict[str, Any], words: str
) -> None:
    child = fanout_child(far)(work)
    with pytest.raises(ConfigurationError, match=words):
        fanout_manager(far, child=child, **options)(listing)


def test_child_must_take_one_item(far: procrastinate.App) -> None:
    def nothing() -> None: ...
    def two(one: int, other: int) -> None: ...
    def generator(item: int) -> Any:
        yield item

    for function, words in ((nothing, "(item)"), (two, "other"), (generator, "yields")):
        with pytest.raises(ConfigurationError, match=re.escape(words)):
            fanout_child(far)(function)
    with pytest.raises(ConfigurationError, match=r"\(context, item\)"):
        fanout_child(far, pass_context=True)(work)


def test_manager_takes_its_arguments_by_name(far: procrastinate.App) -> None:
    child = fanout_child(far)(work)

    def positional(n: int, /) -> Any:
        yield n

    with pytest.raises(ConfigurationError, match="remove the /"):
        fanout_manager(far, child=child)(positional)


def test_manager_needs_a_declared_child(far: procrastinate.App) -> None:
    with pytest.raises(ConfigurationError, match="decorate it with @fanout_child"):
        fanout_manager(far, child=work)(listing)  # type: ignore[arg-type]


def test_child_of_another_app_is_refused_at_import(far: procrastinate.App) -> None:
    other = fanout_child(unconnected(), name="elsewhere")(work)
    with pytest.raises(ConfigurationError, match=r"elsewhere belongs to another app"):
        fanout_manager(far, child=other)(listing)


def test_child_of_a_blueprint_of_another_app_is_refused_at_the_start(
    far: procrastinate.App,
) -> None:
    blueprint = procrastinate.Blueprint()
    child = fanout_child(blueprint)(work)
    manager = fanout_manager(far, child=child)(listing)
    with pytest.raises(ConfigurationError, match="no app has"):
        manager.configure()
    unconnected().add_tasks_from(blueprint, namespace="x")
    with pytest.raises(ConfigurationError, match="belongs to another app"):
        manager.configure()


def test_blueprint_without_an_app_cannot_start_runs() -> None:
    blueprint = procrastinate.Blueprint()
    child = fanout_child(blueprint)(work)
    manager = fanout_manager(blueprint, child=child)(listing)
    for start in (lambda: manager.defer(n=1), lambda: child.map([1])):
        with pytest.raises(ConfigurationError, match="add_tasks_from"):
            start()


@pytest.mark.parametrize("long", ["child", "lister", "done"])
def test_name_that_a_namespace_makes_too_long_is_refused_before_the_start(
    app: procrastinate.App, conn: psycopg.Connection[Any], long: str
) -> None:
    """No job could be stored under it: the run would never go on, or lose its callback."""
    blueprint = procrastinate.Blueprint()
    names = {name: name for name in ("child", "lister", "done")} | {long: "n" * 121}
    child = fanout_child(blueprint, name=names["child"])(work)
    manager = fanout_manager(blueprint, child=child, name=names["lister"])(listing)

    @manager.on_complete(name=names["done"])
    def done(run: Run) -> None: ...

    app.add_tasks_from(blueprint, namespace="papers_")
    words = r"has 129 characters with its namespace; shorten its name= or the namespace="
    with app.open():
        with pytest.raises(ConfigurationError, match=words):
            manager.defer(n=1)
        if long == "child":
            with pytest.raises(ConfigurationError, match=words):
                child.map([1])
    assert conn.execute("SELECT id FROM fanout_runs").fetchall() == []


def test_function_without_a_name_needs_one(far: procrastinate.App) -> None:
    partial = functools.partial(work)
    with pytest.raises(ConfigurationError, match="give a name="):
        fanout_child(far)(partial)
    assert fanout_child(far, name="partial")(partial)(3) == 3


def test_callback_refuses_what_cannot_work(far: procrastinate.App) -> None:
    manager = fanout_manager(far, child=fanout_child(far)(work))(listing)

    def good(run: Run) -> None: ...
    def nothing() -> None: ...
    def two(run: Run, other: int) -> None: ...

    for options, words in (
        ({"queue": "a.b"}, "letters, digits and underscores"),
        ({"name": "n" * 129}, "at most 128"),
        ({"priority": 2**40}, "priority"),
        ({"max_attempts": 0}, "max_attempts"),
        ({"backoff": 1.0}, "give a Backoff"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            manager.on_complete(**options)(good)
    broken: tuple[Any, ...] = (nothing, two, 3)
    for function in broken:
        with pytest.raises(ConfigurationError, match="one Run"):
            manager.on_failure(function)
    assert manager.callback_columns() == []


# -- what they leave


def test_declared_functions_stay_what_they_are(far: procrastinate.App) -> None:
    @fanout_child(far, pass_context=True)
    def child(context: ItemContext | None, item: int) -> int:
        """Double."""
        return item * 2

    @fanout_manager(far, child=child)
    def manager(n: int) -> Any:
        """List."""
        yield from range(n)

    @manager.on_success
    async def callback(run: Run) -> str:
        return "called"

    assert child(None, 4) == 8 and list(manager(n=3)) == [0, 1, 2]
    declared: tuple[Any, Any] = (child, manager)
    assert [one.__name__ for one in declared] == ["child", "manager"]
    assert [one.__doc__ for one in declared] == ["Double.", "List."]
    assert callback.__name__ == "callback"
    assert repr(child) == f"<child {__name__}.child>"
    assert repr(manager) == f"<manager {__name__}.manager>"


def test_attributes_of_the_function_do_not_take_the_place_of_ours(far: procrastinate.App) -> None:
    def marked(item: int) -> int:
        return item

    vars(marked).update(queue="theirs", name="theirs", options="theirs")
    child = fanout_child(far, queue="ours")(marked)
    assert (child.queue, child.task.queue, child.task.name) == (
        "ours",
        "ours",
        f"{__name__}.marked",
    )
    manager = fanout_manager(far, child=child, name="lister")(listing)
    assert manager.name == "lister"


def test_manager_and_callbacks_go_to_the_childs_queue(far: procrastinate.App) -> None:
    child = fanout_child(far, queue="papers", priority=3)(work)
    manager = fanout_manager(far, child=child)(listing)
    other = fanout_manager(far, child=child, queue="lists", name="other")(listing)

    @manager.on_complete
    def first(run: Run) -> None: ...

    @manager.on_failure(queue="reports", priority=7, name="second")
    def second(run: Run) -> None: ...

    assert (manager.task.queue, other.task.queue) == ("papers", "lists")
    assert manager.callback_columns() == [
        {"task": f"{__name__}.first", "on": "complete", "queue": "papers", "priority": 3},
        {"task": "second", "on": "failure", "queue": "reports", "priority": 7},
    ]


def test_one_function_may_be_a_callback_of_several(far: procrastinate.App) -> None:
    child = fanout_child(far)(work)
    one = fanout_manager(far, child=child, name="one")(listing)
    two = fanout_manager(far, child=child, name="two")(listing)

    def report(run: Run) -> None: ...

    one.on_success(report)
    one.on_failure(report)
    two.on_complete(report)
    assert [(c["task"], c["on"]) for c in one.callback_columns()] == [
        (f"{__name__}.report", "success"),
        (f"{__name__}.report", "failure"),
    ]
    assert [c["task"] for c in two.callback_columns()] == [f"{__name__}.report"]


async def test_alias_serves_jobs_under_the_old_name(
    app: procrastinate.App, conn: psycopg.Connection[Any]
) -> None:
    child = fanout_child(app, name="new_child", aliases=("old_child",))(work)
    manager = fanout_manager(app, child=child, name="new", aliases=["old"])(listing)
    async with opened(app):
        run = await manager.defer_async(n=2)
        conn.execute("UPDATE procrastinate_jobs SET task_name = 'old'")
        conn.execute("UPDATE fanout_runs SET child_task = 'old_child'")
        async with working(app):
            progress = await finished(run)
        assert counts(progress) == {"succeeded": 2, "total": 2}
        assert [result async for result in run.results()] == [0, 1]
    assert {job["task_name"] for job in jobs(conn)} == {"old", "old_child"}


# -- apps, blueprints, the sweep


def sweeps(app: procrastinate.App) -> dict[str, dict[str, Any]]:
    """Return the periodic sweeps by queue."""
    return {
        queue: dict(entry.configure_kwargs)
        for (task, queue), entry in app.periodic_registry.periodic_tasks.items()
        if task == SWEEP_TASK
    }


def declare(target: Any, name: str, queue: str) -> Manager[Any, Any]:
    child = fanout_child(target, name=f"{name}_child", queue=queue)(work)
    return fanout_manager(target, child=child, name=name)(listing)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("namespace", ["x", ""])
def test_blueprints_share_one_sweep_for_each_queue(
    far: procrastinate.App, when: str, namespace: str
) -> None:
    first, second = procrastinate.Blueprint(), procrastinate.Blueprint()
    declare(first, "one", "papers")
    declare(first, "two", "papers")
    declare(second, "three", "images")
    assert sweeps(far) == {} and SWEEP_TASK not in first.tasks
    if when == "before":
        FanOut(far, sweep_cron="*/5 * * * *")
    far.add_tasks_from(first, namespace=namespace)
    far.add_tasks_from(second, namespace="y")
    if when == "after":
        FanOut(far, sweep_cron="*/5 * * * *")
    found = sweeps(far)
    assert set(found) == {"papers", "images"}
    assert found["papers"] == {
        "queue": "papers",
        "priority": 2**31 - 1,
        "queueing_lock": "fanout_sweep:papers",
    }
    assert [name for name in far.tasks if "sweep" in name] == [SWEEP_TASK]
    assert {e.cron for e in far.periodic_registry.periodic_tasks.values()} == {"*/5 * * * *"}


def test_first_decorator_on_an_app_registers_the_sweep(far: procrastinate.App) -> None:
    declare(far, "one", "papers")
    assert set(sweeps(far)) == {"papers"}
    declare(far, "two", "images")
    assert set(sweeps(far)) == {"images", "papers"}


def test_sweep_stands_beside_other_periodic_tasks(far: procrastinate.App) -> None:
    @far.periodic(cron="0 0 * * *")
    @far.task(name="mine")
    def mine(timestamp: int) -> None: ...

    declare(far, "one", "papers")

    @far.periodic(cron="0 1 * * *")
    @far.task(name="later")
    def later(timestamp: int) -> None: ...

    assert set(far.periodic_registry.periodic_tasks) == {
        ("mine", ""),
        ("later", ""),
        (SWEEP_TASK, "papers"),
    }


@pytest.mark.parametrize("namespace", ["x", ""])
async def test_blueprint_works_in_an_app(
    app: procrastinate.App, conn: psycopg.Connection[Any], namespace: str
) -> None:
    blueprint = procrastinate.Blueprint()
    manager = declare(blueprint, "lister", "papers")
    called: list[int] = []

    @manager.on_complete(name="done")
    def done(run: Run) -> None:
        called.append(run.id)

    app.add_tasks_from(blueprint, namespace=namespace)
    async with serving(app, queues=["papers"]):
        run = await manager.defer_async(n=3)
        progress = await finished(run)
        assert counts(progress) == {"succeeded": 3, "total": 3}
        prefix = f"{namespace}:" if namespace else ""
        assert progress.name == f"{prefix}lister" == manager.name
        assert manager.child.name == f"{prefix}lister_child"
        fanout = FanOut.of(app)
        assert [one.run_id for one in await fanout.runs_async(name=manager.name)] == [run.id]
        keyed = await manager.configure(run_key="k").defer_async(n=0)
        assert await fanout.find_run_async(manager.name, "k") == keyed
        await finished(keyed)
        assert dict(progress.callbacks) == {f"{prefix}done": "done"}
        mapped = await manager.child.map_async([7, 8])
        await mapped.wait_async(timeout=10)
        assert [result async for result in mapped.results()] == [7, 8]
    assert called == [run.id, keyed.id]


async def test_settings_are_those_of_the_app_at_work(app: procrastinate.App) -> None:
    """Declared on a blueprint, with the app and its settings made later."""
    blueprint = procrastinate.Blueprint()
    manager = declare(blueprint, "lister", "papers")
    app.add_tasks_from(blueprint, namespace="x")
    FanOut(app, max_item_bytes=1, max_result_bytes=1)
    async with serving(app):
        with pytest.raises(InvalidItem, match="2 bytes of JSON, 1 are allowed"):
            await manager.child.map_async([10])
        run = await manager.defer_async(n=11)
        progress = await finished(run)
    assert progress.status == "failed" and "item 10: 2 bytes" in (progress.reason or "")


class Proxy:
    """What `procrastinate.contrib.django.app` is: a blueprint first, and the app later."""

    def __init__(self) -> None:
        self.current: Any = procrastinate.Blueprint()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.current, name)


async def test_djangos_proxy_serves_before_and_after_the_app_is_ready(
    app: procrastinate.App,
) -> None:
    proxy = Proxy()
    early = declare(proxy, "early", "papers")
    app.add_tasks_from(proxy.current, namespace="")
    proxy.current = app
    settings = FanOut(proxy, lease=12).settings  # type: ignore[arg-type]
    late = declare(proxy, "late", "images")
    assert FanOut.of(app).settings is settings
    assert FanOut.of(proxy).settings is settings  # type: ignore[arg-type]
    assert set(sweeps(app)) == {"images", "papers"}
    async with opened(app):
        runs = [await one.defer_async(n=2) for one in (early, late)]
        for progress in await work_off(app, *runs):
            assert counts(progress) == {"succeeded": 2, "total": 2}


def test_proxy_that_is_not_ready_has_no_settings() -> None:
    with pytest.raises(ConfigurationError, match="not a Blueprint"):
        FanOut(Proxy())  # type: ignore[arg-type]


# -- arguments


def test_arguments_are_checked_before_anything_is_stored(far: procrastinate.App) -> None:
    manager = declare(far, "lister", "papers")
    for args in ({}, {"m": 1}, {"n": 1, "m": 2}):
        with pytest.raises(TypeError, match="lister: "):
            manager.defer(**args)
    with pytest.raises(TypeError, match="by name"):
        manager.defer(3)
    for value, words in (
        (object(), "argument 'n' is no JSON"),
        (float("nan"), "argument 'n' is no JSON"),
        ({"x": "a\0b"}, "NUL character"),
        ("\ud800", "lone surrogate"),
        ({1: 2, "1": 3}, "no JSON"),
    ):
        with pytest.raises(InvalidValue, match=words):
            manager.defer(n=value)


async def test_positional_arguments_are_refused_by_async_starts_too(
    far: procrastinate.App,
) -> None:
    manager = declare(far, "lister", "papers")
    with pytest.raises(TypeError, match="by name"):
        await manager.defer_async(3)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"run_key": ""}, "run_key"),
        ({"run_key": 7}, "run_key"),
        ({"run_key": "k" * 1001}, "1 to 1000 bytes"),
        ({"run_key": "a\0b"}, "NUL"),
        ({"run_key": "\ud800"}, "NUL"),
        ({"if_closed": "reopen"}, "if_closed"),
        ({"tags": "one"}, "list of str"),
        ({"tags": [1]}, "list of str"),
        ({"tags": 5}, "list of str"),
        ({"tags": ["a\0b"]}, "list of str"),
        ({"tags": ["\ud800"]}, "list of str"),
        ({"schedule_at": 3, "schedule_in": 3}, "exclude each other"),
        ({"schedule_in": "soon"}, "aware datetime"),
        ({"schedule_in": {"parsecs": 3}}, "aware datetime"),
        ({"schedule_in": 1e30}, "aware datetime"),
        ({"schedule_in": float("nan")}, "aware datetime"),
        ({"deadline": "soon"}, "aware datetime"),
        (
            {"deadline": datetime.datetime.max.replace(tzinfo=WEST)},
            "0001-01-02 to 9999-12-31 in UTC",
        ),
        (
            {"schedule_at": datetime.datetime.min.replace(tzinfo=EAST)},
            "0001-01-02 to 9999-12-31 in UTC",
        ),
        ({"deadline": 251_000_000_000}, "less than 1,000 years"),
        ({"queue": "a.b"}, "letters, digits"),
        ({"priority": 2**31}, "priority"),
        ({"max_in_flight": 0}, "max_in_flight"),
        ({"tolerate": 2.0}, "tolerate"),
        ({"colour": 1}, "no option 'colour'"),
    ],
)
def test_options_of_a_start_are_checked(
    far: procrastinate.App, options: dict[str, Any], words: str
) -> None:
    manager = declare(far, "lister", "papers")
    with pytest.raises(ConfigurationError, match=words):
        manager.configure(**options)


@pytest.mark.parametrize("option", ["schedule_at", "schedule_in", "connection"])
def test_map_stages_at_once(far: procrastinate.App, option: str) -> None:
    child: Any = fanout_child(far)(work)
    with pytest.raises(ConfigurationError, match=f"no {option}; declare a manager"):
        child.map([1], **{option: 1})


def test_connector_not_opened(far: procrastinate.App) -> None:
    manager = declare(far, "lister", "papers")
    with pytest.raises(procrastinate.exceptions.AppNotOpen):
        manager.defer(n=1)


async def test_connector_not_opened_async(far: procrastinate.App) -> None:
    manager = declare(far, "lister", "papers")
    with pytest.raises(procrastinate.exceptions.AppNotOpen):
        await manager.defer_async(n=1)


async def test_without_the_schema_the_error_names_the_command(bare_dsn: str) -> None:
    app = procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=bare_dsn))
    manager = declare(app, "lister", "papers")
    async with opened(app):
        for start in (manager.defer_async(n=1), manager.child.map_async([1])):
            with pytest.raises(SchemaError, match=r"fanout --app=\.\.\. schema --apply"):
                await start
        with pytest.raises(SchemaError, match=r"schema --apply"):
            FanOut.of(app).sweep()
    with app.open(), pytest.raises(SchemaError, match="fanout_start_v1"):
        manager.defer(n=1)


# -- starting runs: what is stored


async def test_options_are_stored_with_the_run(
    app: procrastinate.App, conn: psycopg.Connection[Any]
) -> None:
    child = fanout_child(app, queue="papers", priority=1, max_crashes=5)(work)
    manager = fanout_manager(
        app, child=child, name="lister", priority=2, tolerate=3, stuck_after=60, max_attempts=7
    )(listing)
    async with opened(app):
        plain = await manager.defer_async(n=1)
        given = await manager.configure(
            run_key="k",
            max_in_flight=9,
            tolerate=0.25,
            deadline=3600,
            priority=5,
            queue="images",
            tags=["a", "b"],
            schedule_in={"minutes": 2},
        ).defer_async(n=2)
        anything = await manager.configure(tolerate=None, max_in_flight=None).defer_async(n=3)
        found = await FanOut.of(app).find_run_async("lister", "k")
        assert found == given and (await given.facts_async()).tags == ("a", "b")
        assert given.args == {"n": 2}
    rows = {row["id"]: row for row in conn.execute("SELECT * FROM fanout_runs")}
    one, two = rows[plain.id], rows[given.id]
    assert [one[name] for name in ("child_queue", "manager_queue")] == ["papers", "papers"]
    assert [one[name] for name in ("child_priority", "manager_priority")] == [1, 2]
    assert (one["max_in_flight"], one["tolerate_count"], one["tolerate_share"]) == (100, 3, None)
    assert (one["max_crashes"], one["stuck_after"], one["manager_max_attempts"]) == (5, 60, 7)
    assert [two[name] for name in ("child_queue", "manager_queue")] == ["images", "images"]
    assert [two[name] for name in ("child_priority", "manager_priority")] == [5, 5]
    assert (two["max_in_flight"], two["tolerate_count"], two["tolerate_share"]) == (9, None, 0.25)
    assert 3500 < (two["deadline"] - two["created_at"]).total_seconds() < 3700
    assert (rows[anything.id]["tolerate_count"], rows[anything.id]["max_in_flight"]) == (None, 100)
    (first, second, _) = jobs(conn)
    assert first["queueing_lock"] == f"fanout_manager:{plain.id}"
    assert (first["queue_name"], first["priority"], first["scheduled_at"]) == ("papers", 2, None)
    assert (second["queue_name"], second["priority"]) == ("images", 5)
    assert second["scheduled_at"] == two["scheduled_at"]
    assert 100 < (two["scheduled_at"] - two["created_at"]).total_seconds() < 140


async def test_run_key_returns_the_run_that_has_it(app: procrastinate.App) -> None:
    manager = declare(app, "lister", "papers")
    async with opened(app):
        keyed = manager.configure(run_key="monday")
        first = await keyed.defer_async(n=2)
        second = await keyed.defer_async(n=2)
        assert first.created and not second.created and first == second
        assert len({first, second}) == 1 and repr(first) == f"Run({first.id})"
        with pytest.raises(RunKeyConflict, match="lister already has a run with run_key 'monday'"):
            await keyed.defer_async(n=3)
        (progress,) = await work_off(app, first)
        assert counts(progress) == {"succeeded": 2, "total": 2}
        assert not (await keyed.defer_async(n=2)).created


async def test_order_of_the_arguments_makes_no_other_run(app: procrastinate.App) -> None:
    child = fanout_child(app)(work)

    @fanout_manager(app, child=child)
    def two(a: int, b: int) -> Any:
        yield a + b

    async with opened(app):
        first = await two.configure(run_key="k").defer_async(a=1, b=2)
        second = await two.configure(run_key="k").defer_async(b=2, a=1)
        assert first == second and not second.created


async def test_replace_moves_the_key_of_a_closed_run(app: procrastinate.App) -> None:
    manager = declare(app, "lister", "papers")
    async with opened(app):
        first = await manager.configure(run_key="monday").defer_async(n=2)
        replacing = manager.configure(run_key="monday", if_closed="replace")
        # Open, it is not replaced.
        assert await replacing.defer_async(n=2) == first
        with pytest.raises(RunKeyConflict):
            await replacing.defer_async(n=5)
        await work_off(app, first)
        second = await replacing.defer_async(n=5)
        assert second.created and second != first
        assert await FanOut.of(app).find_run_async("lister", "monday") == second
        assert len([item async for item in first.items()]) == 2


async def test_map_joins_the_run_that_has_the_key(app: procrastinate.App) -> None:
    child = fanout_child(app)(work)
    async with opened(app):
        first = await child.map_async([1, 2], run_key="k", tags=["t"])
        second = await child.map_async([3, 4, 5], run_key="k")
        assert first.created and not second.created and first == second
        (progress,) = await work_off(app, first)
        assert counts(progress) == {"succeeded": 2, "total": 2}
    with app.open():
        assert child.map([6], run_key="k") == first


# -- the caller's own connection (B08)


async def test_run_joins_the_callers_transaction(
    app: procrastinate.App, dsn: str, conn: psycopg.Connection[Any]
) -> None:
    """B08: run and jobs become visible together with the caller's own rows."""
    manager = declare(app, "lister", "papers")
    conn.execute("CREATE TABLE mine (n integer)")
    async with (
        serving(app, queues=["papers"]),
        await psycopg.AsyncConnection.connect(dsn) as own,
    ):
        async with own.transaction():
            await own.execute("INSERT INTO mine VALUES (1)")
            run = await manager.configure(connection=own).defer_async(n=3)
            assert jobs(conn) == []
            assert conn.execute("SELECT FROM fanout_runs").fetchall() == []
        progress = await finished(run)
        assert counts(progress) == {"succeeded": 3, "total": 3}

        with pytest.raises(ZeroDivisionError):
            async with own.transaction():
                await manager.configure(connection=own).defer_async(n=3)
                raise ZeroDivisionError
    left = conn.execute("SELECT id FROM fanout_runs").fetchall()
    assert [row["id"] for row in left] == [run.id]
    assert len(jobs(conn, task_name="lister")) == 1


def test_run_joins_the_callers_sync_transaction(
    app: procrastinate.App, dsn: str, conn: psycopg.Connection[Any]
) -> None:
    manager = declare(app, "lister", "papers")
    # The app need not be open: nothing but the connection is used.
    with psycopg.connect(dsn) as own:
        with own.transaction():
            run = manager.configure(connection=own).defer(n=3)
            assert jobs(conn) == []
        assert len(jobs(conn)) == 1
        with pytest.raises(ZeroDivisionError), own.transaction():
            manager.configure(connection=own, run_key="gone").defer(n=3)
            raise ZeroDivisionError
        with own.transaction(), pytest.raises(RunKeyConflict):
            manager.configure(connection=own, run_key="k").defer(n=3)
            manager.configure(connection=own, run_key="k").defer(n=4)
    runs = conn.execute("SELECT id FROM fanout_runs ORDER BY id").fetchall()
    assert runs[0]["id"] == run.id and len(runs) == len(jobs(conn)) == 2


async def test_sync_connection_in_an_app_opened_async(
    app: procrastinate.App, dsn: str, conn: psycopg.Connection[Any]
) -> None:
    manager = declare(app, "lister", "papers")
    async with opened(app):
        with psycopg.connect(dsn) as own:
            run = manager.configure(connection=own).defer(n=1)
            assert jobs(conn) == []
    assert [job["args"] for job in jobs(conn)] == [{"run_id": run.id}]


async def test_connection_of_the_other_kind_is_refused(app: procrastinate.App, dsn: str) -> None:
    manager = declare(app, "lister", "papers")
    async with opened(app):
        with (
            psycopg.connect(dsn) as own,
            pytest.raises(ConfigurationError, match="AsyncConnection"),
        ):
            await manager.configure(connection=own).defer_async(n=1)
        async with await psycopg.AsyncConnection.connect(dsn) as other:
            with pytest.raises(ConfigurationError, match="defer_async"):
                manager.configure(connection=other).defer(n=1)


# -- the sync twins


def test_sync_app_starts_runs(app: procrastinate.App, conn: psycopg.Connection[Any]) -> None:
    manager = declare(app, "lister", "papers")
    with app.open():
        run = manager.defer(n=2)
        mapped = manager.child.map([1, 2, 3], item_key=str)
        assert run.created and mapped.created
        assert counts(run.progress()) == {"total": -1}
        assert counts(mapped.progress()) == {"pending": 3, "total": 3}
        FanOut.of(app).close()
    assert [job["task_name"] for job in jobs(conn)] == ["lister"] + ["lister_child"] * 3


async def test_sync_start_inside_a_sync_child(app: procrastinate.App) -> None:
    """A03: children that start runs of their own move their own counters alone."""
    inner_child = fanout_child(app, name="inner_child")(work)
    inner = fanout_manager(app, child=inner_child, name="inner")(listing)

    @fanout_child(app)
    def outer_child(item: int) -> list[int]:
        with_manager = inner.defer(n=2)
        mapped = inner_child.map([item, item])
        return [with_manager.id, mapped.id]

    @fanout_child(app)
    async def async_child(item: int) -> list[int]:
        run = await inner.defer_async(n=2)
        return [run.id]

    async with serving(app):
        for child in (outer_child, async_child):
            run = await child.map_async(range(4))
            progress = await run.wait_async(timeout=20)
            assert counts(progress) == {"succeeded": 4, "total": 4}
            for ids in [result async for result in run.results()]:
                for run_id in ids:
                    nested = await FanOut.of(app).get_run_async(run_id)
                    progress = await nested.wait_async(timeout=20)
                    assert counts(progress) == {"succeeded": 2, "total": 2}


# -- annotations


@dataclasses.dataclass
class Point:
    x: int


async def test_annotations_from_the_enclosing_function(app: procrastinate.App) -> None:
    @dataclasses.dataclass
    class Local:
        x: int

    @fanout_child(app)
    def child(item: "Local") -> "list[Point]":
        return [Point(item.x), Point(item.x + 1)]

    async with serving(app):
        run = await child.map_async([Local(1), {"x": "5"}])
        await run.wait_async(timeout=10)
        found = [result async for result in run.results()]
    assert found == [[Point(1), Point(2)], [Point(5), Point(6)]]


def test_backoff_is_the_documented_one(far: procrastinate.App) -> None:
    child = fanout_child(far)(work)
    assert child.options.backoff == Backoff(initial=10, factor=2, maximum=3600, jitter=0.1)
    assert (child.options.max_attempts, child.options.timeout) == (4, 1800.0)
    manager = fanout_manager(far, child=child, name="lister")(listing)
    assert (manager.options.max_attempts, manager.options.timeout) == (3, 3600.0)
    assert (manager.options.max_in_flight, manager.options.tolerate) == (100, None)


# -- TypedDicts of `typing`, which pydantic refuses before Python 3.12


class Author(typing.TypedDict):
    """Who wrote it."""

    name: str


class Text(typing.TypedDict, total=False):
    title: typing.Required[str]
    authors: "list[Author]"
    first: Author | None
    tagged: typing.Annotated[dict[str, Author], "a note"]
    kind: typing.Literal["book", "paper"]


class Reviewed(Text):
    review: "typing.NotRequired[str]"
    stars: int


class Node(typing.TypedDict):
    below: "list[Node]"


TEXT: dict[str, Any] = {
    "title": "t",
    "authors": [{"name": "a"}],
    "first": None,
    "tagged": {"x": {"name": "b"}},
    "kind": "book",
}


@pytest.mark.parametrize(
    ("annotation", "good", "bad"),
    [
        (Author, {"name": "a"}, {"nome": "a"}),
        (Text, {"title": "t"}, {"authors": []}),
        (Text, TEXT, TEXT | {"authors": [{}]}),
        (Text, TEXT, TEXT | {"first": {}}),
        (Text, TEXT, TEXT | {"tagged": {"x": {}}}),
        (Text, TEXT, TEXT | {"kind": "film"}),
        (Reviewed, {"title": "t", "stars": 3}, {"title": "t", "review": "r"}),
        (list[Author] | None, [{"name": "a"}], [{}]),
        (dict[str, list[Text]], {"x": [TEXT]}, {"x": [{}]}),
        (tuple[Author, ...], [{"name": "a"}], [{}]),
    ],
)
def test_typed_dicts_of_typing(annotation: Any, good: Any, bad: Any) -> None:
    one = codec.Codec(annotation)
    assert json.loads(one.dump_item(good)) == good
    assert json.loads(one.dump_result(good).text) == good
    with pytest.raises(InvalidValue):
        one.dump_item(bad)
    assert one.annotation is annotation


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="pydantic takes it from 3.12 on")
def test_typed_dict_that_contains_itself_is_refused_with_a_remedy() -> None:
    with pytest.raises(ConfigurationError, match=r"typing_extensions\.TypedDict"):
        codec.Codec(Node)


async def test_typed_dicts_in_a_run(app: procrastinate.App) -> None:
    @fanout_child(app)
    def child(item: Text) -> list[Author]:
        return item["authors"]

    async with serving(app):
        run = await child.map_async([TEXT, {"title": "t", "authors": []}])
        assert counts(await finished(run)) == {"succeeded": 2, "total": 2}
        assert [result async for result in run.results()] == [[{"name": "a"}], []]
        with pytest.raises(InvalidItem, match="item 0: does not fit Text: title: Field required"):
            await child.map_async([{"authors": []}])
