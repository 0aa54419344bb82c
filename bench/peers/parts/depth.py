"""A drain by one worker among a million future jobs and, where the peer has lanes, 100,000 jobs in a blocked lane.

The future job is submitted by the peer's own call and then copied by SQL: to submit a million takes some hours.
"""

import asyncpg
from tests.support.bulk_data import DUE, FUTURE, LANED, fill_postgres

from bench.peers.deployment import Deployment
from bench.peers.drains import drain, warm
from bench.peers.keepers import PostgresProbe
from bench.peers.peer import Crowd, Peer
from bench.peers.run import Run
from bench.scale import DUE_JOBS, claim_seconds, database, filled

FUTURES_PER_JOB, LANED_PER_JOB = 25, 2.5
"""With the 40,000 jobs of a full run: a million and 100,000."""
WITHIN = 20.0
WARM = 10
"""Few, as some peers run less than one job a second in the crowd."""


def futures(run: Run) -> int:
    return int(run.jobs * FUTURES_PER_JOB)


def laned(run: Run) -> int:
    return int(run.jobs * LANED_PER_JOB)


async def copy(connection: "asyncpg.Connection[asyncpg.Record]", crowd: Crowd, count: int) -> None:
    """Copy the one row of a table so many times, each under a new key."""
    rows = await connection.fetch(
        "SELECT attname FROM pg_attribute WHERE attrelid = $1::regclass AND attnum > 0 AND NOT attisdropped"
        " AND attgenerated = '' AND attname <> $2",
        crowd.table,
        crowd.key,
    )
    columns = ", ".join(f'"{row["attname"]}"' for row in rows)
    await connection.execute(
        f"INSERT INTO {crowd.table} ({crowd.key}, {columns}) OVERRIDING SYSTEM VALUE SELECT {crowd.new_key}, {columns}"
        f" FROM (SELECT * FROM {crowd.table} LIMIT 1) AS pattern, generate_series(1, {count}) AS g (n)"
    )


async def crowd(run: Run, deployment: Deployment) -> None:
    """Put the crowd in, before any other job."""
    assert isinstance(deployment.probe, PostgresProbe)
    connection = deployment.probe.connection
    if deployment.peer.program == "holdfast":
        noop = {"capability": "'function:noop'", "tenant": "'default'"}
        await fill_postgres(connection, [(futures(run), {**FUTURE, **noop}), (laned(run), {**LANED, **noop})])
        return
    assert deployment.peer.crowd is not None
    await deployment.tell("future", count=1)
    await copy(connection, deployment.peer.crowd, futures(run) - 1)
    for statement in deployment.peer.crowd.then:
        await connection.execute(statement.format(count=laned(run)))
    await connection.execute("VACUUM ANALYZE")


async def one(run: Run, name: str, peer: Peer) -> None:
    rates = {}
    for kind in ("alone", "crowd"):
        async with run.deployments.fresh(peer) as deployment:
            if kind == "crowd":
                await crowd(run, deployment)
            async with deployment.workers(1) as workers:
                await warm(deployment, WARM)
                rates[kind] = (await drain(deployment, workers, run.jobs_of(peer), WITHIN)).rate
    run.part.add(name, **rates)


async def claims(run: Run) -> None:
    """What a claim of 100 of holdfast's store takes, alone and in the crowd, in ms."""
    server = run.deployments.keepers.postgres.url
    async with database(server, "claims_alone") as (alone_url, alone), database(server, "claims_crowd") as (url, full):
        await filled(alone_url, [(DUE_JOBS, DUE)])
        await filled(url, [(futures(run), FUTURE), (laned(run), LANED), (DUE_JOBS, DUE)])
        run.part.add(
            "holdfast", claim_alone_ms=await claim_seconds(alone) * 1e3, claim_crowd_ms=await claim_seconds(full) * 1e3
        )
    for name in ("claims_alone", "claims_crowd"):
        await run.deployments.keepers.postgres.drop(name)


async def bench(run: Run) -> None:
    await run.in_turns(one, suits=lambda peer: peer.crowd is not None and peer.keeper == "Postgres")
    if "holdfast" in run.peers:
        for _ in range(run.rounds):
            await claims(run)
