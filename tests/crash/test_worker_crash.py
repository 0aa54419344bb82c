"""Workers that are killed or stopped at every step of an execution: the child runs once, and its record is whole."""

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
from tests.support.in_process_worker import Rig, eventually
from tests.support.worker_processes import CHATTY, LINES, Fleet, alive

OWN_STEPS = [
    "claimed", "prepared", "spawned", "started", "shipped", "exited", "collected", "gathered", "classified", "finished",
    "removed",
]  # fmt: skip
"""The steps of a worker that claimed the job itself; `told` comes with a stop, `found` and `adopted` with an orphan."""
FINISHED = ("finished", "removed")
TOMBSTONE = {"lock", "started"}
STUBBORN = "trap '' TERM; echo $$ >> \"$MARKER\"; while :; do sleep 0.2; done"


async def submit_all(fleet: Fleet) -> tuple[dict[str, Job], Job]:
    """A job for each step, in a queue of its own; and one that is to be cancelled and does not obey."""
    jobs = {step: await fleet.chatty(step, queue=step) for step in OWN_STEPS}
    told = await fleet.sh(STUBBORN, env={"MARKER": fleet.marker("told")}, queue="told", stop_grace=0.5)
    return jobs, told


async def cancel_when_running(fleet: Fleet, job: Job) -> None:
    await fleet.marked("told")
    await fleet.running(job)
    await fleet.store.jobs.cancel(job.id)


async def assert_swept(fleet: Fleet) -> None:
    """At most the marks that keep a sleeping worker from a second start are left, and in time not even those.

    Of its files a job has those that its last owner took, and no others.
    """
    await Sweeper(fleet.store, fleet.artifacts, grace=0.0).run_once()
    for job in fleet.artifacts.jobs("", 100):
        assert len(fleet.artifacts.attempts(job)) == 1
    await fleet.sweep()

    def only_marks() -> bool:
        """Also where an `rm` is still at it, whose worker was killed meanwhile. What was half made goes later."""
        whole = [folder for folder in fleet.folders_of() if not folder.name.startswith(".")]
        return all({path.name for path in folder.glob("*")} <= TOMBSTONE for folder in whole)

    await fleet.eventually(only_marks, "nothing but marks is left")
    await fleet.sweep(marks_for=0.0)
    assert fleet.folders_of() == []


async def test_worker_killed_at_any_step_costs_nothing(fleet: Fleet) -> None:
    """Proves L3, L13, L19, R2, R3, R10, R12, R14, C1. Its lease would last a minute."""
    slow: dict[str, Any] = {"lease_ttl": 60.0, "heartbeat_interval": 1.0, "adopt_backoff": 0.1}
    survivor = fleet.start({"other": 1}, **slow)
    jobs, told = await submit_all(fleet)
    victims = {
        step: fleet.start({step: 1}, Hook(step=step, do="kill", job=job.id), adopts=False, **slow)
        for step, job in {**jobs, "told": told}.items()
    }
    await cancel_when_running(fleet, told)
    for step, victim in victims.items():
        assert await victim.dead() == -signal.SIGKILL, step
    for step, job in jobs.items():
        await fleet.assert_whole(step, job)
        leases = await fleet.leases(job)
        assert leases == ["handed_over", "adopted"] * (len(leases) // 2), step
        assert bool(leases) or step in FINISHED, step
        assert await fleet.statuses(job) == ["queued", "running", "succeeded"], step
    await fleet.ended(told, Status.CANCELLED)
    assert len(fleet.marks("told")) == 1
    assert not alive(fleet.marks("told")[0])
    assert await fleet.cancels(told) == ["requested", "signalled", "killed", "dead"]
    await fleet.eventually(lambda: len(fleet.locks()) == 1, "the locks of the dead are gone")
    await assert_swept(fleet)
    assert survivor.status is None


async def test_adopter_killed_at_any_step_costs_nothing(fleet: Fleet) -> None:
    """Proves L3, L13, R3, R10. One after the other dies while it adopts."""
    job = await fleet.chatty("chain", gated=True, queue="chain")
    for step in ("started", "found", "adopted", "shipped"):
        victim = fleet.start({"chain": 1}, Hook(step=step, do="kill"), lease_ttl=60.0, adopt_backoff=0.1)
        assert await victim.dead() == -signal.SIGKILL, step
    fleet.start({"chain": 1}, lease_ttl=60.0, adopt_backoff=0.1)
    fleet.open_gate("chain")
    await fleet.assert_whole("chain", job)
    assert await fleet.leases(job, "adopted") == ["adopted"] * 4


async def test_worker_stopped_at_any_step_changes_nothing_when_it_wakes(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proves L15, L6, L10, R3, R14. Others adopt, finish and clean up; then it wakes, and runs the next job."""
    jobs, told = await submit_all(fleet)
    hooks = {step: Hook(step=step, do="stop", job=job.id) for step, job in {"told": told, **jobs}.items()}
    async with asyncio.TaskGroup() as group:
        group.create_task(cancel_when_running(fleet, told))
        stopping = group.create_task(fleet.start_and_stop(hooks))
    victims = stopping.result()
    survivor = fleet.start({"other": 1})
    for step, job in jobs.items():
        await fleet.assert_whole(step, job)
        leases = await fleet.leases(job)
        assert leases == ["reaped", "adopted"] * (len(leases) // 2), step
        assert bool(leases) or step in FINISHED, step
    await fleet.ended(told, Status.CANCELLED)
    jobs["told"] = told
    await fleet.sweep()
    before = {step: await fleet.get(job) for step, job in jobs.items()}
    for victim in victims.values():
        victim.signal(signal.SIGCONT)
    again = {step: await fleet.chatty(f"{step} again", queue=step) for step in victims}
    for step, job in again.items():
        await fleet.assert_whole(f"{step} again", job)
    for step, job in jobs.items():
        assert await fleet.get(job) == before[step], step
        assert len(fleet.marks(step)) == 1, step
    assert all(member.status is None for member in (*victims.values(), survivor))
    assert not any("Traceback" in member.log for member in victims.values())
    await assert_swept(fleet)


async def test_adopter_stopped_at_any_step_changes_nothing_when_it_wakes(fleet: Fleet) -> None:
    """Proves L15, L6, L4. One is stopped as it finds the attempt, one as it has adopted it, and one finishes it."""
    jobs = {step: await fleet.chatty(step, gated=True, queue=step) for step in ("found", "adopted")}
    first = fleet.start({"found": 1, "adopted": 1}, Hook(step="shipped", do="kill"))
    assert await first.dead() == -signal.SIGKILL
    stopped = {
        step: fleet.start({"other": 1}, Hook(step=step, do="stop", job=job.id), adopt_backoff=0.1, host="a")
        for step, job in jobs.items()
    }
    for member in stopped.values():
        await member.stopped()
    fleet.start({"other": 1}, adopt_backoff=0.1)
    for step, job in jobs.items():
        fleet.open_gate(step)
        await fleet.assert_whole(step, job)
    before = {step: await fleet.get(job) for step, job in jobs.items()}
    for member in stopped.values():
        member.signal(signal.SIGCONT)
    again = [await fleet.chatty(f"again {n}", queue="other") for n in range(4)]
    for n, job in enumerate(again):
        await fleet.assert_whole(f"again {n}", job)
    for step, job in jobs.items():
        assert await fleet.get(job) == before[step]
    assert not any("Traceback" in member.log for member in stopped.values())


@pytest.mark.parametrize("step", ["prepared", "started"])
async def test_stopped_worker_wakes_after_the_job_was_tried_again(fleet: Fleet, step: str) -> None:
    """Proves L15, L13. The first attempt ended under another worker, and the second is the one that succeeds."""
    script = 'echo "$HOLDFAST_ATTEMPT $$" >> "$MARKER"; sleep 1; [ "$HOLDFAST_ATTEMPT" = 2 ]'
    job = await fleet.sh(
        script, env={"MARKER": fleet.marker("twice")}, max_attempts=2, retry={"base": 0.1, "cap": 0.1, "on": ["failed"]}
    )
    sleeper = fleet.start({"default": 1}, Hook(step=step, do="stop"))
    await sleeper.stopped()
    fleet.start({"default": 1})
    ended = await fleet.ended(job, Status.SUCCEEDED)
    assert (ended.attempts, ended.attempt) == (2, 2)
    before = await fleet.get(job)
    sleeper.signal(signal.SIGCONT)
    others = [await fleet.chatty(f"other {n}") for n in range(3)]
    for n, other in enumerate(others):
        await fleet.assert_whole(f"other {n}", other)
    assert [line.split()[0] for line in fleet.marks("twice")] == ["1", "2"]
    assert await fleet.get(job) == before
    assert [attempt.cause for attempt in await fleet.store.attempts.list(job.id)] == ["exit", "exit"]


async def test_orphan_that_crashes_its_adopters_does_not_kill_the_fleet(fleet: Fleet) -> None:
    """Proves L3. After five adoptions without progress it waits for a person; other jobs run on."""
    job = await fleet.sh('echo $$ >> "$MARKER"; sleep 1000', env={"MARKER": fleet.marker("poison")}, queue="poison")
    deadly = Hook(step="found", do="kill", job=job.id)
    victim = fleet.start({"poison": 1}, Hook(step="started", do="kill"))
    assert await victim.dead() == -signal.SIGKILL
    crew = [fleet.start({"default": 1}, deadly, adopt_backoff=0.2)]
    others: list[Job] = []
    while (await fleet.get(job)).status is Status.RUNNING:
        others.append(await fleet.chatty(f"other {len(others)}"))

        async def over() -> bool:
            return crew[-1].status is not None or (await fleet.get(job)).status is not Status.RUNNING

        await eventually(over, "the adopter dies, or the job is given up")
        if crew[-1].status is not None:
            crew.append(fleet.start({"default": 2}, deadly, adopt_backoff=0.2))
    paused = await fleet.get(job)
    assert paused.status is Status.PAUSED
    assert paused.error is not None
    assert paused.error.code == "internal"
    assert len(await fleet.leases(job, "adopted")) == 5
    for n, other in enumerate(others):
        await fleet.assert_whole(f"other {n}", other)
    assert [member.status for member in crew] == [-signal.SIGKILL] * 5 + [None]
    (pid,) = fleet.marks("poison")
    os.kill(int(pid), 0)


async def test_execution_that_fails_at_any_step_hands_its_job_back(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
        jobs[step] = await rig.sh(CHATTY, env={"MARKER": str(tmp_path / step)})
    async with rig.worker({"default": len(OWN_STEPS)}, at=fail):
        unstarted = await rig.ended(jobs["prepared"], Status.FAILED)
        assert unstarted.error is not None
        assert unstarted.error.message == "it could not be started: RuntimeError: a fault at prepared"
        assert unstarted.attempts == 1
        started = {step: job for step, job in jobs.items() if step != "prepared"}
        for step, job in started.items():
            ended = await rig.ended(job, Status.SUCCEEDED)
            assert ended.attempts == 1, step
            assert (await rig.log(job))[-1] == "last out", step
            assert len(await rig.log(job)) == LINES + 1, step
    assert failed == set(OWN_STEPS)
    assert not (tmp_path / "prepared").exists()
    for step in started:
        assert len((tmp_path / step).read_text().split()) == 1, step
