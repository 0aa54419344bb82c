-- As in the Postgres migration of the same number. Differs: SQLite can change a constraint only in a new table, so that the
-- specs are copied once; views and the trigger that name the table are made again as they were.
DROP VIEW job_events;
DROP VIEW ledger_events;
DROP VIEW job_records;
CREATE TABLE specs_new (
  id TEXT NOT NULL PRIMARY KEY,
  tenant TEXT NOT NULL,
  kind TEXT NOT NULL,
  requested_at INTEGER NOT NULL,
  held INTEGER NOT NULL DEFAULT 0,
  runner TEXT NOT NULL,
  spec TEXT NOT NULL,
  inputs TEXT NOT NULL,
  labels TEXT,
  policy TEXT,
  signature TEXT,
  reuse_key TEXT,
  CONSTRAINT runner_named CHECK (length(runner) <= 63 AND runner GLOB '[a-z]*' AND runner NOT GLOB '*[^a-z0-9_-]*')
) WITHOUT ROWID, STRICT;
INSERT INTO specs_new (id, tenant, kind, requested_at, held, runner, spec, inputs, labels, policy, signature, reuse_key)
SELECT id, tenant, kind, requested_at, held, runner, spec, inputs, labels, policy, signature, reuse_key
FROM specs;
DROP TABLE specs;
ALTER TABLE specs_new RENAME TO specs;
CREATE INDEX specs_listed ON specs (tenant, requested_at, id);
CREATE INDEX specs_signed ON specs (tenant, signature, requested_at DESC, id DESC) WHERE signature IS NOT NULL;
CREATE INDEX specs_of_kind ON specs (tenant, kind, requested_at, id);
CREATE INDEX specs_base ON specs (tenant, spec ->> '$.base') WHERE spec ->> '$.base' IS NOT NULL;
CREATE TRIGGER forget_labels AFTER DELETE ON specs WHEN OLD.labels IS NOT NULL
BEGIN
  DELETE FROM labels
  WHERE tenant = OLD.tenant
    AND label IN (SELECT l.key || '=' || l.value FROM json_each(OLD.labels) AS l)
    AND requested_at = OLD.requested_at
    AND id = OLD.id;
END;

CREATE VIEW job_records AS
SELECT
  j.id, j.tenant, s.kind, j.queue, j.capability, j.lane, j.lane_position, j.status, j.gate, j.priority, s.labels,
  s.runner, s.spec, s.inputs, j.held, j.dismissed,
  j.spent + CASE WHEN j.phase = 'started' THEN 1 ELSE 0 END AS attempts, j.max_attempts, j.attempt,
  j.requested_at, j.available_at, j.started_at, j.finished_at, j.updated_at,
  j.owner, j.token, j.lease_expires_at, j.orphaned_at, j.phase, j.domain,
  j.stop_kind, j.stop_phase, j.stop_deadline_at,
  j.exit_code, j.error_code, j.error_message, j.result, j.progress, j.usage, j.seq,
  s.policy, s.reuse_key, s.signature
FROM jobs AS j
JOIN specs AS s ON s.id = j.id;

CREATE VIEW ledger_events AS
SELECT s.id AS job_id, 1 AS seq, s.requested_at AS at, 'status' AS type, NULL AS task,
  CASE WHEN s.held THEN '{"status":"pending"}' ELSE '{"status":"queued"}' END AS data
FROM specs AS s
UNION ALL
SELECT j.id, j.claim_seq, j.claimed_at, 'status', NULL,
  json_object('status', 'running', 'attempt', j.attempt, 'worker', j.worker)
FROM jobs AS j
WHERE j.phase IS NOT NULL
UNION ALL
SELECT a.job_id, a.claim_seq, a.claimed_at, 'status', NULL,
  json_object('status', 'running', 'attempt', a.attempt, 'worker', a.worker)
FROM attempts AS a
UNION ALL
SELECT a.job_id, a.end_seq, a.ended_at, 'status', NULL,
  CASE WHEN a.error_code IS NULL
    THEN json_object('status', a.status, 'attempt', a.attempt, 'cause', a.cause)
    ELSE json_object('status', a.status, 'attempt', a.attempt, 'cause', a.cause,
      'code', a.error_code, 'message', a.error_message)
  END
FROM attempts AS a
WHERE a.end_seq IS NOT NULL;

CREATE VIEW job_events AS
SELECT e.job_id, e.seq, e.at, e.type, e.task, e.data FROM events AS e
UNION ALL
SELECT l.job_id, l.seq, l.at, l.type, l.task, l.data FROM ledger_events AS l;
