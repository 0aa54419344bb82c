"""The reaper checks its own clock and database access before it reaps."""

from collections.abc import Sequence

import pytest

from holdfast.duties.reaper import Reaper
from holdfast.errors import StoreUnreachable
from holdfast.model import Lease, Status
from holdfast.store import Store, notify
from holdfast.store.leases import Owners
from holdfast.store.store import connect
from holdfast.timing import ManualClock
from tests.support.store_harness import START, TTL, StoreHarness

INTERVAL = TTL / 4


async def owners(harness: StoreHarness, *workers: str) -> Sequence[Lease]:
    """One running job per worker."""
    for _ in workers:
        await harness.submit()
    return [lease for worker in workers for lease in await harness.claim(slots=1, worker=worker)]


async def watching(harness: StoreHarness, clock: ManualClock | None = None) -> Reaper:
    """Return a reaper after its first pass."""
    reaper = Reaper(harness.store, ttl=TTL, interval=INTERVAL, clock=clock or harness.clock)
    assert await reaper.run_once() == 0
    return reaper


async def step(harness: StoreHarness, reaper: Reaper, *alive: Lease) -> int:
    """Let an interval pass, in which the live workers beat."""
    await harness.advance(INTERVAL)
    for lease in alive:
        (job,) = (await harness.store.leases.beat(await owner(harness, lease), [lease], ttl=TTL)).jobs
        assert job.answer == "yours"
    return await reaper.run_once()


async def owner(harness: StoreHarness, lease: Lease) -> str:
    held = (await harness.get(lease)).lease
    assert held is not None
    return held.owner


async def test_one_dead_worker_among_three_is_reaped_without_delay(harness: StoreHarness) -> None:
    """Proves L18."""
    first, second, dead = await owners(harness, "w1", "w2", "w3")
    reaper = await watching(harness)
    assert [await step(harness, reaper, first, second) for _ in range(5)] == [0, 0, 0, 0, 1]
    assert (await harness.get(dead)).lease is None


async def test_one_dead_worker_that_is_the_only_one_is_reaped_without_delay(harness: StoreHarness) -> None:
    """Proves L18."""
    await owners(harness, "w1")
    reaper = await watching(harness)
    assert [await step(harness, reaper) for _ in range(5)] == [0, 0, 0, 0, 1]


async def test_reaping_wakes_those_who_can_adopt(harness: StoreHarness) -> None:
    await owners(harness, "w1")
    await harness.advance(2 * TTL)
    async with harness.store.notifications.listening() as signal:
        assert len(await harness.store.leases.reap()) == 1
        assert notify.ORPHAN in await signal.wait(1)
        assert await harness.store.leases.reap() == []
        # On SQLite the write of the first pass may be reported only now, as a change of any kind.
        assert notify.ORPHAN not in await signal.wait(0)


async def test_expiry_of_most_owners_is_reaped_only_after_one_ttl(harness: StoreHarness) -> None:
    """Proves L18."""
    alive, _, back = await owners(harness, "w1", "w2", "w3")
    reaper = await watching(harness)
    assert [await step(harness, reaper, alive) for _ in range(5)] == [0, 0, 0, 0, 0]
    # One of the two comes back while the reaper holds. The other is reaped one TTL after the first doubt, not before.
    assert [await step(harness, reaper, alive, back) for _ in range(4)] == [0, 0, 0, 1]


async def test_leases_still_expired_after_the_wait_are_reaped(harness: StoreHarness) -> None:
    """Proves L18."""
    await owners(harness, "w1", "w2")
    reaper = await watching(harness)
    assert [await step(harness, reaper) for _ in range(9)] == [0, 0, 0, 0, 0, 0, 0, 0, 2]
    # The next crowd is a new doubt.
    await harness.adopt(worker="w3", domains=["function"])
    await owners(harness, "w4", "w5")
    assert [await step(harness, reaper) for _ in range(9)] == [0, 0, 0, 0, 0, 0, 0, 0, 4]


async def test_pass_after_one_that_failed_reaps_nothing_until_every_live_worker_had_time_to_beat(
    harness: StoreHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proves L18."""
    (lease,) = await owners(harness, "w1")
    reaper = await watching(harness)
    with monkeypatch.context() as patch:

        async def away() -> Owners:
            raise StoreUnreachable("restarting")

        patch.setattr(harness.store.leases, "owners", away)
        for _ in range(12):  # three TTLs
            await harness.advance(INTERVAL)
            with pytest.raises(StoreUnreachable):
                await reaper.run_once()
    # Its heartbeat hung when the database came back, and was given up after a third of the lease.
    assert [await step(harness, reaper) for _ in range(3)] == [0, 0, 0]
    assert await step(harness, reaper, lease) == 0
    assert [await step(harness, reaper) for _ in range(5)] == [0, 0, 0, 0, 1]


async def test_pass_that_failed_while_reaping_counts_as_failed(
    harness: StoreHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proves L18."""
    await owners(harness, "w1")
    reaper = await watching(harness)
    assert [await step(harness, reaper) for _ in range(4)] == [0, 0, 0, 0]
    with monkeypatch.context() as patch:

        async def away(**_: object) -> None:
            raise StoreUnreachable("restarting")

        patch.setattr(harness.store.leases, "reap", away)
        with pytest.raises(StoreUnreachable):
            await step(harness, reaper)
    assert [await step(harness, reaper) for _ in range(4)] == [0, 0, 0, 1]


@pytest.mark.parametrize("away", [0.9 * TTL, 2 * TTL])
async def test_reaper_that_begins_after_an_outage_gives_every_live_worker_time_to_beat(
    harness: StoreHarness, away: float
) -> None:
    """Proves L18, whether leases expired before its first look or soon after it.

    Half of them are back before its second pass: those who are not are no crowd any more.
    """
    first, second, third, dead = await owners(harness, "w1", "w2", "w3", "w4")
    await harness.advance(away)
    reaper = await watching(harness)
    assert [await step(harness, reaper, first, second) for _ in range(2)] == [0, 0]
    assert await step(harness, reaper, first, second, third) == 1
    assert (await harness.get(dead)).lease is None


async def test_slow_read_reaps_nothing(harness: StoreHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """Proves L18."""
    await owners(harness, "w1")
    reaper = await watching(harness)
    assert [await step(harness, reaper) for _ in range(3)] == [0, 0, 0]
    look = harness.store.leases.owners
    with monkeypatch.context() as patch:

        async def slow() -> Owners:
            await harness.advance(TTL / 3 + 1)
            return await look()

        patch.setattr(harness.store.leases, "owners", slow)
        assert await step(harness, reaper) == 0
    assert [await step(harness, reaper) for _ in range(3)] == [0, 0, 1]


async def test_late_pass_reaps_nothing(harness: StoreHarness) -> None:
    """Proves L18."""
    (lease,) = await owners(harness, "w1")
    reaper = await watching(harness)
    await harness.advance(3 * INTERVAL)
    assert (
        await step(harness, reaper) == 0
    )  # The loop was late: its leases look expired now, and perhaps all are alive.
    await harness.advance(1)
    assert await reaper.run_once() == 0
    assert await step(harness, reaper, lease) == 0
    assert [await step(harness, reaper) for _ in range(5)] == [0, 0, 0, 0, 1]


@pytest.mark.parametrize("jump", [10 * TTL, -10 * TTL])
async def test_clocks_that_advanced_differently_are_held_for_one_ttl(harness: StoreHarness, jump: float) -> None:
    """Proves L18, L17."""
    clock = ManualClock()
    (lease,) = await owners(harness, "w1")
    reaper = await watching(harness, clock)
    await harness.advance(jump)  # The database's clock alone: it was set, or this machine slept.
    clock.advance(INTERVAL)
    assert await reaper.run_once() == 0
    for _ in range(3):
        await harness.advance(INTERVAL)
        clock.advance(INTERVAL)
        assert await reaper.run_once() == 0
    await harness.store.leases.beat("w1", [lease], ttl=TTL)
    for reaped in (0, 0, 0, 1):
        await harness.advance(INTERVAL + 0.1)
        clock.advance(INTERVAL + 0.1)
        assert await reaper.run_once() == reaped


async def test_small_drift_of_the_clocks_does_not_keep_it_from_reaping(harness: StoreHarness) -> None:
    """Proves L18."""
    clock = ManualClock()
    await owners(harness, "w1")
    reaper = await watching(harness, clock)
    for reaped in (0, 0, 1, 0):
        await harness.advance(INTERVAL + TTL / 3)
        clock.advance(INTERVAL)
        assert await reaper.run_once() == reaped


@pytest.mark.parametrize("kind", ["sqlite"])
async def test_clock_that_is_ahead_reaps_neither_a_lease_at_first_sight_nor_between_two_beats(
    harness: StoreHarness,
) -> None:
    """Proves L17. Its passes come more often than the heartbeats, so most of them see no renewal."""
    ahead = ManualClock(START)
    ahead.advance(4 * 3600)
    async with Store(await connect(harness.url, listen=False, clock=ahead)) as wrong:
        reaper = Reaper(wrong, ttl=TTL, interval=INTERVAL, clock=ahead)
        assert await reaper.run_once() == 0
        (lease,) = await owners(harness, "w1")
        for n in range(20):
            await harness.advance(TTL / 10)
            ahead.advance(TTL / 10)
            if n % 3 == 0:
                await harness.store.leases.beat("w1", [lease], ttl=TTL)
            assert await reaper.run_once() == 0
        # It stops beating, and is reaped in the end.
        reaped = 0
        for _ in range(11):
            ahead.advance(TTL / 10)
            reaped += await reaper.run_once()
    assert reaped == 1


async def test_workers_that_die_one_after_the_other_are_reaped_without_delay(harness: StoreHarness) -> None:
    """Proves L18. What was reaped before says nothing about the clock."""
    *dead, _, _, _ = leases = list(await owners(harness, *(f"w{n}" for n in range(5))))
    reaper = await watching(harness)
    assert [await step(harness, reaper, *leases[1:]) for _ in range(1)] == [0]
    assert [await step(harness, reaper, *leases[2:]) for _ in range(5)] == [0, 0, 0, 1, 1]
    for lease in dead:
        assert (await harness.get(lease)).lease is None


async def test_orphan_that_wears_out_its_adopters_is_paused_whatever_the_reaper_doubts(harness: StoreHarness) -> None:
    """Proves L3. Its adopters may kill every leader too: each begins with a first look."""
    (failed_adoptions,) = await owners(harness, "w0")
    for n in range(1, 6):
        await harness.advance(10 * TTL)
        await harness.store.leases.reap()
        await harness.advance(10 * TTL)
        assert len(await harness.adopt(worker=f"w{n}")) == 1
    await harness.advance(10 * TTL)
    await harness.store.leases.reap()
    await watching(harness)
    assert (await harness.get(failed_adoptions)).status is Status.PAUSED


async def test_reaper_that_cannot_write_reaps_nothing(harness: StoreHarness) -> None:
    """Proves L18. On SQLite one can read while another process holds the write lock and no worker can beat."""
    leases = await owners(harness, "w1", "w2")
    overdue = [0.0]
    reaper = Reaper(harness.store, ttl=TTL, interval=INTERVAL, clock=harness.clock, stuck=lambda: overdue[0])
    assert [await step(harness, reaper, *leases) for _ in range(4)] == [0, 0, 0, 0]
    # Nobody can write; one of two lets its lease expire, which alone would be no reason for doubt.
    await harness.store.leases.beat("w2", [leases[1]], ttl=10 * TTL)
    for n in range(6):
        overdue[0] = (n + 1) * INTERVAL
        assert await step(harness, reaper) == 0
    assert (await reaper._store.leases.owners()).expired == 1
    # Now one can, and everybody gets two thirds of a lease.
    overdue[0] = 0.0
    assert [await step(harness, reaper) for _ in range(3)] == [0, 0, 1]


async def test_reaper_whose_write_was_late_looks_again_first(harness: StoreHarness) -> None:
    """Proves L18. It was stuck between two passes that were both in time."""
    first, dead = await owners(harness, "w1", "w2")
    reaper = await watching(harness)
    assert [await step(harness, reaper, first) for _ in range(4)] == [0, 0, 0, 0]
    reaper.doubt(TTL / 4)  # No longer than it takes to beat: nothing to doubt.
    reaper.doubt(TTL / 2)
    assert [await step(harness, reaper, first) for _ in range(4)] == [0, 0, 0, 1]
    assert (await harness.get(dead)).lease is None


async def test_only_leases_expired_at_the_read_are_reaped(harness: StoreHarness) -> None:
    """Proves L18. The reap itself may wait long for its lock."""
    early, late = await owners(harness, "w1", "w2")
    await harness.advance(TTL / 2)
    await harness.store.leases.beat("w2", [late], ttl=TTL)
    await harness.advance(TTL / 2 + 1)
    seen = (await harness.store.leases.owners()).now_at
    await harness.advance(TTL)
    assert [reaped.id for reaped in await harness.store.leases.reap(seen=seen)] == [early.id]
    assert (await harness.get(late)).lease is not None
    assert [reaped.id for reaped in await harness.store.leases.reap()] == [late.id]
