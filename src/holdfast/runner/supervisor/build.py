"""Build the supervisor: with the machine's C compiler if it can link statically, else with PyPI's `ziglang`.

Standard library only: the package's build loads this file before anything is installed.
"""

import functools
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).absolute().parent
SOURCE = HERE / "supervisor.c"
TARGET = HERE / "holdfast-supervisor"
FLAGS = ("-std=gnu11", "-Os", "-static", "-s", "-fstack-protector-strong", "-Wall", "-Wextra")


class BuildFailed(Exception):
    """No compiler could build the supervisor."""


def machine() -> str:
    """Return the processor's name as compilers and wheel tags spell it."""
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(platform.machine().lower(), platform.machine().lower())


def _compile(command: Sequence[str], source: Path, target: Path, flags: Sequence[str] = FLAGS) -> str:
    """Compile into a temporary file and rename it; the answer is what went wrong, or nothing."""
    handle, name = tempfile.mkstemp(dir=target.parent.absolute(), prefix=".build-")
    os.close(handle)
    try:
        # From everywhere alike: zig's cache of the C library, half a minute of work, knows it by the way from here.
        done = subprocess.run(
            [*command, *flags, "-o", name, str(source)], capture_output=True, text=True, check=False, cwd="/"
        )
        if done.returncode == 0:
            Path(name).chmod(0o755)
            Path(name).replace(target)
            return ""
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
            if not _compile(command, trial, Path(folder, "trial")):
                return command
    return None


def zig_compiler() -> tuple[str, ...] | None:
    """Return zig as a C compiler for a static musl program, if `ziglang` is installed."""
    if importlib.util.find_spec("ziglang") is None:
        return None
    return (sys.executable, "-m", "ziglang", "cc", "-target", f"{machine()}-linux-musl")


def build(target: Path = TARGET) -> Path:
    """Build the supervisor, and say which compilers failed and why if none can."""
    problems = []
    for command in (system_compiler(), zig_compiler()):
        if command is None:
            continue
        problem = _compile(command, SOURCE, target)
        if not problem:
            return target
        problems.append(f"{' '.join(command)}: {problem}")
    hint = "install a C compiler with a static C library, or `pip install ziglang`"
    raise BuildFailed("\n".join(["the supervisor could not be built", *problems, hint]))


if __name__ == "__main__":
    sys.stdout.write(f"{build()}\n")
