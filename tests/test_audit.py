"""The audit: it finds each kind of damage made by hand and nothing else, and disturbs nobody.

The time that sweeps need is not waited for: what is stored is made older instead.
"""

import dataclasses
import functools
import itertools
import json
import random
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any, Self

import hypothesis
import procrastinate
import psycopg
import pytest
from hypothesis.stateful import run_state_machine_as_test

from fanout_procrastinate import (
    ConfigurationError,
    DatabaseError,
    FanOut,
    Finding,
    FindingKind,
    RunNotFound,
    SchemaError,
    auditor,
    database,
    store,
)
from fanout_procrastinate.cli import main
from tests import invariants, protocol, protocol_world, test_protocol_machine
from tests.databases import environment
from tests.protocol import Protocol, Reply, callback

Connect = Callable[..., psycopg.Connection[dict[str, Any]]]
Found = dict[tuple[str, str, str], bool]

CALLBACKS = [callback("told"), callback("cheered", "success"), callback("mourned", "failure")]
LEASE = 30.0


class Scene:
    """Healthy runs in every state, on which tests lay hands.

    `open`: twelve items in two ledgers; four at work, one succeeded, one failed, one waiting.
    `queued`: two slots at work, two in the queue. `closed`: three items, callbacks owed.
    `stopped`: four items at work, the rest cancelled. `listed`: its manager waits in the queue.
    """

    def __init__(self, app: procrastinate.App, connect: Connect) -> None:
        conn = connect()
        protocol.small_ledgers(conn, 6)
        self.conn = conn
        self.p = Protocol(conn)
        self.owner = FanOut.of(app)
        self.worker = self.p.worker()
        self.dead: set[tuple[int, int]] = set()
        self.runs: dict[str, int] = {}
        self.replies: dict[str, list[Reply]] = {}
        self._stage("open", 12, begin=4)
        first, second, third, _ = self.replies["open"]
        self.report("open", first, "succeeded")
        self.report("open", second, "failed")
        self.report("open", third, "released")
        self._stage("queued", 12, begin=2)
        self._stage("closed", 3, begin=3, callbacks=CALLBACKS)
        for reply in list(self.replies["closed"]):
            self.report("closed", reply, "succeeded")
        self._stage("stopped", 12, begin=4)
        self.p.stop(self.runs["stopped"])
        self.runs["listed"] = self.p.start(protocol.spec(manager_task="manager"))["run_id"]

    def _stage(self, name: str, items: int, begin: int, **changes: Any) -> None:
        run = self.runs[name] = self.p.stage(items, **changes)
        self.replies[name] = []
        for slot in self.p.slots(run)[:begin]:
            self.do(
                "UPDATE procrastinate_jobs SET status = 'doing', worker_id = %s WHERE id = %s",
                self.worker,
                slot["job_id"],
            )
            reply = self.p.begin(run, slot["slot"], slot["job_id"])
            self.replies[name].append(self.followed(run, reply))

    def followed(self, run: int, reply: Reply) -> Reply:
        while reply.verdict == "move":
            (reply,) = self.p.report(run, reply.ledger, reply.entry())
        return reply

    def report(self, name: str, reply: Reply, outcome: str) -> None:
        retry_in = 3600.0 if outcome == "released" else None
        run, entry = self.runs[name], reply.entry(outcome, retry_in=retry_in)
        (answer,) = self.p.report(run, reply.ledger, entry)
        self.replies[name].remove(reply)
        self.replies[name].append(self.followed(run, answer))

    def do(self, query: str, *params: Any) -> int:
        return self.p.execute(query, *params)

    def audit(self, **options: Any) -> list[Finding]:
        return self.owner.audit(**options)

    def found(self) -> Found:
        """Audit; return what may be repaired by the run's name, the kind and the subject."""
        names = {run: name for name, run in self.runs.items()}
        found = self.audit()
        assert all(one.detail for one in found)
        return {
            (names.get(one.run_id or 0, ""), one.kind, one.subject): one.repairable for one in found
        }

    def pass_time(self, seconds: float) -> None:
        """Make all that is stored so much older; who lives renews."""
        columns = self.p.rows(
            "SELECT table_name, column_name FROM information_schema.columns JOIN"
            " information_schema.tables USING (table_schema, table_name)"
            " WHERE table_schema = 'public' AND data_type = 'timestamp with time zone'"
            " AND table_type = 'BASE TABLE'"
        )
        for table, rows in itertools.groupby(columns, lambda row: row["table_name"]):
            changes = ", ".join(
                f"{row['column_name']} = {row['column_name']} - make_interval(secs => {seconds})"
                for row in rows
            )
            self.do(f"UPDATE {table} SET {changes}")
        self.p.beat(self.worker)
        for run in self.runs.values():
            for slot in self.p.slots(run):
                if slot["active"] and (run, slot["slot"]) not in self.dead:
                    self.p.renew([(run, slot["slot"], slot["epoch"])])

    def sweep(self, times: int = 3) -> None:
        for _ in range(times):
            self.owner.sweep()
            self.pass_time(LEASE / 2 + 1)


@pytest.fixture
def scene(app: procrastinate.App, connect: Connect) -> Scene:
    made = Scene(app, connect)
    assert made.audit() == []
    invariants.check(made.conn)
    return made


# -- damage


Hand = Callable[[Scene], object]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Damage:
    """What is done, what is found, and what has to happen before sweeps can repair it."""

    name: str
    hand: Hand
    found: Found
    then: Hand = lambda scene: None
    swept: bool = True


def sql(name: str, text: str, age: float = 0.0) -> Hand:
    """Execute a statement about a run; time passes afterwards."""

    def hand(scene: Scene) -> None:
        assert scene.do(text.replace("$run", str(scene.runs[name]))) > 0, "it damaged nothing"
        if age:
            scene.pass_time(age)

    return hand


def both(*hands: Hand) -> Hand:
    def hand(scene: Scene) -> None:
        for one in hands:
            one(scene)

    return hand


def dies(name: str, age: float) -> Hand:
    """The process that works on the first slot is gone, and time passes."""

    def hand(scene: Scene) -> None:
        scene.dead.add((scene.runs[name], scene.replies[name][0].slot))
        scene.pass_time(age)

    return hand


def stray(scene: Scene) -> None:
    scene.p.defer("child", queueing_lock=f"fanout_child:{scene.runs['open']}:9")


def fetched_by_the_dead(scene: Scene) -> None:
    job = scene.p.slots(scene.runs["queued"])[2]["job_id"]
    dead = scene.p.worker()
    scene.do(
        "UPDATE procrastinate_jobs SET status = 'doing', worker_id = %s WHERE id = %s", dead, job
    )
    scene.pass_time(61)


def reopened_by_hand(scene: Scene) -> None:
    sql("closed", "DELETE FROM fanout_closes WHERE run_id = $run")(scene)
    sql("closed", "DELETE FROM fanout_callbacks WHERE run_id = $run")(scene)
    sql("closed", "UPDATE fanout_runs SET status = 'processing', closed_at = NULL WHERE id = $run")(
        scene
    )


def stop_forgotten(scene: Scene) -> None:
    scene.do(
        "UPDATE fanout_runs SET closing = 'failed', reason = 'x' WHERE id = %s", scene.runs["open"]
    )
    scene.pass_time(31)


def closed_too_early(scene: Scene) -> None:
    run = scene.runs["closed"]
    scene.do(
        "UPDATE fanout_items SET status = 'pending', due = now(), ledger = 0, result = NULL,"
        " finished_at = NULL WHERE run_id = %s AND position = 1",
        run,
    )
    scene.do(
        "UPDATE fanout_ledgers SET succeeded = succeeded - 1, waiting = 1 WHERE run_id = %s", run
    )


def manager_begins(scene: Scene) -> None:
    run = scene.p.run(scene.runs["listed"])
    assert scene.p.manager_begin(run["id"], run["manager_job_id"])


def lists_items_by_hand(scene: Scene) -> None:
    """Another run, whose items a program lists that has died."""
    scene.runs["mapped"] = scene.p.start(protocol.spec())["run_id"]
    scene.p.append(scene.runs["mapped"], 1, ["a", "b"])
    scene.pass_time(91)


def callback_runs(scene: Scene) -> None:
    run = scene.runs["closed"]
    job = scene.p.value("SELECT job_id FROM fanout_callbacks WHERE task = 'told'")
    assert scene.p.callback_begin(run, 1, "told", job) == 1
    scene.pass_time(91)


def jobs_of(task: str, how: str) -> str:
    where = f"WHERE task_name = '{task}' AND status = 'todo'"
    if how == "deleted":
        return f"DELETE FROM procrastinate_jobs {where}"
    return f"UPDATE procrastinate_jobs SET status = 'cancelled' {where}"


LEDGER = "UPDATE fanout_ledgers SET {} WHERE run_id = $run AND ledger = {}"
RUN = "UPDATE fanout_runs SET {} WHERE id = $run"
ITEM = "UPDATE fanout_items SET {} WHERE run_id = $run AND {}"
SLOT = "UPDATE fanout_slots SET {} WHERE run_id = $run AND {}"

PERMIT = (
    "INSERT INTO fanout_permits (limit_name, holder, seen_at, lease)"
    " VALUES ('llm', gen_random_uuid(), now() - interval '1 hour', 30)"
)

# `open` has handed out all of ledger 0 (positions 0, 2, ... 10) and position 1 of ledger 1.
DAMAGES = [
    Damage(
        name="a counter too high",
        hand=sql("open", LEDGER.format("succeeded = succeeded + 1", 0)),
        found={("open", "counters", "ledger 0"): True},
    ),
    Damage(
        name="a negative counter",
        hand=sql("open", LEDGER.format("waiting = -1", 1)),
        found={("open", "counters", "ledger 1"): True},
    ),
    Damage(
        name="two counters exchanged",
        hand=sql("open", LEDGER.format("succeeded = succeeded + 1, waiting = waiting - 1", 0)),
        found={("open", "counters", "ledger 0"): False},
    ),
    Damage(
        name="a counter of a closed run",
        hand=sql("closed", LEDGER.format("succeeded = succeeded - 1, failed = failed + 1", 0)),
        found={("closed", "counters", "ledger 0"): False},
    ),
    Damage(
        name="a ledger too large",
        hand=sql("open", LEDGER.format("size = size + 1", 1)),
        found={("open", "sizes", "ledger 1"): True},
    ),
    Damage(
        name="another total",
        hand=sql("open", RUN.format("total = total + 1")),
        found={("open", "total", "run"): False},
    ),
    Damage(
        name="a deleted ledger",
        hand=sql("open", "DELETE FROM fanout_ledgers WHERE run_id = $run AND ledger = 1"),
        found={("open", "ledgers", "run"): False},
        swept=False,
    ),
    Damage(
        name="sealed without ledgers",
        hand=both(
            sql("queued", "DELETE FROM fanout_ledgers WHERE run_id = $run"),
            sql("queued", RUN.format("ledgers = 0, open_ledgers = 0")),
        ),
        found={("queued", "ledgers", "run"): False},
        swept=False,
    ),
    Damage(
        name="open ledgers counted wrongly",
        hand=sql("open", RUN.format("open_ledgers = 3")),
        found={("open", "open_ledgers", "run"): True},
    ),
    Damage(
        name="an open ledger marked as complete",
        hand=sql("open", LEDGER.format("open = false", 1)),
        found={
            ("open", "open_ledgers", "ledger 1"): True,
            ("open", "open_ledgers", "run"): True,
        },
    ),
    Damage(
        name="a deleted item",
        hand=sql("open", "DELETE FROM fanout_items WHERE run_id = $run AND position = 11"),
        found={("open", "items", "run"): False},
    ),
    Damage(
        name="an item too many, staged by nobody",
        hand=sql("listed", "INSERT INTO fanout_items (run_id, position) VALUES ($run, 0)"),
        found={("listed", "items", "run"): False},
    ),
    Damage(
        name="a cursor behind an item at work",
        hand=sql("open", LEDGER.format("cursor = cursor - 1", 1)),
        found={("open", "cursor", "items 1"): True},
    ),
    Damage(
        name="a cursor that has passed untouched items",
        hand=sql("open", LEDGER.format("cursor = cursor + 2", 1)),
        found={("open", "unreachable", "items 3, 5"): True},
    ),
    Damage(
        name="a waiting item without its due time",
        hand=sql("open", ITEM.format("due = NULL", "due IS NOT NULL")),
        found={("open", "unreachable", "items 4"): True},
    ),
    Damage(
        name="a waiting item in another ledger's index",
        hand=sql("open", ITEM.format("ledger = 1", "due IS NOT NULL")),
        found={("open", "unreachable", "items 4"): True},
    ),
    Damage(
        name="an item at work that its slot has forgotten",
        hand=sql("open", SLOT.format("held = NULL, held_claim = NULL", "held = 1")),
        found={("open", "unheld", "items 1"): True},
    ),
    Damage(
        name="an item at work whose slot was deleted",
        hand=sql("open", "DELETE FROM fanout_slots WHERE run_id = $run AND held = 1"),
        found={("open", "unheld", "items 1"): True},
    ),
    Damage(
        name="an item under another claim than its slot's",
        hand=sql("open", ITEM.format("claim = claim + 1", "position = 6")),
        found={("open", "held", "slot 3"): True},
        then=dies("open", 31),
    ),
    Damage(
        name="a slot that holds the item of another one",
        hand=sql("open", SLOT.format("held = 6, held_claim = 1", "slot = 0")),
        found={("open", "held", "item 6"): True, ("open", "unheld", "items 8"): False},
    ),
    Damage(
        name="a slot that holds nothing there is",
        hand=sql("open", "DELETE FROM fanout_items WHERE run_id = $run AND position = 6"),
        found={("open", "held", "slot 3"): False, ("open", "items", "run"): False},
    ),
    Damage(
        name="a queued slot that holds an item",
        hand=sql("queued", SLOT.format("held = 1, held_claim = 1", "slot = 2")),
        found={("queued", "held", "slot 2"): False},
    ),
    Damage(
        name="a dead process",
        hand=dies("open", 91),
        found={("open", "silent_slot", "slot 3"): True},
    ),
    Damage(
        name="a slot too few, job and all",
        hand=both(
            sql(
                "queued",
                "DELETE FROM procrastinate_jobs WHERE id = (SELECT job_id FROM fanout_slots"
                " WHERE run_id = $run AND slot = 3)",
            ),
            sql("queued", "DELETE FROM fanout_slots WHERE run_id = $run AND slot = 3", age=31),
        ),
        found={("queued", "missing_slots", "run"): True},
    ),
    Damage(
        name="a limit lowered by hand",
        hand=sql("open", RUN.format("max_in_flight = 2")),
        found={("open", "over_limit", "run"): True},
    ),
    Damage(
        name="a slot of a closed run",
        hand=sql("closed", "INSERT INTO fanout_slots (run_id, slot, job_id) VALUES ($run, 5, 1)"),
        found={("closed", "leftover_slot", "slot 5"): True},
    ),
    Damage(
        name="a slot before the seal",
        hand=sql("listed", "INSERT INTO fanout_slots (run_id, slot, job_id) VALUES ($run, 5, 1)"),
        found={("listed", "leftover_slot", "slot 5"): False},
    ),
    Damage(
        name="jobs of queued slots deleted",
        hand=sql("queued", jobs_of("child", "deleted")),
        found={("queued", "lost_job", "slot 2"): True, ("queued", "lost_job", "slot 3"): True},
    ),
    Damage(
        name="jobs of queued slots cancelled",
        hand=sql("queued", jobs_of("child", "cancelled"), age=31),
        found={("queued", "lost_job", "slot 2"): True, ("queued", "lost_job", "slot 3"): True},
    ),
    Damage(
        name="a worker that died between fetch and begin",
        hand=fetched_by_the_dead,
        found={("queued", "lost_job", "slot 2"): True},
    ),
    Damage(
        name="a job that holds the lock of a slot",
        hand=stray,
        found={("open", "stray_job", "job *"): True},
    ),
    Damage(
        name="a manager's job deleted",
        hand=sql("listed", jobs_of("manager", "deleted")),
        found={("listed", "manager_lost", "manager"): True},
    ),
    Damage(
        name="a manager's job cancelled",
        hand=sql("listed", jobs_of("manager", "cancelled"), age=31),
        found={("listed", "manager_lost", "manager"): True},
    ),
    Damage(
        name="a manager that died",
        hand=both(manager_begins, lambda scene: scene.pass_time(91)),
        found={("listed", "manager_lost", "manager"): True},
    ),
    Damage(
        name="a program that died while it listed items",
        hand=lists_items_by_hand,
        found={("mapped", "manager_lost", "manager"): True},
    ),
    Damage(
        name="a run that nobody lists",
        hand=sql("listed", RUN.format("manager_task = NULL")),
        found={("listed", "manager_lost", "manager"): False},
    ),
    Damage(
        name="a stop that was never sent",
        hand=stop_forgotten,
        found={("open", "stop_pending", "run"): True},
    ),
    Damage(
        name="a run with nothing left to do",
        hand=reopened_by_hand,
        found={("closed", "missed_close", "run"): True},
    ),
    Damage(
        name="a close with an item unfinished",
        hand=closed_too_early,
        found={
            ("closed", "closed_unfinished", "ledger 0"): False,
            ("closed", "closed_unfinished", "items 1"): False,
        },
    ),
    Damage(
        name="a close without its record",
        hand=sql("closed", "DELETE FROM fanout_closes WHERE run_id = $run"),
        found={("closed", "close_unrecorded", "generation 1"): False},
    ),
    Damage(
        name="a close recorded otherwise",
        hand=sql("closed", "UPDATE fanout_closes SET status = 'cancelled' WHERE run_id = $run"),
        found={
            ("closed", "close_unrecorded", "generation 1"): False,
            ("closed", "callback_missing", "callback cheered"): False,
            ("closed", "callback_missing", "callback mourned"): False,
        },
    ),
    Damage(
        name="a record of a close that never was",
        hand=sql(
            "open",
            "INSERT INTO fanout_closes (run_id, generation, status, progress, closed_at)"
            " VALUES ($run, 1, 'completed', '{\"failed\": 0}', now())",
        ),
        found={("open", "close_unrecorded", "generation 1"): False},
    ),
    Damage(
        name="a callback that is not owed",
        hand=sql("closed", "DELETE FROM fanout_callbacks WHERE run_id = $run AND task = 'told'"),
        found={("closed", "callback_missing", "callback told"): False},
    ),
    Damage(
        name="a callback that should not be owed",
        hand=sql(
            "closed",
            "UPDATE fanout_callbacks SET task = 'mourned' WHERE run_id = $run AND task = 'told'",
        ),
        found={
            ("closed", "callback_missing", "callback told"): False,
            ("closed", "callback_missing", "callback mourned"): False,
        },
    ),
    Damage(
        name="a callback's job deleted",
        hand=sql("closed", jobs_of("told", "deleted")),
        found={("closed", "callback_lost", "callback told"): True},
    ),
    Damage(
        name="a callback's job cancelled",
        hand=sql("closed", jobs_of("told", "cancelled"), age=31),
        found={("closed", "callback_lost", "callback told"): True},
    ),
    Damage(
        name="a callback whose worker died",
        hand=callback_runs,
        found={("closed", "callback_lost", "callback told"): True},
    ),
    Damage(
        name="rows of a run that is not there",
        hand=sql("open", "INSERT INTO fanout_items (run_id, position) VALUES (999, 0)"),
        found={("", "orphans", "items"): False},
    ),
    Damage(
        name="a permit of a holder that is dead for long",
        hand=sql("open", PERMIT),
        found={("", "dead_permit", "limit llm"): True},
    ),
    Damage(
        name="a limit that nobody can ever have",
        hand=both(
            sql("open", RUN.format("limits = ARRAY['shut'], wants = 2")),
            sql("open", "INSERT INTO fanout_limits (name, concurrency) VALUES ('shut', 0)"),
        ),
        found={("open", "shut_limit", "limit shut"): False},
        swept=False,
    ),
    Damage(
        name="a slot of a run that is not there",
        hand=sql("open", "INSERT INTO fanout_slots (run_id, slot, job_id) VALUES (999, 0, 1)"),
        found={("", "orphans", "slots"): True},
    ),
    Damage(
        name="an error on an item that succeeded",
        hand=sql("open", ITEM.format("error_type = 'Odd'", "status = 'succeeded'")),
        found={("open", "state", "items 0"): False},
    ),
    Damage(
        name="a status that nobody knows",
        hand=sql("closed", ITEM.format("status = 'lost'", "position = 2")),
        found={
            ("closed", "state", "items 2"): False,
            ("closed", "counters", "ledger 0"): False,
        },
    ),
    Damage(
        name="rows that a stop left behind",
        hand=sql("stopped", RUN.format("untidy_from = NULL")),
        found={("stopped", "untidy", "items 1, 3, 5, 7, 8 and 3 more"): False},
    ),
]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.name)
def test_damage_is_found_and_nothing_else(scene: Scene, damage: Damage) -> None:
    damage.hand(scene)
    found = scene.found()
    assert _starred(found) == damage.found
    if not damage.swept:
        return
    damage.then(scene)
    scene.sweep()
    left = {key: repairable for key, repairable in scene.found().items()}
    if all(damage.found.values()):
        assert left == {}
        invariants.check(scene.conn)
    else:
        assert left.items() >= {key: False for key in found if not found[key]}.items()


def _starred(found: Found) -> Found:
    """Return findings without the ids of jobs."""
    return {
        (name, kind, "job *" if subject.startswith("job ") else subject): repairable
        for (name, kind, subject), repairable in found.items()
    }


def test_each_kind_is_found_by_some_test() -> None:
    kinds = {kind for damage in DAMAGES for _, kind, _ in damage.found}
    assert {*kinds, "unchecked"} == set(FindingKind)


# -- health


class Crew:
    """Four threads that work off runs as processes would, each with a connection of its own."""

    def __init__(self, connect: Connect) -> None:
        self.stop = threading.Event()
        self.errors: list[BaseException] = []
        self._threads = [
            threading.Thread(target=self._work, args=(Protocol(connect()), random.Random(seed)))
            for seed in range(4)
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop.set()
        for thread in self._threads:
            thread.join()
        if self.errors:
            raise self.errors[0]

    def _work(self, p: Protocol, chance: random.Random) -> None:
        try:
            worker = p.worker()
            while not self.stop.is_set():
                job = p.fetch(worker)
                if job is None:
                    self.stop.wait(0.002)
                elif job["task_name"] == "child":
                    self._serve(p, job, chance)
                else:
                    self._call_back(p, job)
        except BaseException as exc:  # noqa: BLE001 - raised by the test's own thread
            self.errors.append(exc)

    def _serve(self, p: Protocol, job: Any, chance: random.Random) -> None:
        run, slot = job["args"]["run_id"], job["args"]["slot"]
        token = uuid.uuid4()
        reply = again(lambda: p.begin(run, slot, job["id"], token))
        while reply.verdict not in ("ended", "lost"):
            wish = chance.choice(["next"] * 6 + ["slice", "end"])
            entry = reply.entry(wish=wish)
            if reply.verdict == "item":
                outcome = chance.choice(["succeeded"] * 6 + ["failed", "released", "returned"])
                retry_in = chance.choice([0.0, 0.05]) if outcome == "released" else None
                entry = reply.entry(outcome, wish=wish, retry_in=retry_in)
            elif reply.verdict == "wait":
                self.stop.wait(0.01)
            (reply,) = again(functools.partial(p.report, run, reply.ledger, entry))
        assert reply.verdict == "ended", "nobody was rescued here"
        p.finish(job["id"])

    def _call_back(self, p: Protocol, job: Any) -> None:
        run, generation = job["args"]["run_id"], job["args"]["generation"]
        if p.callback_begin(run, generation, job["task_name"], job["id"]):
            p.callback_end(run, generation, job["task_name"], job["id"])
        p.finish(job["id"])


def again(call: Callable[[], Any]) -> Any:
    """Call once more where the server asks for it."""
    while True:
        try:
            return call()
        except (psycopg.errors.SerializationFailure, psycopg.errors.DeadlockDetected):
            continue


def test_nothing_is_found_while_four_work(app: procrastinate.App, connect: Connect) -> None:
    """Several runs with retries, pauses, other limits, a stop, reopenings; a sweep now and then."""
    conn, owner, chance = connect(), FanOut.of(app), random.Random(0)
    protocol.small_ledgers(conn, 300)
    p = Protocol(conn)
    runs = [p.stage(1200, max_in_flight=4, callbacks=CALLBACKS) for _ in range(3)]
    audits = 0
    ends = time.monotonic() + 8
    with Crew(connect) as crew:
        while time.monotonic() < ends and not crew.errors:
            run = chance.choice(runs)
            again(functools.partial(disturb, p, run, chance))
            assert owner.audit(timeout=4) == []
            audits += 1
            if audits % 10 == 0:
                owner.sweep()
    assert audits > 20
    done = p.rows("SELECT status, count(*) AS n FROM fanout_items GROUP BY 1")
    print(f"{audits} audits; items {done}")
    assert sum(row["n"] for row in done if row["status"] == "succeeded") > 500
    invariants.check(conn)


def disturb(p: Protocol, run: int, chance: random.Random) -> None:
    """Do what operators do."""
    what = chance.choice(["pause", "resume", "resume", "update", "retry", "stop", "tidy"])
    if what == "update":
        p.update(run, max_in_flight=chance.randint(1, 8))
    elif what == "retry":
        p.retry_failed(run)
    elif what == "stop":
        if chance.random() < 0.2:
            p.stop(run)
    elif what == "tidy":
        p.tidy(run, 100)
    else:
        (p.pause if what == "pause" else p.resume)(run)


class Audited(protocol_world.World):
    """Asks the audit too, after each step: its books and the audit's know nothing of each other."""

    def verify(self) -> None:
        super().verify()
        found = self.p.rows(
            "SELECT r.id, f.kind, f.subject, f.detail, f.repairable FROM fanout_runs r, LATERAL ("
            "SELECT * FROM fanout_audit_run_v1(r.id, 30)"
            " UNION ALL SELECT * FROM fanout_audit_items_v1(r.id, 30)) f"
            " UNION ALL SELECT run_id, 'orphans', subject, '', repairable"
            " FROM fanout_audit_orphans_v1()"
        )
        # Hands on jobs and dead processes show until sweeps have come; nothing else ever does.
        allowed = {
            *("lost_job", "stray_job", "manager_lost", "callback_lost"),
            *("silent_slot", "missing_slots", "stop_pending"),
        }
        unexpected = [
            row
            for row in found
            if not self.disturbed() or row["kind"] not in allowed or not row["repairable"]
        ]
        assert not unexpected


@pytest.mark.slow
def test_nothing_is_found_in_random_schedules(
    conn: psycopg.Connection[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    conn.execute(protocol.REFUSAL.encode())
    protocol.small_ledgers(conn)
    monkeypatch.setattr(test_protocol_machine, "World", Audited)
    test_protocol_machine.Machine.protocol = protocol.Clocked(conn)
    run_state_machine_as_test(
        test_protocol_machine.Machine,
        settings=hypothesis.settings(
            max_examples=15,
            stateful_step_count=60,
            deadline=None,
            phases=[hypothesis.Phase.generate],
            suppress_health_check=list(hypothesis.HealthCheck),
        ),
    )


def test_runs_being_removed_are_no_damage(scene: Scene) -> None:
    """Before the seal a stop leaves rows to the sweep; old runs go in parts."""
    listed = scene.p.run(scene.runs["listed"])
    assert scene.p.manager_begin(listed["id"], listed["manager_job_id"])
    scene.p.append(listed["id"], 1, [None] * 9)
    scene.p.stop(listed["id"])
    assert scene.audit() == []
    scene.p.tidy(listed["id"], 5)
    assert scene.audit() == []
    scene.p.tidy(scene.runs["stopped"], 5)
    assert scene.audit() == []
    scene.do("UPDATE fanout_callbacks SET state = 'done'")
    for left in (2, 1, 0):
        scene.do("SELECT fanout_prune_v1(0, 1)")
        items = "SELECT count(*) FROM fanout_items WHERE run_id = %s"
        assert scene.p.value(items, scene.runs["closed"]) == left
        assert scene.audit() == []


# -- manners


def test_it_writes_nothing_and_could_not(scene: Scene) -> None:
    scene.do("UPDATE fanout_ledgers SET succeeded = succeeded + 1")
    before = invariants.written(scene.conn)
    assert len(scene.audit()) > 3
    assert invariants.written(scene.conn) == before
    with database.Reader(scene.owner.connect) as reader:
        with pytest.raises(DatabaseError, match="read-only transaction"):
            reader.run(store.stop(1, status="failed", reason=None, abort=False), 5.0)
        assert reader.run(store.audit_runs(1), 5.0) == [1]


def test_it_waits_for_no_lock_on_rows(scene: Scene, connect: Connect) -> None:
    holder = connect()
    with holder.transaction():
        for table in ("runs", "ledgers", "items", "slots", "callbacks"):
            holder.execute(f"SELECT FROM fanout_{table} FOR UPDATE".encode())
        holder.execute("SELECT FROM procrastinate_jobs FOR UPDATE")
        assert scene.audit(timeout=5) == []


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ("fanout_runs", "no run was looked at"),
        ("fanout_slots", "6 of 6 runs were not looked at"),
        ("fanout_items", "the items of 6 of 6 runs"),
    ],
)
def test_it_says_what_it_had_no_time_for(
    scene: Scene, connect: Connect, table: str, words: str
) -> None:
    scene.p.stage(1)
    holder = connect()
    with holder.transaction():
        holder.execute(f"LOCK TABLE {table}".encode())
        started = time.monotonic()
        found = scene.audit(timeout=1.0)
        assert time.monotonic() - started < 2.0
    assert {one.kind for one in found} == {"unchecked"}
    assert words in found[-1].detail or words in found[0].detail
    assert not any(one.repairable for one in found)


def test_large_runs_are_read_in_parts(scene: Scene) -> None:
    run = scene.p.start(protocol.spec())["run_id"]
    scene.do(
        "INSERT INTO fanout_items (run_id, position) SELECT %s, n FROM generate_series(0, 49999) n",
        run,
    )
    scene.do("UPDATE fanout_runs SET staged = 50000 WHERE id = %s", run)
    scene.p.seal(run, 1)
    assert scene.audit() == []
    # Of what is odd in the part that was read, something is told.
    for position in (19, 40001):
        scene.do(
            "UPDATE fanout_items SET claim = 1 WHERE (run_id, position) = (%s, %s)", run, position
        )
    with database.Reader(scene.owner.connect) as reader:
        odd, unchecked = reader.run(store.audit_items(run, 0.0), 30.0)
        whole, *_ = reader.run(store.audit_items(run, 30.0), 30.0)
    assert (odd.kind, odd.subject) == ("cursor", "items 19")
    assert unchecked.kind == "unchecked" and "20000 of its 50000 items" in unchecked.detail
    assert (whole.kind, whole.subject) == ("cursor", "items 19, 40001")


def test_a_moment_is_no_finding(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that loses its slot while a worker fetches it is no stray: the second look knows."""
    stray(scene)
    looks: list[Any] = []
    read = database.Reader.run

    def watched(self: database.Reader, call: store.Call[Any], seconds: float) -> Any:
        if call.name == "audit_state":
            looks.append(call.params["runs"])
            if len(looks) == 2:
                assert scene.p.fetch(scene.worker)
        return read(self, call, seconds)

    monkeypatch.setattr(database.Reader, "run", watched)
    monkeypatch.setattr(auditor, "_SECONDS_BETWEEN_LOOKS", 0.01)
    scene.do("UPDATE procrastinate_jobs SET priority = 9 WHERE queueing_lock LIKE '%%:9'")
    assert scene.audit() == []
    assert [len(runs) for runs in looks] == [5, 1]


# -- the interface


async def test_one_run_or_all_of_them(scene: Scene) -> None:
    for name in ("open", "queued"):
        sql(name, LEDGER.format("failed = failed + 1", 0))(scene)
    first, second = await scene.owner.audit_async()
    # The newest open run comes first.
    assert (first.run_id, second.run_id) == (scene.runs["queued"], scene.runs["open"])
    assert await scene.owner.audit_async(scene.runs["open"]) == [second]
    assert scene.owner.audit(scene.runs["closed"], timeout=9) == []
    assert second.as_dict() == {
        "run_id": scene.runs["open"],
        "kind": "counters",
        "subject": "ledger 0",
        "detail": "waiting 1, succeeded 1, failed 2, cancelled 0; its items say 1, 1, 1, 0",
        "repairable": True,
    }
    with pytest.raises(RunNotFound):
        scene.owner.audit(77)


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan"), float("inf")])
def test_timeout_is_checked(app: procrastinate.App, timeout: float) -> None:
    with pytest.raises(ConfigurationError, match="give seconds"):
        FanOut.of(app).audit(timeout=timeout)


def test_without_schema_or_server(bare_dsn: str) -> None:
    for conninfo, error in ((bare_dsn, SchemaError), ("host=/nowhere", DatabaseError)):
        connector = procrastinate.PsycopgConnector(conninfo=conninfo)
        with pytest.raises(error):
            FanOut.of(procrastinate.App(connector=connector)).audit()


def test_command(
    scene: Scene, dsn: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in environment(dsn).items():
        monkeypatch.setenv(name, value)

    def fanout(*arguments: str) -> tuple[int, str]:
        code = main(["--app=tests.apps.cli_app.app", "audit", *arguments])
        return code, capsys.readouterr().out

    capsys.readouterr()
    run = str(scene.runs["open"])
    assert fanout() == (0, "nothing found\n")
    assert fanout(run, "--json") == (0, "[]\n")
    sql("open", RUN.format("open_ledgers = 3"))(scene)
    line = f"run {run}: open_ledgers: run: the run counts 3 open ledgers; there are 2"
    assert fanout() == (1, f"{line} (the next sweeps repair it)\n")
    assert fanout(str(scene.runs["queued"]), "--timeout=9") == (0, "nothing found\n")
    code, out = fanout(run, "--json")
    assert code == 1 and [one["kind"] for one in json.loads(out)] == ["open_ledgers"]
    assert fanout("77")[0] == 3
    assert fanout("--timeout=0")[0] == 2
