-- Lists of jobs, newest first, by any filter: each has an index in the order of the list, so that a page is a stretch of it, whatever
-- the filter and however little it finds. It is read backwards: what is new is then put at the end of its stretch, where the database
-- leaves pages full behind it (ordered the other way, a submit wrote an eighth more of log, a finish a fourteenth).
-- By status there are two: a claim takes a job out of one, its end puts it into the other, and what runs, which is little, is found by
-- jobs_running. One for all statuses would be written at a claim too: claim and finish then took 82 µs of processor time a job instead
-- of 64, and 62 without any of this.

DROP INDEX holdfast.jobs_ended_badly;
CREATE INDEX jobs_waiting ON holdfast.jobs (tenant, status, queue, requested_at, id) WHERE gate IS NOT NULL;
CREATE INDEX jobs_ended ON holdfast.jobs (tenant, status, queue, requested_at, id)
  WHERE status IN ('paused', 'succeeded', 'failed', 'timed_out', 'cancelled');
CREATE INDEX jobs_of_lane ON holdfast.jobs (tenant, lane, requested_at, id) WHERE lane IS NOT NULL;
CREATE INDEX specs_of_kind ON holdfast.specs (tenant, kind, requested_at, id);

-- Which jobs have a label. A label never changes; only jobs that have some pay for this.
CREATE TABLE holdfast.labels (
  tenant text COLLATE "C" NOT NULL,
  label uuid NOT NULL,
  requested_at timestamptz NOT NULL,
  id uuid NOT NULL
);
COMMENT ON COLUMN holdfast.labels.label IS 'The md5 of name=value: an entry of an index may not be as long as a label.';
CREATE INDEX labels_listed ON holdfast.labels (tenant, label, requested_at, id);

-- With its owner's rights: whoever may submit needs none on this table.
CREATE FUNCTION holdfast.note_labels() RETURNS trigger
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
CREATE FUNCTION holdfast.forget_labels() RETURNS trigger
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
CREATE TRIGGER note_labels AFTER INSERT ON holdfast.specs
REFERENCING NEW TABLE AS added FOR EACH STATEMENT EXECUTE FUNCTION holdfast.note_labels();
CREATE TRIGGER forget_labels AFTER DELETE ON holdfast.specs
REFERENCING OLD TABLE AS removed FOR EACH STATEMENT EXECUTE FUNCTION holdfast.forget_labels();

INSERT INTO holdfast.labels (tenant, label, requested_at, id)
SELECT s.tenant, md5(l.key || '=' || l.value)::uuid, s.requested_at, s.id
FROM holdfast.specs AS s
CROSS JOIN jsonb_each_text(s.labels) AS l
WHERE s.labels IS NOT NULL;
