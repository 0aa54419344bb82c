"""The databases of the tests: one Postgres cluster per run, one database per test process, one clean store per test."""

import asyncio
import os
import shutil
import signal
import sqlite3
from collections.abc import AsyncIterator, Coroutine, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import pytest

from holdfast.runner.attempt_folder import AttemptFolder
from holdfast.store.migrate import migrate
from holdfast.store.store import Store, connect
from holdfast.timing import ManualClock
from tests.support.cluster import PostgresMissing, cluster
from tests.support.docker_engine import DockerEngine, session_daemon
from tests.support.in_process_workers import InProcessWorkers
from tests.support.pgbouncer import PgBouncerMissing, pgbouncer
from tests.support.service import Service, service_in_process, service_process_on
from tests.support.store_harness import START, TEST_CLOCK, StoreHarness
from tests.support.supervisor_harness import SupervisedAttempt
from tests.support.worker_processes import WorkerProcesses, worker_processes_on

T = TypeVar("T")

TESTS = Path(__file__).parent
TEMPLATE = "holdfast_template"
TABLES = [
    f"holdfast.{name}"
    for name in (
        "jobs", "specs", "labels", "attempts", "events", "needs", "lanes", "queues", "workers", "leaders", "tokens",
        "reuse", "idempotency", "tasks", "snapshots", "builds", "totals", "functions", "audit", "test_clock",
    )
]  # fmt: skip
"""What a test may have written to, except for the one row of `installation`."""
ALLOWED_SKIPS = (
    "only root can change users",
    "needs root to become somebody else",
    "about root",
    "before Python",
    "without systemd",
)
"""Reasons to skip a test that CI accepts: no root, an older Python, no systemd."""
LONGEST = (
    "test_torture", "test_worker_crash", "test_docker_adoption", "test_lane_races", "test_worker_outage",
    "test_worker_hosts", "test_pipeline_crash", "test_dependency_races", "test_docker_engine", "test_wheel",
    "test_client_outage", "test_mixed_races", "test_docker", "test_service_crash", "test_crash", "test_lease_races",
    "test_readme", "test_pipeline_docker", "test_stateful", "test_stop_races", "test_pipeline_postgres",
    "test_hostile_files", "test_cli", "test_audit_kills", "test_sqlite_races", "test_audit", "test_lease_model",
    "test_supervisor_build", "test_supervisor_fuzz",
)  # fmt: skip
SLOW = (
    "test_disk_full", "test_prepared_database", "test_systemd", "test_up", "test_hostile", "test_hostile_escape",
    "test_hostile_submitter", "test_stream", "test_stream_outages", "test_connections", "test_serve",
    "test_conformance", "test_requirements", "test_protocol", "test_cli_worker", "test_cli_json", "test_file_modes",
    "test_postgres", "test_submit_function", "test_submit_in_transaction", "test_submit_in_transaction_waits",
    "test_submit_in_transaction_postgres", "test_submit_in_transaction_sqlite", "test_audit_http",
    "test_stream_readers", "test_plugins", "test_framework_examples", "test_python_pages",
)  # fmt: skip
"""Files that start servers, workers or programs, though no fixture says so: not in the quick tier."""
QUICK = "quick"
PROCESS_FIXTURES = {
    "server",
    "process_database",
    "docker_engine",
    "brittle_engine",
    "processes",
    "workers",
    "attempt",
    "service_process",
}
"""Fixtures that start a database server, an engine or processes. A test that uses none of them is quick."""
_running = ExitStack()
# A shell starts what it puts into the background with SIGINT ignored, and children inherit that: a test that interrupts
# one would wait for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)


def run_in_thread(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in a new thread, which has no event loop yet."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, work).result()


def database_url(server: str, name: str) -> str:
    return urlunsplit(urlsplit(server)._replace(path=f"/{name}"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Fail skipped tests in CI, unless the reason is an accepted one."""
    report = yield
    if report.skipped and os.environ.get("CI") and not hasattr(report, "wasxfail"):
        reason = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
        if not any(excuse in reason for excuse in ALLOWED_SKIPS):
            report.outcome = "failed"
            report.longrepr = f"skipped, and in CI nothing is: {reason}"
    return report


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the slowest files first, so that the run does not end with one process busy alone.

    Mark each test with its tier, and the quick ones with `quick`.
    """
    order = {name: n for n, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))
    for item in items:
        item.add_marker(item.path.relative_to(TESTS).parts[0])
        if is_quick(item):
            item.add_marker(QUICK)


def is_quick(item: pytest.Item) -> bool:
    """Whether a test needs neither Postgres nor Docker nor long processes: `make quick` runs these."""
    callspec = getattr(item, "callspec", None)
    # `kind` in most files; `path` where a job is submitted by SQL.
    chosen = {callspec.params.get(name) for name in ("kind", "path")} if callspec else set()
    long = item.path.stem in (*LONGEST, *SLOW)
    fixtures = {*getattr(item, "fixturenames", ())}
    return not chosen & {"postgres", "sql"} and not long and not PROCESS_FIXTURES & fixtures


def pytest_configure(config: pytest.Config) -> None:
    """Start the cluster once, in the controlling process, and create the migrated template in it."""
    if hasattr(config, "workerinput") or config.option.collectonly or config.option.help:
        return
    if config.option.markexpr == QUICK:
        return
    server = os.environ.get("HOLDFAST_TEST_POSTGRES_URL")
    if not server:
        try:
            server = _running.enter_context(cluster())
        except PostgresMissing as error:
            pytest.exit(str(error), returncode=1)
    os.environ["HOLDFAST_TEST_SERVER"] = server
    try:
        asyncio.run(make_template(server))
    except (OSError, asyncpg.PostgresError) as error:
        pytest.exit(f"the Postgres of HOLDFAST_TEST_POSTGRES_URL cannot be used: {error}", returncode=1)
    if os.environ.get("HOLDFAST_TEST_POOLER"):
        # Only now: the servers of a pooler stay in a database, and a template must have nobody in it.
        try:
            os.environ["HOLDFAST_TEST_POOLER_URL"] = _running.enter_context(pgbouncer(server))
        except PgBouncerMissing as error:
            pytest.exit(str(error), returncode=1)


def pytest_unconfigure(config: pytest.Config) -> None:
    _running.close()


async def make_template(server: str) -> None:
    admin = await asyncpg.connect(server)
    try:
        await admin.execute(f"DROP DATABASE IF EXISTS {TEMPLATE}")
        await admin.execute(f"CREATE DATABASE {TEMPLATE}")
    finally:
        await admin.close()
    database = await connect(database_url(server, TEMPLATE), connections=1, listen=False)
    await migrate(database)
    await database.close()


async def clone(server: str, name: str) -> str:
    """Make a database from the template."""
    admin = await asyncpg.connect(server)
    try:
        await admin.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")
        await admin.execute(f"CREATE DATABASE {name} TEMPLATE {TEMPLATE}")
    finally:
        await admin.close()
    return database_url(server, name)


async def drop(server: str, name: str) -> None:
    admin = await asyncpg.connect(server)
    try:
        await admin.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")
    finally:
        await admin.close()


@pytest.fixture(scope="session")
def server() -> str:
    """The URL of the Postgres server."""
    return os.environ["HOLDFAST_TEST_SERVER"]


@pytest.fixture(scope="session")
def process_database(server: str) -> Iterator[str]:
    """This test process's own database, with a clock that tests can move."""

    async def prepare() -> str:
        url = await clone(server, name)
        connection = await asyncpg.connect(url)
        await connection.execute(TEST_CLOCK)
        await connection.close()
        return url

    name = f"holdfast_{os.environ.get('PYTEST_XDIST_WORKER', 'main')}_{os.getpid()}"
    yield run_in_thread(prepare())
    run_in_thread(drop(server, name))


@pytest.fixture(params=["sqlite", "postgres"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def migrated_sqlite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A migrated SQLite file to copy: migrating takes ten times as long."""

    async def prepare() -> None:
        database = await connect(f"sqlite:///{path}")
        await migrate(database)
        await database.close()

    path = tmp_path_factory.mktemp("migrated") / "store.db"
    run_in_thread(prepare())
    return path


@pytest.fixture
async def clean_url(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> str:
    """The URL of an empty, migrated store that runs on real time; for tests with several processes."""
    if kind == "sqlite":
        path = tmp_path / "store.db"
        shutil.copy(request.getfixturevalue("migrated_sqlite"), path)
        with closing(sqlite3.connect(path)) as file, file:
            file.execute("PRAGMA synchronous = OFF")
            file.execute("UPDATE installation SET id = lower(hex(randomblob(16)))")
        return f"sqlite:///{path}"
    url = request.getfixturevalue("process_database")
    connection = await asyncpg.connect(url)
    await empty_tables(connection)
    await connection.execute(
        "UPDATE holdfast.installation"
        " SET id = replace(gen_random_uuid()::text, '-', ''), shared_folder = NULL, shared_path = NULL"
    )
    await connection.close()
    return str(url)


async def empty_tables(connection: "asyncpg.Connection[asyncpg.Record]") -> None:
    """Truncate the tables that were written to; all of them would take longer than most tests.

    The locks are those of TRUNCATE: what a killed process of the last test is about to commit comes first.
    """
    async with connection.transaction():
        await connection.execute(f"LOCK TABLE {', '.join(TABLES)} IN ACCESS EXCLUSIVE MODE")
        used = await connection.fetchval(
            "SELECT string_agg(name, ', ') FROM unnest($1::text[]) AS name WHERE pg_relation_size(name::regclass) > 0",
            TABLES,
        )
        if used:
            await connection.execute(f"TRUNCATE {used}")


@pytest.fixture
async def harness(kind: str, clean_url: str) -> AsyncIterator[StoreHarness]:
    """A clean store whose clock stands still; after the test, no gate may be stuck and no deadlock have happened."""
    clock = ManualClock(START)
    async with Store(await connect(clean_url, listen=False, clock=clock)) as store:
        harness = StoreHarness(kind, clean_url, store, clock)
        await harness.sync_clock()
        yield harness
        await assert_healthy(store)


async def assert_healthy(store: Store) -> None:
    await store.gates.resolve()
    stuck = await store.database.read("stuck_gates", limit=10)
    assert [dict(row) for row in stuck] == []
    assert store.counters.gate_repairs == 0
    assert store.counters.deadlocks == 0


@pytest.fixture
def attempt(tmp_path: Path) -> Iterator[SupervisedAttempt]:
    """An attempt folder for a supervisor; after the test, nothing of a finished attempt may run."""
    attempt = SupervisedAttempt(tmp_path / "attempt")
    yield attempt
    attempt.clean()


@pytest.fixture
async def workers(clean_url: str, tmp_path: Path) -> AsyncIterator[InProcessWorkers]:
    """A store on real time, with workers; after the test no gate is stuck, and nothing that it ran is left."""
    async with Store(await connect(clean_url)) as store:
        workers = InProcessWorkers(clean_url, tmp_path, store)
        yield workers
        await assert_healthy(store)
        left = [pid for folder in workers.folders for pid in AttemptFolder(folder).leftovers(_mark(folder))]
        assert left == []


def _mark(folder: Path) -> str:
    return "/".join((folder.parent.name, *folder.name.split(".")))


@pytest.fixture
async def processes(clean_url: str, tmp_path: Path) -> AsyncIterator[WorkerProcesses]:
    """A store on real time, with worker processes that may die; after the test nothing of them is left."""
    async with worker_processes_on(clean_url, tmp_path) as processes:
        yield processes
        await assert_healthy(processes.store)


docker_engine = session_daemon(live_restore=True)
brittle_engine = session_daemon(live_restore=False)
"""An engine whose containers die with it."""


@pytest.fixture
def docker(docker_engine: DockerEngine, workers: InProcessWorkers) -> Iterator[DockerEngine]:
    """The engine, set for the workers; after the test nothing may be left on it."""
    workers.set(docker_host=docker_engine.host)
    docker_engine.ensure()
    yield docker_engine
    docker_engine.ensure()
    left = (docker_engine.containers(), docker_engine.volumes())
    docker_engine.clear()
    assert left == ([], [])


@pytest.fixture
def docker_for_processes(docker_engine: DockerEngine, processes: WorkerProcesses) -> Iterator[DockerEngine]:
    """The engine, set for the worker processes; what a test leaves on it is removed."""
    processes.set(docker_host=docker_engine.host)
    docker_engine.ensure()
    yield docker_engine
    processes.clear()
    docker_engine.clear()


@pytest.fixture
async def service(clean_url: str, tmp_path: Path) -> AsyncIterator[Service]:
    """A server in the test's own process, on a clean store."""
    async with service_in_process(clean_url, tmp_path / "data") as service:
        yield service


@pytest.fixture
def service_process(clean_url: str, tmp_path: Path) -> Iterator[Service]:
    """A real server in a process of its own, on a clean store."""
    with service_process_on(clean_url, tmp_path / "data") as service:
        yield service
