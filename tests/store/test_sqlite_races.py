"""SQLite among processes: heavy writes raise no error, and an idle process takes no write lock."""

import asyncio
import sqlite3
from pathlib import Path

from holdfast.model import FUNCTION_DOMAIN, Outcome
from holdfast.store import open_store
from holdfast.store.migrate import migrate
from holdfast.store.store import connect, sqlite_path
from tests.support import race_mix
from tests.support.race_checks import assert_sound, race, seconds
from tests.support.race_processes import Call, RaceProcesses
from tests.support.race_steps import LONG, PAIR, claim, function


async def sqlite_url(folder: Path) -> str:
    url = f"sqlite:///{folder / 'store.db'}"
    database = await connect(url)
    await migrate(database)
    await database.close()
    return url


async def test_sqlite_under_heavy_writes_of_four_processes_raises_no_error(
    tmp_path: Path, race_processes: RaceProcesses
) -> None:
    """Proves O6."""
    url, duration = await sqlite_url(tmp_path), seconds(15.0)
    calls = [Call(race_mix.mix, {"seconds": duration, "seed": n}) for n in range(4)]
    done = await race(race_processes, url, calls, within=duration + 180)
    assert all(part["finished"] > 0 for part in done), "one process was starved"
    await assert_sound(url)


async def test_sqlite_process_that_is_idle_takes_no_write_lock(tmp_path: Path) -> None:
    """Proves O6."""
    url = await sqlite_url(tmp_path)
    async with await open_store(url) as store:
        await store.jobs.submit_many([function(lane="lane")])
        _, (lease,) = await claim(store, "worker", 1)
        await store.leases.finish([(lease, Outcome.succeeded())])
        assert await store.workers.lead("reaper", "leader", ttl=LONG) == 1
        other = sqlite3.connect(sqlite_path(url), isolation_level=None)
        try:
            other.execute("BEGIN IMMEDIATE")
            async with asyncio.timeout(60):
                taken = await store.leases.claim("worker", [PAIR], slots=5, ttl=LONG, domains=[FUNCTION_DOMAIN])
                assert not taken.claimed
                assert not taken.adopted
                assert await store.leases.reap() == []
                assert await store.leases.abandon() == 0
                assert await store.leases.stop_requests("worker") == {}
                assert await store.gates.promote() == 0
                assert await store.gates.resolve() == 0
                assert await store.gates.repair() == 0
                assert await store.jobs.expire() == 0
                assert await store.jobs.finish_deletions() == 0
                assert await store.next_due() is None
                assert await store.workers.lead("reaper", "follower", ttl=LONG) is None
        finally:
            other.close()
