"""The focus of a run: the faults, steps and jobs that expose one kind of mistake.

What a focused run finds in a broken build counts only if the same focus finds nothing in a healthy one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torture.jobs import Profile


@dataclass(frozen=True)
class Focus:
    store: str = "sqlite"
    seconds: float = 45.0
    faults: Sequence[str] = ()
    """The faults to strike with, by name; empty: all of them."""
    pause: float = 1.0
    """Seconds between two faults, on average."""
    waits: float = 0.004
    """How often a worker waits at a step of an attempt, to be stopped there."""
    step: str = ""
    """The one step to wait at; empty: any."""
    lingers: str = ""
    """The statement after which transactions linger, on Postgres: between a check and the action."""
    profile: Profile = "mixed"
    runners: Sequence[str] = ("process",)
    one_host: bool = False
    """Whether all workers are on one host, where each can adopt what another left."""


ANYTHING = Focus()
LATE_FINISHES = Focus(
    faults=("kill_worker",), pause=10.0, waits=0.1, step="classified", profile="failing", one_host=True
)
"""A worker is stopped before it writes an end, until the job is in its next attempt elsewhere."""
LATE_STARTS = Focus(faults=("kill_worker",), pause=10.0, waits=0.1, step="prepared", profile="failing", one_host=True)
"""A worker is stopped before a start, until another has adopted the job and started it."""
STOPS = Focus(profile="failing")
"""Jobs that are tried again and again, and stopped meanwhile."""
HANGING = Focus(faults=("kill_worker",), pause=5.0, waits=0.0, profile="hanging")
"""Jobs that end when they are stopped, some of them by an adopter."""
SHORT_LANES = Focus(
    store="postgres", faults=("slow_everybody",), pause=3.0, waits=0.0, lingers="lane_states", profile="lanes"
)
"""Many lanes that are used for a moment each: what stands in line when a lane stands still is not freed by the next."""
OUTAGES = Focus(store="postgres", seconds=60.0, faults=("take_postgres_away",), pause=8.0, waits=0.0, profile="steady")
"""The database is away for longer than a lease lasts; when it is back, a reaper may be faster than a heartbeat."""
BUDGETS = Focus(seconds=30.0, faults=("kill_worker",), pause=5.0, waits=0.0, profile="budgets")
"""Jobs that use up their budget, with their last word too, some of them collected by an adopter."""
BUILDS = Focus(seconds=30.0, faults=("kill_worker",), pause=5.0, waits=0.0, profile="builds")
"""Builds for a few reuse keys that often fail, and are resumed when a newer one has succeeded."""
FILES = Focus(seconds=30.0, faults=("kill_worker", "kill_server"), pause=5.0, waits=0.0, profile="files")
"""Jobs that leave files, and are deleted."""
SHARED_SNAPSHOTS = Focus(seconds=60.0, runners=("pipeline",))
"""Pipelines that race for the same snapshots."""
