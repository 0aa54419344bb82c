"""A hostile submitter: invalid values in every field, ids of other tenants, misleading names."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from holdfast.model import Role
from tests.support.service import Service, error_of, service_in_process

COMMAND = {"command": ["true"]}
FUNCTION: dict[str, Any] = {"runner": "function", "spec": {"name": "f"}}
HUGE = 10**400
NO_NUMBERS: tuple[Any, ...] = (HUGE, -HUGE, -1_000_001, "1", True, [], {})
NUMBERS = ("priority", "max_attempts", "timeout", "idle_timeout", "queue_timeout", "stop_grace", "stop_after")
DEEP = json.loads("[" * 70 + "]" * 70)


def process(**spec: Any) -> dict[str, Any]:
    return {"runner": "process", "spec": {**COMMAND, **spec}}


REFUSED: list[tuple[str, dict[str, Any]]] = [
    *((field, {**FUNCTION, field: "a\0b"}) for field in ("id", "kind", "queue", "lane", "reuse_key", "tenant")),
    *((field, {**FUNCTION, field: "x" * 201}) for field in ("kind", "queue", "lane", "reuse_key")),
    *((field, {**FUNCTION, field: ""}) for field in ("kind", "queue", "lane", "reuse_key")),
    *(
        (field, {**FUNCTION, field: value})
        for field in (
            "priority",
            "max_attempts",
            "timeout",
            "idle_timeout",
            "queue_timeout",
            "stop_grace",
            "stop_after",
        )
        for value in NO_NUMBERS
    ),
    ("id", {**FUNCTION, "id": "../../etc/passwd"}),
    ("id", {**FUNCTION, "id": "not-a-uuid"}),
    ("tenant", {**FUNCTION, "tenant": "blue"}),
    ("needs", {**FUNCTION, "needs": ["../x"]}),
    ("labels", {**FUNCTION, "labels": {"a\0": "b"}}),
    ("labels", {**FUNCTION, "labels": {"a": "b\0"}}),
    ("labels", {**FUNCTION, "labels": {f"l{n}": "" for n in range(65)}}),
    ("inputs", {**FUNCTION, "inputs": {"a": "\0"}}),
    ("inputs", {**FUNCTION, "inputs": {"a": "\ud800"}}),
    ("inputs", {**FUNCTION, "inputs": {"a": DEEP}}),
    ("inputs", {**FUNCTION, "inputs": {"a": "x" * 1_100_000}}),
    ("available_at", {**FUNCTION, "available_at": "99999-01-01T00:00:00Z"}),
    ("available_at", {**FUNCTION, "available_at": "2026-01-01T00:00:00"}),
    ("budget", {**FUNCTION, "budget": {"tokens": -1}}),
    ("uploads", {**FUNCTION, "uploads": ["../../admin.token"]}),
    ("uploads", {**FUNCTION, "uploads": ["/etc/passwd"]}),
    ("secrets", process() | {"secrets": ["WORKER_SECRET"]}),
    ("spec", {"runner": "function", "spec": {"name": "f\0"}}),
    ("spec", {"runner": "function", "spec": {"name": "f", "command": ["id"]}}),
    ("spec", process(command=[])),
    ("spec", process(command=["a\0b"])),
    ("spec", process(command="id; id")),
    ("spec", process(env={"A=B": "1"})),
    ("spec", process(env={"A\nB": "1"})),
    ("spec", process(env={"": "1"})),
    ("spec", process(env={"A": "1\0"})),
    ("spec", process(stdin="\0" * 10 + "\ud800")),
    ("spec", process(cwd="/")),
    ("spec", process(mounts=["/:/host"])),
    ("spec", process(privileged=True)),
    ("spec", process(user="0\0")),
    ("spec", process(user="4294967296")),
    ("spec", {"runner": "docker", "spec": {"image": "a", "mounts": [{"source": "/", "target": "/host"}]}}),
    ("spec", {"runner": "docker", "spec": {"image": "a", "volumes": ["/:/host"]}}),
    ("spec", {"runner": "docker", "spec": {"image": "a", "privileged": True}}),
    ("spec", {"runner": "docker", "spec": {"image": "a", "cpus": 1e300}}),
    ("spec", {"runner": "docker", "spec": {"image": "a", "memory": "999999999999g"}}),
    ("runner", {"runner": "shell", "spec": COMMAND}),
    ("unknown", {**FUNCTION, "unknown": 1}),
    ("worker", {**FUNCTION, "worker": "w1"}),
]
"""What is wrong, and the job."""


@pytest.mark.parametrize("role", [Role.SUBMITTER, Role.OPERATOR, Role.ADMIN], ids=str)
async def test_every_field_refuses_invalid_values(clean_url: str, tmp_path: Path, role: Role) -> None:
    """Alone and in a bulk; the answer is a refusal, and nothing is written."""
    async with service_in_process(clean_url, tmp_path / "data", allow_raw=True, docker_host=None) as service:
        token = await service.token(role)
        async with service.client(token) as client:
            for field, job in REFUSED:
                if role is Role.ADMIN and field in ("secrets", "tenant"):
                    continue  # Admins may.
                body = json.dumps(job).encode()
                for path, sent in (("/v1/jobs", body), ("/v1/jobs/bulk", b'{"jobs": [' + body + b"]}")):
                    answer = await client.post(path, content=sent, headers={"Content-Type": "application/json"})
                    assert answer.status_code in (400, 403, 413, 422), (field, str(job)[:200], answer.text[:300])
                    assert len(error_of(answer)["message"]) < 1000
                    assert "\0" not in error_of(answer)["message"]
        async with service.client() as client:
            assert (await client.get("/v1/jobs")).json()["items"] == []


async def test_ids_of_another_tenant_reveal_nothing(service: Service) -> None:
    """Every call about a job of another tenant is answered as if the job did not exist."""
    async with service.client(await service.token(Role.OPERATOR, "blue")) as owner:
        job = (await owner.post("/v1/jobs", json={**FUNCTION, "lane": "secret", "labels": {"a": "secret"}})).json()
        never = "01a1e9bd-7da3-7000-88c1-93bf7e2ec6e7"
        async with service.client(await service.token(Role.OPERATOR, "red")) as stranger:
            for method, path, body in (
                ("GET", "/v1/jobs/{}", None), ("GET", "/v1/jobs/{}/events", None),
                ("GET", "/v1/jobs/{}/attempts", None), ("GET", "/v1/jobs/{}/events/stream", None),
                ("GET", "/v1/jobs/{}/events/download", None),
                ("GET", "/v1/jobs/{}/tasks", None), ("GET", "/v1/jobs/{}/explain", None),
                ("GET", "/v1/jobs/{}/artifacts", None), ("GET", "/v1/jobs/{}/artifacts/x", None),
                ("POST", "/v1/jobs/{}/cancel", {}), ("POST", "/v1/jobs/{}/interrupt", {}),
                ("POST", "/v1/jobs/{}/resume", {}), ("POST", "/v1/jobs/{}/release", {}),
                ("POST", "/v1/jobs/{}/dismiss", {}), ("POST", "/v1/jobs/{}/resolve", {"result": 1}),
                ("DELETE", "/v1/jobs/{}?force=true", None),
            ):  # fmt: skip
                theirs = await stranger.request(method, path.format(job["id"]), json=body)
                nobodys = await stranger.request(method, path.format(never), json=body)
                assert theirs.status_code == nobodys.status_code == 404, (method, path)
                assert theirs.text.replace(job["id"], never) == nobodys.text, (method, path)
            theirs = await stranger.post("/v1/jobs", json={**FUNCTION, "needs": [job["id"]]})
            nobodys = await stranger.post("/v1/jobs", json={**FUNCTION, "needs": [never]})
            assert theirs.status_code == nobodys.status_code
            assert theirs.text.replace(job["id"], never) == nobodys.text
            for path in ("/v1/jobs", "/v1/jobs?id=" + job["id"][:8], "/v1/jobs?label=a:secret", "/v1/lanes"):
                assert job["id"] not in (found := await stranger.get(path)).text, path
                assert "secret" not in found.text, path
            lane = await stranger.post("/v1/lanes/secret/pause", json={})
            assert lane.status_code in (200, 404)
            assert "secret" not in (await stranger.get("/metrics")).text
        assert (await owner.get(f"/v1/jobs/{job['id']}")).json()["status"] == "queued"
        assert (await owner.get("/v1/lanes/secret")).json()["state"] != "paused"


@pytest.mark.parametrize(
    "path",
    [
        "../admin.token", "..%2fadmin.token", "%2e%2e/admin.token", "....//admin.token", "/etc/passwd",
        "%2fetc%2fpasswd",
        "a/../../../admin.token", "%00", "x%00.txt", "\\..\\admin.token", "%5c..%5cadmin.token", "%c0%ae%c0%ae/x",
        "%2e%2e%2f%2e%2e%2f", "a" * 5000,
    ],
)  # fmt: skip
async def test_no_path_of_an_artifact_leads_out(service: Service, path: str) -> None:
    async with service.client(await service.token(Role.SUBMITTER)) as client:
        job = (await client.post("/v1/jobs", json=FUNCTION)).json()["id"]
        url = httpx.URL(service.url).copy_with(raw_path=f"/v1/jobs/{job}/artifacts/{path}".encode())
        answer = await client.send(client.build_request("GET", url))
        assert answer.status_code in (400, 404, 414, 422), answer.text[:200]
        assert service.admin not in answer.text
        assert "root:" not in answer.text


@pytest.mark.parametrize("name", ["../../x", "/etc/cron.d/x", "a/../../x", "..", "a\0b", "x" * 300, "a//b", "\x1b[2J"])
async def test_no_name_of_an_upload_leads_out(service: Service, name: str) -> None:
    async with service.client(await service.token(Role.SUBMITTER)) as client:
        answer = await client.post("/v1/uploads", files={"file": (name, b"x")})
        assert answer.status_code in (400, 422) or (answer.status_code == 201 and ".." not in answer.text), answer.text
        shared = service.data.parent / "shared"
        assert [
            path for path in service.data.parent.rglob("*") if path.name == "x" and shared not in path.parents
        ] == []


async def test_headers_and_cursors_of_others_are_refused(service: Service) -> None:
    async with service.client(await service.token(Role.SUBMITTER, "red")) as client:
        for headers in ({"Holdfast-Tenant": "blue"}, {"Holdfast-Tenant": "x" * 201}, {"Holdfast-Tenant": "\x7f"}):
            assert (await client.get("/v1/jobs", headers=headers)).status_code in (403, 422), headers
        for query in ("cursor=x", "cursor=" + "A" * 500, "limit=0", "limit=-1", f"limit={HUGE}", "label=x", "status=x",
                      "since=x", "until=99999-01-01T00:00:00Z", "id=%27%20OR%201=1", "unknown=1"):  # fmt: skip
            assert (await client.get(f"/v1/jobs?{query}")).status_code == 422, query
        key = {"Idempotency-Key": "k"}
        first = await client.post("/v1/jobs", json=FUNCTION, headers=key)
        async with service.client(await service.token(Role.SUBMITTER, "blue")) as other:
            second = await other.post("/v1/jobs", json=FUNCTION, headers=key)
            assert (first.status_code, second.status_code) == (201, 201)
            assert first.json()["id"] != second.json()["id"]
