"""Races between real processes, on both databases and on real time: lanes."""

import asyncio
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from holdfast.model import Outcome, new_id
from holdfast.store import open_store
from tests.store.test_stop_races import blocked_lanes
from tests.support import race_scripts
from tests.support.race_checks import PATIENCE, ROUNDS, SLOW, assert_sound, race, select, statuses
from tests.support.race_processes import Call, Pause, RaceProcesses
from tests.support.race_steps import claim, function


async def test_submit_racing_a_finish_never_blocks_a_lane(
    clean_url: str, race_processes: RaceProcesses, tmp_path: Path
) -> None:
    """Proves N2."""
    share = {"rounds": -(-ROUNDS // 3), "width": 3}
    flags = [tmp_path / f"submitted-{n}" for n in range(3)]
    submitters = [
        Call(race_scripts.submit_pairs_into_lanes, {**share, "flag": flag}, slow=SLOW if n == 0 else 0.0)
        for n, flag in enumerate(flags)
    ]
    workers = [Call(race_scripts.work, {"flags": flags, "slots": 3}, slow=SLOW if n < 2 else 0.0) for n in range(4)]
    values = await race(race_processes, clean_url, [*submitters, *workers], within=PATIENCE)
    rounds = sum(values[:3])
    assert rounds >= ROUNDS
    await assert_sound(clean_url)
    assert Counter((await statuses(clean_url)).values()) == {"succeeded": 2 * rounds}


async def test_lane_runs_one_job_at_a_time_in_order_of_acceptance(
    clean_url: str, race_processes: RaceProcesses, tmp_path: Path
) -> None:
    """Proves N1."""
    journal, flags = tmp_path / "journal", [tmp_path / f"submitted-{n}" for n in range(2)]
    halves = [["lane-1", "lane-2", "lane-3"], ["lane-4", "lane-5"]]
    # Half of the jobs wait when the workers start: in a lane that is never deeper than one, order means nothing.
    async with await open_store(clean_url, listen=False) as store:
        waiting = await race_scripts.submit_one_by_one(store, lanes=[*halves[0], *halves[1]], jobs=100)
    submitters = [
        Call(race_scripts.submit_one_by_one, {"lanes": lanes, "jobs": 50, "flag": flag}, slow=SLOW)
        for lanes, flag in zip(halves, flags, strict=True)
    ]
    work = Call(race_scripts.work, {"flags": flags, "journal": journal, "slots": 3}, slow=SLOW)
    one, two, *_ = await race(race_processes, clean_url, [*submitters, *[work] * 6])
    accepted = [*waiting, *one, *two]
    expected: dict[str, list[str]] = defaultdict(list)
    for lane, job_id, twice in accepted:
        expected[lane] += [job_id] * (2 if twice else 1)
    seen: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for line in sorted(journal.read_text().splitlines(), key=lambda line: int(line.split()[0])):
        _, what, lane, job_id = line.split()
        seen[lane].append((what, job_id))
    for lane, order in expected.items():
        assert seen[lane] == [(what, job_id) for job_id in order for what in ("start", "end")]
    await assert_sound(clean_url)


@pytest.mark.parametrize("kind", ["postgres"])
async def test_finish_in_a_lane_and_a_dependant_of_two_of_its_jobs_do_not_deadlock(clean_url: str) -> None:
    """Proves L20."""
    lower, higher = sorted([new_id(), new_id()])
    async with await open_store(clean_url, listen=False) as slow, await open_store(clean_url, listen=False) as quick:
        for job_id in (higher, lower):
            await quick.jobs.submit_many([function(id=job_id, lane="lane")])
        _, (lease,) = await claim(quick, "worker", 1)
        assert lease.id == higher
        # The finish has ended the higher job, and is about to open the lower; the dependant locks both, lower first.
        pause = Pause(slow, "open_gates")
        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            group.create_task(slow.leases.finish([(lease, Outcome.succeeded())]))
            await pause.reached.wait()
            submit = group.create_task(quick.jobs.submit_many([function(needs=[lower, higher])]))
            waiting = "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
            while not submit.done() and not await select(clean_url, waiting):
                pass  # Polling until the dependant's resolver waits for a lock, or is done without one.
            pause.go_on.set()
        assert slow.counters.deadlocks + quick.counters.deadlocks == 0
    await assert_sound(clean_url)


async def test_resumed_job_runs_before_later_jobs_of_its_lane(
    clean_url: str, race_processes: RaceProcesses, tmp_path: Path
) -> None:
    """Proves N1. Proves C8."""
    rounds = 200
    async with await open_store(clean_url, listen=False) as store:
        heads, followers = await blocked_lanes(store, rounds)
    flag = tmp_path / "said"
    aim = {"ids": heads, "start": 0.2, "gap": 0.0, "verb": "resume", "flag": flag}
    calls = [Call(race_scripts.call_on_each, aim, slow=SLOW), *[Call(race_scripts.work, {"flags": [flag]})] * 3]
    await race(race_processes, clean_url, calls)
    claims = await select(clean_url, "SELECT job_id, max(claimed_at) FROM attempts GROUP BY job_id")
    claimed = {str(job): claimed_at for job, claimed_at in claims}
    early = [head for head, later in zip(heads, followers, strict=True) if claimed[later] < claimed[head]]
    assert early == []
    await assert_sound(clean_url)
