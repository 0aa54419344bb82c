"""Workers that are killed at every step of a pipeline: each task runs once, and nothing half-made is ever used."""

import asyncio
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from holdfast.model import Job, Status
from holdfast.pipeline import snapshots
from holdfast.pipeline.snapshots import TEMPORARY, Folders
from holdfast.worker import pipeline_execution
from tests.support.crashing_worker import Hook
from tests.support.in_process_worker import eventually
from tests.support.pipelines import Pipes, adds, expected, leaves, left_by, task
from tests.support.service import serving
from tests.support.worker_processes import Fleet, alive

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
UNNAMED = {"move outputs", "sync parent", "row", "copied"}
"""Where a folder is in its place and has no row: it is swept, in time."""


@pytest.fixture
def pipes(fleet: Fleet, tmp_path: Path) -> Pipes:
    return Pipes(fleet, tmp_path)


def marks(pipes: Pipes, name: str) -> list[str]:
    path = pipes.marker.with_name(f"{name}.marks")
    return path.read_text().split() if path.exists() else []


async def submit(pipes: Pipes, name: str, *more: dict[str, Any], **fields: Any) -> Job:
    """A pipeline of its own: another environment makes other results."""
    spec = {"env": {"MARKER": str(pipes.marker.with_name(f"{name}.marks"))}}
    return await pipes.submit(brings("one"), brings("two"), *more, spec=spec, **fields)


def brings(name: str) -> dict[str, Any]:
    """A task that adds its line to the workspace, and leaves a file and a result."""
    return leaves(name, name, "last", then=f"echo {name} >> made")


async def content(pipes: Pipes, job: Job) -> str:
    """What the last task of a job left."""
    last = (await pipes.tasks(job))[-1].snapshot
    (snapshot,) = [one for one in await pipes.snapshots() if one.id == last]
    return (pipes.folder_of(snapshot) / "made").read_text()


def test_steps_are_all_that_there_are() -> None:
    """A step that is new is one more place to be killed at."""
    told = "".join(Path(module.__file__ or "").read_text() for module in (pipeline_execution, snapshots))
    assert {*re.findall(r'_at\("([a-z ]+)"\)', told)} | {"spawned"} == {*STEPS} | SERVED | OTHERS


async def test_worker_killed_at_any_step_repeats_no_task(fleet: Fleet, pipes: Pipes) -> None:
    """Proves P2, P5, P6, L13, R4, D1, D2."""
    known = {step: await submit(pipes, step, queue="other") for step in KNOWN}
    fleet.start({"other": 4}, **SLOW)
    for job in known.values():
        await fleet.ended(job, Status.SUCCEEDED)
    jobs = {
        step: await submit(pipes, step, *[brings("three")] * (step in known), queue=step.replace(" ", "_"))
        for step in STEPS
    }
    victims = {
        step: fleet.start({step.replace(" ", "_"): 1}, Hook(step=step, do="kill", job=job.id), adopts=False, **SLOW)
        for step, job in jobs.items()
    }
    for step, victim in victims.items():
        assert await victim.dead() == -signal.SIGKILL, (step, victim.log)
    for step, job in jobs.items():
        ended = await fleet.ended(job, Status.SUCCEEDED)
        tasks = ["one", "two", "three"] if step in known else ["one", "two"]
        assert (step, marks(pipes, step)) == (step, tasks)
        assert (step, await content(pipes, job)) == (step, "".join(f"{name}\n" for name in tasks))
        assert (step, ended.attempts) == (step, 1)
        files = expected(**{name: name for name in tasks}, last=tasks[-1])
        assert (step, await left_by(fleet, job)) == (step, ({"by": tasks[-1]}, files))
        await fleet.assert_true(job)
    stored = await pipes.snapshots()
    assert len(stored) == 2 * len(jobs) + len(known)
    folders = Folders.below(fleet.settings.shared)
    standing = {snapshot.folder for snapshot in stored}
    assert len({*folders.names()} - standing) >= len(UNNAMED & {*jobs})
    folders.sweep(standing, grace=0.0)
    assert {*folders.names()} == standing
    assert {path.name for path in folders.root.glob("*.outputs")} == {f"{name}.outputs" for name in standing}
    assert list((folders.root / TEMPORARY).iterdir()) == []
    await fleet.sweep()
    await fleet.sweep(marks_for=0.0)
    assert fleet.folders_of() == []


@pytest.mark.parametrize(("mode", "ran"), [("always", "one two three"), ("final", "one two one three")])
async def test_snapshot_that_goes_after_it_was_placed_is_not_missed(
    fleet: Fleet, pipes: Pipes, mode: str, ran: str
) -> None:
    """Proves P2, P12: an adopter goes on in the workspace that is there.

    With `final`, the worker that dies has just begun with the first task when somebody else makes the first two.
    """
    held = pipes.marker.with_name("held")
    if mode == "always":
        await _make_known(fleet, pipes)
    job = await pipes.submit(adds("one"), adds("two"), adds("three"), snapshot=mode, queue="a")
    waits = Hook(step="going", do="wait", job=job.id, path=str(held))
    victim = fleet.start({"a": 1}, waits, Hook(step="placed", do="kill", job=job.id), **SLOW)
    if mode == "final":

        async def waiting() -> bool:
            return held.with_name("held.here").exists()

        await eventually(waiting, "the first task is about to begin")
        await _make_known(fleet, pipes)
    held.touch()
    assert await victim.dead() == -signal.SIGKILL, victim.log
    (first,) = [snapshot for snapshot in await pipes.snapshots() if snapshot.task == "one"]
    await fleet.store.snapshots.remove(first.id, tenant="default", force=True, recurse=True)
    fleet.start({"a": 1}, **SLOW)
    ended = await fleet.ended(job, Status.SUCCEEDED)
    adopted = [event for event in await fleet.events(job, "lease") if event.data["lease"] == "adopted"]
    assert (pipes.ran(), ended.attempts, len(adopted)) == (ran.split(), 1, 1)
    assert await pipes.content("three") == "one\ntwo\nthree\n"


async def _make_known(fleet: Fleet, pipes: Pipes) -> None:
    """Have the first two tasks done by a job of their own, and its worker gone."""
    maker = fleet.start({"other": 1}, **SLOW)
    await fleet.ended(await pipes.submit(adds("one"), adds("two"), queue="other"), Status.SUCCEEDED)
    maker.kill()


async def test_next_builds_when_the_builder_is_killed(fleet: Fleet, pipes: Pipes) -> None:
    """Proves P5: the one worker that is left adopts the task that runs, although the waiter has its one slot.

    The lock falls with the builder's lease: until the adoption the waiter may take it, and builds, too.
    """
    waits = task("three", 'echo here; while [ ! -e "$GATE" ]; do sleep 0.05; done; echo three >> made')
    gate = pipes.marker.with_name("gate")
    spec = {"env": {"MARKER": str(pipes.marker), "GATE": str(gate)}}
    builder = await pipes.submit(adds("one"), waits, spec=spec, queue="a")
    victim = fleet.start({"a": 1}, **SLOW)
    await fleet.says(builder, "here")
    waiter = await pipes.submit(adds("one"), waits, spec=spec, queue="b")
    fleet.start({"b": 1}, **SLOW)

    async def waiting() -> bool:
        return bool(await fleet.events(waiter, "task"))

    await eventually(waiting, "the waiter has planned")
    victim.kill()
    gate.touch()
    await fleet.ended(builder, Status.SUCCEEDED)
    await fleet.ended(waiter, Status.SUCCEEDED)
    assert pipes.ran() in (["one", "three"], ["one", "three", "three"])
    assert await pipes.kept() == ["one", "three"]
    assert await pipes.content("three") == "one\nthree\n"


@pytest.mark.parametrize("workers", [4, 1])
async def test_race_for_one_snapshot_goes_on_when_the_builder_is_killed(
    fleet: Fleet, pipes: Pipes, workers: int
) -> None:
    """Proves P5: four jobs in four workers of one slot each, or all behind one slot. One builds, and is killed.

    Its task goes on. A worker that takes the free lock before the adopter builds beside it: once, and one is stored.
    """
    gate = pipes.marker.with_name("gate")
    spec = {"env": {"MARKER": str(pipes.marker), "GATE": str(gate)}}
    waits = task("two", 'echo here; while [ ! -e "$GATE" ]; do sleep 0.05; done; echo two >> made')
    jobs = [await pipes.submit(adds("one"), waits, spec=spec, queue=f"q{n % workers}") for n in range(4)]
    members = [fleet.start({f"q{n}": 1}, **SLOW) for n in range(workers)]

    async def builders() -> list[int]:
        return [n for n, job in enumerate(jobs) if "here" in await fleet.log(job)]

    async def waiting() -> bool:
        return sum([bool(await fleet.events(job, "task")) for job in jobs]) == workers

    (builder,) = await eventually(builders, "one of them builds")
    await eventually(waiting, "the others have planned")
    assert await builders() == [builder]
    members[builder % workers].kill()
    if workers == 1:
        fleet.start({"q0": 1}, **SLOW)
    gate.touch()
    for job in jobs:
        assert (await fleet.ended(job, Status.SUCCEEDED)).attempts <= 1
        await fleet.assert_true(job)
    assert pipes.ran() in (["one", "two"], ["one", "two", "two"])
    assert await pipes.kept() == ["one", "two"]
    assert await pipes.content("two") == "one\ntwo\n"


async def test_cancel_holds_when_all_who_heard_it_die(fleet: Fleet, pipes: Pipes) -> None:
    """Proves C1, C5, P7: the server right behind its answer, and the worker as it passes the word on."""
    child = task("two", "echo $$ > pid; echo here; trap '' TERM; while :; do sleep 0.1; done")
    job = await pipes.submit(adds("one"), child, queue="a", stop_grace=0.5, max_attempts=3, retry={"on": ["failed"]})
    with serving(fleet.settings.database_url or "", fleet.settings.data_dir) as served:
        victim = fleet.start({"a": 1}, Hook(step="told", do="kill", job=job.id), **SLOW)
        await fleet.says(job, "here")
        pid = (fleet.folder_of(job).path / "space" / "tree" / "pid").read_text().strip()
        async with served.client() as client:
            assert (await client.post(f"/v1/jobs/{job.id}/cancel")).status_code == 202
        await asyncio.to_thread(served.kill)
        assert await victim.dead() == -signal.SIGKILL, victim.log
        fleet.start({"other": 1}, **SLOW)
        await fleet.ended(job, Status.CANCELLED)
    assert not alive(pid)
    assert (await pipes.statuses(job), pipes.ran()) == (["succeeded", "cancelled"], ["one", "two"])
    assert await pipes.kept() == ["one"]


async def test_cancel_in_the_moment_of_a_failure_runs_nothing_again(fleet: Fleet, pipes: Pipes) -> None:
    """Proves C1, P7: although the task has failed by itself, and the job has attempts left."""
    job = await pipes.submit(
        adds("one"), task("two", "echo two >> made; exit 1"), max_attempts=3,
        retry={"base": 0, "cap": 0, "on": ["failed"]},
    )  # fmt: skip
    ended = pipes.marker.with_name("ended")
    fleet.start({"default": 1}, Hook(step="exited", do="wait", path=str(ended)), **SLOW)
    await fleet.eventually(Path(f"{ended}.here").exists, "the task has failed")
    await fleet.store.jobs.cancel(job.id)
    ended.touch()
    assert (await fleet.ended(job, Status.CANCELLED)).attempts == 1
    assert pipes.ran() == ["one", "two"]
    assert await pipes.kept() == ["one"]


@pytest.mark.parametrize(("mode", "ran"), [("always", ["one", "two", "two"]), ("none", ["one", "two", "one", "two"])])
async def test_lost_workspace_goes_on_behind_the_latest_snapshot(
    fleet: Fleet, pipes: Pipes, mode: str, ran: list[str]
) -> None:
    """Proves P2: its supervisor is killed in the middle of a task, and all that ran with it."""
    gate = pipes.marker.with_name("gate")
    spec = {"env": {"MARKER": str(pipes.marker), "GATE": str(gate)}}
    waits = task("two", 'echo here; while [ ! -e "$GATE" ]; do sleep 0.05; done; echo two >> made')
    job = await pipes.submit(adds("one"), waits, spec=spec, snapshot=mode, max_attempts=2, retry={"base": 0, "cap": 0})
    fleet.start({"default": 1}, **SLOW)
    await fleet.says(job, "here")
    os.kill(fleet.supervisor_of(job), signal.SIGKILL)
    gate.touch()
    await fleet.ended(job, Status.SUCCEEDED)
    assert pipes.ran() == ran
    assert await pipes.statuses(job) == ["succeeded", "succeeded"]
    if mode == "always":
        assert await pipes.content("two") == "one\ntwo\n"


async def test_worker_that_sleeps_through_its_lease_moves_nothing(fleet: Fleet, pipes: Pipes) -> None:
    """Proves P2, L15, L6: it wakes with a restored tree in its hands, while the next task of its adopter runs."""
    await fleet.ended(await _known(fleet, pipes), Status.SUCCEEDED)
    gate = pipes.marker.with_name("gate")
    spec = {"env": {"MARKER": str(pipes.marker), "GATE": str(gate)}}
    waits = task("two", 'echo two >> made; echo here; while [ ! -e "$GATE" ]; do sleep 0.05; done; echo end >> made')
    job = await pipes.submit(adds("one"), waits, spec=spec, queue="a")
    victim = fleet.start({"a": 1}, Hook(step="restored", do="stop", job=job.id))
    await victim.stopped()
    await fleet.says(job, "here")
    victim.signal(signal.SIGCONT)
    again = await submit(pipes, "again", queue="a")
    await fleet.ended(again, Status.SUCCEEDED)
    gate.touch()
    await fleet.ended(job, Status.SUCCEEDED)
    assert await content(pipes, job) == "one\ntwo\nend\n"


async def _known(fleet: Fleet, pipes: Pipes) -> Job:
    """A first task that is known, and a worker that lives."""
    fleet.start({"other": 2})
    gate = pipes.marker.with_name("gate")
    spec = {"env": {"MARKER": str(pipes.marker), "GATE": str(gate)}}
    return await pipes.submit(adds("one"), spec=spec, queue="other")
