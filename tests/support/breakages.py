"""Ways to break a good history by hand, each with the rule of the checker that must see it."""

from collections.abc import Callable
from typing import Generic, TypeVar

import pytest
from _pytest.mark import ParameterSet

H = TypeVar("H")


class Breakages(Generic[H]):
    """The breakages of one kind of history, by the rule that each one breaks."""

    def __init__(self) -> None:
        self.by_rule: dict[str, list[tuple[str, Callable[[H], None]]]] = {}

    def breaks(self, rule: str, what: str) -> Callable[[Callable[[H], None]], Callable[[H], None]]:
        """Register a way to break a good history, and the rule that must see it."""

        def register(make: Callable[[H], None]) -> Callable[[H], None]:
            self.by_rule.setdefault(rule, []).append((what, make))
            return make

        return register

    def cases(self) -> list[ParameterSet]:
        """Return the cases (rule, make) of a test, named after what is broken."""
        return [pytest.param(rule, make, id=what) for rule, found in self.by_rule.items() for what, make in found]
