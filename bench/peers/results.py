"""The numbers of a run as JSON, kept part by part, and the statistics of them.

A part that is measured again replaces its old numbers; the other parts stay, with the time at which they were taken.
"""

import json
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

Series = dict[str, dict[str, list[float]]]
"""Peer, then measure, then one value per round."""


@dataclass(frozen=True)
class Figure:
    """A median with the lowest and the highest value."""

    median: float
    lowest: float
    highest: float


def figure(values: list[float]) -> Figure | None:
    return Figure(statistics.median(values), min(values), max(values)) if values else None


def paired(ours: list[float], theirs: list[float]) -> Figure | None:
    """The ratio of values taken in the same round: its median and range. A round that one of them lacks is left out."""
    return figure([mine / other for mine, other in zip(ours, theirs, strict=False) if other > 0])


@dataclass
class Part:
    """What one part measured, and under which conditions."""

    taken_at: str
    jobs: int
    rounds: int
    load: str
    series: Series = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    """Peers that broke during the part, and how."""
    kept: dict[str, dict[str, int]] = field(default_factory=dict)
    """What was counted after the last drain of each peer."""

    def add(self, peer: str, **values: float) -> None:
        for measure, value in values.items():
            self.series.setdefault(peer, {}).setdefault(measure, []).append(value)

    def of(self, peer: str, measure: str) -> list[float]:
        return self.series.get(peer, {}).get(measure, [])


@dataclass
class Results:
    machine: dict[str, str] = field(default_factory=dict)
    versions: dict[str, dict[str, str]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    parts: dict[str, Part] = field(default_factory=dict)

    def values(self, part: str, peer: str, measure: str) -> list[float]:
        return self.parts[part].of(peer, measure) if part in self.parts else []

    def save(self, file: Path) -> None:
        file.write_text(json.dumps(asdict(self), indent=1, sort_keys=True) + "\n")


def load(file: Path) -> Results:
    """Read what earlier runs left, or start empty."""
    if not file.exists():
        return Results()
    said: dict[str, Any] = json.loads(file.read_text())
    parts = {name: Part(**part) for name, part in said.pop("parts").items()}
    return Results(**said, parts=parts)
