-- Registered workers, the leaders of duties, and the installation's id.

-- name: test_write
-- A write that changes nothing, to check that the database accepts writes.
UPDATE installation
SET id = id;

-- name: installation
SELECT i.id FROM installation AS i;

-- name: shared_folder
-- The shared folder that belongs to this database.
SELECT i.shared_folder AS id, i.shared_path AS path FROM installation AS i WHERE i.shared_folder IS NOT NULL;

-- name: record_shared_folder
-- Record another shared folder, if the record is still as it was read.
UPDATE installation
SET shared_folder = :id,
    shared_path = :path
WHERE shared_folder IS :instead_of
RETURNING id;

-- name: register_worker
INSERT INTO workers (worker, host, pid, queues, capabilities, domains, away, registered_at, seen_at, expires_at)
VALUES (:worker, :host, :pid, :queues, :capabilities, :domains, :away, clock(), clock(),
  clock() + CAST(:ttl * 1000000 AS INTEGER))
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
-- All functions that have defaults: few.
SELECT f.function, f.revision, f.defaults FROM functions AS f WHERE f.defaults <> '{}' ORDER BY f.function;

-- name: report_figures
-- Store a worker's counters. A later report needs a row that has some: a row without is new and lacks the earlier ones.
UPDATE workers
SET figures = :figures
WHERE worker = :worker
  AND (:first OR figures IS NOT NULL)
RETURNING worker;

-- name: totals
-- The counters of workers that are gone.
SELECT t.counter, t.status, t.count FROM totals AS t;

-- name: add_totals
-- Add the counters of a process without a row.
INSERT INTO totals (counter, status, count)
SELECT n.key, '', n.value FROM json_each(:figures) AS n WHERE n.type = 'integer'
UNION ALL
SELECT 'finishes', s.key, s.value FROM json_each(:figures, '$.finishes') AS s
WHERE true
ON CONFLICT (counter, status) DO UPDATE SET count = count + excluded.count;

-- name: delete_worker
DELETE FROM workers WHERE worker = :worker;

-- name: drain_worker
UPDATE workers SET draining = 1 WHERE worker = :worker RETURNING worker;

-- name: drain_host
UPDATE workers SET draining = 1 WHERE host = :host RETURNING worker;

-- name: list_workers
-- All workers, with the jobs of one tenant or of all that each owns.
SELECT w.worker, w.host, w.pid, w.queues, w.capabilities, w.domains, w.away, w.registered_at, w.seen_at, w.expires_at,
  w.draining, w.figures, w.expires_at > clock() AS live,
  (SELECT json_group_array(o.id) FROM (SELECT j.id FROM jobs AS j WHERE j.phase IS NOT NULL AND j.owner = w.worker AND (:tenant IS NULL OR j.tenant = :tenant) ORDER BY j.id) AS o) AS jobs
FROM workers AS w
ORDER BY w.worker;

-- name: workers_of_host
-- The workers of a host, or those with this domain.
SELECT w.worker, w.host, w.domains, w.expires_at > clock() AS live
FROM workers AS w
WHERE w.host = :host
   OR EXISTS (SELECT 1 FROM json_each(w.domains) AS d WHERE d.value = :host)
ORDER BY w.worker;

-- name: live_domains
SELECT DISTINCT d.value AS domain
FROM workers AS w
CROSS JOIN json_each(w.domains) AS d
WHERE w.expires_at > clock();

-- name: delete_dead_workers
-- Delete these workers, except one that turns out to be alive.
DELETE FROM workers
WHERE worker IN (SELECT value FROM json_each(:workers))
  AND expires_at <= clock()
RETURNING worker;

-- name: prune_workers
-- Workers that died :age ago, own no job, and have no orphan in their domains. Uses jobs_running, jobs_orphaned.
-- precheck
SELECT 1 FROM workers AS w WHERE w.expires_at < clock() - CAST(:age * 1000000 AS INTEGER) LIMIT 1;
DELETE FROM workers
WHERE worker IN (
  SELECT o.worker
  FROM workers AS o
  WHERE o.expires_at < clock() - CAST(:age * 1000000 AS INTEGER)
    AND NOT EXISTS (SELECT 1 FROM jobs AS j WHERE j.phase IS NOT NULL AND j.owner = o.worker)
    AND NOT EXISTS (
      SELECT 1
      FROM json_each(o.domains) AS d
      CROSS JOIN jobs AS j INDEXED BY jobs_orphaned ON j.domain = d.value AND j.phase IS NOT NULL AND j.owner IS NULL
      WHERE d.value <> :function)
  ORDER BY o.expires_at
  LIMIT :limit)
RETURNING worker;

-- name: workers_in_domain
-- Live workers that can adopt attempts in a domain.
SELECT w.worker
FROM workers AS w
WHERE w.expires_at > clock()
  AND w.draining = 0
  AND EXISTS (SELECT 1 FROM json_each(w.domains) AS d WHERE d.value = :domain)
ORDER BY w.worker;

-- name: lead
-- Become or stay the leader of a duty; returns a row only for the leader. A follower only looks.
-- precheck
SELECT 1
WHERE NOT EXISTS (
  SELECT 1 FROM leaders AS l WHERE l.duty = :duty AND l.leader <> :leader AND l.expires_at > clock());
INSERT INTO leaders (duty, leader, term, expires_at)
VALUES (:duty, :leader, 1, clock() + CAST(:ttl * 1000000 AS INTEGER))
ON CONFLICT (duty) DO UPDATE
SET leader = excluded.leader,
    term = term + CASE WHEN leaders.leader = excluded.leader THEN 0 ELSE 1 END,
    expires_at = excluded.expires_at
WHERE leaders.leader = excluded.leader
   OR leaders.expires_at <= clock()
RETURNING term;

-- name: resign
-- The row is kept, so that terms only grow.
UPDATE leaders
SET expires_at = clock()
WHERE duty = :duty
  AND leader = :leader;
