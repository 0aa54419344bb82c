"""Huey on SQLite (Python)."""

from bench.peers.peer import Keeper, Peer, Record, Runtime

PEER = Peer(
    name="Huey (SQLite)",
    runtime=Runtime.PYTHON,
    keeper=Keeper.SQLITE,
    program="huey",
    packages=("huey",),
    configuration=(
        "a consumer with one thread that polls every 10 ms, WAL, synchronous FULL (SQLite's default), results kept. "
        "Bulk: 10,000 calls of the task, as it has no call for several; single: the task's call."
    ),
    keeps="the result, until it is read",
    ended="SELECT count(*) FROM kv",
    records=(Record("results", "SELECT count(*) FROM kv"),),
    no_crowd="its scheduler reads the future jobs from a table of their own",
    share=0.1,
    pinned=False,
)
