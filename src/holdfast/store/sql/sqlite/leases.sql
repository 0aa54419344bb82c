-- Statements for workers: claim, adopt, start, beat, finish, hand over; and the reaper.
-- Every write about a running job carries its token. `precheck` reads before anything takes the write lock.

-- name: adopt
-- Take the leases of orphans in the domains that this worker can reach. Uses jobs_orphaned.
-- The columns are the fields of a Lease.
-- Differs: the answer is one JSON text.
-- precheck
SELECT 1
FROM jobs AS j INDEXED BY jobs_orphaned
WHERE j.phase IS NOT NULL
  AND j.owner IS NULL
  AND j.status = 'running'
  AND j.domain IN (SELECT value FROM json_each(:domains))
  AND j.adopt_after_at <= clock()
LIMIT 1;
DELETE FROM affected;
INSERT INTO affected (id, token)
SELECT j.id, j.rowid
FROM jobs AS j INDEXED BY jobs_orphaned
WHERE j.phase IS NOT NULL
  AND j.owner IS NULL
  AND j.status = 'running'
  AND j.domain IN (SELECT value FROM json_each(:domains))
  AND j.adopt_after_at <= clock()
ORDER BY j.adopt_after_at, j.id
LIMIT :limit;
UPDATE jobs
SET owner = :worker,
    token = token + 1,
    lease_expires_at = clock() + CAST(:ttl * 1000000 AS INTEGER),
    last_beat_at = clock(),
    orphaned_at = NULL,
    adopt_after_at = NULL,
    adoptions = adoptions + 1,
    adopter = :worker,
    updated_at = max(clock(), updated_at),
    seq = seq + 1
WHERE rowid IN (SELECT t.token FROM affected AS t);
INSERT INTO events (job_id, seq, at, type, data)
SELECT a.id, a.seq, a.updated_at, 'lease',
  json_object('lease', 'adopted', 'attempt', a.attempt, 'worker', a.owner, 'token', a.token)
FROM affected AS t
CROSS JOIN jobs AS a ON a.rowid = t.token;
SELECT json_group_array(json_array(
  c.id, c.token, c.attempt, c.domain, c.tenant, c.queue, c.capability, c.lane, s.kind, c.spent, c.max_attempts,
  s.spec, s.inputs, s.policy, c.usage,
  json_object(
    'phase', c.phase, 'adoptions', c.adoptions, 'ran', (c.last_beat_at - c.attempt_started_at) / 1000000.0,
    'stdout_offset', c.stdout_offset, 'stderr_offset', c.stderr_offset, 'batch', c.batch,
    'stop_request', CASE WHEN c.stop_kind IS NOT NULL THEN json_object(
      'kind', c.stop_kind, 'phase', coalesce(c.stop_phase, 'requested'),
      'deadline_at', strftime('%Y-%m-%dT%H:%M:%S', c.stop_deadline_at / 1000000, 'unixepoch')
        || printf('.%06dZ', c.stop_deadline_at % 1000000)) END) || '')) AS leases
FROM affected AS t
CROSS JOIN jobs AS c ON c.rowid = t.token
CROSS JOIN specs AS s ON s.id = c.id;

-- name: tenants_with_work
-- Which tenants have claimable jobs of these (queue, capability) pairs: first those after :last_tenant, then those before
-- it, at most :limit of a pair; last, and only if there are others, :last_tenant itself. A walk from tenant to tenant, one
-- probe each. Uses jobs_claimable.
-- Differs: no LATERAL, so a step is one text: the rotation, then the tenant.
WITH RECURSIVE pairs AS MATERIALIZED (
  SELECT p.value ->> 'queue' AS queue, p.value ->> 'capability' AS capability
  FROM json_each(:pairs) AS p
  WHERE NOT EXISTS (
    SELECT 1 FROM queues AS q
    WHERE q.queue = p.value ->> 'queue' AND (q.paused = 1 OR (q.cap IS NOT NULL AND NOT :capped)))
), walk AS (
  SELECT p.queue, p.capability, '0' || :last_tenant AS step, 0 AS n
  FROM pairs AS p
  UNION ALL
  SELECT w.queue, w.capability, coalesce(
    CASE WHEN substr(w.step, 1, 1) = '0' THEN (
      SELECT '0' || j.tenant FROM jobs AS j
      WHERE j.gate = 'open' AND j.queue = w.queue AND j.capability = w.capability AND j.tenant > substr(w.step, 2)
      ORDER BY j.tenant
      LIMIT 1) END, (
    SELECT '1' || j.tenant FROM jobs AS j
    WHERE j.gate = 'open' AND j.queue = w.queue AND j.capability = w.capability
      AND j.tenant > CASE substr(w.step, 1, 1) WHEN '0' THEN '' ELSE substr(w.step, 2) END
      AND j.tenant < :last_tenant
    ORDER BY j.tenant
    LIMIT 1)), w.n + 1
  FROM walk AS w
  WHERE w.step IS NOT NULL
    AND w.n < :limit
)
SELECT w.queue, w.capability, substr(w.step, 2) AS tenant, CAST(substr(w.step, 1, 1) AS INTEGER) AS rotation
FROM walk AS w
WHERE w.n > 0
  AND w.step IS NOT NULL
UNION ALL
SELECT p.queue, p.capability, :last_tenant, 2
FROM pairs AS p
WHERE EXISTS (SELECT 1 FROM walk AS w WHERE w.n > 0 AND w.step IS NOT NULL)
  AND EXISTS (
    SELECT 1 FROM jobs AS j
    WHERE j.gate = 'open' AND j.queue = p.queue AND j.capability = p.capability AND j.tenant = :last_tenant);

-- name: take
-- Claim up to :slots jobs. A line is the claimable jobs of one tenant for one (queue, capability) pair, in order of
-- priority and acceptance; `n` numbers the lines, `tenant_n` the tenants. A tenant gets at most its share: from its one
-- line, or, where it has several (`merge`), from those whose jobs come first. With :alone, nothing is taken if another
-- tenant has work. Uses jobs_claimable.
-- The columns are the fields of a Lease. The claim's event is derived from the attempt: claim_seq, claimed_at, worker.
-- Differs: no LATERAL, so a correlated IN reads the first jobs of each line; no row locks, one writer at a time; the
-- answer is one JSON text; `after_id` and `slack` are not used, because there are no dead rows to skip.
-- precheck
SELECT 1
FROM json_each(:lines) AS l
WHERE EXISTS (
    SELECT 1 FROM jobs AS j
    WHERE j.gate = 'open' AND j.queue = l.value ->> 'queue' AND j.capability = l.value ->> 'capability'
      AND j.tenant = l.value ->> 'tenant')
  AND NOT EXISTS (
    SELECT 1 FROM queues AS q
    WHERE q.queue = l.value ->> 'queue' AND (q.paused = 1 OR (q.cap IS NOT NULL AND NOT :capped)))
LIMIT 1;
DELETE FROM picked;
DELETE FROM lines;
INSERT INTO lines (tenant_n, tenant, queue, capability, domain, share)
SELECT l.value ->> 'tenant_n', l.value ->> 'tenant', l.value ->> 'queue', l.value ->> 'capability', l.value ->> 'domain',
  l.value ->> 'share'
FROM json_each(:lines) AS l
WHERE NOT EXISTS (
    SELECT 1 FROM queues AS q
    WHERE q.queue = l.value ->> 'queue' AND (q.paused = 1 OR (q.cap IS NOT NULL AND NOT :capped)));
DELETE FROM lines
WHERE :alone
  AND EXISTS (
    SELECT 1 FROM lines AS l
    WHERE EXISTS (
        SELECT 1 FROM jobs AS j
        WHERE j.gate = 'open' AND j.queue = l.queue AND j.capability = l.capability AND j.tenant > l.tenant)
      OR EXISTS (
        SELECT 1 FROM jobs AS j
        WHERE j.gate = 'open' AND j.queue = l.queue AND j.capability = l.capability AND j.tenant < l.tenant));
INSERT INTO picked (id, job_rowid)
SELECT j.id, j.rowid -- one line: nothing to merge
FROM lines AS l
CROSS JOIN jobs AS j
WHERE (SELECT count(*) FROM lines) = 1
  AND j.gate = 'open' AND j.queue = l.queue AND j.capability = l.capability AND j.tenant = l.tenant
ORDER BY j.queue, j.capability, j.tenant, -j.priority, j.requested_at, j.id
LIMIT (SELECT coalesce(min(:slots, max(l.share)), 0) FROM lines AS l);
INSERT INTO picked (id, job_rowid)
WITH heads AS (
  SELECT h.id, h.rowid AS job_rowid, l.tenant_n, l.share, h.priority, h.requested_at,
    row_number() OVER (PARTITION BY l.tenant_n ORDER BY h.priority DESC, h.requested_at, h.id) AS place
  FROM lines AS l
  CROSS JOIN jobs AS h ON h.id IN (
    SELECT j.id FROM jobs AS j
    WHERE j.gate = 'open' AND j.queue = l.queue AND j.capability = l.capability AND j.tenant = l.tenant
    ORDER BY -j.priority, j.requested_at, j.id
    LIMIT (SELECT max(n.share) FROM lines AS n))
  WHERE (SELECT count(*) FROM lines) > 1
), taken AS (
  SELECT t.id, t.job_rowid, t.priority, t.requested_at
  FROM heads AS t
  WHERE t.place <= t.share
  ORDER BY t.tenant_n, t.place
  LIMIT :slots
)
SELECT t.id, t.job_rowid FROM taken AS t ORDER BY t.priority DESC, t.requested_at, t.id;
UPDATE jobs
SET status = 'running',
    gate = NULL,
    owner = :worker,
    token = token + 1,
    lease_expires_at = clock() + CAST(:ttl * 1000000 AS INTEGER),
    last_beat_at = clock(),
    queue_deadline_at = NULL,
    adoptions = 0,
    attempt = attempt + 1,
    phase = CASE WHEN capability IN (SELECT l.capability FROM lines AS l WHERE l.domain = :function) THEN 'started' ELSE 'claimed' END,
    worker = :worker,
    adopter = NULL,
    domain = (SELECT l.domain FROM lines AS l WHERE l.queue = jobs.queue AND l.capability = jobs.capability),
    claimed_at = max(clock(), updated_at),
    claim_seq = seq + 1,
    attempt_started_at = CASE WHEN capability IN (SELECT l.capability FROM lines AS l WHERE l.domain = :function) THEN max(clock(), updated_at) END,
    stdout_offset = 0,
    stderr_offset = 0,
    batch = 0,
    started_at = coalesce(started_at, max(clock(), updated_at)),
    updated_at = max(clock(), updated_at),
    seq = seq + 1
WHERE rowid IN (SELECT p.job_rowid FROM picked AS p);
-- moves
SELECT c.id, c.tenant, c.queue, 'queued' AS old_status, 'running' AS new_status, c.seq, c.updated_at AS changed_at
FROM picked AS p
CROSS JOIN jobs AS c ON c.rowid = p.job_rowid;
SELECT json_group_array(json_array(
  c.id, c.token, c.attempt, c.domain, c.tenant, c.queue, c.capability, c.lane, s.kind, c.spent, c.max_attempts,
  s.spec, s.inputs, s.policy, c.usage)) AS leases
FROM picked AS p
CROSS JOIN jobs AS c ON c.rowid = p.job_rowid
CROSS JOIN specs AS s ON s.id = c.id;

-- name: claim_one
-- Claim one claimable job by its id, whichever tenant is next: for a server that runs the job in the request, in the
-- transaction that accepted it. Uses the primary key. The columns are the fields of a Lease.
-- Differs: the answer is one JSON text.
UPDATE jobs
SET status = 'running',
    gate = NULL,
    owner = :worker,
    token = token + 1,
    lease_expires_at = clock() + CAST(:ttl * 1000000 AS INTEGER),
    last_beat_at = clock(),
    queue_deadline_at = NULL,
    adoptions = 0,
    attempt = attempt + 1,
    phase = CASE WHEN :domain = :function THEN 'started' ELSE 'claimed' END,
    worker = :worker,
    adopter = NULL,
    domain = :domain,
    claimed_at = max(clock(), updated_at),
    claim_seq = seq + 1,
    attempt_started_at = CASE WHEN :domain = :function THEN max(clock(), updated_at) END,
    stdout_offset = 0,
    stderr_offset = 0,
    batch = 0,
    started_at = coalesce(started_at, max(clock(), updated_at)),
    updated_at = max(clock(), updated_at),
    seq = seq + 1
WHERE id = :id
  AND gate = 'open'
  AND NOT EXISTS (SELECT 1 FROM queues AS q WHERE q.queue = jobs.queue AND q.paused = 1);
-- moves
SELECT c.id, c.tenant, c.queue, 'queued' AS old_status, 'running' AS new_status, c.seq, c.updated_at AS changed_at
FROM jobs AS c
WHERE c.id = :id
  AND changes() > 0;
SELECT json_group_array(json_array(
  c.id, c.token, c.attempt, c.domain, c.tenant, c.queue, c.capability, c.lane, s.kind, c.spent, c.max_attempts,
  s.spec, s.inputs, s.policy, c.usage)) AS leases
FROM jobs AS c
CROSS JOIN specs AS s ON s.id = c.id
WHERE c.id = :id
  AND changes() > 0;

-- name: start
-- Write phase `started` for attempts that now run.
DELETE FROM affected;
-- each: rows
INSERT INTO affected (id, token) VALUES (:id, :token);
UPDATE jobs
SET phase = 'started',
    attempt_started_at = coalesce(attempt_started_at, max(clock(), updated_at)),
    adoptions = 0,
    updated_at = max(clock(), updated_at)
FROM affected AS m
WHERE jobs.id = m.id
  AND jobs.token = m.token
  AND jobs.status = 'running'
RETURNING jobs.id;

-- name: beat
-- Renew all leases of a worker, and answer for each job: yours, lost, or one that it does not know. Uses jobs_running.
-- The row without an id is the worker's own.
DELETE FROM affected;
-- each: rows
INSERT INTO affected (id, token) VALUES (:id, :token);
UPDATE jobs
SET lease_expires_at = clock() + CAST(:ttl * 1000000 AS INTEGER),
    last_beat_at = clock(),
    adoptions = CASE WHEN clock() < jobs.updated_at + 600000000 THEN jobs.adoptions ELSE 0 END
FROM affected AS t
WHERE jobs.id = t.id
  AND jobs.token = t.token
  AND jobs.owner = :worker;
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
FROM jobs AS j
WHERE j.phase IS NOT NULL
  AND j.status = 'running'
  AND j.owner = :worker
  AND j.stop_kind IS NOT NULL
ORDER BY j.id;

-- name: advance_stop
-- Record how far the stop sequence has come, so that an adopter continues from there.
DELETE FROM affected;
INSERT INTO affected (id, token)
SELECT j.id, j.token
FROM jobs AS j
WHERE j.id = :id
  AND j.token = :token
  AND j.status = 'running'
  AND j.stop_kind IS NOT NULL;
UPDATE jobs
SET stop_phase = :phase,
    stop_deadline_at = coalesce(clock() + CAST(:grace * 1000000 AS INTEGER), stop_deadline_at),
    updated_at = max(clock(), updated_at),
    seq = seq + 1
WHERE id IN (SELECT id FROM affected);
INSERT INTO events (job_id, seq, at, type, data)
SELECT s.id, s.seq, s.updated_at, 'cancel', json_object('cancel', :phase, 'kind', s.stop_kind)
FROM affected AS t
CROSS JOIN jobs AS s ON s.id = t.id;
SELECT t.id FROM affected AS t;

-- name: usage_of_jobs
-- The usage and budgets of jobs. Uses the primary key.
SELECT j.id, j.usage, s.policy ->> 'budget' AS budget, j.stop_kind
FROM jobs AS j
JOIN specs AS s ON s.id = j.id
WHERE j.id IN (SELECT value FROM json_each(:ids))
  AND j.usage IS NOT NULL;

-- name: finish
-- End attempts: to a terminal status, to paused, or back to queued. A move to queued looks at the stop request here, in
-- the same transaction: cancel or delete makes it cancelled, interrupt makes it paused. The token stays, so that a repeat
-- after a lost reply finds its own end: same token, no open attempt. The end's event is derived from the attempt.
-- Differs: the answer is one JSON text.
DELETE FROM ended;
-- each: rows
INSERT INTO ended (
  job_rowid, stop_kind, stop_reason, status, cause, exit_code, signal, error_code, error_message, result, delay)
SELECT j.rowid, j.stop_kind, j.stop_reason, :status, :cause, :exit_code, :signal, :error_code, :error_message, :result, :delay
FROM jobs AS j
WHERE j.id = :id
  AND j.token = :token
  AND j.status = 'running';
UPDATE ended
SET status = CASE stop_kind WHEN 'interrupt' THEN 'paused' ELSE 'cancelled' END,
    error_code = CASE stop_kind WHEN 'interrupt' THEN 'interrupted' ELSE 'cancelled' END,
    error_message = CASE stop_kind WHEN 'interrupt' THEN 'interrupted by request' ELSE 'cancelled by request' END
WHERE status = 'queued'
  AND stop_kind IS NOT NULL;
UPDATE ended
SET error_message = error_message || ': ' || stop_reason
WHERE error_code IN ('cancelled', 'interrupted')
  AND stop_reason IS NOT NULL;
UPDATE jobs
SET status = h.status,
    gate = CASE WHEN h.status <> 'queued' THEN NULL WHEN h.delay > 0 THEN 'future' ELSE 'open' END,
    available_at = CASE WHEN h.status = 'queued'
      THEN max(clock(), updated_at) + CAST(h.delay * 1000000 AS INTEGER)
      ELSE available_at END,
    finished_at = CASE WHEN h.status = 'queued' OR h.status = 'paused' THEN NULL ELSE max(clock(), updated_at) END,
    updated_at = max(clock(), updated_at),
    owner = NULL,
    lease_expires_at = NULL,
    orphaned_at = NULL,
    phase = NULL,
    spent = spent + CASE
      WHEN h.cause = 'drained' THEN 0
      WHEN phase = 'started' OR h.cause = 'lost' OR h.cause = 'start_failed' THEN 1
      ELSE 0
    END,
    unsettled = unsettled OR (has_dependants AND h.status <> 'queued' AND h.status <> 'paused'),
    exit_code = h.exit_code,
    error_code = h.error_code,
    error_message = h.error_message,
    result = h.result,
    seq = seq + 1
FROM ended AS h
WHERE jobs.rowid = h.job_rowid;
INSERT INTO attempts (
  job_id, attempt, worker, domain, token, claim_seq, end_seq, status, claimed_at, started_at, ended_at, cause, exit_code,
  signal, error_code, error_message, adopter)
SELECT e.id, e.attempt, e.worker, e.domain, e.token, e.claim_seq, e.seq, e.status, e.claimed_at, e.attempt_started_at,
  e.updated_at, h.cause, h.exit_code, h.signal, h.error_code, h.error_message, e.adopter
FROM ended AS h
CROSS JOIN jobs AS e ON e.rowid = h.job_rowid;
-- moves
SELECT e.id, e.tenant, e.queue, 'running' AS old_status, e.status AS new_status, e.seq, e.updated_at AS changed_at
FROM ended AS h
CROSS JOIN jobs AS e ON e.rowid = h.job_rowid;
SELECT json_group_array(json_array(e.id, e.status, e.queue, e.gate, e.has_dependants)) AS ends
FROM ended AS h
CROSS JOIN jobs AS e ON e.rowid = h.job_rowid;

-- name: recorded_ends
-- Which of these ends are already recorded: same token, no open attempt.
SELECT j.id, j.status
FROM json_each(:rows) AS r
JOIN jobs AS j ON j.id = r.value ->> 'id' AND j.token = r.value ->> 'token'
WHERE j.phase IS NULL;

-- name: hand_over
-- Release leases while the attempts keep running: another worker adopts them.
DELETE FROM affected;
-- each: rows
INSERT INTO affected (id, token, owner)
SELECT :id, :token, (SELECT j.owner FROM jobs AS j WHERE j.id = :id);
DELETE FROM affected
WHERE NOT EXISTS (
  SELECT 1 FROM jobs AS j
  WHERE j.id = affected.id AND j.token = affected.token AND j.status = 'running' AND j.owner IS NOT NULL);
UPDATE jobs
SET owner = NULL,
    token = token + 1,
    lease_expires_at = NULL,
    orphaned_at = max(clock(), updated_at),
    adopt_after_at = clock() + CAST(:delay * 1000000 AS INTEGER),
    adoptions = CASE WHEN :adoption_failed THEN adoptions ELSE 0 END,
    updated_at = max(clock(), updated_at),
    seq = seq + 1
WHERE id IN (SELECT id FROM affected);
INSERT INTO events (job_id, seq, at, type, data)
SELECT h.id, h.seq, h.updated_at, 'lease', json_object('lease', 'handed_over', 'worker', t.owner, 'token', h.token, 'reason', :reason)
FROM affected AS t
CROSS JOIN jobs AS h ON h.id = t.id;
SELECT t.id FROM affected AS t;

-- name: reap
-- Clear expired leases; the jobs stay running and can be adopted.
-- An orphan whose adoptions brought no progress waits longer each time. Uses jobs_running.
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
  count(DISTINCT CASE WHEN j.lease_expires_at < clock() THEN j.owner END) AS expired,
  max(j.last_beat_at) AS beat_at,
  max(CASE WHEN j.lease_expires_at < clock() THEN j.last_beat_at END) AS expired_beat_at,
  clock() AS now_at
FROM jobs AS j
WHERE j.phase IS NOT NULL
  AND j.status = 'running'
  AND j.owner IS NOT NULL;

-- name: leases
-- Which worker owns which jobs, for people. Uses jobs_running.
SELECT j.owner, j.id, j.token, j.lease_expires_at
FROM jobs AS j
WHERE j.phase IS NOT NULL
  AND j.status = 'running'
  AND j.owner IS NOT NULL
ORDER BY j.owner, j.id;

-- name: lease_state
-- The open attempt of a running job, for people: its owner and that worker's last heartbeat; for an orphan, its last
-- owner and why it was left. The event is among the last few. Uses the primary key and events_pkey.
SELECT j.attempt, j.owner, j.domain, coalesce(j.adopter, j.worker) AS last_worker, j.last_beat_at, j.lease_expires_at,
  j.adopt_after_at, clock() AS now_at, (
    SELECT e.data
    FROM events AS e
    WHERE e.job_id = j.id
      AND e.type = 'lease'
    ORDER BY e.seq DESC
    LIMIT 1) AS lease_event
FROM jobs AS j
WHERE j.id = :id
  AND j.phase IS NOT NULL;
