"""What is kept of the output: both streams whole, capped, copied, and what happens on a full disk."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.runner.attempt_folder import AttemptFolder
from holdfast.runner.frames import Stream, from_copy
from holdfast.runner.supervisor.protocol import ExitCause, ExitStatus
from tests.support.supervisor_harness import (
    SupervisedAttempt,
    ending,
    eventually,
    needs_root,
    python,
    shell,
)


class TestOutput:
    def test_streams_are_kept_apart_and_whole(self, attempt: SupervisedAttempt) -> None:
        """Proves R10: also the last line, which has no newline."""
        exit = attempt.run(*shell("for i in 1 2 3; do echo out $i; echo err $i >&2; done; printf last"))
        assert attempt.output() == b"out 1\nout 2\nout 3\nlast"
        assert attempt.output(Stream.STDERR) == b"err 1\nerr 2\nerr 3\n"
        assert (exit.stdout_length, exit.stderr_length) == (22, 18)
        assert exit.log_length == (attempt.folder.path / "log").stat().st_size

    def test_output_byte_by_byte_costs_few_frames(self, attempt: SupervisedAttempt) -> None:
        attempt.run(*python("import os\nfor i in range(20000): os.write(1, b'x')"))
        frames = [frame for frame in attempt.frames() if frame.stream is Stream.STDOUT]
        assert sum(len(frame.data) for frame in frames) == 20000
        assert len(frames) < 2000

    def test_offsets_count_every_byte_of_a_stream(self, attempt: SupervisedAttempt) -> None:
        """Proves R10."""
        attempt.run(*python("import os\nfor i in range(300): os.write(1 + i % 2, b'x' * i)"))
        for stream in (Stream.STDOUT, Stream.STDERR):
            end = 0
            for frame in attempt.frames():
                if frame.stream is stream:
                    assert frame.offset == end
                    end = frame.end
            assert end == sum(i for i in range(300) if i % 2 == stream - 1)

    def test_output_of_any_size_keeps_memory_flat(self, attempt: SupervisedAttempt, tmp_path: Path) -> None:
        """Proves R10: 50 MB of bytes, all of them kept, in less than a megabyte."""
        fifo = tmp_path / "go"
        os.mkfifo(fifo)
        code = (
            "import os, sys, zlib; crc = 0\n"
            "for i in range(50):\n"
            "    data = os.urandom(1 << 20); crc = zlib.crc32(data, crc); sys.stdout.buffer.write(data)\n"
            "sys.stdout.flush(); print(crc, file=sys.stderr, flush=True); open(sys.argv[1]).read()"
        )
        attempt.start(*python(code), str(fifo))
        attempt.wait_for_output(b"\n", Stream.STDERR)
        assert memory(attempt.pid, "VmHWM") < 3000
        assert memory(attempt.pid, "RssAnon") < 500
        fifo.open("w").close()
        assert attempt.end().stdout_length == 50 << 20
        crc = 0
        for frame in attempt.frames():
            if frame.stream is Stream.STDOUT:
                crc = zlib.crc32(frame.data, crc)
        assert crc == int(attempt.output(Stream.STDERR))

    def test_output_over_the_cap_is_dropped_with_one_mark(self, attempt: SupervisedAttempt) -> None:
        """Proves R10: the child is not blocked, the mark is visible, and what was dropped is counted."""
        exit = attempt.run(*shell("head -c 300000 /dev/zero; head -c 1000 /dev/zero >&2; exit 4"), output_cap=100_000)
        assert ending(exit) == (ExitCause.EXIT, 4, None)
        assert len(attempt.output()) + len(attempt.output(Stream.STDERR)) == 100_000
        assert exit.stdout_length == 300_000
        assert exit.stdout_dropped + exit.stderr_dropped == 201_000
        assert [event["cap"] for event in attempt.events("output_capped")] == [100_000]

    def test_output_of_exactly_the_cap_has_no_mark(self, attempt: SupervisedAttempt) -> None:
        attempt.run(*shell("head -c 5000 /dev/zero"), output_cap=5000)
        assert len(attempt.output()) == 5000
        assert attempt.events("output_capped") == []

    def test_grandchild_that_keeps_stdout_open_is_not_waited_for(self, attempt: SupervisedAttempt) -> None:
        """Proves R10: the drain is bounded, and what the grandchild wrote within it is kept."""
        exit = attempt.run(*shell("(echo early; exec sleep 600) & echo done; exit 6"), drain=1.0)
        assert ending(exit) == (ExitCause.EXIT, 6, None)
        assert set(attempt.output().split()) == {b"early", b"done"}
        assert exit.killed
        assert [event["reason"] for event in attempt.events("killed")] == ["leftovers"]

    def test_writer_outside_of_the_attempt_does_not_keep_it_open(
        self, attempt: SupervisedAttempt, tmp_path: Path
    ) -> None:
        """A descriptor can be handed to a stranger; the end of the attempt's own processes is the end."""
        path = str(tmp_path / "socket")
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path)
            server.listen()
            code = (
                "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1])\n"
                "socket.send_fds(s, [b'x'], [1])"
            )
            attempt.start(sys.executable, "-c", code, path)
            peer = server.accept()[0]
            _, (held,), *_ = socket.recv_fds(peer, 1, 1)
            assert attempt.end().code == 0
            os.close(held)
            peer.close()

    def test_copy_goes_to_stdout_as_lines_that_survive_any_log_driver(self, attempt: SupervisedAttempt) -> None:
        """Proves R24: the same frames as in the log, in ASCII, each line below 16 KiB."""
        reading, writing = os.pipe()
        attempt.write(*shell("head -c 100000 /dev/urandom; echo oops >&2; exit 9"))
        attempt.supervise("--copy", stdout=writing)
        os.close(writing)
        with open(reading, "rb") as copy:
            lines = copy.readlines()
        assert attempt.end().copy_lost == 0
        assert max(map(len, lines)) < 16384
        frames = [from_copy(line) for line in lines]
        assert frames[:-1] == attempt.frames()
        assert frames[-1].event["exit"] == json.loads((attempt.folder.path / "exit").read_text())
        assert len(attempt.output()) == 100_000

    def test_copy_that_nobody_reads_blocks_neither_commands_nor_limits(self, attempt: SupervisedAttempt) -> None:
        """Proves R24: an engine that is away holds the output back, not the supervisor; what it missed is counted."""
        reading, writing = os.pipe()
        attempt.write("yes", stop_grace=0.0)
        attempt.supervise("--copy", stdout=writing)
        os.close(writing)
        eventually(lambda: len(attempt.output()) > 65536, "more than the pipe takes")
        assert attempt.command("stop", kind="cancel").ok
        exit = attempt.end()
        assert exit.cause == ExitCause.CANCELLED
        assert exit.copy_lost > 0
        os.close(reading)

    @pytest.mark.parametrize("bound", ["fsize", pytest.param("tmpfs", marks=needs_root)])
    def test_full_disk_drains_the_child_and_still_records_the_end(
        self, attempt: SupervisedAttempt, tmp_path: Path, bound: str
    ) -> None:
        """Proves R10: the log stops at a whole frame, `exit` has its reserved room and says what happened."""
        with small_disk(attempt, tmp_path) if bound == "tmpfs" else contextlib.nullcontext():
            attempt.write(*shell("head -c 3000000 /dev/zero; echo last >&2; exit 5"), limits={})
            attempt.supervise(wrap=("prlimit", f"--fsize={512 << 10}") if bound == "fsize" else ())
            exit = attempt.end()
            assert ending(exit) == (ExitCause.EXIT, 5, None)
            assert exit.log_error in ("File too large", "No space left on device")
            assert exit.stdout_length == 3_000_000
            assert len(attempt.output()) + exit.log_lost >= 3_000_000
            reader = attempt.folder.frames()
            while reader.read():
                pass
            assert not reader.torn
            assert reader.position == exit.log_length


@needs_root
def test_disk_that_is_full_at_the_start_runs_nothing(attempt: SupervisedAttempt, tmp_path: Path) -> None:
    """Proves R22: without space for its end, or for `started`, an attempt does not begin, and leaves no trace.

    `exit` needs three pages, and `started` one.
    """
    with small_disk(attempt, tmp_path):
        attempt.write(*shell("echo ran"))
        filler = tmp_path / "disk" / "filler"
        dd = ["dd", "if=/dev/zero", f"of={filler}", "bs=4096"]
        assert subprocess.run(dd, capture_output=True, check=False).returncode != 0
        for free in range(4):
            attempt.supervise()
            assert attempt.status() == ExitStatus.LEFT_FULL, free
            assert {path.name for path in attempt.folder.path.iterdir()} == {"cmd", "lock", "spec"}
            os.truncate(filler, filler.stat().st_size - 4096)
        filler.unlink()
        attempt.supervise()
        assert attempt.end().code == 0
        assert attempt.output() == b"ran\n"


@needs_root
def test_folder_without_space_for_the_lock_runs_nothing(attempt: SupervisedAttempt, tmp_path: Path) -> None:
    """The disk has no free inode."""
    with small_disk(attempt, tmp_path, inodes=5):
        attempt.write(*shell("echo ran"))
        (tmp_path / "disk" / "filler").touch()
        attempt.supervise()
        assert attempt.status() == ExitStatus.LEFT_FULL
        (tmp_path / "disk" / "filler").unlink()
        attempt.supervise()
        assert attempt.status() == ExitStatus.LEFT_FULL
        assert {path.name for path in attempt.folder.path.iterdir()} == {"cmd", "lock", "spec"}


def memory(pid: int, field: str) -> int:
    """Return a figure of a process's status, in KiB."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition(f"{field}:")[2].split()[0])


@contextlib.contextmanager
def small_disk(attempt: SupervisedAttempt, tmp_path: Path, *, inodes: int = 0) -> Iterator[None]:
    """Put the attempt's folder on a disk of one megabyte; with so many inodes, if that is not 0."""
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size=1m,nr_inodes={inodes}", "tmpfs", disk], check=True)
    attempt.folder = AttemptFolder(disk / "attempt")
    attempt.folder.create()
    try:
        yield
    finally:
        attempt.clean()
        subprocess.run(["umount", disk], check=True)
