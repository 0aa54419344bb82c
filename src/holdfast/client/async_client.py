"""`AsyncClient`: holdfast over HTTP, with the same builders, functions and handles as on the database."""

from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.client.builders import Call
from holdfast.client.calls import JobCalls
from holdfast.client.http import HttpClient
from holdfast.client.options import Files
from holdfast.client.submits import Submits
from holdfast.errors import Invalid
from holdfast.function_defaults import FunctionDefaults
from holdfast.model import Job as JobRecord


class AsyncClient(Submits, HttpClient):  # type: ignore[misc]  # Its submits return handles.
    """A client of a server. `url` defaults to `HOLDFAST_URL`; the token is found as on the command line.

        async with AsyncClient() as client:
            job = await client.submit(Process(["make"], files=["Makefile"]))
            print(await job.result())

    Beside `submit`, `submit_many` and `job` it has the calls of the HTTP API, by id.
    """

    @property
    def _job_calls(self) -> JobCalls:
        return self

    def _function_named(self, function: Any, inputs: dict[str, Any]) -> Call[Any]:
        if not isinstance(function, str):
            raise Invalid("function", f"{function!r} is not registered: decorate it with @app.function()")
        return Call(function, inputs)

    async def _submit_one(
        self, fields: Mapping[str, Any], key: str | None, functions: Mapping[str, FunctionDefaults]
    ) -> JobRecord:
        return await HttpClient.submit(self, fields, key=key)

    async def _submit_all(
        self, jobs: Sequence[Mapping[str, Any]], key: str | None, functions: Mapping[str, FunctionDefaults]
    ) -> Sequence[str]:
        return await HttpClient.submit_many(self, jobs, key=key)

    async def _upload(self, files: Files) -> str:
        return await self.upload(named=files) if isinstance(files, Mapping) else await self.upload(*files)
