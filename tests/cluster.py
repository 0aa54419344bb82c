"""A Postgres cluster of our own: a free port, a temporary folder, a non-root user. For tests and benchmarks."""

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

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


@contextlib.contextmanager
def cluster(settings: Sequence[str] = FAST) -> Iterator[str]:
    """Run a cluster while the block lasts; gives the URL of its database `postgres`."""
    bin_folder = binaries()
    user = "postgres" if os.geteuid() == 0 else None
    folder = Path(tempfile.mkdtemp(prefix="holdfast-pg-"))
    if user:
        shutil.chown(folder, user)
    data = folder / "data"
    _run([bin_folder / "initdb", "-D", data, "-U", "holdfast", "-A", "trust", "-E", "UTF8", "--no-sync"], user)
    port = free_port()
    options = [
        "listen_addresses=127.0.0.1",
        f"port={port}",
        "unix_socket_directories=",
        "max_connections=200",
        *settings,
    ]
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(
            [bin_folder / "postgres", "-D", data, *(part for option in options for part in ("-c", option))],
            stdout=log,
            stderr=log,
            user=user,
            cwd=folder,
        )
    try:
        _wait_for(server, bin_folder, port, folder / "log")
        yield f"postgresql://holdfast@127.0.0.1:{port}/postgres"
    finally:
        server.terminate()  # SIGTERM waits for clients; SIGINT ends them.
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(1)
        server.send_signal(2)
        server.wait(30)
        shutil.rmtree(folder, ignore_errors=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


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
