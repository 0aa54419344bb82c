"""Random operations of several workers and callers, under a clock that moves, against a model in plain Python.

After every step the whole store must be what the reference says, and keep the promises of DESIGN §1 on its own. At the
end a person settles everything, and then every job must end. Every run tries the same examples, but with
`HOLDFAST_MACHINE_EXAMPLES=5000` and `--timeout=0` it searches longer, with new seeds.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from holdfast.duties import orphan_settler
from holdfast.model import (
    Cause,
    Error,
    Outcome,
    Status,
    StopKind,
    StopPhase,
    Verb,
)
from tests.support.reference_jobs import WEARY, RefJob
from tests.support.stateful_steps import CAPABILITIES, HOSTS, LANES, QUEUES, StatefulSteps
from tests.support.stateful_store import ExampleStore, done, stop_kind
from tests.support.store_harness import TTL

Rule = TypeVar("Rule", bound=Callable[..., Any])
EXAMPLES = {"sqlite": 100, "postgres": 60}
STEPS = 40
FEW_JOBS, MOST_JOBS = 3, 14
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
given_any = precondition(lambda machine: machine.given)
any_open = precondition(lambda machine: machine.reference.open_jobs())


def movable(verb: Verb) -> Callable[[Rule], Rule]:
    """A rule that makes sense only while the verb can move a job; it may still be tried on another one."""
    return precondition(lambda machine: machine.lawful(verb))


class StoreMachine(StatefulSteps):
    """The rules: what callers, workers, duties and the clock may do next."""

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
        while self._hand_over(lease, 0.0, adoption_failed=True) and adopted < WEARY:
            adopted += 1
            lease = next(new for new in self._claim(worker, [], 0, True) if new.id == lease.id)
        self._do("abandon")

    @given_any
    @rule(worker=workers)
    def die(self, worker: str) -> None:
        """Somebody took the lock file of a worker."""
        self._agree(self.store.leases.orphan(worker), lambda: self.reference.die(worker))

    @precondition(lambda self: any(job.orphaned or job.possibly_lost for job in self.reference.jobs.values()))
    @rule(host=st.sampled_from(sorted(set(HOSTS.values()))), what=st.sampled_from(["strand", "recover", "lose"]))
    def lose_sight(self, host: str, what: str) -> None:
        """Nobody reaches what runs somewhere; or somebody does again; or a person gives it up."""

        async def lost() -> Sequence[str]:
            return list((await self.store.workers.lost(host)).jobs)

        self.example_store.advance(0.5)
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
        self.example_store.advance(seconds)
        if duty is not None:
            self._do(duty)

    # At the end

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
        self.check()  # Where nothing was left to push, the purge above has changed jobs since the last check.
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


@pytest.fixture
def example_store(kind: str, clean_url: str) -> Iterator[ExampleStore]:
    example_store = ExampleStore(kind, clean_url)
    yield example_store
    example_store.close()


@pytest.mark.timeout(
    900
)  # Seconds when it holds; a failure is made small first, which Hypothesis ends after 5 minutes.
def test_any_sequence_of_operations_keeps_the_promises(kind: str, example_store: ExampleStore) -> None:
    """Proves J3, J4, J6, J8, L3, L4, L9, L11, L13, N2, N6, N8, C8; and J2, N1, C1, E1 but for crashes and races."""
    longer = os.environ.get("HOLDFAST_MACHINE_EXAMPLES")

    class BoundMachine(StoreMachine):
        def __init__(self) -> None:
            super().__init__(example_store)

    run_state_machine_as_test(
        BoundMachine,
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
