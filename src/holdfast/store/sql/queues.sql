-- Queues: the settings that an operator made for a named set of jobs.

-- name: set_queue_paused
INSERT INTO holdfast.queues (queue, paused, updated_at)
VALUES (:queue::text, :paused::boolean, holdfast.clock())
ON CONFLICT (queue) DO UPDATE SET paused = excluded.paused, updated_at = excluded.updated_at;

-- name: list_queues
SELECT q.queue, q.paused, q.cap, q.depth_limit, q.updated_at FROM holdfast.queues AS q ORDER BY q.queue;

-- name: set_queue_limits
-- A limit that this call keeps is taken from the row itself, so that a concurrent change of it is not overwritten.
INSERT INTO holdfast.queues (queue, cap, depth_limit, updated_at)
VALUES (:queue::text, :cap::integer, :depth_limit::integer, holdfast.clock())
ON CONFLICT (queue) DO UPDATE
SET cap = CASE WHEN :keep_cap::boolean THEN queues.cap ELSE excluded.cap END,
    depth_limit = CASE WHEN :keep_depth::boolean THEN queues.depth_limit ELSE excluded.depth_limit END,
    updated_at = excluded.updated_at;

-- name: claimable_in_queue
-- Whether a capped queue has a claimable job, before it is locked. Uses jobs_claimable.
SELECT 1 AS one FROM holdfast.jobs AS j WHERE j.gate = 'open' AND j.queue = :queue::text LIMIT 1;

-- name: lock_queue
-- Locked before any lane or job.
SELECT q.queue, q.paused, q.cap, q.depth_limit FROM holdfast.queues AS q WHERE q.queue = :queue::text FOR NO KEY UPDATE;

-- name: running_in_queue
-- The number of running jobs, orphans included. Uses jobs_running, a small index of all running jobs.
SELECT count(*) AS running FROM holdfast.jobs AS j WHERE j.phase IS NOT NULL AND j.status = 'running' AND j.queue = :queue::text;

-- name: count_waiting
-- Let jobs that wait in a queue count against its new depth limit: one bounded step along all jobs. Uses jobs_pkey.
WITH scanned AS MATERIALIZED (
  SELECT j.id
  FROM holdfast.jobs AS j
  WHERE j.id > coalesce(:after_id::uuid, '00000000-0000-0000-0000-000000000000')
  ORDER BY j.id
  LIMIT :scan::integer
), waiting AS MATERIALIZED (
  SELECT j.id
  FROM scanned AS s
  JOIN holdfast.jobs AS j ON j.id = s.id
  WHERE j.queue = :queue::text
    AND j.gate IS NOT NULL
    AND NOT j.limited
  ORDER BY j.id
  FOR NO KEY UPDATE OF j
), counted AS (
  UPDATE holdfast.jobs AS j SET limited = true FROM waiting AS w WHERE j.id = w.id
)
SELECT (SELECT count(*) FROM scanned) AS scanned, (SELECT s.id FROM scanned AS s ORDER BY s.id DESC LIMIT 1) AS last_id;
-- sqlite
-- Let jobs that wait in a queue count against its new depth limit: one bounded step along all jobs. Uses their key.
DELETE FROM affected;
INSERT INTO affected (id) SELECT j.id FROM jobs AS j WHERE j.id > coalesce(:after_id, '') ORDER BY j.id LIMIT :scan;
UPDATE jobs SET limited = 1
WHERE id IN (SELECT id FROM affected) AND queue = :queue AND gate IS NOT NULL AND limited = 0;
SELECT count(*) AS scanned, max(t.id) AS last_id FROM affected AS t;

-- name: waiting_depths
-- How many jobs wait at each gate, per tenant and queue, and how many seconds the oldest claimable job has waited.
-- Reads the whole of jobs_waiting, which has all columns that this needs.
SELECT w.tenant, w.queue,
  count(*) FILTER (WHERE w.gate = 'open') AS open,
  count(*) FILTER (WHERE w.gate = 'future') AS future,
  count(*) FILTER (WHERE w.gate = 'needs') AS needs,
  count(*) FILTER (WHERE w.gate = 'lane') AS lane,
  count(*) FILTER (WHERE w.gate = 'held') AS held,
  count(*) FILTER (WHERE w.gate = 'unresolved') AS unresolved,
  CASE WHEN count(*) FILTER (WHERE w.gate = 'open') > 0
    THEN greatest(0, extract(epoch FROM holdfast.clock() - min(w.available_at) FILTER (WHERE w.gate = 'open')))::float8
  END AS waited
FROM holdfast.jobs AS w /*sqlite INDEXED BY jobs_waiting */
WHERE w.gate IS NOT NULL
GROUP BY w.tenant, w.status, w.queue;

-- name: running_depths
-- How many jobs run, per tenant and queue. Uses jobs_running, a small index of all running jobs.
SELECT r.tenant, r.queue, count(*) AS running
FROM holdfast.jobs AS r /*sqlite INDEXED BY jobs_running */
WHERE r.phase IS NOT NULL
  AND r.status = 'running'
GROUP BY r.tenant, r.queue;
