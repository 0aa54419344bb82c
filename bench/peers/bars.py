"""Bars with their range as an SVG picture, panel under panel; written by hand, as torture/plot.py is."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from bench.peers.results import Figure

NAMES, WIDTH, BAR, GAP, TOP, VALUES = 150, 620, 18, 46, 34, 110
OURS, THEIRS = "#1b6ca8", "#9fb3c4"


@dataclass(frozen=True)
class Panel:
    """One picture: a title with its unit, and a bar per name; `ours` are drawn in another colour."""

    title: str
    bars: Sequence[tuple[str, Figure, bool]]


def svg(panels: Sequence[Panel]) -> str:
    """Draw panels under each other, each on a scale of its own."""
    drawn, top = [], TOP
    for panel in panels:
        drawn.append(_panel(panel, top))
        top += len(panel.bars) * BAR + GAP
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{NAMES + WIDTH + VALUES}" height="{top - GAP + TOP}" '
        'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>'
    )
    return "\n".join([head, *drawn, "</svg>\n"])


def _panel(panel: Panel, top: int) -> str:
    most = max((figure.highest for _, figure, _ in panel.bars), default=1.0) or 1.0
    parts = [f'<text x="{NAMES}" y="{top - 10}" font-weight="bold">{escape(panel.title)}</text>']
    for n, (name, figure, ours) in enumerate(panel.bars):
        y, middle = top + n * BAR, top + n * BAR + BAR / 2 - 2
        low, mid, high = (NAMES + WIDTH * value / most for value in (figure.lowest, figure.median, figure.highest))
        fill = OURS if ours else THEIRS
        parts += [
            f'<text x="{NAMES - 6}" y="{y + 11}" text-anchor="end">{escape(name)}</text>',
            f'<rect x="{NAMES}" y="{y}" width="{mid - NAMES:.1f}" height="{BAR - 4}" fill="{fill}"/>',
            f'<path d="M{low:.1f},{middle} H{high:.1f}" stroke="#222" stroke-width="1.5"/>',
            f'<text x="{high + 6:.1f}" y="{y + 11}">{number(figure.median)}</text>',
        ]
    return "\n".join(parts)


def number(value: float) -> str:
    """Three figures are enough: 12,300, 412, 4.1."""
    if abs(value) >= 1000:
        return f"{round(value, -2):,.0f}"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.2g}" if abs(value) < 10 else f"{value:.1f}"
