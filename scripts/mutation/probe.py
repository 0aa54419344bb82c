"""Runs inside a measured tree: note which test executes which block or statement.

Also in the processes that a test starts, which inherit PYTEST_CURRENT_TEST. Notes are written at once, because such a
process may be killed. This file is copied to where every module of the tree can import it: it imports nothing of ours.
"""

import contextlib
import os
from typing import TypeVar

T = TypeVar("T")
_seen: set[tuple[str, str]] = set()


def hit(unit: str, value: T) -> T:
    """Note that a unit is executed, and return the value."""
    test = os.environ.get("PYTEST_CURRENT_TEST", "")
    if (test, unit) not in _seen:
        _seen.add((test, unit))
        with contextlib.suppress(OSError, KeyError):
            file = os.open(os.environ["MUTATION_HITS"], os.O_WRONLY | os.O_APPEND)
            try:
                os.write(file, f"{test.rpartition(' ')[0]}\t{unit}\n".encode())
            finally:
                os.close(file)
    return value
