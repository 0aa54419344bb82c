"""Submit inside the caller's own transaction, with every driver on both databases."""

import re
from typing import Any

import pytest

from holdfast.errors import (
    Conflict,
    HoldfastError,
    Invalid,
    NeedFailed,
    NotFound,
    QueueFull,
    ReplayedJobDeleted,
)
from holdfast.model import Gate, new_id
from tests.support.store_harness import StoreHarness
from tests.support.submit_drivers import DOCS, JOB, ONE_EACH, SubmitDriver, notes, rows_left


async def test_rollback_leaves_no_job(harness: StoreHarness, caller: SubmitDriver) -> None:
    """Proves J13."""
    parent = new_id()
    await caller.note("kept?")
    await caller.submit(
        {**JOB, "id": parent, "reuse_key": "R"}, {**JOB, "lane": "L", "needs": [parent]}, JOB, key="call-1"
    )
    await caller.rollback()
    assert await rows_left(harness) == {}
    assert await notes(harness) == []


async def test_commit_makes_jobs_claimable_and_any_resolver_settles_lane_and_needs(
    harness: StoreHarness, caller: SubmitDriver
) -> None:
    """Proves J13."""
    parent = new_id()
    await caller.note("kept")
    accepted = await caller.submit(
        {**JOB, "lane": "L", "needs": [parent]}, {**JOB, "id": parent}, {**JOB, "lane": "L", "inputs": {"naïve": "✓"}}
    )
    child, own, second = (job.id for job in accepted)
    assert own == parent
    assert not any(job.reused for job in accepted)
    assert await rows_left(harness) == {}  # Not before the commit.
    await caller.commit()
    assert await notes(harness) == ["kept"]
    assert (await harness.get(child)).gate is Gate.UNRESOLVED
    assert [lease.id for lease in await harness.claim()] == [parent]
    await harness.store.gates.resolve()
    assert (await harness.get(child)).gate is Gate.NEEDS
    (lease,) = await harness.claim()
    assert (lease.id, lease.inputs) == (second, {"naïve": "✓"})


async def test_answer_lists_reused_jobs(harness: StoreHarness, caller: SubmitDriver) -> None:
    """Proves J12, N7."""
    existing = await harness.submit(reuse_key="R")
    first, second = await caller.submit({**JOB, "reuse_key": "R"}, JOB, key="K")
    assert (first.id, first.reused) == (existing.id, True)
    assert not second.reused
    replayed = await caller.submit({**JOB, "reuse_key": "R"}, JOB, key="K")
    assert [(job.id, job.reused) for job in replayed] == [(existing.id, True), (second.id, True)]
    await caller.commit()
    # The keys are the same ones that a store's own submit knows.
    again = await harness.store.jobs.accept(({**JOB, "reuse_key": "R"}, JOB), key="K")
    assert [job.id for job in again] == [existing.id, second.id]


async def test_refused_call_gives_the_typed_error_and_inserts_nothing(
    harness: StoreHarness, caller: SubmitDriver, kind: str
) -> None:
    """Proves J11, J12, J13."""
    taken = await harness.submit(queue="other")
    broken = await harness.submit(hold=True, queue="other")
    await harness.store.jobs.cancel(broken.id)
    await harness.store.queues.limit("small", depth=2)
    await harness.store.jobs.accept([JOB], key="used")
    deleted = (await harness.store.jobs.accept([{**JOB, "hold": True}], key="gone"))[0]
    await harness.store.jobs.delete(deleted.id, force=True)
    before, unknown = await rows_left(harness), new_id()
    refusals: list[tuple[type[HoldfastError], str, list[Any], dict[str, Any]]] = [
        (Invalid, "priority", [JOB, {**JOB, "priority": "high"}], {}),
        (Invalid, "spec", [{**JOB, "spec": {}}], {}),
        (Invalid, "jobs: 0 jobs", [], {}),
        (Invalid, "idempotency_key", [JOB], {"key": "k" * 129}),
        (Invalid, "tenant", [JOB], {"tenant": ""}),
        (NotFound, unknown, [JOB, {**JOB, "needs": [unknown]}], {"key": "new"}),
        (NeedFailed, f"{broken.id} cancelled", [JOB, {**JOB, "needs": [broken.id]}], {}),
        (Conflict, f"id: job {taken.id} exists already", [JOB, {**JOB, "id": taken.id}], {"key": "new"}),
        (QueueFull, "small", [{**JOB, "queue": "small", "reuse_key": f"S{n}"} for n in range(3)], {"key": "new"}),
        (Conflict, "another body", [{**JOB, "priority": 1}], {"key": "used"}),
        (ReplayedJobDeleted, "deleted", [{**JOB, "hold": True}], {"key": "gone"}),
    ]
    for error, words, jobs, options in refusals:
        await caller.note("lost on Postgres, where a failed statement aborts the transaction")
        with pytest.raises(error, match=re.escape(words)) as caught:
            await caller.submit(*jobs, **options)
        assert type(caught.value) is error
        await (caller.commit() if kind == "sqlite" or error is Invalid else caller.rollback())
    assert await rows_left(harness) == before
    assert len(await notes(harness)) == (len(refusals) if kind == "sqlite" else 5)
    await caller.submit(*[{**JOB, "queue": "small"}] * 2)
    await caller.commit()


@pytest.mark.parametrize("driver", ONE_EACH)
async def test_ten_thousand_in_one_call(harness: StoreHarness, caller: SubmitDriver) -> None:
    """Proves J13."""
    accepted = await caller.submit(*[JOB] * 10_000)
    assert len({job.id for job in accepted}) == 10_000
    await caller.commit()
    assert (await rows_left(harness)) == {"jobs": 10_000, "specs": 10_000}
    assert len(await harness.claim(slots=100)) == 100
    with pytest.raises(Invalid, match="10001 jobs in one call"):
        await caller.submit(*[JOB] * 10_001)


def test_snippets_of_the_docs_are_python() -> None:
    snippets = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    assert snippets
    for snippet in snippets:
        compile(f"async def example():\n{re.sub('^', '    ', snippet, flags=re.MULTILINE)}", str(DOCS), "exec")
