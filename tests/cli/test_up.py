"""`holdfast up`: the printed commands work, and the processes that it started exit with it."""

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.ports import free_port
from tests.support.up_process import PATIENCE, PROGRAM, UpProcess, eventually

WITH_NAME = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
WITHOUT_NAME = "/usr/bin:/bin"


@contextlib.contextmanager
def up_in(
    folder: Path, port: int, *arguments: str, path: str = WITH_NAME, **settings: str
) -> Iterator["subprocess.Popen[bytes]"]:
    """`holdfast up` in a folder, with only what its arguments say; killed when the block ends, if it still runs."""
    with (folder / "up.log").open("wb") as log:
        process = subprocess.Popen(
            [*PROGRAM, "up", "--port", str(port), *arguments], cwd=folder, stdout=log, stderr=log,
            env={"PATH": path, "HOME": str(folder), "HOLDFAST_PROCESS_USER": "root", **settings},
        )  # fmt: skip
    try:
        yield process
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(PATIENCE)


def printed_commands(log: Path) -> list[str]:
    """The commands of the banner, once it is printed to its end."""
    text = log.read_text()
    _, found, rest = text.partition("in another terminal")
    block = rest.partition("\n\n")[0]
    commands = [line.strip() for line in block.splitlines()[1:]]
    return commands if found and "\n\n" in rest else []


@pytest.mark.parametrize(
    ("arguments", "same_folder", "path"),
    [
        ([], True, WITH_NAME),
        ([], True, WITHOUT_NAME),
        (["--data", "my data's"], False, WITH_NAME),
        (["--queue", "heavy:2,light:1", "--data", "here"], False, WITH_NAME),
        (["--host", "0.0.0.0"], True, WITH_NAME),
    ],
    ids=["port", "not on the path", "data", "queue", "host"],
)
def test_the_commands_of_the_banner_work_as_printed(
    tmp_path: Path, arguments: list[str], same_folder: bool, path: str
) -> None:
    """Proves G8. Pasted into a terminal that knows nothing of this `up`."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    with up_in(tmp_path, free_port(), *arguments, path=path) as process:

        def commands() -> list[str]:
            assert process.poll() is None, (tmp_path / "up.log").read_text()
            return printed_commands(tmp_path / "up.log")

        *settings, run, ls, watch = eventually(commands)
        assert [line for line in settings if not line.startswith("export ")] == []
        begun = [
            subprocess.Popen(
                ["bash", "-c", "\n".join([*settings, line])], cwd=tmp_path if same_folder else elsewhere,
                env={"PATH": path, "HOME": str(elsewhere)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
            for line in (run, ls, watch)
        ]  # fmt: skip
        said = [one.communicate(timeout=PATIENCE)[0] for one in begun]
        assert [one.returncode for one in begun] == [0, 0, 0], said
    assert "hello\ndone\n" in said[0]
    assert "succeeded" in said[2]


def test_workers_exit_when_up_is_killed_and_their_job_continues(tmp_path: Path) -> None:
    """Proves G8."""
    port = free_port()
    job = f"while [ ! -e {shlex.quote(str(tmp_path / 'go'))} ]; do sleep 0.1; done; echo through"
    with up_in(tmp_path, port, "--workers", "2") as process:
        up = UpProcess(tmp_path / "holdfast-data", port, process)

        def workers(count: int) -> list[int]:
            assert process.poll() is None, (tmp_path / "up.log").read_text()
            with contextlib.suppress(ValueError, AssertionError):
                found = [worker["pid"] for worker in up.json("workers")["items"] if worker["live"]]
                return found if len(found) == count else []
            return []

        pids = eventually(lambda: workers(2))
        running = up.json("submit", "--", "sh", "-c", job)["id"]
        eventually(lambda: up.json("show", running)["status"] == "running")
        process.kill()
        process.wait(PATIENCE)
    try:
        eventually(lambda: not any(alive(pid) for pid in pids))
    finally:
        for pid in filter(alive, pids):
            os.kill(pid, signal.SIGKILL)
    with up_in(tmp_path, port, "--workers", "1") as process:
        up = UpProcess(tmp_path / "holdfast-data", port, process)
        eventually(lambda: workers(1))
        (tmp_path / "go").touch()
        assert up("logs", "-f", running) == "through\n"
        assert up.json("show", running)["attempts"] == 1
        events = [json.loads(line) for line in up("logs", "--json", running).splitlines()]
        leases = [event["data"]["lease"] for event in events if event["type"] == "lease"]
        assert leases == ["handed_over", "adopted"]


def test_worker_of_up_may_have_several_processes(tmp_path: Path) -> None:
    """Proves L22. All exit with `up`, whose worker passes the signal on."""
    port = free_port()
    with up_in(tmp_path, port, "--workers", "1", "--queue", "default:3", HOLDFAST_PROCESSES="2") as process:
        up = UpProcess(tmp_path / "holdfast-data", port, process)

        def workers() -> dict[int, dict[str, int]]:
            assert process.poll() is None, (tmp_path / "up.log").read_text()
            with contextlib.suppress(ValueError, AssertionError):
                found = {worker["pid"]: worker["queues"] for worker in up.json("workers")["items"] if worker["live"]}
                return found if len(found) == 2 else {}
            return {}

        found = eventually(workers)
        assert sorted(queues["default"] for queues in found.values()) == [1, 2]
        assert "2 live" in up.run("doctor").stdout
        assert "hello" in up("run", "--", "echo", "hello")
    assert not any(map(alive, found))


def alive(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def test_worker_exits_if_up_died_before_it_started(tmp_path: Path) -> None:
    """Proves G8. The pipe is closed before the worker starts, so that the death cannot go unnoticed."""
    looks, holds = os.pipe()
    os.close(holds)
    with subprocess.Popen(
        [sys.executable, "-m", "holdfast.cli.exit_with_parent", str(looks), "worker", "--data", str(tmp_path)],
        pass_fds=[looks], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    ) as worker:  # fmt: skip
        os.close(looks)
        assert worker.wait(PATIENCE) in (-signal.SIGTERM, 0)
