"""Finds and removes the folders of a job's attempts on this host.

    STATE/attempts/INSTALLATION/JOB.N          an attempt folder, with its workspace; `.JOB.N.…` while it is being made
    STATE/attempts/INSTALLATION/JOB.N.check-…  a run of a readiness check
    STATE/spaces/INSTALLATION/JOB.N            the workspace of an attempt in a container

The state folder belongs to this host. Workers on other hosts remove the folders there. Artifacts and inputs of a job
are removed by the artifact store.
"""

import os
import time
from collections.abc import Collection, Mapping
from pathlib import Path

from holdfast.runner.attempt_folder import AttemptFolder
from holdfast.runner.attempt_sweep import sweep_attempt
from holdfast.runner.base import Identity
from holdfast.runner.checks import identity_in, sweep_check
from holdfast.runner.tree_removal import remove_or_explain


class JobFolders:
    """The folders of jobs in the state folder of this host."""

    def __init__(self, state: Path, installation: str) -> None:
        self._attempts = state / "attempts" / installation
        self._workspaces = state / "spaces" / installation
        self._installation = installation

    def attempts(self, jobs: Collection[str]) -> Mapping[str, list[Path]]:
        """Return the attempt folders of jobs on this host, including incomplete ones."""
        return _named(self._attempts, jobs)

    def workspaces(self, jobs: Collection[str]) -> Mapping[str, list[Path]]:
        """Return the workspaces of containers on this host."""
        return _named(self._workspaces, jobs)

    def remove_attempt(self, folder: Path, *, keep_marker_for: float) -> str | None:
        """Remove the folder of an ended attempt. Return why that is not possible yet, or None.

        Its start marker stays for `keep_marker_for` seconds, as after every attempt that may have had two owners.
        """
        if folder.name.startswith("."):
            return remove_or_explain(folder)
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
        return remove_or_explain(folder)


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
