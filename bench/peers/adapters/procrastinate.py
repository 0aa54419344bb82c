"""Procrastinate (Python)."""

from bench.peers.peer import Crowd, Keeper, Peer, Record, Runtime


def events(kind: str) -> str:
    return f"SELECT count(*) FROM procrastinate_events WHERE type = '{kind}'"


SUCCEEDED = "SELECT count(*) FROM procrastinate_jobs WHERE status = 'succeeded'"

PEER = Peer(
    name="Procrastinate",
    runtime=Runtime.PYTHON,
    keeper=Keeper.POSTGRES,
    program="procrastinate",
    packages=("procrastinate", "psycopg"),
    configuration="100 jobs at once, a pool of 10, LISTEN/NOTIFY on. Bulk: `batch_defer` of 10,000; single: `defer`.",
    keeps="the job, and an event for the submit, the start and the end; no result",
    ended=SUCCEEDED + " AND id > {mark}",
    mark="SELECT max(id) FROM procrastinate_jobs",
    records=(
        Record("jobs that succeeded", SUCCEEDED),
        Record("events `deferred`", events("deferred")),
        Record("events `started`", events("started")),
        Record("events `succeeded`", events("succeeded")),
    ),
    crowd=Crowd(
        "procrastinate_jobs",
        "id",
        "nextval(pg_get_serial_sequence('procrastinate_jobs', 'id'))",
        then=(
            "INSERT INTO procrastinate_jobs (queue_name, task_name, lock, args, status)"
            " SELECT 'default', 'noop', 'blocked', '{{}}', 'todo' FROM generate_series(1, {count})",
            "UPDATE procrastinate_jobs SET status = 'doing'"
            " WHERE id = (SELECT min(id) FROM procrastinate_jobs WHERE lock = 'blocked')",
        ),
    ),
    lanes=True,
    share=0.1,
)
