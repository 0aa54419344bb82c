-- Pipelines: the tasks of their jobs, the snapshots that tasks made, and who is building one.
--
-- tasks      one row per task of a planned pipeline; `snapshot` is the id that its result has, stored or not
-- snapshots  one row per stored folder; the row decides which folder counts
-- builds     the lock of a snapshot that is being built; it holds as long as the lease that it names

CREATE TABLE holdfast.tasks (
  job_id uuid NOT NULL,
  n integer NOT NULL,
  name text NOT NULL,
  status text NOT NULL,
  cached boolean NOT NULL DEFAULT false,
  parent text COLLATE "C" NOT NULL,
  snapshot text COLLATE "C" NOT NULL,
  started_at timestamptz,
  ended_at timestamptz,
  exit_code integer,
  CONSTRAINT tasks_pkey PRIMARY KEY (job_id, n),
  CONSTRAINT task_status_known CHECK (status IN ('pending', 'running', 'succeeded', 'failed', 'timed_out', 'cancelled')),
  CONSTRAINT cached_succeeded CHECK (NOT cached OR status = 'succeeded')
) WITH (fillfactor = 80);
CREATE INDEX tasks_parent ON holdfast.tasks (parent);
CREATE INDEX tasks_snapshot ON holdfast.tasks (snapshot);

CREATE TABLE holdfast.snapshots (
  id text COLLATE "C" CONSTRAINT snapshots_pkey PRIMARY KEY,
  tenant text COLLATE "C" NOT NULL,
  parent text COLLATE "C" NOT NULL,
  task text NOT NULL,
  task_hash text NOT NULL,
  components json NOT NULL,
  folder text COLLATE "C" NOT NULL CONSTRAINT snapshots_folder UNIQUE,
  digest text NOT NULL,
  size bigint NOT NULL,
  made_at timestamptz NOT NULL,
  used_at timestamptz NOT NULL,
  job_id uuid NOT NULL,
  token bigint NOT NULL
) WITH (fillfactor = 80);
COMMENT ON COLUMN holdfast.snapshots.digest IS 'What a look at every entry of the folder says; compared when it is used.';
CREATE INDEX snapshots_listed ON holdfast.snapshots (tenant, made_at DESC, id DESC);
CREATE INDEX snapshots_parent ON holdfast.snapshots (parent);
CREATE INDEX snapshots_used ON holdfast.snapshots (used_at, size DESC, id);

CREATE TABLE holdfast.builds (
  id text COLLATE "C" CONSTRAINT builds_pkey PRIMARY KEY,
  job_id uuid,
  token bigint,
  taken_at timestamptz NOT NULL
);
