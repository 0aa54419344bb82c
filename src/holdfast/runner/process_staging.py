"""Makes the folder of a process attempt: its files, its user, its spec.

The folder is made under another name and renamed into place, so it is never incomplete. If another owner made it first,
only the spec is replaced; which supervisor runs it is decided by the supervisor's lock and its `started` file.
"""

import errno
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from holdfast.errors import CacheFull, Invalid
from holdfast.limits import LimitSettings
from holdfast.permissions import make_file, make_folder, make_passable_for
from holdfast.runner.artifacts import InputFile
from holdfast.runner.attempt_folder import FULL, AttemptFolder, encode_secrets, write_new
from holdfast.runner.attempt_users import AttemptUsers, RunsAs
from holdfast.runner.base import CannotStart, EngineUnreachable, NoSpace, StartRequest, StartTooLate
from holdfast.runner.collected_outputs import BLOCK
from holdfast.runner.launcher import LaunchRecords, fits
from holdfast.runner.ownership import give, give_if_there
from holdfast.runner.spec_limits import LEAST_OUTPUT, OUTPUT_FACTOR, rlimits
from holdfast.runner.supervisor.protocol import LaunchKey
from holdfast.runner.tree_removal import remove_tree
from holdfast.runner.wire import PATH, SupervisorSpec, WireTask, encode_spec, micros
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

EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM, errno.EIO, errno.EROFS})
"""Errors of a host that lacks something else than disk space."""


class ProcessStaging:
    """Makes the folders of attempts. `command` returns the program that a spec asks for, and its arguments."""

    def __init__(
        self,
        users: AttemptUsers,
        limits: LimitSettings,
        command: Callable[[Mapping[str, Any]], Sequence[str]],
        *,
        log_cap: int,
    ) -> None:
        self._users = users
        self._limits = limits
        self._command = command
        self._log_cap = log_cap

    def stage(self, folder: AttemptFolder, request: StartRequest) -> None:
        """Make the attempt's folder; if it exists, write the spec of this request into it."""
        try:
            if folder.path.exists() or not self._make(folder, request):
                self._restage(folder, request)
        except Invalid as error:
            raise CannotStart("contract_violation", str(error)) from error
        except CacheFull as error:
            raise NoSpace(f"cannot prepare the attempt's folder: {error}") from error
        except OSError as error:
            raise start_error(error, "cannot prepare the attempt's folder") from error

    def launch_records(self, folder: AttemptFolder, request: StartRequest) -> LaunchRecords | None:
        """Return the message that makes and starts a new attempt; None if its folder must be staged here.

        May claim a uid, which `give_back` frees if the attempt was not started.
        """
        try:
            runs_as = self._assign(folder, request)
            records = self._records(folder, request, runs_as)
        except Invalid as error:
            raise CannotStart("contract_violation", str(error)) from error
        except OSError as error:
            raise start_error(error, "cannot prepare the attempt's folder") from error
        if not fits(records):
            self.give_back(folder, records)
            return None
        return records

    def _records(self, folder: AttemptFolder, request: StartRequest, runs_as: RunsAs) -> LaunchRecords:
        spec = self._spec(folder, request, runs_as)
        records: dict[LaunchKey, bytes] = {
            "start_by": b"%d" % micros(request.start_by),
            "folder": os.fsencode(folder.path),
            "request": msgspec.json.encode(request.inputs),
            "limits": msgspec.json.encode(self._limits.of(request.spec)),
            "spec": encode_spec(spec),
        }
        if spec.uid is not None and spec.gid is not None:
            records["uid"], records["gid"] = b"%d" % spec.uid, b"%d" % spec.gid
        if runs_as.own and spec.uid is not None:
            records["own"] = b"1"
            records["claim"] = os.fsencode(self._users.claim_of(spec.uid))
        if request.spec.get("stdin") is not None:
            records["stdin"] = request.spec["stdin"].encode()
        if request.secrets:
            records["secrets"] = encode_secrets(request.secrets.values())
        return records

    def give_back(self, folder: AttemptFolder, records: LaunchRecords) -> None:
        """Free the uid of an attempt that was not started."""
        if "own" in records:
            self._users.free(folder.path, int(records["uid"]))

    def _make(self, folder: AttemptFolder, request: StartRequest) -> bool:
        """Make the folder under another name and rename it into place; False if another owner was faster."""
        runs_as = self._assign(folder, request)
        temporary = AttemptFolder(folder.path.with_name(f".{folder.path.name}.{os.urandom(4).hex()}"))
        try:
            self._fill(temporary, self._spec(folder, request, runs_as), request)
            os.rename(temporary.path, folder.path)
        except BaseException as error:
            remove_tree(temporary.path)
            if runs_as.own and runs_as.user is not None:
                self._users.free(folder.path, runs_as.user.uid)
            if isinstance(error, OSError) and error.errno in (errno.EEXIST, errno.ENOTEMPTY):
                return False
            raise
        if runs_as.own and self._users.uid_of(folder.path) is None:
            raise StartTooLate  # This worker was suspended until its uid was freed. The retry claims another one.
        return True

    def _restage(self, folder: AttemptFolder, request: StartRequest) -> None:
        """Write our spec into a folder that another owner made, and keep the secrets of both for masking."""
        runs_as = self._users.found(folder.path)
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
        return self._users.assign(folder.path, request.spec.get("user"))

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
            write_new(f"{root}/secrets", encode_secrets(request.secrets.values()))
        folder.write_spares()
        write_new(f"{root}/limits", msgspec.json.encode(self._limits.of(request.spec)))
        write_new(f"{root}/spec", encode_spec(spec))

    def _spec(self, folder: AttemptFolder, request: StartRequest, runs_as: RunsAs) -> SupervisorSpec:
        work = f"{folder.path}/work"
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
            return Programs(tasks=(WireTask(name="main", argv=tuple(self._command(request.spec))),))
        workspace = folder.path / WORKSPACE
        root = (runs_as.user.uid if runs_as.user else os.geteuid()) == 0
        socket = str(socket_folder(request.identity.mark, private=runs_as.private))
        return request.pipeline.programs(
            WorkspacePaths(tree=str(workspace / TREE), inputs=str(workspace / INPUTS), socket=socket, root=root)
        )


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


def start_error(error: OSError, what: str) -> Exception:
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
