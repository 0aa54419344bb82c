"""`--json` of every command fits what is documented: the OpenAPI document; for commands without a server, a struct."""

import asyncio
import json
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest

from holdfast.api import openapi
from holdfast.api.app import declared
from holdfast.cli.admin import BenchResult, Migrated, Setting
from holdfast.cli.doctor import Finding
from holdfast.cli.shared_folder import FolderReport
from holdfast.model import Event
from holdfast.response_types import PlanView
from holdfast.store import open_store
from tests.cli.test_cli_help import commands
from tests.support.up_process import UpProcess, running

TOOLS = """
[tools.hello]
description = "Says hello."
runner = "process"
command = ["echo", "hello"]
"""
PIPELINE = {
    "runner": "process",
    "spec": {},
    "tasks": [{"name": "make", "command": ["sh", "-c", "echo made > file"]}],
    "connector": "files",
    "snapshot": "final",
}


class Removed(msgspec.Struct):
    removed: int


class Version(msgspec.Struct):
    version: str


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpProcess]:
    folder = tmp_path_factory.mktemp("json")
    (folder / "tools.toml").write_text(TOOLS)
    with running(folder, HOLDFAST_TOOLS=str(folder / "tools.toml")) as found:
        yield found


@cache
def document() -> dict[str, Any]:
    return openapi.document(declared())


def fits(value: Any, operation: str) -> Any:
    """Assert that this is a response of an operation of the document, without unknown fields."""
    (found,) = [
        entry
        for methods in document()["paths"].values()
        for entry in methods.values()
        if entry["operationId"] == operation
    ]
    answer = found["responses"][max(status for status in found["responses"] if status < "300")]
    schema = answer["content"]["application/json"]["schema"]
    jsonschema.Draft202012Validator({**schema, "components": document()["components"]}).validate(value)
    known = document()["components"]["schemas"][schema["$ref"].rpartition("/")[2]]["properties"]
    assert set(value) <= set(known), set(value) - set(known)
    return value


class Said:
    """Runs commands with `--json`, and remembers which."""

    def __init__(self, up: UpProcess) -> None:
        self.up = up
        self.commands: set[tuple[str, ...]] = set()

    def __call__(self, command: str, *arguments: str, code: int = 0) -> str:
        path = tuple(command.split())
        self.commands.add(path)
        found = self.up.here(*path, "--json", *arguments)
        assert found.exit_code == code, (command, found.output)
        return found.stdout

    def fits(self, operation: str, command: str, *arguments: str, code: int = 0) -> Any:
        return fits(json.loads(self(command, *arguments, code=code)), operation)

    def one(self, schema: str, command: str, *arguments: str) -> Any:
        """One item of a list of the server."""
        value = json.loads(self(command, *arguments))
        found = document()["components"]["schemas"]
        jsonschema.Draft202012Validator({**found[schema], "components": document()["components"]}).validate(value)
        assert set(value) <= set(found[schema]["properties"])
        return value

    def is_a(self, kind: Any, command: str, *arguments: str) -> Any:
        return msgspec.json.decode(self(command, *arguments), type=kind, strict=True)

    def events(self, command: str, *arguments: str, code: int = 0) -> Sequence[Event]:
        """One event per line, the history from its beginning."""
        lines = self(command, *arguments, code=code).splitlines()
        found = [msgspec.json.decode(line, type=Event) for line in lines]
        assert [event.seq for event in found] == list(range(1, len(found) + 1))
        return found


def test_json_of_every_command_fits_its_schema(up: UpProcess) -> None:
    """Proves O3, J15, C8."""
    said = Said(up)
    jobs_and_their_moves(said)
    failures(said)
    pipelines(said)
    the_rest(said)
    without_a_server(said)
    wanted = {
        path for path, command in commands() if path and any("--json" in option.opts for option in command.params)
    }
    assert said.commands == wanted
    silent = {("up",), ("serve",), ("worker",), ("jobs",), ("artifacts",), ("snapshots",), ("snapshots", "run")}
    assert {path for path, _ in commands() if path} - wanted == silent


def jobs_and_their_moves(said: Said) -> None:
    held = said.fits("submit", "submit", "--hold", "--lane", "l", "--", "echo", "hi")["id"]
    assert said.fits("explain", "explain", held)["reasons"][0]["about"] == "held"
    assert said.fits("release", "release", held)["status"] in ("queued", "running", "succeeded")
    assert said.events("watch", held)[-1].data["status"] == "succeeded"
    assert [event.data["lines"] for event in said.events("logs", held) if event.type == "log"] == [["hi"]]
    assert said.fits("get_job", "show", held)["links"]["self"].endswith(held)
    assert said.fits("get_job", "jobs show", held[-8:])["id"] == held
    assert said.events("events", held)[-1].data["status"] == "succeeded"
    assert said.fits("list_artifacts", "artifacts ls", held)["items"] == []
    assert json.loads(said("artifacts get", held)) == {"files": []}
    assert said.fits("upload", "upload", __file__)["files"][0]["path"] == Path(__file__).name
    assert said.fits("list_jobs", "ls", "--lane", "l")["items"][0]["id"] == held
    assert said.fits("list_jobs", "jobs ls", "--lane", "l")["items"][0]["id"] == held
    assert said.fits("get_job", "run", "--tool", "hello")["status"] == "succeeded"
    assert said.fits("delete", "rm", "--dry-run", held)["outcome"] == "would_delete"
    assert said.fits("delete", "rm", held)["outcome"] == "deleted"
    last = said.fits("submit", "submit", "--hold", "--", "true")["id"]
    assert said.fits("delete", "jobs rm", "--force", last)["outcome"] == "deleted"


def failures(said: Said) -> None:
    failed = said.fits("get_job", "run", "--", "false", code=1)["id"]
    assert said.fits("dismiss", "dismiss", failed)["dismissed"]
    assert said.fits("resolve", "resolve", failed, "--result", "7")["result"] == 7
    later = said.fits("submit", "submit", "--hold", "--", "true")["id"]
    assert said.fits("cancel", "cancel", later)["status"] == "cancelled"
    assert said.fits("resume", "resume", later)["status"] in ("pending", "queued", "running", "succeeded")
    held = said.fits("submit", "submit", "--hold", "--", "true")["id"]
    assert said.fits("interrupt", "interrupt", held)["status"] == "cancelled"


def pipelines(said: Said) -> None:
    file = said.up.folder / "pipeline.json"
    file.write_text(json.dumps(PIPELINE))
    assert said.is_a(PlanView, "plan", "--file", str(file)).runs == 1
    assert said.fits("get_job", "run", "--file", str(file))["status"] == "succeeded"
    assert said.is_a(PlanView, "plan", "--file", str(file)).runs == 0
    (snapshot,) = said.fits("list_snapshots", "snapshots ls")["items"]
    assert said.fits("get_snapshot", "snapshots show", snapshot["id"][:12])["id"] == snapshot["id"]
    assert set(json.loads(said("snapshots du"))) == {"count", "size"}
    removed = said.fits("delete_snapshot", "snapshots rm", "--force", snapshot["id"])
    assert removed["snapshots"] == [snapshot["id"]]


def the_rest(said: Said) -> None:
    assert said.fits("list_lanes", "lanes") == said.fits("list_lanes", "lanes ls")
    assert said.fits("get_lane", "lanes show", "l")["lane"] == "l"
    assert said.fits("pause_lane", "lanes pause", "l")["state"] == "paused"
    said.fits("resume_lane", "lanes resume", "l")
    assert said.fits("pause_queue", "queues pause", "q")["paused"]
    said.fits("resume_queue", "queues resume", "q")
    assert said.fits("patch_queue", "queues limit", "q", "--max-running", "2")["max_running"] == 2
    assert said.fits("patch_queue", "queues limit", "q", "--max-depth", "9")["max_running"] == 2
    assert [queue["queue"] for queue in said.fits("list_queues", "queues")["items"]] == ["q"]
    assert said.fits("list_queues", "queues ls")["items"] == [said.one("QueueView", "queues show", "q")]
    assert [tool["name"] for tool in said.fits("list_tools", "tools")["items"]] == ["hello"]
    assert said.fits("list_tools", "tools ls")["items"] == [said.one("ToolView", "tools show", "hello")]
    made = said.fits("make_token", "tokens create", "ci", "--role", "viewer")
    assert made["id"] in [token["id"] for token in said.fits("list_tokens", "tokens")["items"]]
    assert said.one("TokenView", "tokens show", made["id"]) in said.fits("list_tokens", "tokens ls")["items"]
    said.fits("remove_token", "tokens rm", made["id"])
    assert said.fits("list_audit", "audit")["items"][0]["action"] == "token.remove"
    (worker,) = said.fits("list_workers", "workers")["items"]
    said.fits("list_workers", "workers ls")
    assert said.one("Worker", "workers show", worker["host"])["worker"] == worker["worker"]
    assert set(json.loads(said("top"))) == {"queues", "workers", "running", "failed"}
    refused = said.up.here("workers", "lost", worker["host"])
    assert (refused.exit_code, "is not gone" in refused.stderr) == (4, True)
    asyncio.run(die_elsewhere(said.up.folder))
    assert said.fits("lose_host", "workers lost", "elsewhere")["workers"] == ["elsewhere:1:x"]


async def die_elsewhere(folder: Path) -> None:
    """Leave the row of a worker on a host that is gone."""
    async with await open_store(f"sqlite:///{folder / 'holdfast.db'}") as store:
        await store.workers.register(
            "elsewhere:1:x", host="elsewhere", pid=1, queues={}, capabilities=[], domains=["process:x"], ttl=0.001
        )


def without_a_server(said: Said) -> None:
    assert all(finding.ok for finding in said.is_a(list[Finding], "doctor"))
    assert said.is_a(list[Migrated], "migrate") == []
    settings = {setting.name: setting for setting in said.is_a(list[Setting], "check")}
    assert settings["HOLDFAST_DATA_DIR"].value != settings["HOLDFAST_DATA_DIR"].default
    assert said.is_a(Removed, "prune").removed == 0
    assert said.is_a(BenchResult, "bench").run_per_second > 0
    assert said.is_a(Version, "version").version
    shown = said.is_a(FolderReport, "shared-folder")
    assert shown.id == shown.recorded_id == said.is_a(FolderReport, "shared-folder adopt").id
    # Last: nothing runs any more.
    (worker,) = said.fits("list_workers", "workers")["items"]
    assert said.fits("drain_host", "workers drain", worker["host"])["workers"] == [worker["worker"]]
