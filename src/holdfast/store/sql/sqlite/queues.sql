-- Queues: what an operator set for a named line of jobs.

-- name: set_queue_paused
INSERT INTO queues (queue, paused, updated_at)
VALUES (:queue, :paused, clock())
ON CONFLICT (queue) DO UPDATE SET paused = excluded.paused, updated_at = excluded.updated_at;

-- name: list_queues
SELECT q.queue, q.paused, q.cap, q.depth_limit, q.updated_at FROM queues AS q ORDER BY q.queue;

-- name: set_queue_limits
INSERT INTO queues (queue, cap, depth_limit, updated_at)
VALUES (:queue, :cap, :depth_limit, clock())
ON CONFLICT (queue) DO UPDATE
SET cap = excluded.cap,
    depth_limit = excluded.depth_limit,
    updated_at = excluded.updated_at;

-- name: claimable_in_queue
-- Whether a capped queue is worth its lock. Uses jobs_claimable.
SELECT 1 AS one FROM jobs AS j WHERE j.gate = 'open' AND j.queue = :queue LIMIT 1;

-- name: lock_queue
-- Before any lane or job.
SELECT q.queue, q.cap FROM queues AS q WHERE q.queue = :queue;

-- name: running_in_queue
-- What runs, orphans included. Uses jobs_running: all that runs, which is little.
SELECT count(*) AS running FROM jobs AS j WHERE j.phase IS NOT NULL AND j.status = 'running' AND j.queue = :queue;

-- name: count_waiting
-- Let jobs that wait in a queue count against its new depth limit: one bounded step along all jobs. Uses their key.
DELETE FROM told;
INSERT INTO told (id) SELECT j.id FROM jobs AS j WHERE j.id > coalesce(:after_id, '') ORDER BY j.id LIMIT :scan;
UPDATE jobs SET limited = 1
WHERE id IN (SELECT id FROM told) AND queue = :queue AND gate IS NOT NULL AND limited = 0;
SELECT count(*) AS seen, max(t.id) AS last_id FROM told AS t;
