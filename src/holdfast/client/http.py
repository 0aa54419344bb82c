"""`AsyncClient` and `Client`: holdfast over HTTP, with typed answers.

Every submit carries an idempotency key, so a retry after a lost answer makes no second job. A stream that breaks is
taken up again behind the last event that arrived.
"""

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import quote

import httpx
import msgspec

from holdfast.errors import HoldfastError
from holdfast.model import Attempt, Event, Job, Json, Lane, Snapshot, Status, TaskRecord, Worker, new_id
from holdfast.timing import backoff, jitter

T = TypeVar("T")

URL = "http://127.0.0.1:7070"
TRIES = 5
WAIT_SECONDS = 30.0


class ServerUnreachable(HoldfastError):
    status = 503
    code = "unreachable"


class Refused(HoldfastError):
    """The server said no: its status, code, message and details."""

    def __init__(self, status: int, code: str, message: str, details: Json = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.details = details


class Artifact(msgspec.Struct, frozen=True):
    path: str
    size: int
    href: str


class Page(msgspec.Struct, frozen=True):
    items: list[Any]
    next_cursor: str | None = None
    next_after: int | None = None


def find_token(data_dir: Path | None = None) -> str | None:
    """The token of `HOLDFAST_TOKEN`, else the one that the first start left in the data folder."""
    if token := os.environ.get("HOLDFAST_TOKEN"):
        return token
    folder = data_dir or Path(os.environ.get("HOLDFAST_DATA_DIR") or "holdfast-data")
    try:
        return (folder / "admin.token").read_text().strip()
    except OSError:
        return None


class AsyncClient:
    """Talks to a server. `url` is `HOLDFAST_URL` unless given; the token is found as the command line finds it."""

    def __init__(
        self,
        url: str | None = None,
        *,
        token: str | None = None,
        tenant: str | None = None,
        data_dir: Path | None = None,
        tries: int = TRIES,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.url = (url or os.environ.get("HOLDFAST_URL") or URL).rstrip("/")
        self._tries = tries
        headers = {"Accept": "application/json"}
        if found := token or find_token(data_dir):
            headers["Authorization"] = f"Bearer {found}"
        if tenant is not None:
            headers["Holdfast-Tenant"] = tenant
        self._http = httpx.AsyncClient(base_url=self.url, headers=headers, timeout=WAIT_SECONDS, transport=transport)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    # Jobs

    async def submit(self, job: Mapping[str, Any], *, key: str | None = None) -> Job:
        """Submit a job; a retry of the call makes no second one."""
        return await self._call("POST", "/v1/jobs", Job, body=job, headers={"Idempotency-Key": key or new_id()})

    async def submit_many(self, jobs: Sequence[Mapping[str, Any]], *, key: str | None = None) -> Sequence[str]:
        """Submit many jobs, all or none; return their ids in order."""
        headers = {"Idempotency-Key": key or new_id()}
        answer = await self._call("POST", "/v1/jobs/bulk", dict[str, list[str]], body={"jobs": jobs}, headers=headers)
        return answer["ids"]

    async def get(self, job_id: str) -> Job:
        return await self._call("GET", _job(job_id), Job)

    async def jobs(
        self, *, limit: int = 100, cursor: str | None = None, **filters: Any
    ) -> tuple[Sequence[Job], str | None]:
        """One page of jobs, newest first, and the cursor of the next."""
        query = {"limit": limit, "cursor": cursor, **filters}
        page = await self._call("GET", "/v1/jobs", Page, query=query)
        return msgspec.convert(page.items, list[Job]), page.next_cursor

    async def attempts(self, job_id: str) -> Sequence[Attempt]:
        page = await self._call("GET", _job(job_id, "attempts"), Page)
        return msgspec.convert(page.items, list[Attempt])

    async def tasks(self, job_id: str) -> Sequence[TaskRecord]:
        """The tasks of a pipeline, in order."""
        page = await self._call("GET", _job(job_id, "tasks"), Page)
        return msgspec.convert(page.items, list[TaskRecord])

    async def plan(self, job: Mapping[str, Any]) -> Json:
        """What a pipeline would do, task by task; nothing is submitted."""
        return await self._call("POST", "/v1/jobs", Any, body={**job, "plan_only": True})

    async def snapshots(self, *, limit: int = 100, cursor: str | None = None) -> tuple[Sequence[Snapshot], str | None]:
        """One page of snapshots, newest first, and the cursor of the next."""
        page = await self._call("GET", "/v1/snapshots", Page, query={"limit": limit, "cursor": cursor})
        return msgspec.convert(page.items, list[Snapshot]), page.next_cursor

    async def explain(self, job_id: str) -> Json:
        return await self._call("GET", _job(job_id, "explain"), Any)

    async def cancel(self, job_id: str, *, reason: str | None = None) -> Job:
        return await self._move(job_id, "cancel", reason=reason)

    async def interrupt(self, job_id: str, *, reason: str | None = None) -> Job:
        return await self._move(job_id, "interrupt", reason=reason)

    async def resume(
        self,
        job_id: str,
        *,
        reason: str | None = None,
        budget: Mapping[str, float] | None = None,
        stopped: bool = False,
    ) -> Job:
        return await self._move(job_id, "resume", reason=reason, budget=budget, stopped=stopped or None)

    async def resolve(self, job_id: str, result: Json = None, *, reason: str | None = None) -> Job:
        return await self._move(job_id, "resolve", result=result, reason=reason)

    async def dismiss(self, job_id: str, *, reason: str | None = None) -> Job:
        return await self._move(job_id, "dismiss", reason=reason)

    async def release(self, job_id: str) -> Job:
        return await self._move(job_id, "release")

    async def delete(self, job_id: str, *, force: bool = False, dry_run: bool = False) -> str:
        """Delete a job; return `deleted`, `deleting` or `would_delete`."""
        query = {"force": force or None, "dry_run": dry_run or None}
        answer = await self._call("DELETE", _job(job_id), dict[str, Any], query=query)
        return str(answer["outcome"])

    async def _move(self, job_id: str, verb: str, **body: Any) -> Job:
        given = {name: value for name, value in body.items() if value is not None}
        return await self._call("POST", _job(job_id, verb), Job, body=given)

    async def artifacts(self, job_id: str) -> Sequence[Artifact]:
        """The files that the last ended attempt left."""
        page = await self._call("GET", _job(job_id, "artifacts"), Page)
        return msgspec.convert(page.items, list[Artifact])

    async def download(self, job_id: str, path: str, target: Path) -> None:
        """Save one file; what is at the target is replaced once all of it is there."""
        partial = target.with_name(f".{target.name}.{os.urandom(4).hex()}")
        try:
            async with self._http.stream("GET", _job(job_id, f"artifacts/{quote(path)}")) as answer:
                if answer.status_code >= 400:
                    await answer.aread()
                    _raise(answer)
                with partial.open("wb") as file:
                    async for chunk in answer.aiter_bytes():
                        file.write(chunk)
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)

    # History

    async def events(self, job_id: str, *, after: int = 0, limit: int = 1000) -> tuple[Sequence[Event], int | None]:
        """One page of a job's history, and where the next begins."""
        page = await self._call("GET", _job(job_id, "events"), Page, query={"after": after, "limit": limit})
        return msgspec.convert(page.items, list[Event]), page.next_after

    async def follow(self, job_id: str, *, after: int = 0) -> AsyncIterator[Event]:
        """Every event behind `after`, as it comes, to the end of the job; a broken stream is taken up again."""
        failures = 0
        while True:
            try:
                async for event in self._stream(job_id, after):
                    failures = 0
                    if event.seq > after:
                        after = event.seq
                        yield event
                return  # A stream that ends in order is at the end of the job; one that was cut breaks off.
            except (httpx.TransportError, ServerUnreachable):
                failures += 1
            if failures > self._tries:
                raise ServerUnreachable(f"the stream of job {job_id} broke, and {self.url} does not answer")
            await asyncio.sleep(jitter(backoff(failures, base=0.1, cap=2.0)))

    async def _stream(self, job_id: str, after: int) -> AsyncIterator[Event]:
        """The events of one connection."""
        headers = {"Accept": "application/x-ndjson"}
        query: dict[str, Any] = {"after": after, "follow": "true"}
        timeout = httpx.Timeout(WAIT_SECONDS, read=None)
        async with self._http.stream(
            "GET", _job(job_id, "events"), params=query, headers=headers, timeout=timeout
        ) as answer:
            if answer.status_code >= 400:
                await answer.aread()
                _raise(answer)
            async for line in answer.aiter_lines():
                if line.strip():
                    yield msgspec.json.decode(line, type=Event)

    async def wait(self, job_id: str, *, timeout: float | None = None) -> Job:
        """Wait until a job has ended or needs a person."""
        async with asyncio.timeout(timeout):
            while True:
                job = await self.get(job_id)
                if job.status.terminal or job.status is Status.PAUSED:
                    return job
                async for event in self.follow(job_id, after=job.last_seq):
                    if event.type == "status":
                        break

    # The installation

    async def lanes(self) -> Sequence[Lane]:
        return msgspec.convert((await self._call("GET", "/v1/lanes", Page)).items, list[Lane])

    async def workers(self) -> Sequence[Worker]:
        return msgspec.convert((await self._call("GET", "/v1/workers", Page)).items, list[Worker])

    async def request(
        self, method: str, path: str, *, body: Any = None, query: Mapping[str, Any] | None = None
    ) -> Json:
        """Any other call, as plain data."""
        return await self._call(method, path, Any, body=body, query=query)

    # How a call is made

    async def _call(
        self,
        method: str,
        path: str,
        kind: type[T],
        *,
        body: Any = None,
        query: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> T:
        """Make a call, again if the server could not be reached: every call is safe to repeat."""
        content = None if body is None else msgspec.json.encode(body)
        given = {name: value for name, value in (query or {}).items() if value is not None}
        sent = {**({"Content-Type": "application/json"} if content is not None else {}), **(headers or {})}
        for n in range(1, self._tries + 1):
            try:
                answer = await self._http.request(method, path, content=content, params=given, headers=sent)
            except httpx.TransportError as error:
                if n == self._tries:
                    raise ServerUnreachable(f"cannot reach {self.url}: {error or type(error).__name__}") from error
            else:
                if answer.status_code not in (502, 503, 504) or n == self._tries:
                    if answer.status_code >= 400:
                        _raise(answer)
                    return msgspec.json.decode(answer.content, type=kind)
            await asyncio.sleep(jitter(backoff(n, base=0.1, cap=2.0)))
        raise AssertionError("unreachable")


def _job(job_id: str, part: str = "") -> str:
    path = f"/v1/jobs/{quote(job_id, safe='')}"
    return f"{path}/{part}" if part else path


def _raise(answer: httpx.Response) -> None:
    try:
        error = msgspec.json.decode(answer.content)["error"]
        raise Refused(answer.status_code, error["code"], error["message"], error.get("details"))
    except (msgspec.MsgspecError, KeyError, TypeError):
        raise Refused(answer.status_code, "http", f"HTTP {answer.status_code}: {answer.text[:200]}") from None


class Client:
    """`AsyncClient` for code that is not async: the same calls, which block. Its loop runs in a thread of its own."""

    def __init__(self, url: str | None = None, **options: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="holdfast-client", daemon=True)
        self._thread.start()
        self._client = self._do(self._open(url, options))

    async def _open(self, url: str | None, options: Mapping[str, Any]) -> AsyncClient:
        return AsyncClient(url, **options)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        found = getattr(self._client, name)

        def call(*arguments: Any, **named: Any) -> Any:
            return self._do(found(*arguments, **named))

        return call

    def follow(self, job_id: str, *, after: int = 0) -> Iterator[Event]:
        """Every event behind `after`, as it comes, to the end of the job."""
        events = self._client.follow(job_id, after=after)
        while (event := self._do(_next(events))) is not None:
            yield event

    def _do(self, work: Awaitable[T]) -> T:
        async def whole() -> T:
            return await work

        coroutine: Coroutine[Any, Any, T] = whole()
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def close(self) -> None:
        self._do(self._client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


async def _next(events: AsyncIterator[Event]) -> Event | None:
    return await anext(events, None)
