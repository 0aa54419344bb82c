"""A short run of torture on each store, with a seed of its own: `make torture SEED=…` repeats its faults."""

import logging
import os
import random
import sys

import pytest
from torture.__main__ import summary
from torture.checker import check
from torture.run import Plan, run

SECONDS = 30.0


@pytest.mark.timeout(600)
async def test_nothing_is_lost_doubled_or_out_of_order_under_fire(
    kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Proves L1, L4, L6, L9, L10, L13, L15, L16, L18, L19, R2, R3, R8, R10, R22, C1, C9, N1, N2, N6, N7, E1, E3.

    And J12: calls are repeated with their keys.
    """
    seed = int(os.environ.get("HOLDFAST_TEST_SEED") or random.SystemRandom().randrange(1 << 31))
    with capsys.disabled():
        sys.stdout.write(f"\ntorture: SEED={seed} STORE={kind}\n")
    logging.getLogger("asyncpg").setLevel(logging.CRITICAL)
    history = await run(Plan(seed=seed, store=kind, seconds=SECONDS))
    sys.stdout.write(summary(history))
    violations = check(history)
    assert not violations, "\n".join([str(violation) for violation in violations[:3]])
    assert len(history.records) > 20
    assert len(history.faults) > 5
