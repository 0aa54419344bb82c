"""Being somebody without root's rights, for tests that run as root: what is forbidden to others is not to root."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from tests.support.supervisor_harness import NOBODY

MEEK = ("setpriv", "--bounding-set=-dac_override,-dac_read_search")
"""Starts a program as root who may read and write only what modes allow."""


@contextmanager
def as_nobody() -> Iterator[None]:
    os.setegid(NOBODY)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
