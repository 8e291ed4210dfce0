"""A world of workers around the protocol, and a model of what must become of every item.

Each step is one statement (or one thing that happens to a worker or a job), after which `World`
compares every row that counts with its own books and asserts the invariants of the design.
"""

import contextlib
import datetime
import itertools
import json
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import psycopg

from tests import invariants
from tests.protocol import Clocked, Entry, Reply, Row, spec

LEASE = 30.0
OPEN = ("pending", "processing")
FINAL = ("succeeded", "failed", "cancelled")
TABLES = (
    "fanout_runs, fanout_ledgers, fanout_items, fanout_slots, fanout_closes, fanout_callbacks,"
    " procrastinate_jobs, procrastinate_events, procrastinate_workers,"
    " procrastinate_periodic_defers"
)
ERROR = '{"type": "Broken", "message": "out of order"}'


@dataclass(eq=False, repr=False)
class Process:
    """One worker process. Silent: it neither renews nor acts, but may wake again."""

    number: int
    worker: int
    alive: bool = True
    silent: bool = False

    def __repr__(self) -> str:
        return f"process {self.number}"

    @property
    def healthy(self) -> bool:
        return self.alive and not self.silent


@dataclass(eq=False)
class Item:
    key: str | None
    status: str = "pending"
    claim: int = 0
    failures: int = 0
    crashes: int = 0

    @property
    def final(self) -> bool:
        return self.status in FINAL


@dataclass(eq=False)
class Slot:
    """An active slot, as the database has it."""

    epoch: int
    token: uuid.UUID
    job: int
    process: Process
    held: int | None = None
    last: tuple[int, int] | None = None


@dataclass(eq=False, repr=False)
class Run:
    id: int
    spec: Row
    max_in_flight: int
    tolerate: int | None
    status: str = "pending"
    generation: int = 1
    paused: bool = False
    closing: str | None = None
    stopped: bool = False
    stop_owed: bool = False
    deadline: datetime.datetime | None = None
    fence: int = 0
    items: list[Item] = field(default_factory=list)
    duplicates: int = 0
    sealed: bool = False
    slots: dict[int, Slot] = field(default_factory=dict)
    # How many may be active: the limit, and what was active when it was lowered.
    allowed: int = 0
    closes: dict[int, str] = field(default_factory=dict)
    callbacks: dict[tuple[int, str], str] = field(default_factory=dict)
    done: tuple[int, int] = (0, 0)

    def __repr__(self) -> str:
        return f"run {self.id}"

    @property
    def open(self) -> bool:
        return self.status in OPEN

    @property
    def failed(self) -> int:
        return sum(item.status == "failed" for item in self.items)

    @property
    def intolerable(self) -> bool:
        return self.tolerate is not None and self.failed > self.tolerate

    @property
    def ledgers(self) -> int:
        return min(16, max(1, len(self.items) // 3)) if self.items else 0

    def cancel_rest(self) -> None:
        self.stopped = True
        for item in self.items:
            if item.status == "pending":
                item.status = "cancelled"

    def close(self, status: str) -> None:
        assert self.open and self.generation not in self.closes
        self.status, self.closing, self.paused, self.stop_owed = status, None, False, False
        self.closes[self.generation] = status
        self.slots.clear()
        states = {item.status for item in self.items}
        clean = status == "completed" and not states & {"failed", "cancelled"}
        for callback in self.spec["callbacks"]:
            if callback["on"] in ("complete", "success" if clean else "failure"):
                self.callbacks[self.generation, callback["task"]] = "owed"


@dataclass(eq=False)
class Loop:
    """One execution of a child job, as its process knows it."""

    process: Process
    run: int
    slot: int
    job: int
    token: uuid.UUID
    reply: Reply | None = None
    busy: bool = False

    @property
    def holding(self) -> tuple[int, int, int] | None:
        if self.reply is None or self.reply.epoch is None:
            return None
        return self.run, self.slot, self.reply.epoch

    @property
    def suspect(self) -> bool:
        return bool(self.reply and self.reply.verdict == "item" and self.reply.crashes)


@dataclass(eq=False)
class Sending:
    """A statement whose reply the process still waits for."""

    process: Process
    run: int
    ledger: int
    suspect: bool
    loops: Sequence[Loop]
    entries: Sequence[Entry] = ()  # none: a begin


@dataclass(eq=False)
class Manager:
    process: Process
    run: int
    job: int
    fence: int | None = None


@dataclass(eq=False)
class Callback:
    process: Process
    run: int
    generation: int
    task: str
    job: int
    running: bool = False


class World:
    # How often what happened, over all worlds: a schedule that never meets a case proves nothing.
    seen: ClassVar[Counter[str]] = Counter()

    def __init__(self, protocol: Clocked) -> None:
        self.p = protocol
        self.renewed = self.now
        self.runs: dict[int, Run] = {}
        self.processes: list[Process] = []
        self.loops: list[Loop] = []
        self.sendings: list[Sending] = []
        self.managers: list[Manager] = []
        self.callbacks: list[Callback] = []
        self.accepted: set[tuple[int, int, int]] = set()
        # Somebody laid hands on jobs, or the host refused some, since the last sweep.
        self.touched = False
        self.refused = ""
        self.sound = True
        self.checking = True
        self.steps = 0
        self.tokens = (uuid.UUID(int=n) for n in itertools.count(1))
        self.p.execute(f"TRUNCATE {TABLES} RESTART IDENTITY")
        self.p.execute("ALTER SEQUENCE fanout_epochs RESTART")
        self.p.execute("SELECT set_config('fanout_test.refused', '', false)")
        self.spawn()

    # -- steps, time

    @property
    def now(self) -> datetime.datetime:
        return self.p.now

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        self.sound = False
        self.p.advance(0.001)
        if self.now - self.renewed > seconds(LEASE / 3):
            self._renew_all()
        yield
        for run in self.runs.values():
            if run.sealed and run.open and all(item.final for item in run.items):
                self.seen["closes"] += 1
                run.close(run.closing or ("failed" if run.intolerable else "completed"))
            active = len(run.slots)
            run.allowed = max(run.max_in_flight, min(run.allowed, active))
        if self.checking:
            self.verify()
        self.steps += 1
        self.sound = True

    def advance(self, seconds: float) -> None:
        """Let time pass; healthy processes renew what they know they hold."""
        with self.step():
            while seconds > 0:
                part = min(seconds, LEASE / 3) if seconds < 600 else seconds
                self.p.advance(part)
                seconds -= part
                self._renew_all()

    def _renew_all(self) -> None:
        self.renewed = self.now
        for process in self.processes:
            if process.healthy:
                self.p.beat(process.worker)
                self._renew(process)

    def _renew(self, process: Process) -> None:
        holdings = [h for loop in self.loops if loop.process is process and (h := loop.holding)]
        verdicts = self.p.renew(holdings)
        for holding in holdings:
            run = self.runs[holding[0]]
            if not self._mine(holding):
                assert verdicts[holding] == "lost"
            elif run.closing:
                assert verdicts[holding] in ("stop", "abort")
            else:
                assert holding not in verdicts
        for manager in self.managers:
            if manager.process is process and manager.fence is not None:
                mine = self.p.value(
                    "SELECT fanout_renew_manager_v1(%s, %s)", manager.run, manager.fence
                )
                run = self.runs[manager.run]
                assert mine == (run.status == "pending" and run.fence == manager.fence)
        for callback in self.callbacks:
            if callback.process is process and callback.running:
                self.p.value(
                    "SELECT fanout_renew_callback_v1(%s, %s, %s, %s)",
                    callback.run,
                    callback.generation,
                    callback.task,
                    callback.job,
                )

    def _mine(self, holding: tuple[int, int, int]) -> Slot | None:
        slot = self.runs[holding[0]].slots.get(holding[1])
        return slot if slot and slot.epoch == holding[2] else None

    # -- processes

    def spawn(self) -> Process:
        process = Process(len(self.processes), self.p.worker())
        self.processes.append(process)
        return process

    def kill(self, process: Process) -> None:
        with self.step():
            process.alive = False
            self.sendings = [s for s in self.sendings if s.process is not process]
            for name in ("loops", "managers", "callbacks"):
                kept = [one for one in getattr(self, name) if one.process is not process]
                setattr(self, name, kept)

    def silence(self, process: Process) -> None:
        process.silent = True

    def wake(self, process: Process) -> None:
        with self.step():
            process.silent = False
            self._renew_all()

    # -- starting

    def start(self, *, manager: bool, items: int = 0, **changes: Any) -> Run:
        with self.step():
            columns = spec(manager_task="manager" if manager else None, **changes)
            row = self.p.start(columns)
            assert (row["outcome"], row["run_status"]) == ("created", "pending")
            run = Run(
                row["run_id"], columns, columns["max_in_flight"], columns.get("tolerate_count")
            )
            run.allowed = run.max_in_flight
            self.runs[run.id] = run
            if not manager:
                run.fence = 1
                self._append(run, 1, [None] * items)
                self._seal(run, 1)
        return run

    def _append(self, run: Run, fence: int, keys: Sequence[str | None]) -> None:
        row = self.p.append(run.id, fence, keys, [json.dumps(None) for _ in keys])
        if run.fence != fence or run.status != "pending":
            assert row is None, "a late chunk of an older manager is refused"
            return
        for key in keys:
            if key is None or all(item.key != key for item in run.items):
                run.items.append(Item(key))
            else:
                run.duplicates += 1
        assert row == {"staged": len(run.items), "duplicates": run.duplicates}

    def _seal(self, run: Run, fence: int) -> None:
        status = self.p.seal(run.id, fence)
        if run.fence != fence or run.closing or (not run.sealed and run.status != "pending"):
            assert status is None
        elif run.sealed:
            assert status == run.status
        else:
            run.sealed = True
            run.status = "processing"
            assert status == ("processing" if run.items else "completed")

    def manager_begin(self, manager: Manager) -> None:
        with self.step():
            run = self.runs[manager.run]
            row = self.p.manager_begin(run.id, manager.job)
            if run.status != "pending":
                assert row is None
                self._over(manager)
                return
            assert row is not None
            run.fence += 1
            run.items, run.duplicates = [], 0
            manager.fence = row["fence"]
            assert manager.fence == run.fence

    def manager_append(self, manager: Manager, keys: Sequence[str | None]) -> None:
        assert manager.fence is not None
        with self.step():
            self._append(self.runs[manager.run], manager.fence, keys)

    def manager_seal(self, manager: Manager, *, over: bool) -> None:
        assert manager.fence is not None
        with self.step():
            self._seal(self.runs[manager.run], manager.fence)
            if over:
                self._over(manager)

    def manager_fail(self, manager: Manager, retry_in: float | None, *, charge: bool) -> None:
        assert manager.fence is not None
        with self.step():
            run = self.runs[manager.run]
            failures = self.p.run(run.id)["manager_failures"]
            again = self.p.manager_fail(run.id, manager.fence, retry_in, charge=charge)
            if run.fence != manager.fence or run.status != "pending":
                assert again is None
            elif retry_in is None or (charge and failures + 1 >= 3):
                assert again is False
                run.close("failed")
            else:
                assert again is True
                run.fence += 1
            self._over(manager)

    def _over(self, execution: Manager | Callback | Loop) -> None:
        for name in ("loops", "managers", "callbacks"):
            kept = [one for one in getattr(self, name) if one is not execution]
            setattr(self, name, kept)
        # The host ends the job; where somebody else did, it can only complain.
        with contextlib.suppress(psycopg.errors.RaiseException):
            self.p.finish(execution.job)

    # -- the queue

    def fetch(self, process: Process) -> bool:
        fetched = False
        with self.step():
            job = self.p.fetch(process.worker)
            if job:
                fetched = True
                self._take_up(process, job)
        return fetched

    def _take_up(self, process: Process, job: Row) -> None:
        args = job["args"]
        if job["task_name"] == "child":
            loop = Loop(process, args["run_id"], args["slot"], job["id"], next(self.tokens))
            self.loops.append(loop)
        elif job["task_name"] == "manager":
            self.managers.append(Manager(process, args["run_id"], job["id"]))
        elif "generation" in args:
            self.callbacks.append(
                Callback(process, args["run_id"], args["generation"], job["task_name"], job["id"])
            )
        else:
            self.p.finish(job["id"])

    def defer_other(self, lock: str | None = None, queue: str = "papers") -> None:
        """Somebody else's job; with one of our queueing locks it is in our way."""
        with self.step(), contextlib.suppress(psycopg.errors.UniqueViolation):
            self.p.defer("other", lock, queue)
            self.touched = self.touched or lock is not None

    def touch_job(self, job: int, how: str) -> None:
        """Cancel, delete or retry a job by hand."""
        with (
            self.step(),
            contextlib.suppress(psycopg.errors.UniqueViolation, psycopg.errors.RaiseException),
        ):
            self.touched = True
            {"cancel": self.p.cancel_job, "delete": self.p.delete_job, "retry": self.p.retry_job}[
                how
            ](job)

    def refuse(self, tasks: str) -> None:
        """Let the host refuse every job of these tasks."""
        with self.step():
            self.refused = tasks
            self.p.execute("SELECT set_config('fanout_test.refused', %s, false)", tasks)
            self.touched = True

    # -- the child's loop

    def clone(self, loop: Loop) -> None:
        """Start the same job a second time, as another execution of it."""
        self.loops.append(Loop(loop.process, loop.run, loop.slot, loop.job, next(self.tokens)))

    def may_take_suspect(self, process: Process, besides: Sequence[Loop] = ()) -> bool:
        return not any(
            loop.suspect for loop in self.loops if loop.process is process and loop not in besides
        ) and not any(s.suspect for s in self.sendings if s.process is process)

    def begin(self, loop: Loop, fate: str) -> None:
        suspect = self.may_take_suspect(loop.process)
        self._send(Sending(loop.process, loop.run, 0, suspect, [loop]), fate)

    def report(self, loops: Sequence[Loop], entries: Sequence[Entry], fate: str) -> None:
        """Send outcomes and wishes of loops of one process on one ledger of one run."""
        (first, *_) = loops
        assert first.reply is not None
        suspect = self.may_take_suspect(first.process, loops)
        self._send(
            Sending(first.process, first.run, first.reply.ledger, suspect, loops, entries), fate
        )

    def resend(self, sending: Sending, fate: str) -> None:
        self.sendings.remove(sending)
        self._send(sending, fate)

    def _send(self, sending: Sending, fate: str) -> None:
        with self.step():
            replies: Sequence[Reply] = ()
            if fate != "lost before":
                replies = self._execute(sending)
            for loop in sending.loops:
                loop.busy = fate != "ok"
            if fate != "ok":
                self.sendings.append(sending)
                return
            for loop, reply in zip(sending.loops, replies, strict=True):
                loop.reply = reply
                if reply.verdict in ("ended", "lost"):
                    self._over(loop)

    def _execute(self, sending: Sending) -> Sequence[Reply]:
        if not sending.entries:
            return [self._begin(sending.loops[0], sending.suspect)]
        return self._report(sending)

    def _begin(self, loop: Loop, suspect: bool) -> Reply:
        run = self.runs[loop.run]
        before = self._before(run)
        row = before["slots"].get(loop.slot)
        slot = run.slots.get(loop.slot)
        # The process's ledger may be one that this run has not.
        reply = self.p.begin(
            run.id, loop.slot, loop.job, loop.token, ledger=loop.job % 5, suspect=suspect
        )
        assert not reply.stop
        if slot and slot.token == loop.token and slot.job == loop.job:
            assert reply.epoch == slot.epoch, "sent again, it gets the same answer"
            self._goes_on(run, slot, loop.slot, reply, before, suspect)
        elif (
            row is None
            or row["job_id"] != loop.job
            or row["active"]
            or self._blocked(run)
            or len(run.slots) >= run.max_in_flight
        ):
            assert (reply.verdict, reply.epoch) == ("ended", None)
        else:
            assert reply.epoch is not None
            run.slots[loop.slot] = Slot(reply.epoch, loop.token, loop.job, loop.process)
            self._goes_on(run, run.slots[loop.slot], loop.slot, reply, before, suspect)
            assert len(run.slots) <= run.max_in_flight
        return reply

    def _report(self, sending: Sending) -> Sequence[Reply]:
        run = self.runs[sending.run]
        before = self._before(run)
        replies = self.p.report(run.id, sending.ledger, *sending.entries, suspect=sending.suspect)
        pairs = list(zip(sending.entries, replies, strict=True))
        closing = run.closing
        recorded = [entry for entry in sending.entries if self._record(run, entry)]
        stop = False
        if any(entry.outcome == "failed" for entry in recorded) and not closing and run.intolerable:
            stop, run.closing, run.stop_owed = True, "failed", True
        for entry, reply in pairs:
            assert reply.stop == stop
            assert (reply.slot, reply.epoch) == (entry.slot, entry.epoch)
            slot = self._mine((run.id, entry.slot, entry.epoch))
            if slot is None:
                self._stranger(run, entry, reply)
            elif (
                entry in recorded
                or entry.outcome is None
                or slot.last == (entry.position, entry.claim)
            ):
                fresh = slot.held is None
                others = before["others"] and entry.wish == "slice"
                if fresh and (before["blocked"] or stop or others or entry.wish == "end"):
                    assert reply.verdict == "ended"
                self._goes_on(run, slot, entry.slot, reply, before, sending.suspect)
            else:
                raise AssertionError(f"a slot of ours holds what we did not report: {entry}")
        return replies

    def _record(self, run: Run, entry: Entry) -> bool:
        """Book an outcome if it is to be accepted: while its slot holds the item, and once."""
        slot = self._mine((run.id, entry.slot, entry.epoch))
        if slot is None or entry.outcome is None or slot.held != entry.position:
            return False
        assert entry.position is not None and entry.claim is not None
        item = run.items[entry.position]
        if item.claim != entry.claim or item.status != "processing":
            return False
        assert (run.id, entry.position, entry.claim) not in self.accepted
        self.accepted.add((run.id, entry.position, entry.claim))
        if entry.outcome in ("succeeded", "failed"):
            item.status = entry.outcome
        else:
            item.status = "cancelled" if run.closing else "pending"
        item.failures += entry.outcome in ("failed", "released")
        item.claim += entry.outcome == "returned"
        slot.held = None
        slot.last = entry.position, entry.claim
        self.seen[f"{entry.outcome}: {item.status}"] += 1
        return True

    def _stranger(self, run: Run, entry: Entry, reply: Reply) -> None:
        """Judge the verdict for a slot that is over, or somebody else's."""
        self.seen[f"stranger: {reply.verdict}"] += 1
        if entry.outcome is None:
            assert reply.verdict == "ended"
            return
        assert entry.position is not None and entry.claim is not None
        item = run.items[entry.position]
        if (run.id, entry.position, entry.claim) in self.accepted:
            if item.final and item.claim == entry.claim:
                assert reply.verdict == "ended", "recorded before: a resend must be told so"
            else:
                assert reply.verdict in ("ended", "lost")
        else:
            assert reply.verdict == "lost" or entry.outcome == "returned"

    def _goes_on(
        self, run: Run, slot: Slot, number: int, reply: Reply, before: Row, suspect: bool
    ) -> None:
        """Book what a slot was given: what it had been given already, or something new."""
        self.seen["given again" if slot.held is not None else reply.verdict] += 1
        if slot.held is not None:
            item = run.items[slot.held]
            assert (reply.verdict, reply.position, reply.claim) == (
                "item",
                slot.held,
                item.claim,
            ), "it goes on with what it was given in the lost reply"
        elif reply.verdict == "item":
            self._hand_out(run, slot, reply, before, suspect)
        elif reply.verdict == "ended":
            del run.slots[number]
        else:
            assert reply.verdict in ("wait", "move")
            assert not before["blocked"]
            assert reply.verdict == "move" or 0 < (reply.wait_seconds or 0) <= 1

    def _hand_out(self, run: Run, slot: Slot, reply: Reply, before: Row, suspect: bool) -> None:
        assert reply.position is not None
        item = run.items[reply.position]
        due = before["dues"].get(reply.position)
        assert item.status == "pending" and not run.paused
        assert reply.ledger == reply.position % run.ledgers
        # A suspect that was only put off is taken by who may take one.
        put_off = item.crashes > 0 and item.failures == 0
        early = datetime.timedelta(seconds=1.0 if put_off else 0.0)
        assert due is None or due <= self.now + early
        assert (reply.claim, reply.failures, reply.crashes, reply.item_key) == (
            item.claim + 1,
            item.failures,
            item.crashes,
            item.key,
        )
        if item.crashes:
            assert suspect, "a suspect only for a process that may take one"
            assert not any(
                r.items[s.held].crashes
                for r in self.runs.values()
                for s in r.slots.values()
                if s.process is slot.process and s.held is not None
            ), "a process holds one suspect at a time"
        self.seen["suspects"] += item.crashes > 0
        item.status = "processing"
        item.claim += 1
        slot.held = reply.position

    def _blocked(self, run: Run) -> bool:
        return run.status != "processing" or run.paused or run.closing is not None

    def _before(self, run: Run) -> Row:
        """Look at what a statement will meet."""
        dues = self.p.rows(
            "SELECT position, due FROM fanout_items WHERE run_id = %s AND due IS NOT NULL", run.id
        )
        others = self.p.value(
            "SELECT count(*) FROM procrastinate_jobs WHERE status = 'todo'"
            " AND queue_name = 'papers' AND (scheduled_at IS NULL OR scheduled_at <= now())"
            " AND coalesce(queueing_lock, '') NOT LIKE %s",
            f"fanout_child:{run.id}:%",
        )
        return {
            "slots": {row["slot"]: row for row in self.p.slots(run.id)},
            "dues": {row["position"]: row["due"] for row in dues},
            "others": others > 0,
            "blocked": self._blocked(run),
        }

    # -- callbacks

    def callback_begin(self, callback: Callback) -> None:
        with self.step():
            row = self._callback_row(callback)
            mine = row["state"] == "owed" and row["job_id"] == callback.job
            attempt = self.p.callback_begin(
                callback.run, callback.generation, callback.task, callback.job
            )
            assert (attempt is not None) == mine
            if mine:
                callback.running = True
                self._set(callback, "running")
            else:
                self._over(callback)

    def callback_end(self, callback: Callback, error: str | None, retry_in: float | None) -> None:
        with self.step():
            row = self._callback_row(callback)
            mine = row["state"] == "running" and row["job_id"] == callback.job
            accepted = self.p.callback_end(
                callback.run, callback.generation, callback.task, callback.job, error, retry_in
            )
            assert accepted == mine
            if mine:
                done = "done" if error is None else "failed" if retry_in is None else "owed"
                self._set(callback, done)
            self._over(callback)

    def _set(self, callback: Callback, state: str) -> None:
        self.runs[callback.run].callbacks[callback.generation, callback.task] = state

    def _callback_row(self, callback: Callback) -> Row:
        row = self.p.row(
            "SELECT * FROM fanout_callbacks WHERE run_id = %s AND generation = %s AND task = %s",
            callback.run,
            callback.generation,
            callback.task,
        )
        assert row is not None
        return row

    # -- control

    def stop(self, run: Run, status: str, *, abort: bool = False) -> None:
        with self.step():
            self._stop(run, status)
            answer = self.p.stop(run.id, status, abort=abort)
            assert (answer in OPEN) == run.open or run.sealed

    def _stop(self, run: Run, status: str) -> None:
        if run.status == "pending":
            run.close(status)
        elif run.status == "processing":
            run.closing = run.closing or status
            run.stop_owed = False
            run.cancel_rest()

    def pause(self, run: Run) -> None:
        with self.step():
            self.p.pause(run.id)
            run.paused = run.paused or run.open

    def resume(self, run: Run) -> None:
        with self.step():
            self.p.resume(run.id)
            run.paused = False

    def update(self, run: Run, **changes: Any) -> None:
        with self.step():
            self.p.update(run.id, **changes)
            if not run.open:
                return
            if "max_in_flight" in changes:
                run.max_in_flight = changes["max_in_flight"]
                run.allowed = max(run.max_in_flight, len(run.slots))
            if "tolerate_count" in changes:
                run.tolerate = changes["tolerate_count"]
            if "deadline" in changes:
                run.deadline = datetime.datetime.fromisoformat(changes["deadline"])
            if run.intolerable and not run.closing:
                self._stop(run, "failed")

    def retry_failed(self, run: Run, statuses: Sequence[str]) -> None:
        with self.step():
            chosen = [item for item in run.items if item.status in statuses]
            answer = self.p.retry_failed(run.id, statuses)
            if run.closing:
                assert answer == -1
                return
            if not run.sealed:
                chosen = []
            assert answer == len(chosen)
            if not chosen:
                return
            for item in chosen:
                item.status, item.failures, item.crashes = "pending", 0, 0
                item.claim += 1
            run.stopped = False
            run.done = (0, 0)
            if not run.open:
                run.generation += 1
                run.status = "processing"
            if run.deadline and run.deadline <= self.now:
                run.deadline = None

    def tidy(self, run: Run, limit: int) -> None:
        with self.step():
            self.p.tidy(run.id, limit)

    # -- the sweep

    def sweep(self) -> None:
        with self.step():
            self.p.advance(1.1)  # what was dealt this very moment is not looked at
            plan = self.p.sweep_plan(LEASE)
            if not self.disturbed():
                assert not plan, f"invariant 6: nothing is wrong, but the sweep found {plan}"
            for run_id in plan:
                self._sweep_run(self.runs[run_id])
            if not self.refused:
                # Whatever it was, it is mended: the same again does nothing.
                before = invariants.written(self.p.conn)
                again = self.p.sweep(LEASE)
                assert not any(again.values()), f"a second sweep found {again}"
                assert invariants.written(self.p.conn) == before
                if not again and not self._strays():
                    self.touched = False

    def _strays(self) -> int:
        """Count the waiting jobs that hold a slot's lock and own no queued slot.

        Those of closed runs too, and those of slots at work: retried by hand, they outlive these.
        """
        count: int = self.p.value(
            "SELECT count(*) FROM procrastinate_jobs j WHERE status = 'todo'"
            " AND queueing_lock LIKE 'fanout_child:%%'"
            " AND NOT EXISTS (SELECT FROM fanout_slots s WHERE s.job_id = j.id AND NOT s.active)"
        )
        return count

    def _sweep_run(self, run: Run) -> None:
        slots = {row["slot"]: row for row in self.p.slots(run.id)}
        before = self.p.run(run.id)
        callbacks = self._callback_rows(run)
        done = self.p.sweep_run(run.id, LEASE)
        self.seen.update({f"swept: {name}": n for name, n in done.items()})
        assert "recounted" not in done, f"counters were wrong: {done}"
        gone = {
            number: slot
            for number, slot in run.slots.items()
            if self._silent(slots[number]) and self._looked_at(slots[number]["suspect_since"])
        }
        failed = [self._rescue(run, number, slot) for number, slot in gone.items()]
        if run.status == "processing" and any(failed) and run.intolerable and not run.closing:
            self._stop(run, "failed")
        if run.closing and not run.stopped:
            self._stop(run, run.closing)
        if run.open and run.deadline and run.deadline <= self.now and not run.closing:
            self._stop(run, "failed")
        if run.status == "pending":
            self._swept_manager(run, before)
        self._swept_callbacks(run, callbacks)

    def _silent(self, row: Row) -> bool:
        return bool(row["seen_at"] < self.now - datetime.timedelta(seconds=LEASE / 2))

    def _looked_at(self, suspect_since: datetime.datetime | None) -> bool:
        second = self.now - datetime.timedelta(seconds=LEASE / 4)
        return suspect_since is not None and suspect_since <= second

    def _rescue(self, run: Run, number: int, slot: Slot) -> bool:
        """Book a rescue. Nobody who renews is ever rescued. Returns whether its item failed."""
        known = {loop.holding for loop in self.loops if loop.process.healthy}
        assert (run.id, number, slot.epoch) not in known, "a renewed slot was rescued"
        del run.slots[number]
        if slot.held is None:
            return False
        item = run.items[slot.held]
        item.crashes += 1
        item.claim += 1
        item.status = "cancelled" if run.closing else "pending"
        if item.crashes >= run.spec["max_crashes"]:
            item.status = "failed"
        self.seen[f"rescued: {item.status}"] += 1
        return item.status == "failed"

    def _swept_manager(self, run: Run, before: Row) -> None:
        """Adopt what became of a manager; one at work and renewed is left alone."""
        after = self.p.run(run.id)
        if after["fence"] == before["fence"] and after["status"] == "pending":
            return
        at_work = any(
            m.run == run.id and m.fence == run.fence and m.process.healthy for m in self.managers
        )
        assert not at_work, "a renewed manager was replaced"
        if after["status"] == "pending":
            assert after["fence"] == before["fence"] + 1
            run.fence += 1
        else:
            assert before["manager_crashes"] + 1 >= 3
            run.close("failed")

    def _callback_rows(self, run: Run) -> dict[tuple[int, str], Row]:
        rows = self.p.rows("SELECT * FROM fanout_callbacks WHERE run_id = %s", run.id)
        return {(row["generation"], row["task"]): row for row in rows}

    def _swept_callbacks(self, run: Run, before: dict[tuple[int, str], Row]) -> None:
        for key, row in self._callback_rows(run).items():
            if key not in before or row["state"] == before[key]["state"]:
                continue
            run.callbacks[key] = row["state"]
            if before[key]["attempts"] >= 6:
                assert row["state"] == "failed", "six times at most"
                continue
            assert (before[key]["state"], row["state"]) == ("running", "owed")
            assert not any(
                (c.run, c.generation, c.task) == (run.id, *key)
                and c.running
                and c.job == before[key]["job_id"]
                and c.process.healthy
                for c in self.callbacks
            ), "a renewed callback was taken back"

    def disturbed(self) -> bool:
        """Tell whether anything has happened that a sweep may have to repair."""
        if self.touched or self.refused:
            return True
        if any(run.stop_owed or run.deadline for run in self.runs.values() if run.open):
            return True
        known = {loop.holding for loop in self.loops if loop.process.healthy}
        if any(
            (run.id, number, slot.epoch) not in known
            for run in self.runs.values()
            for number, slot in run.slots.items()
        ):
            return True
        held = {
            (c.run, c.generation, c.task) for c in self.callbacks if c.running and c.process.healthy
        }
        if any(
            state == "running" and (run.id, *key) not in held
            for run in self.runs.values()
            for key, state in run.callbacks.items()
        ):
            return True
        healthy = [process.worker for process in self.processes if process.healthy]
        fenced = {(m.run, m.fence) for m in self.managers if m.process.healthy}
        orphaned = self.p.value(
            "SELECT count(*) FROM procrastinate_jobs WHERE status = 'doing'"
            " AND NOT worker_id = ANY (%s)",
            healthy,
        )
        return bool(orphaned) or any(
            run.status == "pending" and run.fence and (run.id, run.fence) not in fenced
            for run in self.runs.values()
        )

    # -- the books

    def verify(self) -> None:
        """Compare every row that counts with the model, and assert the invariants."""
        self._verify_runs()
        self._verify_items()
        for run in self.runs.values():
            assert len(run.slots) <= run.allowed, "a lowered limit: never rising"
            done = (run.generation, sum(item.final for item in run.items))
            if run.sealed:
                assert done >= run.done, "progress never goes backwards within a generation"
                run.done = done
        invariants.check(self.p.conn, damaged=self.touched)
        if not self.disturbed():
            plan = self.p.sweep_plan(LEASE)
            assert not plan, f"invariant 6: nothing is wrong, but a sweep would find {plan}"

    def _verify_runs(self) -> None:
        rows = self.p.rows(
            "SELECT id, status, generation, paused, closing, total, staged, duplicates,"
            " max_in_flight, fence FROM fanout_runs ORDER BY id"
        )
        assert [dict(row) for row in rows] == [
            {
                "id": run.id,
                "status": run.status,
                "generation": run.generation,
                "paused": run.paused,
                "closing": run.closing,
                "total": len(run.items) if run.sealed else None if run.open else 0,
                "staged": len(run.items),
                "duplicates": run.duplicates,
                "max_in_flight": run.max_in_flight,
                "fence": run.fence,
            }
            for run in self.runs.values()
        ]
        slots = self.p.rows("SELECT run_id, slot, epoch, held FROM fanout_slots WHERE active")
        assert {(row["run_id"], row["slot"], row["epoch"], row["held"]) for row in slots} == {
            (run.id, number, slot.epoch, slot.held)
            for run in self.runs.values()
            for number, slot in run.slots.items()
        }
        closes = self.p.rows("SELECT run_id, generation, status FROM fanout_closes")
        assert {(row["run_id"], row["generation"]): row["status"] for row in closes} == {
            (run.id, generation): status
            for run in self.runs.values()
            for generation, status in run.closes.items()
        }
        callbacks = self.p.rows("SELECT run_id, generation, task, state FROM fanout_callbacks")
        assert {(r["run_id"], r["generation"], r["task"]): r["state"] for r in callbacks} == {
            (run.id, generation, task): state
            for run in self.runs.values()
            for (generation, task), state in run.callbacks.items()
        }

    def _verify_items(self) -> None:
        rows = self.p.rows(
            "SELECT i.run_id, i.position, i.claim, i.failures, i.crashes, i.item_key, CASE"
            " WHEN i.status = 'pending' AND l.stopped THEN 'cancelled' ELSE i.status END AS status"
            " FROM fanout_items i JOIN fanout_runs r ON r.id = i.run_id"
            " JOIN fanout_ledgers l ON l.run_id = r.id"
            " AND l.ledger = i.position %% nullif(r.ledgers, 0)"
            " ORDER BY i.run_id, i.position"
        )
        wanted = [
            {
                "run_id": run.id,
                "position": position,
                "claim": item.claim,
                "failures": item.failures,
                "crashes": item.crashes,
                "item_key": item.key,
                "status": item.status,
            }
            for run in self.runs.values()
            if run.sealed
            for position, item in enumerate(run.items)
        ]
        assert rows == wanted, [
            pair for pair in itertools.zip_longest(rows, wanted) if pair[0] != pair[1]
        ]

    # -- the end

    def drain(self, rounds: int = 300) -> None:
        """Let healthy workers and sweeps bring everything to its end."""
        self.checking = False
        self.refuse("")
        for job in self.p.jobs("other"):
            self.p.cancel_job(job["id"])
        for process in self.processes:
            if process.alive and process.silent:
                self.wake(process)
        worker = self.spawn()
        for n in range(rounds):
            self._work_off(worker)
            self.sweep()
            self.verify()
            if not self._unfinished():
                break
            self.advance(11.0 if n < rounds - 50 else 4000.0)
        self.checking = True
        assert not self._unfinished(), f"not at their end: {self._unfinished()}"
        self.sweep()
        invariants.check(self.p.conn)
        invariants.check_quiet(self.p.conn)
        for run in self.runs.values():
            assert set(run.closes) == set(range(1, run.generation + 1))

    def _unfinished(self) -> list[str]:
        left = [f"run {run.id} {run.status}" for run in self.runs.values() if run.open]
        left += [
            f"callback {key} {state}"
            for run in self.runs.values()
            for key, state in run.callbacks.items()
            if state in ("owed", "running")
        ]
        # A job that died between its fetch and its begin after its run had closed is the host's.
        jobs = self.p.rows(
            "SELECT * FROM procrastinate_jobs WHERE queue_name = 'papers'"
            " AND (status = 'todo' OR status = 'doing' AND worker_id = ANY (%s))",
            [process.worker for process in self.processes if process.healthy],
        )
        return left + [f"job {job}" for job in jobs]

    def _work_off(self, worker: Process) -> None:
        """Do what healthy processes do: all that is due, and nothing goes wrong."""
        for run in self.runs.values():
            if run.paused:
                self.resume(run)
            if run.stop_owed:
                self.stop(run, "failed")
        while sum(loop.process is worker for loop in self.loops) < 6 and self.fetch(worker):
            pass
        for sending in [s for s in self.sendings if s.process.healthy]:
            self.resend(sending, "ok")
        self._attend()
        for loop in [loop for loop in self.loops if loop.process.healthy]:
            self._work_on(loop)

    def _attend(self) -> None:
        for manager in [m for m in self.managers if m.process.healthy]:
            if manager.fence is None:
                self.manager_begin(manager)
            else:
                self.manager_seal(manager, over=True)
        for callback in [c for c in self.callbacks if c.process.healthy]:
            if callback.running:
                self.callback_end(callback, None, None)
            else:
                self.callback_begin(callback)

    def _work_on(self, loop: Loop) -> None:
        if loop.reply is None:
            self.begin(loop, "ok")
        while loop in self.loops:
            waits = loop.reply is not None and loop.reply.verdict == "wait"
            self.report([loop], [outcome(loop, "succeeded")], "ok")
            if waits:
                break


def seconds(number: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=number)


def outcome(loop: Loop, name: str, wish: str = "next", retry_in: float | None = None) -> Entry:
    assert loop.reply is not None
    return loop.reply.entry(name, wish=wish, retry_in=retry_in)
