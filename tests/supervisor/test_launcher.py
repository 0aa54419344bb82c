"""The launcher and the remover as programs: messages in, folders and reports out."""

import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.runner import supervisor
from holdfast.runner.attempt_folder import AttemptFolder
from holdfast.runner.frames import Stream
from holdfast.runner.launcher import HEAD, NOT_INCLUDED, LaunchRecords, encode_launch
from holdfast.runner.supervisor.protocol import MAX_LAUNCH, ExitStatus, LaunchReport
from holdfast.runner.wire import SupervisorSpec, WireTask, encode_spec
from tests.supervisor.test_supervisor_fuzz import FUZZ, OPTIONS, bent, sanitized
from tests.support.supervisor_harness import SANITIZERS, eventually, running

__all__ = ["sanitized"]
KEPT = {"cmd", "spare.0", "spare.1", "spare.2", "lock", "limits", "spec", "log", "exit.tmp", "started.tmp"}


class Helper:
    """A helper process of the supervisor's program, and the worker's end of its socket."""

    def __init__(self, *arguments: str, program: Path | None = None, env: dict[str, str] | None = None) -> None:
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(60)
        command = [str(program or supervisor.path()), *arguments]
        self.process: subprocess.Popen[bytes] = subprocess.Popen(
            command, stdin=theirs.fileno(), env={**SANITIZERS, **(env or {})}
        )
        theirs.close()

    def report(self) -> tuple[int, ...]:
        return HEAD.unpack_from(self.socket.recv(1 << 17))

    def close(self) -> int:
        self.socket.close()
        return self.process.wait(60)


@contextmanager
def launching(pool: Path, program: Path | None = None, env: dict[str, str] | None = None) -> Iterator[Helper]:
    helper = Helper("--launch", str(pool), " " * 4096, program=program, env=env)
    try:
        yield helper
    finally:
        helper.close()


def records(path: Path, *command: str, **more: bytes) -> LaunchRecords:
    spec = SupervisorSpec(token=1, mark=f"test/{path.name}/1", tasks=(WireTask(name="main", argv=command),))
    return {"folder": os.fsencode(path), "request": b"{}", "limits": b"{}", "spec": encode_spec(spec), **more}  # type: ignore[dict-item]


@pytest.fixture
def pool(tmp_path: Path) -> Path:
    made = tmp_path / "pool"
    made.mkdir()
    return made


def test_start_is_reported_when_it_begins_and_when_it_ends(tmp_path: Path, pool: Path) -> None:
    with launching(pool) as helper:
        helper.socket.send(encode_launch(7, records(tmp_path / "job.1", "/bin/sh", "-c", "echo hello; exit 3")))
        kind, _, number, pid, _, _ = helper.report()
        assert (kind, number) == (LaunchReport.BEGUN, 7)
        message = helper.socket.recv(1 << 17)
    kind, nothing_left, number, status, exit_length, log_length = HEAD.unpack_from(message)
    folder = AttemptFolder(tmp_path / "job.1")
    started, ended = folder.started(), folder.exit()
    assert started is not None
    assert ended is not None
    assert (kind, number, status, started.supervisor_pid, ended.code) == (LaunchReport.ENDED, 7, 3, pid, 3)
    assert nothing_left == 1
    assert message[HEAD.size :] == (folder.path / "exit").read_bytes() + (folder.path / "log").read_bytes()
    assert len(message) == HEAD.size + exit_length + log_length


@pytest.mark.parametrize(
    "script",
    ["echo x > work/output/file", "echo x > work/result.json", "rmdir work/output", "rm -r work; ln -s / work"],
)
def test_what_a_job_left_is_not_overlooked(tmp_path: Path, pool: Path, script: str) -> None:
    with launching(pool) as helper:
        path = tmp_path / "job.1"
        helper.socket.send(encode_launch(1, records(path, "/bin/sh", "-c", f"cd {path} && {script}")))
        assert helper.report()[0] == LaunchReport.BEGUN
        assert helper.report()[1] == 0


def test_long_log_is_left_to_the_worker(tmp_path: Path, pool: Path) -> None:
    with launching(pool) as helper:
        helper.socket.send(encode_launch(1, records(tmp_path / "job.1", "/bin/sh", "-c", "head -c 60000 /dev/zero")))
        helper.report()
        _, _, _, status, exit_length, log_length = helper.report()
    assert (status, log_length) == (0, NOT_INCLUDED)
    assert exit_length < NOT_INCLUDED


def test_folder_that_exists_is_not_touched(tmp_path: Path, pool: Path) -> None:
    (tmp_path / "job.1").mkdir()
    (tmp_path / "job.1" / "spec").write_text("another owner's")
    with launching(pool) as helper:
        helper.socket.send(encode_launch(1, records(tmp_path / "job.1", "/bin/true")))
        kind, _, _, error, _, _ = helper.report()
        assert (kind, os.strerror(error)) == (LaunchReport.FAILED, "Directory not empty")
        assert helper.report()[3] == ExitStatus.LEFT_BROKEN
    assert os.listdir(tmp_path / "job.1") == ["spec"]
    assert sorted(os.listdir(tmp_path)) == ["job.1", "pool"]


def test_supervisor_outlives_its_launcher_and_shows_its_folder(tmp_path: Path, pool: Path) -> None:
    """Proves R3: it leads a session of its own, and holds no descriptor of the worker's socket."""
    path = tmp_path / "job.1"
    gate = tmp_path / "gate"
    with launching(pool) as helper:
        script = f"while [ ! -e {gate} ]; do sleep 0.02; done"
        helper.socket.send(encode_launch(1, records(path, "/bin/sh", "-c", script)))
        pid = helper.report()[3]
        assert helper.close() == 0
    assert running(pid)
    assert os.getsid(pid) == pid
    assert Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")[1:] == [os.fsencode(path)]
    assert not [fd for fd in os.listdir(f"/proc/{pid}/fd") if _is_unix_socket(pid, fd)]
    gate.touch()
    eventually(AttemptFolder(path).exit, "it records its end")


def _is_unix_socket(pid: int, fd: str) -> bool:
    return os.readlink(f"/proc/{pid}/fd/{fd}").startswith("socket:")


def test_message_that_is_read_too_late_leaves_no_trace(tmp_path: Path, pool: Path) -> None:
    """Proves L15."""
    with launching(pool) as helper:
        helper.socket.send(encode_launch(1, records(tmp_path / "job.1", "/bin/true", start_by=b"1")))
        kind, _, _, error, _, _ = helper.report()
        assert (kind, os.strerror(error)) == (LaunchReport.FAILED, "Timer expired")
    assert os.listdir(tmp_path) == ["pool"]


def test_message_that_is_too_long_ends_the_launcher(pool: Path) -> None:
    """The worker sends none, and starts the attempt itself when the launcher is gone."""
    with launching(pool) as helper:
        helper.socket.send(b"x" * (MAX_LAUNCH + 1))
        assert helper.process.wait(60) == ExitStatus.LEFT_USAGE


# Spare folders


def removed(pool: Path, *paths: str) -> bytes:
    helper = Helper("--remove", str(pool))
    helper.socket.send(b"".join(path.encode() + b"\0" for path in paths))
    answer = helper.socket.recv(1024)
    assert helper.close() == 0
    return answer


def ran(pool: Path, path: Path, *command: str, **more: bytes) -> None:
    with launching(pool) as helper:
        helper.socket.send(encode_launch(1, records(path, *command, **more)))
        assert [helper.report()[0], helper.report()[0]] == [LaunchReport.BEGUN, LaunchReport.ENDED]


def test_folder_is_used_again_without_anything_of_its_last_job(tmp_path: Path, pool: Path) -> None:
    """Proves I1: no file that a job could open, and no output, spec or input of it."""
    first, second = tmp_path / "first.1", tmp_path / "second.1"
    leave = f"cd {first}; echo seen; mkdir -p work/a/b space; echo x > work/a/b/c; ln work/a/b/c log2; ln -s /etc tmp"
    ran(pool, first, "/bin/sh", "-c", leave, stdin=b"given", secrets=b'["hidden"]')
    inodes = {name: (first / name).stat().st_ino for name in ("spec", "lock", "log", "cmd", "exit", "work")}
    assert removed(pool, f"+{first}") == b"\1"
    (spare,) = pool.iterdir()
    assert set(os.listdir(spare)) <= KEPT
    assert not [path for path in spare.rglob("*") if path.is_file() and b"hidden" in path.read_bytes()]
    assert (spare / "spec").read_bytes() == (spare / "log").read_bytes() == b""
    ran(pool, second, "/bin/sh", "-c", f"ls -A {second}/work; cat {second}/work/request.json")
    again = AttemptFolder(second)
    said = b"".join(frame.data for frame in again.frames().read() if frame.stream is Stream.STDOUT)
    assert said == b"output\nrequest.json\n{}"
    ended = again.exit()
    assert ended is not None
    assert (ended.mark, ended.code) == ("test/second.1/1", 0)
    assert list(pool.iterdir()) == []
    now = {name: (second / name).stat().st_ino for name in inodes}
    assert {name for name in inodes if now[name] == inodes[name]} >= set(inodes) - {"work"}
    assert not (second / "stdin").exists()


def test_file_with_another_name_is_not_used_again(tmp_path: Path, pool: Path) -> None:
    """A job that runs as the worker's user can link our files; the next attempt's are its own."""
    path, link = tmp_path / "first.1", tmp_path / "link"
    ran(pool, path, "/bin/sh", "-c", f"ln {path}/log {link}; rm {path}/spare.0; ln -s /etc/passwd {path}/spare.0")
    assert removed(pool, f"+{path}") == b"\1"
    (spare,) = pool.iterdir()
    assert set(os.listdir(spare)) == KEPT - {"log", "spare.0"}


def test_folder_without_an_end_is_removed(tmp_path: Path, pool: Path) -> None:
    (tmp_path / "lost.1" / "cmd").mkdir(parents=True)
    (tmp_path / "lost.1" / "started").touch(0o600)
    assert removed(pool, f"+{tmp_path / 'lost.1'}", str(tmp_path / "no.1")) == b"\1\1"
    assert sorted(os.listdir(tmp_path)) == ["pool"]
    assert list(pool.iterdir()) == []


def test_pool_is_bounded(tmp_path: Path, pool: Path) -> None:
    for n in range(64):
        (pool / str(n)).mkdir()
    ran(pool, tmp_path / "job.1", "/bin/true")
    ran(pool, tmp_path / "next.1", "/bin/true")
    assert len(list(pool.iterdir())) == 62
    for n in range(2):
        (pool / f"more-{n}").mkdir()
    assert removed(pool, f"+{tmp_path / 'job.1'}") == b"\1"
    assert len(list(pool.iterdir())) == 64
    assert not (tmp_path / "job.1").exists()


# Fuzzing

keys = st.sampled_from(
    [b"id", b"folder", b"claim", b"own", b"uid", b"gid", b"request", b"stdin", b"limits", b"secrets", b"start_by", b"x"]
)
values = st.one_of(st.binary(max_size=20), st.sampled_from([b"1", b"0", b"/", b"/x/", b"/x/..", str(2**64).encode()]))


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("launched")
    (folder / "pool").mkdir()
    return folder


@FUZZ
@given(st.data())
def test_no_message_breaks_the_launcher(sanitized: Path, fuzzed: Path, data: st.DataObject) -> None:
    """It starts what a message asks for, or exits because the message is malformed; nothing else."""
    name = f"job.{len(os.listdir(fuzzed))}"
    good = encode_launch(1, records(fuzzed / name, "/bin/true"))
    more = data.draw(st.lists(st.tuples(keys, values), max_size=3))
    extra = b"".join(b"%s %d\n%s\n" % (key, len(value), value) for key, value in more)
    message = data.draw(bent(st.just(good.replace(b"end 0\n\n", extra + b"end 0\n\n"))))
    if not message or (b"/x/" in message and os.geteuid() != 0):
        return
    with launching(fuzzed / "pool", sanitized, OPTIONS) as helper:
        helper.socket.send(message)
        kinds = []
        while LaunchReport.ENDED not in kinds and (report := helper.socket.recv(1 << 17)):
            kinds.append(HEAD.unpack_from(report)[0])
        status = helper.close()
    begins = [LaunchReport.BEGUN, LaunchReport.ENDED]
    assert (status, kinds) in [
        (ExitStatus.LEFT_USAGE, []), (0, begins), (0, [LaunchReport.FAILED, LaunchReport.ENDED]), (0, begins[1:]),
    ]  # fmt: skip
