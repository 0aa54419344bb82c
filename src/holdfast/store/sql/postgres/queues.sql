-- Queues: what an operator set for a named line of jobs.

-- name: set_queue_paused
INSERT INTO holdfast.queues (queue, paused, updated_at)
VALUES (:queue::text, :paused::boolean, holdfast.clock())
ON CONFLICT (queue) DO UPDATE SET paused = excluded.paused, updated_at = excluded.updated_at;

-- name: list_queues
SELECT q.queue, q.paused, q.cap, q.depth_limit, q.updated_at FROM holdfast.queues AS q ORDER BY q.queue;

-- name: set_queue_limits
-- What is to be kept stays as it is, whoever changes the other at the same moment.
INSERT INTO holdfast.queues (queue, cap, depth_limit, updated_at)
VALUES (:queue::text, :cap::integer, :depth_limit::integer, holdfast.clock())
ON CONFLICT (queue) DO UPDATE
SET cap = CASE WHEN :keep_cap::boolean THEN queues.cap ELSE excluded.cap END,
    depth_limit = CASE WHEN :keep_depth::boolean THEN queues.depth_limit ELSE excluded.depth_limit END,
    updated_at = excluded.updated_at;

-- name: claimable_in_queue
-- Whether a capped queue is worth its lock. Uses jobs_claimable.
SELECT 1 AS one FROM holdfast.jobs AS j WHERE j.gate = 'open' AND j.queue = :queue::text LIMIT 1;

-- name: lock_queue
-- Before any lane or job.
SELECT q.queue, q.cap FROM holdfast.queues AS q WHERE q.queue = :queue::text FOR NO KEY UPDATE;

-- name: running_in_queue
-- What runs, orphans included. Uses jobs_running: all that runs, which is little.
SELECT count(*) AS running FROM holdfast.jobs AS j WHERE j.phase IS NOT NULL AND j.status = 'running' AND j.queue = :queue::text;

-- name: count_waiting
-- Let jobs that wait in a queue count against its new depth limit: one bounded step along all jobs. Uses jobs_pkey.
WITH seen AS MATERIALIZED (
  SELECT j.id
  FROM holdfast.jobs AS j
  WHERE j.id > coalesce(:after_id::uuid, '00000000-0000-0000-0000-000000000000')
  ORDER BY j.id
  LIMIT :scan::integer
), waiting AS MATERIALIZED (
  SELECT j.id
  FROM seen AS s
  JOIN holdfast.jobs AS j ON j.id = s.id
  WHERE j.queue = :queue::text
    AND j.gate IS NOT NULL
    AND NOT j.limited
  ORDER BY j.id
  FOR NO KEY UPDATE OF j
), counted AS (
  UPDATE holdfast.jobs AS j SET limited = true FROM waiting AS w WHERE j.id = w.id
)
SELECT (SELECT count(*) FROM seen) AS seen, (SELECT s.id FROM seen AS s ORDER BY s.id DESC LIMIT 1) AS last_id;

-- name: queue_counts
-- How much waits and runs per queue, of one tenant or all; each gate up to :most. Uses the small index of each gate.
SELECT c.queue, c.state, count(*) AS jobs
FROM (
  SELECT * FROM (SELECT j.queue, 'open' AS state FROM holdfast.jobs AS j WHERE j.gate = 'open' AND (:tenant::text IS NULL OR j.tenant = :tenant::text) LIMIT :most::integer) AS x
  UNION ALL
  SELECT * FROM (SELECT j.queue, 'future' AS state FROM holdfast.jobs AS j WHERE j.gate = 'future' AND (:tenant::text IS NULL OR j.tenant = :tenant::text) LIMIT :most::integer) AS x
  UNION ALL
  SELECT * FROM (SELECT j.queue, 'needs' AS state FROM holdfast.jobs AS j WHERE j.gate = 'needs' AND (:tenant::text IS NULL OR j.tenant = :tenant::text) LIMIT :most::integer) AS x
  UNION ALL
  SELECT * FROM (SELECT j.queue, 'lane' AS state FROM holdfast.jobs AS j WHERE j.gate = 'lane' AND (:tenant::text IS NULL OR j.tenant = :tenant::text) LIMIT :most::integer) AS x
  UNION ALL
  SELECT * FROM (SELECT j.queue, 'held' AS state FROM holdfast.jobs AS j WHERE j.gate = 'held' AND (:tenant::text IS NULL OR j.tenant = :tenant::text) LIMIT :most::integer) AS x
  UNION ALL
  SELECT * FROM (SELECT j.queue, 'unresolved' AS state FROM holdfast.jobs AS j WHERE j.gate = 'unresolved' AND (:tenant::text IS NULL OR j.tenant = :tenant::text) LIMIT :most::integer) AS x
  UNION ALL
  SELECT * FROM (SELECT j.queue, 'running' AS state FROM holdfast.jobs AS j WHERE j.phase IS NOT NULL AND j.status = 'running' AND (:tenant::text IS NULL OR j.tenant = :tenant::text) LIMIT :most::integer) AS x) AS c
GROUP BY c.queue, c.state
ORDER BY c.queue, c.state;

-- name: oldest_open
-- For how long the oldest claimable job of each queue has waited, in seconds; of one tenant or all, up to :most jobs.
-- Uses jobs_claimable.
SELECT o.queue, greatest(0, extract(epoch FROM holdfast.clock() - min(o.available_at)))::float8 AS seconds
FROM (
  SELECT j.queue, j.available_at
  FROM holdfast.jobs AS j
  WHERE j.gate = 'open'
    AND (:tenant::text IS NULL OR j.tenant = :tenant::text)
  LIMIT :most::integer) AS o
GROUP BY o.queue
ORDER BY o.queue;
