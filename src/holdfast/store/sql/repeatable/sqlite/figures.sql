-- revision: 1
-- As in the Postgres file of the same name.
DROP TRIGGER IF EXISTS keep_figures;
CREATE TRIGGER keep_figures AFTER DELETE ON workers WHEN OLD.figures IS NOT NULL
BEGIN
  INSERT INTO totals (counter, status, count)
  SELECT n.key, '', n.value FROM json_each(OLD.figures) AS n WHERE n.type = 'integer'
  UNION ALL
  SELECT 'finishes', s.key, s.value FROM json_each(OLD.figures, '$.finishes') AS s
  WHERE true
  ON CONFLICT (counter, status) DO UPDATE SET count = count + excluded.count;
END;
