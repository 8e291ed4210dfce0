"""The protocol, case by case. Invariants are design.md's, letters and numbers are cases.md's."""

import datetime
import json
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from tests import invariants, protocol
from tests.conftest import Connection
from tests.protocol import Clocked, Entry, Protocol, Reply, Row, callback

CALLBACKS = [
    callback("on_complete"),
    callback("on_success", "success"),
    callback("on_failure", "failure"),
]


@pytest.fixture
def p(conn: Connection) -> Clocked:
    conn.execute(protocol.REFUSAL)
    return Clocked(conn)


def take(p: Protocol, worker: int | None = None, *, suspect: bool = True) -> Reply:
    """Fetch the next child job and begin it."""
    while (job := p.fetch(worker)) and job["task_name"] != "child":
        work_on_other(p, job)
    assert job is not None, "no child job is due"
    return p.begin(job["args"]["run_id"], job["args"]["slot"], job["id"], suspect=suspect)


def work_on_other(p: Protocol, job: Row) -> None:
    """Execute a job that is no child's: a callback, or somebody else's."""
    if "generation" in job["args"]:
        call = job["args"]["run_id"], job["args"]["generation"], job["task_name"], job["id"]
        assert p.callback_begin(*call)
        assert p.callback_end(*call)
    p.finish(job["id"])


def report(
    p: Protocol, run: int, reply: Reply, outcome: str, *, suspect: bool = True, **columns: Any
) -> Reply:
    (answer,) = p.report(run, reply.ledger, reply.entry(outcome, **columns), suspect=suspect)
    return answer


def work_off(p: Protocol, run: int, outcome: str = "succeeded") -> int:
    """Work until nothing is due; return how many items were worked on."""
    done = 0
    while job := p.fetch():
        if job["task_name"] != "child":
            work_on_other(p, job)
            continue
        reply = p.begin(run, job["args"]["slot"], job["id"])
        while reply.verdict in ("item", "move"):
            done += reply.verdict == "item"
            reply = report(p, run, reply, outcome)
        p.finish(job["id"])
    return done


def kill(p: Clocked, *, looks: int = 2) -> list[dict[int, Any]]:
    """Let everything that is at work go silent, and sweep."""
    p.advance(31)
    done = []
    for _ in range(looks):
        done.append(p.sweep())
        p.advance(11)
    return done


def called(p: Protocol, run: int) -> dict[tuple[int, str], int]:
    """Return how many jobs each callback of each generation was given."""
    rows = p.rows(
        "SELECT (args->>'generation')::integer AS generation, task_name, count(*)"
        " FROM procrastinate_jobs WHERE (args->>'run_id')::bigint = %s AND args ? 'generation'"
        " GROUP BY 1, 2",
        run,
    )
    return {(row["generation"], row["task_name"]): row["count"] for row in rows}


# -- starting, staging


@pytest.mark.parametrize("manager", [False, True])
def test_no_items_close_at_once(p: Clocked, manager: bool) -> None:
    """Invariant 4; B01."""
    if manager:
        run = p.start(protocol.spec(manager_task="manager", callbacks=CALLBACKS))["run_id"]
        job = p.fetch()
        assert job is not None and job["queueing_lock"] == f"fanout_manager:{run}"
        claim = p.manager_begin(run, job["id"])
        assert claim is not None
        assert p.seal(run, claim["fence"]) == "completed"
    else:
        run = p.stage(0, callbacks=CALLBACKS)
    progress = p.progress(run)
    assert (progress["status"], progress["total"], p.counts(run)) == ("completed", 0, {})
    assert called(p, run) == {(1, "on_complete"): 1, (1, "on_success"): 1}
    assert not p.jobs("child")
    invariants.check(p.conn)


@pytest.mark.parametrize(
    ("outcome", "called_back"), [("succeeded", "on_success"), ("failed", "on_failure")]
)
def test_one_item(p: Clocked, outcome: str, called_back: str) -> None:
    """Invariant 4; B01."""
    run = p.stage(1, callbacks=CALLBACKS)
    assert report(p, run, take(p), outcome).verdict == "ended"
    assert p.progress(run)["status"] == "completed"
    assert p.counts(run) == {outcome: 1}
    assert called(p, run) == {(1, "on_complete"): 1, (1, called_back): 1}
    invariants.check(p.conn)


def test_items_without_a_manager(p: Clocked) -> None:
    """Nobody but the caller stages them: when he dies, the run fails instead of waiting for ever.

    Invariant 5; A12."""
    run = p.start(protocol.spec())["run_id"]
    p.append(run, 1, [None] * 3)
    kill(p)
    assert p.run(run)["status"] == "failed"
    assert "died" in p.run(run)["reason"]
    assert p.append(run, 1, [None]) is None
    assert p.seal(run, 1) is None
    assert p.tidy(run) == 3
    assert not p.sweep_plan()
    invariants.check(p.conn)


def test_duplicates_are_removed_before_numbering(p: Clocked) -> None:
    """B04: within a chunk and over chunks; positions stay dense."""
    run = p.start(protocol.spec())["run_id"]
    assert p.append(run, 1, ["a", "b", "a", None, None]) == {"staged": 4, "duplicates": 1}
    assert p.append(run, 1, ["c", "b", "c"]) == {"staged": 5, "duplicates": 3}
    p.seal(run, 1)
    keys = [p.item(run, position)["item_key"] for position in range(5)]
    assert keys == ["a", "b", None, None, "c"]
    invariants.check(p.conn)


def test_runs_do_not_share_items(p: Clocked) -> None:
    """B05: the same keys in two runs at once, and again after they ended."""
    keys = ["a", "b", "c"]
    runs = [p.stage(keys), p.stage(keys)]
    for run in runs:
        p.stop(run)
    runs.append(p.stage(keys))
    assert work_off(p, runs[2]) == 3
    assert [p.counts(run) for run in runs] == [{"cancelled": 3}] * 2 + [{"succeeded": 3}]
    invariants.check(p.conn)


def test_a_later_manager_shuts_out_an_earlier_one(p: Clocked) -> None:
    """B03: late chunks and a late seal are refused; each item is staged once."""
    run = p.start(protocol.spec(manager_task="manager"))["run_id"]
    job = p.fetch()
    assert job is not None
    first = p.manager_begin(run, job["id"])
    assert first is not None and (first["fence"], first["attempt"]) == (1, 1)
    p.append(run, 1, ["a", "b"])
    second = p.manager_begin(run, job["id"])
    assert second is not None and second["fence"] == 2
    assert p.append(run, 1, ["c"]) is None
    assert p.seal(run, 1) is None
    assert p.manager_fail(run, 1, None) is None
    assert p.append(run, 2, ["a", "b", "c"]) == {"staged": 3, "duplicates": 0}
    assert [p.seal(run, 2), p.seal(run, 2)] == ["processing", "processing"]
    assert p.append(run, 2, ["d"]) is None
    assert p.manager_begin(run, job["id"]) is None
    assert p.progress(run)["total"] == 3
    assert len(p.slots(run)) == 3
    invariants.check(p.conn)


def test_a_dead_manager_runs_again_up_to_a_limit(p: Clocked) -> None:
    """Invariant 5; A12, B03. Each death is seen by two looks; the third is the last."""
    run = p.start(protocol.spec(manager_task="manager", callbacks=CALLBACKS))["run_id"]
    for attempt in range(3):
        job = p.fetch(p.worker())
        assert job is not None, attempt
        claim = p.manager_begin(run, job["id"])
        assert claim is not None
        p.append(run, claim["fence"], ["a"])
        p.advance(20)
        assert p.value("SELECT fanout_renew_manager_v1(%s, %s)", run, claim["fence"])
        assert not p.sweep_plan()
        marked, done = kill(p)
        assert marked == {run: {"marked": 1}}
        assert done == {run: {"closed": 1} if attempt == 2 else {"managers": 1}}
        assert not p.value("SELECT fanout_renew_manager_v1(%s, %s)", run, claim["fence"])
        assert p.jobs("manager", "failed")[-1]["id"] == job["id"]
        invariants.check(p.conn)
    assert p.run(run)["status"] == "failed"
    assert "lost 3 times" in p.run(run)["reason"]
    assert called(p, run) == {(1, "on_complete"): 1, (1, "on_failure"): 1}


def test_a_manager_that_raises_runs_again(p: Clocked) -> None:
    """B03: what it staged is dropped; out of attempts, or by a permanent error, the run fails."""
    run = p.start(protocol.spec(manager_task="manager", manager_max_attempts=2))["run_id"]
    for again in (True, True, False):
        job = p.fetch()
        assert job is not None
        claim = p.manager_begin(run, job["id"])
        assert claim is not None
        p.append(run, claim["fence"], ["a"])
        # The first time it was interrupted, at no charge.
        charge = claim["fence"] > 1
        assert p.manager_fail(run, claim["fence"], 5.0, charge=charge) is again
        p.finish(job["id"], "failed")
        assert p.fetch() is None
        p.advance(6)
    assert p.run(run)["status"] == "failed"
    assert p.run(run)["reason"] == "it raised"
    invariants.check(p.conn)


def test_what_a_manager_once_failed_with_is_over_with_its_seal(p: Clocked) -> None:
    run = p.start(protocol.spec(manager_task="manager"))["run_id"]
    fences = []
    for reason in (None, "it raised"):
        job = p.fetch()
        assert job is not None
        assert p.run(run)["reason"] == reason
        claim = p.manager_begin(run, job["id"])
        assert claim is not None
        fences.append(claim["fence"])
        if reason is None:
            assert p.manager_fail(run, fences[0], 5.0) is True
            p.finish(job["id"], "failed")
            p.advance(6)
    p.append(run, fences[1], ["a"])
    assert p.seal(run, fences[1]) == "processing"
    assert p.run(run)["reason"] is None
    p.stop(run, reason="by hand")
    assert p.run(run)["reason"] == "by hand"


def test_a_cancelled_run_whose_failures_are_retried_is_no_success(p: Clocked) -> None:
    """What was cancelled stays so: the new generation completes, but not all of it was done."""
    fired = [protocol.callback(f"on_{on}", on) for on in ("complete", "success", "failure")]
    run = p.stage(3, max_in_flight=1, callbacks=fired)
    second = report(p, run, take(p), "failed")
    p.stop(run)
    report(p, run, second, "succeeded")
    assert p.counts(run) == {"succeeded": 1, "failed": 1, "cancelled": 1}
    assert p.retry_failed(run, ["failed"]) == 1
    work_off(p, run)
    assert p.counts(run) == {"succeeded": 2, "cancelled": 1}
    assert p.run(run)["status"] == "completed"
    assert called(p, run) == {
        (generation, name): 1 for generation in (1, 2) for name in ("on_complete", "on_failure")
    }
    invariants.check(p.conn)


def test_a_lost_manager_job_is_dealt_again(p: Clocked) -> None:
    """Invariant 5; A11."""
    run = p.start(protocol.spec(manager_task="manager"))["run_id"]
    p.delete_job(p.run(run)["manager_job_id"])
    assert p.sweep() == {run: {"managers": 1}}
    job = p.fetch()
    assert job is not None and job["id"] == p.run(run)["manager_job_id"]
    # Fetched, and its worker dies before the begin.
    p.advance(31)
    assert p.sweep() == {run: {"managers": 1}}
    invariants.check(p.conn)


def test_a_run_key_is_kept_moved_or_in_conflict(p: Clocked) -> None:
    key = {"run_key": "march", "args_digest": "one"}
    first = p.start(protocol.spec(**key))
    assert first["outcome"] == "created"
    again = p.start(protocol.spec(**key, if_closed="replace"))
    assert again == {"run_id": first["run_id"], "outcome": "existing", "run_status": "pending"}
    other = p.start(protocol.spec(run_key="march", args_digest="two"))
    assert (other["run_id"], other["outcome"]) == (first["run_id"], "conflict")
    assert p.start(protocol.spec(name="another", **key))["outcome"] == "created"
    p.append(first["run_id"], 1, [None])
    p.seal(first["run_id"], 1)
    p.stop(first["run_id"])
    closed = p.start(protocol.spec(**key))
    assert closed == {
        "run_id": first["run_id"],
        "outcome": "existing",
        "run_status": "cancelled",
    }
    moved = p.start(protocol.spec(run_key="march", args_digest="two", if_closed="replace"))
    assert moved["outcome"] == "created" and moved["run_id"] != first["run_id"]
    assert p.retry_failed(first["run_id"]) == -1, "the replaced run is not reopened"
    assert p.counts(first["run_id"]) == {"cancelled": 1}
    undigested = p.start(protocol.spec(run_key="april"))
    assert p.start(protocol.spec(run_key="april"))["run_id"] == undigested["run_id"]
    invariants.check(p.conn)


def test_a_start_joins_the_callers_transaction(p: Clocked) -> None:
    """B08: rolled back, nothing of it is left."""
    with pytest.raises(ZeroDivisionError), p.conn.transaction():
        p.start(protocol.spec(manager_task="manager"))
        assert p.jobs("manager")
        raise ZeroDivisionError
    assert not p.rows("SELECT FROM fanout_runs") and not p.jobs("manager")


def test_children_that_finish_while_the_manager_lists(p: Clocked) -> None:
    """A05: nothing is dispatched before the seal, so nothing can close before it."""
    run = p.start(protocol.spec(manager_task="manager"))["run_id"]
    job = p.fetch()
    assert job is not None
    p.manager_begin(run, job["id"])
    p.append(run, 1, [None] * 5)
    assert p.fetch() is None and p.progress(run)["total"] is None
    p.append(run, 1, [None] * 5)
    assert p.seal(run, 1) == "processing"
    assert p.progress(run)["total"] == 10
    assert work_off(p, run) == 10
    assert p.progress(run)["status"] == "completed"
    invariants.check(p.conn)


# -- lost replies, duplicates, zombies


def test_a_report_sent_again_after_its_commit_counts_once(p: Clocked) -> None:
    """Invariant 2: the slot goes on with the item it was given in the lost reply."""
    run = p.stage(3)
    entry = take(p).entry("succeeded")
    (lost,) = p.report(run, 0, entry)
    (again,) = p.report(run, 0, entry)
    assert again == lost and again.position == 1
    assert p.counts(run) == {"succeeded": 1, "processing": 1, "pending": 1}
    invariants.check(p.conn)


def test_a_report_sent_again_after_its_slot_ended_is_accepted(p: Clocked) -> None:
    """Invariant 2: its item is final under this claim, or was released under it."""
    run = p.stage(4)
    for outcome in ("succeeded", "failed", "released", "returned"):
        entry = take(p).entry(outcome, wish="end", retry_in=60.0)
        counts = None
        for _ in range(2):
            (reply,) = p.report(run, 0, entry)
            assert reply.verdict == "ended"
            assert counts in (None, p.counts(run))
            counts = p.counts(run)
    assert counts == {"succeeded": 1, "failed": 1, "pending": 2}
    invariants.check(p.conn)


def test_the_last_report_sent_again_is_accepted(p: Clocked) -> None:
    """Invariants 2, 4: the run was closed by the sending whose reply was lost."""
    run = p.stage(1, callbacks=CALLBACKS)
    entry = take(p).entry("succeeded")
    assert [p.report(run, 0, entry)[0].verdict for _ in range(3)] == ["ended"] * 3
    assert p.value("SELECT fanout_close_v1(%s, 'failed', NULL)", run) is False
    assert called(p, run) == {(1, "on_complete"): 1, (1, "on_success"): 1}
    assert p.progress(run)["status"] == "completed"
    invariants.check(p.conn)


def test_a_begin_sent_again_gets_the_same_item(p: Clocked) -> None:
    """Invariant 2: and charges nothing. The same job started twice is refused."""
    run = p.stage(2, max_in_flight=1)
    job = p.fetch()
    assert job is not None
    token = uuid.uuid4()
    first = p.begin(run, 0, job["id"], token)
    assert (first.verdict, first.position, first.claim) == ("item", 0, 1)
    assert p.begin(run, 0, job["id"], token, ledger=7) == first
    twice = p.begin(run, 0, job["id"], uuid.uuid4())
    assert (twice.verdict, twice.epoch) == ("ended", None)
    assert report(p, run, first, "succeeded").position == 1
    assert p.counts(run) == {"succeeded": 1, "processing": 1}
    invariants.check(p.conn)


def test_a_statement_sent_again_shows_that_its_sender_lives(p: Clocked) -> None:
    """Invariant 5: after a long outage nobody is rescued whose reply has just been given again."""
    run = p.stage(2, max_in_flight=1)
    entry = take(p).entry("succeeded")
    p.report(run, 0, entry)
    p.advance(31)
    assert p.sweep() == {run: {"marked": 1}}
    p.advance(11)
    assert p.report(run, 0, entry)[0].verdict == "item"
    assert not p.sweep_plan()
    invariants.check(p.conn)


def test_a_begin_sent_again_without_an_item_keeps_its_slot(p: Clocked) -> None:
    """Invariant 5: also when the process names a ledger that this run has not."""
    run = p.stage(1, max_in_flight=1)
    report(p, run, take(p), "released", wish="end", retry_in=8.0)
    p.advance(8.1)
    job = p.fetch()
    assert job is not None
    p.execute("UPDATE fanout_items SET due = due + interval '5 s'")
    token = uuid.uuid4()
    first = p.begin(run, 0, job["id"], token)
    assert first.verdict == "wait"
    again = p.begin(run, 0, job["id"], token, ledger=11)
    assert (again.verdict, again.epoch) == ("wait", first.epoch)
    p.advance(6)
    assert report(p, run, again, "succeeded").verdict == "item"
    invariants.check(p.conn)


def test_a_job_delivered_again_when_its_item_is_done(p: Clocked) -> None:
    """A01: a quiet no-op; A15: so is a retry of the queue job by hand after the close."""
    run = p.stage(2, max_in_flight=1)
    job = p.fetch()
    assert job is not None
    reply = report(p, run, p.begin(run, 0, job["id"]), "failed")
    assert report(p, run, reply, "succeeded").verdict == "ended"
    before = p.progress(run)
    p.finish(job["id"], "failed")
    p.retry_job(job["id"])
    again = p.fetch()
    assert again is not None and again["id"] == job["id"]
    assert p.begin(run, 0, job["id"]).verdict == "ended"
    assert p.progress(run) == before
    invariants.check(p.conn)


def test_a_zombie_is_told_that_it_lost(p: Clocked) -> None:
    """Invariant 2; C05: the item was taken over; the late outcome changes nothing."""
    run = p.stage(1)
    zombie = take(p)
    kill(p)
    holder = take(p)
    assert (holder.position, holder.claim, holder.crashes) == (0, 3, 1)
    for outcome in ("succeeded", "failed", "released", "returned"):
        before = p.item(run, 0)
        late = report(p, run, zombie, outcome)
        assert late.verdict == "lost" or outcome == "returned"
        assert p.item(run, 0) == before
    assert p.renew([(run, zombie.slot, zombie.epoch or 0)]) == {
        (run, zombie.slot, zombie.epoch): "lost"
    }
    assert report(p, run, holder, "succeeded").verdict == "ended"
    assert report(p, run, zombie, "failed").verdict == "lost"
    assert p.counts(run) == {"succeeded": 1}
    invariants.check(p.conn)


def test_a_zombie_and_the_new_holder_of_its_slot_in_one_report(p: Clocked) -> None:
    """Invariant 2: both name the same slot; its epoch tells them apart."""
    run = p.stage(2, max_in_flight=1)
    zombie = take(p)
    kill(p)
    holder = take(p)
    assert holder.slot == zombie.slot
    old, new = p.report(run, 0, zombie.entry("failed"), holder.entry("succeeded"))
    assert (old.verdict, new.verdict) == ("lost", "item")
    assert p.counts(run) == {"succeeded": 1, "processing": 1}
    (pull,) = p.report(run, 0, Entry(slot=zombie.slot, epoch=zombie.epoch or 0))
    assert pull.verdict == "ended", "the holder's item is not given to the zombie"
    invariants.check(p.conn)


def test_a_report_on_an_item_that_somebody_changed_by_hand(p: Clocked) -> None:
    """Invariant 2: the outcome is dropped, the counters stay, a resend finds no false comfort."""
    run = p.stage(2)
    reply = take(p)
    p.execute("UPDATE fanout_items SET claim = claim + 1 WHERE position = 0")
    assert report(p, run, reply, "succeeded").verdict == "lost"
    assert p.counts(run).get("succeeded") is None
    assert report(p, run, reply, "succeeded").verdict == "lost"
    assert p.sweep()[run]["recounted"] == 1
    invariants.check(p.conn)
    kill(p)
    assert work_off(p, run) == 2
    assert p.counts(run) == {"succeeded": 2}
    invariants.check(p.conn)


def test_a_report_against_a_removed_run(p: Clocked) -> None:
    run = p.stage(1)
    reply = take(p)
    p.stop(run)
    for table in ("fanout_slots", "fanout_items", "fanout_ledgers", "fanout_runs"):
        column = "id" if table == "fanout_runs" else "run_id"
        p.execute(f"DELETE FROM {table} WHERE {column} = %s", run)
    assert report(p, run, reply, "succeeded").verdict == "lost"
    assert report(p, run, reply, "none", wish="next").verdict == "lost"
    (pull,) = p.report(run, 0, Entry(slot=reply.slot, epoch=reply.epoch or 0))
    assert pull.verdict == "ended"
    assert p.begin(run, 0, 1).verdict == "ended"
    assert (p.stop(run), p.pause(run), p.update(run), p.retry_failed(run)) == (None,) * 4


def test_outcomes_of_several_slots_travel_together(p: Clocked) -> None:
    """Invariants 1, 2: each is judged on its own, also beside one that is refused."""
    run = p.stage(9, max_in_flight=4)
    replies = [take(p) for _ in range(4)]
    entries = [
        replies[0].entry("succeeded"),
        replies[1].entry("failed"),
        replies[2].entry("released", retry_in=60.0),
        Entry(slot=replies[3].slot, epoch=12345, position=3, claim=1, outcome="succeeded"),
    ]
    answers = p.report(run, 0, *entries)
    assert [answer.verdict for answer in answers] == ["item", "item", "item", "lost"]
    assert sorted(answer.position or -1 for answer in answers) == [-1, 4, 5, 6]
    assert p.counts(run) == {"succeeded": 1, "failed": 1, "pending": 3, "processing": 4}
    invariants.check(p.conn)


# -- releases


def test_a_release_is_served_in_time_beside_a_later_one(p: Clocked) -> None:
    """Invariant 3: due in 10 s, though the only slot waits for one due in an hour."""
    run = p.stage(2, max_in_flight=2)
    late, soon = take(p), take(p)
    report(p, run, late, "released", wish="end", retry_in=3600.0)
    (slot,) = [slot for slot in p.slots(run) if not slot["active"]]
    assert slot["scheduled_at"] == p.now + datetime.timedelta(seconds=3600)
    report(p, run, soon, "released", wish="end", retry_in=10.0)
    assert sorted(slot["scheduled_at"] - p.now for slot in p.slots(run)) == [
        datetime.timedelta(seconds=10),
        datetime.timedelta(seconds=3600),
    ]
    invariants.check(p.conn)
    p.advance(10)
    assert take(p).position == 1


def test_a_slot_is_dealt_again_where_an_item_is_due_earlier(p: Clocked) -> None:
    """Invariant 3: with one place, the queued slot is brought forward; its old job is cancelled."""
    run = p.stage(2, max_in_flight=1)
    first = take(p)
    second = report(p, run, first, "released", retry_in=3600.0)
    assert second.position == 1
    assert report(p, run, second, "released", retry_in=60.0).verdict == "ended"
    (slot,) = p.slots(run)
    assert slot["scheduled_at"] == p.now + datetime.timedelta(seconds=60)
    p.advance(60)
    third = take(p)
    assert (third.position, third.failures) == (1, 1)
    assert report(p, run, third, "succeeded").verdict == "ended"
    (slot,) = p.slots(run)
    assert slot["scheduled_at"] == p.now + datetime.timedelta(seconds=3540)
    p.update(run, max_in_flight=2)
    invariants.check(p.conn)
    assert p.retry_failed(run, ["succeeded"]) == 0
    # Due now, by a crash: the slot that waits for an hour is brought forward.
    p.execute("UPDATE fanout_items SET due = %s WHERE due IS NOT NULL", p.now)
    p.update(run, max_in_flight=1)
    (slot,) = p.slots(run)
    assert slot["scheduled_at"] is None
    assert len(p.jobs("child", "cancelled")) == 1
    assert take(p).position == 0


def test_a_crashed_item_is_served_now_beside_a_later_one(p: Clocked) -> None:
    """Invariant 3; R9: one place, one item due in an hour, the other one's worker dies."""
    run = p.stage(2, max_in_flight=1)
    dying = report(p, run, take(p), "released", retry_in=3600.0)
    assert dying.position == 1
    _, done = kill(p)
    assert done == {run: {"rescued_released": 1, "dealt": 1}}
    (slot,) = p.slots(run)
    assert slot["scheduled_at"] is None
    assert (take(p).position, p.item(run, 1)["crashes"]) == (1, 1)
    invariants.check(p.conn)


def test_a_slot_with_nothing_to_do_waits_for_an_item_due_soon(p: Clocked) -> None:
    """Invariant 3: no job is dealt for that item; a slot that leaves has one dealt."""
    run = p.stage(1)
    idle = report(p, run, take(p), "released", retry_in=5.0)
    assert idle.verdict == "wait" and idle.wait_seconds == 1.0
    assert len(p.slots(run)) == 1
    invariants.check_quiet(p.conn)
    p.advance(4.8)
    (idle,) = p.report(run, 0, idle.entry())
    assert idle.wait_seconds == pytest.approx(0.2)
    (gone,) = p.report(run, 0, idle.entry(wish="end"))
    assert gone.verdict == "ended"
    (slot,) = p.slots(run)
    assert not slot["active"] and slot["scheduled_at"] == p.now + datetime.timedelta(seconds=0.2)
    invariants.check(p.conn)


def test_an_absurd_retry_time_cannot_hinder_an_outcome(p: Clocked) -> None:
    """The outcome is recorded, and its time is somewhere within reason. R8, D-cases: I9."""
    run = p.stage(4)
    for retry_in in (float("nan"), float("inf"), 1e300, -5.0):
        report(p, run, take(p), "released", wish="end", retry_in=retry_in)
    dues = [p.item(run, position)["due"] - p.now for position in range(4)]
    assert dues[:3] == [datetime.timedelta(seconds=1e9)] * 3
    assert dues[3] == datetime.timedelta(0)
    invariants.check(p.conn)


@pytest.mark.parametrize("hours", [-30, 7, 24, 24 * 90])
def test_an_outcome_after_a_long_silence(p: Clocked, hours: int) -> None:
    """The decayed rate neither over- nor underflows, whatever the clock does."""
    run = p.stage(3)
    reply = report(p, run, take(p), "succeeded")
    p.advance(hours * 3600)
    assert p.progress(run)["rate"] >= 0
    reply = report(p, run, reply, "succeeded")
    assert 0 < p.progress(run)["rate"] < 100
    for _ in range(60):
        p.advance(590)
        report(p, run, reply, "returned")
        reply = reply_of(p, run)
    assert p.progress(run)["rate"] == 0
    invariants.check(p.conn)


def reply_of(p: Protocol, run: int) -> Reply:
    """Go on with the slot at work, or with a new one."""
    active = [slot for slot in p.slots(run) if slot["active"]]
    if not active:
        return take(p)
    (slot,) = active
    (reply,) = p.report(run, 0, Entry(slot=slot["slot"], epoch=slot["epoch"]))
    return reply


# -- crashes


def test_a_silent_slot_is_rescued_at_the_second_look(p: Clocked) -> None:
    """Invariant 5; C05: an outage that hides every renewal costs nobody a crash."""
    run = p.stage(1)
    reply = take(p)
    holding = (run, reply.slot, reply.epoch or 0)
    p.advance(3600)
    assert p.sweep() == {run: {"marked": 1}}
    assert p.sweep() == {run: {}}
    assert p.renew([holding], fresh=5.0) == {}
    p.advance(11)
    assert p.sweep() == {}
    assert p.item(run, 0)["crashes"] == 0
    p.advance(31)
    assert p.sweep() == {run: {"marked": 1}}
    p.advance(7)
    assert p.sweep() == {run: {}}
    p.advance(1)
    assert p.sweep() == {run: {"rescued_released": 1, "dealt": 1}}
    assert p.renew([holding]) == {holding: "lost"}
    assert p.jobs("child", "failed") and not p.jobs("child", "doing")
    assert p.item(run, 0)["crashes"] == 1
    invariants.check(p.conn)


def test_an_item_that_keeps_killing_its_worker_fails(p: Clocked) -> None:
    """R9: after max_crashes, with that reason, and no neighbour with more than one crash."""
    run = p.stage(4, max_in_flight=4, max_crashes=3)
    worker = p.worker()
    for _ in range(10):
        held = []
        suspect = True
        while job := p.fetch(worker):
            reply = p.begin(run, job["args"]["slot"], job["id"], suspect=suspect)
            if reply.verdict == "item":
                held.append(reply)
                suspect = suspect and not reply.crashes
        if any(reply.position == 0 for reply in held):
            assert sum(bool(reply.crashes) for reply in held) <= 1
            kill(p)
        else:
            for reply in held:
                report(p, run, reply, "succeeded", wish="end", suspect=False)
        p.advance(1.1)
        if p.progress(run)["status"] == "completed":
            break
    assert p.counts(run) == {"succeeded": 3, "failed": 1}
    assert [p.item(run, position)["crashes"] for position in range(4)] == [3, 1, 1, 1]
    error = p.item(run, 0)["error"]
    assert error["type"] == p.item(run, 0)["error_type"] == "WorkerLost"
    assert "3 times" in error["message"]
    invariants.check(p.conn)


def test_a_process_takes_one_suspect_at_a_time(p: Clocked) -> None:
    """A suspect that nobody here may take is put off a little, so that slots do not spin."""
    run = p.stage(3, max_in_flight=3)
    for _ in range(3):
        take(p)
    kill(p)
    first = take(p, suspect=True)
    assert first.crashes == 1
    others = [i for i in range(3) if i != first.position]
    for _ in range(2):
        put_off = [p.item(run, i)["due"] - p.now for i in others]
        assert all(datetime.timedelta(seconds=0.4) < due for due in put_off)
        invariants.check(p.conn)
        p.advance(1.1)
        second = take(p, suspect=False)
        assert second.verdict == "ended", "it may take none: another process may"
    p.advance(1.1)
    together = [p.fetch() for _ in range(2)]
    assert all(together)
    other = p.begin(run, together[0]["args"]["slot"], together[0]["id"])  # type: ignore[index]
    assert other.crashes == 1
    p.advance(1.1)
    answer = report(p, run, other, "succeeded", suspect=True)
    assert answer.verdict == "item" and answer.crashes == 1
    invariants.check(p.conn)


def test_an_idle_slot_does_not_stand_in_for_a_suspect(p: Clocked) -> None:
    """Invariant 3: its process may have one in hand; another process must get a job for it."""
    run = p.stage(2, max_in_flight=3)
    living, dying = take(p), take(p)
    for seconds in (15, 1, 7):
        p.advance(seconds)
        p.renew([(run, living.slot, living.epoch or 0)])
        p.sweep()
    assert p.item(run, dying.position or 0)["crashes"] == 0
    idle = report(p, run, living, "released", retry_in=8.0)
    assert idle.verdict == "wait"
    p.advance(1)
    assert p.sweep() == {run: {"rescued_released": 1, "dealt": 1}}
    queued = [slot["scheduled_at"] for slot in p.slots(run) if not slot["active"]]
    assert queued == [None], "now, for the suspect; the idle one waits for the other"
    invariants.check(p.conn)
    p.report(run, 0, idle.entry(), suspect=False)
    invariants.check(p.conn)
    p.advance(1.1)
    assert take(p).position == dying.position
    invariants.check(p.conn)


def test_a_job_whose_worker_died_between_fetch_and_begin(p: Clocked) -> None:
    """Invariant 5: found when that worker is dead and the fetch is a lease ago; not before."""
    run = p.stage(1, max_in_flight=1)
    worker = p.worker()
    job = p.fetch(worker)
    assert job is not None
    p.advance(40)
    p.beat(worker)
    assert p.sweep() == {}, "its worker lives: it will begin"
    p.advance(31)
    assert p.sweep() == {run: {"lost_jobs": 1, "dealt": 1}}
    assert [j["id"] for j in p.jobs("child", "failed")] == [job["id"]]
    assert p.begin(run, 0, job["id"]).verdict == "ended", "the late beginner finds no slot"
    assert take(p).verdict == "item"
    invariants.check(p.conn)


@pytest.mark.parametrize("how", ["cancel", "delete"])
def test_a_queued_job_that_was_taken_away(p: Clocked, how: str) -> None:
    """Invariant 5; A11: a job of ours that is gone or final is dealt again."""
    run = p.stage(5, max_in_flight=2)
    job = p.jobs("child")[0]["id"]
    (p.cancel_job if how == "cancel" else p.delete_job)(job)
    p.advance(1.1)
    assert p.sweep() == {run: {"lost_jobs": 1, "dealt": 1}}
    invariants.check(p.conn)
    assert work_off(p, run) == 5


@pytest.mark.parametrize("how", ["delete", "retry", "finish"])
def test_an_active_slot_is_left_alone_whatever_its_job_row_says(p: Clocked, how: str) -> None:
    """A11, A15: it is renewed, so it works."""
    run = p.stage(2, max_in_flight=1)
    job = p.fetch()
    assert job is not None
    reply = p.begin(run, 0, job["id"])
    {"delete": p.delete_job, "retry": p.retry_job, "finish": p.finish}[how](job["id"])
    p.advance(14)
    p.renew([(run, 0, reply.epoch or 0)])
    p.advance(14)
    assert p.sweep() == {}
    if how == "retry":
        assert p.fetch() is not None
        assert p.begin(run, 0, job["id"]).verdict == "ended"
    assert report(p, run, reply, "succeeded").verdict == "item"
    invariants.check(p.conn)


def test_a_job_retried_by_hand_after_its_rescue_is_cancelled(p: Clocked) -> None:
    """It owns no slot, and would hold that slot's lock."""
    run = p.stage(1, max_in_flight=1)
    job = p.fetch()
    assert job is not None
    p.begin(run, 0, job["id"])
    p.retry_job(job["id"])
    _, done = kill(p)
    assert done == {run: {"rescued_released": 1, "stray_jobs": 1, "dealt": 1}}
    assert [j["id"] for j in p.jobs("child", "cancelled")] == [job["id"]]
    invariants.check(p.conn)


@pytest.mark.slow
def test_a_hundred_dead_items_and_ten_sweepers(
    conn: Connection, connect: Callable[..., Connection]
) -> None:
    """C04: each is rescued once; one that cannot be is reported and does not block the others."""
    p = Protocol(conn)
    run = p.stage(100, max_in_flight=100)
    while job := p.fetch():
        p.begin(run, job["args"]["slot"], job["id"])
    conn.execute(
        "CREATE FUNCTION broken() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN RAISE EXCEPTION 'cannot be recovered'; END $$"
    )
    conn.execute(
        "CREATE TRIGGER broken BEFORE UPDATE ON fanout_items FOR EACH ROW"
        " WHEN (NEW.position = 37 AND NEW.crashes > 0) EXECUTE FUNCTION broken()"
    )
    conn.execute(
        "UPDATE fanout_slots SET seen_at = seen_at - interval '1 h', suspect_since = seen_at"
        " - interval '1 h'"
    )
    connections = [connect() for _ in range(10)]
    barrier = threading.Barrier(10)

    def sweep(connection: Connection) -> Any:
        barrier.wait()
        return Protocol(connection).sweep_run(run)

    with ThreadPoolExecutor(10) as pool:
        done = list(pool.map(sweep, connections))
    assert sum(one.get("rescued_released", 0) for one in done) == 99
    assert sum(one.get("unrecoverable", 0) for one in done) >= 1
    crashes = p.rows("SELECT crashes, count(*) FROM fanout_items GROUP BY 1 ORDER BY 1")
    assert [tuple(row.values()) for row in crashes] == [(0, 1), (1, 99)]
    invariants.check(conn)
    conn.execute("DROP TRIGGER broken ON fanout_items")
    assert p.sweep()[run]["rescued_released"] == 1
    invariants.check(conn)


# -- counters, closes


@pytest.mark.parametrize("wrong", [0, -1, 1])
def test_a_missed_close_is_healed_from_the_items(p: Clocked, wrong: int) -> None:
    """Invariants 1, 4; A08: counters right, one too low, one too high. Then all is quiet."""
    run = p.stage(4, callbacks=CALLBACKS)
    p.execute("DELETE FROM fanout_slots")
    p.execute("DELETE FROM procrastinate_jobs")
    p.execute(
        "UPDATE fanout_items SET claim = 1, finished_at = clock_timestamp(),"
        " status = CASE position WHEN 3 THEN 'failed' ELSE 'succeeded' END,"
        " error_type = CASE position WHEN 3 THEN 'Broken' END"
    )
    p.execute("UPDATE fanout_ledgers SET cursor = 4, failed = 1, succeeded = 3 + %s", wrong)
    done = p.sweep()[run]
    assert done["closed"] == 1
    progress = p.progress(run)
    assert progress["status"] == "completed"
    assert p.counts(run) == {"succeeded": 3, "failed": 1}
    assert called(p, run) == {(1, "on_complete"): 1, (1, "on_failure"): 1}
    invariants.check(p.conn)
    invariants.check_quiet(p.conn)


def test_a_recount_makes_every_item_reachable(p: Clocked) -> None:
    """Invariants 1, 5: orphans at work, forgotten releases, a wrong index entry, a lost cursor."""
    protocol.small_ledgers(p.conn)
    run = p.stage(9, max_in_flight=2)
    replies = [take(p), take(p)]
    report(p, run, replies[0], "released", retry_in=60.0)
    p.execute("UPDATE fanout_items SET due = NULL WHERE due IS NOT NULL")
    p.execute("UPDATE fanout_items SET ledger = 2, due = %s, claim = 1 WHERE position = 4", p.now)
    p.execute("UPDATE fanout_items SET status = 'processing', claim = 5 WHERE position = 8")
    p.execute("UPDATE fanout_ledgers SET cursor = cursor - 1, waiting = 7 WHERE cursor > 0")
    assert p.sweep()[run]["recounted"] == 1
    invariants.check(p.conn)
    for slot in [slot for slot in p.slots(run) if slot["active"]]:
        (reply,) = p.report(
            run, (slot["held"] or 0) % 3, Entry(slot=slot["slot"], epoch=slot["epoch"])
        )
        while reply.verdict in ("item", "move"):
            reply = report(p, run, reply, "succeeded")
    p.advance(5)
    work_off(p, run)
    assert p.counts(run) == {"succeeded": 9}
    assert p.progress(run)["status"] == "completed"
    invariants.check(p.conn)


@pytest.mark.parametrize("last", ["succeeded", "failed", "cancelled"])
def test_every_final_state_of_the_last_item_closes(p: Clocked, last: str) -> None:
    """A06, A09: the last transition itself looks whether it was the last."""
    run = p.stage(3, max_in_flight=1, callbacks=CALLBACKS)
    reply = report(p, run, report(p, run, take(p), "succeeded"), "failed")
    if last == "cancelled":
        p.stop(run)
        assert p.progress(run)["status"] == "processing"
        report(p, run, reply, "released", retry_in=5.0)
        assert p.progress(run)["status"] == "cancelled"
    else:
        report(p, run, reply, last)
        assert p.progress(run)["status"] == "completed"
    assert p.progress(run)[last] >= 1
    assert called(p, run) == {(1, "on_complete"): 1, (1, "on_failure"): 1}
    invariants.check(p.conn)


@pytest.mark.parametrize("function", ["fanout_ledgers", "fanout_runs", "fanout_callbacks"])
def test_an_outcome_its_count_and_its_close_are_one_step(p: Clocked, function: str) -> None:
    """A07 (a): whatever fails in it, both or neither; sent again, all of it is there once."""
    run = p.stage(1, callbacks=CALLBACKS)
    reply = take(p)
    p.execute(
        "CREATE FUNCTION broken() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN RAISE EXCEPTION 'power cut'; END $$"
    )
    p.execute(
        f"CREATE TRIGGER broken AFTER INSERT OR UPDATE ON {function} EXECUTE FUNCTION broken()"
    )
    with pytest.raises(psycopg.errors.RaiseException, match="power cut"):
        report(p, run, reply, "succeeded")
    assert p.counts(run) == {"processing": 1}
    assert called(p, run) == {}
    invariants.check(p.conn)
    p.execute(f"DROP TRIGGER broken ON {function}")
    report(p, run, reply, "succeeded")
    assert p.progress(run)["status"] == "completed"
    assert called(p, run) == {(1, "on_complete"): 1, (1, "on_success"): 1}
    invariants.check(p.conn)


def test_a_callback_owed_or_silent_is_called_again(p: Clocked) -> None:
    """A07 (b, c): lost before it began, dead in the middle; six times at most."""
    run = p.stage(0, callbacks=[callback("on_complete")])
    p.execute("DELETE FROM procrastinate_jobs")
    assert p.sweep() == {run: {"callbacks": 1}}
    for attempt in range(1, 7):
        job = p.fetch()
        assert job is not None and job["args"] == {"run_id": run, "generation": 1}
        assert p.callback_begin(run, 1, "on_complete", job["id"]) == attempt
        assert p.callback_begin(run, 1, "on_complete", job["id"]) is None
        invariants.check(p.conn)
        marked, done = kill(p)
        assert (marked, done) == ({run: {"marked": 1}}, {run: {"callbacks": 1}})
        assert not p.callback_end(run, 1, "on_complete", job["id"]), "too late"
    assert p.fetch() is None
    assert p.progress(run)["callbacks"] == {"on_complete": "failed"}
    assert not p.sweep_plan()
    invariants.check(p.conn)


def test_a_callback_is_retried_and_done(p: Clocked) -> None:
    run = p.stage(0, callbacks=[callback("on_complete")])
    for attempt, error in ((1, '{"type": "Broken"}'), (2, None)):
        job = p.fetch()
        assert job is not None
        assert p.callback_begin(run, 1, "on_complete", job["id"]) == attempt
        assert p.callback_end(run, 1, "on_complete", job["id"], error, 5.0 if error else None)
        p.finish(job["id"])
        assert p.fetch() is None
        p.advance(5)
    assert p.progress(run)["callbacks"] == {"on_complete": "done"}
    invariants.check(p.conn)


# -- control


def test_a_stop_costs_as_much_as_it_has_ledgers(p: Clocked) -> None:
    """Invariants 1, 4: no item row is written; readers apply the rule; `tidy` writes them later."""
    protocol.small_ledgers(p.conn, 50)
    run = p.stage(200, max_in_flight=2, callbacks=CALLBACKS)
    working = take(p)
    report(p, run, take(p), "released", wish="end", retry_in=60.0)
    before = p.rows("SELECT xmin, * FROM fanout_items ORDER BY position")
    assert p.stop(run) == "processing"
    assert p.rows("SELECT xmin, * FROM fanout_items ORDER BY position") == before
    assert p.counts(run) == {"processing": 1, "cancelled": 199}
    invariants.check(p.conn)
    assert [slot["active"] for slot in p.slots(run)] == [True]
    assert p.renew([(run, working.slot, working.epoch or 0)]) == {
        (run, working.slot, working.epoch): "stop"
    }
    written = 0
    for _ in range(3):
        written += p.tidy(run, 30)
        invariants.check(p.conn)
    assert written < 90
    assert report(p, run, working, "succeeded").verdict == "ended"
    assert p.progress(run)["status"] == "cancelled"
    assert called(p, run) == {(1, "on_complete"): 1, (1, "on_failure"): 1}
    while p.value("SELECT fanout_untidy_v1(10)"):
        written += p.tidy(run, 30)
    statuses = p.rows("SELECT status, count(*) FROM fanout_items GROUP BY 1 ORDER BY 1")
    assert [tuple(row.values()) for row in statuses] == [("cancelled", 199), ("succeeded", 1)]
    assert written == 199
    invariants.check(p.conn)
    invariants.check_quiet(p.conn)


def test_a_stop_before_the_seal_closes_at_once(p: Clocked) -> None:
    run = p.start(protocol.spec(manager_task="manager", callbacks=CALLBACKS))["run_id"]
    job = p.fetch()
    assert job is not None
    p.manager_begin(run, job["id"])
    p.append(run, 1, [None] * 3)
    assert p.stop(run) == "cancelled"
    assert p.append(run, 1, [None]) is None and p.seal(run, 1) is None
    assert called(p, run) == {(1, "on_complete"): 1, (1, "on_failure"): 1}
    assert (p.tidy(run, 2), p.tidy(run, 2), p.tidy(run, 2)) == (2, 1, 0)
    invariants.check(p.conn)
    # Before its manager was fetched: its job is cancelled.
    run = p.start(protocol.spec(manager_task="manager"))["run_id"]
    assert p.stop(run) == "cancelled"
    assert len(p.jobs("manager", "cancelled")) == 1
    invariants.check(p.conn)


def test_a_stop_of_a_closed_run_changes_nothing(p: Clocked) -> None:
    run = p.stage(1)
    work_off(p, run)
    before = invariants.written(p.conn)
    assert p.stop(run) == p.pause(run) == p.resume(run) == "completed"
    assert p.update(run, max_in_flight=1) == "completed"
    assert invariants.written(p.conn) == before


def test_a_pause_hands_out_nothing(p: Clocked) -> None:
    """Invariant 3: not by begin, not by report; what is at work may end. Resumed, it goes on."""
    run = p.stage(5, max_in_flight=2)
    reply = take(p)
    fetched = p.fetch()
    assert fetched is not None
    assert p.pause(run) == p.pause(run) == "processing"
    assert p.fetch() is None
    assert p.begin(run, fetched["args"]["slot"], fetched["id"]).verdict == "ended"
    assert report(p, run, reply, "succeeded").verdict == "ended"
    assert p.counts(run) == {"succeeded": 1, "pending": 4}
    assert not p.slots(run)
    invariants.check(p.conn)
    invariants.check_quiet(p.conn)
    assert p.resume(run) == "processing"
    assert work_off(p, run) == 4
    assert p.progress(run)["status"] == "completed"
    invariants.check(p.conn)


def test_a_lowered_limit(p: Clocked) -> None:
    """Invariant 3; E03: none is killed, none starts until below it; surplus queued ones go."""
    run = p.stage(20, max_in_flight=5)
    replies = [take(p) for _ in range(4)]
    p.update(run, max_in_flight=2)
    assert len(p.slots(run)) == 4 and p.fetch() is None
    invariants.check(p.conn)
    answers = [report(p, run, reply, "succeeded") for reply in replies]
    assert [answer.verdict for answer in answers] == ["ended", "ended", "item", "item"]
    assert len(p.slots(run)) == 2
    p.update(run, max_in_flight=3)
    assert take(p).verdict == "item" and p.fetch() is None
    invariants.check(p.conn)


def test_a_begin_above_the_limit_is_refused(p: Clocked) -> None:
    """Invariant 3; E03: whatever was queued, the limit is looked at in the step that takes."""
    run = p.stage(20, max_in_flight=3)
    p.execute("UPDATE fanout_runs SET max_in_flight = 1")
    begun = [take(p).verdict for _ in range(3)]
    assert begun == ["item", "ended", "ended"]
    assert len(p.slots(run)) == 1
    invariants.check(p.conn)


def test_a_lowered_limit_and_a_crash(p: Clocked) -> None:
    """Invariant 3: a rescued slot counts among those that had to end."""
    run = p.stage(20, max_in_flight=3)
    first, *others = [take(p) for _ in range(3)]
    p.update(run, max_in_flight=2)
    p.advance(31)
    p.renew([(run, other.slot, other.epoch or 0) for other in others])
    p.sweep()
    p.advance(11)
    assert p.sweep()[run]["rescued_released"] == 1
    assert [report(p, run, other, "succeeded").verdict for other in others] == ["item", "item"]
    assert report(p, run, first, "succeeded").verdict == "lost"
    invariants.check(p.conn)


def test_a_priority_reaches_the_queued_jobs(p: Clocked) -> None:
    run = p.stage(20, max_in_flight=3)
    take(p)
    p.update(run, priority=7)
    assert [job["priority"] for job in p.jobs("child")] == [7, 7]
    invariants.check(p.conn)


def test_tolerance(p: Clocked) -> None:
    """F09: the report that goes beyond it marks the run; its process sends the stop."""
    run = p.stage(10, max_in_flight=3, tolerate_count=1, callbacks=CALLBACKS)
    first, second, third = [take(p) for _ in range(3)]
    first = report(p, run, first, "failed")
    assert (first.verdict, first.stop) == ("item", False)
    second = report(p, run, second, "failed")
    assert (second.verdict, second.stop) == ("ended", True)
    assert p.run(run)["closing"] == "failed"
    third = report(p, run, third, "failed")
    assert (third.verdict, third.stop) == ("ended", False), "one is told, and once"
    p.stop(run, "failed", None)
    assert p.counts(run) == {"failed": 3, "processing": 1, "cancelled": 6}
    assert report(p, run, first, "succeeded").verdict == "ended"
    assert p.progress(run)["status"] == "failed"
    assert "more failed items than tolerated" in p.progress(run)["reason"]
    assert called(p, run) == {(1, "on_complete"): 1, (1, "on_failure"): 1}
    invariants.check(p.conn)


def test_a_stop_that_a_dying_process_never_sent(p: Clocked) -> None:
    """Invariant 5: the sweep sends it."""
    run = p.stage(5, max_in_flight=1, tolerate_count=0)
    report(p, run, take(p), "failed", wish="end")
    assert p.progress(run)["status"] == "processing"
    assert p.sweep() == {run: {"stopped": 1}}
    assert p.progress(run)["status"] == "failed"
    assert p.counts(run) == {"failed": 1, "cancelled": 4}
    invariants.check(p.conn)


def test_the_last_failure_is_judged_by_the_close(p: Clocked) -> None:
    run = p.stage(2, tolerate_share=0.4, max_in_flight=1)
    reply = report(p, run, take(p), "succeeded")
    assert report(p, run, reply, "failed").stop
    assert p.progress(run)["status"] == "failed"
    invariants.check(p.conn)


def test_crashes_are_judged_by_the_sweep(p: Clocked) -> None:
    run = p.stage(5, max_in_flight=1, max_crashes=1, tolerate_count=0)
    take(p)
    _, done = kill(p)
    assert done == {run: {"rescued_failed": 1, "stopped": 1}}
    assert p.progress(run)["status"] == "failed"
    invariants.check(p.conn)


def test_a_tolerance_lowered_below_what_has_failed(p: Clocked) -> None:
    run = p.stage(5, max_in_flight=1)
    report(p, run, take(p), "failed", wish="end")
    assert p.update(run, tolerate_count=1) == "processing"
    assert p.update(run, tolerate_count=0) == "failed"
    assert p.counts(run) == {"failed": 1, "cancelled": 4}
    invariants.check(p.conn)


def test_a_deadline(p: Clocked) -> None:
    """It stops a run; a reopened one is not stopped by the old one again."""
    deadline = (p.now + datetime.timedelta(seconds=60)).isoformat()
    run = p.stage(3, max_in_flight=1, deadline=deadline)
    report(p, run, take(p), "succeeded", wish="end")
    assert not p.sweep_plan()
    p.advance(61)
    assert p.sweep() == {run: {"stopped": 1}}
    assert p.progress(run)["status"] == "failed"
    assert "deadline" in p.progress(run)["reason"]
    assert p.retry_failed(run) == 2
    invariants.check_quiet(p.conn)
    assert work_off(p, run) == 2
    assert p.progress(run)["status"] == "completed"
    invariants.check(p.conn)


def test_a_rate_is_of_its_generation(p: Clocked) -> None:
    """What earlier generations did makes the next one no faster."""
    run = p.stage(10, max_in_flight=1)
    reply = take(p)
    for number in range(10):
        p.advance(1)
        reply = report(p, run, reply, "failed" if number == 3 else "succeeded")
    assert p.progress(run)["rate"] == pytest.approx(1.0, rel=0.1)
    p.advance(100)
    assert p.retry_failed(run) == 1
    assert p.progress(run)["rate"] == 0
    reply = take(p)
    p.advance(2)
    report(p, run, reply, "succeeded")
    assert p.progress(run)["rate"] == pytest.approx(0.5, rel=0.1)


def test_a_retry_of_the_failed_opens_the_next_generation(p: Clocked) -> None:
    """Invariant 4; A15: only the chosen run again; callbacks once per generation."""
    run = p.stage(5, max_in_flight=1, callbacks=CALLBACKS)
    reply = take(p)
    for outcome in ("failed", "succeeded", "failed", "succeeded", "succeeded"):
        error = '{"type": "Other"}' if reply.position == 2 else None
        columns = {"error": error} if error else {}
        reply = report(p, run, reply, outcome, **columns)
    assert p.counts(run) == {"succeeded": 3, "failed": 2}
    assert p.retry_failed(run, ["failed"], "Nothing") == 0
    assert p.progress(run)["status"] == "completed"
    assert p.retry_failed(run, ["failed"], "Other") == 1
    progress = p.progress(run)
    assert (progress["status"], progress["generation"]) == ("processing", 2)
    assert p.counts(run) == {"succeeded": 3, "failed": 1, "pending": 1}
    invariants.check(p.conn)
    again = take(p)
    assert (again.position, again.failures, again.crashes) == (2, 0, 0)
    report(p, run, again, "succeeded")
    assert p.counts(run) == {"succeeded": 4, "failed": 1}
    assert p.retry_failed(run) == 1
    assert work_off(p, run) == 1
    assert p.progress(run)["generation"] == 3
    assert called(p, run) == {
        (1, "on_complete"): 1,
        (1, "on_failure"): 1,
        (2, "on_complete"): 1,
        (2, "on_failure"): 1,
        (3, "on_complete"): 1,
        (3, "on_success"): 1,
    }
    frozen = p.rows("SELECT generation, progress->>'failed' AS n FROM fanout_closes ORDER BY 1")
    assert [tuple(row.values()) for row in frozen] == [(1, "2"), (2, "1"), (3, "0")]
    invariants.check(p.conn)


def test_a_retry_of_the_cancelled_after_a_stop(p: Clocked) -> None:
    """Invariant 1: rows that a stop has left to be rewritten are rewritten first."""
    protocol.small_ledgers(p.conn)
    run = p.stage(9, max_in_flight=1)
    report(p, run, take(p), "failed", wish="end")
    p.stop(run)
    assert p.counts(run) == {"failed": 1, "cancelled": 8}
    assert p.retry_failed(run, ["failed"]) == 1
    invariants.check(p.conn)
    assert work_off(p, run) == 1
    assert p.retry_failed(run, ["cancelled"]) == 8
    invariants.check(p.conn)
    assert work_off(p, run) == 8
    assert p.counts(run) == {"succeeded": 9}
    assert p.progress(run)["generation"] == 3
    invariants.check(p.conn)


def test_a_retry_while_the_run_is_open(p: Clocked) -> None:
    run = p.stage(3, max_in_flight=1)
    reply = report(p, run, take(p), "failed")
    assert p.retry_failed(run) == 1
    assert p.progress(run)["generation"] == 1
    assert report(p, run, reply, "succeeded").position == 0, "the one due longest first"
    invariants.check(p.conn)
    p.stop(run)
    assert p.retry_failed(run) == -1, "it is being stopped"


# -- the queue


def test_a_time_slice_ends_only_for_somebody_else(p: Clocked) -> None:
    """Fairness: a job of another run or task that is due; not one due later, nor elsewhere."""
    run = p.stage(20, max_in_flight=2)
    reply = report(p, run, take(p), "succeeded", wish="slice")
    assert reply.verdict == "item", "our own queued job is nobody else's"
    p.defer("other", queue="elsewhere")
    p.value(
        "SELECT procrastinate_defer_jobs_v1(ARRAY[ROW('papers', 'other', 0, NULL, NULL, '{}',"
        " clock_timestamp() + interval '1 h')::procrastinate_job_to_defer_v1])"
    )
    reply = report(p, run, reply, "succeeded", wish="slice")
    assert reply.verdict == "item"
    other = p.stage(1)
    assert report(p, run, reply, "succeeded", wish="next").verdict == "item"
    reply = reply_of(p, run)
    assert report(p, run, reply, "succeeded", wish="slice").verdict == "ended"
    order = [job["args"]["run_id"] for job in p.jobs("child")]
    assert order == [run, other, run], "its fresh job stands at the back of the line"
    invariants.check(p.conn)


def test_a_slot_number_whose_lock_is_taken_is_skipped(p: Clocked) -> None:
    """Invariant 3: a waiting job of whoever holds it."""
    run = p.stage(5, max_in_flight=3)
    p.pause(run)
    p.defer("other", f"fanout_child:{run}:1", "elsewhere")
    p.resume(run)
    assert [slot["slot"] for slot in p.slots(run)] == [0, 2, 3]
    invariants.check(p.conn)
    assert p.sweep() == {run: {"stray_jobs": 1}}
    assert work_off(p, run) == 5


def test_a_host_that_refuses_jobs_undoes_nothing(p: Clocked) -> None:
    """Invariants 1, 4: no outcome, no stop, no close, no rescue; the next sweep repairs."""
    run = p.stage(6, max_in_flight=2, callbacks=CALLBACKS)
    first, second = take(p), take(p)
    p.execute("SELECT set_config('fanout_test.refused', 'child,on_complete,on_failure', false)")
    assert report(p, run, first, "succeeded", wish="end").verdict == "ended"
    assert report(p, run, second, "released", wish="end", retry_in=0.0).verdict == "ended"
    assert p.counts(run) == {"succeeded": 1, "pending": 5}
    assert not p.slots(run)
    invariants.check(p.conn, damaged=True)
    assert p.sweep_plan() == {run: "missing slot"}
    p.sweep()
    p.execute("SELECT set_config('fanout_test.refused', '', false)")
    assert p.sweep() == {run: {"dealt": 2}}
    invariants.check(p.conn)
    invariants.check_quiet(p.conn)
    reply = take(p)
    p.execute("SELECT set_config('fanout_test.refused', 'child,on_complete,on_failure', false)")
    _, done = kill(p)
    assert done[run]["rescued_released"] == 1
    p.stop(run)
    assert p.progress(run)["status"] == "cancelled"
    assert p.progress(run)["callbacks"] == {"on_complete": "owed", "on_failure": "owed"}
    assert report(p, run, reply, "succeeded").verdict == "lost"
    assert called(p, run) == {}
    p.execute("SELECT set_config('fanout_test.refused', '', false)")
    assert p.sweep() == {run: {"callbacks": 2}}
    assert called(p, run) == {(1, "on_complete"): 1, (1, "on_failure"): 1}
    invariants.check(p.conn)


def test_a_run_that_could_move_and_does_not_is_closed(p: Clocked) -> None:
    """Invariant 5; A12: after `stuck_after` of time that sweeps have seen."""
    run = p.stage(3, max_in_flight=1, stuck_after=600.0)
    paused = p.stage(3, stuck_after=600.0)
    later = p.stage(1, stuck_after=600.0)
    p.pause(paused)
    work = [job for job in iter(p.fetch, None)]
    for job in work:
        reply = p.begin(job["args"]["run_id"], job["args"]["slot"], job["id"])
        end = {"outcome": "released", "retry_in": 7200.0} if reply.epoch else {}
        report(p, job["args"]["run_id"], reply, wish="end", **end)
    p.execute("SELECT set_config('fanout_test.refused', 'child', false)")
    p.execute("DELETE FROM procrastinate_jobs WHERE (args->>'run_id')::bigint = %s", run)
    p.execute("UPDATE fanout_items SET due = %s WHERE run_id = %s AND due IS NOT NULL", p.now, run)
    p.advance(10_000)  # no sweep came: that time does not count
    for _ in range(9):
        p.sweep()
        assert p.progress(run)["status"] == "processing"
        p.advance(70)
    p.sweep()
    p.advance(70)
    p.sweep()
    assert p.progress(run)["status"] == "failed"
    assert "stuck" in p.progress(run)["reason"]
    assert p.counts(run) == {"cancelled": 3}
    assert p.progress(paused)["status"] == p.progress(later)["status"] == "processing"
    invariants.check(p.conn, damaged=True)


def test_events_are_hints(p: Clocked) -> None:
    """Invariant 7; G01: where none can be sent, everything ends as it would have."""
    p.execute(
        "CREATE FUNCTION fanout_clock.pg_notify(text, text) RETURNS void LANGUAGE plpgsql AS"
        " $$ BEGIN IF $1 LIKE 'fanout%%' THEN RAISE EXCEPTION 'the queue is full'; END IF;"
        " PERFORM pg_catalog.pg_notify($1, $2); END $$"
    )
    runs = [p.stage(n, callbacks=CALLBACKS) for n in (0, 3, 3)]
    p.stop(runs[2], abort=True)
    assert work_off(p, runs[1]) == 3
    statuses = [p.progress(run)["status"] for run in runs]
    assert statuses == ["completed", "completed", "cancelled"]
    invariants.check(p.conn)


def test_a_healthy_system_is_left_alone(p: Clocked) -> None:
    """Invariant 6: at every point of a run's life; also while everything waits for a worker."""
    protocol.small_ledgers(p.conn)
    worker = p.worker()
    run = p.start(protocol.spec(manager_task="manager", callbacks=CALLBACKS))["run_id"]

    def healthy() -> None:
        for slot in p.slots(run):
            p.renew([(run, slot["slot"], slot["epoch"])])
        p.value("SELECT fanout_renew_manager_v1(%s, %s)", run, p.run(run)["fence"])
        p.beat(worker)
        p.advance(12)
        invariants.check(p.conn)
        invariants.check_quiet(p.conn)

    healthy()
    p.advance(100_000)
    job = p.fetch(worker)
    assert job is not None
    healthy()
    p.manager_begin(run, job["id"])
    healthy()
    p.append(run, 1, [None] * 9)
    healthy()
    p.seal(run, 1)
    p.finish(job["id"])
    p.advance(100_000)
    healthy()
    reply = take(p, worker)
    healthy()
    reply = report(p, run, reply, "released", retry_in=100.0)
    healthy()
    for outcome in ("returned", "succeeded", "failed", "succeeded"):
        reply = report(p, run, reply, outcome)
        healthy()
    p.pause(run)
    report(p, run, reply, "succeeded")
    p.advance(100_000)
    healthy()
    p.resume(run)
    healthy()
    work_off(p, run)
    healthy()
    assert p.progress(run)["status"] == "completed"


# -- ledgers


def test_a_process_moves_on_when_its_ledger_is_dry(p: Clocked) -> None:
    """Every ledger is worked off by one slot; it never goes round in vain."""
    protocol.small_ledgers(p.conn)
    run = p.stage(13, max_in_flight=1)
    assert p.run(run)["ledgers"] == 4
    reply = take(p)
    verdicts = [reply.verdict]
    while reply.verdict in ("item", "move"):
        reply = report(p, run, reply, "succeeded")
        verdicts.append(reply.verdict)
        invariants.check(p.conn)
    assert verdicts.count("item") == 13
    assert verdicts.count("move") == 3
    assert p.progress(run)["status"] == "completed"


def test_suspects_in_every_ledger_do_not_make_a_slot_spin(p: Clocked) -> None:
    """It may take none of them: after one look at each ledger it ends."""
    protocol.small_ledgers(p.conn)
    run = p.stage(9, max_in_flight=9, max_crashes=9)
    for _ in range(9):
        take(p)
    kill(p)
    reply = take(p, suspect=False)
    looks = 0
    while reply.verdict == "move":
        looks += 1
        reply = report(p, run, reply, "none", suspect=False)
    assert reply.verdict == "ended" and looks <= 4
    invariants.check(p.conn)


# -- retention


def test_old_runs_are_removed_in_batches(p: Clocked) -> None:
    """From the first batch on the run cannot be reopened: half its items are gone."""
    run = p.stage(5, run_key="march", callbacks=[callback("on_complete")])
    work_off(p, run)
    p.execute("UPDATE fanout_callbacks SET state = 'owed'")
    p.advance(100)
    prune = "SELECT fanout_prune_v1(%s, 2)"
    assert p.value(prune, 50.0) == 0, "its callback is owed"
    p.execute("UPDATE fanout_callbacks SET state = 'done'")
    assert p.value(prune, 200.0) == 0
    assert p.value(prune, 50.0) == 2
    assert p.retry_failed(run, ["failed", "cancelled"]) == -1
    assert p.start(protocol.spec(run_key="march"))["outcome"] == "created"
    assert [p.value(prune, 50.0) for _ in range(3)] == [2, 2, 0]
    assert [row["id"] for row in p.rows("SELECT id FROM fanout_runs")] == [run + 1]
    for table in ("items", "ledgers", "slots", "callbacks", "closes"):
        assert not p.rows(f"SELECT FROM fanout_{table}"), table


def test_our_own_old_job_rows_are_removed(p: Clocked) -> None:
    run = p.stage(3)
    p.defer("other")
    work_off(p, run)
    p.advance(100)
    prune = "SELECT fanout_prune_jobs_v1(ARRAY['child'], %s, 100)"
    assert p.value(prune, 200.0) == 0
    assert p.value(prune, 50.0) == 3
    assert [job["task_name"] for job in p.rows("SELECT * FROM procrastinate_jobs")] == ["other"]


def test_json_of_a_reply_is_what_was_staged(p: Clocked) -> None:
    run = p.start(protocol.spec())["run_id"]
    payloads = [json.dumps({"path": f"ä/{n}.pdf", "n": n}) for n in range(2)]
    p.append(run, 1, ["a", "b"], payloads)
    p.seal(run, 1)
    assert [json.loads(take(p).payload or "") for _ in range(2)] == [
        {"path": "ä/0.pdf", "n": 0},
        {"path": "ä/1.pdf", "n": 1},
    ]


def test_jobs_that_fail_before_they_begin_end_as_stuck(p: Clocked) -> None:
    """Case A12: a task unknown to the workers is dealt again, but not for ever, and says why."""
    run = p.stage(3, max_in_flight=2, stuck_after=60.0)
    for _ in range(4):
        while job := p.fetch(p.worker()):
            p.finish(job["id"], "failed")
        p.advance(25.0)
        assert len(p.slots(run)) <= 2
        p.sweep()
    assert p.run(run)["status"] == "failed"
    assert "before they begin: is the task child known" in p.run(run)["reason"]
    assert p.counts(run)["cancelled"] == 3


def test_the_first_failure_is_the_last_where_none_is_tolerated(p: Clocked) -> None:
    """A10: the report that crosses the tolerance hands out nothing more."""
    run = p.stage(5, max_in_flight=1, tolerate_count=0)
    after = report(p, run, take(p), "failed")
    assert (after.verdict, after.stop) == ("ended", True)
    p.stop(run, "failed")
    assert p.counts(run) == {"failed": 1, "cancelled": 4}
    assert "1 of 5, tolerated: 0" in p.run(run)["reason"]
