"""Freed memory is returned to the system although live objects are above it in the heap."""

import asyncio
import os
import subprocess
import sys

import pytest

from holdfast.duties import malloc_trim

PAGE = os.sysconf("SC_PAGE_SIZE")


async def let_go() -> int:
    """Allocate, keep one piece in a thousand, and free the others; return by how much the process shrank then."""
    pieces = [bytearray(2000) for _ in range(50_000)]
    kept = pieces[::1000]
    del pieces
    before = resident()
    await malloc_trim.run_once()
    assert len(kept) == 50
    return before - resident()


def resident() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * PAGE


@pytest.mark.skipif(malloc_trim._trim is None, reason="this C library keeps what was freed")
def test_memory_freed_between_live_objects_is_returned() -> None:
    """In a process of its own: nothing else moves its memory."""
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, check=True)
    assert int(done.stdout) > 50_000_000


if __name__ == "__main__":
    sys.stdout.write(str(asyncio.run(let_go())))
