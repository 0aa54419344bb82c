"""A demo that runs by itself: what happens to a job when its worker is killed, and more.

Run it with `make demo`. It starts a server and workers of its own in a temporary folder, and ends them.
"""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

from holdfast.client.http import AsyncClient, ServerUnreachable
from holdfast.model import Event, Job, Status

COUNT = "for n in 1 2 3 4 5 6; do echo step $n; sleep 0.5; done"


def say(text: str) -> None:
    sys.stdout.write(f"\n\033[1m{text}\033[0m\n")
    sys.stdout.flush()


def show(text: str) -> None:
    sys.stdout.write(f"    {text}\n")
    sys.stdout.flush()


class Site:
    """A server and its workers, each a process of its own, in a temporary folder."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.env = {**os.environ, "HOLDFAST_DATA_DIR": str(folder), "HOLDFAST_PORT": str(self.port)}
        if os.geteuid() == 0:
            self.env["HOLDFAST_PROCESS_USER"] = "root"
        self.token_file = folder / "admin.token"
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, *arguments: str) -> "subprocess.Popen[bytes]":
        quiet = subprocess.DEVNULL
        command = [sys.executable, "-m", "holdfast.cli.main", *arguments]
        process = subprocess.Popen(command, env=self.env, stdout=quiet, stderr=quiet)
        self._processes.append(process)
        return process

    def stop(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in self._processes:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


async def main() -> None:
    with tempfile.TemporaryDirectory(prefix="holdfast-demo-") as name:
        site = Site(Path(name))
        try:
            await play(site)
        finally:
            site.stop()


async def play(site: Site) -> None:
    began = time.monotonic()
    say("1. A database (SQLite here), a server, and one worker. Each is a process of its own.")
    migrated = site.start("migrate").wait()
    assert migrated == 0
    site.start("serve")
    worker = site.start("worker", "--queue", "default:4")
    token = await written(site.token_file)
    async with AsyncClient(f"http://127.0.0.1:{site.port}", token=token) as client:
        await ready(client)
        await adoption(site, client, worker)
        await cancelling(client)
        await lanes(client)
    say(f"That was all, in {time.monotonic() - began:.0f} seconds. Your jobs outlive your workers.")


async def written(file: Path) -> str:
    """The text of a file that is about to be there."""
    while True:
        try:
            return (await asyncio.to_thread(file.read_text)).strip()
        except FileNotFoundError:
            await asyncio.sleep(0.05)


async def ready(client: AsyncClient) -> None:
    while True:
        try:
            if any(worker.live for worker in await client.workers()):
                return
        except ServerUnreachable:
            pass
        await asyncio.sleep(0.1)


async def adoption(site: Site, client: AsyncClient, worker: "subprocess.Popen[bytes]") -> None:
    say("2. A job that counts to six. We follow its output, and at step 3 we kill -9 its worker.")
    job = await client.submit({"runner": "process", "spec": {"command": ["sh", "-c", COUNT]}})
    async for event in client.follow(job.id):
        tell(event)
        if event.type == "log" and "step 3" in event.data["lines"] and worker.poll() is None:
            worker.kill()
            worker.wait()
            show("--- the worker is dead (kill -9). The job's process is not. Another worker starts. ---")
            site.start("worker", "--queue", "default:4")
    ended = await client.get(job.id)
    expect(ended, Status.SUCCEEDED)
    lines = [line async for line in output(client, job.id)]
    assert lines == [f"step {n}" for n in range(1, 7)], lines
    show(f"one attempt ({ended.attempts}), every line once: adopted, not repeated")


async def cancelling(client: AsyncClient) -> None:
    say("3. A job that would run for an hour, and ignores polite signals. We cancel it.")
    command = ["sh", "-c", "trap '' TERM; echo up; sleep 3600"]
    job = await client.submit({"runner": "process", "spec": {"command": command}, "stop_grace": 1})
    async for event in client.follow(job.id):
        tell(event)
        if event.type == "log":
            await client.cancel(job.id, reason="enough")
    expect(await client.get(job.id), Status.CANCELLED)


async def lanes(client: AsyncClient) -> None:
    say("4. A lane: two jobs in order. The first fails, so the second waits, until a person resolves the first.")
    first = await client.submit({"runner": "process", "spec": {"command": ["false"]}, "lane": "customer-7"})
    second = await client.submit({"runner": "process", "spec": {"command": ["echo", "my turn"]}, "lane": "customer-7"})
    expect(await client.wait(first.id), Status.FAILED)
    show(f"first: failed; second: {(await client.get(second.id)).status}, because:")
    for reason in (await client.explain(second.id)).reasons:
        show(f"  {reason.message}")
    await client.resolve(first.id, {"done": "by hand"}, reason="taken care of")
    expect(await client.wait(second.id), Status.SUCCEEDED)
    show("first: resolved by a person; second: succeeded")


async def output(client: AsyncClient, job_id: str) -> AsyncIterator[str]:
    events, _ = await client.events(job_id)
    for event in events:
        for line in event.data["lines"] if event.type == "log" else ():
            yield line


def tell(event: Event) -> None:
    if event.type == "log":
        for line in event.data["lines"]:
            show(line)
    elif event.type in ("lease", "cancel"):
        show(f"[{event.type}: {event.data[event.type]}]")


def expect(job: Job, status: Status) -> None:
    assert job.status is status, f"{job.id} is {job.status}: {job.error}"


if __name__ == "__main__":
    asyncio.run(main())
