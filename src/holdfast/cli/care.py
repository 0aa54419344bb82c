"""Care of an installation from the command line: migrate, prune, check, doctor, bench."""

import asyncio
import dataclasses
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import typer

from holdfast import config
from holdfast.assemble import store_of
from holdfast.cli.doctor import Finding, examine
from holdfast.config import Settings
from holdfast.duties.leading import retention_of
from holdfast.duties.pruner import Pruner
from holdfast.model import Claimable, Outcome
from holdfast.store import migrate as migrations
from holdfast.store.queries import Dialect
from holdfast.store.sqlite import SqliteDatabase
from holdfast.store.store import Store, connect

BENCH_JOBS = 2000
BATCH = 100


async def migrate(flags: Mapping[str, object], *, dry_run: bool, show_sql: bool) -> None:
    """Apply the migrations that are missing, or say which they are."""
    settings = config.load(flags)
    database = await connect(settings.url, schema=settings.schema, connections=1, listen=False, pooler=settings.pooler)
    try:
        dialect: Dialect = "sqlite" if isinstance(database, SqliteDatabase) else "postgres"
        if dry_run:
            applied = migrations.pending(dialect, await migrations.version(database))
        else:
            applied = await migrations.migrate(database)
            await migrations.require_current(database)
        for migration in applied:
            typer.echo(f"{'would apply' if dry_run else 'applied'} {migration.number:04} {migration.name}")
            if show_sql:
                typer.echo(migrations.script(dialect, migration.number, settings.schema))
        if not applied:
            typer.echo("nothing to do: the schema is current")
    finally:
        await database.close()


async def prune(flags: Mapping[str, object]) -> int:
    """Go once along all jobs; return how many went."""
    settings = config.load(flags)
    removed = 0
    async with await store_of(settings, listen=False) as store:
        pruner = Pruner(store, retention_of(settings))
        while True:
            removed += await pruner.run_once()
            if pruner.at_end:
                return removed
            await asyncio.sleep(pruner.rest)


async def check() -> Sequence[tuple[str, object, str]]:
    """Every setting with its value and what it is for; all that is wrong with them is raised at once."""
    settings = config.load()
    return [(f.name, getattr(settings, f.name), f.metadata["about"]) for f in dataclasses.fields(Settings)]


async def examine_all() -> Sequence[Finding]:
    return await examine(config.load())


async def bench() -> None:
    """Submit, claim and finish in a scratch place of the same database; nothing of it stays."""
    settings = config.load()
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as folder:
        if settings.url.startswith("sqlite"):
            settings = dataclasses.replace(settings, database_url=f"sqlite:///{Path(folder) / 'bench.db'}")
        else:
            settings = dataclasses.replace(settings, schema=f"holdfast_bench_{int(time.time())}")
        database = await connect(settings.url, schema=settings.schema, listen=False, pooler=settings.pooler)
        try:
            await migrations.migrate(database)
            await _measure(Store(database))
        finally:
            if not isinstance(database, SqliteDatabase):
                await database.fetch(f"DROP SCHEMA {settings.schema} CASCADE")
            await database.close()


async def _measure(store: Store) -> None:
    jobs = [{"runner": "function", "spec": {"name": "noop"}} for _ in range(BENCH_JOBS)]
    began = time.perf_counter()
    await store.jobs.submit_many(jobs)
    submitted = time.perf_counter()
    pair = Claimable(queue="default", capability="function:noop", domain="function")
    while leases := (await store.leases.claim("bench", [pair], slots=BATCH, ttl=60)).claimed:
        await store.leases.finish([(lease, Outcome.succeeded()) for lease in leases])
    ended = time.perf_counter()
    typer.echo(f"submit in bulk           {BENCH_JOBS / (submitted - began):>10,.0f} jobs/s")
    typer.echo(f"claim and finish by {BATCH}  {BENCH_JOBS / (ended - submitted):>10,.0f} jobs/s")
