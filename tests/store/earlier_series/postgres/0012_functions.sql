-- What the decorator of a function says of its jobs (queue, timeout, …), registered by the workers that have it: it holds for every
-- way of submitting. What a submit says itself wins.
CREATE TABLE holdfast.functions (
  function text COLLATE "C" CONSTRAINT functions_pkey PRIMARY KEY,
  revision bigint NOT NULL,
  defaults jsonb NOT NULL,
  updated_at timestamptz NOT NULL
);
COMMENT ON COLUMN holdfast.functions.revision IS 'A worker with a lower one does not overwrite what a newer one registered.';

-- Fill in what jobs do not say: from the function they call, else from their own `defaults`, which are the caller's settings. Fields of
-- the policy go where the job keeps its own: into `policy`, if it has one. With its owner's rights: who may submit needs none here.
CREATE FUNCTION holdfast.with_defaults(batch jsonb) RETURNS jsonb
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  core CONSTANT text[] := ARRAY['queue', 'lane', 'priority', 'labels', 'max_attempts'];
BEGIN
  IF NOT EXISTS (SELECT 1 FROM holdfast.functions AS f WHERE f.defaults <> '{}')
    AND NOT jsonb_path_exists(batch, '$[*].defaults')
  THEN
    RETURN batch;
  END IF;
  RETURN (
    SELECT jsonb_agg(
      CASE
        WHEN d.defaults = '{}' THEN j.job - 'defaults'
        WHEN jsonb_typeof(j.job -> 'policy') = 'object' THEN
          (SELECT coalesce(jsonb_object_agg(e.key, e.value), '{}') FROM jsonb_each(d.defaults) AS e WHERE e.key = ANY (core))
          || s.said
          || jsonb_build_object('policy', (d.defaults - core) || (j.job -> 'policy'))
        ELSE d.defaults || s.said
      END ORDER BY j.n)
    FROM jsonb_array_elements(batch) WITH ORDINALITY AS j(job, n)
    LEFT JOIN holdfast.functions AS f ON j.job ->> 'runner' = 'function' AND f.function = j.job -> 'spec' ->> 'name'
    CROSS JOIN LATERAL (SELECT coalesce(j.job -> 'defaults', '{}') || coalesce(f.defaults, '{}') AS defaults) AS d
    CROSS JOIN LATERAL (
      SELECT coalesce(jsonb_object_agg(e.key, e.value), '{}') AS said
      FROM jsonb_each(j.job - 'defaults') AS e
      WHERE e.value <> 'null' OR NOT d.defaults ? e.key
    ) AS s);
END
$$;

-- As before, with the defaults filled in first.
CREATE OR REPLACE FUNCTION holdfast.holdfast_submit(
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
  batch := holdfast.with_defaults(batch);

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
