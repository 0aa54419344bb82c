"""The model of the lease protocol (model/lease.pml, docs/model.md), checked with Spin: all of its states."""

import re

import pytest
from model import check

from tests.support.doc_pages import ROOT

pytestmark = pytest.mark.skipif(check.missing() is not None, reason=f"{check.missing()} is missing (scripts/need-spin)")


def holds(verdict: check.Verdict) -> None:
    assert (verdict.errors, verdict.broken) == (0, ""), verdict.story
    assert verdict.complete


def test_protocol_is_safe_in_every_state() -> None:
    """Proves L4, L6, L9, L13, L15, C1, C2, N1 of the model: nothing that must not happen can."""
    verdict = check.check_safety()
    holds(verdict)
    assert verdict.unused == ()


def test_every_job_ends_and_every_worker_becomes_idle() -> None:
    """After any kills and stops each job ends and each worker becomes idle."""
    holds(check.check_rest())


def test_protocol_passes_the_search_that_catches_loops() -> None:
    holds(check.check_rest_fairly())


@pytest.mark.parametrize("variant", check.VARIANTS)
def test_broken_protocol_is_caught_by_the_property_that_is_named(variant: str) -> None:
    verdict = check.check_variant(variant)
    assert verdict.errors == 1
    assert verdict.broken in check.VARIANTS[variant].caught_as, verdict.story
    assert verdict.story


@pytest.mark.parametrize("variant", check.LOOPS)
def test_no_assertion_catches_a_loop(variant: str) -> None:
    """Only the formula catches it."""
    holds(check.check_loop_is_safe(variant))


@pytest.mark.parametrize("variant", check.STANDSTILLS)
def test_deadlock_is_found_as_a_job_that_never_ends(variant: str) -> None:
    verdict = check.check_standstill(variant)
    assert verdict.broken == "every job ends", verdict.story


def test_properties_that_are_named_exist() -> None:
    assert {name for variant in check.VARIANTS.values() for name in variant.caught_as} <= check.properties()
    assert check.FORMULAS.keys() <= check.properties()


def test_the_page_says_what_catches_each_variant() -> None:
    page = (ROOT / "docs" / "model.md").read_text()
    rows = re.findall(r"^\| `([A-Z_]+)` \| .+ \| (.+) \|$", page, re.MULTILINE)
    assert rows == [(name, " / ".join(variant.caught_as)) for name, variant in check.VARIANTS.items()]
