"""Administrative commands: migrate, prune, check, doctor, bench."""

import asyncio
import dataclasses
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from holdfast import config
from holdfast.assemble import store_of
from holdfast.cli.doctor import Finding, address, examine
from holdfast.config import Settings
from holdfast.duties.pruner import Pruner
from holdfast.duties.scheduler import retention_of
from holdfast.model import Claimable, Outcome
from holdfast.store import migrate as migrations
from holdfast.store.audit import local_actor
from holdfast.store.migration_plan import Migration
from holdfast.store.repeatable import Repeatable
from holdfast.store.sqlite import SqliteDatabase
from holdfast.store.store import Store, connect

BENCH_JOBS = 2000
BATCH = 100


class Migrated(msgspec.Struct, frozen=True, kw_only=True):
    """A migration that was applied, or would be; a repeatable file has a revision instead of a number."""

    label: str
    name: str
    number: int | None = None
    revision: int | None = None
    sql: str | None = None


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    value: str | float | bool | None
    default: str | float | bool | None
    about: str


class BenchResult(msgspec.Struct, frozen=True, kw_only=True):
    """Throughput of the database in jobs per second: bulk submit, and claim and finish in batches of `batch`."""

    jobs: int
    batch: int
    submit_per_second: float
    run_per_second: float


async def migrate(flags: Mapping[str, object], *, dry_run: bool, show_sql: bool) -> Sequence[Migrated]:
    """Apply the missing migrations, or list them."""
    settings = config.load(flags)
    database = await connect(settings.url, schema=settings.schema, connections=1, listen=False, pooler=settings.pooler)
    try:
        if dry_run:
            applied = await migrations.pending(database)
        else:
            applied = await migrations.migrate(database)
            await migrations.require_current(database)
        return [
            Migrated(
                label=one.label,
                name=one.name,
                number=one.number if isinstance(one, Migration) else None,
                revision=one.revision if isinstance(one, Repeatable) else None,
                sql=migrations.script(migrations.dialect_of(database), one, settings.schema) if show_sql else None,
            )
            for one in applied
        ]
    finally:
        await database.close()


async def prune(flags: Mapping[str, object]) -> int:
    """Prune all jobs once; return how many were removed."""
    settings = config.load(flags)
    removed = 0
    async with await store_of(settings, listen=False) as store:
        asked = {"retention_days": settings.retention_days, "keep_identical": settings.keep_identical}
        await store.audit.add(local_actor("cli"), "jobs.prune", "jobs", after=asked)
        pruner = Pruner(store, retention_of(settings), audit_age=settings.audit_days * 86_400)
        while True:
            removed += await pruner.run_once()
            if pruner.at_end:
                return removed
            await asyncio.sleep(pruner.rest)


async def check() -> Sequence[Setting]:
    """Return every setting with its value and purpose; raise all mistakes at once."""
    settings = config.load()
    return [
        Setting(
            name=f"{config.PREFIX}{field.name.upper()}",
            value=_plain(getattr(settings, field.name)),
            default=_plain(field.default),
            about=field.metadata["about"],
        )
        for field in dataclasses.fields(Settings)
    ]


def _plain(value: object) -> str | float | bool | None:
    """Return a setting's value for display: a URL without its password."""
    if value is None or isinstance(value, bool | int | float):
        return value
    return address(str(value)) if "://" in str(value) else str(value)


async def examine_all() -> Sequence[Finding]:
    return await examine(config.load())


async def bench() -> BenchResult:
    """Submit, claim and finish in a scratch schema of the same database, which is removed afterwards."""
    settings = config.load()
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as folder:
        if settings.url.startswith("sqlite"):
            settings = dataclasses.replace(settings, database_url=f"sqlite:///{Path(folder) / 'bench.db'}")
        else:
            settings = dataclasses.replace(settings, schema=f"holdfast_bench_{int(time.time())}")
        database = await connect(settings.url, schema=settings.schema, listen=False, pooler=settings.pooler)
        try:
            await migrations.migrate(database)
            return await _measure(Store(database))
        finally:
            if not isinstance(database, SqliteDatabase):
                await database.fetch(f"DROP SCHEMA {settings.schema} CASCADE")
            await database.close()


async def _measure(store: Store) -> BenchResult:
    jobs = [{"runner": "function", "spec": {"name": "noop"}} for _ in range(BENCH_JOBS)]
    began = time.perf_counter()
    await store.jobs.submit_many(jobs)
    submitted = time.perf_counter()
    pair = Claimable(queue="default", capability="function:noop", domain="function")
    while leases := (await store.leases.claim("bench", [pair], slots=BATCH, ttl=60)).claimed:
        await store.leases.finish([(lease, Outcome.succeeded()) for lease in leases])
    ended = time.perf_counter()
    return BenchResult(
        jobs=BENCH_JOBS,
        batch=BATCH,
        submit_per_second=BENCH_JOBS / (submitted - began),
        run_per_second=BENCH_JOBS / (ended - submitted),
    )
