"""Requests that are refused: each says what is wrong and where, and nothing is written."""

import asyncio
import json
from typing import Any

from holdfast.model import new_id
from tests.support.service import FUNCTION, Service, error_of

DEEP = b'{"runner":"function","spec":{"name":"f"},"inputs":{"a":' + b"[" * 99 + b"]" * 99 + b"}}"
BAD: list[tuple[str, str, Any, int, str]] = [
    ("POST", "/v1/jobs", b"{", 400, "bad_request"),
    ("POST", "/v1/jobs", b"", 400, "bad_request"),
    ("POST", "/v1/jobs", b'"\xff"', 400, "bad_request"),
    ("POST", "/v1/jobs", b"[]", 422, "body"),
    ("POST", "/v1/jobs", b"[" * 100_000, 422, "body"),
    (
        "POST",
        "/v1/jobs",
        DEEP,
        422,
        "body",
    ),
    ("POST", "/v1/jobs", {**FUNCTION, "colour": 1}, 422, "colour"),
    ("POST", "/v1/jobs", {**FUNCTION, "priority": "high"}, 422, "priority"),
    ("POST", "/v1/jobs", {**FUNCTION, "priority": 10**30}, 422, "priority"),
    ("POST", "/v1/jobs", {**FUNCTION, "inputs": {"n": "a\0b"}}, 422, "inputs"),
    ("POST", "/v1/jobs", {**FUNCTION, "id": "4711"}, 422, "id"),
    ("POST", "/v1/jobs", {**FUNCTION, "available_at": "0001-01-01T00:00:00+14:00"}, 422, "available_at"),
    ("POST", "/v1/jobs", {**FUNCTION, "available_at": "9999-12-31T23:59:59-14:00"}, 422, "available_at"),
    ("POST", "/v1/jobs", {**FUNCTION, "retry": {"colour": 1}}, 422, "retry.colour"),
    ("POST", "/v1/jobs", {**FUNCTION, "retry": {"base": 1, "cap": 1e300}}, 422, "retry"),
    ("POST", "/v1/jobs", {**FUNCTION, "check": {"command": ["a"], "timeout": 1e9}}, 422, "check.timeout"),
    ("POST", "/v1/jobs", {**FUNCTION, "check": {"command": ["a"] * 5000, "timeout": 1}}, 422, "check.command"),
    ("POST", "/v1/jobs", {"runner": "process", "spec": {"command": ["a"], "user": "a:b"}}, 422, "spec.user"),
    ("POST", "/v1/jobs", {"runner": "process", "spec": {"command": ["a"], "user": "a b"}}, 422, "spec.user"),
    ("POST", "/v1/jobs", {"runner": "function", "spec": {"name": "f", "x": 1}}, 422, "spec.x"),
    ("POST", "/v1/jobs", {"runner": "process", "spec": {"command": ["a"], "env": {"A=B": "1"}}}, 422, "spec.env"),
    ("POST", "/v1/jobs", {"runner": "process", "spec": {"command": ["a"], "env": {"A\nB": "1"}}}, 422, "spec.env"),
    ("POST", "/v1/jobs", {"runner": "docker", "spec": {"image": "a", "env": {"=": "1"}}}, 422, "spec.env"),
    (
        "POST",
        "/v1/jobs",
        {"runner": "process", "tasks": [{"name": "a", "command": ["a"], "env": {"A=": ""}}]},
        422,
        "tasks[0].env",
    ),
    ("POST", "/v1/jobs", {**FUNCTION, "secrets": ["A=B"]}, 422, "secrets"),
    ("POST", "/v1/jobs", {"runner": "process", "spec": {"command": ["a"], "user": "4294967296"}}, 422, "spec.user"),
    ("POST", "/v1/jobs", {"runner": "process", "spec": {"command": ["a"], "user": "1:4294967295"}}, 422, "spec.user"),
    ("POST", "/v1/jobs", {"runner": "docker", "spec": {"image": "a", "user": "9" * 30}}, 422, "spec.user"),
    ("POST", "/v1/jobs", {"runner": "docker", "spec": {"image": "a", "cpus": 1e300}}, 422, "spec.cpus"),
    ("POST", "/v1/jobs", {"runner": "docker", "spec": {"image": "a", "cpus": 1e-12}}, 422, "spec.cpus"),
    ("POST", "/v1/jobs", {"runner": "docker", "spec": {"image": "a", "pids": 10**30}}, 422, "spec.pids"),
    ("POST", "/v1/jobs", {"runner": "docker", "spec": {"image": "a", "memory": "9" * 30 + "g"}}, 422, "spec.memory"),
    ("POST", "/v1/jobs", {"runner": "docker", "spec": {"image": "a", "memory": "9" * 17 + "g"}}, 422, "spec.memory"),
    ("POST", "/v1/jobs", {"runner": "rocket", "spec": {}}, 422, "runner"),
    ("POST", "/v1/jobs", {"tool": "none"}, 404, "not_found"),
    ("POST", "/v1/jobs", {"tool": 7}, 422, "tool"),
    ("POST", "/v1/jobs", {**FUNCTION, "tenant": "blue"}, 422, "tenant"),
    ("POST", "/v1/jobs", {**FUNCTION, "needs": [new_id()]}, 404, "not_found"),
    ("POST", "/v1/jobs/bulk", {"jobs": []}, 422, "jobs"),
    ("POST", "/v1/jobs/bulk", {"jobs": [1]}, 422, "jobs[0]"),
    ("POST", "/v1/jobs/bulk", {"jobs": {}, "x": 1}, 422, "x"),
    ("GET", "/v1/jobs/4711", None, 404, "not_found"),
    ("GET", "/v1/jobs/%00", None, 422, "job_id"),
    ("GET", "/v1/jobs?colour=1", None, 422, "colour"),
    ("GET", "/v1/jobs?limit=0", None, 422, "limit"),
    ("GET", "/v1/jobs?limit=1&limit=2", None, 422, "limit"),
    ("GET", "/v1/jobs?cursor=nonsense", None, 422, "cursor"),
    ("GET", "/v1/jobs?kind=%00", None, 422, "kind"),
    ("GET", "/v1/jobs?label=x", None, 422, "label"),
    ("GET", "/v1/jobs?since=yesterday", None, 422, "since"),
    ("GET", "/v1/jobs?since=2026-01-01T00:00:00", None, 422, "since"),
    ("GET", "/v1/jobs?since=0001-01-01T00:00:00%2B14:00", None, 422, "since"),
    ("GET", "/v1/lanes/%00", None, 422, "lane"),
    ("PUT", "/v1/lanes/a", {"check": {"command": [], "timeout": 1}}, 422, "check.command"),
    ("PUT", "/v1/lanes/a", {"check": {"command": ["a\0"], "timeout": 1}}, 422, "check.command"),
    ("PUT", "/v1/lanes/a", {}, 422, "check"),
    ("PATCH", "/v1/queues/a", {"max_running": 0}, 422, "max_running"),
    ("PATCH", "/v1/queues/a", {"max_running": 10**12}, 422, "max_running"),
    ("POST", "/v1/tokens", {"name": "a", "role": "king"}, 422, "role"),
    ("POST", "/v1/tokens", {"name": "a", "role": "viewer"}, 422, "tenant"),
    ("POST", "/v1/tokens", {"name": "a\n", "role": "admin"}, 422, "name"),
    ("DELETE", "/v1/tokens/4711", None, 404, "not_found"),
    ("GET", "/v1/nothing", None, 404, "not_found"),
    ("GET", "/v1/../../etc/passwd", None, 404, "not_found"),
    ("GET", "/v1/jobs/..%2f..%2fetc%2fpasswd", None, 404, "not_found"),
    ("PATCH", "/v1/jobs", None, 405, "method_not_allowed"),
]


async def test_bad_input_is_refused_with_what_and_where_and_nothing_is_written(service: Service) -> None:
    async with service.client() as client:
        for method, path, body, status, what in BAD:
            raw = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
            answer = await client.request(method, path, content=raw, headers={"Content-Type": "application/json"})
            assert answer.is_error, (method, path, body)
            said = error_of(answer)
            assert answer.status_code == status, (method, path, body, said)
            assert what in (said["code"], said["details"].get("field")), (method, path, body, said)
            assert len(said["message"]) > 3
        assert (await client.get("/v1/jobs")).json()["items"] == []
        assert (await client.get("/v1/lanes")).json()["items"] == []
        assert (await client.get("/v1/queues")).json()["items"] == []
        assert len((await client.get("/v1/tokens")).json()["items"]) == 1


async def test_huge_body_is_refused_by_its_length_and_by_its_bytes(service: Service) -> None:
    async with service.client() as client:
        reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
        writer.write(
            b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Authorization: Bearer %b\r\nContent-Length: 1000000000\r\n\r\n" % service.admin.encode()
        )
        assert b" 413 " in await reader.readline()
        writer.close()

        async def endless() -> Any:
            for _ in range(20):
                yield b" " * 1024 * 1024

        chunked = await client.post("/v1/jobs", content=endless(), headers={"Content-Type": "application/json"})
        assert chunked.status_code == 413
        large = await client.post("/v1/jobs", json={**FUNCTION, "inputs": {"a": "x" * 2_000_000}})
        assert (large.status_code, error_of(large)["details"]["field"]) == (413, "inputs")
        assert (await client.get("/v1/jobs")).json()["items"] == []


async def test_only_json_bodies_are_accepted(service: Service) -> None:
    async with service.client() as client:
        for kind in ("text/plain", "application/x-www-form-urlencoded"):
            answer = await client.post("/v1/jobs", content=b"{}", headers={"Content-Type": kind})
            assert (answer.status_code, error_of(answer)["code"]) == (400, "bad_request")
