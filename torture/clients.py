"""Clients: they submit, repeat, stop, resume and delete at random; others follow streams, and cut them."""

import asyncio
import contextlib
import random
from collections import deque
from collections.abc import AsyncIterator

import httpx
import msgspec
from tests.support.service import events_of

from holdfast.model import new_id
from torture.calls import Recorder
from torture.final_state import Rows, fetch
from torture.history import Call, Follow
from torture.installation import SERVERS, Installation
from torture.jobs import JobGenerator, hangs
from torture.token_usage import RAISED

KNOWN = 200
"""Jobs that clients remember, to do something with them."""
MEDDLING = ("cancel", "cancel", "interrupt", "interrupt", "resume", "resolve", "dismiss", "release", "delete")
MOST_LIVE = 300
"""Submitted jobs that have not ended, above which clients only watch."""
FEW_LIVE = 30
OVER_BUDGET = "budget_exceeded"
WITH_FILES = """
SELECT j.id FROM {schema}jobs AS j JOIN {schema}specs AS s ON s.id = j.id
WHERE j.status = 'succeeded' AND s.runner <> 'function'
ORDER BY random() LIMIT 1
"""
"""A job that may have left files, by chance."""
FAILED = f"""
SELECT j.id, j.error_code, s.reuse_key FROM {{schema}}jobs AS j JOIN {{schema}}specs AS s ON s.id = j.id
WHERE j.status = 'failed' AND (j.error_code = '{OVER_BUDGET}' OR EXISTS (
  SELECT 1 FROM {{schema}}reuse AS r JOIN {{schema}}jobs AS g ON g.id = r.job_id
  WHERE r.tenant = s.tenant AND r.reuse_key = s.reuse_key AND r.job_id <> j.id AND g.status = 'succeeded'))
ORDER BY random() LIMIT 1
"""
"""A job over its budget, or a build that failed and has a good successor, by chance."""


class Known:
    """The recently accepted jobs, shared by all clients, and how many are live."""

    def __init__(self) -> None:
        self.ids: deque[str] = deque(maxlen=KNOWN)
        self.hanging: deque[str] = deque()
        """Those that end only when they are cancelled."""
        self.live = 0


async def submit_on(
    installation: Installation, recorder: Recorder, draw: JobGenerator, known: Known, rng: random.Random
) -> None:
    """Submit jobs, and sometimes stop, resume or repeat them, until the calm."""
    while not installation.calm:
        await asyncio.sleep(rng.expovariate(4.0))
        mixed = draw.profile == "mixed"
        if known.live > (MOST_LIVE if mixed else FEW_LIVE):
            if not mixed and known.ids and rng.random() < 0.05:
                await _meddle(recorder, known.ids[-1 - rng.randrange(min(FEW_LIVE, len(known.ids)))], rng)
            continue
        if rng.random() < 0.85 or not known.ids:
            bulk = mixed and rng.random() < 0.15
            call = await recorder.submit(_bulk(draw, rng) if bulk else [draw.job(list(known.ids)[-20:])])
            known.ids.extend(call.ids)
            known.hanging.extend(id for id, job in zip(call.ids, call.jobs, strict=False) if hangs(job))
            await _repeat_perhaps(recorder, call, known, rng)
        else:
            await _meddle(recorder, rng.choice(known.ids), rng)


async def stop_on(installation: Installation, recorder: Recorder, known: Known, rng: random.Random) -> None:
    """Stop what hangs, one after the other, and what was submitted a moment ago; in the calm, all that hangs."""
    while not installation.calm:
        await asyncio.sleep(rng.expovariate(1.5))
        verb = rng.choice(["cancel", "cancel", "interrupt"])
        if known.hanging:
            job = known.hanging.popleft()
            if (await recorder.move(verb, job)).answer == "unknown":
                known.hanging.append(job)
        elif known.ids:
            await recorder.move(verb, known.ids[-1 - rng.randrange(min(5, len(known.ids)))])
    for job in known.hanging:
        await recorder.move("cancel", job)


async def delete_on(installation: Installation, recorder: Recorder, known: Known, rng: random.Random) -> None:
    """Delete a job now and then: one that left files, or any; what has not ended by force, or not at all."""
    while not installation.calm:
        await asyncio.sleep(rng.expovariate(0.7))
        left = [str(row["id"]) for row in await _asked(installation, WITH_FILES)] if rng.random() < 0.7 else []
        for job in left or list(known.ids)[-1:]:
            await recorder.move("delete", job, **({"force": True} if rng.random() < 0.6 else {}))


async def revive_on(installation: Installation, recorder: Recorder, draw: JobGenerator, rng: random.Random) -> None:
    """Resume what failed: old builds, and what used up its budget, which needs a higher one.

    A client that resumes a build asks for it meanwhile, and again when it may have ended.
    """
    while not installation.calm:
        await asyncio.sleep(rng.expovariate(1.0))
        for row in await _asked(installation, FAILED):
            job, key = str(row["id"]), row["reuse_key"]
            if row["error_code"] == OVER_BUDGET:
                budget = {"budget": {"tokens": RAISED}} if rng.random() < 0.5 else {}
                await recorder.move("resume", job, **budget)
                continue
            await recorder.move("resume", job)
            await recorder.submit([draw.build(key)])
            await asyncio.sleep(rng.uniform(0.5, 3.0))
            await recorder.submit([draw.build(key)])


async def _asked(installation: Installation, query: str) -> Rows:
    """Ask the database by plain SQL; no rows while it is away."""
    try:
        (rows,) = await fetch(installation.url, query)
    except OSError:
        return []
    return rows


def _bulk(draw: JobGenerator, rng: random.Random) -> list[dict[str, object]]:
    """Several jobs in one call, some of which need others of the same call; or many small ones."""
    if rng.random() < 0.5:
        return [draw.small() for _ in range(rng.randint(20, 100))]
    bodies: list[dict[str, object]] = []
    for _ in range(rng.randint(2, 8)):
        body = {**draw.job([]), "id": new_id()}
        if bodies and rng.random() < 0.3:
            body["needs"] = [rng.choice(bodies)["id"]]
        bodies.append(body)
    return bodies


async def _repeat_perhaps(recorder: Recorder, call: Call, known: Known, rng: random.Random) -> None:
    """Make an unanswered call again until it is answered, and now and then one that was."""
    if call.answer == "unknown" and rng.random() < 0.8:
        for _ in range(10):
            await asyncio.sleep(rng.uniform(0.1, 1.0))
            again = await recorder.repeat(call)
            if again.answer != "unknown":
                known.ids.extend(again.ids)
                return
    elif call.answer == "ok" and rng.random() < 0.1:
        await asyncio.gather(recorder.repeat(call), recorder.repeat(call))


async def _meddle(recorder: Recorder, job: str, rng: random.Random) -> None:
    verb = rng.choice(MEDDLING)
    if verb == "delete" and rng.random() < 0.5:
        return
    await recorder.move(verb, job, **({"force": True} if verb == "delete" and rng.random() < 0.5 else {}))


async def follow_on(installation: Installation, known: Known, rng: random.Random) -> None:
    """Follow one job after the other to its end, over many cuts."""
    while not installation.calm:
        await asyncio.sleep(0.1)
        if known.ids:
            await _follow(installation, known.ids[-1 - rng.randrange(min(10, len(known.ids)))], rng)


async def _follow(installation: Installation, job: str, rng: random.Random) -> None:
    after, tries = 0, 0
    while tries < 30 and not installation.calm:
        follow = Follow(job=job, after=after)
        events: list[tuple[int, str]] = []
        most = rng.choice([1, 3, 10, 1000])
        read = _ndjson if rng.random() < 0.5 else _server_sent
        with contextlib.suppress(httpx.HTTPError, TimeoutError, _Gone):
            async with asyncio.timeout(rng.uniform(0.5, 6)):
                async for seq, type in read(installation.url_of(rng.choice(SERVERS)), job, after):
                    if type == "end":
                        follow.ended = True
                        break
                    events.append((seq, type))
                    if len(events) >= most:
                        break
                else:
                    follow.ended = read is _ndjson
        follow.events = events
        installation.history.follows.append(follow)
        after += len(events)
        tries += 1
        if follow.ended:
            return


class _Gone(Exception):
    """The job is not there any more, or its server cannot say."""


async def _ndjson(url: str, job: str, after: int) -> AsyncIterator[tuple[int, str]]:
    headers = {"Accept": "application/x-ndjson"}
    async with (
        httpx.AsyncClient(base_url=url, headers=headers, timeout=30, verify=False) as client,
        client.stream("GET", f"/v1/jobs/{job}/events", params={"after": after, "follow": "true"}) as answer,
    ):
        if answer.status_code != 200:
            raise _Gone
        async for line in answer.aiter_lines():
            if line.strip():
                event = msgspec.json.decode(line)
                yield event["seq"], event["type"]


async def _server_sent(url: str, job: str, after: int) -> AsyncIterator[tuple[int, str]]:
    headers = {"Last-Event-ID": str(after)}
    async with (
        httpx.AsyncClient(base_url=url, headers=headers, timeout=30, verify=False) as client,
        client.stream("GET", f"/v1/jobs/{job}/events/stream") as answer,
    ):
        if answer.status_code != 200:
            raise _Gone
        async for found in events_of(answer):
            if found.get("event") == "end":
                yield 0, "end"
            elif "data" in found:
                event = msgspec.json.decode(found["data"])
                yield event["seq"], event["type"]
