"""The supervisor with real processes: how attempts end, what the child gets, tasks and specs."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.runner.frames import Stream
from holdfast.runner.supervisor.protocol import ExitCause
from holdfast.runner.wire import WireTask
from tests.support.supervisor_harness import (
    AS_NOBODY,
    FOREVER,
    NOBODY,
    SupervisedAttempt,
    boottime,
    ending,
    hand_over,
    needs_root,
    python,
    shell,
)


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


PROBE = "import fcntl, sys; f = open(sys.argv[1]); fcntl.flock(f, fcntl.LOCK_SH); print(flush=True); sys.stdin.read()"


class TestEnds:
    @pytest.mark.parametrize("code", [0, 1, 3, 124, 127, 255])
    def test_exit_code_is_recorded(self, attempt: SupervisedAttempt, code: int) -> None:
        """Proves R20: cause `exit`, also for the codes that shells use for failures of their own."""
        exit = attempt.run(*shell(f"exit {code}"))
        assert ending(exit) == (ExitCause.EXIT, code, None)
        assert exit.text == ""
        assert exit.tasks[0].code == code
        assert attempt.status() == code

    def test_signal_is_recorded(self, attempt: SupervisedAttempt) -> None:
        """Proves R20."""
        exit = attempt.run(*shell("kill -SEGV $$"))
        assert ending(exit) == (ExitCause.EXIT, None, signal.SIGSEGV)
        assert attempt.status() == 128 + signal.SIGSEGV

    def test_start_is_recorded_before_the_program_runs(self, attempt: SupervisedAttempt) -> None:
        """Proves R1: the child finds its identity in the folder and in its environment."""
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
        self, attempt: SupervisedAttempt, argv: tuple[str, ...], spec: dict[str, object], text: str
    ) -> None:
        """Proves R20: `start_failed` is told apart from a program that exits with 127."""
        exit = attempt.run(*argv, **spec)
        assert ending(exit) == (ExitCause.START_FAILED, None, None)
        assert exit.text == text
        assert attempt.status() == 125

    def test_file_without_a_format_is_not_given_to_a_shell(self, attempt: SupervisedAttempt, tmp_path: Path) -> None:
        script = tmp_path / "script"
        script.write_text("echo surprise\n")
        script.chmod(0o755)
        exit = attempt.run(str(script))
        assert ending(exit) == (ExitCause.START_FAILED, None, None)
        assert "Exec format error" in exit.text

    def test_out_of_memory_kill_is_recognised(self, attempt: SupervisedAttempt, memory_group: Path) -> None:
        """Proves R20: `out_of_memory`, from the counter of the control group."""
        attempt.write(*python("x = bytearray(200 << 20)"))
        attempt.supervise(wrap=("sh", "-c", f'echo $$ >{memory_group}/cgroup.procs; exec "$@"', "sh"))
        exit = attempt.end()
        assert ending(exit) == (ExitCause.OUT_OF_MEMORY, None, signal.SIGKILL)
        assert exit.oom_kills >= 1

    def test_kill_by_another_process_is_recorded_as_a_signal(self, attempt: SupervisedAttempt) -> None:
        """Proves R20."""
        assert ending(attempt.run(*shell("kill -KILL $$"))) == (ExitCause.EXIT, None, signal.SIGKILL)

    def test_second_supervisor_is_refused_while_the_first_runs(self, attempt: SupervisedAttempt) -> None:
        """Proves R1: start is exclusive by identity."""
        first = attempt.start(*shell(f"echo ready; {FOREVER}"))
        attempt.wait_for_output(b"ready")
        second = attempt.supervise()
        assert attempt.status(second) == 120
        assert attempt.folder.alive()
        assert attempt.folder.exit() is None
        attempt.command("kill")
        attempt.status(first)

    def test_of_many_concurrent_supervisors_one_runs(self, attempt: SupervisedAttempt) -> None:
        """Proves R1."""
        attempt.write(*shell("echo once"))
        pids = [attempt.supervise() for _ in range(8)]
        statuses = sorted(attempt.status(pid) for pid in pids)
        assert statuses[0] == 0
        assert set(statuses[1:]) <= {120, 121}
        assert attempt.output() == b"once\n"

    def test_folder_is_started_once(self, attempt: SupervisedAttempt) -> None:
        """Proves R2: a worker that wakes up late finds `started` and leaves."""
        attempt.run(*shell("echo once"))
        attempt.supervise()
        assert attempt.status() == 121
        assert attempt.output() == b"once\n"

    def test_probes_never_keep_a_supervisor_from_starting(self, attempt: SupervisedAttempt) -> None:
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

    def test_nothing_starts_after_the_start_by_deadline(self, attempt: SupervisedAttempt) -> None:
        """Proves R1: a worker that slept before the start touches nothing; the next one starts the attempt."""
        attempt.start(*shell("echo ran"), start_by=boottime() - 1)
        assert attempt.status() == 123
        assert attempt.folder.started() is None
        assert attempt.folder.exit() is None
        assert not (attempt.folder.path / "log").exists()
        assert attempt.run(*shell("echo ran"), start_by=boottime() + 600).code == 0
        assert attempt.output() == b"ran\n"


class TestChild:
    def test_environment_is_built_from_nothing(self, attempt: SupervisedAttempt) -> None:
        """Proves R25."""
        attempt.write("env", env={"GREETING": "hällo\nworld"})
        attempt.supervise(env={"HOLDFAST_ADMIN_TOKEN": "secret", "LD_PRELOAD": "/no/such.so"})
        attempt.end()
        expected = {"PATH=/usr/local/bin:/usr/bin:/bin", "LC_ALL=C.UTF-8", "GREETING=hällo", "world"}
        assert set(attempt.output().decode().splitlines()) == expected | {f"HOLDFAST_MARK={attempt.mark}"}

    def test_mark_cannot_be_set_by_the_spec(self, attempt: SupervisedAttempt) -> None:
        attempt.run(
            tasks=(WireTask(name="a", argv=("env",), env={"HOLDFAST_MARK": "other"}),), env={"HOLDFAST_MARK": "other"}
        )
        assert attempt.output().count(b"HOLDFAST_MARK=") == 1
        assert f"HOLDFAST_MARK={attempt.mark}\n".encode() in attempt.output()

    def test_child_has_three_descriptors_and_no_inherited_signal_settings(self, attempt: SupervisedAttempt) -> None:
        """Proves R25: nothing that the worker had open reaches the child."""
        code = "import os; print(sorted(os.listdir('/proc/self/fd'))); print(open('/proc/self/status').read())"
        attempt.run(*python(code))
        lines = attempt.output().decode().splitlines()
        assert lines[0] == "['0', '1', '2', '3']"  # 3 lists the folder
        status = dict(line.split(":\t", 1) for line in lines[1:] if ":\t" in line)
        assert int(status["SigBlk"], 16) == 0
        # Python itself ignores SIGPIPE and SIGXFSZ.
        assert int(status["SigIgn"], 16) & ~(1 << signal.SIGPIPE - 1 | 1 << signal.SIGXFSZ - 1) == 0
        assert status["NoNewPrivs"] == "1"

    def test_stdin_is_empty_unless_given(self, attempt: SupervisedAttempt) -> None:
        assert attempt.run("cat").code == 0
        assert attempt.output() == b""

    def test_stdin_is_the_file_of_that_name(self, attempt: SupervisedAttempt) -> None:
        (attempt.folder.path / "stdin").write_bytes(b"from a file")
        attempt.run("cat")
        assert attempt.output() == b"from a file"

    def test_folder_umask_and_limits_are_as_asked(self, attempt: SupervisedAttempt, tmp_path: Path) -> None:
        attempt.run(
            *shell("pwd; umask; ulimit -n; ulimit -c"), cwd=str(tmp_path), umask=0o027, limits={"nofile": 64, "core": 0}
        )
        assert attempt.output().decode().split() == [str(tmp_path), "0027", "64", "0"]

    @needs_root
    def test_privileges_are_dropped_for_good(self, attempt: SupervisedAttempt, tmp_path: Path) -> None:
        """Proves R25: the child runs as its own user, without root's groups, and cannot read the admin token."""
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
    def test_user_that_cannot_enter_its_folder_fails_to_start(self, attempt: SupervisedAttempt, tmp_path: Path) -> None:
        closed = tmp_path / "closed"
        closed.mkdir(mode=0o700)
        exit = attempt.run("true", uid=NOBODY, gid=NOBODY, cwd=str(closed))
        assert exit.cause == ExitCause.START_FAILED
        assert "could not enter its folder: Permission denied" in exit.text

    @needs_root
    def test_change_of_user_without_the_right_to_it_fails_to_start(
        self, attempt: SupervisedAttempt, tmp_path: Path
    ) -> None:
        """Proves R25: never runs as somebody else than asked."""
        attempt.write("true", uid=12345, gid=NOBODY)
        hand_over(attempt, tmp_path)
        attempt.supervise(wrap=AS_NOBODY)
        exit = attempt.end()
        assert exit.cause == ExitCause.START_FAILED
        assert "could not set its user" in exit.text


class TestTasks:
    def test_tasks_run_in_order_each_with_its_own_settings(self, attempt: SupervisedAttempt, tmp_path: Path) -> None:
        exit = attempt.run(
            tasks=(
                WireTask(name="one", argv=shell('echo "$WHO $SHARED"'), env={"WHO": "first"}),
                WireTask(name="two", argv=shell("pwd >&2"), cwd=str(tmp_path)),
                WireTask(name="three", argv=shell('echo "$WHO $SHARED"')),
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

    def test_first_failure_ends_the_attempt(self, attempt: SupervisedAttempt) -> None:
        exit = attempt.run(tasks=tuple(WireTask(name=f"t{i}", argv=shell(f"echo {i}; exit {i}")) for i in range(3)))
        assert ending(exit) == (ExitCause.EXIT, 1, None)
        assert [(task.name, task.code) for task in exit.tasks] == [("t0", 0), ("t1", 1)]
        assert attempt.output() == b"0\n1\n"

    def test_later_task_that_cannot_start_fails_the_attempt(self, attempt: SupervisedAttempt) -> None:
        exit = attempt.run(tasks=(WireTask(name="a", argv=("true",)), WireTask(name="b", argv=("no-such-command",))))
        assert exit.cause == ExitCause.START_FAILED
        assert "no-such-command" in exit.text
        assert [task.cause for task in exit.tasks] == [ExitCause.EXIT, ExitCause.START_FAILED]

    def test_stop_during_task_two_of_three_starts_no_third(self, attempt: SupervisedAttempt) -> None:
        """Proves R8."""
        script = (shell("echo one"), shell(f"echo two; {FOREVER}"), shell("echo three"))
        attempt.start(tasks=tuple(WireTask(name=f"t{i}", argv=argv) for i, argv in enumerate(script)))
        attempt.wait_for_output(b"two")
        attempt.command("stop", kind="cancel", grace=0.1)
        exit = attempt.end()
        assert exit.cause == ExitCause.CANCELLED
        assert [(task.name, task.cause) for task in exit.tasks] == [("t0", "exit"), ("t1", "cancelled")]
        assert attempt.output() == b"one\ntwo\n"

    def test_task_has_a_timeout_of_its_own(self, attempt: SupervisedAttempt) -> None:
        """Proves R8."""
        tasks = (
            WireTask(name="quick", argv=("true",), timeout=60),
            WireTask(name="slow", argv=shell(FOREVER), timeout=0.3),
        )
        exit = attempt.run(tasks=tasks, stop_grace=0, timeout=600)
        assert exit.cause == ExitCause.TIMED_OUT
        assert [task.cause for task in exit.tasks] == [ExitCause.EXIT, ExitCause.TIMED_OUT]

    def test_timeout_of_the_attempt_spans_its_tasks(self, attempt: SupervisedAttempt) -> None:
        """Proves R8."""
        tasks = tuple(WireTask(name=f"t{i}", argv=("sleep", "0.4")) for i in range(100))
        exit = attempt.run(tasks=tasks, timeout=1.0, stop_grace=0)
        assert exit.cause == ExitCause.TIMED_OUT
        assert len(exit.tasks) < 10

    def test_leftovers_of_a_task_are_killed_before_the_next(self, attempt: SupervisedAttempt, tmp_path: Path) -> None:
        """Proves R25: the next task starts clean."""
        leave = shell(f"setsid sh -c 'exec >/dev/null; {FOREVER}' & echo left=$! ; echo $! >{tmp_path}/left")
        look = shell(f"kill -0 $(cat {tmp_path}/left) || echo gone")
        exit = attempt.run(tasks=(WireTask(name="leave", argv=leave), WireTask(name="look", argv=look)))
        assert exit.killed
        assert attempt.output().endswith(b"gone\n")

    def test_thousand_tasks_fit_into_the_record(self, attempt: SupervisedAttempt) -> None:
        tasks = tuple(WireTask(name=f"{i:064d}", argv=("true",)) for i in range(1000))
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
            (
                b"holdfast-spec 1\ntoken 1\n1\nmark 1\nm\nuid 1\n9\ntask 1\na\narg 1\nb\nend 0\n\n",
                "malformed spec: gid is missing",
            ),
            (b"holdfast-spec 1\nfuture 1\n1\nend 0\n\n", "malformed spec: future cannot be used"),
            (b"holdfast-spec 1\nenv 3\nABC\nend 0\n\n", "malformed spec: env cannot be used"),
            (b"holdfast-spec 1\ncwd 3\nabc\nend 0\n\n", "malformed spec: cwd cannot be used"),
            (b"holdfast-spec 1\numask 3\n999\nend 0\n\n", "malformed spec: umask cannot be used"),
            (b"holdfast-spec 1\nlimit 6\nhope 1\nend 0\n\n", "malformed spec: limit cannot be used"),
            (b"holdfast-spec 1\ncwd 999999\n/\nend 0\n\n", "malformed spec: it ends too early"),
            (b"holdfast-spec 1\ncwd 2\n/\nend 0\n\n", "malformed spec: not in records"),
        ],
    )
    def test_malformed_spec_fails_the_start_with_the_reason(
        self, attempt: SupervisedAttempt, data: bytes | None, text: str
    ) -> None:
        """Proves R24."""
        if data is not None:
            (attempt.folder.path / "spec").write_bytes(data)
        attempt.supervise()
        exit = attempt.end()
        assert exit.cause == ExitCause.START_FAILED
        assert exit.text == text
        assert attempt.status() == 125
        assert attempt.folder.started() is None


class TestCosts:
    def test_idle_supervisor_is_small(self, attempt: SupervisedAttempt) -> None:
        """Proves R24."""
        attempt.start(*shell(f"echo ready; {FOREVER}"))
        attempt.wait_for_output(b"ready")
        rollup = Path(f"/proc/{attempt.pid}/smaps_rollup").read_text()
        # What is clean is the program itself, shared by all supervisors.
        assert int(rollup.partition("Private_Dirty:")[2].split()[0]) < 300
        attempt.command("kill")

    def test_program_prints_its_version(self, attempt: SupervisedAttempt) -> None:
        """An old supervisor outlives an upgrade of the package; its files carry the version too."""
        done = subprocess.run([attempt.program, "--version"], capture_output=True, text=True, check=True)
        assert done.stdout == "holdfast-supervisor 1\n"
        assert subprocess.run([attempt.program], capture_output=True, check=False).returncode == 64

    def test_missing_folder_is_reported(self, attempt: SupervisedAttempt, tmp_path: Path) -> None:
        done = subprocess.run([attempt.program, tmp_path / "nowhere"], capture_output=True, text=True, check=False)
        assert done.returncode == 122
        assert "cannot open the folder" in done.stderr
