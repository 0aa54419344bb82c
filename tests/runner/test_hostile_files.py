"""Outputs and logs of a hostile job: links, devices, permissions, races, floods, forged lines."""

import itertools
import os
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import Conflict
from holdfast.model import Job, Status
from holdfast.pipeline.connectors.postgres import DATA
from holdfast.pipeline.snapshots import SnapshotFolders
from holdfast.pipeline.throwaway import throwaway
from holdfast.runner.attempt_users import AttemptUsers
from holdfast.runner.collected_outputs import ArtifactLimits, CollectedOutputs, ContractViolation
from holdfast.runner.folder_artifacts import FolderArtifacts
from holdfast.runner.folder_writer import FolderWriter
from holdfast.runner.output_sources import collect_folder
from holdfast.runner.tree_removal import remove_tree
from holdfast.runner.workspace import socket_folder
from tests.support.hostile import Installation, Runs, by_both, installation
from tests.support.in_process_workers import eventually
from tests.support.supervisor_harness import needs_root

LEAVES = """
import os, socket
os.umask(0)
os.symlink("/etc/passwd", "output/link")
os.symlink("/etc", "output/folder-link")
os.symlink("/proc/self/root/etc/shadow", "output/proc-link")
for name in ("plain", "kept", "rights", "n" * 255):
    with open("output/" + name, "w") as file:
        file.write(name[:5])
os.link("output/plain", "output/twin")
os.chmod("output/rights", 0o6777)
os.mkfifo("output/fifo")
listener = socket.socket(socket.AF_UNIX)
listener.bind("output/socket")
os.makedirs("output/" + "/".join(["d"] * 60))
with open("output/" + "/".join(["d"] * 60) + "/deep", "w") as file:
    file.write("deep")
os.mkdir("output/open", 0o7777)
os.chmod("output/open", 0o7777)
try:
    os.mknod("output/device", 0o666 | 0o020000, os.makedev(1, 1))
except PermissionError:
    pass
os.chmod(".", 0o7777)
"""


async def artifacts(site: Installation, job: Job) -> dict[str, os.stat_result]:
    last = (await site.processes.store.attempts.list(job.id, tenant="red"))[-1]
    kept = FolderArtifacts(site.processes.settings.shared)
    found = {}
    for artifact in kept.list(job.id, last.attempt, last.token):
        with kept.open(job.id, last.attempt, last.token, artifact.path).content as file:
            found[artifact.path] = os.fstat(file.fileno())
    return found


async def events(site: Installation, job: Job, type: str) -> list[dict[str, Any]]:
    items = (await site.processes.store.events.page(job.id, tenant="red")).items
    return [dict(event.data) for event in items if event.type == type]


@by_both
async def test_links_devices_and_rights_are_not_taken(clean_url: str, runs: Runs) -> None:
    async with installation(clean_url, runs) as site:
        job = await site.submit(LEAVES)
        await site.ended(job, Status.SUCCEEDED)
        found = await artifacts(site, job)
        assert sorted(found) == sorted(["kept", "rights", "n" * 255, "/".join(["d"] * 60) + "/deep"])
        owner = site.processes.settings.data_dir.stat().st_uid
        for name, about in found.items():
            assert stat.S_ISREG(about.st_mode), name
            assert (about.st_uid, stat.S_IMODE(about.st_mode) & 0o7007, about.st_nlink) == (owner, 0, 1), name
        (reported,) = await events(site, job, "artifacts")
        assert {one["path"].removeprefix("output/") for one in reported["skipped"]} == {
            "link", "folder-link", "proc-link", "plain", "twin", "fifo", "socket",
        }  # fmt: skip


SWAPS = """
import os, sys
work, secret, what = sys.argv[1:]
place = work + "/output/x"
os.mkdir(work + "/own")
with open(work + "/own/x", "w") as file:
    file.write("own")
while True:
    if what == "folder":
        os.rename(work + "/own", place)
        os.listdir(place)
        os.rename(place, work + "/own")
    else:
        with open(place, "w") as file:
            file.write("own")
        os.unlink(place)
    os.symlink(secret if what == "folder" else secret + "/x", place)
    os.unlink(place)
"""
"""Puts a folder with a file in place, then a link to another's folder; or a file, then a link to another's file."""


@pytest.mark.parametrize("swapped", ["folder", "file"])
def test_swap_for_a_link_while_outputs_are_taken_leads_nowhere(tmp_path: Path, swapped: str) -> None:
    """A process that goes on writing, such as one of a pipeline's service, races the walk."""
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "x").write_text("of another")
    work = tmp_path / "work"
    (work / "output").mkdir(parents=True)
    taken = 0
    with subprocess.Popen([sys.executable, "-c", SWAPS, work, secret, swapped]) as racer:
        try:
            deadline = time.monotonic() + 60
            for n in itertools.count():
                if taken >= 30 or time.monotonic() > deadline:
                    break
                writer = FolderWriter(tmp_path / f"taken-{n}")
                gathered = CollectedOutputs(writer, ArtifactLimits(bytes=10**6))
                try:
                    collect_folder(work, gathered)
                    found = [file for file in writer.staging.rglob("*") if not file.is_dir()]
                    assert all(not file.is_symlink() and file.read_text() in ("", "own") for file in found)
                    taken += len(found)
                except (ContractViolation, FileNotFoundError):
                    continue
                finally:
                    gathered.discard()
        finally:
            racer.kill()
    assert taken >= 30


@pytest.mark.parametrize("kind", ["link", "dangling link", "file"])
def test_link_instead_of_a_folder_is_removed_and_not_followed(tmp_path: Path, kind: str) -> None:
    other = tmp_path / "other"
    (other / "kept").mkdir(parents=True)
    place = tmp_path / "place"
    match kind:
        case "link":
            place.symlink_to(other)
        case "dangling link":
            place.symlink_to(tmp_path / "nowhere")
        case "file":
            place.write_text("x")
    remove_tree(place)
    assert not os.path.lexists(place)
    assert (other / "kept").is_dir()


OUTPUT_LINK = "import os; os.rmdir('output'); os.symlink('/etc', 'output')"
NESTED = "output/deep"
DEEP = """
import os
for top in ("output", "."):
    os.makedirs(top + "/deep", exist_ok=True)
    here = os.open(top + "/deep", os.O_RDONLY)
    for _ in range(3000):
        os.mkdir("d" * 200, dir_fd=here)
        inner = os.open("d" * 200, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = inner
    os.close(here)
"""


@by_both
@pytest.mark.parametrize(
    ("program", "reported"),
    [
        pytest.param("open('output/x', 'w').truncate(8 << 30)", "larger than", id="sparse"),
        pytest.param(DEEP, NESTED, id="deep"),
        pytest.param("open('output/\\x1b[2J', 'w')", "cannot be printed", id="escape sequence"),
        pytest.param(
            "import os; os.rmdir('output'); os.symlink('/etc', 'output')", "symbolic link", id="output is a link"
        ),
        pytest.param("import os; os.symlink('/etc/passwd', 'result.json')", "symbolic link", id="result is a link"),
        pytest.param("import os; os.mkfifo('result.json')", "FIFO", id="result is a FIFO"),
        pytest.param("open('result.json', 'w').write('[' * 1_000_000)", "cannot be read", id="nested result"),
    ],
)
async def test_contract_violation_names_the_file_and_stores_nothing(
    clean_url: str, runs: Runs, program: str, reported: str
) -> None:
    async with installation(clean_url, runs) as site:
        job = await site.submit(program)
        ended = await site.ended(job, Status.FAILED)
        assert ended.error is not None
        if reported == NESTED and ended.error.code == "folder_too_large":
            reported = "nested deeper"  # The worker looked at the folder's size while the job was still at it.
        else:
            assert ended.error.code == "contract_violation"
        assert reported in ended.error.message
        assert "\x1b" not in ended.error.message
        assert await artifacts(site, job) == {}

        async def gone() -> bool:
            return site.processes.folders_of() == []

        await eventually(gone, "the attempt's folder is removed")


FORGED = r"""
import json, os, sys
for event in ("status", "lease", "log", "cancel", "artifacts"):
    print(json.dumps({"event": event, "status": "succeeded", "lease": "adopted", "lines": ["forged"], "seq": 1}))
print('{"event": "progress", "percent": 1e400}')
print('{"event": "usage", "tokens": -5}')
print('{"event": "usage", "tokens": "NaN"}')
print('{"event": "x", "x": ' + "[" * 5000 + "]" * 5000 + "}")
print('{"event": "nul", "x": "\\u0000"}')
print('{"event": "surrogate", "x": "\\ud800"}')
sys.stdout.buffer.write(b'{"event": "bytes", "x": "\xff\xfe"}\n')
sys.stdout.buffer.write(b"HFF1\x01\x00\x00\x00" + b"\x00" * 24 + b"\n")
print("\x1b]0;owned\x07\x1b[2J")
sys.stdout.flush()
sys.exit(3)
"""


@needs_root
async def test_forged_lines_change_nothing_but_the_log(clean_url: str) -> None:
    """Not its status, not its usage by less than nothing, and every line is there once."""
    async with installation(clean_url, "root") as site:
        job = await site.submit(FORGED)
        ended = await site.ended(job, Status.FAILED)
        assert ended.error is not None
        assert (ended.error.code, ended.exit_code, ended.attempts) == ("exit_nonzero", 3, 1)
        statuses = [event["status"] for event in await events(site, job, "status")]
        assert statuses == ["queued", "running", "failed"]
        assert await events(site, job, "cancel") == []
        assert all(value >= 0 for value in (ended.usage or {}).values())
        log = await site.log(job)
        assert sum("forged" in line for line in log) == 5


FLOOD = """
import sys
what = sys.argv[1] if len(sys.argv) > 1 else "lines"
line = b'{"event": "flood", "x": "' + b"y" * 1000 + b'"}\\n' if what == "events" else b"z" * 1000 + b"\\n"
for _ in range(60_000):
    sys.stdout.buffer.write(line)
"""


@needs_root
@pytest.mark.parametrize("what", ["lines", "events"])
async def test_flood_of_output_is_cut_and_delays_no_other_job(clean_url: str, what: str) -> None:
    async with installation(clean_url, "root", log_max_bytes=200_000) as site:
        flood = await site.submit(FLOOD, spec={"command": ["python3", "-", what]})
        other = await site.submit("print('hello')")
        await site.ended(other, Status.SUCCEEDED)
        await site.ended(flood, Status.SUCCEEDED)
        kept = 0
        after = 0
        while True:
            page = await site.processes.store.events.page(flood.id, tenant="red", after=after)
            kept += sum(len(str(event.data)) for event in page.items)
            if page.next_after is None:
                break
            after = page.next_after
        assert kept < 2_000_000


@needs_root
async def test_link_in_the_place_of_a_service_s_folder_does_not_stop_the_sweep(clean_url: str) -> None:
    """The name of that folder follows from what a job knows, and it is where everybody may write."""
    async with installation(clean_url, "root") as site:
        job = await site.submit("import time; print('up', flush=True); time.sleep(600)")
        link: list[Path] = []

        async def up() -> bool:
            return "up" in await site.log(job)

        await eventually(up, "the job runs")
        mark = f"{site.processes.installation}/{job.id}/1"
        link.append(socket_folder(mark))
        link[0].symlink_to(site.processes.settings.data_dir)
        try:
            await site.processes.store.jobs.cancel(job.id, tenant="red")
            await site.ended(job, Status.CANCELLED)
            await site.processes.sweep(keep_marker_for=0.0)
            await site.processes.sweep(keep_marker_for=0.0)
            assert site.processes.folders_of() == []
            assert site.processes.settings.data_dir.is_dir()
        finally:
            link[0].unlink(missing_ok=True)


class Restored(SnapshotFolders):
    """A store whose snapshots are all of a job that left a link as its cluster."""

    def __init__(self, target: Path) -> None:
        self._target = target

    def restore(self, folder: str, digest: str, workspace: Path) -> None:
        workspace.mkdir()
        (workspace / DATA).symlink_to(self._target)


def test_snapshot_whose_cluster_is_a_link_is_not_run(tmp_path: Path) -> None:
    """Root would run its server as the owner of the target, on the target."""
    other = tmp_path / "other"
    other.mkdir()
    (other / "PG_VERSION").write_text("15")
    users = AttemptUsers(None, None, tmp_path)
    with (
        pytest.raises(Conflict, match="holds no Postgres cluster"),
        throwaway(Restored(other), "snapshot", "folder", "digest", tmp_path / "runs", users),
    ):
        pass
    assert [path.name for path in other.iterdir()] == ["PG_VERSION"]
