"""The examples of transactions and of mounting: a commit leaves one job, a rollback none; the service has a prefix."""

import asyncio
import shutil
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import httpx
import psycopg
import pytest
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import create_async_engine

from holdfast import submit_inside
from holdfast.errors import Invalid
from holdfast.store.store import Store, connect
from tests.support.doc_pages import ROOT
from tests.support.submit_drivers import run_sql

Pay = Callable[..., Awaitable[None]]
ORDERS = "CREATE TABLE orders (id integer PRIMARY KEY, state text NOT NULL)"


@pytest.fixture
def kind() -> str:
    return "postgres"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Import a file of `examples/`, as a program in its folder does."""
    before = set(sys.modules)

    def load(path: str) -> Any:
        file = ROOT / "examples" / path
        monkeypatch.syspath_prepend(str(file.parent))
        return import_module(file.stem)

    yield load
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(ROOT / "examples")):
            del sys.modules[name]


@pytest.fixture
async def store(clean_url: str) -> AsyncIterator[Store]:
    async with Store(await connect(clean_url, listen=False)) as store:
        await run_sql(store, ORDERS)
        yield store
        await run_sql(store, "DROP TABLE orders")


@asynccontextmanager
async def sqlalchemy(example: Any, url: str) -> AsyncIterator[Pay]:
    engine = create_engine(url.replace("postgresql://", "postgresql+psycopg://"))
    pay = example("transactions/with_sqlalchemy.py").pay
    yield lambda *order, **how: asyncio.to_thread(pay, engine, *order, **how)
    engine.dispose()


@asynccontextmanager
async def sqlalchemy_async(example: Any, url: str) -> AsyncIterator[Pay]:
    engine = create_async_engine(url.replace("postgresql://", "postgresql+asyncpg://"))
    pay = example("transactions/with_sqlalchemy.py").pay_async
    yield lambda *order, **how: pay(engine, *order, **how)
    await engine.dispose()


@asynccontextmanager
async def with_asyncpg(example: Any, url: str) -> AsyncIterator[Pay]:
    pay = example("transactions/with_asyncpg.py").pay
    connection = await asyncpg.connect(url)
    yield lambda *order, **how: pay(connection, *order, **how)
    await connection.close()


@asynccontextmanager
async def with_psycopg(example: Any, url: str) -> AsyncIterator[Pay]:
    pay = example("transactions/with_psycopg.py").pay
    with psycopg.connect(url) as connection:
        yield lambda *order, **how: asyncio.to_thread(pay, connection, *order, **how)


@asynccontextmanager
async def with_psycopg_async(example: Any, url: str) -> AsyncIterator[Pay]:
    pay = example("transactions/with_psycopg.py").pay_async
    async with await psycopg.AsyncConnection.connect(url) as connection:
        yield lambda *order, **how: pay(connection, *order, **how)


@asynccontextmanager
async def django(example: Any, url: str) -> AsyncIterator[Pay]:
    use_django(url)
    pay = example("transactions/with_django.py").pay

    def alone(*order: int, **how: bool) -> None:
        from django.db import connections  # noqa: PLC0415  Django reads its settings first.

        try:
            pay(*order, **how)
        finally:
            connections["default"].close()
            del connections["default"]  # This thread may serve another test, with another database.

    yield lambda *order, **how: asyncio.to_thread(alone, *order, **how)


def use_django(url: str) -> None:
    """Set Django up for this database; in one process, every test has the same Postgres."""
    import django as package  # noqa: PLC0415
    from django.conf import settings  # noqa: PLC0415

    parts = urlsplit(url)
    database: dict[str, Any] = {"ENGINE": "django.db.backends.sqlite3", "NAME": parts.path.removeprefix("/")}
    if parts.scheme == "postgresql":
        database = {
            "ENGINE": "django.db.backends.postgresql",
            "NAME": parts.path.strip("/"),
            "USER": parts.username or "",
            "PASSWORD": parts.password or "",
            "HOST": parts.hostname or "",
            "PORT": str(parts.port or ""),
        }
    if not settings.configured:
        settings.configure(DATABASES={"default": database})
        package.setup()
    from django.db import connections  # noqa: PLC0415

    connections.settings = connections.configure_settings({"default": database})


WAYS = [sqlalchemy, sqlalchemy_async, with_asyncpg, with_psycopg, with_psycopg_async, django]


async def check(way: Any, example: Any, store: Store, url: str) -> None:
    async with way(example, url) as pay:
        with pytest.raises(example("transactions/invoice.py").PaymentRefused):
            await pay(4711, fails=True)
        assert await run_sql(store, "SELECT id FROM orders") == []
        assert (await store.jobs.list()).items == []
        await pay(4712)
    assert await run_sql(store, "SELECT id FROM orders") == [4712]
    (job,) = (await store.jobs.list()).items
    assert job.labels == {"order": "4712"}


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
async def test_commit_leaves_one_job_and_rollback_none(way: Any, example: Any, store: Store, clean_url: str) -> None:
    await check(way, example, store, clean_url)


async def test_commit_leaves_one_job_and_rollback_none_with_django_on_sqlite(
    example: Any, migrated_sqlite: Path, tmp_path: Path
) -> None:
    url = f"sqlite:///{shutil.copy(migrated_sqlite, tmp_path / 'app.db')}"
    async with Store(await connect(url, listen=False)) as store:
        await run_sql(store, ORDERS)
        await check(django, example, store, url)


def test_connection_of_django_with_another_driver_is_refused() -> None:
    class BaseDatabaseWrapper:
        __module__ = "django.db.backends.base.base"
        connection = object()

        def ensure_connection(self) -> None:
            pass

    with pytest.raises(
        Invalid, match=r"connection: of Django uses builtins\.object; .* Postgres \(psycopg 3\) or SQLite"
    ):
        submit_inside(BaseDatabaseWrapper(), [{"runner": "process", "spec": {"command": ["true"]}}])


@pytest.mark.parametrize("name", ["in_fastapi", "in_starlette"])
async def test_service_is_mounted_under_a_prefix(
    name: str, example: Any, store: Store, clean_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_DATABASE_URL", clean_url)
    monkeypatch.setenv("HOLDFAST_DATA_DIR", str(tmp_path))
    app = example(f"mounted/{name}.py").application()
    job = {"runner": "process", "spec": {"command": ["true"]}}
    async with app.router.lifespan_context(app):
        headers = {"Authorization": f"Bearer {(tmp_path / 'admin.token').read_text().strip()}"}
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://x", headers=headers) as client:
            assert (await client.get("/hello")).json() == "my own route"
            assert (await client.post("/v1/jobs", json=job)).status_code in (404, 405)
            made = await client.post("/queue/v1/jobs", json=job)
            assert made.status_code == 201
            assert made.headers["location"].startswith("/queue/v1/jobs/")
            assert (await client.get(made.headers["location"])).json()["id"] == made.json()["id"]
    assert [one.id for one in (await store.jobs.list()).items] == [made.json()["id"]]
