"""What workers do: claim, adopt, start, beat, append, finish, requeue, hand over; and the reaper.

Every write about a running job takes its `Lease` and is fenced by the token in it. An answer says, per job, whether the
write landed; a lost lease is an answer, not an error.
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
    Lease,
    Outcome,
    Phase,
    Pulse,
    Status,
    StopPhase,
    StopRequest,
)
from holdfast.store import wake
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
MARK_SECONDS = 1.0
"""For how long a claim may begin behind the job that was taken last; what came before it in order waits so long."""


class Claimed(msgspec.Struct, frozen=True, kw_only=True):
    """Orphans first, then new attempts."""

    adopted: Sequence[Lease]
    claimed: Sequence[Lease]


class Reaped(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    worker: str | None
    attempt: int


class Owners(msgspec.Struct, frozen=True, kw_only=True):
    """How many workers hold leases, how many of those let one expire, and when the last heartbeats came."""

    owners: int
    expired: int
    beat_at: datetime | None
    expired_beat_at: datetime | None
    now_at: datetime


class _Mark(msgspec.Struct, frozen=True):
    """The job that was taken last from a line, of the tenant whose turn it was."""

    tenant: str
    after_id: str
    at: float
    returns: int


class Leases(Orphans):
    def __init__(self, database: Database, gates: Gates, queues: Queues, wake_up: wake.Wake) -> None:
        super().__init__(database, gates, wake_up)
        self._queues = queues
        self._turns: dict[str, str] = {}
        self._marks: dict[tuple[str, str, str], _Mark] = {}
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
        """Adopt what this worker can reach, needing no slot for it; then claim up to the free slots.

        These are several statements. When the store fails after some of them gave leases, those are the answer: they
        are this worker's, and nobody else would work on them before they expire.
        """
        _check_ttl(ttl)
        caps = await self._queues.caps() if slots > 0 and pairs else {}
        uncapped = [pair for pair in pairs if pair.queue not in caps]
        capped = sorted({pair.queue for pair in pairs} & set(caps))
        adopted: list[Lease] = []
        claimed: list[Lease] = []
        try:
            for queue in self._in_turn(worker, [None, *capped]):
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
            log.log(level_of(error), "the store failed in the middle of a claim; going on with what it gave: %s", error)
        self._database.counters.claims += len(claimed)
        self._database.counters.adoptions += len(adopted)
        return Claimed(adopted=sorted(adopted, key=attrgetter("id")), claimed=claimed)

    def _in_turn(self, worker: str, groups: list[str | None]) -> list[str | None]:
        """Capped queues and all the others go first by turns, so that none lives off what another leaves."""
        self._rounds[worker] += 1
        first = self._rounds[worker] % len(groups)
        return groups[first:] + groups[:first]

    async def _claim(
        self, worker: str, pairs: Sequence[Claimable], slots: int, ttl: float, domains: Sequence[str]
    ) -> AsyncIterator[tuple[Sequence[Lease], Sequence[Lease]]]:
        """Take turns until the slots are full or nobody has work; yield what each statement adopted and claimed."""
        slots = max(slots, 0)
        key = _turns_of(worker, pairs)
        while True:
            turns = [self._turn(key, pair) for pair in pairs]
            leases = await self._database.values(
                "claim", Lease, **_claiming(worker, turns, slots, ttl, domains, capped=False)
            )
            old = sum(lease.adopted for lease in leases)
            new = leases[old:]
            self._remember(key, new, slots=slots)
            yield leases[:old], new
            slots -= len(new)
            marked = any(turn["after_id"] is not None for turn in turns)
            if slots <= 0 or not (marked or len({lease.tenant for lease in new}) > 1):
                return
            if marked:
                self._drop_marks(key)
            domains = ()

    async def _claim_capped(
        self, worker: str, queue: str, pairs: Sequence[Claimable], slots: int, ttl: float
    ) -> Sequence[Lease]:
        """Lock the queue, count what runs in it, and take at most the rest."""
        if slots <= 0 or not await self._database.read("claimable_in_queue", queue=queue):
            return []
        key = _turns_of(worker, pairs)

        async def change(tx: Tx) -> Sequence[Lease]:
            locked = await tx.rows("lock_queue", queue=queue)
            (running,) = await tx.rows("running_in_queue", queue=queue)
            cap = locked[0]["cap"] if locked else None
            free = slots if cap is None else min(slots, cap - running["running"])
            if free <= 0:
                return []
            turns = [self._turn(key, pair) for pair in pairs]
            return await tx.values("claim", Lease, **_claiming(worker, turns, free, ttl, (), capped=True))

        leases = await self._database.transact(change)
        self._remember(key, leases, slots=0)
        return leases

    def _turn(self, key: str, pair: Claimable) -> dict[str, str | None]:
        turn = self._turns.get(key, "")
        mark = self._marks.get((key, pair.queue, pair.capability))
        fresh = (
            mark is not None
            and mark.tenant == turn
            and mark.returns == self._wake.returns
            and time.monotonic() - mark.at < MARK_SECONDS
        )
        return {
            "queue": pair.queue,
            "capability": pair.capability,
            "domain": pair.domain,
            "turn": turn,
            "after_id": mark.after_id if mark and fresh else None,
        }

    def _remember(self, key: str, leases: Sequence[Lease], *, slots: int) -> None:
        """Note whose turn it was last; for lines with a backlog also the mark behind which they go on.

        A mark keeps the age of the one that it follows, so that it is dropped in time.
        """
        if not leases:
            return
        before = self._turns.get(key, "")
        turn = max({lease.tenant for lease in leases}, key=lambda tenant: (tenant == before, tenant < before, tenant))
        self._turns[key] = turn
        if len(leases) < slots or not slots:
            return
        now = time.monotonic()
        last = {(key, lease.queue, lease.capability): lease.id for lease in leases if lease.tenant == turn}
        for line, after_id in last.items():
            mark = self._marks.get(line)
            kept = mark is not None and mark.tenant == turn and now - mark.at < MARK_SECONDS
            self._marks[line] = _Mark(turn, after_id, mark.at if mark and kept else now, self._wake.returns)

    def _drop_marks(self, key: str) -> None:
        for line in [line for line in self._marks if line[0] == key]:
            del self._marks[line]

    async def start(self, leases: Iterable[Lease]) -> frozenset[str]:
        """Write that these attempts now run; return the ids of those whose lease still held."""
        rows = await self._database.rows("start", rows=_tokens(leases))
        return frozenset(row["id"] for row in rows)

    async def beat(self, worker: str, leases: Iterable[Lease], *, ttl: float) -> Pulse:
        """Renew all leases of a worker in one statement, and hear what became of each job."""
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
        return Pulse(jobs=jobs, registered=draining is not None, draining=bool(draining))

    async def holds(self, worker: str, lease: Lease) -> bool:
        """Say whether a lease is still this worker's: a look that changes nothing."""
        return bool(await self._database.read("held", worker=worker, rows=_tokens([lease])))

    async def stops(self, worker: str) -> Mapping[str, StopRequest]:
        """The stop requests that wait for a worker's jobs: what it polls between beats."""
        rows = await self._database.read("stops", worker=worker)
        return {row["id"]: stop for row in rows if (stop := to_stop(row)) is not None}

    async def advance_stop(self, lease: Lease, phase: StopPhase, *, grace: float | None = None) -> bool:
        """Write how far the stop ladder has come; `grace` sets the deadline of the next step."""
        rows = await self._database.rows("advance_stop", id=lease.id, token=lease.token, phase=phase, grace=grace)
        return bool(rows)

    async def finish(self, ends: Sequence[tuple[Lease, Outcome]]) -> Mapping[str, Status | None]:
        """End attempts, many in one statement. The answer per job: its status now, or None if the lease was lost.

        An outcome of `queued` is a requeue; a stop request that waits turns it into `cancelled` or `paused`. Safe to
        repeat after a lost answer: an end that is already in the record is found by its token.
        """
        if len({lease.id for lease, _ in ends}) != len(ends):
            raise Invalid("ends", "a job is named twice")
        ends = await self._first_losses_at_once(ends)
        done = await self._end(
            [(lease.tenant, lease.lane, ending(lease.id, lease.token, outcome)) for lease, outcome in ends],
            budgeted={lease.id for lease, _ in ends if lease.has_budget},
        )
        answers: dict[str, Status | None] = {end.id: STATUSES[end.status] for end in done}
        missed = [lease for lease, _ in ends if lease.id not in answers]
        if missed:
            answers |= dict.fromkeys((lease.id for lease in missed), None)
            landed = await self._database.read("landed", rows=_tokens(missed))
            answers |= {row["id"]: Status(row["status"]) for row in landed}
        counters = self._database.counters
        counters.finishes.update(end.status for end in done)
        counters.losses += sum(outcome.cause is Cause.LOST for _, outcome in ends)
        counters.leases_lost += sum(answers[lease.id] is None for lease in missed)
        await self._tell_ended(done)
        return answers

    async def _end(
        self, ends: Sequence[tuple[str, str | None, Ending]], *, budgeted: Collection[str] = ()
    ) -> list[Ended]:
        """Write ends of attempts, given with tenant and lane: one statement for those without a lane and a budget."""
        plain = [row for _, lane, row in ends if lane is None and row.id not in budgeted]
        others = [end for end in ends if end[1] is not None or end[2].id in budgeted]
        done: list[Ended] = []
        if plain:
            done += await self._database.values("finish", Ended, rows=plain)
        if others:
            done += await self._end_locked(others)
        return done

    async def _end_locked(self, ends: Sequence[tuple[str, str | None, Ending]]) -> Sequence[Ended]:
        """Write ends that depend on more than the job's lease: lanes move on, budgets are held."""
        lanes: list[LaneKey] = list({(tenant, lane) for tenant, lane, _ in ends if lane is not None})
        rows = [row for _, _, row in ends]

        async def change(tx: Tx) -> tuple[Sequence[Ended], set[str]]:
            await lock_lanes_and_jobs(tx, lanes, [row.id for row in rows])
            ended = await tx.values("finish", Ended, rows=await within_budgets(tx, rows))
            return ended, await settle_lanes(tx, lanes) if lanes else set()

        ended, queues = await self._database.transact(change)
        self._wake.post(wake.work(queue) for queue in queues)
        return ended

    async def hand_over(
        self,
        leases: Iterable[Lease],
        *,
        delay: float = 0.0,
        worn: bool = False,
        reason: HandOverReason = "leaving",
    ) -> frozenset[str]:
        """Give leases back while the work goes on; the next worker adopts it, after `delay` seconds.

        `worn` says that its adopter failed at it: such adoptions are counted, others are not. The event keeps `reason`.
        """
        return self._handed(
            await self._database.rows("hand_over", rows=_tokens(leases), delay=delay, worn=worn, reason=reason)
        )

    async def give_back(self, worker: str, beats: Sequence[Beat]) -> frozenset[str]:
        """Give back leases that a beat called `unknown`: the answer to their claim was lost, so nothing ran here.

        A claimed function is requeued as `drained`. All else is handed over, a function that was adopted among it: it
        may have run at its former owner's, and whoever adopts it settles that.
        """
        unknown = [beat for beat in beats if beat.answer == "unknown"]
        if not unknown:
            return frozenset()
        held = await self._database.read("held", worker=worker, rows=_tokens(unknown))
        fresh = [row for row in held if row["capability"].startswith("function:") and not row["adoptions"]]
        drained = Outcome.requeued(Cause.DRAINED)
        done = await self._end(
            [(row["tenant"], row["lane"], ending(row["id"], row["token"], drained)) for row in fresh]
        )
        await self._tell_ended(done)
        others = [{"id": row["id"], "token": row["token"]} for row in held if row not in fresh]
        if not others:
            return frozenset(end.id for end in done)
        handed = await self._database.rows("hand_over", rows=others, delay=0.0, worn=True, reason="unanswered_claim")
        return self._handed(handed) | {end.id for end in done}

    async def reap(
        self, *, limit: int = 500, base: float = BACKOFF_BASE, cap: float = BACKOFF_CAP, seen: datetime | None = None
    ) -> Sequence[Reaped]:
        """Clear leases that expired. The jobs stay running and can be adopted; attempts do not change.

        `seen`: only what had expired when somebody looked, by the database's clock, however long this waits for a lock.
        """
        rows = await self._database.rows("reap", limit=limit, base=base, cap=cap, seen_at=seen)
        if rows:
            self._database.counters.reaped += len(rows)
            self._wake.post([wake.ORPHAN])
        return [Reaped(id=row["id"], worker=row["worker"], attempt=row["attempt"]) for row in rows]

    async def owners(self) -> Owners:
        (row,) = await self._database.read("lease_owners")
        return Owners(**row)


def _turns_of(worker: str, pairs: Sequence[Claimable]) -> str:
    """Whose turns: a worker that claims from its queues one by one keeps the turns of each apart."""
    return "\n".join([worker, *sorted({pair.queue for pair in pairs})])


def _claiming(
    worker: str,
    turns: Sequence[Mapping[str, str | None]],
    slots: int,
    ttl: float,
    domains: Sequence[str],
    *,
    capped: bool,
) -> dict[str, object]:
    """The parameters of the statement `claim`."""
    return {
        "worker": worker,
        "domains": list(domains),
        "orphans": ADOPT_LIMIT,
        "pairs": list(turns),
        "slots": slots,
        "ttl": ttl,
        "capped": capped,
    }


def _tokens(leases: Iterable[Lease | Beat]) -> list[dict[str, object]]:
    return [{"id": lease.id, "token": lease.token} for lease in leases]


def _check_ttl(ttl: float) -> None:
    if ttl <= 0:
        raise Invalid("ttl", f"{ttl} is not a duration")
