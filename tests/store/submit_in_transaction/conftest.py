"""Fixtures of these tests: a clean store on real time, and a caller with its own connection, for every driver."""

from collections.abc import AsyncIterator

import pytest

from holdfast.store import open_store
from holdfast.timing import ManualClock
from tests.conftest import assert_healthy
from tests.support.store_harness import StoreHarness
from tests.support.submit_drivers import POSTGRES, SQLITE, SubmitDriver, open_caller, run_sql


@pytest.fixture(params=[*POSTGRES, *SQLITE])
def driver(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def kind(driver: str) -> str:
    return "sqlite" if driver in SQLITE else "postgres"


@pytest.fixture
async def harness(kind: str, clean_url: str) -> AsyncIterator[StoreHarness]:
    """A clean store on real time, because a caller's connection knows no other."""
    async with await open_store(clean_url, listen=False) as store:
        await run_sql(store, "CREATE TABLE IF NOT EXISTS notes (note text)")
        await run_sql(store, "DELETE FROM notes")
        yield StoreHarness(kind, clean_url, store, ManualClock())
        await assert_healthy(store)


@pytest.fixture
async def caller(harness: StoreHarness, driver: str) -> AsyncIterator[SubmitDriver]:
    async with open_caller(driver, harness.url) as caller:
        yield caller
