-- Claims: adopt orphans; which tenants have work; take jobs of their lines.
-- Rows are locked in id order, or skipped where they are locked.

-- fragment: claimed_columns
j.id, j.token, j.attempt, j.domain, j.tenant, j.queue, j.capability, j.lane, j.spent, j.max_attempts, j.usage, j.seq, j.updated_at

-- fragment: lease_columns
-- The fields of a Lease, by name.
c.id::text AS id, c.token, c.attempt, c.domain, c.tenant, c.queue, c.capability, c.lane, s.kind, c.spent, c.max_attempts,
  s.spec AS spec_json, s.inputs AS inputs_json, s.policy AS policy_json, c.usage AS usage_json

-- fragment: claim_moves
SELECT c.id, c.tenant, c.queue, 'queued' AS old_status, 'running' AS new_status, c.seq, c.updated_at AS changed_at
  FROM claimed AS c

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
  SET {adopt_writes}
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
SELECT {lease_columns},
  json_strip_nulls(json_build_object(
    'phase', c.phase, 'adoptions', c.adoptions, 'ran', extract(epoch FROM c.last_beat_at - c.attempt_started_at),
    'stdout_offset', c.stdout_offset, 'stderr_offset', c.stderr_offset, 'batch', c.batch,
    'stop_request', CASE WHEN c.stop_kind IS NOT NULL THEN json_build_object(
      'kind', c.stop_kind, 'phase', coalesce(c.stop_phase, 'requested'), 'deadline_at', c.stop_deadline_at) END)) AS adoption_json
FROM adopted AS c
JOIN holdfast.specs AS s ON s.id = c.id
ORDER BY c.id;
-- sqlite
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
UPDATE jobs AS j
SET {adopt_writes}
WHERE j.rowid IN (SELECT t.token FROM affected AS t);
INSERT INTO events (job_id, seq, at, type, data)
SELECT a.id, a.seq, a.updated_at, 'lease',
  json_object('lease', 'adopted', 'attempt', a.attempt, 'worker', a.owner, 'token', a.token)
FROM affected AS t
CROSS JOIN jobs AS a ON a.rowid = t.token;
-- as json
SELECT {lease_columns},
  json_object(
    'phase', c.phase, 'adoptions', c.adoptions, 'ran', (c.last_beat_at - c.attempt_started_at) / 1000000.0,
    'stdout_offset', c.stdout_offset, 'stderr_offset', c.stderr_offset, 'batch', c.batch,
    'stop_request', CASE WHEN c.stop_kind IS NOT NULL THEN json_object(
      'kind', c.stop_kind, 'phase', coalesce(c.stop_phase, 'requested'),
      'deadline_at', strftime('%Y-%m-%dT%H:%M:%S', c.stop_deadline_at / 1000000, 'unixepoch')
        || printf('.%06dZ', c.stop_deadline_at % 1000000)) END) || '' AS adoption_json
FROM affected AS t
CROSS JOIN jobs AS c ON c.rowid = t.token
CROSS JOIN specs AS s ON s.id = c.id;

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
-- sqlite
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
-- line, or, where several have jobs (`merge`: there are several), from those whose jobs come first. Only claimed rows are
-- locked. With :alone, nothing is taken if another tenant has work. Uses jobs_claimable.
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
), filled AS MATERIALIZED (
  SELECT l.*, count(*) OVER (PARTITION BY l.tenant_n) > 1 AS merged
  FROM lines AS l
  WHERE NOT l.merge
    OR (
      SELECT 1 FROM holdfast.jobs AS j
      WHERE j.gate = 'open' AND j.queue = l.queue AND j.capability = l.capability AND j.tenant = l.tenant
        AND (-j.priority, j.requested_at, j.id) > (l.after_rank, l.after_at, l.after_id)
      LIMIT 1) IS NOT NULL
), merged AS MATERIALIZED (
  SELECT h.n, count(*)::integer AS share
  FROM (
    SELECT l.n, l.share,
      row_number() OVER (PARTITION BY l.tenant_n ORDER BY j.priority DESC, j.requested_at, j.id) AS place
    FROM filled AS l
    CROSS JOIN LATERAL (
      SELECT j.priority, j.requested_at, j.id
      FROM holdfast.jobs AS j
      WHERE j.gate = 'open' AND j.queue = l.queue AND j.capability = l.capability AND j.tenant = l.tenant
        AND (-j.priority, j.requested_at, j.id) > (l.after_rank, l.after_at, l.after_id)
      ORDER BY -j.priority, j.requested_at, j.id
      LIMIT l.share) AS j
    WHERE l.merged) AS h
  WHERE h.place <= h.share
  GROUP BY h.n
), picked AS MATERIALIZED (
  SELECT j.ctid AS job_ctid, l.domain
  FROM (
    SELECT l.*, CASE WHEN l.merged THEN coalesce(m.share, 0) ELSE l.share END AS own_share
    FROM filled AS l
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
  SET {claim_writes}
  FROM picked AS p
  CROSS JOIN clock AS t
  WHERE j.ctid = p.job_ctid -- locked, so its ctid cannot change
  RETURNING {claimed_columns}, j.priority, j.requested_at
), moves AS (
  {claim_moves}
)
SELECT {lease_columns}
FROM claimed AS c
JOIN holdfast.specs AS s ON s.id = c.id
ORDER BY c.priority DESC, c.requested_at, c.id;
-- sqlite
-- Differs: no LATERAL, so a correlated IN reads the first jobs of each line; no row locks, one writer at a time;
-- `after_id` and `slack` are not used, because there are no dead rows to skip.
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
DELETE FROM lines
WHERE NOT EXISTS (
    SELECT 1 FROM jobs AS j
    WHERE j.gate = 'open' AND j.queue = lines.queue AND j.capability = lines.capability AND j.tenant = lines.tenant);
INSERT INTO picked (id, job_rowid, domain)
SELECT j.id, j.rowid, l.domain -- one line: nothing to merge
FROM lines AS l
CROSS JOIN jobs AS j
WHERE (SELECT count(*) FROM lines) = 1
  AND j.gate = 'open' AND j.queue = l.queue AND j.capability = l.capability AND j.tenant = l.tenant
ORDER BY j.queue, j.capability, j.tenant, -j.priority, j.requested_at, j.id
LIMIT (SELECT coalesce(min(:slots, max(l.share)), 0) FROM lines AS l);
INSERT INTO picked (id, job_rowid, domain)
WITH heads AS (
  SELECT h.id, h.rowid AS job_rowid, l.domain, l.tenant_n, l.share, h.priority, h.requested_at,
    row_number() OVER (PARTITION BY l.tenant_n ORDER BY h.priority DESC, h.requested_at, h.id) AS place
  FROM lines AS l
  CROSS JOIN jobs AS h ON h.id IN (
    SELECT j.id FROM jobs AS j
    WHERE j.gate = 'open' AND j.queue = l.queue AND j.capability = l.capability AND j.tenant = l.tenant
    ORDER BY -j.priority, j.requested_at, j.id
    LIMIT (SELECT max(n.share) FROM lines AS n))
  WHERE (SELECT count(*) FROM lines) > 1
), taken AS (
  SELECT t.id, t.job_rowid, t.domain, t.priority, t.requested_at
  FROM heads AS t
  WHERE t.place <= t.share
  ORDER BY t.tenant_n, t.place
  LIMIT :slots
)
SELECT t.id, t.job_rowid, t.domain FROM taken AS t ORDER BY t.priority DESC, t.requested_at, t.id;
UPDATE jobs AS j
SET {claim_writes}
FROM picked AS p
WHERE j.rowid = p.job_rowid;
-- moves
SELECT c.id, c.tenant, c.queue, 'queued' AS old_status, 'running' AS new_status, c.seq, c.updated_at AS changed_at
FROM picked AS p
CROSS JOIN jobs AS c ON c.rowid = p.job_rowid;
-- as json
SELECT {lease_columns}
FROM picked AS p
CROSS JOIN jobs AS c ON c.rowid = p.job_rowid
CROSS JOIN specs AS s ON s.id = c.id;

-- name: claim_one
-- Claim one claimable job by its id, whichever tenant is next: for a server that runs the job in the request, in the
-- transaction that accepted it. Uses the primary key. The columns are the fields of a Lease.
WITH clock AS MATERIALIZED (
  SELECT holdfast.clock() AS now_at
), claimed AS (
  UPDATE holdfast.jobs AS j
  SET {claim_writes}
  FROM (SELECT :domain::text AS domain) AS p
  CROSS JOIN clock AS t
  WHERE j.id = :id::uuid
    AND j.gate = 'open'
    AND NOT EXISTS (SELECT 1 FROM holdfast.queues AS q WHERE q.queue = j.queue AND q.paused)
  RETURNING {claimed_columns}
), moves AS (
  {claim_moves}
)
SELECT {lease_columns}
FROM claimed AS c
JOIN holdfast.specs AS s ON s.id = c.id;
-- sqlite
UPDATE jobs AS j
SET {claim_writes}
FROM (SELECT :domain AS domain) AS p
WHERE j.id = :id
  AND j.gate = 'open'
  AND NOT EXISTS (SELECT 1 FROM queues AS q WHERE q.queue = j.queue AND q.paused = 1);
-- moves
SELECT c.id, c.tenant, c.queue, 'queued' AS old_status, 'running' AS new_status, c.seq, c.updated_at AS changed_at
FROM jobs AS c
WHERE c.id = :id
  AND changes() > 0;
-- as json
SELECT {lease_columns}
FROM jobs AS c
CROSS JOIN specs AS s ON s.id = c.id
WHERE c.id = :id
  AND changes() > 0;
