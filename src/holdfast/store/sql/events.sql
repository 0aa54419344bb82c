-- The history of a job. The counter lives on the job's row, so that `seq` has no gap.

-- name: append_events
-- Append batch n of a running attempt and move its offsets, only if batch n - 1 and the old offsets are recorded.
WITH job AS (
  UPDATE holdfast.jobs AS j
  SET seq = j.seq + json_array_length(:events::json),
      batch = :batch::bigint,
      stdout_offset = :stdout_offset::bigint,
      stderr_offset = :stderr_offset::bigint,
      progress = coalesce(:progress::json, j.progress),
      usage = CASE WHEN :usage::json IS NULL THEN j.usage ELSE (
        SELECT json_object_agg(u.key, u.total ORDER BY u.key) FROM (
          SELECT e.key, sum(e.value::numeric) AS total FROM (
            SELECT key, value FROM json_each_text(coalesce(j.usage, '{}'))
            UNION ALL
            SELECT key, value FROM json_each_text(:usage::json)) AS e
          GROUP BY e.key) AS u) END,
      log_bytes = j.log_bytes + :log_bytes::bigint,
      adoptions = 0,
      updated_at = greatest(holdfast.clock(), j.updated_at)
  WHERE j.id = :id::uuid
    AND j.token = :token::bigint
    AND j.status = 'running'
    AND j.batch = :batch::bigint - 1
    AND j.stdout_offset = :old_stdout_offset::bigint
    AND j.stderr_offset = :old_stderr_offset::bigint
  RETURNING j.id, j.seq, j.updated_at, j.usage, j.log_bytes
), new_events AS (
  INSERT INTO holdfast.events (job_id, seq, at, type, task, data)
  SELECT job.id, job.seq - json_array_length(:events::json) + e.n, job.updated_at, e.event ->> 'type',
    e.event ->> 'task', (e.event ->> 'data')::json
  FROM job
  CROSS JOIN json_array_elements(:events::json) WITH ORDINALITY AS e(event, n)
)
SELECT job.seq, job.usage, job.log_bytes FROM job;
-- sqlite
DELETE FROM affected;
INSERT INTO affected (id, token)
SELECT j.id, j.seq
FROM jobs AS j
WHERE j.id = :id
  AND j.token = :token
  AND j.status = 'running'
  AND j.batch = :batch - 1
  AND j.stdout_offset = :old_stdout_offset
  AND j.stderr_offset = :old_stderr_offset;
UPDATE jobs
SET seq = seq + json_array_length(:events),
    batch = :batch,
    stdout_offset = :stdout_offset,
    stderr_offset = :stderr_offset,
    progress = coalesce(:progress, progress),
    usage = CASE WHEN :usage IS NULL THEN usage ELSE (
      SELECT json_group_object(u.key, u.total) FROM (
        SELECT e.key, sum(e.value) AS total FROM (
          SELECT key, value FROM json_each(coalesce(jobs.usage, '{}'))
          UNION ALL
          SELECT key, value FROM json_each(:usage)) AS e
        GROUP BY e.key ORDER BY e.key) AS u) END,
    log_bytes = log_bytes + :log_bytes,
    adoptions = 0,
    updated_at = max(clock(), updated_at)
WHERE id IN (SELECT id FROM affected);
INSERT INTO events (job_id, seq, at, type, task, data)
SELECT t.id, t.token + e.key + 1, j.updated_at, e.value ->> 'type', e.value ->> 'task', e.value ->> 'data'
FROM affected AS t
CROSS JOIN jobs AS j ON j.id = t.id
CROSS JOIN json_each(:events) AS e;
SELECT j.seq, j.usage, j.log_bytes FROM affected AS t CROSS JOIN jobs AS j ON j.id = t.id;

-- name: append_state
-- Why an append was not applied: it is a repeat, or the lease is lost.
SELECT j.batch, j.seq, j.usage, j.log_bytes
FROM holdfast.jobs AS j
WHERE j.id = :id::uuid
  AND j.token = :token::bigint
  AND j.status = 'running';

-- name: log_bytes
-- How many bytes of log are stored for a job. Uses the primary key.
SELECT j.log_bytes
FROM holdfast.jobs AS j
WHERE j.id = :id::uuid;

-- name: list_events
-- Appended events, and those derived from the attempts. Uses events_pkey and attempts_pkey.
SELECT h.seq, h.at AS event_at, h.type, h.task, h.data
FROM (
  /*sqlite SELECT * FROM */ (SELECT e.seq, e.at, e.type, e.task, e.data
    FROM holdfast.events AS e
    WHERE e.job_id = :id::uuid
      AND e.seq > :after::bigint
    ORDER BY e.seq
    LIMIT :limit::integer)
  UNION ALL
  /*sqlite SELECT * FROM */ (SELECT l.seq, l.at, l.type, l.task, l.data
    FROM holdfast.ledger_events AS l
    WHERE l.job_id = :id::uuid
      AND l.seq > :after::bigint
    ORDER BY l.seq
    LIMIT :limit::integer)) AS h
ORDER BY h.seq
LIMIT :limit::integer;

-- name: heads
-- The last event of these jobs, and whether more may follow. Uses the primary key.
SELECT j.id, j.tenant, j.seq, j.status, j.error_code
FROM holdfast.jobs AS j
WHERE j.id IN (SELECT e::uuid FROM json_array_elements_text(:ids::json) AS e);
