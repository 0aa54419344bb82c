"""pg-boss (Node)."""

from bench.peers.peer import Crowd, Keeper, Peer, Record, Runtime

COMPLETED = "SELECT count(*) FROM pgboss.job WHERE name = 'noop' AND state = 'completed'"

PEER = Peer(
    name="pg-boss",
    runtime=Runtime.NODE,
    keeper=Keeper.POSTGRES,
    program="pgboss",
    packages=("pg-boss", "pg", "node"),
    configuration=(
        "batches of 1,000 that are handled as one, no pause while they come back full (`burstWhenBatchFull`), "
        "2 workers per process, LISTEN/NOTIFY on. Bulk: `insert` of 10,000; single: `send`."
    ),
    keeps="the job; no result of a job that was handled in a batch",
    ended=COMPLETED,
    records=(Record("jobs that completed", COMPLETED),),
    crowd=Crowd("pgboss.job", "id", "gen_random_uuid()"),
)
