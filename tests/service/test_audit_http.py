"""The audit trail over HTTP and from the command line."""

import json
import os
import socket
from pathlib import Path

import httpx
import pytest

from holdfast.assemble_service import asgi
from holdfast.model import Role
from holdfast.store.audit import local_actor
from holdfast.store.tokens import digest
from tests.support.audit_trail import SECRET, trail
from tests.support.service import FUNCTION, Service, error_of, opened, service_in_process
from tests.support.up_process import running


async def test_only_admins_read_the_trail_and_it_is_read_only(service: Service) -> None:
    tokens = {role: await service.token(role) for role in Role}
    for role, token in tokens.items():
        async with service.client(token) as client:
            answer = await client.get("/v1/audit")
            assert answer.status_code == (200 if role is Role.ADMIN else 403), role
            for method in ("POST", "PUT", "PATCH", "DELETE"):
                assert (await client.request(method, "/v1/audit")).status_code == 405
    async with httpx.AsyncClient(base_url=service.url) as stranger:
        assert (await stranger.get("/v1/audit")).status_code == 401


async def test_acts_over_http_name_the_token_its_role_and_its_address(service: Service) -> None:
    operator = await service.token(Role.OPERATOR, "blue", name="olga")
    async with service.client() as admin, service.client(operator) as olga:
        made = (await admin.post("/v1/tokens", json={"name": "ci", "role": "viewer", "tenant": "blue"})).json()
        job = (await olga.post("/v1/jobs", json={**FUNCTION, "hold": True})).json()["id"]
        await olga.delete(f"/v1/jobs/{job}", params={"force": "true", "reason": "why not"})
        await olga.post("/v1/lanes/L/pause")
        await admin.put(
            "/v1/lanes/L",
            json={"check": {"command": ["true", SECRET], "timeout": 3}},
            headers={"Holdfast-Tenant": "blue"},
        )
        await admin.patch("/v1/queues/q", json={"max_running": 2})
        await admin.post("/v1/queues/q/pause")
        await admin.delete(f"/v1/tokens/{made['id']}")
        answer = await admin.get("/v1/audit", params={"limit": 100})
        rows = answer.json()["items"]
        acts = [(row["actor"], row["role"], row["tenant"], row["action"], row["subject"]) for row in reversed(rows)]
        assert acts[-7:] == [
            ("admin", "admin", "blue", "token.make", made["id"]),
            ("olga", "operator", "blue", "job.delete", job),
            ("olga", "operator", "blue", "lane.pause", "L"),
            ("admin", "admin", "blue", "lane.check", "L"),
            ("admin", "admin", None, "queue.limit", "q"),
            ("admin", "admin", None, "queue.pause", "q"),
            ("admin", "admin", "blue", "token.remove", made["id"]),
        ]
        first, *_ = [row for row in rows if row["action"] == "token.make" and row["subject"] != made["id"]][::-1]
        assert first["actor"] == local_actor("server").name
        ids = {token["name"]: token["id"] for token in (await admin.get("/v1/tokens")).json()["items"]}
        assert {row["token_id"] for row in rows if row["actor"] == "olga"} == {ids["olga"]}
        assert {row["address"] for row in rows if row["role"] is not None} == {"127.0.0.1"}
        for hidden in (SECRET, made["token"], digest(made["token"]), operator, digest(operator), service.admin):
            assert hidden not in answer.text
        paged = (await admin.get("/v1/audit", params={"limit": 1, "who": "olga"})).json()
        assert [row["action"] for row in paged["items"]] == ["lane.pause"]
        rest = (await admin.get("/v1/audit", params={"who": "olga", "cursor": paged["next_cursor"]})).json()
        assert ([row["action"] for row in rest["items"]], rest["next_cursor"]) == (["job.delete"], None)
        for wrong in ({"since": "yesterday"}, {"since": "0001-01-01T00:00:00Z"}, {"cursor": "x"}, {"limit": 0}):
            refused = await admin.get("/v1/audit", params=wrong)
            assert refused.status_code == 422, wrong
            assert error_of(refused)["code"] == "invalid"


async def test_any_number_of_guessed_tokens_writes_one_row(clean_url: str, tmp_path: Path) -> None:
    app = asgi(clean_url, data_dir=tmp_path)
    transport = httpx.ASGITransport(app, client=("192.0.2.9", 1))
    async with app.running() as service, httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        for n in range(150):
            refused = await client.get("/v1/jobs", headers={"Authorization": f"Bearer hf_guess-{n}"})
            assert refused.status_code in (401, 429)
        await service.access.note_refusals()
        await service.access.note_refusals()
        (row,) = await trail(service.store, what="auth")
        assert (row.actor, row.token_id, row.action) == ("unknown", None, "auth.refused")
        assert row.after == {"requests": 150, "addresses": 1, "most": {"192.0.2.9": 150}}
        await client.get("/v1/jobs", headers={"Authorization": "Bearer hf_guess"})
    async with opened(clean_url) as store:  # A server that ends writes down what it has not yet.
        assert len(await trail(store, what="auth")) == 2


async def test_first_use_of_a_token_is_recorded_with_its_address(clean_url: str, tmp_path: Path) -> None:
    async with service_in_process(clean_url, tmp_path / "data") as service:
        token = await service.token(Role.VIEWER, "blue", name="vera")
        async with service.client(token) as client:
            for _ in range(3):
                assert (await client.get("/v1/jobs")).status_code == 200
    async with opened(clean_url) as store:
        (row,) = await trail(store, who="vera")
        assert (row.action, row.role, row.tenant, row.address) == ("token.use", Role.VIEWER, "blue", "127.0.0.1")


async def test_server_records_which_tools_changed_since_the_last_start(clean_url: str, tmp_path: Path) -> None:
    file = tmp_path / "tools.toml"
    tool = '[tools.{name}]\nrunner = "process"\ncommand = ["true"]\nenv = {{ KEY = "{key}" }}\n'
    for text in (
        tool.format(name="a", key=SECRET),
        tool.format(name="a", key=SECRET),
        tool.format(name="a", key="other") + tool.format(name="b", key=SECRET),
        None,
    ):
        file.write_text(text or "")
        async with service_in_process(clean_url, tmp_path / "data", tools=file if text else None):
            pass
    async with opened(clean_url) as store:
        rows = await trail(store, what="tools")
        seen = [tuple((row.after or {})[name] for name in ("added", "changed", "removed")) for row in rows]
        assert seen == [(["a"], [], []), (["b"], ["a"], []), ([], [], ["a", "b"])]
        assert [row.subject for row in rows] == [str(file), str(file), "none"]
        assert {row.actor for row in rows} == {local_actor("server").name}
        assert SECRET not in repr(rows)


def test_command_line_lists_the_trail_and_writes_its_own_rows(tmp_path: Path) -> None:
    with running(tmp_path) as up:
        up("queues", "pause", "slow")
        up("prune", "--days", "3")
        said = up("audit", COLUMNS="200")
        assert "queue.pause" in said
        assert "slow" in said
        rows = up.json("audit", "--what", "jobs.prune")["items"]
        assert [(row["actor"], row["after"]["retention_days"]) for row in rows] == [(local_actor("cli").name, 3.0)]
        # The first use of the admin's token is a row too, which the server writes some time later.
        found = ("--who", "admin", "--what", "queue.pause", "--since", "2020-01-01", "-n", "1")
        assert [row["subject"] for row in up.json("audit", *found)["items"]] == ["slow"]
        assert up.json("audit", "--since", "2999-01-01")["items"] == []
        up("audit", "--since", "yesterday", code=2)
        viewer = json.loads(up("token", "make", "v", "--role", "viewer", "--json"))["token"]
        up("audit", code=4, HOLDFAST_TOKEN=viewer)


def test_account_without_a_name_is_recorded_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 987_654)
    assert local_actor.__wrapped__("cli").name == f"cli:987654@{socket.gethostname()}"
