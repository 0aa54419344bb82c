"""A throw-away Postgres from a snapshot: restored, started, and removed when its caller ends."""

import ctypes
import fcntl
import os
import re
import secrets
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import quote

import msgspec

from holdfast.errors import Conflict, HoldfastError
from holdfast.permissions import FILE, make_passable, make_passable_for, write_file
from holdfast.pipeline.connectors.postgres import DATA, SERVER, PostgresConnector
from holdfast.pipeline.copying import opened
from holdfast.pipeline.snapshots import SnapshotFolders
from holdfast.runner.attempt_users import AttemptUsers
from holdfast.runner.leftovers import kill_leftovers
from holdfast.runner.ownership import give
from holdfast.runner.tree_removal import remove_tree
from holdfast.runner.uids import WORK
from holdfast.runner.wire import PATH

POLL_SECONDS = 0.02
PATIENCE = 60.0
"""Seconds that a server may take to stop before it is killed; its data is removed anyway."""
SOCKET = "socket"
"""The file in a run's folder that names the folder of its socket."""
SET_PARENT_DEATH_SIGNAL = 1
NO_SERVER = "snapshot {id} holds no Postgres cluster: only those of pipelines with connector postgres can be run"


class ServerFailed(HoldfastError):
    code = "start_failed"


class ThrowawayServer(msgspec.Struct, frozen=True, kw_only=True):
    """A running server: its URL, and the environment variables for Postgres's own programs."""

    dsn: str
    env: dict[str, str]


@contextmanager
def throwaway(
    folders: SnapshotFolders, snapshot: str, folder: str, digest: str, runs: Path, users: AttemptUsers
) -> Iterator[ThrowawayServer]:
    """Run a copy of a snapshot during the block. `runs` is the folder of copies; those of dead runs are removed.

    As root the server runs as a user that `users` assigns, as an attempt would.
    """
    make_passable(runs)
    _sweep(runs, users)
    run_folder = runs / f"{snapshot[:12]}.{secrets.token_hex(4)}"
    socket = Path(tempfile.gettempdir(), f"holdfast-{secrets.token_hex(8)}")
    try:
        make_passable(run_folder)
        with opened(run_folder) as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            write_file(run_folder / SOCKET, str(socket).encode())
            tree = run_folder / WORK
            folders.restore(folder, digest, tree)
            if (tree / DATA).is_symlink() or not (tree / DATA).is_dir():
                raise Conflict(NO_SERVER.format(id=snapshot))
            _give(tree, users)
            with serving(tree, socket, run_folder / "log"):
                dsn = f"postgresql://postgres@/postgres?host={quote(str(socket), safe='/')}"
                yield ThrowawayServer(dsn=dsn, env=_variables(socket) | {"DATABASE_URL": dsn})
    finally:
        _remove(run_folder, users)


def _give(tree: Path, users: AttemptUsers) -> None:
    """As root, give a copy to the user of its server: the owner of the snapshot cannot run one."""
    if os.geteuid() == 0:
        runs_as = users.assign(tree.parent, None)
        if runs_as.user is not None:
            if runs_as.own:
                make_passable_for(tree.parent, runs_as.user.gid)
            give(tree, runs_as.user.uid, runs_as.user.gid)


@contextmanager
def serving(tree: Path, socket: Path, log: Path) -> Iterator[None]:
    """Run a server as the owner of its files, and stop it."""
    owner = (tree / DATA).lstat()  # A job made the tree: a link in it may lead to other users' files.
    as_root = os.geteuid() == 0
    with open(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, FILE), "wb") as log_file:
        server = subprocess.Popen(
            ["sh", "-c", SERVER],
            cwd=tree,
            env={"PATH": PATH, "LC_ALL": "C.UTF-8", **_variables(socket)},
            stdin=subprocess.DEVNULL,
            stdout=log_file,
            stderr=log_file,
            user=owner.st_uid if as_root else None,
            group=owner.st_gid if as_root else None,
            extra_groups=[] if as_root else None,
            start_new_session=True,
            preexec_fn=_die_with_parent,  # noqa: PLW1509 - one system call, and none of our threads has a lock
        )
    try:
        while not PostgresConnector().ready(tree):
            if server.poll() is not None:
                output = log.read_text(errors="replace").strip()[-1000:]
                raise ServerFailed(f"Postgres did not start (exit code {server.returncode}): {output}")
            time.sleep(POLL_SECONDS)
        yield
    finally:
        _stop(server)


def _stop(server: "subprocess.Popen[bytes]") -> None:
    server.send_signal(signal.SIGINT)
    try:
        server.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


_libc = ctypes.CDLL(None)


def _die_with_parent() -> None:
    _libc.prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)


def _variables(socket: Path) -> dict[str, str]:
    return {"PGHOST": str(socket), "PGUSER": "postgres", "PGDATABASE": "postgres"}


def _sweep(runs: Path, users: AttemptUsers) -> None:
    """Remove the copies and socket folders of runs that died before they could clean up."""
    for path in list(runs.iterdir()):
        try:
            with opened(path) as handle:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(path, users)
        except OSError:
            continue


def _remove(run_folder: Path, users: AttemptUsers) -> None:
    """Remove the folder of a run's socket, then its copy, which has the only record of where that folder is."""
    uid = users.uid_of(run_folder)
    if uid is not None and kill_leftovers(None, uid=uid):
        return
    with suppress(OSError):
        named = Path((run_folder / SOCKET).read_text())
        if re.fullmatch(r"holdfast-[0-9a-f]{16}", named.name):
            remove_tree(named)
    remove_tree(run_folder)
    users.free(run_folder, uid)
