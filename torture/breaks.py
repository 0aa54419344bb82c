"""Broken builds: each takes one safeguard out of holdfast, so that a torture run has something to find."""

from collections.abc import Callable

BREAKS: dict[str, Callable[[], None]] = {}


def apply(name: str) -> None:
    BREAKS[name]()
