"""Checks the model of the lease protocol with Spin: `python -m model.check`, or `… VARIANT` for the story of its failure.

Spin turns `lease.pml` into a C program that visits every state that can be reached. The protocol as it should be must pass,
with the search complete; each way of breaking it must be caught.
"""

import re
import shutil
import subprocess
import sys
import tempfile
import time
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
    """What a search found. `complete`: every reachable state was visited, every part of the model was used."""

    errors: int
    states: int
    depth: int
    megabytes: float
    seconds: float
    complete: bool
    broken: str
    story: str


def missing() -> str | None:
    """What is not installed that a check needs."""
    return next((program for program in ("spin", "gcc") if shutil.which(program) is None), None)


def check(*defines: str, ltl: bool = False, story: bool = False, optimise: str = "-O1") -> Verdict:
    """Search all states of the model, broken in these ways; with `story`, look for the shortest way to a failure."""
    began = time.monotonic()
    flags = [f"-D{define}" for define in defines]
    with tempfile.TemporaryDirectory(prefix="holdfast-model-") as place:
        folder = Path(place)
        shutil.copy(SOURCE, folder)
        _run(folder, "spin", *flags, *(["-DENDS"] if ltl else []), "-a", SOURCE.name)
        kind = [] if ltl else ["-DSAFETY"]
        _run(folder, "gcc", "-w", optimise, *kind, *(["-DBFS"] if story else []), f"-DMEMLIM={MEGABYTES}", "-o", "pan", "pan.c")
        out = _run(folder, "./pan", f"-m{DEPTH}", "-w22", *(["-a"] if ltl else []))
        trail = (folder / f"{SOURCE.name}.trail").exists()
        told = _run(folder, "spin", *flags, *(["-DENDS"] if ltl else []), "-t", SOURCE.name) if trail else ""
    return Verdict(
        errors=int(_find(r"errors: (\d+)", out)),
        states=int(_find(r"(\d+) states, stored", out)),
        depth=int(_find(r"depth reached (\d+)", out)),
        megabytes=float(_find(r"([\d.]+)\s+total actual memory usage", out)),
        seconds=time.monotonic() - began,
        complete="Search not completed" not in out and "too small" not in out and not _unused(out),
        broken=_find(r"pan:1: (.*) \(at depth", out, "") if trail else "",
        story="\n".join(line.strip() for line in told.splitlines() if re.match(r"\s+\S", line) and "proc" not in line),
    )


def _unused(out: str) -> list[str]:
    """Parts of the model that were never used, but for the ends of loops that have none."""
    return [line for line in re.findall(r"lease\.pml:\d+, state \d+, .*", out) if "-end-" not in line]


def _find(pattern: str, text: str, default: str | None = None) -> str:
    found = re.search(pattern, text)
    if found is None and default is None:
        raise RuntimeError(f"no {pattern!r} in what Spin said:\n{text}")
    return found[1] if found else default or ""


def _run(folder: Path, *command: str) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != 0 and command[0] != "./pan":
        raise RuntimeError(f"{command[0]}: {done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def main() -> int:
    if (program := missing()) is not None:
        print(f"{program} is missing: install Debian's `spin` and `gcc`")
        return 1
    for variant in sys.argv[1:]:
        verdict = check(variant, f"SCENE={VARIANTS[variant]}", story=True)
        print(f"{variant}\n\n{verdict.story}\n\n{verdict.broken}\n")
    if sys.argv[1:]:
        return 0
    wrong = 0
    for name, verdict, good in (
        *((name, verdict, verdict.errors == 0 and verdict.complete) for name, verdict in _right()),
        *((name, verdict, verdict.errors == 1) for name, verdict in _broken()),
    ):
        wrong += not good
        print(f"{'ok' if good else 'WRONG':6}{name:28}{verdict.states:>9} states {verdict.megabytes:>6.0f} MB {verdict.seconds:>6.1f} s  {verdict.broken}")
    return 1 if wrong else 0


def _right() -> list[tuple[str, Verdict]]:
    return [("safe", check(optimise="-O2")), ("every job ends", check(ltl=True))]


def _broken() -> list[tuple[str, Verdict]]:
    return [(name, check(name, f"SCENE={scene}", optimise="-O0")) for name, scene in VARIANTS.items()]


if __name__ == "__main__":
    sys.exit(main())
