"""Pipelines that want the same snapshot: one builds, the others wait, and a waiter takes over."""

from holdfast.model import Status
from tests.support.in_process_workers import eventually
from tests.support.pipelines import Pipelines, adds, task


async def test_four_jobs_at_once_build_once(pipelines: Pipelines) -> None:
    """Proves P5: the others wait, and start nothing."""
    workers = pipelines.workers
    async with workers.worker():
        jobs = [await pipelines.submit(adds("one"), task("two", "sleep 0.5; echo two >> made")) for _ in range(4)]
        for job in jobs:
            await workers.ended(job, Status.SUCCEEDED)
    assert pipelines.ran() == ["one", "two"]
    for statuses in zip(
        *[await pipelines.statuses(job) for job in jobs], strict=True
    ):  # Of one task, in all four jobs.
        assert sorted(statuses) == ["cached"] * 3 + ["succeeded"]
    assert len(await pipelines.snapshots()) == 2


async def test_waiter_builds_when_the_builder_is_cancelled(pipelines: Pipelines) -> None:
    """Proves P5: a lock falls with its lease."""
    workers = pipelines.workers
    async with workers.worker():
        gate = pipelines.marker.with_name("gate")
        spec = {"env": {"MARKER": str(pipelines.marker), "GATE": str(gate)}}
        tasks = [task("one", 'echo here; while [ ! -e "$GATE" ]; do sleep 0.05; done; echo one > made')]
        builder = await pipelines.submit(*tasks, spec=spec, stop_grace=0)
        await workers.wait_for_log(builder, "here")
        waiter = await pipelines.submit(*tasks, spec=spec)

        async def planned() -> bool:
            return bool(await workers.events(waiter, "task"))

        await eventually(planned, "the waiter has planned")
        await workers.store.jobs.cancel(builder.id)
        await workers.wait_for_log(waiter, "here")
        gate.touch()
        await workers.ended(waiter, Status.SUCCEEDED)
    assert pipelines.ran() == ["one", "one"]
    assert await pipelines.kept() == ["one"]


async def test_waiter_can_be_cancelled(pipelines: Pipelines) -> None:
    """Proves P5, J17, C1: without a start; and it says whom it waits for."""
    workers = pipelines.workers
    async with workers.worker():
        tasks = [task("one", "echo here; sleep 600")]
        builder = await pipelines.submit(*tasks, stop_grace=0)
        await workers.wait_for_log(builder, "here")
        waiter = await pipelines.submit(*tasks)

        async def planned() -> bool:
            return bool(await workers.events(waiter, "task"))

        await eventually(planned, "the waiter has planned")
        reason = (await workers.store.explain.job(waiter.id)).reasons[-1]
        assert (reason.jobs, reason.message) == (
            (builder.id,), f"task one waits for job {builder.id}, which builds its snapshot",
        )  # fmt: skip
        assert [reason.about for reason in (await workers.store.explain.job(builder.id)).reasons] == ["status"]
        await workers.store.jobs.cancel(waiter.id)
        assert (await workers.ended(waiter, Status.CANCELLED)).attempts == 0
        await workers.store.jobs.cancel(builder.id)
        await workers.ended(builder, Status.CANCELLED)


async def test_snapshot_is_the_base_of_another_job(pipelines: Pipelines) -> None:
    """Proves P12."""
    workers = pipelines.workers
    async with workers.worker():
        first = await workers.ended(await pipelines.submit(adds("one"), adds("two")), Status.SUCCEEDED)
        base = (await pipelines.tasks(first))[-1].snapshot
        await workers.ended(await pipelines.submit(adds("three"), base=base), Status.SUCCEEDED)
        assert await pipelines.content("three") == "one\ntwo\nthree\n"
        unknown = await workers.ended(await pipelines.submit(adds("three"), base="f" * 64), Status.FAILED)
    assert unknown.error is not None
    assert unknown.error.message == f"base: there is no snapshot {'f' * 64}"
    assert unknown.attempts == 1


async def test_damaged_snapshot_is_built_again(pipelines: Pipelines) -> None:
    """Proves P6: verified when it is used."""
    workers = pipelines.workers
    async with workers.worker():
        await workers.ended(await pipelines.submit(adds("one"), adds("two")), Status.SUCCEEDED)
        (two,) = [one for one in await pipelines.snapshots() if one.task == "two"]
        (pipelines.folder_of(two) / "made").write_text("spoilt")
        job = await workers.ended(await pipelines.submit(adds("one"), adds("two"), adds("three")), Status.SUCCEEDED)
        (three,) = [one for one in await pipelines.snapshots() if one.task == "three"]
        (pipelines.folder_of(three) / "made").unlink()
        again = await workers.ended(await pipelines.submit(adds("one"), adds("two"), adds("three")), Status.SUCCEEDED)
    assert await pipelines.statuses(job) == ["cached", "succeeded", "succeeded"]
    assert await pipelines.statuses(again) == ["cached", "cached", "succeeded"], "also where nothing would have to run"
    assert pipelines.ran() == ["one", "two", "two", "three", "three"]
    assert await pipelines.content("three") == "one\ntwo\nthree\n"
