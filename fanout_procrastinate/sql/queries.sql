-- Every statement that the library sends, by name. Parameters are named; JSON travels as text.
-- Changes of state are single function calls; see functions/.

-- start --
-- Store a run and defer its manager job.
SELECT run_id, outcome, run_status FROM fanout_start_v1(%(spec)s::jsonb)

-- manager_begin --
-- Claim a run for one execution of its manager.
SELECT fence, args::text AS args, attempt, child_task
FROM fanout_manager_begin_v1(%(run_id)s, %(job_id)s)

-- append --
-- Stage a chunk of items.
SELECT staged, duplicates
FROM fanout_append_v1(
    %(run_id)s, %(fence)s, %(keys)s::text[], %(payloads)s::jsonb[], %(lanes)s::text[])

-- seal --
-- End the staging.
SELECT fanout_seal_v1(%(run_id)s, %(fence)s) AS status

-- manager_fail --
-- Report a manager that did not seal.
SELECT fanout_manager_fail_v1(
    %(run_id)s, %(fence)s, %(reason)s, %(retry_in)s::double precision, %(charge)s) AS again

-- callback_begin --
-- Start a callback's execution.
SELECT attempt
FROM fanout_callback_begin_v1(%(run_id)s, %(generation)s, %(task)s, %(job_id)s)

-- callback_end --
-- Report a callback's end.
SELECT fanout_callback_end_v1(%(run_id)s, %(generation)s, %(task)s, %(job_id)s,
    %(error)s::jsonb, %(retry_in)s::double precision) AS accepted

-- begin --
-- Bind a job to its slot and hand it an item.
SELECT slot, verdict, epoch, ledger, position, claim, failures, crashes, item_key, payload,
    wait_seconds, stop, freed, ahead
FROM fanout_begin_v1(
    %(run_id)s, %(slot)s, %(job_id)s, %(token)s::uuid, %(ledger)s::integer, %(suspect)s)

-- report --
-- Record outcomes and hand out the next items.
SELECT slot, verdict, epoch, ledger, position, claim, failures, crashes, item_key, payload,
    wait_seconds, stop, freed, ahead
FROM fanout_report_v1(%(run_id)s, %(ledger)s, false, %(suspect)s,
    %(slots)s::integer[], %(epochs)s::bigint[], %(wishes)s::text[], %(positions)s::bigint[],
    %(claims)s::bigint[], %(outcomes)s::text[], %(retry_ins)s::double precision[],
    %(results)s::jsonb[], %(errors)s::jsonb[], %(sanitised)s::boolean[], %(aheads)s::bigint[])

-- give_back --
-- Give back an item that was kept ready and not begun.
SELECT fanout_give_back_v1(%(run_id)s, %(slot)s, %(epoch)s, %(position)s) AS given

-- renew --
-- Renew the active slots of this process.
SELECT run_id, slot, epoch, verdict FROM fanout_renew_v1(
    %(runs)s::bigint[], %(slots)s::integer[], %(epochs)s::bigint[], %(fresh)s::double precision)

-- renew_manager --
-- Renew a manager's execution.
SELECT fanout_renew_manager_v1(%(run_id)s, %(fence)s) AS mine

-- renew_callback --
-- Renew a callback's execution.
SELECT fanout_renew_callback_v1(%(run_id)s, %(generation)s, %(task)s, %(job_id)s) AS mine

-- pass_on --
-- Pass on a place that became free in the limits of a run; true: there may be more. Who waits for a
-- permit of one is woken.
SELECT fanout_pass_on_v1(%(run_id)s) AS more, fanout_call_lines_v1(%(run_id)s) AS called

-- lines --
-- One run for each limit in which runs stand in line, or have more places than there are now.
-- Index: fanout_runs_limited_idx.
SELECT min(r.id) AS run_id FROM fanout_runs r
CROSS JOIN LATERAL (
    SELECT r.limits && ARRAY(SELECT l.name FROM fanout_limits l
        WHERE l.concurrency < fanout_limit_used_v1(l.name)) AS over
) now
WHERE r.status = 'processing' AND r.limits IS NOT NULL AND (r.wants > 0 OR now.over)
GROUP BY r.limits
HAVING bool_or(now.over) OR NOT bool_or(fanout_just_dealt_v1(r))

-- take_permit --
-- Take a permit of some limits, or a place in their lines; sent again it answers the same.
SELECT granted, place, wait_seconds, reason, refused, crowds
FROM fanout_take_permit_v1(%(specs)s::jsonb, %(key)s::text, %(holder)s::uuid, %(label)s,
    %(run_id)s::bigint, %(position)s::bigint, %(lease)s::double precision)

-- give_permit --
-- Give a permit or a place in the line back, and grant to the next.
SELECT fanout_give_permit_v1(%(holder)s::uuid) AS runs

-- renew_permits --
-- Renew the permits of this process; the answers are those it has lost.
SELECT fanout_renew_permits_v1(%(holders)s::uuid[])::text AS holder

-- serve_lines --
-- Grant to those who stand in the line of a limit that was changed.
SELECT runs FROM fanout_serve_lines_v1(ARRAY[%(name)s]::text[], NULL)

-- sweep_permits --
-- Remove the permits of dead holders.
SELECT fanout_sweep_permits_v1() AS removed

-- update_limit --
-- Change a limit by hand; whether there is one.
SELECT fanout_limit_update_v1(
    %(name)s, %(changes)s::jsonb, %(pause)s::double precision) AS found

-- pause_limit --
-- Declare a limit, and let nothing begin with it for so many seconds.
SELECT fanout_pause_limit_v1(%(spec)s::jsonb, %(seconds)s::double precision) AS found

-- limits --
-- The limits, and who has, waits for and wants each. Indexes: fanout_limits_pkey,
-- fanout_runs_limited_idx, fanout_runs_keyed_idx, fanout_permits_line_idx.
SELECT fanout_limit_state_v1(name)::text AS state FROM fanout_limits
WHERE %(name)s::text IS NULL OR name = %(name)s
ORDER BY name

-- run_limits --
-- The limits that a run's items take. Index: fanout_limits_pkey.
SELECT fanout_limit_state_v1(l.name)::text AS state FROM fanout_runs r
JOIN fanout_limits l ON l.name = ANY (r.limits || r.key_limit)
WHERE r.id = %(run_id)s
ORDER BY l.name

-- audit_limits --
-- Limits that nobody can ever have, and permits that no sweep has removed.
SELECT run_id, kind, subject, detail, repairable FROM fanout_audit_limits_v1()

-- still_mine --
-- Whether a slot still holds an item under a claim. Index: fanout_slots_pkey.
SELECT EXISTS (
    SELECT FROM fanout_slots WHERE run_id = %(run_id)s AND slot = %(slot)s AND epoch = %(epoch)s
    AND active AND (held = %(position)s AND held_claim = %(claim)s
        OR ready = %(position)s AND ready_claim = %(claim)s)) AS mine

-- silent --
-- The runs with something at work that is silent, and what.
SELECT run_id, finding FROM fanout_silent_v1(%(lease)s)

-- sweep_plan --
-- Find the runs on which a sweep has something to do.
SELECT run_id, finding FROM fanout_sweep_plan_v1(%(lease)s, %(limit)s)

-- sweep_run --
-- Repair one run.
SELECT fanout_sweep_run_v1(%(run_id)s, %(lease)s)::text AS done

-- unserved --
-- The open runs whose jobs have been due for `stuck_after`, with nobody at work on them. Indexes:
-- fanout_runs_open_idx, fanout_slots_pkey, procrastinate_jobs_pkey.
SELECT r.id, CASE r.status WHEN 'pending' THEN r.manager_queue ELSE r.child_queue END AS queue
FROM fanout_runs r
CROSS JOIN LATERAL (
    SELECT clock_timestamp() - make_interval(secs => r.stuck_after) AS before) t
WHERE r.status IN ('pending', 'processing') AND NOT r.paused AND r.closing IS NULL
    AND greatest(r.created_at, r.sealed_at, r.scheduled_at) < t.before
    AND CASE r.status
        WHEN 'pending' THEN EXISTS (SELECT FROM procrastinate_jobs j WHERE j.id = r.manager_job_id
            AND j.status = 'todo' AND coalesce(j.scheduled_at, r.created_at) < t.before)
        ELSE NOT EXISTS (SELECT FROM fanout_ledgers l
                WHERE l.run_id = r.id AND l.updated_at >= t.before)
            AND NOT EXISTS (SELECT FROM fanout_slots s WHERE s.run_id = r.id AND s.active)
            AND EXISTS (SELECT FROM fanout_slots s
                JOIN procrastinate_jobs j ON j.id = s.job_id AND j.status = 'todo'
                WHERE s.run_id = r.id AND coalesce(s.scheduled_at, s.seen_at) < t.before)
        END
ORDER BY r.id LIMIT %(limit)s

-- untidy --
-- Find the runs whose item rows are to be rewritten or removed.
SELECT run_id FROM fanout_untidy_v1(%(limit)s) run_id

-- tidy --
-- Rewrite or remove a batch of them.
SELECT fanout_tidy_v1(%(run_id)s, %(limit)s) AS rows

-- prune --
-- Remove a batch of rows of old runs.
SELECT fanout_prune_v1(%(age)s, %(limit)s) AS rows

-- prune_jobs --
-- Remove a batch of our own old job rows.
SELECT fanout_prune_jobs_v1(%(tasks)s::text[], %(age)s, %(limit)s) AS rows

-- audit_runs --
-- The runs to audit: the open ones first, then those closed last. All without a run_id.
SELECT id FROM fanout_runs WHERE %(run_id)s::bigint IS NULL OR id = %(run_id)s
ORDER BY closed_at DESC NULLS FIRST, id DESC

-- audit_state --
-- What contradicts the invariants in these runs, as far as it shows without reading their items.
SELECT r.run_id, f.kind, f.subject, f.detail, f.repairable
FROM unnest(%(runs)s::bigint[]) WITH ORDINALITY r (run_id, n)
CROSS JOIN LATERAL fanout_audit_run_v1(r.run_id, %(lease)s) f
ORDER BY r.n

-- audit_items --
-- What contradicts them in the items of one run, read in about so many seconds.
SELECT %(run_id)s::bigint AS run_id, kind, subject, detail, repairable
FROM fanout_audit_items_v1(%(run_id)s, %(seconds)s)

-- audit_orphans --
-- Rows of runs that are not there.
SELECT run_id, 'orphans' AS kind, subject, 'rows of a run that is not there' AS detail, repairable
FROM fanout_audit_orphans_v1()

-- limit_time --
-- End what follows in this transaction after so many milliseconds.
SELECT set_config('statement_timeout', %(milliseconds)s::text, true) AS limit

-- stop --
-- Close a run early.
SELECT fanout_stop_v1(%(run_id)s, %(status)s, %(reason)s, %(abort)s) AS status

-- pause --
-- Hand out nothing more.
SELECT fanout_pause_v1(%(run_id)s) AS status

-- resume --
-- Hand out again.
SELECT fanout_resume_v1(%(run_id)s) AS status

-- update --
-- Change an open run.
SELECT fanout_update_v1(%(run_id)s, %(changes)s::jsonb) AS status

-- retry_failed --
-- Make failed or cancelled items due again.
SELECT fanout_retry_failed_v1(%(run_id)s, %(statuses)s::text[], %(error_type)s::text) AS items

-- progress --
-- Sum a run's ledgers, and say which limit keeps it waiting.
SELECT (fanout_progress_v1(%(run_id)s) || jsonb_build_object(
    'waiting_for', fanout_waiting_for_v1(%(run_id)s)))::text AS progress

-- progresses --
-- Sum the ledgers of several runs. Index: fanout_runs_pkey.
SELECT (fanout_progress_v1(r.id) || jsonb_build_object(
    'waiting_for', fanout_waiting_for_v1(r.id)))::text AS progress
FROM fanout_runs r WHERE r.id = ANY (%(runs)s::bigint[])

-- open_runs --
-- The latest open runs. Index: fanout_runs_open_idx, backwards.
SELECT id FROM fanout_runs WHERE status IN ('pending', 'processing')
ORDER BY id DESC LIMIT %(limit)s

-- hint --
-- Tell listeners. It changes no state.
SELECT fanout_hint_v1(%(events)s::text[]) AS sent

-- closed_progress --
-- The progress frozen when a generation closed; the latest one without a generation.
SELECT progress::text AS progress FROM fanout_closes
WHERE run_id = %(run_id)s AND (%(generation)s::integer IS NULL OR generation = %(generation)s)
ORDER BY generation DESC LIMIT 1

-- run --
-- A run's fixed facts. Index: fanout_runs_pkey.
SELECT id, name, run_key, status, args::text AS args, tags, manager_task, child_task, child_queue,
    generation, ledgers
FROM fanout_runs WHERE id = %(run_id)s

-- trace --
-- What spans and measures of a run carry. Index: fanout_runs_pkey.
SELECT name, child_task,
    extract(epoch FROM clock_timestamp() - greatest(created_at, scheduled_at)) AS waited,
    (SELECT c->'carrier' FROM jsonb_array_elements(callbacks) c
        WHERE c->>'on' = 'trace' LIMIT 1)::text AS carrier
FROM fanout_runs WHERE id = %(run_id)s

-- closes --
-- The closes on record, by status.
SELECT status, count(*) AS closes FROM fanout_closes GROUP BY status

-- find_run --
-- The run that holds a key. Index: fanout_runs_key_idx.
SELECT id FROM fanout_runs WHERE name = %(name)s AND run_key = %(run_key)s

-- runs --
-- The latest runs. Index: fanout_runs_pkey, backwards.
SELECT fanout_progress_v1(r.id)::text AS progress FROM (
    SELECT id FROM fanout_runs
    WHERE (%(name)s::text IS NULL OR name = %(name)s)
        AND (%(status)s::text IS NULL OR status = %(status)s)
        AND (%(tag)s::text IS NULL OR %(tag)s = ANY (tags))
    ORDER BY id DESC LIMIT %(limit)s
) r
ORDER BY r.id DESC

-- items --
-- One page of items, by position. In a stopped ledger a pending row reads as cancelled; before the
-- seal, and after a close before the seal, there are none. Times travel as JSON has them, whatever
-- the session's DateStyle. Index: fanout_items_pkey.
SELECT t.position, t.item_key, t.status, t.failures, t.crashes,
    CASE WHEN t.claim > 0 THEN to_jsonb(t.due) #>> '{}' END AS due,
    to_jsonb(t.started_at) #>> '{}' AS started_at, to_jsonb(t.finished_at) #>> '{}' AS finished_at,
    t.sanitised, t.payload::text AS payload, t.result::text AS result, t.error::text AS error
FROM (
    SELECT i.position, i.item_key, i.failures, i.crashes, i.claim, i.due, i.started_at,
        i.finished_at,
        i.sanitised, i.payload, i.result, i.error,
        CASE WHEN i.status = 'pending' AND l.stopped THEN 'cancelled' ELSE i.status END AS status
    FROM fanout_items i
    JOIN fanout_runs r ON r.id = i.run_id
    JOIN fanout_ledgers l ON l.run_id = i.run_id AND l.ledger = i.position %% nullif(r.ledgers, 0)
    WHERE i.run_id = %(run_id)s AND i.position > %(after)s AND r.total IS NOT NULL
) t
WHERE %(status)s::text IS NULL OR t.status = %(status)s
ORDER BY t.position LIMIT %(limit)s

-- failed_items --
-- One page of failed items. Index: fanout_items_error_idx, then sorted by position.
SELECT position, item_key, status, failures, crashes, to_jsonb(due) #>> '{}' AS due,
    to_jsonb(started_at) #>> '{}' AS started_at, to_jsonb(finished_at) #>> '{}' AS finished_at,
    sanitised, payload::text AS payload, result::text AS result, error::text AS error
FROM fanout_items
WHERE run_id = %(run_id)s AND error_type IS NOT NULL AND position > %(after)s
ORDER BY position LIMIT %(limit)s

-- errors --
-- The failed items by type of error, the most frequent first. Index: fanout_items_error_idx.
SELECT g.error_type, g.items, i.position, i.item_key, i.error->>'message' AS message
FROM (
    SELECT error_type, count(*) AS items, min(position) AS sample FROM fanout_items
    WHERE run_id = %(run_id)s AND error_type IS NOT NULL
    GROUP BY error_type ORDER BY count(*) DESC, error_type LIMIT %(limit)s
) g
JOIN fanout_items i ON i.run_id = %(run_id)s AND i.position = g.sample
ORDER BY g.items DESC, g.error_type

-- item_list --
-- One page of items without payloads and results, by position, in a window of positions; a text is
-- looked for in keys and errors. Index: fanout_items_pkey.
SELECT t.position, t.item_key, t.status, t.failures, t.crashes,
    CASE WHEN t.claim > 0 THEN to_jsonb(t.due) #>> '{}' END AS due,
    to_jsonb(t.started_at) #>> '{}' AS started_at, to_jsonb(t.finished_at) #>> '{}' AS finished_at,
    t.sanitised, t.error::text AS error
FROM (
    SELECT i.position, i.item_key, i.failures, i.crashes, i.claim, i.due, i.started_at,
        i.finished_at,
        i.sanitised, i.error - 'traceback' AS error,
        CASE WHEN i.status = 'pending' AND l.stopped THEN 'cancelled' ELSE i.status END AS status
    FROM fanout_items i
    JOIN fanout_runs r ON r.id = i.run_id
    JOIN fanout_ledgers l ON l.run_id = i.run_id AND l.ledger = i.position %% nullif(r.ledgers, 0)
    WHERE i.run_id = %(run_id)s AND i.position > %(after)s AND i.position <= %(until)s
        AND r.total IS NOT NULL
) t
WHERE (%(status)s::text IS NULL OR t.status = %(status)s)
    AND (%(search)s::text IS NULL OR strpos(lower(t.item_key), lower(%(search)s)) > 0
        OR strpos(lower(t.error::text), lower(%(search)s)) > 0)
ORDER BY t.position LIMIT %(limit)s

-- failed_item_list --
-- The same of failed items, however far apart. Index: fanout_items_error_idx, then sorted.
SELECT position, item_key, status, failures, crashes, to_jsonb(due) #>> '{}' AS due,
    to_jsonb(started_at) #>> '{}' AS started_at, to_jsonb(finished_at) #>> '{}' AS finished_at,
    sanitised, (error - 'traceback')::text AS error
FROM fanout_items
WHERE run_id = %(run_id)s AND error_type IS NOT NULL AND position > %(after)s
    AND (%(search)s::text IS NULL OR strpos(lower(item_key), lower(%(search)s)) > 0
        OR strpos(lower((error - 'traceback')::text), lower(%(search)s)) > 0)
ORDER BY position LIMIT %(limit)s

-- slots --
-- The slots of a run, and what the active ones work on. Index: fanout_slots_pkey, then
-- fanout_items_pkey.
SELECT s.slot, s.job_id, s.active, s.held AS position, i.item_key,
    to_jsonb(i.started_at) #>> '{}' AS started_at, to_jsonb(s.seen_at) #>> '{}' AS seen_at,
    to_jsonb(s.scheduled_at) #>> '{}' AS scheduled_at, s.suspect_since IS NOT NULL AS suspected
FROM fanout_slots s
LEFT JOIN LATERAL (
    SELECT item_key, started_at FROM fanout_items
    WHERE run_id = s.run_id AND position = s.held LIMIT 1
) i ON true
WHERE s.run_id = %(run_id)s
ORDER BY s.active DESC, s.slot LIMIT %(limit)s

-- pace --
-- When a sample of a run's items ended, in seconds of the epoch: each `stride`-th, one by one from
-- the index whatever the planner believes. Index: fanout_items_pkey.
SELECT extract(epoch FROM i.finished_at)::double precision AS at, i.status
FROM generate_series(0, %(last)s::bigint, %(stride)s::bigint) AS p (position)
CROSS JOIN LATERAL (
    SELECT finished_at, status FROM fanout_items
    WHERE run_id = %(run_id)s AND position = p.position LIMIT 1
) i
WHERE i.finished_at IS NOT NULL
ORDER BY at
