"""`python -m torture.mutants [NAME…]`: run every broken build until it is caught; one that survives is a hole."""

import asyncio
import logging
import sys
from collections import Counter
from dataclasses import asdict

from torture.breaks import BREAKS
from torture.checker import check
from torture.run import Plan, run

SEEDS = 5


def caught(name: str) -> str | None:
    """Run a broken build with one seed after the other; say how it was caught, or None."""
    broken = BREAKS[name]
    for seed in range(1, SEEDS + 1):
        plan = Plan(seed=seed, breaking=name, **asdict(broken.focus))
        violations = check(asyncio.run(run(plan)))
        for odd in [violation for violation in violations if violation.rule not in broken.seen_by][:1]:
            print(f"found in {name}, and has another reason:\n{odd}", flush=True)
        rules = Counter(violation.rule for violation in violations if violation.rule in broken.seen_by)
        if rules:
            return f"seed {seed}, {broken.focus.store}: " + ", ".join(
                f"{n} × {rule}" for rule, n in rules.most_common()
            )
    return None


def main() -> None:
    logging.disable(logging.CRITICAL)
    survived = []
    for name in sys.argv[1:] or BREAKS:
        how = caught(name)
        print(f"{'caught  ' if how else 'SURVIVED'} {name}: {how or f'{SEEDS} seeds'}", flush=True)
        if how is None:
            survived.append(name)
    sys.exit(1 if survived else 0)


if __name__ == "__main__":
    main()
