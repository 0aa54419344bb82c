"""How an attempt ended, and where its job goes: the whole table."""

import random
from typing import Any

import msgspec
import pytest

from holdfast.model import Cause, Error, Lease, Status
from holdfast.runner.base import AttemptEnd
from holdfast.worker.classify import classify

S, C = Status, Cause
ONLY_TIMEOUTS = {"max_attempts": 3, "retry": {"on": ["timed_out"]}}


def error(code: str) -> Error:
    return Error(code=code, message="as it was")


def lease(*, spent: int = 0, max_attempts: int = 1, **policy: Any) -> Lease:
    fields = (
        "job",
        1,
        spent + 1,
        "host",
        "default",
        "default",
        "process",
        None,
        "run",
        spent,
        max_attempts,
        "{}",
        "{}",
    )
    return Lease(*fields, policy_json=msgspec.json.encode(policy).decode())


RETRIES: dict[str, Any] = {"max_attempts": 3, "retry": {"base": 10, "cap": 15, "on": ["failed", "timed_out"]}}

TABLE: list[tuple[str, AttemptEnd, dict[str, Any], Status, str | None]] = [
    ("exit 0", AttemptEnd(cause=C.EXIT, exit_code=0, result={"a": 1}), {}, S.SUCCEEDED, None),
    ("a function returned", AttemptEnd(cause=C.EXIT, result=7), {}, S.SUCCEEDED, None),
    ("exit 0 against its result", AttemptEnd(cause=C.EXIT, exit_code=0, error=error("bad")), {}, S.FAILED, "bad"),
    ("exit 3", AttemptEnd(cause=C.EXIT, exit_code=3), {}, S.FAILED, "exit_nonzero"),
    ("a signal", AttemptEnd(cause=C.EXIT, signal=11), {}, S.FAILED, "exit_nonzero"),
    ("a function raised", AttemptEnd(cause=C.EXIT, error=error("function_error")), {}, S.FAILED, "function_error"),
    ("exit 3 with retries", AttemptEnd(cause=C.EXIT, exit_code=3), RETRIES, S.QUEUED, "exit_nonzero"),
    ("exit 3, last attempt", AttemptEnd(cause=C.EXIT, exit_code=3), {**RETRIES, "spent": 2}, S.FAILED, "exit_nonzero"),
    ("exit 3, only timeouts retried", AttemptEnd(cause=C.EXIT, exit_code=3), ONLY_TIMEOUTS, S.FAILED, "exit_nonzero"),
    ("out of memory", AttemptEnd(cause=C.OUT_OF_MEMORY, signal=9), {}, S.FAILED, "out_of_memory"),
    ("out of memory with retries", AttemptEnd(cause=C.OUT_OF_MEMORY, signal=9), RETRIES, S.QUEUED, "out_of_memory"),
    ("timed out", AttemptEnd(cause=C.TIMED_OUT, signal=15), {"timeout": 5}, S.TIMED_OUT, "timed_out"),
    ("timed out with retries", AttemptEnd(cause=C.TIMED_OUT, signal=15), RETRIES, S.QUEUED, "timed_out"),
    ("timed out, not to be retried", AttemptEnd(cause=C.TIMED_OUT), {"max_attempts": 3}, S.TIMED_OUT, "timed_out"),
    ("idle", AttemptEnd(cause=C.IDLE_TIMEOUT, signal=15), {"idle_timeout": 2}, S.TIMED_OUT, "idle_timeout"),
    ("cancelled", AttemptEnd(cause=C.CANCELLED, signal=15), RETRIES, S.CANCELLED, "cancelled"),
    ("interrupted", AttemptEnd(cause=C.INTERRUPTED, signal=15), RETRIES, S.PAUSED, "interrupted"),
    ("could not start", AttemptEnd(cause=C.START_FAILED), {}, S.FAILED, "start_failed"),
    ("could not start, retried", AttemptEnd(cause=C.START_FAILED), RETRIES, S.QUEUED, "start_failed"),
    ("no command", AttemptEnd(cause=C.START_FAILED, error=error("command_missing")),
     RETRIES, S.FAILED, "command_missing"),
    ("over budget", AttemptEnd(cause=C.EXIT, signal=15, error=error("budget_exceeded")),
     RETRIES, S.FAILED, "budget_exceeded"),
    ("lost", AttemptEnd(cause=C.LOST), {"max_attempts": 2}, S.QUEUED, "lost"),
    ("lost, last attempt", AttemptEnd(cause=C.LOST), {}, S.FAILED, "lost"),
    ("lost, to fail", AttemptEnd(cause=C.LOST), {"max_attempts": 2, "on_lost": "fail"}, S.FAILED, "lost"),
    ("lost, to pause", AttemptEnd(cause=C.LOST), {"max_attempts": 2, "on_lost": "pause"}, S.PAUSED, "lost"),
    ("lost, to pause (old name)", AttemptEnd(cause=C.LOST), {"max_attempts": 2, "on_lost": "hold"}, S.PAUSED, "lost"),
    ("drained", AttemptEnd(cause=C.DRAINED), {}, S.QUEUED, None),
]  # fmt: skip


@pytest.mark.parametrize(("end", "rules", "status", "code"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_end_becomes_outcome(end: AttemptEnd, rules: dict[str, Any], status: Status, code: str | None) -> None:
    """Proves L11, R20."""
    outcome = classify(end, lease(**rules), random.Random(1))
    assert (outcome.status, outcome.error.code if outcome.error else None, outcome.cause) == (status, code, end.cause)
    assert outcome.delay == 0 or status is S.QUEUED


def test_timeout_has_the_exit_code_that_shells_give_it() -> None:
    """Proves R8."""
    assert classify(AttemptEnd(cause=C.TIMED_OUT, signal=9), lease()).exit_code == 124


def test_result_of_a_success_is_kept_and_of_a_failure_is_not() -> None:
    assert classify(AttemptEnd(cause=C.EXIT, exit_code=0, result=[1]), lease()).result == [1]
    assert classify(AttemptEnd(cause=C.EXIT, exit_code=1, result=[1]), lease()).result is None


@pytest.mark.parametrize(("spent", "wait"), [(0, 10), (1, 15), (2, 15)])
def test_retries_wait_longer_each_time_up_to_the_cap(spent: int, wait: float) -> None:
    """Proves L12."""
    rules = {**RETRIES, "max_attempts": 9, "spent": spent}
    delays = [
        classify(AttemptEnd(cause=C.EXIT, exit_code=1), lease(**rules), random.Random(n)).delay for n in range(50)
    ]
    assert all(0.9 * wait <= delay <= 1.1 * wait for delay in delays)
    assert len(set(delays)) > 1
