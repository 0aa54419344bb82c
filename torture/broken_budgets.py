"""Broken builds of budgets and deletes, for broken_builds.py: each removes one of their safeguards."""

from collections.abc import Callable, Sequence, Set
from typing import Any

from holdfast.duties.job_files import JobFiles
from holdfast.store import jobs, leases, orphans
from torture.focus import BUDGETS, FILES, Focus


def budgets_not_held_at_the_end() -> None:
    """A success is accepted although the job is over its budget."""

    async def trusting(_: object, ends: Sequence[Any]) -> Sequence[Any]:
        return ends

    for module in (leases, orphans):
        vars(module)["within_budgets"] = trusting


def spent_budgets_resumed() -> None:
    """A job is resumed although its budget is spent."""
    vars(jobs)["refusal"] = lambda *_: None


def files_left_behind() -> None:
    """A delete reports the files as removed, and leaves them to the sweep."""

    async def nothing(self: JobFiles, jobs: Sequence[str]) -> Set[str]:
        return frozenset(jobs)

    JobFiles.remove = nothing  # type: ignore[method-assign]


ANSWERS: dict[str, tuple[Callable[[], None], Sequence[str], Focus]] = {
    "budgets_not_held_at_the_end": (budgets_not_held_at_the_end, ["budgets_are_kept"], BUDGETS),
    "spent_budgets_resumed": (spent_budgets_resumed, ["spent_budgets_are_not_resumed"], BUDGETS),
    "files_left_behind": (files_left_behind, ["deleted_jobs_leave_no_files"], FILES),
}
