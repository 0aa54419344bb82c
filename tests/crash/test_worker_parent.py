"""`holdfast worker --processes N`: signals and kill -9 of each part, on both stores."""

import asyncio
import os
import signal
import sqlite3
from collections.abc import Collection
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli import worker_processes
from holdfast.cli.worker_processes import WorkerOptions, WorkerParent
from holdfast.model import Cause, Job, Status
from tests.support.in_process_workers import eventually
from tests.support.worker_parent import APP, WorkerParentProcess, start_parent
from tests.support.worker_processes import WorkerProcesses, alive

AGAIN: dict[str, Any] = {"max_attempts": 20, "retry": {"base": 0.1, "cap": 0.1}}


async def waiting(processes: WorkerProcesses, name: str, count: int = 1, **fields: Any) -> list[Job]:
    """Submit functions that mark their start and wait for the gate of this name."""
    inputs = {"path": processes.marker(name), "gate": str(processes.folder / f"{name}.gate")}
    return [await processes.submit("wait", inputs=inputs, **AGAIN, **fields) for _ in range(count)]


def runners(processes: WorkerProcesses, name: str) -> list[int]:
    """The processes that run a waiting function, one for each that has started and not ended."""
    running: list[int] = []
    for line in processes.marker_lines(name):
        mark, pid = line.split()
        if mark == "+":
            running.append(int(pid))
        else:
            running.remove(int(pid))
    return running


def most_at_once(processes: WorkerProcesses, name: str, dead: Collection[int] = (), after: int = 0) -> int:
    """How many of these functions ran at once. `dead`: processes that were killed after so many marks."""
    running: list[int] = []
    most = 0
    for n, line in enumerate(processes.marker_lines(name)):
        if n == after:
            running = [pid for pid in running if pid not in dead]
        mark, pid = line.split()
        if mark == "+":
            running.append(int(pid))
        else:
            running.remove(int(pid))
        most = max(most, len(running))
    return most


async def jobs_of(processes: WorkerProcesses, pid: int, jobs: list[Job]) -> list[Job]:
    """The jobs whose open attempt a process has."""
    (row,) = [row for row in await processes.store.workers.list() if row.pid == pid]
    return [job for job in jobs if job.id in row.jobs]


async def says(processes: WorkerProcesses, parent: WorkerParentProcess, text: str) -> None:
    await processes.eventually(lambda: text in parent.log, text)


def command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


def stop_between_writes(processes: WorkerProcesses, pid: int) -> None:
    """Stop a process. Nobody can write to a SQLite database whose writer is stopped; no test here is about that."""
    while True:
        os.kill(pid, signal.SIGSTOP)
        if not processes.settings.url.startswith("sqlite"):
            return
        path = processes.settings.url.removeprefix("sqlite:///")
        with closing(sqlite3.connect(path, timeout=2)) as database, suppress(sqlite3.OperationalError):
            database.execute("BEGIN IMMEDIATE")
            return
        os.kill(pid, signal.SIGCONT)


async def test_processes_share_one_set_of_slots(processes: WorkerProcesses) -> None:
    """Proves L2, L22. Four at once in all, two in each process, and no password on a command line."""
    parent = start_parent(processes, "--queue", "default:4,heavy:1", "--processes", "2")
    rows = await parent.rows(2)
    assert [dict(row.queues) for row in rows] == [{"default": 2, "heavy": 1}, {"default": 2}]
    jobs = await waiting(processes, "all", 12)
    heavy = await waiting(processes, "heavy", 3, queue="heavy")
    await processes.wait_for_marker("all", 4)
    await processes.wait_for_marker("heavy", 1)
    assert sorted(runners(processes, "all")) == sorted([row.pid for row in rows] * 2)
    assert runners(processes, "heavy") == [rows[0].pid]
    for pid in (parent.pid, *parent.started):
        assert processes.settings.url not in command_line(pid)
    processes.open_gate("all")
    processes.open_gate("heavy")
    for job in (*jobs, *heavy):
        await processes.ended(job, Status.SUCCEEDED)
    assert (most_at_once(processes, "all"), most_at_once(processes, "heavy")) == (4, 1)
    assert {(await processes.get(job)).result for job in jobs} == {row.pid for row in rows}


async def test_killed_process_is_replaced_and_only_its_functions_run_again(processes: WorkerProcesses) -> None:
    """Proves L11, L19, L22. The ids of the processes are never used twice, and the slots are never exceeded."""
    parent = start_parent(processes, "--queue", "default:4", "--processes", "2", "--worker-id", "mine")
    killed, other = await parent.rows(2)
    assert [killed.worker, other.worker] == ["mine.1", "mine.2"]
    jobs = await waiting(processes, "all", 4)
    await processes.wait_for_marker("all", 4)
    lost = await jobs_of(processes, killed.pid, jobs)
    os.kill(killed.pid, signal.SIGKILL)
    await processes.wait_for_marker("all", 6)
    assert [row.worker for row in await parent.rows(2)] == ["mine.2", "mine.3"]
    processes.open_gate("all")
    for job in jobs:
        ended = await processes.ended(job, Status.SUCCEEDED)
        assert ended.attempts == (2 if job in lost else 1)
    for job in lost:
        first, _ = await processes.store.attempts.list(job.id)
        assert (first.cause, first.worker) == (Cause.LOST, "mine.1")
    assert len(lost) == 2
    assert most_at_once(processes, "all", [killed.pid], after=4) == 4
    assert "worker process 1 of 2 died (killed by SIGKILL); starting another" in parent.log


async def test_process_killed_again_and_again_loses_no_job(processes: WorkerProcesses) -> None:
    """Proves L13, L22. At its start, between claim and finish, and while the other one recovers its jobs."""
    parent = start_parent(processes, "--queue", "default:20", "--processes", "2")
    await parent.rows(2)
    jobs = [await processes.submit("quick", **AGAIN) for _ in range(600)]
    for count in range(3, 7):
        os.kill(parent.started[-1], signal.SIGKILL)
        await parent.has_started(count)
        if count % 2 == 0:  # Every other one is killed before it works.
            await parent.rows(2)
    for job in jobs:
        await processes.ended(job, Status.SUCCEEDED)
        await processes.assert_true(job)
    parent.signal(signal.SIGTERM)
    assert await parent.dead() == 0


@pytest.mark.parametrize("stopped", [False, True], ids=["running", "stopped"])
async def test_processes_end_with_their_killed_parent(processes: WorkerProcesses, stopped: bool) -> None:
    """Proves L19, L22. Even a stopped one; the next parent recovers the jobs, and nothing runs twice at a time."""
    parent = start_parent(processes, "--queue", "default:4", "--processes", "2")
    rows = await parent.rows(2)
    jobs = await waiting(processes, "all", 4)
    running = await processes.sh(f"echo up; while [ ! -e {processes.folder}/all.gate ]; do sleep 0.05; done; echo end")
    await processes.wait_for_marker("all", 4)
    if stopped:
        os.kill(rows[0].pid, signal.SIGSTOP)
    parent.kill()
    await processes.eventually(lambda: not any(alive(row.pid) for row in rows), "they end with it")
    heir = start_parent(processes, "--queue", "default:4", "--processes", "2")
    await processes.wait_for_marker("all", 8)
    processes.open_gate("all")
    for job in jobs:
        assert (await processes.ended(job, Status.SUCCEEDED)).attempts == 2
        first, _ = await processes.store.attempts.list(job.id)
        assert first.cause is Cause.LOST
    assert (await processes.ended(running, Status.SUCCEEDED)).attempts == 1
    assert most_at_once(processes, "all", [row.pid for row in rows], after=4) == 4
    heir.signal(signal.SIGTERM)
    assert await heir.dead() == 0


async def test_parent_killed_while_it_starts_leaves_no_process(processes: WorkerProcesses) -> None:
    """Proves L22. After the start of the first process, after that of the second, and when both work."""
    for count in (1, 2, 2):
        parent = start_parent(processes, "--queue", "default:2", "--processes", "2")
        await parent.has_started(count)
        parent.kill()
        await parent.dead()


async def drained(processes: WorkerProcesses, parent: WorkerParentProcess, numbers: list[int]) -> None:
    """Drain a parent with a function that ends when it is told to, and one that does not."""
    await parent.rows(2)
    polite = [await processes.submit("stop", inputs={"path": processes.marker("polite")}) for _ in range(4)]
    await processes.wait_for_marker("polite", 4)
    stubborn = await waiting(processes, "all", 2)
    running = await processes.sh(f"echo up; while [ ! -e {processes.folder}/all.gate ]; do sleep 0.05; done; echo end")
    await processes.wait_for_marker("all", 2)
    await processes.wait_for_log(running, "up")
    for pid in (parent.pid, *numbers):
        os.kill(pid, signal.SIGTERM)
    assert await parent.dead() == 0
    assert [(await processes.get(job)).result for job in polite] == ["drain"] * 4
    for job in stubborn:
        found = await processes.get(job)
        assert (found.status, found.attempts) == (Status.QUEUED, 0)
    assert (await processes.get(running)).status is Status.RUNNING
    assert (await processes.store.workers.list(), processes.locks()) == ([], [])


async def test_signal_to_the_parent_drains_all_processes(processes: WorkerProcesses) -> None:
    """Proves C9, L22. The process goes on and is adopted; nothing of the parent is left."""
    parent = start_parent(processes, "--queue", "default:8", "--processes", "2")
    await drained(processes, parent, [])
    heir = start_parent(processes, "--queue", "default:8", "--processes", "2")
    await heir.rows(2)
    processes.open_gate("all")
    (running,) = [job for job in (await processes.store.jobs.list()).items if job.runner == "process"]
    assert (await processes.ended(running.id, Status.SUCCEEDED)).attempts == 1


async def test_signal_to_every_process_of_the_group_is_one_drain(processes: WorkerProcesses) -> None:
    """Proves L22. As a service manager sends it."""
    parent = start_parent(processes, "--queue", "default:8", "--processes", "2")
    await parent.has_started(2)
    await drained(processes, parent, parent.started)


async def test_second_signal_ends_all_processes_at_once(processes: WorkerProcesses) -> None:
    """Proves L22. Also one that is stopped. The next worker of the host recovers the jobs."""
    parent = start_parent(processes, "--queue", "default:2", "--processes", "2")
    stopped, _ = await parent.rows(2)
    jobs = await waiting(processes, "all", 2)
    await processes.wait_for_marker("all", 2)
    os.kill(stopped.pid, signal.SIGSTOP)
    parent.signal(signal.SIGTERM)
    await says(processes, parent, "draining 2 worker processes")
    parent.signal(signal.SIGTERM)
    assert await parent.dead() == 1
    assert "second signal: exiting immediately; 2 worker processes are killed" in parent.log
    start_parent(processes, "--queue", "default:2", "--processes", "2")
    await processes.wait_for_marker("all", 4)
    processes.open_gate("all")
    for job in jobs:
        assert (await processes.ended(job, Status.SUCCEEDED)).attempts == 2


async def test_stopped_process_is_killed_when_the_drain_has_taken_too_long(
    processes: WorkerProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_processes, "LAST_SECONDS", 0.1)
    monkeypatch.chdir(processes.folder)
    for name, value in processes.environment("a", {}).items():
        monkeypatch.setenv(name, value)
    (processes.folder / "marking.py").write_text(APP)
    options = WorkerOptions(application="marking:app", once=False, worker_id="w", database_url=None, data_dir=None)
    parent = WorkerParent([{"default": 1}, {"default": 1}], options, drain_grace=0.1)
    running = asyncio.create_task(parent.run())

    async def both() -> list[int]:
        pids = [row.pid for row in await processes.store.workers.list()]
        return pids if len(pids) == 2 else []

    pids = await eventually(both, "both work")
    os.kill(pids[0], signal.SIGSTOP)
    parent.signalled()
    assert await running == 0
    assert not any(map(alive, pids))


async def test_functions_of_a_stopped_process_run_in_the_others(processes: WorkerProcesses) -> None:
    """Proves L15, L22. After the TTL; when it continues it changes nothing, and works again."""
    parent = start_parent(processes, "--queue", "default:2", "--processes", "2")
    stopped, other = await parent.rows(2)
    first = await waiting(processes, "first", 2)
    await processes.wait_for_marker("first", 2)
    (lost,) = await jobs_of(processes, stopped.pid, first)
    (kept,) = await jobs_of(processes, other.pid, first)
    stop_between_writes(processes, stopped.pid)
    try:
        processes.open_gate("first")
        await processes.ended(kept, Status.SUCCEEDED)
        ended = await processes.ended(lost, Status.SUCCEEDED)
    finally:
        os.kill(stopped.pid, signal.SIGCONT)
    assert (ended.result, ended.attempts) == (other.pid, 2)
    second = await waiting(processes, "second", 2)
    await processes.wait_for_marker("second", 2)
    assert sorted(runners(processes, "second")) == sorted((stopped.pid, other.pid))
    processes.open_gate("second")
    for job in second:
        await processes.ended(job, Status.SUCCEEDED)
    assert await processes.assert_true(await processes.get(lost))


async def test_process_that_dies_at_every_start_does_not_stop_the_others(processes: WorkerProcesses) -> None:
    """Proves L22. The pause between its starts grows, the log says why, and it works again when the cause is gone."""
    parent = start_parent(processes, "--queue", "default:2", "--processes", "2")
    killed, other = await parent.rows(2)
    (processes.folder / "crash").touch()
    os.kill(killed.pid, signal.SIGKILL)
    for pause in ("0.5", "1", "2"):
        said = f"s of its start; starting another in {pause} s"
        await says(processes, parent, said)
        job = await processes.submit("quick")
        assert (await processes.ended(job, Status.SUCCEEDED)).result == other.pid
    assert "worker process 1 of 2 died (killed by SIGKILL), 3 times in a row within 30 s of its start" in parent.log
    (processes.folder / "crash").unlink()
    await parent.rows(2)
    parent.signal(signal.SIGTERM)
    assert await parent.dead() == 0


async def test_once_ends_when_all_processes_are_idle(processes: WorkerProcesses) -> None:
    """A process that dies on the way is replaced, and its job runs again."""
    jobs = [await processes.submit("quick") for _ in range(50)]
    deadly = await processes.submit("die_once", inputs={"path": processes.marker("died")}, **AGAIN)
    parent = start_parent(processes, "--queue", "default:4", "--processes", "2", "--once")
    assert await parent.dead() == 0, parent.log
    for job in jobs:
        assert (await processes.get(job)).status is Status.SUCCEEDED
    found = await processes.get(deadly)
    assert (found.status, found.attempts) == (Status.SUCCEEDED, 2)
    assert await processes.store.workers.list() == []


async def test_drain_of_one_process_and_then_of_the_host(processes: WorkerProcesses) -> None:
    """Proves C9. One that was drained is not replaced; the parent exits with the last."""
    parent = start_parent(processes, "--queue", "default:2", "--processes", "2")
    one, other = await parent.rows(2)
    await processes.store.workers.drain(one.worker)
    await processes.eventually(lambda: not alive(one.pid), "it is drained")
    said = "worker process 1 of 2 was drained and has exited; it is not restarted"
    await says(processes, parent, said)
    assert [row.pid for row in await parent.rows(1)] == [other.pid]
    await processes.store.workers.drain_host(other.host)
    assert await parent.dead() == 0
    assert len(parent.started) == 2
