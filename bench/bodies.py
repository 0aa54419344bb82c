"""What one large request costs a server: how long others wait meanwhile, and how much its memory grows.

Each body is sent to a fresh `holdfast serve`, on SQLite and on Postgres, on the loopback, while another connection asks
for `/healthz` every 10 ms, also for two seconds before it, which shows what the machine's other work does. Wanted:
nobody waits over 200 ms, and the server grows by 150 MB at most. A longer wait is measured again, up to three times in
all, and the shortest counts: other work lengthens waits and shortens none. Growth is not measured again.
"""

import asyncio
import json
import sys
import tempfile
import time
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from tests.support.service import Service, service_process_on

from bench.installation import empty_databases, load

MOST_WAIT = 0.2
MOST_GROWTH = 150 * 10**6
HEAD = f"{'body':<24} {'MB':>5} {'status':>6} {'seconds':>8} {'idle wait':>11} {'others wait':>12} {'growth':>8}"
STORES = ("sqlite", "postgres")
TRIES = 3
IDLE_SECONDS = 2.0
LIMIT = 16 * 1024 * 1024
JOB: dict[str, Any] = {"runner": "function", "spec": {"name": "f"}}


def largest_legal() -> bytes:
    """10,000 jobs that together are just below the limit."""
    inputs = {"text": "x" * (LIMIT // 10_000 - 150), "rows": [1, 2, 3]}
    return _bulk([{**JOB, "inputs": inputs} for _ in range(10_000)])


def many_values() -> bytes:
    """Jobs with as many small values as are accepted, in objects of their own."""
    inputs = {"rows": [{"a": n} for n in range(8)]}
    return _bulk([{**JOB, "inputs": inputs, "labels": {"a": "b"}} for _ in range(10_000)])


def text_full_of_commas() -> bytes:
    """Few values, in long texts that look like many."""
    return _bulk([{**JOB, "inputs": {"csv": "a,[{" * 250_000}} for _ in range(16)])


def last_job_is_wrong() -> bytes:
    jobs = [{**JOB, "inputs": {"text": "x" * 1500}} for _ in range(9_999)]
    return _bulk([*jobs, {**JOB, "priority": "high"}])


def last_id_is_used_twice() -> bytes:
    jobs = [{**JOB, "id": str(uuid.uuid4())} for _ in range(9_999)]
    return _bulk([*jobs, jobs[-1]])


def too_many_jobs() -> bytes:
    return _filled(b'{"jobs":[', b"{},", b"{}]}")


def too_many_lists() -> bytes:
    return _filled(b'{"runner":"function","spec":{"name":"f"},"inputs":{"a":[', b"[],", b"[]]}}")


def too_many_objects() -> bytes:
    return _filled(b'{"jobs":[', b'{"a":1},', b"{}]}")


def too_many_texts() -> bytes:
    return _filled(b'{"jobs":["', b'","ab', b'"]}')


def brackets() -> bytes:
    return b"[" * LIMIT


BODIES: tuple[Callable[[], bytes], ...] = (
    largest_legal, many_values, text_full_of_commas, last_job_is_wrong, last_id_is_used_twice,
    too_many_jobs, too_many_lists, too_many_objects, too_many_texts, brackets,
)  # fmt: skip


def _bulk(jobs: list[dict[str, Any]]) -> bytes:
    return json.dumps({"jobs": jobs}, separators=(",", ":")).encode()


def _filled(start: bytes, part: bytes, end: bytes) -> bytes:
    return start + part * ((LIMIT - len(start) - len(end)) // len(part)) + end


def _peak(pid: int) -> int:
    """The most memory that a process had resident since `_reset`."""
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.partition("VmHWM:")[2].split()[0]) * 1024


def _reset(pid: int) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5")


async def _longest_wait(service: Service, stop: asyncio.Event) -> float:
    longest = 0.0
    async with service.client() as client:
        while not stop.is_set():
            began = time.perf_counter()
            await client.get("/healthz")
            longest = max(longest, time.perf_counter() - began)
            await asyncio.sleep(0.01)
    return longest


async def measure(body: bytes, url: str) -> tuple[int, float, float, float, int]:
    """Send a body; return the status, its seconds, the longest wait of others before and meanwhile, and the growth."""
    with (
        tempfile.TemporaryDirectory(prefix="holdfast-bench-") as folder,
        service_process_on(url, Path(folder)) as service,
    ):
        assert service.process is not None
        async with service.client() as client:
            await client.post("/v1/jobs/bulk", json={"jobs": [JOB]})
            stop = asyncio.Event()
            idle = asyncio.create_task(_longest_wait(service, stop))
            await asyncio.sleep(IDLE_SECONDS)
            stop.set()
            before_it = await idle
            stop.clear()
            waits = asyncio.create_task(_longest_wait(service, stop))
            _reset(service.process.pid)
            before = _peak(service.process.pid)
            began = time.perf_counter()
            path = "/v1/jobs/bulk" if body.startswith(b'{"jobs"') else "/v1/jobs"
            answer = await client.post(path, content=body, headers={"Content-Type": "application/json"}, timeout=120)
            took = time.perf_counter() - began
            await asyncio.sleep(0.2)
            stop.set()
            return answer.status_code, took, before_it, await waits, _peak(service.process.pid) - before


async def main(names: list[str]) -> bool:
    stores = [name for name in names if name in STORES] or list(STORES)
    bodies = [make for make in BODIES if make.__name__ in names] or list(BODIES)
    good = True
    async with empty_databases(stores) as new:
        for store in stores:
            print(f"{store}, {load()}")
            print(HEAD)
            for make in bodies:
                good = await _fine(make, store, new) and good
    return good


async def _fine(make: Callable[[], bytes], store: str, new: Callable[[str], Awaitable[str]]) -> bool:
    body = make()
    for left in reversed(range(TRIES)):
        status, took, idle, wait, growth = await measure(body, await new(store))
        within = growth <= MOST_GROWTH and status < 500
        fine = within and wait <= MOST_WAIT
        again = within and not fine and left > 0
        verdict = "" if fine else "  over the limit, once more" if again else "  over the limit"
        print(
            f"{make.__name__:<24} {len(body) / 1e6:5.1f} {status:>6} {took:8.2f} {idle * 1e3:8.0f} ms"
            f" {wait * 1e3:9.0f} ms {growth / 1e6:5.0f} MB{verdict}",
            flush=True,
        )
        if not again:
            break
    return fine


if __name__ == "__main__":
    sys.exit(0 if asyncio.run(main(sys.argv[1:])) else 1)
