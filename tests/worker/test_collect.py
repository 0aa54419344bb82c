"""Outputs of a child: its result, artifacts and masked secrets, and what is refused."""

import io
import os
import tarfile
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from holdfast.duties.sweeper import Sweeper
from holdfast.errors import NotFound
from holdfast.model import Job, Status
from holdfast.runner.base import EngineUnreachable
from holdfast.runner.collected_outputs import ArtifactLimits, CollectedOutputs, ContractViolation
from holdfast.runner.folder_artifacts import FolderArtifacts
from holdfast.runner.folder_writer import FolderWriter
from holdfast.runner.function import Context
from holdfast.runner.output_sources import collect_folder, collect_tar, read_in_thread
from holdfast.runner.result_report import parse_report
from holdfast.runner.secrets import Mask
from holdfast.runner.tree_removal import remove_tree
from holdfast.worker.log_reader import MAX_LINE, LineSplitter
from tests.support.in_process_workers import InProcessWorkers
from tests.support.store_harness import StoreHarness

LIMITS = ArtifactLimits(bytes=1000, entries=10)


async def artifacts_of(workers: InProcessWorkers, job: Job) -> dict[str, bytes]:
    """What the last attempt of a job left."""
    last = (await workers.store.attempts.list(job.id))[-1]
    kept = FolderArtifacts(workers.settings.shared)
    found = {}
    for artifact in kept.list(job.id, last.attempt, last.token):
        with kept.open(job.id, last.attempt, last.token, artifact.path).content as file:
            found[artifact.path] = file.read()
            assert len(found[artifact.path]) == artifact.size
    return found


async def test_a_result_file_gives_the_result_or_a_text_that_is_safe_to_show(workers: InProcessWorkers) -> None:
    """Seven ways to leave one, or none. Proves R13."""

    def report(text: str, code: int = 0) -> str:
        return f"printf '%s' '{text}' > result.json; exit {code}"

    jobs = {
        "none": await workers.sh("true"),
        "good": await workers.sh(report('{"version":1,"result":{"rows":3}}')),
        "contrary": await workers.sh(report('{"version":1,"status":"failed","error":{"message":"no rows"}}')),
        "told": await workers.sh(
            report('{"version":1,"status":"failed","error":{"code":"bad_rows","message":"row 7"}}', 9)
        ),
        "invalid": await workers.sh(report("{")),
        "version": await workers.sh(report('{"version":2}')),
        "big": await workers.sh("head -c 2000000 /dev/zero | tr '\\0' ' ' > result.json"),
        "link": await workers.sh("ln -s /etc/passwd result.json"),
        "fifo": await workers.sh("mkfifo result.json"),
        "demanded": await workers.command("true", spec={"require_result": True}),
        "failed anyway": await workers.sh(report('{"version":1}', 3)),
    }
    ends = {}
    async with workers.worker():
        for name, job in jobs.items():
            ended = await workers.ended(job)
            ends[name] = (ended.status, ended.exit_code, ended.result, ended.error and ended.error.code)
    done, failed, broken = Status.SUCCEEDED, Status.FAILED, "contract_violation"
    assert ends == {
        "none": (done, 0, None, None),
        "good": (done, 0, {"rows": 3}, None),
        "contrary": (failed, 0, None, "reported_failure"),
        "told": (failed, 9, None, "bad_rows"),
        "invalid": (failed, 0, None, broken),
        "version": (failed, 0, None, broken),
        "big": (failed, 0, None, broken),
        "link": (failed, 0, None, broken),
        "fifo": (failed, 0, None, broken),
        "demanded": (failed, 0, None, broken),
        "failed anyway": (failed, 3, None, "exit_nonzero"),
    }
    reported = (await workers.get(jobs["told"])).error
    assert reported is not None
    assert reported.message == "row 7"
    safe = (await workers.get(jobs["link"])).error
    assert safe is not None
    assert "passwd" not in safe.message


async def test_files_under_output_are_the_artifacts_of_their_attempt(workers: InProcessWorkers) -> None:
    """One that fails, then succeeds, shows only the second's files. Proves R14."""
    script = "mkdir -p output/a/b; echo $HOLDFAST_ATTEMPT > output/a/b/n; touch output/only-$HOLDFAST_ATTEMPT; "
    job = await workers.sh(script + "[ $HOLDFAST_ATTEMPT = 2 ]", max_attempts=2, retry={"base": 0.01, "cap": 0.01})
    async with workers.worker():
        await workers.ended(job, Status.SUCCEEDED)
    assert await artifacts_of(workers, job) == {"a/b/n": b"2\n", "only-2": b""}
    left = [path.name for path in (workers.settings.shared / "artifacts" / job.id).iterdir()]
    assert sorted(name.split(".")[0] for name in left) == ["1", "2"]


async def test_outputs_that_break_the_contract_are_not_taken(workers: InProcessWorkers) -> None:
    """A job that failed by itself keeps its own error. Proves R14."""
    workers.set(artifact_max_bytes=100_000)
    bad = {
        "size": "head -c 200000 /dev/zero > output/x",
        "sparse": "truncate -s 8G output/x",
        "no folder": "rmdir output; ln -s /etc output",
        "name": "touch \"output/$(printf 'a\\nb')\"",
    }
    jobs = {name: await workers.sh(script) for name, script in bad.items()}
    own = await workers.sh("truncate -s 8G output/x; exit 4")
    async with workers.worker():
        for name, job in jobs.items():
            ended = await workers.ended(job, Status.FAILED)
            assert ended.error is not None, name
            assert ended.error.code == "contract_violation", name
            assert await artifacts_of(workers, job) == {}
        assert (await workers.ended(own, Status.FAILED)).exit_code == 4
    assert list((workers.settings.shared / "artifacts").glob("*/.*")) == []


def tar(*members: tuple[tarfile.TarInfo, bytes]) -> io.BytesIO:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for member, data in members:
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    buffer.seek(0)
    return buffer


def member(name: str, type: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type = type
    info.linkname = link
    return info


def test_an_archive_is_taken_like_a_folder(tmp_path: Path) -> None:
    gathered = CollectedOutputs(FolderWriter(tmp_path / "job" / "1.1"), LIMITS)
    archive = tar(
        (member("result.json"), b'{"version":1}'),
        (member("output", tarfile.DIRTYPE), b""),
        (member("output/a", tarfile.DIRTYPE), b""),
        (member("output/a/b"), b"data"),
    )
    collect_tar(archive, gathered)
    gathered.publish()
    assert gathered.report == b'{"version":1}'
    assert (tmp_path / "job" / "1.1" / "a" / "b").read_bytes() == b"data"


@pytest.mark.parametrize(
    "bad",
    [
        member("output/../../x"),
        member("/etc/passwd"),
        member("other/output/x"),
        member("output", tarfile.SYMTYPE, "/etc"),
        member("result.json", tarfile.SYMTYPE, "/etc/passwd"),
        member("output/" + "/".join("d" * 1 for _ in range(70))),
    ],
    ids=lambda info: f"{info.name[:20]}-{info.type.decode()}",
)
def test_a_hostile_archive_is_refused(tmp_path: Path, bad: tarfile.TarInfo) -> None:
    """Proves R14."""
    gathered = CollectedOutputs(FolderWriter(tmp_path / "job" / "1.1"), LIMITS)
    with pytest.raises(ContractViolation):
        collect_tar(tar((bad, b"")), gathered)


def test_counts_and_sizes_are_capped(tmp_path: Path) -> None:
    """Proves R14."""
    many = tar(*((member(f"output/{n}"), b"") for n in range(11)))
    with pytest.raises(ContractViolation, match="more than 10 entries"):
        collect_tar(many, CollectedOutputs(FolderWriter(tmp_path / "1"), LIMITS))
    with pytest.raises(ContractViolation, match="with output/x the output is larger than 1000 bytes"):
        collect_tar(tar((member("output/x"), b"x" * 1001)), CollectedOutputs(FolderWriter(tmp_path / "2"), LIMITS))


def test_file_whose_size_is_too_large_is_refused_before_it_is_copied(tmp_path: Path) -> None:
    """A job makes a sparse file of any size at once. Proves R14."""
    source = io.BytesIO(b"x" * 1001)
    with pytest.raises(ContractViolation, match="with output/x the output is larger than 1000 bytes"):
        CollectedOutputs(FolderWriter(tmp_path / "1"), LIMITS).file("x", source, 1001)
    assert source.tell() == 0


def test_file_that_grows_while_it_is_copied_is_capped(tmp_path: Path) -> None:
    """Proves R14."""
    with pytest.raises(ContractViolation, match="with output/x the output is larger than 1000 bytes"):
        CollectedOutputs(FolderWriter(tmp_path / "1"), LIMITS).file("x", io.BytesIO(b"x" * 1001), 1000)


def test_a_download_follows_no_link_and_leaves_no_folder(tmp_path: Path) -> None:
    """What was good when it was taken is looked at again. Proves R14."""
    kept = FolderArtifacts(tmp_path)
    folder = kept.folder("job", 1, 1)
    folder.mkdir(parents=True)
    (folder / "fine").write_text("fine")
    (folder / "link").symlink_to("/etc/passwd")
    (folder / "folder").symlink_to("/etc")
    os.mkfifo(folder / "fifo")
    with kept.open("job", 1, 1, "fine").content as file:
        assert file.read() == b"fine"
    for path in ("link", "folder/passwd", "fifo", "../1.1/fine", "/etc/passwd", "", ".", "none", "fine/x"):
        with pytest.raises(NotFound):
            kept.open("job", 1, 1, path)
    assert [artifact.path for artifact in kept.list("job", 1, 1)] == ["fine"]


def test_invalid_result_files() -> None:
    for data in (b"", b"[]", b"1", b'{"version":"1"}', b'{"version":1,"more":2}', b'{"version":1,"status":"odd"}',
                 b'{"version":1,"error":{"code":"<b>","message":"x"}}', b"[" * 100_000, b"\xff"):  # fmt: skip
        with pytest.raises(ContractViolation):
            parse_report(data)


async def test_secrets_are_given_at_the_start_and_masked_in_everything(
    workers: InProcessWorkers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proves R19."""
    folder = tmp_path / "secrets"
    folder.mkdir()
    (folder / "PEM").write_text("-----BEGIN-----\nabcdefghijkl\n-----END-----\n")
    monkeypatch.setenv("HOLDFAST_SECRET_TOKEN", 'hunter2-"quoted"')
    workers.set(secrets_dir=folder)
    script = """
    echo "token $TOKEN"; echo "$PEM" >&2
    printf '{"event":"said","token":"hunter2-\\\\"quoted\\\\""}\\n'
    printf '{"version":1,"status":"failed","error":{"message":"with abcdefghijkl"}}' > result.json
    head -c 65530 /dev/zero | tr '\\0' x; printf '%s' "$TOKEN"; echo
    """
    job = await workers.sh(script, secrets=["TOKEN", "PEM"])
    missing = await workers.sh("echo never", secrets=["NO_SUCH"], max_attempts=3)

    @workers.functions.add
    def leaky(ctx: Context) -> str:
        ctx.log(f"has {ctx.secrets['TOKEN']}")
        return ctx.secrets["TOKEN"]

    function = await workers.submit("leaky", secrets=["TOKEN"])
    async with workers.worker():
        ended = await workers.ended(job, Status.FAILED)
        unknown = await workers.ended(missing, Status.FAILED)
        returned = await workers.ended(function, Status.SUCCEEDED)
    log = await workers.log(job)
    assert log[0] == "token ***"
    assert await workers.log(job, "stderr") == ["***", "***", "***"]
    assert [event.data for event in await workers.events(job, "said")] == [{"token": "***"}]
    assert ended.error is not None
    assert ended.error.message == "with ***"
    assert (returned.result, await workers.log(function)) == ("***", ["has ***"])
    assert unknown.error is not None
    assert "secret NO_SUCH is not set on this worker" in unknown.error.message
    everything = repr([await workers.events(one) for one in (job, function)])
    for value in ("hunter2", "abcdefghijkl"):
        assert value not in everything


def test_a_secret_is_never_cut_in_two() -> None:
    """Proves R19."""
    mask = Mask(["s3cret-value"])
    for before in range(MAX_LINE - 14, MAX_LINE + 2):
        data = b"x" * before + b"s3cret-value" + b"y" * 100_000
        lines = LineSplitter(0, mask)
        pieces = lines.feed(0, data)[0] + lines.rest()
        assert b"".join(pieces) == data
        assert sum(piece.count(b"s3cret-value") for piece in pieces) == 1


async def test_files_of_jobs_that_are_gone_and_of_lost_leases_are_swept(harness: StoreHarness, tmp_path: Path) -> None:
    """What the record names stays. Proves J16, R14."""
    kept = FolderArtifacts(tmp_path)
    job = await harness.submit()
    (lease,) = await harness.claim()
    gone = "01890000-0000-7000-8000-000000000000"
    for job_id, token in ((job.id, lease.token), (job.id, 99), (gone, 1)):
        folder = kept.folder(job_id, 1, token)
        folder.mkdir(parents=True)
        (folder / "file").touch()
    assert await Sweeper(harness.store, kept).run_once() == 0
    assert await Sweeper(harness.store, kept, grace=0).run_once() == 2
    assert [one.name for one in kept.stored(job.id)] == [f"1.{lease.token}"]
    assert not (tmp_path / "artifacts" / gone).exists()
    await harness.finish(lease)
    assert await Sweeper(harness.store, kept, grace=0).run_once() == 0
    await harness.store.jobs.delete(job.id)
    await Sweeper(harness.store, kept, grace=0).run_once()
    assert kept.jobs("", 10) == []


async def test_a_result_that_grows_beyond_its_limit_breaks_the_contract(workers: InProcessWorkers) -> None:
    script = """printf '{"version":1,"result":[' > result.json; yes 1e9, | head -n 150000 | tr -d '\\n' >> result.json
    printf '1]}' >> result.json"""
    job = await workers.sh(script)
    async with workers.worker():
        ended = await workers.ended(job, Status.FAILED)
    assert ended.error is not None
    assert ended.error.code == "contract_violation"


async def test_a_secret_is_masked_however_json_writes_it(
    workers: InProcessWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proves R19."""
    monkeypatch.setenv("HOLDFAST_SECRET_S", "pässw/rd+")
    job = await workers.command("printf", "%s\\n", '{"event":"said","a":"p\\u00e4ssw\\/rd\\u002B"}', secrets=["S"])
    async with workers.worker():
        await workers.ended(job, Status.SUCCEEDED)
    assert [event.data for event in await workers.events(job, "said")] == [{"a": "***"}]


def test_a_tree_of_any_depth_is_removed(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    here = os.open(root, os.O_RDONLY)
    for _ in range(3000):
        os.mkdir("d", dir_fd=here)
        inner = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = inner
    os.close(here)
    remove_tree(root)
    assert not root.exists()


NOBODY = 65534


@pytest.mark.parametrize("left", ["folder", "file"])
def test_unreadable_outputs_break_the_contract(left: str, tmp_path: Path) -> None:
    """Proves R14. Waiting does not help; a worker without root is the child's own user."""
    with tempfile.TemporaryDirectory(prefix="holdfast-test-") as name:
        work = Path(name)
        work.chmod(0o755)
        (work / "output").mkdir(mode=0o755)
        (work / "output" / "fine").write_bytes(b"fine")
        path = work / "output" / "shut"
        path.mkdir() if left == "folder" else path.touch()
        path.chmod(0)
        gathered = CollectedOutputs(FolderWriter(tmp_path / "kept"), LIMITS)
        was = os.geteuid()
        if was == 0:
            tmp_path.chmod(0o777)
            gathered = CollectedOutputs(FolderWriter(work / "kept"), LIMITS)
            work.chmod(0o777)
            os.seteuid(NOBODY)
        try:
            with pytest.raises(ContractViolation, match="output/shut cannot be collected: Permission denied"):
                collect_folder(work, gathered)
        finally:
            os.seteuid(was)
            gathered.discard()


async def test_name_that_is_too_long_where_it_is_to_be_kept_breaks_the_contract(workers: InProcessWorkers) -> None:
    """Proves R14. It fits where the child made it, step by step; it is no trouble of ours that could pass."""
    script = "cd output; n=0; while [ $n -lt 16 ]; do mkdir $D; cd $D; n=$((n + 1)); done; echo x > f"
    job = await workers.sh(script, env={"D": "d" * 254})
    async with workers.worker():
        ended = await workers.ended(job, Status.FAILED)
    assert ended.error is not None
    assert ended.error.code == "contract_violation"


async def test_archive_that_breaks_off_on_its_way_is_not_the_childs_fault(tmp_path: Path) -> None:
    """Proves R5. An engine that goes away in the middle of a file is waited for; what is in the file says nothing."""
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w") as archive:
        about = tarfile.TarInfo("output/file")
        about.size = 900
        archive.addfile(about, io.BytesIO(b"x" * 900))

    async def broken() -> AsyncIterator[bytes]:
        yield whole.getvalue()[:700]
        raise EngineUnreachable("it went away")

    gathered = CollectedOutputs(FolderWriter(tmp_path / "kept"), LIMITS)
    with pytest.raises(EngineUnreachable, match="it went away"):
        await read_in_thread(broken(), lambda stream: collect_tar(stream, gathered))

    async def short() -> AsyncIterator[bytes]:
        yield whole.getvalue()[:700]

    with pytest.raises(ContractViolation, match="cannot be read"):
        await read_in_thread(
            short(), lambda stream: collect_tar(stream, CollectedOutputs(FolderWriter(tmp_path / "other"), LIMITS))
        )
