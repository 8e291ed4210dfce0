"""The schema: applied once, whoever applies it; what is missing is named."""

import dataclasses
import threading
from typing import Any

import procrastinate
import psycopg
import pytest
from procrastinate.schema import SchemaManager
from psycopg import conninfo

from fanout_procrastinate import FanOut, fanout_child, schema
from tests.support import counts, opened, work_off

Catalogue = dict[str, list[Any]]


@pytest.fixture
def bare(bare_dsn: str) -> Any:
    with psycopg.connect(bare_dsn, autocommit=True) as connection:
        yield connection


def every() -> list[str]:
    return [script.name for script in schema.scripts()]


def catalogue(connection: psycopg.Connection[Any]) -> Catalogue:
    """Return what stands in the present schema, with the bodies of its functions."""
    return {
        "tables": connection.execute(
            "SELECT table_name, column_name, data_type, column_default, is_nullable"
            " FROM information_schema.columns WHERE table_name LIKE 'fanout%' ORDER BY 1, 2"
        ).fetchall(),
        "functions": connection.execute(
            "SELECT p.oid::regprocedure::text, prosrc, proconfig FROM pg_proc p"
            " WHERE proname LIKE 'fanout%' AND pronamespace = current_schema()::regnamespace"
            " ORDER BY 1"
        ).fetchall(),
        "indexes": connection.execute(
            "SELECT indexname FROM pg_indexes WHERE tablename LIKE 'fanout%' ORDER BY 1"
        ).fetchall(),
        "parts": connection.execute("SELECT name, digest FROM fanout_schema ORDER BY 1").fetchall(),
    }


def test_parts_have_an_order() -> None:
    *migrations, functions = schema.scripts()
    assert [script.name for script in migrations] == sorted(script.name for script in migrations)
    assert migrations[0].name == "0001_initial"
    revision = f"{schema.FUNCTIONS_REVISION:04d}"
    assert functions.name == f"functions-{revision}-{functions.digest[:16]}"
    assert len({script.digest for script in schema.scripts()}) == len(schema.scripts())


def test_applied_twice_changes_nothing(bare: psycopg.Connection[Any]) -> None:
    assert schema.missing(bare) == every()
    assert schema.apply(bare) == every()
    before = catalogue(bare)
    assert schema.apply(bare) == [] == schema.missing(bare)
    assert catalogue(bare) == before
    assert [name for name, _ in before["parts"]] == sorted(every())


def test_applied_from_several_programs_at_once(bare_dsn: str) -> None:
    barrier = threading.Barrier(8)
    applied: list[Any] = []

    def apply() -> None:
        with psycopg.connect(bare_dsn) as connection:
            barrier.wait(10)
            try:
                applied.append(schema.apply(connection))
            except psycopg.Error as exc:
                applied.append(exc)

    threads = [threading.Thread(target=apply) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(applied, key=len) == [[]] * 7 + [every()]


def test_script_can_be_run_by_other_tools(bare: psycopg.Connection[Any], dsn: str) -> None:
    bare.execute(schema.read())
    assert schema.missing(bare) == [] == schema.apply(bare)
    with psycopg.connect(dsn) as applied:
        assert catalogue(bare) == catalogue(applied)


def test_part_that_is_missing_is_named(bare: psycopg.Connection[Any]) -> None:
    schema.apply(bare)
    *_, functions = every()
    bare.execute("DELETE FROM fanout_schema WHERE name = %s", [functions])
    assert schema.missing(bare) == [functions]
    assert schema.apply(bare) == [functions]
    assert schema.missing(bare) == []


def test_next_version_applies_only_its_own(
    bare: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An upgrade: a migration more, other functions; the old library still finds its parts."""
    schema.apply(bare)
    *migrations, functions = schema.scripts()
    added = schema.Script(name="0099_more", text="CREATE TABLE fanout_more (x integer)")
    newer = dataclasses.replace(
        functions,
        name="functions-9999-newer",
        text=functions.text + "CREATE FUNCTION fanout_more_v1() RETURNS integer"
        " LANGUAGE sql AS 'SELECT 1';",
    )
    old = schema.scripts
    monkeypatch.setattr(schema, "scripts", lambda: (*migrations, added, newer))
    assert schema.missing(bare) == ["0099_more", "functions-9999-newer"]
    assert schema.apply(bare) == ["0099_more", "functions-9999-newer"]
    assert bare.execute("SELECT fanout_more_v1()").fetchall() == [(1,)]
    monkeypatch.setattr(schema, "scripts", old)
    assert schema.missing(bare) == []


def test_older_functions_never_replace_newer_ones(
    bare: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older library that applies its schema after a newer one leaves the functions alone."""
    *migrations, functions = schema.scripts()
    newer = dataclasses.replace(functions, name="functions-9999-newer")
    old = schema.scripts
    monkeypatch.setattr(schema, "scripts", lambda: (*migrations, newer))
    schema.apply(bare)
    bare.execute(
        "CREATE OR REPLACE FUNCTION fanout_notify_v1(p_event jsonb) RETURNS void"
        " LANGUAGE sql AS 'SELECT NULL::void /* newer */'"
    )
    monkeypatch.setattr(schema, "scripts", old)
    assert schema.missing(bare) == [] == schema.apply(bare)
    row = bare.execute(
        "SELECT prosrc LIKE '%newer%' FROM pg_proc WHERE proname = 'fanout_notify_v1'"
    ).fetchone()
    assert row == (True,)


def test_failure_leaves_nothing_behind(
    bare: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    scripts = schema.scripts()
    broken = schema.Script(name="9999_broken", text="CREATE TABLE fanout_late (x nonsense)")
    monkeypatch.setattr(schema, "scripts", lambda: (*scripts, broken))
    with pytest.raises(psycopg.errors.UndefinedObject):
        schema.apply(bare)
    assert bare.execute("SELECT to_regclass('fanout_schema')").fetchall() == [(None,)]
    monkeypatch.setattr(schema, "scripts", lambda: scripts)
    assert schema.apply(bare) == every()


async def test_schemas_stand_side_by_side(bare_dsn: str) -> None:
    """Two tenants in one database: each with tables, functions, runs and records of its own."""
    apps = []
    for tenant in ("north", "south"):
        inside = conninfo.make_conninfo(bare_dsn, options=f"-c search_path={tenant}")
        with psycopg.connect(inside, autocommit=True) as connection:
            connection.execute(f"CREATE SCHEMA {tenant}")
            connection.execute(SchemaManager.get_schema())
            if tenant == "south":
                # What the neighbour has counts for nothing.
                assert schema.missing(connection) == every()
            assert schema.apply(connection) == every()
        app = procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=inside))
        child: Any = fanout_child(app, name="child")(lambda item: item)
        apps.append((app, child))
    for app, child in apps:
        async with opened(app):
            run = await child.map_async([1, 2, 3])
            assert run.id == 1
            (progress,) = await work_off(app, run)
            assert counts(progress) == {"succeeded": 3, "total": 3}
            assert FanOut.of(app).missing_schema() == []


def test_names_are_ours_alone(bare: psycopg.Connection[Any]) -> None:
    """Everything begins with the library's prefix, and every function carries its version."""

    def names() -> set[tuple[str, str]]:
        return set(
            bare.execute(
                "SELECT 'function', proname FROM pg_proc"
                " WHERE pronamespace = 'public'::regnamespace"
                " UNION ALL SELECT 'relation', relname FROM pg_class"
                " WHERE relnamespace = 'public'::regnamespace"
            )
        )

    before = names()
    schema.apply(bare)
    ours = names() - before
    assert len(ours) > 30
    assert [name for _, name in ours if not name.startswith("fanout_")] == []
    assert [name for kind, name in ours if kind == "function" and name[-3:] != "_v1"] == []


def test_where_plans_are_ruled_out_none_is_compiled(conn: psycopg.Connection[Any]) -> None:
    """Without a way around what is ruled out a plan looks so dear that servers before 18 compile
    it, at every call."""
    found = conn.execute(
        "SELECT proname AS name, 'jit=off' = ANY (proconfig) AS interpreted FROM pg_proc"
        " WHERE proname LIKE 'fanout%' AND 'enable_seqscan=off' = ANY (proconfig)"
    ).fetchall()
    assert "fanout_silent_v1" in {row["name"] for row in found}
    assert [row for row in found if not row["interpreted"]] == []
