"""Processes on this host, each under a supervisor that outlives the worker.

Their folders are made in `process_staging.py`. However many supervisors are started on a folder, only one runs the
command, and only once: the supervisor's lock and its `started` file decide. If the worker is root, each attempt runs as
a user of its own (`uids.py`).
"""

import asyncio
import contextlib
import errno
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

from holdfast.limits import LimitSettings
from holdfast.runner.attempt_folder import AttemptFolder
from holdfast.runner.attempt_users import AttemptUsers
from holdfast.runner.base import AttemptState, ConfirmLease, EngineUnreachable, Identity, StartRequest, StartTooLate
from holdfast.runner.checks import ReadinessChecks
from holdfast.runner.exits import ProcessExits
from holdfast.runner.launcher import Launcher, LauncherGone, LaunchFailed
from holdfast.runner.process_handle import ProcessHandle, start_steps
from holdfast.runner.process_staging import ProcessStaging, start_error
from holdfast.runner.process_sweep import ProcessSweep
from holdfast.runner.removal import FolderRemover
from holdfast.runner.runner_host import RunnerHost
from holdfast.runner.spare_markers import SpareMarkers
from holdfast.runner.start_pause import StartPause
from holdfast.runner.state_folder import StateFolder
from holdfast.runner.uids import UidPool, UidsExhausted
from holdfast.runner.users import User, uids_for, user_for

T = TypeVar("T")
Built = TypeVar("Built", bound="ProcessRunner")

NO_ROOM = "this host ran out of resources a moment ago"
EXHAUSTED_SECONDS = 10.0
"""Seconds in which nothing is started after the host ran out of resources."""
MARKER_SECONDS = 3600.0
"""Minimum lifetime of the start marker of an ended attempt: longer than any lease that might still start it."""


class ProcessRunner:
    """Starts and finds processes in the state folder.

    A runner that only has another spec than `process` is a subclass with a `capability` and a `command` of its own. Its
    attempts are in the same folders, but in domains of its own: a worker without it adopts none of them.

    `uids` are the uids for attempts, one each; without them commands run as `user`, or else as the worker's user.
    """

    capability = "process"

    def __init__(
        self,
        state: StateFolder,
        installation: str,
        *,
        user: User | None,
        uids: UidPool | None = None,
        log_cap: int,
        limits: LimitSettings | None = None,
        keep_marker_for: float = MARKER_SECONDS,
        allow_root: bool = False,
    ) -> None:
        self._limits = limits or LimitSettings()
        self.domain = self._domain_in(state.domain)
        self.domains = [self._domain_in(domain) for domain in state.domains]
        self.root = state.attempts(installation).resolve()
        self.markers = SpareMarkers(state.spare_markers(installation))
        self.users = AttemptUsers(user, uids, self.root, allow_root=allow_root)
        self.boot = state.boot
        self.staging = ProcessStaging(self.users, self._limits, self.command, log_cap=log_cap)
        self._remains = ProcessSweep(
            self.root, self.users, state.spare_folders(installation), keep_marker_for=keep_marker_for
        )
        self._files = ThreadPoolExecutor(4, thread_name_prefix="holdfast-files")
        self._slow = ThreadPoolExecutor(4, thread_name_prefix="holdfast-outputs")
        self._sizes = ThreadPoolExecutor(1, thread_name_prefix="holdfast-sizes")
        self._children = ProcessExits()
        spare_folders = state.spare_folders(installation)
        self.launcher = Launcher(self._children, spare_folders)
        self.removals = FolderRemover(self._children, spare_folders)
        self.checks = ReadinessChecks(self.root, self.users, self._children, self._limits.default)
        self._exhausted_until = 0.0
        self._exhausted_for = NO_ROOM
        self._pause = StartPause()
        self._failure_noted = asyncio.Event()

    def command(self, spec: Mapping[str, Any]) -> Sequence[str]:
        """Return the program that a spec asks for, and its arguments."""
        return tuple(spec["command"])

    def _domain_in(self, domain: str) -> str:
        return domain if self.capability == ProcessRunner.capability else f"{self.capability}@{domain}"

    @property
    def away(self) -> str | None:
        return self._exhausted_for if time.monotonic() < self._exhausted_until else self._pause.why

    def pause(self, why: str) -> None:
        self._pause.begin(why)
        self._failure_noted.set()

    @property
    def paused(self) -> str | None:
        return self._pause.why

    def note_failure(self) -> None:
        self._exhausted_until = time.monotonic() + EXHAUSTED_SECONDS
        self._failure_noted.set()

    @property
    def _left(self) -> float:
        return max(self._exhausted_until - time.monotonic(), self._pause.left)

    async def watch(self, changed: Callable[[], None]) -> None:
        """Call `changed` when starts stop for lack of resources, uids or disk space, and when they resume."""
        await self.in_thread(self.markers.refill)
        while await self._failure_noted.wait():
            self._failure_noted.clear()
            changed()
            while (left := self._left) > 0:  # noqa: ASYNC110 - it may be extended
                await asyncio.sleep(left)
            self._exhausted_for = NO_ROOM
            changed()

    async def digest(self, spec: Mapping[str, Any], domain: str) -> None:
        """Return None: a host has no images."""

    def start_slot(self) -> AbstractAsyncContextManager[None]:
        return contextlib.nullcontext()

    async def start(self, request: StartRequest, confirm: ConfirmLease) -> "ProcessHandle":
        """Start a supervisor. It exits by itself if it starts after `start_by`, so `confirm` is not needed."""
        process = ProcessHandle(self, request.identity, stdout=0, stderr=0)
        try:
            if not await self._launch(process, request):
                if request.files:  # A copy may take long, so stage first; the step below then only renews the spec.
                    await self.slowly(lambda: self.staging.stage(process.folder, request))
                pid = await self.in_thread(lambda: self._stage_and_spawn(process.folder, request))
                process.watch_child(self._children.watch(pid))
        except UidsExhausted as error:
            self._exhausted_for = str(error)
            raise
        process.started_by_us(self._limits.of(request.spec), pipeline=request.pipeline is not None)
        await process.wait_until_begun()
        return process

    async def _launch(self, process: ProcessHandle, request: StartRequest) -> bool:
        """Start through the launcher. Return False if this start needs to be staged here.

        That is so for files and pipelines, if another owner has made the folder, and if the launcher died: then a
        supervisor that it had forked, and the one that we start, compete as those of two owners do.
        """
        folder = process.folder
        if request.files or request.pipeline is not None or not self.launcher.usable or folder.exists():
            return False
        if self.users.own:
            records = await self.in_thread(lambda: self.staging.launch_records(folder, request))
        else:
            records = self.staging.launch_records(folder, request)
        if records is None:
            return False
        try:
            process.watch_launch(await self.launcher.launch(records, within=request.start_by - boottime()))
        except LauncherGone:
            return False
        except LaunchFailed as error:
            await self.in_thread(lambda: self.staging.give_back(folder, records))
            if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
                return False
            if error.errno in (errno.ETIME, errno.ESTALE):
                raise StartTooLate from error  # ESTALE: our uid was freed meanwhile. The retry claims another one.
            raise start_error(OSError(error.errno, str(error)), "cannot prepare the attempt's folder") from error
        return True

    async def find(
        self, identity: Identity, domain: str, *, stdout: int, stderr: int
    ) -> tuple[AttemptState, "ProcessHandle"]:
        """Read the folder. A lock alone proves nothing: its supervisor may still exit because it was too late."""
        process = ProcessHandle(self, identity, stdout=stdout, stderr=stderr)
        for step in start_steps():
            state = await self.in_thread(process.read_state)
            if state != "running" or (process.folder.path / "started").exists():
                return state, process
            await asyncio.sleep(step)
        raise AssertionError("unreachable")

    async def forbid(self, identity: Identity, domain: str) -> bool:
        try:
            return await self.in_thread(lambda: self.markers.forbid(self.folder(identity)))
        except OSError as error:
            raise EngineUnreachable(f"cannot write the start marker: {error.strerror}") from error

    async def in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._files, work)

    async def slowly(self, work: Callable[[], T]) -> T:
        """Run slow work (copying, removing, killing) in threads of its own, so that quick work need not wait."""
        return await asyncio.get_running_loop().run_in_executor(self._slow, work)

    async def measure(self, work: Callable[[], T]) -> T:
        """Measure folders one at a time: however many attempts there are, this takes one thread."""
        return await asyncio.get_running_loop().run_in_executor(self._sizes, work)

    def folder(self, identity: Identity) -> AttemptFolder:
        return AttemptFolder(self.root / f"{identity.job}.{identity.attempt}")

    def close(self) -> None:
        """Stop the threads. Wait for short work, so that a closed worker no longer writes to its state folder."""
        self._files.shutdown(wait=True, cancel_futures=True)
        self._slow.shutdown(wait=False, cancel_futures=True)
        self._sizes.shutdown(wait=False, cancel_futures=True)
        self.launcher.close()
        self.removals.close()
        self._children.close()

    def _stage_and_spawn(self, folder: AttemptFolder, request: StartRequest) -> int:
        self.staging.stage(folder, request)
        try:
            return folder.start()
        except OSError as error:
            raise start_error(error, "cannot start a supervisor") from error

    # Sweeping

    async def remaining_attempts(self) -> Sequence[Identity]:
        """Return the attempts that have a folder here, of their own or of a check."""
        return await self.in_thread(self._remains.found)

    def to_sweep(self, over: Sequence[Identity], found: int) -> Sequence[Identity]:
        return over

    async def sweep(self, identity: Identity) -> bool:
        """Remove the remains of an attempt whose end is recorded, stopping it first. Return whether it is gone."""
        return await self.slowly(lambda: self._remains.sweep(identity, self.folder(identity)))

    async def sweep_incomplete(self, older: float) -> int:
        """Remove incomplete folders whose makers must be dead, and free unused uids; refill the spare markers."""
        gone = await self.slowly(lambda: self._remains.sweep_incomplete(older))
        await self.slowly(self._remains.free_uids)
        await self.in_thread(self.markers.refill)
        return gone


def boottime() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


async def build(host: RunnerHost) -> ProcessRunner:
    """Build the process runner of a worker."""
    return build_kind(ProcessRunner, host)


def build_kind(kind: type[Built], host: RunnerHost) -> Built:
    """Build the process runner of a worker, or a subclass of it."""
    settings = host.settings
    uids = uids_for(settings)
    if uids is not None:
        host.stack.callback(uids.close)
    runner = kind(
        host.state,
        host.installation,
        user=user_for(settings.process_user, host.state.path),
        uids=uids,
        log_cap=settings.log_max_bytes,
        limits=settings.attempt_limits,
        keep_marker_for=max(MARKER_SECONDS, 2 * settings.lease_ttl),
        allow_root=settings.allow_root_jobs,
    )
    host.stack.callback(runner.close)
    return runner
