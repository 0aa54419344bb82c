"""When an attempt may be called lost, as the checker of torture runs sees it, by histories made by hand."""

import pytest
from torture.checker import check
from torture.history import Fault

from tests.support.hand_made_histories import HandMadeHistory, good

CLAIMED, BEGUN, ENDED = 1.0, 2.0, 2.6
"""Seconds of the job's time."""


def _told(
    *, runner: str = "docker", kind: str = "restart of dockerd", at: float = BEGUN + 0.1, ended: float = ENDED
) -> HandMadeHistory:
    """A job that nobody touched is lost in its start; something was done to the engine at this second of its time."""
    example = good()
    example.job("box", runner=runner)
    began = example.history.records["box"].requested
    example.history.lines = [line for line in example.history.lines if line.job != "box" or line.what == "start"]
    example.history.faults.append(Fault(kind=kind, at=began + at, until=began + at + 1))
    example.history.events["box"] = [
        *example.history.events["box"][:2],
        example.event(3, ended - 10, "status", status="failed", attempt=1, cause="lost"),
    ]
    example.history.follows = [follow for follow in example.history.follows if follow.job != "box"]
    example.history.writes = [write for write in example.history.writes if write.job != "box"]
    example.change_record("box", status="failed", seq=3, finished=began + ended)
    example.change_attempt(
        "box", cause="lost", status="failed", exit_code=None, token=1, end_seq=3, ended=began + ended
    )
    return example


def _beside(example: HandMadeHistory, *, runner: str, since: float, until: float) -> None:
    """Another job's child gave a sign at these seconds of the lost one's time."""
    example.job("other", runner=runner)
    began = example.history.records["box"].requested - example.at
    example.history.lines = [line for line in example.history.lines if line.job != "other"]
    example.history.lines += [
        example.line("other", "start", began + since),
        example.line("other", "end", began + until, said=3),
    ]


def _accused(example: HandMadeHistory) -> set[str]:
    return {violation.rule for violation in check(example.history) if violation.job == "box"}


@pytest.mark.parametrize("at", [CLAIMED + 0.1, BEGUN + 0.1])
def test_container_may_be_lost_if_its_engine_stopped_during_the_start(at: float) -> None:
    """Proves R5 as far as the engine is to blame: before its first sign or right after it."""
    assert _accused(_told(at=at)) == set()


@pytest.mark.parametrize(("at", "ended"), [(CLAIMED - 0.1, ENDED), (BEGUN + 0.55, ENDED), (BEGUN + 0.3, BEGUN + 0.2)])
def test_engine_stopped_at_another_time_loses_no_container(at: float, ended: float) -> None:
    """Proves R3, R5: before it was claimed, when it ran, when it was lost already."""
    assert _accused(_told(at=at, ended=ended)) == {"losses_have_a_reason"}


def test_killed_engine_loses_no_container() -> None:
    """Proves R3, R5."""
    assert _accused(_told(kind="crash of dockerd")) == {"losses_have_a_reason"}


def test_engine_loses_no_process() -> None:
    """Proves R3, R5."""
    assert _accused(_told(runner="process")) == {"losses_have_a_reason"}


@pytest.mark.parametrize(
    ("runner", "since", "until", "accused"),
    [
        ("docker", 1.0, 4.0, {"losses_have_a_reason"}),
        ("docker", 1.9, 4.0, set()),
        ("docker", 0.0, 2.2, set()),
        ("process", 1.0, 4.0, set()),
    ],
)
def test_engine_that_sees_a_running_container_ends_none(
    runner: str, since: float, until: float, accused: set[str]
) -> None:
    """Proves R3, R5: one that starts or ends itself at that time is not seen, nor is a process."""
    example = _told()
    _beside(example, runner=runner, since=since, until=until)
    assert _accused(example) == accused
