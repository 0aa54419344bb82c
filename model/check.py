"""Checks the model of the lease protocol with Spin: `python -m model.check`; with the name of a variant: how it fails.

Spin makes a C program of `lease.pml` that visits every state which can be reached. The protocol as it should be must
pass with a search that left nothing out, and every way to break it must be caught by the property that is said to catch
it. The page to read is docs/model.md.
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

PROCESSES = 6
"""Spin's NFAIR: enough to be fair to 22 processes."""

FAIR_SCENE = 5
"""Where the protocol is searched just as the variants that only a formula catches. In all scenes that takes minutes."""

FORMULAS = {"every job ends": "ENDS", "everybody comes to rest": "RESTS"}
"""Properties of whole runs, and what switches each on; all others are assertions."""


@dataclass(frozen=True)
class Variant:
    """A way to break the protocol, the scene that shows it, and the property that detects it."""

    scene: int
    caught_as: tuple[str, ...]
    """More than one where the search may meet either first."""

    @property
    def formula(self) -> str | None:
        """The formula that it takes; every assertion holds."""
        return self.caught_as[0] if self.caught_as[0] in FORMULAS else None


VARIANTS = {
    "NO_FENCE": Variant(2, ("no stale write lands",)),
    "NO_TOKEN_AT_REAP": Variant(2, ("no stale write lands",)),
    # The attempt that is given up runs, or is still to run: the shortest story is the second.
    "ADOPT_RESTARTS": Variant(1, ("nothing ends while it runs", "what never ran is not called lost")),
    # The second supervisor starts beside the first, as in the shortest story, or after it.
    "START_NOT_EXCLUSIVE": Variant(1, ("each attempt starts once", "one live attempt per job, one job per lane")),
    "NO_START_BY": Variant(2, ("no attempt starts after its end",)),
    "FINISH_LEAVES_NO_MARKER": Variant(4, ("no attempt starts after its end",)),
    "SUPERVISOR_IGNORES_TOKEN": Variant(2, ("once an adoption is done, its former owner has no say",)),
    "CANCEL_CLEARED_AT_CLAIM": Variant(1, ("no attempt is claimed after a cancel was accepted",)),
    "REQUEUE_IGNORES_STOP": Variant(2, ("no attempt is claimed after a cancel was accepted",)),
    "LANE_LOOKS_BEFORE_LOCK": Variant(8, ("at a standstill every job has ended",)),
    "LANE_FORGETS_RETRY": Variant(2, ("a lane goes one at a time and in order",)),
    "NO_REAP": Variant(1, ("at a standstill every job has ended",)),
    "ENDS_WITHOUT_MARKER": Variant(1, ("nothing ends while it runs",)),
    "SWEEP_LEAVES_NO_MARKER": Variant(4, ("no attempt starts after its end",)),
    "LOCK_IS_RUNNING": Variant(2, ("what never ran is not called lost",)),
    "SPEC_NOT_RENEWED": Variant(5, ("every job ends",)),
    "ADOPTER_GIVES_BACK": Variant(5, ("every job ends",)),
    "REFUSED_FINISH_REPEATED": Variant(4, ("everybody comes to rest",)),
}

LOOPS = tuple(name for name, variant in VARIANTS.items() if variant.formula)
"""Variants that go round in circles: safe in every state, and caught by a formula only."""
STANDSTILLS = tuple(
    name for name, variant in VARIANTS.items() if variant.caught_as == ("at a standstill every job has ended",)
)
"""Variants in which a job waits and nothing moves: a formula must catch these, too."""


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


def check_rest() -> Verdict:
    """Check that every job ends and every process becomes idle, in all scenes, with any schedule."""
    return check(formula="everybody comes to rest", optimise="-O1")


def check_rest_fairly() -> Verdict:
    """The same in one scene, searched as the variants are that only a formula catches."""
    return check(f"SCENE={FAIR_SCENE}", formula="everybody comes to rest", fair=True, optimise="-O1")


def check_variant(name: str, *, shortest: bool = False) -> Verdict:
    """A protocol broken in one way; with `shortest`, by the shortest story, which takes longer to find."""
    variant = VARIANTS[name]
    if variant.formula:
        return check(name, f"SCENE={variant.scene}", formula=variant.formula, fair=True)
    return check(name, f"SCENE={variant.scene}", shortest=shortest)


def check_loop_is_safe(name: str) -> Verdict:
    """A variant that goes round in circles, searched for everything that must never happen."""
    return check(name, f"SCENE={VARIANTS[name].scene}")


def check_standstill(name: str) -> Verdict:
    """A variant in which nothing moves any more, searched for a job that never ends."""
    return check(name, f"SCENE={VARIANTS[name].scene}", formula="every job ends", fair=True)


def check(
    *defines: str, formula: str = "", fair: bool = False, optimise: str = "-O0", shortest: bool = False
) -> Verdict:
    """Search for a state in which an assertion fails; with a formula, for a run without end in which it does not hold.

    With a formula no assertion counts, so that none is caught in its place. In a fair run every process that can move
    all the time does move: who is caught in one was not just kept waiting.
    """
    began = time.monotonic()
    flags = [f"-D{define}" for define in (*defines, *([FORMULAS[formula]] if formula else []))]
    kind = [
        f"-DNFAIR={PROCESSES}" if formula else "-DSAFETY",
        *(["-DBFS"] if shortest else []),
        f"-DMEMLIM={MEGABYTES}",
    ]
    search = [*(["-a", "-A"] if formula else []), *(["-f"] if fair else [])]
    with tempfile.TemporaryDirectory(prefix="holdfast-model-") as place:
        folder = Path(place)
        shutil.copy(SOURCE, folder)
        _run(folder, "spin", *flags, "-a", SOURCE.name)
        _run(folder, "gcc", "-w", optimise, *kind, "-o", "pan", "pan.c")
        out = _run(folder, "./pan", f"-m{DEPTH}", "-w22", *search)
        failed = (folder / f"{SOURCE.name}.trail").exists()
        output = _run(folder, "spin", *flags, "-t", SOURCE.name) if failed else ""
    return Verdict(
        errors=int(_find(r"errors: (\d+)", out)),
        states=int(_find(r"(\d+) states, stored", out)),
        depth=int(_find(r"depth reached (\d+)", out)),
        megabytes=float(_find(r"([\d.]+)\s+total actual memory usage", out)),
        seconds=time.monotonic() - began,
        complete="Search not completed" not in out and "too small" not in out and "out of memory" not in out,
        unused=tuple(line for line in re.findall(r"lease\.pml:\d+, state \d+, .*", out) if "-end-" not in line),
        broken=_broken(out, output),
        story=_story(output),
    )


def _broken(out: str, output: str) -> str:
    """The property that did not hold: the comment after the assertion that a trail ends with, or the formula."""
    found = re.search(r"^pan:1: (.*) \(at depth", out, re.MULTILINE)
    if found is None:
        return ""
    if found[1] == "acceptance cycle":
        return _find(r"never claim\s+\+ \((\w+)\)", out).replace("_", " ")
    if found[1].startswith("assertion violated"):
        return _said_behind(int(_find(r"lease\.pml:(\d+), Error: assertion violated", output)))
    return found[1]


def _said_behind(number: int) -> str:
    line = SOURCE.read_text().splitlines()[number - 1]
    return line.partition("/*")[2].partition("*/")[0].strip() or line.strip()


def properties() -> set[str]:
    """The names of all that the model asserts: comments after assertions, and formulas."""
    text = SOURCE.read_text()
    asserted = [_said_behind(number) for number, line in enumerate(text.splitlines(), 1) if "assert(" in line]
    return {*asserted, *(name.replace("_", " ") for name in re.findall(r"^ltl (\w+)", text, re.MULTILINE))}


def _story(output: str) -> str:
    lines = (
        output.partition("spin: trail ends")[0]
        .replace("<<<<<START OF CYCLE>>>>>", "and from here on for ever:")
        .splitlines()
    )
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


def _holds(verdict: Verdict) -> bool:
    return verdict.errors == 0 and verdict.complete


def _all() -> Iterator[tuple[str, Verdict, bool]]:
    safety = check_safety()
    yield "the protocol is safe", safety, _holds(safety) and not safety.unused
    rest = check_rest()
    yield "it comes to rest", rest, _holds(rest)
    fair = check_rest_fairly()
    yield f"in scene {FAIR_SCENE} fairly", fair, _holds(fair)
    for name, variant in VARIANTS.items():
        verdict = check_variant(name)
        yield name, verdict, verdict.broken in variant.caught_as
    for name in LOOPS:
        verdict = check_loop_is_safe(name)
        yield f"{name} is safe", verdict, _holds(verdict)
    for name in STANDSTILLS:
        verdict = check_standstill(name)
        yield f"{name} for ever", verdict, verdict.broken == "every job ends"


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
        print(f"{'ok' if good else 'WRONG':6}{name:32}{numbers}  {verdict.broken and 'caught: ' + verdict.broken}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
