-- The tasks of pipelines. A writer has locked the job and checked its own lease.

-- name: list_tasks
SELECT t.n, t.name, t.status, t.cached, t.parent, t.snapshot, t.started_at, t.ended_at, t.exit_code
FROM tasks AS t
WHERE t.job_id = :id
ORDER BY t.n;

-- name: tasks_of_jobs
-- The tasks of the jobs of a list. Uses the primary key.
SELECT t.job_id, t.n, t.name, t.status, t.cached, t.parent, t.snapshot, t.started_at, t.ended_at, t.exit_code
FROM tasks AS t
WHERE t.job_id IN (SELECT value FROM json_each(:ids))
ORDER BY t.job_id, t.n;

-- name: delete_tasks
DELETE FROM tasks WHERE job_id = :id;

-- name: insert_tasks
-- A kept result keeps its times; a cached task ended when the cache hit was found.
-- each: rows
INSERT INTO tasks (job_id, n, name, status, cached, parent, snapshot, started_at, ended_at, exit_code)
VALUES (:job_id, :n, :name, :status, :cached, :parent, :snapshot, :started_at,
  CASE WHEN :cached THEN coalesce(:ended_at, clock()) ELSE :ended_at END, :exit_code);

-- name: write_task
-- Set the status of a task; no row: it has that status already, or does not exist. It ended :ago seconds ago.
UPDATE tasks
SET status = :status,
    cached = :cached,
    started_at = CASE
      WHEN :status = 'pending' OR :cached THEN NULL
      ELSE coalesce(CASE WHEN :status <> 'running' THEN started_at END, clock())
    END,
    ended_at = CASE WHEN :status NOT IN ('pending', 'running')
      THEN max(coalesce(started_at, clock()), clock() - CAST(:ago * 1000000 AS INTEGER)) END,
    exit_code = :exit_code
WHERE job_id = :id
  AND n = :n
  AND status <> :status
RETURNING name, snapshot;
