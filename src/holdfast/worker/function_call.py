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

from holdfast.model import FUNCTION, Cause, Error, NewEvent, Policy, StopPhase
from holdfast.runner.base import AttemptEnd, CannotStart
from holdfast.runner.function import Cancelled, CancelToken, Context, RegisteredFunction, RetryAsked
from holdfast.runner.function_types import to_json
from holdfast.runner.secrets import NO_MASK, Mask
from holdfast.worker.classify import classify
from holdfast.worker.event_writer import EventWriter
from holdfast.worker.function_logs import logs_to
from holdfast.worker.held_leases import HeldLease, LeaseLost, require_trust
from holdfast.worker.readiness import CheckTimedOut, make_ready
from holdfast.worker.stop_recorder import StopRecorder
from holdfast.worker.stop_sequence import StopReason, StopSequence, budget_error

if TYPE_CHECKING:
    from holdfast.worker.functions import FunctionExecutor

log = logging.getLogger(__name__)

SHIP_SECONDS = 0.25
INSIST_SECONDS = 5.0
"""Seconds after which an async function is cancelled again that did not end when it was cancelled."""
EXIT = Cause.EXIT
"""Here, because Python 3.11 takes long to look a member up in its class."""
PREFIX = f"{FUNCTION}:"
_decode = msgspec.json.Decoder().decode
_NO_POLICY = Policy()


class FunctionCall:
    """One call of one function."""

    __slots__ = (
        "_cancel", "_deadline", "_end", "_event_writer", "_executor", "_gave_up", "_heard_at", "_idle", "_loop",
        "_mask", "_policy", "_shipping", "_stop_recorder", "_stop_sequence", "_thread", "_timeout", "held", "task",
    )  # fmt: skip

    def __init__(self, executor: "FunctionExecutor", held: HeldLease) -> None:
        self.held = held
        self.task: asyncio.Task[None] | None = None
        self._executor = executor
        self._policy = _NO_POLICY if held.lease.policy_json is None else held.lease.policy
        self._loop = executor.loop
        self._cancel: CancelToken | None = None
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
        self._stop_sequence: StopSequence | None = None
        self._stop_recorder: StopRecorder | None = None
        held.on_change = self.changed

    # Made when they are needed: most functions are neither stopped nor ask whether they are.

    @property
    def cancel(self) -> CancelToken:
        if self._cancel is None:
            self._cancel = CancelToken(self._loop)
        return self._cancel

    @property
    def _stop(self) -> StopSequence:
        if self._stop_sequence is None:
            self._stop_sequence = StopSequence()
        return self._stop_sequence

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
        if self.held.stop is not None and not await self._record_stop_phase(StopPhase.DEAD):
            self._executor.drop(self)
            return
        self._executor.finish(self.held, classify(self._end, self.held.lease), self)

    async def _safely(self) -> AttemptEnd:
        try:
            return await self._call()
        except asyncio.CancelledError:
            return self._stop.end() or _failed("internal", "the function was cancelled for an unknown reason")
        except LeaseLost:
            return AttemptEnd(cause=Cause.LOST)
        except Exception as error:
            log.exception("job %s: internal error while running the function; failing the attempt", self.held.lease.id)
            return _failed("internal", f"the worker failed: {error}")
        finally:
            self._cancel_timers()

    async def _call(self) -> AttemptEnd:
        lease = self.held.lease
        self._executor.services.at("claimed", lease)
        if not self.held.trusted:  # The worker was suspended after the claim: others may have settled the job.
            await require_trust(self.held)
        function = self._executor.find(lease.capability.removeprefix(PREFIX))
        if function is None:
            return AttemptEnd(cause=Cause.DRAINED)
        checked = lease.lane is not None or self._policy.check is not None
        if checked and (unready := await self._unready()) is not None:
            return unready
        inputs = _decode(lease.inputs_json)
        if inputs or not function.plain:
            try:
                inputs = function.arguments(inputs)
            except ValueError as wrong:
                return _failed("contract_violation", f"the inputs do not fit function {function.name}: {wrong}")
        try:
            secrets = self._secrets()
        except CannotStart as error:
            return AttemptEnd(cause=Cause.START_FAILED, error=error.error)
        if function.context is not None:
            inputs[function.context] = self._context(secrets)
        if lease.attempt > 1 and (function.context is not None or function.capture_logs):
            await self._writer().continue_log()
        self._set_timers(function)
        return await self._ended(function, inputs)

    def _secrets(self) -> Mapping[str, str]:
        """Return the secrets that the job names, and mask them from now on. Raise CannotStart if one is unknown."""
        if not self._policy.secrets:
            return {}
        secrets = self._executor.services.secrets(self._policy)
        self._mask = Mask(secrets.values())
        return secrets

    async def _ended(self, function: RegisteredFunction, inputs: dict[str, Any]) -> AttemptEnd:
        """Call the function and return how it ended. If it was stopped, the stop decides, unless only by a drain."""
        try:
            if function.capture_logs:
                with logs_to(self._emit_soon):
                    result = await self._invoke(function, inputs)
            else:
                result = await self._invoke(function, inputs)
        except Cancelled:
            return self._stop.end() or _failed("function_error", "the function raised Cancelled without a stop request")
        except asyncio.CancelledError:
            return self._stop.end() or _failed("function_error", "the function cancelled itself")
        except BaseException as error:
            if (end := self._stop.end()) is not None and self._stop.reason is not StopReason.DRAIN:
                return end
            return self._failure(function, error)
        stop = self._stop_sequence
        if stop is not None and (end := stop.end()) is not None and stop.reason is not StopReason.DRAIN:
            return end
        try:
            result = to_json(result)
        except (TypeError, ValueError, RecursionError) as error:
            return _failed("function_error", f"the result cannot be written as JSON ({error})")
        return AttemptEnd(cause=EXIT, result=self._mask.data(result) if self._mask else result)

    def _failure(self, function: RegisteredFunction, error: BaseException) -> AttemptEnd:
        """Return the end of a function that raised: a failure, a final one, or a retry that it asked for."""
        if isinstance(error, RetryAsked):
            failed = _failed("function_error", self._mask.text(str(error)))
            return msgspec.structs.replace(failed, retry_asked=True, retry_after=error.after)
        log.info("job %s: function %s failed", self.held.lease.id, function.name, exc_info=error)
        failed = _failed("function_error", self._mask.text(f"{type(error).__name__}: {error}"))
        return msgspec.structs.replace(failed, final=not function.may_retry(error))

    async def _invoke(self, function: RegisteredFunction, inputs: dict[str, Any]) -> Any:
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
        return self._stop.end()

    # Stopping

    def changed(self) -> None:
        """React to a lost lease or a stop request."""
        if self.held.lost:
            self.stop(StopReason.LOST)
        elif self.held.stop is not None:
            self.stop(StopReason.of(self.held.stop))

    def stop(self, reason: StopReason, error: Error | None = None) -> None:
        """Set the cancel token. An async function that has not ended after the grace period is cancelled.

        The function hears the first reason that is more than a drain; its end follows the strongest.
        """
        if self._end is not None:
            return
        heard = self._stop.reason
        self._stop.ask(reason, error)
        if heard is not None and heard is not StopReason.DRAIN:
            return
        self.cancel._set(reason.shown)
        if reason is not StopReason.DRAIN:
            self.cancel.reason = reason.shown
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
            self._deadline = self._loop.call_later(INSIST_SECONDS, self._insist)

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

    async def _record_stop_phase(self, phase: StopPhase) -> bool:
        """Record a phase of the stop sequence. Return False if the lease is lost."""
        if self._stop_recorder is None:
            self._stop_recorder = StopRecorder(self._executor.services, self.held, self._stop)
        recorded = await self._stop_recorder.record(phase)
        if not recorded:
            self.held.lose()
        return recorded

    # Timeouts

    def _set_timers(self, function: RegisteredFunction) -> None:
        own = function.defaults.get("timeout")
        timeout = self._policy.timeout or own or self._executor.services.settings.timeout
        if timeout is not None:
            self._timeout = self._loop.call_later(timeout, self.stop, StopReason.TIMEOUT)
        if self._policy.idle_timeout is not None:
            self._heard_at = self._loop.time()
            self._idle = self._loop.call_later(self._policy.idle_timeout, self._look_idle)

    def _look_idle(self) -> None:
        assert self._policy.idle_timeout is not None
        silent = self._loop.time() - self._heard_at
        if silent >= self._policy.idle_timeout:
            self.stop(StopReason.IDLE_TIMEOUT)
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

    def _writer(self) -> EventWriter:
        if self._event_writer is None:
            services = self._executor.services
            self._event_writer = EventWriter(
                services.store, self.held.lease, log_max_bytes=services.settings.log_max_bytes
            )
        return self._event_writer

    def _emit(self, event: NewEvent) -> None:
        writer = self._writer()
        self._heard_at = self._loop.time()
        if self._mask:
            event = NewEvent(type=event.type, data=self._mask.data(event.data))
        size = _log_size(event)
        if event.type == "log" and not writer.log_cap.fits(size):
            writer.note_cut()
            return
        if event.type != "usage" and writer.full(event):
            return
        writer.add(event, size)
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
        elif (over := self._event_writer.over_budget(self._policy.budget)) is not None:
            self.stop(StopReason.BUDGET, budget_error(over))
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


def _log_size(event: NewEvent) -> int:
    if event.type != "log":
        return 0
    return sum(len(line.encode(errors="replace")) + 1 for line in event.data["lines"])


def _failed(code: str, message: str) -> AttemptEnd:
    return AttemptEnd(cause=Cause.EXIT, error=Error(code=code, message=message))
