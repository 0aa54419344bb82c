"""Finds and removes what attempts left in the attempts folder of one installation."""

import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path

from holdfast.runner.attempt_folder import AttemptFolder
from holdfast.runner.attempt_sweep import sweep_attempt
from holdfast.runner.attempt_users import AttemptUsers
from holdfast.runner.base import Identity
from holdfast.runner.checks import identity_in, sweep_checks
from holdfast.runner.tree_removal import remove_tree
from holdfast.runner.uids import CLAIM_SECONDS


class ProcessSweep:
    """The remains below `root`. Start markers are kept for `keep_marker_for` seconds."""

    def __init__(self, root: Path, users: AttemptUsers, spare_folders: Path, *, keep_marker_for: float) -> None:
        self._root = root
        self._users = users
        self._spare_folders = spare_folders
        self._keep_marker_for = keep_marker_for

    def found(self) -> Sequence[Identity]:
        """Return the attempts that have a folder here, of their own or of a check."""
        return list({found: None for path in os.listdir(self._root) if (found := self._named(path))})

    def _named(self, name: str) -> Identity | None:
        if (checked := identity_in(self._root, name)) is not None:
            return checked
        job, _, attempt = name.rpartition(".")
        if not job or job.startswith(".") or not attempt.isdigit():
            return None
        return Identity(self._root.name, job, int(attempt))

    def sweep(self, identity: Identity, folder: AttemptFolder) -> bool:
        """Remove the remains of an attempt whose end is recorded, stopping it first. Return whether it is gone."""
        checks_gone = sweep_checks(self._root, identity, self._users)
        uid = self._users.uid_of(folder.path)
        swept = sweep_attempt(folder, identity.mark, keep_marker_for=self._keep_marker_for, uid=uid)
        self._users.free(folder.path, uid)
        return swept and checks_gone

    def sweep_incomplete(self, older: float) -> int:
        """Remove incomplete folders whose makers must be dead; return how many."""
        gone = 0
        entries = [*os.scandir(self._root)]
        with contextlib.suppress(FileNotFoundError):
            entries += os.scandir(self._spare_folders)
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                about = entry.stat()
                # A spare folder that was just taken has an old mtime, but its rename has changed its ctime.
                age = time.time() - max(about.st_mtime, about.st_ctime)
                if entry.name.startswith(".") and age > older:
                    remove_tree(Path(entry.path))
                    gone += 1
        return gone

    def free_uids(self) -> None:
        self._users.sweep(max(CLAIM_SECONDS, self._keep_marker_for))
