"""What a child left: its report, its result, its artifacts."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from holdfast.errors import Invalid
from holdfast.model import Cause, Lease
from holdfast.runner.base import End
from holdfast.runner.outputs import Gathered, Limits, Violation
from holdfast.runner.secrets import Mask
from holdfast.store.outcomes import encoded_result as check_result
from holdfast.worker.classify import broken, reported
from holdfast.worker.desk import Desk

log = logging.getLogger(__name__)


Collect = Callable[[Gathered], Awaitable[None]]
"""Gathers what an attempt left, wherever that is."""


class OutputsWait(Exception):
    """What the child left is there, but cannot be put where it belongs: a full disk, a folder that is away."""


async def take_outputs(desk: Desk, lease: Lease, collect: Collect, end: End, mask: Mask) -> End:
    """Take what it left. What breaks the contract is not taken, and makes a success a failure."""
    if end.cause in (Cause.LOST, Cause.START_FAILED):
        return end
    limits = Limits(bytes=desk.settings.artifact_max_bytes)
    gathered = desk.artifacts.gather(lease.id, lease.attempt, lease.token, limits)
    try:
        await collect(gathered)
        end = reported(end, gathered.report, mask, required=bool(lease.spec.get("require_result")))
        check_result(end.result)
        if not gathered.empty:
            await asyncio.to_thread(gathered.publish)
            desk.at("gathered", lease)
    except (Violation, Invalid) as violation:
        log.warning("job %s attempt %d breaks the contract: %s", lease.id, lease.attempt, violation)
        return end if end.cause is not Cause.EXIT or end.exit_code != 0 else broken(end)
    except OSError as error:
        raise OutputsWait(f"its output cannot be kept yet: {error.strerror}") from error
    finally:
        if not gathered.empty:
            await asyncio.to_thread(gathered.discard)
    return end
