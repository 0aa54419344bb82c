-- A reuse key remembers the build that succeeded while an older, failed one is resumed: `succeeded_id` is returned until `job_id`
-- succeeds itself. It is NULL unless a resume took the key from a job that had succeeded.

ALTER TABLE holdfast.reuse ADD COLUMN succeeded_id uuid;
COMMENT ON TABLE holdfast.reuse IS 'The job that stands for a reuse key: live, or the last one. Its row is the lock of the key.';
COMMENT ON COLUMN holdfast.reuse.succeeded_id IS 'An earlier success, returned while job_id, which was resumed, has not succeeded.';

-- Which of these jobs stand for a reuse key that another job already stands for: {"own id": "its id"}.
--
-- Locks the keys, in order, until the transaction ends: submits with the same key wait for each other, nobody else.
CREATE OR REPLACE FUNCTION holdfast.join_reused(batch jsonb) RETURNS jsonb
LANGUAGE plpgsql AS $$
DECLARE
  asked record;
  standing record;
  answer uuid;
  mine uuid[] := '{}';
  joined jsonb := '{}';
BEGIN
  FOR asked IN
    SELECT (j.job ->> 'id')::uuid AS id, coalesce(j.job ->> 'tenant', 'default') AS tenant, j.job ->> 'reuse_key' AS key,
      coalesce((j.job ->> 'rebuild')::boolean, false) AS rebuild
    FROM jsonb_array_elements(batch) WITH ORDINALITY AS j(job, n)
    WHERE j.job ->> 'reuse_key' IS NOT NULL
    ORDER BY coalesce(j.job ->> 'tenant', 'default') COLLATE "C", (j.job ->> 'reuse_key') COLLATE "C", j.n
  LOOP
    INSERT INTO holdfast.reuse AS r (tenant, reuse_key, job_id)
    VALUES (asked.tenant, asked.key, asked.id)
    ON CONFLICT (tenant, reuse_key) DO UPDATE SET job_id = r.job_id
    RETURNING r.job_id, r.succeeded_id INTO standing;
    IF standing.job_id = asked.id THEN
      mine := mine || asked.id;
      CONTINUE;
    END IF;
    IF standing.job_id = ANY (mine) THEN
      answer := standing.job_id;
    ELSE -- the newest success first, then the live job; a rebuild joins only the live one
      SELECT j.id INTO answer
      FROM holdfast.jobs AS j
      WHERE j.id IN (standing.job_id, standing.succeeded_id)
        AND j.stop_kind IS DISTINCT FROM 'delete'
        AND ((j.status = 'succeeded' AND NOT asked.rebuild)
          OR (j.id = standing.job_id AND j.status IN ('pending', 'queued', 'running', 'paused')))
      ORDER BY j.status = 'succeeded' DESC, j.id = standing.job_id DESC
      LIMIT 1;
    END IF;
    IF answer IS NOT NULL THEN
      joined := joined || jsonb_build_object(asked.id::text, answer::text);
    ELSE
      UPDATE holdfast.reuse AS r
      SET job_id = asked.id, succeeded_id = NULL
      WHERE r.tenant = asked.tenant AND r.reuse_key = asked.key;
      mine := mine || asked.id;
    END IF;
  END LOOP;
  RETURN joined;
END
$$;
