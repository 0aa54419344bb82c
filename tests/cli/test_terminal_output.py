"""What people see: short ids and commands in lists, 80 columns, colours only on a terminal, and the live overview."""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.service import FUNCTION, Service
from tests.support.terminal_process import TerminalProcess
from tests.support.up_process import UpProcess, eventually, running

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
COLOURED = "\x1b[3"


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpProcess]:
    with running(tmp_path_factory.mktemp("seen"), "--queue", "default:4") as found:
        long = ("--kind", "a-rather-long-kind", "--lane", "a-rather-long-lane-of-customers", "--queue", "a-long-queue")
        found("submit", "--hold", *long, "--", "sh", "-c", "echo a rather long command line; sleep 1; echo and so on")
        found("submit", "--hold", "--function", "billing.reports.make_the_monthly_report")
        found("run", "--", "sh", "-c", "echo broken >&2; exit 3", code=3)
        yield found


def lines_of(terminal: TerminalProcess) -> list[str]:
    assert terminal.exit_code() == 0, terminal.seen
    return ESCAPES.sub("", terminal.seen).splitlines()


def test_ls_shows_what_each_job_is_by_a_short_id(up: UpProcess) -> None:
    """Proves G6."""
    listed = up("ls")
    assert "billing.reports.make_the_monthly_report" in listed
    assert "sh -c 'echo broken >&2; exit 3'" in listed
    for job in up.json("ls")["items"]:
        assert job["id"][-8:] in listed
        assert job["id"] not in listed
        assert up.json("show", job["id"][-8:])["id"] == job["id"]


@pytest.mark.parametrize(
    "command",
    ["ls", "jobs ls", "queues ls", "lanes ls", "workers ls", "tools ls", "tokens ls", "audit", "top --once"],
)
def test_tables_fit_eighty_columns(up: UpProcess, command: str) -> None:
    """Proves G6: a row is one line, and the first column is not cut."""
    lines = lines_of(TerminalProcess(up.env, *command.split()))
    assert max(map(len, lines)) <= 80, lines
    if command == "ls":
        assert len(lines) == 1 + 3
        assert all(job["id"][-8:] in {line.split()[0] for line in lines} for job in up.json("ls")["items"])


def test_colours_only_on_a_terminal_and_without_no_color(up: UpProcess) -> None:
    """Proves G6."""
    terminal = TerminalProcess(up.env, "ls")
    assert terminal.exit_code() == 0
    assert COLOURED in terminal.seen
    plain = TerminalProcess(up.env | {"NO_COLOR": "1"}, "ls")
    assert plain.exit_code() == 0
    assert COLOURED not in plain.seen
    assert "\x1b" not in up("ls")
    assert "\x1b" not in up("top")


def test_top_shows_the_overview_live(tmp_path: Path) -> None:
    """A running job and then a failure appear without a key; Ctrl-C ends it. Proves G6."""
    with running(tmp_path) as up:
        terminal = TerminalProcess(up.env, "top", "--interval", "0.2", columns=100)
        terminal.until("nothing runs")
        job = up.json("submit", "--", "sh", "-c", "sleep 600")["id"]
        terminal.until(job[-8:])
        up("cancel", job)
        up("run", "--", "sh", "-c", "exit 8", code=8)
        terminal.until("exit_nonzero")
        terminal.type("\x03")
        assert terminal.exit_code() == 0
        assert "Traceback" not in terminal.seen


@pytest.mark.parametrize("kind", ["sqlite"])
async def test_top_survives_an_outage_of_the_server(service_process: Service) -> None:
    """It shows why the picture is old, and goes on when the server is back."""
    env = {**os.environ, "HOLDFAST_URL": service_process.url, "HOLDFAST_TOKEN": service_process.admin}
    terminal = TerminalProcess(env, "top", "--interval", "0.2", columns=100)
    terminal.until("no live worker")
    service_process.kill()
    terminal.until("cannot reach")
    service_process.start()
    async with service_process.client() as client:
        (await client.post("/v1/jobs", json={**FUNCTION, "queue": "after-the-outage"})).raise_for_status()
    terminal.until("after-the-outage")
    terminal.type("\x03")
    assert terminal.exit_code() == 0


def test_top_is_plain_text_or_json_where_it_is_no_terminal(up: UpProcess) -> None:
    """Proves G6."""
    text = up("top")
    assert [word for word in ("queues", "workers", "running", "newest failures") if word not in text] == []
    assert "exit_nonzero" in text
    found = json.loads(up("top", "--json"))
    assert set(found) == {"queues", "workers", "running", "failed"}
    assert [job["error"]["code"] for job in found["failed"]] == ["exit_nonzero"]
    assert [worker["live"] for worker in found["workers"]] == [True]
    assert up.run("top", HOLDFAST_URL="http://127.0.0.1:1").returncode == 3


def test_watch_in_a_terminal_shows_the_last_lines_and_the_end(up: UpProcess) -> None:
    """Proves G6."""
    job = up.json("submit", "--", "sh", "-c", "echo first line; sleep 2; exit 5")["id"]
    terminal = TerminalProcess(up.env, "watch", job[-8:])
    terminal.until("first line")
    assert terminal.exit_code() == 1
    assert "exit_nonzero" in terminal.seen
    eventually(lambda: up.json("show", job)["status"] == "failed")
