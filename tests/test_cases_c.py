"""Cases of recovery that need no worker: whose clock decides, and what a healthy sweep writes."""

import datetime
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

from fanout_procrastinate import database, models, store
from fanout_procrastinate.sweeper import Sweeper
from tests.support import begun, direct, entry, sealed
from tests.waiting import wait_until

Conn = psycopg.Connection[dict[str, Any]]

LEASE_CALLS: list[store.Call[Any]] = [
    store.begin(1, 0, 2, token="t", ledger=0, suspect=True),
    store.report(
        1, 0, [models.Entry(slot=0, epoch=1, wish="next", outcome="released", retry_in=3.0)],
        suspect=False,
    ),
    store.renew([models.Holding(1, 0, 1)], 5.0),
    store.renew_manager(1, 1),
    store.renew_callback(1, 1, "told", 3),
    store.manager_begin(1, 4),
    store.callback_begin(1, 1, "told", 3),
    store.still_mine(models.Holding(1, 0, 1), 0, 1),
    store.sweep_plan(30.0, 100),
    store.sweep_run(1, 30.0),
]  # fmt: skip


@pytest.fixture
def own(dsn: str) -> Iterator[database.Database]:
    with direct(dsn, size=1) as made:
        yield made


def _values(value: object) -> Iterator[object]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for one in value:
            yield from _values(one)
    else:
        yield value


@pytest.mark.parametrize("call", LEASE_CALLS, ids=lambda call: call.name)
def test_no_time_of_a_client_is_sent(call: store.Call[Any], conn: Conn) -> None:
    """C12: what decides about leases is told durations and numbers; the time is the server's."""
    sent = list(_values(dict(call.params)))
    assert sent
    assert not [one for one in sent if isinstance(one, datetime.date | datetime.time)]
    assert not [one for one in sent if isinstance(one, int | float) and one > 1_000_000_000]
    functions = conn.execute(
        "SELECT proname, prosrc, pg_get_function_arguments(oid) AS arguments FROM pg_proc"
        " WHERE proname LIKE 'fanout%%' AND %(sql)s LIKE '%%' || proname || '(%%'",
        {"sql": call.sql},
    ).fetchall()
    assert functions or call.name == "still_mine"
    arguments = [function["arguments"].split("TABLE")[0] for function in functions]
    assert not [one for one in arguments if "timestamp" in one]


def test_no_function_reads_the_clock_of_its_transaction(conn: Conn) -> None:
    """C12: now() stands still in a long transaction; clock_timestamp() does not."""
    frozen = conn.execute(
        r"SELECT proname FROM pg_proc WHERE proname LIKE 'fanout\_%' AND prosrc ~*"
        r" '(\mnow\(|\mcurrent_timestamp\M|\mtransaction_timestamp\M|\mlocaltimestamp\M"
        r"|\mcurrent_time\M|\mstatement_timestamp\M)'"
    ).fetchall()
    assert frozen == []
    read = "SELECT count(*) AS n FROM pg_proc WHERE prosrc LIKE '%clock_timestamp()%'"
    assert conn.execute(read).fetchall()[0]["n"] > 10


def _passes(conn: Conn) -> None:
    """Let the time go on while the clock of this transaction stands still."""
    late = "SELECT clock_timestamp() - now() > interval '0.2 s' AS late"
    wait_until(lambda: conn.execute(late).fetchall()[0]["late"])


def test_a_lease_counts_from_when_it_is_renewed(own: database.Database, conn: Conn) -> None:
    """C12: begun, renewed and reported late in a transaction, a slot is seen then, not before."""
    run_id = sealed(own, "1", "2")
    reply = begun(own, run_id, conn)
    assert reply.epoch is not None
    calls: list[store.Call[Any]] = [
        store.renew([models.Holding(run_id, reply.slot, reply.epoch)], 0.0),
        store.report(run_id, 0, [entry(reply)], suspect=True),
    ]
    for call in calls:
        with conn.transaction():
            _passes(conn)
            conn.execute(call.sql.encode(), call.params)
            (row,) = conn.execute(
                "SELECT seen_at > now() + interval '0.2 s' AS late FROM fanout_slots WHERE active"
            ).fetchall()
            assert row["late"], call.name


def test_a_healthy_sweep_writes_no_log(
    own: database.Database, connect: Callable[..., Conn]
) -> None:
    """Invariant 6: sweeps over a run at work leave the server's write-ahead log as it is."""
    conn = connect()
    run_id = sealed(own, *map(str, range(30)))
    for _ in range(5):
        begun(own, run_id, conn)
    sweep = Sweeper(run=own.run, lease=30.0)

    def written() -> int:
        """Sweep once; return by how many bytes the log has grown meanwhile."""
        before = _log_end(conn)
        assert not sweep.sweep_once().changed
        return _log_end(conn) - before

    # What others write comes in between: the server itself, and the first reader of a fresh row.
    grown = [written() for _ in range(10)]
    assert 0 in grown, grown
    # One that repairs something writes, so this would be seen.
    conn.execute("UPDATE fanout_slots SET seen_at = seen_at - interval '1 hour' WHERE active")
    before = _log_end(conn)
    assert sweep.sweep_once().done == {"marked": 5}
    assert _log_end(conn) > before


def _log_end(conn: Conn) -> int:
    rows = conn.execute("SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn AS bytes").fetchall()
    return int(rows[0]["bytes"])
