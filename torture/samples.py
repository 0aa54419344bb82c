"""What a soak measures over time, and the verdict: is everything as flat in the last quarter as in the second?"""

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set

import msgspec

from torture.plot import COLOURS, Panel, Points

MEMORY = "memory of each process, MB"
FILES = "open files of each process"
CONNECTIONS = "connections"
LIVE = "jobs that have not ended"
FAILED = "jobs that failed, of those that are kept"
SUPERVISORS = "supervisors of processes"
POSTGRES = "memory of all processes of Postgres, MB"
ROWS = "rows of tables"
DEAD = "dead rows"
TABLES = "size of tables, MB"
INDEXES = "size of indexes, MB"
DATABASE = "size of files, MB"

ROOM: Mapping[str, tuple[float, float]] = {
    MEMORY: (0.05, 1.0),
    FILES: (0.1, 2.0),
    CONNECTIONS: (0.1, 3.0),
    LIVE: (0.5, 50.0),
    FAILED: (0.0, 0.0),
    SUPERVISORS: (0.5, 5.0),
    POSTGRES: (0.1, 5.0),
    ROWS: (0.15, 50.0),
    DEAD: (0.3, 1000.0),
    TABLES: (0.15, 0.3),
    INDEXES: (0.15, 0.3),
    DATABASE: (0.15, 2.0),
}
"""How much more the last quarter may have than the second and still be flat: a share, and so much besides."""
DRAWN = len(COLOURS)
"""The most lines of one panel that are drawn."""


class Drift(msgspec.Struct, frozen=True):
    """How one line stood in the second quarter of the time, and how in the last, on average."""

    panel: str
    line: str
    early: float
    late: float

    @property
    def flat(self) -> bool:
        share, besides = ROOM[self.panel]
        return self.late <= self.early * (1 + share) + besides

    def __str__(self) -> str:
        verdict = "flat " if self.flat else "GROWS"
        return f"{verdict} {self.panel}: {self.line}: {self.early:,.1f} → {self.late:,.1f}"


class Samples:
    """What was measured, by panel and line."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._panels: dict[str, dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))

    def add(self, panel: str, line: str, value: float, *, at: float | None = None) -> None:
        self._panels[panel][line].append((time.monotonic() - self._began if at is None else at, value))

    def most(self, panel: str) -> float:
        """The highest value that a panel ever had."""
        return max((value for points in self._panels[panel].values() for _, value in points), default=0.0)

    @property
    def whole(self) -> list[Panel]:
        """Everything that was measured."""
        return [Panel(title, lines) for title, lines in self._panels.items()]

    def panels(self, seconds: float) -> list[Panel]:
        """What to draw of a soak of so many seconds.

        Of many lines those that grow are drawn, then the largest, and the others as their sum.
        """
        grown = {(drift.panel, drift.line) for drift in self.drifts(seconds) if not drift.flat}
        return [
            Panel(panel.title, _folded(panel.lines, {line for title, line in grown if title == panel.title}))
            for panel in self.whole
        ]

    def drifts(self, seconds: float) -> Sequence[Drift]:
        """Every line's drift over a soak of so many seconds; one that was not measured in both quarters has none."""
        found = []
        for panel, lines in self._panels.items():
            for name, points in lines.items():
                early, late = (_mean(points, n * seconds / 4, (n + 1) * seconds / 4) for n in (1, 3))
                if early is not None and late is not None:
                    found.append(Drift(panel, name, early, late))
        return found


def _folded(lines: Mapping[str, Points], grown: Set[str]) -> Mapping[str, Points]:
    if len(lines) <= DRAWN:
        return lines
    names = sorted(lines, key=lambda name: (name not in grown, -max(value for _, value in lines[name])))
    rest = [lines[name] for name in names[DRAWN - 1 :]]
    together = [(points[0][0], sum(value for _, value in points)) for points in zip(*rest, strict=False)]
    return {**{name: lines[name] for name in names[: DRAWN - 1]}, f"{len(rest)} others": together}


def _mean(points: Points, begin: float, end: float) -> float | None:
    values = [value for at, value in points if begin <= at < end]
    return sum(values) / len(values) if values else None
