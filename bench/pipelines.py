"""Pipelines with a real Postgres: what a known result saves, what a snapshot costs, how soon one is open.

HOLDFAST_BENCH_SCALE is pgbench's: 68 makes a data folder of about 1 GB.
"""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from bench.figures import HEAD, Figure
from bench.installation import Installation, on_sqlite
from holdfast.model import Snapshot
from holdfast.pipeline.connectors.postgres import programs
from holdfast.pipeline.snapshots import SnapshotFolders
from holdfast.pipeline.sources import inputs_of
from holdfast.pipeline.throwaway import serving, throwaway
from holdfast.runner.attempt_users import AttemptUsers
from holdfast.runner.users import find_user

SCALE = int(os.environ.get("HOLDFAST_BENCH_SCALE", "68"))
ROUNDS, COPIES = 3, 5
USER = "postgres"
STEPS = {
    "schema": "CREATE TABLE item (id integer PRIMARY KEY, text text);",
    "seed": "INSERT INTO item SELECT n, md5(n::text) FROM generate_series(1, 200000) AS n;",
    "index": "CREATE INDEX ON item (text);",
    "migrate": "ALTER TABLE item ADD COLUMN size integer; UPDATE item SET size = length(text);",
    "settle": "VACUUM ANALYZE;",
}


async def run(site: Installation, *tasks: dict[str, Any], snapshot: str = "always") -> tuple[float, int]:
    """Run a pipeline; return the seconds from its claim to its end, as its record tells them, and its attempts."""
    asked = {"runner": "process", "connector": "postgres", "snapshot": snapshot, "tasks": list(tasks), "timeout": 3600}
    job = await site.store.jobs.submit(asked)
    while not job.status.terminal:
        await asyncio.sleep(0.01)
        job = await site.store.jobs.get(job.id)
    if job.error is not None or job.started_at is None or job.finished_at is None:
        raise RuntimeError(f"the pipeline failed: {job.error}")
    return (job.finished_at - job.started_at).total_seconds(), job.attempts


@contextmanager
def clock(seconds: list[float]) -> Iterator[None]:
    started = time.monotonic()
    yield
    seconds.append(time.monotonic() - started)


def sh(script: str, *arguments: str | Path) -> None:
    subprocess.run(["sh", "-ec", script, "sh", *map(str, arguments)], check=True, stdout=subprocess.DEVNULL)


async def twice(site: Installation) -> list[Figure]:
    inputs = inputs_of(site.folder / "shared", "default")
    inputs.mkdir(parents=True, exist_ok=True)
    for name, sql in STEPS.items():
        (inputs / f"{name}.sql").write_text(sql)
    tasks = [{"name": name, "sql": f"{name}.sql"} for name in STEPS]
    first, _ = await run(site, *tasks)
    second, starts = await run(site, *tasks)
    return [
        Figure("5 tasks, first run: seconds", first, None),
        Figure("5 tasks, second run: starts", starts, 0),
        Figure("5 tasks, second run: share of the first one's time", second / first, 0.05),
    ]


async def copies(site: Installation, snapshot: Snapshot) -> list[Figure]:
    """A snapshot of a quiet data folder, which ends on the disk, beside `cp` of the same, which ends in memory.

    In turns; the server's stop and start before and after it are part of what a task's snapshot takes.
    """
    folders = SnapshotFolders.below(site.folder / "shared")
    tree, copy, socket = site.folder / "tree", site.folder / "copy", Path(f"/tmp/hf-bench-{os.getpid()}")
    folders.restore(snapshot.folder, snapshot.digest, tree)
    whole: list[float] = []
    ours: list[float] = []
    plain: list[float] = []
    durable: list[float] = []
    starts: list[float] = []
    stops: list[float] = []
    flushes: list[float] = []
    for _ in range(COPIES):
        sh("sync")
        with clock(durable):
            with clock(plain):
                sh("cp --reflink=auto -a $1 $2", tree, copy)
            with clock(flushes):
                sh("sync -f $1", copy)
        sh("rm -rf $1", copy)
        with ExitStack() as server:
            server.enter_context(serving(tree, socket, site.folder / "log"))
            sh("sync")
            with clock(whole):
                with clock(stops):
                    server.close()
                with clock(ours):
                    made = folders.copy("0" * 64, tree)
                with clock(starts):
                    server.enter_context(serving(tree, socket, site.folder / "log"))
        folders.remove(made.folder)
    sh("rm -rf $1", socket)
    size = snapshot.size / 1e9
    return [
        Figure(f"fast stop, snapshot of {size:.2f} GB, start: seconds", min(whole), None, reference=min(plain)),
        Figure("… ratio to `cp --reflink=auto -a` alone, which leaves it in memory", min(whole) / min(plain), 1.5),
        Figure("… ratio to `cp --reflink=auto -a` and sync of the same folder", min(whole) / min(durable), 1.5),
        Figure("… the snapshot alone: seconds", min(ours), None, reference=min(durable)),
        Figure("… fast stop of Postgres itself: seconds", min(stops), None),
        Figure("… start of Postgres itself: seconds", min(starts), None),
        Figure(f"the disk itself: {size:.2f} GB that `cp` left in memory, synced: seconds", min(flushes), None),
    ]


async def opens(site: Installation, snapshot: Snapshot) -> list[Figure]:
    """How soon a snapshot is open, beside `pg_restore` of the same data."""
    folders = SnapshotFolders.below(site.folder / "shared")
    runs, dump = site.folder / "runs", site.folder / "dump"
    users = AttemptUsers(find_user("postgres") if os.geteuid() == 0 else None, None, runs)
    seconds: list[float] = []
    again: list[float] = []
    with throwaway(folders, snapshot.id, snapshot.folder, snapshot.digest, runs, users) as server:
        sh(f"{programs()}/pg_dump -Fc -Z0 -f $1 -d $2", dump, server.dsn)
    for _ in range(ROUNDS):
        with ExitStack() as held:
            with clock(seconds):
                server = held.enter_context(
                    throwaway(folders, snapshot.id, snapshot.folder, snapshot.digest, runs, users)
                )
            sh(f"{programs()}/psql -X -d $1 -c 'CREATE DATABASE again'", server.dsn)
            with clock(again):
                sh(f"{programs()}/pg_restore -h $1 -U postgres -d again $2", server.env["PGHOST"], dump)
    return [
        Figure(
            f"{snapshot.size / 1e9:.2f} GB restored to an open DSN: seconds", min(seconds), None, reference=min(again)
        ),
        Figure("… ratio to pg_restore of the same data into a server that runs", min(seconds) / min(again), None),
    ]


async def main() -> int:
    figures: list[Figure] = []
    async with on_sqlite() as site:
        site.folder.chmod(0o711)
        user = USER if os.geteuid() == 0 else "root"
        with site.worker(1, process_user=user):
            figures += await twice(site)
            fill = [f"{programs()}/pgbench", "-i", "-q", "-s", str(SCALE)]
            await run(site, {"name": "fill", "command": fill}, snapshot="final")
        page = await site.store.snapshots.list(tenant="default")
        snapshot = page.items[0]
        figures += await copies(site, snapshot)
        figures += await opens(site, snapshot)
    print(HEAD)
    for figure in figures:
        print(figure)
    return 0 if all(figure.good for figure in figures) else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
