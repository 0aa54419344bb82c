"""awa (Rust core, Python package)."""

from bench.peers.peer import Crowd, Keeper, Peer, Record, Runtime

COMPLETED = (
    "SELECT (SELECT count(*) FROM awa.terminal_jobs WHERE state = 'completed')"
    " + (SELECT coalesce(sum(pruned_completed_count), 0) FROM awa.queue_terminal_rollups)"
)

PEER = Peer(
    name="awa",
    runtime=Runtime.PYTHON,
    keeper=Keeper.POSTGRES,
    program="awa",
    packages=("awa-pg",),
    configuration=(
        "200 jobs at once, its default storage (`queue_storage`). "
        "Bulk: `enqueue_many_copy` of 10,000; single: `insert`."
    ),
    keeps="a counter per queue; the rows go when their partition is rotated out, seconds later",
    ended=COMPLETED,
    records=(Record("jobs that completed, as rows or in the counter", COMPLETED),),
    crowd=Crowd("awa.deferred_jobs", "job_id", "9223372036854775807 - g.n"),
    share=0.5,
)
