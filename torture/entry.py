"""The way into a worker or a server that is tortured: holdfast's own command line, and now and then a wait.

At a step of an attempt that the seed picks, a worker leaves a file and waits until it is gone; the harness stops the
whole process meanwhile. That strikes where a signal from outside would rarely hit: between a look and the act. Broken
builds (breaks.py) are made here too, so that the product itself has no switch, and a witness (witness.py) is let in.
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
from torture.witness import watch

PATIENCE = 5.0
LINGER = 0.15


class Waits:
    """Waits at a step, by chance."""

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


def linger_behind(statement: str, rng: random.Random) -> None:
    """Let transactions on Postgres stand for a moment behind a statement, before they act on what they read."""
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
        waits = Waits(Path(path), float(chance), step, seed)
        vars(worker_command)["worker_of"] = functools.partial(worker_of, at=waits.at)
    if statement := os.environ.get("TORTURE_LINGER"):
        linger_behind(statement, random.Random(os.environ["TORTURE_SEED"]))
    if path := os.environ.get("TORTURE_WITNESS"):
        watch(Path(path), os.environ["TORTURE_PART"])
    if name := os.environ.get("TORTURE_BREAK"):
        from torture.breaks import apply  # noqa: PLC0415 - a worker that is not broken starts without it

        apply(name)
    sys.argv[0] = "holdfast"
    app()


if __name__ == "__main__":
    main()
