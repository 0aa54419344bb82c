"""Uploads: files that callers give to jobs. Their rules are here; an `ArtifactStore` stores them.

An upload never changes. It may be given to jobs for a day; each job keeps the files until it is deleted.
"""

import uuid
from collections.abc import Mapping, Sequence
from typing import IO

from holdfast.errors import Conflict, Invalid, NotFound, TooLarge
from holdfast.model import new_id
from holdfast.runner.artifacts import ArtifactStore, FileWriter, InputFile
from holdfast.runner.collected_outputs import ArtifactLimits, ContractViolation, checked_name

STAGED = 10
"""A tenant may have this many times the maximum size of one upload waiting."""


class IncomingUpload:
    """One upload that is being received."""

    def __init__(self, upload: str, writer: FileWriter, limits: ArtifactLimits) -> None:
        self.id = upload
        self.files: dict[str, int] = {}
        self._writer = writer
        self._limits = limits
        self._bytes = 0
        self._name = ""
        self._open: IO[bytes] | None = None

    def begin(self, name: str) -> None:
        try:
            self._name = checked_name(name)
            if len(self.files) >= self._limits.entries:
                raise TooLarge("file", f"over {self._limits.entries} files in one upload")
            self._open = self._writer.create(name)
        except ContractViolation as error:
            raise Invalid("file", str(error)) from error
        except FileExistsError as error:
            raise Invalid("file", f"{name[:200]!r} exists already, as a file or a folder") from error
        self.files[name] = 0

    def write(self, data: bytes) -> None:
        assert self._open is not None
        self.files[self._name] += len(data)
        self._bytes += len(data)
        if self._bytes > self._limits.bytes:
            raise TooLarge("file", f"over {self._limits.bytes} bytes in one upload")
        self._open.write(data)

    def end(self) -> None:
        assert self._open is not None
        self._open.close()
        self._open = None

    def publish(self) -> None:
        self._writer.publish()

    def discard(self) -> None:
        try:
            if self._open is not None:
                self._open.close()
        finally:
            self._writer.discard()


def receive_upload(artifacts: ArtifactStore, tenant: str, limits: ArtifactLimits) -> IncomingUpload:
    """Begin an upload, unless too much is staged already."""
    artifacts.check_room()
    if artifacts.staged_bytes(tenant) > STAGED * limits.bytes:
        raise Conflict(f"upload quota of {STAGED * limits.bytes} bytes exceeded; unused uploads expire after 24 h")
    upload = new_id()
    return IncomingUpload(upload, artifacts.upload_writer(tenant, upload), limits)


def link_uploads(artifacts: ArtifactStore, tenant: str, job_id: str, uploads: Sequence[str], limit: int) -> None:
    """Link uploads of this tenant for a job that is about to be submitted."""
    found: dict[str, int] = {}
    for upload in uploads:
        files = artifacts.uploaded(tenant, _known(upload))
        if not files:
            raise NotFound("upload", upload[:60])
        if both := found.keys() & files.keys():
            raise Invalid("uploads", f"two uploads have a file {min(both)}")
        found |= files
    if sum(found.values()) > limit:
        raise TooLarge("uploads", f"over {limit} bytes for one job")
    for upload in uploads:
        artifacts.link_upload(tenant, upload, str(uuid.UUID(job_id)))


def input_files(artifacts: ArtifactStore, job_id: str, uploads: Sequence[str]) -> Mapping[str, InputFile]:
    """Return the input files of a job by name. Raise NotFound if an upload is missing."""
    found: dict[str, InputFile] = {}
    for upload in uploads:
        files = artifacts.inputs(job_id, _known(upload))
        if not files:
            raise NotFound("upload", upload[:60])
        found |= files
    return found


def _known(upload: str) -> str:
    """Return an upload's id if it is a UUID, which is safe as a name; else raise NotFound."""
    try:
        if str(uuid.UUID(upload)) == upload:
            return upload
    except ValueError:
        pass
    raise NotFound("upload", upload[:60])
