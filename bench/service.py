"""The service compared with a server that answers a constant, and followers of one job: memory, reads, delay.

Run by `make bench-service`, on Postgres with its default durability (fsync on). What counts are the ratios; the
absolute figures belong to the machine.
"""

import asyncio
import contextlib
import hashlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from tests.support.cluster import cluster
from tests.support.service import Service, service_process_on

from holdfast.model import Claimable, Lease, NewEvent, Outcome
from holdfast.store import Store, open_store
from holdfast.store.migrate import migrate
from holdfast.store.store import connect

CONNECTIONS = 16
SECONDS = 3.0
ROUNDS = 3
BULK = 1000
FOLLOWERS = int(os.environ.get("HOLDFAST_BENCH_FOLLOWERS", "1000"))
TALK_SECONDS = 10
APPENDS = 10
LINES = 100
FUNCTION = {"runner": "function", "spec": {"name": "noop"}, "inputs": {"row": 1, "text": "x" * 100}}
PAIR = Claimable(queue="default", capability="function:noop", domain="function")
Work = Callable[[], Awaitable[None]]


class Line:
    """One connection that is kept open: as little client as possible, so that the server is what is measured."""

    def __init__(self, service: Service) -> None:
        self._served = service
        self._head = f"Host: 127.0.0.1\r\nAuthorization: Bearer {service.admin}\r\n"

    async def open(self) -> "Line":
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self._served.port, limit=2**22)
        return self

    def request(self, method: str, path: str, body: bytes = b"", accept: str = "*/*") -> bytes:
        kind = f"Accept: {accept}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        return f"{method} {path} HTTP/1.1\r\n{self._head}{kind}\r\n".encode() + body

    async def call(self, request: bytes) -> bytes:
        self.writer.write(request)
        head = await self.reader.readuntil(b"\r\n\r\n")
        assert head[9:10] == b"2", head
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r")[0])
        return await self.reader.readexactly(length)

    def close(self) -> None:
        self.writer.close()


async def rate(works: list[Work]) -> float:
    """How many pieces of work all workers together do in a second."""
    done = 0
    began = time.monotonic()

    async def run(work: Work) -> None:
        nonlocal done
        while time.monotonic() - began < SECONDS:
            await work()
            done += 1

    await asyncio.gather(*(run(work) for work in works))
    return done / (time.monotonic() - began)


async def submit_rates(service: Service, rounds: int = ROUNDS) -> tuple[list[float], list[float]]:
    """Return the rates of submits and of a constant answer, in turns."""
    lines = [await Line(service).open() for _ in range(CONNECTIONS)]
    body = msgspec.json.encode(FUNCTION)

    def calls(request: bytes) -> list[Work]:
        async def call(line: Line) -> None:
            await line.call(request)

        return [lambda line=line: call(line) for line in lines]  # type: ignore[misc]

    constant, ours = [], []
    for _ in range(rounds):
        constant.append(await rate(calls(lines[0].request("GET", "/healthz"))))
        ours.append(await rate(calls(lines[0].request("POST", "/v1/jobs", body))))
    for line in lines:
        line.close()
    return ours, constant


async def submits(service: Service) -> None:
    ours, constant = await submit_rates(service)
    report(f"submit over HTTP, {CONNECTIONS} connections", ours, constant, 0.3, "jobs/s", "a constant")


async def bulks(service: Service, store: Store) -> None:
    line = await Line(service).open()
    jobs: list[dict[str, Any]] = [FUNCTION] * BULK
    request = line.request("POST", "/v1/jobs/bulk", msgspec.json.encode({"jobs": jobs}))

    async def over_http() -> None:
        await line.call(request)

    async def direct() -> None:
        await store.jobs.submit_many(jobs)

    raw, ours = [], []
    for _ in range(ROUNDS):
        raw.append(await rate([direct]) * BULK)
        ours.append(await rate([over_http]) * BULK)
    line.close()
    report(f"bulk of {BULK} over HTTP", ours, raw, 0.3, "jobs/s", "the store's bulk")


def report(name: str, ours: list[float], other: list[float], target: float, unit: str, against: str) -> None:
    mine, theirs = statistics.median(ours), statistics.median(other)
    ratio = mine / theirs
    verdict = "ok" if ratio >= target else "MISSED"
    print(f"{name}: {mine:,.0f} {unit}, {ratio:.2f} of {against} ({theirs:,.0f}/s); target {target} {verdict}")


async def followers(service: Service, store: Store) -> None:
    job = await store.jobs.submit(FUNCTION, tenant="default")
    lease = await claim(store, job.id)
    before = resident(service)
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.service", "follow", str(service.port), service.admin, job.id, str(FOLLOWERS)),
        stdout=asyncio.subprocess.PIPE,
        limit=2**26,
    )
    assert child.stdout is not None
    assert (await child.stdout.readline()).strip() == b"all follow"
    reads = await reads_of(service)
    most = 0
    cpu = ticks(service)
    began = time.monotonic()
    for n in range(TALK_SECONDS * APPENDS):
        text = [f"{time.time():.6f} line {n}.{m} of a job that talks a lot" for m in range(LINES)]
        await store.events.append(
            lease,
            n + 1,
            [NewEvent(type="log", data={"stream": "stdout", "lines": text})],
            offsets=(0, 0),
            old_offsets=(0, 0),
        )
        most = max(most, resident(service))
        await asyncio.sleep(max(0.0, began + (n + 1) / APPENDS - time.monotonic()))
    took = time.monotonic() - began
    cpu = ticks(service) - cpu
    await store.leases.finish([(lease, Outcome.succeeded())])
    answer = json.loads(await child.stdout.readline())
    await child.wait()
    reads = await reads_of(service) - reads
    wanted = TALK_SECONDS * APPENDS * LINES
    per_client = (most - before) / FOLLOWERS / 1000
    print(f"{FOLLOWERS} followers of one job, {wanted / took:,.0f} lines/s for {took:.1f} s:")
    print(
        f"  lines each has: {answer['lines']} of {wanted}; different texts: {answer['texts']}; ended: {answer['ended']}"
    )
    print(f"  {per_client:.0f} KB per follower; target 100 {'ok' if per_client <= 100 else 'MISSED'}")
    print(f"  {reads} block reads for {TALK_SECONDS * APPENDS} appends, by one reader")
    print(f"  append to client: p50 {answer['p50'] * 1000:.0f} ms, p95 {answer['p95'] * 1000:.0f} ms")
    print(f"  server: {cpu / took:.0%} of a core")


async def reads_of(service: Service) -> int:
    line = await Line(service).open()
    text = (await line.call(line.request("GET", "/metrics"))).decode()
    line.close()
    name = "holdfast_stream_reads_total "
    return next(int(float(found.split()[1])) for found in text.splitlines() if found.startswith(name))


async def claim(store: Store, job_id: str) -> Lease:
    while True:
        for lease in (await store.leases.claim("bench", [PAIR], slots=1000, ttl=3600)).claimed:
            if lease.id == job_id:
                return lease


async def follow(port: int, token: str, job_id: str, count: int) -> None:
    """The followers, in a process of their own: read to the end, keep a hash, the lines and the delays."""
    head = f"Host: 127.0.0.1\r\nAuthorization: Bearer {token}\r\nConnection: close\r\n\r\n"
    delays: list[float] = []
    hashes: list[str] = []
    lines: list[int] = []
    ended = 0
    there = 0
    all_there = asyncio.Event()

    async def one(n: int) -> None:
        nonlocal ended, there
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"GET /v1/jobs/{job_id}/events/stream HTTP/1.1\r\n{head}".encode())
        await reader.readuntil(b": holdfast\n\n")
        there += 1
        if there == count:
            all_there.set()
        whole = hashlib.sha256()
        seen = 0
        last = b""
        async for line in reader:
            if line.startswith(b"data: "):
                last = line
                whole.update(line)
                seen += line.count(b" line ")
                if n % 20 == 0 and b'"type":"log"' in line:
                    said = float(json.loads(line[6:])["data"]["lines"][0].split()[0])
                    delays.append(time.time() - said)
        ended += b'"status":"succeeded"' in last
        hashes.append(whole.hexdigest())
        lines.append(seen)
        writer.close()

    async with asyncio.TaskGroup() as group:
        for n in range(count):
            group.create_task(one(n))
            if n % 50 == 49:
                await asyncio.sleep(0.05)
        await all_there.wait()
        print("all follow", flush=True)
    delays.sort()
    answer = {
        "lines": sorted(set(lines)),
        "texts": len(set(hashes)),
        "ended": ended,
        "p50": delays[len(delays) // 2],
        "p95": delays[len(delays) * 95 // 100],
    }
    print(json.dumps(answer), flush=True)


async def end_to_end(service: Service, store: Store) -> None:
    """How long after a child printed a line a follower has it: supervisor, worker, database, reader, socket."""
    environment = {**os.environ, "HOLDFAST_DATABASE_URL": service.database_url, "HOLDFAST_DATA_DIR": str(service.data)}
    worker = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "holdfast.cli.main", "worker", "--queue", "talk:2"),
        env={**environment, "HOLDFAST_PROCESS_USER": "root"},
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        script = "for n in $(seq 200); do date +%s.%N; sleep 0.05; done"
        job = await store.jobs.submit({"runner": "process", "spec": {"command": ["sh", "-c", script]}, "queue": "talk"})
        reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
        head = f"Host: 127.0.0.1\r\nAuthorization: Bearer {service.admin}\r\nConnection: close\r\n\r\n"
        writer.write(f"GET /v1/jobs/{job.id}/events/stream HTTP/1.1\r\n{head}".encode())
        delays: list[float] = []
        async for line in reader:
            if line.startswith(b"data: ") and b'"type":"log"' in line:
                delays += [time.time() - float(said) for said in json.loads(line[6:])["data"]["lines"]]
        writer.close()
    finally:
        worker.terminate()
        await worker.wait()
    delays.sort()
    p50, p95 = delays[len(delays) // 2], delays[len(delays) * 95 // 100]
    print(
        f"child prints, follower has it: {len(delays)} lines, p50 {p50 * 1000:.0f} ms, p95 {p95 * 1000:.0f} ms; "
        f"target 500 {'ok' if p95 <= 0.5 else 'MISSED'}"
    )


def resident(service: Service) -> int:
    assert service.process is not None
    pages = int(Path(f"/proc/{service.process.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def ticks(service: Service) -> float:
    """CPU seconds of the server so far."""
    assert service.process is not None
    fields = Path(f"/proc/{service.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def installed() -> Iterator[tuple[str, Path]]:
    with cluster(settings=()) as server, tempfile.TemporaryDirectory(prefix="holdfast-bench-") as folder:

        async def prepare() -> None:
            database = await connect(server, connections=1, listen=False)
            await migrate(database)
            await database.close()

        asyncio.run(prepare())
        yield server, Path(folder)


async def measure(service: Service) -> None:
    async with await open_store(service.database_url, listen=False) as store:
        await submits(service)
        await bulks(service, store)
        await end_to_end(service, store)


async def measure_followers(service: Service) -> None:
    async with await open_store(service.database_url, listen=False) as store:
        await followers(service, store)


def main() -> None:
    if sys.argv[1:2] == ["follow"]:
        port, token, job, count = sys.argv[2:]
        asyncio.run(follow(int(port), token, job, int(count)))
        return
    with installed() as (url, folder):
        only = sys.argv[1:]
        print(f"load before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
        with service_process_on(url, folder / "a") as service:
            if only != ["followers"]:
                asyncio.run(measure(service))
        # The second server finds an admin in the database, so it shares the first one's data folder.
        with service_process_on(url, folder / "a") as service:
            asyncio.run(measure_followers(service))


if __name__ == "__main__":
    main()
