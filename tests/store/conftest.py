"""Fixtures of the store's tests."""

from collections.abc import Iterator

import pytest

from tests.support.race_checks import PROCESSES
from tests.support.race_processes import RaceProcesses


@pytest.fixture(scope="module")
def race_processes() -> Iterator[RaceProcesses]:
    race_processes = RaceProcesses(PROCESSES)
    yield race_processes
    race_processes.close()
