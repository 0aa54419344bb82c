"""The application whose functions the benchmarks run."""

import time

from holdfast.client.app import Holdfast

app = Holdfast()


@app.function()
async def noop() -> None:
    """Do nothing."""


@app.function()
async def stamp() -> int:
    """Say when it began, on the clock that all processes of this host share."""
    return time.monotonic_ns()


@app.function()
def compute(steps: int) -> int:
    """Keep one core busy, as Python code does: other threads of the process have to wait."""
    total = 0
    for n in range(steps):
        total += n * n % 7
    return total
