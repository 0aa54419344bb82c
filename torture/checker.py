"""The checker: a pure function from a history to its violations.

Every rule is a generator over all cases that yields a job, or a worker, and a sentence. Each rule states one promise;
the rows of the behaviours that it stands for are in its docstring.
"""

from collections.abc import Callable, Iterator, Mapping

import msgspec

from torture.cases import Case, cases
from torture.checks import (
    budgets,
    builds,
    deletes,
    exits,
    order,
    pipelines,
    reaps,
    records,
    results,
    runs,
    stops,
    streams,
    writes,
)
from torture.history import History
from torture.timeline import timeline

Rule = Callable[[History, Mapping[str, Case]], Iterator[tuple[str, str]]]
RULES: tuple[Rule, ...] = (
    *records.RULES, *runs.RULES, *stops.RULES, *reaps.RULES, *writes.RULES, *order.RULES, *streams.RULES,
    *results.RULES, *pipelines.RULES, *budgets.RULES, *builds.RULES, *deletes.RULES, *exits.RULES,
)  # fmt: skip


class Violation(msgspec.Struct, frozen=True):
    rule: str
    job: str
    what: str
    timeline: str

    def __str__(self) -> str:
        return f"VIOLATION {self.rule}: {self.what}\n{self.timeline}"


def check(history: History) -> list[Violation]:
    """Hold a history against every rule."""
    found = cases(history)
    return [
        Violation(rule.__name__, job, what, timeline(found[job]) if job in found else _last_words(history, job))
        for rule in RULES
        for job, what in rule(history, found)
    ]


def _last_words(history: History, part: str) -> str:
    """What a worker or server said before it fell, or else the database, if either has said anything."""
    words = next(
        (process_exit.words for process_exit in history.exits if process_exit.part == part),
        "\n".join(history.deadlocks),
    )
    return words or f"  nobody else has heard of {part}"
