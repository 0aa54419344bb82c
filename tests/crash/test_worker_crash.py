"""Workers killed or stopped at every step of an execution: the child runs once, and its record is complete."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from holdfast.duties.sweeper import Sweeper
from holdfast.model import Job, Lease, Status
from holdfast.worker import worker
from tests.support.crashing_worker import Hook
from tests.support.in_process_workers import InProcessWorkers, eventually
from tests.support.worker_processes import CHATTY, LINES, WorkerProcesses, alive

OWN_STEPS = [
    "claimed", "prepared", "spawned", "started", "shipped", "exited", "collected", "gathered", "classified", "finished",
    "removed",
]  # fmt: skip
"""The steps of a worker that claims; `stop_sent` comes with a stop, `found` and `adopted` with an orphan."""
FINISHED = ("finished", "removed")
MARKER_FILES = {"lock", "started"}
STUBBORN = "trap '' TERM; echo $$ >> \"$MARKER\"; while :; do sleep 0.2; done"


async def submit_all(processes: WorkerProcesses) -> tuple[dict[str, Job], Job]:
    """A job for each step, in a queue of its own; and one that is to be cancelled and does not obey."""
    jobs = {step: await processes.chatty(step, queue=step) for step in OWN_STEPS}
    doomed = await processes.sh(
        STUBBORN, env={"MARKER": processes.marker("stop_sent")}, queue="stop_sent", stop_grace=0.5
    )
    return jobs, doomed


async def cancel_when_running(processes: WorkerProcesses, job: Job) -> None:
    await processes.wait_for_marker("stop_sent")
    await processes.running(job)
    await processes.store.jobs.cancel(job.id)


async def assert_swept(processes: WorkerProcesses) -> None:
    """Assert that only start markers are left, and that these are removed later.

    A job has the artifacts that its last owner collected, and no others.
    """
    await Sweeper(processes.store, processes.artifacts, grace=0.0).run_once()
    for job in processes.artifacts.jobs("", 100):
        assert len(processes.artifacts.stored(job)) == 1
    await processes.sweep()

    def only_marks() -> bool:
        """Return whether only start markers are left; a removal of a killed worker may still be running."""
        whole = [folder for folder in processes.folders_of() if not folder.name.startswith(".")]
        return all({path.name for path in folder.glob("*")} <= MARKER_FILES for folder in whole)

    await processes.eventually(only_marks, "nothing but marks is left")
    await processes.sweep(keep_marker_for=0.0)
    assert processes.folders_of() == []


async def test_worker_killed_at_any_step_costs_nothing(processes: WorkerProcesses) -> None:
    """Proves L3, L13, L19, R2, R3, R10, R12, R14, C1. Its lease would last a minute."""
    slow: dict[str, Any] = {"lease_ttl": 60.0, "heartbeat_interval": 1.0, "adopt_backoff": 0.1}
    survivor = processes.start({"other": 1}, **slow)
    jobs, doomed = await submit_all(processes)
    victims = {
        step: processes.start({step: 1}, Hook(step=step, do="kill", job=job.id), adopts=False, **slow)
        for step, job in {**jobs, "stop_sent": doomed}.items()
    }
    await cancel_when_running(processes, doomed)
    for step, victim in victims.items():
        assert await victim.dead() == -signal.SIGKILL, step
    for step, job in jobs.items():
        await processes.assert_whole(step, job)
        leases = await processes.leases(job)
        assert leases == ["handed_over", "adopted"] * (len(leases) // 2), step
        assert bool(leases) or step in FINISHED, step
        assert await processes.statuses(job) == ["queued", "running", "succeeded"], step
    await processes.ended(doomed, Status.CANCELLED)
    assert len(processes.marker_lines("stop_sent")) == 1
    assert not alive(processes.marker_lines("stop_sent")[0])
    assert await processes.cancels(doomed) == ["requested", "signalled", "killed", "dead"]
    await processes.eventually(lambda: len(processes.locks()) == 1, "the locks of the dead are gone")
    await assert_swept(processes)
    assert survivor.status is None


async def test_adopter_killed_at_any_step_costs_nothing(processes: WorkerProcesses) -> None:
    """Proves L3, L13, R3, R10. One after the other dies while it adopts."""
    job = await processes.chatty("chain", gated=True, queue="chain")
    for step in ("started", "found", "adopted", "shipped"):
        victim = processes.start({"chain": 1}, Hook(step=step, do="kill"), lease_ttl=60.0, adopt_backoff=0.1)
        assert await victim.dead() == -signal.SIGKILL, step
    processes.start({"chain": 1}, lease_ttl=60.0, adopt_backoff=0.1)
    processes.open_gate("chain")
    await processes.assert_whole("chain", job)
    assert await processes.leases(job, "adopted") == ["adopted"] * 4


async def test_worker_stopped_at_any_step_changes_nothing_when_it_wakes(
    processes: WorkerProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proves L15, L6, L10, R3, R14. Others adopt, finish and clean up; then it wakes, and runs the next job."""
    jobs, doomed = await submit_all(processes)
    hooks = {step: Hook(step=step, do="stop", job=job.id) for step, job in {"stop_sent": doomed, **jobs}.items()}
    async with asyncio.TaskGroup() as group:
        group.create_task(cancel_when_running(processes, doomed))
        stopping = group.create_task(processes.start_and_stop(hooks))
    victims = stopping.result()
    survivor = processes.start({"other": 1})
    for step, job in jobs.items():
        await processes.assert_whole(step, job)
        leases = await processes.leases(job)
        assert leases == ["reaped", "adopted"] * (len(leases) // 2), step
        assert bool(leases) or step in FINISHED, step
    await processes.ended(doomed, Status.CANCELLED)
    jobs["stop_sent"] = doomed
    await processes.sweep()
    before = {step: await processes.get(job) for step, job in jobs.items()}
    for victim in victims.values():
        victim.signal(signal.SIGCONT)
    again = {step: await processes.chatty(f"{step} again", queue=step) for step in victims}
    for step, job in again.items():
        await processes.assert_whole(f"{step} again", job)
    for step, job in jobs.items():
        assert await processes.get(job) == before[step], step
        assert len(processes.marker_lines(step)) == 1, step
    assert all(member.status is None for member in (*victims.values(), survivor))
    assert not any("Traceback" in member.log for member in victims.values())
    await assert_swept(processes)


async def test_adopter_stopped_at_any_step_changes_nothing_when_it_wakes(processes: WorkerProcesses) -> None:
    """Proves L15, L6, L4. One is stopped as it finds the attempt, one as it has adopted it, and one finishes it."""
    jobs = {step: await processes.chatty(step, gated=True, queue=step) for step in ("found", "adopted")}
    first = processes.start({"found": 1, "adopted": 1}, Hook(step="shipped", do="kill"))
    assert await first.dead() == -signal.SIGKILL
    stopped = {
        step: processes.start({"other": 1}, Hook(step=step, do="stop", job=job.id), adopt_backoff=0.1, host="a")
        for step, job in jobs.items()
    }
    for member in stopped.values():
        await member.stopped()
    processes.start({"other": 1}, adopt_backoff=0.1)
    for step, job in jobs.items():
        processes.open_gate(step)
        await processes.assert_whole(step, job)
    before = {step: await processes.get(job) for step, job in jobs.items()}
    for member in stopped.values():
        member.signal(signal.SIGCONT)
    again = [await processes.chatty(f"again {n}", queue="other") for n in range(4)]
    for n, job in enumerate(again):
        await processes.assert_whole(f"again {n}", job)
    for step, job in jobs.items():
        assert await processes.get(job) == before[step]
    assert not any("Traceback" in member.log for member in stopped.values())


@pytest.mark.parametrize("step", ["prepared", "started"])
async def test_stopped_worker_wakes_after_the_job_was_tried_again(processes: WorkerProcesses, step: str) -> None:
    """Proves L15, L13. The first attempt ended under another worker, and the second is the one that succeeds."""
    script = 'echo "$HOLDFAST_ATTEMPT $$" >> "$MARKER"; sleep 1; [ "$HOLDFAST_ATTEMPT" = 2 ]'
    job = await processes.sh(
        script,
        env={"MARKER": processes.marker("twice")},
        max_attempts=2,
        retry={"base": 0.1, "cap": 0.1, "on": ["failed"]},
    )
    sleeper = processes.start({"default": 1}, Hook(step=step, do="stop"))
    await sleeper.stopped()
    processes.start({"default": 1})
    ended = await processes.ended(job, Status.SUCCEEDED)
    assert (ended.attempts, ended.attempt) == (2, 2)
    before = await processes.get(job)
    sleeper.signal(signal.SIGCONT)
    others = [await processes.chatty(f"other {n}") for n in range(3)]
    for n, other in enumerate(others):
        await processes.assert_whole(f"other {n}", other)
    assert [line.split()[0] for line in processes.marker_lines("twice")] == ["1", "2"]
    assert await processes.get(job) == before
    assert [attempt.cause for attempt in await processes.store.attempts.list(job.id)] == ["exit", "exit"]


async def test_orphan_that_crashes_its_adopters_does_not_kill_every_worker(processes: WorkerProcesses) -> None:
    """Proves L3. After five adoptions without progress it waits for a person; other jobs run on."""
    job = await processes.sh(
        'echo $$ >> "$MARKER"; sleep 1000', env={"MARKER": processes.marker("poison")}, queue="poison"
    )
    deadly = Hook(step="found", do="kill", job=job.id)
    victim = processes.start({"poison": 1}, Hook(step="started", do="kill"))
    assert await victim.dead() == -signal.SIGKILL
    race_processes = [processes.start({"default": 1}, deadly, adopt_backoff=0.2)]
    others: list[Job] = []
    while (await processes.get(job)).status is Status.RUNNING:
        others.append(await processes.chatty(f"other {len(others)}"))

        async def over() -> bool:
            return race_processes[-1].status is not None or (await processes.get(job)).status is not Status.RUNNING

        await eventually(over, "the adopter dies, or the job is given up")
        if race_processes[-1].status is not None:
            race_processes.append(processes.start({"default": 2}, deadly, adopt_backoff=0.2))
    paused = await processes.get(job)
    assert paused.status is Status.PAUSED
    assert paused.error is not None
    assert paused.error.code == "internal"
    assert len(await processes.leases(job, "adopted")) == 5
    for n, other in enumerate(others):
        await processes.assert_whole(f"other {n}", other)
    assert [member.status for member in race_processes] == [-signal.SIGKILL] * 5 + [None]
    (pid,) = processes.marker_lines("poison")
    os.kill(int(pid), 0)


async def test_execution_that_fails_at_any_step_hands_its_job_back(
    workers: InProcessWorkers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proves L8. A job whose supervision failed is not kept by the heartbeat: it is adopted again, and runs once.

    A fault while it is being started fails the attempt with its reason, and nothing runs.
    """
    monkeypatch.setattr(worker, "CRASHED_DELAY", 0.1)
    jobs: dict[str, Job] = {}
    failed: set[str] = set()

    def fail(step: str, lease: Lease) -> None:
        if step not in failed and step in jobs and jobs[step].id == lease.id:
            failed.add(step)
            raise RuntimeError(f"a fault at {step}")

    for step in OWN_STEPS:
        jobs[step] = await workers.sh(CHATTY, env={"MARKER": str(tmp_path / step)})
    async with workers.worker({"default": len(OWN_STEPS)}, at=fail):
        unstarted = await workers.ended(jobs["prepared"], Status.FAILED)
        assert unstarted.error is not None
        assert unstarted.error.message == "it could not be started: RuntimeError: a fault at prepared"
        assert unstarted.attempts == 1
        started = {step: job for step, job in jobs.items() if step != "prepared"}
        for step, job in started.items():
            ended = await workers.ended(job, Status.SUCCEEDED)
            assert ended.attempts == 1, step
            assert (await workers.log(job))[-1] == "last out", step
            assert len(await workers.log(job)) == LINES + 1, step
    assert failed == set(OWN_STEPS)
    assert not (tmp_path / "prepared").exists()
    for step in started:
        assert len((tmp_path / step).read_text().split()) == 1, step
