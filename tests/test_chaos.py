"""The chaos harness: its own parts, and a short round of it."""

import dataclasses
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import conninfo

from tests import servers
from tests.chaos import breakage, crew, faults, hands, judges, pieces, plan
from tests.chaos.__main__ import report
from tests.chaos.harness import Options, Result
from tests.chaos.proxy import Proxy
from tests.chaos.record import Record
from tests.waiting import wait_until
from tests.workers import ROOT

SEED = 1


@pytest.mark.acceptance
@pytest.mark.slow
@pytest.mark.pg18_only  # it starts a server of its own
@pytest.mark.timeout(300)
def test_a_round_loses_nothing() -> None:
    """30 s of faults; `make chaos SECONDS=300` is the long form."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.chaos", "--seconds=30", f"--seed={SEED}", "--quiet"],
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "verdict: 0 lost, 0 double, " in done.stdout


# -- the plan


def test_a_seed_makes_the_same_plan_and_the_same_runs() -> None:
    specs, again = pieces.specs(SEED), pieces.specs(SEED)
    assert plan.plan(SEED, 300) == plan.plan(SEED, 300) != plan.plan(SEED + 1, 300)
    for _ in range(20):
        spec = next(specs)
        assert spec == next(again)
        listed = pieces.pieces(spec.listing, spec.count, spec.seed)
        assert listed == pieces.pieces(spec.listing, spec.count, spec.seed)
        assert len({piece.name for piece in listed}) == spec.count


def test_a_longer_round_begins_like_a_shorter_one() -> None:
    short = plan.plan(SEED, 30)
    assert plan.plan(SEED, 300)[: len(short)] == short


def test_a_long_round_has_each_kind_and_enough_of_them() -> None:
    long = plan.plan(SEED, 300)
    assert len(long) > 150
    assert {fault.kind for fault in long} == set(plan.WEIGHTS)
    for kind in plan.WEIGHTS:
        name = kind.replace(" ", "_")
        assert hasattr(breakage.Breakage, name) or hasattr(hands.Hands, name), kind


# -- the proxy


@pytest.fixture
def proxy(server: servers.Server | servers.GivenServer) -> Iterator[Proxy]:
    if not isinstance(server, servers.Server):
        pytest.skip("the proxy goes to a socket of a server of ours")
    with Proxy(server.root / f".s.PGSQL.{server.port}") as proxy:
        yield proxy


@pytest.fixture
def connected(proxy: Proxy, bare_dsn: str) -> Iterator[psycopg.Connection[Any]]:
    dsn = conninfo.make_conninfo(bare_dsn, host="127.0.0.1", port=proxy.port, connect_timeout=3)
    connection = psycopg.connect(dsn, autocommit=True)
    connection.execute("CREATE TABLE IF NOT EXISTS noted (n int)")
    yield connection
    connection.close()


def _noted(dsn: str) -> int:
    with psycopg.connect(dsn) as connection:
        row = connection.execute("SELECT count(*) FROM noted").fetchone()
    assert row is not None
    return int(row[0])


def _all() -> bool:
    return True


def test_what_passes_is_unchanged(connected: psycopg.Connection[Any]) -> None:
    text = "x" * 1_000_000
    assert connection_says(connected, text) == text


def connection_says(connection: psycopg.Connection[Any], text: str) -> str:
    row = connection.execute("SELECT %s::text", [text]).fetchone()
    assert row is not None
    return str(row[0])


def test_a_cut_link_is_broken(proxy: Proxy, connected: psycopg.Connection[Any]) -> None:
    assert proxy.cut(lambda: False) == 0
    assert proxy.cut(_all) == 1
    with pytest.raises(psycopg.OperationalError):
        connected.execute("SELECT 1")


def test_a_statement_whose_reply_is_lost_was_executed(
    proxy: Proxy, connected: psycopg.Connection[Any], bare_dsn: str
) -> None:
    assert proxy.lose_replies(_all) == 1
    with pytest.raises(psycopg.OperationalError):
        connected.execute("INSERT INTO noted VALUES (1)")
    assert _noted(bare_dsn) == 1


def test_a_lost_statement_was_not_executed(
    proxy: Proxy, connected: psycopg.Connection[Any], bare_dsn: str
) -> None:
    assert proxy.lose_requests(_all) == 1
    with pytest.raises(psycopg.OperationalError):
        connected.execute("INSERT INTO noted VALUES (1)")
    assert _noted(bare_dsn) == 0


def test_what_was_to_be_lost_is_forgiven(proxy: Proxy, connected: psycopg.Connection[Any]) -> None:
    proxy.lose_replies(_all)
    proxy.heal()
    assert connection_says(connected, "fine") == "fine"


def test_swallowed_replies_end_with_a_cut(
    proxy: Proxy, connected: psycopg.Connection[Any], bare_dsn: str
) -> None:
    with _meanwhile(lambda: proxy.swallow(_all, 0.5)), pytest.raises(psycopg.OperationalError):
        connected.execute("INSERT INTO noted VALUES (1)")
    assert _noted(bare_dsn) == 1


def test_a_frozen_link_goes_on(proxy: Proxy, connected: psycopg.Connection[Any]) -> None:
    began = time.monotonic()
    with _meanwhile(lambda: proxy.freeze(_all, 0.5)):
        assert connection_says(connected, "late") == "late"
    assert time.monotonic() - began >= 0.4


def test_a_slow_link_is_slow_for_a_time(proxy: Proxy, connected: psycopg.Connection[Any]) -> None:
    with _meanwhile(lambda: proxy.delay(_all, 0.5, 0.2)):
        began = time.monotonic()
        connected.execute("SELECT 1")
        assert time.monotonic() - began >= 0.3
    began = time.monotonic()
    connected.execute("SELECT 1")
    assert time.monotonic() - began < 0.3


def test_nobody_gets_in_while_it_refuses(
    proxy: Proxy, connected: psycopg.Connection[Any], bare_dsn: str
) -> None:
    dsn = conninfo.make_conninfo(bare_dsn, host="127.0.0.1", port=proxy.port)
    with _meanwhile(lambda: proxy.refuse(0.5)):
        with pytest.raises(psycopg.OperationalError):
            connected.execute("SELECT 1")
        with pytest.raises(psycopg.OperationalError):
            psycopg.connect(dsn)
    psycopg.connect(dsn).close()


class _meanwhile:
    """Run something in a thread during the block; its beginning comes before the block's."""

    def __init__(self, act: Callable[[], object]) -> None:
        self._thread = threading.Thread(target=act)

    def __enter__(self) -> None:
        self._thread.start()
        time.sleep(0.1)

    def __exit__(self, *error: object) -> None:
        self._thread.join()


# -- the crew


def test_what_workers_leave_is_found_and_ended() -> None:
    mark = "test-of-left-over"
    with subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)"],
        env={**os.environ, crew.MARK_VARIABLE: mark},
        start_new_session=True,
    ) as process:
        wait_until(lambda: crew.marked(mark))
        assert crew.left_over(mark, timeout=0.2) == [process.pid]
        process.wait()
    assert crew.left_over(mark) == []


# -- the judges: each finds what it is there for, and nothing where nothing is wrong

NOW = datetime(2026, 1, 1, tzinfo=UTC)
SPEC = pieces.Spec(number=1, listing="light", count=1, seed="x")


def _at(seconds: float) -> float:
    return NOW.timestamp() + seconds


PLACE = {"run_id": 1, "position": 0}
START = {"event": "start", "run": 1, "position": 0, "claim": 1, "attempt": 1, "mark": "m", "pid": 7}
END = {**START, "event": "end", "outcome": "ok"}
CALL = {"run": 1, "generation": 1, "task": "complete", "at": NOW.timestamp()}
ITEM = {
    **PLACE, "status": "succeeded", "claim": 1, "failures": 0, "crashes": 0,
    "result": {"mark": "m"}, "error": None, "error_type": None, "payload": {"name": "piece 0"},
}  # fmt: skip
CHANGE = {
    **PLACE, "claim": 1, "failures": 0, "crashes": 0, "was_crashes": 0, "at": NOW, "by": "w",
}  # fmt: skip
HANDED = {**CHANGE, "was": "pending", "status": "processing"}
CALLBACK = {"run_id": 1, "generation": 1, "task": "app.complete"}
GOOD = Record(
    lease=2.0,
    spans=[],
    specs={1: SPEC},
    cancelled=frozenset(),
    lives=[crew.Life(name="w", pid=7, began=_at(0), stops=[(_at(20), _at(30))], ended=_at(60))],
    lines=[START, END, {**CALL, "event": "call"}, {**CALL, "event": "called"}],
    runs=[
        {
            "id": 1, "status": "completed", "reason": None, "sealed_at": NOW, "total": 1,
            "generation": 1,
        }
    ],
    items=[ITEM],
    callbacks=[{**CALLBACK, "state": "done"}],
    item_changes=[
        HANDED,
        {**CHANGE, "was": "processing", "status": "succeeded", "at": NOW + timedelta(seconds=3)},
    ],
    run_changes=[{"run_id": 1, "generation": 1, "was": "processing", "status": "completed"}],
    callback_changes=[
        {**CALLBACK, "was": "running", "state": "done", "at": NOW + timedelta(seconds=9)}
    ],
)  # fmt: skip


def _changed(row: Mapping[str, Any], **values: Any) -> list[dict[str, Any]]:
    return [{**row, **values}]


def _rescued(item: int, was: int, claim: int = 2) -> dict[str, Any]:
    crashes = {"was_crashes": was, "crashes": was + 1}
    states = {"was": "processing", "status": "pending"}
    return {**CHANGE, "position": item, "claim": claim, **crashes, **states}


def test_judges_find_nothing_in_a_good_record() -> None:
    assert {judge.__name__: list(judge(GOOD)) for judge in judges.JUDGES} == {
        judge.__name__: [] for judge in judges.JUDGES
    }
    assert GOOD.figures() == Counter(
        runs=1, generations=1, items=1, attempts=1, callbacks=1, succeeded=1
    )
    assert GOOD.longest_stall() == 0.0


BAD: dict[str, tuple[judges.Judge, dict[str, Any]]] = {
    "a run that is gone": (judges.runs_are_closed, {"runs": []}),
    "an open run": (
        judges.runs_are_closed,
        {"runs": _changed(GOOD.runs[0], status="processing")},
    ),
    "a run that nobody cancelled": (
        judges.runs_are_closed,
        {"runs": _changed(GOOD.runs[0], status="cancelled")},
    ),
    "a run with items too few": (
        judges.runs_are_closed,
        {"runs": _changed(GOOD.runs[0], total=0)},
    ),
    "an item at work": (judges.items_are_final, {"items": _changed(ITEM, status="processing")}),
    "an item dropped": (judges.items_are_final, {"items": _changed(ITEM, status="cancelled")}),
    "an item that ended twice": (
        judges.items_end_once,
        {
            "item_changes": [
                *GOOD.item_changes,
                {**CHANGE, "was": "succeeded", "status": "failed"},
            ]
        },
    ),
    "an item whose past was rewritten": (
        judges.items_end_once,
        {
            "item_changes": [
                HANDED,
                HANDED,
            ]
        },
    ),
    "a claim begun twice": (judges.claims_are_begun_once, {"lines": [START, START, END]}),
    "an outcome of nobody": (
        judges.outcomes_are_of_the_last_try,
        {"lines": [START, {**END, "mark": "other"}]},
    ),
    "an outcome of an earlier claim": (
        judges.outcomes_are_of_the_last_try,
        {"items": _changed(ITEM, claim=2)},
    ),
    "a failure not counted": (
        judges.outcomes_are_of_the_last_try,
        {"items": _changed(ITEM, failures=1)},
    ),
    "a worker lost too seldom": (
        judges.outcomes_are_of_the_last_try,
        {"items": _changed(ITEM, status="failed", error_type="WorkerLost", crashes=2)},
    ),
    "a poison item that succeeded": (
        judges.items_end_as_they_must,
        {"items": _changed(ITEM, payload={"name": "piece 0", "deed": "poison"})},
    ),
    "a run that closed twice": (
        judges.runs_close_no_more_than_once,
        {"run_changes": [*GOOD.run_changes, *GOOD.run_changes]},
    ),
    "a callback owed": (
        judges.callbacks_are_done_once,
        {"callbacks": [{**CALLBACK, "state": "owed"}]},
    ),
    "a callback never called": (judges.callbacks_are_done_once, {"lines": [START, END]}),
    "a callback done twice": (
        judges.callbacks_are_done_once,
        {"callback_changes": [*GOOD.callback_changes, *GOOD.callback_changes]},
    ),
    "a callback begun when it was done": (
        judges.callbacks_rest_when_done,
        {"lines": [{**CALL, "event": "call", "at": NOW.timestamp() + 10}]},
    ),
    "an item taken from a worker that was well": (
        judges.nobody_is_charged_for_nothing,
        {"item_changes": [HANDED, _rescued(0, 0)]},
    ),
    "wrong counters that a sweep has repaired": (
        judges.nobody_is_alarmed,
        {"lines": [{"event": "alarm", "action": "sweep_repair", "pid": 7, "message": "Run 1"}]},
    ),
    "a death charged to two suspects": (
        judges.innocents_are_charged_little,
        {
            "item_changes": [
                HANDED,
                {**HANDED, "position": 1},
                _rescued(0, 1),
                _rescued(1, 1),
            ]
        },
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_judges_find_what_is_wrong(what: str) -> None:
    judge, changes = BAD[what]
    assert list(judge(dataclasses.replace(GOOD, **changes)))


@pytest.mark.parametrize(
    ("seconds", "how", "well"),
    [
        (10, "killed", True),
        (25, "killed", False),
        (32, "killed", False),
        (50, "killed", True),
        (70, "killed", False),
        (70, "asked to end", True),
    ],
)
def test_the_well_are_told_from_the_dead(seconds: float, how: str, well: bool) -> None:
    rescued = {**_rescued(0, 0), "at": NOW + timedelta(seconds=seconds)}
    life = dataclasses.replace(GOOD.lives[0], how=how)
    record = dataclasses.replace(GOOD, lives=[life], item_changes=[HANDED, rescued])
    assert bool(record.rescues_from_the_well()) is well


@pytest.mark.parametrize(
    ("kind", "seconds", "explains"),
    [("freeze", 3.0, True), ("freeze", 0.1, False), ("kill", 3.0, False)],
)
def test_a_worker_that_was_cut_off_may_lose_items(
    kind: str, seconds: float, explains: bool
) -> None:
    fault = plan.Fault(number=0, at=0.0, kind=kind, leases=1.0, seed="x")
    span = faults.Span(fault=fault, began=_at(-1), ended=_at(seconds - 1), hit="1")
    record = dataclasses.replace(GOOD, spans=[span], item_changes=[HANDED, _rescued(0, 0)])
    assert (not list(judges.nobody_is_charged_for_nothing(record))) is explains


def test_clean_items_and_one_suspect_may_be_charged() -> None:
    changed = dataclasses.replace(
        GOOD,
        item_changes=[
            *({**HANDED, "position": position} for position in range(3)),
            *(_rescued(0, 1), _rescued(1, 0), _rescued(2, 0)),
        ],
    )
    assert list(judges.innocents_are_charged_little(changed)) == []


# -- the report


OPTIONS = Options(seconds=60.0, seed=4711, folder=Path())


def _result(**findings: list[str]) -> Result:
    return Result(
        findings=findings,
        faults=Counter({"kill": 2, "cut": 1}),
        missed=Counter(),
        ends=Counter(killed=2),
        figures=GOOD.figures(),
        longest_stall=1.5,
        rest=2.0,
    )


def test_a_good_round_says_so() -> None:
    text = report(_result(), OPTIONS)
    assert text.splitlines()[-1] == "verdict: 0 lost, 0 double, 3 faults survived"
    assert "Done to it: cut 1, kill 2" in text


def test_a_bad_round_shows_the_rows_and_the_seed() -> None:
    text = report(
        _result(runs_are_closed=["run 7 is processing"], runs_close_no_more_than_once=["run 8"]),
        OPTIONS,
    )
    assert "run 7 is processing" in text
    assert "verdict: 1 lost, 1 double, " in text
    assert "make chaos SECONDS=60 SEED=4711" in text


def test_logs_go_below_build() -> None:
    """Where git does not look."""
    assert Path(ROOT / "build").name in (ROOT / ".gitignore").read_text()
