"""`holdfast worker --processes N`: a parent that runs no jobs, and N worker processes that share its slots.

Each process is a whole worker with its share of the slots. The parent starts another one when a process dies,
passes the first signal on as a drain, and kills what is left at the second. However the parent ends, the kernel kills
its processes: what they ran is recovered by the next worker, and no share of the slots is used twice.
"""

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from holdfast import config
from holdfast.cli.queue_option import parse_queues, queue_text
from holdfast.cli.session import REFUSED, UNREACHABLE, USAGE
from holdfast.errors import ConfigError
from holdfast.model import new_worker_id
from holdfast.timing import backoff

log = logging.getLogger(__name__)

LASTED = 30.0
"""A process that lived this many seconds did not fail at its start: another one is started without delay."""
LAST_SECONDS = 15.0
"""Seconds beyond the drain grace after which a process that has not exited is killed: it may be stopped."""
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 10.0
CANNOT_RUN = 127


@dataclass(frozen=True)
class WorkerOptions:
    """What the command line says about a worker, whatever the number of its processes."""

    application: str | None
    once: bool
    worker_id: str | None
    database_url: str | None
    data_dir: str | None

    @property
    def environment(self) -> Mapping[str, str]:
        """The settings for the processes: not as arguments, where everybody can read the database's password."""
        flags = {"HOLDFAST_DATABASE_URL": self.database_url, "HOLDFAST_DATA_DIR": self.data_dir}
        return {name: value for name, value in flags.items() if value is not None}

    @property
    def arguments(self) -> Sequence[str]:
        return [*(("--app", self.application) if self.application else ()), *(("--once",) if self.once else ())]


def divide(queues: Mapping[str, int], processes: int) -> list[dict[str, int]]:
    """Divide the slots of each queue evenly. Raise an error if a process would get none."""
    total = sum(queues.values())
    if processes > total:
        raise ConfigError(
            [f"--processes {processes} is more than the {total} slots of --queue: each process needs at least one"]
        )
    shares: list[dict[str, int]] = [{} for _ in range(processes)]
    for queue, slots in queues.items():
        each, more = divmod(slots, processes)
        for n, share in enumerate(sorted(shares, key=lambda share: sum(share.values()))):
            if own := each + (n < more):
                share[queue] = own
    return shares


async def run_processes(queue: str, processes: int, options: WorkerOptions) -> int:
    """Run the processes until a signal, or until all have exited; return the exit code."""
    shares = divide(parse_queues(queue), processes)
    settings = config.load({"database_url": options.database_url, "data_dir": options.data_dir})
    parent = WorkerParent(shares, options, drain_grace=settings.drain_grace)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, parent.signalled)
    return await parent.run()


class WorkerParent:
    """Keeps one process per share of the slots running."""

    def __init__(self, shares: Sequence[Mapping[str, int]], options: WorkerOptions, *, drain_grace: float) -> None:
        self._shares = shares
        self._options = options
        self._drain_grace = drain_grace
        self._id = options.worker_id or new_worker_id()
        self._starts = 0
        self._living: set[asyncio.subprocess.Process] = set()
        self._stopping = asyncio.Event()
        self._code = 0

    def signalled(self) -> None:
        """Handle a signal: the first one drains all processes, a second one kills them."""
        if self._stopping.is_set():
            log.warning("second signal: exiting immediately; %d worker processes are killed", len(self._living))
            self._code = 1
            self._kill()
            return
        log.info("signal: draining %d worker processes", len(self._living))
        self._stopping.set()
        for process in self._living:
            _send(process, signal.SIGTERM)
        asyncio.get_running_loop().call_later(self._drain_grace + LAST_SECONDS, self._kill)

    def _kill(self) -> None:
        for process in self._living:
            log.warning("killing worker process %d", process.pid)
            _send(process, signal.SIGKILL)

    async def run(self) -> int:
        async with asyncio.TaskGroup() as group:
            for number, queues in enumerate(self._shares, 1):
                settled = asyncio.Event()
                group.create_task(self._keep(number, queues, settled))
                if number == 1:  # Settings that cannot work are reported once, not by each process.
                    await settled.wait()
        return self._code

    async def _keep(self, number: int, queues: Mapping[str, int], settled: asyncio.Event) -> None:
        """Keep one process running until it was drained or all have to stop. Set `settled` when it works or ended."""
        loop = asyncio.get_running_loop()
        name = f"worker process {number} of {len(self._shares)}"
        failures = 0
        while not self._stopping.is_set():
            began = loop.time()
            code = await self._run_one(name, queues, settled)
            if self._stopping.is_set():
                break
            if code == 0:
                if not self._options.once:
                    log.warning("%s was drained and has exited; it is not restarted", name)
                break
            if number == 1 and not settled.is_set() and code in (USAGE, UNREACHABLE, REFUSED):
                self._code = code
                self._stopping.set()
                break
            settled.set()
            failures = 0 if loop.time() - began > LASTED else failures + 1
            await self._pause(name, code, failures)
        settled.set()

    async def _pause(self, name: str, code: int, failures: int) -> None:
        """Wait before the next start, if the last ones failed early."""
        pause = backoff(failures - 1, base=FIRST_PAUSE, cap=LONGEST_PAUSE) if failures > 1 else 0.0
        ended = f"{name} died ({_ending(code)})"
        if failures > 1:
            ended += f", {failures} times in a row within {LASTED:g} s of its start"
        log.warning("%s; %s", ended, f"starting another in {pause:g} s" if pause else "starting another")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), pause)

    async def _run_one(self, name: str, queues: Mapping[str, int], settled: asyncio.Event) -> int:
        """Run one process to its end and return its exit code."""
        try:
            process, link = await self._start(queues)
        except OSError as error:
            log.error("%s cannot be started: %s", name, error)
            return CANNOT_RUN
        self._living.add(process)
        if self._stopping.is_set():  # The signal came during the start.
            _send(process, signal.SIGTERM)
        log.info("%s: pid %d, %s", name, process.pid, queue_text(queues))
        try:
            if await _is_ready(link):
                settled.set()
            return await process.wait()
        finally:
            self._living.discard(process)

    async def _start(self, queues: Mapping[str, int]) -> tuple[asyncio.subprocess.Process, int]:
        """Start a process in a session of its own: Ctrl-C reaches the parent alone, which passes it on once."""
        self._starts += 1
        link, ready = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "holdfast.cli.worker_process", str(os.getpid()), str(ready)),
                *("--queue", queue_text(queues), "--worker-id", f"{self._id}.{self._starts}"),
                *self._options.arguments,
                env={**os.environ, **self._options.environment},
                start_new_session=True,
                pass_fds=[ready],
            )
        except BaseException:
            os.close(link)
            raise
        finally:
            os.close(ready)
        return process, link


async def _is_ready(link: int) -> bool:
    """Wait for a process's word that it works; return False if it ended without it."""
    loop = asyncio.get_running_loop()
    heard = asyncio.Event()
    loop.add_reader(link, heard.set)
    try:
        await heard.wait()
        return bool(os.read(link, 1))
    finally:
        loop.remove_reader(link)
        os.close(link)


def _send(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(number)


def _ending(code: int) -> str:
    """Say how a process ended."""
    if code >= 0:
        return f"exit code {code}"
    return f"killed by {signal.Signals(-code).name if -code in list(signal.Signals) else f'signal {-code}'}"
