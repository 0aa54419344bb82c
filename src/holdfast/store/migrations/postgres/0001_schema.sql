-- The tables. `holdfast` stands for the schema's name, which is a setting. Views, functions and triggers are in
-- sql/postgres/repeatable; only the clock is here, because the tests replace it.
--
-- jobs      one narrow row per job: all that changes while it lives, the open attempt included
-- specs     what was asked for; written once, read at claim and by people
-- attempts  one row per attempt that ended
-- events    the events that neither of them provides; with them the history of a job has no gaps
-- needs     which job waits for which
-- No foreign keys: their checks lock parent rows, and every delete goes through the store.
-- Names compare byte by byte (COLLATE "C"): fast, and the same order as in Python and on SQLite.

CREATE FUNCTION holdfast.clock() RETURNS timestamptz
LANGUAGE sql VOLATILE AS 'SELECT clock_timestamp()';
COMMENT ON FUNCTION holdfast.clock() IS 'The one clock of this store. Tests replace it to move time.';

CREATE TABLE holdfast.installation (
  one boolean CONSTRAINT installation_pkey PRIMARY KEY DEFAULT true,
  id text NOT NULL,
  shared_folder text,
  shared_path text,
  CONSTRAINT installation_one CHECK (one)
);
INSERT INTO holdfast.installation (id) VALUES (replace(gen_random_uuid()::text, '-', ''));
COMMENT ON TABLE holdfast.installation IS 'The identity of this database for the processes and containers that its workers start.';
COMMENT ON COLUMN holdfast.installation.shared_folder IS 'The id of the shared folder that belongs to this database; NULL until one is used.';
COMMENT ON COLUMN holdfast.installation.shared_path IS 'The path of the shared folder on the host that recorded it.';

-- Columns of indexes come first: an update compares all of them, and reaches a column by walking over those before it.
-- One constraint for the status, not one for each pair of columns: every statement parses the text of all constraints.
CREATE TABLE holdfast.jobs (
  id uuid PRIMARY KEY,
  requested_at timestamptz NOT NULL,
  available_at timestamptz NOT NULL,
  priority integer NOT NULL,
  limited boolean NOT NULL DEFAULT false,
  unsettled boolean NOT NULL DEFAULT false,
  dismissed boolean NOT NULL DEFAULT false,
  tenant text COLLATE "C" NOT NULL,
  queue text COLLATE "C" NOT NULL,
  capability text COLLATE "C" NOT NULL,
  status text NOT NULL,
  gate text,
  phase text,
  owner text COLLATE "C",
  lane text COLLATE "C",
  domain text COLLATE "C",
  stop_kind text,
  lane_position bigint,
  started_at timestamptz,
  adopt_after_at timestamptz,
  queue_deadline_at timestamptz,
  held boolean NOT NULL DEFAULT false,
  has_needs boolean NOT NULL DEFAULT false,
  has_dependants boolean NOT NULL DEFAULT false,
  updated_at timestamptz NOT NULL,
  token bigint NOT NULL DEFAULT 0,
  adoptions integer NOT NULL DEFAULT 0,
  attempt integer NOT NULL DEFAULT 0,
  stdout_offset bigint NOT NULL DEFAULT 0,
  stderr_offset bigint NOT NULL DEFAULT 0,
  batch bigint NOT NULL DEFAULT 0,
  spent integer NOT NULL DEFAULT 0,
  max_attempts integer NOT NULL,
  log_bytes bigint NOT NULL DEFAULT 0,
  seq bigint NOT NULL DEFAULT 0,
  finished_at timestamptz,
  lease_expires_at timestamptz,
  last_beat_at timestamptz,
  orphaned_at timestamptz,
  worker text COLLATE "C",
  claimed_at timestamptz,
  claim_seq bigint,
  attempt_started_at timestamptz,
  stop_phase text,
  stop_deadline_at timestamptz,
  exit_code integer,
  error_code text,
  error_message text,
  result json,
  progress json,
  usage json,
  stop_reason text,
  adopter text COLLATE "C",
  CONSTRAINT status_fits CHECK (CASE
    WHEN gate IS NOT NULL THEN owner IS NULL AND finished_at IS NULL AND (status = 'queued' AND gate <> 'held' OR status = 'pending')
    WHEN finished_at IS NOT NULL THEN owner IS NULL AND status IN ('succeeded', 'failed', 'timed_out', 'cancelled')
    WHEN status = 'running' THEN phase IS NOT NULL AND started_at IS NOT NULL
    ELSE status = 'paused' AND owner IS NULL
  END),
  CONSTRAINT gate_known CHECK (gate IN ('open', 'future', 'needs', 'lane', 'held', 'unresolved')),
  CONSTRAINT phase_known CHECK (phase IN ('claimed', 'started')),
  CONSTRAINT lease_whole CHECK ((owner IS NULL) = (lease_expires_at IS NULL)),
  CONSTRAINT times_in_order CHECK (started_at >= requested_at AND finished_at >= coalesce(started_at, requested_at)),
  CONSTRAINT stop_known CHECK (stop_kind IN ('interrupt', 'cancel', 'delete')),
  CONSTRAINT max_attempts_positive CHECK (max_attempts BETWEEN 1 AND 1000)
) WITH (
  fillfactor = 80,
  autovacuum_vacuum_scale_factor = 0.02,
  autovacuum_vacuum_threshold = 500,
  autovacuum_analyze_scale_factor = 0.05,
  autovacuum_vacuum_cost_delay = 1
);

-- Every index but the primary key is partial: a finished job sits in none of those that a worker reads.
CREATE INDEX jobs_claimable ON holdfast.jobs (queue, capability, tenant, (-priority), requested_at, id) WHERE gate = 'open';
CREATE INDEX jobs_future ON holdfast.jobs (available_at) WHERE gate = 'future';
CREATE INDEX jobs_unresolved ON holdfast.jobs (tenant, lane, requested_at, id) WHERE gate = 'unresolved';
CREATE INDEX jobs_needs_waiting ON holdfast.jobs (id) WHERE gate = 'needs';
CREATE INDEX jobs_held ON holdfast.jobs (id) WHERE gate = 'held';
CREATE INDEX jobs_lane_waiting ON holdfast.jobs (tenant, lane, lane_position) WHERE gate = 'lane';
CREATE INDEX jobs_lane_blocking ON holdfast.jobs (tenant, lane, lane_position)
  WHERE lane IS NOT NULL AND started_at IS NOT NULL AND NOT dismissed AND status IN ('paused', 'failed', 'timed_out');
-- By phase, not by status: otherwise the planner may choose this index for a statement that reads a running job by its id.
CREATE INDEX jobs_running ON holdfast.jobs (owner, queue) WHERE phase IS NOT NULL;
-- Open attempts without an owner: orphans, and paused jobs that may still run on an unreachable host (no adopt_after_at).
CREATE INDEX jobs_orphaned ON holdfast.jobs (domain, adopt_after_at) WHERE phase IS NOT NULL AND owner IS NULL;
CREATE INDEX jobs_unsettled ON holdfast.jobs (id) WHERE unsettled;
CREATE INDEX jobs_queue_deadline ON holdfast.jobs (queue_deadline_at) WHERE queue_deadline_at IS NOT NULL AND status = 'queued';
CREATE INDEX jobs_limited ON holdfast.jobs (queue) WHERE limited AND gate IS NOT NULL;
CREATE INDEX jobs_deleting ON holdfast.jobs (id) WHERE stop_kind = 'delete';

-- Lists of jobs, newest first: each filter has an index in the order of the list, so that a page is a range of one index.
-- They are read backwards: new entries are then added at the end, where the database leaves full pages. By status there are
-- two: a claim removes a job from the first, and its end adds it to the second. What runs is found by jobs_running. An index
-- over all statuses would be written at a claim too: claim and finish took 82 µs of CPU per job instead of 64 (62 without any).
-- Counts of jobs by gate are read from jobs_waiting alone.
CREATE INDEX jobs_waiting ON holdfast.jobs (tenant, status, queue, requested_at, id) INCLUDE (gate, available_at) WHERE gate IS NOT NULL;
CREATE INDEX jobs_ended ON holdfast.jobs (tenant, status, queue, requested_at, id)
  WHERE status IN ('paused', 'succeeded', 'failed', 'timed_out', 'cancelled');
CREATE INDEX jobs_of_lane ON holdfast.jobs (tenant, lane, requested_at, id) WHERE lane IS NOT NULL;

-- The registry of runners decides which runners exist. The database only checks how a runner is written, because a
-- capability is the name of a runner, or that name and what follows a colon.
CREATE TABLE holdfast.specs (
  id uuid PRIMARY KEY,
  tenant text COLLATE "C" NOT NULL,
  kind text NOT NULL,
  requested_at timestamptz NOT NULL,
  held boolean NOT NULL DEFAULT false,
  runner text NOT NULL,
  spec jsonb NOT NULL,
  inputs jsonb NOT NULL,
  labels jsonb,
  policy jsonb,
  signature uuid,
  reuse_key text COLLATE "C",
  CONSTRAINT runner_named CHECK (runner ~ '^[a-z][a-z0-9_-]{0,62}$')
);
COMMENT ON COLUMN holdfast.specs.policy IS 'What differs from the defaults: on_lost, retry, timeouts, stop_grace, stop_after, budget, secrets, uploads, check.';
COMMENT ON COLUMN holdfast.specs.signature IS 'The same for the same job again; written by a prune that keeps the newest of each.';
CREATE INDEX specs_listed ON holdfast.specs (tenant, requested_at, id);
CREATE INDEX specs_signed ON holdfast.specs (tenant, signature, requested_at DESC, id DESC) WHERE signature IS NOT NULL;
CREATE INDEX specs_of_kind ON holdfast.specs (tenant, kind, requested_at, id);
-- Which jobs start from a snapshot: it must not be evicted while one of them waits.
CREATE INDEX specs_base ON holdfast.specs (tenant, (spec ->> 'base') COLLATE "C") WHERE spec ->> 'base' IS NOT NULL;

-- Which jobs have a label. A label never changes; only jobs with labels pay for this.
CREATE TABLE holdfast.labels (
  tenant text COLLATE "C" NOT NULL,
  label uuid NOT NULL,
  requested_at timestamptz NOT NULL,
  id uuid NOT NULL
);
COMMENT ON COLUMN holdfast.labels.label IS 'The md5 of name=value: an entry of an index may not be as long as a label.';
CREATE INDEX labels_listed ON holdfast.labels (tenant, label, requested_at, id);

CREATE TABLE holdfast.attempts (
  job_id uuid NOT NULL,
  attempt integer NOT NULL,
  worker text COLLATE "C",
  domain text COLLATE "C",
  token bigint NOT NULL,
  claim_seq bigint NOT NULL,
  end_seq bigint,
  status text,
  claimed_at timestamptz NOT NULL,
  started_at timestamptz,
  ended_at timestamptz NOT NULL,
  cause text NOT NULL,
  exit_code integer,
  signal integer,
  error_code text,
  error_message text,
  adopter text COLLATE "C",
  CONSTRAINT attempts_pkey PRIMARY KEY (job_id, attempt),
  CONSTRAINT cause_known CHECK (cause IN ('exit', 'out_of_memory', 'timed_out', 'idle_timeout', 'cancelled', 'interrupted', 'lost', 'start_failed', 'drained'))
);

CREATE TABLE holdfast.events (
  job_id uuid NOT NULL,
  seq bigint NOT NULL,
  at timestamptz NOT NULL,
  type text NOT NULL,
  task text,
  data json NOT NULL,
  CONSTRAINT events_pkey PRIMARY KEY (job_id, seq)
);

CREATE TABLE holdfast.needs (
  job_id uuid NOT NULL,
  need_id uuid NOT NULL,
  satisfied boolean NOT NULL DEFAULT false,
  CONSTRAINT needs_pkey PRIMARY KEY (job_id, need_id)
);
CREATE INDEX needs_open ON holdfast.needs (need_id, job_id) WHERE NOT satisfied;

CREATE TABLE holdfast.reuse (
  tenant text COLLATE "C" NOT NULL,
  reuse_key text COLLATE "C" NOT NULL,
  job_id uuid NOT NULL,
  succeeded_id uuid,
  CONSTRAINT reuse_pkey PRIMARY KEY (tenant, reuse_key)
) WITH (fillfactor = 80);
COMMENT ON TABLE holdfast.reuse IS 'The job that stands for a reuse key: live, or the last one. Its row is the lock of the key.';
COMMENT ON COLUMN holdfast.reuse.succeeded_id IS 'An earlier success, returned while job_id, which was resumed, has not succeeded.';

CREATE TABLE holdfast.idempotency (
  tenant text COLLATE "C" NOT NULL,
  key text COLLATE "C" NOT NULL,
  body uuid NOT NULL,
  jobs json NOT NULL,
  made_at timestamptz NOT NULL,
  CONSTRAINT idempotency_pkey PRIMARY KEY (tenant, key)
);
CREATE INDEX idempotency_made ON holdfast.idempotency (made_at);

CREATE TABLE holdfast.lanes (
  tenant text COLLATE "C" NOT NULL,
  lane text COLLATE "C" NOT NULL,
  paused boolean NOT NULL DEFAULT false,
  holder uuid,
  next_position bigint NOT NULL DEFAULT 1,
  readiness json,
  CONSTRAINT lanes_pkey PRIMARY KEY (tenant, lane)
) WITH (fillfactor = 80);

CREATE TABLE holdfast.queues (
  queue text COLLATE "C" CONSTRAINT queues_pkey PRIMARY KEY,
  paused boolean NOT NULL DEFAULT false,
  cap integer,
  depth_limit integer,
  updated_at timestamptz NOT NULL,
  CONSTRAINT cap_positive CHECK (cap >= 1),
  CONSTRAINT depth_limit_positive CHECK (depth_limit >= 1)
);

CREATE TABLE holdfast.workers (
  worker text COLLATE "C" CONSTRAINT workers_pkey PRIMARY KEY,
  host text NOT NULL,
  pid integer NOT NULL,
  queues json NOT NULL,
  capabilities json NOT NULL,
  domains json NOT NULL,
  away json NOT NULL,
  registered_at timestamptz NOT NULL,
  seen_at timestamptz NOT NULL,
  expires_at timestamptz NOT NULL,
  draining boolean NOT NULL DEFAULT false,
  figures json
) WITH (fillfactor = 50);

CREATE TABLE holdfast.leaders (
  duty text COLLATE "C" CONSTRAINT leaders_pkey PRIMARY KEY,
  leader text NOT NULL,
  term bigint NOT NULL,
  expires_at timestamptz NOT NULL
) WITH (fillfactor = 50);

-- Who may call the service. Only the SHA-256 of a secret is stored. Servers write `used_at` a few times a minute.
CREATE TABLE holdfast.tokens (
  id uuid PRIMARY KEY,
  name text COLLATE "C" NOT NULL CONSTRAINT tokens_name UNIQUE,
  role text NOT NULL,
  tenant text COLLATE "C",
  hash text COLLATE "C" NOT NULL CONSTRAINT tokens_hash UNIQUE,
  created_at timestamptz NOT NULL,
  created_by text,
  expires_at timestamptz,
  used_at timestamptz,
  CONSTRAINT role_known CHECK (role IN ('viewer', 'submitter', 'operator', 'admin')),
  CONSTRAINT tenant_unless_admin CHECK ((tenant IS NULL) = (role = 'admin'))
);

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
  token bigint NOT NULL,
  outputs json
) WITH (fillfactor = 80);
COMMENT ON COLUMN holdfast.snapshots.outputs IS 'What tasks left up to this snapshot: the manifest of files, stored beside its folder, and the result.';
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

-- The counters of workers that have left. A row's figures are added in the transaction that removes it, so that no
-- sum over this table and the rows of workers ever falls.
CREATE TABLE holdfast.totals (
  counter text COLLATE "C" NOT NULL,
  status text COLLATE "C" NOT NULL DEFAULT '',
  count bigint NOT NULL,
  CONSTRAINT totals_pkey PRIMARY KEY (counter, status)
) WITH (fillfactor = 50);
COMMENT ON COLUMN holdfast.totals.status IS 'Of counters that are kept by status; else empty.';

-- Defaults of the jobs of a function (queue, timeout, …), registered by the workers that have it: they apply to every way
-- of submitting. A field of a submit takes precedence.
CREATE TABLE holdfast.functions (
  function text COLLATE "C" CONSTRAINT functions_pkey PRIMARY KEY,
  revision bigint NOT NULL,
  defaults jsonb NOT NULL,
  updated_at timestamptz NOT NULL
);
COMMENT ON COLUMN holdfast.functions.revision IS 'A worker with a lower one does not overwrite what a newer one registered.';

-- The audit trail: who changed what belongs to operators, and when. Rows are added, and removed by age; never changed.
CREATE TABLE holdfast.audit (
  id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  done_at timestamptz NOT NULL,
  actor text NOT NULL,
  token_id uuid,
  role text,
  address text,
  tenant text,
  action text NOT NULL,
  subject text NOT NULL,
  before json,
  after json,
  reason text
);

CREATE INDEX audit_listed ON holdfast.audit (done_at, id);

-- Which files of views, functions and triggers this database has: `holdfast migrate` applies them again when they change.
CREATE TABLE holdfast.repeatables (
  file text COLLATE "C" CONSTRAINT repeatables_pkey PRIMARY KEY,
  revision integer NOT NULL,
  checksum text NOT NULL,
  applied_at timestamptz NOT NULL,
  oldest integer NOT NULL
);
COMMENT ON COLUMN holdfast.repeatables.revision IS 'A holdfast that knows a lower one does not overwrite the file.';
COMMENT ON COLUMN holdfast.repeatables.oldest IS 'The lowest revision whose holdfast may still use the file.';
