"""A short run of torture on each store, with a seed of its own; `make torture SEED=… STORE=…` draws it again."""

import os
import random
import subprocess
import sys

import pytest
from torture.processes import ROOT

SECONDS = 60


@pytest.mark.timeout(600)
def test_nothing_is_lost_duplicated_or_out_of_order_under_faults(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Proves L1, L4, L6, L9, L10, L13, L15, L16, L18, L19, R2, R3, R8, R10, R22, C1, C9, N1, N2, N6, N7, E1, E3.

    And J12: calls are repeated with their keys. And P1, P2, P4, P5, P6: pipelines race for the same snapshots.
    """
    seed = os.environ.get("HOLDFAST_TEST_SEED") or str(random.SystemRandom().randrange(1 << 31))
    command = [sys.executable, "-m", "torture", "--seconds", str(SECONDS), "--seed", seed, "--store", kind]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    with capsys.disabled():  # On stderr: what a process of pytest-xdist says on stdout is heard by nobody.
        sys.stderr.write(f"\nseed {seed}: {done.stdout[-1000:]}")
    assert done.returncode == 0, done.stdout + done.stderr
