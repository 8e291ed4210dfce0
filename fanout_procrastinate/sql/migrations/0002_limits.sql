-- Limits over all machines: how many at once, how many in a time, per key of an item.

-- What the code declares, as the first run that is sealed with it tells, and what operators change.
CREATE TABLE fanout_limits (
    name text PRIMARY KEY,
    -- How many may hold it at once; per key where it is keyed. Null: any number.
    concurrency integer CHECK (concurrency >= 0),
    -- Starts per so many seconds, of which burst may come at once; null: any number.
    rate double precision CHECK (rate > 0),
    per double precision NOT NULL DEFAULT 1 CHECK (per > 0),
    burst integer NOT NULL DEFAULT 1 CHECK (burst >= 1),
    keyed boolean NOT NULL DEFAULT false,
    -- As declared last: another declaration replaces what was changed by hand.
    declared jsonb NOT NULL DEFAULT '{}',
    -- Nothing starts before this.
    paused_until timestamptz,
    -- When the next start is free, if nobody had used the burst.
    next_at timestamptz NOT NULL DEFAULT '2000-01-01 00:00:00Z',
    updated_at timestamptz NOT NULL DEFAULT clock_timestamp()
) WITH (fillfactor = 20, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500);

-- Who holds a limit outside of a slot, and who stands in its line.
CREATE TABLE fanout_permits (
    ticket bigint PRIMARY KEY GENERATED ALWAYS AS IDENTITY,
    limit_name text NOT NULL,
    key text,
    -- Random per acquisition: sent again it gets the same answer.
    holder uuid NOT NULL,
    -- Who that is, for people: a run's item, or a program.
    label text NOT NULL DEFAULT '',
    run_id bigint,
    position bigint,
    -- Null while it waits.
    granted_at timestamptz,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    -- It dies with its holder: silent for so long it counts no more.
    seen_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    lease double precision NOT NULL,
    UNIQUE (holder, limit_name)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500);
CREATE INDEX fanout_permits_line_idx ON fanout_permits (limit_name, ticket);

-- The keys of a run whose items are limited by key.
CREATE TABLE fanout_lanes (
    run_id bigint NOT NULL,
    lane integer NOT NULL,
    key text NOT NULL,
    PRIMARY KEY (run_id, lane)
);
CREATE UNIQUE INDEX fanout_lanes_key_idx ON fanout_lanes (run_id, key);

ALTER TABLE fanout_runs
    -- The limits without a key that each slot takes part in, in ascending order.
    ADD COLUMN limits text[],
    ADD COLUMN key_limit text,
    ADD COLUMN limit_specs jsonb,
    ADD COLUMN weight double precision NOT NULL DEFAULT 1 CHECK (weight > 0),
    -- Slots that it wanted and its limits did not give it, at its last look.
    ADD COLUMN wants integer NOT NULL DEFAULT 0,
    -- When it was given one last, or had its turn.
    ADD COLUMN served_at timestamptz NOT NULL DEFAULT '2000-01-01 00:00:00Z';
CREATE INDEX fanout_runs_limited_idx ON fanout_runs (id)
    WHERE status = 'processing' AND limits IS NOT NULL;
CREATE INDEX fanout_runs_keyed_idx ON fanout_runs (key_limit, id)
    WHERE status = 'processing' AND key_limit IS NOT NULL;

ALTER TABLE fanout_runs
    -- Outcomes of earlier generations: a rate is of this one.
    ADD COLUMN done_before bigint NOT NULL DEFAULT 0;

ALTER TABLE fanout_ledgers
    -- Of the waiting ones, those never handed out: in a run with keys all wait from the start.
    ADD COLUMN fresh bigint NOT NULL DEFAULT 0,
    -- Where the last look at the lanes ended.
    ADD COLUMN lane integer NOT NULL DEFAULT -1;

ALTER TABLE fanout_items ADD COLUMN lane integer;
CREATE INDEX fanout_items_lane_idx ON fanout_items (run_id, lane, due)
    WHERE due IS NOT NULL AND lane IS NOT NULL;

ALTER TABLE fanout_slots
    -- The item that its process has begun to keep ready, for a short while, behind the one in hand.
    ADD COLUMN ready bigint,
    ADD COLUMN ready_claim bigint,
    -- The lane of the item in hand.
    ADD COLUMN lane integer,
    -- The start that is kept for it by a rate.
    ADD COLUMN reserved_at timestamptz;

-- A place of a limit became free: pass it on.
ALTER TYPE fanout_reply_v1 ADD ATTRIBUTE freed boolean;
-- Its process may keep one more item ready while it works on this one.
ALTER TYPE fanout_reply_v1 ADD ATTRIBUTE ahead boolean;
