"""Access: which role may call what, which jobs it sees, and that a web page can do nothing."""

import asyncio
import os
import re
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

from holdfast import errors
from holdfast.api import docs_page, openapi
from holdfast.api.app import declared
from holdfast.api.auth import first_admin
from holdfast.api.errors import to_response
from holdfast.assemble_service import asgi
from holdfast.config import load
from holdfast.errors import ConfigError, HoldfastError
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


OFF = {"Content-Type": "application/json"}
CROSS: list[tuple[str, dict[str, str], int]] = [
    ("a tool on this machine", {}, 201),
    ("our own page", {"Origin": "http://127.0.0.1:{port}", "Sec-Fetch-Site": "same-origin"}, 201),
    ("DNS rebinding", {"Host": "evil.example:{port}"}, 403),
    ("DNS rebinding to a name like ours", {"Host": "127.0.0.1.evil.example"}, 403),
    ("no host", {"Host": ""}, 403),
    ("a page of another site", {"Origin": "https://evil.example"}, 403),
    ("a page of another port", {"Origin": "http://127.0.0.1:1"}, 403),
    ("a sandboxed page", {"Origin": "null"}, 403),
    ("our name, other scheme", {"Origin": "https://127.0.0.1:{port}"}, 403),
    ("a page that sends no origin", {"Sec-Fetch-Site": "cross-site"}, 403),
    ("a page of another local port", {"Sec-Fetch-Site": "same-site"}, 403),
    ("a form", {"Content-Type": "text/plain"}, 400),
    ("a form", {"Content-Type": "application/x-www-form-urlencoded"}, 400),
]


async def test_without_tokens_no_web_page_reaches_it(clean_url: str, tmp_path: Path) -> None:
    """Proves O8."""
    async with service_in_process(clean_url, tmp_path / "data", auth="off") as service:
        async with httpx.AsyncClient(base_url=service.url) as client:
            for what, headers, status in CROSS:
                said = {**OFF, **{name: value.format(port=service.port) for name, value in headers.items()}}
                answer = await client.post("/v1/jobs", json=FUNCTION, headers=said)
                assert answer.status_code == status, (what, answer.text)
                if status == 403:
                    assert (await client.get("/v1/jobs", headers=said)).status_code == 403, what
            assert (await client.post(f"/v1/jobs/{new_id()}/cancel")).status_code == 400
            assert (await client.get("/v1/jobs", headers={"Host": f"localhost:{service.port}"})).status_code == 200
            preflight = await client.options("/v1/jobs", headers={"Origin": "https://evil.example"})
            assert preflight.status_code == 405
            assert "access-control-allow-origin" not in preflight.headers
            assert len((await client.get("/v1/jobs")).json()["items"]) == 2
        assert not (tmp_path / "data" / "admin.token").exists()


async def test_without_tokens_an_application_elsewhere_refuses_strangers(clean_url: str, tmp_path: Path) -> None:
    """Proves O8."""
    app = asgi(clean_url, data_dir=tmp_path, auth="off", auth_off_as_root=True)
    async with app.running():
        for client, status in (("127.0.0.1", 200), ("10.1.2.3", 403)):
            transport = httpx.ASGITransport(app, client=(client, 1))
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as caller:
                assert (await caller.get("/v1/jobs")).status_code == status


async def test_pages_load_nothing_from_elsewhere_and_run_no_script(service: Service) -> None:
    """Proves I3."""
    async with httpx.AsyncClient(base_url=service.url) as client:
        page = await client.get("/docs")
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    policy = dict(part.strip().split(" ", 1) for part in page.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == policy["base-uri"] == policy["frame-ancestors"] == "'none'"
    assert set(policy) == {"default-src", "base-uri", "form-action", "frame-ancestors", "style-src"}
    assert policy["style-src"].startswith("'sha256-")
    assert page.headers["x-content-type-options"] == "nosniff"
    links = re.findall(r"(?:src|href|action|url)\s*[=(]\s*['\"]?([^'\" >)]*)", page.text)
    assert {link for link in links if not link.startswith("#")} == {"openapi.json"}
    assert not re.search(r"<(script|link|img|iframe|object|embed|form|base)\b| on\w+=| style=", page.text)
    assert "/v1/jobs/{job_id}/cancel" in page.text


def test_page_shows_markup_in_a_description_as_text() -> None:
    document = openapi.document(declared())
    document["info"]["description"] = "<script>alert(1)</script> `<b>`"
    text = docs_page.page(document)
    assert "<script" not in text
    assert "<code>&lt;b&gt;</code>" in text


@pytest.mark.parametrize("path", ["/docs", "/openapi.json", "/healthz"])
async def test_without_tokens_pages_have_the_same_guard(clean_url: str, tmp_path: Path, path: str) -> None:
    """Proves I3."""
    async with service_in_process(clean_url, tmp_path / "data", auth="off") as service:
        for headers, status in (
            ({}, 200),
            ({"Host": "rebound.example"}, 403),
            ({"Origin": "https://evil.example"}, 403),
        ):
            async with httpx.AsyncClient(base_url=service.url, headers=headers) as client:
                assert (await client.get(path)).status_code == status


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "example.com", "10.0.0.1"])
def test_tokens_cannot_be_off_where_others_reach_it(host: str) -> None:
    """Proves O8."""
    with pytest.raises(ConfigError, match="HOLDFAST_AUTH is off"):
        load(environment={"HOLDFAST_AUTH": "off", "HOLDFAST_HOST": host})
    alone = {"HOLDFAST_AUTH": "off", "HOLDFAST_HOST": "::1", "HOLDFAST_AUTH_OFF_AS_ROOT": "true"}
    assert load(environment=alone).auth == "off"


@pytest.mark.skipif(os.geteuid() != 0, reason="about root")
def test_tokens_cannot_be_off_for_root_without_a_setting() -> None:
    """A process of a job reaches the loopback, so it could submit a job that runs as root."""
    with pytest.raises(ConfigError, match="HOLDFAST_AUTH_OFF_AS_ROOT"):
        load(environment={"HOLDFAST_AUTH": "off"})
    assert load(environment={"HOLDFAST_AUTH": "off", "HOLDFAST_AUTH_OFF_AS_ROOT": "true"}).auth == "off"


@pytest.mark.parametrize("name", ["Forwarded", "X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto"])
async def test_without_tokens_nothing_that_a_proxy_forwards_is_answered(
    clean_url: str, tmp_path: Path, name: str
) -> None:
    async with (
        service_in_process(clean_url, tmp_path / "data", auth="off") as service,
        service.client("none") as client,
    ):
        answer = await client.get("/v1/jobs", headers={name: "for=10.0.0.1"})
    assert (answer.status_code, name.lower() in error_of(answer)["message"]) == (403, True)


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


def every_error(kind: type[HoldfastError] = HoldfastError) -> list[type[HoldfastError]]:
    return [kind, *(below for child in kind.__subclasses__() for below in every_error(child))]


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


def test_every_error_has_a_status_a_code_and_the_one_shape() -> None:
    for kind in every_error():
        made = kind.__new__(kind)
        HoldfastError.__init__(made, "what")
        if kind is errors.RateLimited:
            made = errors.RateLimited(2.0)
        response = to_response(made)
        assert response.status_code == kind.status
        assert response.status_code in (400, 401, 403, 404, 408, 409, 413, 416, 422, 429, 500, 503, 507)
        assert f'"code":"{kind.code}"'.encode() in bytes(response.body)
    codes = [kind.code for kind in every_error() if kind.__module__ == errors.__name__]
    assert len(set(codes)) == len(codes)


def test_unexpected_error_reveals_nothing(caplog: pytest.LogCaptureFixture) -> None:
    response = to_response(RuntimeError("postgresql://user:password@host"))
    assert response.status_code == 500
    assert b"password" not in bytes(response.body)
    assert "password" in caplog.text
    away = to_response(errors.StoreUnreachable("cannot reach postgresql://user:password@host"))
    assert b"password" not in bytes(away.body)


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
