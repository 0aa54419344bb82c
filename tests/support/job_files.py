"""Every file and folder that carries a job's id, wherever holdfast keeps something: an independent look at the disk."""

import os
from collections.abc import Iterable
from pathlib import Path


def files_of(job_id: str, *folders: Path) -> list[str]:
    """Return the paths below these folders that belong to a job, in order."""
    return sorted(path for folder in folders for path in _below(folder) if job_id in path)


def _below(folder: Path) -> Iterable[str]:
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            yield os.path.join(parent, name)
