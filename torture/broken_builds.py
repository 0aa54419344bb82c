"""Broken builds: each removes one safeguard of holdfast, so that a torture run has something to find.

They patch the running process from outside (instrumented_cli.py); the product has no switch. Each names its focus and
the rules that may detect it.
"""

import contextlib
import dataclasses
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from holdfast.duties.reaper import Reaper
from holdfast.runner.process import ProcessRunner
from holdfast.runner.process_staging import ProcessStaging
from holdfast.runner.state_folder import WorkerLocks
from holdfast.store import gates, lanes, queries
from holdfast.store.events import Events
from holdfast.store.sql_entries import Dialect
from holdfast.worker import attempt_execution, attempt_start
from holdfast.worker.attempt_start import AttemptStarter
from holdfast.worker.held_leases import HeldLease
from torture.broken_budgets import ANSWERS
from torture.broken_pipelines import PIPELINES
from torture.focus import (
    ANYTHING,
    BUILDS,
    HANGING,
    LATE_FINISHES,
    LATE_STARTS,
    OUTAGES,
    SHARED_SNAPSHOTS,
    SHORT_LANES,
    STOPS,
    Focus,
)

FOREVER = 1e9
HASTE = 0.02
"""How often a look at a neighbour's lock file goes wrong in a build that is broken there: there are two in a second."""


@dataclass(frozen=True)
class BrokenBuild:
    """One removed safeguard."""

    apply: Callable[[], None]
    seen_by: Sequence[str]
    """The rules of the checker that may catch it; what another rule finds has another reason."""
    focus: Focus = ANYTHING


def edit(name: str, old: str, new: str, dialect: str = "sqlite") -> None:
    """Change the text of a statement in the statements that are loaded from now on."""
    load = queries.load

    def changed(asked: Dialect) -> dict[str, queries.NamedQuery]:
        found = load(asked)
        if asked == dialect:
            query = found[name]
            texts = [dataclasses.replace(part, text=part.text.replace(old, new)) for part in query.statements]
            if tuple(texts) == query.statements:
                raise AssertionError(f"{name} has no {old!r}")
            found[name] = dataclasses.replace(query, statements=tuple(texts))
        return found

    vars(queries)["load"] = changed


def finish_without_fence() -> None:
    edit("finish", "j.token = ?", "(j.token = ? OR 1)")


def no_token_growth_at_reap() -> None:
    edit("reap", "token = j.token + 1", "token = j.token + 0")


def stop_cleared_at_claim() -> None:
    """A requeue keeps the stop request, and the next claim clears it."""
    edit("finish", "j.stop_kind IS NOT NULL", "0")
    edit("finish", "i.status = 'queued' AND j.stop_kind IS NULL", "i.status = 'queued'")
    edit("take", "queue_deadline_at = NULL,", "queue_deadline_at = NULL, stop_kind = NULL, stop_phase = NULL,")


def lane_read_before_its_lock() -> None:
    """A lane is read without its lock, and without the locks of the jobs that would move."""
    edit("lock_lanes", "FOR NO KEY UPDATE OF l", "", "postgres")

    async def nobody(*_: object) -> set[str]:
        return set()

    for module in (lanes, gates):
        vars(module)["lane_jobs"] = nobody


def adoption_that_restarts() -> None:
    """An adopter starts the attempt again without looking whether it runs."""
    find = AttemptStarter._find

    async def restart(self: AttemptStarter) -> Any:
        if isinstance(self._runner, ProcessRunner):
            _put_aside(self._runner, self._identity)
            return None
        return await find(self)

    AttemptStarter._find = restart  # type: ignore[method-assign]


def start_that_is_not_exclusive() -> None:
    """A start takes no lock: it may be late, and replaces what another worker started."""
    start, spec = ProcessRunner.start, ProcessStaging._spec

    async def started(self: ProcessRunner, request: Any, confirm: Any) -> Any:
        _put_aside(self, request.identity)
        return await start(self, request, confirm)

    async def trusts(*_: object, **__: object) -> None:
        return None

    ProcessRunner.start = started  # type: ignore[method-assign]
    ProcessStaging._spec = lambda self, folder, request, runs_as: msgspec.structs.replace(  # type: ignore[method-assign]
        spec(self, folder, request, runs_as), start_by=FOREVER
    )
    for module in (attempt_start, attempt_execution):
        assert "require_trust" in vars(module)
        vars(module)["require_trust"] = trusts


def _put_aside(runner: ProcessRunner, identity: Any) -> None:
    path = runner.folder(identity).path
    if path.exists():
        path.rename(path.with_name(f".{path.name}.{os.urandom(4).hex()}"))


def offsets_apart_from_their_events() -> None:
    """Events are appended without the log offsets that belong to them."""
    append = Events.append

    async def forgetful(self: Events, *lease: Any, **fields: Any) -> Any:
        return await append(self, *lease, **{**fields, "offsets": (0, 0), "old_offsets": (0, 0)})

    Events.append = forgetful  # type: ignore[method-assign]


def events_without_fence() -> None:
    """Any worker may append the next batch of events, also to another worker's job."""
    edit("append_events", "AND j.token = :token", "")


def stop_not_heard() -> None:
    HeldLease.receive_stop = lambda *_: None  # type: ignore[method-assign]


def neighbours_taken_for_dead() -> None:
    """Sometimes a worker takes a live neighbour's lock file for a dead one's."""
    taken_from_dead = WorkerLocks.taken_from_dead

    @contextlib.contextmanager
    def hasty(self: WorkerLocks, worker: str) -> Iterator[bool]:
        with taken_from_dead(self, worker) as dead:
            yield dead or random.random() < HASTE

    WorkerLocks.taken_from_dead = hasty  # type: ignore[method-assign]


def key_taken_by_a_resume() -> None:
    """An old build that is resumed takes the reuse key from the good one."""
    edit("take_reuse_key", "THEN r.job_id", "THEN NULL")


def reaper_without_doubts() -> None:
    Reaper._trusts_itself = lambda *_: True  # type: ignore[method-assign]


BROKEN_BUILDS: dict[str, BrokenBuild] = {
    "no_token_growth_at_reap": BrokenBuild(no_token_growth_at_reap, ["tokens_grow"]),
    "adoption_that_restarts": BrokenBuild(adoption_that_restarts, ["attempts_start_once"]),
    "offsets_apart_from_their_events": BrokenBuild(offsets_apart_from_their_events, ["logs_are_whole"]),
    "stop_cleared_at_claim": BrokenBuild(stop_cleared_at_claim, ["stops_are_carried"], STOPS),
    "finish_without_fence": BrokenBuild(
        finish_without_fence,
        ["writes_hold_their_lease", "success_has_its_witness", "nothing_runs_after_the_end", "attempts_never_overlap"],
        LATE_FINISHES,
    ),
    "start_that_is_not_exclusive": BrokenBuild(start_that_is_not_exclusive, ["attempts_start_once"], LATE_STARTS),
    "lane_read_before_its_lock": BrokenBuild(
        lane_read_before_its_lock,
        ["lanes_hold_one_job", "lanes_keep_order", "lanes_do_not_stand_still", "every_job_ended", "no_gate_was_stuck"],
        SHORT_LANES,
    ),
    "events_without_fence": BrokenBuild(events_without_fence, ["writes_hold_their_lease"]),
    "neighbours_taken_for_dead": BrokenBuild(neighbours_taken_for_dead, ["returns_have_a_reason"]),
    "stop_not_heard": BrokenBuild(stop_not_heard, ["stops_are_carried_out"], HANGING),
    "reaper_without_doubts": BrokenBuild(reaper_without_doubts, ["reaps_have_a_reason"], OUTAGES),
    "key_taken_by_a_resume": BrokenBuild(key_taken_by_a_resume, ["good_builds_keep_their_key"], BUILDS),
}

BROKEN_BUILDS |= {name: BrokenBuild(make, rules, SHARED_SNAPSHOTS) for name, (make, rules) in PIPELINES.items()}
BROKEN_BUILDS |= {name: BrokenBuild(make, rules, focus) for name, (make, rules, focus) in ANSWERS.items()}


def apply(name: str) -> None:
    BROKEN_BUILDS[name].apply()
