"""Spare start markers, and the thread that makes them."""

import asyncio
import threading
from pathlib import Path

import pytest

from holdfast.runner.process import ProcessRunner
from holdfast.runner.spare_markers import SPARES, SpareMarkers
from holdfast.runner.state_folder import StateFolder


async def test_a_closed_runner_no_longer_writes_to_its_state_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that leaves while its spare markers are being made waits for the thread that makes them."""
    began, go_on = threading.Event(), threading.Event()
    refill = SpareMarkers.refill

    def refill_later(markers: SpareMarkers) -> None:
        began.set()
        go_on.wait()
        refill(markers)

    monkeypatch.setattr(SpareMarkers, "refill", refill_later)
    runner = ProcessRunner(StateFolder(tmp_path), "test", user=None, log_cap=1 << 20)
    watching = asyncio.create_task(runner.watch(lambda: None))
    await asyncio.to_thread(began.wait)
    watching.cancel()
    closing = asyncio.create_task(asyncio.to_thread(runner.close))
    await asyncio.wait([closing], timeout=0.2)  # Longer than a close that waits for nothing.
    closed_early = closing.done()
    go_on.set()
    await closing
    assert not closed_early
    assert len([*runner.markers.root.iterdir()]) == SPARES
