"""A job that writes events, and the readers of its stream."""

import asyncio
from typing import Any

import httpx

from holdfast.model import Claimable, Job, Lease, NewEvent, Outcome
from holdfast.store import Store
from tests.support.service import FUNCTION, events_of

PAIR = Claimable(queue="default", capability="function:f", domain="function")
NDJSON = {"Accept": "application/x-ndjson"}


class LoggingJob:
    """A running job whose log the test writes."""

    def __init__(self, store: Store, lease: Lease) -> None:
        self._store = store
        self._lease = lease
        self._batch = 0
        self.id = lease.id

    @classmethod
    async def start(cls, store: Store, **fields: Any) -> "LoggingJob":
        job = await store.jobs.submit({**FUNCTION, **fields})
        return await cls.claim(store, job)

    @classmethod
    async def claim(cls, store: Store, job: Job) -> "LoggingJob":
        (lease,) = (await store.leases.claim("w1", [PAIR], slots=1, ttl=60)).claimed
        assert lease.id == job.id
        return cls(store, lease)

    async def log(self, *lines: str, each: bool = False) -> None:
        self._batch += 1
        groups = [[line] for line in lines] if each else [list(lines)]
        events = [NewEvent(type="log", data={"stream": "stdout", "lines": group}) for group in groups]
        landed = await self._store.events.append(self._lease, self._batch, events, offsets=(0, 0), old_offsets=(0, 0))
        assert landed.answer == "landed"

    async def end(self, outcome: Outcome | None = None) -> None:
        await self._store.leases.finish([(self._lease, outcome or Outcome.succeeded())])


async def sse(
    client: httpx.AsyncClient, job: str, connected: asyncio.Event | None = None, /, **headers: str
) -> list[dict[str, str]]:
    """The whole stream, to its end, without comments; `connected` is set once the service has answered."""
    async with client.stream("GET", f"/v1/jobs/{job}/events/stream", headers=headers) as response:
        assert response.status_code == 200
        if connected is not None:
            connected.set()
        return [event async for event in events_of(response) if "comment" not in event]


async def ndjson(client: httpx.AsyncClient, job: str, **params: str) -> bytes:
    url = f"/v1/jobs/{job}/events"
    async with client.stream("GET", url, params={"follow": "true", **params}, headers=NDJSON) as response:
        assert response.headers["content-type"].startswith("application/x-ndjson")
        return await response.aread()


def seqs(events: list[dict[str, str]]) -> list[int]:
    return [int(event["id"]) for event in events if "id" in event]
