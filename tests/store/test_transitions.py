"""Every statement that changes a job, in every state of a job, writes what the table in Python says; on both databases.

The states, and the values that are expected, are in `tests/support/transition_table.py`.
"""

import itertools
import json
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime, timedelta
from typing import Any

import pytest

from holdfast.model import (
    COUNTED_CAUSES,
    MOVES,
    STOPPED,
    UNCOUNTED_CAUSES,
    Cause,
    Lease,
    Phase,
    Status,
    StopKind,
    Verb,
    new_id,
    uses_up_attempt,
)
from holdfast.store import queries
from holdfast.store.database import Database
from holdfast.store.outcomes import Ended
from holdfast.store.postgres import PostgresDatabase
from holdfast.store.sql_entries import Dialect, fragments, texts
from holdfast.timing import from_micros, to_micros
from tests.support import transition_table as table
from tests.support.store_harness import START, StoreHarness

Rows = dict[str, dict[str, Any]]
Run = Callable[[Database, str, table.Row], Awaitable[object]]
FLAGS = ("limited", "unsettled", "dismissed", "held", "has_needs", "has_dependants")


async def insert(harness: StoreHarness, states: Sequence[dict[str, Any]]) -> Rows:
    """Put a job into the table in each of these states; return the whole rows by id."""
    early = at(-100)
    job = {"tenant": "default", "queue": "default", "capability": "process", "priority": 0, "requested_at": early}
    rows = [{"id": new_id(), **job, "available_at": early, "updated_at": at(-80), **state} for state in states]
    spec = {
        "tenant": "default",
        "kind": "run",
        "requested_at": early,
        "runner": "process",
        "spec": "{}",
        "inputs": "{}",
    }
    specs = [{"id": row["id"], **spec} for row in rows]
    for name, given in (("specs", specs), ("jobs", rows)):
        for columns, same in itertools.groupby(sorted(given, key=sorted), key=sorted):
            await _insert(harness, name, columns, [[row[column] for column in columns] for row in same])
    found = await read(harness)
    return {row["id"]: found[row["id"]] for row in rows}


async def _insert(harness: StoreHarness, name: str, columns: list[str], rows: list[list[Any]]) -> None:
    database = harness.store.database
    if isinstance(database, PostgresDatabase):
        places = ", ".join(f"${n + 1}" for n in range(len(columns)))
        insert = f"INSERT INTO holdfast.{name} ({', '.join(columns)}) VALUES ({places})"
        await database.with_transaction(lambda connection: connection.executemany(insert, rows))
    else:
        insert = f"INSERT INTO {name} ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})"
        values = [[to_micros(value) if isinstance(value, datetime) else value for value in row] for row in rows]
        await database.migrate(lambda connection: connection.executemany(insert, values))


async def read(harness: StoreHarness) -> Rows:
    """All jobs by id, with the same values on both databases."""
    database = harness.store.database
    if isinstance(database, PostgresDatabase):
        return {str(row["id"]): dict(row) for row in await database.fetch("SELECT * FROM holdfast.jobs")}

    def work(connection: Any) -> Rows:
        cursor = connection.execute("SELECT * FROM jobs")
        names = [column[0] for column in cursor.description]
        return {row["id"]: row for row in (dict(zip(names, values, strict=True)) for values in cursor.fetchall())}

    rows = await database.migrate(work)
    for row in rows.values():
        for name, value in row.items():
            if name.endswith("_at") and value is not None:
                row[name] = from_micros(value)
            elif name in FLAGS:
                row[name] = bool(value)
    return rows


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


async def check(harness: StoreHarness, before: Rows, expected: table.Expected) -> int:
    """Compare all columns of these jobs with what is expected of them; return how many changed."""
    after = await read(harness)
    touched = 0
    for job, row in before.items():
        written = expected(row, START)
        wanted = {**row, **(written or {})}
        differing = {
            name: (value, after[job][name], wanted[name])
            for name, value in row.items()
            if after[job][name] != wanted[name]
        }
        said = {name: row[name] for name in ("status", "gate", "owner", "phase", "stop_kind", "has_dependants")}
        assert not differing, f"{said}: (before, found, wanted) {differing}"
        touched += written is not None
    return touched


def fenced(row: table.Row, by: int = 0) -> dict[str, Any]:
    return {"id": row["id"], "token": row["token"] + by}


async def claim_one(database: Database, job: str, row: table.Row) -> None:
    given = {"worker": table.WORKER, "domain": "function", "function": "function", "ttl": table.TTL}
    await database.values("claim_one", Lease, id=job, **given)


async def claim_process(database: Database, job: str, row: table.Row) -> None:
    given = {"worker": table.WORKER, "domain": "host-b", "function": "function", "ttl": table.TTL}
    await database.values("claim_one", Lease, id=job, **given)


async def request_stop(database: Database, job: str, row: table.Row) -> None:
    events = [{"type": "cancel", "data": "{}"}]
    await database.rows("request_stop", id=job, kind="delete", reason="other", events=events)


async def advance_stop(database: Database, job: str, row: table.Row) -> None:
    await database.rows("advance_stop", **fenced(row), phase="signalled", grace=table.GRACE)


async def request_deletion(database: Database, job: str, row: table.Row) -> None:
    await database.rows("request_deletion", id=job, tenant="default")


async def revive(database: Database, job: str, row: table.Row) -> None:
    await database.rows("revive_dependants", id=job, ids=[job])


ONE_BY_ONE: dict[str, tuple[Run, table.Expected]] = {
    "claim_one": (claim_one, table.claim),
    "claim_one of a process": (claim_process, lambda row, now: table.claim(row, now, "host-b")),
    "request_stop": (request_stop, table.request_stop),
    "advance_stop": (advance_stop, table.advance_stop),
    "request_deletion": (request_deletion, table.request_deletion),
    "revive_dependants": (revive, table.revive),
}


@pytest.mark.parametrize("name", ONE_BY_ONE)
async def test_statement_about_one_job_writes_what_the_table_says(harness: StoreHarness, name: str) -> None:
    run, expected = ONE_BY_ONE[name]
    before = await insert(harness, list(table.states(START)))
    for job, row in before.items():
        await run(harness.store.database, job, row)
    assert await check(harness, before, expected) > 0


TOGETHER: dict[str, tuple[str, dict[str, Any], table.Expected]] = {
    "start": ("start", {}, table.start),
    "beat": ("beat", {"worker": table.WORKER, "ttl": table.TTL}, table.beat),
    "hand_over": ("hand_over", {"delay": table.DELAY, "adoption_failed": False, "reason": "leaving"}, table.hand_over),
    "hand_over of a failed adoption": (
        "hand_over",
        {"delay": table.DELAY, "adoption_failed": True, "reason": "failed"},
        table.hand_over_failed,
    ),
}


@pytest.mark.parametrize("name", TOGETHER)
async def test_statement_about_leases_writes_what_the_table_says_and_nothing_with_another_token(
    harness: StoreHarness, name: str
) -> None:
    """Proves L4."""
    statement, given, expected = TOGETHER[name]
    before = await insert(harness, list(table.states(START)))
    for by in (-1, 1):
        await harness.store.database.rows(statement, rows=[fenced(row, by) for row in before.values()], **given)
    assert await check(harness, before, lambda row, now: None) == 0
    await harness.store.database.rows(statement, rows=[fenced(row) for row in before.values()], **given)
    assert await check(harness, before, expected) > 0


async def test_take_writes_what_the_table_says(harness: StoreHarness) -> None:
    before = await insert(harness, list(table.states(START)))
    line = {
        "n": 0, "tenant_n": 0, "tenant": "default", "queue": "default", "capability": "process", "domain": "host-b",
        "share": 1000, "merge": False, "after_id": None, "slack": 0.0,
    }  # fmt: skip
    given = {"worker": table.WORKER, "ttl": table.TTL, "function": "function", "capped": False, "alone": False}
    leases = await harness.store.database.values("take", Lease, lines=[line], slots=1000, **given)
    changed = await check(harness, before, lambda row, now: table.claim(row, now, "host-b"))
    assert len(leases) == changed > 0


async def test_adopt_writes_what_the_table_says(harness: StoreHarness) -> None:
    before = await insert(harness, list(table.states(START)))
    given = {"worker": table.ADOPTER, "ttl": table.TTL, "domains": ["host-a"], "limit": 1000}
    adopted = await harness.store.database.values("adopt", Lease, **given)
    assert len(adopted) == await check(harness, before, table.adopt) > 0


async def test_reap_writes_what_the_table_says(harness: StoreHarness) -> None:
    before = await insert(harness, list(table.states(START)))
    given: dict[str, Any] = {"base": table.BASE, "cap": table.CAP, "seen_at": None, "limit": 1000}
    reaped = await harness.store.database.rows("reap", **given)
    assert len(reaped) == await check(harness, before, table.reap) > 0


async def test_orphan_writes_what_the_table_says(harness: StoreHarness) -> None:
    before = await insert(harness, list(table.states(START)))
    await harness.store.database.rows("orphan", worker=table.WORKER, base=table.BASE, cap=table.CAP)
    assert await check(harness, before, table.reap) > 0


async def test_fail_dependants_writes_what_the_table_says(harness: StoreHarness) -> None:
    before = await insert(harness, list(table.states(START)))
    rows = [{"id": job, "need_id": new_id(), "message": "needs another"} for job in before]
    await harness.store.database.rows("fail_dependants", rows=rows)
    assert await check(harness, before, table.fail) > 0


VERBS = sorted(
    {
        (str(source), str(target))
        for verb, moves in MOVES.items()
        if verb not in (Verb.CLAIM, Verb.FINISH, Verb.REQUEUE)
        for source, targets in moves.items()
        for target in targets
    }
)
GATES = {"pending": "held", "queued": "open"}


@pytest.mark.parametrize(("source", "target"), VERBS)
async def test_move_writes_what_the_table_says(harness: StoreHarness, source: str, target: str) -> None:
    """Every legal move of a person or a duty; a job with an owner, or in another status, stays as it is.

    Only an open attempt returns to `running`.
    """
    states = [s for s in table.states(START) if target != "running" or s["status"] == "running" or "phase" in s]
    before = await insert(harness, states)
    gate = GATES.get(target)
    for job, row in before.items():
        given: dict[str, Any] = {
            "status": target, "gate": gate, "events": [{"type": "status", "data": "{}"}], "error_code": "code",
            "error_message": "message", "keep_error": False, "result": None, "close_attempt": target == "queued",
            "stop_kind": None if target == "queued" else row["stop_kind"], "dismissed": False, "max_attempts": 4,
            "queue_timeout": table.DELAY, "unsettle": Status(target).terminal, "from_status": source,
        }  # fmt: skip
        await harness.store.database.rows("move", id=job, **given)
    assert await check(harness, before, lambda row, now: table.move(row, now, source, target, gate)) > 0


ENDS = MOVES[Verb.FINISH][Status.RUNNING] | MOVES[Verb.REQUEUE][Status.RUNNING]
CAUSES = (Cause.EXIT, Cause.DRAINED, Cause.LOST, Cause.START_FAILED)
GIVEN = list(itertools.product(CAUSES, ("code", "cancelled", "interrupted"), (0.0, table.DELAY)))


@pytest.mark.parametrize("asked", [str(status) for status in Status if status in ENDS])
async def test_finish_writes_what_the_table_says(harness: StoreHarness, asked: str) -> None:
    """Every end that a worker may ask for, with every stop request and the causes that count and do not. Proves L4."""
    database = harness.store.database
    jobs = [(s, end) for s in table.states(START) for end in (GIVEN if s["status"] == "running" else GIVEN[:1])]
    before = await insert(harness, [state for state, _ in jobs])
    given = dict(zip(before, [end for _, end in jobs], strict=True))

    def rows(by: int) -> list[dict[str, Any]]:
        found = []
        for job, row in before.items():
            cause, code, delay = given[job]
            end = {"status": asked, "cause": str(cause), "exit_code": 3, "signal": None, "error_code": code}
            found.append({**fenced(row, by), **end, "error_message": "message", "result": "[2]", "delay": delay})
        return found

    def expected(row: table.Row, now: datetime) -> table.Written:
        cause, code, delay = given[str(row["id"])]
        return table.finish(row, now, asked, str(cause), code, delay)

    for by in (-1, 1):
        assert await database.values("finish", Ended, rows=rows(by)) == []
    ended = await database.values("finish", Ended, rows=rows(0))
    assert len(ended) == await check(harness, before, expected) > 0


def test_model_and_sql_agree_on_stop_requests_and_causes() -> None:
    """The table in Python is what the SQL is made from: each value of it is in the text of `finish`."""
    dialects: tuple[Dialect, ...] = ("postgres", "sqlite")
    for dialect in dialects:
        text = texts(dialect)["finish"]
        for kind, end in STOPPED.items():
            assert f"WHEN '{kind}' THEN '{end.status}'" in text
            assert f"WHEN '{kind}' THEN '{end.message}'" in text
        assert all(f"i.cause = '{cause}'" in text for cause in COUNTED_CAUSES)
        assert all(f"i.cause <> '{cause}'" in text for cause in UNCOUNTED_CAUSES)
    assert set(STOPPED) == set(StopKind)
    assert all(STOPPED[kind].status in ENDS for kind in StopKind)
    assert not any(uses_up_attempt(Cause.DRAINED, phase) for phase in Phase)


def test_statements_are_the_same_at_every_load() -> None:
    dialects: tuple[Dialect, ...] = ("postgres", "sqlite")
    for dialect in dialects:
        first = json.dumps({name: [s.text for s in query.statements] for name, query in queries.load(dialect).items()})
        fragments.cache_clear()
        again = json.dumps({name: [s.text for s in query.statements] for name, query in queries.load(dialect).items()})
        assert first == again
        assert "{" not in first.replace("'{}'", "").replace("'{budget}'", "")[1:].replace('": [', "")
