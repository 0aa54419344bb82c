-- revision: 1
-- A job as people see it: what was asked for, and how it stands.
CREATE OR REPLACE VIEW holdfast.job_records AS
SELECT
  j.id, j.tenant, s.kind, j.queue, j.capability, j.lane, j.lane_position, j.status, j.gate, j.priority, s.labels,
  s.runner, s.spec, s.inputs, j.held, j.dismissed,
  j.spent + CASE WHEN j.phase = 'started' THEN 1 ELSE 0 END AS attempts, j.max_attempts, j.attempt,
  j.requested_at, j.available_at, j.started_at, j.finished_at, j.updated_at,
  j.owner, j.token, j.lease_expires_at, j.orphaned_at, j.phase, j.domain,
  j.stop_kind, j.stop_phase, j.stop_deadline_at,
  j.exit_code, j.error_code, j.error_message, j.result, j.progress, j.usage, j.seq,
  s.policy, s.reuse_key, s.signature
FROM holdfast.jobs AS j
JOIN holdfast.specs AS s ON s.id = j.id;

-- The events that the ledger and the spec already tell: accepted, claimed, ended. Nothing is written twice.
CREATE OR REPLACE VIEW holdfast.ledger_events AS
SELECT s.id AS job_id, 1::bigint AS seq, s.requested_at AS at, 'status'::text AS type, NULL::text AS task,
  CASE WHEN s.held THEN '{"status":"pending"}' ELSE '{"status":"queued"}' END::json AS data
FROM holdfast.specs AS s
UNION ALL
SELECT j.id, j.claim_seq, j.claimed_at, 'status', NULL,
  json_build_object('status', 'running', 'attempt', j.attempt, 'worker', j.worker)
FROM holdfast.jobs AS j
WHERE j.phase IS NOT NULL
UNION ALL
SELECT a.job_id, a.claim_seq, a.claimed_at, 'status', NULL,
  json_build_object('status', 'running', 'attempt', a.attempt, 'worker', a.worker)
FROM holdfast.attempts AS a
UNION ALL
SELECT a.job_id, a.end_seq, a.ended_at, 'status', NULL,
  CASE WHEN a.error_code IS NULL
    THEN json_build_object('status', a.status, 'attempt', a.attempt, 'cause', a.cause)
    ELSE json_build_object('status', a.status, 'attempt', a.attempt, 'cause', a.cause,
      'code', a.error_code, 'message', a.error_message)
  END
FROM holdfast.attempts AS a
WHERE a.end_seq IS NOT NULL;

-- The whole history of every job, for people with SQL.
CREATE OR REPLACE VIEW holdfast.job_events AS
SELECT e.job_id, e.seq, e.at, e.type, e.task, e.data FROM holdfast.events AS e
UNION ALL
SELECT l.job_id, l.seq, l.at, l.type, l.task, l.data FROM holdfast.ledger_events AS l;
