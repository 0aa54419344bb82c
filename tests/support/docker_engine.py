"""A Docker engine of the tests' own: started, stopped, killed and started again; with an image made of busybox.

Nothing is pulled from anywhere. Every engine has folders of its own, and goes when the tests end.
"""

import contextlib
import io
import os
import shutil
import signal
import socket
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Iterator, Sequence
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

import pytest

from holdfast.runner.docker.engine import Engine

IMAGE, ENTRY = "holdfast-test:1", "holdfast-entry:1"
PATIENCE = 60.0
ANSWERS_WITHIN = 5.0
TRIES = 3
TOOLS = Path("/usr/bin/busybox")
PASSWD = "root:x:0:0::/:/bin/sh\nworker:x:4321:1234::/:/bin/sh\n"


def missing() -> str | None:
    """Say why there can be no engine here."""
    if os.geteuid() != 0:
        return "only root can start a Docker engine"
    if _program() is None or not TOOLS.exists():
        return "dockerd or busybox is missing: run scripts/need-docker"
    return None


def _program() -> str | None:
    return shutil.which("dockerd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


CONTAINERD = """
version = 2
root = "{folder}/containerd"
state = "{folder}/exec/containerd"
disabled_plugins = ["io.containerd.grpc.v1.cri"]
[grpc]
address = "{folder}/containerd.sock"
"""

EXIT = {
    "version": 1, "token": 1, "cause": "exit", "code": 0, "reason": "", "stopped_by": "", "killed": False,
    "text": "", "mark": "", "boot_id": "", "started_at": 1, "ended_at": 1, "lasted": 1, "oom_kills": 0,
    "log_length": 0,
    "stdout_length": 0, "stderr_length": 0, "stdout_dropped": 0, "stderr_dropped": 0, "log_lost": 0, "copy_lost": 0,
    "log_error": "", "user_time": 0, "system_time": 0, "max_rss": 0, "tasks": [],
}  # fmt: skip
"""What a supervisor writes at the end of something that succeeded."""


class _Direct(HTTPConnection):
    """HTTP over a Unix socket, without a client that would have to be installed."""

    def __init__(self, path: Path) -> None:
        super().__init__("docker", timeout=ANSWERS_WITHIN)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)  # Assigned before it connects, so that `close` closes it either way.
        self.sock.settimeout(ANSWERS_WITHIN)
        self.sock.connect(str(self._path))


class DockerEngine:
    """One engine, with a containerd of its own beside it. With `live_restore`, its containers outlive it."""

    def __init__(self, folder: Path, *, live_restore: bool, options: Sequence[str] = ()) -> None:
        self.folder = folder
        self._options = options
        self.live_restore = live_restore
        self.socket = folder / "socket"
        self.host = f"unix://{self.socket}"
        self._process: subprocess.Popen[bytes] | None = None
        self._containerd: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and wait until it answers; on a busy machine it may give up on itself."""
        for _ in range(TRIES):
            self._begin()
            if self._answers_soon():
                return
        raise AssertionError((self.folder / "log").read_text()[-2000:])

    def _begin(self) -> None:
        if self._containerd is None:
            config = self.folder / "containerd.toml"
            config.write_text(CONTAINERD.format(folder=self.folder))
            self._containerd = self._spawn("containerd", f"--config={config}")
        program = _program()
        assert program is not None
        (self.folder / "daemon.json").write_text("{}")
        command = [
            program, f"--host={self.host}", f"--data-root={self.folder}/data", f"--exec-root={self.folder}/exec",
            f"--pidfile={self.folder}/pid", f"--config-file={self.folder}/daemon.json", "--bridge=none",
            "--iptables=false", "--ip6tables=false", "--ip-masq=false", "--storage-driver=overlay2",
            "--shutdown-timeout=5", f"--containerd={self.folder}/containerd.sock",
            f"--live-restore={str(self.live_restore).lower()}", *self._options,
        ]  # fmt: skip
        self._process = self._spawn(*command)

    def _spawn(self, *command: str) -> "subprocess.Popen[bytes]":
        with (self.folder / "log").open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    def ensure(self) -> None:
        """Start it if a test that failed left it down."""
        if not self.answers:
            self.start()

    @property
    def answers(self) -> bool:
        return self.get("_ping") == "OK"

    def _answers_soon(self) -> bool:
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            if self.answers:
                return True
            if self._process is None or self._process.poll() is not None:
                break
            time.sleep(0.02)  # Reason: the probe is the signal; this only spaces the questions.
        return False

    def stop(self) -> None:
        """Ask it to end, and wait."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def _end(self, number: int) -> None:
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(PATIENCE)
            self._process = None

    def get(self, path: str) -> str:
        """Ask the engine's API directly. Return an empty string if there is no answer within a few seconds."""
        with contextlib.suppress(OSError, HTTPException), contextlib.closing(_Direct(self.socket)) as connection:
            connection.request("GET", f"/{path}")
            return connection.getresponse().read().decode()
        return ""

    def docker(self, *arguments: str, stdin: bytes | None = None) -> str:
        """Do something with Docker's own command line."""
        done = subprocess.run(["docker", "-H", self.host, *arguments], capture_output=True, check=True, input=stdin)
        return done.stdout.decode().strip()

    def containers(self) -> list[str]:
        """The names of all containers."""
        return sorted(self.docker("ps", "-a", "--format", "{{.Names}}").split())

    def volumes(self) -> list[str]:
        return sorted(self.docker("volume", "ls", "-q").split())

    @contextlib.contextmanager
    def recorded(self) -> Iterator["Record"]:
        """Write down every start and end of a container while the block lasts; the engine itself forgets them soon."""
        path = self.folder / "events"
        command = ["docker", "-H", self.host, "events", "--filter", "event=start", "--filter", "event=die", "--format"]
        shape = "{{.Action}} {{.Actor.Attributes.name}} {{.Actor.Attributes.exitCode}}"
        with path.open("wb") as file:
            process = subprocess.Popen([*command, shape], stdout=file)
        time.sleep(0.2)  # Reason: nothing signals when it listens.
        try:
            yield Record(path)
        finally:
            process.kill()
            process.wait()

    def clear(self) -> None:
        """Remove whatever a test left. Another removal, of a worker that was killed in it, may still be on its way."""
        last = time.monotonic() + PATIENCE
        while names := self.docker("ps", "-aq").split():
            try:
                self.docker("rm", "-fv", *names)
            except subprocess.CalledProcessError:
                if time.monotonic() > last:
                    raise
                time.sleep(0.2)  # Reason: the removal by another worker sends no event.
        if names := self.volumes():
            self.docker("volume", "rm", "-f", *names)

    def close(self) -> None:
        """End it and what it started, all found by its folder, and remove its folders."""
        with contextlib.suppress(Exception):
            self.clear()
        self.stop()
        if self._containerd is not None:
            self._containerd.terminate()
            self._containerd.wait(PATIENCE)
        for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
            with contextlib.suppress(OSError):
                if str(self.folder).encode() in Path(f"/proc/{pid}/cmdline").read_bytes() and pid != os.getpid():
                    os.kill(pid, signal.SIGKILL)
        for line in reversed(Path("/proc/self/mountinfo").read_text().splitlines()):
            if (where := line.split()[4]).startswith(str(self.folder)):
                subprocess.run(["umount", "-l", where], check=False)
        shutil.rmtree(self.folder, ignore_errors=True)


class Record:
    """The starts and ends of containers, as the engine told them."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def runs(self, job: str) -> int:
        """How often a job's command was run. A supervisor that comes too late leaves with 123, and ran nothing."""
        lines = [line.split() for line in self._path.read_text().splitlines() if job in line]
        return sum(line[0] == "start" for line in lines) - sum(line[0] == "die" and line[2] == "123" for line in lines)


def image() -> bytes:
    """The root folder of an image: busybox, under all its names."""
    names = subprocess.run([TOOLS, "--list"], capture_output=True, text=True, check=True).stdout.split()
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w") as tar:
        for folder in ("bin", "etc", "tmp", "proc", "sys", "dev"):
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(entry)
        tar.add(TOOLS, "bin/busybox")
        for name in sorted({*names} - {"busybox"}):
            entry = tarfile.TarInfo(f"bin/{name}")
            entry.type, entry.linkname = tarfile.SYMTYPE, "busybox"
            tar.addfile(entry)
        entry = tarfile.TarInfo("etc/passwd")
        entry.size, entry.mode = len(PASSWD), 0o644
        tar.addfile(entry, io.BytesIO(PASSWD.encode()))
    return whole.getvalue()


@contextlib.contextmanager
def daemon(*, live_restore: bool, options: Sequence[str] = ()) -> Iterator[DockerEngine]:
    """An engine with an image, in short folders: the paths of sockets may not be long."""
    engine = DockerEngine(Path(tempfile.mkdtemp(prefix="hfd-", dir="/tmp")), live_restore=live_restore, options=options)
    try:
        engine.start()
        # One with an environment and an entrypoint of its own, as many images have.
        engine.docker("import", "-c", "ENV OF_IMAGE=yes", "-", IMAGE, stdin=image())
        changes = ['ENTRYPOINT ["/bin/echo", "from"]', 'CMD ["image"]', "WORKDIR /etc"]
        engine.docker("import", *(word for change in changes for word in ("-c", change)), "-", ENTRY, stdin=image())
        yield engine
    finally:
        engine.close()


def skip_without() -> None:
    """Skip where there can be no engine."""
    if (why := missing()) is not None:
        pytest.skip(why)


def session_daemon(*, live_restore: bool) -> Any:
    @pytest.fixture(scope="session")
    def fixture() -> Iterator[DockerEngine]:
        skip_without()
        with daemon(live_restore=live_restore) as engine:
            yield engine

    return fixture


@contextlib.asynccontextmanager
async def api(daemon: DockerEngine) -> Any:
    engine = Engine(daemon.host)
    try:
        yield engine
    finally:
        await engine.close()
