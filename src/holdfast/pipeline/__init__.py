"""Pipelines: what a task's result depends on, whether it is known already, and the folders that keep it.

    sources.py    the files that tasks name: SQL with its includes, declared files, by content
    identity.py   components of a task, their hash, the id of what it makes; what differs from something known
    plan.py       a pipeline and its sources become a plan: one identity per task, chained
    copying.py    how a folder is copied here: subvolume, reflink, plain
    snapshots.py  the folders of all snapshots: publish, verify, restore, sweep

Nothing here knows of databases, leases or workers: whoever publishes writes the row.
"""
