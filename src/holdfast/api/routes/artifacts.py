"""Artifacts: the files of the last ended attempt of a job."""

import re
from collections.abc import Iterator
from typing import IO
from urllib.parse import quote

from starlette.concurrency import run_in_threadpool
from starlette.responses import Response, StreamingResponse

from holdfast.api.request_types import ArtifactList
from holdfast.api.routing import Call, Reply, Routes
from holdfast.errors import NotFound, RangeNotSatisfiable
from holdfast.model import Attempt, Role
from holdfast.response_types import ArtifactView

routes = Routes()
CHUNK = 256 * 1024
BYTES = "application/octet-stream"
SAFE = {
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": "sandbox; default-src 'none'",
    "Cache-Control": "private, no-store",
    "Accept-Ranges": "bytes",
}
"""A browser saves the files of a job and executes nothing in them, whatever their names are."""
RANGE = re.compile(r"bytes=([0-9]{1,18})-([0-9]{1,18})?")
"""One range with a start. Any other form is ignored, as HTTP allows, and the whole file is sent."""


@routes.add("GET", "/v1/jobs/{job_id}/artifacts", role=Role.VIEWER, answers={200: ArtifactList})
async def list_artifacts(call: Call, job_id: str) -> Reply:
    """List the artifacts of the last ended attempt."""
    attempt = await _last(call, job_id)
    if attempt is None:
        return Reply(ArtifactList(items=()))
    found = await run_in_threadpool(call.service.artifacts.list, job_id, attempt.attempt, attempt.token)
    base = f"{call.root}/v1/jobs/{job_id}/artifacts"
    return Reply(
        ArtifactList(
            items=[ArtifactView(path=one.path, size=one.size, href=f"{base}/{quote(one.path)}") for one in found]
        )
    )


@routes.add(
    "GET", "/v1/jobs/{job_id}/artifacts/{path:path}", role=Role.VIEWER, answers={200: str, 206: str}, media=BYTES
)
async def download_artifact(call: Call, job_id: str, path: str) -> Response:
    """Download one artifact, or the part of it that a header `Range` asks for."""
    attempt = await _last(call, job_id)
    if attempt is None:
        raise NotFound("artifact", path)
    part = RANGE.fullmatch(call.request.headers.get("range", ""))
    start = int(part[1]) if part else 0
    file = await run_in_threadpool(
        lambda: call.service.artifacts.open(job_id, attempt.attempt, attempt.token, path, start=start)
    )
    end = min(file.size, int(part[2]) + 1) if part and part[2] else file.size
    if part and start >= end:
        file.content.close()
        raise RangeNotSatisfiable(f"the artifact has {file.size} bytes; the range {part[0]} has none of them")
    name = quote(path.rpartition("/")[2], safe="")
    headers = SAFE | {
        "Content-Disposition": f"attachment; filename*=UTF-8''{name}",
        "Content-Length": str(end - start),
    }
    if part:
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{file.size}"
    body = _chunks(file.content, end - start)
    return StreamingResponse(body, 206 if part else 200, media_type=BYTES, headers=headers)


def _chunks(file: IO[bytes], left: int) -> Iterator[bytes]:
    with file:
        while left and (chunk := file.read(min(CHUNK, left))):
            left -= len(chunk)
            yield chunk


async def _last(call: Call, job_id: str) -> Attempt | None:
    """Return the last ended attempt of a job of this tenant."""
    attempts = await call.store.attempts.list(job_id, tenant=call.tenant)
    return next((attempt for attempt in reversed(attempts) if attempt.ended_at is not None), None)
