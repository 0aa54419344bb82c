"""The names and numbers that the supervisor and Python share: keys, verbs, causes, exit statuses, sizes.

`build.py` writes them into a header for the C files; a key or verb that the C files do not handle breaks the build.
Uses only the standard library, like `build.py`. The formats are described in docs/supervisor.md.
"""

from enum import IntEnum, StrEnum
from typing import Literal

VERSION = 1
"""The version of `spec`, commands, `started` and `exit`."""
SPEC_TITLE = "holdfast-spec"
COMMAND_TITLE = "holdfast-command"
LAUNCH_TITLE = "holdfast-launch"
MAX_TASKS = 1000
MAX_NAME = 64
"""Bytes in the name of a task or service."""
MAX_WORD = 256
"""Bytes in a short text, such as the mark or the reason of a failure. The supervisor refuses a longer one."""
MAX_LAUNCH = 128 * 1024
"""Bytes in a message to the launcher."""
MAX_REPORTED_LOG = 48 * 1024
"""A log up to this size is part of the launcher's report of an end."""
SPARES = 3
SPARE_BYTES = 512
"""Reserved files of an attempt folder: for an adoption, a stop and a more urgent stop. A command fits into a block."""

SpecKey = Literal[
    "token",
    "mark",
    "env",
    "cwd",
    "uid",
    "gid",
    "groups",
    "umask",
    "no_new_privs",
    "sole_user",
    "private",
    "limit",
    "output_cap",
    "timeout",
    "idle_timeout",
    "stop_grace",
    "drain",
    "clock",
    "hold",
    "stop_signal",
    "start_by",
    "stop_after",
]
ProgramKey = Literal["task", "service"]
"""Keys that begin the records of a task or of the service."""
TaskKey = Literal["arg", "env", "cwd", "timeout"]
CommandKey = Literal["token", "verb", "kind", "grace", "stop_after", "clock", "task", "name", "text"]
LaunchKey = Literal[
    "id", "start_by", "folder", "claim", "own", "uid", "gid", "spec", "request", "stdin", "limits", "secrets"
]
Verb = Literal["hold", "beat", "stop", "kill", "go", "end", "place", "service"]
StopKind = Literal["cancel", "interrupt", "fail"]
"""Kinds of the verbs `stop` and `kill`."""
ServiceKind = Literal["start", "stop"]
ClockName = Literal["boottime", "realtime"]
Limit = Literal["as", "core", "cpu", "data", "fsize", "nofile", "nproc", "stack"]


class ExitCause(StrEnum):
    """Why an attempt ended, as the supervisor records it."""

    EXIT = "exit"
    TIMED_OUT = "timed_out"
    IDLE_TIMEOUT = "idle_timeout"
    CANCELLED = "cancelled"
    INTERRUPTED = "interrupted"
    STOP_AFTER = "stop_after"
    START_FAILED = "start_failed"
    OUT_OF_MEMORY = "out_of_memory"
    SERVICE_ENDED = "service_ended"
    FAILED = "failed"


class LaunchReport(IntEnum):
    """What the launcher, or a supervisor that it forked, reports about a start.

    BEGUN: `started` is written. FAILED: the folder could not be made; the number is errno. ENDED: the supervisor has
    exited; the number is its exit status, or the negative signal that killed it.
    """

    BEGUN = 1
    FAILED = 2
    ENDED = 3


class ExitStatus(IntEnum):
    """The supervisor's own exit status, where it is not the child's code or 128 + signal.

    LEFT_*: it wrote no `exit`, and nothing ran. LEFT_FULL: the disk had no space for its files. ENDED_*: it wrote
    `exit`, after a time limit, or for a child that could not be started.
    """

    LEFT_USAGE = 64
    LEFT_FULL = 119
    LEFT_HELD = 120
    LEFT_STARTED = 121
    LEFT_BROKEN = 122
    LEFT_LATE = 123
    ENDED_LATE = 124
    ENDED_UNSTARTED = 125
