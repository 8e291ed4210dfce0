-- The slot protocol: dealing slots, handing out items, taking reports, closing.
--
-- Lock order, here and everywhere: ledgers ascending, run, slots ascending, items, jobs. Items are
-- only ever changed under their ledger's lock, so their own order does not matter. A statement that
-- may end a slot or close the run takes the run before any slot.
--
-- Entry functions switch off the plans that go wrong on a run without statistics: each lookup here
-- is by primary key or by one partial index, whatever the planner believes about empty tables. For
-- several items at once that takes a subquery that cannot be pulled up (OFFSET 0), else it may scan
-- a whole run whose rows it takes for few; ctid is safe, since only its ledger's holder moves a row.

-- Takes all ledgers of a run, ascending, then the run. Raises serialization_failure, which every
-- caller answers by trying again, where the run was sealed between the two.
CREATE OR REPLACE FUNCTION fanout_lock_run_v1(p_run bigint) RETURNS fanout_runs
LANGUAGE plpgsql AS $$
DECLARE
    v_locked integer;
    r fanout_runs;
BEGIN
    SELECT count(*) INTO v_locked FROM (
        SELECT FROM fanout_ledgers WHERE run_id = p_run ORDER BY ledger FOR NO KEY UPDATE
    ) locked;
    SELECT * INTO r FROM fanout_runs WHERE id = p_run FOR NO KEY UPDATE;
    -- Ledgers that are missing although some are there are damage, and no reason to try again.
    IF r.ledgers > 0 AND v_locked = 0 THEN
        RAISE EXCEPTION 'run % was sealed meanwhile', p_run USING ERRCODE = '40001';
    END IF;
    RETURN r;
END;
$$;

-- A rate as it has decayed after so many seconds. Never raises: exp() and products of tiny numbers
-- do, by underflow, hours after the last outcome; and a clock may have been set back.
CREATE OR REPLACE FUNCTION fanout_decay_v1(p_rate double precision, p_elapsed interval)
RETURNS double precision LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE
        WHEN p_rate < 1e-6 OR p_elapsed > interval '10 minutes' THEN 0
        WHEN p_elapsed > interval '0'
            THEN p_rate * exp(-extract(epoch FROM p_elapsed)::double precision / 30)
        ELSE p_rate END
$$;

-- A run's progress, all from one snapshot: the sum of at most 16 ledgers and one run row.
CREATE OR REPLACE FUNCTION fanout_progress_v1(p_run bigint) RETURNS jsonb
LANGUAGE sql STABLE AS $$
    SELECT jsonb_build_object(
        'run_id', r.id, 'name', r.name, 'status', r.status, 'paused', r.paused,
        'closing', r.closing, 'reason', r.reason, 'generation', r.generation,
        'total', r.total, 'staged', r.staged, 'duplicates', r.duplicates,
        -- What a slot keeps ready is not at work yet.
        'pending', CASE WHEN r.total IS NULL THEN r.staged ELSE s.unclaimed + s.waiting + k.ready
            END,
        'waiting', s.waiting - s.fresh,
        'processing', s.claimed - s.waiting - s.succeeded - s.failed - s.cancelled - k.ready,
        'succeeded', s.succeeded, 'failed', s.failed, 'cancelled', s.cancelled,
        'rate', CASE WHEN r.closed_at IS NOT NULL
            THEN (s.succeeded + s.failed - r.done_before)
                 / greatest(extract(epoch FROM r.closed_at - r.started_at), 0.001)
            -- A decayed mean starts too low: divided by the weight it has gathered so far.
            ELSE s.rate / greatest(
                1 - fanout_decay_v1(1, clock_timestamp() - r.started_at), 0.001)
            END,
        'max_in_flight', r.max_in_flight,
        'callbacks', coalesce((
            SELECT jsonb_object_agg(c.task, c.state) FROM fanout_callbacks c
            WHERE c.run_id = r.id AND c.generation = r.generation), '{}'),
        'created_at', r.created_at, 'scheduled_at', r.scheduled_at, 'deadline', r.deadline,
        'started_at', r.started_at, 'closed_at', r.closed_at,
        'last_activity_at', greatest(s.updated_at, r.sealed_at, r.created_at))
    FROM fanout_runs r
    CROSS JOIN LATERAL (
        SELECT coalesce(sum(size - cursor), 0) AS unclaimed, coalesce(sum(cursor), 0) AS claimed,
            coalesce(sum(waiting), 0) AS waiting, coalesce(sum(fresh), 0) AS fresh,
            coalesce(sum(succeeded), 0) AS succeeded, coalesce(sum(failed), 0) AS failed,
            coalesce(sum(cancelled), 0) AS cancelled,
            coalesce(sum(fanout_decay_v1(rate, clock_timestamp() - updated_at)), 0) AS rate,
            max(updated_at) AS updated_at
        FROM fanout_ledgers WHERE run_id = r.id
    ) s
    CROSS JOIN LATERAL (
        SELECT count(ready) AS ready FROM fanout_slots
        WHERE run_id = r.id AND r.limits IS NOT NULL
    ) k
    WHERE r.id = p_run
$$;

-- Whether the failed items exceed what the run tolerates.
CREATE OR REPLACE FUNCTION fanout_intolerable_v1(
    p_failed bigint, p_total bigint, p_count bigint, p_share double precision
) RETURNS boolean LANGUAGE sql IMMUTABLE AS $$
    SELECT coalesce(p_failed > p_count, false) OR coalesce(p_failed > p_share * p_total, false)
$$;

-- The first ledger from p_from on, going round, that has an item to hand out now; else null.
CREATE OR REPLACE FUNCTION fanout_next_ledger_v1(p_run bigint, p_from integer) RETURNS integer
LANGUAGE sql STABLE AS $$
    SELECT l.ledger FROM fanout_ledgers l
    WHERE l.run_id = p_run AND (l.cursor < l.size OR l.waiting > 0 AND EXISTS (
        SELECT FROM fanout_items i
        WHERE i.run_id = p_run AND i.ledger = l.ledger AND i.due <= clock_timestamp()))
    ORDER BY l.ledger < p_from, l.ledger LIMIT 1
$$;

-- The released items that fall due first, over all ledgers.
CREATE OR REPLACE FUNCTION fanout_next_dues_v1(p_run bigint, p_limit bigint)
RETURNS TABLE (due timestamptz, suspect boolean) LANGUAGE sql STABLE AS $$
    SELECT i.due, i.crashes > 0 FROM fanout_ledgers l
    CROSS JOIN LATERAL (
        SELECT t.due, t.crashes FROM fanout_items t
        WHERE t.run_id = p_run AND t.ledger = l.ledger AND t.due IS NOT NULL
        ORDER BY t.due LIMIT p_limit
    ) i
    WHERE l.run_id = p_run AND l.waiting > 0
    ORDER BY i.due LIMIT p_limit
$$;

-- Whether a job of somebody else is due in the queue. Looks at 200 waiting jobs at most; where
-- these say nothing, it answers yes: to step back once too often does no harm.
CREATE OR REPLACE FUNCTION fanout_others_wait_v1(p_queue text, p_run bigint) RETURNS boolean
LANGUAGE sql AS $$
    SELECT count(*) = 200 OR coalesce(bool_or(
        j.queue_name = p_queue AND (j.scheduled_at IS NULL OR j.scheduled_at <= clock_timestamp())
        AND coalesce(j.queueing_lock, '') NOT LIKE 'fanout_child:' || p_run || ':%'), false)
    FROM (
        SELECT queue_name::text, scheduled_at, queueing_lock FROM procrastinate_jobs
        WHERE status = 'todo' ORDER BY priority DESC, id LIMIT 200
    ) j
$$;

-- Cancels a job that still waits. Never raises and never waits: the caller's work must stand. Who
-- has the row locked fetches, cancels or deletes the job; fetched, it will find no slot of its own.
CREATE OR REPLACE FUNCTION fanout_cancel_job_v1(p_job bigint) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM FROM procrastinate_jobs WHERE id = p_job AND status = 'todo' FOR UPDATE SKIP LOCKED;
    IF FOUND THEN
        PERFORM procrastinate_cancel_job_v1(p_job, false, false);
    END IF;
EXCEPTION WHEN OTHERS THEN
    RAISE WARNING 'fanout: job % could not be cancelled: %', p_job, SQLERRM;
END;
$$;

-- Finishes a job whose worker is gone, so that it can never be put back. Never raises and never
-- waits: the host locks many jobs at once, in an order of its own, when it removes a dead worker.
CREATE OR REPLACE FUNCTION fanout_fail_job_v1(p_job bigint) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM FROM procrastinate_jobs WHERE id = p_job AND status = 'doing' FOR UPDATE SKIP LOCKED;
    IF FOUND THEN
        PERFORM procrastinate_finish_job_v1(p_job, 'failed', false);
    END IF;
EXCEPTION WHEN OTHERS THEN
    RAISE WARNING 'fanout: job % could not be finished: %', p_job, SQLERRM;
END;
$$;

-- Defers one job and returns its id, or null where the host refuses it. Never raises.
CREATE OR REPLACE FUNCTION fanout_defer_v1(
    p_queue text, p_task text, p_priority integer, p_queueing_lock text, p_args jsonb,
    p_scheduled_at timestamptz
) RETURNS bigint LANGUAGE plpgsql AS $$
BEGIN
    RETURN (procrastinate_defer_jobs_v1(ARRAY[ROW(
        p_queue, p_task, p_priority, NULL, p_queueing_lock, p_args, p_scheduled_at
    )::procrastinate_job_to_defer_v1]))[1];
EXCEPTION
    WHEN unique_violation THEN
        RETURN NULL;
    WHEN OTHERS THEN
        RAISE WARNING 'fanout: job of task % could not be deferred: %', p_task, SQLERRM;
        RETURN NULL;
END;
$$;

-- The slots that are missing: one row each, with the time it is needed (-infinity = now) and the
-- queued slot it replaces, where one is due too late. Writes nothing and locks nothing; STABLE, so
-- that all it reads is from its caller's one snapshot.
-- For every time t: queued slots due by t >= least(room, unclaimed + items due by t), where an
-- active slot without an item stands for an item due soon. It never stands for a suspect: its
-- process may have one in hand already.
CREATE OR REPLACE FUNCTION fanout_slot_plan_v1(p_run bigint)
RETURNS TABLE (needed_at timestamptz, replaces integer) LANGUAGE plpgsql STABLE AS $$
DECLARE
    v_now timestamptz := clock_timestamp();
    v_max integer;
    v_key_limit text;
    v_active integer;
    v_idle integer;
    v_room bigint;
    v_unclaimed bigint;
    v_waiting bigint;
    v_needed timestamptz[] := '{}';
    v_slots integer[];
    v_times timestamptz[];
    d record;
BEGIN
    SELECT max_in_flight, key_limit INTO v_max, v_key_limit FROM fanout_runs
    WHERE id = p_run AND status = 'processing' AND NOT paused AND closing IS NULL;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    SELECT count(*) FILTER (WHERE active), count(*) FILTER (WHERE active AND held IS NULL),
        array_agg(slot ORDER BY coalesce(scheduled_at, '-infinity'), slot) FILTER (WHERE NOT active),
        array_agg(coalesce(scheduled_at, '-infinity')
            ORDER BY coalesce(scheduled_at, '-infinity'), slot) FILTER (WHERE NOT active)
    INTO v_active, v_idle, v_slots, v_times
    FROM fanout_slots WHERE run_id = p_run;
    v_room := least(v_max - v_active, greatest(8, v_active));
    IF v_room <= 0 OR coalesce(cardinality(v_slots), 0) >= v_room
            AND v_times[v_room] = '-infinity' THEN
        RETURN;
    END IF;
    SELECT sum(size - cursor), sum(waiting) INTO v_unclaimed, v_waiting
    FROM fanout_ledgers WHERE run_id = p_run;
    IF v_key_limit IS NOT NULL AND v_waiting > 0 THEN
        -- What could be handed out now counts as unclaimed; what is blocked by its key, not at all.
        SELECT greatest(0, cardinality(c.positions) - v_idle) INTO v_unclaimed
        FROM fanout_lane_items_v1(
            p_run, v_key_limit, (v_room + v_idle)::integer, -1, true, '{}') c;
    END IF;
    IF v_unclaimed > 0 THEN
        v_needed := array_fill('-infinity'::timestamptz, ARRAY[least(v_room, v_unclaimed)::integer]);
    ELSE
        v_unclaimed := 0;
    END IF;
    IF v_unclaimed < v_room AND v_waiting > 0 THEN
        FOR d IN SELECT due, suspect
            FROM fanout_next_dues_v1(p_run, v_room - v_unclaimed + v_idle)
            WHERE v_key_limit IS NULL
            UNION ALL
            SELECT due, suspect FROM fanout_lane_dues_v1(p_run, v_room - v_unclaimed + v_idle)
            WHERE v_key_limit IS NOT NULL LOOP
            IF v_idle > 0 AND NOT d.suspect AND d.due <= v_now + interval '10 seconds' THEN
                v_idle := v_idle - 1;
            ELSIF cardinality(v_needed) < v_room THEN
                v_needed := v_needed || CASE WHEN d.due <= v_now THEN '-infinity' ELSE d.due END;
            END IF;
        END LOOP;
    END IF;
    FOR i IN 1 .. cardinality(v_needed) LOOP
        IF i > coalesce(cardinality(v_slots), 0) THEN
            needed_at := v_needed[i];
            replaces := NULL;
            RETURN NEXT;
        ELSIF v_times[i] > greatest(v_needed[i], v_now) THEN
            needed_at := v_needed[i];
            replaces := v_slots[i];
            RETURN NEXT;
        END IF;
    END LOOP;
END;
$$;

-- The one place that deals slots. The caller holds the run. Returns how many were dealt. What the
-- host refuses is left to the next call: dealing never undoes what the caller did.
CREATE OR REPLACE FUNCTION fanout_top_up_v1(p_run bigint) RETURNS integer
LANGUAGE plpgsql AS $$
DECLARE
    v_times timestamptz[];
    v_replaced integer[];
    v_free integer[];
    v_now integer;
    v_granted integer;
    v_used integer;
    v_job bigint;
    v_dealt integer := 0;
    r record;
BEGIN
    SELECT array_agg(needed_at), array_agg(replaces) FILTER (WHERE replaces IS NOT NULL),
        count(*) FILTER (WHERE needed_at = '-infinity')
    INTO v_times, v_replaced, v_now FROM fanout_slot_plan_v1(p_run);
    IF v_times IS NULL THEN
        RETURN 0;
    END IF;
    SELECT child_queue, child_task, child_priority, limits, wants INTO r
    FROM fanout_runs WHERE id = p_run;
    IF r.limits IS NOT NULL AND (v_now > 0 OR r.wants > 0) THEN
        v_granted := fanout_grant_v1(p_run, v_now);
        IF v_granted < v_now THEN
            -- What its limits do not give is not dealt, and nothing is replaced by it.
            SELECT array_agg(needed_at), array_agg(replaces) FILTER (WHERE replaces IS NOT NULL)
            INTO v_times, v_replaced
            FROM (
                SELECT needed_at, replaces, count(*) FILTER (WHERE needed_at = '-infinity')
                    OVER (ROWS UNBOUNDED PRECEDING) AS nth
                FROM fanout_slot_plan_v1(p_run)
            ) p
            WHERE needed_at <> '-infinity' OR nth <= v_granted;
        END IF;
    END IF;
    IF v_times IS NULL THEN
        RETURN 0;
    END IF;
    IF v_replaced IS NOT NULL THEN
        PERFORM fanout_cancel_job_v1(gone.job_id) FROM (
            SELECT job_id FROM fanout_slots
            WHERE run_id = p_run AND slot = ANY (v_replaced) ORDER BY job_id) gone;
        DELETE FROM fanout_slots WHERE run_id = p_run AND slot = ANY (v_replaced);
    END IF;
    SELECT count(*) INTO v_used FROM fanout_slots WHERE run_id = p_run;
    -- A slot number whose queueing lock some waiting job holds is skipped.
    SELECT array_agg(n) INTO v_free FROM (
        SELECT n FROM (
            SELECT n FROM generate_series(0, v_used + cardinality(v_times) + 63) n
            EXCEPT SELECT slot FROM fanout_slots WHERE run_id = p_run
        ) unused
        WHERE NOT EXISTS (
            SELECT FROM procrastinate_jobs
            WHERE queueing_lock = 'fanout_child:' || p_run || ':' || n AND status = 'todo')
        ORDER BY n LIMIT cardinality(v_times)
    ) free;
    FOR i IN 1 .. least(cardinality(v_times), coalesce(cardinality(v_free), 0)) LOOP
        v_job := fanout_defer_v1(
            r.child_queue, r.child_task, r.child_priority,
            'fanout_child:' || p_run || ':' || v_free[i],
            jsonb_build_object('run_id', p_run, 'slot', v_free[i]),
            nullif(v_times[i], '-infinity'));
        IF v_job IS NOT NULL THEN
            INSERT INTO fanout_slots (run_id, slot, job_id, scheduled_at)
            VALUES (p_run, v_free[i], v_job, nullif(v_times[i], '-infinity'))
            -- Only a repeatable read transaction can meet a slot that it did not see: there this
            -- raises serialization_failure, and the caller tries again.
            ON CONFLICT DO NOTHING;
            v_dealt := v_dealt + 1;
        END IF;
    END LOOP;
    IF v_dealt > 0 THEN
        -- A control statement at repeatable read waits for us and would not see these slots: a run
        -- row written since its snapshot makes it fail and try again.
        UPDATE fanout_runs SET surplus = fanout_surplus_v1(p_run) WHERE id = p_run;
    END IF;
    RETURN v_dealt;
END;
$$;

-- Tells the listeners to look again. Never raises: an event cannot undo state.
CREATE OR REPLACE FUNCTION fanout_notify_v1(p_event jsonb) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_notify('fanout_v1', p_event::text);
EXCEPTION WHEN OTHERS THEN
    RAISE WARNING 'fanout: event not sent: %', SQLERRM;
END;
$$;

-- Puts a callback's job in its queue. Without a queueing lock: nothing may hold it back.
CREATE OR REPLACE FUNCTION fanout_call_v1(
    p_run bigint, p_generation integer, p_task text, p_scheduled_at timestamptz
) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_job bigint;
    c record;
BEGIN
    SELECT queue, priority INTO c FROM fanout_callbacks
    WHERE run_id = p_run AND generation = p_generation AND task = p_task;
    v_job := fanout_defer_v1(
        c.queue, p_task, c.priority, NULL,
        jsonb_build_object('run_id', p_run, 'generation', p_generation), p_scheduled_at);
    UPDATE fanout_callbacks
    SET job_id = v_job, state = 'owed', seen_at = clock_timestamp(), suspect_since = NULL
    WHERE run_id = p_run AND generation = p_generation AND task = p_task;
END;
$$;

-- Closes a run, once per generation. The caller holds the run and, where it has slots, all of
-- them. Returns whether this call closed it.
CREATE OR REPLACE FUNCTION fanout_close_v1(p_run bigint, p_status text, p_reason text)
RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
    v_progress jsonb;
    v_clean boolean;
    r fanout_runs;
BEGIN
    UPDATE fanout_runs
    SET status = p_status, reason = p_reason, closed_at = clock_timestamp(), closing = NULL,
        paused = false, aborting = false, surplus = 0, total = coalesce(total, 0),
        open_ledgers = 0, idle_seconds = 0, idle_seen_at = NULL, refused = false,
        untidy_from = CASE WHEN sealed_at IS NULL AND staged > 0 THEN 0 ELSE untidy_from END,
        started_at = coalesce(started_at, clock_timestamp())
    WHERE id = p_run AND status IN ('pending', 'processing')
    RETURNING * INTO r;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    PERFORM fanout_cancel_job_v1(waiting.job_id) FROM (
        SELECT job_id FROM fanout_slots WHERE run_id = p_run AND NOT active ORDER BY job_id
    ) waiting;
    DELETE FROM fanout_slots WHERE run_id = p_run;
    v_clean := p_status = 'completed' AND NOT EXISTS (
        SELECT FROM fanout_ledgers WHERE run_id = p_run AND (failed > 0 OR cancelled > 0));
    INSERT INTO fanout_callbacks (run_id, generation, task, queue, priority)
    SELECT p_run, r.generation, c->>'task', c->>'queue', (c->>'priority')::integer
    FROM jsonb_array_elements(r.callbacks) c
    WHERE c->>'on' = 'complete'
        OR c->>'on' = 'success' AND v_clean
        OR c->>'on' = 'failure' AND NOT v_clean
    ON CONFLICT DO NOTHING;
    PERFORM fanout_call_v1(p_run, r.generation, task, NULL) FROM fanout_callbacks
    WHERE run_id = p_run AND generation = r.generation;
    v_progress := fanout_progress_v1(p_run);
    INSERT INTO fanout_closes (run_id, generation, status, reason, progress, closed_at)
    VALUES (p_run, r.generation, p_status, p_reason, v_progress, r.closed_at)
    ON CONFLICT DO NOTHING;
    PERFORM fanout_notify_v1(jsonb_build_object(
        'run', p_run, 'event', 'closed', 'status', p_status, 'generation', r.generation));
    RETURN true;
END;
$$;

-- Closes a run whose last ledger is complete. The tolerance is judged once more, under the lock.
CREATE OR REPLACE FUNCTION fanout_close_complete_v1(p_run bigint) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    v_failed bigint;
    r record;
BEGIN
    SELECT closing, reason, total, tolerate_count, tolerate_share INTO r
    FROM fanout_runs WHERE id = p_run;
    SELECT coalesce(sum(failed), 0) INTO v_failed FROM fanout_ledgers WHERE run_id = p_run;
    IF r.closing IS NOT NULL THEN
        RETURN fanout_close_v1(p_run, r.closing, r.reason);
    ELSIF fanout_intolerable_v1(v_failed, r.total, r.tolerate_count, r.tolerate_share) THEN
        RETURN fanout_close_v1(p_run, 'failed', fanout_tolerance_reason_v1(p_run));
    END IF;
    RETURN fanout_close_v1(p_run, 'completed', NULL);
END;
$$;

-- The sentence that says why a run was stopped for its failed items.
CREATE OR REPLACE FUNCTION fanout_tolerance_reason_v1(p_run bigint) RETURNS text
LANGUAGE sql STABLE AS $$
    SELECT format('more failed items than tolerated: %s of %s, tolerated: %s',
        (SELECT sum(failed) FROM fanout_ledgers WHERE run_id = p_run), total,
        coalesce(tolerate_count::text, round((tolerate_share * 100)::numeric, 2) || ' %'))
    FROM fanout_runs WHERE id = p_run
$$;

-- Takes the outcomes and wishes of one process's slots on one ledger and hands out the next items.
--   p_wishes:   next   another item
--               slice  another item, unless somebody else's job is due in the queue
--               end    no more
--               ahead  one to keep ready behind the one in hand; nothing is reported
--   p_aheads:   what the process has ready, and has begun with its report: it is in hand now, and
--               the answer is the next one to keep ready, or the verdict `last`
--   p_outcomes: succeeded, failed, released (a transient error: due again after p_retry_ins
--               seconds), returned (released at no charge); null where nothing was in hand
-- p_begin: called by begin, which holds the run already. Valid while the slot has this epoch and
-- holds this position under this claim. Answers one fanout_reply_v1 per slot.
CREATE OR REPLACE FUNCTION fanout_report_v1(
    p_run bigint, p_ledger integer, p_begin boolean, p_suspect boolean,
    p_slots integer[], p_epochs bigint[], p_wishes text[],
    p_positions bigint[], p_claims bigint[], p_outcomes text[], p_retry_ins double precision[],
    p_results jsonb[], p_errors jsonb[], p_sanitised boolean[], p_aheads bigint[]
) RETURNS SETOF fanout_reply_v1 LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off
SET enable_mergejoin = off SET jit = off SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
    n constant integer := cardinality(p_slots);
    v_now timestamptz;
    led fanout_ledgers;
    r record;
    v_outcomes integer := 0;
    v_failing integer := 0;
    v_releasing integer := 0;
    v_wanting integer := 0;
    v_ending integer := 0;
    v_yield boolean := false;
    v_judge boolean := false;
    v_need_run boolean;
    v_blocked boolean;
    -- Of the locked slots, in the order of the input.
    v_mine boolean[];
    v_held bigint[];
    v_held_claims bigint[];
    v_ready bigint[];
    -- Entries whose item is to be kept ready; those of them whose ready item is in hand now; those
    -- that keep what they have; and what resent ones are given again.
    v_ahead integer[] := '{}';
    v_shifted integer[] := '{}';
    v_kept integer[] := '{}';
    v_again bigint[];
    v_may_suspect boolean;
    v_last bigint[];
    v_last_claims bigint[];
    v_verdicts text[];
    v_recorded integer[] := '{}';
    v_counted integer[] := '{}';
    v_want integer[] := '{}';
    v_ended integer[] := '{}';
    v_resent integer[] := '{}';
    v_applied integer[];
    v_done bigint[];
    v_positions bigint[] := '{}';
    v_suspect bigint;
    v_skipped bigint[];
    v_take integer;
    v_failed_total bigint;
    v_hint integer;
    v_dues timestamptz[];
    v_idle integer;
    v_stop boolean := false;
    v_complete boolean := false;
    v_closed boolean := false;
    v_held_back integer[] := '{}';
    v_reserved timestamptz[];
    v_rated boolean := false;
    v_first bigint;
    v_freed boolean;
    v_keeps boolean;
    v_replies fanout_reply_v1[];
    v_reply fanout_reply_v1;
BEGIN
    FOR i IN 1 .. n LOOP
        v_outcomes := v_outcomes + (p_outcomes[i] IS NOT NULL)::integer;
        v_failing := v_failing + coalesce(p_outcomes[i] = 'failed', false)::integer;
        v_releasing := v_releasing
            + coalesce(p_outcomes[i] IN ('released', 'returned'), false)::integer;
        v_wanting := v_wanting + (p_wishes[i] <> 'end')::integer;
        v_ending := v_ending + (p_wishes[i] = 'end')::integer;
        v_yield := v_yield OR p_wishes[i] = 'slice';
    END LOOP;

    SELECT * INTO led FROM fanout_ledgers
    WHERE run_id = p_run AND ledger = p_ledger FOR NO KEY UPDATE;
    SELECT status, paused, closing, surplus, open_ledgers, ledgers, total, child_queue,
        tolerate_count, tolerate_share, limits, key_limit INTO r
    FROM fanout_runs WHERE id = p_run;
    IF led.run_id IS NULL OR r.status IS NULL THEN
        -- The run was removed, or never had this ledger.
        FOR i IN 1 .. n LOOP
            RETURN NEXT (p_slots[i], CASE WHEN p_outcomes[i] IS NULL THEN 'ended' ELSE 'lost' END,
                p_epochs[i], p_ledger, NULL, NULL, NULL, NULL, NULL, NULL, NULL, false,
                false, false)::fanout_reply_v1;
        END LOOP;
        RETURN;
    END IF;
    IF v_yield THEN
        v_yield := fanout_others_wait_v1(r.child_queue, p_run)
            OR r.limits IS NOT NULL AND fanout_makes_room_v1(p_run);
    END IF;
    -- What other ledgers have failed so far is read without their locks: the last one to count
    -- sees them all, and the close judges once more.
    IF v_failing > 0 AND r.closing IS NULL
            AND (r.tolerate_count IS NOT NULL OR r.tolerate_share IS NOT NULL) THEN
        SELECT sum(failed) INTO v_failed_total FROM fanout_ledgers WHERE run_id = p_run;
        v_judge := fanout_intolerable_v1(
            v_failed_total + v_failing, r.total, r.tolerate_count, r.tolerate_share);
    END IF;
    v_complete := led.succeeded + led.failed + led.cancelled + v_outcomes >= led.size;
    v_need_run := p_begin OR v_complete OR v_ending > 0 OR v_releasing > 0 OR v_yield OR v_judge
        OR r.status <> 'processing' OR r.paused OR r.closing IS NOT NULL OR r.surplus > 0
        OR r.limits IS NOT NULL
        OR led.size - led.cursor < v_wanting;
    IF v_need_run AND NOT p_begin THEN
        SELECT status, paused, closing, surplus, open_ledgers, ledgers, total, child_queue,
            tolerate_count, tolerate_share, limits, key_limit INTO r
        FROM fanout_runs WHERE id = p_run FOR NO KEY UPDATE;
        IF v_complete AND v_outcomes > 0 AND r.open_ledgers <= 1 THEN
            -- This may close the run and with it all slots: in ascending order, before our own.
            PERFORM FROM fanout_slots WHERE run_id = p_run ORDER BY slot FOR UPDATE;
        END IF;
    END IF;
    SELECT array_agg(s.slot IS NOT NULL ORDER BY u.i), array_agg(s.held ORDER BY u.i),
        array_agg(s.held_claim ORDER BY u.i), array_agg(s.last_position ORDER BY u.i),
        array_agg(s.last_claim ORDER BY u.i), array_agg(s.ready ORDER BY u.i)
    INTO v_mine, v_held, v_held_claims, v_last, v_last_claims, v_ready
    FROM unnest(p_slots, p_epochs) WITH ORDINALITY u (slot, epoch, i)
    LEFT JOIN (
        SELECT slot, epoch, held, held_claim, last_position, last_claim, ready FROM fanout_slots
        WHERE run_id = p_run AND slot = ANY (p_slots) AND active ORDER BY slot FOR UPDATE
    ) s ON s.slot = u.slot AND s.epoch = u.epoch;
    v_now := clock_timestamp();
    v_blocked := r.status <> 'processing' OR r.paused OR r.closing IS NOT NULL;

    -- Judge each entry.
    v_verdicts := array_fill('lost'::text, ARRAY[n]);
    v_again := v_held;
    FOR i IN 1 .. n LOOP
        IF v_mine[i] AND p_outcomes[i] IS NOT NULL
                AND v_held[i] = p_positions[i] AND v_held_claims[i] = p_claims[i] THEN
            v_recorded := v_recorded || i;
            IF v_ready[i] = p_aheads[i] THEN
                v_shifted := v_shifted || i;
                v_ahead := v_ahead || i;
            END IF;
        ELSIF v_mine[i] AND p_wishes[i] = 'ahead' AND v_held[i] IS NOT NULL
                OR v_mine[i] AND p_aheads[i] = v_held[i] THEN
            -- One to keep ready; or a report sent again, since which what was ready is in hand.
            IF v_ready[i] IS NOT NULL THEN
                v_again[i] := v_ready[i];
                v_resent := v_resent || i;
            ELSIF p_wishes[i] = 'ahead' THEN
                v_ahead := v_ahead || i;
                v_want := v_want || i;
            ELSE
                v_kept := v_kept || i;
                v_verdicts[i] := 'last';
            END IF;
        ELSIF v_mine[i] AND (p_outcomes[i] IS NULL
                OR v_last[i] = p_positions[i] AND v_last_claims[i] = p_claims[i]) THEN
            -- A pull, or a report sent again whose first sending was recorded: the slot goes on
            -- with what it was given then.
            IF v_held[i] IS NOT NULL THEN
                v_resent := v_resent || i;
            ELSE
                v_want := v_want || i;
            END IF;
        ELSIF p_outcomes[i] IS NULL THEN
            v_verdicts[i] := 'ended';
        ELSIF EXISTS (
                SELECT FROM fanout_items WHERE run_id = p_run AND position = p_positions[i]
                    AND claim = p_claims[i] + (p_outcomes[i] = 'returned')::integer
                    AND status <> 'processing'
                    AND (status <> 'pending' OR p_outcomes[i] IN ('released', 'returned'))) THEN
            -- The slot ended in the sending whose reply was lost.
            v_verdicts[i] := 'ended';
        END IF;
    END LOOP;

    -- Record. Counters move only by rows that this guarded UPDATE returns.
    IF cardinality(v_recorded) > 0 THEN
        WITH done AS (
            UPDATE fanout_items t
            SET status = o.status,
                failures = t.failures + (o.outcome IN ('failed', 'released'))::integer,
                claim = t.claim + (o.outcome = 'returned')::integer,
                due = CASE WHEN o.status = 'pending'
                    THEN v_now + make_interval(
                        secs => least(greatest(coalesce(o.retry_in, 0), 0), 1e9)) END,
                ledger = CASE WHEN o.status = 'pending' THEN p_ledger ELSE t.ledger END,
                finished_at = CASE WHEN o.status <> 'pending' THEN v_now END,
                result = CASE WHEN o.outcome = 'succeeded' THEN o.result END,
                error = CASE WHEN o.outcome = 'returned' THEN t.error ELSE o.error END,
                error_type = CASE WHEN o.status = 'failed'
                    THEN left(coalesce(o.error->>'type', 'unknown'), 500) END,
                sanitised = coalesce(o.sanitised, false)
            FROM (
                SELECT i, found.ctid AS tid, p_claims[i] AS claim,
                    p_outcomes[i] AS outcome, p_retry_ins[i] AS retry_in, p_results[i] AS result,
                    p_errors[i] AS error, p_sanitised[i] AS sanitised,
                    CASE WHEN p_outcomes[i] IN ('succeeded', 'failed') THEN p_outcomes[i]
                        WHEN r.closing IS NOT NULL THEN 'cancelled'
                        ELSE 'pending' END AS status
                FROM unnest(v_recorded) i
                CROSS JOIN LATERAL (
                    SELECT ctid FROM fanout_items
                    WHERE run_id = p_run AND position = p_positions[i] OFFSET 0) found
            ) o
            WHERE t.ctid = o.tid AND t.claim = o.claim AND t.status = 'processing'
            RETURNING o.i, t.status
        )
        SELECT array_agg(i), ARRAY[
            count(*) FILTER (WHERE status = 'succeeded'), count(*) FILTER (WHERE status = 'failed'),
            count(*) FILTER (WHERE status = 'cancelled'), count(*) FILTER (WHERE status = 'pending')]
        INTO v_counted, v_done FROM done;
        led.succeeded := led.succeeded + v_done[1];
        led.failed := led.failed + v_done[2];
        led.cancelled := led.cancelled + v_done[3];
        led.waiting := led.waiting + v_done[4];
        led.rate := fanout_decay_v1(led.rate, v_now - led.updated_at)
            + (v_done[1] + v_done[2]) / 30.0;
        led.updated_at := v_now;
        v_want := v_want || v_counted;
    END IF;

    -- A report never stops a run: it marks it, and its process sends the stop. It hands out nothing
    -- more either.
    v_stop := v_judge AND r.closing IS NULL AND r.status = 'processing'
        AND fanout_intolerable_v1(v_failed_total + coalesce(v_done[2], 0), r.total,
            r.tolerate_count, r.tolerate_share);
    v_blocked := v_blocked OR v_stop;

    -- Who wants another item, and may have one?
    FOR i IN 1 .. n LOOP
        IF i = ANY (v_want) AND i = ANY (v_ahead) THEN
            IF v_blocked OR p_wishes[i] = 'end' OR r.surplus > 0
                    OR p_wishes[i] = 'slice' AND v_yield THEN
                v_verdicts[i] := 'last';
                v_want := array_remove(v_want, i);
            END IF;
        ELSIF i = ANY (v_want) AND (v_blocked OR p_wishes[i] = 'end' OR r.surplus > 0
                OR p_wishes[i] = 'slice' AND v_yield) THEN
            IF r.surplus > 0 THEN
                r.surplus := r.surplus - 1;
            END IF;
            v_ended := v_ended || i;
            v_verdicts[i] := 'ended';
            v_want := array_remove(v_want, i);
        END IF;
    END LOOP;
    IF cardinality(v_want) > 0 AND r.limits IS NOT NULL THEN
        SELECT go, held_back, reserved, rated INTO v_want, v_held_back, v_reserved, v_rated
        FROM fanout_starts_v1(p_run, r.limits, r.key_limit, v_want, p_slots,
            led.cursor < led.size OR led.waiting > 0);
    END IF;
    -- A suspect is never kept ready: it must be known who works on it.
    v_want := ARRAY(SELECT i FROM unnest(v_want) i ORDER BY i = ANY (v_ahead), i);
    v_may_suspect := p_suspect AND cardinality(v_want) > 0 AND NOT v_want[1] = ANY (v_ahead);
    v_take := cardinality(v_want);

    -- In a run with keys: of the lanes that have room, in turn.
    IF v_take > 0 AND r.key_limit IS NOT NULL THEN
        PERFORM fanout_lock_limits_v1(r.limits, r.key_limit);
        SELECT positions, ended_at INTO v_positions, led.lane
        FROM fanout_lane_items_v1(p_run, r.key_limit, v_take, led.lane, v_may_suspect,
            ARRAY(SELECT p_slots[i] FROM unnest(v_want || v_ended || v_held_back) i));
        led.waiting := led.waiting - cardinality(v_positions);
        v_take := 0;
    END IF;

    -- The items due longest first. A process holds one suspect at a time; those that nobody may
    -- take now are put off a little.
    IF v_take > 0 AND led.waiting > 0 THEN
        SELECT array_agg(d.position ORDER BY d.due) FILTER (WHERE d.crashes = 0),
            (array_agg(d.position ORDER BY d.due) FILTER (WHERE d.crashes > 0))[1],
            (array_agg(d.position ORDER BY d.due) FILTER (WHERE d.crashes > 0 AND d.due <= v_now))
                [CASE WHEN v_may_suspect THEN 2 ELSE 1 END :]
        INTO v_positions, v_suspect, v_skipped
        FROM (
            SELECT position, crashes, due FROM fanout_items
            WHERE run_id = p_run AND ledger = p_ledger
                -- Who may take a suspect also takes one that was only put off.
                AND due <= v_now + CASE WHEN v_may_suspect THEN interval '1 second'
                    ELSE interval '0' END
                AND (due <= v_now OR crashes > 0 AND failures = 0)
            ORDER BY due LIMIT v_take + 32
        ) d;
        v_positions := coalesce(v_positions, '{}');
        IF v_may_suspect AND v_suspect IS NOT NULL THEN
            v_positions := v_suspect || v_positions;
        END IF;
        v_positions := v_positions[1 : v_take];
        led.waiting := led.waiting - cardinality(v_positions);
        IF cardinality(v_skipped) > 0 THEN
            UPDATE fanout_items t SET due = v_now + make_interval(secs => 0.5 + random() * 0.5)
            FROM (
                SELECT found.ctid AS tid FROM unnest(v_skipped) skipped (position)
                CROSS JOIN LATERAL (
                    SELECT ctid FROM fanout_items
                    WHERE run_id = p_run AND position = skipped.position OFFSET 0) found
            ) o
            WHERE t.ctid = o.tid;
        END IF;
    END IF;
    -- Then what was never handed out, in order.
    IF v_take > cardinality(v_positions) AND led.cursor < led.size THEN
        v_take := least(v_take - cardinality(v_positions), led.size - led.cursor);
        v_positions := v_positions || ARRAY(
            SELECT p_ledger + (led.cursor + k) * r.ledgers FROM generate_series(0, v_take - 1) k);
        led.cursor := led.cursor + v_take;
    END IF;
    IF cardinality(v_positions) > 0 THEN
        WITH handed AS (
            UPDATE fanout_items t
            SET status = 'processing', claim = t.claim + 1, due = NULL, started_at = v_now,
                finished_at = NULL
            FROM (
                SELECT want.i, found.ctid AS tid
                FROM unnest(v_want[1 : cardinality(v_positions)], v_positions) want (i, position)
                CROSS JOIN LATERAL (
                    SELECT ctid FROM fanout_items
                    WHERE run_id = p_run AND position = want.position OFFSET 0) found
            ) h
            WHERE t.ctid = h.tid AND t.status = 'pending'
            RETURNING h.i, t.position, t.claim, t.failures, t.crashes, t.item_key, t.payload
        )
        SELECT array_agg((p_slots[h.i], 'item', p_epochs[h.i], p_ledger, h.position, h.claim,
            h.failures, h.crashes, h.item_key, h.payload::text, NULL, false, false,
            false)::fanout_reply_v1),
            array_agg(h.i), count(*) FILTER (WHERE h.claim = 1)
        INTO v_replies, v_applied, v_first FROM handed h;
        IF r.key_limit IS NOT NULL THEN
            led.fresh := led.fresh - v_first;
        END IF;
        FOR k IN 1 .. coalesce(cardinality(v_applied), 0) LOOP
            v_verdicts[v_applied[k]] := 'item';
        END LOOP;
    END IF;

    IF cardinality(v_shifted) > 0 THEN
        -- What was ready begins now.
        UPDATE fanout_items t SET started_at = v_now
        FROM (
            SELECT found.ctid AS tid FROM unnest(v_shifted) i
            CROSS JOIN LATERAL (
                SELECT ctid FROM fanout_items
                WHERE run_id = p_run AND position = v_ready[i] OFFSET 0) found
        ) o
        WHERE t.ctid = o.tid AND t.status = 'processing';
    END IF;

    UPDATE fanout_ledgers
    SET cursor = led.cursor, waiting = led.waiting, succeeded = led.succeeded, failed = led.failed,
        cancelled = led.cancelled, rate = led.rate, updated_at = led.updated_at,
        fresh = led.fresh, lane = led.lane,
        open = led.open AND led.succeeded + led.failed + led.cancelled < led.size
    WHERE run_id = p_run AND ledger = p_ledger;

    -- Who got nothing? Another ledger, an item due soon, or the end.
    FOR i IN 1 .. n LOOP
        IF i = ANY (v_want) AND i = ANY (v_ahead) AND v_verdicts[i] <> 'item' THEN
            v_verdicts[i] := 'last';
        END IF;
    END LOOP;
    v_want := ARRAY(SELECT i FROM unnest(v_want) i WHERE v_verdicts[i] NOT IN ('item', 'last'));
    IF cardinality(v_want) > 0 THEN
        v_hint := CASE WHEN led.cursor < led.size THEN p_ledger
            ELSE fanout_next_ledger_v1(p_run, p_ledger + 1) END;
        IF v_hint = p_ledger AND led.cursor >= led.size
                AND cardinality(v_positions) = 0 AND coalesce(cardinality(v_skipped), 0) = 0
                OR r.key_limit IS NOT NULL THEN
            v_hint := NULL;
        END IF;
        IF v_hint IS NULL AND v_need_run THEN
            SELECT count(*) INTO v_idle FROM fanout_slots
            WHERE run_id = p_run AND active AND held IS NULL
                AND slot <> ALL (ARRAY(SELECT p_slots[i] FROM unnest(v_want) i));
            v_dues := ARRAY(
                SELECT due FROM fanout_next_dues_v1(p_run, v_idle + cardinality(v_want))
                WHERE due <= v_now + interval '10 seconds' AND NOT suspect
                    AND r.key_limit IS NULL
                UNION ALL
                SELECT due FROM fanout_lane_dues_v1(p_run, v_idle + cardinality(v_want))
                WHERE due <= v_now + interval '10 seconds' AND NOT suspect
                    AND r.key_limit IS NOT NULL
                ORDER BY due);
        END IF;
        FOR k IN 1 .. cardinality(v_want) LOOP
            IF v_hint IS NOT NULL OR NOT v_need_run THEN
                v_verdicts[v_want[k]] := 'move';
            ELSIF v_idle + k <= coalesce(cardinality(v_dues), 0) THEN
                v_verdicts[v_want[k]] := 'wait';
            ELSE
                v_verdicts[v_want[k]] := 'ended';
                v_ended := v_ended || v_want[k];
            END IF;
        END LOOP;
    END IF;

    FOR k IN 1 .. cardinality(v_held_back) LOOP
        -- A start too far away to wait for it in place: the place is given back.
        IF v_held_back[k] = ANY (v_ahead) THEN
            v_verdicts[v_held_back[k]] := 'last';
        ELSIF v_reserved[v_held_back[k]] IS NULL THEN
            v_verdicts[v_held_back[k]] := 'ended';
            v_ended := v_ended || v_held_back[k];
        ELSE
            v_verdicts[v_held_back[k]] := 'wait';
        END IF;
    END LOOP;

    v_complete := led.open AND led.succeeded + led.failed + led.cancelled >= led.size;
    IF v_need_run AND (v_complete OR v_judge OR cardinality(v_ended) > 0) THEN
        UPDATE fanout_runs
        SET open_ledgers = open_ledgers - v_complete::integer, surplus = r.surplus,
            closing = CASE WHEN v_stop THEN 'failed' ELSE closing END,
            reason = CASE WHEN v_stop THEN fanout_tolerance_reason_v1(p_run) ELSE reason END
        WHERE id = p_run AND (v_complete OR v_stop OR surplus <> r.surplus)
        RETURNING v_complete AND open_ledgers = 0 INTO v_closed;
        IF v_closed THEN
            v_closed := fanout_close_complete_v1(p_run);
        END IF;
    END IF;
    IF NOT coalesce(v_closed, false) THEN
        IF cardinality(v_ended) > 0 THEN
            DELETE FROM fanout_slots
            WHERE run_id = p_run AND slot = ANY (ARRAY(SELECT p_slots[i] FROM unnest(v_ended) i));
        END IF;
        -- What each slot has in hand now, and what it recorded last.
        UPDATE fanout_slots s
        SET held = CASE WHEN e.resent OR e.ahead AND NOT e.shifted THEN s.held
                WHEN e.shifted THEN s.ready ELSE h.position END,
            held_claim = CASE WHEN e.resent OR e.ahead AND NOT e.shifted THEN s.held_claim
                WHEN e.shifted THEN s.ready_claim ELSE h.claim END,
            ready = CASE WHEN e.resent THEN s.ready WHEN e.ahead THEN h.position END,
            ready_claim = CASE WHEN e.resent THEN s.ready_claim WHEN e.ahead THEN h.claim END,
            seen_at = v_now, suspect_since = NULL,
            last_position = coalesce(e.recorded_position, s.last_position),
            last_claim = coalesce(e.recorded_claim, s.last_claim),
            reserved_at = CASE WHEN e.i = ANY (v_held_back) THEN v_reserved[e.i] END,
            lane = CASE WHEN r.key_limit IS NULL THEN NULL WHEN e.resent THEN s.lane
                ELSE (SELECT t.lane FROM fanout_items t
                    WHERE t.run_id = p_run AND t.position = h.position) END
        FROM (
            SELECT i, p_slots[i] AS slot, i = ANY (v_resent || v_kept) AS resent,
                i = ANY (v_ahead) AS ahead, i = ANY (v_shifted) AS shifted,
                CASE WHEN i = ANY (v_counted) THEN p_positions[i] END AS recorded_position,
                CASE WHEN i = ANY (v_counted) THEN p_claims[i] END AS recorded_claim
            FROM generate_series(1, n) i
            WHERE i = ANY (v_recorded) OR i = ANY (v_resent)
                OR v_verdicts[i] IN ('item', 'wait', 'move', 'last')
        ) e
        LEFT JOIN unnest(v_replies) h ON h.slot = e.slot
        WHERE s.run_id = p_run AND s.slot = e.slot AND s.epoch = p_epochs[e.i];
        IF v_need_run AND (p_begin OR v_releasing > 0 OR cardinality(v_ended) > 0
                -- A start was used up: the next may be near enough for one more slot.
                OR v_rated AND cardinality(v_positions) > 0) THEN
            PERFORM fanout_top_up_v1(p_run);
        END IF;
    END IF;

    -- Whether somebody else may have use for what ended here.
    v_freed := r.limits IS NOT NULL
            AND (coalesce(v_closed, false) OR cardinality(v_ended) > 0
                -- The next start is another run's.
                OR v_rated AND cardinality(v_positions) > 0 AND fanout_makes_room_v1(p_run))
        OR r.key_limit IS NOT NULL AND cardinality(v_counted) > 0 AND EXISTS (
            SELECT FROM fanout_runs o WHERE o.key_limit = r.key_limit
                AND o.status = 'processing' AND o.id <> p_run);
    -- Where how many at once is limited, the time of a report would be lost for the limit.
    v_keeps := r.limits IS NOT NULL AND r.key_limit IS NULL AND v_rated IS NOT TRUE;
    FOREACH v_reply IN ARRAY coalesce(v_replies, '{}') LOOP
        v_reply.stop := v_stop;
        v_reply.freed := v_freed;
        v_reply.ahead := v_keeps;
        RETURN NEXT v_reply;
    END LOOP;
    IF cardinality(v_resent) > 0 THEN
        RETURN QUERY SELECT p_slots[e.i], 'item'::text, p_epochs[e.i], p_ledger, t.position,
            t.claim, t.failures, t.crashes, t.item_key, t.payload::text, NULL::double precision,
            v_stop, v_freed, v_keeps
        FROM unnest(v_resent) e (i)
        CROSS JOIN LATERAL (
            SELECT * FROM fanout_items WHERE run_id = p_run AND position = v_again[e.i] OFFSET 0
        ) t;
    END IF;
    FOR i IN 1 .. n LOOP
        IF v_verdicts[i] <> 'item' AND i <> ALL (v_resent) THEN
            RETURN NEXT (p_slots[i], v_verdicts[i], p_epochs[i], coalesce(v_hint, p_ledger), NULL,
                NULL, NULL, NULL, NULL, NULL, CASE WHEN i = ANY (v_held_back)
                    THEN least(greatest(
                        extract(epoch FROM v_reserved[i] - clock_timestamp()), 0), 1)
                WHEN v_verdicts[i] = 'wait'
                THEN least(greatest(extract(epoch FROM v_dues[1] - clock_timestamp()), 0.05), 1)
                END, v_stop, v_freed, v_keeps
                )::fanout_reply_v1;
        END IF;
    END LOOP;
END;
$$;

-- Binds a job to its slot and hands it its first item. The token is random per execution: sent
-- again it gets the same answer, while the same job started twice is refused. Without a slot of
-- its own the job tops up and ends.
CREATE OR REPLACE FUNCTION fanout_begin_v1(
    p_run bigint, p_slot integer, p_job bigint, p_token uuid, p_ledger integer, p_suspect boolean
) RETURNS SETOF fanout_reply_v1 LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off
SET enable_mergejoin = off SET jit = off SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
    v_ledger integer;
    v_epoch bigint;
    v_active integer;
    v_mine boolean;
    s fanout_slots;
    r record;
BEGIN
    SELECT epoch, held INTO s.epoch, s.held FROM fanout_slots
    WHERE run_id = p_run AND slot = p_slot AND job_id = p_job AND active AND token = p_token;
    IF FOUND THEN
        SELECT ledgers INTO r FROM fanout_runs WHERE id = p_run;
        v_ledger := coalesce((s.held % r.ledgers)::integer,
            fanout_next_ledger_v1(p_run, coalesce(p_ledger, 0)), 0);
        RETURN QUERY SELECT * FROM fanout_report_v1(
            p_run, v_ledger, false, p_suspect,
            ARRAY[p_slot], ARRAY[s.epoch], ARRAY['next'], ARRAY[NULL::bigint], ARRAY[NULL::bigint],
            ARRAY[NULL::text], ARRAY[NULL::double precision], ARRAY[NULL::jsonb],
            ARRAY[NULL::jsonb], ARRAY[NULL::boolean], ARRAY[NULL::bigint]);
        RETURN;
    END IF;
    v_ledger := coalesce(fanout_next_ledger_v1(p_run, coalesce(p_ledger, 0)), 0);
    PERFORM FROM fanout_ledgers WHERE run_id = p_run AND ledger = v_ledger FOR NO KEY UPDATE;
    SELECT status, paused, closing, max_in_flight, limits INTO r
    FROM fanout_runs WHERE id = p_run FOR NO KEY UPDATE;
    -- Only who holds the run makes, binds or cancels a queued slot: it is ours without a lock.
    SELECT count(*) FILTER (WHERE active),
        bool_or(slot = p_slot AND job_id = p_job AND NOT active)
    INTO v_active, v_mine FROM fanout_slots WHERE run_id = p_run;
    IF NOT coalesce(v_mine, false) THEN
        PERFORM fanout_top_up_v1(p_run);
        RETURN NEXT (p_slot, 'ended', NULL, v_ledger, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
            false, false, false)::fanout_reply_v1;
        RETURN;
    END IF;
    IF r.status <> 'processing' OR r.paused OR r.closing IS NOT NULL
            OR v_active >= r.max_in_flight
            OR r.limits IS NOT NULL AND NOT fanout_may_begin_v1(p_run, p_slot) THEN
        DELETE FROM fanout_slots WHERE run_id = p_run AND slot = p_slot;
        IF r.limits IS NOT NULL THEN
            PERFORM fanout_top_up_v1(p_run);
        END IF;
        RETURN NEXT (p_slot, 'ended', NULL, v_ledger, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
            false, r.limits IS NOT NULL, false)::fanout_reply_v1;
        RETURN;
    END IF;
    v_epoch := nextval('fanout_epochs');
    UPDATE fanout_slots
    SET active = true, epoch = v_epoch, token = p_token, scheduled_at = NULL,
        seen_at = clock_timestamp(), suspect_since = NULL
    WHERE run_id = p_run AND slot = p_slot;
    RETURN QUERY SELECT * FROM fanout_report_v1(
        p_run, v_ledger, true, p_suspect,
        ARRAY[p_slot], ARRAY[v_epoch], ARRAY['next'], ARRAY[NULL::bigint], ARRAY[NULL::bigint],
        ARRAY[NULL::text], ARRAY[NULL::double precision], ARRAY[NULL::jsonb], ARRAY[NULL::jsonb],
        ARRAY[NULL::boolean], ARRAY[NULL::bigint]);
END;
$$;

-- Gives back, at no charge, what a slot keeps ready, for the item in hand takes longer than thought.
-- Answers whether it was still there; else it is in hand already, or the slot is somebody else's.
CREATE OR REPLACE FUNCTION fanout_give_back_v1(
    p_run bigint, p_slot integer, p_epoch bigint, p_position bigint
) RETURNS boolean LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off
SET enable_mergejoin = off SET jit = off
AS $$
DECLARE
    r record;
BEGIN
    SELECT ledgers INTO r FROM fanout_runs WHERE id = p_run;
    PERFORM FROM fanout_ledgers
    WHERE run_id = p_run AND ledger = p_position % r.ledgers FOR NO KEY UPDATE;
    SELECT closing INTO r FROM fanout_runs WHERE id = p_run FOR NO KEY UPDATE;
    UPDATE fanout_slots SET ready = NULL, ready_claim = NULL
    WHERE run_id = p_run AND slot = p_slot AND epoch = p_epoch AND active AND ready = p_position;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    PERFORM fanout_put_back_v1(p_run, p_position, r.closing IS NOT NULL, 0);
    IF r.closing IS NULL THEN
        PERFORM fanout_top_up_v1(p_run);
    END IF;
    RETURN true;
END;
$$;

-- Releases an item that is handed out and was not begun, or cancels it where its run is stopped.
-- The caller holds its ledger and the run.
CREATE OR REPLACE FUNCTION fanout_put_back_v1(
    p_run bigint, p_position bigint, p_cancel boolean, p_crashes integer
) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_ledgers integer;
BEGIN
    SELECT ledgers INTO v_ledgers FROM fanout_runs WHERE id = p_run;
    UPDATE fanout_items
    SET status = CASE WHEN p_cancel THEN 'cancelled' ELSE 'pending' END, claim = claim + 1,
        crashes = crashes + p_crashes, ledger = p_position % v_ledgers,
        due = CASE WHEN NOT p_cancel THEN clock_timestamp() END,
        finished_at = CASE WHEN p_cancel THEN clock_timestamp() END
    WHERE run_id = p_run AND position = p_position AND status = 'processing';
    IF FOUND THEN
        UPDATE fanout_ledgers
        SET waiting = waiting + (NOT p_cancel)::integer, cancelled = cancelled + p_cancel::integer,
            open = open AND succeeded + failed + cancelled + p_cancel::integer < size,
            updated_at = clock_timestamp()
        WHERE run_id = p_run AND ledger = p_position % v_ledgers;
        UPDATE fanout_runs SET open_ledgers = (
            SELECT count(*) FROM fanout_ledgers WHERE run_id = p_run AND open)
        WHERE id = p_run AND p_cancel;
    END IF;
END;
$$;
