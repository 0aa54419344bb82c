"""Tokens in the store: found by their secret, invalid after they expire or are removed."""

import asyncio

import pytest

from holdfast.errors import Conflict, NotFound
from holdfast.model import Role, new_id
from holdfast.store.sqlite import SqliteDatabase
from holdfast.store.tokens import digest, new_secret
from tests.support.store_harness import StoreHarness


async def test_token_is_found_by_its_secret_and_kept_as_a_hash(harness: StoreHarness) -> None:
    """Proves O8."""
    secret = new_secret()
    made = await harness.store.tokens.add("ci", Role.SUBMITTER, secret=secret, tenant="blue", by="admin")
    assert await harness.store.tokens.find(secret) == made
    assert await harness.store.tokens.find(secret + "x") is None
    database = harness.store.database
    if isinstance(database, SqliteDatabase):
        kept = await database.migrate(lambda raw: [tuple(row) for row in raw.execute("SELECT * FROM tokens")])
    else:
        kept = [tuple(row) for row in await database.fetch("SELECT * FROM holdfast.tokens")]
    assert secret not in repr(kept)
    assert digest(secret) in repr(kept)


async def test_token_ends_at_its_time(harness: StoreHarness) -> None:
    """Proves O8."""
    secret = new_secret()
    await harness.store.tokens.add("guest", Role.VIEWER, secret=secret, tenant="blue", expires_at=harness.later(60))
    await harness.advance(59)
    assert await harness.store.tokens.find(secret) is not None
    await harness.advance(1)
    assert await harness.store.tokens.find(secret) is None


async def test_name_is_given_once(harness: StoreHarness) -> None:
    await harness.store.tokens.add("ci", Role.VIEWER, secret=new_secret(), tenant="blue")
    with pytest.raises(Conflict, match="a token ci exists already"):
        await harness.store.tokens.add("ci", Role.ADMIN, secret=new_secret())


async def test_last_lasting_admin_stays_also_when_two_are_removed_at_once(harness: StoreHarness) -> None:
    """Proves O8."""
    tokens = harness.store.tokens
    assert not await tokens.has_admin()
    first = await tokens.add("a", Role.ADMIN, secret=new_secret())
    second = await tokens.add("b", Role.ADMIN, secret=new_secret())
    await tokens.add("c", Role.ADMIN, secret=new_secret(), expires_at=harness.later(60))
    answers = await asyncio.gather(tokens.remove(first.id), tokens.remove(second.id), return_exceptions=True)
    assert [type(answer) for answer in answers if not isinstance(answer, str)] == [Conflict]
    assert await tokens.has_admin()


@pytest.mark.parametrize("token_id", ["", "nonsense", "00000000-0000-7000-8000-000000000000"])
async def test_unknown_token_cannot_be_removed(harness: StoreHarness, token_id: str) -> None:
    with pytest.raises(NotFound):
        await harness.store.tokens.remove(token_id)


async def test_loads_count_by_queue_and_tenant(harness: StoreHarness) -> None:
    await harness.submit(queue="a")
    await harness.submit(queue="a", tenant="blue")
    await harness.submit(queue="b", hold=True)
    await harness.claim(1, queue="a")
    loads = await harness.store.queues.loads()
    assert (loads["a"].open, loads["a"].running, loads["b"].held) == (1, 1, 1)
    (blue,) = (await harness.store.queues.loads(tenant="blue")).items()
    assert (blue[0], blue[1].open + blue[1].running) == ("a", 1)


async def test_heads_return_the_last_seq_and_whether_the_job_is_live(harness: StoreHarness) -> None:
    job = await harness.submit()
    lease = await harness.run_one()
    heads = await harness.store.events.heads([job.id, new_id()])
    assert list(heads) == [job.id]
    assert (heads[job.id].seq, heads[job.id].status) == ((await harness.get(lease)).last_seq, "succeeded")
