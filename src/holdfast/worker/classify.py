"""Maps the end of an attempt to the outcome of its job: one pure function, no I/O.

If we sent a signal before the exit, its reason is the cause; if the exit came first, the exit decides. The runner
reports which (`AttemptEnd.cause`); here the job's rules for retries, losses and budget turn it into an outcome.
"""

import random

import msgspec

from holdfast.budgets import EXCEEDED
from holdfast.model import STOPPED, Cause, Error, Lease, Outcome, Policy, Status, StopKind, StopRequest
from holdfast.retry import after_loss, requeued
from holdfast.runner.base import AttemptEnd
from holdfast.runner.collected_outputs import ContractViolation
from holdfast.runner.result_report import parse_report
from holdfast.runner.secrets import NO_MASK, Mask
from holdfast.timing import backoff, jitter

EXIT, SUCCEEDED = Cause.EXIT, Status.SUCCEEDED
"""Here, because Python 3.11 takes long to look a member up in its class."""
TIMEOUT_CODE = 124
MAX_VIOLATION = 1000
OUTPUTS_NOT_STORED = "outputs_not_stored"
DISK_FULL = "disk_full"
NO_SPACE_BASE, NO_SPACE_CAP = 1.0, 60.0
"""Seconds before a job is claimed again whose start found the disk full: the first time, and at most."""
PERMANENT = frozenset(
    {
        *("command_missing", "image_missing", "root_refused", EXCEEDED, "contract_violation", OUTPUTS_NOT_STORED),
        *("file_too_large", "folder_too_large"),
    }
)
"""Errors that a second attempt would hit again."""


def reported(end: AttemptEnd, data: bytes | None, mask: Mask = NO_MASK, *, required: bool = False) -> AttemptEnd:
    """Merge the child's `result.json` into its end. The exit code decides, but a reported failure fails a success."""
    if end.cause is not Cause.EXIT:
        return end
    if data is None:
        if required and end.exit_code == 0:
            raise ContractViolation("result.json is missing; this job must leave one (require_result)")
        return end
    report = parse_report(data)
    if end.exit_code == 0 and report.status == "succeeded":
        return msgspec.structs.replace(end, result=mask.data(report.result))
    named = report.error
    error = end.error if named is None else Error(code=named.code, message=named.message)
    if end.exit_code == 0 and error is None:
        error = Error(code="reported_failure", message="it reported failure")
    return msgspec.structs.replace(end, error=mask.error(error))


def broken(end: AttemptEnd, violation: str) -> AttemptEnd:
    """Turn a success whose outputs break the contract into a failure; `violation` names the file and the rule."""
    message = violation[:MAX_VIOLATION]
    return msgspec.structs.replace(end, error=Error(code="contract_violation", message=message))


def classify(end: AttemptEnd, lease: Lease, source: random.Random | None = None) -> Outcome:
    """Return the outcome of the job. The store turns a requeue into a stop if a stop request is waiting."""
    if end.cause is EXIT and end.exit_code is None and end.signal is None and end.error is None:
        return Outcome(status=SUCCEEDED, result=end.result)  # A function that returned: the most frequent end, first.
    match end.cause:
        case Cause.DRAINED if end.error is None:
            return Outcome.requeued(Cause.DRAINED)
        case Cause.DRAINED:  # The disk was full, and may be the next time.
            wait = backoff(max(1, lease.attempt - lease.spent), base=NO_SPACE_BASE, cap=NO_SPACE_CAP)
            return Outcome.requeued(Cause.DRAINED, delay=jitter(wait, source=source), error=end.error)
        case Cause.CANCELLED | Cause.INTERRUPTED if end.error is not None and end.error.code == EXCEEDED:
            return _ended(Status.FAILED, end, EXCEEDED, "over its budget")
        case Cause.CANCELLED:
            return _stopped(StopKind.CANCEL, end)
        case Cause.INTERRUPTED:
            return _stopped(StopKind.INTERRUPT, end)
        case Cause.LOST:
            return _lost(end, lease, source)
        case Cause.TIMED_OUT | Cause.IDLE_TIMEOUT:
            return _again_or(_timed_out(end, lease.policy), "timed_out", lease, source)
        case Cause.EXIT if end.exit_code == 0 and end.error is None:
            return Outcome(status=Status.SUCCEEDED, exit_code=0, result=end.result)
    if end.final:
        return _failed(end)
    if end.retry_asked:
        return _asked_again(end, lease, source)
    return _again_or(_failed(end), "failed", lease, source)


def stop_cause(stop: StopRequest) -> Cause:
    """Return the cause of an end by this stop request."""
    return Cause.INTERRUPTED if stop.kind is StopKind.INTERRUPT else Cause.CANCELLED


def unless_stopped(stop: StopRequest | None, end: AttemptEnd) -> AttemptEnd:
    """Let a stop request decide the end of an attempt that it stopped, or that was already dead."""
    if stop is None or end.cause not in (Cause.CANCELLED, Cause.INTERRUPTED, Cause.LOST):
        return end
    return AttemptEnd(cause=stop_cause(stop), exit_code=end.exit_code, signal=end.signal)


def _failed(end: AttemptEnd) -> Outcome:
    match end.cause:
        case Cause.OUT_OF_MEMORY:
            return _ended(Status.FAILED, end, "out_of_memory", "killed for using too much memory")
        case Cause.START_FAILED:
            return _ended(Status.FAILED, end, "start_failed", "could not be started")
    how = f"ended by signal {end.signal}" if end.signal is not None else f"exit code {end.exit_code}"
    if end.last_error is not None:
        how = f"{how}: {end.last_error}"
    return _ended(Status.FAILED, end, "exit_nonzero", how)


def _timed_out(end: AttemptEnd, policy: Policy) -> Outcome:
    if end.cause is Cause.IDLE_TIMEOUT:
        message = f"no output for {policy.idle_timeout:g} seconds" if policy.idle_timeout else "no output for too long"
        outcome = _ended(Status.TIMED_OUT, end, "idle_timeout", message)
    else:
        message = f"ran longer than {policy.timeout:g} seconds" if policy.timeout else "ran for too long"
        outcome = _ended(Status.TIMED_OUT, end, "timed_out", message)
    return msgspec.structs.replace(outcome, exit_code=TIMEOUT_CODE)


def _lost(end: AttemptEnd, lease: Lease, source: random.Random | None) -> Outcome:
    lost = _ended(Status.FAILED, end, "lost", "the attempt was lost with its worker")
    return after_loss(lost, lease.policy, spent=lease.spent, max_attempts=lease.max_attempts, source=source)


def _again_or(outcome: Outcome, kind: str, lease: Lease, source: random.Random | None) -> Outcome:
    """Requeue the job if its retry rules allow it and attempts are left; otherwise keep the outcome."""
    permanent = outcome.error is not None and outcome.error.code in PERMANENT
    if permanent or kind not in lease.policy.retry.on or lease.attempts_left == 0:
        return outcome
    return requeued(outcome, lease.policy, spent=lease.spent, source=source)


def _asked_again(end: AttemptEnd, lease: Lease, source: random.Random | None) -> Outcome:
    """Requeue the job of a function that asked for it, whatever its retry rules are for; fail without attempts left."""
    failed = _failed(end)
    if lease.attempts_left == 0:
        return failed
    again = requeued(failed, lease.policy, spent=lease.spent, source=source)
    return again if end.retry_after is None else msgspec.structs.replace(again, delay=end.retry_after)


def _stopped(kind: StopKind, end: AttemptEnd) -> Outcome:
    """Return the end that follows from a stop request."""
    stopped = STOPPED[kind]
    return _ended(stopped.status, end, stopped.code, stopped.message)


def _ended(status: Status, end: AttemptEnd, code: str, message: str) -> Outcome:
    return Outcome(
        status=status,
        cause=end.cause,
        exit_code=end.exit_code,
        signal=end.signal,
        error=end.error or Error(code=code, message=message if end.task is None else f"task {end.task}: {message}"),
    )
