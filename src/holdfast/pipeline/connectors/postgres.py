"""A Postgres server in the workspace, below `data`. It listens only on a socket, in a folder that its user owns.

Every client connects as `postgres` without a password: no other user can reach the socket. The server runs without
fsync. That is safe: after a crash of the machine the attempt is lost anyway, and a copy is made after a clean shutdown
and synced by the code that makes it. The server keeps little write-ahead log, which would otherwise add up to a
gigabyte to every snapshot.
"""

import os
import pwd
import re
import shutil
import signal
import struct
import subprocess
from pathlib import Path

from holdfast.pipeline.connectors.base import WorkspaceNotConsistent, command_of, path_variables, sql_file
from holdfast.pipeline.plan import TaskPlan
from holdfast.runner.base import CannotStart
from holdfast.runner.tree_removal import remove_tree
from holdfast.runner.wire import PATH, WireService, WireTask
from holdfast.runner.workspace import WorkspacePaths

DEBIAN = "/usr/lib/postgresql"
DATA = "data"
_PSQL = re.compile(rb"psql:[^\n]*?/holdfast-(\d{1,4})\.sql:(\d{1,9}):")
READY = "ready"
STATUS_LINE = 7
"""The line of `postmaster.pid` that tells whether the server is ready, as pg_ctl reads it."""
STATE = re.compile(r"^Database cluster state:\s*(.*)$", re.MULTILINE)
SHUT_DOWN = "shut down"
STATE_AT = 16
"""Offset of the state in the control file, in every version since 8.0: after the system identifier and two versions."""
STATES = {0: "starting up", 1: SHUT_DOWN, 3: "shutting down", 4: "in crash recovery", 6: "in production"}
MOST_READ = 65_536
MISSING = "Postgres is missing on this host: install Debian's `postgresql`"
ROOT = (
    "Postgres does not run as root: give the job a `user`, or set HOLDFAST_PROCESS_USER to one who may read the state "
    "folder"
)
INITDB = ("-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C.UTF-8", "--no-sync")
INITDB_SECONDS = 60
STAND_INS = ("postgres", "nobody")
NO_STAND_IN = (
    f"initdb needs a user with an entry in /etc/passwd, and this host has none of {' and '.join(STAND_INS)}: add one, "
    "or set HOLDFAST_PROCESS_USER to a user that has an entry"
)
SERVER = f"""
set -eu
umask 077
newest=$(ls -d {DEBIAN}/*/bin 2>/dev/null | sort -t/ -k5n | tail -n 1)
PATH="${{newest:+$newest:}}$PATH"
mkdir "$PGHOST" 2>/dev/null || [ -O "$PGHOST" ] || {{ echo "$PGHOST is not ours" >&2; exit 1; }}
rm -rf "$PGHOST"/.s.* data.new
if [ ! -s {DATA}/PG_VERSION ]; then
    initdb -D data.new {" ".join(INITDB)}
    mv data.new {DATA}
fi
exec postgres -D {DATA} -c listen_addresses= -c unix_socket_directories="$PGHOST" -c unix_socket_permissions=0700 \
    -c fsync=off -c synchronous_commit=off -c full_page_writes=off -c logging_collector=off \
    -c wal_level=minimal -c max_wal_senders=0 -c max_wal_size=128MB -c min_wal_size=32MB
"""


class PostgresConnector:
    serves = True

    def engine(self) -> str:
        try:
            return _output_of("postgres", "--version")
        except WorkspaceNotConsistent as error:
            raise CannotStart("start_failed", str(error)) from error

    def service(self, paths: WorkspacePaths) -> WireService:
        if paths.root:
            raise CannotStart("contract_violation", ROOT)
        return WireService(
            name="postgres",
            argv=("sh", "-c", SERVER),
            env=_connection(paths),
            cwd=paths.tree,
            stop_signal=signal.SIGINT,  # A fast shutdown: clients are disconnected, everything is written.
        )

    def task(self, plan: TaskPlan, paths: WorkspacePaths) -> WireTask:
        if plan.sql is None:
            return command_of(plan, paths, **_connection(paths))
        return WireTask(
            name=plan.name,
            argv=("psql", "-X", "-v", "ON_ERROR_STOP=1", "-f", sql_file(plan, paths)),
            env={**_connection(paths), **plan.env, **path_variables(paths)},
            cwd=paths.tree,
            timeout=plan.timeout,
        )

    def prepare(self, tree: Path, uid: int) -> bool:
        """Run initdb for a user without a name on the host: initdb looks its user up, the server does not."""
        if _known(uid):
            return False
        folder = (
            tree.parent.parent / "initdb"
        )  # Next to the space, so that it is removed with the attempt after a crash.
        remove_tree(folder)
        folder.mkdir(mode=0o700)
        try:
            _initdb(folder / DATA, _fallback_user())
            (folder / DATA).rename(tree / DATA)
        finally:
            remove_tree(folder)
        return True

    def ready(self, tree: Path) -> bool:
        try:
            lines = _read(tree / DATA / "postmaster.pid").decode(errors="replace").splitlines()
        except OSError:
            return False
        return len(lines) > STATUS_LINE and lines[STATUS_LINE].strip() == READY

    def check_quiet(self, tree: Path) -> None:
        try:
            state = _state(tree / DATA)
        except (OSError, struct.error) as error:
            raise WorkspaceNotConsistent(f"the state of the Postgres cluster cannot be read: {error}") from error
        if state != SHUT_DOWN:
            raise WorkspaceNotConsistent(f"Postgres was not shut down cleanly: it is {state}")


def _state(data: Path) -> str:
    """Return a cluster's state as pg_controldata prints it; read the file ourselves if the versions differ."""
    version = _read(data / "PG_VERSION").decode(errors="replace").strip()
    try:
        if f" {version}." in _output_of("pg_controldata", "--version"):
            found = STATE.search(_output_of("pg_controldata", "-D", str(data)))
            return found[1] if found else "unreadable"
    except CannotStart:
        pass
    (number,) = struct.unpack_from("<i", _read(data / "global" / "pg_control"), STATE_AT)
    return STATES.get(number, f"in state {number}")


def own_line(plan: TaskPlan, line: bytes) -> bytes:
    """Replace the expanded text's name and line in a message of psql by the developer's own file and line."""
    found = _PSQL.match(line)
    if found is None or int(found[1]) != plan.n:
        return line
    number = int(found[2])
    origin = next((one for one in reversed(plan.origins) if one.at <= number), None)
    if origin is None:
        return line
    return f"psql:{origin.path}:{origin.line + number - origin.at}:".encode() + line[found.end() :]


def _known(uid: int) -> bool:
    try:
        pwd.getpwuid(uid)
    except KeyError:
        return False
    return True


def _fallback_user() -> pwd.struct_passwd:
    """Return a named user of the host to run initdb as. Debian's Postgres comes with one."""
    for name in STAND_INS:
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    raise CannotStart("start_failed", NO_STAND_IN)


def _initdb(data: Path, user: pwd.struct_passwd) -> None:
    os.chown(data.parent, user.pw_uid, user.pw_gid)
    try:
        done = subprocess.run(
            [programs() / "initdb", "-D", data, *INITDB],
            user=user.pw_uid,
            group=user.pw_gid,
            extra_groups=(),
            umask=0o077,
            cwd=data.parent,
            env={"PATH": PATH, "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            timeout=INITDB_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotStart("start_failed", f"initdb cannot be run: {error}") from error
    if done.returncode != 0:
        raise CannotStart("start_failed", f"initdb failed: {done.stderr.decode(errors='replace').strip()[-300:]}")


def _read(path: Path) -> bytes:
    """Read a small file of the workspace without following links or blocking: the tasks control its content."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        return file.read(MOST_READ)


def programs() -> Path:
    """Return where this host's Postgres is: the newest Debian version, else on PATH."""
    installed = sorted(Path(DEBIAN).glob("*/bin/postgres"), key=lambda path: _number(path.parts[-3]))
    found = str(installed[-1]) if installed else shutil.which("postgres", path=PATH)
    if found is None:
        raise CannotStart("command_missing", MISSING)
    return Path(found).parent


def _number(version: str) -> float:
    try:
        return float(version)
    except ValueError:
        return 0.0


def _output_of(program: str, *arguments: str) -> str:
    try:
        done = subprocess.run(
            [programs() / program, *arguments],
            env={"PATH": PATH, "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            timeout=60,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotStart("start_failed", f"{program} cannot be run: {error}") from error
    if done.returncode != 0:
        raise WorkspaceNotConsistent(f"{program} failed: {done.stderr.decode(errors='replace').strip()[-300:]}")
    return done.stdout.decode(errors="replace").strip()


def _connection(paths: WorkspacePaths) -> dict[str, str]:
    return {"PGHOST": paths.socket, "PGUSER": "postgres", "PGDATABASE": "postgres"}
