-- Queues: what an operator set for a named line of jobs.

-- name: set_queue_paused
INSERT INTO queues (queue, paused, updated_at)
VALUES (:queue, :paused, clock())
ON CONFLICT (queue) DO UPDATE SET paused = excluded.paused, updated_at = excluded.updated_at;

-- name: list_queues
SELECT q.queue, q.paused, q.cap, q.depth_limit, q.updated_at FROM queues AS q ORDER BY q.queue;

-- name: set_queue_limits
-- What is to be kept stays as it is, whoever changes the other at the same moment.
INSERT INTO queues (queue, cap, depth_limit, updated_at)
VALUES (:queue, :cap, :depth_limit, clock())
ON CONFLICT (queue) DO UPDATE
SET cap = CASE WHEN :keep_cap THEN queues.cap ELSE excluded.cap END,
    depth_limit = CASE WHEN :keep_depth THEN queues.depth_limit ELSE excluded.depth_limit END,
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

-- name: queue_counts
-- How much waits and runs per queue, of one tenant or all; each gate up to :most. Uses the small index of each gate.
SELECT c.queue, c.state, count(*) AS jobs
FROM (
  SELECT * FROM (SELECT j.queue, 'open' AS state FROM jobs AS j INDEXED BY jobs_claimable WHERE j.gate = 'open' AND (:tenant IS NULL OR j.tenant = :tenant) LIMIT :most) AS x
  UNION ALL
  SELECT * FROM (SELECT j.queue, 'future' AS state FROM jobs AS j WHERE j.gate = 'future' AND (:tenant IS NULL OR j.tenant = :tenant) LIMIT :most) AS x
  UNION ALL
  SELECT * FROM (SELECT j.queue, 'needs' AS state FROM jobs AS j WHERE j.gate = 'needs' AND (:tenant IS NULL OR j.tenant = :tenant) LIMIT :most) AS x
  UNION ALL
  SELECT * FROM (SELECT j.queue, 'lane' AS state FROM jobs AS j WHERE j.gate = 'lane' AND (:tenant IS NULL OR j.tenant = :tenant) LIMIT :most) AS x
  UNION ALL
  SELECT * FROM (SELECT j.queue, 'held' AS state FROM jobs AS j WHERE j.gate = 'held' AND (:tenant IS NULL OR j.tenant = :tenant) LIMIT :most) AS x
  UNION ALL
  SELECT * FROM (SELECT j.queue, 'unresolved' AS state FROM jobs AS j INDEXED BY jobs_unresolved WHERE j.gate = 'unresolved' AND (:tenant IS NULL OR j.tenant = :tenant) LIMIT :most) AS x
  UNION ALL
  SELECT * FROM (SELECT j.queue, 'running' AS state FROM jobs AS j WHERE j.phase IS NOT NULL AND j.status = 'running' AND (:tenant IS NULL OR j.tenant = :tenant) LIMIT :most) AS x) AS c
GROUP BY c.queue, c.state
ORDER BY c.queue, c.state;

-- name: oldest_open
-- For how long the oldest claimable job of each queue has waited, in seconds; of one tenant or all, up to :most jobs.
-- Uses jobs_claimable.
SELECT o.queue, max(0, clock() - min(o.waits_from)) / 1000000.0 AS seconds
FROM (
  SELECT j.queue, j.available_at AS waits_from
  FROM jobs AS j INDEXED BY jobs_claimable
  WHERE j.gate = 'open'
    AND (:tenant IS NULL OR j.tenant = :tenant)
  LIMIT :most) AS o
GROUP BY o.queue
ORDER BY o.queue;
