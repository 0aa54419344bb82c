"""`python -m torture.mutants [NAME…]`: run every broken build until it is caught. A survivor is a gap in the checker.

A catch is fair only if the same run of a healthy build is clean: every focus is tried with one too.
"""

import asyncio
import logging
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict

import msgspec

from torture.broken_builds import BROKEN_BUILDS
from torture.checker import Violation, check
from torture.focus import Focus
from torture.run import Plan, run

SEEDS = 3
HEALTHY = "(healthy)"


class Row(msgspec.Struct, frozen=True):
    """What became of one build under one focus, and whether that is well."""

    name: str
    store: str
    seeds: int
    seconds: float
    rules: str
    well: bool

    def __str__(self) -> str:
        verdict = "well" if self.well else "BAD"
        return f"{verdict:<5} {self.name:<32} {self.store:<9} {self.seeds:>4} {self.seconds:>8.0f}  {self.rules}"


HEAD = f"{'':<5} {'build':<32} {'store':<9} {'seed':>4} {'seconds':>8}  found"


def hunt(name: str) -> Row:
    """Run a broken build with one seed after the other, until a rule that fits catches it."""
    broken, began = BROKEN_BUILDS[name], time.monotonic()
    for seed in range(1, SEEDS + 1):
        violations = _violations(broken.focus, seed, breaking=name)
        odd = [violation for violation in violations if violation.rule not in broken.seen_by]
        for violation in {violation.rule: violation for violation in odd}.values():
            print(f"      also in {name}: {violation.rule}: {violation.what}", flush=True)
        fitting = [violation for violation in violations if violation.rule in broken.seen_by]
        if fitting:
            return Row(name, broken.focus.store, seed, time.monotonic() - began, _counted(fitting), True)
    return Row(name, broken.focus.store, SEEDS, time.monotonic() - began, "nothing: it SURVIVED", False)


def control(names: Sequence[str], focus: Focus) -> Row:
    """Run a healthy build as these were run: nothing may be found."""
    began = time.monotonic()
    violations = _violations(focus, seed=1)
    for violation in violations[:3]:
        print(f"found in a healthy build, as {names[0]} is run:\n{violation}", flush=True)
    what = f"{_counted(violations)}; like {', '.join(names)}"
    return Row(HEALTHY, focus.store, 1, time.monotonic() - began, what, not violations)


def _violations(focus: Focus, seed: int, *, breaking: str = "") -> list[Violation]:
    return check(asyncio.run(run(Plan(seed=seed, breaking=breaking, **asdict(focus)))))


def _counted(violations: Sequence[Violation]) -> str:
    rules = Counter(violation.rule for violation in violations)
    return ", ".join(f"{count} × {rule}" for rule, count in rules.most_common()) or "nothing"


def rows(names: Sequence[str]) -> Iterator[Row]:
    """Every build, and for every focus a healthy one."""
    for focus in dict.fromkeys(BROKEN_BUILDS[name].focus for name in names):
        sharing = [name for name in names if BROKEN_BUILDS[name].focus == focus]
        yield control(sharing, focus)
        for name in sharing:
            yield hunt(name)


def judge(names: Sequence[str]) -> int:
    """Run these builds, print the table, and return the exit code: 1 if one survived, or a healthy one was accused."""
    found = []
    for row in rows(names):
        found.append(row)
        print(row, flush=True)
    print("\n".join(["", HEAD, *map(str, found)]))
    return 0 if all(row.well for row in found) else 1


def main() -> None:
    logging.disable(logging.CRITICAL)
    sys.exit(judge(sys.argv[1:] or list(BROKEN_BUILDS)))


if __name__ == "__main__":
    main()
