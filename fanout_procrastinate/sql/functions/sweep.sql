-- Renewal and the sweep. A sweep looks without locks and without writing; only where it finds
-- something does it take a run's locks, each run in a transaction of its own.

-- Renews the active slots of one process. Skips what is locked: that slot is being written by its
-- own report. Answers the slots that are no longer this process's, and those told to hurry.
CREATE OR REPLACE FUNCTION fanout_renew_v1(
    p_runs bigint[], p_slots integer[], p_epochs bigint[], p_fresh double precision
) RETURNS TABLE (run_id bigint, slot integer, epoch bigint, verdict text) LANGUAGE plpgsql
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off
AS $$
#variable_conflict use_column
BEGIN
    UPDATE fanout_slots s SET seen_at = clock_timestamp(), suspect_since = NULL
    FROM (
        SELECT o.run_id, o.slot FROM fanout_slots o
        JOIN unnest(p_runs, p_slots, p_epochs) u (run_id, slot, epoch)
            ON o.run_id = u.run_id AND o.slot = u.slot AND o.epoch = u.epoch
        WHERE o.active AND (o.suspect_since IS NOT NULL
            OR o.seen_at < clock_timestamp() - make_interval(secs => p_fresh))
        ORDER BY o.run_id, o.slot FOR UPDATE OF o SKIP LOCKED
    ) mine
    WHERE s.run_id = mine.run_id AND s.slot = mine.slot;
    RETURN QUERY
    SELECT u.run_id, u.slot, u.epoch,
        CASE WHEN s.slot IS NULL THEN 'lost' WHEN r.aborting THEN 'abort' ELSE 'stop' END
    FROM unnest(p_runs, p_slots, p_epochs) u (run_id, slot, epoch)
    LEFT JOIN fanout_slots s
        ON s.run_id = u.run_id AND s.slot = u.slot AND s.epoch = u.epoch AND s.active
    LEFT JOIN fanout_runs r ON r.id = u.run_id
    WHERE s.slot IS NULL OR r.closing IS NOT NULL;
END;
$$;

-- Renews a manager's execution. False: a later one took over, or the run is closed.
CREATE OR REPLACE FUNCTION fanout_renew_manager_v1(p_run bigint, p_fence bigint) RETURNS boolean
LANGUAGE sql AS $$
    WITH free AS (
        SELECT id FROM fanout_runs WHERE id = p_run AND fence = p_fence AND status = 'pending'
        FOR NO KEY UPDATE SKIP LOCKED
    ), renewed AS (
        UPDATE fanout_runs r SET manager_seen_at = clock_timestamp(), manager_suspect_since = NULL
        FROM free WHERE r.id = free.id
    )
    SELECT EXISTS (
        SELECT FROM fanout_runs WHERE id = p_run AND fence = p_fence AND status = 'pending')
$$;

CREATE OR REPLACE FUNCTION fanout_renew_callback_v1(
    p_run bigint, p_generation integer, p_task text, p_job bigint
) RETURNS boolean LANGUAGE sql AS $$
    WITH renewed AS (
        UPDATE fanout_callbacks SET seen_at = clock_timestamp(), suspect_since = NULL
        WHERE run_id = p_run AND generation = p_generation AND task = p_task
            AND job_id = p_job AND state = 'running'
        RETURNING 1
    )
    SELECT EXISTS (SELECT FROM renewed)
$$;

-- Why a waiting job of ours will never begin: it is gone, it is final, or its worker died between
-- the fetch and the begin. Null for a job that waits or works.
CREATE OR REPLACE FUNCTION fanout_job_lost_v1(p_job bigint, p_lease double precision) RETURNS text
LANGUAGE sql STABLE AS $$
    SELECT CASE
        WHEN j.id IS NULL THEN 'gone'
        WHEN j.status NOT IN ('todo', 'doing') THEN j.status::text
        WHEN j.status = 'doing' AND NOT EXISTS (
                SELECT FROM procrastinate_workers w WHERE w.id = j.worker_id
                AND w.last_heartbeat > clock_timestamp()
                    - make_interval(secs => greatest(p_lease, 30)))
            AND NOT EXISTS (
                SELECT FROM procrastinate_events e WHERE e.job_id = j.id AND e.type = 'started'
                AND e.at > clock_timestamp() - make_interval(secs => p_lease))
            THEN 'worker lost'
        END
    FROM (SELECT p_job AS wanted) x
    LEFT JOIN procrastinate_jobs j ON j.id = x.wanted
$$;

-- What is at work and has missed a renewal: it is to be marked, or rescued. Reads only.
CREATE OR REPLACE FUNCTION fanout_silent_v1(p_lease double precision)
RETURNS TABLE (run_id bigint, finding text) LANGUAGE sql STABLE
SET enable_seqscan = off SET jit = off AS $$
    SELECT s.run_id, 'silent slot' FROM fanout_slots s
    WHERE s.active AND s.seen_at < clock_timestamp() - make_interval(secs => p_lease / 2)
    UNION
    SELECT r.id, 'silent manager' FROM fanout_runs r
    WHERE r.status = 'pending'
        AND r.manager_seen_at < clock_timestamp() - make_interval(secs => p_lease / 2)
    UNION
    SELECT c.run_id, 'silent callback' FROM fanout_callbacks c
    WHERE c.state = 'running'
        AND c.seen_at < clock_timestamp() - make_interval(secs => p_lease / 2)
$$;

-- Whether a run's book-keeping contradicts itself. What the ledgers say is at work is exactly what
-- the slots hold; a complete ledger is not open; sizes add up to the total; where items wait, one
-- has a due time, or nobody would ever find them. Mistakes that leave these sums alone escape it.
-- STABLE: all it reads is of its caller's one snapshot.
CREATE OR REPLACE FUNCTION fanout_miscounted_v1(p_run bigint) RETURNS boolean
LANGUAGE sql STABLE AS $$
    SELECT r.status = 'processing' AND (l.working <> s.held OR l.odd OR l.size <> r.total
        OR l.open <> r.open_ledgers OR l.ledgers <> r.ledgers)
    FROM fanout_runs r
    CROSS JOIN LATERAL (
        SELECT count(*) AS ledgers, count(*) FILTER (WHERE open) AS open,
            coalesce(sum(size), 0) AS size,
            coalesce(sum(cursor - waiting - succeeded - failed - cancelled), 0) AS working,
            coalesce(bool_or(open <> (succeeded + failed + cancelled < size)
                OR cursor > size OR least(waiting, succeeded, failed, cancelled) < 0
                OR waiting > 0 AND NOT EXISTS (SELECT FROM fanout_items i
                    WHERE i.run_id = g.run_id AND i.ledger = g.ledger
                    AND i.due IS NOT NULL)), false) AS odd
        FROM fanout_ledgers g WHERE run_id = r.id
    ) l
    CROSS JOIN LATERAL (
        SELECT count(held) + count(ready) AS held FROM fanout_slots WHERE run_id = r.id AND active
    ) s
    WHERE r.id = p_run
$$;

-- The open runs on which a sweep has something to do, and what. Reads only.
CREATE OR REPLACE FUNCTION fanout_sweep_plan_v1(p_lease double precision, p_limit integer)
RETURNS TABLE (run_id bigint, finding text) LANGUAGE plpgsql
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off
AS $$
#variable_conflict use_column
DECLARE
    -- Many runs may share one.
    v_full constant text[] := ARRAY(
        SELECT name FROM fanout_limits WHERE fanout_run_full_v1(ARRAY[name]) IS NOT NULL);
BEGIN
    RETURN QUERY
    SELECT f.run_id, string_agg(DISTINCT f.finding, ', ') FROM (
        SELECT s.run_id, s.finding FROM fanout_silent_v1(p_lease) s
        UNION ALL
        SELECT s.run_id, 'lost job' FROM fanout_slots s
        WHERE NOT s.active AND s.seen_at < clock_timestamp() - interval '1 second'
            AND fanout_job_lost_v1(s.job_id, p_lease) IS NOT NULL
        UNION ALL
        SELECT s.run_id, 'slot without a run' FROM fanout_slots s
        LEFT JOIN fanout_runs r ON r.id = s.run_id AND r.status = 'processing'
        WHERE r.id IS NULL
        UNION ALL
        -- An open run has an open ledger besides.
        SELECT r.id, 'counters' FROM fanout_runs r
        WHERE r.status = 'processing' AND (r.open_ledgers = 0 OR fanout_miscounted_v1(r.id))
        UNION ALL
        SELECT r.id, 'over limit' FROM fanout_runs r
        WHERE r.status = 'processing' AND r.max_in_flight + r.surplus < (
            SELECT count(*) FROM fanout_slots s WHERE s.run_id = r.id AND s.active)
        UNION ALL
        SELECT r.id, 'missing slot' FROM fanout_runs r
        WHERE r.status = 'processing' AND NOT coalesce(r.limits && v_full, false)
            AND fanout_lacks_slots_v1(r.id)
        UNION ALL
        SELECT r.id, 'stop pending' FROM fanout_runs r
        WHERE r.status = 'processing' AND r.closing IS NOT NULL AND EXISTS (
            SELECT FROM fanout_ledgers l WHERE l.run_id = r.id AND NOT l.stopped)
        UNION ALL
        SELECT r.id, 'deadline' FROM fanout_runs r
        WHERE r.status IN ('pending', 'processing') AND r.closing IS NULL
            AND r.deadline <= clock_timestamp()
        UNION ALL
        SELECT r.id, 'lost manager job' FROM fanout_runs r
        WHERE r.status = 'pending' AND r.manager_task IS NOT NULL AND r.manager_seen_at IS NULL
            AND fanout_job_lost_v1(r.manager_job_id, p_lease) IS NOT NULL
        UNION ALL
        SELECT c.run_id, 'lost callback job' FROM fanout_callbacks c
        WHERE c.state = 'owed' AND fanout_job_lost_v1(c.job_id, p_lease) IS NOT NULL
        UNION ALL
        SELECT r.id, 'stray job' FROM fanout_runs r
        -- The numbers in use and some beyond: one look into the index of waiting locks for each.
        CROSS JOIN LATERAL generate_series(0, 16 + coalesce((
            SELECT max(s.slot) FROM fanout_slots s WHERE s.run_id = r.id), 0)) n
        JOIN procrastinate_jobs j ON j.status = 'todo'
            AND j.queueing_lock = 'fanout_child:' || r.id || ':' || n
        WHERE r.status = 'processing' AND NOT EXISTS (
            SELECT FROM fanout_slots s WHERE s.run_id = r.id AND s.job_id = j.id)
        UNION ALL
        SELECT r.id, 'stuck' FROM fanout_runs r
        WHERE r.status IN ('pending', 'processing') AND r.idle_seconds > 0
            AND (NOT r.refused OR r.paused OR EXISTS (
                SELECT FROM fanout_slots s WHERE s.run_id = r.id AND s.active))
    ) f
    GROUP BY f.run_id ORDER BY f.run_id LIMIT p_limit;
END;
$$;

-- Takes a claim back from a dead worker: the slot is freed, its job finished as failed (never put
-- back: a woken worker would finish it for its next holder), the item charged a crash and released,
-- or failed once it has crashed too often. The caller holds ledgers, run and slots.
CREATE OR REPLACE FUNCTION fanout_rescue_v1(p_run bigint, p_slot integer) RETURNS text
LANGUAGE plpgsql AS $$
DECLARE
    v_outcome text := 'freed';
    v_ledger integer;
    s fanout_slots;
    r record;
    t record;
BEGIN
    DELETE FROM fanout_slots WHERE run_id = p_run AND slot = p_slot RETURNING * INTO s;
    SELECT closing, ledgers, max_crashes INTO r FROM fanout_runs WHERE id = p_run;
    PERFORM fanout_fail_job_v1(s.job_id);
    IF s.ready IS NOT NULL THEN
        -- Perhaps it was begun, and its predecessor's report lost with the process: a suspect too.
        PERFORM fanout_put_back_v1(p_run, s.ready, r.closing IS NOT NULL, 1);
    END IF;
    IF s.held IS NULL THEN
        RETURN v_outcome;
    END IF;
    v_ledger := s.held % r.ledgers;
    SELECT crashes + 1 AS crashes INTO t FROM fanout_items
    WHERE run_id = p_run AND position = s.held;
    v_outcome := CASE WHEN t.crashes >= r.max_crashes THEN 'failed'
        WHEN r.closing IS NOT NULL THEN 'cancelled' ELSE 'released' END;
    UPDATE fanout_items
    SET crashes = crashes + 1, claim = claim + 1, ledger = v_ledger,
        status = CASE WHEN v_outcome = 'released' THEN 'pending' ELSE v_outcome END,
        due = CASE WHEN v_outcome = 'released' THEN clock_timestamp() END,
        finished_at = CASE WHEN v_outcome <> 'released' THEN clock_timestamp() END,
        error_type = CASE WHEN v_outcome = 'failed' THEN 'WorkerLost' END,
        error = CASE WHEN v_outcome = 'failed' THEN jsonb_build_object(
            'type', 'WorkerLost', 'class', 'permanent', 'traceback', '',
            'message', format('its worker died %s times while working on this item', t.crashes))
            ELSE error END
    WHERE run_id = p_run AND position = s.held AND claim = s.held_claim AND status = 'processing';
    IF NOT FOUND THEN
        RETURN 'freed';
    END IF;
    UPDATE fanout_ledgers
    SET waiting = waiting + (v_outcome = 'released')::integer,
        failed = failed + (v_outcome = 'failed')::integer,
        cancelled = cancelled + (v_outcome = 'cancelled')::integer,
        open = open AND succeeded + failed + cancelled + (v_outcome <> 'released')::integer < size,
        updated_at = clock_timestamp()
    WHERE run_id = p_run AND ledger = v_ledger;
    UPDATE fanout_runs SET open_ledgers = (
        SELECT count(*) FROM fanout_ledgers WHERE run_id = p_run AND open)
    WHERE id = p_run AND v_outcome <> 'released';
    RETURN v_outcome;
END;
$$;

-- Counts the items of a run anew and corrects its ledgers; items at work that no slot holds are
-- released at no charge. The caller holds ledgers, run and slots.
CREATE OR REPLACE FUNCTION fanout_recount_v1(p_run bigint) RETURNS boolean LANGUAGE plpgsql
SET enable_hashjoin = on
AS $$
DECLARE
    v_changed bigint;
    v_orphans bigint;
    r fanout_runs;
BEGIN
    SELECT * INTO r FROM fanout_runs WHERE id = p_run;
    IF r.ledgers = 0 THEN
        RETURN false;
    END IF;
    UPDATE fanout_items t
    SET status = CASE WHEN r.closing IS NULL THEN 'pending' ELSE 'cancelled' END,
        due = CASE WHEN r.closing IS NULL THEN clock_timestamp() END,
        finished_at = CASE WHEN r.closing IS NOT NULL THEN clock_timestamp() END,
        claim = t.claim + 1, ledger = t.position % r.ledgers
    WHERE t.run_id = p_run AND t.status = 'processing' AND NOT EXISTS (
        SELECT FROM fanout_slots s
        WHERE s.run_id = p_run AND s.active AND (s.held = t.position AND s.held_claim = t.claim
            OR s.ready = t.position AND s.ready_claim = t.claim));
    GET DIAGNOSTICS v_orphans = ROW_COUNT;
    -- The cursor stands behind the last item that was ever handed out; what is pending before it
    -- without a due time, or in another ledger's index, would be found by nobody.
    WITH counted AS (
        SELECT position % r.ledgers AS ledger, count(*) AS size,
            coalesce(max(position / r.ledgers + 1)
                FILTER (WHERE claim > 0 OR status <> 'pending' OR due IS NOT NULL), 0) AS handed,
            count(*) FILTER (WHERE status = 'succeeded') AS succeeded,
            count(*) FILTER (WHERE status = 'failed') AS failed,
            count(*) FILTER (WHERE status = 'cancelled') AS cancelled,
            count(*) FILTER (WHERE status = 'pending') AS pending,
            count(*) FILTER (WHERE status = 'pending' AND claim = 0 AND lane IS NOT NULL) AS fresh,
            count(*) FILTER (WHERE status = 'processing') AS working
        FROM fanout_items WHERE run_id = p_run GROUP BY 1
    ), wanted AS (
        SELECT l.ledger, l.stopped, c.size, c.succeeded, c.failed,
            CASE WHEN l.stopped THEN 0 ELSE c.fresh END AS fresh,
            CASE WHEN l.stopped THEN c.size ELSE c.handed END AS cursor,
            c.cancelled + CASE WHEN l.stopped THEN c.pending ELSE 0 END AS cancelled,
            CASE WHEN l.stopped THEN 0 ELSE c.handed - c.succeeded - c.failed - c.cancelled
                - c.working END AS waiting
        FROM fanout_ledgers l JOIN counted c ON c.ledger = l.ledger WHERE l.run_id = p_run
    ), found AS (
        UPDATE fanout_items t
        SET due = coalesce(t.due, clock_timestamp()), ledger = w.ledger
        FROM wanted w
        WHERE t.run_id = p_run AND t.status = 'pending' AND w.ledger = t.position % r.ledgers
            AND NOT w.stopped AND t.position / r.ledgers < w.cursor
            AND (t.due IS NULL OR t.ledger IS DISTINCT FROM w.ledger)
        RETURNING 1
    ), corrected AS (
        UPDATE fanout_ledgers l
        SET size = w.size, succeeded = w.succeeded, failed = w.failed, cancelled = w.cancelled,
            waiting = w.waiting, cursor = w.cursor, fresh = w.fresh,
            open = w.succeeded + w.failed + w.cancelled < w.size
        FROM wanted w
        WHERE l.run_id = p_run AND l.ledger = w.ledger AND (
            l.size, l.succeeded, l.failed, l.cancelled, l.waiting, l.cursor, l.fresh, l.open
            ) IS DISTINCT FROM (
            w.size, w.succeeded, w.failed, w.cancelled, w.waiting, w.cursor, w.fresh,
            w.succeeded + w.failed + w.cancelled < w.size)
        RETURNING 1
    )
    SELECT (SELECT count(*) FROM found) + (SELECT count(*) FROM corrected) INTO v_changed;
    UPDATE fanout_runs
    SET open_ledgers = (SELECT count(*) FROM fanout_ledgers WHERE run_id = p_run AND open)
    WHERE id = p_run AND open_ledgers <> (
        SELECT count(*) FROM fanout_ledgers WHERE run_id = p_run AND open);
    RETURN v_changed > 0 OR v_orphans > 0;
END;
$$;

-- Repairs one run, in a transaction of its own. Two sweeps at once are harmless: the second finds
-- the advisory lock taken and leaves. Answers what was done, as counts by name.
CREATE OR REPLACE FUNCTION fanout_sweep_run_v1(p_run bigint, p_lease double precision)
RETURNS jsonb LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off
SET enable_mergejoin = off SET jit = off
AS $$
DECLARE
    v_now timestamptz;
    v_silent timestamptz;
    v_second timestamptz;
    v_done jsonb := '{}';
    v_refused boolean := false;
    v_count bigint;
    v_reason text;
    v_outcome text;
    r fanout_runs;
    s record;
    c record;
BEGIN
    IF NOT pg_try_advisory_xact_lock(hashtextextended('fanout_sweep:' || current_schema(), p_run))
    THEN
        RETURN v_done;
    END IF;
    -- Renewals come from the same thread: it does not wait long for what somebody keeps locked.
    PERFORM set_config('lock_timeout', ceil(p_lease * 1000 / 8)::text, true);
    BEGIN
        r := fanout_lock_run_v1(p_run);
        PERFORM FROM fanout_slots WHERE run_id = p_run ORDER BY slot FOR UPDATE;
    EXCEPTION WHEN lock_not_available THEN
        RETURN v_done;
    END;
    v_now := clock_timestamp();
    -- What is silent is marked once half a lease is over, which is a renewal missed, and rescued
    -- when it is silent still a quarter later: what it held goes on within a lease.
    v_silent := v_now - make_interval(secs => p_lease / 2);
    v_second := v_now - make_interval(secs => p_lease / 4);
    IF r.id IS NULL OR r.status NOT IN ('pending', 'processing') THEN
        -- A closed run keeps no slots; only its callbacks can still be owed.
        DELETE FROM fanout_slots WHERE run_id = p_run;
        GET DIAGNOSTICS v_count = ROW_COUNT;
        IF v_count > 0 THEN
            v_done := v_done || jsonb_build_object('freed', v_count);
        END IF;
    END IF;

    FOR s IN SELECT slot, suspect_since FROM fanout_slots
        WHERE run_id = p_run AND active AND seen_at < v_silent ORDER BY slot LOOP
        IF s.suspect_since IS NULL THEN
            UPDATE fanout_slots SET suspect_since = v_now WHERE run_id = p_run AND slot = s.slot;
            v_outcome := 'marked';
        ELSIF s.suspect_since > v_second THEN
            CONTINUE;
        ELSE
            -- One that cannot be rescued keeps nobody else from it.
            BEGIN
                v_outcome := 'rescued_' || fanout_rescue_v1(p_run, s.slot);
            EXCEPTION WHEN OTHERS THEN
                RAISE WARNING 'fanout: slot % of run % could not be rescued: %',
                    s.slot, p_run, SQLERRM;
                v_outcome := 'unrecoverable';
            END;
        END IF;
        v_done := v_done || jsonb_build_object(
            v_outcome, coalesce((v_done->>v_outcome)::bigint, 0) + 1);
    END LOOP;

    -- Queued slots whose job will never begin.
    FOR s IN SELECT slot, job_id, fanout_job_lost_v1(job_id, p_lease) AS reason
        FROM fanout_slots
        WHERE run_id = p_run AND NOT active AND fanout_job_lost_v1(job_id, p_lease) IS NOT NULL
        ORDER BY slot LOOP
        -- Not a death: the job itself ended before it could begin, and so may the next one.
        v_refused := v_refused OR s.reason = 'failed';
        PERFORM fanout_fail_job_v1(s.job_id);
        DELETE FROM fanout_slots WHERE run_id = p_run AND slot = s.slot;
        v_done := v_done || jsonb_build_object(
            'lost_jobs', coalesce((v_done->>'lost_jobs')::bigint, 0) + 1);
    END LOOP;

    -- Waiting jobs of ours that own no slot hold a slot's lock.
    FOR s IN SELECT j.id FROM procrastinate_jobs j
        WHERE j.status = 'todo' AND j.queueing_lock = ANY (ARRAY(
                SELECT 'fanout_child:' || p_run || ':' || n
                FROM generate_series(0, 16 + coalesce((
                    SELECT max(slot) FROM fanout_slots WHERE run_id = p_run), 0)) n))
            AND NOT EXISTS (SELECT FROM fanout_slots WHERE run_id = p_run AND job_id = j.id)
        ORDER BY j.id LOOP
        PERFORM fanout_cancel_job_v1(s.id);
        v_done := v_done || jsonb_build_object(
            'stray_jobs', coalesce((v_done->>'stray_jobs')::bigint, 0) + 1);
    END LOOP;

    IF fanout_miscounted_v1(p_run) AND fanout_recount_v1(p_run) THEN
        v_done := v_done || '{"recounted": 1}';
    END IF;

    -- What stops a run: its deadline, its tolerance, an unfinished stop.
    SELECT * INTO r FROM fanout_runs WHERE id = p_run;
    SELECT sum(failed) INTO v_count FROM fanout_ledgers WHERE run_id = p_run;
    v_reason := CASE
        WHEN r.closing IS NOT NULL THEN NULL
        WHEN r.deadline <= v_now THEN format('its deadline passed (%s)', r.deadline)
        WHEN v_done ? 'rescued_failed' AND fanout_intolerable_v1(
                v_count, r.total, r.tolerate_count, r.tolerate_share)
            THEN fanout_tolerance_reason_v1(p_run) END;
    IF r.status IN ('pending', 'processing') AND (v_reason IS NOT NULL
            OR r.closing IS NOT NULL AND EXISTS (
                SELECT FROM fanout_ledgers WHERE run_id = p_run AND NOT stopped)) THEN
        PERFORM fanout_stop_v1(p_run, coalesce(r.closing, 'failed'), v_reason, false);
        v_done := v_done || '{"stopped": 1}';
        SELECT * INTO r FROM fanout_runs WHERE id = p_run;
    END IF;
    IF r.status = 'processing' AND r.open_ledgers = 0 THEN
        PERFORM fanout_close_complete_v1(p_run);
        v_done := v_done || '{"closed": 1}';
        SELECT * INTO r FROM fanout_runs WHERE id = p_run;
    END IF;

    -- Managers: silent ones by two looks, and those whose job will never begin.
    IF r.status = 'pending' THEN
        v_reason := CASE
            WHEN r.manager_seen_at < v_silent AND r.manager_suspect_since <= v_second
                THEN 'its worker died'
            WHEN r.manager_seen_at IS NULL AND r.manager_task IS NOT NULL
                THEN fanout_job_lost_v1(r.manager_job_id, p_lease) END;
        IF r.manager_seen_at < v_silent AND r.manager_suspect_since IS NULL THEN
            UPDATE fanout_runs SET manager_suspect_since = v_now WHERE id = p_run;
            v_done := v_done || '{"marked": 1}';
        ELSIF v_reason IS NOT NULL THEN
            PERFORM fanout_fail_job_v1(r.manager_job_id);
            IF r.manager_task IS NULL OR r.manager_crashes + 1 >= r.manager_max_attempts THEN
                PERFORM fanout_close_v1(p_run, 'failed', CASE WHEN r.manager_task IS NULL
                    THEN 'the program that listed its items died before all were stored'
                    ELSE format('its manager was lost %s times, last: %s',
                        r.manager_crashes + 1, v_reason) END);
                v_done := v_done || '{"closed": 1}';
            ELSE
                UPDATE fanout_runs SET manager_crashes = manager_crashes + 1, fence = fence + 1
                WHERE id = p_run;
                PERFORM fanout_deal_manager_v1(p_run, NULL);
                v_done := v_done || '{"managers": 1}';
            END IF;
        END IF;
    END IF;

    IF r.status = 'processing' THEN
        -- Rescued slots need not end any more; what is above the limit must.
        UPDATE fanout_runs SET surplus = excess.n
        FROM (
            SELECT greatest(0, count(*) - r.max_in_flight) AS n
            FROM fanout_slots WHERE run_id = p_run AND active
        ) excess
        WHERE id = p_run AND surplus <> excess.n;
        v_count := fanout_top_up_v1(p_run);
        IF v_count > 0 THEN
            v_done := v_done || jsonb_build_object('dealt', v_count);
        END IF;
    END IF;

    -- Callbacks owed without a job, or silent in the middle.
    FOR c IN SELECT generation, task, state, job_id, attempts, suspect_since, seen_at,
            fanout_job_lost_v1(job_id, p_lease) AS lost
        FROM fanout_callbacks WHERE run_id = p_run AND state IN ('owed', 'running')
        ORDER BY generation, task FOR UPDATE LOOP
        IF c.state = 'running' AND c.seen_at >= v_silent
                OR c.state = 'owed' AND c.lost IS NULL
                OR c.state = 'running' AND c.suspect_since > v_second THEN
            CONTINUE;
        ELSIF c.state = 'running' AND c.suspect_since IS NULL THEN
            UPDATE fanout_callbacks SET suspect_since = v_now
            WHERE run_id = p_run AND generation = c.generation AND task = c.task;
            v_outcome := 'marked';
        ELSE
            PERFORM fanout_fail_job_v1(c.job_id);
            IF c.attempts >= 6 THEN
                UPDATE fanout_callbacks
                SET state = 'failed', error = coalesce(error, jsonb_build_object(
                    'type', 'WorkerLost', 'class', 'permanent',
                    'message', 'its worker died, or its task is not known to the workers'))
                WHERE run_id = p_run AND generation = c.generation AND task = c.task;
            ELSE
                -- A job that failed before it began counts too, or it would be dealt for ever.
                UPDATE fanout_callbacks SET attempts = attempts + 1
                WHERE run_id = p_run AND generation = c.generation AND task = c.task
                    AND c.state = 'owed' AND c.lost = 'failed';
                PERFORM fanout_call_v1(p_run, c.generation, c.task, NULL);
            END IF;
            v_outcome := 'callbacks';
        END IF;
        v_done := v_done || jsonb_build_object(
            v_outcome, coalesce((v_done->>v_outcome)::bigint, 0) + 1);
    END LOOP;

    -- The last fuse: a run that could move, has nobody who works on it or waits to, and that no
    -- sweep has set going again. Only time seen by sweeps that follow each other counts.
    IF r.status IN ('pending', 'processing') THEN
        v_refused := v_refused
            AND NOT EXISTS (SELECT FROM fanout_slots WHERE run_id = p_run AND active);
        IF v_refused OR fanout_idle_v1(p_run) THEN
            UPDATE fanout_runs
            SET idle_seconds = idle_seconds + CASE WHEN idle_seen_at > v_now
                        - make_interval(secs => greatest(p_lease * 2, 120))
                    THEN extract(epoch FROM v_now - idle_seen_at) ELSE 0.001 END,
                idle_seen_at = v_now, refused = v_refused
            WHERE id = p_run;
            IF (SELECT idle_seconds >= stuck_after FROM fanout_runs WHERE id = p_run) THEN
                -- What nobody works on is cancelled; what a dead worker holds ends with its rescue.
                PERFORM fanout_stop_v1(p_run, 'failed', format(
                    'stuck: no progress for %s s although it could have moved%s', r.stuck_after,
                    CASE WHEN v_refused THEN format('; its jobs end before they begin: is the'
                        ' task %s known to the workers?', r.child_task) ELSE '' END),
                    false);
                v_done := v_done || '{"stopped": 1}';
            ELSE
                v_done := v_done || '{"idle": 1}';
            END IF;
        ELSE
            UPDATE fanout_runs SET idle_seconds = 0, idle_seen_at = NULL, refused = false
            WHERE id = p_run AND idle_seconds > 0 AND (NOT refused OR paused OR EXISTS (
                SELECT FROM fanout_slots WHERE run_id = p_run AND active));
        END IF;
    END IF;
    RETURN v_done;
END;
$$;

-- Whether a run could move and nothing will move it: not paused, nothing due later, no slot, no
-- manager and no job of its own. What is silent has been marked: it will be rescued, or renewed.
CREATE OR REPLACE FUNCTION fanout_idle_v1(p_run bigint) RETURNS boolean
LANGUAGE sql AS $$
    SELECT CASE r.status
        WHEN 'pending' THEN r.manager_task IS NOT NULL AND r.manager_suspect_since IS NULL
            AND NOT EXISTS (SELECT FROM procrastinate_jobs j
                WHERE j.id = r.manager_job_id AND j.status IN ('todo', 'doing'))
        -- Who stands in the line of a limit cannot move; nor can items whose key is taken.
        ELSE NOT r.paused AND NOT EXISTS (SELECT FROM fanout_slots s WHERE s.run_id = r.id)
            AND fanout_run_full_v1(r.limits) IS NULL AND fanout_granted_v1(r.id, 1) > 0
            AND (r.key_limit IS NULL OR EXISTS (SELECT FROM fanout_slot_plan_v1(r.id)))
            AND EXISTS (
                SELECT FROM fanout_ledgers l WHERE l.run_id = r.id AND (l.cursor < l.size
                OR EXISTS (SELECT FROM fanout_items t WHERE t.run_id = r.id
                    AND t.ledger = l.ledger AND t.due <= clock_timestamp())))
        END
    FROM fanout_runs r WHERE r.id = p_run
$$;

-- The runs whose item rows are still to be rewritten or removed.
CREATE OR REPLACE FUNCTION fanout_untidy_v1(p_limit integer) RETURNS SETOF bigint
LANGUAGE sql AS $$
    SELECT id FROM fanout_runs WHERE untidy_from IS NOT NULL ORDER BY id LIMIT p_limit
$$;

-- Rewrites or removes one batch of them. Returns the rows written.
CREATE OR REPLACE FUNCTION fanout_tidy_v1(p_run bigint, p_limit bigint) RETURNS bigint
LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off
SET enable_mergejoin = off SET jit = off
AS $$
BEGIN
    -- Renewals come from the same thread: what somebody keeps locked is left to the next sweep.
    PERFORM FROM fanout_runs WHERE id = p_run FOR NO KEY UPDATE SKIP LOCKED;
    RETURN CASE WHEN FOUND THEN fanout_rewrite_v1(p_run, p_limit) ELSE 0 END;
END;
$$;

-- Removes runs closed longer ago than p_age seconds, p_limit rows at a time: a run goes when its
-- items are gone; from the first batch on it cannot be reopened, and its key is free. Returns how
-- many rows were removed; call again until it is 0.
CREATE OR REPLACE FUNCTION fanout_prune_v1(p_age double precision, p_limit bigint) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    v_before timestamptz := clock_timestamp() - make_interval(secs => p_age);
    v_run bigint;
    v_rows bigint;
    r fanout_runs;
BEGIN
    SELECT id INTO v_run FROM fanout_runs
    WHERE closed_at < v_before
        AND NOT EXISTS (SELECT FROM fanout_callbacks c
            WHERE c.run_id = fanout_runs.id AND c.state IN ('owed', 'running'))
    ORDER BY closed_at LIMIT 1;
    IF v_run IS NULL THEN
        RETURN 0;
    END IF;
    -- Renewals come from the same thread: what somebody keeps locked is left to the next sweep.
    PERFORM set_config('lock_timeout', '200', true);
    BEGIN
        r := fanout_lock_run_v1(v_run);
    EXCEPTION WHEN lock_not_available THEN
        RETURN 0;
    END;
    IF r.closed_at IS NULL OR r.closed_at >= v_before THEN
        RAISE EXCEPTION 'run % was reopened meanwhile', v_run USING ERRCODE = '40001';
    END IF;
    UPDATE fanout_runs SET replaced = true, run_key = NULL WHERE id = v_run AND NOT replaced;
    DELETE FROM fanout_items WHERE run_id = v_run AND position IN (
        SELECT position FROM fanout_items WHERE run_id = v_run ORDER BY position LIMIT p_limit);
    GET DIAGNOSTICS v_rows = ROW_COUNT;
    IF v_rows < p_limit THEN
        DELETE FROM fanout_ledgers WHERE run_id = v_run;
        DELETE FROM fanout_lanes WHERE run_id = v_run;
        DELETE FROM fanout_slots WHERE run_id = v_run;
        DELETE FROM fanout_callbacks WHERE run_id = v_run;
        DELETE FROM fanout_closes WHERE run_id = v_run;
        DELETE FROM fanout_runs WHERE id = v_run;
        v_rows := v_rows + 1;
    END IF;
    RETURN v_rows;
END;
$$;

-- Removes our own job rows that ended longer ago than p_age seconds.
CREATE OR REPLACE FUNCTION fanout_prune_jobs_v1(
    p_tasks text[], p_age double precision, p_limit bigint
) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    v_rows bigint;
BEGIN
    DELETE FROM procrastinate_jobs WHERE id IN (
        SELECT j.id FROM procrastinate_jobs j
        WHERE j.task_name = ANY (p_tasks) AND j.status NOT IN ('todo', 'doing')
            AND NOT EXISTS (SELECT FROM procrastinate_events e WHERE e.job_id = j.id
                AND e.at >= clock_timestamp() - make_interval(secs => p_age))
            AND NOT EXISTS (SELECT FROM fanout_slots s WHERE s.job_id = j.id)
        ORDER BY j.id LIMIT p_limit FOR UPDATE SKIP LOCKED);
    GET DIAGNOSTICS v_rows = ROW_COUNT;
    RETURN v_rows;
END;
$$;
