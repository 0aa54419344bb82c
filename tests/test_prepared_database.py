"""The example "a prepared database in seconds", run as its page says, by the command line alone."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.pipeline.sources import inputs_of
from tests.attempt import eventually
from tests.cluster import free_port
from tests.pipelines import open_folder

EXAMPLE = Path(__file__).parent.parent / "examples" / "prepared-database"
USER = "postgres"
"""Who may run a server, where the tests are root's."""


class Site:
    """Everything on one machine, in a data folder, and the commands to it."""

    def __init__(self, data: Path) -> None:
        self.data = data
        self.url = f"http://127.0.0.1:{free_port()}"
        known = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
        settings = {"HOLDFAST_URL": self.url, "HOLDFAST_DATA_DIR": str(data), "HOLDFAST_DOCKER_HOST": "none"}
        self.env = known | settings | ({"HOLDFAST_PROCESS_USER": USER} if os.geteuid() == 0 else {})

    def start(self, *arguments: str) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "holdfast.cli.main", *arguments]
        return subprocess.Popen(command, env=self.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def run(self, *arguments: str) -> str:
        with self.start(*arguments) as process:
            said, _ = process.communicate(timeout=120)
        assert process.returncode == 0, said
        return said


@pytest.fixture
def site() -> Iterator[Site]:
    with open_folder() as folder:
        site = Site(folder / "data")
        shutil.copytree(EXAMPLE, inputs_of(site.data / "shared", "default") / "shop")
        with site.start("up", "--port", site.url.rpartition(":")[2]) as server:
            eventually(lambda: answers(site), "the server answers")
            yield site
            server.terminate()
            server.communicate(timeout=60)


def answers(site: Site) -> bool:
    with site.start("ls") as process:
        process.communicate(timeout=60)
    return process.returncode == 0


def test_example_prepares_a_database_once_and_opens_it_in_seconds(site: Site) -> None:
    """Proves P1, P4, P8, P10, P12."""
    file = str(EXAMPLE / "pipeline.json")
    first = site.run("run", "--file", file)
    assert "INSERT 0 10000" in first
    watched = site.run("watch", first.partition("job ")[2].split()[0])
    assert "-- planned: schema → seed → migrate → settle\n" in watched
    assert watched.count("-- seed: running\n") == watched.count("-- seed: succeeded\n") == 1
    assert "INSERT" not in site.run("run", "--file", file)
    plan = site.run("plan", "--file", file, "--json")
    assert plan.count('"cached": true') == 4
    listed = site.run("snapshots", "ls", "--json")
    newest = listed.partition('"id": "')[2].partition('"')[0]
    asks = ["psql", "-X", "-At", "-c", "SELECT sum(sales), sum(revenue) FROM sold"]
    assert "10000|26500.00" in site.run("snapshots", "run", newest, "--", *asks)
    with site.start("snapshots", "run", newest[:16]) as server:
        assert server.stdout is not None
        dsn = server.stdout.readline().strip()
        counted = subprocess.run(
            ["psql", "-X", "-At", "-d", dsn, "-c", "SELECT count(*) FROM product"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert counted.stdout == "4\n"
        server.terminate()
        server.communicate(timeout=60)
    assert server.returncode == 0
    assert list((site.data / "state" / "runs").iterdir()) == []
    assert not Path(dsn.partition("host=")[2]).exists()
