"""Uploads: reads multipart forms as they arrive, and assigns uploads to the jobs that name them."""

import contextlib
import errno
from collections.abc import Mapping
from typing import Any

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from holdfast.config import Settings
from holdfast.errors import BadRequest, DiskFull, Invalid
from holdfast.model import new_id
from holdfast.runner.artifacts import ArtifactStore
from holdfast.runner.collected_outputs import ArtifactLimits
from holdfast.runner.uploads import IncomingUpload, link_uploads, receive_upload
from holdfast.submission import check, parse

MULTIPART = "multipart/form-data"
MOST_FILES = 1000
PIECE = 256 * 1024
"""Bytes that are parsed and written at once, in a thread."""


async def receive(request: Request, tenant: str, settings: Settings, artifacts: ArtifactStore) -> IncomingUpload:
    """Store the files of a form: all of them when this returns, none if it raises."""
    kind, options = parse_options_header(request.headers.get("content-type"))
    if kind != MULTIPART.encode() or not options.get(b"boundary"):
        raise BadRequest(f"an upload must be a form with files: Content-Type: {MULTIPART}, with a boundary")
    limits = ArtifactLimits(bytes=settings.upload_max_bytes, entries=MOST_FILES)
    incoming = await run_in_threadpool(receive_upload, artifacts, tenant, limits)
    try:
        form = _Form(incoming, options[b"boundary"])
        async with contextlib.aclosing(request.stream()) as chunks:
            buffer = bytearray()
            async for chunk in chunks:
                buffer += chunk
                if len(buffer) >= PIECE:
                    await run_in_threadpool(artifacts.check_room)
                    await run_in_threadpool(form.write, bytes(buffer))
                    buffer.clear()
        await run_in_threadpool(form.write, bytes(buffer))
        await run_in_threadpool(form.finish)
    except FormParserError as error:
        raise BadRequest(f"the form cannot be read: {error}") from error
    except OSError as error:
        raise _without_room(error) from error
    finally:
        await run_in_threadpool(incoming.discard)
    return incoming


class _Form:
    """The parser's callbacks for a form: every part is a file."""

    def __init__(self, incoming: IncomingUpload, boundary: bytes) -> None:
        self._incoming = incoming
        self._field = b""
        self._value = b""
        self._headers: dict[bytes, bytes] = {}
        self._whole = False
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._headers.clear,
                "on_header_field": self._on_field,
                "on_header_value": self._on_value,
                "on_header_end": self._on_header,
                "on_headers_finished": self._on_headers,
                "on_part_data": lambda data, start, end: incoming.write(data[start:end]),
                "on_part_end": incoming.end,
                "on_end": self._on_end,
            },
        )

    def write(self, data: bytes) -> None:
        if data:
            self._parser.write(data)

    def finish(self) -> None:
        self._parser.finalize()
        if not self._whole:
            raise BadRequest("the form ends before its last boundary")
        if not self._incoming.files:
            raise Invalid("file", "the form has no file in it")
        self._incoming.publish()

    def _on_field(self, data: bytes, start: int, end: int) -> None:
        self._field += data[start:end]

    def _on_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _on_header(self) -> None:
        self._headers[self._field.lower()] = self._value
        self._field = self._value = b""

    def _on_headers(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition"))
        name = options.get(b"filename")
        if name is None:
            raise Invalid("file", "every part of the form must be a file, with a file name")
        self._incoming.begin(name.decode("utf-8", "replace"))

    def _on_end(self) -> None:
        self._whole = True


def _without_room(error: OSError) -> Exception:
    """Return the error for the caller if the disk is full; any other error goes to the log."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return error
    return DiskFull("the disk of the artifact store is full; make room, or delete jobs with force")


async def with_uploads(
    job: Mapping[str, Any], tenant: str, settings: Settings, artifacts: ArtifactStore
) -> Mapping[str, Any]:
    """Return the job for the store; its uploads are assigned to it before it is submitted."""
    if not job.get("uploads"):
        return job
    job = {**job, "id": job.get("id") or new_id()}
    asked = check(parse(job), tenant)
    give = (tenant, str(asked.id), asked.uploads, settings.upload_max_bytes)
    try:
        await run_in_threadpool(link_uploads, artifacts, *give)
    except OSError as error:
        raise _without_room(error) from error
    return job
