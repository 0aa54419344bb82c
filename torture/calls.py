"""Calls of clients, over HTTP or on the store, each written into the history with its answer."""

import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import httpx

from holdfast.client.http import AsyncClient, Refused, ServerUnreachable
from holdfast.errors import HoldfastError, StoreError
from holdfast.model import new_id
from holdfast.store import Store
from torture.history import Call, History, boottime
from torture.installation import SERVERS, Installation

Submitted = tuple[Sequence[str], bool]


class OverHttp:
    """Calls to one of the servers, drawn for each call; a server that does not answer leaves a call unknown."""

    def __init__(self, installation: Installation, rng: random.Random) -> None:
        self._clients = [AsyncClient(installation.url_of(server), tries=1) for server in SERVERS]
        self._rng = rng

    async def close(self) -> None:
        for client in self._clients:
            await client.close()

    @property
    def _client(self) -> AsyncClient:
        return self._rng.choice(self._clients)

    async def submit(self, jobs: Sequence[Mapping[str, Any]], key: str) -> Submitted:
        if len(jobs) == 1:
            job = await self._client.submit(jobs[0], key=key)
            return [job.id], job.reused
        return await self._client.submit_many(jobs, key=key), False

    async def move(self, verb: str, job: str, **more: Any) -> str:
        """Make a call about a job; return how it went, if it is a delete."""
        answer = await getattr(self._client, verb)(job, **more)
        return str(answer) if verb == "delete" else ""


class OnStore:
    """Calls on the store itself, as an application with its own connection makes them."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def submit(self, jobs: Sequence[Mapping[str, Any]], key: str) -> Submitted:
        accepted = await self._store.jobs.accept([_without_uploads(job) for job in jobs], key=key)
        return [job.id for job in accepted], len(jobs) == 1 and accepted[0].reused

    async def move(self, verb: str, job: str, **more: Any) -> str:
        """Make a call about a job; return how it went, if it is a delete."""
        answer = await getattr(self._store.jobs, verb)(job, **more)
        return str(answer.outcome) if verb == "delete" else ""


def _without_uploads(job: Mapping[str, Any]) -> Mapping[str, Any]:
    """What is uploaded is given to a job by a server; the store knows nothing of files."""
    return {name: value for name, value in job.items() if name != "uploads"}


Caller = OverHttp | OnStore


class Recorder:
    """Makes calls, and writes down what was asked and answered."""

    def __init__(self, history: History, caller: Caller, files_of: Callable[[str], Sequence[str]]) -> None:
        self._history = history
        self._caller = caller
        self._files_of = files_of

    async def submit(self, jobs: Sequence[dict[str, Any]]) -> Call:
        """Submit jobs under a new key. Each carries the call's number, by which its doubles would be found."""
        call = self._begin("submit")
        call.key = new_id()
        call.jobs = [{**job, "labels": {"call": str(call.n)}} for job in jobs]
        await self._do(call, lambda: self._submit(call))
        return call

    async def repeat(self, first: Call) -> Call:
        """Make a call again, with the same key and body."""
        call = self._begin("submit")
        call.key, call.jobs, call.repeats = first.key, first.jobs, first.n if first.repeats is None else first.repeats
        await self._do(call, lambda: self._submit(call))
        return call

    async def move(self, verb: str, job: str, **more: Any) -> Call:
        call = self._begin(verb)
        call.ids, call.given = (job,), more
        await self._do(call, lambda: self._move(call))
        return call

    async def _move(self, call: Call) -> None:
        (job,) = call.ids
        call.outcome = await self._caller.move(call.verb, job, **call.given)
        if call.outcome == "deleted":
            call.left = self._files_of(job)

    async def _submit(self, call: Call) -> None:
        assert call.key is not None
        call.ids, call.reused = await self._caller.submit(call.jobs, call.key)

    def _begin(self, verb: str) -> Call:
        call = Call(n=len(self._history.calls), verb=verb, sent=boottime())
        self._history.calls.append(call)
        return call

    async def _do(self, call: Call, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
            call.answer = "ok"
        except (StoreError, ServerUnreachable, httpx.HTTPError) as error:
            call.error = repr(error)
        except Refused as error:
            call.answer = "refused" if error.status < 500 else "unknown"
            call.error = f"{error.status} {error}"
        except HoldfastError as error:
            call.answer, call.error = "refused", repr(error)
        finally:
            call.answered = boottime()
