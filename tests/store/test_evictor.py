"""Rows and folders of snapshots together: capacity, a full disk, builders that die in between."""

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from holdfast.duties.evictor import Evictor
from holdfast.errors import CacheFull, SnapshotFailed
from holdfast.model import Claimable, Lease
from holdfast.pipeline.plan import PipelinePlan, PlanFacts, TaskPlan, make_plan
from holdfast.pipeline.snapshots import TEMPORARY, SnapshotFolders
from holdfast.pipeline.sources import Sources
from holdfast.store import Store, open_store
from holdfast.store.snapshots import NewSnapshot
from holdfast.store.tasks import PlannedTask
from tests.support.disks import MIB, disk, missing
from tests.support.store_harness import TTL, StoreHarness

PAIR = Claimable(queue="default", capability="function:f", domain="function")


class Bench:
    """A store with its folders, and builders that are leases of their own."""

    def __init__(self, store: Store, root: Path, *, most: int | None = None) -> None:
        self.store = store
        self.folders = SnapshotFolders(root / "snapshots")
        self.evictor = Evictor(store, self.folders, most=most)
        self.root = root

    def plan(self, *names: str, base: str | None = None) -> PipelinePlan:
        tasks = [{"name": name, "command": [name]} for name in names]
        return make_plan({"tasks": tasks, "base": base}, Sources(self.root), PlanFacts(), tenant="default", inputs={})

    def workspace(self, size: int = 1000) -> Path:
        folder = self.root / "work"
        folder.mkdir(exist_ok=True)
        (folder / "file").write_bytes(os.urandom(size))
        return folder

    async def lease(self, worker: str = "w1") -> Lease:
        await self.store.jobs.submit({"runner": "function", "spec": {"name": "f"}})
        (lease,) = (await self.store.leases.claim(worker, [PAIR], slots=1, ttl=TTL)).claimed
        return lease

    async def plans(self, lease: Lease, task: TaskPlan) -> None:
        """Put a task into the record, in the place of the one before."""
        planned = PlannedTask(name=task.name, parent=task.parent, snapshot=task.snapshot)
        assert await self.store.tasks.replan(lease, [planned], done=0)

    async def build(self, lease: Lease, task: TaskPlan, size: int = 1000) -> str:
        await self.plans(lease, task)
        lock = await self.store.snapshots.take(lease, task.snapshot)
        assert lock.answer == "yours"
        made = await self.evictor.copy(task.snapshot, self.workspace(size))
        new = NewSnapshot(
            id=task.snapshot,
            parent=task.parent,
            task=task.name,
            task_hash=task.hash,
            components=task.components,
            folder=made.folder,
            digest=made.digest,
            size=made.size,
        )
        return await self.store.snapshots.publish(lease, new)


@pytest.fixture
def bench(harness: StoreHarness, tmp_path: Path) -> Bench:
    return Bench(harness.store, tmp_path, most=10_000)


def folders_left(bench: Bench) -> Sequence[str]:
    return [*bench.folders.names(), *os.listdir(bench.folders.root / TEMPORARY)]


async def test_full_store_evicts_unused_snapshots_or_fails_with_cache_full(harness: StoreHarness, bench: Bench) -> None:
    """Proves P11."""
    lease = await bench.lease()
    old, used, fresh, last = (bench.plan(name).tasks[0] for name in ("old", "used", "fresh", "last"))
    for task in (old, used):
        await bench.build(lease, task, 3000)
        await harness.advance(1)
    await bench.plans(await bench.lease(), used)
    await harness.advance(3600)
    await harness.store.leases.beat("w1", [lease], ttl=TTL)
    assert await bench.build(lease, fresh, 3500) == "published"
    with pytest.raises(CacheFull, match="HOLDFAST_SNAPSHOTS_MAX_BYTES is 10000"):
        await bench.build(lease, last, 20_000)
    assert len(folders_left(bench)) == 3, "what can never fit evicts nothing"
    assert await bench.build(lease, last, 3500) == "published"
    ids = [task.snapshot for task in (old, used, fresh, last)]
    there = await harness.store.snapshots.existing(ids, tenant="default")
    assert set(there) == {used.snapshot, fresh.snapshot, last.snapshot}
    another = bench.plan("another").tasks[0]
    with pytest.raises(CacheFull):
        await bench.build(lease, another, 3500)
    assert len(folders_left(bench)) == 3
    await harness.store.snapshots.release(lease, another.snapshot)


async def test_a_workspace_that_cannot_be_measured_says_why(bench: Bench, tmp_path: Path) -> None:
    """With a limit a workspace is measured before it is copied. Proves P11."""
    with pytest.raises(SnapshotFailed, match=r"a snapshot cannot be made: No such file or directory \(.*/gone\)"):
        await bench.evictor.copy("a" * 64, tmp_path / "gone")
    assert bench.folders.names() == []


async def test_evictor_goes_from_the_high_mark_to_the_low_one(harness: StoreHarness, bench: Bench) -> None:
    """Proves P11."""
    lease = await bench.lease()
    for n in range(9):
        await bench.build(lease, bench.plan(str(n)).tasks[0])
        await harness.advance(1)
    await harness.advance(3600)
    assert await bench.evictor.run_once() == 0, "below the high mark"
    await harness.store.leases.beat("w1", [lease], ttl=TTL)
    await bench.build(lease, bench.plan("last").tasks[0])
    assert await bench.evictor.run_once() == 3
    left = {one.task for one in (await harness.store.snapshots.list(tenant="default")).items}
    assert left == {"3", "4", "5", "6", "7", "8", "last"}
    assert len(folders_left(bench)) == 7


@pytest.mark.skipif(missing("ext4") is not None, reason=missing("ext4") or "")
async def test_full_disk_evicts_unused_snapshots_or_fails_with_cache_full(
    harness: StoreHarness, tmp_path: Path
) -> None:
    """Proves P6, P11."""
    with disk(tmp_path, "ext4", 8 * MIB) as small:
        bench = Bench(harness.store, tmp_path)
        bench.folders.root = small / "snapshots"
        lease = await bench.lease()
        first, second = (bench.plan(name).tasks[0] for name in ("first", "second"))
        await bench.build(lease, first, 4 * MIB)
        with pytest.raises(CacheFull, match="No space left on device"):
            await bench.build(lease, second, 4 * MIB)
        assert await harness.store.snapshots.existing([second.snapshot], tenant="default") == {}
        assert len(folders_left(bench)) == 1
        await harness.advance(3600)
        await harness.store.leases.beat("w1", [lease], ttl=TTL)
        assert await bench.build(lease, second, 4 * MIB) == "published"
        assert len(folders_left(bench)) == 1


STEPS = ["sync", "row", "published", "remove"]
DIE = """
import asyncio, os, signal, sys
from pathlib import Path
from holdfast.duties.evictor import Evictor
from holdfast.store import open_store
from tests.store.test_evictor import Bench

def at(step):
    if step == sys.argv[3]:
        os.kill(os.getpid(), signal.SIGKILL)

async def main():
    async with await open_store(sys.argv[1], listen=False) as store:
        bench = Bench(store, Path(sys.argv[2]))
        bench.folders._at = at
        lease = await bench.lease("dying")
        await bench.build(lease, bench.plan("a").tasks[0])
        at("published")
        await bench.plans(lease, bench.plan("b").tasks[0])
        await Evictor(store, bench.folders, most=None, just_used=0.0).evict()

asyncio.run(main())
"""


@pytest.mark.parametrize("step", STEPS)
async def test_builder_killed_at_any_step_leaves_a_whole_snapshot_or_none(
    clean_url: str, tmp_path: Path, step: str
) -> None:
    """Proves P5, P6."""
    died = await asyncio.create_subprocess_exec(sys.executable, "-c", DIE, clean_url, str(tmp_path), step)
    assert await died.wait() == -signal.SIGKILL
    async with await open_store(clean_url, listen=False) as store:
        bench = Bench(store, tmp_path)
        found = bench.plan("a")
        lease = await bench.lease()
        there = await store.snapshots.existing([found.hash], tenant="default")
        assert [bench.folders.verify(one.folder, one.digest) for one in there.values()] == [True] * (
            step == "published"
        )
        if step == "published":
            assert (await store.snapshots.take(lease, found.hash)).answer == "built"
            return
        assert (await store.snapshots.take(lease, found.hash)).answer == ("yours" if step == "remove" else "busy")
        await store.leases.clear("dying")
        assert await bench.build(lease, found.tasks[0]) == "published"
        stored = await store.snapshots.stored_folders(bench.folders.names())
        bench.folders.sweep(stored, grace=-1)
        assert folders_left(bench) == list(stored)
        assert len(stored) == 1
