"""`HttpClient`: the calls of the HTTP API, with typed answers. `AsyncClient` adds handles of jobs.

Every submit carries an idempotency key, so a retry after a lost reply creates no second job. A stream that breaks, or
falls silent, is resumed after the last event that arrived. `follow` and `wait` survive minutes without a server, and
log once that it is unreachable and once that it is back.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self, TypeVar
from urllib.parse import quote

import httpx
import msgspec

from holdfast import decoding
from holdfast.client.address import checked_url, find_token
from holdfast.client.http_errors import Refused, refusal
from holdfast.client.options import FileSource, opened
from holdfast.client.outage import Reachability, ServerOutage, ServerUnreachable, cause, retry_delay
from holdfast.client.streams import EventStream
from holdfast.errors import Invalid
from holdfast.model import Attempt, Event, Json, Lane, Snapshot, Status, TaskRecord, WorkerRecord, new_id
from holdfast.response_types import ArtifactView, Explanation, JobView, PlanView, QueueView, ToolView

T = TypeVar("T")

__all__ = ["AsyncClient", "HttpClient", "Refused", "ServerUnreachable", "find_token"]

URL = "http://127.0.0.1:7070"
TRIES = 5
WAIT_SECONDS = 30.0
RECONNECT_SECONDS = 15 * 60.0
"""How long `follow` and `wait` try to reach a server: longer than an upgrade or a restart of its host takes."""
SILENT_SECONDS = 45.0
"""A server sends something every 15 seconds; a stream that is silent for three times as long is dead."""
AWAY = (502, 503, 504)


class Page(msgspec.Struct, frozen=True):
    items: list[Any]
    next_cursor: str | None = None
    next_after: int | None = None


class HttpClient:
    """A client of a server. `url` defaults to `HOLDFAST_URL`; the token is found as on the command line."""

    def __init__(
        self,
        url: str | None = None,
        *,
        token: str | None = None,
        tenant: str | None = None,
        data_dir: Path | None = None,
        tries: int = TRIES,
        reconnect_timeout: float = RECONNECT_SECONDS,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.url = checked_url(url or os.environ.get("HOLDFAST_URL") or URL)
        self._tries = tries
        self._server = Reachability(self.url, reconnect_timeout)
        self._tenant = tenant
        headers = {"Accept": "application/json"}
        if found := token or find_token(data_dir):
            headers["Authorization"] = f"Bearer {found}"
        if tenant is not None:
            headers["Holdfast-Tenant"] = tenant
        self._http = httpx.AsyncClient(
            base_url=self.url,
            headers=headers,
            timeout=WAIT_SECONDS,
            transport=transport,
            verify=self.url.startswith("https"),  # Loading the CA certificates takes longer than a call.
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections. Idempotent."""
        await self._http.aclose()

    # Jobs

    async def submit(self, job: Mapping[str, Any], *, key: str | None = None) -> JobView:
        """Submit a job; a retry of the call creates no second one."""
        # wait=0: return at once, even where the job runs in the request.
        headers = {"Idempotency-Key": key or new_id(), "Prefer": "wait=0"}
        return await self._call("POST", "/v1/jobs", JobView, body=job, headers=headers)

    async def submit_many(self, jobs: Sequence[Mapping[str, Any]], *, key: str | None = None) -> Sequence[str]:
        """Submit many jobs, all or none; return their ids in order."""
        headers = {"Idempotency-Key": key or new_id()}
        answer = await self._call("POST", "/v1/jobs/bulk", dict[str, list[str]], body={"jobs": jobs}, headers=headers)
        return answer["ids"]

    async def get(self, job_id: str, *, reconnect: bool = False) -> JobView:
        """Return the job as it is now. With `reconnect`, wait for an unreachable server, as `follow` and `wait` do."""
        outage = ServerOutage(self._server)
        while True:
            try:
                return await self._call("GET", _job(job_id), JobView)
            except (ServerUnreachable, Refused) as error:
                if not reconnect or error.status not in AWAY:
                    raise
                await outage.pause(error)

    async def jobs(
        self,
        *,
        id: str | None = None,
        status: Sequence[str] = (),
        kind: str | None = None,
        queue: str | None = None,
        lane: str | None = None,
        labels: Mapping[str, str] | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        limit: int = 100,
        cursor: str | None = None,
    ) -> tuple[Sequence[JobView], str | None]:
        """Return one page of jobs, newest first, and the cursor of the next. `id` is the beginning or end of an id."""
        query = {
            "id": id,
            "status": ",".join(status) or None,
            "kind": kind,
            "queue": queue,
            "lane": lane,
            "label": [f"{name}:{value}" for name, value in (labels or {}).items()] or None,
            "since": since and since.isoformat(),
            "until": until and until.isoformat(),
            "limit": limit,
            "cursor": cursor,
        }
        page = await self._call("GET", "/v1/jobs", Page, query=query)
        return decoding.convert(page.items, list[JobView]), page.next_cursor

    async def attempts(self, job_id: str) -> Sequence[Attempt]:
        """Return every attempt of a job, the open one last."""
        page = await self._call("GET", _job(job_id, "attempts"), Page)
        return decoding.convert(page.items, list[Attempt])

    async def tasks(self, job_id: str) -> Sequence[TaskRecord]:
        """Return the tasks of a pipeline, in order."""
        page = await self._call("GET", _job(job_id, "tasks"), Page)
        return decoding.convert(page.items, list[TaskRecord])

    async def plan(self, job: Mapping[str, Any]) -> PlanView:
        """Return what a pipeline would do, task by task; nothing is submitted."""
        return await self._call("POST", "/v1/jobs", PlanView, body={**job, "plan_only": True})

    async def snapshots(self, *, limit: int = 100, cursor: str | None = None) -> tuple[Sequence[Snapshot], str | None]:
        """Return one page of snapshots, newest first, and the cursor of the next."""
        page = await self._call("GET", "/v1/snapshots", Page, query={"limit": limit, "cursor": cursor})
        return decoding.convert(page.items, list[Snapshot]), page.next_cursor

    async def explain(self, job_id: str) -> Explanation:
        """Return why a job is not running."""
        return await self._call("GET", _job(job_id, "explain"), Explanation)

    async def cancel(self, job_id: str, *, reason: str | None = None) -> JobView:
        """End a job as `cancelled`. A running one is stopped by its worker."""
        return await self._move(job_id, "cancel", reason=reason)

    async def interrupt(self, job_id: str, *, reason: str | None = None) -> JobView:
        """Stop a running job so that it ends `paused`; a waiting one is cancelled."""
        return await self._move(job_id, "interrupt", reason=reason)

    async def resume(
        self,
        job_id: str,
        *,
        reason: str | None = None,
        budget: Mapping[str, float] | None = None,
        stopped: bool = False,
    ) -> JobView:
        """Queue a job that did not succeed again. `budget` and `stopped` as for `Job.resume`."""
        return await self._move(job_id, "resume", reason=reason, budget=budget, stopped=stopped or None)

    async def resolve(self, job_id: str, result: Json = None, *, reason: str | None = None) -> JobView:
        """Mark a job that paused, failed or timed out as succeeded with this result."""
        return await self._move(job_id, "resolve", result=result, reason=reason)

    async def dismiss(self, job_id: str, *, reason: str | None = None) -> JobView:
        """Let the lane of a failed or timed out job continue without it."""
        return await self._move(job_id, "dismiss", reason=reason)

    async def release(self, job_id: str) -> JobView:
        """Queue a job that was submitted with `hold`."""
        return await self._move(job_id, "release")

    async def delete(
        self, job_id: str, *, force: bool = False, dry_run: bool = False, reason: str | None = None
    ) -> str:
        """Delete a job; return `deleted`, `deleting` or `would_delete`. `reason` says why a live one is stopped."""
        query = {"force": force or None, "dry_run": dry_run or None, "reason": reason}
        answer = await self._call("DELETE", _job(job_id), dict[str, Any], query=query)
        return str(answer["outcome"])

    async def _move(self, job_id: str, verb: str, **body: Any) -> JobView:
        given = {name: value for name, value in body.items() if value is not None}
        return await self._call("POST", _job(job_id, verb), JobView, body=given)

    async def artifacts(self, job_id: str) -> Sequence[ArtifactView]:
        """Return the artifacts of the last ended attempt."""
        page = await self._call("GET", _job(job_id, "artifacts"), Page)
        return decoding.convert(page.items, list[ArtifactView])

    async def download(self, job_id: str, path: str, target: Path) -> None:
        """Save one artifact; an existing target is replaced once the download is complete."""
        partial = target.with_name(f".{target.name}.{os.urandom(4).hex()}")
        try:
            for n in range(1, self._tries + 1):
                try:
                    await self._save(_job(job_id, f"artifacts/{quote(path)}"), partial)
                    break
                except (httpx.TransportError, ServerUnreachable) as error:
                    if n == self._tries:
                        raise ServerUnreachable(f"cannot download {path} from {self.url}: {error}") from error
                await asyncio.sleep(retry_delay(n))
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)

    async def _save(self, path: str, target: Path) -> None:
        async with self._http.stream("GET", path) as answer:
            await self._accept(answer)
            with target.open("wb") as file:
                async for chunk in answer.aiter_bytes():
                    file.write(chunk)

    async def upload(self, *files: FileSource, named: Mapping[str, FileSource] | None = None) -> str:
        """Upload files that a job can name in `uploads` within a day; return the upload's id.

        Files are paths or open files, under their own names; `named` gives each a name, and may have bytes.
        """
        headers = {} if "Authorization" in self._http.headers else {"Holdfast-Tenant": self._tenant or "default"}
        with contextlib.ExitStack() as stack:
            form = [("file", file) for given in (files, named or {}) for file in opened(given, stack)]
            if not form:
                raise Invalid("files", "names no file")
            try:
                answer = await self._http.post("/v1/uploads", files=form, headers=headers)
            except httpx.TransportError as error:
                raise ServerUnreachable(f"cannot reach {self.url}: {cause(error)}") from error
        if answer.status_code >= 400:
            _raise(answer)
        return str(msgspec.json.decode(answer.content)["upload"])

    # History

    async def events(self, job_id: str, *, after: int = 0, limit: int = 1000) -> tuple[Sequence[Event], int | None]:
        """Return one page of a job's history, and where the next begins."""
        page = await self._call("GET", _job(job_id, "events"), Page, query={"after": after, "limit": limit})
        return decoding.convert(page.items, list[Event]), page.next_after

    async def follow(self, job_id: str, *, after: int = 0) -> AsyncGenerator[Event]:
        """Yield every event after `after` as it arrives, to the end of the job.

        A broken stream is resumed without gap or repeat. If the server stays unreachable for `reconnect_timeout`
        seconds, `ServerUnreachable` is raised.
        """
        outage = ServerOutage(self._server)
        while True:
            stream = self._stream(job_id, after)
            try:
                async with stream:
                    while (event := await stream.next()) is not None:
                        outage.heard()
                        if event.seq > after:
                            after = event.seq
                            yield event
                    return
            except (httpx.TransportError, ServerUnreachable) as error:
                broken = error
            await outage.pause(broken, answered=stream.accepted)

    def _stream(self, job_id: str, after: int) -> EventStream:
        response = self._http.stream(
            "GET",
            _job(job_id, "events/stream"),
            params={"after": after},
            headers={"Accept": "text/event-stream"},
            timeout=httpx.Timeout(WAIT_SECONDS, read=SILENT_SECONDS),
        )
        return EventStream(response, self._accept)

    async def wait(self, job_id: str, *, timeout: float | None = None) -> JobView:
        """Wait until a job has ended or needs a person; wait for an unreachable server, as `follow` does."""
        async with asyncio.timeout(timeout):
            while True:
                job = await self.get(job_id, reconnect=True)
                if job.status.terminal or job.status is Status.PAUSED:
                    return job
                async with contextlib.aclosing(self.follow(job_id, after=job.last_seq)) as events:
                    async for event in events:
                        if event.type == "status":
                            break

    # The installation

    async def lanes(self) -> Sequence[Lane]:
        """Return the lanes: who holds them, how many wait, and whether they are paused."""
        return await self._list("/v1/lanes", Lane)

    async def queues(self) -> Sequence[QueueView]:
        """Return the queues: their settings, and how many jobs wait and run."""
        return await self._list("/v1/queues", QueueView)

    async def workers(self) -> Sequence[WorkerRecord]:
        """Return the registered workers."""
        return await self._list("/v1/workers", WorkerRecord)

    async def tools(self) -> Sequence[ToolView]:
        """Return the tools that the server offers."""
        return await self._list("/v1/tools", ToolView)

    async def _list(self, path: str, kind: type[T]) -> Sequence[T]:
        return decoding.convert((await self._call("GET", path, Page)).items, list[kind])  # type: ignore[valid-type]

    async def request(
        self, method: str, path: str, *, body: Any = None, query: Mapping[str, Any] | None = None
    ) -> Json:
        """Make any other call; return plain data."""
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
        """Make a call; retry if the server cannot be reached: every call is safe to repeat."""
        content = None if body is None else msgspec.json.encode(body)
        given = {name: value for name, value in (query or {}).items() if value is not None}
        sent = {**({"Content-Type": "application/json"} if content is not None else {}), **(headers or {})}
        for n in range(1, self._tries + 1):
            try:
                answer = await self._http.request(method, path, content=content, params=given, headers=sent)
            except httpx.TransportError as error:
                if n == self._tries:
                    raise ServerUnreachable(f"cannot reach {self.url}: {cause(error)}") from error
            else:
                if answer.status_code not in AWAY or n == self._tries:
                    if answer.status_code not in AWAY:
                        self._server.answered()
                    if answer.status_code >= 400:
                        _raise(answer)
                    return decoding.decode(answer.content, kind)
            await asyncio.sleep(retry_delay(n))
        raise AssertionError("unreachable")

    async def _accept(self, answer: httpx.Response) -> None:
        """Raise an error unless the server accepted the call; `ServerUnreachable` for a temporary failure."""
        if answer.status_code >= 400:
            await answer.aread()
            if answer.status_code in AWAY:
                raise ServerUnreachable(f"{self.url} answered {answer.status_code}")
            self._server.answered()
            _raise(answer)
        self._server.answered()


def _job(job_id: str, part: str = "") -> str:
    path = f"/v1/jobs/{quote(job_id, safe='')}"
    return f"{path}/{part}" if part else path


def _raise(answer: httpx.Response) -> NoReturn:
    try:
        error = msgspec.json.decode(answer.content)["error"]
        found = refusal(answer.status_code, error["code"], error["message"], error.get("details"))
    except (msgspec.MsgspecError, KeyError, TypeError):
        found = refusal(answer.status_code, "http", f"HTTP {answer.status_code}: {answer.text[:200]}")
    raise found


AsyncClient = HttpClient
"""The name by which the command line knows it."""
