"""A job that fills the disk: the installation still answers, cancels and deletes, and recovers by itself."""

import contextlib
import glob
import os
import signal
import sqlite3
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import pytest

from holdfast.model import Status
from holdfast.store import Store
from holdfast.store.migrate import migrate
from holdfast.store.store import connect
from tests.support import disks
from tests.support.disks import MIB
from tests.support.in_process_workers import InProcessWorkers, eventually
from tests.support.service import Service, error_of, service_in_process
from tests.support.worker_processes import worker_processes_on

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a filesystem")

SIZE = 96 * MIB
RESERVE = 8 * MIB
HOG = """
trap '' TERM
n=0
while :; do
  n=$((n + 1))
  cat /dev/zero >> fill 2>/dev/null
  echo $n > full
  cat /dev/zero > more 2>/dev/null
done
"""
"""Takes every byte that becomes free, and ignores the polite signal."""


CUT_OFF = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = $1 AND pid <> pg_backend_pid()"


@contextmanager
def small_disk(folder: Path, kind: str) -> Iterator[Path]:
    """A real filesystem of 96 MiB; unmounted however the test ends, and nothing that works there is left."""
    if kind != "tmpfs" and (why := disks.missing(kind)) is not None:
        pytest.skip(why)
    with (
        disks.tmpfs(folder / "tmpfs", f"size={SIZE}") if kind == "tmpfs" else disks.disk(folder, kind, SIZE) as mounted
    ):
        try:
            yield mounted
        finally:
            kill_users(mounted)


def kill_users(mounted: Path) -> None:
    """Kill what a failed test left on its filesystem: the supervisor of an attempt there first, then what it ran."""
    while pids := users(mounted):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)  # Reason: a killed process that is not ours to wait for needs a moment.


def users(mounted: Path) -> list[int]:
    found = {True: list[int](), False: list[int]()}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            supervisor = f"supervisor\0{mounted}/".encode() in (entry / "cmdline").read_bytes()
            if supervisor or str((entry / "cwd").readlink()).startswith(f"{mounted}/"):
                found[supervisor].append(int(entry.name))
    return found[True] + found[False]


def fill(small: Path) -> None:
    """Take every block that is left, also those that come back when what was written is given its place."""
    for n, size in enumerate((MIB, 4096, 4096)):
        with (small / f"fill.{n}").open("wb", 0) as file:
            with contextlib.suppress(OSError):
                while True:
                    file.write(b"x" * size)
            os.fsync(file.fileno())


def free(path: Path) -> int:
    about = os.statvfs(path)
    return about.f_bavail * about.f_frsize


@pytest.fixture(params=["ext4", "tmpfs"])
def small(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path, str(request.param)) as mounted:
        yield mounted


@asynccontextmanager
async def in_process_workers_on(url: str, folder: Path, **settings: Any) -> AsyncIterator[InProcessWorkers]:
    async with Store(await connect(url)) as store:
        workers = InProcessWorkers(url, folder, store)
        workers.set(shared_dir=folder / "shared", disk_reserve=RESERVE, stop_grace=0.5, **settings)
        yield workers


async def migrated(path: Path) -> str:
    url = f"sqlite:///{path}"
    database = await connect(url)
    await migrate(database)
    await database.close()
    return url


async def hogged(workers: InProcessWorkers, small: Path, **fields: Any) -> str:
    """Start the hog, and wait until it has met the end of the disk."""
    job = await workers.sh(HOG, stop_grace=0.5, **fields)
    await workers.running(job)

    async def full() -> bool:
        return bool(glob.glob(f"{small}/**/attempts/*/{job.id}.1/work/full", recursive=True))

    await eventually(full, "the disk is full")
    return job.id


async def ready(client: httpx.AsyncClient, status: int) -> httpx.Response:
    async def look() -> httpx.Response | None:
        response = await client.get("/readyz")
        return response if response.status_code == status else None

    return await eventually(look, f"/readyz answers {status}")


def submission(script: str) -> dict[str, Any]:
    return {"runner": "process", "spec": {"command": ["sh", "-c", script]}}


@asynccontextmanager
async def everything_on(small: Path) -> AsyncIterator[tuple[InProcessWorkers, Service]]:
    """Database, state and shared folder on the small disk, a server and a store on them."""
    url = await migrated(small / "store.db")
    async with in_process_workers_on(url, small / "data") as workers:
        settings = {"shared_dir": workers.settings.shared, "disk_reserve": RESERVE, "docker_host": None}
        async with service_in_process(url, small / "data", **settings) as service:
            yield workers, service


async def test_cancel_works_on_a_full_disk_and_the_installation_recovers(small: Path) -> None:
    """SQLite, state and shared folder on the disk that a job fills."""
    async with everything_on(small) as (workers, service), service.client() as client:
        before = (await client.post("/v1/jobs", json=submission("echo before"))).json()["id"]
        async with workers.worker():
            await workers.ended(before, Status.SUCCEEDED)
            hog = await hogged(workers, small)
            refused = await ready(client, 503)
            assert error_of(refused)["code"] == "not_ready"
            assert "HOLDFAST_DISK_RESERVE" in error_of(refused)["message"]
            answer = await client.post("/v1/jobs", json=submission("echo during"))
            assert (answer.status_code, error_of(answer)["code"]) == (507, "disk_full")
            assert "HOLDFAST_DISK_RESERVE" in error_of(answer)["message"]
            stopped = await client.post(f"/v1/jobs/{hog}/cancel", json={})
            assert stopped.status_code in (200, 202), stopped.text
            ended = await workers.ended(hog, Status.CANCELLED)
            assert ended.attempts == 1
            await ready(client, 200)
            after = await client.post("/v1/jobs", json=submission("echo after"))
            assert after.status_code == 201
            await workers.ended(after.json()["id"], Status.SUCCEEDED)
        assert await workers.log(before) == ["before"]
        assert await workers.log(after.json()["id"]) == ["after"]


async def test_delete_with_force_makes_room_on_a_full_disk(small: Path) -> None:
    async with everything_on(small) as (workers, service), service.client() as client, workers.worker():
        hog = await hogged(workers, small)
        answer = await client.delete(f"/v1/jobs/{hog}", params={"force": "true"})
        assert answer.status_code in (200, 202), answer.text

        async def gone() -> bool:
            return (await client.get(f"/v1/jobs/{hog}")).status_code == 404

        await eventually(gone, "the job is deleted")

        async def room() -> bool:
            return free(small) > SIZE // 2

        await eventually(room, "there is room again")
        await ready(client, 200)
        after = (await client.post("/v1/jobs", json=submission("echo after"))).json()["id"]
        await workers.ended(after, Status.SUCCEEDED)


async def test_jobs_that_wait_start_once_there_is_room_and_run_once(small: Path) -> None:
    """Nothing is lost and nothing runs twice: what was submitted before waits, and what ran beside the hog ends."""
    async with everything_on(small) as (workers, service), service.client() as client:
        marker = small.parent / "ran"
        async with workers.worker(queues={"default": 3}):
            script = f"echo beside >> {marker}; while [ ! -e {marker}.go ]; do sleep 0.05; done; echo end"
            beside = await workers.sh(script)
            await workers.running(beside)
            hog = await hogged(workers, small)
            waiting = await workers.sh(f"echo waiting >> {marker}")
            (small.parent / "ran.go").touch()
            await ready(client, 503)
            assert (await client.delete(f"/v1/jobs/{hog}", params={"force": "true"})).status_code in (200, 202)
            for job in (beside, waiting):
                assert (await workers.ended(job, Status.SUCCEEDED)).attempts == 1
        assert sorted(marker.read_text().split()) == ["beside", "waiting"]


async def test_a_worker_killed_on_the_full_disk_is_replaced_and_the_hog_can_be_cancelled(
    small: Path, tmp_path: Path
) -> None:
    """kill -9 of the worker while the disk is full: the next one starts on the full disk, adopts, and cancels."""
    url = await migrated(small / "store.db")
    (small / "data").mkdir()
    async with worker_processes_on(url, small / "data") as processes:
        setting = {"HOLDFAST_DISK_RESERVE": str(RESERVE)}
        first = processes.start({"default": 2}, environment=setting)
        hog = await hogged(processes, small)
        first.signal(9)
        await first.dead()
        processes.start({"default": 2}, environment=setting)
        await processes.store.jobs.cancel(hog)
        ended = await processes.ended(hog, Status.CANCELLED)
        assert ended.attempts == 1

        async def room() -> bool:
            return free(small) > SIZE // 2

        await eventually(room, "there is room again")


async def test_a_database_opens_on_a_full_disk_and_a_job_can_be_deleted(small: Path) -> None:
    """Nobody has it open when the disk fills, so its log is gone: what was set aside for opening it is given up."""
    url = await migrated(small / "store.db")
    async with in_process_workers_on(url, small / "data") as workers, workers.worker():
        job = await workers.sh("head -c 20000000 /dev/zero > output/large")
        await workers.ended(job, Status.SUCCEEDED)
    assert (small / "store.db-room").exists()
    fill(small)
    with pytest.raises(OSError, match="No space"):
        (small / "more").write_bytes(b"x" * 65536)
    settings = {"shared_dir": small / "data" / "shared", "disk_reserve": RESERVE, "docker_host": None}
    async with service_in_process(url, small / "data", **settings) as service, service.client() as client:
        await ready(client, 503)
        deleted = await client.delete(f"/v1/jobs/{job.id}", params={"force": "true"})
        assert deleted.status_code in (200, 202), deleted.text
        await ready(client, 200)


async def test_only_the_workers_disk_is_full(process_database: str, kind: str, tmp_path: Path, clean_url: str) -> None:
    """The database is elsewhere: jobs are accepted and wait, and the hog can be cancelled. Both stores."""
    with small_disk(tmp_path, "ext4") as small:
        async with in_process_workers_on(clean_url, small / "data") as workers, workers.worker():
            hog = await hogged(workers, small)

            async def noticed() -> bool:
                return any(worker.away for worker in await workers.store.workers.list())

            await eventually(noticed, "the worker says that it starts no jobs")
            waiting = await workers.sh("echo waited")

            async def explained() -> bool:
                why = await workers.store.explain.job(waiting.id)
                return any("HOLDFAST_DISK_RESERVE" in reason.message for reason in why.reasons)

            await eventually(explained, "explain names the full disk")
            await workers.store.jobs.cancel(hog)
            await workers.ended(hog, Status.CANCELLED)
            await workers.ended(waiting, Status.SUCCEEDED)


@pytest.mark.parametrize("code", [0, 3])
async def test_outputs_that_find_no_room_are_given_up_after_a_bound(clean_url: str, tmp_path: Path, code: int) -> None:
    """A success becomes a failure; a failure stays the one that it was."""
    with small_disk(tmp_path, "tmpfs") as small:
        async with in_process_workers_on(clean_url, tmp_path / "data", outputs_timeout=2.0) as workers:
            workers.set(shared_dir=small)
            job = await workers.sh(
                f"while [ ! -e go ]; do sleep 0.05; done; head -c 1000000 /dev/zero > output/file; exit {code}"
            )
            async with workers.worker():
                await workers.running(job)
                fill(small)
                (folder,) = workers.folders
                (folder / "work" / "go").touch()
                ended = await workers.ended(job, Status.FAILED)
            assert ended.error is not None
            assert ended.error.code == ("exit_nonzero" if code else "outputs_not_stored")
            assert ("HOLDFAST_OUTPUTS_TIMEOUT" in ended.error.message) is (not code)
            assert ended.attempts == 1


async def test_uploads_are_refused_below_the_reserve(clean_url: str, tmp_path: Path) -> None:
    with small_disk(tmp_path, "tmpfs") as small:
        settings = {"shared_dir": small, "disk_reserve": RESERVE, "docker_host": None}
        async with service_in_process(clean_url, tmp_path / "data", **settings) as service, service.client() as client:
            fine = await client.post("/v1/uploads", files={"a.txt": b"small"})
            assert fine.status_code == 201, fine.text
            with (small / "fill").open("wb", 0) as file:
                for _ in range((SIZE - RESERVE // 2) // MIB):
                    file.write(b"x" * MIB)

            async def refused() -> bool:
                answer = await client.post("/v1/uploads", files={"a.txt": b"small"})
                return answer.status_code == 507 and error_of(answer)["code"] == "disk_full"

            await eventually(refused, "uploads are refused")
            (small / "fill").unlink()

            async def accepted() -> bool:
                return (await client.post("/v1/uploads", files={"a.txt": b"small"})).status_code == 201

            await eventually(accepted, "uploads are accepted again")


async def test_readyz_tests_a_write(clean_url: str, kind: str, tmp_path: Path) -> None:
    """A database that answers reads and accepts no writes is not ready; many probes cost one write."""
    async with (
        service_in_process(clean_url, tmp_path / "data", docker_host=None) as service,
        service.client() as client,
    ):
        await ready(client, 200)
        async with writes_refused(clean_url, kind):

            async def refused() -> bool:
                answer = await client.get("/readyz")
                return answer.status_code == 503 and "accepts no writes" in error_of(answer)["message"]

            await eventually(refused, "/readyz says that no write is taken")
        await ready(client, 200)


@asynccontextmanager
async def writes_refused(url: str, kind: str) -> AsyncIterator[None]:
    """Make the database refuse writes, and only them."""
    if kind == "sqlite":
        connection = sqlite3.connect(url.removeprefix("sqlite:///"))
        text = "CREATE TRIGGER refuse BEFORE UPDATE ON installation BEGIN SELECT RAISE(ABORT, 'disk trouble'); END"
        connection.execute(text)
        connection.commit()
        try:
            yield
        finally:
            connection.execute("DROP TRIGGER refuse")
            connection.commit()
            connection.close()
        return
    admin = await asyncpg.connect(url)
    name = await admin.fetchval("SELECT current_database()")
    await admin.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
    await admin.execute(CUT_OFF, name)
    try:
        yield
    finally:
        await admin.execute("SET default_transaction_read_only = off")
        await admin.execute(f"ALTER DATABASE {name} RESET default_transaction_read_only")
        await admin.execute(CUT_OFF, name)
        await admin.close()
