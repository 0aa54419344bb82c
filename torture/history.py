"""The recorded history of a run, from sources independent of holdfast; plain values that can be saved to a file.

Clients note their calls and the answers, children their lines in a journal of their own, the harness its faults, a
witness within each worker its heartbeats. The database is read once, at the end, by plain SQL. Times are seconds of
CLOCK_BOOTTIME; those of the database are turned into it by the distance of the two clocks.
"""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

HARNESS = "harness"
Answer = Literal["ok", "refused", "unknown"]
"""`unknown`: no answer came; it may have been done."""


def boottime() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Call(msgspec.Struct, kw_only=True):
    """One call of a client. Every job that it submits carries the call's number in its label `call`."""

    n: int
    verb: str
    sent: float
    answered: float = 0.0
    answer: Answer = "unknown"
    error: str = ""
    ids: Sequence[str] = ()
    """Of a submit: the jobs that the answer names. Of any other: the job that it is about."""
    jobs: Sequence[Mapping[str, Any]] = ()
    """Of a submit: its body."""
    key: str | None = None
    given: Mapping[str, Any] = {}
    """Of any other call than a submit: what it was given besides the job."""
    outcome: str = ""
    """Of a delete: `deleted`, or `deleting`."""
    left: Sequence[str] = ()
    """Of a delete that was answered `deleted`: the files of the job that were there right after the answer."""
    reused: bool = False
    repeats: int | None = None
    """The number of the call that this one repeats, with the same key and body."""


class Line(msgspec.Struct, frozen=True, array_like=True):
    """One line of a child's journal."""

    what: Literal["start", "tick", "kin", "end", "fail", "spoilt"]
    """`tick`: it lives, and has said so many lines; `kin`: a descendant that left its session lives.

    Of a pipeline's task: `end` is a success, `fail` is none; `spoilt`: its workspace was not what it should begin with.
    """
    job: str
    attempt: int
    token: int
    pid: int
    at: float
    said: int
    task: str = ""
    """The trail of a pipeline's task."""


class Beat(msgspec.Struct, frozen=True, array_like=True):
    """One heartbeat of a worker, as it was seen within the worker, from the question to its answer."""

    worker: str
    asked: float
    answered: float
    renewed: Sequence[tuple[str, int]] | None
    """The jobs whose leases it renewed, with their tokens; None: it failed."""


class Write(msgspec.Struct, frozen=True, array_like=True):
    """One write of a worker about a job, as it was seen within the worker: with which token, and whether it landed."""

    worker: str
    what: Literal["finish", "append", "hand_over"]
    job: str
    token: int
    asked: float
    answered: float
    landed: bool


class Lag(msgspec.Struct, frozen=True, array_like=True):
    """A time in which a worker's process, or the harness, was ready to run and got no CPU."""

    worker: str
    begin: float
    end: float


class Fault(msgspec.Struct, kw_only=True):
    """What was done to the system, from when to when."""

    kind: str
    at: float
    until: float
    target: str = ""
    """The worker, server or host that it struck; empty: all of it."""
    attempts: Sequence[tuple[str, int]] = ()
    """The attempts whose children it struck."""


class ProcessExit(msgspec.Struct, frozen=True, kw_only=True):
    """The exit of a worker or server process: when it was noticed, its status, and its last log lines."""

    part: str
    at: float
    status: int
    words: str


class Follow(msgspec.Struct, kw_only=True):
    """What one connection of a follower got: events after `after`, by number and type."""

    job: str
    after: int
    events: Sequence[tuple[int, str]] = ()
    ended: bool = False
    """Whether the stream said that this is the end, and was not cut."""


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """A job as the database has it at the end."""

    id: str
    runner: str
    lane: str | None
    needs: Sequence[str]
    reuse_key: str | None
    labels: Mapping[str, str]
    policy: Mapping[str, Any]
    status: str
    seq: int
    requested: float
    started: float | None
    finished: float | None
    error: str | None = None
    result: Any = None
    usage: Mapping[str, float] = {}


class Event(msgspec.Struct, frozen=True, kw_only=True):
    seq: int
    at: float
    type: str
    data: Any
    task: str | None = None


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the ledger: an attempt that ended. One that a person gave up has no `end_seq`."""

    attempt: int
    worker: str | None
    token: int
    claim_seq: int
    end_seq: int | None
    started: float | None
    ended: float
    cause: str
    status: str | None
    exit_code: int | None


class SurvivingProcess(msgspec.Struct, frozen=True, array_like=True):
    """A process of an attempt that was still alive at the end."""

    job: str
    attempt: int
    pid: int


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """A task of a pipeline as the database has it at the end. Its name is its trail."""

    n: int
    name: str
    status: str
    cached: bool
    parent: str
    snapshot: str


class StoredSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot as it stands at the end, with every file that is in it."""

    id: str
    trail: str
    parent: str
    job: str
    made: float
    verified: bool
    files: Mapping[str, str]


class Removal(msgspec.Struct, kw_only=True):
    """A person removed a snapshot, and all that was made from it; unanswered, it may have been done at any time."""

    trail: str
    sent: float
    answered: float | None = None


class History(msgspec.Struct, kw_only=True):
    seed: int
    store: str
    ttl: float
    calls: list[Call] = []
    lines: list[Line] = []
    beats: list[Beat] = []
    writes: list[Write] = []
    lags: list[Lag] = []
    faults: list[Fault] = []
    exits: list[ProcessExit] = []
    follows: list[Follow] = []
    records: dict[str, Record] = {}
    events: dict[str, list[Event]] = {}
    attempts: dict[str, list[Attempt]] = {}
    alive: list[SurvivingProcess] = []
    mended: list[str] = []
    """What workers and servers said they had to mend."""
    made: dict[str, str] = {}
    """What is in the artifact of each attempt that left one: by job, attempt and token."""
    deadlocks: list[str] = []
    """What the database said of transactions that waited for each other."""
    tasks: dict[str, list[Task]] = {}
    outputs: dict[str, Mapping[str, str]] = {}
    """The artifacts of each pipeline's last attempt: what is in which file."""
    kept: list[StoredSnapshot] = []
    unnamed: list[str] = []
    """What was left in the store of snapshots that is no snapshot, after a sweep."""
    removals: list[Removal] = []
    files: dict[str, list[str]] = {}
    """The files of each job that is no longer in the database, when all was over."""
    damaged: list[str] = []
    """Snapshots that a worker called damaged."""

    def save(self, path: Path) -> None:
        path.write_bytes(msgspec.json.encode(self))

    @classmethod
    def load(cls, path: Path) -> "History":
        return msgspec.json.decode(path.read_bytes(), type=cls)


def read_probe(path: Path, history: "History") -> None:
    """Add what was seen within the workers (worker_probe.py) to a history."""
    for text in path.read_bytes().splitlines() if path.exists() else ():
        what, *fields = msgspec.json.decode(text)
        if what == "beat":
            history.beats.append(msgspec.convert(fields, Beat))
        elif what == "write":
            history.writes.append(msgspec.convert(fields, Write))
        else:
            history.lags.append(msgspec.convert(fields, Lag))


def read_journal(path: Path) -> list[Line]:
    """The lines of the children's journal, in the order in which they were written."""
    lines = []
    for text in path.read_text().splitlines() if path.exists() else ():
        what, job, attempt, token, pid, at, said, *task = text.split()
        fields = (what, job, int(attempt), int(token), int(pid), float(at), int(said), *task)
        lines.append(msgspec.convert(fields, Line))
    return lines
