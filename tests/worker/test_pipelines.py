"""Pipelines of processes, with a real worker: order, cache, locks, failures, stops, plans that change."""

import errno
import json
import os
import re
import subprocess
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from holdfast.errors import Invalid
from holdfast.model import Lease, Status
from holdfast.pipeline.snapshots import TEMPORARY, Folders
from holdfast.runner.process import Process
from holdfast.runner.wire import Command
from holdfast.worker import pipeline_execution
from tests.support.disks import MIB, disk, missing
from tests.support.in_process_worker import Rig, eventually
from tests.support.pipelines import Pipes, adds, task

pytestmark = pytest.mark.asyncio


@pytest.fixture
def pipes(rig: Rig, tmp_path: Path) -> Pipes:
    return Pipes(rig, tmp_path)


async def test_tasks_run_in_order_in_one_workspace(pipes: Pipes) -> None:
    """Proves P1, P7, E7."""
    rig = pipes.rig
    async with rig.worker():
        job = await rig.ended(await pipes.submit(adds("one"), adds("two"), adds("three")), Status.SUCCEEDED)
    assert pipes.ran() == ["one", "two", "three"]
    assert (job.attempts, job.exit_code) == (1, 0)
    told = [(event.task, event.data["status"]) for event in await rig.events(job, "task") if "status" in event.data]
    assert told == [(name, status) for name in ("one", "two", "three") for status in ("running", "succeeded")]
    lines = [(event.task, line) for event in await rig.events(job, "log") for line in event.data["lines"]]
    assert lines == [
        ("one", "one"),
        *(("two", w) for w in ("one", "two")),
        *(("three", w) for w in ("one", "two", "three")),
    ]
    records = await pipes.tasks(job)
    assert [(record.name, record.status, record.exit_code) for record in records] == [
        (name, "succeeded", 0) for name in ("one", "two", "three")
    ]
    for record in records:
        assert record.started_at is not None
        assert record.ended_at is not None
        assert record.started_at <= record.ended_at
    assert {record.snapshot for record in records} == {snapshot.id for snapshot in await pipes.snapshots()}
    assert await pipes.content("three") == "one\ntwo\nthree\n"
    assert rig.folders == []


async def test_task_ends_when_it_ends_however_long_its_copy_takes(pipes: Pipes) -> None:
    """Proves P1."""
    rig, copied = pipes.rig, []

    def slowly(step: str, lease: Lease) -> None:
        if step == "copy":
            copied.append(datetime.now(UTC))
            time.sleep(1)  # A copy takes time, and that is what this is about.

    async with rig.worker(at=slowly):
        job = await rig.ended(await pipes.submit(adds("one"), adds("two")), Status.SUCCEEDED)
    for record, began in zip(await pipes.tasks(job), copied, strict=True):
        assert record.started_at is not None
        assert record.ended_at is not None
        assert record.started_at <= record.ended_at < began + timedelta(seconds=0.5)


async def test_second_job_starts_nothing(pipes: Pipes) -> None:
    """Proves P4."""
    rig = pipes.rig
    async with rig.worker():
        await rig.ended(await pipes.submit(adds("one"), adds("two")), Status.SUCCEEDED)
        again = await rig.ended(await pipes.submit(adds("one"), adds("two")), Status.SUCCEEDED)
    assert pipes.ran() == ["one", "two"]
    assert await pipes.statuses(again) == ["cached", "cached"]
    assert again.attempts == 0
    assert len(await pipes.snapshots()) == 2


async def test_chain_goes_on_behind_its_latest_snapshot(pipes: Pipes) -> None:
    """Proves P2, P4: what is known is restored, not run."""
    rig = pipes.rig
    async with rig.worker():
        await rig.ended(await pipes.submit(adds("one"), adds("two"), adds("three")), Status.SUCCEEDED)
        other = await rig.ended(await pipes.submit(adds("one"), adds("two"), adds("four")), Status.SUCCEEDED)
    assert pipes.ran() == ["one", "two", "three", "four"]
    assert await pipes.statuses(other) == ["cached", "cached", "succeeded"]
    assert await pipes.content("four") == "one\ntwo\nfour\n"


@pytest.mark.parametrize(("mode", "kept"), [("always", ["one", "two"]), ("final", ["two"]), ("none", [])])
async def test_mode_says_what_is_kept(pipes: Pipes, mode: str, kept: list[str]) -> None:
    """Proves P7."""
    rig = pipes.rig
    async with rig.worker():
        await rig.ended(await pipes.submit(adds("one"), adds("two"), snapshot=mode), Status.SUCCEEDED)
    assert await pipes.kept() == kept


async def test_first_failure_fails_the_job_and_keeps_nothing_of_it(pipes: Pipes) -> None:
    """Proves P1, P7. A resume goes on behind what was kept."""
    rig = pipes.rig
    async with rig.worker():
        tasks = (adds("one"), task("two", 'test -e "$GATE"; echo two >> made'), adds("three"))
        spec = {"env": {"MARKER": str(pipes.marker), "GATE": str(pipes.marker.with_name("gate"))}}
        job = await rig.ended(await pipes.submit(*tasks, spec=spec), Status.FAILED)
        assert (job.exit_code, job.error and job.error.code) == (1, "exit_nonzero")
        assert await pipes.statuses(job) == ["succeeded", "failed", "pending"]
        assert await pipes.kept() == ["one"]
        pipes.marker.with_name("gate").touch()
        await rig.store.jobs.resume(job.id)
        await rig.ended(job, Status.SUCCEEDED)
    assert pipes.ran() == ["one", "two", "two", "three"]
    assert await pipes.statuses(job) == ["succeeded", "succeeded", "succeeded"]
    assert await pipes.content("three") == "one\ntwo\nthree\n"


async def test_cancel_keeps_nothing_of_the_task_that_it_stops(pipes: Pipes) -> None:
    """Proves P7, C1."""
    rig = pipes.rig
    async with rig.worker():
        job = await pipes.submit(adds("one"), task("two", "echo here; sleep 600"), stop_grace=1)
        await rig.says(job, "here")
        await rig.store.jobs.cancel(job.id)
        await rig.ended(job, Status.CANCELLED)
    assert await pipes.statuses(job) == ["succeeded", "cancelled"]
    assert await pipes.kept() == ["one"]
    assert rig.folders == []


async def test_resumed_pipeline_goes_on_behind_what_it_had_kept(pipes: Pipes) -> None:
    """Proves C1, C5, P2: it was cancelled; what was done is not done again, and the cancel does not come back."""
    rig = pipes.rig
    gate = pipes.marker.with_name("gate")
    spec = {"env": {"MARKER": str(pipes.marker), "GATE": str(gate)}}
    waits = task("three", 'cat made; echo here; while [ ! -e "$GATE" ]; do sleep 0.05; done; echo three >> made')
    async with rig.worker():
        job = await pipes.submit(adds("one"), adds("two"), waits, adds("four"), spec=spec, stop_grace=0)
        await rig.says(job, "here")
        await rig.store.jobs.cancel(job.id)
        await rig.ended(job, Status.CANCELLED)
        assert await pipes.kept() == ["one", "two"]
        gate.touch()
        await rig.store.jobs.resume(job.id)
        await rig.ended(job, Status.SUCCEEDED)
    assert pipes.ran() == ["one", "two", "three", "three", "four"]
    assert await pipes.statuses(job) == ["succeeded"] * 4
    assert await pipes.content("four") == "one\ntwo\nthree\nfour\n"


@pytest.mark.parametrize("whole", [True, False])
async def test_limits_of_time_hold_for_each_task_and_for_all(pipes: Pipes, whole: bool) -> None:
    """Proves P1, R8."""
    rig = pipes.rig
    async with rig.worker():
        slow = task("two", "sleep 600") if whole else task("two", "sleep 600", timeout=0.5)
        job = await pipes.submit(adds("one"), slow, timeout=2 if whole else None, stop_grace=0)
        job = await rig.ended(job, Status.TIMED_OUT)
    assert await pipes.statuses(job) == ["succeeded", "timed_out"]
    assert await pipes.kept() == ["one"]


async def test_four_jobs_at_once_build_once(pipes: Pipes) -> None:
    """Proves P5: the others wait, and start nothing."""
    rig = pipes.rig
    async with rig.worker():
        jobs = [await pipes.submit(adds("one"), task("two", "sleep 0.5; echo two >> made")) for _ in range(4)]
        for job in jobs:
            await rig.ended(job, Status.SUCCEEDED)
    assert pipes.ran() == ["one", "two"]
    for statuses in zip(*[await pipes.statuses(job) for job in jobs], strict=True):  # Of one task, in all four jobs.
        assert sorted(statuses) == ["cached"] * 3 + ["succeeded"]
    assert len(await pipes.snapshots()) == 2


async def test_waiter_builds_when_the_builder_is_cancelled(pipes: Pipes) -> None:
    """Proves P5: a lock falls with its lease."""
    rig = pipes.rig
    async with rig.worker():
        gate = pipes.marker.with_name("gate")
        spec = {"env": {"MARKER": str(pipes.marker), "GATE": str(gate)}}
        tasks = [task("one", 'echo here; while [ ! -e "$GATE" ]; do sleep 0.05; done; echo one > made')]
        builder = await pipes.submit(*tasks, spec=spec, stop_grace=0)
        await rig.says(builder, "here")
        waiter = await pipes.submit(*tasks, spec=spec)

        async def planned() -> bool:
            return bool(await rig.events(waiter, "task"))

        await eventually(planned, "the waiter has planned")
        await rig.store.jobs.cancel(builder.id)
        await rig.says(waiter, "here")
        gate.touch()
        await rig.ended(waiter, Status.SUCCEEDED)
    assert pipes.ran() == ["one", "one"]
    assert await pipes.kept() == ["one"]


async def test_waiter_can_be_cancelled(pipes: Pipes) -> None:
    """Proves P5, J17, C1: without a start; and it says whom it waits for."""
    rig = pipes.rig
    async with rig.worker():
        tasks = [task("one", "echo here; sleep 600")]
        builder = await pipes.submit(*tasks, stop_grace=0)
        await rig.says(builder, "here")
        waiter = await pipes.submit(*tasks)

        async def planned() -> bool:
            return bool(await rig.events(waiter, "task"))

        await eventually(planned, "the waiter has planned")
        told = (await rig.store.explain.job(waiter.id)).reasons[-1]
        assert (told.jobs, told.message) == (
            (builder.id,), f"task one waits for job {builder.id}, which builds its snapshot",
        )  # fmt: skip
        assert [reason.about for reason in (await rig.store.explain.job(builder.id)).reasons] == ["status"]
        await rig.store.jobs.cancel(waiter.id)
        assert (await rig.ended(waiter, Status.CANCELLED)).attempts == 0
        await rig.store.jobs.cancel(builder.id)
        await rig.ended(builder, Status.CANCELLED)


async def test_files_reach_the_tasks_by_content(pipes: Pipes) -> None:
    """Proves P3, P4: a renamed file is the same file; another content is another task."""
    rig = pipes.rig
    (pipes.inputs / "a.txt").write_text("first")
    (pipes.inputs / "b.txt").write_text("first")
    reads = ["sh", "-ec", 'echo read >> "$MARKER"; cat "$HOLDFAST_INPUTS"/*.txt > made; pwd > place']
    async with rig.worker():
        for name in ("a.txt", "b.txt"):
            tasks = [{"name": "read", "command": reads, "files": [name]}]
            job = await rig.ended(await pipes.submit(*tasks), Status.SUCCEEDED)
        assert (await pipes.statuses(job), pipes.ran()) == (["cached"], ["read"])
        (pipes.inputs / "b.txt").write_text("second")
        await rig.ended(await pipes.submit(*tasks), Status.SUCCEEDED)
    assert pipes.ran() == ["read", "read"]
    assert sorted([(pipes.folder_of(one) / "made").read_text() for one in await pipes.snapshots()]) == [
        "first",
        "second",
    ]


async def test_result_for_other_inputs_is_not_taken(pipes: Pipes) -> None:
    """Proves P3, P4: tasks read them in `request.json`."""
    rig = pipes.rig
    reads = task("read", 'cat "$HOLDFAST_WORK_DIR/request.json" > made')
    async with rig.worker():
        for rows in (3, 4, 3):
            job = await rig.ended(await pipes.submit(reads, inputs={"rows": rows}), Status.SUCCEEDED)
    assert (pipes.ran(), await pipes.statuses(job)) == (["read", "read"], ["cached"])
    made = [json.loads((pipes.folder_of(one) / "made").read_text()) for one in await pipes.snapshots()]
    assert sorted(inputs["rows"] for inputs in made) == [3, 4]


async def test_changed_file_is_planned_again_when_the_job_resumes(pipes: Pipes) -> None:
    """Proves P9."""
    rig = pipes.rig
    source = pipes.inputs / "script"
    source.write_text("exit 7")
    runs = {"name": "two", "command": ["sh", "-c", '. "$HOLDFAST_INPUTS/script"'], "files": ["script"]}
    async with rig.worker():
        job = await rig.ended(await pipes.submit(adds("one"), runs), Status.FAILED)
        before = [record.snapshot for record in await pipes.tasks(job)]
        source.write_text("echo two >> made")
        await rig.store.jobs.resume(job.id)
        await rig.ended(job, Status.SUCCEEDED)
    after = [record.snapshot for record in await pipes.tasks(job)]
    assert (before[0], before[1] != after[1]) == (after[0], True)
    plans = [event.data for event in await rig.events(job, "task") if "plan" in event.data]
    assert [(plan["plan"], plan.get("replanned", False)) for plan in plans] == [(before[1], False), (after[1], True)]
    assert pipes.ran() == ["one"]
    assert await pipes.content("two") == "one\ntwo\n"


async def test_file_that_changes_between_plan_and_start_fails_the_job_clearly(pipes: Pipes) -> None:
    """Proves P3, P9: what would run is not what was planned. Nothing runs, and nothing is published."""
    rig = pipes.rig
    source = pipes.inputs / "word"
    source.write_text("first")

    def change(step: str, lease: Lease) -> None:
        if step == "locked":
            source.write_text("second")

    reads = task("one", 'cat "$HOLDFAST_INPUTS/word" > made', files=["word"])
    async with rig.worker(at=change):
        job = await rig.ended(await pipes.submit(reads, max_attempts=3), Status.FAILED)
    assert job.error is not None
    assert (job.error.code, job.error.message) == (
        "contract_violation",
        "tasks[0].files[0]: word changed since the plan was made; submit or resume the job once more",
    )
    assert (pipes.ran(), await pipes.snapshots(), rig.folders) == ([], [], [])
    async with rig.worker():
        await rig.store.jobs.resume(job.id)
        await rig.ended(job, Status.SUCCEEDED)
    assert await pipes.content("one") == "second"


async def test_snapshot_is_the_base_of_another_job(pipes: Pipes) -> None:
    """Proves P12."""
    rig = pipes.rig
    async with rig.worker():
        first = await rig.ended(await pipes.submit(adds("one"), adds("two")), Status.SUCCEEDED)
        base = (await pipes.tasks(first))[-1].snapshot
        await rig.ended(await pipes.submit(adds("three"), base=base), Status.SUCCEEDED)
        assert await pipes.content("three") == "one\ntwo\nthree\n"
        unknown = await rig.ended(await pipes.submit(adds("three"), base="f" * 64), Status.FAILED)
    assert unknown.error is not None
    assert unknown.error.message == f"base: there is no snapshot {'f' * 64}"
    assert unknown.attempts == 1


async def test_words_to_the_supervisor_may_be_said_again_and_again(
    pipes: Pipes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proves P2, P12. A worker that stood still, or its database, between a word and its answer says the word again."""
    rig = pipes.rig
    monkeypatch.setattr(pipeline_execution, "SAY_AGAIN", 0.0)
    async with rig.worker():
        first = await rig.ended(await pipes.submit(adds("one"), adds("two")), Status.SUCCEEDED)
        base = (await pipes.tasks(first))[-1].snapshot
        for n in range(5):
            await rig.ended(await pipes.submit(adds(f"three {n}"), adds("four"), base=base), Status.SUCCEEDED)
            assert await pipes.content(f"three {n}") == f"one\ntwo\nthree {n}\n"


async def test_snapshot_that_finds_no_room_fails_the_job_and_leaves_nothing(pipes: Pipes) -> None:
    """Proves P11."""
    rig = pipes.rig
    rig.set(snapshots_max_bytes=1000)
    async with rig.worker():
        job = await rig.ended(
            await pipes.submit(adds("small"), task("large", "head -c 2000 /dev/zero > big")), Status.FAILED
        )
        assert job.error is not None
        assert (job.error.code, await pipes.kept()) == ("cache_full", ["small"])
        assert "HOLDFAST_SNAPSHOTS_MAX_BYTES is 1000" in job.error.message
        assert len(Folders.below(rig.settings.shared).names()) == 1
        await rig.ended(await pipes.submit(adds("small"), adds("other")), Status.SUCCEEDED)
    assert await pipes.kept() == ["other", "small"]


@pytest.mark.skipif(missing("ext4") is not None, reason=missing("ext4") or "")
async def test_full_disk_fails_the_job_whatever_its_path_is_called(rig: Rig, tmp_path: Path) -> None:
    """Proves P6, P11: a supervisor takes 256 bytes of a text, and not half a letter."""
    with disk(tmp_path, "ext4", 8 * MIB) as small:
        rig.set(shared_dir=small.joinpath(*["ü" * 100] * 3), disk_reserve=None)
        pipes = Pipes(rig, tmp_path)
        async with rig.worker():
            large = task("large", f"head -c {10 * MIB} /dev/urandom > big")
            job = await rig.ended(await pipes.submit(adds("small"), large), Status.FAILED)
        assert job.error is not None
        assert (job.error.code, await pipes.kept()) == ("cache_full", ["small"])
        assert job.error.message.startswith("No space left on device: free some, or remove snapshots")
        assert await pipes.statuses(job) == ["succeeded", "succeeded"]
        folders = Folders.below(rig.settings.shared)
        assert folders.names() == [one.folder for one in await pipes.snapshots()]
        assert list((folders.root / TEMPORARY).iterdir()) == []


async def test_damaged_snapshot_is_built_again(pipes: Pipes) -> None:
    """Proves P6: verified when it is used."""
    rig = pipes.rig
    async with rig.worker():
        await rig.ended(await pipes.submit(adds("one"), adds("two")), Status.SUCCEEDED)
        (two,) = [one for one in await pipes.snapshots() if one.task == "two"]
        (pipes.folder_of(two) / "made").write_text("spoilt")
        job = await rig.ended(await pipes.submit(adds("one"), adds("two"), adds("three")), Status.SUCCEEDED)
        (three,) = [one for one in await pipes.snapshots() if one.task == "three"]
        (pipes.folder_of(three) / "made").unlink()
        again = await rig.ended(await pipes.submit(adds("one"), adds("two"), adds("three")), Status.SUCCEEDED)
    assert await pipes.statuses(job) == ["cached", "succeeded", "succeeded"]
    assert await pipes.statuses(again) == ["cached", "cached", "succeeded"], "also where nothing would have to run"
    assert pipes.ran() == ["one", "two", "two", "three", "three"]
    assert await pipes.content("three") == "one\ntwo\nthree\n"


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"files": ["nothing"]}, "tasks[0].files[0]: there is no file nothing in"),
        ({"files": ["../outside"]}, "tasks[0].files[0]: "),
    ],
)
async def test_what_cannot_be_planned_fails_at_once(pipes: Pipes, asked: dict[str, object], message: str) -> None:
    """Proves P10, R17: and nothing is published."""
    rig = pipes.rig
    (pipes.inputs.parent / "outside").write_text("")
    async with rig.worker():
        job = await rig.ended(await pipes.submit(adds("one", **asked), max_attempts=3), Status.FAILED)
    assert job.error is not None
    assert job.error.message.startswith(message)
    assert (job.error.code, pipes.ran(), await pipes.snapshots()) == ("contract_violation", [], [])


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
async def test_bad_pipelines_that_came_by_sql_fail_with_the_field(pipes: Pipes) -> None:
    """Proves P10: nobody looked at them before their worker. They can be shown before and after."""
    rig = pipes.rig
    jobs = json.dumps([{"runner": "process", "spec": spec, "max_attempts": 3} for spec, _ in BAD])
    sql = await asyncpg.connect(rig.settings.database_url)
    ids = [str(row["id"]) for row in await sql.fetch("SELECT id FROM holdfast.holdfast_submit($1::jsonb)", jobs)]
    await sql.close()
    for job in ids:
        await rig.store.tasks.list(job)
    async with rig.worker():
        for job, (_, message) in zip(ids, BAD, strict=True):
            error = (await rig.ended(job, Status.FAILED)).error
            assert error is not None
            assert (error.code, error.message[: len(message)]) == ("contract_violation", message)
            assert await rig.events(job, "lease") == []
            await rig.store.tasks.list(job)
    assert pipes.ran() == []


async def test_word_that_a_full_disk_has_no_room_for_is_said_again(
    pipes: Pipes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proves P2: the job waits for room, and does not fail by it."""
    tell = Process.tell
    refused: list[str] = []

    async def no_room(self: Process, command: Command) -> str:
        if len(refused) < 2:
            refused.append(command.verb)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return await tell(self, command)

    monkeypatch.setattr(Process, "tell", no_room)
    async with pipes.rig.worker():
        job = await pipes.rig.ended(await pipes.submit(adds("one"), adds("two")), Status.SUCCEEDED)
    assert (refused, await pipes.statuses(job), pipes.ran()) == (["go", "go"], ["succeeded"] * 2, ["one", "two"])


@pytest.mark.skipif(missing("btrfs") is not None, reason=str(missing("btrfs")))
async def test_workspace_on_btrfs_is_copied_in_one_step_from_the_first_task_on(rig: Rig, tmp_path: Path) -> None:
    """Proves P6, P11: also a fresh one, which no snapshot was restored to; and nothing of it is left."""
    with disk(tmp_path, "btrfs", 256 * MIB) as mounted:
        rig.set(data_dir=mounted / "data", disk_reserve=None)
        pipes = Pipes(rig, tmp_path)
        async with rig.worker():
            job = await rig.ended(await pipes.submit(adds("one"), adds("two")), Status.SUCCEEDED)
            more = await rig.ended(await pipes.submit(adds("one"), adds("three")), Status.SUCCEEDED)
        assert (await pipes.statuses(job), await pipes.statuses(more)) == (["succeeded"] * 2, ["cached", "succeeded"])
        assert await pipes.content("three") == "one\nthree\n"
        shown = [subvolume("show", pipes.folder_of(one)) for one in await pipes.snapshots()]
        assert len(shown) == 3
        assert not [text for text in shown if re.search(r"Parent UUID:\s+-", text)], "each was made from another one"
        for snapshot in await pipes.snapshots():
            Folders.below(rig.settings.shared).remove(snapshot.folder)
        assert (rig.folders, Folders.below(rig.settings.shared).names()) == ([], [])
        assert subvolume("list", mounted) == ""


def subvolume(verb: str, folder: Path) -> str:
    """What btrfs says of a folder; to show one that is no subvolume is an error."""
    return subprocess.run(["btrfs", "subvolume", verb, folder], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("kind", ["postgres"])
async def test_uploads_are_refused_also_by_a_worker(pipes: Pipes) -> None:
    """Proves P3: they are in no identity; the result of one upload would stand for that of another."""
    rig = pipes.rig
    with pytest.raises(Invalid, match="put files below the sources"):
        await pipes.submit(adds("one"), uploads=["an upload"])
    asked = {"runner": "process", "spec": {"tasks": [adds("one")]}, "uploads": ["an upload"]}
    sql = await asyncpg.connect(rig.settings.database_url)
    by_sql = await sql.fetchval("SELECT id FROM holdfast.holdfast_submit($1::jsonb)", json.dumps(asked))
    await sql.close()
    async with rig.worker():
        job = await rig.ended(str(by_sql), Status.FAILED)
    assert (job.error and job.error.code, job.error and job.error.message[:8]) == ("contract_violation", "uploads:")
    assert await pipes.snapshots() == []


async def test_pipeline_of_a_worker_that_leaves_is_taken_over_with_its_plan(pipes: Pipes) -> None:
    """Proves P2, P9, C9: in the middle of a task. A file that changes meanwhile changes nothing for what runs."""
    rig = pipes.rig
    gate = pipes.marker.with_name("gate")
    source = pipes.inputs / "word"
    source.write_text("three")
    spec = {"env": {"MARKER": str(pipes.marker), "GATE": str(gate)}}
    waits = task("two", 'echo here; while [ ! -e "$GATE" ]; do sleep 0.05; done; echo two >> made')
    reads = task("three", 'cat "$HOLDFAST_INPUTS/word" >> made', files=["word"])
    async with rig.worker():
        job = await pipes.submit(adds("one"), waits, reads, spec=spec)
        await rig.says(job, "here")
        planned = [record.snapshot for record in await pipes.tasks(job)]
    source.write_text("another")
    gate.touch()
    async with rig.worker():
        job = await rig.ended(job, Status.SUCCEEDED)
    assert pipes.ran() == ["one", "two", "three"]
    assert job.attempts == 1
    assert [record.snapshot for record in await pipes.tasks(job)] == planned
    assert {snapshot.id for snapshot in await pipes.snapshots()} == {*planned}
    assert await pipes.content("three") == "one\ntwo\nthree"
