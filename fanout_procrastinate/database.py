"""The library's own connections: autocommit, read committed, one statement at a time."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import random
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, TypeVar

import psycopg
import psycopg.rows

from fanout_procrastinate import errors, store

logger = logging.getLogger(__name__)

T = TypeVar("T")
DriverError = psycopg.Error
Connect = Callable[[], "psycopg.Connection[Any]"]

_TRY_AGAIN = ("40001", "40P01")
_ELSEWHERE = ("26000", "42P05")  # prepared in another session: a pooler stands between
_READ_ONLY = "25006"
_MISSING = ("42P01", "42883", "42704")  # table, function, type
_REFUSALS = ("0A", "22", "23", "42", "54")  # 54: larger than the server can take
_TRIES = 20
# Only where it is not so already: behind a pooler, what is set stays with others. With array_nulls
# off, an absent key would be the text NULL.
_SESSION = (
    "SELECT set_config(name, value, false) FROM (VALUES"
    " ('default_transaction_isolation', 'read committed'), ('array_nulls', 'on'))"
    " AS wanted (name, value) WHERE current_setting(name) <> value",
)


def mapped(exc: psycopg.Error) -> errors.FanoutError:
    """Return the library's error for one of the driver's."""
    message = _first_line(exc)  # the lines below it quote the statement
    if exc.sqlstate in _MISSING and "fanout" in message:
        return errors.SchemaError(f"the fan-out tables are missing ({message})")
    if exc.sqlstate in _ELSEWHERE:
        message += '; behind a pooler give the connector kwargs={"prepare_threshold": None}'
    return errors.DatabaseError(message, sqlstate=exc.sqlstate, transient=not _refused(exc))


def _refused(exc: psycopg.Error) -> bool:
    """Return whether the server, or the driver itself, would refuse this statement every time."""
    if exc.sqlstate is None:
        return isinstance(exc, psycopg.DataError | psycopg.ProgrammingError)
    if exc.sqlstate in _ELSEWHERE:
        return False
    return exc.sqlstate[:2] in _REFUSALS


def tries_again(sqlstate: str | None) -> bool:
    """Return whether the same statement is to be sent again at once."""
    return sqlstate in _TRY_AGAIN


def pause_before(attempt: int) -> float:
    """Return the seconds to wait before trying again after a serialisation failure."""
    longest: float = min(0.5, 0.005 * 2 ** min(attempt, 10))
    return longest * random.random()  # noqa: S311 - jitter


def _is_demoted(exc: BaseException) -> bool:
    """Whether the server takes no writes: after a failover, a new connection may find who does."""
    return isinstance(exc, psycopg.Error) and exc.sqlstate == _READ_ONLY


def _first_line(exc: BaseException) -> str:
    return (str(exc).strip().splitlines() or [type(exc).__name__])[0]


class Database:
    """Run calls on a few connections, from any thread or from a loop without blocking it.

    Args:
        connect: opens a connection; its settings are made to fit here.
        size: how many statements may be on their way at the same time.
    """

    def __init__(self, connect: Connect, *, size: int = 4) -> None:
        self._connect = connect
        self._free: list[psycopg.Connection[Any]] = []
        self._lock = threading.Lock()
        self._closed = False
        self._executor = concurrent.futures.ThreadPoolExecutor(
            max_workers=size, thread_name_prefix="fanout-database"
        )

    def run(self, call: store.Call[T]) -> T:
        """Run a call; serialisation failures and deadlocks are tried again.

        Raises:
            SchemaError: the tables are missing.
            DatabaseError: anything else that the driver raised.
        """
        for attempt in range(_TRIES):
            try:
                return self._run_once(call)
            except psycopg.Error as exc:
                if not tries_again(exc.sqlstate) or attempt == _TRIES - 1:
                    raise mapped(exc) from exc
            time.sleep(pause_before(attempt))
        raise AssertionError("unreachable")

    async def run_async(self, call: store.Call[T]) -> T:
        """Run a call in a thread of its own."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, self.run, call)

    def close(self) -> None:
        """Close the connections; statements on their way end first."""
        self._executor.shutdown(wait=True)
        with self._lock:
            self._closed = True
            free, self._free = self._free, []
        for connection in free:
            connection.close()

    def _run_once(self, call: store.Call[T]) -> T:
        connection = self._take()
        try:
            rows = connection.execute(call.sql.encode(), call.params).fetchall()
        except BaseException as exc:
            if connection.broken or connection.closed or _is_demoted(exc):
                connection.close()
            else:
                self._give_back(connection)
            raise
        self._give_back(connection)
        return call.parse(rows)

    def _take(self) -> psycopg.Connection[Any]:
        with self._lock:
            if self._free:
                return self._free.pop()
        connection = self._connect()
        try:
            # In a pooler's sessions, what others prepared may have the same name.
            connection.prepare_threshold = None
            if not connection.autocommit:
                connection.rollback()
                connection.autocommit = True
            connection.row_factory = psycopg.rows.dict_row
            for statement in _SESSION:
                connection.execute(statement)
        except BaseException:
            connection.close()
            raise
        return connection

    def _give_back(self, connection: psycopg.Connection[Any]) -> None:
        with self._lock:
            if not self._closed:
                self._free.append(connection)
                return
        connection.close()


class Reader:
    """Run calls one by one on a connection of their own, each in a read-only transaction.

    A call reads one snapshot. It locks no row: it waits for nobody, and nobody waits for it.

    Args:
        connect: opens the connection; its settings are made to fit here.
    """

    def __init__(self, connect: Connect) -> None:
        self._connect = connect

    def __enter__(self) -> Self:
        try:
            self._connection = self._connect()
        except psycopg.Error as exc:
            raise mapped(exc) from exc
        if not self._connection.autocommit:
            self._connection.rollback()
        self._connection.prepare_threshold = None
        self._connection.autocommit = False
        self._connection.read_only = True
        self._connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        self._connection.row_factory = psycopg.rows.dict_row
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._connection.close()

    def run(self, call: store.Call[T], seconds: float) -> T:
        """Run a call that may take so many seconds.

        Raises:
            TimeoutError: it took longer, or there was no time left.
            SchemaError: the tables are missing.
            DatabaseError: anything else that the driver raised.
        """
        if seconds <= 0:
            raise TimeoutError
        limit = store.limit_time(seconds)
        try:
            with self._connection.transaction():
                self._connection.execute(limit.sql.encode(), limit.params)
                rows = self._connection.execute(call.sql.encode(), call.params).fetchall()
        except psycopg.errors.QueryCanceled as exc:
            raise TimeoutError from exc
        except psycopg.Error as exc:
            raise mapped(exc) from exc
        return call.parse(rows)
