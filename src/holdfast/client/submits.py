"""`submit` and `submit_many`, for every way in: from builders, functions or plain fields to handles."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, overload

from holdfast.client.builders import Builder, Call
from holdfast.client.calls import JobCalls
from holdfast.client.functions import Function
from holdfast.client.job import Job
from holdfast.client.options import Files, needs_of
from holdfast.errors import Invalid
from holdfast.function_defaults import FunctionDefaults
from holdfast.model import Job as JobRecord
from holdfast.model import new_id
from holdfast.runner.function import RegisteredFunction

R = TypeVar("R")
Submittable = Builder | Function[..., Any, Any] | Mapping[str, Any]
"""What `submit_many` takes: builders, functions without inputs, and plain fields."""


@dataclass
class _Prepared:
    """One job on its way: its fields, and what has to be done before they are complete."""

    fields: dict[str, Any]
    builder: Builder | None = None
    needs: Sequence[Any] = ()
    files: Files = ()
    key: str | None = None
    function: RegisteredFunction | None = None


class Submits(ABC):
    """The calls that make jobs, and `job` for the handle of one that exists."""

    @overload
    async def submit(self, job: Function[..., Any, R], /, **inputs: Any) -> Job[R]: ...
    @overload
    async def submit(self, job: Call[R], /) -> Job[R]: ...
    @overload
    async def submit(self, job: Builder | Mapping[str, Any], /, *, key: str | None = None) -> Job[Any]: ...
    @overload
    async def submit(self, job: str, /, **inputs: Any) -> Job[Any]: ...

    async def submit(self, job: Any, /, **inputs: Any) -> Job[Any]:
        """Submit one job; when this returns, it is in the database.

        `job` is a function with its inputs, a builder (`Process`, `Container`, `Pipeline`, `Call`), the name of a
        function, or the plain fields of a submission. Options are given to the builder, or by `with_options`.
        """
        one = self._prepared(job, inputs)
        await self._complete([one])
        record = await self._submit_one(one.fields, one.key, _known([one]))
        return self._handle(record.id, record, one.builder)

    async def submit_many(self, jobs: Sequence[Submittable], /, *, key: str | None = None) -> list[Job[Any]]:
        """Submit many jobs, all or none, in one transaction; return their handles in order.

        A builder may need another one of the same call. `key` is the idempotency key of the whole call.
        """
        if isinstance(jobs, Mapping | str | Builder | Function):
            raise Invalid("jobs", "is not a list; put a single job into one")
        prepared = [self._prepared(job, {}) for job in jobs]
        for n, one in enumerate(prepared):
            if one.key is not None:
                raise Invalid(f"jobs[{n}].key", "is for a single submit; give submit_many a key for the whole call")
        await self._complete(prepared)
        ids = await self._submit_all([one.fields for one in prepared], key, _known(prepared))
        return [self._handle(job_id, None, one.builder) for job_id, one in zip(ids, prepared, strict=True)]

    def job(self, job_id: str) -> Job[Any]:
        """Return the handle of a job that exists, without reading it."""
        return self._handle(job_id, None, None)

    def _handle(self, job_id: str, record: JobRecord | None, builder: Builder | None) -> Job[Any]:
        decode = None if builder is None else builder.decoded
        return Job(self._job_calls, job_id, record=record, decode=decode)

    def _prepared(self, job: Any, inputs: dict[str, Any]) -> _Prepared:
        if isinstance(job, str) or (callable(job) and not isinstance(job, Function)):
            job = self._function_named(job, inputs)
        elif isinstance(job, Function):
            job = job.call(**inputs)
        elif isinstance(job, Mapping):
            _refuse_inputs(inputs, but="key")
            return _Prepared(dict(job), key=inputs.get("key"))
        elif isinstance(job, Builder):
            _refuse_inputs(inputs, but="key")
            job = job.with_options(**inputs) if inputs else job
        else:
            raise Invalid("job", f"{type(job).__name__} is not a builder, a function, a name or a mapping of fields")
        return _Prepared(
            job.submission(),
            builder=job,
            needs=needs_of(job.options),
            files=job.files,
            key=job.options.get("key"),
            function=job.function if isinstance(job, Call) else None,
        )

    async def _complete(self, prepared: Sequence[_Prepared]) -> None:
        """Fill in ids of needs and uploads."""
        own = {id(one.builder): one for one in prepared if one.builder is not None}
        for n, one in enumerate(prepared):
            where = "needs" if len(prepared) == 1 else f"jobs[{n}].needs"
            if one.needs:
                one.fields["needs"] = [_need(need, own, where) for need in one.needs]
            if one.files:
                one.fields["uploads"] = [*one.fields.get("uploads", ()), await self._upload(one.files)]

    # What each way in does

    @property
    @abstractmethod
    def _job_calls(self) -> JobCalls: ...

    @abstractmethod
    def _function_named(self, function: Any, inputs: dict[str, Any]) -> Call[Any]: ...

    @abstractmethod
    async def _submit_one(
        self, fields: Mapping[str, Any], key: str | None, functions: Mapping[str, FunctionDefaults]
    ) -> JobRecord: ...

    @abstractmethod
    async def _submit_all(
        self, jobs: Sequence[Mapping[str, Any]], key: str | None, functions: Mapping[str, FunctionDefaults]
    ) -> Sequence[str]: ...

    @abstractmethod
    async def _upload(self, files: Files) -> str: ...


def _known(prepared: Sequence[_Prepared]) -> Mapping[str, FunctionDefaults]:
    """Return the defaults of the functions whose code this caller has."""
    return {one.function.name: one.function.registration for one in prepared if one.function is not None}


def _need(need: Any, own: Mapping[int, _Prepared], where: str) -> str:
    """Return the id of a need: of a job that exists, or of another builder of this call."""
    if isinstance(need, str):
        return need
    if isinstance(need, Builder):
        if id(need) not in own:
            raise Invalid(where, "names a builder that is not in this call: submit it first, or in this submit_many")
        return str(own[id(need)].fields.setdefault("id", new_id()))
    if isinstance(job_id := getattr(need, "id", None), str):
        return job_id
    raise Invalid(where, f"{type(need).__name__} is not an id, a job or a builder")


def _refuse_inputs(inputs: Mapping[str, Any], *, but: str) -> None:
    for name in inputs:
        if name != but:
            raise Invalid(name, "is not a function's input: give options to the builder, or by with_options")
