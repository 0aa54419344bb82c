"""Submit inside the caller's transaction on SQLite: isolation levels, locks, the connection afterwards."""

import asyncio
import sqlite3
import sys
from typing import Any

import psycopg
import pytest
from sqlalchemy import create_engine

import holdfast
from holdfast.errors import (
    Invalid,
    NotFound,
    QueueFull,
    StoreError,
)
from holdfast.model import new_id
from tests.support.store_harness import StoreHarness
from tests.support.submit_drivers import JOB, open_caller, rows_left


def sqlite_file(harness: StoreHarness, level: Any = "") -> Any:
    return sqlite3.connect(harness.url.removeprefix("sqlite:///"), isolation_level=level)


@pytest.mark.parametrize("driver", ["sqlite3"])
@pytest.mark.parametrize("level", [None, "", "DEFERRED", "IMMEDIATE", "EXCLUSIVE"])
async def test_isolation_level_decides_as_for_a_plain_insert(harness: StoreHarness, level: Any) -> None:
    """Proves J13."""
    file = sqlite_file(harness, level)
    with pytest.raises(NotFound):
        holdfast.submit_inside(file, [JOB, {**JOB, "reuse_key": "R", "needs": [new_id()]}], key="K")
    assert not file.in_transaction
    holdfast.submit_inside(file, [JOB, JOB])
    plain_insert_commits = level is None
    assert file.in_transaction is not plain_insert_commits
    assert await rows_left(harness) == ({"jobs": 2, "specs": 2} if plain_insert_commits else {})
    file.rollback()
    file.execute("BEGIN")
    holdfast.submit_inside(file, [JOB])
    assert file.in_transaction
    file.execute("ROLLBACK")
    assert await rows_left(harness) == ({"jobs": 2, "specs": 2} if plain_insert_commits else {})
    file.close()


@pytest.mark.skipif(sys.version_info < (3, 12), reason="sqlite3 has no autocommit attribute before Python 3.12")
@pytest.mark.parametrize("driver", ["sqlite3"])
@pytest.mark.parametrize("autocommit", [True, False])
async def test_autocommit_decides_as_for_a_plain_insert(harness: StoreHarness, autocommit: bool) -> None:
    """Proves J13."""
    file: Any = sqlite_file(harness)
    file.autocommit = autocommit
    with pytest.raises(NotFound):
        holdfast.submit_inside(file, [JOB, {**JOB, "reuse_key": "R", "needs": [new_id()]}], key="K")
    holdfast.submit_inside(file, [JOB, JOB])
    assert await rows_left(harness) == ({"jobs": 2, "specs": 2} if autocommit else {})
    file.rollback()
    assert await rows_left(harness) == ({"jobs": 2, "specs": 2} if autocommit else {})
    file.close()


@pytest.mark.parametrize("driver", ["sqlite3"])
async def test_connection_is_left_as_it_was(harness: StoreHarness) -> None:
    def as_dict(cursor: Any, row: Any) -> dict[str, Any]:
        return {column[0]: value for column, value in zip(cursor.description, row, strict=True)}

    existing = await harness.submit(reuse_key="R")
    await harness.store.queues.limit("default", depth=5)
    for row_factory, text_factory in [(sqlite3.Row, bytes), (as_dict, lambda raw: raw[::-1])]:
        file = sqlite_file(harness)
        file.row_factory, file.text_factory = row_factory, text_factory
        before = file.execute("SELECT count(*) FROM pragma_function_list").fetchone()
        (joined,) = holdfast.submit_inside(file, [{**JOB, "reuse_key": "R"}], key="K")
        (replayed,) = holdfast.submit_inside(file, [{**JOB, "reuse_key": "R"}], key="K")
        assert joined.id == replayed.id == existing.id
        with pytest.raises(QueueFull):
            holdfast.submit_inside(file, [JOB] * 6)
        assert (file.row_factory, file.text_factory) == (row_factory, text_factory)
        assert dict(file.execute("SELECT count(*) FROM pragma_function_list").fetchone()) == dict(before)
        file.close()


@pytest.mark.parametrize("driver", ["sqlite3"])
async def test_waits_for_another_writer_like_any_insert_and_sees_what_it_committed(
    harness: StoreHarness, driver: str
) -> None:
    """Proves J13, N7."""
    async with open_caller(driver, harness.url) as first, open_caller(driver, harness.url) as second:
        (mine,) = await first.submit({**JOB, "reuse_key": "R"}, key="K")
        waiting = asyncio.create_task(second.submit({**JOB, "reuse_key": "R"}))
        await asyncio.sleep(0)  # Reason: let the submit begin.
        await first.commit()
        (theirs,) = await waiting
        await second.commit()
    assert (theirs.id, theirs.reused) == (mine.id, True)


@pytest.mark.parametrize("driver", ["sqlite3"])
async def test_other_connections_are_refused_with_a_list_of_those_that_are_not(harness: StoreHarness) -> None:
    engine = create_engine("sqlite://")
    for thing in (object(), None, engine, "postgresql://", psycopg):
        with pytest.raises(Invalid, match=r"connection: .*psycopg Connection or Cursor.*SQLAlchemy.*sqlite3"):
            holdfast.submit_inside(thing, [JOB])
        with pytest.raises(Invalid, match=r"connection: .*asyncpg Connection.*psycopg AsyncConnection.*SQLAlchemy"):
            await holdfast.submit_inside_async(thing, [JOB])
    file = sqlite_file(harness)
    with pytest.raises(Invalid, match=r"sqlite3\.Connection is for submit_inside;"):
        await holdfast.submit_inside_async(file, [JOB])
    with pytest.raises(Invalid, match="jobs: is not a list"):
        holdfast.submit_inside(file, JOB)  # type: ignore[arg-type]
    file.close()
    with sqlite3.connect(":memory:") as empty, pytest.raises(StoreError, match="run `holdfast migrate`"):
        holdfast.submit_inside(empty, [JOB])
    empty.close()
