"""The model of the lease protocol (model/lease.pml, docs/model.md), checked with Spin: all of its states."""

import pytest
from model import check

pytestmark = pytest.mark.skipif(check.missing() is not None, reason=f"{check.missing()} is missing (scripts/need-spin)")


def test_protocol_is_safe_in_every_state() -> None:
    """Proves L4, L6, L9, L13, L15, C1, C2, N1 of the model: nothing that must not happen can."""
    verdict = check.check_safety()
    assert (verdict.errors, verdict.broken) == (0, ""), verdict.story
    assert verdict.complete
    assert verdict.unused == ()


def test_every_job_ends() -> None:
    """However workers are killed and stopped, each job comes to its end once that is over."""
    verdict = check.check_ends()
    assert (verdict.errors, verdict.broken) == (0, ""), verdict.story
    assert verdict.complete


@pytest.mark.parametrize("variant", check.VARIANTS)
def test_broken_protocol_is_caught(variant: str) -> None:
    verdict = check.check_variant(variant)
    assert verdict.errors == 1
    assert verdict.broken
    assert verdict.story
