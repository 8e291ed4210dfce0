"""The keeper: renewals and sweeps in time, verdicts passed on, whatever goes wrong meanwhile."""

import itertools
import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from fanout_procrastinate import DatabaseError, SchemaError, SweepReport, database, models, store
from fanout_procrastinate import keeper as keeper_module
from fanout_procrastinate.keeper import Hold, Keeper
from fanout_procrastinate.sweeper import Sweeper
from tests.support import Recorder, begun, direct, sealed
from tests.waiting import wait_until

Conn = psycopg.Connection[dict[str, Any]]


@pytest.fixture
def own(dsn: str) -> Iterator[database.Database]:
    with direct(dsn, size=1) as made:
        yield made


class Idle:
    """A sweep that finds what it is told to find."""

    def __init__(self, done: dict[str, int] | None = None) -> None:
        self.done = done or {}
        self.steps: list[tuple[str, float]] = []
        self.second_look = 7.5

    def sweep_once(self) -> SweepReport:
        self.steps.append(("sweep", time.monotonic()))
        return SweepReport(done=self.done)

    def look_once(self) -> SweepReport:
        self.steps.append(("look", time.monotonic()))
        return SweepReport(done=self.done)


def keeping(
    run: store.RunCall,
    sweep: Any = None,
    renew: float = 60.0,
    look: float = 60.0,
) -> Keeper:
    """`sweep`: what to sweep with, or a function that makes it."""
    made = sweep if callable(sweep) else lambda run: sweep or Idle()
    return Keeper(run, made, renew_interval=renew, sweep_interval=look)


def held(reply: models.Reply, run_id: int, verdicts: list[str], **options: Any) -> Hold:
    assert reply.epoch is not None
    holding = models.Holding(run_id, reply.slot, reply.epoch)
    return Hold(holding=holding, on_verdict=verdicts.append, **options)


def aged(conn: Conn, table: str = "fanout_slots", column: str = "seen_at") -> None:
    conn.execute(f"UPDATE {table} SET {column} = {column} - interval '1 hour'")


def seen(conn: Conn) -> list[bool]:
    """Return of each slot whether it was renewed just now."""
    rows = conn.execute(
        "SELECT seen_at > clock_timestamp() - interval '1 min' AS fresh FROM fanout_slots"
        " WHERE active ORDER BY slot"
    )
    return [row["fresh"] for row in rows]


# -- renewals


def test_all_slots_are_renewed_in_one_statement(
    own: database.Database, conn: Conn, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(monkeypatch)
    run_id = sealed(own, "1", "2", "3", "4")
    other = sealed(own, "1")
    verdicts: list[str] = []
    keeper = keeping(own.run)
    for _ in range(3):
        keeper.add(held(begun(own, run_id, conn), run_id, verdicts))
    keeper.add(held(begun(own, other, conn), other, verdicts))
    aged(conn)
    keeper.renew_once()
    assert seen(conn) == [True] * 4 and verdicts == [] and len(recorder.of("renew")) == 1


def test_nothing_held_asks_nothing(own: database.Database, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(monkeypatch)
    keeping(own.run).renew_once()
    assert recorder.calls == []


def test_verdicts_are_passed_on(own: database.Database, conn: Conn) -> None:
    run_id = sealed(own, "1", "2", "3")
    told: list[list[str]] = [[], [], []]
    keeper = keeping(own.run)
    for verdicts in told:
        keeper.add(held(begun(own, run_id, conn), run_id, verdicts))
    conn.execute("SELECT fanout_rescue_v1(%s, 1)", [run_id])
    keeper.renew_once()
    assert told == [[], ["lost"], []]
    own.run(store.stop(run_id, status="cancelled", reason="x", abort=False))
    keeper.renew_once()
    assert [one[-1] for one in told] == ["stop", "lost", "stop"]
    own.run(store.stop(run_id, status="cancelled", reason="x", abort=True))
    keeper.renew_once()
    assert [one[-1] for one in told] == ["abort", "lost", "abort"]


def test_removed_is_renewed_no_more(own: database.Database, conn: Conn) -> None:
    run_id = sealed(own, "1", "2")
    verdicts: list[str] = []
    keeper = keeping(own.run)
    one, two = (held(begun(own, run_id, conn), run_id, verdicts) for _ in range(2))
    keeper.add(one)
    keeper.add(two)
    keeper.remove(one)
    keeper.remove(one)  # once more does no harm
    aged(conn)
    keeper.renew_once()
    assert seen(conn) == [False, True]


def test_past_its_limit_is_renewed_no_more(own: database.Database, conn: Conn) -> None:
    """Whatever its thread still does: the item may be taken over."""
    run_id = sealed(own, "1", "2", "3")
    verdicts: list[str] = []
    keeper = keeping(own.run)
    for renew_until in (time.monotonic() - 1, time.monotonic() + 60, None):
        keeper.add(held(begun(own, run_id, conn), run_id, verdicts, renew_until=renew_until))
    aged(conn)
    keeper.renew_once()
    assert seen(conn) == [False, True, True]


def test_managers_and_callbacks_renew_on_their_own(own: database.Database, conn: Conn) -> None:
    run_id = own.run(
        store.start(
            {
                "name": "lister",
                "manager_task": "lister",
                "child_task": "child",
                "child_queue": "papers",
                "manager_queue": "papers",
                "max_in_flight": 1,
            }
        )
    ).run_id
    assert own.run(store.manager_begin(run_id, 1)) is not None
    verdicts: list[str] = []
    keeper = keeping(own.run)
    hold = Hold(renew_call=store.renew_manager(run_id, 1), on_verdict=verdicts.append)
    keeper.add(hold)
    aged(conn, "fanout_runs", "manager_seen_at")
    keeper.renew_once()
    (row,) = conn.execute(
        "SELECT manager_seen_at > clock_timestamp() - interval '1 min' AS fresh FROM fanout_runs"
    ).fetchall()
    assert row["fresh"] and verdicts == []
    assert own.run(store.manager_begin(run_id, 2)) is not None  # a newer execution
    keeper.renew_once()
    assert verdicts == ["lost"]
    keeper.remove(hold)
    keeper.renew_once()
    assert verdicts == ["lost"]


def test_what_ends_while_it_is_asked_about_is_not_told() -> None:
    verdicts: list[str] = []
    hold = Hold(renew_call=store.renew_manager(1, 1), on_verdict=verdicts.append)

    def ended(call: store.Call[Any]) -> bool:
        keeper.remove(hold)
        return False

    keeper = keeping(ended)
    keeper.add(hold)
    keeper.renew_once()
    assert verdicts == []


# -- the loop


def test_loop_renews_and_looks_in_time(own: database.Database, conn: Conn) -> None:
    run_id = sealed(own, "1")
    sweep = Idle()
    keeper = keeping(own.run, sweep, renew=0.02, look=0.1)
    keeper.add(held(begun(own, run_id, conn), run_id, []))
    keeper.start()
    for _ in range(3):
        aged(conn)
        wait_until(lambda: seen(conn) == [True])
    wait_until(lambda: len(sweep.steps) >= 4)
    keeper.stop()
    assert [name for name, _ in sweep.steps[:4]] == ["sweep", "look"] * 2
    times = [at for _, at in sweep.steps]
    pauses = [after - before for before, after in itertools.pairwise(times)]
    assert min(pauses) >= 0.045


def test_long_sweep_keeps_no_renewal_waiting() -> None:
    """With many broken runs, or some whose locks are held, what this process has stays its own."""
    steps: list[str] = []

    def run(call: store.Call[Any]) -> Any:
        steps.append(call.name)
        if call.name == "renew_manager":
            return True
        if call.name == "silent":
            return dict.fromkeys(range(50), "silent slot")
        time.sleep(0.02)
        return {}

    keeper = keeping(run, lambda run: Sweeper(run=run, lease=30.0), renew=0.1, look=0.02)
    keeper.add(Hold(renew_call=store.renew_manager(1, 1), on_verdict=lambda verdict: None))
    keeper.sweep_once(whole=False)
    assert steps == ["silent", *["sweep_run"] * 50], "nothing is due before the thread has begun"
    steps.clear()
    keeper.start()
    # One sweep takes a second.
    wait_until(lambda: steps.count("silent") >= 2)
    keeper.stop()
    first = steps[steps.index("sweep_run") : len(steps) - steps[::-1].index("silent") - 1]
    assert first.count("renew_manager") >= 5


def test_marked_slot_is_looked_at_again_soon() -> None:
    """A rescue needs two looks, a quarter of a lease apart: the second comes as soon as it may."""
    marking = keeping(lambda call: None, Idle({"marked": 1}), look=10)
    assert marking.sweep_once() == marking.sweep_once(whole=False) == 7.5
    idle = keeping(lambda call: None, Idle(), look=10)
    assert idle.sweep_once() == idle.sweep_once(whole=False) == 5
    assert Sweeper(run=lambda call: None, lease=30.0).second_look == 7.5


@pytest.mark.parametrize(
    ("error", "words", "level"),
    [
        (
            DatabaseError("away", transient=True),
            {"Renewal failed: away", "Sweep failed: away"},
            logging.WARNING,
        ),
        (
            SchemaError("no tables"),
            {f"{step} failed: {SchemaError('no tables')}" for step in ("Renewal", "Sweep")},
            logging.WARNING,
        ),
        (ZeroDivisionError(), {"Unexpected error"}, logging.ERROR),
    ],
)
def test_loop_goes_on_after_errors(
    error: Exception,
    words: set[str],
    level: int,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(keeper_module, "_NO_SCHEMA_SECONDS", 0.01)
    answers: list[str] = []

    def run(call: store.Call[Any]) -> Any:
        answers.append(call.name)
        if len(answers) <= 3:
            raise error
        return [(holding, "stop")]

    class Failing(Idle):
        def sweep_once(self) -> SweepReport:
            super().sweep_once()
            raise error

        def look_once(self) -> SweepReport:
            return self.sweep_once()

    sweep = Failing()
    keeper = keeping(run, sweep, renew=0.01, look=0.01)
    holding = models.Holding(1, 0, 1)
    verdicts: list[str] = []
    keeper.add(Hold(holding=holding, on_verdict=verdicts.append))
    keeper.start()
    wait_until(lambda: len(verdicts) >= 2 and len(sweep.steps) >= 3)
    keeper.stop()
    actions = {vars(record)["action"] for record in caplog.records}
    assert actions == {"renewal_failed", "sweep_failed"}
    assert {record.message for record in caplog.records} == words
    assert {record.levelno for record in caplog.records} == {level}


def test_without_tables_it_is_looked_for_them_once_a_minute() -> None:
    class Early(Idle):
        def sweep_once(self) -> SweepReport:
            raise SchemaError("no tables")

    assert keeping(lambda call: None, Early(), look=10).sweep_once() == 60
    assert keeping(lambda call: None, Early(), look=600).sweep_once() == 300


def test_after_an_outage_the_next_renewal_is_not_far() -> None:
    times: list[float] = []

    def run(call: store.Call[Any]) -> Any:
        times.append(time.monotonic())
        if len(times) == 1:
            raise DatabaseError("away", transient=True)
        return []

    keeper = keeping(run, renew=1.2, look=600)
    keeper.add(Hold(holding=models.Holding(1, 0, 1), on_verdict=lambda verdict: None))
    keeper.start()
    wait_until(lambda: len(times) == 2)
    keeper.stop()
    assert times[1] - times[0] < 1.15


def test_verdict_that_cannot_be_told_disturbs_nobody(caplog: pytest.LogCaptureFixture) -> None:
    holdings = [models.Holding(1, slot, 1) for slot in range(2)]
    told: list[str] = []

    def broken(verdict: str) -> None:
        told.append(verdict)
        raise ZeroDivisionError

    keeper = keeping(lambda call: [(holding, "lost") for holding in holdings], renew=0.01)
    for holding in holdings:
        keeper.add(Hold(holding=holding, on_verdict=broken))
    keeper.start()
    wait_until(lambda: len(told) >= 4)
    keeper.stop()
    assert "Unexpected error" in caplog.text


def test_what_nobody_can_end_is_renewed_no_more() -> None:
    """Its loop was closed under it: another worker may have the items."""
    asked: list[bool] = []

    def abandoned() -> bool:
        asked.append(True)
        return len(asked) > 2

    sweep: Any = Idle()
    keeper = Keeper(
        lambda call: [],
        lambda run: sweep,
        renew_interval=60,
        sweep_interval=0.02,
        abandoned=abandoned,
    )
    keeper.start()
    keeper._thread.join(5)
    assert not keeper._thread.is_alive() and len(asked) == 3 and len(sweep.steps) == 2


def test_stop_is_prompt_and_may_come_at_any_time() -> None:
    keeper = keeping(lambda call: None)
    keeper.stop()  # it never started
    keeper = keeping(lambda call: None)
    keeper.start()
    started = time.monotonic()
    keeper.stop()
    keeper.stop()
    assert time.monotonic() - started < 1
    assert "fanout-keeper" not in {thread.name for thread in threading.enumerate()}


def test_sweep_of_a_keeper_is_the_real_one(own: database.Database, conn: Conn) -> None:
    run_id = sealed(own, "1")
    conn.execute("DELETE FROM procrastinate_jobs")
    conn.execute("UPDATE fanout_slots SET seen_at = seen_at - interval '1 min'")
    keeper = keeping(own.run, Sweeper(run=own.run, lease=30.0), look=0.05)
    keeper.start()
    wait_until(lambda: conn.execute("SELECT FROM procrastinate_jobs").fetchall())
    keeper.stop()
    assert own.run(store.run(run_id)) is not None
