"""A Postgres cluster of our own: a free port, a temporary folder, a non-root user. For tests and benchmarks."""

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.support.ports import free_port

MISSING = (
    "Postgres is missing: install Debian's `postgresql` (as root, `make setup` does it), "
    "or set HOLDFAST_TEST_POSTGRES_URL to a server where databases may be created"
)
FAST = ("fsync=off", "full_page_writes=off")


class PostgresMissing(RuntimeError):
    pass


def binaries() -> Path:
    """Where initdb and postgres are: the newest that Debian installed, else on the path."""
    installed = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda p: int(p.parts[-3]))
    found = shutil.which("initdb")
    if not installed and found is None:
        raise PostgresMissing(MISSING)
    return installed[-1].parent if installed else Path(found or "").resolve().parent


class Server:
    """A cluster that can be stopped and started again."""

    def __init__(self, settings: Sequence[str] = FAST) -> None:
        self._bin = binaries()
        self._user = "postgres" if os.geteuid() == 0 else None
        self._folder = Path(tempfile.mkdtemp(prefix="holdfast-pg-"))
        if self._user:
            shutil.chown(self._folder, self._user)
        data = self._folder / "data"
        _run([self._bin / "initdb", "-D", data, "-U", "holdfast", "-A", "trust", "-E", "UTF8", "--no-sync"], self._user)
        self.port = free_port()
        options = [
            "listen_addresses=127.0.0.1",
            f"port={self.port}",
            "unix_socket_directories=",
            "max_connections=200",
            *settings,
        ]
        self._command: list[str | Path] = [
            self._bin / "postgres", "-D", data, *(part for option in options for part in ("-c", option)),
        ]  # fmt: skip
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"postgresql://holdfast@127.0.0.1:{self.port}/postgres"

    @property
    def pid(self) -> int:
        """The process that its other processes are children of; 0 while it is stopped."""
        return self._process.pid if self._process is not None else 0

    @property
    def log(self) -> Path:
        return self._folder / "log"

    def start(self) -> None:
        with self.log.open("ab") as file:
            self._process = subprocess.Popen(self._command, stdout=file, stderr=file, user=self._user, cwd=self._folder)
        _wait_for(self._process, self._bin, self.port, self.log)

    def stop(self, number: int = signal.SIGINT) -> None:
        """SIGINT ends its clients and then itself; SIGQUIT is a crash; SIGTERM waits for clients.

        For one that connects at that moment and says nothing Postgres may wait for a minute (authentication_timeout).
        """
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(90)
            self._process = None

    def remove(self) -> None:
        if self._process is not None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1)
            self.stop()
        shutil.rmtree(self._folder, ignore_errors=True)


@contextlib.contextmanager
def cluster(settings: Sequence[str] = FAST) -> Iterator[str]:
    """Run a cluster while the block lasts; gives the URL of its database `postgres`."""
    server = Server(settings)
    try:
        server.start()
        yield server.url
    finally:
        server.remove()


def _wait_for(server: "subprocess.Popen[bytes]", bin_folder: Path, port: int, log: Path) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        ready = subprocess.run(
            [bin_folder / "pg_isready", "-q", "-h", "127.0.0.1", "-p", str(port), "-U", "holdfast", "-d", "postgres"],
            check=False,
        )
        if ready.returncode == 0:
            return
        if server.poll() is not None:
            raise RuntimeError(f"Postgres did not start:\n{log.read_text()}")
        time.sleep(0.05)  # Reason: pg_isready is the signal; this only spaces the questions.
    raise RuntimeError(f"Postgres was not ready in a minute:\n{log.read_text()}")


def _run(command: Sequence[object], user: str | None) -> None:
    done = subprocess.run(
        [str(part) for part in command], check=False, capture_output=True, text=True, user=user, cwd="/"
    )
    if done.returncode != 0:
        raise RuntimeError(f"{command[0]} failed: {done.stdout}{done.stderr}")
