"""One small fault in one file."""

import re
from dataclasses import dataclass

FENCING = re.compile(r"token|lease|owner|fence|orphan|adopt|status|settle|outcome|transition", re.IGNORECASE)
"""What fencing and transitions are called. A mutant that mentions one of these may only survive if it is equivalent."""
LONGEST_CHANGE = 160


@dataclass(frozen=True)
class Edit:
    """Put `text` between the offsets `start` and `end` (in bytes) of a file."""

    start: int
    end: int
    text: str

    def applied(self, source: bytes) -> bytes:
        return source[: self.start] + self.text.encode() + source[self.end :]


@dataclass(frozen=True)
class Mutant:
    """An edit, and how it is described: by the place in the code and not by a line number, which other edits move."""

    path: str
    where: str
    """The function or statement; of SQL also the dialect."""
    change: str
    line: int
    unit: str
    """What the coverage map knows it by: a block of Python or a statement of SQL; empty for code that imports run."""
    edit: Edit

    @property
    def key(self) -> tuple[str, str]:
        """What identifies it in the list of survivors. No path: a file may be renamed."""
        return self.where, self.change

    @property
    def fencing(self) -> bool:
        return FENCING.search(f"{self.path} {self.where} {self.change}") is not None

    def __str__(self) -> str:
        return f"{self.path}:{self.line} {self.where}: {self.change}"


def squeezed(text: str) -> str:
    """One line, short enough for a table."""
    line = " ".join(text.split())
    return line if len(line) <= LONGEST_CHANGE else f"{line[: LONGEST_CHANGE - 1]}…"


def numbered(mutants: list[Mutant]) -> list[Mutant]:
    """Tell apart mutants of one place that look the same: the second gets `(2)`."""
    seen: dict[tuple[str, str], int] = {}
    found = []
    for mutant in mutants:
        n = seen[mutant.key] = seen.get(mutant.key, 0) + 1
        change = mutant.change if n == 1 else f"{mutant.change} ({n})"
        found.append(Mutant(mutant.path, mutant.where, change, mutant.line, mutant.unit, mutant.edit))
    return found
