"""The configuration of a container: name, labels, limits, files of its volume. The only I/O reads the supervisor.

By default a container has no network, no capabilities, no new privileges, a read-only root filesystem, and limited
memory, processors and processes.
"""

import functools
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from holdfast import decoding
from holdfast.errors import Invalid
from holdfast.limits import FILES, AttemptLimits
from holdfast.privileges import names_root
from holdfast.runner import supervisor
from holdfast.runner.artifacts import InputFile
from holdfast.runner.base import CannotStart, ContainerLimits, Identity, StartRequest
from holdfast.runner.docker.archive import Archive
from holdfast.runner.docker.engine import ImageInfo
from holdfast.runner.spec_limits import rlimits
from holdfast.runner.users import User
from holdfast.runner.wire import PATH, SupervisorSpec, WireTask, encode_spec
from holdfast.runner.workspace import INPUTS, TREE, WORKSPACE, Programs, WorkspacePaths

VOLUME = "/holdfast"
PROGRAM = f"{VOLUME}/supervisor"
ATTEMPT = f"{VOLUME}/attempt"
WORK = f"{ATTEMPT}/work"
INSTALLATION, JOB, NUMBER, HASH = (f"holdfast.{name}" for name in ("installation", "job", "attempt", "spec"))
SOCKET = "/tmp/service"
NO_NETWORK = "none"
NOBODY = "65532"
WORKSPACE_LABEL = "holdfast.workspace"
LIMITS_LABEL = "holdfast.limits"
UNITS = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
LOG = {"Type": "json-file", "Config": {"max-size": "8m", "max-file": "3"}}
"""With a single file, output that is written during a rotation is lost. The volume has all output."""
UNTOUCHED = 1
"""Modification time of a work or output folder in which the job has created nothing."""
STOP_SECONDS = 5
"""Seconds that an engine gives the supervisor at shutdown, in addition to the job's own grace."""


class EngineClock(msgspec.Struct, frozen=True):
    """A reading of the engine's wall clock, and our CLOCK_BOOTTIME when it arrived, which is not earlier."""

    theirs: float
    ours: float

    def at(self, moment: float) -> float:
        """Convert our time to the engine's; the result is never too late."""
        return self.theirs + (moment - self.ours)


def name_of(identity: Identity) -> str:
    return f"holdfast-{identity.installation[:8]}-{identity.job}-{identity.attempt}"


def labels_of(identity: Identity) -> Mapping[str, str]:
    return {INSTALLATION: identity.installation, JOB: identity.job, NUMBER: str(identity.attempt)}


def identity_in(labels: Mapping[str, str]) -> Identity | None:
    if INSTALLATION not in labels or JOB not in labels or not labels.get(NUMBER, "").isdigit():
        return None
    return Identity(labels[INSTALLATION], labels[JOB], int(labels[NUMBER]))


def hash_of(request: StartRequest) -> str:
    """Hash what the caller asked for. Tokens and deadlines are left out, because they change with every owner."""
    whole = msgspec.json.encode(
        [request.spec, request.inputs, request.timeout, request.idle_timeout], order="deterministic"
    )
    return hashlib.sha256(whole).hexdigest()


def to_bytes(size: str) -> int:
    """Parse an amount of memory such as 512m."""
    unit = UNITS.get(size[-1].lower(), 1)
    return int(size[:-1] if unit > 1 else size) * unit


def limits_in(request: StartRequest, limits: ContainerLimits) -> AttemptLimits:
    """Return the limits of files; the engine enforces those of memory and processes."""
    try:
        return limits.attempt.of(request.spec, FILES)
    except Invalid as error:
        raise CannotStart("contract_violation", str(error)) from error


def limits_from(labels: Mapping[str, str]) -> AttemptLimits:
    """Return the limits that a container was created with; none if an older version created it."""
    return decoding.decode(labels.get(LIMITS_LABEL, "{}").encode(), AttemptLimits)


def user_in(request: StartRequest) -> str:
    return request.spec.get("user") or NOBODY


def to_user(name: str, passwd: bytes | None = None) -> User | None:
    """Parse `uid` or `uid:gid`, or look up a name in an image's list of users; None if it is not there."""
    uid, _, gid = name.partition(":")
    if uid.isdecimal() and (gid or uid).isdecimal():
        return User(int(uid), int(gid or uid))
    for line in (passwd or b"").decode("utf-8", "replace").splitlines():
        fields = line.split(":")
        if len(fields) > 3 and fields[0] == name and fields[2].isdigit() and fields[3].isdigit():
            return User(int(fields[2]), int(fields[3]))
    return None


def root_group(group: bytes) -> Sequence[str]:
    """Return the members of root's group in an image's list of groups."""
    lines = [line.split(":") for line in group.decode("utf-8", "replace").splitlines()]
    members = [fields[3] for fields in lines if len(fields) > 3 and names_root(fields[2])]
    return [name.strip() for names in members for name in names.split(",")]


def config_of(
    request: StartRequest, image: ImageInfo, limits: ContainerLimits, workspace: Path | None, hosts: Path | None = None
) -> Mapping[str, Any]:
    """Return the body of the call that creates a container.

    `workspace` is the path of the workspace on the host; `hosts` that of the file for /etc/hosts, if the engine need
    not set up a network sandbox.
    """
    labels = labels_of(request.identity)
    user = to_user(user_in(request))
    return {
        "Image": image.id,
        "User": f"{user.uid}:{user.gid}" if user else user_in(request),
        "Entrypoint": [PROGRAM, ATTEMPT, "--copy"],
        "Cmd": [],
        "WorkingDir": "/",
        "Labels": {
            **labels,
            HASH: hash_of(request),
            LIMITS_LABEL: msgspec.json.encode(limits_in(request, limits)).decode(),
            **({WORKSPACE_LABEL: str(workspace)} if workspace else {}),
        },
        "Healthcheck": {"Test": ["NONE"]},
        "StopSignal": "SIGTERM",
        "StopTimeout": int(request.stop_grace) + STOP_SECONDS,
        "NetworkDisabled": hosts is not None,
        "HostConfig": _host_config(request.spec, limits, user, _mounts(labels, workspace, hosts)),
    }


def _host_config(
    asked: Mapping[str, Any], limits: ContainerLimits, user: User | None, mounts: Sequence[Mapping[str, Any]]
) -> Mapping[str, Any]:
    """Return what the container may use of its host: limits, mounts, and neither privileges nor a restart."""
    memory = to_bytes(asked.get("memory") or limits.memory)
    return {
        "AutoRemove": False,
        "RestartPolicy": {"Name": "no"},
        "NetworkMode": asked.get("network") or NO_NETWORK,
        "CapDrop": ["ALL"],
        "SecurityOpt": ["no-new-privileges"],
        "ReadonlyRootfs": True,
        "Tmpfs": {"/tmp": tmpfs_for(user)},
        "Memory": memory,
        "MemorySwap": memory,
        "NanoCpus": int((asked.get("cpus") or limits.cpus) * 1e9),
        "PidsLimit": asked.get("pids") or limits.pids,
        "Init": False,
        "LogConfig": LOG,
        "Mounts": mounts,
    }


def _mounts(labels: Mapping[str, str], workspace: Path | None, hosts: Path | None) -> Sequence[Mapping[str, Any]]:
    # A volume without a name is removed together with its container.
    mounts: list[Mapping[str, Any]] = [
        {"Type": "volume", "Target": VOLUME, "VolumeOptions": {"NoCopy": True, "Labels": labels}}
    ]
    if workspace is not None:
        mounts.append({"Type": "bind", "Source": str(workspace), "Target": f"{ATTEMPT}/{WORKSPACE}"})
    if hosts is not None:
        mounts.append({"Type": "bind", "Source": str(hosts), "Target": "/etc/hosts", "ReadOnly": True})
    return mounts


def tmpfs_for(user: User | None) -> str:
    """Return the mount options of /tmp. The user owns it, because the image's mode is kept and may exclude others."""
    owner = f",uid={user.uid},gid={user.gid}" if user else ""
    return f"rw,nosuid,nodev,exec,mode=1777{owner}"


def spec_of(
    request: StartRequest, image: ImageInfo, user: User, clock: EngineClock, *, limits: ContainerLimits, output_cap: int
) -> SupervisorSpec:
    programs = programs_of(request, image, user)
    return SupervisorSpec(
        token=request.token,
        mark=request.identity.mark,
        tasks=programs.tasks,
        service=programs.service,
        hold=request.pipeline is not None,
        env=environment(request, image),
        cwd=image.folder if image.folder not in ("", "/") else WORK,
        limits=rlimits(limits_in(request, limits)),
        output_cap=output_cap,
        timeout=request.timeout,
        idle_timeout=request.idle_timeout,
        stop_grace=request.stop_grace,
        clock="realtime",
        start_by=clock.at(request.start_by),
        stop_after=None if request.stop_after is None else clock.at(request.stop_after),
    )


def programs_of(request: StartRequest, image: ImageInfo, user: User) -> Programs:
    if request.pipeline is None:
        return Programs(tasks=(WireTask(name="main", argv=argv_of(request, image)),))
    workspace = f"{ATTEMPT}/{WORKSPACE}"
    return request.pipeline.programs(
        WorkspacePaths(tree=f"{workspace}/{TREE}", inputs=f"{workspace}/{INPUTS}", socket=SOCKET, root=user.uid == 0)
    )


def argv_of(request: StartRequest, image: ImageInfo) -> tuple[str, ...]:
    """Return the arguments as `docker run` does: the image's entrypoint, then the job's or image's command."""
    command: Sequence[str] = request.spec.get("command") or image.command
    argv = (*image.entrypoint, *command)
    if not argv:
        raise CannotStart("command_missing", f"image {request.spec['image']} has no command of its own: give one")
    return argv


def environment(request: StartRequest, image: ImageInfo) -> Mapping[str, str]:
    """Return the image's environment, then the job's; the job cannot override holdfast's variables."""
    own = dict(entry.split("=", 1) for entry in image.env if "=" in entry)
    return {
        "PATH": PATH,
        "LANG": "C.UTF-8",
        **own,
        "HOME": "/tmp",
        **request.spec.get("env", {}),
        **request.secrets,
        "HOLDFAST_JOB_ID": request.identity.job,
        "HOLDFAST_ATTEMPT": str(request.identity.attempt),
        "HOLDFAST_LEASE_TOKEN": str(request.token),
        "HOLDFAST_WORK_DIR": WORK,
    }


def files_of(request: StartRequest, spec: SupervisorSpec, user: User) -> bytes:
    """Build the content of the volume. It is a folder inside it: the engine ignores an archive's `.`."""
    archive = Archive(user.uid, user.gid)
    archive.file("supervisor", program(), 0o755, owned_by_root=True)
    archive.folder("attempt", 0o755)
    archive.folder("attempt/cmd")
    archive.folder("attempt/work", at=UNTOUCHED)
    archive.folder("attempt/work/output", at=UNTOUCHED)
    archive.file("attempt/work/request.json", msgspec.json.encode(request.inputs))
    _add_inputs(archive, request.files)
    if request.secrets:
        archive.file("attempt/secrets", msgspec.json.encode(sorted(request.secrets.values())))
    archive.file("attempt/spec", encode_spec(spec))
    return archive.finish()


def _add_inputs(archive: Archive, files: Mapping[str, InputFile]) -> None:
    folders = {str(parent) for name in files for parent in PurePosixPath("input", name).parents} - {"."}
    for folder in sorted(folders):
        archive.folder(f"attempt/work/{folder}")
    for name, source in files.items():
        with source.open() as data:
            archive.file(f"attempt/work/input/{name}", data.read())


@functools.cache
def program() -> bytes:
    return supervisor.path().read_bytes()
