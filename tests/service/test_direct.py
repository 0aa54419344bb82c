"""Direct mode: without a queue, jobs run in the request that submits them, with the same record."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from holdfast.api.app import Api
from holdfast.assemble_service import api_of, direct_of
from holdfast.cli.serve import bind
from holdfast.config import Settings
from holdfast.model import Role, Status
from tests.support.in_process_workers import InProcessWorkers, eventually
from tests.support.service import ServerWithoutSignals, Service, error_of, service_process_on

REFUSALS = 8
WAIT_FOR = 'echo began; while [ ! -e "$GATE" ]; do sleep 0.05; done; echo done'


def sh(script: str, /, gate: Path | None = None, **fields: Any) -> dict[str, Any]:
    spec: dict[str, Any] = {"command": ["sh", "-c", script]}
    if gate is not None:
        spec["env"] = {"GATE": str(gate)}
    return {"runner": "process", "spec": spec, **fields}


class Here(Service):
    """A server in the test's own process, which can be told to leave."""

    app: Api


@contextlib.asynccontextmanager
async def direct(workers: InProcessWorkers, **settings: Any) -> AsyncIterator[Here]:
    """A server without a queue, with the functions and state folder of the workers."""
    service = Here(workers.settings.database_url or "", workers.settings.data_dir)
    found: Settings = replace(workers.settings, port=service.port, queue_enabled=False, rate_limit=None, **settings)
    service.app = app = api_of(found, background=direct_of(found, workers.functions))
    with bind(found) as listener:
        async with app.running():
            server = ServerWithoutSignals(app, found)
            task = asyncio.create_task(server.serve(sockets=[listener]))
            try:
                yield service
            finally:
                app.leave()
                server.should_exit = True
                await task


async def begun(workers: InProcessWorkers) -> str:
    """Wait until the one job there is has said that it began; return its id."""

    async def look() -> str | None:
        jobs = (await workers.store.jobs.list(status=[Status.RUNNING])).items
        return jobs[0].id if jobs and "began" in await workers.log(jobs[0]) else None

    return await eventually(look, "the job runs")


async def test_second_call_is_refused_at_once_while_the_first_runs(workers: InProcessWorkers, tmp_path: Path) -> None:
    """Proves O1."""
    gate = tmp_path / "gate"
    async with direct(workers) as service, service.client() as client:
        first = asyncio.create_task(client.post("/v1/jobs", json=sh(WAIT_FOR, gate)))
        job_id = await begun(workers)
        full = await client.post("/v1/jobs", json=sh("true"))
        assert (full.status_code, error_of(full)["code"]) == (503, "at_capacity")
        assert full.headers["retry-after"] == "1"
        assert not first.done()
        assert [job.id for job in (await workers.store.jobs.list()).items] == [job_id], "nothing of it is in the record"
        gate.touch()
        ended = await first
        assert (ended.status_code, ended.json()["id"], ended.json()["status"]) == (201, job_id, "succeeded")
        assert ended.headers["location"] == f"/v1/jobs/{job_id}"
        again = await client.post("/v1/jobs", json=sh("exit 3"))
        assert (again.json()["status"], again.json()["exit_code"]) == ("failed", 3)


async def test_refusal_at_capacity_is_immediate(workers: InProcessWorkers, tmp_path: Path) -> None:
    """Proves O1: the fastest of many takes at most 100 ms longer than the fastest refusal for another reason.

    A busy machine delays both kinds; a wait in the code would be in every refusal.
    """
    gate = tmp_path / "gate"
    seconds: dict[str, list[float]] = {"at_capacity": [], "invalid": []}
    async with direct(workers) as service, service.client() as client:
        first = asyncio.create_task(client.post("/v1/jobs", json=sh(WAIT_FOR, gate)))
        await begun(workers)
        for _ in range(REFUSALS):
            for code, job in (("at_capacity", sh("true")), ("invalid", sh("true", lane="L"))):
                began = time.perf_counter()
                refused = await client.post("/v1/jobs", json=job)
                seconds[code].append(time.perf_counter() - began)
                assert error_of(refused)["code"] == code
        gate.touch()
        assert (await first).status_code == 201
    assert min(seconds["at_capacity"]) < min(seconds["invalid"]) + 0.1, seconds


async def test_record_is_the_same_as_with_the_queue(workers: InProcessWorkers) -> None:
    """Proves O1."""
    asked = sh("echo hello; echo out > output/file; echo x >&2; exit 3", max_attempts=2, retry={"base": 0, "cap": 0})
    async with direct(workers) as service, service.client() as client:
        answer = await client.post("/v1/jobs", json=asked)
        assert answer.status_code == 201
        ran = answer.json()
        files = (await client.get(ran["links"]["artifacts"])).json()["items"]
    async with workers.worker():
        queued = await workers.ended(await workers.store.jobs.submit(asked))
    records = []
    for job in (await workers.get(ran["id"]), queued):
        assert job.started_at is not None
        assert job.finished_at is not None
        assert job.requested_at <= job.started_at <= job.finished_at
        attempts = await workers.store.attempts.list(job.id)
        events = [(event.type, sorted(event.data), event.data.get("status")) for event in await workers.events(job)]
        ends = [(one.attempt, one.cause, one.exit_code, one.error, one.phase) for one in attempts]
        records.append((job.status, job.exit_code, job.error, job.attempts, job.lease, job.last_seq, ends, events))
    assert records[0] == records[1]
    assert [file["path"] for file in files] == ["file"]


@pytest.mark.parametrize("kind", ["sqlite"])
async def test_function_runs_in_the_request_and_its_result_is_the_answer(workers: InProcessWorkers) -> None:
    """Proves O1."""

    @workers.functions.add(name="double")
    def double(n: int) -> int:
        return 2 * n

    async with direct(workers) as service, service.client(await service.token(Role.SUBMITTER)) as client:
        asked = {"runner": "function", "spec": {"name": "double"}, "inputs": {"n": 4}}
        assert (await client.post("/v1/jobs", json=asked)).json()["result"] == 8
        unknown = await client.post("/v1/jobs", json={**asked, "spec": {"name": "triple"}})
        assert (unknown.status_code, len((await workers.store.jobs.list()).items)) == (409, 1)


@pytest.mark.parametrize("kind", ["sqlite"])
async def test_function_with_a_lane_needs_the_queue(workers: InProcessWorkers) -> None:
    """Its lane comes from the registered defaults, not from the request."""
    workers.functions.add(name="play", lane="{target}")(lambda target: target)
    async with workers.worker() as worker:
        await worker.started.wait()
    async with direct(workers) as service, service.client() as client:
        job = {"runner": "function", "spec": {"name": "play"}, "inputs": {"target": "crm"}}
        refused = await client.post("/v1/jobs", json=job)
    assert (refused.status_code, error_of(refused)["details"]) == (422, {"field": "lane"})
    assert not (await workers.store.jobs.list()).items


@pytest.mark.parametrize("kind", ["sqlite"])
@pytest.mark.parametrize("on_disconnect", ["continue", "cancel"])
async def test_disconnect_continues_or_cancels_the_job(
    workers: InProcessWorkers, tmp_path: Path, on_disconnect: str
) -> None:
    """Proves O1."""
    gate = tmp_path / "gate"
    async with direct(workers, on_disconnect=on_disconnect) as service:
        async with service.client() as client:
            call = asyncio.create_task(client.post("/v1/jobs", json=sh(WAIT_FOR, gate)))
            job_id = await begun(workers)
            call.cancel()
            await asyncio.wait([call])
        if on_disconnect == "cancel":
            await workers.ended(job_id, Status.CANCELLED)
            (audit,) = await workers.events(job_id, "audit")
            assert audit.data["reason"] == "its client went away"
        else:
            gate.touch()
            await workers.ended(job_id, Status.SUCCEEDED)


async def test_repeat_of_a_call_joins_the_job_and_needs_no_room(workers: InProcessWorkers, tmp_path: Path) -> None:
    """Proves O1, J12."""
    gate = tmp_path / "gate"
    async with direct(workers) as service, service.client() as client:
        key = {"Idempotency-Key": "once"}
        first = asyncio.create_task(client.post("/v1/jobs", json=sh(WAIT_FOR, gate), headers=key))
        job_id = await begun(workers)
        soon = await client.post("/v1/jobs", json=sh(WAIT_FOR, gate), headers={**key, "Prefer": "wait=0"})
        assert (soon.status_code, soon.json()["id"], soon.json()["status"]) == (200, job_id, "running")
        other = await client.post("/v1/jobs", json=sh("true"), headers=key)
        assert error_of(other)["code"] == "at_capacity"
        gate.touch()
        assert (await first).status_code == 201
        late = await client.post("/v1/jobs", json=sh(WAIT_FOR, gate), headers=key)
        assert (late.status_code, late.json()["id"], late.json()["status"]) == (200, job_id, "succeeded")
        assert (await client.post("/v1/jobs", json=sh("true"), headers=key)).status_code == 409


async def test_fields_that_need_a_queue_are_refused_by_name(workers: InProcessWorkers) -> None:
    """Proves O1."""
    async with direct(workers) as service, service.client() as client:
        later = "2100-01-01T00:00:00Z"
        waits: dict[str, Any] = {"lane": "a", "hold": True, "available_at": later, "queue_timeout": 5}
        for field, value in waits.items():
            refused = await client.post("/v1/jobs", json=sh("true", **{field: value}))
            assert (refused.status_code, error_of(refused)["details"]["field"]) == (422, field)
        bulk = await client.post("/v1/jobs/bulk", json={"jobs": [sh("true")]})
        assert (bulk.status_code, error_of(bulk)["code"]) == (409, "queue_off")
        await workers.store.queues.pause("default")
        assert error_of(await client.post("/v1/jobs", json=sh("true")))["code"] == "paused"
        await workers.store.queues.resume("default")
        assert (await workers.store.jobs.list()).items == []
        made = (await client.post("/v1/jobs", json=sh("true"))).json()
        taken = await client.post("/v1/jobs", json=sh("true", id=made["id"]))
        assert taken.status_code == 409
        assert made["id"] in error_of(taken)["message"]
        assert (await client.post("/v1/jobs", json=sh("true"))).json()["status"] == "succeeded"


@pytest.mark.parametrize("kind", ["sqlite"])
async def test_stopping_server_answers_with_the_running_job_and_the_next_one_finishes_it(
    workers: InProcessWorkers, tmp_path: Path
) -> None:
    """Proves O1."""
    gate = tmp_path / "gate"
    async with direct(workers) as service, service.client() as client:
        call = asyncio.create_task(client.post("/v1/jobs", json=sh(WAIT_FOR, gate)))
        job_id = await begun(workers)
        service.app.leave()
        answer = await call
        assert (answer.status_code, answer.json()["id"], answer.json()["status"]) == (201, job_id, "running")
        late = await client.post("/v1/jobs", json=sh("true"))
        assert error_of(late)["code"] == "at_capacity"
    async with direct(workers):
        gate.touch()
        ended = await workers.ended(job_id, Status.SUCCEEDED)
    assert (ended.attempts, await workers.log(job_id)) == (1, ["began", "done"])


@pytest.mark.parametrize("kind", ["sqlite"])
async def test_next_server_adopts_the_job_of_a_killed_one(workers: InProcessWorkers, tmp_path: Path) -> None:
    """Proves O1."""
    gate, marker = tmp_path / "gate", tmp_path / "marker"
    settings = {
        "queue_enabled": "false",
        "process_user": "root",
        "docker_host": "none",
        "lease_ttl": "60",
        "heartbeat_interval": "1",
        "on_disconnect": "cancel",
    }
    with service_process_on(workers.settings.database_url or "", workers.settings.data_dir, **settings) as service:
        async with service.client() as client:
            call = asyncio.create_task(client.post("/v1/jobs", json=sh(f"echo >> {marker}; {WAIT_FOR}", gate)))
            job_id = await begun(workers)
            await asyncio.to_thread(service.kill)
            with pytest.raises(httpx.TransportError):
                await call
            await asyncio.to_thread(service.start)
            full = await eventually(lambda: refused(client), "what it adopted counts")
            assert error_of(full)["code"] == "at_capacity"
            gate.touch()
            ended = await workers.ended(job_id, Status.SUCCEEDED)
        assert (ended.attempts, marker.read_text(), await workers.log(job_id)) == (1, "\n", ["began", "done"])
        adopted = [event for event in await workers.events(job_id, "lease") if event.data["lease"] == "adopted"]
        assert len(adopted) == 1


async def refused(client: httpx.AsyncClient) -> httpx.Response | None:
    """Ask for something that makes no job when there is room: the queue that it names is not for now."""
    answer = await client.post("/v1/jobs", json={"runner": "function", "spec": {"name": "nobody-has-it"}})
    return answer if answer.status_code == 503 else None
