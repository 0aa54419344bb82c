"""Processes whose clock is wrong, by Debian's faketime."""

import os
import select
import time
from collections.abc import Mapping
from pathlib import Path
from typing import SupportsIndex

LIBRARY = next(iter(Path("/usr/lib").glob("*/faketime/libfaketime.so.1")), None)
SHARED = Path("/dev/shm")


def shifted(shift: str) -> Mapping[str, str]:
    """Return the environment of a process whose wall clock is off, as by "+6h"; how time passes stays true.

    What killed ones left in shared memory goes first: it is named by their process ids, and faketime refuses to start
    under an id that is taken.
    """
    if LIBRARY is None:
        raise FileNotFoundError("libfaketime is missing: install Debian's faketime")
    for path in SHARED.glob("*faketime_*_*"):
        pid = path.name.rpartition("_")[2]
        if pid.isdigit() and not _lives(int(pid)):
            path.unlink(missing_ok=True)
    return {"LD_PRELOAD": str(LIBRARY), "FAKETIME": shift, "FAKETIME_DONT_FAKE_MONOTONIC": "1"}


def sleep_truly() -> None:
    """Let `time.sleep` work in a process whose clock is off: by the call that it uses, faketime 0.9.10 always fails."""

    def sleep(seconds: float | SupportsIndex) -> None:
        select.select([], [], [], float(seconds))

    if "FAKETIME" in os.environ:
        time.sleep = sleep


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
