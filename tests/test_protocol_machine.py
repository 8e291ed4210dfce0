"""Random schedules of everything that can happen to runs, one statement after the other.

A serial schedule on a clock of its own: what it finds is found again. FANOUT_TEST_STEPS sets how
many steps to take (5,000, more or less; a long run takes 50,000 and more).
"""

import os
from typing import Any, ClassVar

import hypothesis
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests import protocol, protocol_world
from tests.conftest import Connection
from tests.protocol import Clocked, Entry, callback
from tests.protocol_world import Loop, Process, Run, World

STEPS = int(os.environ.get("FANOUT_TEST_STEPS", "5000"))
STEPS_PER_EXAMPLE = 100
# Shrinking takes minutes; with FANOUT_TEST_SHRINK=0 what was found is shown as it was found.
PHASES = [
    phase
    for phase in hypothesis.Phase
    if phase != hypothesis.Phase.shrink or os.environ.get("FANOUT_TEST_SHRINK", "1") != "0"
]
FATES = st.sampled_from(["ok"] * 6 + ["lost before", "lost after"])
WISHES = st.sampled_from(["next"] * 6 + ["slice"] * 2 + ["end"])
OUTCOMES = st.sampled_from(["succeeded"] * 5 + ["failed"] * 3 + ["released"] * 4 + ["returned"])
RETRY_INS = st.sampled_from([0.0, 3.0, 8.0, 25.0, 3600.0])
CALLBACKS = [
    callback("on_complete"),
    callback("on_success", "success"),
    callback("on_failure", "failure"),
]


class Machine(RuleBasedStateMachine):
    """The rules; what must be true after each is asserted by `World`.

    Every rule is as likely as any other, so what is done most in life has several.
    """

    protocol: ClassVar[Clocked]
    steps: ClassVar[int] = 0

    def __init__(self) -> None:
        super().__init__()
        self.world = World(self.protocol)

    def teardown(self) -> None:
        if self.world.sound:  # else an assertion is on its way up
            self.world.drain()
        type(self).steps += self.world.steps

    # -- what there is to choose from

    def runs(self) -> list[Run]:
        return list(self.world.runs.values())

    def healthy(self) -> list[Process]:
        return [process for process in self.world.processes if process.healthy]

    def fetched(self) -> list[Loop]:
        return [
            loop
            for loop in self.world.loops
            if loop.process.healthy and not loop.busy and loop.reply is None
        ]

    def at_work(self) -> list[Loop]:
        """Return the loops that may report: one report at a time per process and ledger."""
        on_their_way = {
            (sending.process, sending.run, sending.ledger)
            for sending in self.world.sendings
            if sending.entries
        }
        return [
            loop
            for loop in self.world.loops
            if loop.process.healthy
            and not loop.busy
            and loop.reply is not None
            and (loop.process, loop.run, loop.reply.ledger) not in on_their_way
        ]

    # -- runs

    @initialize(items=st.integers(1, 12), limit=st.integers(1, 6), jobs=st.integers(0, 4))
    def first(self, items: int, limit: int, jobs: int) -> None:
        self.world.start(
            manager=False, items=items, max_in_flight=limit, callbacks=CALLBACKS, max_crashes=3
        )
        for _ in range(jobs):
            self.world.fetch(self.world.processes[0])
        for loop in self.fetched():
            self.world.begin(loop, "ok")

    @precondition(lambda self: len(self.world.runs) < 3)
    @rule(
        manager=st.booleans(),
        items=st.integers(0, 10),
        limit=st.integers(1, 10),
        tolerate=st.sampled_from([None, None, 0, 1, 2]),
        crashes=st.integers(1, 3),
        callbacks=st.sampled_from([CALLBACKS, CALLBACKS[:1], []]),
    )
    def start(
        self,
        manager: bool,
        items: int,
        limit: int,
        tolerate: int | None,
        crashes: int,
        callbacks: list[Any],
    ) -> None:
        self.world.start(
            manager=manager,
            items=items,
            max_in_flight=limit,
            tolerate_count=tolerate,
            max_crashes=crashes,
            callbacks=callbacks,
        )

    @precondition(lambda self: any(m.process.healthy for m in self.world.managers))
    @rule(
        data=st.data(),
        action=st.sampled_from(["append"] * 4 + ["seal"] * 3 + ["seal, again", "fail", "retry"]),
        keys=st.lists(st.sampled_from([None, None, "a", "b", "c", "d"]), min_size=1, max_size=6),
        charge=st.booleans(),
    )
    def manage(self, data: Any, action: str, keys: list[str | None], charge: bool) -> None:
        managers = [m for m in self.world.managers if m.process.healthy]
        manager = data.draw(st.sampled_from(managers))
        if manager.fence is None:
            self.world.manager_begin(manager)
        elif action == "append":
            self.world.manager_append(manager, keys)
        elif action.startswith("seal"):
            self.world.manager_seal(manager, over=action == "seal")
        else:
            self.world.manager_fail(manager, 7.0 if action == "retry" else None, charge=charge)

    @precondition(lambda self: any(c.process.healthy for c in self.world.callbacks))
    @rule(data=st.data(), end=st.sampled_from(["done", "done", "retry", "failed"]))
    def call_back(self, data: Any, end: str) -> None:
        callbacks = [c for c in self.world.callbacks if c.process.healthy]
        chosen = data.draw(st.sampled_from(callbacks))
        if not chosen.running:
            self.world.callback_begin(chosen)
        else:
            error = None if end == "done" else protocol_world.ERROR
            self.world.callback_end(chosen, error, 5.0 if end == "retry" else None)

    # -- workers

    @precondition(lambda self: self.healthy())
    @rule(data=st.data(), jobs=st.integers(1, 4), left=st.integers(0, 1))
    def fetch_and_begin(self, data: Any, jobs: int, left: int) -> None:
        process = data.draw(st.sampled_from(self.healthy()))
        for _ in range(jobs):
            if not self.world.fetch(process):
                break
        for loop in self.fetched()[left:]:
            self.world.begin(loop, "ok")

    @precondition(lambda self: self.fetched())
    @rule(data=st.data(), fate=FATES)
    def begin(self, data: Any, fate: str) -> None:
        self.world.begin(data.draw(st.sampled_from(self.fetched())), fate)

    def _reports(self, data: Any, times: int) -> None:
        for _ in range(times):
            if self.at_work():
                self._report(data, "ok")

    def _report(self, data: Any, fate: str) -> None:
        first = data.draw(st.sampled_from(self.at_work()))
        together = [
            loop
            for loop in self.at_work()
            if (loop.process, loop.run, loop.reply.ledger)
            == (first.process, first.run, first.reply.ledger)
        ]
        loops = [first] + [
            loop for loop in together if loop is not first and data.draw(st.booleans())
        ]
        self.world.report(loops, [self._entry(data, loop) for loop in loops], fate)

    def _entry(self, data: Any, loop: Loop) -> Entry:
        name = data.draw(OUTCOMES)
        retry_in = data.draw(RETRY_INS) if name == "released" else None
        return protocol_world.outcome(loop, name, data.draw(WISHES), retry_in)

    @precondition(lambda self: self.at_work())
    @rule(data=st.data(), times=st.integers(1, 8))
    def report(self, data: Any, times: int) -> None:
        self._reports(data, times)

    @precondition(lambda self: self.at_work())
    @rule(data=st.data(), times=st.integers(1, 4))
    def report_some_more(self, data: Any, times: int) -> None:
        self._reports(data, times)

    @precondition(lambda self: self.at_work())
    @rule(data=st.data(), fate=FATES)
    def report_into_the_dark(self, data: Any, fate: str) -> None:
        self._report(data, fate)

    @precondition(lambda self: any(s.process.healthy for s in self.world.sendings))
    @rule(data=st.data(), fate=FATES)
    def resend(self, data: Any, fate: str) -> None:
        sendings = [s for s in self.world.sendings if s.process.healthy]
        self.world.resend(data.draw(st.sampled_from(sendings)), fate)

    @precondition(lambda self: self.world.processes)
    @rule(data=st.data(), fate=st.sampled_from(["kill", "silence", "silence", "wake", "wake"]))
    def trouble_a_process(self, data: Any, fate: str) -> None:
        process = data.draw(st.sampled_from([p for p in self.world.processes if p.alive]))
        if fate == "kill":
            self.world.kill(process)
        elif fate == "silence":
            self.world.silence(process)
        elif process.silent:
            self.world.wake(process)
        if len(self.healthy()) < 2:
            self.world.spawn()

    # -- time, sweeps

    @rule(seconds=st.sampled_from([0.6, 4.0, 11.0, 11.0, 31.0, 31.0, 3700.0]))
    def advance(self, seconds: float) -> None:
        self.world.advance(seconds)

    @rule()
    def sweep(self) -> None:
        self.world.sweep()

    # -- by hand

    @rule(
        data=st.data(),
        how=st.sampled_from(
            ["cancel", "delete", "retry", "retry", "start twice", "lock", "other", "refuse"]
        ),
        slot=st.integers(0, 4),
    )
    def trouble_a_job(self, data: Any, how: str, slot: int) -> None:
        if how == "other":
            self.world.defer_other()
        elif how == "lock":
            run = data.draw(st.sampled_from(self.runs()))
            self.world.defer_other(f"fanout_child:{run.id}:{slot}", "elsewhere")
        elif how == "refuse":
            tasks = data.draw(st.sampled_from(["child", "child,on_complete,on_failure"]))
            self.world.refuse("" if self.world.refused else tasks)
        elif how == "start twice":
            if loops := self.fetched() + self.at_work():
                self.world.clone(data.draw(st.sampled_from(loops)))
        else:
            jobs = self.protocol.rows(
                "SELECT id FROM procrastinate_jobs WHERE status IN ('todo', 'doing', 'failed')"
                " ORDER BY id DESC LIMIT 8"
            )
            if jobs:
                self.world.touch_job(data.draw(st.sampled_from(jobs))["id"], how)

    @rule(
        data=st.data(),
        how=st.sampled_from(["owed", "owed", "pause", "resume", "tidy", "update", "retry", "stop"]),
        status=st.sampled_from(["cancelled", "failed"]),
    )
    def control(self, data: Any, how: str, status: str) -> None:
        run = data.draw(st.sampled_from(self.runs()))
        owing = [run for run in self.runs() if run.stop_owed]
        if how == "owed" and owing:
            self.world.stop(owing[0], "failed")
        elif how == "pause":
            self.world.pause(run)
        elif how in ("resume", "owed"):
            self.world.resume(run)
        elif how == "tidy":
            self.world.tidy(run, data.draw(st.integers(1, 20)))
        elif how == "update":
            self.world.update(run, **self._change(data))
        elif how == "retry":
            statuses = data.draw(st.sampled_from([["failed"], ["failed", "cancelled"]]))
            self.world.retry_failed(run, statuses)
        elif data.draw(st.booleans()):
            self.world.stop(run, status, abort=status == "cancelled")

    def _change(self, data: Any) -> dict[str, Any]:
        name = data.draw(
            st.sampled_from(["max_in_flight"] * 3 + ["tolerate_count", "priority", "deadline"])
        )
        if name == "deadline":
            seconds = data.draw(st.sampled_from([20.0, 1e6]))
            return {name: (self.world.now + protocol_world.seconds(seconds)).isoformat()}
        if name == "tolerate_count":
            return {name: data.draw(st.sampled_from([None, 0, 1, 3]))}
        return {name: data.draw(st.integers(1, 6))}


@pytest.fixture
def clocked(conn: Connection) -> Clocked:
    """The protocol on a clock that stands, with small ledgers and a host that may refuse jobs."""
    conn.execute(protocol.REFUSAL)
    protocol.small_ledgers(conn)
    return Clocked(conn)


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_random_schedules_keep_every_invariant(clocked: Clocked) -> None:
    """Invariants 1 to 6 after every step, and every run closes in the end.

    cases.md: A01, A05 to A09, A11, A12, A14 to A16, B03, B04, B06, C05.
    """
    Machine.protocol = clocked
    Machine.steps = 0
    run_state_machine_as_test(
        Machine,
        settings=hypothesis.settings(
            max_examples=max(1, STEPS // 150),
            stateful_step_count=STEPS_PER_EXAMPLE,
            deadline=None,
            print_blob=True,
            phases=PHASES,
            suppress_health_check=list(hypothesis.HealthCheck),
        ),
    )
    print(f"{Machine.steps} steps: {dict(World.seen)}")
