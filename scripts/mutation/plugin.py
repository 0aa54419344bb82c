"""Runs inside pytest: choose and order the tests of a mutant, and record how each test ended.

MUTATION_TESTS names a file with the ids of the tests, one per line, in the order to run them; without it, all are run.
MUTATION_RESULTS names the file to which every test appends its id, how it ended, its seconds and whether it is quick.
"""

import os
from collections.abc import Generator
from pathlib import Path

import pytest

ENGINES = {"docker_engine", "brittle_engine"}
"""Tests with these fixtures are left out: starting an engine takes longer than all other tests of a mutant."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items[:] = [item for item in items if not ENGINES & {*getattr(item, "fixturenames", ())}]
    chosen = os.environ.get("MUTATION_TESTS")
    if chosen:
        order = {test: n for n, test in enumerate(Path(chosen).read_text().splitlines())}
        items[:] = sorted((item for item in items if item.nodeid in order), key=lambda item: order[item.nodeid])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    quick = item.get_closest_marker("quick") is not None
    with Path(os.environ["MUTATION_RESULTS"]).open("a") as file:
        file.write(f"{item.nodeid}\t{report.outcome}\t{report.duration:.4f}\t{int(quick)}\n")
    return report
