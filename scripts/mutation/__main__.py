"""`python -m scripts.mutation`: draw mutants, run them, and print a table; exit 1 if one survived without a reason."""

import argparse
import os
import queue
import re
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from scripts.mutation import survivors
from scripts.mutation.coverage_map import CoverageMap, coverage_map
from scripts.mutation.judge import Verdict, judge
from scripts.mutation.mutant import Mutant
from scripts.mutation.sample import drawn
from scripts.mutation.tree import ROOT, Tree, trees

SEED = 1
COUNT = 100
AT_ONCE = 2
MOST_SECONDS = 60.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.mutation", description=__doc__)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--count", type=int, default=COUNT)
    parser.add_argument("--at-once", type=int, default=AT_ONCE, help="how many mutants run side by side")
    parser.add_argument(
        "--most-seconds",
        type=float,
        default=MOST_SECONDS,
        help="of tests for one mutant, as measured; the slowest are left out",
    )
    parser.add_argument("--only", default="", help="a regular expression: run only drawn mutants that match")
    parser.add_argument("--skip", type=int, default=0, help="leave out the first ones, after an interruption")
    parser.add_argument("--list", action="store_true", help="show the mutants and run none")
    options = parser.parse_args()
    mutants = [m for m in drawn(ROOT, options.seed, options.count) if re.search(options.only, str(m))]
    mutants = mutants[options.skip :]
    if options.list:
        print("\n".join(map(str, mutants)))
        return 0
    reasons = survivors.accepted(survivors.FILE.read_text())
    os.nice(10)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with trees(options.at_once) as copies:
        known = coverage_map(copies[0])
        print(f"{len(known.seconds)} tests, {len(known.units)} blocks and statements; seed {options.seed}", flush=True)
        for test in known.failed:
            print(f"fails without a mutant, and is not used: {test}", flush=True)
        verdicts = list(shown(judged(copies, mutants, known, options.most_seconds), reasons))
    return summary(verdicts, reasons)


def judged(
    copies: Sequence[Tree], mutants: Sequence[Mutant], known: CoverageMap, most_seconds: float
) -> Iterator[Verdict]:
    """Run mutants side by side, one per copy of the tree."""
    free: queue.SimpleQueue[Tree] = queue.SimpleQueue()
    for copy in copies:
        free.put(copy)

    def one(mutant: Mutant) -> Verdict:
        tree, began = free.get(), time.monotonic()
        try:
            return replace(judge(tree, mutant, known, most_seconds), seconds=time.monotonic() - began)
        finally:
            free.put(tree)

    with ThreadPoolExecutor(len(copies)) as pool:
        try:
            yield from pool.map(one, mutants)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for copy in copies:
                copy.stop()
            raise


def shown(verdicts: Iterator[Verdict], reasons: dict[tuple[str, str], str]) -> Iterator[Verdict]:
    """Print the table row by row."""
    for n, verdict in enumerate(verdicts, 1):
        print(f"{n:>4} {row(verdict, reasons)}", flush=True)
        yield verdict


def row(verdict: Verdict, reasons: dict[tuple[str, str], str]) -> str:
    """One mutant: its place and change, then what killed it."""
    result = f"killed by {verdict.killed_by}"
    if verdict.survived:
        reason = survivors.reason_for(verdict.mutant, reasons)
        part = "fencing or transitions" if verdict.mutant.fencing else "other code"
        tests = f"{verdict.tests} tests pass, {verdict.left_out} left out" if verdict.tests else "no test executes it"
        result = f"accepted: {reason}" if reason else f"SURVIVED in {part}: {tests}"
    return f"{verdict.seconds:4.0f} s  {verdict.mutant}\n            {result}"


def summary(verdicts: Sequence[Verdict], reasons: dict[tuple[str, str], str]) -> int:
    """Print the score, and return the exit code."""
    alive = [verdict for verdict in verdicts if verdict.survived]
    new = [verdict for verdict in alive if survivors.reason_for(verdict.mutant, reasons) is None]
    killed = len(verdicts) - len(alive)
    print(f"\n{killed} of {len(verdicts)} killed, {len(alive) - len(new)} accepted survivors, {len(new)} new survivors")
    for verdict in new:
        print(f"new survivor: {verdict.mutant}")
    return 1 if new else 0


if __name__ == "__main__":
    sys.exit(main())
