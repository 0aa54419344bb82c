"""What happens to a job whose attempt was lost, and when it is retried: pure rules, no I/O.

The worker that finds its attempt gone, and the store that settles an unreachable one, use the same rules.
"""

import random

import msgspec

from holdfast.model import Outcome, Policy, Status, attempts_left
from holdfast.timing import LONGEST, backoff, jitter


def after_loss(
    lost: Outcome, policy: Policy, *, spent: int, max_attempts: int, source: random.Random | None = None
) -> Outcome:
    """Apply the job's `on_lost`: requeue with backoff while attempts are left, fail, or pause for a person.

    The store, which knows all attempts, removes the backoff of the job's first loss (`without_backoff`).

    `lost` is the end as a failure; `spent` counts the attempts before it.
    """
    match policy.on_lost:
        case "pause":
            return msgspec.structs.replace(lost, status=Status.PAUSED)
        case "requeue" if attempts_left(spent, max_attempts) > 0:
            return requeued(lost, policy, spent=spent, source=source)
    return lost


def without_backoff(lost: Outcome) -> Outcome:
    """Return the same end without the backoff: a first loss says nothing about the job, and the attempt is gone.

    Further losses back off: the job itself may be what kills its workers.
    """
    return msgspec.structs.replace(lost, delay=0.0)


def requeued(ended: Outcome, policy: Policy, *, spent: int, source: random.Random | None = None) -> Outcome:
    """Return the same end as a requeue after the job's own backoff."""
    # A policy that bypassed the checks of a submit must not yield a time that no database can store.
    wait = backoff(spent + 1, base=policy.retry.base, cap=min(policy.retry.cap, LONGEST))
    return msgspec.structs.replace(ended, status=Status.QUEUED, delay=jitter(wait, source=source))
