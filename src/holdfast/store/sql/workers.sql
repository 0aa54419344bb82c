-- Registered workers, the leaders of duties, and the installation's id.

-- name: test_write
-- A write that changes nothing, to check that the database accepts writes.
UPDATE holdfast.installation
SET id = id;

-- name: installation
SELECT i.id FROM holdfast.installation AS i;

-- name: shared_folder
-- The shared folder that belongs to this database.
SELECT i.shared_folder AS id, i.shared_path AS path FROM holdfast.installation AS i WHERE i.shared_folder IS NOT NULL;

-- name: record_shared_folder
-- Record another shared folder, if the record is still as it was read.
UPDATE holdfast.installation AS i
SET shared_folder = :id::text,
    shared_path = :path::text
WHERE i.shared_folder IS NOT DISTINCT FROM :instead_of::text
RETURNING i.id;

-- name: register_worker
INSERT INTO holdfast.workers (worker, host, pid, queues, capabilities, domains, away, registered_at, seen_at, expires_at)
VALUES (:worker::text, :host::text, :pid::integer, :queues::json, :capabilities::json, :domains::json, :away::json, holdfast.clock(),
  holdfast.clock(), holdfast.clock() + make_interval(secs => :ttl::float8))
ON CONFLICT (worker) DO UPDATE
SET queues = excluded.queues,
    capabilities = excluded.capabilities,
    domains = excluded.domains,
    away = excluded.away,
    seen_at = excluded.seen_at,
    expires_at = excluded.expires_at
WHERE workers.host = excluded.host
  AND workers.pid = excluded.pid
RETURNING worker;

-- name: register_functions
-- Register the defaults from decorators. A lower revision overwrites nothing; of equal revisions, the last one wins.
INSERT INTO holdfast.functions AS f (function, revision, defaults, updated_at)
SELECT r.function, r.revision, r.defaults::jsonb, holdfast.clock()
FROM :rows AS r(function text, revision bigint, defaults text)
ORDER BY r.function
ON CONFLICT (function) DO UPDATE
SET revision = excluded.revision,
    defaults = excluded.defaults,
    updated_at = excluded.updated_at
WHERE excluded.revision > f.revision
   OR (excluded.revision = f.revision AND excluded.defaults <> f.defaults);
-- sqlite
-- each: rows
INSERT INTO functions (function, revision, defaults, updated_at)
VALUES (:function, :revision, :defaults, clock())
ON CONFLICT (function) DO UPDATE
SET revision = excluded.revision,
    defaults = excluded.defaults,
    updated_at = excluded.updated_at
WHERE excluded.revision > functions.revision
   OR (excluded.revision = functions.revision AND excluded.defaults <> functions.defaults);

-- name: function_defaults
-- All functions that a worker has registered: few.
SELECT f.function, f.revision, f.defaults::text AS defaults FROM holdfast.functions AS f ORDER BY f.function;

-- name: report_figures
-- Store a worker's counters. A later report needs a row that has some: a row without is new and lacks the earlier ones.
UPDATE holdfast.workers AS w
SET figures = :figures::json
WHERE w.worker = :worker::text
  AND (:first::boolean OR w.figures IS NOT NULL)
RETURNING w.worker;

-- name: totals
-- The counters of workers that are gone.
SELECT t.counter, t.status, t.count FROM holdfast.totals AS t;

-- name: add_totals
-- Add the counters of a process without a row.
SELECT 1 AS one FROM (SELECT holdfast.add_figures(:figures::json)) AS added;
-- sqlite
INSERT INTO totals (counter, status, count)
SELECT n.key, '', n.value FROM json_each(:figures) AS n WHERE n.type = 'integer'
UNION ALL
SELECT 'finishes', s.key, s.value FROM json_each(:figures, '$.finishes') AS s
WHERE true
ON CONFLICT (counter, status) DO UPDATE SET count = count + excluded.count;

-- name: delete_worker
DELETE FROM holdfast.workers AS w WHERE w.worker = :worker::text;

-- name: drain_worker
UPDATE holdfast.workers AS w SET draining = true WHERE w.worker = :worker::text RETURNING w.worker;

-- name: drain_host
UPDATE holdfast.workers AS w SET draining = true WHERE w.host = :host::text RETURNING w.worker;

-- name: list_workers
-- All workers, with the jobs of one tenant or of all that each owns.
SELECT w.worker, w.host, w.pid, w.queues, w.capabilities, w.domains, w.away, w.registered_at, w.seen_at, w.expires_at,
  w.draining, w.figures, w.expires_at > holdfast.clock() AS live,
  (SELECT json_agg(o.id) FROM (
     SELECT j.id FROM holdfast.jobs AS j
     WHERE j.phase IS NOT NULL AND j.status = 'running' AND j.owner = w.worker
       AND (:tenant::text IS NULL OR j.tenant = :tenant::text)
     ORDER BY j.id) AS o) AS jobs
FROM holdfast.workers AS w
ORDER BY w.worker;

-- name: workers_of_host
-- The workers of a host, or those with this domain.
SELECT w.worker, w.host, w.domains, w.expires_at > holdfast.clock() AS live
FROM holdfast.workers AS w
WHERE w.host = :host::text
   OR EXISTS (SELECT 1 FROM json_array_elements_text(w.domains) AS d(domain) WHERE d.domain = :host::text)
ORDER BY w.worker;

-- name: live_domains
SELECT DISTINCT d.domain AS domain
FROM holdfast.workers AS w
CROSS JOIN LATERAL json_array_elements_text(w.domains) AS d(domain)
WHERE w.expires_at > holdfast.clock();

-- name: delete_dead_workers
-- Delete these workers, except one that turns out to be alive.
DELETE FROM holdfast.workers AS w
WHERE w.worker = ANY (:workers::text[])
  AND w.expires_at <= holdfast.clock()
RETURNING w.worker;

-- name: prune_workers
-- Workers that died :age ago, own no job, and have no orphan in their domains. Uses jobs_running, jobs_orphaned.
DELETE FROM holdfast.workers AS w
WHERE w.worker IN (
  SELECT o.worker
  FROM holdfast.workers AS o
  WHERE o.expires_at < holdfast.clock() - make_interval(secs => :age::float8)
    AND NOT EXISTS (SELECT 1 FROM holdfast.jobs AS j WHERE j.phase IS NOT NULL AND j.owner = o.worker)
    AND NOT EXISTS (
      SELECT 1
      FROM json_array_elements_text(o.domains) AS d(domain) /*sqlite CROSS */
      JOIN holdfast.jobs AS j /*sqlite INDEXED BY jobs_orphaned */ ON j.domain = d.domain AND j.phase IS NOT NULL AND j.owner IS NULL
      WHERE d.domain <> :function::text)
  ORDER BY o.expires_at
  LIMIT :limit::integer)
RETURNING w.worker;
-- sqlite precheck
SELECT 1 FROM workers AS w WHERE w.expires_at < clock() - CAST(:age * 1000000 AS INTEGER) LIMIT 1;

-- name: workers_in_domain
-- Live workers that can adopt attempts in a domain.
SELECT w.worker
FROM holdfast.workers AS w
WHERE w.expires_at > holdfast.clock()
  AND NOT w.draining
  AND EXISTS (SELECT 1 FROM json_array_elements_text(w.domains) AS d(domain) WHERE d.domain = :domain::text)
ORDER BY w.worker;

-- name: lead
-- Become or stay the leader of a duty; returns a row only for the leader.
INSERT INTO holdfast.leaders AS l (duty, leader, term, expires_at)
VALUES (:duty::text, :leader::text, 1, holdfast.clock() + make_interval(secs => :ttl::float8))
ON CONFLICT (duty) DO UPDATE
SET leader = excluded.leader,
    term = l.term + CASE WHEN l.leader = excluded.leader THEN 0 ELSE 1 END,
    expires_at = excluded.expires_at
WHERE l.leader = excluded.leader
   OR l.expires_at <= holdfast.clock()
RETURNING l.term;
-- sqlite precheck
SELECT 1
WHERE NOT EXISTS (
  SELECT 1 FROM leaders AS l WHERE l.duty = :duty AND l.leader <> :leader AND l.expires_at > clock());

-- name: resign
-- The row is kept, so that terms only grow.
UPDATE holdfast.leaders AS l
SET expires_at = holdfast.clock()
WHERE l.duty = :duty::text
  AND l.leader = :leader::text;
