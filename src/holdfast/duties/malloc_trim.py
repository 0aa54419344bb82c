"""Returns freed memory to the system. Every process does this for itself, leader or not.

The C library keeps freed memory that lies between allocations still in use, so a server grows with each burst of
requests that is larger than all before it, although it needs no more memory than at its start.
"""

import asyncio
import ctypes
from collections.abc import Callable

EVERY = 30.0


async def run_once() -> None:
    """Release free pages; this usually takes less than a millisecond."""
    if _trim is not None:
        await asyncio.to_thread(_trim, 0)


def _find_malloc_trim() -> Callable[[int], int] | None:
    """Return `malloc_trim` of the C library; only glibc has it."""
    try:
        found: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None
    return found


_trim = _find_malloc_trim()
