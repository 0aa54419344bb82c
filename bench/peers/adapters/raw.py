"""Plain SQL, as a yardstick: not a queue that anyone should run."""

from bench.peers.peer import Keeper, Peer, Record, Runtime

DONE = "SELECT count(*) FROM raw_jobs WHERE status = 'done'"

PEER = Peer(
    name="plain SQL",
    runtime=Runtime.OURS,
    keeper=Keeper.POSTGRES,
    program="raw",
    packages=("asyncpg", "uvloop"),
    configuration=(
        "one table of three columns, claim 100 and complete 100 over one connection, "
        "INSERT and NOTIFY in one statement; no attempts, events, leases or results: the yardstick."
    ),
    keeps="the row",
    ended=DONE + " AND id > {mark}",
    mark="SELECT max(id) FROM raw_jobs",
    records=(Record("rows", DONE),),
    no_crowd="has no future jobs",
    reference=True,
)
