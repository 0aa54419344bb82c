"""Commands to the supervisor: tokens, stop and kill, malformed ones, and their order."""

import os
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
    running,
    shell,
)

PAGE = 4096


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
        assert attempt.command("hold", token=5).ok
        raised = attempt.command("hold", token=8)
        assert raised.ok
        assert raised.highest_token == 8
        for verb in ("hold", "beat", "stop", "kill"):
            stale = attempt.command(verb, token=7, stop_after=boottime() + 9 if verb == "beat" else None)
            assert not stale.ok
            assert (stale.why, stale.token, stale.highest_token, stale.reason) == ("stale token", 7, 8, "")
        assert attempt.folder.exit() is None
        assert attempt.command("kill", token=9).ok
        assert attempt.end().token == 9

    def test_stop_ends_as_the_kind_that_was_asked_for(self, attempt: SupervisedAttempt) -> None:
        """Proves R20."""
        attempt.start(*shell(f"trap 'echo bye; exit 0' TERM; echo ready; {FOREVER}"))
        attempt.wait_for_output(b"ready")
        ack = attempt.command("stop", kind="interrupt", grace=60)
        assert (ack.ok, ack.verb, ack.reason) == (True, "stop", "interrupted")
        exit = attempt.end()
        assert ending(exit) == (ExitCause.INTERRUPTED, 0, None)
        assert exit.stopped_by == "command"
        assert attempt.output() == b"ready\nbye\n"

    def test_first_stop_reason_stays_and_a_later_stop_only_hastens_the_kill(self, attempt: SupervisedAttempt) -> None:
        """Proves R8."""
        attempt.start(*shell(STUBBORN))
        attempt.wait_for_output(b"ready")
        assert attempt.command("stop", kind="interrupt", grace=600).ok
        assert attempt.command("stop", kind="cancel", grace=900).reason == "interrupted"
        assert attempt.folder.exit() is None
        assert attempt.command("kill", kind="cancel").ok
        exit = attempt.end()
        assert ending(exit) == (ExitCause.INTERRUPTED, None, signal.SIGKILL)
        assert len(attempt.events("signalled")) == 1

    def test_exit_that_came_first_decides(self, attempt: SupervisedAttempt) -> None:
        """Proves R20: a stop that finds the child ended changes nothing but the wait for what it left."""
        attempt.start(*shell("sleep 600 & echo main=$$ ; exit 3"), drain=600)
        main = attempt.number("main")
        eventually(lambda: not running(main))
        assert attempt.command("stop", kind="cancel", grace=0).reason == ""
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
        assert attempt.command("stop", kind="cancel", grace=60).ok
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
        assert attempt.command("hold", token=6).ok
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
        ack = attempt.ack_of("bad")
        assert not ack.ok
        assert ack.why == why
        assert list((attempt.folder.path / "cmd").iterdir()) == []
        assert attempt.command("kill").ok

    def test_command_that_is_not_a_regular_file_is_refused(self, attempt: SupervisedAttempt) -> None:
        """Proves R24: nothing in the folder can block or mislead the supervisor."""
        attempt.start(*shell(f"echo ready; {FOREVER}"))
        attempt.wait_for_output(b"ready")
        folder = attempt.folder.path / "cmd"
        os.mkfifo(folder / "fifo")
        (folder / "link").symlink_to("/etc/passwd")
        (folder / "folder").mkdir()
        for name in ("fifo", "link", "folder"):
            assert attempt.ack_of(name).why == "not a file that can be read"
        assert attempt.command("kill").ok

    @needs_root
    def test_command_that_is_not_readable_yet_is_retried(self, attempt: SupervisedAttempt, tmp_path: Path) -> None:
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
        assert attempt.ack_of("hold").ok

    def test_many_commands_are_obeyed_in_the_order_of_their_names(self, attempt: SupervisedAttempt) -> None:
        attempt.start(*shell(f"echo ready; {FOREVER}"))
        attempt.wait_for_output(b"ready")
        os.kill(attempt.pid, signal.SIGSTOP)
        names = [attempt.folder.send(Command(token=5 + i, verb="hold")) for i in range(50)]
        os.kill(attempt.pid, signal.SIGCONT)
        attempt.ack_of(names[-1])
        acks = attempt.folder.acks()
        assert [ack.command for ack in acks] == names
        assert all(ack.ok for ack in acks)
        assert attempt.command("kill", token=100).ok

    def test_command_that_was_there_before_the_start_counts(self, attempt: SupervisedAttempt) -> None:
        """Proves R8: a cancel that overtakes the start."""
        name = attempt.folder.send(Command(token=5, verb="kill"))
        exit = attempt.run(*shell(FOREVER))
        assert exit.cause == ExitCause.CANCELLED
        assert attempt.ack_of(name).ok


def place(attempt: SupervisedAttempt, name: str, data: bytes) -> None:
    """Put a command as an archive would, under its final name; what could be read half-way, being large, at once."""
    path = attempt.folder.path / "cmd" / name
    if len(data) > PAGE:
        aside = attempt.folder.path / f"aside.{name}"
        aside.write_bytes(data)
        aside.rename(path)
    else:
        path.write_bytes(data)
