"""What the tasks of a pipeline work on: a folder `space` beside the attempt's other files.

    plan            what this attempt was planned to do, for whoever adopts it: files may have changed since
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

from holdfast.runner.outputs import remove_tree
from holdfast.runner.spec import Service, Task

SPACE, TREE, INPUTS, PLAN = "space", "tree", "inputs", "plan"


def replaced_by(tree: Path) -> Path:
    """Where the tree is whose place another one took."""
    return tree.with_name(f"was.{tree.name}")


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where tasks find their things, in their own words: inside a container the paths are others than outside.

    `socket` is a folder for sockets, with a short path; it need not be there yet. `root` says whether they run as root.
    """

    tree: str
    inputs: str
    socket: str
    root: bool


class Programs(msgspec.Struct, frozen=True, kw_only=True):
    """What a supervisor is to run."""

    tasks: tuple[Task, ...]
    service: Service | None = None


class Staging(Protocol):
    """A pipeline on its way to a runner; `plan` is kept as it is."""

    plan: bytes

    def programs(self, place: Place) -> Programs:
        """Say what to run there."""

    def make_tree(self, tree: Path) -> None:
        """Make the empty folder that is going to be copied."""

    def prepare(self, tree: Path, uid: int) -> bool:
        """Put into an empty tree what this user of the host cannot make; say whether there was anything."""

    def stage(self, inputs: Path) -> None:
        """Put the declared files into a folder."""


def make_space(folder: Path, staging: Staging, uid: int | None, gid: int | None, *, own: bool = False) -> None:
    """Make the space of an attempt below its folder, for the user whom its tasks run as; `own`: all of it theirs."""
    space = folder / SPACE
    space.mkdir(mode=0o711, exist_ok=True)
    space.chmod(0o711)
    for name, make in ((TREE, staging.make_tree), (INPUTS, Path.mkdir)):
        remove_tree(space / name)  # Of a try that never started.
        make(space / name)
        (space / name).chmod(0o700)
    staging.stage(space / INPUTS)
    _write_plan(space.with_name(PLAN), staging.plan)
    if uid is not None and gid is not None:
        give(space / TREE, uid, gid)
        give(space / INPUTS, uid, gid)
        if own:
            os.chown(space, uid, gid)


def _write_plan(path: Path, plan: bytes) -> None:
    """Put a plan in the place of one that never started; for its owner alone."""
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
        file.write(plan)


def read_plan(space: Path) -> bytes:
    """The plan of a space. Nothing but a plain file is one: no link is followed, and nobody waited for."""
    path = space.with_name(PLAN)
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a plain file", str(path))
        return file.read()


def give(top: Path, uid: int, gid: int) -> None:
    """Make a folder and all that is in it a user's; links are changed, not followed."""
    os.chown(top, uid, gid, follow_symlinks=False)
    for folder, names, files in os.walk(top):
        for name in (*names, *files):
            os.chown(os.path.join(folder, name), uid, gid, follow_symlinks=False)


def give_like(top: Path, other: Path) -> None:
    """Make a folder the user's whose another one is, if it is not already; only root can."""
    owner, now = other.lstat(), top.lstat()
    if (owner.st_uid, owner.st_gid) != (now.st_uid, now.st_gid) and os.geteuid() == 0:
        give(top, owner.st_uid, owner.st_gid)


def socket_folder(mark: str) -> Path:
    """Where the service of an attempt on this host has its socket: the paths of sockets may not be long."""
    return Path(tempfile.gettempdir(), f"holdfast-{hashlib.sha256(mark.encode()).hexdigest()[:16]}")
