"""Readiness checks: commands that run on the worker's host before a job starts, each under its own supervisor.

Each run has a folder next to the attempt folders: `JOB.ATTEMPT.check-RANDOM`. Its supervisor enforces the time limit
and the output cap, kills all processes that the check started, and stops the check if the lease is no longer renewed.
The remains of a dead worker's checks are swept with the attempt.
"""

import asyncio
import contextlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from holdfast.limits import AttemptLimits
from holdfast.permissions import make_passable_for
from holdfast.runner.attempt_folder import FULL, AttemptFolder, ExitRecord, write_new
from holdfast.runner.attempt_users import AttemptUsers, RunsAs
from holdfast.runner.base import EngineUnreachable, Identity, NoSpace
from holdfast.runner.exits import ProcessExits
from holdfast.runner.frames import Stream
from holdfast.runner.supervisor.protocol import ExitCause, ExitStatus, Limit
from holdfast.runner.tree_removal import remove_tree
from holdfast.runner.wire import PATH, Command, SupervisorSpec, WireTask, encode_spec

CHECK = "check-"
KEPT_BYTES = 64 * 1024
"""Maximum output that is kept of one run."""
MOST_FILE = 64 * 1024 * 1024
MOST_PROCESSES = 256
DRAIN_SECONDS = 0.2
POLL_SECONDS = 0.2
KILL_SECONDS = 5.0
"""How long to wait for the end of a killed run; after that it is left to the sweep."""
OVER_TOKEN = 1 << 60
"""Higher than the token of any lease, so that a command with it is never refused."""


class CheckRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a check. `timeout` is in seconds. `user` is the one that the job names; None: as for any attempt."""

    identity: Identity
    token: int
    command: tuple[str, ...]
    timeout: float
    user: str | None


class CheckResult(msgspec.Struct, frozen=True, kw_only=True):
    """How a run ended: whether it succeeded, the reason if not, and up to KEPT_BYTES of its output."""

    ready: bool
    timed_out: bool = False
    reason: str = ""
    stdout: bytes = b""
    stderr: bytes = b""
    cut: bool = False
    """Whether some of its output was not kept."""


class ReadinessChecks:
    """Runs checks in the attempts folder of one installation, as users that are assigned as for attempts."""

    def __init__(self, root: Path, users: AttemptUsers, children: ProcessExits, limits: AttemptLimits) -> None:
        self._root = root
        self._users = users
        self._limits = limits
        self._children = children

    async def run(
        self, request: CheckRequest, *, trusted_until: Callable[[], float], unwanted: Callable[[], bool]
    ) -> CheckResult:
        """Run a check once. It is stopped at `trusted_until`, a time of CLOCK_BOOTTIME that moves while it runs.

        Raise CannotStart if its user cannot be used here, NoSpace if the disk is full and it did not run.
        """
        folder = AttemptFolder(
            self._root / f"{request.identity.job}.{request.identity.attempt}.{CHECK}{os.urandom(4).hex()}"
        )
        try:
            deadline = trusted_until()
            pid = await asyncio.to_thread(self._stage_and_spawn, folder, request, deadline)
            status = self._children.watch(pid)
            await self._attend(folder, request, status, deadline, trusted_until, unwanted)
            if status.done() and status.result() == ExitStatus.LEFT_FULL and not folder.exit():
                await asyncio.to_thread(self._remove, folder)
                raise NoSpace("cannot run a readiness check: No space left on device")
            return await asyncio.to_thread(_end_of, folder)
        except OSError as error:
            if error.errno in FULL:
                raise NoSpace(f"cannot run a readiness check: {error.strerror}") from error
            return CheckResult(ready=False, reason=f"it could not be started: {error.strerror}")
        except EngineUnreachable as error:
            return CheckResult(ready=False, reason=str(error))
        finally:
            await asyncio.shield(asyncio.to_thread(sweep_check, folder, self._users))

    async def _attend(
        self,
        folder: AttemptFolder,
        request: CheckRequest,
        status: "asyncio.Future[int]",
        deadline: float,
        trusted_until: Callable[[], float],
        unwanted: Callable[[], bool],
    ) -> None:
        """Wait for the end. Extend the deadline while the lease is renewed; kill a check that is no longer needed."""
        while not status.done() and not unwanted():
            await asyncio.wait([status], timeout=POLL_SECONDS)
            if (later := trusted_until()) > deadline:
                deadline = later
                beat = Command(token=request.token, verb="beat", stop_after=later)
                await asyncio.to_thread(folder.send, beat)
        if not status.done():
            await asyncio.to_thread(folder.send, Command(token=request.token, verb="kill", kind="cancel"))
            await asyncio.wait([status], timeout=KILL_SECONDS)

    def _remove(self, folder: AttemptFolder) -> None:
        """Remove a run that never began, and whose supervisor has exited: nobody else starts it."""
        uid = self._users.uid_of(folder.path)
        remove_tree(folder.path)
        self._users.free(folder.path, uid)

    async def clear(self, identity: Identity) -> bool:
        """Stop checks that previous owners of an attempt left; return whether all are gone."""
        return await asyncio.to_thread(sweep_checks, self._root, identity, self._users)

    def _stage_and_spawn(self, folder: AttemptFolder, request: CheckRequest, deadline: float) -> int:
        """Make the folder under another name, rename it into place, and start a supervisor on it."""
        runs_as = self._users.assign(folder.path, request.user)
        temporary = folder.path.with_name(f".{folder.path.name}.{os.urandom(4).hex()}")
        try:
            _fill(temporary, _spec(folder, request, runs_as, _rlimits(self._limits, runs_as), deadline))
            temporary.rename(folder.path)
        except BaseException:
            remove_tree(temporary)
            if runs_as.own and runs_as.user is not None:
                self._users.free(folder.path, runs_as.user.uid)
            raise
        if runs_as.own and self._users.uid_of(folder.path) is None:
            raise EngineUnreachable(
                "its uid was freed before it could start"
            )  # This worker was suspended for very long.
        return folder.start()


def identity_in(root: Path, name: str) -> Identity | None:
    """Return the attempt that the folder of a check belongs to; None for other folders."""
    job, attempt, kind = (*name.split("."), "", "")[:3]
    if not job or not attempt.isdigit() or not kind.startswith(CHECK) or name.count(".") != 2:
        return None
    return Identity(root.name, job, int(attempt))


def sweep_checks(root: Path, identity: Identity, users: AttemptUsers) -> bool:
    """Remove all checks of an attempt. Return whether none is left."""
    prefix = f"{identity.job}.{identity.attempt}.{CHECK}"
    with contextlib.suppress(FileNotFoundError):
        found = [name for name in os.listdir(root) if name.startswith(prefix)]
        return sum(sweep_check(AttemptFolder(root / name), users) for name in found) == len(found)
    return True


def sweep_check(folder: AttemptFolder, users: AttemptUsers | None = None) -> bool:
    """Remove the remains of one run; kill it first if it is still running. Return whether it is gone.

    With `users` its uid is freed; otherwise the sweep of uids frees it later.
    """
    if not folder.path.exists():
        return True
    if folder.alive():
        with contextlib.suppress(FileNotFoundError):
            folder.send(Command(token=OVER_TOKEN, verb="kill", kind="cancel"))
        return False
    if not folder.exit() and not folder.started() and not folder.forbid():
        return False  # A supervisor is about to start.
    uid = None if users is None else users.uid_of(folder.path)
    if folder.started() and not folder.exit() and folder.kill_leftovers(mark_of(folder), uid):
        return False
    remove_tree(folder.path)
    if users is not None:
        users.free(folder.path, uid)
    return not folder.path.exists()


def mark_of(folder: AttemptFolder) -> str:
    """Return the mark in the environment of every process of a run."""
    return "/".join((folder.path.parent.name, *folder.path.name.split(".")))


def _fill(path: Path, spec: SupervisorSpec) -> None:
    for part in (path, path / "cmd", path / "work"):
        part.mkdir(mode=0o700)
    if spec.sole_user and spec.gid is not None:
        make_passable_for(path, spec.gid)
    else:
        path.chmod(0o711)
    if spec.uid is not None and spec.gid is not None:
        os.chown(path / "work", spec.uid, spec.gid)
    write_new(path / "spec", encode_spec(spec))


def _rlimits(limits: AttemptLimits, runs_as: RunsAs) -> Mapping[Limit, int]:
    """Return the limits of a check: at most those of an attempt, and lower where a check needs little."""
    found: dict[Limit, int] = {"core": 0, "fsize": min(MOST_FILE, limits.file_size or MOST_FILE)}
    if limits.memory is not None:
        found["data"] = limits.memory
    if runs_as.own:  # The kernel counts all processes of a user.
        found["nproc"] = min(MOST_PROCESSES, limits.pids or MOST_PROCESSES)
    return found


def _spec(
    folder: AttemptFolder, request: CheckRequest, runs_as: RunsAs, limits: Mapping[Limit, int], deadline: float
) -> SupervisorSpec:
    user = runs_as.user
    work = str((folder.path / "work").absolute())
    return SupervisorSpec(
        token=request.token,
        mark=mark_of(folder),
        tasks=(WireTask(name="check", argv=request.command),),
        env={
            "PATH": PATH,
            "HOME": work,
            "LANG": "C.UTF-8",
            "HOLDFAST_JOB_ID": request.identity.job,
            "HOLDFAST_ATTEMPT": str(request.identity.attempt),
            "HOLDFAST_WORK_DIR": work,
        },
        cwd=work,
        uid=user.uid if user else None,
        gid=user.gid if user else None,
        sole_user=runs_as.own,
        private=runs_as.private,
        limits=limits,
        output_cap=KEPT_BYTES,
        timeout=request.timeout,
        stop_grace=0.0,
        drain=DRAIN_SECONDS,
        start_by=deadline,
        stop_after=deadline,
    )


def _end_of(folder: AttemptFolder) -> CheckResult:
    ended = folder.exit()
    if ended is None:
        if folder.started() is None:
            return CheckResult(ready=False, reason="it could not be started in time")
        return CheckResult(ready=False, reason="its supervisor was killed")
    said: dict[Stream, bytes] = {Stream.STDOUT: b"", Stream.STDERR: b""}
    for frame in folder.frames().read(2 * KEPT_BYTES):
        if frame.stream in said:
            said[frame.stream] += frame.data
    return CheckResult(
        ready=ended.cause is ExitCause.EXIT and ended.code == 0,
        timed_out=ended.cause is ExitCause.TIMED_OUT,
        reason=_reason(ended),
        stdout=said[Stream.STDOUT],
        stderr=said[Stream.STDERR],
        cut=ended.stdout_dropped + ended.stderr_dropped > 0,
    )


def _reason(ended: ExitRecord) -> str:
    match ended.cause:
        case ExitCause.EXIT | ExitCause.OUT_OF_MEMORY if ended.signal is not None:
            return f"ended by signal {ended.signal}"
        case ExitCause.EXIT:
            return f"exit code {ended.code}"
        case ExitCause.START_FAILED:
            return ended.text
        case ExitCause.TIMED_OUT:
            return "it did not answer"
    return "the check was stopped"
