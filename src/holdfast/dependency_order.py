"""Sorts the jobs of one call so that each comes after the jobs it needs. Pure, no I/O."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Protocol, TypeVar

from holdfast.errors import Invalid


class Needing(Protocol):
    """A job with an id and the ids of the jobs that it needs."""

    @property
    def id(self) -> str | None: ...

    @property
    def needs(self) -> tuple[str, ...]: ...


J = TypeVar("J", bound=Needing)


def in_order(jobs: Sequence[J]) -> list[J]:
    """Sort a batch so that each job comes after the ones it needs; refuse a cycle."""
    by_id = {job.id: job for job in jobs if job.id is not None}
    if len(by_id) < len(jobs):
        ((twice, _),) = Counter(job.id for job in jobs).most_common(1)
        raise Invalid("id", f"job {twice} is in this batch twice")
    if not any(job.needs for job in jobs):
        return list(jobs)
    if _is_in_order(jobs, by_id):
        return list(jobs)
    inside = {job_id: [need for need in job.needs if need in by_id] for job_id, job in by_id.items()}
    return [by_id[job_id] for job_id in _topological(inside)]


def _is_in_order(jobs: Sequence[J], by_id: Mapping[str, J]) -> bool:
    before: set[str] = set()
    for job in jobs:
        if any(need in by_id and need not in before for need in job.needs):
            return False
        before.add(str(job.id))
    return True


def _topological(needs: Mapping[str, Sequence[str]]) -> list[str]:
    waiting = {job_id: len(of) for job_id, of in needs.items()}
    dependants: dict[str, list[str]] = {}
    for job_id, of in needs.items():
        for need in of:
            dependants.setdefault(need, []).append(job_id)
    order = [job_id for job_id, count in waiting.items() if count == 0]
    for job_id in order:
        for dependant in dependants.get(job_id, ()):
            waiting[dependant] -= 1
            if waiting[dependant] == 0:
                order.append(dependant)
    if len(order) < len(needs):
        stuck = sorted(set(needs) - set(order))
        raise Invalid("needs", f"jobs need each other in a cycle: {', '.join(stuck[:5])}")
    return order
