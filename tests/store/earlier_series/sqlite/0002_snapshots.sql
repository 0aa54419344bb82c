-- Pipelines, as in the Postgres migration of the same number.

CREATE TABLE tasks (
  job_id TEXT NOT NULL,
  n INTEGER NOT NULL,
  name TEXT NOT NULL,
  status TEXT NOT NULL,
  cached INTEGER NOT NULL DEFAULT 0,
  parent TEXT NOT NULL,
  snapshot TEXT NOT NULL,
  started_at INTEGER,
  ended_at INTEGER,
  exit_code INTEGER,
  CONSTRAINT tasks_pkey PRIMARY KEY (job_id, n),
  CONSTRAINT task_status_known CHECK (status = 'pending' OR status = 'running' OR status = 'succeeded' OR status = 'failed' OR status = 'timed_out' OR status = 'cancelled'),
  CONSTRAINT cached_succeeded CHECK (NOT cached OR status = 'succeeded')
) WITHOUT ROWID, STRICT;
CREATE INDEX tasks_parent ON tasks (parent);
CREATE INDEX tasks_snapshot ON tasks (snapshot);

CREATE TABLE snapshots (
  id TEXT NOT NULL PRIMARY KEY,
  tenant TEXT NOT NULL,
  parent TEXT NOT NULL,
  task TEXT NOT NULL,
  task_hash TEXT NOT NULL,
  components TEXT NOT NULL,
  folder TEXT NOT NULL,
  digest TEXT NOT NULL,
  size INTEGER NOT NULL,
  made_at INTEGER NOT NULL,
  used_at INTEGER NOT NULL,
  job_id TEXT NOT NULL,
  token INTEGER NOT NULL,
  CONSTRAINT snapshots_folder UNIQUE (folder)
) WITHOUT ROWID, STRICT;
CREATE INDEX snapshots_listed ON snapshots (tenant, made_at DESC, id DESC);
CREATE INDEX snapshots_parent ON snapshots (parent);
CREATE INDEX snapshots_used ON snapshots (used_at, size DESC, id);

CREATE TABLE builds (
  id TEXT NOT NULL PRIMARY KEY,
  job_id TEXT,
  token INTEGER,
  taken_at INTEGER NOT NULL
) WITHOUT ROWID, STRICT;
