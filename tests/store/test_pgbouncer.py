"""A store behind a real PgBouncer in transaction mode, whose servers change under every client.

`make test-pgbouncer` runs all tests of the store through it; here is what is special to it, and a short walk.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack
from typing import Any

import asyncpg
import pytest

from holdfast.errors import NotFound, StoreError, StoreUnreachable
from holdfast.model import FUNCTION_DOMAIN, Claimable, Gate, Outcome, Status, new_id
from holdfast.store import Store, open_store
from holdfast.store.migrate import migrate, migrations
from holdfast.store.notify import work_topic
from holdfast.store.postgres import PATIENCE, PLANNER, PostgresDatabase
from holdfast.store.postgres_parameters import prepare
from holdfast.store.repeatable import repeatables
from holdfast.store.store import connect
from holdfast.timing import ManualClock
from tests.conftest import assert_healthy, clone, database_url, drop
from tests.store.test_migrate import holdfast
from tests.store.test_notify import heard
from tests.store.test_queries import FINISH
from tests.support.in_process_workers import eventually
from tests.support.pgbouncer import SERVERS, PgBouncerMissing, pgbouncer, through
from tests.support.query_plans import plan_nodes
from tests.support.store_harness import START, TTL, StoreHarness

NAMES = list(PLANNER)
PLANNED = f"SELECT pg_backend_pid(), {', '.join(f'current_setting({name!r})' for name in NAMES)}"
PAIR = Claimable(queue="default", capability="function:f", domain=FUNCTION_DOMAIN)


@pytest.fixture(scope="module")
def pooler(server: str) -> Iterator[str]:
    try:
        with pgbouncer(server) as url:
            yield url
    except PgBouncerMissing as error:
        pytest.skip(str(error))


@pytest.fixture(params=["postgres"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def pooled_url(pooler: str, clean_url: str) -> str:
    url = through(pooler, clean_url)
    await open_servers(url)
    return url


@pytest.fixture
async def harness(kind: str, pooled_url: str) -> AsyncIterator[StoreHarness]:
    """The harness of the other tests, with a pooler before its store."""
    clock = ManualClock(START)
    async with Store(await connect(pooled_url, listen=False, pooler="transaction")) as store:
        harness = StoreHarness(kind, pooled_url, store, clock)
        await harness.sync_clock()
        yield harness
        await assert_healthy(store)


async def open_servers(url: str) -> None:
    """Make the pooler open all servers that it may, so that clients change between them from the start."""
    async with AsyncExitStack() as stack:
        for _ in range(SERVERS):
            connection = await asyncpg.connect(url, statement_cache_size=0)
            stack.push_async_callback(connection.close)
            transaction = connection.transaction()
            await transaction.start()
            stack.push_async_callback(transaction.rollback)


def postgres(store: Store) -> PostgresDatabase:
    assert isinstance(store.database, PostgresDatabase)
    return store.database


async def test_every_server_plans_as_asked_and_keeps_nothing_of_it(harness: StoreHarness) -> None:
    """Proves O5."""
    database = postgres(harness.store)
    for statement in prepare("holdfast").values():
        await database.fetch("EXPLAIN " + statement.text, *[None] * len(statement.slots))
    seen = {tuple(*await database.fetch(PLANNED)) for _ in range(4 * SERVERS)}
    assert len({pid for pid, *_ in seen}) == SERVERS, "one client, many servers"
    assert {tuple(settings) for _, *settings in seen} == {tuple(PLANNER.values())}

    other = await asyncpg.connect(harness.url, statement_cache_size=0)
    left = {tuple(row) for _ in range(4 * SERVERS) for row in await other.fetch(PLANNED)}
    await other.close()
    assert {pid for pid, *_ in left} == {pid for pid, *_ in seen}
    assert {tuple(settings) for _, *settings in left} == {("on", "auto", "on", "on", "on", "on")}


async def test_finish_locks_in_order_because_its_plan_is_the_same(harness: StoreHarness, clean_url: str) -> None:
    """Proves O5."""
    ids = await harness.store.jobs.submit_many([{"runner": "function", "spec": {"name": "f"}}] * 200)
    ends = [{**FINISH["rows"][0], "id": job_id} for job_id in ids]
    statement = prepare("holdfast")["finish"]
    explain, arguments = "EXPLAIN (FORMAT JSON) " + statement.text, statement.arguments({"rows": ends})
    direct = await asyncpg.connect(clean_url)
    await direct.execute("ANALYZE holdfast.jobs")
    assert joins(await direct.fetch(explain, *arguments)) != {"Nested Loop"}, "left alone, Postgres joins as it likes"
    await direct.close()
    assert joins(await postgres(harness.store).fetch(explain, *arguments)) == {"Nested Loop"}


def joins(explained: Sequence[Any]) -> set[str]:
    nodes = plan_nodes(json.loads(explained[0]["QUERY PLAN"])[0]["Plan"])
    return {node["Node Type"] for node in nodes} & {"Nested Loop", "Hash Join", "Merge Join"}


async def test_lanes_needs_heartbeats_and_fencing_hold(harness: StoreHarness) -> None:
    """Proves O5."""
    first, second = await harness.submit(lane="L"), await harness.submit(lane="L")
    child = await harness.submit(needs=[second.id])
    assert ((await harness.get(second)).gate, (await harness.get(child)).gate) == (Gate.LANE, Gate.NEEDS)
    (lease,) = await harness.claim()
    assert lease.id == first.id
    assert [beat.answer for beat in (await harness.store.leases.beat("w1", [lease], ttl=TTL)).jobs] == ["yours"]
    await harness.advance(TTL + 1)
    await harness.store.leases.reap()
    (adopted,) = await harness.adopt()
    assert await harness.finish(lease) is None, "the old token changes nothing"
    assert await harness.finish(adopted) is Status.SUCCEEDED
    assert [(await harness.run_one()).id for _ in range(2)] == [second.id, child.id]
    assert [event.seq for event in await harness.events(first)] == list(
        range(1, (await harness.get(first)).last_seq + 1)
    )


async def test_refused_operation_leaves_its_connection_clean(harness: StoreHarness) -> None:
    for _ in range(5):  # One more than the store has connections.
        with pytest.raises(NotFound):
            await harness.submit(needs=[new_id()])
    assert await harness.status(await harness.submit()) is Status.QUEUED


async def test_cancelled_operation_leaves_no_transaction_open(harness: StoreHarness, clean_url: str) -> None:
    database = postgres(harness.store)
    direct = await asyncpg.connect(clean_url)
    asleep = "SELECT count(*) FROM pg_stat_activity WHERE query = 'SELECT pg_sleep(60)' AND state = 'active'"
    task = asyncio.create_task(database.fetch("SELECT pg_sleep(60)"))
    async with asyncio.timeout(60):
        while not await direct.fetchval(asleep):
            pass  # Polling until it sleeps.
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await harness.submit()
        open_ones = "SELECT query FROM pg_stat_activity WHERE datname = current_database() AND state LIKE 'idle in%'"
        assert await direct.fetch(open_ones) == []
    await direct.close()


async def test_wakes_by_a_direct_url_and_without_one_polling_finds_the_work(pooled_url: str, clean_url: str) -> None:
    """Proves O5."""
    job = {"runner": "function", "spec": {"name": "f"}}
    async with (
        await open_store(pooled_url, pooler="transaction") as near,
        await open_store(pooled_url, pooler="transaction", listen_url=clean_url) as hearing,
        await open_store(pooled_url, pooler="transaction") as polling,
        hearing.notifications.listening() as heard_far,
        polling.notifications.listening() as silent,
    ):
        await heard(heard_far, "*")
        await near.jobs.submit(job)
        await heard(heard_far, work_topic("default"))
        assert await silent.wait(0.05) == frozenset()
        assert len((await polling.leases.claim("w", [PAIR], slots=1, ttl=60)).claimed) == 1
        listening = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND query ILIKE 'LISTEN%'"
        assert len(await postgres(near).fetch(listening)) == 1, "nobody listens in a shared session"


async def test_many_workers_share_few_servers_without_an_error_or_a_deadlock(pooled_url: str) -> None:
    """Proves O5."""
    jobs = 300

    async def drain(store: Store, worker: str) -> list[str]:
        done: list[str] = []
        while len(finished) < jobs:
            leases = (await store.leases.claim(worker, [PAIR], slots=4, ttl=60)).claimed
            await store.leases.beat(worker, leases, ttl=60)
            ends = await store.leases.finish([(lease, Outcome.succeeded({"by": worker})) for lease in leases])
            assert all(ends.values())
            finished.update(ends)
            done += ends
        return done

    finished: set[str] = set()
    async with AsyncExitStack() as stack, asyncio.timeout(60):
        stores = [
            await stack.enter_async_context(await open_store(pooled_url, listen=False, pooler="transaction"))
            for _ in range(4)
        ]
        ids: list[str] = []
        for n in range(0, jobs, 50):
            batch: list[dict[str, Any]] = [
                {"runner": "function", "spec": {"name": "f"}, "lane": f"L{k}" if k < 5 else None, "needs": ids[-2:]}
                for k in range(n % 7, n % 7 + 50)
            ]
            ids += await stores[0].jobs.submit_many(batch)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(drain(store, f"w{n}-{m}")) for n, store in enumerate(stores) for m in range(4)]
        assert sorted(job for task in tasks for job in task.result()) == sorted(ids), "each job once"
        for store in stores:
            await assert_healthy(store)


async def test_migrations_through_the_pooler_apply_once(server: str, pooler: str) -> None:
    """Proves O5. Proves O2."""
    admin = await asyncpg.connect(server)
    await admin.execute("CREATE DATABASE holdfast_pooled_empty")
    url = database_url(pooler, "holdfast_pooled_empty")
    try:
        databases = [await connect(url, listen=False, pooler="transaction") for _ in range(4)]
        applied = await asyncio.gather(*(migrate(database) for database in databases))
        every = len(migrations("postgres")) + len(repeatables("postgres"))
        assert sorted(map(len, applied)) == [0, 0, 0, every]
        for database in databases:
            await database.close()
        again = await asyncio.to_thread(holdfast, "migrate", HOLDFAST_DATABASE_URL=url, HOLDFAST_POOLER="transaction")
        assert (again.returncode, again.stdout.strip()) == (0, "nothing to do: the schema is current"), again.stderr
    finally:
        await admin.close()
        await drop(server, "holdfast_pooled_empty")


async def test_unconfigured_pooler_is_reported_with_the_setting(pooled_url: str) -> None:
    """Proves O5."""
    with pytest.raises(StoreError, match=r"HOLDFAST_POOLER=transaction.*unsupported startup parameter") as caught:
        await open_store(pooled_url)
    assert not isinstance(caught.value, StoreUnreachable), "waiting does not help"
    refused = await asyncio.to_thread(holdfast, "migrate", HOLDFAST_DATABASE_URL=pooled_url)
    assert (refused.returncode, refused.stderr.count("\n")) == (4, 1)
    assert "HOLDFAST_POOLER=transaction" in refused.stderr


async def list_often(url: str) -> None:
    async with await open_store(url, listen=False) as store:
        for _ in range(4 * SERVERS):
            await store.jobs.list()


async def test_pooler_that_ignores_our_settings_is_detected(server: str) -> None:
    """Proves O5."""
    name = "holdfast_unsaid"
    url = await clone(server, name)
    with pgbouncer(server, more=f"ignore_startup_parameters = {', '.join([*NAMES, *PATIENCE])}") as pooler:
        with pytest.raises(StoreError, match="HOLDFAST_POOLER=transaction"):
            await open_store(through(pooler, url))
        # Its servers may plan as we like by chance; then our prepared statements are on the wrong ones.
        direct = await asyncpg.connect(url)
        await direct.execute(f"ALTER DATABASE {name} SET enable_mergejoin = off")
        await direct.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()"
            " AND datname = current_database()"
        )
        await direct.close()

        async def opened() -> bool:
            try:
                await open_servers(through(pooler, url))
            except asyncpg.ConnectionDoesNotExistError:  # The pooler has not noticed yet that its server is gone.
                return False
            return True

        await eventually(opened, "the pooler has new servers")
        with pytest.raises(StoreError, match=r"HOLDFAST_POOLER=transaction.*prepared statement"):
            await list_often(through(pooler, url))
    await drop(server, name)


async def test_the_same_setting_works_in_session_mode(server: str, clean_url: str) -> None:
    with pgbouncer(server, mode="session") as pooler:
        async with await open_store(through(pooler, clean_url), listen=False, pooler="transaction") as store:
            job = await store.jobs.submit({"runner": "function", "spec": {"name": "f"}, "lane": "L"})
            (lease,) = (await store.leases.claim("w", [PAIR], slots=1, ttl=60)).claimed
            assert await store.leases.finish([(lease, Outcome.succeeded())]) == {job.id: Status.SUCCEEDED}
