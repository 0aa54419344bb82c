"""Run one mutant against its tests, and say what became of it."""

from collections.abc import Sequence
from dataclasses import dataclass

from scripts.mutation.coverage_map import CoverageMap
from scripts.mutation.mutant import Mutant
from scripts.mutation.tree import Ran, Tree

START_SECONDS = 120.0
SLOWNESS = 6.0
"""How much slower than measured a test may be on a busy machine before it counts as hanging."""
SHORT_SECONDS = 2.0
"""A test that takes less waits for nothing that load could delay until it fails."""
TEST_SECONDS = 45.0
"""What any test may take."""


@dataclass(frozen=True)
class Verdict:
    mutant: Mutant
    killed_by: str
    """The test, or what else noticed it; empty for a survivor."""
    tests: int
    """How many of the tests that execute the mutant were chosen."""
    left_out: int
    seconds: float = 0.0

    @property
    def survived(self) -> bool:
        return not self.killed_by


def chosen(tests: Sequence[str], known: CoverageMap, most_seconds: float) -> list[str]:
    """As many as fit into these seconds, as measured; at least one."""
    found: list[str] = []
    total = 0.0
    for test in tests:
        total += known.seconds[test]
        if not found or total <= most_seconds:
            found.append(test)
    return found


def judge(tree: Tree, mutant: Mutant, known: CoverageMap, most_seconds: float) -> Verdict:
    """Run the quick tests, then the others; the first failure kills the mutant."""
    every = known.tests_of(mutant)
    tests = chosen(every, known, most_seconds)
    left_out = len(every) - len(tests)
    quick = set(known.quick)
    for part in ([test for test in tests if test in quick], [test for test in tests if test not in quick]):
        killed_by = killer(tree, mutant, part, known) if part else ""
        if killed_by:
            return Verdict(mutant, killed_by, len(tests), left_out)
    return Verdict(mutant, "", len(tests), left_out)


def killer(tree: Tree, mutant: Mutant, tests: Sequence[str], known: CoverageMap) -> str:
    """Run tests until one fails, and return what failed.

    Load can make a long test fail. It counts only if it then passes without the mutant and fails with it.
    """
    with tree.holding(mutant):
        ran = _pytest(tree, tests, known)
    killed_by = _noticed(ran, tests)
    if not killed_by or (killed_by in tests and known.seconds[killed_by] < SHORT_SECONDS and not ran.timed_out):
        return killed_by
    suspects = [killed_by] if killed_by in tests else tests
    if not _noticed(_pytest(tree, suspects, known), suspects):
        with tree.holding(mutant):
            if _noticed(_pytest(tree, suspects, known), suspects):
                return killed_by
    rest = tests[tests.index(killed_by) + 1 :] if killed_by in tests else ()
    return killer(tree, mutant, rest, known) if rest else ""


def _pytest(tree: Tree, tests: Sequence[str], known: CoverageMap) -> Ran:
    measured = [known.seconds[test] for test in tests]
    longest = max(TEST_SECONDS, SLOWNESS * max(measured))
    order = tree.root.parent / f"{tree.root.name}.tests"
    order.write_text("\n".join(tests))
    quick = ("-m", "quick") if set(known.quick).issuperset(tests) else ()
    files = sorted({test.partition("::")[0] for test in tests})
    return tree.pytest(
        *("-x", f"--timeout={longest:.0f}", *quick, *files),
        seconds=START_SECONDS + SLOWNESS * sum(measured),
        environment={"MUTATION_TESTS": str(order)},
    )


def _noticed(ran: Ran, tests: Sequence[str]) -> str:
    failed = next((result.test for result in ran.results if result.outcome == "failed"), "")
    if failed:
        return failed
    if ran.timed_out:
        done = {result.test for result in ran.results}
        return next((test for test in tests if test not in done), "the time limit")
    if ran.code:
        return f"the start of pytest: {ran.output.strip().splitlines()[-1]}"
    return ""
