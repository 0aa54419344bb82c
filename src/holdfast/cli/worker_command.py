"""`holdfast worker`: builds a worker from its settings, queues and application, and handles signals."""

import asyncio
import gc
import importlib
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import replace

from holdfast import config
from holdfast.assemble import worker_of
from holdfast.client.app import Holdfast
from holdfast.config import Settings
from holdfast.errors import ConfigError
from holdfast.runner.function import FunctionRegistry

SLOTS = 1
MOST_SLOTS = 10_000
GARBAGE = 20_000
"""New objects between two garbage collections; Python's default of 700 is one for every ten jobs."""


def parse_queues(text: str) -> dict[str, int]:
    """Read `default:4,heavy:1`; a queue without a number gets one slot."""
    queues: dict[str, int] = {}
    problems = []
    for part in text.split(","):
        name, colon, slots = part.strip().rpartition(":") if ":" in part else (part.strip(), "", "")
        if not name or (colon and not slots.isdigit()) or (slots and not 1 <= int(slots) <= MOST_SLOTS):
            problems.append(f"--queue {part.strip()!r}: use name or name:slots, with 1 to {MOST_SLOTS} slots")
        elif name in queues:
            problems.append(f"--queue names {name} twice")
        else:
            queues[name] = int(slots or SLOTS)
    if problems:
        raise ConfigError(problems)
    return queues


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
    settings: Settings, queues: Mapping[str, int], functions: FunctionRegistry, *, once: bool, worker_id: str | None
) -> bool:
    """Run a worker until a signal arrives or, with `once`, until it is idle; return whether a function is stuck."""
    async with worker_of(settings, queues=queues, functions=functions, worker_id=worker_id) as worker:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, worker.signalled)
        _settle_memory()
        await worker.run(once=once)
        return worker.stuck


def _settle_memory() -> None:
    """Exclude long-lived objects from garbage collection, and make collections rare.

    Collections took a quarter of a worker's time on small functions (50 µs a job, 38 with this).
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(GARBAGE)
