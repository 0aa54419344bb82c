"""Connections: how many a server holds, how long one may take to ask, and what that leaves in the log."""

import asyncio
import logging
import resource
import socket
import ssl
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.api import connections, linger
from holdfast.api.connections import (
    MOST_HEAD,
    REPEATS,
    ConnectionLimits,
    FirstRequestProtocol,
    RepeatFilter,
    connection_limit,
)
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
    few = RepeatFilter()
    logger.addFilter(few)
    try:
        for n in range(1000):
            logger.warning("refused %d", n)
        logger.warning("another")
    finally:
        logger.removeFilter(few)
    assert len(caplog.messages) == REPEATS + 1
    assert "repeats are suppressed" in caplog.messages[REPEATS - 1]


# The first head of a connection

GET = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"


class Parser:
    """Takes the place of uvicorn's protocol, and keeps what it gets."""

    made: list["Parser"]

    def __init__(self, limits: ConnectionLimits, **named: Any) -> None:
        self.data = b""
        self.made.append(self)

    def connection_made(self, transport: object) -> None:
        assert self.data == b""

    def data_received(self, data: bytes) -> None:
        self.data += data


class Transport:
    """A connection without a network: after the hand-over, data goes to the parser."""

    def __init__(self, first: FirstRequestProtocol) -> None:
        self.protocol: Any = first
        self.closed = False

    def set_protocol(self, protocol: object) -> None:
        self.protocol = protocol

    def close(self) -> None:
        self.closed = True

    abort = close


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> ConnectionLimits:
    monkeypatch.setattr(Parser, "made", [], raising=False)
    monkeypatch.setattr(connections, "LimitedProtocol", Parser)
    return ConnectionLimits(Settings(max_connections=8))


def connect(limits: ConnectionLimits, state: Any = None) -> Transport:
    first = limits.protocol(server_state=state or SimpleNamespace(connections=set()))
    transport = Transport(first)
    first.connection_made(transport)  # type: ignore[arg-type]
    return transport


@pytest.mark.parametrize("end", [b"\r\n\r\n", b"\n\n", b"\n\r\n", b"\r\n\n"])
async def test_head_is_complete_at_its_last_byte_wherever_it_is_split(limits: ConnectionLimits, end: bytes) -> None:
    """No parser before; then one that gets every byte once."""
    head = b"GET / HTTP/1.1\r\nHost: a" + end
    for at in range(1, len(head)):
        transport = connect(limits)
        transport.protocol.data_received(head[:at])
        assert Parser.made == [], at
        transport.protocol.data_received(head[at:])
        assert [parser.data for parser in Parser.made] == [head], at
        Parser.made.clear()
    transport = connect(limits)
    for n, byte in enumerate(head):
        assert bool(Parser.made) is False, n
        transport.protocol.data_received(bytes([byte]))
    assert [parser.data for parser in Parser.made] == [head]
    assert not limits.waiting


async def test_body_and_next_request_in_the_packet_of_the_head_reach_the_parser(limits: ConnectionLimits) -> None:
    for more in (b"{}", GET, GET[:10]):
        transport = connect(limits)
        transport.protocol.data_received(GET + more)
        transport.protocol.data_received(b"rest")
        assert Parser.made.pop().data == GET + more + b"rest"


async def test_head_that_is_too_long_or_no_text_goes_to_the_parser_at_once(limits: ConnectionLimits) -> None:
    transport = connect(limits)
    long = b"GET / HTTP/1.1\r\nX: " + b"x" * MOST_HEAD
    transport.protocol.data_received(long[:MOST_HEAD])
    assert Parser.made == []
    transport.protocol.data_received(long[MOST_HEAD : MOST_HEAD + 1])
    assert Parser.made.pop().data == long[: MOST_HEAD + 1]
    for first in (b"\x16\x03\x01", b"\x00", b"\r\n", b" "):
        connect(limits).protocol.data_received(first)
        assert Parser.made.pop().data == first


async def test_connection_that_closes_before_its_head_leaves_nothing(limits: ConnectionLimits) -> None:
    state = SimpleNamespace(connections=set())
    for data in (b"", b"GET"):
        transport = connect(limits, state)
        first = transport.protocol
        assert (len(state.connections), len(limits.waiting)) == (1, 1)
        if data:
            first.data_received(data)
        first.connection_lost(None)
        assert (len(state.connections), len(limits.waiting)) == (0, 0)
        assert first._deadline.cancelled()


async def answers(service: Service, *packets: bytes) -> bytes:
    """Send packets one after the other, and return all that comes until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
    writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        for packet in packets:
            writer.write(packet)
            await writer.drain()
            await asyncio.sleep(0.01)  # Reason: so that packets are not merged.
        async with asyncio.timeout(30):
            return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


LAST = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


async def test_server_answers_a_request_however_it_is_cut_into_packets(clean_url: str, tmp_path: Path) -> None:
    async with service_in_process(clean_url, tmp_path / "data") as service:
        end = len(LAST)
        cuts = [[LAST], [LAST[: end - n] for n in (1,)] + [LAST[end - 1 :]], [LAST[: end - 2], LAST[end - 2 :]]]
        cuts += [[LAST[: end - 3], LAST[end - 3 :]], [bytes([byte]) for byte in LAST]]
        for packets in cuts:
            assert (await answers(service, *packets)).startswith(b"HTTP/1.1 200"), packets
        assert (await answers(service, GET + LAST)).count(b"HTTP/1.1 200") == 2
        assert (await answers(service, GET + LAST[:20], LAST[20:])).count(b"HTTP/1.1 200") == 2


async def test_body_in_the_packet_of_the_head_is_read(service: Service) -> None:
    body = b'{"runner": "function", "spec": {"name": "f"}}'
    head = (
        b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
        b"Authorization: Bearer %b\r\nContent-Length: %d\r\n\r\n" % (service.admin.encode(), len(body))
    )
    for packets in ([head + body], [head + body[:5], body[5:]], [head[:-1], head[-1:] + body]):
        assert (await answers(service, *packets)).startswith(b"HTTP/1.1 201"), packets


@pytest.mark.parametrize("kind", ["sqlite"])
async def test_head_over_16_kib_and_tls_on_the_plain_port_are_refused_quietly(clean_url: str, tmp_path: Path) -> None:
    with service_process_on(clean_url, tmp_path / "data") as service:  # It fails if a traceback is in the log.
        long = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX-Long: " + b"x" * 2 * MOST_HEAD
        assert (await answers(service, long)).startswith(b"HTTP/1.1 4")
        whole = long.replace(b"x" * 2 * MOST_HEAD, b"x" * (MOST_HEAD + 1)) + b"\r\nConnection: close\r\n\r\n"
        assert (await answers(service, whole)).startswith(b"HTTP/1.1 ")
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        with pytest.raises((ssl.SSLError, ConnectionError)):
            async with asyncio.timeout(30):
                await asyncio.open_connection("127.0.0.1", service.port, ssl=context)
        assert (await answers(service, LAST)).startswith(b"HTTP/1.1 200")


async def test_connections_that_close_at_once_make_room(clean_url: str, tmp_path: Path) -> None:
    async with service_in_process(clean_url, tmp_path / "data", max_connections=10, header_timeout=60.0) as service:
        for _ in range(100):
            _, writer = await asyncio.open_connection("127.0.0.1", service.port)
            writer.close()
        assert (await answers(service, LAST)).startswith(b"HTTP/1.1 200")
