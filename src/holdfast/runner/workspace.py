"""The workspace of a pipeline: the folder `space` in its attempt folder.

    plan            the plan of this attempt, for an adopter: source files may have changed since
    space/tree      the current folder of the tasks; it becomes the snapshot
    space/inputs    the files that the tasks declared, and their SQL
    space/NAME      a restored tree that will replace `tree`
    space/was.NAME  the tree that NAME replaced

The tasks own `tree` and `inputs`. In a container, where the supervisor runs as the same user, they also own `space`. So
a worker never writes inside `space`: it restores trees next to it and moves them in. The plan is next to `space` as
well, where tasks cannot change it: only `space` is mounted into a container.
"""

import errno
import hashlib
import os
import stat
import tempfile
from pathlib import Path
from typing import Protocol

import msgspec

from holdfast.permissions import make_passable
from holdfast.runner.ownership import give
from holdfast.runner.tree_removal import remove_tree
from holdfast.runner.wire import WireService, WireTask

WORKSPACE, TREE, INPUTS, PLAN = "space", "tree", "inputs", "plan"


def replaced_by(tree: Path) -> Path:
    """Return the path of the tree that a restored one replaced."""
    return tree.with_name(f"was.{tree.name}")


class WorkspacePaths(msgspec.Struct, frozen=True, kw_only=True):
    """The paths of a workspace as its tasks see them; inside a container they differ from those on the host.

    `socket` is a folder for sockets, with a short path; it need not exist yet. `root`: whether the tasks run as root.
    """

    tree: str
    inputs: str
    socket: str
    root: bool


class Programs(msgspec.Struct, frozen=True, kw_only=True):
    """The programs of a supervisor: its tasks and the optional service."""

    tasks: tuple[WireTask, ...]
    service: WireService | None = None


class PipelineStaging(Protocol):
    """A planned pipeline as a runner needs it. `plan` is stored unchanged."""

    plan: bytes

    def programs(self, paths: WorkspacePaths) -> Programs:
        """Return the programs for these paths."""

    def make_tree(self, tree: Path) -> None:
        """Create the empty folder that snapshots are made of."""

    def prepare(self, tree: Path, uid: int) -> bool:
        """Add to an empty tree what this host's user cannot create. Return whether anything was added."""

    def stage(self, inputs: Path) -> None:
        """Copy the declared files into a folder."""


def make_workspace(
    folder: Path, staging: PipelineStaging, uid: int | None, gid: int | None, *, own: bool = False
) -> None:
    """Create a workspace in an attempt folder for the user of its tasks. `own`: that user owns `space` as well."""
    workspace = folder / WORKSPACE
    make_passable(workspace)
    for name, make in ((TREE, staging.make_tree), (INPUTS, Path.mkdir)):
        remove_tree(workspace / name)  # From a start that failed.
        make(workspace / name)
        (workspace / name).chmod(0o700)
    staging.stage(workspace / INPUTS)
    _write_plan(workspace.with_name(PLAN), staging.plan)
    if uid is not None and gid is not None:
        give(workspace / TREE, uid, gid)
        give(workspace / INPUTS, uid, gid)
        if own:
            os.chown(workspace, uid, gid)


def _write_plan(path: Path, plan: bytes) -> None:
    """Write the plan, readable only by its owner. It replaces the plan of a start that failed."""
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
        file.write(plan)


def read_plan(workspace: Path) -> bytes:
    """Read the plan of a workspace. Only a regular file counts: links are not followed, and nothing blocks."""
    path = workspace.with_name(PLAN)
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a plain file", str(path))
        return file.read()


def give_like(top: Path, other: Path) -> None:
    """Give a folder to the owner of another one, if it has a different owner; only root can."""
    owner, now = other.lstat(), top.lstat()
    if (owner.st_uid, owner.st_gid) != (now.st_uid, now.st_gid) and os.geteuid() == 0:
        give(top, owner.st_uid, owner.st_gid)


def socket_folder(mark: str, *, private: bool = False) -> Path:
    """Return the folder for the socket of an attempt's service; the path of a socket must be short.

    In a private view it is below the attempt's own /tmp.
    """
    top = "/tmp" if private else tempfile.gettempdir()
    return Path(top, f"holdfast-{hashlib.sha256(mark.encode()).hexdigest()[:16]}")
