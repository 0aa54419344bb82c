"""Processes with a wrong clock: by how much, and what killed ones leave."""

import os
import signal
import subprocess
import sys
import time

import pytest
from torture.processes import ROOT

from torture import clocks

pytestmark = pytest.mark.skipif(clocks.LIBRARY is None, reason="wants Debian's faketime")
TELL = "import time; print(time.time(), time.monotonic(), flush=True); input()"


SLEEP = "import time; from torture import clocks; clocks.sleep_truly(); time.sleep(0.2)"


def start(shift: str, script: str = TELL) -> "subprocess.Popen[str]":
    environment = {**os.environ, **clocks.shifted(shift)}
    return subprocess.Popen(
        [sys.executable, "-c", script], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        cwd=ROOT,
    )  # fmt: skip


@pytest.mark.parametrize(("shift", "seconds"), [("+6h", 21600), ("-6h", -21600)])
def test_wall_clock_is_off_and_time_passes_as_it_should(shift: str, seconds: int) -> None:
    with start(shift) as process:
        assert process.stdout is not None
        wall, monotonic = map(float, process.stdout.readline().split())
        process.communicate("\n")
    assert abs(wall - time.time() - seconds) < 60
    assert abs(monotonic - time.monotonic()) < 60


@pytest.mark.parametrize("shift", ["+6h", "-6h"])
def test_process_with_a_wrong_clock_can_sleep(shift: str) -> None:
    began = time.monotonic()
    with start(shift, SLEEP) as process:
        assert process.wait(30) == 0
    assert time.monotonic() - began >= 0.2


def test_leftovers_of_killed_processes_are_removed_and_those_of_live_ones_kept() -> None:
    """A process id comes round again, and faketime refuses to start under one whose names are taken."""
    with start("+1h") as killed, start("+1h") as living:
        for process in (killed, living):
            assert process.stdout is not None
            process.stdout.readline()
            assert len(left(process.pid)) == 2
        killed.send_signal(signal.SIGKILL)
        killed.wait(30)
        clocks.shifted("+1h")
        assert (left(killed.pid), len(left(living.pid))) == ([], 2)
        living.communicate("\n")
    assert left(living.pid) == []


def left(pid: int) -> list[str]:
    return sorted(path.name for path in clocks.SHARED.glob(f"*faketime_*_{pid}"))
