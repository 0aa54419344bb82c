"""Where the peers' own programs run: virtual environments and a folder of Node packages, made once in a cache folder.

Nothing here touches the project's environment. What cannot be made raises `Missing` with the reason, and the run goes
on without the peers that need it.
"""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
REQUIREMENTS = HERE / "requirements.txt"
PACKAGE = HERE / "node" / "package.json"
NEEDED_BY_OBAN = (3, 12)
NEWER = ("3.12", "3.13", "3.14")


class Missing(RuntimeError):
    """A peer cannot be measured here, and why."""


def cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "holdfast" / "bench-peers"


def python() -> Path:
    """The Python of the peers: the same version as the harness, which is that of holdfast."""
    return _environment(sys.executable)


def newer_python() -> Path:
    """A Python for oban, which needs 3.12: that of the harness if it is new enough."""
    if sys.version_info[:2] >= NEEDED_BY_OBAN:
        return python()
    for version in NEWER:
        found = _find(version)
        if found is not None:
            return _environment(found)
    raise Missing("needs Python 3.12 or newer, and none was found on the path or with pyenv")


def _find(version: str) -> str | None:
    """The interpreter itself: a name on the path may be a shim of pyenv that leads nowhere."""
    known = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python{version}"))
    for candidate in (shutil.which(f"python{version}"), *(str(path) for path in known)):
        if candidate is None:
            continue
        said = subprocess.run(
            [candidate, "-c", "import sys; print(sys.executable)"], check=False, capture_output=True, text=True
        )
        if said.returncode == 0:
            return said.stdout.strip()
    return None


def _environment(interpreter: str) -> Path:
    version = _run([interpreter, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]).strip()
    folder = cache() / f"python{version}-{_digest(REQUIREMENTS)}"
    made = folder / "bin" / "python"
    if not (folder / ".ready").exists():
        _run([interpreter, "-m", "venv", "--clear", str(folder)])
        _run([str(made), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-r", str(REQUIREMENTS)])
        (folder / ".ready").touch()
    return made


def node() -> tuple[Path, Path]:
    """Return the folder with the Node peers' packages and programs, and the Node that runs them.

    The newest releases of both peers need Node 22, which npm installs as a package like any other.
    """
    if shutil.which("npm") is None or shutil.which("node") is None:
        raise Missing("Node.js and npm are missing: install Node 20 or newer with npm")
    folder = cache() / f"node-{_digest(PACKAGE)}"
    if not (folder / ".ready").exists():
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(PACKAGE, folder)
        _run(["npm", "install", "--no-package-lock", "--no-audit", "--no-fund", "--silent"], folder)
        (folder / ".ready").touch()
    for program in PACKAGE.parent.glob("*.mjs"):
        shutil.copy(program, folder)
    return folder, folder / "node_modules" / "node" / "bin" / "node"


def redis() -> str:
    """Where Redis is."""
    found = shutil.which("redis-server")
    if found is None:
        raise Missing("Redis is missing: `scripts/need-redis` installs Debian's redis-server")
    return found


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:12]


def _run(command: list[str], folder: Path | None = None) -> str:
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=folder)
    if done.returncode != 0:
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-3:]
        raise Missing(f"`{' '.join(command[:4])} …` failed: {' '.join(last)}")
    return done.stdout
