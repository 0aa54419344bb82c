"""Uploads: stored completely or not at all, copied to jobs, and removed when unused."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from holdfast.client.http import AsyncClient
from holdfast.duties.upload_cleaner import UploadCleaner
from holdfast.errors import NotFound
from holdfast.model import Role, Status, new_id
from holdfast.runner.folder_artifacts import FolderArtifacts
from holdfast.runner.uploads import input_files
from tests.support.in_process_workers import InProcessWorkers, eventually
from tests.support.service import Service, error_of, service_in_process

CAP = 100_000
TOOLS = """
[tools.closed]
runner = "process"
command = ["true"]

[tools.open]
runner = "process"
command = ["cat", "input/deep/b.txt"]
uploads = true
"""


def files(**named: bytes) -> list[tuple[str, tuple[str, bytes]]]:
    return [("file", (name.replace("__", "/").replace("_", "."), data)) for name, data in named.items()]


def cat(*uploads: str, **fields: Any) -> dict[str, Any]:
    script = "cd input && for file in $(find . -type f | sort); do echo $file $(cat $file); echo x >> $file; done"
    return {"runner": "process", "spec": {"command": ["sh", "-c", script]}, "uploads": list(uploads), **fields}


def left(shared: Path) -> list[str]:
    """Every file and folder of uploads and inputs, but the folders of tenants."""
    return [str(path) for kind in ("uploads/*", "inputs") for path in shared.glob(f"{kind}/*")]


async def test_job_gets_copies_of_what_was_uploaded_and_keeps_them_until_it_is_gone(workers: InProcessWorkers) -> None:
    url, shared = workers.settings.database_url or "", workers.settings.shared
    async with (
        service_in_process(url, workers.settings.data_dir) as service,
        service.client() as client,
        workers.worker(),
    ):
        made = await client.post("/v1/uploads", files=files(a_txt=b"one", deep__b_txt=b"two"))
        assert made.status_code == 201, made.text
        assert made.json()["files"] == [{"path": "a.txt", "size": 3}, {"path": "deep/b.txt", "size": 3}]
        upload = made.json()["upload"]
        first = (await client.post("/v1/jobs", json=cat(upload))).json()
        bulk = await client.post("/v1/jobs/bulk", json={"jobs": [cat(upload, max_attempts=2)]})
        for job in (first["id"], *bulk.json()["ids"]):
            await workers.ended(job, Status.SUCCEEDED)
            assert await workers.log(job) == ["./a.txt one", "./deep/b.txt two"], "and what a job changes is its own"
        artifacts = FolderArtifacts(shared)
        sweep = UploadCleaner(workers.store, artifacts, grace=0, day=0)
        assert await sweep.run_once() == 1, "the upload is old, and both jobs are there"
        assert input_files(artifacts, first["id"], [upload]).keys() == {"a.txt", "deep/b.txt"}
        late = await client.post("/v1/jobs", json=cat(upload))
        assert (late.status_code, error_of(late)["details"]["what"]) == (404, "upload")
        for job in (first["id"], *bulk.json()["ids"]):  # 202: the worker is still removing the attempt's folder.
            assert (await client.delete(f"/v1/jobs/{job}")).status_code in (200, 202)

        async def removed() -> bool:
            return left(shared) == []

        await eventually(removed, "what a job was given goes with it")


@pytest.mark.parametrize("kind", ["sqlite"])
async def test_bad_forms_are_refused_and_leave_nothing(clean_url: str, tmp_path: Path) -> None:
    """Proves O8."""
    shared = tmp_path / "shared"
    async with (
        service_in_process(clean_url, tmp_path / "data", upload_max_bytes=CAP) as service,
        service.client() as client,
    ):
        for name in ("../x", "/etc/x", "a/../../x", "a//b", ".", "x" * 300):
            refused = await client.post("/v1/uploads", files=[("file", (name, b"x"))])
            assert (refused.status_code, error_of(refused)["details"]["field"]) == (422, "file"), name
        for pair in (["a", "a"], ["a", "a/b"], ["a/b", "a"]):
            refused = await client.post("/v1/uploads", files=[("file", (name, b"x")) for name in pair])
            assert refused.status_code == 422, pair
        huge = await client.post("/v1/uploads", files=files(a=b"x" * (CAP + 1)))
        assert (huge.status_code, error_of(huge)["code"]) == (413, "too_large")
        form, part = "multipart/form-data; boundary=b", b"--b\r\nContent-Disposition: form-data; name=f"
        for body, kind in (
            (b"{}", "application/json"),
            (b"", "multipart/form-data"),
            (b"x", form),
            (part + b"; filename=a\r\n\r\nhal", form),
            (part + b"\r\n\r\nx\r\n--b--", form),
            (b"--b--\r\n", form),
            (b"x", f"multipart/form-data; boundary={'b' * 5000}"),
        ):
            refused = await client.post("/v1/uploads", content=body, headers={"Content-Type": kind})
            assert refused.status_code in (400, 422), (kind, refused.text)
            assert error_of(refused)["message"]
        await cut_in_the_middle(service, shared)
        assert left(shared) == []
        for upload in (new_id(), "../../etc", "x", "*"):
            assert (await client.post("/v1/jobs", json=cat(upload))).status_code == 404
        with pytest.raises(NotFound):
            input_files(FolderArtifacts(shared), new_id(), ["../../uploads"])


async def cut_in_the_middle(service: Service, shared: Path) -> None:
    """Send half a file and go away."""
    _, writer = await asyncio.open_connection("127.0.0.1", service.port)
    head = f"POST /v1/uploads HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {service.admin}\r\n"
    kind = "Content-Type: multipart/form-data; boundary=b\r\nContent-Length: 99999999\r\n\r\n"
    form = "--b\r\nContent-Disposition: form-data; name=f; filename=a\r\n\r\n"
    writer.write(f"{head}{kind}{form}".encode() + b"x" * 50_000)
    await writer.drain()
    writer.close()
    await writer.wait_closed()

    async def gone() -> bool:
        return left(shared) == []

    await eventually(gone, "nothing is left of it")


@pytest.mark.parametrize("kind", ["sqlite"])
async def test_upload_is_its_tenants_and_a_tool_must_want_it(workers: InProcessWorkers, tmp_path: Path) -> None:
    """Proves N5, O8."""
    tools = tmp_path / "tools.toml"
    tools.write_text(TOOLS)
    url = workers.settings.database_url or ""
    async with service_in_process(url, workers.settings.data_dir, tools=tools, upload_max_bytes=CAP) as service:
        blue, green = [await service.token(Role.SUBMITTER, tenant) for tenant in ("blue", "default")]
        async with service.client(blue) as client:
            foreign = (await client.post("/v1/uploads", files=files(a=b"x"))).json()["upload"]
        async with service.client(green) as client, workers.worker():
            mine = (await client.post("/v1/uploads", files=files(deep__b_txt=b"two"))).json()["upload"]
            for job, status in (
                ({"tool": "open", "uploads": [foreign]}, 404),
                ({"tool": "open", "uploads": [mine, mine]}, 422),
                ({"tool": "closed", "uploads": [mine]}, 422),
                ({"runner": "function", "spec": {"name": "f"}, "uploads": [mine]}, 422),
            ):
                answer = await client.post("/v1/jobs", json=job)
                assert answer.status_code == status, (job, answer.text)
            made = await client.post("/v1/jobs", json={"tool": "open", "uploads": [mine]})
            await workers.ended(made.json()["id"], Status.SUCCEEDED)
            assert await workers.log(made.json()["id"]) == ["two"]
            large = [("file", (name, b"x" * (CAP - 10))) for name in ("c", "d")]
            two = [(await client.post("/v1/uploads", files=[one])).json()["upload"] for one in large]
            assert (await client.post("/v1/jobs", json={"tool": "open", "uploads": two})).status_code == 413


@pytest.mark.parametrize("kind", ["sqlite"])
async def test_job_with_missing_uploads_gives_the_reason(workers: InProcessWorkers) -> None:
    async with workers.worker():
        failed = await workers.ended(await workers.store.jobs.submit(cat(new_id())), Status.FAILED)
    assert failed.error is not None
    assert failed.error.code == "start_failed"
    assert "artifact store" in failed.error.message


@pytest.mark.parametrize("kind", ["sqlite"])
async def test_client_uploads_also_where_tokens_are_off_and_a_page_cannot(clean_url: str, tmp_path: Path) -> None:
    """Proves O8."""
    path = tmp_path / "a.txt"
    path.write_bytes(b"one")
    async with service_in_process(clean_url, tmp_path / "data", auth="off") as service:
        async with httpx.AsyncClient(base_url=service.url) as page:
            assert (await page.post("/v1/uploads", files=files(a=b"x"))).status_code == 400
        async with AsyncClient(service.url, data_dir=tmp_path / "none") as client:
            upload = await client.upload(path)
            job = await client.submit(cat(upload))
            assert job.policy.uploads == (upload,)
