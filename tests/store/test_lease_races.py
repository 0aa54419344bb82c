"""Races between real processes, on both databases and on real time: claims, leases and the reaper."""

import asyncio
import os
from collections import Counter
from pathlib import Path

from holdfast.model import Outcome, Status
from holdfast.store import open_store
from tests.support import race_lease_scripts, race_scripts
from tests.support.race_checks import SLOW, assert_sound, race, select, statuses
from tests.support.race_processes import Call, RaceProcesses
from tests.support.race_steps import LONG, claim, function

POOLED = bool(os.environ.get("HOLDFAST_TEST_POOLER"))  # Forty beats at once wait for five servers.


async def test_each_job_is_claimed_by_one_of_eight_processes(clean_url: str, race_processes: RaceProcesses) -> None:
    """Proves L1."""
    async with await open_store(clean_url, listen=False) as store:
        ids = await store.jobs.submit_many([function() for _ in range(500)])
    done = await race(race_processes, clean_url, [Call(race_scripts.work, {"slots": 4}) for _ in range(8)])
    taken = [attempt for part in done for attempt in part]
    assert Counter(job for job, *_ in taken) == Counter(ids)
    assert {(token, attempt, answer) for _, token, attempt, answer in taken} == {(1, 1, "succeeded")}
    assert sum(bool(part) for part in done) > 1, "one process did it all: no race"
    starts = "SELECT job_id, count(*) FROM job_events WHERE data ->> 'status' = 'running' GROUP BY job_id"
    assert {n for _, n in await select(clean_url, starts)} == {1}
    ended = "SELECT job_id, attempt, token, cause FROM attempts"
    assert {row[1:] for row in await select(clean_url, ended)} == {(1, 1, "exit")}
    await assert_sound(clean_url)


async def test_cap_is_never_exceeded_by_eight_processes(clean_url: str, race_processes: RaceProcesses) -> None:
    """Proves J10."""
    cap = 3
    async with await open_store(clean_url, listen=False) as store:
        await store.queues.limit("default", cap=cap)
        await store.jobs.submit_many([function() for _ in range(300)])
    done = await race(race_processes, clean_url, [Call(race_scripts.work, {"slots": 4}, slow=SLOW) for _ in range(8)])
    assert sum(bool(part) for part in done) > 1, "one process did it all: no race"
    spans = await select(clean_url, "SELECT claimed_at, ended_at FROM attempts")
    assert len(spans) == 300
    running = most = 0
    for _, step in sorted([(end, -1) for _, end in spans] + [(start, 1) for start, _ in spans]):
        running += step
        most = max(most, running)
    assert most == cap
    assert set((await statuses(clean_url)).values()) == {"succeeded"}


async def test_finish_racing_the_reaper_has_one_winner_per_lease(
    kind: str, clean_url: str, race_processes: RaceProcesses, tmp_path: Path
) -> None:
    """Proves L4. Proves L9. Proves L10."""
    jobs = 1_500 if kind == "postgres" else 600
    flags = [tmp_path / f"finished-{n}" for n in range(6)]
    async with await open_store(clean_url, listen=False) as store:
        ids = await store.jobs.submit_many([function() for _ in range(jobs)])
    finishers = [Call(race_lease_scripts.finish_at_expiry, {"ttl": 0.05, "width": 5, "flag": flag}) for flag in flags]
    values = await race(race_processes, clean_url, [*finishers, *[Call(race_lease_scripts.reap, {"flags": flags})] * 2])
    answers = [answer for part, _ in values[:6] for answer in part]
    renewed = sum(count for _, count in values[:6])
    reaped = Counter(one for part in values[6:] for one in part)

    owners = "SELECT job_id, data ->> 'token' FROM job_events WHERE type = 'lease' AND data ->> 'lease' = 'reaped'"
    cleared = {(str(job), int(token) - 1) for job, token in await select(clean_url, owners)}
    ended = {
        str(job): (attempt, token)
        for job, attempt, token in await select(clean_url, "SELECT job_id, attempt, token FROM attempts")
    }
    record = {
        str(row[0]): row[1:]
        for row in await select(clean_url, "SELECT id, status, error_message, result ->> 'token' FROM jobs")
    }
    assert sorted(ended) == sorted(ids), "one attempt, one end, per job"
    for job_id, token, _, answer in answers:
        landed = ended[job_id] == (1, token)
        assert landed != ((job_id, token) in cleared), "finish and reap both won, or neither"
        assert (answer is not None) == landed, f"{answer} was answered"
        if landed:
            status, message, result = record[job_id]
            assert answer == status
            assert (message == f"token {token}") if status == "failed" else (int(result) == token)
    assert sum(reaped.values()) == len(cleared)
    assert {attempt for _, attempt in reaped} == {1}
    assert len(cleared) > jobs // 50, "the reaper hardly ever won: no race"
    assert sum(answer is not None for *_, answer in answers) >= jobs
    assert renewed > 0
    await assert_sound(clean_url)


async def test_beat_after_reaping_never_revives_a_lease(
    kind: str, clean_url: str, race_processes: RaceProcesses, tmp_path: Path
) -> None:
    """Proves L4. Proves L5."""
    share = 200 if kind == "postgres" else 50
    flags = [tmp_path / f"lost-{n}" for n in range(6)]
    async with await open_store(clean_url, listen=False) as store:
        await store.jobs.submit_many([function() for _ in range(6 * share)])
    slow = POOLED or kind == "sqlite"  # Six who share one writer, or one pooler, need more room to come in time.
    aim = {"ttl": 0.1, "around": (-0.06, 0.04)} if slow else {"ttl": 0.02, "around": (-0.002, 0.004)}
    beaters = [Call(race_lease_scripts.beat_past_expiry, {"jobs": share, "flag": flag, **aim}) for flag in flags]
    values = await race(race_processes, clean_url, [*beaters, *[Call(race_lease_scripts.reap, {"flags": flags})] * 2])
    beaten = [one for part in values[:6] for one in part]
    assert len(beaten) == 6 * share
    for _, token, answers in beaten:
        assert token == 1
        kept = answers.index("lost")
        assert set(answers[:kept]) <= {"yours"}
        assert answers[kept:] == ["lost"] * 4
    assert any(answers[0] == "yours" for *_, answers in beaten), "no beat ever came in time"
    left = "SELECT status, owner, lease_expires_at, token, attempt, orphaned_at IS NULL FROM jobs"
    assert {tuple(row) for row in await select(clean_url, left)} <= {
        ("running", None, None, 2, 1, 0),
        ("running", None, None, 2, 1, False),
    }
    await assert_sound(clean_url)


async def test_worker_that_adopts_its_own_orphan_loses_its_old_lease(clean_url: str) -> None:
    """Proves L4."""
    async with await open_store(clean_url, listen=False) as store:
        await store.jobs.submit_many([function()])
        _, (old,) = await claim(store, "same", 1, ttl=0.001)
        async with asyncio.timeout(60):
            while not await store.leases.reap(base=0.0, cap=0.0):
                pass  # Polling for the expiry of a real lease.
        (new,), _ = await claim(store, "same", 0, adopting=True)
        pulse = await store.leases.beat("same", [old, new], ttl=LONG)
        assert sorted((beat.token, beat.answer) for beat in pulse.jobs) == [(old.token, "lost"), (new.token, "yours")]
        assert await store.leases.finish([(old, Outcome.succeeded())]) == {old.id: None}
        assert await store.leases.finish([(new, Outcome.succeeded())]) == {new.id: Status.SUCCEEDED}
