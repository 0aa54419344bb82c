"""A page of the docs as something that can be run: its code blocks, as a reader would type them, in one shell.

A Python block that begins with `# name.py` is saved under that name. A comment before a block says what is special:
`<!-- run: until ready -->` is started and left running, and the next block waits until a worker lives;
`<!-- run: elsewhere, … -->` is not run here, and says what runs it.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.ports import free_port

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"(?:<!-- run: (?P<how>.*?) -->\n)?```(?P<kind>\w+)\n(?P<text>.*?)```", re.DOTALL)
SHOWN = ("mermaid", "json", "toml", "ini")
READY = "until holdfast workers --json 2>/dev/null | grep -q '\"live\": true'; do sleep 0.1; done"
SECONDS = 240


@dataclass(frozen=True)
class Block:
    kind: str
    text: str
    how: str | None

    @property
    def commands(self) -> str:
        """Return what follows a prompt, with the lines that a backslash continues."""
        found = []
        going_on = False
        for line in self.text.splitlines():
            if going_on or line.startswith("$ "):
                found.append(line.removeprefix("$ "))
                going_on = line.endswith("\\")
        assert found, self.text
        return "\n".join(found)

    @property
    def script(self) -> str:
        name = re.match(r"# (\w+\.py)\n", self.text)
        if self.kind == "python":
            assert name is not None, f"where is it to be saved? {self.text}"
            return f"cat > {name[1]} <<'END_OF_FILE'\n{self.text}END_OF_FILE"
        assert self.kind == "console", self.kind
        return f"(\n{self.commands}\n) >> up.log 2>&1 &\n{READY}" if self.how == "until ready" else self.commands


def blocks(page: Path) -> Sequence[Block]:
    found = [Block(block["kind"], block["text"], block["how"]) for block in BLOCK.finditer(page.read_text())]
    return [block for block in found if block.kind not in SHOWN]


def clone(folder: Path) -> Path:
    """A copy of what git knows, or would: nothing that was built or installed here comes along."""
    known = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(known, cwd=ROOT, capture_output=True, text=True, check=True)
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def read_along(page: Path, folder: Path) -> str:
    """Type everything that a page says, in a clean clone with an empty home folder; return what was printed.

    Two things are not as a newcomer finds them: `.venv` leads to the environment that these tests run in, because to
    make one takes a minute, with the clone's own code in front; and the port is a free one.
    """
    here = clone(folder / "clone")
    (folder / "home").mkdir()
    environment = Path(sys.prefix)
    if (environment / ".base").stat().st_mtime < max(
        (here / name).stat().st_mtime for name in ("pyproject.toml", "constraints.txt", "requirements/run.txt")
    ):
        pytest.fail("the virtual environment is older than what it is made from: `make setup` first")
    (here / ".venv").symlink_to(environment)
    port = free_port()
    env = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder / "home"),
        "PYTHONPATH": str(here / "src"),
        "HOLDFAST_PORT": str(port),
        "HOLDFAST_URL": f"http://127.0.0.1:{port}",
        "HOLDFAST_PROCESS_USER": "root",
    }
    parts = [block.script for block in blocks(page) if not (block.how or "").startswith("elsewhere")]
    script = "\n".join(["set -eo pipefail", f"PATH={environment / 'bin'}:$PATH", *parts])
    script = script.replace("127.0.0.1:7070", f"127.0.0.1:{port}")
    reader = subprocess.Popen(
        ["bash", "-c", script], cwd=here, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        said, _ = reader.communicate(timeout=SECONDS)
    finally:
        _close(reader.pid)
    log = (here / "up.log").read_text() if (here / "up.log").exists() else ""
    assert reader.returncode == 0, f"{said}\n--- up:\n{log}"
    return said


def _close(group: int) -> None:
    """Close the terminal: all that was started in it is told to leave, and waited for."""
    deadline = time.monotonic() + SECONDS
    try:
        os.killpg(group, signal.SIGTERM)
        while time.monotonic() < deadline:
            os.killpg(group, 0)
            time.sleep(0.05)  # Reason: the empty group is the signal; this only spaces the questions.
    except ProcessLookupError:
        return
    raise AssertionError("something that the page started does not leave")
