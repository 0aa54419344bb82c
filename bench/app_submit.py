"""A single `app.submit` of a function against a bare INSERT of the same bytes, one after the other, on Postgres.

`python -m bench.app_submit`. Both wait for their commit (fsync on). What counts is the ratio of the medians of one
call.
"""

import asyncio
import statistics
import sys
import time
from collections.abc import Awaitable, Callable

from tests.support.cluster import cluster

from bench.store import raw_postgres, raw_row, submissions
from holdfast import Holdfast

CALLS = 300
ROUNDS = 7
MOST = 1.3
INSERT = (
    "INSERT INTO raw_rows VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12::jsonb, $13::jsonb, $14::jsonb,"
    " now(), now(), now())"
)


async def median_of(call: Callable[[int], Awaitable[object]]) -> float:
    """Return the median time of one call, in seconds."""
    took = []
    for n in range(CALLS):
        began = time.perf_counter()
        await call(n)
        took.append(time.perf_counter() - began)
    return statistics.median(took)


async def measure(url: str) -> list[tuple[float, float]]:
    app = Holdfast(url)

    @app.function(queue="default", timeout=60)
    async def noop(row: int, text: str) -> None: ...

    await app.migrate()
    pool = await raw_postgres(url)
    rows = [raw_row(job) for job in submissions(CALLS * ROUNDS)]
    pairs = []
    async with app:
        ours = noop.with_options(kind="bench", labels={"team": "blue"})
        for n in range(ROUNDS):
            raw = await median_of(lambda at, base=n * CALLS: pool.execute(INSERT, *rows[base + at]))  # type: ignore[misc]
            own = await median_of(lambda at: app.submit(ours, row=at, text="x" * 100))
            pairs.append((own, raw))
    await pool.close()
    return pairs


def main() -> None:
    with cluster(settings=()) as url:
        pairs = asyncio.run(measure(url))
    ratio = statistics.median(own / raw for own, raw in pairs)
    own, raw = (statistics.median(one) * 1e6 for one in zip(*pairs, strict=True))
    verdict = "ok" if ratio <= MOST else "ABOVE"
    print(f"app.submit {own:,.0f} µs, bare insert {raw:,.0f} µs, ratio {ratio:.2f}, wanted at most {MOST}: {verdict}")
    sys.exit(ratio > MOST)


if __name__ == "__main__":
    main()
