"""Short texts about jobs: what a job runs, the part of its id that a person types, sizes. Imports no library."""

import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.model import Job

SHORT_ID = 8
"""Characters of an id that tables show: its end, which is random. Among a million jobs one in 4,000 is not unique."""


def short_id(job_id: str | None) -> str | None:
    """Return the end of an id, which commands accept for the whole."""
    return job_id and job_id[-SHORT_ID:]


def what(job: "Job") -> str:
    """Return the command, function or tasks of a job, in one line."""
    spec: Mapping[str, Any] = job.spec if isinstance(job.spec, Mapping) else {}
    if tasks := spec.get("tasks"):
        return " → ".join(str(task.get("name")) for task in tasks)
    command = spec.get("command") or ()
    words = [spec.get("image"), spec.get("name"), shlex.join(map(str, command)) if command else None]
    return " ".join(" ".join(str(word) for word in words if word).split()) or job.runner


def size(count: float) -> str:
    """Return a number of bytes in the unit that fits."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
