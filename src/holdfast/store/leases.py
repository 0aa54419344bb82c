"""What workers do with leases: claim, adopt, start, beat, append, finish, requeue, hand over; and the reaper.

Every write about a running job takes its `Lease` and is fenced by the lease's token. Each method returns, per job,
whether the write was applied; a lost lease is a return value, not an error.
"""

import logging
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from datetime import datetime
from operator import attrgetter

import msgspec

from holdfast.errors import Invalid, StoreError
from holdfast.model import (
    FUNCTION_DOMAIN,
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
from holdfast.store.claims import Claims
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
"""Maximum orphans that one claim adopts."""


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


class Leases(Orphans):
    def __init__(self, database: Database, gates: Gates, queues: Queues, wake_up: notify.Notifications) -> None:
        super().__init__(database, gates, wake_up)
        self._queues = queues
        self._claims = Claims(database, wake_up)
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
        adopted: list[Lease] = []
        claimed: list[Lease] = []
        try:
            if domains:
                adopted += await self._adopt(worker, ttl, domains)
            async for leases in self._claim(worker, pairs, slots, ttl):
                claimed += leases
        except StoreError as error:
            if not (adopted or claimed):
                raise
            log.log(level_of(error), "claim failed halfway; keeping the leases obtained so far: %s", error)
        self._after_moves.claimed(len(claimed), adopted=len(adopted))
        return Claimed(adopted=sorted(adopted, key=attrgetter("id")), claimed=claimed)

    async def _adopt(self, worker: str, ttl: float, domains: Sequence[str]) -> Sequence[Lease]:
        return await self._database.values(
            "adopt", Lease, worker=worker, ttl=ttl, domains=list(domains), limit=ADOPT_LIMIT
        )

    async def _claim(
        self, worker: str, pairs: Sequence[Claimable], slots: int, ttl: float
    ) -> AsyncIterator[Sequence[Lease]]:
        """Claim from the queues without a cap together, and from each queue with one. Yield what each step returned.

        Rotate which of them goes first, so that none gets only leftover slots.
        """
        if slots <= 0 or not pairs:
            return
        caps = await self._queues.caps()
        groups = [None, *sorted({pair.queue for pair in pairs} & set(caps))]
        self._rounds[worker] += 1
        first = self._rounds[worker] % len(groups)
        for queue in groups[first:] + groups[:first]:
            if queue is None:
                uncapped = [pair for pair in pairs if pair.queue not in caps]
                async for leases in self._claims.claim(worker, uncapped, slots, ttl):
                    yield leases
                    slots -= len(leases)
            else:
                own = [pair for pair in pairs if pair.queue == queue]
                leases = await self._claim_capped(worker, queue, own, slots, ttl)
                yield leases
                slots -= len(leases)

    async def _claim_capped(
        self, worker: str, queue: str, pairs: Sequence[Claimable], slots: int, ttl: float
    ) -> Sequence[Lease]:
        """Lock the queue, count its running jobs, and claim at most as many as its cap still allows."""
        if slots <= 0 or not await self._database.read("claimable_in_queue", queue=queue):
            return []

        async def change(tx: Tx) -> Sequence[Lease]:
            locked = await tx.rows("lock_queue", queue=queue)
            (running,) = await tx.rows("running_in_queue", queue=queue)
            cap = locked[0]["cap"] if locked else None
            free = slots if cap is None else min(slots, cap - running["running"])
            return [lease async for leases in self._claims.claim(worker, pairs, free, ttl, tx=tx) for lease in leases]

        return await self._database.transact(change)

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

        A claimed function, or other attempt that would die with this worker, is requeued as `drained`. Everything else
        is handed over, including an adopted function: it may have run on its former owner, and the worker that adopts
        it settles that.
        """
        unknown = [beat for beat in beats if beat.answer == "unknown"]
        if not unknown:
            return frozenset()
        held = await self._database.read("owned_leases", worker=worker, rows=_tokens(unknown))
        fresh = [row for row in held if row["domain"] == FUNCTION_DOMAIN and not row["adoptions"]]
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


def _tokens(leases: Iterable[Lease | Beat]) -> list[dict[str, object]]:
    return [{"id": lease.id, "token": lease.token} for lease in leases]


def _check_ttl(ttl: float) -> None:
    if ttl <= 0:
        raise Invalid("ttl", f"{ttl} is not a duration")
