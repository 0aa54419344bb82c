"""Limits of an attempt: watches the size of its folder, and names the limit that ended an attempt."""

import asyncio
import logging
import re
import signal
import time
from collections.abc import Callable

from holdfast.limits import AttemptLimits, remedy, size_text
from holdfast.model import Cause, Error
from holdfast.runner.base import AttemptEnd, AttemptHandle, EngineUnreachable
from holdfast.runner.folder_size import MOST_DEPTH
from holdfast.timing import jitter

log = logging.getLogger(__name__)

FOLDER_TOO_LARGE, FILE_TOO_LARGE, TOO_MANY_PROCESSES = "folder_too_large", "file_too_large", "too_many_processes"
WATCH_SECONDS = 2.0
"""Seconds between measurements of a folder; more if one takes long."""
FASTEST, LONGEST_SECONDS = 2 * 1024**3, 10.0
"""Bytes per second that no job writes: a folder far below its limit is measured less often, up to this pause."""
SHARE = 20
"""Measuring may take 1/SHARE of the time: a folder with a million files is measured less often."""
NO_MEMORY = re.compile(r"MemoryError|[Cc]annot allocate memory|[Oo]ut of memory|bad_alloc|OutOfMemoryError|ENOMEM")
NO_PROCESS = re.compile(r"fork.*(Resource temporarily unavailable|EAGAIN)|[Cc]an(not|'t) (fork|start new thread)")


async def watch_folder(running: AttemptHandle, limits: AttemptLimits, over: Callable[[Error], None]) -> None:
    """Measure an attempt's folder until it exceeds its limit; then call `over` once."""
    most = limits.folder_size
    if most is None:
        return
    pause = WATCH_SECONDS
    while True:
        await asyncio.sleep(jitter(pause))
        began = time.monotonic()
        try:
            size = await running.size(most)
        except (OSError, EngineUnreachable) as error:
            log.info("cannot measure an attempt's folder, retrying: %s", error)
            continue
        if size is None:
            return
        if size > most:
            over(folder_too_large(most))
            return
        pause = pause_after(size, most, took=time.monotonic() - began)


def pause_after(size: int, most: int, *, took: float) -> float:
    """Return the seconds until the next measurement of a folder: none is needed before it can be over its limit."""
    return max(WATCH_SECONDS, SHARE * took, min(LONGEST_SECONDS, (most - size) / FASTEST))


def folder_too_large(most: int) -> Error:
    message = (
        f"its folder (work, output, log) took more than {size_text(most)}, or was nested deeper than {MOST_DEPTH} "
        f"folders; {remedy('folder_size')}"
    )
    return Error(code=FOLDER_TOO_LARGE, message=message)


def broken_limit(end: AttemptEnd, limits: AttemptLimits) -> Error | None:
    """Return which limit ended an attempt, judging by its end and its last line on stderr."""
    if end.cause is not Cause.EXIT or end.exit_code == 0 or end.error is not None:
        return None
    if limits.file_size is not None and (end.signal == signal.SIGXFSZ or end.exit_code == 128 + signal.SIGXFSZ):
        message = f"it wrote a file of more than {size_text(limits.file_size)}; {remedy('file_size')}"
        return Error(code=FILE_TOO_LARGE, message=_in_task(end, message))
    last = end.last_error or ""
    if limits.memory is not None and NO_MEMORY.search(last):
        message = f"{last}; each of its processes may use {size_text(limits.memory)} of memory; {remedy('memory')}"
        return Error(code="out_of_memory", message=_in_task(end, message))
    if limits.pids is not None and NO_PROCESS.search(last):
        message = f"{last}; it may have {limits.pids} processes and threads; {remedy('pids')}"
        return Error(code=TOO_MANY_PROCESSES, message=_in_task(end, message))
    return None


def _in_task(end: AttemptEnd, message: str) -> str:
    return message if end.task is None else f"task {end.task}: {message}"
