"""How the supervisor stops what it runs: limits of time, commands, and nothing that outlives the end."""

import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from holdfast.runner.supervisor.protocol import ExitCause
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
        deadline = time.time() + 4
        exit = attempt.run(*shell(f"echo up; {FOREVER}"), stop_after=deadline, clock="realtime", stop_grace=0)
        assert ending(exit) == (ExitCause.STOP_AFTER, None, signal.SIGKILL)
        assert attempt.output() == b"up\n"
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
        ack = attempt.command("beat", stop_after=end + 600)
        assert ack.ok
        assert ack.stop_after == round((end + 600) * 1e6)
        late = attempt.command("beat", stop_after=end - 1)
        assert late.ok
        assert late.stop_after == ack.stop_after
        eventually(lambda: boottime() > end + 0.5)
        assert attempt.folder.exit() is None
        assert attempt.command("kill").ok
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
            attempt.command("stop", kind="cancel", grace=0.2)
        exit = attempt.end()
        assert exit.cause == (ExitCause.EXIT if how == "exit" else ExitCause.CANCELLED)
        assert not running(daemon)

    @pytest.mark.parametrize("how", ["exit", "kill"])
    def test_double_forked_daemon_is_gone(self, attempt: SupervisedAttempt, how: str) -> None:
        """Proves R25: no session, no parent, no output, no environment in common with the attempt."""
        attempt.start(*python(DAEMON.replace("WAIT", "0" if how == "exit" else "600")))
        daemon = attempt.number("daemon")
        if how == "kill":
            attempt.command("kill")
        exit = attempt.end()
        assert exit.killed
        assert exit.code == (0 if how == "exit" else None)
        assert not running(daemon)

    def test_daemon_gets_the_polite_signal_too(self, attempt: SupervisedAttempt) -> None:
        """Proves R25: within the grace, what the child started may end by itself."""
        daemon = "trap 'echo daemon ends; exit 0' TERM; echo ready; while :; do sleep 0.05; done"
        attempt.start(*shell(f'setsid sh -c "{daemon}" & wait'))
        attempt.wait_for_output(b"ready")
        attempt.command("stop", kind="cancel", grace=60)
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
        attempt.command("stop", kind="cancel", grace=60)
        attempt.end()
        assert attempt.output().count(b"heard 1\n") == 2

    def test_deep_tree_that_ignores_everything_is_gone(self, attempt: SupervisedAttempt) -> None:
        """Proves R8: each level in a session of its own, deaf to TERM."""
        attempt.start(*python(DEEP))
        eventually(lambda: attempt.output().count(b"\n") == 20)
        pids = [int(line) for line in attempt.output().split()]
        attempt.command("stop", kind="interrupt", grace=0.1)
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
        reported = eventually(lambda: attempt.events("not_dead"))
        assert reported[0]["pids"] == [other]
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
