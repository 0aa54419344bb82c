"""The supervisor's build: with the machine's compiler, with zig, and what it says when there is neither."""

import contextlib
import os
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.runner import supervisor
from holdfast.runner.supervisor import build
from holdfast.runner.supervisor.protocol import ExitStatus
from tests.support.supervisor_harness import SupervisedAttempt, shell

LOAD, DYNAMIC, INTERPRETER, STACK, RELRO = 1, 2, 3, 0x6474E551, 0x6474E552
"""Kinds of program headers; only a dynamic program names an interpreter."""
POSITION_INDEPENDENT = 3
EXECUTABLE = 1
TEXT_RELOCATIONS, FLAGS_1, NOW = 22, 0x6FFFFFFB, 1
"""Entries of the dynamic section, and a flag in one."""


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A machine on which no compiler is found."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    build.system_compiler.cache_clear()
    yield
    build.system_compiler.cache_clear()


def assert_works(program: Path, tmp_path: Path) -> None:
    attempt = SupervisedAttempt(tmp_path / "attempt", program)
    try:
        assert attempt.run(*shell("echo hello; exit 3")).code == 3
        assert attempt.output() == b"hello\n"
    finally:
        attempt.clean()


def assert_sees_a_full_disk(program: Path, tmp_path: Path) -> None:
    """C libraries differ in how they report that no space can be reserved."""
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["/bin/mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", disk], check=True)
    attempt = SupervisedAttempt(disk / "attempt", program)
    try:
        attempt.write(*shell("echo ran"))
        with contextlib.suppress(OSError), (disk / "filler").open("wb", buffering=0) as filler:
            while True:
                filler.write(b"x" * 4096)
        attempt.supervise()
        assert attempt.status() == ExitStatus.LEFT_FULL
    finally:
        attempt.clean()
        subprocess.run(["/bin/umount", disk], check=True)


def test_built_program_is_static() -> None:
    """Proves R24: static, so that it can be PID 1 of any image."""
    program = supervisor.path().read_bytes()
    (start,), (size, count) = struct.unpack_from("<Q", program, 32), struct.unpack_from("<HH", program, 54)
    kinds = {struct.unpack_from("<I", program, start + i * size)[0] for i in range(count)}
    assert LOAD in kinds
    assert INTERPRETER not in kinds


@pytest.mark.skipif(build.system_compiler() is None, reason="no C compiler here that links statically")
def test_it_is_hardened_as_far_as_the_compiler_can(tmp_path: Path) -> None:
    """At any address, with its relocations read-only, all bound at the start, and no stack that can be executed."""
    trial = tmp_path / "trial.c"
    trial.write_text("int main(void) { return 0; }\n")
    if problem := build._compile(build.system_compiler() or (), [trial], tmp_path / "trial", build.HARDENING[0]):
        pytest.skip(f"no C compiler here that makes static programs for any address: {problem}")
    program = build.build(tmp_path / "program").read_bytes()
    (kind,), (start,) = struct.unpack_from("<H", program, 16), struct.unpack_from("<Q", program, 32)
    size, count = struct.unpack_from("<HH", program, 54)
    headers = [struct.unpack_from("<IIQQQQ", program, start + i * size) for i in range(count)]
    segments = {header[0]: header for header in headers}
    assert kind == POSITION_INDEPENDENT
    assert RELRO in segments
    assert not segments[STACK][1] & EXECUTABLE
    (_, _, offset, _, _, length) = segments[DYNAMIC]
    entries = dict(struct.iter_unpack("<QQ", program[offset : offset + length]))
    assert entries[FLAGS_1] & NOW
    assert INTERPRETER not in segments
    assert TEXT_RELOCATIONS not in entries


@pytest.mark.skipif(build.system_compiler() is None, reason="no C compiler here that links statically")
def test_a_compiler_without_hardening_still_builds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (name, *arguments) = build.system_compiler() or ()
    poor = tmp_path / "poor-cc"
    refuse = 'case "$*" in *-static-pie*|*FORTIFY*|*stack-protector*) echo unknown >&2; exit 1;; esac'
    poor.write_text(f'#!/bin/sh\n{refuse}\nexec {name} {" ".join(arguments)} "$@"\n')
    poor.chmod(0o755)
    monkeypatch.setattr(build, "system_compiler", lambda: (str(poor),))
    assert_works(build.build(tmp_path / "program"), tmp_path)


@pytest.mark.skipif(build.system_compiler() is None, reason="no C compiler here that links statically")
def test_machine_compiler_builds_it(tmp_path: Path) -> None:
    """Proves R24."""
    assert_works(build.build(tmp_path / "program"), tmp_path)


def test_zig_builds_it_where_no_compiler_is(tmp_path: Path, no_compiler: None) -> None:
    """Proves R24."""
    assert build.system_compiler() is None
    program = build.build(tmp_path / "program")
    assert_works(program, tmp_path)
    if os.geteuid() == 0:
        assert_sees_a_full_disk(program, tmp_path)


def test_compiler_that_cannot_link_statically_is_not_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, no_compiler: None
) -> None:
    """Proves R24: a machine may have a compiler without a static C library."""
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\necho 'cannot find -lc' >&2; exit 1\n")
    broken.chmod(0o755)
    assert build.system_compiler() is None


def test_missing_compilers_error_says_what_to_do(
    tmp_path: Path, no_compiler: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proves R24."""
    monkeypatch.setattr(build, "zig_compiler", lambda: None)
    with pytest.raises(
        build.BuildFailed, match="install a C compiler with a static C library, or `pip install ziglang`"
    ):
        build.build(tmp_path / "program")
    assert list(tmp_path.iterdir()) == []


def test_source_compiles_without_a_warning(tmp_path: Path) -> None:
    if (compiler := build.system_compiler()) is None:
        pytest.skip("no C compiler here")
    strict = ["-std=gnu11", "-O2", "-Wall", "-Wextra", "-Wshadow", "-Wconversion", "-Wvla", "-Wmissing-prototypes"]
    build.write_protocol(tmp_path)
    subprocess.run([*compiler, *strict, "-Werror", "-I", tmp_path, "-o", os.devnull, *build.SOURCES], check=True)
