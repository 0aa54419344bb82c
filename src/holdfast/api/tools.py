"""Tools: jobs that an operator defined by name, so that callers need no command of their own.

A caller gives inputs; they are checked against the tool's JSON Schema and reach it as `request.json`, and through slots
like `{rows}` in its arguments. A slot's value never becomes an option (no leading `-`), never a part of a script.
"""

import hashlib
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path, PurePath
from typing import Annotated, Any

import jsonschema
import msgspec
import referencing
import referencing.exceptions
from msgspec import Meta

from holdfast import decoding
from holdfast.errors import ConfigError, Forbidden, HoldfastError, Invalid, NotFound
from holdfast.model import Check, OnLost, RetryPolicy, RunnerName
from holdfast.pipeline_spec import PIPELINE_FIELDS
from holdfast.privileges import ROOT, names_root
from holdfast.runner_specs import Name, Seconds
from holdfast.submission import check, parse

SLOT = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")
SHELLS = frozenset({"sh", "bash", "dash", "ash", "zsh", "ksh", "fish", "busybox"})
PLAIN = frozenset({"string", "integer", "number", "boolean"})
SPEC = (
    *("name", "command", "image", "env", "user", "network", "require_result"),
    *("memory", "cpus", "pids", "file_size", "folder_size"),
)
FIXED = (
    *("queue", "kind", "timeout", "idle_timeout", "queue_timeout", "stop_grace", "stop_after"),
    *("max_attempts", "retry", "on_lost", "budget", "secrets", "check"),
)
NOBODY = "default"
DIGEST = 16


class Tool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A tool as the file defines it. A caller cannot set what is set here."""

    runner: RunnerName
    more: dict[str, Any] = msgspec.field(default_factory=dict, name="spec")
    """Fields of the runner's spec that are not listed here, such as those of a runner that was installed."""
    description: str = ""
    command: list[str] | None = None
    image: Name | None = None
    name: Name | None = None
    env: dict[Name, str] = {}
    user: Name | None = None
    memory: str | None = None
    cpus: float | None = None
    pids: int | None = None
    file_size: str | None = None
    folder_size: str | None = None
    network: Name | None = None
    inputs: dict[str, Any] = msgspec.field(default_factory=lambda: {"type": "object", "additionalProperties": False})
    queue: Name | None = None
    kind: Name | None = None
    timeout: Seconds | None = None
    idle_timeout: Seconds | None = None
    queue_timeout: Seconds | None = None
    stop_grace: float | None = None
    stop_after: Seconds | None = None
    max_attempts: Annotated[int, Meta(ge=1, le=1000)] | None = None
    retry: RetryPolicy | None = None
    on_lost: OnLost | None = None
    budget: dict[Name, float] | None = None
    secrets: list[Name] | None = None
    check: Check | None = None
    require_result: bool = False
    uploads: bool = False

    @property
    def slots(self) -> Iterator[str]:
        for part in self.command or ():
            yield from SLOT.findall(part)

    def spec(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the runner's spec, with the slots of the command filled."""
        given: dict[str, Any] = msgspec.to_builtins(self)
        spec = self.more | {key: value for key, value in given.items() if key in SPEC}
        if self.command is not None:
            spec["command"] = [_filled(part, inputs) for part in self.command]
        return spec


class ToolRegistry:
    """The tools of one file."""

    def __init__(self, tools: Mapping[str, Tool]) -> None:
        self._tools = dict(sorted(tools.items()))
        self._validators = {name: _validator(tool.inputs) for name, tool in tools.items()}

    def items(self) -> Sequence[tuple[str, Tool]]:
        return list(self._tools.items())

    def digests(self) -> dict[str, str]:
        """Return a prefix of the SHA-256 of each tool's definition: enough to see that one changed, but not how."""
        encoded = {name: msgspec.json.encode(tool, order="deterministic") for name, tool in self._tools.items()}
        return {name: hashlib.sha256(text).hexdigest()[:DIGEST] for name, text in encoded.items()}

    def expand(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """Turn a job that names a tool into one that a store accepts; every error names the field."""
        name = job["tool"]
        if not isinstance(name, str):
            raise Invalid("tool", "must be the name of a tool")
        tool = self._tools.get(name)
        if tool is None:
            raise NotFound("tool", name[:60])
        fixed = {field: getattr(tool, field) for field in FIXED if getattr(tool, field) is not None}
        for field in job:
            if field in ("runner", "spec", *PIPELINE_FIELDS):
                raise Invalid(field, f"is set by tool {name}; remove it from the request, or do not use the tool")
            if field == "secrets":
                raise Forbidden("secrets are named by tools, or by an admin for a job without a tool")
            if field in fixed or field == "check":
                raise Invalid(field, f"is set by tool {name}; remove it from the request")
            if field == "uploads" and job[field] and not tool.uploads:
                raise Invalid(field, f"are not accepted by tool {name}")
        inputs = job.get("inputs", {})
        self._check(name, inputs)
        asked = {field: value for field, value in job.items() if field != "tool"}
        made = msgspec.to_builtins(fixed)
        return {"kind": name, **asked, **made, "runner": tool.runner, "spec": tool.spec(inputs)}

    def _check(self, name: str, inputs: Any) -> None:
        if not isinstance(inputs, dict):
            raise Invalid("inputs", "must be an object")
        try:
            error = jsonschema.exceptions.best_match(self._validators[name].iter_errors(inputs))
        except (referencing.exceptions.Unresolvable, RecursionError, re.error) as wrong:
            raise Invalid("inputs", f"cannot be checked: the schema of tool {name} is broken ({wrong})") from wrong
        if error is not None:
            path = ".".join(["inputs", *(str(part) for part in error.absolute_path)])
            raise Invalid(path[:200], error.message[:500])


def load_tools(path: Path | None, *, allow_root: bool = False) -> ToolRegistry:
    """Read the file of tools, or raise an error that lists every problem."""
    if path is None:
        return ToolRegistry({})
    try:
        tables = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError([f"cannot read the tools in {path}: {error.strerror}"]) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError([f"{path} is not TOML: {error}"]) from error
    problems = [
        f"{key} in {path} is not a tool: tools are tables like [tools.NAME]" for key in tables if key != "tools"
    ]
    found: dict[str, Tool] = {}
    tools = tables.get("tools", {})
    if not isinstance(tools, dict):
        problems.append(f"tools in {path} is not a table: write [tools.NAME]")
        tools = {}
    for name, table in tools.items():
        try:
            found[name] = tool = decoding.convert(table, Tool)
        except msgspec.ValidationError as error:
            problems.append(f"tool {name} in {path}: {error}")
            continue
        problems += [f"tool {name} in {path}: {problem}" for problem in _problems(name, tool, allow_root=allow_root)]
    if problems:
        raise ConfigError(problems)
    return ToolRegistry(found)


def _problems(name: str, tool: Tool, *, allow_root: bool) -> Iterator[str]:
    if not 1 <= len(name) <= 100 or not name.isprintable():
        yield "a name has 1 to 100 printable characters"
    try:
        jsonschema.Draft202012Validator.check_schema(tool.inputs)
    except jsonschema.SchemaError as error:
        yield f"inputs is not a JSON Schema: {error.message}"
        return
    yield from _slot_problems(tool)
    spec = tool.spec(dict.fromkeys(tool.slots, "x"))
    user = spec.get("user")
    if isinstance(user, str) and names_root(user) and not allow_root:
        yield f"user {user} {ROOT}"
    job = {"runner": tool.runner, "spec": spec}
    try:
        check(parse(job | {f: msgspec.to_builtins(v) for f in FIXED if (v := getattr(tool, f)) is not None}), NOBODY)
    except HoldfastError as error:
        yield error.message


def _slot_problems(tool: Tool) -> Iterator[str]:
    command = tool.command or []
    properties = tool.inputs.get("properties", {})
    required = tool.inputs.get("required", [])
    for slot in dict.fromkeys(tool.slots):
        kind = properties.get(slot, {}).get("type") if isinstance(properties.get(slot, {}), dict) else None
        if slot not in required or kind not in PLAIN:
            yield f"slot {{{slot}}} needs a required input of type string, integer, number or boolean"
    if command and SLOT.search(command[0]):
        yield "the program itself cannot be a slot"
    shell = any(PurePath(part).name in SHELLS for part in command)
    for before, part in pairwise(command):
        if shell and re.fullmatch(r"-\w*c", before) and SLOT.search(part):
            yield "a slot cannot be inside a shell script: pass it after the script, as $1"


def _filled(part: str, inputs: Mapping[str, Any]) -> str:
    """Fill the slots of one argument. The operator's text may be an option; a caller's value may not."""

    def value(match: re.Match[str]) -> str:
        name = match.group(1)
        found = inputs.get(name)
        if isinstance(found, bool):
            return "true" if found else "false"
        if not isinstance(found, str | int | float):
            raise Invalid(f"inputs.{name}", "must be text or a number: it becomes an argument")
        if "\0" in str(found):
            raise Invalid(f"inputs.{name}", "has a NUL character, which an argument cannot have")
        return str(found)

    filled = SLOT.sub(value, part)
    first = SLOT.match(part)
    if first and filled.startswith("-"):
        raise Invalid(f"inputs.{first.group(1)}", "must not begin with '-': it would be read as an option")
    return filled


def _validator(schema: Mapping[str, Any]) -> jsonschema.Draft202012Validator:
    """Return a validator that fetches nothing: a reference outside of the schema is refused."""
    return jsonschema.Draft202012Validator(schema, registry=referencing.Registry())
