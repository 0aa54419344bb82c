"""Fixtures of the worker's tests."""

from pathlib import Path

import pytest

from holdfast.runner import start_pause
from holdfast.worker import classify, pipeline_execution
from tests.support.in_process_workers import InProcessWorkers
from tests.support.pipelines import Pipelines


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short waits: there are many full disks here."""
    monkeypatch.setattr(start_pause, "BASE_SECONDS", 0.05)
    monkeypatch.setattr(start_pause, "CAP_SECONDS", 0.1)
    monkeypatch.setattr(classify, "NO_SPACE_BASE", 0.05)
    monkeypatch.setattr(classify, "NO_SPACE_CAP", 0.1)
    monkeypatch.setattr(pipeline_execution, "NO_SPACE_BASE", 0.05)


@pytest.fixture
def pipelines(workers: InProcessWorkers, tmp_path: Path) -> Pipelines:
    return Pipelines(workers, tmp_path)
