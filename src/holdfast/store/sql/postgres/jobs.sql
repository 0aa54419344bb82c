-- Statements for callers: submit, read, and move one job under its lock.

-- name: submit
-- Returns the jobs that already exist: `asked` is the id that was requested, or NULL in a replay of the whole call.
-- All values are sent as text, whatever codecs the connection has: the connection may belong to the caller.
SELECT s.id::text AS id, s.asked::text AS asked
FROM holdfast.accept_jobs(
  :jobs::text::jsonb, :settings::text::jsonb, :wake::boolean, :key::text, :tenant::text, :body::text::uuid) AS s;

-- name: submit_one
-- Like `submit`, for one job; returns its record, whether it existed already, and `asked`.
SELECT (s.record).*, s.reused, s.asked
FROM holdfast.accept_job(
  :jobs::text::jsonb, :settings::text::jsonb, :wake::boolean, :key::text, :tenant::text, :body::text::uuid) AS s;

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

-- name: list_jobs
-- One part of a list, newest first: read `scan` jobs along one index (specs_listed, specs_of_kind, labels_listed,
-- jobs_of_lane, jobs_waiting with jobs_ended and jobs_running); return those that match, and always the last one: the
-- next part starts after it.
WITH scanned AS MATERIALIZED (
  (
    SELECT s.id, s.requested_at
    FROM holdfast.specs AS s
    WHERE :index_name::text = 'newest'
      AND s.tenant = :tenant::text
      AND (s.requested_at, s.id) < (coalesce(:before_at::timestamptz, 'infinity'), :before_id::uuid)
      AND s.requested_at >= coalesce(:since_at::timestamptz, '-infinity')
    ORDER BY s.requested_at DESC, s.id DESC
    LIMIT :scan::integer
  )
  UNION ALL
  (
    SELECT s.id, s.requested_at
    FROM holdfast.specs AS s
    WHERE :index_name::text = 'kind'
      AND s.tenant = :tenant::text
      AND s.kind = :kind::text
      AND (s.requested_at, s.id) < (coalesce(:before_at::timestamptz, 'infinity'), :before_id::uuid)
      AND s.requested_at >= coalesce(:since_at::timestamptz, '-infinity')
    ORDER BY s.requested_at DESC, s.id DESC
    LIMIT :scan::integer
  )
  UNION ALL
  (
    SELECT l.id, l.requested_at
    FROM holdfast.labels AS l
    WHERE :index_name::text = 'label'
      AND l.tenant = :tenant::text
      AND l.label = md5(:label::text)::uuid
      AND (l.requested_at, l.id) < (coalesce(:before_at::timestamptz, 'infinity'), :before_id::uuid)
      AND l.requested_at >= coalesce(:since_at::timestamptz, '-infinity')
    ORDER BY l.requested_at DESC, l.id DESC
    LIMIT :scan::integer
  )
  UNION ALL
  (
    SELECT j.id, j.requested_at
    FROM holdfast.jobs AS j
    WHERE :index_name::text = 'lane'
      AND j.tenant = :tenant::text
      AND j.lane = :lane::text
      AND (j.requested_at, j.id) < (coalesce(:before_at::timestamptz, 'infinity'), :before_id::uuid)
      AND j.requested_at >= coalesce(:since_at::timestamptz, '-infinity')
    ORDER BY j.requested_at DESC, j.id DESC
    LIMIT :scan::integer
  )
  UNION ALL
  (
    SELECT f.id, f.requested_at
    FROM json_to_recordset(:ranges::json) AS g(status text, queue text)
    CROSS JOIN LATERAL (
      (
        SELECT j.id, j.requested_at
        FROM holdfast.jobs AS j
        WHERE :index_name::text = 'status'
          AND j.tenant = :tenant::text
          AND j.status = g.status
          AND j.queue = g.queue
          AND j.gate IS NOT NULL
          AND (j.requested_at, j.id) < (coalesce(:before_at::timestamptz, 'infinity'), :before_id::uuid)
          AND j.requested_at >= coalesce(:since_at::timestamptz, '-infinity')
        ORDER BY j.requested_at DESC, j.id DESC
        LIMIT :scan::integer
      )
      UNION ALL
      (
        SELECT j.id, j.requested_at
        FROM holdfast.jobs AS j
        WHERE :index_name::text = 'status'
          AND j.tenant = :tenant::text
          AND j.status = g.status
          AND j.queue = g.queue
          AND j.status IN ('paused', 'succeeded', 'failed', 'timed_out', 'cancelled')
          AND (j.requested_at, j.id) < (coalesce(:before_at::timestamptz, 'infinity'), :before_id::uuid)
          AND j.requested_at >= coalesce(:since_at::timestamptz, '-infinity')
        ORDER BY j.requested_at DESC, j.id DESC
        LIMIT :scan::integer
      )
      UNION ALL
      (
        SELECT j.id, j.requested_at
        FROM holdfast.jobs AS j
        WHERE :index_name::text = 'status'
          AND j.tenant = :tenant::text
          AND j.status = g.status
          AND (g.queue IS NULL OR j.queue = g.queue)
          AND j.phase IS NOT NULL
          AND g.status = 'running'
          AND (j.requested_at, j.id) < (coalesce(:before_at::timestamptz, 'infinity'), :before_id::uuid)
          AND j.requested_at >= coalesce(:since_at::timestamptz, '-infinity')
        ORDER BY j.requested_at DESC, j.id DESC
        LIMIT :scan::integer
      )
    ) AS f
    ORDER BY f.requested_at DESC, f.id DESC
    LIMIT :scan::integer
  )
)
SELECT r.*, f.fits, (SELECT count(*) FROM scanned) AS scanned
FROM scanned AS w
JOIN holdfast.job_records AS r ON r.id = w.id
CROSS JOIN LATERAL (
  SELECT (:statuses::json IS NULL OR r.status IN (SELECT json_array_elements_text(:statuses::json)))
    AND (:kind::text IS NULL OR r.kind = :kind::text)
    AND (:queue::text IS NULL OR r.queue = :queue::text)
    AND (:lane::text IS NULL OR r.lane = :lane::text)
    AND (:labels::jsonb IS NULL OR r.labels @> :labels::jsonb) AS fits
) AS f
WHERE f.fits
  OR w.id = (SELECT x.id FROM scanned AS x ORDER BY x.requested_at, x.id LIMIT 1)
ORDER BY w.requested_at DESC, w.id DESC
LIMIT :limit::integer;

-- name: list_ranges
-- The queues that have jobs of these statuses. Skips from queue to queue along jobs_waiting and jobs_ended.
WITH RECURSIVE ranges (status, queue) AS (
  SELECT w.status, '' COLLATE "C"
  FROM json_array_elements_text(:statuses::json) AS w(status)
  UNION ALL
  SELECT r.status, coalesce(
    (
      SELECT min(j.queue) FROM holdfast.jobs AS j
      WHERE j.tenant = :tenant::text AND j.status = r.status AND j.queue > r.queue AND j.gate IS NOT NULL
    ), (
      SELECT min(j.queue) FROM holdfast.jobs AS j
      WHERE j.tenant = :tenant::text AND j.status = r.status AND j.queue > r.queue
        AND j.status IN ('paused', 'succeeded', 'failed', 'timed_out', 'cancelled')
    ))
  FROM ranges AS r
  WHERE r.queue IS NOT NULL
)
SELECT r.status, r.queue FROM ranges AS r WHERE r.queue <> '';

-- name: jobs_between
-- Jobs whose ids lie between two bounds: those with a common prefix. Uses the primary key.
SELECT r.*
FROM holdfast.job_records AS r
WHERE r.id >= :least::uuid
  AND r.id <= :most::uuid
  AND r.tenant = :tenant::text
ORDER BY r.id
LIMIT :limit::integer;

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
WITH moved AS (
  UPDATE holdfast.jobs AS j
  SET status = :status::text,
      gate = :gate::text,
      held = j.held AND :status::text IN ('pending', 'failed'),
      finished_at = CASE
        WHEN :status::text NOT IN ('succeeded', 'failed', 'timed_out', 'cancelled') THEN NULL
        WHEN j.status = :status::text THEN j.finished_at
        ELSE greatest(holdfast.clock(), j.updated_at)
      END,
      updated_at = greatest(holdfast.clock(), j.updated_at),
      token = j.token + CASE WHEN j.status = 'running' THEN 1 ELSE 0 END,
      orphaned_at = CASE WHEN :status::text = 'running' THEN greatest(holdfast.clock(), j.updated_at) END,
      adopt_after_at = CASE WHEN :status::text = 'running' THEN holdfast.clock() END,
      phase = CASE WHEN :close_attempt::boolean THEN NULL ELSE j.phase END,
      spent = j.spent + CASE WHEN :close_attempt::boolean AND j.phase IS NOT NULL THEN 1 ELSE 0 END,
      dismissed = :dismissed::boolean,
      max_attempts = greatest(j.max_attempts, :max_attempts::integer),
      queue_deadline_at = CASE WHEN :status::text = 'queued'
        THEN greatest(holdfast.clock(), j.available_at) + make_interval(secs => :queue_timeout::float8) END,
      stop_kind = :stop_kind::text,
      stop_phase = CASE WHEN :stop_kind::text IS NOT NULL THEN coalesce(j.stop_phase, 'requested') END,
      stop_deadline_at = CASE WHEN :stop_kind::text IS NOT NULL THEN j.stop_deadline_at END,
      stop_reason = CASE WHEN :stop_kind::text IS NOT NULL THEN j.stop_reason END,
      unsettled = j.unsettled OR (j.has_dependants AND :unsettle::boolean),
      adoptions = CASE WHEN :status::text = 'queued' THEN 0 ELSE j.adoptions END,
      error_code = CASE WHEN :keep_error::boolean THEN j.error_code ELSE :error_code::text END,
      error_message = CASE WHEN :keep_error::boolean THEN j.error_message ELSE :error_message::text END,
      result = CASE WHEN :dismissed::boolean THEN j.result ELSE :result::json END,
      seq = j.seq + json_array_length(:events::json)
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
WITH asked AS (
  UPDATE holdfast.jobs AS j
  SET stop_kind = :kind::text,
      stop_reason = :reason::text,
      stop_phase = coalesce(j.stop_phase, 'requested'),
      updated_at = greatest(holdfast.clock(), j.updated_at),
      seq = j.seq + json_array_length(:events::json)
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

-- name: set_budget
UPDATE holdfast.specs AS s
SET policy = jsonb_set(coalesce(s.policy, '{}'), '{budget}', :budget::jsonb)
WHERE s.id = :id::uuid;

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
  AND j.status = 'failed'
  AND j.error_code = 'dependency_failed'
  AND j.stop_kind IS NULL
  AND s.reuse_key IS NOT NULL
  AND NOT EXISTS (
    SELECT 1 FROM holdfast.needs AS n
    LEFT JOIN holdfast.jobs AS p ON p.id = n.need_id
    WHERE n.job_id = j.id
      AND NOT n.satisfied
      AND (p.id IS NULL OR p.status IN ('failed', 'timed_out', 'cancelled')))
ORDER BY s.tenant, s.reuse_key, j.id;

-- name: overdue_jobs
-- Queued jobs whose queue timeout has passed. Uses jobs_queue_deadline.
SELECT j.id, j.tenant
FROM holdfast.jobs AS j
WHERE j.status = 'queued'
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
  AND j.status IN ('succeeded', 'failed', 'timed_out', 'cancelled')
RETURNING j.id;

-- name: delete_jobs
-- Delete jobs that are marked for deletion and whose files are gone.
WITH to_delete AS MATERIALIZED (
  SELECT j.id, j.tenant, j.queue, j.status, j.seq
  FROM holdfast.jobs AS j
  WHERE j.id IN (SELECT e::uuid FROM json_array_elements_text(:ids::json) AS e)
    AND j.stop_kind = 'delete'
    AND j.status IN ('succeeded', 'failed', 'timed_out', 'cancelled')
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

-- name: next_due
-- When the next delayed job is due. Uses jobs_future.
SELECT j.available_at, extract(epoch FROM j.available_at - holdfast.clock())::float8 AS wait
FROM holdfast.jobs AS j
WHERE j.gate = 'future'
ORDER BY j.available_at
LIMIT 1;

-- name: now
SELECT holdfast.clock() AS now_at;
