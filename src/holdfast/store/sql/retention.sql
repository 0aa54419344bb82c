-- Retention: ended jobs that no other job needs are removed, in bounded steps along the ids, which grow with time.

-- name: set_signatures
-- Sign the next :scan jobs after :after_id: a hash of kind, runner, spec and inputs.
WITH scanned AS MATERIALIZED (
  SELECT j.id
  FROM holdfast.jobs AS j
  WHERE j.id > coalesce(:after_id::uuid, '00000000-0000-0000-0000-000000000000')
  ORDER BY j.id
  LIMIT :scan::integer
), unsigned AS MATERIALIZED ( -- by id: expecting few unsigned rows, the planner would search the whole table
  SELECT o.id
  FROM scanned AS d
  CROSS JOIN LATERAL (SELECT s.id, s.signature FROM holdfast.specs AS s WHERE s.id = d.id OFFSET 0) AS o
  WHERE o.signature IS NULL
)
UPDATE holdfast.specs AS s
SET signature = md5(concat_ws(E'\n', s.kind, s.runner, s.spec, s.inputs))::uuid
FROM unsigned AS u
WHERE s.id = u.id;
-- sqlite
-- Differs: signature() is a function that every writing connection registers.
-- precheck
SELECT 1
FROM (SELECT j.id FROM jobs AS j WHERE j.id > coalesce(:after_id, '') ORDER BY j.id LIMIT :scan) AS d
CROSS JOIN specs AS s ON s.id = d.id
WHERE s.signature IS NULL
LIMIT 1;
UPDATE specs
SET signature = signature(kind, runner, spec, inputs)
WHERE signature IS NULL
  AND id IN (SELECT j.id FROM jobs AS j WHERE j.id > coalesce(:after_id, '') ORDER BY j.id LIMIT :scan);

-- name: prune_jobs
-- Read the next :scan jobs after :after_id, and mark for deletion those that are over their age, or older than the
-- newest :newest of their signature. Never a job that is active, blocks a lane, has just ended, is unsettled, or
-- is needed by a job that has not ended. Uses jobs_pkey, specs_signed, needs_open.
WITH scanned AS MATERIALIZED (
  SELECT j.id, j.tenant, j.status, j.lane, j.started_at, j.finished_at, j.requested_at, j.dismissed, j.unsettled
  FROM holdfast.jobs AS j
  WHERE j.id > coalesce(:after_id::uuid, '00000000-0000-0000-0000-000000000000')
  ORDER BY j.id
  LIMIT :scan::integer
), to_delete AS MATERIALIZED (
  SELECT j.id
  FROM scanned AS d
  JOIN holdfast.jobs AS j ON j.id = d.id
  JOIN holdfast.specs AS s ON s.id = d.id
  WHERE j.finished_at <= holdfast.clock() - make_interval(secs => :grace::float8)
    AND NOT j.unsettled
    AND NOT (j.lane IS NOT NULL AND j.started_at IS NOT NULL AND NOT j.dismissed AND j.status IN ('failed', 'timed_out'))
    AND NOT EXISTS (
      SELECT 1 FROM holdfast.needs AS n
      JOIN holdfast.jobs AS w ON w.id = n.job_id
      WHERE n.need_id = j.id AND NOT n.satisfied AND w.finished_at IS NULL)
    AND (
      j.finished_at <= holdfast.clock() - make_interval(secs => (:ages::json ->> j.status)::float8)
      OR (:newest::integer IS NOT NULL AND :newest::integer <= (
        SELECT count(*) FROM (
          SELECT 1 FROM holdfast.specs AS x
          WHERE x.tenant = s.tenant AND x.signature = s.signature
            AND (x.requested_at, x.id) > (s.requested_at, s.id)
          LIMIT :newest::integer) AS newer)))
  ORDER BY j.id
  FOR UPDATE OF j SKIP LOCKED
), updated AS (
  UPDATE holdfast.jobs AS j
  SET stop_kind = 'delete',
      stop_phase = coalesce(j.stop_phase, 'requested')
  FROM to_delete AS d
  WHERE j.id = d.id
)
SELECT (SELECT count(*) FROM scanned) AS scanned, (SELECT s.id FROM scanned AS s ORDER BY s.id DESC LIMIT 1) AS last_id,
  (SELECT json_agg(d.id) FROM to_delete AS d) AS to_delete;
-- sqlite
-- is needed by a job that has not ended. Uses the key of jobs, specs_signed, needs_open.
-- precheck
SELECT 1 FROM jobs AS j WHERE j.id > coalesce(:after_id, '') LIMIT 1;
DELETE FROM affected;
INSERT INTO affected (id, token)
SELECT j.id, 0 FROM jobs AS j WHERE j.id > coalesce(:after_id, '') ORDER BY j.id LIMIT :scan;
UPDATE affected
SET token = 1
WHERE id IN (
  SELECT j.id
  FROM affected AS t
  CROSS JOIN jobs AS j ON j.id = t.id
  CROSS JOIN specs AS s ON s.id = t.id
  WHERE j.finished_at <= clock() - CAST(:grace * 1000000 AS INTEGER)
    AND j.unsettled = 0
    AND NOT (j.lane IS NOT NULL AND j.started_at IS NOT NULL AND j.dismissed = 0 AND j.status IN ('failed', 'timed_out'))
    AND NOT EXISTS (
      SELECT 1 FROM needs AS n
      JOIN jobs AS w ON w.id = n.job_id
      WHERE n.need_id = j.id AND n.satisfied = 0 AND w.finished_at IS NULL)
    AND (
      j.finished_at <= clock() - CAST((:ages ->> j.status) * 1000000 AS INTEGER)
      OR (:newest IS NOT NULL AND :newest <= (
        SELECT count(*) FROM (
          SELECT 1 FROM specs AS x
          WHERE x.tenant = s.tenant AND x.signature = s.signature AND (x.requested_at, x.id) > (s.requested_at, s.id)
          LIMIT :newest)))));
UPDATE jobs
SET stop_kind = 'delete',
    stop_phase = coalesce(stop_phase, 'requested')
WHERE id IN (SELECT id FROM affected WHERE token = 1);
SELECT count(*) AS scanned, max(t.id) AS last_id, json_group_array(t.id) FILTER (WHERE t.token = 1) AS to_delete
FROM affected AS t;

-- name: prune_idempotency_keys
-- Idempotency keys whose 24 hours are over. Uses idempotency_made.
DELETE FROM holdfast.idempotency AS i
WHERE (i.tenant, i.key) IN (
  SELECT o.tenant, o.key FROM holdfast.idempotency AS o
  WHERE o.made_at <= holdfast.clock() - make_interval(secs => 86400)
  ORDER BY o.made_at
  LIMIT :limit::integer)
RETURNING i.key;
-- sqlite precheck
SELECT 1 FROM idempotency AS i WHERE i.made_at <= clock() - 86400000000 AND :limit > 0 LIMIT 1;

-- name: count_jobs
-- How many jobs wait and run, exact up to :most, from the small indexes; all jobs as the last ANALYZE estimated them.
SELECT
  (SELECT count(*) FROM (SELECT 1 FROM holdfast.jobs AS j WHERE j.gate = 'open' LIMIT :most::integer) AS x) AS open,
  (SELECT count(*) FROM (SELECT 1 FROM holdfast.jobs AS j WHERE j.gate = 'future' LIMIT :most::integer) AS x) AS future,
  (SELECT count(*) FROM (SELECT 1 FROM holdfast.jobs AS j WHERE j.gate = 'needs' LIMIT :most::integer) AS x) AS needs,
  (SELECT count(*) FROM (SELECT 1 FROM holdfast.jobs AS j WHERE j.gate = 'lane' LIMIT :most::integer) AS x) AS lane,
  (SELECT count(*) FROM (SELECT 1 FROM holdfast.jobs AS j WHERE j.gate = 'held' LIMIT :most::integer) AS x) AS held,
  (SELECT count(*) FROM (SELECT 1 FROM holdfast.jobs AS j WHERE j.gate = 'unresolved' LIMIT :most::integer) AS x) AS unresolved,
  (SELECT count(*) FROM (SELECT 1 FROM holdfast.jobs AS j WHERE j.phase IS NOT NULL AND j.status = 'running' LIMIT :most::integer) AS x) AS running,
  (SELECT greatest(c.reltuples, 0)::bigint FROM pg_class AS c WHERE c.oid = 'holdfast.jobs'::regclass) AS total;
-- sqlite
-- How many jobs wait and run, exact up to :most, from the small indexes; all jobs as estimated by the highest rowid.
SELECT
  (SELECT count(*) FROM (SELECT 1 FROM jobs AS j INDEXED BY jobs_claimable WHERE j.gate = 'open' LIMIT :most)) AS open,
  (SELECT count(*) FROM (SELECT 1 FROM jobs AS j INDEXED BY jobs_future WHERE j.gate = 'future' LIMIT :most)) AS future,
  (SELECT count(*) FROM (SELECT 1 FROM jobs AS j INDEXED BY jobs_needs_waiting WHERE j.gate = 'needs' LIMIT :most)) AS needs,
  (SELECT count(*) FROM (SELECT 1 FROM jobs AS j INDEXED BY jobs_lane_waiting WHERE j.gate = 'lane' LIMIT :most)) AS lane,
  (SELECT count(*) FROM (SELECT 1 FROM jobs AS j INDEXED BY jobs_held WHERE j.gate = 'held' LIMIT :most)) AS held,
  (SELECT count(*) FROM (SELECT 1 FROM jobs AS j INDEXED BY jobs_unresolved WHERE j.gate = 'unresolved' LIMIT :most)) AS unresolved,
  (SELECT count(*) FROM (SELECT 1 FROM jobs AS j WHERE j.phase IS NOT NULL AND j.status = 'running' LIMIT :most)) AS running,
  (SELECT coalesce(max(rowid), 0) FROM jobs) AS total;
