-- Statements for callers: read, and move one job under its lock.

-- name: existing_jobs
-- Which of these ids exist, and their tenants.
SELECT j.id, j.tenant FROM holdfast.jobs AS j WHERE j.id IN (SELECT e::uuid FROM json_array_elements_text(:ids::json) AS e);

-- name: need_states
-- The status of jobs that a submit names in `needs`; jobs of other tenants are left out.
SELECT j.id, j.status
FROM holdfast.jobs AS j
WHERE j.tenant = :tenant::text
  AND j.id IN (SELECT e::uuid FROM json_array_elements_text(:ids::json) AS e);

-- name: get_job
SELECT r.* FROM holdfast.job_records AS r WHERE r.id = :id::uuid AND r.tenant = :tenant::text;

-- name: open_needs
SELECT n.need_id FROM holdfast.needs AS n WHERE n.job_id = :id::uuid AND NOT n.satisfied ORDER BY n.need_id;

-- name: find_job
-- The columns of a job that never change, to know which locks to take.
SELECT j.id, j.tenant, j.lane FROM holdfast.jobs AS j WHERE j.id = :id::uuid AND j.tenant = :tenant::text;

-- name: lock_job
SELECT j.id, j.tenant, j.lane, j.queue, j.status, j.gate, j.phase, j.attempt, j.token, j.started_at, j.available_at,
  j.has_needs, j.has_dependants, j.unsettled, j.stop_kind, j.spent, j.max_attempts, j.error_code, j.dismissed, j.domain,
  j.owner, j.adoptions, s.reuse_key, (s.policy ->> 'queue_timeout')::float8 AS queue_timeout,
  j.usage, s.policy ->> 'budget' AS budget,
  j.available_at > holdfast.clock() AS delayed,
  j.queue_deadline_at <= holdfast.clock() AS overdue
FROM holdfast.jobs AS j
JOIN holdfast.specs AS s ON s.id = j.id
WHERE j.id = :id::uuid
FOR NO KEY UPDATE OF j;

-- name: move
-- Write one move of a job without a lease, with the events that report it. The caller holds the lock of the job (and of
-- its lane). An orphan that leaves `running` gets a new token; one that returns to `running` can be adopted at once. A
-- closed attempt records the job's new status: only a resume says that the attempt has stopped.
WITH clock AS MATERIALIZED (
  SELECT holdfast.clock() AS now_at
), moved AS (
  UPDATE holdfast.jobs AS j
  SET {move_writes}
  FROM clock AS t
  WHERE j.id = :id::uuid
    AND j.status = :from_status::text
    AND j.owner IS NULL
  RETURNING j.*
), closed AS (
  INSERT INTO holdfast.attempts (
    job_id, attempt, worker, domain, token, claim_seq, status, claimed_at, started_at, ended_at, cause, adopter,
    error_code, error_message)
  SELECT m.id, m.attempt, m.worker, m.domain, m.token, m.claim_seq, m.status, m.claimed_at, m.attempt_started_at,
    m.updated_at, 'lost', m.adopter, 'lost',
    CASE WHEN m.status = 'queued' THEN 'a person said that this attempt has stopped'
      ELSE 'a person gave this attempt up' END
  FROM moved AS m
  JOIN holdfast.jobs AS j ON j.id = m.id
  WHERE :close_attempt::boolean
    AND j.phase IS NOT NULL
), new_events AS (
  INSERT INTO holdfast.events (job_id, seq, at, type, data)
  SELECT m.id, m.seq - json_array_length(:events::json) + e.n, m.updated_at, e.event ->> 'type', (e.event ->> 'data')::json
  FROM moved AS m
  CROSS JOIN json_array_elements(:events::json) WITH ORDINALITY AS e(event, n)
), moves AS (
  SELECT m.id, m.tenant, m.queue, :from_status::text AS old_status, m.status AS new_status, m.seq, m.updated_at AS changed_at
  FROM moved AS m
)
SELECT m.id, m.status, m.queue, m.gate, m.has_dependants FROM moved AS m;
-- sqlite
DELETE FROM affected;
INSERT INTO affected (id, token)
SELECT j.id, j.token
FROM jobs AS j
WHERE j.id = :id
  AND j.status = :from_status
  AND j.owner IS NULL;
INSERT INTO attempts (
  job_id, attempt, worker, domain, token, claim_seq, status, claimed_at, started_at, ended_at, cause, adopter,
  error_code, error_message)
SELECT m.id, m.attempt, m.worker, m.domain,
  m.token + CASE WHEN m.status = 'running' THEN 1 ELSE 0 END,
  m.claim_seq, :status, m.claimed_at, m.attempt_started_at, max(clock(), m.updated_at), 'lost', m.adopter,
  'lost',
  CASE WHEN :status = 'queued' THEN 'a person said that this attempt has stopped'
    ELSE 'a person gave this attempt up' END
FROM affected AS t
CROSS JOIN jobs AS m ON m.id = t.id
WHERE :close_attempt
  AND m.phase IS NOT NULL;
UPDATE jobs AS j
SET {move_writes}
WHERE j.id IN (SELECT id FROM affected);
INSERT INTO events (job_id, seq, at, type, data)
SELECT m.id, m.seq - json_array_length(:events) + e.key + 1, m.updated_at, e.value ->> 'type', e.value ->> 'data'
FROM affected AS t
CROSS JOIN jobs AS m ON m.id = t.id
CROSS JOIN json_each(:events) AS e;
-- moves
SELECT m.id, m.tenant, m.queue, :from_status AS old_status, m.status AS new_status, m.seq, m.updated_at AS changed_at
FROM affected AS t
CROSS JOIN jobs AS m ON m.id = t.id;
SELECT m.id, m.status, m.queue, m.gate, m.has_dependants
FROM affected AS t
CROSS JOIN jobs AS m ON m.id = t.id;

-- name: unstopped_attempt
-- The last attempt of a cancelled job, unless it is known to have stopped.
SELECT a.attempt, a.domain
FROM holdfast.jobs AS j
JOIN holdfast.attempts AS a ON a.job_id = j.id AND a.attempt = j.attempt
WHERE j.id = :id::uuid
  AND a.end_seq IS NULL
  AND a.status = 'cancelled';

-- name: request_stop
-- Record a stop request for the owner or adopter of a job that runs or may still run.
WITH clock AS MATERIALIZED (
  SELECT holdfast.clock() AS now_at
), asked AS (
  UPDATE holdfast.jobs AS j
  SET {request_stop_writes}
  FROM clock AS t
  WHERE j.id = :id::uuid
    AND j.phase IS NOT NULL
  RETURNING j.id, j.seq, j.updated_at, j.owner
), new_events AS (
  INSERT INTO holdfast.events (job_id, seq, at, type, data)
  SELECT a.id, a.seq - json_array_length(:events::json) + e.n, a.updated_at, e.event ->> 'type', (e.event ->> 'data')::json
  FROM asked AS a
  CROSS JOIN json_array_elements(:events::json) WITH ORDINALITY AS e(event, n)
)
SELECT a.id, a.owner FROM asked AS a;
-- sqlite
UPDATE jobs AS j
SET {request_stop_writes}
WHERE j.id = :id
  AND j.phase IS NOT NULL;
INSERT INTO events (job_id, seq, at, type, data)
SELECT j.id, j.seq - json_array_length(:events) + e.key + 1, j.updated_at, e.value ->> 'type', e.value ->> 'data'
FROM jobs AS j
CROSS JOIN json_each(:events) AS e
WHERE j.id = :id
  AND j.phase IS NOT NULL;
SELECT j.id, j.owner FROM jobs AS j WHERE j.id = :id AND j.phase IS NOT NULL;

-- name: set_budget
UPDATE holdfast.specs AS s
SET policy = jsonb_set(coalesce(s.policy, '{}'), '{budget}', :budget::jsonb)
WHERE s.id = :id::uuid;
-- sqlite
UPDATE specs SET policy = json_set(coalesce(policy, '{}'), '$.budget', json(:budget)) WHERE id = :id;

-- name: add_events
-- Write events about a locked job whose status does not change.
WITH changed AS (
  UPDATE holdfast.jobs AS j
  SET seq = j.seq + json_array_length(:events::json)
  WHERE j.id = :id::uuid
  RETURNING j.id, j.seq, j.updated_at
)
INSERT INTO holdfast.events (job_id, seq, at, type, task, data)
SELECT n.id, n.seq - json_array_length(:events::json) + e.n, greatest(holdfast.clock(), n.updated_at), e.event ->> 'type',
  e.event ->> 'task', (e.event ->> 'data')::json
FROM changed AS n
CROSS JOIN json_array_elements(:events::json) WITH ORDINALITY AS e(event, n);
-- sqlite
UPDATE jobs SET seq = seq + json_array_length(:events) WHERE id = :id;
INSERT INTO events (job_id, seq, at, type, task, data)
SELECT j.id, j.seq - json_array_length(:events) + e.key + 1, max(clock(), j.updated_at), e.value ->> 'type',
  e.value ->> 'task', e.value ->> 'data'
FROM jobs AS j
CROSS JOIN json_each(:events) AS e
WHERE j.id = :id;

-- name: lock_reuse_key
-- Lock a reuse key; the next statement reads which job has it.
INSERT INTO holdfast.reuse AS r (tenant, reuse_key, job_id)
VALUES (:tenant::text, :reuse_key::text, :id::uuid)
ON CONFLICT (tenant, reuse_key) DO UPDATE SET job_id = r.job_id;

-- name: take_reuse_key
-- Give a reuse key back to a job, unless another job with the key is live. A succeeded job stays the answer for the key
-- until this one succeeds too.
UPDATE holdfast.reuse AS r
SET job_id = :id::uuid,
    succeeded_id = CASE
      WHEN r.job_id <> :id::uuid AND EXISTS (
        SELECT 1 FROM holdfast.jobs AS j
        WHERE j.id = r.job_id AND j.status = 'succeeded' AND j.stop_kind IS DISTINCT FROM 'delete') THEN r.job_id
      ELSE r.succeeded_id
    END
WHERE r.tenant = :tenant::text
  AND r.reuse_key = :reuse_key::text
  AND NOT EXISTS (
    SELECT 1 FROM holdfast.jobs AS j
    WHERE j.id = r.job_id AND j.id <> :id::uuid AND j.status IN ('pending', 'queued', 'running', 'paused'))
RETURNING r.job_id;

-- name: job_with_reuse_key
SELECT r.job_id FROM holdfast.reuse AS r WHERE r.tenant = :tenant::text AND r.reuse_key = :reuse_key::text;

-- name: reuse_keys
-- The reuse keys of jobs, in the order in which they are locked. They never change, so no lock is needed to read them.
SELECT s.id, s.tenant, s.reuse_key
FROM holdfast.specs AS s
WHERE s.id IN (SELECT e::uuid FROM json_array_elements_text(:ids::json) AS e)
  AND s.reuse_key IS NOT NULL
ORDER BY s.tenant, s.reuse_key, s.id;

-- name: revivable_keys
-- Reuse keys of jobs that failed because of needs that no longer block them.
SELECT j.id, j.tenant, s.reuse_key
FROM holdfast.jobs AS j
JOIN holdfast.specs AS s ON s.id = j.id
WHERE j.id IN (SELECT e::uuid FROM json_array_elements_text(:ids::json) AS e)
  AND s.reuse_key IS NOT NULL
  AND {revivable}
ORDER BY s.tenant, s.reuse_key, j.id;

-- name: overdue_jobs
-- Queued jobs whose queue timeout has passed. Uses jobs_queue_deadline.
SELECT j.id, j.tenant
FROM holdfast.jobs AS j
WHERE j.status = 'queued'
  AND j.queue_deadline_at IS NOT NULL
  AND j.queue_deadline_at <= holdfast.clock()
ORDER BY j.queue_deadline_at
LIMIT :limit::integer;

-- name: jobs_to_delete
-- Ended jobs that are marked for deletion, the next ones after :after_id. Uses jobs_deleting.
SELECT j.id, j.tenant, j.status,
  j.lane IS NOT NULL AND NOT j.dismissed AND j.status IN ('failed', 'timed_out') AS blocking
FROM holdfast.jobs AS j
WHERE j.stop_kind = 'delete'
  AND j.id > coalesce(:after_id::uuid, '00000000-0000-0000-0000-000000000000')
  AND j.status IN ('succeeded', 'failed', 'timed_out', 'cancelled', 'paused')
ORDER BY j.id
LIMIT :limit::integer;

-- name: request_deletion
-- Mark an ended job for deletion. From then on its status is final, no reuse key returns it, and it blocks no lane:
-- removing its files may take a while.
UPDATE holdfast.jobs AS j
SET stop_kind = 'delete',
    stop_phase = coalesce(j.stop_phase, 'requested'),
    dismissed = j.dismissed OR j.status IN ('failed', 'timed_out')
WHERE j.id = :id::uuid
  AND j.tenant = :tenant::text
  AND j.status IN ({terminal})
RETURNING j.id;

-- name: delete_jobs
-- Delete jobs that are marked for deletion and whose files are gone.
WITH to_delete AS MATERIALIZED (
  SELECT j.id, j.tenant, j.queue, j.status, j.seq
  FROM holdfast.jobs AS j
  WHERE j.id IN (SELECT e::uuid FROM json_array_elements_text(:ids::json) AS e)
    AND j.stop_kind = 'delete'
    AND j.status IN ({terminal})
    AND NOT j.unsettled
  ORDER BY j.id
  FOR UPDATE OF j SKIP LOCKED
), freed AS MATERIALIZED ( -- a key that a submit has locked stays: it names a deleted job, which is harmless
  SELECT r.tenant, r.reuse_key, CASE
      WHEN r.job_id NOT IN (SELECT g.id FROM to_delete AS g) THEN r.job_id
      WHEN r.succeeded_id NOT IN (SELECT g.id FROM to_delete AS g) THEN r.succeeded_id
    END AS left_id
  FROM to_delete AS d
  JOIN holdfast.specs AS s ON s.id = d.id
  JOIN holdfast.reuse AS r ON r.tenant = s.tenant AND r.reuse_key = s.reuse_key AND d.id IN (r.job_id, r.succeeded_id)
  FOR UPDATE OF r SKIP LOCKED
), inherited AS (
  UPDATE holdfast.reuse AS r
  SET job_id = f.left_id, succeeded_id = NULL
  FROM freed AS f
  WHERE r.tenant = f.tenant AND r.reuse_key = f.reuse_key AND f.left_id IS NOT NULL
), reuse AS (
  DELETE FROM holdfast.reuse AS r USING freed AS f
  WHERE r.tenant = f.tenant AND r.reuse_key = f.reuse_key AND f.left_id IS NULL
), satisfied AS (
  UPDATE holdfast.needs AS n SET satisfied = true
  FROM to_delete AS d
  WHERE n.need_id = d.id AND NOT n.satisfied AND d.status = 'succeeded' AND n.job_id NOT IN (SELECT id FROM to_delete)
), jobs AS (
  DELETE FROM holdfast.jobs AS j USING to_delete AS d WHERE j.id = d.id
), specs AS (
  DELETE FROM holdfast.specs AS s USING to_delete AS d WHERE s.id = d.id
), attempts AS (
  DELETE FROM holdfast.attempts AS a USING to_delete AS d WHERE a.job_id = d.id
), needs AS (
  DELETE FROM holdfast.needs AS n USING to_delete AS d WHERE n.job_id = d.id
), events AS (
  DELETE FROM holdfast.events AS e USING to_delete AS d WHERE e.job_id = d.id
), tasks AS (
  DELETE FROM holdfast.tasks AS t USING to_delete AS d WHERE t.job_id = d.id
), moves AS (
  SELECT d.id, d.tenant, d.queue, d.status AS old_status, NULL::text AS new_status, d.seq, holdfast.clock() AS changed_at
  FROM to_delete AS d
)
SELECT d.id FROM to_delete AS d;
-- sqlite
DELETE FROM affected;
INSERT INTO affected (id)
SELECT j.id
FROM json_each(:ids) AS e
CROSS JOIN jobs AS j ON j.id = e.value
WHERE j.stop_kind = 'delete'
  AND j.status IN ({terminal})
  AND j.unsettled = 0;
UPDATE needs SET satisfied = 1
WHERE satisfied = 0
  AND need_id IN (SELECT j.id FROM affected AS t CROSS JOIN jobs AS j ON j.id = t.id WHERE j.status = 'succeeded');
DELETE FROM reuse
WHERE (tenant, reuse_key) IN (
  SELECT s.tenant, s.reuse_key FROM affected AS t CROSS JOIN specs AS s ON s.id = t.id)
  AND job_id IN (SELECT id FROM affected)
  AND (succeeded_id IS NULL OR succeeded_id IN (SELECT id FROM affected));
UPDATE reuse
SET job_id = CASE WHEN job_id IN (SELECT id FROM affected) THEN succeeded_id ELSE job_id END,
    succeeded_id = NULL
WHERE (tenant, reuse_key) IN (
  SELECT s.tenant, s.reuse_key FROM affected AS t CROSS JOIN specs AS s ON s.id = t.id)
  AND (job_id IN (SELECT id FROM affected) OR succeeded_id IN (SELECT id FROM affected));
-- moves
SELECT d.id, d.tenant, d.queue, d.status AS old_status, NULL AS new_status, d.seq, clock() AS changed_at
FROM affected AS t
CROSS JOIN jobs AS d ON d.id = t.id;
DELETE FROM jobs WHERE id IN (SELECT id FROM affected);
DELETE FROM specs WHERE id IN (SELECT id FROM affected);
DELETE FROM attempts WHERE job_id IN (SELECT id FROM affected);
DELETE FROM needs WHERE job_id IN (SELECT id FROM affected);
DELETE FROM events WHERE job_id IN (SELECT id FROM affected);
DELETE FROM tasks WHERE job_id IN (SELECT id FROM affected);
SELECT t.id FROM affected AS t;

-- name: next_due
-- When the next delayed job is due. Uses jobs_future.
SELECT j.available_at, extract(epoch FROM j.available_at - holdfast.clock())::float8 AS wait
FROM holdfast.jobs AS j /*sqlite INDEXED BY jobs_future */
WHERE j.gate = 'future'
ORDER BY j.available_at
LIMIT 1;

-- name: now
SELECT holdfast.clock() AS now_at;
