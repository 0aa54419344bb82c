"""The command line as a person uses it: `holdfast up` in one process, commands in others, some in a terminal."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.cli.terminal import visible_line
from tests.support.terminal_process import TerminalProcess
from tests.support.up_process import PROGRAM, UpProcess, eventually, running


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpProcess]:
    with running(tmp_path_factory.mktemp("up"), "--queue", "default:4,other:1") as found:
        yield found


def test_run_feels_like_running_the_command(up: UpProcess) -> None:
    """Both streams and the exit code are those of the command. Proves O7."""
    done = up.run("run", "--", "sh", "-c", "echo out; echo err >&2; exit 7")
    assert (done.returncode, done.stdout) == (7, "out\n")
    assert "err\n" in done.stderr
    assert up("run", "--", "printf", "a\\nb") == "a\nb\n"


def test_exit_codes_by_the_end_of_the_job(up: UpProcess) -> None:
    """Proves O3, O7."""
    up("run", "--timeout", "0.3", "--", "sleep", "60", code=124)
    up("run", "--", "no-such-command", code=1)
    up("run", code=2)
    up("run", "--tool", "x", "--", "true", code=2)
    up("show", "00000000-0000-7000-8000-000000000000", code=4)
    up("show", "zz", code=2)
    up("show", "f" * 8, code=2)
    up("ls", code=3, HOLDFAST_URL="http://127.0.0.1:1")
    up("ls", code=4, HOLDFAST_TOKEN="wrong")
    up("ls", "--limit", "0", code=2)


def test_job_is_submitted_read_stopped_and_removed(up: UpProcess, tmp_path: Path) -> None:
    """Proves J15, J17, C8."""
    job = up("submit", "--hold", "--label", "team=blue", "--", "sh", "-c", "echo $A; cat request.json").strip()
    assert re.fullmatch(r"[0-9a-f-]{36}", job)
    assert "release it" in up("explain", job[:24])
    assert "pending" in up("ls", "--label", "team=blue")
    assert up.json("release", job)["status"] in ("queued", "running", "succeeded")
    up("logs", "-f", job)
    assert "succeeded" in up("show", job)
    assert up.json("show", job)["labels"] == {"team": "blue"}
    assert up("rm", "--dry-run", job).strip() == "would delete"
    assert up("rm", job).strip() == "deleted"
    up("show", job, code=4)
    file = tmp_path / "job.json"
    file.write_text(json.dumps({"runner": "process", "spec": {"command": ["cat", "request.json"]}, "inputs": {"n": 1}}))
    assert json.loads(up("run", "--file", str(file))) == {"n": 1}
    assert json.loads(up("run", "--file", "-", stdin=file.read_text())) == {"n": 1}


def test_cursor_of_a_list_is_not_wrapped_in_a_narrow_terminal(up: UpProcess) -> None:
    older, newest = (up("submit", "--hold", "--", "true").strip() for _ in range(2))
    said = up("ls", "--limit", "1", COLUMNS="40").splitlines()[-1]
    cursor = re.fullmatch(r"more: --cursor (\S+)", said)
    assert cursor, said
    page = up.json("ls", "--limit", "1", "--cursor", cursor.group(1))
    assert [job["id"] for job in page["items"]] == [older]
    for job in (newest, older):
        up("rm", "--force", job)


def test_id_is_not_cut_in_a_narrow_terminal_or_a_pipe(up: UpProcess) -> None:
    fields = ("--kind", "a-rather-long-kind", "--lane", "a-rather-long-lane", "--queue", "a-rather-long-queue")
    job = up("submit", "--hold", *fields, "--", "true").strip()
    assert job[-8:] in up("ls", COLUMNS="60").split()
    piped = {**up.env}
    del piped["COLUMNS"]
    done = subprocess.run([*PROGRAM, "ls", "--kind", fields[1]], env=piped, capture_output=True, text=True, check=True)
    _, row = done.stdout.splitlines()
    assert {job[-8:], *fields[1::2]} <= set(row.split())
    up("rm", "--force", job)


def test_invalid_arguments_are_refused_with_the_valid_ones(up: UpProcess) -> None:
    """Proves O3."""
    refused = {
        ("ls", "--status", "nonsense"): "use one of pending, queued, running",
        ("submit", "--tool", "x", "--image", "y"): "(--tool and --image given)",
        ("submit", "--function", "f", "--env", "A=1"): "--env is for a command or an image",
        ("submit",): "give one of: a command after --, --image,",
    }
    for arguments, said in refused.items():
        found = up.here(*arguments)
        assert (found.exit_code, said in found.stderr) == (2, True), found.output


def test_an_image_needs_no_command(up: UpProcess) -> None:
    job = up.json("submit", "--hold", "--image", "alpine", "--env", "A=1")
    assert (job["runner"], job["spec"]["image"], job["spec"]["env"]) == ("docker", "alpine", {"A": "1"})
    assert not job["spec"].get("command")
    up("rm", "--force", job["id"])


def test_more_lanes_than_a_page_holds_are_all_listed(up: UpProcess) -> None:
    ids = [up.json("submit", "--hold", "--lane", f"page-{n}", "--", "true")["id"] for n in range(3)]
    first = up.here("lanes", "--limit", "1", "--cursor", "page-").stdout.splitlines()
    assert first[1].startswith("page-0 ")
    cursor = first[-1].removeprefix("more: --cursor ")
    assert [lane["lane"] for lane in up.json("lanes", "--cursor", cursor)["items"]] == ["page-1", "page-2"]
    for job in ids:
        up.here("rm", "--force", job)


def test_a_pipeline_from_its_plan_to_its_snapshots(up: UpProcess, tmp_path: Path) -> None:
    """Proves P4, P10, P12."""
    seed = up.folder / "shared" / "sources" / "default" / "seed.csv"
    seed.parent.mkdir(parents=True)
    seed.write_text("1")
    tasks = [{"name": name, "command": ["sh", "-c", f"echo {name} >> made"], "files": ["seed.csv"]} for name in "ab"]
    file = tmp_path / "pipeline.json"
    file.write_text(json.dumps({"runner": "process", "tasks": tasks}))
    assert up("plan", "-f", str(file)).count("no snapshot is known yet") == 2
    assert up("snapshots", "du").strip() == "0 snapshots, 0 B"
    job = up("submit", "-f", str(file)).strip()
    up("watch", job)
    assert up("show", job).count("succeeded") == 3
    assert up("plan", "-f", str(file)).count("its snapshot exists") == 2
    seed.write_text("2")
    plan = json.loads(up("plan", "--json", "-f", str(file)))
    assert plan["tasks"][0]["differs"] == [{"component": "files[0]", "change": "changed"}]
    listed = json.loads(up("snapshots", "ls", "--json"))["items"]
    assert [one["task"] for one in listed] == ["b", "a"]
    assert listed[1]["id"][:12] in up("snapshots", "ls")
    assert "files[0]" in up("snapshots", "show", listed[1]["id"][:12])
    elsewhere = up.run("snapshots", "run", listed[1]["id"], "--data", str(tmp_path))
    assert (elsewhere.returncode, "is it mounted?" in elsewhere.stderr) == (4, True), elsewhere.stderr
    up("snapshots", "rm", listed[1]["id"], code=4)
    assert "would remove 2" in up("snapshots", "rm", "--recurse", "--dry-run", listed[1]["id"])
    assert "removed 2" in up("snapshots", "rm", "--recurse", listed[1]["id"])
    up("snapshots", "show", listed[1]["id"], code=4)
    tasks[0] = {"name": "a", "sql": "gone.sql"}
    file.write_text(json.dumps({"runner": "process", "tasks": tasks, "connector": "postgres"}))
    assert "tasks[0].sql: there is no file gone.sql" in up.run("submit", "-f", str(file)).stderr
    up("submit", "-f", str(file), code=2)


def test_commands_that_move_a_job(up: UpProcess) -> None:
    """Proves C1, C6, C8."""
    failing = up.json("submit", "--lane", "l1", "--", "false")["id"]
    later = up.json("submit", "--lane", "l1", "--", "true")["id"]
    up("watch", failing, code=1)
    assert {lane["lane"]: lane["state"] for lane in up.json("lanes")["items"]}["l1"] == "blocked"
    assert failing[-8:] in up("lanes")
    assert up.json("dismiss", failing, "--reason", "known")["status"] == "failed"
    up("watch", later)
    assert up.json("resolve", failing, "--result", '{"by": "hand"}')["result"] == {"by": "hand"}
    sleeping = up.json("submit", "--", "sleep", "600")["id"]
    eventually(lambda: up.json("show", sleeping)["status"] == "running")  # A waiting job would be cancelled.
    assert up.json("interrupt", sleeping)["stop_request"]["kind"] == "interrupt"
    up("watch", sleeping, code=5)
    assert up.json("resume", sleeping, "--reason", "again")["status"] in ("queued", "running")  # A worker may be quick.
    up("cancel", sleeping)
    up("watch", sleeping, code=130)


def test_resume_of_a_job_whose_budget_is_spent(up: UpProcess, tmp_path: Path) -> None:
    """Proves H5."""
    command = ["echo", '{"event": "usage", "tokens": 120}']
    file = tmp_path / "job.json"
    file.write_text(json.dumps({"runner": "process", "spec": {"command": command}, "budget": {"tokens": 100}}))
    assert up.run("run", "-f", str(file)).returncode == 1  # The command itself exits 0.
    (job,) = up.json("ls", "--status", "failed", "-n", "1")["items"]
    assert job["error"] == {"code": "budget_exceeded", "message": "used 120 tokens of 100"}
    refused = up.run("resume", job["id"])
    assert (refused.returncode, "--budget tokens=N" in refused.stderr) == (4, True)
    assert up.run("resume", job["id"], "--budget", "tokens=120").returncode == 4
    assert up.json("resume", job["id"], "--budget", "tokens=1000")["policy"]["budget"] == {"tokens": 1000}
    up("watch", job["id"])


def test_queues_workers_and_tokens(up: UpProcess) -> None:
    """Proves J9, O8."""
    up("queues", "pause", "other")
    waiting = up.json("submit", "--queue", "other", "--", "true")["id"]
    assert "paused" in up("explain", waiting)
    up("queues", "limit", "other", "--max-running", "1")
    assert "other" in up("queues")
    up("queues", "resume", "other")
    up("watch", waiting)
    assert len(up.json("workers")["items"]) == 1
    secret = up("token", "make", "reader", "--role", "viewer").strip()
    assert up("ls", "--json", HOLDFAST_TOKEN=secret)
    up("submit", "--", "true", code=4, HOLDFAST_TOKEN=secret)
    (made,) = [token for token in up.json("token")["items"] if token["name"] == "reader"]
    up("token", "rm", made["id"])
    up("ls", code=4, HOLDFAST_TOKEN=secret)
    assert up("tools").strip() == "no tools"


def test_doctor_and_check(up: UpProcess) -> None:
    """Proves O3, O9."""
    assert all(finding["ok"] for finding in up.json("doctor"))
    ill = up.run("doctor", HOLDFAST_URL="http://127.0.0.1:1")
    assert ill.returncode == 1
    assert "→ start it" in ill.stdout
    assert "HOLDFAST_LEASE_TTL" in up("check")
    wrong = up.run("check", HOLDFAST_LEASE_TTL="x", HOLDFAST_PORT="0.5")
    assert wrong.returncode == 2
    assert "HOLDFAST_LEASE_TTL" in wrong.stderr
    assert "HOLDFAST_PORT" in wrong.stderr


def test_ctrl_c_offers_to_continue_detach_or_stop(up: UpProcess) -> None:
    """Proves O7."""
    terminal = TerminalProcess(up.env, "run", "--", "sh", "-c", "while :; do echo tick; sleep 0.2; done")
    terminal.until("tick")
    terminal.type("\x03")
    terminal.until("[d]etach")
    terminal.type("g\n")
    terminal.until("tick", more=True)
    terminal.type("\x03")
    terminal.until("[d]etach", more=True)
    terminal.type("d\n")
    assert terminal.exit_code() == 0
    (job,) = set(re.findall(r"job ([0-9a-f-]{36})", terminal.seen))
    assert up.json("show", job)["status"] == "running"
    watching = TerminalProcess(up.env, "watch", job)
    watching.until("tick")
    watching.type("\x03")
    watching.until("[d]etach")
    watching.type("s\n")
    assert watching.exit_code() == 130
    assert up.json("show", job)["status"] == "cancelled"


HOSTILE = "\x1b]0;owned\x07 \x1b[2J \x1b]52;c;aGk=\x07 a\rb \x9b5n \u202ex \x1b[8mhidden \x1b[31mred"
OBEYED = ("\x1b]", "\x1b[2J", "\x07", "\x9b", "\u202e", "\x1b[8m")


def test_escape_sequences_of_a_job_do_not_reach_the_terminal(up: UpProcess) -> None:
    print_it = f"print({HOSTILE!r})"
    asked = ("--label", f"a={HOSTILE}", "--", sys.executable, "-c", print_it)
    job = up("submit", *asked).strip()
    assert up("logs", "-f", job).rstrip("\n") == HOSTILE.replace("\r", "\n"), (
        "where it is no terminal, every byte is passed on"
    )
    commands = (["logs", job], ["logs", "-f", job], ["show", job], ["watch", job], ["ls"], ["show", "--json", job],
                ["logs", "--json", job], ["show", "\x1b]0;owned\x07"], ["run", *asked])  # fmt: skip
    for command in commands:
        terminal = TerminalProcess(up.env, *command)
        terminal.exit_code()
        for sequence in OBEYED:
            assert sequence not in terminal.seen, (command, terminal.seen)
    assert "\\x1b]0;owned\\x07" in terminal.seen
    assert "\x1b[31mred\x1b[0m" in terminal.seen


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("plain\ttext é", "plain\ttext é"),
        ("a\r", "a"),
        ("\x1b[1;32mok\x1b[m", "\x1b[1;32mok\x1b[m\x1b[0m"),
        ("\x1b[38;5;208mo\x1b[0;08mx", "\x1b[38;5;208mo\\x1b[0;08mx\x1b[0m"),
        ("\x1b[31" + "1" * 50 + "m", "\\x1b[31" + "1" * 50 + "m"),
        ("\x1b\x1b[31m]0;x\x07", "\\x1b\x1b[31m]0;x\\x07\x1b[0m"),
    ],
)
def test_log_line_keeps_only_its_colours(line: str, shown: str) -> None:
    assert visible_line(line) == shown


def test_drain_ends_the_worker_and_not_the_server(tmp_path: Path) -> None:
    with running(tmp_path, HOLDFAST_HEARTBEAT_INTERVAL="1") as up:  # A heartbeat's answer says that it is to drain.
        (worker,) = up.json("workers")["items"]
        up("workers", "drain", worker["host"])
        eventually(lambda: not any(one["live"] for one in up.json("workers")["items"]))
        job = up.json("submit", "--", "true")["id"]
        assert "no live worker" in up("explain", job)
        assert up.process.poll() is None


def test_drained_worker_process_is_not_restarted(tmp_path: Path) -> None:
    with running(tmp_path, "--workers", "1", HOLDFAST_HEARTBEAT_INTERVAL="1") as up:
        (worker,) = up.json("workers")["items"]
        up("workers", "drain", worker["host"])
        eventually(lambda: "it is not restarted" in (tmp_path / "up.log").read_text())
        assert not any(one["live"] for one in up.json("workers")["items"])
        assert up.json("ls")["items"] == []


def test_dead_worker_processes_are_restarted(tmp_path: Path) -> None:
    """`--workers N`: processes of their own; what they ran goes on."""
    with running(tmp_path, "--workers", "1") as up:

        def workers() -> set[int]:
            return {worker["pid"] for worker in up.json("workers")["items"] if worker["live"]}

        first = workers()
        job = up.json("submit", "--", "sh", "-c", "echo up; sleep 3; echo end")["id"]
        eventually(lambda: "up" in up("logs", job))
        for pid in first:
            os.kill(pid, signal.SIGKILL)
        assert "end\n" in up("logs", "-f", job)
        assert up.json("show", job)["attempts"] == 1
        assert workers() - first
