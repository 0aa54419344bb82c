"""The interface of an artifact store: what attempts leave in `output/`, and the files that callers upload for jobs.

Another place for these files is one class with the methods of `ArtifactStore`; `FolderArtifacts` keeps them in the
shared folder. What is the same everywhere is not part of it: `collected_outputs.py` checks outputs against the
contract, and `uploads.py` has the rules of uploads. Snapshots and sources are folders and not part of it either.

    outputs of an attempt   named by job, attempt and token; only those recorded with the end of the job are shown
    an upload               named by tenant and upload; may be given to jobs for a day
    inputs of a job         the files of an upload, linked or copied for the job and kept until the job is deleted

Every method may block, so callers use threads; several threads, processes and hosts use one store at the same time.
Names are plain relative paths (`checked_name`), and ids are UUIDs, before a store gets them. A method raises
StorageUnavailable if the storage does not answer, rather than treating files as missing.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import IO, Protocol

import msgspec

from holdfast.config import Settings
from holdfast.runner.shared_folder import SharedFolder


class Artifact(msgspec.Struct, frozen=True, kw_only=True):
    """A file that a job left, by its path in the output folder, and its size in bytes."""

    path: str
    size: int


class OpenArtifact(msgspec.Struct, frozen=True, kw_only=True):
    """An artifact that is being read. `size` is that of the whole file, wherever reading starts."""

    size: int
    content: IO[bytes]


class StoredOutputs(msgspec.Struct, frozen=True, kw_only=True):
    """Outputs of one attempt that are stored: published ones under `outputs_name`, others under any other name."""

    name: str
    age: float


class InputFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file for the `input/` folder of an attempt. `open` may be called more than once."""

    size: int
    open: Callable[[], IO[bytes]]


class FileWriter(Protocol):
    """A set of files that is being written. Nobody else sees them before `publish`, and then all of them at once."""

    def folder(self, name: str) -> None:
        """Add a folder. Raise OSError (EINVAL, ENAMETOOLONG or EILSEQ) for a name that cannot be stored."""

    def create(self, name: str) -> IO[bytes]:
        """Add a file, to be written and closed by the caller; its folders need not exist.

        Raise FileExistsError if it exists, also as a folder, or if a file has the name of one of its folders.
        """

    def has(self, name: str) -> bool:
        """Return whether this path was added, or a file under the name of one of its folders."""

    def open(self, name: str) -> IO[bytes] | None:
        """Open a file that was added; None if there is none."""

    def drop(self, name: str) -> int:
        """Remove a file that was added, and the folders that become empty. Return its size."""

    def publish(self) -> None:
        """Make all files visible with one step. Files under the same name are ours, from before a crash: replace them.

        Raise OSError or StorageUnavailable if that failed; the call may be repeated.
        """

    def discard(self) -> None:
        """Remove what was not published. Idempotent, and does nothing after `publish`.

        It never raises: what cannot be removed now is swept later.
        """


class ArtifactStore(Protocol):
    """Stores artifacts, uploads and inputs of jobs."""

    def check_room(self) -> None:
        """Raise DiskFull if nothing new should be stored now. Called between the pieces of an upload."""

    # Outputs of attempts

    def writer(self, job_id: str, attempt: int, token: int) -> FileWriter:
        """Begin to store the outputs of an attempt. The first entry raises StorageUnavailable or DiskFull if needed."""

    def list(self, job_id: str, attempt: int, token: int) -> Sequence[Artifact]:
        """Return the published files of one attempt, sorted by path."""

    def open(self, job_id: str, attempt: int, token: int, path: str, *, start: int = 0) -> OpenArtifact:
        """Open one published file, to be read from byte `start`. Raise NotFound for any path that is not one."""

    def jobs(self, after: str, limit: int) -> Sequence[str]:
        """Return the jobs that have outputs here, also unpublished ones, sorted, after `after`."""

    def stored(self, job_id: str) -> Sequence[StoredOutputs]:
        """Return all outputs of a job, also unpublished ones."""

    def remove(self, job_id: str, name: str | None = None) -> None:
        """Remove outputs of a job by their name, or all of them."""

    # Uploads

    def upload_writer(self, tenant: str, upload: str) -> FileWriter:
        """Begin to store an upload. A file is durable once it is closed."""

    def uploaded(self, tenant: str, upload: str) -> Mapping[str, int]:
        """Return the names and sizes of an upload's files; none if the tenant has no such upload."""

    def staged_bytes(self, tenant: str) -> int:
        """Return the size of all uploads of a tenant, including incomplete ones."""

    def expire_uploads(self, older: float) -> int:
        """Remove uploads older than `older` seconds, including incomplete ones; return how many."""

    # Inputs of jobs

    def link_upload(self, tenant: str, upload: str, job_id: str) -> None:
        """Keep the files of an upload for a job. Idempotent; raise NotFound if the upload is gone meanwhile.

        Repeating it makes the inputs of the job young again for `jobs_with_inputs`.
        """

    def inputs(self, job_id: str, upload: str) -> Mapping[str, InputFile]:
        """Return the files of an upload that a job keeps, by name; none if there is no such upload."""

    def jobs_with_inputs(self, *, after: str, limit: int, older: float) -> Sequence[str]:
        """Return jobs whose inputs are older than `older` seconds, sorted, after `after`."""

    def remove_inputs(self, job_id: str) -> None:
        """Remove all inputs of a job."""

    # Deleted jobs

    def delete_job(self, job_id: str) -> str | None:
        """Remove all outputs and inputs of a job. Return why something is left, or None."""


def outputs_name(attempt: int, token: int) -> str:
    """Return the name of an attempt's published outputs."""
    return f"{attempt}.{token}"


MakeArtifacts = Callable[[Settings, SharedFolder], ArtifactStore]
"""Makes the artifact store of an installation; one that needs no shared folder ignores it."""
