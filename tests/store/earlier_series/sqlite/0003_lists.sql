-- Lists, as in the Postgres migration of the same number.

DROP INDEX jobs_ended_badly;
CREATE INDEX jobs_waiting ON jobs (tenant, status, queue, requested_at, id) WHERE gate IS NOT NULL;
CREATE INDEX jobs_ended ON jobs (tenant, status, queue, requested_at, id)
  WHERE (status = 'paused' OR status = 'succeeded' OR status = 'failed' OR status = 'timed_out' OR status = 'cancelled');
CREATE INDEX jobs_of_lane ON jobs (tenant, lane, requested_at, id) WHERE lane IS NOT NULL;
CREATE INDEX specs_of_kind ON specs (tenant, kind, requested_at, id);

CREATE TABLE labels (
  tenant TEXT NOT NULL,
  label TEXT NOT NULL,
  requested_at INTEGER NOT NULL,
  id TEXT NOT NULL,
  CONSTRAINT labels_listed PRIMARY KEY (tenant, label, requested_at, id)
) WITHOUT ROWID, STRICT;

-- Differs: a submit writes its labels itself; a trigger that takes JSON apart made it a quarter dearer.
CREATE TRIGGER forget_labels AFTER DELETE ON specs WHEN OLD.labels IS NOT NULL
BEGIN
  DELETE FROM labels
  WHERE tenant = OLD.tenant
    AND label IN (SELECT l.key || '=' || l.value FROM json_each(OLD.labels) AS l)
    AND requested_at = OLD.requested_at
    AND id = OLD.id;
END;

INSERT INTO labels (tenant, label, requested_at, id)
SELECT s.tenant, l.key || '=' || l.value, s.requested_at, s.id
FROM specs AS s
CROSS JOIN json_each(s.labels) AS l
WHERE s.labels IS NOT NULL;
