"""Races between real processes, on both databases and on real time: migrations, events, everything at once."""

import os
from collections import Counter
from pathlib import Path

import asyncpg

from holdfast.model import Lease
from holdfast.store import open_store
from holdfast.store.migrate import migrations
from holdfast.store.repeatable import repeatables
from holdfast.store.sql_entries import Dialect
from tests.conftest import database_url, drop
from tests.support import race_mix, race_scripts
from tests.support.race_checks import PROCESSES, SLOW, assert_sound, race, seconds, select
from tests.support.race_processes import Call, RaceProcesses
from tests.support.race_steps import claim, function


async def test_one_of_many_concurrent_migrations_applies(
    kind: str, server: str, race_processes: RaceProcesses, tmp_path: Path
) -> None:
    """Proves O2."""
    name = f"holdfast_migrating_{os.getpid()}"
    for n in range(5):
        url = f"sqlite:///{tmp_path / f'{n}.db'}" if kind == "sqlite" else await create(server, name)
        try:
            call = Call(race_scripts.migrate_now, {"start": 0.2}, opens=False)
            applied = await race(race_processes, url, [call] * PROCESSES)
            dialect: Dialect = "sqlite" if kind == "sqlite" else "postgres"
            every = [one.name for one in migrations(dialect)] + [one.name for one in repeatables(dialect)]
            assert sorted(applied, key=len) == [[]] * (PROCESSES - 1) + [every]
            async with await open_store(url, listen=False) as store:
                await store.jobs.submit_many([function()])
        finally:
            if kind == "postgres":
                await drop(server, name)


async def create(server: str, name: str) -> str:
    admin = await asyncpg.connect(server)
    try:
        await admin.execute(f"CREATE DATABASE {name}")
    finally:
        await admin.close()
    return database_url(server, name)


async def test_all_operations_at_once_never_deadlock(kind: str, clean_url: str, race_processes: RaceProcesses) -> None:
    """Proves L20. Proves E1."""
    duration = seconds(20.0 if kind == "postgres" else 6.0)
    calls = [
        Call(race_mix.mix, {"seconds": duration, "seed": n}, slow=SLOW if n % 4 == 0 else 0.0, listen=True)
        for n in range(8)
    ]
    done = await race(race_processes, clean_url, calls, within=duration + 180)
    total = sum((Counter(part) for part in done), Counter[str]())
    assert min(total[what] for what in ("submitted", "claimed", "finished", "called", "lanes_changed")) > 20, total
    await assert_sound(clean_url)
    (live,) = await race(race_processes, clean_url, [Call(race_mix.drain)])
    assert live == 0, "jobs that nothing will ever run"
    await assert_sound(clean_url)


async def test_eight_writers_leave_no_gap_in_the_events(clean_url: str, race_processes: RaceProcesses) -> None:
    """Proves E1."""
    own = await race(race_processes, clean_url, [Call(race_scripts.append_own, {"batches": 40})] * 8)
    assert len(set(own)) == 8
    for job_id in own:
        lines = f"""
            SELECT seq, data ->> 'batch', data ->> 'line' FROM job_events
            WHERE job_id = '{job_id}' AND type = 'log' ORDER BY seq"""
        found = [(seq, int(batch), int(line)) for seq, batch, line in await select(clean_url, lines)]
        assert found == [(3 * batch + line, batch, line) for batch in range(1, 41) for line in range(3)]
    async with await open_store(clean_url, listen=False) as store:
        (shared,) = await store.jobs.submit_many([function()])
        _, (lease,) = await claim(store, "shared", 1)
    assert isinstance(lease, Lease)
    values = await race(
        race_processes, clean_url, [Call(race_scripts.write_to_one, {"lease": lease, "batches": 60})] * 8
    )
    assert sum(landed for landed, _ in values) == 60, "each batch landed once"
    counts = f"SELECT type, count(*) FROM job_events WHERE job_id = '{shared}' GROUP BY type"
    found_counts = {str(type): n for type, n in await select(clean_url, counts)}
    steps = sum(steps for _, steps in values)
    assert steps > 0
    # Two requests were new, an interrupt and the cancel that escalated it; the other fourteen changed nothing.
    assert found_counts == {"status": 2, "log": 180, "audit": 2, "cancel": 2 + steps}
    await assert_sound(clean_url)
