-- Open attempts without an owner: which worker lost them, which can reach them, how they end. Index: jobs_orphaned.

-- name: orphan
-- Clear all leases of a worker that is known to be dead; the jobs stay running and can be adopted. Uses jobs_running.
WITH owned AS MATERIALIZED (
  SELECT j.id, j.token
  FROM holdfast.jobs AS j
  WHERE j.phase IS NOT NULL
    AND j.status = 'running'
    AND j.owner = :worker::text
  ORDER BY j.id
  FOR NO KEY UPDATE OF j
), handed AS (
  UPDATE holdfast.jobs AS j
  SET owner = NULL,
      token = j.token + 1,
      lease_expires_at = NULL,
      orphaned_at = greatest(holdfast.clock(), j.updated_at),
      adopt_after_at = holdfast.clock() + make_interval(secs => CASE
        WHEN j.adoptions = 0 THEN 0
        ELSE least(:cap::float8, :base::float8 * power(2, least(j.adoptions, 30) - 1))
      END),
      updated_at = greatest(holdfast.clock(), j.updated_at),
      seq = j.seq + 1
  FROM owned AS m
  WHERE j.id = m.id
    AND j.token = m.token
    AND j.owner = :worker::text
  RETURNING j.id, j.seq, j.updated_at, j.token
), new_events AS (
  INSERT INTO holdfast.events (job_id, seq, at, type, data)
  SELECT h.id, h.seq, h.updated_at, 'lease',
    json_build_object('lease', 'handed_over', 'worker', :worker::text, 'token', h.token, 'reason', 'dead')
  FROM handed AS h
)
SELECT h.id FROM handed AS h;

-- name: owned_leases
-- Which of these leases a worker still holds, with the columns that it needs to release them.
SELECT j.id, j.token, j.tenant, j.lane, j.domain, j.adoptions
FROM holdfast.jobs AS j
JOIN :rows AS r(id uuid, token bigint) ON r.id = j.id AND r.token = j.token
WHERE j.status = 'running'
  AND j.owner = :worker::text
ORDER BY j.id;

-- name: unreachable_orphans
-- Orphans in domains that no worker has had for longer than :grace. A live worker's row expires in the future. Uses
-- jobs_orphaned, as do the next ones: orphans are collected first, because by id the planner would scan all jobs.
WITH reachable AS MATERIALIZED (
  SELECT DISTINCT d.domain
  FROM holdfast.workers AS w
  CROSS JOIN LATERAL json_array_elements_text(w.domains) AS d(domain)
  WHERE w.expires_at >= holdfast.clock() - make_interval(secs => :grace::float8)
), unowned AS MATERIALIZED (
  SELECT j.id, j.tenant, j.token, j.attempt, j.domain, j.spent, j.max_attempts, j.last_beat_at
  FROM holdfast.jobs AS j
  WHERE j.phase IS NOT NULL
    AND j.owner IS NULL
    AND j.status = 'running'
    AND j.domain <> :function::text
    AND j.orphaned_at < holdfast.clock() - make_interval(secs => :grace::float8)
    AND j.domain NOT IN (SELECT r.domain FROM reachable AS r)
)
SELECT j.id, j.tenant, j.token, j.attempt, j.domain, j.spent, j.max_attempts, s.policy, j.last_beat_at,
  holdfast.clock() AS now_at
FROM unowned AS j
JOIN holdfast.specs AS s ON s.id = j.id
WHERE (:after_id::uuid IS NULL OR j.id > :after_id::uuid)
ORDER BY j.id
LIMIT :limit::integer;

-- name: orphaned_functions
-- Orphans of functions that may be settled now, the longest due first. Uses jobs_orphaned.
SELECT j.id, j.tenant, j.token, j.attempt, j.domain, j.spent, j.max_attempts, s.policy, j.last_beat_at, j.stop_kind,
  holdfast.clock() AS now_at
FROM holdfast.jobs AS j
JOIN holdfast.specs AS s ON s.id = j.id
WHERE j.phase IS NOT NULL
  AND j.owner IS NULL
  AND j.status = 'running'
  AND j.domain = :function::text
  AND j.adopt_after_at <= holdfast.clock()
ORDER BY j.adopt_after_at, j.id
LIMIT :limit::integer;

-- name: open_in_domains
-- Orphans, and jobs that are paused as lost, in these domains. Uses jobs_orphaned.
WITH unowned AS MATERIALIZED (
  SELECT j.id, j.tenant, j.token, j.attempt, j.domain, j.spent, j.max_attempts, j.last_beat_at, j.status, j.error_code
  FROM holdfast.jobs AS j
  WHERE j.phase IS NOT NULL
    AND j.owner IS NULL
    AND j.domain = ANY (:domains::text[])
)
SELECT j.id, j.tenant, j.token, j.attempt, j.domain, j.spent, j.max_attempts, s.policy, j.last_beat_at,
  holdfast.clock() AS now_at
FROM unowned AS j
JOIN holdfast.specs AS s ON s.id = j.id
WHERE (j.status = 'running' OR (j.status = 'paused' AND j.error_code = 'lost'))
  AND (:after_id::uuid IS NULL OR j.id > :after_id::uuid)
ORDER BY j.id
LIMIT :limit::integer;

-- name: recoverable
-- Jobs that are paused as lost in these domains. A paused job has no adopt_after_at. Uses jobs_orphaned.
WITH unowned AS MATERIALIZED (
  SELECT j.id, j.tenant, j.status, j.error_code
  FROM holdfast.jobs AS j
  WHERE j.phase IS NOT NULL
    AND j.owner IS NULL
    AND j.domain = ANY (:domains::text[])
    AND j.adopt_after_at IS NULL
)
SELECT u.id, u.tenant
FROM unowned AS u
WHERE u.status = 'paused'
  AND u.error_code = 'lost'
ORDER BY u.id
LIMIT :limit::integer;

-- name: failing_orphans
-- Orphans that were adopted repeatedly without progress. Uses jobs_orphaned.
WITH unowned AS MATERIALIZED (
  SELECT j.id, j.tenant, j.token, j.adoptions, j.status
  FROM holdfast.jobs AS j
  WHERE j.phase IS NOT NULL
    AND j.owner IS NULL
)
SELECT j.id, j.tenant, j.token, j.adoptions
FROM unowned AS j
WHERE j.status = 'running'
  AND j.adoptions >= :adoptions::integer
ORDER BY j.id
LIMIT :limit::integer;
