-- Open attempts without an owner: which worker lost them, which can reach them, how they end. Index: jobs_orphaned.

-- name: orphan
-- Clear all leases of a worker that is known to be dead; the jobs stay running and can be adopted. Uses jobs_running.
DELETE FROM affected;
INSERT INTO affected (id, token)
SELECT j.id, j.token
FROM jobs AS j
WHERE j.phase IS NOT NULL
  AND j.status = 'running'
  AND j.owner = :worker;
UPDATE jobs
SET owner = NULL,
    token = token + 1,
    lease_expires_at = NULL,
    orphaned_at = max(clock(), updated_at),
    adopt_after_at = clock() + CAST(1000000 * CASE
      WHEN adoptions = 0 THEN 0
      ELSE min(:cap, :base * (1 << (min(adoptions, 30) - 1)))
    END AS INTEGER),
    updated_at = max(clock(), updated_at),
    seq = seq + 1
WHERE id IN (SELECT id FROM affected);
INSERT INTO events (job_id, seq, at, type, data)
SELECT h.id, h.seq, h.updated_at, 'lease', json_object('lease', 'handed_over', 'worker', :worker, 'token', h.token, 'reason', 'dead')
FROM affected AS t
CROSS JOIN jobs AS h ON h.id = t.id;
SELECT t.id FROM affected AS t;

-- name: owned_leases
-- Which of these leases a worker still holds, with the columns that it needs to release them.
SELECT j.id, j.token, j.tenant, j.lane, j.domain, j.adoptions
FROM json_each(:rows) AS r
JOIN jobs AS j ON j.id = r.value ->> 'id' AND j.token = r.value ->> 'token'
WHERE j.status = 'running'
  AND j.owner = :worker
ORDER BY j.id;

-- name: unreachable_orphans
-- Orphans in domains that no worker has had for longer than :grace. A live worker's row expires in the future.
SELECT j.id, j.tenant, j.token, j.attempt, j.domain, j.spent, j.max_attempts, s.policy, j.last_beat_at, clock() AS now_at
FROM jobs AS j INDEXED BY jobs_orphaned
CROSS JOIN specs AS s ON s.id = j.id
WHERE j.phase IS NOT NULL
  AND j.owner IS NULL
  AND j.status = 'running'
  AND j.domain <> :function
  AND j.orphaned_at < clock() - CAST(:grace * 1000000 AS INTEGER)
  AND j.domain NOT IN (
    SELECT d.value
    FROM workers AS w
    CROSS JOIN json_each(w.domains) AS d
    WHERE w.expires_at >= clock() - CAST(:grace * 1000000 AS INTEGER))
  AND (:after_id IS NULL OR j.id > :after_id)
ORDER BY j.id
LIMIT :limit;

-- name: orphaned_functions
-- Orphans of functions that may be settled now, the longest due first. Uses jobs_orphaned.
SELECT j.id, j.tenant, j.token, j.attempt, j.domain, j.spent, j.max_attempts, s.policy, j.last_beat_at, j.stop_kind,
  clock() AS now_at
FROM jobs AS j INDEXED BY jobs_orphaned
JOIN specs AS s ON s.id = j.id
WHERE j.phase IS NOT NULL
  AND j.owner IS NULL
  AND j.status = 'running'
  AND j.domain = :function
  AND j.adopt_after_at <= clock()
ORDER BY j.adopt_after_at, j.id
LIMIT :limit;

-- name: open_in_domains
-- Orphans, and jobs that are paused as lost, in these domains.
SELECT j.id, j.tenant, j.token, j.attempt, j.domain, j.spent, j.max_attempts, s.policy, j.last_beat_at, clock() AS now_at
FROM jobs AS j INDEXED BY jobs_orphaned
CROSS JOIN specs AS s ON s.id = j.id
WHERE j.phase IS NOT NULL
  AND j.owner IS NULL
  AND j.domain IN (SELECT value FROM json_each(:domains))
  AND (j.status = 'running' OR (j.status = 'paused' AND j.error_code = 'lost'))
  AND (:after_id IS NULL OR j.id > :after_id)
ORDER BY j.id
LIMIT :limit;

-- name: recoverable
-- Jobs that are paused as lost in these domains. A paused job has no adopt_after_at.
SELECT j.id, j.tenant
FROM jobs AS j INDEXED BY jobs_orphaned
WHERE j.phase IS NOT NULL
  AND j.owner IS NULL
  AND j.domain IN (SELECT value FROM json_each(:domains))
  AND j.adopt_after_at IS NULL
  AND j.status = 'paused'
  AND j.error_code = 'lost'
ORDER BY j.id
LIMIT :limit;

-- name: failing_orphans
-- Orphans that were adopted repeatedly without progress.
SELECT j.id, j.tenant, j.token, j.adoptions
FROM jobs AS j INDEXED BY jobs_orphaned
WHERE j.phase IS NOT NULL
  AND j.owner IS NULL
  AND j.status = 'running'
  AND j.adoptions >= :adoptions
ORDER BY j.id
LIMIT :limit;
