-- Lanes: one holder at a time, in order. The row of a lane is its lock.

-- name: missing_lanes
SELECT r.value ->> 'tenant' AS tenant, r.value ->> 'lane' AS lane
FROM json_each(:lanes) AS r
WHERE NOT EXISTS (
  SELECT 1 FROM lanes AS l WHERE l.tenant = r.value ->> 'tenant' AND l.lane = r.value ->> 'lane');

-- name: ensure_lanes
-- Positions start at the current time, so that a lane that is deleted and created again continues after the old ones.
INSERT INTO lanes (tenant, lane, next_position)
SELECT r.value ->> 'tenant', r.value ->> 'lane', clock()
FROM json_each(:lanes) AS r
WHERE true
ON CONFLICT DO NOTHING;

-- name: lock_lanes
-- Locks lanes in key order, before any job. Differs: there is only one writer, so nothing is locked.
SELECT l.tenant, l.lane
FROM json_each(:lanes) AS r
JOIN lanes AS l ON l.tenant = r.value ->> 'tenant' AND l.lane = r.value ->> 'lane'
ORDER BY l.tenant, l.lane;

-- name: lane_states
-- Everything that decides which job holds a lane. Uses lanes_pkey, jobs_lane_blocking, jobs_lane_waiting.
SELECT l.tenant, l.lane, l.paused, l.holder,
  h.status AS holder_status, h.gate AS holder_gate, h.started_at IS NOT NULL AS holder_started,
  h.lane_position AS holder_position,
  EXISTS (
    SELECT 1 FROM jobs AS b
    WHERE b.tenant = l.tenant AND b.lane = l.lane AND b.lane IS NOT NULL AND b.started_at IS NOT NULL
      AND b.dismissed = 0 AND (b.status = 'paused' OR b.status = 'failed' OR b.status = 'timed_out'))
  OR EXISTS ( -- it returns to its position: no job overtakes it
    SELECT 1 FROM jobs AS u INDEXED BY jobs_unresolved
    WHERE u.gate = 'unresolved' AND u.tenant = l.tenant AND u.lane = l.lane AND u.lane_position IS NOT NULL) AS blocked,
  n.id AS next_id, n.lane_position AS next_position
FROM json_each(:lanes) AS r
JOIN lanes AS l ON l.tenant = r.value ->> 'tenant' AND l.lane = r.value ->> 'lane'
LEFT JOIN jobs AS h ON h.id = l.holder
LEFT JOIN jobs AS n ON n.id = (
  SELECT w.id FROM jobs AS w
  WHERE w.gate = 'lane' AND w.tenant = l.tenant AND w.lane = l.lane
  ORDER BY w.lane_position LIMIT 1);

-- name: close_gates
-- Make claimable jobs unclaimable; one that was claimed meanwhile keeps its lane.
UPDATE jobs
SET gate = 'lane'
WHERE id IN (SELECT value FROM json_each(:ids))
  AND gate = 'open'
RETURNING id;

-- name: open_gates
UPDATE jobs
SET gate = 'open'
WHERE id IN (SELECT value FROM json_each(:ids))
  AND gate = 'lane'
RETURNING id, queue;

-- name: set_holders
UPDATE lanes
SET holder = r.value ->> 'holder'
FROM json_each(:rows) AS r
WHERE lanes.tenant = r.value ->> 'tenant'
  AND lanes.lane = r.value ->> 'lane';

-- name: prune_lanes
-- Delete lanes without holder, waiting job, blocker, pause and readiness check. A job that is delayed, held or waits
-- for needs creates its lane again when it is ready. Uses jobs_unresolved, jobs_lane_waiting, jobs_lane_blocking.
-- precheck
SELECT 1 FROM lanes AS l WHERE l.holder IS NULL AND l.paused = 0 AND l.readiness IS NULL AND :limit > 0 LIMIT 1;
DELETE FROM lanes
WHERE (tenant, lane) IN (
  SELECT l.tenant, l.lane
  FROM lanes AS l
  WHERE l.holder IS NULL
    AND l.paused = 0
    AND l.readiness IS NULL
    AND NOT EXISTS (
      SELECT 1 FROM jobs AS u INDEXED BY jobs_unresolved
      WHERE u.gate = 'unresolved' AND u.tenant = l.tenant AND u.lane = l.lane)
    AND NOT EXISTS (
      SELECT 1 FROM jobs AS w WHERE w.gate = 'lane' AND w.tenant = l.tenant AND w.lane = l.lane)
    AND NOT EXISTS (
      SELECT 1 FROM jobs AS b
      WHERE b.tenant = l.tenant AND b.lane = l.lane AND b.lane IS NOT NULL AND b.started_at IS NOT NULL
        AND b.dismissed = 0 AND (b.status = 'paused' OR b.status = 'failed' OR b.status = 'timed_out'))
  ORDER BY l.tenant, l.lane
  LIMIT :limit)
RETURNING lane;

-- name: pause_lane
UPDATE lanes
SET paused = :paused
WHERE tenant = :tenant
  AND lane = :lane
RETURNING lane;

-- name: set_lane_check
UPDATE lanes
SET readiness = :readiness
WHERE tenant = :tenant
  AND lane = :lane
RETURNING lane;

-- name: lane_check
SELECT l.readiness
FROM lanes AS l
WHERE l.tenant = :tenant
  AND l.lane = :lane
  AND l.readiness IS NOT NULL;

-- name: list_lanes
-- One page of lanes for people.
SELECT l.lane, l.paused, l.readiness, l.holder, h.status AS holder_status, h.gate AS holder_gate,
  (SELECT count(*) FROM jobs AS w WHERE w.gate = 'lane' AND w.tenant = l.tenant AND w.lane = l.lane) AS waiting,
  (SELECT w.id FROM jobs AS w
   WHERE w.gate = 'lane' AND w.tenant = l.tenant AND w.lane = l.lane
   ORDER BY w.lane_position LIMIT 1) AS next_id,
  (SELECT json_group_array(o.id) FROM (
     SELECT b.id FROM jobs AS b
     WHERE b.tenant = l.tenant AND b.lane = l.lane AND b.lane IS NOT NULL AND b.started_at IS NOT NULL
       AND b.dismissed = 0 AND (b.status = 'paused' OR b.status = 'failed' OR b.status = 'timed_out')
     ORDER BY b.lane_position) AS o) AS blockers
FROM lanes AS l
LEFT JOIN jobs AS h ON h.id = l.holder
WHERE l.tenant = :tenant
  AND (:lane IS NULL OR l.lane = :lane)
  AND (:after_lane IS NULL OR l.lane > :after_lane)
ORDER BY l.lane
LIMIT :limit;
