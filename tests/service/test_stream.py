"""Streams: replay, follow, resume after a cut, slow readers, many readers, and the end."""

import asyncio
import contextlib
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import pytest

from holdfast.api import auth, stream
from holdfast.api.fanout import Fanout
from holdfast.errors import StoreError
from holdfast.model import Claimable, Job, Lease, NewEvent, Outcome, Role, Status
from holdfast.store import Store
from holdfast.store.tokens import new_secret
from tests.support.in_process_workers import InProcessWorkers, eventually
from tests.support.service import FUNCTION, Service, error_of, events_of, opened, service_in_process, service_process_on
from tests.support.store_harness import StoreHarness

PAIR = Claimable(queue="default", capability="function:f", domain="function")
NDJSON = {"Accept": "application/x-ndjson"}


class Talker:
    """A running job whose log the test writes."""

    def __init__(self, store: Store, lease: Lease) -> None:
        self._store = store
        self._lease = lease
        self._batch = 0
        self.id = lease.id

    @classmethod
    async def start(cls, store: Store, **fields: Any) -> "Talker":
        job = await store.jobs.submit({**FUNCTION, **fields})
        return await cls.claim(store, job)

    @classmethod
    async def claim(cls, store: Store, job: Job) -> "Talker":
        (lease,) = (await store.leases.claim("w1", [PAIR], slots=1, ttl=60)).claimed
        assert lease.id == job.id
        return cls(store, lease)

    async def say(self, *lines: str, each: bool = False) -> None:
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


async def test_three_followers_get_equal_bytes_to_the_end(service: Service) -> None:
    """Proves E2."""
    async with service.client() as client, opened(service.database_url) as store:
        talker = await Talker.start(store)
        followers = [asyncio.create_task(ndjson(client, talker.id)) for _ in range(3)]
        for n in range(20):
            await talker.say(f"line {n}")
        await talker.end()
        first, *others = await asyncio.gather(*followers)
        assert others == [first, first]
        events = [json.loads(line) for line in first.splitlines()]
        last = (await store.jobs.get(talker.id)).last_seq
        assert [event["seq"] for event in events] == list(range(1, last + 1))
        assert events[-1]["data"]["status"] == "succeeded"


async def test_server_sent_events_have_ids_types_and_the_end(service: Service) -> None:
    """Proves E4."""
    async with service.client() as client, opened(service.database_url) as store:
        talker = await Talker.start(store)
        await talker.say("hello")
        await talker.end(Outcome.failed("exit_nonzero", "boom"))
        async with client.stream("GET", f"/v1/jobs/{talker.id}/events/stream") as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            assert "no-cache" in response.headers["cache-control"]
            assert response.headers["x-accel-buffering"] == "no"
            events = [event async for event in events_of(response) if "comment" not in event]
        *before, end = events
        assert seqs(before) == list(range(1, len(before) + 1))
        assert [event["event"] for event in before] == ["status", "status", "log", "status"]
        assert json.loads(before[2]["data"])["data"] == {"stream": "stdout", "lines": ["hello"]}
        assert (end["event"], "id" in end) == ("end", False)
        assert json.loads(end["data"]) == {"status": "failed", "reason": "exit_nonzero"}


async def test_stream_resumes_after_any_event(service: Service) -> None:
    """Proves E3."""
    async with service.client() as client, opened(service.database_url) as store:
        talker = await Talker.start(store)
        await talker.say(*(f"line {n}" for n in range(10)), each=True)
        await talker.end()
        whole = await sse(client, talker.id)
        last = seqs(whole)[-1]
        for k in range(last + 1):
            assert seqs(await sse(client, talker.id, **{"Last-Event-ID": str(k)})) == list(range(k + 1, last + 1))
        wins = client.stream(
            "GET", f"/v1/jobs/{talker.id}/events/stream?after=1", headers={"Last-Event-ID": str(last - 1)}
        )
        async with wins as response:
            assert seqs([event async for event in events_of(response) if "comment" not in event]) == [last]


async def test_cut_connection_loses_and_repeats_no_event(service: Service) -> None:
    """Proves E3."""
    async with service.client() as client, opened(service.database_url) as store:
        talker = await Talker.start(store)

        async def talk() -> None:
            for n in range(60):
                await talker.say(f"line {n}")
            await talker.end()

        talking = asyncio.create_task(talk())
        seen: list[int] = []
        ended = False
        while not ended:
            headers = {"Last-Event-ID": str(seen[-1])} if seen else {}
            url = f"/v1/jobs/{talker.id}/events/stream"
            async with client.stream("GET", url, headers=headers) as response:
                count = 0
                async for event in events_of(response):
                    if "id" in event:
                        seen.append(int(event["id"]))
                        count += 1
                    ended = event.get("event") == "end"
                    if count == 7:
                        break
        await talking
        assert seen == list(range(1, (await store.jobs.get(talker.id)).last_seq + 1))


async def test_bad_cursor_is_refused(service: Service) -> None:
    async with service.client() as client:
        job = (await client.post("/v1/jobs", json=FUNCTION)).json()["id"]
        url = f"/v1/jobs/{job}/events/stream"
        for wrong in ("x", "-1", "9" * 30, "9" * 5000, "0" * 5000, "99"):
            answer = await client.get(url, headers={"Last-Event-ID": wrong})
            assert answer.status_code == 422, wrong
        for query in ("after=-1", "after=99999999999999999999", "after=x", "after=99"):
            assert (await client.get(f"{url}?{query}")).status_code == 422
        assert (await client.get(f"/v1/jobs/{job}/events?follow=true")).status_code == 422
        for end in ("/events/stream", "/events/download", "/events"):
            missing = await client.get(f"/v1/jobs/{'0' * 8}{end}")
            assert (missing.status_code, error_of(missing)["code"]) == (404, "not_found")


async def test_cancelled_job_ends_its_stream(service: Service) -> None:
    """Proves E4."""
    async with service.client() as client:
        job = (await client.post("/v1/jobs", json=FUNCTION)).json()["id"]
        following = asyncio.create_task(sse(client, job))
        await client.post(f"/v1/jobs/{job}/cancel", json={"reason": "why"})
        *_, status, end = await asyncio.wait_for(following, 30)
        assert json.loads(status["data"])["data"]["status"] == "cancelled"
        assert json.loads(end["data"]) == {"status": "cancelled", "reason": "cancelled"}


async def test_deleted_job_ends_its_stream(service: Service) -> None:
    async with service.client() as client, opened(service.database_url) as store:
        talker = await Talker.start(store)
        connected = asyncio.Event()
        following = asyncio.create_task(sse(client, talker.id, connected))
        await asyncio.wait_for(connected.wait(), 30)
        await client.delete(f"/v1/jobs/{talker.id}?force=true")
        await talker.end(Outcome(status=Status.CANCELLED))
        await store.jobs.finish_deletions()
        *_, end = await asyncio.wait_for(following, 30)
        assert end["event"] == "end"


async def test_resumed_job_is_replayed_whole_and_followed(service: Service) -> None:
    """Proves E4."""
    async with service.client() as client, opened(service.database_url) as store:
        talker = await Talker.start(store)
        await talker.say("first")
        await talker.end(Outcome.failed("exit_nonzero", "boom"))
        assert (await sse(client, talker.id))[-1]["event"] == "end"
        await client.post(f"/v1/jobs/{talker.id}/resume")
        following = asyncio.create_task(sse(client, talker.id))
        again = await Talker.claim(store, await store.jobs.get(talker.id))
        await again.say("second")
        assert not following.done()
        await again.end()
        events = await asyncio.wait_for(following, 30)
        assert seqs(events) == list(range(1, (await store.jobs.get(talker.id)).last_seq + 1))
        assert json.loads(events[-1]["data"])["status"] == "succeeded"


async def test_idle_stream_is_kept_alive_and_nothing_is_stored(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proves E4."""
    assert stream.KEEP_ALIVE_SECONDS == 15
    monkeypatch.setattr(stream, "KEEP_ALIVE_SECONDS", 0.2)
    async with service.client() as client:
        job = (await client.post("/v1/jobs", json=FUNCTION)).json()
        comments = 0
        async with client.stream("GET", job["links"]["stream"]) as response:
            async for event in events_of(response):
                comments += event.get("comment") == "keep-alive"
                if comments == 3:
                    break
        assert len((await client.get(job["links"]["events"])).json()["items"]) == 1


async def test_2500_events_by_page_download_and_stream_are_the_same(service: Service) -> None:
    """Proves E6."""
    async with service.client() as client, opened(service.database_url) as store:
        talker = await Talker.start(store)
        for n in range(5):
            await talker.say(*(f"line {n}.{m}" for m in range(500)), each=True)
        await talker.end()
        paged: list[Any] = []
        after = 0
        while True:
            page = (await client.get(f"/v1/jobs/{talker.id}/events?after={after}&limit=700")).json()
            paged += page["items"]
            if page["next_after"] is None:
                break
            after = page["next_after"]
        assert [event["seq"] for event in paged] == list(range(1, 2504))
        file = await client.get(f"/v1/jobs/{talker.id}/events/download")
        assert file.headers["content-disposition"] == 'attachment; filename="events.ndjson"'
        assert [json.loads(line) for line in file.text.splitlines()] == paged
        assert await ndjson(client, talker.id) == file.content
        assert [json.loads(event["data"]) for event in (await sse(client, talker.id))[:-1]] == paged
        for limit in (0, 1001):
            assert (await client.get(f"/v1/jobs/{talker.id}/events?limit={limit}")).status_code == 422


async def test_download_of_a_running_job_ends_where_it_stands(service: Service) -> None:
    """Proves E6."""
    async with service.client() as client, opened(service.database_url) as store:
        talker = await Talker.start(store)
        await talker.say("hello")
        file = await asyncio.wait_for(client.get(f"/v1/jobs/{talker.id}/events/download"), 30)
        assert len(file.text.splitlines()) == 3
        await talker.end()


@pytest.mark.parametrize("kind", ["postgres"])
async def test_two_servers_on_one_database_send_the_same_events(clean_url: str, tmp_path: Path) -> None:
    """Proves E2, N5."""
    one = service_in_process(clean_url, tmp_path / "data")
    two = service_in_process(clean_url, tmp_path / "data")
    async with one as first, two as second, opened(clean_url) as store, first.client() as a, second.client() as b:
        talker = await Talker.start(store)
        followers = [asyncio.create_task(ndjson(client, talker.id)) for client in (a, b)]
        await talker.say("hello")
        made = (await a.post("/v1/jobs", json=FUNCTION, headers={"Idempotency-Key": "k"})).json()["id"]
        again = await b.post("/v1/jobs", json=FUNCTION, headers={"Idempotency-Key": "k"})
        assert (again.status_code, again.json()["id"]) == (200, made)
        assert (await b.post(f"/v1/jobs/{talker.id}/cancel")).status_code == 202
        await talker.end(Outcome(status=Status.CANCELLED))
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
        talker = await Talker.start(store)
        following = asyncio.create_task(sse(client, talker.id))

        async def follows() -> bool:
            return "holdfast_stream_followers 1" in (await client.get("/metrics")).text

        await eventually(follows, "it follows")
        killer = await asyncpg.connect(service.database_url)
        for n in range(5):
            await talker.say(f"line {n}")
            await killer.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )

            async def back() -> bool:
                with contextlib.suppress(StoreError):
                    return (await store.jobs.get(talker.id)).status is Status.RUNNING
                return False

            await eventually(back, "the store answers again")
        await killer.close()
        await talker.end()
        events = await asyncio.wait_for(following, 60)
        assert seqs(events) == list(range(1, (await store.jobs.get(talker.id)).last_seq + 1))
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
            talker = await Talker.start(store)
            await talker.say("before")
            seen: list[int] = []
            async with client.stream("GET", f"/v1/jobs/{talker.id}/events/stream") as response:
                async for event in events_of(response):
                    assert event.get("event") != "end"
                    if "id" in event:
                        seen.append(int(event["id"]))
                    if len(seen) == 3 and service.process is not None and service.process.poll() is None:
                        service.process.terminate()
            assert await asyncio.to_thread(service.stop) == 0
            await talker.say("while nobody served")
            await asyncio.to_thread(service.start)
            following = asyncio.create_task(sse(client, talker.id, **{"Last-Event-ID": str(seen[-1])}))
            await talker.say("after")
            await talker.end()
            events = await asyncio.wait_for(following, 60)
            assert seen + seqs(events) == list(range(1, (await store.jobs.get(talker.id)).last_seq + 1))
            assert events[-1]["event"] == "end"


async def test_real_process_is_followed_while_it_is_adopted(workers: InProcessWorkers, tmp_path: Path) -> None:
    """Proves E3, E7."""
    async with (
        service_in_process(workers.settings.database_url or "", tmp_path / "data") as service,
        service.client() as client,
    ):
        script = 'for n in 1 2 3 4 5 6; do echo "line $n"; sleep 0.3; done; echo \'{"event":"progress","percent":9}\''
        job = await workers.sh(script)
        following = asyncio.create_task(sse(client, job.id))
        async with workers.worker():
            await workers.wait_for_log(job, "line 2")
        async with workers.worker():
            await workers.ended(job, Status.SUCCEEDED)
            events = [json.loads(event["data"]) for event in (await asyncio.wait_for(following, 60))[:-1]]
        assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
        lines = [line for event in events if event["type"] == "log" for line in event["data"]["lines"]]
        assert lines == [f"line {n}" for n in range(1, 7)]
        assert [event["data"]["percent"] for event in events if event["type"] == "progress"] == [9]


@pytest.mark.parametrize("end", ["deleted", "expired"])
async def test_stream_ends_with_its_token(service: Service, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    monkeypatch.setattr(stream, "TOKEN_SECONDS", 0.05)
    monkeypatch.setattr(auth, "KNOWN_SECONDS", 0.0)
    async with service.client() as admin, opened(service.database_url) as store:
        job = (await admin.post("/v1/jobs", json=FUNCTION)).json()["id"]
        secret = new_secret()
        expires = datetime.now(UTC) + timedelta(seconds=8) if end == "expired" else None
        token = await store.tokens.add("t", Role.VIEWER, secret=secret, tenant="default", expires_at=expires)
        async with service.client(secret) as client, asyncio.timeout(60):
            async with client.stream("GET", f"/v1/jobs/{job}/events/stream") as sse:
                found = events_of(sse)
                assert (await anext(found))["comment"] == "holdfast"
                if end == "deleted":
                    assert (await admin.delete(f"/v1/tokens/{token.id}")).status_code == 200
                assert [event for event in [event async for event in found] if event.get("event") == "end"] == []
            assert (await client.get(f"/v1/jobs/{job}/events/stream")).status_code == 401


async def test_streams_of_one_token_are_limited_and_others_are_not(clean_url: str, tmp_path: Path) -> None:
    async with service_in_process(clean_url, tmp_path / "data", streams_per_token=2) as service:
        other = await service.token(Role.VIEWER)
        async with service.client() as client, service.client(other) as neighbour, contextlib.AsyncExitStack() as held:
            job = (await client.post("/v1/jobs", json=FUNCTION)).json()["id"]
            url = f"/v1/jobs/{job}/events/stream"
            for _ in range(2):
                await held.enter_async_context(client.stream("GET", url))
            refused = await client.get(url)
            assert (refused.status_code, error_of(refused)["code"]) == (429, "too_many_streams")
            await held.enter_async_context(neighbour.stream("GET", url))
            await held.aclose()
            async with asyncio.timeout(60):
                while True:
                    async with client.stream("GET", url) as again:
                        if again.status_code == 200:
                            break
