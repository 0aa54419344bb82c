-- As in the Postgres migration of the same number. Differs: an index has no further columns beside its key.
DROP INDEX jobs_waiting;
CREATE INDEX jobs_waiting ON jobs (tenant, status, queue, requested_at, id, gate, available_at) WHERE gate IS NOT NULL;

-- What workers that are gone have counted. A row's figures are added in the transaction that removes it, so that no sum over
-- this and the workers' rows ever falls. The status is empty where a counter is not kept by status.
CREATE TABLE totals (
  counter TEXT NOT NULL,
  status TEXT NOT NULL DEFAULT '',
  count INTEGER NOT NULL,
  CONSTRAINT totals_pkey PRIMARY KEY (counter, status)
) WITHOUT ROWID, STRICT;

CREATE TRIGGER keep_figures AFTER DELETE ON workers WHEN OLD.figures IS NOT NULL
BEGIN
  INSERT INTO totals (counter, status, count)
  SELECT n.key, '', n.value FROM json_each(OLD.figures) AS n WHERE n.type = 'integer'
  UNION ALL
  SELECT 'finishes', s.key, s.value FROM json_each(OLD.figures, '$.finishes') AS s
  WHERE true
  ON CONFLICT (counter, status) DO UPDATE SET count = count + excluded.count;
END;
