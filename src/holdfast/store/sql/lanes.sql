-- Lanes: one holder at a time, in order. The row of a lane is its lock.

-- fragment: blocks_lane
-- A job b that holds up its lane l until a person decides. An OR, because SQLite's index jobs_lane_blocking says so.
b.tenant = l.tenant AND b.lane = l.lane AND b.lane IS NOT NULL AND b.started_at IS NOT NULL
  AND NOT b.dismissed AND (b.status = 'paused' OR b.status = 'failed' OR b.status = 'timed_out')

-- fragment: lane_state
l.tenant, l.lane, l.paused, l.holder,
  h.status AS holder_status, h.gate AS holder_gate, h.started_at IS NOT NULL AS holder_started,
  h.lane_position AS holder_position,
  EXISTS (
    SELECT 1 FROM holdfast.jobs AS b
    WHERE {blocks_lane})
  OR EXISTS ( -- it returns to its position: no job overtakes it
    SELECT 1 FROM holdfast.jobs AS u /*sqlite INDEXED BY jobs_unresolved */
    WHERE u.gate = 'unresolved' AND u.tenant = l.tenant AND u.lane = l.lane AND u.lane_position IS NOT NULL) AS blocked,
  n.id AS next_id, n.lane_position AS next_position

-- fragment: idle_lanes
SELECT l.tenant, l.lane
FROM holdfast.lanes AS l
WHERE l.holder IS NULL
  AND NOT l.paused
  AND l.readiness IS NULL
  AND NOT EXISTS (
    SELECT 1 FROM holdfast.jobs AS u /*sqlite INDEXED BY jobs_unresolved */
    WHERE u.gate = 'unresolved' AND u.tenant = l.tenant AND u.lane = l.lane)
  AND NOT EXISTS (
    SELECT 1 FROM holdfast.jobs AS w WHERE w.gate = 'lane' AND w.tenant = l.tenant AND w.lane = l.lane)
  AND NOT EXISTS (
    SELECT 1 FROM holdfast.jobs AS b
    WHERE {blocks_lane})
ORDER BY l.tenant, l.lane
LIMIT :limit::integer

-- name: missing_lanes
SELECT r.tenant AS tenant, r.lane AS lane
FROM json_to_recordset(:lanes::json) AS r(tenant text, lane text)
WHERE NOT EXISTS (SELECT 1 FROM holdfast.lanes AS l WHERE l.tenant = r.tenant AND l.lane = r.lane);

-- name: ensure_lanes
-- Positions start at the current time, so that a lane that is deleted and created again continues after the old ones.
INSERT INTO holdfast.lanes (tenant, lane, next_position)
SELECT r.tenant, r.lane, floor(extract(epoch FROM holdfast.clock()) * 1000000)::bigint
FROM json_to_recordset(:lanes::json) AS r(tenant text, lane text)
ORDER BY r.tenant, r.lane
ON CONFLICT DO NOTHING;
-- sqlite
INSERT INTO lanes (tenant, lane, next_position)
SELECT r.value ->> 'tenant', r.value ->> 'lane', clock()
FROM json_each(:lanes) AS r
WHERE true
ON CONFLICT DO NOTHING;

-- name: lock_lanes
-- Locks lanes in key order, before any job.
SELECT l.tenant, l.lane
FROM json_to_recordset(:lanes::json) AS r(tenant text, lane text)
JOIN holdfast.lanes AS l ON l.tenant = r.tenant AND l.lane = r.lane
ORDER BY l.tenant, l.lane
FOR NO KEY UPDATE OF l;

-- name: lane_states
-- Everything that decides which job holds a lane. Uses lanes_pkey, jobs_lane_blocking, jobs_lane_waiting.
SELECT {lane_state}
FROM holdfast.lanes AS l
JOIN json_to_recordset(:lanes::json) AS r(tenant text, lane text) ON r.tenant = l.tenant AND r.lane = l.lane
LEFT JOIN holdfast.jobs AS h ON h.id = l.holder
LEFT JOIN LATERAL (
  SELECT w.id, w.lane_position FROM holdfast.jobs AS w
  WHERE w.gate = 'lane' AND w.tenant = l.tenant AND w.lane = l.lane
  ORDER BY w.lane_position LIMIT 1) AS n ON true;
-- sqlite
-- Differs: no LATERAL.
SELECT {lane_state}
FROM json_each(:lanes) AS r
JOIN lanes AS l ON l.tenant = r.value ->> 'tenant' AND l.lane = r.value ->> 'lane'
LEFT JOIN jobs AS h ON h.id = l.holder
LEFT JOIN jobs AS n ON n.id = (
  SELECT w.id FROM jobs AS w
  WHERE w.gate = 'lane' AND w.tenant = l.tenant AND w.lane = l.lane
  ORDER BY w.lane_position LIMIT 1);

-- name: close_gates
-- Make claimable jobs unclaimable; one that was claimed meanwhile keeps its lane.
UPDATE holdfast.jobs AS j
SET gate = 'lane'
WHERE j.id IN (SELECT e::uuid FROM json_array_elements_text(:ids::json) AS e)
  AND j.gate = 'open'
RETURNING j.id;

-- name: open_gates
UPDATE holdfast.jobs AS j
SET gate = 'open'
WHERE j.id IN (SELECT e::uuid FROM json_array_elements_text(:ids::json) AS e)
  AND j.gate = 'lane'
RETURNING j.id, j.queue;

-- name: set_holders
UPDATE holdfast.lanes AS l
SET holder = r.holder
FROM json_to_recordset(:rows::json) AS r(tenant text, lane text, holder uuid)
WHERE l.tenant = r.tenant
  AND l.lane = r.lane;

-- name: prune_lanes
-- Delete lanes without holder, waiting job, blocker, pause and readiness check. A job that is delayed, held or waits
-- for needs creates its lane again when it is ready. A locked lane is in use. Uses jobs_unresolved, jobs_lane_waiting,
-- jobs_lane_blocking.
WITH idle AS MATERIALIZED (
  {idle_lanes}
  FOR UPDATE OF l SKIP LOCKED
)
DELETE FROM holdfast.lanes AS l
USING idle AS i
WHERE l.tenant = i.tenant
  AND l.lane = i.lane
RETURNING l.lane;
-- sqlite
-- precheck
SELECT 1 FROM lanes AS l WHERE l.holder IS NULL AND l.paused = 0 AND l.readiness IS NULL AND :limit > 0 LIMIT 1;
DELETE FROM lanes
WHERE (tenant, lane) IN (
  {idle_lanes})
RETURNING lane;

-- name: pause_lane
UPDATE holdfast.lanes AS l
SET paused = :paused::boolean
WHERE l.tenant = :tenant::text
  AND l.lane = :lane::text
RETURNING l.lane;

-- name: set_lane_check
UPDATE holdfast.lanes AS l
SET readiness = :readiness::json
WHERE l.tenant = :tenant::text
  AND l.lane = :lane::text
RETURNING l.lane;

-- name: lane_check
SELECT l.readiness
FROM holdfast.lanes AS l
WHERE l.tenant = :tenant::text
  AND l.lane = :lane::text
  AND l.readiness IS NOT NULL;

-- name: list_lanes
-- One page of lanes for people.
SELECT l.lane, l.paused, l.readiness, l.holder, h.status AS holder_status, h.gate AS holder_gate,
  (SELECT count(*) FROM holdfast.jobs AS w WHERE w.gate = 'lane' AND w.tenant = l.tenant AND w.lane = l.lane) AS waiting,
  (SELECT w.id FROM holdfast.jobs AS w
   WHERE w.gate = 'lane' AND w.tenant = l.tenant AND w.lane = l.lane
   ORDER BY w.lane_position LIMIT 1) AS next_id,
  (SELECT json_agg(o.id) FROM (
     SELECT b.id FROM holdfast.jobs AS b
     WHERE {blocks_lane}
     ORDER BY b.lane_position) AS o) AS blockers
FROM holdfast.lanes AS l
LEFT JOIN holdfast.jobs AS h ON h.id = l.holder
WHERE l.tenant = :tenant::text
  AND (:lane::text IS NULL OR l.lane = :lane::text)
  AND (:after_lane::text IS NULL OR l.lane > :after_lane::text)
ORDER BY l.lane
LIMIT :limit::integer;
