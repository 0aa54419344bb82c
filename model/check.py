"""Checks the model of the lease protocol with Spin: `python -m model.check`; with the name of a variant: how it fails.

Spin makes a C program of `lease.pml` that visits every state which can be reached. The protocol as it should be must
pass with a search that left nothing out, and every way to break it must be caught. The page to read is docs/model.md.
"""

import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("lease.pml")
DEPTH = 2000
MEGABYTES = 2000

VARIANTS = {
    "NO_FENCE": 2,
    "NO_TOKEN_AT_REAP": 2,
    "ADOPT_RESTARTS": 1,
    "START_NOT_EXCLUSIVE": 1,
    "NO_START_BY": 2,
    "NO_TOMBSTONE": 4,
    "SUPERVISOR_IGNORES_TOKEN": 2,
    "CANCEL_CLEARED_AT_CLAIM": 1,
    "REQUEUE_IGNORES_STOP": 2,
    "LANE_LOOKS_BEFORE_LOCK": 8,
    "NO_REAP": 1,
    "ENDS_WITHOUT_MARK": 1,
    "SWEEP_LEAVES_NO_MARK": 4,
    "LOCK_IS_RUNNING": 2,
}
"""Ways to break the protocol, and the scene in which each is caught."""


@dataclass(frozen=True)
class Verdict:
    """What a search found."""

    errors: int
    states: int
    depth: int
    megabytes: float
    seconds: float
    complete: bool
    """Every state that can be reached was visited."""
    unused: tuple[str, ...]
    """Lines of the model that no run used."""
    broken: str
    """The first property that did not hold."""
    story: str
    """How it came to that, in the model's own sentences."""


def missing() -> str | None:
    """Say what a check needs and is not installed."""
    return next((program for program in ("spin", "gcc") if shutil.which(program) is None), None)


def check_safety() -> Verdict:
    """Everything that must never happen, in all scenes."""
    return check(optimise="-O1")


def check_ends() -> Verdict:
    """That every job ends, in all scenes."""
    return check("ENDS", optimise="-O1")


def check_variant(name: str, *, shortest: bool = False) -> Verdict:
    """A protocol broken in one way; with `shortest`, by the shortest story, which takes longer to find."""
    return check(name, f"SCENE={VARIANTS[name]}", shortest=shortest)


def check(*defines: str, optimise: str = "-O0", shortest: bool = False) -> Verdict:
    began = time.monotonic()
    flags = [f"-D{define}" for define in defines]
    ends = "ENDS" in defines
    kind = [*([] if ends else ["-DSAFETY"]), *(["-DBFS"] if shortest else []), f"-DMEMLIM={MEGABYTES}"]
    with tempfile.TemporaryDirectory(prefix="holdfast-model-") as place:
        folder = Path(place)
        shutil.copy(SOURCE, folder)
        _run(folder, "spin", *flags, "-a", SOURCE.name)
        _run(folder, "gcc", "-w", optimise, *kind, "-o", "pan", "pan.c")
        out = _run(folder, "./pan", f"-m{DEPTH}", "-w22", *(["-a"] if ends else []))
        failed = (folder / f"{SOURCE.name}.trail").exists()
        told = _run(folder, "spin", *flags, "-t", SOURCE.name) if failed else ""
    return Verdict(
        errors=int(_find(r"errors: (\d+)", out)),
        states=int(_find(r"(\d+) states, stored", out)),
        depth=int(_find(r"depth reached (\d+)", out)),
        megabytes=float(_find(r"([\d.]+)\s+total actual memory usage", out)),
        seconds=time.monotonic() - began,
        complete="Search not completed" not in out and "too small" not in out and "out of memory" not in out,
        unused=tuple(line for line in re.findall(r"lease\.pml:\d+, state \d+, .*", out) if "-end-" not in line),
        broken=_broken(told) if failed else "",
        story=_story(told),
    )


def _broken(told: str) -> str:
    """The property that a trail ends with: what is said behind the assertion."""
    found = re.search(r"lease\.pml:(\d+), Error: assertion violated", told)
    if found is None:
        return "not every job ends"
    line = SOURCE.read_text().splitlines()[int(found[1]) - 1]
    return line.partition("/*")[2].partition("*/")[0].strip() or line.strip()


def _story(told: str) -> str:
    lines = told.partition("spin: trail ends")[0].splitlines()
    return "\n".join(line.strip() for line in lines if line[:1].isspace())


def _find(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    if found is None:
        raise RuntimeError(f"no {pattern!r} in what Spin said:\n{text}")
    return found[1]


def _run(folder: Path, *command: str) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != 0 and command[0] != "./pan":
        raise RuntimeError(f"{' '.join(command)}:\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def _all() -> Iterator[tuple[str, Verdict, bool]]:
    safety = check_safety()
    yield "the protocol is safe", safety, safety.errors == 0 and safety.complete and not safety.unused
    ends = check_ends()
    yield "every job ends", ends, ends.errors == 0 and ends.complete
    for name in VARIANTS:
        verdict = check_variant(name)
        yield name, verdict, verdict.errors == 1


def main(names: list[str]) -> int:
    if (program := missing()) is not None:
        print(f"{program} is missing: install Debian's `spin` and `gcc`")
        return 1
    if unknown := set(names) - VARIANTS.keys():
        print(f"no such variant: {', '.join(sorted(unknown))}; there are {', '.join(VARIANTS)}")
        return 1
    for name in names:
        verdict = check_variant(name, shortest=True)
        print(f"{name}\n\n{verdict.story}\n\nbroken: {verdict.broken}\n")
    if names:
        return 0
    wrong = 0
    for name, verdict, good in _all():
        wrong += not good
        numbers = f"{verdict.states:>9} states {verdict.megabytes:>5.0f} MB {verdict.seconds:>6.1f} s"
        print(f"{'ok' if good else 'WRONG':6}{name:26}{numbers}  {verdict.broken and 'caught: ' + verdict.broken}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
