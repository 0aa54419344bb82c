"""The attempt folder as a worker sees it: log offsets, liveness, leftovers, and damaged files."""

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import Conflict, Invalid
from holdfast.runner import attempt_folder as folder_module
from holdfast.runner import leftovers
from holdfast.runner.attempt_folder import AttemptFolder, UnreadableRecord
from holdfast.runner.frames import HEADER, Frame, FrameReader, NotAFrame, Stream, from_copy
from holdfast.runner.wire import Command, SupervisorSpec, WireTask, encode_command, encode_spec
from tests.support.supervisor_harness import FOREVER, SupervisedAttempt, eventually, python, running, shell


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The log of an attempt that wrote on both streams by turns."""
    attempt = SupervisedAttempt(tmp_path_factory.mktemp("log") / "attempt")
    attempt.run(*python("import os\nfor i in range(40): os.write(1 + i % 2, b'%03d,' % i)"))
    yield attempt.folder.path / "log"
    attempt.clean()


STDOUT = b"".join(b"%03d," % i for i in range(0, 40, 2))
STDERR = b"".join(b"%03d," % i for i in range(1, 40, 2))


def read_all(reader: FrameReader, most: int = 1 << 20) -> list[Frame]:
    frames: list[Frame] = []
    while more := reader.read(most):
        frames += more
    return frames


def text(frames: list[Frame], stream: Stream) -> bytes:
    return b"".join(frame.data for frame in frames if frame.stream is stream)


class TestFrames:
    @settings(max_examples=50, deadline=None)
    @given(stdout=st.integers(0, len(STDOUT)), stderr=st.integers(0, len(STDERR)), most=st.integers(1, 200))
    def test_reader_resumes_at_any_pair_of_offsets(self, log: Path, stdout: int, stderr: int, most: int) -> None:
        """Proves R10, R3: a retried or adopted read repeats nothing and misses nothing."""
        frames = read_all(FrameReader(log, stdout=stdout, stderr=stderr), most)
        assert text(frames, Stream.STDOUT) == STDOUT[stdout:]
        assert text(frames, Stream.STDERR) == STDERR[stderr:]
        assert all(frame.offset >= stdout for frame in frames if frame.stream is Stream.STDOUT)

    @settings(max_examples=50, deadline=None)
    @given(data=st.data())
    def test_only_whole_frames_of_a_cut_log_are_read(self, log: Path, data: st.DataObject) -> None:
        """Proves R10: a torn last frame is recognised, wherever it was torn, and read once it is whole."""
        whole = log.read_bytes()
        cut = data.draw(st.integers(0, len(whole)))
        copy = log.with_name("cut")
        copy.write_bytes(whole[:cut])
        reader = FrameReader(copy)
        first = read_all(reader)
        assert reader.position <= cut
        assert reader.torn == (reader.position < cut)
        copy.write_bytes(whole)
        assert text(first + read_all(reader), Stream.STDOUT) == STDOUT
        assert not reader.torn

    def test_bytes_that_are_no_frame_stop_the_reader(self, log: Path) -> None:
        broken = bytearray(log.read_bytes())
        broken[6] ^= 1
        copy = log.with_name("broken")
        copy.write_bytes(broken)
        reader = FrameReader(copy)
        assert reader.read() == []
        assert reader.torn

    def test_log_that_is_not_there_yet_is_empty(self, tmp_path: Path) -> None:
        assert FrameReader(tmp_path / "log").read() == []

    def test_growing_log_is_read_as_it_grows(self, attempt: SupervisedAttempt) -> None:
        attempt.start(*shell("echo one; read x < $FIFO; echo two"), env={"FIFO": str(make_fifo(attempt))})
        reader = attempt.folder.frames()
        frames: list[Frame] = []
        while text(frames, Stream.STDOUT) != b"one\n":
            frames += eventually(reader.read)
        (attempt.folder.path / "fifo").write_text("go\n")
        attempt.end()
        assert text(read_all(reader), Stream.STDOUT) == b"two\n"

    @pytest.mark.parametrize("line", [b"", b"!!!", b"SEZGMQ==", b"QUJD" * 20])
    def test_line_that_is_no_copy_of_a_frame_is_refused(self, line: bytes) -> None:
        with pytest.raises(NotAFrame):
            from_copy(line)

    def test_header_has_32_bytes(self) -> None:
        assert HEADER.size == 32


def make_fifo(attempt: SupervisedAttempt) -> Path:
    path = attempt.folder.path / "fifo"
    os.mkfifo(path)
    return path


class TestAlive:
    def test_folder_is_alive_from_the_start_to_the_end(self, attempt: SupervisedAttempt) -> None:
        """Proves R2, R3."""
        assert not attempt.folder.alive()
        attempt.start(*shell(f"echo ready; {FOREVER}"))
        attempt.wait_for_output(b"ready")
        assert attempt.folder.alive()
        attempt.command("kill")
        attempt.end()
        assert not attempt.folder.alive()

    def test_other_probes_are_not_taken_for_a_supervisor(self, attempt: SupervisedAttempt) -> None:
        with open(attempt.folder.path / "lock", "w") as probe:
            fcntl.flock(probe, fcntl.LOCK_SH)
            assert not attempt.folder.alive()

    def test_folder_starts_the_supervisor_of_the_package(self, attempt: SupervisedAttempt) -> None:
        attempt.write(*shell("exit 2"))
        attempt.pids.append(attempt.folder.start())
        assert attempt.end().code == 2

    def test_adopter_collects_an_attempt_that_ended_without_a_worker(self, attempt: SupervisedAttempt) -> None:
        """Proves R2: the supervisor of a killed worker finishes; the next worker finds the end and the whole log."""
        attempt.write(*shell("echo one; read x < $FIFO; echo two; exit 3"), env={"FIFO": str(make_fifo(attempt))})
        code = "import sys, time; from pathlib import Path; from holdfast.runner.attempt_folder import AttemptFolder\n"
        code += "AttemptFolder(Path(sys.argv[1])).start(); time.sleep(600)"
        with subprocess.Popen([sys.executable, "-c", code, attempt.folder.path]) as worker:
            attempt.wait_for_output(b"one")
            worker.kill()
        (attempt.folder.path / "fifo").write_text("go\n")
        exit = eventually(attempt.folder.exit)
        assert exit.code == 3
        assert attempt.output() == b"one\ntwo\n"
        eventually(lambda: not attempt.folder.alive())


def before(work: Callable[..., Any], first: Callable[[], object]) -> Callable[..., Any]:
    """Run something else first, which may fail."""

    def both(*arguments: Any, **named: Any) -> Any:
        first()
        return work(*arguments, **named)

    return both


class TestFiles:
    def test_newer_record_is_refused_by_name(self, attempt: SupervisedAttempt) -> None:
        (attempt.folder.path / "exit").write_text('{"version": 2}')
        with pytest.raises(UnreadableRecord, match="has version 2; this holdfast reads 1"):
            attempt.folder.exit()
        (attempt.folder.path / "exit").unlink()

    @pytest.mark.parametrize("data", ["", "{", "[]", "{}", '{"version": 1}', "\x00" * 100])
    def test_damaged_record_is_an_error_and_never_an_end(self, attempt: SupervisedAttempt, data: str) -> None:
        """Proves R22."""
        (attempt.folder.path / "exit").write_text(data)
        with pytest.raises(UnreadableRecord):
            attempt.folder.exit()
        (attempt.folder.path / "exit").unlink()

    def test_fields_that_a_newer_supervisor_adds_do_no_harm(self, attempt: SupervisedAttempt) -> None:
        exit = attempt.run("true")
        path = attempt.folder.path / "exit"
        path.write_bytes(msgspec.json.encode(msgspec.json.decode(path.read_bytes()) | {"new": 1}))
        assert attempt.folder.exit() == exit

    def test_names_that_are_not_utf8_can_be_read_back(self, attempt: SupervisedAttempt) -> None:
        exit = attempt.run('/no/such/\udcff"\\\n')
        assert exit.text.startswith('cannot start /no/such/\N{REPLACEMENT CHARACTER}"\\\n: could not run it')

    def test_files_appear_whole(self, attempt: SupervisedAttempt) -> None:
        """Commands and specs appear whole; what a crash leaves is hidden and ignored."""
        (attempt.folder.path / "cmd" / ".half.tmp").write_bytes(b"half")
        (attempt.folder.path / "cmd" / "half.tmp").write_bytes(b"half")
        attempt.start(*shell(f"echo ready; {FOREVER}"))
        attempt.wait_for_output(b"ready")
        assert attempt.command("kill").ok
        attempt.end()
        assert [ack.verb for ack in attempt.folder.acks()] == ["kill"]

    def test_interrupted_removal_of_a_folder_is_recognised_and_repeated(
        self, attempt: SupervisedAttempt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Proves R16: whatever has no spec any more counts as buried, and is left alone for an hour."""
        attempt.run(*shell("echo out"))
        (attempt.folder.path / "work" / "output").mkdir(parents=True, exist_ok=True)
        whole = set(os.listdir(attempt.folder.path))
        assert {"spec", "started", "lock", "exit", "log", "work"} <= whole
        for cut in range(len(whole)):
            folder = AttemptFolder(tmp_path / f"cut after {cut}")
            shutil.copytree(attempt.folder.path, folder.path)
            left: Iterator[int] = iter(range(cut))
            with monkeypatch.context() as patched, contextlib.suppress(StopIteration):
                for owner, name in ((folder_module, "remove_tree"), (Path, "unlink")):
                    patched.setattr(owner, name, before(getattr(owner, name), partial(next, left)))
                folder.reduce_to_marker()
            found = set(os.listdir(folder.path))
            assert "spec" in found or found == {"started", "lock"}, (cut, found)
            folder.reduce_to_marker()
            assert set(os.listdir(folder.path)) == {"started", "lock"}

    def test_folder_is_closed_to_others(self, tmp_path: Path) -> None:
        """Proves R25: others may pass through to the work folder, but neither list nor command."""
        folder = AttemptFolder(tmp_path / "new")
        folder.create()
        folder.create()
        assert folder.path.stat().st_mode & 0o777 == 0o711
        assert (folder.path / "cmd").stat().st_mode & 0o777 == 0o700

    @pytest.mark.parametrize(
        ("spec", "field"),
        [
            (SupervisorSpec(token=1, mark="m", tasks=()), "tasks"),
            (SupervisorSpec(token=1, mark="m", tasks=(WireTask(name="a", argv=("a",)),), uid=1), "gid"),
            (SupervisorSpec(token=1, mark="m", tasks=(WireTask(name="a", argv=()),)), "argv"),
            (SupervisorSpec(token=1, mark="m", tasks=(WireTask(name="", argv=("a",)),)), "name"),
            (SupervisorSpec(token=1, mark="m", tasks=(WireTask(name="a", argv=("a\0b",)),)), "arg"),
            (SupervisorSpec(token=1, mark="m", tasks=(WireTask(name="a", argv=("a",)),), env={"A=B": "c"}), "env"),
        ],
    )
    def test_spec_that_cannot_be_written_names_the_field(self, spec: SupervisorSpec, field: str) -> None:
        with pytest.raises(Invalid) as raised:
            encode_spec(spec)
        assert raised.value.field == field

    def test_command_is_written_as_documented(self) -> None:
        command = Command(token=7, verb="stop", kind="cancel", grace=1.5)
        assert encode_command(command) == (
            b"holdfast-command 1\ntoken 1\n7\nverb 4\nstop\nkind 6\ncancel\ngrace 7\n1500000\nend 0\n\n"
        )


class TestLeftovers:
    def test_living_supervisor_is_not_a_leftover(self, attempt: SupervisedAttempt) -> None:
        attempt.start(*shell(f"echo ready; {FOREVER}"))
        attempt.wait_for_output(b"ready")
        with pytest.raises(Conflict):
            attempt.folder.kill_leftovers(attempt.mark)
        assert attempt.pid not in attempt.folder.leftovers(attempt.mark)
        attempt.command("kill")

    def test_other_attempt_of_the_same_job_is_not_a_leftover(self, attempt: SupervisedAttempt) -> None:
        """Proves R1: marks are compared whole."""
        with marked_process(attempt.mark + "0") as stranger:
            assert leftovers.kill_leftovers(attempt.mark) == []
            assert running(stranger)

    def test_nothing_is_signalled_after_a_reboot(self, attempt: SupervisedAttempt) -> None:
        """Proves R7, R6."""
        before = leftovers.Session(boot_id="another", leader=os.getsid(0), start_ticks=0)
        with marked_process(attempt.mark) as stranger:
            assert leftovers.kill_leftovers(attempt.mark, before) == []
            assert running(stranger)

    def test_session_with_a_reused_pid_is_not_ours(self, attempt: SupervisedAttempt) -> None:
        """Proves R7: the pid was reused; the innocent process is not signalled."""
        with marked_process("elsewhere", new_session=True) as stranger:
            reused = leftovers.Session(boot_id=leftovers.boot_id(), leader=stranger, start_ticks=1)
            assert leftovers.find_leftovers(attempt.mark, reused) == []
            assert leftovers.kill_leftovers(attempt.mark, reused) == []
            assert running(stranger)

    def test_member_of_the_childs_own_session_is_found_without_a_mark(self, attempt: SupervisedAttempt) -> None:
        """Proves R25: an environment can be wiped."""
        with marked_process("elsewhere", new_session=True) as child:
            ticks = int(Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[19])
            own = leftovers.Session(boot_id=leftovers.boot_id(), leader=child, start_ticks=ticks)
            assert leftovers.find_leftovers(attempt.mark, own) == [child]
            assert leftovers.kill_leftovers(attempt.mark, own) == []
            assert not running(child)

    def test_leftovers_that_fork_are_all_gone(self, attempt: SupervisedAttempt) -> None:
        """Proves R25: the search is repeated until it finds nothing."""
        forking = "while :; do sleep 0.01 & sleep 0.01; done"
        attempt.start(*shell(f"setsid sh -c 'echo ready; {forking}' & {FOREVER}"))
        attempt.wait_for_output(b"ready")
        os.kill(attempt.pid, signal.SIGKILL)
        attempt.status()
        assert attempt.folder.kill_leftovers(attempt.mark) == []
        assert attempt.folder.leftovers(attempt.mark) == []


@contextlib.contextmanager
def marked_process(mark: str, *, new_session: bool = False) -> Iterator[int]:
    """A process of ours that carries a mark."""
    with subprocess.Popen(["sleep", "600"], env={"HOLDFAST_MARK": mark}, start_new_session=new_session) as process:
        try:
            yield process.pid
        finally:
            process.kill()
