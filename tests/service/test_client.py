"""The HTTP clients: typed answers, idempotent submits, and streams that resume."""

import asyncio
import inspect
from typing import Any

import httpx
import pytest

from holdfast import AsyncClient, Client
from holdfast.client import http
from holdfast.errors import ConfigError
from holdfast.model import Status
from holdfast.response_types import Explanation, JobView
from tests.support.proxy import Proxy
from tests.support.service import FUNCTION, Service, opened, service_process_on


class Forgetful(httpx.AsyncHTTPTransport):
    """A network that loses the reply to the first call, which the server has carried out."""

    def __init__(self) -> None:
        super().__init__()
        self.keys: list[str | None] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        answer = await super().handle_async_request(request)
        self.keys.append(request.headers.get("idempotency-key"))
        if len(self.keys) == 1:
            await answer.aread()
            raise httpx.ReadError("the answer was lost", request=request)
        return answer


async def test_a_submit_whose_answer_was_lost_is_repeated_and_makes_one_job(service: Service) -> None:
    """Proves J12."""
    for submit in ("submit", "submit_many"):
        network = Forgetful()
        async with AsyncClient(service.url, token=service.admin, transport=network) as client:
            kind = {**FUNCTION, "kind": submit}
            await getattr(client, submit)(kind if submit == "submit" else [kind, kind])
            assert len(network.keys) == 2
            assert network.keys[0] == network.keys[1] is not None
            found, _ = await client.jobs(kind=submit)
        assert len(found) == (1 if submit == "submit" else 2)


async def test_silent_stream_is_reconnected(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection is half open: nothing arrives, and no error is raised. Proves E3."""
    monkeypatch.setattr(http, "SILENT_SECONDS", 1.0)
    async with (
        Proxy(service.port).run() as proxy,
        opened(service.database_url) as store,
        AsyncClient(f"http://127.0.0.1:{proxy.port}", token=service.admin) as client,
    ):
        job = await client.submit(FUNCTION)
        seen = []
        async for event in client.follow(job.id):
            seen.append(event.seq)
            if len(seen) == 1:
                assert proxy.swallow() > 0
                await store.jobs.cancel(job.id)
        assert seen == list(range(1, (await client.get(job.id)).last_seq + 1))


@pytest.mark.parametrize("kind", ["sqlite"])
async def test_a_stream_outlasts_its_server(clean_url: str, tmp_path: Any) -> None:
    """Proves E3."""
    with service_process_on(clean_url, tmp_path / "data") as service:
        async with AsyncClient(service.url, token=service.admin, tries=60) as client, opened(clean_url) as store:
            job = await client.submit(FUNCTION)
            seen = []
            async for event in client.follow(job.id):
                seen.append(event.seq)
                if len(seen) == 1:
                    await asyncio.to_thread(service.kill)
                    await store.jobs.cancel(job.id)
                    service.start(wait=False)
            assert seen == list(range(1, (await client.get(job.id)).last_seq + 1))


async def test_answers_are_typed_and_wait_has_an_end(service: Service) -> None:
    async with AsyncClient(service.url, token=service.admin) as client:
        job = await client.submit({**FUNCTION, "labels": {"team": "blue"}, "lane": "l"})
        assert isinstance(job.record, JobView)
        assert job.record.links.self.endswith(job.id)
        assert isinstance(await client.explain(job.id), Explanation)
        found, _ = await client.jobs(status=["queued", "running"], labels={"team": "blue"}, lane="l")
        assert [one.id for one in found] == [job.id]
        assert [(one.queue, one.counts.open) for one in await client.queues()] == [("default", 1)]
        with pytest.raises(TimeoutError):
            await client.wait(job.id, timeout=0.05)
        waiting = asyncio.create_task(client.wait(job.id))
        await client.cancel(job.id, reason="enough")
        assert (await waiting).status is Status.CANCELLED


@pytest.mark.parametrize("kind", ["sqlite"])
def test_sync_client_has_the_same_calls(service_process: Service) -> None:
    def calls(kind: type) -> dict[str, list[str]]:
        found = inspect.getmembers(kind, lambda one: inspect.isfunction(one) or inspect.isasyncgenfunction(one))
        return {name: list(inspect.signature(one).parameters)[1:] for name, one in found if name[0] != "_"}

    assert calls(Client) == calls(AsyncClient)
    with Client(service_process.url, token=service_process.admin) as client:
        job = client.submit(FUNCTION)
        client.cancel(job.id)
        assert [event.type for event in client.follow(job.id)][-1] == "status"
        assert client.wait(job.id).status is Status.CANCELLED
        for event in client.follow(job.id):
            assert event.seq == 1
            break
    with pytest.raises(ConfigError):
        Client("nowhere")
