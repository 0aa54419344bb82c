"""Containers without a network: nothing to reach, `localhost` has a name, and the engine sets up no sandbox."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.model import Status
from holdfast.runner.docker import hosts_file
from holdfast.runner.docker.engine import Engine, EngineError, EngineInfo
from tests.support.docker_engine import DockerEngine
from tests.support.in_process_workers import InProcessWorkers

TALK = """
nc -l -p 8080 -e echo hello & sleep 0.3
echo $(nc localhost 8080)
echo $(ls /sys/class/net)
echo $(readlink /proc/self/ns/net)
touch /etc/hosts 2> /dev/null && echo written
echo up; while [ ! -e go ]; do sleep 0.1; done
"""


@pytest.fixture
def kind() -> str:
    """One store is enough: containers do not depend on it."""
    return "sqlite"


async def talk(workers: InProcessWorkers, docker: DockerEngine, **spec: Any) -> tuple[list[str], dict[str, Any]]:
    """Run a job that speaks to itself; return what it said, and its configuration."""
    job = await workers.container(TALK, spec=spec)
    async with workers.worker():
        await workers.wait_for_log(job, "up")
        (name,) = docker.containers()
        config = json.loads(docker.docker("inspect", name))[0]
        docker.docker("exec", "-u", "65532", name, "touch", "/holdfast/attempt/work/go")
        await workers.ended(job, Status.SUCCEEDED)
    return await workers.log(job), config


def assert_alone(said: list[str]) -> None:
    hello, devices, network, up = said
    assert (hello, devices, up) == ("hello", "lo", "up")
    assert network != str(Path("/proc/self/ns/net").readlink())


async def test_without_a_network_localhost_works_and_there_is_no_sandbox(
    workers: InProcessWorkers, docker: DockerEngine
) -> None:
    """Proves R15: only a loopback device, in a network namespace of its own."""
    said, config = await talk(workers, docker)
    assert_alone(said)
    assert config["Config"]["NetworkDisabled"]
    assert config["NetworkSettings"]["Networks"] == {}
    (hosts,) = [mount for mount in config["Mounts"] if mount["Type"] == "bind"]
    assert (hosts["Destination"], hosts["RW"]) == ("/etc/hosts", False)


async def test_engine_that_cannot_see_our_files_sets_up_the_sandbox(
    workers: InProcessWorkers, docker: DockerEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a worker in a container, which shares only the socket with its engine. It is asked once."""
    monkeypatch.setattr(hosts_file, "HOSTS", Path("/no/such/hosts"))
    monkeypatch.setattr(hosts_file, "_readable", lambda: True)
    refused = []
    is_refused = hosts_file.HostsFile.refused

    def noted(self: hosts_file.HostsFile, error: EngineError) -> bool:
        refused.append(error)
        return is_refused(self, error)

    monkeypatch.setattr(hosts_file.HostsFile, "refused", noted)
    jobs = [await workers.container("true") for _ in range(3)]
    async with workers.worker({"default": 1}):
        for job in jobs:
            assert (await workers.ended(job, Status.SUCCEEDED)).attempts == 1
    assert len(refused) == 1
    said, config = await talk(workers, docker)
    assert_alone(said)
    assert not config["Config"].get("NetworkDisabled")


async def test_start_that_fails_because_of_the_file_is_repeated_with_a_sandbox(
    workers: InProcessWorkers, docker: DockerEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with an engine in a virtual machine, which accepts any path and cannot mount it."""
    start = Engine.start
    failed: list[str] = []

    async def fails_once(self: Engine, container: str) -> None:
        if not failed:
            failed.append(container)
            raise EngineError(500, f'error mounting "{hosts_file.HOSTS}" to rootfs at "/etc/hosts": permission denied')
        await start(self, container)

    monkeypatch.setattr(Engine, "start", fails_once)
    said, config = await talk(workers, docker)
    assert_alone(said)
    assert not config["Config"].get("NetworkDisabled")
    assert config["Id"] != failed[0]


async def test_engine_that_restricts_mounts_sets_up_the_sandbox(
    workers: InProcessWorkers, docker: DockerEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With user namespaces or SELinux, a container might not be able to read the file."""
    info = Engine.info

    async def restricted(self: Engine) -> EngineInfo:
        return msgspec.structs.replace(await info(self), restricts_mounts=True)

    monkeypatch.setattr(Engine, "info", restricted)
    said, config = await talk(workers, docker)
    assert_alone(said)
    assert not config["Config"].get("NetworkDisabled")


async def test_file_that_others_cannot_read_is_not_mounted(
    workers: InProcessWorkers, docker: DockerEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An installation with a strict umask."""
    private = tmp_path / "hosts"
    private.touch(0o600)
    monkeypatch.setattr(hosts_file, "HOSTS", private)
    said, config = await talk(workers, docker)
    assert_alone(said)
    assert not config["Config"].get("NetworkDisabled")
