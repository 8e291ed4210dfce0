"""Databases of their own for the tests, on whatever server serves them."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import psycopg
from psycopg import conninfo, sql


class Databases:
    """Makes, watches and drops databases on one server."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._connection = psycopg.connect(dsn, autocommit=True)

    def close(self) -> None:
        self._connection.close()

    def dsn(self, name: str) -> str:
        return conninfo.make_conninfo(self._dsn, dbname=name)

    def create(
        self, name: str, template: str = "template0", settings: Mapping[str, str] | None = None
    ) -> str:
        """Create a database, give it settings of its own, and return its DSN."""
        # template0 cannot be connected to, so that nobody can be in the way.
        self._execute(
            "CREATE DATABASE {} TEMPLATE {}", sql.Identifier(name), sql.Identifier(template)
        )
        for setting, value in (settings or {}).items():
            self._execute(
                "ALTER DATABASE {} SET {} = {}",
                sql.Identifier(name),
                sql.Identifier(setting),
                sql.Literal(value),
            )
        return self.dsn(name)

    def drop(self, name: str) -> None:
        """Drop a database, and end whoever is connected to it."""
        self._execute("DROP DATABASE IF EXISTS {} WITH (FORCE)", sql.Identifier(name))

    def connections(self, name: str) -> list[str]:
        """Tell who is connected to a database, one line each."""
        rows = self._connection.execute(
            "SELECT format('%%s (%%s, %%s): %%s', pid, nullif(application_name, ''), state, query)"
            "  FROM pg_stat_activity WHERE datname = %s AND backend_type = 'client backend'",
            [name],
        )
        return [line for (line,) in rows]

    def deadlocks(self, name: str) -> int:
        """Count the deadlocks that the server ended in a database."""
        row = self._connection.execute(
            "SELECT deadlocks FROM pg_stat_database WHERE datname = %s", [name]
        ).fetchone()
        assert row is not None
        return int(row[0])

    def _execute(self, query: str, *parts: sql.Composable) -> None:
        self._connection.execute(sql.SQL(query).format(*parts))


def environment(dsn: str) -> dict[str, str]:
    """Return libpq's environment variables for a DSN, so that `PsycopgConnector()` finds it."""
    names = {option.keyword: option.envvar for option in psycopg.pq.Conninfo.get_defaults()}
    return {
        names[key.encode()].decode(): str(value)
        for key, value in conninfo.conninfo_to_dict(dsn).items()
        if names.get(key.encode())
    }


def run_script(code: str, dsn: str, *arguments: str) -> str:
    """Run Python code in a process of its own, on a database; return what it printed."""
    ran = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, **environment(dsn)},
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout
