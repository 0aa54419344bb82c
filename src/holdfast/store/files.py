"""The interface that removes the files of deleted jobs. The store decides when, and knows nothing of folders."""

from collections.abc import Collection, Sequence, Set
from typing import Protocol


class Files(Protocol):
    async def remove(self, jobs: Sequence[str]) -> Set[str]:
        """Remove all files of ended jobs; return the jobs that have none left. The others are retried later."""


class NoFiles:
    """For a store that is used alone: its jobs have no files that it could reach."""

    async def remove(self, jobs: Collection[str]) -> Set[str]:
        return frozenset(jobs)


class FilesLeftToDuties:
    """For an application that has no shared folder: its deletions are finished by a server or worker that has."""

    async def remove(self, jobs: Collection[str]) -> Set[str]:
        return frozenset()
