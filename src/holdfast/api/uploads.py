"""Uploads: reads multipart forms as they come, and gives what was uploaded to the jobs that name it."""

import contextlib
from collections.abc import Mapping
from typing import Any

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from holdfast.config import Settings
from holdfast.errors import BadRequest, Invalid
from holdfast.model import new_id
from holdfast.runner.inputs import Incoming, Inputs
from holdfast.runner.outputs import Limits
from holdfast.runner.shared_folder import SharedFolder
from holdfast.submission import check, parse

MULTIPART = "multipart/form-data"
MOST_FILES = 1000
PIECE = 256 * 1024
"""What is parsed and written at once, in a thread."""


async def receive(request: Request, tenant: str, settings: Settings, shared: SharedFolder) -> Incoming:
    """Take the files of a form; they are there when this returns, and nothing is if it does not."""
    kind, options = parse_options_header(request.headers.get("content-type"))
    if kind != MULTIPART.encode() or not options.get(b"boundary"):
        raise BadRequest(f"an upload must be a form with files: Content-Type: {MULTIPART}, with a boundary")
    limits = Limits(bytes=settings.upload_max_bytes, entries=MOST_FILES)
    await run_in_threadpool(shared.check)
    incoming = await run_in_threadpool(Inputs(settings.shared).receive, tenant, limits)
    try:
        form = _Form(incoming, options[b"boundary"])
        async with contextlib.aclosing(request.stream()) as chunks:
            held = bytearray()
            async for chunk in chunks:
                held += chunk
                if len(held) >= PIECE:
                    await run_in_threadpool(form.write, bytes(held))
                    held.clear()
        await run_in_threadpool(form.write, bytes(held))
        await run_in_threadpool(form.finish)
    except FormParserError as error:
        raise BadRequest(f"the form cannot be read: {error}") from error
    finally:
        await run_in_threadpool(incoming.discard)
    return incoming


class _Form:
    """A form as a parser hears it: every part is a file."""

    def __init__(self, incoming: Incoming, boundary: bytes) -> None:
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
            raise BadRequest("the form breaks off before its last boundary")
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


async def given(job: Mapping[str, Any], tenant: str, settings: Settings, shared: SharedFolder) -> Mapping[str, Any]:
    """A job as it goes to the store: what it names of uploads is its own, before it is there."""
    if not job.get("uploads"):
        return job
    job = {**job, "id": job.get("id") or new_id()}
    asked = check(parse(job), tenant)
    await run_in_threadpool(shared.check)
    inputs = Inputs(settings.shared)
    await run_in_threadpool(inputs.give, tenant, str(asked.id), asked.uploads, settings.upload_max_bytes)
    return job
