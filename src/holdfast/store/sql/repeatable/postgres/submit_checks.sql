-- revision: 1
-- The checks of `holdfast_submit`: what a caller in another language sends is refused with the same fields and words as in
-- Python. The types are in submission_rules.sql; here is what reads them, and the few rules that types cannot express. A
-- runner's spec is not checked here, but for the name of a function, which a worker is found by: the runner checks it.

DROP FUNCTION IF EXISTS holdfast.check_policy(bigint, jsonb);

CREATE OR REPLACE FUNCTION holdfast.refuse_job(n bigint, field text, message text, code text DEFAULT 'HF422') RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
  RAISE EXCEPTION '%: %', field, message USING ERRCODE = code, DETAIL = field, HINT = format('In job %s of the call.', n);
END
$$;

-- Where a value does not fit its rule, and why: {field, message}; NULL if it fits. The words are those of msgspec.
-- It is called in assignments, not in queries: PL/pgSQL evaluates an expression much faster than a statement.
CREATE OR REPLACE FUNCTION holdfast.misfit(value jsonb, rule jsonb, path text) RETURNS text[]
LANGUAGE plpgsql IMMUTABLE AS $$
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
$$;

-- What is wrong with a time; NULL if it is one, with a time zone.
CREATE OR REPLACE FUNCTION holdfast.misfit_time(given text) RETURNS text
LANGUAGE plpgsql IMMUTABLE AS $$
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
$$;

-- Whether text has a character that Python's `str.isprintable` refuses: control, format, separators other than the space, private use.
CREATE OR REPLACE FUNCTION holdfast.unprintable(given text) RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
  SELECT given ~ ('[\u0001-\u001F\u007F-\u00A0\u00AD\u0600-\u0605\u061C\u06DD\u070F\u0890\u0891\u08E2\u1680\u180E\u2000-\u200F'
    '\u2028-\u202F\u205F-\u2064\u2066-\u206F\u3000\uE000-\uF8FF\uFEFF\uFFF9-\uFFFB]')
$$;

-- An id in any form that Python reads; NULL if it is none.
CREATE OR REPLACE FUNCTION holdfast.to_id(given text) RETURNS uuid
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
  SELECT CASE WHEN d.digits ~* '^[0-9a-f]{32}$' THEN d.digits::uuid END
  FROM (SELECT replace(btrim(replace(replace(given, 'urn:', ''), 'uuid:', ''), '{}'), '-', '') AS digits) AS d
$$;

-- Check a job whose fields have the right types; return it complete: with an id, without nulls, a pipeline's fields in its spec.
CREATE OR REPLACE FUNCTION holdfast.checked_job(n bigint, asked jsonb, rules jsonb) RETURNS jsonb
LANGUAGE plpgsql AS $$
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
$$;

CREATE OR REPLACE FUNCTION holdfast.refuse_check(n bigint, asked jsonb, limits jsonb) RETURNS void
LANGUAGE plpgsql AS $$
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
$$;

-- Check all jobs of a call and return them complete, or refuse the first one that is wrong.
CREATE OR REPLACE FUNCTION holdfast.checked_jobs(jobs jsonb) RETURNS jsonb
LANGUAGE plpgsql AS $$
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
$$;
