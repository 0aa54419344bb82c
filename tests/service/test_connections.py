"""Connections: how many a server holds, how long one may take to ask, and what that leaves in the log."""

import asyncio
import logging
import resource
from pathlib import Path

import pytest

from holdfast.api import linger
from holdfast.api.connections import REPEATS, FewRepeats, connection_limit
from holdfast.config import Settings
from tests.support.service import FUNCTION, Service, service_in_process, service_process_on

HALF = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX-Slow: "


async def half_open(service: Service) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection with a request whose head is not finished."""
    reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
    writer.write(HALF)
    await writer.drain()
    return reader, writer


async def closed(reader: asyncio.StreamReader) -> bool:
    try:
        async with asyncio.timeout(30):
            return await reader.read() == b""
    except ConnectionError:
        return True


async def test_unfinished_request_is_closed_after_the_header_timeout(clean_url: str, tmp_path: Path) -> None:
    async with service_in_process(clean_url, tmp_path / "data", header_timeout=0.5) as service:
        reader, writer = await half_open(service)

        async def trickle() -> None:
            while not writer.is_closing():
                writer.write(b"x")
                await asyncio.sleep(0.05)  # Reason: the client is slow on purpose.

        slow = asyncio.create_task(trickle())
        assert await closed(reader)
        writer.close()
        await slow
        silent, other = await asyncio.open_connection("127.0.0.1", service.port)
        assert await closed(silent)
        other.close()


async def test_idle_connection_is_closed_after_its_request(clean_url: str, tmp_path: Path) -> None:
    async with service_in_process(clean_url, tmp_path / "data") as service:
        reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        async with asyncio.timeout(30):
            assert (await reader.read())[-1:] != b""
        writer.close()


async def test_full_server_closes_the_longest_idle_connection(clean_url: str, tmp_path: Path) -> None:
    """Half-open requests must not keep others out, and a request in progress must not be closed for them."""
    limits = {"max_connections": 10, "header_timeout": 60.0}
    async with service_in_process(clean_url, tmp_path / "data", **limits) as service, service.client() as client:
        job = (await client.post("/v1/jobs", json=FUNCTION)).json()["id"]
        async with client.stream("GET", f"/v1/jobs/{job}/events/stream") as stream:
            lines = stream.aiter_lines()
            assert await anext(lines) == ": holdfast"
            held = [await half_open(service) for _ in range(40)]
            assert (await client.get("/v1/jobs")).status_code == 200
            assert await closed(held[0][0])
            await client.post(f"/v1/jobs/{job}/cancel", json={})
            assert "event: end" in [line async for line in lines]
        for _, writer in held:
            writer.close()


def test_limit_stays_below_the_descriptors_that_the_process_may_open() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert connection_limit(Settings(max_connections=100)) == 100
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, hard), hard))
    try:
        assert connection_limit(Settings()) == 768
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("kind", ["sqlite"])
async def test_more_half_open_requests_than_descriptors_leave_the_server_answering(
    clean_url: str, tmp_path: Path
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    service = None
    try:
        with service_process_on(clean_url, tmp_path / "data") as service:  # It fails if a traceback is in the log.
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            held = [await half_open(service) for _ in range(600)]
            async with service.client() as client:
                for _ in range(5):
                    assert (await client.get("/v1/jobs")).status_code == 200
            for _, writer in held:
                writer.close()
        assert service.log.stat().st_size < 20_000
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_body_that_comes_too_slowly_is_answered_408(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linger, "GRACE_SECONDS", 0.2)
    reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
    writer.write(
        b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Authorization: Bearer %b\r\nContent-Length: 1000\r\n\r\n{" % service.admin.encode()
    )
    async with asyncio.timeout(30):
        assert b" 408 " in await reader.readline()
    writer.close()


def test_log_keeps_few_of_the_same_message(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("tests.repeats")
    few = FewRepeats()
    logger.addFilter(few)
    try:
        for n in range(1000):
            logger.warning("refused %d", n)
        logger.warning("another")
    finally:
        logger.removeFilter(few)
    assert len(caplog.messages) == REPEATS + 1
    assert "repeats are suppressed" in caplog.messages[REPEATS - 1]
