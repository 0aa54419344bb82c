"""One table of what a submit accepts and refuses, as plain data: run against Python on both stores and against SQL.

The database has before each case: job TAKEN (queued, with reuse key `standing`), job BROKEN (cancelled), a queue
`small` that takes one job, and the idempotency key `used`, which belongs to another call.
"""

from dataclasses import dataclass, field
from typing import Any

from holdfast.errors import Conflict, HoldfastError, Invalid, NeedFailed, NotFound, QueueFull, TooLarge

TAKEN = "01980000-0000-7000-8000-00000000000a"
BROKEN = "01980000-0000-7000-8000-00000000000b"
UNKNOWN = "01980000-0000-7000-8000-00000000000c"
OWN = "01980000-0000-7000-8000-00000000000d"
OTHER = "01980000-0000-7000-8000-00000000000e"
PROCESS: dict[str, Any] = {"runner": "process", "spec": {"command": ["true"]}}
FUNCTION: dict[str, Any] = {"runner": "function", "spec": {"name": "f"}}
PIPELINE: dict[str, Any] = {"runner": "process", "tasks": [{"name": "one", "command": ["true"]}]}

UNCHECKED = "the spec belongs to its runner, which checks it at the start"
INSTALLED = "which runners and connectors are installed is known to processes, not to the database"
TRUSTED = "a role with rights on the tables may submit for every tenant"


@dataclass(frozen=True)
class Case:
    """A call. It is accepted, and then its last job has these values; or it is refused with this error."""

    name: str
    jobs: list[dict[str, Any]]
    values: dict[str, Any] = field(default_factory=dict)
    error: type[HoldfastError] | None = None
    at: str | None = None
    """The field that the error names."""
    message: str = ""
    """The error's text without the field; after `…` only its end."""
    key: str | None = None
    sql_accepts: str | None = None
    """Why SQL accepts what Python refuses."""
    sql_state: str | None = None
    """The SQLSTATE of a refusal that Postgres makes before the function is called."""


def accepted(name: str, *jobs: dict[str, Any], key: str | None = None, **values: Any) -> Case:
    return Case(name, list(jobs), values, key=key)


def refused(at: str, given: Any, message: str, job: dict[str, Any] | None = None, **more: Any) -> Case:
    """A process job in which one field has this value, and which is refused because of it."""
    shown = str(given) if len(str(given)) < 40 else f"{str(given)[:30]}…"
    root = at.partition(".")[0].partition("[")[0]
    return Case(
        f"{at} {shown}", [{**(job or PROCESS), root: given}], error=more.pop("error", Invalid), at=at, message=message,
        **more,
    )  # fmt: skip


def wrong_call(name: str, error: type[HoldfastError], message: str, *jobs: dict[str, Any], **more: Any) -> Case:
    return Case(name, list(jobs), error=error, message=message, **more)


ACCEPTED = [
    accepted("runner and spec", PROCESS, runner="process", spec={"command": ["true"]}, status="queued", gate="open"),
    accepted("a function", FUNCTION, runner="function", spec={"name": "f"}, queue="default", max_attempts=1),
    accepted("id", {**PROCESS, "id": OWN}, id=OWN),
    accepted("id without dashes, in braces", {**PROCESS, "id": f"{{{OWN.replace('-', '').upper()}}}"}, id=OWN),
    accepted("tenant", {**PROCESS, "tenant": "default"}, tenant="default"),
    accepted("kind", {**PROCESS, "kind": "k" * 200}, kind="k" * 200),
    accepted("queue", {**PROCESS, "queue": "naïve ✓"}, queue="naïve ✓"),
    accepted("queue null", {**PROCESS, "queue": None}, queue="default"),
    accepted("lane", {**PROCESS, "lane": "L"}, lane="L"),
    accepted("priority", {**PROCESS, "priority": -1_000_000}, priority=-1_000_000),
    accepted("labels", {**PROCESS, "labels": {"a": "", "b": "x" * 256}}, labels={"a": "", "b": "x" * 256}),
    accepted("labels empty", {**PROCESS, "labels": {}}, labels={}),
    accepted("inputs", {**PROCESS, "inputs": {"n": [1, 2.5, None, "✓"]}}, inputs={"n": [1, 2.5, None, "✓"]}),
    accepted("needs", {**PROCESS, "needs": [TAKEN]}),
    accepted("needs a job of the call", {**PROCESS, "id": OWN}, {**PROCESS, "needs": [OWN, TAKEN]}),
    accepted("hold", {**PROCESS, "hold": True}, status="pending", gate="held"),
    accepted("available_at", {**PROCESS, "available_at": "2999-01-01T00:00:00+01:00"}, gate="future"),
    accepted("available_at in the past", {**PROCESS, "available_at": "1970-01-01 00:00:00.5z"}, gate="open"),
    accepted("max_attempts", {**PROCESS, "max_attempts": 1000}, max_attempts=1000),
    accepted("retry", {**PROCESS, "retry": {"base": 1, "cap": 2, "on": ["timed_out"]}}),
    accepted("retry in part", {**PROCESS, "retry": {"on": ["failed"]}}),
    accepted("on_lost", {**PROCESS, "on_lost": "pause"}),
    accepted("on_lost by its old name", {**PROCESS, "on_lost": "hold"}),
    accepted("timeout", {**PROCESS, "timeout": 5}),
    accepted("timeout null", {**PROCESS, "timeout": None, "stop_grace": None}),
    accepted("queue_timeout", {**PROCESS, "queue_timeout": 0.5}),
    accepted("idle_timeout", {**PROCESS, "idle_timeout": 316_224_000}),
    accepted("stop_grace", {**PROCESS, "stop_grace": 0}),
    accepted("stop_after", {**PROCESS, "stop_after": 8.25}),
    accepted("budget", {**PROCESS, "budget": {"tokens": 0, "euros": 1.5}}),
    accepted("secrets", {**PROCESS, "secrets": ["S", "A B"]}),
    accepted("uploads", {**PROCESS, "uploads": ["u"]}),
    accepted("check", {**PROCESS, "check": {"command": ["pg_isready"], "timeout": 86_400}}),
    accepted("reuse_key", {**PROCESS, "reuse_key": "R"}, reuse_key="R", reused=False),
    accepted("reuse_key of a live job", {**PROCESS, "reuse_key": "standing"}, id=TAKEN, reused=True),
    accepted("rebuild", {**PROCESS, "reuse_key": "R", "rebuild": True}, reused=False),
    accepted("the same reuse_key twice",
             {**PROCESS, "id": OWN, "reuse_key": "R"}, {**PROCESS, "reuse_key": "R"}, id=OWN),
    accepted("tasks, connector and snapshot", {**PIPELINE, "connector": "files", "snapshot": "none"},
             spec={"tasks": [{"name": "one", "command": ["true"]}], "connector": "files", "snapshot": "none"}),
    accepted("base", {**PIPELINE, "base": "0" * 64},
             spec={"tasks": [{"name": "one", "command": ["true"]}], "base": "0" * 64}),
    accepted("a queue with room", {**PROCESS, "queue": "small"}, queue="small"),
    accepted("an idempotency key", PROCESS, key="k" * 128, reused=False),
]  # fmt: skip

NAMES = ("tenant", "kind", "queue", "lane", "reuse_key")
OPTIONAL = ("tenant", "queue", "lane", "reuse_key")
SECONDS = ("timeout", "queue_timeout", "idle_timeout", "stop_after")

REFUSED = [
    refused("runner", 5, "Expected `str`, got `int`"),
    refused("runner", "ssh", "'ssh' is not a runner here; known are function, process, docker", sql_accepts=INSTALLED),
    refused("spec", 5, "Expected `object`, got `int`"),
    refused("spec", None, "Expected `object`, got `null`"),
    refused("spec.name", {}, "Object missing required field `name`", FUNCTION),
    refused("spec.name", {"name": 5}, "Expected `str`, got `int`", FUNCTION),
    refused("spec.color", {"name": "f", "color": 1}, "Object contains unknown field `color`", FUNCTION),
    refused("spec.command", {}, "Object missing required field `command`", sql_accepts=UNCHECKED),
    wrong_call("no spec", Invalid, "Object missing required field `spec`", {"runner": "process"}, at="spec"),
    wrong_call("no runner", Invalid, "Object missing required field `runner`", {"spec": {}}, at="runner"),
    refused("colour", 1, "Object contains unknown field `colour`"),
    refused("policy", {}, "Object contains unknown field `policy`"),
    refused("id", 5, "Expected `str | null`, got `int`"),
    refused("id", "x", "not a UUID: 'x'"),
    refused("tenant", "other", "'other' is not the caller's", sql_accepts=TRUSTED),
    *(refused(name, "", "Expected `str` of length >= 1") for name in NAMES),
    *(refused(name, "x" * 201, "Expected `str` of length <= 200") for name in NAMES),
    *(refused(name, 5, "Expected `str | null`, got `int`") for name in OPTIONAL),
    *(refused(name, "a\nb", "has control characters") for name in ("kind", "queue", "lane")),
    refused("lane", "a\u202eb", "has control characters"),
    refused("kind", None, "Expected `str`, got `null`"),
    refused("priority", "high", "Expected `int`, got `str`"),
    refused("priority", 1.0, "Expected `int`, got `float`"),
    refused("priority", True, "Expected `int`, got `bool`"),
    refused("priority", 1_000_001, "Expected `int` <= 1000000"),
    refused("priority", -1_000_001, "Expected `int` >= -1000000"),
    refused("labels", [], "Expected `object`, got `array`"),
    refused("labels", None, "Expected `object`, got `null`"),
    refused("labels[...]", {"a": 5}, "Expected `str`, got `int`"),
    refused("labels[...]", {"a": "x" * 257}, "Expected `str` of length <= 256"),
    refused("labels", {"": "x"}, "Expected `str` of length >= 1"),
    refused("labels", {str(n): "" for n in range(65)}, "Expected `object` of length <= 64"),
    refused("inputs", [], "Expected `object`, got `array`"),
    refused("inputs", {"text": "x" * 2**20}, "…bytes; at most 1048576 are accepted", error=TooLarge),
    refused("inputs", {"a": "\0"}, "has a NUL character, which databases cannot store in text", sql_state="22P05"),
    refused("needs", "x", "Expected `array`, got `str`"),
    refused("needs[0]", [5], "Expected `str`, got `int`"),
    refused("needs[1]", [TAKEN, "x"], "not a UUID: 'x'"),
    refused("needs", [TAKEN, TAKEN.upper()], "names a job twice"),
    refused("needs", [OWN], f"job {OWN} needs itself", {**PROCESS, "id": OWN}),
    refused("needs", [TAKEN] * 1001, "Expected `array` of length <= 1000"),
    *(refused(name, 1, "Expected `bool`, got `int`") for name in ("hold", "rebuild")),
    refused("available_at", 5, "Expected `datetime | null`, got `int`"),
    refused("available_at", "soon", "Invalid RFC3339 encoded datetime"),
    refused("available_at", "2026-01-01", "Invalid RFC3339 encoded datetime"),
    refused("available_at", "2026-02-30T00:00:00Z", "Invalid RFC3339 encoded datetime"),
    refused("available_at", "2026-01-01T24:00:00Z", "Invalid RFC3339 encoded datetime"),
    refused("available_at", "2026-01-01T00:00:00", "Expected `datetime` with a timezone component"),
    refused("available_at", "1969-12-31T00:00:00Z", "is not between the years 1970 and 9000"),
    refused("max_attempts", "x", "Expected `int | null`, got `str`"),
    refused("max_attempts", 0, "Expected `int` >= 1"),
    refused("max_attempts", 1001, "Expected `int` <= 1000"),
    refused("retry", 5, "Expected `object | null`, got `int`"),
    refused("retry.base", {"base": "x"}, "Expected `float`, got `str`"),
    refused("retry.on", {"on": "failed"}, "Expected `array`, got `str`"),
    refused("retry.on[0]", {"on": ["lost"]}, "Invalid enum value 'lost'"),
    refused("retry.x", {"x": 1}, "Object contains unknown field `x`"),
    refused("retry", {"base": 5, "cap": 1.5}, "base 5 must be between 0 and cap 1.5"),
    refused("retry", {"base": -5}, "base -5 must be between 0 and cap 300"),
    refused("retry", {"cap": 1e12}, "cap must be at most 316224000 seconds"),
    refused("on_lost", "panic", "Invalid enum value 'panic'"),
    refused("on_lost", None, "Expected `str`, got `null`"),
    *(refused(name, "soon", "Expected `float | null`, got `str`") for name in SECONDS),
    *(refused(name, 0, "Expected `float` > 0.0") for name in SECONDS),
    *(refused(name, 316_224_001, "Expected `float` <= 316224000.0") for name in SECONDS),
    refused("stop_grace", -1, "Expected `float` >= 0.0"),
    refused("stop_grace", 86_401, "Expected `float` <= 86400.0"),
    refused("budget", [], "Expected `object | null`, got `array`"),
    refused("budget[...]", {"tokens": "many"}, "Expected `float`, got `str`"),
    refused("budget[...]", {"tokens": -1}, "Expected `float` >= 0.0"),
    refused("budget", {"": 1}, "Expected `str` of length >= 1"),
    refused("secrets", "x", "Expected `array`, got `str`"),
    refused("secrets[0]", [5], "Expected `str`, got `int`"),
    refused("secrets", ["A=b"], "'A=b' is not a valid variable name: it has an = or a control character"),
    refused("uploads", ["u"] * 101, "Expected `array` of length <= 100"),
    refused("uploads", ["u"], "are for jobs with a work folder: a function has none", FUNCTION),
    refused("uploads", ["u"], "are not for pipelines: a result is known by what its tasks declare; put files below the"
            " sources, and name them", PIPELINE),
    refused("check", 5, "Expected `object | null`, got `int`"),
    refused("check.command", {"timeout": 1}, "Object missing required field `command`"),
    refused("check.command[0]", {"command": [1], "timeout": 1}, "Expected `str`, got `int`"),
    refused("check.command", {"command": [], "timeout": 1}, "is empty; give a program and its arguments"),
    refused("check.command", {"command": ["a"] * 4097, "timeout": 1},
            "has over 4096 arguments, or one with over 32768 characters"),
    *(refused("check.timeout", {"command": ["a"], "timeout": seconds},
              "must be a number of seconds above 0, at most a day") for seconds in (0, 86_401)),
    refused("tasks", 5, "Expected `array`, got `int`"),
    refused("tasks[0].name", [{"command": ["true"]}], "Object missing required field `name`"),
    refused("tasks", [{"name": "one", "command": ["true"]}], "a pipeline runs as process or docker, not as function",
            {"runner": "function", "spec": {}}),
    refused("connector", "ftp", "'ftp' is not a connector here; known are files, postgres", PIPELINE,
            sql_accepts=INSTALLED),
    refused("connector", "files", "is for pipelines: give tasks, too"),
    refused("snapshot", "some", "Invalid enum value 'some'"),
    refused("base", 5, "Expected `str | null`, got `int`"),
    refused("spec.tasks", {"tasks": []}, "is given twice: here, and as tasks of the job", PIPELINE),
    wrong_call("no job", Invalid, "0 jobs in one call; between 1 and 10000 are accepted", at="jobs"),
    wrong_call("an id twice", Invalid, f"job {OWN} is in this batch twice", *[{**PROCESS, "id": OWN}] * 2, at="id"),
    wrong_call("an empty key", Invalid, "has 0 characters; between 1 and 128 are accepted", PROCESS, key="",
               at="idempotency_key"),
    wrong_call("a long key", Invalid, "has 129 characters; between 1 and 128 are accepted", PROCESS, key="k" * 129,
               at="idempotency_key"),
    wrong_call("a key with a control character", Invalid, "has 3 characters; between 1 and 128 are accepted", PROCESS,
               key="a\nb", at="idempotency_key"),
    wrong_call("a used key", Conflict, "idempotency key used was used with another body", PROCESS, key="used"),
    wrong_call("a taken id", Conflict, f"id: job {TAKEN} exists already", PROCESS, {**PROCESS, "id": TAKEN}),
    wrong_call("needs an unknown job", NotFound, f"no job (named in needs) {UNKNOWN}", {**PROCESS, "needs": [UNKNOWN]}),
    wrong_call("needs a cancelled job", NeedFailed,
               f"needs: job {BROKEN} cancelled; resume or resolve it first, or leave it out",
               PROCESS, {**PROCESS, "needs": [BROKEN]}),
    wrong_call("a full queue", QueueFull, "queue small is full: at most 1 jobs may wait in it",
               *[{**PROCESS, "queue": "small"}] * 2),
]  # fmt: skip
