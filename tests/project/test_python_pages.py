"""The examples of the pages about Python run as printed: on one store, with a server and a worker."""

import ast
import asyncio
import inspect
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from holdfast import Call, Client, Context, Holdfast, Process, Retry, Status
from holdfast.model import Gate
from tests.support.doc_pages import ROOT, blocks
from tests.support.service import Service, service_in_process

PATIENCE = 120.0


@dataclass
class Report:
    steps: int


@pytest.fixture
def kind() -> str:
    return "sqlite"


@pytest.fixture
def folder(tmp_path: Path, clean_url: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that the examples run in, with the files that they name, and settings that lead to the store."""
    here = tmp_path / "here"
    here.mkdir()
    for name in ("run", "config.toml"):
        (here / name).write_text("#!/bin/sh\n")
    sources = tmp_path / "shared" / "sources" / "default"
    sources.mkdir(parents=True)
    (sources / "seed").write_text("#!/bin/sh\n")
    monkeypatch.chdir(here)
    settings = {"DATABASE_URL": clean_url, "DATA_DIR": str(tmp_path), "PROCESS_USER": "root", "POLL_INTERVAL": "0.2"}
    for name, value in settings.items():
        monkeypatch.setenv(f"HOLDFAST_{name}", value)
    return here


@pytest.fixture
async def server(
    folder: Path, clean_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Service]:
    async with service_in_process(clean_url, tmp_path / "data") as service:
        monkeypatch.setenv("HOLDFAST_URL", service.url)
        monkeypatch.setenv("HOLDFAST_TOKEN", service.admin)
        yield service


@asynccontextmanager
async def working(app: Holdfast) -> AsyncIterator[Holdfast]:
    """The application, open, and a worker for its queues beside it."""
    async with app, app.closed_copy().worker():
        yield app


def examples(page: str) -> list[str]:
    return [block.text for block in blocks(ROOT / "docs" / page) if block.kind == "python"]


async def run(code: str, names: dict[str, Any]) -> None:
    """Run an example with these names; what blocks runs in a thread, as the server is in this one."""
    compiled = compile(code, "<example>", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    if compiled.co_flags & inspect.CO_COROUTINE:
        await eval(compiled, names)
    else:
        await asyncio.to_thread(exec, compiled, names)


async def test_examples_of_the_python_page_run(server: Service, capsys: pytest.CaptureFixture[str]) -> None:
    """Proves G1."""
    submit, follow, files, worker = examples("python.md")
    names: dict[str, Any] = {}
    async with Holdfast() as app:
        await run(submit, names)
        jobs = (await app.jobs())[0]
        waits = [(job.runner, job.lane, job.gate) for job in reversed(jobs)]
        assert waits == [("process", None, Gate.OPEN), ("docker", None, Gate.NEEDS), ("process", "shop", Gate.OPEN)]
    async with working(Holdfast()) as app:
        names["app"] = app
        await run(follow, names | {"Process": Process})
        job = (await app.jobs(limit=1))[0][0]
        assert job.status.terminal
        assert str(job.status) in capsys.readouterr().out
        with await asyncio.to_thread(Client) as client:
            await run(files, {"client": client, "Process": Process})
        counted, ran = reversed((await app.jobs(limit=2))[0])
        assert await app.job(counted.id).wait(timeout=PATIENCE)
        assert await app.job(counted.id).logs() == ["2 input/data.csv"]
        assert ran.spec["command"] == ["./run"]
    app = Holdfast()

    @app.function(queue="desktop")
    async def play(target: str) -> str:
        return f"played {target}"

    await run(worker, {"app": app, "play": play})
    assert capsys.readouterr().out == "played crm\n"


async def test_examples_of_the_functions_page_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Proves G2."""
    define, submit, options = examples("functions.md")
    names: dict[str, Any] = {"addresses": ["eve@example.org", "dan@example.org"], "Retry": Retry, "Report": Report}
    await run(define, names)
    app: Holdfast = names["app"]
    async with app.closed_copy().worker(queues={"mail": 4}):
        await run(submit, names)
    assert "{'sent': True}" in capsys.readouterr().out
    await run(options, names)
    async with app:
        assert len((await app.jobs())[0]) == 4
        job = await app.submit(names["play"], target="crm", steps=[])
        assert (job.lane, job.queue, job.record.priority, job.record.max_attempts) == ("crm", "desktop", 3, 3)
        assert job.labels == {"team": "blue"}
        assert job.status is Status.QUEUED
        assert isinstance(names["play"].call(target="crm", steps=[]), Call)
    assert names["Context"] is Context
