"""Processes on this host, each under a supervisor that outlives the worker.

An attempt's folder is made under another name and renamed into place, so it is there whole or not at all. Whoever
starts a supervisor on it, and how often, one of them runs the command and once only: the supervisor's lock and its
`started` file decide. Where the worker is root, the command runs as a user of its own.
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
from holdfast.model import Cause, Error
from holdfast.runner.base import CannotStart, Confirm, End, EngineUnreachable, Identity, Order, State, TooLate
from holdfast.runner.children import Children, Watch
from holdfast.runner.folder import Exit, ExitCause, Folder, write_new
from holdfast.runner.frames import Frame, FrameReader
from holdfast.runner.host import StateFolder
from holdfast.runner.outputs import Gathered, remove_tree, take_folder
from holdfast.runner.removing import Removals
from holdfast.runner.space import INPUTS, SPACE, TREE, Place, Programs, make_space, socket_folder
from holdfast.runner.spec import Command, Spec, Task, encode_spec
from holdfast.runner.users import User, find_user

T = TypeVar("T")
log = logging.getLogger(__name__)

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
OUTPUT_FACTOR = 16
LEAST_OUTPUT = 64 * 1024 * 1024
"""Output is kept on disk up to so many times the log's cap: behind the cap only event lines are of interest."""
HELD, STARTED_BEFORE, UNUSABLE, LATE = 120, 121, 122, 123
EXHAUSTED = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM, errno.EIO, errno.EROFS}
)
EXHAUSTED_SECONDS = 10.0
"""For how long nothing is started on a host that had no room left."""
START_STEPS = (0.001, 0.001, 0.002, 0.002, 0.005, 0.005, 0.01)
MARK_SECONDS = 3600.0
"""How long the mark of an attempt that is over stays, at least: longer than any lease that might still start it."""
LAST_WORDS = 500
"""Of a service that ended, in the error that tells it."""
MISSING = ("No such file or directory", "Permission denied", "Exec format error", "Not a directory", "Is a directory")


class ProcessRunner:
    """Starts and finds processes in the state folder. `user` is whom commands run as; only root can change it."""

    capability = "process"

    def __init__(
        self,
        state: StateFolder,
        installation: str,
        *,
        user: User | None,
        log_cap: int,
        marks_for: float = MARK_SECONDS,
    ) -> None:
        self.domain = state.domain
        self.domains = state.domains
        self.root = state.attempts(installation)
        self._boot = state.boot
        self._user = user
        self._log_cap = log_cap
        self._marks_for = marks_for
        self._files = ThreadPoolExecutor(4, thread_name_prefix="holdfast-files")
        self._slow = ThreadPoolExecutor(4, thread_name_prefix="holdfast-outputs")
        self._children = Children()
        self.removals = Removals(self._children)
        self._exhausted_until = 0.0

    @property
    def away(self) -> str | None:
        return "this host had no room left a moment ago" if time.monotonic() < self._exhausted_until else None

    def doubt(self) -> None:
        self._exhausted_until = time.monotonic() + EXHAUSTED_SECONDS

    async def watch(self, changed: Callable[[], None]) -> None:
        """A host's own processes need no engine."""

    async def digest(self, spec: Mapping[str, Any], domain: str) -> None:
        """A host has no images."""

    def turn(self) -> AbstractAsyncContextManager[None]:
        return contextlib.nullcontext()

    async def start(self, order: Order, confirm: Confirm) -> "Process":
        """Start a supervisor; it asks nobody, and leaves by itself when it comes too late (`start_by`)."""
        process = Process(self, order.identity, stdout=0, stderr=0)
        if order.files:  # A copy may take long; what is put in place now is only given its spec below.
            await self.slowly(lambda: self._stage(process.folder, order))
        pid = await self.in_thread(lambda: self._stage_and_spawn(process.folder, order))
        process.watch_child(self._children.watch(pid))
        await process.begun()
        return process

    async def find(self, identity: Identity, domain: str, *, stdout: int, stderr: int) -> tuple[State, "Process"]:
        """Look at the folder. A lock alone says nothing: whoever holds it may still leave because it came too late."""
        process = Process(self, identity, stdout=stdout, stderr=stderr)
        for step in _steps():
            state = await self.in_thread(process.look)
            if state != "running" or (process.folder.path / "started").exists():
                return state, process
            await asyncio.sleep(step)
        raise AssertionError("unreachable")

    async def forbid(self, identity: Identity, domain: str) -> bool:
        try:
            return await self.in_thread(self.folder(identity).forbid)
        except OSError as error:
            raise EngineUnreachable(f"cannot mark the attempt's folder: {error.strerror}") from error

    async def in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._files, work)

    async def slowly(self, work: Callable[[], T]) -> T:
        """Do what may take long, beside all that must not wait for it: copying, removing, killing."""
        return await asyncio.get_running_loop().run_in_executor(self._slow, work)

    def folder(self, identity: Identity) -> Folder:
        return Folder(self.root / f"{identity.job}.{identity.attempt}")

    def close(self) -> None:
        self._files.shutdown(wait=False, cancel_futures=True)
        self._slow.shutdown(wait=False, cancel_futures=True)
        self._children.close()

    # Staging

    def _stage_and_spawn(self, folder: Folder, order: Order) -> int:
        self._stage(folder, order)
        return _spawn(folder)

    def _stage(self, folder: Folder, order: Order) -> None:
        """Put the whole folder in place; if one is there, give it this order's spec."""
        try:
            spec = self._spec(folder, order)
            if folder.path.exists():
                self._restage(folder, spec, order)
                return
            temporary = Folder(folder.path.with_name(f".{folder.path.name}.{os.urandom(4).hex()}"))
            try:
                self._fill(temporary, spec, order)
                temporary.path.rename(folder.path)
            except Invalid:
                remove_tree(temporary.path)
                raise
            except OSError as error:
                remove_tree(temporary.path)
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                    raise
                self._restage(folder, spec, order)
        except Invalid as error:
            raise CannotStart("contract_violation", str(error)) from error
        except OSError as error:
            raise _trouble(error, "cannot prepare the attempt's folder") from error

    def _restage(self, folder: Folder, spec: Spec, order: Order) -> None:
        """Another owner made the folder: it gets our spec, and keeps what is to be masked of both."""
        if order.pipeline is not None:
            # Its plan may be another than ours. Nothing of it runs without a word, and who had the word has no lease.
            make_space(folder.path, order.pipeline, spec.uid, spec.gid)
        if order.secrets:
            folder.write_secrets({*folder.secrets(), *order.secrets.values()})
        folder.write_spec(spec)

    def _fill(self, folder: Folder, spec: Spec, order: Order) -> None:
        """Fill a folder that nobody sees yet. Every call here counts: all jobs of a worker pass through it."""
        root = str(folder.path)
        work = f"{root}/work"
        for path in (root, f"{root}/cmd", work, f"{work}/output"):
            os.mkdir(path, 0o700)
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
            make_space(folder.path, order.pipeline, spec.uid, spec.gid)
        if order.secrets:
            folder.write_secrets(order.secrets.values())
        write_new(f"{root}/spec", encode_spec(spec))

    def _spec(self, folder: Folder, order: Order) -> Spec:
        work = str((folder.path / "work").absolute())
        user = self._user
        if order.spec.get("user") is not None:
            user = find_user(order.spec["user"])
        programs = self._programs(folder, order, user)
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
            output_cap=max(self._log_cap * OUTPUT_FACTOR, LEAST_OUTPUT),
            timeout=order.timeout,
            idle_timeout=order.idle_timeout,
            stop_grace=order.stop_grace,
            start_by=order.start_by,
            stop_after=order.stop_after,
        )

    def _programs(self, folder: Folder, order: Order, user: User | None) -> Programs:
        if order.pipeline is None:
            return Programs(tasks=(Task(name="main", argv=tuple(order.spec["command"])),))
        space = (folder.path / SPACE).absolute()
        root = (user.uid if user else os.geteuid()) == 0
        socket = str(socket_folder(order.identity.mark))
        return order.pipeline.programs(
            Place(tree=str(space / TREE), inputs=str(space / INPUTS), socket=socket, root=root)
        )

    # Sweeping

    async def left_over(self) -> Sequence[Identity]:
        """Return the attempts whose folders are here."""
        return await self.in_thread(lambda: [found for path in os.listdir(self.root) if (found := self._named(path))])

    def _named(self, name: str) -> Identity | None:
        job, _, attempt = name.rpartition(".")
        if not job or job.startswith(".") or not attempt.isdigit():
            return None
        return Identity(self.root.name, job, int(attempt))

    def to_sweep(self, over: Sequence[Identity], found: int) -> Sequence[Identity]:
        return over

    async def sweep(self, identity: Identity) -> bool:
        """Remove what is left of an attempt whose end is in the record; stop it first if it runs. Say if it is gone."""
        return await self.slowly(lambda: self._sweep(identity))

    def _sweep(self, identity: Identity) -> bool:
        return sweep_attempt(self.folder(identity), identity.mark, marks_for=self._marks_for)

    async def sweep_halves(self, older: float) -> int:
        """Remove folders that were never finished being made: whoever made them is long gone."""
        return await self.slowly(lambda: self._sweep_halves(older))

    def _sweep_halves(self, older: float) -> int:
        gone = 0
        for entry in os.scandir(self.root):
            with contextlib.suppress(FileNotFoundError):
                if entry.name.startswith(".") and time.time() - entry.stat().st_mtime > older:
                    remove_tree(Path(entry.path))
                    gone += 1
        return gone


def sweep_attempt(folder: Folder, mark: str, *, marks_for: float) -> bool:
    """Remove what is left of an attempt that is over; stop it first if it runs. Say whether that is done.

    What stays for `marks_for` seconds is the mark that keeps a supervisor that comes late from starting it again.
    """
    if folder.alive():
        started = folder.started()
        token = started.token if started else 1
        folder.send(Command(token=max(token, 1) + (1 << 40), verb="stop", kind="cancel"))
        return False
    buried = not (folder.path / "spec").exists()
    with contextlib.suppress(FileNotFoundError):
        if buried and time.time() - folder.path.stat().st_mtime < marks_for:
            return False
    if folder.started() and not folder.exit() and folder.kill_leftovers(mark):
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
        """Read the folder. Whether it lives is looked at first: it may end while we look, but not begin again."""
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
        """Wait until the supervisor that we started has begun, or left because another one was first."""
        assert self._child is not None
        for step in _steps():
            if self._child.done():
                break
            if (self.folder.path / "started").exists():
                return
            await asyncio.wait([self._child], timeout=step)
        status = self._child.result()
        if self.look() in ("exited", "died"):
            return  # It ran, and was quick: the status is the command's own.
        if status == LATE:
            raise TooLate
        if status == UNUSABLE:
            raise CannotStart("start_failed", "the supervisor could not use the attempt's folder")
        if status in (HELD, STARTED_BEFORE):
            self._child = None
            await self._begun_by_another()
        elif self.look() == "missing":
            raise CannotStart("start_failed", f"the supervisor left with status {status} before it began")

    async def _begun_by_another(self) -> None:
        """The one that was first may still find that it is too late, and leave without a trace."""
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
            return ""  # Whoever owns it by now has cleared it up, while we slept: the lease will say so.

    def tell_now(self, command: Command) -> None:
        """Leave a command from any thread; one that cannot be left is said again with the next heartbeat."""
        try:
            self.folder.send(command)
        except OSError as error:
            log.warning("cannot speak to the supervisor of %s: %s", self.identity.mark, error.strerror)

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

    async def secrets(self) -> Sequence[str]:
        return await self._runner.in_thread(self.folder.secrets)

    async def collect(self) -> End | None:
        state = self.look()
        if state == "running":
            return None
        if state == "died":
            return await self._lost()
        if state == "forbidden":
            return End(cause=Cause.DRAINED)  # Nothing ran: a former owner ended it just before we came to start it.
        if state == "missing":
            return End(cause=Cause.LOST, error=Error(code="lost", message="nothing is left of the attempt"))
        ended = self.folder.exit()
        assert ended is not None
        fell = ended.cause is ExitCause.SERVICE_ENDED
        return to_end(ended, await self._runner.in_thread(self.folder.service) if fell else b"")

    async def _lost(self) -> End | None:
        """The supervisor is dead and left no record: kill what is verifiably left, then it is lost."""
        started = await self._runner.in_thread(self.folder.started)
        rebooted = started is not None and started.boot_id != self._runner._boot
        if not rebooted:
            left = await self._runner.slowly(lambda: self.folder.kill_leftovers(self.identity.mark))
            if left:
                return None
        message = "the host was started anew" if rebooted else "its supervisor was killed, so its end cannot be known"
        return End(cause=Cause.LOST, error=Error(code="lost", message=message))

    async def remove(self, *, others_held_it: bool) -> None:
        """Remove the folder. Where a sleeping worker might still start it, its mark stays for a while."""
        self.close()
        over = [socket_folder(self.identity.mark)]
        if others_held_it:
            await self._runner.slowly(self.folder.bury)
        else:
            over.append(self.folder.path)
        await self._runner.removals.remove(*over)

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None


def _copy_in(folder: Path, files: Mapping[str, Path], spec: Spec) -> None:
    """Copy what a job was given: its own, to read and to change."""
    folder.mkdir(mode=0o700)
    for name, source in files.items():
        target = folder / name
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        shutil.copyfile(source, target)
        target.chmod(0o600)
    if spec.uid is not None and spec.gid is not None:
        for path in (folder, *folder.rglob("*")):
            os.chown(path, spec.uid, spec.gid)


def _spawn(folder: Folder) -> int:
    try:
        return folder.start()
    except OSError as error:
        raise _trouble(error, "cannot start a supervisor") from error


def _trouble(error: OSError, what: str) -> Exception:
    """A host that is full or exhausted is no fault of the job, which waits for a better moment or another host."""
    message = f"{what}: {error.strerror}"
    return EngineUnreachable(message) if error.errno in EXHAUSTED else CannotStart("start_failed", message)


def _steps() -> Any:
    yield from START_STEPS
    while True:
        yield 0.02


def environment(order: Order, work: str) -> Mapping[str, str]:
    """Build a child's environment from nothing; what holdfast says cannot be overridden."""
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
    """What a supervisor's `exit` means; `service` is what its service said, if that is why."""
    match ended.cause:
        case ExitCause.STOP_AFTER:
            message = "stopped by itself: no heartbeat reached it in time"
            return End(cause=Cause.LOST, error=Error(code="lost", message=message))
        case ExitCause.INTERRUPTED if ended.stopped_by == "signal":
            message = "its supervisor was told to stop, not by holdfast"
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
