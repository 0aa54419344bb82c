-- revision: 1
-- Add the figures of a worker that is removed to the totals, in the same transaction.

CREATE OR REPLACE FUNCTION holdfast.add_figures(figures json) RETURNS void
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

CREATE OR REPLACE FUNCTION holdfast.keep_figures() RETURNS trigger
LANGUAGE plpgsql AS $$
BEGIN
  PERFORM holdfast.add_figures(OLD.figures);
  RETURN NULL;
END
$$;
CREATE OR REPLACE TRIGGER keep_figures AFTER DELETE ON holdfast.workers
FOR EACH ROW WHEN (OLD.figures IS NOT NULL) EXECUTE FUNCTION holdfast.keep_figures();
