"""Functions in this worker: called on its loop or in a thread, stopped through their cancel token.

A small job costs one task and its share of two statements. What a function has to say (log, progress, usage) is
appended while it runs, a few times a second, and only if it says something.
"""

import asyncio
import contextlib
import contextvars
import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from holdfast.budgets import EXCEEDED
from holdfast.errors import HoldfastError
from holdfast.model import Cause, Error, NewEvent, Outcome, Policy, Status, StopKind, StopPhase
from holdfast.runner.base import CannotStart, End
from holdfast.runner.function import Cancelled, CancelToken, Context, Function, Functions
from holdfast.runner.secrets import NO_MASK, Mask, find_secrets
from holdfast.worker.classify import classify
from holdfast.worker.completer import retried
from holdfast.worker.desk import Desk
from holdfast.worker.journal import Journal
from holdfast.worker.lease import Hold
from holdfast.worker.readiness import Unready, make_ready

log = logging.getLogger(__name__)

SHIP_SECONDS = 0.25
LAST_SECONDS = 0.5
DRAIN = "drain"
CAUSES = {
    "cancel": Cause.CANCELLED,
    "interrupt": Cause.INTERRUPTED,
    "timeout": Cause.TIMED_OUT,
    "idle_timeout": Cause.IDLE_TIMEOUT,
    "budget": Cause.CANCELLED,
    DRAIN: Cause.DRAINED,
}
_decode = msgspec.json.Decoder().decode
_NO_POLICY = Policy()


class FunctionRuns:
    """All functions that this worker runs now."""

    def __init__(self, desk: Desk, functions: Functions, *, threads: int, done: Callable[[Hold], None]) -> None:
        self.desk = desk
        self._functions = functions
        self.threads = ThreadPoolExecutor(threads, thread_name_prefix="holdfast-function")
        self._done = done
        self._runs: set[FunctionRun] = set()
        self._empty = asyncio.Event()
        self.thread = threading.get_ident()
        self._tasks: set[asyncio.Task[None]] = set()
        self.stuck_threads = 0
        """Threads with a function in them that was given up."""

    def launch(self, hold: Hold) -> None:
        """Run a function that was claimed just now."""
        run = FunctionRun(self, hold)
        self._runs.add(run)
        # Reason for a bare task: one that does not end when it is cancelled must not keep the worker from leaving.
        run.task = asyncio.create_task(run.run())
        self._tasks.add(run.task)
        run.task.add_done_callback(self._tasks.discard)

    def settle_orphan(self, hold: Hold) -> None:
        """A function that another worker left behind died with it."""
        stop = hold.lease.adoption.stop_request
        if stop is None:
            end = End(cause=Cause.LOST)
        else:
            end = End(cause=Cause.INTERRUPTED if stop.kind is StopKind.INTERRUPT else Cause.CANCELLED)
        self.finish(hold, classify(end, hold.lease))

    def find(self, name: str) -> Function | None:
        return self._functions.get(name)

    def finish(self, hold: Hold, outcome: Outcome, run: "FunctionRun | None" = None) -> None:
        """Hand an outcome in; the hold is done when it has landed, or turned out to be lost."""

        def answer(found: Status | Exception | None) -> None:
            if isinstance(found, Exception):
                message = str(found) if isinstance(found, HoldfastError) else "its outcome could not be written"
                log.error("job %s: %s", hold.lease.id, found)
                self.finish(hold, Outcome.failed("function_error", message), run)
                return
            self.desk.at("finished", hold.lease)
            self._forget(run)
            self._done(hold)

        hold.finishing = True
        self.desk.finishes.put((hold.lease, outcome), answer)

    def drop(self, run: "FunctionRun") -> None:
        """Forget a run whose lease is lost."""
        self._forget(run)
        self._done(run.hold)

    def _forget(self, run: "FunctionRun | None") -> None:
        if run is not None:
            self._runs.discard(run)
            if not self._runs:
                self._empty.set()

    async def drain(self, grace: float) -> None:
        """Give functions their time to end; then hand those back that have not, as `drained`."""
        for run in list(self._runs):
            run.stop(DRAIN)
        if self._runs:
            self._empty.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace):
                    await self._empty.wait()
        for run in list(self._runs):
            run.give_up()
        if self._runs:
            await self._empty.wait()

    @property
    def stuck(self) -> bool:
        """Whether something that was given up still runs: it would keep the process."""
        return self.stuck_threads > 0 or bool(self._tasks)

    async def close(self) -> None:
        """Let go; what was cancelled gets a last moment to end."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=LAST_SECONDS)
        self.threads.shutdown(wait=False, cancel_futures=True)


class FunctionRun:
    """One call of one function."""

    __slots__ = (
        "_deadline", "_end", "_gave_up", "_heard_at", "_idle", "_journal", "_loop", "_mask", "_policy", "_rung_lock",
        "_runs", "_shipping", "_thread", "_timeout", "cancel", "hold", "task",
    )  # fmt: skip

    def __init__(self, runs: FunctionRuns, hold: Hold) -> None:
        self.hold = hold
        self.task: asyncio.Task[None] | None = None
        self._runs = runs
        self._policy = _NO_POLICY if hold.lease.policy_json is None else hold.lease.policy
        self._loop = asyncio.get_running_loop()
        self.cancel = CancelToken(self._loop)
        self._journal: Journal | None = None
        self._shipping: asyncio.TimerHandle | None = None
        self._timeout: asyncio.TimerHandle | None = None
        self._idle: asyncio.TimerHandle | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._heard_at = 0.0
        self._thread = False
        self._gave_up = False
        self._mask = NO_MASK
        self._end: End | None = None
        self._rung_lock: asyncio.Lock | None = None
        hold.on_change = self._changed

    async def run(self) -> None:
        """Call the function and hand in how it ended. Once it has ended, nothing cancels this task any more."""
        self._end = await self._safely()
        if self._journal is not None and not self.hold.lost and not self._gave_up and not await self._flush():
            self.hold.lose()
        if self._gave_up:
            return
        if self.hold.lost:
            self._runs.drop(self)
            return
        if self.hold.stop is not None:
            await self._tell_rung(StopPhase.DEAD)
        self._runs.finish(self.hold, classify(self._end, self.hold.lease), self)

    async def _safely(self) -> End:
        try:
            return await self._call()
        except asyncio.CancelledError:
            return self._stopped() or _failed("internal", "the worker cancelled it, and nobody knows why")
        except Exception as error:
            log.exception("job %s: the worker could not run it", self.hold.lease.id)
            return _failed("internal", f"the worker failed: {error}")
        finally:
            self._cancel_timers()

    async def _call(self) -> End:
        lease = self.hold.lease
        self._runs.desk.at("claimed", lease)
        function = self._runs.find(lease.capability.removeprefix("function:"))
        if function is None:
            return End(cause=Cause.DRAINED)
        checked = lease.lane is not None or self._policy.check is not None
        if checked and (unready := await self._unready()) is not None:
            return unready
        inputs = _decode(lease.inputs_json)
        if (inputs or not function.plain) and (wrong := function.arguments(inputs)) is not None:
            return _failed("contract_violation", f"its inputs do not fit function {function.name}: {wrong}")
        secrets: Mapping[str, str] = {}
        if self._policy.secrets:
            try:
                secrets = find_secrets(self._policy.secrets, self._runs.desk.settings.secrets_dir)
            except CannotStart as error:
                return End(cause=Cause.START_FAILED, error=error.error)
            self._mask = Mask(secrets.values())
        if function.context is not None:
            inputs[function.context] = self._context(secrets)
        self._set_timers(function)
        try:
            result = await self._invoke(function, inputs)
        except Cancelled:
            return self._stopped() or _failed("function_error", "it raised Cancelled though nobody asked it to stop")
        except asyncio.CancelledError:
            return self._stopped() or _failed("function_error", "it cancelled itself")
        except BaseException as error:
            if self.cancel.reason not in (None, DRAIN):
                return self._stopped() or End(cause=Cause.EXIT)
            log.info("job %s: function %s failed", lease.id, function.name, exc_info=error)
            return _failed("function_error", self._mask.text(f"{type(error).__name__}: {error}"))
        if self.cancel.reason not in (None, DRAIN):
            return self._stopped() or End(cause=Cause.EXIT)
        return End(cause=Cause.EXIT, result=self._mask.data(result) if self._mask else result)

    async def _invoke(self, function: Function, inputs: dict[str, Any]) -> Any:
        if function.is_async:
            return await function.call(**inputs)
        self._thread = True
        context = contextvars.copy_context()
        call = self._loop.run_in_executor(self._runs.threads, context.run, _caught, function.call, inputs)
        while not call.done():  # A thread cannot be cancelled: whoever cancels this task waits for it all the same.
            try:
                await asyncio.wait([call])
            except asyncio.CancelledError:
                if self._gave_up:
                    self._runs.stuck_threads += 1
                    raise
        result, error = call.result()
        if error is not None:
            raise error
        return await result if asyncio.iscoroutine(result) else result

    async def _unready(self) -> End | None:
        try:
            await make_ready(self._runs.desk.store, self.hold.lease, until=lambda: self.cancel.requested)
        except Unready as error:
            return End(cause=Cause.INTERRUPTED, error=Error(code="not_ready", message=str(error)))
        return self._stopped() if self.cancel.requested else None

    def _stopped(self) -> End | None:
        """What the stop was for, if there was one. A request may have grown since the function heard of it."""
        reason = self.cancel.reason
        if reason is None:
            return None
        if self.hold.stop is not None:
            return End(cause=Cause.INTERRUPTED if self.hold.stop.kind is StopKind.INTERRUPT else Cause.CANCELLED)
        if reason == "budget":
            over = self._journal.over_budget(self._policy.budget) if self._journal else None
            return End(cause=Cause.CANCELLED, error=Error(code=EXCEEDED, message=over or "over its budget"))
        return End(cause=CAUSES.get(reason, Cause.DRAINED))

    # Stopping

    def _changed(self) -> None:
        """The hold was lost, or a stop request came."""
        if self.hold.lost:
            self.stop("lost")
        elif self.hold.stop is not None:
            self.stop("interrupt" if self.hold.stop.kind is StopKind.INTERRUPT else "cancel")

    def stop(self, reason: str) -> None:
        """Ask politely; an async function that has not ended after the grace is cancelled."""
        if self._end is not None:
            return
        if self.cancel.reason is not None and self.cancel.reason != DRAIN:
            return
        if self.cancel.reason == DRAIN:
            self.cancel.reason = reason
        self.cancel._set(reason)
        if reason != DRAIN:
            if self.hold.stop is not None:
                self._told(StopPhase.SIGNALLED)
            self._deadline = self._loop.call_later(self._policy.stop_grace, self._insist)

    def _insist(self) -> None:
        if self._end is not None:
            return
        if self._thread:
            if self.hold.stop is not None:
                self._told(StopPhase.NOT_DEAD)
            log.warning("job %s: the function does not end though it was asked to", self.hold.lease.id)
        elif self.task is not None:
            self.task.cancel()
            self._deadline = self._loop.call_later(5.0, self._insist)

    def give_up(self) -> None:
        """The worker leaves: hand the job back. A thread that is still in it goes down with the process.

        One that has ended is not given up: what it said is on its way to the record, and its end follows.
        """
        if self._end is not None:
            return
        self._gave_up = True
        if self.task is not None:
            self.task.cancel()
        # Reason for a bare task: the function's own task may not end. It holds itself.
        task = self._loop.create_task(self._hand_back())
        _TELLING.add(task)
        task.add_done_callback(_TELLING.discard)

    async def _hand_back(self) -> None:
        """Finish as drained, after what was said so far: its usage counts."""
        if self._journal is not None and not await self._flush():
            self._runs.drop(self)
            return
        self._runs.finish(self.hold, classify(End(cause=Cause.DRAINED), self.hold.lease), self)

    def _told(self, rung: StopPhase) -> None:
        # Reason for a bare task: the rung is told beside the function, whose own task may be blocked. It holds itself.
        task = self._loop.create_task(self._tell_rung(rung))
        _TELLING.add(task)
        task.add_done_callback(_TELLING.discard)

    async def _tell_rung(self, rung: StopPhase) -> None:
        lease = self.hold.lease
        grace = self._policy.stop_grace if rung is StopPhase.SIGNALLED else None
        if self._rung_lock is None:
            self._rung_lock = asyncio.Lock()
        async with self._rung_lock:  # One after the other, in their order.
            await retried(lambda: self._runs.desk.store.leases.advance_stop(lease, rung, grace=grace), "a stop")

    # Limits of time

    def _set_timers(self, function: Function) -> None:
        timeout = self._policy.timeout or function.timeout or self._runs.desk.settings.timeout
        if timeout is not None:
            self._timeout = self._loop.call_later(timeout, self.stop, "timeout")
        if self._policy.idle_timeout is not None:
            self._heard_at = self._loop.time()
            self._idle = self._loop.call_later(self._policy.idle_timeout, self._look_idle)

    def _look_idle(self) -> None:
        assert self._policy.idle_timeout is not None
        silent = self._loop.time() - self._heard_at
        if silent >= self._policy.idle_timeout:
            self.stop("idle_timeout")
        else:
            self._idle = self._loop.call_later(self._policy.idle_timeout - silent, self._look_idle)

    def _cancel_timers(self) -> None:
        for timer in (self._timeout, self._idle, self._deadline, self._shipping):
            if timer is not None:
                timer.cancel()

    # What it says

    def _context(self, secrets: Mapping[str, str]) -> Context:
        lease = self.hold.lease
        return Context(
            job_id=lease.id,
            tenant=lease.tenant,
            attempt=lease.attempt,
            token=lease.token,
            cancel=self.cancel,
            emit=self._emit_soon,
            secrets=secrets,
        )

    def _emit_soon(self, event: NewEvent) -> None:
        """Take what the function says; from a thread it arrives before the news that the function returned."""
        if threading.get_ident() == self._runs.thread:
            self._emit(event)
        else:
            self._loop.call_soon_threadsafe(self._emit, event)

    def _emit(self, event: NewEvent) -> None:
        if self._journal is None:
            self._journal = Journal(self._runs.desk.store, self.hold.lease)
        self._heard_at = self._loop.time()
        if self._mask:
            event = NewEvent(type=event.type, data=self._mask.data(event.data))
        size = 0
        if event.type == "log":
            size = sum(len(line.encode(errors="replace")) + 1 for line in event.data["lines"])
            if self._journal.cut(size, self._runs.desk.settings.log_max_bytes):
                return
        if event.type != "usage" and self._journal.full(event):
            return
        self._journal.add(event, size)
        if self._shipping is None:
            self._shipping = self._loop.call_later(SHIP_SECONDS, self._ship)

    def _ship(self) -> None:
        self._shipping = None
        # Reason for a bare task: the function's own task may be anywhere. `run` flushes behind it, one at a time.
        task = self._loop.create_task(self._flush())
        _TELLING.add(task)
        task.add_done_callback(_TELLING.discard)

    async def _flush(self) -> bool:
        """Append what was said; False when the lease is lost."""
        assert self._journal is not None
        landed = await self._journal.flush()
        if not landed:
            self.hold.lose()
        elif self._journal.over_budget(self._policy.budget) is not None:
            self.stop("budget")
        return landed


_TELLING: set[asyncio.Task[Any]] = set()


def _caught(call: Callable[..., Any], inputs: Mapping[str, Any]) -> tuple[Any, BaseException | None]:
    """Call a function in its thread. A future cannot carry a StopIteration, so errors come back as values."""
    try:
        return call(**inputs), None
    except StopIteration as error:
        return None, RuntimeError(f"StopIteration: {error}")
    except BaseException as error:
        return None, error


def _failed(code: str, message: str) -> End:
    return End(cause=Cause.EXIT, error=Error(code=code, message=message))
