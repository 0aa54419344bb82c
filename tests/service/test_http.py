"""Jobs, lanes, queues and workers over HTTP, through a real socket, on both stores."""

import asyncio
from typing import Any

from holdfast.model import Claimable, Outcome, Role, new_id
from tests.support.service import FUNCTION, Service, error_of, opened

PAIR = Claimable(queue="default", capability="function:f", domain="function")


async def fail_one(url: str) -> str:
    """Claim a job and let it fail."""
    async with opened(url) as store:
        (lease,) = (await store.leases.claim("w1", [PAIR], slots=1, ttl=60)).claimed
        await store.leases.finish([(lease, Outcome.failed("exit_nonzero", "boom"))])
        return lease.id


async def test_job_is_there_when_its_submit_is_answered_100_of_100(service: Service) -> None:
    """Proves J1."""
    async with service.client() as client:
        for _ in range(100):
            made = await client.post("/v1/jobs", json=FUNCTION)
            assert made.status_code == 201
            read = await client.get(made.headers["location"])
            assert (read.status_code, read.json()["status"]) == (200, "queued")
            assert read.json() == made.json()
            assert read.json()["started_at"] is None


async def test_job_has_the_promised_shape(service: Service) -> None:
    async with service.client() as client:
        asked: dict[str, Any] = {
            "runner": "process",
            "spec": {"command": ["sh", "-c", "echo hello"], "env": {"A": "1"}, "stdin": None},
            "kind": "run",
            "lane": None,
            "labels": {"team": "blue"},
            "inputs": {"rows": 3},
            "available_at": None,
            "needs": [],
            "id": None,
            "retry": {"base": 5, "cap": 300, "on": ["failed"]},
            "timeout": 3600,
            "budget": {"tokens": 500000},
        }
        job = (await client.post("/v1/jobs", json=asked)).json()
    promised = (
        "id tenant kind queue lane status priority labels runner spec inputs attempts max_attempts requested_at "
        "available_at started_at finished_at updated_at lease stop_request reused progress usage result exit_code "
        "error attempt tasks links"
    )
    assert set(promised.split()) <= set(job)
    assert job["requested_at"].endswith("Z")
    assert job["links"]["stream"] == f"/v1/jobs/{job['id']}/events/stream"


async def test_reuse_and_idempotency_answer_200_with_reused(service: Service) -> None:
    """Proves J12."""
    async with service.client() as client:
        first = await client.post("/v1/jobs", json={**FUNCTION, "reuse_key": "a"})
        again = await client.post("/v1/jobs", json={**FUNCTION, "reuse_key": "a"})
        assert (first.status_code, again.status_code) == (201, 200)
        assert (again.json()["id"], again.json()["reused"]) == (first.json()["id"], True)
        key = {"Idempotency-Key": "k1"}
        answers = [await client.post("/v1/jobs", json=FUNCTION, headers=key) for _ in range(2)]
        assert [answer.status_code for answer in answers] == [201, 200]
        assert answers[0].json()["id"] == answers[1].json()["id"]
        other = await client.post("/v1/jobs", json={**FUNCTION, "kind": "other"}, headers=key)
        assert other.status_code == 409
        long = await client.post("/v1/jobs", json=FUNCTION, headers={"Idempotency-Key": "x" * 129})
        assert (long.status_code, error_of(long)["details"]["field"]) == (422, "idempotency_key")
        bulk = [
            await client.post("/v1/jobs/bulk", json={"jobs": [FUNCTION] * 3}, headers={"Idempotency-Key": "k2"})
            for _ in range(2)
        ]
        assert [answer.status_code for answer in bulk] == [201, 200]
        assert bulk[0].json() == bulk[1].json()
        await client.post(f"/v1/jobs/{answers[0].json()['id']}/cancel")
        await client.delete(f"/v1/jobs/{answers[0].json()['id']}")
        gone = await client.post("/v1/jobs", json=FUNCTION, headers=key)
        assert (gone.status_code, error_of(gone)["code"]) == (409, "gone")


async def test_on_lost_hold_is_accepted_and_shown_as_pause(service: Service) -> None:
    """Proves L11."""
    async with service.client() as client:
        for written in ("pause", "hold"):
            headers = {"Idempotency-Key": written}
            body = {**FUNCTION, "on_lost": written}
            answers = [await client.post("/v1/jobs", json=body, headers=headers) for _ in range(2)]
            assert [answer.status_code for answer in answers] == [201, 200]
            read = await client.get(f"/v1/jobs/{answers[0].json()['id']}")
            assert [answer.json()["policy"]["on_lost"] for answer in (*answers, read)] == ["pause"] * 3
        wrong = await client.post("/v1/jobs", json={**FUNCTION, "on_lost": "panic"})
        assert (wrong.status_code, error_of(wrong)["details"]["field"]) == (422, "on_lost")


async def test_bulk_is_all_or_nothing(service: Service) -> None:
    """Proves J13."""
    async with service.client() as client:
        wrong = await client.post("/v1/jobs/bulk", json={"jobs": [FUNCTION, {**FUNCTION, "priority": "high"}]})
        assert (wrong.status_code, error_of(wrong)["details"]["field"]) == (422, "jobs[1].priority")
        assert (await client.get("/v1/jobs")).json()["items"] == []
        ids = [new_id(), new_id()]
        chain = [{**FUNCTION, "id": ids[0]}, {**FUNCTION, "id": ids[1], "needs": [ids[0]]}]
        assert (await client.post("/v1/jobs/bulk", json={"jobs": chain})).json() == {"ids": ids}


async def test_cancel_answers_by_state(service: Service) -> None:
    """Proves C3."""
    async with service.client() as client, opened(service.database_url) as store:
        waiting = (await client.post("/v1/jobs", json=FUNCTION)).json()["id"]
        assert (await client.post(f"/v1/jobs/{waiting}/cancel")).status_code == 200
        assert (await client.post(f"/v1/jobs/{waiting}/cancel", json={"reason": "again"})).status_code == 200
        running = (await client.post("/v1/jobs", json=FUNCTION)).json()["id"]
        (lease,) = (await store.leases.claim("w1", [PAIR], slots=1, ttl=60)).claimed
        stopping = await client.post(f"/v1/jobs/{running}/cancel", json={"reason": "why"})
        assert (stopping.status_code, stopping.json()["stop_request"]["kind"]) == (202, "cancel")
        await store.leases.finish([(lease, Outcome.succeeded())])
        done = await client.post(f"/v1/jobs/{running}/cancel")
        assert (done.status_code, error_of(done)["code"]) == (409, "illegal_move")
        unknown = await client.post(f"/v1/jobs/{new_id()}/cancel")
        assert (unknown.status_code, error_of(unknown)["code"]) == (404, "not_found")
        events = (await client.get(f"/v1/jobs/{running}/events")).json()["items"]
        (audit,) = [event["data"] for event in events if event["type"] == "audit"]
        assert audit == {"action": "cancel", "by": "admin", "reason": "why"}


async def test_failed_job_is_resumed_resolved_and_dismissed(service: Service) -> None:
    """Proves C8."""
    async with service.client() as client:
        job = (await client.post("/v1/jobs", json={**FUNCTION, "lane": "L"})).json()["id"]
        assert await fail_one(service.database_url) == job
        assert (await client.get("/v1/lanes/L")).json()["state"] == "blocked"
        assert (await client.post(f"/v1/jobs/{job}/dismiss", json={"reason": "known"})).json()["dismissed"]
        assert (await client.get("/v1/lanes/L")).json()["state"] == "idle"
        again = await client.post(f"/v1/jobs/{job}/resume", json={"budget": {"tokens": 5}})
        assert (again.status_code, again.json()["status"]) == (200, "queued")
        await fail_one(service.database_url)
        done = await client.post(f"/v1/jobs/{job}/resolve", json={"result": {"rows": 3}})
        assert (done.json()["status"], done.json()["result"]) == ("succeeded", {"rows": 3})
        assert (await client.post(f"/v1/jobs/{job}/release")).status_code == 409
        actions = [
            (event["data"]["action"], event["data"]["by"])
            for event in (await client.get(f"/v1/jobs/{job}/events")).json()["items"]
            if event["type"] == "audit"
        ]
        assert actions == [("dismiss", "admin"), ("resume", "admin"), ("resolve", "admin")]
        attempts = (await client.get(f"/v1/jobs/{job}/attempts")).json()["items"]
        assert [attempt["cause"] for attempt in attempts] == ["exit", "exit"]


async def test_job_that_never_started_is_readable_by_every_endpoint(service: Service) -> None:
    """Proves J5."""
    async with service.client() as client:
        job = (await client.post("/v1/jobs", json={**FUNCTION, "hold": True})).json()
        assert job["status"] == "pending"
        assert (await client.post(f"/v1/jobs/{job['id']}/release")).json()["status"] == "queued"
        assert (await client.post(f"/v1/jobs/{job['id']}/interrupt")).json()["status"] == "cancelled"
        for end in ("", "/attempts", "/explain", "/events", "/events/stream", "/events/download"):
            assert (await client.get(f"/v1/jobs/{job['id']}{end}")).status_code == 200, end


async def test_list_filters_and_pages(service: Service) -> None:
    """Proves J14."""
    async with service.client() as client:
        jobs = [{**FUNCTION, "kind": "a" if n % 2 else "b", "labels": {"n": str(n % 3)}} for n in range(25)]
        ids = (await client.post("/v1/jobs/bulk", json={"jobs": jobs})).json()["ids"]
        seen: list[str] = []
        cursor: dict[str, str] = {}
        while True:
            page = (await client.get("/v1/jobs", params={"limit": 10, **cursor})).json()
            seen += [job["id"] for job in page["items"]]
            if page["next_cursor"] is None:
                break
            cursor = {"cursor": page["next_cursor"]}
        assert seen == ids[::-1]
        found = (await client.get("/v1/jobs?kind=a&label=n:1&status=queued,running&status=failed")).json()["items"]
        assert {job["id"] for job in found} == {ids[n] for n in range(25) if n % 2 and n % 3 == 1}
        assert (await client.get("/v1/jobs?since=2999-01-01T00:00:00Z")).json()["items"] == []


async def test_delete_in_its_four_cases(service: Service) -> None:
    """Proves J15."""
    async with service.client() as client, opened(service.database_url) as store:
        job = (await client.post("/v1/jobs", json=FUNCTION)).json()["id"]
        blocked = await client.delete(f"/v1/jobs/{job}")
        assert (blocked.status_code, blocked.json()["outcome"], error_of(blocked)["code"]) == (
            409,
            "blocked",
            "blocked",
        )
        (lease,) = (await store.leases.claim("w1", [PAIR], slots=1, ttl=60)).claimed
        dry = await client.delete(f"/v1/jobs/{job}?force=true&dry_run=true")
        assert (dry.status_code, dry.json()) == (200, {"outcome": "would_delete"})
        forced = await client.delete(f"/v1/jobs/{job}?force=true")
        assert (forced.status_code, forced.json()) == (202, {"outcome": "deleting"})
        await store.leases.finish([(lease, Outcome.succeeded())])
        done = await client.delete(f"/v1/jobs/{job}")
        assert (done.status_code, done.json()) == (200, {"outcome": "deleted"})
        assert (await client.get(f"/v1/jobs/{job}")).status_code == 404


async def test_lane_is_readable_and_can_be_paused(service: Service) -> None:
    """Proves N3."""
    async with service.client() as client:
        for _ in range(2):
            await client.post("/v1/jobs", json={**FUNCTION, "lane": "team/db one"})
        (lane,) = (await client.get("/v1/lanes")).json()["items"]
        assert (lane["lane"], lane["state"], lane["depth"]) == ("team/db one", "active", 2)
        assert (await client.post("/v1/lanes/team/db%20one/pause")).json()["state"] == "paused"
        assert (await client.post("/v1/lanes/team/db one/resume")).json()["state"] == "active"
        check = {"command": ["true"], "timeout": 3}
        assert (await client.put("/v1/lanes/team/db one", json={"check": check})).json()["check"] == check
        assert (await client.put("/v1/lanes/team/db one", json={"check": None})).json()["check"] is None
        assert (await client.get("/v1/lanes/none")).status_code == 404
        page = (await client.get("/v1/lanes?limit=1")).json()
        assert (await client.get("/v1/lanes", params={"cursor": page["next_cursor"]})).json()["items"] == []


async def test_queue_counts_pauses_and_keeps_omitted_fields(service: Service) -> None:
    """Proves J9, J11."""
    async with service.client() as client:
        await client.post("/v1/jobs", json={**FUNCTION, "queue": "heavy/one"})
        changed = (await client.patch("/v1/queues/heavy/one", json={"max_running": 2, "max_depth": 1})).json()
        assert (changed["max_running"], changed["max_depth"], changed["counts"]["open"]) == (2, 1, 1)
        full = await client.post("/v1/jobs", json={**FUNCTION, "queue": "heavy/one"})
        assert (full.status_code, error_of(full)["code"]) == (429, "queue_full")
        changed = (await client.patch("/v1/queues/heavy/one", json={"max_depth": None})).json()
        assert (changed["max_running"], changed["max_depth"]) == (2, None)
        assert (await client.post("/v1/queues/heavy/one/pause")).json()["paused"]
        (queue,) = (await client.get("/v1/queues")).json()["items"]
        assert (queue["paused"], queue["max_running"]) == (True, 2)
        assert not (await client.post("/v1/queues/heavy/one/resume")).json()["paused"]


async def test_workers_are_shown_drained_and_called_lost(service: Service) -> None:
    async with service.client() as client, opened(service.database_url) as store:
        assert (await client.get("/readyz")).json()["workers"] == 0
        assert "no live worker" in (await client.get("/readyz")).json()["warnings"][0]
        await store.workers.register(
            "w1", host="h1", pid=1, queues={"default": 1}, capabilities=["function:f"], domains=["d1"], ttl=60
        )
        assert (await client.get("/readyz")).json() == {"status": "ready", "workers": 1, "warnings": []}
        (worker,) = (await client.get("/v1/workers")).json()["items"]
        assert (worker["host"], worker["live"], worker["draining"]) == ("h1", True, False)
        assert (await client.post("/v1/workers/h1/drain")).json() == {"workers": ["w1"]}
        assert (await client.post("/v1/workers/h1/lost")).status_code == 409
        assert (await client.post("/v1/workers/h2/lost")).status_code == 404
        await store.workers.delete("w1")


async def test_explain_gives_the_reason(service: Service) -> None:
    """Proves J17."""
    async with service.client() as client:
        job = (await client.post("/v1/jobs", json=FUNCTION)).json()["id"]
        (reason,) = (await client.get(f"/v1/jobs/{job}/explain")).json()["reasons"]
        assert "no live worker" in reason["message"]


async def test_metrics_count_requests_by_route(service: Service) -> None:
    async with service.client() as client:
        await client.get(f"/v1/jobs/{new_id()}")
        text = (await client.get("/metrics")).text
        assert 'holdfast_http_requests_total{method="GET",route="/v1/jobs/{job_id}",status="404"} 1' in text
        assert "process_resident_memory_bytes" in text
        assert (await client.get("/healthz")).json() == {"status": "ok"}
        assert (await client.get("/docs")).status_code == 200


async def test_many_at_once_are_each_answered(service: Service) -> None:
    async with service.client(await service.token(Role.SUBMITTER)) as client:
        answers = await asyncio.gather(*(client.post("/v1/jobs", json=FUNCTION) for _ in range(64)))
        assert {answer.status_code for answer in answers} == {201}
        assert len({answer.json()["id"] for answer in answers}) == 64
