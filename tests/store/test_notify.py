"""Notifications: within a process, from another process, and after the listener's connection was cut."""

import asyncio

import asyncpg
import pytest

from holdfast.model import Claimable
from holdfast.store import open_store
from holdfast.store.notify import ORPHAN, STOP, TopicSignal, work_topic

JOB = {"runner": "process", "spec": {"command": ["true"]}}


async def heard(signal: TopicSignal, topic: str) -> None:
    """Wait for a topic; fail after a minute."""
    async with asyncio.timeout(60):
        while not {topic, "*"} & await signal.wait(1):
            pass


async def test_submit_wakes_this_process_and_others(clean_url: str) -> None:
    async with (
        await open_store(clean_url) as near,
        await open_store(clean_url) as far,
        near.notifications.listening() as here,
        far.notifications.listening() as there,
    ):
        await there.wait(0.5)  # Reason: let the listener's own first signal pass.
        await near.jobs.submit({**JOB, "queue": "q"})
        await heard(here, work_topic("q"))
        await heard(there, work_topic("q"))


async def test_stop_requests_and_orphans_wake_workers(clean_url: str) -> None:
    async with await open_store(clean_url) as store, store.notifications.listening() as signal:
        job = await store.jobs.submit(JOB)
        pair = Claimable(queue="default", capability="process", domain="here")
        (lease,) = (await store.leases.claim("w1", [pair], slots=1, ttl=60)).claimed
        await signal.wait(0)
        await store.jobs.cancel(job.id)
        await heard(signal, STOP)
        await store.leases.hand_over([lease])
        await heard(signal, ORPHAN)


@pytest.mark.parametrize("kind", ["postgres"])
async def test_listener_comes_back_after_its_connection_was_cut(clean_url: str) -> None:
    async with (
        await open_store(clean_url) as near,
        await open_store(clean_url) as far,
        far.notifications.listening() as there,
    ):
        await heard(there, "*")
        admin = await asyncpg.connect(clean_url)
        await admin.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE query ILIKE 'LISTEN%' AND pid <> pg_backend_pid()"
        )
        await admin.close()
        await heard(there, "*")
        await near.jobs.submit({**JOB, "queue": "after"})
        await heard(there, work_topic("after"))


async def test_without_listen_everything_still_works(clean_url: str) -> None:
    async with await open_store(clean_url, listen=False) as store, store.notifications.listening() as signal:
        await store.jobs.submit(JOB)
        await heard(signal, work_topic("default"))
