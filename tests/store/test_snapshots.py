"""Snapshots in the store: lookup by id, one builder at a time, publishing under a lease, removal."""

import asyncio
import hashlib
from datetime import timedelta
from typing import Any

import pytest

from holdfast.errors import Invalid, NotFound, SnapshotInUse
from holdfast.model import Lease, Snapshot
from holdfast.store.snapshots import NewSnapshot
from holdfast.store.sqlite import SqliteDatabase
from holdfast.store.tasks import PlannedTask
from tests.support.store_harness import TTL, StoreHarness

MINUTE = 60.0


def name(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def new(
    text: str, parent: str = "root", *, folder: str | None = None, size: int = 10, **components: str
) -> NewSnapshot:
    return NewSnapshot(
        id=name(text),
        parent=name(parent),
        task=text,
        task_hash=name(f"task {text}"),
        components=components or {"command": text},
        folder=folder or f"{name(text)}.1",
        digest=name(f"digest {text}"),
        size=size,
    )


async def leased(harness: StoreHarness, worker: str = "w1", **fields: Any) -> Lease:
    await harness.submit(**fields)
    (lease,) = await harness.claim(slots=1, worker=worker)
    return lease


async def plans(harness: StoreHarness, lease: Lease, made: NewSnapshot) -> None:
    """Put the task that makes a snapshot into the record."""
    task = PlannedTask(name=made.task, parent=made.parent, snapshot=made.id)
    assert await harness.store.tasks.replan(lease, [task], done=0)


async def building(harness: StoreHarness, worker: str = "w1") -> Lease:
    """A lease of a job that has snapshot a in its plan."""
    lease = await leased(harness, worker)
    await plans(harness, lease, new("a"))
    return lease


async def built(
    harness: StoreHarness, text: str, parent: str = "root", *, tenant: str = "default", **fields: Any
) -> Snapshot:
    """Build a snapshot in a job that has ended."""
    lease = await leased(harness, tenant=tenant)
    made = new(text, parent, **fields)
    await plans(harness, lease, made)
    assert (await harness.store.snapshots.take(lease, made.id)).answer == "yours"
    assert await harness.store.snapshots.publish(lease, made) == "published"
    await harness.finish(lease)
    return await harness.store.snapshots.get(made.id, tenant=tenant)


async def test_chain_is_looked_up_at_once_and_tenants_do_not_share(harness: StoreHarness) -> None:
    """Proves P4, P12."""
    first = await built(harness, "a")
    second = await built(harness, "b", "a")
    ids = [first.id, second.id, name("c")]
    assert await harness.store.snapshots.existing(ids, tenant="default") == {first.id: first, second.id: second}
    assert await harness.store.snapshots.existing(ids, tenant="blue") == {}
    assert await harness.store.snapshots.use(ids, tenant="blue") == {}
    with pytest.raises(NotFound):
        await harness.store.snapshots.get(first.id, tenant="blue")
    with pytest.raises(NotFound):
        await harness.store.snapshots.remove(first.id, tenant="blue", force=True)
    assert (await harness.store.snapshots.list(tenant="blue")).items == []
    assert (await harness.store.snapshots.near([first.parent], tenant="blue")) == []
    assert first.components == {"command": "a"}


async def test_use_moves_the_time_of_last_use(harness: StoreHarness) -> None:
    """Proves P11."""
    made = await built(harness, "a")
    await harness.advance(MINUTE)
    (used,) = (await harness.store.snapshots.use([made.id], tenant="default")).values()
    assert used.used_at == harness.clock.now()
    assert used.made_at == made.made_at


async def test_one_builds_and_the_others_wait_and_reuse(harness: StoreHarness) -> None:
    """Proves P4, P5."""
    leases = [await building(harness, worker=f"w{n}") for n in range(4)]
    snapshots = harness.store.snapshots
    locks = await asyncio.gather(*(snapshots.take(lease, name("a")) for lease in leases))
    assert sorted(lock.answer for lock in locks) == ["busy", "busy", "busy", "yours"]
    builder = next(lease for lease, lock in zip(leases, locks, strict=True) if lock.answer == "yours")
    assert {lock.job for lock in locks if lock.answer == "busy"} == {builder.id}
    assert (await snapshots.take(builder, name("a"))).answer == "yours", "asking again changes nothing"
    assert await snapshots.publish(builder, new("a")) == "published"
    assert await snapshots.publish(builder, new("a")) == "published", "its first answer was lost"
    assert await snapshots.publish(builder, new("a", folder="other")) == "exists"
    assert [(await snapshots.take(lease, name("a"))).answer for lease in leases] == ["built"] * 4
    assert await rows_of(harness, "builds") == 0


async def test_lock_ends_with_the_lease_and_the_old_builder_cannot_publish(harness: StoreHarness) -> None:
    """Proves P5."""
    snapshots = harness.store.snapshots
    builder, waiter = await building(harness), await building(harness, worker="w2")
    assert (await snapshots.take(builder, name("a"))).answer == "yours"
    await harness.advance(TTL + 1)
    assert (await snapshots.take(waiter, name("a"))).answer == "busy", "an expired lease is still the owner's"
    await harness.store.leases.beat("w2", [waiter], ttl=TTL)
    await harness.store.leases.reap()
    assert (await snapshots.take(waiter, name("a"))).answer == "yours"
    assert (await snapshots.take(builder, name("a"))).answer == "busy"
    assert await snapshots.publish(builder, new("a", folder="late")) == "lost"
    assert await snapshots.publish(waiter, new("a", folder="good")) == "published"
    assert await snapshots.publish(builder, new("a", folder="later")) == "exists"
    assert (await snapshots.get(name("a"), tenant="default")).folder == "good"


async def test_builder_whose_lease_was_cleared_cannot_publish(harness: StoreHarness) -> None:
    """Proves P5."""
    snapshots = harness.store.snapshots
    builder = await building(harness)
    assert (await snapshots.take(builder, name("a"))).answer == "yours"
    await harness.advance(TTL + 1)
    await harness.store.leases.reap()
    assert await snapshots.publish(builder, new("a")) == "lost"
    assert (await snapshots.take(builder, name("a"))).answer == "lost"
    assert await snapshots.existing([name("a")], tenant="default") == {}


async def test_adopter_takes_over_the_lock_of_its_job(harness: StoreHarness) -> None:
    """Proves P2, P5."""
    snapshots = harness.store.snapshots
    await harness.submit(runner="process", spec={"command": ["true"]})
    (builder,) = await harness.claim_process()
    await plans(harness, builder, new("a"))
    assert (await snapshots.take(builder, name("a"))).answer == "yours"
    await harness.advance(TTL + 1)
    await harness.store.leases.reap()
    (adopter,) = await harness.adopt()
    assert await snapshots.publish(adopter, new("a")) == "lost", "the lock is its predecessor's"
    assert (await snapshots.take(adopter, name("a"))).answer == "yours"
    assert await snapshots.publish(builder, new("a")) == "lost"
    assert await snapshots.publish(adopter, new("a")) == "published"


async def test_builder_that_ends_or_gives_up_lets_the_next_one_go_on(harness: StoreHarness) -> None:
    """Proves P5."""
    snapshots = harness.store.snapshots
    first, second, third = [await leased(harness) for _ in range(3)]
    assert (await snapshots.take(first, name("a"))).answer == "yours"
    await snapshots.release(second, name("a"))
    assert (await snapshots.take(second, name("a"))).answer == "busy"
    await snapshots.release(first, name("a"))
    assert (await snapshots.take(second, name("a"))).answer == "yours"
    await harness.fail(second)
    assert (await snapshots.take(third, name("a"))).answer == "yours"


async def test_one_of_concurrent_publishers_wins(harness: StoreHarness) -> None:
    """Proves P5."""
    snapshots = harness.store.snapshots
    leases = [await building(harness, worker=f"w{n}") for n in range(4)]

    async def build(n: int, lease: Lease) -> str:
        lock = await snapshots.take(lease, name("a"))
        return await snapshots.publish(lease, new("a", folder=f"folder{n}")) if lock.answer == "yours" else lock.answer

    for _ in range(20):
        answers = await asyncio.gather(*(build(n, lease) for n, lease in enumerate(leases)))
        assert answers.count("published") == 1, answers
        kept = await snapshots.get(name("a"), tenant="default")
        assert kept.folder == f"folder{answers.index('published')}"
        await snapshots.remove(kept.id, tenant="default", force=True)


async def test_only_what_the_job_planned_is_published(harness: StoreHarness) -> None:
    """Proves P5, P12: whatever a worker was told, the record says what a job may make, and from what."""
    snapshots = harness.store.snapshots
    lease = await building(harness)
    other = await built(harness, "b")
    for made in (new("c"), new("a", "b", folder="forged")):
        assert (await snapshots.take(lease, made.id)).answer == "yours"
        assert await snapshots.publish(lease, made) == "refused"
        assert await snapshots.existing([made.id], tenant="default") == {}
    assert await rows_of(harness, "builds") == 0
    assert (await snapshots.take(lease, name("a"))).answer == "yours"
    assert await snapshots.publish(lease, new("a")) == "published"
    assert await snapshots.get(other.id, tenant="default") == other


async def test_snapshot_of_another_tenant_is_no_answer_to_a_builder(harness: StoreHarness) -> None:
    """Proves P12: who is told that it is there would wait for it for ever."""
    snapshots = harness.store.snapshots
    foreign = await built(harness, "a", tenant="blue")
    lease = await building(harness)
    assert (await snapshots.take(lease, name("a"))).answer == "yours"
    assert await snapshots.publish(lease, new("a", folder="other")) == "refused"
    assert await snapshots.get(foreign.id, tenant="blue") == foreign


async def test_old_locks_are_forgotten_and_held_ones_are_not(harness: StoreHarness) -> None:
    """Proves P5."""
    snapshots = harness.store.snapshots
    dead, alive = await leased(harness), await leased(harness, worker="w2")
    await snapshots.take(dead, name("a"))
    await snapshots.take(alive, name("b"))
    await harness.fail(dead)
    assert await snapshots.prune_builds(MINUTE) == 0
    await harness.advance(MINUTE + 1)
    assert await snapshots.prune_builds(MINUTE) == 1
    assert await rows_of(harness, "builds") == 1


async def test_snapshots_are_listed_by_page_and_shown_by_the_beginning_of_an_id(harness: StoreHarness) -> None:
    """Proves P12."""
    snapshots = harness.store.snapshots
    made = [await built(harness, text, size=n) for n, text in enumerate(["a", "b", "c"])]
    listed: list[Snapshot] = []
    cursor = None
    while True:
        page = await snapshots.list(tenant="default", limit=2, cursor=cursor)
        listed += page.items
        cursor = page.next_cursor
        if cursor is None:
            break
    assert sorted(one.id for one in listed) == sorted(one.id for one in made)
    assert await snapshots.get(made[0].id[:8], tenant="default") == made[0]
    for text in ("", "nonsense", "A" * 64, "0" * 65, "f" * 64):
        with pytest.raises(NotFound):
            await snapshots.get(text, tenant="default")
    twin = twin_of(made[0].id)
    await built_as(harness, twin)
    with pytest.raises(Invalid, match="several snapshots' ids begin with"):
        await snapshots.get(made[0].id[:10], tenant="default")
    assert (await snapshots.get(made[0].id, tenant="default")).id == made[0].id
    totals = await snapshots.totals(tenant="default")
    assert (totals.count, totals.size) == (4, 13)
    with pytest.raises(Invalid):
        await snapshots.list(tenant="default", cursor="nonsense")


def twin_of(text: str) -> str:
    """Another id that begins like this one."""
    return text[:-1] + ("0" if text[-1] != "0" else "1")


async def built_as(harness: StoreHarness, snapshot: str) -> None:
    lease = await leased(harness)
    made = NewSnapshot(
        id=snapshot, parent=name("root"), task="t", task_hash="h", components={}, folder="f", digest="d", size=10
    )
    await plans(harness, lease, made)
    await harness.store.snapshots.take(lease, snapshot)
    assert await harness.store.snapshots.publish(lease, made) == "published"
    await harness.finish(lease)


async def test_removal_takes_care_of_children_and_users(harness: StoreHarness) -> None:
    """Proves P12."""
    snapshots = harness.store.snapshots
    parent, child, grandchild = [
        await built(harness, text, before) for text, before in [("a", "root"), ("b", "a"), ("c", "b")]
    ]
    with pytest.raises(SnapshotInUse, match=r"has snapshots made from it \(1\); remove them too with recurse"):
        await snapshots.remove(parent.id, tenant="default", force=True)
    planned = await snapshots.remove(parent.id, tenant="default", recurse=True, dry_run=True)
    assert planned.outcome == "would_delete"
    assert {one.id for one in planned.snapshots} == {parent.id, child.id, grandchild.id}
    user = await leased(harness)
    await harness.store.tasks.replan(user, [PlannedTask(name="t", parent=child.id, snapshot=name("d"))], done=0)
    with pytest.raises(SnapshotInUse, match=f"is in the plan of job {user.id}"):
        await snapshots.remove(parent.id, tenant="default", recurse=True)
    gone = await snapshots.remove(grandchild.id, tenant="default")
    assert [one.folder for one in gone.snapshots] == [grandchild.folder]
    forced = await snapshots.remove(parent.id, tenant="default", recurse=True, force=True)
    assert {one.id for one in forced.snapshots} == {parent.id, child.id}
    assert (await snapshots.totals()).count == 0
    with pytest.raises(NotFound):
        await snapshots.remove(parent.id, tenant="default")


async def test_job_that_ended_needs_no_snapshot(harness: StoreHarness) -> None:
    """Proves P12."""
    made = await built(harness, "a")
    user = await leased(harness)
    await harness.store.tasks.replan(user, [PlannedTask(name="t", parent=name("root"), snapshot=made.id)], done=1)
    with pytest.raises(SnapshotInUse):
        await harness.store.snapshots.remove(made.id, tenant="default")
    await harness.finish(user)
    assert (await harness.store.snapshots.remove(made.id, tenant="default")).outcome == "deleted"


async def test_job_that_still_waits_needs_its_base(harness: StoreHarness) -> None:
    """Proves P11, P12: a held one, for as long as it takes; its end lets the base go. Other tenants hold nothing."""
    snapshots = harness.store.snapshots
    base = await built(harness, "a")
    asked: dict[str, Any] = {"runner": "process", "spec": {}, "tasks": [{"name": "t", "command": ["true"]}]}
    await harness.submit(**asked, base=base.id, hold=True, tenant="blue")
    await harness.submit(**asked, base=name("b"), hold=True)
    waiting = await harness.submit(**asked, base=base.id, hold=True)
    delayed = await harness.submit(**asked, base=base.id, available_at=harness.clock.now() + timedelta(days=1))
    await harness.advance(60 * MINUTE)
    for job in (waiting, delayed):
        assert await snapshots.evict(grace=10 * MINUTE) is None
        assert await snapshots._evict(base.id, 10 * MINUTE) is None, "also where it was chosen before the submit"
        with pytest.raises(SnapshotInUse, match="is in the plan of job"):
            await snapshots.remove(base.id, tenant="default")
        await harness.store.jobs.cancel(job.id)
    gone = await snapshots.evict(grace=10 * MINUTE)
    assert gone is not None
    assert gone.id == base.id


async def test_oldest_then_largest_leaf_goes_first_and_nothing_that_is_needed(harness: StoreHarness) -> None:
    """Proves P11."""
    snapshots = harness.store.snapshots
    await built(harness, "inner", size=1)
    await harness.advance(MINUTE)
    await built(harness, "small", size=1)
    large = await built(harness, "large", size=100)
    await harness.advance(MINUTE)
    leaf = await built(harness, "leaf", "inner", size=1)
    used = await built(harness, "used")
    user = await leased(harness)
    await harness.store.tasks.replan(user, [PlannedTask(name="t", parent=used.id, snapshot=name("x"))], done=0)
    await harness.advance(10 * MINUTE)
    await built(harness, "fresh")
    order = []
    while (gone := await snapshots.evict(grace=5 * MINUTE)) is not None:
        order.append(gone.task)
    assert order == ["large", "small", "leaf", "inner"], "its leaf gone, a parent is a leaf"
    assert {one.task for one in (await snapshots.list(tenant="default")).items} == {"used", "fresh"}
    assert large.folder
    assert leaf.folder


async def test_snapshot_used_after_it_was_chosen_for_eviction_stays(harness: StoreHarness) -> None:
    """Proves P11."""
    snapshots = harness.store.snapshots
    made = await built(harness, "a")
    user = await leased(harness)
    await harness.advance(10 * MINUTE)
    chosen = await harness.store.database.read("evictable_snapshots", grace=5 * MINUTE, limit=1)
    assert [row["id"] for row in chosen] == [made.id]
    await harness.store.tasks.replan(user, [PlannedTask(name="t", parent=made.id, snapshot=name("x"))], done=0)
    assert await snapshots._evict(made.id, 5 * MINUTE) is None
    assert list(await snapshots.existing([made.id], tenant="default")) == [made.id]


async def test_damaged_snapshot_is_dropped_once(harness: StoreHarness) -> None:
    """Proves P6."""
    damaged = await built(harness, "a", folder="bad")
    assert await harness.store.snapshots.drop(damaged)
    again = await built(harness, "a", folder="good")
    assert not await harness.store.snapshots.drop(damaged), "another one stands for it"
    assert await harness.store.snapshots.stored_folders(["bad", "good"]) == {"good"}
    assert await harness.store.snapshots.get(again.id, tenant="default") == again


async def rows_of(harness: StoreHarness, table: str) -> int:
    database = harness.store.database
    if isinstance(database, SqliteDatabase):
        return int(await database.migrate(lambda raw: raw.execute(f"SELECT count(*) FROM {table}").fetchone()[0]))
    return int((await database.fetch(f"SELECT count(*) AS count FROM holdfast.{table}"))[0]["count"])
