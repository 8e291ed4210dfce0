"""Permits over several worker processes: never above the limit, in order, whoever dies."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import procrastinate
import pytest

from fanout_procrastinate import FanOut, Run
from tests import invariants
from tests.apps import journal, permitted, scripted
from tests.conftest import Connection
from tests.meter import VARIABLE, Meter, most_in_window
from tests.waiting import wait_until
from tests.workers import Worker

pytestmark = pytest.mark.acceptance

LEASE = scripted.LEASE_SECONDS


class Floor:
    """Workers of the app, and the service that their children call."""

    def __init__(
        self, conn: Connection, workers: Callable[..., Worker], meter: Meter, folder: Path
    ) -> None:
        self.conn = conn
        self.meter = meter
        self._workers = workers
        self.log = journal.Journal(folder / "journal")
        self._env = {VARIABLE: str(meter.path), journal.VARIABLE: str(self.log.path)}

    def worker(self, concurrency: int = 10, lease: float = LEASE) -> Worker:
        """Start a worker process."""
        return self._workers(
            "tests.apps.permitted.app",
            queues=permitted.QUEUE,
            concurrency=concurrency,
            env=self._env | {scripted.LEASE_VARIABLE: str(lease)},
        ).wait_ready()

    def run(self, child: Any, *names: str, seconds: float = 0.02, **options: Any) -> Run:
        calls = [permitted.Call(name=name, service="s", seconds=seconds) for name in names]
        run: Run = child.map(calls, **options)
        return run

    def permits(self) -> list[dict[str, Any]]:
        return self.conn.execute("SELECT * FROM fanout_permits ORDER BY ticket").fetchall()

    def waiting(self) -> int:
        return sum(row["granted_at"] is None for row in self.permits())


@pytest.fixture
def floor(
    dsn: str, connect: Callable[..., Connection], workers: Callable[..., Worker], tmp_path: Path
) -> Iterator[Floor]:
    connector = procrastinate.SyncPsycopgConnector(conninfo=dsn)
    with (
        Meter(tmp_path) as meter,
        permitted.app.replace_connector(connector),
        permitted.app.open(),
    ):
        yield Floor(connect(), workers, meter, tmp_path)
        wait_until(lambda: not meter.open.total(), 20.0, "the last call of the service ends")
        FanOut.of(permitted.app).close()
    invariants.check(connect(), damaged=True)


def numbers(count: int) -> list[str]:
    return [str(number) for number in range(count)]


def test_three_processes_never_exceed_the_limit(floor: Floor) -> None:
    """E01, E04: 30 places in three processes, three permits."""
    for _ in range(3):
        floor.worker(lease=10.0)  # nobody is taken for dead, however slow this machine is
    count, seconds = 60, 0.05
    begun = time.monotonic()
    run = floor.run(permitted.call_few, *numbers(count), seconds=seconds)
    assert run.wait(timeout=60).succeeded == count
    took = time.monotonic() - begun
    calls = floor.meter.calls
    busy = max(call.ended or 0.0 for call in calls) - min(call.began for call in calls)
    print(
        f"{count / busy:.0f} calls a second, {count * seconds / 3 / busy:.0%} of what is possible"
    )
    assert len(calls) == count
    assert 2 <= floor.meter.most["s"] <= 3
    assert took < 30
    assert floor.permits() == []


def test_a_killed_holder_s_permits_are_free_after_a_lease(floor: Floor) -> None:
    """E01: SIGKILL of the process that has all of them; the line goes on by itself."""
    victim = floor.worker(concurrency=3)
    held = floor.run(permitted.call_few, *numbers(3), seconds=600.0)
    wait_until(lambda: floor.meter.open["s"] == 3)
    floor.worker()
    waits = floor.run(permitted.call_few, *numbers(6), seconds=0.1)
    wait_until(lambda: floor.waiting() == 6)
    line = [str(row["position"]) for row in floor.permits() if row["granted_at"] is None]
    victim.kill()
    killed = time.monotonic()
    assert waits.wait(timeout=LEASE + 10).succeeded == 6
    took = time.monotonic() - killed
    print(f"the line went on {took:.1f} s after the kill; a lease is {LEASE:g} s")
    assert took < LEASE + 3.0
    assert floor.meter.most["s"] == 3
    started = [entry["item"] for entry in floor.log.read("start", run=waits.id)]
    # The first three are let in at once; in which order they get to work is their own affair.
    assert set(started[:3]) == set(line[:3])
    held.cancel(abort=True)


def test_who_waits_is_let_in_in_order(floor: Floor) -> None:
    """E03, E04: one place, seven in line over two processes, one of which is killed."""
    fanout = FanOut.of(permitted.app)
    lease = 4.0  # nobody may lose his place in the line, however slow this machine is
    victim = floor.worker(concurrency=3, lease=lease)
    with fanout.permit(permitted.few):
        fanout.update_limit(permitted.few, concurrency=1)
        names = [f"w{number}" for number in range(7)]
        for number, name in enumerate(names):
            # Each comes when the one before it stands in line.
            if number == 3:
                floor.worker(concurrency=4, lease=lease)
            floor.run(permitted.call_few, name)
            wait_until(lambda: floor.waiting() == number + 1)  # noqa: B023
        victim.kill()
        victim.wait()
    wait_until(lambda: len(floor.log.read("start")) == 7, 30.0)
    started = [line["item"] for line in floor.log.read("start")]
    # Those of the dead process are begun again, at the end of the line.
    assert started[:4] == names[3:] and sorted(started[4:]) == names[:3]
    assert floor.meter.most["s"] == 1


def test_a_rate_is_kept_over_processes(floor: Floor) -> None:
    """A rate of 50 a second over two processes; a burst of 5 at most comes at once."""
    floor.worker()
    floor.worker()
    run = floor.run(permitted.call_paced, *numbers(100), seconds=0.0)
    assert run.wait(timeout=30).succeeded == 100
    times = floor.meter.began("s")
    print(
        f"{99 / (times[-1] - times[0]):.0f} a second; at most {most_in_window(times, 1.0)} in any"
        f" second, {most_in_window(times, 0.1)} in any tenth"
    )
    assert most_in_window(times, 1.0) <= 50 + 5
    assert times[-1] - times[0] < 4.0


def test_crossed_orders_are_refused_and_never_deadlock(floor: Floor) -> None:
    """Two limits in different orders by many children: refused at once; together they work."""
    floor.worker(concurrency=10)
    crossed = floor.run(permitted.call_crossed, *numbers(20))
    together = floor.run(permitted.call_declared, *numbers(20))
    progress = crossed.wait(timeout=30)
    assert (progress.succeeded, progress.failed) == (10, 10)
    (group,) = crossed.errors()
    assert "permit of 'first' while 'second' is held" in group.message
    assert together.wait(timeout=30).succeeded == 20


def test_isolated_children_have_permits_too(floor: Floor) -> None:
    """E01: the worker takes and renews them; a process that dies leaves none behind."""
    floor.worker(concurrency=4)
    run = floor.run(permitted.call_apart, "dies", *numbers(5), seconds=0.05)
    run_progress = run.wait(timeout=60)
    assert run_progress.succeeded == 6
    assert [item.result for item in run.items()] == [False] * 6
    assert floor.permits() == []


def test_a_child_that_is_stopped_gives_its_permit_back(floor: Floor) -> None:
    """E01, E03: cancelled with abort, time-limited or not: free at once, without a lease."""
    floor.worker(concurrency=4)
    run = floor.run(permitted.call_few, *numbers(4), seconds=600.0)
    wait_until(lambda: floor.meter.open["s"] == 3 and floor.waiting() == 1)
    run.cancel(abort=True)
    wait_until(lambda: floor.permits() == [], LEASE + 3.0)
    assert floor.meter.most["s"] == 3
