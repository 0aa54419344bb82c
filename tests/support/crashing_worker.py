"""A real worker process that kills, stops or pauses itself at a step. See worker_processes.py.

Its settings come from the environment, its options from one argument of JSON.
"""

import asyncio
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path
from typing import Any, Literal

import msgspec
from torture.clocks import sleep_truly

from holdfast import config
from holdfast.assemble import worker_of
from holdfast.errors import StoreUnreachable
from holdfast.model import Lease, Outcome, Status
from holdfast.runner.function import Context, FunctionRegistry
from holdfast.runner.state_folder import StateFolder
from holdfast.store import orphans, sqlite
from holdfast.store.database import Tx
from holdfast.store.leases import Leases
from holdfast.store.postgres import PostgresTx
from holdfast.store.sqlite import SqliteTx
from holdfast.store.sqlite_connection import Connection
from holdfast.worker.worker import Worker

functions = FunctionRegistry()


class Hook(msgspec.Struct, frozen=True, kw_only=True):
    """What to do when an execution reaches a step: once per process, for one job or for any."""

    step: str
    do: Literal["kill", "stop", "wait"]
    job: str | None = None
    path: str | None = None
    """`wait`: hold there until this file is there; another one with `.here` at its end says that we wait."""


class WorkerOptions(msgspec.Struct, frozen=True, kw_only=True):
    queues: dict[str, int]
    hooks: tuple[Hook, ...] = ()
    boot: str | None = None
    lose_answers: bool = False
    """Whether the first answer to a finish gets lost, after it was committed."""
    adopt_backoff: float | None = None
    """Seconds that a worn orphan waits at first, instead of the usual ones."""
    adopts: bool = True
    """Whether it adopts orphans. A worker that is about to be struck does not: it would take them down with it."""


class Hooks:
    def __init__(self, hooks: tuple[Hook, ...]) -> None:
        self._hooks = list(hooks)
        self._between_writes = threading.Lock()

    def at(self, step: str, lease: Lease | None) -> None:
        for hook in self._hooks:
            if hook.step == step and hook.job in (None, lease.id if lease else None):
                self._hooks.remove(hook)
                return self._act(hook)
        return None

    def _act(self, hook: Hook) -> None:
        match hook.do:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                with self._between_writes:
                    os.kill(os.getpid(), signal.SIGSTOP)
            case "wait":
                assert hook.path is not None
                Path(f"{hook.path}.here").touch()
                while not Path(hook.path).exists():
                    time.sleep(0.005)  # Reason: polling for a file; the hook blocks the worker on purpose.

    def stop_between_writes(self) -> None:
        """Nobody can write to a SQLite database whose writer is stopped; that is not what these tests are about."""
        together = sqlite._write_together

        def alone(connection: Connection, requests: list[sqlite._Request]) -> None:
            with self._between_writes:
                together(connection, requests)

        sqlite._write_together = alone


def lose_an_answer() -> None:
    """Let the connection be lost once, right after the COMMIT of a finish."""
    finish = Leases.finish
    answers = 0

    async def lossy(leases: Leases, ends: Sequence[tuple[Lease, Outcome]]) -> Mapping[str, Status | None]:
        nonlocal answers
        answer = await finish(leases, ends)
        answers += 1
        if answers == 1:
            raise StoreUnreachable("cut right after COMMIT")
        return answer

    Leases.finish = lossy  # type: ignore[method-assign, assignment]


def claim_without_adopting() -> None:
    claim = Leases.claim

    async def only_claim(leases: Leases, *arguments: Any, domains: Sequence[str], **options: Any) -> Any:
        return await claim(leases, *arguments, domains=(), **options)

    Leases.claim = only_claim  # type: ignore[method-assign, assignment]


def step_after_engine_calls(hooks: Hooks) -> None:
    """Calls to the Docker engine are steps too; an execution does not tell them apart."""
    from holdfast.runner.docker.engine import Engine  # noqa: PLC0415 - a worker without an engine starts without it

    def tell(call: Callable[..., Awaitable[Any]], step: str) -> Callable[..., Awaitable[Any]]:
        async def noted(*arguments: Any) -> Any:
            answer = await call(*arguments)
            hooks.at(step, None)
            return answer

        return noted

    for name in ("create", "put", "start", "remove"):
        setattr(Engine, name, tell(getattr(Engine, name), f"engine {name}"))


def step_before_statements(hooks: Hooks, *names: str) -> None:
    """Make some statements in the middle of a transaction steps too."""

    def tell(rows: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def noted(tx: Tx, name: str, /, **parameters: Any) -> Any:
            if name in names:
                hooks.at(f"statement {name}", None)
            return await rows(tx, name, **parameters)

        return noted

    for kind in (SqliteTx, PostgresTx):
        kind.rows = tell(kind.rows)  # type: ignore[method-assign, assignment]


def note(path: str, text: str) -> None:
    """Add a line to a file, in one write."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(fd, f"{text}\n".encode())
    os.close(fd)


@functions.add
def nap(path: str, seconds: float, name: str = "nap") -> str:
    """Sleep, and ignore every stop request."""
    note(path, f"{name} start {os.getpid()}")
    time.sleep(seconds)  # Reason: this is the work of the job.
    note(path, f"{name} end {os.getpid()}")
    return name


@functions.add
def wait_for(path: str, gate: str) -> None:
    """Wait until a file is there, and ignore every stop request."""
    note(path, f"wait start {os.getpid()}")
    while not Path(gate).exists():
        time.sleep(0.02)  # Reason: polling for a file; this is the work of the job.
    note(path, f"wait end {os.getpid()}")


@functions.add
async def block(path: str, seconds: float) -> None:
    """Block the worker's whole loop."""
    note(path, f"block start {os.getpid()}")
    time.sleep(seconds)  # noqa: ASYNC251 Reason: this blocks the loop on purpose.
    note(path, f"block end {os.getpid()}")


@functions.add
async def talk(path: str, seconds: float, ctx: Context) -> int:
    """Log a line now and then; stop on request."""
    note(path, f"talk start {os.getpid()}")
    said = 0
    while said < seconds * 10 and not ctx.cancel.requested:
        ctx.log(f"line {said}")
        said += 1
        await asyncio.sleep(0.1)  # Reason: this is the pace of the job.
    note(path, f"talk end {os.getpid()}")
    return said


async def opened(held: AsyncExitStack, worker: Callable[[], AbstractAsyncContextManager[Worker]]) -> Worker:
    """Open a worker. Its time to connect is short, and so many begin at once that it may not be enough."""
    while True:
        try:
            return await held.enter_async_context(worker())
        except StoreUnreachable as error:
            logging.warning("again: %s", error)


async def main(part: WorkerOptions) -> bool:
    settings = config.load()
    if part.adopt_backoff is not None:
        orphans.BACKOFF_BASE = part.adopt_backoff
    if part.lose_answers:
        lose_an_answer()
    if not part.adopts:
        claim_without_adopting()
    hooks = Hooks(part.hooks)
    hooks.stop_between_writes()
    if settings.docker_host is not None:
        step_after_engine_calls(hooks)
    step_before_statements(hooks, "insert_tasks")
    state = StateFolder(settings.state, part.boot)
    async with AsyncExitStack() as held:
        worker = await opened(held, lambda: worker_of(
            settings, queues=part.queues, functions=functions, at=hooks.at, state=state
        ))  # fmt: skip
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, worker.signalled)
        await worker.run()
        return worker.stuck


if __name__ == "__main__":
    sleep_truly()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if asyncio.run(main(msgspec.json.decode(sys.argv[1], type=WorkerOptions))):
        os._exit(0)
