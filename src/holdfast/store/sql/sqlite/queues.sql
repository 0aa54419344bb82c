-- Queues: the settings that an operator made for a named set of jobs.

-- name: set_queue_paused
INSERT INTO queues (queue, paused, updated_at)
VALUES (:queue, :paused, clock())
ON CONFLICT (queue) DO UPDATE SET paused = excluded.paused, updated_at = excluded.updated_at;

-- name: list_queues
SELECT q.queue, q.paused, q.cap, q.depth_limit, q.updated_at FROM queues AS q ORDER BY q.queue;

-- name: set_queue_limits
-- A limit that this call keeps is taken from the row itself, so that a concurrent change of it is not overwritten.
INSERT INTO queues (queue, cap, depth_limit, updated_at)
VALUES (:queue, :cap, :depth_limit, clock())
ON CONFLICT (queue) DO UPDATE
SET cap = CASE WHEN :keep_cap THEN queues.cap ELSE excluded.cap END,
    depth_limit = CASE WHEN :keep_depth THEN queues.depth_limit ELSE excluded.depth_limit END,
    updated_at = excluded.updated_at;

-- name: claimable_in_queue
-- Whether a capped queue has a claimable job, before it is locked. Uses jobs_claimable.
SELECT 1 AS one FROM jobs AS j WHERE j.gate = 'open' AND j.queue = :queue LIMIT 1;

-- name: lock_queue
-- Locked before any lane or job.
SELECT q.queue, q.paused, q.cap, q.depth_limit FROM queues AS q WHERE q.queue = :queue;

-- name: running_in_queue
-- The number of running jobs, orphans included. Uses jobs_running, a small index of all running jobs.
SELECT count(*) AS running FROM jobs AS j WHERE j.phase IS NOT NULL AND j.status = 'running' AND j.queue = :queue;

-- name: count_waiting
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
  max(0, clock() - min(w.available_at) FILTER (WHERE w.gate = 'open')) / 1000000.0 AS waited
FROM jobs AS w INDEXED BY jobs_waiting
WHERE w.gate IS NOT NULL
GROUP BY w.tenant, w.status, w.queue;

-- name: running_depths
-- How many jobs run, per tenant and queue. Uses jobs_running, a small index of all running jobs.
SELECT r.tenant, r.queue, count(*) AS running
FROM jobs AS r INDEXED BY jobs_running
WHERE r.phase IS NOT NULL
  AND r.status = 'running'
GROUP BY r.tenant, r.queue;
