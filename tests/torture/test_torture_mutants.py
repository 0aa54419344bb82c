"""Broken builds: each can be made, and one that survives its torture makes the verdict red."""

import subprocess
import sys

import pytest
from torture.broken_builds import BROKEN_BUILDS
from torture.checker import RULES, Violation
from torture.focus import Focus
from torture.processes import ROOT

from torture import mutants


def test_every_broken_build_can_be_made() -> None:
    """In a process of its own: what is broken stays so."""
    code = "from torture import broken_builds; from holdfast.store import queries\n" + "".join(
        f"broken_builds.apply({name!r})\n" for name in BROKEN_BUILDS
    )
    code += "queries.load('sqlite'); queries.load('postgres')"
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=ROOT).returncode == 0


def test_every_broken_build_is_looked_for_by_rules_that_there_are() -> None:
    known = {rule.__name__ for rule in RULES}
    assert all(broken.seen_by and known.issuperset(broken.seen_by) for broken in BROKEN_BUILDS.values())


@pytest.mark.parametrize(
    ("healthy", "broken", "code"),
    [
        pytest.param([], ["tokens_grow"], 0, id="caught"),
        pytest.param([], [], 1, id="survived"),
        pytest.param([], ["logs_are_whole"], 1, id="accused of something else"),
        pytest.param(["tokens_grow"], ["tokens_grow"], 1, id="a healthy build is accused too"),
    ],
)
def test_broken_build_that_survives_makes_the_verdict_red(
    monkeypatch: pytest.MonkeyPatch, healthy: list[str], broken: list[str], code: int
) -> None:
    """A catch counts by a rule that fits, and only if a healthy build passes the same run."""

    def found(focus: Focus, seed: int, *, breaking: str = "") -> list[Violation]:
        return [Violation(rule, "job", "what", "story") for rule in (broken if breaking else healthy)]

    monkeypatch.setattr(mutants, "_violations", found)
    assert mutants.judge(["no_token_growth_at_reap"]) == code
