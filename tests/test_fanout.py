"""FanOut: an app's settings, its runs, its sweep; small pools, large ids, schemas of one's own."""

import asyncio
import contextlib
import datetime
from collections.abc import Callable
from typing import Any

import procrastinate
import psycopg
import pytest
from psycopg import conninfo

from fanout_procrastinate import (
    ConfigurationError,
    DatabaseError,
    FanOut,
    Manager,
    Run,
    RunNotFound,
    TransientError,
    fanout_child,
    fanout_manager,
    schema,
    store,
)
from fanout_procrastinate.fanout import SWEEP_TASK
from tests.support import QUICK, counts, finished, opened, serving, unconnected, work_off
from tests.waiting import wait_until_async

Connect = Callable[..., psycopg.Connection[dict[str, Any]]]


def declare(app: procrastinate.App, name: str = "lister") -> Manager[Any, Any]:
    """Declare a child with the whole of a life: retries, failures, callbacks."""
    tried: set[tuple[int, int]] = set()

    @fanout_child(app, name=f"{name}_child", queue="papers", backoff=QUICK, pass_context=True)
    async def child(context: Any, item: int) -> int:
        if item % 5 == 1 and (context.run_id, item) not in tried:
            tried.add((context.run_id, item))
            raise TransientError("again")
        if item % 5 == 2:
            raise ValueError("never")
        return item

    @fanout_manager(app, child=child, name=name, item_key=str)
    async def manager(n: int) -> Any:
        for item in [*range(n), 0]:
            yield item

    @manager.on_complete(name=f"{name}_done")
    async def done(run: Run) -> None: ...

    return manager


# -- settings


def test_settings_are_made_once() -> None:
    app = unconnected()
    owner = FanOut(app, lease=12)
    assert FanOut.of(app) is owner and owner.settings.lease == 12
    with pytest.raises(ConfigurationError, match="once, before the app's first fan-out decorator"):
        FanOut(app)
    late = unconnected()
    fanout_child(late, name="child")(lambda item: item)
    assert FanOut.of(late).settings.lease == 30
    with pytest.raises(ConfigurationError, match="before the app's first fan-out decorator"):
        FanOut(late, lease=12)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"colour": 1, "leese": 3}, "no option colour, leese; see time_slice, lease"),
        ({"lease": 0.1}, "lease"),
        ({"time_slice": -1}, "time_slice"),
        ({"sweep_cron": "every day"}, "five columns"),
        ({"max_item_bytes": 0}, "max_item_bytes"),
        ({"connection_factory": "dsn"}, "connection_factory"),
    ],
)
def test_settings_are_checked(options: dict[str, Any], words: str) -> None:
    app = unconnected()
    with pytest.raises(ConfigurationError, match=words):
        FanOut(app, **options)
    assert FanOut.of(app).settings.lease == 30  # the mistake left nothing behind


def test_blueprint_has_no_settings() -> None:
    blueprint: Any = procrastinate.Blueprint()
    for attempt in (FanOut, FanOut.of):
        with pytest.raises(ConfigurationError, match="FanOut needs an App, not a Blueprint"):
            attempt(blueprint)


def test_sweep_takes_its_schedule_from_the_settings() -> None:
    app = unconnected()
    FanOut(app, sweep_cron="* * * * * */5")
    assert dict(app.periodic_registry.periodic_tasks) == {}
    declare(app)
    ((key, entry),) = app.periodic_registry.periodic_tasks.items()
    assert (key, entry.cron) == ((SWEEP_TASK, "papers"), "* * * * * */5")


def test_declared_names_everything_of_ours() -> None:
    app = unconnected()
    manager = declare(app)
    declared = FanOut.of(app).declared()
    assert manager in declared and manager.child in declared and len(declared) == 3


# -- runs


async def test_runs_are_found_by_id_and_key(app: procrastinate.App) -> None:
    manager = declare(app)
    owner = FanOut.of(app)
    async with opened(app):
        run = await manager.configure(run_key="k").defer_async(n=1)
        found = await owner.get_run_async(run.id)
        assert found == run and not found.created and found.args == {"n": 1}
        assert await owner.find_run_async("lister", "k") == run
        with pytest.raises(RunNotFound, match="no run 77"):
            await owner.get_run_async(77)
        with pytest.raises(RunNotFound, match="no run 'other'"):
            await owner.find_run_async("lister", "other")
    with app.open():
        assert owner.get_run(run.id) == run and owner.find_run("lister", "k") == run
        with pytest.raises(RunNotFound):
            owner.get_run(77)
        with pytest.raises(RunNotFound):
            owner.find_run("elsewhere", "k")
        owner.close()


async def test_runs_are_listed_newest_first(app: procrastinate.App) -> None:
    one, two = declare(app, "one"), declare(app, "two")
    owner = FanOut.of(app)
    async with opened(app):
        ids = [
            (await manager.configure(tags=tags).defer_async(n=n)).id
            for manager, n, tags in ((one, 0, ["a"]), (two, 0, []), (one, 1, ["a", "b"]))
        ]

        async def listed(**options: Any) -> list[int]:
            return [progress.run_id for progress in await owner.runs_async(**options)]

        assert await listed() == ids[::-1]
        assert await listed(limit=2) == ids[:0:-1]
        assert await listed(name="one") == [ids[2], ids[0]]
        assert await listed(tag="b") == [ids[2]]
        (await owner.get_run_async(ids[0]))
        await (await owner.get_run_async(ids[0])).cancel_async()
        assert await listed(status="cancelled") == [ids[0]]
        assert await listed(status="pending", name="one") == [ids[2]]
        with pytest.raises(ValueError, match="asleep"):
            await owner.runs_async(status="asleep")
    with app.open():
        assert [progress.run_id for progress in owner.runs(name="two")] == [ids[1]]
        with pytest.raises(ValueError, match="asleep"):
            owner.runs(status="asleep")


async def test_ids_keys_and_filters_that_cannot_work(app: procrastinate.App) -> None:
    manager, owner = declare(app), FanOut.of(app)
    wrong: list[tuple[str, tuple[Any, ...], str]] = [
        *(("get_run", (value,), "run_id=.*whole number") for value in (True, "1", 1.5, None)),
        *(("audit", (value,), "run_id=.*whole number") for value in (True, "1", 1.5)),
        ("find_run", ("lister", 3), "run_key=3: give a str"),
        ("find_run", (True, "k"), "name=True: give a str"),
        *(("runs", (None, None, None, value), "limit=") for value in (0, -1, True, "3", 2**63)),
        ("runs", (3,), "name=3: give a str"),
        ("runs", (None, None, 3), "tag=3: give a str"),
    ]
    unknown: list[tuple[str, tuple[Any, ...]]] = [
        *((name, (value,)) for name in ("get_run", "audit") for value in (2**63, 0, -1)),
        *(("find_run", ("lister", value)) for value in ("k\0", "\ud800")),
        ("find_run", ("lister\0", "k")),
    ]
    odd: list[dict[str, Any]] = [{"tag": "\0"}, {"name": "\ud800"}]
    async with opened(app):
        await manager.configure(run_key="k").defer_async(n=1)
        for name, arguments, words in wrong:
            with pytest.raises(ConfigurationError, match=words):
                await getattr(owner, f"{name}_async")(*arguments)
        for name, arguments in unknown:
            with pytest.raises(RunNotFound):
                await getattr(owner, f"{name}_async")(*arguments)
        for options in odd:
            assert await owner.runs_async(**options) == []
    with app.open():
        for name, arguments, words in wrong:
            with pytest.raises(ConfigurationError, match=words):
                getattr(owner, name)(*arguments)
        for name, arguments in unknown:
            with pytest.raises(RunNotFound):
                getattr(owner, name)(*arguments)
        for options in odd:
            assert owner.runs(**options) == []
        owner.close()


# -- schema and sweep as calls


async def test_apply_schema(bare_dsn: str) -> None:
    app = procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=bare_dsn))
    owner = FanOut.of(app)
    every = [script.name for script in schema.scripts()]
    assert owner.missing_schema() == every
    assert await owner.apply_schema_async() == every
    assert owner.apply_schema() == [] == owner.missing_schema()
    manager = declare(app)
    async with opened(app):
        run = await manager.defer_async(n=10)
        (progress,) = await work_off(app, run)
    assert counts(progress) == {"succeeded": 8, "failed": 2, "duplicates": 1, "total": 10}


def test_database_out_of_reach() -> None:
    app = procrastinate.App(
        connector=procrastinate.PsycopgConnector(conninfo="host=/nowhere connect_timeout=1")
    )
    owner = FanOut.of(app)
    for call in (owner.apply_schema, owner.missing_schema, owner.sweep):
        with pytest.raises(DatabaseError, match="nowhere"):
            call()


async def test_sweep_as_a_call(app: procrastinate.App, conn: psycopg.Connection[Any]) -> None:
    manager = declare(app)
    owner = FanOut.of(app)
    async with opened(app):
        run = await manager.defer_async(n=1)
        assert not owner.sweep().changed
        conn.execute("DELETE FROM procrastinate_jobs")
        report = await owner.sweep_async()
        assert report.runs == {run.id: "lost manager job"} and report.done == {"managers": 1}
        (progress,) = await work_off(app, run)
        assert progress.succeeded == 1
        assert not (await owner.sweep_async()).changed


async def test_periodic_sweep_runs_in_each_queue(
    app: procrastinate.App, conn: psycopg.Connection[Any]
) -> None:
    FanOut(app, sweep_cron="* * * * * *")
    declare(app)
    async with serving(app, queues=["papers"]):

        def swept() -> list[Any]:
            return conn.execute(
                "SELECT * FROM procrastinate_jobs"
                " WHERE task_name = %s AND status = 'succeeded' ORDER BY id",
                [SWEEP_TASK],
            ).fetchall()

        await wait_until_async(lambda: len(swept()) >= 2)
    assert {(job["queue_name"], job["queueing_lock"]) for job in swept()} == {
        ("papers", "fanout_sweep:papers")
    }


async def test_retention_removes_old_runs_and_our_job_rows(
    app: procrastinate.App, conn: psycopg.Connection[Any]
) -> None:
    owner = FanOut(app, retention=3600, sweep_cron="* * * * * *")
    manager = declare(app)
    async with opened(app):
        old, young = [await manager.defer_async(n=3) for _ in range(2)]
        await work_off(app, old, young)
        await wait_until_async(
            lambda: (
                not conn.execute(
                    "SELECT FROM procrastinate_jobs WHERE status IN ('todo', 'doing')"
                ).fetchall()
            )
        )
        assert not (await owner.sweep_async()).changed
        conn.execute(
            "UPDATE fanout_runs SET closed_at = closed_at - interval '2 h' WHERE id = %s", [old.id]
        )
        conn.execute(
            "UPDATE procrastinate_events SET at = at - interval '2 h'"
            " WHERE job_id IN (SELECT id FROM procrastinate_jobs"
            f" WHERE args->>'run_id' = '{old.id}' OR task_name = '{SWEEP_TASK}')"
        )
        await owner.sweep_async()  # or the process's own is at it already
        await wait_until_async(
            lambda: not conn.execute("SELECT FROM fanout_runs WHERE id = %s", [old.id]).fetchall()
        )
        with pytest.raises(RunNotFound):
            await old.progress_async()
        assert (await young.progress_async()).succeeded == 2
    for table in ("items", "ledgers", "slots", "callbacks", "closes"):
        rows = conn.execute(f"SELECT DISTINCT run_id FROM fanout_{table}".encode()).fetchall()
        assert {row["run_id"] for row in rows} <= {young.id}, table
    left = conn.execute("SELECT DISTINCT task_name, args->'run_id' AS run FROM procrastinate_jobs")
    assert {(row["task_name"], row["run"]) for row in left} == {
        ("lister", young.id),
        ("lister_child", young.id),
        ("lister_done", young.id),
    }


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_prune_removes_what_is_old_to_the_last_row(
    app: procrastinate.App,
    conn: psycopg.Connection[Any],
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fanout_procrastinate.sweeper._ROWS_PER_BATCH", 3)
    monkeypatch.setattr("fanout_procrastinate.sweeper._BATCHES_PER_SWEEP", 1)
    manager, owner = declare(app), FanOut.of(app)

    async def prune(older_than: Any) -> dict[str, int]:
        return owner.prune(older_than) if kind == "sync" else await owner.prune_async(older_than)

    async with opened(app):
        old = [await manager.defer_async(n=10) for _ in range(3)]
        await work_off(app, *old)
        young = await manager.defer_async(n=3)
        await work_off(app, young)
        assert await prune(3600) == {"pruned": 0, "pruned_jobs": 0}
        ids = [run.id for run in old]
        conn.execute(
            "UPDATE fanout_runs SET closed_at = closed_at - interval '2 h' WHERE id = ANY (%s)",
            [ids],
        )
        conn.execute(
            "UPDATE procrastinate_events SET at = at - interval '2 h' WHERE job_id IN"
            " (SELECT id FROM procrastinate_jobs WHERE (args->>'run_id')::bigint = ANY (%s))",
            [ids],
        )
        done = await prune(datetime.timedelta(hours=1))
        assert done["pruned"] == 3 * 11 and done["pruned_jobs"] > 3
        assert [one.run_id for one in await owner.runs_async()] == [young.id]
        assert await prune(3600) == {"pruned": 0, "pruned_jobs": 0}
        assert owner.audit() == []


@pytest.mark.parametrize(
    "older_than",
    [0, 0.5, -1, True, "30d", None, float("nan"), float("inf"), 1e10, 10**400,
     datetime.timedelta(0), datetime.timedelta.max],
)  # fmt: skip
def test_prune_wants_a_time(older_than: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"older_than=.*give seconds"):
        FanOut.of(unconnected()).prune(older_than)


async def test_statement_that_names_our_tables_is_no_missing_schema(
    app: procrastinate.App,
) -> None:
    async with opened(app):
        with pytest.raises(DatabaseError, match="operator does not exist"):
            await FanOut.of(app).host.run_async(store.run(True))


# -- where it lives


async def test_pool_of_one_connection(dsn: str) -> None:
    """F03: never a second connection of the pool while holding one."""
    app = procrastinate.App(
        connector=procrastinate.PsycopgConnector(conninfo=dsn, min_size=1, max_size=1, timeout=5)
    )
    FanOut(app, sweep_cron="* * * * * *")
    manager = declare(app)
    async with serving(app):
        runs = [await manager.defer_async(n=20) for _ in range(5)]
        for run in runs:
            assert counts(await finished(run)) == {
                "succeeded": 16,
                "failed": 4,
                "duplicates": 1,
                "total": 20,
            }
        retried = await runs[0].retry_failed_async()
        assert retried == 4
        assert (await finished(runs[0])).generation == 2
        assert not (await FanOut.of(app).sweep_async()).changed


async def test_ids_beyond_32_bits(app: procrastinate.App, conn: psycopg.Connection[Any]) -> None:
    """F07: every sequence at 2^31 + 10, the host's as well."""
    start = 2**31 + 10
    for row in conn.execute("SELECT oid::regclass::text AS name FROM pg_class WHERE relkind = 'S'"):
        with contextlib.suppress(psycopg.errors.SequenceGeneratorLimitExceeded):
            conn.execute(f"ALTER SEQUENCE {row['name']} RESTART WITH {start}")
    manager = declare(app)
    child: Any = manager.child
    owner = FanOut.of(app)
    async with opened(app):
        run = await manager.configure(run_key="k").defer_async(n=10)
        mapped = await child.map_async([3, 4])
        assert min(run.id, mapped.id) >= start
        async with asyncio.timeout(20):
            await work_off(app, run, mapped)
        assert counts(await run.progress_async()) == {
            "succeeded": 8,
            "failed": 2,
            "duplicates": 1,
            "total": 10,
        }
        assert await owner.find_run_async("lister", "k") == run
        assert len([item async for item in run.items()]) == 10
        assert await run.retry_failed_async() == 2
        (progress,) = await work_off(app, run)
        assert progress.failed == 2 and progress.generation == 2
        assert not (await owner.sweep_async()).changed
    (row,) = conn.execute("SELECT min(id) AS low FROM procrastinate_jobs").fetchall()
    assert row["low"] >= start


async def test_schema_of_ones_own(bare_dsn: str) -> None:
    """Everything in a schema chosen by `search_path`, host and library alike."""
    inside = conninfo.make_conninfo(bare_dsn, options="-c search_path=workshop")
    with psycopg.connect(bare_dsn, autocommit=True) as connection:
        connection.execute("DROP SCHEMA public CASCADE")
        connection.execute("CREATE SCHEMA workshop")
    with psycopg.connect(inside, autocommit=True) as connection:
        connection.execute(procrastinate.schema.SchemaManager.get_schema())
    app = procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=inside))
    manager = declare(app)
    child: Any = manager.child
    owner = FanOut.of(app)
    owner.apply_schema()
    async with opened(app):
        runs = [await manager.defer_async(n=10), await child.map_async([0, 1, 2, 3])]
        first, second = await work_off(app, *runs)
        assert counts(first) == {"succeeded": 8, "failed": 2, "duplicates": 1, "total": 10}
        assert counts(second) == {"succeeded": 3, "failed": 1, "total": 4}
        assert not (await owner.sweep_async()).changed
    with psycopg.connect(bare_dsn, autocommit=True) as connection:
        elsewhere = connection.execute(
            "SELECT count(*) FROM pg_class WHERE relname LIKE 'fanout%'"
            " AND relnamespace <> 'workshop'::regnamespace"
        ).fetchone()
    assert elsewhere == (0,)


async def test_connections_of_ones_own(app: procrastinate.App, dsn: str) -> None:
    """`connection_factory`: whatever it opens is made to fit."""
    opened_here: list[psycopg.Connection[Any]] = []

    def factory() -> psycopg.Connection[Any]:
        opened_here.append(psycopg.connect(dsn, application_name="mine"))
        return opened_here[-1]

    FanOut(app, connection_factory=factory)
    manager = declare(app)
    async with opened(app):
        run = await manager.defer_async(n=10)
        (progress,) = await work_off(app, run)
        assert progress.succeeded == 8
    assert len(opened_here) >= 2
    assert all(connection.closed for connection in opened_here)


@pytest.mark.database_settings(default_transaction_isolation="repeatable read")
async def test_server_that_defaults_to_repeatable_read(app: procrastinate.App) -> None:
    manager = declare(app)
    child: Any = manager.child
    async with serving(app, concurrency=20):
        runs = [await manager.defer_async(n=40) for _ in range(4)]
        runs.append(await child.map_async([0, 3, 4] * 20))
        for run in runs[:-1]:
            assert counts(await finished(run)) == {
                "succeeded": 32,
                "failed": 8,
                "duplicates": 1,
                "total": 40,
            }
        assert counts(await finished(runs[-1])) == {"succeeded": 60, "total": 60}


async def test_close_async_waits_for_nothing_that_was_never_opened(
    app: procrastinate.App,
) -> None:
    async with asyncio.timeout(1):
        await FanOut.of(app).close_async()
        FanOut.of(app).close()
