"""What only Postgres has: connections that fall silent, at the wrong moment."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from urllib.parse import urlsplit, urlunsplit

import pytest

from holdfast.errors import StoreError
from holdfast.store import postgres
from holdfast.store.lanes import lock_lanes
from holdfast.store.postgres import PostgresDatabase, PostgresTx
from holdfast.store.store import Store, connect
from tests.proxy import Proxy
from tests.rig import eventually

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
    apart = urlunsplit(parts._replace(netloc=f"{parts.username}@127.0.0.1:{proxy.port}"))
    database = await connect(apart, connections=1, listen=False, answer_within=ANSWER)
    assert isinstance(database, PostgresDatabase)
    return database


async def test_connection_that_falls_silent_while_it_is_set_up_is_given_up(clean_url: str, proxy: Proxy) -> None:
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


async def test_connection_that_falls_silent_while_it_is_made_is_given_up_like_an_answer(
    clean_url: str, proxy: Proxy
) -> None:
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


async def test_silent_transaction_does_not_keep_a_lane_for_ever(
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
