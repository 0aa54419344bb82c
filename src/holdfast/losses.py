"""What becomes of a job whose attempt was lost, and when it is tried again: pure rules, no I/O.

A worker that finds its attempt gone and the store that settles one which nobody can reach decide by the same rule.
"""

import random

import msgspec

from holdfast.model import Outcome, Policy, Status, attempts_left
from holdfast.timing import backoff, jitter


def after_loss(
    lost: Outcome, policy: Policy, *, spent: int, max_attempts: int, source: random.Random | None = None
) -> Outcome:
    """Let the job's `on_lost` decide: requeue with backoff while attempts are left, fail, or hold for a person.

    The store, which knows all attempts, takes the backoff off the job's first loss (`at_once`).

    `lost` is the end as a failure; `spent` counts the attempts before it.
    """
    match policy.on_lost:
        case "hold":
            return msgspec.structs.replace(lost, status=Status.PAUSED)
        case "requeue" if attempts_left(spent, max_attempts) > 0:
            return requeued(lost, policy, spent=spent, source=source)
    return lost


def at_once(lost: Outcome) -> Outcome:
    """The same end without the backoff: a first loss says nothing about the job, and its death is known already.

    Further losses back off: the job itself may be what kills its workers.
    """
    return msgspec.structs.replace(lost, delay=0.0)


def requeued(ended: Outcome, policy: Policy, *, spent: int, source: random.Random | None = None) -> Outcome:
    """The same end, to be tried again after the job's own backoff."""
    wait = backoff(spent + 1, base=policy.retry.base, cap=policy.retry.cap)
    return msgspec.structs.replace(ended, status=Status.QUEUED, delay=jitter(wait, source=source))
