"""The store's calls against the tables: what they answer for what is there, and what is not."""

import uuid
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from fanout_procrastinate import database, models, store
from tests.support import begun, direct, entry, sealed, started

Conn = psycopg.Connection[dict[str, Any]]
NOBODY = 77


@pytest.fixture
def own(dsn: str) -> Iterator[database.Database]:
    with direct(dsn, size=1) as made:
        yield made


def test_unknown_runs(own: database.Database) -> None:
    nobody = models.Holding(NOBODY, 0, 1)
    answers: list[tuple[store.Call[Any], Any]] = [
        (store.manager_begin(NOBODY, 1), None),
        (store.append(NOBODY, 1, [None], ["1"]), None),
        (store.seal(NOBODY, 1), None),
        (store.manager_fail(NOBODY, 1, reason="x", retry_in=1.0), None),
        (store.callback_begin(NOBODY, 1, "x", 1), None),
        (store.callback_end(NOBODY, 1, "x", 1, error=None, retry_in=None), False),
        (store.renew([nobody], 1.0), [(nobody, "lost")]),
        (store.renew([], 1.0), []),
        (store.renew_manager(NOBODY, 1), False),
        (store.renew_callback(NOBODY, 1, "x", 1), False),
        (store.still_mine(nobody, 0, 1), False),
        (store.sweep_plan(30.0, 10), {}),
        (store.sweep_run(NOBODY, 30.0), {}),
        (store.untidy(10), []),
        (store.tidy(NOBODY, 10), 0),
        (store.prune(1.0, 10), 0),
        (store.prune_jobs(["x"], 1.0, 10), 0),
        (store.stop(NOBODY, status="failed", reason=None, abort=False), None),
        (store.pause(NOBODY), None),
        (store.resume(NOBODY), None),
        (store.update(NOBODY, {"max_in_flight": 3}), None),
        (store.retry_failed(NOBODY, statuses=["failed"], error_type=None), None),
        (store.progress(NOBODY), None),
        (store.closed_progress(NOBODY, 1), None),
        (store.run(NOBODY), None),
        (store.find_run("x", "k"), None),
        (store.runs(name=None, status=None, tag=None, limit=5), []),
        (store.items(NOBODY, status=None, after=-1, limit=5), []),
        (store.items(NOBODY, status="failed", after=-1, limit=5), []),
        (store.errors(NOBODY, 5), []),
    ]
    for call, expected in answers:
        assert own.run(call) == expected, call.name
    reply = own.run(store.begin(NOBODY, 0, 1, token=str(uuid.uuid4()), ledger=3, suspect=True))
    assert (reply.verdict, reply.epoch) == ("ended", None)
    work = models.Entry(slot=0, epoch=1, wish="next", position=0, claim=1, outcome="succeeded")
    pull = models.Entry(slot=1, epoch=1, wish="next")
    replies = own.run(store.report(NOBODY, 0, [work, pull], suspect=True))
    assert [reply.verdict for reply in replies] == ["lost", "ended"]


def test_start_answers_what_became_of_it(own: database.Database) -> None:
    spec = {
        "name": "lister",
        "run_key": "k",
        "args_digest": "1",
        "manager_task": "lister",
        "child_task": "child",
        "child_queue": "papers",
        "manager_queue": "papers",
        "max_in_flight": 10,
        "args": {"n": 1},
        "tags": ["a"],
    }
    first = own.run(store.start(spec))
    assert (first.outcome, first.status) == ("created", "pending")
    again = own.run(store.start(spec))
    assert again == models.Started(run_id=first.run_id, outcome="existing", status="pending")
    other = own.run(store.start(spec | {"args_digest": "2"}))
    assert (other.outcome, other.run_id) == ("conflict", first.run_id)
    assert own.run(store.find_run("lister", "k")) == first.run_id
    facts = own.run(store.run(first.run_id))
    assert facts == models.RunFacts(
        run_id=first.run_id,
        name="lister",
        run_key="k",
        args={"n": 1},
        tags=("a",),
        manager_task="lister",
        child_task="child",
        child_queue="papers",
        ledgers=0,
    )


def test_staging_is_fenced(own: database.Database) -> None:
    run_id = started(own, manager_task="lister")
    first = own.run(store.manager_begin(run_id, 1))
    assert first == models.ManagerClaim(fence=1, args={}, attempt=1, child_task="child")
    assert own.run(store.append(run_id, 1, ["a", "b", "a"], ["1", "2", "3"])) == 2
    second = own.run(store.manager_begin(run_id, 2))
    assert second is not None and second.fence == 2
    # What the first still sends is refused; what it staged is gone.
    assert own.run(store.append(run_id, 1, ["c"], ["1"])) is None
    assert own.run(store.seal(run_id, 1)) is None
    assert own.run(store.renew_manager(run_id, 1)) is False
    assert own.run(store.renew_manager(run_id, 2)) is True
    assert own.run(store.append(run_id, 2, ["a"], ['{"x": "é"}'])) == 1
    assert own.run(store.seal(run_id, 2)) == "processing"
    assert own.run(store.seal(run_id, 2)) == "processing"  # the reply was lost: asked again
    (item,) = own.run(store.items(run_id, status=None, after=-1, limit=9))
    assert (item.key, item.payload, item.attempts) == ("a", {"x": "é"}, 0)


def test_item_by_item(own: database.Database, conn: Conn) -> None:
    run_id = sealed(own, "1", "2", "3", "4")
    reply = begun(own, run_id, conn)
    assert (reply.verdict, reply.position, reply.claim, reply.payload) == ("item", 0, 1, "1")
    assert (reply.item_key, reply.failures, reply.crashes, reply.stop) == ("k0", 0, 0, False)
    assert reply.epoch is not None
    holding = models.Holding(run_id, reply.slot, reply.epoch)
    assert own.run(store.still_mine(holding, 0, 1))
    assert not own.run(store.still_mine(holding, 0, 2))
    (item, *_) = own.run(store.items(run_id, status="processing", after=-1, limit=9))
    assert (item.position, item.attempts, item.status) == (0, 1, "processing")

    first = entry(reply, result='{"x": null}', sanitised=True)
    (reply,) = own.run(store.report(run_id, 0, [first], suspect=True))
    assert (reply.verdict, reply.position) == ("item", 1)
    # Sent again, for the reply was lost: the same answer, nothing counted twice.
    assert own.run(store.report(run_id, 0, [first], suspect=True)) == [reply]
    failed = entry(reply, "failed", result=None, error='{"type": "E", "message": "m"}')
    (reply,) = own.run(store.report(run_id, 0, [failed], suspect=True))
    (reply,) = own.run(
        store.report(
            run_id, 0, [entry(reply, "released", retry_in=3600.0, result=None)], suspect=True
        )
    )
    (reply,) = own.run(
        store.report(run_id, 0, [entry(reply, "returned", result=None, wish="end")], suspect=True)
    )
    assert reply.verdict == "ended"
    items = own.run(store.items(run_id, status=None, after=-1, limit=9))
    assert [(item.status, item.attempts, item.crashes) for item in items] == [
        ("succeeded", 1, 0),
        ("failed", 1, 0),
        ("pending", 1, 0),
        ("pending", 0, 0),
    ]
    assert items[0].result == {"x": None} and items[0].sanitised
    assert items[1].error == {"type": "E", "message": "m"}
    assert items[2].due is not None and items[0].finished_at is not None
    (group,) = own.run(store.errors(run_id, 5))
    assert (group.error_type, group.count, group.message, group.key) == ("E", 1, "m", "k1")
    progress = own.run(store.progress(run_id))
    assert progress is not None
    assert (progress.pending, progress.waiting, progress.succeeded, progress.failed) == (2, 2, 1, 1)
    late = own.run(store.report(run_id, 0, [entry(begun(own, run_id, conn), None)], suspect=True))
    assert [reply.verdict for reply in late] == ["item"]


def test_renewal_tells_what_became_of_each_slot(own: database.Database, conn: Conn) -> None:
    run_id = sealed(own, "1", "2")
    one, two = begun(own, run_id, conn), begun(own, run_id, conn)
    assert one.epoch is not None and two.epoch is not None
    holdings = [
        models.Holding(run_id, one.slot, one.epoch),
        models.Holding(run_id, two.slot, two.epoch),
        models.Holding(run_id, two.slot, two.epoch - 1),
    ]
    assert own.run(store.renew(holdings, 0.0)) == [(holdings[2], "lost")]
    own.run(store.stop(run_id, status="cancelled", reason="x", abort=False))
    assert own.run(store.renew(holdings[:2], 0.0)) == [
        (holdings[0], "stop"),
        (holdings[1], "stop"),
    ]
    own.run(store.stop(run_id, status="cancelled", reason="x", abort=True))
    assert {verdict for _, verdict in own.run(store.renew(holdings[:2], 0.0))} == {"abort"}


def test_callbacks_begin_and_end_once(own: database.Database, conn: Conn) -> None:
    run_id = sealed(
        own, callbacks=[{"task": "done", "on": "complete", "queue": "papers", "priority": 0}]
    )
    (row,) = conn.execute("SELECT job_id FROM fanout_callbacks").fetchall()
    names = (run_id, 1, "done", row["job_id"])
    assert own.run(store.callback_begin(*names)) == 1
    assert own.run(store.callback_begin(*names)) is None
    assert own.run(store.renew_callback(*names)) is True
    assert own.run(store.callback_end(*names, error='{"type": "E"}', retry_in=0.0)) is True
    assert own.run(store.callback_end(*names, error=None, retry_in=None)) is False
    (row,) = conn.execute("SELECT job_id, state FROM fanout_callbacks").fetchall()
    again = (run_id, 1, "done", row["job_id"])
    assert row["state"] == "owed" and again != names
    assert own.run(store.callback_begin(*names)) is None
    assert own.run(store.callback_begin(*again)) == 2
    assert own.run(store.callback_end(*again, error=None, retry_in=None)) is True
    progress = own.run(store.progress(run_id))
    assert progress is not None and dict(progress.callbacks) == {"done": "done"}
    assert own.run(store.closed_progress(run_id, 1)) is not None
    assert own.run(store.closed_progress(run_id, None)) is not None
    assert own.run(store.closed_progress(run_id, 2)) is None
