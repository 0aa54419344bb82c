-- Snapshots: looked up by id, built under a lock that is valid as long as its builder's lease, removed when unused.
-- Locks are taken in this order: the build's row, the job, snapshots by id.
-- On SQLite the one writer is the lock.

-- fragment: snapshot_columns
s.id, s.tenant, s.parent, s.task, s.task_hash, s.components, s.folder, s.digest, s.size, s.made_at, s.used_at, s.job_id

-- fragment: is_no_base
-- No job that has not ended starts from the snapshot.
NOT EXISTS (
    SELECT 1 FROM holdfast.specs AS p /*sqlite CROSS */ JOIN holdfast.jobs AS j ON j.id = p.id
    WHERE p.tenant = s.tenant AND p.spec ->> 'base' = /*sqlite + */ s.id AND j.finished_at IS NULL)

-- name: existing_snapshots
SELECT {snapshot_columns}
FROM holdfast.snapshots AS s
WHERE s.id IN (SELECT e FROM json_array_elements_text(:ids::json) AS e)
  AND s.tenant = :tenant::text
ORDER BY s.id;

-- name: use_snapshots
-- Record that they are used now, locked in order; an eviction checks the last use under the same lock.
WITH wanted AS MATERIALIZED (
  SELECT s.id
  FROM holdfast.snapshots AS s
  WHERE s.id IN (SELECT e FROM json_array_elements_text(:ids::json) AS e)
    AND s.tenant = :tenant::text
  ORDER BY s.id
  FOR UPDATE
)
UPDATE holdfast.snapshots AS s
SET used_at = greatest(s.used_at, holdfast.clock())
FROM wanted AS w
WHERE s.id = w.id
RETURNING {snapshot_columns};

-- name: snapshot_outputs
-- The outputs of the tasks up to a snapshot. Uses the primary key.
SELECT s.outputs
FROM holdfast.snapshots AS s
WHERE s.id = :id::text
  AND s.folder = :folder::text;

-- name: near_snapshots
-- Snapshots to compare a cache miss with: those with one of these parents, then the newest ones. Uses snapshots_listed,
-- snapshots_parent.
/*sqlite SELECT * FROM */ (SELECT {snapshot_columns}
  FROM holdfast.snapshots AS s /*sqlite INDEXED BY snapshots_parent */
  WHERE s.parent IN (SELECT e FROM json_array_elements_text(:parents::json) AS e)
    AND s.tenant = :tenant::text
  ORDER BY s.made_at DESC, s.id DESC
  LIMIT :limit::integer)
UNION ALL
/*sqlite SELECT * FROM */ (SELECT {snapshot_columns}
  FROM holdfast.snapshots AS s
  WHERE s.tenant = :tenant::text
    AND s.parent NOT IN (SELECT e FROM json_array_elements_text(:parents::json) AS e)
  ORDER BY s.made_at DESC, s.id DESC
  LIMIT :limit::integer);

-- name: list_snapshots
-- Newest first. Uses snapshots_listed.
SELECT {snapshot_columns}
FROM holdfast.snapshots AS s
WHERE s.tenant = :tenant::text
  AND (s.made_at, s.id) < (coalesce(:before_at::timestamptz, 'infinity'), coalesce(:before_id::text, ''))
ORDER BY s.made_at DESC, s.id DESC
LIMIT :limit::integer;

-- name: snapshots_between
-- Snapshots whose ids have a common prefix. Uses the primary key.
SELECT {snapshot_columns}
FROM holdfast.snapshots AS s
WHERE s.id >= :least::text
  AND s.id < :most::text
  AND s.tenant = :tenant::text
ORDER BY s.id
LIMIT :limit::integer;

-- name: snapshot_totals
-- The number of snapshots and their total size, of one tenant or of all.
SELECT count(*) AS count, coalesce(sum(s.size), 0)::bigint AS size
FROM holdfast.snapshots AS s
WHERE :tenant::text IS NULL OR s.tenant = :tenant::text;

-- name: lock_build
-- Lock the row of a snapshot's build; the next statement reads who holds the build lock.
INSERT INTO holdfast.builds AS b (id, taken_at)
VALUES (:id::text, holdfast.clock())
ON CONFLICT (id) DO UPDATE SET id = b.id;

-- name: build_state
-- Which job builds a snapshot, whether its lease is valid, and whether the snapshot exists already.
SELECT b.job_id, b.token,
  EXISTS (
    SELECT 1 FROM holdfast.jobs AS j
    WHERE j.id = b.job_id AND j.token = b.token AND j.status = 'running' AND j.owner IS NOT NULL) AS live,
  EXISTS (SELECT 1 FROM holdfast.snapshots AS s WHERE s.id = b.id AND s.tenant = :tenant::text) AS built
FROM holdfast.builds AS b
WHERE b.id = :id::text;

-- name: lock_lease
-- Lock a job if this lease still owns it; no row: the lease is lost.
SELECT j.id
FROM holdfast.jobs AS j
WHERE j.id = :id::uuid
  AND j.token = :token::bigint
  AND j.status = 'running'
  AND j.owner IS NOT NULL
FOR UPDATE;

-- name: take_build
UPDATE holdfast.builds AS b
SET job_id = :job_id::uuid,
    token = :token::bigint,
    taken_at = holdfast.clock()
WHERE b.id = :id::text;

-- name: release_build
DELETE FROM holdfast.builds AS b
WHERE b.id = :id::text
  AND (b.job_id IS NULL OR (b.job_id = :job_id::uuid AND b.token = :token::bigint));

-- name: prune_builds
-- Build locks whose lease ended a while ago and that no other job took.
DELETE FROM holdfast.builds AS b
WHERE b.id IN (
  SELECT o.id FROM holdfast.builds AS o
  WHERE o.taken_at < holdfast.clock() - make_interval(secs => :age::float8)
    AND NOT EXISTS (
      SELECT 1 FROM holdfast.jobs AS j
      WHERE j.id = o.job_id AND j.token = o.token AND j.status = 'running' AND j.owner IS NOT NULL)
  FOR UPDATE SKIP LOCKED)
RETURNING b.id;
-- sqlite precheck
SELECT 1 FROM builds AS b WHERE b.taken_at < clock() - CAST(:age * 1000000 AS INTEGER) LIMIT 1;

-- name: publish_snapshot
-- The caller holds the build lock, and the snapshot does not exist yet. No row: this job did not plan the snapshot, or
-- it belongs to another tenant.
INSERT INTO holdfast.snapshots (
  id, tenant, parent, task, task_hash, components, folder, digest, size, made_at, used_at, job_id, token, outputs)
SELECT
  :id::text, :tenant::text, :parent::text, :task::text, :task_hash::text, :components::json, :folder::text, :digest::text,
  :size::bigint, holdfast.clock(), holdfast.clock(), :job_id::uuid, :token::bigint, :outputs::json
WHERE EXISTS (
  SELECT 1 FROM holdfast.tasks AS t
  WHERE t.job_id = :job_id::uuid AND t.snapshot = :id::text AND t.parent = :parent::text)
ON CONFLICT (id) DO NOTHING
RETURNING id;

-- name: snapshot_descendants
-- A snapshot and all that was made from it. Uses snapshots_parent.
WITH RECURSIVE descendants AS (
  SELECT s.id FROM holdfast.snapshots AS s WHERE s.id = :id::text AND s.tenant = :tenant::text
  UNION
  SELECT c.id FROM descendants AS f JOIN holdfast.snapshots AS c ON c.parent = f.id
)
SELECT f.id FROM descendants AS f ORDER BY f.id;

-- name: lock_snapshots
-- Locked in order; the next statement reads which jobs need them.
SELECT {snapshot_columns}
FROM holdfast.snapshots AS s
WHERE s.id IN (SELECT e FROM json_array_elements_text(:ids::json) AS e)
ORDER BY s.id
FOR UPDATE;

-- name: snapshot_users
-- Jobs that have not ended and have one of these in their plan or as their base. Uses tasks_parent, tasks_snapshot,
-- specs_base.
-- The plus is for SQLite: without it the id is compared as text, but the indexed value is not text.
SELECT u.snapshot, u.job_id
FROM (
  SELECT t.snapshot, t.job_id FROM holdfast.tasks AS t
  WHERE t.snapshot IN (SELECT e FROM json_array_elements_text(:ids::json) AS e)
  UNION
  SELECT t.parent, t.job_id FROM holdfast.tasks AS t
  WHERE t.parent IN (SELECT e FROM json_array_elements_text(:ids::json) AS e)
  UNION
  SELECT s.id, p.id
  FROM holdfast.snapshots AS s /*sqlite CROSS */
  JOIN holdfast.specs AS p ON p.tenant = s.tenant AND p.spec ->> 'base' = /*sqlite + */ s.id
  WHERE s.id IN (SELECT e FROM json_array_elements_text(:ids::json) AS e)) AS u
JOIN holdfast.jobs AS j ON j.id = u.job_id
WHERE j.finished_at IS NULL
ORDER BY u.snapshot, u.job_id;

-- name: remove_snapshots
DELETE FROM holdfast.snapshots AS s
WHERE s.id IN (SELECT e FROM json_array_elements_text(:ids::json) AS e)
RETURNING s.id;

-- name: evictable_snapshots
-- Leaves that were not used for a while and that no unfinished job has in its plan or as base: oldest, then largest.
-- Uses snapshots_parent, tasks_parent, tasks_snapshot, specs_base.
SELECT s.id
FROM holdfast.snapshots AS s
WHERE s.used_at <= holdfast.clock() - make_interval(secs => :grace::float8)
  AND NOT EXISTS (SELECT 1 FROM holdfast.snapshots AS c WHERE c.parent = s.id)
  AND NOT EXISTS (
    SELECT 1 FROM holdfast.tasks AS t JOIN holdfast.jobs AS j ON j.id = t.job_id
    WHERE t.snapshot = s.id AND j.finished_at IS NULL)
  AND NOT EXISTS (
    SELECT 1 FROM holdfast.tasks AS t JOIN holdfast.jobs AS j ON j.id = t.job_id
    WHERE t.parent = s.id AND j.finished_at IS NULL)
  AND {is_no_base}
ORDER BY s.used_at, s.size DESC, s.id
LIMIT :limit::integer;

-- name: unused_snapshots
-- Which of these locked snapshots were not used for a while and are not the base of an unfinished job: a submit by SQL
-- does not record a use. Uses specs_base.
SELECT s.id
FROM holdfast.snapshots AS s
WHERE s.id IN (SELECT e FROM json_array_elements_text(:ids::json) AS e)
  AND s.used_at <= holdfast.clock() - make_interval(secs => :grace::float8)
  AND {is_no_base};

-- name: stored_folders
-- Which of these folders have a row. Uses snapshots_folder.
SELECT s.folder
FROM holdfast.snapshots AS s
WHERE s.folder IN (SELECT e FROM json_array_elements_text(:folders::json) AS e);
