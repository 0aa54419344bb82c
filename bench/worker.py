"""Worker processes: throughput, latency, memory, and the cost of a death.

Run by `make bench` and `make bench-worker`. Ours and the reference alternate in rounds of the same run.
"""

import asyncio
import sys

from tests.support.cluster import cluster

from bench import (
    adoption,
    backlog,
    output,
    pickup_latency,
    process_start,
    processes,
    several_processes,
    silent_processes,
    stop_latency,
)
from bench.figures import HEAD

PARTS = {
    "drain": backlog,
    "several": several_processes,
    "pickup": pickup_latency,
    "processes": processes,
    "starts": process_start,
    "silent": silent_processes,
    "adoption": adoption,
    "stops": stop_latency,
    "output": output,
}


async def main(wanted: list[str]) -> None:
    good = True
    print(HEAD, flush=True)
    with cluster(settings=()) as server:
        for name, part in PARTS.items():
            if not wanted or name in wanted:
                for figure in await part.bench(server):
                    print(figure, flush=True)
                    good = good and figure.good
    if not good:
        sys.exit(1)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
