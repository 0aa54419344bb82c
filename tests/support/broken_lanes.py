"""Good histories, broken by hand: lanes, dependencies, reuse keys, and waits without an end."""

import msgspec

from tests.support.breakages import Breakages
from tests.support.hand_made_histories import HandMadeHistory

BROKEN_LANES = Breakages[HandMadeHistory]()


@BROKEN_LANES.breaks("nobody_waits_in_a_circle", "the database had to end a deadlock")
def _circle(example: HandMadeHistory) -> None:
    example.history.deadlocks.append("ERROR:  deadlock detected")


@BROKEN_LANES.breaks("no_gate_was_stuck", "a lane stood still until a duty noticed")
def _stuck(example: HandMadeHistory) -> None:
    example.history.mended.append("repaired a stuck gate: needs of job plain, lane None")


@BROKEN_LANES.breaks("no_gate_was_stuck", "a lane without a holder stood still until a duty noticed")
def _stuck_lane(example: HandMadeHistory) -> None:
    example.history.mended.append("repaired a stuck gate: lane of job None, lane ('default', 'lane')")


@BROKEN_LANES.breaks("lanes_do_not_stand_still", "a lane is free, and those who come later pass the first in it")
def _stands_still(example: HandMadeHistory) -> None:
    example.job("late", lane="still")
    shift = 100.0
    for n in range(5):
        example.job(f"other {n}")
    events = example.history.events["late"]
    example.history.events["late"] = [
        *events[:1], *(msgspec.structs.replace(event, at=event.at + shift) for event in events[1:]),
    ]  # fmt: skip


@BROKEN_LANES.breaks("lanes_hold_one_job", "two jobs of a lane are claimed at once")
def _both(example: HandMadeHistory) -> None:
    late = example.history.events["lane 2"][1]
    first = example.history.records["lane 1"].requested
    example.history.events["lane 2"][1] = msgspec.structs.replace(late, at=first + 5)


@BROKEN_LANES.breaks("lanes_hold_one_job", "two children of a lane run at once")
def _both_run(example: HandMadeHistory) -> None:
    at = example.history.records["lane 1"].requested - example.at
    example.history.lines.append(example.line("lane 2", "tick", at + 7))


@BROKEN_LANES.breaks("lanes_hold_one_job", "a failed job does not block its lane")
def _unblocked(example: HandMadeHistory) -> None:
    example.change_event("lane 1", 8, status="failed")


@BROKEN_LANES.breaks("lanes_keep_order", "the later one of a lane starts first")
def _disorder(example: HandMadeHistory) -> None:
    events = example.history.events
    events["lane 1"], events["lane 2"] = events["lane 2"], events["lane 1"]


@BROKEN_LANES.breaks("needs_come_first", "a dependant is claimed too soon")
def _too_early(example: HandMadeHistory) -> None:
    late = example.history.events["dependant"][1]
    first = example.history.records["plain"].requested
    example.history.events["dependant"][1] = msgspec.structs.replace(late, at=first + 5)


@BROKEN_LANES.breaks("one_builder_per_key", "two builders at once")
def _two_builders(example: HandMadeHistory) -> None:
    example.job("builder 2", reuse_key="key", rebuild=True)
    first = example.history.records["builder"].requested
    old = example.history.events["builder 2"][0]
    example.history.events["builder 2"][0] = msgspec.structs.replace(old, at=first + 5)
