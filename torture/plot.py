"""Lines over time as an SVG picture, panel under panel; written by hand, so that nothing has to be installed."""

from collections.abc import Mapping, Sequence
from html import escape

import msgspec

WIDTH, HEIGHT, LEFT, TOP, GAP = 900, 150, 70, 30, 50
COLOURS = ("#1b6ca8", "#c0392b", "#27864b", "#8e44ad", "#b9770e", "#16808a", "#7f8c8d", "#2c3e50")

Points = Sequence[tuple[float, float]]


class Panel(msgspec.Struct, frozen=True):
    """One picture: a title with its unit, and lines by name."""

    title: str
    lines: Mapping[str, Points]


def svg(panels: Sequence[Panel]) -> str:
    """Draw panels under each other, on one axis of time in minutes."""
    end = max((at for panel in panels for points in panel.lines.values() for at, _ in points), default=1.0) or 1.0
    height = TOP + len(panels) * (HEIGHT + GAP)
    drawn = [_panel(panel, TOP + n * (HEIGHT + GAP), end) for n, panel in enumerate(panels)]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 190}" height="{height}" '
        'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>'
    )
    return "\n".join([head, *drawn, "</svg>\n"])


def _panel(panel: Panel, top: int, end: float) -> str:
    most = max((value for points in panel.lines.values() for _, value in points), default=1.0) or 1.0
    parts = [
        f'<text x="{LEFT}" y="{top - 8}" font-weight="bold">{escape(panel.title)}</text>',
        f'<rect x="{LEFT}" y="{top}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#ccc"/>',
        f'<text x="{LEFT - 6}" y="{top + 10}" text-anchor="end">{most:,.0f}</text>',
        f'<text x="{LEFT - 6}" y="{top + HEIGHT}" text-anchor="end">0</text>',
        f'<text x="{LEFT + WIDTH}" y="{top + HEIGHT + 16}" text-anchor="end">{end / 60:.0f} min</text>',
    ]
    for n, (name, points) in enumerate(panel.lines.items()):
        colour = COLOURS[n % len(COLOURS)]
        path = " ".join(
            f"{LEFT + WIDTH * at / end:.1f},{top + HEIGHT - HEIGHT * value / most:.1f}" for at, value in points
        )
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        parts.append(f'<text x="{LEFT + WIDTH + 8}" y="{top + 12 + 15 * n}" fill="{colour}">{escape(name)}</text>')
    return "\n".join(parts)
