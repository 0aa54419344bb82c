"""A throw-away Postgres from a snapshot: restored, started, and gone with whoever asked for it."""

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
from holdfast.pipeline.connectors.postgres import DATA, SERVER, Postgres
from holdfast.pipeline.copying import opened
from holdfast.pipeline.snapshots import Folders
from holdfast.runner.outputs import remove_tree
from holdfast.runner.process import PATH

LOOK = 0.02
PATIENCE = 60.0
"""Seconds that a server may take to stop before it is killed; it is thrown away at any rate."""
SOCKET = "socket"
"""The file in a run's folder that says where the folder of its socket is."""
SET_PARENT_DEATH_SIGNAL = 1
NO_SERVER = "snapshot {id} holds no Postgres cluster: only those of pipelines with connector postgres can be run"


class ServerFailed(HoldfastError):
    code = "start_failed"


class Open(msgspec.Struct, frozen=True, kw_only=True):
    """A server that takes connections, as a URL and in the variables that Postgres's own programs read."""

    dsn: str
    env: dict[str, str]


@contextmanager
def throwaway(folders: Folders, snapshot: str, folder: str, digest: str, runs: Path) -> Iterator[Open]:
    """Run a copy of a snapshot while the block lasts. `runs` is where copies are; what dead ones left is removed."""
    runs.mkdir(mode=0o711, parents=True, exist_ok=True)
    _sweep(runs)
    place = runs / f"{snapshot[:12]}.{secrets.token_hex(4)}"
    socket = Path(tempfile.gettempdir(), f"holdfast-{secrets.token_hex(8)}")
    try:
        place.mkdir(mode=0o711)
        with opened(place) as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            (place / SOCKET).write_text(str(socket))
            tree = place / "tree"
            folders.restore(folder, digest, tree)
            if not (tree / DATA).is_dir():
                raise Conflict(NO_SERVER.format(id=snapshot))
            with serving(tree, socket, place / "log"):
                dsn = f"postgresql://postgres@/postgres?host={quote(str(socket), safe='/')}"
                yield Open(dsn=dsn, env=_variables(socket) | {"DATABASE_URL": dsn})
    finally:
        _remove(place)


@contextmanager
def serving(tree: Path, socket: Path, log: Path) -> Iterator[None]:
    """Run a server as the owner of its files, and stop it."""
    owner = (tree / DATA).stat()
    as_root = os.geteuid() == 0
    with log.open("wb") as output:
        server = subprocess.Popen(
            ["sh", "-c", SERVER],
            cwd=tree,
            env={"PATH": PATH, "LC_ALL": "C.UTF-8", **_variables(socket)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            user=owner.st_uid if as_root else None,
            group=owner.st_gid if as_root else None,
            extra_groups=[] if as_root else None,
            start_new_session=True,
            preexec_fn=_die_with_parent,  # noqa: PLW1509 - one system call, and no thread of ours holds a lock
        )
    try:
        while not Postgres().ready(tree):
            if server.poll() is not None:
                said = log.read_text(errors="replace").strip()[-1000:]
                raise ServerFailed(f"Postgres did not start (exit code {server.returncode}): {said}")
            time.sleep(LOOK)
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


def _sweep(runs: Path) -> None:
    """Remove what those left who died before they could: their copies, and the folders of their sockets."""
    for path in list(runs.iterdir()):
        try:
            with opened(path) as handle:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(path)
        except OSError:
            continue


def _remove(place: Path) -> None:
    """Remove a run's copy, and before that the folder of its socket: nothing else says where that is."""
    with suppress(OSError):
        named = Path((place / SOCKET).read_text())
        if re.fullmatch(r"holdfast-[0-9a-f]{16}", named.name):
            remove_tree(named)
    remove_tree(place)
