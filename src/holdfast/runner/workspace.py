"""What the tasks of a pipeline work on: a folder `space` beside the attempt's other files.

    plan            the plan of this attempt, for an adopter: files may have changed since
    space/tree      where tasks run; what becomes a snapshot
    space/inputs    the files that they declared, and their SQL
    space/NAME      a restored tree that waits to take the place of `tree`
    space/was.NAME  the tree that it replaced

`tree` and `inputs` are the tasks' own, and in a container, where the supervisor is no other user than they are, so is
`space`. So a worker never writes below it: what it restores is made beside `space` and moved in. And what it believes
is not kept there: the plan lies beside `space`, which is all that a container has of this folder.
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
from holdfast.runner.wire import Service, WireTask

WORKSPACE, TREE, INPUTS, PLAN = "space", "tree", "inputs", "plan"


def replaced_by(tree: Path) -> Path:
    """Return where the tree is that a restored one replaced."""
    return tree.with_name(f"was.{tree.name}")


class WorkspacePaths(msgspec.Struct, frozen=True, kw_only=True):
    """Where tasks find their things, in their own words: inside a container the paths are others than outside.

    `socket` is a folder for sockets, with a short path; it need not be there yet. `root` says whether they run as root.
    """

    tree: str
    inputs: str
    socket: str
    root: bool


class Programs(msgspec.Struct, frozen=True, kw_only=True):
    """What a supervisor is to run."""

    tasks: tuple[WireTask, ...]
    service: Service | None = None


class PipelineStaging(Protocol):
    """A pipeline on its way to a runner; `plan` is kept as it is."""

    plan: bytes

    def programs(self, paths: WorkspacePaths) -> Programs:
        """Say what to run there."""

    def make_tree(self, tree: Path) -> None:
        """Make the empty folder that is going to be copied."""

    def prepare(self, tree: Path, uid: int) -> bool:
        """Put into an empty tree what this user of the host cannot make; say whether there was anything."""

    def stage(self, inputs: Path) -> None:
        """Put the declared files into a folder."""


def make_workspace(
    folder: Path, staging: PipelineStaging, uid: int | None, gid: int | None, *, own: bool = False
) -> None:
    """Make the space of an attempt below its folder, for the user whom its tasks run as; `own`: all of it theirs."""
    workspace = folder / WORKSPACE
    make_passable(workspace)
    for name, make in ((TREE, staging.make_tree), (INPUTS, Path.mkdir)):
        remove_tree(workspace / name)  # Of a try that never started.
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
    """Put a plan in the place of one that never started; for its owner alone."""
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
    """Where the service of an attempt on this host has its socket: the paths of sockets may not be long.

    In a private view it is below the attempt's own /tmp.
    """
    top = "/tmp" if private else tempfile.gettempdir()
    return Path(top, f"holdfast-{hashlib.sha256(mark.encode()).hexdigest()[:16]}")
