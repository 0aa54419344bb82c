"""Gives freed memory back to the system. Every process does so for itself, whoever leads.

The C library keeps what was freed between two things that are still used, so a server that answers bursts of requests
grows with each burst that is larger than all before it, though it needs no more than at its start.
"""

import asyncio
import ctypes
from collections.abc import Callable

EVERY = 30.0


async def run_once() -> None:
    """Give back whole pages that nothing is on: less than a millisecond, mostly."""
    if _trim is not None:
        await asyncio.to_thread(_trim, 0)


def _found() -> Callable[[int], int] | None:
    """The C library's own call for it; only glibc has it."""
    try:
        found: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None
    return found


_trim = _found()
