"""The rules of budgets: pure functions, no I/O.

They are used by the worker while a job runs, by the finish of an attempt, and by a resume.
"""

from collections.abc import Mapping

from holdfast.model import Status

EXCEEDED = "budget_exceeded"
REFUSED_ENDS = frozenset({Status.SUCCEEDED, Status.FAILED, Status.QUEUED})
"""Ends that become `budget_exceeded`. A job that a person stopped, or that ran out of time, keeps its end."""

Amounts = Mapping[str, float]


def over_budget(usage: Amounts, budget: Amounts | None) -> str | None:
    """Say which limit was exceeded, the first by name; None if the usage is within the budget."""
    for name, limit in sorted((budget or {}).items()):
        if (used := usage.get(name, 0)) > limit:
            return f"used {amount(used)} {name} of {amount(limit)}"
    return None


def refused_resume(usage: Amounts, budget: Amounts | None, raised: Amounts | None) -> str | None:
    """Say why a job cannot be resumed with what is left of its budget; None if it can.

    `raised` are the limits that the resume sets; the others stay. A limit is spent when nothing of it is left.
    """
    for name, limit in sorted(raised_budget(budget, raised).items()):
        used = usage.get(name, 0)
        if not used or used < limit:
            continue
        what = f"it used {amount(used)} {name}"
        if raised and name in raised:
            state = f"{what}, and its budget would be {amount(limit)}"
        else:
            state = f"{what} of its budget of {amount(limit)}"
        return f'{state}; resume it with a budget above {amount(used)} ("budget": {{"{name}": N}}, --budget {name}=N)'
    return None


def raised_budget(budget: Amounts | None, raised: Amounts | None) -> dict[str, float]:
    """Return the budget with the limits that a resume sets."""
    return {**(budget or {}), **(raised or {})}


def amount(value: float) -> str:
    """Write a number as people do: whole where it is whole, without the noise of binary fractions."""
    return f"{value:.15g}"
