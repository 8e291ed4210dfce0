"""The invariants of docs/design.md, read from the tables: `check(conn)` after anything at all.

Each is a query for the rows that break it, so that runs of any size can be checked. All of them
read one snapshot: `check` holds at every moment, whoever writes meanwhile.
"""

from collections.abc import Mapping
from typing import Any

import psycopg
from psycopg.rows import dict_row

Rows = list[dict[str, Any]]

# What the readers' rule makes of the item rows, per ledger: after a stop a row still pending is
# read as cancelled.
_COUNTED = """
WITH counted AS (
    SELECT r.id AS run_id, i.position % r.ledgers AS ledger, count(*) AS items,
        count(*) FILTER (WHERE i.status = 'succeeded') AS succeeded,
        count(*) FILTER (WHERE i.status = 'failed') AS failed,
        count(*) FILTER (WHERE i.status = 'cancelled') AS cancelled,
        count(*) FILTER (WHERE i.status = 'processing') AS processing,
        count(*) FILTER (WHERE i.status = 'pending' AND i.due IS NOT NULL) AS waiting,
        count(*) FILTER (WHERE i.status = 'pending' AND i.due IS NULL) AS unclaimed
    FROM fanout_runs r JOIN fanout_items i ON i.run_id = r.id
    WHERE r.ledgers > 0 GROUP BY 1, 2
), expected AS (
    SELECT l.run_id, l.ledger, c.items, c.processing, c.succeeded, c.failed,
        c.cancelled + CASE WHEN l.stopped THEN c.waiting + c.unclaimed ELSE 0 END AS cancelled,
        CASE WHEN l.stopped THEN 0 ELSE c.waiting END AS waiting,
        CASE WHEN l.stopped THEN 0 ELSE c.unclaimed END AS unclaimed
    FROM fanout_ledgers l
    LEFT JOIN counted c ON c.run_id = l.run_id AND c.ledger = l.ledger
)
"""

_STATE: Mapping[str, str] = {
    "1: the counters of a ledger equal the states of its items": _COUNTED
    + """
    SELECT l.run_id, l.ledger, l.stopped, l.size, l.cursor, l.waiting, l.succeeded, l.failed,
        l.cancelled, to_jsonb(e) AS items
    FROM fanout_ledgers l JOIN expected e ON e.run_id = l.run_id AND e.ledger = l.ledger
    WHERE (l.size, l.size - l.cursor, l.waiting, l.succeeded, l.failed, l.cancelled,
            l.cursor - l.waiting - l.succeeded - l.failed - l.cancelled)
        IS DISTINCT FROM
        (e.items, e.unclaimed, e.waiting, e.succeeded, e.failed, e.cancelled, e.processing)
    """,
    "1: sums never exceed the total, and a ledger is open exactly while it is not complete": """
    SELECT l.* FROM fanout_ledgers l JOIN fanout_runs r ON r.id = l.run_id
    WHERE l.succeeded + l.failed + l.cancelled > l.size OR l.cursor > l.size
        OR least(l.size, l.cursor, l.waiting, l.succeeded, l.failed, l.cancelled) < 0
        OR l.open <> (l.succeeded + l.failed + l.cancelled < l.size)
    """,
    "1: a run's total is the sum of its ledgers, and its open ledgers are counted": """
    SELECT r.id AS run_id, r.status, r.total, r.staged, r.ledgers, r.open_ledgers, to_jsonb(s) AS s
    FROM fanout_runs r CROSS JOIN LATERAL (
        SELECT coalesce(sum(size), 0) AS size, count(*) FILTER (WHERE open) AS open, count(*) AS n
        FROM fanout_ledgers WHERE run_id = r.id) s
    WHERE r.sealed_at IS NOT NULL
        AND (r.total <> s.size OR r.total <> r.staged OR r.open_ledgers <> s.open
            OR r.ledgers <> s.n)
    """,
    "1: pending + processing + succeeded + failed + cancelled = total": """
    SELECT r.id AS run_id, p FROM fanout_runs r, fanout_progress_v1(r.id) p
    WHERE r.total IS NOT NULL AND (p->>'total')::bigint <> (p->>'pending')::bigint
        + (p->>'processing')::bigint + (p->>'succeeded')::bigint + (p->>'failed')::bigint
        + (p->>'cancelled')::bigint
    """,
    "2: a slot holds an item at work, under the item's present claim": """
    SELECT s.*, i.status, i.claim FROM fanout_slots s
    LEFT JOIN fanout_items i ON i.run_id = s.run_id AND i.position = s.held
    WHERE s.held IS NOT NULL AND (NOT s.active OR i.status IS DISTINCT FROM 'processing'
        OR i.claim IS DISTINCT FROM s.held_claim)
    """,
    "2: so is an item that a slot keeps ready, behind the one it holds": """
    SELECT s.*, i.status, i.claim FROM fanout_slots s
    LEFT JOIN fanout_items i ON i.run_id = s.run_id AND i.position = s.ready
    WHERE s.ready IS NOT NULL AND (s.held IS NULL OR NOT s.active
        OR i.status IS DISTINCT FROM 'processing' OR i.claim IS DISTINCT FROM s.ready_claim)
    """,
    "2: an item at work is held by exactly one slot": """
    SELECT i.run_id, i.position, i.claim, i.status, count(s.slot) AS slots FROM fanout_items i
    LEFT JOIN fanout_slots s ON s.run_id = i.run_id AND i.position IN (s.held, s.ready) AND s.active
    WHERE i.status = 'processing'
    GROUP BY i.run_id, i.position HAVING count(s.slot) <> 1
    """,
    "2: what an item shows fits its state": """
    SELECT i.run_id, i.position, i.status, i.claim, i.due, i.failures, i.crashes, i.error_type,
        i.result, i.finished_at
    FROM fanout_items i
    WHERE i.due IS NOT NULL AND i.status <> 'pending'
        OR i.result IS NOT NULL AND i.status <> 'succeeded'
        OR (i.error_type IS NOT NULL) <> (i.status = 'failed')
        OR i.status IN ('processing', 'succeeded', 'failed') AND i.claim = 0
        OR (i.finished_at IS NOT NULL) <> (i.status IN ('succeeded', 'failed', 'cancelled'))
    """,
    "3: never more than max_in_flight active": """
    SELECT r.id AS run_id, r.max_in_flight, r.surplus, count(*) AS active
    FROM fanout_runs r JOIN fanout_slots s ON s.run_id = r.id AND s.active
    GROUP BY r.id HAVING count(*) > r.max_in_flight + r.surplus
    """,
    "3: nothing is queued against a pause, a stop or a close": """
    SELECT s.*, r.status, r.paused, r.closing
    FROM fanout_slots s LEFT JOIN fanout_runs r ON r.id = s.run_id
    WHERE r.status IS DISTINCT FROM 'processing' OR NOT s.active AND (r.paused OR EXISTS (
        SELECT FROM fanout_ledgers l WHERE l.run_id = r.id AND l.stopped))
    """,
    "4: a run closed exactly once in each generation behind it, and not in the present one": """
    SELECT r.id AS run_id, r.status, r.generation, array_agg(c.generation) AS closes,
        array_agg(c.status) AS statuses
    FROM fanout_runs r LEFT JOIN fanout_closes c ON c.run_id = r.id
    GROUP BY r.id
    HAVING array_agg(c.generation ORDER BY c.generation) FILTER (WHERE c.generation IS NOT NULL)
        IS DISTINCT FROM (SELECT array_agg(g) FROM generate_series(1, r.generation
            - (r.status IN ('pending', 'processing'))::integer) g)
        OR r.status NOT IN ('pending', 'processing') AND r.status IS DISTINCT FROM
            max(c.status) FILTER (WHERE c.generation = r.generation)
    """,
    "4: a closed run has nothing open": """
    SELECT r.id AS run_id, r.status, r.open_ledgers, r.paused, r.closing, r.closed_at
    FROM fanout_runs r
    WHERE r.status NOT IN ('pending', 'processing') AND (r.open_ledgers <> 0 OR r.paused
            OR r.closing IS NOT NULL OR r.closed_at IS NULL OR r.total IS NULL
            OR EXISTS (SELECT FROM fanout_ledgers l WHERE l.run_id = r.id AND l.open))
        OR r.status IN ('pending', 'processing') AND r.closed_at IS NOT NULL
        OR r.status = 'processing' AND r.open_ledgers = 0
    """,
    "4: a close owes exactly the callbacks of its status": """
    WITH wanted AS (
        SELECT c.run_id, c.generation, b->>'task' AS task FROM fanout_closes c
        JOIN fanout_runs r ON r.id = c.run_id CROSS JOIN LATERAL jsonb_array_elements(r.callbacks) b
        WHERE b->>'on' = 'complete' OR b->>'on' = CASE WHEN c.status = 'completed'
            AND (c.progress->>'failed')::bigint = 0
            AND (c.progress->>'cancelled')::bigint = 0 THEN 'success' ELSE 'failure' END
    )
    SELECT coalesce(w.run_id, b.run_id) AS run_id, w.task AS owed, b.task, b.state
    FROM wanted w FULL JOIN fanout_callbacks b
        ON b.run_id = w.run_id AND b.generation = w.generation AND b.task = w.task
    WHERE w.task IS NULL OR b.task IS NULL
    """,
    "5: each unfinished item is unclaimed, due or due later, or held": """
    SELECT i.run_id, i.position, i.ledger, i.status, i.claim, i.due, r.status AS run_status,
        l.cursor, l.stopped
    FROM fanout_items i JOIN fanout_runs r ON r.id = i.run_id
    LEFT JOIN fanout_ledgers l
        ON l.run_id = i.run_id AND l.ledger = i.position % nullif(r.ledgers, 0)
    WHERE r.sealed_at IS NOT NULL AND i.status IN ('pending', 'processing') AND NOT CASE
        WHEN i.status = 'processing' THEN r.status = 'processing'
        WHEN l.stopped THEN true
        WHEN r.status <> 'processing' THEN false
        WHEN i.due IS NULL THEN i.position / r.ledgers >= l.cursor
        ELSE i.ledger = l.ledger AND i.position / r.ledgers < l.cursor END
    """,
}

# These hold unless, since the last sweep, somebody laid hands on jobs or the host refused some.
_JOBS: Mapping[str, str] = {
    # Counted here in another way than fanout_slot_plan_v1 does: for each time at which an item
    # falls due, the slots queued by then are as many as there are places or items for them.
    "3: an open, sealed, unpaused run has a slot that serves each item in time": """
    WITH open AS (
        SELECT r.id AS run_id, clock_timestamp() AS now, s.idle,
            least(r.max_in_flight - s.active, greatest(8, s.active)) AS room, l.unclaimed
        FROM fanout_runs r CROSS JOIN LATERAL (
            SELECT count(*) FILTER (WHERE active) AS active,
                count(*) FILTER (WHERE active AND held IS NULL) AS idle
            FROM fanout_slots WHERE run_id = r.id) s
        CROSS JOIN LATERAL (
            SELECT sum(size - cursor) AS unclaimed FROM fanout_ledgers WHERE run_id = r.id) l
        WHERE r.status = 'processing' AND NOT r.paused AND r.closing IS NULL
            AND r.limits IS NULL AND r.key_limit IS NULL
    ), times AS (
        SELECT o.*, o.now AS t, 0 AS dues, 0 AS clean FROM open o
        UNION ALL
        SELECT o.*, greatest(i.due, o.now), row_number() OVER w, count(*) FILTER (
            WHERE i.crashes = 0 AND i.due <= o.now + interval '10 seconds') OVER w
        FROM open o JOIN fanout_items i ON i.run_id = o.run_id AND i.due IS NOT NULL
        WINDOW w AS (PARTITION BY o.run_id ORDER BY i.due ROWS UNBOUNDED PRECEDING)
    )
    SELECT t.*, q.queued FROM times t CROSS JOIN LATERAL (
        SELECT count(*) AS queued FROM fanout_slots s
        WHERE s.run_id = t.run_id AND NOT s.active
            AND coalesce(s.scheduled_at, '-infinity') <= t.t) q
    WHERE q.queued < least(t.room, t.unclaimed + t.dues - least(t.idle, t.clean))
    """,
    "3: the plan finds no slot missing": """
    SELECT r.id AS run_id, r.max_in_flight, p.needed_at, p.replaces
    FROM fanout_runs r CROSS JOIN LATERAL fanout_slot_plan_v1(r.id) p
    WHERE r.limits IS NULL AND r.key_limit IS NULL
    """,
    # The place that became free is passed on by a statement of its own, so it may be a moment late.
    "3: who misses a slot stands in the line of a limit": """
    SELECT r.id AS run_id, r.limits, r.wants, p.needed_at, p.replaces
    FROM fanout_runs r CROSS JOIN LATERAL fanout_slot_plan_v1(r.id) p
    WHERE r.limits IS NOT NULL AND r.key_limit IS NULL AND r.wants = 0
        AND p.needed_at = '-infinity'
    """,
    "3: a queued slot has a job of its own that waits or was just fetched": """
    SELECT s.*, j.status, j.queueing_lock, j.args, j.scheduled_at AS job_scheduled_at
    FROM fanout_slots s LEFT JOIN procrastinate_jobs j ON j.id = s.job_id
    WHERE NOT s.active AND (j.id IS NULL OR j.status NOT IN ('todo', 'doing')
        OR j.queueing_lock <> 'fanout_child:' || s.run_id || ':' || s.slot
        OR j.args <> jsonb_build_object('run_id', s.run_id, 'slot', s.slot)
        OR j.scheduled_at > greatest(s.scheduled_at, clock_timestamp()))
    """,
    "4: a callback that is owed has a job": """
    SELECT b.*, j.status FROM fanout_callbacks b LEFT JOIN procrastinate_jobs j ON j.id = b.job_id
    WHERE b.state = 'owed' AND (j.id IS NULL OR j.status NOT IN ('todo', 'doing'))
    """,
    "5: a pending run has a manager at work, or a job for it": """
    SELECT r.id AS run_id, r.manager_job_id, r.manager_seen_at, j.status FROM fanout_runs r
    LEFT JOIN procrastinate_jobs j ON j.id = r.manager_job_id
    WHERE r.status = 'pending' AND r.manager_seen_at IS NULL
        AND (j.id IS NULL OR j.status NOT IN ('todo', 'doing'))
    """,
}

_TABLES = (
    "fanout_runs",
    "fanout_ledgers",
    "fanout_items",
    "fanout_slots",
    "fanout_closes",
    "fanout_callbacks",
    "procrastinate_jobs",
)


def _union(queries: Mapping[str, str]) -> str:
    """Return one statement for all: one snapshot, whatever the isolation level."""
    parts = " UNION ALL ".join(
        f"SELECT $name${name}$name$ AS name, broken.run_id, to_jsonb(broken) AS row"
        f" FROM ({query}) broken"
        for name, query in queries.items()
    )
    return f"SELECT name, row FROM ({parts}) b WHERE %s::bigint IS NULL OR run_id = %s"


def _escaped(query: str) -> str:
    return query.replace("%", "%%").replace("%%s", "%s")


_QUERIES = {
    True: _escaped(_union(_STATE)),
    False: _escaped(_union({**_STATE, **_JOBS})),
}


def check(
    conn: psycopg.Connection[Any], run_id: int | None = None, *, damaged: bool = False
) -> None:
    """Assert the invariants of all runs, or of one.

    With `damaged` those are left out that somebody can break from outside (by cancelling or
    deleting a job, say) and that the next sweep repairs.
    """
    with conn.cursor(row_factory=dict_row) as cursor:
        rows = cursor.execute(_QUERIES[damaged], [run_id, run_id]).fetchall()
    broken: dict[str, Rows] = {}
    for row in rows:
        broken.setdefault(row["name"], []).append(row["row"])
    assert not broken, "\n".join(
        f"invariant {name}; broken by\n  " + "\n  ".join(map(str, found[:10]))
        for name, found in broken.items()
    )


def check_quiet(conn: psycopg.Connection[Any], lease: float = 30.0) -> None:
    """Assert invariant 6: a sweep finds nothing, and repairing what is sound writes nothing."""
    with conn.cursor(row_factory=dict_row) as cursor:
        found = cursor.execute(
            "SELECT run_id, finding FROM fanout_sweep_plan_v1(%s, 1000)", [lease]
        ).fetchall()
        assert not found, f"invariant 6: a sweep on a healthy system finds nothing; found {found}"
        before = written(conn)
        done = cursor.execute(
            "SELECT id, fanout_sweep_run_v1(id, %s) AS done FROM fanout_runs", [lease]
        ).fetchall()
    did = [row for row in done if row["done"]]
    assert not did, f"invariant 6: a sweep on a healthy system does nothing; did {did}"
    assert written(conn) == before, "invariant 6: a sweep on a healthy system writes nothing"


def written(conn: psycopg.Connection[Any]) -> Rows:
    """Return what names each row's present version, in all tables of the protocol."""
    union = " UNION ALL ".join(
        f"SELECT '{table}' AS name, ctid::text, xmin::text FROM {table}" for table in _TABLES
    )
    with conn.cursor(row_factory=dict_row) as cursor:
        return cursor.execute(f"{union} ORDER BY 1, 2").fetchall()
