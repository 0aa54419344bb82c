"""Database outages, half-open connections, wrong clocks and dead leaders lose and duplicate nothing."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import pytest

from holdfast.errors import StoreError, StoreUnreachable
from holdfast.model import Job, Status
from holdfast.store.migrate import migrate
from holdfast.store.outage import SETTLE_SECONDS, DatabaseOutage, retry_while_starting
from holdfast.store.store import connect, open_store
from tests.support.cluster import Server
from tests.support.crashing_worker import Hook
from tests.support.in_process_workers import eventually
from tests.support.proxy import Proxy
from tests.support.service import service_process_on
from tests.support.worker_processes import TTL, WorkerProcesses, worker_processes_on
from torture import clocks

needs_faketime = pytest.mark.skipif(clocks.LIBRARY is None, reason="wants Debian's faketime")
postgres_only = pytest.mark.parametrize("kind", ["postgres"])
PATIENT: dict[str, Any] = {"lease_ttl": 15.0, "heartbeat_interval": 1.0}
"""A lease that a busy machine does not let expire by itself."""


@pytest.fixture
def own_server() -> Iterator[Server]:
    """A Postgres of this test alone, to be stopped and started."""
    server = Server()
    try:
        server.start()
        yield server
    finally:
        server.remove()


@pytest.fixture
async def own_processes(own_server: Server, tmp_path: Path) -> AsyncIterator[WorkerProcesses]:
    database = await connect(own_server.url)
    await migrate(database)
    await database.close()
    async with worker_processes_on(own_server.url, tmp_path) as processes:
        yield processes


async def load(
    processes: WorkerProcesses, commands: int, functions: int, *, pace: float, seconds: float
) -> dict[str, Job]:
    """Submit processes and functions, sync and async."""
    jobs = {f"process {n}": await processes.chatty(f"process {n}", pace=pace) for n in range(commands)}
    for n in range(functions):
        name, function = f"function {n}", ("nap", "talk")[n % 2]
        jobs[name] = await processes.submit(function, inputs={"path": processes.marker(name), "seconds": seconds})
    return jobs


async def assert_once(processes: WorkerProcesses, jobs: dict[str, Job]) -> None:
    """Assert that each job succeeded in one run, with a complete record."""
    for name, job in jobs.items():
        if name.startswith("process"):
            await processes.assert_whole(name, job)
        else:
            ended = await processes.ended(job, Status.SUCCEEDED)
            assert len(processes.marker_lines(name)) == 2, name
            assert ended.attempts == 1, name
            if ended.spec["name"] == "talk":
                assert await processes.log(job) == [f"line {n}" for n in range(ended.result)]
            await processes.assert_true(job)


async def answers_again(processes: WorkerProcesses) -> None:
    """Wait until our own store has working connections again."""

    async def look() -> bool:
        with contextlib.suppress(StoreError):
            await processes.store.jobs.list(limit=1)
            return True
        return False

    for _ in range(4):
        await eventually(look, "the database answers")


async def test_postgres_restarts_under_load_lose_and_duplicate_nothing(
    own_processes: WorkerProcesses, own_server: Server
) -> None:
    """Proves L16, L7. Five restarts, alternating between orderly and crash."""
    processes = own_processes
    jobs = await load(processes, 8, 8, pace=0.7, seconds=5.0)
    later = [
        {"runner": "function", "spec": {"name": "nap"}, "inputs": {"path": processes.marker("l"), "seconds": 0.01}}
    ]
    ids = await processes.store.jobs.submit_many(later * 100)
    workers = [processes.start({"default": 10}, **PATIENT) for _ in range(2)]
    for name in jobs:
        await processes.wait_for_marker(name)
    for n in range(5):
        await asyncio.to_thread(own_server.stop, signal.SIGQUIT if n % 2 else signal.SIGINT)
        await asyncio.to_thread(own_server.start)
        await asyncio.sleep(0.5)  # Reason: load between two restarts.
    await answers_again(processes)
    await assert_once(processes, jobs)
    for job_id in ids:
        assert (await processes.ended(job_id, Status.SUCCEEDED)).attempts == 1
    assert len(processes.marker_lines("l")) == 200
    assert all(worker.status is None for worker in workers)


async def test_database_outage_of_three_ttls_loses_no_child(own_processes: WorkerProcesses, own_server: Server) -> None:
    """Proves L18, L7. Every lease has expired when it is back; the first reaper waits before it reaps."""
    processes = own_processes
    jobs = await load(processes, 30, 20, pace=1.6, seconds=16.0)
    workers = [processes.start({"default": 20}) for _ in range(3)]
    for name in jobs:
        await processes.wait_for_marker(name)
    await asyncio.to_thread(own_server.stop)
    await asyncio.sleep(3 * TTL)  # Reason: the outage itself.
    await asyncio.to_thread(own_server.start)
    await answers_again(processes)
    await assert_once(processes, jobs)
    assert all(worker.status is None for worker in workers)


async def test_outage_is_two_lines_in_the_log_of_a_worker_and_of_a_server(
    own_processes: WorkerProcesses, own_server: Server, tmp_path: Path
) -> None:
    """One line when the database is lost, with the cause, and one when it is back; no traceback."""
    processes = own_processes
    with service_process_on(own_server.url, tmp_path / "data") as service:
        worker = processes.start({"default": 4}, **PATIENT)
        jobs = await load(processes, 2, 2, pace=0.3, seconds=6.0)
        for name in jobs:
            await processes.wait_for_marker(name)
        await asyncio.to_thread(own_server.stop)
        async with service.client() as client:
            for _ in range(5):
                assert (await client.get("/v1/jobs")).status_code == 503
        await processes.eventually(lambda: "lost" in worker.log, "the worker notices")
        await asyncio.sleep(3.0)  # Reason: the outage itself, in which every loop tries again.
        await asyncio.to_thread(own_server.start)
        await answers_again(processes)
        await assert_once(processes, jobs)
        await processes.eventually(lambda: "back after" in worker.log, "the worker has it back")
        await processes.eventually(lambda: "back after" in service.log.read_text(), "the server has it back")
        for text in (worker.log, service.log.read_text()):
            about = [line for line in text.splitlines() if "atabase" in line or "Postgres" in line]
            assert len(about) == 2, text
            assert "database 127.0.0.1" in about[0], text
            assert any(cause in about[0] for cause in CAUSES), text
            assert " back after " in about[1], text
            assert "Traceback" not in text
            assert "switch to state" not in text
            assert "connection floor" not in text


def test_answers_of_a_server_that_shuts_down_do_not_end_its_outage(caplog: pytest.LogCaptureFixture) -> None:
    """It cuts its connections one by one, and some still answer. That must not look like several outages."""
    outage = DatabaseOutage("db")
    before = time.monotonic()
    outage.lost(StoreUnreachable("cut"))
    outage.back(before)
    outage.back(time.monotonic())
    outage.lost(StoreUnreachable("refused"))
    away = [outage.away]
    outage.back(time.monotonic() + SETTLE_SECONDS)
    assert [*away, outage.away] == [True, False]
    assert [message.split(":")[0].split(" after")[0] for message in caplog.messages] == [
        "database db lost, retrying until it is back", "database db back",
    ]  # fmt: skip


CAUSES = (
    "terminating connection",
    "Connect call failed",
    "closed in the middle",
    "cut in the middle",
    "refused",
    "shutting down",
    "reset by",
)


@postgres_only
async def test_killed_connections_lose_and_duplicate_nothing(processes: WorkerProcesses, clean_url: str) -> None:
    """Proves L16, L7. Again and again, every connection of every worker is cut."""
    jobs = await load(processes, 6, 6, pace=0.3, seconds=2.0)
    workers = [processes.start({"default": 8}, **PATIENT) for _ in range(2)]
    for name in jobs:
        await processes.wait_for_marker(name)
    admin = await asyncpg.connect(clean_url)
    for _ in range(30):
        await admin.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        await asyncio.sleep(0.1)  # Reason: load between two cuts.
    await admin.close()
    await answers_again(processes)
    await assert_once(processes, jobs)
    assert all(worker.status is None for worker in workers)


@postgres_only
async def test_worker_start_retries_a_cut_connection(clean_url: str) -> None:
    """Proves L16: a worker that starts does not give up because of one connection."""
    store = await open_store(clean_url, connections=2, listen=False)
    admin = await asyncpg.connect(clean_url)
    try:
        known = await store.installation()
        await admin.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        assert await retry_while_starting(store.installation) == known
    finally:
        await admin.close()
        await store.close()


async def test_finish_whose_reply_was_lost_is_applied_once(processes: WorkerProcesses) -> None:
    """Proves L7. One result, and the folder is removed."""
    process = await processes.chatty("process", queue="process")
    function = await processes.submit(
        "talk", inputs={"path": processes.marker("function"), "seconds": 0.3}, queue="function"
    )
    workers = [processes.start({queue: 1}, lose_answers=True) for queue in ("process", "function")]
    await assert_once(processes, {"process": process, "function": function})
    await processes.eventually(lambda: processes.folders_of() == [], "its folder is removed")
    await processes.eventually(lambda: all("cut right after COMMIT" in worker.log for worker in workers), "it was cut")
    again = await processes.chatty("process again", queue="process")
    await assert_once(processes, {"process again": again})


@postgres_only
async def test_half_open_connections_are_replaced(processes: WorkerProcesses, clean_url: str) -> None:
    """Proves L16, L7. Nothing that is sent arrives, and no error is raised."""
    parts = urlsplit(clean_url)
    async with Proxy(parts.port or 0).run() as proxy:
        url = urlunsplit(parts._replace(netloc=f"{parts.username}@127.0.0.1:{proxy.port}"))
        jobs = await load(processes, 3, 2, pace=0.8, seconds=8.0)
        worker = processes.start({"default": 5}, database_url=url, **PATIENT)
        for name in jobs:
            await processes.wait_for_marker(name)
        assert proxy.swallow() >= 2
        await assert_once(processes, jobs)
        for job in jobs.values():
            assert await processes.leases(job) == []
        last = await processes.chatty("process last")
        await assert_once(processes, {"process last": last})
        assert worker.status is None
        worker.kill()


@needs_faketime
@pytest.mark.parametrize("shift", ["+6h", "-6h"])
async def test_worker_whose_clock_is_hours_off_does_no_harm(processes: WorkerProcesses, kind: str, shift: str) -> None:
    """Proves L17. On Postgres its clock is not used; on SQLite it detects the difference and does not reap."""
    wrong = processes.start({"wrong": 1}, environment=clocks.shifted(shift), **PATIENT)
    await processes.eventually(processes.locks, "it leads")
    right = processes.start({"right": 2}, **PATIENT)
    long = await processes.chatty("process long", pace=TTL / 4, queue="right")
    nap = await processes.submit("nap", inputs={"path": processes.marker("nap"), "seconds": 2 * TTL}, queue="right")
    jobs = {"process long": long, "nap": nap}
    if kind == "postgres":
        jobs["process wrong"] = await processes.chatty("process wrong", queue="wrong")
    await assert_once(processes, jobs)
    for job in jobs.values():
        assert await processes.leases(job) == []
    assert (wrong.status, right.status) == (None, None)


async def test_blocking_function_keeps_its_lease_and_a_busy_worker_reaps_as_leader(
    processes: WorkerProcesses,
) -> None:
    """Proves L8, L10. The leader is killed; a worker whose only slot is in use reaps a worker of another host."""
    leader = processes.start({"leads": 1})
    await processes.eventually(processes.locks, "the leader is there")
    slow_to_expire: dict[str, Any] = {"lease_ttl": 2 * TTL, "heartbeat_interval": TTL / 3}
    block = await processes.submit(
        "block", inputs={"path": processes.marker("block"), "seconds": 4 * TTL}, queue="block"
    )
    busy = await processes.chatty("busy", pace=TTL, queue="busy")
    far = await processes.chatty("far", pace=0.1, queue="far")
    processes.start({"block": 1}, host="blocked", **slow_to_expire)
    processes.start({"busy": 1})
    victim = processes.start({"far": 1}, Hook(step="started", do="kill"), host="far")
    await processes.wait_for_marker("busy")
    await processes.wait_for_marker("block")
    assert await victim.dead() == -signal.SIGKILL
    leader.kill()
    await eventually(lambda: processes.leases(far, "reaped"), "the next leader reaps")
    assert (await processes.get(busy)).status is Status.RUNNING
    processes.start({"other": 1}, host="far")
    await processes.assert_whole("far", far)
    ended = await processes.ended(block, Status.SUCCEEDED)
    assert (len(processes.marker_lines("block")), ended.attempts, await processes.leases(block)) == (2, 1, [])
    os.kill(int(processes.marker_lines("busy")[0]), signal.SIGKILL)
