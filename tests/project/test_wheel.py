"""The package as a wheel in an empty environment: built with the machine's compiler, and with zig where none is."""

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from holdfast.runner.supervisor import build

ROOT = Path(__file__).parents[2]
PARTS = ("src", "pyproject.toml", "hatch_build.py", "README.md", "LICENSE")
PROGRAM = "holdfast/runner/supervisor/holdfast-supervisor"
COMPILERS = ("cc", "gcc", "clang", "c99", "tcc")


@pytest.fixture(scope="module")
def bare_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A PATH with everything that this machine's has, but no compiler."""
    folder = tmp_path_factory.mktemp("bin")
    for place in reversed(os.environ["PATH"].split(os.pathsep)):
        for program in Path(place).glob("*"):
            if not any(name in program.name for name in COMPILERS) and program.is_file():
                (folder / program.name).unlink(missing_ok=True)
                (folder / program.name).symlink_to(program)
    assert all(shutil.which(name, path=str(folder)) is None for name in COMPILERS)
    return str(folder)


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An environment with nothing in it, not even pip."""
    folder = tmp_path_factory.mktemp("empty") / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    yield folder
    shutil.rmtree(folder)


def pip(*arguments: str | Path, path: str, cwd: Path) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("HOLDFAST_", "CC"))}
    env |= {"PATH": path, "PIP_CONSTRAINT": str(ROOT / "constraints.txt"), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "pip", *arguments], env=env, cwd=cwd, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def wheel_of(folder: Path, path: str) -> Path:
    """Build from a copy of the sources that has no supervisor yet, with the tools that are here."""
    source = folder / "source"
    source.mkdir()
    for part in PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(
                ROOT / part, source / part, ignore=shutil.ignore_patterns("__pycache__", Path(PROGRAM).name)
            )
        else:
            shutil.copy(ROOT / part, source)
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, source, path=path, cwd=folder)
    (wheel,) = folder.glob("holdfast-*.whl")
    return wheel


def supervisor_in(wheel: Path) -> bytes:
    with zipfile.ZipFile(wheel) as archive:
        mode = archive.getinfo(PROGRAM).external_attr >> 16
        assert mode & 0o111, oct(mode)
        return archive.read(PROGRAM)


def run_a_job(env: Path, folder: Path, path: str) -> None:
    """Run a job with only what was installed."""
    shell = {"PATH": f"{env / 'bin'}{os.pathsep}{path}", "HOME": str(folder), "HOLDFAST_PROCESS_USER": "root"}

    def holdfast(*arguments: str) -> str:
        done = subprocess.run(
            ["holdfast", *arguments], env=shell, cwd=folder, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    holdfast("migrate")
    command = "import asyncio; from holdfast.store import open_store\nasync def main():\n  {}\nasyncio.run(main())"
    opened = "async with await open_store('sqlite:///holdfast-data/holdfast.db') as s: "
    submit = "print((await s.jobs.submit({'runner': 'process', 'spec': {'command': ['echo', 'hi']}})).id)"
    job = python(env, command.format(opened + submit), folder)
    holdfast("worker", "--once")
    assert python(env, command.format(f"{opened}print((await s.jobs.get('{job}')).status)"), folder) == "succeeded"


def python(env: Path, text: str, folder: Path) -> str:
    return subprocess.run(
        [env / "bin" / "python", "-I", "-c", text], cwd=folder, capture_output=True, text=True, check=True
    ).stdout.strip()


def kept(tmp_path: Path, names: Sequence[str]) -> list[Path]:
    folders = [tmp_path / name for name in names]
    for folder in folders:
        folder.mkdir()
    return folders


@pytest.mark.timeout(900)  # It installs all packages and may build zig's C library, beside whatever else runs.
@pytest.mark.skipif(build.system_compiler() is None, reason="no C compiler here that links statically")
def test_wheels_built_with_and_without_a_compiler_run_a_job_in_an_empty_environment(
    empty: Path, bare_path: str, tmp_path: Path
) -> None:
    """Proves R24."""
    usual, bare, first, second = kept(tmp_path, ("usual", "bare", "first", "second"))
    compiled, zigged = wheel_of(usual, os.environ["PATH"]), wheel_of(bare, bare_path)
    assert "py3-none-manylinux" in compiled.name
    assert compiled.name == zigged.name
    programs = {hashlib.sha256(supervisor_in(wheel)).hexdigest() for wheel in (compiled, zigged)}
    assert len(programs) == 2, "the same compiler built both"
    into = ("--python", empty / "bin" / "python", "install", "--quiet", "--no-compile")
    pip(*into, compiled, path=bare_path, cwd=tmp_path)
    run_a_job(empty, first, bare_path)
    pip(*into, "--no-deps", "--force-reinstall", zigged, path=bare_path, cwd=tmp_path)
    run_a_job(empty, second, bare_path)
