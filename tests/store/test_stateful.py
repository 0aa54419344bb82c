"""Random operations of several workers and callers, under a clock that moves, against a model in plain Python.

After every step the whole store must be what the reference says, and keep the promises of DESIGN §1 on its own. At the
end a person settles everything, and then every job must end. Every run tries the same examples, but with
`HOLDFAST_MACHINE_EXAMPLES=5000` and `--timeout=0` it searches longer, with new seeds.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from holdfast.duties import orphan_settler
from holdfast.errors import HoldfastError
from holdfast.model import (
    FUNCTION_DOMAIN,
    MOVES,
    Beat,
    Cause,
    Claimable,
    Error,
    Event,
    Job,
    Lease,
    NewEvent,
    Outcome,
    Status,
    StopKind,
    StopPhase,
    Verb,
    is_legal,
)
from holdfast.store import Store
from holdfast.store.postgres import PostgresDatabase
from holdfast.store.store import connect
from holdfast.timing import ManualClock
from tests.support.reference_model import WEARY, Reference, RefJob, Refused
from tests.support.store_harness import START, TTL, StoreHarness

T = TypeVar("T")
Rule = TypeVar("Rule", bound=Callable[..., Any])

EXAMPLES = {"sqlite": 100, "postgres": 60}
STEPS = 40
FEW_JOBS, MOST_JOBS = 3, 14
LANES = ["a", "b"]
QUEUES = ["default", "batch"]
HOSTS = {"w1": "host-a", "w2": "host-a", "w3": "host-b"}
TABLES = ["jobs", "specs", "labels", "attempts", "events", "needs", "lanes", "queues", "workers", "leaders"]
LEGAL = {(source, target) for moves in MOVES.values() for source, targets in moves.items() for target in targets}
RECORD = (
    *("status", "gate", "queue", "lane", "priority", "attempt", "attempts", "max_attempts", "requested_at"),
    *("available_at", "started_at", "finished_at", "updated_at", "lease", "orphaned_at", "dismissed", "result"),
    *("usage", "last_seq"),
)
GRANT = ("id", "token", "attempt", "domain", "lane")
STANDING = ("phase", "adoptions", "batch")
CAPABILITIES = [("function:f", FUNCTION_DOMAIN), ("process", "")]

workers = st.sampled_from(sorted(HOSTS))
choices = st.integers(0, 99)
seldom = st.sampled_from([False, False, True])
wishes = st.fixed_dictionaries(
    {
        "rank": st.integers(0, 3),  # leads the id, so that ids are not in the order of submission
        "lane": st.sampled_from([None, "a", *LANES]),
        "queue": st.sampled_from(["default", "default", *QUEUES]),
        "runner": st.sampled_from(["function", "function", "process"]),
        "priority": st.sampled_from([0, 0, 1]),
        "hold": seldom,
        "delay": st.sampled_from([None, None, None, 10.0, -5.0]),
        "max_attempts": st.integers(1, 3),
        "on_lost": st.sampled_from(["fail", "pause", "hold"]),
        "expires": seldom,
        "follows": st.booleans(),
    }
)
outcomes = st.sampled_from(
    [
        Outcome.succeeded({"answer": 42}),
        Outcome.succeeded(),
        Outcome.failed("exit_nonzero", "boom", exit_code=1),
        Outcome(status=Status.FAILED, error=Error(code="said_no", message="no"), result={"partial": True}),
        Outcome.failed("start_failed", "no such file", cause=Cause.START_FAILED),
        Outcome(status=Status.TIMED_OUT, cause=Cause.TIMED_OUT, error=Error(code="timeout", message="too long")),
        Outcome(status=Status.CANCELLED, cause=Cause.CANCELLED, error=Error(code="cancelled", message="stopped")),
        Outcome(status=Status.PAUSED, cause=Cause.INTERRUPTED, error=Error(code="interrupted", message="stopped")),
        Outcome(status=Status.PAUSED, error=Error(code="not_ready", message="not ready")),
        Outcome.requeued(Cause.EXIT, delay=10, error=Error(code="exit_nonzero", message="boom")),
        Outcome.requeued(Cause.LOST, delay=10, error=Error(code="lost", message="gone")),
        Outcome.requeued(Cause.EXIT, error=Error(code="exit_nonzero", message="boom")),
        Outcome.requeued(Cause.DRAINED),
    ]
)


class Bench:
    """A store on its own event loop, emptied for each example, with a manual clock."""

    def __init__(self, kind: str, url: str) -> None:
        self._loop = asyncio.new_event_loop()
        self.clock = ManualClock(START)
        self.store = Store(self.run(connect(url, listen=False, connections=1, clock=self.clock)))
        self._stage = StoreHarness(kind, url, self.store, self.clock)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._loop.run_until_complete(work)

    def clear(self) -> None:
        database = self.store.database
        if isinstance(database, PostgresDatabase):
            for table in TABLES:
                self.run(database.fetch(f"DELETE FROM holdfast.{table}"))
        else:
            self.run(database.migrate(lambda raw: [raw.execute(f"DELETE FROM {table}") for table in TABLES]))
        self.advance((START - self.clock.now()).total_seconds())

    def advance(self, seconds: float) -> None:
        self.run(self._stage.advance(seconds))

    def close(self) -> None:
        self.run(self.store.close())
        self._loop.close()


given_any = precondition(lambda machine: machine.given)
any_open = precondition(lambda machine: machine.reference.open_jobs())


def movable(verb: Verb) -> Callable[[Rule], Rule]:
    """A rule that makes sense only while the verb can move a job; it may still be tried on another one."""
    return precondition(lambda machine: machine.lawful(verb))


class Machine(RuleBasedStateMachine):
    def __init__(self, bench: Bench) -> None:
        super().__init__()
        bench.clear()
        bench.store.notifications.returns += 1  # Ids are reused, so what is remembered of the old ones must go.
        self.bench = bench
        self.store = bench.store
        self.reference = Reference(bench.clock)
        self.ids: list[str] = []
        self.given: list[Lease] = []  # all leases ever, so most are stale
        self.known: dict[str, Job] = {}
        self.events: dict[str, list[Event]] = {}
        self.agrees = True

    # Callers

    @initialize(wanted=st.lists(wishes, min_size=3, max_size=5))
    def begin(self, wanted: Sequence[Mapping[str, Any]]) -> None:
        self._submit(wanted, (), False)

    @precondition(lambda self: len(self.ids) < MOST_JOBS)
    @rule(wanted=st.lists(wishes, min_size=1, max_size=3), needs=st.lists(choices, max_size=2), backwards=st.booleans())
    def submit(self, wanted: Sequence[Mapping[str, Any]], needs: Sequence[int], backwards: bool) -> None:
        self._submit(wanted, sorted({self._pick(choice, Verb.CLAIM) for choice in needs}), backwards)

    @movable(Verb.RELEASE)
    @rule(choice=choices)
    def release(self, choice: int) -> None:
        self._release(self._pick(choice, Verb.RELEASE))

    @movable(Verb.FINISH)
    @rule(choice=choices, verb=st.sampled_from([Verb.CANCEL, Verb.INTERRUPT]), outcome=st.none() | outcomes)
    def stop(self, choice: int, verb: Verb, outcome: Outcome | None) -> None:
        """Ask a job to stop; perhaps it ends in the same moment, for reasons of its own."""
        job = self._pick(choice, Verb.FINISH)

        async def asked() -> str:
            call = self.store.jobs.cancel if verb is Verb.CANCEL else self.store.jobs.interrupt
            return (await call(job)).outcome

        self._agree(asked(), lambda: self.reference.stop(verb, StopKind(verb), job))
        self._end(job, outcome)

    @movable(Verb.RESUME)
    @rule(choice=choices, stopped=st.booleans())
    def resume(self, choice: int, stopped: bool) -> None:
        job = self._pick(choice, Verb.RESUME)
        call = self.store.jobs.resume(job, stopped=stopped, by="ann")
        self._agree(done(call), lambda: self.reference.resume(job, stopped=stopped))

    @movable(Verb.RESOLVE)
    @rule(choice=choices)
    def resolve(self, choice: int) -> None:
        self._resolve(self._pick(choice, Verb.RESOLVE))

    @movable(Verb.DISMISS)
    @rule(choice=choices)
    def dismiss(self, choice: int) -> None:
        self._dismiss(self._pick(choice, Verb.DISMISS))

    @precondition(lambda self: len(self.reference.jobs) > FEW_JOBS)
    @rule(choice=choices, force=st.booleans(), outcome=st.none() | outcomes)
    def delete(self, choice: int, force: bool, outcome: Outcome | None) -> None:
        job = self._pick(choice, Verb.FINISH) if force else self.ids[choice % len(self.ids)]

        async def deleted() -> str:
            return (await self.store.jobs.delete(job, force=force)).outcome

        self._agree(deleted(), lambda: self.reference.delete(job, force=force))
        self._end(job, outcome)

    @rule(lane=st.sampled_from([*LANES, None]), queue=st.sampled_from(QUEUES), paused=seldom)
    def pause(self, lane: str | None, queue: str, paused: bool) -> None:
        if lane is None:
            self._pause_queue(queue, paused)
        else:
            self._pause_lane(lane, paused)

    # Workers

    @any_open
    @rule(
        worker=workers,
        slots=st.integers(1, 3),
        queues=st.sampled_from([QUEUES, QUEUES, ["batch"]]),
        capabilities=st.sampled_from([CAPABILITIES, CAPABILITIES, CAPABILITIES[:1], CAPABILITIES[1:]]),
        adopts=st.booleans(),
    )
    def claim(
        self, worker: str, slots: int, queues: list[str], capabilities: list[tuple[str, str]], adopts: bool
    ) -> None:
        self._claim(worker, self._pairs(worker, queues, capabilities), slots, adopts)

    @any_open
    @rule(worker=workers, slots=st.integers(1, 3), outcome=outcomes)
    def run(self, worker: str, slots: int, outcome: Outcome) -> None:
        """Claim and finish at once, so that a short sequence gets far."""
        given = self._claim(worker, self._pairs(worker), slots, False)
        self._finish([(lease, outcome) for lease in given])

    @precondition(lambda self: any(job.orphaned for job in self.reference.jobs.values()))
    @rule(worker=workers)
    def adopt(self, worker: str) -> None:
        self._claim(worker, [], 0, True)

    @given_any
    @rule(worker=workers, some=st.lists(choices, min_size=1, max_size=3))
    def beat(self, worker: str, some: Sequence[int]) -> None:
        """Beat for some jobs with every lease that they ever had: only the last can be `yours`."""
        ids = {self._lease(choice).id for choice in some}
        leases = [lease for lease in self.given if lease.id in ids]

        async def pulse() -> set[tuple[str, int, str, StopKind | None]]:
            beats = (await self.store.leases.beat(worker, leases, ttl=TTL)).jobs
            return {(b.id, b.token, b.answer, stop_kind(b)) for b in beats}

        self._agree(pulse(), lambda: self.reference.beat(worker, leases))

    @given_any
    @rule(choice=choices, what=st.sampled_from(["start", "append", "repeat", "signal"]))
    def report(self, choice: int, what: str) -> None:
        """Write one thing about a running attempt."""
        lease = self._lease(choice)
        if what == "start":
            held = {lease.id} if self.reference.start(lease) else set()
            self._agree(self.store.leases.start([lease]), lambda: held)
        elif what == "signal":
            signalled = self.reference.advance_stop(lease, StopPhase.SIGNALLED)
            self._agree(self.store.leases.advance_stop(lease, StopPhase.SIGNALLED, grace=5), lambda: signalled)
        else:
            self._append(lease, again=what == "repeat")

    @given_any
    @rule(ends=st.lists(st.tuples(choices, outcomes), min_size=1, max_size=2))
    def finish(self, ends: Sequence[tuple[int, Outcome]]) -> None:
        leases = [(self._lease(choice), outcome) for choice, outcome in ends]
        self._finish(list({lease.id: (lease, outcome) for lease, outcome in leases}.values()))

    @given_any
    @rule(choice=choices, delay=st.sampled_from([0.0, 0.0, 10.0]))
    def hand_over(self, choice: int, delay: float) -> None:
        self._hand_over(self._lease(choice), delay)

    @given_any
    @rule(choice=choices)
    def wear_out(self, choice: int) -> None:
        """Adopt one job again and again without progress; then it waits for a person."""
        lease = self._lease(choice)
        worker = next(worker for worker in HOSTS if lease.domain in self._domains(worker))
        adopted = 0
        while self._hand_over(lease, 0.0, worn=True) and adopted < WEARY:
            adopted += 1
            lease = next(new for new in self._claim(worker, [], 0, True) if new.id == lease.id)
        self._do("abandon")

    @given_any
    @rule(worker=workers)
    def die(self, worker: str) -> None:
        """Somebody took the lock file of a worker."""
        self._agree(self.store.leases.orphan(worker), lambda: self.reference.die(worker))

    @precondition(lambda self: any(job.orphaned or job.feared_lost for job in self.reference.jobs.values()))
    @rule(host=st.sampled_from(sorted(set(HOSTS.values()))), what=st.sampled_from(["strand", "recover", "lose"]))
    def lose_sight(self, host: str, what: str) -> None:
        """Nobody reaches what runs somewhere; or somebody does again; or a person gives it up."""

        async def lost() -> Sequence[str]:
            return list((await self.store.workers.lost(host)).jobs)

        self.bench.advance(0.5)
        self._agree(orphan_settler.run_once(self.store, grace=0.0), self.reference.strand)
        if what == "recover":
            self._agree(self.store.leases.recover([host]), lambda: self.reference.recover([host]))
        elif what == "lose":
            self._agree(lost(), lambda: self.reference.lose(host))

    # Time and duties

    @rule(
        seconds=st.sampled_from([0.5, 5.0, 15.0, TTL + 1, -2.0]),
        duty=st.sampled_from(["promote", "promote", "reap", "reap", "expire", "purge", "resolve", None]),
    )
    def advance(self, seconds: float, duty: str | None) -> None:
        self.bench.advance(seconds)
        if duty is not None:
            self._do(duty)

    # What must hold after every step

    @invariant()
    def check(self) -> None:
        self.agrees = False
        self.bench.run(self._check())
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
        assert [attempt.cause for attempt in attempts if attempt.cause] == [cause for cause, _ in expected.ledger]
        tokens = [attempt.token for attempt in attempts]
        assert tokens == sorted(set(tokens))
        if job.error is not None and job.error.code == "dependency_failed":
            assert any(need in job.error.message for need in expected.needs)

    def teardown(self) -> None:
        if self.agrees:
            self._tidy_up()

    def _tidy_up(self) -> None:
        """Let a person and some workers see to everything: then each job must end, or be gone."""
        if len(self.ids) % 2:
            self._do("purge")
        for queue in QUEUES:
            self._pause_queue(queue, False)
        for lane in LANES:
            self._pause_lane(lane, False)
        for _ in range(3 * len(self.reference.jobs) + 3):
            left = [job for job in self.reference.jobs.values() if not job.status.terminal or job.blocks_lane]
            if not left:
                break
            self._push(left)
            self.check()
        assert {job.status for job in self.known.values()} <= {status for status in Status if status.terminal}

    def _push(self, left: Sequence[RefJob]) -> None:
        for job in left:
            if job.status is Status.PENDING:
                self._release(job.id)
            elif job.status is Status.PAUSED:
                self._resolve(job.id)
            elif job.blocks_lane:
                self._dismiss(job.id)
        self.advance(TTL + 300, "promote")
        self._do("reap")
        given = [lease for worker in HOSTS for lease in self._claim(worker, self._pairs(worker), 10, True)]
        self._finish([(lease, Outcome.succeeded()) for lease in given])

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
        got, message = self.bench.run(asked())
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
        got = self.bench.run(self.store.leases.claim(worker, pairs, slots=slots, ttl=TTL, domains=domains))
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

    def _hand_over(self, lease: Lease, delay: float, *, worn: bool = False) -> bool:
        held = self.reference.hand_over(lease, delay, worn=worn)
        self._agree(
            self.store.leases.hand_over([lease], delay=delay, adoption_failed=worn),
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


def seen(job: Job) -> dict[str, object]:
    """A job as the reference records it."""
    stop = stop_kind(job)
    return {
        **{name: getattr(job, name) for name in RECORD},
        "error": None if job.error is None else job.error.code,
        # What was carried out, or came too late, may stay on the record; what waits must be there.
        "stop": stop if job.status is Status.RUNNING or stop is StopKind.DELETE else None,
    }


def label(event: Event) -> str:
    """An event as the reference tells it."""
    return f"{event.type}:{event.data.get('action' if event.type == 'audit' else event.type, '')}"


def granted(lease: Lease) -> dict[str, object]:
    """What a lease says, as `grant` expects it."""
    standing = {name: getattr(lease.adoption, name) for name in STANDING}
    return {**{name: getattr(lease, name) for name in GRANT}, **standing, "stop": stop_kind(lease)}


def grant(job: RefJob) -> dict[str, object]:
    return {name: getattr(job, name) for name in (*GRANT, *STANDING, "stop")}


def stop_kind(of: Job | Lease | Beat) -> StopKind | None:
    request = of.adoption.stop_request if isinstance(of, Lease) else of.stop_request
    return None if request is None else request.kind


async def done(call: Awaitable[object]) -> None:
    """Await a call whose answer the next check looks at anyway."""
    await call


@pytest.fixture
def bench(kind: str, clean_url: str) -> Iterator[Bench]:
    bench = Bench(kind, clean_url)
    yield bench
    bench.close()


@pytest.mark.timeout(
    900
)  # Seconds when it holds; a failure is made small first, which Hypothesis ends after 5 minutes.
def test_any_sequence_of_operations_keeps_the_promises(kind: str, bench: Bench) -> None:
    """Proves J3, J4, J6, J8, L3, L4, L9, L11, L13, N2, N6, N8, C8; and J2, N1, C1, E1 but for crashes and races."""
    longer = os.environ.get("HOLDFAST_MACHINE_EXAMPLES")

    class Bound(Machine):
        def __init__(self) -> None:
            super().__init__(bench)

    run_state_machine_as_test(
        Bound,
        settings=settings(
            max_examples=int(longer or EXAMPLES[kind]),
            stateful_step_count=STEPS,
            derandomize=longer is None,
            database=None,
            deadline=None,
            print_blob=True,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        ),
    )
