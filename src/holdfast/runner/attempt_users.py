"""Assigns a user to each attempt on this host, from its start until its folder is removed."""

import logging
import os
from pathlib import Path

import msgspec

from holdfast.runner.base import CannotStart
from holdfast.runner.leftovers import kill_leftovers
from holdfast.runner.ownership import give_if_there
from holdfast.runner.uids import UidPool, owner_of
from holdfast.runner.users import User, find_job_user
from holdfast.runner.workspace import WORKSPACE

log = logging.getLogger(__name__)


class RunsAs(msgspec.Struct, frozen=True, kw_only=True):
    """The user of an attempt; None means the worker's user. `own`: no other attempt has it. `private`: own /tmp."""

    user: User | None
    own: bool = False
    private: bool = False


class AttemptUsers:
    """Each attempt gets one of `uids`. Without `uids` all attempts run as `user`, or else as the worker's user."""

    def __init__(self, user: User | None, uids: UidPool | None, attempts: Path, *, allow_root: bool = False) -> None:
        self._user = user
        self._uids = uids
        self._attempts = attempts
        self._allow_root = allow_root
        if uids is not None:
            self._keep_claims(uids)

    def assign(self, folder: Path, named: str | None) -> RunsAs:
        """Return the user for an attempt that has no uid of its own yet. May claim a uid for it."""
        if named is not None:
            user = find_job_user(named, allow_root=self._allow_root)
            if self._uids is not None and (user.uid in self._uids or user.gid in self._uids):
                message = f"user {named} is within HOLDFAST_PROCESS_UIDS, whose uids and gids are for one attempt each"
                raise CannotStart("contract_violation", message)
            return RunsAs(user=user)
        if self._uids is None:
            return RunsAs(user=self._user)
        return self._own(self._uids.claim(folder))

    def found(self, folder: Path) -> RunsAs | None:
        """Return the user that owns an attempt's folder, if it is a uid of its own."""
        uid = self.uid_of(folder)
        return None if uid is None else self._own(uid)

    def uid_of(self, folder: Path) -> int | None:
        """Return the attempt's own uid, if it has one."""
        return None if self._uids is None else self._uids.of(folder)

    @property
    def own(self) -> bool:
        """Whether each attempt gets a user of its own."""
        return self._uids is not None

    def claim_of(self, uid: int) -> str:
        """Return the path of the link that claims a uid."""
        assert self._uids is not None
        return self._uids.claim_path(uid)

    def free(self, folder: Path, uid: int | None) -> bool:
        """Free the uid of an attempt that has no processes, if its folder is gone."""
        return self._uids is not None and uid is not None and self._uids.free(uid, folder)

    def sweep(self, older: float) -> int:
        """Free the uids of removed attempts once no process runs as them; return how many."""
        if self._uids is None:
            return 0
        stale = self._uids.stale(self._attempts, older)
        return sum(not kill_leftovers(None, uid=one.uid) and self._uids.free(one.uid, one.folder) for one in stale)

    def _own(self, uid: int) -> RunsAs:
        assert self._uids is not None
        return RunsAs(user=User(uid, uid), own=True, private=self._uids.private)

    def _keep_claims(self, uids: UidPool) -> None:
        """Make sure that the files of every attempt belong to a uid that is claimed for it.

        A power failure may have lost the claim. If another attempt has the uid by now, the worker takes ownership of
        the files: their attempt did not survive the power failure either.
        """
        for name in os.listdir(self._attempts) if self._attempts.is_dir() else ():
            folder = self._attempts / name
            uid = owner_of(folder)
            if uid is None or uid not in uids or name.startswith(".") or uids.reclaim(uid, folder):
                continue
            log.warning(
                "%s belongs to uid %d, which another attempt has now; changing its owner to the worker", folder, uid
            )
            for part in ("work", "tmp", WORKSPACE):
                give_if_there(folder / part, os.geteuid(), os.getegid())
