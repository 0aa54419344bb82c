"""Submit inside the caller's transaction on Postgres: notifications, codecs, savepoints, grants, the SQL function."""

import asyncio
import re
import subprocess

import asyncpg
import pytest

from holdfast.errors import (
    HoldfastError,
    Invalid,
    NotFound,
    StoreError,
)
from holdfast.model import Status, new_id
from tests.support.cluster import binaries
from tests.support.store_harness import StoreHarness
from tests.support.submit_drivers import DOCS, JOB, SubmitDriver, notes, open_caller, rows_left, run_sql


@pytest.mark.parametrize("driver", ["psycopg async", "connection over psycopg"])
async def test_commit_notifies_workers_unless_switched_off(harness: StoreHarness, caller: SubmitDriver) -> None:
    """Proves J13."""
    listener = await asyncpg.connect(harness.url)
    heard: asyncio.Queue[str] = asyncio.Queue()
    await listener.add_listener("holdfast", lambda *args: heard.put_nowait(str(args[3])))
    for options, expected in [({"wake": False}, ["marker"]), ({}, ['["work"]', "marker"])]:
        await caller.submit(JOB, **options)
        await listener.execute("SELECT pg_notify('holdfast', 'before')")
        assert await heard.get() == "before"
        await caller.commit()
        await listener.execute("SELECT pg_notify('holdfast', 'marker')")
        assert [await heard.get() for _ in expected] == expected
    await listener.close()


@pytest.mark.parametrize("driver", ["asyncpg"])
async def test_codecs_of_the_callers_connection_do_not_matter(harness: StoreHarness, caller: SubmitDriver) -> None:
    for name in ("json", "jsonb", "uuid"):
        await caller.connection.set_type_codec(name, schema="pg_catalog", encoder=repr, decoder=repr)
    existing = await harness.submit(reuse_key="R")
    accepted = await caller.submit({**JOB, "reuse_key": "R"}, JOB, key="K")
    await caller.commit()
    assert accepted[0].id == existing.id
    assert await harness.status(accepted[1].id) is Status.QUEUED


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg", "connection over psycopg", "async connection over asyncpg"])
async def test_savepoint_of_the_caller_keeps_its_other_work(harness: StoreHarness, caller: SubmitDriver) -> None:
    await caller.note("kept")
    await caller.execute("SAVEPOINT mine")
    with pytest.raises(NotFound):
        await caller.submit({**JOB, "needs": [new_id()]})
    await caller.execute("ROLLBACK TO SAVEPOINT mine")
    await caller.commit()
    assert await notes(harness) == ["kept"]


@pytest.mark.parametrize("driver", ["psycopg", "async connection over asyncpg", "sqlite3"])
async def test_errors_that_are_not_about_the_request_stay_the_drivers(
    harness: StoreHarness, driver: str, kind: str
) -> None:
    async with open_caller(driver, harness.url) as caller, open_caller(driver, harness.url) as other:
        await caller.submit({**JOB, "reuse_key": "R"})
        await other.execute("PRAGMA busy_timeout = 0" if kind == "sqlite" else "SET LOCAL lock_timeout = '1ms'")
        with pytest.raises(Exception, match="lock") as caught:
            await other.submit({**JOB, "reuse_key": "R"})
        assert not isinstance(caught.value, HoldfastError)
        await other.rollback()
        await caller.rollback()


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg", "session over psycopg"])
async def test_missing_schema_is_named_with_the_way_out(harness: StoreHarness, caller: SubmitDriver) -> None:
    with pytest.raises(StoreError, match="run `holdfast migrate`"):
        await caller.submit(JOB, schema="elsewhere")
    await caller.rollback()
    with pytest.raises(Invalid, match="schema"):
        await caller.submit(JOB, schema="x; DROP TABLE jobs")
    assert await rows_left(harness) == {}


@pytest.mark.parametrize("driver", ["asyncpg"])
async def test_documented_grants_are_enough(harness: StoreHarness, caller: SubmitDriver) -> None:
    """A role that may only submit can submit, and cannot read what runs."""
    (grants,) = re.findall(r"```sql\n(GRANT .*?)```", DOCS.read_text(), re.DOTALL)
    admin = await asyncpg.connect(harness.url)
    await admin.execute("CREATE ROLE shop;" + grants)
    await admin.execute("GRANT SELECT ON holdfast.test_clock TO shop")  # The clock that only tests have.
    parent = await harness.submit()
    try:
        await caller.execute("SET LOCAL ROLE shop")
        await caller.submit({**JOB, "lane": "L", "needs": [parent.id], "reuse_key": "R"}, key="K")
        await caller.submit({**JOB, "reuse_key": "R"})
        await caller.commit()
        await caller.execute("SET LOCAL ROLE shop")
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await caller.execute("SELECT * FROM holdfast.specs")
        await caller.rollback()
    finally:
        await admin.execute("DROP OWNED BY shop; DROP ROLE shop")
        await admin.close()
    assert len((await harness.store.jobs.list()).items) == 2


@pytest.mark.parametrize("driver", ["asyncpg"])
async def test_sql_function_from_psql_as_documented(harness: StoreHarness) -> None:
    """Proves J13."""
    (script,) = re.findall(r"```sql\n(BEGIN;.*?)```", DOCS.read_text(), re.DOTALL)
    await run_sql(harness.store, "CREATE TABLE IF NOT EXISTS orders (id integer, state text)")
    await run_sql(harness.store, "TRUNCATE orders")

    def psql(text: str) -> "subprocess.CompletedProcess[str]":
        command = [str(binaries() / "psql"), harness.url, "-X", "-At", "-v", "ON_ERROR_STOP=1", "-f", "-"]
        return subprocess.run(command, input=text, capture_output=True, text=True, check=False)

    rolled_back = await asyncio.to_thread(psql, script.replace("COMMIT;", "ROLLBACK;"))
    assert rolled_back.returncode == 0, rolled_back.stderr
    assert await rows_left(harness) == {}
    done = await asyncio.to_thread(psql, script)
    assert done.returncode == 0, done.stderr
    (job,) = (await harness.store.jobs.list()).items
    assert f"{job.id}|queued|unresolved|f|{job.id}" in done.stdout.splitlines()
    await harness.store.gates.resolve()
    assert [lease.id for lease in await harness.claim_process()] == [job.id]
    refused = await asyncio.to_thread(psql, 'SELECT holdfast.holdfast_submit(\'{"runner": "process", "colour": 1}\')')
    assert refused.returncode != 0
    assert "colour" in refused.stderr
