"""Readers of streams: slow ones, stalled ones, a thousand of them, and what they cost the server."""

import asyncio
import contextlib
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from holdfast.api.fanout import BLOCK, Fanout
from holdfast.api.stream import encoded_events
from holdfast.store import Store
from holdfast.store.events import Events
from holdfast.store.postgres import PostgresDatabase
from tests.support.in_process_workers import eventually
from tests.support.service import FUNCTION, Service, events_of, opened, service_in_process
from tests.support.store_harness import StoreHarness
from tests.support.streams import LoggingJob, sse


async def test_stalled_reader_costs_little_and_catches_up(service: Service) -> None:
    """Proves E5."""
    big = "x" * 60_000
    async with service.client() as client, opened(service.database_url) as store:
        logged = await LoggingJob.start(store)
        reader, writer = await asyncio.open_connection("127.0.0.1", service.port, limit=2**24)
        request = f"GET /v1/jobs/{logged.id}/events/stream HTTP/1.1\r\nHost: localhost\r\n"
        writer.write(f"{request}Authorization: Bearer {service.admin}\r\nConnection: close\r\n\r\n".encode())
        await reader.readuntil(b"\r\n\r\n")
        transport: Any = writer.transport
        transport.pause_reading()
        for n in range(200):
            await logged.log(f"{n} {big}")
        await logged.end()
        assert len(await sse(client, logged.id)) == 204
        transport.resume_reading()
        text = await asyncio.wait_for(reader.read(-1), 60)
        ids = [int(line[4:]) for line in text.splitlines() if line.startswith(b"id: ")]
        assert ids == list(range(1, 204))
        assert text.count(b"event: end") == 1
        writer.close()


@pytest.mark.parametrize("kind", ["sqlite"])
async def test_stalled_reader_is_cut_and_resumes_without_loss(clean_url: str, tmp_path: Path) -> None:
    """Proves E5."""
    big = "x" * 60_000
    async with (
        service_in_process(clean_url, tmp_path / "data", stream_stall=0.5) as service,
        service.client() as client,
        opened(clean_url) as store,
    ):
        logged = await LoggingJob.start(store)
        reader, writer = await asyncio.open_connection("127.0.0.1", service.port, limit=2**24)
        request = f"GET /v1/jobs/{logged.id}/events/stream HTTP/1.1\r\nHost: localhost\r\n"
        writer.write(f"{request}Authorization: Bearer {service.admin}\r\n\r\n".encode())
        await reader.readuntil(b"\r\n\r\n")
        transport: Any = writer.transport
        transport.pause_reading()
        for n in range(200):
            await logged.log(f"{n} {big}")

        async def cut() -> bool:
            text = (await client.get("/metrics")).text
            return "holdfast_stream_followers 0.0" in text and "holdfast_stream_cuts_total 1.0" in text

        await eventually(cut, "it is no follower any more, though the job goes on")
        here = writer.get_extra_info("sockname")[1]

        async def closed() -> bool:
            return (service.port, here) not in connections()

        await eventually(closed, "nothing is kept for it, though it took nothing")
        writer.close()
        await logged.end()
        assert len(await sse(client, logged.id)) == 204


def connections() -> set[tuple[int, int]]:
    """The TCP connections of this machine that are not closed, by the ports of both ends."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {(int(row[1].split(":")[1], 16), int(row[2].split(":")[1], 16)) for row in rows if row[3] != "06"}


async def test_hub_keeps_bounded_memory_and_reads_again_what_it_dropped(
    clean_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proves E5."""
    monkeypatch.setattr("holdfast.api.fanout.KEPT_BYTES", 100_000)
    async with opened(clean_url) as store:
        logged = await LoggingJob.start(store)
        for _ in range(10):
            await logged.log(*("x" * 1000 for _ in range(BLOCK)), each=True)
        await logged.end()
        hub = Fanout(store)
        head = (await store.jobs.get(logged.id)).last_seq
        for _ in range(2):
            async with hub.follow(logged.id, tenant="default", after=0) as follower:
                text = b"".join([piece async for piece in encoded_events(follower, "ndjson")])
                assert [json.loads(line)["seq"] for line in text.splitlines()] == list(range(1, head + 1))
                assert hub.kept_bytes <= 100_000 + 2 * BLOCK * 1200
        assert hub.kept_bytes == 0
        assert hub.followers == 0


async def test_a_thousand_followers_of_one_job_cost_one_reader(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proves E8. What a thousand cost the database is what one costs: counted are its reads and its connections."""
    asked: Counter[str] = Counter()
    heads, page = Events.heads, Events.page

    async def counted_heads(*arguments: Any, **named: Any) -> Any:
        asked["heads"] += 1
        return await heads(*arguments, **named)

    async def counted_page(*arguments: Any, **named: Any) -> Any:
        asked["page"] += 1
        return await page(*arguments, **named)

    monkeypatch.setattr(Events, "heads", counted_heads)
    monkeypatch.setattr(Events, "page", counted_page)
    async with service.client() as client, opened(service.database_url) as store:
        logged = await LoggingJob.start(store)
        followers = [asyncio.create_task(whole_stream(service, logged.id)) for _ in range(1_000)]

        async def all_there() -> bool:
            return "holdfast_stream_followers 1000" in (await client.get("/metrics")).text

        await eventually(all_there, "all follow")
        assert asked["page"] <= 1, "the history until now is read once"
        looks, joined = await figure(client, "looks"), asked["heads"]
        for n in range(10):
            await logged.log(f"line {n}")
        connections = await connections_of(store)
        await logged.end()
        texts = await asyncio.gather(*followers)
        assert len(set(texts)) == 1
        assert len(texts[0].splitlines()) == 13
        assert asked["page"] <= 1 + 11, "what is new is read once, for all"
        assert asked["heads"] - joined <= await figure(client, "looks") - looks + 1, "one look serves all"
        assert connections < 20


async def whole_stream(service: Service, job: str) -> bytes:
    """A job's history as NDJSON, to its end, without the header. Not by httpx, which is slow with a thousand."""
    reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
    request = (
        f"GET /v1/jobs/{job}/events?follow=true HTTP/1.1\r\nHost: test\r\nConnection: close\r\n"
        f"Accept: application/x-ndjson\r\nAuthorization: Bearer {service.admin}\r\n\r\n"
    )
    writer.write(request.encode())
    header = await reader.readuntil(b"\r\n\r\n")
    assert b" 200 " in header.partition(b"\r\n")[0], header
    text = await reader.read(-1)
    writer.close()
    await writer.wait_closed()
    return b"\n".join(line for line in text.splitlines() if line.startswith(b"{"))  # Without the marks of the chunks.


async def connections_of(store: Store) -> int:
    """How many connections the database has, of everybody."""
    if not isinstance(store.database, PostgresDatabase):
        return sum(_target(fd).endswith("store.db") for fd in os.listdir("/proc/self/fd"))
    (row,) = await store.database.fetch("SELECT count(*) AS n FROM pg_stat_activity WHERE datname = current_database()")
    return int(row["n"])


async def test_follower_that_goes_away_is_forgotten(service: Service) -> None:
    async with service.client() as client:
        job = (await client.post("/v1/jobs", json=FUNCTION)).json()
        async with client.stream("GET", job["links"]["stream"]) as response:
            async for _ in events_of(response):
                break

        async def nobody() -> bool:
            return "holdfast_stream_followers 0" in (await client.get("/metrics")).text

        await eventually(nobody, "it is forgotten while nothing is sent")


async def test_hub_keeps_nothing_for_a_follower_that_left_while_it_read(
    harness: StoreHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proves E5: what nobody follows takes no memory."""
    job, hub, page = await harness.submit(), Fanout(harness.store), harness.store.events.page
    reading, go = asyncio.Event(), asyncio.Event()

    async def slowly(*asked: Any, **more: Any) -> Any:
        found = await page(*asked, **more)
        reading.set()
        await go.wait()
        return found

    async with hub.follow(job.id, tenant="default", after=0):
        await harness.store.jobs.cancel(job.id)
        monkeypatch.setattr(harness.store.events, "page", slowly)
        look = asyncio.create_task(hub.poll())
        await reading.wait()
    go.set()
    await look
    assert (hub.followers, hub.kept_bytes) == (0, 0)


def _target(descriptor: str) -> str:
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/self/fd/{descriptor}")
    return ""


async def figure(client: httpx.AsyncClient, name: str) -> int:
    text = (await client.get("/metrics")).text
    return next(
        int(float(line.split()[1])) for line in text.splitlines() if line.startswith(f"holdfast_stream_{name}_total")
    )
