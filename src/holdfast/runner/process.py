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
from holdfast.limits import AttemptLimits, LimitSettings
from holdfast.model import Cause, Error
from holdfast.permissions import make_file, make_folder, make_passable_for
from holdfast.runner.artifacts import Gathered, remove_tree, take_folder
from holdfast.runner.attempt_folder import FULL, AttemptFolder, Exit, write_new
from holdfast.runner.attempt_users import AttemptUsers, RunsAs
from holdfast.runner.base import CannotStart, Confirm, End, EngineUnreachable, Identity, NoSpace, Order, State, TooLate
from holdfast.runner.checks import Checks, identity_in, sweep_checks
from holdfast.runner.exits import ProcessExits, Watch
from holdfast.runner.folder_size import folder_size
from holdfast.runner.frames import Frame, FrameReader
from holdfast.runner.ownership import give, give_if_there
from holdfast.runner.removal import Removals
from holdfast.runner.spare_markers import SpareMarkers
from holdfast.runner.start_pause import StartPause
from holdfast.runner.state_folder import StateFolder
from holdfast.runner.supervisor.protocol import ExitCause, ExitStatus, Limit
from holdfast.runner.uids import CLAIM_SECONDS, Uids, UidsExhausted
from holdfast.runner.users import User
from holdfast.runner.wire import PATH, Command, Spec, WireTask, encode_spec
from holdfast.runner.workspace import INPUTS, SPACE, TREE, Place, Programs, Staging, make_space, socket_folder

T = TypeVar("T")
log = logging.getLogger(__name__)

OUTPUT_FACTOR = 16
LEAST_OUTPUT = 64 * 1024 * 1024
"""Output is kept on disk up to OUTPUT_FACTOR times the log's cap: above the cap only event lines matter."""
EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM, errno.EIO, errno.EROFS})
"""Errors of a host that lacks something else than disk space."""
NO_ROOM = "this host ran out of resources a moment ago"
EXHAUSTED_SECONDS = 10.0
"""Seconds in which nothing is started after the host ran out of resources."""
START_STEPS = (0.001, 0.001, 0.002, 0.002, 0.005, 0.005, 0.01)
MARK_SECONDS = 3600.0
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
        uids: Uids | None = None,
        log_cap: int,
        limits: LimitSettings | None = None,
        marks_for: float = MARK_SECONDS,
        allow_root: bool = False,
    ) -> None:
        self._limits = limits or LimitSettings()
        self.domain = state.domain
        self.domains = state.domains
        self.root = state.attempts(installation).resolve()
        self.markers = SpareMarkers(state.spare_markers(installation))
        self.users = AttemptUsers(user, uids, self.root, allow_root=allow_root)
        self._boot = state.boot
        self._log_cap = log_cap
        self._marks_for = marks_for
        self._files = ThreadPoolExecutor(4, thread_name_prefix="holdfast-files")
        self._slow = ThreadPoolExecutor(4, thread_name_prefix="holdfast-outputs")
        self._sizes = ThreadPoolExecutor(1, thread_name_prefix="holdfast-sizes")
        self._children = ProcessExits()
        self.removals = Removals(self._children)
        self.checks = Checks(self.root, self.users, self._children, self._limits.default)
        self._exhausted_until = 0.0
        self._exhausted_for = NO_ROOM
        self._pause = StartPause()
        self._doubted = asyncio.Event()

    @property
    def away(self) -> str | None:
        return self._exhausted_for if time.monotonic() < self._exhausted_until else self._pause.why

    def pause(self, why: str) -> None:
        self._pause.begin(why)
        self._doubted.set()

    @property
    def paused(self) -> str | None:
        return self._pause.why

    def doubt(self) -> None:
        self._exhausted_until = time.monotonic() + EXHAUSTED_SECONDS
        self._doubted.set()

    @property
    def _left(self) -> float:
        return max(self._exhausted_until - time.monotonic(), self._pause.left)

    async def watch(self, changed: Callable[[], None]) -> None:
        """Call `changed` when starts stop for lack of resources, uids or disk space, and when they resume."""
        await self.in_thread(self.markers.refill)
        while await self._doubted.wait():
            self._doubted.clear()
            changed()
            while (left := self._left) > 0:  # noqa: ASYNC110 - it may be extended
                await asyncio.sleep(left)
            self._exhausted_for = NO_ROOM
            changed()

    async def digest(self, spec: Mapping[str, Any], domain: str) -> None:
        """Return None: a host has no images."""

    def turn(self) -> AbstractAsyncContextManager[None]:
        return contextlib.nullcontext()

    async def start(self, order: Order, confirm: Confirm) -> "Process":
        """Start a supervisor. It exits by itself if it starts after `start_by`, so `confirm` is not needed."""
        process = Process(self, order.identity, stdout=0, stderr=0)
        if order.files:  # A copy may take long, so stage first; the step below then only renews the spec.
            await self.slowly(lambda: self._stage(process.folder, order))
        pid = await self.in_thread(lambda: self._stage_and_spawn(process.folder, order))
        process.watch_child(self._children.watch(pid))
        await process.begun()
        return process

    async def find(self, identity: Identity, domain: str, *, stdout: int, stderr: int) -> tuple[State, "Process"]:
        """Read the folder. A lock alone proves nothing: its supervisor may still exit because it was too late."""
        process = Process(self, identity, stdout=stdout, stderr=stderr)
        for step in _steps():
            state = await self.in_thread(process.look)
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

    def _stage_and_spawn(self, folder: AttemptFolder, order: Order) -> int:
        self._stage(folder, order)
        return _spawn(folder)

    def _stage(self, folder: AttemptFolder, order: Order) -> None:
        """Make the attempt's folder; if it exists, write this order's spec into it."""
        try:
            if folder.path.exists() or not self._make(folder, order):
                self._restage(folder, order)
        except Invalid as error:
            raise CannotStart("contract_violation", str(error)) from error
        except CacheFull as error:
            raise NoSpace(f"cannot prepare the attempt's folder: {error}") from error
        except OSError as error:
            raise _trouble(error, "cannot prepare the attempt's folder") from error

    def _make(self, folder: AttemptFolder, order: Order) -> bool:
        """Make the folder under another name and rename it into place; False if another owner was faster."""
        runs_as = self._assign(folder, order)
        temporary = AttemptFolder(folder.path.with_name(f".{folder.path.name}.{os.urandom(4).hex()}"))
        try:
            self._fill(temporary, self._spec(folder, order, runs_as), order)
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

    def _restage(self, folder: AttemptFolder, order: Order) -> None:
        """Write our spec into a folder that another owner made, and keep the secrets of both for masking."""
        runs_as = self.users.found(folder.path)
        if runs_as is None:
            runs_as = self._assign(folder, order)
            # An attempt that has started runs as the owner of its files, which an older version may have chosen.
            if runs_as.own and runs_as.user is not None and not (folder.path / "started").exists():
                make_passable_for(folder.path, runs_as.user.gid)
                give_if_there(folder.path / "work", runs_as.user.uid, runs_as.user.gid)
        spec = self._spec(folder, order, runs_as)
        if order.pipeline is not None:
            # Its plan may differ from ours. No task of it runs without a command, and the previous owner has no lease.
            _make_space(folder.path, order.pipeline, spec)
        if order.secrets:
            folder.write_secrets({*folder.secrets(), *order.secrets.values()})
        folder.write_limits(self._limits.of(order.spec))
        folder.write_spec(spec)

    def _assign(self, folder: AttemptFolder, order: Order) -> RunsAs:
        try:
            return self.users.assign(folder.path, order.spec.get("user"))
        except UidsExhausted as error:
            self._exhausted_for = str(error)
            raise

    def _fill(self, folder: AttemptFolder, spec: Spec, order: Order) -> None:
        """Fill a folder that is not in place yet. This is a hot path: every system call counts."""
        root = str(folder.path)
        work = f"{root}/work"
        for path in (root, f"{root}/cmd", work, f"{work}/output"):
            os.mkdir(path, 0o700)
        if spec.sole_user and spec.gid is not None:
            make_passable_for(folder.path, spec.gid)
        else:
            os.chmod(root, 0o711)
        write_new(f"{work}/request.json", msgspec.json.encode(order.inputs))
        if order.spec.get("stdin") is not None:
            write_new(f"{root}/stdin", order.spec["stdin"].encode())
        if spec.uid is not None and spec.gid is not None:
            for path in (work, f"{work}/output", f"{work}/request.json"):
                os.chown(path, spec.uid, spec.gid)
        if order.files:
            _copy_in(folder.path / "work" / "input", order.files, spec)
        if order.pipeline is not None:
            _make_space(folder.path, order.pipeline, spec)
        if order.secrets:
            folder.write_secrets(order.secrets.values())
        folder.write_spares()
        folder.write_limits(self._limits.of(order.spec))
        write_new(f"{root}/spec", encode_spec(spec))

    def _spec(self, folder: AttemptFolder, order: Order, runs_as: RunsAs) -> Spec:
        work = str((folder.path / "work").absolute())
        user = runs_as.user
        programs = self._programs(folder, order, runs_as)
        return Spec(
            token=order.token,
            mark=order.identity.mark,
            tasks=programs.tasks,
            service=programs.service,
            hold=order.pipeline is not None,
            env=environment(order, work),
            cwd=work,
            uid=user.uid if user else None,
            gid=user.gid if user else None,
            limits=rlimits(self._limits.of(order.spec), own_user=runs_as.own),
            sole_user=runs_as.own,
            private=runs_as.private,
            output_cap=max(self._log_cap * OUTPUT_FACTOR, LEAST_OUTPUT),
            timeout=order.timeout,
            idle_timeout=order.idle_timeout,
            stop_grace=order.stop_grace,
            start_by=order.start_by,
            stop_after=order.stop_after,
        )

    def _programs(self, folder: AttemptFolder, order: Order, runs_as: RunsAs) -> Programs:
        if order.pipeline is None:
            return Programs(tasks=(WireTask(name="main", argv=tuple(order.spec["command"])),))
        space = (folder.path / SPACE).absolute()
        root = (runs_as.user.uid if runs_as.user else os.geteuid()) == 0
        socket = str(socket_folder(order.identity.mark, private=runs_as.private))
        return order.pipeline.programs(
            Place(tree=str(space / TREE), inputs=str(space / INPUTS), socket=socket, root=root)
        )

    # Sweeping

    async def left_over(self) -> Sequence[Identity]:
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
        swept = sweep_attempt(folder, identity.mark, marks_for=self._marks_for, uid=uid)
        self.users.free(folder.path, uid)
        return swept and checks_gone

    async def sweep_halves(self, older: float) -> int:
        """Remove incomplete folders whose makers must be dead, and free unused uids; refill the spare markers."""
        gone = await self.slowly(lambda: self._sweep_halves(older))
        await self.slowly(lambda: self.users.sweep(max(CLAIM_SECONDS, self._marks_for)))
        await self.slowly(self.markers.refill)
        return gone

    def _sweep_halves(self, older: float) -> int:
        gone = 0
        for entry in os.scandir(self.root):
            with contextlib.suppress(FileNotFoundError):
                if entry.name.startswith(".") and time.time() - entry.stat().st_mtime > older:
                    remove_tree(Path(entry.path))
                    gone += 1
        return gone


def sweep_attempt(folder: AttemptFolder, mark: str, *, marks_for: float, uid: int | None = None) -> bool:
    """Remove the remains of an attempt that is over; stop it first if it runs. Return whether that is done.

    The start marker stays for `marks_for` seconds, so that a late supervisor does not start the attempt again. `uid` is
    the attempt's own user, if it has one.
    """
    if not folder.path.exists():
        return True
    if folder.alive():
        started = folder.started()
        token = started.token if started else 1
        folder.send(Command(token=max(token, 1) + (1 << 40), verb="stop", kind="cancel"))
        return False
    buried = not (folder.path / "spec").exists()
    with contextlib.suppress(FileNotFoundError):
        if buried and time.time() - folder.path.stat().st_mtime < marks_for:
            return False
    if folder.started() and not folder.exit() and folder.kill_leftovers(mark, uid):
        return False
    remove_tree(socket_folder(mark))
    if buried:
        remove_tree(folder.path)
    else:
        folder.bury()
    return True


class Process:
    """One attempt on this host."""

    def __init__(self, runner: ProcessRunner, identity: Identity, *, stdout: int, stderr: int) -> None:
        self.identity = identity
        self.folder = runner.folder(identity)
        self._runner = runner
        self._log: FrameReader = self.folder.frames(stdout=stdout, stderr=stderr)
        self._child: asyncio.Future[int] | None = None
        self._watch: Watch | None = None

    @property
    def space(self) -> Path:
        return self.folder.path / SPACE

    def look(self) -> State:
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

    async def begun(self) -> None:
        """Wait until our supervisor has begun, or has exited because another one was first."""
        assert self._child is not None
        for step in _steps():
            if self._child.done():
                break
            if (self.folder.path / "started").exists():
                return
            await asyncio.wait([self._child], timeout=step)
        status = self._child.result()
        if self.look() in ("exited", "died"):
            return  # It ran and has ended already: the status is the command's.
        if status == ExitStatus.LEFT_LATE:
            raise TooLate
        if status == ExitStatus.LEFT_FULL:
            raise NoSpace("the supervisor had no space for its files: No space left on device")
        if status == ExitStatus.LEFT_BROKEN:
            raise CannotStart("start_failed", "the supervisor could not use the attempt's folder")
        if status in (ExitStatus.LEFT_HELD, ExitStatus.LEFT_STARTED):
            self._child = None
            await self._begun_by_another()
        elif self.look() == "missing":
            raise CannotStart("start_failed", f"the supervisor exited with status {status} before it began")

    async def _begun_by_another(self) -> None:
        """Wait for the supervisor that was first; it may still exit without a trace because it is too late."""
        for step in _steps():
            if not self.folder.alive() or (self.folder.path / "started").exists():
                break
            await asyncio.sleep(step)
        if self.look() == "missing":
            raise TooLate

    async def frames(self, most: int) -> Sequence[Frame]:
        try:
            if os.stat(self._log.path).st_size == self._log.position:
                return ()
        except FileNotFoundError:
            return ()
        return await self._runner.in_thread(lambda: self._log.read(most))

    async def tell(self, command: Command) -> str:
        try:
            return await self._runner.in_thread(lambda: self.folder.send(command))
        except FileNotFoundError:
            return ""  # The new owner has removed the folder: we will notice that the lease is lost.
        except OSError as error:
            raise EngineUnreachable(f"cannot write a command into the attempt's folder: {error.strerror}") from error

    def tell_now(self, command: Command) -> None:
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
            self._watch = Watch(self.folder, on_end)

    @property
    def over(self) -> bool:
        if self._child is not None:
            return self._child.done()
        return self._watch is not None and self._watch.over

    async def outputs(self, gathered: Gathered) -> None:
        if self.folder.left_nothing():
            return
        await self._runner.slowly(lambda: take_folder(self.folder.path / "work", gathered))

    async def limits(self) -> AttemptLimits:
        return await self._runner.in_thread(self.folder.limits)

    async def size(self, most: int) -> int:
        return await self._runner.measure(lambda: folder_size(self.folder.path, most))

    async def secrets(self) -> Sequence[str]:
        return await self._runner.in_thread(self.folder.secrets)

    async def collect(self) -> End | None:
        state = self.look()
        if state == "running":
            return None
        if state == "died":
            return await self._lost()
        if state == "forbidden":
            return End(cause=Cause.DRAINED)  # Nothing ran: a previous owner ended it just before we started it.
        if state == "missing":
            return End(cause=Cause.LOST, error=Error(code="lost", message="the attempt's folder is gone"))
        ended = self.folder.exit()
        assert ended is not None
        fell = ended.cause is ExitCause.SERVICE_ENDED
        return to_end(ended, await self._runner.in_thread(self.folder.service) if fell else b"")

    async def _lost(self) -> End | None:
        """Kill the processes of a supervisor that died without an exit record; then the attempt is lost."""
        started = await self._runner.in_thread(self.folder.started)
        rebooted = started is not None and started.boot_id != self._runner._boot
        if not rebooted:
            uid = self._runner.users.uid_of(self.folder.path)
            left = await self._runner.slowly(lambda: self.folder.kill_leftovers(self.identity.mark, uid))
            if left:
                return None
        message = "the host was rebooted" if rebooted else "its supervisor was killed, so its end cannot be known"
        return End(cause=Cause.LOST, error=Error(code="lost", message=message))

    async def remove(self, *, others_held_it: bool) -> None:
        """Remove the folder. If a suspended worker might still start it, the start marker stays for a while."""
        self.close()
        users, uid = self._runner.users, self._runner.users.uid_of(self.folder.path)
        over = [socket_folder(self.identity.mark)]
        if others_held_it:
            await self._runner.slowly(self.folder.bury)
        else:
            over.append(self.folder.path)
        await self._runner.removals.remove(*over)
        if uid is not None:
            await self._runner.in_thread(lambda: users.free(self.folder.path, uid))

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None


def _make_space(folder: Path, staging: Staging, spec: Spec) -> None:
    make_space(folder, staging, spec.uid, spec.gid)
    tree = folder / SPACE / TREE
    # In a private view the user has a line in /etc/passwd.
    if spec.uid is not None and spec.gid is not None and not spec.private and staging.prepare(tree, spec.uid):
        give(tree, spec.uid, spec.gid)


def _copy_in(folder: Path, files: Mapping[str, Path], spec: Spec) -> None:
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
    if error.errno in FULL:
        return NoSpace(message)
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


def environment(order: Order, work: str) -> Mapping[str, str]:
    """Build a child's environment from scratch; the job cannot override holdfast's variables."""
    return {
        "PATH": PATH,
        "HOME": work,
        "LANG": "C.UTF-8",
        **order.spec.get("env", {}),
        **order.secrets,
        "HOLDFAST_JOB_ID": order.identity.job,
        "HOLDFAST_ATTEMPT": str(order.identity.attempt),
        "HOLDFAST_LEASE_TOKEN": str(order.token),
        "HOLDFAST_WORK_DIR": work,
    }


def to_end(ended: Exit, service: bytes = b"") -> End:
    """Map a supervisor's exit record to an End. `service` is the last output of a service that ended by itself."""
    match ended.cause:
        case ExitCause.STOP_AFTER:
            message = "the supervisor stopped the attempt: no heartbeat reached it within stop_after"
            return End(cause=Cause.LOST, error=Error(code="lost", message=message))
        case ExitCause.INTERRUPTED if ended.stopped_by == "signal":
            message = "its supervisor was stopped by a signal from outside holdfast"
            return End(cause=Cause.LOST, error=Error(code="lost", message=message))
        case ExitCause.START_FAILED:
            missing = "could not run it: " in ended.text and ended.text.rpartition(": ")[2] in MISSING
            code = "command_missing" if missing else "start_failed"
            return End(cause=Cause.START_FAILED, error=Error(code=code, message=ended.text))
        case ExitCause.SERVICE_ENDED:
            last = service.decode("utf-8", "replace").strip()[-LAST_WORDS:]
            message = f"{ended.text}; it said: {last}" if last else ended.text
            return End(cause=Cause.EXIT, error=Error(code="service_ended", message=message))
        case ExitCause.FAILED:
            code, _, message = ended.text.partition(": ")
            return End(cause=Cause.EXIT, error=Error(code=code, message=message))
    kept = (ended.stdout_length - ended.stdout_dropped, ended.stderr_length - ended.stderr_dropped)
    return End(cause=Cause(ended.cause), exit_code=ended.code, signal=ended.signal, said=kept)
