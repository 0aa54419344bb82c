"""The suite that every artifact store passes, on the shared folder and on a second store, and work with the second."""

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from holdfast.config import Settings
from holdfast.duties.sweeper import Sweeper
from holdfast.duties.upload_cleaner import UploadCleaner
from holdfast.errors import DiskFull, NotFound, SharedFolderUnavailable
from holdfast.model import Status, new_id
from holdfast.runner.artifacts import ArtifactStore
from holdfast.runner.folder_artifacts import FolderArtifacts
from holdfast.runner.shared_folder import SharedFolder
from holdfast.testing import ArtifactSuite
from holdfast.testing.artifact_suite import TENANT, read, uploaded, write
from tests.support.in_process_workers import InProcessWorkers, eventually
from tests.support.service import service_in_process
from tests.support.sqlite_artifacts import SqliteArtifacts


class TestFolderArtifacts(ArtifactSuite):
    @pytest.fixture
    def artifacts(self, tmp_path: Path) -> ArtifactStore:
        return FolderArtifacts(tmp_path)

    @pytest.fixture
    def other(self, tmp_path: Path) -> ArtifactStore:
        return FolderArtifacts(tmp_path)

    def test_files_are_private(self, artifacts: ArtifactStore, tmp_path: Path) -> None:
        """Proves R14: whatever the umask."""
        before = os.umask(0)
        try:
            write(artifacts.writer(new_id(), 1, 7), {"a/b": b"x"}).publish()
            artifacts.link_upload(TENANT, uploaded(artifacts, {"c/d": b"x"}), new_id())
        finally:
            os.umask(before)
        for path in tmp_path.rglob("*"):
            assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path

    def test_links_are_neither_listed_nor_followed(self, tmp_path: Path) -> None:
        """Proves R14."""
        artifacts, job = FolderArtifacts(tmp_path / "shared"), new_id()
        write(artifacts.writer(job, 1, 7), {"a/b": b"x"}).publish()
        folder = artifacts.folder(job, 1, 7)
        (tmp_path / "secret").write_bytes(b"secret")
        (folder / "link").symlink_to(tmp_path / "secret")
        (folder / "outside").symlink_to(tmp_path)
        os.link(tmp_path / "secret", folder / "second-name")
        assert {one.path for one in artifacts.list(job, 1, 7)} == {"a/b", "second-name"}
        for path in ("link", "outside/secret", "second-name"):
            with pytest.raises(NotFound):
                artifacts.open(job, 1, 7, path)

    def test_nothing_is_stored_below_the_reserve_or_in_another_folder(self, tmp_path: Path) -> None:
        """Proves D7: an empty mount point does not look like a job without files."""
        job, low = new_id(), ["the disk is low"]
        full = FolderArtifacts(tmp_path, shortage=lambda: low[0])
        for writer in (full.writer(job, 1, 7), full.upload_writer(TENANT, new_id())):
            with pytest.raises(DiskFull, match="the disk is low"):
                writer.create("x")
        with pytest.raises(DiskFull):
            full.check_room()
        away = FolderArtifacts(tmp_path, check=SharedFolder(tmp_path, "another").check)
        for use in (
            lambda: away.writer(job, 1, 7).create("x"),
            lambda: away.list(job, 1, 7),
            lambda: away.open(job, 1, 7, "x"),
            lambda: away.staged_bytes(TENANT),
            lambda: away.uploaded(TENANT, new_id()),
            lambda: away.link_upload(TENANT, new_id(), job),
            lambda: away.inputs(job, new_id()),
            lambda: away.delete_job(job),
        ):
            with pytest.raises(SharedFolderUnavailable):
                use()
        assert list(tmp_path.iterdir()) == []


class TestSqliteArtifacts(ArtifactSuite):
    @pytest.fixture
    def artifacts(self, tmp_path: Path) -> ArtifactStore:
        return SqliteArtifacts(tmp_path / "artifacts")

    @pytest.fixture
    def other(self, tmp_path: Path) -> ArtifactStore:
        return SqliteArtifacts(tmp_path / "artifacts")


@pytest.mark.parametrize("kind", ["sqlite"])
async def test_worker_server_and_duties_work_with_another_artifact_store(
    workers: InProcessWorkers, tmp_path: Path
) -> None:
    """One class, given to both, is enough: no artifact and no upload is in the shared folder."""
    stored = SqliteArtifacts(tmp_path / "artifacts")

    def other_store(settings: Settings, shared: SharedFolder) -> ArtifactStore:
        return stored

    data, url = workers.settings.data_dir, workers.settings.database_url or ""
    async with (
        service_in_process(url, data, other_store) as service,
        service.client() as client,
        workers.worker(artifacts=other_store),
    ):
        form = [("file", ("deep/given.txt", b"given")), ("file", ("b", b"x" * 300_000))]
        upload = (await client.post("/v1/uploads", files=form)).json()["upload"]
        report = '{"version": 1, "result": 1}'
        script = f"cp -r input/. output/ && ln -s /etc/passwd output/link && echo '{report}' > result.json"
        job: dict[str, Any] = {"runner": "process", "spec": {"command": ["sh", "-c", script]}, "uploads": [upload]}
        made = (await client.post("/v1/jobs", json=job)).json()["id"]
        ended = await workers.ended(made, Status.SUCCEEDED)
        assert ended.result == 1
        listed = (await client.get(f"/v1/jobs/{made}/artifacts")).json()["items"]
        assert [(one["path"], one["size"]) for one in listed] == [("b", 300_000), ("deep/given.txt", 5)]
        assert (await client.get(listed[1]["href"])).content == b"given"
        part = await client.get(listed[1]["href"], headers={"Range": "bytes=1-3"})
        assert (part.status_code, part.content) == (206, b"ive")
        write(stored.writer(made, 1, 999), {"x": b"of a worker that lost its lease"}).publish()
        assert await Sweeper(workers.store, stored, grace=0).run_once() == 1
        assert await UploadCleaner(workers.store, stored, grace=0, day=0).run_once() == 1
        (attempt,) = await workers.store.attempts.list(made)
        assert read(stored, made, attempt.attempt, attempt.token).keys() == {"b", "deep/given.txt"}
        assert stored.inputs(made, upload).keys() == {"b", "deep/given.txt"}
        assert (await client.delete(f"/v1/jobs/{made}")).status_code in (200, 202)

        async def removed() -> bool:
            return not stored.jobs("", 9) and not stored.jobs_with_inputs(after="", limit=9, older=-1)

        await eventually(removed, "what a job was given and what it left goes with it")
    assert {path.name for path in workers.settings.shared.iterdir()} == {"holdfast-folder.json"}


@pytest.mark.parametrize("kind", ["sqlite"])
async def test_outputs_wait_for_an_artifact_store_that_is_away(
    workers: InProcessWorkers, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Proves R14: a store that does not answer fails no job."""
    file, away = tmp_path / "artifacts", tmp_path / "away"
    stored = SqliteArtifacts(file)
    file.rename(away)
    async with workers.worker(artifacts=lambda settings, shared: stored):
        job = await workers.sh("echo x > output/x")

        async def tried() -> bool:
            return "its outputs cannot be stored yet" in caplog.text

        await eventually(tried, "its worker tries to store what it left")
        assert (await workers.get(job)).status is Status.RUNNING
        away.rename(file)
        await workers.ended(job, Status.SUCCEEDED)
    (attempt,) = await workers.store.attempts.list(job.id)
    assert read(stored, job.id, attempt.attempt, attempt.token) == {"x": b"x\n"}
