"""How long a process takes from the call that starts it to its first instruction, one at a time.

The program is the same on both sides: a static one that writes the clock to a file as the first thing it does.
"""

import asyncio
import statistics
import tempfile
import time
from pathlib import Path

from bench.figures import Figure, percentile
from bench.installation import Installation, on_postgres, on_sqlite
from holdfast.runner.base import Identity, StartRequest
from holdfast.runner.process import ProcessRunner
from holdfast.runner.state_folder import StateFolder
from holdfast.runner.supervisor import build

STARTS = 100
ROUNDS = 5
SOURCE = """
#include <fcntl.h>
#include <stdio.h>
#include <time.h>
#include <unistd.h>
int main(int argc, char **argv) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    char text[40];
    int length = snprintf(text, sizeof text, "%lld\\n", now.tv_sec * 1000000000ll + now.tv_nsec);
    int file = open(argv[argc - 1], O_WRONLY | O_CREAT | O_TRUNC, 0600);
    return write(file, text, length) != length;
}
"""


def compiled(folder: Path) -> Path:
    """Compile the program that writes the clock."""
    compiler = build.system_compiler() or build.zig_compiler()
    assert compiler is not None, "a C compiler is needed"
    (folder / "clock.c").write_text(SOURCE)
    problem = build._compile(compiler, [folder / "clock.c"], folder / "clock")
    assert not problem, problem
    return folder / "clock"


def written(path: Path) -> int:
    """The time that the program wrote, in nanoseconds."""
    return int(path.read_text())


async def bare(program: Path, out: Path) -> float:
    called = time.monotonic_ns()
    process = await asyncio.create_subprocess_exec(str(program), str(out))
    await process.wait()
    return (written(out) - called) / 1e6


async def confirmed() -> None:
    """The lease is ours."""


async def ours(runner: ProcessRunner, n: int, program: Path, out: Path) -> float:
    request = StartRequest(
        identity=Identity("bench", f"job{n}", 1),
        domain=runner.domain,
        token=1,
        spec={"command": [str(program), str(out)]},
        inputs=None,
        start_by=time.clock_gettime(time.CLOCK_BOOTTIME) + 60,
    )
    called = time.monotonic_ns()
    process = await runner.start(request, confirmed)
    over = asyncio.Event()
    process.watch(over.set)
    await over.wait()
    took = (written(out) - called) / 1e6
    assert await process.collect() is not None
    await process.remove(had_other_owners=False)
    return took


async def calls(folder: Path, program: Path) -> list[Figure]:
    """Milliseconds of both, and the median of the rounds' ratios."""
    runner = ProcessRunner(StateFolder(folder / "state"), "bench", user=None, log_cap=1 << 20)
    mine: list[float] = []
    plain: list[float] = []
    try:
        for n in range(20):
            await ours(runner, n, program, folder / "out")
        for number in range(ROUNDS):
            plain.append(statistics.median([await bare(program, folder / "out") for _ in range(STARTS)]))
            first = (number + 1) * 1000
            mine.append(
                statistics.median([await ours(runner, first + n, program, folder / "out") for n in range(STARTS)])
            )
    finally:
        runner.close()
    ratios = [one / other for one, other in zip(mine, plain, strict=True)]
    return [
        Figure("a bare spawn to the first instruction", statistics.median(plain), None, " ms"),
        Figure("runner.start() to the first instruction", statistics.median(mine), None, " ms"),
        Figure(
            f"… of a bare spawn, median of {ROUNDS} rounds ({min(ratios):.2f}–{max(ratios):.2f})",
            statistics.median(ratios),
            1.5,
        ),
    ]


async def submits(site: Installation, folder: Path, program: Path) -> Figure:
    """Milliseconds from a submit to the first instruction, with an idle worker in another process."""
    took: list[float] = []
    with site.worker(1):
        for n in range(STARTS):
            out = folder / f"{site.kind}.{n}"
            called = time.monotonic_ns()
            await site.store.jobs.submit({"runner": "process", "spec": {"command": [str(program), str(out)]}})
            await site.all_in("succeeded", n + 1)
            took.append((written(out) - called) / 1e6)
    return Figure(f"{site.kind}: submit to the first instruction, p50", percentile(took[5:], 0.5), None, " ms")


async def bench(server: str) -> list[Figure]:
    with tempfile.TemporaryDirectory(prefix="holdfast-start-") as made:
        folder = Path(made)
        program = compiled(folder)
        figures = await calls(folder, program)
        async with on_postgres(server, "starts") as site:
            figures.append(await submits(site, folder, program))
        async with on_sqlite() as site:
            figures.append(await submits(site, folder, program))
    return figures
