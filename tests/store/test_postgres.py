"""Postgres only: the text format of arrays, and connections that fall silent."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import Invalid, StoreError
from holdfast.store import postgres
from holdfast.store.lanes import lock_lanes
from holdfast.store.postgres import PostgresDatabase, PostgresTx
from holdfast.store.postgres_parameters import array_text, element_text
from holdfast.store.store import Store, connect
from tests.support.in_process_workers import eventually
from tests.support.proxy import Proxy

LANE = ("default", "lane")
ANSWER = 1.0
MISSED = 3
"""Operations that may fail when the network is back: one waits for a connection that hangs, a busy machine is slow."""
PATIENCE = "idle_in_transaction_session_timeout"


@pytest.fixture
def kind() -> str:
    return "postgres"


@pytest.fixture
async def proxy(clean_url: str) -> AsyncIterator[Proxy]:
    async with Proxy(urlsplit(clean_url).port or 0).run() as proxy:
        yield proxy


async def through(proxy: Proxy, url: str) -> PostgresDatabase:
    """A database of one connection behind a proxy, as a heartbeat has it."""
    parts = urlsplit(url)
    proxied = urlunsplit(parts._replace(netloc=f"{parts.username}@127.0.0.1:{proxy.port}"))
    database = await connect(proxied, connections=1, listen=False, answer_within=ANSWER)
    assert isinstance(database, PostgresDatabase)
    return database


async def test_connection_that_falls_silent_during_setup_is_aborted(clean_url: str, proxy: Proxy) -> None:
    """Proves L7, L16. Else the pool would wait for it for ever, and a worker would never beat again."""
    database = await through(proxy, clean_url)
    proxy.greets_only = True
    proxy.swallow()
    for _ in range(3):
        with pytest.raises(StoreError):
            await database.read("lease_owners")
    proxy.greets_only = False
    assert await database.read("lease_owners")
    await database.close()


async def test_connection_that_falls_silent_during_connect_is_aborted(clean_url: str, proxy: Proxy) -> None:
    """Proves L7, L18. The pool makes it by itself, and nobody else may try meanwhile: so many beats would be missed."""
    database = await through(proxy, clean_url)
    proxy.cut_off = True
    before = proxy.swallow()
    with pytest.raises(StoreError):
        await database.read("lease_owners")

    async def made() -> bool:
        return proxy.swallow() > before

    await eventually(made, "the pool makes another connection")
    proxy.cut_off = False
    for _ in range(MISSED):
        with contextlib.suppress(StoreError):
            await database.read("lease_owners")
    assert await database.read("lease_owners")
    await database.close()


async def test_silent_transaction_does_not_block_a_lane_forever(
    clean_url: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proves L15, L16, N2. Its owner was cut off in the middle of it, and the connection looks alive."""
    assert 0 < int(postgres.SESSION[PATIENCE]) <= 60_000
    monkeypatch.setitem(postgres.SESSION, PATIENCE, "300")
    locked = asyncio.Event()

    async def hang(tx: PostgresTx) -> None:
        await lock_lanes(tx, [LANE])
        locked.set()
        await asyncio.Event().wait()

    database = await through(proxy, clean_url)
    async with Store(await connect(clean_url, listen=False)) as store:
        await store.lanes.ensure([LANE])
        silent = asyncio.create_task(database.transact(hang))  # type: ignore[arg-type]
        await locked.wait()
        proxy.swallow()
        await store.lanes.pause(LANE[1])
        silent.cancel()
    await asyncio.gather(silent, return_exceptions=True)
    await database.close()


AWKWARD = ['"', "\\", '\\"', "{", "}", ",", "", " ", "NULL", "null", "a\nb", "ä€😀", "'", '{"a": "b\\\\"}', '","']


@pytest.mark.parametrize(
    ("kind_", "column"),
    [
        ("text", AWKWARD),
        ("text", [*AWKWARD, None]),
        ("text", [""]),
        ("bigint", [0, -1, 2**63 - 1]),
        ("bigint", [1, None]),
        ("float8", [0.1, 1e300, float("inf"), 0.0]),
        ("boolean", [True, False, None]),
        ("timestamptz", [datetime(2026, 1, 17, 9, 30, 1, 5, tzinfo=UTC), None]),
        ("text", []),
    ],
)
async def test_array_is_read_as_it_was_written(clean_url: str, kind_: str, column: list[Any]) -> None:
    database = await connect(clean_url, connections=1, listen=False)
    assert isinstance(database, PostgresDatabase)
    try:
        (row,) = await database.fetch(f"SELECT $1::text::{kind_}[] AS read", array_text(column))
        assert row["read"] == column
    finally:
        await database.close()


async def test_json_array_is_read_as_it_was_written(clean_url: str) -> None:
    values: list[Any] = [{"a": ['"', "\\", "{,}", None]}, [1, "NULL"], "{}"]
    database = await connect(clean_url, connections=1, listen=False)
    assert isinstance(database, PostgresDatabase)
    try:
        (row,) = await database.fetch("SELECT to_jsonb($1::text::jsonb[])::text AS read", array_text(values))
        assert msgspec.json.decode(row["read"]) == [values[0], values[1], {}]
    finally:
        await database.close()


async def test_text_that_postgres_cannot_store_is_refused(clean_url: str) -> None:
    database = await connect(clean_url, connections=1, listen=False)
    assert isinstance(database, PostgresDatabase)
    try:
        with pytest.raises(Invalid):
            await database.fetch("SELECT $1::text::text[]", array_text(["a", "b\0c"]))
    finally:
        await database.close()


@given(st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])), min_size=1))
def test_fast_array_encoding_equals_the_general_one(column: list[str]) -> None:
    careful = ",".join(element_text(value) for value in column)
    assert array_text(column) == f"{{{careful}}}"


def test_empty_column_is_left_to_unnest() -> None:
    assert array_text([None, None]) == "{}"


async def test_missing_permission_names_the_grant(clean_url: str) -> None:
    """Each refusal names the statement that lets the role go on, until nothing is missing."""
    parts = urlsplit(clean_url)
    admin = await asyncpg.connect(clean_url)
    schema = "holdfast"
    try:
        await admin.execute("DROP ROLE IF EXISTS hf_guest")
        await admin.execute("CREATE ROLE hf_guest LOGIN")
        url = urlunsplit(parts._replace(netloc=f"hf_guest@{parts.hostname}:{parts.port}"))
        database = await connect(url, connections=1, listen=False)
        try:
            with pytest.raises(StoreError, match=f"GRANT USAGE ON SCHEMA {schema} TO hf_guest"):
                await database.read("lease_owners")
            await admin.execute(f"GRANT USAGE ON SCHEMA {schema} TO hf_guest")
            grant = f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {schema} TO hf_guest"
            with pytest.raises(StoreError, match=grant):
                await database.read("lease_owners")
            await admin.execute(grant)
            assert await database.read("lease_owners") is not None
        finally:
            await database.close()
    finally:
        await admin.execute("DROP OWNED BY hf_guest")
        await admin.execute("DROP ROLE hf_guest")
        await admin.close()
