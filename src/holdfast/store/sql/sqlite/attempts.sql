-- All attempts of a job: ended ones from their table, the open one from the job's row.

-- name: list_attempts
SELECT a.attempt, a.worker, coalesce(a.adopter, a.worker) AS last_worker, a.domain, a.token, a.claimed_at, a.started_at, a.ended_at, a.cause, a.exit_code, a.signal,
  a.error_code, a.error_message, NULL AS phase
FROM attempts AS a
WHERE a.job_id = :id
UNION ALL
SELECT j.attempt, j.worker, coalesce(j.adopter, j.worker), j.domain, j.token, j.claimed_at, j.attempt_started_at, NULL, NULL, NULL, NULL, NULL, NULL,
  j.phase
FROM jobs AS j
WHERE j.id = :id
  AND j.phase IS NOT NULL
ORDER BY attempt;

-- name: current_attempts
-- Which of these attempts are still open. Uses the primary key.
SELECT j.id, j.attempt
FROM json_each(:rows) AS r
JOIN jobs AS j ON j.id = r.value ->> 'id' AND j.attempt = r.value ->> 'attempt'
WHERE j.phase IS NOT NULL;

-- name: lost_before
-- Which of these jobs have an earlier attempt that was lost. Uses the primary key.
SELECT DISTINCT a.job_id AS id
FROM attempts AS a
WHERE a.job_id IN (SELECT value FROM json_each(:ids))
  AND a.cause = 'lost';

-- name: attempt_tokens
-- Every attempt of these jobs with the token of its end, or the current one. Uses the primary keys.
SELECT a.job_id AS id, a.attempt, a.token
FROM attempts AS a
WHERE a.job_id IN (SELECT value FROM json_each(:ids))
UNION ALL
SELECT j.id, j.attempt, j.token
FROM jobs AS j
WHERE j.id IN (SELECT value FROM json_each(:ids))
  AND j.phase IS NOT NULL;

-- name: jobs_of_domains
-- Which of these jobs had an attempt in a domain that begins with :prefix. Uses attempts_pkey.
SELECT DISTINCT a.job_id AS id
FROM json_each(:ids) AS e
CROSS JOIN attempts AS a ON a.job_id = e.value
WHERE substr(a.domain, 1, length(:prefix)) = :prefix;
