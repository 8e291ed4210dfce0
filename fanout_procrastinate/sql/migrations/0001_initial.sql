-- The tables of the protocol. Ids are 64-bit; status columns hold the words that users see.
-- There are no foreign keys between these tables: every statement that removes a run removes its rows.


-- One execution of a slot's job: unique over all slots of all runs, so that a slot row made anew
-- can never be mistaken for an earlier one.
CREATE SEQUENCE fanout_epochs AS bigint;

CREATE TABLE fanout_runs (
    id bigint PRIMARY KEY GENERATED ALWAYS AS IDENTITY,
    name text NOT NULL,
    run_key text,
    args_digest text,
    replaced boolean NOT NULL DEFAULT false,
    status text NOT NULL DEFAULT 'pending'
        CHECK (status IN ('pending', 'processing', 'completed', 'failed', 'cancelled')),
    paused boolean NOT NULL DEFAULT false,
    -- The status this run will close as, once it is being stopped early.
    closing text CHECK (closing IN ('failed', 'cancelled')),
    aborting boolean NOT NULL DEFAULT false,
    reason text,
    args jsonb NOT NULL DEFAULT '{}',
    tags text[] NOT NULL DEFAULT '{}',
    manager_task text,
    manager_queue text NOT NULL,
    manager_priority integer NOT NULL DEFAULT 0,
    child_task text NOT NULL,
    child_queue text NOT NULL,
    child_priority integer NOT NULL DEFAULT 0,
    -- [{"task", "on": "complete" | "success" | "failure", "queue", "priority"}]
    callbacks jsonb NOT NULL DEFAULT '[]',
    max_in_flight integer NOT NULL CHECK (max_in_flight >= 1),
    -- Active slots above a lowered limit: they end after the item in hand.
    surplus integer NOT NULL DEFAULT 0,
    tolerate_count bigint,
    tolerate_share double precision,
    max_crashes integer NOT NULL DEFAULT 3,
    stuck_after double precision NOT NULL DEFAULT 7200,
    deadline timestamptz,
    manager_max_attempts integer NOT NULL DEFAULT 3,
    generation integer NOT NULL DEFAULT 1,
    -- Number of the manager's execution: what an earlier one still sends is refused.
    fence bigint NOT NULL DEFAULT 0,
    manager_job_id bigint,
    manager_seen_at timestamptz,
    manager_suspect_since timestamptz,
    manager_failures integer NOT NULL DEFAULT 0,
    manager_crashes integer NOT NULL DEFAULT 0,
    staged bigint NOT NULL DEFAULT 0,
    duplicates bigint NOT NULL DEFAULT 0,
    -- Null until the run is sealed.
    total bigint,
    ledgers integer NOT NULL DEFAULT 0,
    open_ledgers integer NOT NULL DEFAULT 0,
    -- Time this run could have moved and did not, as added up by the sweeps.
    idle_seconds double precision NOT NULL DEFAULT 0,
    idle_seen_at timestamptz,
    -- Why it stood: its jobs fail before they begin. New ones that wait have not mended that.
    refused boolean NOT NULL DEFAULT false,
    -- Position from which item rows are still to be rewritten (after a stop) or removed (after a
    -- close before the seal); null: none.
    untidy_from bigint,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    scheduled_at timestamptz,
    sealed_at timestamptz,
    -- When this generation began to work: the seal, or the last reopening.
    started_at timestamptz,
    closed_at timestamptz
);
CREATE UNIQUE INDEX fanout_runs_key_idx ON fanout_runs (name, run_key) WHERE run_key IS NOT NULL;
CREATE INDEX fanout_runs_open_idx ON fanout_runs (id) WHERE status IN ('pending', 'processing');
CREATE INDEX fanout_runs_untidy_idx ON fanout_runs (id) WHERE untidy_from IS NOT NULL;
CREATE INDEX fanout_runs_closed_at_idx ON fanout_runs (closed_at) WHERE closed_at IS NOT NULL;

-- Ledger l of S owns the positions l, l+S, l+2S, ... Nothing here that changes is indexed, and
-- the pages keep room, so that every update stays in its page.
CREATE TABLE fanout_ledgers (
    run_id bigint NOT NULL,
    ledger integer NOT NULL,
    size bigint NOT NULL,
    -- How many of its items were handed out at least once (or cancelled by a stop).
    cursor bigint NOT NULL DEFAULT 0,
    -- Released items: pending again, with a due time.
    waiting bigint NOT NULL DEFAULT 0,
    succeeded bigint NOT NULL DEFAULT 0,
    failed bigint NOT NULL DEFAULT 0,
    cancelled bigint NOT NULL DEFAULT 0,
    open boolean NOT NULL DEFAULT true,
    -- After a stop every item row still pending is to be read as cancelled.
    stopped boolean NOT NULL DEFAULT false,
    -- Outcomes per second, decayed over half a minute, as of updated_at.
    rate double precision NOT NULL DEFAULT 0,
    updated_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (run_id, ledger)
) WITH (fillfactor = 20, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500);

CREATE TABLE fanout_items (
    run_id bigint NOT NULL,
    position bigint NOT NULL,
    -- Set with the first due time; only the index below reads it.
    ledger integer,
    failures integer NOT NULL DEFAULT 0,
    crashes integer NOT NULL DEFAULT 0,
    -- Number of the hand-out: the fence of every outcome.
    claim bigint NOT NULL DEFAULT 0,
    -- Set only while released.
    due timestamptz,
    started_at timestamptz,
    finished_at timestamptz,
    sanitised boolean NOT NULL DEFAULT false,
    status text NOT NULL DEFAULT 'pending',
    item_key text,
    -- Set only while failed: HOT updates of all other items depend on that.
    error_type text,
    payload jsonb,
    result jsonb,
    error jsonb,
    PRIMARY KEY (run_id, position),
    -- A due time on anything else would be offered for ever and never taken.
    CHECK (due IS NULL OR status = 'pending')
) WITH (fillfactor = 70);
CREATE UNIQUE INDEX fanout_items_key_idx ON fanout_items (run_id, item_key)
    WHERE item_key IS NOT NULL;
CREATE INDEX fanout_items_due_idx ON fanout_items (run_id, ledger, due) WHERE due IS NOT NULL;
CREATE INDEX fanout_items_error_idx ON fanout_items (run_id, error_type)
    WHERE error_type IS NOT NULL;

-- One row per live slot: queued (its job waits) or active (its job works).
CREATE TABLE fanout_slots (
    run_id bigint NOT NULL,
    slot integer NOT NULL,
    job_id bigint NOT NULL,
    active boolean NOT NULL DEFAULT false,
    epoch bigint NOT NULL DEFAULT 0,
    token uuid,
    held bigint,
    held_claim bigint,
    last_position bigint,
    last_claim bigint,
    scheduled_at timestamptz,
    seen_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    suspect_since timestamptz,
    PRIMARY KEY (run_id, slot)
) WITH (fillfactor = 30, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500);

-- One row per generation that closed, with the progress frozen at that moment.
CREATE TABLE fanout_closes (
    run_id bigint NOT NULL,
    generation integer NOT NULL,
    status text NOT NULL,
    reason text,
    progress jsonb NOT NULL,
    closed_at timestamptz NOT NULL,
    PRIMARY KEY (run_id, generation)
);

-- One row per callback that a close owes.
CREATE TABLE fanout_callbacks (
    run_id bigint NOT NULL,
    generation integer NOT NULL,
    task text NOT NULL,
    queue text NOT NULL,
    priority integer NOT NULL,
    state text NOT NULL DEFAULT 'owed' CHECK (state IN ('owed', 'running', 'done', 'failed')),
    job_id bigint,
    attempts integer NOT NULL DEFAULT 0,
    error jsonb,
    seen_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    suspect_since timestamptz,
    PRIMARY KEY (run_id, generation, task)
);
CREATE INDEX fanout_callbacks_open_idx ON fanout_callbacks (run_id)
    WHERE state IN ('owed', 'running');

-- What begin and report answer, one row per slot.
--   verdict: item     works on the item that follows
--            wait     nothing now: look again after `wait_seconds`
--            move     nothing in this ledger: ask `ledger`
--            ended    the slot is over, its job ends
--            lost     the slot or its claim belongs to somebody else: nothing was recorded
CREATE TYPE fanout_reply_v1 AS (
    slot integer,
    verdict text,
    epoch bigint,
    ledger integer,
    "position" bigint,
    claim bigint,
    failures integer,
    crashes integer,
    item_key text,
    payload text,
    wait_seconds double precision,
    stop boolean
);
