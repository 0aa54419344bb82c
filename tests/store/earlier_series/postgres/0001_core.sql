-- The durable core. `holdfast` stands for the schema's name, which is a setting.
--
-- jobs      one narrow row per job: all that changes while it lives, the attempt that is open included
-- specs     what was asked for; written once, read at claim and by people
-- attempts  the ledger: one row per attempt that ended
-- events    the history that neither of them tells; with ledger_events it is gap-free per job
-- needs     which job waits for which
-- No foreign keys: their checks lock parent rows, and every delete goes through the store.
-- Names compare byte by byte (COLLATE "C"): quick, and the same order as in Python and on SQLite.

CREATE FUNCTION holdfast.clock() RETURNS timestamptz
LANGUAGE sql VOLATILE AS 'SELECT clock_timestamp()';
COMMENT ON FUNCTION holdfast.clock() IS 'The one clock of this store. Tests replace it to move time.';

CREATE TABLE holdfast.installation (
  one boolean CONSTRAINT installation_pkey PRIMARY KEY DEFAULT true,
  id text NOT NULL,
  CONSTRAINT installation_one CHECK (one)
);
INSERT INTO holdfast.installation (id) VALUES (replace(gen_random_uuid()::text, '-', ''));
COMMENT ON TABLE holdfast.installation IS 'Who this database is, to the processes and containers that its workers start.';

-- What indexes look at comes first: an update compares all of it, and finds a column by walking over those before it.
-- One rule for the status, not one for each pair of columns: every statement reads the text of all rules anew.
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
-- By phase, not by status: a statement that looks a running job up by its id must not be tempted to read this one.
CREATE INDEX jobs_running ON holdfast.jobs (owner, queue) WHERE phase IS NOT NULL;
-- Open attempts that nobody owns: orphans, and paused jobs that may still run somewhere (these have no adopt_after_at).
CREATE INDEX jobs_orphaned ON holdfast.jobs (domain, adopt_after_at) WHERE phase IS NOT NULL AND owner IS NULL;
CREATE INDEX jobs_unsettled ON holdfast.jobs (id) WHERE unsettled;
CREATE INDEX jobs_queue_deadline ON holdfast.jobs (queue_deadline_at) WHERE queue_deadline_at IS NOT NULL AND status = 'queued';
CREATE INDEX jobs_ended_badly ON holdfast.jobs (tenant, status, requested_at DESC, id DESC)
  WHERE status IN ('paused', 'failed', 'timed_out', 'cancelled');
CREATE INDEX jobs_limited ON holdfast.jobs (queue) WHERE limited AND gate IS NOT NULL;
CREATE INDEX jobs_deleting ON holdfast.jobs (id) WHERE stop_kind = 'delete';

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
  CONSTRAINT runner_known CHECK (runner IN ('function', 'process', 'docker'))
);
COMMENT ON COLUMN holdfast.specs.policy IS 'What differs from the defaults: on_lost, retry, timeouts, stop_grace, stop_after, budget, secrets, uploads, check.';
COMMENT ON COLUMN holdfast.specs.signature IS 'The same for the same job again; written by a prune that keeps the newest of each.';
CREATE INDEX specs_listed ON holdfast.specs (tenant, requested_at, id);
CREATE INDEX specs_signed ON holdfast.specs (tenant, signature, requested_at DESC, id DESC) WHERE signature IS NOT NULL;

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
  CONSTRAINT reuse_pkey PRIMARY KEY (tenant, reuse_key)
) WITH (fillfactor = 80);
COMMENT ON TABLE holdfast.reuse IS 'The one job that stands for a reuse key: live, or the last one. Its row is the lock of the key.';

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

-- Who may call the service. The secret itself is nowhere: only its SHA-256.
CREATE TABLE holdfast.tokens (
  id uuid PRIMARY KEY,
  name text COLLATE "C" NOT NULL CONSTRAINT tokens_name UNIQUE,
  role text NOT NULL,
  tenant text COLLATE "C",
  hash text COLLATE "C" NOT NULL CONSTRAINT tokens_hash UNIQUE,
  created_at timestamptz NOT NULL,
  created_by text,
  expires_at timestamptz,
  CONSTRAINT role_known CHECK (role IN ('viewer', 'submitter', 'operator', 'admin')),
  CONSTRAINT tenant_unless_admin CHECK ((tenant IS NULL) = (role = 'admin'))
);

-- A job as people see it: what was asked for, and how it stands.
CREATE VIEW holdfast.job_records AS
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
CREATE VIEW holdfast.ledger_events AS
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
CREATE VIEW holdfast.job_events AS
SELECT e.job_id, e.seq, e.at, e.type, e.task, e.data FROM holdfast.events AS e
UNION ALL
SELECT l.job_id, l.seq, l.at, l.type, l.task, l.data FROM holdfast.ledger_events AS l;

CREATE FUNCTION holdfast.new_id() RETURNS uuid
LANGUAGE sql VOLATILE AS $$
  SELECT encode(
    set_bit(
      set_bit(
        overlay(
          uuid_send(gen_random_uuid())
          PLACING substring(int8send(floor(extract(epoch FROM holdfast.clock()) * 1000)::bigint) FROM 3)
          FROM 1 FOR 6
        ),
        52, 1
      ),
      53, 1
    ),
    'hex'
  )::uuid
$$;
COMMENT ON FUNCTION holdfast.new_id() IS 'A UUIDv7: milliseconds, then random bits.';

-- Refuse a policy that a worker could not follow.
CREATE FUNCTION holdfast.check_policy(n bigint, policy jsonb) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
  field text;
  value jsonb;
  wanted text;
BEGIN
  FOR field, value IN SELECT * FROM jsonb_each(policy) LOOP
    CONTINUE WHEN jsonb_typeof(value) = 'null' AND field <> 'on_lost';
    wanted := CASE
      WHEN field = 'on_lost' THEN
        CASE WHEN value NOT IN ('"requeue"', '"fail"', '"hold"') THEN 'must be requeue, fail or hold' END
      WHEN field IN ('timeout', 'queue_timeout', 'idle_timeout', 'stop_after') THEN
        CASE WHEN jsonb_typeof(value) <> 'number' OR value <= '0' THEN 'must be a number of seconds above 0' END
      WHEN field = 'stop_grace' THEN
        CASE WHEN jsonb_typeof(value) <> 'number' OR value < '0' THEN 'must be a number of seconds, at least 0' END
      WHEN field = 'retry' THEN
        CASE WHEN jsonb_typeof(value) <> 'object' OR value - ARRAY['base', 'cap', 'on'] <> '{}'
          OR coalesce(jsonb_typeof(value -> 'base'), 'number') <> 'number'
          OR coalesce(jsonb_typeof(value -> 'cap'), 'number') <> 'number'
          OR NOT coalesce(value -> 'on', '[]') <@ '["failed", "timed_out"]'
        THEN 'must be like {"base": 5, "cap": 300, "on": ["failed", "timed_out"]}' END
      WHEN field = 'budget' THEN
        CASE WHEN jsonb_typeof(value) <> 'object' OR jsonb_path_exists(value, '$.* ? (@.type() != "number")')
        THEN 'must map names to numbers' END
      WHEN field = 'secrets' THEN
        CASE WHEN jsonb_typeof(value) <> 'array' OR jsonb_path_exists(value, '$[*] ? (@.type() != "string")')
        THEN 'must be a list of names' END
      WHEN field = 'uploads' THEN
        CASE WHEN jsonb_typeof(value) <> 'array' OR jsonb_path_exists(value, '$[*] ? (@.type() != "string")')
        THEN 'must be a list of uploads' END
      WHEN field = 'check' THEN
        CASE WHEN jsonb_typeof(value) <> 'object' OR value - ARRAY['command', 'timeout'] <> '{}'
          OR coalesce(jsonb_typeof(value -> 'command'), 'null') <> 'array'
          OR jsonb_path_exists(value, '$.command[*] ? (@.type() != "string")')
          OR coalesce(jsonb_typeof(value -> 'timeout'), 'null') <> 'number'
        THEN 'must be like {"command": ["pg_isready"], "timeout": 10}' END
      ELSE 'is an unknown field'
    END;
    IF wanted IS NOT NULL THEN
      RAISE EXCEPTION 'job %: % %', n, field, wanted USING ERRCODE = 'HF422', DETAIL = field;
    END IF;
  END LOOP;
END
$$;

-- Which of these jobs stand for a reuse key that another job already stands for: {"own id": "its id"}.
--
-- Locks the keys, in order, until the transaction ends: submits with the same key wait for each other, nobody else.
CREATE FUNCTION holdfast.join_reused(batch jsonb) RETURNS jsonb
LANGUAGE plpgsql AS $$
DECLARE
  asked record;
  standing record;
  mine uuid[] := '{}';
  joined jsonb := '{}';
BEGIN
  FOR asked IN
    SELECT (j.job ->> 'id')::uuid AS id, coalesce(j.job ->> 'tenant', 'default') AS tenant, j.job ->> 'reuse_key' AS key,
      coalesce((j.job ->> 'rebuild')::boolean, false) AS rebuild
    FROM jsonb_array_elements(batch) WITH ORDINALITY AS j(job, n)
    WHERE j.job ->> 'reuse_key' IS NOT NULL
    ORDER BY coalesce(j.job ->> 'tenant', 'default') COLLATE "C", (j.job ->> 'reuse_key') COLLATE "C", j.n
  LOOP
    INSERT INTO holdfast.reuse AS r (tenant, reuse_key, job_id)
    VALUES (asked.tenant, asked.key, asked.id)
    ON CONFLICT (tenant, reuse_key) DO UPDATE SET job_id = r.job_id
    RETURNING r.job_id INTO standing;
    IF standing.job_id = asked.id THEN
      mine := mine || asked.id;
    ELSIF standing.job_id = ANY (mine) OR EXISTS (
      SELECT 1 FROM holdfast.jobs AS j
      WHERE j.id = standing.job_id
        AND (j.status IN ('pending', 'queued', 'running', 'paused') OR (j.status = 'succeeded' AND NOT asked.rebuild))
        AND j.stop_kind IS DISTINCT FROM 'delete')
    THEN
      joined := joined || jsonb_build_object(asked.id::text, standing.job_id::text);
    ELSE
      UPDATE holdfast.reuse AS r SET job_id = asked.id WHERE r.tenant = asked.tenant AND r.reuse_key = asked.key;
      mine := mine || asked.id;
    END IF;
  END LOOP;
  RETURN joined;
END
$$;

-- Accept one job (an object) or many (an array), all or nothing, inside the caller's own transaction.
--
-- It takes no lock that another waits for, but for submits with the same reuse or idempotency key: a job with a lane or
-- needs is left `unresolved`, and any worker, or the Python client's follow-up, resolves it after the commit. Errors carry
-- SQLSTATE HF404, HF409, HF410, HF422 or HF429 and the field in DETAIL. Within an array, a job stands after the ones it
-- needs. Policy fields (timeout, retry, …) stand in the job, or together in an object `policy`.
CREATE FUNCTION holdfast.holdfast_submit(
  jobs jsonb, wake boolean DEFAULT true, idempotency_key text DEFAULT NULL, key_tenant text DEFAULT 'default',
  body uuid DEFAULT NULL)
RETURNS TABLE (id uuid, status text, gate text, reused boolean, asked uuid)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  core CONSTANT text[] := ARRAY[
    'id', 'tenant', 'kind', 'queue', 'lane', 'priority', 'labels', 'runner', 'spec', 'inputs', 'needs', 'hold',
    'available_at', 'max_attempts', 'policy', 'reuse_key', 'rebuild'];
  now_at CONSTANT timestamptz := holdfast.clock();
  batch jsonb := CASE jsonb_typeof(jobs) WHEN 'array' THEN jobs WHEN 'object' THEN jsonb_build_array(jobs) END;
  joined jsonb := '{}';
  keyed boolean;
  bad record;
  known record;
BEGIN
  IF batch IS NULL OR jsonb_path_exists(batch, '$[*] ? (@.type() != "object")') THEN
    RAISE EXCEPTION 'holdfast_submit takes a job (a JSON object) or an array of jobs' USING ERRCODE = 'HF422', DETAIL = 'jobs';
  END IF;

  IF idempotency_key IS NOT NULL THEN
    IF length(idempotency_key) NOT BETWEEN 1 AND 128 THEN
      RAISE EXCEPTION 'has % characters; between 1 and 128 are accepted', length(idempotency_key)
        USING ERRCODE = 'HF422', DETAIL = 'idempotency_key';
    END IF;
    INSERT INTO holdfast.idempotency AS i (tenant, key, body, jobs, made_at)
    VALUES (key_tenant, idempotency_key, coalesce(body, md5(jobs::text)::uuid), '[]', now_at)
    ON CONFLICT (tenant, key) DO UPDATE SET body = excluded.body, jobs = excluded.jobs, made_at = excluded.made_at
    WHERE i.made_at <= now_at - interval '24 hours';
    IF NOT FOUND THEN
      SELECT i.* INTO known FROM holdfast.idempotency AS i WHERE i.tenant = key_tenant AND i.key = idempotency_key;
      IF known.body <> coalesce(body, md5(jobs::text)::uuid) THEN
        RAISE EXCEPTION 'idempotency key % was used with another body', idempotency_key
          USING ERRCODE = 'HF409', DETAIL = 'idempotency_key';
      END IF;
      RETURN QUERY
      SELECT j.id, j.status, j.gate, true, NULL::uuid
      FROM json_array_elements_text(known.jobs) WITH ORDINALITY AS e(id, n)
      JOIN holdfast.jobs AS j ON j.id = e.id::uuid
      ORDER BY e.n;
      IF (SELECT count(*) FROM json_array_elements_text(known.jobs) AS e JOIN holdfast.jobs AS j ON j.id = e::uuid)
        < json_array_length(known.jobs)
      THEN
        RAISE EXCEPTION 'what idempotency key % made was deleted', idempotency_key
          USING ERRCODE = 'HF410', DETAIL = 'idempotency_key';
      END IF;
      RETURN;
    END IF;
  END IF;

  keyed := jsonb_path_exists(batch, '$[*].reuse_key ? (@ != null)');
  IF keyed OR idempotency_key IS NOT NULL THEN
    SELECT jsonb_agg(CASE WHEN j.job ? 'id' THEN j.job ELSE j.job || jsonb_build_object('id', holdfast.new_id()) END ORDER BY j.n)
    INTO batch
    FROM jsonb_array_elements(batch) WITH ORDINALITY AS j(job, n);
  END IF;
  IF keyed THEN
    joined := holdfast.join_reused(batch);
  END IF;
  IF idempotency_key IS NOT NULL THEN
    UPDATE holdfast.idempotency AS i
    SET jobs = (
      SELECT json_agg(coalesce(joined ->> (j.job ->> 'id'), j.job ->> 'id') ORDER BY j.n)
      FROM jsonb_array_elements(batch) WITH ORDINALITY AS j(job, n))
    WHERE i.tenant = key_tenant AND i.key = idempotency_key;
  END IF;

  IF EXISTS (SELECT 1 FROM holdfast.queues AS q WHERE q.depth_limit IS NOT NULL) THEN
    FOR bad IN
      SELECT q.queue, q.depth_limit, count(*) AS added, (
        SELECT count(*) FROM (
          SELECT 1 FROM holdfast.jobs AS w
          WHERE w.limited AND w.gate IS NOT NULL AND w.queue = q.queue
          LIMIT q.depth_limit) AS found) AS waiting
      FROM jsonb_array_elements(batch) AS j(job)
      JOIN holdfast.queues AS q ON q.queue = coalesce(j.job ->> 'queue', 'default')
      WHERE q.depth_limit IS NOT NULL
        AND NOT coalesce(joined ? (j.job ->> 'id'), false)
      GROUP BY q.queue, q.depth_limit
    LOOP
      IF bad.waiting + bad.added > bad.depth_limit THEN
        RAISE EXCEPTION 'queue % is full: at most % jobs may wait in it', bad.queue, bad.depth_limit
          USING ERRCODE = 'HF429', DETAIL = 'queue';
      END IF;
    END LOOP;
  END IF;

  IF jsonb_path_exists(batch, '$[*].needs[*]') THEN
    FOR bad IN
      WITH asked AS (
        SELECT j.n, coalesce(j.job ->> 'tenant', 'default') AS tenant, coalesce(joined ->> need.id, need.id)::uuid AS need
        FROM jsonb_array_elements(batch) WITH ORDINALITY AS j(job, n)
        CROSS JOIN LATERAL jsonb_array_elements_text(
          CASE jsonb_typeof(j.job -> 'needs') WHEN 'array' THEN j.job -> 'needs' END) AS need(id)
      ), batched AS (
        SELECT (j.job ->> 'id')::uuid AS id, coalesce(j.job ->> 'tenant', 'default') AS tenant, j.n
        FROM jsonb_array_elements(batch) WITH ORDINALITY AS j(job, n)
      )
      SELECT a.n, a.need, p.status
      FROM asked AS a
      LEFT JOIN holdfast.jobs AS p ON p.id = a.need AND p.tenant = a.tenant
      LEFT JOIN batched AS b ON b.id = a.need AND b.tenant = a.tenant AND b.n < a.n
      WHERE b.id IS NULL AND (p.id IS NULL OR p.status IN ('failed', 'timed_out', 'cancelled'))
      ORDER BY a.n LIMIT 1
    LOOP
      IF bad.status IS NULL THEN
        RAISE EXCEPTION 'job % needs job %, which does not exist', bad.n, bad.need USING ERRCODE = 'HF404', DETAIL = 'needs',
          HINT = 'Within one call, put a job after the ones it needs.';
      END IF;
      RAISE EXCEPTION 'job % needs job %, which is already %', bad.n, bad.need, bad.status USING ERRCODE = 'HF409', DETAIL = 'needs';
    END LOOP;
  END IF;

  RETURN QUERY
  WITH input AS MATERIALIZED (
    SELECT
      j.n,
      coalesce(r.id, holdfast.new_id()) AS id,
      coalesce(r.tenant, 'default') AS tenant,
      coalesce(r.kind, 'run') AS kind,
      coalesce(r.queue, 'default') AS queue,
      coalesce(r.priority, 0) AS priority,
      coalesce(r.hold, false) AS held,
      coalesce(jsonb_array_length(r.needs), 0) > 0 AS has_needs,
      EXISTS (
        SELECT 1 FROM holdfast.queues AS q
        WHERE q.queue = coalesce(r.queue, 'default') AND q.depth_limit IS NOT NULL) AS limited,
      CASE r.runner WHEN 'function' THEN 'function:' || (r.spec ->> 'name') ELSE r.runner END AS capability,
      greatest(r.available_at, now_at) AS available_at,
      coalesce(r.max_attempts, 1) AS max_attempts,
      r.lane, r.labels, r.runner, r.spec, coalesce(r.inputs, '{}') AS inputs, r.needs, r.reuse_key,
      coalesce(r.policy, nullif(e.extra, '{}')) AS policy,
      CASE WHEN r.policy IS NOT NULL OR e.extra <> '{}'
        THEN holdfast.check_policy(j.n, coalesce(r.policy, '{}') || e.extra) IS NULL END AS checked
    FROM jsonb_array_elements(batch) WITH ORDINALITY AS j(job, n)
    CROSS JOIN LATERAL (SELECT j.job - core AS extra) AS e
    CROSS JOIN LATERAL jsonb_to_record(j.job) AS r(
      id uuid, tenant text, kind text, queue text, lane text, priority integer, labels jsonb, runner text, spec jsonb,
      inputs jsonb, needs jsonb, hold boolean, available_at timestamptz, max_attempts integer, policy jsonb, reuse_key text)
    WHERE joined = '{}' OR NOT joined ? (j.job ->> 'id')
  ), asked AS (
    INSERT INTO holdfast.specs (
      id, tenant, kind, requested_at, held, runner, spec, inputs, labels, policy, reuse_key)
    SELECT i.id, i.tenant, i.kind, now_at, i.held, i.runner, i.spec, i.inputs, i.labels, i.policy, i.reuse_key
    FROM input AS i
  ), wanted AS (
    INSERT INTO holdfast.needs (job_id, need_id, satisfied) -- a success is final: its job may be pruned before the commit
    SELECT w.job_id, w.need_id, EXISTS (SELECT 1 FROM holdfast.jobs AS p WHERE p.id = w.need_id AND p.status = 'succeeded')
    FROM (
      SELECT DISTINCT i.id AS job_id, coalesce(joined ->> need.id, need.id)::uuid AS need_id
      FROM input AS i CROSS JOIN LATERAL jsonb_array_elements_text(i.needs) AS need(id)
      WHERE i.has_needs) AS w
  ), made AS (
    INSERT INTO holdfast.jobs AS j (
      id, tenant, queue, capability, lane, priority, status, gate, held, limited, has_needs, requested_at, available_at,
      queue_deadline_at, updated_at, max_attempts, seq)
    SELECT
      i.id, i.tenant, i.queue, i.capability, i.lane, i.priority,
      CASE WHEN i.held THEN 'pending' ELSE 'queued' END,
      CASE
        WHEN i.lane IS NOT NULL OR i.has_needs THEN 'unresolved'
        WHEN i.held THEN 'held'
        WHEN i.available_at > now_at THEN 'future'
        ELSE 'open'
      END,
      i.held, i.limited, i.has_needs, now_at, i.available_at,
      CASE WHEN NOT i.held THEN i.available_at + make_interval(secs => (i.policy ->> 'queue_timeout')::float8) END,
      now_at, i.max_attempts, 1
    FROM input AS i
    RETURNING j.id, j.status, j.gate
  )
  SELECT m.id, m.status, m.gate, false, m.id FROM made AS m;

  IF joined <> '{}' THEN
    RETURN QUERY
    SELECT j.id, j.status, j.gate, true, (b.job ->> 'id')::uuid
    FROM jsonb_array_elements(batch) WITH ORDINALITY AS b(job, n)
    JOIN holdfast.jobs AS j ON j.id = (joined ->> (b.job ->> 'id'))::uuid;
  END IF;

  IF wake THEN
    PERFORM pg_notify('holdfast', '["work"]');
  END IF;
END
$$;
