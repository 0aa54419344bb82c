-- Accepting a batch. On Postgres all of it is in SQL functions, for callers in any language (repeatable/postgres/submit.sql). On
-- SQLite the same is in Python (submit_sqlite.py), which runs these statements in one transaction.

-- name: submit
-- Returns the jobs that already exist: `asked` is the id that was requested, or NULL in a replay of the whole call.
-- All values are sent as text, whatever codecs the connection has: the connection may belong to the caller.
SELECT s.id::text AS id, s.asked::text AS asked
FROM holdfast.accept_jobs(
  :jobs::text::jsonb, :settings::text::jsonb, :wake::boolean, :key::text, :tenant::text, :body::text::uuid) AS s;
-- sqlite
-- each: jobs
INSERT INTO specs (id, tenant, kind, requested_at, held, runner, spec, inputs, labels, policy, reuse_key)
VALUES (
  :id, :tenant, :kind, clock(), :hold, :runner, :spec, :inputs, nullif(:labels, '{}'), :policy, :reuse_key);
-- each: labels
INSERT INTO labels (tenant, label, requested_at, id)
VALUES (:tenant, :label, clock(), :id);
-- each: jobs with needs
INSERT INTO needs (job_id, need_id, satisfied)
SELECT DISTINCT :id, n.value, EXISTS (SELECT 1 FROM jobs AS p WHERE p.id = n.value AND p.status = 'succeeded')
FROM json_each(:needs) AS n;
-- each: jobs
INSERT INTO jobs (
  id, tenant, queue, capability, lane, priority, status, gate, held, has_needs, requested_at, available_at,
  queue_deadline_at, updated_at, max_attempts, seq)
VALUES (
  :id, :tenant, :queue, :capability, :lane, :priority,
  CASE WHEN :hold THEN 'pending' ELSE 'queued' END,
  CASE
    WHEN :lane IS NOT NULL OR :needs <> '[]' THEN 'unresolved'
    WHEN :hold THEN 'held'
    WHEN :available_at > clock() THEN 'future'
    ELSE 'open'
  END,
  :hold, :needs <> '[]', clock(), max(coalesce(:available_at, 0), clock()),
  CASE WHEN NOT :hold
    THEN max(coalesce(:available_at, 0), clock()) + CAST(:queue_timeout * 1000000 AS INTEGER) END,
  clock(), :max_attempts, 1);
-- moves
SELECT j.id, j.tenant, j.queue, NULL AS old_status, j.status AS new_status, j.seq, j.updated_at AS changed_at
FROM json_each(:ids) AS e
CROSS JOIN jobs AS j ON j.id = e.value;

-- name: submit_one
-- Like `submit`, for one job; returns its record, whether it existed already, and `asked`. With :topics, workers are
-- notified of a new job with the commit. :topics are what the notification says besides its queue: perhaps that the job
-- sorts last, which is not said of one with a priority.
-- postgres only
SELECT (s.record).*, s.reused, s.asked, CASE
  WHEN :topics::text IS NOT NULL AND NOT s.reused
    THEN pg_notify('holdfast', (json_build_array('work:' || (s.record).queue)::jsonb
      || CASE WHEN (s.record).priority = 0 THEN :topics::text::jsonb ELSE '[]' END)::text)
END AS announced
FROM holdfast.accept_job(
  :jobs::text::jsonb, :settings::text::jsonb, :wake::boolean, :key::text, :tenant::text, :body::text::uuid) AS s;

-- name: find_idempotency_key
-- The jobs that an idempotency key created within its 24 hours.
-- sqlite
SELECT i.body, i.jobs
FROM idempotency AS i
WHERE i.tenant = :tenant
  AND i.key = :key
  AND i.made_at > clock() - 86400000000;

-- name: store_idempotency_key
-- sqlite
INSERT INTO idempotency (tenant, key, body, jobs, made_at)
VALUES (:tenant, :key, :body, :jobs, clock())
ON CONFLICT (tenant, key) DO UPDATE SET body = excluded.body, jobs = excluded.jobs, made_at = excluded.made_at;

-- name: find_reusable
-- The job to return for a reuse key: the newest success first, then the live job; a rebuild joins only the live one.
-- sqlite
SELECT j.id AS job_id
FROM reuse AS r
JOIN jobs AS j ON j.id IN (r.job_id, r.succeeded_id)
WHERE r.tenant = :tenant
  AND r.reuse_key = :reuse_key
  AND j.stop_kind IS NOT 'delete'
  AND ((j.status = 'succeeded' AND NOT :rebuild)
    OR (j.id = r.job_id AND j.status IN ('pending', 'queued', 'running', 'paused')))
ORDER BY j.status = 'succeeded' DESC, j.id = r.job_id DESC
LIMIT 1;

-- name: set_reuse_key
-- sqlite
INSERT INTO reuse (tenant, reuse_key, job_id)
VALUES (:tenant, :reuse_key, :id)
ON CONFLICT (tenant, reuse_key) DO UPDATE SET job_id = excluded.job_id, succeeded_id = NULL;

-- name: limited_queues
-- sqlite
SELECT q.queue, q.depth_limit FROM queues AS q WHERE q.depth_limit IS NOT NULL;

-- name: waiting_in_queue
-- Count waiting jobs up to a limit. Uses jobs_limited.
-- sqlite
SELECT count(*) AS waiting
FROM (SELECT 1 FROM jobs AS j WHERE j.limited = 1 AND j.gate IS NOT NULL AND j.queue = :queue LIMIT :limit);

-- name: set_limited
-- sqlite
UPDATE jobs SET limited = 1 WHERE id IN (SELECT value FROM json_each(:ids));
