"""Help texts, the environment variables of options, and shell completion."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from holdfast.cli.main import app
from tests.support.service import FUNCTION, Service

ISSUED = """
    up serve worker run submit ls show watch logs explain cancel interrupt resume resolve dismiss release rm lanes
    queues workers tools tokens jobs artifacts events upload top migrate prune doctor check bench
"""
OWN = {"help", "install_completion", "show_completion"}


def commands(command: Any = None, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every command with its path, including groups; not the hidden old names."""
    found = typer.main.get_command(app) if command is None else command
    yield path, found
    for name, inner in getattr(found, "commands", {}).items():
        if not inner.hidden:
            yield from commands(inner, (*path, name))


def test_every_command_has_a_help_text() -> None:
    """Proves O3."""
    found = dict(commands())
    assert {path[0] for path in found if len(path) == 1} >= set(ISSUED.split())
    assert {("workers", "lost"), ("workers", "drain")} <= set(found)
    for path, command in found.items():
        assert command.help, path
        for parameter in command.params:
            assert getattr(parameter, "help", None), (path, parameter.name)


@pytest.mark.parametrize("path", [path for path, _ in commands()], ids=" ".join)
def test_help_names_the_environment_variable_of_every_option(path: tuple[str, ...]) -> None:
    """Proves O9."""
    said = CliRunner().invoke(app, [*path, "--help"], env={"COLUMNS": "400"}, terminal_width=400).stdout
    for option in dict(commands())[path].params:
        if option.param_type_name == "option" and option.name not in OWN:
            twin = option.envvar or "_".join(("HOLDFAST", *path, option.name)).upper()
            assert f"[env var: {twin}" in said, option.name


def test_environment_variable_of_an_option_is_read(tmp_path: Path) -> None:
    """Proves O9."""
    env = {"HOLDFAST_JSON": "1", "HOLDFAST_MIGRATE_DRY_RUN": "1", "HOLDFAST_DATA_DIR": str(tmp_path)}
    found = CliRunner().invoke(app, ["migrate"], env=env)
    assert '"number": 1' in found.stdout, found.output
    assert CliRunner().invoke(app, ["migrate"], env=env).stdout == found.stdout


@pytest.mark.parametrize(
    ("env", "code", "text"),
    [
        ({"HOLDFAST_URL": "http://127.0.0.1:1"}, 3, "`holdfast up` starts one"),
        ({"HOLDFAST_URL": "127.0.0.1:7070"}, 2, "use http://host:port"),
        ({"HOLDFAST_URL": "http://[::1"}, 2, "use http://host:port"),
    ],
)
def test_unreachable_server_error_says_what_to_do(env: dict[str, str], code: int, text: str) -> None:
    found = CliRunner().invoke(app, ["ls"], env=env)
    assert (found.exit_code, text in found.stderr) == (code, True), found.output


@pytest.mark.parametrize("kind", ["sqlite"])
async def test_list_command_imports_no_unused_library(service_process: Service) -> None:
    """Each of these takes longer to load than the list takes to make."""
    loaded = loaded_by(service_process, "ls")
    assert "httpx" in loaded
    assert not loaded & {"pydantic", "click", "pygments", "fastapi", "asyncpg", "jsonschema", "uvicorn"}


def loaded_by(service: Service, *arguments: str) -> set[str]:
    """The packages that a command imports."""
    env = {"PATH": os.environ["PATH"], "HOLDFAST_URL": service.url, "HOLDFAST_DATA_DIR": str(service.data)}
    command = [sys.executable, "-X", "importtime", "-m", "holdfast.cli.main", *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    return {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}


@pytest.mark.parametrize("kind", ["sqlite"])
async def test_completion_offers_what_the_server_knows(service_process: Service) -> None:
    """In a real bash: the script that `--show-completion` prints, and what it then offers."""
    async with service_process.client() as client:
        ids = [(await client.post("/v1/jobs", json={**FUNCTION, "lane": "crm-7"})).json()["id"] for _ in range(2)]
    assert sorted(tab(service_process, "show ")) == sorted(ids)
    assert tab(service_process, f"cancel {ids[1]}") == [ids[1]]
    assert tab(service_process, "ls --status ti") == ["timed_out"]
    assert tab(service_process, "lanes pause ") == ["crm-7"]
    assert sorted(tab(service_process, "artifacts get ")) == sorted(ids)
    assert tab(service_process, f"submit --needs {ids[0]}") == [ids[0]]
    assert tab(service_process, "lanes s") == ["show"]
    assert "tokens" in tab(service_process, "to")
    assert "token" not in tab(service_process, "to")
    assert "default" in tab(service_process, "submit --queue ")
    assert "explain" in tab(service_process, "exp")
    assert tab(service_process, "show ", url="http://127.0.0.1:1") == []


def tab(service: Service, line: str, url: str | None = None) -> list[str]:
    """Return what bash offers when Tab is pressed after a line."""
    words = ["holdfast", *line.split(" ")]
    program = Path(sys.executable).with_name("holdfast")
    script = (
        f'source <(_HOLDFAST_COMPLETE=source_bash "{program}")\n'
        f'holdfast() {{ "{program}" "$@"; }}\n'
        'COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}\n'
        'f=$(complete -p holdfast | sed "s/.*-F \\([^ ]*\\).*/\\1/"); $f "$1" "${COMP_WORDS[COMP_CWORD]}"\n'
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    env = {
        "PATH": f"{program.parent}:{os.environ['PATH']}",
        "HOLDFAST_URL": url or service.url,
        "HOLDFAST_DATA_DIR": str(service.data),
    }
    done = subprocess.run(["bash", "-c", script, "tab", *words], env=env, capture_output=True, text=True, check=False)
    assert done.stderr == "", done.stderr
    return done.stdout.split()


SAID = re.compile(r"(?:^\$ |`|\$\(|; |&& )holdfast ((?:[^`\n|;)$]|\$(?!\())*)", re.MULTILINE)
ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "examples").rglob("*.md"))]


def test_docs_name_only_existing_commands_and_options() -> None:
    found = dict(commands())
    lines = [(page.name, line) for page in PAGES for line in SAID.findall(page.read_text())]
    assert len(lines) > 50
    for page, line in lines:
        words = line.partition(" -- ")[0].replace("[", " ").replace("]", " ").split()
        path: tuple[str, ...] = ()
        while words and (*path, words[0]) in found:
            path = (*path, words.pop(0))
        assert path or all(word.startswith("-") or word.isupper() for word in words), (page, line)
        known = {name for option in (*found[path].params, *found[()].params) for name in option.opts} | {"--help", "--"}
        assert {word.partition("=")[0] for word in words if word.startswith("-")} <= known, (page, line)
