"""Pipelines: what a task's result depends on, whether a snapshot of it exists, and the folders of snapshots.

    sources.py    reads the files that tasks name: SQL with its includes, declared files
    identity.py   components of a task, their hash, the id of its snapshot; how a task differs from known snapshots
    plan.py       makes the plan of a pipeline: one identity per task, chained
    outputs.py    files that tasks left in `output/`, listed and copied by a manifest
    copying.py    copies a folder: as a subvolume, by reflink, or plainly
    snapshots.py  the folders of all snapshots: publish, verify, restore, sweep
    throwaway.py  a temporary Postgres server on a copy of a snapshot
    connectors/   how tasks run, and when the workspace is safe to copy: files, postgres

Nothing here knows databases, leases or workers: the caller writes the row of a snapshot.
"""
