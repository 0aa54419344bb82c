-- Retention: ended jobs that no other job needs are removed, in bounded steps along the ids, which grow with time.

-- name: set_signatures
-- Sign the next :scan jobs after :after_id: a hash of kind, runner, spec and inputs.
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
-- precheck
SELECT 1 FROM idempotency AS i WHERE i.made_at <= clock() - 86400000000 AND :limit > 0 LIMIT 1;
DELETE FROM idempotency
WHERE (tenant, key) IN (
  SELECT o.tenant, o.key FROM idempotency AS o
  WHERE o.made_at <= clock() - 86400000000
  ORDER BY o.made_at
  LIMIT :limit)
RETURNING key;

-- name: count_jobs
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
