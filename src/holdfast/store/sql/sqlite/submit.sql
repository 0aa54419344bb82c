-- Accepting a batch. Differs: Postgres has all of this in the SQL function holdfast_submit, for callers in any language.

-- name: submit
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

-- name: find_idempotency_key
-- The jobs that an idempotency key created within its 24 hours.
SELECT i.body, i.jobs
FROM idempotency AS i
WHERE i.tenant = :tenant
  AND i.key = :key
  AND i.made_at > clock() - 86400000000;

-- name: store_idempotency_key
INSERT INTO idempotency (tenant, key, body, jobs, made_at)
VALUES (:tenant, :key, :body, :jobs, clock())
ON CONFLICT (tenant, key) DO UPDATE SET body = excluded.body, jobs = excluded.jobs, made_at = excluded.made_at;

-- name: find_reusable
-- The job to return for a reuse key: the newest success first, then the live job; a rebuild joins only the live one.
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
INSERT INTO reuse (tenant, reuse_key, job_id)
VALUES (:tenant, :reuse_key, :id)
ON CONFLICT (tenant, reuse_key) DO UPDATE SET job_id = excluded.job_id, succeeded_id = NULL;

-- name: limited_queues
SELECT q.queue, q.depth_limit FROM queues AS q WHERE q.depth_limit IS NOT NULL;

-- name: waiting_in_queue
-- Count waiting jobs up to a limit. Uses jobs_limited.
SELECT count(*) AS waiting
FROM (SELECT 1 FROM jobs AS j WHERE j.limited = 1 AND j.gate IS NOT NULL AND j.queue = :queue LIMIT :limit);

-- name: set_limited
UPDATE jobs SET limited = 1 WHERE id IN (SELECT value FROM json_each(:ids));
