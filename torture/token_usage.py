"""Jobs that use tokens and have a budget. How much each run uses, and when, is known in advance."""

import random
from collections.abc import Mapping
from typing import Any

Body = dict[str, Any]
WHERE = ("FIRST", "EACH", "LAST")
"""When a run reports what it used: at its start, with each line, and as the last thing that it does."""
RAISED = 1_000_000.0
"""A budget that no job here uses up."""


def price(body: Body, rng: random.Random) -> Body:
    """Give a job a price and a budget: that fits, or is used up in the middle, by the last word, by a later attempt."""
    lines = int(_words(body)["LINES"])
    first, each, last = rng.randint(0, 5), rng.randint(0, 3), rng.randint(1, 5)
    before = first + each * lines
    budget = rng.choice([before + last, before + last, before, before, before // 2, before + last + 1])
    spent = dict(zip(WHERE, (first, each, last), strict=True))
    if body["runner"] == "function":
        body["inputs"] = {**body["inputs"], **{name.lower(): value for name, value in spent.items()}}
    else:
        body["spec"]["env"] |= {name: str(value) for name, value in spent.items()}
    return {**body, "budget": {"tokens": budget}}


def spent_by_a_run(body: Mapping[str, Any]) -> float:
    """How many tokens a run of this job has used when it came to its end."""
    words = _words(body)
    first, each, last = (float(words.get(name, 0)) for name in WHERE)
    return first + each * float(words.get("LINES", 0)) + last


def has_a_price(body: Mapping[str, Any]) -> bool:
    """Whether a job is one that can be told how much to use: a script, or the function that talks."""
    if body["runner"] == "function":
        return str(body["spec"]["name"]) == "talk"
    return "LINES" in body["spec"].get("env", {}) and "tasks" not in body


def _words(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a job was told: by its environment, or by the inputs of a function."""
    if body["runner"] == "function":
        return {name.upper(): value for name, value in body.get("inputs", {}).items()}
    return dict(body["spec"].get("env", {}))
