"""`holdfast up`: everything in one place. It migrates the database, then runs a server and a worker until Ctrl-C.

With `--workers N` the workers are separate processes; one that dies is restarted, and all exit when `up` dies.
"""

import asyncio
import contextlib
import hashlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import FrameType

import typer

from holdfast.api.app import Api
from holdfast.assemble import store_of, worker_of
from holdfast.assemble_service import api_of, direct_of, duties_of
from holdfast.cli import worker_command
from holdfast.cli.banner import banner
from holdfast.cli.queue_option import parse_queues
from holdfast.cli.serve import Server, bind
from holdfast.config import Settings
from holdfast.errors import ConfigError
from holdfast.permissions import PASSABLE, make_folder, make_passable
from holdfast.runner.users import user_for
from holdfast.store import migrate as migrations
from holdfast.store.store import connect
from holdfast.timing import backoff

log = logging.getLogger(__name__)

ROOTS_STATE = Path("/var/lib/holdfast")
LASTED = 30.0
"""A worker that lived this many seconds did not fail at its start: it is restarted without delay."""
LEAVE_SECONDS = 40.0


async def run_all(flags: Mapping[str, object], queue: str, application: str | None, workers: int) -> bool:
    """Run until a signal; return whether a stuck function keeps the process alive."""
    queues = parse_queues(queue)
    settings, functions = worker_command.configure(application, **flags)
    settings = reachable(settings)
    await _migrate(settings)
    api = api_of(settings, background=None if settings.queue_enabled else direct_of(settings, functions))
    stop = asyncio.Event()
    with bind(settings) as listener, _alive() as alive:
        async with api.running():
            server = _Server(api, settings, stop.set)
            typer.echo(banner(settings, listener.getsockname()[1], queues), err=True)
            if api.made_admin:
                typer.echo(f"  the admin token is in {settings.admin_token}\n", err=True)
            async with asyncio.TaskGroup() as group:
                group.create_task(server.serve(sockets=[listener]))
                if not settings.queue_enabled:
                    return False
                if workers:
                    for _ in range(workers):
                        group.create_task(_keep_worker(settings, queue, application, stop, alive))
                    return False
                async with worker_of(settings, queues=queues, functions=functions) as worker:
                    leaving = group.create_task(_when(stop, worker.signalled))
                    await worker.run()
                    leaving.cancel()
                    if not server.should_exit:
                        await _serve_on(settings, stop)
                    return worker.stuck


async def _serve_on(settings: Settings, stop: asyncio.Event) -> None:
    """Keep serving after the worker was drained, and run the duties in its place, until a signal."""
    log.warning("the worker was drained and has exited; the server keeps running, and jobs wait for another worker")
    store = await store_of(settings, connections=1, listen=False)
    try:
        async with duties_of(settings)(store):
            await stop.wait()
    finally:
        await store.close()


class _Server(Server):
    """A server that passes its signals on to the worker in the same process."""

    def __init__(self, app: Api, settings: Settings, stop: Callable[[], None]) -> None:
        super().__init__(app, settings)
        self._stop = stop

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        self._stop()


async def _when(stop: asyncio.Event, act: Callable[[], None]) -> None:
    while True:
        await stop.wait()
        stop.clear()
        act()


def _make_data_folder(path: Path) -> None:
    try:
        make_folder(path, PASSABLE)
    except OSError as error:
        raise ConfigError([f"cannot create the folder {path} (HOLDFAST_DATA_DIR): {error.strerror}"]) from error


def reachable(settings: Settings) -> Settings:
    """As root, keep attempts in a folder that their own users can reach: they cannot enter root's home folder."""
    _make_data_folder(settings.data_dir)
    if settings.state_dir is not None or os.geteuid() != 0:
        return settings
    make_passable(settings.state)
    try:
        user_for(settings.process_user, settings.state)
    except ConfigError:
        name = hashlib.sha256(str(settings.data_dir.absolute()).encode()).hexdigest()[:12]
        elsewhere = ROOTS_STATE / name
        make_passable(elsewhere)
        typer.echo(f"  attempts are kept in {elsewhere}, which their own user can reach", err=True)
        return replace(settings, state_dir=elsewhere)
    return settings


async def _migrate(settings: Settings) -> None:
    database = await connect(settings.url, schema=settings.schema, connections=1, listen=False, pooler=settings.pooler)
    try:
        await migrations.migrate(database)
    finally:
        await database.close()


@contextlib.contextmanager
def _alive() -> Iterator[int]:
    """Open a pipe that stays open while we live; worker processes exit when it closes."""
    read_end, write_end = os.pipe()
    try:
        yield read_end
    finally:
        os.close(read_end)
        os.close(write_end)


async def _keep_worker(
    settings: Settings, queue: str, application: str | None, stop: asyncio.Event, alive: int
) -> None:
    """Keep one worker process running; on a stop, let it drain."""
    failures = 0
    while not stop.is_set():
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "holdfast.cli.exit_with_parent", str(alive), "worker", "--queue", queue),
            *(("--app", application) if application else ()),
            env={**os.environ, **_environment(settings)},
            start_new_session=True,
            pass_fds=[alive],
        )
        began = asyncio.get_running_loop().time()
        stopping = asyncio.ensure_future(stop.wait())
        ending = asyncio.ensure_future(process.wait())
        await asyncio.wait([stopping, ending], return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if stop.is_set():
            await _end(process)
            return
        if process.returncode == 0:
            log.warning("a worker was drained and has exited; it is not restarted")
            return
        lasted = asyncio.get_running_loop().time() - began
        failures = 0 if lasted > LASTED else failures + 1
        log.warning("a worker died (%s); restarting it", process.returncode)
        if failures > 1:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), backoff(failures - 1, base=0.5, cap=10.0))


async def _end(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    try:
        await asyncio.wait_for(process.wait(), LEAVE_SECONDS)
    except TimeoutError:
        process.kill()
        await process.wait()


def _environment(settings: Settings) -> dict[str, str]:
    """Return the environment with which a worker process uses the same installation."""
    named = {"database_url": settings.url, "data_dir": settings.data_dir.absolute(), "state_dir": settings.state}
    return {f"HOLDFAST_{name.upper()}": str(value) for name, value in named.items()}
