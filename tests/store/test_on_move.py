"""Every statement that moves jobs passes the hook, in its own transaction: proved by its text and by a subscriber."""

import contextlib
import itertools
import json
import re
import sqlite3
from collections.abc import AsyncIterator, Sequence
from contextlib import closing
from typing import NamedTuple

import asyncpg
import pytest

from holdfast.model import Cause, Outcome, Status
from holdfast.store import Store, queries
from holdfast.store.database import Tx
from holdfast.store.migrate import migrate
from holdfast.store.postgres import PostgresDatabase
from holdfast.store.repeatable import repeatables
from holdfast.store.sql_entries import Dialect, texts
from holdfast.store.store import connect
from holdfast.store.transitions import lock_job
from holdfast.timing import ManualClock
from tests.conftest import assert_healthy
from tests.support.query_plans import generic_plan
from tests.support.store_harness import START, StoreHarness

parse = queries.parse
STATUS_SET = re.compile(r"UPDATE (?:holdfast\.)?jobs\b(?:(?!\bUPDATE\b)[^;])*?(?:\bSET|,)\s+status = ")
ADDED_OR_DELETED = re.compile(r"(?:INSERT INTO|DELETE FROM) (?:holdfast\.)?jobs\b")
COLUMNS = ["id", "tenant", "queue", "old_status", "new_status", "seq", "changed_at"]
MOVING = {"take", "claim_one", "finish", "move", "fail_dependants", "revive_dependants", "delete_jobs"}
SEEN = {
    "postgres": "INSERT INTO holdfast.moves_seen (changes) SELECT json_agg(json_build_array("
    "m.id, m.tenant, m.queue, m.old_status, m.new_status, m.seq, m.changed_at) ORDER BY m.id)::text "
    "FROM moves AS m HAVING count(*) > 0",
    "sqlite": "INSERT INTO moves_seen (changes) SELECT json_group_array(json_array("
    "m.id, m.tenant, m.queue, m.old_status, m.new_status, m.seq, m.changed_at)) "
    "FROM moves AS m HAVING count(*) > 0",
}


class Seen(NamedTuple):
    id: str
    tenant: str
    queue: str
    old_status: str | None
    new_status: str | None
    seq: int
    changed_at: object


class MovesHarness(StoreHarness):
    """A store with a subscriber that writes down all moves of a statement as one row."""

    async def statements(self) -> list[list[Seen]]:
        """The moves so far, a list for each statement."""
        if isinstance(self.store.database, PostgresDatabase):
            rows = [
                row["changes"] for row in await self.store.database.fetch("SELECT changes FROM holdfast.moves_seen")
            ]
        else:
            with closing(sqlite3.connect(file_of(self.url))) as connection:
                rows = [row[0] for row in connection.execute("SELECT changes FROM moves_seen ORDER BY rowid")]
        return [[Seen(*move) for move in json.loads(row)] for row in rows]

    async def accepted(self) -> list[tuple[str, str | None, int]]:
        """The new jobs that were seen, in order: id, status, seq."""
        seen = [move for moves in await self.statements() for move in moves if move.old_status is None]
        assert all(move.tenant and move.queue and move.changed_at for move in seen)
        return [(move.id, move.new_status, move.seq) for move in seen]

    async def moves(self, job: str) -> list[tuple[str | None, str | None]]:
        """The moves of a job after it was accepted, which follow each other without a gap."""
        seen = [move for moves in await self.statements() for move in moves if move.id == job and move.old_status]
        assert all(before.new_status == after.old_status for before, after in itertools.pairwise(seen)), seen
        assert [move.seq for move in seen] == sorted(move.seq for move in seen)
        assert all((move.tenant, move.queue) == ("default", "default") and move.changed_at for move in seen)
        return [(move.old_status, move.new_status) for move in seen]


def file_of(url: str) -> str:
    return url.removeprefix("sqlite:///")


@pytest.fixture
async def moving(kind: str, clean_url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[MovesHarness]:
    monkeypatch.setattr(queries, "subscribers", lambda dialect: (SEEN[dialect],))
    clock = ManualClock(START)
    async with Store(await connect(clean_url, listen=False, clock=clock)) as store:
        harness = MovesHarness(kind, clean_url, store, clock)
        await harness.sync_clock()
        if isinstance(store.database, PostgresDatabase):
            await store.database.fetch("CREATE TABLE holdfast.moves_seen (n serial PRIMARY KEY, changes text)")
            await migrate(store.database)
        else:
            with closing(sqlite3.connect(file_of(clean_url))) as connection:
                connection.execute("CREATE TABLE moves_seen (changes TEXT)")
        try:
            yield harness
            await assert_healthy(store)
        finally:
            if isinstance(store.database, PostgresDatabase):
                monkeypatch.undo()
                await migrate(store.database)
                await store.database.fetch("DROP TABLE holdfast.moves_seen")


def entries(dialect: Dialect) -> dict[str, str]:
    """The text of every entry, without comments other than the directive."""
    return {name: re.sub(r"--(?! moves$)[^\n]*", "", text, flags=re.MULTILINE) for name, text in texts(dialect).items()}


@pytest.mark.parametrize(("dialect", "moving"), [("postgres", MOVING), ("sqlite", MOVING | {"submit"})])
def test_every_statement_that_moves_jobs_has_the_hook(dialect: Dialect, moving: set[str]) -> None:
    """By its text. A new statement that sets `status`, or adds or deletes jobs, fails here until it says what moved."""
    found = entries(dialect)
    movers = {name for name, text in found.items() if STATUS_SET.search(text) or ADDED_OR_DELETED.search(text)}
    assert movers == moving
    hook = r"\), moves AS \(\n\s*SELECT (.*?)\n\s*FROM" if dialect == "postgres" else r"^-- moves\nSELECT (.*?)\nFROM"
    hooked = {name: re.findall(hook, text, re.DOTALL | re.MULTILINE) for name, text in found.items()}
    assert {name for name, hooks in hooked.items() if hooks} == movers
    for name in movers:
        (columns,) = hooked[name]
        assert [re.split(r"\.| AS ", column)[-1].strip() for column in columns.split(", ")] == COLUMNS, name


def test_jobs_are_added_on_postgres_by_one_function_only_which_has_the_hook() -> None:
    """By its text. Callers in any language come through it, and a subscriber is added to it when it is applied."""
    files = {one.name: one.sql for one in repeatables("postgres")}
    assert {name for name, sql in files.items() if ADDED_OR_DELETED.search(sql) or STATUS_SET.search(sql)} == {"submit"}
    assert files["submit"].count("INSERT INTO holdfast.jobs") == 1
    (columns,) = re.findall(r"\), moves AS \(\n\s*SELECT (.*?)\n\s*FROM", files["submit"], re.DOTALL)
    assert [re.split(r"\.| AS ", column)[-1].strip() for column in columns.split(", ")] == COLUMNS


def test_a_statement_is_unchanged_without_a_subscriber(monkeypatch: pytest.MonkeyPatch) -> None:
    """On SQLite nothing more runs; on Postgres nothing reads the CTE."""
    monkeypatch.setattr(queries, "subscribers", lambda dialect: ())
    for query in queries.load("sqlite").values():
        assert not any("moves" in statement.text for statement in query.statements), query.name
    for query in queries.load("postgres").values():
        (statement,) = query.statements
        assert len(re.findall(r"\bmoves\b", statement.text)) <= 1, query.name


async def test_subscriber_sees_every_new_job_once(moving: MovesHarness) -> None:
    """Submitted alone, together, held, with a lane, again with the same key; not the ones that were joined."""
    process = {"runner": "process", "spec": {"command": ["true"]}}
    one = await moving.store.jobs.submit(process)
    held = await moving.store.jobs.submit({**process, "hold": True, "lane": "L"})
    many = await moving.store.jobs.submit_many([process, {**process, "reuse_key": "k"}], key="once")
    await moving.store.jobs.submit_many([process, {**process, "reuse_key": "k"}], key="once")
    await moving.store.jobs.submit({**process, "reuse_key": "k"})
    wanted = [(one.id, "queued", 1), (held.id, "pending", 1), *((job, "queued", 1) for job in many)]
    assert sorted(await moving.accepted()) == sorted(wanted)
    assert len(await moving.statements()) == 3, "one row for all jobs of a call"


@pytest.mark.parametrize("kind", ["postgres"])
async def test_subscriber_sees_a_submit_by_sql_in_its_transaction(moving: MovesHarness, clean_url: str) -> None:
    connection = await asyncpg.connect(clean_url)
    submit = "SELECT id::text FROM holdfast.holdfast_submit($1)"
    jobs = json.dumps([{"runner": "process", "spec": {"command": ["true"]}}] * 2)
    try:
        with contextlib.suppress(ZeroDivisionError):
            async with connection.transaction():
                await connection.fetch(submit, jobs)
                assert await connection.fetchval("SELECT count(*) FROM holdfast.moves_seen") == 1
                raise ZeroDivisionError
        assert await moving.statements() == []
        rows = await connection.fetch(submit, jobs)
    finally:
        await connection.close()
    assert sorted(await moving.accepted()) == sorted((row["id"], "queued", 1) for row in rows)


async def test_subscriber_sees_what_workers_do(moving: MovesHarness) -> None:
    jobs = [(await moving.submit(max_attempts=2)).id for _ in range(3)]
    leases = await moving.claim()
    succeeded, requeued, paused = sorted(leases, key=lambda lease: jobs.index(lease.id))
    await moving.store.jobs.interrupt(paused.id)
    interrupted = Outcome(status=Status.PAUSED, cause=Cause.INTERRUPTED)
    again = Outcome.requeued(Cause.DRAINED)
    await moving.store.leases.finish([(succeeded, Outcome.succeeded()), (requeued, again), (paused, interrupted)])
    assert await moving.finish(succeeded) is Status.SUCCEEDED, "a repeat moves nothing"
    assert await moving.moves(succeeded.id) == [("queued", "running"), ("running", "succeeded")]
    assert await moving.moves(requeued.id) == [("queued", "running"), ("running", "queued")]
    assert await moving.moves(paused.id) == [("queued", "running"), ("running", "paused")]
    claimed, ended = [moves for moves in await moving.statements() if moves[0].old_status]
    assert len(claimed) == len(ended) == 3, "one row for all moves of a statement"
    await moving.store.jobs.resume(paused.id)
    await moving.store.direct_jobs.claim("w1", paused.id, domain="function", ttl=60)
    assert (await moving.moves(paused.id))[2:] == [("paused", "queued"), ("queued", "running")]


async def test_subscriber_sees_what_callers_and_duties_do(moving: MovesHarness) -> None:
    store = moving.store
    held = (await moving.submit(hold=True)).id
    await store.jobs.release(held)
    await store.jobs.cancel(held)
    await store.jobs.cancel(held)
    late = (await moving.submit(queue_timeout=5)).id
    await moving.advance(6)
    assert await store.jobs.expire() == 1
    await store.jobs.resolve(late)
    assert await moving.moves(held) == [("pending", "queued"), ("queued", "cancelled")]
    assert await moving.moves(late) == [("queued", "timed_out"), ("timed_out", "succeeded")]
    assert (await store.jobs.delete(late)).outcome == "deleted"
    assert (await moving.moves(late))[2:] == [("succeeded", None)]
    failed = (await moving.submit(lane="one")).id
    (lease,) = await moving.claim()
    await moving.fail(lease)
    await store.jobs.dismiss(failed)
    assert await moving.moves(failed) == [("queued", "running"), ("running", "failed"), ("failed", "failed")]


async def test_subscriber_sees_what_happens_to_dependants_and_orphans(moving: MovesHarness) -> None:
    store = moving.store
    need = (await moving.submit()).id
    dependant = (await moving.submit(needs=[need])).id
    (lease,) = await moving.claim()
    await moving.fail(lease)
    await store.gates.resolve()
    await store.jobs.resume(need)
    await store.gates.resolve()
    assert await moving.moves(dependant) == [("queued", "failed"), ("failed", "queued")]
    (lease,) = await moving.claim()
    await moving.advance(3600)
    await store.leases.reap()
    (orphan,) = await store.leases.orphaned_functions()
    assert await store.leases.strand(orphan)
    assert await store.leases.recover([orphan.domain]) == {need}
    assert (await moving.moves(need))[-3:] == [("queued", "running"), ("running", "paused"), ("paused", "running")]
    (orphan,) = await store.leases.orphaned_functions()
    assert await store.leases.lose(orphan, message="gone") is not None


async def test_subscriber_writes_in_the_transaction_of_the_move(moving: MovesHarness) -> None:
    job = (await moving.submit()).id
    before = await moving.statements()

    async def change(tx: Tx) -> None:
        row = await lock_job(tx, "default", job)
        move = {"id": job, "from_status": row["status"], "status": "cancelled", "gate": None, "events": []}
        rest = dict.fromkeys(
            ("error_code", "error_message", "result", "stop_kind", "max_attempts", "queue_timeout"), None
        )
        flags = dict.fromkeys(("keep_error", "close_attempt", "dismissed", "unsettle"), False)
        await tx.rows("move", **move, **rest, **flags)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await moving.store.database.transact(change)
    assert (await moving.statements(), await moving.status(job)) == (before, Status.QUEUED)


@pytest.mark.parametrize("kind", ["postgres"])
async def test_plans_do_the_same_as_without_the_hook(clean_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a subscriber, Postgres leaves out what nothing reads; with one, it writes."""

    async def plans() -> list[list[str]]:
        """The nodes of each statement's plan."""
        return [[node["Node Type"] for node in await generic_plan(connection, name)] for name in sorted(MOVING)]

    connection = await asyncpg.connect(clean_url)
    try:
        hooked = await plans()
        monkeypatch.setattr(queries, "parse", without_moves)
        assert await plans() == hooked
        monkeypatch.undo()
        await connection.execute("CREATE TABLE holdfast.moves_seen (changes text)")
        monkeypatch.setattr(queries, "subscribers", lambda dialect: (SEEN[dialect],))
        subscribed = await plans()
        assert all(len(more) > len(plan) for plan, more in zip(hooked, subscribed, strict=True))
    finally:
        await connection.execute("DROP TABLE IF EXISTS holdfast.moves_seen")
        await connection.close()


def without_moves(name: str, text: str, added: Sequence[str] = ()) -> queries.NamedQuery:
    """Read a statement as if it had no hook."""
    stripped = re.sub(r"\), moves AS \(\n.*?\n\)", ")", text, flags=re.DOTALL)
    assert "moves AS" not in stripped
    return parse(name, stripped, added)
