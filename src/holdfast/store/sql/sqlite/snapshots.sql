-- Snapshots: looked up by id, built under a lock that is valid as long as its builder's lease, removed when unused.
-- Differs: the one writer is the lock.

-- name: existing_snapshots
SELECT s.id, s.tenant, s.parent, s.task, s.task_hash, s.components, s.folder, s.digest, s.size, s.made_at, s.used_at, s.job_id
FROM snapshots AS s
WHERE s.id IN (SELECT value FROM json_each(:ids))
  AND s.tenant = :tenant
ORDER BY s.id;

-- name: use_snapshots
-- Record that they are used now.
UPDATE snapshots
SET used_at = max(used_at, clock())
WHERE id IN (SELECT value FROM json_each(:ids))
  AND tenant = :tenant
RETURNING id, tenant, parent, task, task_hash, components, folder, digest, size, made_at, used_at, job_id;

-- name: snapshot_outputs
-- The outputs of the tasks up to a snapshot. Uses the primary key.
SELECT s.outputs
FROM snapshots AS s
WHERE s.id = :id
  AND s.folder = :folder;

-- name: near_snapshots
-- Snapshots to compare a cache miss with: those with one of these parents, then the newest ones. Uses snapshots_listed,
-- snapshots_parent.
SELECT * FROM (SELECT s.id, s.tenant, s.parent, s.task, s.task_hash, s.components, s.folder, s.digest, s.size, s.made_at, s.used_at, s.job_id
  FROM snapshots AS s INDEXED BY snapshots_parent
  WHERE s.parent IN (SELECT value FROM json_each(:parents))
    AND s.tenant = :tenant
  ORDER BY s.made_at DESC, s.id DESC
  LIMIT :limit)
UNION ALL
SELECT * FROM (SELECT s.id, s.tenant, s.parent, s.task, s.task_hash, s.components, s.folder, s.digest, s.size, s.made_at, s.used_at, s.job_id
  FROM snapshots AS s
  WHERE s.tenant = :tenant
    AND s.parent NOT IN (SELECT value FROM json_each(:parents))
  ORDER BY s.made_at DESC, s.id DESC
  LIMIT :limit);

-- name: list_snapshots
-- Newest first. Uses snapshots_listed.
SELECT s.id, s.tenant, s.parent, s.task, s.task_hash, s.components, s.folder, s.digest, s.size, s.made_at, s.used_at, s.job_id
FROM snapshots AS s
WHERE s.tenant = :tenant
  AND (s.made_at, s.id) < (coalesce(:before_at, 9223372036854775807), coalesce(:before_id, ''))
ORDER BY s.made_at DESC, s.id DESC
LIMIT :limit;

-- name: snapshots_between
-- Snapshots whose ids have a common prefix. Uses the primary key.
SELECT s.id, s.tenant, s.parent, s.task, s.task_hash, s.components, s.folder, s.digest, s.size, s.made_at, s.used_at, s.job_id
FROM snapshots AS s
WHERE s.id >= :least
  AND s.id < :most
  AND s.tenant = :tenant
ORDER BY s.id
LIMIT :limit;

-- name: snapshot_totals
-- The number of snapshots and their total size, of one tenant or of all.
SELECT count(*) AS count, coalesce(sum(s.size), 0) AS size
FROM snapshots AS s
WHERE :tenant IS NULL OR s.tenant = :tenant;

-- name: lock_build
-- The row of a snapshot's build; the next statement reads who holds the build lock.
INSERT INTO builds (id, taken_at)
VALUES (:id, clock())
ON CONFLICT (id) DO NOTHING;

-- name: build_state
-- Which job builds a snapshot, whether its lease is valid, and whether the snapshot exists already.
SELECT b.job_id, b.token,
  EXISTS (
    SELECT 1 FROM jobs AS j
    WHERE j.id = b.job_id AND j.token = b.token AND j.status = 'running' AND j.owner IS NOT NULL) AS live,
  EXISTS (SELECT 1 FROM snapshots AS s WHERE s.id = b.id AND s.tenant = :tenant) AS built
FROM builds AS b
WHERE b.id = :id;

-- name: lock_lease
-- A job that this lease still owns; no row: the lease is lost.
SELECT j.id
FROM jobs AS j
WHERE j.id = :id
  AND j.token = :token
  AND j.status = 'running'
  AND j.owner IS NOT NULL;

-- name: take_build
UPDATE builds
SET job_id = :job_id,
    token = :token,
    taken_at = clock()
WHERE id = :id;

-- name: release_build
DELETE FROM builds
WHERE id = :id
  AND (job_id IS NULL OR (job_id = :job_id AND token = :token));

-- name: prune_builds
-- Build locks whose lease ended a while ago and that no other job took.
-- precheck
SELECT 1 FROM builds AS b WHERE b.taken_at < clock() - CAST(:age * 1000000 AS INTEGER) LIMIT 1;
DELETE FROM builds
WHERE id IN (
  SELECT o.id FROM builds AS o
  WHERE o.taken_at < clock() - CAST(:age * 1000000 AS INTEGER)
    AND NOT EXISTS (
      SELECT 1 FROM jobs AS j
      WHERE j.id = o.job_id AND j.token = o.token AND j.status = 'running' AND j.owner IS NOT NULL))
RETURNING id;

-- name: publish_snapshot
-- The caller holds the build lock, and the snapshot does not exist yet. No row: this job did not plan the snapshot, or
-- it belongs to another tenant.
INSERT INTO snapshots (
  id, tenant, parent, task, task_hash, components, folder, digest, size, made_at, used_at, job_id, token, outputs)
SELECT
  :id, :tenant, :parent, :task, :task_hash, :components, :folder, :digest,
  :size, clock(), clock(), :job_id, :token, :outputs
WHERE EXISTS (
  SELECT 1 FROM tasks AS t
  WHERE t.job_id = :job_id AND t.snapshot = :id AND t.parent = :parent)
ON CONFLICT (id) DO NOTHING
RETURNING id;

-- name: snapshot_descendants
-- A snapshot and all that was made from it. Uses snapshots_parent.
WITH RECURSIVE descendants AS (
  SELECT s.id FROM snapshots AS s WHERE s.id = :id AND s.tenant = :tenant
  UNION
  SELECT c.id FROM descendants AS f JOIN snapshots AS c ON c.parent = f.id
)
SELECT f.id FROM descendants AS f ORDER BY f.id;

-- name: lock_snapshots
-- The next statement reads which jobs need them.
SELECT s.id, s.tenant, s.parent, s.task, s.task_hash, s.components, s.folder, s.digest, s.size, s.made_at, s.used_at, s.job_id
FROM snapshots AS s
WHERE s.id IN (SELECT value FROM json_each(:ids))
ORDER BY s.id;

-- name: snapshot_users
-- Jobs that have not ended and have one of these in their plan or as their base. Uses tasks_parent, tasks_snapshot,
-- specs_base.
-- Differs: the plus, here and below. Without it the id is compared as text, but the indexed value is not text.
SELECT u.snapshot, u.job_id
FROM (
  SELECT t.snapshot, t.job_id FROM tasks AS t
  WHERE t.snapshot IN (SELECT value FROM json_each(:ids))
  UNION
  SELECT t.parent, t.job_id FROM tasks AS t
  WHERE t.parent IN (SELECT value FROM json_each(:ids))
  UNION
  SELECT s.id, p.id FROM snapshots AS s CROSS JOIN specs AS p ON p.tenant = s.tenant AND p.spec ->> '$.base' = +s.id
  WHERE s.id IN (SELECT value FROM json_each(:ids))) AS u
JOIN jobs AS j ON j.id = u.job_id
WHERE j.finished_at IS NULL
ORDER BY u.snapshot, u.job_id;

-- name: remove_snapshots
DELETE FROM snapshots
WHERE id IN (SELECT value FROM json_each(:ids))
RETURNING id;

-- name: evictable_snapshots
-- Leaves that were not used for a while and that no unfinished job has in its plan or as base: oldest, then largest.
-- Uses snapshots_used, snapshots_parent, tasks_parent, tasks_snapshot, specs_base.
SELECT s.id
FROM snapshots AS s
WHERE s.used_at <= clock() - CAST(:grace * 1000000 AS INTEGER)
  AND NOT EXISTS (SELECT 1 FROM snapshots AS c WHERE c.parent = s.id)
  AND NOT EXISTS (
    SELECT 1 FROM tasks AS t JOIN jobs AS j ON j.id = t.job_id
    WHERE t.snapshot = s.id AND j.finished_at IS NULL)
  AND NOT EXISTS (
    SELECT 1 FROM tasks AS t JOIN jobs AS j ON j.id = t.job_id
    WHERE t.parent = s.id AND j.finished_at IS NULL)
  AND NOT EXISTS (
    SELECT 1 FROM specs AS p CROSS JOIN jobs AS j ON j.id = p.id
    WHERE p.tenant = s.tenant AND p.spec ->> '$.base' = +s.id AND j.finished_at IS NULL)
ORDER BY s.used_at, s.size DESC, s.id
LIMIT :limit;

-- name: unused_snapshots
-- Which of these locked snapshots were not used for a while and are not the base of an unfinished job: a submit by SQL
-- does not record a use. Uses specs_base.
SELECT s.id
FROM snapshots AS s
WHERE s.id IN (SELECT value FROM json_each(:ids))
  AND s.used_at <= clock() - CAST(:grace * 1000000 AS INTEGER)
  AND NOT EXISTS (
    SELECT 1 FROM specs AS p CROSS JOIN jobs AS j ON j.id = p.id
    WHERE p.tenant = s.tenant AND p.spec ->> '$.base' = +s.id AND j.finished_at IS NULL);

-- name: stored_folders
-- Which of these folders have a row. Uses snapshots_folder.
SELECT s.folder
FROM snapshots AS s
WHERE s.folder IN (SELECT value FROM json_each(:folders));
