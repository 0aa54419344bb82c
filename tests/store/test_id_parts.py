"""Jobs by a part of their id: its beginning, or its last 6 digits and more."""

import asyncpg
import pytest

from holdfast.errors import Invalid
from holdfast.store.postgres import SESSION
from tests.conftest import clone, drop
from tests.support.bulk_data import ENDED, fill_postgres
from tests.support.query_plans import plan_of
from tests.support.store_harness import StoreHarness

IDS = [f"0193aaaa-000{n}-7000-8000-{n}00000abcdef" for n in range(4)]
OTHER = "0193bbbb-0000-7000-8000-fff0193aaaa0"


async def found(harness: StoreHarness, part: str, **given: object) -> list[str]:
    return [job.id for job in await harness.store.jobs.with_id_part(part, **given)]  # type: ignore[arg-type]


async def test_job_is_found_by_the_end_of_its_id(harness: StoreHarness) -> None:
    """Proves G6."""
    for one in IDS:
        await harness.submit(id=one)
    assert await found(harness, "200000abcdef") == [IDS[2]]
    assert await found(harness, "200000ABCDEF") == [IDS[2]]
    assert await found(harness, IDS[2][9:]) == [IDS[2]], "with hyphens"
    assert await found(harness, IDS[2]) == [IDS[2]]
    assert await found(harness, "abcdef") == IDS
    assert len(await found(harness, "abcdef", limit=3)) == 3
    assert await found(harness, "bcdef") == [], "too short for an end"
    assert await found(harness, "abcde0") == []


async def test_part_may_be_a_beginning_and_an_end(harness: StoreHarness) -> None:
    await harness.submit(id=IDS[0])
    await harness.submit(id=OTHER)
    assert await found(harness, "0193aaaa0") == [IDS[0], OTHER]
    assert await found(harness, "0193aaaa-00") == [IDS[0]]


async def test_ends_of_other_tenants_are_not_found(harness: StoreHarness) -> None:
    await harness.submit(id=IDS[0], tenant="blue")
    await harness.submit(id=IDS[1])
    assert await found(harness, "abcdef") == [IDS[1]]
    assert await found(harness, "abcdef", tenant="blue") == [IDS[0]]
    assert await found(harness, "abcdef", tenant="red") == []


@pytest.mark.parametrize("part", ["", "-", "xyz", "%abcdef", "0" * 33])
async def test_text_that_is_no_part_of_an_id_is_refused(harness: StoreHarness, part: str) -> None:
    with pytest.raises(Invalid, match=r"id: .* is not a part of an id"):
        await found(harness, part)


async def test_search_of_ends_reads_one_index_and_no_table_on_postgres(server: str) -> None:
    """Our sessions' own plan, among many jobs; what SQLite uses is in test_promised_indexes.py."""
    url = await clone(server, "holdfast_id_parts")
    connection = await asyncpg.connect(url, server_settings=SESSION)
    await fill_postgres(connection, [(20_000, {**ENDED, "tenant": "'default'"})])
    given = {"tenant": "default", "tail": "abcdef", "digits": "00abcdef", "limit": 6}
    nodes = [node for node in await plan_of(connection, "jobs_ending", given) if node.get("Index Name")]
    assert ("Index Only Scan", "specs_listed") in [(node["Node Type"], node["Index Name"]) for node in nodes]
    await connection.close()
    await drop(server, "holdfast_id_parts")
