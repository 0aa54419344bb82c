"""The audit trail: every act of an operator leaves one row that says who, when, on what, and never a secret."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest

from holdfast.api.auth import ADDRESSES_COUNTED, ADDRESSES_NAMED, UnknownTokenCounts
from holdfast.catalogue import ACTIONS
from holdfast.duties.pruner import Pruner
from holdfast.errors import Conflict, Invalid, JobNotEnded, NotFound
from holdfast.model import RecordedFolder, Role
from holdfast.store.audit import local_actor
from holdfast.store.retention import Retention
from holdfast.store.shared_folder import SharedFolderRecord
from holdfast.store.tokens import SILENCE_DAYS, new_secret
from tests.support.audit_trail import ANN, SECRET, trail
from tests.support.service import opened
from tests.support.store_harness import StoreHarness

DAY = 86_400.0


async def failed_job(harness: StoreHarness, **fields: Any) -> str:
    job = await harness.submit(**fields)
    (lease,) = await harness.claim(1)
    await harness.fail(lease)
    return job.id


async def worker(harness: StoreHarness, name: str = "w1", host: str = "box") -> None:
    await harness.store.workers.register(
        name, host=host, pid=1, queues={"default": 1}, capabilities=["process"], domains=[host], ttl=60.0
    )


async def make_and_remove_token(harness: StoreHarness) -> None:
    made = await harness.store.tokens.add("ci", Role.SUBMITTER, secret=new_secret(), tenant="blue", by=ANN)
    await harness.store.tokens.remove(made.id, by=ANN)


async def use_token(harness: StoreHarness) -> None:
    made = await harness.store.tokens.add("ci", Role.SUBMITTER, secret=new_secret(), tenant="blue", by=ANN)
    await harness.store.tokens.use({made.id: "192.0.2.7"})


async def change_queue(harness: StoreHarness) -> None:
    queues = harness.store.queues
    await queues.pause("q", by=ANN)
    await queues.pause("q", by=ANN)
    await queues.resume("q", by=ANN)
    await queues.limit("q", cap=3, depth=9, by=ANN)
    await queues.limit("q", cap=3, depth=9, by=ANN)


async def change_lane(harness: StoreHarness) -> None:
    lanes = harness.store.lanes
    await lanes.pause("L", by=ANN)
    await lanes.pause("L", by=ANN)
    await lanes.resume("L", by=ANN)
    await lanes.set_check("L", {"command": ["psql", SECRET], "timeout": 5}, by=ANN)
    await lanes.set_check("L", None, by=ANN)


async def resolve(harness: StoreHarness) -> None:
    await harness.store.jobs.resolve(await failed_job(harness), {"key": SECRET}, by=ANN, reason="done by hand")


async def dismiss(harness: StoreHarness) -> None:
    job = await failed_job(harness, lane="L")
    await harness.store.jobs.dismiss(job, by=ANN)
    await harness.store.jobs.dismiss(job, by=ANN)


async def raise_budget(harness: StoreHarness) -> None:
    job = await failed_job(harness, budget={"usd": 1.0})
    await harness.store.jobs.resume(job, budget={"usd": 5.0}, by=ANN, reason="worth it")
    (lease,) = await harness.claim(1)
    await harness.fail(lease)
    await harness.store.jobs.resume(job, by=ANN)  # With nothing raised: the job's own history is enough.


async def delete(harness: StoreHarness) -> None:
    await harness.store.jobs.delete((await harness.submit(hold=True)).id, force=True, by=ANN, reason="in the way")
    await harness.store.jobs.delete(await failed_job(harness), by=ANN)
    job = await harness.submit()
    await harness.claim(1)
    for _ in range(2):
        await harness.store.jobs.delete(job.id, force=True, by=ANN)
    with pytest.raises(JobNotEnded):
        await harness.store.jobs.delete((await harness.submit()).id, by=ANN)


async def drain(harness: StoreHarness) -> None:
    await worker(harness)
    await harness.store.workers.drain_host("box", by=ANN)
    await harness.store.workers.drain("w1", by=ANN)


async def lose_host(harness: StoreHarness) -> None:
    await worker(harness)
    await harness.advance(61)
    await harness.store.workers.lost("box", by=ANN)


async def adopt_folder(harness: StoreHarness) -> None:
    first, second = RecordedFolder(id="a", path="/a"), RecordedFolder(id="b", path="/b")
    await harness.store.shared_folder.write(first, instead_of=None)  # A first start, by itself.
    await SharedFolderRecord(harness.store.database, by=ANN).write(second, instead_of=first)
    assert not await SharedFolderRecord(harness.store.database, by=ANN).write(second, instead_of=first)


async def change_tools(harness: StoreHarness) -> None:
    for tools in ({}, {"a": "1", "b": "1"}, {"a": "1", "b": "1"}, {"b": "2", "c": "1"}):
        await harness.store.audit.tools_loaded(ANN, "/tools.toml", tools)


Acts = list[tuple[str, dict[str, Any] | None, dict[str, Any] | None]]
CI = {"name": "ci", "role": "submitter", "expires_at": None}
CHECK = {"program": "psql", "arguments": 1, "timeout": 5.0}
OFF: dict[str, Any] = {"paused": False, "max_running": None, "max_depth": None}
ACTS: dict[Callable[[StoreHarness], Awaitable[None]], Acts] = {
    make_and_remove_token: [("token.make", None, CI), ("token.remove", CI, None)],
    use_token: [("token.make", None, CI), ("token.use", {"used_at": None}, None)],
    change_queue: [
        ("queue.pause", OFF, {**OFF, "paused": True}),
        ("queue.resume", {**OFF, "paused": True}, OFF),
        ("queue.limit", OFF, {**OFF, "max_running": 3, "max_depth": 9}),
    ],
    change_lane: [
        ("lane.pause", {"paused": False}, {"paused": True}),
        ("lane.resume", {"paused": True}, {"paused": False}),
        ("lane.check", None, CHECK),
        ("lane.check", CHECK, None),
    ],
    resolve: [("job.resolve", {"status": "failed"}, {"status": "succeeded"})],
    dismiss: [("job.dismiss", {"status": "failed"}, None)],
    raise_budget: [
        ("job.resume", {"status": "failed", "budget": {"usd": 1.0}}, {"budget": {"usd": 5.0}, "stopped": False})
    ],
    delete: [
        ("job.delete", {"status": "pending"}, {"force": True}),
        ("job.delete", {"status": "failed"}, {"force": False}),
        ("job.delete", {"status": "running"}, {"force": True}),
    ],
    drain: [("worker.drain", None, {"workers": ["w1"]})] * 2,
    lose_host: [("worker.lost", None, {"workers": ["w1"]})],
    adopt_folder: [("shared_folder.adopt", {"id": "a", "path": "/a"}, {"id": "b", "path": "/b"})],
    change_tools: [
        ("tools.change", None, {"added": ["a", "b"], "changed": [], "removed": [], "tools": {"a": "1", "b": "1"}}),
        ("tools.change", None, {"added": ["c"], "changed": ["b"], "removed": ["a"], "tools": {"b": "2", "c": "1"}}),
    ],
}


@pytest.mark.parametrize("act", ACTS, ids=lambda act: act.__name__)
async def test_each_act_writes_one_row_and_no_change_writes_none(
    harness: StoreHarness, act: Callable[[StoreHarness], Awaitable[None]]
) -> None:
    """Who, when, what, before and after; no secret, and nothing for an act that was refused or changed nothing."""
    began = harness.clock.now()
    await act(harness)
    rows = await trail(harness.store)
    assert [(row.action, row.before, row.after) for row in rows] == ACTS[act]
    for row in rows:
        assert row.action in ACTIONS
        assert began <= row.done_at <= harness.clock.now()
        if row.action != "token.use":
            assert (row.actor, row.token_id, row.role, row.address) == (
                ANN.name,
                ANN.token_id,
                ANN.role,
                ANN.address,
            )
    assert SECRET not in repr(rows)
    assert "hf_" not in repr(rows)


async def test_rows_name_the_tenant_and_the_reason(harness: StoreHarness) -> None:
    job = await harness.submit(tenant="blue", hold=True)
    await harness.store.jobs.delete(
        job.id, tenant="blue", force=True, by=ANN, reason="in\x1b[31m the\nway" + "!" * 1000
    )
    await harness.store.queues.pause("q", by=ANN)
    row, installation = await trail(harness.store)
    assert (row.tenant, row.subject) == ("blue", job.id)
    assert row.reason is not None
    assert row.reason.startswith("in the way!!")
    assert len(row.reason) == 500
    assert (installation.tenant, installation.reason) == (None, None)


async def test_embedded_callers_are_recorded_by_account_and_given_name(harness: StoreHarness) -> None:
    await harness.store.queues.pause("q")
    await harness.store.queues.resume("q", by="deploy script")
    first, second = await trail(harness.store)
    assert first.actor == local_actor("embedded").name
    assert first.actor.startswith("embedded:")
    assert first.actor.endswith(f"@{socket.gethostname()}")
    assert (second.actor, second.token_id, second.role) == ("embedded:deploy script", None, None)


async def test_refused_acts_write_no_row(harness: StoreHarness) -> None:
    only = await harness.store.tokens.add("only", Role.ADMIN, secret=new_secret(), by=ANN)
    for refused in (
        harness.store.tokens.add("only", Role.ADMIN, secret=new_secret(), by=ANN),
        harness.store.tokens.remove(only.id, by=ANN),
        harness.store.workers.drain_host("nowhere", by=ANN),
        harness.store.workers.lost("nowhere", by=ANN),
        harness.store.jobs.resolve((await harness.submit()).id, by=ANN),
    ):
        with pytest.raises((Conflict, NotFound)):
            await refused
    assert [row.action for row in await trail(harness.store)] == ["token.make"]


async def test_use_of_a_token_is_recorded_after_a_long_pause(harness: StoreHarness) -> None:
    token = await harness.store.tokens.add("ci", Role.VIEWER, secret=new_secret(), tenant="blue")
    for days in (0.0, 1.0, SILENCE_DAYS + 1, 1.0):
        await harness.advance(days * DAY)
        await harness.store.tokens.use({token.id: "192.0.2.1", "01890000-0000-7000-8000-00000000dead": None})
    first, later = await trail(harness.store, what="token.use")
    assert (first.actor, first.token_id, first.address, first.tenant) == ("ci", token.id, "192.0.2.1", "blue")
    assert later.before is not None
    assert (
        later.before["used_at"]
        == (first.done_at.fromtimestamp(first.done_at.timestamp() + DAY, first.done_at.tzinfo)).isoformat()
    )


async def test_pages_go_from_new_to_old_without_gap_or_repeat(harness: StoreHarness) -> None:
    for n in range(7):
        await harness.store.queues.pause(f"q{n}", by=ANN)
        await harness.advance(n % 2)  # Some at the same moment.
    seen: list[str] = []
    cursor = None
    while True:
        page = await harness.store.audit.list(limit=2, cursor=cursor)
        seen += [row.subject for row in page.items]
        cursor = page.next_cursor
        if cursor is None:
            break
    assert seen == [f"q{n}" for n in reversed(range(7))]


async def test_filters_of_the_trail(harness: StoreHarness) -> None:
    await harness.store.queues.pause("q", by=ANN)
    await harness.advance(10)
    middle = harness.clock.now()
    await harness.store.queues.limit("q", cap=1, by="bob")
    await harness.store.lanes.pause("L", by=ANN)

    async def found(**filters: Any) -> list[str]:
        return [row.action for row in await trail(harness.store, **filters)]

    assert await found(who="ann") == ["queue.pause", "lane.pause"]
    assert await found(who=ANN.token_id) == ["queue.pause", "lane.pause"]
    assert await found(who="embedded:bob") == ["queue.limit"]
    assert await found(what="queue") == ["queue.pause", "queue.limit"]
    assert await found(what="queue.limit") == ["queue.limit"]
    assert await found(what="que") == []
    assert await found(what="%") == []
    assert await found(since=middle) == ["queue.limit", "lane.pause"]
    assert await found(since=middle, who="ann", what="lane") == ["lane.pause"]
    for wrong in ("x", "MTIz", "LTEuLTE=", "MS45OTk5OTk5OTk5OTk5OTk5OTk5OTk5OTk="):
        with pytest.raises(Invalid):
            await harness.store.audit.list(cursor=wrong)
    with pytest.raises(Invalid):
        await harness.store.audit.list(limit=0)
    with pytest.raises(Invalid):
        await harness.store.audit.list(since=middle.replace(tzinfo=None))


async def test_rows_over_their_age_are_removed_in_bounded_steps(harness: StoreHarness) -> None:
    for n in range(5):
        await harness.store.queues.pause(f"q{n}", by=ANN)
    await harness.advance(10 * DAY)
    await harness.store.queues.pause("new", by=ANN)
    assert await harness.store.audit.prune(10 * DAY, limit=2) == 2
    assert [row.subject for row in await trail(harness.store)] == ["q2", "q3", "q4", "new"]
    await Pruner(harness.store, Retention()).run_once()
    assert len(await trail(harness.store)) == 4
    await Pruner(harness.store, Retention(), audit_age=10 * DAY).run_once()
    assert [row.subject for row in await trail(harness.store)] == ["new"]


async def test_tools_that_did_not_change_leave_no_row_though_the_last_one_is_old(harness: StoreHarness) -> None:
    """The row that later servers compare with is not removed by age; older ones of its kind are."""
    audit = harness.store.audit
    assert await audit.tools_loaded(ANN, "tools.toml", {"a": "1"})
    await harness.advance(DAY)
    assert await audit.tools_loaded(ANN, "tools.toml", {"a": "2"})
    await harness.advance(20 * DAY)
    assert await audit.prune(10 * DAY) == 1
    assert await audit.prune(10 * DAY) == 0
    assert not await audit.tools_loaded(ANN, "tools.toml", {"a": "2"})
    (row,) = await trail(harness.store)
    assert row.after is not None
    assert (row.after["changed"], row.after["tools"]) == (["a"], {"a": "2"})


async def test_servers_that_start_together_record_a_change_of_tools_once(clean_url: str) -> None:
    async with AsyncExitStack() as stack:
        stores = [await stack.enter_async_context(opened(clean_url)) for _ in range(4)]
        tools = {"a": "1", "b": "2"}
        recorded = await asyncio.gather(*(store.audit.tools_loaded(ANN, "tools.toml", tools) for store in stores))
        assert sorted(recorded) == [False, False, False, True]
        assert len(await trail(stores[0], what="tools.change")) == 1


def test_refused_tokens_are_counted_in_bounded_memory_and_one_bounded_row() -> None:
    seen = UnknownTokenCounts()
    for n in range(3 * ADDRESSES_COUNTED):
        seen.add(f"2001:db8::{n:x}")
    for _ in range(7):
        seen.add("2001:db8::1")
    summary = seen.summary()
    assert (summary["requests"], summary["addresses"]) == (3 * ADDRESSES_COUNTED + 7, ADDRESSES_COUNTED)
    assert len(summary["most"]) == ADDRESSES_NAMED
    assert summary["most"]["2001:db8::1"] == 8
    more = UnknownTokenCounts()
    more.add("192.0.2.1")
    more.merge(seen)
    assert more.summary()["requests"] == seen.requests + 1
    assert more.summary()["addresses"] == ADDRESSES_COUNTED
