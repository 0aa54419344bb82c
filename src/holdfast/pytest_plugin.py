"""The pytest plugin: a fixture that gives a test a store of its own, a running worker, and a clock to move.

    def test_a_greeting(holdfast_test):
        with holdfast_test(app) as jobs:
            assert jobs.submit(greet, name="Ada").result(timeout=30) == "hello Ada"

It is loaded by pytest in every environment that has holdfast, so it imports nothing before a test asks for it.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from holdfast.testing.application import TestInstallation


@pytest.fixture
def holdfast_test(tmp_path: Path) -> "TestInstallation":
    """A migrated SQLite store in the test's folder; call it with an application to run it there, with a worker."""
    from holdfast.testing.application import TestInstallation  # noqa: PLC0415

    return TestInstallation(tmp_path / "holdfast")
