"""The steps of a stateful test: each is taken on the store and on the reference model, which must agree."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
)

from holdfast.errors import HoldfastError
from holdfast.model import (
    FUNCTION_DOMAIN,
    MOVES,
    Claimable,
    Event,
    Job,
    Lease,
    NewEvent,
    Outcome,
    Status,
    Verb,
    is_legal,
)
from tests.support.reference_jobs import RefJob, Refused
from tests.support.reference_model import Reference
from tests.support.stateful_store import ExampleStore, done, grant, granted, label, seen
from tests.support.store_harness import TTL

LANES = ["a", "b"]
QUEUES = ["default", "batch"]
HOSTS = {"w1": "host-a", "w2": "host-a", "w3": "host-b"}
LEGAL = {(source, target) for moves in MOVES.values() for source, targets in moves.items() for target in targets}
CAPABILITIES = [("function:f", FUNCTION_DOMAIN), ("process", "")]


class StatefulSteps(RuleBasedStateMachine):
    """Steps that are taken on the store and on the reference, and the checks after each of them."""

    def __init__(self, example_store: ExampleStore) -> None:
        super().__init__()
        example_store.clear()
        example_store.store.notifications.returns += 1  # Ids are reused, so what is remembered of the old ones must go.
        self.example_store = example_store
        self.store = example_store.store
        self.reference = Reference(example_store.clock)
        self.ids: list[str] = []
        self.given: list[Lease] = []  # all leases ever, so most are stale
        self.known: dict[str, Job] = {}
        self.events: dict[str, list[Event]] = {}
        self.agrees = True

    # What must hold after every step

    @invariant()
    def check(self) -> None:
        self.agrees = False
        self.example_store.run(self._check())
        self.agrees = True

    async def _check(self) -> None:
        page = await self.store.jobs.list(limit=1000)
        found = {job.id: job for job in page.items}
        assert found.keys() == self.reference.jobs.keys()
        for job_id, job in found.items():
            expected = self.reference.jobs[job_id]
            assert seen(job) == self.reference.record(expected), job_id
            if job != self.known.get(job_id):
                await self._check_history(job, expected)
        running = [job.lane for job in found.values() if job.status is Status.RUNNING and job.lane is not None]
        assert len(running) == len(set(running))
        lanes = {lane.lane: (lane.state, lane.head, lane.blockers) for lane in await self.store.lanes.list()}
        assert lanes == {name: self.reference.lane(name) for name in self.reference.lanes}
        assert [dict(row) for row in await self.store.database.read("stuck_gates", limit=10)] == []
        assert (self.store.counters.deadlocks, self.store.counters.gate_repairs) == (0, 0)
        self.known = found

    async def _check_history(self, job: Job, expected: RefJob) -> None:
        """Check what changed: the record in itself, its new events, its attempts."""
        events = self.events.setdefault(job.id, [])
        events += (await self.store.events.page(job.id, after=len(events))).items
        assert [event.seq for event in events] == list(range(1, job.last_seq + 1))
        assert [(label(event), event.at) for event in events] == expected.history
        statuses = [Status(event.data["status"]) for event in events if event.type == "status"]
        assert statuses[-1] is job.status
        assert set(pairwise(statuses)) <= LEGAL
        assert (job.started_at is None) == (Status.RUNNING not in statuses)
        assert (job.finished_at is not None) == job.status.terminal
        times = [at for at in (job.requested_at, job.started_at, job.finished_at) if at is not None]
        assert times == sorted(times)
        attempts = await self.store.attempts.list(job.id)
        assert [attempt.attempt for attempt in attempts] == list(range(1, job.attempt + 1))
        assert [attempt.cause for attempt in attempts if attempt.cause] == [cause for cause, _ in expected.ended]
        tokens = [attempt.token for attempt in attempts]
        assert tokens == sorted(set(tokens))
        if job.error is not None and job.error.code == "dependency_failed":
            assert any(need in job.error.message for need in expected.needs)

    # Steps

    def _agree(self, call: Awaitable[Any], expected: Callable[[], Any]) -> None:
        """Ask the store and the reference: both refuse for the same reason, or both give the same answer."""

        async def asked() -> tuple[Any, str]:
            try:
                return await call, ""
            except HoldfastError as error:
                return type(error), error.message

        self.agrees = False
        try:
            want = expected()
        except Refused as refusal:
            want = refusal.error
        got, message = self.example_store.run(asked())
        if isinstance(got, type) and isinstance(want, type):
            assert issubclass(got, want), message
        else:
            assert got == want, message

    def lawful(self, verb: Verb) -> Sequence[str]:
        return [job.id for job in self.reference.jobs.values() if is_legal(verb, job.status)]

    def _pick(self, choice: int, verb: Verb) -> str:
        """Choose a job, most often one that the verb can move; perhaps one that is long gone."""
        lawful = self.lawful(verb)
        pool = lawful if lawful and choice % 4 else self.ids
        return pool[choice // 4 % len(pool)]

    def _lease(self, choice: int) -> Lease:
        """Choose a lease, most often one that may still write; else one of all that were ever given."""
        current = [lease for lease in self.given if self.reference.held_by(lease)]
        pool = current if current and choice % 4 else self.given
        return pool[choice // 4 % len(pool)]

    def _submit(self, wanted: Sequence[Mapping[str, Any]], needs: Sequence[str], backwards: bool) -> None:
        jobs: list[dict[str, Any]] = []
        for wish in wanted:
            number = len(self.ids) + len(jobs) + 1
            own = [jobs[-1]["id"]] if jobs and wish["follows"] else []
            jobs.append(
                {
                    "id": f"{wish['rank']:08x}-0000-7000-8000-{number:012x}",
                    **{name: wish[name] for name in ("lane", "queue", "runner", "priority", "hold")},
                    **{name: wish[name] for name in ("max_attempts", "on_lost")},
                    "spec": {"name": "f"} if wish["runner"] == "function" else {"command": ["true"]},
                    "needs": [*(needs if wish["follows"] else ()), *own],
                    "available_at": None if wish["delay"] is None else self.reference.later(wish["delay"]),
                    # No two deadlines are the same, so that it is known which job expires first.
                    "queue_timeout": 20 + number / 1000 if wish["expires"] else None,
                }
            )
        sent = jobs[::-1] if backwards else jobs
        ids = [job["id"] for job in sent]

        async def submitted() -> Sequence[str]:
            if len(sent) == 1:
                return [(await self.store.jobs.submit(sent[0])).id]
            return await self.store.jobs.submit_many(sent)

        def accepted() -> Sequence[str]:
            self.reference.submit(jobs)
            return ids

        self._agree(submitted(), accepted)
        self.ids += ids

    def _claim(self, worker: str, pairs: Sequence[Claimable], slots: int, adopts: bool) -> Sequence[Lease]:
        """Claim on both sides: the same jobs, in the same order, with the same tokens and attempts."""
        self.agrees = False
        domains = self._domains(worker) if adopts else ()
        adopted = self.reference.adopt(worker, domains)
        claimed = self.reference.claim(worker, pairs, slots)
        got = self.example_store.run(self.store.leases.claim(worker, pairs, slots=slots, ttl=TTL, domains=domains))
        assert [granted(lease) for lease in got.adopted] == [grant(job) for job in adopted]
        assert [granted(lease) for lease in got.claimed] == [grant(job) for job in claimed]
        given = [*got.adopted, *got.claimed]
        self.given += given
        return given

    def _append(self, lease: Lease, *, again: bool) -> None:
        job = self.reference.held_by(lease)
        last = job.batch if job else lease.adoption.batch
        batch = max(last, 1) if again else last + 1

        async def appended() -> str:
            log = [NewEvent(type="log", data={"line": "…"}), NewEvent(type="usage", data={"tokens": 3})]
            offsets, old = (batch * 4, 0), (batch * 4 - 4, 0)
            usage = {"tokens": 3}
            append = self.store.events.append(lease, batch, log, offsets=offsets, old_offsets=old, usage=usage)
            return (await append).answer

        self._agree(appended(), lambda: self.reference.append(lease, batch, {"tokens": 3}))

    def _finish(self, ends: Sequence[tuple[Lease, Outcome]]) -> None:
        self._agree(self.store.leases.finish(ends), lambda: self.reference.finish(ends))

    def _end(self, job: str, outcome: Outcome | None) -> None:
        """Let the owner of a job, if it has one, finish it."""
        held = [lease for lease in self.given if lease.id == job and self.reference.held_by(lease)]
        if outcome is not None:
            self._finish([(lease, outcome) for lease in held])

    def _release(self, job: str) -> None:
        self._agree(done(self.store.jobs.release(job)), lambda: self.reference.release(job))

    def _resolve(self, job: str) -> None:
        call = self.store.jobs.resolve(job, {"by": "hand"}, by="ann")
        self._agree(done(call), lambda: self.reference.resolve(job, {"by": "hand"}))

    def _dismiss(self, job: str) -> None:
        self._agree(done(self.store.jobs.dismiss(job, by="ann")), lambda: self.reference.dismiss(job))

    def _pause_lane(self, lane: str, paused: bool) -> None:
        call = self.store.lanes.pause(lane) if paused else self.store.lanes.resume(lane)
        self._agree(done(call), lambda: self.reference.pause_lane(lane, paused))

    def _pause_queue(self, queue: str, paused: bool) -> None:
        call = self.store.queues.pause(queue) if paused else self.store.queues.resume(queue)
        self._agree(call, lambda: self.reference.pause_queue(queue, paused))

    def _do(self, duty: str) -> None:
        """Run a duty. Every verb resolves what it changed, so nothing is ever left for the resolver."""
        store, reference = self.store, self.reference
        duties: Mapping[str, tuple[Callable[[], Awaitable[object]], Callable[[], object]]] = {
            "promote": (store.gates.promote, reference.promote),
            "expire": (store.jobs.expire, reference.expire),
            "purge": (store.jobs.finish_deletions, reference.purge),
            "abandon": (store.leases.abandon, reference.abandon),
            "resolve": (store.gates.resolve, lambda: 0),
            "reap": (self._reap, reference.reap),
        }
        run, expected = duties[duty]
        self._agree(run(), expected)

    async def _reap(self) -> set[str]:
        return {job.id for job in await self.store.leases.reap()}

    def _hand_over(self, lease: Lease, delay: float, *, adoption_failed: bool = False) -> bool:
        held = self.reference.hand_over(lease, delay, adoption_failed=adoption_failed)
        self._agree(
            self.store.leases.hand_over([lease], delay=delay, adoption_failed=adoption_failed),
            lambda: {lease.id} if held else set(),
        )
        return held

    def _domains(self, worker: str) -> Sequence[str]:
        return (FUNCTION_DOMAIN, HOSTS[worker])

    def _pairs(
        self, worker: str, queues: Sequence[str] = QUEUES, capabilities: Sequence[tuple[str, str]] = CAPABILITIES
    ) -> Sequence[Claimable]:
        return [
            Claimable(queue=queue, capability=capability, domain=domain or HOSTS[worker])
            for queue in queues
            for capability, domain in capabilities
        ]
