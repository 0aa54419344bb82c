"""Graphile Worker (Node)."""

from bench.peers.peer import Crowd, Keeper, Peer, Runtime

JOBS = "graphile_worker._private_jobs"

PEER = Peer(
    name="Graphile Worker",
    runtime=Runtime.NODE,
    keeper=Keeper.POSTGRES,
    program="graphile",
    packages=("graphile-worker", "pg", "node"),
    configuration=(
        "24 jobs at once, a local queue of 500 with a refetch delay of 10 ms, completions in batches "
        "(`completeJobBatchDelay: 0`), as its page on performance has it. Bulk: `addJobs` of 10,000; single: `addJob`."
    ),
    keeps="nothing: it deletes a job that succeeded",
    ended=f"SELECT count(*) FROM {JOBS} WHERE id > {{mark}}",
    ended_counts_left=True,
    mark=f"SELECT max(id) FROM {JOBS}",
    crowd=Crowd(
        JOBS,
        "id",
        f"nextval(pg_get_serial_sequence('{JOBS}', 'id'))",
        then=(
            "INSERT INTO graphile_worker._private_job_queues (queue_name, locked_at, locked_by)"
            " VALUES ('blocked', now(), 'another')",
            f"INSERT INTO {JOBS} (job_queue_id, task_id, payload) SELECT q.id, t.id, '{{{{}}}}'"
            " FROM graphile_worker._private_job_queues AS q, graphile_worker._private_tasks AS t,"
            " generate_series(1, {count}) WHERE q.queue_name = 'blocked' AND t.identifier = 'noop'",
        ),
    ),
    lanes=True,
)
