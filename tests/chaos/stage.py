"""The ground of a round: a server of its own, a proxy before it, and a database with a memory."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import procrastinate.exceptions
import psycopg
import psycopg_pool
from procrastinate.schema import SchemaManager
from psycopg import conninfo
from psycopg.rows import dict_row

from fanout_procrastinate import errors, schema
from tests import installations, servers
from tests.chaos.proxy import Proxy
from tests.databases import Databases

T = TypeVar("T")
Row = dict[str, Any]

_NAME = "chaos"
HARNESS = "chaos harness"
_UNHARMED = " ".join(
    f"-c {setting}"
    for setting in (
        "default_transaction_read_only=off",
        "default_transaction_isolation=read\\ committed",
        "statement_timeout=0",
        "lock_timeout=0",
    )
)
"""What the harness's own connections are not to share with the others."""

# Every change of state that the library makes is written down by triggers, in its transaction, and
# who made it: what happened twice is seen, even where the second time left no other trace.
_HISTORY = """
CREATE TABLE chaos_items (id bigserial PRIMARY KEY, at timestamptz DEFAULT clock_timestamp(),
    run_id bigint, position bigint, was text, status text, claim bigint, failures int, crashes int,
    was_crashes int, by text DEFAULT current_setting('application_name'));
CREATE FUNCTION chaos_item() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    INSERT INTO chaos_items (run_id, position, was, status, claim, failures, crashes, was_crashes)
    VALUES (NEW.run_id, NEW.position, OLD.status, NEW.status, NEW.claim, NEW.failures, NEW.crashes,
        OLD.crashes);
    RETURN NULL;
END $$;
CREATE TRIGGER chaos AFTER UPDATE ON fanout_items FOR EACH ROW
    WHEN ((OLD.status, OLD.claim) IS DISTINCT FROM (NEW.status, NEW.claim))
    EXECUTE FUNCTION chaos_item();
CREATE TABLE chaos_runs (id bigserial PRIMARY KEY, at timestamptz DEFAULT clock_timestamp(),
    run_id bigint, generation int, was text, status text);
CREATE FUNCTION chaos_run() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    INSERT INTO chaos_runs (run_id, generation, was, status)
    VALUES (NEW.id, NEW.generation, OLD.status, NEW.status);
    RETURN NULL;
END $$;
CREATE TRIGGER chaos AFTER UPDATE ON fanout_runs FOR EACH ROW
    WHEN (OLD.status IS DISTINCT FROM NEW.status) EXECUTE FUNCTION chaos_run();
CREATE TABLE chaos_callbacks (id bigserial PRIMARY KEY, at timestamptz DEFAULT clock_timestamp(),
    run_id bigint, generation int, task text, was text, state text, job_id bigint);
CREATE FUNCTION chaos_callback() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    INSERT INTO chaos_callbacks (run_id, generation, task, was, state, job_id)
    VALUES (NEW.run_id, NEW.generation, NEW.task, OLD.state, NEW.state, NEW.job_id);
    RETURN NULL;
END $$;
CREATE TRIGGER chaos AFTER UPDATE ON fanout_callbacks FOR EACH ROW
    WHEN (OLD.state IS DISTINCT FROM NEW.state) EXECUTE FUNCTION chaos_callback();
"""


class Stage:
    """A server with the database of a round: `with Stage() as stage`."""

    def __init__(self) -> None:
        installation = installations.find(18)
        if installation is None:
            raise RuntimeError(f"PostgreSQL 18 is missing: {installations.remedy(18)}")
        self.server = servers.Server(installation, settings={"log_min_messages": "warning"})
        self.proxy = Proxy(self.server.root / f".s.PGSQL.{self.server.port}")
        self._restarting = threading.Lock()

    def __enter__(self) -> Self:
        self.server.start()
        self.proxy.start()
        databases = Databases(self.server.dsn)
        databases.create(_NAME)
        databases.close()
        with self.connect() as connection:
            connection.execute(SchemaManager.get_schema())
            schema.apply(connection)
            connection.execute(_HISTORY)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.proxy.close()
        self.server.close()

    @property
    def dsn(self) -> str:
        """The database, straight, for the harness itself."""
        return conninfo.make_conninfo(
            self.server.dsn, dbname=_NAME, application_name=HARNESS, options=_UNHARMED
        )

    @property
    def proxied_dsn(self) -> str:
        """The database, through the proxy, for workers."""
        return conninfo.make_conninfo(
            self.server.dsn, dbname=_NAME, host="127.0.0.1", port=self.proxy.port
        )

    @contextlib.contextmanager
    def connect(self) -> Iterator[psycopg.Connection[Row]]:
        """Connect straight to the database: autocommit, rows as dicts."""
        name = "chaos harness"
        with contextlib.closing(
            psycopg.connect(self.dsn, autocommit=True, row_factory=dict_row, application_name=name)
        ) as connection:
            yield connection

    def query(self, sql: str, **values: Any) -> list[Row]:
        """Run one statement; it is tried again while the server is away."""

        def once() -> list[Row]:
            with self.connect() as connection:
                cursor = connection.execute(sql, values)
                return cursor.fetchall() if cursor.description else []

        return patiently(once)

    def restart(self, how: servers.Stop, seconds: float) -> bool:
        """Stop the server, wait, and start it again; false while somebody else does so."""
        if not self._restarting.acquire(blocking=False):
            return False
        try:
            self.server.stop(how)
            time.sleep(seconds)
            self.server.start()
        finally:
            self._restarting.release()
        return True

    def set_for_all(self, settings: Mapping[str, str], seconds: float) -> bool:
        """Change settings of the server for a time; all sessions but the harness's see them."""
        for name, value in settings.items():
            self.query(f"ALTER SYSTEM SET {name} = '{value}'")
        self.query("SELECT pg_reload_conf()")
        time.sleep(seconds)
        for name in settings:
            self.query(f"ALTER SYSTEM RESET {name}")
        self.query("SELECT pg_reload_conf()")
        return True

    def server_log(self) -> str:
        return Path(self.server.log).read_text(errors="replace")


def patiently(call: Callable[[], T], seconds: float = 60.0) -> T:
    """Return what `call` returns; it is called again while the database is away."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return call()
        except Exception as exc:
            if not is_away(exc) or time.monotonic() > deadline:
                raise
        time.sleep(0.2)


def is_away(error: BaseException | None) -> bool:
    """Tell whether an error says that the database cannot be reached now."""
    if isinstance(error, errors.DatabaseError):
        return error.transient
    if isinstance(error, procrastinate.exceptions.ConnectorException):
        return is_away(error.__cause__ or error.__context__)
    return isinstance(error, psycopg.OperationalError | psycopg_pool.PoolTimeout)
