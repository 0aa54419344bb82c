"""The supervisor with tasks that wait for commands, and with a service beside them."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from holdfast.runner.supervisor.protocol import ExitCause
from holdfast.runner.wire import WireService, WireTask
from tests.support.supervisor_harness import FOREVER, SupervisedAttempt, boottime, ending, eventually, running, shell

SERVER = "trap 'echo asked; exit 0' INT; echo up $$; while :; do sleep 0.05; done"


def begin(attempt: SupervisedAttempt, *scripts: str, service: str | None = None, **spec: Any) -> None:
    tasks = tuple(WireTask(name=f"t{n}", argv=shell(script)) for n, script in enumerate(scripts))
    server = None if service is None else WireService(name="server", argv=shell(service), stop_signal=signal.SIGINT)
    attempt.start(tasks=tasks, hold=True, service=server, **spec)


def holds(attempt: SupervisedAttempt, task: int) -> None:
    eventually(lambda: [e["task"] for e in attempt.events("holding")][-1:] == [task], f"it holds before task {task}")


def said(attempt: SupervisedAttempt) -> str:
    try:
        return (attempt.folder.path / "service").read_text()
    except FileNotFoundError:
        return ""


def up(attempt: SupervisedAttempt, times: int = 1) -> int:
    """Wait until the service has begun for the nth time; return its pid."""
    eventually(lambda: said(attempt).count("up ") >= times, "the service is up")
    return int(said(attempt).rpartition("up ")[2].split()[0])


def down(attempt: SupervisedAttempt, times: int = 1) -> dict[str, Any]:
    return eventually(lambda: attempt.events("service_ended")[times - 1 : times], "the service ends")[0]


class TestHold:
    def test_every_task_and_the_end_wait_for_a_command(self, attempt: SupervisedAttempt) -> None:
        """Proves P1, R24."""
        begin(attempt, "echo zero", "echo one")
        for task, words in enumerate((b"", b"zero\n", b"zero\none\n")):
            holds(attempt, task)
            assert attempt.output() == words
            assert attempt.command("go", task=task).ok if task < 2 else attempt.command("end").ok
        exit = attempt.end()
        assert ending(exit) == (ExitCause.EXIT, 0, None)
        assert [(task.name, task.code) for task in exit.tasks] == [("t0", 0), ("t1", 0)]

    def test_repeated_command_changes_nothing(self, attempt: SupervisedAttempt) -> None:
        """Proves P2: an adopter may send it again."""
        begin(attempt, "echo zero", f"echo one; {FOREVER}")
        holds(attempt, 0)
        attempt.command("go", task=0)
        holds(attempt, 1)
        assert attempt.command("go", task=0).ok
        assert attempt.command("go", task=1).ok
        attempt.wait_for_output(b"one")
        assert attempt.command("go", task=1).ok
        assert attempt.command("go", task=0).ok
        assert attempt.output() == b"zero\none\n"
        attempt.command("kill")
        assert attempt.end().cause == ExitCause.CANCELLED

    def test_tasks_may_be_skipped(self, attempt: SupervisedAttempt) -> None:
        """Proves P4."""
        begin(attempt, "echo zero", "echo one", "echo two")
        holds(attempt, 0)
        attempt.command("go", task=2)
        holds(attempt, 3)
        attempt.command("end")
        exit = attempt.end()
        assert [task.name for task in exit.tasks] == ["t2"]
        assert attempt.output() == b"two\n"
        assert attempt.status() == 0

    def test_all_tasks_may_be_skipped(self, attempt: SupervisedAttempt) -> None:
        """Proves P4."""
        begin(attempt, "echo zero")
        holds(attempt, 0)
        attempt.command("end")
        exit = attempt.end()
        assert (ending(exit), exit.tasks, attempt.status()) == ((ExitCause.EXIT, 0, None), (), 0)

    def test_first_failure_ends_the_attempt(self, attempt: SupervisedAttempt) -> None:
        """Proves P1."""
        begin(attempt, "exit 3", "echo one")
        holds(attempt, 0)
        attempt.command("go", task=0)
        assert ending(attempt.end()) == (ExitCause.EXIT, 3, None)

    def test_end_with_a_text_is_a_failure(self, attempt: SupervisedAttempt) -> None:
        """Proves P7: what the owner found is in the record, for every reader."""
        begin(attempt, "true")
        holds(attempt, 0)
        attempt.command("go", task=0)
        holds(attempt, 1)
        attempt.command("end", text="cache_full: no room")
        exit = attempt.end()
        assert (exit.cause, exit.text, attempt.status()) == (ExitCause.FAILED, "cache_full: no room", 125)

    @pytest.mark.parametrize(
        ("command", "why"),
        [
            ({"verb": "go", "task": 7}, "there is no such task"),
            ({"verb": "go"}, "there is no such task"),
            ({"verb": "go", "task": 0, "token": 4}, "stale token"),
            ({"verb": "end", "token": 4}, "stale token"),
            ({"verb": "place", "name": "new", "token": 4}, "stale token"),
            ({"verb": "place", "name": "../new"}, "name is missing, or not plain"),
            ({"verb": "place", "name": "tree"}, "name is missing, or not plain"),
            ({"verb": "place", "name": "nothing"}, "there is no such folder"),
            ({"verb": "service", "kind": "start"}, "there is no service"),
            ({"verb": "service", "kind": "cancel"}, "unknown kind"),
        ],
    )
    def test_invalid_command_is_refused(self, attempt: SupervisedAttempt, command: dict[str, Any], why: str) -> None:
        """Proves R24, L6: one of a former owner too."""
        begin(attempt, "true")
        holds(attempt, 0)
        ack = attempt.command(**command)
        assert (ack.ok, ack.why) == (False, why)
        attempt.command("end")
        attempt.end()

    def test_commands_are_refused_while_a_task_runs(self, attempt: SupervisedAttempt) -> None:
        """Proves P2: nothing is moved or ended under a task."""
        begin(attempt, f"echo zero; {FOREVER}", "true", service=SERVER)
        holds(attempt, 0)
        attempt.command("go", task=0)
        attempt.wait_for_output(b"zero")
        commands: list[dict[str, Any]] = [
            {"verb": "go", "task": 1},
            {"verb": "end"},
            {"verb": "place", "name": "x"},
            {"verb": "service", "kind": "start"},
        ]
        for command in commands:
            assert attempt.command(**command).why == "not holding"
        attempt.command("kill")
        attempt.end()

    def test_stop_during_a_hold_ends_the_attempt(self, attempt: SupervisedAttempt) -> None:
        """Proves C1."""
        begin(attempt, "true", "true")
        holds(attempt, 0)
        attempt.command("go", task=0)
        holds(attempt, 1)
        attempt.command("stop", kind="interrupt")
        assert attempt.end().cause == ExitCause.INTERRUPTED

    def test_limits_hold_during_a_hold(self, attempt: SupervisedAttempt) -> None:
        """Proves R8: with no worker alive. Silence is no idleness then."""
        begin(attempt, "true", timeout=0.5, idle_timeout=0.1)
        assert attempt.end().cause == ExitCause.TIMED_OUT

    def test_stop_after_holds_during_a_hold(self, attempt: SupervisedAttempt) -> None:
        """Proves R21."""
        begin(attempt, "true", stop_after=boottime() + 0.3)
        assert attempt.end().cause == ExitCause.STOP_AFTER

    def test_restored_folder_replaces_the_tree(self, attempt: SupervisedAttempt) -> None:
        """Proves P2: the old tree is kept under another name, so that a repeated command does not restore it."""
        space = attempt.folder.path / "space"
        for name in ("tree", "new"):
            (space / name).mkdir(parents=True)
            (space / name / "what").write_text(name)
        begin(attempt, "cat what", cwd=str(space / "tree"))
        holds(attempt, 0)
        assert attempt.command("place", name="new").ok
        assert [event["name"] for event in attempt.events("placed")] == ["new"]
        for name in ("no", "new"):
            assert attempt.command("place", name=name).why == "there is no such folder"
        attempt.command("go", task=0)
        holds(attempt, 1)
        attempt.command("end")
        attempt.end()
        assert attempt.output() == b"new"
        assert (space / "was.new" / "what").read_text() == "tree"

    def test_waiting_costs_nothing(self, attempt: SupervisedAttempt) -> None:
        begin(attempt, "true")
        holds(attempt, 0)
        before = os.times().elapsed, _cpu(attempt.pid)
        eventually(lambda: os.times().elapsed - before[0] > 1.0)
        assert _cpu(attempt.pid) - before[1] < 10
        attempt.command("end")
        attempt.end()


def _cpu(pid: int) -> int:
    """Ticks of a hundredth of a second that a process has computed."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


class TestService:
    def test_service_stays_while_tasks_come_and_go(self, attempt: SupervisedAttempt) -> None:
        """Proves P8."""
        begin(attempt, "echo zero", "echo one", service=SERVER)
        holds(attempt, 0)
        assert attempt.command("service", kind="start").ok
        pid = up(attempt)
        assert attempt.command("service", kind="start").ok
        for task in range(2):
            attempt.command("go", task=task)
            holds(attempt, task + 1)
        assert running(pid)
        attempt.command("end")
        exit = attempt.end()
        assert ending(exit) == (ExitCause.EXIT, 0, None)
        assert not exit.killed
        assert said(attempt) == f"up {pid}\nasked\n"
        assert not running(pid)

    def test_service_is_stopped_and_started_again_between_tasks(self, attempt: SupervisedAttempt) -> None:
        """Proves P8."""
        begin(attempt, "true", "true", service=SERVER)
        holds(attempt, 0)
        attempt.command("service", kind="start")
        up(attempt)
        attempt.command("go", task=0)
        holds(attempt, 1)
        assert attempt.command("service", kind="stop").ok
        ended = down(attempt)
        assert (ended["code"], ended["asked"]) == (0, True)
        assert attempt.command("service", kind="stop").ok
        assert attempt.folder.exit() is None
        assert attempt.command("service", kind="start").ok
        second = up(attempt, 2)
        attempt.command("go", task=1)
        holds(attempt, 2)
        assert running(second)
        attempt.command("end")
        assert attempt.end().code == 0
        assert len(attempt.events("service_started")) == len(attempt.events("service_ended")) == 2

    def test_leftovers_of_a_task_are_killed_but_not_the_service(self, attempt: SupervisedAttempt) -> None:
        """Proves P8, R25: nor what the service started, in a session of its own."""
        server = f"trap 'exit 0' INT; setsid sh -c 'echo child $$; {FOREVER}' & echo up $$; {FOREVER}"
        begin(attempt, f"setsid sh -c 'exec >/dev/null; {FOREVER}' & echo left=$! ;", "true", service=server)
        holds(attempt, 0)
        attempt.command("service", kind="start")
        pid = up(attempt)
        eventually(lambda: "child " in said(attempt))
        child = int(said(attempt).partition("child ")[2].split()[0])
        attempt.command("go", task=0)
        holds(attempt, 1)
        assert not running(attempt.number("left"))
        assert running(pid)
        assert running(child)
        attempt.command("end")
        exit = attempt.end()
        assert exit.killed  # What the service left is killed with the attempt.
        assert not running(child)

    def test_service_that_ends_by_itself_fails_the_attempt(self, attempt: SupervisedAttempt) -> None:
        """Proves P8."""
        begin(attempt, f"echo zero; {FOREVER}", service="echo up $$; read line < /dev/zero & sleep 0.3; exit 7")
        holds(attempt, 0)
        attempt.command("service", kind="start")
        attempt.command("go", task=0)
        exit = attempt.end()
        assert (exit.cause, exit.text) == (ExitCause.SERVICE_ENDED, "server ended by itself, exit code 7")
        assert attempt.status() == 125

    def test_service_that_cannot_start_fails_the_attempt(self, attempt: SupervisedAttempt) -> None:
        """Proves P8."""
        tasks = (WireTask(name="t0", argv=("true",)),)
        attempt.start(tasks=tasks, hold=True, service=WireService(name="server", argv=("no-such-program",)))
        holds(attempt, 0)
        assert "could not run it" in attempt.command("service", kind="start").why
        exit = attempt.end()
        assert exit.cause == ExitCause.SERVICE_ENDED
        assert exit.text == "cannot start no-such-program: could not run it: No such file or directory"

    @pytest.mark.parametrize("hold", [True, False])
    def test_stop_uses_the_stop_signal_of_the_service(self, attempt: SupervisedAttempt, hold: bool) -> None:
        """Proves P8, C1."""
        begin(attempt, f"echo zero; {FOREVER}", service=SERVER)
        holds(attempt, 0)
        attempt.command("service", kind="start")
        pid = up(attempt)
        if not hold:
            attempt.command("go", task=0)
            attempt.wait_for_output(b"zero")
        attempt.command("stop", kind="cancel", grace=30)
        exit = attempt.end()
        assert (exit.cause, exit.killed) == (ExitCause.CANCELLED, False)
        assert said(attempt) == f"up {pid}\nasked\n"

    def test_stubborn_service_is_killed_after_the_grace(self, attempt: SupervisedAttempt) -> None:
        """Proves P8, C4."""
        begin(attempt, "true", service=f"trap '' INT; echo up $$; {FOREVER}", stop_grace=0.3)
        holds(attempt, 0)
        attempt.command("service", kind="start")
        pid = up(attempt)
        attempt.command("end")
        exit = attempt.end()
        assert (ending(exit), exit.killed) == ((ExitCause.EXIT, 0, None), True)
        assert not running(pid)

    def test_service_dies_with_its_supervisor(self, attempt: SupervisedAttempt) -> None:
        """Proves R22: nothing is left that a new attempt could meet."""
        begin(attempt, "true", service=SERVER)
        holds(attempt, 0)
        attempt.command("service", kind="start")
        pid = up(attempt)
        os.kill(attempt.pid, signal.SIGKILL)
        attempt.status()
        eventually(lambda: not running(pid), "the service is gone")

    def test_service_without_a_hold_is_refused(self, attempt: SupervisedAttempt) -> None:
        """Proves R24."""
        attempt.start("true", service=WireService(name="server", argv=("true",)))
        assert attempt.end().text == "malformed spec: hold is missing"
