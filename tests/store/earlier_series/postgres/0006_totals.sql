-- Counts of jobs by gate are read from one index alone: it gets the columns that they need. Lists read it as before.
DROP INDEX holdfast.jobs_waiting;
CREATE INDEX jobs_waiting ON holdfast.jobs (tenant, status, queue, requested_at, id) INCLUDE (gate, available_at) WHERE gate IS NOT NULL;

-- What workers that are gone have counted. A row's figures are added in the transaction that removes it, so that no sum over
-- this and the workers' rows ever falls.
CREATE TABLE holdfast.totals (
  counter text COLLATE "C" NOT NULL,
  status text COLLATE "C" NOT NULL DEFAULT '',
  count bigint NOT NULL,
  CONSTRAINT totals_pkey PRIMARY KEY (counter, status)
) WITH (fillfactor = 50);
COMMENT ON COLUMN holdfast.totals.status IS 'Of counters that are kept by status; else empty.';

CREATE FUNCTION holdfast.add_figures(figures json) RETURNS void
LANGUAGE sql AS $$
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
$$;

CREATE FUNCTION holdfast.keep_figures() RETURNS trigger
LANGUAGE plpgsql AS $$
BEGIN
  PERFORM holdfast.add_figures(OLD.figures);
  RETURN NULL;
END
$$;
CREATE TRIGGER keep_figures AFTER DELETE ON holdfast.workers
FOR EACH ROW WHEN (OLD.figures IS NOT NULL) EXECUTE FUNCTION holdfast.keep_figures();
