"""How a worker claims: no notification is lost, and no job waits for a poll after one."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import asyncpg
import pytest

from holdfast.duties.scheduler import DutyScheduler
from holdfast.model import Status
from holdfast.runner.folder_artifacts import FolderArtifacts
from holdfast.store.leases import Claimed, Leases
from holdfast.store.notify import Notifications
from tests.support.in_process_workers import InProcessWorkers


async def test_job_submitted_during_a_claim_is_claimed_without_a_poll(
    workers: InProcessWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proves R18."""
    workers.set(poll_interval=300.0)
    workers.functions.add(noop)
    found: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    claim = Leases.claim

    async def slow_claim(self: Leases, *args: Any, **more: Any) -> Claimed:
        claimed = await claim(self, *args, **more)
        if more["slots"] and not found.done():  # It saw nothing, and the job is there before its answer is.
            found.set_result((await workers.submit("noop")).id)
            self._notifications.post(["work:default"])
            await asyncio.sleep(0.1)  # Reason: the wake-up is heard before the claim ends.
        return claimed

    monkeypatch.setattr(Leases, "claim", slow_claim)
    async with asyncio.timeout(30), workers.worker():
        await workers.ended(await found, Status.SUCCEEDED)


async def noop() -> None:
    pass


async def test_first_notification_is_sent_at_once_and_later_ones_together() -> None:
    sent: list[Sequence[str]] = []

    class Recorder:
        async def announce(self, topics: Sequence[str]) -> None:
            sent.append(topics)

    wake = Notifications(Recorder())  # type: ignore[arg-type]
    wake.post(["a"])
    await asyncio.sleep(0)  # Reason: let the sender run.
    assert sent == [["a"]]
    for topic in ("b", "c", "b"):
        wake.post([topic])
        await asyncio.sleep(0)  # Reason: let the sender run.
    await wake.close()
    assert sent == [["a"], ["b", "c"]]


async def test_a_new_leader_begins_its_duties_at_once(
    workers: InProcessWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers.set(reaper_interval=600.0)
    monkeypatch.setattr("holdfast.duties.scheduler.jitter", lambda seconds: 0.05 if seconds == 300.0 else seconds)
    begun = asyncio.Event()

    async def reap(self: object) -> int:
        begun.set()
        return 0

    monkeypatch.setattr("holdfast.duties.reaper.Reaper.run_once", reap)
    await workers.store.workers.lead("duties", "another", ttl=300)
    duties = DutyScheduler(workers.store, "heir", workers.settings, FolderArtifacts(workers.settings.shared))
    task = asyncio.create_task(duties.run())
    try:
        await asyncio.sleep(0.2)  # Reason: time in which the duties would wrongly run without the lead.
        assert not begun.is_set()
        await workers.store.workers.resign("duties", "another")
        async with asyncio.timeout(60):  # It tries to lead every 0.05 s; the reaper's own timer is ten minutes.
            await begun.wait()
    finally:
        task.cancel()


@pytest.mark.parametrize("kind", ["postgres"])
async def test_job_submitted_by_sql_wakes_an_idle_worker(workers: InProcessWorkers) -> None:
    """Proves C1: the SQL function notifies of some work, without naming a queue."""
    workers.set(poll_interval=300.0)
    workers.functions.add(noop)
    asked = {"runner": "function", "spec": {"name": "noop"}}
    async with asyncio.timeout(60), workers.worker():
        await workers.ended(await workers.submit("noop"), Status.SUCCEEDED)  # It is idle after this.
        sql = await asyncpg.connect(workers.settings.database_url)
        job = await sql.fetchval("SELECT id FROM holdfast.holdfast_submit($1::jsonb)", json.dumps(asked))
        await sql.close()
        await workers.ended(str(job), Status.SUCCEEDED)
