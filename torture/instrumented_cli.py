"""The command line of the workers and servers under test: holdfast's own, with waits at random steps.

At a step of an attempt that the seed picks, a worker leaves a file and waits until it is gone; the harness stops the
whole process meanwhile. A signal from outside would rarely hit there: between a check and the act. Broken builds
(broken_builds.py) are made here too, so that the product itself has no switch, and the probe (worker_probe.py) starts
here.
"""

import asyncio
import functools
import os
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from holdfast.assemble import worker_of
from holdfast.cli import worker_command
from holdfast.cli.main import app
from holdfast.model import Lease
from holdfast.store.database import Row
from holdfast.store.postgres import PostgresTx
from torture.clocks import sleep_truly
from torture.worker_probe import watch

PATIENCE = 5.0
LINGER = 0.15


class StepWaits:
    """Wait at a random step."""

    def __init__(self, path: Path, chance: float, step: str, seed: str) -> None:
        self._step = step
        self._path = path
        self._chance = chance
        self._rng = random.Random(seed)

    def at(self, step: str, lease: Lease) -> None:
        if (not self._step or step == self._step) and self._rng.random() < self._chance:
            self._path.touch()
            deadline = time.monotonic() + PATIENCE
            while self._path.exists() and time.monotonic() < deadline:
                time.sleep(0.002)
            self._path.unlink(missing_ok=True)


def pause_after_statements(statement: str, rng: random.Random) -> None:
    """Pause transactions on Postgres after a statement, before they act on what they read."""
    rows = PostgresTx.rows

    async def slowly(self: PostgresTx, name: str, /, **parameters: Any) -> Sequence[Row]:
        found = await rows(self, name, **parameters)
        if name == statement and rng.random() < 0.5:
            await asyncio.sleep(rng.uniform(0.0, LINGER))
        return found

    PostgresTx.rows = slowly  # type: ignore[method-assign]


def main() -> None:
    sleep_truly()
    if path := os.environ.get("TORTURE_WAITS"):
        chance, step, seed = (os.environ[f"TORTURE_{name}"] for name in ("CHANCE", "STEP", "SEED"))
        waits = StepWaits(Path(path), float(chance), step, seed)
        vars(worker_command)["worker_of"] = functools.partial(worker_of, at=waits.at)
    if statement := os.environ.get("TORTURE_LINGER"):
        pause_after_statements(statement, random.Random(os.environ["TORTURE_SEED"]))
    if path := os.environ.get("TORTURE_WITNESS"):
        watch(Path(path), os.environ["TORTURE_PART"])
    if name := os.environ.get("TORTURE_BREAK"):
        from torture.broken_builds import apply  # noqa: PLC0415 - a worker that is not broken starts without it

        apply(name)
    sys.argv[0] = "holdfast"
    app()


if __name__ == "__main__":
    main()
