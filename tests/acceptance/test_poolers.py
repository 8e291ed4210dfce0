"""Behind PgBouncer in transaction mode: each statement may run in another session."""

import contextlib
import json
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import procrastinate
import psycopg
import pytest
from psycopg import conninfo

from fanout_procrastinate import DatabaseError
from tests import invariants, servers, support
from tests.acceptance.scene import Scene
from tests.apps import faults, journal, scripted
from tests.conftest import Connection
from tests.guarded import Guarded
from tests.waiting import wait_until
from tests.workers import Worker

pytestmark = pytest.mark.acceptance

Pooled = Callable[..., tuple[Scene, list[Worker]]]
FOUND = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin")
CONFIGURATION = """
[databases]
* = host={root} port={port}

[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {own_port}
unix_socket_dir =
auth_type = trust
auth_file = {folder}/users
pool_mode = transaction
default_pool_size = 3
logfile = {folder}/pgbouncer.log
"""


@pytest.fixture
def pooler(server: servers.Server | servers.GivenServer, dsn: str) -> Iterator[str]:
    """A PgBouncer before the shared server; gives the test's DSN through it."""
    if FOUND is None:
        pytest.skip("no pgbouncer on this machine: on Debian `apt-get install pgbouncer` brings it")
    if not isinstance(server, servers.Server):
        pytest.skip("the pooler goes to a socket of a server of ours")
    account = servers.Account.choose()
    folder = Path(tempfile.mkdtemp(prefix="fanout-pooler-", dir="/tmp"))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        own_port = int(probe.getsockname()[1])
    (folder / "users").write_text('"postgres" ""\n')
    (folder / "ini").write_text(
        CONFIGURATION.format(root=server.root, port=server.port, own_port=own_port, folder=folder)
    )
    account.own(folder)
    guarded = Guarded(
        [FOUND, str(folder / "ini")],
        log=folder / "log",
        env={"PATH": os.defpath},
        cwd=folder,
        user=account.user,
        group=account.group,
        remove=[folder],
    )
    through = conninfo.make_conninfo(dsn, host="127.0.0.1", port=own_port)

    def answers() -> bool:
        assert guarded.poll() is None, (folder / "log").read_text()
        with contextlib.suppress(psycopg.OperationalError):
            psycopg.connect(through).close()
            return True
        return False

    wait_until(answers)
    yield through
    print((folder / "pgbouncer.log").read_text()[-2000:])
    guarded.close()


@pytest.fixture
def pooled(
    pooler: str,
    dsn: str,
    connect: Callable[..., Connection],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Pooled]:
    """Call it for a scene with two workers, and these; their app goes through the pooler."""
    started: list[Worker] = []
    log = journal.Journal(tmp_path / "journal")
    with contextlib.ExitStack() as stack:

        def start(*, connector: dict[str, Any], own_dsn: str | None) -> tuple[Scene, list[Worker]]:
            monkeypatch.setenv(journal.VARIABLE, str(log.path))
            monkeypatch.setenv(faults.CONNECTOR_VARIABLE, json.dumps(connector))
            if own_dsn is not None:
                monkeypatch.setenv(faults.OWN_VARIABLE, own_dsn)
            for _ in range(2):
                worker = Worker(
                    pooler,
                    "tests.apps.faults.app",
                    queues=scripted.QUEUE,
                    concurrency=4,
                    arguments=["--fetch-job-polling-interval=0.2"],
                )
                started.append(worker)
            for worker in started:
                worker.wait_ready()
            here = procrastinate.SyncPsycopgConnector(conninfo=pooler, **connector)
            stack.enter_context(faults.app.replace_connector(here))
            stack.enter_context(faults.app.open())
            return Scene(connect, Worker, log), started

        yield start
        faults.fanout.close()
    for worker in started:
        print(f"--- worker {worker.pid}\n{worker.output()}")
        worker.close()
    invariants.check(connect(), damaged=True)


UNPREPARED: dict[str, Any] = {"kwargs": {"prepare_threshold": None}}


def _assert_closes(scene: Scene) -> None:
    """Assert that a run of 200 items closes exactly, 20 of which fail once."""
    steps = [{"name": str(n), "sleep": 0.02, "fails": int(n % 10 == 0)} for n in range(200)]
    begun = time.monotonic()
    run = faults.steps.defer(steps=steps)
    run.wait(timeout=30)
    print(f"closed {time.monotonic() - begun:.2f} s after its start")
    scene.assert_closed_once(run, succeeded=200)
    assert len(scene.log.read("end", run=run.id)) == 200
    assert all(scene.starts(run)[step["name"]] == 1 + step["fails"] for step in steps)
    assert {row["crashes"] for row in scene.items(run).values()} == {0}
    wait_until(lambda: len(scene.log.read("closed", run=run.id)) == 1)


def _heard() -> list[dict[str, Any]]:
    """Return the list that events of runs are added to from now on."""
    events: list[dict[str, Any]] = []

    def note(event: dict[str, Any]) -> None:
        if "run" in event:
            events.append(event)

    faults.fanout.hub.subscribe(note)
    wait_until(lambda: faults.fanout.hub.listening)
    return events


def test_runs_close_behind_a_pooler(pooled: Pooled) -> None:
    """F04: nothing is prepared, everything goes through it; waiting goes on by polling."""
    scene, _ = pooled(connector=UNPREPARED, own_dsn=None)
    events = _heard()
    _assert_closes(scene)
    assert not events


@pytest.mark.pg18_only  # a matter of this side of the wire
def test_the_drivers_defaults_behind_a_pooler(pooled: Pooled, pooler: str) -> None:
    """F04: the library's own connections, opened as psycopg does by default, prepare nothing."""
    scene, workers = pooled(connector=UNPREPARED, own_dsn=pooler)
    _assert_closes(scene)
    assert "asking again" not in "".join(worker.output() for worker in workers)


@pytest.mark.pg18_only  # a matter of this side of the wire
def test_the_librarys_own_connections_pass_the_pooler_by(pooled: Pooled, dsn: str) -> None:
    """F04: LISTEN and the reports have connections straight to the server; there events arrive."""
    scene, _ = pooled(connector=UNPREPARED, own_dsn=dsn)
    events = _heard()
    _assert_closes(scene)
    wait_until(lambda: any(event.get("event") == "closed" for event in events), 5)


# -- without a pooler


def test_nothing_is_prepared(dsn: str) -> None:
    """F04: a name that is prepared in one session may mean something else in another."""
    with support.direct(dsn, size=1) as own:
        for _ in range(10):
            own.run(support.probe("SELECT 1 AS x"))
        (row,) = own.run(support.probe("SELECT count(*) AS n FROM pg_prepared_statements"))
    assert row == {"n": 0}


def test_a_lost_statement_names_the_remedy(dsn: str) -> None:
    """F04: what a connector that prepares meets behind a pooler."""
    with support.direct(dsn) as own, pytest.raises(DatabaseError, match="prepare_threshold") as got:
        own.run(support.probe("EXECUTE never_prepared"))
    assert got.value.transient
