"""Start slots: workers that share an engine start a limited number of containers at a time, also after crashes."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from holdfast.runner.docker import start_slots
from holdfast.runner.docker.start_slots import StartSlot, StartSlots

HOLDER = """
import asyncio, sys
from pathlib import Path
from holdfast.runner.docker.start_slots import StartSlots

async def main():
    turn = await StartSlots(Path(sys.argv[1]), "engine", 1).take()
    print("mine", flush=True)
    await asyncio.sleep(600)  # Reason: it holds the slot until the test kills it.

asyncio.run(main())
"""


@contextmanager
def holder(folder: Path) -> "Iterator[subprocess.Popen[str]]":
    """Run another worker that holds the slot."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(folder)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "mine\n"
        yield process
    finally:
        process.kill()
        process.communicate()


@asynccontextmanager
async def waiting(slots: StartSlots) -> "AsyncIterator[asyncio.Task[StartSlot]]":
    """Start a task that waits for a slot."""
    task = asyncio.ensure_future(slots.take())
    await asyncio.wait([task], timeout=0.2)  # Reason: time in which it would wrongly get one.
    try:
        yield task
    finally:
        task.cancel()


async def test_another_worker_waits_until_a_slot_is_released(tmp_path: Path) -> None:
    one, other = StartSlots(tmp_path, "engine", 2), StartSlots(tmp_path, "engine", 2)
    first, second = await one.take(), await one.take()
    async with waiting(other) as third:
        assert not third.done()
        first.release()
        first.release()
        (await third).release()
    second.release()
    async with asyncio.timeout(30), waiting(one), waiting(other) as last:
        await last


async def test_slot_of_a_killed_worker_is_released(tmp_path: Path) -> None:
    with holder(tmp_path) as process:
        async with waiting(StartSlots(tmp_path, "engine", 1)) as slot:
            assert not slot.done()
            process.kill()
            async with asyncio.timeout(30):
                (await slot).release()


async def test_stopped_worker_blocks_a_slot_only_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_slots, "LONGEST", 0.5)
    with holder(tmp_path) as process:
        os.kill(process.pid, signal.SIGSTOP)
        async with asyncio.timeout(30):
            first = await StartSlots(tmp_path, "engine", 1).take()
        monkeypatch.setattr(start_slots, "LONGEST", 600.0)
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait()
        async with waiting(StartSlots(tmp_path, "engine", 1)) as second:
            assert not second.done()  # What was taken from the stopped one is as good as any.
            first.release()
            async with asyncio.timeout(30):
                (await second).release()


async def test_slots_of_one_worker_hold_without_lock_files(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    mine = StartSlots(tmp_path / "file", "engine", 1)
    slot = await mine.take()
    async with waiting(mine) as next_:
        assert not next_.done()
        slot.release()
        async with asyncio.timeout(30):
            (await next_).release()


async def test_cancelled_wait_takes_no_slot(tmp_path: Path) -> None:
    mine, other = StartSlots(tmp_path, "engine", 1), StartSlots(tmp_path, "engine", 1)
    slot = await other.take()
    async with waiting(mine) as first:
        first.cancel()
        await asyncio.wait([first])
        slot.release()
        async with asyncio.timeout(30):
            (await mine.take()).release()


async def test_slots_of_different_engines_are_independent(tmp_path: Path) -> None:
    slot = await StartSlots(tmp_path, "one", 1).take()
    async with asyncio.timeout(30):
        (await StartSlots(tmp_path, "another", 1).take()).release()
    slot.release()
