"""Processes on this host, each under a supervisor that outlives the worker.

An attempt's folder is made under another name and renamed into paths, so it is never incomplete. However many
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

from holdfast.errors import Invalid
from holdfast.limits import AttemptLimits, LimitSettings
from holdfast.model import Cause, Error
from holdfast.permissions import make_file, make_folder, make_passable_for
from holdfast.runner.artifacts import CollectedOutputs, collect_folder, remove_tree
from holdfast.runner.attempt_folder import AttemptFolder, ExitRecord, write_new
from holdfast.runner.attempt_users import AttemptUsers, RunsAs
from holdfast.runner.base import (
    AttemptEnd,
    AttemptState,
    CannotStart,
    ConfirmLease,
    EngineUnreachable,
    Identity,
    StartRequest,
    TooLate,
)
from holdfast.runner.checks import ReadinessChecks, identity_in, sweep_checks
from holdfast.runner.exits import ProcessExits, SupervisorWatch
from holdfast.runner.folder_size import folder_size
from holdfast.runner.frames import Frame, FrameReader
from holdfast.runner.ownership import give, give_if_there
from holdfast.runner.removal import FolderRemover
from holdfast.runner.state_folder import StateFolder
from holdfast.runner.supervisor.protocol import ExitCause, ExitStatus, Limit
from holdfast.runner.uids import CLAIM_SECONDS, UidPool, UidsExhausted
from holdfast.runner.users import User
from holdfast.runner.wire import PATH, Command, SupervisorSpec, WireTask, encode_spec
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
log = logging.getLogger(__name__)

OUTPUT_FACTOR = 16
LEAST_OUTPUT = 64 * 1024 * 1024
"""Output is kept on disk up to OUTPUT_FACTOR times the log's cap: above the cap only event lines matter."""
EXHAUSTED = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM, errno.EIO, errno.EROFS}
)
NO_ROOM = "this host ran out of resources a moment ago"
EXHAUSTED_SECONDS = 10.0
"""Seconds in which nothing is started after the host ran out of resources."""
START_STEPS = (0.001, 0.001, 0.002, 0.002, 0.005, 0.005, 0.01)
MARKER_SECONDS = 3600.0
"""Minimum lifetime of the start marker of an ended attempt: longer than any lease that might still start it."""
LAST_WORDS = 500
"""Characters of a service's last output in the error that reports its end."""
MISSING = ("No such file or directory", "Permission denied", "Exec format error", "Not a directory", "Is a directory")


class ProcessRunner:
    """Starts and finds processes in the state folder.

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
        self.domain = state.domain
        self.domains = state.domains
        self.root = state.attempts(installation).resolve()
        self.users = AttemptUsers(user, uids, self.root, allow_root=allow_root)
        self._boot = state.boot
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
        self._failure_noted = asyncio.Event()

    @property
    def away(self) -> str | None:
        return self._exhausted_for if time.monotonic() < self._exhausted_until else None

    def note_failure(self) -> None:
        self._exhausted_until = time.monotonic() + EXHAUSTED_SECONDS
        self._failure_noted.set()

    async def watch(self, changed: Callable[[], None]) -> None:
        """Call `changed` when starts stop for lack of resources or uids, and when they resume."""
        while await self._failure_noted.wait():
            self._failure_noted.clear()
            changed()
            while (left := self._exhausted_until - time.monotonic()) > 0:  # noqa: ASYNC110 - it may be extended
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
        for step in _steps():
            state = await self.in_thread(process.read_state)
            if state != "running" or (process.folder.path / "started").exists():
                return state, process
            await asyncio.sleep(step)
        raise AssertionError("unreachable")

    async def forbid(self, identity: Identity, domain: str) -> bool:
        try:
            return await self.in_thread(self.folder(identity).forbid)
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
        """Make the attempt's folder; if it exists, write this order's spec into it."""
        try:
            if folder.path.exists() or not self._make(folder, request):
                self._restage(folder, request)
        except Invalid as error:
            raise CannotStart("contract_violation", str(error)) from error
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
            raise TooLate  # This worker was suspended until its uid was freed. The retry claims another one.
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
            return Programs(tasks=(WireTask(name="main", argv=tuple(request.spec["command"])),))
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
        """Remove incomplete folders whose makers must be dead, and free unused uids."""
        gone = await self.slowly(lambda: self._sweep_incomplete(older))
        await self.slowly(lambda: self.users.sweep(max(CLAIM_SECONDS, self._keep_marker_for)))
        return gone

    def _sweep_incomplete(self, older: float) -> int:
        gone = 0
        for entry in os.scandir(self.root):
            with contextlib.suppress(FileNotFoundError):
                if entry.name.startswith(".") and time.time() - entry.stat().st_mtime > older:
                    remove_tree(Path(entry.path))
                    gone += 1
        return gone


def sweep_attempt(folder: AttemptFolder, mark: str, *, keep_marker_for: float, uid: int | None = None) -> bool:
    """Remove the remains of an attempt that is over; stop it first if it runs. Return whether that is done.

    The start marker stays for `keep_marker_for` seconds, so that a late supervisor does not start the attempt again.
    `uid` is the attempt's own user, if it has one.
    """
    if folder.alive():
        started = folder.started()
        token = started.token if started else 1
        folder.send(Command(token=max(token, 1) + (1 << 40), verb="stop", kind="cancel"))
        return False
    buried = not (folder.path / "spec").exists()
    with contextlib.suppress(FileNotFoundError):
        if buried and time.time() - folder.path.stat().st_mtime < keep_marker_for:
            return False
    if folder.started() and not folder.exit() and folder.kill_leftovers(mark, uid):
        return False
    remove_tree(socket_folder(mark))
    if buried:
        remove_tree(folder.path)
    else:
        folder.reduce_to_marker()
    return True


class ProcessHandle:
    """One attempt on this host."""

    def __init__(self, runner: ProcessRunner, identity: Identity, *, stdout: int, stderr: int) -> None:
        self.identity = identity
        self.folder = runner.folder(identity)
        self._runner = runner
        self._log: FrameReader = self.folder.frames(stdout=stdout, stderr=stderr)
        self._child: asyncio.Future[int] | None = None
        self._watch: SupervisorWatch | None = None

    @property
    def workspace(self) -> Path:
        return self.folder.path / WORKSPACE

    def read_state(self) -> AttemptState:
        """Read the state from the folder. The lock is checked first: a supervisor may end meanwhile, not restart."""
        alive = self.folder.alive()
        if self.folder.exit() is not None:
            return "exited"
        if alive:
            return "running"
        if self.folder.forbidden():
            return "forbidden"
        if self.folder.started() is None:
            return "missing"
        return "exited" if self.folder.exit() is not None else "died"

    def watch_child(self, status: "asyncio.Future[int]") -> None:
        self._child = status

    async def wait_until_begun(self) -> None:
        """Wait until our supervisor has begun, or has exited because another one was first."""
        assert self._child is not None
        for step in _steps():
            if self._child.done():
                break
            if (self.folder.path / "started").exists():
                return
            await asyncio.wait([self._child], timeout=step)
        status = self._child.result()
        if self.read_state() in ("exited", "died"):
            return  # It ran and has ended already: the status is the command's.
        if status == ExitStatus.LEFT_LATE:
            raise TooLate
        if status == ExitStatus.LEFT_BROKEN:
            raise CannotStart("start_failed", "the supervisor could not use the attempt's folder")
        if status in (ExitStatus.LEFT_HELD, ExitStatus.LEFT_STARTED):
            self._child = None
            await self._wait_for_other_supervisor()
        elif self.read_state() == "missing":
            raise CannotStart("start_failed", f"the supervisor exited with status {status} before it began")

    async def _wait_for_other_supervisor(self) -> None:
        """Wait for the supervisor that was first; it may still exit without a trace because it is too late."""
        for step in _steps():
            if not self.folder.alive() or (self.folder.path / "started").exists():
                break
            await asyncio.sleep(step)
        if self.read_state() == "missing":
            raise TooLate

    async def frames(self, most: int) -> Sequence[Frame]:
        try:
            if os.stat(self._log.path).st_size == self._log.position:
                return ()
        except FileNotFoundError:
            return ()
        return await self._runner.in_thread(lambda: self._log.read(most))

    async def send(self, command: Command) -> str:
        try:
            return await self._runner.in_thread(lambda: self.folder.send(command))
        except FileNotFoundError:
            return ""  # The new owner has removed the folder: we will notice that the lease is lost.
        except OSError as error:
            raise EngineUnreachable(f"cannot write a command into the attempt's folder: {error.strerror}") from error

    def send_from_thread(self, command: Command) -> None:
        """Send a command from any thread. If that fails, the next heartbeat sends it again."""
        try:
            self.folder.send(command)
        except OSError as error:
            log.warning(
                "cannot send a command to the supervisor of %s; the next beat retries: %s",
                self.identity.mark,
                error.strerror,
            )

    def watch(self, on_end: Callable[[], None]) -> None:
        if self._child is not None:
            self._child.add_done_callback(lambda _: on_end())
        else:
            self._watch = SupervisorWatch(self.folder, on_end)

    @property
    def over(self) -> bool:
        if self._child is not None:
            return self._child.done()
        return self._watch is not None and self._watch.over

    async def outputs(self, collected: CollectedOutputs) -> None:
        if self.folder.left_nothing():
            return
        await self._runner.slowly(lambda: collect_folder(self.folder.path / "work", collected))

    async def limits(self) -> AttemptLimits:
        return await self._runner.in_thread(self.folder.limits)

    async def size(self, most: int) -> int:
        return await self._runner.measure(lambda: folder_size(self.folder.path, most))

    async def secrets(self) -> Sequence[str]:
        return await self._runner.in_thread(self.folder.secrets)

    async def collect(self) -> AttemptEnd | None:
        state = self.read_state()
        if state == "running":
            return None
        if state == "died":
            return await self._lost()
        if state == "forbidden":
            return AttemptEnd(cause=Cause.DRAINED)  # Nothing ran: a previous owner ended it just before we started it.
        if state == "missing":
            return AttemptEnd(cause=Cause.LOST, error=Error(code="lost", message="the attempt's folder is gone"))
        ended = self.folder.exit()
        assert ended is not None
        fell = ended.cause is ExitCause.SERVICE_ENDED
        return to_end(ended, await self._runner.in_thread(self.folder.service) if fell else b"")

    async def _lost(self) -> AttemptEnd | None:
        """Kill the processes of a supervisor that died without an exit record; then the attempt is lost."""
        started = await self._runner.in_thread(self.folder.started)
        rebooted = started is not None and started.boot_id != self._runner._boot
        if not rebooted:
            uid = self._runner.users.uid_of(self.folder.path)
            left = await self._runner.slowly(lambda: self.folder.kill_leftovers(self.identity.mark, uid))
            if left:
                return None
        message = "the host was rebooted" if rebooted else "its supervisor was killed, so its end cannot be known"
        return AttemptEnd(cause=Cause.LOST, error=Error(code="lost", message=message))

    async def remove(self, *, had_other_owners: bool) -> None:
        """Remove the folder. If a suspended worker might still start it, the start marker stays for a while."""
        self.close()
        users, uid = self._runner.users, self._runner.users.uid_of(self.folder.path)
        over = [socket_folder(self.identity.mark)]
        if had_other_owners:
            await self._runner.slowly(self.folder.reduce_to_marker)
        else:
            over.append(self.folder.path)
        await self._runner.removals.remove(*over)
        if uid is not None:
            await self._runner.in_thread(lambda: users.free(self.folder.path, uid))

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None


def _make_workspace(folder: Path, staging: PipelineStaging, spec: SupervisorSpec) -> None:
    make_workspace(folder, staging, spec.uid, spec.gid)
    tree = folder / WORKSPACE / TREE
    # In a private view the user has a line in /etc/passwd.
    if spec.uid is not None and spec.gid is not None and not spec.private and staging.prepare(tree, spec.uid):
        give(tree, spec.uid, spec.gid)


def _copy_in(folder: Path, files: Mapping[str, Path], spec: SupervisorSpec) -> None:
    """Copy the job's input files; the job owns the copies and may change them."""
    folder.mkdir(mode=0o700)
    for name, source in files.items():
        target = folder / name
        make_folder(target.parent)
        make_file(target)
        shutil.copyfile(source, target)
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
    return EngineUnreachable(message) if error.errno in EXHAUSTED else CannotStart("start_failed", message)


def _steps() -> Any:
    yield from START_STEPS
    while True:
        yield 0.02


def rlimits(limits: AttemptLimits, *, own_user: bool = False) -> Mapping[Limit, int]:
    """Return the limits that the kernel enforces for each process of an attempt.

    `data` and not `as`: programs map far more than they use. The kernel counts processes per user, so `nproc` is set
    only if the attempt has a user of its own.
    """
    wanted: dict[Limit, int | None] = {"data": limits.memory, "fsize": limits.file_size}
    if own_user:
        wanted["nproc"] = limits.pids
    return {name: value for name, value in wanted.items() if value is not None}


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


def to_end(ended: ExitRecord, service: bytes = b"") -> AttemptEnd:
    """Map a supervisor's exit record to an End. `service` is the last output of a service that ended by itself."""
    match ended.cause:
        case ExitCause.STOP_AFTER:
            message = "the supervisor stopped the attempt: no heartbeat reached it within stop_after"
            return AttemptEnd(cause=Cause.LOST, error=Error(code="lost", message=message))
        case ExitCause.INTERRUPTED if ended.stopped_by == "signal":
            message = "its supervisor was stopped by a signal from outside holdfast"
            return AttemptEnd(cause=Cause.LOST, error=Error(code="lost", message=message))
        case ExitCause.START_FAILED:
            missing = "could not run it: " in ended.text and ended.text.rpartition(": ")[2] in MISSING
            code = "command_missing" if missing else "start_failed"
            return AttemptEnd(cause=Cause.START_FAILED, error=Error(code=code, message=ended.text))
        case ExitCause.SERVICE_ENDED:
            last = service.decode("utf-8", "replace").strip()[-LAST_WORDS:]
            message = f"{ended.text}; it said: {last}" if last else ended.text
            return AttemptEnd(cause=Cause.EXIT, error=Error(code="service_ended", message=message))
        case ExitCause.FAILED:
            code, _, message = ended.text.partition(": ")
            return AttemptEnd(cause=Cause.EXIT, error=Error(code=code, message=message))
    kept = (ended.stdout_length - ended.stdout_dropped, ended.stderr_length - ended.stderr_dropped)
    return AttemptEnd(cause=Cause(ended.cause), exit_code=ended.code, signal=ended.signal, said=kept)
