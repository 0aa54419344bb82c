"""`Holdfast`: the entry point for applications. It registers functions and submits jobs to the store."""

from collections.abc import Callable
from types import TracebackType
from typing import Any, ParamSpec, Self, TypeVar

from holdfast import config
from holdfast.errors import Invalid
from holdfast.model import Job
from holdfast.runner.function import FunctionRegistry
from holdfast.store import Store
from holdfast.store.files import FilesLeftToDuties
from holdfast.store.store import open_store

P = ParamSpec("P")
R = TypeVar("R")


class Holdfast:
    """An application. `url` is the URL of the database; without it, the settings apply.

    app = Holdfast("postgresql:///jobs")

    @app.function(queue="mail", timeout=30)
    async def send(to: str, ctx: Context) -> str: ...

    async with app:
        job = await app.submit(send, to="a@b.c")
    """

    def __init__(self, url: str | None = None, *, tenant: str = "default") -> None:
        self.settings = config.load({"database_url": url} if url else None)
        self.tenant = tenant
        self.functions = FunctionRegistry()
        self._store: Store | None = None

    def function(
        self, *, name: str | None = None, queue: str = "default", timeout: float | None = None, revision: int = 0
    ) -> Callable[[Callable[P, R]], Callable[P, R]]:
        """Register a function that workers of this application run.

        `queue` and `timeout` apply to its jobs, however they are submitted, once a worker has started. Raise `revision`
        when you change them, so that workers of an older release do not overwrite them.
        """
        return self.functions.add(name=name, queue=queue, timeout=timeout, revision=revision)

    async def submit(self, function: Callable[..., Any] | str, /, **inputs: Any) -> Job:
        """Submit a job that calls a function of this application with these inputs."""
        found = self.functions.get(function) if isinstance(function, str) else self.functions.of(function)
        if found is None:
            raise Invalid("function", f"{function!r} is not registered: decorate it with @app.function()")
        wrong = found.arguments(inputs)
        if wrong is not None:
            raise Invalid("inputs", f"do not fit function {found.name}: {wrong}")
        job: dict[str, Any] = {
            "runner": "function",
            "spec": {"name": found.name},
            "inputs": inputs,
        }
        return await self.store.jobs.submit(job, tenant=self.tenant, defaults=found.defaults)

    @property
    def store(self) -> Store:
        if self._store is None:
            raise Invalid("app", "is not open: use `async with app:`")
        return self._store

    async def __aenter__(self) -> Self:
        settings = self.settings
        self._store = await open_store(
            settings.url,
            schema=settings.schema,
            listen=settings.listen,
            listen_url=settings.listen_url,
            pooler=settings.pooler,
            defaults=settings.job_defaults,
        )
        self._store.delete_with(FilesLeftToDuties())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        store, self._store = self.store, None
        await store.close()
