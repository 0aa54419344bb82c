"""Artifacts over HTTP: listed, downloaded as attachments, never run by a browser, never from elsewhere."""

from pathlib import Path

import pytest

from holdfast.client.http import AsyncClient, Refused
from holdfast.model import Claimable, Outcome, Role
from holdfast.runner.artifacts import ArtifactStore
from holdfast.store import open_store
from tests.support.service import Served, shared_beside


def shared(served: Served) -> Path:
    return shared_beside(served.data)


async def left(served: Served, files: dict[str, bytes]) -> str:
    """A job that ended and left files; return its id."""
    async with served.client() as client:
        answer = await client.post("/v1/jobs", json={"runner": "process", "spec": {"command": ["true"]}})
        job: str = answer.json()["id"]
    pair = Claimable(queue="default", capability="process", domain="here")
    async with await open_store(served.database_url, listen=False) as store:
        (lease,) = (await store.leases.claim("w", [pair], slots=1, ttl=60)).claimed
        folder = ArtifactStore(shared(served)).folder(job, lease.attempt, lease.token)
        for name, data in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
        await store.leases.finish([(lease, Outcome.succeeded(exit_code=0))])
    return job


async def test_artifacts_are_listed_and_downloaded_as_attachments(served: Served, tmp_path: Path) -> None:
    """Proves R14."""
    job = await left(served, {"page.html": b"<script>", "deep/ö ä.bin": b"x" * 300_000})
    async with served.client() as client:
        listed = (await client.get(f"/v1/jobs/{job}/artifacts")).json()["items"]
        assert [(item["path"], item["size"]) for item in listed] == [("deep/ö ä.bin", 300_000), ("page.html", 8)]
        answer = await client.get(listed[1]["href"])
        assert answer.content == b"<script>"
        assert answer.headers["content-type"] == "application/octet-stream"
        assert answer.headers["content-disposition"] == "attachment; filename*=UTF-8''page.html"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["content-security-policy"].startswith("sandbox")
        assert len((await client.get(listed[0]["href"])).content) == 300_000
    async with AsyncClient(served.url, token=served.admin) as typed:
        (first, _) = await typed.artifacts(job)
        await typed.download(job, first.path, tmp_path / "copy")
        assert (tmp_path / "copy").read_bytes() == b"x" * 300_000
        with pytest.raises(Refused) as refused:
            await typed.download(job, "none", tmp_path / "none")
        assert refused.value.status == 404
        assert not (tmp_path / "none").exists()


async def test_no_path_leads_out_of_a_jobs_artifacts(served: Served) -> None:
    """Proves R14."""
    job = await left(served, {"fine": b"fine"})
    (shared(served) / "secret").write_text("secret")
    folder = next((shared(served) / "artifacts" / job).iterdir())
    (folder / "link").symlink_to(shared(served) / "secret")
    async with served.client() as client:
        for path in ("link", "../secret", "%2e%2e/secret", "..%2f..%2fsecret", "/etc/passwd", "%00", "%2e"):
            answer = await client.get(f"/v1/jobs/{job}/artifacts/{path}")
            assert answer.status_code in (404, 422), (path, answer.status_code)
    async with served.client(await served.token(Role.VIEWER, tenant="other")) as stranger:
        assert (await stranger.get(f"/v1/jobs/{job}/artifacts")).status_code == 404
        assert (await stranger.get(f"/v1/jobs/{job}/artifacts/fine")).status_code == 404
