-- revision: 1
-- Keep the table of labels in step with specs.

-- With its owner's rights: a role that may submit needs none on this table.
CREATE OR REPLACE FUNCTION holdfast.note_labels() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
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
$$;
CREATE OR REPLACE FUNCTION holdfast.forget_labels() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
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
$$;
CREATE OR REPLACE TRIGGER note_labels AFTER INSERT ON holdfast.specs
REFERENCING NEW TABLE AS added FOR EACH STATEMENT EXECUTE FUNCTION holdfast.note_labels();
CREATE OR REPLACE TRIGGER forget_labels AFTER DELETE ON holdfast.specs
REFERENCING OLD TABLE AS removed FOR EACH STATEMENT EXECUTE FUNCTION holdfast.forget_labels();
