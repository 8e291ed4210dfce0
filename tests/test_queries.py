"""The named statements: how the file is read, and that it fits its one caller."""

import re
from typing import Any

import pytest

from fanout_procrastinate import models, queries, store
from fanout_procrastinate.store import Call

ENTRY = models.Entry(slot=0, epoch=1, wish="next")
HOLDING = models.Holding(1, 0, 1)
HOLDER = "00000000-0000-0000-0000-000000000001"

CALLS: list[Call[Any]] = [
    store.start({"name": "x"}),
    store.manager_begin(1, 1),
    store.append(1, 1, [None], ["1"]),
    store.seal(1, 1),
    store.manager_fail(1, 1, reason="x", retry_in=None),
    store.callback_begin(1, 1, "x", 1),
    store.callback_end(1, 1, "x", 1, error=None, retry_in=None),
    store.begin(1, 0, 1, token="x", ledger=None, suspect=False),
    store.report(1, 0, [ENTRY], suspect=False),
    store.pass_on(1),
    store.give_back(HOLDING, 0),
    store.lines(),
    store.take_permit(
        [{"name": "x"}], key=None, holder=HOLDER, label="", run_id=None, position=None, lease=30.0
    ),
    store.give_permit(HOLDER),
    store.renew_permits([HOLDER]),
    store.serve_lines("x"),
    store.sweep_permits(),
    store.update_limit("x"),
    store.pause_limit({"name": "x"}, 1.0),
    store.limits(),
    store.run_limits(1),
    store.audit_limits(),
    store.renew([HOLDING], 1.0),
    store.renew_manager(1, 1),
    store.renew_callback(1, 1, "x", 1),
    store.still_mine(HOLDING, 0, 1),
    store.silent(30.0),
    store.sweep_plan(30.0, 10),
    store.sweep_run(1, 30.0),
    store.unserved(1),
    store.untidy(1),
    store.tidy(1, 1),
    store.prune(1.0, 1),
    store.prune_jobs(["x"], 1.0, 1),
    store.audit_runs(None),
    store.audit_state([1], 30.0),
    store.audit_items(1, 1.0),
    store.audit_orphans(),
    store.limit_time(1.0),
    store.stop(1, status="failed", reason=None, abort=False),
    store.pause(1),
    store.resume(1),
    store.update(1, {}),
    store.retry_failed(1, statuses=["failed"], error_type=None),
    store.progress(1),
    store.closed_progress(1, None),
    store.progresses([1]),
    store.open_runs(1),
    store.hint(["{}"]),
    store.run(1),
    store.trace(1),
    store.closes(),
    store.find_run("x", "k"),
    store.runs(name=None, status=None, tag=None, limit=1),
    store.items(1, status=None, after=-1, limit=1),
    store.items(1, status="failed", after=-1, limit=1),
    store.errors(1, 1),
    store.item_list(1, status=None, search=None, after=-1, until=1, limit=1),
    store.item_list(1, status="failed", search=None, after=-1, until=1, limit=1),
    store.slots(1, 1),
    store.pace(1, last=1, stride=1),
]


def test_blocks_are_found_by_their_names() -> None:
    assert queries.parse(
        "-- A file's own words.\n"
        "-- one --\n-- Purpose.\nSELECT 1\n\n"
        "-- two_2 --\n-- Purpose,\n-- in two lines.\nSELECT '-- x --'\n-- a remark\nFROM y\n"
    ) == {"one": "SELECT 1", "two_2": "SELECT '-- x --'\n-- a remark\nFROM y"}
    assert queries.parse("nothing") == {}


def test_block_without_a_purpose_is_none() -> None:
    assert queries.parse("-- one --\nSELECT 1\n") == {}


def test_every_statement_has_its_caller_and_every_call_its_statement() -> None:
    assert {call.name for call in CALLS} == set(queries.QUERIES)


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
def test_parameters_are_those_that_the_statement_names(call: Call[Any]) -> None:
    named = set(re.findall(r"%\((\w+)\)s", call.sql))
    assert named == set(call.params)
    # Nothing else that the driver would take for a parameter.
    assert "%" not in re.sub(r"%\(\w+\)s|%%", "", call.sql)
