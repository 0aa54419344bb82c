"""Access with tokens: which role may call what, which jobs it sees, and how tokens are made, limited and revoked."""

import asyncio
import os
import stat
import subprocess
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from holdfast.api.app import declared
from holdfast.api.auth import first_admin
from holdfast.assemble_service import asgi
from holdfast.errors import ConfigError
from holdfast.model import Claimable, Role, new_id
from holdfast.store.migrate import migrate
from holdfast.store.store import Store, connect
from tests.support.service import FUNCTION, Service, error_of, opened, service_in_process

RAW = {"runner": "process", "spec": {"command": ["true"]}}
NEEDS: dict[tuple[str, str], Role | None] = {
    ("POST", "/v1/jobs"): Role.SUBMITTER,
    ("POST", "/v1/jobs/bulk"): Role.SUBMITTER,
    ("GET", "/v1/jobs"): Role.VIEWER,
    ("GET", "/v1/jobs/{job_id}"): Role.VIEWER,
    ("GET", "/v1/jobs/{job_id}/attempts"): Role.VIEWER,
    ("GET", "/v1/jobs/{job_id}/explain"): Role.VIEWER,
    ("GET", "/v1/jobs/{job_id}/tasks"): Role.VIEWER,
    ("GET", "/v1/snapshots"): Role.VIEWER,
    ("GET", "/v1/snapshots/{snapshot_id}"): Role.VIEWER,
    ("POST", "/v1/snapshots/{snapshot_id}/use"): Role.SUBMITTER,
    ("DELETE", "/v1/snapshots/{snapshot_id}"): Role.OPERATOR,
    ("GET", "/v1/jobs/{job_id}/artifacts"): Role.VIEWER,
    ("GET", "/v1/jobs/{job_id}/artifacts/{path:path}"): Role.VIEWER,
    ("GET", "/v1/jobs/{job_id}/events"): Role.VIEWER,
    ("GET", "/v1/jobs/{job_id}/events/stream"): Role.VIEWER,
    ("GET", "/v1/jobs/{job_id}/events/download"): Role.VIEWER,
    ("POST", "/v1/jobs/{job_id}/cancel"): Role.SUBMITTER,
    ("POST", "/v1/jobs/{job_id}/release"): Role.SUBMITTER,
    ("POST", "/v1/jobs/{job_id}/interrupt"): Role.OPERATOR,
    ("POST", "/v1/jobs/{job_id}/resume"): Role.OPERATOR,
    ("POST", "/v1/jobs/{job_id}/resolve"): Role.OPERATOR,
    ("POST", "/v1/jobs/{job_id}/dismiss"): Role.OPERATOR,
    ("DELETE", "/v1/jobs/{job_id}"): Role.OPERATOR,
    ("POST", "/v1/uploads"): Role.SUBMITTER,
    ("GET", "/v1/lanes"): Role.VIEWER,
    ("GET", "/v1/lanes/{lane:path}"): Role.VIEWER,
    ("PUT", "/v1/lanes/{lane:path}"): Role.OPERATOR,
    ("POST", "/v1/lanes/{lane:path}/pause"): Role.OPERATOR,
    ("POST", "/v1/lanes/{lane:path}/resume"): Role.OPERATOR,
    ("GET", "/v1/queues"): Role.VIEWER,
    ("POST", "/v1/queues/{queue:path}/pause"): Role.ADMIN,
    ("POST", "/v1/queues/{queue:path}/resume"): Role.ADMIN,
    ("PATCH", "/v1/queues/{queue:path}"): Role.ADMIN,
    ("GET", "/v1/workers"): Role.VIEWER,
    ("POST", "/v1/workers/{host:path}/lost"): Role.ADMIN,
    ("POST", "/v1/workers/{host:path}/drain"): Role.ADMIN,
    ("GET", "/v1/tools"): Role.VIEWER,
    ("GET", "/v1/tokens"): Role.ADMIN,
    ("POST", "/v1/tokens"): Role.ADMIN,
    ("DELETE", "/v1/tokens/{token_id}"): Role.ADMIN,
    ("GET", "/v1/audit"): Role.ADMIN,
    ("GET", "/metrics"): Role.VIEWER,
    ("GET", "/healthz"): None,
    ("GET", "/readyz"): None,
}
BODIES: dict[tuple[str, str], Any] = {
    ("POST", "/v1/jobs"): FUNCTION,
    ("POST", "/v1/jobs/bulk"): {"jobs": [FUNCTION]},
    ("PUT", "/v1/lanes/{lane:path}"): {"check": None},
    ("PATCH", "/v1/queues/{queue:path}"): {},
    ("POST", "/v1/tokens"): {"name": "x", "role": "king"},
}


def path_of(route: str, job: str) -> str:
    for name, value in (
        ("job_id", job),
        ("path:path", "F"),
        ("lane:path", "L"),
        ("queue:path", "Q"),
        ("host:path", "H"),
    ):
        route = route.replace(f"{{{name}}}", value)
    return route.replace("{token_id}", new_id()).replace("{snapshot_id}", "0" * 64)


async def test_every_route_is_open_to_its_role_and_those_above_it_alone(service: Service) -> None:
    """Proves O8."""
    routes = {(route.method, route.path): route.role for route in declared()}
    assert routes == NEEDS, "a route is new, gone or changed: say here who may call it"
    tokens = {role: await service.token(role) for role in Role}
    async with service.client() as client:
        job = (await client.post("/v1/jobs", json=FUNCTION)).json()["id"]
        await client.post(f"/v1/jobs/{job}/cancel")
    seen: Counter[int] = Counter()
    for (method, route), needed in NEEDS.items():
        for role, token in tokens.items():
            async with service.client(token) as client:
                body = BODIES.get((method, route), {}) if method in ("POST", "PUT", "PATCH") else None
                answer = await client.request(method, path_of(route, job), json=body)
            allowed = needed is None or role.includes(needed)
            seen[answer.status_code] += 1
            assert (answer.status_code == 403) is not allowed, (method, route, role, answer.text)
            assert answer.status_code < 500
    assert seen[403] > 30


async def test_no_token_is_answered_401_everywhere(service: Service) -> None:
    """Proves O8."""
    async with httpx.AsyncClient(base_url=service.url) as client:
        for (method, route), needed in NEEDS.items():
            for headers in ({}, {"Authorization": "Bearer hf_nonsense"}, {"Authorization": "Basic hf_x"}):
                answer = await client.request(method, path_of(route, new_id()), headers=headers)
                assert answer.status_code == (200 if needed is None else 401), (method, route)
                if needed is not None:
                    assert answer.headers["www-authenticate"] == "Bearer"
                    assert error_of(answer)["code"] == "unauthorized"
        for wrong in (b"Bearer", b"Bearer hf_" + b"x" * 5000, "bearer hf_é".encode("latin-1")):
            answer = await client.get("/v1/jobs", headers=[(b"Authorization", wrong)])
            assert answer.status_code == 401


async def test_tenants_cannot_see_each_other(service: Service) -> None:
    """Proves N5."""
    blue, green = await service.token(Role.OPERATOR, "blue"), await service.token(Role.OPERATOR, "green")
    async with service.client(blue) as mine, service.client(green) as other, service.client() as admin:
        job = (await mine.post("/v1/jobs", json={**FUNCTION, "lane": "L"})).json()
        assert job["tenant"] == "blue"
        for (method, route), _ in NEEDS.items():
            if "{job_id}" in route:
                force = {"force": "true"} if method == "DELETE" else None
                answer = await other.request(method, path_of(route, job["id"]), params=force)
                assert (answer.status_code, error_of(answer)["code"]) == (404, "not_found"), route
        assert (await other.get("/v1/jobs")).json()["items"] == []
        assert (await other.get("/v1/lanes/L")).status_code == 404
        assert (await other.get("/v1/queues")).json()["items"] == []
        assert (await other.post("/v1/jobs", json={**FUNCTION, "needs": [job["id"]]})).status_code == 404
        taken = await other.post("/v1/jobs", json={**FUNCTION, "id": job["id"]})
        assert (taken.status_code, "exist" in taken.text, "cannot be used" in taken.text) == (409, False, True)
        assert (await other.get("/v1/jobs", headers={"Holdfast-Tenant": "blue"})).status_code == 403
        assert (await mine.get("/v1/jobs", headers={"Holdfast-Tenant": "blue"})).status_code == 200
        assert (await admin.get(f"/v1/jobs/{job['id']}")).status_code == 404
        assert (await admin.get(f"/v1/jobs/{job['id']}", headers={"Holdfast-Tenant": "blue"})).status_code == 200
        assert (await admin.get("/v1/jobs", headers={"Holdfast-Tenant": "x" * 201})).status_code == 422
        assert (await mine.get(f"/v1/jobs/{job['id']}")).json()["status"] == "queued"


async def test_worker_names_jobs_of_the_caller_alone(service: Service) -> None:
    """Proves N5."""
    blue = await service.token(Role.VIEWER, "blue")
    async with service.client() as admin, service.client(blue) as viewer, opened(service.database_url) as store:
        job = (await admin.post("/v1/jobs", json=FUNCTION)).json()["id"]
        await store.workers.register(
            "w1", host="h", pid=1, queues={"default": 1}, capabilities=["function:f"], domains=["d"], ttl=60
        )
        pair = Claimable(queue="default", capability="function:f", domain="function")
        await store.leases.claim("w1", [pair], slots=1, ttl=60)
        assert (await admin.get("/v1/workers")).json()["items"][0]["jobs"] == [job]
        assert (await viewer.get("/v1/workers")).json()["items"][0]["jobs"] == []


async def test_only_admins_may_use_raw_commands_and_secrets(clean_url: str, tmp_path: Path) -> None:
    """Proves O8."""
    async with service_in_process(clean_url, tmp_path / "data") as service:
        token = await service.token(Role.OPERATOR)
        async with service.client(token) as client, service.client() as admin:
            docker = {"runner": "docker", "spec": {"image": "alpine"}}
            for job in (RAW, docker):
                assert (await client.post("/v1/jobs", json=job)).status_code == 403
                assert (await client.post("/v1/jobs/bulk", json={"jobs": [FUNCTION, job]})).status_code == 403
                assert (await admin.post("/v1/jobs", json=job)).status_code == 201
            check = {"check": {"command": ["true"], "timeout": 1}}
            assert (await client.put("/v1/lanes/L", json=check)).status_code == 403
            assert (await client.post("/v1/jobs", json={**FUNCTION, "secrets": ["A"]})).status_code == 403
            assert len((await client.get("/v1/jobs")).json()["items"]) == 2
    async with (
        service_in_process(clean_url, tmp_path / "data", allow_raw=True) as service,
        service.client(token) as client,
    ):
        assert (await client.post("/v1/jobs", json=RAW)).status_code == 201
        assert (await client.post("/v1/jobs", json={**RAW, "secrets": ["A"]})).status_code == 403
        assert (await client.put("/v1/lanes/L", json=check)).status_code == 200


async def test_token_is_made_shown_once_used_and_taken_back(service: Service) -> None:
    """Proves O8."""
    async with service.client() as admin:
        made = await admin.post("/v1/tokens", json={"name": "ci", "role": "submitter", "tenant": "blue"})
        assert (made.status_code, made.headers["cache-control"]) == (201, "no-store")
        secret = made.json()["token"]
        listed = await admin.get("/v1/tokens")
        assert secret not in listed.text
        assert [token["name"] for token in listed.json()["items"]] == ["admin", "ci"]
        assert (await admin.post("/v1/tokens", json={"name": "ci", "role": "admin"})).status_code == 409
        async with service.client(secret) as client:
            assert (await client.post("/v1/jobs", json=FUNCTION)).json()["tenant"] == "blue"
            assert (await admin.delete(f"/v1/tokens/{made.json()['id']}")).status_code == 200
            assert (await client.get("/v1/jobs")).status_code == 401
        (last,) = (await admin.get("/v1/tokens")).json()["items"]
        assert (await admin.delete(f"/v1/tokens/{last['id']}")).status_code == 409


async def test_first_admin_token_is_private_and_made_once(clean_url: str, tmp_path: Path) -> None:
    """Proves O8."""
    path = tmp_path / "data" / "admin.token"
    async with opened(clean_url) as store:
        assert await first_admin(store.tokens, path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        secret = path.read_text().strip()
        found = await store.tokens.find(secret)
        assert found is not None
        assert (found.role, found.name, found.tenant) == (Role.ADMIN, "admin", None)
        assert not await first_admin(store.tokens, path)
        assert not await first_admin(store.tokens, tmp_path / "other" / "admin.token")
        assert not (tmp_path / "other").exists()
        assert [file.name for file in path.parent.iterdir()] == ["admin.token"]


async def test_token_file_left_by_a_crash_is_registered_and_a_foreign_one_refused(
    clean_url: str, tmp_path: Path
) -> None:
    path = tmp_path / "admin.token"
    async with opened(clean_url) as store:
        for text, mode in (("hf_" + "x" * 43, 0o644), ("nonsense", 0o600)):
            path.write_text(text)
            path.chmod(mode)
            with pytest.raises(ConfigError, match="remove it"):
                await first_admin(store.tokens, path)
            path.unlink()
        path.symlink_to("/etc/passwd")
        with pytest.raises(ConfigError, match="cannot read"):
            await first_admin(store.tokens, path)
        path.unlink()
        path.write_text("hf_" + "x" * 43)
        path.chmod(0o600)
        assert await first_admin(store.tokens, path)
        assert await store.tokens.find("hf_" + "x" * 43) is not None


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody else")
def test_another_local_user_cannot_read_the_token(tmp_path: Path) -> None:
    """Proves O8."""

    async def make() -> None:
        database = await connect(f"sqlite:///{tmp_path / 's.db'}")
        await migrate(database)
        async with Store(database) as store:
            await first_admin(store.tokens, tmp_path / "admin.token")

    asyncio.run(make())
    done = subprocess.run(["cat", tmp_path / "admin.token"], user=65534, capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (1, b"")


async def test_requests_of_one_token_are_limited_and_others_are_not(clean_url: str, tmp_path: Path) -> None:
    """Proves O8."""
    async with service_in_process(clean_url, tmp_path / "data", rate_limit=5.0) as service:
        other = await service.token(Role.VIEWER)
        async with service.client() as client, service.client(other) as second:
            answers = [await client.get("/v1/queues") for _ in range(40)]
            refused = [answer for answer in answers if answer.status_code == 429]
            assert refused
            assert error_of(refused[0])["code"] == "rate_limited"
            assert int(refused[0].headers["retry-after"]) >= 1
            assert (await second.get("/v1/queues")).status_code == 200


async def test_guesses_of_tokens_are_limited_and_known_tokens_are_not(clean_url: str, tmp_path: Path) -> None:
    async with (
        service_in_process(clean_url, tmp_path / "data", auth_failures=0.01) as service,
        service.client() as admin,
        service.client("hf_guess") as stranger,
    ):
        assert (await admin.get("/v1/jobs")).status_code == 200
        seen = [await stranger.get("/v1/jobs") for _ in range(3)]
        assert [answer.status_code for answer in seen] == [401, 429, 429]
        assert "unknown tokens" in error_of(seen[1])["message"]
        assert int(seen[1].headers["retry-after"]) >= 1
        assert (await admin.get("/v1/jobs")).status_code == 200


async def test_last_use_and_expiry_of_tokens_are_shown(clean_url: str, tmp_path: Path) -> None:
    app = asgi(clean_url, data_dir=tmp_path)
    transport = httpx.ASGITransport(app)
    async with app.running() as service, httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        client.headers["Authorization"] = f"Bearer {(tmp_path / 'admin.token').read_text().strip()}"
        asked = {"name": "ci", "role": "viewer", "tenant": "default", "expires_at": "2099-01-01T00:00:00Z"}
        made = (await client.post("/v1/tokens", json=asked)).json()
        assert (made["expires_at"], made["used_at"]) == ("2099-01-01T00:00:00Z", None)
        await service.access.note_uses()
        tokens = {token["name"]: token for token in (await client.get("/v1/tokens")).json()["items"]}
        assert tokens["admin"]["used_at"] is not None
        assert (tokens["ci"]["used_at"], tokens["ci"]["created_by"]) == (None, "admin")
        headers = {"Authorization": f"Bearer {made['token']}"}
        assert (await client.get("/v1/jobs", headers=headers)).status_code == 200
        await service.access.note_uses()
        tokens = {token["name"]: token for token in (await client.get("/v1/tokens")).json()["items"]}
        assert tokens["ci"]["used_at"] is not None


async def test_mounted_in_another_application(clean_url: str, tmp_path: Path) -> None:
    inner = asgi(clean_url, data_dir=tmp_path)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with inner.running():
            yield

    outer = FastAPI(lifespan=lifespan)
    outer.mount("/queue", inner)
    async with lifespan(outer):
        token = (tmp_path / "admin.token").read_text().strip()
        transport = httpx.ASGITransport(outer)
        headers = {"Authorization": f"Bearer {token}"}
        async with httpx.AsyncClient(transport=transport, base_url="http://x", headers=headers) as client:
            made = await client.post("/queue/v1/jobs", json=FUNCTION)
            assert made.headers["location"].startswith("/queue/v1/jobs/")
            assert (await client.get(made.headers["location"])).status_code == 200
