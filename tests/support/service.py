"""Servers for tests, on a free port of the loopback: in the test's own loop, or `holdfast serve` as a process."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from holdfast.assemble import folder_artifacts
from holdfast.assemble_service import api_of
from holdfast.cli.serve import Server, bind
from holdfast.config import Settings
from holdfast.model import Role
from holdfast.runner.artifacts import MakeArtifacts
from holdfast.store import Store, open_store
from holdfast.store.tokens import new_secret
from tests.support.ports import free_port

READY_SECONDS = 60.0
FUNCTION = {"runner": "function", "spec": {"name": "f"}}


def shared_beside(data: Path) -> Path:
    """The shared folder: a test's server in a folder `data` of its own has that of the workers, which is beside it."""
    return data.parent / "shared" if data.name == "data" else data / "shared"


class Service:
    """One server process, its store as the test sees it, and clients for every role."""

    def __init__(self, url: str, data: Path, **settings: str) -> None:
        self.database_url = url
        self.data = data
        self.port = free_port()
        self.settings = settings
        self.process: subprocess.Popen[bytes] | None = None
        self.log = data / f"serve-{self.port}.log"
        self.program: Sequence[str] = ("holdfast.cli.main", "serve")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def admin(self) -> str:
        return (self.data / "admin.token").read_text().strip()

    def start(self, *, wait: bool = True) -> None:
        self.data.mkdir(parents=True, exist_ok=True)
        environment = {
            "PATH": os.environ["PATH"],
            "HOLDFAST_DATABASE_URL": self.database_url,
            "HOLDFAST_DATA_DIR": str(self.data),
            "HOLDFAST_SHARED_DIR": str(shared_beside(self.data)),
            "HOLDFAST_PORT": str(self.port),
            "HOLDFAST_RATE_LIMIT": "none",
            **{f"HOLDFAST_{name.upper()}": value for name, value in self.settings.items()},
        }
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *self.program], env=environment, stdout=log, stderr=log
            )
        if wait:
            self.ready()

    def ready(self) -> None:
        deadline = time.monotonic() + READY_SECONDS
        while time.monotonic() < deadline:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/readyz").status_code == 200:
                    return
            assert self.process is not None
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.02)  # Reason: the probe is the signal; this only spaces the questions.
        raise AssertionError(f"the server was not ready:\n{self.log.read_text()}")

    def kill(self) -> None:
        """Kill it."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(60)

    def stop(self) -> int:
        """Stop it with SIGTERM; return its exit status."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)

    def client(self, token: str | None = None, **headers: str) -> httpx.AsyncClient:
        """A client with this token, an admin's if it is left out."""
        found = {"Authorization": f"Bearer {token or self.admin}", **headers}
        return httpx.AsyncClient(base_url=self.url, headers=found, timeout=30, verify=False)

    async def token(self, role: Role, tenant: str | None = "default", name: str | None = None) -> str:
        """Make a token, past the service."""
        secret = new_secret()
        async with await open_store(self.database_url, listen=False) as store:
            await store.tokens.add(
                name or f"{role}-{tenant}", role, secret=secret, tenant=None if role is Role.ADMIN else tenant
            )
        return secret


@contextlib.asynccontextmanager
async def service_in_process(
    url: str, data: Path, artifacts: MakeArtifacts = folder_artifacts, /, **settings: Any
) -> AsyncIterator[Service]:
    """Serve in the test's own process and loop, on a real socket: no start of a process to wait for."""
    service = Service(url, data)
    usual: dict[str, Any] = {"rate_limit": None, "auth_off_as_root": True, "shared_dir": shared_beside(data)}
    loaded = Settings(database_url=url, data_dir=data, port=service.port, **(usual | settings))
    app = api_of(loaded, artifacts=artifacts)
    with bind(loaded) as listener:
        async with app.running():
            server = ServerWithoutSignals(app, loaded)
            task = asyncio.create_task(server.serve(sockets=[listener]))
            try:
                yield service
            finally:
                app.leave()
                server.should_exit = True
                await task


class ServerWithoutSignals(Server):
    """A server that does not handle signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.contextmanager
def service_process_on(url: str, data: Path, **settings: str) -> Iterator[Service]:
    """Run `holdfast serve` while the block lasts; afterwards its log must have no traceback."""
    service = Service(url, data, **settings)
    service.start()
    try:
        yield service
    finally:
        service.stop()
    assert "Traceback" not in service.log.read_text(), service.log.read_text()


@contextlib.asynccontextmanager
async def opened(url: str) -> AsyncIterator[Store]:
    async with await open_store(url, listen=False) as store:
        yield store


async def events_of(response: httpx.Response) -> AsyncIterator[dict[str, str]]:
    """The server-sent events of a response: their fields; a comment has the field `comment`."""
    found: dict[str, str] = {}
    async for line in response.aiter_lines():
        if not line:
            if found:
                yield found
            found = {}
        elif line.startswith(":"):
            found["comment"] = line[1:].strip()
        else:
            name, _, value = line.partition(": ")
            found[name] = value


def error_of(response: httpx.Response) -> Mapping[str, Any]:
    """The one shape of every refusal."""
    body = response.json()
    assert set(body["error"]) == {"code", "message", "details"}, body
    found: Mapping[str, Any] = body["error"]
    return found


async def soon(seconds: float) -> None:
    """Let time pass. Reason: the test shows that nothing happens."""
    await asyncio.sleep(seconds)
