-- The ends of attempts. Every write carries the lease's token.

-- fragment: ended_attempt
-- What the ended attempt of a job keeps.
e.id, e.attempt, e.worker, e.domain, e.token, e.claim_seq, e.seq, e.status, e.claimed_at, e.attempt_started_at, e.updated_at,
  e.exit_code, e.error_code, e.error_message, e.adopter

-- fragment: end_columns
-- The fields of an Ended, by name.
e.id::text AS id, e.status, e.queue, e.gate, e.has_dependants

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
  SET {finish_writes}
  FROM input AS i
  CROSS JOIN clock AS t
  WHERE j.id = i.id
    AND j.token = i.token
    AND j.status = 'running'
  RETURNING j.id, j.tenant, j.attempt, j.status, j.seq, j.updated_at, j.has_dependants, j.queue, j.gate, j.exit_code, j.error_code,
    j.error_message, j.token, j.worker, j.adopter, j.domain, j.claim_seq, j.claimed_at, j.attempt_started_at, i.cause, i.signal
), kept AS (
  INSERT INTO holdfast.attempts (
    job_id, attempt, worker, domain, token, claim_seq, end_seq, status, claimed_at, started_at, ended_at, exit_code,
    error_code, error_message, adopter, cause, signal)
  SELECT {ended_attempt}, e.cause, e.signal
  FROM ended AS e
), moves AS (
  SELECT e.id, e.tenant, e.queue, 'running' AS old_status, e.status AS new_status, e.seq, e.updated_at AS changed_at
  FROM ended AS e
)
SELECT {end_columns} FROM ended AS e;
-- sqlite
DELETE FROM ended;
-- each: rows
INSERT INTO ended (job_rowid, status, cause, exit_code, signal, error_code, error_message, result, delay)
SELECT j.rowid, :status, :cause, :exit_code, :signal, :error_code, :error_message, :result, :delay
FROM jobs AS j
WHERE j.id = :id
  AND j.token = :token
  AND j.status = 'running';
UPDATE jobs AS j
SET {finish_writes}
FROM ended AS i
WHERE j.rowid = i.job_rowid;
INSERT INTO attempts (
  job_id, attempt, worker, domain, token, claim_seq, end_seq, status, claimed_at, started_at, ended_at, exit_code,
  error_code, error_message, adopter, cause, signal)
SELECT {ended_attempt}, i.cause, i.signal
FROM ended AS i
CROSS JOIN jobs AS e ON e.rowid = i.job_rowid;
-- moves
SELECT e.id, e.tenant, e.queue, 'running' AS old_status, e.status AS new_status, e.seq, e.updated_at AS changed_at
FROM ended AS i
CROSS JOIN jobs AS e ON e.rowid = i.job_rowid;
-- as json
SELECT {end_columns}
FROM ended AS i
CROSS JOIN jobs AS e ON e.rowid = i.job_rowid;

-- name: recorded_ends
-- Which of these ends are already recorded: same token, no open attempt.
SELECT j.id, j.status
FROM :rows AS r(id uuid, token bigint)
JOIN holdfast.jobs AS j ON j.id = r.id AND j.token = r.token
WHERE j.phase IS NULL;
