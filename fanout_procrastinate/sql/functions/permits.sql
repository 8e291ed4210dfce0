-- Permits: places of limits outside of slots, for a part of an item's work or for any other program.
-- Who takes one and finds no room stands in a line, in the order of coming; one that silent holders
-- leave behind counts no more after their lease. The rows of fanout_limits come last in every lock
-- order, ascending by name; a permit's row is changed under them, or by statements that wait for
-- nobody.

-- Whether a permit's holder has given a sign of life within its lease.
CREATE OR REPLACE FUNCTION fanout_permit_lives_v1(p fanout_permits) RETURNS boolean
LANGUAGE sql STABLE AS $$
    SELECT p.seen_at > clock_timestamp() - make_interval(secs => p.lease)
$$;

-- Whether a limit has room for one more, rates aside.
CREATE OR REPLACE FUNCTION fanout_permit_fits_v1(p_limit text, p_key text) RETURNS boolean
LANGUAGE sql STABLE AS $$
    SELECT coalesce(l.paused_until <= clock_timestamp(), true)
        AND coalesce(l.concurrency > CASE
            WHEN NOT l.keyed THEN fanout_limit_used_v1(l.name)
            ELSE coalesce((SELECT u.used FROM fanout_lanes_used_v1(l.name, 0, '{}') u
                WHERE u.key = p_key), 0)
            END, true)
    FROM fanout_limits l WHERE l.name = p_limit
$$;

-- Whether one that waits keeps others waiting that stand behind it in this line. Whoever waits for
-- several does so only up to the first limit by name that lacks room, as if it took them one by one:
-- were it to keep them waiting further on, somebody with the first who wants the next would wait in a
-- circle.
CREATE OR REPLACE FUNCTION fanout_keeps_waiting_v1(p fanout_permits) RETURNS boolean
LANGUAGE sql STABLE AS $$
    SELECT NOT EXISTS (SELECT FROM fanout_permits o
        WHERE o.holder = p.holder AND o.limit_name COLLATE "C" < p.limit_name COLLATE "C"
            AND NOT fanout_permit_fits_v1(o.limit_name, o.key))
$$;

-- Grants to those who stand in the lines of these limits, whose rows the caller holds, in their
-- order. Answers to whom. Looks at the first 100, and at the first 100 of these keys: a long line of
-- one key keeps no other waiting.
--
-- Nobody passes who stands earlier, as far as that one keeps others waiting.
CREATE OR REPLACE FUNCTION fanout_grant_permits_v1(p_limits text[], p_keys text[]) RETURNS uuid[]
LANGUAGE plpgsql AS $$
DECLARE
    v_granted uuid[] := '{}';
    v_blocked text[] := '{}';
    v_names text[];
    v_lacks text;
    v_rated boolean;
    v_start timestamptz;
    w record;
BEGIN
    FOR w IN
        SELECT q.holder FROM (
            SELECT p.holder, p.ticket, p.key, row_number() OVER (ORDER BY p.ticket) AS nth,
                row_number() OVER (PARTITION BY p.key ORDER BY p.ticket) AS nth_of_key
            FROM fanout_permits p
            WHERE p.limit_name = ANY (p_limits) AND p.granted_at IS NULL
                AND fanout_permit_lives_v1(p)
        ) q
        WHERE q.nth <= 100 OR q.nth_of_key <= 100 AND q.key = ANY (p_keys)
        GROUP BY q.holder ORDER BY min(q.ticket)
    LOOP
        -- Each key of a limit has a line of its own.
        SELECT array_agg(limit_name), min(limit_name COLLATE "C") FILTER (
            WHERE limit_name <> ALL (p_limits)
                OR limit_name || coalesce(E'\n' || key, '') = ANY (v_blocked)
                OR NOT fanout_permit_fits_v1(limit_name, key))
        INTO v_names, v_lacks FROM fanout_permits WHERE holder = w.holder;
        v_start := NULL;
        IF v_lacks IS NULL THEN
            SELECT count(*) > 0 INTO v_rated FROM fanout_limits
            WHERE name = ANY (v_names) AND rate IS NOT NULL;
            IF v_rated THEN
                v_start := fanout_reserve_v1(v_names, interval '0');
                IF v_start IS NULL THEN
                    v_lacks := (SELECT max(n COLLATE "C") FROM unnest(v_names) l (n));
                END IF;
            END IF;
        END IF;
        IF v_lacks IS NULL THEN
            UPDATE fanout_permits SET granted_at = greatest(v_start, clock_timestamp())
            WHERE holder = w.holder;
            v_granted := v_granted || w.holder;
        ELSE
            SELECT v_blocked || array_agg(limit_name || coalesce(E'\n' || key, ''))
            INTO v_blocked FROM fanout_permits
            WHERE holder = w.holder AND limit_name COLLATE "C" <= v_lacks COLLATE "C";
            EXIT WHEN p_limits <@ v_blocked;
        END IF;
    END LOOP;
    RETURN v_granted;
END;
$$;

-- These limits and those that somebody in their lines waits for besides, ascending.
CREATE OR REPLACE FUNCTION fanout_lines_of_v1(p_limits text[]) RETURNS text[]
LANGUAGE sql STABLE AS $$
    SELECT array_agg(DISTINCT n) FROM (
        SELECT unnest(p_limits) UNION ALL
        SELECT o.limit_name FROM fanout_permits p
        JOIN fanout_permits o ON o.holder = p.holder
        WHERE p.limit_name = ANY (p_limits) AND p.granted_at IS NULL
    ) names (n)
$$;

-- Removes the permits of dead holders from limits whose rows the caller holds; answers how many.
CREATE OR REPLACE FUNCTION fanout_drop_dead_permits_v1(p_limits text[]) RETURNS bigint
LANGUAGE sql AS $$
    WITH gone AS (
        DELETE FROM fanout_permits p
        WHERE p.limit_name = ANY (p_limits) AND NOT fanout_permit_lives_v1(p) RETURNING 1
    )
    SELECT count(*) FROM gone
$$;

-- Wakes those that were granted a permit.
CREATE OR REPLACE FUNCTION fanout_tell_granted_v1(p_holders uuid[]) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    IF cardinality(p_holders) > 0 THEN
        PERFORM fanout_notify_v1(jsonb_build_object('event', 'permit', 'holders', p_holders));
    END IF;
END;
$$;

-- One run for each of these limits that has a place free for runs that want one; see
-- fanout_pass_on_v1.
CREATE OR REPLACE FUNCTION fanout_wanting_v1(p_limits text[]) RETURNS bigint[]
LANGUAGE sql STABLE AS $$
    SELECT coalesce(array_agg(DISTINCT w.run_id), '{}') FROM unnest(p_limits) l (name)
    CROSS JOIN LATERAL (
        SELECT min(r.id) AS run_id FROM fanout_runs r
        WHERE r.status = 'processing' AND (
            r.limits IS NOT NULL AND r.limits @> ARRAY[l.name] AND r.wants > 0
            OR r.key_limit = l.name)
    ) w
    WHERE w.run_id IS NOT NULL AND fanout_permit_fits_v1(l.name, NULL)
$$;

-- Serves the lines of some limits, once p_gone has given its permit back. Answers the runs for which
-- places are to be passed on afterwards, and how many dead permits were removed.
CREATE OR REPLACE FUNCTION fanout_serve_lines_v1(
    p_limits text[], p_gone uuid, OUT runs bigint[], OUT removed bigint
) LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off
SET enable_mergejoin = off SET jit = off
AS $$
DECLARE
    v_all constant text[] := fanout_lines_of_v1(p_limits);
    v_keys constant text[] := ARRAY(SELECT key FROM fanout_permits WHERE holder = p_gone);
BEGIN
    PERFORM fanout_lock_limits_v1(v_all, NULL);
    DELETE FROM fanout_permits WHERE holder = p_gone;
    removed := fanout_drop_dead_permits_v1(v_all);
    PERFORM fanout_tell_granted_v1(fanout_grant_permits_v1(v_all, v_keys));
    runs := fanout_wanting_v1(p_limits);
END;
$$;

-- The first of a permit's limits that keeps it waiting, in words.
CREATE OR REPLACE FUNCTION fanout_permit_reason_v1(p_holder uuid) RETURNS text
LANGUAGE sql STABLE AS $$
    SELECT coalesce(
        (SELECT CASE
            WHEN l.paused_until > clock_timestamp()
                THEN format('limit %s is paused until %s', l.name, l.paused_until)
            WHEN l.keyed
                THEN format('limit %s is full for key %s: %s', l.name, p.key, l.concurrency)
            ELSE fanout_limit_full_v1(ARRAY[l.name])
            END
        FROM fanout_permits p JOIN fanout_limits l ON l.name = p.limit_name
        WHERE p.holder = p_holder AND NOT fanout_permit_fits_v1(p.limit_name, p.key)
        ORDER BY p.limit_name LIMIT 1),
        fanout_limit_full_v1((SELECT array_agg(limit_name) FROM fanout_permits
            WHERE holder = p_holder AND key IS NULL)),
        'others stand earlier in the line')
$$;

-- When to look again, in seconds: when a rate or a pause may let this one in, and in a second at
-- the latest, as where it waits for a place.
CREATE OR REPLACE FUNCTION fanout_permit_wait_v1(p_holder uuid, p_place bigint)
RETURNS double precision LANGUAGE sql STABLE AS $$
    SELECT CASE WHEN bool_and(l.paused_until > clock_timestamp()
                OR fanout_permit_fits_v1(p.limit_name, p.key))
        THEN coalesce(greatest(0.02, least(1, max(extract(epoch FROM CASE
            WHEN l.paused_until > clock_timestamp() THEN l.paused_until
            WHEN l.rate IS NOT NULL THEN fanout_next_start_v1(l) - fanout_horizon_v1(l)
                + (p_place - 1) * fanout_interval_v1(l)
            END - clock_timestamp())))), 1)::double precision
        ELSE 1 END
    FROM fanout_permits p JOIN fanout_limits l ON l.name = p.limit_name
    WHERE p.holder = p_holder
$$;

-- The name of a limit that a run's children have already and that forbids them a permit of
-- p_first: names are taken in ascending order, by their bytes, so that nobody waits in a circle.
-- The limit of a child alone is never waited for by who has something.
CREATE OR REPLACE FUNCTION fanout_out_of_order_v1(p_run bigint, p_first text) RETURNS text
LANGUAGE sql STABLE AS $$
    SELECT max(n COLLATE "C") FROM fanout_runs r
    CROSS JOIN LATERAL unnest(r.limits || r.key_limit) l (n)
    WHERE r.id = p_run AND n NOT LIKE 'max\_running:%' AND n COLLATE "C" >= p_first COLLATE "C"
$$;

-- Takes a permit of one or several limits, all at once, or stands in line; asked again it answers
-- the same. `wait_seconds` lie before the start where it is granted, before the next look otherwise.
-- `refused` names the limit that the run has already and that comes later; `crowds` is a run that is
-- to make room for those in line: fanout_pass_on_v1, in a statement of its own.
CREATE OR REPLACE FUNCTION fanout_take_permit_v1(
    p_specs jsonb, p_key text, p_holder uuid, p_label text, p_run bigint, p_position bigint,
    p_lease double precision,
    OUT granted boolean, OUT place bigint, OUT wait_seconds double precision, OUT reason text,
    OUT refused text, OUT crowds bigint
) LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off
SET enable_mergejoin = off SET jit = off
AS $$
DECLARE
    v_names text[];
    v_standing boolean;
    v_granted_at timestamptz;
    v_ticket bigint;
    v_told uuid[];
BEGIN
    SELECT array_agg(e->>'name') INTO v_names FROM jsonb_array_elements(p_specs) e;
    IF p_run IS NOT NULL THEN
        SELECT fanout_out_of_order_v1(p_run, min(n COLLATE "C")) INTO refused
        FROM unnest(v_names) l (n);
        IF refused IS NOT NULL THEN
            granted := false;
            RETURN;
        END IF;
    END IF;
    SELECT bool_and(fanout_permit_lives_v1(p)), min(p.granted_at), min(p.ticket)
    INTO v_standing, v_granted_at, v_ticket FROM fanout_permits p WHERE p.holder = p_holder;
    IF v_standing IS NOT TRUE OR v_granted_at IS NULL AND fanout_is_first_v1(p_holder) THEN
        IF v_standing IS NULL THEN
            PERFORM fanout_declare_limits_v1(p_specs);
        END IF;
        PERFORM fanout_lock_limits_v1(v_names, NULL);
        PERFORM fanout_touch_permits_v1(ARRAY[p_holder]);
        PERFORM fanout_drop_dead_permits_v1(v_names);
        INSERT INTO fanout_permits (limit_name, key, holder, label, run_id, position, lease)
        SELECT l.name, CASE WHEN l.keyed THEN p_key END, p_holder, p_label, p_run, p_position,
            p_lease
        FROM fanout_limits l WHERE l.name = ANY (v_names) ORDER BY l.name
        ON CONFLICT (holder, limit_name) DO NOTHING;
        v_told := fanout_grant_permits_v1(v_names, ARRAY[p_key]);
        PERFORM fanout_tell_granted_v1(array_remove(v_told, p_holder));
        SELECT min(granted_at), min(ticket) INTO v_granted_at, v_ticket
        FROM fanout_permits WHERE holder = p_holder;
    ELSE
        -- Locks nothing else: who stands in line may ask often, and keeps nobody waiting.
        PERFORM fanout_touch_permits_v1(ARRAY[p_holder]);
    END IF;
    granted := v_granted_at IS NOT NULL;
    IF granted THEN
        place := 0;
        wait_seconds := greatest(0, extract(epoch FROM v_granted_at - clock_timestamp()));
        RETURN;
    END IF;
    SELECT 1 + count(DISTINCT o.holder) INTO place
    FROM fanout_permits p JOIN fanout_permits o ON o.limit_name = p.limit_name
        AND o.key IS NOT DISTINCT FROM p.key AND o.ticket < p.ticket AND o.granted_at IS NULL
        AND o.holder <> p_holder AND fanout_permit_lives_v1(o)
    WHERE p.holder = p_holder;
    -- Whoever is the next in one of the lines asks, for nobody else would.
    IF EXISTS (
        SELECT FROM fanout_permits p WHERE p.holder = p_holder AND NOT EXISTS (
            SELECT FROM fanout_permits o
            WHERE o.limit_name = p.limit_name AND o.key IS NOT DISTINCT FROM p.key
                AND o.ticket < p.ticket AND o.granted_at IS NULL AND fanout_permit_lives_v1(o)
                AND fanout_keeps_waiting_v1(o))
    ) THEN
        SELECT b.run_id INTO crowds FROM unnest(v_names) l (name)
        CROSS JOIN LATERAL fanout_balance_v1(l.name) b
        WHERE b.excess > 0 ORDER BY b.excess DESC LIMIT 1;
    END IF;
    wait_seconds := fanout_permit_wait_v1(p_holder, place);
    reason := fanout_permit_reason_v1(p_holder);
END;
$$;

-- Whether it may be this one's turn, at a look that locks nothing: there is room, and nobody who
-- lives and waits for nothing else stands before it. In the line of a rate whoever comes when a
-- start is free serves all.
CREATE OR REPLACE FUNCTION fanout_is_first_v1(p_holder uuid) RETURNS boolean
LANGUAGE sql STABLE AS $$
    SELECT bool_and(fanout_permit_fits_v1(p.limit_name, p.key) AND (EXISTS (
        SELECT FROM fanout_limits l WHERE l.name = p.limit_name AND l.rate IS NOT NULL
            AND fanout_next_start_v1(l) <= clock_timestamp() + fanout_horizon_v1(l)
    ) OR NOT EXISTS (
        SELECT FROM fanout_permits o
        WHERE o.limit_name = p.limit_name AND o.ticket < p.ticket AND o.granted_at IS NULL
            AND o.key IS NOT DISTINCT FROM p.key AND fanout_permit_lives_v1(o)
            AND NOT EXISTS (SELECT FROM fanout_permits b
                WHERE b.holder = o.holder AND b.limit_name <> o.limit_name))))
    FROM fanout_permits p WHERE p.holder = p_holder
$$;

-- Renews permits and places in lines that still live. It waits for nobody: a row that somebody
-- changes just now is renewed the next time.
CREATE OR REPLACE FUNCTION fanout_touch_permits_v1(p_holders uuid[]) RETURNS void
LANGUAGE sql AS $$
    UPDATE fanout_permits SET seen_at = clock_timestamp()
    WHERE ticket IN (
        SELECT p.ticket FROM fanout_permits p
        WHERE p.holder = ANY (p_holders) AND fanout_permit_lives_v1(p)
        ORDER BY p.ticket FOR NO KEY UPDATE SKIP LOCKED)
$$;

-- Renews the permits of a process; answers those that it has no more: silent for their lease.
CREATE OR REPLACE FUNCTION fanout_renew_permits_v1(p_holders uuid[]) RETURNS SETOF uuid
LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off
SET enable_mergejoin = off SET jit = off
AS $$
BEGIN
    PERFORM fanout_touch_permits_v1(p_holders);
    RETURN QUERY SELECT h FROM unnest(p_holders) h WHERE NOT EXISTS (
        SELECT FROM fanout_permits p WHERE p.holder = h AND fanout_permit_lives_v1(p));
END;
$$;

-- Gives a permit back, or a place in the line, and grants to the next. Answers the runs for which
-- free places are to be passed on, in statements of their own: fanout_pass_on_v1.
CREATE OR REPLACE FUNCTION fanout_give_permit_v1(p_holder uuid) RETURNS bigint[]
LANGUAGE plpgsql AS $$
DECLARE
    v_names text[];
BEGIN
    SELECT array_agg(limit_name) INTO v_names FROM fanout_permits WHERE holder = p_holder;
    IF v_names IS NULL THEN
        RETURN '{}';
    END IF;
    RETURN (fanout_serve_lines_v1(v_names, p_holder)).runs;
END;
$$;

-- Tells whoever stands first in a line of a run's limits where there is room: a slot may have ended.
CREATE OR REPLACE FUNCTION fanout_call_lines_v1(p_run bigint) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM fanout_tell_granted_v1(array_agg(f.holder)) FROM (
        SELECT DISTINCT ON (p.limit_name, p.key) p.holder FROM fanout_runs r
        CROSS JOIN LATERAL unnest(r.limits || r.key_limit) l (name)
        JOIN fanout_permits p ON p.limit_name = l.name AND p.granted_at IS NULL
            AND fanout_permit_lives_v1(p)
        WHERE r.id = p_run
        ORDER BY p.limit_name, p.key, p.ticket
    ) f
    WHERE fanout_is_first_v1(f.holder);
END;
$$;

-- Removes what dead holders left in a limit with such permits, and serves its lines. Answers how
-- many were removed, 0 when there is nothing to do.
CREATE OR REPLACE FUNCTION fanout_sweep_permits_v1() RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    v_names text[];
BEGIN
    SELECT array_agg(DISTINCT p.limit_name) INTO v_names FROM fanout_permits p
    WHERE NOT fanout_permit_lives_v1(p);
    IF v_names IS NULL THEN
        RETURN 0;
    END IF;
    RETURN (fanout_serve_lines_v1(v_names, NULL)).removed;
END;
$$;

-- Declares a limit and lets nothing begin with it for so long, or if it is paused for longer, so.
CREATE OR REPLACE FUNCTION fanout_pause_limit_v1(p_spec jsonb, p_seconds double precision)
RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    PERFORM fanout_declare_limits_v1(jsonb_build_array(p_spec));
    RETURN fanout_limit_update_v1(p_spec->>'name', NULL, p_seconds);
END;
$$;

-- A limit and who has it, waits for it and wants it: the first 200 of each.
CREATE OR REPLACE FUNCTION fanout_limit_state_v1(p_limit text) RETURNS jsonb
LANGUAGE sql STABLE AS $$
    SELECT jsonb_build_object(
        'name', l.name,
        'kind', CASE WHEN l.name LIKE 'max\_running:%' THEN 'child' WHEN l.keyed THEN 'keyed'
            ELSE 'shared' END,
        'concurrency', l.concurrency, 'rate', l.rate, 'per', l.per, 'burst', l.burst,
        'keyed', l.keyed,
        'paused_until', CASE WHEN l.paused_until > clock_timestamp() THEN l.paused_until END,
        'next_start', CASE WHEN l.rate IS NOT NULL THEN fanout_next_start_v1(l) END,
        'used', CASE WHEN l.keyed
            THEN (SELECT coalesce(sum(used), 0) FROM fanout_lanes_used_v1(l.name, 0, '{}'))
            ELSE fanout_limit_used_v1(l.name) END,
        'holders', (SELECT coalesce(jsonb_agg(to_jsonb(h) ORDER BY h.since), '[]') FROM (
            SELECT s.run_id, s.slot, s.held AS position, i.item_key AS key, n.key AS lane,
                CASE WHEN s.active THEN 'item' ELSE 'queued' END AS label,
                coalesce(i.started_at, s.seen_at) AS since
            FROM fanout_runs r
            JOIN fanout_slots s ON s.run_id = r.id
            LEFT JOIN LATERAL (SELECT item_key, started_at FROM fanout_items
                WHERE run_id = s.run_id AND position = s.held LIMIT 1) i ON true
            LEFT JOIN fanout_lanes n ON n.run_id = s.run_id AND n.lane = s.lane
            WHERE r.status = 'processing' AND CASE
                WHEN l.keyed THEN r.key_limit = l.name AND s.active AND s.lane IS NOT NULL
                ELSE r.limits IS NOT NULL AND r.limits @> ARRAY[l.name]
                    AND (s.active OR s.scheduled_at IS NULL) END
            UNION ALL
            SELECT p.run_id, NULL, p.position, NULL, p.key, p.label, p.granted_at
            FROM fanout_permits p
            WHERE p.limit_name = l.name AND p.granted_at IS NOT NULL AND fanout_permit_lives_v1(p)
            LIMIT 200) h),
        'waiting', (SELECT coalesce(jsonb_agg(to_jsonb(w) ORDER BY w.ticket), '[]') FROM (
            SELECT p.ticket, p.run_id, p.position, p.key AS lane, p.label, p.created_at AS since
            FROM fanout_permits p
            WHERE p.limit_name = l.name AND p.granted_at IS NULL AND fanout_permit_lives_v1(p)
            ORDER BY p.ticket LIMIT 200) w),
        'wanting', (SELECT coalesce(jsonb_agg(to_jsonb(r) ORDER BY r.run_id), '[]') FROM (
            SELECT r.id AS run_id, r.name, r.wants, fanout_waiting_for_v1(r.id) AS reason
            FROM fanout_runs r
            WHERE r.status = 'processing' AND r.limits IS NOT NULL AND r.limits @> ARRAY[l.name]
                AND r.wants > 0
            ORDER BY r.id LIMIT 200) r))
    FROM fanout_limits l WHERE l.name = p_limit
$$;

-- Which limit keeps a run from more places than it has, in words; null where none does.
CREATE OR REPLACE FUNCTION fanout_waiting_for_v1(p_run bigint) RETURNS text
LANGUAGE sql STABLE AS $$
    SELECT CASE
        WHEN r.status <> 'processing' OR r.paused OR r.closing IS NOT NULL THEN NULL
        WHEN r.limits IS NOT NULL AND r.wants > 0
            THEN fanout_run_full_v1(r.limits)
        WHEN r.key_limit IS NOT NULL THEN (
            SELECT format('limit %s is paused until %s', l.name, l.paused_until)
            FROM fanout_limits l WHERE l.name = r.key_limit AND l.paused_until > clock_timestamp())
        END
    FROM fanout_runs r WHERE r.id = p_run
$$;

-- What an audit finds about limits: one that nobody can ever have although runs or programs want
-- it, and permits that no sweep has removed although their holders are dead for three leases.
CREATE OR REPLACE FUNCTION fanout_audit_limits_v1()
RETURNS TABLE (run_id bigint, kind text, subject text, detail text, repairable boolean)
LANGUAGE sql STABLE AS $$
    SELECT r.id, 'shut_limit', 'limit ' || l.name,
        format('nobody may have it (concurrency 0), and the run wants %s places', r.wants), false
    FROM fanout_limits l
    JOIN fanout_runs r ON r.status = 'processing' AND r.limits IS NOT NULL
        AND r.limits @> ARRAY[l.name] AND r.wants > 0 AND NOT r.paused AND r.closing IS NULL
    WHERE l.concurrency = 0
    UNION ALL
    SELECT NULL, 'shut_limit', 'limit ' || l.name,
        format('nobody may have it (concurrency 0), and %s permits are waited for', count(*)),
        false
    FROM fanout_limits l
    JOIN fanout_permits p ON p.limit_name = l.name AND p.granted_at IS NULL
        AND fanout_permit_lives_v1(p)
    WHERE l.concurrency = 0 GROUP BY l.name
    UNION ALL
    SELECT NULL, 'dead_permit', 'limit ' || p.limit_name,
        format('permit %s (%s) has been silent since %s', p.ticket, p.label, p.seen_at), true
    FROM fanout_permits p
    WHERE p.seen_at < clock_timestamp() - make_interval(secs => 3 * p.lease + 5)
$$;
