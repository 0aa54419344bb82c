-- Statements for workers that own leases: start, beat, stop, hand over; and the reaper.
-- Every write about a running job carries its token. Rows are locked in id order.

-- name: start
-- Write phase `started` for attempts that now run.
WITH clock AS MATERIALIZED (
  SELECT holdfast.clock() AS now_at
), owned AS MATERIALIZED (
  SELECT j.id, j.token
  FROM holdfast.jobs AS j
  JOIN :rows AS r(id uuid, token bigint) ON r.id = j.id AND r.token = j.token
  WHERE j.status = 'running'
  ORDER BY j.id
  FOR NO KEY UPDATE OF j
)
UPDATE holdfast.jobs AS j
SET {start_writes}
FROM owned AS m
CROSS JOIN clock AS t
WHERE j.id = m.id
  AND j.token = m.token
  AND j.status = 'running'
RETURNING j.id;
-- sqlite
DELETE FROM affected;
-- each: rows
INSERT INTO affected (id, token) VALUES (:id, :token);
UPDATE jobs AS j
SET {start_writes}
FROM affected AS m
WHERE j.id = m.id
  AND j.token = m.token
  AND j.status = 'running'
RETURNING id;

-- name: beat
-- Renew all leases of a worker; return for each job: yours, lost, or unknown to the worker. Uses jobs_running.
-- If an adopter has held a silent job for ten minutes, the job did not kill it: its adoptions no longer count.
-- The row without an id is the worker's own.
WITH clock AS MATERIALIZED (
  SELECT holdfast.clock() AS now_at
), reported AS MATERIALIZED (
  SELECT r.id, r.token FROM :rows AS r(id uuid, token bigint)
), owned AS MATERIALIZED (
  SELECT j.id, j.token, j.capability, j.phase, j.stop_kind, j.stop_phase, j.stop_deadline_at, t.id IS NOT NULL AS is_reported
  FROM holdfast.jobs AS j
  LEFT JOIN reported AS t ON t.id = j.id AND t.token = j.token
  WHERE j.phase IS NOT NULL
    AND j.status = 'running'
    AND j.owner = :worker::text
  ORDER BY j.id
  FOR NO KEY UPDATE OF j
), renewed AS (
  UPDATE holdfast.jobs AS j
  SET {beat_writes}
  FROM owned AS m
  CROSS JOIN clock AS t
  WHERE j.id = m.id
    AND m.is_reported
    AND j.token = m.token
    AND j.owner = :worker::text
  RETURNING j.id, j.token
), seen_worker AS (
  UPDATE holdfast.workers AS w
  SET seen_at = greatest(holdfast.clock(), w.seen_at),
      expires_at = holdfast.clock() + make_interval(secs => :ttl::float8)
  WHERE w.worker = :worker::text
  RETURNING w.draining
)
SELECT NULL::uuid AS id, NULL::bigint AS token, 'worker' AS answer, NULL AS capability, NULL AS phase, NULL AS stop_kind,
  NULL AS stop_phase, NULL::timestamptz AS stop_deadline_at, (SELECT draining FROM seen_worker) AS draining
UNION ALL
SELECT m.id, m.token, CASE WHEN m.is_reported THEN 'yours' ELSE 'unknown' END, m.capability, m.phase, m.stop_kind,
  m.stop_phase, m.stop_deadline_at, false
FROM owned AS m
WHERE NOT m.is_reported OR EXISTS (SELECT 1 FROM renewed AS r WHERE r.id = m.id)
UNION ALL
SELECT t.id, t.token, 'lost', NULL, NULL, NULL, NULL, NULL, false
FROM reported AS t
WHERE NOT EXISTS (SELECT 1 FROM renewed AS r WHERE r.id = t.id AND r.token = t.token);
-- sqlite
DELETE FROM affected;
-- each: rows
INSERT INTO affected (id, token) VALUES (:id, :token);
UPDATE jobs AS j
SET {beat_writes}
FROM affected AS t
WHERE j.id = t.id
  AND j.token = t.token
  AND j.owner = :worker;
UPDATE workers
SET seen_at = max(clock(), seen_at),
    expires_at = clock() + CAST(:ttl * 1000000 AS INTEGER)
WHERE worker = :worker;
SELECT NULL AS id, NULL AS token, 'worker' AS answer, NULL AS capability, NULL AS phase, NULL AS stop_kind,
  NULL AS stop_phase, NULL AS stop_deadline_at, (SELECT w.draining FROM workers AS w WHERE w.worker = :worker) AS draining
UNION ALL
SELECT m.id, m.token, CASE WHEN t.id IS NOT NULL THEN 'yours' ELSE 'unknown' END, m.capability, m.phase, m.stop_kind,
  m.stop_phase, m.stop_deadline_at, 0
FROM jobs AS m
LEFT JOIN affected AS t ON t.id = m.id AND t.token = m.token
WHERE m.phase IS NOT NULL
  AND m.status = 'running'
  AND m.owner = :worker
UNION ALL
SELECT t.id, t.token, 'lost', NULL, NULL, NULL, NULL, NULL, 0
FROM affected AS t
WHERE NOT EXISTS (SELECT 1 FROM jobs AS j WHERE j.id = t.id AND j.token = t.token AND j.owner = :worker);

-- name: stop_requests
-- The pending stop requests for a worker's own jobs. Uses jobs_running.
SELECT j.id, j.token, j.stop_kind, j.stop_phase, j.stop_deadline_at
FROM holdfast.jobs AS j
WHERE j.phase IS NOT NULL
  AND j.status = 'running'
  AND j.owner = :worker::text
  AND j.stop_kind IS NOT NULL
ORDER BY j.id;

-- name: advance_stop
-- Record how far the stop sequence has come, so that an adopter continues from there.
WITH clock AS MATERIALIZED (
  SELECT holdfast.clock() AS now_at
), stopped AS (
  UPDATE holdfast.jobs AS j
  SET {advance_stop_writes}
  FROM clock AS t
  WHERE j.id = :id::uuid
    AND j.token = :token::bigint
    AND j.status = 'running'
    AND j.stop_kind IS NOT NULL
  RETURNING j.id, j.seq, j.updated_at, j.stop_kind
), new_events AS (
  INSERT INTO holdfast.events (job_id, seq, at, type, data)
  SELECT s.id, s.seq, s.updated_at, 'cancel', json_build_object('cancel', :phase::text, 'kind', s.stop_kind)
  FROM stopped AS s
)
SELECT s.id FROM stopped AS s;
-- sqlite
DELETE FROM affected;
INSERT INTO affected (id, token)
SELECT j.id, j.token
FROM jobs AS j
WHERE j.id = :id
  AND j.token = :token
  AND j.status = 'running'
  AND j.stop_kind IS NOT NULL;
UPDATE jobs AS j
SET {advance_stop_writes}
WHERE j.id IN (SELECT id FROM affected);
INSERT INTO events (job_id, seq, at, type, data)
SELECT s.id, s.seq, s.updated_at, 'cancel', json_object('cancel', :phase, 'kind', s.stop_kind)
FROM affected AS t
CROSS JOIN jobs AS s ON s.id = t.id;
SELECT t.id FROM affected AS t;

-- name: hand_over
-- Release leases while the attempts keep running: another worker adopts them.
WITH clock AS MATERIALIZED (
  SELECT holdfast.clock() AS now_at
), owned AS MATERIALIZED (
  SELECT j.id, j.token, j.owner
  FROM holdfast.jobs AS j
  JOIN :rows AS r(id uuid, token bigint) ON r.id = j.id AND r.token = j.token
  WHERE j.status = 'running'
    AND j.owner IS NOT NULL
  ORDER BY j.id
  FOR NO KEY UPDATE OF j
), handed AS (
  UPDATE holdfast.jobs AS j
  SET {hand_over_writes}
  FROM owned AS m
  CROSS JOIN clock AS t
  WHERE j.id = m.id
    AND j.token = m.token
    AND j.owner IS NOT NULL
  RETURNING j.id, j.seq, j.updated_at, m.owner AS worker, j.token
), new_events AS (
  INSERT INTO holdfast.events (job_id, seq, at, type, data)
  SELECT h.id, h.seq, h.updated_at, 'lease', json_build_object('lease', 'handed_over', 'worker', h.worker, 'token', h.token, 'reason', :reason::text)
  FROM handed AS h
)
SELECT h.id FROM handed AS h;
-- sqlite
DELETE FROM affected;
-- each: rows
INSERT INTO affected (id, token, owner)
SELECT :id, :token, (SELECT j.owner FROM jobs AS j WHERE j.id = :id);
DELETE FROM affected
WHERE NOT EXISTS (
  SELECT 1 FROM jobs AS j
  WHERE j.id = affected.id AND j.token = affected.token AND j.status = 'running' AND j.owner IS NOT NULL);
UPDATE jobs AS j
SET {hand_over_writes}
WHERE j.id IN (SELECT id FROM affected);
INSERT INTO events (job_id, seq, at, type, data)
SELECT h.id, h.seq, h.updated_at, 'lease', json_object('lease', 'handed_over', 'worker', t.owner, 'token', h.token, 'reason', :reason)
FROM affected AS t
CROSS JOIN jobs AS h ON h.id = t.id;
SELECT t.id FROM affected AS t;

-- name: reap
-- Clear expired leases; the jobs stay running and can be adopted. State, expiry and token are checked under the lock.
-- An orphan whose adoptions brought no progress waits longer each time. Uses jobs_running: ordered by id, the planner
-- would scan all jobs.
WITH clock AS MATERIALIZED (
  SELECT holdfast.clock() AS now_at
), expired AS MATERIALIZED (
  SELECT j.id, j.token, j.owner
  FROM holdfast.jobs AS j
  WHERE j.phase IS NOT NULL
    AND j.owner IS NOT NULL
    AND j.status = 'running'
    AND j.lease_expires_at < least(holdfast.clock(), :seen_at::timestamptz)
  ORDER BY j.lease_expires_at, j.id
  LIMIT :limit::integer
  FOR NO KEY UPDATE SKIP LOCKED
), reaped AS (
  UPDATE holdfast.jobs AS j
  SET {reap_writes}
  FROM expired AS e
  CROSS JOIN clock AS t
  WHERE j.id = e.id
    AND j.token = e.token
    AND j.status = 'running'
    AND j.lease_expires_at < least(holdfast.clock(), :seen_at::timestamptz)
  RETURNING j.id, j.seq, j.updated_at, e.owner AS worker, j.token, j.attempt, j.adoptions
), new_events AS (
  INSERT INTO holdfast.events (job_id, seq, at, type, data)
  SELECT r.id, r.seq, r.updated_at, 'lease', json_build_object('lease', 'reaped', 'worker', r.worker, 'token', r.token)
  FROM reaped AS r
)
SELECT r.id, r.token, r.worker, r.attempt, r.adoptions FROM reaped AS r;
-- sqlite
-- precheck
SELECT 1
FROM jobs AS j INDEXED BY jobs_running
WHERE j.phase IS NOT NULL
  AND j.owner IS NOT NULL
  AND j.status = 'running'
  AND j.lease_expires_at < min(clock(), coalesce(:seen_at, clock()))
LIMIT 1;
DELETE FROM affected;
INSERT INTO affected (id, token, owner)
SELECT j.id, j.token, j.owner
FROM jobs AS j INDEXED BY jobs_running
WHERE j.phase IS NOT NULL
  AND j.owner IS NOT NULL
  AND j.status = 'running'
  AND j.lease_expires_at < min(clock(), coalesce(:seen_at, clock()))
ORDER BY j.lease_expires_at
LIMIT :limit;
UPDATE jobs AS j
SET {reap_writes}
WHERE j.id IN (SELECT id FROM affected);
INSERT INTO events (job_id, seq, at, type, data)
SELECT r.id, r.seq, r.updated_at, 'lease', json_object('lease', 'reaped', 'worker', t.owner, 'token', r.token)
FROM affected AS t
CROSS JOIN jobs AS r ON r.id = t.id;
SELECT r.id, r.token, t.owner AS worker, r.attempt, r.adoptions
FROM affected AS t
CROSS JOIN jobs AS r ON r.id = t.id;

-- name: lease_owners
-- How many owners hold leases, and how many let one expire: the reaper checks whether too many did. Uses jobs_running.
SELECT
  count(DISTINCT j.owner) AS owners,
  count(DISTINCT j.owner) FILTER (WHERE j.lease_expires_at < holdfast.clock()) AS expired,
  max(j.last_beat_at) AS beat_at,
  max(j.last_beat_at) FILTER (WHERE j.lease_expires_at < holdfast.clock()) AS expired_beat_at,
  holdfast.clock() AS now_at
FROM holdfast.jobs AS j
WHERE j.phase IS NOT NULL
  AND j.status = 'running'
  AND j.owner IS NOT NULL;

-- name: leases
-- Which worker owns which jobs, for people. Uses jobs_running.
SELECT j.owner, j.id, j.token, j.lease_expires_at
FROM holdfast.jobs AS j
WHERE j.phase IS NOT NULL
  AND j.status = 'running'
  AND j.owner IS NOT NULL
ORDER BY j.owner, j.id;

-- name: lease_state
-- The open attempt of a running job, for people: its owner and that worker's last heartbeat; for an orphan, its last
-- owner and why it was left. The event is among the last few. Uses the primary key and events_pkey.
SELECT j.attempt, j.owner, j.domain, coalesce(j.adopter, j.worker) AS last_worker, j.last_beat_at, j.lease_expires_at,
  j.adopt_after_at, holdfast.clock() AS now_at, (
    SELECT e.data
    FROM holdfast.events AS e
    WHERE e.job_id = j.id
      AND e.type = 'lease'
    ORDER BY e.seq DESC
    LIMIT 1) AS lease_event
FROM holdfast.jobs AS j
WHERE j.id = :id::uuid
  AND j.phase IS NOT NULL;
