"""Readiness: before a job starts, the checks of its lane and of its tool must succeed, each within its timeout."""

import asyncio
import time
from collections.abc import Callable

from holdfast.errors import one_line
from holdfast.model import Check
from holdfast.registry import runner_named
from holdfast.runner.base import Identity
from holdfast.runner.checks import CheckRequest, CheckResult
from holdfast.runner.secrets import NO_MASK, Mask, find_secrets
from holdfast.worker.batch_writer import with_retries
from holdfast.worker.execution_services import ExecutionServices
from holdfast.worker.held_leases import HeldLease

PAUSE = 0.5
CLEAR_SECONDS = 0.1
TAIL = 500
NAME = 100
"""Characters of the program's name in an error."""


class CheckTimedOut(Exception):
    """A check did not succeed in time; the message gives the last reason."""


async def make_ready(services: ExecutionServices, held: HeldLease, *, until: Callable[[], bool]) -> None:
    """Run a job's checks until they succeed; raise CheckTimedOut when one times out. `until` ends the wait early.

    Raise CannotStart if the job could not be started anyway: a secret or a user is unknown here.
    """
    lease = held.lease
    lane = lease.lane
    found = None
    if lane is not None:
        found = await with_retries(
            lambda: services.store.lanes.check_of(lease.tenant, lane), "reading the check of a lane"
        )
    if found is None and lease.policy.check is None:
        return
    ready = _ReadinessChecks(services, held, until)
    if found is not None:
        await ready.succeed(found, f"lane {lane}", None)  # A lane's check never runs as the job's own user.
    if lease.policy.check is not None:
        user = lease.spec.get("user") if runner_named(lease.runner).host_users else None
        await ready.succeed(lease.policy.check, lease.kind, user)


class _ReadinessChecks:
    """The checks of one attempt."""

    def __init__(self, services: ExecutionServices, held: HeldLease, until: Callable[[], bool]) -> None:
        self._services = services
        self._held = held
        self._until = until
        self._identity = Identity(services.installation, held.lease.id, held.lease.attempt)
        names = held.lease.policy.secrets
        self._mask = Mask(find_secrets(names, services.settings.secrets_dir).values()) if names else NO_MASK
        self._cleared = not held.lease.adopted

    async def succeed(self, check: Check, what: str, user: str | None) -> None:
        """Repeat a check until it succeeds or times out."""
        reason: str | None = None
        deadline = time.monotonic() + check.timeout
        while not self._until() and (left := deadline - time.monotonic()) > 0:
            if not self._held.trusted or not await self._clear():
                await asyncio.sleep(CLEAR_SECONDS)
                continue
            end = await self._run(check, left, user)
            if end.ready:
                return
            if not end.timed_out or reason is None:
                reason = self._describe(end)
            await asyncio.sleep(min(PAUSE, max(0.0, deadline - time.monotonic())))
        if not self._until():
            how = f"{check.command[0][:NAME]}: {reason or 'it did not answer'}"
            raise CheckTimedOut(self._mask.text(f"{what} was not ready within {check.timeout:g} seconds: {how}"))

    async def _clear(self) -> bool:
        """Stop checks that a previous owner of the attempt left running here, before another one starts."""
        self._cleared = self._cleared or await self._services.checks.clear(self._identity)
        return self._cleared

    async def _run(self, check: Check, left: float, user: str | None) -> CheckResult:
        request = CheckRequest(
            identity=self._identity, token=self._held.lease.token, command=check.command, timeout=left, user=user
        )
        return await self._services.checks.run(
            request, trusted_until=lambda: self._held.trusted_until, unwanted=lambda: self._held.lost or self._until()
        )

    def _describe(self, end: CheckResult) -> str:
        """Describe how a run ended: the reason and the end of its output, masked before it is cut."""
        said = []
        for data in (end.stdout, end.stderr):
            # A secret that the cap cut in two cannot be recognised.
            whole = data[: max(0, len(data) - self._mask.longest)] if end.cut and self._mask else data
            said.append(self._mask.mask_bytes(whole).decode("utf-8", "replace").strip())
        text = one_line("\n".join(filter(None, said))[-TAIL:], TAIL)
        return f"{end.reason}: {text}" if text else end.reason
