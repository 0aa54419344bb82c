"""The suite that every runner passes, on our own."""

from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from holdfast.runner.base import ContainerLimits
from holdfast.runner.docker.engine import Engine
from holdfast.runner.docker.runner import DockerRunner
from holdfast.runner.process import ProcessRunner
from holdfast.runner.state_folder import StateFolder
from holdfast.testing import INSTALLATION, RunnerSuite
from tests.support.docker_engine import IMAGE, DockerEngine


class TestProcessRunner(RunnerSuite):
    @pytest.fixture
    async def runner(self, tmp_path: Path) -> AsyncIterator[ProcessRunner]:
        runner = ProcessRunner(StateFolder(tmp_path / "state"), INSTALLATION, user=None, log_cap=1 << 20)
        yield runner
        runner.close()

    def spec(self, script: str) -> Mapping[str, Any]:
        return {"command": ["sh", "-c", script]}


class TestDockerRunner(RunnerSuite):
    @pytest.fixture
    async def runner(self, docker_engine: DockerEngine, tmp_path: Path) -> AsyncIterator[DockerRunner]:
        engine = Engine(docker_engine.host)
        runner = DockerRunner(engine, INSTALLATION, limits=ContainerLimits(), log_cap=1 << 20, state=tmp_path)
        await runner.check()
        yield runner
        await engine.close()
        docker_engine.clear()

    def spec(self, script: str) -> Mapping[str, Any]:
        return {"image": IMAGE, "command": ["sh", "-c", script]}
