"""Races between real processes, on both databases and on real time: stops, resumes and dismissals."""

from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

from holdfast.model import Outcome
from holdfast.store import Store, open_store
from tests.support import race_scripts
from tests.support.race_checks import SLOW, assert_sound, race, select, statuses
from tests.support.race_processes import Call, RaceProcesses
from tests.support.race_steps import claim, function


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
        Call(race_scripts.call_on_each, {**aim, "verb": verb, "flag": flag}, slow=slow)
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
