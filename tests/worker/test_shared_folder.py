"""The shared folder is verified: a process with another one, or with none, refuses to start and names both."""

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.assemble import store_of
from holdfast.cli.doctor import examine
from holdfast.config import Settings
from holdfast.errors import ConfigError
from holdfast.model import Status
from holdfast.runner.folder_artifacts import FolderArtifacts
from holdfast.runner.shared_folder import FILE, adopt, make_id, open_shared_folder, read_id
from tests.support.in_process_workers import InProcessWorkers, eventually
from tests.support.service import Service, error_of, service_in_process

RACERS = 8


def holdfast(settings: Settings, *command: str) -> "subprocess.CompletedProcess[str]":
    """Run the command line with the settings of the workers."""
    environment = {
        "PATH": os.environ["PATH"],
        "HOLDFAST_DATABASE_URL": settings.database_url or "",
        "HOLDFAST_DATA_DIR": str(settings.data_dir),
        "HOLDFAST_SHARED_DIR": str(settings.shared),
        **({} if settings.process_user is None else {"HOLDFAST_PROCESS_USER": settings.process_user}),
        "HOLDFAST_DOCKER_HOST": "none",
    }
    program = [sys.executable, "-m", "holdfast.cli.main", *command]
    return subprocess.run(program, env=environment, capture_output=True, text=True, check=False, timeout=60)


async def started(workers: InProcessWorkers) -> None:
    """Start a worker for a moment."""
    async with workers.worker():
        pass


@contextlib.contextmanager
def away(folder: Path) -> Iterator[None]:
    """Let an empty mount point be in the place of a folder while the block lasts."""
    mounted = folder.with_name("mounted elsewhere")
    folder.rename(mounted)
    folder.mkdir()
    try:
        yield
        assert list(folder.iterdir()) == [], "nothing was written to the mount point"
    finally:
        folder.rmdir()
        mounted.rename(folder)


@contextlib.contextmanager
def read_only(folder: Path) -> Iterator[None]:
    subprocess.run(["mount", "--bind", folder, folder], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", folder], check=True)
        yield
    finally:
        subprocess.run(["umount", folder], check=True)


async def test_worker_with_another_shared_folder_refuses_to_start_and_names_both(
    workers: InProcessWorkers, tmp_path: Path
) -> None:
    """Proves D8."""
    await started(workers)
    first, other = workers.settings.shared, tmp_path / "other"
    workers.set(shared_dir=other)
    with pytest.raises(ConfigError) as refused:
        await started(workers)
    assert str(first) in refused.value.message
    assert str(other) in refused.value.message
    assert not other.exists(), "and none is made"
    given = make_id(other, await workers.store.installation())
    with pytest.raises(ConfigError) as refused:
        await started(workers)
    recorded = await workers.store.shared_folder.read()
    assert recorded is not None
    for part in (str(first), recorded.id, str(other), given.id, "holdfast shared-folder adopt"):
        assert part in refused.value.message


async def test_unmounted_shared_folder_is_not_taken_for_a_first_start(workers: InProcessWorkers) -> None:
    """Proves D8."""
    async with workers.worker():
        await workers.ended(await workers.sh("echo made > output/made"))
    with away(workers.settings.shared), pytest.raises(ConfigError, match="is it mounted"):
        await started(workers)


async def test_every_part_refuses_another_folder(workers: InProcessWorkers, tmp_path: Path) -> None:
    """Proves D8, for server, direct mode, worker, prune and doctor."""
    await started(workers)
    first, other = str(workers.settings.shared), tmp_path / "other"
    workers.set(shared_dir=other)
    for command in (["serve", "--port", "0"], ["worker"], ["prune"], ["up", "--port", "0"]):
        done = await asyncio.to_thread(holdfast, workers.settings, *command)
        assert done.returncode == 2, (command, done.stderr)
        assert first in done.stderr
        assert str(other) in done.stderr
    finding = next(one for one in await examine(workers.settings) if one.what == "shared folder")
    assert not finding.ok
    assert first in finding.text
    service = Service(
        workers.settings.database_url or "", tmp_path / "data", queue_enabled="false", shared_dir=str(other)
    )
    service.start(wait=False)
    assert service.process is not None
    assert await asyncio.to_thread(service.process.wait, 60) == 2
    assert first in service.log.read_text()
    assert not other.exists()


async def test_concurrent_first_starts_agree_on_one_folder(workers: InProcessWorkers, tmp_path: Path) -> None:
    """Also those with different folders: one is recorded, the others are refused."""
    installation = await workers.store.installation()
    proven = await asyncio.gather(
        *(open_shared_folder(tmp_path / "one", installation, workers.store.shared_folder) for _ in range(RACERS))
    )
    assert {folder.id for folder in proven} == {proven[0].id}
    recorded = await workers.store.shared_folder.read()
    assert recorded is not None
    assert recorded.id == proven[0].id


async def test_one_of_many_different_folders_is_recorded_at_the_first_start(
    workers: InProcessWorkers, tmp_path: Path
) -> None:
    installation = await workers.store.installation()
    folders = [tmp_path / f"folder-{n}" for n in range(RACERS)]
    answers = await asyncio.gather(
        *(open_shared_folder(folder, installation, workers.store.shared_folder) for folder in folders),
        return_exceptions=True,
    )
    refused = [answer for answer in answers if isinstance(answer, ConfigError)]
    assert len(refused) == RACERS - 1, answers
    assert len([folder for folder in folders if read_id(folder) is not None]) == 1, "and the others have no id"


async def test_installation_of_an_older_version_keeps_its_folder(workers: InProcessWorkers) -> None:
    """Its database and its folder have no id yet."""
    shared = workers.settings.shared
    (shared / "artifacts" / "of-a-job").mkdir(parents=True)
    assert await workers.store.shared_folder.read() is None
    await started(workers)
    recorded, found = await workers.store.shared_folder.read(), read_id(shared)
    assert recorded is not None
    assert found is not None
    assert recorded.id == found.id
    assert (shared / "artifacts" / "of-a-job").is_dir()


async def test_start_that_dies_before_its_folder_is_recorded_is_finished_by_the_next(workers: InProcessWorkers) -> None:
    given = make_id(workers.settings.shared, await workers.store.installation())
    await started(workers)
    recorded = await workers.store.shared_folder.read()
    assert recorded is not None
    assert recorded.id == given.id


async def test_folder_of_another_installation_is_refused(workers: InProcessWorkers) -> None:
    make_id(workers.settings.shared, "another")
    with pytest.raises(ConfigError, match="of another installation, another"):
        await started(workers)
    assert await workers.store.shared_folder.read() is None


async def test_operator_can_make_another_folder_the_one(workers: InProcessWorkers, tmp_path: Path) -> None:
    """A process that runs with the old one notices."""
    async with await store_of(workers.settings) as store:
        old = await open_shared_folder(workers.settings.shared, await store.installation(), store.shared_folder)
        elsewhere = replace(workers.settings, shared_dir=tmp_path / "other")
        shown = await asyncio.to_thread(holdfast, elsewhere, "shared-folder")
        assert (shown.returncode, old.id in shown.stdout) == (1, True), shown
        done = await asyncio.to_thread(holdfast, elsewhere, "shared-folder", "adopt")
        assert done.returncode == 0, done.stderr
        workers.set(shared_dir=tmp_path / "other")
        await started(workers)
        workers.set(shared_dir=None)
        with pytest.raises(ConfigError, match=str(tmp_path / "other")):
            await started(workers)
        old.check()  # The folder is still what it was. What runs with it goes on until it is restarted.


async def test_folder_taken_from_another_installation_gets_a_new_id(workers: InProcessWorkers) -> None:
    """So that the other one stops using it."""
    before = make_id(workers.settings.shared, "another")
    recorded = await adopt(workers.settings.shared, await workers.store.installation(), workers.store.shared_folder)
    assert recorded.id != before.id
    await started(workers)


@pytest.mark.skipif(os.geteuid() != 0, reason="about root: only it may mount a filesystem")
async def test_read_only_folder_is_refused(workers: InProcessWorkers) -> None:
    await started(workers)
    with read_only(workers.settings.shared), pytest.raises(ConfigError, match="read-only"):
        await started(workers)


async def test_damaged_id_is_named(workers: InProcessWorkers) -> None:
    await started(workers)
    (workers.settings.shared / FILE).write_text("{")
    with pytest.raises(ConfigError, match=f"{FILE} is damaged"):
        await started(workers)


async def test_outputs_wait_while_the_folder_is_away(
    workers: InProcessWorkers, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Proves D8: nothing is written to the mount point, and nothing is lost."""
    gate = tmp_path / "gate"
    async with workers.worker():
        job = await workers.sh('echo up; until [ -e "$GATE" ]; do sleep 0.05; done; echo made > output/made',
                           env={"GATE": str(gate)})  # fmt: skip
        await workers.wait_for_log(job, "up")
        with away(workers.settings.shared):
            gate.touch()

            async def tried() -> bool:
                return "its outputs cannot be stored yet" in caplog.text

            await eventually(tried, "its worker tries to keep what it left")
            assert (await workers.get(job)).status is Status.RUNNING
        await workers.ended(job, Status.SUCCEEDED)
    (attempt,) = await workers.store.attempts.list(job.id)
    kept = FolderArtifacts(workers.settings.shared).list(job.id, attempt.attempt, attempt.token)
    assert [file.path for file in kept] == ["made"]


async def test_server_answers_503_while_the_folder_is_away(workers: InProcessWorkers) -> None:
    """Proves D8: no empty lists, no uploads into a mount point, no deletions that leave files."""
    url = workers.settings.database_url or ""
    async with service_in_process(url, workers.settings.data_dir) as service, service.client() as client:
        async with workers.worker():
            job = await workers.sh("echo made > output/made")
            await workers.ended(job, Status.SUCCEEDED)
        with away(workers.settings.shared):
            answers = [
                await client.get(f"/v1/jobs/{job.id}/artifacts"),
                await client.get(f"/v1/jobs/{job.id}/artifacts/made"),
                await client.post("/v1/uploads", files=[("file", ("a", b"a"))]),
            ]
            for answer in answers:
                assert (answer.status_code, error_of(answer)["code"]) == (503, "shared_folder_away")
            deleted = await client.delete(f"/v1/jobs/{job.id}")
            assert (deleted.status_code, deleted.json()) == (202, {"outcome": "deleting"})
        deleted = await client.delete(f"/v1/jobs/{job.id}")
        assert (deleted.status_code, deleted.json()) == (200, {"outcome": "deleted"})
        assert not (workers.settings.shared / "artifacts" / job.id).exists()
