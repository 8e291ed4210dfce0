"""The library's own connections: how they are opened, shared, replaced, closed; errors mapped."""

import asyncio
import threading
import time
from typing import Any

import psycopg
import pytest

from fanout_procrastinate import DatabaseError, SchemaError, database, store
from fanout_procrastinate.database import Database
from tests.support import direct, flaky, probe
from tests.waiting import wait_until

Conn = psycopg.Connection[dict[str, Any]]


class Counted:
    """Opens connections and remembers them."""

    def __init__(self, dsn: str, **options: Any) -> None:
        self._dsn = dsn
        self._options = options
        self.opened: list[psycopg.Connection[Any]] = []

    def __call__(self) -> psycopg.Connection[Any]:
        self.opened.append(psycopg.connect(self._dsn, **self._options))
        return self.opened[-1]


# -- what a connection is like


@pytest.mark.database_settings(default_transaction_isolation="serializable")
@pytest.mark.parametrize("autocommit", [True, False])
def test_any_connection_is_made_to_fit(dsn: str, autocommit: bool) -> None:
    def in_transaction() -> psycopg.Connection[Any]:
        connection = psycopg.connect(dsn, autocommit=autocommit)
        connection.execute("SELECT 1")
        return connection

    own = Database(in_transaction, size=1)
    (row,) = own.run(probe("SELECT current_setting('transaction_isolation') AS level"))
    assert row == {"level": "read committed"}
    own.run(probe("INSERT INTO fanout_schema (name, digest) VALUES ('x', '') RETURNING name"))
    own.close()
    with psycopg.connect(dsn) as connection:  # autocommit: it is there
        assert connection.execute("SELECT 1 FROM fanout_schema WHERE name = 'x'").fetchone()


def test_connection_that_cannot_be_made_to_fit_is_closed(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "_SESSION", ("SET SESSION nonsense",))
    connect = Counted(dsn)
    own = Database(connect, size=1)
    with pytest.raises(DatabaseError):
        own.run(probe("SELECT 1 AS x"))
    assert [connection.closed for connection in connect.opened] == [True]
    own.close()


def test_connections_are_used_again(dsn: str) -> None:
    connect = Counted(dsn)
    own = Database(connect)
    for _ in range(5):
        own.run(probe("SELECT 1 AS x"))
    with pytest.raises(DatabaseError):
        own.run(probe("SELECT 1 / 0 AS x"))
    own.run(probe("SELECT 1 AS x"))
    assert len(connect.opened) == 1
    own.close()
    assert connect.opened[0].closed


def test_broken_connection_is_replaced(dsn: str, conn: Conn) -> None:
    connect = Counted(dsn, application_name="ours")
    own = Database(connect, size=1)
    own.run(probe("SELECT 1 AS x"))
    conn.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'ours'"
    )
    with pytest.raises(DatabaseError) as got:
        own.run(probe("SELECT 1 AS x"))
    assert got.value.transient
    assert own.run(probe("SELECT 1 AS x")) == [{"x": 1}]
    assert [connection.closed for connection in connect.opened] == [True, False]
    own.close()


async def test_loop_goes_on_and_few_connections_are_opened(dsn: str) -> None:
    connect = Counted(dsn)
    own = Database(connect, size=3)
    started = time.monotonic()
    turns = 0

    async def turning() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    beside = asyncio.create_task(turning())
    call = probe("SELECT pg_sleep(0.1) AS x")
    await asyncio.gather(*(own.run_async(call) for _ in range(6)))
    beside.cancel()
    assert time.monotonic() - started < 1.0 and turns > 50
    assert len(connect.opened) == 3
    own.close()


def test_close_lets_statements_end(dsn: str) -> None:
    connect = Counted(dsn)
    own = Database(connect, size=1)
    call = probe("SELECT pg_sleep(0.3)::text AS x")
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(own.run(call)))
    thread.start()
    wait_until(lambda: connect.opened)
    own.close()
    thread.join()
    # Its connection was given back after the end: closed, not kept.
    assert found == [[{"x": ""}]] and connect.opened[0].closed


# -- trying again


@pytest.mark.parametrize("code", ["40001", "40P01"])
def test_serialisation_failures_are_tried_again(dsn: str, conn: Conn, code: str) -> None:
    with direct(dsn) as own:
        assert own.run(flaky(conn, code, 3)) == [{"n": 4}]


def test_trying_again_has_an_end(dsn: str, conn: Conn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "_TRIES", 3)
    with direct(dsn) as own:
        with pytest.raises(DatabaseError, match="try 3 of fanout") as got:
            own.run(flaky(conn, "40001", 100))
        assert (got.value.sqlstate, got.value.transient) == ("40001", True)


def test_other_errors_are_not_tried_again(dsn: str, conn: Conn) -> None:
    with direct(dsn) as own, pytest.raises(DatabaseError, match="try 1 of fanout"):
        own.run(flaky(conn, "55P03", 1))


def test_pauses_grow_and_stay_short() -> None:
    pauses = [max(database.pause_before(attempt) for _ in range(200)) for attempt in (0, 3, 50)]
    assert pauses == sorted(pauses) and pauses[-1] <= 0.5


# -- errors


@pytest.mark.parametrize(
    ("sql", "words"),
    [
        ("SELECT * FROM fanout_nothing", 'relation "fanout_nothing" does not exist'),
        ("SELECT fanout_nothing_v1()", "function fanout_nothing_v1"),
        ("SELECT NULL::fanout_nothing", 'type "fanout_nothing" does not exist'),
    ],
)
def test_missing_schema(dsn: str, sql: str, words: str) -> None:
    with direct(dsn) as own, pytest.raises(SchemaError, match=r"schema --apply") as got:
        own.run(probe(sql))
    assert words in str(got.value) and "\n" not in str(got.value)


@pytest.mark.parametrize(
    ("sql", "sqlstate", "transient"),
    [
        ("SELECT 1 / 0", "22012", False),
        ("SELECT '{'::jsonb", "22P02", False),
        ("SELECT * FROM nowhere", "42P01", False),
        ("INSERT INTO fanout_schema (name) VALUES (NULL)", "23502", False),
        # Too much for the server: it would be refused every time.
        ("SELECT repeat('[', 100000)::jsonb", "54001", False),
        ("SELECT 1 AS x, pg_terminate_backend(pg_backend_pid())", "57P01", True),
        ("SELECT set_config('statement_timeout', '1', false), pg_sleep(3)", None, None),
        ("DO $$ BEGIN RAISE 'no' USING ERRCODE = '53300'; END $$", "53300", True),
    ],
)
def test_errors_say_whether_to_try_again(
    dsn: str, sql: str, sqlstate: str | None, transient: bool | None
) -> None:
    if sqlstate is None:
        sql = "SELECT pg_sleep(3)"
    with direct(dsn, size=1) as own:
        if sqlstate is None:
            own.run(probe("SELECT set_config('statement_timeout', '1', false)"))
            sqlstate, transient = "57014", True
        with pytest.raises(DatabaseError) as got:
            own.run(probe(sql))
    assert (got.value.sqlstate, got.value.transient) == (sqlstate, transient)
    assert "\n" not in str(got.value)


def test_what_the_driver_itself_refuses_is_refused_every_time(dsn: str) -> None:
    with direct(dsn) as own:
        for sql, params in (
            ("SELECT %(x)s::text AS x", {"x": "a\0b"}),
            ("SELECT %(x)s::text AS x", {"x": object()}),
            ("SELECT %(y)s AS x", {"x": 1}),
        ):
            with pytest.raises(DatabaseError) as got:
                own.run(probe(sql, **params))
            assert not got.value.transient and got.value.sqlstate is None


def test_server_out_of_reach_is_worth_another_try() -> None:
    own = Database(lambda: psycopg.connect("host=/nowhere"))
    with pytest.raises(DatabaseError) as got:
        own.run(store.run(1))
    assert got.value.transient
    own.close()


def test_error_without_a_text_is_named_by_its_type() -> None:
    assert str(database.mapped(psycopg.InterfaceError(""))) == "InterfaceError"
