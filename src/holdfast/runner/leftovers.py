"""Finds and kills processes that a killed supervisor left: by user, by HOLDFAST_MARK in the environment, or by session.

A stored pid is never signalled, only a pidfd. A process is ours if it runs as the attempt's own uid, if its environment
has the attempt's mark, or if it is in the child's session and that session's leader is verifiably the child. After a
reboot no process is ours.
"""

import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec

from holdfast.runner import supervisor

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
PATIENCE = 5.0


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """The session that a child led: its number alone may be anybody's by now."""

    boot_id: str
    leader: int
    start_ticks: int


def boot_id() -> str:
    return BOOT_ID.read_text().strip()


def find_leftovers(mark: str | None, session: Session | None = None, uid: int | None = None) -> list[int]:
    """Return the pids of leftover processes, for people to look at; they must not be signalled by pid."""
    with ExitStack() as held:
        return [pid for pid, _ in _open_all(mark, session, uid, held)]


def kill_leftovers(
    mark: str | None, session: Session | None = None, uid: int | None = None, *, patience: float = PATIENCE
) -> list[int]:
    """Kill leftover processes and their new children. Return the pids of those that are not dead after `patience`.

    `uid` is a user that only this attempt has. All of its processes are killed in one call, so that none escapes by
    forking faster than we find them.
    """
    deadline = time.monotonic() + patience
    while True:
        with ExitStack() as held:
            left = list(_open_all(mark, session, uid, held))
            if not left or time.monotonic() >= deadline:
                return [pid for pid, _ in left]
            if uid is not None:
                kill_user(uid)
            for _, pidfd in left:
                _signal(pidfd)
            _wait_for_ends([pidfd for _, pidfd in left], deadline)


def kill_user(uid: int) -> None:
    """Kill all processes of a user. A separate process does it, because it has to become that user first."""
    subprocess.run([supervisor.path(), "--kill-user", str(uid)], capture_output=True, check=False)


def _open_all(mark: str | None, session: Session | None, uid: int | None, held: ExitStack) -> Iterator[tuple[int, int]]:
    """Yield (pid, pidfd) of each process that is ours. It is checked again after the pidfd is open."""
    if session is not None and session.boot_id != boot_id():
        return
    known = session if session is not None and _is_leader(session) else None
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        if pid == os.getpid() or not _is_ours(pid, mark, known, uid):
            continue
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            continue
        held.callback(os.close, pidfd)
        if _is_ours(pid, mark, known, uid):
            yield pid, pidfd


def _is_ours(pid: int, mark: str | None, session: Session | None, uid: int | None) -> bool:
    if mark is not None and f"HOLDFAST_MARK={mark}".encode() in _environment(pid):
        return True
    if uid is not None and str(uid) in _uids(pid):
        return True
    return (
        session is not None and (line := _stat(pid)) is not None and int(line[3]) == session.leader and line[0] != "Z"
    )


def _is_leader(session: Session) -> bool:
    line = _stat(session.leader)
    return line is not None and int(line[19]) == session.start_ticks


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def _uids(pid: int) -> list[str]:
    """Return the real, effective, saved and filesystem uid of a process; none for a zombie."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    except OSError:
        return []
    fields = {name: rest for name, _, rest in (line.partition(":") for line in lines)}
    return [] if fields.get("State", "").strip().startswith("Z") else fields.get("Uid", "").split()


def _stat(pid: int) -> list[str] | None:
    """Return the fields after the name (which may contain anything): state, parent, group, session …"""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None


def _signal(pidfd: int) -> None:
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    except OSError:
        return  # It has ended, or we may not kill it: the next search shows which.


def _wait_for_ends(pidfds: list[int], deadline: float) -> None:
    poll = select.poll()
    for pidfd in pidfds:
        poll.register(pidfd, select.POLLIN)
    waiting = set(pidfds)
    while waiting and (left := deadline - time.monotonic()) > 0:
        for pidfd, _ in poll.poll(left * 1000):
            poll.unregister(pidfd)
            waiting.discard(pidfd)
