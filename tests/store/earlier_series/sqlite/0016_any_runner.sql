-- As in the Postgres migration of the same number. Differs: SQLite can change a constraint only in a new table, so that the
-- specs are copied once; the repeatable files make the views and the trigger again.
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
