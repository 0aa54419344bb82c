"""Celery on Redis (Python)."""

from bench.peers.peer import Keeper, Peer, Record, Runtime

PEER = Peer(
    name="Celery (Redis)",
    runtime=Runtime.PYTHON,
    keeper=Keeper.REDIS,
    program="celery",
    packages=("celery", "kombu", "redis"),
    configuration=(
        "prefork with one child per worker, prefetch 128, results kept, no gossip, mingle or heartbeat; Redis with "
        "`appendfsync always`, so that it is as durable as the others. Tasks are acknowledged before they run, its "
        "default: a killed worker loses them. Bulk: a `group` of 10,000; single: `apply_async`."
    ),
    keeps="the result, for a day",
    ended="1 DBSIZE",
    records=(Record("results", "1 DBSIZE"),),
    no_crowd="its workers hold tasks with a future time in their memory, not the database",
    share=0.1,
    pinned=False,
)
