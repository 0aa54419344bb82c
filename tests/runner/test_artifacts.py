"""Artifacts over HTTP: listed and downloaded as attachments; no path leads outside."""

from pathlib import Path

import pytest

from holdfast.client.http import AsyncClient, Refused
from holdfast.model import Claimable, Outcome, Role
from holdfast.runner.folder_artifacts import FolderArtifacts
from holdfast.store import open_store
from tests.support.service import Service, error_of, shared_beside


def shared(service: Service) -> Path:
    return shared_beside(service.data)


async def left(service: Service, files: dict[str, bytes]) -> str:
    """Make a job that ended with artifacts; return its id."""
    async with service.client() as client:
        answer = await client.post("/v1/jobs", json={"runner": "process", "spec": {"command": ["true"]}})
        job: str = answer.json()["id"]
    pair = Claimable(queue="default", capability="process", domain="here")
    async with await open_store(service.database_url, listen=False) as store:
        (lease,) = (await store.leases.claim("w", [pair], slots=1, ttl=60)).claimed
        folder = FolderArtifacts(shared(service)).folder(job, lease.attempt, lease.token)
        for name, data in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
        await store.leases.finish([(lease, Outcome.succeeded(exit_code=0))])
    return job


async def test_artifacts_are_listed_and_downloaded_as_attachments(service: Service, tmp_path: Path) -> None:
    """Proves R14."""
    job = await left(service, {"page.html": b"<script>", "deep/ö ä.bin": b"x" * 300_000})
    async with service.client() as client:
        listed = (await client.get(f"/v1/jobs/{job}/artifacts")).json()["items"]
        assert [(item["path"], item["size"]) for item in listed] == [("deep/ö ä.bin", 300_000), ("page.html", 8)]
        answer = await client.get(listed[1]["href"])
        assert answer.content == b"<script>"
        assert answer.headers["content-type"] == "application/octet-stream"
        assert answer.headers["content-disposition"] == "attachment; filename*=UTF-8''page.html"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["content-security-policy"].startswith("sandbox")
        assert len((await client.get(listed[0]["href"])).content) == 300_000
    async with AsyncClient(service.url, token=service.admin) as typed:
        (first, _) = await typed.artifacts(job)
        await typed.download(job, first.path, tmp_path / "copy")
        assert (tmp_path / "copy").read_bytes() == b"x" * 300_000
        with pytest.raises(Refused) as refused:
            await typed.download(job, "none", tmp_path / "none")
        assert refused.value.status == 404
        assert not (tmp_path / "none").exists()


async def test_no_path_leads_out_of_a_jobs_artifacts(service: Service) -> None:
    """Proves R14."""
    job = await left(service, {"fine": b"fine"})
    (shared(service) / "secret").write_text("secret")
    folder = next((shared(service) / "artifacts" / job).iterdir())
    (folder / "link").symlink_to(shared(service) / "secret")
    async with service.client() as client:
        for path in ("link", "../secret", "%2e%2e/secret", "..%2f..%2fsecret", "/etc/passwd", "%00", "%2e"):
            answer = await client.get(f"/v1/jobs/{job}/artifacts/{path}")
            assert answer.status_code in (404, 422), (path, answer.status_code)
    async with service.client(await service.token(Role.VIEWER, tenant="other")) as stranger:
        assert (await stranger.get(f"/v1/jobs/{job}/artifacts")).status_code == 404
        assert (await stranger.get(f"/v1/jobs/{job}/artifacts/fine")).status_code == 404


async def test_part_of_an_artifact_is_downloaded(service: Service) -> None:
    """Proves R14: a broken download continues where it stopped."""
    job = await left(service, {"file": b"0123456789", "empty": b""})
    url = f"/v1/jobs/{job}/artifacts/file"
    async with service.client() as client:
        whole = await client.get(url)
        assert (whole.status_code, whole.headers["content-length"]) == (200, "10")
        assert whole.headers["accept-ranges"] == "bytes"
        for asked, body, content_range in (
            ("bytes=7-", b"789", "bytes 7-9/10"),
            ("bytes=2-4", b"234", "bytes 2-4/10"),
            ("bytes=8-99", b"89", "bytes 8-9/10"),
        ):
            part = await client.get(url, headers={"Range": asked})
            assert (part.status_code, part.content, part.headers["content-range"]) == (206, body, content_range)
        for past in ("bytes=10-", "bytes=5-4"):
            refused = await client.get(url, headers={"Range": past})
            assert (refused.status_code, error_of(refused)["code"]) == (416, "range_not_satisfiable")
        for other in ("bytes=-3", "bytes=0-1,3-4", "lines=1-2", "bytes=x-"):
            ignored = await client.get(url, headers={"Range": other})
            assert (ignored.status_code, ignored.content) == (200, b"0123456789"), other
        assert (await client.get(f"/v1/jobs/{job}/artifacts/empty")).content == b""
