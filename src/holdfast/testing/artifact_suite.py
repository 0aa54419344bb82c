"""For authors of artifact stores: one test suite that every store passes.

    class TestMyArtifacts(ArtifactSuite):
        @pytest.fixture
        def artifacts(self): return MyArtifacts(…)

A second object on the same storage, as in another process, is a fixture `other`; by default it is the same object.
"""

import threading
from collections.abc import Mapping

import pytest

from holdfast.errors import Conflict, Invalid, NotFound, TooLarge
from holdfast.model import new_id
from holdfast.runner.artifacts import ArtifactStore, FileWriter, outputs_name
from holdfast.runner.collected_outputs import ArtifactLimits, CollectedOutputs
from holdfast.runner.uploads import STAGED, IncomingUpload, input_files, link_uploads, receive_upload

LIMITS = ArtifactLimits(bytes=1000, entries=10)
TENANT = "a tenant/of any name"


def write(writer: FileWriter, files: Mapping[str, bytes]) -> FileWriter:
    for name, data in files.items():
        with writer.create(name) as file:
            file.write(data)
    return writer


def read(artifacts: ArtifactStore, job: str, attempt: int, token: int) -> Mapping[str, bytes]:
    """Return all published files of an attempt."""
    found = {}
    for artifact in artifacts.list(job, attempt, token):
        opened = artifacts.open(job, attempt, token, artifact.path)
        with opened.content as content:
            found[artifact.path] = content.read()
        assert artifact.size == opened.size == len(found[artifact.path])
    return found


def uploaded(artifacts: ArtifactStore, files: Mapping[str, bytes], tenant: str = TENANT) -> str:
    """Upload files as a request does; return the id of the upload."""
    incoming = receive_upload(artifacts, tenant, LIMITS)
    send(incoming, files)
    incoming.publish()
    incoming.discard()
    return incoming.id


def send(incoming: IncomingUpload, files: Mapping[str, bytes]) -> None:
    for name, data in files.items():
        incoming.begin(name)
        for at in range(0, len(data), 3):
            incoming.write(data[at : at + 3])
        incoming.end()


def given(artifacts: ArtifactStore, job: str, *uploads: str) -> Mapping[str, bytes]:
    """Return the input files of a job as a runner reads them."""
    found = {}
    for name, file in input_files(artifacts, job, uploads).items():
        with file.open() as content:
            found[name] = content.read()
        assert file.size == len(found[name])
    return found


class ArtifactSuite:
    """What an artifact store guarantees. Define a fixture `artifacts`, empty for each test."""

    @pytest.fixture
    def other(self, artifacts: ArtifactStore) -> ArtifactStore:
        return artifacts

    # Outputs of attempts

    def test_outputs_are_published_whole_and_read_by_others(
        self, artifacts: ArtifactStore, other: ArtifactStore
    ) -> None:
        """Proves R14."""
        job, files = new_id(), {"b": b"two", "a/ö ä.bin": b"\0\xff" * 200_000, "empty": b""}
        writer = write(artifacts.writer(job, 1, 7), files)
        writer.folder("only/folders")
        assert other.list(job, 1, 7) == []
        with pytest.raises(NotFound):
            other.open(job, 1, 7, "b")
        writer.publish()
        writer.discard()
        assert read(other, job, 1, 7) == files
        assert [one.path for one in other.list(job, 1, 7)] == ["a/ö ä.bin", "b", "empty"]

    def test_owners_of_one_attempt_do_not_see_each_others_outputs(self, artifacts: ArtifactStore) -> None:
        """A worker that lost its lease publishes under its own token, which the record does not name. Proves L6."""
        job = new_id()
        late, owner = artifacts.writer(job, 1, 7), artifacts.writer(job, 1, 8)
        write(owner, {"x": b"owner"}).publish()
        write(late, {"x": b"late", "y": b"late"}).publish()
        assert read(artifacts, job, 1, 8) == {"x": b"owner"}
        assert read(artifacts, job, 1, 7) == {"x": b"late", "y": b"late"}
        artifacts.remove(job, outputs_name(1, 7))
        assert read(artifacts, job, 1, 7) == {}
        assert read(artifacts, job, 1, 8) == {"x": b"owner"}

    def test_publishing_again_replaces_all(self, artifacts: ArtifactStore) -> None:
        """A worker died between publishing and recording the end; its adopter has the same attempt and token."""
        job = new_id()
        write(artifacts.writer(job, 1, 7), {"x": b"first", "gone": b""}).publish()
        write(artifacts.writer(job, 1, 7), {"x": b"second"}).publish()
        assert read(artifacts, job, 1, 7) == {"x": b"second"}

    def test_discarded_outputs_are_never_seen(self, artifacts: ArtifactStore) -> None:
        job = new_id()
        writer = write(artifacts.writer(job, 1, 7), {"x": b"x"})
        writer.discard()
        writer.discard()
        artifacts.writer(job, 1, 8).discard()
        assert list(artifacts.stored(job)) == []
        assert artifacts.list(job, 1, 7) == []

    def test_what_was_written_is_known_before_it_is_published(self, artifacts: ArtifactStore) -> None:
        """The outputs of cached tasks are merged into those of an attempt. Proves D1."""
        job = new_id()
        writer = write(artifacts.writer(job, 1, 7), {"a/b": b"old", "c": b"c"})
        assert all(writer.has(name) for name in ("a/b", "a", "c", "c/d"))
        assert not any(writer.has(name) for name in ("b", "a/c", "cc"))
        assert writer.open("b") is None
        assert writer.open("a") is None
        file = writer.open("a/b")
        assert file is not None
        with file:
            assert file.read() == b"old"
        assert writer.drop("a/b") == 3
        assert not writer.has("a")
        write(writer, {"a/b": b"new"}).publish()
        assert read(artifacts, job, 1, 7) == {"a/b": b"new", "c": b"c"}

    def test_two_entries_of_one_name_are_refused(self, artifacts: ArtifactStore) -> None:
        writer = write(artifacts.writer(new_id(), 1, 7), {"a": b"", "b/c": b""})
        for name in ("a", "b", "a/b", "b/c/d"):
            with pytest.raises(FileExistsError):
                writer.create(name)
        writer.discard()

    def test_outputs_are_collected_with_their_limits(self, artifacts: ArtifactStore) -> None:
        """What checks the contract works with every store. Proves R13, R14."""
        job = new_id()
        collected = CollectedOutputs(artifacts.writer(job, 1, 7), LIMITS)
        writer = write(artifacts.writer(job, 2, 8), {"x": b"x" * 500})
        source = writer.open("x")
        assert source is not None
        with source:
            collected.file("deep/x", source)
        assert collected.digest("deep/x") is not None
        assert collected.digest("x") is None
        collected.publish()
        writer.discard()
        assert read(artifacts, job, 1, 7) == {"deep/x": b"x" * 500}

    def test_reading_starts_anywhere(self, artifacts: ArtifactStore) -> None:
        job = new_id()
        write(artifacts.writer(job, 1, 7), {"x": b"0123456789"}).publish()
        for start, rest in ((0, b"0123456789"), (7, b"789"), (10, b""), (99, b"")):
            opened = artifacts.open(job, 1, 7, "x", start=start)
            with opened.content as content:
                assert (opened.size, content.read()) == (10, rest)

    @pytest.mark.parametrize("path", ["", ".", "..", "../x", "/x", "a", "a/../x", "x/", "x\0", "none", "x" * 5000])
    def test_no_other_path_is_found(self, artifacts: ArtifactStore, path: str) -> None:
        """Proves R14."""
        job = new_id()
        write(artifacts.writer(job, 1, 7), {"x": b"x", "a/b": b""}).publish()
        write(artifacts.writer(job, 1, 8), {"none": b"x"}).publish()
        with pytest.raises(NotFound):
            artifacts.open(job, 1, 7, path)

    def test_all_outputs_are_found_for_the_sweep(self, artifacts: ArtifactStore, other: ArtifactStore) -> None:
        """Also those of a worker that died before it published."""
        jobs = sorted(new_id() for _ in range(3))
        for job in jobs:
            write(artifacts.writer(job, 1, 7), {"x": b"x"}).publish()
        unfinished = write(artifacts.writer(jobs[0], 1, 8), {"x": b"x"})
        assert list(other.jobs("", 2)) == jobs[:2]
        assert list(other.jobs(jobs[1], 2)) == jobs[2:]
        stored = other.stored(jobs[0])
        assert len(stored) == 2
        assert outputs_name(1, 7) in {one.name for one in stored}
        assert outputs_name(1, 8) not in {one.name for one in stored}
        assert all(-1 < one.age < 600 for one in stored)
        for one in stored:
            other.remove(jobs[0], one.name)
        assert list(other.stored(jobs[0])) == []
        other.remove(jobs[0])
        assert list(other.jobs("", 9)) == jobs[1:]
        unfinished.discard()

    def test_two_threads_publish_at_the_same_time(self, artifacts: ArtifactStore) -> None:
        """Proves R14: the files of one set, never of both."""
        job = new_id()

        def publish(data: bytes) -> None:
            write(artifacts.writer(job, 1, int(data)), dict.fromkeys("abc", data)).publish()

        threads = [threading.Thread(target=publish, args=(data,)) for data in (b"7", b"8")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for token in (7, 8):
            assert set(read(artifacts, job, 1, token).values()) == {str(token).encode()}

    # Uploads and inputs

    def test_upload_reaches_a_job_and_stays_until_the_job_is_deleted(
        self, artifacts: ArtifactStore, other: ArtifactStore
    ) -> None:
        job, files = new_id(), {"a.txt": b"one", "deep/b.txt": b"\0" * 500}
        upload = uploaded(artifacts, files)
        assert other.uploaded(TENANT, upload) == {"a.txt": 3, "deep/b.txt": 500}
        second = uploaded(artifacts, {"c": b"three"})
        link_uploads(other, TENANT, job, [upload, second], 1000)
        link_uploads(other, TENANT, job, [upload, second], 1000)
        assert artifacts.expire_uploads(-1) == 2
        assert artifacts.uploaded(TENANT, upload) == {}
        assert given(artifacts, job, upload, second) == files | {"c": b"three"}
        with pytest.raises(NotFound):
            link_uploads(artifacts, TENANT, new_id(), [upload], 1000)
        assert artifacts.delete_job(job) is None
        with pytest.raises(NotFound):
            input_files(other, job, [upload])

    def test_upload_belongs_to_its_tenant(self, artifacts: ArtifactStore) -> None:
        """Proves N5."""
        upload = uploaded(artifacts, {"a": b"x"}, "blue")
        assert artifacts.uploaded("green", upload) == {}
        with pytest.raises(NotFound):
            link_uploads(artifacts, "green", new_id(), [upload], 1000)

    def test_incomplete_upload_is_not_given(self, artifacts: ArtifactStore) -> None:
        incoming = receive_upload(artifacts, TENANT, LIMITS)
        send(incoming, {"a": b"x"})
        assert artifacts.uploaded(TENANT, incoming.id) == {}
        with pytest.raises(NotFound):
            link_uploads(artifacts, TENANT, new_id(), [incoming.id], 1000)
        incoming.begin("b")
        incoming.write(b"half")
        incoming.discard()
        assert artifacts.uploaded(TENANT, incoming.id) == {}
        assert artifacts.staged_bytes(TENANT) == 0

    def test_rules_of_uploads(self, artifacts: ArtifactStore) -> None:
        incoming = receive_upload(artifacts, TENANT, LIMITS)
        send(incoming, {"a": b"x"})
        for name in ("../x", "/x", "a//b", ".", "a", "a/b"):
            with pytest.raises(Invalid):
                incoming.begin(name)
        incoming.begin("large")
        with pytest.raises(TooLarge):
            incoming.write(b"x" * 1000)
        incoming.discard()
        first, second = (uploaded(artifacts, {"a": b"x" * 600}) for _ in range(2))
        with pytest.raises(Invalid):
            link_uploads(artifacts, TENANT, new_id(), [first, second], 10_000)
        with pytest.raises(TooLarge):
            link_uploads(artifacts, TENANT, new_id(), [first], 599)

    def test_quota_of_a_tenant_counts_what_waits(self, artifacts: ArtifactStore) -> None:
        waiting = receive_upload(artifacts, TENANT, LIMITS)
        send(waiting, {"incomplete": b"x" * 500})
        for _ in range(STAGED):
            uploaded(artifacts, {"a": b"x" * 1000})
        assert artifacts.staged_bytes(TENANT) == STAGED * 1000 + 500
        with pytest.raises(Conflict):
            receive_upload(artifacts, TENANT, LIMITS)
        receive_upload(artifacts, "another", LIMITS).discard()
        assert artifacts.expire_uploads(3600) == 0
        assert artifacts.expire_uploads(-1) == STAGED + 1
        assert artifacts.staged_bytes(TENANT) == 0
        waiting.discard()

    def test_inputs_of_jobs_are_found_by_age(self, artifacts: ArtifactStore) -> None:
        upload, jobs = uploaded(artifacts, {"a": b"x"}), sorted(new_id() for _ in range(3))
        for job in jobs:
            artifacts.link_upload(TENANT, upload, job)
        assert list(artifacts.jobs_with_inputs(after="", limit=9, older=3600)) == []
        assert list(artifacts.jobs_with_inputs(after="", limit=2, older=-1)) == jobs[:2]
        assert list(artifacts.jobs_with_inputs(after=jobs[1], limit=2, older=-1)) == jobs[2:]
        artifacts.remove_inputs(jobs[0])
        assert list(artifacts.jobs_with_inputs(after="", limit=9, older=-1)) == jobs[1:]
        assert artifacts.inputs(jobs[0], upload) == {}
        assert given(artifacts, jobs[1], upload) == {"a": b"x"}

    # Deleted jobs

    def test_deleted_job_leaves_nothing(self, artifacts: ArtifactStore, other: ArtifactStore) -> None:
        """Proves D7: also no file of an attempt that was not published."""
        job, neighbour = new_id(), new_id()
        upload = uploaded(artifacts, {"a": b"x"})
        for one in (job, neighbour):
            artifacts.link_upload(TENANT, upload, one)
            write(artifacts.writer(one, 1, 7), {"x": b"x"}).publish()
        write(artifacts.writer(job, 2, 8), {"x": b"x"})
        assert other.delete_job(job) is None
        assert other.delete_job(job) is None
        assert list(artifacts.stored(job)) == []
        assert artifacts.inputs(job, upload) == {}
        assert list(artifacts.jobs("", 9)) == [neighbour]
        assert read(artifacts, neighbour, 1, 7) == {"x": b"x"}
        assert given(artifacts, neighbour, upload) == {"a": b"x"}

    def test_room(self, artifacts: ArtifactStore) -> None:
        artifacts.check_room()
