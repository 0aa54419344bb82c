"""Workers killed, drained or stopped between a claim and the launch of its functions: one result per job.

An attempt of a function counts from its claim: a job that is lost there is settled by its `on_lost`, and has not run.
"""

import signal
from collections.abc import Sequence
from typing import Any

from holdfast.model import Cause, Job, Status
from tests.support.crashing_worker import Hook
from tests.support.worker_processes import WorkerProcess, WorkerProcesses

LOST, EXIT, DRAINED = Cause.LOST, Cause.EXIT, Cause.DRAINED
LONG: dict[str, Any] = {"lease_ttl": 60.0, "heartbeat_interval": 1.0}


async def nap(processes: WorkerProcesses, name: str, **fields: Any) -> Job:
    """Submit a function that only marks that it ran."""
    inputs = {"path": processes.marker(name), "seconds": 0, "name": name}
    return await processes.submit("nap", inputs=inputs, **{"max_attempts": 2, **fields})


async def talk(processes: WorkerProcesses, name: str) -> Job:
    """Submit a function that runs until it is asked to stop."""
    return await processes.submit("talk", inputs={"path": processes.marker(name), "seconds": 600}, max_attempts=2)


def runs(processes: WorkerProcesses, name: str) -> list[int]:
    """Return the process of each run of a function."""
    return [int(line.split()[-1]) for line in processes.marker_lines(name) if " start " in line]


async def assert_record(
    processes: WorkerProcesses, job: Job, status: Status, causes: Sequence[Cause], *, code: str | None = None
) -> None:
    """Assert how a job ended, by which attempts, and that it ended once."""
    ended = await processes.ended(job, status)
    attempts = await processes.store.attempts.list(job.id)
    assert [attempt.cause for attempt in attempts] == list(causes)
    assert (ended.attempts, ended.attempt) == (len(causes) - list(causes).count(DRAINED), len(causes))
    assert (None if ended.error is None else ended.error.code) == code
    await processes.assert_true(job)
    assert (await processes.statuses(job)).count(status) == 1


async def held_at_launch(processes: WorkerProcesses, job: Job, **settings: Any) -> WorkerProcess:
    """Start a worker and wait until it is about to launch this job; `open_gate("launch")` lets it continue."""
    path = str(processes.folder / "launch.gate")
    worker = processes.start({"default": 8}, Hook(step="launching", do="wait", job=job.id, path=path), **settings)
    await processes.eventually((processes.folder / "launch.gate.here").exists, "the worker is about to launch")
    return worker


async def losses(processes: WorkerProcesses) -> dict[str, Job]:
    """Submit a job for each way to settle a loss."""
    return {
        "first": await nap(processes, "first"),
        "again": await nap(processes, "again"),
        "once": await nap(processes, "once", max_attempts=1),
        "fail": await nap(processes, "fail", on_lost="fail"),
        "pause": await nap(processes, "pause", on_lost="pause"),
        "last": await nap(processes, "last"),
    }


async def assert_losses(processes: WorkerProcesses, jobs: dict[str, Job]) -> None:
    for name in ("first", "again", "last"):
        await assert_record(processes, jobs[name], Status.SUCCEEDED, [LOST, EXIT])
    for name in ("once", "fail"):
        await assert_record(processes, jobs[name], Status.FAILED, [LOST], code="lost")
    await assert_record(processes, jobs["pause"], Status.PAUSED, [LOST], code="lost")


async def test_functions_of_a_worker_killed_before_their_launch_are_lost_and_did_not_run(
    processes: WorkerProcesses,
) -> None:
    """The next claim is on its way when the worker dies: its jobs are lost too, or were never claimed."""
    jobs = await losses(processes)
    others = {name: await nap(processes, name, queue="other") for name in ("other 1", "other 2")}
    victim = processes.start(
        {"default": 8, "other": 8}, Hook(step="launching", do="kill", job=jobs["again"].id), adopts=False, **LONG
    )
    assert await victim.dead() == -signal.SIGKILL
    assert not any(runs(processes, name) for name in (*jobs, *others))
    survivor = processes.start({"default": 8, "other": 8}, **LONG)
    await assert_losses(processes, jobs)
    for name, job in others.items():
        await processes.ended(job, Status.SUCCEEDED)
        attempts = len(await processes.store.attempts.list(job.id))
        await assert_record(processes, job, Status.SUCCEEDED, [LOST, EXIT][2 - attempts :])
        assert runs(processes, name) == [survivor.pid]
    for name in ("first", "again", "last"):
        assert runs(processes, name) == [survivor.pid]
    assert not any(runs(processes, name) for name in ("once", "fail", "pause"))


async def test_worker_stopped_before_the_launch_runs_no_function_that_was_settled_meanwhile(
    processes: WorkerProcesses,
) -> None:
    """Proves L15. It wakes when its leases are lost, and nobody has told it yet."""
    jobs = await losses(processes)
    stops = {"cancel": await nap(processes, "cancel"), "interrupt": await nap(processes, "interrupt")}
    sleeper = processes.start(
        {"default": 8, "own": 1}, Hook(step="launching", do="stop", job=jobs["again"].id), adopts=False
    )
    await sleeper.stopped()
    await processes.store.jobs.cancel(stops["cancel"].id)
    await processes.store.jobs.interrupt(stops["interrupt"].id)
    survivor = processes.start({"default": 8}, host="b")
    await assert_losses(processes, jobs)
    await assert_record(processes, stops["cancel"], Status.CANCELLED, [Cause.CANCELLED], code="cancelled")
    await assert_record(processes, stops["interrupt"], Status.PAUSED, [Cause.INTERRUPTED], code="interrupted")
    jobs |= stops
    before = {name: await processes.get(job) for name, job in jobs.items()}
    sleeper.signal(signal.SIGCONT)
    await processes.ended(await nap(processes, "own", queue="own"), Status.SUCCEEDED)
    assert runs(processes, "own") == [sleeper.pid]
    for name, job in jobs.items():
        assert runs(processes, name) == [survivor.pid] * (name in ("first", "again", "last")), name
        assert await processes.get(job) == before[name], name
    assert "Traceback" not in sleeper.log


async def test_worker_terminated_before_the_launch_still_runs_what_it_claimed(processes: WorkerProcesses) -> None:
    """One of the functions would run for long, and hears of the drain."""
    jobs = {name: await nap(processes, name) for name in ("first", "second", "third")}
    jobs["talk"] = await talk(processes, "talk")
    worker = await held_at_launch(processes, jobs["second"], drain_grace=120.0, **LONG)
    worker.signal(signal.SIGTERM)
    processes.open_gate("launch")
    assert await worker.dead() == 0
    for name, job in jobs.items():
        await assert_record(processes, job, Status.SUCCEEDED, [EXIT])
        assert runs(processes, name) == [worker.pid]
    assert processes.locks() == []


async def test_function_that_outlasts_the_drain_of_its_launch_costs_no_attempt(processes: WorkerProcesses) -> None:
    inputs = {"path": processes.marker("long"), "gate": str(processes.folder / "long.gate")}
    jobs = [await processes.submit("wait_for", inputs=inputs, max_attempts=1) for _ in range(3)]
    worker = await held_at_launch(processes, jobs[1], drain_grace=0.1, **LONG)
    worker.signal(signal.SIGTERM)
    processes.open_gate("launch")
    assert await worker.dead() == 0
    assert not any(" end " in line for line in processes.marker_lines("long"))
    processes.open_gate("long")
    processes.start({"default": 8}, **LONG)
    for job in jobs:
        await assert_record(processes, job, Status.SUCCEEDED, [DRAINED, EXIT])
    assert sum(" end " in line for line in processes.marker_lines("long")) == len(jobs)


async def test_stop_requests_and_a_paused_queue_between_claim_and_launch(processes: WorkerProcesses) -> None:
    """A stop request reaches the function; what was claimed before its queue was paused runs, and nothing else."""
    jobs = {name: await talk(processes, name) for name in ("cancel", "interrupt")}
    jobs["run"] = await nap(processes, "run")
    await held_at_launch(processes, jobs["cancel"], **LONG)
    await processes.store.jobs.cancel(jobs["cancel"].id)
    await processes.store.jobs.interrupt(jobs["interrupt"].id)
    await processes.store.queues.pause("default")
    late = await nap(processes, "late")
    processes.open_gate("launch")
    await assert_record(processes, jobs["cancel"], Status.CANCELLED, [Cause.CANCELLED], code="cancelled")
    await assert_record(processes, jobs["interrupt"], Status.PAUSED, [Cause.INTERRUPTED], code="interrupted")
    await assert_record(processes, jobs["run"], Status.SUCCEEDED, [EXIT])
    for name in ("cancel", "interrupt"):
        assert await processes.cancels(jobs[name]) == ["requested", "signalled", "dead"]
    assert (await processes.get(late)).status is Status.QUEUED
    await processes.store.queues.resume("default")
    await assert_record(processes, late, Status.SUCCEEDED, [EXIT])
    assert all(len(runs(processes, name)) == 1 for name in jobs)
