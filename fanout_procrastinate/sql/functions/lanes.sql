-- Items limited by key: each key of a run is a lane, and only lanes with room are served, in turn.
-- In such a run every item waits from the start, with a due time in the order of the listing; what
-- a look costs depends on how many lanes are full, never on how many items wait.

-- How many are at work per key of a limit, over all runs, besides these slots of this run.
CREATE OR REPLACE FUNCTION fanout_lanes_used_v1(p_limit text, p_run bigint, p_besides integer[])
RETURNS TABLE (key text, used bigint) LANGUAGE sql STABLE AS $$
    SELECT k.key, count(*) FROM (
        SELECT l.key FROM fanout_runs r
        JOIN fanout_slots s ON s.run_id = r.id AND s.active AND s.lane IS NOT NULL
        JOIN fanout_lanes l ON l.run_id = s.run_id AND l.lane = s.lane
        WHERE r.key_limit = p_limit AND r.status = 'processing'
            AND NOT (r.id = p_run AND s.slot = ANY (p_besides))
        UNION ALL
        SELECT p.key FROM fanout_permits p
        WHERE p.limit_name = p_limit AND p.granted_at IS NOT NULL AND p.key IS NOT NULL
            AND fanout_permit_lives_v1(p)
    ) k
    GROUP BY k.key
$$;

-- The next lane after p_after that has an item with a due time.
CREATE OR REPLACE FUNCTION fanout_next_lane_v1(p_run bigint, p_after integer) RETURNS integer
LANGUAGE sql STABLE AS $$
    SELECT lane FROM fanout_items
    WHERE run_id = p_run AND lane > p_after AND due IS NOT NULL
    ORDER BY lane LIMIT 1
$$;

-- Chooses up to p_limit items, one of each lane with room in turn, beginning after the lane p_from.
-- The caller holds the run's ledger, and the limit's row where it means to take them. Suspects only
-- where p_suspect, and one; p_freed are slots whose item has just ended. Looks at 300 lanes at most.
CREATE OR REPLACE FUNCTION fanout_lane_items_v1(
    p_run bigint, p_key_limit text, p_limit integer, p_from integer, p_suspect boolean,
    p_freed integer[], OUT positions bigint[], OUT ended_at integer
) LANGUAGE plpgsql STABLE AS $$
DECLARE
    v_now constant timestamptz := clock_timestamp();
    v_concurrency integer;
    v_paused boolean;
    v_used jsonb;
    v_taken jsonb := '{}';
    v_suspect boolean := p_suspect;
    v_lane integer;
    v_key text;
    v_free integer;
    v_round integer := 0;
    i record;
BEGIN
    positions := '{}';
    ended_at := p_from;
    SELECT concurrency, coalesce(paused_until > v_now, false) INTO v_concurrency, v_paused
    FROM fanout_limits WHERE name = p_key_limit;
    IF v_paused THEN
        RETURN;
    END IF;
    SELECT coalesce(jsonb_object_agg(key, used), '{}') INTO v_used
    FROM fanout_lanes_used_v1(p_key_limit, p_run, p_freed);
    FOR look IN 1 .. 300 LOOP
        EXIT WHEN cardinality(positions) >= p_limit;
        v_lane := fanout_next_lane_v1(p_run, ended_at);
        IF v_lane IS NULL THEN
            -- Once around, and again as long as that gave something.
            EXIT WHEN v_round > cardinality(positions);
            v_round := cardinality(positions) + 1;
            ended_at := -1;
            CONTINUE;
        END IF;
        ended_at := v_lane;
        SELECT key INTO v_key FROM fanout_lanes WHERE run_id = p_run AND lane = v_lane;
        -- Who waits for a permit of this key goes before the items.
        v_free := v_concurrency - coalesce((v_used->>v_key)::integer, 0)
            - coalesce((v_taken->>v_key)::integer, 0)
            - fanout_line_v1(p_key_limit, v_key, v_concurrency)::integer;
        CONTINUE WHEN v_free <= 0;
        SELECT t.position, t.crashes INTO i FROM fanout_items t
        WHERE t.run_id = p_run AND t.lane = v_lane AND t.due <= v_now
            AND (t.crashes = 0 OR v_suspect) AND t.position <> ALL (positions)
        ORDER BY t.due LIMIT 1;
        CONTINUE WHEN NOT FOUND;
        v_suspect := v_suspect AND i.crashes = 0;
        positions := positions || i.position;
        v_taken := v_taken
            || jsonb_build_object(v_key, coalesce((v_taken->>v_key)::integer, 0) + 1);
    END LOOP;
END;
$$;

-- The due times that lie ahead in a run with keys, the next first.
CREATE OR REPLACE FUNCTION fanout_lane_dues_v1(p_run bigint, p_limit bigint)
RETURNS TABLE (due timestamptz, suspect boolean) LANGUAGE sql STABLE AS $$
    SELECT due, crashes > 0 FROM fanout_items
    WHERE run_id = p_run AND ledger = 0 AND due > clock_timestamp()
    ORDER BY due LIMIT p_limit
$$;
