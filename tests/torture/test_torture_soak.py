"""A soak: its load is what it should be, its gauges miss no table, and its verdict tells flat lines from others."""

import contextlib
import os
import random
import re
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from torture.gauges import live, read_tables
from torture.history import Follow
from torture.load import BULK, KEYS, LANES, Caller, Mix
from torture.processes import family, proportional
from torture.samples import CONNECTIONS, DEAD, DRAWN, FAILED, INDEXES, MEMORY, ROOM, ROWS, TABLES, Samples
from torture.soak import Findings, Followed, Removed, SoakPlan, age_keys

from holdfast.model import Status
from tests.support.service import opened, service_in_process

SECONDS = 400.0


def measured(panel: str, *quarters: float) -> Samples:
    """Samples of a line that has one value in each quarter of the time."""
    samples = Samples()
    for second in range(0, int(SECONDS), 10):
        samples.add(panel, "line", quarters[int(4 * second / SECONDS)], at=float(second))
    return samples


def flat(samples: Samples) -> bool:
    (drift,) = samples.drifts(SECONDS)
    assert str(drift).startswith("flat " if drift.flat else "GROWS")
    return drift.flat


@pytest.mark.parametrize("panel", ROOM)
def test_constant_line_is_flat_and_doubling_line_grows(panel: str) -> None:
    """A leak in whatever is measured is seen."""
    assert flat(measured(panel, 1000, 1000, 1000, 1000))
    assert not flat(measured(panel, 1000, 1000, 2000, 3000))


def test_first_quarter_is_ignored() -> None:
    assert flat(measured(TABLES, 1, 50, 50, 50))


def test_slow_leak_of_memory_is_seen() -> None:
    assert not flat(measured(MEMORY, 60, 70, 73, 76))


def test_shrinking_line_is_flat() -> None:
    assert flat(measured(DEAD, 100_000, 20_000, 10_000, 5_000))


def test_line_that_was_not_there_early_has_no_drift() -> None:
    samples = Samples()
    samples.add(CONNECTIONS, "late", 3.0, at=SECONDS - 1)
    assert not samples.drifts(SECONDS)


def test_of_many_lines_one_that_grows_is_drawn_however_small_and_none_is_left_out() -> None:
    samples = Samples()
    for second in range(0, int(SECONDS), 10):
        for n in range(20):
            samples.add(ROWS, f"table {n}", 1000.0 * n, at=float(second))
        samples.add(ROWS, "leak", float(second), at=float(second))
    (panel,) = samples.panels(SECONDS)
    assert len(panel.lines) == DRAWN
    assert {"leak", "table 19"} < set(panel.lines)
    last = sum(points[-1][1] for points in panel.lines.values())
    assert last == 1000 * sum(range(20)) + SECONDS - 10


@pytest.mark.parametrize("minutes", [2, 4, 30, 600])
def test_retention_and_autovacuum_act_well_within_the_first_fifth(minutes: int) -> None:
    plan = SoakPlan(minutes * 60.0)
    assert plan.keep + 2 * plan.vacuum + plan.every < plan.seconds / 5


def test_each_quarter_has_the_same_pauses() -> None:
    plan = SoakPlan(SECONDS)
    quarters = [[plan.pauses(n * 100 + at / 10) for at in range(1000)] for n in range(4)]
    shares = [sum(quarter) / len(quarter) for quarter in quarters]
    assert shares == pytest.approx([0.1] * 4, abs=0.01)


# The load


def drawn() -> list[list[dict[str, Any]]]:
    mix = Mix(random.Random(0))
    return [mix.bulk(BULK) for _ in range(100)]


def test_load_has_all_that_a_table_is_kept_for() -> None:
    jobs = [job for bulk in drawn() for job in bulk]
    has = Counter(name for job in jobs for name in job)
    assert min(has[name] for name in ("lane", "needs", "reuse_key", "labels", "retry")) > len(jobs) / 50
    assert 0.05 < sum(job["runner"] == "process" for job in jobs) / len(jobs) < 0.15
    assert len({job["reuse_key"] for job in jobs if "reuse_key" in job}) == KEYS
    assert len({job["lane"] for job in jobs if "lane" in job}) > LANES


def test_no_lane_of_the_load_can_be_blocked() -> None:
    """A job in a lane does not fail, and needs nobody; what is needed comes earlier in the same call."""
    for bulk in drawn():
        for n, job in enumerate(bulk):
            assert "lane" not in job or not {"needs", "retry"} & set(job)
            assert set(job.get("needs", ())) <= {other["id"] for other in bulk[:n]}


async def test_load_is_accepted_by_two_servers_and_a_call_made_twice_makes_nothing_new(
    clean_url: str, tmp_path: Path
) -> None:
    async with (
        service_in_process(clean_url, tmp_path / "one", auth="off", shared_dir=tmp_path / "shared") as one,
        service_in_process(clean_url, tmp_path / "other", auth="off", shared_dir=tmp_path / "shared") as other,
        contextlib.aclosing(Caller([one.url, other.url], random.Random(0))) as caller,
    ):
        while caller.repeated < 3:
            await caller.submit(caller.size())
        assert caller.doubled == 0
        assert 0.9 * caller.submitted < await live(clean_url) <= caller.submitted  # A few share one job by a reuse key.
        async with opened(clean_url) as store:
            assert {(await store.jobs.get(id)).status for id in caller.known.ids} == {Status.QUEUED}


# The gauges


async def rows_of(url: str, table: str) -> float:
    samples = Samples()
    await read_tables(url, samples)
    (line,) = [panel.lines[table] for panel in samples.whole if panel.title == ROWS]
    return line[-1][1]


async def test_every_table_of_the_schema_is_sampled(clean_url: str) -> None:
    schema = (Path(__file__).parents[1] / "store" / "schema" / "sqlite.sql").read_text()
    tables = set(re.findall(r"^CREATE TABLE (\w+)", schema, re.MULTILINE))
    samples = Samples()
    await read_tables(clean_url, samples)
    measured = {panel.title: set(panel.lines) for panel in samples.whole if panel.title != CONNECTIONS}
    assert set(measured) == ({ROWS} if clean_url.startswith("sqlite") else {ROWS, DEAD, TABLES, INDEXES})
    assert all(tables <= lines for lines in measured.values())


async def test_keys_of_a_soak_are_forgotten_once_they_are_kept_long_enough(clean_url: str) -> None:
    async with opened(clean_url) as store:
        await store.jobs.submit_many([{"runner": "function", "spec": {"name": "f"}}], key="k")
        for keep, left in ((3600.0, 1), (0.0, 0)):
            await age_keys(clean_url, keep)
            await store.pruning.prune_keys()
            assert await rows_of(clean_url, "idempotency") == left


def test_memory_of_a_family_is_that_of_its_living_processes() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        assert child.pid in family(os.getpid())
        assert 0 < proportional(child.pid).anonymous < proportional(child.pid).all
        child.kill()
    assert child.pid not in family(os.getpid())
    assert proportional(child.pid).all == 0


# What went wrong


def found(**wrong: Any) -> Findings:
    """What a soak found that went well, but for this."""
    well = {"repeated": 9, "removed": Removed(count=9), "followed": Followed(streams=9)}
    return Findings(**{**well, **wrong})


@pytest.mark.parametrize(
    "wrong",
    [
        {"left": 1}, {"doubled": 1}, {"fallen": 1}, {"followed": Followed(streams=9, torn=1)},
        {"samples": measured(FAILED, 1, 0, 0, 0)}, {"samples": measured(ROWS, 0, 100, 200, 300)},
    ],
)  # fmt: skip
def test_soak_with_any_error_fails(wrong: dict[str, Any]) -> None:
    assert found().well(SoakPlan(SECONDS))
    assert not found(**wrong).well(SoakPlan(SECONDS))


@pytest.mark.parametrize("nothing", [{"repeated": 0}, {"removed": Removed()}, {"followed": Followed()}])
def test_soak_that_tried_nothing_fails(nothing: dict[str, Any]) -> None:
    assert not found(**nothing).well(SoakPlan(SECONDS))


@pytest.mark.parametrize(("seqs", "torn"), [([3, 4, 5], 0), ([], 0), ([4, 5], 1), ([3, 3, 4], 1), ([3, 5], 1)])
def test_stream_that_misses_an_event_or_has_one_twice_is_torn(seqs: list[int], torn: int) -> None:
    followed, follows = Followed(), [Follow(job="j", after=2, events=[(seq, "log") for seq in seqs])]
    followed.take(follows)
    assert (followed.streams, followed.torn, follows) == (1, torn, [])
