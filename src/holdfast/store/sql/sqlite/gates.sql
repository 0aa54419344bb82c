-- Gates are resolved when they change. Differs: one writer at a time, so the locks of Postgres are plain reads here.

-- name: promote
-- Move due jobs from gate `future` to `open`, or to `unresolved` where a lane decides. Uses jobs_future.
-- precheck
SELECT 1 FROM jobs AS j WHERE j.gate = 'future' AND j.available_at <= clock() LIMIT 1;
UPDATE jobs
SET gate = CASE WHEN lane IS NULL THEN 'open' ELSE 'unresolved' END
WHERE id IN (
  SELECT j.id
  FROM jobs AS j
  WHERE j.gate = 'future'
    AND j.available_at <= clock()
  ORDER BY j.available_at
  LIMIT :limit)
RETURNING id, queue, gate;

-- name: unresolved_lanes
-- Lanes with unresolved jobs. Uses jobs_unresolved.
SELECT DISTINCT j.tenant, j.lane
FROM jobs AS j INDEXED BY jobs_unresolved
WHERE j.gate = 'unresolved'
  AND j.lane IS NOT NULL
ORDER BY j.tenant, j.lane
LIMIT :limit;

-- name: unresolved_jobs
-- Unresolved jobs without a lane. Uses jobs_unresolved.
SELECT j.id
FROM jobs AS j INDEXED BY jobs_unresolved
WHERE j.gate = 'unresolved'
  AND j.lane IS NULL
ORDER BY j.id
LIMIT :limit;

-- name: unresolved_in_lane
-- All visible unresolved jobs of a lane, in the order in which they were accepted. Uses jobs_unresolved.
SELECT j.id, j.has_needs
FROM jobs AS j INDEXED BY jobs_unresolved
WHERE j.gate = 'unresolved'
  AND j.tenant = :tenant
  AND j.lane = :lane
ORDER BY j.requested_at, j.id
LIMIT :limit;

-- name: lock_with_needs
-- Lock jobs and the jobs they wait for, all in id order.
SELECT j.id, j.gate
FROM jobs AS j
WHERE j.id IN (SELECT value FROM json_each(:ids))
ORDER BY j.id;

-- name: lock_jobs
SELECT j.id
FROM jobs AS j
WHERE j.id IN (SELECT value FROM json_each(:ids))
ORDER BY j.id;

-- name: satisfy_needs
UPDATE needs
SET satisfied = 1
WHERE job_id IN (SELECT value FROM json_each(:ids))
  AND satisfied = 0
  AND need_id IN (
    SELECT p.id FROM needs AS n
    JOIN jobs AS p ON p.id = n.need_id
    WHERE n.job_id IN (SELECT value FROM json_each(:ids)) AND p.status = 'succeeded');

-- name: set_has_dependants
-- Mark, under its lock, a job that has waiting dependants: its end then sets `unsettled`.
UPDATE jobs
SET has_dependants = 1
WHERE has_dependants = 0
  AND id IN (
    SELECT n.need_id FROM needs AS n
    WHERE n.satisfied = 0
      AND n.job_id IN (SELECT value FROM json_each(:ids)));

-- name: broken_needs
-- Waiting jobs among these with a need that cannot succeed: it failed, was cancelled or was deleted.
-- Differs: next to a min(), SQLite takes the other columns from the row with the minimum.
SELECT n.job_id AS id, min(n.need_id) AS need_id, p.status AS need_status, p.error_message AS need_error
FROM needs AS n
JOIN jobs AS j ON j.id = n.job_id
LEFT JOIN jobs AS p ON p.id = n.need_id
WHERE n.job_id IN (SELECT value FROM json_each(:ids))
  AND n.satisfied = 0
  AND j.status IN ('pending', 'queued')
  AND j.gate = 'unresolved'
  AND (p.id IS NULL OR p.status IN ('failed', 'timed_out', 'cancelled'))
GROUP BY n.job_id
ORDER BY n.job_id;

-- name: fail_dependants
DELETE FROM affected;
INSERT INTO affected (id)
SELECT j.id
FROM json_each(:rows) AS r
JOIN jobs AS j ON j.id = r.value ->> 'id'
WHERE j.status IN ('pending', 'queued');
UPDATE jobs
SET status = 'failed',
    gate = NULL,
    finished_at = max(clock(), updated_at),
    updated_at = max(clock(), updated_at),
    queue_deadline_at = NULL,
    unsettled = unsettled OR has_dependants,
    error_code = 'dependency_failed',
    error_message = r.value ->> 'message',
    seq = seq + 1
FROM json_each(:rows) AS r
WHERE jobs.id = r.value ->> 'id'
  AND jobs.id IN (SELECT t.id FROM affected AS t);
INSERT INTO events (job_id, seq, at, type, data)
SELECT f.id, f.seq, f.updated_at, 'status',
  json_object('status', 'failed', 'code', 'dependency_failed', 'message', f.error_message, 'need', r.value ->> 'need_id')
FROM affected AS t
CROSS JOIN jobs AS f ON f.id = t.id
JOIN json_each(:rows) AS r ON r.value ->> 'id' = t.id;
-- moves
SELECT f.id, f.tenant, f.queue, CASE WHEN f.held THEN 'pending' ELSE 'queued' END AS old_status, 'failed' AS new_status, f.seq, f.updated_at AS changed_at
FROM affected AS t
CROSS JOIN jobs AS f ON f.id = t.id;
SELECT f.id, f.has_dependants FROM affected AS t CROSS JOIN jobs AS f ON f.id = t.id;

-- name: set_lane_positions
-- Give a position to jobs that have none, in the order given; the lane's row is locked.
DELETE FROM affected;
INSERT INTO affected (id, token)
SELECT j.id, row_number() OVER (ORDER BY e.key)
FROM json_each(:ids) AS e
JOIN jobs AS j ON j.id = e.value
WHERE j.lane_position IS NULL;
UPDATE jobs
SET lane_position = (SELECT l.next_position FROM lanes AS l WHERE l.tenant = :tenant AND l.lane = :lane) + t.token - 1
FROM affected AS t
WHERE jobs.id = t.id;
UPDATE lanes
SET next_position = next_position + (SELECT count(*) FROM affected)
WHERE tenant = :tenant
  AND lane = :lane;

-- name: set_gates
-- Check the gates in order: held, needs, due, lane.
UPDATE jobs
SET gate = CASE
  WHEN status = 'pending' THEN 'held'
  WHEN has_needs AND EXISTS (SELECT 1 FROM needs AS n WHERE n.job_id = jobs.id AND n.satisfied = 0) THEN 'needs'
  WHEN available_at > clock() THEN 'future'
  WHEN lane IS NOT NULL THEN 'lane'
  ELSE 'open'
END
WHERE id IN (SELECT value FROM json_each(:ids))
  AND gate = 'unresolved'
RETURNING id, queue, gate;

-- name: job_seq
SELECT j.seq FROM jobs AS j WHERE j.id = :id;

-- name: unsettled_jobs
-- Jobs whose last change has not been applied to their dependants. Uses jobs_unsettled.
SELECT j.id FROM jobs AS j WHERE j.unsettled = 1 ORDER BY j.id LIMIT :limit;

-- name: unsettled_among
SELECT j.id FROM jobs AS j WHERE j.id IN (SELECT value FROM json_each(:ids)) AND j.unsettled = 1 ORDER BY j.id;

-- name: open_dependants
-- Dependants of a job that wait for it, or that failed because of a need. Uses needs_open.
SELECT j.id, j.tenant, j.lane
FROM needs AS n
JOIN jobs AS j ON j.id = n.job_id
WHERE n.need_id = :id
  AND n.satisfied = 0
  AND (j.gate IN ('needs', 'held') OR (j.status = 'failed' AND j.error_code = 'dependency_failed'))
  AND j.id > coalesce(:after_id, '')
ORDER BY j.id
LIMIT :limit;

-- name: unsettle_dependants
-- Mark waiting dependants of an ended job as unresolved; the dependants of a job that is live again keep waiting.
UPDATE jobs
SET gate = 'unresolved'
WHERE id IN (SELECT value FROM json_each(:ids))
  AND gate IN ('needs', 'held')
  AND EXISTS (
    SELECT 1 FROM jobs AS p
    WHERE p.id = :id AND p.status IN ('succeeded', 'failed', 'timed_out', 'cancelled'));

-- name: revive_dependants
-- Requeue jobs that failed only because of needs that no longer block them.
DELETE FROM affected;
INSERT INTO affected (id)
SELECT j.id
FROM jobs AS j
WHERE j.id IN (SELECT value FROM json_each(:ids))
  AND j.status = 'failed'
  AND j.error_code = 'dependency_failed'
  AND j.stop_kind IS NULL
  AND NOT EXISTS (
    SELECT 1 FROM needs AS n
    LEFT JOIN jobs AS p ON p.id = n.need_id
    WHERE n.job_id = j.id
      AND n.satisfied = 0
      AND (p.id IS NULL OR p.status IN ('failed', 'timed_out', 'cancelled')));
UPDATE jobs
SET status = CASE WHEN held THEN 'pending' ELSE 'queued' END,
    gate = 'unresolved',
    dismissed = 0,
    finished_at = NULL,
    updated_at = max(clock(), updated_at),
    queue_deadline_at = CASE WHEN NOT held THEN max(clock(), available_at) + (
      SELECT CAST((s.policy ->> 'queue_timeout') * 1000000 AS INTEGER) FROM specs AS s WHERE s.id = jobs.id) END,
    error_code = NULL,
    error_message = NULL,
    unsettled = unsettled OR has_dependants,
    seq = seq + 1
WHERE id IN (SELECT id FROM affected);
INSERT INTO events (job_id, seq, at, type, data)
SELECT r.id, r.seq, r.updated_at, 'status', json_object('status', r.status, 'revived_by', :id)
FROM affected AS t
CROSS JOIN jobs AS r ON r.id = t.id;
-- moves
SELECT r.id, r.tenant, r.queue, 'failed' AS old_status, r.status AS new_status, r.seq, r.updated_at AS changed_at
FROM affected AS t
CROSS JOIN jobs AS r ON r.id = t.id;
SELECT t.id FROM affected AS t;

-- name: settled
-- Mark a job as settled, unless it changed again meanwhile.
UPDATE jobs SET unsettled = 0 WHERE id = :id AND unsettled = 1 AND seq = :seq;

-- name: stuck_gates
-- Gates that nothing will ever open. Empty unless there is a bug: each row that is found and repaired is counted.
SELECT 'lane' AS what, l.tenant, l.lane, NULL AS id
FROM lanes AS l
LEFT JOIN jobs AS h ON h.id = l.holder
WHERE (l.holder IS NOT NULL AND (h.id IS NULL OR h.status NOT IN ('queued', 'running')))
   OR (l.holder IS NULL
       AND l.paused = 0
       AND EXISTS (
         SELECT 1 FROM jobs AS w WHERE w.gate = 'lane' AND w.tenant = l.tenant AND w.lane = l.lane)
       AND NOT EXISTS ( -- resolving it will move the lane
         SELECT 1 FROM jobs AS u INDEXED BY jobs_unresolved
         WHERE u.gate = 'unresolved' AND u.tenant = l.tenant AND u.lane = l.lane)
       AND NOT EXISTS (
         SELECT 1 FROM jobs AS b
         WHERE b.tenant = l.tenant AND b.lane = l.lane AND b.lane IS NOT NULL AND b.started_at IS NOT NULL
           AND b.dismissed = 0 AND (b.status = 'paused' OR b.status = 'failed' OR b.status = 'timed_out')))
UNION ALL
SELECT 'holder', j.tenant, j.lane, j.id
FROM jobs AS j INDEXED BY jobs_claimable
CROSS JOIN lanes AS l ON l.tenant = j.tenant AND l.lane = j.lane
WHERE j.gate = 'open'
  AND j.lane IS NOT NULL
  AND (l.holder IS NOT j.id OR l.paused = 1)
UNION ALL
SELECT 'needs', j.tenant, j.lane, j.id
FROM jobs AS j INDEXED BY jobs_needs_waiting
WHERE j.gate = 'needs'
  AND NOT EXISTS (
    SELECT 1 FROM needs AS n
    JOIN jobs AS p ON p.id = n.need_id
    WHERE n.job_id = j.id
      AND n.satisfied = 0
      AND (p.unsettled = 1 OR (p.has_dependants = 1 AND p.status NOT IN ('succeeded', 'failed', 'timed_out', 'cancelled'))))
LIMIT :limit;

-- name: unresolve
-- Mark a job with a stuck gate as unresolved.
UPDATE jobs
SET gate = 'unresolved'
WHERE id = :id
  AND gate IN ('needs', 'open', 'lane')
RETURNING id;

-- name: wait_for_locks
-- Set how long the rest of this transaction waits for a lock; 0 means without limit.
-- Differs: there is only one writer, so there is no lock to wait for.
SELECT :seconds AS lock_timeout;
