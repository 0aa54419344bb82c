"""One attempt under a real supervisor, for tests: start it, wait for a condition, look at what it wrote.

HOLDFAST_TEST_SUPERVISOR names another build of it, such as one with sanitizers.
"""

import os
import shutil
import signal
import stat
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from holdfast.runner import supervisor
from holdfast.runner.attempt_folder import Ack, AttemptFolder, ExitRecord
from holdfast.runner.frames import Frame, Stream
from holdfast.runner.supervisor.protocol import ExitCause
from holdfast.runner.wire import Command, SupervisorSpec, WireTask

T = TypeVar("T")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can change users and mount")
PATIENCE = 60.0
SANITIZERS = {name: value for name, value in os.environ.items() if name.endswith("SAN_OPTIONS")}
ENV = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LC_ALL": "C.UTF-8"}

FOREVER = "while :; do sleep 1; done"
STUBBORN = f"trap '' TERM; echo ready; {FOREVER}"
NOBODY = 65534
AS_NOBODY = ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups")


def eventually(condition: Callable[[], T | None], what: str = "") -> T:
    """Return the first true answer of a condition that has to become true."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        if answer := condition():
            return answer
        time.sleep(0.005)  # Reason: the condition is the signal; this only spaces the questions.
    raise AssertionError(f"never came true: {what or condition}")


def boottime() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def shell(script: str) -> tuple[str, ...]:
    return ("sh", "-c", script)


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-I", "-S", "-c", code)


def running(pid: int) -> bool:
    """Say whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


class SupervisedAttempt:
    """The folder, the supervisors started on it, and shorthands for what tests ask."""

    def __init__(self, path: Path, program: Path | None = None) -> None:
        self.folder = AttemptFolder(path)
        self.folder.create()
        self.mark = f"test/{uuid.uuid4()}/1"
        self.program = program or Path(os.environ.get("HOLDFAST_TEST_SUPERVISOR", supervisor.path()))
        self.complaints = path.with_name(f"{path.name}.stderr")
        self.pids: list[int] = []
        self.statuses: dict[int, int] = {}

    @property
    def pid(self) -> int:
        return self.pids[-1]

    def write(self, *argv: str, tasks: tuple[WireTask, ...] = (), **spec: Any) -> None:
        tasks = tasks or (WireTask(name="main", argv=argv),)
        env = ENV | spec.pop("env", {})
        self.folder.write_spec(SupervisorSpec(token=spec.pop("token", 5), mark=self.mark, tasks=tasks, env=env, **spec))

    def start(self, *argv: str, **spec: Any) -> int:
        """Write the spec and start a supervisor."""
        self.write(*argv, **spec)
        return self.supervise()

    def supervise(
        self, *options: str, stdout: int | None = None, env: dict[str, str] | None = None, wrap: tuple[str, ...] = ()
    ) -> int:
        """Start a supervisor on what is in the folder; by a program that becomes it, if `wrap` names one."""
        quiet: list[Any] = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in (0, 1)]
        quiet.append((os.POSIX_SPAWN_OPEN, 2, self.complaints, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))
        if stdout is not None:
            quiet[1] = (os.POSIX_SPAWN_DUP2, stdout, 1)
        argv = [*wrap, str(self.program), str(self.folder.path), *options]
        self.pids.append(os.posix_spawnp(argv[0], argv, (env or {}) | SANITIZERS, file_actions=quiet))
        return self.pid

    def status(self, pid: int | None = None) -> int:
        """Wait for a supervisor to leave, and return its exit status (negative: its signal)."""
        pid = pid or self.pid
        eventually(lambda: self._reaped(pid), "the supervisor leaves")
        return self.statuses[pid]

    def _reaped(self, pid: int) -> bool:
        if pid not in self.statuses:
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                self.statuses[pid] = os.waitstatus_to_exitcode(status)
        return pid in self.statuses

    def run(self, *argv: str, **spec: Any) -> ExitRecord:
        """Start, and wait for the end."""
        self.start(*argv, **spec)
        return self.end()

    def end(self) -> ExitRecord:
        self.status()
        found = self.folder.exit()
        assert found is not None
        return found

    def frames(self, **offsets: int) -> list[Frame]:
        reader = self.folder.frames(**offsets)
        frames: list[Frame] = []
        while more := reader.read():
            frames += more
        return frames

    def output(self, stream: Stream = Stream.STDOUT) -> bytes:
        return b"".join(frame.data for frame in self.frames() if frame.stream is stream)

    def wait_for_output(self, text: bytes, stream: Stream = Stream.STDOUT) -> None:
        """Wait until the child has written this."""
        eventually(lambda: text in self.output(stream), f"the child writes {text!r}")

    def number(self, name: str) -> int:
        """Wait until the child has written "name=<number> " and return the number; for pids."""

        def found() -> int:
            tail = self.output().decode().partition(f"{name}=")[2]
            return int(tail.split()[0]) if tail[-1:].isspace() or " " in tail else 0

        return eventually(found, f"the child writes {name}")

    def events(self, name: str) -> list[dict[str, Any]]:
        frames = (frame.event for frame in self.frames() if frame.stream is Stream.EVENTS)
        return [event for event in frames if event["event"] == name]

    def command(self, verb: str, token: int = 5, **fields: Any) -> Ack:
        """Send a command and wait for its ack."""
        return self.ack_of(self.folder.send(Command(verb=verb, token=token, **fields)))  # type: ignore[arg-type]

    def ack_of(self, name: str) -> Ack:
        return eventually(lambda: next((ack for ack in self.folder.acks() if ack.command == name), None), "an ack")

    def clean(self) -> None:
        """End what this test started, and fail if a finished attempt left a process."""
        ended = self.folder.exit() is not None
        for pid in self.pids:
            if pid not in self.statuses and not self._reaped(pid):
                os.kill(pid, signal.SIGKILL)
                self.status(pid)
        left = self.folder.leftovers(self.mark)
        self.folder.kill_leftovers(self.mark)
        shutil.rmtree(self.folder.path, ignore_errors=True)
        assert not (ended and left), f"still running: {left}"


def ending(exit: ExitRecord) -> tuple[ExitCause, int | None, int | None]:
    return exit.cause, exit.code, exit.signal


def hand_over(attempt: SupervisedAttempt, tmp_path: Path) -> None:
    """Make the folder nobody's, with a program of its own in it, and the way to it open."""
    attempt.program = Path(shutil.copy(attempt.program, attempt.folder.path / "program"))
    for folder in [tmp_path, *tmp_path.parents]:
        if folder.stat().st_uid == os.geteuid() and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | stat.S_IXOTH)
    for path in [attempt.folder.path, *attempt.folder.path.rglob("*")]:
        os.chown(path, NOBODY, NOBODY)
