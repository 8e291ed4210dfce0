"""The concurrent twin of the state machine: a dozen connections whose statements overlap at random.

No deadlock, no error that nobody expects, and the invariants at every moment; all of them at each
quiet point. FANOUT_TEST_SECONDS sets how long each seed runs (6; a long run takes 60),
FANOUT_TEST_SEEDS which seeds ("1,2").
"""

import contextlib
import json
import os
import random
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from tests import invariants, protocol
from tests.conftest import Connection
from tests.protocol import Protocol, Reply, Row, callback
from tests.waiting import wait_until

SECONDS = float(os.environ.get("FANOUT_TEST_SECONDS", "6"))
SEEDS = [int(seed) for seed in os.environ.get("FANOUT_TEST_SEEDS", "1,2").split(",")]
LEASE = 0.5
WORKERS = 5
# What the library does on its own connections, whatever the server's default is.
READ_COMMITTED = "SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL READ COMMITTED"
CALLBACKS = [callback("on_complete"), callback("on_failure", "failure")]

# Each claim ends once, each generation closes once: a second time breaks a key.
AUDIT = """
CREATE TABLE audit_claims (
    run bigint, "position" bigint, claim bigint, PRIMARY KEY (run, "position", claim));
CREATE TABLE audit_closes (run bigint, generation integer, PRIMARY KEY (run, generation));
CREATE FUNCTION audit_claim() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO audit_claims VALUES (OLD.run_id, OLD.position, OLD.claim);
    RETURN NULL;
END $$;
CREATE FUNCTION audit_close() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO audit_closes VALUES (NEW.id, NEW.generation);
    RETURN NULL;
END $$;
CREATE TRIGGER audit AFTER UPDATE ON fanout_items FOR EACH ROW
    WHEN (OLD.status = 'processing' AND NEW.status <> 'processing') EXECUTE FUNCTION audit_claim();
CREATE TRIGGER audit AFTER UPDATE ON fanout_runs FOR EACH ROW
    WHEN (OLD.status IN ('pending', 'processing') AND NEW.status NOT IN ('pending', 'processing'))
    EXECUTE FUNCTION audit_close();
"""


class Gate:
    """Lets everybody pass, or holds all of them for a quiet moment."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._closed = False

    @contextlib.contextmanager
    def passed(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._closed)
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def closed(self) -> Iterator[None]:
        with self._changed:
            self._closed = True
            assert self._changed.wait_for(lambda: not self._inside, timeout=30), "somebody hangs"
        try:
            yield
        finally:
            with self._changed:
                self._closed = False
                self._changed.notify_all()


class Actor:
    """One thread and its connections: does one thing after the other, at random."""

    def __init__(self, twin: "Twin", number: int) -> None:
        self.twin = twin
        self.random = random.Random(twin.seed * 1000 + number)
        self.p = Protocol(twin.connect(level=READ_COMMITTED))
        # As the host's and the application's connections are.
        self.app = Protocol(twin.connect())

    def tried(self, statement: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Run a statement as the library does: a serialisation failure is tried again."""
        for attempt in range(100):
            try:
                result = statement(*args, **options)
            except psycopg.errors.SerializationFailure:
                self.twin.counts["40001"] += 1
                time.sleep(0.002 * attempt * self.random.random())
                continue
            self.twin.counts["statements"] += 1
            return result
        raise AssertionError("a hundred serialisation failures in a row")

    def act(self) -> None:
        raise NotImplementedError

    def chance(self, share: float) -> bool:
        return self.twin.wild and self.random.random() < share

    def some_run(self) -> int | None:
        rows = self.p.rows(
            "SELECT id FROM fanout_runs WHERE status IN ('pending', 'processing')"
            " OR %s AND closed_at > clock_timestamp() - interval '2 s'",
            self.random.random() < 0.3,
        )
        return self.random.choice(rows)["id"] if rows else None


class Worker(Actor):
    """A process: fetches, begins, reports several slots at once, resends, dies, comes back."""

    def __init__(self, twin: "Twin", number: int) -> None:
        super().__init__(twin, number)
        self.lock = threading.Lock()
        self.hands: list[tuple[int, Reply, int]] = []
        self.zombies: list[tuple[int, Reply, int]] = []
        self.worker = self.p.worker()

    def act(self) -> None:
        if self.chance(0.01):
            self.die()
        elif self.zombies and self.chance(0.2):
            run, reply, _ = self.zombies.pop()
            self.tried(self.p.report, run, reply.ledger, self.entry(reply), suspect=False)
        elif len(self.hands) < 5 and self.random.random() < 0.5:
            self.fetch()
        elif self.hands:
            self.report()
        else:
            time.sleep(0.005)

    def die(self) -> None:
        """Stop renewing; half of it may still report, late. What it fetched is never begun."""
        with self.lock:
            self.zombies, self.hands = self.hands[::2], []
        self.p.execute(
            "UPDATE procrastinate_events SET at = at - interval '1 h' WHERE job_id IN ("
            "SELECT id FROM procrastinate_jobs WHERE worker_id = %s AND status = 'doing')",
            self.worker,
        )
        self.p.execute(
            "UPDATE procrastinate_workers SET last_heartbeat = last_heartbeat - interval '1 h'"
            " WHERE id = %s",
            self.worker,
        )
        self.worker = self.p.worker()

    def fetch(self) -> None:
        job = self.p.fetch(self.worker)
        if job is None:
            time.sleep(0.002)
        elif job["task_name"] == "child":
            self.begin(job)
        elif job["task_name"] == "manager":
            self.manage(job)
        elif "generation" in job["args"]:
            self.call_back(job)
        else:
            self.finish(job["id"])

    def finish(self, job: int) -> None:
        # Somebody may have deleted or retried it, or finished it for us.
        with contextlib.suppress(psycopg.errors.RaiseException):
            self.p.finish(job)

    def begin(self, job: Row) -> None:
        if self.chance(0.02):
            return  # dies before it begins: see `die`
        run, slot = job["args"]["run_id"], job["args"]["slot"]
        token = uuid.UUID(int=self.random.getrandbits(128))
        suspect = not any(reply.crashes for _, reply, _ in self.hands)
        options = {"ledger": self.random.randrange(16), "suspect": suspect}
        reply = self.tried(self.p.begin, run, slot, job["id"], token, **options)
        if self.chance(0.1):
            reply = self.tried(self.p.begin, run, slot, job["id"], token, **options)
        if self.chance(0.05):
            other = uuid.UUID(int=self.random.getrandbits(128))
            twice = self.tried(self.p.begin, run, slot, job["id"], other, **options)
            assert twice.verdict == "ended"
        self.go_on(run, reply, job["id"])

    def go_on(self, run: int, reply: Reply, job: int) -> None:
        if reply.stop:
            self.tried(self.p.stop, run, "failed", None)
        if reply.verdict in ("ended", "lost"):
            self.finish(job)
        else:
            with self.lock:
                self.hands.append((run, reply, job))

    def entry(self, reply: Reply) -> Any:
        outcome = "succeeded"
        if self.twin.wild:
            outcome = self.random.choice(
                ["succeeded"] * 8 + ["failed"] * 2 + ["released"] * 4 + ["returned"]
            )
        wish = self.random.choice(["next"] * 8 + ["slice"] * 3 + ["end"])
        return reply.entry(outcome, wish=wish, retry_in=self.random.choice([0.0, 0.02, 0.1, 0.4]))

    def report(self) -> None:
        run, first, _ = self.random.choice(self.hands)
        together = [
            hand for hand in self.hands if hand[0] == run and hand[1].ledger == first.ledger
        ]
        self.random.shuffle(together)
        together = together[: self.random.randint(1, len(together))]
        entries = [self.entry(reply) for _, reply, _ in together]
        suspect = not any(hand[1].crashes for hand in self.hands if hand not in together)
        for _ in range(2 if self.chance(0.15) else 1):
            replies = self.tried(self.p.report, run, first.ledger, *entries, suspect=suspect)
        with self.lock:
            self.hands = [hand for hand in self.hands if hand not in together]
        for (_, _, job), reply in zip(together, replies, strict=True):
            self.go_on(run, reply, job)

    def manage(self, job: Row) -> None:
        run = job["args"]["run_id"]
        claim = self.tried(self.p.manager_begin, run, job["id"])
        if claim:
            for _ in range(self.random.randint(0, 4)):
                keys = [str(self.random.randrange(40)) for _ in range(12)]
                self.tried(self.p.append, run, claim["fence"], keys)
            if self.chance(0.2):
                return
            if self.chance(0.2):
                self.tried(self.p.manager_fail, run, claim["fence"], 0.05)
            else:
                for _ in range(2):
                    self.tried(self.p.seal, run, claim["fence"])
        self.finish(job["id"])

    def call_back(self, job: Row) -> None:
        call = job["args"]["run_id"], job["args"]["generation"], job["task_name"], job["id"]
        if self.tried(self.p.callback_begin, *call) and not self.chance(0.1):
            error = '{"type": "Broken"}' if self.chance(0.3) else None
            self.tried(self.p.callback_end, *call, error, 0.05 if error else None)
        self.finish(job["id"])


class Keeper(Actor):
    """Renews what the workers hold."""

    def act(self) -> None:
        holdings = []
        for worker in self.twin.workers:
            with worker.lock:
                holdings += [
                    (run, reply.slot, reply.epoch) for run, reply, _ in worker.hands if reply.epoch
                ]
        self.random.shuffle(holdings)
        self.tried(self.p.renew, holdings, self.random.choice([0.0, LEASE / 8]))
        time.sleep(LEASE / 25)


class Sweeper(Actor):
    def act(self) -> None:
        for run in self.tried(self.p.sweep_plan, LEASE):
            done = self.tried(self.p.sweep_run, run, LEASE)
            assert "recounted" not in done, f"counters were wrong: {done}"
            self.twin.swept.update(done)
        for row in self.p.rows("SELECT fanout_untidy_v1(10) AS run"):
            self.tried(self.p.tidy, row["run"], self.random.randint(1, 50))
        if self.chance(0.2):
            age = self.random.choice([0.1, 0.5, 1.5])
            self.tried(self.p.value, "SELECT fanout_prune_v1(%s, 1000)", age)
            tasks = ["child", "manager"]
            self.tried(self.p.value, "SELECT fanout_prune_jobs_v1(%s, %s, 100)", tasks, age)
        time.sleep(0.03)


class Operator(Actor):
    """Controls runs, on a connection of the application's."""

    def act(self) -> None:
        run = self.some_run()
        if run is None or not self.twin.wild:
            time.sleep(0.01)
            return
        p = self.app
        action = self.random.choice(
            [
                lambda: p.pause(run),
                lambda: p.resume(run),
                lambda: p.resume(run),
                lambda: p.resume(run),
                lambda: p.update(run, max_in_flight=self.random.randint(1, 12)),
                lambda: p.update(run, max_in_flight=self.random.randint(1, 12)),
                lambda: p.update(run, priority=self.random.randint(-1, 1)),
                lambda: p.update(run, tolerate_count=self.random.choice([None, 3, 10])),
                lambda: p.retry_failed(run, ["failed"]),
                lambda: p.retry_failed(run, ["failed", "cancelled"]),
                lambda: p.stop(run) if self.random.random() < 0.2 else None,
                lambda: p.progress(run),
            ]
        )
        self.tried(action)
        time.sleep(0.01 * self.random.random())


class Hand(Actor):
    """Lays hands on the queue, and is the host's own maintenance."""

    def act(self) -> None:
        if not self.twin.wild:
            time.sleep(0.01)
            return
        self.tried(
            self.app.execute,
            "DELETE FROM procrastinate_workers"
            " WHERE last_heartbeat < clock_timestamp() - interval '30 s'",
        )
        jobs = self.app.rows(
            "SELECT id, status FROM procrastinate_jobs WHERE task_name <> 'manager'"
            " AND status IN ('todo', 'doing', 'failed') ORDER BY random() LIMIT 1"
        )
        for job in jobs:
            how = self.random.choice(
                [self.app.cancel_job, self.app.retry_job, self.app.retry_job, self.app.delete_job]
            )
            with contextlib.suppress(psycopg.errors.UniqueViolation, psycopg.errors.RaiseException):
                self.tried(how, job["id"])
        if self.random.random() < 0.1:
            self.tried(self.app.defer, "other")
        time.sleep(0.02 * self.random.random())


class Starter(Actor):
    def act(self) -> None:
        open_runs = self.p.value(
            "SELECT count(*) FROM fanout_runs WHERE status IN ('pending', 'processing')"
        )
        if open_runs >= 4 or not self.twin.wild:
            time.sleep(0.02)
            return
        manager = self.random.random() < 0.4
        spec = protocol.spec(
            manager_task="manager" if manager else None,
            callbacks=CALLBACKS,
            max_in_flight=self.random.randint(2, 12),
            tolerate_count=self.random.choice([None, None, 5]),
            max_crashes=self.random.choice([2, 3]),
        )
        run = self.tried(self.app.start, spec)["run_id"]
        if not manager:
            items = self.random.randint(0, 60)
            self.tried(self.p.append, run, 1, [None] * items, [json.dumps(n) for n in range(items)])
            self.tried(self.p.seal, run, 1)


class Checker(Actor):
    """Reads the invariants while everybody writes."""

    def act(self) -> None:
        invariants.check(self.p.conn, damaged=True)
        time.sleep(0.05)


class Twin:
    def __init__(self, connections: Callable[..., Connection], seed: int) -> None:
        self.seed = seed
        self._connections = connections
        self.wild = True
        self.over = False
        self.gate = Gate()
        self.counts: Counter[str] = Counter()
        self.swept: Counter[str] = Counter()
        self.errors: list[tuple[str, BaseException]] = []
        self.workers = [Worker(self, n) for n in range(WORKERS)]
        kinds = [Keeper, Sweeper, Sweeper, Operator, Operator, Hand, Starter, Checker]
        self.actors: list[Actor] = [
            *self.workers,
            *(kind(self, 100 + n) for n, kind in enumerate(kinds)),
        ]
        self.p = Protocol(self.connect(level=READ_COMMITTED))

    def connect(self, level: str | None = None) -> Connection:
        connection = self._connections()
        if level:
            connection.execute(level)
        return connection

    def run(self, seconds: float) -> None:
        threads = [
            threading.Thread(target=self._loop, args=(actor,), name=f"{type(actor).__name__}-{n}")
            for n, actor in enumerate(self.actors)
        ]
        for thread in threads:
            thread.start()
        try:
            until = time.monotonic() + seconds
            while time.monotonic() < until and not self.errors:
                time.sleep(min(2.0, seconds / 4))
                self.quiet()
            self.wild = False
            wait_until(lambda: self.errors or not self.unfinished(), timeout=60.0)
        finally:
            self.over = True
            for thread in threads:
                thread.join(30)
        assert not self.errors, self.errors
        assert not self.unfinished()
        self.quiet()

    def _loop(self, actor: Actor) -> None:
        while not self.over and not self.errors:
            try:
                with self.gate.passed():
                    actor.act()
            except BaseException as exc:  # noqa: BLE001 - handed to the test
                self.errors.append((threading.current_thread().name, exc))

    def quiet(self) -> None:
        """Hold everybody, let a sweep repair what hands have broken, and check everything."""
        with self.gate.closed():
            invariants.check(self.p.conn, damaged=True)
            self.p.sweep(LEASE)
            for row in self.p.rows("SELECT id FROM fanout_runs"):
                self.p.sweep_run(row["id"], LEASE)
            invariants.check(self.p.conn)
            doubles = self.p.rows(
                "SELECT run, generation FROM audit_closes a WHERE EXISTS"
                " (SELECT FROM fanout_runs WHERE id = run) AND NOT EXISTS (SELECT FROM"
                " fanout_closes c WHERE c.run_id = run AND c.generation = a.generation)"
            )
            assert not doubles

    def unfinished(self) -> int:
        self.p.execute("SELECT fanout_resume_v1(id) FROM fanout_runs WHERE paused")
        count: int = self.p.value(
            "SELECT (SELECT count(*) FROM fanout_runs WHERE status IN ('pending', 'processing'))"
            " + (SELECT count(*) FROM fanout_callbacks WHERE state IN ('owed', 'running'))"
        )
        return count


def _twin(connect: Callable[..., Connection], seed: int) -> None:
    admin = connect()
    admin.execute(AUDIT)
    protocol.small_ledgers(admin, 10)
    twin = Twin(connect, seed)
    twin.run(SECONDS)
    invariants.check(admin)
    closed = twin.p.value("SELECT count(*) FROM audit_closes")
    for actor in twin.actors:
        actor.p.conn.close()
        actor.app.conn.close()
    twin.p.conn.close()
    # A session's figures are in the statistics when it has ended.
    wait_until(
        lambda: admin.execute(
            "SELECT count(*) = 1 AS alone FROM pg_stat_activity WHERE datname = current_database()"
        ).fetchone()["alone"]  # type: ignore[index]
    )
    row = admin.execute(
        "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
    ).fetchone()
    print(f"seed {seed}: {dict(twin.counts)}, {closed} closes, swept {dict(twin.swept)}, {row}")
    assert row == {"deadlocks": 0}
    assert twin.counts["statements"] > 100 * SECONDS and closed > 3


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.database_settings(deadlock_timeout="50ms")
@pytest.mark.parametrize("seed", SEEDS[: max(1, len(SEEDS) // 2)])
def test_overlapping_statements(connect: Callable[..., Connection], seed: int) -> None:
    """Invariants 1 to 5 at every moment; no deadlock. cases.md: A01, A04, C05, D10, E03, F09."""
    _twin(connect, seed)


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.database_settings(
    deadlock_timeout="50ms", default_transaction_isolation="repeatable read"
)
@pytest.mark.parametrize("seed", SEEDS[len(SEEDS) // 2 :])
def test_overlapping_statements_under_repeatable_read(
    connect: Callable[..., Connection], seed: int
) -> None:
    """The same where the application's connections are at repeatable read. I13."""
    _twin(connect, seed)


@pytest.mark.parametrize(
    "name", ["stop", "pause", "resume", "update", "retry", "sweep", "prune", "report"]
)
def test_ledgers_are_locked_before_the_run(connect: Callable[..., Connection], name: str) -> None:
    """D10: whoever waits for a ledger does not hold the run meanwhile."""
    p, other = Protocol(connect()), Protocol(connect())
    run = p.stage(2, max_in_flight=1)
    job = p.fetch()
    assert job is not None
    reply = p.begin(run, 0, job["id"])
    if name == "prune":
        p.stop(run)
        p.report(run, 0, reply.entry("succeeded"))
    statement: Callable[[], Any] = {
        "stop": lambda: other.stop(run),
        "pause": lambda: other.pause(run),
        "resume": lambda: other.resume(run),
        "update": lambda: other.update(run, max_in_flight=2),
        "retry": lambda: other.retry_failed(run),
        "sweep": lambda: other.sweep_run(run),
        "prune": lambda: other.value("SELECT fanout_prune_v1(0.0, 1000)"),
        "report": lambda: other.report(run, 0, reply.entry("succeeded", wish="end")),
    }[name]
    with ThreadPoolExecutor(1) as pool:
        with p.conn.transaction():
            p.execute("SELECT FROM fanout_ledgers WHERE run_id = %s FOR NO KEY UPDATE", run)
            future = pool.submit(statement)
            wait_until(
                lambda: p.value(
                    "SELECT count(*) FROM pg_stat_activity WHERE pid = %s"
                    " AND wait_event_type = 'Lock'",
                    other.conn.info.backend_pid,
                )
            )
            p.execute("SELECT FROM fanout_runs WHERE id = %s FOR UPDATE NOWAIT", run)
        future.result(10)


@pytest.mark.parametrize("name", ["pause", "stop", "update", "resume"])
def test_control_at_repeatable_read_fails_rather_than_miss_a_slot(
    connect: Callable[..., Connection], name: str
) -> None:
    """I13: what was dealt after its snapshot began would else stay queued against it."""
    p, app = Protocol(connect()), Protocol(connect())
    run = p.stage(3, max_in_flight=2)
    p.execute("DELETE FROM fanout_slots")
    app.conn.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    control: Callable[[], Any] = {
        "pause": lambda: app.pause(run),
        "stop": lambda: app.stop(run),
        "update": lambda: app.update(run, max_in_flight=1),
        "resume": lambda: app.resume(run),
    }[name]
    with pytest.raises(psycopg.errors.SerializationFailure), app.conn.transaction():
        app.progress(run)
        assert p.begin(run, 0, 0).verdict == "ended", "without a slot of its own it tops up"
        assert len(p.slots(run)) == 2
        control()
    control()
    invariants.check(p.conn)


@pytest.mark.slow
def test_a_sweep_does_not_wait_for_a_run_that_somebody_keeps_locked(
    connect: Callable[..., Connection],
) -> None:
    """Invariant 5: renewals come from the same thread, and must not be late for one run's lock."""
    p = Protocol(connect())
    run, closed = p.stage(5, max_in_flight=2), p.stage(5)
    p.delete_job(p.jobs("child")[0]["id"])
    p.stop(closed, "cancelled")
    begun = time.monotonic()
    with connect().transaction() as holding:
        for one in (run, closed):
            holding.connection.execute(
                "SELECT FROM fanout_runs WHERE id = %s FOR NO KEY UPDATE", (one,)
            )
        assert p.sweep_run(run, 2.0) == {}
        assert p.tidy(closed) == 0
        assert p.value("SELECT fanout_prune_v1(0, 100)") == 0
    assert time.monotonic() - begun < 2.0
    assert p.sweep_run(run, 2.0)["lost_jobs"] == 1
    assert p.tidy(closed) == 5
    assert p.value("SELECT fanout_prune_v1(0, 100)") == 6


def test_twenty_that_finish_at_the_same_instant(connect: Callable[..., Connection]) -> None:
    """Invariant 4; A04: exactly one closes, round after round."""
    connections = [Protocol(connect()) for _ in range(20)]
    (first, *_) = connections
    protocol.small_ledgers(first.conn, 5)
    barrier = threading.Barrier(20)

    def finish(p: Protocol, run: int, reply: Reply) -> str:
        barrier.wait()
        (answer,) = p.report(run, reply.ledger, reply.entry("succeeded"))
        return answer.verdict

    with ThreadPoolExecutor(20) as pool:
        for _ in range(40):
            run = first.stage(20, max_in_flight=20, callbacks=[callback("on_complete")])
            replies = []
            while job := first.fetch():
                if job["task_name"] != "child":
                    first.finish(job["id"])
                    continue
                reply = first.begin(run, job["args"]["slot"], job["id"])
                while reply.verdict == "move":
                    (reply,) = first.report(run, reply.ledger, reply.entry())
                replies.append(reply)
            assert len(replies) == 20
            futures = [
                pool.submit(finish, p, run, reply)
                for p, reply in zip(connections, replies, strict=True)
            ]
            assert {future.result() for future in futures} <= {"ended", "move"}
            assert first.progress(run)["status"] == "completed"
            assert len(first.jobs("on_complete")) == 1
            invariants.check(first.conn, run)
