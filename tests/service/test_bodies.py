"""Bodies of requests: refused ones are answered so that the client can read the answer, and none costs too much."""

import asyncio
import json
import shutil
import threading
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from holdfast import submission
from holdfast.api import json_body
from holdfast.api.json_body import PIECE, count_values
from holdfast.errors import AtCapacity
from holdfast.submission import Submission
from tests.support.service import FUNCTION, Service, error_of

MIB = 1024 * 1024
LIMIT = 16 * MIB


def _post(url: str, token: str, size: int) -> tuple[int, bytes]:
    """What urllib gets for a body of zeros."""
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, data=bytes(size), headers=headers, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


@pytest.mark.parametrize("size", [LIMIT + 1, 3 * LIMIT])
async def test_urllib_reads_the_413(service: Service, size: int) -> None:
    """Proves I4."""
    status, body = await asyncio.to_thread(_post, f"{service.url}/v1/jobs", service.admin, size)
    assert (status, b'"too_large"' in body) == (413, True)


async def test_urllib_reads_the_401_for_a_large_body(service: Service) -> None:
    """Proves I4."""
    status, body = await asyncio.to_thread(_post, f"{service.url}/v1/jobs", "hf_nobody", LIMIT + 1)
    assert (status, b'"unauthorized"' in body) == (401, True)


@pytest.mark.parametrize("close", [False, True])
@pytest.mark.parametrize("chunked", [False, True])
async def test_httpx_reads_the_413(service: Service, chunked: bool, close: bool) -> None:
    """Proves I4."""

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(40):
            yield bytes(MIB)

    headers = {"Content-Type": "application/json"} | ({"Connection": "close"} if close else {})
    async with service.client() as client:
        answer = await client.post("/v1/jobs", content=pieces() if chunked else bytes(40 * MIB), headers=headers)
        assert (answer.status_code, error_of(answer)["code"]) == (413, "too_large")
        assert answer.headers["connection"] == "close"
        assert (await client.post("/v1/jobs", json=FUNCTION)).status_code == 201


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("expect", ["Expect:", "Expect: 100-continue"])
async def test_curl_reads_the_413(service: Service, tmp_path: object, expect: str) -> None:
    """Proves I4."""
    curl = await asyncio.create_subprocess_exec(
        *("curl", "--silent", "--show-error", "--data-binary", "@-", "--header", expect),
        *("--header", f"Authorization: Bearer {service.admin}", "--header", "Content-Type: application/json"),
        *("--write-out", " %{http_code}", f"{service.url}/v1/jobs"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    said, errors = await curl.communicate(bytes(LIMIT + MIB))
    assert (said[-4:], b'"too_large"' in said, errors, curl.returncode) == (b" 413", True, b"", 0)


async def test_upload_over_its_limit_is_answered_too(service: Service) -> None:
    """Proves I4."""
    files = {"file": ("big", bytes(120 * MIB))}
    async with service.client() as client:
        answer = await client.post("/v1/uploads", files=files, headers={"Connection": "close"})
        assert answer.status_code == 413


async def test_connection_stays_open_after_a_small_unread_body(service: Service) -> None:
    async with httpx.AsyncClient(base_url=service.url) as client:
        for _ in range(2):
            answer = await client.post("/v1/jobs", json=FUNCTION)
            assert (answer.status_code, "connection" in answer.headers) == (401, False)


def test_values_are_counted_outside_of_strings() -> None:
    """The count is what bounds memory, so a string that looks like values must not count, nor hide any."""
    values = {"a": ["x,[{", '"', "\\", '\\"', {}, [], 1.5], 'k"]\\': "\\\\,"}
    for pad in range(70):  # Whatever stands where one piece of the text ends and the next begins.
        padded = {"pad": "," * (PIECE - 60 + pad), **values}
        assert count_values(json.dumps(padded).encode()) == 1 + 2 + 6 + 1 + 1 + 1 + 1


async def test_too_many_values_are_refused_before_they_are_decoded(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    def decode(raw: object) -> None:
        raise AssertionError("it was decoded")

    body = b'{"jobs":[' + b"{}," * 400_000 + b"{}]}"
    async with service.client() as client:
        with monkeypatch.context() as patched:
            patched.setattr("holdfast.api.json_body.msgspec.json.decode", decode)
            answer = await client.post("/v1/jobs/bulk", content=body, headers={"Content-Type": "application/json"})
        assert (answer.status_code, error_of(answer)["details"]["field"]) == (413, "body")


async def test_too_many_jobs_are_refused_before_anybody_looks_at_one(service: Service) -> None:
    async with service.client() as client:
        answer = await client.post("/v1/jobs/bulk", json={"jobs": [{"unknown": 1}] * 10_001})
        assert (answer.status_code, error_of(answer)["details"]["field"]) == (422, "jobs")
        assert "10001 jobs" in error_of(answer)["message"]


async def test_large_bulk_is_decoded_and_checked_off_the_event_loop(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: dict[str, set[int]] = {"decode": set(), "check": set()}
    decode, check = json_body.decode, submission.check

    def decoding(raw: bytes, depth: int) -> Any:
        threads["decode"].add(threading.get_ident())
        return decode(raw, depth)

    def checking(job: Submission, tenant: str) -> Submission:
        threads["check"].add(threading.get_ident())
        return check(job, tenant)

    monkeypatch.setattr(json_body, "decode", decoding)
    monkeypatch.setattr(submission, "check", checking)
    async with service.client() as client:
        answer = await client.post("/v1/jobs/bulk", json={"jobs": [{**FUNCTION, "inputs": {"a": "x" * 100}}] * 1000})
        assert answer.status_code == 201
        wrong = await client.post("/v1/jobs/bulk", json={"jobs": [FUNCTION] * 1999 + [{**FUNCTION, "priority": "x"}]})
        assert error_of(wrong)["details"]["field"] == "jobs[1999].priority"
    assert threads["decode"]
    assert threads["check"]
    assert threading.get_ident() not in threads["decode"] | threads["check"]


async def test_only_a_few_large_bodies_are_held_at_once() -> None:
    bodies = json_body.LargeBodies(most=1, wait=0.01)
    async with bodies.admitted(json_body.LARGE + 1):
        async with bodies.admitted(json_body.LARGE):
            pass
        with pytest.raises(AtCapacity):
            await bodies.admitted(json_body.LARGE + 1).__aenter__()
    async with bodies.admitted(json_body.LARGE + 1):
        pass
