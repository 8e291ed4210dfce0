-- Hints for whoever watches. Nothing here changes state.

-- Sends events, JSON texts, to the listeners; answers how many. It never raises: one that cannot be
-- sent, for its size or because the queue of notifications is full, takes no other along.
CREATE OR REPLACE FUNCTION fanout_hint_v1(p_events text[]) RETURNS integer
LANGUAGE plpgsql AS $$
DECLARE
    v_sent integer := 0;
    v_event text;
BEGIN
    FOREACH v_event IN ARRAY p_events LOOP
        BEGIN
            PERFORM pg_notify('fanout_v1', v_event);
            v_sent := v_sent + 1;
        EXCEPTION WHEN OTHERS THEN
            RAISE WARNING 'fanout: hint not sent: %', SQLERRM;
        END;
    END LOOP;
    RETURN v_sent;
END;
$$;
