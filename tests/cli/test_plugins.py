"""The examples of a runner and a connector, installed by pip: on a server and a worker, and in their suites."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from holdfast.pipeline.sources import inputs_of
from tests.support.plugins import distribution
from tests.support.up_process import PROGRAM, UpProcess, running

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPT, SQLITE = EXAMPLES / "script-runner", EXAMPLES / "sqlite-connector"


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both examples, installed by pip from copies."""
    folder = tmp_path_factory.mktemp("packages")
    copies = [shutil.copytree(one, folder / "source" / one.name) for one in (SCRIPT, SQLITE)]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    target = ["--no-build-isolation", "--target", str(folder / "lib")]
    subprocess.run([*pip, *target, *map(str, copies)], check=True)
    return folder / "lib"


@pytest.fixture
def up(packages: Path, tmp_path: Path) -> Iterator[UpProcess]:
    with running(tmp_path, PYTHONPATH=str(packages), HOLDFAST_DOCKER_HOST="none") as site:
        yield site


def test_an_installed_runner_takes_jobs_that_its_spec_accepts(up: UpProcess, packages: Path) -> None:
    """It is refused for a submitter; an unknown name is answered with the known ones. Proves I1, O8."""
    assert "hello world" in up("run", "--file", str(SCRIPT / "job.json"))
    assert "script" in up("doctor", PYTHONPATH=str(packages))
    document = httpx.get(f"http://127.0.0.1:{up.port}/openapi.json").json()
    asked = document["components"]["schemas"]["JobRequest"]["properties"]
    assert "script" in asked["runner"]["anyOf"][0]["enum"]
    assert "sqlite" in asked["connector"]["anyOf"][0]["enum"]
    refused = up.run("submit", "--file", "-", stdin='{"runner": "script", "spec": {"reader": "perl", "script": "1"}}')
    assert (refused.returncode, "spec.reader" in refused.stderr) == (2, True), refused.stderr
    unknown = up.run("submit", "--file", "-", stdin='{"runner": "scrip", "spec": {}}')
    assert "known are function, process, docker, script" in unknown.stderr
    secret = up("token", "make", "someone", "--role", "submitter").strip()
    submitter = up.run("submit", "--file", str(SCRIPT / "job.json"), HOLDFAST_TOKEN=secret)
    assert (submitter.returncode, "runner script" in submitter.stderr) == (4, True), submitter.stderr


def test_an_installed_connector_runs_a_pipeline(up: UpProcess, tmp_path: Path) -> None:
    """Proves P1, P4."""
    sources = inputs_of(tmp_path / "shared", "default")
    sources.mkdir(parents=True, exist_ok=True)
    (sources / "schema.sql").write_text("CREATE TABLE one (n INTEGER);")
    (sources / "seed.sql").write_text("INSERT INTO one VALUES (1), (2);")
    tasks: list[dict[str, Any]] = [{"name": name, "sql": f"{name}.sql"} for name in ("schema", "seed")]
    tasks.append({"name": "ask", "command": ["python3", "-c", ASK]})
    pipeline = json.dumps({"runner": "process", "connector": "sqlite", "tasks": tasks})
    assert "the sum is 3" in up("run", "--file", "-", stdin=pipeline)
    assert "the sum is" not in up("run", "--file", "-", stdin=pipeline), "it was cached"


ASK = """
import os, sqlite3
print("the sum is", sqlite3.connect(os.environ["DATABASE"]).execute("SELECT sum(n) FROM one").fetchone()[0])
"""


@pytest.mark.parametrize("example", [SCRIPT, SQLITE], ids=lambda path: path.name)
def test_an_example_passes_the_suite_of_its_kind(packages: Path, example: Path, tmp_path: Path) -> None:
    """In a pytest of its own, from a copy of its folder. Proves R3."""
    copy = shutil.copytree(example, tmp_path / "copy")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--basetemp={tmp_path / 'base'}", "tests"],
        env={**os.environ, "PYTHONPATH": str(packages)},
        cwd=copy,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


@pytest.mark.parametrize("command", [("worker", "--once"), ("serve",)], ids=lambda command: command[0])
def test_a_broken_distribution_stops_a_start_with_one_line(command: tuple[str, ...], tmp_path: Path) -> None:
    distribution(tmp_path / "lib", "holdfast-gone", {"gone": "no_such_module:DESCRIPTOR"})
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "lib"), "HOLDFAST_DATA_DIR": str(tmp_path / "data")}
    subprocess.run([*PROGRAM, "migrate"], env=env, check=True, capture_output=True)
    done = subprocess.run([*PROGRAM, *command], env=env, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2, done.stderr
    assert "runner gone of holdfast-gone 1.2 cannot be loaded" in done.stderr
    assert "uninstall holdfast-gone" in done.stderr
    assert "Traceback" not in done.stderr
