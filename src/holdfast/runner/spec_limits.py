"""The limits in the spec of a supervisor, for all runners: rlimits, and how much output is kept on disk."""

from collections.abc import Mapping

from holdfast.limits import AttemptLimits
from holdfast.runner.supervisor.protocol import Limit

OUTPUT_FACTOR = 16
LEAST_OUTPUT = 64 * 1024 * 1024
"""Output is kept on disk up to OUTPUT_FACTOR times the log's cap: above the cap only event lines matter."""


def rlimits(limits: AttemptLimits, *, own_user: bool = False) -> Mapping[Limit, int]:
    """Return the limits that the kernel enforces for each process of an attempt.

    `data` and not `as`: programs map far more than they use. The kernel counts processes per user, so `nproc` is set
    only if the attempt has a user of its own.
    """
    wanted: dict[Limit, int | None] = {"data": limits.memory, "fsize": limits.file_size}
    if own_user:
        wanted["nproc"] = limits.pids
    return {name: value for name, value in wanted.items() if value is not None}
