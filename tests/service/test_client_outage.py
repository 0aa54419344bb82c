"""Server outages while a client follows: clients and the command line wait, resume, and exit without noise."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from holdfast import AsyncClient, Client
from holdfast.client import outage
from holdfast.client.http import ServerUnreachable
from holdfast.model import Status
from tests.support.service import FUNCTION, Service, opened, service_process_on

MORE_TRIES = 8
"""More than the five tries after which a plain call gives up."""
PROGRAM = (sys.executable, "-m", "holdfast.cli.main")
COMPLAINTS = ("Task was destroyed", "never awaited", "Exception ignored", "never retrieved", "unclosed", "RuntimeError")


class Refusals(httpx.AsyncHTTPTransport):
    """A network that says when so many connections were refused."""

    def __init__(self, more: int = MORE_TRIES) -> None:
        super().__init__()
        self.more = more
        self.refused = 0
        self.many = threading.Event()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        try:
            return await super().handle_async_request(request)
        except httpx.ConnectError:
            self.refused += 1
            if self.refused >= self.more:
                self.many.set()
            raise


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outage, "retry_delay", lambda failures: 0.02)


def away_and_back(records: list[str]) -> tuple[int, int]:
    return sum("cannot reach" in text for text in records), sum("is back" in text for text in records)


def restart(service: Service, network: Refusals) -> None:
    """Kill the server, let the client try for longer than a plain call would, and start the server again."""
    service.kill()
    assert network.many.wait(60)
    service.start()


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_follow_and_wait_outlast_a_killed_server(
    clean_url: str, tmp_path: Path, quick: None, caplog: pytest.LogCaptureFixture
) -> None:
    """Proves G4. No event is missing or repeated, and both say once that it is away and once that it is back."""
    network = Refusals(3 * MORE_TRIES)
    with service_process_on(clean_url, tmp_path / "data") as service:
        async with (
            AsyncClient(service.url, token=service.admin, transport=network) as client,
            opened(clean_url) as store,
        ):

            async def restart_and_cancel() -> None:
                await asyncio.to_thread(restart, service, network)
                await store.jobs.cancel(job.id)

            job = await client.submit(FUNCTION)
            waiting = asyncio.create_task(client.wait(job.id))
            seen = []
            async for event in client.follow(job.id):
                seen.append(event.seq)
                if len(seen) == 1:
                    restarting = asyncio.create_task(restart_and_cancel())
            await restarting
            ended = await waiting
            assert ended.status is Status.CANCELLED
            assert seen == list(range(1, ended.last_seq + 1))
    assert away_and_back(caplog.messages) == (1, 1)


@pytest.mark.parametrize("kind", ["sqlite"])
def test_the_blocking_client_outlasts_a_killed_server(
    clean_url: str, tmp_path: Path, quick: None, caplog: pytest.LogCaptureFixture
) -> None:
    """Proves G4."""
    network = Refusals()
    with (
        service_process_on(clean_url, tmp_path / "data") as service,
        Client(service.url, token=service.admin, transport=network) as client,
    ):
        job = client.submit(FUNCTION)
        restarting = threading.Thread(target=_restart_and_cancel, args=(service, network, job.id))
        restarting.start()
        assert client.wait(job.id).status is Status.CANCELLED
        restarting.join()
        seqs = [event.seq for event in client.follow(job.id)]
        assert seqs == list(range(1, client.get(job.id).last_seq + 1))
    assert away_and_back(caplog.messages) == (1, 1)


def _restart_and_cancel(service: Service, network: Refusals, job: str) -> None:
    restart(service, network)
    with Client(service.url, token=service.admin) as other:
        other.cancel(job)


async def test_follow_and_wait_give_up_after_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Proves G4. On a clock that only the pauses between two tries move."""
    now = 0.0

    async def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(outage, "asyncio", type("Asyncio", (), {"sleep": staticmethod(sleep)}))
    monkeypatch.setattr(outage, "time", type("Time", (), {"monotonic": staticmethod(lambda: now)}))
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        async with AsyncClient(url, token="none", tries=1) as client:
            for call in (lambda: anext(client.follow("a")), lambda: client.wait("a")):
                began = now
                with pytest.raises(ServerUnreachable, match=f"cannot reach {url} for"):
                    await call()
                assert now - began >= 600
        async with AsyncClient(url, token="none", tries=1, reconnect_timeout=30) as client:
            began = now
            with pytest.raises(ServerUnreachable):
                await client.wait("a")
            assert 30 <= now - began < 40


# Ends without a complaint

ASYNC = """
import asyncio, os, signal, sys, threading
from holdfast import AsyncClient

async def main():
    async with AsyncClient(sys.argv[1], token=sys.argv[2]) as client:
        async for event in client.follow(sys.argv[3]):
            print("event", flush=True)
            {act}
try:
    asyncio.run(main())
except (ZeroDivisionError, KeyboardInterrupt) as error:
    print(type(error).__name__, flush=True)
"""
BLOCKING = """
import asyncio, os, signal, sys, threading
from holdfast import Client

def main():
    with Client(sys.argv[1], token=sys.argv[2]) as client:
        for event in client.follow(sys.argv[3]):
            print("event", flush=True)
            {act}
try:
    main()
except (ZeroDivisionError, KeyboardInterrupt) as error:
    print(type(error).__name__, flush=True)
"""
NEVER_CLOSED = """
import sys
from holdfast import Client

client = Client(sys.argv[1], token=sys.argv[2])
events = client.follow(sys.argv[3])
print(next(events) and "event", flush=True)
"""
BREAK, RAISE, PRESS, GO_ON = "break", "1 / 0", "os.kill(os.getpid(), signal.SIGINT)", "pass"


@pytest.mark.parametrize("kind", ["sqlite"])
@pytest.mark.parametrize(
    ("script", "ended", "says"),
    [
        (ASYNC.format(act=BREAK), False, ""),
        (ASYNC.format(act=RAISE), False, "ZeroDivisionError"),
        (ASYNC.format(act=PRESS), False, "KeyboardInterrupt"),
        (ASYNC.format(act=GO_ON), True, ""),
        (BLOCKING.format(act=BREAK), False, ""),
        (BLOCKING.format(act=RAISE), False, "ZeroDivisionError"),
        (BLOCKING.format(act=PRESS), False, "KeyboardInterrupt"),
        (BLOCKING.format(act=GO_ON), True, ""),
        (NEVER_CLOSED, False, ""),
    ],
    ids=[
        *("async-break", "async-error", "async-interrupt", "async-end"),
        *("break", "error", "interrupt", "end", "never-closed"),
    ],
)
def test_following_ends_without_a_complaint(service_process: Service, script: str, ended: bool, says: str) -> None:
    """Proves G4. However the loop ends, nothing is printed at exit."""
    with Client(service_process.url, token=service_process.admin) as client:
        job = client.submit(FUNCTION)
        if ended:
            client.cancel(job.id)
    done = subprocess.run(
        [sys.executable, "-W", "default", "-c", script, service_process.url, service_process.admin, job.id],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("event\n")
    assert says in done.stdout


@pytest.mark.parametrize("kind", ["sqlite"])
@pytest.mark.parametrize("script", [ASYNC.format(act=GO_ON), BLOCKING.format(act=GO_ON)], ids=["async", "blocking"])
def test_ctrl_c_ends_following_while_the_server_is_away(service_process: Service, script: str) -> None:
    """Proves G4."""
    with Client(service_process.url, token=service_process.admin) as client:
        job = client.submit(FUNCTION)
    with subprocess.Popen(
        [sys.executable, "-W", "default", "-c", script, service_process.url, service_process.admin, job.id],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "event\n"
        service_process.kill()
        assert "cannot reach" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        said, complaints = process.communicate(timeout=60)
    assert (process.returncode, said, complaints) == (0, "KeyboardInterrupt\n", "")


async def test_slow_reader_bounds_what_is_read_ahead_and_can_leave(service: Service) -> None:
    """What is read ahead is bounded, and leaving in the middle of it closes the connection."""
    async with AsyncClient(service.url, token=service.admin) as client, opened(service.database_url) as store:
        job = await store.jobs.submit(FUNCTION)
        for _ in range(150):
            await store.jobs.cancel(job.id)
            await store.jobs.resume(job.id)
        events = client.follow(job.id)
        assert (await anext(events)).seq == 1
        await events.aclose()
        assert "EventStream" not in str(asyncio.all_tasks())


# The command line


@contextlib.contextmanager
def in_its_place(port: int) -> Iterator[threading.Event]:
    """Listen on the server's port and close every connection; the event is set after many."""
    many = threading.Event()
    with socket.create_server(("127.0.0.1", port)) as listener:

        def hang_up() -> None:
            for n in range(1, 1000):
                try:
                    caller, _ = listener.accept()
                except OSError:
                    return
                caller.close()
                if n >= MORE_TRIES:
                    many.set()

        thread = threading.Thread(target=hang_up)
        thread.start()
        try:
            yield many
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def command_line(service: Service, *arguments: str) -> "subprocess.Popen[str]":
    known = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
    known |= {"HOLDFAST_URL": service.url, "HOLDFAST_TOKEN": service.admin, "PYTHONWARNINGS": "default"}
    return subprocess.Popen(
        [*PROGRAM, *arguments], env=known, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip


def read_until(stream: Any, text: str) -> str:
    for line in stream:
        if text in line:
            return str(line)
    raise AssertionError(f"{text!r} never came")


@pytest.mark.parametrize("kind", ["sqlite"])
@pytest.mark.parametrize("command", ["watch", "logs", "run"])
def test_commands_outlast_a_killed_server(service_process: Service, command: str) -> None:
    """Proves G4."""
    with Client(service_process.url, token=service_process.admin) as client:
        if command == "run":
            process = command_line(service_process, "run", "--queue", "nobody", "--", "true")
            job = read_until(process.stderr, "job ").split()[1]
        else:
            job = client.submit(FUNCTION).id
            following = ("-f",) if command == "logs" else ()
            process = command_line(service_process, command, *following, "--json", job)
            assert process.stdout is not None
            first = process.stdout.readline()
        with process:
            service_process.kill()
            with in_its_place(service_process.port) as many:
                read_until(process.stderr, "cannot reach")
                assert many.wait(60)
            service_process.start()
            client.cancel(job)
            said, errors = process.communicate(timeout=60)
        assert process.returncode == 130, errors
        assert away_and_back(errors.splitlines()) == (0, 1), errors
        assert not [word for word in COMPLAINTS if word in errors], errors
        if command != "run":
            seqs = [json.loads(line)["seq"] for line in (first + said).splitlines()]
            assert seqs == list(range(1, client.get(job).last_seq + 1))


@pytest.mark.parametrize("kind", ["sqlite"])
def test_ctrl_c_ends_a_command_during_a_server_outage(service_process: Service) -> None:
    """Proves G4. It cannot stop the job then, and says so."""
    with Client(service_process.url, token=service_process.admin) as client:
        job = client.submit(FUNCTION).id
    with command_line(service_process, "watch", "--json", job) as process:
        assert process.stdout is not None
        process.stdout.readline()
        service_process.kill()
        read_until(process.stderr, "cannot reach")
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 3
    assert f"job {job} may still be running" in errors
    assert not [word for word in COMPLAINTS if word in errors], errors
