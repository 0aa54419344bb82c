"""Private copies of the checkout. A mutant is only ever written into one of these."""

import contextlib
import os
import shutil
import subprocess
import sysconfig
import tempfile
import threading
import venv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from scripts.mutation.bounded import TIMED_OUT
from scripts.mutation.mutant import Mutant
from tests.support.cluster import cluster

ROOT = Path(__file__).parents[2]
BUILT = ("src/holdfast/runner/supervisor/holdfast-supervisor",)
"""What the tests need and git does not list."""


@dataclass(frozen=True)
class Result:
    """How a test ended: passed, failed or skipped; and in how many seconds, setup and teardown included."""

    test: str
    outcome: str
    seconds: float
    quick: bool


@dataclass(frozen=True)
class Ran:
    """What became of a run of pytest."""

    code: int
    results: Sequence[Result]
    output: str

    @property
    def timed_out(self) -> bool:
        return self.code == TIMED_OUT


@dataclass(frozen=True)
class Tree:
    """A copy of the checkout, with a Postgres cluster for its tests."""

    root: Path
    server: str
    running: list[subprocess.Popen[str]] = field(default_factory=list)
    stopped: threading.Event = field(default_factory=threading.Event)

    @contextlib.contextmanager
    def holding(self, mutant: Mutant) -> Iterator[None]:
        """Put a mutant in, and take it out again."""
        path = self.root / mutant.path
        source = path.read_bytes()
        try:
            self._write(path, mutant.edit.applied(source))
            yield
        finally:
            self._write(path, source)

    def _write(self, path: Path, source: bytes) -> None:
        path.write_bytes(source)
        # Python compares the time in seconds, and the size: it could take the compiled file for that of the mutant.
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            compiled.unlink()

    def pytest(self, *arguments: str, seconds: float, environment: Mapping[str, str] | None = None) -> Ran:
        """Run tests of this tree; after `seconds` it is ended, with everything that it started."""
        results = self.root.parent / f"{self.root.name}.results"
        results.write_text("")
        python = str(self.root / ".venv/bin/python")
        command = [
            *(python, "-m", "scripts.mutation.bounded", str(seconds)),
            *(python, "-m", "pytest", "-q", "-p", "scripts.mutation.plugin", "--tb=short", *arguments),
        ]
        variables = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "HOLDFAST_"))},
            "HOLDFAST_TEST_POSTGRES_URL": self.server,
            "MUTATION_RESULTS": str(results),
            **(environment or {}),
        }
        process = subprocess.Popen(
            command, cwd=self.root, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.running.append(process)
        if self.stopped.is_set():
            process.terminate()
        output, _ = process.communicate()
        self.running.remove(process)
        return Ran(process.returncode, _read(results), output)

    def stop(self) -> None:
        """End what runs in this tree, and what would be started in it; `bounded` ends the descendants."""
        self.stopped.set()
        for process in list(self.running):
            process.terminate()


def _read(path: Path) -> list[Result]:
    """Add up the setup, call and teardown of each test, in the order in which they ran."""
    found: dict[str, Result] = {}
    for line in path.read_text().splitlines():
        test, outcome, seconds, quick = line.split("\t")
        before = found.get(test)
        total = float(seconds) + (before.seconds if before else 0.0)
        worst = before.outcome if before and before.outcome != "passed" else outcome
        found[test] = Result(test, worst, total, quick == "1")
    return list(found.values())


@contextlib.contextmanager
def trees(count: int) -> Iterator[list[Tree]]:
    """Make this many copies, each with a cluster; remove them at the end."""
    folder = Path(tempfile.mkdtemp(prefix="holdfast-mutation-"))
    folder.chmod(0o755)  # Some tests run programs as other users.
    try:
        with contextlib.ExitStack() as stack:
            yield [copied(folder / f"tree-{n}", stack.enter_context(cluster())) for n in range(count)]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def copied(root: Path, server: str) -> Tree:
    """Copy what git knows or would add, as it is in the checkout now, and what was built."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    for name in (*filter(None, listed), *BUILT):
        source, target = ROOT / name, root / name
        if source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)
    make_environment(root)
    return Tree(root, server)


def make_environment(root: Path) -> None:
    """Give a copy a Python whose `holdfast` is its own, also for programs that a test starts with no environment."""
    venv.create(root / ".venv", symlinks=True)
    (packages,) = (root / ".venv/lib").glob("python*/site-packages")
    (packages / "tree.pth").write_text(f"{root / 'src'}\n{sysconfig.get_path('purelib')}\n")
    command = root / ".venv/bin/holdfast"
    command.write_text(f"#!{root}/.venv/bin/python\nfrom holdfast.cli.main import app\n\napp()\n")
    command.chmod(0o755)
