"""Finds and removes all folders of a job.

    SHARED/artifacts/JOB               its artifacts
    SHARED/inputs/JOB                  files that were uploaded for it
    STATE/attempts/SITE/JOB.N          an attempt folder, with its workspace; `.JOB.N.…` while it is being made
    STATE/attempts/SITE/JOB.N.check-…  a run of a readiness check
    STATE/spaces/SITE/JOB.N            the workspace of an attempt in a container

The state folder belongs to this host. Workers on other hosts remove the folders there.
"""

import errno
import os
import time
from collections.abc import Collection, Mapping
from pathlib import Path

from holdfast.runner.attempt_folder import AttemptFolder
from holdfast.runner.attempt_sweep import sweep_attempt
from holdfast.runner.base import Identity
from holdfast.runner.checks import identity_in, sweep_check
from holdfast.runner.tree_removal import remove_tree

SHARED_FOLDERS = ("artifacts", "inputs")


class JobFolders:
    """The folders of jobs in a shared folder, and in the state folder of this host."""

    def __init__(self, shared: Path, state: Path, installation: str) -> None:
        self._shared = shared
        self._attempts = state / "attempts" / installation
        self._workspaces = state / "spaces" / installation
        self._installation = installation

    def in_shared(self, job_id: str) -> list[Path]:
        """Return the existing folders of one job in the shared folder."""
        folders = (self._shared / name / job_id for name in SHARED_FOLDERS)
        return [folder for folder in folders if os.path.lexists(folder)]

    def attempts(self, jobs: Collection[str]) -> Mapping[str, list[Path]]:
        """Return the attempt folders of jobs on this host, including incomplete ones."""
        return _named(self._attempts, jobs)

    def workspaces(self, jobs: Collection[str]) -> Mapping[str, list[Path]]:
        """Return the workspaces of containers on this host."""
        return _named(self._workspaces, jobs)

    def all(self, jobs: Collection[str]) -> Mapping[str, list[Path]]:
        """Return all folders of these jobs. A job without folders is not in the result."""
        attempts, spaces = self.attempts(jobs), self.workspaces(jobs)
        found = {job: [*self.in_shared(job), *attempts.get(job, ()), *spaces.get(job, ())] for job in jobs}
        return {job: folders for job, folders in found.items() if folders}

    def remove_attempt(self, folder: Path, *, keep_marker_for: float) -> str | None:
        """Remove the folder of an ended attempt. Return why that is not possible yet, or None.

        Its start marker stays for `keep_marker_for` seconds, as after every attempt that may have had two owners.
        """
        if folder.name.startswith("."):
            return remove(folder)
        if identity_in(folder.parent, folder.name) is not None:
            return None if sweep_check(AttemptFolder(folder)) else f"{folder}: its processes are being stopped"
        job, _, attempt = folder.name.rpartition(".")
        identity = Identity(self._installation, job, int(attempt))
        if not sweep_attempt(AttemptFolder(folder), identity.mark, keep_marker_for=keep_marker_for) and _has_spec(
            folder
        ):
            return f"{folder}: its processes are being stopped"
        if os.path.lexists(folder) and time.time() - folder.stat().st_mtime < keep_marker_for:
            return f"{folder}: its start marker stays for {keep_marker_for:g} s"
        return remove(folder)


def remove(folder: Path) -> str | None:
    """Remove a folder tree. Return why something is left, or None."""
    remove_tree(folder)
    return why_left(folder) if os.path.lexists(folder) else None


def why_left(root: Path) -> str | None:
    """Remove as much of a tree as possible. Return the first reason why something stays, or None."""
    for parent, folders, files in os.walk(root, topdown=False):
        for name, drop in (*((name, os.unlink) for name in files), *((name, _remove_entry) for name in folders)):
            try:
                drop(os.path.join(parent, name))
            except OSError as error:
                return f"{os.path.join(parent, name)}: {error.strerror}"
    try:
        _remove_entry(root)
    except OSError as error:
        return f"{root}: {error.strerror}"
    return None


def _remove_entry(path: str | Path) -> None:
    try:
        os.rmdir(path)
    except FileNotFoundError:
        return
    except OSError as error:
        if error.errno != errno.ENOTDIR:
            raise
        os.unlink(path)


def _has_spec(folder: Path) -> bool:
    return (folder / "spec").exists()


def _named(root: Path, jobs: Collection[str]) -> Mapping[str, list[Path]]:
    """Return the entries of a folder that belong to these jobs; none if we may not list the folder."""
    try:
        names = os.listdir(root)
    except (FileNotFoundError, PermissionError):
        return {}
    wanted = frozenset(jobs)
    found: dict[str, list[Path]] = {}
    for name in sorted(names):
        job, _, rest = name.removeprefix(".").partition(".")
        if rest and job in wanted:
            found.setdefault(job, []).append(root / name)
    return found
