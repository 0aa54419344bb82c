"""Notifications: within a process, from another process, and after the listener's connection was cut."""

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import asyncpg
import pytest

from holdfast.errors import Conflict
from holdfast.model import Claimable
from holdfast.store import Store, open_store, sqlite
from holdfast.store.notify import ORPHAN, STOP, Notifications, TopicSignal, work_topic
from holdfast.store.postgres import PostgresDatabase

JOB = {"runner": "process", "spec": {"command": ["true"]}}


async def heard(signal: TopicSignal, topic: str) -> None:
    """Wait for a topic; fail after a minute."""
    async with asyncio.timeout(60):
        while not {topic, "*"} & await signal.wait(1):
            pass


async def until_it_listens(near: Store, there: TopicSignal) -> None:
    """Submit until it is heard, and then until nothing more comes."""
    async with asyncio.timeout(60):
        while not await there.wait(0.2):
            await near.jobs.submit(JOB)
        while await there.wait(0.5):
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


@pytest.mark.parametrize("kind", ["postgres"])
async def test_a_single_submit_notifies_with_its_own_commit(clean_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def announce(self: object, topics: Sequence[str]) -> None:
        raise AssertionError(f"a commit of its own for {topics}")

    async with (
        await open_store(clean_url) as near,
        await open_store(clean_url) as far,
        far.notifications.listening() as there,
    ):
        await heard(there, "*")
        monkeypatch.setattr(PostgresDatabase, "announce", announce)
        returns = far.notifications.returns
        await near.jobs.submit({**JOB, "queue": "q"})
        await heard_exactly(there, work_topic("q"))
        assert far.notifications.returns == returns
        await near.notifications.close()
        await near.jobs.submit({**JOB, "queue": "first", "priority": 1})
        await heard_exactly(there, work_topic("first"))
        assert far.notifications.returns == returns + 1


async def heard_exactly(signal: TopicSignal, topic: str) -> None:
    async with asyncio.timeout(60):
        while topic not in await signal.wait(1):
            pass


async def test_a_refused_submit_does_not_keep_the_next_one_silent(clean_url: str) -> None:
    async with (
        await open_store(clean_url) as near,
        await open_store(clean_url) as far,
        far.notifications.listening() as there,
    ):
        await until_it_listens(near, there)
        job = await near.jobs.submit({**JOB, "queue": "a"})
        await near.notifications.close()
        with pytest.raises(Conflict):
            await near.jobs.submit({**JOB, "id": job.id, "queue": "b"})
        await near.jobs.submit({**JOB, "queue": "c"})
        await heard(there, work_topic("c"))


async def test_only_the_first_caller_of_a_moment_sends_with_its_own_commit() -> None:
    sent: list[Sequence[str]] = []

    class Recorder:
        async def announce(self, topics: Sequence[str]) -> None:
            sent.append(topics)

    notifications = Notifications(Recorder())  # type: ignore[arg-type]
    assert notifications.reserve()
    assert not notifications.reserve()
    notifications.post(["a"], sent=True)
    notifications.post(["b"])
    await notifications.close()
    assert sent == [["b"]]
    assert notifications.reserve()
    await notifications.close()


@contextlib.contextmanager
def no_watch(path: Path) -> Iterator[None]:
    yield None


@pytest.mark.parametrize("kind", ["sqlite"])
@pytest.mark.parametrize("by", ["inotify", "polling"])
async def test_a_change_of_another_process_is_noticed(clean_url: str, monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    """Without inotify by polling; with it by the write to the log."""
    if by == "polling":
        monkeypatch.setattr(sqlite, "watch_writes", no_watch)
    else:
        monkeypatch.setattr(sqlite, "QUIET_SECONDS", 3600.0)
    async with (
        await open_store(clean_url) as near,
        await open_store(clean_url) as far,
        far.notifications.listening() as there,
    ):
        await until_it_listens(near, there)
        await near.jobs.submit(JOB)
        await heard(there, "*")
