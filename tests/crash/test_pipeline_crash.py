"""Workers killed at every step of a pipeline: each task runs once, and no partial result is used."""

import asyncio
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from holdfast.model import Job, Status
from holdfast.pipeline import snapshots
from holdfast.pipeline.snapshots import TEMPORARY, SnapshotFolders
from holdfast.worker import pipeline_execution, pipeline_workspace
from tests.support.crashing_worker import Hook
from tests.support.in_process_workers import eventually
from tests.support.pipelines import Pipelines, adds, expected, leaves, left_by, task
from tests.support.service import service_process_on
from tests.support.worker_processes import WorkerProcesses, alive

SLOW: dict[str, Any] = {"lease_ttl": 60.0, "heartbeat_interval": 1.0, "adopt_backoff": 0.1}
"""A killed worker is found dead by its lock; its lease would last a minute."""
STEPS = [
    "planned", "recorded", "locked", "spawned", "going", "outputs", "quiet", "copy", "sync", "rename", "move outputs",
    "sync parent", "row", "copied", "published", "kept", "reused", "restored", "inherited", "placed", "ending",
]  # fmt: skip
"""All that there are between the claim of a pipeline and its end, but for those of a server beside its tasks."""
SERVED = {"serving"}
"""Where workers are killed in tests/worker/test_pipeline_docker.py."""
OTHERS = {"remove"}
"""Not on the way of a job: the removal of a folder."""
KNOWN = ("reused", "restored", "inherited", "placed")
"""The steps that come with a chain that is known in part."""
STEPPING = (pipeline_execution, pipeline_workspace, snapshots)
"""The modules that name these steps."""
UNNAMED = {"move outputs", "sync parent", "row", "copied"}
"""Where a folder is in its place and has no row: it is swept, in time."""


@pytest.fixture
def pipelines(processes: WorkerProcesses, tmp_path: Path) -> Pipelines:
    return Pipelines(processes, tmp_path)


def marker_lines(pipelines: Pipelines, name: str) -> list[str]:
    path = pipelines.marker.with_name(f"{name}.marks")
    return path.read_text().split() if path.exists() else []


async def submit(pipelines: Pipelines, name: str, *more: dict[str, Any], **fields: Any) -> Job:
    """Submit a pipeline with its own results, by another environment."""
    spec = {"env": {"MARKER": str(pipelines.marker.with_name(f"{name}.marks"))}}
    return await pipelines.submit(brings("one"), brings("two"), *more, spec=spec, **fields)


def brings(name: str) -> dict[str, Any]:
    """A task that adds its line to the workspace, and leaves a file and a result."""
    return leaves(name, name, "last", then=f"echo {name} >> made")


async def content(pipelines: Pipelines, job: Job) -> str:
    """What the last task of a job left."""
    last = (await pipelines.tasks(job))[-1].snapshot
    (snapshot,) = [one for one in await pipelines.snapshots() if one.id == last]
    return (pipelines.folder_of(snapshot) / "made").read_text()


def test_list_of_steps_is_complete() -> None:
    """A new step must be added to the tests that kill a worker there."""
    source = "".join(Path(module.__file__ or "").read_text() for module in STEPPING)
    assert {*re.findall(r'_at\("([a-z ]+)"\)', source)} | {"spawned"} == {*STEPS} | SERVED | OTHERS


async def test_worker_killed_at_any_step_repeats_no_task(processes: WorkerProcesses, pipelines: Pipelines) -> None:
    """Proves P2, P5, P6, L13, R4, D1, D2."""
    known = {step: await submit(pipelines, step, queue="other") for step in KNOWN}
    processes.start({"other": 4}, **SLOW)
    for job in known.values():
        await processes.ended(job, Status.SUCCEEDED)
    jobs = {
        step: await submit(pipelines, step, *[brings("three")] * (step in known), queue=step.replace(" ", "_"))
        for step in STEPS
    }
    victims = {
        step: processes.start({step.replace(" ", "_"): 1}, Hook(step=step, do="kill", job=job.id), adopts=False, **SLOW)
        for step, job in jobs.items()
    }
    for step, victim in victims.items():
        assert await victim.dead() == -signal.SIGKILL, (step, victim.log)
    for step, job in jobs.items():
        ended = await processes.ended(job, Status.SUCCEEDED)
        tasks = ["one", "two", "three"] if step in known else ["one", "two"]
        assert (step, marker_lines(pipelines, step)) == (step, tasks)
        assert (step, await content(pipelines, job)) == (step, "".join(f"{name}\n" for name in tasks))
        assert (step, ended.attempts) == (step, 1)
        files = expected(**{name: name for name in tasks}, last=tasks[-1])
        assert (step, await left_by(processes, job)) == (step, ({"by": tasks[-1]}, files))
        await processes.assert_true(job)
    stored = await pipelines.snapshots()
    assert len(stored) == 2 * len(jobs) + len(known)
    folders = SnapshotFolders.below(processes.settings.shared)
    recorded = {snapshot.folder for snapshot in stored}
    assert len({*folders.names()} - recorded) >= len(UNNAMED & {*jobs})
    folders.sweep(recorded, grace=0.0)
    assert {*folders.names()} == recorded
    assert {path.name for path in folders.root.glob("*.outputs")} == {f"{name}.outputs" for name in recorded}
    assert list((folders.root / TEMPORARY).iterdir()) == []
    await processes.sweep()
    await processes.sweep(keep_marker_for=0.0)
    assert processes.folders_of() == []


@pytest.mark.parametrize(("mode", "ran"), [("always", "one two three"), ("final", "one two one three")])
async def test_snapshot_removed_after_its_restore_is_not_needed(
    processes: WorkerProcesses, pipelines: Pipelines, mode: str, ran: str
) -> None:
    """Proves P2, P12: an adopter continues in the existing workspace.

    With `final`, the worker that dies has just begun with the first task when somebody else makes the first two.
    """
    held = pipelines.marker.with_name("held")
    if mode == "always":
        await _make_known(processes, pipelines)
    job = await pipelines.submit(adds("one"), adds("two"), adds("three"), snapshot=mode, queue="a")
    waits = Hook(step="going", do="wait", job=job.id, path=str(held))
    victim = processes.start({"a": 1}, waits, Hook(step="placed", do="kill", job=job.id), **SLOW)
    if mode == "final":

        async def waiting() -> bool:
            return held.with_name("held.here").exists()

        await eventually(waiting, "the first task is about to begin")
        await _make_known(processes, pipelines)
    held.touch()
    assert await victim.dead() == -signal.SIGKILL, victim.log
    (first,) = [snapshot for snapshot in await pipelines.snapshots() if snapshot.task == "one"]
    await processes.store.snapshots.remove(first.id, tenant="default", force=True, recurse=True)
    processes.start({"a": 1}, **SLOW)
    ended = await processes.ended(job, Status.SUCCEEDED)
    adopted = [event for event in await processes.events(job, "lease") if event.data["lease"] == "adopted"]
    assert (pipelines.ran(), ended.attempts, len(adopted)) == (ran.split(), 1, 1)
    assert await pipelines.content("three") == "one\ntwo\nthree\n"


async def _make_known(processes: WorkerProcesses, pipelines: Pipelines) -> None:
    """Run the first two tasks in another job, and stop its worker."""
    maker = processes.start({"other": 1}, **SLOW)
    await processes.ended(await pipelines.submit(adds("one"), adds("two"), queue="other"), Status.SUCCEEDED)
    maker.kill()


async def test_next_job_builds_when_the_builder_is_killed(processes: WorkerProcesses, pipelines: Pipelines) -> None:
    """Proves P5: the one worker that is left adopts the task that runs, although the waiter has its one slot.

    The lock ends with the builder's lease: until the adoption the waiter may take it and build too.
    """
    waits = task("three", 'echo here; while [ ! -e "$GATE" ]; do sleep 0.05; done; echo three >> made')
    gate = pipelines.marker.with_name("gate")
    spec = {"env": {"MARKER": str(pipelines.marker), "GATE": str(gate)}}
    builder = await pipelines.submit(adds("one"), waits, spec=spec, queue="a")
    victim = processes.start({"a": 1}, **SLOW)
    await processes.wait_for_log(builder, "here")
    waiter = await pipelines.submit(adds("one"), waits, spec=spec, queue="b")
    processes.start({"b": 1}, **SLOW)

    async def waiting() -> bool:
        return bool(await processes.events(waiter, "task"))

    await eventually(waiting, "the waiter has planned")
    victim.kill()
    gate.touch()
    await processes.ended(builder, Status.SUCCEEDED)
    await processes.ended(waiter, Status.SUCCEEDED)
    assert pipelines.ran() in (["one", "three"], ["one", "three", "three"])
    assert await pipelines.kept() == ["one", "three"]
    assert await pipelines.content("three") == "one\nthree\n"


@pytest.mark.parametrize("workers", [4, 1])
async def test_race_for_one_snapshot_survives_a_killed_builder(
    processes: WorkerProcesses, pipelines: Pipelines, workers: int
) -> None:
    """Proves P5: four jobs in four workers of one slot each, or all with one slot. One builds, and is killed.

    Its task goes on. A worker that takes the free lock before the adopter builds beside it: once, and one is stored.
    """
    gate = pipelines.marker.with_name("gate")
    spec = {"env": {"MARKER": str(pipelines.marker), "GATE": str(gate)}}
    waits = task("two", 'echo here; while [ ! -e "$GATE" ]; do sleep 0.05; done; echo two >> made')
    jobs = [await pipelines.submit(adds("one"), waits, spec=spec, queue=f"q{n % workers}") for n in range(4)]
    members = [processes.start({f"q{n}": 1}, **SLOW) for n in range(workers)]

    async def builders() -> list[int]:
        return [n for n, job in enumerate(jobs) if "here" in await processes.log(job)]

    async def waiting() -> bool:
        return sum([bool(await processes.events(job, "task")) for job in jobs]) == workers

    (builder,) = await eventually(builders, "one of them builds")
    await eventually(waiting, "the others have planned")
    assert await builders() == [builder]
    members[builder % workers].kill()
    if workers == 1:
        processes.start({"q0": 1}, **SLOW)
    gate.touch()
    for job in jobs:
        assert (await processes.ended(job, Status.SUCCEEDED)).attempts <= 1
        await processes.assert_true(job)
    assert pipelines.ran() in (["one", "two"], ["one", "two", "two"])
    assert await pipelines.kept() == ["one", "two"]
    assert await pipelines.content("two") == "one\ntwo\n"


async def test_cancel_survives_the_death_of_server_and_worker(processes: WorkerProcesses, pipelines: Pipelines) -> None:
    """Proves C1, C5, P7: the server is killed right after its answer, and the worker while it sends the stop."""
    child = task("two", "echo $$ > pid; echo here; trap '' TERM; while :; do sleep 0.1; done")
    job = await pipelines.submit(
        adds("one"), child, queue="a", stop_grace=0.5, max_attempts=3, retry={"on": ["failed"]}
    )
    with service_process_on(processes.settings.database_url or "", processes.settings.data_dir) as service:
        victim = processes.start({"a": 1}, Hook(step="stop_sent", do="kill", job=job.id), **SLOW)
        await processes.wait_for_log(job, "here")
        pid = (processes.folder_of(job).path / "space" / "tree" / "pid").read_text().strip()
        async with service.client() as client:
            assert (await client.post(f"/v1/jobs/{job.id}/cancel")).status_code == 202
        await asyncio.to_thread(service.kill)
        assert await victim.dead() == -signal.SIGKILL, victim.log
        processes.start({"other": 1}, **SLOW)
        await processes.ended(job, Status.CANCELLED)
    assert not alive(pid)
    assert (await pipelines.statuses(job), pipelines.ran()) == (["succeeded", "cancelled"], ["one", "two"])
    assert await pipelines.kept() == ["one"]


async def test_cancel_during_a_failure_prevents_a_retry(processes: WorkerProcesses, pipelines: Pipelines) -> None:
    """Proves C1, P7: although the task failed by itself and the job has attempts left."""
    job = await pipelines.submit(
        adds("one"), task("two", "echo two >> made; exit 1"), max_attempts=3,
        retry={"base": 0, "cap": 0, "on": ["failed"]},
    )  # fmt: skip
    ended = pipelines.marker.with_name("ended")
    processes.start({"default": 1}, Hook(step="exited", do="wait", path=str(ended)), **SLOW)
    await processes.eventually(Path(f"{ended}.here").exists, "the task has failed")
    await processes.store.jobs.cancel(job.id)
    ended.touch()
    assert (await processes.ended(job, Status.CANCELLED)).attempts == 1
    assert pipelines.ran() == ["one", "two"]
    assert await pipelines.kept() == ["one"]


@pytest.mark.parametrize(("mode", "ran"), [("always", ["one", "two", "two"]), ("none", ["one", "two", "one", "two"])])
async def test_lost_workspace_is_restored_from_the_latest_snapshot(
    processes: WorkerProcesses, pipelines: Pipelines, mode: str, ran: list[str]
) -> None:
    """Proves P2: its supervisor is killed in the middle of a task, and all that ran with it."""
    gate = pipelines.marker.with_name("gate")
    spec = {"env": {"MARKER": str(pipelines.marker), "GATE": str(gate)}}
    waits = task("two", 'echo here; while [ ! -e "$GATE" ]; do sleep 0.05; done; echo two >> made')
    job = await pipelines.submit(
        adds("one"), waits, spec=spec, snapshot=mode, max_attempts=2, retry={"base": 0, "cap": 0}
    )
    processes.start({"default": 1}, **SLOW)
    await processes.wait_for_log(job, "here")
    os.kill(processes.supervisor_of(job), signal.SIGKILL)
    gate.touch()
    await processes.ended(job, Status.SUCCEEDED)
    assert pipelines.ran() == ran
    assert await pipelines.statuses(job) == ["succeeded", "succeeded"]
    if mode == "always":
        assert await pipelines.content("two") == "one\ntwo\n"


async def test_worker_that_slept_past_its_lease_changes_no_workspace(
    processes: WorkerProcesses, pipelines: Pipelines
) -> None:
    """Proves P2, L15, L6: it wakes after it restored the tree, while the adopter runs the next task."""
    await processes.ended(await _known(processes, pipelines), Status.SUCCEEDED)
    gate = pipelines.marker.with_name("gate")
    spec = {"env": {"MARKER": str(pipelines.marker), "GATE": str(gate)}}
    waits = task("two", 'echo two >> made; echo here; while [ ! -e "$GATE" ]; do sleep 0.05; done; echo end >> made')
    job = await pipelines.submit(adds("one"), waits, spec=spec, queue="a")
    victim = processes.start({"a": 1}, Hook(step="restored", do="stop", job=job.id))
    await victim.stopped()
    await processes.wait_for_log(job, "here")
    victim.signal(signal.SIGCONT)
    again = await submit(pipelines, "again", queue="a")
    await processes.ended(again, Status.SUCCEEDED)
    gate.touch()
    await processes.ended(job, Status.SUCCEEDED)
    assert await content(pipelines, job) == "one\ntwo\nend\n"


async def _known(processes: WorkerProcesses, pipelines: Pipelines) -> Job:
    """Store the result of the first task, and start a worker."""
    processes.start({"other": 2})
    gate = pipelines.marker.with_name("gate")
    spec = {"env": {"MARKER": str(pipelines.marker), "GATE": str(gate)}}
    return await pipelines.submit(adds("one"), spec=spec, queue="other")
