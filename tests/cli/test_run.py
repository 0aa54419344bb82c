"""`holdfast run` as a person uses it: standard input, why it waits, the exit code, and the current folder."""

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.terminal_process import TerminalProcess
from tests.support.up_process import PATIENCE, PROGRAM, UpProcess, eventually, running

WAITING = "holdfast: waiting: "


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpProcess]:
    with running(tmp_path_factory.mktemp("run"), "--queue", "default:4,other:1") as found:
        yield found


def piped(
    up: UpProcess, content: bytes, *arguments: str, cwd: Path | None = None
) -> "subprocess.CompletedProcess[bytes]":
    return subprocess.run(
        [*PROGRAM, *arguments], env=up.env, input=content, capture_output=True, timeout=PATIENCE, check=False, cwd=cwd
    )


def test_run_passes_its_standard_input(up: UpProcess, tmp_path: Path) -> None:
    """A pipe and a file; not with --no-stdin, and not a device. Proves G6."""
    assert piped(up, b"one\ntwo\n", "run", "--", "wc", "-l").stdout.strip() == b"2"
    assert piped(up, b"one\ntwo\n", "run", "-n", "--", "wc", "-l").stdout.strip() == b"0"
    assert piped(up, b"", "run", "--", "wc", "-l").stdout.strip() == b"0"
    (tmp_path / "text").write_text("a\nb\nc\n")
    with (tmp_path / "text").open("rb") as file:
        done = subprocess.run([*PROGRAM, "run", "--", "cat"], env=up.env, stdin=file, capture_output=True, check=True)
    assert done.stdout == b"a\nb\nc\n"
    with Path(os.devnull).open("rb") as file:
        subprocess.run([*PROGRAM, "run", "--", "cat"], env=up.env, stdin=file, timeout=PATIENCE, check=True)


@pytest.mark.parametrize("content", [b"\xff\x00\n" * 10, b"0123456789abcdef" * 100_000], ids=["binary", "long"])
def test_standard_input_that_is_no_short_text_arrives_whole(up: UpProcess, content: bytes) -> None:
    """Proves G6."""
    done = piped(up, content, "run", "--", "sh", "-c", "cksum; exit 3")
    wanted = subprocess.run(["cksum"], input=content, capture_output=True, check=True).stdout
    assert (done.returncode, done.stdout) == (3, wanted), done.stderr


def test_run_names_the_standard_input_that_it_waits_for(up: UpProcess) -> None:
    """A pipe that nobody closes: the notice says what to do. Proves G6."""
    with subprocess.Popen(
        [*PROGRAM, "run", "--", "cat"],
        env=up.env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stderr is not None
        assert b"--no-stdin" in process.stderr.readline()
        said, _ = process.communicate(b"late\n", timeout=PATIENCE)
    assert (process.returncode, said) == (0, b"late\n")


def test_run_says_why_it_waits_until_it_starts(up: UpProcess) -> None:
    """In a terminal: the reason once, and nothing more once the job runs; the exit code is the command's. Proves G6."""
    up("queues", "pause", "other")
    before = up.json("submit", "--hold", "--", "true")["id"]
    terminal = TerminalProcess(up.env, "run", "--queue", "other", "--", "sh", "-c", "echo ran; exit 9")
    terminal.until(f"{WAITING}queue other is paused")
    up("queues", "resume", "other")
    assert terminal.exit_code() == 9
    waited, ran, rest = terminal.seen.partition("ran")
    assert (WAITING in waited, ran, WAITING in rest) == (True, "ran", False), terminal.seen
    assert waited.count("is paused") == 1, terminal.seen
    blocked = TerminalProcess(up.env, "run", "--needs", before[-8:], "--", "true")
    blocked.until(f"{WAITING}needs job {before}")
    up("release", before)
    assert blocked.exit_code() == 0, blocked.seen


def test_here_runs_in_the_current_folder(up: UpProcess, tmp_path: Path) -> None:
    """The command sees the folder, writes into it as this user, gets stdin, and keeps its exit code."""
    script = "pwd; cat > made; echo $HOLDFAST_JOB_ID >> made; exit 6"
    done = piped(up, b"typed\n", "run", "--here", "--", "sh", "-c", script, cwd=tmp_path)
    assert (done.returncode, done.stdout.decode().strip()) == (6, str(tmp_path)), done.stderr
    typed, job = (tmp_path / "made").read_text().split()
    assert typed == "typed"
    assert f"job {job}" in done.stderr.decode()
    assert (tmp_path / "made").stat().st_uid == os.getuid()


def test_here_is_refused_where_it_could_not_work(up: UpProcess, tmp_path: Path) -> None:
    submitter = up("tokens", "create", "ci", "--role", "submitter").strip()
    refused = {
        ("run", "--here", "--image", "alpine", "--", "true"): (2, "is for a command that runs as a process"),
        ("run", "--here", "--queue", "nobodys", "--", "true"): (4, "no live worker of queue nobodys runs commands"),
    }
    for arguments, (code, said) in refused.items():
        done = up.run(*arguments)
        assert (done.returncode, said in done.stderr) == (code, True), done.stderr
    done = up.run("run", "--here", "--", "true", HOLDFAST_TOKEN=submitter)
    assert (done.returncode, "--here needs an admin's token" in done.stderr) == (4, True), done.stderr


def test_here_checks_the_host_the_user_and_the_folder_before_the_command(up: UpProcess, tmp_path: Path) -> None:
    """What the worker sees differs from what the caller saw: the command does not start."""
    job = up.json("run", "--here", "--", "touch", str(tmp_path / "ran"))
    (tmp_path / "ran").unlink()
    command = job["spec"]["command"]
    for position, said in ((4, "is on another host"), (5, "not as you (uid 77)"), (6, "sees another folder there")):
        other = [*command[:position], "77", *command[position + 1 :]]
        done = up.run("run", "--", *other)
        assert (done.returncode, said in done.stderr) == (126, True), (position, done.stderr)
    assert not (tmp_path / "ran").exists()


def test_detached_job_is_found_by_the_end_of_its_id(up: UpProcess) -> None:
    """Proves G6."""
    terminal = TerminalProcess(up.env, "run", "--", "sh", "-c", "echo up; sleep 600")
    terminal.until("up")
    terminal.type("\x03")
    terminal.until("[d]etach")
    terminal.type("d\n")
    assert terminal.exit_code() == 0
    (job,) = set(re.findall(r"job ([0-9a-f-]{36})", terminal.seen))
    watching = TerminalProcess(up.env, "watch", job[-6:])
    watching.until("running")
    up("cancel", job[-8:])
    assert watching.exit_code() == 130
    eventually(lambda: up.json("show", job)["status"] == "cancelled")
