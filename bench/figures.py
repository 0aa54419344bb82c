"""One line per measure: ours, the reference beside it, their ratio, what is wanted, and whether it holds."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

HEAD = f"{'measure':<86} {'ours':>10} {'reference':>10} {'ratio':>6}  wanted"


@dataclass(frozen=True)
class Figure:
    """A figure by itself, wanted at most (or at least) so big; or a ratio to a reference, at least so big.

    One for which nothing is wanted is only told.
    """

    name: str
    ours: float
    wanted: float | None
    unit: str = ""
    reference: float | None = None
    ratio: float | None = None
    at_least: bool = False

    @property
    def good(self) -> bool:
        if self.wanted is None:
            return True
        if self.ratio is not None:
            return self.ratio >= self.wanted
        return self.ours >= self.wanted if self.at_least else self.ours <= self.wanted

    def __str__(self) -> str:
        against = "-" if self.reference is None else _number(self.reference)
        ratio = "-" if self.ratio is None else f"{self.ratio:.2f}"
        bound = "at least" if self.ratio is not None or self.at_least else "at most"
        wanted = "-" if self.wanted is None else f"{bound} {self.wanted:g}{'' if self.ratio is not None else self.unit}"
        verdict = "ok" if self.good else "BELOW"
        return f"{self.name:<86} {_number(self.ours):>10} {against:>10} {ratio:>6}  {wanted}: {verdict}"


def against(name: str, ours: Sequence[float], reference: Sequence[float], *, wanted: float) -> Figure:
    """Compare rates that were taken in turns, round by round: what counts is the median of the rounds' ratios."""
    ratios = [mine / other for mine, other in zip(ours, reference, strict=True)]
    return Figure(
        f"{name} ({min(ratios):.2f}–{max(ratios):.2f})",
        statistics.median(ours),
        wanted,
        reference=statistics.median(reference),
        ratio=statistics.median(ratios),
    )


def percentile(values: Iterable[float], share: float) -> float:
    """The value that this share of all does not exceed."""
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, int(len(ranked) * share))]


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.2f}"
