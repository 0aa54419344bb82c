-- Open attempts without an owner: which worker lost them, which can reach them, how they end. Index: jobs_orphaned.

-- fragment: orphan_columns
j.id, j.tenant, j.token, j.attempt, j.domain, j.spent, j.max_attempts, j.last_beat_at

-- name: orphan
-- Clear all leases of a worker that is known to be dead; the jobs stay running and can be adopted. Uses jobs_running.
WITH clock AS MATERIALIZED (
  SELECT holdfast.clock() AS now_at
), owned AS MATERIALIZED (
  SELECT j.id, j.token
  FROM holdfast.jobs AS j
  WHERE j.phase IS NOT NULL
    AND j.status = 'running'
    AND j.owner = :worker::text
  ORDER BY j.id
  FOR NO KEY UPDATE OF j
), handed AS (
  UPDATE holdfast.jobs AS j
  SET {reap_writes}
  FROM owned AS m
  CROSS JOIN clock AS t
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
-- sqlite
DELETE FROM affected;
INSERT INTO affected (id, token)
SELECT j.id, j.token
FROM jobs AS j
WHERE j.phase IS NOT NULL
  AND j.status = 'running'
  AND j.owner = :worker;
UPDATE jobs AS j
SET {reap_writes}
WHERE j.id IN (SELECT id FROM affected);
INSERT INTO events (job_id, seq, at, type, data)
SELECT h.id, h.seq, h.updated_at, 'lease', json_object('lease', 'handed_over', 'worker', :worker, 'token', h.token, 'reason', 'dead')
FROM affected AS t
CROSS JOIN jobs AS h ON h.id = t.id;
SELECT t.id FROM affected AS t;

-- name: owned_leases
-- Which of these leases a worker still holds, with the columns that it needs to release them.
SELECT j.id, j.token, j.tenant, j.lane, j.domain, j.adoptions
FROM :rows AS r(id uuid, token bigint)
JOIN holdfast.jobs AS j ON j.id = r.id AND j.token = r.token
WHERE j.status = 'running'
  AND j.owner = :worker::text
ORDER BY j.id;

-- name: unreachable_orphans
-- Orphans in domains that no worker has had for longer than :grace. A live worker's row expires in the future. Uses
-- jobs_orphaned, as do the next ones: orphans are collected first, because by id the planner would scan all jobs.
WITH reachable AS MATERIALIZED (
  SELECT DISTINCT d.domain AS domain
  FROM holdfast.workers AS w
  CROSS JOIN LATERAL json_array_elements_text(w.domains) AS d(domain)
  WHERE w.expires_at >= holdfast.clock() - make_interval(secs => :grace::float8)
), unowned AS MATERIALIZED (
  SELECT {orphan_columns}
  FROM holdfast.jobs AS j /*sqlite INDEXED BY jobs_orphaned */
  WHERE j.phase IS NOT NULL
    AND j.owner IS NULL
    AND j.status = 'running'
    AND j.domain <> :function::text
    AND j.orphaned_at < holdfast.clock() - make_interval(secs => :grace::float8)
    AND j.domain NOT IN (SELECT r.domain FROM reachable AS r)
)
SELECT u.*, s.policy, holdfast.clock() AS now_at
FROM unowned AS u
JOIN holdfast.specs AS s ON s.id = u.id
WHERE (:after_id::uuid IS NULL OR u.id > :after_id::uuid)
ORDER BY u.id
LIMIT :limit::integer;

-- name: orphaned_functions
-- Orphans of functions that may be settled now, the longest due first. Uses jobs_orphaned.
SELECT {orphan_columns}, j.stop_kind, s.policy, holdfast.clock() AS now_at
FROM holdfast.jobs AS j /*sqlite INDEXED BY jobs_orphaned */
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
  SELECT {orphan_columns}, j.status, j.error_code
  FROM holdfast.jobs AS j /*sqlite INDEXED BY jobs_orphaned */
  WHERE j.phase IS NOT NULL
    AND j.owner IS NULL
    AND j.domain = ANY (:domains::text[])
)
SELECT u.*, s.policy, holdfast.clock() AS now_at
FROM unowned AS u
JOIN holdfast.specs AS s ON s.id = u.id
WHERE (u.status = 'running' OR (u.status = 'paused' AND u.error_code = 'lost'))
  AND (:after_id::uuid IS NULL OR u.id > :after_id::uuid)
ORDER BY u.id
LIMIT :limit::integer;

-- name: recoverable
-- Jobs that are paused as lost in these domains. A paused job has no adopt_after_at. Uses jobs_orphaned.
WITH unowned AS MATERIALIZED (
  SELECT j.id, j.tenant, j.status, j.error_code
  FROM holdfast.jobs AS j /*sqlite INDEXED BY jobs_orphaned */
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
  FROM holdfast.jobs AS j /*sqlite INDEXED BY jobs_orphaned */
  WHERE j.phase IS NOT NULL
    AND j.owner IS NULL
)
SELECT u.id, u.tenant, u.token, u.adoptions
FROM unowned AS u
WHERE u.status = 'running'
  AND u.adoptions >= :adoptions::integer
ORDER BY u.id
LIMIT :limit::integer;
