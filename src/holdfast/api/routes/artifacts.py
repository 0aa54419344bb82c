"""Artifacts: the files of the last ended attempt of a job."""

from collections.abc import Iterator
from typing import IO
from urllib.parse import quote

from starlette.concurrency import run_in_threadpool
from starlette.responses import Response, StreamingResponse

from holdfast.api.request_types import ArtifactList
from holdfast.api.routing import Call, Reply, Routes
from holdfast.errors import NotFound
from holdfast.model import Attempt, Role
from holdfast.response_types import ArtifactView
from holdfast.runner.artifacts import ArtifactStore

routes = Routes()
CHUNK = 256 * 1024
BYTES = "application/octet-stream"
SAFE = {
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": "sandbox; default-src 'none'",
    "Cache-Control": "private, no-store",
}
"""A browser saves the files of a job and executes nothing in them, whatever their names are."""


@routes.add("GET", "/v1/jobs/{job_id}/artifacts", role=Role.VIEWER, answers={200: ArtifactList})
async def list_artifacts(call: Call, job_id: str) -> Reply:
    """List the artifacts of the last ended attempt."""
    attempt = await _last(call, job_id)
    await run_in_threadpool(call.service.shared.check)
    if attempt is None:
        return Reply(ArtifactList(items=()))
    found = await run_in_threadpool(_kept(call).list, job_id, attempt.attempt, attempt.token)
    base = f"{call.root}/v1/jobs/{job_id}/artifacts"
    return Reply(
        ArtifactList(
            items=[ArtifactView(path=one.path, size=one.size, href=f"{base}/{quote(one.path)}") for one in found]
        )
    )


@routes.add("GET", "/v1/jobs/{job_id}/artifacts/{path:path}", role=Role.VIEWER, answers={200: str}, media=BYTES)
async def download_artifact(call: Call, job_id: str, path: str) -> Response:
    """Download one artifact. The file is checked again, and links are not followed."""
    attempt = await _last(call, job_id)
    if attempt is None:
        raise NotFound("artifact", path)
    await run_in_threadpool(call.service.shared.check)
    file = await run_in_threadpool(_kept(call).open, job_id, attempt.attempt, attempt.token, path)
    name = quote(path.rpartition("/")[2], safe="")
    headers = SAFE | {"Content-Disposition": f"attachment; filename*=UTF-8''{name}"}
    return StreamingResponse(_chunks(file), media_type=BYTES, headers=headers)


def _chunks(file: IO[bytes]) -> Iterator[bytes]:
    with file:
        while chunk := file.read(CHUNK):
            yield chunk


def _kept(call: Call) -> ArtifactStore:
    return ArtifactStore(call.service.settings.shared)


async def _last(call: Call, job_id: str) -> Attempt | None:
    """Return the last ended attempt of a job of this tenant."""
    attempts = await call.store.attempts.list(job_id, tenant=call.tenant)
    return next((attempt for attempt in reversed(attempts) if attempt.ended_at is not None), None)
