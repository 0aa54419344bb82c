"""Collects the outputs of an ended attempt: its report (`result.json`), its result and its artifacts."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from holdfast.errors import DiskFull, Invalid, StorageUnavailable
from holdfast.model import Cause, Lease, NewEvent
from holdfast.runner.base import AttemptEnd
from holdfast.runner.collected_outputs import ArtifactLimits, CollectedOutputs, ContractViolation
from holdfast.runner.secrets import Mask
from holdfast.store.outcomes import encoded_result as check_result
from holdfast.worker.classify import broken, reported
from holdfast.worker.event_writer import EventWriter
from holdfast.worker.execution_services import ExecutionServices
from holdfast.worker.held_leases import LeaseLost
from holdfast.worker.limit_checks import FOLDER_TOO_LARGE
from holdfast.worker.recent_events import recent_events

log = logging.getLogger(__name__)


CollectOutputs = Callable[[CollectedOutputs], Awaitable[None]]
"""Collects the outputs of an attempt, wherever they are."""


class OutputsNotStored(Exception):
    """The outputs exist but cannot be stored now: the disk is full, or the storage is unavailable."""


async def collect_outputs(
    services: ExecutionServices,
    lease: Lease,
    collect: CollectOutputs,
    end: AttemptEnd,
    mask: Mask,
    event_writer: EventWriter,
) -> AttemptEnd:
    """Collect the outputs. Links and special files are skipped, and an event names them.

    Any other contract violation turns a success into a failure, and nothing is stored.
    """
    if end.cause in (Cause.LOST, Cause.START_FAILED):
        return end
    if end.error is not None and end.error.code == FOLDER_TOO_LARGE:  # A copy of the folder would be too large as well.
        return end
    limits = ArtifactLimits(bytes=services.settings.artifact_max_bytes)
    collected = CollectedOutputs(services.artifacts.writer(lease.id, lease.attempt, lease.token), limits)
    try:
        await collect(collected)
        end = reported(end, collected.report, mask, required=bool(lease.spec.get("require_result")))
        check_result(end.result)
        if not collected.empty:
            await asyncio.to_thread(collected.publish)
            services.at("gathered", lease)
        await _report_skipped(services, lease, collected, mask, event_writer)
    except (ContractViolation, Invalid) as violation:
        log.warning(
            "job %s attempt %d: its outputs break the contract and are not stored: %s",
            lease.id,
            lease.attempt,
            violation,
        )
        return end if end.cause is not Cause.EXIT or end.exit_code != 0 else broken(end, str(violation))
    except (StorageUnavailable, DiskFull) as error:
        raise OutputsNotStored(f"its outputs cannot be stored yet: {error.message}") from error
    except OSError as error:
        raise OutputsNotStored(f"its outputs cannot be stored yet: {error.strerror}") from error
    finally:
        if not collected.empty:
            await asyncio.to_thread(collected.discard)
    return end


async def _report_skipped(
    services: ExecutionServices, lease: Lease, collected: CollectedOutputs, mask: Mask, event_writer: EventWriter
) -> None:
    """Name the skipped entries in the job's events, once per attempt: a previous owner may have done so already."""
    if not collected.skipped:
        return
    data: dict[str, Any] = {"skipped": [mask.data(msgspec.to_builtins(entry)) for entry in collected.skipped]}
    if collected.unnamed:
        data["more"] = collected.unnamed
    if lease.adopted:
        known = [event.data for event in await recent_events(services.store, lease) if event.type == "artifacts"]
        if data in known:
            return
    event_writer.add(NewEvent(type="artifacts", data=data))
    if not await event_writer.flush():
        raise LeaseLost
