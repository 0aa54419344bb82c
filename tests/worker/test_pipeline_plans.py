"""Plans of pipelines: files by content, changes between plan and start, pipelines that cannot be planned."""

import json
from typing import Any

import asyncpg
import pytest

from holdfast.errors import Invalid
from holdfast.model import Lease, Status
from tests.support.pipelines import Pipelines, adds, task


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
