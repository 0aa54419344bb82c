"""The parts of a run, each a function that adds its numbers."""

from collections.abc import Awaitable, Callable

from bench.peers.parts import depth, drain, paced, pickup, pinned, references, submit
from bench.peers.run import Run

PARTS: dict[str, Callable[[Run], Awaitable[None]]] = {
    "submit": submit.bench,
    "drain": drain.bench,
    "pickup": pickup.bench,
    "depth": depth.bench,
    "pinned": pinned.bench,
    "paced": paced.bench,
    "references": references.bench,
}
