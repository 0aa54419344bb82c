attempts.job_id uuid NO 
attempts.attempt integer NO 
attempts.worker text YES 
attempts.domain text YES 
attempts.token bigint NO 
attempts.claim_seq bigint NO 
attempts.end_seq bigint YES 
attempts.status text YES 
attempts.claimed_at timestamp with time zone NO 
attempts.started_at timestamp with time zone YES 
attempts.ended_at timestamp with time zone NO 
attempts.cause text NO 
attempts.exit_code integer YES 
attempts.signal integer YES 
attempts.error_code text YES 
attempts.error_message text YES 
attempts.adopter text YES 
audit.id bigint NO 
audit.done_at timestamp with time zone NO 
audit.actor text NO 
audit.token_id uuid YES 
audit.role text YES 
audit.address text YES 
audit.tenant text YES 
audit.action text NO 
audit.subject text NO 
audit.before json YES 
audit.after json YES 
audit.reason text YES 
builds.id text NO 
builds.job_id uuid YES 
builds.token bigint YES 
builds.taken_at timestamp with time zone NO 
events.job_id uuid NO 
events.seq bigint NO 
events.at timestamp with time zone NO 
events.type text NO 
events.task text YES 
events.data json NO 
functions.function text NO 
functions.revision bigint NO 
functions.defaults jsonb NO 
functions.updated_at timestamp with time zone NO 
idempotency.tenant text NO 
idempotency.key text NO 
idempotency.body uuid NO 
idempotency.jobs json NO 
idempotency.made_at timestamp with time zone NO 
installation.one boolean NO true
installation.id text NO 
installation.shared_folder text YES 
installation.shared_path text YES 
job_events.job_id uuid YES 
job_events.seq bigint YES 
job_events.at timestamp with time zone YES 
job_events.type text YES 
job_events.task text YES 
job_events.data json YES 
job_records.id uuid YES 
job_records.tenant text YES 
job_records.kind text YES 
job_records.queue text YES 
job_records.capability text YES 
job_records.lane text YES 
job_records.lane_position bigint YES 
job_records.status text YES 
job_records.gate text YES 
job_records.priority integer YES 
job_records.labels jsonb YES 
job_records.runner text YES 
job_records.spec jsonb YES 
job_records.inputs jsonb YES 
job_records.held boolean YES 
job_records.dismissed boolean YES 
job_records.attempts integer YES 
job_records.max_attempts integer YES 
job_records.attempt integer YES 
job_records.requested_at timestamp with time zone YES 
job_records.available_at timestamp with time zone YES 
job_records.started_at timestamp with time zone YES 
job_records.finished_at timestamp with time zone YES 
job_records.updated_at timestamp with time zone YES 
job_records.owner text YES 
job_records.token bigint YES 
job_records.lease_expires_at timestamp with time zone YES 
job_records.orphaned_at timestamp with time zone YES 
job_records.phase text YES 
job_records.domain text YES 
job_records.stop_kind text YES 
job_records.stop_phase text YES 
job_records.stop_deadline_at timestamp with time zone YES 
job_records.exit_code integer YES 
job_records.error_code text YES 
job_records.error_message text YES 
job_records.result json YES 
job_records.progress json YES 
job_records.usage json YES 
job_records.seq bigint YES 
job_records.policy jsonb YES 
job_records.reuse_key text YES 
job_records.signature uuid YES 
jobs.id uuid NO 
jobs.requested_at timestamp with time zone NO 
jobs.available_at timestamp with time zone NO 
jobs.priority integer NO 
jobs.limited boolean NO false
jobs.unsettled boolean NO false
jobs.dismissed boolean NO false
jobs.tenant text NO 
jobs.queue text NO 
jobs.capability text NO 
jobs.status text NO 
jobs.gate text YES 
jobs.phase text YES 
jobs.owner text YES 
jobs.lane text YES 
jobs.domain text YES 
jobs.stop_kind text YES 
jobs.lane_position bigint YES 
jobs.started_at timestamp with time zone YES 
jobs.adopt_after_at timestamp with time zone YES 
jobs.queue_deadline_at timestamp with time zone YES 
jobs.held boolean NO false
jobs.has_needs boolean NO false
jobs.has_dependants boolean NO false
jobs.updated_at timestamp with time zone NO 
jobs.token bigint NO 0
jobs.adoptions integer NO 0
jobs.attempt integer NO 0
jobs.stdout_offset bigint NO 0
jobs.stderr_offset bigint NO 0
jobs.batch bigint NO 0
jobs.spent integer NO 0
jobs.max_attempts integer NO 
jobs.log_bytes bigint NO 0
jobs.seq bigint NO 0
jobs.finished_at timestamp with time zone YES 
jobs.lease_expires_at timestamp with time zone YES 
jobs.last_beat_at timestamp with time zone YES 
jobs.orphaned_at timestamp with time zone YES 
jobs.worker text YES 
jobs.claimed_at timestamp with time zone YES 
jobs.claim_seq bigint YES 
jobs.attempt_started_at timestamp with time zone YES 
jobs.stop_phase text YES 
jobs.stop_deadline_at timestamp with time zone YES 
jobs.exit_code integer YES 
jobs.error_code text YES 
jobs.error_message text YES 
jobs.result json YES 
jobs.progress json YES 
jobs.usage json YES 
jobs.stop_reason text YES 
jobs.adopter text YES 
labels.tenant text NO 
labels.label uuid NO 
labels.requested_at timestamp with time zone NO 
labels.id uuid NO 
lanes.tenant text NO 
lanes.lane text NO 
lanes.paused boolean NO false
lanes.holder uuid YES 
lanes.next_position bigint NO 1
lanes.readiness json YES 
leaders.duty text NO 
leaders.leader text NO 
leaders.term bigint NO 
leaders.expires_at timestamp with time zone NO 
ledger_events.job_id uuid YES 
ledger_events.seq bigint YES 
ledger_events.at timestamp with time zone YES 
ledger_events.type text YES 
ledger_events.task text YES 
ledger_events.data json YES 
migrations.number integer NO 
migrations.name text NO 
migrations.applied_at timestamp with time zone NO 
migrations.checksum text NO 
migrations.oldest integer NO 
needs.job_id uuid NO 
needs.need_id uuid NO 
needs.satisfied boolean NO false
queues.queue text NO 
queues.paused boolean NO false
queues.cap integer YES 
queues.depth_limit integer YES 
queues.updated_at timestamp with time zone NO 
repeatables.file text NO 
repeatables.revision integer NO 
repeatables.checksum text NO 
repeatables.applied_at timestamp with time zone NO 
repeatables.oldest integer NO 
reuse.tenant text NO 
reuse.reuse_key text NO 
reuse.job_id uuid NO 
reuse.succeeded_id uuid YES 
snapshots.id text NO 
snapshots.tenant text NO 
snapshots.parent text NO 
snapshots.task text NO 
snapshots.task_hash text NO 
snapshots.components json NO 
snapshots.folder text NO 
snapshots.digest text NO 
snapshots.size bigint NO 
snapshots.made_at timestamp with time zone NO 
snapshots.used_at timestamp with time zone NO 
snapshots.job_id uuid NO 
snapshots.token bigint NO 
snapshots.outputs json YES 
specs.id uuid NO 
specs.tenant text NO 
specs.kind text NO 
specs.requested_at timestamp with time zone NO 
specs.held boolean NO false
specs.runner text NO 
specs.spec jsonb NO 
specs.inputs jsonb NO 
specs.labels jsonb YES 
specs.policy jsonb YES 
specs.signature uuid YES 
specs.reuse_key text YES 
tasks.job_id uuid NO 
tasks.n integer NO 
tasks.name text NO 
tasks.status text NO 
tasks.cached boolean NO false
tasks.parent text NO 
tasks.snapshot text NO 
tasks.started_at timestamp with time zone YES 
tasks.ended_at timestamp with time zone YES 
tasks.exit_code integer YES 
tokens.id uuid NO 
tokens.name text NO 
tokens.role text NO 
tokens.tenant text YES 
tokens.hash text NO 
tokens.created_at timestamp with time zone NO 
tokens.created_by text YES 
tokens.expires_at timestamp with time zone YES 
tokens.used_at timestamp with time zone YES 
totals.counter text NO 
totals.status text NO ''::text
totals.count bigint NO 
workers.worker text NO 
workers.host text NO 
workers.pid integer NO 
workers.queues json NO 
workers.capabilities json NO 
workers.domains json NO 
workers.away json NO 
workers.registered_at timestamp with time zone NO 
workers.seen_at timestamp with time zone NO 
workers.expires_at timestamp with time zone NO 
workers.draining boolean NO false
workers.figures json YES 
CREATE UNIQUE INDEX attempts_pkey ON holdfast.attempts USING btree (job_id, attempt)
CREATE INDEX audit_listed ON holdfast.audit USING btree (done_at, id)
CREATE UNIQUE INDEX audit_pkey ON holdfast.audit USING btree (id)
CREATE UNIQUE INDEX builds_pkey ON holdfast.builds USING btree (id)
CREATE UNIQUE INDEX events_pkey ON holdfast.events USING btree (job_id, seq)
CREATE UNIQUE INDEX functions_pkey ON holdfast.functions USING btree (function)
CREATE INDEX idempotency_made ON holdfast.idempotency USING btree (made_at)
CREATE UNIQUE INDEX idempotency_pkey ON holdfast.idempotency USING btree (tenant, key)
CREATE UNIQUE INDEX installation_pkey ON holdfast.installation USING btree (one)
CREATE INDEX jobs_claimable ON holdfast.jobs USING btree (queue, capability, tenant, ((- priority)), requested_at, id) WHERE (gate = 'open'::text)
CREATE INDEX jobs_deleting ON holdfast.jobs USING btree (id) WHERE (stop_kind = 'delete'::text)
CREATE INDEX jobs_ended ON holdfast.jobs USING btree (tenant, status, queue, requested_at, id) WHERE (status = ANY (ARRAY['paused'::text, 'succeeded'::text, 'failed'::text, 'timed_out'::text, 'cancelled'::text]))
CREATE INDEX jobs_future ON holdfast.jobs USING btree (available_at) WHERE (gate = 'future'::text)
CREATE INDEX jobs_held ON holdfast.jobs USING btree (id) WHERE (gate = 'held'::text)
CREATE INDEX jobs_lane_blocking ON holdfast.jobs USING btree (tenant, lane, lane_position) WHERE ((lane IS NOT NULL) AND (started_at IS NOT NULL) AND (NOT dismissed) AND (status = ANY (ARRAY['paused'::text, 'failed'::text, 'timed_out'::text])))
CREATE INDEX jobs_lane_waiting ON holdfast.jobs USING btree (tenant, lane, lane_position) WHERE (gate = 'lane'::text)
CREATE INDEX jobs_limited ON holdfast.jobs USING btree (queue) WHERE (limited AND (gate IS NOT NULL))
CREATE INDEX jobs_needs_waiting ON holdfast.jobs USING btree (id) WHERE (gate = 'needs'::text)
CREATE INDEX jobs_of_lane ON holdfast.jobs USING btree (tenant, lane, requested_at, id) WHERE (lane IS NOT NULL)
CREATE INDEX jobs_orphaned ON holdfast.jobs USING btree (domain, adopt_after_at) WHERE ((phase IS NOT NULL) AND (owner IS NULL))
CREATE UNIQUE INDEX jobs_pkey ON holdfast.jobs USING btree (id)
CREATE INDEX jobs_queue_deadline ON holdfast.jobs USING btree (queue_deadline_at) WHERE ((queue_deadline_at IS NOT NULL) AND (status = 'queued'::text))
CREATE INDEX jobs_running ON holdfast.jobs USING btree (owner, queue) WHERE (phase IS NOT NULL)
CREATE INDEX jobs_unresolved ON holdfast.jobs USING btree (tenant, lane, requested_at, id) WHERE (gate = 'unresolved'::text)
CREATE INDEX jobs_unsettled ON holdfast.jobs USING btree (id) WHERE unsettled
CREATE INDEX jobs_waiting ON holdfast.jobs USING btree (tenant, status, queue, requested_at, id) INCLUDE (gate, available_at) WHERE (gate IS NOT NULL)
CREATE INDEX labels_listed ON holdfast.labels USING btree (tenant, label, requested_at, id)
CREATE UNIQUE INDEX lanes_pkey ON holdfast.lanes USING btree (tenant, lane)
CREATE UNIQUE INDEX leaders_pkey ON holdfast.leaders USING btree (duty)
CREATE UNIQUE INDEX migrations_pkey ON holdfast.migrations USING btree (number)
CREATE INDEX needs_open ON holdfast.needs USING btree (need_id, job_id) WHERE (NOT satisfied)
CREATE UNIQUE INDEX needs_pkey ON holdfast.needs USING btree (job_id, need_id)
CREATE UNIQUE INDEX queues_pkey ON holdfast.queues USING btree (queue)
CREATE UNIQUE INDEX repeatables_pkey ON holdfast.repeatables USING btree (file)
CREATE UNIQUE INDEX reuse_pkey ON holdfast.reuse USING btree (tenant, reuse_key)
CREATE UNIQUE INDEX snapshots_folder ON holdfast.snapshots USING btree (folder)
CREATE INDEX snapshots_listed ON holdfast.snapshots USING btree (tenant, made_at DESC, id DESC)
CREATE INDEX snapshots_parent ON holdfast.snapshots USING btree (parent)
CREATE UNIQUE INDEX snapshots_pkey ON holdfast.snapshots USING btree (id)
CREATE INDEX snapshots_used ON holdfast.snapshots USING btree (used_at, size DESC, id)
CREATE INDEX specs_base ON holdfast.specs USING btree (tenant, ((spec ->> 'base'::text)) COLLATE "C") WHERE ((spec ->> 'base'::text) IS NOT NULL)
CREATE INDEX specs_listed ON holdfast.specs USING btree (tenant, requested_at, id)
CREATE INDEX specs_of_kind ON holdfast.specs USING btree (tenant, kind, requested_at, id)
CREATE UNIQUE INDEX specs_pkey ON holdfast.specs USING btree (id)
CREATE INDEX specs_signed ON holdfast.specs USING btree (tenant, signature, requested_at DESC, id DESC) WHERE (signature IS NOT NULL)
CREATE INDEX tasks_parent ON holdfast.tasks USING btree (parent)
CREATE UNIQUE INDEX tasks_pkey ON holdfast.tasks USING btree (job_id, n)
CREATE INDEX tasks_snapshot ON holdfast.tasks USING btree (snapshot)
CREATE UNIQUE INDEX tokens_hash ON holdfast.tokens USING btree (hash)
CREATE UNIQUE INDEX tokens_name ON holdfast.tokens USING btree (name)
CREATE UNIQUE INDEX tokens_pkey ON holdfast.tokens USING btree (id)
CREATE UNIQUE INDEX totals_pkey ON holdfast.totals USING btree (counter, status)
CREATE UNIQUE INDEX workers_pkey ON holdfast.workers USING btree (worker)
attempts_pkey PRIMARY KEY (job_id, attempt)
audit_pkey PRIMARY KEY (id)
builds_pkey PRIMARY KEY (id)
cached_succeeded CHECK (((NOT cached) OR (status = 'succeeded'::text)))
cap_positive CHECK ((cap >= 1))
cause_known CHECK ((cause = ANY (ARRAY['exit'::text, 'out_of_memory'::text, 'timed_out'::text, 'idle_timeout'::text, 'cancelled'::text, 'interrupted'::text, 'lost'::text, 'start_failed'::text, 'drained'::text])))
depth_limit_positive CHECK ((depth_limit >= 1))
events_pkey PRIMARY KEY (job_id, seq)
functions_pkey PRIMARY KEY (function)
gate_known CHECK ((gate = ANY (ARRAY['open'::text, 'future'::text, 'needs'::text, 'lane'::text, 'held'::text, 'unresolved'::text])))
idempotency_pkey PRIMARY KEY (tenant, key)
installation_one CHECK (one)
installation_pkey PRIMARY KEY (one)
jobs_pkey PRIMARY KEY (id)
lanes_pkey PRIMARY KEY (tenant, lane)
leaders_pkey PRIMARY KEY (duty)
lease_whole CHECK (((owner IS NULL) = (lease_expires_at IS NULL)))
max_attempts_positive CHECK (((max_attempts >= 1) AND (max_attempts <= 1000)))
migrations_pkey PRIMARY KEY (number)
needs_pkey PRIMARY KEY (job_id, need_id)
phase_known CHECK ((phase = ANY (ARRAY['claimed'::text, 'started'::text])))
queues_pkey PRIMARY KEY (queue)
repeatables_pkey PRIMARY KEY (file)
reuse_pkey PRIMARY KEY (tenant, reuse_key)
role_known CHECK ((role = ANY (ARRAY['viewer'::text, 'submitter'::text, 'operator'::text, 'admin'::text])))
runner_named CHECK (((length(runner) <= 63) AND ((ascii(runner) >= ascii('a'::text)) AND (ascii(runner) <= ascii('z'::text))) AND (translate(runner, 'abcdefghijklmnopqrstuvwxyz0123456789_-'::text, ''::text) = ''::text)))
snapshots_folder UNIQUE (folder)
snapshots_pkey PRIMARY KEY (id)
specs_pkey PRIMARY KEY (id)
status_fits CHECK (
CASE
    WHEN (gate IS NOT NULL) THEN ((owner IS NULL) AND (finished_at IS NULL) AND (((status = 'queued'::text) AND (gate <> 'held'::text)) OR (status = 'pending'::text)))
    WHEN (finished_at IS NOT NULL) THEN ((owner IS NULL) AND (status = ANY (ARRAY['succeeded'::text, 'failed'::text, 'timed_out'::text, 'cancelled'::text])))
    WHEN (status = 'running'::text) THEN ((phase IS NOT NULL) AND (started_at IS NOT NULL))
    ELSE ((status = 'paused'::text) AND (owner IS NULL))
END)
stop_known CHECK ((stop_kind = ANY (ARRAY['interrupt'::text, 'cancel'::text, 'delete'::text])))
task_status_known CHECK ((status = ANY (ARRAY['pending'::text, 'running'::text, 'succeeded'::text, 'failed'::text, 'timed_out'::text, 'cancelled'::text])))
tasks_pkey PRIMARY KEY (job_id, n)
tenant_unless_admin CHECK (((tenant IS NULL) = (role = 'admin'::text)))
times_in_order CHECK (((started_at >= requested_at) AND (finished_at >= COALESCE(started_at, requested_at))))
tokens_hash UNIQUE (hash)
tokens_name UNIQUE (name)
tokens_pkey PRIMARY KEY (id)
totals_pkey PRIMARY KEY (counter, status)
workers_pkey PRIMARY KEY (worker)
CREATE OR REPLACE FUNCTION holdfast.accept_job(jobs jsonb, settings jsonb, wake boolean, idempotency_key text, key_tenant text, body uuid)
 RETURNS TABLE(reused boolean, asked uuid, record job_records)
 LANGUAGE plpgsql
 ROWS 1
AS $function$
DECLARE
  existing record;
BEGIN
  SELECT a.id, a.asked INTO existing
  FROM holdfast.accept_jobs(accept_job.jobs, settings, wake, idempotency_key, key_tenant, body) AS a;
  RETURN QUERY
  SELECT existing.id IS NOT NULL, CASE WHEN existing.id IS NULL THEN r.id ELSE existing.asked END, r
  FROM holdfast.job_records AS r
  WHERE r.id = coalesce(existing.id, (accept_job.jobs -> 0 ->> 'id')::uuid);
END
$function$

CREATE OR REPLACE FUNCTION holdfast.accept_jobs(jobs jsonb, settings jsonb, wake boolean, idempotency_key text, key_tenant text, body uuid)
 RETURNS TABLE(id uuid, asked uuid)
 LANGUAGE plpgsql
AS $function$
#variable_conflict use_column
DECLARE
  core CONSTANT text[] := ARRAY[
    'id', 'tenant', 'kind', 'queue', 'lane', 'priority', 'labels', 'runner', 'spec', 'inputs', 'needs', 'hold',
    'available_at', 'max_attempts', 'reuse_key', 'rebuild'];
  now_at CONSTANT timestamptz := holdfast.clock();
  batch jsonb;
  joined jsonb := '{}';
  limited text[];
  needing boolean;
  known record;
BEGIN
  IF idempotency_key IS NOT NULL THEN
    INSERT INTO holdfast.idempotency AS i (tenant, key, body, jobs, made_at)
    VALUES (key_tenant, idempotency_key, body, '[]', now_at)
    ON CONFLICT (tenant, key) DO UPDATE SET body = excluded.body, jobs = excluded.jobs, made_at = excluded.made_at
    WHERE i.made_at <= now_at - interval '24 hours';
    IF NOT FOUND THEN
      SELECT i.* INTO known FROM holdfast.idempotency AS i WHERE i.tenant = key_tenant AND i.key = idempotency_key;
      IF known.body <> body THEN
        RAISE EXCEPTION 'idempotency key % was used with another body', idempotency_key
          USING ERRCODE = 'HF409', DETAIL = 'idempotency_key';
      END IF;
      RETURN QUERY
      SELECT j.id, NULL::uuid
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

  batch := holdfast.with_defaults(jobs, settings);
  IF jsonb_path_exists(batch, '$[*].reuse_key') THEN
    joined := holdfast.join_reused(batch);
  END IF;
  IF idempotency_key IS NOT NULL THEN
    UPDATE holdfast.idempotency AS i
    SET jobs = (
      SELECT json_agg(coalesce(joined ->> (j.job ->> 'id'), j.job ->> 'id') ORDER BY j.n)
      FROM jsonb_array_elements(batch) WITH ORDINALITY AS j(job, n))
    WHERE i.tenant = key_tenant AND i.key = idempotency_key;
  END IF;
  limited := ARRAY(SELECT q.queue FROM holdfast.queues AS q WHERE q.depth_limit IS NOT NULL);
  IF limited <> '{}' THEN
    PERFORM holdfast.refuse_overflow(batch, joined);
  END IF;
  needing := jsonb_path_exists(batch, '$[*].needs[*]');
  IF needing THEN
    PERFORM holdfast.refuse_needs(batch, joined);
  END IF;

  WITH input AS MATERIALIZED (
    SELECT
      r.id,
      coalesce(r.tenant, 'default') AS tenant,
      coalesce(r.kind, 'run') AS kind,
      coalesce(r.queue, 'default') AS queue,
      coalesce(r.priority, 0) AS priority,
      coalesce(r.hold, false) AS held,
      CASE WHEN r.hold THEN 'pending' ELSE 'queued' END AS status,
      coalesce(jsonb_array_length(r.needs), 0) > 0 AS has_needs,
      CASE r.runner WHEN 'function' THEN 'function:' || (r.spec ->> 'name') ELSE r.runner END AS capability,
      greatest(r.available_at, now_at) AS available_at,
      coalesce(r.max_attempts, 1) AS max_attempts,
      r.lane, nullif(r.labels, '{}') AS labels, r.runner, r.spec, coalesce(r.inputs, '{}') AS inputs, r.reuse_key,
      nullif(j.job - core, '{}') AS policy
    FROM jsonb_array_elements(batch) AS j(job)
    CROSS JOIN LATERAL jsonb_to_record(j.job) AS r(
      id uuid, tenant text, kind text, queue text, lane text, priority integer, labels jsonb, runner text, spec jsonb,
      inputs jsonb, needs jsonb, hold boolean, available_at timestamptz, max_attempts integer, reuse_key text)
    WHERE joined = '{}' OR NOT joined ? (j.job ->> 'id')
  ), asked AS (
    INSERT INTO holdfast.specs (
      id, tenant, kind, requested_at, held, runner, spec, inputs, labels, policy, reuse_key)
    SELECT i.id, i.tenant, i.kind, now_at, i.held, i.runner, i.spec, i.inputs, i.labels, i.policy, i.reuse_key
    FROM input AS i
  ), moves AS (
    SELECT i.id, i.tenant, i.queue, NULL::text AS old_status, i.status AS new_status, 1::bigint AS seq, now_at AS changed_at
    FROM input AS i
  )
  INSERT INTO holdfast.jobs (
    id, tenant, queue, capability, lane, priority, status, gate, held, limited, has_needs, requested_at, available_at,
    queue_deadline_at, updated_at, max_attempts, seq)
  SELECT
    i.id, i.tenant, i.queue, i.capability, i.lane, i.priority, i.status,
    CASE
      WHEN i.lane IS NOT NULL OR i.has_needs THEN 'unresolved'
      WHEN i.held THEN 'held'
      WHEN i.available_at > now_at THEN 'future'
      ELSE 'open'
    END,
    i.held, i.queue = ANY (limited), i.has_needs, now_at, i.available_at,
    CASE WHEN NOT i.held THEN i.available_at + make_interval(secs => (i.policy ->> 'queue_timeout')::float8) END,
    now_at, i.max_attempts, 1
  FROM input AS i;

  IF needing THEN -- a success is final: its job may be pruned before the commit
    INSERT INTO holdfast.needs (job_id, need_id, satisfied)
    SELECT w.job_id, w.need_id, EXISTS (SELECT 1 FROM holdfast.jobs AS p WHERE p.id = w.need_id AND p.status = 'succeeded')
    FROM (
      SELECT DISTINCT (j.job ->> 'id')::uuid AS job_id, coalesce(joined ->> need.id, need.id)::uuid AS need_id
      FROM jsonb_array_elements(batch) AS j(job)
      CROSS JOIN LATERAL jsonb_array_elements_text(j.job -> 'needs') AS need(id)
      WHERE NOT joined ? (j.job ->> 'id')) AS w;
  END IF;

  IF wake THEN
    PERFORM pg_notify('holdfast', '["work"]');
  END IF;
  IF joined <> '{}' THEN
    RETURN QUERY SELECT e.value::uuid, e.key::uuid FROM jsonb_each_text(joined) AS e;
  END IF;
END
$function$

CREATE OR REPLACE FUNCTION holdfast.add_figures(figures json)
 RETURNS void
 LANGUAGE sql
AS $function$
  INSERT INTO holdfast.totals AS t (counter, status, count)
  SELECT f.counter, f.status, f.count
  FROM (
    SELECT n.key AS counter, '' AS status, (n.value #>> '{}')::bigint AS count
    FROM json_each(figures) AS n WHERE json_typeof(n.value) = 'number'
    UNION ALL
    SELECT 'finishes', s.key, (s.value #>> '{}')::bigint
    FROM json_each(coalesce(figures -> 'finishes', '{}')) AS s
  ) AS f
  ORDER BY f.counter COLLATE "C", f.status COLLATE "C"
  ON CONFLICT (counter, status) DO UPDATE SET count = t.count + excluded.count;
$function$

CREATE OR REPLACE FUNCTION holdfast.checked_job(n bigint, asked jsonb, rules jsonb)
 RETURNS jsonb
 LANGUAGE plpgsql
AS $function$
DECLARE
  pipeline CONSTANT text[] := ARRAY['tasks', 'connector', 'snapshot', 'base'];
  most CONSTANT integer := (rules -> 'limits' ->> 'bytes')::integer;
  longest CONSTANT jsonb := rules -> 'job' -> 'fields' -> 'timeout' -> 'le';
  job jsonb := asked;
  written text;
  misfit text[];
  wrong record;
  name text;
  own uuid;
  ids uuid[];
  base float8;
  cap float8;
BEGIN
  IF jsonb_path_exists(job, '$.* ? (@ == null)') THEN
    job := (SELECT jsonb_object_agg(f.key, f.value) FROM jsonb_each(job) AS f WHERE f.value <> 'null');
  END IF;

  IF job ?| pipeline THEN
    FOREACH name IN ARRAY pipeline LOOP
      IF coalesce(job -> name, '""') IN ('[]', '""') THEN
        job := job - name;
      ELSIF jsonb_array_length(coalesce(job -> 'tasks', '[]')) = 0 THEN
        PERFORM holdfast.refuse_job(n, name, 'is for pipelines: give tasks, too');
      ELSIF job -> 'spec' ? name THEN
        PERFORM holdfast.refuse_job(n, 'spec.' || name, format('is given twice: here, and as %s of the job', name));
      ELSE
        job := jsonb_set(job, ARRAY['spec', name], job -> name);
      END IF;
    END LOOP;
    job := job - pipeline;
  END IF;

  IF job ->> 'runner' = 'function' THEN
    IF job -> 'spec' ? 'tasks' THEN
      PERFORM holdfast.refuse_job(n, 'tasks', 'a pipeline runs as process or docker, not as function');
    END IF;
    misfit := holdfast.misfit(job -> 'spec', rules -> 'function', 'spec');
    IF misfit IS NOT NULL THEN
      PERFORM holdfast.refuse_job(n, misfit[1], misfit[2]);
    END IF;
  END IF;

  IF holdfast.unprintable(concat(job ->> 'tenant', job ->> 'kind', job ->> 'queue', job ->> 'lane')) THEN
    FOREACH name IN ARRAY ARRAY['tenant', 'kind', 'queue', 'lane'] LOOP
      IF holdfast.unprintable(job ->> name) THEN
        PERFORM holdfast.refuse_job(n, name, 'has control characters');
      END IF;
    END LOOP;
  END IF;

  written := job::text;
  IF written ~ '[0-9]{155}[0-9]{154}[.][0-9]' THEN -- a fraction that no float can hold: no reader could decode the job
    FOR name IN
      SELECT f.key FROM jsonb_each(job) AS f
      WHERE jsonb_path_exists(f.value, 'strict $.** ? (@.type() == "number" && (@ > 1.7976931348623157e308 || @ < -1.7976931348623157e308))')
    LOOP
      PERFORM holdfast.refuse_job(n, name, 'has a number that is out of range');
    END LOOP;
  END IF;
  IF octet_length(written) > most THEN
    FOR name IN SELECT f.key FROM jsonb_each(job) AS f WHERE octet_length(f.value::text) > most LOOP
      PERFORM holdfast.refuse_job(n, name, format('%s bytes; at most %s are accepted', octet_length((job -> name)::text), most), 'HF413');
    END LOOP;
  END IF;

  IF job ? 'available_at' AND left(job ->> 'available_at', 4)::integer
    NOT BETWEEN (rules -> 'limits' ->> 'first_year')::integer AND (rules -> 'limits' ->> 'last_year')::integer
  THEN
    PERFORM holdfast.refuse_job(n, 'available_at', format('is not between the years %s and %s',
      rules -> 'limits' ->> 'first_year', rules -> 'limits' ->> 'last_year'));
  END IF;

  IF job ? 'check' THEN
    PERFORM holdfast.refuse_check(n, job -> 'check', rules -> 'limits');
  END IF;

  IF job ? 'secrets' THEN
    FOR name IN SELECT s FROM jsonb_array_elements_text(job -> 'secrets') AS s WHERE s LIKE '%=%' OR holdfast.unprintable(s) LOOP
      PERFORM holdfast.refuse_job(n, 'secrets', format('''%s'' is not a valid variable name: it has an = or a control character', left(name, 60)));
    END LOOP;
  END IF;

  IF coalesce(job -> 'uploads', '[]') <> '[]' THEN
    IF job ->> 'runner' = 'function' THEN
      PERFORM holdfast.refuse_job(n, 'uploads', 'are for jobs with a work folder: a function has none');
    ELSIF job -> 'spec' ? 'tasks' THEN
      PERFORM holdfast.refuse_job(n, 'uploads', 'are not for pipelines: a result is known by what its tasks declare;'
        ' put files below the sources, and name them');
    END IF;
  END IF;

  IF job ? 'retry' THEN
    base := coalesce(job -> 'retry' -> 'base', rules -> 'backoff' -> 'base')::float8;
    cap := coalesce(job -> 'retry' -> 'cap', rules -> 'backoff' -> 'cap')::float8;
    IF base NOT BETWEEN 0 AND cap THEN
      PERFORM holdfast.refuse_job(n, 'retry', format('base %s must be between 0 and cap %s', base, cap));
    ELSIF cap > longest::float8 THEN
      PERFORM holdfast.refuse_job(n, 'retry', format('cap must be at most %s seconds', longest::float8));
    END IF;
  END IF;

  own := CASE WHEN job ? 'id' THEN holdfast.to_id(job ->> 'id') ELSE holdfast.new_id() END;
  IF own IS NULL THEN
    PERFORM holdfast.refuse_job(n, 'id', format('not a UUID: ''%s''', left(job ->> 'id', 60)));
  END IF;
  job := job || jsonb_build_object('id', own);

  IF coalesce(job -> 'needs', '[]') <> '[]' THEN
    FOR wrong IN
      SELECT e.n, e.need FROM jsonb_array_elements_text(job -> 'needs') WITH ORDINALITY AS e(need, n) WHERE holdfast.to_id(e.need) IS NULL
    LOOP
      PERFORM holdfast.refuse_job(n, format('needs[%s]', wrong.n - 1), format('not a UUID: ''%s''', left(wrong.need, 60)));
    END LOOP;
    ids := ARRAY(SELECT holdfast.to_id(e.need) FROM jsonb_array_elements_text(job -> 'needs') WITH ORDINALITY AS e(need, n) ORDER BY e.n);
    IF (SELECT count(DISTINCT i) FROM unnest(ids) AS i) < cardinality(ids) THEN
      PERFORM holdfast.refuse_job(n, 'needs', 'names a job twice');
    ELSIF own = ANY (ids) THEN
      PERFORM holdfast.refuse_job(n, 'needs', format('job %s needs itself', own));
    END IF;
    job := jsonb_set(job, '{needs}', to_jsonb(ids));
  END IF;
  RETURN job;
END
$function$

CREATE OR REPLACE FUNCTION holdfast.checked_jobs(jobs jsonb)
 RETURNS jsonb
 LANGUAGE plpgsql
AS $function$
DECLARE
  rules CONSTANT jsonb := holdfast.submission_rules();
  most CONSTANT integer := (rules -> 'limits' ->> 'jobs')::integer;
  batch CONSTANT jsonb := CASE jsonb_typeof(jobs) WHEN 'array' THEN jobs WHEN 'object' THEN jsonb_build_array(jobs) END;
  job_rule CONSTANT jsonb := rules -> 'job';
  checked jsonb[] := '{}';
  misfit text[];
  job jsonb;
  n bigint;
  twice text;
BEGIN
  IF batch IS NULL OR jsonb_path_exists(batch, '$[*] ? (@.type() != "object")') THEN
    RAISE EXCEPTION 'jobs: holdfast_submit takes a job (a JSON object) or an array of jobs' USING ERRCODE = 'HF422', DETAIL = 'jobs';
  ELSIF jsonb_array_length(batch) NOT BETWEEN 1 AND most THEN
    RAISE EXCEPTION 'jobs: % jobs in one call; between 1 and % are accepted', jsonb_array_length(batch), most
      USING ERRCODE = 'HF422', DETAIL = 'jobs';
  END IF;
  FOR n, job IN SELECT j.n, j.job FROM jsonb_array_elements(batch) WITH ORDINALITY AS j(job, n) LOOP
    IF NOT job ? 'spec' AND jsonb_typeof(job -> 'tasks') = 'array' AND job -> 'tasks' <> '[]' THEN
      job := job || '{"spec": {}}';
    END IF;
    misfit := holdfast.misfit(job, job_rule, NULL);
    IF misfit IS NOT NULL THEN
      PERFORM holdfast.refuse_job(n, misfit[1], misfit[2]);
    END IF;
    checked := checked || holdfast.checked_job(n, job, rules);
  END LOOP;
  SELECT j ->> 'id' INTO twice FROM unnest(checked) AS j GROUP BY j ->> 'id' HAVING count(*) > 1 LIMIT 1;
  IF twice IS NOT NULL THEN
    RAISE EXCEPTION 'id: job % is in this batch twice', twice USING ERRCODE = 'HF422', DETAIL = 'id';
  END IF;
  RETURN to_jsonb(checked);
END
$function$

CREATE OR REPLACE FUNCTION holdfast.clock()
 RETURNS timestamp with time zone
 LANGUAGE sql
AS $function$SELECT clock_timestamp()$function$

CREATE OR REPLACE FUNCTION holdfast.forget_labels()
 RETURNS trigger
 LANGUAGE plpgsql
 SECURITY DEFINER
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
BEGIN
  DELETE FROM holdfast.labels AS g
  USING removed AS s
  CROSS JOIN jsonb_each_text(s.labels) AS l
  WHERE s.labels IS NOT NULL
    AND g.tenant = s.tenant
    AND g.label = md5(l.key || '=' || l.value)::uuid
    AND g.requested_at = s.requested_at
    AND g.id = s.id;
  RETURN NULL;
END
$function$

CREATE OR REPLACE FUNCTION holdfast.function_lane(template text, function text, inputs jsonb)
 RETURNS text
 LANGUAGE plpgsql
 IMMUTABLE
AS $function$
DECLARE
  rest text := template;
  lane text := '';
  path text;
  input jsonb;
BEGIN
  WHILE position('{' IN rest) > 0 LOOP
    path := split_part(split_part(rest, '{', 2), '}', 1);
    input := inputs #> string_to_array(path, '.');
    IF input IS NULL OR NOT (jsonb_typeof(input) = 'string' OR (jsonb_typeof(input) = 'number' AND input::text ~ '^-?\d+$')) THEN
      RAISE EXCEPTION 'lane: % of function % needs the input %: a text or a whole number', template, function, path
        USING ERRCODE = 'HF422', DETAIL = 'lane';
    END IF;
    lane := lane || split_part(rest, '{', 1) || (input #>> '{}');
    rest := substr(rest, position('}' IN rest) + 1);
  END LOOP;
  lane := lane || rest;
  IF length(lane) NOT BETWEEN 1 AND 200 OR holdfast.unprintable(lane) THEN
    RAISE EXCEPTION 'lane: % of function % gives an empty, too long or unprintable name', template, function
      USING ERRCODE = 'HF422', DETAIL = 'lane';
  END IF;
  RETURN lane;
END
$function$

CREATE OR REPLACE FUNCTION holdfast.holdfast_submit(jobs jsonb, wake boolean DEFAULT true, idempotency_key text DEFAULT NULL::text, key_tenant text DEFAULT 'default'::text, body uuid DEFAULT NULL::uuid)
 RETURNS TABLE(id uuid, status text, gate text, reused boolean, asked uuid)
 LANGUAGE plpgsql
AS $function$
#variable_conflict use_column
DECLARE
  batch CONSTANT jsonb := holdfast.checked_jobs(holdfast_submit.jobs);
  longest CONSTANT integer := holdfast.submission_rules() -> 'limits' -> 'key';
  joined jsonb;
  replayed uuid[];
  taken text;
BEGIN
  IF length(idempotency_key) NOT BETWEEN 1 AND longest OR holdfast.unprintable(idempotency_key) THEN
    RAISE EXCEPTION 'idempotency_key: has % characters; between 1 and % are accepted', length(idempotency_key), longest
      USING ERRCODE = 'HF422', DETAIL = 'idempotency_key';
  END IF;
  BEGIN
    SELECT jsonb_object_agg(a.asked::text, a.id) FILTER (WHERE a.asked IS NOT NULL), array_agg(a.id) FILTER (WHERE a.asked IS NULL)
    INTO joined, replayed
    FROM holdfast.accept_jobs(
      batch, '{}', wake, idempotency_key, key_tenant, coalesce(body, md5(holdfast_submit.jobs::text)::uuid)) AS a;
  EXCEPTION WHEN unique_violation THEN
    GET STACKED DIAGNOSTICS taken = PG_EXCEPTION_DETAIL;
    RAISE EXCEPTION 'id: job % exists already', substring(taken FROM '\(id\)=\(([0-9a-f-]{36})\)')
      USING ERRCODE = 'HF409', DETAIL = 'id';
  END;
  IF replayed IS NOT NULL THEN
    RETURN QUERY
    SELECT j.id, j.status, j.gate, true, NULL::uuid
    FROM unnest(replayed) WITH ORDINALITY AS e(id, n)
    JOIN holdfast.jobs AS j ON j.id = e.id
    ORDER BY e.n;
    RETURN;
  END IF;
  RETURN QUERY
  SELECT j.id, j.status, j.gate, joined ->> (b.job ->> 'id') IS NOT NULL, (b.job ->> 'id')::uuid
  FROM jsonb_array_elements(batch) WITH ORDINALITY AS b(job, n)
  JOIN holdfast.jobs AS j ON j.id = coalesce(joined ->> (b.job ->> 'id'), b.job ->> 'id')::uuid
  ORDER BY b.n;
END
$function$

CREATE OR REPLACE FUNCTION holdfast.join_reused(batch jsonb)
 RETURNS jsonb
 LANGUAGE plpgsql
AS $function$
DECLARE
  asked record;
  standing record;
  answer uuid;
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
    RETURNING r.job_id, r.succeeded_id INTO standing;
    IF standing.job_id = asked.id THEN
      mine := mine || asked.id;
      CONTINUE;
    END IF;
    IF standing.job_id = ANY (mine) THEN
      answer := standing.job_id;
    ELSE -- the newest success first, then the live job; a rebuild joins only the live one
      SELECT j.id INTO answer
      FROM holdfast.jobs AS j
      WHERE j.id IN (standing.job_id, standing.succeeded_id)
        AND j.stop_kind IS DISTINCT FROM 'delete'
        AND ((j.status = 'succeeded' AND NOT asked.rebuild)
          OR (j.id = standing.job_id AND j.status IN ('pending', 'queued', 'running', 'paused')))
      ORDER BY j.status = 'succeeded' DESC, j.id = standing.job_id DESC
      LIMIT 1;
    END IF;
    IF answer IS NOT NULL THEN
      joined := joined || jsonb_build_object(asked.id::text, answer::text);
    ELSE
      UPDATE holdfast.reuse AS r
      SET job_id = asked.id, succeeded_id = NULL
      WHERE r.tenant = asked.tenant AND r.reuse_key = asked.key;
      mine := mine || asked.id;
    END IF;
  END LOOP;
  RETURN joined;
END
$function$

CREATE OR REPLACE FUNCTION holdfast.keep_figures()
 RETURNS trigger
 LANGUAGE plpgsql
AS $function$
BEGIN
  PERFORM holdfast.add_figures(OLD.figures);
  RETURN NULL;
END
$function$

CREATE OR REPLACE FUNCTION holdfast.misfit(value jsonb, rule jsonb, path text)
 RETURNS text[]
 LANGUAGE plpgsql
 IMMUTABLE
AS $function$
DECLARE
  wanted CONSTANT text := rule ->> 'type';
  given text := jsonb_typeof(value);
  message text;
  misfit text[];
  size integer;
  key text;
  item jsonb;
  n bigint;
BEGIN
  IF wanted = 'any' OR (given = 'null' AND rule ? 'null') THEN
    RETURN NULL;
  END IF;
  given := CASE given
    WHEN 'string' THEN 'str'
    WHEN 'boolean' THEN 'bool'
    WHEN 'number' THEN CASE WHEN value::text LIKE '%.%' THEN 'float' ELSE 'int' END
    ELSE given
  END;
  IF given <> (CASE WHEN wanted IN ('struct', 'map') THEN 'object' WHEN wanted IN ('enum', 'datetime') THEN 'str' ELSE wanted END)
    AND NOT (wanted = 'float' AND given = 'int')
  THEN
    RETURN ARRAY[path, format('Expected `%s`, got `%s`', rule ->> 'expected', given)];
  END IF;

  IF wanted IN ('int', 'float') THEN
    message := CASE
      WHEN value <= rule -> 'gt' THEN format('Expected `%s` > %s', wanted, rule ->> 'gt')
      WHEN value < rule -> 'ge' THEN format('Expected `%s` >= %s', wanted, rule ->> 'ge')
      WHEN value > rule -> 'le' THEN format('Expected `%s` <= %s', wanted, rule ->> 'le')
    END;
  ELSIF wanted = 'enum' THEN
    message := CASE WHEN NOT rule -> 'values' @> value THEN format('Invalid enum value ''%s''', value #>> '{}') END;
  ELSIF wanted = 'datetime' THEN
    message := holdfast.misfit_time(value #>> '{}');
  ELSIF rule ? 'min_length' OR rule ? 'max_length' THEN
    IF wanted = 'str' THEN
      size := length(value #>> '{}');
    ELSIF wanted = 'array' THEN
      size := jsonb_array_length(value);
    ELSE
      size := (SELECT count(*) FROM jsonb_object_keys(value));
    END IF;
    message := CASE
      WHEN size < (rule -> 'min_length')::integer THEN format('Expected `%s` of length >= %s', given, rule ->> 'min_length')
      WHEN size > (rule -> 'max_length')::integer THEN format('Expected `%s` of length <= %s', given, rule ->> 'max_length')
    END;
  END IF;
  IF message IS NOT NULL THEN
    RETURN ARRAY[path, message];
  END IF;

  IF wanted = 'array' THEN
    FOR n, item IN SELECT e.n, e.item FROM jsonb_array_elements(value) WITH ORDINALITY AS e(item, n) LOOP
      misfit := holdfast.misfit(item, rule -> 'items', format('%s[%s]', path, n - 1));
      IF misfit IS NOT NULL THEN
        RETURN misfit;
      END IF;
    END LOOP;
  ELSIF wanted = 'map' AND rule -> 'values' ->> 'type' <> 'any' THEN
    FOR key, item IN SELECT * FROM jsonb_each(value) LOOP
      misfit := coalesce(
        holdfast.misfit(to_jsonb(key), rule -> 'keys', path), holdfast.misfit(item, rule -> 'values', path || '[...]'));
      IF misfit IS NOT NULL THEN
        RETURN misfit;
      END IF;
    END LOOP;
  ELSIF wanted = 'struct' THEN
    FOR key, item IN SELECT * FROM jsonb_each(value) LOOP
      IF NOT rule -> 'fields' ? key THEN
        RETURN ARRAY[concat_ws('.', path, key), format('Object contains unknown field `%s`', key)];
      END IF;
      misfit := holdfast.misfit(item, rule -> 'fields' -> key, concat_ws('.', path, key));
      IF misfit IS NOT NULL THEN
        RETURN misfit;
      END IF;
    END LOOP;
    FOR n IN 0 .. jsonb_array_length(rule -> 'required') - 1 LOOP
      key := rule -> 'required' ->> n::integer;
      IF NOT value ? key THEN
        RETURN ARRAY[concat_ws('.', path, key), format('Object missing required field `%s`', key)];
      END IF;
    END LOOP;
  END IF;
  RETURN NULL;
END
$function$

CREATE OR REPLACE FUNCTION holdfast.misfit_time(given text)
 RETURNS text
 LANGUAGE plpgsql
 IMMUTABLE
AS $function$
DECLARE
  invalid CONSTANT text := 'Invalid RFC3339 encoded datetime';
BEGIN
  IF given !~* '^\d{4}-\d\d-\d\d[t ]([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d+)?(z|[+-]([01]\d|2[0-3]):?[0-5]\d)?$' THEN
    RETURN invalid;
  END IF;
  PERFORM left(given, 10)::date;
  IF given !~* '(z|[+-]\d\d:?\d\d)$' THEN
    RETURN 'Expected `datetime` with a timezone component';
  END IF;
  RETURN NULL;
EXCEPTION WHEN data_exception THEN
  RETURN invalid;
END
$function$

CREATE OR REPLACE FUNCTION holdfast.new_id()
 RETURNS uuid
 LANGUAGE sql
AS $function$
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
$function$

CREATE OR REPLACE FUNCTION holdfast.note_labels()
 RETURNS trigger
 LANGUAGE plpgsql
 SECURITY DEFINER
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
BEGIN
  INSERT INTO holdfast.labels (tenant, label, requested_at, id)
  -- By its keys: jsonb_each_text fills a table of its own for each job, which takes half as long again.
  SELECT l.tenant, md5(l.name || '=' || (l.labels ->> l.name))::uuid, l.requested_at, l.id
  FROM (
    SELECT s.tenant, s.labels, s.requested_at, s.id, jsonb_object_keys(s.labels) AS name
    FROM added AS s
    WHERE s.labels IS NOT NULL
  ) AS l;
  RETURN NULL;
END
$function$

CREATE OR REPLACE FUNCTION holdfast.refuse_check(n bigint, asked jsonb, limits jsonb)
 RETURNS void
 LANGUAGE plpgsql
AS $function$
BEGIN
  IF coalesce(asked -> 'command' ->> 0, '') = '' THEN
    PERFORM holdfast.refuse_job(n, 'check.command', 'is empty; give a program and its arguments');
  ELSIF jsonb_array_length(asked -> 'command') > (limits ->> 'arguments')::integer
    OR EXISTS (SELECT 1 FROM jsonb_array_elements_text(asked -> 'command') AS a WHERE length(a) > (limits ->> 'argument')::integer)
  THEN
    PERFORM holdfast.refuse_job(n, 'check.command', format('has over %s arguments, or one with over %s characters',
      limits ->> 'arguments', limits ->> 'argument'));
  ELSIF NOT (asked -> 'timeout' > '0' AND asked -> 'timeout' <= limits -> 'check_seconds') THEN
    PERFORM holdfast.refuse_job(n, 'check.timeout', 'must be a number of seconds above 0, at most a day');
  END IF;
END
$function$

CREATE OR REPLACE FUNCTION holdfast.refuse_job(n bigint, field text, message text, code text DEFAULT 'HF422'::text)
 RETURNS void
 LANGUAGE plpgsql
AS $function$
BEGIN
  RAISE EXCEPTION '%: %', field, message USING ERRCODE = code, DETAIL = field, HINT = format('In job %s of the call.', n);
END
$function$

CREATE OR REPLACE FUNCTION holdfast.refuse_needs(batch jsonb, joined jsonb)
 RETURNS void
 LANGUAGE plpgsql
AS $function$
DECLARE
  bad record;
BEGIN
  FOR bad IN
    WITH asked AS (
      SELECT j.n, coalesce(j.job ->> 'tenant', 'default') AS tenant, coalesce(joined ->> need.id, need.id)::uuid AS need
      FROM jsonb_array_elements(batch) WITH ORDINALITY AS j(job, n)
      CROSS JOIN LATERAL jsonb_array_elements_text(j.job -> 'needs') AS need(id)
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
      RAISE EXCEPTION 'no job (named in needs) %', bad.need USING ERRCODE = 'HF404', DETAIL = 'needs',
        HINT = format('In job %s of the call. Within one call, put a job after the ones it needs.', bad.n);
    END IF;
    RAISE EXCEPTION 'needs: job % %; resume or resolve it first, or leave it out', bad.need, bad.status
      USING ERRCODE = 'HF409', DETAIL = 'needs', HINT = format('In job %s of the call.', bad.n);
  END LOOP;
END
$function$

CREATE OR REPLACE FUNCTION holdfast.refuse_overflow(batch jsonb, joined jsonb)
 RETURNS void
 LANGUAGE plpgsql
AS $function$
DECLARE
  queue record;
BEGIN
  FOR queue IN
    SELECT q.queue, q.depth_limit, count(*) AS added, (
      SELECT count(*) FROM (
        SELECT 1 FROM holdfast.jobs AS w
        WHERE w.limited AND w.gate IS NOT NULL AND w.queue = q.queue
        LIMIT q.depth_limit) AS found) AS waiting
    FROM jsonb_array_elements(batch) AS j(job)
    JOIN holdfast.queues AS q ON q.queue = coalesce(j.job ->> 'queue', 'default')
    WHERE q.depth_limit IS NOT NULL
      AND NOT joined ? (j.job ->> 'id')
    GROUP BY q.queue, q.depth_limit
  LOOP
    IF queue.waiting + queue.added > queue.depth_limit THEN
      RAISE EXCEPTION 'queue % is full: at most % jobs may wait in it', queue.queue, queue.depth_limit
        USING ERRCODE = 'HF429', DETAIL = 'queue';
    END IF;
  END LOOP;
END
$function$

CREATE OR REPLACE FUNCTION holdfast.submission_rules()
 RETURNS jsonb
 LANGUAGE sql
 IMMUTABLE PARALLEL SAFE
AS $function$ SELECT $json$
{
 "job": {
  "type": "struct",
  "expected": "object",
  "fields": {
   "runner": {"type": "str","expected": "str","min_length": 1,"max_length": 63},
   "spec": {"type": "map","expected": "object","keys": {"type": "str","expected": "str"},"values": {"type": "any","expected": "any"}},
   "id": {"type": "str","expected": "str | null","null": true},
   "tenant": {"type": "str","expected": "str | null","min_length": 1,"max_length": 200,"null": true},
   "kind": {"type": "str","expected": "str","min_length": 1,"max_length": 200},
   "queue": {"type": "str","expected": "str | null","min_length": 1,"max_length": 200,"null": true},
   "lane": {"type": "str","expected": "str | null","min_length": 1,"max_length": 200,"null": true},
   "priority": {"type": "int","expected": "int","ge": -1000000,"le": 1000000},
   "labels": {"type": "map","expected": "object","keys": {"type": "str","expected": "str","min_length": 1,"max_length": 200},"values": {"type": "str","expected": "str","max_length": 256},"max_length": 64},
   "inputs": {"type": "map","expected": "object","keys": {"type": "str","expected": "str"},"values": {"type": "any","expected": "any"}},
   "needs": {"type": "array","expected": "array","items": {"type": "str","expected": "str"},"max_length": 1000},
   "hold": {"type": "bool","expected": "bool"},
   "available_at": {"type": "datetime","expected": "datetime | null","null": true},
   "max_attempts": {"type": "int","expected": "int | null","ge": 1,"le": 1000,"null": true},
   "retry": {"type": "struct","expected": "object | null","fields": {"base": {"type": "float","expected": "float"},"cap": {"type": "float","expected": "float"},"on": {"type": "array","expected": "array","items": {"type": "enum","expected": "str","values": ["failed","timed_out"]}}},"required": [],"null": true},
   "on_lost": {"type": "enum","expected": "str","values": ["fail","hold","pause","requeue"]},
   "timeout": {"type": "float","expected": "float | null","gt": 0.0,"le": 316224000.0,"null": true},
   "queue_timeout": {"type": "float","expected": "float | null","gt": 0.0,"le": 316224000.0,"null": true},
   "idle_timeout": {"type": "float","expected": "float | null","gt": 0.0,"le": 316224000.0,"null": true},
   "stop_grace": {"type": "float","expected": "float | null","ge": 0.0,"le": 86400.0,"null": true},
   "stop_after": {"type": "float","expected": "float | null","gt": 0.0,"le": 316224000.0,"null": true},
   "budget": {"type": "map","expected": "object | null","keys": {"type": "str","expected": "str","min_length": 1,"max_length": 200},"values": {"type": "float","expected": "float","ge": 0.0},"null": true},
   "secrets": {"type": "array","expected": "array","items": {"type": "str","expected": "str","min_length": 1,"max_length": 200}},
   "uploads": {"type": "array","expected": "array","items": {"type": "str","expected": "str","min_length": 1,"max_length": 200},"max_length": 100},
   "check": {"type": "struct","expected": "object | null","fields": {"command": {"type": "array","expected": "array","items": {"type": "str","expected": "str"}},"timeout": {"type": "float","expected": "float"}},"required": ["command","timeout"],"null": true},
   "reuse_key": {"type": "str","expected": "str | null","min_length": 1,"max_length": 200,"null": true},
   "rebuild": {"type": "bool","expected": "bool"},
   "tasks": {"type": "array","expected": "array","items": {"type": "struct","expected": "object","fields": {"name": {"type": "str","expected": "str","min_length": 1,"max_length": 64},"command": {"type": "array","expected": "array | null","items": {"type": "str","expected": "str","max_length": 32768},"min_length": 1,"max_length": 4096,"null": true},"sql": {"type": "str","expected": "str | null","min_length": 1,"max_length": 4096,"null": true},"files": {"type": "array","expected": "array","items": {"type": "str","expected": "str","min_length": 1,"max_length": 4096},"max_length": 1000},"env": {"type": "map","expected": "object","keys": {"type": "str","expected": "str","min_length": 1,"max_length": 200},"values": {"type": "str","expected": "str","max_length": 32768}},"timeout": {"type": "float","expected": "float | null","gt": 0.0,"le": 316224000.0,"null": true}},"required": ["name"]}},
   "connector": {"type": "str","expected": "str | null","min_length": 1,"max_length": 63,"null": true},
   "snapshot": {"type": "enum","expected": "str | null","values": ["always","final","none"],"null": true},
   "base": {"type": "str","expected": "str | null","null": true}
  },
  "required": [
   "runner",
   "spec"
  ]
 },
 "function": {
  "type": "struct",
  "expected": "object",
  "fields": {
   "name": {"type": "str","expected": "str","min_length": 1,"max_length": 200}
  },
  "required": [
   "name"
  ]
 },
 "limits": {
  "jobs": 10000,
  "key": 128,
  "bytes": 1048576,
  "first_year": 1970,
  "last_year": 9000,
  "arguments": 4096,
  "argument": 32768,
  "check_seconds": 86400.0
 },
 "backoff": {
  "base": 5.0,
  "cap": 300.0
 }
}
$json$::jsonb $function$

CREATE OR REPLACE FUNCTION holdfast.to_id(given text)
 RETURNS uuid
 LANGUAGE sql
 IMMUTABLE PARALLEL SAFE
AS $function$
  SELECT CASE WHEN d.digits ~* '^[0-9a-f]{32}$' THEN d.digits::uuid END
  FROM (SELECT replace(btrim(replace(replace(given, 'urn:', ''), 'uuid:', ''), '{}'), '-', '') AS digits) AS d
$function$

CREATE OR REPLACE FUNCTION holdfast.unprintable(given text)
 RETURNS boolean
 LANGUAGE sql
 IMMUTABLE PARALLEL SAFE
AS $function$
  SELECT given ~ ('[\u0001-\u001F\u007F-\u00A0\u00AD\u0600-\u0605\u061C\u06DD\u070F\u0890\u0891\u08E2\u1680\u180E\u2000-\u200F'
    '\u2028-\u202F\u205F-\u2064\u2066-\u206F\u3000\uE000-\uF8FF\uFEFF\uFFF9-\uFFFB]')
$function$

CREATE OR REPLACE FUNCTION holdfast.with_defaults(batch jsonb, settings jsonb)
 RETURNS jsonb
 LANGUAGE plpgsql
 STABLE SECURITY DEFINER
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
BEGIN
  IF settings = '{}' AND NOT EXISTS (SELECT 1 FROM holdfast.functions AS f WHERE f.defaults <> '{}') THEN
    RETURN batch;
  END IF;
  RETURN (
    SELECT jsonb_agg(
      (settings - 'functions') || d.defaults || CASE
        WHEN d.defaults ? 'lane' AND NOT j.job ? 'lane' THEN jsonb_build_object(
          'lane', holdfast.function_lane(d.defaults ->> 'lane', o.function, coalesce(j.job -> 'inputs', '{}')))
        ELSE '{}'
      END || j.job ORDER BY j.n)
    FROM jsonb_array_elements(batch) WITH ORDINALITY AS j(job, n)
    CROSS JOIN LATERAL (
      SELECT CASE WHEN j.job ->> 'runner' = 'function' THEN j.job -> 'spec' ->> 'name' END AS function) AS o
    LEFT JOIN holdfast.functions AS f ON f.function = o.function
    CROSS JOIN LATERAL (
      SELECT CASE
        WHEN (settings #>> ARRAY['functions', o.function, 'revision'])::bigint > coalesce(f.revision, -1)
        THEN settings #> ARRAY['functions', o.function, 'defaults']
        ELSE coalesce(f.defaults, '{}')
      END AS defaults) AS d);
END
$function$

job_events
 SELECT e.job_id,
    e.seq,
    e.at,
    e.type,
    e.task,
    e.data
   FROM events e
UNION ALL
 SELECT l.job_id,
    l.seq,
    l.at,
    l.type,
    l.task,
    l.data
   FROM ledger_events l;
job_records
 SELECT j.id,
    j.tenant,
    s.kind,
    j.queue,
    j.capability,
    j.lane,
    j.lane_position,
    j.status,
    j.gate,
    j.priority,
    s.labels,
    s.runner,
    s.spec,
    s.inputs,
    j.held,
    j.dismissed,
    (j.spent +
        CASE
            WHEN (j.phase = 'started'::text) THEN 1
            ELSE 0
        END) AS attempts,
    j.max_attempts,
    j.attempt,
    j.requested_at,
    j.available_at,
    j.started_at,
    j.finished_at,
    j.updated_at,
    j.owner,
    j.token,
    j.lease_expires_at,
    j.orphaned_at,
    j.phase,
    j.domain,
    j.stop_kind,
    j.stop_phase,
    j.stop_deadline_at,
    j.exit_code,
    j.error_code,
    j.error_message,
    j.result,
    j.progress,
    j.usage,
    j.seq,
    s.policy,
    s.reuse_key,
    s.signature
   FROM (jobs j
     JOIN specs s ON ((s.id = j.id)));
ledger_events
 SELECT s.id AS job_id,
    (1)::bigint AS seq,
    s.requested_at AS at,
    'status'::text AS type,
    NULL::text AS task,
    (
        CASE
            WHEN s.held THEN '{"status":"pending"}'::text
            ELSE '{"status":"queued"}'::text
        END)::json AS data
   FROM specs s
UNION ALL
 SELECT j.id AS job_id,
    j.claim_seq AS seq,
    j.claimed_at AS at,
    'status'::text AS type,
    NULL::text AS task,
    json_build_object('status', 'running', 'attempt', j.attempt, 'worker', j.worker) AS data
   FROM jobs j
  WHERE (j.phase IS NOT NULL)
UNION ALL
 SELECT a.job_id,
    a.claim_seq AS seq,
    a.claimed_at AS at,
    'status'::text AS type,
    NULL::text AS task,
    json_build_object('status', 'running', 'attempt', a.attempt, 'worker', a.worker) AS data
   FROM attempts a
UNION ALL
 SELECT a.job_id,
    a.end_seq AS seq,
    a.ended_at AS at,
    'status'::text AS type,
    NULL::text AS task,
        CASE
            WHEN (a.error_code IS NULL) THEN json_build_object('status', a.status, 'attempt', a.attempt, 'cause', a.cause)
            ELSE json_build_object('status', a.status, 'attempt', a.attempt, 'cause', a.cause, 'code', a.error_code, 'message', a.error_message)
        END AS data
   FROM attempts a
  WHERE (a.end_seq IS NOT NULL);
jobs {fillfactor=80,autovacuum_vacuum_scale_factor=0.02,autovacuum_vacuum_threshold=500,autovacuum_analyze_scale_factor=0.05,autovacuum_vacuum_cost_delay=1}
lanes {fillfactor=80}
leaders {fillfactor=50}
reuse {fillfactor=80}
snapshots {fillfactor=80}
tasks {fillfactor=80}
totals {fillfactor=50}
workers {fillfactor=50}
