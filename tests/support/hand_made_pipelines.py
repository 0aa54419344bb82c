"""Histories of pipelines, made by hand."""

from collections.abc import Sequence
from typing import Any

import msgspec
from torture.history import Attempt, Call, Event, Fault, History, Line, Record, StoredSnapshot, Task
from torture.pipelines import content, lines, outputs, steps

ROOT = "r" * 64


class PipelineHistory:
    """Pipelines as they went, one after the other; each task takes two seconds."""

    def __init__(self) -> None:
        self.history = History(seed=1, store="sqlite", ttl=4.0)
        self.at = 100.0

    def job(
        self, name: str, trails: Sequence[str], *, known: int = 0, mode: str = "always", leases: bool = False
    ) -> str:
        """A pipeline whose first tasks were known, and whose others ran; its worker may be killed in the middle."""
        history, begin = self.history, self.at
        n = len(history.calls)
        body = {"runner": "process", "snapshot": mode, "tasks": [{"name": trail} for trail in trails]}
        history.calls.append(
            Call(n=n, verb="submit", sent=begin, answered=begin + 0.1, answer="ok", ids=(name,), jobs=(body,))
        )
        self.events = history.events[name] = []
        self.say("status", status="queued")
        self.at += 1
        self.say("status", status="running", attempt=1, worker="w1")
        for trail in trails[:known]:
            self.say("task", trail, status="succeeded", cached=True)
        token = 1
        for trail in trails[known:]:
            self.say("task", trail, status="running")
            self.run(name, trail, token=1)
            if leases:
                history.faults.append(Fault(kind="kill worker", at=self.at - 3, until=1e9, target="w1"))
                self.say("lease", lease="reaped", worker="w1", token=2)
                self.say("lease", lease="adopted", worker="w2", token=3, attempt=1)
                token, leases = 3, False
            self.say("log", trail, stream="stdout", lines=[f"1 {trail} out {n + 1}" for n in range(lines(trail))])
            self.say("task", trail, status="succeeded", exit_code=0)
            if mode == "always" or (mode == "final" and trail == trails[-1]):
                self.keep(name, trail)
        self.at += 1
        self.say("status", status="succeeded", attempt=1, cause="exit")
        history.records[name] = Record(
            id=name, runner="process", lane=None, needs=(), reuse_key=None, labels={"call": str(n)}, policy={},
            status="succeeded", seq=len(self.events), requested=begin, started=begin + 1, finished=self.at,
            result=(outputs(trails[-1]) or (None, {}))[0],
        )  # fmt: skip
        history.outputs[name] = (outputs(trails[-1]) or (None, {}))[1]
        history.attempts[name] = [
            Attempt(
                attempt=1,
                worker="w2",
                token=token,
                claim_seq=2,
                end_seq=len(self.events),
                started=begin + 1,
                ended=self.at,
                cause="exit",
                status="succeeded",
                exit_code=0,
            )
        ]
        history.tasks[name] = [
            Task(
                n=n,
                name=trail,
                status="succeeded",
                cached=n < known,
                parent=parent_id(trail),
                snapshot=snapshot_id(trail),
            )
            for n, trail in enumerate(trails)
        ]
        self.at += 1
        return name

    def say(self, type: str, task: str | None = None, **data: Any) -> None:
        self.events.append(Event(seq=len(self.events) + 1, at=self.at, type=type, task=task, data=data))

    def run(self, name: str, trail: str, *, attempt: int = 1, token: int = 1, end: str = "end") -> None:
        for what, said in (("start", 0), ("tick", lines(trail)), (end, lines(trail))):
            self.line(name, what, trail, attempt=attempt, token=token, said=said)
            self.at += 0.7

    def line(self, name: str, what: Any, trail: str, *, attempt: int = 1, token: int = 1, said: int = 0) -> None:
        self.history.lines.append(Line(what, name, attempt, token, 10, self.at, said, trail))

    def keep(self, name: str, trail: str) -> None:
        kept = StoredSnapshot(
            id=snapshot_id(trail), trail=trail, parent=parent_id(trail), job=name, made=self.at, verified=True,
            files=content(trail),
        )  # fmt: skip
        self.history.kept.append(kept)

    def change_kept(self, trail: str, **fields: Any) -> None:
        self.history.kept = [
            msgspec.structs.replace(kept, **fields) if kept.trail == trail else kept for kept in self.history.kept
        ]

    def change_task(self, name: str, n: int, **fields: Any) -> None:
        self.history.tasks[name][n] = msgspec.structs.replace(self.history.tasks[name][n], **fields)

    def move_lines(self, name: str, trail: str, seconds: float) -> None:
        """Let a run have been earlier or later."""
        self.history.lines = [
            msgspec.structs.replace(line, at=line.at + seconds) if (line.job, line.task) == (name, trail) else line
            for line in self.history.lines
        ]

    def forget(self, name: str, what: str, trail: str) -> None:
        self.history.lines = [
            line for line in self.history.lines if (line.job, line.what, line.task) != (name, what, trail)
        ]


def snapshot_id(trail: str) -> str:
    return trail.encode().hex().ljust(64, "0")


def parent_id(trail: str) -> str:
    before = steps(trail)[:-1]
    return snapshot_id(before[-1]) if before else ROOT


LONG = steps("c0.a.b.a")


def good() -> PipelineHistory:
    example = PipelineHistory()
    example.job("first", LONG[:2], leases=True)
    example.job("second", LONG[:2], known=2)
    example.job("third", LONG, known=2, mode="final")
    example.job("nothing kept", ["c1.b", "c1.b.a"], mode="none")
    return example
