"""Results and artifacts of pipelines: from the cache, and after a loss, the same as from a run."""

import contextlib
import hashlib
import os
import signal
import sqlite3
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from holdfast.model import Lease, Status
from holdfast.pipeline.snapshots import SnapshotFolders
from holdfast.store.store import sqlite_path
from tests.support.crashing_worker import Hook
from tests.support.in_process_workers import InProcessWorkers, eventually
from tests.support.pipelines import Pipelines, expected, leaves, left_by, task
from tests.support.worker_processes import WorkerProcesses

SLOW: dict[str, Any] = {"lease_ttl": 60.0, "heartbeat_interval": 1.0, "adopt_backoff": 0.1}
RETRY: dict[str, Any] = {"max_attempts": 2, "retry": {"base": 0, "cap": 0}}


@pytest.mark.parametrize("mode", ["always", "final", "none"])
async def test_second_run_gives_the_result_and_artifacts_of_the_first(pipelines: Pipelines, mode: str) -> None:
    """Proves D1."""
    workers = pipelines.workers
    tasks = (leaves("one", "a", "both"), leaves("two", "deep/b", "both"))
    async with workers.worker():
        first = await workers.ended(await pipelines.submit(*tasks, snapshot=mode), Status.SUCCEEDED)
        again = await workers.ended(await pipelines.submit(*tasks, snapshot=mode), Status.SUCCEEDED)
    assert pipelines.ran() == ["one", "two"] * (2 if mode == "none" else 1)
    wanted = ({"by": "two"}, expected(a="one", both="two", deep_b="two"))
    assert await left_by(workers, first) == wanted
    assert await left_by(workers, again) == wanted


async def test_outputs_of_later_tasks_are_added_to_those_of_a_cached_one(pipelines: Pipelines) -> None:
    """Proves D1: later tasks win where paths collide, also a file over a folder and a folder over a file."""
    workers = pipelines.workers
    one = leaves("one", "a", "both", "file", "folder/inner")
    async with workers.worker():
        await workers.ended(await pipelines.submit(one), Status.SUCCEEDED)
        more = await pipelines.submit(one, leaves("two", "b", "both", "file/now", "folder", result=False))
        await workers.ended(more, Status.SUCCEEDED)
        again = await pipelines.submit(one, leaves("two", "b", "both", "file/now", "folder", result=False))
        await workers.ended(again, Status.SUCCEEDED)
    wanted = ({"by": "one"}, expected(a="one", b="two", both="two", file_now="two", folder="two"))
    assert await left_by(workers, more) == wanted
    assert await left_by(workers, again) == wanted
    assert pipelines.ran() == ["one", "two"]


async def test_supervisor_killed_in_a_later_task_takes_nothing_from_the_earlier_ones(
    processes: WorkerProcesses, tmp_path: Path
) -> None:
    """Proves D2: the first task is not repeated, and its result and files are there."""
    pipelines = Pipelines(processes, tmp_path)
    gate = pipelines.marker.with_name("gate")
    waits = task("two", f"echo here; while [ ! -e {gate} ]; do sleep 0.05; done")
    job = await pipelines.submit(leaves("one", "a", "deep/b"), waits, **RETRY)
    processes.start({"default": 1}, **SLOW)
    await processes.wait_for_log(job, "here")
    os.kill(processes.supervisor_of(job), signal.SIGKILL)
    gate.touch()
    ended = await processes.ended(job, Status.SUCCEEDED)
    assert (pipelines.ran(), ended.attempts) == (["one", "two", "two"], 2)
    assert await left_by(processes, job) == ({"by": "one"}, expected(a="one", deep_b="one"))


async def test_snapshot_that_goes_later_takes_nothing_from_finished_jobs(pipelines: Pipelines) -> None:
    """Proves D1: a job that found all of it known has copies of its own."""
    workers = pipelines.workers
    async with workers.worker():
        await workers.ended(await pipelines.submit(leaves("one", "a")), Status.SUCCEEDED)
        again = await workers.ended(await pipelines.submit(leaves("one", "a")), Status.SUCCEEDED)
        (stored,) = await pipelines.snapshots()
        removed = await workers.store.snapshots.remove(stored.id, tenant="default")
        assert [one.id for one in removed.snapshots] == [stored.id]
    folders = SnapshotFolders.below(workers.settings.shared)
    folders.remove(stored.folder)
    assert list(folders.root.glob("[!.]*")) == []
    assert await left_by(workers, again) == ({"by": "one"}, expected(a="one"))


async def test_snapshot_that_goes_between_the_hit_and_the_copy_is_built_again(pipelines: Pipelines) -> None:
    """Proves D1: removed by force at the very moment."""
    workers = pipelines.workers
    async with workers.worker():
        await workers.ended(await pipelines.submit(leaves("one", "a")), Status.SUCCEEDED)
    (stored,) = await pipelines.snapshots()
    removed: list[str] = []

    def remove(step: str, lease: Lease) -> None:
        if step == "reused" and not removed:
            removed.append(stored.folder)
            SnapshotFolders.below(workers.settings.shared).remove(stored.folder)

    async with workers.worker(at=remove):
        job = await workers.ended(await pipelines.submit(leaves("one", "a")), Status.SUCCEEDED)
    assert (removed, pipelines.ran()) == ([stored.folder], ["one", "one"])
    assert await left_by(workers, job) == ({"by": "one"}, expected(a="one"))


async def test_base_snapshot_provides_its_outputs(pipelines: Pipelines) -> None:
    """Proves D1: a task has the same outputs after a base as after the tasks that made the base."""
    workers = pipelines.workers
    async with workers.worker():
        first = await workers.ended(await pipelines.submit(leaves("one", "a")), Status.SUCCEEDED)
        base = (await pipelines.tasks(first))[-1].snapshot
        two = leaves("two", "b", result=False)
        ran = await workers.ended(await pipelines.submit(two, base=base), Status.SUCCEEDED)
        cached = await workers.ended(await pipelines.submit(two, base=base), Status.SUCCEEDED)
        whole = await workers.ended(await pipelines.submit(leaves("one", "a"), two), Status.SUCCEEDED)
    assert pipelines.ran() == ["one", "two"]
    for job in (ran, cached, whole):
        assert await left_by(workers, job) == ({"by": "one"}, expected(a="one", b="two"))


@pytest.mark.parametrize("rest", [0, 1])
async def test_tasks_stored_by_another_job_meanwhile_replace_ours(
    pipelines: Pipelines, tmp_path: Path, rest: int
) -> None:
    """Proves D1: in the middle of an attempt, the next tasks are found known: the rest of them, or all but one."""
    workers = pipelines.workers
    gate, first = tmp_path / "gate", tmp_path / "first"
    waits = f"if mkdir {first}; then echo here; while [ ! -e {gate} ]; do sleep 0.05; done; fi"
    own = 'echo > "$HOLDFAST_WORK_DIR/output/$HOLDFAST_JOB_ID"; '
    tasks = [leaves("one", "a", "both", "last", then=own + waits), leaves("two", "both")]
    more = [leaves("three", "last", "c", result=False)][:rest]
    async with workers.worker():
        slow = await pipelines.submit(*tasks, *more, snapshot="none")
        await workers.wait_for_log(slow, "here")
        fast = await workers.ended(await pipelines.submit(*tasks), Status.SUCCEEDED)
        gate.touch()
        await workers.ended(slow, Status.SUCCEEDED)
    assert (pipelines.ran()[:3], await pipelines.statuses(slow)) == (
        ["one", "one", "two"],
        ["succeeded", "cached", *["succeeded"] * rest],
    )
    wanted = expected(a="one", both="two", last="one") | {fast.id: (1, hashlib.sha256(b"\n").hexdigest())}
    assert await left_by(workers, fast) == ({"by": "two"}, wanted)
    assert await left_by(workers, slow) == ({"by": "two"}, wanted | (expected(last="three", c="three") if rest else {}))


async def test_task_that_reports_failure_is_not_known(pipelines: Pipelines) -> None:
    """Proves D1, P7: a second job fails as the first one did, and does not succeed without a result."""
    workers = pipelines.workers
    says = """echo '{"version": 1, "status": "failed", "error": {"code": "no_luck", "message": "not today"}}' """
    tasks = (leaves("one", "a"), task("two", says + '> "$HOLDFAST_WORK_DIR/result.json"'))
    async with workers.worker():
        for _ in range(2):
            job = await workers.ended(await pipelines.submit(*tasks), Status.FAILED)
            assert job.error is not None
            assert (job.error.code, job.error.message) == ("no_luck", "not today")
    assert (pipelines.ran(), await pipelines.kept()) == (["one", "two", "two"], ["one"])


async def test_task_that_breaks_the_contract_is_not_known(pipelines: Pipelines) -> None:
    """Proves D1, P7: what cannot be collected is not stored."""
    workers = pipelines.workers
    breaks = task("two", 'echo nonsense > "$HOLDFAST_WORK_DIR/result.json"')
    async with workers.worker():
        for _ in range(2):
            job = await workers.ended(await pipelines.submit(leaves("one", "a"), breaks), Status.FAILED)
            assert job.error is not None
            assert job.error.code == "contract_violation"
    assert (pipelines.ran(), await pipelines.kept()) == (["one", "two", "two"], ["one"])


async def test_caps_hold_for_all_tasks_together(pipelines: Pipelines) -> None:
    """Proves D1: also where a part of the files comes from the cache."""
    workers = pipelines.workers
    workers.set(artifact_max_bytes=1500)
    big = task("one", 'head -c 1000 /dev/zero > "$HOLDFAST_WORK_DIR/output/one"')
    more = task("two", 'head -c 1000 /dev/zero > "$HOLDFAST_WORK_DIR/output/two"')
    async with workers.worker():
        await workers.ended(await pipelines.submit(big), Status.SUCCEEDED)
        job = await workers.ended(await pipelines.submit(big, more), Status.FAILED)
    assert job.error is not None
    assert job.error.code == "contract_violation"
    assert (pipelines.ran(), await pipelines.kept()) == (["one", "two"], ["one"])


async def test_job_that_gives_up_does_not_succeed_by_an_earlier_result(pipelines: Pipelines) -> None:
    """Proves P11: the result that an earlier task reported says nothing of the snapshot that found no room."""
    workers = pipelines.workers
    workers.set(snapshots_max_bytes=1000)
    async with workers.worker():
        job = await pipelines.submit(leaves("one"), task("large", "head -c 2000 /dev/zero > big"))
        job = await workers.ended(job, Status.FAILED)
    assert job.error is not None
    assert (job.error.code, job.result) == ("cache_full", None)


async def test_tenants_share_no_outputs(pipelines: Pipelines) -> None:
    """Proves D1, P12."""
    workers = pipelines.workers
    async with workers.worker():
        await workers.ended(await pipelines.submit(leaves("one", "a")), Status.SUCCEEDED)
        body = {"runner": "process", "spec": {"env": {"MARKER": str(pipelines.marker)}}, "tasks": [leaves("one", "a")]}
        other = await workers.store.jobs.submit(body, tenant="other")

        async def over() -> bool:
            return (await workers.store.jobs.get(other.id, tenant="other")).status.terminal

        await eventually(over, "the other tenant's job ends")
    assert pipelines.ran() == ["one", "one"]


@pytest.mark.parametrize("value", ["hunter2secret", "another value"])
async def test_secrets_are_masked_in_known_results_as_they_are_now(
    pipelines: Pipelines, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    """Proves D1: the row has no secret, a known result is masked once more, and the names are part of the identity."""
    workers = pipelines.workers
    monkeypatch.setenv("HOLDFAST_SECRET_PASSWORD", "hunter2secret")
    script = """printf '{"version": 1, "result": ["%s", "another value"]}' "$PASSWORD" """
    tells = task("one", script + '> "$HOLDFAST_WORK_DIR/result.json"')
    async with workers.worker():
        first = await workers.ended(await pipelines.submit(tells, secrets=["PASSWORD"]), Status.SUCCEEDED)
        monkeypatch.setenv("HOLDFAST_SECRET_PASSWORD", value)
        again = await workers.ended(await pipelines.submit(tells, secrets=["PASSWORD"]), Status.SUCCEEDED)
        monkeypatch.delenv("HOLDFAST_SECRET_PASSWORD")
        gone = await workers.ended(await pipelines.submit(tells, secrets=["PASSWORD"]), Status.FAILED)
        without = await workers.ended(await pipelines.submit(tells), Status.SUCCEEDED)
    assert (await workers.get(first)).result == ["***", "another value"]
    assert (await workers.get(again)).result == ["***", "***" if value == "another value" else "another value"]
    assert gone.error is not None
    assert gone.error.message.startswith("secret PASSWORD is not set on this worker: set HOLDFAST_SECRET_PASSWORD")
    assert (without.result, pipelines.ran()) == (["", "another value"], ["one", "one"])


DYING = ["inherited", "placed", "ending", "exited", "collected", "gathered", "classified"]
"""From the copy of known outputs to the end of a job that adds to them."""


async def test_worker_killed_with_known_outputs_in_its_hands_loses_none(
    processes: WorkerProcesses, tmp_path: Path
) -> None:
    """Proves D1, D2: the adopter has the outputs of the task that is not repeated, though its snapshot is gone."""
    pipelines = Pipelines(processes, tmp_path)
    maker = processes.start({"other": 1}, **SLOW)
    for step in DYING:
        await processes.ended(await pipelines.submit(leaves("one", "a", "both", step), queue="other"), Status.SUCCEEDED)
    maker.kill()
    jobs = {
        step: await pipelines.submit(
            leaves("one", "a", "both", step), leaves("two", "both", "b", result=False), snapshot="none", queue=step
        )
        for step in DYING
    }
    victims = {
        step: processes.start({step: 1}, Hook(step=step, do="kill", job=jobs[step].id), adopts=False, **SLOW)
        for step in DYING
    }
    for step, victim in victims.items():
        assert await victim.dead() == -signal.SIGKILL, (step, victim.log)
    kept = {snapshot.id for snapshot in await pipelines.snapshots()}
    for step in DYING[1:]:
        (first, _) = await pipelines.tasks(jobs[step])
        assert first.snapshot in kept
        await processes.store.snapshots.remove(first.snapshot, tenant="default", force=True)
    processes.start(dict.fromkeys(DYING, 1), **SLOW)
    for step, job in jobs.items():
        ended = await processes.ended(job, Status.SUCCEEDED)
        files = expected(**{"a": "one", "b": "two", "both": "two", step: "one"})
        assert (step, await left_by(processes, job), ended.attempts) == (step, ({"by": "one"}, files), 1)
    assert pipelines.ran() == ["one"] * len(DYING) + ["two"] * len(DYING)


@pytest.mark.parametrize("step", ["ending", "collected"])
async def test_worker_killed_when_the_rest_was_known_loses_nothing(
    processes: WorkerProcesses, tmp_path: Path, step: str
) -> None:
    """Proves D1: also where its supervisor has ended, and the snapshot is gone by then."""
    pipelines = Pipelines(processes, tmp_path)
    gate, first = tmp_path / "gate", tmp_path / "first"
    waits = f"if mkdir {first}; then echo here; while [ ! -e {gate} ]; do sleep 0.05; done; fi"
    tasks = [leaves("one", "a", "both", then=waits), leaves("two", "both")]
    job = await pipelines.submit(*tasks, snapshot="none", queue="a")
    victim = processes.start({"a": 1}, Hook(step=step, do="kill", job=job.id), **SLOW)
    await processes.wait_for_log(job, "here")
    processes.start({"other": 1}, **SLOW)
    await processes.ended(await pipelines.submit(*tasks, snapshot="final", queue="other"), Status.SUCCEEDED)
    gate.touch()
    assert await victim.dead() == -signal.SIGKILL, victim.log
    if step == "collected":
        (stored,) = await pipelines.snapshots()
        await processes.store.snapshots.remove(stored.id, tenant="default", force=True)
    processes.start({"a": 1}, **SLOW)
    await processes.ended(job, Status.SUCCEEDED)
    assert pipelines.ran() == ["one", "one", "two"]
    assert await left_by(processes, job) == ({"by": "two"}, expected(a="one", both="two"))


async def _forget_outputs(workers: InProcessWorkers) -> None:
    """Make all snapshots look as if an older version had made them."""
    url = workers.settings.database_url or ""
    if url.startswith("sqlite"):
        with contextlib.closing(sqlite3.connect(sqlite_path(url), timeout=60)) as database, database:
            database.execute("UPDATE snapshots SET outputs = NULL")
        return
    connection = await asyncpg.connect(url)
    await connection.execute("UPDATE holdfast.snapshots SET outputs = NULL")
    await connection.close()


async def test_snapshot_without_outputs_is_built_again_and_may_be_a_base(pipelines: Pipelines) -> None:
    """Proves D1: an older version recorded none, so its snapshot does not stand for a run."""
    workers = pipelines.workers
    async with workers.worker():
        first = await workers.ended(await pipelines.submit(leaves("one", "a")), Status.SUCCEEDED)
        await _forget_outputs(workers)
        base = (await pipelines.tasks(first))[-1].snapshot
        after = await workers.ended(await pipelines.submit(leaves("two", "b"), base=base), Status.SUCCEEDED)
        again = await workers.ended(await pipelines.submit(leaves("one", "a")), Status.SUCCEEDED)
    assert pipelines.ran() == ["one", "two", "one"]
    assert await left_by(workers, after) == ({"by": "two"}, expected(b="two"))
    assert await left_by(workers, again) == ({"by": "one"}, expected(a="one"))


@pytest.mark.parametrize("spoilt", ["shorter", "other content", "gone"])
@pytest.mark.parametrize("more", [0, 1])
async def test_damaged_outputs_are_built_again(pipelines: Pipelines, spoilt: str, more: int) -> None:
    """Proves D1, P6: found when they are looked at, or by their digest when they are copied."""
    workers = pipelines.workers
    async with workers.worker():
        await workers.ended(await pipelines.submit(leaves("one", "a")), Status.SUCCEEDED)
        (stored,) = await pipelines.snapshots()
        file = SnapshotFolders.below(workers.settings.shared).outputs_of(stored.folder) / "a"
        if spoilt == "gone":
            file.unlink()
        else:
            file.write_text("two\n" if spoilt == "other content" else "")
        tasks = [leaves("one", "a"), leaves("two", "b")][: 1 + more]
        again = await workers.ended(await pipelines.submit(*tasks), Status.SUCCEEDED)
    assert pipelines.ran() == ["one", "one", "two"][: 2 + more]
    assert (await left_by(workers, again))[1] == expected(a="one") | (expected(b="two") if more else {})


async def test_outputs_count_against_the_limit_of_the_store(pipelines: Pipelines) -> None:
    """Proves P11: they are evicted with their snapshot, and one that finds no room fails the job."""
    workers = pipelines.workers
    workers.set(snapshots_max_bytes=1000)
    async with workers.worker():
        await workers.ended(await pipelines.submit(leaves("one", "a")), Status.SUCCEEDED)
        (stored,) = await pipelines.snapshots()
        assert stored.size == len("one\n")
        large = task("large", 'head -c 2000 /dev/zero > "$HOLDFAST_WORK_DIR/output/big"')
        job = await workers.ended(await pipelines.submit(large), Status.FAILED)
    assert job.error is not None
    assert (job.error.code, await pipelines.kept()) == ("cache_full", ["one"])
    folders = SnapshotFolders.below(workers.settings.shared)
    assert [path.name for path in folders.root.glob("*.outputs")] == [f"{stored.folder}.outputs"]
    assert folders.sweep((), grace=0.0) == 1
    assert list(folders.root.glob("[!.]*")) == []


async def test_another_host_has_the_outputs_too(processes: WorkerProcesses, tmp_path: Path) -> None:
    """Proves D1: they are in the shared folder, as the snapshots are."""
    pipelines = Pipelines(processes, tmp_path)
    tasks = (leaves("one", "a"), leaves("two", "b", result=False))
    processes.start({"a": 1}, host="a", **SLOW)
    processes.start({"b": 1}, host="b", **SLOW)
    await processes.ended(await pipelines.submit(tasks[0], queue="a"), Status.SUCCEEDED)
    part = await processes.ended(await pipelines.submit(*tasks, queue="b"), Status.SUCCEEDED)
    known = await processes.ended(await pipelines.submit(*tasks, queue="a"), Status.SUCCEEDED)
    assert pipelines.ran() == ["one", "two"]
    for job in (part, known):
        assert await left_by(processes, job) == ({"by": "one"}, expected(a="one", b="two"))
