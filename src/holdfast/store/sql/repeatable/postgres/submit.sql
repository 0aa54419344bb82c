-- revision: 4
-- Accepting jobs. `holdfast_submit` is for callers in any language: it checks what they send (submit_checks.sql) and calls
-- `accept_jobs`. Python has made these checks already and calls `accept_jobs` itself, or `accept_job` to read the job at once.
-- Here is what needs the database: defaults of functions, idempotency, reuse, depth, needs, and the gate a job starts with.
-- On SQLite the same is in Python (submit_sqlite.py).

DROP FUNCTION IF EXISTS holdfast.with_defaults(jsonb);

-- The lane of a job of a function: `{name}` in the template is the input of that name, `{order.customer}` a part of one. In
-- Python the same is function_defaults.py.
CREATE OR REPLACE FUNCTION holdfast.function_lane(template text, function text, inputs jsonb) RETURNS text
LANGUAGE plpgsql IMMUTABLE AS $$
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
$$;

-- Fill in what jobs do not say: from the function they call, else from `settings`, which are the caller's. Of a function, what
-- workers registered holds, unless the caller's own application (`settings.functions`) has a higher revision. With its owner's
-- rights: a role that may submit needs none on the table.
CREATE OR REPLACE FUNCTION holdfast.with_defaults(batch jsonb, settings jsonb) RETURNS jsonb
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
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
$$;

-- Which of these jobs stand for a reuse key that another job already stands for: {"own id": "its id"}.
--
-- Locks the keys, in order, until the transaction ends: submits with the same key wait for each other, nobody else.
CREATE OR REPLACE FUNCTION holdfast.join_reused(batch jsonb) RETURNS jsonb
LANGUAGE plpgsql AS $$
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
$$;

-- Refuse a call that would put more jobs into a queue than its limit allows.
CREATE OR REPLACE FUNCTION holdfast.refuse_overflow(batch jsonb, joined jsonb) RETURNS void
LANGUAGE plpgsql AS $$
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
$$;

-- Refuse a call that needs a job which does not exist or ended without success.
CREATE OR REPLACE FUNCTION holdfast.refuse_needs(batch jsonb, joined jsonb) RETURNS void
LANGUAGE plpgsql AS $$
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
$$;

-- Accept checked jobs, each with its id, all or nothing, inside the caller's own transaction. Return those that exist already:
-- `asked` is the id that was requested for the job, or NULL where the whole call is a repeat.
--
-- It takes no lock that another waits for, but for submits with the same reuse or idempotency key: a job with a lane or
-- needs is left `unresolved`, and any worker, or the Python client's follow-up, resolves it after the commit. Each job stands
-- after the ones it needs.
CREATE OR REPLACE FUNCTION holdfast.accept_jobs(
  jobs jsonb, settings jsonb, wake boolean, idempotency_key text, key_tenant text, body uuid)
RETURNS TABLE (id uuid, asked uuid)
LANGUAGE plpgsql AS $$
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
$$;

-- Accept one checked job and return its record: in this function's own statement the new row is visible.
-- ROWS 1: with the 1,000 that Postgres assumes, a plan for the given values looks cheaper, and every call is planned again.
CREATE OR REPLACE FUNCTION holdfast.accept_job(
  jobs jsonb, settings jsonb, wake boolean, idempotency_key text, key_tenant text, body uuid)
RETURNS TABLE (reused boolean, asked uuid, record holdfast.job_records)
LANGUAGE plpgsql ROWS 1 AS $$
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
$$;

-- Accept one job (an object) or many (an array), all or nothing, inside the caller's own transaction; one row for each, in their
-- order. Errors carry SQLSTATE HF404, HF409, HF410, HF413, HF422 or HF429 and the field in DETAIL. Within an array, a job
-- stands after the ones it needs.
CREATE OR REPLACE FUNCTION holdfast.holdfast_submit(
  jobs jsonb, wake boolean DEFAULT true, idempotency_key text DEFAULT NULL, key_tenant text DEFAULT 'default',
  body uuid DEFAULT NULL)
RETURNS TABLE (id uuid, status text, gate text, reused boolean, asked uuid)
LANGUAGE plpgsql AS $$
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
$$;
