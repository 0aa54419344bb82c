"""What workers do with leases: claim, adopt, start, beat, append, finish, requeue, hand over; and the reaper.

Every write about a running job takes its `Lease` and is fenced by the lease's token. Each method returns, per job,
whether the write was applied; a lost lease is a return value, not an error.
"""

import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from datetime import datetime
from operator import attrgetter

import msgspec

from holdfast.errors import Invalid, StoreError
from holdfast.model import (
    Beat,
    Cause,
    Claimable,
    HandOverReason,
    HeartbeatReply,
    Lease,
    Outcome,
    Phase,
    Status,
    StopPhase,
    StopRequest,
)
from holdfast.store import notify
from holdfast.store.database import Database, Tx
from holdfast.store.gates import Gates
from holdfast.store.lanes import LaneKey, lock_lanes_and_jobs, settle_lanes
from holdfast.store.orphans import BACKOFF_BASE, BACKOFF_CAP, Orphans
from holdfast.store.outage import level_of
from holdfast.store.outcomes import Ended, Ending, ending, within_budgets
from holdfast.store.queues import Queues
from holdfast.store.rows import STATUSES, to_stop

log = logging.getLogger(__name__)

ADOPT_LIMIT = 1000
LAST_CLAIMED_SECONDS = 1.0
"""How long claims may start their scan after the last claimed job; an earlier job that appears waits at most this."""


class Claimed(msgspec.Struct, frozen=True, kw_only=True):
    """What one claim obtained: adopted orphans and new attempts."""

    adopted: Sequence[Lease]
    claimed: Sequence[Lease]


class Reaped(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    worker: str | None
    attempt: int


class Owners(msgspec.Struct, frozen=True, kw_only=True):
    """How many workers hold leases, how many of those let one expire, and when the last heartbeats arrived."""

    owners: int
    expired: int
    beat_at: datetime | None
    expired_beat_at: datetime | None
    now_at: datetime


class _LastClaimed(msgspec.Struct, frozen=True):
    """The last job claimed for a (queue, capability) pair, and its tenant: where the next claim starts its scan."""

    tenant: str
    after_id: str
    at: float
    returns: int


class Leases(Orphans):
    def __init__(self, database: Database, gates: Gates, queues: Queues, wake_up: notify.Notifications) -> None:
        super().__init__(database, gates, wake_up)
        self._queues = queues
        self._last_tenants: dict[str, str] = {}
        self._last_claimed: dict[tuple[str, str, str], _LastClaimed] = {}
        self._rounds: Counter[str] = Counter()

    async def claim(
        self,
        worker: str,
        pairs: Sequence[Claimable],
        *,
        slots: int,
        ttl: float,
        domains: Sequence[str] = (),
    ) -> Claimed:
        """Adopt the orphans that this worker can reach, which needs no slot; then claim up to `slots` jobs.

        This takes several statements. If the store fails after some of them returned leases, return those leases: this
        worker owns them, and no other worker could run the jobs before they expire.
        """
        _check_ttl(ttl)
        caps = await self._queues.caps() if slots > 0 and pairs else {}
        uncapped = [pair for pair in pairs if pair.queue not in caps]
        capped = sorted({pair.queue for pair in pairs} & set(caps))
        adopted: list[Lease] = []
        claimed: list[Lease] = []
        try:
            for queue in self._rotated(worker, [None, *capped]):
                if queue is None:
                    async for orphans, found in self._claim(worker, uncapped, slots - len(claimed), ttl, domains):
                        adopted += orphans
                        claimed += found
                else:
                    mine = [pair for pair in pairs if pair.queue == queue]
                    claimed += await self._claim_capped(worker, queue, mine, slots - len(claimed), ttl)
        except StoreError as error:
            if not (adopted or claimed):
                raise
            log.log(level_of(error), "claim failed halfway; keeping the leases obtained so far: %s", error)
        self._after_moves.claimed(len(claimed), adopted=len(adopted))
        return Claimed(adopted=sorted(adopted, key=attrgetter("id")), claimed=claimed)

    def _rotated(self, worker: str, groups: list[str | None]) -> list[str | None]:
        """Rotate which capped queue, or group of uncapped ones, goes first, so that none gets only leftover slots."""
        self._rounds[worker] += 1
        first = self._rounds[worker] % len(groups)
        return groups[first:] + groups[:first]

    async def _claim(
        self, worker: str, pairs: Sequence[Claimable], slots: int, ttl: float, domains: Sequence[str]
    ) -> AsyncIterator[tuple[Sequence[Lease], Sequence[Lease]]]:
        """Claim from tenant after tenant until the slots are full or no job is left.

        Yield what each statement adopted and claimed.
        """
        slots = max(slots, 0)
        key = _rotation_key(worker, pairs)
        while True:
            rows = [self._pair_row(key, pair) for pair in pairs]
            leases = await self._database.values(
                "claim", Lease, **_claiming(worker, rows, slots, ttl, domains, capped=False)
            )
            old = sum(lease.adopted for lease in leases)
            new = leases[old:]
            self._remember(key, new, slots=slots)
            yield leases[:old], new
            slots -= len(new)
            resumes = any(row["after_id"] is not None for row in rows)
            if slots <= 0 or not (resumes or len({lease.tenant for lease in new}) > 1):
                return
            if resumes:
                self._clear_last_claimed(key)
            domains = ()

    async def _claim_capped(
        self, worker: str, queue: str, pairs: Sequence[Claimable], slots: int, ttl: float
    ) -> Sequence[Lease]:
        """Lock the queue, count its running jobs, and claim at most as many as its cap still allows."""
        if slots <= 0 or not await self._database.read("claimable_in_queue", queue=queue):
            return []
        key = _rotation_key(worker, pairs)

        async def change(tx: Tx) -> Sequence[Lease]:
            locked = await tx.rows("lock_queue", queue=queue)
            (running,) = await tx.rows("running_in_queue", queue=queue)
            cap = locked[0]["cap"] if locked else None
            free = slots if cap is None else min(slots, cap - running["running"])
            if free <= 0:
                return []
            rows = [self._pair_row(key, pair) for pair in pairs]
            return await tx.values("claim", Lease, **_claiming(worker, rows, free, ttl, (), capped=True))

        leases = await self._database.transact(change)
        self._remember(key, leases, slots=0)
        return leases

    def _pair_row(self, key: str, pair: Claimable) -> dict[str, str | None]:
        last_tenant = self._last_tenants.get(key, "")
        last = self._last_claimed.get((key, pair.queue, pair.capability))
        fresh = (
            last is not None
            and last.tenant == last_tenant
            and last.returns == self._notifications.returns
            and time.monotonic() - last.at < LAST_CLAIMED_SECONDS
        )
        return {
            "queue": pair.queue,
            "capability": pair.capability,
            "domain": pair.domain,
            "last_tenant": last_tenant,
            "after_id": last.after_id if last and fresh else None,
        }

    def _remember(self, key: str, leases: Sequence[Lease], *, slots: int) -> None:
        """Record which tenant was served last and, where a backlog is left, after which job the next claim starts.

        A new entry inherits the age of the one it replaces, so that it still expires after LAST_CLAIMED_SECONDS.
        """
        if not leases:
            return
        before = self._last_tenants.get(key, "")
        tenants = {lease.tenant for lease in leases}
        last_tenant = max(tenants, key=lambda tenant: (tenant == before, tenant < before, tenant))
        self._last_tenants[key] = last_tenant
        if len(leases) < slots or not slots:
            return
        now = time.monotonic()
        last_ids = {(key, lease.queue, lease.capability): lease.id for lease in leases if lease.tenant == last_tenant}
        returns = self._notifications.returns
        for pair_key, after_id in last_ids.items():
            last = self._last_claimed.get(pair_key)
            kept = last is not None and last.tenant == last_tenant and now - last.at < LAST_CLAIMED_SECONDS
            self._last_claimed[pair_key] = _LastClaimed(
                last_tenant, after_id, last.at if last and kept else now, returns
            )

    def _clear_last_claimed(self, key: str) -> None:
        for pair_key in [pair_key for pair_key in self._last_claimed if pair_key[0] == key]:
            del self._last_claimed[pair_key]

    async def start(self, leases: Iterable[Lease]) -> frozenset[str]:
        """Record that these attempts now run; return the ids of those whose lease is still valid."""
        rows = await self._database.rows("start", rows=_tokens(leases))
        return frozenset(row["id"] for row in rows)

    async def beat(self, worker: str, leases: Iterable[Lease], *, ttl: float) -> HeartbeatReply:
        """Renew all leases of a worker in one statement; return the state of each job's lease and stop request."""
        _check_ttl(ttl)
        rows = await self._database.rows("beat", urgent=True, worker=worker, rows=_tokens(leases), ttl=ttl)
        jobs = tuple(
            Beat(
                id=row["id"],
                token=row["token"],
                answer=row["answer"],
                stop_request=to_stop(row),
                capability=row["capability"],
                phase=None if row["phase"] is None else Phase(row["phase"]),
            )
            for row in rows
            if row["id"] is not None
        )
        draining = next(row["draining"] for row in rows if row["id"] is None)
        return HeartbeatReply(jobs=jobs, registered=draining is not None, draining=bool(draining))

    async def owns(self, worker: str, lease: Lease) -> bool:
        """Return whether this worker still owns a lease, without renewing it."""
        return bool(await self._database.read("owned_leases", worker=worker, rows=_tokens([lease])))

    async def stop_requests(self, worker: str) -> Mapping[str, StopRequest]:
        """Return the pending stop requests for a worker's jobs. The worker polls this between beats."""
        rows = await self._database.read("stop_requests", worker=worker)
        return {row["id"]: stop for row in rows if (stop := to_stop(row)) is not None}

    async def advance_stop(self, lease: Lease, phase: StopPhase, *, grace: float | None = None) -> bool:
        """Record how far the stop sequence has come; `grace` sets the deadline of the next step."""
        rows = await self._database.rows("advance_stop", id=lease.id, token=lease.token, phase=phase, grace=grace)
        return bool(rows)

    async def finish(self, ends: Sequence[tuple[Lease, Outcome]]) -> Mapping[str, Status | None]:
        """End attempts, many in one statement. Return each job's new status, or None if the lease was lost.

        An outcome of `queued` is a requeue; a pending stop request turns it into `cancelled` or `paused`. Safe to
        repeat after a lost reply: an end that is already recorded is found by its token.
        """
        if len({lease.id for lease, _ in ends}) != len(ends):
            raise Invalid("ends", "the same job appears twice")
        ends = await self._first_losses_at_once(ends)
        done = await self._end(
            [(lease.tenant, lease.lane, ending(lease.id, lease.token, outcome)) for lease, outcome in ends],
            budgeted={lease.id for lease, _ in ends if lease.has_budget},
        )
        answers: dict[str, Status | None] = {end.id: STATUSES[end.status] for end in done}
        missed = [lease for lease, _ in ends if lease.id not in answers]
        if missed:
            answers |= dict.fromkeys((lease.id for lease in missed), None)
            landed = await self._database.read("recorded_ends", rows=_tokens(missed))
            answers |= {row["id"]: Status(row["status"]) for row in landed}
        self._database.counters.leases_lost += sum(answers[lease.id] is None for lease in missed)
        await self._after_moves.ended(done, lost=sum(outcome.cause is Cause.LOST for _, outcome in ends))
        return answers

    async def _end(
        self, ends: Sequence[tuple[str, str | None, Ending]], *, budgeted: Collection[str] = ()
    ) -> list[Ended]:
        """Record the ends of attempts: in one statement without lane and budget, under locks with one of them."""
        plain = [row for _, lane, row in ends if lane is None and row.id not in budgeted]
        others = [end for end in ends if end[1] is not None or end[2].id in budgeted]
        done: list[Ended] = []
        if plain:
            done += await self._database.values("finish", Ended, rows=plain)
        if others:
            done += await self._end_locked(others)
        return done

    async def _end_locked(self, ends: Sequence[tuple[str, str | None, Ending]]) -> Sequence[Ended]:
        """Record ends that depend on more than the job's lease: lanes advance, budgets are enforced."""
        lanes: list[LaneKey] = list({(tenant, lane) for tenant, lane, _ in ends if lane is not None})
        rows = [row for _, _, row in ends]

        async def change(tx: Tx) -> tuple[Sequence[Ended], set[str]]:
            await lock_lanes_and_jobs(tx, lanes, [row.id for row in rows])
            ended = await tx.values("finish", Ended, rows=await within_budgets(tx, rows))
            return ended, await settle_lanes(tx, lanes) if lanes else set()

        ended, queues = await self._database.transact(change)
        self._after_moves.opened(queues)
        return ended

    async def hand_over(
        self,
        leases: Iterable[Lease],
        *,
        delay: float = 0.0,
        adoption_failed: bool = False,
        reason: HandOverReason = "leaving",
    ) -> frozenset[str]:
        """Release leases while the attempts keep running; another worker adopts them after `delay` seconds.

        `adoption_failed` says that the adopting worker failed with the attempt; only such adoptions are counted. The
        event records `reason`.
        """
        return self._handed(
            await self._database.rows(
                "hand_over", rows=_tokens(leases), delay=delay, adoption_failed=adoption_failed, reason=reason
            )
        )

    async def release_unknown(self, worker: str, beats: Sequence[Beat]) -> frozenset[str]:
        """Release leases that a beat reported as `unknown`: the reply to their claim was lost, so nothing ran here.

        A claimed function is requeued as `drained`. Everything else is handed over, including an adopted function: it
        may have run on its former owner, and the worker that adopts it settles that.
        """
        unknown = [beat for beat in beats if beat.answer == "unknown"]
        if not unknown:
            return frozenset()
        held = await self._database.read("owned_leases", worker=worker, rows=_tokens(unknown))
        fresh = [row for row in held if row["capability"].startswith("function:") and not row["adoptions"]]
        drained = Outcome.requeued(Cause.DRAINED)
        done = await self._end(
            [(row["tenant"], row["lane"], ending(row["id"], row["token"], drained)) for row in fresh]
        )
        await self._after_moves.ended(done)
        others = [{"id": row["id"], "token": row["token"]} for row in held if row not in fresh]
        if not others:
            return frozenset(end.id for end in done)
        handed = await self._database.rows(
            "hand_over", rows=others, delay=0.0, adoption_failed=True, reason="unanswered_claim"
        )
        return self._handed(handed) | {end.id for end in done}

    async def reap(
        self, *, limit: int = 500, base: float = BACKOFF_BASE, cap: float = BACKOFF_CAP, seen: datetime | None = None
    ) -> Sequence[Reaped]:
        """Clear leases that expired. The jobs stay running and can be adopted; attempts do not change.

        With `seen`, clear only leases that had already expired at that time of the database's clock, however long this
        waits for a lock.
        """
        rows = await self._database.rows("reap", limit=limit, base=base, cap=cap, seen_at=seen)
        if rows:
            self._database.counters.reaped += len(rows)
            self._notifications.post([notify.ORPHAN])
        return [Reaped(id=row["id"], worker=row["worker"], attempt=row["attempt"]) for row in rows]

    async def owners(self) -> Owners:
        (row,) = await self._database.read("lease_owners")
        return Owners(**row)


def _rotation_key(worker: str, pairs: Sequence[Claimable]) -> str:
    """Return the key of the tenant rotation: a worker that claims queue by queue keeps one rotation per queue."""
    return "\n".join([worker, *sorted({pair.queue for pair in pairs})])


def _claiming(
    worker: str,
    rows: Sequence[Mapping[str, str | None]],
    slots: int,
    ttl: float,
    domains: Sequence[str],
    *,
    capped: bool,
) -> dict[str, object]:
    """Return the parameters of the statement `claim`."""
    return {
        "worker": worker,
        "domains": list(domains),
        "orphans": ADOPT_LIMIT,
        "pairs": list(rows),
        "slots": slots,
        "ttl": ttl,
        "capped": capped,
    }


def _tokens(leases: Iterable[Lease | Beat]) -> list[dict[str, object]]:
    return [{"id": lease.id, "token": lease.token} for lease in leases]


def _check_ttl(ttl: float) -> None:
    if ttl <= 0:
        raise Invalid("ttl", f"{ttl} is not a duration")
