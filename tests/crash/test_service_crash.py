"""A server killed during requests: what it answered is kept, and the rest is complete or absent."""

import asyncio
import contextlib
from pathlib import Path

import httpx

from holdfast.model import Status, new_id
from tests.support.in_process_workers import InProcessWorkers, eventually
from tests.support.service import FUNCTION, Service, events_of, opened, service_process_on
from tests.support.streams import LoggingJob, seqs

ROUNDS = 3


async def kill_soon(service: Service, seconds: float) -> None:
    await asyncio.sleep(seconds)  # Reason: somewhere in the middle of what the clients do.
    await asyncio.to_thread(service.kill)


async def test_server_killed_during_submits_keeps_every_answered_job(clean_url: str, tmp_path: Path) -> None:
    """Proves J1."""
    with service_process_on(clean_url, tmp_path / "data") as service:
        answered: list[str] = []
        asked: list[str] = []
        for n in range(ROUNDS):
            async with service.client() as client, asyncio.TaskGroup() as group:

                async def submit(client: httpx.AsyncClient = client) -> None:
                    with contextlib.suppress(httpx.TransportError):
                        while True:
                            asked.append(new_id())
                            job = {**FUNCTION, "id": asked[-1], "lane": "L"}
                            made = await client.post("/v1/jobs", json=job)
                            assert made.status_code == 201
                            answered.append(made.json()["id"])

                for _ in range(4):
                    group.create_task(submit())
                group.create_task(kill_soon(service, 0.5 + 0.3 * n))
            await asyncio.to_thread(service.start)
        async with opened(clean_url) as store:
            await store.gates.resolve()
            page = await store.jobs.list(limit=1000)
            there = {job.id for job in page.items}
            while page.next_cursor is not None:  # A fast machine accepts more than one page.
                page = await store.jobs.list(limit=1000, cursor=page.next_cursor)
                there |= {job.id for job in page.items}
            assert set(answered) <= there <= set(asked)
            assert len(answered) > 5
            for job_id in there:
                assert [event.type for event in (await store.events.page(job_id)).items] == ["status"]


async def test_client_resumes_its_stream_after_the_server_was_killed(clean_url: str, tmp_path: Path) -> None:
    """Proves E3."""
    with service_process_on(clean_url, tmp_path / "data") as service:
        async with opened(clean_url) as store, service.client() as client:
            logged = await LoggingJob.start(store)
            stop = asyncio.Event()

            async def talk() -> None:
                n = 0
                while not stop.is_set():
                    await logged.log(f"line {n}")
                    n += 1
                    await asyncio.sleep(0.01)  # Reason: it has to talk while servers come and go.
                await logged.end()

            talking = asyncio.create_task(talk())
            seen: list[int] = []
            events: list[dict[str, str]] = []
            for n in range(ROUNDS + 1):
                url = f"/v1/jobs/{logged.id}/events/stream"
                headers = {"Last-Event-ID": str(seen[-1])} if seen else {}
                killing = None
                with contextlib.suppress(httpx.TransportError):
                    async with client.stream("GET", url, headers=headers) as response:
                        if n < ROUNDS:
                            killing = asyncio.create_task(kill_soon(service, 0.4))
                        else:
                            stop.set()
                        async for event in events_of(response):
                            events.append(event)
                            seen += seqs([event])
                if killing is not None:
                    await killing
                    await asyncio.to_thread(service.start)
            await talking
            assert events[-1]["event"] == "end"
            assert seen == list(range(1, (await store.jobs.get(logged.id)).last_seq + 1))


async def test_cancel_is_carried_out_after_the_server_was_killed(workers: InProcessWorkers, tmp_path: Path) -> None:
    """Proves C5."""
    with service_process_on(workers.settings.database_url or "", tmp_path / "data") as service:
        async with workers.worker(), service.client() as client:
            job = await workers.sh("sleep 600")
            await workers.running(job)
            answer = await client.post(f"/v1/jobs/{job.id}/cancel", json={"reason": "enough"})
            assert answer.status_code == 202
            await asyncio.to_thread(service.kill)
            ended = await workers.ended(job, Status.CANCELLED)
            assert ended.error is not None
            events = [event.data for event in await workers.events(job) if event.type == "audit"]
            assert events == [{"action": "cancel", "by": "admin", "reason": "enough"}]
        await asyncio.to_thread(service.start)


async def test_forced_delete_is_carried_out_after_the_server_was_killed(
    workers: InProcessWorkers, tmp_path: Path
) -> None:
    """Proves J15."""
    with service_process_on(workers.settings.database_url or "", tmp_path / "data", reaper_interval="1") as service:
        async with workers.worker(), service.client() as client:
            # One that does not obey: else it may be gone before the answer.
            job = await workers.sh("trap '' TERM; echo up; while :; do sleep 0.2; done", stop_grace=2)
            await workers.wait_for_log(job, "up")
            answer = await client.delete(f"/v1/jobs/{job.id}?force=true")
            assert (answer.status_code, answer.json()) == (202, {"outcome": "deleting"})
            await asyncio.to_thread(service.kill)

            async def gone() -> bool:
                return not (await workers.store.jobs.list()).items

            await eventually(gone, "the duty removes it")
        await asyncio.to_thread(service.start)


async def test_server_killed_during_cancels_leaves_no_half_cancelled_job(clean_url: str, tmp_path: Path) -> None:
    """Proves J2."""
    with service_process_on(clean_url, tmp_path / "data") as service:
        async with service.client() as client:
            ids = (await client.post("/v1/jobs/bulk", json={"jobs": [FUNCTION] * 300})).json()["ids"]
            said: set[str] = set()

            async def cancel(part: list[str]) -> None:
                with contextlib.suppress(httpx.TransportError):
                    for job_id in part:
                        if (await client.post(f"/v1/jobs/{job_id}/cancel")).status_code == 200:
                            said.add(job_id)

            await asyncio.gather(*(cancel(ids[n::4]) for n in range(4)), kill_soon(service, 0.4))
        await asyncio.to_thread(service.start)
        async with opened(clean_url) as store:
            for job in (await store.jobs.list(limit=1000)).items:
                events = (await store.events.page(job.id)).items
                assert events[-1].data["status"] == job.status
                assert (job.status is Status.CANCELLED) or job.id not in said
