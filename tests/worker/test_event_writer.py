"""The buffer of an attempt's events, on a real store."""

import pytest

from holdfast.model import NewEvent
from holdfast.worker.event_writer import EventWriter
from tests.support.store_harness import TTL, StoreHarness


async def test_writer_that_lost_its_lease_says_so_and_writes_no_more(
    harness: StoreHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proves L4."""
    await harness.submit(runner="process", spec={"command": ["true"]})
    (lease,) = await harness.claim_process()
    writer = EventWriter(harness.store, lease)
    writer.add(NewEvent(type="log", data={"stream": "stdout", "lines": ["one"]}))
    assert await writer.flush()
    await harness.advance(2 * TTL)
    await harness.store.leases.reap()
    writer.add(NewEvent(type="log", data={"stream": "stdout", "lines": ["two"]}))
    assert not await writer.flush()
    assert writer.lost

    async def append(*_: object, **__: object) -> None:
        raise AssertionError("the lease is lost: nothing is asked of the store")

    monkeypatch.setattr(harness.store.events, "append", append)
    assert not await writer.flush()
    writer.add(NewEvent(type="log", data={"stream": "stdout", "lines": ["three"]}))
    assert not await writer.flush()
