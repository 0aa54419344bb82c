"""Commands by noun: ls, show, rm; artifacts, uploads, events; ids by their end; and the old names."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.up_process import UpProcess, running

TOOLS = """
[tools.hello]
description = "Says hello."
runner = "process"
command = ["echo", "hello"]
"""


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpProcess]:
    folder = tmp_path_factory.mktemp("nouns")
    (folder / "tools.toml").write_text(TOOLS)
    with running(folder, HOLDFAST_TOOLS=str(folder / "tools.toml")) as found:
        yield found


def answer(up: UpProcess, *arguments: str) -> Any:
    return json.loads(up(*arguments, "--json"))


def test_every_noun_has_ls_and_show(up: UpProcess) -> None:
    """Proves G5."""
    job = up.json("run", "--lane", "crm", "--", "true")["id"]
    up("queues", "limit", "narrow", "--max-running", "1")
    (worker,) = answer(up, "workers", "ls")["items"]
    (token, *_) = answer(up, "tokens", "ls")["items"]
    things = {
        "jobs": (job[-8:], "id", job),
        "queues": ("narrow", "queue", "narrow"),
        "lanes": ("crm", "lane", "crm"),
        "workers": (worker["host"], "worker", worker["worker"]),
        "tools": ("hello", "name", "hello"),
        "tokens": (token["id"], "name", token["name"]),
    }
    for noun, (name, field, value) in things.items():
        assert value in [item[field] for item in answer(up, noun, "ls")["items"]], noun
        assert answer(up, noun, "show", name)[field] == value
        assert value in up(noun, "show", name)
        missing = up.run(noun, "show", "00000000-0000-7000-8000-000000000000")
        assert missing.returncode == 4, (noun, missing.stderr)
    for noun in ("queues", "workers", "tools", "tokens"):
        assert f"holdfast {noun} ls" in up.run(noun, "show", "nobodys").stderr


def test_rm_by_noun(up: UpProcess) -> None:
    """Proves G5."""
    job = up.json("run", "--", "true")["id"]
    assert up("jobs", "rm", job[-8:]).strip() == "deleted"
    made = answer(up, "tokens", "create", "ci", "--role", "viewer", "--expires", "90d")
    assert made["expires_at"] > made["created_at"]
    assert up("tokens", "rm", made["id"]).strip() == "removed"


def test_old_names_still_work_and_are_hidden(up: UpProcess) -> None:
    secret = up("token", "make", "old", "--role", "viewer").strip()
    assert up("ls", HOLDFAST_TOKEN=secret)
    assert "old" in up("token")
    assert {tool["name"] for tool in answer(up, "tools")["items"]} == {"hello"}
    listed = up("--help").split()
    assert "tokens" in listed
    assert "token" not in listed


def test_artifacts_are_listed_and_fetched(up: UpProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One file, all into a folder, and stdout, byte by byte. Proves G5."""
    script = "mkdir -p output/sub; printf 'a\\0b' > output/sub/data.bin; echo hello > output/hello.txt"
    job = up.json("run", "--", "sh", "-c", script)["id"]
    assert sorted(one["path"] for one in answer(up, "artifacts", "ls", job[-8:])["items"]) == [
        "hello.txt", "sub/data.bin",
    ]  # fmt: skip
    assert "6 B" in up("artifacts", "ls", job)
    monkeypatch.chdir(tmp_path)
    assert up("artifacts", "get", job, "hello.txt").strip() == "hello.txt"
    assert (tmp_path / "hello.txt").read_text() == "hello\n"
    again = up.run("artifacts", "get", job, "hello.txt")
    assert (again.returncode, "hello.txt exists; --force replaces it" in again.stderr) == (4, True)
    up("artifacts", "get", job, "hello.txt", "--force")
    assert up("artifacts", "get", job, "sub/data.bin", "-o", "-") == "a\0b"
    up("artifacts", "get", job, "sub/data.bin", "-o", "copy")
    assert (tmp_path / "copy").read_bytes() == b"a\0b"
    assert up("artifacts", "get", job).split() == [f"{job}/hello.txt", f"{job}/sub/data.bin"]
    assert (tmp_path / job / "sub" / "data.bin").read_bytes() == b"a\0b"
    assert answer(up, "artifacts", "get", job, "-o", "all")["files"] == ["all/hello.txt", "all/sub/data.bin"]
    assert up.run("artifacts", "get", job, "none").returncode == 4
    assert up.run("artifacts", "get", job, "-o", "-").returncode == 2
    assert not (tmp_path / "none").exists()


def test_events_by_page_by_type_and_live(up: UpProcess) -> None:
    """Proves G5."""
    job = up.json("run", "--", "sh", "-c", "for n in 1 2 3; do echo line $n; done; exit 2", code=2)["id"]
    whole = [json.loads(line) for line in up("events", job[-8:], "--json").splitlines()]
    assert [event["seq"] for event in whole] == list(range(1, len(whole) + 1))
    statuses = [json.loads(line) for line in up("events", job, "--json", "-t", "status").splitlines()]
    assert statuses == [event for event in whole if event["type"] == "status"]
    first = up.run("events", job, "--limit", "2")
    assert len(first.stdout.splitlines()) == 2
    assert first.stderr == "more: --after 2\n"
    rest = up.run("events", job, "--after", "2", "--json")
    assert [json.loads(line)["seq"] for line in rest.stdout.splitlines()] == list(range(3, len(whole) + 1))
    assert "more" not in up.run("events", job, "--limit", str(len(whole))).stderr
    followed = up.run("events", job, "-f", "--type", "log")
    assert followed.returncode == 1
    assert [line.partition("stdout: ")[2] for line in followed.stdout.splitlines()] == ["line 1", "line 2", "line 3"]


def test_ids_by_their_end_or_beginning(up: UpProcess) -> None:
    """Six characters are enough; five are not; an ambiguous part is refused with the candidates. Proves G6."""
    twins = [f"0193aaaa-000{n}-7000-8000-000000abcdef" for n in range(2)]
    for one in twins:
        up("submit", "--hold", "--id", one, "--", "echo", "twin")
    refused = up.run("show", "abcdef")
    assert refused.returncode == 2
    assert "give more characters" in refused.stderr
    assert [one for one in twins if one not in refused.stderr] == []
    assert "echo twin" in refused.stderr
    assert up.run("show", "0193aaaa").returncode == 2
    assert up.json("show", twins[1][:13])["id"] == twins[1]
    assert up.json("show", twins[1][10:])["id"] == twins[1]
    job = up.json("submit", "--hold", "--", "true")["id"]
    assert up.json("show", job[-6:].upper())["id"] == job
    short = up.run("show", job[-5:])
    assert (short.returncode, "at least 6" in short.stderr) == (2, True), short.stderr
    for wrong in ("zzzzzz", "-", "0" * 40):
        assert up.run("show", "--", wrong).returncode == 2
