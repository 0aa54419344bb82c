"""A running `holdfast up`, and commands beside it: as processes, as a person types them, or in here, which is quick."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from holdfast.cli.main import app
from tests.support.ports import free_port

PATIENCE = 60.0
PROGRAM = (sys.executable, "-m", "holdfast.cli.main")


@dataclass
class UpProcess:
    """A running `holdfast up`, and how to call commands beside it."""

    folder: Path
    port: int
    process: "subprocess.Popen[bytes]"

    @property
    def env(self) -> dict[str, str]:
        known = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
        return known | {
            "HOLDFAST_URL": f"http://127.0.0.1:{self.port}",
            "HOLDFAST_DATA_DIR": str(self.folder),
            "HOLDFAST_PROCESS_USER": "root",
            "COLUMNS": "200",
        }

    def __call__(self, *arguments: str, code: int = 0, stdin: str | None = None, **env: str) -> str:
        """Run a command, demand its exit code, and return what it printed."""
        done = self.run(*arguments, stdin=stdin, **env)
        assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
        assert "Traceback" not in done.stderr
        return done.stdout

    def run(self, *arguments: str, stdin: str | None = None, **env: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [*PROGRAM, *arguments],
            env=self.env | env,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
            input=stdin,
        )

    def json(self, *arguments: str, code: int = 0) -> Any:
        found = self.here(arguments[0], "--json", *arguments[1:])
        assert found.exit_code == code, found.output
        return json.loads(found.stdout)

    def here(self, *arguments: str, **env: str) -> Result:
        """Run a command in this process."""
        found = CliRunner().invoke(app, list(arguments), env=self.env | env)
        assert found.exception is None or isinstance(found.exception, SystemExit), found.exception
        return found


@contextmanager
def running(folder: Path, *arguments: str, through: Sequence[str] = (), **env: str) -> Iterator[UpProcess]:
    """Everything on SQLite in a folder of its own, while the block lasts; `through` is a program that starts it."""
    port = free_port()
    known = {"HOLDFAST_DATA_DIR": str(folder), "HOLDFAST_PORT": str(port), "HOLDFAST_PROCESS_USER": "root"}
    with (folder / "up.log").open("ab") as log:
        process = subprocess.Popen(
            [*through, *PROGRAM, "up", *arguments], env={**os.environ, **known, **env}, stdout=log, stderr=log
        )
    running = UpProcess(folder, port, process)
    deadline = time.monotonic() + PATIENCE
    try:
        while running.here("workers", "--json").stdout.count('"live": true') != 1:
            assert process.poll() is None, (folder / "up.log").read_text()
            assert time.monotonic() < deadline, (folder / "up.log").read_text()
        yield running
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 0


def eventually(look: Any) -> Any:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        if answer := look():
            return answer
        time.sleep(0.1)  # Reason: the look is the signal; this only spaces the questions.
    raise AssertionError("never came true")
