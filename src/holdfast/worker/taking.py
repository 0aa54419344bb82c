"""What a child left: its report, its result, its artifacts."""

import asyncio
import logging
from typing import Any

import msgspec

from holdfast.errors import Invalid, SharedFolderAway
from holdfast.model import Cause, Lease, NewEvent
from holdfast.runner.base import End, Running
from holdfast.runner.outputs import Gathered, Limits, Violation
from holdfast.runner.secrets import Mask
from holdfast.store.outcomes import encoded_result as check_result
from holdfast.worker.classify import broken, reported
from holdfast.worker.desk import Desk
from holdfast.worker.journal import Journal
from holdfast.worker.lease import Lost
from holdfast.worker.recent import recent_events

log = logging.getLogger(__name__)


class OutputsWait(Exception):
    """What the child left is there, but cannot be put where it belongs: a full disk, a folder that is away."""


async def take_outputs(desk: Desk, lease: Lease, running: Running, end: End, mask: Mask, journal: Journal) -> End:
    """Take what it left. Links and special files are skipped, with an event that names them.

    Whatever else breaks the contract makes a success a failure, and nothing is taken.
    """
    if end.cause in (Cause.LOST, Cause.START_FAILED):
        return end
    limits = Limits(bytes=desk.settings.artifact_max_bytes)
    gathered = desk.artifacts.gather(lease.id, lease.attempt, lease.token, limits)
    try:
        await running.outputs(gathered)
        end = reported(end, gathered.report, mask, required=bool(lease.spec.get("require_result")))
        check_result(end.result)
        if not gathered.empty:
            await asyncio.to_thread(gathered.publish)
            desk.at("gathered", lease)
        await _report_skipped(desk, lease, gathered, mask, journal)
    except (Violation, Invalid) as violation:
        log.warning("job %s attempt %d breaks the contract: %s", lease.id, lease.attempt, violation)
        return end if end.cause is not Cause.EXIT or end.exit_code != 0 else broken(end, str(violation))
    except SharedFolderAway as error:
        raise OutputsWait(f"its output cannot be kept yet: {error.message}") from error
    except OSError as error:
        raise OutputsWait(f"its output cannot be kept yet: {error.strerror}") from error
    finally:
        if not gathered.empty:
            await asyncio.to_thread(gathered.discard)
    return end


async def _report_skipped(desk: Desk, lease: Lease, gathered: Gathered, mask: Mask, journal: Journal) -> None:
    """Name the skipped entries in the job's events, once per attempt: a predecessor may have done so before it died."""
    if not gathered.skipped:
        return
    data: dict[str, Any] = {"skipped": [mask.data(msgspec.to_builtins(entry)) for entry in gathered.skipped]}
    if gathered.unnamed:
        data["more"] = gathered.unnamed
    if lease.adopted:
        known = [event.data for event in await recent_events(desk.store, lease) if event.type == "artifacts"]
        if data in known:
            return
    journal.add(NewEvent(type="artifacts", data=data))
    if not await journal.flush():
        raise Lost
