"""Histories of torture runs made by hand: jobs as they went, one after the other, all as it should be."""

from typing import Any

import msgspec
from torture.checks.exits import NO_DATABASE
from torture.history import Attempt, Call, Event, Fault, Follow, History, Line, ProcessExit, Record, Write

LINES = 3


class HandMadeHistory:
    """Jobs as they went, one after the other: each takes ten seconds, from its call to its success."""

    def __init__(self) -> None:
        self.history = History(seed=1, store="sqlite", ttl=4.0)
        self.at = 100.0

    def job(self, name: str, *, runner: str = "process", lane: str | None = None, **asked: Any) -> str:
        """A job that was adopted once, after its worker was killed, and succeeded in its first attempt."""
        at, history = self.at, self.history
        n = len(history.calls)
        body = {"runner": runner, "lane": lane, **asked}
        history.calls.append(
            Call(n=n, verb="submit", sent=at, answered=at + 0.1, answer="ok", ids=(name,), jobs=(body,))
        )
        history.records[name] = Record(
            id=name, runner=runner, lane=lane, needs=asked.get("needs", ()), reuse_key=asked.get("reuse_key"),
            labels={"call": str(n)}, policy={"stop_grace": 1.0, "timeout": 20.0}, status="succeeded", seq=7,
            requested=at, started=at + 1, finished=at + 9, result=1, usage={"runs": 1},
        )  # fmt: skip
        history.made[f"{name}/1.3"] = "1"
        history.writes += [
            Write("w1", "append", name, 1, at + 3, at + 3.1, True),
            Write("w1", "append", name, 1, at + 7, at + 7.1, False),
            Write("w2", "finish", name, 3, at + 8.9, at + 9.1, True),
        ]
        history.events[name] = [
            self.status(1, 0.0, "queued"),
            self.status(2, 1.0, "running", attempt=1, worker="w1"),
            self.event(3, 3.0, "log", stream="stdout", lines=["1 out 1", "1 out 2"]),
            self.event(4, 5.0, "lease", lease="reaped", worker="w1", token=2),
            self.event(5, 5.5, "lease", lease="adopted", worker="w2", token=3, attempt=1),
            self.event(6, 8.5, "log", stream="stdout", lines=["1 out 3"]),
            self.status(7, 9.0, "succeeded", attempt=1, cause="exit"),
        ]
        if runner == "process":
            words = [f"1 err {n + 1}" for n in range(LINES)]
            history.events[name][5] = self.event(6, 8.5, "log", stream="stdout", lines=["1 out 3"])
            history.events[name].insert(6, self.event(7, 8.6, "log", stream="stderr", lines=words))
            history.events[name][7] = self.status(8, 9.0, "succeeded", attempt=1, cause="exit")
            self.change_record(name, seq=8)
        history.attempts[name] = [self.attempt(1, claim_seq=2, end_seq=history.records[name].seq)]
        for what, seconds, said in (("start", 2.0, 0), ("tick", 4.0, 2), ("tick", 7.0, 3), ("end", 8.0, LINES)):
            history.lines.append(self.line(name, what, seconds, said=said))
        history.faults.append(Fault(kind="kill worker", at=at + 2.5, until=at + 1e9, target="w1"))
        history.follows += [
            Follow(job=name, after=0, events=[(e.seq, e.type) for e in history.events[name][:4]]),
            Follow(job=name, after=4, events=[(e.seq, e.type) for e in history.events[name][4:]], ended=True),
        ]
        self.at += 10
        return name

    def process_exit(self, part: str, status: int) -> None:
        self.history.exits.append(ProcessExit(part=part, at=self.at, status=status, words="Traceback"))

    def event(self, seq: int, seconds: float, type: str, **data: Any) -> Event:
        return Event(seq=seq, at=self.at + seconds, type=type, data=data)

    def status(self, seq: int, seconds: float, status: str, **data: Any) -> Event:
        return self.event(seq, seconds, "status", status=status, **data)

    def attempt(self, attempt: int, **fields: Any) -> Attempt:
        found: dict[str, Any] = {
            "attempt": attempt, "worker": "w2", "token": 3, "started": self.at + 2, "ended": self.at + 9,
            "cause": "exit", "status": "succeeded", "exit_code": 0,
        }  # fmt: skip
        return Attempt(**{**found, **fields})

    def line(self, name: str, what: Any, seconds: float, *, attempt: int = 1, said: int = 0, **more: Any) -> Line:
        return Line(what, name, attempt, more.get("token", 1), more.get("pid", 10), self.at + seconds, said)

    def change_record(self, name: str, **fields: Any) -> None:
        self.history.records[name] = msgspec.structs.replace(self.history.records[name], **fields)

    def change_event(self, name: str, seq: int, **data: Any) -> None:
        old = self.history.events[name][seq - 1]
        self.history.events[name][seq - 1] = msgspec.structs.replace(old, data={**old.data, **data})

    def change_attempt(self, name: str, **fields: Any) -> None:
        self.history.attempts[name][-1] = msgspec.structs.replace(self.history.attempts[name][-1], **fields)

    def add_event(self, name: str, type: str, **data: Any) -> None:
        """One more event at the end, which followers of the whole stream also got."""
        seq = self.history.records[name].seq + 1
        self.history.events[name].append(Event(seq=seq, at=self.at - 0.5, type=type, data=data))
        self.change_record(name, seq=seq)
        last = next(follow for follow in self.history.follows if follow.job == name and follow.ended)
        last.events = [*last.events, (seq, type)]

    def ask(self, verb: str, name: str, **answer: Any) -> None:
        """A call about a job, now."""
        n = len(self.history.calls)
        self.history.calls.append(Call(n=n, verb=verb, sent=self.at, answered=self.at + 0.1, ids=(name,), **answer))

    def repeat_call(self, n: int, ids: tuple[str, ...]) -> None:
        first = self.history.calls[n]
        again = {"n": len(self.history.calls), "repeats": n, "ids": ids, "sent": self.at, "answered": self.at + 0.1}
        self.history.calls.append(msgspec.structs.replace(first, **again))


def good() -> HandMadeHistory:
    example = HandMadeHistory()
    example.job("plain")
    example.job("lane 1", lane="lane")
    example.job("lane 2", lane="lane")
    example.job("dependant", needs=("plain",))
    example.job("builder", reuse_key="key")
    example.job("function", runner="function")
    example.repeat_call(0, ("plain",))
    example.process_exit("w1", -9)
    example.history.faults.append(Fault(kind="partition", at=example.at - 20, until=example.at - 10, target="w4.1"))
    example.process_exit("w4.2", NO_DATABASE)
    for part, status in (("w5", 0), ("w6", -15), ("w7", 1)):
        example.history.faults.append(Fault(kind="end worker", at=example.at - 1, until=1e9, target=part))
        example.process_exit(part, status)
    example.history.faults.append(Fault(kind="end worker", at=example.at, until=example.at, target="w7"))
    return example
