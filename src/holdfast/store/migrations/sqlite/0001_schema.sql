-- The tables, as on Postgres. Differs: times are integer microseconds since 1970, ids and JSON are text, booleans are 0 and 1;
-- clock() is a function that every connection registers; a list of values is an OR, because SQLite builds a table for each IN
-- of a constraint or index at every statement (measured: half of an insert).

-- The identity of this database for the processes and containers that its workers start, and its shared folder.
CREATE TABLE installation (
  one INTEGER NOT NULL PRIMARY KEY DEFAULT 1,
  id TEXT NOT NULL,
  shared_folder TEXT,
  shared_path TEXT,
  CONSTRAINT installation_one CHECK (one = 1)
) STRICT;
INSERT INTO installation (id) VALUES (lower(hex(randomblob(16))));

CREATE TABLE jobs (
  id TEXT NOT NULL PRIMARY KEY,
  requested_at INTEGER NOT NULL,
  available_at INTEGER NOT NULL,
  priority INTEGER NOT NULL,
  limited INTEGER NOT NULL DEFAULT 0,
  unsettled INTEGER NOT NULL DEFAULT 0,
  dismissed INTEGER NOT NULL DEFAULT 0,
  tenant TEXT NOT NULL,
  queue TEXT NOT NULL,
  capability TEXT NOT NULL,
  status TEXT NOT NULL,
  gate TEXT,
  phase TEXT,
  owner TEXT,
  lane TEXT,
  domain TEXT,
  stop_kind TEXT,
  lane_position INTEGER,
  started_at INTEGER,
  adopt_after_at INTEGER,
  queue_deadline_at INTEGER,
  held INTEGER NOT NULL DEFAULT 0,
  has_needs INTEGER NOT NULL DEFAULT 0,
  has_dependants INTEGER NOT NULL DEFAULT 0,
  updated_at INTEGER NOT NULL,
  token INTEGER NOT NULL DEFAULT 0,
  adoptions INTEGER NOT NULL DEFAULT 0,
  attempt INTEGER NOT NULL DEFAULT 0,
  stdout_offset INTEGER NOT NULL DEFAULT 0,
  stderr_offset INTEGER NOT NULL DEFAULT 0,
  batch INTEGER NOT NULL DEFAULT 0,
  spent INTEGER NOT NULL DEFAULT 0,
  max_attempts INTEGER NOT NULL,
  log_bytes INTEGER NOT NULL DEFAULT 0,
  seq INTEGER NOT NULL DEFAULT 0,
  finished_at INTEGER,
  lease_expires_at INTEGER,
  last_beat_at INTEGER,
  orphaned_at INTEGER,
  worker TEXT,
  claimed_at INTEGER,
  claim_seq INTEGER,
  attempt_started_at INTEGER,
  stop_phase TEXT,
  stop_deadline_at INTEGER,
  exit_code INTEGER,
  error_code TEXT,
  error_message TEXT,
  result TEXT,
  progress TEXT,
  usage TEXT,
  stop_reason TEXT,
  adopter TEXT,
  CONSTRAINT status_fits CHECK (
    (status = 'running' AND gate IS NULL AND finished_at IS NULL AND phase IS NOT NULL AND started_at IS NOT NULL)
    OR (owner IS NULL AND (
      (finished_at IS NOT NULL AND gate IS NULL AND (status = 'succeeded' OR status = 'failed' OR status = 'timed_out' OR status = 'cancelled'))
      OR (finished_at IS NULL AND gate IS NOT NULL AND ((status = 'queued' AND gate <> 'held') OR status = 'pending'))
      OR (finished_at IS NULL AND gate IS NULL AND status = 'paused')))),
  CONSTRAINT gate_known CHECK (gate = 'open' OR gate = 'future' OR gate = 'needs' OR gate = 'lane' OR gate = 'held' OR gate = 'unresolved'),
  CONSTRAINT phase_known CHECK (phase = 'claimed' OR phase = 'started'),
  CONSTRAINT lease_whole CHECK ((owner IS NULL) = (lease_expires_at IS NULL)),
  CONSTRAINT times_in_order CHECK (started_at >= requested_at AND finished_at >= coalesce(started_at, requested_at)),
  CONSTRAINT stop_known CHECK (stop_kind = 'interrupt' OR stop_kind = 'cancel' OR stop_kind = 'delete'),
  CONSTRAINT max_attempts_positive CHECK (max_attempts BETWEEN 1 AND 1000)
) STRICT;

-- Every index but the primary key is partial: a finished job sits in none of those that a worker reads.
CREATE INDEX jobs_claimable ON jobs (queue, capability, tenant, (-priority), requested_at, id) WHERE gate = 'open';
CREATE INDEX jobs_future ON jobs (available_at) WHERE gate = 'future';
CREATE INDEX jobs_unresolved ON jobs (tenant, lane, requested_at, id) WHERE gate = 'unresolved';
CREATE INDEX jobs_needs_waiting ON jobs (id) WHERE gate = 'needs';
CREATE INDEX jobs_held ON jobs (id) WHERE gate = 'held';
CREATE INDEX jobs_lane_waiting ON jobs (tenant, lane, lane_position) WHERE gate = 'lane';
CREATE INDEX jobs_lane_blocking ON jobs (tenant, lane, lane_position)
  WHERE lane IS NOT NULL AND started_at IS NOT NULL AND dismissed = 0 AND (status = 'paused' OR status = 'failed' OR status = 'timed_out');
-- By phase, not by status: otherwise the planner may choose this index for a statement that reads a running job by its id.
CREATE INDEX jobs_running ON jobs (owner, queue) WHERE phase IS NOT NULL;
-- Open attempts without an owner: orphans, and paused jobs that may still run on an unreachable host (no adopt_after_at).
CREATE INDEX jobs_orphaned ON jobs (domain, adopt_after_at) WHERE phase IS NOT NULL AND owner IS NULL;
CREATE INDEX jobs_unsettled ON jobs (id) WHERE unsettled = 1;
CREATE INDEX jobs_queue_deadline ON jobs (queue_deadline_at) WHERE queue_deadline_at IS NOT NULL AND status = 'queued';
CREATE INDEX jobs_limited ON jobs (queue) WHERE limited = 1 AND gate IS NOT NULL;
CREATE INDEX jobs_deleting ON jobs (id) WHERE stop_kind = 'delete';

-- Lists of jobs, newest first: each filter has an index in the order of the list, so that a page is a range of one index.
-- They are read backwards: new entries are then added at the end, where the database leaves full pages. By status there are
-- two: a claim removes a job from the first, and its end adds it to the second. What runs is found by jobs_running. An index
-- over all statuses would be written at a claim too: claim and finish took 82 µs of CPU per job instead of 64 (62 without any).
-- Counts of jobs by gate are read from jobs_waiting alone.
CREATE INDEX jobs_waiting ON jobs (tenant, status, queue, requested_at, id, gate, available_at) WHERE gate IS NOT NULL;
CREATE INDEX jobs_ended ON jobs (tenant, status, queue, requested_at, id)
  WHERE (status = 'paused' OR status = 'succeeded' OR status = 'failed' OR status = 'timed_out' OR status = 'cancelled');
CREATE INDEX jobs_of_lane ON jobs (tenant, lane, requested_at, id) WHERE lane IS NOT NULL;

-- The registry of runners decides which runners exist. The database only checks how a runner is written, because a
-- capability is the name of a runner, or that name and what follows a colon.
CREATE TABLE specs (
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
CREATE INDEX specs_listed ON specs (tenant, requested_at, id);
CREATE INDEX specs_signed ON specs (tenant, signature, requested_at DESC, id DESC) WHERE signature IS NOT NULL;
CREATE INDEX specs_of_kind ON specs (tenant, kind, requested_at, id);
-- Which jobs start from a snapshot: it must not be evicted while one of them waits.
CREATE INDEX specs_base ON specs (tenant, spec ->> '$.base') WHERE spec ->> '$.base' IS NOT NULL;

-- Which jobs have a label. A label never changes; only jobs with labels pay for this.
CREATE TABLE labels (
  tenant TEXT NOT NULL,
  label TEXT NOT NULL,
  requested_at INTEGER NOT NULL,
  id TEXT NOT NULL,
  CONSTRAINT labels_listed PRIMARY KEY (tenant, label, requested_at, id)
) WITHOUT ROWID, STRICT;

CREATE TABLE attempts (
  job_id TEXT NOT NULL,
  attempt INTEGER NOT NULL,
  worker TEXT,
  domain TEXT,
  token INTEGER NOT NULL,
  claim_seq INTEGER NOT NULL,
  end_seq INTEGER,
  status TEXT,
  claimed_at INTEGER NOT NULL,
  started_at INTEGER,
  ended_at INTEGER NOT NULL,
  cause TEXT NOT NULL,
  exit_code INTEGER,
  signal INTEGER,
  error_code TEXT,
  error_message TEXT,
  adopter TEXT,
  CONSTRAINT attempts_pkey PRIMARY KEY (job_id, attempt),
  CONSTRAINT cause_known CHECK (cause = 'exit' OR cause = 'out_of_memory' OR cause = 'timed_out' OR cause = 'idle_timeout' OR cause = 'cancelled' OR cause = 'interrupted' OR cause = 'lost' OR cause = 'start_failed' OR cause = 'drained')
) WITHOUT ROWID, STRICT;

CREATE TABLE events (
  job_id TEXT NOT NULL,
  seq INTEGER NOT NULL,
  at INTEGER NOT NULL,
  type TEXT NOT NULL,
  task TEXT,
  data TEXT NOT NULL,
  CONSTRAINT events_pkey PRIMARY KEY (job_id, seq)
) WITHOUT ROWID, STRICT;

CREATE TABLE needs (
  job_id TEXT NOT NULL,
  need_id TEXT NOT NULL,
  satisfied INTEGER NOT NULL DEFAULT 0,
  CONSTRAINT needs_pkey PRIMARY KEY (job_id, need_id)
) WITHOUT ROWID, STRICT;
CREATE INDEX needs_open ON needs (need_id, job_id) WHERE satisfied = 0;

-- The job that stands for a reuse key: live, or the last one. `succeeded_id` is an earlier success, returned while `job_id`,
-- which was resumed, has not succeeded.
CREATE TABLE reuse (
  tenant TEXT NOT NULL,
  reuse_key TEXT NOT NULL,
  job_id TEXT NOT NULL,
  succeeded_id TEXT,
  CONSTRAINT reuse_pkey PRIMARY KEY (tenant, reuse_key)
) WITHOUT ROWID, STRICT;

CREATE TABLE idempotency (
  tenant TEXT NOT NULL,
  key TEXT NOT NULL,
  body TEXT NOT NULL,
  jobs TEXT NOT NULL,
  made_at INTEGER NOT NULL,
  CONSTRAINT idempotency_pkey PRIMARY KEY (tenant, key)
) WITHOUT ROWID, STRICT;
CREATE INDEX idempotency_made ON idempotency (made_at);

CREATE TABLE lanes (
  tenant TEXT NOT NULL,
  lane TEXT NOT NULL,
  paused INTEGER NOT NULL DEFAULT 0,
  holder TEXT,
  next_position INTEGER NOT NULL DEFAULT 1,
  readiness TEXT,
  CONSTRAINT lanes_pkey PRIMARY KEY (tenant, lane)
) WITHOUT ROWID, STRICT;

CREATE TABLE queues (
  queue TEXT NOT NULL PRIMARY KEY,
  paused INTEGER NOT NULL DEFAULT 0,
  cap INTEGER,
  depth_limit INTEGER,
  updated_at INTEGER NOT NULL,
  CONSTRAINT cap_positive CHECK (cap >= 1),
  CONSTRAINT depth_limit_positive CHECK (depth_limit >= 1)
) WITHOUT ROWID, STRICT;

CREATE TABLE workers (
  worker TEXT NOT NULL PRIMARY KEY,
  host TEXT NOT NULL,
  pid INTEGER NOT NULL,
  queues TEXT NOT NULL,
  capabilities TEXT NOT NULL,
  domains TEXT NOT NULL,
  away TEXT NOT NULL,
  registered_at INTEGER NOT NULL,
  seen_at INTEGER NOT NULL,
  expires_at INTEGER NOT NULL,
  draining INTEGER NOT NULL DEFAULT 0,
  figures TEXT
) WITHOUT ROWID, STRICT;

CREATE TABLE leaders (
  duty TEXT NOT NULL PRIMARY KEY,
  leader TEXT NOT NULL,
  term INTEGER NOT NULL,
  expires_at INTEGER NOT NULL
) WITHOUT ROWID, STRICT;

-- Who may call the service. Only the SHA-256 of a secret is stored. Servers write `used_at` a few times a minute.
CREATE TABLE tokens (
  id TEXT NOT NULL PRIMARY KEY,
  name TEXT NOT NULL,
  role TEXT NOT NULL,
  tenant TEXT,
  hash TEXT NOT NULL,
  created_at INTEGER NOT NULL,
  created_by TEXT,
  expires_at INTEGER,
  used_at INTEGER,
  CONSTRAINT tokens_name UNIQUE (name),
  CONSTRAINT tokens_hash UNIQUE (hash),
  CONSTRAINT role_known CHECK (role = 'viewer' OR role = 'submitter' OR role = 'operator' OR role = 'admin'),
  CONSTRAINT tenant_unless_admin CHECK ((tenant IS NULL) = (role = 'admin'))
) WITHOUT ROWID, STRICT;

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
  outputs TEXT,
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

-- The counters of workers that have left. A row's figures are added in the transaction that removes it, so that no
-- sum over this table and the rows of workers ever falls. The status is empty where a counter is not kept by status.
CREATE TABLE totals (
  counter TEXT NOT NULL,
  status TEXT NOT NULL DEFAULT '',
  count INTEGER NOT NULL,
  CONSTRAINT totals_pkey PRIMARY KEY (counter, status)
) WITHOUT ROWID, STRICT;

-- Defaults of the jobs of a function (queue, timeout, …), registered by the workers that have it: they apply to every way
-- of submitting. A field of a submit takes precedence.
CREATE TABLE functions (
  function TEXT NOT NULL PRIMARY KEY,
  revision INTEGER NOT NULL,
  defaults TEXT NOT NULL,
  updated_at INTEGER NOT NULL
) WITHOUT ROWID, STRICT;

-- The audit trail: who changed what belongs to operators, and when. Rows are added, and removed by age; never changed.
CREATE TABLE audit (
  id INTEGER PRIMARY KEY,
  done_at INTEGER NOT NULL,
  actor TEXT NOT NULL,
  token_id TEXT,
  role TEXT,
  address TEXT,
  tenant TEXT,
  action TEXT NOT NULL,
  subject TEXT NOT NULL,
  before TEXT,
  after TEXT,
  reason TEXT
);

CREATE INDEX audit_listed ON audit (done_at, id);

-- Which files of views, functions and triggers this database has: `holdfast migrate` applies them again when they change.
CREATE TABLE repeatables (
  file TEXT NOT NULL CONSTRAINT repeatables_pkey PRIMARY KEY,
  revision INTEGER NOT NULL,
  checksum TEXT NOT NULL,
  applied_at INTEGER NOT NULL,
  oldest INTEGER NOT NULL
) WITHOUT ROWID, STRICT;
