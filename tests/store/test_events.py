"""The history of a job: pages, and batches that land once."""

import pytest

from holdfast.errors import Invalid, TooLarge
from holdfast.model import Cause, NewEvent, Outcome, Status
from tests.support.store_harness import TTL, StoreHarness


def lines(*text: str) -> NewEvent:
    return NewEvent(type="log", data={"stream": "stdout", "lines": list(text)})


async def test_batch_is_appended_once_and_moves_the_offsets(harness: StoreHarness) -> None:
    """Proves E1, E7."""
    job = await harness.submit()
    (lease,) = await harness.claim()
    events = [lines("one"), NewEvent(type="progress", data={"percent": 40}), NewEvent(type="mine", data={"x": [1]})]
    append = harness.store.events.append
    for answer in ("landed", "repeated"):
        result = await append(
            lease, 1, events, offsets=(4, 0), old_offsets=(0, 0), progress={"percent": 40}, usage={"tokens": 5}
        )
        assert (result.answer, result.usage) == (answer, {"tokens": 5})
    assert (await append(lease, 2, [lines("two")], offsets=(8, 0), old_offsets=(4, 0))).answer == "landed"
    types = [(event.seq, event.type) for event in await harness.events(job)]
    assert types == [(1, "status"), (2, "status"), (3, "log"), (4, "progress"), (5, "mine"), (6, "log")]
    record = await harness.get(job)
    assert (record.progress, record.usage, record.last_seq) == ({"percent": 40}, {"tokens": 5}, 6)


async def test_batch_out_of_step_is_refused(harness: StoreHarness) -> None:
    """Proves E1."""
    job = await harness.submit()
    (lease,) = await harness.claim()
    with pytest.raises(Invalid, match="batch"):
        await harness.store.events.append(lease, 2, [lines("x")], offsets=(2, 0), old_offsets=(0, 0))
    with pytest.raises(Invalid, match="batch"):
        await harness.store.events.append(lease, 1, [lines("x")], offsets=(9, 0), old_offsets=(7, 0))
    assert len(await harness.events(job)) == 2


async def test_adopter_continues_at_the_stored_offsets(harness: StoreHarness) -> None:
    """Proves E1."""
    job = await harness.submit(runner="process", spec={"command": ["true"]})
    (lease,) = await harness.claim_process()
    await harness.store.events.append(lease, 1, [lines("one")], offsets=(4, 7), old_offsets=(0, 0))
    await harness.advance(TTL + 1)
    await harness.store.leases.reap()
    (adopted,) = await harness.adopt()
    assert (adopted.adoption.batch, adopted.adoption.stdout_offset, adopted.adoption.stderr_offset) == (1, 4, 7)
    late = await harness.store.events.append(lease, 2, [lines("two")], offsets=(8, 7), old_offsets=(4, 7))
    assert late.answer == "lost"
    mine = await harness.store.events.append(adopted, 2, [lines("two")], offsets=(8, 7), old_offsets=(4, 7))
    assert mine.answer == "landed"
    logged = [event.data["lines"] for event in await harness.events(job) if event.type == "log"]
    assert logged == [["one"], ["two"]]


async def test_usage_adds_up_over_attempts(harness: StoreHarness) -> None:
    """Proves C7, E7."""
    await harness.submit(max_attempts=2)
    (lease,) = await harness.claim()
    await harness.store.events.append(lease, 1, [], offsets=(0, 0), old_offsets=(0, 0), usage={"tokens": 5, "calls": 1})
    await harness.finish(lease, Outcome(status=Status.QUEUED))
    (lease,) = await harness.claim()
    assert lease.usage == {"tokens": 5, "calls": 1}
    event = NewEvent(type="usage", data={"tokens": 2.5})
    result = await harness.store.events.append(
        lease, 1, [event], offsets=(0, 0), old_offsets=(0, 0), usage={"tokens": 2.5}
    )
    assert result.usage == {"tokens": 7.5, "calls": 1}
    assert (await harness.get(lease)).usage == {"tokens": 7.5, "calls": 1}


async def test_events_are_read_by_page(harness: StoreHarness) -> None:
    """Proves E6."""
    job = await harness.submit()
    (lease,) = await harness.claim()
    for n in range(5):
        await harness.store.events.append(
            lease, n + 1, [lines(str(k)) for k in range(500)], offsets=(n + 1, 0), old_offsets=(n, 0)
        )
    seen: list[int] = []
    cursor: int | None = 0
    pages = 0
    while cursor is not None:
        page = await harness.store.events.page(job.id, after=cursor, limit=1000)
        seen += [event.seq for event in page.items]
        cursor = page.next_after
        pages += 1
    assert seen == list(range(1, 2503))
    assert pages == 3
    assert (await harness.store.events.page(job.id, after=9999)).items == []
    for limit, after in ((0, 0), (1001, 0), (1, -1)):
        with pytest.raises(Invalid):
            await harness.store.events.page(job.id, limit=limit, after=after)


async def test_any_text_of_a_child_can_be_kept(harness: StoreHarness) -> None:
    """Proves E7."""
    job = await harness.submit()
    (lease,) = await harness.claim()
    nasty = 'NUL \0, quote ", backslash \\u0000, replacement \ufffd, astral 🐙, line\u2028'
    await harness.store.events.append(
        lease, 1, [lines(nasty), NewEvent(type="mine", data=nasty, task="t1")], offsets=(1, 0), old_offsets=(0, 0)
    )
    await harness.finish(lease, Outcome.failed("exit_nonzero", nasty))
    *_, log, mine, _ = await harness.events(job)
    assert (log.data["lines"], mine.data, mine.task) == ([nasty], nasty, "t1")
    error = (await harness.get(job)).error
    assert error is not None
    assert error.message == nasty.replace("\0", "\ufffd")


async def test_result_may_hold_what_text_columns_cannot(harness: StoreHarness) -> None:
    job = await harness.submit()
    (lease,) = await harness.claim()
    await harness.finish(lease, Outcome.succeeded({"a": "\0", "n": [1, 2.5, None, True]}))
    assert (await harness.get(job)).result == {"a": "\0", "n": [1, 2.5, None, True]}


async def test_events_that_cannot_be_kept_are_refused(harness: StoreHarness) -> None:
    await harness.submit()
    (lease,) = await harness.claim()
    with pytest.raises(Invalid, match="data"):
        await harness.store.events.append(
            lease, 1, [NewEvent(type="x", data=object())], offsets=(0, 0), old_offsets=(0, 0)
        )
    with pytest.raises(TooLarge, match="events"):
        await harness.store.events.append(
            lease, 1, [NewEvent(type="x", data="x" * 5_000_000)], offsets=(0, 0), old_offsets=(0, 0)
        )


async def test_log_bytes_add_up_over_attempts_and_a_repeat_adds_nothing(harness: StoreHarness) -> None:
    """Proves R10."""
    await harness.submit(max_attempts=2)
    (lease,) = await harness.claim()
    append = harness.store.events.append
    for answer in ("landed", "repeated"):
        result = await append(lease, 1, [lines("one")], offsets=(4, 0), old_offsets=(0, 0), log_bytes=4)
        assert (result.answer, result.log_bytes) == (answer, 4)
    result = await append(lease, 2, [], offsets=(4, 0), old_offsets=(4, 0))
    assert (result.answer, result.log_bytes) == ("landed", 4)
    await harness.finish(lease, Outcome.requeued(Cause.EXIT))
    assert (await append(lease, 3, [], offsets=(4, 0), old_offsets=(4, 0), log_bytes=9)).answer == "lost"
    (lease,) = await harness.claim()
    result = await append(lease, 1, [lines("two", "three")], offsets=(10, 0), old_offsets=(0, 0), log_bytes=10)
    assert (result.answer, result.log_bytes) == ("landed", 14)
