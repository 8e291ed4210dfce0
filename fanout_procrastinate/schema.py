"""The tables and functions in the database: apply them, check them, show them."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.resources
import logging
from typing import Any

import psycopg
import psycopg.rows
from psycopg import pq

from fanout_procrastinate import errors

logger = logging.getLogger(__name__)

FUNCTIONS_REVISION = 1
"""Raised by one with each released change of a function: an older set never replaces a newer."""

_FUNCTION_FILES = (
    "limits",
    "lanes",
    "permits",
    "dispatch",
    "manager",
    "control",
    "sweep",
    "audit",
    "events",
)
_FUNCTIONS = "functions-"
_RECORDS = """
CREATE TABLE IF NOT EXISTS fanout_schema (
    name text PRIMARY KEY,
    digest text NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT clock_timestamp()
)
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Script:
    """One part of the schema: a migration, applied once, or a set of functions."""

    name: str
    text: str

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()


def _read(*path: str) -> str:
    root = importlib.resources.files(__package__) / "sql"
    return root.joinpath(*path).read_text(encoding="utf-8")


@functools.cache
def scripts() -> tuple[Script, ...]:
    """Return the parts of the schema in the order in which they are applied.

    The functions carry their revision and their digest in their name. Each function is versioned
    and keeps its signature, so that an older library works with a newer revision.
    """
    folder = importlib.resources.files(__package__) / "sql" / "migrations"
    names = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".sql"))
    migrations = [
        Script(name=name.removesuffix(".sql"), text=_read("migrations", name)) for name in names
    ]
    body = "\n".join(_read("functions", f"{name}.sql") for name in _FUNCTION_FILES)
    functions = Script(name="functions", text=body)
    name = f"{_FUNCTIONS}{FUNCTIONS_REVISION:04d}-{functions.digest[:16]}"
    return (*migrations, dataclasses.replace(functions, name=name))


def _stands(script: Script, applied: set[str]) -> bool:
    """Whether a part is there: itself, or for functions a newer revision."""
    if script.name in applied:
        return True
    if not script.name.startswith(_FUNCTIONS):
        return False
    revision = script.name.removeprefix(_FUNCTIONS).partition("-")[0]
    newest = max(
        (
            name.removeprefix(_FUNCTIONS).partition("-")[0]
            for name in applied
            if name.startswith(_FUNCTIONS)
        ),
        default="",
    )
    return newest > revision


def read() -> str:
    """Return the whole schema as one SQL script, for review or for a tool of your own."""
    parts = [_RECORDS.strip() + ";", "SET check_function_bodies = off;"]
    for script in scripts():
        parts.append(f"-- {script.name}\n{script.text}")
        parts.append(_record(script))
    return "\n\n".join(parts) + "\n"


def _record(script: Script) -> str:
    return (
        "INSERT INTO fanout_schema (name, digest) "  # noqa: S608  # both are our own literals
        f"VALUES ('{script.name}', '{script.digest}') ON CONFLICT (name) DO NOTHING;"
    )


def missing(connection: psycopg.Connection[Any]) -> list[str]:
    """Return the names of the parts that this library needs and the database lacks."""
    with connection.cursor(row_factory=psycopg.rows.tuple_row) as cursor:
        cursor.execute("SELECT to_regclass('fanout_schema') IS NOT NULL")
        row = cursor.fetchone()
        applied: set[str] = set()
        if row and row[0]:
            cursor.execute("SELECT name FROM fanout_schema")
            applied = {name for (name,) in cursor.fetchall()}
    return [script.name for script in scripts() if not _stands(script, applied)]


def _check_host(connection: psycopg.Connection[Any]) -> None:
    with connection.cursor(row_factory=psycopg.rows.tuple_row) as cursor:
        cursor.execute("SELECT to_regtype('procrastinate_job_to_defer_v1') IS NOT NULL")
        row = cursor.fetchone()
    if not row or not row[0]:
        raise errors.ConfigurationError(
            "procrastinate's own tables are missing in this database, or older than version 3; "
            "first run: python -m procrastinate --app=... schema --apply"
        )


def apply(connection: psycopg.Connection[Any]) -> list[str]:
    """Apply what is missing, in one transaction and under an advisory lock.

    Tables go into the first schema of the connection's `search_path`; procrastinate's own schema
    must be there already. Applying twice, or from several programs at once, changes nothing more.

    Returns the names of the parts that were applied.

    Raises:
        ConfigurationError: procrastinate's own tables are missing.
    """
    if not missing(connection):
        return []
    if connection.info.transaction_status is not pq.TransactionStatus.IDLE:
        connection.commit()
    with connection.transaction():
        # Whatever the server's default: what others commit while we wait must be seen.
        connection.execute("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
        _check_host(connection)
        connection.execute(
            "SELECT pg_advisory_xact_lock("
            "hashtextextended('fanout_schema:' || current_schema(), 0))"
        )
        connection.execute(_RECORDS)
        names = missing(connection)
        connection.execute("SET LOCAL check_function_bodies = off")
        for script in scripts():
            if script.name in names:
                connection.execute(script.text.encode(), prepare=False)
                connection.execute(_record(script).encode())
    logger.info("Schema applied", extra={"action": "apply_schema", "applied": names})
    return names
