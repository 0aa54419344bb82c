"""User ids for attempts: as root, each process attempt runs as a uid and gid that no other process on the host has.

One folder serves every installation and every worker on the host. A claim is a symbolic link in it, named for the uid
and pointing to the attempt's folder: one system call both takes the uid exclusively and records who has it, so there is
no claim without its record at any instant.

    /var/lib/holdfast/uids/2100000007 -> /var/lib/holdfast/state/attempts/INSTALLATION/JOB.1

The attempt's `work` folder belongs to the uid, which is how an adopter finds it. A uid is freed when nothing runs as it
and the folder is gone: otherwise the next owner would get the files of the previous one. A crash in between leaves a
claim without a folder; the sweep frees it once it is too old to belong to an attempt that is just starting.
"""

import contextlib
import fcntl
import logging
import os
import random
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from holdfast.errors import ConfigError
from holdfast.permissions import make_folder, make_parents
from holdfast.runner.base import EngineUnreachable
from holdfast.runner.strays import remove_strays

log = logging.getLogger(__name__)

WORK = "work"
FILES = (WORK, "tmp", "space")
"""Entries of an attempt folder that can belong to its user."""
LOCK = "lock"
TRIES = 32
"""Uids that are tried one after the other; if all are taken, the folder is listed to find a free one."""
LOCK_SECONDS = 1.0
"""How long to wait for a lock that others usually have for microseconds."""
CLAIM_SECONDS = 600.0
"""A claim without a folder is freed after this time at the earliest; by then `start_by` forbids the start."""


class UidsExhausted(EngineUnreachable):
    """Every uid of the range is in use: the job waits."""


class UidClaim(msgspec.Struct, frozen=True):
    """A uid and the folder of the attempt that has it. `age` is in seconds."""

    uid: int
    folder: Path
    age: float = 0.0


class UidPool:
    """The uids of a range. `private`: attempts have a /tmp of their own, so that they leave nothing elsewhere."""

    def __init__(self, first: int, last: int, folder: Path, *, private: bool = True) -> None:
        self.first = first
        self.last = last
        self.folder = folder
        self.private = private
        self._root = str(folder)
        self._next = random.randint(first, last)
        self._mutex = threading.Lock()
        try:
            make_parents(folder)
            make_folder(folder)
            if (owner := folder.stat().st_uid) != os.geteuid():
                raise ConfigError(
                    [
                        f"HOLDFAST_PROCESS_UIDS_DIR is {folder}, which belongs to uid {owner}: its owner could give"
                        " two attempts the same uid. Change its owner to root"
                    ]
                )
            self._lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(
                [
                    f"HOLDFAST_PROCESS_UIDS_DIR is {folder}, the record of the uids in use, and cannot be used: "
                    f"{error.strerror}. Make it writable, or name another folder for all installations on this host"
                ]
            ) from error

    def __contains__(self, uid: int) -> bool:
        return self.first <= uid <= self.last

    def claim(self, attempt: Path) -> int:
        """Claim a free uid for an attempt folder, which need not exist yet. Raise UidsExhausted if there is none."""
        target = str(attempt)
        for _ in range(TRIES):
            if self._take(uid := self._step(), target):
                return uid
        taken = {claim for name in os.listdir(self._root) if (claim := _number(name)) is not None}
        free = [uid for uid in range(self.first, self.last + 1) if uid not in taken]
        random.shuffle(free)
        for uid in free:
            if self._take(uid, target):
                return uid
        raise UidsExhausted(
            f"all {self.last - self.first + 1} uids of HOLDFAST_PROCESS_UIDS ({self.first}-{self.last}) are in use"
        )

    def reclaim(self, uid: int, attempt: Path) -> bool:
        """Make sure that a uid is claimed for the attempt whose files it owns; False if another attempt has it."""
        return self._take(uid, str(attempt)) or self.owner(uid) == attempt

    def owner(self, uid: int) -> Path | None:
        """Return the folder of the attempt that has a uid."""
        try:
            return Path(os.readlink(f"{self._root}/{uid}"))
        except OSError:
            return None

    def claim_path(self, uid: int) -> str:
        """Return the path of the link that claims a uid."""
        return f"{self._root}/{uid}"

    def of(self, attempt: Path) -> int | None:
        """Return the uid of an attempt, if its folder exists and the uid is claimed for it."""
        uid = owner_of(attempt)
        return uid if uid is not None and uid in self and self.owner(uid) == attempt else None

    def free(self, uid: int, attempt: Path) -> bool:
        """Free the uid of an attempt if it is still that attempt's, and nothing of its folder is left.

        The caller knows that no process runs as the uid. A lock makes sure that of two workers that free it, the slower
        one does not take it away from its next owner. If a suspended process has the lock, the sweep frees it later.
        """
        with self._mutex:
            if not self._locked():
                return False
            try:
                if self.owner(uid) != attempt or self._in_use(UidClaim(uid, attempt)):
                    return False
                if not self.private and (left := remove_strays(uid)):
                    log.warning(
                        "uid %d stays in use until the next sweep: %s could not be removed", uid, ", ".join(left[:10])
                    )
                    return False
                os.unlink(f"{self._root}/{uid}")
                return True
            except FileNotFoundError:
                return False
            finally:
                fcntl.flock(self._lock, fcntl.LOCK_UN)

    def claims(self, below: Path | None = None) -> Iterator[UidClaim]:
        """Yield all claims, or those of attempts whose folders are directly below a folder."""
        now = time.time()
        for name in os.listdir(self._root):
            uid = _number(name)
            if uid is None:
                continue
            with contextlib.suppress(OSError):
                folder = Path(os.readlink(f"{self._root}/{name}"))
                if below is None or folder.parent == below:
                    yield UidClaim(uid, folder, now - os.lstat(f"{self._root}/{name}").st_mtime)

    def stale(self, below: Path, older: float = CLAIM_SECONDS) -> list[UidClaim]:
        """Return claims whose attempt folder is gone, and that are too old for an attempt that is just starting."""
        half_made = {_final(name) for name in os.listdir(below) if name.startswith(".")}
        return [
            claim
            for claim in self.claims(below)
            if claim.age > older and not self._in_use(claim) and claim.folder.name not in half_made
        ]

    def _in_use(self, claim: UidClaim) -> bool:
        owner = owner_of(claim.folder)
        return owner == claim.uid if owner is not None else _holds_files(claim.folder)

    def close(self) -> None:
        os.close(self._lock)

    def _locked(self) -> bool:
        deadline = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                if time.monotonic() > deadline:
                    return False
                time.sleep(0.001)

    def _step(self) -> int:
        with self._mutex:
            uid = self._next
            self._next = uid + 1 if uid < self.last else self.first
            return uid

    def _take(self, uid: int, target: str) -> bool:
        try:
            os.symlink(target, f"{self._root}/{uid}")
        except FileExistsError:
            return False
        return True


def owner_of(attempt: Path) -> int | None:
    """Return the owner of an attempt's `work` folder; None if there is none. Only root can change it."""
    try:
        about = os.lstat(f"{attempt}/{WORK}")
    except (FileNotFoundError, NotADirectoryError):
        return None
    return about.st_uid if stat.S_ISDIR(about.st_mode) else None


def _holds_files(attempt: Path) -> bool:
    """Return whether the attempt's user may still own files there. A start marker does not count: it is ours."""
    return any(os.path.lexists(f"{attempt}/{name}") for name in FILES)


def unusable(first: int, last: int) -> str | None:
    """Return why a range cannot be used here, or None: a user namespace may not map it."""
    for kind in ("uid", "gid"):
        with contextlib.suppress(FileNotFoundError):
            lines = Path(f"/proc/self/{kind}_map").read_text().splitlines()
            inside = [(int(start), int(start) + int(count)) for start, _, count in map(str.split, lines)]
            if not any(start <= first and last < end for start, end in inside):
                return (
                    f"HOLDFAST_PROCESS_UIDS is {first}-{last}, and this user namespace does not map these {kind}s: "
                    f"name a range within /proc/self/{kind}_map, or set HOLDFAST_PROCESS_USER to one user for all jobs"
                )
    return None


def _number(name: str) -> int | None:
    return int(name) if name.isascii() and name.isdigit() else None


def _final(name: str) -> str:
    """Return the final name of a folder that is being made as `.JOB.ATTEMPT.RANDOM`."""
    return name[1:].rpartition(".")[0]
