"""The host app's own connector: starting, control and reading go through it."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import time
from collections.abc import Mapping
from typing import Any, TypeVar

import procrastinate
import procrastinate.exceptions
import procrastinate.testing
import psycopg
import psycopg.conninfo
import psycopg.rows

from fanout_procrastinate import database, errors, steps, store

T = TypeVar("T")

_TRIES = 20
_REMEDY = "pass FanOut(app, connection_factory=lambda: psycopg.connect(...))"
_OWN_ALONE = ("autocommit", "row_factory", "cursor_factory", "context")
# A half-open socket must not hold a renewal for hours.
_KEEPALIVE = {
    "keepalives": 1,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 4,
    "tcp_user_timeout": 30_000,
    "connect_timeout": 10,
}


class Host:
    """Run calls through an app's connector, sync or async.

    Args:
        app: the host app.
        connect: opens a connection of the library's own; for control where the connector shares
            the caller's transaction.
    """

    def __init__(self, app: procrastinate.App, connect: database.Connect | None = None) -> None:
        self.app = app
        self._connect = connect or connect_as(app)

    def control(self, calls: steps.Steps[T]) -> T:
        """Run calls that lock a run, each in a transaction of its own.

        A connector that shares the caller's transaction, such as Django's within a request, would
        hold these locks until that ends. Only what was started in that transaction, and is seen by
        nobody else, is looked for there.
        """
        if not _shares_transactions(self.app.connector):
            return steps.drive(self.run, calls)
        sight = _Sight()
        with contextlib.closing(database.Database(self._connect, size=1)) as own:

            def run(call: store.Call[Any]) -> Any:
                if not sight.hidden:
                    found = own.run(call)
                    if sight.is_seen(found):
                        return found
                return self.run(call)

            return steps.drive(run, calls)

    async def control_async(self, calls: steps.Steps[T]) -> T:
        """Run calls that lock a run, without blocking the loop; otherwise like `control`."""
        if not _shares_transactions(self.app.connector):
            return await steps.drive_async(self.run_async, calls)
        sight = _Sight()
        with contextlib.closing(database.Database(self._connect, size=1)) as own:

            async def run(call: store.Call[Any]) -> Any:
                if not sight.hidden:
                    found = await own.run_async(call)
                    if sight.is_seen(found):
                        return found
                return await self.run_async(call)

            return await steps.drive_async(run, calls)

    def run(self, call: store.Call[T], *, connection: Any = None) -> T:
        """Run a call; on the caller's own connection it joins the caller's transaction.

        Raises:
            SchemaError: the tables are missing.
            DatabaseError: anything else that the driver raised.
        """
        if connection is not None:
            return self._run_on(connection, call)
        connector = self._sync_connector()
        for attempt in range(_TRIES):
            try:
                return call.parse(connector.execute_query_all(call.sql, **call.params))
            except procrastinate.exceptions.ConnectorException as exc:
                _raise_unless_retried(exc, attempt)
            time.sleep(database.pause_before(attempt))
        raise AssertionError("unreachable")

    async def run_async(self, call: store.Call[T], *, connection: Any = None) -> T:
        """Run a call without blocking the loop; otherwise like `run`."""
        connector = self.app.connector
        _check_database(connector)
        if connection is not None:
            _check_connection(connector, connection)
            if isinstance(connection, psycopg.Connection):
                raise errors.ConfigurationError(
                    "this connection is sync: give a psycopg.AsyncConnection, or call defer"
                )
            try:
                return call.parse(
                    await connector.execute_query_all_async_with_connection(
                        connection, call.sql, **call.params
                    )
                )
            except procrastinate.exceptions.ConnectorException as exc:
                raise _mapped(exc) from exc
        task = asyncio.current_task()
        asked = task.cancelling() if task is not None else 0
        for attempt in range(_TRIES):
            try:
                rows = await connector.execute_query_all_async(call.sql, **call.params)
                if task is not None and task.cancelling() > asked:
                    # Before Python 3.12 asyncio.wait_for, with which the pool waits for a free
                    # connection, loses a cancellation that comes together with one.
                    raise asyncio.CancelledError
                return call.parse(rows)
            except procrastinate.exceptions.ConnectorException as exc:
                _raise_unless_retried(exc, attempt)
            await asyncio.sleep(database.pause_before(attempt))
        raise AssertionError("unreachable")

    def _sync_connector(self) -> Any:
        found = self.app.connector.get_sync_connector()
        _check_database(found)
        self.refuse_in_loop("await the _async twin of this call instead")
        return found

    def refuse_in_loop(self, remedy: str) -> None:
        """Refuse to block the event loop that the app is open for.

        Raises:
            ConfigurationError: it runs in this thread.
        """
        if is_open(self.app.connector) and in_a_loop():
            raise errors.ConfigurationError(
                f"an event loop runs in this thread and the app is open for it: {remedy}"
            )

    def _run_on(self, connection: Any, call: store.Call[T]) -> T:
        _check_connection(self.app.connector, connection)
        if isinstance(connection, psycopg.AsyncConnection):
            raise errors.ConfigurationError(
                "this connection is async: give a psycopg.Connection, or call defer_async"
            )
        if isinstance(connection, psycopg.Connection):
            # Not by way of the connector: opened for async use it takes async connections alone.
            try:
                with connection.cursor(row_factory=psycopg.rows.dict_row) as cursor:
                    return call.parse(cursor.execute(call.sql.encode(), call.params).fetchall())
            except psycopg.Error as exc:
                raise database.mapped(exc) from exc
        connector = self.app.connector.get_sync_connector()
        try:
            return call.parse(
                connector.execute_query_all_with_connection(connection, call.sql, **call.params)
            )
        except procrastinate.exceptions.ConnectorException as exc:
            raise _mapped(exc) from exc


def _shares_transactions(connector: Any) -> bool:
    """Whether what goes through it is part of a transaction that others began."""
    return type(connector).__module__.startswith("procrastinate.contrib.django")


class _Sight:
    """Tell by the first answer whether other transactions see what the calls are about."""

    hidden: bool | None = None

    def is_seen(self, found: Any) -> bool:
        if self.hidden is None:
            self.hidden = found is None or found == []
        return not self.hidden


def in_a_loop() -> bool:
    """Return whether an event loop runs in this thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def is_open(connector: Any) -> bool:
    """Return whether a worker can use this connector: it is async, on PostgreSQL, and open."""
    try:
        return isinstance(connector, procrastinate.PsycopgConnector) and bool(connector.pool)
    except procrastinate.exceptions.AppNotOpen:
        return False


def is_in_memory(connector: Any) -> bool:
    """Return whether this is the connector of tests without a database."""
    return type(connector) is procrastinate.testing.InMemoryConnector


def _check_database(connector: Any) -> None:
    if is_in_memory(connector):
        raise errors.ConfigurationError(
            "a run needs PostgreSQL, and this app's connector keeps everything in memory; in tests "
            "use fanout_procrastinate.testing.run_inline, which needs no database"
        )


def _check_connection(connector: Any, connection: Any) -> None:
    # Connectors of other drivers take what they take.
    ours = procrastinate.PsycopgConnector, procrastinate.SyncPsycopgConnector
    if isinstance(connector, ours) and not hasattr(connection, "cursor"):
        raise errors.ConfigurationError(
            f"connection={connection!r} is no database connection; give the one whose transaction "
            "the run is to join, such as a psycopg.Connection"
        )


def _mapped(exc: procrastinate.exceptions.ConnectorException) -> errors.FanoutError:
    cause = exc.__cause__ or exc.__context__
    if isinstance(cause, psycopg.Error):
        return database.mapped(cause)
    return errors.DatabaseError(str(cause or exc), transient=True)


def _raise_unless_retried(exc: procrastinate.exceptions.ConnectorException, attempt: int) -> None:
    cause = exc.__cause__ or exc.__context__
    sqlstate = cause.sqlstate if isinstance(cause, psycopg.Error) else None
    if not database.tries_again(sqlstate) or attempt == _TRIES - 1:
        raise _mapped(exc) from exc


def connect_as(app: procrastinate.App) -> database.Connect:
    """Return a function that opens connections like those of the app's connector.

    Raises (when called):
        ConfigurationError: the connector does not tell how; the message names the remedy.
    """

    def connect() -> psycopg.Connection[Any]:
        conninfo, kwargs = _connection_settings(app.connector)
        given = psycopg.conninfo.conninfo_to_dict(conninfo)
        ours = {name: value for name, value in _KEEPALIVE.items() if name not in given}
        return psycopg.connect(conninfo, **ours | kwargs)

    return connect


def _connection_settings(connector: Any) -> tuple[str, dict[str, Any]]:
    _check_database(connector)
    if _shares_transactions(connector):
        # Django's: as its own connections are opened, less what concerns these alone.
        given = dict(connector.connection.get_connection_params())
        return "", {name: value for name, value in given.items() if name not in _OWN_ALONE}
    pool = getattr(connector, "_async_pool", None) or getattr(connector, "_pool", None)
    if pool is not None:
        conninfo, kwargs = getattr(pool, "conninfo", None), getattr(pool, "kwargs", None)
    else:
        arguments = getattr(connector, "_pool_args", None)
        if not isinstance(arguments, Mapping):
            raise errors.ConfigurationError(
                f"{type(connector).__name__} does not tell how to open a connection; {_REMEDY}"
            )
        conninfo, kwargs = arguments.get("conninfo", ""), arguments.get("kwargs")
    settings = (_called(conninfo) or "", dict(_called(kwargs) or {}))
    for name in _OWN_ALONE:
        settings[1].pop(name, None)
    return settings


def _called(value: Any) -> Any:
    """Return the value, or what a function without arguments gives for it."""
    if callable(value):
        value = value()
    if inspect.isawaitable(value):
        if inspect.iscoroutine(value):
            value.close()
        raise errors.ConfigurationError(
            f"the pool's connection settings come from an async function; {_REMEDY}"
        )
    return value
