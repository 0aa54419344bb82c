"""Did pipelines keep their promises? Tasks in order, stored results reused, one builder, complete snapshots.

Of a task its trail is known (see torture/pipelines.py), which stands for its snapshot, and what every job asked for.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from torture.cases import Case, Span, overlaps
from torture.checks.streams import TOLD_IN_FULL, has_log_gap
from torture.history import Event, History, Line
from torture.pipelines import content, outputs, steps

Found = Iterator[tuple[str, str]]

BLUR = 0.1
"""Seconds by which the clocks of the kernel and of the database may differ."""


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a task. `looked`: since when its worker must have looked whether its result is known."""

    case: Case
    attempt: int
    trail: str
    begin: float
    end: float
    looked: float
    well: bool

    @property
    def keeps(self) -> bool:
        """Whether its result was to be stored, so that it ran under a lock."""
        return self.trail in _kept_by(self.case)


def tasks_run_in_order(history: History, cases: Mapping[str, Case]) -> Found:
    """P1, P2: a task begins after the success of the one before it, in a workspace that has just that in it.

    A deleted job has no events that say which tasks it found cached, so its gaps are not judged.
    """
    for case in _pipelines(cases):
        for attempt, lines in case.runs.items():
            last: Line | None = None
            for line in lines:
                if line.what == "spoilt":
                    yield case.job, f"attempt {attempt}: {line.task} did not find what the tasks before it leave"
                elif line.what == "start" and last is not None and last.what != "end":
                    yield case.job, f"attempt {attempt}: {line.task} began before {last.task} had succeeded"
                elif line.what == "start" and last is not None and steps(line.task)[:-1][-1:] != [last.task]:
                    skipped = steps(line.task)[len(steps(last.task)) : -1]
                    follows = line.task.startswith(f"{last.task}.")
                    if not follows or (case.events and not _found_known(case, attempt, skipped)):
                        yield case.job, f"attempt {attempt}: {line.task} began after {last.task}"
                last = line


def _found_known(case: Case, attempt: int, trails: Sequence[str]) -> bool:
    """Whether an attempt says that it found these in the store."""
    return all(_told(case, attempt).get(trail, {}).get("cached") for trail in trails)


def finished_tasks_are_not_repeated(history: History, cases: Mapping[str, Case]) -> Found:
    """P2: in one attempt a task starts once, however often it is adopted."""
    for case in _pipelines(cases):
        for attempt, lines in case.runs.items():
            starts = Counter(line.task for line in lines if line.what == "start")
            for trail, count in starts.items():
                if count > 1:
                    yield case.job, f"attempt {attempt}: {trail} was started {count} times"


def known_results_are_not_built_again(history: History, cases: Mapping[str, Case]) -> Found:
    """P4, P5: a task whose snapshot was there when it was last looked for does not run. Under a lock it is."""
    known = _known(history, cases)
    for run in _runs(cases):
        if not run.case.events:
            continue  # The job was deleted, and with it what tells when it was claimed and looked.
        under_lock = run.keeps and not _lease_moved(run.case, run.looked, run.begin)
        looked = run.begin if under_lock else run.looked
        for made, at in known[run.trail]:
            if at < looked - BLUR and not _removed(history, run.trail, made, run.begin):
                yield run.case.job, f"attempt {run.attempt}: {run.trail} ran, and its snapshot had been there"
                break


def _known(history: History, cases: Mapping[str, Case]) -> Mapping[str, list[tuple[float, float]]]:
    """Between which two times the snapshot of a trail was certainly made: one that stands at the end says so itself.

    Else by what came after it: the next task of a job that keeps it has begun, or such a job has succeeded.
    """
    known: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for kept in history.kept:
        known[kept.trail].append((kept.made, kept.made))
    runs: dict[tuple[str, int], list[Run]] = defaultdict(list)
    for run in _runs(cases):
        runs[run.case.job, run.attempt].append(run)
    for (job, attempt), mine in runs.items():
        ended = [row.ended for row in cases[job].attempts if row.attempt == attempt and row.status == "succeeded"]
        for run, at in zip(mine, [*(run.begin for run in mine[1:]), *ended[:1]], strict=False):
            if run.well and run.keeps:
                known[run.trail].append((run.end, at))
    return known


def _removed(history: History, trail: str, since: float, until: float) -> bool:
    """Whether a person may have removed it in this time, or something that it was made from."""
    return any(
        removal.sent <= until
        and (removal.answered is None or removal.answered >= since)
        and _from(removal.trail, trail)
        for removal in history.removals
    )


def _from(trail: str, made: str) -> bool:
    return trail == made or made.startswith(f"{trail}.")


def one_builder_per_snapshot(history: History, cases: Mapping[str, Case]) -> Found:
    """P5: of the jobs that are to store a result, one builds it at a time; a lock falls with its lease alone."""
    builds: dict[str, list[Run]] = defaultdict(list)
    for run in _runs(cases):
        if run.keeps:
            builds[run.trail].append(run)
    for trail, runs in builds.items():
        by_span = {Span(run.begin, run.end, run.case.job): run for run in runs}
        for first, second in overlaps(list(by_span)):
            if not any(_lease_moved(by_span[one].case, by_span[one].looked, second.begin) for one in (first, second)):
                yield second.job, f"it built {trail} while job {first.job} did"


def _lease_moved(case: Case, since: float, until: float) -> bool:
    return any(event.type == "lease" and since - BLUR <= event.at <= until + BLUR for event in case.events)


def cached_tasks_do_not_run(history: History, cases: Mapping[str, Case]) -> Found:
    """P4: what an attempt says it found in the store, it did not run."""
    for case in _pipelines(cases):
        for row in case.attempts:
            started = {line.task for line in case.runs.get(row.attempt, []) if line.what == "start"}
            for trail, said in _told(case, row.attempt).items():
                if said.get("cached") and trail in started:
                    yield case.job, f"attempt {row.attempt}: {trail} is called cached, and it ran"


def _told(case: Case, attempt: int) -> Mapping[str, Mapping[str, object]]:
    """The last word of an attempt about each task."""
    for row in case.attempts:
        if row.attempt == attempt:
            given_up = min((other.claim_seq for other in case.attempts if other.attempt > attempt), default=math.inf)
            last = given_up if row.end_seq is None else row.end_seq
            return {event.task: event.data for event in case.events if event.task and _says(event, row.claim_seq, last)}
    return {}


def _says(event: Event, first: float, last: float) -> bool:
    return event.type == "task" and "status" in event.data and first <= event.seq <= last


def pipelines_succeed_whole(history: History, cases: Mapping[str, Case]) -> Found:
    """P1: a pipeline has succeeded when all of its tasks have, by their own word, or were known."""
    for case in _pipelines(cases):
        if not any(row.status == "succeeded" and row.end_seq is not None for row in case.attempts):
            continue
        ended = {line.task for line in case.lines if line.what == "end"}
        if not case.tasks:
            yield case.job, "it succeeded without a plan"
        for task in case.tasks:
            if task.status != "succeeded":
                yield case.job, f"it succeeded, and its task {task.name} is {task.status}"
            elif not task.cached and task.name not in ended:
                yield case.job, f"it succeeded, and its task {task.name} never came to its end"


def pipelines_have_the_outputs_of_their_tasks(history: History, cases: Mapping[str, Case]) -> Found:
    """D1, D2: the result and artifacts are those of all tasks, whether they ran in the last attempt or were known."""
    for case in _pipelines(cases):
        last = case.attempts[-1:]
        if case.record is None or case.record.status != "succeeded" or not case.tasks:
            continue
        if not last or last[0].status != "succeeded" or last[0].end_seq is None:
            continue  # A person resolved it.
        wanted = outputs(case.tasks[-1].name)
        if wanted is None:
            continue
        result, files = wanted
        if case.record.result != result:
            yield case.job, f"its result is {case.record.result!r}, and its tasks reported {result!r}"
        if (found := history.outputs.get(case.job, {})) != files:
            yield case.job, f"its artifacts are {dict(found)}, and its tasks left {dict(files)}"


def snapshots_are_what_their_trail_says(history: History, cases: Mapping[str, Case]) -> Found:
    """P3, P6: every snapshot has exactly the files that its tasks leave, and is what was published; one per result."""
    ids: dict[str, str] = {}
    for kept in history.kept:
        if not kept.verified:
            yield kept.job, f"the snapshot of {kept.trail} is not what was published"
        elif kept.files != content(kept.trail):
            yield kept.job, f"the snapshot of {kept.trail} has {kept.files}"
        if ids.setdefault(kept.trail, kept.id) != kept.id:
            yield kept.job, f"{kept.trail} has two snapshots"
    for kept in history.kept:
        before = steps(kept.trail)[:-1]
        if before and ids.get(before[-1], kept.parent) != kept.parent:
            yield kept.job, f"the snapshot of {kept.trail} was made from another one than that of {before[-1]}"


def no_half_snapshot_is_left(history: History, cases: Mapping[str, Case]) -> Found:
    """P6: at rest, what a sweep leaves in the store are snapshots; and none was found damaged that nobody removed."""
    for name in history.unnamed:
        yield "", f"{name} is in the store, and no snapshot"
    trails = {task.snapshot: (case.job, task.name) for case in cases.values() for task in case.tasks}
    for snapshot in history.damaged:
        job, trail = trails.get(snapshot, ("", ""))
        if not any(_from(removal.trail, trail) for removal in history.removals) and trail:
            yield job, f"the snapshot of {trail} was found damaged"


def task_logs_are_whole(history: History, cases: Mapping[str, Case]) -> Found:
    """R3, R10, E7: every line of every task is there once, in order, under its task's name."""
    for case in _pipelines(cases):
        if case.record is None or has_log_gap(case, "stdout"):
            continue
        logged: dict[tuple[int, str], list[int]] = defaultdict(list)
        for event in case.events:
            for words in (line.split() for line in event.data["lines"]) if event.type == "log" else ():
                if len(words) == 4 and words[2] == "out":
                    logged[int(words[0]), words[1]].append(int(words[3]))
                    if words[1] != event.task:
                        yield case.job, f"a line of {words[1]} is called one of {event.task}"
        in_full = {row.attempt for row in case.attempts if row.cause in TOLD_IN_FULL and row.end_seq is not None}
        for attempt, lines in case.runs.items():
            for trail in {line.task for line in lines}:
                said = max(line.said for line in lines if line.task == trail)
                numbers = logged[attempt, trail]
                if numbers != list(range(1, len(numbers) + 1)) or (attempt in in_full and len(numbers) < said):
                    yield case.job, f"attempt {attempt}, {trail}: the log has the lines {numbers} of {said}"


def _pipelines(cases: Mapping[str, Case]) -> Iterator[Case]:
    return (case for case in cases.values() if case.pipeline)


def _kept_by(case: Case) -> Sequence[str]:
    """The trails whose results a job was to store."""
    asked = case.submitted or {}
    trails = [str(task["name"]) for task in asked.get("tasks", ())]  # type: ignore[attr-defined]
    mode = asked.get("snapshot", "always")
    return trails if mode == "always" else trails[-1:] if mode == "final" else []


def _runs(cases: Mapping[str, Case]) -> Iterator[Run]:
    """Every run of a task, in the order of its attempt."""
    for case in _pipelines(cases):
        claims = [event.at for event in case.statuses if event.data["status"] == "running"]
        for attempt, lines in case.runs.items():
            looked: float | None = None
            for start in (line for line in lines if line.what == "start"):
                own = [line for line in lines if line.task == start.task]
                if looked is None:
                    looked = max((at for at in claims if at <= start.at), default=start.at)
                well = own[-1].what == "end"
                yield Run(case=case, attempt=attempt, trail=start.task, begin=start.at, end=own[-1].at, looked=looked,
                          well=well)  # fmt: skip
                looked = own[-1].at


RULES = (
    tasks_run_in_order,
    finished_tasks_are_not_repeated,
    known_results_are_not_built_again,
    one_builder_per_snapshot,
    cached_tasks_do_not_run,
    pipelines_succeed_whole,
    pipelines_have_the_outputs_of_their_tasks,
    snapshots_are_what_their_trail_says,
    no_half_snapshot_is_left,
    task_logs_are_whole,
)
