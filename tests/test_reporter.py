"""Coalescing reports: few statements, no outcome lost, none counted twice."""

import asyncio
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from fanout_procrastinate import DatabaseError, SchemaError, database, models, reporter, store
from fanout_procrastinate.reporter import Reporter, Suspicion
from tests import invariants
from tests.support import Recorder, begun, counts, direct, entry, jobs, sealed
from tests.waiting import wait_until_async

Conn = psycopg.Connection[dict[str, Any]]


@pytest.fixture
def own(dsn: str) -> Iterator[database.Database]:
    with direct(dsn) as made:
        yield made


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch, own: database.Database) -> Recorder:
    monkeypatch.setattr(reporter, "_FIRST_PAUSE_SECONDS", 0.001)
    return Recorder(monkeypatch)


def reporting(own: database.Database, run_id: int) -> Reporter:
    return Reporter(own.run_async, run_id, Suspicion())


def begin_all(own: database.Database, run_id: int, conn: Conn, n: int) -> list[models.Reply]:
    return [begun(own, run_id, conn) for _ in range(n)]


def progress(own: database.Database, run_id: int) -> Any:
    found = own.run(store.progress(run_id))
    assert found is not None
    return counts(found)


async def report_all(mine: Reporter, entries: list[models.Entry]) -> list[models.Reply]:
    return await asyncio.gather(*(mine.report(0, one) for one in entries))


# -- coalescing


async def test_what_ends_together_goes_together(
    own: database.Database, recorder: Recorder, conn: Conn
) -> None:
    run_id = sealed(own, *map(str, range(16)))
    mine = reporting(own, run_id)
    replies = begin_all(own, run_id, conn, 8)
    recorder.calls.clear()
    replies = await report_all(mine, [entry(reply) for reply in replies])
    assert len(recorder.of("report")) == 1
    assert sorted(reply.position or 0 for reply in replies) == list(range(8, 16))
    replies = await report_all(mine, [entry(reply, wish="end") for reply in replies])
    assert len(recorder.of("report")) == 2
    assert {reply.verdict for reply in replies} == {"ended"}
    assert progress(own, run_id) == {"succeeded": 16, "total": 16}
    await mine.close()


async def test_what_arrives_meanwhile_goes_with_the_next(
    own: database.Database, recorder: Recorder, conn: Conn
) -> None:
    run_id = sealed(own, *map(str, range(8)))
    mine = reporting(own, run_id)
    first, *others = begin_all(own, run_id, conn, 8)
    with recorder.held("report"):
        reports = [asyncio.create_task(mine.report(0, entry(first, wish="end")))]
        await wait_until_async(lambda: recorder.of("report"))
        for other in others:
            reports.append(asyncio.create_task(mine.report(0, entry(other, wish="end"))))
            await asyncio.sleep(0)
        assert len(recorder.of("report")) == 1
    await asyncio.gather(*reports)
    sizes = [len(call.params["slots"]) for call in recorder.of("report")]
    assert sizes == [1, 7]
    assert progress(own, run_id) == {"succeeded": 8, "total": 8}


async def test_each_ledger_has_its_own_report(
    own: database.Database, recorder: Recorder, conn: Conn
) -> None:
    run_id = sealed(own, *map(str, range(2000)))
    mine = reporting(own, run_id)
    (slots,) = (conn.execute("SELECT slot, job_id FROM fanout_slots ORDER BY slot").fetchall(),)
    one = await mine.begin(slots[0]["slot"], slots[0]["job_id"], token="0" * 32)
    # A process stays on its ledger, until another is named by a reply.
    assert mine._ledger == one.ledger
    two = await mine.begin(slots[1]["slot"], slots[1]["job_id"], token="1" * 32)
    assert two.ledger == one.ledger
    other = own.run(
        store.begin(
            run_id,
            slots[2]["slot"],
            slots[2]["job_id"],
            token="2" * 32,
            ledger=1 - one.ledger,
            suspect=False,
        )
    )
    assert other.ledger == 1 - one.ledger
    await asyncio.gather(*(mine.report(r.ledger, entry(r, wish="end")) for r in (one, two, other)))
    assert sorted(len(call.params["slots"]) for call in recorder.of("report")) == [1, 2]
    assert progress(own, run_id)["succeeded"] == 3


async def test_one_slot_dealt_anew_keeps_its_replies_apart(
    own: database.Database, recorder: Recorder, conn: Conn
) -> None:
    """The slot's former holder was rescued, and both now report in one statement."""
    run_id = sealed(own, *map(str, range(5)), max_in_flight=1)
    mine = reporting(own, run_id)
    former = begun(own, run_id, conn)
    conn.execute("SELECT fanout_rescue_v1(%s, %s)", [run_id, former.slot])
    conn.execute("SELECT fanout_top_up_v1(%s)", [run_id])
    present = begun(own, run_id, conn)
    assert present.slot == former.slot and present.epoch != former.epoch
    for pair in ((former, present), (present, former)):
        replies = {
            reply.epoch: reply.verdict
            for reply in await report_all(mine, [entry(one) for one in pair])
        }
        assert replies[former.epoch] == "lost" and replies[present.epoch] == "item"
    assert progress(own, run_id)["succeeded"] == 1


# -- lost replies


@pytest.mark.parametrize("before", [True, False], ids=["not executed", "reply lost"])
async def test_report_is_sent_again_until_its_verdict_is_known(
    own: database.Database,
    recorder: Recorder,
    conn: Conn,
    before: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    run_id = sealed(own, *map(str, range(8)))
    mine = reporting(own, run_id)
    replies = begin_all(own, run_id, conn, 4)
    recorder.fail("report", 3, before=before)
    replies = await report_all(mine, [entry(reply) for reply in replies])
    assert [reply.verdict for reply in replies] == ["item"] * 4
    assert len(recorder.of("report")) == 4
    assert progress(own, run_id) == {"succeeded": 4, "processing": 4, "total": 8}
    recorder.fail("report", 3, before=before)
    replies = await report_all(
        mine,
        [
            entry(replies[0], "failed", wish="end", error="{}", result=None),
            entry(replies[1], "released", wish="end", error="{}", result=None, retry_in=3600),
            entry(replies[2], "returned", wish="end", result=None),
            entry(replies[3], wish="end"),
        ],
    )
    assert [reply.verdict for reply in replies] == ["ended"] * 4
    assert progress(own, run_id) == {"succeeded": 5, "failed": 1, "pending": 2, "total": 8}
    assert "asking again" in caplog.text
    invariants.check(conn, run_id)


@pytest.mark.parametrize("before", [True, False], ids=["not executed", "reply lost"])
async def test_begin_is_asked_again(
    own: database.Database, recorder: Recorder, conn: Conn, before: bool
) -> None:
    run_id = sealed(own, "1", "2")
    (slot, _) = conn.execute("SELECT slot, job_id FROM fanout_slots ORDER BY slot").fetchall()
    recorder.fail("begin", 3, before=before)
    mine = reporting(own, run_id)
    reply = await mine.begin(slot["slot"], slot["job_id"], token="0" * 32)
    assert (reply.verdict, reply.position, reply.claim) == ("item", 0, 1)
    assert len(recorder.of("begin")) == 4
    assert progress(own, run_id) == {"processing": 1, "pending": 1, "total": 2}
    # The same job started twice, by hand, is another execution: refused.
    again = await mine.begin(slot["slot"], slot["job_id"], token="1" * 32)
    assert (again.verdict, again.epoch) == ("ended", None)


@pytest.mark.parametrize("name", ["begin", "report"])
async def test_schema_that_is_gone_ends_the_question(
    own: database.Database, recorder: Recorder, conn: Conn, name: str
) -> None:
    run_id = sealed(own, "1", "2")
    mine = reporting(own, run_id)
    replies = begin_all(own, run_id, conn, 2)
    signature = next(
        iter(
            conn.execute(
                "SELECT oid::regprocedure::text AS name FROM pg_proc WHERE proname = %s",
                [f"fanout_{name}_v1"],
            )
        )
    )["name"]
    conn.execute(f"DROP FUNCTION {signature}")
    if name == "begin":
        with pytest.raises(SchemaError, match="schema --apply"):
            await mine.begin(0, 1, token="0" * 32)
    else:
        ends = await asyncio.gather(
            *(mine.report(0, entry(reply)) for reply in replies), return_exceptions=True
        )
        assert [type(end) for end in ends] == [SchemaError, SchemaError]
    await mine.close()


# -- refused outcomes


async def test_refused_report_is_split_until_the_culprit_stands_alone(
    own: database.Database, recorder: Recorder, conn: Conn, caplog: pytest.LogCaptureFixture
) -> None:
    run_id = sealed(own, *map(str, range(8)))
    mine = reporting(own, run_id)
    replies = begin_all(own, run_id, conn, 8)
    recorder.calls.clear()
    ends = await report_all(
        mine,
        [
            entry(reply, wish="end", result="no JSON" if reply.position == 5 else "1")
            for reply in replies
        ],
    )
    assert [reply.verdict for reply in ends] == ["ended"] * 8
    assert progress(own, run_id) == {"succeeded": 7, "failed": 1, "total": 8}
    # 8, 4, then 4 into 2 and 2 and so on, and the culprit once more as refused.
    assert len(recorder.of("report")) <= 9
    (group,) = own.run(store.errors(run_id, 5))
    assert (group.error_type, group.position) == ("OutcomeRefused", 5)
    assert "see the worker's log" in group.message
    (record,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert record.message == "Outcome refused by the database"
    assert vars(record)["position"] == 5 and "invalid input syntax" in vars(record)["exception"]
    invariants.check(conn, run_id)


async def test_several_culprits(own: database.Database, recorder: Recorder, conn: Conn) -> None:
    run_id = sealed(own, *map(str, range(8)))
    mine = reporting(own, run_id)
    bad = {"error": "{", "result": None, "outcome": "failed"}
    await report_all(
        mine,
        [
            entry(reply, wish="end", **(bad if reply.position in (0, 3, 4) else {}))
            for reply in begin_all(own, run_id, conn, 8)
        ],
    )
    assert progress(own, run_id) == {"succeeded": 5, "failed": 3, "total": 8}


async def test_what_cannot_be_recorded_at_all_is_raised(
    own: database.Database, recorder: Recorder, conn: Conn
) -> None:
    run_id = sealed(own, "1", "2", "3")
    mine = reporting(own, run_id)
    good, odd = begin_all(own, run_id, conn, 2)
    ends = await asyncio.gather(
        mine.report(0, entry(good, wish="end")),
        # The wish itself is nonsense: no other outcome can help.
        mine.report(0, models.Entry(slot=odd.slot, epoch=2**70, wish="next")),
        return_exceptions=True,
    )
    assert isinstance(ends[0], models.Reply) and ends[0].verdict == "ended"
    assert isinstance(ends[1], DatabaseError) and not ends[1].transient
    with pytest.raises(DatabaseError):
        await mine.report(0, entry(odd, retry_in="soon"))
    assert progress(own, run_id)["succeeded"] == 1


# -- ends


async def test_cancelled_question_does_not_disturb_the_others(
    own: database.Database, recorder: Recorder, conn: Conn
) -> None:
    run_id = sealed(own, *map(str, range(4)))
    mine = reporting(own, run_id)
    replies = begin_all(own, run_id, conn, 4)
    with recorder.held("report"):
        reports = [asyncio.create_task(mine.report(0, entry(r, wish="end"))) for r in replies]
        await wait_until_async(lambda: recorder.of("report"))
        reports[1].cancel()
        await asyncio.wait({reports[1]})
    ends = await asyncio.gather(*reports, return_exceptions=True)
    assert isinstance(ends[1], asyncio.CancelledError)
    assert progress(own, run_id) == {"succeeded": 4, "total": 4}


async def test_close_waits_for_the_reports_on_their_way(
    own: database.Database, recorder: Recorder, conn: Conn
) -> None:
    run_id = sealed(own, "1")
    mine = reporting(own, run_id)
    (reply,) = begin_all(own, run_id, conn, 1)
    with recorder.held("report"):
        report = asyncio.create_task(mine.report(0, entry(reply, wish="end")))
        await wait_until_async(lambda: recorder.of("report"))
        closing = asyncio.create_task(mine.close())
        await asyncio.sleep(0)
        assert not closing.done()
    await closing
    assert (await report).verdict == "ended"


async def test_cancelled_sender_leaves_nobody_waiting(
    own: database.Database, recorder: Recorder, conn: Conn
) -> None:
    """The loop is ending: whoever waits for a reply is told so."""
    run_id = sealed(own, "1", "2")
    mine = reporting(own, run_id)
    one, two = begin_all(own, run_id, conn, 2)
    with recorder.held("report"):
        first = asyncio.create_task(mine.report(0, entry(one)))
        await wait_until_async(lambda: recorder.of("report"))
        second = asyncio.create_task(mine.report(0, entry(two)))
        await asyncio.sleep(0)
        (sender,) = mine._senders.values()
        sender.cancel()
        await asyncio.wait({first, second, sender})
        assert first.cancelled() and second.cancelled() and not mine._senders


async def test_intolerable_failure_is_followed_by_one_stop(
    own: database.Database, recorder: Recorder, conn: Conn
) -> None:
    run_id = sealed(own, *map(str, range(50)), tolerate_count=1, max_in_flight=4)
    mine = reporting(own, run_id)
    replies = begin_all(own, run_id, conn, 4)
    recorder.calls.clear()
    recorder.fail("stop", 2, before=False)
    bad = {"outcome": "failed", "result": None, "error": '{"type": "E"}'}
    replies = await report_all(mine, [entry(reply, **bad) for reply in replies])
    assert len(recorder.of("stop")) == 3 and len(recorder.of("report")) == 1
    assert progress(own, run_id)["failed"] == 4
    await report_all(mine, [entry(r) for r in replies if r.verdict == "item"])
    found = own.run(store.progress(run_id))
    assert found is not None and found.status == "failed"
    assert "more failed items than tolerated" in (found.reason or "")
    assert len(recorder.of("stop")) == 3
    assert {job["status"] for job in jobs(conn)} <= {"doing", "cancelled"}
    invariants.check(conn, run_id)


# -- suspects


async def test_a_process_holds_one_suspect_at_a_time(
    own: database.Database, recorder: Recorder, conn: Conn
) -> None:
    run_id = sealed(own, *map(str, range(4)), max_in_flight=4, max_crashes=5)
    dead = begin_all(own, run_id, conn, 4)
    for reply in dead:
        conn.execute("SELECT fanout_rescue_v1(%s, %s)", [run_id, reply.slot])
    conn.execute("SELECT fanout_top_up_v1(%s)", [run_id])
    slots = conn.execute("SELECT slot, job_id FROM fanout_slots ORDER BY slot").fetchall()
    suspicion = Suspicion()
    mine = Reporter(own.run_async, run_id, suspicion)
    first, second = [(slot["slot"], slot["job_id"]) for slot in slots[:2]]
    reply = await mine.begin(*first, token="0" * 32)
    assert (reply.verdict, reply.crashes) == ("item", 1)
    # Those that it could not take were put off a little: let that pass.
    waiting = "UPDATE fanout_items SET due = clock_timestamp() WHERE due IS NOT NULL"
    conn.execute(waiting)
    # Its outcome frees the place, and the next suspect comes with the same statement.
    reply = await mine.report(0, entry(reply))
    assert (reply.verdict, reply.crashes) == ("item", 1)
    conn.execute(waiting)
    assert (await mine.begin(*second, token="1" * 32)).verdict != "item"
    assert suspicion._holder == reply.epoch
    assert reply.epoch is not None
    mine.release_suspect(reply.epoch + 1)
    assert suspicion._holder == reply.epoch
    mine.release_suspect(reply.epoch)
    assert suspicion.reserve(object())


async def test_place_for_suspects_is_given_back_after_an_error(
    own: database.Database, recorder: Recorder
) -> None:
    run_id = sealed(own, "1")
    suspicion = Suspicion()
    mine = Reporter(own.run_async, run_id, suspicion)
    with pytest.raises(DatabaseError):
        await mine.begin(0, 1, token="no token")
    with pytest.raises(DatabaseError):
        await mine.report(0, models.Entry(slot=2**70, epoch=1, wish="next"))
    assert suspicion.reserve(object())


async def test_waiting_for_the_place() -> None:
    suspicion = Suspicion()
    one, two = object(), object()
    assert suspicion.reserve(one) and not suspicion.reserve(two)
    suspicion.settle(two, "slot")  # not its own: nothing happens
    await suspicion.freed(0.01)  # in vain
    suspicion.settle(one, "slot")
    assert not suspicion.reserve(two)
    waiting = [asyncio.create_task(suspicion.freed(30)) for _ in range(3)]
    await asyncio.sleep(0)
    suspicion.release("other")
    suspicion.release("slot")
    async with asyncio.timeout(1):
        await asyncio.gather(*waiting)
    assert suspicion.reserve(two)
    suspicion.settle(two, None)
    assert suspicion.reserve(one)
