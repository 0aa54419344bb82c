"""The gauges of a soak: each reads one value of the installation and adds it to the samples."""

import os
from pathlib import Path

from holdfast.store.store import sqlite_path
from torture import samples as panels
from torture.final_state import Rows, fetch
from torture.installation import Installation
from torture.processes import children, family, proportional
from torture.samples import Samples
from torture.simulated_operator import LIVE

FAILED = "SELECT count(*) AS n FROM {schema}jobs WHERE status IN ('failed', 'timed_out', 'cancelled')"
ON_POSTGRES = """
SELECT relname AS name, n_dead_tup AS dead, pg_table_size(relid) AS size, pg_indexes_size(relid) AS indexes
FROM pg_stat_user_tables WHERE schemaname = 'holdfast' ORDER BY relname
"""
ON_SQLITE = "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite%' ORDER BY name"
CONNECTIONS = "SELECT count(*) AS n FROM pg_stat_activity WHERE backend_type = 'client backend'"


async def read(installation: Installation, samples: Samples) -> None:
    """Read every gauge once."""
    _read_processes(installation, samples)
    live, failed = await fetch(installation.url, LIVE, FAILED)
    samples.add(panels.LIVE, "jobs", live[0]["n"])
    samples.add(panels.FAILED, "jobs", failed[0]["n"])
    if installation.postgres is None:
        _read_files(sqlite_path(installation.url), samples)
    else:
        _read_postgres(installation.postgres.pid, samples)
    await read_tables(installation.url, samples)


async def live(url: str) -> int:
    """How many jobs have not ended."""
    ((row,),) = await fetch(url, LIVE)
    return int(row["n"])


async def read_tables(url: str, samples: Samples) -> None:
    """Every table: its rows, counted; on Postgres also the dead ones, its size, and that of its indexes."""
    if url.startswith("sqlite"):
        (tables,) = await fetch(url, ON_SQLITE)
    else:
        tables, connections = await fetch(url, ON_POSTGRES, CONNECTIONS)
        samples.add(panels.CONNECTIONS, "connections", connections[0]["n"])
        _read_sizes(tables, samples)
    names = [row["name"] for row in tables]
    counts = await fetch(url, *(f"SELECT count(*) AS n FROM {{schema}}{name}" for name in names))
    for name, (row,) in zip(names, counts, strict=True):
        samples.add(panels.ROWS, name, row["n"])


def _read_sizes(tables: Rows, samples: Samples) -> None:
    for row in tables:
        samples.add(panels.DEAD, row["name"], row["dead"])
        samples.add(panels.TABLES, row["name"], row["size"] / 1e6)
        samples.add(panels.INDEXES, row["name"], row["indexes"] / 1e6)


def _read_files(path: Path, samples: Samples) -> None:
    for file in (path, path.with_name(f"{path.name}-wal")):
        samples.add(panels.DATABASE, file.name, file.stat().st_size / 1e6 if file.exists() else 0.0)


def _read_processes(installation: Installation, samples: Samples) -> None:
    for part in installation.parts.values():
        samples.add(panels.MEMORY, part.name, _memory(part.pid))
        samples.add(panels.FILES, part.name, len(os.listdir(f"/proc/{part.pid}/fd")))
    samples.add(panels.SUPERVISORS, "supervisors", sum(child.supervisor for child in children(installation.folder)))


def _read_postgres(postmaster: int, samples: Samples) -> None:
    """The memory of all its processes. What they share, most of all its buffers, is in `all` once."""
    found = [proportional(pid) for pid in family(postmaster)]
    samples.add(panels.POSTGRES, "all", sum(memory.all for memory in found) / 1e6)
    samples.add(panels.POSTGRES, "not shared buffers or files", sum(memory.anonymous for memory in found) / 1e6)


def _memory(pid: int) -> float:
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
