"""oban-py (Python), without the paid Pro package."""

from bench.peers.peer import Crowd, Keeper, Peer, Record, Runtime

COMPLETED = "SELECT count(*) FROM oban_jobs WHERE state = 'completed'"

PEER = Peer(
    name="oban-py",
    runtime=Runtime.NEWER_PYTHON,
    keeper=Keeper.POSTGRES,
    program="oban",
    packages=("oban", "psycopg", "uvloop"),
    configuration=(
        "uvloop, a limit of 100, a pool of 10; without the paid Pro package, which has batched writes. "
        "Bulk: `enqueue_many` of 10,000; single: `enqueue`."
    ),
    keeps="the job; no result",
    ended=COMPLETED + " AND id > {mark}",
    mark="SELECT max(id) FROM oban_jobs",
    records=(Record("jobs that completed", COMPLETED),),
    crowd=Crowd("oban_jobs", "id", "nextval(pg_get_serial_sequence('oban_jobs', 'id'))"),
    share=0.25,
)
