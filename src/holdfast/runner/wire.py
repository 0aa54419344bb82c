"""Encodes the files that the supervisor reads: what to run (`spec`), and commands.

Both are records of "key length\\nbytes\\n" after a title line with the version, ended by "end 0". Durations are seconds
here, and whole microseconds in the files.
"""

import signal
from collections.abc import Iterator, Mapping

import msgspec

from holdfast.errors import Invalid
from holdfast.runner.supervisor.protocol import (
    COMMAND_TITLE,
    MAX_NAME,
    MAX_TASKS,
    MAX_WORD,
    SPEC_TITLE,
    VERSION,
    ClockName,
    CommandKey,
    Limit,
    ProgramKey,
    ServiceKind,
    SpecKey,
    StopKind,
    TaskKey,
    Verb,
)

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""The PATH of jobs."""

SpecRecord = tuple[SpecKey | ProgramKey | TaskKey, str | int]
CommandRecord = tuple[CommandKey, str | int]


class WireTask(msgspec.Struct, frozen=True, kw_only=True):
    """One task. Its environment and folder override those of the spec."""

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = {}
    cwd: str | None = None
    timeout: float | None = None


class WireService(msgspec.Struct, frozen=True, kw_only=True):
    """A program that runs along with the tasks, started and stopped by command. `stop_signal` asks it to end."""

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = {}
    cwd: str | None = None
    stop_signal: int = signal.SIGTERM


class SupervisorSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt: its tasks, which run one after the other, and the settings that apply to all of them.

    `start_by` and `stop_after` are times of `clock` in seconds: CLOCK_BOOTTIME on this host, the wall clock of the
    engine's host for a container. The environment is exactly `env`, the task's own entries and the mark. With `hold`
    the supervisor waits for a command before each task and before the end. `sole_user`: no other process has this uid,
    so all processes of the uid are killed before the end. `private`: own /tmp, shared memory, queues and /proc.
    """

    token: int
    mark: str
    tasks: tuple[WireTask, ...]
    env: Mapping[str, str] = {}
    cwd: str | None = None
    uid: int | None = None
    gid: int | None = None
    groups: tuple[int, ...] = ()
    umask: int = 0o077
    no_new_privs: bool = True
    sole_user: bool = False
    private: bool = False
    limits: Mapping[Limit, int] = {}
    output_cap: int | None = None
    timeout: float | None = None
    idle_timeout: float | None = None
    stop_grace: float = 5.0
    drain: float = 1.0
    clock: ClockName = "boottime"
    start_by: float | None = None
    stop_after: float | None = None
    hold: bool = False
    service: WireService | None = None


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """A command to a running supervisor, which refuses tokens lower than the highest it has seen."""

    token: int
    verb: Verb
    kind: StopKind | ServiceKind | None = None
    grace: float | None = None
    stop_after: float | None = None
    clock: ClockName = "boottime"
    task: int | None = None
    name: str | None = None
    text: str | None = None


def encode_spec(spec: SupervisorSpec) -> bytes:
    """Encode a spec. Raise Invalid for values that the supervisor would refuse."""
    if spec.uid is not None and spec.gid is None:
        raise Invalid("gid", "a uid needs a gid; otherwise the child would keep the worker's group")
    if not 0 < len(spec.tasks) <= MAX_TASKS:
        raise Invalid("tasks", f"between 1 and {MAX_TASKS}")
    return _encode(SPEC_TITLE, _spec_records(spec))


def encode_command(command: Command) -> bytes:
    return _encode(COMMAND_TITLE, _command_records(command))


def truncated(text: str) -> str:
    """Cut a text to the maximum length that a supervisor accepts, between two characters."""
    return text.encode(errors="replace")[:MAX_WORD].decode(errors="ignore")


def micros(seconds: float) -> int:
    return max(0, round(seconds * 1_000_000))


def _encode(title: str, records: Iterator[SpecRecord] | Iterator[CommandRecord]) -> bytes:
    parts = [f"{title} {VERSION}\n".encode()]
    for key, value in records:
        # Paths and arguments may contain bytes that are not UTF-8; Python represents them as surrogates.
        data = str(value).encode("utf-8", "surrogateescape")
        if b"\0" in data:
            raise Invalid(key, "must not contain a zero byte")
        parts.append(b"%s %d\n%s\n" % (key.encode(), len(data), data))
    parts.append(b"end 0\n\n")
    return b"".join(parts)


def _spec_records(spec: SupervisorSpec) -> Iterator[SpecRecord]:
    key: SpecKey
    yield "token", spec.token
    yield "mark", spec.mark
    yield "umask", f"{spec.umask:o}"
    yield "no_new_privs", int(spec.no_new_privs)
    if spec.sole_user:
        yield "sole_user", 1
    if spec.private:
        yield "private", 1
    yield "stop_grace", micros(spec.stop_grace)
    yield "drain", micros(spec.drain)
    yield "clock", spec.clock
    for key in ("uid", "gid", "cwd", "output_cap"):
        if (value := getattr(spec, key)) is not None:
            yield key, value
    for key in ("timeout", "idle_timeout", "start_by", "stop_after"):
        if (value := getattr(spec, key)) is not None:
            yield key, micros(value)
    if spec.groups:
        yield "groups", " ".join(map(str, spec.groups))
    yield from (("limit", f"{name} {value}") for name, value in spec.limits.items())
    yield from _environment(spec.env)
    if spec.hold:
        yield "hold", 1
    if spec.service is not None:
        yield "stop_signal", int(spec.service.stop_signal)
        yield from _program_records("service", spec.service)
    for task in spec.tasks:
        yield from _task_records(task)


def _program_records(key: ProgramKey, program: WireTask | WireService) -> Iterator[SpecRecord]:
    if not program.argv:
        raise Invalid("argv", f"{key} {program.name} has no command")
    if not 0 < len(program.name.encode()) <= MAX_NAME:
        raise Invalid("name", f"a {key}'s name has 1 to {MAX_NAME} bytes")
    yield key, program.name
    yield from (("arg", argument) for argument in program.argv)
    yield from _environment(program.env)
    if program.cwd is not None:
        yield "cwd", program.cwd


def _task_records(task: WireTask) -> Iterator[SpecRecord]:
    yield from _program_records("task", task)
    if task.timeout is not None:
        yield "timeout", micros(task.timeout)


def _environment(env: Mapping[str, str]) -> Iterator[SpecRecord]:
    for name, value in env.items():
        if not name or "=" in name:
            raise Invalid("env", f"{name!r} cannot name an environment entry")
        yield "env", f"{name}={value}"


def _command_records(command: Command) -> Iterator[CommandRecord]:
    key: CommandKey
    yield "token", command.token
    yield "verb", command.verb
    if command.kind is not None:
        yield "kind", command.kind
    if command.grace is not None:
        yield "grace", micros(command.grace)
    for key in ("task", "name", "text"):
        if (value := getattr(command, key)) is not None:
            yield key, value
    if command.stop_after is not None:
        yield "clock", command.clock
        yield "stop_after", micros(command.stop_after)
