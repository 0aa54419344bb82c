"""Build the supervisor: with the machine's C compiler if it can link statically, else with PyPI's `ziglang`.

All C files in this folder make one program. The header that they share with Python, `protocol.h`, is written for each
build from `protocol.py` into a temporary folder. Standard library only: the package's build loads this file before
anything is installed.
"""

import functools
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import get_args

HERE = Path(__file__).absolute().parent
SOURCES = tuple(sorted(HERE.glob("*.c")))
TARGET = HERE / "holdfast-supervisor"
FLAGS = ("-std=gnu11", "-Os", "-s", "-Wall", "-Wextra")
HARDENING = (
    (
        "-static-pie",
        "-fPIE",
        "-fstack-protector-strong",
        "-U_FORTIFY_SOURCE",
        "-D_FORTIFY_SOURCE=2",
        "-Wl,-z,relro,-z,now",
    ),
    ("-static", "-fstack-protector-strong", "-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=2", "-Wl,-z,relro,-z,now"),
    ("-static", "-fstack-protector-strong"),
    ("-static",),
)
"""From the strictest to the weakest: a compiler or its C library may not support all of them."""
NUMBERS = ("VERSION", "MAX_TASKS", "MAX_NAME", "MAX_WORD", "MAX_LAUNCH", "MAX_REPORTED_LOG", "SPARES", "SPARE_BYTES")
WORDS = (
    "SpecKey",
    "ProgramKey",
    "TaskKey",
    "CommandKey",
    "LaunchKey",
    "Verb",
    "StopKind",
    "ServiceKind",
    "ClockName",
    "Limit",
)
"""The sets of words in `protocol.py`. From the word "uid" in `SpecKey`, C gets SPEC_KEY_UID and SPEC_KEY_COUNT."""


class BuildFailed(Exception):
    """No compiler could build the supervisor."""


def machine() -> str:
    """Return the processor's name as compilers and wheel tags spell it."""
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(platform.machine().lower(), platform.machine().lower())


def _protocol() -> ModuleType:
    """Load the protocol by its path; the package may not be installed yet."""
    spec = importlib.util.spec_from_file_location("holdfast_supervisor_protocol", HERE / "protocol.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _protocol_lines() -> Iterator[str]:
    protocol = _protocol()
    yield "/* Written by build.py from protocol.py. */"
    yield "#pragma once"
    yield f'#define VERSION_TEXT "{protocol.VERSION}"'
    for name in NUMBERS:
        yield f"#define {name} {getattr(protocol, name)}"
    for name in ("SPEC_TITLE", "COMMAND_TITLE", "LAUNCH_TITLE"):
        yield f'#define {name} "{getattr(protocol, name)}"'
    for name in WORDS:
        prefix = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).upper()
        words = get_args(getattr(protocol, name))
        yield f"#define {prefix}_COUNT {len(words)}"
        yield from (f'#define {prefix}_{word.upper()} "{word}"' for word in words)
    yield from (f"#define {status.name} {status.value}" for status in protocol.ExitStatus)
    yield from (f"#define REPORT_{report.name} {report.value}" for report in protocol.LaunchReport)
    causes = ["none", *protocol.ExitCause]
    yield f"enum cause {{ {', '.join(f'CAUSE_{cause.upper()}' for cause in causes)}, CAUSE_COUNT }};"
    yield "#define CAUSE_NAMES " + ", ".join(f'"{cause}"' for cause in causes)


def write_protocol(folder: Path) -> None:
    """Write `protocol.h` into a folder, which a compiler then needs as `-I`."""
    Path(folder, "protocol.h").write_text("\n".join([*_protocol_lines(), ""]))


def _compile(
    command: Sequence[str],
    sources: Sequence[str | Path],
    target: Path,
    flags: Sequence[str] = (*FLAGS, "-static"),
    check: Callable[[Path], str] = lambda program: "",
) -> str:
    """Compile into a temporary file and rename it. Return what went wrong, or an empty text."""
    handle, name = tempfile.mkstemp(dir=target.parent.absolute(), prefix=".build-")
    os.close(handle)
    try:
        # A fixed current folder: zig's cache of the C library, which takes half a minute to build, depends on it.
        done = subprocess.run(
            [*command, *flags, "-o", name, *map(str, sources)], capture_output=True, text=True, check=False, cwd="/"
        )
        if done.returncode == 0:
            Path(name).chmod(0o755)
            problem = check(Path(name))
            if not problem:
                Path(name).replace(target)
            return problem
        return done.stderr or f"{command[0]} ended with {done.returncode}"
    except OSError as error:
        return str(error)
    finally:
        Path(name).unlink(missing_ok=True)


@functools.cache
def system_compiler() -> tuple[str, ...] | None:
    """Return the machine's compiler, if it builds static programs here."""
    for name in filter(None, (os.environ.get("CC"), "cc", "gcc", "clang")):
        command = tuple(name.split())
        if shutil.which(command[0]) is None:
            continue
        with tempfile.TemporaryDirectory() as folder:
            trial = Path(folder, "trial.c")
            trial.write_text('#include <stdio.h>\nint main(void) { return puts("") < 0; }\n')
            if not _compile(command, [trial], Path(folder, "trial")):
                return command
    return None


def zig_compiler() -> tuple[str, ...] | None:
    """Return zig as a C compiler for a static musl program, if `ziglang` is installed."""
    if importlib.util.find_spec("ziglang") is None:
        return None
    return (sys.executable, "-m", "ziglang", "cc", "-target", f"{machine()}-linux-musl")


def _build_hardened(command: Sequence[str], target: Path) -> str:
    """Build with the strictest hardening that gives a working program. Return what went wrong, or an empty text."""
    problem = ""
    with tempfile.TemporaryDirectory() as folder:
        write_protocol(Path(folder))
        for hardening in HARDENING:
            # A program that links may not start: a C library may lack the start-up code of static-pie programs.
            problem = _compile(command, SOURCES, target, (*FLAGS, *hardening, "-I", folder), check=_runs)
            if not problem:
                break
    return problem


def _runs(program: Path) -> str:
    try:
        done = subprocess.run([program, "--version"], capture_output=True, check=False, timeout=60)
    except OSError as error:
        return str(error)
    return "" if done.returncode == 0 else f"what it built ended with {done.returncode}"


def build(target: Path = TARGET) -> Path:
    """Build the supervisor. If no compiler can, raise BuildFailed with the errors of each."""
    problems = []
    for command in (system_compiler(), zig_compiler()):
        if command is None:
            continue
        problem = _build_hardened(command, target)
        if not problem:
            return target
        problems.append(f"{' '.join(command)}: {problem}")
    hint = "install a C compiler with a static C library, or `pip install ziglang`"
    raise BuildFailed("\n".join(["the supervisor could not be built", *problems, hint]))


if __name__ == "__main__":
    sys.stdout.write(f"{build()}\n")
