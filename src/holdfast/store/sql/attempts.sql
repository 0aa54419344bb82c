-- All attempts of a job: ended ones from their table, the open one from the job's row.

-- name: list_attempts
SELECT a.attempt, a.worker, coalesce(a.adopter, a.worker) AS last_worker, a.domain, a.token, a.claimed_at, a.started_at, a.ended_at, a.cause, a.exit_code, a.signal,
  a.error_code, a.error_message, NULL AS phase
FROM holdfast.attempts AS a
WHERE a.job_id = :id::uuid
UNION ALL
SELECT j.attempt, j.worker, coalesce(j.adopter, j.worker), j.domain, j.token, j.claimed_at, j.attempt_started_at, NULL, NULL, NULL, NULL, NULL, NULL,
  j.phase
FROM holdfast.jobs AS j
WHERE j.id = :id::uuid
  AND j.phase IS NOT NULL
ORDER BY attempt;

-- name: current_attempts
-- Which of these attempts are still open. Uses the primary key.
SELECT j.id, j.attempt
FROM :rows AS r(id uuid, attempt integer)
JOIN holdfast.jobs AS j ON j.id = r.id AND j.attempt = r.attempt
WHERE j.phase IS NOT NULL;

-- name: lost_before
-- Which of these jobs have an earlier attempt that was lost. Uses the primary key.
SELECT DISTINCT a.job_id AS id
FROM holdfast.attempts AS a
WHERE a.job_id = ANY (ARRAY(SELECT e::uuid FROM json_array_elements_text(:ids::json) AS e))
  AND a.cause = 'lost';

-- name: attempt_tokens
-- Every attempt of these jobs with the token of its end, or the current one. Uses the primary keys.
SELECT a.job_id AS id, a.attempt, a.token
FROM holdfast.attempts AS a
WHERE a.job_id IN (SELECT e::uuid FROM json_array_elements_text(:ids::json) AS e)
UNION ALL
SELECT j.id, j.attempt, j.token
FROM holdfast.jobs AS j
WHERE j.id IN (SELECT e::uuid FROM json_array_elements_text(:ids::json) AS e)
  AND j.phase IS NOT NULL;

-- name: jobs_of_domains
-- Which of these jobs had an attempt in a domain that begins with :prefix. Uses attempts_pkey.
SELECT e.id
FROM (SELECT e::uuid AS id FROM json_array_elements_text(:ids::json) AS e) AS e
CROSS JOIN LATERAL (
  SELECT 1 FROM holdfast.attempts AS a WHERE a.job_id = e.id AND starts_with(a.domain, :prefix::text) LIMIT 1) AS found;
-- sqlite
SELECT DISTINCT a.job_id AS id
FROM json_each(:ids) AS e
CROSS JOIN attempts AS a ON a.job_id = e.value
WHERE substr(a.domain, 1, length(:prefix)) = :prefix;
