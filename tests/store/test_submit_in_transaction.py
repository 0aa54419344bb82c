"""Submit inside the caller's own transaction: every driver, both databases, and what may wait for what."""

import asyncio
import re
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import asyncpg
import psycopg
import pytest
from sqlalchemy import create_engine

import holdfast
from holdfast.errors import (
    Conflict,
    HoldfastError,
    Invalid,
    NeedFailed,
    NotFound,
    QueueFull,
    ReplayedJobDeleted,
    StoreError,
)
from holdfast.model import Claimable, Gate, Status, new_id
from holdfast.store import Store, gates, open_store
from holdfast.store.postgres import PostgresDatabase
from holdfast.timing import ManualClock
from tests.conftest import assert_healthy
from tests.support.cluster import binaries
from tests.support.store_harness import StoreHarness
from tests.support.submit_drivers import POSTGRES, SQLITE, SubmitDriver, open_caller

DOCS = Path(__file__).parents[2] / "docs" / "transactions.md"
JOB: dict[str, Any] = {"runner": "function", "spec": {"name": "f"}}
TABLES = ("jobs", "specs", "needs", "reuse", "idempotency")
ONE_EACH = ["asyncpg", "psycopg", "async session over asyncpg", "sqlite3"]
GUARD = 60.0
"""Seconds after which something that should not wait is stuck; nothing is measured with it."""


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


async def run_sql(store: Store, sql: str) -> list[Any]:
    """Run SQL on a connection that is not the caller's."""
    if isinstance(store.database, PostgresDatabase):
        return [next(iter(row.values())) for row in await store.database.fetch(sql)]
    file = sqlite3.connect(store.database.path, isolation_level=None)
    try:
        return [row[0] for row in file.execute(sql.replace("holdfast.", "")).fetchall()]
    finally:
        file.close()


async def rows_left(harness: StoreHarness) -> dict[str, int]:
    counts = {table: (await run_sql(harness.store, f"SELECT count(*) FROM holdfast.{table}"))[0] for table in TABLES}
    return {table: count for table, count in counts.items() if count}


async def notes(harness: StoreHarness) -> list[str]:
    return await run_sql(harness.store, "SELECT note FROM notes ORDER BY note")


async def until_one_waits_for_a_lock(harness: StoreHarness) -> None:
    sql = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    async with asyncio.timeout(GUARD):
        while (await run_sql(harness.store, sql))[0] == 0:
            pass


# Every driver


async def test_rollback_leaves_no_job(harness: StoreHarness, caller: SubmitDriver) -> None:
    """Proves J13."""
    parent = new_id()
    await caller.note("kept?")
    await caller.submit(
        {**JOB, "id": parent, "reuse_key": "R"}, {**JOB, "lane": "L", "needs": [parent]}, JOB, key="call-1"
    )
    await caller.rollback()
    assert await rows_left(harness) == {}
    assert await notes(harness) == []


async def test_commit_makes_jobs_claimable_and_any_resolver_settles_lane_and_needs(
    harness: StoreHarness, caller: SubmitDriver
) -> None:
    """Proves J13."""
    parent = new_id()
    await caller.note("kept")
    accepted = await caller.submit(
        {**JOB, "lane": "L", "needs": [parent]}, {**JOB, "id": parent}, {**JOB, "lane": "L", "inputs": {"naïve": "✓"}}
    )
    child, own, second = (job.id for job in accepted)
    assert own == parent
    assert not any(job.reused for job in accepted)
    assert await rows_left(harness) == {}  # Not before the commit.
    await caller.commit()
    assert await notes(harness) == ["kept"]
    assert (await harness.get(child)).gate is Gate.UNRESOLVED
    assert [lease.id for lease in await harness.claim()] == [parent]
    await harness.store.gates.resolve()
    assert (await harness.get(child)).gate is Gate.NEEDS
    (lease,) = await harness.claim()
    assert (lease.id, lease.inputs) == (second, {"naïve": "✓"})


async def test_answer_lists_reused_jobs(harness: StoreHarness, caller: SubmitDriver) -> None:
    """Proves J12, N7."""
    standing = await harness.submit(reuse_key="R")
    first, second = await caller.submit({**JOB, "reuse_key": "R"}, JOB, key="K")
    assert (first.id, first.reused) == (standing.id, True)
    assert not second.reused
    replayed = await caller.submit({**JOB, "reuse_key": "R"}, JOB, key="K")
    assert [(job.id, job.reused) for job in replayed] == [(standing.id, True), (second.id, True)]
    await caller.commit()
    # The keys are the same ones that a store's own submit knows.
    again = await harness.store.jobs.accept(({**JOB, "reuse_key": "R"}, JOB), key="K")
    assert [job.id for job in again] == [standing.id, second.id]


async def test_refused_call_gives_the_typed_error_and_inserts_nothing(
    harness: StoreHarness, caller: SubmitDriver, kind: str
) -> None:
    """Proves J11, J12, J13."""
    taken = await harness.submit(queue="other")
    broken = await harness.submit(hold=True, queue="other")
    await harness.store.jobs.cancel(broken.id)
    await harness.store.queues.limit("small", depth=2)
    await harness.store.jobs.accept([JOB], key="used")
    deleted = (await harness.store.jobs.accept([{**JOB, "hold": True}], key="gone"))[0]
    await harness.store.jobs.delete(deleted.id, force=True)
    before, unknown = await rows_left(harness), new_id()
    refusals: list[tuple[type[HoldfastError], str, list[Any], dict[str, Any]]] = [
        (Invalid, "priority", [JOB, {**JOB, "priority": "high"}], {}),
        (Invalid, "spec", [{**JOB, "spec": {}}], {}),
        (Invalid, "jobs: 0 jobs", [], {}),
        (Invalid, "idempotency_key", [JOB], {"key": "k" * 129}),
        (Invalid, "tenant", [JOB], {"tenant": ""}),
        (NotFound, unknown, [JOB, {**JOB, "needs": [unknown]}], {"key": "new"}),
        (NeedFailed, f"{broken.id} cancelled", [JOB, {**JOB, "needs": [broken.id]}], {}),
        (Conflict, f"id: job {taken.id} exists already", [JOB, {**JOB, "id": taken.id}], {"key": "new"}),
        (QueueFull, "small", [{**JOB, "queue": "small", "reuse_key": f"S{n}"} for n in range(3)], {"key": "new"}),
        (Conflict, "another body", [{**JOB, "priority": 1}], {"key": "used"}),
        (ReplayedJobDeleted, "deleted", [{**JOB, "hold": True}], {"key": "gone"}),
    ]
    for error, words, jobs, options in refusals:
        await caller.note("lost on Postgres, where a failed statement aborts the transaction")
        with pytest.raises(error, match=re.escape(words)) as caught:
            await caller.submit(*jobs, **options)
        assert type(caught.value) is error
        await (caller.commit() if kind == "sqlite" or error is Invalid else caller.rollback())
    assert await rows_left(harness) == before
    assert len(await notes(harness)) == (len(refusals) if kind == "sqlite" else 5)
    await caller.submit(*[{**JOB, "queue": "small"}] * 2)
    await caller.commit()


@pytest.mark.parametrize("driver", ONE_EACH)
async def test_ten_thousand_in_one_call(harness: StoreHarness, caller: SubmitDriver) -> None:
    """Proves J13."""
    accepted = await caller.submit(*[JOB] * 10_000)
    assert len({job.id for job in accepted}) == 10_000
    await caller.commit()
    assert (await rows_left(harness)) == {"jobs": 10_000, "specs": 10_000}
    assert len(await harness.claim(slots=100)) == 100
    with pytest.raises(Invalid, match="10001 jobs in one call"):
        await caller.submit(*[JOB] * 10_001)


# What waits for what


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg", "connection over psycopg", "async session over asyncpg"])
async def test_idle_transaction_after_a_submit_into_a_lane_blocks_nothing(
    harness: StoreHarness, caller: SubmitDriver
) -> None:
    """Proves J13."""
    first = await harness.submit(lane="L")
    parent = await harness.submit()
    (idle,) = await caller.submit({**JOB, "lane": "L", "needs": [first.id, parent.id], "reuse_key": "R"}, key="K")
    async with asyncio.timeout(GUARD):
        second, third = await harness.submit(lane="L"), await harness.submit(lane="L", needs=[parent.id])
        await harness.store.jobs.accept([{**JOB, "lane": "L", "reuse_key": "other"}], key="other")
        await harness.store.gates.resolve()
        leases = {lease.id: lease for lease in await harness.claim()}
        assert set(leases) == {first.id, parent.id}
        assert await harness.finish(leases[first.id]) is Status.SUCCEEDED
        assert await harness.finish(leases[parent.id]) is Status.SUCCEEDED
        await harness.store.gates.resolve()
        assert (await harness.run_one()).id == second.id
        assert (await harness.store.jobs.cancel(third.id)).outcome == "ended"
        await harness.store.jobs.delete(second.id)
        await harness.store.lanes.pause("L")
        await harness.store.lanes.resume("L")
        await harness.run_one()
        await harness.store.gates.resolve()
    await caller.commit()
    await harness.store.gates.resolve()
    assert [lease.id for lease in await harness.claim()] == [idle.id]


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg", "session over psycopg", "async connection over asyncpg"])
@pytest.mark.parametrize("first_commits", [True, False])
async def test_same_keys_wait_and_then_join_or_replay(
    harness: StoreHarness, caller: SubmitDriver, driver: str, first_commits: bool
) -> None:
    """Proves J12, J13, N7."""
    for options, job in [({}, {**JOB, "reuse_key": "R"}), ({"key": "K"}, JOB)]:
        (mine,) = await caller.submit(job, **options)
        async with open_caller(driver, harness.url) as other:
            waiting = asyncio.create_task(other.submit(job, **options))
            await until_one_waits_for_a_lock(harness)
            await (caller.commit() if first_commits else caller.rollback())
            async with asyncio.timeout(GUARD):
                (theirs,) = await waiting
            await other.commit()
        assert theirs.reused is first_commits
        assert (theirs.id == mine.id) is first_commits
    assert len((await harness.store.jobs.list()).items) == 2


@pytest.mark.parametrize("driver", ONE_EACH)
async def test_ten_parallel_submits_of_one_reuse_key_build_once(harness: StoreHarness, driver: str) -> None:
    """Proves J13, N7."""

    async def one(caller: SubmitDriver) -> tuple[str, bool]:
        (accepted,) = await caller.submit({**JOB, "reuse_key": "R"})
        await caller.commit()
        return accepted.id, accepted.reused

    async with AsyncExitStack() as stack:
        drivers = [await stack.enter_async_context(open_caller(driver, harness.url)) for _ in range(10)]
        answers = await asyncio.gather(*map(one, drivers))
    assert len({job_id for job_id, _ in answers}) == 1
    assert sorted(reused for _, reused in answers) == [False] + [True] * 9
    assert await rows_left(harness) == {"jobs": 1, "specs": 1, "reuse": 1}


@pytest.mark.parametrize("driver", ["asyncpg"])
async def test_open_transactions_may_overshoot_a_depth_limit_but_never_wait_for_it(
    harness: StoreHarness, caller: SubmitDriver, driver: str
) -> None:
    """Proves J11, J13."""
    await harness.store.queues.limit("small", depth=1)
    job = {**JOB, "queue": "small"}
    async with open_caller(driver, harness.url) as other, asyncio.timeout(GUARD):
        await caller.submit(job)
        await other.submit(job)
        await caller.commit()
        await other.commit()
        with pytest.raises(QueueFull):
            await other.submit(job)
        await other.rollback()


# Postgres


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
    standing = await harness.submit(reuse_key="R")
    accepted = await caller.submit({**JOB, "reuse_key": "R"}, JOB, key="K")
    await caller.commit()
    assert accepted[0].id == standing.id
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


# SQLite


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

    standing = await harness.submit(reuse_key="R")
    await harness.store.queues.limit("default", depth=5)
    for row_factory, text_factory in [(sqlite3.Row, bytes), (as_dict, lambda raw: raw[::-1])]:
        file = sqlite_file(harness)
        file.row_factory, file.text_factory = row_factory, text_factory
        before = file.execute("SELECT count(*) FROM pragma_function_list").fetchone()
        (joined,) = holdfast.submit_inside(file, [{**JOB, "reuse_key": "R"}], key="K")
        (replayed,) = holdfast.submit_inside(file, [{**JOB, "reuse_key": "R"}], key="K")
        assert joined.id == replayed.id == standing.id
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


# Connections


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


def test_snippets_of_the_docs_are_python() -> None:
    snippets = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    assert snippets
    for snippet in snippets:
        compile(f"async def example():\n{re.sub('^', '    ', snippet, flags=re.MULTILINE)}", str(DOCS), "exec")


@pytest.mark.parametrize("kind", ["postgres"])
async def test_open_transaction_with_a_reuse_key_holds_up_no_heartbeat(clean_url: str) -> None:
    """Proves J13, L8."""
    async with await open_store(clean_url, listen=False) as store:
        job = {"runner": "function", "spec": {"name": "f"}}
        (keyed,) = await store.jobs.submit_many([{**job, "lane": "L", "reuse_key": "k"}])
        await store.jobs.cancel(keyed)
        await store.jobs.submit_many([{**job, "lane": "L"}, job])
        pair = Claimable(queue="default", capability="function:f", domain="function")
        leases = (await store.leases.claim("w1", [pair], slots=9, ttl=60)).claimed
        connection = await asyncpg.connect(clean_url)
        transaction = connection.transaction()
        await transaction.start()
        await holdfast.submit_inside_async(connection, [{**job, "reuse_key": "k"}])
        resume = asyncio.create_task(store.jobs.resume(keyed))
        waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted"
        watcher = await asyncpg.connect(clean_url)
        async with asyncio.timeout(60):
            while not await watcher.fetchval(waiting):
                pass  # Until the resume waits for the key.
            pulse = await store.leases.beat("w1", leases, ttl=60)
        assert {beat.answer for beat in pulse.jobs} == {"yours"}
        await transaction.rollback()
        assert (await resume).status is Status.QUEUED
        await watcher.close()
        await connection.close()


@pytest.mark.parametrize("kind", ["postgres"])
async def test_open_transaction_with_a_reuse_key_delays_only_the_dependants_that_want_it(
    clean_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proves J13, N7."""
    monkeypatch.setattr(gates, "KEY_SECONDS", 1)
    async with await open_store(clean_url, listen=False) as store:
        job = {"runner": "function", "spec": {"name": "f"}}
        parent, other = await store.jobs.submit_many([job, job])
        (keyed,) = await store.jobs.submit_many([{**job, "needs": [parent], "reuse_key": "k"}])
        (plain,) = await store.jobs.submit_many([{**job, "needs": [other]}])
        for job_id in (parent, other):
            await store.jobs.cancel(job_id)
        connection = await asyncpg.connect(clean_url)
        transaction = connection.transaction()
        await transaction.start()
        await holdfast.submit_inside_async(connection, [{**job, "reuse_key": "k"}])
        async with asyncio.timeout(60):
            await store.jobs.resume(parent)  # lands, and leaves its dependant for later
            await store.jobs.resume(other)
        assert (await store.jobs.get(plain)).status is Status.QUEUED
        assert (await store.jobs.get(keyed)).status is Status.FAILED
        await transaction.rollback()
        await connection.close()
        await store.gates.resolve()
        assert (await store.jobs.get(keyed)).status is Status.QUEUED
