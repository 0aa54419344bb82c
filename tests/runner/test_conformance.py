"""The suites that every runner and connector passes, on our own."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from holdfast.config import Settings
from holdfast.testing import ConnectorSuite, RunnerSuite
from tests.support.docker_engine import IMAGE, DockerEngine
from tests.support.pipelines import open_folder


class TestProcessRunner(RunnerSuite):
    name = "process"

    def spec(self, script: str) -> Mapping[str, Any]:
        return {"command": ["sh", "-c", script]}


class TestDockerRunner(RunnerSuite):
    name = "docker"

    @pytest.fixture
    def settings(self, docker_engine: DockerEngine, tmp_path: Path) -> Iterator[Settings]:
        yield Settings(data_dir=tmp_path / "data", docker_host=docker_engine.host)
        docker_engine.clear()

    def spec(self, script: str) -> Mapping[str, Any]:
        return {"image": IMAGE, "command": ["sh", "-c", script]}


class TestFilesConnector(ConnectorSuite):
    name = "files"

    def task(self, n: int, sources: Path) -> Mapping[str, Any]:
        return {"command": ["sh", "-ec", f"echo {n} >> numbers; [ $(wc -l < numbers) = {n} ]"]}


class TestPostgresConnector(ConnectorSuite):
    name = "postgres"

    @pytest.fixture
    def settings(self) -> Iterator[Settings]:
        """Postgres does not run as root: as root, in a folder that another user gets to."""
        with open_folder() as folder:
            user = "postgres" if os.geteuid() == 0 else None
            yield Settings(data_dir=folder / "data", process_user=user, docker_host=None)

    def task(self, n: int, sources: Path) -> Mapping[str, Any]:
        earlier = f"SELECT 1 / (count(*) = {n - 1})::integer FROM numbers;" if n > 1 else ""
        text = f"CREATE TABLE IF NOT EXISTS numbers (n integer); {earlier} INSERT INTO numbers VALUES ({n});\n"
        (sources / f"{n}.sql").write_text(text)
        return {"sql": f"{n}.sql"}
