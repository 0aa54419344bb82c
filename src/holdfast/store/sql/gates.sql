-- Gates are resolved when they change. One statement locks; the next ones read with a fresh snapshot.
-- SQLite has one writer at a time, so a lock is a plain read there.

-- name: promote
-- Move due jobs from gate `future` to `open`, or to `unresolved` where a lane decides. Uses jobs_future.
WITH due AS MATERIALIZED (
  SELECT j.id
  FROM holdfast.jobs AS j
  WHERE j.gate = 'future'
    AND j.available_at <= holdfast.clock()
  ORDER BY j.available_at
  LIMIT :limit::integer
  FOR NO KEY UPDATE SKIP LOCKED
)
UPDATE holdfast.jobs AS j
SET gate = CASE WHEN j.lane IS NULL THEN 'open' ELSE 'unresolved' END
FROM due AS d
WHERE j.id = d.id
RETURNING j.id, j.queue, j.gate;
-- sqlite precheck
SELECT 1 FROM jobs AS j WHERE j.gate = 'future' AND j.available_at <= clock() LIMIT 1;

-- name: unresolved_lanes
-- Lanes with unresolved jobs. Uses jobs_unresolved.
SELECT DISTINCT j.tenant, j.lane
FROM holdfast.jobs AS j /*sqlite INDEXED BY jobs_unresolved */
WHERE j.gate = 'unresolved'
  AND j.lane IS NOT NULL
ORDER BY j.tenant, j.lane
LIMIT :limit::integer;

-- name: unresolved_jobs
-- Unresolved jobs without a lane. Uses jobs_unresolved.
SELECT j.id
FROM holdfast.jobs AS j /*sqlite INDEXED BY jobs_unresolved */
WHERE j.gate = 'unresolved'
  AND j.lane IS NULL
ORDER BY j.id
LIMIT :limit::integer;

-- name: unresolved_in_lane
-- All visible unresolved jobs of a lane, in the order in which they were accepted. Uses jobs_unresolved.
SELECT j.id, j.has_needs
FROM holdfast.jobs AS j /*sqlite INDEXED BY jobs_unresolved */
WHERE j.gate = 'unresolved'
  AND j.tenant = :tenant::text
  AND j.lane = :lane::text
ORDER BY j.requested_at, j.id
LIMIT :limit::integer;

-- name: lock_with_needs
-- Lock jobs and the jobs they wait for, all in id order.
SELECT j.id, j.gate
FROM holdfast.jobs AS j
WHERE j.id IN (
  SELECT e::uuid FROM json_array_elements_text(:ids::json) AS e
  UNION
  SELECT n.need_id FROM holdfast.needs AS n
  WHERE NOT n.satisfied
    AND n.job_id IN (SELECT e::uuid FROM json_array_elements_text(:ids::json) AS e))
ORDER BY j.id
FOR NO KEY UPDATE;

-- name: lock_jobs
SELECT j.id
FROM holdfast.jobs AS j
WHERE j.id IN (SELECT e::uuid FROM json_array_elements_text(:ids::json) AS e)
ORDER BY j.id
FOR NO KEY UPDATE;

-- name: satisfy_needs
UPDATE holdfast.needs AS n
SET satisfied = true
FROM holdfast.jobs AS p
WHERE n.job_id IN (SELECT e::uuid FROM json_array_elements_text(:ids::json) AS e)
  AND NOT n.satisfied
  AND p.id = n.need_id
  AND p.status = 'succeeded';
-- sqlite
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
UPDATE holdfast.jobs AS p
SET has_dependants = true
WHERE NOT p.has_dependants
  AND p.id IN (
    SELECT n.need_id FROM holdfast.needs AS n
    WHERE NOT n.satisfied
      AND n.job_id IN (SELECT e::uuid FROM json_array_elements_text(:ids::json) AS e));

-- name: broken_needs
-- Waiting jobs among these with a need that cannot succeed: it failed, was cancelled or was deleted.
SELECT DISTINCT ON (n.job_id) n.job_id AS id, n.need_id, p.status AS need_status, p.error_message AS need_error
FROM holdfast.needs AS n
JOIN holdfast.jobs AS j ON j.id = n.job_id
LEFT JOIN holdfast.jobs AS p ON p.id = n.need_id
WHERE n.job_id IN (SELECT e::uuid FROM json_array_elements_text(:ids::json) AS e)
  AND NOT n.satisfied
  AND j.status IN ({waiting})
  AND j.gate = 'unresolved'
  AND (p.id IS NULL OR p.status IN ({broken}))
ORDER BY n.job_id, n.need_id;
-- sqlite
-- Differs: next to a min(), SQLite takes the other columns from the row with the minimum.
SELECT n.job_id AS id, min(n.need_id) AS need_id, p.status AS need_status, p.error_message AS need_error
FROM needs AS n
JOIN jobs AS j ON j.id = n.job_id
LEFT JOIN jobs AS p ON p.id = n.need_id
WHERE n.job_id IN (SELECT value FROM json_each(:ids))
  AND n.satisfied = 0
  AND j.status IN ({waiting})
  AND j.gate = 'unresolved'
  AND (p.id IS NULL OR p.status IN ({broken}))
GROUP BY n.job_id
ORDER BY n.job_id;

-- name: fail_dependants
WITH clock AS MATERIALIZED (
  SELECT holdfast.clock() AS now_at
), failed AS (
  UPDATE holdfast.jobs AS j
  SET {fail_writes}
  FROM json_to_recordset(:rows::json) AS r(id uuid, need_id uuid, message text)
  CROSS JOIN clock AS t
  WHERE j.id = r.id
    AND j.status IN ({waiting})
  RETURNING j.id, j.tenant, j.queue, j.held, j.seq, j.updated_at, j.has_dependants, r.need_id, r.message
), new_events AS (
  INSERT INTO holdfast.events (job_id, seq, at, type, data)
  SELECT f.id, f.seq, f.updated_at, 'status',
    json_build_object('status', 'failed', 'code', 'dependency_failed', 'message', f.message, 'need', f.need_id)
  FROM failed AS f
), moves AS (
  SELECT f.id, f.tenant, f.queue, CASE WHEN f.held THEN 'pending' ELSE 'queued' END AS old_status, 'failed' AS new_status, f.seq, f.updated_at AS changed_at
  FROM failed AS f
)
SELECT f.id, f.has_dependants FROM failed AS f;
-- sqlite
DELETE FROM broken;
-- each: rows
INSERT INTO broken (id, need_id, message)
SELECT j.id, :need_id, :message FROM jobs AS j WHERE j.id = :id AND j.status IN ({waiting});
UPDATE jobs AS j
SET {fail_writes}
FROM broken AS r
WHERE j.id = r.id;
INSERT INTO events (job_id, seq, at, type, data)
SELECT f.id, f.seq, f.updated_at, 'status',
  json_object('status', 'failed', 'code', 'dependency_failed', 'message', f.error_message, 'need', r.need_id)
FROM broken AS r
CROSS JOIN jobs AS f ON f.id = r.id;
-- moves
SELECT f.id, f.tenant, f.queue, CASE WHEN f.held THEN 'pending' ELSE 'queued' END AS old_status, 'failed' AS new_status, f.seq, f.updated_at AS changed_at
FROM broken AS r
CROSS JOIN jobs AS f ON f.id = r.id;
SELECT f.id, f.has_dependants FROM broken AS r CROSS JOIN jobs AS f ON f.id = r.id;

-- name: set_lane_positions
-- Give a position to jobs that have none, in the order given; the lane's row is locked.
WITH ordered AS MATERIALIZED (
  SELECT j.id, row_number() OVER (ORDER BY e.n) AS ordinal
  FROM json_array_elements_text(:ids::json) WITH ORDINALITY AS e(id, n)
  JOIN holdfast.jobs AS j ON j.id = e.id::uuid
  WHERE j.lane_position IS NULL
), taken AS (
  UPDATE holdfast.lanes AS l
  SET next_position = l.next_position + (SELECT count(*) FROM ordered)
  WHERE l.tenant = :tenant::text
    AND l.lane = :lane::text
  RETURNING l.next_position - (SELECT count(*) FROM ordered) AS base
)
UPDATE holdfast.jobs AS j
SET lane_position = t.base + p.ordinal - 1
FROM ordered AS p
CROSS JOIN taken AS t
WHERE j.id = p.id;
-- sqlite
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
UPDATE holdfast.jobs AS j
SET gate = CASE
  WHEN j.status = 'pending' THEN 'held'
  WHEN j.has_needs AND EXISTS (SELECT 1 FROM holdfast.needs AS n WHERE n.job_id = j.id AND NOT n.satisfied) THEN 'needs'
  WHEN j.available_at > holdfast.clock() THEN 'future'
  WHEN j.lane IS NOT NULL THEN 'lane'
  ELSE 'open'
END
WHERE j.id IN (SELECT e::uuid FROM json_array_elements_text(:ids::json) AS e)
  AND j.gate = 'unresolved'
RETURNING j.id, j.queue, j.gate;

-- name: job_seq
SELECT j.seq FROM holdfast.jobs AS j WHERE j.id = :id::uuid;

-- name: unsettled_jobs
-- Jobs whose last change has not been applied to their dependants. Uses jobs_unsettled.
SELECT j.id FROM holdfast.jobs AS j WHERE j.unsettled /*sqlite = 1 */ ORDER BY j.id LIMIT :limit::integer;

-- name: unsettled_among
SELECT j.id
FROM holdfast.jobs AS j
WHERE j.id IN (SELECT e::uuid FROM json_array_elements_text(:ids::json) AS e)
  AND j.unsettled
ORDER BY j.id;

-- name: open_dependants
-- Dependants of a job that wait for it, or that failed because of a need. Uses needs_open.
SELECT j.id, j.tenant, j.lane
FROM holdfast.needs AS n
JOIN holdfast.jobs AS j ON j.id = n.job_id
WHERE n.need_id = :id::uuid
  AND NOT n.satisfied
  AND (j.gate IN ('needs', 'held') OR (j.status = 'failed' AND j.error_code = 'dependency_failed'))
  AND j.id > coalesce(:after_id::uuid, '00000000-0000-0000-0000-000000000000'::uuid)
ORDER BY j.id
LIMIT :limit::integer;

-- name: unsettle_dependants
-- Mark waiting dependants of an ended job as unresolved; the dependants of a job that is live again keep waiting.
UPDATE holdfast.jobs AS j
SET gate = 'unresolved'
FROM holdfast.jobs AS p
WHERE p.id = :id::uuid
  AND p.status IN ({terminal})
  AND j.id IN (SELECT e::uuid FROM json_array_elements_text(:ids::json) AS e)
  AND j.gate IN ('needs', 'held');

-- name: revive_dependants
-- Requeue jobs that failed only because of needs that no longer block them.
WITH clock AS MATERIALIZED (
  SELECT holdfast.clock() AS now_at
), revived AS (
  UPDATE holdfast.jobs AS j
  SET {revive_writes}
  FROM holdfast.specs AS s
  CROSS JOIN clock AS t
  WHERE s.id = j.id
    AND j.id IN (SELECT e::uuid FROM json_array_elements_text(:ids::json) AS e)
    AND {revivable}
  RETURNING j.id, j.tenant, j.queue, j.seq, j.updated_at, j.status
), new_events AS (
  INSERT INTO holdfast.events (job_id, seq, at, type, data)
  SELECT r.id, r.seq, r.updated_at, 'status', json_build_object('status', r.status, 'revived_by', :id::text)
  FROM revived AS r
), moves AS (
  SELECT r.id, r.tenant, r.queue, 'failed' AS old_status, r.status AS new_status, r.seq, r.updated_at AS changed_at
  FROM revived AS r
)
SELECT r.id FROM revived AS r;
-- sqlite
DELETE FROM affected;
INSERT INTO affected (id)
SELECT j.id
FROM jobs AS j
WHERE j.id IN (SELECT value FROM json_each(:ids))
  AND {revivable};
UPDATE jobs AS j
SET {revive_writes}
FROM affected AS a
CROSS JOIN specs AS s ON s.id = a.id
WHERE j.id = a.id;
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
UPDATE holdfast.jobs AS j
SET unsettled = false
WHERE j.id = :id::uuid
  AND j.unsettled
  AND j.seq = :seq::bigint;

-- name: stuck_gates
-- Gates that nothing will ever open. Empty unless there is a bug: each row that is found and repaired is counted.
SELECT 'lane' AS what, l.tenant, l.lane, NULL::uuid AS id
FROM holdfast.lanes AS l
LEFT JOIN holdfast.jobs AS h ON h.id = l.holder
WHERE (l.holder IS NOT NULL AND (h.id IS NULL OR h.status NOT IN ('queued', 'running')))
   OR (l.holder IS NULL
       AND NOT l.paused
       AND EXISTS (
         SELECT 1 FROM holdfast.jobs AS w WHERE w.gate = 'lane' AND w.tenant = l.tenant AND w.lane = l.lane)
       AND NOT EXISTS ( -- resolving it will move the lane
         SELECT 1 FROM holdfast.jobs AS u /*sqlite INDEXED BY jobs_unresolved */
         WHERE u.gate = 'unresolved' AND u.tenant = l.tenant AND u.lane = l.lane)
       AND NOT EXISTS (
         SELECT 1 FROM holdfast.jobs AS b
         WHERE {blocks_lane}))
UNION ALL
SELECT 'holder', j.tenant, j.lane, j.id
FROM holdfast.jobs AS j /*sqlite INDEXED BY jobs_claimable CROSS */
JOIN holdfast.lanes AS l ON l.tenant = j.tenant AND l.lane = j.lane
WHERE j.gate = 'open'
  AND j.lane IS NOT NULL
  AND (l.holder IS DISTINCT FROM j.id OR l.paused)
UNION ALL
SELECT 'needs', j.tenant, j.lane, j.id
FROM holdfast.jobs AS j /*sqlite INDEXED BY jobs_needs_waiting */
WHERE j.gate = 'needs'
  AND NOT EXISTS (
    SELECT 1 FROM holdfast.needs AS n
    JOIN holdfast.jobs AS p ON p.id = n.need_id
    WHERE n.job_id = j.id
      AND NOT n.satisfied
      AND (p.unsettled OR (p.has_dependants AND p.status NOT IN ({terminal}))))
LIMIT :limit::integer;

-- name: unresolve
-- Mark a job with a stuck gate as unresolved.
UPDATE holdfast.jobs AS j
SET gate = 'unresolved'
WHERE j.id = :id::uuid
  AND j.gate IN ('needs', 'open', 'lane')
RETURNING j.id;

-- name: wait_for_locks
-- Set how long the rest of this transaction waits for a lock; 0 means without limit.
SELECT set_config('lock_timeout', :seconds::integer || 's', true) AS lock_timeout;
-- sqlite
-- Differs: there is only one writer, so there is no lock to wait for.
SELECT :seconds AS lock_timeout;
