"""The benchmark of the peers: its statistics, its moments of asking, and the page that it writes."""

import asyncio
from pathlib import Path

import pytest
from bench.peers.adapters import PEERS
from bench.peers.bars import Panel, number, svg
from bench.peers.drains import FAR, NEAR, Moment, pause, summary
from bench.peers.page import page, picture
from bench.peers.parts.paced import window
from bench.peers.parts.pickup import delays
from bench.peers.peer import Peer
from bench.peers.results import Figure, Part, Results, figure, load, paired
from bench.peers.run import Run


def part(**more: int) -> Part:
    return Part(taken_at="2026-01-02 03:04", jobs=more.get("jobs", 40_000), rounds=more.get("rounds", 5), load="0.1")


def test_a_ratio_is_the_median_of_the_rounds_ratios_not_the_ratio_of_the_medians() -> None:
    ours, theirs = [10.0, 40.0, 90.0], [10.0, 20.0, 30.0]
    assert paired(ours, theirs) == Figure(2.0, 1.0, 3.0)
    assert paired(ours, [10.0, 40.0, 30.0]) == Figure(1.0, 1.0, 3.0)


def test_a_ratio_leaves_out_rounds_that_one_side_lacks() -> None:
    assert paired([10.0, 20.0], [5.0]) == Figure(2.0, 2.0, 2.0)
    assert paired([10.0], [0.0]) is None
    assert figure([]) is None


def test_rate_and_cpu_of_a_drain_are_those_between_two_moments() -> None:
    first = Moment(at=10.0, ended=1000, worker_cpu=3.0, store_cpu=1.0)
    last = Moment(at=14.0, ended=9000, worker_cpu=3.8, store_cpu=1.4)
    done = summary(first, last, 9000, 50.0)
    assert (done.rate, done.whole) == (2000.0, True)
    assert (done.worker_us, done.store_us) == pytest.approx((100.0, 50.0))
    assert not summary(first, last, 9001, 50.0).whole


def test_questions_come_closer_towards_the_end_and_cost_at_most_a_tenth() -> None:
    assert pause(left=100_000, rate=1000.0, probe_took=0.001) == FAR
    assert pause(left=100, rate=1000.0, probe_took=0.001) == pytest.approx(0.05)
    assert pause(left=1, rate=1000.0, probe_took=0.001) == NEAR
    assert pause(left=1, rate=1000.0, probe_took=0.1) == pytest.approx(1.0)
    assert pause(left=1, rate=0.0, probe_took=0.0) == NEAR


def test_a_window_counts_starts_inside_it_and_the_delay_of_jobs_submitted_inside_it() -> None:
    second = 1_000_000_000
    found = [(0, 5.0), (second // 2, 20.0), (second - 1, 50.0), (second, 1.0)]
    assert window(found, 0, 1.0) == (2.0, 20.0)
    assert window(found, 5 * second, 1.0) == (0.0, float("inf"))


def test_stamps_are_read_as_submit_and_milliseconds(tmp_path: Path) -> None:
    stamps = tmp_path / "stamps"
    assert delays(stamps) == []
    stamps.write_text("1000000 3500000\n2000000 2250000\n")
    assert delays(stamps) == [(1_000_000, 2.5), (2_000_000, 0.25)]


def test_parts_measured_earlier_survive_a_run_of_another_part(tmp_path: Path) -> None:
    file = tmp_path / "numbers.json"
    first = Results(machine={"processors": "2"}, parts={"drain": part()})
    first.parts["drain"].add("holdfast", rate_1=10.0)
    first.save(file)
    again = load(file)
    again.parts["submit"] = part(rounds=1)
    again.save(file)
    assert load(file).values("drain", "holdfast", "rate_1") == [10.0]
    assert load(file).parts["submit"].rounds == 1
    assert load(tmp_path / "none.json") == Results()


def test_the_page_names_missing_and_broken_peers_and_only_what_was_measured() -> None:
    found = Results(
        machine={"processors": "2"}, versions={"holdfast": {"holdfast": "1"}}, missing={"oban": "needs Python 3.12"}
    )
    found.parts["drain"] = part()
    for rate in (100.0, 200.0, 300.0):
        found.parts["drain"].add("holdfast", rate_1=rate, rate_2=rate * 1.5)
        found.parts["drain"].add("graphile", rate_1=400.0)
    found.parts["drain"].failed["pgboss"] = "round 2: its client ended"
    found.parts["drain"].kept["graphile"] = {}
    text = page(found)
    assert "| holdfast | 200 (100–300) | 300 (150–450) | – |" in text
    assert "drain, 1 worker: holdfast / Graphile Worker | **0.50** (0.25–0.75) |" in text
    assert "drain: holdfast with 2 workers / with 1 | **1.50** (1.50–1.50) |" in text
    assert "**oban-py is missing**: needs Python 3.12." in text
    assert "pg-boss broke in this part: round 2: its client ended." in text
    assert "| Graphile Worker | no job is left |" in text
    assert "| Huey (SQLite) |" not in text
    assert "Drain, 1 worker" in picture(found)
    assert "Pickup" not in picture(found)


def test_a_bar_is_as_long_as_its_median_and_names_are_escaped() -> None:
    drawn = svg(
        [Panel("a < b", [("x & y", Figure(50.0, 40.0, 100.0), True), ("z", Figure(100.0, 100.0, 100.0), False)])]
    )
    assert 'width="310.0"' in drawn
    assert 'width="620.0"' in drawn
    assert "a &lt; b" in drawn
    assert "x &amp; y" in drawn


def test_numbers_have_as_many_figures_as_they_deserve() -> None:
    assert [number(value) for value in (12_345.0, 412.3, 41.23, 4.123, 0.5)] == ["12,300", "412", "41.2", "4.1", "0.5"]


def test_peers_take_turns_and_one_that_breaks_is_left_out() -> None:
    taken: list[str] = []

    async def measure(run: Run, name: str, peer: Peer) -> None:
        taken.append(name)
        if name == "huey":
            raise RuntimeError("it is locked\nmore")
        run.part.add(name, rate=1.0)

    run = Run(deployments=None, peers=["holdfast", "huey", "raw"], jobs=10, rounds=3, part=part())  # type: ignore[arg-type]
    asyncio.run(run.in_turns(measure))
    assert taken == ["holdfast", "huey", "raw", "raw", "holdfast", "raw", "holdfast"]
    assert run.part.failed == {"huey": "round 1: it is locked"}


def test_every_peer_says_what_it_keeps_and_has_a_program() -> None:
    folder = Path("bench/peers")
    for peer in PEERS.values():
        assert peer.keeps
        assert peer.records or peer.ended_counts_left
        assert list(folder.glob(f"*/{peer.program}.*"))
