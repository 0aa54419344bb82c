"""Functions in a worker: what they get, what becomes of what they return, raise or say, and how they are stopped."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from holdfast.client.app import Holdfast
from holdfast.errors import ConfigError, Invalid, StoreUnreachable
from holdfast.model import Cause, Job, Status, StopRequest
from holdfast.runner.function import Cancelled, Context, FunctionRegistry
from holdfast.store.events import Events
from holdfast.worker.function_call import FunctionCall
from holdfast.worker.held_leases import HeldLease
from tests.support.in_process_workers import InProcessWorkers, eventually


async def test_sync_and_async_functions_get_their_inputs_and_give_a_result(workers: InProcessWorkers) -> None:
    """Proves R18."""

    @workers.functions.add
    async def add(a: int, b: int = 2) -> int:
        return a + b

    @workers.functions.add(name="text.upper")
    def upper(text: str) -> dict[str, object]:
        return {"text": text.upper(), "main": threading.current_thread() is threading.main_thread()}

    one = await workers.submit("add", inputs={"a": 1})
    two = await workers.submit("text.upper", inputs={"text": "hi"})
    async with workers.worker():
        assert (await workers.ended(one, Status.SUCCEEDED)).result == 3
        assert (await workers.ended(two, Status.SUCCEEDED)).result == {"text": "HI", "main": False}


async def test_an_exception_is_the_error_and_its_traceback_is_for_operators_alone(
    workers: InProcessWorkers, caplog: pytest.LogCaptureFixture
) -> None:
    """Proves R18."""
    caplog.set_level("INFO")

    @workers.functions.add
    def broken() -> None:
        secret_local = "visible in a traceback"
        raise LookupError(f"no such row ({len(secret_local)})")

    job = await workers.submit("broken")
    async with workers.worker():
        ended = await workers.ended(job, Status.FAILED)
    assert ended.error is not None
    assert (ended.error.code, ended.error.message) == ("function_error", "LookupError: no such row (22)")
    assert "Traceback" not in repr(await workers.events(job))
    assert "secret_local" in caplog.text or "raise LookupError" in caplog.text


async def test_what_a_function_says_is_in_its_history(workers: InProcessWorkers) -> None:
    """Progress, usage, log and events of its own, from the loop and from a thread, also just before it returns.

    Proves R18, E7, C7.
    """

    @workers.functions.add
    async def chatty(ctx: Context) -> None:
        for n in range(3):
            ctx.log(f"line {n}")
            ctx.usage(tokens=10, pages=1)
        await asyncio.sleep(0.6)
        ctx.progress(50, "half")
        ctx.event("halfway", at=1)

    @workers.functions.add
    def threaded(context: Context) -> None:
        context.log("from", "a thread")
        context.progress(100)

    one, two = await workers.submit("chatty"), await workers.submit("threaded")
    async with workers.worker():
        done = await workers.ended(one, Status.SUCCEEDED)
        also = await workers.ended(two, Status.SUCCEEDED)
    assert await workers.log(one) == ["line 0", "line 1", "line 2"]
    assert (done.usage, done.progress) == ({"tokens": 30, "pages": 3}, {"percent": 50, "message": "half"})
    assert [event.data for event in await workers.events(one, "halfway")] == [{"at": 1}]
    assert (await workers.log(two), also.progress) == (["from", "a thread"], {"percent": 100})
    assert [event.type for event in await workers.events(one)][-1] == "status"
    assert [event.seq for event in await workers.events(one)] == list(range(1, done.last_seq + 1))


async def test_usage_adds_up_over_attempts_and_over_its_budget_a_job_fails_for_good(workers: InProcessWorkers) -> None:
    """Proves C6, C7."""

    @workers.functions.add
    async def spend(ctx: Context) -> None:
        ctx.usage(tokens=60)
        if ctx.attempt == 1:
            raise RuntimeError("once more")
        await ctx.cancel.requested_async()
        ctx.cancel.check()

    retry = {"base": 0.01, "cap": 0.01, "on": ["failed"]}
    job = await workers.submit("spend", budget={"tokens": 100}, max_attempts=5, retry=retry)
    async with workers.worker():
        ended = await workers.ended(job, Status.FAILED)
    assert ended.error is not None
    assert (ended.error.code, ended.error.message) == ("budget_exceeded", "used 120 tokens of 100")
    assert (ended.attempts, ended.usage) == (2, {"tokens": 120})


async def test_cancel_and_interrupt_reach_a_function_through_its_token(workers: InProcessWorkers) -> None:
    """An async function that ignores it is cancelled after its grace. Proves C1, C4, R18."""
    seen = []

    @workers.functions.add
    async def polite(ctx: Context) -> None:
        await ctx.cancel.requested_async()
        seen.append(ctx.cancel.reason)
        raise Cancelled

    @workers.functions.add
    def blocking(ctx: Context) -> str:
        ctx.cancel.wait()
        return "returns all the same"

    @workers.functions.add
    async def deaf() -> None:
        await asyncio.sleep(3600)

    jobs = [await workers.submit(name, stop_grace=0.2) for name in ("polite", "blocking", "deaf")]
    async with workers.worker():
        for job in jobs:
            await workers.running(job)
        await workers.store.jobs.interrupt(jobs[0].id)
        await workers.store.jobs.cancel(jobs[1].id)
        await workers.store.jobs.cancel(jobs[2].id)
        paused = await workers.ended(jobs[0], Status.PAUSED)
        await workers.ended(jobs[1], Status.CANCELLED)
        await workers.ended(jobs[2], Status.CANCELLED)
    assert seen == ["interrupt"]
    assert paused.error is not None
    assert paused.error.code == "interrupted"
    told = [event.data["cancel"] for event in await workers.events(jobs[2], "cancel")]
    assert told == ["requested", "signalled", "dead"]


async def test_a_sync_function_that_does_not_end_stays_running_until_it_returns(workers: InProcessWorkers) -> None:
    """Proves R23."""
    go = threading.Event()

    @workers.functions.add
    def stubborn() -> None:
        go.wait(60)

    job = await workers.submit("stubborn", stop_grace=0.1)
    async with workers.worker():
        await workers.running(job)
        await workers.store.jobs.cancel(job.id)

        async def not_dead() -> bool:
            return "not_dead" in [event.data["cancel"] for event in await workers.events(job, "cancel")]

        await eventually(not_dead, "it is told that it is not dead")
        assert (await workers.get(job)).status is Status.RUNNING
        go.set()
        await workers.ended(job, Status.CANCELLED)


async def test_timeouts_of_the_job_and_of_the_function(workers: InProcessWorkers) -> None:
    """Proves R9 for functions."""

    @workers.functions.add(timeout=0.2)
    async def bounded() -> None:
        await asyncio.sleep(3600)

    @workers.functions.add
    async def silent(ctx: Context) -> None:
        for _ in range(3):
            ctx.log("something")
            await asyncio.sleep(0.1)
        await asyncio.sleep(3600)

    one = await workers.submit("bounded", stop_grace=0)
    two = await workers.submit("silent", stop_grace=0, idle_timeout=0.3)
    async with workers.worker():
        first = await workers.ended(one, Status.TIMED_OUT)
        second = await workers.ended(two, Status.TIMED_OUT)
    assert first.error is not None
    assert second.error is not None
    assert (first.error.code, second.error.code) == ("timed_out", "idle_timeout")
    assert len(await workers.log(two)) == 3


async def test_inputs_that_do_not_fit_fail_at_once_and_are_not_retried(workers: InProcessWorkers) -> None:
    """Proves R17 for functions."""

    @workers.functions.add
    async def takes(a: int, ctx: Context) -> None: ...

    missing = await workers.submit("takes", max_attempts=3)
    unknown = await workers.submit("takes", inputs={"a": 1, "b": 2}, max_attempts=3)
    forged = await workers.submit("takes", inputs={"a": 1, "ctx": 2}, max_attempts=3)
    async with workers.worker():
        for job, text in ((missing, "'a'"), (unknown, "'b'"), (forged, "ctx is the context")):
            ended = await workers.ended(job, Status.FAILED)
            assert ended.error is not None
            assert ended.error.code == "contract_violation"
            assert text in ended.error.message
            assert ended.attempts == 1


async def test_a_result_that_is_no_json_fails_its_own_job_alone(workers: InProcessWorkers) -> None:
    @workers.functions.add
    async def bad() -> object:
        return object()

    @workers.functions.add
    async def good() -> int:
        return 1

    jobs = [await workers.submit(name) for name in ("good", "bad", "good")]
    async with workers.worker():
        await workers.ended(jobs[0], Status.SUCCEEDED)
        ended = await workers.ended(jobs[1], Status.FAILED)
        await workers.ended(jobs[2], Status.SUCCEEDED)
    assert ended.error is not None
    assert "cannot be written as JSON" in ended.error.message


async def test_a_function_nobody_knows_waits_and_explain_says_so(workers: InProcessWorkers) -> None:
    """10,000 jobs of an unknown function at the head keep nobody from the others. Proves L21."""

    @workers.functions.add
    async def known() -> str:
        return "ran"

    unknown = [{"runner": "function", "spec": {"name": "unknown"}} for _ in range(10_000)]
    ids = await workers.store.jobs.submit_many(unknown)
    job = await workers.submit("known")
    async with workers.worker():
        await workers.ended(job, Status.SUCCEEDED)
        why = await workers.store.explain.job(ids[0])
        assert "unknown" in str(why)
        assert (await workers.get(ids[0])).status is Status.QUEUED


async def test_a_blocked_loop_keeps_its_leases(workers: InProcessWorkers) -> None:
    """An async function that blocks the worker's loop for longer than a lease lasts keeps it. Proves L8."""
    workers.set(lease_ttl=1.0, heartbeat_interval=0.3)

    @workers.functions.add
    async def rude() -> str:
        time.sleep(3.0)  # noqa: ASYNC251 three times the lease, and the loop stands still
        return "done"

    job = await workers.submit("rude")
    async with workers.worker():
        ended = await workers.ended(job, Status.SUCCEEDED)
    assert ended.attempts == 1
    assert [event.data for event in await workers.events(job, "lease")] == []


async def test_a_worker_that_leaves_lets_short_functions_end_and_gives_long_ones_back(
    workers: InProcessWorkers,
) -> None:
    """Proves C9, L13: what was drained does not count."""
    workers.set(drain_grace=0.5)
    started = asyncio.Event()

    @workers.functions.add
    async def short() -> str:
        started.set()
        await asyncio.sleep(0.2)
        return "ended"

    @workers.functions.add
    async def long() -> None:
        await asyncio.sleep(3600)

    @workers.functions.add
    async def considerate(ctx: Context) -> None:
        await ctx.cancel.requested_async()
        ctx.cancel.check()

    jobs = {name: await workers.submit(name) for name in ("short", "long", "considerate")}
    async with workers.worker():
        for job in jobs.values():
            await workers.running(job)
    assert (await workers.get(jobs["short"])).result == "ended"
    for name in ("long", "considerate"):
        left = await workers.get(jobs[name])
        assert (left.status, left.attempts) == (Status.QUEUED, 0)
        (attempt,) = await workers.store.attempts.list(left.id)
        assert attempt.cause is Cause.DRAINED
        await workers.store.jobs.cancel(left.id)
    assert started.is_set()


async def test_what_a_function_said_is_kept_when_its_worker_leaves_before_the_database_is_back(
    workers: InProcessWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proves C9, E3: it has ended, and its worker's patience too; still its log comes first, and then its end."""
    workers.set(drain_grace=0.1)
    append, give_up = Events.append, FunctionCall.give_up
    tried, given_up, back = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def away(self: Events, *args: Any, **fields: Any) -> Any:
        tried.set()
        if not back.is_set():
            raise StoreUnreachable("away")
        return await append(self, *args, **fields)

    def told(self: FunctionCall) -> None:
        give_up(self)
        given_up.set()

    monkeypatch.setattr(Events, "append", away)
    monkeypatch.setattr(FunctionCall, "give_up", told)

    @workers.functions.add
    async def talkative(ctx: Context) -> str:
        ctx.log("a line")
        return "ended"

    job = await workers.submit("talkative")
    async with workers.worker() as worker:
        await tried.wait()
        worker.drain()
        await given_up.wait()
        back.set()
    assert (await workers.get(job)).result == "ended"
    assert [event.data["lines"] for event in await workers.events(job, "log")] == [["a line"]]


async def test_orphaned_functions_are_settled_by_the_next_worker_as_on_lost_says(workers: InProcessWorkers) -> None:
    """Proves L11."""

    @workers.functions.add
    async def again(ctx: Context) -> int:
        return ctx.attempt

    ids = {}
    for on_lost, attempts in (("requeue", 2), ("requeue", 1), ("fail", 3), ("hold", 3)):
        job = await workers.submit("again", on_lost=on_lost, max_attempts=attempts, retry={"base": 0.01, "cap": 0.01})
        ids[on_lost, attempts] = job.id
    # A worker claims them all and dies without a word.
    pair = workers.functions.names
    assert pair == ["again"]
    from holdfast.model import FUNCTION_DOMAIN, Claimable  # noqa: PLC0415

    claimed = await workers.store.leases.claim(
        "dead", [Claimable(queue="default", capability="function:again", domain=FUNCTION_DOMAIN)], slots=9, ttl=0.01
    )
    assert len(claimed.claimed) == 4
    async with workers.worker():
        requeued = await workers.ended(ids["requeue", 2], Status.SUCCEEDED)
        spent = await workers.ended(ids["requeue", 1], Status.FAILED)
        failed = await workers.ended(ids["fail", 3], Status.FAILED)
        held = await workers.ended(ids["hold", 3], Status.PAUSED)
    assert (requeued.result, requeued.attempts) == (2, 2)
    for job in (spent, failed, held):
        assert job.error is not None
        assert (job.error.code, job.attempts) == ("lost", 1)


async def test_an_application_submits_its_functions(workers: InProcessWorkers) -> None:
    app = Holdfast(workers.settings.url)

    @app.function(queue="mail", timeout=30)
    async def send(to: str, ctx: Context) -> str:
        return f"to {to}"

    @app.function()
    def other() -> None: ...

    workers.functions = app.functions
    async with app:
        job = await app.submit(send, to="a")
        assert (job.queue, job.policy.timeout, job.spec) == ("mail", 30, {"name": "send"})
        with pytest.raises(Invalid, match="inputs"):
            await app.submit("send")
        with pytest.raises(Invalid, match="not registered"):
            await app.submit(print)
    async with workers.worker({"mail": 1}):
        assert (await workers.ended(job)).result == "to a"
    assert await send("b", None) == "to b"  # type: ignore[arg-type]


def test_functions_that_cannot_work_are_refused_when_they_are_registered() -> None:
    functions = FunctionRegistry()

    @functions.add
    def once() -> None: ...

    with pytest.raises(ConfigError, match="two functions are called 'once'"):
        functions.add(name="once")(lambda: None)
    with pytest.raises(ConfigError, match="passed by name"):
        functions.add(name="positional")(lambda a, /: a)
    with pytest.raises(ConfigError, match="timeout"):
        functions.add(name="never", timeout=-1)(lambda: None)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Until this is set, the database takes no words."""
    taken = asyncio.Event()
    append = Events.append

    async def later(*arguments: Any, **named: Any) -> Any:
        await taken.wait()
        return await append(*arguments, **named)

    monkeypatch.setattr(Events, "append", later)
    return taken


async def test_a_function_that_ended_is_finished_however_slow_its_last_words_are(
    workers: InProcessWorkers, slow: asyncio.Event
) -> None:
    """Its timeout fires while the database is slow to take them: too late to matter."""

    @workers.functions.add(timeout=0.2)
    async def quick(ctx: Context) -> str:
        ctx.log("last words")
        return "done"

    job = await workers.submit("quick", stop_grace=0)
    async with workers.worker():
        await workers.running(job)
        await asyncio.sleep(0.6)  # Past the timeout and its grace.
        slow.set()
        assert (await workers.ended(job, Status.SUCCEEDED)).result == "done"


async def test_a_stop_that_comes_after_the_function_has_ended_does_not_cut_its_last_words(
    workers: InProcessWorkers, slow: asyncio.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proves C1. There is nothing to stop any more: what it said and how it ended are on their way."""
    heard = asyncio.Event()
    hear = HeldLease.receive_stop

    def noted(self: HeldLease, stop: StopRequest | None) -> None:
        hear(self, stop)
        if stop is not None:
            heard.set()

    monkeypatch.setattr(HeldLease, "receive_stop", noted)

    @workers.functions.add
    async def quick(ctx: Context) -> str:
        ctx.log("last words")
        return "done"

    job = await workers.submit("quick", stop_grace=0)
    async with workers.worker():
        await workers.running(job)
        await workers.store.jobs.cancel(job.id)
        await heard.wait()
        await asyncio.sleep(0.1)  # Past its grace.
        slow.set()
        assert (await workers.ended(job, Status.SUCCEEDED)).result == "done"
    assert await workers.log(job) == ["last words"]


async def test_a_function_that_outlives_its_cancellation_does_not_keep_the_worker(workers: InProcessWorkers) -> None:
    """Proves C9."""
    workers.set(drain_grace=0.2)
    go = asyncio.Event()

    @workers.functions.add
    async def stubborn() -> None:
        while not go.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await go.wait()

    job = await workers.submit("stubborn")
    async with workers.worker() as worker:
        await workers.running(job)
    assert worker.stuck
    assert (await workers.get(job)).status is Status.QUEUED
    go.set()
    await asyncio.sleep(0)
    await workers.store.jobs.cancel(job.id)


async def test_a_sync_function_may_raise_anything(workers: InProcessWorkers) -> None:
    @workers.functions.add
    def stops() -> object:
        return next(iter([]))

    @workers.functions.add
    def leaves() -> None:
        raise SystemExit(3)

    jobs = [await workers.submit("stops"), await workers.submit("leaves")]
    async with workers.worker():
        for job, text in zip(jobs, ("StopIteration", "SystemExit: 3"), strict=True):
            ended = await workers.ended(job, Status.FAILED)
            assert ended.error is not None
            assert text in ended.error.message


async def test_a_stop_request_may_grow_while_the_function_ends(workers: InProcessWorkers) -> None:
    """Interrupt, then cancel: it is cancelled. Proves C1."""
    go = asyncio.Event()

    @workers.functions.add
    async def slow(ctx: Context) -> None:
        await ctx.cancel.requested_async()
        await go.wait()
        ctx.cancel.check()

    job = await workers.submit("slow", stop_grace=30)
    async with workers.worker():
        await workers.running(job)
        await workers.store.jobs.interrupt(job.id)
        await eventually(lambda: _told(workers, job, "signalled"), "it is asked to stop")
        await workers.store.jobs.cancel(job.id)
        await asyncio.sleep(0.5)  # For the worker to hear of it; what it ends as does not depend on when it does.
        go.set()
        await workers.ended(job, Status.CANCELLED)


async def _told(workers: InProcessWorkers, job: Job, phase: str) -> bool:
    return phase in [event.data["cancel"] for event in await workers.events(job, "cancel")]


async def test_one_who_says_a_lot_at_once_loses_nothing(workers: InProcessWorkers) -> None:
    """More than fits in one batch. Proves R10 for functions."""

    @workers.functions.add
    async def chatty(ctx: Context) -> None:
        for n in range(8):
            ctx.event("chunk", n=n, text="x" * 900_000)
        ctx.usage(tokens=7)

    job = await workers.submit("chatty")
    async with workers.worker():
        ended = await workers.ended(job, Status.SUCCEEDED)
    assert [event.data["n"] for event in await workers.events(job, "chunk")] == list(range(8))
    assert ended.usage == {"tokens": 7}


async def test_what_cannot_be_said_is_refused_where_it_is_said(workers: InProcessWorkers) -> None:
    refused = []

    @workers.functions.add
    async def odd(ctx: Context) -> None:
        ways: list[Callable[[], None]] = [
            lambda: ctx.usage(tokens=float("inf")),
            lambda: ctx.usage(tokens=-1),
            lambda: ctx.event("a\0b"),
            lambda: ctx.event("x" * 65),
            lambda: ctx.event("status", status="succeeded"),
            lambda: ctx.event("fine", value=object()),
            lambda: ctx.event("fine", value="\ud800"),
        ]
        for say in ways:
            try:
                say()
            except Invalid as error:
                refused.append(error.field)
        ctx.log("lone \ud800 surrogate")

    job = await workers.submit("odd")
    async with workers.worker():
        await workers.ended(job, Status.SUCCEEDED)
    assert refused == ["tokens", "tokens", "type", "type", "type", "data", "data"]
    assert await workers.log(job) == ["lone ? surrogate"]


async def test_events_that_the_database_cannot_keep_are_left_out_with_a_mark(
    workers: InProcessWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = Events.append

    async def picky(self: Events, lease: Any, batch: int, events: Any, **named: Any) -> Any:
        if any(event.type == "poison" for event in events):
            raise Invalid("data", "cannot be kept")
        return await append(self, lease, batch, events, **named)

    monkeypatch.setattr(Events, "append", picky)

    @workers.functions.add
    async def says(ctx: Context) -> str:
        ctx.event("poison")
        return "all the same"

    job = await workers.submit("says")
    async with workers.worker():
        assert (await workers.ended(job, Status.SUCCEEDED)).result == "all the same"
    assert await workers.log(job) == ["[holdfast: 1 events could not be kept]"]
