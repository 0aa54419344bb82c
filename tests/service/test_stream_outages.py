"""Streams across servers: two at once, lost database connections, servers that stop."""

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from holdfast.api import stream
from holdfast.api.fanout import Fanout
from holdfast.errors import StoreError
from holdfast.model import Outcome, Status
from tests.support.in_process_workers import eventually
from tests.support.service import FUNCTION, Service, events_of, opened, service_in_process, service_process_on
from tests.support.store_harness import StoreHarness
from tests.support.streams import LoggingJob, ndjson, seqs, sse


@pytest.mark.parametrize("kind", ["postgres"])
async def test_two_servers_on_one_database_send_the_same_events(clean_url: str, tmp_path: Path) -> None:
    """Proves E2, N5."""
    one = service_in_process(clean_url, tmp_path / "data")
    two = service_in_process(clean_url, tmp_path / "data")
    async with one as first, two as second, opened(clean_url) as store, first.client() as a, second.client() as b:
        logged = await LoggingJob.start(store)
        followers = [asyncio.create_task(ndjson(client, logged.id)) for client in (a, b)]
        await logged.log("hello")
        made = (await a.post("/v1/jobs", json=FUNCTION, headers={"Idempotency-Key": "k"})).json()["id"]
        again = await b.post("/v1/jobs", json=FUNCTION, headers={"Idempotency-Key": "k"})
        assert (again.status_code, again.json()["id"]) == (200, made)
        assert (await b.post(f"/v1/jobs/{logged.id}/cancel")).status_code == 202
        await logged.end(Outcome(status=Status.CANCELLED))
        texts = await asyncio.gather(*followers)
        assert texts[0] == texts[1]
        token = (await a.post("/v1/tokens", json={"name": "x", "role": "viewer", "tenant": "t"})).json()
        async with second.client(token["token"]) as viewer:
            assert (await viewer.get("/v1/jobs")).status_code == 200
            await a.delete(f"/v1/tokens/{token['id']}")

            async def refused() -> bool:
                return (await viewer.get("/v1/jobs")).status_code == 401

            await eventually(refused, "the other server forgets the token")


@pytest.mark.parametrize("kind", ["postgres"])
async def test_stream_survives_dropped_database_connections(service: Service) -> None:
    """Proves E3, L16."""
    async with service.client() as client, opened(service.database_url) as store:
        logged = await LoggingJob.start(store)
        following = asyncio.create_task(sse(client, logged.id))

        async def follows() -> bool:
            return "holdfast_stream_followers 1" in (await client.get("/metrics")).text

        await eventually(follows, "it follows")
        killer = await asyncpg.connect(service.database_url)
        for n in range(5):
            await logged.log(f"line {n}")
            await killer.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )

            async def back() -> bool:
                with contextlib.suppress(StoreError):
                    return (await store.jobs.get(logged.id)).status is Status.RUNNING
                return False

            await eventually(back, "the store answers again")
        await killer.close()
        await logged.end()
        events = await asyncio.wait_for(following, 60)
        assert seqs(events) == list(range(1, (await store.jobs.get(logged.id)).last_seq + 1))
        assert events[-1]["event"] == "end"


async def test_stream_opened_while_the_server_stops_is_cut_without_an_end(harness: StoreHarness) -> None:
    """Proves E3, E4. A client that sees an orderly end would take it for the end of the job."""
    job = await harness.submit()
    hub = Fanout(harness.store)
    hub.stop()
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return await asyncio.Event().wait()

    async def valid() -> bool:
        return True

    streamed = stream.EventStreamResponse(
        hub,
        job.id,
        streams=stream.OpenStreams(10, 10),
        by="test",
        valid=valid,
        tenant="default",
        after=0,
        form="ndjson",
        stall=60.0,
    )
    await streamed({"type": "http"}, receive, send)
    assert [message["type"] for message in sent] == ["http.response.start"]


async def test_stopping_server_cuts_streams_and_the_next_one_resumes_them(clean_url: str, tmp_path: Path) -> None:
    """Proves E3."""
    with service_process_on(clean_url, tmp_path / "data") as service:
        async with service.client() as client, opened(clean_url) as store:
            logged = await LoggingJob.start(store)
            await logged.log("before")
            seen: list[int] = []
            async with client.stream("GET", f"/v1/jobs/{logged.id}/events/stream") as response:
                async for event in events_of(response):
                    assert event.get("event") != "end"
                    if "id" in event:
                        seen.append(int(event["id"]))
                    if len(seen) == 3 and service.process is not None and service.process.poll() is None:
                        service.process.terminate()
            assert await asyncio.to_thread(service.stop) == 0
            await logged.log("while nobody served")
            await asyncio.to_thread(service.start)
            following = asyncio.create_task(sse(client, logged.id, **{"Last-Event-ID": str(seen[-1])}))
            await logged.log("after")
            await logged.end()
            events = await asyncio.wait_for(following, 60)
            assert seen + seqs(events) == list(range(1, (await store.jobs.get(logged.id)).last_seq + 1))
            assert events[-1]["event"] == "end"
