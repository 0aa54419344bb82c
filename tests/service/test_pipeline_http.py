"""Pipelines over HTTP: what one would do and why, its tasks, and the snapshots that there are."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import pytest

from holdfast import AsyncClient
from holdfast.model import Claimable, Outcome, Role, Status
from holdfast.pipeline.plan import PlanFacts, make_plan
from holdfast.pipeline.snapshots import SnapshotFolders
from holdfast.pipeline.sources import Sources, inputs_of
from holdfast.store.snapshots import NewSnapshot
from holdfast.store.tasks import PlannedTask
from holdfast.submission import check, parse
from tests.support.service import FUNCTION, Service, error_of, opened, shared_beside

PAIR = Claimable(queue="default", capability="function:f", domain="function")
PIPELINE: dict[str, Any] = {
    "runner": "process",
    "tasks": [
        {"name": "one", "command": ["sh", "-c", "one"]},
        {"name": "two", "command": ["sh", "-c", "two"], "files": ["seed.csv"], "env": {"ROWS": "3"}},
    ],
}


@pytest.fixture
def inputs(service: Service) -> Path:
    folder = inputs_of(shared_beside(service.data), "default")
    folder.mkdir(parents=True)
    (folder / "seed.csv").write_text("1\n2\n")
    return folder


async def build(service: Service, job: dict[str, Any], names: Sequence[str], tmp_path: Path) -> list[str]:
    """Store snapshots of some tasks of a pipeline, as a worker would."""
    shared = shared_beside(service.data)
    asked = check(parse(job), "default")
    sources = Sources(inputs_of(shared, "default"))
    found = make_plan(asked.spec, sources, PlanFacts(), tenant="default", inputs=asked.inputs, secrets=asked.secrets)
    work = tmp_path / "work"
    work.mkdir(exist_ok=True)
    (work / "file").write_text("result")
    made = []
    async with opened(service.database_url) as store:
        await store.jobs.submit(FUNCTION)
        (lease,) = (await store.leases.claim("w1", [PAIR], slots=1, ttl=60)).claimed
        planned = [PlannedTask(name=one.name, parent=one.parent, snapshot=one.snapshot) for one in found.tasks]
        await store.tasks.replan(lease, planned, done=0)
        for task in found.tasks:
            if task.name in names:
                folder = SnapshotFolders.below(shared).copy(task.snapshot, work)
                new = NewSnapshot(
                    id=task.snapshot, parent=task.parent, task=task.name, task_hash=task.hash,
                    components=task.components, folder=folder.folder, digest=folder.digest, size=folder.size,
                )  # fmt: skip
                await store.snapshots.take(lease, task.snapshot)
                assert await store.snapshots.publish(lease, new) == "published"
                made.append(task.snapshot)
        assert (await store.leases.finish([(lease, Outcome.succeeded())]))[lease.id] is Status.SUCCEEDED
    return made


async def planned(client: httpx.AsyncClient, job: dict[str, Any]) -> list[tuple[str, bool, str]]:
    answer = await client.post("/v1/jobs", json={**job, "plan_only": True})
    assert answer.status_code == 200, answer.text
    return [(task["name"], task["cached"], task["reason"]) for task in answer.json()["tasks"]]


async def test_plan_knows_the_names_of_a_jobs_secrets(service: Service, inputs: Path, tmp_path: Path) -> None:
    """Proves P10, D1: as the worker does."""
    with_secret = {**PIPELINE, "secrets": ["PASSWORD"]}
    first, _ = await build(service, with_secret, ["one", "two"], tmp_path)
    async with service.client() as client:
        assert [cached for _, cached, _ in await planned(client, with_secret)] == [True, True]
        (name, cached, reason), _ = await planned(client, PIPELINE)
        assert (name, cached, reason) == ("one", False, f"nearest is {first[:12]}: secrets removed")


async def test_plan_lists_tasks_and_differences_and_changes_nothing(
    service: Service, inputs: Path, tmp_path: Path
) -> None:
    """Proves P10."""
    async with service.client() as client:
        unknown = "no snapshot is known yet"
        assert await planned(client, PIPELINE) == [("one", False, unknown), ("two", False, unknown)]
        assert (await client.get("/v1/jobs")).json()["items"] == []
        assert not (shared_beside(service.data) / "snapshots").exists()
        ids = await build(service, PIPELINE, ["one", "two"], tmp_path)
        assert [cached for _, cached, _ in await planned(client, PIPELINE)] == [True, True]
        (inputs / "seed.csv").write_text("3\n")
        assert await planned(client, PIPELINE) == [
            ("one", True, "its snapshot exists"),
            ("two", False, f"nearest is {ids[1][:12]}: files[0] changed"),
        ]
        full = (await client.post("/v1/jobs", json={**PIPELINE, "plan_only": True})).json()
        assert full["runs"] == 1
        assert full["tasks"][1]["nearest"] == ids[1]
        assert full["tasks"][1]["differs"] == [{"component": "files[0]", "change": "changed"}]
        job = (await client.post("/v1/jobs", json=PIPELINE)).json()
        explained = (await client.get(f"/v1/jobs/{job['id']}/explain")).json()
        assert explained["plan"] == full
        (inputs / "seed.csv").unlink()
        explained = (await client.get(f"/v1/jobs/{job['id']}/explain")).json()
        assert explained["plan"] is None
        assert "there is no file seed.csv" in explained["reasons"][-1]["message"]


async def test_other_inputs_are_another_result(service: Service, inputs: Path, tmp_path: Path) -> None:
    """Proves P3, P10: in what is planned, and for a job that waits."""
    job = {**PIPELINE, "inputs": {"rows": 3}}
    ids = await build(service, job, ["one", "two"], tmp_path)
    async with service.client() as client:
        assert [cached for _, cached, _ in await planned(client, job)] == [True, True]
        other = {**job, "inputs": {"rows": 4}}
        assert (await planned(client, other))[0] == ("one", False, f"nearest is {ids[0][:12]}: inputs changed")
        assert (await planned(client, PIPELINE))[0] == ("one", False, f"nearest is {ids[0][:12]}: inputs removed")
        waiting = (await client.post("/v1/jobs", json=other)).json()
        explained = (await client.get(f"/v1/jobs/{waiting['id']}/explain")).json()["plan"]["tasks"][0]
        assert explained["differs"] == [{"component": "inputs", "change": "changed"}]


async def test_final_snapshot_stands_for_all_tasks(service: Service, inputs: Path, tmp_path: Path) -> None:
    """Proves P10."""
    job = {**PIPELINE, "snapshot": "final"}
    await build(service, job, ["two"], tmp_path)
    async with service.client() as client:
        assert await planned(client, job) == [
            ("one", True, "a later task's snapshot exists"),
            ("two", True, "its snapshot exists"),
        ]


async def test_job_lists_its_tasks(service: Service, inputs: Path) -> None:
    """Proves P1."""
    async with service.client() as client:
        made = await client.post("/v1/jobs", json=PIPELINE)
        assert made.status_code == 201, made.text
        job = made.json()
        tasks = (await client.get(f"/v1/jobs/{job['id']}/tasks")).json()["items"]
        assert [(task["n"], task["name"], task["status"]) for task in tasks] == [
            (0, "one", "pending"),
            (1, "two", "pending"),
        ]
        assert job["tasks"] == tasks == (await client.get(f"/v1/jobs/{job['id']}")).json()["tasks"]
        assert job["spec"]["tasks"][0] == {"name": "one", "command": ["sh", "-c", "one"]}
        plain = (await client.post("/v1/jobs", json=FUNCTION)).json()
        assert plain["tasks"] == (await client.get(f"/v1/jobs/{plain['id']}/tasks")).json()["items"] == []


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"tasks": [{"name": "a", "sql": "gone.sql"}], "connector": "postgres"}, "tasks[0].sql", "no file gone.sql"),
    ({"tasks": [{"name": "a", "sql": "loop.sql"}], "connector": "postgres"}, "tasks[0].sql", "in a circle"),
    ({"tasks": [{"name": "a", "command": ["x"], "files": ["../x"]}]}, "tasks[0].files[0]", "../x"),
    ({"connector": "mysql"}, "connector", "mysql"),
    ({"runner": "docker", "spec": {"image": "nowhere:0"}, "plan_only": True}, "spec.image", "does not resolve"),
    ({"plan_only": "yes"}, "plan_only", "true or false"),
    ({"uploads": ["01a1df11-0000-7000-8000-000000000000"]}, "uploads", "put files below the sources"),
    ({"tasks": [], "spec": {"command": ["x"]}, "plan_only": True}, "tasks", "no pipeline"),
]


async def test_bad_pipelines_are_refused_before_they_are_accepted(service: Service, inputs: Path) -> None:
    """Proves P10."""
    (inputs / "loop.sql").write_text("\\ir loop.sql\n")
    async with service.client() as client:
        for change, field, message in BAD:
            answer = await client.post("/v1/jobs", json={**PIPELINE, **change})
            assert (answer.status_code, error_of(answer)["details"]["field"]) == (422, field), answer.text
            assert message in error_of(answer)["message"]
            if "plan_only" not in change:
                bulk = await client.post("/v1/jobs/bulk", json={"jobs": [FUNCTION, {**PIPELINE, **change}]})
                assert (bulk.status_code, error_of(bulk)["details"]["field"]) == (422, f"jobs[1].{field}")
        assert (await client.get("/v1/jobs")).json()["items"] == []


@pytest.mark.parametrize("kind", ["postgres"])
async def test_bad_pipelines_that_came_by_sql_can_be_shown_explained_and_cancelled(service: Service) -> None:
    """Proves P10: it is their worker that refuses them."""
    specs = [{"tasks": "x"}, {"tasks": [{"name": "a"}]}, {"tasks": PIPELINE["tasks"][:1], "connector": "mysql"}]
    jobs = json.dumps([{"runner": "process", "spec": spec} for spec in specs])
    sql = await asyncpg.connect(service.database_url)
    ids = [str(row["id"]) for row in await sql.fetch("SELECT id FROM holdfast.holdfast_submit($1::jsonb)", jobs)]
    await sql.close()
    async with service.client() as client:
        for job, field in zip(ids, ("tasks", "tasks[0]", "connector"), strict=True):
            for path in ("", "/tasks", "/events"):
                assert (await client.get(f"/v1/jobs/{job}{path}")).status_code == 200
            explained = (await client.get(f"/v1/jobs/{job}/explain")).json()
            assert explained["reasons"][-1]["message"].startswith(f"it cannot be planned now: {field}: ")
            assert (await client.post(f"/v1/jobs/{job}/cancel")).status_code == 200


async def test_file_that_cannot_be_read_is_a_refusal_and_no_failure_of_the_server(service: Service) -> None:
    """Proves P10: also for root there is a file that cannot be read, and below `/proc` it is always the same."""
    folder = inputs_of(shared_beside(service.data), "default")
    folder.parent.mkdir(parents=True)
    folder.symlink_to(f"/proc/{os.getpid()}")
    asked: list[tuple[str, dict[str, Any]]] = [
        ("tasks[0].files[0]", {"tasks": [{"name": "a", "command": ["x"], "files": ["mem"]}]}),
        ("tasks[0].sql", {"tasks": [{"name": "a", "sql": "mem"}], "connector": "postgres"}),
    ]
    async with service.client() as client:
        for field, job in asked:
            for plan_only in (True, False):
                answer = await client.post("/v1/jobs", json={**PIPELINE, **job, "plan_only": plan_only})
                assert (answer.status_code, error_of(answer)["details"]["field"]) == (422, field), answer.text
                assert "mem cannot be read: Input/output error" in error_of(answer)["message"]


async def test_snapshots_are_listed_shown_removed_and_used_as_a_base(
    service: Service, inputs: Path, tmp_path: Path
) -> None:
    """Proves P12."""
    first, second = await build(service, PIPELINE, ["one", "two"], tmp_path)
    blue = await service.token(Role.OPERATOR, "blue")
    async with service.client() as client, service.client(blue) as foreign:
        listed = (await client.get("/v1/snapshots")).json()
        assert {one["id"] for one in listed["items"]} == {first, second}
        assert listed["totals"] == {"count": 2, "size": 12}
        shown = (await client.get(f"/v1/snapshots/{second[:10]}")).json()
        assert (shown["id"], shown["parent"], shown["task"]) == (second, first, "two")
        assert sorted(shown["components"]) == ["command", "connector", "env.ROWS", "files[0]", "schema"]
        used = await client.post(f"/v1/snapshots/{second[:10]}/use")
        assert (used.status_code, used.json()["id"]) == (200, second)
        assert used.json()["used_at"] > shown["used_at"]
        assert (await foreign.post(f"/v1/snapshots/{second}/use")).status_code == 404
        based = {**PIPELINE, "tasks": PIPELINE["tasks"][:1]}
        job = (await client.post("/v1/jobs", json={**based, "base": first[:10]})).json()
        assert job["spec"]["base"] == first
        for base, status in (("f" * 64, 404), ("nonsense", 404), ("", 404)):
            assert (await client.post("/v1/jobs", json={**based, "base": base})).status_code == status
        assert (await foreign.get("/v1/snapshots")).json()["items"] == []
        for method in ("GET", "DELETE"):
            assert (await foreign.request(method, f"/v1/snapshots/{first}")).status_code == 404
        blocked = await client.delete(f"/v1/snapshots/{first}")
        assert (blocked.status_code, blocked.json()["outcome"], blocked.json()["error"]["code"]) == (
            409,
            "blocked",
            "needed",
        )
        for query in ("recurse=true", "recurse=true&dry_run=true"):
            needed = await client.delete(f"/v1/snapshots/{first}?{query}")
            assert (needed.status_code, error_of(needed)["code"]) == (409, "needed"), "a job waits to begin with it"
            assert f"is in the plan of job {job['id']}" in error_of(needed)["message"]
        assert (await client.post(f"/v1/jobs/{job['id']}/cancel")).status_code == 200
        dry = (await client.delete(f"/v1/snapshots/{first}?recurse=true&dry_run=true")).json()
        assert (dry["outcome"], sorted(dry["snapshots"]), dry["size"]) == ("would_delete", sorted([first, second]), 12)
        folders = SnapshotFolders.below(shared_beside(service.data))
        assert len(folders.names()) == 2
        gone = (await client.delete(f"/v1/snapshots/{first}?recurse=true")).json()
        assert (gone["outcome"], sorted(gone["snapshots"])) == ("deleted", sorted([first, second]))
        assert folders.names() == []
        assert (await client.get(f"/v1/snapshots/{first}")).status_code == 404


async def test_every_answer_with_a_job_has_its_tasks(service: Service) -> None:
    """A pipeline from a list, from a move and by itself is the same: its tasks are never missing."""
    tasks = [{"name": name, "command": ["true"]} for name in ("one", "two")]
    async with service.client() as client, AsyncClient(service.url, token=service.admin) as api:
        made = (await client.post("/v1/jobs", json={"runner": "process", "tasks": tasks, "queue": "idle"})).json()
        plain = (await client.post("/v1/jobs", json={**FUNCTION, "queue": "idle"})).json()
        whole = (await client.get(f"/v1/jobs/{made['id']}")).json()
        assert [one["name"] for one in whole["tasks"]] == ["one", "two"]
        assert made["tasks"] == whole["tasks"]
        listed = {one["id"]: one["tasks"] for one in (await client.get("/v1/jobs")).json()["items"]}
        assert listed == {made["id"]: whole["tasks"], plain["id"]: []}
        found = (await client.get("/v1/jobs", params={"id": made["id"][:20]})).json()["items"]
        assert [one["tasks"] for one in found if one["id"] == made["id"]] == [whole["tasks"]]
        page, _ = await api.jobs()
        assert {one.id: one.tasks for one in page} == {one.id: (await api.get(one.id)).tasks for one in page}
        moved = (await client.post(f"/v1/jobs/{made['id']}/cancel")).json()
        assert [one["name"] for one in moved["tasks"]] == ["one", "two"]
