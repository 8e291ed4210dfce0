"""The database goes away, refuses, locks: nothing is lost, and nothing is counted twice."""

import contextlib
import json
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import procrastinate
import psycopg
import pytest
from procrastinate.schema import SchemaManager
from psycopg import conninfo

from fanout_procrastinate import DatabaseError, database, schema
from tests import invariants, servers, support
from tests.acceptance import mishaps
from tests.acceptance.scene import Scene
from tests.apps import faults, journal, scripted
from tests.apps.scripted import Step
from tests.databases import Databases
from tests.waiting import wait_until
from tests.workers import Worker

pytestmark = pytest.mark.acceptance

LEASE = scripted.LEASE_SECONDS
ASKED_AGAIN = "The database did not answer; asking again"

# -- stages


@pytest.fixture
def proxy(server: servers.Server | servers.GivenServer) -> Iterator[mishaps.Tap]:
    if not isinstance(server, servers.Server):
        pytest.skip("the proxy goes to a socket of a server of ours")
    with mishaps.Tap(server.root / f".s.PGSQL.{server.port}") as proxy:
        yield proxy


@pytest.fixture
def proxied(proxy: mishaps.Tap, scene: Scene, dsn: str) -> Iterator[Callable[..., Worker]]:
    """Call it to start a worker of the scene that reaches the database through the proxy."""
    started: list[Worker] = []
    through = conninfo.make_conninfo(dsn, host="127.0.0.1", port=proxy.port)

    def start(**options: Any) -> Worker:
        def make(app_path: str, **given: Any) -> Worker:
            started.append(Worker(through, app_path, **given))
            return started[-1]

        return Scene(scene.connect, make, scene.log).worker(**options)

    yield start
    for worker in started:
        print(f"--- worker {worker.pid}\n{worker.output()}")
        worker.close()


@pytest.fixture(scope="module")
def ground(server: servers.Server | servers.GivenServer) -> Iterator[servers.Server]:
    """A server that the tests of this module stop, of the version that the others use."""
    if not isinstance(server, servers.Server):
        pytest.skip("it stops the server")
    with servers.Server(server.installation) as own:
        yield own


@pytest.fixture
def outdoors(ground: servers.Server, tmp_path: Path) -> Iterator[mishaps.Outdoors]:
    """The scripted app on a database of a server that may be stopped."""
    name = f"faults_{secrets.token_hex(4)}"
    databases = Databases(ground.dsn)
    dsn = databases.create(name)
    databases.close()
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(SchemaManager.get_schema())
        schema.apply(connection)
    started: list[Worker] = []

    def workers(app_path: str, **options: Any) -> Worker:
        started.append(Worker(dsn, app_path, **options))
        return started[-1]

    # Of a pool's dead connections, each costs it a pause.
    connector = procrastinate.SyncPsycopgConnector(
        conninfo=dsn, kwargs={"options": mishaps.UNHARMED}, min_size=1, max_size=1
    )
    stage = mishaps.Outdoors(ground, dsn, workers, journal.Journal(tmp_path / "journal"))
    try:
        with scripted.app.replace_connector(connector), scripted.app.open():
            yield stage
            scripted.fanout.close()
        with contextlib.closing(stage.open()) as connection:
            invariants.check(connection, damaged=True)
    finally:
        for worker in started:
            print(f"--- worker {worker.pid}\n{worker.output()}")
            worker.close()


# -- one statement


@pytest.mark.pg18_only  # a matter of this side of the wire
def test_a_report_lost_before_its_commit(
    scene: Scene, proxy: mishaps.Tap, proxied: Callable[..., Worker]
) -> None:
    """F01: the connection breaks with the report on it; it is sent again."""
    worker = proxied(concurrency=1)
    run = scene.steps([Step(name="first", barrier=2), Step(name="second")], max_in_flight=1)
    scene.wait_started(run, 1)
    assert proxy.lose_requests(mishaps.everywhere) > 0
    scene.log.arrive(f"barrier-{run.id}")
    wait_until(lambda: ASKED_AGAIN in worker.output())
    proxy.heal()
    lost = time.monotonic()
    run.wait(timeout=10)
    print(f"closed {time.monotonic() - lost:.2f} s after the loss")
    mishaps.assert_done_once(scene, run, 2)


def test_a_report_lost_after_its_commit(
    scene: Scene, proxy: mishaps.Tap, proxied: Callable[..., Worker]
) -> None:
    """F01: its reply is lost, and with it the next item; the same one is given again."""
    worker = proxied(concurrency=1)
    steps = [Step(name="first", barrier=2), Step(name="second"), Step(name="third")]
    run = scene.steps(steps, max_in_flight=1)
    scene.wait_started(run, 1)
    proxy.swallow_all()
    scene.log.arrive(f"barrier-{run.id}")
    wait_until(lambda: scene.items(run)["first"]["status"] == "succeeded")
    (slot,) = scene.query("SELECT * FROM fanout_slots WHERE run_id = %(run)s", run=run.id)
    assert (slot["held"], slot["held_claim"]) == (1, 1)
    assert not scene.log.read("start", run=run.id, item="second"), "the reply was not lost"
    proxy.cut_the_robbed()
    lost = time.monotonic()
    run.wait(timeout=10)
    print(f"closed {time.monotonic() - lost:.2f} s after the cut")
    assert ASKED_AGAIN in worker.output()
    mishaps.assert_done_once(scene, run, 3)


# -- the server


def _terminate_all(outdoors: mishaps.Outdoors) -> None:
    outdoors.query(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )


def _restart(outdoors: mishaps.Outdoors, how: servers.Stop) -> None:
    outdoors.server.stop(how)
    outdoors.server.start()


BREAKS: dict[str, Callable[[mishaps.Outdoors], None]] = {
    "terminated": _terminate_all,
    "fast restart": lambda outdoors: _restart(outdoors, "fast"),
    "immediate restart": lambda outdoors: _restart(outdoors, "immediate"),
}


@pytest.mark.parametrize(
    "how",
    [
        pytest.param("terminated", marks=pytest.mark.pg18_only),
        pytest.param("fast restart", marks=pytest.mark.pg18_only),
        "immediate restart",
    ],
)
def test_every_connection_is_lost(outdoors: mishaps.Outdoors, how: str) -> None:
    """F01: each item counted once, both listen again, and the workers stop in time."""
    events: list[dict[str, Any]] = []
    scripted.fanout.hub.subscribe(events.append)
    # What wakes them below is NOTIFY.
    options: dict[str, Any] = {"arguments": ["--fetch-job-polling-interval=60"]}
    crew = [outdoors.worker(**options) for _ in range(2)]
    run = outdoors.steps(mishaps.steps(40, 0.1))
    outdoors.wait_done(run, 10)
    BREAKS[how](outdoors)
    back = time.monotonic()
    ended = mishaps.until_closed(outdoors, run, crew, **options)
    print(f"closed {time.monotonic() - back:.2f} s after, {ended} workers had to be replaced")
    mishaps.assert_done_once(outdoors, run, 40)
    wait_until(lambda: scripted.fanout.hub.listening, 5)
    print(f"listening {time.monotonic() - back:.2f} s after")
    heard = len(events)
    again = outdoors.steps(mishaps.steps(1, 0.0))
    again.wait(timeout=5)
    wait_until(lambda: any(event.get("run") == again.id for event in events[heard:]), 1)
    mishaps.assert_stops(*crew, within=5.0)


@pytest.mark.pg18_only  # a matter of this side of the wire
def test_the_server_is_away_for_three_leases(outdoors: mishaps.Outdoors) -> None:
    """Invariants 2 and 5: 50 items in hand end meanwhile; nobody is taken for dead."""
    crew = [outdoors.worker(concurrency=25) for _ in range(2)]
    run = outdoors.steps(mishaps.steps(50, 1.0))
    outdoors.wait_started(run, 50)
    outdoors.server.stop()
    gone = time.monotonic()
    wait_until(lambda: len(outdoors.log.read("end", run=run.id)) == 50)
    wait_until(lambda: time.monotonic() - gone > 3 * LEASE, 3 * LEASE + 1, "three leases passed")
    assert all(worker.is_running() for worker in crew)
    outdoors.server.start()
    back = time.monotonic()
    crew.append(outdoors.worker(ready=False))  # it sweeps as soon as it is there
    mishaps.until_closed(outdoors, run, crew)
    print(f"all recorded {time.monotonic() - back:.2f} s after the return")
    mishaps.assert_done_once(outdoors, run, 50)


def test_the_server_takes_no_writes_for_a_while(outdoors: mishaps.Outdoors) -> None:
    """Invariants 2 and 5: read-only for three leases, as after a failover; nobody is charged."""
    crew = [outdoors.worker(lease=2.0) for _ in range(2)]
    run = outdoors.steps(mishaps.steps(16, 0.5))
    outdoors.wait_started(run, 8)
    outdoors.reload("SET default_transaction_read_only = on")
    since = time.monotonic()
    try:
        wait_until(lambda: len(outdoors.log.read("end", run=run.id)) >= 8)
        wait_until(lambda: time.monotonic() - since > 6.0, message="three leases passed")
        assert outdoors.value("SELECT sum(succeeded) FROM fanout_ledgers") == 0
    finally:
        outdoors.reload("RESET default_transaction_read_only")
    back = time.monotonic()
    ended = mishaps.until_closed(outdoors, run, crew, lease=2.0)
    print(f"closed {time.monotonic() - back:.2f} s after, {ended} workers had to be replaced")
    mishaps.assert_done_once(outdoors, run, 16)


@pytest.mark.pg18_only  # a matter of this side of the wire
def test_a_primary_that_is_one_no_more_is_left(dsn: str) -> None:
    """A failover behind one address: who stayed on the old connection would be fooled for ever."""
    roles = iter(["on", "off"])
    opened: list[psycopg.Connection[Any]] = []

    def connect() -> psycopg.Connection[Any]:
        role = f"-c default_transaction_read_only={next(roles)}"
        opened.append(psycopg.connect(dsn, options=role))
        return opened[-1]

    own = database.Database(connect, size=1)
    write = support.probe("UPDATE fanout_schema SET digest = digest RETURNING name")
    with pytest.raises(DatabaseError) as refused:
        own.run(write)
    assert refused.value.transient
    assert own.run(write)
    own.close()
    assert [connection.closed for connection in opened] == [True, True]


# -- the network


@pytest.mark.pg18_only  # a matter of this side of the wire
def test_a_frozen_worker_is_replaced_and_records_nothing(
    scene: Scene, proxy: mishaps.Tap, proxied: Callable[..., Worker]
) -> None:
    """F01, invariant 2: its sockets are open and nothing passes, for longer than the lease."""
    frozen, other = proxied(lease=1.0), scene.worker(lease=1.0)
    run = scene.steps(mishaps.steps(40, 0.1))
    wait_until(lambda: len(scene.log.read("end", run=run.id, pid=frozen.pid)) >= 4)
    proxy.freeze_all()
    begun = time.monotonic()
    run.wait(timeout=20)
    print(f"taken over and closed {time.monotonic() - begun:.2f} s after")
    rows = scene.items(run)
    proxy.thaw()
    again = scene.steps(mishaps.steps(8, 0.1))
    again.wait(timeout=10)
    mishaps.assert_stops(frozen, other, within=5.0)
    assert scene.items(run) == rows
    scene.assert_closed_once(run, succeeded=40)
    crashed = {name for name, row in rows.items() if row["crashes"]}
    assert 0 < len(crashed) <= 4
    assert {row["crashes"] for row in rows.values()} == {0, 1}
    assert {row["claim"] for name, row in rows.items() if name not in crashed} == {1}
    assert {name for name, count in scene.starts(run).items() if count > 1} <= crashed
    mishaps.assert_done_once(scene, again, 8)


# -- locks and limits


@pytest.mark.parametrize(
    "limit",
    [
        pytest.param(
            "lock_timeout",
            marks=[pytest.mark.database_settings(lock_timeout="250ms"), pytest.mark.pg18_only],
        ),
        pytest.param(
            "statement_timeout", marks=pytest.mark.database_settings(statement_timeout="250ms")
        ),
    ],
)
def test_somebody_holds_the_ledger(scene: Scene, limit: str) -> None:
    """Invariant 2: finished work waits, is refused by the limit, and is recorded afterwards."""
    worker = scene.worker()
    run = scene.steps(mishaps.steps(12, 0.3))
    scene.wait_started(run, 4)
    holder = scene.connect(options=mishaps.UNHARMED)
    with holder.transaction():
        held = holder.execute("SELECT FROM fanout_ledgers WHERE run_id = %s FOR UPDATE", [run.id])
        assert held.rowcount > 0
        wait_until(lambda: worker.output().count(ASKED_AGAIN) >= 3)
        assert scene.states(run)["succeeded"] == 0
    freed = time.monotonic()
    mishaps.until_closed(scene, run, [worker])
    print(f"closed {time.monotonic() - freed:.2f} s after the ledger was free")
    mishaps.assert_done_once(scene, run, 12)


@pytest.mark.parametrize(
    "level",
    [
        pytest.param(
            "repeatable read",
            marks=[
                pytest.mark.database_settings(default_transaction_isolation="repeatable read"),
                pytest.mark.pg18_only,
            ],
        ),
        pytest.param(
            "serializable",
            marks=pytest.mark.database_settings(default_transaction_isolation="serializable"),
        ),
    ],
)
def test_a_stricter_isolation_is_the_default(scene: Scene, level: str) -> None:
    """Invariants 1 to 4: retries, pauses and a cancel on two workers; conflicts stay inside.

    Those of procrastinate's own statements end its worker.
    """
    crew = [scene.worker(concurrency=8) for _ in range(2)]

    def until(condition: Callable[[], object]) -> int:
        return mishaps.supervise(scene, crew, condition, timeout=30.0, concurrency=8)

    assert scene.value("SHOW transaction_isolation") == level
    steps = [
        Step(name=str(n), sleep=0.08, fails=n % 10 == 0, broken=n % 50 == 7) for n in range(200)
    ]
    run, cancelled = scene.steps(steps), scene.steps(mishaps.steps(300, 0.3))
    ended = until(lambda: run.progress().done >= 20)
    for _ in range(10):
        run.pause()
        assert run.progress().paused
        run.resume()
    assert not run.pause().closed
    ended += until(lambda: cancelled.progress().done >= 20 and not run.progress().processing)
    begun = scene.starts(run).total()
    cancelled.cancel()
    ended += until(lambda: mishaps.is_closed(scene, cancelled))
    assert scene.starts(run).total() == begun, "handed out while it was paused"
    run.resume()
    ended += until(lambda: mishaps.is_closed(scene, run))
    print(f"{ended} workers had to be replaced")
    scene.assert_closed_once(run, succeeded=196, failed=4)
    starts = scene.starts(run)
    assert all(starts[step.name] == 1 + step.fails for step in steps)
    assert {row["crashes"] for row in scene.items(run).values()} == {0}
    states = scene.states(cancelled)
    assert states["succeeded"] == len(scene.log.read("end", run=cancelled.id)) >= 20
    scene.assert_closed_once(cancelled, "cancelled", **states)


# -- few connections


@pytest.mark.pg18_only  # a matter of this side of the wire
def test_children_hold_the_only_connection(
    scene: Scene, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F03: a pool of one, which four children and the worker itself want all the time."""
    connector = {"min_size": 1, "max_size": 1, "timeout": 5}
    monkeypatch.setenv(faults.CONNECTOR_VARIABLE, json.dumps(connector))
    worker = scene.worker(app="faults")
    here = procrastinate.SyncPsycopgConnector(conninfo=dsn, **connector)
    with faults.app.replace_connector(here), faults.app.open():
        steps = [{"name": str(n), "sleep": 0.02, "holds": True} for n in range(60)]
        begun = time.monotonic()
        run = faults.steps.defer(steps=steps)
        run.wait(timeout=20)
        print(f"closed {time.monotonic() - begun:.2f} s after its start")
        mishaps.assert_done_once(scene, run, 60)
        faults.fanout.close()
    assert "PoolTimeout" not in worker.output()
