"""`Holdfast`: the entry point for applications on the database. It registers functions and submits jobs."""

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, cast

from holdfast import config
from holdfast.client.builders import Call
from holdfast.client.calls import JobCalls
from holdfast.client.embedded_worker import EmbeddedWorker
from holdfast.client.functions import Decorator, Function, plain_inputs
from holdfast.client.options import Files, Retry
from holdfast.client.store_calls import StoreCalls
from holdfast.client.store_files import StoreFiles
from holdfast.client.submits import Submits
from holdfast.errors import Invalid
from holdfast.function_defaults import FunctionDefaults
from holdfast.model import Job as JobRecord
from holdfast.model import OnLost
from holdfast.runner.function import FunctionRegistry
from holdfast.store import Store
from holdfast.store.files import FilesLeftToDuties
from holdfast.store.migrate import migrate
from holdfast.store.store import connect, open_store
from holdfast.timing import Clock

if TYPE_CHECKING:
    from holdfast.client.sync_app import SyncHoldfast


class Holdfast(Submits):
    """An application. `url` is the URL of the database; without it, the settings apply.

        app = Holdfast("postgresql:///jobs")

        @app.function(queue="mail", lane="{to}", max_attempts=3, timeout=30)
        async def send(to: str, ctx: Context) -> str: ...

        async with app:
            job = await app.submit(send, to="a@b.c")
            print(await job.result(timeout=60))

    For synchronous code, `with app.sync() as jobs:` has the same calls.
    """

    def __init__(self, url: str | None = None, *, tenant: str = "default") -> None:
        self.settings = config.load({"database_url": url} if url else None)
        self.tenant = tenant
        self.functions = FunctionRegistry()
        self.clock: Clock | None = None
        """For tests: the clock of a SQLite database, instead of this host's."""
        self._store: Store | None = None
        self._calls: StoreCalls | None = None
        self._files: StoreFiles | None = None

    # Functions

    def function(
        self,
        *,
        name: str | None = None,
        queue: str | None = None,
        lane: str | None = None,
        priority: int | None = None,
        labels: Mapping[str, str] | None = None,
        max_attempts: int | None = None,
        retry: Retry | None = None,
        on_lost: OnLost | None = None,
        timeout: float | None = None,
        queue_timeout: float | None = None,
        idle_timeout: float | None = None,
        stop_grace: float | None = None,
        stop_after: float | None = None,
        budget: Mapping[str, float] | None = None,
        secrets: Sequence[str] | None = None,
        revision: int = 0,
        capture_logs: bool = True,
    ) -> Decorator:
        """Register a function that workers of this application run. It stays callable as it was.

        The options apply to its jobs, however they are submitted, once a worker has started; `app.submit` knows them
        before. Raise `revision` when you change them, so that workers of an older release do not overwrite them.

        `lane` may be a template over the inputs, such as `"{target}"` or `"{order.customer}"`. `retry` may name
        exceptions: others then fail the job at once. With `capture_logs=False`, what the function logs with `logging`
        does not go to the job's log.
        """
        defaults: dict[str, Any] = {
            "queue": queue,
            "lane": lane,
            "priority": priority,
            "labels": None if labels is None else dict(labels),
            "max_attempts": max_attempts,
            "retry": None if retry is None else retry.fields(),
            "on_lost": on_lost,
            "timeout": timeout,
            "queue_timeout": queue_timeout,
            "idle_timeout": idle_timeout,
            "stop_grace": stop_grace,
            "stop_after": stop_after,
            "budget": None if budget is None else dict(budget),
            "secrets": None if secrets is None else list(secrets),
        }

        def register(call: Callable[..., Any], /) -> Function[..., Any, Any]:
            self.functions.add(
                name=name,
                revision=revision,
                exceptions=() if retry is None else tuple(retry.exceptions),
                capture_logs=capture_logs,
                **defaults,
            )(call)
            registered = self.functions.of(call)
            assert registered is not None
            return Function(registered)

        return cast(Decorator, register)

    # Jobs

    async def jobs(self, **filters: Any) -> tuple[Sequence[JobRecord], str | None]:
        """Return one page of jobs, newest first, and the cursor of the next.

        Filters: `status` (a list), `kind`, `queue`, `lane`, `labels`, `since`, `until`, `limit`, `cursor`.
        """
        self._open()
        assert self._calls is not None
        return await self._calls.jobs(**filters)

    async def upload(self, files: Files) -> str:
        """Store files that a job can name in `uploads` within a day; return the upload's id."""
        self._open()
        assert self._files is not None
        return await self._files.upload(files)

    @property
    def _job_calls(self) -> JobCalls:
        self._open()
        assert self._calls is not None
        return self._calls

    def _function_named(self, function: Any, inputs: dict[str, Any]) -> Call[Any]:
        found = self.functions.get(function) if isinstance(function, str) else self.functions.of(function)
        if found is None:
            raise Invalid(
                "function",
                f"{function!r} is not registered here: decorate it with @app.function(), or submit Call(name, inputs)",
            )
        call: Call[Any] = Call(found.name, plain_inputs(found, inputs), returns=found.returns)
        call.function = found
        return call

    async def _submit_one(
        self, fields: Mapping[str, Any], key: str | None, functions: Mapping[str, FunctionDefaults]
    ) -> JobRecord:
        job = await self._given(fields)
        sent = None if job is fields else [fields]
        return await self.store.jobs.submit(job, tenant=self.tenant, key=key, sent=sent, functions=functions)

    async def _submit_all(
        self, jobs: Sequence[Mapping[str, Any]], key: str | None, functions: Mapping[str, FunctionDefaults]
    ) -> Sequence[str]:
        given = [await self._given(fields) for fields in jobs]
        accepted = await self.store.jobs.accept(given, tenant=self.tenant, key=key, sent=jobs, functions=functions)
        return [one.id for one in accepted]

    async def _given(self, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        self._open()
        assert self._files is not None
        if "tool" in fields:
            raise Invalid("tool", "is known to a server: submit it with Client or AsyncClient")
        return await self._files.given(fields)

    async def _upload(self, files: Files) -> str:
        return await self.upload(files)

    # A worker in this program

    def worker(self, *, queues: Mapping[str, int] | None = None, data_dir: Path | None = None) -> EmbeddedWorker:
        """Run a worker for these queues, each with a number of slots, while the block lasts.

        `async with` runs it on this event loop, `with` in a thread of its own. Without `queues`: all queues that the
        application's functions name, and `default`, with 4 slots each. `data_dir` is the data folder.

            async with app, app.worker(queues={"desktop": 4}):
                print(await (await app.submit(play, target="crm")).result())
        """
        return EmbeddedWorker(self, queues=queues, data_dir=data_dir)

    # Opening

    def sync(self) -> "SyncHoldfast":
        """Return the same calls for synchronous code: `with app.sync() as jobs: jobs.submit(…)`."""
        from holdfast.client.sync_app import SyncHoldfast  # noqa: PLC0415

        return SyncHoldfast(self)

    def closed_copy(self) -> "Holdfast":
        """Return the same application, not open: for another event loop."""
        other = copy.copy(self)
        other._store = other._calls = other._files = None
        return other

    async def migrate(self) -> None:
        """Create or upgrade the tables, as `holdfast migrate` does."""
        settings = self.settings
        database = await connect(settings.url, schema=settings.schema, connections=1, listen=False)
        try:
            await migrate(database)
        finally:
            await database.close()

    @property
    def store(self) -> Store:
        """The store of the open application, for what has no call of its own."""
        return self._open()

    def _open(self) -> Store:
        if self._store is None:
            raise Invalid("app", "is not open: use `async with app:`, or `with app.sync() as jobs:`")
        return self._store

    async def open_store(self) -> Store:
        """Open a store for this application; the caller closes it."""
        settings = self.settings
        return await open_store(
            settings.url,
            schema=settings.schema,
            listen=settings.listen,
            listen_url=settings.listen_url,
            pooler=settings.pooler,
            defaults=settings.job_defaults,
            clock=self.clock,
        )

    async def close(self) -> None:
        """Close the connections. Idempotent."""
        store, calls = self._store, self._calls
        self._store = self._calls = self._files = None
        if calls is not None:
            await calls.close()
        if store is not None:
            await store.close()

    async def __aenter__(self) -> Self:
        if self._store is not None:
            raise Invalid("app", "is open already: enter it once, and pass it on")
        store = await self.open_store()
        store.delete_with(FilesLeftToDuties())
        self._store = store
        self._files = StoreFiles(store, self.settings, self.tenant)
        self._calls = StoreCalls(store, self.tenant, self._files.artifacts)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
