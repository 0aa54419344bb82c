"""The load of a soak: bulks of jobs of many kinds, over HTTP to both servers, and some calls made twice.

Nothing here should go wrong: a job that fails is retried and succeeds. No job in a lane fails, which would block the
lane.
"""

import random
import time
from collections.abc import Sequence
from typing import Any

from holdfast.client.http import AsyncClient
from holdfast.model import new_id
from torture.child_script import SCRIPT
from torture.clients import Known
from torture.jobs import FAST_RETRY, Body

BULK = 40
"""The most jobs of one call."""
LANES = 12
KEYS = 50
MOMENT, MEETING = 2.0, 8
"""Seconds after which the lanes of the moment are left for new ones, and how many these are."""
PARTS = 20
KEYED = 0.5
TWICE = 0.2
"""How many calls have a key of their own, and how many of these are made again."""


class Mix:
    """Draws bulks of jobs: mostly quick functions, one process in ten, and some of all that a table is kept for."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._kinds = {
            self._plain: 68, self._process: 10, self._in_a_lane: 6, self._in_a_lane_of_the_moment: 6,
            self._stumbling: 5, self._shared: 5,
        }  # fmt: skip

    def bulk(self, size: int) -> list[Body]:
        """So many jobs. Some need an earlier one; those in lanes need none, so that lanes wait for nobody."""
        bodies: list[Body] = []
        for _ in range(size):
            body = {**self.job(), "id": new_id()}
            if bodies and "lane" not in body and self._rng.random() < 0.1:
                body["needs"] = [self._rng.choice(bodies)["id"]]
            bodies.append(body)
        return bodies

    def job(self) -> Body:
        (draw,) = self._rng.choices(list(self._kinds), list(self._kinds.values()))
        body = draw()
        if self._rng.random() < 0.2:
            body["labels"] = {"part": str(self._rng.randrange(PARTS)), "moment": _moment()}
        return body

    def _plain(self) -> Body:
        return {"runner": "function", "spec": {"name": "talk"}, "inputs": {"lines": 2, "pace": 0.01, "fail": False}}

    def _process(self) -> Body:
        env: dict[str, Any] = {"JOURNAL": "/dev/null", "LINES": "3", "PACE": "0.05", "CODE": "0"}
        return {"runner": "process", "spec": {"command": ["sh", "-c", SCRIPT], "env": env}}

    def _in_a_lane(self) -> Body:
        return {**self._plain(), "lane": f"lane {self._rng.randrange(LANES)}"}

    def _in_a_lane_of_the_moment(self) -> Body:
        return {**self._plain(), "lane": f"lane {_moment()}/{self._rng.randrange(MEETING)}"}

    def _stumbling(self) -> Body:
        return {"runner": "function", "spec": {"name": "stumble"}, "max_attempts": 3, "retry": FAST_RETRY}

    def _shared(self) -> Body:
        key = f"key {self._rng.randrange(KEYS)}"
        return {**self._plain(), "reuse_key": key, "rebuild": self._rng.random() < 0.5}


def _moment() -> str:
    return str(int(time.time() / MOMENT))


class Caller:
    """Submits bulks to a server that is drawn for each, and counts what it did.

    A client gives every call a key; some have one of their own here, and a few of those are made again, at the other
    server, which has to answer with the same jobs.
    """

    def __init__(self, servers: Sequence[str], rng: random.Random) -> None:
        self._clients = [AsyncClient(url) for url in servers]
        self._rng = rng
        self._mix = Mix(rng)
        self.known = Known()
        self.submitted = 0
        self.repeated = 0
        self.doubled = 0

    async def aclose(self) -> None:
        for client in self._clients:
            await client.close()

    def size(self) -> int:
        """How many jobs the next call may have."""
        return self._rng.randint(2, BULK)

    async def submit(self, size: int) -> None:
        jobs = self._mix.bulk(size)
        key = new_id() if self._rng.random() < KEYED else None
        one, other = self._rng.sample(self._clients, 2)
        ids = await one.submit_many(jobs, key=key)
        self.known.ids.extend(ids)
        self.submitted += size
        if key is not None and self._rng.random() < TWICE:
            self.repeated += 1
            self.doubled += await other.submit_many(jobs, key=key) != ids
