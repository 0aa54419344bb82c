"""The units of docs/howto/systemd.md: valid, as tight as the page says, and jobs outlive their worker in them."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.store.migrate import migrate
from holdfast.store.store import connect
from tests.support.doc_pages import ROOT
from tests.support.sandbox import read_unit
from tests.support.service import FUNCTION, Service
from tests.support.up_process import PROGRAM, eventually, running

PAGE = (ROOT / "docs" / "howto" / "systemd.md").read_text()
NAMES = ("server", "worker with an account of its own", "worker as root")
UNITS = dict(zip(NAMES, re.findall(r"```ini\n# \S+\n(.*?)```", PAGE, re.DOTALL), strict=True))
WORKERS = NAMES[1:]
JOB = """
echo up; id -u
[ -e {marker} ] && echo open || echo private
touch /etc/x || echo shut
while [ ! -e go ]; do sleep 0.1; done
echo survived
"""

pytestmark = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="a machine without systemd-analyze")
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody else")


def written(folder: Path, name: str) -> Path:
    """A unit as a file, with a program that there is."""
    kind = name.partition(" ")[0]
    path = folder / f"holdfast-{kind}.service"
    path.write_text(UNITS[name].replace("/opt/holdfast/bin/holdfast", "/bin/true"))
    return path


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that every user can pass through, as /var/lib/holdfast would be."""
    folder = Path(tempfile.mkdtemp(prefix="holdfast-unit-", dir="/tmp"))
    folder.chmod(0o711)
    yield folder
    folder.with_suffix(".marker").unlink(missing_ok=True)
    shutil.rmtree(folder)


@pytest.mark.parametrize("name", NAMES)
def test_unit_is_valid_and_as_tight_as_the_page_says(tmp_path: Path, name: str) -> None:
    unit = written(tmp_path, name)
    verified = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, check=False)
    assert (verified.returncode, unit.name in verified.stderr) == (0, False), verified.stderr
    (said,) = re.findall(rf"^\| {name} \| ([0-9.]+) \|$", PAGE, re.MULTILINE)
    judged = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", unit], capture_output=True, text=True, check=False
    )
    (level,) = re.findall(r"exposure level for \S+: ([0-9.]+)", judged.stdout)
    assert float(level) <= float(said) + 0.3, "other versions of systemd weigh a little differently"


@pytest.mark.parametrize("name", WORKERS)
def test_unit_of_a_worker_takes_nothing_from_jobs_that_outlive_it(name: str, tmp_path: Path) -> None:
    unit = read_unit(written(tmp_path, name))
    assert unit["KillMode"] == ["process"]
    assert not {"PrivateTmp", "RuntimeDirectory", "RemoveIPC", "DynamicUser"} & set(unit)
    assert "RemoveIPC" not in read_unit(written(tmp_path, "server")), "it would remove the jobs' as well"
    assert float(unit["TimeoutStopSec"][0]) > 20


@as_root
@pytest.mark.parametrize("name", WORKERS)
def test_jobs_run_and_outlive_a_restart_in_the_sandbox_of_the_unit(place: Path, name: str) -> None:
    """A restart as systemd does it with KillMode=process: the worker gets the signal, nobody else."""
    unit = written(place, name)
    marker = place.with_suffix(".marker")
    marker.touch()
    through = (sys.executable, "-m", "tests.support.sandbox", str(unit), str(place))
    env = {"HOLDFAST_DOCKER_HOST": "none", "HOLDFAST_PROCESS_UIDS_DIR": str(place / "uids")}
    # Without the unit's user: without capabilities, jobs run as the worker does.
    env["HOLDFAST_PROCESS_USER"] = "root" if "own" in name else ""
    with running(place, through=through, **env) as up:
        job = up("submit", "--", "sh", "-c", JOB.format(marker=marker)).strip()
        eventually(lambda: "shut" in up("logs", job))
    with running(place, through=through, **env) as up:
        (work,) = place.glob(f"state/attempts/*/{job}.1/work")
        (work / "go").touch()
        up("logs", "-f", job)
        first, uid, tmp, shut, survived = up("logs", job).split()
        assert (first, shut, survived) == ("up", "shut", "survived")
        assert (uid == "0", tmp) == ((True, "open") if "own" in name else (False, "private"))
        assert up.json("show", job)["attempts"] == 1, "adopted, not started again"
        whole = up("submit", "--", "sh", "-c", "mkdir -p output/a && echo b > output/a/b && chmod 700 output/a").strip()
        up("logs", "-f", whole)
        assert up("rm", whole).strip() == "deleted"
        stubborn = up("submit", "--", "sh", "-c", "trap '' TERM; echo deaf; sleep 600 & wait; wait").strip()
        eventually(lambda: "deaf" in up("logs", stubborn))
        up("cancel", stubborn)
        eventually(lambda: up.json("show", stubborn)["status"] == "cancelled")


@as_root
async def test_server_serves_in_the_sandbox_of_its_unit(place: Path) -> None:
    url = f"sqlite:///{place / 'store.db'}"
    database = await connect(url)
    await migrate(database)
    await database.close()
    service = Service(url, place / "data")
    unit = written(place, "server")
    service.program = ("tests.support.sandbox", str(unit), str(place), *PROGRAM, "serve")
    service.start()
    try:
        async with service.client() as client:
            assert (await client.post("/v1/jobs", json=FUNCTION)).status_code == 201
    finally:
        assert service.stop() == 0
