"""How the supervisor stops what it runs: limits of time, commands, and nothing that outlives the end."""

import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from holdfast.runner.frames import Frame, Stream
from holdfast.runner.supervisor.protocol import ExitCause
from holdfast.runner.wire import Command, encode_command
from tests.support.supervisor_harness import (
    AS_NOBODY,
    FOREVER,
    NOBODY,
    STUBBORN,
    SupervisedAttempt,
    boottime,
    ending,
    eventually,
    hand_over,
    needs_root,
    python,
    running,
    shell,
)

PAGE = 4096


class TestLimits:
    def test_timeout_asks_politely_and_keeps_the_partial_output(self, attempt: SupervisedAttempt) -> None:
        """Proves R8: TERM first. A child that exits in time is not killed; the limit is the cause whatever its code."""
        exit = attempt.run(*shell(f"trap 'echo bye; exit 0' TERM; echo begin; {FOREVER}"), timeout=3, stop_grace=60)
        assert ending(exit) == (ExitCause.TIMED_OUT, 0, None)
        assert attempt.output() == b"begin\nbye\n"
        assert (exit.reason, exit.stopped_by) == ("timed_out", "limit")
        assert exit.lasted >= 3_000_000
        assert attempt.status() == 124

    def test_timeout_kills_a_stubborn_child_and_its_grandchild(self, attempt: SupervisedAttempt) -> None:
        """Proves R8, R24: sleeper and grandchild gone, with no worker alive."""
        attempt.start(*shell(f'sh -c "{STUBBORN}" & echo grandchild=$! ; {STUBBORN}'), timeout=4.0, stop_grace=0.2)
        grandchild = attempt.number("grandchild")
        exit = attempt.end()
        assert ending(exit) == (ExitCause.TIMED_OUT, None, signal.SIGKILL)
        assert exit.killed
        assert not running(grandchild)
        assert b"ready" in attempt.output()

    def test_timeout_without_grace_kills_at_once(self, attempt: SupervisedAttempt) -> None:
        """Proves R8."""
        exit = attempt.run(*shell(f"trap 'echo bye' TERM; {FOREVER}"), timeout=0.3, stop_grace=0)
        assert ending(exit) == (ExitCause.TIMED_OUT, None, signal.SIGKILL)
        assert attempt.output() == b""
        assert attempt.events("signalled") == []

    def test_stopped_child_is_continued_for_its_polite_signal(self, attempt: SupervisedAttempt) -> None:
        """Proves R8."""
        exit = attempt.run(
            *shell("trap 'echo bye; exit 0' TERM; kill -STOP $$; sleep 600 & wait"), timeout=3, stop_grace=60
        )
        assert exit.cause == ExitCause.TIMED_OUT
        assert attempt.output() == b"bye\n"

    def test_silent_child_is_stopped(self, attempt: SupervisedAttempt) -> None:
        """Proves R9."""
        exit = attempt.run(*shell(f"echo one; {FOREVER}"), idle_timeout=3, stop_grace=0.1)
        assert exit.cause == ExitCause.IDLE_TIMEOUT
        assert attempt.output() == b"one\n"
        assert attempt.status() == 124

    def test_output_on_either_stream_keeps_a_child_from_being_idle(self, attempt: SupervisedAttempt) -> None:
        """Proves R9."""
        script = (
            "for i in 1 2 3 4 5 6 7 8; do sleep 0.3; if [ $((i % 2)) = 0 ]; then echo $i; else echo $i >&2; fi; done"
        )
        exit = attempt.run(*shell(script), idle_timeout=2.0)
        assert ending(exit) == (ExitCause.EXIT, 0, None)

    def test_stop_after_stops_the_child_without_a_worker(self, attempt: SupervisedAttempt) -> None:
        """Proves R21."""
        exit = attempt.run(*shell(STUBBORN), stop_after=boottime() + 4, stop_grace=0.2)
        assert ending(exit) == (ExitCause.STOP_AFTER, None, signal.SIGKILL)
        assert attempt.status() == 124

    def test_stop_after_by_the_wall_clock_is_for_engines_on_other_hosts(self, attempt: SupervisedAttempt) -> None:
        """Proves R21: converted once, when it is read."""
        deadline = time.time() + 1
        exit = attempt.run(*shell(FOREVER), stop_after=deadline, clock="realtime", stop_grace=0)
        assert exit.cause == ExitCause.STOP_AFTER
        assert time.time() >= deadline

    def test_nothing_starts_after_stop_after(self, attempt: SupervisedAttempt) -> None:
        """Proves R21."""
        exit = attempt.run(*shell("echo ran"), stop_after=boottime() - 0.001)
        assert ending(exit) == (ExitCause.STOP_AFTER, None, None)
        assert exit.tasks == ()
        assert attempt.folder.started() is None
        assert attempt.output() == b""

    def test_beats_keep_a_child_from_stop_after(self, attempt: SupervisedAttempt) -> None:
        """Proves R21: the deadline is absolute and never goes back, in whatever order beats arrive."""
        end = boottime() + 6.0
        attempt.start(*shell(f"echo ready; {FOREVER}"), stop_after=end, stop_grace=0)
        attempt.wait_for_output(b"ready")
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
    def test_grandchild_with_its_own_session_is_gone(
        self, attempt: SupervisedAttempt, tmp_path: Path, how: str
    ) -> None:
        """Proves R25."""
        up = tmp_path / "up"
        rest = f"while [ ! -e {up} ]; do sleep 0.05; done" if how == "exit" else FOREVER
        attempt.start(*shell(f"setsid sh -c 'echo daemon=$$ ; touch {up}; {FOREVER}' & {rest}"))
        daemon = attempt.number("daemon")
        if how == "stop":
            attempt.tell("stop", kind="cancel", grace=0.2)
        exit = attempt.end()
        assert exit.cause == (ExitCause.EXIT if how == "exit" else ExitCause.CANCELLED)
        assert not running(daemon)

    @pytest.mark.parametrize("how", ["exit", "kill"])
    def test_double_forked_daemon_is_gone(self, attempt: SupervisedAttempt, how: str) -> None:
        """Proves R25: no session, no parent, no output, no environment in common with the attempt."""
        attempt.start(*python(DAEMON.replace("WAIT", "0" if how == "exit" else "600")))
        daemon = attempt.number("daemon")
        if how == "kill":
            attempt.tell("kill")
        exit = attempt.end()
        assert exit.killed
        assert exit.code == (0 if how == "exit" else None)
        assert not running(daemon)

    def test_daemon_gets_the_polite_signal_too(self, attempt: SupervisedAttempt) -> None:
        """Proves R25: within the grace, what the child started may end by itself."""
        daemon = "trap 'echo daemon ends; exit 0' TERM; echo ready; while :; do sleep 0.05; done"
        attempt.start(*shell(f'setsid sh -c "{daemon}" & wait'))
        attempt.wait_for_output(b"ready")
        attempt.tell("stop", kind="cancel", grace=60)
        exit = attempt.end()
        assert not exit.killed
        assert b"daemon ends" in attempt.output()

    def test_process_group_gets_the_polite_signal_once(self, attempt: SupervisedAttempt) -> None:
        code = (
            "import os, signal, time\nheard = 0\n"
            "def hear(*_):\n    global heard; heard += 1\n"
            "signal.signal(signal.SIGTERM, hear); os.fork(); print('ready', flush=True)\n"
            "while not heard: time.sleep(0.01)\n"
            # Reason for the sleep: time in which a second signal would arrive.
            "time.sleep(0.3); print(f'heard {heard}', flush=True)"
        )
        attempt.start(*python(code))
        eventually(lambda: attempt.output().count(b"ready") == 2)
        attempt.tell("stop", kind="cancel", grace=60)
        attempt.end()
        assert attempt.output().count(b"heard 1\n") == 2

    def test_deep_tree_that_ignores_everything_is_gone(self, attempt: SupervisedAttempt) -> None:
        """Proves R8: each level in a session of its own, deaf to TERM."""
        attempt.start(*python(DEEP))
        eventually(lambda: attempt.output().count(b"\n") == 20)
        pids = [int(line) for line in attempt.output().split()]
        attempt.tell("stop", kind="interrupt", grace=0.1)
        exit = attempt.end()
        assert exit.cause == ExitCause.INTERRUPTED
        assert not any(map(running, pids))

    @needs_root
    def test_unkillable_process_is_reported_and_not_called_dead(
        self, attempt: SupervisedAttempt, tmp_path: Path
    ) -> None:
        """Proves R23: a program of another user outlives the kill; no `exit` until it is gone."""
        become = Path(shutil.copy("/usr/bin/setpriv", tmp_path / "become"))
        become.chmod(0o4755)
        attempt.write(
            *shell(f"{become} --reuid=0 sleep 600 & echo other=$! ; {FOREVER}"),
            no_new_privs=False,
            timeout=5.0,
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

    def test_child_dies_with_its_killed_supervisor_and_no_exit_is_written(self, attempt: SupervisedAttempt) -> None:
        """Proves R22, R7: the end cannot be known; what is left is found by its mark, not by a pid."""
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

    def test_supervisor_killed_at_any_instant_never_ran_a_program_without_a_record(self, tmp_path: Path) -> None:
        """Proves R22, R1: what ran has left `started`; what has not may be started again, and then runs."""
        for step in range(40):
            attempt = SupervisedAttempt(tmp_path / f"attempt-{step}")
            trace = tmp_path / f"trace-{step}"
            attempt.write(*shell(f"echo ran >>{trace}"))
            attempt.supervise()
            time.sleep(step * 0.0001)  # Reason: the instant is what this test varies.
            os.kill(attempt.pid, signal.SIGKILL)
            attempt.status()
            eventually(lambda attempt=attempt: not attempt.folder.leftovers(attempt.mark))  # type: ignore[misc]
            if attempt.folder.started() is None:
                assert not trace.exists()
                attempt.supervise()
                assert attempt.end().code == 0
            assert not trace.exists() or trace.read_text() in ("", "ran\n")
            # A child that was forked and not yet told to begin holds the lock until it has died of its parent's death.
            eventually(lambda attempt=attempt: not attempt.folder.alive())  # type: ignore[misc]
            attempt.clean()

    @needs_root
    def test_child_that_changed_its_user_dies_with_the_supervisor(self, attempt: SupervisedAttempt) -> None:
        """Proves R25: changing the user clears the parent-death signal; it is set again."""
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


# A /proc of its own, also where the root folder is no mount point, as in a chroot: there `--mount-proc` fails.
AS_PID_1 = (
    *("unshare", "--pid", "--fork", "--kill-child", "--mount", "--propagation", "unchanged", "sh", "-c"),
    *('mount --make-private /proc && mount -t proc proc /proc && exec "$@"', "sh"),
)


class TestCommands:
    def test_lower_token_is_refused_equal_and_higher_are_obeyed(self, attempt: SupervisedAttempt) -> None:
        """Proves R3: an adopter raises the token; after that its predecessor has no say."""
        attempt.start(*shell(f"echo ready; {FOREVER}"), token=5)
        attempt.wait_for_output(b"ready")
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

    def test_stop_ends_as_the_kind_that_was_asked_for(self, attempt: SupervisedAttempt) -> None:
        """Proves R20."""
        attempt.start(*shell(f"trap 'echo bye; exit 0' TERM; echo ready; {FOREVER}"))
        attempt.wait_for_output(b"ready")
        ack = attempt.tell("stop", kind="interrupt", grace=60)
        assert (ack.ok, ack.verb, ack.reason) == (True, "stop", "interrupted")
        exit = attempt.end()
        assert ending(exit) == (ExitCause.INTERRUPTED, 0, None)
        assert exit.stopped_by == "command"
        assert attempt.output() == b"ready\nbye\n"

    def test_first_stop_reason_stays_and_a_later_stop_only_hastens_the_kill(self, attempt: SupervisedAttempt) -> None:
        """Proves R8."""
        attempt.start(*shell(STUBBORN))
        attempt.wait_for_output(b"ready")
        assert attempt.tell("stop", kind="interrupt", grace=600).ok
        assert attempt.tell("stop", kind="cancel", grace=900).reason == "interrupted"
        assert attempt.folder.exit() is None
        assert attempt.tell("kill", kind="cancel").ok
        exit = attempt.end()
        assert ending(exit) == (ExitCause.INTERRUPTED, None, signal.SIGKILL)
        assert len(attempt.events("signalled")) == 1

    def test_exit_that_came_first_decides(self, attempt: SupervisedAttempt) -> None:
        """Proves R20: a stop that finds the child ended changes nothing but the wait for what it left."""
        attempt.start(*shell("sleep 600 & echo main=$$ ; exit 3"), drain=600)
        main = attempt.number("main")
        eventually(lambda: not running(main))
        assert attempt.tell("stop", kind="cancel", grace=0).reason == ""
        exit = attempt.end()
        assert ending(exit) == (ExitCause.EXIT, 3, None)
        assert exit.killed

    @needs_root
    def test_supervisor_is_pid_1_of_a_container(self, attempt: SupervisedAttempt) -> None:
        """Proves R24, R25: reaps orphans, obeys commands, and records the end, as on the host."""
        attempt.write(*shell(f"echo pid=$PPID ; (setsid sh -c 'echo orphan; {FOREVER}' &) ; {FOREVER}"))
        attempt.supervise("--copy", wrap=AS_PID_1)
        attempt.wait_for_output(b"orphan")
        assert attempt.number("pid") == 1
        assert attempt.tell("stop", kind="cancel", grace=60).ok
        exit = attempt.end()
        assert ending(exit) == (ExitCause.CANCELLED, None, signal.SIGTERM)
        assert not exit.killed
        assert attempt.status() == 128 + signal.SIGTERM

    def test_signal_to_the_supervisor_itself_is_an_interrupt(self, attempt: SupervisedAttempt) -> None:
        """Proves R20: `docker stop`, or a shutdown of the host; `stopped_by` says that it was no command."""
        attempt.start(*shell(f"trap 'exit 0' TERM; echo ready; {FOREVER}"), stop_grace=60)
        attempt.wait_for_output(b"ready")
        os.kill(attempt.pid, signal.SIGTERM)
        exit = attempt.end()
        assert ending(exit) == (ExitCause.INTERRUPTED, 0, None)
        assert exit.stopped_by == "signal"

    def test_adopter_continues_the_log_and_the_timeout(self, attempt: SupervisedAttempt) -> None:
        """Proves R3: total time stays below the timeout, whichever worker watches."""
        attempt.start(*shell("i=0; while :; do i=$((i+1)); echo $i; sleep 0.01; done"), timeout=5.0, stop_grace=0)
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
        assert exit.lasted >= 5_000_000

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
        self, attempt: SupervisedAttempt, data: bytes, why: str
    ) -> None:
        """Proves R24."""
        attempt.start(*shell(f"echo ready; {FOREVER}"))
        attempt.wait_for_output(b"ready")
        place(attempt, "bad", data)
        ack = attempt.answer("bad")
        assert not ack.ok
        assert ack.why == why
        assert list((attempt.folder.path / "cmd").iterdir()) == []
        assert attempt.tell("kill").ok

    def test_command_that_is_not_a_regular_file_is_refused(self, attempt: SupervisedAttempt) -> None:
        """Proves R24: nothing in the folder can block or mislead the supervisor."""
        attempt.start(*shell(f"echo ready; {FOREVER}"))
        attempt.wait_for_output(b"ready")
        folder = attempt.folder.path / "cmd"
        os.mkfifo(folder / "fifo")
        (folder / "link").symlink_to("/etc/passwd")
        (folder / "folder").mkdir()
        for name in ("fifo", "link", "folder"):
            assert attempt.answer(name).why == "not a file that can be read"
        assert attempt.tell("kill").ok

    @needs_root
    def test_command_that_an_engine_still_unpacks_is_waited_for(
        self, attempt: SupervisedAttempt, tmp_path: Path
    ) -> None:
        """Proves R24: it is created first and made readable later. If it were refused, an adopter would lose it."""
        attempt.write(*shell(f"echo ready; {FOREVER}"))
        hand_over(attempt, tmp_path)
        attempt.supervise(wrap=AS_NOBODY)
        attempt.wait_for_output(b"ready")
        path = attempt.folder.path / "cmd" / "hold"
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(encode_command(Command(token=6, verb="hold")))
        time.sleep(0.3)  # Reason: time in which it would wrongly refuse the command.
        os.chown(path, NOBODY, NOBODY)
        assert attempt.answer("hold").ok

    def test_many_commands_are_obeyed_in_the_order_of_their_names(self, attempt: SupervisedAttempt) -> None:
        attempt.start(*shell(f"echo ready; {FOREVER}"))
        attempt.wait_for_output(b"ready")
        os.kill(attempt.pid, signal.SIGSTOP)
        names = [attempt.folder.send(Command(token=5 + i, verb="hold")) for i in range(50)]
        os.kill(attempt.pid, signal.SIGCONT)
        attempt.answer(names[-1])
        acks = attempt.folder.acks()
        assert [ack.command for ack in acks] == names
        assert all(ack.ok for ack in acks)
        assert attempt.tell("kill", token=100).ok

    def test_command_that_was_there_before_the_start_counts(self, attempt: SupervisedAttempt) -> None:
        """Proves R8: a cancel that overtakes the start."""
        name = attempt.folder.send(Command(token=5, verb="kill"))
        exit = attempt.run(*shell(FOREVER))
        assert exit.cause == ExitCause.CANCELLED
        assert attempt.answer(name).ok


def place(attempt: SupervisedAttempt, name: str, data: bytes) -> None:
    """Put a command as an archive would, under its final name; what could be read half-way, being large, at once."""
    path = attempt.folder.path / "cmd" / name
    if len(data) > PAGE:
        aside = attempt.folder.path / f"aside.{name}"
        aside.write_bytes(data)
        aside.rename(path)
    else:
        path.write_bytes(data)
