"""Tools: jobs by name, whose inputs become arguments, never options or shell code."""

from pathlib import Path

import pytest

from holdfast import decoding
from holdfast.api.tools import load_tools
from holdfast.errors import ConfigError, Forbidden, Invalid, NotFound
from holdfast.model import Policy, Role, Status
from holdfast.submission import parse
from tests.support.in_process_workers import InProcessWorkers
from tests.support.service import error_of, service_in_process

FILE = """
[tools.render]
runner = "process"
description = "Renders rows."
command = ["printf", "%s|", "{title}", "--rows={rows}", "{rows}"]
env = {A = "1"}
queue = "default"
timeout = 30
secrets = ["API_KEY"]

[tools.render.inputs]
type = "object"
required = ["title", "rows"]
additionalProperties = false
properties.title = {type = "string", maxLength = 50}
properties.rows = {type = "integer", minimum = 1}
properties.deep = {type = "object"}

[tools.plain]
runner = "process"
command = ["printf", "%s|", "{title}"]
inputs = {type = "object", required = ["title"], properties = {title = {type = "string"}}}

[tools.box]
runner = "docker"
image = "alpine:3"
command = ["true"]
memory = "64m"

[tools.call]
runner = "function"
name = "f"
inputs = {type = "object"}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tools.toml"
    path.write_text(FILE)
    return path


def test_tool_becomes_a_job_with_its_slots_filled(file: Path) -> None:
    tools = load_tools(file)
    job = tools.expand({"tool": "render", "inputs": {"title": "a b; rm -rf $(x)", "rows": 3}, "labels": {"a": "b"}})
    assert job["spec"] == {
        "command": ["printf", "%s|", "a b; rm -rf $(x)", "--rows=3", "3"],
        "env": {"A": "1"},
    }
    assert (job["runner"], job["kind"], job["timeout"], job["secrets"]) == ("process", "render", 30, ["API_KEY"])
    assert job["labels"] == {"a": "b"}
    assert tools.expand({"tool": "box"})["spec"] == {"image": "alpine:3", "command": ["true"], "memory": "64m"}
    assert tools.expand({"tool": "call", "inputs": {"x": [1]}})["spec"] == {"name": "f"}


@pytest.mark.parametrize("written", ["pause", "hold"])
def test_tool_sets_on_lost_by_its_new_and_its_old_name(tmp_path: Path, written: str) -> None:
    """Proves L11."""
    path = tmp_path / "tools.toml"
    path.write_text(f'[tools.x]\nrunner = "function"\nname = "f"\non_lost = "{written}"\n')
    job = parse(load_tools(path).expand({"tool": "x"}))
    assert decoding.convert(job.policy, Policy).on_lost == "pause"


GOOD = {"title": "a", "rows": 3}


@pytest.mark.parametrize(
    ("job", "field"),
    [
        ({"inputs": GOOD, "tasks": [{"name": "a", "command": ["id"]}]}, "tasks"),
        ({"inputs": {**GOOD, "rows": "3"}}, "inputs.rows"),
        ({"inputs": {**GOOD, "rows": 0}}, "inputs.rows"),
        ({"inputs": {"rows": 3}}, "inputs"),
        ({"inputs": {**GOOD, "colour": 1}}, "inputs"),
        ({"inputs": []}, "inputs"),
        ({"inputs": {**GOOD, "title": "-rf"}}, "inputs.title"),
        ({"inputs": {**GOOD, "title": "--help"}}, "inputs.title"),
        ({"inputs": {**GOOD, "title": "a\0b"}}, "inputs.title"),
        ({"inputs": GOOD, "spec": {}}, "spec"),
        ({"inputs": GOOD, "runner": "process"}, "runner"),
        ({"inputs": GOOD, "timeout": 9999}, "timeout"),
        ({"inputs": GOOD, "queue": "other"}, "queue"),
    ],
)
def test_bad_inputs_are_refused_by_name(file: Path, job: dict[str, object], field: str) -> None:
    with pytest.raises(Invalid) as refused:
        load_tools(file).expand({"tool": "render", **job})
    assert refused.value.field == field


def test_unknown_tool_and_secrets_of_the_caller_are_refused(file: Path) -> None:
    with pytest.raises(NotFound):
        load_tools(file).expand({"tool": "none"})
    with pytest.raises(Forbidden):
        load_tools(file).expand({"tool": "box", "secrets": ["ROOT"]})


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[tools.a", "is not TOML"),
        ("colour = 1", "colour in"),
        ("tools = 1", "is not a table"),
        ("[tools.a]\n", "runner"),
        ('[tools.a]\nrunner = "process"\n', "command"),
        ('[tools.a]\nrunner = "process"\ncommand = ["x"]\ncolour = 1', "colour"),
        ('[tools.a]\nrunner = "process"\ncommand = ["x", "{y}"]', "slot {y}"),
        ('[tools.a]\nrunner = "docker"\ncommand = ["x"]', "image"),
        ('[tools.a]\nrunner = "process"\ncommand = ["x"]\nimage = "y"', "image"),
        ('[tools.a]\nrunner = "process"\ncommand = ["x"]\ninputs = {type = "colour"}', "not a JSON Schema"),
        ('[tools.a]\nrunner = "process"\ncommand = ["x"]\nretry = {base = 9, cap = 1}', "retry"),
    ],
)
def test_broken_file_is_refused_with_what_is_wrong(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "tools.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as refused:
        load_tools(path)
    assert problem in refused.value.message


SLOTTED = 'inputs = {type = "object", required = ["y"], properties = {y = {type = "string"}}}'


@pytest.mark.parametrize(
    "command",
    ['["sh", "-c", "echo {y}"]', '["/bin/bash", "-ec", "echo {y}"]', '["env", "sh", "-c", "{y}"]', '["{y}", "x"]'],
)
def test_slot_is_never_a_program_nor_a_script(tmp_path: Path, command: str) -> None:
    path = tmp_path / "tools.toml"
    path.write_text(f'[tools.a]\nrunner = "process"\ncommand = {command}\n{SLOTTED}')
    with pytest.raises(ConfigError, match="slot"):
        load_tools(path)
    path.write_text(f'[tools.a]\nrunner = "process"\ncommand = ["sh", "-c", "echo $1", "a", "{{y}}"]\n{SLOTTED}')
    assert load_tools(path).expand({"tool": "a", "inputs": {"y": "$(id)"}})["spec"]["command"][-1] == "$(id)"


def test_schema_that_refers_elsewhere_fetches_nothing(tmp_path: Path) -> None:
    path = tmp_path / "tools.toml"
    path.write_text('[tools.a]\nrunner = "process"\ncommand = ["x"]\ninputs = {"$ref" = "http://127.0.0.1:1/x"}')
    with pytest.raises(Invalid, match="schema of tool a is broken"):
        load_tools(path).expand({"tool": "a", "inputs": {}})


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml"):
        load_tools(tmp_path / "none.toml")


async def test_submitter_runs_a_tool_over_http(workers: InProcessWorkers, file: Path, tmp_path: Path) -> None:
    """Proves O8."""
    url = workers.settings.database_url or ""
    async with (
        service_in_process(url, tmp_path / "data", tools=file) as service,
        service.client(await service.token(Role.SUBMITTER)) as client,
        workers.worker(),
    ):
        listed = (await client.get("/v1/tools")).json()["items"]
        assert [tool["name"] for tool in listed] == ["box", "call", "plain", "render"]
        assert "printf" not in str(listed)
        wrong = await client.post("/v1/jobs", json={"tool": "plain", "inputs": {"title": 7}})
        assert (wrong.status_code, error_of(wrong)["details"]["field"]) == (422, "inputs.title")
        made = await client.post("/v1/jobs", json={"tool": "plain", "inputs": {"title": "a; b"}})
        assert made.status_code == 201
        await workers.ended(made.json()["id"], Status.SUCCEEDED)
        assert await workers.log(made.json()["id"]) == ["a; b|"]


async def test_idempotency_compares_the_request_and_not_the_filled_tool(clean_url: str, tmp_path: Path) -> None:
    """Proves J12."""
    path = tmp_path / "tools.toml"
    sent = {"tool": "a", "inputs": {}}
    ids = []
    for command in ('["true"]', '["true", "twice"]'):
        path.write_text(f'[tools.a]\nrunner = "process"\ncommand = {command}')
        async with service_in_process(clean_url, tmp_path / "data", tools=path) as service, service.client() as client:
            headers = {"Idempotency-Key": "once"}
            one = await client.post("/v1/jobs", json=sent, headers=headers)
            many = await client.post("/v1/jobs/bulk", json={"jobs": [sent]}, headers={"Idempotency-Key": "many"})
            ids.append((one.json()["id"], many.json()["ids"]))
            other = await client.post("/v1/jobs", json={**sent, "labels": {"a": "b"}}, headers=headers)
            assert other.status_code == 409
    assert ids[0] == ids[1]


GUARDED = """
[tools.guarded]
runner = "process"
command = ["sh", "-c", "echo $API_KEY"]
secrets = ["API_KEY"]
check = {command = ["sh", "-c", "echo no $0 yet >&2; test -e $0", "READY"], timeout = 1}

[tools.short]
runner = "process"
command = ["sleep", "600"]
timeout = 0.2

[tools.exact]
runner = "process"
command = ["true"]
require_result = true

[tools.called]
runner = "function"
name = "called"
check = {command = ["test", "-e", "READY"], timeout = 1}
"""


async def test_tool_brings_its_check_its_secrets_and_its_limits_to_the_worker(
    workers: InProcessWorkers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proves C10, O8."""
    ready = tmp_path / "ready"
    path = tmp_path / "tools.toml"
    path.write_text(GUARDED.replace("READY", str(ready)))
    monkeypatch.setenv("HOLDFAST_SECRET_API_KEY", "open-sesame")

    @workers.functions.add(name="called")
    def called() -> str:
        return "called"

    async with (
        service_in_process(workers.settings.database_url or "", tmp_path / "data", tools=path) as service,
        service.client(await service.token(Role.OPERATOR)) as client,
        workers.worker(),
    ):

        async def ask(tool: str) -> str:
            made = await client.post("/v1/jobs", json={"tool": tool})
            assert made.status_code == 201, made.text
            return str(made.json()["id"])

        guarded, function = await ask("guarded"), await ask("called")
        for job in (guarded, function):
            paused = await workers.ended(job, Status.PAUSED)
            assert paused.error is not None
            assert paused.error.code == "not_ready"
        assert f"no {ready} yet" in str((await workers.get(guarded)).error)
        assert await workers.log(guarded) == []
        ready.touch()
        for job in (guarded, function):
            assert (await client.post(f"/v1/jobs/{job}/resume")).status_code == 200
            await workers.ended(job, Status.SUCCEEDED)
        assert await workers.log(guarded) == ["***"]
        await workers.ended(await ask("short"), Status.TIMED_OUT)
        failed = await workers.ended(await ask("exact"), Status.FAILED)
        assert failed.error is not None
        assert failed.error.code == "contract_violation"


async def test_readiness_check_needs_the_right_to_run_commands(clean_url: str, tmp_path: Path, file: Path) -> None:
    """Proves O8, C10."""
    check = {"command": ["true"], "timeout": 1}
    async with service_in_process(clean_url, tmp_path / "data", tools=file) as service:
        async with service.client(await service.token(Role.SUBMITTER)) as client:
            asked = {"runner": "function", "spec": {"name": "f"}, "check": check}
            assert (await client.post("/v1/jobs", json=asked)).status_code == 403
            tool = await client.post("/v1/jobs", json={"tool": "call", "check": check})
            assert (tool.status_code, error_of(tool)["details"]["field"]) == (422, "check")
        async with service.client() as client:
            assert (await client.post("/v1/jobs", json=asked)).status_code == 201
            wrong = await client.post("/v1/jobs", json={**asked, "check": {**check, "command": []}})
            assert (wrong.status_code, error_of(wrong)["details"]["field"]) == (422, "check.command")
