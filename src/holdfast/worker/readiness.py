"""Readiness: before a job starts, the checks of its lane and of its tool must succeed, each within its time."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable

from holdfast.model import Check, Lease
from holdfast.runner.process import PATH
from holdfast.store import Store
from holdfast.worker.completer import retried

PAUSE = 0.5
TAIL = 500


class Unready(Exception):
    """The check did not succeed in time; the text says how it went."""


async def make_ready(store: Store, lease: Lease, *, until: Callable[[], bool]) -> None:
    """Run a job's checks until they succeed; raise Unready when the time of one is over. `until` ends it early."""
    lane = lease.lane
    if lane is not None:
        check = await retried(lambda: store.lanes.check_of(lease.tenant, lane), "a look at the lane")
        if check is not None:
            await _succeed(check, f"lane {lane}", until)
    if lease.policy.check is not None:
        await _succeed(lease.policy.check, lease.kind, until)


async def _succeed(check: Check, what: str, until: Callable[[], bool]) -> None:
    reason = "it did not answer"
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(check.timeout):
            while not until():
                code, text = await _run(check.command, until)
                if code == 0:
                    return
                reason = f"exit code {code}{': ' + text if text else ''}"
                await asyncio.sleep(PAUSE)
            return
    raise Unready(f"{what} was not ready within {check.timeout:g} seconds: {check.command[0]}: {reason}")


async def _run(command: tuple[str, ...], until: Callable[[], bool]) -> tuple[int, str]:
    """Run a check once; it is killed when its time is over."""
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            env={"PATH": PATH, "LANG": "C.UTF-8"},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        return 127, f"{error.strerror}"
    reading = asyncio.ensure_future(process.communicate())
    try:
        while not reading.done() and not until():
            await asyncio.wait([reading], timeout=0.2)
        if not reading.done():
            return 130, "no longer wanted"
        output, _ = reading.result()
        return process.returncode or 0, output.decode("utf-8", "replace").strip()[-TAIL:]
    finally:
        if not reading.done():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            reading.cancel()
            with contextlib.suppress(asyncio.CancelledError, TimeoutError):
                await asyncio.wait_for(process.wait(), 1.0)
