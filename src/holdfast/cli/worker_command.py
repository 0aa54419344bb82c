"""`holdfast worker`: builds a worker from its settings, queues and application, and handles signals."""

import asyncio
import gc
import importlib
import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace

from holdfast import config
from holdfast.assemble import worker_of
from holdfast.client.app import Holdfast
from holdfast.config import Settings
from holdfast.errors import ConfigError
from holdfast.runner.function import FunctionRegistry
from holdfast.worker.worker import Worker

GARBAGE = 20_000
"""New objects between two garbage collections; Python's default of 700 is one for every ten jobs."""


def load_app(name: str) -> Holdfast:
    """Import `module:name`; the current folder comes first."""
    module, _, attribute = name.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), attribute or "app")
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError([f"--app {name}: {error}"]) from error
    if not isinstance(found, Holdfast):
        raise ConfigError([f"--app {name} is a {type(found).__name__}, not a Holdfast"])
    return found


def configure(application: str | None, **flags: object) -> tuple[Settings, FunctionRegistry]:
    """Return the settings and the application's functions. The application's database URL comes last."""
    settings = config.load(flags)
    if application is None:
        return settings, FunctionRegistry()
    app = load_app(application)
    if settings.database_url is None and app.settings.database_url is not None:
        settings = replace(settings, database_url=app.settings.database_url)
    return settings, app.functions


async def run_worker(
    settings: Settings,
    queues: Mapping[str, int],
    functions: FunctionRegistry,
    *,
    once: bool,
    worker_id: str | None,
    tell_ready: Callable[[], None] | None = None,
) -> bool:
    """Run a worker until a signal arrives or, with `once`, until it is idle; return whether a function is stuck.

    `tell_ready` is for one of several processes: its parent handles the second signal.
    """
    async with worker_of(settings, queues=queues, functions=functions, worker_id=worker_id) as worker:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, worker.signalled if tell_ready is None else worker.drain)
        _settle_memory()
        # Reason for a bare task: a group would wrap the errors of the worker.
        telling = asyncio.create_task(_when_started(worker, tell_ready or _nobody))
        try:
            await worker.run(once=once)
        finally:
            telling.cancel()
        return worker.stuck


async def _when_started(worker: Worker, tell: Callable[[], None]) -> None:
    await worker.started.wait()
    tell()


def _nobody() -> None:
    """Tell nobody that the worker has started."""


def _settle_memory() -> None:
    """Exclude long-lived objects from garbage collection, and make collections rare.

    Collections took a quarter of a worker's time on small functions (50 µs a job, 38 with this).
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(GARBAGE)
