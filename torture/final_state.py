"""Reads the whole database at the end of a run, by plain SQL, without holdfast's own code."""

import contextlib
import json
import sqlite3
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import asyncpg

from holdfast.store.store import sqlite_path
from torture.history import Attempt, Event, History, Record, Task, boottime

Rows = Sequence[Mapping[str, Any]]

RECORDS = """
SELECT id, runner, lane, reuse_key, labels, policy, status, seq, requested_at, started_at, finished_at, error_code,
  result, usage
FROM {schema}job_records
"""
NEEDS = "SELECT job_id, need_id FROM {schema}needs"
EVENTS = "SELECT job_id, seq, at, type, task, data FROM {schema}job_events ORDER BY job_id, seq"
ATTEMPTS = """
SELECT job_id, attempt, worker, token, claim_seq, end_seq, started_at, ended_at, cause, status, exit_code
FROM {schema}attempts ORDER BY job_id, attempt
"""
TASKS = "SELECT job_id, n, name, status, cached, parent, snapshot FROM {schema}tasks ORDER BY job_id, n"


class Away(OSError):
    """The database does not answer."""


async def fetch(url: str, *queries: str) -> list[Rows]:
    """Ask a database by plain SQL. On SQLite tables have no schema, and times are microseconds."""
    if url.startswith("sqlite"):
        with contextlib.closing(sqlite3.connect(sqlite_path(url), timeout=60, isolation_level=None)) as database:
            database.row_factory = sqlite3.Row
            return [[dict(row) for row in database.execute(query.format(schema=""))] for query in queries]
    try:
        return await _fetch_postgres(url, queries)
    except (asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError, TimeoutError) as error:
        raise Away(str(error)) from error


async def _fetch_postgres(url: str, queries: Sequence[str]) -> list[Rows]:
    connection = await asyncpg.connect(url, timeout=10)
    try:
        found = [await connection.fetch(query.format(schema="holdfast.")) for query in queries]
        return [[dict(row) for row in rows] for rows in found]
    finally:
        await connection.close()


async def read_database(url: str, history: History) -> None:
    """Add what the database says to a history."""
    records, needs, events, attempts, tasks = await fetch(url, RECORDS, NEEDS, EVENTS, ATTEMPTS, TASKS)
    needed: dict[str, list[str]] = defaultdict(list)
    for row in needs:
        needed[str(row["job_id"])].append(str(row["need_id"]))
    for row in records:
        record = _record(row, needed[str(row["id"])])
        history.records[record.id] = record
    for row in events:
        data = _json(row["data"])
        event = Event(seq=row["seq"], at=to_boottime(row["at"]), type=row["type"], task=row["task"], data=data)
        history.events.setdefault(str(row["job_id"]), []).append(event)
    for row in attempts:
        history.attempts.setdefault(str(row["job_id"]), []).append(_attempt(row))
    for row in tasks:
        history.tasks.setdefault(str(row["job_id"]), []).append(_task(row))


def _record(row: Mapping[str, Any], needs: Sequence[str]) -> Record:
    return Record(
        id=str(row["id"]),
        runner=row["runner"],
        lane=row["lane"],
        needs=needs,
        reuse_key=row["reuse_key"],
        labels=_json(row["labels"]) or {},
        policy=_json(row["policy"]) or {},
        status=row["status"],
        seq=row["seq"],
        requested=to_boottime(row["requested_at"]),
        started=_perhaps(row["started_at"]),
        finished=_perhaps(row["finished_at"]),
        error=row["error_code"],
        result=_json(row["result"]),
        usage=_json(row["usage"]) or {},
    )


def _attempt(row: Mapping[str, Any]) -> Attempt:
    return Attempt(
        attempt=row["attempt"],
        worker=row["worker"],
        token=row["token"],
        claim_seq=row["claim_seq"],
        end_seq=row["end_seq"],
        started=_perhaps(row["started_at"]),
        ended=to_boottime(row["ended_at"]),
        cause=row["cause"],
        status=row["status"],
        exit_code=row["exit_code"],
    )


def _task(row: Mapping[str, Any]) -> Task:
    return Task(
        n=row["n"],
        name=row["name"],
        status=row["status"],
        cached=bool(row["cached"]),
        parent=row["parent"],
        snapshot=row["snapshot"],
    )


_OFFSET = time.time() - boottime()


def to_boottime(value: Any) -> float:
    """A time of the database on the children's clock."""
    seconds = value.timestamp() if isinstance(value, datetime) else value / 1e6
    return float(seconds - _OFFSET)


def _perhaps(value: Any) -> float | None:
    return None if value is None else to_boottime(value)


def _json(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str) else value
