"""How a worker claims jobs: which tenants have work, how much each of them gets, and where the scan of a line starts.

A line is the claimable jobs of one tenant for one (queue, capability) pair. Tenants rotate: a claim starts after the
tenant that was served last, and each tenant with work gets an equal share of the slots. While only one tenant has work,
a claim is one statement: `take`, which checks that no other tenant appeared. Otherwise `tenants_with_work` precedes it.
"""

import time
from collections.abc import AsyncIterator, Mapping, Sequence

import msgspec

from holdfast.model import FUNCTION_DOMAIN, Claimable, Lease
from holdfast.store.database import Database, Row, Tx
from holdfast.store.notify import Notifications

SPARE_TENANTS = 8
"""Tenants listed beyond the number of slots, because other workers may claim the same jobs."""
SLACK_SECONDS = 0.5
"""How far before the last claimed job a scan starts when the line was empty: accepted first, committed later."""
RESCAN_SECONDS = 1.0
RESCAN_COST = 20.0
MAX_RESCAN_SECONDS = 5.0
"""A line is scanned from its start after RESCAN_SECONDS, or later if that scan takes more than 1/RESCAN_COST of it."""


class _Position(msgspec.Struct, frozen=True):
    """A job claimed before, after which (less `slack` seconds) the next scan of its line starts."""

    after_id: str
    slack: float
    valid_until: float
    returns: int


class _Rotation(msgspec.Struct):
    """What the next claim of a worker from a set of queues has to know about the last one."""

    last_tenant: str = ""
    alone: bool = False
    """Whether no other tenant had work."""
    positions: dict[tuple[str, str], _Position] = {}
    """Where the scans of the last tenant's lines start, by (queue, capability)."""


class _Line(msgspec.Struct, frozen=True):
    """One row of the table parameter of `take`."""

    n: int
    tenant_n: int
    tenant: str
    queue: str
    capability: str
    domain: str
    share: int
    merge: bool
    after_id: str | None
    slack: float


class Claims:
    """The claims through one store. It remembers, per worker and set of queues, whose turn is next."""

    def __init__(self, database: Database, notifications: Notifications) -> None:
        self._database = database
        self._notifications = notifications
        self._rotations: dict[str, _Rotation] = {}

    async def claim(
        self, worker: str, pairs: Sequence[Claimable], slots: int, ttl: float, *, tx: Tx | None = None
    ) -> AsyncIterator[Sequence[Lease]]:
        """Claim until the slots are full or no job is left. Yield what each statement returned.

        `tx` holds the lock of a queue with a cap; without it, queues with a cap are left out.
        """
        if slots <= 0 or not pairs:
            return
        rotation = self._rotations.setdefault(_key(worker, pairs), _Rotation())
        emptied = False
        if rotation.alone:
            lines = self._lines(rotation, {rotation.last_tenant: pairs}, slots)
            leases, emptied = await self._take(rotation, lines, worker, slots, ttl, tx, alone=True)
            yield leases
            slots -= len(leases)
            if leases and emptied:
                return
        while slots > 0:
            tenants = await self._tenants(rotation, pairs, slots + SPARE_TENANTS, tx)
            rotation.alone = not tenants and bool(rotation.last_tenant)
            if rotation.alone and not emptied:
                tenants = {rotation.last_tenant: pairs}
            if not tenants:
                return
            lines = self._lines(rotation, tenants, slots)
            leases, emptied = await self._take(rotation, lines, worker, slots, ttl, tx, alone=False)
            yield leases
            slots -= len(leases)
            if emptied and (rotation.alone or not leases):
                return

    async def _tenants(
        self, rotation: _Rotation, pairs: Sequence[Claimable], limit: int, tx: Tx | None
    ) -> Mapping[str, Sequence[Claimable]]:
        """Return the tenants with work, in the order of the rotation, each with the pairs that have work.

        The result is empty if at most the last tenant has work.
        """
        parameters = {
            "pairs": [{"queue": pair.queue, "capability": pair.capability} for pair in pairs],
            "last_tenant": rotation.last_tenant,
            "limit": limit,
            "capped": tx is not None,
        }
        read = self._database.read if tx is None else tx.rows
        rows: Sequence[Row] = await read("tenants_with_work", **parameters)
        by_key = {(pair.queue, pair.capability): pair for pair in pairs}
        tenants: dict[str, list[Claimable]] = {}
        for row in sorted(rows, key=lambda row: (row["rotation"], row["tenant"])):
            tenants.setdefault(row["tenant"], []).append(by_key[row["queue"], row["capability"]])
        return dict(list(tenants.items())[:limit])

    def _lines(self, rotation: _Rotation, tenants: Mapping[str, Sequence[Claimable]], slots: int) -> list[_Line]:
        """Return the lines to take from. Each tenant gets an equal share of the slots, rounded up."""
        share = -(-slots // min(len(tenants), slots))
        lines: list[_Line] = []
        for tenant_n, (tenant, own) in enumerate(tenants.items()):
            for pair in own:
                position = self._position(rotation, tenant, pair)
                lines.append(
                    _Line(
                        n=len(lines),
                        tenant_n=tenant_n,
                        tenant=tenant,
                        queue=pair.queue,
                        capability=pair.capability,
                        domain=pair.domain,
                        share=share,
                        merge=len(own) > 1,
                        after_id=position.after_id if position else None,
                        slack=position.slack if position else 0.0,
                    )
                )
        return lines

    def _position(self, rotation: _Rotation, tenant: str, pair: Claimable) -> _Position | None:
        position = rotation.positions.get((pair.queue, pair.capability)) if tenant == rotation.last_tenant else None
        if position is None or position.returns != self._notifications.returns:
            return None
        return position if time.monotonic() < position.valid_until else None

    async def _take(
        self,
        rotation: _Rotation,
        lines: Sequence[_Line],
        worker: str,
        slots: int,
        ttl: float,
        tx: Tx | None,
        *,
        alone: bool,
    ) -> tuple[Sequence[Lease], bool]:
        """Claim from these lines. Return the leases, and whether the lines are now empty.

        A scan that started right after a claimed job may have missed jobs before it, so it does not show that.
        """
        returns = self._notifications.returns
        began = time.monotonic()
        values = self._database.values if tx is None else tx.values
        leases = await values(
            "take",
            Lease,
            worker=worker,
            lines=lines,
            slots=slots,
            ttl=ttl,
            function=FUNCTION_DOMAIN,
            capped=tx is not None,
            alone=alone,
        )
        full = len(leases) >= slots
        exact = any(line.after_id is not None and not line.slack for line in lines)
        self._remember(rotation, lines, leases, slack=0.0 if full else SLACK_SECONDS, began=began, returns=returns)
        if tx is not None or (not full and (exact or not self._notifications.heard)):
            # A transaction may still fail, and the next claim would skip its jobs. A position after the last job of an
            # empty line needs notifications: only they tell that another process put an older job back.
            rotation.positions = {}
        return leases, not full and not exact

    def _remember(
        self,
        rotation: _Rotation,
        lines: Sequence[_Line],
        leases: Sequence[Lease],
        *,
        slack: float,
        began: float,
        returns: int,
    ) -> None:
        """Record which tenant was served last, and where the next scans of its lines start.

        After a full claim a scan starts after its last job: a backlog is left, and is read in order. If the lines were
        emptied, it starts a little earlier. Scans from the start keep their times.
        """
        if not leases:
            return
        served = {lease.tenant for lease in leases}
        last_tenant = [line.tenant for line in lines if line.tenant in served][-1]
        known = rotation.positions if last_tenant == rotation.last_tenant else {}
        last_ids = {(lease.queue, lease.capability): lease.id for lease in leases if lease.tenant == last_tenant}
        now = time.monotonic()
        rescan_at = now + min(max(RESCAN_SECONDS, RESCAN_COST * (now - began)), MAX_RESCAN_SECONDS)
        positions: dict[tuple[str, str], _Position] = {}
        for line in lines:
            key = (line.queue, line.capability)
            before = known.get(key)
            after_id = last_ids.get(key, before.after_id if before else None)
            if line.tenant == last_tenant and after_id is not None:
                valid_until = before.valid_until if before and line.after_id is not None else rescan_at
                positions[key] = _Position(after_id, slack, valid_until, returns)
        rotation.last_tenant = last_tenant
        rotation.positions = positions


def _key(worker: str, pairs: Sequence[Claimable]) -> str:
    """Return the key of a rotation: a worker that claims queue by queue keeps one rotation per queue."""
    return "\n".join([worker, *sorted({pair.queue for pair in pairs})])
