"""`python -m torture --seconds 600 --seed 7 --store postgres --runners process,docker`: torture holdfast, and check."""

import argparse
import asyncio
import logging
import random
import sys
import time
from collections import Counter
from pathlib import Path

from torture.broken_builds import BROKEN_BUILDS
from torture.checker import check
from torture.history import History
from torture.run import Plan, run

SHOWN = 5


def summary(history: History) -> str:
    """What happened, in numbers."""
    leases = Counter(
        event.data["lease"] for events in history.events.values() for event in events if event.type == "lease"
    )
    statuses = Counter(record.status for record in history.records.values())
    runners = Counter(record.runner for record in history.records.values())
    errors = Counter(record.error for record in history.records.values() if record.error is not None)
    faults = Counter(fault.kind for fault in history.faults)
    attempts = sum(len(rows) for rows in history.attempts.values())
    parts = [
        f"seed {history.seed}, {history.store}",
        f"{len(history.records)} jobs ({_counted(statuses)}), {len(history.calls)} calls, {attempts} attempts",
        f"of {_counted(runners)}; they failed by {_counted(errors)}",
        f"leases {_counted(leases)}; {len(history.follows)} streams; {len(history.lines)} lines of journal",
        f"{sum(faults.values())} faults: {_counted(faults)}",
    ]
    return "\n".join(parts)


def _counted(found: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(found.items()))


def main() -> None:
    parser = argparse.ArgumentParser(prog="torture")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--store", choices=["sqlite", "postgres"], default="sqlite")
    parser.add_argument("--runners", default="process,pipeline")
    parser.add_argument("--pause", type=float, default=1.0, help="seconds between two faults, on average")
    parser.add_argument(
        "--breaking", default="", choices=["", *BROKEN_BUILDS], help="run a broken build: it must be caught"
    )
    parser.add_argument("--history", type=Path, help="write the history into this file")
    parser.add_argument("--check", type=Path, help="check this history again, and run nothing")
    given = parser.parse_args()
    if given.breaking and given.store != (needed := BROKEN_BUILDS[given.breaking].focus.store):
        parser.error(f"{given.breaking} is a build for --store {needed}")
    logging.disable(logging.CRITICAL)  # The history reports a database that is away.
    if given.check:
        history = History.load(given.check)
    else:
        plan = Plan(
            seed=random.SystemRandom().randrange(1 << 31) if given.seed is None else given.seed,
            store=given.store, seconds=given.seconds, runners=given.runners.split(","), pause=given.pause,
            breaking=given.breaking,
        )  # fmt: skip
        print(f"torture: seed {plan.seed}, {plan.store}, {plan.seconds:g} s, {', '.join(plan.runners)}", flush=True)
        began = time.monotonic()
        history = asyncio.run(run(plan))
        print(f"took {time.monotonic() - began:.0f} s")
    if given.history:
        history.save(given.history)
    violations = check(history)
    for violation in violations[:SHOWN]:
        print(violation)
    print(summary(history))
    kinds = Counter(violation.rule for violation in violations)
    print(f"{len(violations)} violations {_counted(kinds)}".strip())
    sys.exit(1 if violations else 0)


if __name__ == "__main__":
    main()
