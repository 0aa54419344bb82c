"""`holdfast serve`: why it does not start, in one sentence, and how it stops."""

import asyncio
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from holdfast.assemble_service import api_of, asgi
from holdfast.config import Settings
from holdfast.store import Store
from holdfast.store.migrate import migrate
from holdfast.store.store import connect
from tests.support.service import FUNCTION, Service


def serve(tmp_path: Path, *arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    known = {"PATH": "/usr/bin:/bin", "HOLDFAST_DATA_DIR": str(tmp_path), **environment}
    command = [sys.executable, "-m", "holdfast.cli.main", "serve", *arguments]
    return subprocess.run(command, env=known, capture_output=True, text=True, check=False, timeout=60)


@pytest.fixture
def migrated(tmp_path: Path) -> Path:
    async def make() -> None:
        database = await connect(f"sqlite:///{tmp_path / 'holdfast.db'}")
        await migrate(database)
        await database.close()

    asyncio.run(make())
    return tmp_path


def test_unmigrated_database_is_refused_with_the_way_out(tmp_path: Path) -> None:
    """Proves O2."""
    done = serve(tmp_path, "--port", "0")
    assert (done.returncode, "run `holdfast migrate`" in done.stderr) == (4, True), done.stderr
    assert not (tmp_path / "admin.token").exists()


def test_unreachable_database_exits_3(tmp_path: Path) -> None:
    done = serve(tmp_path, "--port", "0", HOLDFAST_DATABASE_URL="postgresql://holdfast@127.0.0.1:1/none")
    assert (done.returncode, "cannot reach Postgres" in done.stderr) == (3, True), done.stderr


def test_bad_settings_are_all_named_and_exit_2(migrated: Path) -> None:
    """Proves O9."""
    done = serve(migrated, "--host", "0.0.0.0", HOLDFAST_AUTH="off", HOLDFAST_MAX_JSON_DEPTH="9999")
    assert done.returncode == 2
    assert "HOLDFAST_AUTH is off" in done.stderr
    assert "HOLDFAST_MAX_JSON_DEPTH" in done.stderr
    (migrated / "tools.toml").write_text("[tools.a]\n")
    broken = serve(migrated, "--port", "0", HOLDFAST_TOOLS=str(migrated / "tools.toml"))
    assert (broken.returncode, "tool a" in broken.stderr) == (2, True), broken.stderr


def test_port_that_is_taken_is_named_and_exits_2(migrated: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = serve(migrated, "--port", str(taken.getsockname()[1]))
    assert (done.returncode, "cannot listen on 127.0.0.1" in done.stderr) == (2, True), done.stderr


IMPOSSIBLE = (
    ("HOLDFAST_DATABASE_URL", "postgresql://[::1"),
    ("HOLDFAST_DATABASE_URL", "postgresql://holdfast@127.0.0.1:99999/none"),
    ("HOLDFAST_DATABASE_URL", "postgresql://holdfast@127.0.0.1:port/none"),
    ("HOLDFAST_DATA_DIR", "/dev/null"),
)


@pytest.mark.parametrize(
    ("command", "name", "value"),
    [
        *((command, *setting) for command in ("up", "serve", "worker", "migrate") for setting in IMPOSSIBLE),
        ("up", "HOLDFAST_PORT", "99999"),
        ("serve", "HOLDFAST_PORT", "99999"),
    ],
)
def test_failed_start_gives_the_reason(tmp_path: Path, command: str, name: str, value: str) -> None:
    known = {"PATH": "/usr/bin:/bin", "HOLDFAST_DATA_DIR": str(tmp_path), name: value}
    program = [sys.executable, "-m", "holdfast.cli.main", command]
    done = subprocess.run(program, env=known, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode in (2, 3), "Traceback" in done.stderr) == (True, False), done.stderr
    assert name in done.stderr or value in done.stderr or "--port" in done.stderr
    assert len(done.stderr.splitlines()) <= 3


@pytest.mark.parametrize("url", ["http://127.0.0.1:99999", "http://[::1", "http://127.0.0.1:port", "ftp://x", "x"])
def test_malformed_address_of_the_server_is_named(url: str) -> None:
    program = [sys.executable, "-m", "holdfast.cli.main", "ls"]
    known = {"PATH": "/usr/bin:/bin", "HOLDFAST_URL": url, "HOLDFAST_TOKEN": "hf_x"}
    done = subprocess.run(program, env=known, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, f"HOLDFAST_URL is {url!r}: use http://host:port" in done.stderr) == (2, True), done.stderr


def test_signal_exits_with_0_and_the_address_is_logged(service_process: Service) -> None:
    text = service_process.log.read_text()
    assert f"holdfast serves on {service_process.url}" in text
    assert f"the first admin token is in {service_process.data / 'admin.token'}" in text
    assert service_process.admin not in text
    assert service_process.process is not None
    service_process.process.send_signal(signal.SIGINT)
    assert service_process.process.wait(30) == 0


async def test_application_starts_with_its_first_request(clean_url: str, tmp_path: Path) -> None:
    app = asgi(clean_url, data_dir=tmp_path)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
        assert (await client.get("/readyz")).status_code == 200
        headers = {"Authorization": f"Bearer {(tmp_path / 'admin.token').read_text().strip()}"}
        assert (await client.post("/v1/jobs", json=FUNCTION, headers=headers)).status_code == 201
    await app._stack.aclose()


async def test_background_runs_beside_the_service_with_its_store(clean_url: str, tmp_path: Path) -> None:
    steps: list[str] = []

    class Beside:
        def __init__(self, store: Store) -> None:
            self._store = store

        async def __aenter__(self) -> None:
            steps.append(f"began, {len((await self._store.jobs.list()).items)} jobs")

        async def __aexit__(self, *_: object) -> None:
            steps.append(f"ended, {len((await self._store.jobs.list()).items)} jobs")

    app = api_of(Settings(database_url=clean_url, data_dir=tmp_path), background=Beside)
    async with app.running():
        assert steps == ["began, 0 jobs"]
    assert steps[-1] == "ended, 0 jobs"
