"""Tests of an application: a migrated SQLite store, a worker in the test's process, and a clock to move."""

import asyncio
import os
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack, ExitStack
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

from holdfast.client.app import Holdfast
from holdfast.client.sync_app import SyncHoldfast

LEASE_SECONDS = 366 * 86_400.0
"""A job that runs while the clock moves keeps its lease, unless the clock moves by more than a year."""
POLL_SECONDS = 0.05


class MovableClock:
    """This host's time, and what a test added to it."""

    def __init__(self) -> None:
        self._ahead = timedelta()

    def now(self) -> datetime:
        return datetime.now(UTC) + self._ahead

    def monotonic(self) -> float:
        return time.monotonic()

    def advance(self, seconds: float = 0.0, **units: float) -> None:
        """Move the time forward: `advance(30)`, `advance(hours=2)`. Delayed jobs that are now due run at once."""
        self._ahead += timedelta(seconds=seconds, **units)


class TestInstallation:
    """A store in a folder, and applications on it. `clock` is the store's: `clock.advance(hours=1)` moves it.

        def test_a_greeting(holdfast_test):
            with holdfast_test(app) as jobs:
                assert jobs.submit(greet, name="Ada").result(timeout=30) == "hello Ada"

    `async with holdfast_test(app):` opens the application itself, for `await app.submit(…)`.
    """

    __test__ = False

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.clock = MovableClock()

    def __call__(
        self, app: Holdfast, *, queues: Mapping[str, int] | None = None, worker: bool = True, **settings: Any
    ) -> "ApplicationInTest":
        """Run an application here: its store, and a worker for these queues, or for all that its functions name.

        `settings` replace those of the application. Without `worker`, jobs only wait.
        """
        return ApplicationInTest(self, app, queues=queues, worker=worker, settings=settings)


class ApplicationInTest:
    """An application on the test's store, while a block lasts; afterwards it has its own settings again."""

    __test__ = False

    def __init__(
        self,
        installation: TestInstallation,
        app: Holdfast,
        *,
        queues: Mapping[str, int] | None,
        worker: bool,
        settings: Mapping[str, Any],
    ) -> None:
        self._app = app
        self._clock = installation.clock
        self._queues = queues
        self._with_worker = worker
        self._before = (app.settings, app.clock)
        self._settings = replace(
            app.settings,
            **{
                "database_url": f"sqlite:///{(installation.folder / 'jobs.db').absolute()}",
                "data_dir": installation.folder,
                "state_dir": None,
                "shared_dir": None,
                "docker_host": None,
                "process_user": "root" if os.geteuid() == 0 else None,  # Only root may enter a test's folder.
                "lease_ttl": LEASE_SECONDS,
                "poll_interval": POLL_SECONDS,
                "drain_grace": 1.0,
                **settings,
            },
        )
        self._async_stack = AsyncExitStack()
        self._stack = ExitStack()

    async def __aenter__(self) -> Holdfast:
        async with AsyncExitStack() as stack:
            stack.callback(self._restore)
            self._use()
            await self._app.migrate()
            await stack.enter_async_context(self._app)
            if self._with_worker:
                await stack.enter_async_context(self._app.worker(queues=self._queues))
            self._async_stack = stack.pop_all()
        return self._app

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._async_stack.aclose()

    def __enter__(self) -> SyncHoldfast:
        with ExitStack() as stack:
            stack.callback(self._restore)
            self._use()
            asyncio.run(self._app.migrate())
            jobs = stack.enter_context(self._app.sync())
            if self._with_worker:
                stack.enter_context(self._app.worker(queues=self._queues))
            self._stack = stack.pop_all()
        return jobs

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _use(self) -> None:
        self._app.settings, self._app.clock = self._settings, self._clock
        self._settings.data_dir.mkdir(parents=True, exist_ok=True)

    def _restore(self) -> None:
        self._app.settings, self._app.clock = self._before
