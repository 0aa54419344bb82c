"""holdfast beside its peers in one run: `make bench-peers`, or `python -m bench.peers --parts drain --peers huey`.

Writes docs/performance.md, its picture and its numbers. A run of some parts keeps the numbers of the others.
"""

import argparse
import asyncio
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from bench.installation import ROOT, load
from bench.peers import results, versions
from bench.peers.adapters import PEERS
from bench.peers.deployment import Deployments
from bench.peers.environments import Missing
from bench.peers.keepers import Keepers, keepers
from bench.peers.page import NUMBERS, PICTURE, page, picture
from bench.peers.parts import PARTS
from bench.peers.results import Part, Results
from bench.peers.run import Run

PAGE = "performance.md"


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.peers", description=__doc__)
    parser.add_argument("--peers", default=",".join(PEERS), help=f"some of {','.join(PEERS)}")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"some of {','.join(PARTS)}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=40_000, help="jobs in a drain")
    parser.add_argument("--out", type=Path, default=ROOT / "docs", help="the folder of the page")
    given = parser.parse_args()
    given.peers, given.parts = (chosen(parser, given.peers, PEERS), chosen(parser, given.parts, PARTS))
    return given


def chosen(parser: argparse.ArgumentParser, said: str, known: Mapping[str, object]) -> list[str]:
    names = said.split(",")
    unknown = [name for name in names if name not in known]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(known)}")
    return names


async def prepare(deployments: Deployments, found: Results, wanted: list[str]) -> list[str]:
    """Install the peers; return those that are there, and name the others."""
    there = []
    for name in wanted:
        try:
            await deployments.prepare(PEERS[name])
            found.versions[name] = versions.of(PEERS[name])
            found.missing.pop(name, None)
            there.append(name)
        except Missing as missing:
            found.missing[name] = str(missing)
            print(f"{name} is MISSING: {missing}", flush=True)
    return there


def write(found: Results, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    found.save(folder / NUMBERS)
    (folder / PICTURE).write_text(picture(found))
    (folder / PAGE).write_text(page(found))


async def measure(made: Keepers, given: argparse.Namespace) -> bool:
    """Measure part by part; return whether no peer broke. SIGTERM ends the run, its servers and its workers."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    found = results.load(given.out / NUMBERS)
    found.machine = await versions.machine(made)
    deployments = Deployments(made)
    there = await prepare(deployments, found, given.peers)
    good = True
    for name in given.parts:
        began = time.monotonic()
        print(f"{name}: {load()}", flush=True)
        part = Part(time.strftime("%Y-%m-%d %H:%M", time.gmtime()), given.jobs, given.rounds, load())
        await PARTS[name](Run(deployments, there, given.jobs, given.rounds, part))
        found.parts[name] = part
        good = good and not part.failed
        write(found, given.out)
        print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
    return good


def main() -> None:
    given = options()
    with keepers() as made:
        good = asyncio.run(measure(made, given))
    if not good:
        sys.exit(1)


if __name__ == "__main__":
    main()
