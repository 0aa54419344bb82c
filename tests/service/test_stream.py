"""Streams of one server: replay, follow, resume after a cut, limits of a token, and the end."""

import asyncio
import contextlib
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from holdfast.api import auth, stream
from holdfast.model import Outcome, Role, Status
from holdfast.store.tokens import new_secret
from tests.support.in_process_workers import InProcessWorkers
from tests.support.service import FUNCTION, Service, error_of, events_of, opened, service_in_process
from tests.support.streams import LoggingJob, ndjson, seqs, sse


async def test_three_followers_get_equal_bytes_to_the_end(service: Service) -> None:
    """Proves E2."""
    async with service.client() as client, opened(service.database_url) as store:
        logged = await LoggingJob.start(store)
        followers = [asyncio.create_task(ndjson(client, logged.id)) for _ in range(3)]
        for n in range(20):
            await logged.log(f"line {n}")
        await logged.end()
        first, *others = await asyncio.gather(*followers)
        assert others == [first, first]
        events = [json.loads(line) for line in first.splitlines()]
        last = (await store.jobs.get(logged.id)).last_seq
        assert [event["seq"] for event in events] == list(range(1, last + 1))
        assert events[-1]["data"]["status"] == "succeeded"


async def test_server_sent_events_have_ids_types_and_the_end(service: Service) -> None:
    """Proves E4."""
    async with service.client() as client, opened(service.database_url) as store:
        logged = await LoggingJob.start(store)
        await logged.log("hello")
        await logged.end(Outcome.failed("exit_nonzero", "boom"))
        async with client.stream("GET", f"/v1/jobs/{logged.id}/events/stream") as response:
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
        logged = await LoggingJob.start(store)
        await logged.log(*(f"line {n}" for n in range(10)), each=True)
        await logged.end()
        whole = await sse(client, logged.id)
        last = seqs(whole)[-1]
        for k in range(last + 1):
            assert seqs(await sse(client, logged.id, **{"Last-Event-ID": str(k)})) == list(range(k + 1, last + 1))
        wins = client.stream(
            "GET", f"/v1/jobs/{logged.id}/events/stream?after=1", headers={"Last-Event-ID": str(last - 1)}
        )
        async with wins as response:
            assert seqs([event async for event in events_of(response) if "comment" not in event]) == [last]


async def test_cut_connection_loses_and_repeats_no_event(service: Service) -> None:
    """Proves E3."""
    async with service.client() as client, opened(service.database_url) as store:
        logged = await LoggingJob.start(store)

        async def talk() -> None:
            for n in range(60):
                await logged.log(f"line {n}")
            await logged.end()

        talking = asyncio.create_task(talk())
        seen: list[int] = []
        ended = False
        while not ended:
            headers = {"Last-Event-ID": str(seen[-1])} if seen else {}
            url = f"/v1/jobs/{logged.id}/events/stream"
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
        assert seen == list(range(1, (await store.jobs.get(logged.id)).last_seq + 1))


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
        logged = await LoggingJob.start(store)
        connected = asyncio.Event()
        following = asyncio.create_task(sse(client, logged.id, connected))
        await asyncio.wait_for(connected.wait(), 30)
        await client.delete(f"/v1/jobs/{logged.id}?force=true")
        await logged.end(Outcome(status=Status.CANCELLED))
        await store.jobs.finish_deletions()
        *_, end = await asyncio.wait_for(following, 30)
        assert end["event"] == "end"


async def test_resumed_job_is_replayed_whole_and_followed(service: Service) -> None:
    """Proves E4."""
    async with service.client() as client, opened(service.database_url) as store:
        logged = await LoggingJob.start(store)
        await logged.log("first")
        await logged.end(Outcome.failed("exit_nonzero", "boom"))
        assert (await sse(client, logged.id))[-1]["event"] == "end"
        await client.post(f"/v1/jobs/{logged.id}/resume")
        following = asyncio.create_task(sse(client, logged.id))
        again = await LoggingJob.claim(store, await store.jobs.get(logged.id))
        await again.log("second")
        assert not following.done()
        await again.end()
        events = await asyncio.wait_for(following, 30)
        assert seqs(events) == list(range(1, (await store.jobs.get(logged.id)).last_seq + 1))
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
        logged = await LoggingJob.start(store)
        for n in range(5):
            await logged.log(*(f"line {n}.{m}" for m in range(500)), each=True)
        await logged.end()
        paged: list[Any] = []
        after = 0
        while True:
            page = (await client.get(f"/v1/jobs/{logged.id}/events?after={after}&limit=700")).json()
            paged += page["items"]
            if page["next_after"] is None:
                break
            after = page["next_after"]
        assert [event["seq"] for event in paged] == list(range(1, 2504))
        file = await client.get(f"/v1/jobs/{logged.id}/events/download")
        assert file.headers["content-disposition"] == 'attachment; filename="events.ndjson"'
        assert [json.loads(line) for line in file.text.splitlines()] == paged
        assert await ndjson(client, logged.id) == file.content
        assert [json.loads(event["data"]) for event in (await sse(client, logged.id))[:-1]] == paged
        for limit in (0, 1001):
            assert (await client.get(f"/v1/jobs/{logged.id}/events?limit={limit}")).status_code == 422


async def test_download_of_a_running_job_ends_where_it_stands(service: Service) -> None:
    """Proves E6."""
    async with service.client() as client, opened(service.database_url) as store:
        logged = await LoggingJob.start(store)
        await logged.log("hello")
        file = await asyncio.wait_for(client.get(f"/v1/jobs/{logged.id}/events/download"), 30)
        assert len(file.text.splitlines()) == 3
        await logged.end()


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
