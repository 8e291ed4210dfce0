"""Servers, databases, apps and workers for the tests; and what each test must leave clean.

`FANOUT_TEST_PG` chooses the server (18, the default, or another major version), `FANOUT_TEST_DSN`
one that runs already. Each test process starts a server of its own when a test first asks for it.
"""

import asyncio
import contextlib
import inspect
import itertools
import os
import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import hypothesis
import procrastinate
import psycopg
import pytest
from procrastinate.schema import SchemaManager
from psycopg.rows import dict_row

from tests import installations, servers
from tests.databases import Databases
from tests.waiting import wait_until
from tests.workers import Worker

Connection = psycopg.Connection[dict[str, Any]]

# Databases decide how long an example takes.
hypothesis.settings.register_profile("fanout", deadline=None, print_blob=True)
hypothesis.settings.load_profile("fanout")

_numbers = itertools.count(1)
# A server given by FANOUT_TEST_DSN may serve several processes at once.
_prefix = f"fanout_test_{secrets.token_hex(4)}"


def _wanted_version() -> int:
    return int(os.environ.get("FANOUT_TEST_PG", "18"))


def pytest_report_header() -> str:
    given = "FANOUT_TEST_DSN" in os.environ
    return f"server: {'FANOUT_TEST_DSN' if given else f'PostgreSQL {_wanted_version()}'}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """On other servers than 18, leave out what no server is asked in, and what says so itself."""
    if _wanted_version() == 18:
        return
    kept = [
        item
        for item in items
        if {"server", "own_server"} & set(getattr(item, "fixturenames", ()))
        and not item.get_closest_marker("pg18_only")
    ]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


@dataclass(frozen=True)
class Database:
    name: str
    dsn: str


def _start(version: int, **options: Any) -> servers.Server:
    installation = installations.find(version)
    if installation is None:
        raise RuntimeError(f"PostgreSQL {version} is missing: {installations.remedy(version)}")
    return servers.Server(installation, **options).start()


@pytest.fixture(scope="session")
def server() -> Iterator[servers.Server | servers.GivenServer]:
    """The server that all tests share; a test that stops it takes an `own_server`."""
    if dsn := os.environ.get("FANOUT_TEST_DSN"):
        yield servers.GivenServer(dsn)
        return
    shared = _start(_wanted_version())
    yield shared
    shared.close()


@pytest.fixture
def own_server() -> Iterator[Callable[..., servers.Server]]:
    """Call it to start a server for this test alone: `own_server(settings={...}, tcp=True)`."""
    started: list[servers.Server] = []

    def start(**options: Any) -> servers.Server:
        started.append(_start(_wanted_version(), **options))
        return started[-1]

    yield start
    for one in started:
        one.close()


@pytest.fixture(scope="session")
def databases(server: servers.Server | servers.GivenServer) -> Iterator[Databases]:
    """Makes and drops databases on the shared server."""
    maker = Databases(server.dsn)
    yield maker
    maker.close()


@pytest.fixture(scope="session")
def bare_template(databases: Databases) -> Iterator[str]:
    """The database that those with procrastinate's schema alone are copied from."""
    name = f"{_prefix}_bare"
    with psycopg.connect(databases.create(name), autocommit=True) as connection:
        connection.execute(SchemaManager.get_schema())
    yield name
    databases.drop(name)


@pytest.fixture(scope="session")
def template(databases: Databases, bare_template: str) -> Iterator[str]:
    """The database that those with procrastinate's schema and ours are copied from."""
    # Not at the top: the tests of modules below the schema do without it.
    from fanout_procrastinate import schema  # noqa: PLC0415

    name = f"{_prefix}_full"
    with psycopg.connect(databases.create(name, bare_template), autocommit=True) as connection:
        schema.apply(connection)
    yield name
    databases.drop(name)


def _database(request: pytest.FixtureRequest, template: str) -> Iterator[Database]:
    """Make one, and see to it at the end that nobody was left connected to it."""
    maker: Databases = request.getfixturevalue("databases")
    marker = request.node.get_closest_marker("database_settings")
    name = f"{_prefix}_{next(_numbers)}"
    dsn = maker.create(name, template, marker.kwargs if marker else None)
    yield Database(name, dsn)
    try:
        # A session ends a moment after its connection is closed.
        with contextlib.suppress(AssertionError):
            wait_until(lambda: not maker.connections(name), timeout=3.0)
        left = "\n".join(maker.connections(name))
        deadlocks = maker.deadlocks(name)
    finally:
        maker.drop(name)
    assert not left, f"connections left by the test:\n{left}"
    assert not deadlocks, f"{deadlocks} deadlocks, which the server had to end"


@pytest.fixture
def database(request: pytest.FixtureRequest, template: str) -> Iterator[Database]:
    """A database of this test's own, with procrastinate's schema and ours."""
    yield from _database(request, template)


@pytest.fixture
def bare_database(request: pytest.FixtureRequest, bare_template: str) -> Iterator[Database]:
    """A database of this test's own, with procrastinate's schema alone."""
    yield from _database(request, bare_template)


@pytest.fixture
def dsn(database: Database) -> str:
    return database.dsn


@pytest.fixture
def bare_dsn(bare_database: Database) -> str:
    return bare_database.dsn


@pytest.fixture
def connect(dsn: str) -> Iterator[Callable[..., Connection]]:
    """Call it for one more connection to the test's database: autocommit, rows as dicts."""
    opened: list[Connection] = []

    def connect(**options: Any) -> Connection:
        opened.append(psycopg.connect(dsn, autocommit=True, row_factory=dict_row, **options))
        return opened[-1]

    yield connect
    for connection in opened:
        connection.close()


@pytest.fixture
def conn(connect: Callable[..., Connection]) -> Connection:
    return connect()


@pytest.fixture
def app(dsn: str) -> procrastinate.App:
    """An app on the test's database, not opened."""
    return procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=dsn))


@pytest.fixture
def workers(dsn: str) -> Iterator[Callable[..., Worker]]:
    """Call it to start a worker process: `workers("tests.apps.papers.app", queues="papers")`.

    All are ended with the test; what they printed is shown where the test fails.
    """
    started: list[Worker] = []

    def start(app_path: str, **options: Any) -> Worker:
        started.append(Worker(dsn, app_path, **options))
        return started[-1]

    yield start
    for worker in started:
        print(f"--- worker {worker.pid}\n{worker.output()}")
        worker.close()


@pytest.fixture(autouse=True)
def _clean_loop(request: pytest.FixtureRequest) -> None:
    if inspect.iscoroutinefunction(getattr(request.node, "obj", None)):
        request.getfixturevalue("_no_task_left")


@pytest.fixture
async def _no_task_left() -> AsyncIterator[None]:
    yield
    await asyncio.sleep(0)  # what was cancelled last ends now
    left = asyncio.all_tasks() - {asyncio.current_task()}
    assert not left, f"tasks left by the test: {left}"
