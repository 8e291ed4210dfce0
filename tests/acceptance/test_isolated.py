"""Isolated children in real workers: the death of a process is the end of an attempt, no more."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import procrastinate
import psutil
import pytest

from fanout_procrastinate import Item, Run
from tests import invariants
from tests.apps import isolated, journal
from tests.apps.isolated import Deed
from tests.conftest import Connection
from tests.waiting import wait_until
from tests.workers import Worker

pytestmark = pytest.mark.acceptance

PLACES = 50
KILLERS = {
    "segfault": Deed(name="segfault", what="segfault"),
    "exit": Deed(name="exit", what="exit", number=9),
    "memory": Deed(name="memory", what="allocate"),
    "time": Deed(name="time", what="spin"),
}
SOON = 1.0


@pytest.fixture
def log(tmp_path: Path) -> journal.Journal:
    return journal.Journal(tmp_path / "journal")


@pytest.fixture
def worker(
    dsn: str, conn: Connection, workers: Callable[..., Worker], log: journal.Journal
) -> Iterator[Worker]:
    """A worker of 50 places; the app is open here too."""
    connector = procrastinate.SyncPsycopgConnector(conninfo=dsn)
    with isolated.app.replace_connector(connector), isolated.app.open():
        yield workers(
            "tests.apps.isolated.app",
            queues=isolated.QUEUE,
            concurrency=PLACES,
            env={journal.VARIABLE: str(log.path)},
        ).wait_ready()
        isolated.fanout.close()
    invariants.check(conn, damaged=True)


def program(worker: Worker) -> psutil.Process:
    """Return the process that forks the others for a worker."""
    (found,) = psutil.Process(worker.pid).children()
    return found


def at_work(log: journal.Journal, count: int, what: str = "wait", text: str = "") -> Run:
    """Start a run of so many items, and wait until all are at work at the same time."""
    deeds = [Deed(name=str(number), what=what, text=text) for number in range(count)]
    run = isolated.act_unhurried.map(deeds, item_key=lambda deed: deed.name)
    wait_until(lambda: len(log.read("start", run=run.id)) == count, 30)
    return run


def test_four_deaths_among_fifty(worker: Worker, conn: Connection, log: journal.Journal) -> None:
    """Issue 3, isolated children: 46 of 50 items are undisturbed, the four end as declared."""
    neighbours = at_work(log, PLACES - len(KILLERS), text="first")
    before = {child.pid for child in program(worker).children()}
    killers = isolated.act.map(KILLERS.values(), item_key=lambda deed: deed.name)
    recorded = _recorded(conn, killers)
    killers.wait(timeout=5)
    assert neighbours.progress().processing == PLACES - len(KILLERS)

    items: dict[str | None, Item] = {item.key: item for item in killers.items()}
    told = {key: (str(i.status), i.attempts, i.crashes) for key, i in items.items()}
    assert told == dict.fromkeys(KILLERS, ("failed", 2, 0))
    reasons = {key: (i.error or {})["message"] for key, i in items.items()}
    assert "was ended by SIGSEGV" in reasons["segfault"]
    assert "exit code 9" in reasons["exit"]
    assert reasons["memory"] == f"its memory limit of {isolated.MEMORY_LIMIT} bytes was reached"
    assert reasons["time"] == f"its time limit of {isolated.LIMIT_SECONDS:g} s passed"
    _assert_known_soon(log, killers, recorded)

    log.arrive("first")
    neighbours.wait(timeout=20)
    for item in neighbours.items():
        assert (str(item.status), item.attempts, item.crashes) == ("succeeded", 1, 0)
    assert len(log.read("start", run=neighbours.id)) == PLACES - len(KILLERS)
    assert worker.is_running()
    assert before <= {child.pid for child in program(worker).children()}

    # Every place has a process again, and only one.
    again = at_work(log, PLACES, text="second")
    log.arrive("second")
    again.wait(timeout=20)
    assert len(program(worker).children()) == PLACES
    assert all(one.status() != psutil.STATUS_ZOMBIE for one in program(worker).children())


def _recorded(conn: Connection, run: Run) -> dict[tuple[str, int], float]:
    """Watch a run to its end; return when the n-th failure of each item was recorded."""
    seen: dict[tuple[str, int], float] = {}

    def all_seen() -> bool:
        rows = conn.execute(
            "SELECT item_key, failures, extract(epoch FROM clock_timestamp())::float8 AS at"
            " FROM fanout_items WHERE run_id = %s AND failures > 0",
            [run.id],
        ).fetchall()
        for row in rows:
            seen.setdefault((row["item_key"], row["failures"]), row["at"])
        return len(seen) == 2 * len(KILLERS)

    wait_until(all_seen, 20)
    return seen


def _assert_known_soon(
    log: journal.Journal, run: Run, recorded: dict[tuple[str, int], float]
) -> None:
    """Assert that each death was recorded within 1 s."""
    for key in KILLERS:
        limit = isolated.LIMIT_SECONDS if key == "time" else 0.0
        starts = [line["at"] for line in log.read("start", run=run.id, item=key)]
        waits = [recorded[key, n] - at - limit for n, at in enumerate(starts, 1)]
        print(key, [round(wait, 3) for wait in waits])
        assert len(waits) == 2
        assert max(waits) < SOON


@pytest.mark.parametrize("what", ["spin", "hold the interpreter", "start others"])
def test_nothing_outlives_a_killed_worker(worker: Worker, log: journal.Journal, what: str) -> None:
    """A killed worker leaves no process behind, whatever they are at."""
    at_work(log, 3, what)
    if what == "start others":
        wait_until(lambda: len(log.read("started")) == 3, 20)
    left = psutil.Process(worker.pid).children(recursive=True)
    assert len(left) == (7 if what == "start others" else 4)
    os.kill(worker.pid, signal.SIGKILL)
    _, alive = psutil.wait_procs(left, timeout=3)
    assert not alive


def test_a_graceful_end_lets_them_finish(worker: Worker, log: journal.Journal) -> None:
    """SIGTERM to the worker and, as some supervisors do, to all of its processes."""
    run = at_work(log, 3, text="go")
    children: list[Any] = psutil.Process(worker.pid).children(recursive=True)
    for one in [psutil.Process(worker.pid), *children]:
        one.send_signal(signal.SIGTERM)
    wait_until(lambda: "Stop requested" in worker.output())
    log.arrive("go")
    assert worker.wait(timeout=15) == 0
    assert {(str(item.status), item.attempts) for item in run.items()} == {("succeeded", 1)}
    _, alive = psutil.wait_procs(children, timeout=3)
    assert not alive
