"""Every field of a submit has a flag, or is in a file: the table of the API's fields against the command line."""

import json
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from holdfast.api.request_types import JobRequest
from holdfast.model import new_id
from holdfast.registry import runners
from tests.support.up_process import UpProcess, running

OWN_ID = new_id()
TOOLS = """
[tools.hello]
runner = "process"
command = ["echo", "hello"]
"""
PIPELINE = """
runner = "process"

[[tasks]]
name = "make"
command = ["sh", "-c", "echo made > file"]
"""
COMMAND = ("--", "true")
Look = Callable[[Any], Any]


def policy(name: str) -> Look:
    return lambda job: job["policy"][name]


def field(name: str) -> Look:
    return lambda job: job[name]


def spec(name: str) -> Look:
    return lambda job: job["spec"][name]


FIELDS: dict[str, tuple[Sequence[str], Look, object]] = {
    "runner": (("--runner", "process", "--spec", 'command=["true"]'), field("runner"), "process"),
    "spec": (("--runner", "process", "--spec", 'command=["true"]'), spec("command"), ["true"]),
    "id": (("--id", OWN_ID, *COMMAND), field("id"), OWN_ID),
    "kind": (("--kind", "nightly", *COMMAND), field("kind"), "nightly"),
    "queue": (("--queue", "other", *COMMAND), field("queue"), "other"),
    "lane": (("--lane", "crm", *COMMAND), field("lane"), "crm"),
    "priority": (("--priority", "-3", *COMMAND), field("priority"), -3),
    "labels": (("-l", "a=1", "--label", "b=x=y", *COMMAND), field("labels"), {"a": "1", "b": "x=y"}),
    "inputs": (("--inputs", '{"a": [1]}', "-i", "b=2", "-i", "c=x", *COMMAND), field("inputs"),
               {"a": [1], "b": 2, "c": "x"}),
    "available_at": (("--at", "2100-05-01T12:00Z", *COMMAND), field("available_at"), "2100-05-01T12:00:00Z"),
    "hold": (("--hold", *COMMAND), field("gate"), "held"),
    "max_attempts": (("--max-attempts", "4", *COMMAND), field("max_attempts"), 4),
    "retry": (("--retry", "base=1.5", "--retry", "cap=9", "--retry", "on=failed,timed_out", *COMMAND), policy("retry"),
              {"base": 1.5, "cap": 9.0, "on": ["failed", "timed_out"]}),
    "on_lost": (("--on-lost", "pause", *COMMAND), policy("on_lost"), "pause"),
    "timeout": (("--timeout", "60", *COMMAND), policy("timeout"), 60.0),
    "queue_timeout": (("--queue-timeout", "61", *COMMAND), policy("queue_timeout"), 61.0),
    "idle_timeout": (("--idle-timeout", "62", *COMMAND), policy("idle_timeout"), 62.0),
    "stop_grace": (("--stop-grace", "0.5", *COMMAND), policy("stop_grace"), 0.5),
    "stop_after": (("--stop-after", "63", *COMMAND), policy("stop_after"), 63.0),
    "budget": (("--budget", "tokens=100", "--budget", "usd=0.5", *COMMAND), policy("budget"),
               {"tokens": 100.0, "usd": 0.5}),
    "secrets": (("--secret", "one", "--secret", "two", *COMMAND), policy("secrets"), ["one", "two"]),
    "check": (("--check", "sh -c 'exit 0'", "--check-timeout", "3", *COMMAND), policy("check"),
              {"command": ["sh", "-c", "exit 0"], "timeout": 3.0}),
    "reuse_key": (("--reuse-key", "weekly", *COMMAND), field("reuse_key"), "weekly"),
    "tool": (("--tool", "hello"), spec("command"), ["echo", "hello"]),
    "tasks": (("--file", "PIPELINE"), lambda job: job["spec"]["tasks"][0]["name"], "make"),
    "connector": (("--file", "PIPELINE", "--connector", "files"), spec("connector"), "files"),
    "snapshot": (("--file", "PIPELINE", "--snapshot", "final"), spec("snapshot"), "final"),
}  # fmt: skip
"""The flags for each field of the API, and what the server then made of it."""
ELSEWHERE = {
    "tenant": "test_tenant_is_an_option_of_every_command",
    "needs": "test_needs_may_be_short_ids",
    "uploads": "test_uploads_are_files_or_ids",
    "rebuild": "test_reuse_key_and_rebuild_and_idempotency_key",
    "base": "test_a_pipeline_starts_from_a_base",
    "plan_only": "test_a_pipeline_starts_from_a_base",
}
SPEC_FIELDS: dict[str, tuple[Sequence[str], object]] = {
    "command": (COMMAND, ["true"]),
    "env": (("-e", "A=1", *COMMAND), {"A": "1"}),
    "stdin": (("--stdin", "TEXT", *COMMAND), "some text\n"),
    "user": (("--user", "nobody", *COMMAND), "nobody"),
    "memory": (("--memory", "64m", *COMMAND), "64m"),
    "pids": (("--pids", "7", *COMMAND), 7),
    "file_size": (("--file-size", "1m", *COMMAND), "1m"),
    "folder_size": (("--folder-size", "2m", *COMMAND), "2m"),
    "require_result": (("--require-result", *COMMAND), True),
    "image": (("--image", "alpine", *COMMAND), "alpine"),
    "cpus": (("--image", "alpine", "--cpus", "0.5", *COMMAND), 0.5),
    "network": (("--image", "alpine", "--network", "none", *COMMAND), "none"),
    "name": (("--function", "resize"), "resize"),
}
PIPELINE_FIELDS = {"tasks", "connector", "snapshot", "base"}


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpProcess]:
    folder = tmp_path_factory.mktemp("fields")
    (folder / "tools.toml").write_text(TOOLS)
    (folder / "pipeline.toml").write_text(PIPELINE)
    (folder / "text").write_text("some text\n")
    with running(folder, "--queue", "default:4", HOLDFAST_TOOLS=str(folder / "tools.toml")) as found:
        yield found


def submitted(up: UpProcess, flags: Sequence[str]) -> Any:
    """Submit a job that does not start, and return it as the server stored it."""
    files = {"PIPELINE": str(up.folder / "pipeline.toml"), "TEXT": str(up.folder / "text")}
    return up.json("submit", "--hold", *(files.get(flag, flag) for flag in flags))


def test_every_field_of_the_api_is_in_the_table() -> None:
    """A new field of a submit fails here until it has a flag. Proves G5."""
    assert set(FIELDS) | set(ELSEWHERE) == set(JobRequest.__struct_fields__)
    assert all(name in globals() for name in ELSEWHERE.values())
    known = {name for one in ("process", "docker", "function") for name in runners()[one].fields}
    assert set(SPEC_FIELDS) | PIPELINE_FIELDS == known


@pytest.mark.parametrize("name", FIELDS)
def test_flag_sets_the_field(up: UpProcess, name: str) -> None:
    """Proves G5."""
    flags, look, expected = FIELDS[name]
    job = submitted(up, flags)
    assert look(job) == expected
    up.here("rm", "--force", job["id"])


@pytest.mark.parametrize("name", SPEC_FIELDS)
def test_flag_sets_the_field_of_the_spec(up: UpProcess, name: str) -> None:
    """Proves G5."""
    flags, expected = SPEC_FIELDS[name]
    job = submitted(up, flags)
    assert job["spec"][name] == expected
    up.here("rm", "--force", job["id"])


def test_expected_values_are_not_the_defaults(up: UpProcess) -> None:
    """Otherwise a flag that does nothing would pass."""
    plain = submitted(up, COMMAND)
    for name, (flags, look, expected) in FIELDS.items():
        if name not in ("runner", "spec", "tool", "tasks", "connector", "snapshot", "hold"):
            assert look(plain) != expected, (name, flags)
    up.here("rm", "--force", plain["id"])


def test_delay_is_counted_from_now(up: UpProcess) -> None:
    before = datetime.now(UTC)
    job = up.json("submit", "--delay", "2h", *COMMAND)
    wanted = before + timedelta(hours=2)
    assert wanted <= datetime.fromisoformat(job["available_at"]) <= wanted + timedelta(minutes=10)
    assert up.here("submit", "--delay", "soon", *COMMAND).exit_code == 2
    assert "write it like 90, 90s" in up.here("submit", "--delay", "soon", *COMMAND).stderr
    assert "give one of: --delay, --at" in up.here("submit", "--delay", "1", "--at", "2100-01-01", *COMMAND).stderr


def test_tenant_is_an_option_of_every_command(up: UpProcess) -> None:
    """Proves G5."""
    found = up.here("--tenant", "blue", "submit", "--json", "--hold", *COMMAND)
    assert json.loads(found.stdout)["tenant"] == "blue"


def test_needs_may_be_short_ids(up: UpProcess) -> None:
    """Proves G5."""
    first = up.json("submit", "--hold", *COMMAND)["id"]
    second = up.json("submit", "--needs", first[-8:], *COMMAND)["id"]
    (reason,) = up.json("explain", second)["reasons"]
    assert (reason["about"], reason["jobs"]) == ("needs", [first])


def test_uploads_are_files_or_ids(up: UpProcess, tmp_path: Path) -> None:
    """Proves G5."""
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(f"content of {name}\n")
    upload = up("upload", str(tmp_path / "a.txt")).strip()
    said = up("run", "--upload", upload, "--upload", str(tmp_path / "b.txt"), "--", "cat", "input/a.txt", "input/b.txt")
    assert said == "content of a.txt\ncontent of b.txt\n"
    missing = up.here("submit", "--upload", str(tmp_path / "c.txt"), *COMMAND)
    assert (missing.exit_code, "no such file; give a file, or the id" in missing.stderr) == (2, True)
    assert "is a folder; give its files" in up.here("submit", "--upload", str(tmp_path), *COMMAND).stderr
    assert "no such file" in up.here("upload", str(tmp_path / "c.txt")).stderr


def test_reuse_key_and_rebuild_and_idempotency_key(up: UpProcess) -> None:
    """Proves G5."""
    first = up.json("run", "--reuse-key", "report", *COMMAND)["id"]
    assert up.json("submit", "--reuse-key", "report", *COMMAND)["id"] == first
    assert up.json("run", "--reuse-key", "report", "--rebuild", *COMMAND)["id"] != first
    keyed = up.json("submit", "--key", "once", "--hold", *COMMAND)["id"]
    assert up.json("submit", "--key", "once", "--hold", *COMMAND)["id"] == keyed


def test_a_pipeline_starts_from_a_base(up: UpProcess) -> None:
    """Proves G5."""
    file = str(up.folder / "pipeline.toml")
    assert up.json("plan", "--file", file)["runs"] == 1
    assert up.json("run", "--file", file)["status"] == "succeeded"
    (snapshot,) = json.loads(up("snapshots", "ls", "--json"))["items"]
    job = up.json("submit", "--hold", "--file", file, "--base", snapshot["id"])
    assert job["spec"]["base"] == snapshot["id"]


def test_flags_take_precedence_over_the_file_and_pairs_are_merged(up: UpProcess, tmp_path: Path) -> None:
    """Proves G5."""
    file = tmp_path / "job.toml"
    file.write_text(
        'runner = "process"\npriority = 1\nkind = "file"\nlabels = {a = "1", b = "1"}\ninputs = {n = 1}\n'
        'available_at = 2100-05-01T12:00:00Z\n[spec]\ncommand = ["true"]\n[retry]\nbase = 2\ncap = 3\n'
    )
    job = up.json("submit", "--hold", "--file", str(file), "--priority", "2", "-l", "b=2", "-i", "m=2", "-e", "A=1")
    assert (job["priority"], job["kind"], job["labels"]) == (2, "file", {"a": "1", "b": "2"})
    assert (job["inputs"], job["spec"]["env"]) == ({"n": 1, "m": 2}, {"A": "1"})
    assert (job["policy"]["retry"]["cap"], job["available_at"]) == (3.0, "2100-05-01T12:00:00Z")
    inputs = tmp_path / "inputs.json"
    inputs.write_text('{"rows": 3}')
    assert up.json("submit", "--hold", "--inputs", f"@{inputs}", *COMMAND)["inputs"] == {"rows": 3}
    assert json.loads(up("submit", "--json", "--file", "-", stdin=file.read_text()))["kind"] == "file"


def test_example_of_the_docs_is_accepted(up: UpProcess, tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
    (tmp_path / "job.toml").write_text(page.partition("```toml\n")[2].partition("```")[0])
    job = up.json("submit", "--hold", "--file", str(tmp_path / "job.toml"), "--queue", "heavy")
    assert (job["queue"], job["lane"], job["policy"]["retry"]["base"]) == ("heavy", "crm", 10.0)


BAD_FILES = {
    'runner = "process"\ntimout = 3\n[spec]\ncommand = ["true"]\n': "line 2: timout: Object contains unknown field"
    " `timout`; did you mean timeout?",
    'runner = "process"\nx9 = 3\n[spec]\ncommand = ["true"]\n': "a job has available_at, base, budget",
    'runner = "process"\n[spec]\ncommand = ["true"]\n[retry]\nbase = "x"\n': "line 5: retry.base: Expected `float`",
    'runner = "process"\n[spec]\ncomand = ["true"]\n': "job.toml, line 3: spec.comand",
    'runner = "process\n': "is not TOML: Illegal character",
    'priority = 3\n': "runner",
}  # fmt: skip


@pytest.mark.parametrize("text", BAD_FILES)
def test_error_in_a_file_names_the_field_the_line_and_the_way_out(up: UpProcess, tmp_path: Path, text: str) -> None:
    """Proves G5."""
    file = tmp_path / "job.toml"
    file.write_text(text)
    found = up.here("submit", "--file", str(file))
    assert found.exit_code == 2, found.output
    assert f"{file}" in found.stderr
    assert BAD_FILES[text] in found.stderr


def test_bad_values_of_options_name_the_option_and_the_way_out(up: UpProcess, tmp_path: Path) -> None:
    """Proves G5."""
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    refused = {
        ("--file", str(tmp_path / "none.toml")): "No such file or directory; give the path of a TOML or JSON file",
        ("--file", str(tmp_path / "list.json")): "must be an object with fields, not a list",
        ("--file", str(tmp_path / "binary")): "is not UTF-8 text",
        ("--budget", "tokens=many", *COMMAND): "'many' is not a number",
        ("--label", "x", *COMMAND): "--label 'x': use name=value",
        ("--retry", "often=1", *COMMAND): "--retry often: use one of base, cap, on",
        ("--inputs", "[1]", *COMMAND): "--inputs: must be a JSON object, or @FILE",
        ("--inputs", "@none.json", *COMMAND): "--inputs none.json: No such file",
        ("--check", "'", *COMMAND): "--check",
        ("--check-timeout", "1", *COMMAND): "give --check, too",
        ("--at", "tomorrow", *COMMAND): "is not a time; write it like",
        ("--file", "-", "--inputs", "@-"): "only one of --file - and --inputs @- can read",
        ("--stdin", str(tmp_path / "binary"), *COMMAND): "is not UTF-8 text; give such a file to the job with --upload",
        ("--tool", "hello", "--memory", "1g"): "--memory is for a command or an image; --tool has its own",
        ("--on-lost", "explode", *COMMAND): "on_lost",
        ("--needs", "zz", *COMMAND): "'zz'",
        ("--key", "k", "--delay", "1h", *COMMAND): "a repeat must be the same request; use --at instead of --delay",
        ("--key", "k", "--upload", str(tmp_path / "binary"), *COMMAND): "and ids of `holdfast upload`",
    }
    for flags, said in refused.items():
        found = up.here("submit", *flags)
        assert (found.exit_code, said in found.stderr) == (2, True), (flags, found.output)
