-- What operators do to a run. Each takes all ledgers and then the run, so that after it returns
-- nothing is handed out against it. Each answers the run's status, or null for an unknown run.

-- Deletes the queued slots of a run from the latest on, all but p_keep, and cancels their jobs.
-- The caller holds the run.
CREATE OR REPLACE FUNCTION fanout_undeal_v1(p_run bigint, p_keep integer) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    WITH surplus AS (
        SELECT slot FROM fanout_slots WHERE run_id = p_run AND NOT active
        ORDER BY coalesce(scheduled_at, '-infinity'), slot OFFSET p_keep
    ), gone AS (
        DELETE FROM fanout_slots s USING surplus
        WHERE s.run_id = p_run AND s.slot = surplus.slot RETURNING s.job_id
    )
    SELECT count(fanout_cancel_job_v1(job_id)) FROM (
        SELECT job_id FROM gone ORDER BY job_id) ordered INTO p_keep;
END;
$$;

-- Stops a run early: it will close as p_status. What was not handed out, or waits, is counted as
-- cancelled in O(ledgers): the item rows are rewritten later, and readers apply the rule. Items at
-- work end first (told to hurry, with p_abort); the last of them closes, or this call. Before the
-- seal it closes at once.
CREATE OR REPLACE FUNCTION fanout_stop_v1(
    p_run bigint, p_status text, p_reason text, p_abort boolean
) RETURNS text LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off
SET enable_mergejoin = off SET jit = off
AS $$
DECLARE
    v_open integer;
    r fanout_runs;
BEGIN
    r := fanout_lock_run_v1(p_run);
    IF r.status = 'pending' THEN
        PERFORM fanout_cancel_job_v1(r.manager_job_id);
        PERFORM fanout_close_v1(p_run, p_status, p_reason);
    ELSIF r.status = 'processing' THEN
        UPDATE fanout_ledgers
        SET cancelled = cancelled + size - cursor + waiting, cursor = size, waiting = 0,
            fresh = 0, stopped = true, open = open AND succeeded + failed + cancelled + size - cursor + waiting < size,
            updated_at = clock_timestamp()
        WHERE run_id = p_run AND NOT stopped;
        SELECT count(*) INTO v_open FROM fanout_ledgers WHERE run_id = p_run AND open;
        UPDATE fanout_runs
        SET closing = coalesce(closing, p_status), reason = coalesce(reason, p_reason),
            aborting = aborting OR p_abort, open_ledgers = v_open,
            untidy_from = coalesce(untidy_from, 0)
        WHERE id = p_run;
        IF v_open = 0 THEN
            PERFORM FROM fanout_slots WHERE run_id = p_run ORDER BY slot FOR UPDATE;
            PERFORM fanout_close_complete_v1(p_run);
        ELSE
            PERFORM fanout_undeal_v1(p_run, 0);
            PERFORM fanout_notify_v1(jsonb_build_object(
                'run', p_run, 'event', CASE WHEN p_abort THEN 'abort' ELSE 'stop' END));
        END IF;
    END IF;
    RETURN (SELECT status FROM fanout_runs WHERE id = p_run);
END;
$$;

-- Nothing more is handed out until the run is resumed.
CREATE OR REPLACE FUNCTION fanout_pause_v1(p_run bigint) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
    r fanout_runs;
BEGIN
    r := fanout_lock_run_v1(p_run);
    IF r.status IN ('pending', 'processing') AND NOT r.paused THEN
        UPDATE fanout_runs SET paused = true WHERE id = p_run;
        PERFORM fanout_undeal_v1(p_run, 0);
    END IF;
    RETURN r.status;
END;
$$;

CREATE OR REPLACE FUNCTION fanout_resume_v1(p_run bigint) RETURNS text LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off
SET enable_mergejoin = off SET jit = off
AS $$
DECLARE
    r fanout_runs;
BEGIN
    r := fanout_lock_run_v1(p_run);
    IF r.status IN ('pending', 'processing') AND r.paused THEN
        UPDATE fanout_runs SET paused = false WHERE id = p_run;
        PERFORM fanout_top_up_v1(p_run);
    END IF;
    RETURN r.status;
END;
$$;

-- Changes an open run. p_changes names what changes: max_in_flight, tolerate_count,
-- tolerate_share, deadline, priority (of the jobs dealt from now on, the queued ones included).
CREATE OR REPLACE FUNCTION fanout_update_v1(p_run bigint, p_changes jsonb) RETURNS text
LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off
SET enable_mergejoin = off SET jit = off
AS $$
DECLARE
    v_active integer;
    c fanout_runs := jsonb_populate_record(NULL::fanout_runs, p_changes);
    r fanout_runs;
BEGIN
    r := fanout_lock_run_v1(p_run);
    IF r.status IN ('pending', 'processing') THEN
        SELECT count(*) INTO v_active FROM fanout_slots WHERE run_id = p_run AND active;
        UPDATE fanout_runs
        SET max_in_flight = coalesce(c.max_in_flight, max_in_flight),
            surplus = greatest(0, v_active - coalesce(c.max_in_flight, max_in_flight)),
            tolerate_count = CASE WHEN p_changes ? 'tolerate_count' OR p_changes ? 'tolerate_share'
                THEN c.tolerate_count ELSE tolerate_count END,
            tolerate_share = CASE WHEN p_changes ? 'tolerate_count' OR p_changes ? 'tolerate_share'
                THEN c.tolerate_share ELSE tolerate_share END,
            deadline = CASE WHEN p_changes ? 'deadline' THEN c.deadline ELSE deadline END,
            child_priority = coalesce((p_changes->>'priority')::integer, child_priority)
        WHERE id = p_run
        RETURNING * INTO r;
        IF r.closing IS NULL AND fanout_intolerable_v1(
                (SELECT sum(failed)::bigint FROM fanout_ledgers WHERE run_id = p_run),
                r.total, r.tolerate_count, r.tolerate_share) THEN
            RETURN fanout_stop_v1(p_run, 'failed', fanout_tolerance_reason_v1(p_run), false);
        END IF;
        IF p_changes ? 'priority' THEN
            PERFORM fanout_undeal_v1(p_run, 0);
        ELSE
            PERFORM fanout_undeal_v1(p_run, greatest(0, r.max_in_flight - v_active));
        END IF;
        PERFORM fanout_top_up_v1(p_run);
    END IF;
    RETURN r.status;
END;
$$;

-- Rewrites item rows of a stopped run that still read pending, and removes those of a run closed
-- before its seal: p_limit positions at a time, null for all that is left. The caller holds the
-- run, which is enough: in a stopped ledger nobody else writes a pending item. Returns the rows
-- written.
CREATE OR REPLACE FUNCTION fanout_rewrite_v1(p_run bigint, p_limit bigint) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    v_rows bigint := 0;
    v_end bigint;
    r record;
BEGIN
    SELECT untidy_from, ledgers, staged, sealed_at INTO r FROM fanout_runs WHERE id = p_run;
    IF r.untidy_from IS NULL THEN
        RETURN 0;
    END IF;
    v_end := r.untidy_from + coalesce(p_limit, r.staged);
    IF r.sealed_at IS NULL THEN
        DELETE FROM fanout_items
        WHERE run_id = p_run AND position >= r.untidy_from AND position < v_end;
    ELSE
        UPDATE fanout_items t
        SET status = 'cancelled', due = NULL, finished_at = clock_timestamp()
        FROM fanout_ledgers l
        WHERE t.run_id = p_run AND t.position >= r.untidy_from AND t.position < v_end
            AND t.status = 'pending' AND l.run_id = p_run
            AND l.ledger = t.position % r.ledgers AND l.stopped;
    END IF;
    GET DIAGNOSTICS v_rows = ROW_COUNT;
    UPDATE fanout_runs SET untidy_from = CASE WHEN v_end < staged THEN v_end END
    WHERE id = p_run;
    RETURN v_rows;
END;
$$;

-- Makes chosen failed or cancelled items due now, with their failures and crashes forgotten. A
-- closed run opens again as its next generation. Answers how many, or -1 where the run cannot be
-- reopened: it was replaced, or is being stopped.
CREATE OR REPLACE FUNCTION fanout_retry_failed_v1(
    p_run bigint, p_statuses text[], p_error_type text
) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    v_chosen bigint;
    r fanout_runs;
BEGIN
    r := fanout_lock_run_v1(p_run);
    IF r.id IS NULL THEN
        RETURN NULL;
    ELSIF r.replaced OR r.closing IS NOT NULL THEN
        RETURN -1;
    ELSIF r.ledgers = 0 THEN
        RETURN 0;
    END IF;
    PERFORM fanout_rewrite_v1(p_run, NULL);
    WITH chosen AS (
        UPDATE fanout_items t
        SET status = 'pending', due = clock_timestamp(), ledger = t.position % r.ledgers,
            failures = 0, crashes = 0, claim = t.claim + 1, finished_at = NULL, error = NULL,
            error_type = NULL, result = NULL
        FROM (
            SELECT position, status FROM fanout_items
            WHERE run_id = p_run AND status = ANY (p_statuses)
                AND status IN ('failed', 'cancelled')
                AND (p_error_type IS NULL OR error_type = p_error_type)
        ) o
        WHERE t.run_id = p_run AND t.position = o.position
        RETURNING t.ledger, o.status
    ), per AS (
        SELECT ledger, count(*) AS n, count(*) FILTER (WHERE status = 'failed') AS failed
        FROM chosen GROUP BY ledger
    ), moved AS (
        UPDATE fanout_ledgers l
        SET waiting = l.waiting + per.n, failed = l.failed - per.failed,
            cancelled = l.cancelled - (per.n - per.failed), open = true,
            updated_at = clock_timestamp()
        FROM per WHERE l.run_id = p_run AND l.ledger = per.ledger
        RETURNING per.n
    )
    SELECT coalesce(sum(n), 0) INTO v_chosen FROM moved;
    IF v_chosen = 0 THEN
        RETURN 0;
    END IF;
    UPDATE fanout_ledgers
    SET stopped = false, rate = CASE WHEN r.status = 'processing' THEN rate ELSE 0 END
    WHERE run_id = p_run AND (stopped OR r.status <> 'processing');
    UPDATE fanout_runs
    SET generation = generation + (status <> 'processing')::integer,
        done_before = CASE WHEN status = 'processing' THEN done_before ELSE (
            SELECT sum(succeeded + failed) FROM fanout_ledgers WHERE run_id = p_run) END,
        started_at = CASE WHEN status <> 'processing' THEN clock_timestamp() ELSE started_at END,
        status = 'processing', reason = NULL, closed_at = NULL, idle_seconds = 0,
        -- A deadline that has passed would stop the new generation at once.
        deadline = CASE WHEN deadline > clock_timestamp() THEN deadline END,
        open_ledgers = (SELECT count(*) FROM fanout_ledgers WHERE run_id = p_run AND open)
    WHERE id = p_run;
    PERFORM fanout_top_up_v1(p_run);
    RETURN v_chosen;
END;
$$;
