"""The rules of a submit, from one table of cases: Python on both stores and SQL accept and refuse the same."""

import json
import re
import unicodedata
from collections.abc import AsyncIterator, Awaitable, Callable

import asyncpg
import pytest
from scripts import submission_rules

from holdfast.errors import HoldfastError
from holdfast.model import Job
from holdfast.store.error_mapping import error_from_sqlstate
from holdfast.submission import Accepted, Submission
from tests.support.store_harness import StoreHarness
from tests.support.submit_cases import ACCEPTED, BROKEN, PROCESS, REFUSED, TAKEN, Case

Submit = Callable[[Case], Awaitable[list[Accepted]]]


@pytest.fixture(params=["sqlite", "postgres", "sql"])
def path(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def kind(path: str) -> str:
    return "sqlite" if path == "sqlite" else "postgres"


@pytest.fixture
async def submit(path: str, harness: StoreHarness) -> AsyncIterator[Submit]:
    async def by_python(case: Case) -> list[Accepted]:
        return list(await harness.store.jobs.accept(case.jobs, key=case.key))

    async def by_sql(case: Case) -> list[Accepted]:
        text = "SELECT id, reused FROM holdfast.holdfast_submit($1::jsonb, idempotency_key => $2)"
        try:
            rows = await connection.fetch(text, json.dumps(case.jobs), case.key)
        except asyncpg.PostgresError as error:
            ours = error_from_sqlstate(error.sqlstate or "", str(error.args[0]), error.detail)
            raise ours or error from error
        return [Accepted(str(row["id"]), row["reused"]) for row in rows]

    await harness.submit(id=TAKEN, reuse_key="standing")
    await harness.submit(id=BROKEN, hold=True)
    await harness.store.jobs.cancel(BROKEN)
    await harness.store.queues.limit("small", depth=1)
    await harness.store.jobs.accept([{**PROCESS, "kind": "first"}], key="used")
    if path != "sql":
        yield by_python
        return
    connection = await asyncpg.connect(harness.url)
    yield by_sql
    await connection.close()


async def jobs_in(harness: StoreHarness) -> dict[str, Job]:
    return {job.id: job for job in (await harness.store.jobs.list(limit=100)).items}


@pytest.mark.parametrize("case", ACCEPTED, ids=lambda case: case.name)
async def test_accepted(case: Case, path: str, harness: StoreHarness, submit: Submit) -> None:
    """Proves J1, J13."""
    answer = await submit(case)
    assert len(answer) == len(case.jobs)
    job = (await jobs_in(harness))[answer[-1].id]
    for name, value in case.values.items():
        assert (answer[-1].reused if name == "reused" else getattr(job, name)) == value, name
    if path == "sql":
        await assert_stored_as_by_python(case, job, harness)


async def assert_stored_as_by_python(case: Case, by_sql: Job, harness: StoreHarness) -> None:
    """The same job from Python has the same record, whatever the case says of it."""
    if case.values.get("reused") or len(case.jobs) > 1:
        return
    jobs = [{name: value for name, value in job.items() if name not in ("id", "reuse_key")} for job in case.jobs]
    await harness.store.queues.limit("small", depth=None)
    (again,) = await harness.store.jobs.accept(jobs)
    await harness.store.gates.resolve()
    now = await jobs_in(harness)
    for name in set(Job.__struct_fields__) - {"id", "reuse_key", "requested_at", "available_at", "updated_at", "gate"}:
        assert getattr(now[again.id], name) == getattr(now[by_sql.id], name), name


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.name)
async def test_refused(case: Case, path: str, harness: StoreHarness, submit: Submit) -> None:
    """Proves J1, J11, J12, J13."""
    before = set(await jobs_in(harness))
    if path == "sql" and case.sql_accepts:
        assert len(await submit(case)) == len(case.jobs)
        return
    if path == "sql" and case.sql_state:
        with pytest.raises(asyncpg.PostgresError) as unmapped:
            await submit(case)
        assert unmapped.value.sqlstate == case.sql_state
        return
    with pytest.raises(HoldfastError) as caught:
        await submit(case)
    error = caught.value
    assert type(error) is case.error
    assert getattr(error, "field", None) == case.at
    text = error.message.removeprefix(f"{case.at}: ")
    assert text.endswith(case.message[1:]) if case.message.startswith("…") else text == case.message
    assert set(await jobs_in(harness)) == before


@pytest.mark.parametrize("path", ["sqlite", "postgres", "sql"])
async def test_call_repeated_with_its_key_returns_the_same_jobs(submit: Submit) -> None:
    """Proves J12."""
    call = Case("twice", [{**PROCESS, "reuse_key": "standing"}, PROCESS], key="K")
    first, second = await submit(call), await submit(call)
    assert [job.reused for job in first] == [True, False]
    assert second == [Accepted(job.id, True) for job in first]


@pytest.mark.parametrize("path", ["sql"])
async def test_jobs_that_are_no_objects_are_refused_by_sql(harness: StoreHarness) -> None:
    connection = await asyncpg.connect(harness.url)
    for payload in ("5", '"x"', "[5]", "null"):
        with pytest.raises(asyncpg.PostgresError, match="takes a job") as caught:
            await connection.fetch("SELECT * FROM holdfast.holdfast_submit($1::jsonb)", payload)
        assert (caught.value.sqlstate, caught.value.detail) == ("HF422", "jobs")
    await connection.close()


@pytest.mark.parametrize("path", ["sql"])
async def test_number_that_no_reader_could_decode_is_refused_by_sql(harness: StoreHarness) -> None:
    """Python cannot send one; every list and claim that found the job would fail."""
    connection = await asyncpg.connect(harness.url)
    digits = "1" + "0" * 400
    job = '{"runner": "process", "spec": {"command": ["true"]}, "inputs": {"a": ["%s", %s]}}'
    with pytest.raises(asyncpg.PostgresError, match="inputs: has a number that is out of range"):
        await connection.fetch("SELECT * FROM holdfast.holdfast_submit($1::jsonb)", job % ("", f"-{digits}.5"))
    for fine in ((f"{digits}.5", "1"), ("", digits)):
        await connection.fetch("SELECT * FROM holdfast.holdfast_submit($1::jsonb)", job % fine)
    await connection.close()
    found = [job.inputs["a"] for job in (await jobs_in(harness)).values()]
    assert sorted(found, key=str) == [["", int(digits)], [f"{digits}.5", 1]]


@pytest.mark.parametrize("path", ["sql"])
async def test_control_characters_are_the_same_in_both_languages(harness: StoreHarness) -> None:
    """All characters of the first plane that Unicode calls control, format, separator or private."""
    connection = await asyncpg.connect(harness.url)
    rows = await connection.fetch(
        "SELECT n FROM generate_series(1, 65533) AS n"
        " WHERE n NOT BETWEEN 55296 AND 57343 AND holdfast.unprintable(chr(n))"
    )
    await connection.close()
    kinds = ("Cc", "Cf", "Co", "Zs", "Zl", "Zp")
    ours = {n for n in range(1, 65534) if not chr(n).isprintable() and unicodedata.category(chr(n)) in kinds}
    assert {row["n"] for row in rows} == ours


def test_rules_for_postgres_are_those_of_the_types() -> None:
    written = submission_rules.FILE.read_text()
    revision = int(re.match(r"-- revision: (\d+)\n", written)[1])  # type: ignore[index]
    assert written == submission_rules.text(revision), "the types changed: `make schema` writes the rules again"


@pytest.mark.parametrize("name", Submission.__struct_fields__)
def test_every_field_has_a_case_that_is_accepted_and_one_that_is_refused(name: str) -> None:
    assert any(name in job for case in ACCEPTED for job in case.jobs)
    roots = {re.split(r"[.\[]", case.at)[0] for case in REFUSED if case.at is not None and case.error is not None}
    assert name in roots
