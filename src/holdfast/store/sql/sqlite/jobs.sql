-- Statements for callers: submit, read, and move one job under its lock.

-- name: existing_jobs
-- Which of these ids exist, and their tenants.
SELECT j.id, j.tenant FROM json_each(:ids) AS e JOIN jobs AS j ON j.id = e.value;

-- name: need_states
-- The status of jobs that a submit names in `needs`; jobs of other tenants are left out.
SELECT j.id, j.status
FROM jobs AS j
WHERE j.tenant = :tenant
  AND j.id IN (SELECT value FROM json_each(:ids));

-- name: get_job
SELECT r.* FROM job_records AS r WHERE r.id = :id AND r.tenant = :tenant;

-- name: open_needs
SELECT n.need_id FROM needs AS n WHERE n.job_id = :id AND n.satisfied = 0 ORDER BY n.need_id;

-- name: list_jobs
-- One part of a list, newest first: read `scan` jobs along one index (specs_listed, specs_of_kind, labels_listed,
-- jobs_of_lane, jobs_waiting with jobs_ended and jobs_running); return those that match, and always the last one: the
-- next part starts after it.
WITH scanned AS MATERIALIZED (
  SELECT * FROM (
    SELECT s.id, s.requested_at
    FROM specs AS s
    WHERE :index_name = 'newest'
      AND s.tenant = :tenant
      AND (s.requested_at, s.id) < (coalesce(:before_at, 9223372036854775807), :before_id)
      AND s.requested_at >= coalesce(:since_at, 0)
    ORDER BY s.requested_at DESC, s.id DESC
    LIMIT :scan
  )
  UNION ALL
  SELECT * FROM (
    SELECT s.id, s.requested_at
    FROM specs AS s
    WHERE :index_name = 'kind'
      AND s.tenant = :tenant
      AND s.kind = :kind
      AND (s.requested_at, s.id) < (coalesce(:before_at, 9223372036854775807), :before_id)
      AND s.requested_at >= coalesce(:since_at, 0)
    ORDER BY s.requested_at DESC, s.id DESC
    LIMIT :scan
  )
  UNION ALL
  SELECT * FROM (
    SELECT l.id, l.requested_at
    FROM labels AS l
    WHERE :index_name = 'label'
      AND l.tenant = :tenant
      AND l.label = :label
      AND (l.requested_at, l.id) < (coalesce(:before_at, 9223372036854775807), :before_id)
      AND l.requested_at >= coalesce(:since_at, 0)
    ORDER BY l.requested_at DESC, l.id DESC
    LIMIT :scan
  )
  UNION ALL
  SELECT * FROM (
    SELECT j.id, j.requested_at
    FROM jobs AS j
    WHERE :index_name = 'lane'
      AND j.tenant = :tenant
      AND j.lane = :lane
      AND (j.requested_at, j.id) < (coalesce(:before_at, 9223372036854775807), :before_id)
      AND j.requested_at >= coalesce(:since_at, 0)
    ORDER BY j.requested_at DESC, j.id DESC
    LIMIT :scan
  )
  UNION ALL
  SELECT * FROM (
    SELECT j.id, j.requested_at
    FROM json_each(:ranges) AS g
    CROSS JOIN jobs AS j
    WHERE :index_name = 'status'
      AND j.rowid IN (
        SELECT * FROM (
          SELECT f.rowid
          FROM jobs AS f INDEXED BY jobs_waiting
          WHERE f.tenant = :tenant
            AND f.status = g.value ->> 'status'
            AND f.queue = g.value ->> 'queue'
            AND f.gate IS NOT NULL
            AND (f.requested_at, f.id) < (coalesce(:before_at, 9223372036854775807), :before_id)
            AND f.requested_at >= coalesce(:since_at, 0)
          ORDER BY f.requested_at DESC, f.id DESC
          LIMIT :scan
        )
        UNION ALL
        SELECT * FROM (
          SELECT f.rowid
          FROM jobs AS f INDEXED BY jobs_ended
          WHERE f.tenant = :tenant
            AND f.status = g.value ->> 'status'
            AND f.queue = g.value ->> 'queue'
            AND (f.status = 'paused' OR f.status = 'succeeded' OR f.status = 'failed' OR f.status = 'timed_out' OR f.status = 'cancelled')
            AND (f.requested_at, f.id) < (coalesce(:before_at, 9223372036854775807), :before_id)
            AND f.requested_at >= coalesce(:since_at, 0)
          ORDER BY f.requested_at DESC, f.id DESC
          LIMIT :scan
        )
        UNION ALL
        SELECT * FROM (
          SELECT f.rowid
          FROM jobs AS f INDEXED BY jobs_running
          WHERE f.tenant = :tenant
            AND f.status = g.value ->> 'status'
            AND (g.value ->> 'queue' IS NULL OR f.queue = g.value ->> 'queue')
            AND f.phase IS NOT NULL
            AND g.value ->> 'status' = 'running'
            AND (f.requested_at, f.id) < (coalesce(:before_at, 9223372036854775807), :before_id)
            AND f.requested_at >= coalesce(:since_at, 0)
          ORDER BY f.requested_at DESC, f.id DESC
          LIMIT :scan
        )
      )
    ORDER BY j.requested_at DESC, j.id DESC
    LIMIT :scan
  )
)
SELECT r.*, (SELECT count(*) FROM scanned) AS scanned,
  (:statuses IS NULL OR r.status IN (SELECT value FROM json_each(:statuses)))
  AND (:kind IS NULL OR r.kind = :kind)
  AND (:queue IS NULL OR r.queue = :queue)
  AND (:lane IS NULL OR r.lane = :lane)
  AND (:labels IS NULL OR NOT EXISTS (
    SELECT 1 FROM json_each(:labels) AS w
    WHERE NOT EXISTS (SELECT 1 FROM json_each(r.labels) AS l WHERE l.key = w.key AND l.value = w.value))) AS fits
FROM scanned AS w
CROSS JOIN job_records AS r ON r.id = w.id
WHERE fits
  OR w.id = (SELECT x.id FROM scanned AS x ORDER BY x.requested_at, x.id LIMIT 1)
ORDER BY w.requested_at DESC, w.id DESC
LIMIT :limit;

-- name: list_ranges
-- The queues that have jobs of these statuses. Skips from queue to queue along jobs_waiting and jobs_ended.
WITH RECURSIVE ranges (status, queue) AS (
  SELECT w.value, ''
  FROM json_each(:statuses) AS w
  UNION ALL
  SELECT r.status, coalesce(
    (
      SELECT min(j.queue) FROM jobs AS j
      WHERE j.tenant = :tenant AND j.status = r.status AND j.queue > r.queue AND j.gate IS NOT NULL
    ), (
      SELECT min(j.queue) FROM jobs AS j
      WHERE j.tenant = :tenant AND j.status = r.status AND j.queue > r.queue
        AND (j.status = 'paused' OR j.status = 'succeeded' OR j.status = 'failed' OR j.status = 'timed_out' OR j.status = 'cancelled')
    ))
  FROM ranges AS r
  WHERE r.queue IS NOT NULL
)
SELECT r.status, r.queue FROM ranges AS r WHERE r.queue <> '';

-- name: jobs_between
-- Jobs whose ids lie between two bounds: those with a common prefix. Uses the primary key.
SELECT r.*
FROM job_records AS r
WHERE r.id >= :least
  AND r.id <= :most
  AND r.tenant = :tenant
ORDER BY r.id
LIMIT :limit;

-- name: find_job
-- The columns of a job that never change, to know which locks to take.
SELECT j.id, j.tenant, j.lane FROM jobs AS j WHERE j.id = :id AND j.tenant = :tenant;

-- name: lock_job
SELECT j.id, j.tenant, j.lane, j.queue, j.status, j.gate, j.phase, j.attempt, j.token, j.started_at, j.available_at,
  j.has_needs, j.has_dependants, j.unsettled, j.stop_kind, j.spent, j.max_attempts, j.error_code, j.dismissed, j.domain,
  j.owner, j.adoptions, s.reuse_key, s.policy ->> 'queue_timeout' AS queue_timeout,
  j.usage, s.policy ->> 'budget' AS budget,
  j.available_at > clock() AS delayed,
  j.queue_deadline_at <= clock() AS overdue
FROM jobs AS j
JOIN specs AS s ON s.id = j.id
WHERE j.id = :id;

-- name: move
-- Write one move of a job without a lease, with the events that report it. The caller holds the lock of the job (and of
-- its lane). An orphan that leaves `running` gets a new token; one that returns to `running` can be adopted at once. A
-- closed attempt records the job's new status: only a resume says that the attempt has stopped.
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
UPDATE jobs
SET status = :status,
    gate = :gate,
    held = held AND :status IN ('pending', 'failed'),
    finished_at = CASE
      WHEN :status NOT IN ('succeeded', 'failed', 'timed_out', 'cancelled') THEN NULL
      WHEN status = :status THEN finished_at
      ELSE max(clock(), updated_at)
    END,
    updated_at = max(clock(), updated_at),
    token = token + CASE WHEN status = 'running' THEN 1 ELSE 0 END,
    orphaned_at = CASE WHEN :status = 'running' THEN max(clock(), updated_at) END,
    adopt_after_at = CASE WHEN :status = 'running' THEN clock() END,
    phase = CASE WHEN :close_attempt THEN NULL ELSE phase END,
    spent = spent + CASE WHEN :close_attempt AND phase IS NOT NULL THEN 1 ELSE 0 END,
    dismissed = :dismissed,
    max_attempts = max(max_attempts, coalesce(:max_attempts, 0)),
    queue_deadline_at = CASE WHEN :status = 'queued'
      THEN max(clock(), available_at) + CAST(:queue_timeout * 1000000 AS INTEGER) END,
    stop_kind = :stop_kind,
    stop_phase = CASE WHEN :stop_kind IS NOT NULL THEN coalesce(stop_phase, 'requested') END,
    stop_deadline_at = CASE WHEN :stop_kind IS NOT NULL THEN stop_deadline_at END,
    stop_reason = CASE WHEN :stop_kind IS NOT NULL THEN stop_reason END,
    unsettled = unsettled OR (has_dependants AND :unsettle),
    adoptions = CASE WHEN :status = 'queued' THEN 0 ELSE adoptions END,
    error_code = CASE WHEN :keep_error THEN error_code ELSE :error_code END,
    error_message = CASE WHEN :keep_error THEN error_message ELSE :error_message END,
    result = CASE WHEN :dismissed THEN result ELSE :result END,
    seq = seq + json_array_length(:events)
WHERE id IN (SELECT id FROM affected);
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
FROM jobs AS j
JOIN attempts AS a ON a.job_id = j.id AND a.attempt = j.attempt
WHERE j.id = :id
  AND a.end_seq IS NULL
  AND a.status = 'cancelled';

-- name: request_stop
-- Record a stop request for the owner or adopter of a job that runs or may still run.
UPDATE jobs
SET stop_kind = :kind,
    stop_reason = :reason,
    stop_phase = coalesce(stop_phase, 'requested'),
    updated_at = max(clock(), updated_at),
    seq = seq + json_array_length(:events)
WHERE id = :id
  AND phase IS NOT NULL;
INSERT INTO events (job_id, seq, at, type, data)
SELECT j.id, j.seq - json_array_length(:events) + e.key + 1, j.updated_at, e.value ->> 'type', e.value ->> 'data'
FROM jobs AS j
CROSS JOIN json_each(:events) AS e
WHERE j.id = :id
  AND j.phase IS NOT NULL;
SELECT j.id, j.owner FROM jobs AS j WHERE j.id = :id AND j.phase IS NOT NULL;

-- name: set_budget
UPDATE specs SET policy = json_set(coalesce(policy, '{}'), '$.budget', json(:budget)) WHERE id = :id;

-- name: add_events
-- Write events about a locked job whose status does not change.
UPDATE jobs SET seq = seq + json_array_length(:events) WHERE id = :id;
INSERT INTO events (job_id, seq, at, type, task, data)
SELECT j.id, j.seq - json_array_length(:events) + e.key + 1, max(clock(), j.updated_at), e.value ->> 'type',
  e.value ->> 'task', e.value ->> 'data'
FROM jobs AS j
CROSS JOIN json_each(:events) AS e
WHERE j.id = :id;

-- name: lock_reuse_key
-- Lock a reuse key; the next statement reads which job has it.
INSERT INTO reuse (tenant, reuse_key, job_id)
VALUES (:tenant, :reuse_key, :id)
ON CONFLICT (tenant, reuse_key) DO UPDATE SET job_id = job_id;

-- name: take_reuse_key
-- Give a reuse key back to a job, unless another job with the key is live. A succeeded job stays the answer for the key
-- until this one succeeds too.
UPDATE reuse
SET job_id = :id,
    succeeded_id = CASE
      WHEN job_id <> :id AND EXISTS (
        SELECT 1 FROM jobs AS j
        WHERE j.id = reuse.job_id AND j.status = 'succeeded' AND j.stop_kind IS NOT 'delete') THEN job_id
      ELSE succeeded_id
    END
WHERE tenant = :tenant
  AND reuse_key = :reuse_key
  AND NOT EXISTS (
    SELECT 1 FROM jobs AS j
    WHERE j.id = reuse.job_id AND j.id <> :id AND j.status IN ('pending', 'queued', 'running', 'paused'))
RETURNING job_id;

-- name: job_with_reuse_key
SELECT r.job_id FROM reuse AS r WHERE r.tenant = :tenant AND r.reuse_key = :reuse_key;

-- name: reuse_keys
-- The reuse keys of jobs, in the order in which they are locked. They never change, so no lock is needed to read them.
SELECT s.id, s.tenant, s.reuse_key
FROM specs AS s
WHERE s.id IN (SELECT value FROM json_each(:ids))
  AND s.reuse_key IS NOT NULL
ORDER BY s.tenant, s.reuse_key, s.id;

-- name: revivable_keys
-- Reuse keys of jobs that failed because of needs that no longer block them.
SELECT j.id, j.tenant, s.reuse_key
FROM jobs AS j
JOIN specs AS s ON s.id = j.id
WHERE j.id IN (SELECT value FROM json_each(:ids))
  AND j.status = 'failed'
  AND j.error_code = 'dependency_failed'
  AND j.stop_kind IS NULL
  AND s.reuse_key IS NOT NULL
  AND NOT EXISTS (
    SELECT 1 FROM needs AS n
    LEFT JOIN jobs AS p ON p.id = n.need_id
    WHERE n.job_id = j.id
      AND n.satisfied = 0
      AND (p.id IS NULL OR p.status IN ('failed', 'timed_out', 'cancelled')))
ORDER BY s.tenant, s.reuse_key, j.id;

-- name: overdue_jobs
-- Queued jobs whose queue timeout has passed. Uses jobs_queue_deadline.
SELECT j.id, j.tenant
FROM jobs AS j
WHERE j.status = 'queued'
  AND j.queue_deadline_at IS NOT NULL
  AND j.queue_deadline_at <= clock()
ORDER BY j.queue_deadline_at
LIMIT :limit;

-- name: jobs_to_delete
-- Ended jobs that are marked for deletion, the next ones after :after_id. Uses jobs_deleting.
SELECT j.id, j.tenant, j.status,
  j.lane IS NOT NULL AND j.dismissed = 0 AND j.status IN ('failed', 'timed_out') AS blocking
FROM jobs AS j
WHERE j.stop_kind = 'delete'
  AND j.id > coalesce(:after_id, '')
  AND j.status IN ('succeeded', 'failed', 'timed_out', 'cancelled', 'paused')
ORDER BY j.id
LIMIT :limit;

-- name: request_deletion
-- Mark an ended job for deletion. From then on its status is final, no reuse key returns it, and it blocks no lane:
-- removing its files may take a while.
UPDATE jobs
SET stop_kind = 'delete',
    stop_phase = coalesce(stop_phase, 'requested'),
    dismissed = dismissed OR status IN ('failed', 'timed_out')
WHERE id = :id
  AND tenant = :tenant
  AND status IN ('succeeded', 'failed', 'timed_out', 'cancelled')
RETURNING id;

-- name: delete_jobs
-- Delete jobs that are marked for deletion and whose files are gone.
DELETE FROM affected;
INSERT INTO affected (id)
SELECT j.id
FROM json_each(:ids) AS e
CROSS JOIN jobs AS j ON j.id = e.value
WHERE j.stop_kind = 'delete'
  AND j.status IN ('succeeded', 'failed', 'timed_out', 'cancelled')
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
SELECT j.available_at, (j.available_at - clock()) / 1000000.0 AS wait
FROM jobs AS j INDEXED BY jobs_future
WHERE j.gate = 'future'
ORDER BY j.available_at
LIMIT 1;

-- name: now
SELECT clock() AS now_at;
