"""A PgBouncer of our own: a free port, a temporary folder, a non-root user. For tests and benchmarks.

Its pool is small and used in turns, so that two transactions of one client meet two servers. With HOLDFAST_TEST_POOLER
every Postgres store of the tests goes through one; what tests do past the store goes to Postgres itself.
"""

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

from holdfast.store.postgres import PostgresDatabase
from tests.support.ports import free_port

MISSING = "PgBouncer is missing: install Debian's `pgbouncer` (as root, `make setup` does it)"
SERVERS = 5
# `any`: every client is the user of the line above, so that a server with a password needs no file of users here.
CONFIG = """
[databases]
* = {server}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = any
pool_mode = {mode}
default_pool_size = {servers}
min_pool_size = {servers}
server_round_robin = 1
max_client_conn = 500
log_connections = 0
log_disconnections = 0
{more}
"""


class PgBouncerMissing(RuntimeError):
    pass


def program() -> str:
    found = shutil.which("pgbouncer", path=os.environ.get("PATH", "") + ":/usr/sbin")
    if found is None:
        raise PgBouncerMissing(MISSING)
    return found


@contextlib.contextmanager
def pgbouncer(server: str, *, mode: str = "transaction", more: str = "") -> Iterator[str]:
    """Run a PgBouncer before a server while the block lasts; gives the server's URL with its own port."""
    command, port = program(), free_port()
    user = "postgres" if os.geteuid() == 0 else None
    folder = Path(tempfile.mkdtemp(prefix="holdfast-pgbouncer-"))
    config = folder / "pgbouncer.ini"
    config.write_text(CONFIG.format(server=_server(server), port=port, mode=mode, servers=SERVERS, more=more))
    if user:
        shutil.chown(folder, user)
        shutil.chown(config, user)
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([command, config], stdout=log, stderr=log, user=user, cwd=folder)
    try:
        _wait_for(process, port, folder / "log")
        parts = urlsplit(server)
        yield urlunsplit(parts._replace(netloc=f"{parts.username}@127.0.0.1:{port}"))
    finally:
        process.terminate()  # SIGTERM ends it at once, clients or not.
        process.wait(30)
        shutil.rmtree(folder, ignore_errors=True)


def through(pooler: str, url: str) -> str:
    """The same database by way of the pooler."""
    return urlunsplit(urlsplit(pooler)._replace(path=urlsplit(url).path))


def reroute() -> None:
    """Let every store that opens a database of the test server open it through the pooler, and listen directly."""
    straight = PostgresDatabase.connect

    async def connect(url: str, **options: Any) -> PostgresDatabase:
        pooler = os.environ.get("HOLDFAST_TEST_POOLER_URL")
        if pooler and urlsplit(url).netloc == urlsplit(os.environ["HOLDFAST_TEST_SERVER"]).netloc:
            options |= {"pooler": "transaction", "listen_url": url}
            url = through(pooler, url)
        return await straight(url, **options)

    PostgresDatabase.connect = connect  # type: ignore[method-assign]


def _server(url: str) -> str:
    parts = urlsplit(url)
    named = {"host": parts.hostname, "port": parts.port, "user": parts.username, "password": parts.password}
    return " ".join(f"{name}={unquote(str(value))}" for name, value in named.items() if value)


def _wait_for(process: "subprocess.Popen[bytes]", port: int, log: Path) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.02)  # Reason: the open port is the signal; this only spaces the questions.
    process.kill()
    raise RuntimeError(f"PgBouncer did not start:\n{log.read_text()}")
