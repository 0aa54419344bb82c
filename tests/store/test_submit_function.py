"""`holdfast_submit(jsonb)`: the same rules for callers in any language, inside their own transaction."""

import json
from typing import Any

import asyncpg
import pytest

from holdfast.model import Claimable, Gate, Status, new_id
from holdfast.pipeline_spec import PIPELINE_FIELDS, pipeline_of
from holdfast.store.postgres import PostgresDatabase
from holdfast.submission import Submission
from tests.support.store_harness import TTL, StoreHarness

JOB = {"runner": "process", "spec": {"command": ["true"]}}


@pytest.fixture
def kind() -> str:
    return "postgres"


async def submit(connection: Any, *jobs: object) -> list[str]:
    payload = json.dumps(jobs[0] if len(jobs) == 1 else jobs)
    rows = await connection.fetch("SELECT id FROM holdfast.holdfast_submit($1::jsonb)", payload)
    return [str(row["id"]) for row in rows]


@pytest.fixture
async def connection(harness: StoreHarness) -> Any:
    connection = await asyncpg.connect(harness.url)
    yield connection
    await connection.close()


async def test_job_with_nothing_but_its_runner_gets_the_same_defaults_as_from_python(
    harness: StoreHarness, connection: Any
) -> None:
    (plain,) = await submit(connection, JOB)
    by_sql, by_python = await harness.get(plain), await harness.submit(**JOB)
    for field in type(by_sql).__struct_fields__:
        if field != "id":
            assert getattr(by_sql, field) == getattr(by_python, field), field


async def test_every_field_of_a_submission_is_known_to_the_function(harness: StoreHarness, connection: Any) -> None:
    parent = await harness.submit()
    everything: dict[str, Any] = {
        **JOB,
        "id": new_id(),
        "tenant": "default",
        "kind": "build",
        "queue": "heavy",
        "lane": "L",
        "priority": 3,
        "labels": {"a": "b"},
        "inputs": {"n": 1},
        "needs": [parent.id],
        "hold": True,
        "available_at": harness.later(60).isoformat(),
        "reuse_key": "thumb",
        "rebuild": True,
        "max_attempts": 2,
        "retry": {"base": 1, "cap": 2, "on": ["timed_out"]},
        "on_lost": "fail",
        "timeout": 5,
        "queue_timeout": 6,
        "idle_timeout": 7,
        "stop_grace": 0,
        "stop_after": 8,
        "budget": {"tokens": 9},
        "secrets": ["S"],
        "uploads": ["u"],
        "check": {"command": ["true"], "timeout": 1},
    }
    assert set(everything) == set(Submission.__struct_fields__) - set(PIPELINE_FIELDS)
    (by_sql,) = await submit(connection, everything)
    await harness.store.gates.resolve()
    await connection.execute("DELETE FROM holdfast.reuse")
    by_python = await harness.submit(**{**everything, "id": new_id()})
    record = await harness.get(by_sql)
    for field in type(record).__struct_fields__:
        if field != "id":
            assert getattr(record, field) == getattr(by_python, field), field


async def test_on_lost_hold_is_the_old_name_of_pause_for_sql_too(harness: StoreHarness, connection: Any) -> None:
    """Proves L11."""
    for written in ("pause", "hold"):
        (job,) = await submit(connection, {**JOB, "on_lost": written})
        assert (await harness.get(job)).policy.on_lost == "pause"
        stored = "SELECT policy ->> 'on_lost' FROM holdfast.specs WHERE id = $1"
        assert await connection.fetchval(stored, job) == written


async def test_a_pipelines_fields_may_stand_beside_its_spec_or_in_it(harness: StoreHarness, connection: Any) -> None:
    """Proves P1 for SQL."""
    asked = {"tasks": [{"name": "one", "command": ["true"]}], "connector": "files", "snapshot": "final"}
    (inside,) = await submit(connection, {"runner": "process", "spec": asked})
    (beside,) = await submit(connection, {"runner": "process", **asked})
    by_python = await harness.submit(runner="process", spec={}, **asked)
    pair = Claimable(queue="default", capability="process", domain="host")
    leases = (await harness.store.leases.claim("w1", [pair], slots=3, ttl=TTL)).claimed
    assert {lease.id for lease in leases} == {inside, beside, by_python.id}
    first, second, third = (pipeline_of(lease.spec) for lease in leases)
    assert first == second == third is not None


async def test_rollback_leaves_nothing_and_an_open_transaction_delays_nobody(
    harness: StoreHarness, connection: Any
) -> None:
    before = await harness.submit(lane="L")
    transaction = connection.transaction()
    await transaction.start()
    await submit(connection, {**JOB, "lane": "L", "needs": [before.id]})
    # While it idles: the lane moves on, the parent ends, others join the lane.
    after = await harness.submit(lane="L")
    await harness.run_one()
    assert [lease.id for lease in await harness.claim()] == [after.id]
    await transaction.rollback()
    assert len((await harness.store.jobs.list()).items) == 2


async def test_committed_job_is_resolved_by_the_next_operation(harness: StoreHarness, connection: Any) -> None:
    (job,) = await submit(connection, {"runner": "function", "spec": {"name": "f"}, "lane": "L"})
    assert (await harness.get(job)).gate is Gate.UNRESOLVED
    await harness.store.gates.resolve()
    assert [lease.id for lease in await harness.claim()] == [job]


async def test_bad_jobs_are_refused_whole(harness: StoreHarness, connection: Any) -> None:
    failed = await harness.submit(hold=True)
    await harness.store.jobs.cancel(failed.id)
    unknown = new_id()
    for bad, state, field in [
        ({**JOB, "colour": 1}, "HF422", "colour"),
        ("text", "HF422", "jobs"),
        ({**JOB, "needs": [unknown]}, "HF404", "needs"),
        ({**JOB, "needs": [failed.id]}, "HF409", "needs"),
        ({**JOB, "id": failed.id}, "HF409", "id"),
    ]:
        with pytest.raises(asyncpg.PostgresError) as caught:
            await submit(connection, JOB, bad)
        assert (caught.value.sqlstate, caught.value.detail) == (state, field), bad
    assert [job.status for job in (await harness.store.jobs.list()).items] == [Status.CANCELLED]


async def test_needs_may_refer_to_earlier_jobs_of_a_call(connection: Any) -> None:
    first, second = new_id(), new_id()
    with pytest.raises(asyncpg.PostgresError) as caught:
        await submit(connection, {**JOB, "id": second, "needs": [first]}, {**JOB, "id": first})
    assert caught.value.sqlstate == "HF404"
    assert await submit(connection, {**JOB, "id": first}, {**JOB, "id": second, "needs": [first]}) == [first, second]


async def test_ids_that_the_database_makes_are_uuid7(harness: StoreHarness, connection: Any) -> None:
    (job,) = await submit(connection, JOB)
    assert job[14] == "7"
    assert job[19] in "89ab"
    assert isinstance(harness.store.database, PostgresDatabase)
