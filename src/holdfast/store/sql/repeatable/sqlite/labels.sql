-- revision: 1
-- Differs: a submit writes its labels itself; a trigger that takes JSON apart would cost it a quarter more.
DROP TRIGGER IF EXISTS forget_labels;
CREATE TRIGGER forget_labels AFTER DELETE ON specs WHEN OLD.labels IS NOT NULL
BEGIN
  DELETE FROM labels
  WHERE tenant = OLD.tenant
    AND label IN (SELECT l.key || '=' || l.value FROM json_each(OLD.labels) AS l)
    AND requested_at = OLD.requested_at
    AND id = OLD.id;
END;
