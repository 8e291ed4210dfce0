"""Limits in the protocol: who is dealt a place, who waits, and that nothing is ever stuck."""

import contextlib
import json
import random
import threading
import uuid
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

from fanout_procrastinate import (
    ConfigurationError,
    InvalidValue,
    Limit,
    fanout_child,
    limits,
    queries,
    store,
)
from tests import invariants, protocol
from tests.conftest import Connection
from tests.protocol import Clocked, Entry, Protocol, Reply, Row, spec
from tests.waiting import wait_until

LEASE = 30.0


@pytest.fixture
def p(conn: Connection) -> Clocked:
    conn.execute(protocol.REFUSAL)
    return Clocked(conn)


def few(concurrency: int | None = 3, **changes: Any) -> Row:
    return {"name": "few", "concurrency": concurrency, "keyed": False} | changes


def limited(*specs: Row, **changes: Any) -> Row:
    """Return the columns of a run whose items take these limits."""
    names = sorted(one["name"] for one in specs if not one["keyed"])
    keyed = [one["name"] for one in specs if one["keyed"]]
    return {
        "limit_specs": list(specs),
        "limits": names or None,
        "key_limit": keyed[0] if keyed else None,
    } | changes


def stage(
    p: Protocol, items: int, *specs: Row, keys: list[str] | None = None, **changes: Any
) -> int:
    """Start a limited run; `keys`: by which its items are limited, in turn."""
    run: int = p.start(spec(**limited(*specs, **changes)))["run_id"]
    if items:
        p.row(
            "SELECT * FROM fanout_append_v1(%s, 1, %s::text[], %s::jsonb[], %s::text[])",
            run,
            [None] * items,
            [json.dumps({"n": n}) for n in range(items)],
            None if keys is None else [keys[n % len(keys)] for n in range(items)],
        )
    p.seal(run, 1)
    return run


def pass_on(p: Protocol, run: int) -> int:
    steps = 0
    while p.value("SELECT fanout_pass_on_v1(%s)", run):
        steps += 1
        assert steps < 100, "it comes to rest"
    return steps


def places(p: Clocked, *runs: int) -> list[int]:
    """Return how many slots each run has, queued ones for now included."""
    return [
        sum(slot["active"] or slot["scheduled_at"] is None for slot in p.slots(run)) for run in runs
    ]


def begin_all(p: Clocked) -> list[tuple[int, Reply]]:
    """Fetch and begin whatever is queued."""
    begun = []
    while job := p.fetch():
        if job["task_name"] != "child":
            p.finish(job["id"])
            continue
        args = job["args"]
        reply = p.begin(args["run_id"], args["slot"], job["id"])
        if reply.verdict == "ended":
            p.finish(job["id"])
        begun.append((args["run_id"], reply))
    return begun


def done(p: Clocked, run: int, reply: Reply, outcome: str = "succeeded", **columns: Any) -> Reply:
    (answer,) = p.report(run, 0, reply.entry(outcome, **columns))
    return answer


# -- declaring


@pytest.mark.parametrize(
    "arguments",
    [
        {"name": ""},
        {"name": "x" * 201},
        {"name": "a\0b"},
        {"name": "max_running:work"},
        {"name": "llm", "concurrency": None},
        {"concurrency": -1},
        {"concurrency": True},
        {"concurrency": 2.5},
        {"rate": 0},
        {"rate": float("nan")},
        {"rate": 5, "per": 0},
        {"rate": 5, "burst": 0},
        {"burst": 5},
        {"key": "tenant"},
        {"rate": 5, "key": len},
    ],
)
def test_limits_that_cannot_work(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        Limit(**({"name": "llm", "concurrency": 1} | arguments))


def test_a_child_takes_each_limit_once_and_one_key() -> None:
    """E03: what cannot be taken together is refused at import."""
    key, other = (Limit(name, concurrency=1, key=str) for name in ("a", "b"))
    for given in ([key, key], [key, other], ["llm"], "llm", 5):
        with pytest.raises(ConfigurationError):
            limits.check_set(given)
    assert [one.name for one in limits.check_set([other, Limit("a", rate=5)])] == ["a", "b"]


def test_default_burst_is_a_tenth_of_the_rate() -> None:
    assert [Limit("llm", rate=rate).burst for rate in (1, 9, 100, 0.5)] == [1, 1, 10, 1]


@pytest.mark.parametrize("key", [lambda item: 5, lambda item: item.gone, lambda item: "x" * 201])
def test_keys_that_are_none(key: Any) -> None:
    with pytest.raises(InvalidValue, match="key of the limit 'tenant'"):
        Limit("tenant", concurrency=1, key=key).key_of("item")


def test_max_running_is_checked_at_import(app: Any) -> None:
    with pytest.raises(ConfigurationError, match="max_running=-1"):
        fanout_child(app, max_running=-1)


def test_a_changed_limit_stays_until_its_declaration_changes(p: Clocked) -> None:
    def concurrency() -> Any:
        return p.value("SELECT concurrency FROM fanout_limits WHERE name = 'few'")

    stage(p, 1, few(3))
    p.value("SELECT fanout_limit_update_v1('few', '{\"concurrency\": 7}', NULL)")
    stage(p, 1, few(3))
    assert concurrency() == 7
    stage(p, 1, few(4))
    assert concurrency() == 4


# -- how many at once


def test_places_are_dealt_within_the_limit(p: Clocked) -> None:
    run = stage(p, 9, few(3), max_in_flight=8)
    assert places(p, run) == [3]
    held = begin_all(p)
    assert len(held) == 3
    again = [done(p, run, reply) for _, reply in held]
    assert [reply.verdict for reply in again] == ["item"] * 3
    assert places(p, run) == [3]
    invariants.check(p.conn)


def test_nothing_is_dealt_by_a_limit_of_none(p: Clocked) -> None:
    """A run that waits for a limit is neither stuck nor repaired."""
    run = stage(p, 2, few(0))
    assert places(p, run) == [0]
    for _ in range(5):
        p.advance(9000)
        assert p.sweep() == {}
    assert "limit few is full: 0 of 0" in p.value(
        "SELECT fanout_limit_full_v1(limits) FROM fanout_runs WHERE id = %s", run
    )
    p.value("SELECT fanout_limit_update_v1('few', '{\"concurrency\": 1}', NULL)")
    assert pass_on(p, run) == 1
    assert places(p, run) == [1]
    p.stop(run)
    assert p.progress(run)["status"] == "cancelled"


def test_runs_share_a_limit_evenly(p: Clocked) -> None:
    first = stage(p, 50, few(10), max_in_flight=20)
    held = begin_all(p)
    while places(p, first) != [10]:
        held += begin_all(p)
    second = stage(p, 50, few(10), max_in_flight=20)
    assert places(p, first, second) == [10, 0]
    pass_on(p, second)
    freed = [done(p, run, reply) for run, reply in held]
    assert Counter(reply.verdict for reply in freed) == {"ended": 5, "item": 5}
    assert all(reply.freed for reply in freed if reply.verdict == "ended")
    pass_on(p, first)
    begin_all(p)
    assert places(p, first, second) == [5, 5]
    invariants.check(p.conn)


def test_the_rest_of_a_run_goes_back_to_the_others(p: Clocked) -> None:
    first = stage(p, 50, few(4), max_in_flight=20)
    begin_all(p)
    second = stage(p, 2, few(4), max_in_flight=20)
    pass_on(p, second)
    p.sweep()
    for _ in range(60):
        for row in p.rows("SELECT * FROM fanout_slots WHERE active AND held IS NOT NULL"):
            entry = {"slot": row["slot"], "epoch": row["epoch"], "position": row["held"]}
            ledger = 0
            (answer,) = p.report(
                row["run_id"],
                ledger,
                _entry(entry | {"claim": row["held_claim"], "outcome": "succeeded"}),
            )
            if answer.freed:
                pass_on(p, row["run_id"])
        begin_all(p)
        active = p.value("SELECT count(*) FROM fanout_slots WHERE active")
        assert active <= 4
    assert {p.progress(run)["status"] for run in (first, second)} == {"completed"}


def _entry(columns: dict[str, Any]) -> Entry:
    return Entry(wish="next", **columns)


def test_weights_are_levels(p: Clocked) -> None:
    heavy = stage(p, 90, few(9), max_in_flight=20, weight=2)
    begin_all(p)
    light = stage(p, 90, few(9), max_in_flight=20)
    rows = p.rows("SELECT run_id, used, target, excess FROM fanout_balance_v1('few')")
    assert [(row["run_id"], row["target"]) for row in rows] == [(heavy, 6), (light, 3)]


def test_two_limits_at_once(p: Clocked) -> None:
    """The tighter one decides, and both count."""
    other = few(2, name="other")
    both = stage(p, 9, few(3), other, max_in_flight=8)
    one = stage(p, 9, few(3), max_in_flight=8)
    pass_on(p, one)
    assert places(p, both, one) == [2, 1]


def test_a_slot_for_later_takes_its_place_when_it_begins(p: Clocked) -> None:
    run = stage(p, 1, few(1), max_in_flight=4)
    ((_, reply),) = begin_all(p)
    assert done(p, run, reply, "released", retry_in=60.0).verdict == "ended"
    other = stage(p, 1, few(1), max_in_flight=4)
    assert places(p, run, other) == [0, 1], "what is due later keeps nobody out"
    ((_, held),) = begin_all(p)
    p.advance(61)
    p.renew([(other, held.slot, held.epoch or 0)])
    ((_, late),) = begin_all(p)
    assert late.verdict == "ended", "its limit is full"
    assert places(p, run) == [0] and p.run(run)["wants"] == 1
    assert done(p, other, held).freed
    pass_on(p, other)
    ((_, served),) = begin_all(p)
    assert served.verdict == "item"
    invariants.check(p.conn)


def test_a_paused_limit(p: Clocked) -> None:
    """A 429 slows the whole resource: nobody begins before the time is over."""
    run = stage(p, 5, few(2), max_in_flight=4)
    held = begin_all(p)
    p.value("SELECT fanout_limit_update_v1('few', NULL, 60)")
    answers = [done(p, run, reply) for _, reply in held]
    assert [(reply.verdict, reply.wait_seconds) for reply in answers] == [("wait", 1)] * 2
    p.advance(61)
    again = [p.report(run, 0, reply.entry())[0] for reply in answers]
    assert [reply.verdict for reply in again] == ["item"] * 2


# -- how many in a time


def test_starts_are_kept_one_after_the_other(p: Clocked) -> None:
    rate = few(None, rate=1.0, per=10.0, burst=1)
    run = stage(p, 9, rate, max_in_flight=8)
    begun = [reply for _, reply in begin_all(p)]
    while more := [reply for _, reply in begin_all(p)]:
        begun += more
    working = [reply for reply in begun if reply.verdict == "item"]
    waiting = [reply for reply in begun if reply.verdict == "wait"]
    assert len(working) == 1
    assert len(waiting) == 1, "the next start is kept; further ones are not waited for"
    assert places(p, run) == [2]
    p.advance(10.1)
    early = p.report(run, 0, waiting[0].entry())[0]
    assert early.verdict == "wait" and 0 < (early.wait_seconds or 0) < 0.2, "its start is kept"
    p.advance(0.2)
    assert p.report(run, 0, early.entry())[0].verdict == "item"
    following = [reply for _, reply in begin_all(p)]
    assert following, "dealt as soon as their starts were near enough"
    assert all(reply.verdict == "wait" for reply in following)
    invariants.check(p.conn)


def test_a_burst_after_a_quiet_time(p: Clocked) -> None:
    """Half of it at once: the rest is for the way to the call."""
    rate = few(None, rate=1.0, per=10.0, burst=8)
    stage(p, 9, rate, max_in_flight=8)
    begun = []
    while more := begin_all(p):
        begun += more
    assert Counter(reply.verdict for _, reply in begun)["item"] == 4


# -- by key


def tenant(concurrency: int = 2) -> Row:
    return {"name": "tenant", "concurrency": concurrency, "keyed": True}


def test_a_blocked_key_blocks_no_other(p: Clocked) -> None:
    """No head-of-line blocking: the first twenty items are one tenant's."""
    keys = ["big"] * 20 + ["a", "b"]
    run = stage(p, 22, tenant(), keys=keys, max_in_flight=10)
    assert p.progress(run)["pending"] == 22 and p.progress(run)["waiting"] == 0
    begun = []
    while more := begin_all(p):
        begun += more
    held = [reply for _, reply in begun if reply.verdict == "item"]
    lanes = Counter(keys[reply.position or 0] for reply in held)
    assert lanes == {"big": 2, "a": 1, "b": 1}
    assert places(p, run) == [4], "no slot spins"
    assert p.sweep() == {}
    invariants.check(p.conn)


def test_keys_are_shared_by_runs(p: Clocked) -> None:
    first = stage(p, 5, tenant(), keys=["a"], max_in_flight=10)
    held = [reply for _, reply in begin_all(p) if reply.verdict == "item"]
    second = stage(p, 5, tenant(), keys=["a", "b"], max_in_flight=10)
    more = [reply for _, reply in begin_all(p) if reply.verdict == "item"]
    assert len(held) == 2
    assert [json.loads(reply.payload or "")["n"] for reply in more] == [1, 3], "b's alone"
    p.stop(first)
    for reply in held:
        done(p, first, reply)
    assert p.progress(first)["status"] == "cancelled"
    pass_on(p, first)
    last = [reply for _, reply in begin_all(p) if reply.verdict == "item"]
    assert [json.loads(reply.payload or "")["n"] for reply in last] == [0, 2]
    invariants.check(p.conn)
    assert p.progress(second)["processing"] == 4


def test_retries_and_crashes_stay_in_their_lane(p: Clocked) -> None:
    run = stage(p, 4, tenant(1), keys=["a", "b"], max_in_flight=4)
    first, second = (reply for _, reply in begin_all(p) if reply.verdict == "item")
    assert done(p, run, first, "released", retry_in=60.0).position == 2
    assert p.progress(run)["waiting"] == 1
    p.advance(20)
    p.sweep()
    p.advance(21)
    assert p.sweep()[run]["rescued_released"] == 2
    invariants.check(p.conn)
    assert p.progress(run)["processing"] == 0
    del second


def test_a_stopped_and_retried_run_with_keys(p: Clocked) -> None:
    run = stage(p, 6, tenant(1), keys=["a", "b"], max_in_flight=4)
    held = [reply for _, reply in begin_all(p) if reply.verdict == "item"]
    p.stop(run)
    for reply in held:
        done(p, run, reply)
    assert p.progress(run)["status"] == "cancelled"
    while p.tidy(run):
        pass
    assert p.retry_failed(run) == 4
    invariants.check(p.conn)
    for _ in range(20):
        for run_id, reply in begin_all(p):
            answer = reply
            while answer.verdict == "item":
                answer = done(p, run_id, answer)
    assert p.progress(run)["status"] == "completed"
    assert p.progress(run)["succeeded"] == 6


def test_a_recount_counts_lanes_too(p: Clocked) -> None:
    run = stage(p, 6, tenant(1), keys=["a", "b"], max_in_flight=4)
    begin_all(p)
    p.execute("UPDATE fanout_ledgers SET waiting = 5, fresh = 0 WHERE run_id = %s", run)
    assert p.sweep()[run]["recounted"] == 1
    invariants.check(p.conn)
    assert p.progress(run)["waiting"] == 0
    assert not p.rows("SELECT * FROM fanout_audit_items_v1(%s, 5)", run)


# -- limits beside each other, and lines


def waits_in_line(p: Clocked, *specs: Row, key: str | None = None) -> None:
    """Let a program wait for these limits at once."""
    reply = p.row(
        "SELECT * FROM fanout_take_permit_v1(%s::jsonb, %s, %s::uuid, 'me', NULL, NULL, 600)",
        json.dumps(specs),
        key,
        str(uuid.uuid4()),
    )
    assert reply is not None and not reply["granted"]


def quick(rate: float = 1.0, per: float = 60.0) -> Row:
    return few(None, name="a_rate", rate=rate, per=per)


@pytest.mark.parametrize("besides", ["a rate that is used up", "a key"])
def test_a_lowered_limit_is_enforced_beside_others(p: Clocked, besides: str) -> None:
    """R11: what a run, or another one, waits for in one limit keeps it no places of the next."""
    if besides == "a key":
        extra = few(9, name="tenant", keyed=True)
        run = stage(p, 40, few(4), extra, keys=list("abcdefghij"), max_in_flight=20)
    else:
        extra = quick(rate=10.0, per=1.0)
        other = stage(p, 40, extra, max_in_flight=20, child_queue="elsewhere")
        run = stage(p, 40, extra, few(4), max_in_flight=20)
        assert p.run(other)["wants"] > 0
    begun = begin_all(p)
    assert places(p, run) == [4 if besides == "a key" else len(begun)] and len(begun) >= 2
    p.value("""SELECT fanout_limit_update_v1('few', '{"concurrency": 1}', NULL)""")
    pass_on(p, run)
    assert p.run(run)["surplus"] == len(begun) - 1
    report_all(p, run)
    assert places(p, run) == [1]
    invariants.check(p.conn)


@pytest.mark.parametrize("keyed", [False, True])
def test_queued_slots_make_room_for_who_waits(p: Clocked, keyed: bool) -> None:
    """Places are never kept by jobs that wait for a worker whose places wait for these."""
    extra = [few(9, name="tenant", keyed=True)] if keyed else []
    run = stage(p, 40, few(2), *extra, keys=["a", "b", "c"] if keyed else None)
    assert places(p, run) == [2]
    waits_in_line(p, few(2))
    waits_in_line(p, few(2))
    pass_on(p, run)
    assert places(p, run) == [0]
    invariants.check(p.conn)


def test_a_run_behind_a_line_says_so_and_is_not_stuck(p: Clocked) -> None:
    """Invariant 3: those in line for a limit with room go before a run, and the run says why."""
    waits_in_line(p, few(2), few(0, name="shut"))
    run = stage(p, 5, few(2), stuck_after=60.0)
    assert places(p, run) == [1], "one of two places is kept for who stands in the line"
    waits_in_line(p, few(2), few(0, name="shut"))
    (begun,) = begin_all(p)
    reply = done(p, *begun)
    while reply.verdict == "item":
        reply = done(p, run, reply)
    assert p.progress(run)["status"] == "completed"
    run = stage(p, 5, few(2), stuck_after=60.0)
    assert places(p, run) == [0]
    reason = p.value("SELECT fanout_waiting_for_v1(%s)", run)
    assert reason == "limit few has room for those in its line alone"
    for _ in range(8):
        p.advance(20)
        p.sweep()
    assert p.progress(run)["status"] == "processing"
    invariants.check(p.conn)


@pytest.mark.parametrize("keyed", [False, True])
def test_a_line_that_waits_elsewhere_keeps_no_run_waiting(p: Clocked, keyed: bool) -> None:
    """Who waits for several keeps others waiting only up to the first by name that lacks room."""
    one = few(1, keyed=keyed)
    waits_in_line(p, few(0, name="a door"), one, key="k")
    run = stage(p, 5, one, keys=["k"] if keyed else None)
    assert places(p, run) == [1]
    invariants.check(p.conn)


def report_all(p: Clocked, run: int, wish: str = "next") -> int:
    """Report every item in hand as done, ask for starts; return how many items were handed out."""
    handed = 0
    for slot in p.slots(run):
        if not slot["active"]:
            continue
        ends: Row = {}
        if slot["held"] is not None:
            ends = {"position": slot["held"], "claim": slot["held_claim"], "outcome": "succeeded"}
        entry = Entry(slot=slot["slot"], epoch=slot["epoch"], wish=wish, **ends)
        (reply,) = p.report(run, 0, entry)
        handed += reply.verdict == "item"
        if reply.freed:
            pass_on(p, run)
    return handed


def test_a_rate_is_shared(p: Clocked) -> None:
    """A run that comes later is dealt places when the first one reports, without a sweep."""
    first = stage(p, 500, quick(rate=10.0, per=1.0), max_in_flight=10)
    for _ in range(20):
        p.advance(0.05)
        begin_all(p)
        report_all(p, first)
    second = stage(p, 500, quick(rate=10.0, per=1.0), max_in_flight=10)
    started: Counter[int] = Counter()
    for step in range(200):
        p.advance(0.05)
        begin_all(p)
        for run in (first, second):
            started[run] += report_all(p, run, "slice" if step % 20 == 0 else "next")
    assert sum(started.values()) > 85, "ten seconds of ten each"
    assert min(started.values()) > 0.7 * max(started.values()), started
    invariants.check(p.conn)


def test_a_sweep_leaves_a_healthy_rate_alone(p: Clocked) -> None:
    """Invariant 6: a run that reports deals its own slots; one that does not is dealt some."""
    run = stage(p, 500, quick(rate=10.0, per=1.0), max_in_flight=10)
    begin_all(p)
    for _ in range(40):
        p.advance(0.11)
        report_all(p, run)
        assert p.sweep() == {}
        assert lines(p) == []
        begin_all(p)
    p.advance(5)
    assert lines(p) == [run] and p.sweep()[run]["dealt"] >= 1
    invariants.check(p.conn)


def lines(p: Clocked) -> list[int]:
    """Return the runs for which a sweep would pass places on."""
    return store.lines().parse(p.rows(queries.QUERIES["lines"]))


def test_a_limit_lowered_by_its_declaration(p: Clocked) -> None:
    """R11: the sweep finds the run that has more places than there are now."""
    run = stage(p, 40, few(10), max_in_flight=10)
    begin_all(p)
    assert p.run(run)["wants"] == 0
    assert lines(p) == []
    stage(p, 0, few(2))
    assert lines(p) == [run]
    pass_on(p, run)
    assert p.run(run)["surplus"] == 8
    assert pass_on(p, run) == 0
    invariants.check(p.conn)


def test_a_changed_declaration_takes_its_limits_in_order(
    connect: Callable[..., Connection],
) -> None:
    """Rows of limits are locked ascending by name, also where only a later one is changed."""
    p, other = Protocol(connect()), connect()
    first, later = few(9, name="a"), few(9, name="b")
    stage(p, 1, first, later)
    run: int = p.start(spec(**limited(first, later | {"concurrency": 8})))["run_id"]
    p.append(run, 1, [None])
    with ThreadPoolExecutor(1) as pool:
        with other.transaction():
            other.execute("SELECT fanout_lock_limits_v1(ARRAY['a'], NULL)")
            sealing = pool.submit(p.seal, run, 1)
            wait_until(lambda: _waits_for_a_lock(other))
            # Were b locked meanwhile, this would be a deadlock.
            other.execute("SELECT fanout_lock_limits_v1(ARRAY['a', 'b'], NULL)")
        assert sealing.result(20) == "processing"


def take_permit(p: Protocol, *specs: Row) -> tuple[str, bool]:
    """Ask for a permit; return its holder, and whether it was granted at once."""
    holder = str(uuid.uuid4())
    granted = p.value(
        "SELECT granted FROM fanout_take_permit_v1(%s, NULL, %s, '', NULL, NULL, 3600)",
        Jsonb(list(specs)),
        holder,
    )
    return holder, granted


def stand_in_line(p: Protocol, *specs: Row) -> str:
    """Ask for a permit that there is no room for, and return its holder."""
    holder, granted = take_permit(p, *specs)
    assert not granted
    return holder


def test_places_are_taken_back_once(connect: Callable[..., Connection]) -> None:
    """Of two that want a run to make room, at the same time, one finds that it was done."""
    p, other = Protocol(connect()), connect()
    run = stage(p, 20, few(2))
    holders = [stand_in_line(p, few(2)) for _ in range(2)]
    with ThreadPoolExecutor(1) as pool:
        with other.transaction():
            other.execute("SELECT fanout_pass_on_v1(%s)", [run])
            second = pool.submit(p.value, "SELECT fanout_pass_on_v1(%s)", run)
            wait_until(lambda: _waits_for_a_lock(other))
        second.result(20)
    assert (p.slots(run), p.run(run)["surplus"]) == ([], 0)
    for holder in holders:
        p.execute("SELECT fanout_give_permit_v1(%s)", holder)
    pass_on(p, run)
    assert (len(p.slots(run)), p.run(run)["surplus"]) == (2, 0)
    invariants.check(p.conn)


def test_queued_slots_make_room_whatever_was_told_before(p: Clocked) -> None:
    """A run whose slots were to end, and ended otherwise, gives up those that it was dealt since.

    Else permits would wait for slots, and the slots for places in workers that are taken by who
    waits for these permits."""
    run = stage(p, 20, few(2))
    p.execute("UPDATE fanout_runs SET surplus = 2 WHERE id = %s", run)
    stand_in_line(p, few(2))
    pass_on(p, run)
    assert places(p, run) == [1]
    stand_in_line(p, few(2))
    pass_on(p, run)
    assert places(p, run) == [0]
    invariants.check(p.conn)


def test_new_slots_are_not_told_what_the_old_ones_were(p: Clocked) -> None:
    run = stage(p, 20, few(2))
    p.execute("UPDATE fanout_runs SET surplus = 2 WHERE id = %s", run)
    p.execute("DELETE FROM fanout_slots")
    assert p.value("SELECT fanout_top_up_v1(%s)", run) == 2
    assert p.run(run)["surplus"] == 0
    assert [reply.verdict for _, reply in begin_all(p)].count("item") == 2


def test_a_place_goes_to_a_run_that_is_locked_just_now(connect: Callable[..., Connection]) -> None:
    """A report locks its run and deals nothing: what is free is passed on after it, not never."""
    p, other = Protocol(connect()), connect()
    first, second = stage(p, 4, few(4)), stage(p, 20, few(4))
    assert (len(p.slots(first)), len(p.slots(second))) == (4, 0)
    p.execute("DELETE FROM fanout_slots WHERE run_id = %s AND slot < 2", first)
    locking = "SELECT FROM fanout_runs WHERE id = %s FOR NO KEY UPDATE"
    with other.transaction():
        other.execute(locking, [second])
        # It is a caller's, and stays locked.
        assert not p.value("SELECT fanout_pass_on_v1(%s)", first)
    with ThreadPoolExecutor(1) as pool:
        with other.transaction():
            other.execute(locking, [second])
            passing = pool.submit(p.value, "SELECT fanout_pass_on_v1(%s)", first)
            wait_until(lambda: _waits_for_a_lock(other))
        assert passing.result(20)
    assert len(p.slots(second)) == 2
    assert p.value("SELECT current_setting('lock_timeout')") == "0"


def test_a_place_that_is_free_during_a_pause_is_passed_on(p: Clocked) -> None:
    """Who gets it waits in it: when the pause ends nobody would deal it."""
    first, second = stage(p, 1, few(1)), stage(p, 1, few(1))
    ((_, reply),) = begin_all(p)
    assert places(p, first, second) == [1, 0]
    p.execute("SELECT fanout_limit_update_v1('few', NULL, 60)")
    done(p, first, reply)
    assert pass_on(p, first) == 1
    assert places(p, first, second) == [0, 1]
    assert [reply.verdict for _, reply in begin_all(p)] == ["wait"]
    invariants.check(p.conn)


@pytest.mark.parametrize("who", ["a run", "a permit"])
def test_what_another_stores_just_now_is_taken_in_order(
    connect: Callable[..., Connection], who: str
) -> None:
    """Nobody who waits for a limit that is being stored holds a later one."""
    p, other = Protocol(connect()), connect()
    first, later = few(9, name="a"), few(9, name="b")
    stage(p, 1, later)
    run: int = p.start(spec(**limited(first, later)))["run_id"]
    p.append(run, 1, [None])

    def take() -> Any:
        if who == "a run":
            return p.seal(run, 1) == "processing"
        return take_permit(p, first, later)[1]

    with ThreadPoolExecutor(1) as pool:
        with other.transaction():
            other.execute("SELECT fanout_declare_limits_v1(%s)", [Jsonb([first])])
            taking = pool.submit(take)
            wait_until(lambda: _waits_for_a_lock(other))
            # Were b locked meanwhile, this would be a deadlock.
            other.execute("SELECT fanout_lock_limits_v1(ARRAY['b'], NULL)")
        assert taking.result(20)


def _waits_for_a_lock(conn: Connection) -> bool:
    row = conn.execute(
        "SELECT count(*) AS n FROM pg_stat_activity"
        " WHERE datname = current_database() AND wait_event_type = 'Lock'"
    ).fetchone()
    return row is not None and row["n"] > 0


# -- random schedules


@pytest.mark.parametrize("seed", range(12))
def test_random_schedules_keep_every_limit(p: Clocked, seed: int) -> None:
    """E01, E03: whatever is killed, paused, stopped or changed: never above, and all runs close."""
    dice = random.Random(seed)
    world = _World(p, dice)
    for _ in range(150):
        world.step()
        world.check()
    world.drain()
    assert p.value("SELECT count(*) FROM fanout_runs WHERE closed_at IS NULL") == 0
    invariants.check(p.conn)


class _World:
    """Runs of three kinds that share limits, and whoever works on them."""

    def __init__(self, p: Clocked, dice: random.Random) -> None:
        self.p = p
        self.dice = dice
        self.runs: list[int] = []
        self.held: list[tuple[int, Reply]] = []
        self.ready: dict[int | None, Reply] = {}
        """What slots keep ready, by epoch."""
        self.few = dice.randint(1, 4)
        self.tenant = dice.randint(1, 2)

    def start(self) -> None:
        kinds: list[tuple[list[Row], list[str] | None]] = [
            ([few(self.few)], None),
            ([few(self.few), few(5, name="other")], None),
            ([tenant(self.tenant)], ["a", "a", "a", "b", "c"]),
            ([few(self.few), tenant(self.tenant)], ["a", "b"]),
        ]
        specs, keys = self.dice.choice(kinds)
        self.runs.append(
            stage(
                self.p,
                self.dice.randint(0, 14),
                *specs,
                keys=keys,
                max_in_flight=self.dice.randint(1, 9),
                weight=self.dice.choice([1, 1, 3]),
            )
        )

    def step(self) -> None:
        p, dice = self.p, self.dice
        what = dice.random()
        run = dice.choice(self.runs) if self.runs else 0
        if not self.runs or (what < 0.06 and len(self.runs) < 8):
            self.start()
        elif what < 0.4:
            self.begin()
        elif what < 0.8 and self.held:
            self.report(dice.randrange(len(self.held)))
        elif what < 0.84 and self.held:
            self.held.pop(dice.randrange(len(self.held)))  # its process dies
        elif what < 0.88:
            p.pause(run)
            pass_on(p, run)
        elif what < 0.92:
            p.resume(run)
        elif what < 0.93:
            p.stop(run)
            pass_on(p, run)
        elif what < 0.95:
            p.retry_failed(run)
        else:
            self.sweep()

    def begin(self) -> None:
        job = self.p.fetch()
        if job is None:
            return
        if job["task_name"] != "child":
            self.p.finish(job["id"])
            return
        run = job["args"]["run_id"]
        reply = self.p.begin(run, job["args"]["slot"], job["id"])
        self.took(run, reply)

    def report(self, index: int) -> None:
        run, reply = self.held.pop(index)
        if reply.verdict == "item" and reply.ahead and not reply.crashes and self.keep(run, reply):
            return
        outcome = self.dice.choice(["succeeded"] * 4 + ["failed", "released", "returned"])
        columns: dict[str, Any] = {"wish": self.dice.choice(["next", "next", "slice", "end"])}
        if outcome == "released":
            columns["retry_in"] = self.dice.choice([0.0, 5.0, 50.0])
        ready = self.ready.pop(reply.epoch, None)
        if reply.verdict != "item":
            (answer,) = self.p.report(run, 0, reply.entry(**columns))
        else:
            if ready is not None:
                columns["ahead"] = ready.position
            entry = reply.entry(outcome, **columns)
            (answer,) = self.p.report(run, 0, entry)
            if self.dice.random() < 0.2:  # the reply is lost: sent again, the answer is the same
                (again,) = self.p.report(run, 0, entry)
                assert (again.verdict, again.position) == (answer.verdict, answer.position)
        if ready is None:
            self.took(run, answer)
        elif answer.verdict in ("item", "last"):
            self.held.append((run, ready))
            if answer.verdict == "item":
                self.ready[reply.epoch] = answer
            if answer.freed:
                pass_on(self.p, run)

    def keep(self, run: int, reply: Reply) -> bool:
        """Ask for an item to keep ready, or give it back; else it is time to report."""
        ready = self.ready.get(reply.epoch)
        if ready is None and self.dice.random() < 0.5:
            (answer,) = self.p.report(run, 0, reply.entry(wish="ahead"))
            if answer.verdict == "item":
                self.ready[reply.epoch] = answer
            elif answer.verdict == "lost":
                return True
        elif ready is not None and self.dice.random() < 0.2:
            columns = [run, reply.slot, reply.epoch, ready.position]
            if self.p.value("SELECT fanout_give_back_v1(%s, %s, %s, %s)", *columns):
                del self.ready[reply.epoch]
        else:
            return False
        self.held.append((run, reply))
        return True

    def took(self, run: int, reply: Reply) -> None:
        if reply.verdict in ("item", "wait", "move"):
            self.held.append((run, reply))
        if reply.freed and self.dice.random() < 0.9:  # else the process dies before
            pass_on(self.p, run)

    def sweep(self) -> None:
        self.p.advance(self.dice.choice([1.1, 10.0, 14.0]))
        self.p.renew([(run, reply.slot, reply.epoch or 0) for run, reply in self.held])
        self.p.sweep(LEASE)
        for row in self.p.rows("SELECT min(id) AS id FROM fanout_runs WHERE wants > 0"):
            if row["id"] is not None:
                pass_on(self.p, row["id"])

    def check(self) -> None:
        invariants.check(self.p.conn)
        for run in self.runs:
            found = self.p.rows("SELECT * FROM fanout_audit_run_v1(%s, 30)", run)
            assert not [row for row in found if row["kind"] != "missing_slots"], found
        for row in self.p.rows(
            "SELECT name, concurrency, fanout_limit_used_v1(name) AS used FROM fanout_limits"
            " WHERE NOT keyed"
        ):
            assert row["used"] <= row["concurrency"], row
        for row in self.p.rows("SELECT key, used FROM fanout_lanes_used_v1('tenant', 0, '{}')"):
            assert row["used"] <= self.tenant, row

    def drain(self) -> None:
        for run in self.runs:
            self.p.resume(run)
        for _ in range(400):
            if not self.p.value("SELECT count(*) FROM fanout_runs WHERE closed_at IS NULL"):
                return
            self.begin()
            while self.held:
                run, reply = self.held.pop()
                ready = self.ready.pop(reply.epoch, None)
                if ready is not None:
                    self.held.append((run, ready))
                    entry = reply.entry("succeeded", wish="end", ahead=ready.position)
                    (answer,) = self.p.report(run, 0, entry)
                    assert answer.verdict in ("last", "lost", "ended"), answer
                    continue
                if reply.verdict == "item":
                    (answer,) = self.p.report(run, 0, reply.entry("succeeded"))
                else:
                    (answer,) = self.p.report(run, 0, reply.entry(wish="end"))
                self.took(run, answer)
                self.check()
            self.sweep()
        raise AssertionError(
            self.p.rows("SELECT * FROM fanout_runs WHERE closed_at IS NULL"),
            self.p.rows("SELECT * FROM fanout_slots"),
        )


# -- at the same time


@pytest.mark.slow
def test_processes_at_the_same_time(connect: Callable[..., Connection]) -> None:
    """E01, D10: six processes, eight runs, shared limits: never above, no deadlock, all close."""
    first = Protocol(connect())
    specs: list[tuple[list[Row], list[str] | None]] = [
        ([few(3)], None),
        ([few(3), few(4, name="after")], None),
        ([tenant(2)], ["a", "a", "b", "c"]),
        ([few(3), tenant(2)], ["a", "b"]),
    ]
    runs = [stage(first, 60, *some, keys=keys, max_in_flight=9) for some, keys in [*specs, *specs]]
    above: list[Row] = []
    with ThreadPoolExecutor(8) as pool:
        over = threading.Event()
        workers = [
            pool.submit(_work, Protocol(connect()), random.Random(n), over) for n in range(6)
        ]
        watcher = pool.submit(_watch, Protocol(connect()), over, above)
        closed = "SELECT count(*) FROM fanout_runs WHERE closed_at IS NOT NULL"
        wait_until(lambda: first.value(closed) == len(runs), 60)
        over.set()
        for future in (*workers, watcher):
            future.result(10)
    assert not above
    assert watcher.result() > 50
    assert {first.progress(run)["succeeded"] for run in runs} == {60}
    deadlocks = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
    assert first.value(deadlocks) == 0
    invariants.check(first.conn)


def _work(p: Protocol, dice: random.Random, over: threading.Event) -> None:
    """Be one process: up to five slots, passing on, and now and then a sweep."""
    held: list[tuple[int, Reply]] = []
    while not over.is_set():
        with contextlib.suppress(psycopg.errors.SerializationFailure):
            if len(held) < 5 and (job := p.fetch()):
                if job["task_name"] == "child":
                    run = job["args"]["run_id"]
                    _take_in(p, held, run, p.begin(run, job["args"]["slot"], job["id"]))
                p.finish(job["id"])
            elif held:
                run, reply = held.pop(dice.randrange(len(held)))
                (answer,) = p.report(run, 0, _outcome(reply, dice))
                _take_in(p, held, run, answer)
            if dice.random() < 0.02:
                p.sweep()
                for row in p.rows("SELECT min(id) AS id FROM fanout_runs WHERE wants > 0"):
                    pass_on(p, row["id"] or 0)


def _outcome(reply: Reply, dice: random.Random) -> Entry:
    if reply.verdict != "item":
        return reply.entry()
    if dice.random() < 0.2:
        return reply.entry("released", retry_in=0.0)
    return reply.entry("succeeded", wish=dice.choice(["next", "slice"]))


def _take_in(p: Protocol, held: list[tuple[int, Reply]], run: int, reply: Reply) -> None:
    if reply.verdict in ("item", "wait", "move"):
        held.append((run, reply))
    if reply.freed:
        pass_on(p, run)


def _watch(p: Protocol, over: threading.Event, above: list[Row]) -> int:
    looks = 0
    while not over.is_set():
        above += p.rows(
            "SELECT name, concurrency, fanout_limit_used_v1(name) AS used FROM fanout_limits"
            " WHERE NOT keyed AND fanout_limit_used_v1(name) > concurrency"
        )
        above += p.rows("SELECT * FROM fanout_lanes_used_v1('tenant', 0, '{}') WHERE used > 2")
        looks += 1
    return looks
