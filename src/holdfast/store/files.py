"""What removes the files of jobs that are deleted. The store decides when, and knows nothing of folders."""

from collections.abc import Collection, Sequence, Set
from typing import Protocol


class Files(Protocol):
    async def remove(self, jobs: Sequence[str]) -> Set[str]:
        """Remove all files of ended jobs; return those jobs that have none left. The others are tried again later."""


class NoFiles:
    """For a store that is used by itself: its jobs have no files that it could reach."""

    async def remove(self, jobs: Collection[str]) -> Set[str]:
        return frozenset(jobs)
