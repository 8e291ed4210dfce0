-- Starting a run, staging its items, sealing it; callbacks' own steps.

-- Stores a run and defers its manager job. Meant to join the caller's transaction. p_spec holds
-- the columns of fanout_runs by name. Answers the run and what became of the call:
--   created   a new run          existing  the run that has this key already
--   conflict  the key is taken by a run with other arguments: nothing was stored
CREATE OR REPLACE FUNCTION fanout_start_v1(p_spec jsonb)
RETURNS TABLE (run_id bigint, outcome text, run_status text) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_key text := p_spec->>'run_key';
    v_job bigint;
    s fanout_runs := jsonb_populate_record(NULL::fanout_runs, p_spec);
    r record;
BEGIN
    FOR i IN 1 .. 10 LOOP
        IF v_key IS NOT NULL THEN
            SELECT id, status, args_digest INTO r FROM fanout_runs
            WHERE name = s.name AND run_key = v_key;
            IF FOUND AND (r.status IN ('pending', 'processing')
                    OR coalesce(p_spec->>'if_closed', 'return') <> 'replace') THEN
                run_id := r.id;
                run_status := r.status;
                outcome := CASE WHEN r.args_digest IS NOT DISTINCT FROM s.args_digest THEN 'existing'
                    ELSE 'conflict' END;
                RETURN NEXT;
                RETURN;
            ELSIF FOUND THEN
                -- The key moves to the new run; the old one keeps its rows.
                UPDATE fanout_runs SET run_key = NULL, replaced = true
                WHERE id = r.id AND run_key = v_key AND status NOT IN ('pending', 'processing');
                CONTINUE WHEN NOT FOUND;
            END IF;
        END IF;
        INSERT INTO fanout_runs (
            name, run_key, args_digest, args, tags, manager_task, manager_queue, manager_priority,
            child_task, child_queue, child_priority, callbacks, max_in_flight, tolerate_count,
            tolerate_share, max_crashes, stuck_after, deadline, manager_max_attempts, scheduled_at,
            limits, key_limit, limit_specs, weight, fence, manager_seen_at)
        VALUES (
            s.name, v_key, s.args_digest, coalesce(s.args, '{}'), coalesce(s.tags, '{}'),
            s.manager_task, s.manager_queue, coalesce(s.manager_priority, 0), s.child_task,
            s.child_queue, coalesce(s.child_priority, 0), coalesce(s.callbacks, '[]'),
            s.max_in_flight, s.tolerate_count, s.tolerate_share, coalesce(s.max_crashes, 3),
            coalesce(s.stuck_after, 7200), s.deadline, coalesce(s.manager_max_attempts, 3),
            s.scheduled_at, s.limits, s.key_limit, s.limit_specs, coalesce(s.weight, 1),
            -- Without a manager job the caller stages the items, as the first execution.
            CASE WHEN s.manager_task IS NULL THEN 1 ELSE 0 END,
            CASE WHEN s.manager_task IS NULL THEN clock_timestamp() END)
        ON CONFLICT (name, run_key) WHERE run_key IS NOT NULL DO NOTHING
        RETURNING id INTO run_id;
        IF run_id IS NOT NULL THEN
            IF s.manager_task IS NOT NULL THEN
                v_job := (procrastinate_defer_jobs_v1(ARRAY[ROW(
                    s.manager_queue, s.manager_task, coalesce(s.manager_priority, 0), NULL,
                    'fanout_manager:' || run_id, jsonb_build_object('run_id', run_id),
                    s.scheduled_at)::procrastinate_job_to_defer_v1]))[1];
                UPDATE fanout_runs SET manager_job_id = v_job WHERE id = run_id;
            END IF;
            outcome := 'created';
            run_status := 'pending';
            RETURN NEXT;
            RETURN;
        END IF;
    END LOOP;
    RAISE EXCEPTION 'run key % of % keeps changing hands', v_key, s.name USING ERRCODE = '40001';
END;
$$;

-- Deals a fresh manager job. The caller holds the run. What the host refuses is left to the sweep.
CREATE OR REPLACE FUNCTION fanout_deal_manager_v1(p_run bigint, p_scheduled_at timestamptz)
RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_job bigint;
    r record;
BEGIN
    SELECT manager_queue, manager_task, manager_priority, manager_job_id INTO r
    FROM fanout_runs WHERE id = p_run;
    -- A job that still waits keeps the queueing lock.
    PERFORM fanout_cancel_job_v1(r.manager_job_id);
    v_job := fanout_defer_v1(r.manager_queue, r.manager_task, r.manager_priority,
        'fanout_manager:' || p_run, jsonb_build_object('run_id', p_run), p_scheduled_at);
    IF v_job IS NOT NULL THEN
        UPDATE fanout_runs
        SET manager_job_id = v_job, manager_seen_at = NULL, manager_suspect_since = NULL
        WHERE id = p_run;
    END IF;
END;
$$;

-- Claims a run for one execution of its manager: a higher fence, and what an earlier execution
-- staged is dropped. No row where the run wants no manager any more.
CREATE OR REPLACE FUNCTION fanout_manager_begin_v1(p_run bigint, p_job bigint)
RETURNS TABLE (fence bigint, args jsonb, attempt integer, child_task text) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    r fanout_runs;
BEGIN
    SELECT * INTO r FROM fanout_runs WHERE id = p_run FOR NO KEY UPDATE;
    IF r.status IS DISTINCT FROM 'pending' OR r.closing IS NOT NULL OR r.manager_task IS NULL THEN
        RETURN;
    END IF;
    DELETE FROM fanout_items WHERE run_id = p_run;
    DELETE FROM fanout_lanes WHERE run_id = p_run;
    UPDATE fanout_runs
    SET fence = r.fence + 1, staged = 0, duplicates = 0, manager_job_id = p_job,
        manager_seen_at = clock_timestamp(), manager_suspect_since = NULL
    WHERE id = p_run;
    fence := r.fence + 1;
    args := r.args;
    attempt := r.manager_failures + 1;
    child_task := r.child_task;
    RETURN NEXT;
END;
$$;

-- Appends a chunk of items. Duplicates are removed before numbering, so that positions are dense.
-- No row for a late chunk of an earlier execution, or of a run that is closed. p_lanes: the keys by
-- which the items are limited; null where they are not.
CREATE OR REPLACE FUNCTION fanout_append_v1(
    p_run bigint, p_fence bigint, p_keys text[], p_payloads jsonb[], p_lanes text[]
) RETURNS TABLE (staged bigint, duplicates bigint) LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off
SET enable_mergejoin = off SET jit = off
AS $$
#variable_conflict use_column
DECLARE
    v_added bigint;
    r fanout_runs;
BEGIN
    SELECT * INTO r FROM fanout_runs WHERE id = p_run FOR NO KEY UPDATE;
    IF r.status IS DISTINCT FROM 'pending' OR r.fence <> p_fence OR r.closing IS NOT NULL THEN
        RETURN;
    END IF;
    INSERT INTO fanout_lanes (run_id, lane, key)
    SELECT p_run, (SELECT count(*) FROM fanout_lanes WHERE run_id = p_run)
        + row_number() OVER (ORDER BY min(u.i)) - 1, u.key
    FROM unnest(p_lanes) WITH ORDINALITY u (key, i)
    WHERE NOT EXISTS (SELECT FROM fanout_lanes l WHERE l.run_id = p_run AND l.key = u.key)
    GROUP BY u.key;
    INSERT INTO fanout_items (run_id, position, item_key, payload, lane, ledger, due)
    SELECT p_run, n.position, n.item_key, n.payload, l.lane, CASE WHEN l.lane IS NOT NULL THEN 0 END,
        -- Long ago, in the order of the listing: each waits for its lane from the start.
        CASE WHEN l.lane IS NOT NULL
            THEN timestamptz '2000-01-01 00:00:00Z' + n.position * interval '1 microsecond' END
    FROM (
        SELECT o.*, r.staged + row_number() OVER (ORDER BY o.i) - 1 AS position FROM (
            SELECT u.i, u.item_key, u.payload, u.key, row_number() OVER (
                PARTITION BY coalesce(u.item_key, u.i::text), u.item_key IS NULL ORDER BY u.i
                ) AS nth
            FROM unnest(p_keys, p_payloads, p_lanes) WITH ORDINALITY u (item_key, payload, key, i)
        ) o
        WHERE o.nth = 1 AND NOT EXISTS (
            SELECT FROM fanout_items t WHERE t.run_id = p_run AND t.item_key = o.item_key)
    ) n
    LEFT JOIN fanout_lanes l ON l.run_id = p_run AND l.key = n.key;
    GET DIAGNOSTICS v_added = ROW_COUNT;
    UPDATE fanout_runs
    SET staged = r.staged + v_added,
        duplicates = r.duplicates + cardinality(p_payloads) - v_added,
        manager_seen_at = clock_timestamp(), manager_suspect_since = NULL
    WHERE id = p_run
    RETURNING fanout_runs.staged, fanout_runs.duplicates INTO staged, duplicates;
    RETURN NEXT;
END;
$$;

-- Seals a run: sets its total, splits its book-keeping over ledgers, deals the first slots; without
-- items it closes right here. Idempotent for its fence. Returns the run's status, or null for an
-- earlier execution.
CREATE OR REPLACE FUNCTION fanout_seal_v1(p_run bigint, p_fence bigint) RETURNS text
LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off
SET enable_mergejoin = off SET jit = off
AS $$
DECLARE
    v_ledgers integer;
    r fanout_runs;
BEGIN
    SELECT * INTO r FROM fanout_runs WHERE id = p_run FOR NO KEY UPDATE;
    IF r.fence IS DISTINCT FROM p_fence OR r.closing IS NOT NULL THEN
        RETURN NULL;
    ELSIF r.status <> 'pending' THEN
        RETURN CASE WHEN r.sealed_at IS NOT NULL THEN r.status END;
    END IF;
    -- With keys one ledger: its items are handed out lane by lane.
    v_ledgers := CASE WHEN r.staged = 0 THEN 0 WHEN r.key_limit IS NOT NULL THEN 1
        ELSE least(16, greatest(1, r.staged / 1000)) END;
    INSERT INTO fanout_ledgers (run_id, ledger, size, cursor, waiting, fresh)
    SELECT p_run, l, o.size, o.fresh, o.fresh, o.fresh
    FROM generate_series(0, v_ledgers - 1) l
    CROSS JOIN LATERAL (SELECT (r.staged - l + v_ledgers - 1) / v_ledgers AS size) z
    CROSS JOIN LATERAL (
        SELECT z.size, CASE WHEN r.key_limit IS NULL THEN 0 ELSE z.size END AS fresh) o;
    IF r.limit_specs IS NOT NULL THEN
        PERFORM fanout_declare_limits_v1(r.limit_specs);
    END IF;
    UPDATE fanout_runs
    SET status = 'processing', total = staged, ledgers = v_ledgers, open_ledgers = v_ledgers,
        sealed_at = clock_timestamp(), started_at = clock_timestamp(), reason = NULL
    WHERE id = p_run;
    IF v_ledgers = 0 THEN
        PERFORM fanout_close_v1(p_run, 'completed', NULL);
    ELSE
        PERFORM fanout_top_up_v1(p_run);
    END IF;
    RETURN (SELECT status FROM fanout_runs WHERE id = p_run);
END;
$$;

-- Takes the end of a manager that did not seal. p_retry_in null: for good. Answers whether the
-- manager will run again, or null for an earlier execution.
CREATE OR REPLACE FUNCTION fanout_manager_fail_v1(
    p_run bigint, p_fence bigint, p_reason text, p_retry_in double precision, p_charge boolean
) RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
    r fanout_runs;
BEGIN
    SELECT * INTO r FROM fanout_runs WHERE id = p_run FOR NO KEY UPDATE;
    IF r.fence IS DISTINCT FROM p_fence OR r.status <> 'pending' THEN
        RETURN NULL;
    END IF;
    IF p_retry_in IS NULL OR r.manager_task IS NULL
            OR p_charge AND r.manager_failures + 1 >= r.manager_max_attempts THEN
        PERFORM fanout_close_v1(p_run, 'failed', p_reason);
        RETURN false;
    END IF;
    UPDATE fanout_runs
    SET manager_failures = manager_failures + p_charge::integer, fence = fence + 1,
        reason = p_reason
    WHERE id = p_run;
    PERFORM fanout_deal_manager_v1(p_run, clock_timestamp() + make_interval(secs => p_retry_in));
    RETURN true;
END;
$$;

-- Starts a callback's execution. No row where this one is done, given up, or was dealt again.
CREATE OR REPLACE FUNCTION fanout_callback_begin_v1(
    p_run bigint, p_generation integer, p_task text, p_job bigint
) RETURNS TABLE (attempt integer) LANGUAGE plpgsql AS $$
BEGIN
    RETURN QUERY UPDATE fanout_callbacks
    SET state = 'running', attempts = attempts + 1, seen_at = clock_timestamp(),
        suspect_since = NULL
    WHERE run_id = p_run AND generation = p_generation AND task = p_task AND job_id = p_job
        AND state = 'owed'
    RETURNING attempts;
END;
$$;

-- Takes the end of a callback's execution. p_error null: done. p_retry_in null: given up.
CREATE OR REPLACE FUNCTION fanout_callback_end_v1(
    p_run bigint, p_generation integer, p_task text, p_job bigint, p_error jsonb,
    p_retry_in double precision
) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    UPDATE fanout_callbacks
    SET state = CASE WHEN p_error IS NULL THEN 'done'
            WHEN p_retry_in IS NULL THEN 'failed' ELSE 'owed' END,
        error = p_error, seen_at = clock_timestamp(), suspect_since = NULL
    WHERE run_id = p_run AND generation = p_generation AND task = p_task AND job_id = p_job
        AND state = 'running';
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    IF p_error IS NOT NULL AND p_retry_in IS NOT NULL THEN
        PERFORM fanout_call_v1(p_run, p_generation, p_task,
            clock_timestamp() + make_interval(secs => p_retry_in));
    END IF;
    RETURN true;
END;
$$;
