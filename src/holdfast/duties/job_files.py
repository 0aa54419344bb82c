"""Removes the files of deleted jobs: in the artifact store, on this host, and on this host's engine.

The store calls this (`store.files`) after it has recorded that a job is to be deleted, and before it deletes the rows.
So a file that cannot be removed keeps its job in the record, and the duty tries again. Files of an attempt on other
hosts are removed by the workers there, at its end or by their sweep.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import Protocol

from holdfast.runner.artifacts import ArtifactStore
from holdfast.runner.job_files import JobFolders
from holdfast.runner.tree_removal import remove_or_explain
from holdfast.store import Store

log = logging.getLogger(__name__)

PATIENCE = 2.0
"""Seconds to wait for a worker of this host to remove an attempt that has just ended, as it always does."""
POLL_SECONDS = 0.02
CONTAINERS = "docker:"


class Containers(Protocol):
    async def remove(self, jobs: Set[str]) -> Set[str] | None:
        """Remove the containers of ended jobs; return the jobs that still have one, None if no engine answers."""


class JobFiles:
    """`at` is called before each step, so that tests can crash there."""

    def __init__(
        self,
        store: Store,
        artifacts: ArtifactStore,
        folders: JobFolders,
        *,
        containers: Containers | None,
        keep_marker_for: float,
        at: Callable[[str], None] | None = None,
    ) -> None:
        self._store = store
        self._artifacts = artifacts
        self._folders = folders
        self._containers = containers
        self._keep_marker_for = keep_marker_for
        self._at = at or (lambda step: None)
        self._reported_problems: dict[str, str] = {}

    async def remove(self, jobs: Sequence[str]) -> Set[str]:
        """Remove all files of ended jobs; return the jobs that have none left. The others are retried later."""
        self._at("files")
        await self._until_cleared(jobs)
        blocked = await self._remove_containers(frozenset(jobs))
        left = await asyncio.to_thread(self._remove, jobs, blocked)
        self._log_problems(left)
        gone = frozenset(jobs) - left.keys()
        for job in gone:
            if self._reported_problems.pop(job, None) is not None:
                log.info("the files of job %s are removed; its record is deleted next", job)
        self._at("record")
        return gone

    async def _until_cleared(self, jobs: Sequence[str]) -> None:
        """Wait a moment for a worker that is about to remove the folder of an attempt that has just ended here."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            found = await asyncio.to_thread(self._folders.attempts, jobs)
            if not any((folder / "spec").exists() for folders in found.values() for folder in folders):
                return
            await asyncio.sleep(POLL_SECONDS)

    async def _remove_containers(self, jobs: Set[str]) -> Mapping[str, str]:
        """Remove containers; return the jobs that still have one, and why.

        An engine that does not answer is assumed to be another host's, unless there is a workspace for it on this host.
        """
        wanted = await self._store.attempts.in_domains(CONTAINERS, sorted(jobs)) if self._containers else frozenset()
        if self._containers is None or not wanted:
            return {}
        left = await self._containers.remove(wanted)
        if left is not None:
            return dict.fromkeys(left, "its container is being stopped and removed")
        workspaces = await asyncio.to_thread(self._folders.workspaces, wanted)
        return dict.fromkeys(workspaces, "its container cannot be removed: the Docker engine does not answer")

    def _remove(self, jobs: Sequence[str], blocked: Mapping[str, str]) -> dict[str, str]:
        """Remove folders; return the jobs with remaining files, and why."""
        attempts = self._folders.attempts(jobs)
        workspaces = self._folders.workspaces([job for job in jobs if job not in blocked])
        left = dict(blocked)
        for job in jobs:
            problems = [remove_or_explain(folder) for folder in workspaces.get(job, ())]
            problems += [self._remove_attempt(folder) for folder in attempts.get(job, ())]
            problems.append(self._delete_stored(job))
            if (problem := next(filter(None, problems), None)) is not None:
                left.setdefault(job, problem)
        return left

    def _remove_attempt(self, folder: Path) -> str | None:
        try:
            return self._folders.remove_attempt(folder, keep_marker_for=self._keep_marker_for)
        except Exception as error:
            return f"{folder}: {error}"

    def _delete_stored(self, job: str) -> str | None:
        try:
            return self._artifacts.delete_job(job)
        except Exception as error:
            return str(error)

    def _log_problems(self, left: Mapping[str, str]) -> None:
        """Log why jobs are not deleted, once for each reason."""
        for job, problem in left.items():
            if self._reported_problems.get(job) != problem:
                self._reported_problems[job] = problem
                log.warning("job %s is not deleted yet, retrying to remove its files: %s", job, problem)
