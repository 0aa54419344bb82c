-- The tasks of pipelines. A writer has locked the job and checked its own lease.

-- name: list_tasks
SELECT t.n, t.name, t.status, t.cached, t.parent, t.snapshot, t.started_at, t.ended_at, t.exit_code
FROM holdfast.tasks AS t
WHERE t.job_id = :id::uuid
ORDER BY t.n;

-- name: tasks_of_jobs
-- The tasks of the jobs of a list. Uses the primary key.
SELECT t.job_id, t.n, t.name, t.status, t.cached, t.parent, t.snapshot, t.started_at, t.ended_at, t.exit_code
FROM holdfast.tasks AS t
WHERE t.job_id IN (SELECT e::uuid FROM json_array_elements_text(:ids::json) AS e)
ORDER BY t.job_id, t.n;

-- name: delete_tasks
DELETE FROM holdfast.tasks AS t WHERE t.job_id = :id::uuid;

-- name: insert_tasks
-- A kept result keeps its times; a cached task ended when the cache hit was found.
INSERT INTO holdfast.tasks (job_id, n, name, status, cached, parent, snapshot, started_at, ended_at, exit_code)
SELECT r.job_id, r.n, r.name, r.status, r.cached, r.parent, r.snapshot, r.started_at,
  CASE WHEN r.cached THEN coalesce(r.ended_at, holdfast.clock()) ELSE r.ended_at END, r.exit_code
FROM :rows AS r(job_id uuid, n integer, name text, status text, cached bool, parent text, snapshot text,
  started_at timestamptz, ended_at timestamptz, exit_code integer);
-- sqlite
-- each: rows
INSERT INTO tasks (job_id, n, name, status, cached, parent, snapshot, started_at, ended_at, exit_code)
VALUES (:job_id, :n, :name, :status, :cached, :parent, :snapshot, :started_at,
  CASE WHEN :cached THEN coalesce(:ended_at, clock()) ELSE :ended_at END, :exit_code);

-- name: write_task
-- Set the status of a task; no row: it has that status already, or does not exist. It ended :ago seconds ago.
UPDATE holdfast.tasks AS t
SET status = :status::text,
    cached = :cached::boolean,
    started_at = CASE
      WHEN :status::text = 'pending' OR :cached::boolean THEN NULL
      ELSE coalesce(CASE WHEN :status::text <> 'running' THEN t.started_at END, holdfast.clock())
    END,
    ended_at = CASE WHEN :status::text NOT IN ('pending', 'running')
      THEN greatest(coalesce(t.started_at, holdfast.clock()), holdfast.clock() - make_interval(secs => :ago::float8)) END,
    exit_code = :exit_code::integer
WHERE t.job_id = :id::uuid
  AND t.n = :n::integer
  AND t.status <> :status::text
RETURNING t.name, t.snapshot;
