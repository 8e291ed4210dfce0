-- Limits over all machines. Nothing here counts up and down: what is in use is what live slots and
-- live permits say. The rows of fanout_limits come last in every lock order, ascending by name, and
-- nobody waits for anything else while holding one.
--
-- A slot takes part in the limits of its run from the moment it is dealt, so that no worker's place
-- is spent waiting; one dealt for a later time takes part when it begins.

-- Stores what the code declares. Another declaration than the last one replaces what was changed by
-- hand; the same leaves it alone and locks nothing.
CREATE OR REPLACE FUNCTION fanout_declare_limits_v1(p_specs jsonb) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM jsonb_array_elements(p_specs) e (spec)
            LEFT JOIN fanout_limits o ON o.name = e.spec->>'name'
            WHERE o.declared IS DISTINCT FROM e.spec) THEN
        RETURN;
    END IF;
    -- Whoever stores one of them takes all, for the caller may need the others later; those that are
    -- missing in the same pass, for another may store them just now.
    INSERT INTO fanout_limits AS l (name, concurrency, rate, per, burst, keyed, declared)
    SELECT s.name, s.concurrency, s.rate, coalesce(s.per, 1), coalesce(s.burst, 1),
        coalesce(s.keyed, false), e.spec
    FROM jsonb_array_elements(p_specs) e (spec)
    CROSS JOIN LATERAL jsonb_populate_record(NULL::fanout_limits, e.spec) s
    ORDER BY s.name
    ON CONFLICT (name) DO UPDATE
    SET concurrency = excluded.concurrency, rate = excluded.rate, per = excluded.per,
        burst = excluded.burst, keyed = excluded.keyed, declared = excluded.declared,
        updated_at = clock_timestamp()
    WHERE l.declared <> excluded.declared;
END;
$$;

-- Takes the rows of all limits of a run, ascending by name, the one by key included: whoever needs
-- one of them takes all.
CREATE OR REPLACE FUNCTION fanout_lock_limits_v1(p_limits text[], p_key_limit text) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM FROM fanout_limits WHERE name = ANY (p_limits || p_key_limit)
    ORDER BY name FOR NO KEY UPDATE;
END;
$$;

-- How many take part in a limit: slots at work or queued for now, and permits that live.
CREATE OR REPLACE FUNCTION fanout_limit_used_v1(p_limit text) RETURNS bigint
LANGUAGE sql STABLE AS $$
    SELECT (
        SELECT count(*) FROM fanout_runs r
        JOIN fanout_slots s ON s.run_id = r.id AND (s.active OR s.scheduled_at IS NULL)
        WHERE r.status = 'processing' AND r.limits IS NOT NULL AND r.limits @> ARRAY[p_limit]
    ) + (
        SELECT count(*) FROM fanout_permits p
        WHERE p.limit_name = p_limit AND p.granted_at IS NOT NULL AND fanout_permit_lives_v1(p)
    )
$$;

-- How many stand in the line of a limit, or of one of its keys, and go before runs; p_most at most.
CREATE OR REPLACE FUNCTION fanout_line_v1(p_limit text, p_key text, p_most bigint) RETURNS bigint
LANGUAGE sql STABLE AS $$
    SELECT count(*) FROM (
        SELECT FROM fanout_permits p
        WHERE p.limit_name = p_limit AND (p_key IS NULL OR p.key = p_key)
            AND p.granted_at IS NULL AND fanout_permit_lives_v1(p)
            AND fanout_keeps_waiting_v1(p)
        LIMIT p_most
    ) first
$$;

-- How many places a run has in its limits: its slots at work or queued for now.
CREATE OR REPLACE FUNCTION fanout_places_v1(p_run bigint) RETURNS bigint
LANGUAGE sql STABLE AS $$
    SELECT count(*) FROM fanout_slots
    WHERE run_id = p_run AND (active OR scheduled_at IS NULL)
$$;

-- How many active slots of a run are told to end. What its surplus says besides is of slots that
-- ended otherwise.
CREATE OR REPLACE FUNCTION fanout_surplus_v1(p_run bigint) RETURNS bigint
LANGUAGE sql STABLE AS $$
    SELECT coalesce((
        SELECT least(r.surplus, (SELECT count(*) FROM fanout_slots WHERE run_id = p_run AND active))
        FROM fanout_runs r WHERE r.id = p_run AND r.surplus > 0), 0)
$$;

-- The time between two starts. On the way from here to the call that is limited some are faster
-- than others: for that, starts are paced by a fiftieth slower, and half of the burst is kept back.
CREATE OR REPLACE FUNCTION fanout_interval_v1(l fanout_limits) RETURNS interval
LANGUAGE sql IMMUTABLE AS $$
    SELECT make_interval(secs => 1.02 * l.per / l.rate)
$$;

CREATE OR REPLACE FUNCTION fanout_burst_v1(l fanout_limits) RETURNS interval
LANGUAGE sql IMMUTABLE AS $$
    SELECT fanout_interval_v1(l) * ((l.burst + 1) / 2 - 1)
$$;

-- How soon the next start of a rate is free; never in the past.
CREATE OR REPLACE FUNCTION fanout_next_start_v1(l fanout_limits) RETURNS timestamptz
LANGUAGE sql STABLE AS $$
    SELECT greatest(l.next_at - fanout_burst_v1(l), l.paused_until, clock_timestamp())
$$;

-- How far ahead starts are kept for slots that wait in their places.
CREATE OR REPLACE FUNCTION fanout_horizon_v1(l fanout_limits) RETURNS interval
LANGUAGE sql IMMUTABLE AS $$
    SELECT greatest(interval '0.25 s', fanout_interval_v1(l) * 2)
$$;

-- Keeps a start for the caller, who holds the limits' rows; with several rates the one that fits
-- all. Null where it lies further ahead than each one's horizon and p_beyond.
CREATE OR REPLACE FUNCTION fanout_reserve_v1(p_limits text[], p_beyond interval)
RETURNS timestamptz LANGUAGE plpgsql AS $$
DECLARE
    v_start timestamptz;
    v_far boolean;
BEGIN
    SELECT max(fanout_next_start_v1(l)), bool_or(fanout_next_start_v1(l)
        > clock_timestamp() + fanout_horizon_v1(l) + p_beyond)
    INTO v_start, v_far FROM fanout_limits l WHERE name = ANY (p_limits) AND rate IS NOT NULL;
    IF v_far THEN
        RETURN NULL;
    END IF;
    UPDATE fanout_limits l
    SET next_at = greatest(next_at, v_start) + fanout_interval_v1(l)
    WHERE name = ANY (p_limits) AND rate IS NOT NULL;
    RETURN v_start;
END;
$$;

-- Who of these wishes may start now. The others wait for the start that is kept for them in
-- `reserved`, by wish, or give their place back where that is null.
CREATE OR REPLACE FUNCTION fanout_starts_v1(
    p_run bigint, p_limits text[], p_key_limit text, p_want integer[], p_slots integer[],
    p_any boolean,
    OUT go integer[], OUT held_back integer[], OUT reserved timestamptz[], OUT rated boolean
) LANGUAGE plpgsql AS $$
DECLARE
    v_paused timestamptz;
    v_start timestamptz;
    v_wish integer;
BEGIN
    go := p_want;
    held_back := '{}';
    SELECT max(paused_until) FILTER (WHERE paused_until > clock_timestamp()),
        bool_or(rate IS NOT NULL)
    INTO v_paused, rated FROM fanout_limits WHERE name = ANY (p_limits);
    IF v_paused IS NULL AND rated IS NOT TRUE OR NOT p_any THEN
        RETURN;
    END IF;
    go := '{}';
    reserved := array_fill(v_paused, ARRAY[cardinality(p_slots)]);
    IF rated IS NOT TRUE THEN
        held_back := p_want;
        RETURN;
    END IF;
    PERFORM fanout_lock_limits_v1(p_limits, p_key_limit);
    FOREACH v_wish IN ARRAY p_want LOOP
        SELECT reserved_at INTO v_start FROM fanout_slots
        WHERE run_id = p_run AND slot = p_slots[v_wish];
        IF v_start IS NULL OR v_start < v_paused THEN
            v_start := fanout_reserve_v1(
                p_limits, greatest(interval '0', v_paused - clock_timestamp()));
        END IF;
        IF v_start <= clock_timestamp() THEN
            go := go || v_wish;
        ELSE
            held_back := held_back || v_wish;
            reserved[v_wish] := v_start;
        END IF;
    END LOOP;
END;
$$;

-- Whether a queued slot may begin: its places are still there, or for one dealt for a later time,
-- there are some now. The caller holds the run.
CREATE OR REPLACE FUNCTION fanout_may_begin_v1(p_run bigint, p_slot integer) RETURNS boolean
LANGUAGE plpgsql AS $$
BEGIN
    IF (SELECT scheduled_at FROM fanout_slots WHERE run_id = p_run AND slot = p_slot) IS NOT NULL
    THEN
        RETURN fanout_grant_v1(p_run, 1) = 1;
    END IF;
    RETURN NOT EXISTS (
        SELECT FROM fanout_limits l
        WHERE l.name = ANY ((SELECT limits FROM fanout_runs WHERE id = p_run)::text[])
            AND l.concurrency < fanout_limit_used_v1(l.name));
END;
$$;

-- How many of p_wanted places a run would get of its limits. Fair by level = places / weight: whoever
-- would stand lowest gets the next one, and among equals whoever was served longest ago.
CREATE OR REPLACE FUNCTION fanout_granted_v1(p_run bigint, p_wanted integer) RETURNS integer
LANGUAGE plpgsql STABLE AS $$
DECLARE
    v_granted integer := p_wanted;
    v_free bigint;
    v_mine bigint;
    l fanout_limits;
    r record;
BEGIN
    SELECT limits, weight, served_at INTO r FROM fanout_runs WHERE id = p_run;
    v_mine := fanout_places_v1(p_run);
    FOR l IN SELECT * FROM fanout_limits WHERE name = ANY (r.limits) ORDER BY name LOOP
        IF l.concurrency IS NOT NULL AND v_granted > 0 THEN
            v_free := l.concurrency - fanout_limit_used_v1(l.name)
                - fanout_line_v1(l.name, NULL, l.concurrency);
            v_granted := fanout_share_v1(
                p_run, l.name, v_granted, v_free, v_mine, r.weight, r.served_at);
        END IF;
        IF l.rate IS NOT NULL AND v_granted > 0 THEN
            -- As many as will find a start kept for them. Others' queued slots do not count: perhaps
            -- nobody serves their queue.
            v_free := greatest(0, ceil(extract(epoch FROM
                    clock_timestamp() + fanout_horizon_v1(l) - fanout_next_start_v1(l)
                ) / extract(epoch FROM fanout_interval_v1(l)))) - (SELECT count(*) FROM fanout_slots
                    WHERE run_id = p_run AND NOT active AND scheduled_at IS NULL);
            v_granted := fanout_share_v1(
                p_run, l.name, v_granted, v_free, v_mine, r.weight, r.served_at);
        END IF;
    END LOOP;
    RETURN greatest(v_granted, 0);
END;
$$;

-- Grants that many. The caller holds the run; the limits stay locked to its end, so that two runs
-- never get the same place. Remembers what the run would have taken.
CREATE OR REPLACE FUNCTION fanout_grant_v1(p_run bigint, p_wanted integer) RETURNS integer
LANGUAGE plpgsql AS $$
DECLARE
    v_granted integer;
    r record;
BEGIN
    SELECT limits, key_limit, wants INTO r FROM fanout_runs WHERE id = p_run;
    PERFORM fanout_lock_limits_v1(r.limits, r.key_limit);
    v_granted := fanout_granted_v1(p_run, p_wanted);
    IF r.wants <> p_wanted - v_granted OR v_granted > 0 THEN
        UPDATE fanout_runs
        SET wants = p_wanted - v_granted,
            served_at = CASE WHEN v_granted > 0 THEN clock_timestamp() ELSE served_at END
        WHERE id = p_run;
    END IF;
    RETURN v_granted;
END;
$$;

-- How many of the free places go to this run rather than to others that want some.
CREATE OR REPLACE FUNCTION fanout_share_v1(
    p_run bigint, p_limit text, p_wanted integer, p_free bigint, p_mine bigint,
    p_weight double precision, p_served_at timestamptz
) RETURNS integer LANGUAGE plpgsql STABLE AS $$
DECLARE
    v_granted integer := 0;
    v_used bigint[];
    v_wants integer[];
    v_weights double precision[];
    v_served timestamptz[];
    v_best integer;
BEGIN
    IF p_free <= 0 THEN
        RETURN 0;
    END IF;
    SELECT array_agg(o.used), array_agg(o.wants), array_agg(o.weight), array_agg(o.served_at)
    INTO v_used, v_wants, v_weights, v_served FROM fanout_hungry_v1(p_limit, p_run) o;
    IF v_used IS NULL THEN
        RETURN least(p_wanted, p_free);
    END IF;
    FOR i IN 1 .. p_free LOOP
        EXIT WHEN v_granted = p_wanted;
        v_best := NULL;
        FOR k IN 1 .. cardinality(v_used) LOOP
            IF v_wants[k] > 0 AND (v_best IS NULL
                    OR ((v_used[k] + 1) / v_weights[k], v_served[k])
                        < ((v_used[v_best] + 1) / v_weights[v_best], v_served[v_best])) THEN
                v_best := k;
            END IF;
        END LOOP;
        IF v_best IS NULL OR ((p_mine + v_granted + 1) / p_weight, p_served_at)
                <= ((v_used[v_best] + 1) / v_weights[v_best], v_served[v_best]) THEN
            v_granted := v_granted + 1;
        ELSE
            v_used[v_best] := v_used[v_best] + 1;
            v_wants[v_best] := v_wants[v_best] - 1;
        END IF;
    END LOOP;
    RETURN v_granted;
END;
$$;

-- The runs that want more places of a limit than they have, and find room in their other limits.
CREATE OR REPLACE FUNCTION fanout_hungry_v1(p_limit text, p_besides bigint)
RETURNS TABLE (
    run_id bigint, used bigint, wants integer, weight double precision, served_at timestamptz
) LANGUAGE sql STABLE AS $$
    SELECT r.id, fanout_places_v1(r.id), r.wants, r.weight, r.served_at
    FROM fanout_runs r
    WHERE r.status = 'processing' AND r.limits IS NOT NULL AND r.limits @> ARRAY[p_limit]
        AND r.wants > 0 AND r.id IS DISTINCT FROM p_besides AND NOT r.paused
        AND r.closing IS NULL
        AND fanout_run_full_v1(array_remove(r.limits, p_limit)) IS NULL
$$;

-- Whether a slot of this run, at the end of its slice, is to make room for another run that stands
-- no higher than this one would without it.
CREATE OR REPLACE FUNCTION fanout_makes_room_v1(p_run bigint) RETURNS boolean
LANGUAGE sql STABLE AS $$
    SELECT coalesce(bool_or((h.used + 1) / h.weight <= m.used / m.weight), false)
    FROM (
        SELECT limits, weight, fanout_places_v1(id) AS used FROM fanout_runs WHERE id = p_run
    ) m
    CROSS JOIN LATERAL unnest(m.limits) l (name)
    CROSS JOIN LATERAL fanout_hungry_v1(l.name, p_run) h
$$;

-- What each run would have of a limit if all were dealt anew: level by level, those that have
-- places first. `excess` of them a run has to give up, besides those that are told to end already.
CREATE OR REPLACE FUNCTION fanout_balance_v1(p_limit text)
RETURNS TABLE (run_id bigint, used bigint, target bigint, excess bigint)
LANGUAGE plpgsql STABLE AS $$
#variable_conflict use_column
DECLARE
    v_runs bigint[];
    v_used bigint[];
    v_demand bigint[];
    v_weights double precision[];
    v_targets bigint[];
    v_surplus bigint[];
    v_best integer;
    v_left bigint;
BEGIN
    SELECT concurrency - fanout_line_v1(p_limit, NULL, concurrency) - (
        SELECT count(*) FROM fanout_permits p
        WHERE p.limit_name = p_limit AND p.granted_at IS NOT NULL AND fanout_permit_lives_v1(p))
    INTO v_left FROM fanout_limits WHERE name = p_limit;
    IF v_left IS NULL THEN
        RETURN;
    END IF;
    SELECT array_agg(o.id), array_agg(o.used), array_agg(o.used + o.wants), array_agg(o.weight),
        array_agg(0::bigint), array_agg(o.surplus)
    INTO v_runs, v_used, v_demand, v_weights, v_targets, v_surplus
    FROM (
        SELECT r.id, r.weight, fanout_surplus_v1(r.id) AS surplus,
            CASE WHEN r.paused OR r.closing IS NOT NULL
                OR fanout_run_full_v1(array_remove(r.limits, p_limit)) IS NOT NULL
                THEN 0 ELSE r.wants END AS wants,
            fanout_places_v1(r.id) AS used
        FROM fanout_runs r
        WHERE r.status = 'processing' AND r.limits IS NOT NULL AND r.limits @> ARRAY[p_limit]
        ORDER BY r.id
    ) o;
    WHILE v_left > 0 LOOP
        v_best := NULL;
        FOR k IN 1 .. coalesce(cardinality(v_runs), 0) LOOP
            IF v_targets[k] < v_demand[k] AND (v_best IS NULL
                    OR ((v_targets[k] + 1) / v_weights[k], v_targets[k] >= v_used[k])
                        < ((v_targets[v_best] + 1) / v_weights[v_best],
                            v_targets[v_best] >= v_used[v_best])) THEN
                v_best := k;
            END IF;
        END LOOP;
        EXIT WHEN v_best IS NULL;
        v_targets[v_best] := v_targets[v_best] + 1;
        v_left := v_left - 1;
    END LOOP;
    RETURN QUERY SELECT o.run_id, o.used, o.target, greatest(0, o.used - o.target - o.surplus)
    FROM unnest(v_runs, v_used, v_targets, v_surplus) o (run_id, used, target, surplus);
END;
$$;

-- Whether a run misses slots that its limits would give it, or that are for later.
CREATE OR REPLACE FUNCTION fanout_would_get_v1(p_run bigint) RETURNS boolean
LANGUAGE plpgsql STABLE AS $$
DECLARE
    v_now integer;
    v_later integer;
BEGIN
    SELECT count(*) FILTER (WHERE needed_at = '-infinity'),
        count(*) FILTER (WHERE needed_at > '-infinity')
    INTO v_now, v_later FROM fanout_slot_plan_v1(p_run);
    RETURN v_later > 0 OR v_now > 0 AND fanout_granted_v1(p_run, v_now) > 0;
END;
$$;

-- Whether a run with a rate has just reported: it deals its own slots, and those of the others, then.
CREATE OR REPLACE FUNCTION fanout_just_dealt_v1(r fanout_runs) RETURNS boolean
LANGUAGE sql STABLE AS $$
    SELECT EXISTS (SELECT FROM fanout_limits
            WHERE r.limits IS NOT NULL AND name = ANY (r.limits) AND rate IS NOT NULL)
        AND EXISTS (SELECT FROM fanout_ledgers
            WHERE run_id = r.id AND updated_at > clock_timestamp() - interval '2 s')
$$;

-- Whether a run misses slots that nothing will deal before the next sweep. Who stands in the line of
-- a limit that is full misses none.
CREATE OR REPLACE FUNCTION fanout_lacks_slots_v1(p_run bigint) RETURNS boolean
LANGUAGE sql STABLE AS $$
    SELECT fanout_run_full_v1(r.limits) IS NULL AND fanout_would_get_v1(r.id)
        AND NOT fanout_just_dealt_v1(r)
    FROM fanout_runs r WHERE r.id = p_run
$$;

-- Passes on what is free or unfairly held in the limits of a run: one step, in a transaction of its
-- own that locks one run. Answers whether another step may find something. Whom to serve is found
-- without a lock, for two runs are never locked at once.
CREATE OR REPLACE FUNCTION fanout_pass_on_v1(p_run bigint) RETURNS boolean
LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off
SET enable_mergejoin = off SET jit = off
AS $$
DECLARE
    v_limit text;
    v_run bigint;
    v_locked bigint;
    v_timeout constant text := current_setting('lock_timeout');
    m record;
    r record;
BEGIN
    SELECT limits, key_limit INTO m FROM fanout_runs WHERE id = p_run;
    IF m.key_limit IS NOT NULL THEN
        FOR r IN SELECT id FROM fanout_runs o
                WHERE o.key_limit = m.key_limit AND o.status = 'processing'
                    AND fanout_would_get_v1(o.id)
                ORDER BY o.served_at LIMIT 8 LOOP
            PERFORM FROM fanout_runs
            WHERE id = r.id AND status = 'processing' FOR NO KEY UPDATE SKIP LOCKED;
            IF FOUND THEN
                UPDATE fanout_runs SET served_at = clock_timestamp() WHERE id = r.id;
                RETURN fanout_top_up_v1(r.id) > 0;
            END IF;
        END LOOP;
    END IF;
    FOREACH v_limit IN ARRAY coalesce(m.limits, '{}') LOOP
        IF fanout_limit_full_v1(ARRAY[v_limit]) IS NULL OR EXISTS (
                -- Who has a place waits in it for the end of a pause.
                SELECT FROM fanout_limits l
                WHERE l.name = v_limit AND l.paused_until > clock_timestamp()
                    AND coalesce(l.concurrency > fanout_limit_used_v1(l.name), true)) THEN
            -- Whoever stands lowest.
            FOR r IN SELECT h.run_id FROM fanout_hungry_v1(v_limit, NULL) h
                    ORDER BY (h.used + 1) / h.weight, h.served_at LIMIT 100 LOOP
                IF fanout_would_get_v1(r.run_id) THEN
                    PERFORM FROM fanout_runs
                    WHERE id = r.run_id AND status = 'processing' FOR NO KEY UPDATE SKIP LOCKED;
                    IF FOUND THEN
                        RETURN fanout_top_up_v1(r.run_id) > 0;
                    END IF;
                    v_locked := coalesce(v_locked, r.run_id);
                ELSIF NOT EXISTS (SELECT FROM fanout_slot_plan_v1(r.run_id)
                        WHERE needed_at = '-infinity') THEN
                    -- One that wants nothing any more is no answer: another may.
                    PERFORM FROM fanout_runs
                    WHERE id = r.run_id AND wants > 0 FOR NO KEY UPDATE SKIP LOCKED;
                    IF FOUND THEN
                        UPDATE fanout_runs SET wants = 0 WHERE id = r.run_id;
                        RETURN true;
                    END IF;
                END IF;
            END LOOP;
            IF v_locked IS NOT NULL THEN
                -- Perhaps by a report, which deals nothing. What is locked for long is left to the
                -- next sweep.
                PERFORM set_config('lock_timeout', '200', true);
                BEGIN
                    PERFORM FROM fanout_runs WHERE id = v_locked FOR NO KEY UPDATE;
                EXCEPTION WHEN lock_not_available THEN
                    RETURN false;
                END;
                PERFORM set_config('lock_timeout', v_timeout, true);
                RETURN fanout_top_up_v1(v_locked) > 0;
            END IF;
        ELSE
            SELECT b.run_id INTO v_run FROM fanout_balance_v1(v_limit) b
            WHERE b.excess > 0 ORDER BY b.excess DESC LIMIT 1;
            IF FOUND THEN
                PERFORM fanout_shrink_v1(v_run, v_limit);
                RETURN true;
            END IF;
        END IF;
    END LOOP;
    RETURN false;
END;
$$;

-- Lets a run end the slots that it has too many of in a limit: queued ones at once, active ones after
-- the item in hand. How many is found under its lock: another may have let them end just now.
CREATE OR REPLACE FUNCTION fanout_shrink_v1(p_run bigint, p_limit text) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    v_excess bigint;
    v_queued bigint;
BEGIN
    PERFORM FROM fanout_runs WHERE id = p_run AND status = 'processing' FOR NO KEY UPDATE;
    SELECT excess INTO v_excess FROM fanout_balance_v1(p_limit) WHERE run_id = p_run;
    IF v_excess IS NULL OR v_excess = 0 THEN
        RETURN;
    END IF;
    WITH queued AS (
        -- Those for later hold no place.
        SELECT slot FROM fanout_slots
        WHERE run_id = p_run AND NOT active AND scheduled_at IS NULL
        ORDER BY slot DESC LIMIT v_excess
    ), gone AS (
        DELETE FROM fanout_slots s USING queued
        WHERE s.run_id = p_run AND s.slot = queued.slot RETURNING s.job_id
    )
    SELECT count(fanout_cancel_job_v1(job_id)) INTO v_queued FROM (
        SELECT job_id FROM gone ORDER BY job_id) ordered;
    UPDATE fanout_runs
    SET surplus = fanout_surplus_v1(p_run) + v_excess - v_queued, served_at = clock_timestamp(),
        wants = wants + v_excess
    WHERE id = p_run;
END;
$$;

-- Changes a limit by hand; null leaves a value, -1 lifts a concurrency. Answers whether there is one.
CREATE OR REPLACE FUNCTION fanout_limit_update_v1(
    p_limit text, p_changes jsonb, p_pause double precision
) RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
    c fanout_limits := jsonb_populate_record(NULL::fanout_limits, coalesce(p_changes, '{}'));
BEGIN
    UPDATE fanout_limits
    SET concurrency = CASE WHEN p_changes ? 'concurrency' THEN c.concurrency ELSE concurrency END,
        rate = CASE WHEN p_changes ? 'rate' THEN c.rate ELSE rate END,
        per = coalesce(c.per, per), burst = coalesce(c.burst, burst),
        next_at = CASE WHEN p_changes ?| ARRAY['rate', 'per', 'burst']
            THEN least(next_at, clock_timestamp()) ELSE next_at END,
        paused_until = CASE WHEN p_pause IS NULL THEN paused_until
            WHEN p_pause > 0 THEN greatest(paused_until, clock_timestamp()
                + make_interval(secs => least(p_pause, 1e9))) END,
        updated_at = clock_timestamp()
    WHERE name = p_limit;
    RETURN FOUND;
END;
$$;

-- The first of these limits that has no room at present, in words; null where all have.
CREATE OR REPLACE FUNCTION fanout_limit_full_v1(p_limits text[]) RETURNS text
LANGUAGE sql STABLE AS $$
    SELECT CASE
        WHEN l.paused_until > clock_timestamp()
            THEN format('limit %s is paused until %s', l.name, l.paused_until)
        WHEN l.concurrency <= fanout_limit_used_v1(l.name)
            THEN format('limit %s is full: %s of %s', l.name, fanout_limit_used_v1(l.name),
                l.concurrency)
        ELSE format('limit %s: the next start is free at %s', l.name, fanout_next_start_v1(l))
        END
    FROM fanout_limits l
    WHERE p_limits IS NOT NULL AND l.name = ANY (p_limits)
        AND (l.paused_until > clock_timestamp()
            OR l.concurrency <= fanout_limit_used_v1(l.name)
            OR l.rate IS NOT NULL
                AND fanout_next_start_v1(l) > clock_timestamp() + fanout_horizon_v1(l))
    ORDER BY l.name LIMIT 1
$$;

-- The same for a run, which those in the line of a limit go before.
CREATE OR REPLACE FUNCTION fanout_run_full_v1(p_limits text[]) RETURNS text
LANGUAGE sql STABLE AS $$
    SELECT coalesce(fanout_limit_full_v1(p_limits), (
        SELECT format('limit %s has room for those in its line alone', l.name)
        FROM fanout_limits l
        WHERE p_limits IS NOT NULL AND l.name = ANY (p_limits) AND l.concurrency
            <= fanout_limit_used_v1(l.name) + fanout_line_v1(l.name, NULL, l.concurrency)
        ORDER BY l.name LIMIT 1))
$$;
