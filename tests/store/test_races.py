"""Races between real processes, on both databases and on real time.

The child processes run race_scripts.py. A test checks the whole record afterwards; nothing is repaired before that.
"""

import asyncio
import os
import sqlite3
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from holdfast.model import FUNCTION_DOMAIN, Gate, Lease, Outcome, Status, new_id
from holdfast.store import Store, open_store
from holdfast.store.migrate import migrate, migrations
from holdfast.store.queries import Dialect
from holdfast.store.repeatable import repeatables
from holdfast.store.store import connect, sqlite_path
from tests.conftest import database_url, drop
from tests.support import race_scripts
from tests.support.race_processes import Call, Pause, RaceProcesses, Report
from tests.support.race_scripts import LONG, claim, function, select

CREW = 8
# Rounds of the two great races; `make test-races` runs 10,000 of each.
ROUNDS = int(os.environ.get("HOLDFAST_TEST_ROUNDS", "1500"))
POOLED = bool(os.environ.get("HOLDFAST_TEST_POOLER"))  # Forty beats at once wait for five servers.
PATIENCE = 200 + ROUNDS / 5
# A transaction that takes this long between its statements lets dozens of others in.
SLOW = 0.004


@pytest.fixture(scope="module")
def race_processes() -> Iterator[RaceProcesses]:
    race_processes = RaceProcesses(CREW)
    yield race_processes
    race_processes.close()


def seconds(default: float) -> float:
    """How long an open-ended race runs."""
    return float(os.environ.get("HOLDFAST_TEST_SECONDS", default))


async def race(race_processes: RaceProcesses, url: str, calls: Sequence[Call], *, within: float = 200.0) -> list[Any]:
    """Race, and see that no deadlock and no repair was needed; return the racers' values."""
    reports: list[Report] = await asyncio.to_thread(race_processes.race, url, calls, seconds=within)
    assert sum(report.deadlocks for report in reports) == 0
    assert sum(report.gate_repairs for report in reports) == 0
    return [report.value for report in reports]


async def statuses(url: str) -> dict[str, str]:
    return {str(job): status for job, status in await select(url, "SELECT id, status FROM jobs")}


async def assert_sound(url: str) -> None:
    """Check the whole record: no stuck gate, no gap in a history, true last status events, one job per lane."""
    async with await open_store(url, listen=False) as store:
        assert [dict(row) for row in await store.database.read("stuck_gates", limit=10)] == []
    assert await select(url, "SELECT id, lane FROM jobs WHERE gate = 'unresolved' OR unsettled") == []
    gaps = """
        SELECT j.id, j.seq, e.n, e.first, e.last FROM jobs AS j
        LEFT JOIN (
          SELECT job_id, count(*) AS n, min(seq) AS first, max(seq) AS last FROM job_events GROUP BY job_id) AS e
          ON e.job_id = j.id
        WHERE e.n IS NULL OR e.first <> 1 OR e.last <> e.n OR e.last <> j.seq"""
    assert await select(url, gaps) == []
    untrue = """
        SELECT j.id, j.status, e.data ->> 'status' FROM jobs AS j
        JOIN (SELECT job_id, max(seq) AS seq FROM job_events WHERE type = 'status' GROUP BY job_id) AS l
        ON l.job_id = j.id
        JOIN job_events AS e ON e.job_id = l.job_id AND e.seq = l.seq
        WHERE e.data ->> 'status' <> j.status"""
    assert await select(url, untrue) == []
    await assert_lanes_single(url)


async def assert_lanes_single(url: str) -> None:
    """By the ledger, no two attempts of a lane overlapped."""
    spans = """
        SELECT j.tenant, j.lane, a.claimed_at, a.ended_at, j.id
        FROM attempts AS a JOIN jobs AS j ON j.id = a.job_id WHERE j.lane IS NOT NULL
        UNION ALL
        SELECT j.tenant, j.lane, j.claimed_at, NULL, j.id
        FROM jobs AS j WHERE j.lane IS NOT NULL AND j.phase IS NOT NULL
        ORDER BY 1, 2, 3"""
    last: tuple[Any, ...] | None = None
    for span in await select(url, spans):
        if last is not None and last[:2] == span[:2]:
            assert last[3] is not None, f"{span} began while {last} was open"
            assert last[3] <= span[2], f"{span} began before {last} ended"
        last = span


# Claims


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
    ledger = "SELECT job_id, attempt, token, cause FROM attempts"
    assert {row[1:] for row in await select(clean_url, ledger)} == {(1, 1, "exit")}
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


# Lanes


async def test_submit_racing_a_finish_never_blocks_a_lane(
    clean_url: str, race_processes: RaceProcesses, tmp_path: Path
) -> None:
    """Proves N2."""
    share = {"rounds": -(-ROUNDS // 3), "width": 3}
    flags = [tmp_path / f"submitted-{n}" for n in range(3)]
    submitters = [
        Call(race_scripts.submit_behind_each_other, {**share, "flag": flag}, slow=SLOW if n == 0 else 0.0)
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


# Dependencies


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


# Leases


async def test_finish_racing_the_reaper_has_one_winner_per_lease(
    kind: str, clean_url: str, race_processes: RaceProcesses, tmp_path: Path
) -> None:
    """Proves L4. Proves L9. Proves L10."""
    jobs = 1_500 if kind == "postgres" else 600
    flags = [tmp_path / f"finished-{n}" for n in range(6)]
    async with await open_store(clean_url, listen=False) as store:
        ids = await store.jobs.submit_many([function() for _ in range(jobs)])
    finishers = [Call(race_scripts.finish_at_expiry, {"ttl": 0.05, "width": 5, "flag": flag}) for flag in flags]
    values = await race(race_processes, clean_url, [*finishers, *[Call(race_scripts.reap, {"flags": flags})] * 2])
    answers = [answer for part, _ in values[:6] for answer in part]
    renewed = sum(count for _, count in values[:6])
    reaped = Counter(one for part in values[6:] for one in part)

    owners = "SELECT job_id, data ->> 'token' FROM job_events WHERE type = 'lease' AND data ->> 'lease' = 'reaped'"
    cleared = {(str(job), int(token) - 1) for job, token in await select(clean_url, owners)}
    ledger = {
        str(job): (attempt, token)
        for job, attempt, token in await select(clean_url, "SELECT job_id, attempt, token FROM attempts")
    }
    record = {
        str(row[0]): row[1:]
        for row in await select(clean_url, "SELECT id, status, error_message, result ->> 'token' FROM jobs")
    }
    assert sorted(ledger) == sorted(ids), "one attempt, one end, per job"
    for job_id, token, _, answer in answers:
        landed = ledger[job_id] == (1, token)
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
    beaters = [Call(race_scripts.beat_past_expiry, {"jobs": share, "flag": flag, **aim}) for flag in flags]
    values = await race(race_processes, clean_url, [*beaters, *[Call(race_scripts.reap, {"flags": flags})] * 2])
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


# Stopping and resuming


async def test_stop_racing_a_failing_exit_with_retries_left_is_kept(
    kind: str, clean_url: str, race_processes: RaceProcesses, tmp_path: Path
) -> None:
    """Proves C1."""
    rounds = 600 if kind == "postgres" else 240
    flags = [tmp_path / f"stopped-{n}" for n in range(4)]
    share = {"rounds": rounds // 4, "width": 15}
    stoppers = [
        Call(race_scripts.stop_while_they_fail, {**share, "flag": flag}, slow=SLOW if n == 0 else 0.0)
        for n, flag in enumerate(flags)
    ]
    workers = [Call(race_scripts.work, {"flags": flags, "slots": 8}, slow=SLOW if n == 0 else 0.0) for n in range(4)]
    values = await race(race_processes, clean_url, [*stoppers, *workers], within=150)
    stopped = [one for part in values[:4] for one in part]
    assert len(stopped) == rounds
    histories: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for job, type, data in await select(
        clean_url, "SELECT job_id, type, data ->> type FROM job_events ORDER BY job_id, seq"
    ):
        histories[str(job)].append((type, data))
    for job_id, verb, answer in stopped:
        history = histories[job_id]
        assert answer in ("ended", "stopping")
        accepted = history.index(("cancel", "requested") if answer == "stopping" else ("status", "cancelled"))
        after = [data for type, data in history[accepted:] if type == "status"]
        # One that was interrupted ended paused, and was cancelled then; nothing ran again.
        assert after == (["paused", "cancelled"] if (verb, answer) == ("interrupt", "stopping") else ["cancelled"])
    assert set((await statuses(clean_url)).values()) == {"cancelled"}
    assert {answer for *_, answer in stopped} == {"ended", "stopping"}
    claimed = {(job, token) for part in values[4:] for job, token, *_ in part}
    assert len(claimed) > rounds / 3, "the jobs hardly ever ran"
    await assert_sound(clean_url)


async def blocked_lanes(store: Store, count: int) -> tuple[list[str], list[str]]:
    """Make lanes with a failed job at the head and a waiting one after it; return both."""
    ends = {"ends": ["fail", "succeed"]}
    heads = list(await store.jobs.submit_many([function(lane=f"lane-{n}", inputs=ends) for n in range(count)]))
    followers = list(await store.jobs.submit_many([function(lane=f"lane-{n}") for n in range(count)]))
    _, leases = await claim(store, "first", count)
    await store.leases.finish([(lease, Outcome.failed("boom", "boom")) for lease in leases])
    assert sorted(lease.id for lease in leases) == sorted(heads)
    return heads, followers


@pytest.mark.parametrize("other", ["dismiss", "resume"])
async def test_resume_racing_another_verb_has_one_consistent_outcome(
    other: str, clean_url: str, race_processes: RaceProcesses, tmp_path: Path
) -> None:
    """Proves C8."""
    rounds = 200
    async with await open_store(clean_url, listen=False) as store:
        heads, _ = await blocked_lanes(store, rounds)
    flags = [tmp_path / f"said-{n}" for n in range(2)]
    aim: dict[str, Any] = {"ids": heads, "start": 0.2, "gap": 0.02}
    # Against dismiss either may come first; against another resume the second finds the first in the middle.
    slow = SLOW if other == "resume" else 0.0
    sides = [
        Call(race_scripts.say_to_each, {**aim, "verb": verb, "flag": flag}, slow=slow)
        for verb, flag, slow in zip(("resume", other), flags, (0.0, slow), strict=True)
    ]
    one, two, *_ = await race(
        race_processes, clean_url, [*sides, *[Call(race_scripts.work, {"flags": flags, "slots": 20})] * 3]
    )
    accepted: dict[str, list[str]] = defaultdict(list)
    for job_id, verb, done in [*one, *two]:
        accepted[job_id] += [verb] if done else []
    possible = [["resume"]] if other == "resume" else [["resume"], ["dismiss", "resume"]]
    assert all(sorted(accepted[job_id]) in possible for job_id in heads)
    resumed = "SELECT job_id, count(*) FROM job_events WHERE data ->> 'by' = 'resume' GROUP BY job_id"
    assert {str(job): n for job, n in await select(clean_url, resumed)} == dict.fromkeys(heads, 1)
    if other == "dismiss":
        assert len({len(verbs) for verbs in accepted.values()}) == 2, "one side always came first: no race"
    assert Counter((await statuses(clean_url)).values()) == {"succeeded": 2 * rounds}
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
    calls = [Call(race_scripts.say_to_each, aim, slow=SLOW), *[Call(race_scripts.work, {"flags": [flag]})] * 3]
    await race(race_processes, clean_url, calls)
    claims = await select(clean_url, "SELECT job_id, max(claimed_at) FROM attempts GROUP BY job_id")
    claimed = {str(job): claimed_at for job, claimed_at in claims}
    early = [head for head, behind in zip(heads, followers, strict=True) if claimed[behind] < claimed[head]]
    assert early == []
    await assert_sound(clean_url)


# Migrations


async def test_one_of_many_concurrent_migrations_applies(
    kind: str, server: str, race_processes: RaceProcesses, tmp_path: Path
) -> None:
    """Proves O2."""
    name = f"holdfast_migrating_{os.getpid()}"
    for n in range(5):
        url = f"sqlite:///{tmp_path / f'{n}.db'}" if kind == "sqlite" else await create(server, name)
        try:
            call = Call(race_scripts.migrate_now, {"start": 0.2}, opens=False)
            applied = await race(race_processes, url, [call] * CREW)
            dialect: Dialect = "sqlite" if kind == "sqlite" else "postgres"
            every = [one.name for one in migrations(dialect)] + [one.name for one in repeatables(dialect)]
            assert sorted(applied, key=len) == [[]] * (CREW - 1) + [every]
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


# Everything at once


async def test_all_operations_at_once_never_deadlock(kind: str, clean_url: str, race_processes: RaceProcesses) -> None:
    """Proves L20. Proves E1."""
    duration = seconds(20.0 if kind == "postgres" else 6.0)
    calls = [
        Call(race_scripts.mix, {"seconds": duration, "seed": n}, slow=SLOW if n % 4 == 0 else 0.0, listen=True)
        for n in range(8)
    ]
    done = await race(race_processes, clean_url, calls, within=duration + 180)
    total = sum((Counter(part) for part in done), Counter[str]())
    assert min(total[what] for what in ("submitted", "taken", "finished", "said", "steered")) > 20, total
    await assert_sound(clean_url)
    (live,) = await race(race_processes, clean_url, [Call(race_scripts.drain)])
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


# SQLite


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
    calls = [Call(race_scripts.mix, {"seconds": duration, "seed": n}) for n in range(4)]
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
                taken = await store.leases.claim(
                    "worker", [race_scripts.PAIR], slots=5, ttl=LONG, domains=[FUNCTION_DOMAIN]
                )
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
