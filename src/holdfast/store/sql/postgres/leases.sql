-- Statements for workers: claim, adopt, start, beat, finish, hand over; and the reaper.
-- Every write about a running job carries its token. Rows are locked in id order.

-- name: adopt
-- Take the leases of orphans in the domains that this worker can reach. Uses jobs_orphaned.
-- The columns are the fields of a Lease.
WITH clock AS MATERIALIZED (
  SELECT holdfast.clock() AS now_at
), orphans AS MATERIALIZED (
  SELECT j.id
  FROM holdfast.jobs AS j
  WHERE j.phase IS NOT NULL
    AND j.owner IS NULL
    AND j.status = 'running'
    AND j.domain = ANY (:domains::text[])
    AND j.adopt_after_at <= (SELECT t.now_at FROM clock AS t)
  ORDER BY j.adopt_after_at, j.id
  LIMIT :limit::integer
  FOR NO KEY UPDATE SKIP LOCKED
), adopted AS (
  UPDATE holdfast.jobs AS j
  SET owner = :worker::text,
      token = j.token + 1,
      lease_expires_at = t.now_at + make_interval(secs => :ttl::float8),
      last_beat_at = t.now_at,
      orphaned_at = NULL,
      adopt_after_at = NULL,
      adoptions = j.adoptions + 1,
      adopter = :worker::text,
      updated_at = greatest(t.now_at, j.updated_at),
      seq = j.seq + 1
  FROM orphans AS o
  CROSS JOIN clock AS t
  WHERE j.id = o.id
  RETURNING j.*
), new_events AS (
  INSERT INTO holdfast.events (job_id, seq, at, type, data)
  SELECT a.id, a.seq, a.updated_at, 'lease',
    json_build_object('lease', 'adopted', 'attempt', a.attempt, 'worker', a.owner, 'token', a.token)
  FROM adopted AS a
)
SELECT a.id::text, a.token, a.attempt, a.domain, a.tenant, a.queue, a.capability, a.lane, s.kind, a.spent, a.max_attempts,
  s.spec, s.inputs, s.policy, a.usage,
  json_strip_nulls(json_build_object(
    'phase', a.phase, 'adoptions', a.adoptions, 'ran', extract(epoch FROM a.last_beat_at - a.attempt_started_at),
    'stdout_offset', a.stdout_offset, 'stderr_offset', a.stderr_offset, 'batch', a.batch,
    'stop_request', CASE WHEN a.stop_kind IS NOT NULL THEN json_build_object(
      'kind', a.stop_kind, 'phase', coalesce(a.stop_phase, 'requested'), 'deadline_at', a.stop_deadline_at) END)) AS adoption
FROM adopted AS a
JOIN holdfast.specs AS s ON s.id = a.id
ORDER BY a.id;

-- name: tenants_with_work
-- Which tenants have claimable jobs of these (queue, capability) pairs: first those after :last_tenant, then those before
-- it, at most :limit of a pair; last, and only if there are others, :last_tenant itself. A walk from tenant to tenant, one
-- probe each. Uses jobs_claimable.
WITH RECURSIVE pairs AS MATERIALIZED (
  SELECT p.queue, p.capability
  FROM :pairs AS p(queue text, capability text)
  WHERE NOT EXISTS (
    SELECT 1 FROM holdfast.queues AS q
    WHERE q.queue = p.queue AND (q.paused OR (q.cap IS NOT NULL AND NOT :capped::boolean)))
), walk AS (
  SELECT p.queue, p.capability, :last_tenant::text COLLATE "C" AS tenant, 0 AS rotation, 0 AS n
  FROM pairs AS p
  UNION ALL
  SELECT w.queue, w.capability, t.tenant, t.rotation, w.n + 1
  FROM walk AS w
  CROSS JOIN LATERAL (
    (SELECT j.tenant, 0 AS rotation FROM holdfast.jobs AS j
    WHERE w.rotation = 0
      AND j.gate = 'open' AND j.queue = w.queue AND j.capability = w.capability AND j.tenant > w.tenant
    ORDER BY j.tenant
    LIMIT 1)
    UNION ALL
    (SELECT j.tenant, 1 FROM holdfast.jobs AS j
    WHERE j.gate = 'open' AND j.queue = w.queue AND j.capability = w.capability
      AND j.tenant > CASE w.rotation WHEN 0 THEN '' ELSE w.tenant END
      AND j.tenant < :last_tenant::text
    ORDER BY j.tenant
    LIMIT 1)
    LIMIT 1) AS t
  WHERE w.n < :limit::integer
)
SELECT w.queue, w.capability, w.tenant, w.rotation
FROM walk AS w
WHERE w.n > 0
UNION ALL
SELECT p.queue, p.capability, :last_tenant::text, 2
FROM pairs AS p
WHERE EXISTS (SELECT 1 FROM walk AS w WHERE w.n > 0)
  AND EXISTS (
    SELECT 1 FROM holdfast.jobs AS j
    WHERE j.gate = 'open' AND j.queue = p.queue AND j.capability = p.capability AND j.tenant = :last_tenant::text);

-- name: take
-- Claim up to :slots jobs. A line is the claimable jobs of one tenant for one (queue, capability) pair, in order of
-- priority and acceptance; `n` numbers the lines, `tenant_n` the tenants. A tenant gets at most its share: from its one
-- line, or, where it has several (`merge`), from those whose jobs come first. Only claimed rows are locked. With :alone,
-- nothing is taken if another tenant has work. Uses jobs_claimable.
-- `after_id` is a job claimed before: the scan of its line starts there, or `slack` seconds earlier, unless a job with a
-- higher priority waits. This skips dead rows that cannot be vacuumed while an old transaction is open.
-- The columns are the fields of a Lease. The claim's event is derived from the attempt: claim_seq, claimed_at, worker.
WITH clock AS MATERIALIZED (
  SELECT holdfast.clock() AS now_at
), lines AS MATERIALIZED (
  SELECT l.n, l.tenant_n, l.tenant, l.queue, l.capability, l.domain, l.share, l.merge,
    coalesce(a.rank, -2147483648) AS after_rank,
    coalesce(a.requested_at, '-infinity') AS after_at,
    coalesce(a.id, '00000000-0000-0000-0000-000000000000') AS after_id
  FROM :lines AS l(n integer, tenant_n integer, tenant text, queue text, capability text, domain text, share integer,
    merge boolean, after_id uuid, slack float8)
  LEFT JOIN LATERAL (
    SELECT -m.priority AS rank, m.requested_at - make_interval(secs => l.slack) AS requested_at,
      CASE WHEN l.slack = 0 THEN m.id END AS id
    FROM holdfast.jobs AS m
    WHERE m.id = l.after_id
      AND (
        SELECT 1 FROM holdfast.jobs AS j -- not as NOT EXISTS, whose plan would read the whole line
        WHERE j.gate = 'open' AND j.queue = l.queue AND j.capability = l.capability AND j.tenant = l.tenant
          AND -j.priority < -m.priority
        LIMIT 1) IS NULL) AS a ON true
  WHERE NOT EXISTS (
    SELECT 1 FROM holdfast.queues AS q
    WHERE q.queue = l.queue AND (q.paused OR (q.cap IS NOT NULL AND NOT :capped::boolean)))
), contended AS MATERIALIZED (
  SELECT :alone::boolean AND EXISTS (
    SELECT 1 FROM lines AS l
    WHERE EXISTS (
        SELECT 1 FROM holdfast.jobs AS j
        WHERE j.gate = 'open' AND j.queue = l.queue AND j.capability = l.capability AND j.tenant > l.tenant)
      OR EXISTS (
        SELECT 1 FROM holdfast.jobs AS j
        WHERE j.gate = 'open' AND j.queue = l.queue AND j.capability = l.capability AND j.tenant < l.tenant)) AS by_other
), merged AS MATERIALIZED (
  SELECT h.n, count(*)::integer AS share
  FROM (
    SELECT l.n, l.share,
      row_number() OVER (PARTITION BY l.tenant_n ORDER BY j.priority DESC, j.requested_at, j.id) AS place
    FROM lines AS l
    CROSS JOIN LATERAL (
      SELECT j.priority, j.requested_at, j.id
      FROM holdfast.jobs AS j
      WHERE j.gate = 'open' AND j.queue = l.queue AND j.capability = l.capability AND j.tenant = l.tenant
        AND (-j.priority, j.requested_at, j.id) > (l.after_rank, l.after_at, l.after_id)
      ORDER BY -j.priority, j.requested_at, j.id
      LIMIT l.share) AS j
    WHERE l.merge) AS h
  WHERE h.place <= h.share
  GROUP BY h.n
), picked AS MATERIALIZED (
  SELECT j.ctid AS job_ctid, l.domain
  FROM (
    SELECT l.*, CASE WHEN l.merge THEN coalesce(m.share, 0) ELSE l.share END AS own_share
    FROM lines AS l
    LEFT JOIN merged AS m ON m.n = l.n
    ORDER BY l.tenant_n) AS l
  CROSS JOIN LATERAL (
    SELECT j.ctid
    FROM holdfast.jobs AS j
    WHERE j.gate = 'open' AND j.queue = l.queue AND j.capability = l.capability AND j.tenant = l.tenant
      AND (-j.priority, j.requested_at, j.id) > (l.after_rank, l.after_at, l.after_id)
    ORDER BY -j.priority, j.requested_at, j.id
    LIMIT l.own_share
    FOR NO KEY UPDATE SKIP LOCKED) AS j
  LIMIT (SELECT CASE WHEN c.by_other THEN 0 ELSE :slots::integer END FROM contended AS c)
), claimed AS (
  UPDATE holdfast.jobs AS j
  SET status = 'running',
      gate = NULL,
      owner = :worker::text,
      token = j.token + 1,
      lease_expires_at = t.now_at + make_interval(secs => :ttl::float8),
      last_beat_at = t.now_at,
      queue_deadline_at = NULL,
      adoptions = 0,
      attempt = j.attempt + 1,
      phase = CASE WHEN p.domain = :function::text THEN 'started' ELSE 'claimed' END,
      worker = :worker::text,
      adopter = NULL,
      domain = p.domain,
      claimed_at = greatest(t.now_at, j.updated_at),
      claim_seq = j.seq + 1,
      attempt_started_at = CASE WHEN p.domain = :function::text THEN greatest(t.now_at, j.updated_at) END,
      stdout_offset = 0,
      stderr_offset = 0,
      batch = 0,
      started_at = coalesce(j.started_at, greatest(t.now_at, j.updated_at)),
      updated_at = greatest(t.now_at, j.updated_at),
      seq = j.seq + 1
  FROM picked AS p
  CROSS JOIN clock AS t
  WHERE j.ctid = p.job_ctid -- locked, so its ctid cannot change
  RETURNING j.id, j.token, j.attempt, j.domain, j.tenant, j.queue, j.capability, j.lane, j.spent, j.max_attempts, j.usage,
    j.priority, j.requested_at, j.seq, j.updated_at
), moves AS (
  SELECT c.id, c.tenant, c.queue, 'queued' AS old_status, 'running' AS new_status, c.seq, c.updated_at AS changed_at
  FROM claimed AS c
)
SELECT c.id::text, c.token, c.attempt, c.domain, c.tenant, c.queue, c.capability, c.lane, s.kind, c.spent, c.max_attempts,
  s.spec, s.inputs, s.policy, c.usage
FROM claimed AS c
JOIN holdfast.specs AS s ON s.id = c.id
ORDER BY c.priority DESC, c.requested_at, c.id;

-- name: claim_one
-- Claim one claimable job by its id, whichever tenant is next: for a server that runs the job in the request, in the
-- transaction that accepted it. Uses the primary key. The columns are the fields of a Lease.
WITH clock AS MATERIALIZED (
  SELECT holdfast.clock() AS now_at
), claimed AS (
  UPDATE holdfast.jobs AS j
  SET status = 'running',
      gate = NULL,
      owner = :worker::text,
      token = j.token + 1,
      lease_expires_at = t.now_at + make_interval(secs => :ttl::float8),
      last_beat_at = t.now_at,
      queue_deadline_at = NULL,
      adoptions = 0,
      attempt = j.attempt + 1,
      phase = CASE WHEN :domain::text = :function::text THEN 'started' ELSE 'claimed' END,
      worker = :worker::text,
      adopter = NULL,
      domain = :domain::text,
      claimed_at = greatest(t.now_at, j.updated_at),
      claim_seq = j.seq + 1,
      attempt_started_at = CASE WHEN :domain::text = :function::text THEN greatest(t.now_at, j.updated_at) END,
      stdout_offset = 0,
      stderr_offset = 0,
      batch = 0,
      started_at = coalesce(j.started_at, greatest(t.now_at, j.updated_at)),
      updated_at = greatest(t.now_at, j.updated_at),
      seq = j.seq + 1
  FROM clock AS t
  WHERE j.id = :id::uuid
    AND j.gate = 'open'
    AND NOT EXISTS (SELECT 1 FROM holdfast.queues AS q WHERE q.queue = j.queue AND q.paused)
  RETURNING j.id, j.token, j.attempt, j.domain, j.tenant, j.queue, j.capability, j.lane, j.spent, j.max_attempts, j.usage,
    j.seq, j.updated_at
), moves AS (
  SELECT c.id, c.tenant, c.queue, 'queued' AS old_status, 'running' AS new_status, c.seq, c.updated_at AS changed_at
  FROM claimed AS c
)
SELECT c.id::text, c.token, c.attempt, c.domain, c.tenant, c.queue, c.capability, c.lane, s.kind, c.spent, c.max_attempts,
  s.spec, s.inputs, s.policy, c.usage
FROM claimed AS c
JOIN holdfast.specs AS s ON s.id = c.id;

-- name: start
-- Write phase `started` for attempts that now run.
WITH owned AS MATERIALIZED (
  SELECT j.id, j.token
  FROM holdfast.jobs AS j
  JOIN :rows AS r(id uuid, token bigint) ON r.id = j.id AND r.token = j.token
  WHERE j.status = 'running'
  ORDER BY j.id
  FOR NO KEY UPDATE OF j
)
UPDATE holdfast.jobs AS j
SET phase = 'started',
    attempt_started_at = coalesce(j.attempt_started_at, greatest(holdfast.clock(), j.updated_at)),
    adoptions = 0,
    updated_at = greatest(holdfast.clock(), j.updated_at)
FROM owned AS m
WHERE j.id = m.id
  AND j.token = m.token
  AND j.status = 'running'
RETURNING j.id;

-- name: beat
-- Renew all leases of a worker; return for each job: yours, lost, or unknown to the worker. Uses jobs_running.
-- If an adopter has held a silent job for ten minutes, the job did not kill it: its adoptions no longer count.
-- The row without an id is the worker's own.
WITH reported AS MATERIALIZED (
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
  SET lease_expires_at = holdfast.clock() + make_interval(secs => :ttl::float8),
      last_beat_at = holdfast.clock(),
      adoptions = CASE WHEN holdfast.clock() < j.updated_at + interval '10 minutes' THEN j.adoptions ELSE 0 END
  FROM owned AS m
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
WITH stopped AS (
  UPDATE holdfast.jobs AS j
  SET stop_phase = :phase::text,
      stop_deadline_at = coalesce(holdfast.clock() + make_interval(secs => :grace::float8), j.stop_deadline_at),
      updated_at = greatest(holdfast.clock(), j.updated_at),
      seq = j.seq + 1
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

-- name: usage_of_jobs
-- The usage and budgets of locked jobs. Uses the primary key.
SELECT j.id, j.usage, s.policy ->> 'budget' AS budget, j.stop_kind
FROM holdfast.jobs AS j
JOIN holdfast.specs AS s ON s.id = j.id
WHERE j.id IN (SELECT e::uuid FROM json_array_elements_text(:ids::json) AS e)
  AND j.usage IS NOT NULL;

-- name: finish
-- End attempts: to a terminal status, to paused, or back to queued. A move to queued looks at the stop request here, in
-- the same statement: cancel or delete makes it cancelled, interrupt makes it paused. The token stays, so that a repeat
-- after a lost reply finds its own end: same token, no open attempt. The end's event is derived from the attempt.
WITH clock AS MATERIALIZED (
  SELECT holdfast.clock() AS now_at
), input AS MATERIALIZED (
  SELECT r.*
  FROM :rows AS r(
    id uuid, token bigint, status text, cause text, exit_code integer, signal integer, error_code text,
    error_message text, result text, delay float8)
  ORDER BY r.id -- the order in which the nested loop below locks
), ended AS (
  UPDATE holdfast.jobs AS j
  SET status = CASE
        WHEN i.status <> 'queued' THEN i.status
        WHEN j.stop_kind = 'interrupt' THEN 'paused'
        WHEN j.stop_kind IS NOT NULL THEN 'cancelled'
        ELSE 'queued'
      END,
      gate = CASE
        WHEN i.status <> 'queued' OR j.stop_kind IS NOT NULL THEN NULL
        WHEN i.delay > 0 THEN 'future'
        ELSE 'open'
      END,
      available_at = CASE
        WHEN i.status <> 'queued' OR j.stop_kind IS NOT NULL THEN j.available_at
        ELSE greatest(t.now_at, j.updated_at) + make_interval(secs => i.delay)
      END,
      finished_at = CASE
        WHEN i.status = 'paused' THEN NULL
        WHEN i.status = 'queued' AND (j.stop_kind IS NULL OR j.stop_kind = 'interrupt') THEN NULL
        ELSE greatest(t.now_at, j.updated_at)
      END,
      updated_at = greatest(t.now_at, j.updated_at),
      owner = NULL,
      lease_expires_at = NULL,
      orphaned_at = NULL,
      phase = NULL,
      spent = j.spent + CASE
        WHEN i.cause = 'drained' THEN 0
        WHEN j.phase = 'started' OR i.cause IN ('lost', 'start_failed') THEN 1
        ELSE 0
      END,
      unsettled = j.unsettled OR (j.has_dependants AND i.status <> 'paused'
        AND (i.status <> 'queued' OR (j.stop_kind IS NOT NULL AND j.stop_kind <> 'interrupt'))),
      exit_code = i.exit_code,
      error_code = CASE
        WHEN i.status <> 'queued' OR j.stop_kind IS NULL THEN i.error_code
        WHEN j.stop_kind = 'interrupt' THEN 'interrupted'
        ELSE 'cancelled'
      END,
      error_message = CASE
        WHEN i.status <> 'queued' OR j.stop_kind IS NULL THEN i.error_message
        WHEN j.stop_kind = 'interrupt' THEN 'interrupted by request'
        ELSE 'cancelled by request'
      END || CASE
        WHEN j.stop_reason IS NULL THEN ''
        WHEN i.error_code IN ('cancelled', 'interrupted') OR (i.status = 'queued' AND j.stop_kind IS NOT NULL)
          THEN ': ' || j.stop_reason
        ELSE ''
      END,
      result = i.result::json,
      seq = j.seq + 1
  FROM input AS i
  CROSS JOIN clock AS t
  WHERE j.id = i.id
    AND j.token = i.token
    AND j.status = 'running'
  RETURNING j.id, j.tenant, j.attempt, j.status, j.seq, j.updated_at, j.has_dependants, j.queue, j.gate, j.exit_code, j.error_code,
    j.error_message, j.token, j.worker, j.adopter, j.domain, j.claim_seq, j.claimed_at, j.attempt_started_at, i.cause, i.signal
), kept AS (
  INSERT INTO holdfast.attempts (
    job_id, attempt, worker, domain, token, claim_seq, end_seq, status, claimed_at, started_at, ended_at, cause, exit_code,
    signal, error_code, error_message, adopter)
  SELECT e.id, e.attempt, e.worker, e.domain, e.token, e.claim_seq, e.seq, e.status, e.claimed_at, e.attempt_started_at,
    e.updated_at, e.cause, e.exit_code, e.signal, e.error_code, e.error_message, e.adopter
  FROM ended AS e
), moves AS (
  SELECT e.id, e.tenant, e.queue, 'running' AS old_status, e.status AS new_status, e.seq, e.updated_at AS changed_at
  FROM ended AS e
)
SELECT e.id::text, e.status, e.queue, e.gate, e.has_dependants FROM ended AS e;

-- name: recorded_ends
-- Which of these ends are already recorded: same token, no open attempt.
SELECT j.id, j.status
FROM holdfast.jobs AS j
JOIN :rows AS r(id uuid, token bigint) ON r.id = j.id AND r.token = j.token
WHERE j.phase IS NULL;

-- name: hand_over
-- Release leases while the attempts keep running: another worker adopts them.
WITH owned AS MATERIALIZED (
  SELECT j.id, j.token, j.owner
  FROM holdfast.jobs AS j
  JOIN :rows AS r(id uuid, token bigint) ON r.id = j.id AND r.token = j.token
  WHERE j.status = 'running'
    AND j.owner IS NOT NULL
  ORDER BY j.id
  FOR NO KEY UPDATE OF j
), handed AS (
  UPDATE holdfast.jobs AS j
  SET owner = NULL,
      token = j.token + 1,
      lease_expires_at = NULL,
      orphaned_at = greatest(holdfast.clock(), j.updated_at),
      adopt_after_at = holdfast.clock() + make_interval(secs => :delay::float8),
      adoptions = CASE WHEN :adoption_failed::boolean THEN j.adoptions ELSE 0 END,
      updated_at = greatest(holdfast.clock(), j.updated_at),
      seq = j.seq + 1
  FROM owned AS m
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

-- name: reap
-- Clear expired leases; the jobs stay running and can be adopted. State, expiry and token are checked under the lock.
-- An orphan whose adoptions brought no progress waits longer each time. Uses jobs_running: ordered by id, the planner
-- would scan all jobs.
WITH expired AS MATERIALIZED (
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
  FROM expired AS e
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
