"""Files of jobs for a program on the database: through the artifact store in the shared folder."""

import asyncio
import errno
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import IO, Any

from holdfast.client.options import Files, opened
from holdfast.config import Settings
from holdfast.errors import ConfigError, DiskFull, Invalid
from holdfast.model import new_id
from holdfast.runner.artifacts import ArtifactStore, MakeArtifacts
from holdfast.runner.collected_outputs import ArtifactLimits
from holdfast.runner.disk import SHARED, disks_of
from holdfast.runner.folder_artifacts import FolderArtifacts
from holdfast.runner.shared_folder import SharedFolder, open_shared_folder
from holdfast.runner.uploads import IncomingUpload, link_uploads, receive_upload
from holdfast.store import Store

PIECE = 1024 * 1024
MOST_FILES = 10_000
NO_FOLDER = (
    "no server or worker has started on this database yet, so it has no shared folder: "
    "start one, or set HOLDFAST_SHARED_DIR to the folder that they will use"
)


def folder_artifacts(settings: Settings, shared: SharedFolder) -> ArtifactStore:
    """Return the artifact store in the shared folder."""
    shortage = partial(disks_of(settings, state=False).shortage, SHARED)
    return FolderArtifacts(shared.path, check=shared.check, shortage=shortage)


class StoreFiles:
    """Uploads and artifacts of one tenant. The folder is opened when it is first needed."""

    def __init__(
        self, store: Store, settings: Settings, tenant: str, artifacts: MakeArtifacts = folder_artifacts
    ) -> None:
        self._store = store
        self._settings = settings
        self._tenant = tenant
        self._make = artifacts
        self._opened: ArtifactStore | None = None

    async def artifacts(self) -> ArtifactStore:
        """Return the artifact store, if this process has the shared folder of the database."""
        if self._opened is None:
            if self._settings.shared_dir is None and await self._store.shared_folder.read() is None:
                raise Invalid("files", NO_FOLDER)
            try:
                installation = await self._store.installation()
                shared = await open_shared_folder(self._settings.shared, installation, self._store.shared_folder)
            except ConfigError as error:
                raise Invalid("files", f"cannot be reached from here: {'; '.join(error.problems)}") from error
            self._opened = self._make(self._settings, shared)
        return self._opened

    async def upload(self, files: Files) -> str:
        """Store files for a job; return the upload's id."""
        return await asyncio.to_thread(self._receive, await self.artifacts(), files)

    def _receive(self, artifacts: ArtifactStore, files: Files) -> str:
        limits = ArtifactLimits(bytes=self._settings.upload_max_bytes, entries=MOST_FILES)
        incoming = receive_upload(artifacts, self._tenant, limits)
        try:
            with ExitStack() as stack:
                for name, content in opened(files, stack):
                    _copy(content, name, incoming, artifacts)
            if not incoming.files:
                raise Invalid("files", "names no file")
            incoming.publish()
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise DiskFull("the disk of the artifact store is full; make room, or delete jobs with force") from error
        finally:
            incoming.discard()
        return incoming.id

    async def given(self, job: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the job for the store; its uploads are assigned to it before it is submitted."""
        if not job.get("uploads"):
            return job
        job = {**job, "id": job.get("id") or new_id()}
        arguments = (self._tenant, job["id"], list(job["uploads"]), self._settings.upload_max_bytes)
        await asyncio.to_thread(link_uploads, await self.artifacts(), *arguments)
        return job


def _copy(content: IO[bytes], name: str, incoming: IncomingUpload, artifacts: ArtifactStore) -> None:
    incoming.begin(name)
    while piece := content.read(PIECE):
        artifacts.check_room()
        incoming.write(piece)
    incoming.end()
