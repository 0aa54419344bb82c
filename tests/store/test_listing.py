"""Lists: every mix of filters finds what it should, and no page reads more than its stretch of an index."""

import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from random import Random
from typing import Any

import asyncpg
import pytest

from holdfast.errors import Invalid
from holdfast.model import Job, Outcome, Status, new_id
from holdfast.store import queries
from holdfast.store.database import Database
from holdfast.store.listing import Filters, list_jobs
from holdfast.store.migrate import migrate
from holdfast.store.postgres import SESSION, PostgresDatabase
from holdfast.store.sqlite import SqliteDatabase
from holdfast.store.sqlite_connection import Connection
from holdfast.timing import SystemClock
from tests.conftest import clone, drop
from tests.support.bulk_data import ENDED, FAILED, FUTURE, LANED, QUEUED, RUNNING, fill_postgres, fill_sqlite
from tests.support.query_plans import plan_of, sqlite_connection, sqlite_explain
from tests.support.store_harness import START, StoreHarness

TENANTS, KINDS, QUEUES = ("default", "other"), ("run", "build", "Ünusual=kind"), ("default", "heavy", "a'b")
LANES = (None, None, "L1", "L2")
LABELS: tuple[dict[str, str], ...] = ({}, {"team": "blue"}, {"team": "blue", "n": "1"}, {"team": "a=b"})


async def mixed_jobs(harness: StoreHarness, draw: Random, count: int = 80) -> None:
    """Jobs of all sorts and statuses; many were requested at the same moment."""
    for _ in range(count):
        await harness.submit(
            tenant=draw.choice(TENANTS),
            kind=draw.choice(KINDS),
            queue=draw.choice(QUEUES),
            lane=draw.choice(LANES),
            labels=draw.choice(LABELS),
            hold=draw.random() < 0.15,
        )
        if draw.random() < 0.3:
            await harness.advance(1)
    ends = (Outcome.succeeded(), Outcome.failed("exit_nonzero", "boom"), Outcome(status=Status.TIMED_OUT))
    for queue in QUEUES:
        for lease in await harness.claim(slots=20, queue=queue):
            if draw.random() < 0.8:
                await harness.finish(lease, draw.choice(ends))
    for tenant in TENANTS:
        for job in draw.sample((await harness.store.jobs.list(tenant=tenant, limit=1000)).items, 5):
            if not job.status.terminal:
                await harness.store.jobs.cancel(job.id, tenant=tenant)


def drawn(draw: Random) -> dict[str, Any]:
    """Some filters; half of the time each is not given, and some of what is given matches nothing."""
    at = START + timedelta(seconds=draw.randrange(-1, 30))
    every: dict[str, Callable[[], Any]] = {
        "status": lambda: draw.sample(list(Status), draw.randrange(1, 4)),
        "kind": lambda: draw.choice((*KINDS, "none")),
        "queue": lambda: draw.choice((*QUEUES, "none", "")),
        "lane": lambda: draw.choice(("L1", "L2", "none")),
        "labels": lambda: draw.choice(({"team": "blue"}, {"n": "1", "team": "blue"}, {"team": "a=b"}, {"team": "x"})),
        "since": lambda: at,
        "until": lambda: at + timedelta(seconds=draw.randrange(0, 30)),
    }
    return {name: value() for name, value in every.items() if draw.random() < 0.35}


def fits(job: Job, given: dict[str, Any]) -> bool:
    since, until = given.get("since", START - timedelta(days=1)), given.get("until", START + timedelta(days=1))
    return (
        job.status in given.get("status", Status)
        and all(getattr(job, name) == given[name] for name in ("kind", "queue", "lane") if name in given)
        and given.get("labels", {}).items() <= job.labels.items()
        and since <= job.requested_at < until
    )


async def paged(harness: StoreHarness, limit: int, **given: Any) -> list[str]:
    found: list[str] = []
    cursor = None
    while True:
        page = await harness.store.jobs.list(limit=limit, cursor=cursor, **given)
        found += [job.id for job in page.items]
        assert len(page.items) == limit or page.next_cursor is None
        if page.next_cursor is None:
            return found
        cursor = page.next_cursor


async def test_any_combination_of_filters_finds_the_matching_jobs(harness: StoreHarness) -> None:
    """Proves J14: on pages of any size, in order, without a gap and without a repeat."""
    draw = Random(4711)
    await mixed_jobs(harness, draw)
    everything = {tenant: (await harness.store.jobs.list(tenant=tenant, limit=1000)).items for tenant in TENANTS}
    met = {job.status for jobs in everything.values() for job in jobs}
    assert met >= {Status.PENDING, Status.QUEUED, Status.RUNNING, Status.SUCCEEDED, Status.FAILED, Status.CANCELLED}
    for jobs in everything.values():
        assert list(jobs) == sorted(jobs, key=lambda job: (job.requested_at, job.id), reverse=True)
    for _ in range(150):
        tenant, given = draw.choice(TENANTS), drawn(draw)
        wanted = [job.id for job in everything[tenant] if fits(job, given)]
        assert await paged(harness, draw.choice((1, 2, 5, 100)), tenant=tenant, **given) == wanted, given


async def test_deleted_job_leaves_no_labels(harness: StoreHarness) -> None:
    job = await harness.submit(labels={"team": "blue"})
    await harness.submit(labels={"team": "blue"})
    await harness.store.jobs.cancel(job.id)
    await harness.store.jobs.delete(job.id)
    assert len(await paged(harness, 1, labels={"team": "blue"})) == 1
    database: Any = harness.store.database
    if isinstance(database, PostgresDatabase):
        assert len(await database.fetch("SELECT id FROM holdfast.labels")) == 1
    else:
        with closing(sqlite3.connect(harness.url.removeprefix("sqlite:///"))) as connection:
            assert connection.execute("SELECT count(*) FROM labels").fetchone() == (1,)


# Plans, among many jobs

OURS = {"tenant": "'default'"}
MANY = [
    (1_000, {**FAILED, **OURS}),
    (20, {**RUNNING, **OURS}),
    (1_000, {**QUEUED, **OURS, "queue": "'starved'"}),
    (1_000, {**LANED, **OURS, "lane": "'lane-' || ({n} % 10)"}),
    (1_000, {**FUTURE, **OURS}),
    (100_000, {**ENDED, **OURS}),
]
"""All but the last are older than everything that a list sees first."""
NOW = SystemClock().now()
FILTERS: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": ({}, "specs_listed"),
    "since": ({"since": NOW + timedelta(days=1)}, "specs_listed"),
    "until": ({"until": NOW - timedelta(days=1)}, "specs_listed"),
    "tenant": ({"tenant": "nobody"}, "specs_listed"),
    "kind": ({"kind": "run"}, "specs_of_kind"),
    "kind, none": ({"kind": "none"}, "specs_of_kind"),
    "label, none": ({"labels": {"team": "none"}}, "labels_listed"),
    "lane": ({"lane": "lane-3"}, "jobs_of_lane"),
    "lane, none": ({"lane": "none"}, "jobs_of_lane"),
    "queue": ({"queue": "starved"}, "jobs_waiting"),
    "queue, none": ({"queue": "none"}, "jobs_waiting"),
    "succeeded": ({"statuses": [Status.SUCCEEDED]}, "jobs_ended"),
    "failed": ({"statuses": [Status.FAILED]}, "jobs_ended"),
    "paused": ({"statuses": [Status.PAUSED]}, "jobs_ended"),
    "running": ({"statuses": [Status.RUNNING]}, "jobs_running"),
    "queued": ({"statuses": [Status.QUEUED]}, "jobs_waiting"),
    "pending": ({"statuses": [Status.PENDING]}, "jobs_waiting"),
    "every status": ({"statuses": list(Status)}, "jobs_ended"),
    "failed, of a kind": ({"statuses": [Status.FAILED], "kind": "run"}, "jobs_ended"),
    "queued, of a lane": ({"statuses": [Status.QUEUED], "lane": "lane-3"}, "jobs_of_lane"),
    "none of a kind": ({"kind": "run", "queue": "none"}, "jobs_waiting"),
}
LIMIT = 20
BIG = ("jobs", "specs", "labels")


class Overheard:
    """A database, and what was read from it."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.reads: list[tuple[str, dict[str, Any]]] = []

    async def read(self, name: str, /, **parameters: Any) -> Sequence[Any]:
        self.reads.append((name, parameters))
        return await self._database.read(name, **parameters)


async def reads_of(database: Database, given: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    overheard: Any = Overheard(database)
    await list_jobs(overheard, Filters(**{"tenant": "default", **given}), limit=LIMIT, cursor=None)
    reads: list[tuple[str, dict[str, Any]]] = overheard.reads
    return reads


async def test_page_reads_only_its_index_range_on_postgres_among_100_000_jobs(server: str) -> None:
    """Proves J14. Looks at the plans that our sessions use, which are made without a look at the values."""
    url = await clone(server, "holdfast_listing")
    connection = await asyncpg.connect(url, server_settings=SESSION)
    await fill_postgres(connection, MANY)
    database = await PostgresDatabase.connect(url, listen=False)
    for said, (given, index) in FILTERS.items():
        used = set()
        for name, parameters in await reads_of(database, given):
            nodes = [node for node in await plan_of(connection, name, parameters) if node.get("Relation Name") in BIG]
            used |= {node.get("Index Name") for node in nodes if node["Actual Loops"]}
            assert not [node for node in nodes if node["Node Type"] == "Seq Scan"], (said, name)
            assert all(rows_of(node) <= 40 * LIMIT for node in nodes), (said, name, nodes)
        assert index in used, (said, used)
    await database.close()
    await connection.close()
    await drop(server, "holdfast_listing")


def rows_of(node: dict[str, Any]) -> int:
    """The rows that a node read, of which it may have thrown many away."""
    return int((node["Actual Rows"] + node.get("Rows Removed by Filter", 0)) * node["Actual Loops"])


async def test_page_reads_only_its_index_range_on_sqlite_among_100_000_jobs(tmp_path: Path) -> None:
    """Proves J14. SQLite counts its steps, not its rows: a page takes some dozens for each job on it."""
    path = tmp_path / "store.db"
    database = SqliteDatabase(path)
    await migrate(database)
    with closing(sqlite3.connect(path, isolation_level=None)) as filling:
        fill_sqlite(filling, new_id, MANY)
    with sqlite_connection(path, writes=False) as connection:
        for said, (given, index) in FILTERS.items():
            for name, parameters in await reads_of(database, given):
                query = queries.load("sqlite")[name]
                assert steps(connection, query, parameters) <= 3_000 * LIMIT, (said, name)
                (statement,) = query.statements
                plan = sqlite_explain(connection, statement)
                assert not [line for line in plan if line.startswith(("SCAN jobs", "SCAN specs", "SCAN labels"))], plan
                wanted = index.replace("labels_listed", "PRIMARY")
                assert name == "list_ranges" or any(wanted in line for line in plan), plan
    await database.close()


def steps(connection: Connection, query: queries.NamedQuery, parameters: dict[str, Any]) -> int:
    """How many hundreds of instructions SQLite ran, times a hundred."""
    count = 0

    def tick() -> int:
        nonlocal count
        count += 100
        return 0

    connection.raw.set_progress_handler(tick, 100)
    connection.run(query, parameters)
    connection.raw.set_progress_handler(None, 0)
    return count


async def test_list_filters_by_every_field(harness: StoreHarness) -> None:
    """Proves J14."""
    one = await harness.submit(kind="build", labels={"team": "blue", "env": "prod"}, queue="a", lane="L1")
    await harness.advance(10)
    two = await harness.submit(kind="run", labels={"team": "blue"}, queue="b", hold=True)
    await harness.advance(10)
    three = await harness.submit(kind="run", labels={"team": "red"}, queue="a", lane="L2")
    mine = harness.store.jobs

    async def ids(**filters: Any) -> list[str]:
        return [job.id for job in (await mine.list(**filters)).items]

    assert await ids() == [three.id, two.id, one.id]
    assert await ids(kind="run") == [three.id, two.id]
    assert await ids(queue="a") == [three.id, one.id]
    assert await ids(lane="L2") == [three.id]
    assert await ids(status=[Status.PENDING]) == [two.id]
    assert await ids(status=[Status.PENDING, Status.QUEUED]) == [three.id, two.id, one.id]
    assert await ids(labels={"team": "blue"}) == [two.id, one.id]
    assert await ids(labels={"team": "blue", "env": "prod"}) == [one.id]
    assert await ids(labels={"nobody": "x"}) == []
    assert await ids(since=START + timedelta(seconds=10)) == [three.id, two.id]
    assert await ids(until=START + timedelta(seconds=10)) == [one.id]
    assert await ids(tenant="someone") == []


async def test_cursor_neither_skips_nor_repeats_while_jobs_change(harness: StoreHarness) -> None:
    """Proves J14."""
    ids: set[str] = set()
    for _ in range(25):
        ids |= set(await harness.store.jobs.submit_many([{"runner": "function", "spec": {"name": "f"}}] * 100))
        await harness.advance(1)
    seen: list[str] = []
    cursor = None
    while True:
        page = await harness.store.jobs.list(limit=97, cursor=cursor)
        seen += [job.id for job in page.items]
        cursor = page.next_cursor
        if cursor is None:
            break
        await harness.submit()  # newer than all pages
        (lease,) = await harness.claim(slots=1)
        await harness.finish(lease)
    assert len(seen) == len(set(seen)) == 2_500
    assert set(seen) == ids


@pytest.mark.parametrize(
    ("filters", "field"),
    [
        ({"limit": 0}, "limit"),
        ({"limit": 1001}, "limit"),
        ({"cursor": "nonsense"}, "cursor"),
        ({"cursor": "MTIzLmFiYw=="}, "cursor"),
        ({"since": START.replace(tzinfo=None)}, "since"),
    ],
)
async def test_list_names_the_bad_filter(harness: StoreHarness, filters: dict[str, Any], field: str) -> None:
    with pytest.raises(Invalid) as caught:
        await harness.store.jobs.list(**filters)
    assert caught.value.field == field
