"""Workers that share an engine start containers in turns, whatever becomes of those whose turn it is."""

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
    await asyncio.sleep(600)

asyncio.run(main())
"""


@contextmanager
def holder(folder: Path) -> "Iterator[subprocess.Popen[str]]":
    """Another worker, whose turn it is."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(folder)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "mine\n"
        yield process
    finally:
        process.kill()
        process.communicate()


@asynccontextmanager
async def waiting(turns: StartSlots) -> "AsyncIterator[asyncio.Task[StartSlot]]":
    """One who wants a turn, and has looked for it."""
    task = asyncio.ensure_future(turns.take())
    await asyncio.wait([task], timeout=0.2)
    try:
        yield task
    finally:
        task.cancel()


async def test_another_worker_waits_until_the_turn_ends(tmp_path: Path) -> None:
    one, other = StartSlots(tmp_path, "engine", 2), StartSlots(tmp_path, "engine", 2)
    first, second = await one.take(), await one.take()
    async with waiting(other) as third:
        assert not third.done()
        first.release()
        first.release()
        (await third).release()
    second.release()
    async with waiting(one), waiting(other) as last:
        assert last.done()


async def test_the_turn_of_a_worker_that_is_killed_is_over(tmp_path: Path) -> None:
    with holder(tmp_path) as process:
        async with waiting(StartSlots(tmp_path, "engine", 1)) as turn:
            assert not turn.done()
            process.kill()
            async with asyncio.timeout(30):
                (await turn).release()


async def test_a_worker_that_is_stopped_keeps_nobody_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


async def test_without_files_the_turns_of_one_worker_are_kept(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    mine = StartSlots(tmp_path / "file", "engine", 1)
    turn = await mine.take()
    async with waiting(mine) as next_:
        assert not next_.done()
        turn.release()
        async with asyncio.timeout(30):
            (await next_).release()


async def test_who_gives_up_waiting_takes_no_turn_along(tmp_path: Path) -> None:
    mine, other = StartSlots(tmp_path, "engine", 1), StartSlots(tmp_path, "engine", 1)
    turn = await other.take()
    async with waiting(mine) as first:
        first.cancel()
        await asyncio.wait([first])
        turn.release()
        async with asyncio.timeout(30):
            (await mine.take()).release()


async def test_engines_do_not_wait_for_each_other(tmp_path: Path) -> None:
    turn = await StartSlots(tmp_path, "one", 1).take()
    async with asyncio.timeout(30):
        (await StartSlots(tmp_path, "another", 1).take()).release()
    turn.release()
