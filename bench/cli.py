"""The command line: how long a person waits for help, for a list out of a million jobs, and for the first job of all.

Run by `make bench`. HOLDFAST_BENCH_SCALE makes the million smaller (0.1) for a quick look. The first job is timed from
a clean clone, with everything that `make up` does, packages among it.
"""

import asyncio
import os
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import httpx
from tests.support.bulk_data import ENDED, FAILED, QUEUED, fill_sqlite
from tests.support.cluster import cluster
from tests.support.ports import free_port
from tests.support.service import service_process_on

from bench.figures import HEAD, Figure
from bench.scale import database, filled, scaled
from holdfast.model import new_id
from holdfast.store.migrate import migrate
from holdfast.store.store import connect

ROOT = Path(__file__).parents[1]
PROGRAM = Path(sys.executable).with_name("holdfast")
ROUNDS = 7
OURS = {"tenant": "'default'"}
MILLION = [
    (scaled(5000), {**FAILED, **OURS}),
    (scaled(990_000), {**ENDED, **OURS}),
    (scaled(5000), {**QUEUED, **OURS, "queue": "'nobodys'"}),
]
"""The failed ones are the oldest: a search that walks back from now passes all others."""
LISTS = (
    "ls",
    "ls --status failed",
    "ls --status running",
    "ls --status queued",
    "ls --status succeeded",
    "ls --queue nobodys",
    "ls --queue none",
    "ls --kind run",
    "ls --kind none",
    "ls --lane none",
    "ls --label team=none",
    "ls --status failed --kind run",
    "ls --kind run --queue none",
    "--tenant nobody ls",
)
WANTED = 300.0
HELP = 150.0
FOUND = 500.0
ANSWERED = 50.0


def milliseconds(*arguments: str, **env: str) -> float:
    """The median time of a command."""
    times = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        done = subprocess.run([PROGRAM, *arguments], env={**os.environ, **env}, capture_output=True, check=False)
        times.append((time.perf_counter() - began) * 1000)
        assert done.returncode == 0, done.stderr.decode()
    return statistics.median(times)


def answering(client: httpx.Client) -> float:
    """The median time of the server's own part, and the database's, of a list."""
    times = []
    for _ in range(10 * ROUNDS):
        began = time.perf_counter()
        client.get("/v1/jobs", params={"limit": 20}).raise_for_status()
        times.append((time.perf_counter() - began) * 1000)
    return statistics.median(times)


def lists(where: str, url: str, data: Path) -> Iterator[Figure]:
    with service_process_on(url, data) as service:
        env = {"HOLDFAST_URL": service.url, "HOLDFAST_DATA_DIR": str(data)}
        with httpx.Client(base_url=service.url, headers={"Authorization": f"Bearer {service.admin}"}) as client:
            yield Figure(f"{where}: GET /v1/jobs?limit=20, a million jobs", answering(client), ANSWERED, unit=" ms")
            oldest = client.get("/v1/jobs", params={"status": "failed", "limit": 1}).json()["items"][0]["id"]
        for name in LISTS:
            took = milliseconds(*name.split(), **env)
            yield Figure(f"{where}: holdfast {name}, a million jobs", took, WANTED, unit=" ms")
        for part in (oldest, oldest[-12:]):
            took = milliseconds("show", part, **env)
            yield Figure(f"{where}: holdfast show, {len(part)} characters of an id", took, FOUND, unit=" ms")


async def on_sqlite(folder: Path) -> list[Figure]:
    file = folder / "million.db"
    opened = await connect(f"sqlite:///{file}")
    await migrate(opened)
    await opened.close()
    with closing(sqlite3.connect(file, isolation_level=None)) as connection:
        fill_sqlite(connection, new_id, MILLION)
    return await asyncio.to_thread(lambda: list(lists("SQLite", f"sqlite:///{file}", folder / "sqlite")))


async def on_postgres(folder: Path) -> list[Figure]:
    with cluster(("fsync=on",)) as server:
        async with database(server, "million") as (url, _):
            await filled(url, MILLION)
            return await asyncio.to_thread(lambda: list(lists("Postgres", url, folder / "postgres")))


@contextmanager
def started(*command: str | Path, cwd: Path, **env: str) -> Iterator[None]:
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env={**os.environ, **env},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield
    finally:
        os.killpg(process.pid, signal.SIGINT)
        process.wait(60)


def first_job(folder: Path) -> Figure:
    """From `git clone` to the end of the first job."""
    clone, port = folder / "clone", str(free_port())
    env = {"HOLDFAST_PORT": port, "HOLDFAST_URL": f"http://127.0.0.1:{port}"}
    began = time.perf_counter()
    subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
    with started("make", "--silent", "up", cwd=clone, **env):
        while True:
            program = clone / ".venv" / "bin" / "holdfast"
            found = subprocess.run(
                [program, "run", "--", "true"] if program.exists() else ["false"],
                cwd=clone, env={**os.environ, **env}, capture_output=True, check=False,
            )  # fmt: skip
            if found.returncode == 0:
                break
            time.sleep(0.1)  # Reason: the command's exit code is the signal; this only spaces the questions.
    took = time.perf_counter() - began
    return Figure("make up: from git clone to the end of the first job", took, 120.0, unit=" s")


async def main() -> None:
    print(HEAD)
    figures = [Figure("holdfast --help", milliseconds("--help"), HELP, unit=" ms")]
    print(figures[0])
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as name:
        folder = Path(name)
        for part in (on_sqlite(folder), on_postgres(folder)):
            for figure in await part:
                print(figure, flush=True)
                figures.append(figure)
        figures.append(await asyncio.to_thread(first_job, folder))
        print(figures[-1])
    sys.exit(not all(figure.good for figure in figures))


if __name__ == "__main__":
    asyncio.run(main())
