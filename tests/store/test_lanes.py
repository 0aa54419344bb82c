"""Lanes: one job at a time, in order; what blocks and unblocks them."""

from collections.abc import Iterable

import pytest

from holdfast.errors import Invalid, NotFound
from holdfast.model import Cause, Check, Gate, LaneState, Outcome, Status
from holdfast.store.files import FilesLeftToDuties
from holdfast.store.lanes import LaneKey, Lanes, Step, decide
from tests.support.store_harness import TTL, StoreHarness

PAUSE = Outcome(status=Status.PAUSED, cause=Cause.INTERRUPTED)


async def test_lane_runs_one_job_at_a_time_in_order_of_acceptance(harness: StoreHarness) -> None:
    """Proves N1."""
    jobs = [await harness.submit(lane="L", priority=n) for n in range(5)]
    other = await harness.submit(lane="M")
    ran = []
    while claimed := await harness.claim():
        assert len([lease for lease in claimed if lease.lane == "L"]) <= 1
        ran += [lease.id for lease in claimed]
        for lease in claimed:
            await harness.finish(lease)
    assert [job_id for job_id in ran if job_id != other.id] == [job.id for job in jobs]


async def test_lanes_of_two_tenants_are_independent(harness: StoreHarness) -> None:
    """Proves N1."""
    await harness.submit(lane="L")
    await harness.submit(lane="L", tenant="someone")
    assert len(await harness.claim()) == 2


@pytest.mark.parametrize(
    "outcome",
    [PAUSE, Outcome.failed("exit_nonzero", "boom"), Outcome(status=Status.TIMED_OUT, cause=Cause.TIMED_OUT)],
)
async def test_bad_end_blocks_its_lane_only_until_a_person_acts(harness: StoreHarness, outcome: Outcome) -> None:
    """Proves N2, N3."""
    first, second = await harness.submit(lane="L"), await harness.submit(lane="L")
    await harness.submit(lane="M")
    for lease in await harness.claim():
        await harness.finish(lease, outcome if lease.lane == "L" else Outcome.succeeded())
    lane = await harness.store.lanes.get("L")
    assert (lane.state, lane.head, lane.blockers, lane.depth) == (LaneState.BLOCKED, first.id, (first.id,), 1)
    assert await harness.claim() == []
    assert (await harness.get(second)).gate is Gate.LANE
    assert (await harness.submit(lane="M")).gate is Gate.OPEN
    await harness.store.jobs.resume(first.id)
    assert (await harness.run_one()).id == first.id
    assert (await harness.run_one()).id == second.id


@pytest.mark.parametrize("verb", ["resolve", "dismiss", "delete"])
async def test_lane_continues_when_its_blocker_is_settled(harness: StoreHarness, verb: str) -> None:
    """Proves C8, N2."""
    first, second = await harness.submit(lane="L"), await harness.submit(lane="L")
    (lease,) = await harness.claim()
    await harness.fail(lease)
    await getattr(harness.store.jobs, verb)(first.id)
    assert [lease.id for lease in await harness.claim()] == [second.id]


@pytest.mark.parametrize("while_running", [False, True])
async def test_lane_does_not_wait_for_the_files_of_a_job_that_is_deleted(
    harness: StoreHarness, while_running: bool
) -> None:
    """Proves N2."""
    harness.store.jobs.files = FilesLeftToDuties()
    first, second = await harness.submit(lane="L"), await harness.submit(lane="L")
    (lease,) = await harness.claim()
    if while_running:
        await harness.store.jobs.delete(first.id, force=True)
    await harness.fail(lease)
    if while_running:
        await harness.store.jobs.finish_deletions()
    else:
        assert (await harness.store.jobs.delete(first.id)).outcome == "deleting"
    assert (await harness.get(first)).status is Status.FAILED
    assert [lease.id for lease in await harness.claim()] == [second.id]


async def test_dismissed_job_can_be_resumed_and_runs_next(harness: StoreHarness) -> None:
    """Proves C8, N2."""
    first, second, third = [await harness.submit(lane="L") for _ in range(3)]
    (lease,) = await harness.claim()
    await harness.fail(lease)
    await harness.store.jobs.dismiss(first.id, by="ada", reason="known")
    assert (await harness.get(first)).dismissed
    (lease,) = await harness.claim()
    await harness.store.jobs.resume(first.id)
    assert not (await harness.get(first)).dismissed
    assert await harness.claim() == []
    await harness.finish(lease)
    assert [(await harness.run_one()).id for _ in range(2)] == [first.id, third.id]
    assert second.id == lease.id


async def test_resumed_job_keeps_its_place_before_others_that_were_resumed(harness: StoreHarness) -> None:
    """Proves C8, N2."""
    first, second = await harness.submit(lane="L"), await harness.submit(lane="L")
    for job in (first, second):
        (lease,) = await harness.claim()
        await harness.fail(lease)
        await harness.store.jobs.dismiss(job.id)
    await harness.store.jobs.resume(first.id)
    (lease,) = await harness.claim()
    await harness.store.jobs.resume(second.id)
    await harness.fail(lease)
    await harness.store.jobs.resume(first.id)
    assert [lease.id for lease in await harness.claim()] == [first.id]


async def test_unresolved_resumed_job_is_not_overtaken(harness: StoreHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """Proves N1, C8."""
    first, second = await harness.submit(lane="L"), await harness.submit(lane="L")
    (lease,) = await harness.claim()
    await harness.fail(lease)

    async def nothing(*_: object, **__: object) -> None:
        """The caller that resumed it died before the follow-up."""

    monkeypatch.setattr(harness.store.gates, "follow_up", nothing)
    await harness.store.jobs.resume(first.id)
    await harness.store.lanes.pause("L")
    await harness.store.lanes.resume("L")
    assert await harness.claim() == []
    await harness.store.gates.resolve()
    assert [(await harness.run_one()).id for _ in range(2)] == [first.id, second.id]


async def test_retry_in_backoff_keeps_the_lane(harness: StoreHarness) -> None:
    """Proves N2."""
    first, second = await harness.submit(lane="L", max_attempts=3), await harness.submit(lane="L")
    (lease,) = await harness.claim()
    await harness.finish(lease, Outcome.requeued(Cause.EXIT, delay=30))
    assert await harness.claim() == []
    assert (await harness.store.lanes.get("L")).head == first.id
    await harness.advance(30)
    await harness.store.gates.promote()
    (lease,) = await harness.claim()
    assert (lease.id, lease.attempt) == (first.id, 2)
    await harness.finish(lease, Outcome.requeued(Cause.EXIT))
    assert (await harness.run_one()).id == first.id
    assert (await harness.run_one()).id == second.id


async def test_job_that_ended_without_a_start_never_blocks(harness: StoreHarness) -> None:
    """Proves N2."""
    first, second = await harness.submit(lane="L"), await harness.submit(lane="L")
    await harness.store.jobs.cancel(first.id)
    assert (await harness.get(second)).gate is Gate.OPEN
    timed = await harness.submit(lane="M", queue_timeout=5)
    after = await harness.submit(lane="M")
    await harness.advance(6)
    assert await harness.store.jobs.expire() == 1
    assert await harness.status(timed) is Status.TIMED_OUT
    assert (await harness.get(after)).gate is Gate.OPEN


async def test_orphan_keeps_its_lane(harness: StoreHarness) -> None:
    """Proves N1, N2."""
    first = await harness.submit(lane="L", runner="process", spec={"command": ["true"]})
    await harness.submit(lane="L", runner="process", spec={"command": ["true"]})
    await harness.claim_process()
    await harness.advance(TTL + 1)
    await harness.store.leases.reap()
    assert await harness.claim_process() == []
    (adopted,) = await harness.adopt()
    assert adopted.id == first.id


async def test_lower_job_that_becomes_eligible_displaces_a_holder_that_has_not_started(harness: StoreHarness) -> None:
    """Proves N1."""
    late = await harness.submit(lane="L", available_at=harness.later(10).isoformat())
    held = await harness.submit(lane="L", hold=True)
    ready = await harness.submit(lane="L")
    assert (await harness.get(ready)).gate is Gate.OPEN
    await harness.store.jobs.release(held.id)
    assert [(await harness.get(job)).gate for job in (held, ready)] == [Gate.OPEN, Gate.LANE]
    await harness.advance(10)
    await harness.store.gates.promote()
    assert [(await harness.get(job)).gate for job in (late, held, ready)] == [Gate.OPEN, Gate.LANE, Gate.LANE]
    assert [(await harness.run_one()).id for _ in range(3)] == [late.id, held.id, ready.id]


async def test_lane_is_paused_and_resumed(harness: StoreHarness) -> None:
    """Proves N3."""
    first = await harness.submit(lane="L")
    await harness.submit(lane="L")
    lane = await harness.store.lanes.pause("L")
    assert (lane.state, lane.depth, lane.head) == (LaneState.PAUSED, 2, first.id)
    assert await harness.claim() == []
    lane = await harness.store.lanes.resume("L")
    assert (lane.state, lane.head, lane.depth) == (LaneState.ACTIVE, first.id, 2)
    (lease,) = await harness.claim()
    # What runs goes on, and a retry of it waits until the lane is resumed.
    await harness.store.lanes.pause("L")
    await harness.finish(lease, Outcome.requeued(Cause.EXIT))
    assert await harness.claim() == []
    await harness.store.lanes.resume("L")
    assert (await harness.run_one()).id == first.id


async def test_lane_may_be_paused_before_its_first_job(harness: StoreHarness) -> None:
    """Proves N3."""
    await harness.store.lanes.pause("new")
    assert (await harness.submit(lane="new")).gate is Gate.LANE
    assert await harness.claim() == []


async def test_lanes_are_listed_by_page(harness: StoreHarness) -> None:
    """Proves N3."""
    for name in ("b", "a", "c"):
        await harness.submit(lane=name)
    assert [lane.lane for lane in await harness.store.lanes.list(limit=2)] == ["a", "b"]
    assert [lane.lane for lane in await harness.store.lanes.list(after="b")] == ["c"]
    with pytest.raises(NotFound, match="no lane nowhere"):
        await harness.store.lanes.get("nowhere")
    with pytest.raises(NotFound):
        await harness.store.lanes.get("a", tenant="someone")


async def test_head_in_a_paused_queue_keeps_its_lane(harness: StoreHarness) -> None:
    """Proves N2."""
    first = await harness.submit(lane="L", queue="slow")
    await harness.submit(lane="L")
    await harness.store.queues.pause("slow")
    assert await harness.claim() == []
    assert (await harness.store.lanes.get("L")).head == first.id


def lane_row(**fields: object) -> dict[str, object]:
    row: dict[str, object] = {
        "paused": False,
        "blocked": False,
        "holder": None,
        "holder_status": None,
        "holder_gate": None,
        "holder_started": False,
        "holder_position": None,
        "next_id": None,
        "next_position": None,
    }
    return {**row, **fields}


HELD = {"holder": "h", "holder_status": "queued", "holder_gate": "open", "holder_position": 2}
NEXT = {"next_id": "n", "next_position": 3}


@pytest.mark.parametrize(
    ("row", "step"),
    [
        (lane_row(), Step()),
        (lane_row(**NEXT), Step(open="n", holder="n")),
        (lane_row(**NEXT, blocked=True), Step()),
        (lane_row(**NEXT, paused=True), Step()),
        (lane_row(**NEXT, holder="h", holder_status="running"), Step(holder="h")),
        (lane_row(**NEXT, holder="h", holder_status="succeeded"), Step(open="n", holder="n")),
        (lane_row(**NEXT, holder="h", holder_status=None), Step(open="n", holder="n")),
        (lane_row(**NEXT, **HELD), Step(holder="h")),
        (lane_row(**{**NEXT, "next_position": 1}, **HELD), Step(shut="h", open="n", holder="n")),
        (lane_row(**NEXT, **HELD, paused=True), Step(shut="h")),
        (lane_row(**NEXT, **HELD, holder_started=True, paused=True), Step(shut="h", holder="h")),
        (lane_row(**{**NEXT, "next_position": 1}, **HELD, holder_started=True), Step(holder="h")),
        (lane_row(**NEXT, **{**HELD, "holder_gate": "lane"}, holder_started=True), Step(open="h", holder="h")),
        (lane_row(**NEXT, **{**HELD, "holder_gate": "future"}, holder_started=True), Step(holder="h")),
    ],
)
def test_decision_about_a_lane(row: dict[str, object], step: Step) -> None:
    """Proves N2."""
    assert decide(row) == step


async def test_lane_has_a_readiness_check_that_a_worker_can_ask_for(harness: StoreHarness) -> None:
    """Proves C10."""
    lanes = harness.store.lanes
    assert await lanes.check_of("default", "L") is None
    lane = await lanes.set_check("L", {"command": ["pg_isready", "-t", "3"], "timeout": 10})
    check = Check(command=("pg_isready", "-t", "3"), timeout=10.0)
    assert (lane.check, lane.state) == (check, LaneState.IDLE)
    await harness.submit(lane="L")
    await lanes.pause("L")
    assert (await lanes.get("L")).check == (await lanes.list())[0].check == check
    assert await lanes.check_of("default", "L") == check
    assert await lanes.check_of("other", "L") is None
    assert (await lanes.set_check("L", None)).check is None
    assert await lanes.check_of("default", "L") is None
    assert (await lanes.resume("L")).state is LaneState.ACTIVE


@pytest.mark.parametrize(
    ("check", "field"),
    [
        ({"command": ["true"], "timeout": 1, "shell": True}, "check.shell"),
        ({"command": [], "timeout": 1}, "check.command"),
        ({"command": [""], "timeout": 1}, "check.command"),
        ({"command": ["a\0b"], "timeout": 1}, "check.command"),
        ({"command": "true", "timeout": 1}, "check.command"),
        ({"command": [1], "timeout": 1}, "check.command[0]"),
        ({"command": ["true"], "timeout": 0}, "check.timeout"),
        ({"command": ["true"], "timeout": float("inf")}, "check.timeout"),
        ({"command": ["true"], "timeout": "soon"}, "check.timeout"),
        ({"command": ["true"]}, "check.timeout"),
        ({"timeout": 1}, "check.command"),
    ],
)
async def test_readiness_check_that_cannot_work_is_refused_by_its_field(
    harness: StoreHarness, check: dict[str, object], field: str
) -> None:
    """Proves C10."""
    with pytest.raises(Invalid) as refused:
        await harness.store.lanes.set_check("L", check)
    assert refused.value.field == field
    assert await harness.store.lanes.list() == []


# Forgotten when idle


async def test_idle_lane_is_forgotten_and_comes_back_with_its_next_job(harness: StoreHarness) -> None:
    """Proves N1. An unused lane has no row."""
    await harness.submit(lane="L")
    assert await harness.store.pruning.prune_lanes() == 0
    await harness.run_one()
    assert await harness.store.pruning.prune_lanes() == 1
    assert await harness.store.lanes.list() == []
    first, second = await harness.submit(lane="L"), await harness.submit(lane="L")
    assert [(await harness.run_one()).id for _ in range(2)] == [first.id, second.id]


async def test_lane_in_use_is_not_forgotten(harness: StoreHarness) -> None:
    """Proves N1, N2, N3: it runs, waits, is blocked, paused, or has a check."""
    for lane in ("runs", "runs", "fails"):
        await harness.submit(lane=lane)
    for lease in await harness.claim():
        if lease.lane == "fails":
            await harness.fail(lease)
    await harness.submit(lane="waits")
    await harness.store.lanes.pause("paused")
    await harness.store.lanes.set_check("checked", {"command": ["true"], "timeout": 1})
    assert await harness.store.pruning.prune_lanes() == 0
    assert [lane.lane for lane in await harness.store.lanes.list()] == ["checked", "fails", "paused", "runs", "waits"]


async def test_job_resumed_in_a_forgotten_lane_keeps_its_place(harness: StoreHarness) -> None:
    """Proves N1."""
    first, cancelled = await harness.submit(lane="L"), await harness.submit(lane="L")
    delayed = await harness.submit(lane="L", available_at=harness.later(60).isoformat())
    await harness.store.jobs.cancel(cancelled.id)
    assert (await harness.run_one()).id == first.id
    assert await harness.store.pruning.prune_lanes() == 1
    await harness.advance(1)
    later = await harness.submit(lane="L")
    await harness.store.jobs.resume(cancelled.id)
    assert [(await harness.run_one()).id for _ in range(2)] == [cancelled.id, later.id]
    assert await harness.store.pruning.prune_lanes() == 1
    await harness.advance(61)
    await harness.store.gates.promote()
    assert (await harness.run_one()).id == delayed.id


async def test_lane_that_is_forgotten_before_it_is_locked_is_made_again(
    harness: StoreHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proves N1, N3: for a caller that submits, pauses it, or gives it a check."""
    ensure, calls = Lanes.ensure, 0

    async def in_vain(self: Lanes, lanes: Iterable[LaneKey]) -> None:
        """Every other time somebody forgets the lane at once."""
        nonlocal calls
        calls += 1
        if calls % 2 == 0:
            await ensure(self, lanes)

    monkeypatch.setattr(Lanes, "ensure", in_vain)
    job = await harness.submit(lane="L")
    assert (await harness.get(job)).gate is Gate.OPEN
    assert (await harness.store.lanes.pause("M")).state is LaneState.PAUSED
    assert (await harness.store.lanes.set_check("N", {"command": ["true"], "timeout": 1})).check is not None
    assert calls == 6
