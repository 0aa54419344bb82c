"""The supervisor's build: with the machine's compiler, with zig, and what it says when there is neither."""

import os
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.runner import supervisor
from holdfast.runner.supervisor import build
from tests.attempt import Attempt, shell

LOAD, INTERPRETER = 1, 3
"""Kinds of program headers; only a dynamic program names an interpreter."""


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A machine on which no compiler is found."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    build.system_compiler.cache_clear()
    yield
    build.system_compiler.cache_clear()


def assert_works(program: Path, tmp_path: Path) -> None:
    attempt = Attempt(tmp_path / "attempt", program)
    try:
        assert attempt.run(*shell("echo hello; exit 3")).code == 3
        assert attempt.output() == b"hello\n"
    finally:
        attempt.clean()


def test_built_program_needs_nothing_of_the_machine() -> None:
    """R24: static, so that it can be PID 1 of any image."""
    program = supervisor.path().read_bytes()
    (start,), (size, count) = struct.unpack_from("<Q", program, 32), struct.unpack_from("<HH", program, 54)
    kinds = {struct.unpack_from("<I", program, start + i * size)[0] for i in range(count)}
    assert LOAD in kinds
    assert INTERPRETER not in kinds


@pytest.mark.skipif(build.system_compiler() is None, reason="no C compiler here that links statically")
def test_machine_compiler_builds_it(tmp_path: Path) -> None:
    """R24."""
    assert_works(build.build(tmp_path / "program"), tmp_path)


def test_zig_builds_it_where_no_compiler_is(tmp_path: Path, no_compiler: None) -> None:
    """R24."""
    assert build.system_compiler() is None
    assert_works(build.build(tmp_path / "program"), tmp_path)


def test_compiler_that_cannot_link_statically_is_not_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, no_compiler: None
) -> None:
    """R24: a machine may have a compiler without a static C library."""
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\necho 'cannot find -lc' >&2; exit 1\n")
    broken.chmod(0o755)
    assert build.system_compiler() is None


def test_missing_compilers_are_said_with_what_to_do(
    tmp_path: Path, no_compiler: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R24."""
    monkeypatch.setattr(build, "zig_compiler", lambda: None)
    with pytest.raises(
        build.BuildFailed, match="install a C compiler with a static C library, or `pip install ziglang`"
    ):
        build.build(tmp_path / "program")
    assert list(tmp_path.iterdir()) == []


def test_source_compiles_without_a_warning(tmp_path: Path) -> None:
    if (compiler := build.system_compiler()) is None:
        pytest.skip("no C compiler here")
    strict = ["-std=gnu11", "-O2", "-Wall", "-Wextra", "-Wshadow", "-Wconversion", "-Wvla", "-Werror"]
    subprocess.run([*compiler, *strict, "-o", os.devnull, build.SOURCE], check=True)
