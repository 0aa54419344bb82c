"""Functions in a worker: their inputs, results, errors and events, and how they are stopped."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from holdfast.client.app import Holdfast
from holdfast.errors import ConfigError, Invalid
from holdfast.model import Status
from holdfast.runner.function import Context, FunctionRegistry
from holdfast.store.events import Events
from tests.support.in_process_workers import InProcessWorkers


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


async def test_log_of_a_function_is_cut_at_the_cap_and_its_other_events_are_kept(workers: InProcessWorkers) -> None:
    workers.set(log_max_bytes=100)

    @workers.functions.add
    async def chatty(ctx: Context) -> None:
        for n in range(50):
            ctx.log(f"line {n:>3}")
        ctx.progress(100)

    job = await workers.submit("chatty")
    async with workers.worker():
        ended = await workers.ended(job, Status.SUCCEEDED)
    kept = [f"line {n:>3}" for n in range(11)]
    assert await workers.log(job) == [*kept, "[holdfast: the log is over 100 bytes; what follows is not kept]"]
    assert ended.progress == {"percent": 100}


async def test_cap_of_the_log_is_for_all_attempts_of_a_function(workers: InProcessWorkers) -> None:
    """A line that is too long is cut, and so is what follows it; the next attempt begins where the first one ended."""
    workers.set(log_max_bytes=100)

    @workers.functions.add
    async def failing(ctx: Context) -> None:
        ctx.log("x" * 59)
        ctx.log("y" * 59)
        ctx.log("short")
        if ctx.attempt == 1:
            raise RuntimeError("again")

    job = await workers.submit("failing", max_attempts=2, retry={"base": 0.01, "cap": 0.01})
    async with workers.worker():
        await workers.ended(job, Status.SUCCEEDED)
    note = "[holdfast: the log is over 100 bytes; what follows is not kept]"
    assert await workers.log(job) == ["x" * 59, note, note]


async def test_output_of_a_function_is_in_its_history(workers: InProcessWorkers) -> None:
    """Progress, usage, log and events of its own, from the loop and from a thread, also just before it returns.

    Proves R18, E7, C7.
    """

    @workers.functions.add
    async def chatty(ctx: Context) -> None:
        for n in range(3):
            ctx.log(f"line {n}")
            ctx.usage(tokens=10, pages=1)
        await asyncio.sleep(0.6)  # Reason: the events before and after it are in different batches.
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


async def test_result_that_is_not_json_fails_only_its_own_job(workers: InProcessWorkers) -> None:
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


async def test_unknown_function_waits_and_explain_says_so(workers: InProcessWorkers) -> None:
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


async def test_an_application_submits_its_functions(workers: InProcessWorkers) -> None:
    app = Holdfast(workers.settings.url)

    @app.function(queue="mail", timeout=30)
    async def send(to: str, ctx: Context) -> str:
        return f"to {to}"

    @app.function()
    def other() -> None: ...

    workers.functions = app.functions
    async with app:
        job = (await app.submit(send, to="a")).record
        assert (job.queue, job.policy.timeout, job.spec) == ("mail", 30, {"name": "send"})
        with pytest.raises(Invalid, match="inputs"):
            await app.submit("send")
        with pytest.raises(Invalid, match="not registered"):
            await app.submit(print)  # type: ignore[call-overload]
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


async def test_large_burst_of_events_is_kept(workers: InProcessWorkers) -> None:
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


async def test_invalid_events_are_refused_in_the_function(workers: InProcessWorkers) -> None:
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


async def test_events_that_cannot_be_stored_are_replaced_by_a_note(
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
