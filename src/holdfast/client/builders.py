"""Builders: typed descriptions of jobs. Nothing is submitted before `submit` or `submit_many` gets them."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import Any, Generic, Literal, Self, TypeVar, Unpack, overload

from holdfast.client.options import Files, JobOptions, checked, option_fields
from holdfast.errors import Invalid
from holdfast.model import FUNCTION
from holdfast.runner.function import RegisteredFunction
from holdfast.runner.function_types import from_json, to_json

R = TypeVar("R")
SnapshotMode = Literal["always", "final", "none"]


def _given(**fields: Any) -> dict[str, Any]:
    """Return the fields that are set: not None, False or an empty list or mapping."""
    unset = (None, False)
    return {
        name: value
        for name, value in fields.items()
        if not any(value is one for one in unset) and value not in ([], {})
    }


class Builder:
    """What all builders share. A builder is never changed: `with_options` returns another one."""

    def __init__(
        self,
        runner: str,
        spec: Mapping[str, Any],
        options: JobOptions,
        *,
        inputs: Mapping[str, Any] | None = None,
        files: Files = (),
        uploads: Sequence[str] = (),
        more: Mapping[str, Any] | None = None,
    ) -> None:
        self.runner = runner
        self.spec = spec
        self.options = checked(options)
        self.inputs = inputs or {}
        self.files = files
        self.uploads = uploads
        self._more = more or {}

    def with_options(self, **options: Unpack[JobOptions]) -> Self:
        """Return the same job with these options; they replace those of the same name."""
        other = copy.copy(self)
        merged: JobOptions = {**self.options, **options}
        other.options = checked(merged)
        return other

    def submission(self) -> dict[str, Any]:
        """Return the fields of the submission, but for needs, files and the idempotency key."""
        try:
            given = to_json(self.inputs)
        except (TypeError, ValueError, RecursionError) as error:
            raise Invalid("inputs", f"cannot be written as JSON ({error})") from None
        fields = _given(inputs=given, uploads=list(self.uploads))
        spec = to_json(self.spec)
        return {"runner": self.runner, "spec": spec, **self._more, **fields, **option_fields(self.options)}

    def decoded(self, result: Any) -> Any:
        """Return a job's result as its type says."""
        return result


class Process(Builder):
    """A command on a worker's host.

    `inputs` are in `request.json` of its work folder, `files` in `input/`. `memory`, `pids`, `file_size` and
    `folder_size` are limits; `require_result` fails a command that leaves no `result.json`.

        Process(["wc", "-l", "input/data.csv"], files={"data.csv": b"a\\nb\\n"}, timeout=60)
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        stdin: str | None = None,
        user: str | None = None,
        memory: str | int | None = None,
        pids: int | None = None,
        file_size: str | int | None = None,
        folder_size: str | int | None = None,
        require_result: bool = False,
        inputs: Mapping[str, Any] | None = None,
        files: Files = (),
        uploads: Sequence[str] = (),
        **options: Unpack[JobOptions],
    ) -> None:
        limits = _given(memory=memory, pids=pids, file_size=file_size, folder_size=folder_size)
        spec = _given(env=env, stdin=stdin, user=user, require_result=require_result, **limits)
        spec["command"] = _command(command)
        super().__init__("process", spec, options, inputs=inputs, files=files, uploads=uploads)


class Container(Builder):
    """A container of an image; without `command`, the image's own.

    `network` and `user` need an admin's token over HTTP. Inputs and files as for `Process`.

        Container("report:1", ["python", "report.py"], memory="1g", cpus=2, needs=[build])
    """

    def __init__(
        self,
        image: str,
        command: Sequence[str] | None = None,
        *,
        env: Mapping[str, str] | None = None,
        memory: str | int | None = None,
        cpus: float | None = None,
        pids: int | None = None,
        file_size: str | int | None = None,
        folder_size: str | int | None = None,
        network: str | None = None,
        user: str | None = None,
        require_result: bool = False,
        inputs: Mapping[str, Any] | None = None,
        files: Files = (),
        uploads: Sequence[str] = (),
        **options: Unpack[JobOptions],
    ) -> None:
        limits = _given(memory=memory, cpus=cpus, pids=pids, file_size=file_size, folder_size=folder_size)
        spec = _given(env=env, network=network, user=user, require_result=require_result, **limits)
        if command is not None:
            spec["command"] = _command(command)
        spec["image"] = image
        super().__init__("docker", spec, options, inputs=inputs, files=files, uploads=uploads)


@dataclass(frozen=True)
class Task:
    """One task of a pipeline: a command, or a SQL file for a connector with a server.

    `files` are the paths, below the tenant's sources, that its result depends on.

        Task("schema", sql="schema.sql")
        Task("seed", ["python", "seed.py"], files=["seed.py"], env={"ROWS": "100"})
    """

    name: str
    command: Sequence[str] | None = None
    sql: str | None = None
    files: Sequence[str | PathLike[str]] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    timeout: float | None = None

    def fields(self) -> dict[str, Any]:
        """Return it as a submission has it."""
        files = [str(path) for path in self.files]
        command = None if self.command is None else _command(self.command)
        given = _given(command=command, sql=self.sql, files=files, env=dict(self.env), timeout=self.timeout)
        return {"name": self.name, **given}


class Pipeline(Builder):
    """Tasks that run one after the other in one workspace; a task whose result is known does not run again.

    With `image` the tasks run in containers of it, else on a worker's host.

        Pipeline([Task("schema", sql="schema.sql"), Task("seed", ["./seed"])], connector="postgres")
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        *,
        image: str | None = None,
        connector: str | None = None,
        snapshot: SnapshotMode | None = None,
        base: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        memory: str | int | None = None,
        cpus: float | None = None,
        pids: int | None = None,
        file_size: str | int | None = None,
        folder_size: str | int | None = None,
        network: str | None = None,
        inputs: Mapping[str, Any] | None = None,
        **options: Unpack[JobOptions],
    ) -> None:
        limits = _given(memory=memory, cpus=cpus, pids=pids, file_size=file_size, folder_size=folder_size)
        fields = _given(connector=connector, snapshot=snapshot, base=base)
        spec = _given(image=image, env=env, user=user, network=network, **limits)
        more = {"tasks": [task.fields() for task in tasks], **fields}
        super().__init__("process" if image is None else "docker", spec, options, inputs=inputs, more=more)


class Call(Builder, Generic[R]):
    """A call of a function by its name: for callers that do not have its code. `inputs` are its arguments.

    `returns` is the type of the result, for `Job.result`. With the code, use `function.call(…)`.

        Call("play", {"target": "crm", "steps": []}, returns=Report, priority=5)
    """

    @overload
    def __init__(
        self: "Call[Any]", name: str, inputs: Mapping[str, Any] | None = None, **options: Unpack[JobOptions]
    ) -> None: ...
    @overload
    def __init__(
        self,
        name: str,
        inputs: Mapping[str, Any] | None = None,
        *,
        returns: type[R],
        **options: Unpack[JobOptions],
    ) -> None: ...

    def __init__(
        self,
        name: str,
        inputs: Mapping[str, Any] | None = None,
        *,
        returns: Any = Any,
        **options: Unpack[JobOptions],
    ) -> None:
        super().__init__(FUNCTION, {"name": name}, options, inputs=inputs)
        self.returns = returns
        self.function: RegisteredFunction | None = None
        """The function, if the caller has its code."""

    def decoded(self, result: Any) -> Any:
        return result if self.returns is Any else from_json(result, self.returns)


def _command(command: Sequence[str]) -> list[str]:
    if isinstance(command, str | bytes):
        raise Invalid("command", 'is one text: give a list, such as ["sh", "-c", "echo hello"]')
    return [str(part) for part in command]
