-- Queues: what an operator set for a named line of jobs.

-- name: set_queue_paused
INSERT INTO queues (queue, paused, updated_at)
VALUES (:queue, :paused, clock())
ON CONFLICT (queue) DO UPDATE SET paused = excluded.paused, updated_at = excluded.updated_at;

-- name: list_queues
SELECT q.queue, q.paused, q.updated_at FROM queues AS q ORDER BY q.queue;
