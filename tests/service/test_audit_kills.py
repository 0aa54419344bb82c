"""An act and its audit row are one transaction: killed at any statement, both are there or neither."""

import asyncio
import signal

import pytest

from holdfast.errors import NotFound
from holdfast.model import Outcome, Role
from holdfast.store import Store, open_store
from holdfast.store.tokens import new_secret
from tests.crash.test_crash import JOB, PAIR, context, die_after
from tests.support.audit_trail import trail


async def act_on_token(store: Store, name: str) -> None:
    await store.tokens.add(name, Role.VIEWER, secret=new_secret(), tenant="blue")


async def act_on_queue(store: Store, name: str) -> None:
    await store.queues.limit(name, cap=1)


async def act_on_lane(store: Store, name: str) -> None:
    await store.lanes.pause(name)


async def act_on_job(store: Store, name: str) -> None:
    await store.jobs.resolve(name)


async def force_delete(store: Store, name: str) -> None:
    await store.jobs.delete(name, force=True)


KILLED = {work.__name__: work for work in (act_on_token, act_on_queue, act_on_lane, act_on_job, force_delete)}


def act_until_killed(url: str, act: str, name: str, step: int) -> None:
    async def run() -> None:
        async with await open_store(url, listen=False) as store:
            die_after(step)
            await KILLED[act](store, name)

    asyncio.run(run())


async def prepared(store: Store, act: str, step: int) -> str:
    """What the act is to be done on."""
    if act == "act_on_job":
        job = await store.jobs.submit(JOB)
        (lease,) = (await store.leases.claim("w0", PAIR, slots=1, ttl=60)).claimed
        await store.leases.finish([(lease, Outcome.failed("exit_nonzero", "boom"))])
        return job.id
    if act == "force_delete":
        return (await store.jobs.submit({**JOB, "hold": True})).id
    return f"n{step}"


async def changed(store: Store, act: str, name: str) -> bool:
    match act:
        case "act_on_token":
            return name in [token.name for token in await store.tokens.list()]
        case "act_on_queue":
            return name in [queue.queue for queue in await store.queues.list()]
        case "act_on_lane":
            return any(lane.lane == name and lane.state == "paused" for lane in await store.lanes.list())
    try:
        job = await store.jobs.get(name)
    except NotFound:
        return True
    return job.status in ("succeeded", "cancelled")


@pytest.mark.parametrize("act", KILLED)
async def test_act_killed_at_any_statement_is_recorded_exactly_if_it_happened(clean_url: str, act: str) -> None:
    seen = set()
    async with await open_store(clean_url, listen=False) as store:
        for step in range(1, 30):
            name = await prepared(store, act, step)
            child = context.Process(target=act_until_killed, args=(clean_url, act, name, step))
            child.start()
            await asyncio.to_thread(child.join, 60)
            assert child.exitcode in (0, -signal.SIGKILL)
            rows = [row for row in await trail(store) if name in (row.subject, (row.after or {}).get("name"))]
            assert len(rows) == int(await changed(store, act, name)), (step, rows)
            seen.add(len(rows))
            if child.exitcode == 0:
                break
    assert child.exitcode == 0
    assert seen == {0, 1}
