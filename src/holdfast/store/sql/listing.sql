-- Lists of jobs, for people.

-- fragment: ended_or_paused
-- An OR, because SQLite's index jobs_ended says so.
(j.status = 'paused' OR j.status = 'succeeded' OR j.status = 'failed' OR j.status = 'timed_out' OR j.status = 'cancelled')

-- name: list_jobs
-- One part of a list, newest first: read `scan` jobs along one index (specs_listed, specs_of_kind, labels_listed,
-- jobs_of_lane, jobs_waiting with jobs_ended and jobs_running); return those that match, and always the last one: the
-- next part starts after it.
WITH scanned AS MATERIALIZED (
  (
    SELECT s.id, s.requested_at
    FROM holdfast.specs AS s
    WHERE :index_name::text = 'newest'
      AND s.tenant = :tenant::text
      AND (s.requested_at, s.id) < (coalesce(:before_at::timestamptz, 'infinity'), :before_id::uuid)
      AND s.requested_at >= coalesce(:since_at::timestamptz, '-infinity')
    ORDER BY s.requested_at DESC, s.id DESC
    LIMIT :scan::integer
  )
  UNION ALL
  (
    SELECT s.id, s.requested_at
    FROM holdfast.specs AS s
    WHERE :index_name::text = 'kind'
      AND s.tenant = :tenant::text
      AND s.kind = :kind::text
      AND (s.requested_at, s.id) < (coalesce(:before_at::timestamptz, 'infinity'), :before_id::uuid)
      AND s.requested_at >= coalesce(:since_at::timestamptz, '-infinity')
    ORDER BY s.requested_at DESC, s.id DESC
    LIMIT :scan::integer
  )
  UNION ALL
  (
    SELECT l.id, l.requested_at
    FROM holdfast.labels AS l
    WHERE :index_name::text = 'label'
      AND l.tenant = :tenant::text
      AND l.label = md5(:label::text)::uuid
      AND (l.requested_at, l.id) < (coalesce(:before_at::timestamptz, 'infinity'), :before_id::uuid)
      AND l.requested_at >= coalesce(:since_at::timestamptz, '-infinity')
    ORDER BY l.requested_at DESC, l.id DESC
    LIMIT :scan::integer
  )
  UNION ALL
  (
    SELECT j.id, j.requested_at
    FROM holdfast.jobs AS j
    WHERE :index_name::text = 'lane'
      AND j.tenant = :tenant::text
      AND j.lane = :lane::text
      AND (j.requested_at, j.id) < (coalesce(:before_at::timestamptz, 'infinity'), :before_id::uuid)
      AND j.requested_at >= coalesce(:since_at::timestamptz, '-infinity')
    ORDER BY j.requested_at DESC, j.id DESC
    LIMIT :scan::integer
  )
  UNION ALL
  (
    SELECT f.id, f.requested_at
    FROM json_to_recordset(:ranges::json) AS g(status text, queue text)
    CROSS JOIN LATERAL (
      (
        SELECT j.id, j.requested_at
        FROM holdfast.jobs AS j
        WHERE :index_name::text = 'status'
          AND j.tenant = :tenant::text
          AND j.status = g.status
          AND j.queue = g.queue
          AND j.gate IS NOT NULL
          AND (j.requested_at, j.id) < (coalesce(:before_at::timestamptz, 'infinity'), :before_id::uuid)
          AND j.requested_at >= coalesce(:since_at::timestamptz, '-infinity')
        ORDER BY j.requested_at DESC, j.id DESC
        LIMIT :scan::integer
      )
      UNION ALL
      (
        SELECT j.id, j.requested_at
        FROM holdfast.jobs AS j
        WHERE :index_name::text = 'status'
          AND j.tenant = :tenant::text
          AND j.status = g.status
          AND j.queue = g.queue
          AND j.status IN ('paused', 'succeeded', 'failed', 'timed_out', 'cancelled')
          AND (j.requested_at, j.id) < (coalesce(:before_at::timestamptz, 'infinity'), :before_id::uuid)
          AND j.requested_at >= coalesce(:since_at::timestamptz, '-infinity')
        ORDER BY j.requested_at DESC, j.id DESC
        LIMIT :scan::integer
      )
      UNION ALL
      (
        SELECT j.id, j.requested_at
        FROM holdfast.jobs AS j
        WHERE :index_name::text = 'status'
          AND j.tenant = :tenant::text
          AND j.status = g.status
          AND (g.queue IS NULL OR j.queue = g.queue)
          AND j.phase IS NOT NULL
          AND g.status = 'running'
          AND (j.requested_at, j.id) < (coalesce(:before_at::timestamptz, 'infinity'), :before_id::uuid)
          AND j.requested_at >= coalesce(:since_at::timestamptz, '-infinity')
        ORDER BY j.requested_at DESC, j.id DESC
        LIMIT :scan::integer
      )
    ) AS f
    ORDER BY f.requested_at DESC, f.id DESC
    LIMIT :scan::integer
  )
)
SELECT r.*, f.fits, (SELECT count(*) FROM scanned) AS scanned
FROM scanned AS w
JOIN holdfast.job_records AS r ON r.id = w.id
CROSS JOIN LATERAL (
  SELECT (:statuses::json IS NULL OR r.status IN (SELECT json_array_elements_text(:statuses::json)))
    AND (:kind::text IS NULL OR r.kind = :kind::text)
    AND (:queue::text IS NULL OR r.queue = :queue::text)
    AND (:lane::text IS NULL OR r.lane = :lane::text)
    AND (:labels::jsonb IS NULL OR r.labels @> :labels::jsonb) AS fits
) AS f
WHERE f.fits
  OR w.id = (SELECT x.id FROM scanned AS x ORDER BY x.requested_at, x.id LIMIT 1)
ORDER BY w.requested_at DESC, w.id DESC
LIMIT :limit::integer;
-- sqlite
WITH scanned AS MATERIALIZED (
  SELECT * FROM (
    SELECT s.id, s.requested_at
    FROM specs AS s
    WHERE :index_name = 'newest'
      AND s.tenant = :tenant
      AND (s.requested_at, s.id) < (coalesce(:before_at, 9223372036854775807), :before_id)
      AND s.requested_at >= coalesce(:since_at, 0)
    ORDER BY s.requested_at DESC, s.id DESC
    LIMIT :scan
  )
  UNION ALL
  SELECT * FROM (
    SELECT s.id, s.requested_at
    FROM specs AS s
    WHERE :index_name = 'kind'
      AND s.tenant = :tenant
      AND s.kind = :kind
      AND (s.requested_at, s.id) < (coalesce(:before_at, 9223372036854775807), :before_id)
      AND s.requested_at >= coalesce(:since_at, 0)
    ORDER BY s.requested_at DESC, s.id DESC
    LIMIT :scan
  )
  UNION ALL
  SELECT * FROM (
    SELECT l.id, l.requested_at
    FROM labels AS l
    WHERE :index_name = 'label'
      AND l.tenant = :tenant
      AND l.label = :label
      AND (l.requested_at, l.id) < (coalesce(:before_at, 9223372036854775807), :before_id)
      AND l.requested_at >= coalesce(:since_at, 0)
    ORDER BY l.requested_at DESC, l.id DESC
    LIMIT :scan
  )
  UNION ALL
  SELECT * FROM (
    SELECT j.id, j.requested_at
    FROM jobs AS j
    WHERE :index_name = 'lane'
      AND j.tenant = :tenant
      AND j.lane = :lane
      AND (j.requested_at, j.id) < (coalesce(:before_at, 9223372036854775807), :before_id)
      AND j.requested_at >= coalesce(:since_at, 0)
    ORDER BY j.requested_at DESC, j.id DESC
    LIMIT :scan
  )
  UNION ALL
  SELECT * FROM (
    SELECT j.id, j.requested_at
    FROM json_each(:ranges) AS g
    CROSS JOIN jobs AS j
    WHERE :index_name = 'status'
      AND j.rowid IN (
        SELECT * FROM (
          SELECT f.rowid
          FROM jobs AS f INDEXED BY jobs_waiting
          WHERE f.tenant = :tenant
            AND f.status = g.value ->> 'status'
            AND f.queue = g.value ->> 'queue'
            AND f.gate IS NOT NULL
            AND (f.requested_at, f.id) < (coalesce(:before_at, 9223372036854775807), :before_id)
            AND f.requested_at >= coalesce(:since_at, 0)
          ORDER BY f.requested_at DESC, f.id DESC
          LIMIT :scan
        )
        UNION ALL
        SELECT * FROM (
          SELECT f.rowid
          FROM jobs AS f INDEXED BY jobs_ended
          WHERE f.tenant = :tenant
            AND f.status = g.value ->> 'status'
            AND f.queue = g.value ->> 'queue'
            AND (f.status = 'paused' OR f.status = 'succeeded' OR f.status = 'failed' OR f.status = 'timed_out' OR f.status = 'cancelled')
            AND (f.requested_at, f.id) < (coalesce(:before_at, 9223372036854775807), :before_id)
            AND f.requested_at >= coalesce(:since_at, 0)
          ORDER BY f.requested_at DESC, f.id DESC
          LIMIT :scan
        )
        UNION ALL
        SELECT * FROM (
          SELECT f.rowid
          FROM jobs AS f INDEXED BY jobs_running
          WHERE f.tenant = :tenant
            AND f.status = g.value ->> 'status'
            AND (g.value ->> 'queue' IS NULL OR f.queue = g.value ->> 'queue')
            AND f.phase IS NOT NULL
            AND g.value ->> 'status' = 'running'
            AND (f.requested_at, f.id) < (coalesce(:before_at, 9223372036854775807), :before_id)
            AND f.requested_at >= coalesce(:since_at, 0)
          ORDER BY f.requested_at DESC, f.id DESC
          LIMIT :scan
        )
      )
    ORDER BY j.requested_at DESC, j.id DESC
    LIMIT :scan
  )
)
SELECT r.*, (SELECT count(*) FROM scanned) AS scanned,
  (:statuses IS NULL OR r.status IN (SELECT value FROM json_each(:statuses)))
  AND (:kind IS NULL OR r.kind = :kind)
  AND (:queue IS NULL OR r.queue = :queue)
  AND (:lane IS NULL OR r.lane = :lane)
  AND (:labels IS NULL OR NOT EXISTS (
    SELECT 1 FROM json_each(:labels) AS w
    WHERE NOT EXISTS (SELECT 1 FROM json_each(r.labels) AS l WHERE l.key = w.key AND l.value = w.value))) AS fits
FROM scanned AS w
CROSS JOIN job_records AS r ON r.id = w.id
WHERE fits
  OR w.id = (SELECT x.id FROM scanned AS x ORDER BY x.requested_at, x.id LIMIT 1)
ORDER BY w.requested_at DESC, w.id DESC
LIMIT :limit;

-- name: list_ranges
-- The queues that have jobs of these statuses. Skips from queue to queue along jobs_waiting and jobs_ended.
WITH RECURSIVE ranges (status, queue) AS (
  SELECT w.status, '' COLLATE "C"
  FROM json_array_elements_text(:statuses::json) AS w(status)
  UNION ALL
  SELECT r.status, coalesce(
    (
      SELECT min(j.queue) FROM holdfast.jobs AS j
      WHERE j.tenant = :tenant::text AND j.status = r.status AND j.queue > r.queue AND j.gate IS NOT NULL
    ), (
      SELECT min(j.queue) FROM holdfast.jobs AS j
      WHERE j.tenant = :tenant::text AND j.status = r.status AND j.queue > r.queue
        AND {ended_or_paused}
    ))
  FROM ranges AS r
  WHERE r.queue IS NOT NULL
)
SELECT r.status, r.queue FROM ranges AS r WHERE r.queue <> '';

-- name: jobs_between
-- Jobs whose ids lie between two bounds: those with a common prefix. Uses the primary key.
SELECT r.*
FROM holdfast.job_records AS r
WHERE r.id >= :least::uuid
  AND r.id <= :most::uuid
  AND r.tenant = :tenant::text
ORDER BY r.id
LIMIT :limit::integer;

-- name: jobs_ending
-- Jobs whose ids end with these digits. Uses specs_listed: reads all ids of the tenant, newest first, and no table. An
-- index on the end of ids would be quicker here, and slow down every submit (docs/adr/0038-ids-by-their-end.md).
-- `tail` is the last 6 characters: on Postgres their 3 bytes are cheaper to compare than text, which is made only where they match.
WITH found AS MATERIALIZED (
  SELECT s.id
  FROM holdfast.specs AS s
  WHERE s.tenant = :tenant::text
    AND substr(uuid_send(s.id), 14) = decode(:tail::text, 'hex')
    AND replace(s.id::text, '-', '') LIKE '%' || :digits::text
  ORDER BY s.requested_at DESC, s.id DESC
  LIMIT :limit::integer
)
SELECT r.*
FROM found AS f
JOIN holdfast.job_records AS r ON r.id = f.id
ORDER BY r.id;
-- sqlite
WITH found AS MATERIALIZED (
  SELECT s.id
  FROM specs AS s INDEXED BY specs_listed
  WHERE s.tenant = :tenant
    AND substr(s.id, -6) = :tail
    AND replace(s.id, '-', '') LIKE '%' || :digits
  ORDER BY s.requested_at DESC, s.id DESC
  LIMIT :limit
)
SELECT r.*
FROM found AS f
CROSS JOIN job_records AS r ON r.id = f.id
ORDER BY r.id;
