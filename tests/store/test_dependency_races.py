"""Races between real processes, on both databases and on real time: dependencies."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from holdfast.model import Gate, Outcome, new_id
from holdfast.store import Store, open_store
from tests.support import race_scripts
from tests.support.race_checks import PATIENCE, ROUNDS, SLOW, assert_sound, race, select, statuses
from tests.support.race_processes import Call, Pause, RaceProcesses
from tests.support.race_steps import claim, function


async def test_submit_with_needs_racing_the_parents_end_strands_no_dependant(
    clean_url: str, race_processes: RaceProcesses, tmp_path: Path
) -> None:
    """Proves N6."""
    share = {"rounds": -(-ROUNDS // 3), "bulk": 20}
    flags = [tmp_path / f"submitted-{n}" for n in range(3)]
    submitters = [
        Call(race_scripts.submit_needing, {**share, "flag": flag}, slow=SLOW if n == 0 else 0.0)
        for n, flag in enumerate(flags)
    ]
    workers = [Call(race_scripts.work, {"flags": flags, "slots": 20}, slow=SLOW if n == 0 else 0.0) for n in range(3)]
    values = await race(race_processes, clean_url, [*submitters, *workers], within=PATIENCE)
    made = [one for part in values[:3] for one in part]
    assert len(made) >= ROUNDS
    await assert_sound(clean_url)
    found = await select(clean_url, "SELECT id, status, started_at, error_message, error_code FROM jobs")
    records = {str(row[0]): row[1:] for row in found}
    for how, parent, dependants in made:
        assert records[parent][0] == ("failed" if how == "fail" else "succeeded")
        for job_id in dependants:
            status, started_at, message, code = records[job_id]
            if how == "fail":
                assert (status, started_at, code) == ("failed", None, "dependency_failed")
                assert message.startswith(f"needs job {parent}, which failed: ")
            else:
                assert status == "succeeded"
    orders = """
        SELECT
          count(*) FILTER (WHERE j.requested_at < p.finished_at), count(*) FILTER (WHERE j.requested_at > p.finished_at)
        FROM needs AS n JOIN jobs AS j ON j.id = n.job_id JOIN jobs AS p ON p.id = n.need_id"""
    ((before, after),) = await select(clean_url, orders)
    assert before > 0, "no dependant ever came before its parent ended"
    assert after > 0, "no parent ever ended before its dependant came"


async def test_submit_with_needs_racing_a_resumed_parent_strands_no_dependant(
    clean_url: str, race_processes: RaceProcesses, tmp_path: Path
) -> None:
    """Proves N6. Proves C8."""
    flags = [tmp_path / f"submitted-{n}" for n in range(3)]
    resumers = [
        Call(race_scripts.resume_and_need, {"rounds": 80, "width": 16, "flag": flag}, slow=4 * SLOW if n == 0 else 0.0)
        for n, flag in enumerate(flags)
    ]
    workers = [Call(race_scripts.work, {"flags": flags, "slots": 4, "patience": 8.0}) for _ in range(3)]
    values = await race(race_processes, clean_url, [*resumers, *workers])
    assert sum(len(part) for part in values[:3]) == 3 * 2 * 80
    await assert_sound(clean_url)
    assert set((await statuses(clean_url)).values()) == {"succeeded"}


@pytest.mark.parametrize("kind", ["postgres"])  # SQLite runs a transaction in one go: there is nothing to pause.
async def test_parent_that_ends_while_its_resume_is_being_settled_is_settled_again(clean_url: str) -> None:
    """Proves N6."""
    parent, dependant = new_id(), new_id()
    async with await open_store(clean_url, listen=False) as slow, await open_store(clean_url, listen=False) as quick:
        await quick.jobs.submit_many([function(id=parent), function(needs=[parent])])
        _, (lease,) = await claim(quick, "worker", 1)
        await quick.leases.finish([(lease, Outcome.failed("boom", "boom"))])
        pause = Pause(slow, "lock_jobs")
        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            group.create_task(slow.jobs.resume(parent))
            await pause.reached.wait()
            _, (lease,) = await claim(quick, "worker", 1)
            await quick.jobs.submit_many([function(id=dependant, needs=[parent])])
            async with end_without_follow_up(quick):
                await quick.leases.finish([(lease, Outcome.succeeded())])
            pause.go_on.set()
        await quick.gates.resolve()
        assert (await quick.jobs.get(dependant)).gate is Gate.OPEN
    await assert_sound(clean_url)


@pytest.mark.parametrize("kind", ["postgres"])
async def test_parent_that_is_dismissed_while_its_end_is_being_settled_is_left_settled(clean_url: str) -> None:
    """Proves N6."""
    parent = new_id()
    async with await open_store(clean_url, listen=False) as slow, await open_store(clean_url, listen=False) as quick:
        await quick.jobs.submit_many([function(id=parent), function(needs=[parent])])
        _, (lease,) = await claim(quick, "worker", 1)
        async with end_without_follow_up(quick):
            await quick.leases.finish([(lease, Outcome.failed("boom", "boom"))])
        pause = Pause(slow, "open_dependants")
        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            group.create_task(slow.gates.follow_up(settle=[parent]))
            await pause.reached.wait()
            await quick.jobs.dismiss(parent)
            pause.go_on.set()
    await assert_sound(clean_url)


@asynccontextmanager
async def end_without_follow_up(store: Store) -> AsyncIterator[None]:
    """As if this process were slow between its finish and the follow-up."""

    async def later(*_: object, **__: object) -> None:
        return None

    setattr(store.gates, "follow_up", later)  # noqa: B010
    yield
    delattr(store.gates, "follow_up")
