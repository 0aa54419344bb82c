"""One call of one function, from its inputs to its outcome: stop requests, timeouts, events.

Logs, progress and usage are appended while the function runs, a few times a second, and only if there are any.
"""

import asyncio
import contextvars
import logging
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.budgets import EXCEEDED
from holdfast.model import FUNCTION, Cause, Error, NewEvent, Policy, StopKind, StopPhase
from holdfast.runner.base import AttemptEnd, CannotStart
from holdfast.runner.function import Cancelled, CancelToken, Context, Function
from holdfast.runner.secrets import NO_MASK, Mask, find_secrets
from holdfast.worker.batch_writer import with_retries
from holdfast.worker.classify import classify, stop_cause
from holdfast.worker.event_writer import EventWriter
from holdfast.worker.held_leases import HeldLease
from holdfast.worker.readiness import CheckTimedOut, make_ready

if TYPE_CHECKING:
    from holdfast.worker.functions import FunctionExecutor

log = logging.getLogger(__name__)

SHIP_SECONDS = 0.25
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


class FunctionCall:
    """One call of one function."""

    __slots__ = (
        "_deadline",
        "_end",
        "_event_writer",
        "_executor",
        "_gave_up",
        "_heard_at",
        "_idle",
        "_loop",
        "_mask",
        "_policy",
        "_shipping",
        "_stop_phase_lock",
        "_thread",
        "_timeout",
        "cancel",
        "held",
        "task",
    )  # fmt: skip

    def __init__(self, executor: "FunctionExecutor", held: HeldLease) -> None:
        self.held = held
        self.task: asyncio.Task[None] | None = None
        self._executor = executor
        self._policy = _NO_POLICY if held.lease.policy_json is None else held.lease.policy
        self._loop = asyncio.get_running_loop()
        self.cancel = CancelToken(self._loop)
        self._event_writer: EventWriter | None = None
        self._shipping: asyncio.TimerHandle | None = None
        self._timeout: asyncio.TimerHandle | None = None
        self._idle: asyncio.TimerHandle | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._heard_at = 0.0
        self._thread = False
        self._gave_up = False
        self._mask = NO_MASK
        self._end: AttemptEnd | None = None
        self._stop_phase_lock: asyncio.Lock | None = None
        held.on_change = self._changed

    async def run(self) -> None:
        """Call the function and submit its outcome. Once the function has ended, nothing cancels this task any more."""
        self._end = await self._safely()
        if self._event_writer is not None and not self.held.lost and not self._gave_up and not await self._flush():
            self.held.lose()
        if self._gave_up:
            return
        if self.held.lost:
            self._executor.drop(self)
            return
        if self.held.stop is not None:
            await self._record_stop_phase(StopPhase.DEAD)
        self._executor.finish(self.held, classify(self._end, self.held.lease), self)

    async def _safely(self) -> AttemptEnd:
        try:
            return await self._call()
        except asyncio.CancelledError:
            return self._stopped() or _failed("internal", "the function was cancelled for an unknown reason")
        except Exception as error:
            log.exception("job %s: internal error while running the function; failing the attempt", self.held.lease.id)
            return _failed("internal", f"the worker failed: {error}")
        finally:
            self._cancel_timers()

    async def _call(self) -> AttemptEnd:
        lease = self.held.lease
        self._executor.services.at("claimed", lease)
        function = self._executor.find(lease.capability.removeprefix(f"{FUNCTION}:"))
        if function is None:
            return AttemptEnd(cause=Cause.DRAINED)
        checked = lease.lane is not None or self._policy.check is not None
        if checked and (unready := await self._unready()) is not None:
            return unready
        inputs = _decode(lease.inputs_json)
        if (inputs or not function.plain) and (wrong := function.arguments(inputs)) is not None:
            return _failed("contract_violation", f"the inputs do not fit function {function.name}: {wrong}")
        secrets: Mapping[str, str] = {}
        if self._policy.secrets:
            try:
                secrets = find_secrets(self._policy.secrets, self._executor.services.settings.secrets_dir)
            except CannotStart as error:
                return AttemptEnd(cause=Cause.START_FAILED, error=error.error)
            self._mask = Mask(secrets.values())
        if function.context is not None:
            inputs[function.context] = self._context(secrets)
        self._set_timers(function)
        try:
            result = await self._invoke(function, inputs)
        except Cancelled:
            return self._stopped() or _failed("function_error", "the function raised Cancelled without a stop request")
        except asyncio.CancelledError:
            return self._stopped() or _failed("function_error", "the function cancelled itself")
        except BaseException as error:
            if self.cancel.reason not in (None, DRAIN):
                return self._stopped() or AttemptEnd(cause=Cause.EXIT)
            log.info("job %s: function %s failed", lease.id, function.name, exc_info=error)
            return _failed("function_error", self._mask.text(f"{type(error).__name__}: {error}"))
        if self.cancel.reason not in (None, DRAIN):
            return self._stopped() or AttemptEnd(cause=Cause.EXIT)
        return AttemptEnd(cause=Cause.EXIT, result=self._mask.data(result) if self._mask else result)

    async def _invoke(self, function: Function, inputs: dict[str, Any]) -> Any:
        if function.is_async:
            return await function.call(**inputs)
        self._thread = True
        context = contextvars.copy_context()
        call = self._loop.run_in_executor(self._executor.threads, context.run, _caught, function.call, inputs)
        while not call.done():  # A thread cannot be cancelled: keep waiting for it when this task is cancelled.
            try:
                await asyncio.wait([call])
            except asyncio.CancelledError:
                if self._gave_up:
                    self._executor.stuck_threads += 1
                    raise
        result, error = call.result()
        if error is not None:
            raise error
        return await result if asyncio.iscoroutine(result) else result

    async def _unready(self) -> AttemptEnd | None:
        try:
            await make_ready(self._executor.services, self.held, until=lambda: self.cancel.requested)
        except CannotStart as error:
            return AttemptEnd(cause=Cause.START_FAILED, error=error.error)
        except CheckTimedOut as error:
            return AttemptEnd(cause=Cause.INTERRUPTED, error=Error(code="not_ready", message=str(error)))
        return self._stopped() if self.cancel.requested else None

    def _stopped(self) -> AttemptEnd | None:
        """Return the end that a stop leads to, or None without a stop. The request may have escalated meanwhile."""
        reason = self.cancel.reason
        if reason is None:
            return None
        if self.held.stop is not None:
            return AttemptEnd(cause=stop_cause(self.held.stop))
        if reason == "budget":
            over = self._event_writer.over_budget(self._policy.budget) if self._event_writer else None
            return AttemptEnd(cause=Cause.CANCELLED, error=Error(code=EXCEEDED, message=over or "over its budget"))
        return AttemptEnd(cause=CAUSES.get(reason, Cause.DRAINED))

    # Stopping

    def _changed(self) -> None:
        """React to a lost lease or a stop request."""
        if self.held.lost:
            self.stop("lost")
        elif self.held.stop is not None:
            self.stop("interrupt" if self.held.stop.kind is StopKind.INTERRUPT else "cancel")

    def stop(self, reason: str) -> None:
        """Set the cancel token. An async function that has not ended after the grace period is cancelled."""
        if self._end is not None:
            return
        if self.cancel.reason is not None and self.cancel.reason != DRAIN:
            return
        if self.cancel.reason == DRAIN:
            self.cancel.reason = reason
        self.cancel._set(reason)
        if reason != DRAIN:
            if self.held.stop is not None:
                self._record_stop_phase_soon(StopPhase.SIGNALLED)
            self._deadline = self._loop.call_later(self._policy.stop_grace, self._insist)

    def _insist(self) -> None:
        if self._end is not None:
            return
        if self._thread:
            if self.held.stop is not None:
                self._record_stop_phase_soon(StopPhase.NOT_DEAD)
            log.warning("job %s: the function did not stop within its grace; still waiting", self.held.lease.id)
        elif self.task is not None:
            self.task.cancel()
            self._deadline = self._loop.call_later(5.0, self._insist)

    def give_up(self) -> None:
        """Requeue the job because the worker exits. A thread that still runs the function ends with the process.

        A function that has ended is not given up: its events and its outcome are about to be written.
        """
        if self._end is not None:
            return
        self._gave_up = True
        if self.task is not None:
            self.task.cancel()
        # Reason for a bare task: the function's own task may not end. `_BACKGROUND` keeps a reference.
        task = self._loop.create_task(self._hand_back())
        _BACKGROUND.add(task)
        task.add_done_callback(_BACKGROUND.discard)

    async def _hand_back(self) -> None:
        """Write the events so far, because their usage counts, then finish as drained."""
        if self._event_writer is not None and not await self._flush():
            self._executor.drop(self)
            return
        self._executor.finish(self.held, classify(AttemptEnd(cause=Cause.DRAINED), self.held.lease), self)

    def _record_stop_phase_soon(self, phase: StopPhase) -> None:
        # Reason for a bare task: the function's own task may be blocked. `_BACKGROUND` keeps a reference.
        task = self._loop.create_task(self._record_stop_phase(phase))
        _BACKGROUND.add(task)
        task.add_done_callback(_BACKGROUND.discard)

    async def _record_stop_phase(self, phase: StopPhase) -> None:
        lease = self.held.lease
        grace = self._policy.stop_grace if phase is StopPhase.SIGNALLED else None
        if self._stop_phase_lock is None:
            self._stop_phase_lock = asyncio.Lock()
        async with self._stop_phase_lock:  # Phases are written one at a time, in order.
            advance = self._executor.services.store.leases.advance_stop
            await with_retries(lambda: advance(lease, phase, grace=grace), "recording a stop phase")

    # Timeouts

    def _set_timers(self, function: Function) -> None:
        timeout = self._policy.timeout or function.timeout or self._executor.services.settings.timeout
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

    # Events

    def _context(self, secrets: Mapping[str, str]) -> Context:
        lease = self.held.lease
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
        """Queue an event. One emitted in a thread reaches the loop before the function's return does."""
        if threading.get_ident() == self._executor.thread:
            self._emit(event)
        else:
            self._loop.call_soon_threadsafe(self._emit, event)

    def _emit(self, event: NewEvent) -> None:
        if self._event_writer is None:
            self._event_writer = EventWriter(self._executor.services.store, self.held.lease)
        self._heard_at = self._loop.time()
        if self._mask:
            event = NewEvent(type=event.type, data=self._mask.data(event.data))
        size = 0
        if event.type == "log":
            size = sum(len(line.encode(errors="replace")) + 1 for line in event.data["lines"])
            if self._event_writer.cut(size, self._executor.services.settings.log_max_bytes):
                return
        if event.type != "usage" and self._event_writer.full(event):
            return
        self._event_writer.add(event, size)
        if self._shipping is None:
            self._shipping = self._loop.call_later(SHIP_SECONDS, self._ship)

    def _ship(self) -> None:
        self._shipping = None
        # Reason for a bare task: the function's own task may be busy. `run` flushes after it; flushes are serialised.
        task = self._loop.create_task(self._flush())
        _BACKGROUND.add(task)
        task.add_done_callback(_BACKGROUND.discard)

    async def _flush(self) -> bool:
        """Append the waiting events. Return False if the lease is lost."""
        assert self._event_writer is not None
        landed = await self._event_writer.flush()
        if not landed:
            self.held.lose()
        elif self._event_writer.over_budget(self._policy.budget) is not None:
            self.stop("budget")
        return landed


_BACKGROUND: set[asyncio.Task[Any]] = set()


def _caught(call: Callable[..., Any], inputs: Mapping[str, Any]) -> tuple[Any, BaseException | None]:
    """Call a function in its thread. A future cannot carry a StopIteration, so errors come back as values."""
    try:
        return call(**inputs), None
    except StopIteration as error:
        return None, RuntimeError(f"StopIteration: {error}")
    except BaseException as error:
        return None, error


def _failed(code: str, message: str) -> AttemptEnd:
    return AttemptEnd(cause=Cause.EXIT, error=Error(code=code, message=message))
