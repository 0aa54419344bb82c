"""File modes: everything is readable only by its owner, with any umask; folders to pass through are 0711."""

import os
import signal
import stat
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from holdfast.permissions import is_system_folder, make_file, make_folder, make_passable, tighten
from holdfast.runner.state_folder import StateFolder
from tests.support.docker_engine import IMAGE, DockerEngine
from tests.support.pipelines import open_folder
from tests.support.ports import free_port
from tests.support.supervisor_harness import needs_root
from tests.support.up_process import PATIENCE, PROGRAM, eventually

FIRST, LAST = 2_100_000_000, 2_100_065_535
APP = """
from holdfast import Holdfast
app = Holdfast("sqlite:///DATA/holdfast.db")
@app.function()
def greet(name: str) -> str:
    return f"Hello {name}"
"""
WAIT = "while [ ! -e go ]; do sleep 0.1; done"
PASSABLE = (
    "",
    "state",
    "state/attempts",
    "state/attempts/*",
    "state/attempts/*/*/space",
    "state/spaces",
)
"""Folders below the data folder that a job's user passes through; below `spaces` all that lead to a workspace do."""
OWN = ("work", "tmp", "space/tree", "space/inputs")
"""What is the user's own in an attempt's folder."""


class Service:
    """A running `holdfast up`, spoken to over HTTP."""

    def __init__(self, folder: Path, port: int, process: "subprocess.Popen[bytes]") -> None:
        self.folder = folder
        self.process = process
        self._url = f"http://127.0.0.1:{port}"

    def call(self, method: str, path: str, **options: Any) -> Any:
        token = (self.folder / "admin.token").read_text().strip()
        headers = {"Authorization": f"Bearer {token}"}
        answer = httpx.request(method, f"{self._url}{path}", headers=headers, timeout=PATIENCE, **options)
        assert answer.is_success, answer.text
        return answer.json()

    def live(self) -> bool:
        assert self.process.poll() is None
        try:
            return "'live': True" in str(self.call("GET", "/v1/workers"))
        except (OSError, httpx.HTTPError, AssertionError):
            return False

    def submit(self, **fields: Any) -> str:
        return str(self.call("POST", "/v1/jobs", json=fields)["id"])

    def status(self, job: str) -> str:
        found = self.call("GET", f"/v1/jobs/{job}")
        assert found["status"] not in ("failed", "paused"), found
        return str(found["status"])

    def ended(self, job: str) -> None:
        eventually(lambda: self.status(job) == "succeeded")


@contextmanager
def up(folder: Path, log: Path, umask: int, **settings: str) -> Iterator[Service]:
    port = free_port()
    known = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
    env = known | {"HOLDFAST_DATA_DIR": str(folder), "HOLDFAST_PORT": str(port), **settings}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*PROGRAM, "up", "--app", "greeting:app"], env=env, stdout=output, stderr=output, umask=umask
        )
    service = Service(folder, port, process)
    try:
        eventually(service.live)
        yield service
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(PATIENCE)


def complaint(path: Path, top: Path) -> str | None:
    """What is wrong with the owner or the mode of an entry, if anything is."""
    below, about = path.relative_to(top), path.lstat()
    mode, name = stat.S_IMODE(about.st_mode), str(below) if str(below) != "." else ""
    parts = below.parts
    theirs = parts[:2] == ("state", "attempts") and any("/".join(parts[4:]).startswith(own) for own in OWN)
    theirs = theirs or (parts[:2] == ("state", "spaces") and len(parts) > 4)
    if stat.S_ISLNK(about.st_mode):
        return None
    if theirs and parts[4:5] == ("tmp",) and about.st_uid == 0:  # The way to an attempt's folder that is below /tmp.
        return None if stat.S_ISDIR(about.st_mode) and mode == 0o711 else f"{name} has mode {mode:o}"
    if about.st_uid != 0 and not theirs:
        return f"{name} belongs to {about.st_uid}"
    if theirs and parts[1] == "attempts" and not FIRST <= about.st_uid <= LAST:
        return f"{name} belongs to {about.st_uid}, and not to the attempt"
    passable = any(below.match(one) and len(parts) == one.count("/") + 1 for one in PASSABLE if one) or not name
    passable = passable or (parts[:2] == ("state", "spaces") and (len(parts) <= 5 or parts[5:] == ("space",)))
    folder = stat.S_ISDIR(about.st_mode)
    attempt = parts[:2] == ("state", "attempts") and len(parts) == 4
    if attempt and mode == 0o710 and FIRST <= about.st_gid <= LAST:
        return None  # An attempt's folder: only its own group gets through.
    wanted = 0o711 if passable and folder else 0o700 if folder or stat.S_ISSOCK(about.st_mode) else 0o600
    if mode & ~wanted or (passable and mode != wanted):
        return f"{name} has mode {mode:o}, and not {wanted:o}"
    return None


@needs_root
@pytest.mark.parametrize("umask", [0o000, 0o077], ids=["umask000", "umask077"])
def test_other_users_can_read_nothing_on_disk(umask: int, docker_engine: DockerEngine, tmp_path: Path) -> None:
    """A full scenario; listed while jobs run, and after they ended. Proves I2."""
    docker_engine.ensure()
    with open_folder() as outer:
        folder = outer / "data"
        (tmp_path / "greeting.py").write_text(APP.replace("DATA", str(folder)))
        settings = {
            "HOLDFAST_DOCKER_HOST": docker_engine.host,
            "HOLDFAST_PROCESS_UIDS_DIR": str(outer / "uids"),
            "HOLDFAST_SECRET_PASSWORD": "very secret",
            "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        }
        with up(folder, tmp_path / "up.log", umask, **settings) as service:
            jobs = submit_all(service)
            for job in jobs["ending"]:
                service.ended(job)
            for job in jobs["waiting"]:
                eventually(lambda job=job: service.status(job) == "running")
            eventually(lambda: len(list(folder.glob("state/attempts/*/*/work/begun"))) == 2)
            eventually(lambda: list(folder.glob("state/spaces/*/*/*/space/tree/begun")))
            assert "\n".join(wrong(folder)) == ""
            assert {path.lstat().st_mode & 0o777 for path in (outer / "uids", outer / "uids" / "lock")} == {
                0o700,
                0o600,
            }
            for job in jobs["waiting"]:
                service.call("POST", f"/v1/jobs/{job}/cancel")
            eventually(lambda: all(service.status(job) == "cancelled" for job in jobs["waiting"]))
            assert "\n".join(wrong(folder)) == ""
        assert "\n".join(wrong(folder)) == ""
        assert {path.name for path in folder.glob("holdfast.db*")} >= {"holdfast.db"}
        assert list(folder.glob("shared/artifacts/*/*/made"))
        assert list(folder.glob("shared/snapshots/*/data/PG_VERSION"))


def submit_all(service: Service) -> dict[str, list[str]]:
    upload = service.call("POST", "/v1/uploads", files=[("file", ("deep/a.txt", b"one"))])["upload"]
    made = "echo made > output/made; mkdir output/deep; echo more > output/deep/more"
    sql = {"name": "schema", "command": ["psql", "-X", "-c", "CREATE TABLE fruit (id integer)"]}
    waits = {"name": "wait", "command": ["sh", "-c", f'touch "$HOLDFAST_WORK_DIR/begun"; {WAIT}']}
    boxed = {"name": "wait", "command": ["sh", "-c", f"touch begun; {WAIT}"]}
    process = {"runner": "process"}
    return {
        "ending": [
            service.submit(
                **process, spec={"command": ["sh", "-ec", f"cat input/deep/a.txt; {made}"]}, uploads=[upload]
            ),
            service.submit(runner="function", spec={"name": "greet"}, inputs={"name": "Ada"}),
            service.submit(runner="docker", spec={"image": IMAGE, "command": ["sh", "-ec", made]}),
            service.submit(**process, spec={}, tasks=[sql], connector="postgres"),
        ],
        "waiting": [
            service.submit(
                **process,
                spec={"command": ["sh", "-c", f"echo secret; touch begun; {WAIT}"], "stdin": "in"},
                secrets=["PASSWORD"],
            ),
            service.submit(**process, spec={}, tasks=[sql, waits], connector="postgres"),
            service.submit(runner="docker", spec={"image": IMAGE}, tasks=[boxed]),
        ],
    }


def wrong(top: Path) -> list[str]:
    """What is wrong below a folder. What comes and goes meanwhile is looked at as far as it is there."""
    found = []
    below = [Path(folder, name) for folder, folders, files in os.walk(top) for name in (*folders, *files)]
    for path in (top, *sorted(below)):  # `rglob` fails where a folder goes while it walks.
        try:
            found.append(complaint(path, top))
        except FileNotFoundError:
            continue
    return [one for one in found if one is not None]


def test_folders_and_files_are_made_with_their_modes(tmp_path: Path) -> None:
    """Proves I2."""
    for umask in (0o000, 0o077):
        before = os.umask(umask)
        try:
            make_folder(tmp_path / f"{umask}" / "private")
            make_passable(tmp_path / f"{umask}" / "private" / "passable")
            make_file(tmp_path / f"{umask}" / "file")
        finally:
            os.umask(before)
        modes = {path.name: path.stat().st_mode & 0o7777 for path in (tmp_path / f"{umask}").rglob("*")}
        assert modes == {"private": 0o700, "passable": 0o711, "file": 0o600}


def test_existing_files_are_tightened_and_shared_places_left_alone(tmp_path: Path) -> None:
    """Proves I2."""
    for name, mode, wanted, after in (
        ("old", 0o755, 0o711, 0o711),
        ("shut", 0o700, 0o711, 0o700),
        ("tmp", 0o1777, 0o700, 0o1777),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(mode)
        tighten(tmp_path / name, wanted)
        assert (tmp_path / name).stat().st_mode & 0o7777 == after


@needs_root
def test_files_of_an_older_installation_are_tightened_at_start(tmp_path: Path) -> None:
    """Proves I2."""
    (tmp_path / "greeting.py").write_text(APP)
    with open_folder() as outer:
        folder = outer / "data"
        (tmp_path / "greeting.py").write_text(APP.replace("DATA", str(folder)))
        settings = {
            "HOLDFAST_PROCESS_UIDS_DIR": str(outer / "uids"),
            "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        }
        with up(folder, tmp_path / "up.log", 0o022, **settings) as service:
            service.ended(service.submit(runner="process", spec={"command": ["true"]}))
        for path in (folder, folder / "holdfast.db", folder / "shared", folder / "state" / "host"):
            path.chmod(0o755)
        with up(folder, tmp_path / "up.log", 0o022, **settings):
            modes = {path.name: path.stat().st_mode & 0o777 for path in (folder, folder / "shared")}
            files = {path.stat().st_mode & 0o777 for path in (folder / "holdfast.db", folder / "state" / "host")}
        assert modes == {"data": 0o711, "shared": 0o700}
        assert files == {0o600}


def test_files_of_older_attempts_are_tightened(tmp_path: Path) -> None:
    """Proves I2."""
    state = StateFolder(tmp_path / "state")
    log = state.attempts("site") / "job.1" / "log"
    log.parent.mkdir()
    log.touch()
    log.chmod(0o644)
    state.attempts("site")
    assert log.stat().st_mode & 0o777 == 0o600


def test_a_device_keeps_its_mode(tmp_path: Path) -> None:
    """A setting may name /dev/null by mistake; the whole machine would miss it. Proves I2."""
    device = tmp_path / "device"
    os.mkfifo(device)
    device.chmod(0o666)
    for make in (make_folder, make_passable):
        with pytest.raises(FileExistsError):
            make(device)
    make_file(device)
    assert stat.S_IMODE(device.stat().st_mode) == 0o666


def test_a_folder_of_the_system_keeps_its_mode(tmp_path: Path) -> None:
    """A setting may name it by mistake; every other account would be shut out. Proves I2."""
    assert [is_system_folder(Path(name)) for name in ("/", "/usr", "/var/lib", "/srv/..")] == [True] * 4
    assert [is_system_folder(Path(name)) for name in ("/var/lib/holdfast", "/srv/holdfast")] == [False] * 2
    before = stat.S_IMODE(Path("/usr").stat().st_mode)
    tighten(Path("/usr"), 0o700)
    assert stat.S_IMODE(Path("/usr").stat().st_mode) == before
    link = tmp_path / "link"
    link.symlink_to("/usr")
    make_folder(link)
    assert stat.S_IMODE(Path("/usr").stat().st_mode) == before
