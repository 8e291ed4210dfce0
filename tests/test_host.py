"""The app's own connector: how calls go through it, and what it tells of its connections."""

from typing import Any

import procrastinate
import procrastinate.testing
import psycopg
import psycopg_pool
import pytest
from psycopg.rows import dict_row

from fanout_procrastinate import ConfigurationError, DatabaseError, SchemaError, host, store
from fanout_procrastinate import database as database_module
from tests.support import flaky, opened, probe, unconnected

Conn = psycopg.Connection[dict[str, Any]]


def connector_app(connector: Any) -> procrastinate.App:
    return procrastinate.App(connector=connector)


# -- calls


async def test_calls_go_through_the_connector(app: procrastinate.App) -> None:
    mine = host.Host(app)
    call = probe("SELECT %(x)s::text AS x", x="é")
    async with opened(app):
        assert await mine.run_async(call) == [{"x": "é"}]
    with app.open():
        assert mine.run(call) == [{"x": "é"}]


async def test_serialisation_failures_are_tried_again(
    app: procrastinate.App,
    conn: Conn,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mine = host.Host(app)
    call = flaky(conn, "40001", 3)
    async with opened(app):
        assert await mine.run_async(call) == [{"n": 4}]
    conn.execute("ALTER SEQUENCE tries RESTART")
    with app.open():
        assert mine.run(call) == [{"n": 4}]
        monkeypatch.setattr(host, "_TRIES", 2)
        conn.execute("ALTER SEQUENCE tries RESTART")
        with pytest.raises(DatabaseError, match="try 2 of fanout") as got:
            mine.run(call)
    assert got.value.sqlstate == "40001"
    async with opened(app):
        conn.execute("ALTER SEQUENCE tries RESTART")
        with pytest.raises(DatabaseError, match="try 2 of fanout"):
            await mine.run_async(call)


async def test_errors_are_mapped(app: procrastinate.App, dsn: str) -> None:
    mine = host.Host(app)
    refused = probe("SELECT 1 / 0")
    async with opened(app):
        with pytest.raises(DatabaseError, match="division by zero"):
            await mine.run_async(refused)
        async with await psycopg.AsyncConnection.connect(dsn) as own:
            with pytest.raises(DatabaseError, match="division by zero"):
                await mine.run_async(refused, connection=own)
    with app.open(), psycopg.connect(dsn) as own_sync:
        with pytest.raises(DatabaseError, match="division by zero"):
            mine.run(refused)
        with pytest.raises(DatabaseError, match="division by zero"):
            mine.run(refused, connection=own_sync)


async def test_missing_schema_on_ones_own_connection(bare_dsn: str) -> None:
    mine = host.Host(connector_app(procrastinate.PsycopgConnector(conninfo=bare_dsn)))
    with psycopg.connect(bare_dsn) as own, pytest.raises(SchemaError):
        mine.run(store.progress(1), connection=own)
    async with await psycopg.AsyncConnection.connect(bare_dsn) as other:
        with pytest.raises(SchemaError):
            await mine.run_async(store.progress(1), connection=other)


class Odd(procrastinate.testing.InMemoryConnector):
    """A connector of another driver: its errors have no cause that psycopg knows."""

    def execute_query_all(self, query: Any, **arguments: Any) -> Any:
        raise procrastinate.exceptions.ConnectorException("odd") from OSError("the wire")

    async def execute_query_all_async(self, query: Any, **arguments: Any) -> Any:
        raise procrastinate.exceptions.ConnectorException("just odd")

    def execute_query_all_with_connection(
        self, connection: Any, query: Any, **arguments: Any
    ) -> Any:
        if connection == "broken":
            raise procrastinate.exceptions.ConnectorException("odd connection")
        return [{"connection": connection, **arguments}]

    async def execute_query_all_async_with_connection(
        self, connection: Any, query: Any, **arguments: Any
    ) -> Any:
        return self.execute_query_all_with_connection(connection, query, **arguments)


async def test_connectors_of_other_drivers() -> None:
    mine = host.Host(connector_app(Odd()))
    call = probe("SELECT 1 AS x", x=1)
    for words, attempt in (
        ("the wire", lambda: mine.run(call)),
        ("odd connection", lambda: mine.run(call, connection="broken")),
    ):
        with pytest.raises(DatabaseError, match=words) as got:
            attempt()
        assert got.value.transient
    with pytest.raises(DatabaseError, match="just odd"):
        await mine.run_async(call)
    with pytest.raises(DatabaseError, match="odd connection"):
        await mine.run_async(call, connection="broken")
    # Whatever connection they take joins the caller's transaction.
    assert mine.run(call, connection="theirs") == [{"connection": "theirs", "x": 1}]
    assert await mine.run_async(call, connection="theirs") == [{"connection": "theirs", "x": 1}]


# -- connections like the app's


def described(connector: Any) -> tuple[str, dict[str, Any]]:
    return host._connection_settings(connector)


def test_connections_are_opened_like_the_apps(app: procrastinate.App, dsn: str) -> None:
    with host.connect_as(app)() as connection:
        assert connection.info.dbname == psycopg.conninfo.conninfo_to_dict(dsn)["dbname"]
        assert connection.info.get_parameters()["tcp_user_timeout"] == "30000"


async def test_settings_come_from_the_arguments_or_the_open_pool(dsn: str) -> None:
    for connector in (
        procrastinate.PsycopgConnector(conninfo=dsn, kwargs={"application_name": "a"}),
        procrastinate.SyncPsycopgConnector(conninfo=dsn, kwargs={"application_name": "a"}),
        procrastinate.PsycopgConnector(
            conninfo=lambda: dsn, kwargs=lambda: {"application_name": "a"}
        ),
    ):
        assert described(connector) == (dsn, {"application_name": "a"})
        with host.connect_as(connector_app(connector))() as connection:
            assert connection.info.get_parameters()["application_name"] == "a"

    app = connector_app(procrastinate.PsycopgConnector(conninfo="host=/nowhere"))
    pool = psycopg_pool.AsyncConnectionPool(
        dsn, kwargs={"application_name": "pooled"}, open=False, min_size=0, max_size=1
    )
    async with pool, app.open_async(pool):
        assert described(app.connector) == (dsn, {"application_name": "pooled"})
    sync_app = connector_app(procrastinate.SyncPsycopgConnector(conninfo=dsn))
    with sync_app.open():
        assert described(sync_app.connector)[0] == dsn


def test_what_belongs_to_the_pool_alone_is_left_out(dsn: str) -> None:
    connector = procrastinate.PsycopgConnector(
        conninfo=dsn,
        kwargs={"autocommit": False, "row_factory": dict_row, "prepare_threshold": None},
        min_size=3,
    )
    assert described(connector) == (dsn, {"prepare_threshold": None})
    assert described(procrastinate.PsycopgConnector()) == ("", {})


def test_users_may_set_keepalives_of_their_own(dsn: str) -> None:
    connector = procrastinate.PsycopgConnector(conninfo=dsn, kwargs={"tcp_user_timeout": 5})
    with host.connect_as(connector_app(connector))() as connection:
        assert connection.info.get_parameters()["tcp_user_timeout"] == "5"


def test_connector_that_does_not_tell_is_refused_with_a_remedy() -> None:
    connect = host.connect_as(connector_app(Odd()))
    with pytest.raises(ConfigurationError, match=r"Odd does not tell.*connection_factory="):
        connect()


def test_async_settings_are_refused_with_a_remedy(dsn: str) -> None:
    async def conninfo() -> str:
        return dsn

    connect = host.connect_as(connector_app(procrastinate.PsycopgConnector(conninfo=conninfo)))
    with pytest.raises(ConfigurationError, match=r"async function.*connection_factory="):
        connect()


def test_host_and_own_connections_try_as_often() -> None:
    assert host._TRIES == database_module._TRIES
    assert host.Host(unconnected()).app is not None


def test_connector_without_a_database_is_refused() -> None:
    """The remedy is named: a run cannot be kept in memory."""
    app = procrastinate.App(connector=procrastinate.testing.InMemoryConnector())
    with pytest.raises(ConfigurationError, match="needs PostgreSQL"):
        host.Host(app).run(store.progress(1))


def test_connection_that_is_none_is_refused(app: procrastinate.App) -> None:
    with pytest.raises(ConfigurationError, match="is no database connection"):
        host.Host(app).run(store.progress(1), connection=object())


async def test_sync_call_on_the_loops_own_thread_names_the_async_twin(
    app: procrastinate.App,
) -> None:
    async with app.open_async():
        with pytest.raises(ConfigurationError, match="_async"):
            host.Host(app).run(store.progress(1))
