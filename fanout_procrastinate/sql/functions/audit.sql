-- The audit: what contradicts the design's invariants, one row each, read from the tables anew.
--
-- It reads only and locks no row. Every function is STABLE: all that one call reads is of its
-- caller's one snapshot, and as each step of the protocol is one transaction, no finding is of a
-- moment in between. Only the host's job rows change in transactions of the host's own: what is
-- said of them is given the time that two sweeps take, and the caller looks twice.
--
-- Each row: the kind, what it is about, a sentence, and whether the sweep repairs it.

-- How many items ledger p_ledger of p_ledgers owns.
CREATE OR REPLACE FUNCTION fanout_audit_share_v1(
    p_total bigint, p_ledger integer, p_ledgers integer
) RETURNS bigint LANGUAGE sql IMMUTABLE AS $$
    SELECT (p_total - p_ledger + p_ledgers - 1) / p_ledgers
$$;

-- A run's book-keeping, as far as it can contradict itself.
CREATE OR REPLACE FUNCTION fanout_audit_ledgers_v1(r fanout_runs)
RETURNS TABLE (kind text, subject text, detail text, repairable boolean)
LANGUAGE plpgsql STABLE AS $$
DECLARE
    -- Whether the next sweep counts this run's items anew.
    v_sweep boolean := coalesce(fanout_miscounted_v1(r.id), false);
    v_total bigint;
    s record;
BEGIN
    SELECT count(*) AS ledgers, count(*) FILTER (WHERE open) AS open, sum(size) AS size INTO s
    FROM fanout_ledgers WHERE run_id = r.id;
    IF s.ledgers <> r.ledgers OR (s.ledgers > 0) <> (r.sealed_at IS NOT NULL AND r.staged > 0) THEN
        RETURN QUERY SELECT 'ledgers', 'run', format(
            'a run of %s items has %s ledgers; there are %s',
            r.staged, r.ledgers, s.ledgers), false;
        RETURN;
    ELSIF r.sealed_at IS NULL OR s.ledgers = 0 THEN
        RETURN;
    END IF;
    v_total := CASE WHEN r.total = r.staged THEN r.total ELSE s.size END;
    IF r.total IS DISTINCT FROM r.staged THEN
        RETURN QUERY SELECT 'total', 'run', format(
            'the total is %s, but %s items were staged', r.total, r.staged), false;
    END IF;
    RETURN QUERY
    SELECT 'sizes', 'ledger ' || l.ledger, format('its size is %s, its share of %s items is %s',
        l.size, v_total, fanout_audit_share_v1(v_total, l.ledger, r.ledgers)), v_sweep
    FROM fanout_ledgers l
    WHERE l.run_id = r.id AND l.size <> fanout_audit_share_v1(v_total, l.ledger, r.ledgers)
    UNION ALL
    SELECT 'counters', 'ledger ' || l.ledger, format(
        'impossible: size %s, cursor %s, waiting %s, succeeded %s, failed %s, cancelled %s',
        l.size, l.cursor, l.waiting, l.succeeded, l.failed, l.cancelled), v_sweep
    FROM fanout_ledgers l
    WHERE l.run_id = r.id AND (
        least(l.size, l.cursor, l.waiting, l.succeeded, l.failed, l.cancelled) < 0
        OR l.cursor > fanout_audit_share_v1(v_total, l.ledger, r.ledgers)
        OR l.waiting + l.succeeded + l.failed + l.cancelled > l.cursor)
    UNION ALL
    SELECT 'open_ledgers', 'ledger ' || l.ledger, format(
        'marked as %s with %s of %s items final', CASE WHEN l.open THEN 'open' ELSE 'complete' END,
        l.succeeded + l.failed + l.cancelled, l.size), v_sweep
    FROM fanout_ledgers l
    WHERE l.run_id = r.id AND r.status = 'processing'
        AND l.open <> (l.succeeded + l.failed + l.cancelled < l.size)
    UNION ALL
    SELECT 'closed_unfinished', 'ledger ' || l.ledger, format(
        'the run is %s with %s of %s items final', r.status,
        l.succeeded + l.failed + l.cancelled, l.size), false
    FROM fanout_ledgers l
    WHERE l.run_id = r.id AND r.status <> 'processing'
        AND (l.open OR l.succeeded + l.failed + l.cancelled < l.size)
    UNION ALL
    SELECT 'open_ledgers', 'run', format(
        'the run counts %s open ledgers; there are %s', r.open_ledgers, s.open), v_sweep
    WHERE r.open_ledgers <> s.open AND (r.status = 'processing' OR r.open_ledgers <> 0);
END;
$$;

-- A run's slots: what they hold, who renews them, how many there are.
CREATE OR REPLACE FUNCTION fanout_audit_slots_v1(r fanout_runs, p_lease double precision)
RETURNS TABLE (kind text, subject text, detail text, repairable boolean)
LANGUAGE plpgsql STABLE AS $$
DECLARE
    v_now timestamptz := clock_timestamp();
    v_active bigint;
    v_dealt timestamptz;
    v_moved timestamptz;
BEGIN
    IF r.status <> 'processing' THEN
        RETURN QUERY
        SELECT 'leftover_slot', 'slot ' || s.slot, format('the run is %s', r.status),
            r.status <> 'pending'
        FROM fanout_slots s WHERE s.run_id = r.id ORDER BY s.slot LIMIT 100;
        RETURN;
    END IF;
    SELECT count(*) FILTER (WHERE active), max(seen_at) FILTER (WHERE NOT active)
    INTO v_active, v_dealt FROM fanout_slots WHERE run_id = r.id;
    SELECT greatest(max(updated_at), r.started_at, v_dealt) INTO v_moved
    FROM fanout_ledgers WHERE run_id = r.id;
    RETURN QUERY
    (SELECT 'held', 'slot ' || s.slot, CASE
        WHEN i.position IS NULL THEN format('it holds item %s, which is not there', s.held)
        WHEN NOT s.active THEN format('it waits for its job, yet it holds item %s', s.held)
        ELSE format('it holds item %s under claim %s, but that item is %s under claim %s',
            s.held, s.held_claim, i.status, i.claim) END, s.active AND i.position IS NOT NULL
    FROM fanout_slots s
    LEFT JOIN fanout_items i ON i.run_id = s.run_id AND i.position = s.held
    WHERE s.run_id = r.id AND s.held IS NOT NULL AND (NOT s.active
        OR i.status IS DISTINCT FROM 'processing' OR i.claim IS DISTINCT FROM s.held_claim)
    ORDER BY s.slot LIMIT 100)
    UNION ALL
    SELECT 'held', 'item ' || s.held, format('held by %s slots: %s', count(*),
        string_agg(s.slot::text, ', ' ORDER BY s.slot)), true
    FROM fanout_slots s WHERE s.run_id = r.id AND s.held IS NOT NULL
    GROUP BY s.held HAVING count(*) > 1
    UNION ALL
    -- A sweep marks, another one rescues: a quarter of a lease later at the earliest.
    (SELECT 'silent_slot', 'slot ' || s.slot, format('silent for %s s, and no sweep has come',
        round(extract(epoch FROM v_now - s.seen_at))), true
    FROM fanout_slots s
    WHERE s.run_id = r.id AND s.active AND s.seen_at < v_now - make_interval(secs => p_lease * 3)
    ORDER BY s.slot LIMIT 100)
    UNION ALL
    SELECT 'over_limit', 'run', format(
        '%s slots are active; %s may be', v_active, r.max_in_flight + r.surplus), true
    WHERE v_active > r.max_in_flight + r.surplus
    UNION ALL
    -- Whatever moves in a run deals what is missing; then it is for the next sweep.
    SELECT 'missing_slots', 'run', format(
        '%s slots are missing, and nothing has moved for %s s', count(*),
        round(extract(epoch FROM v_now - v_moved))), true
    FROM fanout_slot_plan_v1(r.id)
    WHERE v_moved < v_now - make_interval(secs => p_lease)
        AND fanout_lacks_slots_v1(r.id)
    HAVING count(*) > 0;
END;
$$;

-- Why a job of ours that waits will never begin, once two sweeps could have seen it: it is gone, it
-- is final, or its worker died between the fetch and the begin. Null for a job that waits or works.
CREATE OR REPLACE FUNCTION fanout_audit_job_v1(p_job bigint, p_lease double precision) RETURNS text
LANGUAGE sql STABLE AS $$
    SELECT CASE
        WHEN j.id IS NULL THEN 'is gone'
        WHEN j.status NOT IN ('todo', 'doing') AND NOT EXISTS (
                SELECT FROM procrastinate_events e WHERE e.job_id = j.id
                AND e.at > clock_timestamp() - make_interval(secs => p_lease))
            THEN 'is ' || j.status
        WHEN j.status = 'doing' AND NOT EXISTS (
                SELECT FROM procrastinate_workers w WHERE w.id = j.worker_id
                AND w.last_heartbeat > clock_timestamp()
                    - make_interval(secs => greatest(p_lease, 30) + p_lease))
            AND NOT EXISTS (
                SELECT FROM procrastinate_events e WHERE e.job_id = j.id AND e.type = 'started'
                AND e.at > clock_timestamp() - make_interval(secs => p_lease * 2))
            THEN 'was fetched by a worker that died'
        END
    FROM (SELECT p_job AS wanted) x
    LEFT JOIN procrastinate_jobs j ON j.id = x.wanted
$$;

-- A run's jobs: of its queued slots, of its manager and callbacks, and those that stand in the way.
-- The caller looks twice: one may be on its way from the queue to its begin.
CREATE OR REPLACE FUNCTION fanout_audit_jobs_v1(r fanout_runs, p_lease double precision)
RETURNS TABLE (kind text, subject text, detail text, repairable boolean)
LANGUAGE plpgsql STABLE AS $$
DECLARE
    v_now timestamptz := clock_timestamp();
    v_dead timestamptz := v_now - make_interval(secs => p_lease * 3);
BEGIN
    RETURN QUERY
    (SELECT 'lost_job', 'slot ' || s.slot, format('its job %s %s', s.job_id, j.lost), true
    FROM fanout_slots s
    CROSS JOIN LATERAL (SELECT fanout_audit_job_v1(s.job_id, p_lease) AS lost) j
    WHERE s.run_id = r.id AND r.status = 'processing' AND NOT s.active AND j.lost IS NOT NULL
    ORDER BY s.slot LIMIT 100)
    UNION ALL
    -- By their queueing locks, one index look-up per slot number: nothing grows with the queue. Not
    -- sorted: for that the planner would read all jobs in their order.
    SELECT 'stray_job', 'job ' || j.id, format('it owns no slot, but the queueing lock of slot %s',
        split_part(j.queueing_lock, ':', 3)),
        split_part(j.queueing_lock, ':', 3)::bigint <= least(r.max_in_flight, 1000) + 63
    FROM procrastinate_jobs j
    WHERE r.status = 'processing' AND j.status = 'todo' AND j.queueing_lock = ANY (ARRAY(
            SELECT 'fanout_child:' || r.id || ':' || n
            FROM generate_series(0, least(r.max_in_flight, 10000) + 127) n))
        AND NOT EXISTS (SELECT FROM fanout_slots s WHERE s.run_id = r.id AND s.job_id = j.id)
    UNION ALL
    SELECT 'manager_lost', 'manager', CASE
        WHEN r.manager_seen_at IS NOT NULL THEN format('silent for %s s, and no sweep has come',
            round(extract(epoch FROM v_now - r.manager_seen_at)))
        WHEN r.manager_task IS NULL THEN 'nobody lists the items'
        ELSE format('its job %s %s', r.manager_job_id, m.lost) END,
        r.manager_seen_at IS NOT NULL OR r.manager_task IS NOT NULL
    FROM (SELECT fanout_audit_job_v1(r.manager_job_id, p_lease) AS lost) m
    WHERE r.status = 'pending' AND (r.manager_seen_at < v_dead
        OR r.manager_seen_at IS NULL AND (r.manager_task IS NULL OR m.lost IS NOT NULL))
    UNION ALL
    SELECT 'callback_lost', 'callback ' || c.task, CASE c.state
        WHEN 'owed' THEN format('owed, but its job %s %s', c.job_id, j.lost)
        ELSE format('silent for %s s, and no sweep has come',
            round(extract(epoch FROM v_now - c.seen_at))) END, true
    FROM fanout_callbacks c
    CROSS JOIN LATERAL (SELECT fanout_audit_job_v1(c.job_id, p_lease) AS lost) j
    WHERE c.run_id = r.id AND (c.state = 'owed' AND j.lost IS NOT NULL
        OR c.state = 'running' AND c.seen_at < v_dead);
END;
$$;

-- A run's closes: missed, unrecorded, without their callbacks; and stops that nobody finishes.
CREATE OR REPLACE FUNCTION fanout_audit_closes_v1(r fanout_runs, p_lease double precision)
RETURNS TABLE (kind text, subject text, detail text, repairable boolean)
LANGUAGE plpgsql STABLE AS $$
DECLARE
    v_open constant boolean := r.status IN ('pending', 'processing');
    s record;
BEGIN
    SELECT count(*) AS ledgers, sum(size - succeeded - failed - cancelled) AS unfinished,
        count(*) FILTER (WHERE NOT stopped) AS unstopped, max(updated_at) AS moved_at
    INTO s FROM fanout_ledgers WHERE run_id = r.id;
    RETURN QUERY
    SELECT 'missed_close', 'run', 'every item is final, but the run is open', true
    WHERE r.status = 'processing' AND s.ledgers = r.ledgers AND s.unfinished <= 0
    UNION ALL
    SELECT 'stop_pending', 'run', format('it is to close as %s, but it was not stopped', r.closing),
        true
    WHERE r.status = 'processing' AND r.closing IS NOT NULL AND s.unstopped > 0
        AND s.moved_at < clock_timestamp() - make_interval(secs => p_lease)
    UNION ALL
    SELECT 'close_unrecorded', 'generation ' || g.generation, CASE
        WHEN g.generation > r.generation - v_open::integer
            THEN format('it is recorded as %s, but the run is %s', c.status, r.status)
        WHEN c.generation IS NULL THEN 'it closed, but there is no record of it'
        ELSE format('it is recorded as %s, but the run is %s', c.status, r.status) END, false
    FROM generate_series(1, r.generation) g (generation)
    LEFT JOIN fanout_closes c ON c.run_id = r.id AND c.generation = g.generation
    WHERE (c.generation IS NULL) <> (g.generation > r.generation - v_open::integer)
        OR g.generation = r.generation AND NOT v_open AND c.status <> r.status
    UNION ALL
    -- What is owed, told from the record of the close and the run's declaration.
    SELECT 'callback_missing', 'callback ' || coalesce(w.task, b.task), CASE
        WHEN b.task IS NULL THEN format('generation %s closed, but it is not owed', w.generation)
        ELSE format('it is %s, but the close of generation %s does not owe it', b.state,
            b.generation) END, false
    FROM (
        SELECT DISTINCT c.generation, d->>'task' AS task
        FROM fanout_closes c CROSS JOIN jsonb_array_elements(r.callbacks) d
        WHERE c.run_id = r.id AND (d->>'on' = 'complete' OR d->>'on' = CASE
            WHEN c.status = 'completed' AND (c.progress->>'failed')::bigint = 0
                AND (c.progress->>'cancelled')::bigint = 0
            THEN 'success' ELSE 'failure' END)
    ) w
    FULL JOIN (
        SELECT k.generation, k.task, k.state FROM fanout_callbacks k
        WHERE k.run_id = r.id AND EXISTS (SELECT FROM fanout_closes c
            WHERE c.run_id = r.id AND c.generation = k.generation)
    ) b ON b.generation = w.generation AND b.task = w.task
    WHERE w.task IS NULL OR b.task IS NULL;
END;
$$;

-- All that can be told about a run without reading its items.
CREATE OR REPLACE FUNCTION fanout_audit_run_v1(p_run bigint, p_lease double precision)
RETURNS TABLE (kind text, subject text, detail text, repairable boolean)
LANGUAGE plpgsql STABLE
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET jit = off
AS $$
DECLARE
    r fanout_runs;
BEGIN
    SELECT * INTO r FROM fanout_runs WHERE id = p_run;
    IF FOUND THEN
        RETURN QUERY SELECT * FROM fanout_audit_ledgers_v1(r)
            UNION ALL SELECT * FROM fanout_audit_slots_v1(r, p_lease)
            UNION ALL SELECT * FROM fanout_audit_jobs_v1(r, p_lease)
            UNION ALL SELECT * FROM fanout_audit_closes_v1(r, p_lease);
    END IF;
END;
$$;

-- Items of a run that was not sealed: as many as were staged; after a close those not yet removed.
CREATE OR REPLACE FUNCTION fanout_audit_staged_v1(r fanout_runs)
RETURNS TABLE (kind text, subject text, detail text, repairable boolean)
LANGUAGE plpgsql STABLE AS $$
DECLARE
    v_items bigint;
BEGIN
    IF r.status = 'pending' THEN
        SELECT count(*) INTO v_items FROM fanout_items WHERE run_id = r.id;
        RETURN QUERY SELECT 'items', 'run', format(
            '%s items were staged; there are %s', r.staged, v_items), false
        WHERE v_items <> r.staged;
    ELSE
        SELECT count(*) INTO v_items FROM fanout_items
        WHERE run_id = r.id AND position < coalesce(r.untidy_from, 9223372036854775807);
        RETURN QUERY SELECT 'untidy', 'run', format(
            'it closed before its seal, and %s items are still there', v_items), false
        WHERE v_items > 0;
    END IF;
END;
$$;

-- Reads the items of a run and compares them with its ledgers and slots: in parts, so that it ends
-- about p_seconds from now with what it has found so far, and says so. Index: fanout_items_pkey.
CREATE OR REPLACE FUNCTION fanout_audit_items_v1(p_run bigint, p_seconds double precision)
RETURNS TABLE (kind text, subject text, detail text, repairable boolean)
LANGUAGE plpgsql STABLE
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off
SET enable_mergejoin = off SET jit = off
AS $$
DECLARE
    v_until timestamptz := clock_timestamp() + make_interval(secs => p_seconds);
    v_from bigint := 0;
    v_to bigint := 0;
    v_end constant bigint := 9223372036854775807;
    v_total bigint;
    v_closed boolean;
    v_cursors bigint[];
    v_stopped boolean[];
    v_items bigint := 0;
    v_last bigint := -1;
    -- Four per ledger: waiting, succeeded, failed, cancelled.
    v_counts bigint[];
    -- How many are odd, by kind, and where some of them stand.
    v_numbers jsonb := '{}';
    v_kinds text[] := '{}';
    v_positions bigint[] := '{}';
    v_sweep boolean := coalesce(fanout_miscounted_v1(p_run), false);
    r fanout_runs;
    c record;
BEGIN
    SELECT * INTO r FROM fanout_runs WHERE id = p_run;
    IF r.sealed_at IS NULL THEN
        RETURN QUERY SELECT * FROM fanout_audit_staged_v1(r) WHERE r.id IS NOT NULL;
        RETURN;
    END IF;
    v_closed := r.status NOT IN ('pending', 'processing');
    SELECT array_agg(cursor ORDER BY ledger), array_agg(stopped ORDER BY ledger),
        CASE WHEN r.total = r.staged THEN r.total ELSE sum(size) END
    INTO v_cursors, v_stopped, v_total FROM fanout_ledgers WHERE run_id = p_run;
    IF r.ledgers = 0 OR cardinality(v_cursors) IS DISTINCT FROM r.ledgers
            -- Old runs are removed from their first item on.
            OR v_closed AND r.replaced AND NOT EXISTS (
                SELECT FROM fanout_items WHERE run_id = p_run AND position = 0) THEN
        RETURN;
    END IF;
    v_counts := array_fill(0::bigint, ARRAY[r.ledgers * 4]);
    WHILE v_to < v_end AND (v_from = 0 OR clock_timestamp() < v_until) LOOP
        v_to := CASE WHEN v_from + 20000 < v_total THEN v_from + 20000 ELSE v_end END;
        FOR c IN
            SELECT o.ledger - 1 AS ledger, o.odd, count(*) AS items, max(i.position) AS last,
                count(*) FILTER (WHERE i.status = 'pending' AND NOT v_stopped[o.ledger]
                    AND (i.due IS NOT NULL OR i.claim > 0)) AS waiting,
                count(*) FILTER (WHERE i.status = 'succeeded') AS succeeded,
                count(*) FILTER (WHERE i.status = 'failed') AS failed,
                -- In a stopped ledger what reads pending is cancelled.
                count(*) FILTER (WHERE i.status = 'cancelled'
                    OR i.status = 'pending' AND v_stopped[o.ledger]) AS cancelled,
                array_agg(i.position) FILTER (WHERE o.odd IS NOT NULL) AS positions
            FROM fanout_items i
            CROSS JOIN LATERAL (
                SELECT (i.position % r.ledgers)::integer + 1 AS ledger,
                    i.position / r.ledgers AS nth
            ) p
            CROSS JOIN LATERAL (
                SELECT p.ledger, CASE
                    WHEN i.status = 'processing' THEN CASE
                        WHEN v_closed THEN 'closed_unfinished'
                        WHEN p.nth >= v_cursors[p.ledger] THEN 'cursor'
                        WHEN NOT EXISTS (SELECT FROM fanout_slots s
                            WHERE s.run_id = p_run AND i.position IN (s.held, s.ready))
                            THEN 'unheld'
                        WHEN i.claim = 0 THEN 'state' END
                    WHEN i.status = 'pending' THEN CASE
                        WHEN v_stopped[p.ledger] THEN CASE WHEN i.position
                            < coalesce(r.untidy_from, v_end) THEN 'untidy' END
                        WHEN v_closed THEN 'closed_unfinished'
                        WHEN p.nth >= v_cursors[p.ledger] THEN CASE
                            WHEN i.due IS NOT NULL OR i.claim > 0 THEN 'cursor' END
                        WHEN i.due IS NULL OR i.ledger IS DISTINCT FROM p.ledger - 1
                            THEN 'unreachable'
                        WHEN i.error_type IS NOT NULL THEN 'state' END
                    WHEN i.status NOT IN ('succeeded', 'failed', 'cancelled')
                        OR (i.error_type IS NULL) = (i.status = 'failed')
                        OR i.claim = 0 AND i.status <> 'cancelled' OR i.finished_at IS NULL
                        THEN 'state'
                    WHEN p.nth >= v_cursors[p.ledger] THEN 'cursor' END AS odd
            ) o
            WHERE i.run_id = p_run AND i.position >= v_from AND i.position < v_to
            GROUP BY 1, 2
        LOOP
            v_items := v_items + c.items;
            v_last := greatest(v_last, c.last);
            v_counts[c.ledger * 4 + 1] := v_counts[c.ledger * 4 + 1] + c.waiting;
            v_counts[c.ledger * 4 + 2] := v_counts[c.ledger * 4 + 2] + c.succeeded;
            v_counts[c.ledger * 4 + 3] := v_counts[c.ledger * 4 + 3] + c.failed;
            v_counts[c.ledger * 4 + 4] := v_counts[c.ledger * 4 + 4] + c.cancelled;
            IF c.odd IS NOT NULL THEN
                v_numbers := v_numbers || jsonb_build_object(
                    c.odd, coalesce((v_numbers->>c.odd)::bigint, 0) + c.items);
                SELECT v_kinds || array_agg(c.odd), v_positions || array_agg(n)
                INTO v_kinds, v_positions FROM (
                    SELECT n FROM unnest(c.positions) n ORDER BY n LIMIT 5
                ) chosen;
            END IF;
        END LOOP;
        v_from := v_to;
    END LOOP;

    RETURN QUERY
    SELECT f.kind, 'items ' || (
            SELECT string_agg(n::text, ', ' ORDER BY n) FROM unnest(f.positions[1:5]) n)
            || CASE WHEN f.number > 5 THEN format(' and %s more', f.number - 5) ELSE '' END,
        CASE f.kind
            WHEN 'unreachable' THEN 'passed by, pending and not due: nobody will take them'
            WHEN 'cursor' THEN 'handed out before, but the cursor stands before them'
            WHEN 'unheld' THEN 'at work, but no slot holds them'
            WHEN 'closed_unfinished' THEN format('the run is %s, but they are not final', r.status)
            WHEN 'untidy' THEN 'cancelled by a stop, but they still read pending'
            WHEN 'state' THEN 'their status contradicts their claim, end or error' END,
        v_sweep AND f.kind IN ('unreachable', 'cursor', 'unheld')
    FROM (
        SELECT u.kind, array_agg(u.position ORDER BY u.position) AS positions,
            (v_numbers->>u.kind)::bigint AS number
        FROM unnest(v_kinds, v_positions) u (kind, position) GROUP BY u.kind
    ) f;
    IF v_to < v_end THEN
        RETURN QUERY SELECT 'unchecked', 'items', format(
            'the time was enough for %s of its %s items; their counters are not compared',
            v_from, v_total), false;
        RETURN;
    END IF;
    RETURN QUERY
    SELECT 'items', 'run', format('of %s items %s are there, the last at position %s',
        v_total, v_items, v_last), false
    WHERE v_items <> v_total OR v_last <> v_total - 1
    UNION ALL
    SELECT 'counters', 'ledger ' || l.ledger, format(
        'waiting %s, succeeded %s, failed %s, cancelled %s; its items say %s, %s, %s, %s',
        l.waiting, l.succeeded, l.failed, l.cancelled, v_counts[l.ledger * 4 + 1],
        v_counts[l.ledger * 4 + 2], v_counts[l.ledger * 4 + 3], v_counts[l.ledger * 4 + 4]), v_sweep
    FROM fanout_ledgers l
    WHERE l.run_id = p_run AND ARRAY[l.waiting, l.succeeded, l.failed, l.cancelled]
        <> v_counts[l.ledger * 4 + 1 : l.ledger * 4 + 4];
END;
$$;

-- Rows of runs that are not there. Items by one index look-up per run, however many there are.
CREATE OR REPLACE FUNCTION fanout_audit_orphans_v1()
RETURNS TABLE (run_id bigint, subject text, repairable boolean) LANGUAGE sql STABLE AS $$
    WITH RECURSIVE owners AS (
        SELECT min(run_id) AS run_id FROM fanout_items
        UNION ALL
        SELECT (SELECT min(i.run_id) FROM fanout_items i WHERE i.run_id > o.run_id)
        FROM owners o WHERE o.run_id IS NOT NULL
    ), found AS (
        SELECT run_id, 'items' AS subject, false AS repairable FROM owners
        UNION SELECT run_id, 'ledgers', false FROM fanout_ledgers
        UNION SELECT run_id, 'slots', true FROM fanout_slots
        UNION SELECT run_id, 'closes', false FROM fanout_closes
        UNION SELECT run_id, 'callbacks', false FROM fanout_callbacks
    )
    SELECT f.run_id, f.subject, f.repairable FROM found f
    WHERE f.run_id IS NOT NULL AND NOT EXISTS (SELECT FROM fanout_runs r WHERE r.id = f.run_id)
    ORDER BY f.run_id, f.subject LIMIT 100
$$;
