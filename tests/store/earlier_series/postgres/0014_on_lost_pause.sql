-- Refuse a policy that a worker could not follow. `on_lost` can be `pause`; `hold` is its old name and still accepted.
CREATE OR REPLACE FUNCTION holdfast.check_policy(n bigint, policy jsonb) RETURNS void
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
        CASE WHEN value NOT IN ('"requeue"', '"fail"', '"pause"', '"hold"') THEN 'must be requeue, fail or pause' END
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
