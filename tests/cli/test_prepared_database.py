"""The example "a prepared database in seconds", run as its page says, by the command line alone."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.pipeline.sources import inputs_of
from tests.support.pipelines import open_folder
from tests.support.ports import free_port
from tests.support.supervisor_harness import eventually

EXAMPLE = Path(__file__).parents[2] / "examples" / "prepared-database"
USER = "postgres"
"""Who may run a server, where the tests are root's."""


def _hear_hangups() -> None:
    """Handle SIGHUP although the tests were started with `nohup`."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


class Site:
    """One installation in a data folder, and its commands."""

    def __init__(self, data: Path) -> None:
        self.data = data
        self.url = f"http://127.0.0.1:{free_port()}"
        known = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
        settings = {"HOLDFAST_URL": self.url, "HOLDFAST_DATA_DIR": str(data), "HOLDFAST_DOCKER_HOST": "none"}
        self.env = known | settings | ({"HOLDFAST_PROCESS_USER": USER} if os.geteuid() == 0 else {})

    def start(self, *arguments: str, **env: str) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "holdfast.cli.main", *arguments]
        return subprocess.Popen(
            command, env=self.env | env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            preexec_fn=_hear_hangups,  # noqa: PLW1509 - one system call
        )  # fmt: skip

    def run(self, *arguments: str) -> str:
        with self.start(*arguments) as process:
            said, _ = process.communicate(timeout=120)
        assert process.returncode == 0, said
        return said

    @property
    def runs(self) -> list[Path]:
        """The copies that throw-away servers have here."""
        return list((self.data / "state" / "runs").iterdir())

    def prepare(self) -> str:
        """Make a small database, and return its snapshot."""
        (inputs_of(self.data / "shared", "default") / "one.sql").write_text("CREATE TABLE one (n integer);\n")
        pipeline = {"runner": "process", "connector": "postgres", "tasks": [{"name": "one", "sql": "one.sql"}]}
        file = self.data / "one.json"
        file.write_text(json.dumps(pipeline))
        self.run("run", "--file", str(file))
        (snapshot,) = json.loads(self.run("snapshots", "ls", "--json"))["items"]
        return str(snapshot["id"])


def first_line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def socket_of(dsn: str) -> Path:
    return Path(dsn.partition("host=")[2])


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
        dsn = first_line(server)
        counted = subprocess.run(
            ["psql", "-X", "-At", "-d", dsn, "-c", "SELECT count(*) FROM product"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert counted.stdout == "4\n"
        server.terminate()
        server.communicate(timeout=60)
    assert server.returncode == 0
    assert site.runs == []
    assert not socket_of(dsn).exists()


def test_throwaway_server_is_removed_after_every_kind_of_end(site: Site, tmp_path: Path) -> None:
    """Proves P12: while it serves, beside a command, and in the middle of the restore."""
    snapshot = site.prepare()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        with site.start("snapshots", "run", snapshot) as server:
            socket = socket_of(first_line(server))
            assert socket.is_dir()
            server.send_signal(number)
        assert (number, server.returncode, site.runs, socket.exists()) == (number, 0, [], False)
    beside = ("sh", "-c", 'echo "$DATABASE_URL"; exec sleep 600')
    for number in (signal.SIGTERM, signal.SIGHUP):
        with site.start("snapshots", "run", snapshot, "--", *beside) as server:
            socket = socket_of(first_line(server))
            server.send_signal(number)
        assert (number, server.returncode, site.runs, socket.exists()) == (number, 128 + number, [], False)
    slow = tmp_path / "cp"
    slow.write_text(f"#!/bin/sh\ntouch {tmp_path}/here\nexec sleep 600\n")
    slow.chmod(0o755)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        with site.start("snapshots", "run", snapshot, PATH=f"{tmp_path}:{site.env['PATH']}") as server:
            eventually((tmp_path / "here").exists, "it restores")
            assert len(site.runs) == 1
            server.send_signal(number)
        (tmp_path / "here").unlink()
        assert (number, server.returncode, site.runs) == (number, 128 + number, [])


def test_throwaway_counts_as_use_and_sweeps_what_a_killed_one_left(site: Site) -> None:
    """Proves P11, P12: a snapshot that is opened daily does not count as unused."""
    snapshot = site.prepare()

    def used_at() -> str:
        return str(json.loads(site.run("snapshots", "show", snapshot, "--json"))["used_at"])

    before = used_at()
    with site.start("snapshots", "run", snapshot) as server:
        socket = socket_of(first_line(server))
        server.kill()
    assert before < used_at()
    assert (len(site.runs), socket.is_dir()) == (1, True)
    before = used_at()
    site.run("snapshots", "run", snapshot, "--", "true")
    assert before < used_at()
    assert (site.runs, socket.exists()) == ([], False)
