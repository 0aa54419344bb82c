"""Processes of a run: workers and servers that the harness starts, and children that it finds in /proc."""

import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
from tests.support.docker_engine import DockerEngine

ROOT = Path(__file__).parent.parent
LAST_OUTPUT = 4000


class Part:
    """One worker or server, restarted many times, each time with a new id."""

    def __init__(self, name: str, host: str, log: Path) -> None:
        self.name = name
        self.host = host
        self.log = log
        self.generation = 0
        self._said = 0
        self.process: subprocess.Popen[bytes] | None = None
        self.up_at = 0.0
        """Not to be started before this time."""
        self.struck = False
        """Whether a fault uses it; then nothing else may wake or start it."""

    @property
    def id(self) -> str:
        return f"{self.name}.{self.generation}"

    @property
    def pid(self) -> int:
        return self.process.pid if self.process is not None else 0

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        with self.log.open("ab") as log:
            self._said = log.tell()
            self.process = subprocess.Popen(command, env=environment, cwd=ROOT, stdout=log, stderr=log)

    @property
    def last_words(self) -> str:
        """Return the last log lines of its current process."""
        with self.log.open("rb") as log:
            log.seek(self._said)
            return log.read()[-LAST_OUTPUT:].decode(errors="replace")

    def signal(self, number: int) -> None:
        if self.process is not None and self.alive:
            self.process.send_signal(number)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(30)


class Child(msgspec.Struct, frozen=True):
    """A process of an attempt, or its supervisor."""

    pid: int
    job: str
    attempt: int
    supervisor: bool


def children(folder: Path) -> Iterator[Child]:
    """Every process of an attempt whose folder is under this one."""
    prefix = str(folder).encode()
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        if state(pid) in ("Z", None):
            continue
        arguments = _read(pid, "cmdline").split(b"\0")
        if arguments[0].endswith(b"holdfast-supervisor") and len(arguments) > 1 and arguments[1].startswith(prefix):
            job, _, attempt = Path(arguments[1].decode()).name.rpartition(".")
            yield Child(pid, job, int(attempt), True)
            continue
        found = re.search(rb"HOLDFAST_WORK_DIR=([^\0]*)/work(?:\0|$)", _read(pid, "environ"))
        if found and found.group(1).startswith(prefix):
            job, _, attempt = Path(found.group(1).decode()).name.rpartition(".")
            yield Child(pid, job, int(attempt), False)


def containers(engine: DockerEngine) -> list[tuple[str, Child]]:
    """The attempts that run in containers, each with its container's name."""
    shape = '{{.Names}} {{.Label "holdfast.job"}} {{.Label "holdfast.attempt"}}'
    lines = [line.split() for line in engine.docker("ps", "--format", shape).splitlines()]
    return [(name, Child(0, job, int(attempt), True)) for name, job, attempt in lines]


def family(pid: int) -> list[int]:
    """A process and its children, those that are not dead."""
    every = map(int, filter(str.isdigit, os.listdir("/proc")))
    return [pid, *(other for other in every if _parent(other) == pid and state(other) != "Z")]


class Memory(msgspec.Struct, frozen=True):
    """The memory of a process in bytes; of what it shares with others, its part."""

    all: int
    anonymous: int
    """Without files and shared memory."""


def proportional(pid: int) -> Memory:
    """What a process has of memory; one that is gone has none."""
    found = dict(re.findall(rb"^(Pss\w*): +(\d+) kB", _read(pid, "smaps_rollup"), re.MULTILINE))
    return Memory(all=int(found.get(b"Pss", 0)) * 1024, anonymous=int(found.get(b"Pss_Anon", 0)) * 1024)


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def state(pid: int) -> str | None:
    """The letter of a process's state, such as T for stopped; None if it is gone."""
    return next(iter(_stat(pid)), None)


def _parent(pid: int) -> int | None:
    found = _stat(pid)
    return int(found[1]) if found else None


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the process's name; none if it is gone."""
    return _read(pid, "stat").decode(errors="replace").rpartition(")")[2].split()


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""
