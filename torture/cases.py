"""A history taken apart by job: what each job's record, children, clients and faults have to say."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

import msgspec

from torture.history import Attempt, Call, Event, Fault, Follow, History, Line, Record, Task

TERMINAL = frozenset({"succeeded", "failed", "timed_out", "cancelled"})
APART = frozenset({"process", "docker"})
"""Runners whose attempts outlive their worker, and never run twice at the same time."""


class Case:
    """Everything about one job."""

    def __init__(self, job: str, history: History) -> None:
        self.job = job
        self.record: Record | None = history.records.get(job)
        self.events: Sequence[Event] = history.events.get(job, [])
        self.attempts: Sequence[Attempt] = history.attempts.get(job, [])
        self.tasks: Sequence[Task] = history.tasks.get(job, [])
        self.lines: list[Line] = []
        self.calls: list[Call] = []
        self.follows: list[Follow] = []
        self.faults: list[Fault] = []

    @cached_property
    def statuses(self) -> list[Event]:
        return [event for event in self.events if event.type == "status"]

    @cached_property
    def runs(self) -> Mapping[int, list[Line]]:
        """The journal's lines of each attempt, the earliest first."""
        runs: dict[int, list[Line]] = defaultdict(list)
        for line in sorted(self.lines, key=lambda line: line.at):
            runs[line.attempt].append(line)
        return runs

    @property
    def submitted(self) -> Mapping[str, object] | None:
        """How it was asked for, if the call that made it is known; others may have joined it by their reuse key."""
        made = None if self.record is None else self.record.labels.get("call")
        for call in self.calls:
            if made not in (None, str(call.n if call.repeats is None else call.repeats)):
                continue
            for id, job in zip(call.ids, call.jobs, strict=False):
                if id == self.job:
                    return job
        return None

    @property
    def runner(self) -> str:
        """What ran it; of a deleted job it is known by the call that made it."""
        return self.record.runner if self.record is not None else str((self.submitted or {}).get("runner", ""))

    @property
    def pipeline(self) -> bool:
        """Whether it has tasks; those that are known already need no run."""
        return bool(self.tasks) or bool((self.submitted or {}).get("tasks"))

    def called(self, *verbs: str) -> list[Call]:
        """The calls of these verbs about this job that were done, or may have been."""
        return [call for call in self.calls if call.verb in verbs and may_be_done(call)]

    def struck(self, attempt: int) -> bool:
        """Whether a fault was aimed at the children of an attempt."""
        return any((self.job, attempt) in {(job, n) for job, n in fault.attempts} for fault in self.faults)


def may_be_done(call: Call) -> bool:
    """Whether a call had its effect, as far as its caller can know: it was answered so, or not at all."""
    return call.answer != "refused"


def cases(history: History) -> dict[str, Case]:
    """One case for every job that anybody has heard of."""
    names = {*history.records, *history.events, *(line.job for line in history.lines)}
    names |= {job for call in history.calls if call.answer == "ok" for job in call.ids}
    found = {name: Case(name, history) for name in sorted(names)}
    for line in history.lines:
        found[line.job].lines.append(line)
    for call in history.calls:
        for job in {job for job in call.ids if job in found}:
            found[job].calls.append(call)
    for follow in history.follows:
        if follow.job in found:
            found[follow.job].follows.append(follow)
    for fault in history.faults:
        for job in {job for job, _ in fault.attempts if job in found}:
            found[job].faults.append(fault)
    return found


class Span(msgspec.Struct, frozen=True, order=True):
    """A time in which something was so; the last one of a job may be open."""

    begin: float
    end: float
    job: str


def overlaps(spans: Sequence[Span]) -> Iterator[tuple[Span, Span]]:
    """Each span that begins before an earlier one of another job has ended, with that one."""
    last: Span | None = None
    for span in sorted(spans):
        if last is not None and span.begin < last.end and span.job != last.job:
            yield last, span
        if last is None or span.end > last.end:
            last = span
