"""Which user each attempt on this host runs as, from its start to the end of its folder."""

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
    """Whom an attempt runs as; None: ourselves. `own`: nothing else on the host does. `private`: with its own /tmp."""

    user: User | None
    own: bool = False
    private: bool = False


class AttemptUsers:
    """`uids` are those of attempts, one for each; without them `user` is whom all run as, else ourselves."""

    def __init__(self, user: User | None, uids: UidPool | None, attempts: Path, *, allow_root: bool = False) -> None:
        self._user = user
        self._uids = uids
        self._attempts = attempts
        self._allow_root = allow_root
        if uids is not None:
            self._keep_claims(uids)

    def assign(self, folder: Path, named: str | None) -> RunsAs:
        """Say whom an attempt runs as whose folder is not there yet, or has no uid of its own; may claim one for it."""
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
        """Whom an attempt runs as by its folder, if it has a uid of its own."""
        uid = self.uid_of(folder)
        return None if uid is None else self._own(uid)

    def uid_of(self, folder: Path) -> int | None:
        """The uid that is an attempt's own, if it has one."""
        return None if self._uids is None else self._uids.of(folder)

    def free(self, folder: Path, uid: int | None) -> bool:
        """Free the uid of an attempt of which nothing runs, if its folder is gone."""
        return self._uids is not None and uid is not None and self._uids.free(uid, folder)

    def sweep(self, older: float) -> int:
        """Free the uids of attempts that are gone, once nothing runs as them; return how many."""
        if self._uids is None:
            return 0
        stale = self._uids.stale(self._attempts, older)
        return sum(not kill_leftovers(None, uid=one.uid) and self._uids.free(one.uid, one.folder) for one in stale)

    def _own(self, uid: int) -> RunsAs:
        assert self._uids is not None
        return RunsAs(user=User(uid, uid), own=True, private=self._uids.private)

    def _keep_claims(self, uids: UidPool) -> None:
        """Make sure that the files of every attempt belong to a uid that is claimed for it.

        A power failure may have lost the claim. If another attempt has the uid by now, the files become ours: they are
        of an attempt that did not survive either.
        """
        for name in os.listdir(self._attempts) if self._attempts.is_dir() else ():
            folder = self._attempts / name
            uid = owner_of(folder)
            if uid is None or uid not in uids or name.startswith(".") or uids.reclaim(uid, folder):
                continue
            log.warning("%s belonged to uid %d, which another attempt has; taking its files over", folder, uid)
            for part in ("work", "tmp", WORKSPACE):
                give_if_there(folder / part, os.geteuid(), os.getegid())
