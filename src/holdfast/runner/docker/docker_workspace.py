"""Workspaces of pipelines in containers: folders on this host that are mounted into the containers."""

import asyncio
import os
import time
from collections.abc import Sequence
from pathlib import Path

from holdfast.permissions import PASSABLE, make_folder
from holdfast.runner.base import CannotStart, Identity
from holdfast.runner.tree_removal import remove_tree
from holdfast.runner.users import User
from holdfast.runner.workspace import WORKSPACE, PipelineStaging, make_workspace

REMOTE = (
    "a pipeline's workspace is a folder that is mounted into its container, so it needs a Docker engine on this host; "
    "the one at {host} may be anywhere: set HOLDFAST_DOCKER_HOST to unix:///path, or run it as processes"
)
OWNER = "the workspace cannot be given to user {user}: run the worker as root, or give the job the worker's own user"


class DockerWorkspaces:
    """A folder per attempt, with one folder per container that was created for it."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def make(self, identity: Identity, host: str) -> Path:
        """Make an empty workspace for one container, to be filled once its user is known.

        It is per container, not per attempt: a worker that was suspended would otherwise fill another container's.
        """
        if not host.startswith("unix:"):
            raise CannotStart("contract_violation", REMOTE.format(host=host))
        workspace = self._of(identity) / os.urandom(4).hex() / WORKSPACE
        try:
            make_folder(workspace, PASSABLE)
        except OSError as error:
            raise CannotStart("start_failed", f"cannot make the workspace: {error.strerror}") from error
        return workspace

    async def fill(self, workspace: Path, staging: PipelineStaging, user: User) -> None:
        try:
            await asyncio.to_thread(lambda: make_workspace(workspace.parent, staging, user.uid, user.gid, own=True))
        except PermissionError as error:
            raise CannotStart("start_failed", f"{OWNER.format(user=user.uid)}: {error.strerror}") from error
        except OSError as error:
            raise CannotStart("start_failed", f"cannot fill the workspace: {error.strerror}") from error

    async def clear(self, identity: Identity) -> None:
        await asyncio.to_thread(lambda: remove_tree(self._of(identity)))

    async def sweep(self, containers: Sequence[Identity], older: float) -> int:
        """Remove workspaces without a container that are older than `older` seconds; return how many."""
        return await asyncio.to_thread(lambda: self._sweep({self._of(one) for one in containers}, time.time() - older))

    def _sweep(self, needed: set[Path], before: float) -> int:
        found = list(self._root.iterdir()) if self._root.is_dir() else []
        loose = [path for path in found if path not in needed and path.stat().st_mtime < before]
        for path in loose:
            remove_tree(path)
        return len(loose)

    def _of(self, identity: Identity) -> Path:
        return self._root / f"{identity.job}.{identity.attempt}"
