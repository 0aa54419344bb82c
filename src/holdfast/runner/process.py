"""Processes on this host, each under a supervisor that outlives the worker.

An attempt's folder is made under another name and renamed into place, so it is never incomplete. However many
supervisors are started on it, only one runs the command, and only once: the supervisor's lock and its `started` file
decide. If the worker is root, each attempt runs as a user of its own (`uids.py`).
"""

import asyncio
import contextlib
import errno
import logging
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from holdfast.errors import CacheFull, Invalid
from holdfast.limits import LimitSettings
from holdfast.permissions import make_file, make_folder, make_passable_for
from holdfast.runner.artifacts import InputFile
from holdfast.runner.attempt_folder import FULL, AttemptFolder, write_new
from holdfast.runner.attempt_sweep import sweep_attempt
from holdfast.runner.attempt_users import AttemptUsers, RunsAs
from holdfast.runner.base import (
    AttemptState,
    CannotStart,
    ConfirmLease,
    EngineUnreachable,
    Identity,
    NoSpace,
    StartRequest,
    StartTooLate,
)
from holdfast.runner.checks import ReadinessChecks, identity_in, sweep_checks
from holdfast.runner.collected_outputs import BLOCK
from holdfast.runner.exits import ProcessExits
from holdfast.runner.ownership import give, give_if_there
from holdfast.runner.process_handle import ProcessHandle, start_steps
from holdfast.runner.removal import FolderRemover
from holdfast.runner.runner_host import RunnerHost
from holdfast.runner.spare_markers import SpareMarkers
from holdfast.runner.spec_limits import LEAST_OUTPUT, OUTPUT_FACTOR, rlimits
from holdfast.runner.start_pause import StartPause
from holdfast.runner.state_folder import StateFolder
from holdfast.runner.tree_removal import remove_tree
from holdfast.runner.uids import CLAIM_SECONDS, UidPool, UidsExhausted
from holdfast.runner.users import User, uids_for, user_for
from holdfast.runner.wire import PATH, SupervisorSpec, WireTask, encode_spec
from holdfast.runner.workspace import (
    INPUTS,
    TREE,
    WORKSPACE,
    PipelineStaging,
    Programs,
    WorkspacePaths,
    make_workspace,
    socket_folder,
)

T = TypeVar("T")
Built = TypeVar("Built", bound="ProcessRunner")
log = logging.getLogger(__name__)

EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM, errno.EIO, errno.EROFS})
"""Errors of a host that lacks something else than disk space."""
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
        self._log_cap = log_cap
        self._keep_marker_for = keep_marker_for
        self._files = ThreadPoolExecutor(4, thread_name_prefix="holdfast-files")
        self._slow = ThreadPoolExecutor(4, thread_name_prefix="holdfast-outputs")
        self._sizes = ThreadPoolExecutor(1, thread_name_prefix="holdfast-sizes")
        self._children = ProcessExits()
        self.removals = FolderRemover(self._children)
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
        if request.files:  # A copy may take long, so stage first; the step below then only renews the spec.
            await self.slowly(lambda: self._stage(process.folder, request))
        pid = await self.in_thread(lambda: self._stage_and_spawn(process.folder, request))
        process.watch_child(self._children.watch(pid))
        await process.wait_until_begun()
        return process

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
        self._files.shutdown(wait=False, cancel_futures=True)
        self._slow.shutdown(wait=False, cancel_futures=True)
        self._sizes.shutdown(wait=False, cancel_futures=True)
        self._children.close()

    # Staging

    def _stage_and_spawn(self, folder: AttemptFolder, request: StartRequest) -> int:
        self._stage(folder, request)
        return _spawn(folder)

    def _stage(self, folder: AttemptFolder, request: StartRequest) -> None:
        """Make the attempt's folder; if it exists, write the spec of this request into it."""
        try:
            if folder.path.exists() or not self._make(folder, request):
                self._restage(folder, request)
        except Invalid as error:
            raise CannotStart("contract_violation", str(error)) from error
        except CacheFull as error:
            raise NoSpace(f"cannot prepare the attempt's folder: {error}") from error
        except OSError as error:
            raise _trouble(error, "cannot prepare the attempt's folder") from error

    def _make(self, folder: AttemptFolder, request: StartRequest) -> bool:
        """Make the folder under another name and rename it into place; False if another owner was faster."""
        runs_as = self._assign(folder, request)
        temporary = AttemptFolder(folder.path.with_name(f".{folder.path.name}.{os.urandom(4).hex()}"))
        try:
            self._fill(temporary, self._spec(folder, request, runs_as), request)
            temporary.path.rename(folder.path)
        except BaseException as error:
            remove_tree(temporary.path)
            if runs_as.own and runs_as.user is not None:
                self.users.free(folder.path, runs_as.user.uid)
            if isinstance(error, OSError) and error.errno in (errno.EEXIST, errno.ENOTEMPTY):
                return False
            raise
        if runs_as.own and self.users.uid_of(folder.path) is None:
            raise StartTooLate  # This worker was suspended until its uid was freed. The retry claims another one.
        return True

    def _restage(self, folder: AttemptFolder, request: StartRequest) -> None:
        """Write our spec into a folder that another owner made, and keep the secrets of both for masking."""
        runs_as = self.users.found(folder.path)
        if runs_as is None:
            runs_as = self._assign(folder, request)
            # An attempt that has started runs as the owner of its files, which an older version may have chosen.
            if runs_as.own and runs_as.user is not None and not (folder.path / "started").exists():
                make_passable_for(folder.path, runs_as.user.gid)
                give_if_there(folder.path / "work", runs_as.user.uid, runs_as.user.gid)
        spec = self._spec(folder, request, runs_as)
        if request.pipeline is not None:
            # Its plan may differ from ours. No task of it runs without a command, and the previous owner has no lease.
            _make_workspace(folder.path, request.pipeline, spec)
        if request.secrets:
            folder.write_secrets({*folder.secrets(), *request.secrets.values()})
        folder.write_limits(self._limits.of(request.spec))
        folder.write_spec(spec)

    def _assign(self, folder: AttemptFolder, request: StartRequest) -> RunsAs:
        try:
            return self.users.assign(folder.path, request.spec.get("user"))
        except UidsExhausted as error:
            self._exhausted_for = str(error)
            raise

    def _fill(self, folder: AttemptFolder, spec: SupervisorSpec, request: StartRequest) -> None:
        """Fill a folder that is not in place yet. This is a hot path: every system call counts."""
        root = str(folder.path)
        work = f"{root}/work"
        for path in (root, f"{root}/cmd", work, f"{work}/output"):
            os.mkdir(path, 0o700)
        if spec.sole_user and spec.gid is not None:
            make_passable_for(folder.path, spec.gid)
        else:
            os.chmod(root, 0o711)
        write_new(f"{work}/request.json", msgspec.json.encode(request.inputs))
        if request.spec.get("stdin") is not None:
            write_new(f"{root}/stdin", request.spec["stdin"].encode())
        if spec.uid is not None and spec.gid is not None:
            for path in (work, f"{work}/output", f"{work}/request.json"):
                os.chown(path, spec.uid, spec.gid)
        if request.files:
            _copy_in(folder.path / "work" / "input", request.files, spec)
        if request.pipeline is not None:
            _make_workspace(folder.path, request.pipeline, spec)
        if request.secrets:
            folder.write_secrets(request.secrets.values())
        folder.write_spares()
        folder.write_limits(self._limits.of(request.spec))
        write_new(f"{root}/spec", encode_spec(spec))

    def _spec(self, folder: AttemptFolder, request: StartRequest, runs_as: RunsAs) -> SupervisorSpec:
        work = str((folder.path / "work").absolute())
        user = runs_as.user
        programs = self._programs(folder, request, runs_as)
        return SupervisorSpec(
            token=request.token,
            mark=request.identity.mark,
            tasks=programs.tasks,
            service=programs.service,
            hold=request.pipeline is not None,
            env=environment(request, work),
            cwd=work,
            uid=user.uid if user else None,
            gid=user.gid if user else None,
            limits=rlimits(self._limits.of(request.spec), own_user=runs_as.own),
            sole_user=runs_as.own,
            private=runs_as.private,
            output_cap=max(self._log_cap * OUTPUT_FACTOR, LEAST_OUTPUT),
            timeout=request.timeout,
            idle_timeout=request.idle_timeout,
            stop_grace=request.stop_grace,
            start_by=request.start_by,
            stop_after=request.stop_after,
        )

    def _programs(self, folder: AttemptFolder, request: StartRequest, runs_as: RunsAs) -> Programs:
        if request.pipeline is None:
            return Programs(tasks=(WireTask(name="main", argv=tuple(self.command(request.spec))),))
        workspace = (folder.path / WORKSPACE).absolute()
        root = (runs_as.user.uid if runs_as.user else os.geteuid()) == 0
        socket = str(socket_folder(request.identity.mark, private=runs_as.private))
        return request.pipeline.programs(
            WorkspacePaths(tree=str(workspace / TREE), inputs=str(workspace / INPUTS), socket=socket, root=root)
        )

    # Sweeping

    async def remaining_attempts(self) -> Sequence[Identity]:
        """Return the attempts that have a folder here, of their own or of a check."""
        return await self.in_thread(
            lambda: list({found: None for path in os.listdir(self.root) if (found := self._named(path))})
        )

    def _named(self, name: str) -> Identity | None:
        if (checked := identity_in(self.root, name)) is not None:
            return checked
        job, _, attempt = name.rpartition(".")
        if not job or job.startswith(".") or not attempt.isdigit():
            return None
        return Identity(self.root.name, job, int(attempt))

    def to_sweep(self, over: Sequence[Identity], found: int) -> Sequence[Identity]:
        return over

    async def sweep(self, identity: Identity) -> bool:
        """Remove the remains of an attempt whose end is recorded, stopping it first. Return whether it is gone."""
        return await self.slowly(lambda: self._sweep(identity))

    def _sweep(self, identity: Identity) -> bool:
        checks_gone = sweep_checks(self.root, identity, self.users)
        folder = self.folder(identity)
        uid = self.users.uid_of(folder.path)
        swept = sweep_attempt(folder, identity.mark, keep_marker_for=self._keep_marker_for, uid=uid)
        self.users.free(folder.path, uid)
        return swept and checks_gone

    async def sweep_incomplete(self, older: float) -> int:
        """Remove incomplete folders whose makers must be dead, and free unused uids; refill the spare markers."""
        gone = await self.slowly(lambda: self._sweep_incomplete(older))
        await self.slowly(lambda: self.users.sweep(max(CLAIM_SECONDS, self._keep_marker_for)))
        await self.slowly(self.markers.refill)
        return gone

    def _sweep_incomplete(self, older: float) -> int:
        gone = 0
        for entry in os.scandir(self.root):
            with contextlib.suppress(FileNotFoundError):
                if entry.name.startswith(".") and time.time() - entry.stat().st_mtime > older:
                    remove_tree(Path(entry.path))
                    gone += 1
        return gone


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


def _make_workspace(folder: Path, staging: PipelineStaging, spec: SupervisorSpec) -> None:
    make_workspace(folder, staging, spec.uid, spec.gid)
    tree = folder / WORKSPACE / TREE
    # In a private view the user has a line in /etc/passwd.
    if spec.uid is not None and spec.gid is not None and not spec.private and staging.prepare(tree, spec.uid):
        give(tree, spec.uid, spec.gid)


def _copy_in(folder: Path, files: Mapping[str, InputFile], spec: SupervisorSpec) -> None:
    """Copy the job's input files; the job owns the copies and may change them."""
    folder.mkdir(mode=0o700)
    for name, source in files.items():
        target = folder / name
        make_folder(target.parent)
        make_file(target)
        with source.open() as data, target.open("wb") as copy:
            shutil.copyfileobj(data, copy, BLOCK)
    if spec.uid is not None and spec.gid is not None:
        give(folder, spec.uid, spec.gid)


def _spawn(folder: AttemptFolder) -> int:
    try:
        return folder.start()
    except OSError as error:
        raise _trouble(error, "cannot start a supervisor") from error


def _trouble(error: OSError, what: str) -> Exception:
    """Map an OSError: an exhausted host is not the job's fault, so the job waits or runs on another host."""
    message = f"{what}: {error.strerror}"
    if error.errno in FULL:
        return NoSpace(message)
    return EngineUnreachable(message) if error.errno in EXHAUSTED else CannotStart("start_failed", message)


def environment(request: StartRequest, work: str) -> Mapping[str, str]:
    """Build a child's environment from scratch; the job cannot override holdfast's variables."""
    return {
        "PATH": PATH,
        "HOME": work,
        "LANG": "C.UTF-8",
        **request.spec.get("env", {}),
        **request.secrets,
        "HOLDFAST_JOB_ID": request.identity.job,
        "HOLDFAST_ATTEMPT": str(request.identity.attempt),
        "HOLDFAST_LEASE_TOKEN": str(request.token),
        "HOLDFAST_WORK_DIR": work,
    }
