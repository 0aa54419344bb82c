"""What `make setup` installs: the versions of constraints.txt, each wheel checked against a hash."""

import hashlib
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from scripts.requirements import CONSTRAINTS, FOLDER, ROOT, marker, needs, pins, roots

FILES = ("run", "dev", "zig")
ENTRY = re.compile(r"^([A-Za-z0-9][^\\\n]*?) \\\n((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", re.MULTILINE)


def entries(name: str) -> dict[str, Requirement]:
    """The packages of a file, by canonical name; those of `run` are a part of `dev`."""
    text = (FOLDER / f"{name}.txt").read_text()
    listed = [Requirement(entry) for entry, _ in ENTRY.findall(text)]
    found: dict[str, Requirement] = {canonicalize_name(one.name): one for one in listed}
    rest = ENTRY.sub("", text).splitlines()
    assert [line for line in rest if not line.startswith("#")] == (["-r run.txt"] if name == "dev" else [])
    return found | entries("run") if name == "dev" else found


@pytest.mark.parametrize("name", FILES)
def test_hashed_file_agrees_with_constraints_and_names_no_index(name: str) -> None:
    pinned = pins(CONSTRAINTS.read_text())
    for package, requirement in entries(name).items():
        assert str(requirement.specifier) == str(pinned[package].specifier), f"{package}: run `make requirements`"
    text = (FOLDER / f"{name}.txt").read_text()
    assert "://" not in text
    assert not re.search(r"--(extra-)?index-url|--find-links|--trusted-host|^-[if]\b", text, re.MULTILINE)


def test_every_decided_version_is_installed_somewhere() -> None:
    assert set(pins(CONSTRAINTS.read_text())) == set(entries("dev")) | set(entries("zig"))


@pytest.mark.parametrize("name", FILES)
def test_hashed_file_has_all_that_is_needed_on_every_python(name: str) -> None:
    """By the metadata of what is installed here: nothing is missing, nothing is spare, and the conditions fit."""
    wanted = {package: marker(pythons).removeprefix(" ; ") for package, pythons in needs(roots()[name]).items()}
    assert {package: str(one.marker or "") for package, one in entries(name).items()} == wanted


def wheel(folder: Path) -> Path:
    """A package that does nothing."""
    path = folder / "nothing-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("nothing.py", "")
        archive.writestr("nothing-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: nothing\nVersion: 1.0\n")
        archive.writestr(
            "nothing-1.0.dist-info/WHEEL",
            "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        archive.writestr("nothing-1.0.dist-info/RECORD", "")
    return path


def test_install_refuses_a_wrong_hash_and_a_missing_one(tmp_path: Path) -> None:
    """The real script with the real pip, on an index of one package."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "install", tmp_path / "scripts")
    (tmp_path / "requirements").mkdir()
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "env"], check=True)
    right = hashlib.sha256(wheel(tmp_path).read_bytes()).hexdigest()
    env = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}

    def install(line: str) -> str:
        (tmp_path / "requirements" / "dev.txt").write_text(line)
        done = subprocess.run(
            [tmp_path / "scripts" / "install", tmp_path / "env", "dev"],
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode != 0, "the last step always fails here: there is no project to install"
        return done.stdout + done.stderr

    installed = tmp_path / "env" / "lib" / f"python3.{sys.version_info[1]}" / "site-packages" / "nothing.py"
    assert "DO NOT MATCH THE HASHES" in install(f"nothing==1.0 --hash=sha256:{'0' * 64}\n")
    assert "hash" in install("nothing==1.0\n").lower()
    assert not installed.exists()
    install(f"nothing==1.0 --hash=sha256:{right}\n")
    assert installed.exists()
