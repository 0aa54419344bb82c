"""A service without tokens: no web page and no proxy reaches it, and it listens on loopback only."""

import os
import re
from pathlib import Path

import httpx
import pytest

from holdfast.api import docs_page, openapi
from holdfast.api.app import declared
from holdfast.assemble_service import asgi
from holdfast.config import load
from holdfast.errors import ConfigError
from holdfast.model import new_id
from tests.support.service import FUNCTION, Service, error_of, service_in_process

JSON_BODY = {"Content-Type": "application/json"}
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
                said = {**JSON_BODY, **{name: value.format(port=service.port) for name, value in headers.items()}}
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
