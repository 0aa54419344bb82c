"""Pipelines of processes, with a real worker: order, cache, locks, failures, stops, plans that change."""

import errno
import json
import os
import re
import subprocess
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from holdfast.errors import Invalid
from holdfast.model import Lease, Status
from holdfast.pipeline.snapshots import TEMPORARY, SnapshotFolders
from holdfast.runner.process_handle import ProcessHandle
from holdfast.runner.wire import Command
from holdfast.worker import supervisor_link
from tests.support.disks import MIB, disk, missing
from tests.support.in_process_workers import InProcessWorkers, eventually
from tests.support.pipelines import Pipelines, adds, task

pytestmark = pytest.mark.asyncio


@pytest.fixture
def pipelines(workers: InProcessWorkers, tmp_path: Path) -> Pipelines:
    return Pipelines(workers, tmp_path)


async def test_tasks_run_in_order_in_one_workspace(pipelines: Pipelines) -> None:
    """Proves P1, P7, E7."""
    workers = pipelines.workers
    async with workers.worker():
        job = await workers.ended(await pipelines.submit(adds("one"), adds("two"), adds("three")), Status.SUCCEEDED)
    assert pipelines.ran() == ["one", "two", "three"]
    assert (job.attempts, job.exit_code) == (1, 0)
    told = [(event.task, event.data["status"]) for event in await workers.events(job, "task") if "status" in event.data]
    assert told == [(name, status) for name in ("one", "two", "three") for status in ("running", "succeeded")]
    lines = [(event.task, line) for event in await workers.events(job, "log") for line in event.data["lines"]]
    assert lines == [
        ("one", "one"),
        *(("two", w) for w in ("one", "two")),
        *(("three", w) for w in ("one", "two", "three")),
    ]
    records = await pipelines.tasks(job)
    assert [(record.name, record.status, record.exit_code) for record in records] == [
        (name, "succeeded", 0) for name in ("one", "two", "three")
    ]
    for record in records:
        assert record.started_at is not None
        assert record.ended_at is not None
        assert record.started_at <= record.ended_at
    assert {record.snapshot for record in records} == {snapshot.id for snapshot in await pipelines.snapshots()}
    assert await pipelines.content("three") == "one\ntwo\nthree\n"
    assert workers.folders == []


async def test_end_of_a_task_does_not_include_its_copy(pipelines: Pipelines) -> None:
    """Proves P1."""
    workers, copied = pipelines.workers, []

    def slowly(step: str, lease: Lease) -> None:
        if step == "copy":
            time.sleep(1)  # Reason: this is the copy that takes long.
            copied.append(datetime.now(UTC))

    async with workers.worker(at=slowly):
        job = await workers.ended(await pipelines.submit(adds("one"), adds("two")), Status.SUCCEEDED)
    for record, copied_at in zip(await pipelines.tasks(job), copied, strict=True):
        assert record.started_at is not None
        assert record.ended_at is not None
        assert record.started_at <= record.ended_at < copied_at


async def test_second_job_starts_nothing(pipelines: Pipelines) -> None:
    """Proves P4."""
    workers = pipelines.workers
    async with workers.worker():
        await workers.ended(await pipelines.submit(adds("one"), adds("two")), Status.SUCCEEDED)
        again = await workers.ended(await pipelines.submit(adds("one"), adds("two")), Status.SUCCEEDED)
    assert pipelines.ran() == ["one", "two"]
    assert await pipelines.statuses(again) == ["cached", "cached"]
    assert again.attempts == 0
    assert len(await pipelines.snapshots()) == 2


async def test_pipeline_continues_after_its_latest_snapshot(pipelines: Pipelines) -> None:
    """Proves P2, P4: what is known is restored, not run."""
    workers = pipelines.workers
    async with workers.worker():
        await workers.ended(await pipelines.submit(adds("one"), adds("two"), adds("three")), Status.SUCCEEDED)
        other = await workers.ended(await pipelines.submit(adds("one"), adds("two"), adds("four")), Status.SUCCEEDED)
    assert pipelines.ran() == ["one", "two", "three", "four"]
    assert await pipelines.statuses(other) == ["cached", "cached", "succeeded"]
    assert await pipelines.content("four") == "one\ntwo\nfour\n"


@pytest.mark.parametrize(("mode", "kept"), [("always", ["one", "two"]), ("final", ["two"]), ("none", [])])
async def test_mode_says_what_is_kept(pipelines: Pipelines, mode: str, kept: list[str]) -> None:
    """Proves P7."""
    workers = pipelines.workers
    async with workers.worker():
        await workers.ended(await pipelines.submit(adds("one"), adds("two"), snapshot=mode), Status.SUCCEEDED)
    assert await pipelines.kept() == kept


async def test_first_failure_fails_the_job_and_keeps_nothing_of_it(pipelines: Pipelines) -> None:
    """Proves P1, P7. A resume continues after the stored tasks."""
    workers = pipelines.workers
    async with workers.worker():
        tasks = (adds("one"), task("two", 'test -e "$GATE"; echo two >> made'), adds("three"))
        spec = {"env": {"MARKER": str(pipelines.marker), "GATE": str(pipelines.marker.with_name("gate"))}}
        job = await workers.ended(await pipelines.submit(*tasks, spec=spec), Status.FAILED)
        assert (job.exit_code, job.error and job.error.code) == (1, "exit_nonzero")
        assert await pipelines.statuses(job) == ["succeeded", "failed", "pending"]
        assert await pipelines.kept() == ["one"]
        pipelines.marker.with_name("gate").touch()
        await workers.store.jobs.resume(job.id)
        await workers.ended(job, Status.SUCCEEDED)
    assert pipelines.ran() == ["one", "two", "two", "three"]
    assert await pipelines.statuses(job) == ["succeeded", "succeeded", "succeeded"]
    assert await pipelines.content("three") == "one\ntwo\nthree\n"


async def test_cancel_keeps_nothing_of_the_task_that_it_stops(pipelines: Pipelines) -> None:
    """Proves P7, C1."""
    workers = pipelines.workers
    async with workers.worker():
        job = await pipelines.submit(adds("one"), task("two", "echo here; sleep 600"), stop_grace=1)
        await workers.wait_for_log(job, "here")
        await workers.store.jobs.cancel(job.id)
        await workers.ended(job, Status.CANCELLED)
    assert await pipelines.statuses(job) == ["succeeded", "cancelled"]
    assert await pipelines.kept() == ["one"]
    assert workers.folders == []


async def test_resumed_pipeline_continues_after_its_stored_tasks(pipelines: Pipelines) -> None:
    """Proves C1, C5, P2: it was cancelled; what was done is not done again, and the cancel does not come back."""
    workers = pipelines.workers
    gate = pipelines.marker.with_name("gate")
    spec = {"env": {"MARKER": str(pipelines.marker), "GATE": str(gate)}}
    waits = task("three", 'cat made; echo here; while [ ! -e "$GATE" ]; do sleep 0.05; done; echo three >> made')
    async with workers.worker():
        job = await pipelines.submit(adds("one"), adds("two"), waits, adds("four"), spec=spec, stop_grace=0)
        await workers.wait_for_log(job, "here")
        await workers.store.jobs.cancel(job.id)
        await workers.ended(job, Status.CANCELLED)
        assert await pipelines.kept() == ["one", "two"]
        gate.touch()
        await workers.store.jobs.resume(job.id)
        await workers.ended(job, Status.SUCCEEDED)
    assert pipelines.ran() == ["one", "two", "three", "three", "four"]
    assert await pipelines.statuses(job) == ["succeeded"] * 4
    assert await pipelines.content("four") == "one\ntwo\nthree\nfour\n"


@pytest.mark.parametrize("whole", [True, False])
async def test_limits_of_time_hold_for_each_task_and_for_all(pipelines: Pipelines, whole: bool) -> None:
    """Proves P1, R8."""
    workers = pipelines.workers
    async with workers.worker():
        slow = task("two", "sleep 600") if whole else task("two", "sleep 600", timeout=0.5)
        job = await pipelines.submit(adds("one"), slow, timeout=8 if whole else None, stop_grace=0)
        job = await workers.ended(job, Status.TIMED_OUT)
    assert await pipelines.statuses(job) == ["succeeded", "timed_out"]
    assert await pipelines.kept() == ["one"]


async def test_four_jobs_at_once_build_once(pipelines: Pipelines) -> None:
    """Proves P5: the others wait, and start nothing."""
    workers = pipelines.workers
    async with workers.worker():
        jobs = [await pipelines.submit(adds("one"), task("two", "sleep 0.5; echo two >> made")) for _ in range(4)]
        for job in jobs:
            await workers.ended(job, Status.SUCCEEDED)
    assert pipelines.ran() == ["one", "two"]
    for statuses in zip(
        *[await pipelines.statuses(job) for job in jobs], strict=True
    ):  # Of one task, in all four jobs.
        assert sorted(statuses) == ["cached"] * 3 + ["succeeded"]
    assert len(await pipelines.snapshots()) == 2


async def test_waiter_builds_when_the_builder_is_cancelled(pipelines: Pipelines) -> None:
    """Proves P5: a lock falls with its lease."""
    workers = pipelines.workers
    async with workers.worker():
        gate = pipelines.marker.with_name("gate")
        spec = {"env": {"MARKER": str(pipelines.marker), "GATE": str(gate)}}
        tasks = [task("one", 'echo here; while [ ! -e "$GATE" ]; do sleep 0.05; done; echo one > made')]
        builder = await pipelines.submit(*tasks, spec=spec, stop_grace=0)
        await workers.wait_for_log(builder, "here")
        waiter = await pipelines.submit(*tasks, spec=spec)

        async def planned() -> bool:
            return bool(await workers.events(waiter, "task"))

        await eventually(planned, "the waiter has planned")
        await workers.store.jobs.cancel(builder.id)
        await workers.wait_for_log(waiter, "here")
        gate.touch()
        await workers.ended(waiter, Status.SUCCEEDED)
    assert pipelines.ran() == ["one", "one"]
    assert await pipelines.kept() == ["one"]


async def test_waiter_can_be_cancelled(pipelines: Pipelines) -> None:
    """Proves P5, J17, C1: without a start; and it says whom it waits for."""
    workers = pipelines.workers
    async with workers.worker():
        tasks = [task("one", "echo here; sleep 600")]
        builder = await pipelines.submit(*tasks, stop_grace=0)
        await workers.wait_for_log(builder, "here")
        waiter = await pipelines.submit(*tasks)

        async def planned() -> bool:
            return bool(await workers.events(waiter, "task"))

        await eventually(planned, "the waiter has planned")
        told = (await workers.store.explain.job(waiter.id)).reasons[-1]
        assert (told.jobs, told.message) == (
            (builder.id,), f"task one waits for job {builder.id}, which builds its snapshot",
        )  # fmt: skip
        assert [reason.about for reason in (await workers.store.explain.job(builder.id)).reasons] == ["status"]
        await workers.store.jobs.cancel(waiter.id)
        assert (await workers.ended(waiter, Status.CANCELLED)).attempts == 0
        await workers.store.jobs.cancel(builder.id)
        await workers.ended(builder, Status.CANCELLED)


async def test_files_reach_the_tasks_by_content(pipelines: Pipelines) -> None:
    """Proves P3, P4: a renamed file is the same file; another content is another task."""
    workers = pipelines.workers
    (pipelines.inputs / "a.txt").write_text("first")
    (pipelines.inputs / "b.txt").write_text("first")
    reads = ["sh", "-ec", 'echo read >> "$MARKER"; cat "$HOLDFAST_INPUTS"/*.txt > made; pwd > place']
    async with workers.worker():
        for name in ("a.txt", "b.txt"):
            tasks = [{"name": "read", "command": reads, "files": [name]}]
            job = await workers.ended(await pipelines.submit(*tasks), Status.SUCCEEDED)
        assert (await pipelines.statuses(job), pipelines.ran()) == (["cached"], ["read"])
        (pipelines.inputs / "b.txt").write_text("second")
        await workers.ended(await pipelines.submit(*tasks), Status.SUCCEEDED)
    assert pipelines.ran() == ["read", "read"]
    assert sorted([(pipelines.folder_of(one) / "made").read_text() for one in await pipelines.snapshots()]) == [
        "first",
        "second",
    ]


async def test_result_for_other_inputs_is_not_taken(pipelines: Pipelines) -> None:
    """Proves P3, P4: tasks read them in `request.json`."""
    workers = pipelines.workers
    reads = task("read", 'cat "$HOLDFAST_WORK_DIR/request.json" > made')
    async with workers.worker():
        for rows in (3, 4, 3):
            job = await workers.ended(await pipelines.submit(reads, inputs={"rows": rows}), Status.SUCCEEDED)
    assert (pipelines.ran(), await pipelines.statuses(job)) == (["read", "read"], ["cached"])
    made = [json.loads((pipelines.folder_of(one) / "made").read_text()) for one in await pipelines.snapshots()]
    assert sorted(inputs["rows"] for inputs in made) == [3, 4]


async def test_changed_file_is_planned_again_when_the_job_resumes(pipelines: Pipelines) -> None:
    """Proves P9."""
    workers = pipelines.workers
    source = pipelines.inputs / "script"
    source.write_text("exit 7")
    runs = {"name": "two", "command": ["sh", "-c", '. "$HOLDFAST_INPUTS/script"'], "files": ["script"]}
    async with workers.worker():
        job = await workers.ended(await pipelines.submit(adds("one"), runs), Status.FAILED)
        before = [record.snapshot for record in await pipelines.tasks(job)]
        source.write_text("echo two >> made")
        await workers.store.jobs.resume(job.id)
        await workers.ended(job, Status.SUCCEEDED)
    after = [record.snapshot for record in await pipelines.tasks(job)]
    assert (before[0], before[1] != after[1]) == (after[0], True)
    plans = [event.data for event in await workers.events(job, "task") if "plan" in event.data]
    assert [(plan["plan"], plan.get("replanned", False)) for plan in plans] == [(before[1], False), (after[1], True)]
    assert pipelines.ran() == ["one"]
    assert await pipelines.content("two") == "one\ntwo\n"


async def test_file_that_changes_between_plan_and_start_fails_the_job_clearly(pipelines: Pipelines) -> None:
    """Proves P3, P9: what would run is not what was planned. Nothing runs, and nothing is published."""
    workers = pipelines.workers
    source = pipelines.inputs / "word"
    source.write_text("first")

    def change(step: str, lease: Lease) -> None:
        if step == "locked":
            source.write_text("second")

    reads = task("one", 'cat "$HOLDFAST_INPUTS/word" > made', files=["word"])
    async with workers.worker(at=change):
        job = await workers.ended(await pipelines.submit(reads, max_attempts=3), Status.FAILED)
    assert job.error is not None
    assert (job.error.code, job.error.message) == (
        "contract_violation",
        "tasks[0].files[0]: word changed since the plan was made; submit or resume the job once more",
    )
    assert (pipelines.ran(), await pipelines.snapshots(), workers.folders) == ([], [], [])
    async with workers.worker():
        await workers.store.jobs.resume(job.id)
        await workers.ended(job, Status.SUCCEEDED)
    assert await pipelines.content("one") == "second"


async def test_snapshot_is_the_base_of_another_job(pipelines: Pipelines) -> None:
    """Proves P12."""
    workers = pipelines.workers
    async with workers.worker():
        first = await workers.ended(await pipelines.submit(adds("one"), adds("two")), Status.SUCCEEDED)
        base = (await pipelines.tasks(first))[-1].snapshot
        await workers.ended(await pipelines.submit(adds("three"), base=base), Status.SUCCEEDED)
        assert await pipelines.content("three") == "one\ntwo\nthree\n"
        unknown = await workers.ended(await pipelines.submit(adds("three"), base="f" * 64), Status.FAILED)
    assert unknown.error is not None
    assert unknown.error.message == f"base: there is no snapshot {'f' * 64}"
    assert unknown.attempts == 1


async def test_commands_to_the_supervisor_may_be_repeated(
    pipelines: Pipelines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proves P2, P12.

    If the worker or its database stalls between a command and its reply, the worker sends the command again.
    """
    workers = pipelines.workers
    monkeypatch.setattr(supervisor_link, "ACK_SECONDS", 0.0)
    async with workers.worker():
        first = await workers.ended(await pipelines.submit(adds("one"), adds("two")), Status.SUCCEEDED)
        base = (await pipelines.tasks(first))[-1].snapshot
        for n in range(5):
            await workers.ended(await pipelines.submit(adds(f"three {n}"), adds("four"), base=base), Status.SUCCEEDED)
            assert await pipelines.content(f"three {n}") == f"one\ntwo\nthree {n}\n"


async def test_snapshot_that_finds_no_room_fails_the_job_and_leaves_nothing(pipelines: Pipelines) -> None:
    """Proves P11."""
    workers = pipelines.workers
    workers.set(snapshots_max_bytes=1000)
    async with workers.worker():
        job = await workers.ended(
            await pipelines.submit(adds("small"), task("large", "head -c 2000 /dev/zero > big")), Status.FAILED
        )
        assert job.error is not None
        assert (job.error.code, await pipelines.kept()) == ("cache_full", ["small"])
        assert "HOLDFAST_SNAPSHOTS_MAX_BYTES is 1000" in job.error.message
        assert len(SnapshotFolders.below(workers.settings.shared).names()) == 1
        await workers.ended(await pipelines.submit(adds("small"), adds("other")), Status.SUCCEEDED)
    assert await pipelines.kept() == ["other", "small"]


@pytest.mark.skipif(missing("ext4") is not None, reason=missing("ext4") or "")
async def test_full_disk_fails_the_job_whatever_its_path_is_called(workers: InProcessWorkers, tmp_path: Path) -> None:
    """Proves P6, P11: a supervisor takes 256 bytes of a text, and not half a letter."""
    with disk(tmp_path, "ext4", 8 * MIB) as small:
        workers.set(shared_dir=small.joinpath(*["ü" * 100] * 3), disk_reserve=None)
        pipelines = Pipelines(workers, tmp_path)
        async with workers.worker():
            large = task("large", f"head -c {10 * MIB} /dev/urandom > big")
            job = await workers.ended(await pipelines.submit(adds("small"), large), Status.FAILED)
        assert job.error is not None
        assert (job.error.code, await pipelines.kept()) == ("cache_full", ["small"])
        assert job.error.message.startswith("No space left on device: free some, or remove snapshots")
        assert await pipelines.statuses(job) == ["succeeded", "succeeded"]
        folders = SnapshotFolders.below(workers.settings.shared)
        assert folders.names() == [one.folder for one in await pipelines.snapshots()]
        assert list((folders.root / TEMPORARY).iterdir()) == []


async def test_damaged_snapshot_is_built_again(pipelines: Pipelines) -> None:
    """Proves P6: verified when it is used."""
    workers = pipelines.workers
    async with workers.worker():
        await workers.ended(await pipelines.submit(adds("one"), adds("two")), Status.SUCCEEDED)
        (two,) = [one for one in await pipelines.snapshots() if one.task == "two"]
        (pipelines.folder_of(two) / "made").write_text("spoilt")
        job = await workers.ended(await pipelines.submit(adds("one"), adds("two"), adds("three")), Status.SUCCEEDED)
        (three,) = [one for one in await pipelines.snapshots() if one.task == "three"]
        (pipelines.folder_of(three) / "made").unlink()
        again = await workers.ended(await pipelines.submit(adds("one"), adds("two"), adds("three")), Status.SUCCEEDED)
    assert await pipelines.statuses(job) == ["cached", "succeeded", "succeeded"]
    assert await pipelines.statuses(again) == ["cached", "cached", "succeeded"], "also where nothing would have to run"
    assert pipelines.ran() == ["one", "two", "two", "three", "three"]
    assert await pipelines.content("three") == "one\ntwo\nthree\n"


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"files": ["nothing"]}, "tasks[0].files[0]: there is no file nothing in"),
        ({"files": ["../outside"]}, "tasks[0].files[0]: "),
    ],
)
async def test_pipeline_that_cannot_be_planned_fails_at_once(
    pipelines: Pipelines, asked: dict[str, object], message: str
) -> None:
    """Proves P10, R17: and nothing is published."""
    workers = pipelines.workers
    (pipelines.inputs.parent / "outside").write_text("")
    async with workers.worker():
        job = await workers.ended(await pipelines.submit(adds("one", **asked), max_attempts=3), Status.FAILED)
    assert job.error is not None
    assert job.error.message.startswith(message)
    assert (job.error.code, pipelines.ran(), await pipelines.snapshots()) == ("contract_violation", [], [])


BAD: list[tuple[dict[str, Any], str]] = [
    ({"tasks": [adds("one")], "connector": "mysql"}, "connector: "),
    ({"tasks": [adds("one")], "snapshot": "sometimes"}, "snapshot: "),
    ({"tasks": [adds("one")], "base": "abc"}, "base: "),
    ({"tasks": [{"name": "one"}]}, "tasks[0]: needs one of: command, sql"),
    ({"tasks": [adds("one"), adds("one")]}, "tasks[1].name: 'one' is the name of an earlier task"),
    ({"tasks": [{"name": "one", "sql": "one.sql"}]}, "tasks[0].sql: connector files has no server"),
    ({"tasks": [{"name": "one", "command": "echo"}]}, "tasks[0].command: "),
    ({"tasks": []}, "tasks: "),
    ({"tasks": "one"}, "tasks: "),
    ({"tasks": None}, "tasks: "),
    ({"tasks": [adds("one")], "image": "none"}, "spec.image: "),
]


@pytest.mark.parametrize("kind", ["postgres"])
async def test_bad_pipelines_that_came_by_sql_fail_with_the_field(pipelines: Pipelines) -> None:
    """Proves P10: nobody looked at them before their worker. They can be shown before and after."""
    workers = pipelines.workers
    jobs = json.dumps([{"runner": "process", "spec": spec, "max_attempts": 3} for spec, _ in BAD])
    sql = await asyncpg.connect(workers.settings.database_url)
    ids = [str(row["id"]) for row in await sql.fetch("SELECT id FROM holdfast.holdfast_submit($1::jsonb)", jobs)]
    await sql.close()
    for job in ids:
        await workers.store.tasks.list(job)
    async with workers.worker():
        for job, (_, message) in zip(ids, BAD, strict=True):
            error = (await workers.ended(job, Status.FAILED)).error
            assert error is not None
            assert (error.code, error.message[: len(message)]) == ("contract_violation", message)
            assert await workers.events(job, "lease") == []
            await workers.store.tasks.list(job)
    assert pipelines.ran() == []


async def test_command_that_did_not_fit_on_a_full_disk_is_retried(
    pipelines: Pipelines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proves P2: the job waits for room, and does not fail by it."""
    tell = ProcessHandle.send
    refused: list[str] = []

    async def no_room(self: ProcessHandle, command: Command) -> str:
        if len(refused) < 2:
            refused.append(command.verb)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return await tell(self, command)

    monkeypatch.setattr(ProcessHandle, "send", no_room)
    async with pipelines.workers.worker():
        job = await pipelines.workers.ended(await pipelines.submit(adds("one"), adds("two")), Status.SUCCEEDED)
    assert (refused, await pipelines.statuses(job), pipelines.ran()) == (
        ["go", "go"],
        ["succeeded"] * 2,
        ["one", "two"],
    )


@pytest.mark.skipif(missing("btrfs") is not None, reason=str(missing("btrfs")))
async def test_workspace_on_btrfs_is_copied_in_one_step_from_the_first_task_on(
    workers: InProcessWorkers, tmp_path: Path
) -> None:
    """Proves P6, P11: also a fresh one, which no snapshot was restored to; and nothing of it is left."""
    with disk(tmp_path, "btrfs", 256 * MIB) as mounted:
        workers.set(data_dir=mounted / "data", disk_reserve=None)
        pipelines = Pipelines(workers, tmp_path)
        async with workers.worker():
            job = await workers.ended(await pipelines.submit(adds("one"), adds("two")), Status.SUCCEEDED)
            more = await workers.ended(await pipelines.submit(adds("one"), adds("three")), Status.SUCCEEDED)
        assert (await pipelines.statuses(job), await pipelines.statuses(more)) == (
            ["succeeded"] * 2,
            ["cached", "succeeded"],
        )
        assert await pipelines.content("three") == "one\nthree\n"
        shown = [subvolume("show", pipelines.folder_of(one)) for one in await pipelines.snapshots()]
        assert len(shown) == 3
        assert not [text for text in shown if re.search(r"Parent UUID:\s+-", text)], "each was made from another one"
        for snapshot in await pipelines.snapshots():
            SnapshotFolders.below(workers.settings.shared).remove(snapshot.folder)
        assert (workers.folders, SnapshotFolders.below(workers.settings.shared).names()) == ([], [])
        assert subvolume("list", mounted) == ""


def subvolume(verb: str, folder: Path) -> str:
    """What btrfs says of a folder; to show one that is no subvolume is an error."""
    return subprocess.run(["btrfs", "subvolume", verb, folder], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("kind", ["postgres"])
async def test_uploads_are_refused_also_by_a_worker(pipelines: Pipelines) -> None:
    """Proves P3: they are in no identity; the result of one upload would stand for that of another."""
    workers = pipelines.workers
    with pytest.raises(Invalid, match="put files below the sources"):
        await pipelines.submit(adds("one"), uploads=["an upload"])
    stored = await pipelines.submit(adds("one"))
    sql = await asyncpg.connect(workers.settings.database_url)
    uploads = json.dumps({"uploads": ["an upload"]})
    await sql.execute("UPDATE holdfast.specs SET policy = coalesce(policy, '{}') || $1::jsonb", uploads)
    await sql.close()
    async with workers.worker():
        job = await workers.ended(stored, Status.FAILED)
    assert (job.error and job.error.code, job.error and job.error.message[:8]) == ("contract_violation", "uploads:")
    assert await pipelines.snapshots() == []


async def test_pipeline_of_a_draining_worker_is_adopted_with_its_plan(pipelines: Pipelines) -> None:
    """Proves P2, P9, C9: in the middle of a task. A file that changes meanwhile changes nothing for what runs."""
    workers = pipelines.workers
    gate = pipelines.marker.with_name("gate")
    source = pipelines.inputs / "word"
    source.write_text("three")
    spec = {"env": {"MARKER": str(pipelines.marker), "GATE": str(gate)}}
    waits = task("two", 'echo here; while [ ! -e "$GATE" ]; do sleep 0.05; done; echo two >> made')
    reads = task("three", 'cat "$HOLDFAST_INPUTS/word" >> made', files=["word"])
    async with workers.worker():
        job = await pipelines.submit(adds("one"), waits, reads, spec=spec)
        await workers.wait_for_log(job, "here")
        planned = [record.snapshot for record in await pipelines.tasks(job)]
    source.write_text("another")
    gate.touch()
    async with workers.worker():
        job = await workers.ended(job, Status.SUCCEEDED)
    assert pipelines.ran() == ["one", "two", "three"]
    assert job.attempts == 1
    assert [record.snapshot for record in await pipelines.tasks(job)] == planned
    assert {snapshot.id for snapshot in await pipelines.snapshots()} == {*planned}
    assert await pipelines.content("three") == "one\ntwo\nthree"
