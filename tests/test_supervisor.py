"""The supervisor with real processes: how attempts end, what is kept of their output, that nothing outlives them."""

import contextlib
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.runner.folder import Exit, ExitCause, Folder
from holdfast.runner.frames import Frame, Stream, from_copy
from holdfast.runner.spec import Command, Task
from tests.attempt import Attempt, boottime, eventually, python, running, shell

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can change users and mount")
FOREVER = "while :; do sleep 1; done"
STUBBORN = f"trap '' TERM; echo ready; {FOREVER}"
NOBODY = 65534


@pytest.fixture
def attempt(tmp_path: Path) -> Iterator[Attempt]:
    attempt = Attempt(tmp_path / "attempt")
    yield attempt
    attempt.clean()


@pytest.fixture
def memory_group() -> Iterator[Path]:
    """A control group with little memory, in whichever version is mounted here."""
    root = Path("/sys/fs/cgroup")
    v1 = (root / "memory" / "memory.limit_in_bytes").exists()
    group = (root / "memory" if v1 else root) / f"holdfast-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / ("memory.limit_in_bytes" if v1 else "memory.max")).write_text(str(32 << 20))
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    yield group
    group.rmdir()


def ending(exit: Exit) -> tuple[ExitCause, int | None, int | None]:
    return exit.cause, exit.code, exit.signal


class TestEnds:
    @pytest.mark.parametrize("code", [0, 1, 3, 124, 127, 255])
    def test_exit_code_is_recorded(self, attempt: Attempt, code: int) -> None:
        """R20: cause `exit`, also for the codes that shells use for failures of their own."""
        exit = attempt.run(*shell(f"exit {code}"))
        assert ending(exit) == (ExitCause.EXIT, code, None)
        assert exit.text == ""
        assert exit.tasks[0].code == code
        assert attempt.status() == code

    def test_signal_is_recorded(self, attempt: Attempt) -> None:
        """R20."""
        exit = attempt.run(*shell("kill -SEGV $$"))
        assert ending(exit) == (ExitCause.EXIT, None, signal.SIGSEGV)
        assert attempt.status() == 128 + signal.SIGSEGV

    def test_start_is_recorded_before_the_program_runs(self, attempt: Attempt) -> None:
        """R1: the child finds its identity in the folder and in its environment."""
        exit = attempt.run(
            *shell('cat "$FOLDER/started"; echo; echo "mark=$HOLDFAST_MARK"'), env={"FOLDER": str(attempt.folder.path)}
        )
        started = attempt.folder.started()
        assert started is not None
        assert f'"child_pid":{started.child_pid},'.encode() in attempt.output()
        assert f"mark={attempt.mark}\n".encode() in attempt.output()
        assert started.mark == exit.mark == attempt.mark
        assert started.supervisor_pid == started.supervisor_session == attempt.pid
        assert started.child_session == started.child_pid
        assert started.boot_id == exit.boot_id != ""
        assert started.token == exit.token == 5
        assert 0 < started.started_at <= exit.ended_at

    @pytest.mark.parametrize(
        ("argv", "spec", "text"),
        [
            (("no-such-command",), {}, "cannot start no-such-command: could not run it: No such file or directory"),
            (("/etc/passwd",), {}, "cannot start /etc/passwd: could not run it: Permission denied"),
            (
                ("true",),
                {"cwd": "/no/such/folder"},
                "cannot start true: could not enter its folder: No such file or directory",
            ),
            (
                ("true",),
                {"env": {"PATH": "/no/such/folder"}},
                "cannot start true: could not run it: No such file or directory",
            ),
            (("",), {}, "cannot start : could not run it: No such file or directory"),
        ],
    )
    def test_failed_start_names_the_command_and_the_step(
        self, attempt: Attempt, argv: tuple[str, ...], spec: dict[str, object], text: str
    ) -> None:
        """R20: `start_failed` is told apart from a program that exits with 127."""
        exit = attempt.run(*argv, **spec)
        assert ending(exit) == (ExitCause.START_FAILED, None, None)
        assert exit.text == text
        assert attempt.status() == 125

    def test_file_without_a_format_is_not_given_to_a_shell(self, attempt: Attempt, tmp_path: Path) -> None:
        script = tmp_path / "script"
        script.write_text("echo surprise\n")
        script.chmod(0o755)
        exit = attempt.run(str(script))
        assert ending(exit) == (ExitCause.START_FAILED, None, None)
        assert "Exec format error" in exit.text

    def test_kill_for_memory_is_told_apart(self, attempt: Attempt, memory_group: Path) -> None:
        """R20: `out_of_memory`, from the counter of the control group."""
        attempt.write(*python("x = bytearray(200 << 20)"))
        attempt.supervise(wrap=("sh", "-c", f'echo $$ >{memory_group}/cgroup.procs; exec "$@"', "sh"))
        exit = attempt.end()
        assert ending(exit) == (ExitCause.OUT_OF_MEMORY, None, signal.SIGKILL)
        assert exit.oom_kills >= 1

    def test_kill_by_somebody_else_is_a_signal(self, attempt: Attempt) -> None:
        """R20."""
        assert ending(attempt.run(*shell("kill -KILL $$"))) == (ExitCause.EXIT, None, signal.SIGKILL)

    def test_second_supervisor_is_refused_while_the_first_runs(self, attempt: Attempt) -> None:
        """R1: start is exclusive by identity."""
        first = attempt.start(*shell(f"echo ready; {FOREVER}"))
        attempt.says(b"ready")
        second = attempt.supervise()
        assert attempt.status(second) == 120
        assert attempt.folder.alive()
        assert attempt.folder.exit() is None
        attempt.tell("kill")
        attempt.status(first)

    def test_folder_is_started_once(self, attempt: Attempt) -> None:
        """R2: a worker that wakes up late finds `started` and leaves."""
        attempt.run(*shell("echo once"))
        attempt.supervise()
        assert attempt.status() == 121
        assert attempt.output() == b"once\n"

    def test_probes_never_keep_a_supervisor_from_starting(self, attempt: Attempt) -> None:
        attempt.write(*shell("exit 7"))
        (attempt.folder.path / "lock").touch()
        probe = [sys.executable, "-c", PROBE, str(attempt.folder.path / "lock")]
        with subprocess.Popen(probe, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
            assert holder.stdout is not None
            assert holder.stdin is not None
            holder.stdout.readline()
            attempt.supervise()
            assert not attempt.folder.exit()
            holder.stdin.close()
        assert attempt.end().code == 7

    def test_nothing_starts_after_the_start_by_deadline(self, attempt: Attempt) -> None:
        """R1: a worker that slept between its lease and the start touches nothing; the next one starts the attempt."""
        attempt.start(*shell("echo ran"), start_by=boottime() - 1)
        assert attempt.status() == 123
        assert attempt.folder.started() is None
        assert attempt.folder.exit() is None
        assert not (attempt.folder.path / "log").exists()
        assert attempt.run(*shell("echo ran"), start_by=boottime() + 600).code == 0
        assert attempt.output() == b"ran\n"


PROBE = "import fcntl, sys; f = open(sys.argv[1]); fcntl.flock(f, fcntl.LOCK_SH); print(flush=True); sys.stdin.read()"


class TestChild:
    def test_environment_is_built_from_nothing(self, attempt: Attempt) -> None:
        """R25."""
        attempt.write("env", env={"GREETING": "hällo\nworld"})
        attempt.supervise(env={"HOLDFAST_ADMIN_TOKEN": "secret", "LD_PRELOAD": "/no/such.so"})
        attempt.end()
        expected = {"PATH=/usr/local/bin:/usr/bin:/bin", "LC_ALL=C.UTF-8", "GREETING=hällo", "world"}
        assert set(attempt.output().decode().splitlines()) == expected | {f"HOLDFAST_MARK={attempt.mark}"}

    def test_mark_cannot_be_set_by_the_spec(self, attempt: Attempt) -> None:
        attempt.run(
            tasks=(Task(name="a", argv=("env",), env={"HOLDFAST_MARK": "other"}),), env={"HOLDFAST_MARK": "other"}
        )
        assert attempt.output().count(b"HOLDFAST_MARK=") == 1
        assert f"HOLDFAST_MARK={attempt.mark}\n".encode() in attempt.output()

    def test_child_has_three_descriptors_and_no_inherited_signal_settings(self, attempt: Attempt) -> None:
        """R25: nothing that the worker had open reaches the child."""
        code = "import os; print(sorted(os.listdir('/proc/self/fd'))); print(open('/proc/self/status').read())"
        attempt.run(*python(code))
        lines = attempt.output().decode().splitlines()
        assert lines[0] == "['0', '1', '2', '3']"  # 3 lists the folder
        status = dict(line.split(":\t", 1) for line in lines[1:] if ":\t" in line)
        assert int(status["SigBlk"], 16) == 0
        # Python itself ignores SIGPIPE and SIGXFSZ.
        assert int(status["SigIgn"], 16) & ~(1 << signal.SIGPIPE - 1 | 1 << signal.SIGXFSZ - 1) == 0
        assert status["NoNewPrivs"] == "1"

    def test_stdin_is_empty_unless_given(self, attempt: Attempt) -> None:
        assert attempt.run("cat").code == 0
        assert attempt.output() == b""

    def test_stdin_is_the_file_of_that_name(self, attempt: Attempt) -> None:
        (attempt.folder.path / "stdin").write_bytes(b"from a file")
        attempt.run("cat")
        assert attempt.output() == b"from a file"

    def test_folder_umask_and_limits_are_as_asked(self, attempt: Attempt, tmp_path: Path) -> None:
        attempt.run(
            *shell("pwd; umask; ulimit -n; ulimit -c"), cwd=str(tmp_path), umask=0o027, limits={"nofile": 64, "core": 0}
        )
        assert attempt.output().decode().split() == [str(tmp_path), "0027", "64", "0"]

    @needs_root
    def test_privileges_are_dropped_for_good(self, attempt: Attempt, tmp_path: Path) -> None:
        """R25: the child runs as its own user, without root's groups, and cannot read the admin token."""
        secret = tmp_path / "admin-token"
        secret.write_text("secret")
        secret.chmod(0o600)
        tmp_path.chmod(0o711)
        script = f"id -u; id -g; id -G; cat {secret}; cat {attempt.folder.path}/spec; ls {attempt.folder.path}/cmd"
        exit = attempt.run(*shell(script), uid=NOBODY, gid=NOBODY, groups=(NOBODY, 100))
        assert attempt.output().decode().split() == ["65534", "65534", "65534", "100"]
        assert attempt.output(Stream.STDERR).count(b"Permission denied") == 3
        assert exit.code != 0

    @needs_root
    def test_user_that_cannot_enter_its_folder_fails_to_start(self, attempt: Attempt, tmp_path: Path) -> None:
        closed = tmp_path / "closed"
        closed.mkdir(mode=0o700)
        exit = attempt.run("true", uid=NOBODY, gid=NOBODY, cwd=str(closed))
        assert exit.cause == ExitCause.START_FAILED
        assert "could not enter its folder: Permission denied" in exit.text

    @needs_root
    def test_change_of_user_without_the_right_to_it_fails_to_start(self, attempt: Attempt, tmp_path: Path) -> None:
        """R25: never runs as somebody else than asked."""
        attempt.write("true", uid=12345)
        hand_over(attempt, tmp_path)
        attempt.supervise(wrap=AS_NOBODY)
        exit = attempt.end()
        assert exit.cause == ExitCause.START_FAILED
        assert "could not set its user" in exit.text


AS_NOBODY = ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups")


def hand_over(attempt: Attempt, tmp_path: Path) -> None:
    """Make the folder nobody's, with a program of its own in it, and the way to it open."""
    attempt.program = Path(shutil.copy(attempt.program, attempt.folder.path / "program"))
    for folder in [tmp_path, *tmp_path.parents]:
        if folder.stat().st_uid == os.geteuid() and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | stat.S_IXOTH)
    for path in [attempt.folder.path, *attempt.folder.path.rglob("*")]:
        os.chown(path, NOBODY, NOBODY)


class TestOutput:
    def test_streams_are_kept_apart_and_whole(self, attempt: Attempt) -> None:
        """R10: also the last line, which has no newline."""
        exit = attempt.run(*shell("for i in 1 2 3; do echo out $i; echo err $i >&2; done; printf last"))
        assert attempt.output() == b"out 1\nout 2\nout 3\nlast"
        assert attempt.output(Stream.STDERR) == b"err 1\nerr 2\nerr 3\n"
        assert (exit.stdout_length, exit.stderr_length) == (22, 18)
        assert exit.log_length == (attempt.folder.path / "log").stat().st_size

    def test_output_byte_by_byte_costs_few_frames(self, attempt: Attempt) -> None:
        attempt.run(*python("import os\nfor i in range(20000): os.write(1, b'x')"))
        frames = [frame for frame in attempt.frames() if frame.stream is Stream.STDOUT]
        assert sum(len(frame.data) for frame in frames) == 20000
        assert len(frames) < 2000

    def test_offsets_count_every_byte_of_a_stream(self, attempt: Attempt) -> None:
        """R10."""
        attempt.run(*python("import os\nfor i in range(300): os.write(1 + i % 2, b'x' * i)"))
        for stream in (Stream.STDOUT, Stream.STDERR):
            end = 0
            for frame in attempt.frames():
                if frame.stream is stream:
                    assert frame.offset == end
                    end = frame.end
            assert end == sum(i for i in range(300) if i % 2 == stream - 1)

    def test_output_of_any_size_keeps_memory_flat(self, attempt: Attempt, tmp_path: Path) -> None:
        """R10: 50 MB of bytes, all of them kept, in less than a megabyte."""
        fifo = tmp_path / "go"
        os.mkfifo(fifo)
        code = (
            "import os, sys, zlib; crc = 0\n"
            "for i in range(50):\n"
            "    data = os.urandom(1 << 20); crc = zlib.crc32(data, crc); sys.stdout.buffer.write(data)\n"
            "sys.stdout.flush(); print(crc, file=sys.stderr, flush=True); open(sys.argv[1]).read()"
        )
        attempt.start(*python(code), str(fifo))
        attempt.says(b"\n", Stream.STDERR)
        assert memory(attempt.pid, "VmHWM") < 3000
        assert memory(attempt.pid, "RssAnon") < 500
        fifo.open("w").close()
        assert attempt.end().stdout_length == 50 << 20
        crc = 0
        for frame in attempt.frames():
            if frame.stream is Stream.STDOUT:
                crc = zlib.crc32(frame.data, crc)
        assert crc == int(attempt.output(Stream.STDERR))

    def test_output_over_the_cap_is_dropped_with_one_mark(self, attempt: Attempt) -> None:
        """R10: the child is not blocked, the mark is visible, and what was dropped is counted."""
        exit = attempt.run(*shell("head -c 300000 /dev/zero; head -c 1000 /dev/zero >&2; exit 4"), output_cap=100_000)
        assert ending(exit) == (ExitCause.EXIT, 4, None)
        assert len(attempt.output()) + len(attempt.output(Stream.STDERR)) == 100_000
        assert exit.stdout_length == 300_000
        assert exit.stdout_dropped + exit.stderr_dropped == 201_000
        assert [event["cap"] for event in attempt.events("output_capped")] == [100_000]

    def test_output_of_exactly_the_cap_has_no_mark(self, attempt: Attempt) -> None:
        attempt.run(*shell("head -c 5000 /dev/zero"), output_cap=5000)
        assert len(attempt.output()) == 5000
        assert attempt.events("output_capped") == []

    def test_grandchild_that_keeps_stdout_open_is_not_waited_for(self, attempt: Attempt) -> None:
        """R10: the drain is bounded, and what the grandchild wrote within it is kept."""
        exit = attempt.run(*shell("(echo early; exec sleep 600) & echo done; exit 6"), drain=0.3)
        assert ending(exit) == (ExitCause.EXIT, 6, None)
        assert set(attempt.output().split()) == {b"early", b"done"}
        assert exit.killed
        assert [event["reason"] for event in attempt.events("killed")] == ["leftovers"]

    def test_writer_outside_of_the_attempt_does_not_keep_it_open(self, attempt: Attempt, tmp_path: Path) -> None:
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

    def test_copy_goes_to_stdout_as_lines_that_survive_any_log_driver(self, attempt: Attempt) -> None:
        """R24: the same frames as in the log, in ASCII, each line below 16 KiB."""
        reading, writing = os.pipe()
        attempt.write(*shell("head -c 100000 /dev/urandom; echo oops >&2; exit 9"))
        attempt.supervise("--copy", stdout=writing)
        os.close(writing)
        with open(reading, "rb") as copy:
            lines = copy.readlines()
        assert attempt.end().copy_lost == 0
        assert max(map(len, lines)) < 16384
        assert [from_copy(line) for line in lines] == attempt.frames()
        assert len(attempt.output()) == 100_000

    def test_copy_that_nobody_reads_blocks_neither_commands_nor_limits(self, attempt: Attempt) -> None:
        """R24: an engine that is away holds the output back, not the supervisor; what it missed is counted."""
        reading, writing = os.pipe()
        attempt.write("yes", stop_grace=0.0)
        attempt.supervise("--copy", stdout=writing)
        os.close(writing)
        eventually(lambda: len(attempt.output()) > 65536, "more than the pipe takes")
        assert attempt.tell("stop", kind="cancel").ok
        exit = attempt.end()
        assert exit.cause == ExitCause.CANCELLED
        assert exit.copy_lost > 0
        os.close(reading)

    @pytest.mark.parametrize("bound", ["fsize", pytest.param("tmpfs", marks=needs_root)])
    def test_full_disk_drains_the_child_and_still_records_the_end(
        self, attempt: Attempt, tmp_path: Path, bound: str
    ) -> None:
        """R10: the log stops at a whole frame, `exit` has its reserved room and says what happened."""
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


def memory(pid: int, field: str) -> int:
    """Return a figure of a process's status, in KiB."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition(f"{field}:")[2].split()[0])


@contextlib.contextmanager
def small_disk(attempt: Attempt, tmp_path: Path) -> Iterator[None]:
    """Put the attempt's folder on a disk of one megabyte."""
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], check=True)
    attempt.folder = Folder(disk / "attempt")
    attempt.folder.create()
    try:
        yield
    finally:
        attempt.clean()
        subprocess.run(["umount", disk], check=True)


class TestLimits:
    def test_timeout_asks_politely_and_keeps_the_partial_output(self, attempt: Attempt) -> None:
        """R8: TERM first; a child that obeys in time is not killed, and the limit is the cause whatever its code."""
        exit = attempt.run(*shell(f"trap 'echo bye; exit 0' TERM; echo begin; {FOREVER}"), timeout=0.5, stop_grace=60)
        assert ending(exit) == (ExitCause.TIMED_OUT, 0, None)
        assert attempt.output() == b"begin\nbye\n"
        assert (exit.reason, exit.stopped_by) == ("timed_out", "limit")
        assert exit.lasted >= 500_000
        assert attempt.status() == 124

    def test_timeout_kills_a_stubborn_child_and_its_grandchild(self, attempt: Attempt) -> None:
        """R8, R24: sleeper and grandchild gone, with no worker alive."""
        attempt.start(*shell(f'sh -c "{STUBBORN}" & echo grandchild=$! ; {STUBBORN}'), timeout=1.0, stop_grace=0.2)
        grandchild = attempt.number("grandchild")
        exit = attempt.end()
        assert ending(exit) == (ExitCause.TIMED_OUT, None, signal.SIGKILL)
        assert exit.killed
        assert not running(grandchild)
        assert b"ready" in attempt.output()

    def test_timeout_without_grace_kills_at_once(self, attempt: Attempt) -> None:
        """R8."""
        exit = attempt.run(*shell(f"trap 'echo bye' TERM; {FOREVER}"), timeout=0.3, stop_grace=0)
        assert ending(exit) == (ExitCause.TIMED_OUT, None, signal.SIGKILL)
        assert attempt.output() == b""
        assert attempt.events("signalled") == []

    def test_stopped_child_is_woken_to_hear_the_polite_word(self, attempt: Attempt) -> None:
        """R8."""
        exit = attempt.run(
            *shell("trap 'echo bye; exit 0' TERM; kill -STOP $$; sleep 600 & wait"), timeout=0.5, stop_grace=60
        )
        assert exit.cause == ExitCause.TIMED_OUT
        assert attempt.output() == b"bye\n"

    def test_silent_child_is_stopped(self, attempt: Attempt) -> None:
        """R9."""
        exit = attempt.run(*shell(f"echo one; {FOREVER}"), idle_timeout=0.5, stop_grace=0.1)
        assert exit.cause == ExitCause.IDLE_TIMEOUT
        assert attempt.output() == b"one\n"
        assert attempt.status() == 124

    def test_output_on_either_stream_keeps_a_child_from_being_idle(self, attempt: Attempt) -> None:
        """R9."""
        script = (
            "for i in 1 2 3 4 5 6 7 8; do sleep 0.3; if [ $((i % 2)) = 0 ]; then echo $i; else echo $i >&2; fi; done"
        )
        exit = attempt.run(*shell(script), idle_timeout=2.0)
        assert ending(exit) == (ExitCause.EXIT, 0, None)

    def test_stop_after_stops_the_child_without_a_worker(self, attempt: Attempt) -> None:
        """R21."""
        exit = attempt.run(*shell(STUBBORN), stop_after=boottime() + 0.6, stop_grace=0.2)
        assert ending(exit) == (ExitCause.STOP_AFTER, None, signal.SIGKILL)
        assert attempt.status() == 124

    def test_stop_after_by_the_wall_clock_is_for_engines_on_other_hosts(self, attempt: Attempt) -> None:
        """R21: converted once, when it is read."""
        exit = attempt.run(*shell(FOREVER), stop_after=time.time() + 0.5, clock="realtime", stop_grace=0)
        assert exit.cause == ExitCause.STOP_AFTER
        assert 300_000 < exit.lasted < 30_000_000

    def test_nothing_starts_after_stop_after(self, attempt: Attempt) -> None:
        """R21."""
        exit = attempt.run(*shell("echo ran"), stop_after=boottime() - 0.001)
        assert ending(exit) == (ExitCause.STOP_AFTER, None, None)
        assert exit.tasks == ()
        assert attempt.folder.started() is None
        assert attempt.output() == b""

    def test_beats_keep_a_child_from_stop_after(self, attempt: Attempt) -> None:
        """R21: the deadline is absolute and never goes back, in whatever order beats arrive."""
        end = boottime() + 2.0
        attempt.start(*shell(f"echo ready; {FOREVER}"), stop_after=end, stop_grace=0)
        attempt.says(b"ready")
        ack = attempt.tell("beat", stop_after=end + 600)
        assert ack.ok
        assert ack.stop_after == round((end + 600) * 1e6)
        late = attempt.tell("beat", stop_after=end - 1)
        assert late.ok
        assert late.stop_after == ack.stop_after
        eventually(lambda: boottime() > end + 0.5)
        assert attempt.folder.exit() is None
        assert attempt.tell("kill").ok
        assert attempt.end().cause == ExitCause.CANCELLED


class TestDescendants:
    @pytest.mark.parametrize("how", ["exit", "stop"])
    def test_grandchild_with_its_own_session_is_gone(self, attempt: Attempt, how: str) -> None:
        """R25."""
        attempt.start(
            *shell(f"setsid sh -c 'echo daemon=$$ ; {FOREVER}' & {'sleep 0.3' if how == 'exit' else FOREVER}")
        )
        daemon = attempt.number("daemon")
        if how == "stop":
            attempt.tell("stop", kind="cancel", grace=0.2)
        exit = attempt.end()
        assert exit.cause == (ExitCause.EXIT if how == "exit" else ExitCause.CANCELLED)
        assert not running(daemon)

    @pytest.mark.parametrize("how", ["exit", "kill"])
    def test_double_forked_daemon_is_gone(self, attempt: Attempt, how: str) -> None:
        """R25: no session, no parent, no output, no environment in common with the attempt."""
        attempt.start(*python(DAEMON.replace("WAIT", "0" if how == "exit" else "600")))
        daemon = attempt.number("daemon")
        if how == "kill":
            attempt.tell("kill")
        exit = attempt.end()
        assert exit.killed
        assert exit.code == (0 if how == "exit" else None)
        assert not running(daemon)

    def test_daemon_hears_the_polite_word_too(self, attempt: Attempt) -> None:
        """R25: within the grace, what the child started may end by itself."""
        daemon = "trap 'echo daemon ends; exit 0' TERM; echo ready; while :; do sleep 0.05; done"
        attempt.start(*shell(f'setsid sh -c "{daemon}" & wait'))
        attempt.says(b"ready")
        attempt.tell("stop", kind="cancel", grace=60)
        exit = attempt.end()
        assert not exit.killed
        assert b"daemon ends" in attempt.output()

    def test_group_hears_the_polite_word_once(self, attempt: Attempt) -> None:
        code = (
            "import os, signal, time\nheard = 0\n"
            "def hear(*_):\n    global heard; heard += 1\n"
            "signal.signal(signal.SIGTERM, hear); os.fork(); print('ready', flush=True)\n"
            "while not heard: time.sleep(0.01)\n"
            "time.sleep(0.3); print(f'heard {heard}', flush=True)"
        )
        attempt.start(*python(code))
        eventually(lambda: attempt.output().count(b"ready") == 2)
        attempt.tell("stop", kind="cancel", grace=60)
        attempt.end()
        assert attempt.output().count(b"heard 1\n") == 2

    def test_deep_tree_that_ignores_everything_is_gone(self, attempt: Attempt) -> None:
        """R8: each level in a session of its own, deaf to TERM."""
        attempt.start(*python(DEEP))
        eventually(lambda: attempt.output().count(b"\n") == 20)
        pids = [int(line) for line in attempt.output().split()]
        attempt.tell("stop", kind="interrupt", grace=0.1)
        exit = attempt.end()
        assert exit.cause == ExitCause.INTERRUPTED
        assert not any(map(running, pids))

    @needs_root
    def test_what_cannot_be_killed_is_said_and_never_called_dead(self, attempt: Attempt, tmp_path: Path) -> None:
        """R23: a program of another user outlives the kill; no `exit` until it is gone."""
        become = Path(shutil.copy("/usr/bin/setpriv", tmp_path / "become"))
        become.chmod(0o4755)
        attempt.write(
            *shell(f"{become} --reuid=0 sleep 600 & echo other=$! ; {FOREVER}"),
            no_new_privs=False,
            timeout=1.0,
            stop_grace=0,
        )
        hand_over(attempt, tmp_path)
        attempt.supervise(wrap=AS_NOBODY)
        other = attempt.number("other")
        eventually(lambda: Path(f"/proc/{other}/comm").read_text() == "sleep\n")
        told = eventually(lambda: attempt.events("not_dead"))
        assert told[0]["pids"] == [other]
        assert attempt.folder.alive()
        assert attempt.folder.exit() is None
        os.kill(other, signal.SIGKILL)
        assert attempt.end().cause == ExitCause.TIMED_OUT

    def test_killed_supervisor_takes_its_child_along_and_writes_no_exit(self, attempt: Attempt) -> None:
        """R22, R7: the end cannot be known; what is left is found by its mark, not by a pid."""
        attempt.start(*shell(f"setsid sh -c 'echo daemon=$$ ; {FOREVER}' & echo main=$$ ; {FOREVER}"))
        daemon, main = attempt.number("daemon"), attempt.number("main")
        os.kill(attempt.pid, signal.SIGKILL)
        assert attempt.status() == -signal.SIGKILL
        eventually(lambda: not running(main), "the child dies with its supervisor")
        assert not attempt.folder.alive()
        assert attempt.folder.exit() is None
        assert attempt.folder.started() is not None
        assert daemon in attempt.folder.leftovers(attempt.mark)
        assert attempt.folder.kill_leftovers(attempt.mark) == []
        assert not running(daemon)

    @needs_root
    def test_child_that_changed_its_user_dies_with_the_supervisor(self, attempt: Attempt) -> None:
        """R25: changing the user clears the parent-death signal; it is set again."""
        attempt.start(*shell(f"echo main=$$ ; {FOREVER}"), uid=NOBODY, gid=NOBODY)
        main = attempt.number("main")
        os.kill(attempt.pid, signal.SIGKILL)
        eventually(lambda: not running(main))


DAEMON = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.write(1, f"daemon={os.getpid()} ".encode())
        for fd in range(3):
            os.close(fd)
        os.execve("/bin/sleep", ["sleep", "600"], {})
    os._exit(0)
os.wait()
time.sleep(WAIT)
"""

DEEP = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
for _ in range(20):
    if os.fork():
        break
    os.setsid()
    os.write(1, f"{os.getpid()}\\n".encode())
time.sleep(600)
"""


class TestCommands:
    def test_lower_token_is_refused_equal_and_higher_are_obeyed(self, attempt: Attempt) -> None:
        """R3: an adopter raises the token; after that its predecessor has no say."""
        attempt.start(*shell(f"echo ready; {FOREVER}"), token=5)
        attempt.says(b"ready")
        assert attempt.tell("hold", token=5).ok
        raised = attempt.tell("hold", token=8)
        assert raised.ok
        assert raised.highest_token == 8
        for verb in ("hold", "beat", "stop", "kill"):
            stale = attempt.tell(verb, token=7, stop_after=boottime() + 9 if verb == "beat" else None)
            assert not stale.ok
            assert (stale.why, stale.token, stale.highest_token, stale.reason) == ("stale token", 7, 8, "")
        assert attempt.folder.exit() is None
        assert attempt.tell("kill", token=9).ok
        assert attempt.end().token == 9

    def test_stop_ends_as_the_kind_that_was_asked_for(self, attempt: Attempt) -> None:
        """R20."""
        attempt.start(*shell(f"trap 'echo bye; exit 0' TERM; echo ready; {FOREVER}"))
        attempt.says(b"ready")
        ack = attempt.tell("stop", kind="interrupt", grace=60)
        assert (ack.ok, ack.verb, ack.reason) == (True, "stop", "interrupted")
        exit = attempt.end()
        assert ending(exit) == (ExitCause.INTERRUPTED, 0, None)
        assert exit.stopped_by == "command"
        assert attempt.output() == b"ready\nbye\n"

    def test_first_reason_stays_and_a_later_word_only_brings_the_kill_forward(self, attempt: Attempt) -> None:
        """R8."""
        attempt.start(*shell(STUBBORN))
        attempt.says(b"ready")
        assert attempt.tell("stop", kind="interrupt", grace=600).ok
        assert attempt.tell("stop", kind="cancel", grace=900).reason == "interrupted"
        assert attempt.folder.exit() is None
        assert attempt.tell("kill", kind="cancel").ok
        exit = attempt.end()
        assert ending(exit) == (ExitCause.INTERRUPTED, None, signal.SIGKILL)
        assert len(attempt.events("signalled")) == 1

    def test_exit_that_came_first_decides(self, attempt: Attempt) -> None:
        """R20: a stop that finds the child ended changes nothing but the wait for what it left."""
        attempt.start(*shell("sleep 600 & echo main=$$ ; exit 3"), drain=600)
        main = attempt.number("main")
        eventually(lambda: not running(main))
        assert attempt.tell("stop", kind="cancel", grace=0).reason == ""
        exit = attempt.end()
        assert ending(exit) == (ExitCause.EXIT, 3, None)
        assert exit.killed

    @needs_root
    def test_supervisor_is_pid_1_of_a_container(self, attempt: Attempt) -> None:
        """R24, R25: reaps orphans, obeys commands, and records the end, as on the host."""
        attempt.write(*shell(f"echo pid=$PPID ; (setsid sh -c 'echo orphan; {FOREVER}' &) ; {FOREVER}"))
        attempt.supervise("--copy", wrap=("unshare", "--pid", "--mount-proc", "--fork", "--kill-child"))
        attempt.says(b"orphan")
        assert attempt.number("pid") == 1
        assert attempt.tell("stop", kind="cancel", grace=60).ok
        exit = attempt.end()
        assert ending(exit) == (ExitCause.CANCELLED, None, signal.SIGTERM)
        assert not exit.killed
        assert attempt.status() == 128 + signal.SIGTERM

    def test_signal_to_the_supervisor_itself_is_an_interrupt(self, attempt: Attempt) -> None:
        """R20: `docker stop`, or a shutdown of the host; `stopped_by` says that it was no command."""
        attempt.start(*shell(f"trap 'exit 0' TERM; echo ready; {FOREVER}"), stop_grace=60)
        attempt.says(b"ready")
        os.kill(attempt.pid, signal.SIGTERM)
        exit = attempt.end()
        assert ending(exit) == (ExitCause.INTERRUPTED, 0, None)
        assert exit.stopped_by == "signal"

    def test_adopter_reads_on_without_gap_or_repeat_and_the_timeout_runs_on(self, attempt: Attempt) -> None:
        """R3: total time stays below the timeout, whoever watches."""
        attempt.start(*shell("i=0; while :; do i=$((i+1)); echo $i; sleep 0.01; done"), timeout=2.0, stop_grace=0)
        first = attempt.folder.frames()
        seen: list[Frame] = []
        while len(seen) < 10:
            seen += eventually(first.read)
        assert attempt.tell("hold", token=6).ok
        committed = first.offsets[Stream.STDOUT]
        exit = attempt.end()
        rest = attempt.frames(stdout=committed)
        text = b"".join(frame.data for frame in seen + rest if frame.stream is Stream.STDOUT)
        numbers = [int(line) for line in text.split()]
        assert numbers == list(range(1, len(numbers) + 1))
        assert exit.cause == ExitCause.TIMED_OUT
        assert exit.lasted >= 2_000_000

    @pytest.mark.parametrize(
        ("data", "why"),
        [
            (b"", "it ends too early"),
            (b"nonsense", "it ends too early"),
            (b"nonsense\n", "not a holdfast-command"),
            (b"x" * 5000, "larger than 4096 bytes"),
            (b"holdfast-command 2\nend 0\n\n", "holdfast-command version 2, and this supervisor reads version 1"),
            (b"holdfast-command 1\nverb 4\nhold\n", "it ends too early"),
            (b"holdfast-command 1\nend 0\n\n", "verb or token is missing"),
            (b"holdfast-command 1\ntoken 1\n9\nverb 4\njump\nend 0\n\n", "unknown verb"),
            (b"holdfast-command 1\ntoken 1\n9\nverb 4\nstop\nkind 4\nlost\nend 0\n\n", "unknown kind"),
            (b"holdfast-command 1\ntoken 1\n9\nverb 4\nbeat\nend 0\n\n", "stop_after is missing"),
            (b"holdfast-command 1\ntoken 2\n-1\nend 0\n\n", "token cannot be used"),
            (b"holdfast-command 1\ntoken 20\n99999999999999999999\nend 0\n\n", "token cannot be used"),
            (b"holdfast-command 1\nverb 4\nho\0d\nend 0\n\n", "not in records"),
            (b"holdfast-command 1\nverb 99999999999999999999\nhold\nend 0\n\n", "not in records"),
            (b"holdfast-command 1\nsize 1\n1\nend 0\n\n", "size cannot be used"),
            (b"holdfast-command 1\ntoken 1\n9\nverb 4\nhold\nend 0\n\nmore", "not in records"),
        ],
    )
    def test_malformed_command_is_refused_with_the_reason_and_removed(
        self, attempt: Attempt, data: bytes, why: str
    ) -> None:
        """R24."""
        attempt.start(*shell(f"echo ready; {FOREVER}"))
        attempt.says(b"ready")
        place(attempt, "bad", data)
        ack = attempt.answer("bad")
        assert not ack.ok
        assert ack.why == why
        assert list((attempt.folder.path / "cmd").iterdir()) == []
        assert attempt.tell("kill").ok

    def test_what_is_no_file_is_refused(self, attempt: Attempt) -> None:
        """R24: nothing in the folder can block or mislead the supervisor."""
        attempt.start(*shell(f"echo ready; {FOREVER}"))
        attempt.says(b"ready")
        folder = attempt.folder.path / "cmd"
        os.mkfifo(folder / "fifo")
        (folder / "link").symlink_to("/etc/passwd")
        (folder / "folder").mkdir()
        for name in ("fifo", "link", "folder"):
            assert attempt.answer(name).why == "not a file that can be read"
        assert attempt.tell("kill").ok

    def test_many_commands_are_obeyed_in_the_order_of_their_names(self, attempt: Attempt) -> None:
        attempt.start(*shell(f"echo ready; {FOREVER}"))
        attempt.says(b"ready")
        os.kill(attempt.pid, signal.SIGSTOP)
        names = [attempt.folder.send(Command(token=5 + i, verb="hold")) for i in range(50)]
        os.kill(attempt.pid, signal.SIGCONT)
        attempt.answer(names[-1])
        acks = attempt.folder.acks()
        assert [ack.command for ack in acks] == names
        assert all(ack.ok for ack in acks)
        assert attempt.tell("kill", token=100).ok

    def test_command_that_was_there_before_the_start_counts(self, attempt: Attempt) -> None:
        """R8: a cancel that overtakes the start."""
        name = attempt.folder.send(Command(token=5, verb="kill"))
        exit = attempt.run(*shell(FOREVER))
        assert exit.cause == ExitCause.CANCELLED
        assert attempt.answer(name).ok


def place(attempt: Attempt, name: str, data: bytes) -> None:
    """Put a command as an archive would: under its final name."""
    (attempt.folder.path / "cmd" / name).write_bytes(data)


class TestTasks:
    def test_tasks_run_in_order_each_with_its_own_settings(self, attempt: Attempt, tmp_path: Path) -> None:
        exit = attempt.run(
            tasks=(
                Task(name="one", argv=shell('echo "$WHO $SHARED"'), env={"WHO": "first"}),
                Task(name="two", argv=shell("pwd >&2"), cwd=str(tmp_path)),
                Task(name="three", argv=shell('echo "$WHO $SHARED"')),
            ),
            env={"WHO": "all", "SHARED": "yes"},
        )
        assert ending(exit) == (ExitCause.EXIT, 0, None)
        assert [(task.name, task.cause, task.code) for task in exit.tasks] == [
            ("one", "exit", 0),
            ("two", "exit", 0),
            ("three", "exit", 0),
        ]
        output = [(frame.task, frame.data) for frame in attempt.frames() if frame.stream is not Stream.EVENTS]
        assert output == [(0, b"first yes\n"), (1, f"{tmp_path}\n".encode()), (2, b"all yes\n")]

    def test_first_failure_ends_the_attempt(self, attempt: Attempt) -> None:
        exit = attempt.run(tasks=tuple(Task(name=f"t{i}", argv=shell(f"echo {i}; exit {i}")) for i in range(3)))
        assert ending(exit) == (ExitCause.EXIT, 1, None)
        assert [(task.name, task.code) for task in exit.tasks] == [("t0", 0), ("t1", 1)]
        assert attempt.output() == b"0\n1\n"

    def test_later_task_that_cannot_start_fails_the_attempt(self, attempt: Attempt) -> None:
        exit = attempt.run(tasks=(Task(name="a", argv=("true",)), Task(name="b", argv=("no-such-command",))))
        assert exit.cause == ExitCause.START_FAILED
        assert "no-such-command" in exit.text
        assert [task.cause for task in exit.tasks] == [ExitCause.EXIT, ExitCause.START_FAILED]

    def test_stop_during_task_two_of_three_starts_no_third(self, attempt: Attempt) -> None:
        """R8."""
        script = (shell("echo one"), shell(f"echo two; {FOREVER}"), shell("echo three"))
        attempt.start(tasks=tuple(Task(name=f"t{i}", argv=argv) for i, argv in enumerate(script)))
        attempt.says(b"two")
        attempt.tell("stop", kind="cancel", grace=0.1)
        exit = attempt.end()
        assert exit.cause == ExitCause.CANCELLED
        assert [(task.name, task.cause) for task in exit.tasks] == [("t0", "exit"), ("t1", "cancelled")]
        assert attempt.output() == b"one\ntwo\n"

    def test_task_has_a_timeout_of_its_own(self, attempt: Attempt) -> None:
        """R8."""
        tasks = (Task(name="quick", argv=("true",), timeout=60), Task(name="slow", argv=shell(FOREVER), timeout=0.3))
        exit = attempt.run(tasks=tasks, stop_grace=0, timeout=600)
        assert exit.cause == ExitCause.TIMED_OUT
        assert [task.cause for task in exit.tasks] == [ExitCause.EXIT, ExitCause.TIMED_OUT]

    def test_timeout_of_the_attempt_spans_its_tasks(self, attempt: Attempt) -> None:
        """R8."""
        tasks = tuple(Task(name=f"t{i}", argv=("sleep", "0.4")) for i in range(100))
        exit = attempt.run(tasks=tasks, timeout=1.0, stop_grace=0)
        assert exit.cause == ExitCause.TIMED_OUT
        assert len(exit.tasks) < 10

    def test_task_takes_what_it_left_behind_with_it(self, attempt: Attempt, tmp_path: Path) -> None:
        """R25: the next task starts clean."""
        leave = shell(f"setsid sh -c 'exec >/dev/null; {FOREVER}' & echo left=$! ; echo $! >{tmp_path}/left")
        look = shell(f"kill -0 $(cat {tmp_path}/left) || echo gone")
        exit = attempt.run(tasks=(Task(name="leave", argv=leave), Task(name="look", argv=look)))
        assert exit.killed
        assert attempt.output().endswith(b"gone\n")

    def test_thousand_tasks_fit_into_the_record(self, attempt: Attempt) -> None:
        tasks = tuple(Task(name=f"{i:064d}", argv=("true",)) for i in range(1000))
        exit = attempt.run(tasks=tasks)
        assert len(exit.tasks) == 1000
        assert exit.tasks[-1].name == f"{999:064d}"


class TestSpecs:
    @pytest.mark.parametrize(
        ("data", "text"),
        [
            (None, "cannot read the spec: No such file or directory"),
            (b"", "malformed spec: it ends too early"),
            (b"holdfast-spec 1\n", "malformed spec: it ends too early"),
            (
                b"holdfast-spec 7\nend 0\n\n",
                "malformed spec: holdfast-spec version 7, and this supervisor reads version 1",
            ),
            (b"something else\n", "malformed spec: not a holdfast-spec"),
            (b"holdfast-spec 1\nend 0\n\n", "malformed spec: task is missing"),
            (b"holdfast-spec 1\ntoken 1\n1\ntask 1\na\narg 1\nb\nend 0\n\n", "malformed spec: mark is missing"),
            (b"holdfast-spec 1\ntoken 1\n1\nmark 1\nm\ntask 1\na\nend 0\n\n", "malformed spec: arg is missing"),
            (b"holdfast-spec 1\nfuture 1\n1\nend 0\n\n", "malformed spec: future cannot be used"),
            (b"holdfast-spec 1\nenv 3\nABC\nend 0\n\n", "malformed spec: env cannot be used"),
            (b"holdfast-spec 1\ncwd 3\nabc\nend 0\n\n", "malformed spec: cwd cannot be used"),
            (b"holdfast-spec 1\numask 3\n999\nend 0\n\n", "malformed spec: umask cannot be used"),
            (b"holdfast-spec 1\nlimit 6\nhope 1\nend 0\n\n", "malformed spec: limit cannot be used"),
            (b"holdfast-spec 1\ncwd 999999\n/\nend 0\n\n", "malformed spec: it ends too early"),
            (b"holdfast-spec 1\ncwd 2\n/\nend 0\n\n", "malformed spec: not in records"),
        ],
    )
    def test_malformed_spec_is_a_failed_start_that_says_why(
        self, attempt: Attempt, data: bytes | None, text: str
    ) -> None:
        """R24."""
        if data is not None:
            (attempt.folder.path / "spec").write_bytes(data)
        attempt.supervise()
        exit = attempt.end()
        assert exit.cause == ExitCause.START_FAILED
        assert exit.text == text
        assert attempt.status() == 125
        assert attempt.folder.started() is None


class TestCosts:
    def test_idle_supervisor_is_small(self, attempt: Attempt) -> None:
        """R24."""
        attempt.start(*shell(f"echo ready; {FOREVER}"))
        attempt.says(b"ready")
        rollup = Path(f"/proc/{attempt.pid}/smaps_rollup").read_text()
        # What is clean is the program itself, shared by all supervisors.
        assert int(rollup.partition("Private_Dirty:")[2].split()[0]) < 300
        attempt.tell("kill")

    def test_program_says_its_version(self, attempt: Attempt) -> None:
        """An old supervisor outlives an upgrade of the package; its files carry the version too."""
        done = subprocess.run([attempt.program, "--version"], capture_output=True, text=True, check=True)
        assert done.stdout == "holdfast-supervisor 1\n"
        assert subprocess.run([attempt.program], capture_output=True, check=False).returncode == 64

    def test_missing_folder_is_said(self, attempt: Attempt, tmp_path: Path) -> None:
        done = subprocess.run([attempt.program, tmp_path / "nowhere"], capture_output=True, text=True, check=False)
        assert done.returncode == 122
        assert "cannot open the folder" in done.stderr
