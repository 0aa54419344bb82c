"""A worker inside a program, and the pytest plugin for tests of an application."""

import asyncio
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from holdfast import Context, Function, Holdfast, Process, Status
from holdfast.client.head_watch import HeadWatch
from holdfast.errors import ConfigError, Conflict, Invalid, StoreUnreachable
from holdfast.store.events import Head
from holdfast.testing.application import TestInstallation

PATIENCE = 120.0


def application(url: str | None = None, folder: Path | None = None) -> Holdfast:
    app = Holdfast(url)
    if folder is not None:
        app.settings = replace(
            app.settings, data_dir=folder, docker_host=None, process_user="root", poll_interval=0.2, drain_grace=2.0
        )

    @app.function(name="greet", queue="desktop")
    async def greet(name: str, ctx: Context) -> str:
        return f"hello {name}, attempt {ctx.attempt}"

    return app


async def test_program_runs_a_worker_inside_itself(clean_url: str, tmp_path: Path) -> None:
    """Proves G3. Afterwards the worker is gone from the database, and its jobs wait."""
    app = application(clean_url, tmp_path)
    async with app:
        async with app.worker(queues={"desktop": 4}) as worker:
            job = await app.submit("greet", name="Ada")
            assert await job.result(timeout=PATIENCE) == "hello Ada, attempt 1"
            assert [one.worker for one in await app.store.workers.list()] == [worker.id]
        assert await app.store.workers.list() == []
        waiting = await app.submit("greet", name="Bob")
        assert (await waiting.refresh()).status is Status.QUEUED


def test_synchronous_program_runs_a_worker_inside_itself(clean_url: str, tmp_path: Path) -> None:
    """Proves G3: in a thread of its own, for every queue that a function names."""
    app = application(clean_url, tmp_path)
    with app.sync() as jobs, app.worker() as worker:
        assert worker.queues == {"default": 4, "desktop": 4}
        job = jobs.submit("greet", name="Ada")
        assert job.result(timeout=PATIENCE) == "hello Ada, attempt 1"
        assert jobs.submit(Process(["true"])).wait(timeout=PATIENCE).status is Status.SUCCEEDED
    with pytest.raises(Invalid, match="without slots"):
        app.worker(queues={"desktop": 0})


async def test_worker_that_cannot_start_raises_its_error(clean_url: str, tmp_path: Path) -> None:
    app = application(clean_url, tmp_path)
    async with app, app.worker():
        pass
    app.settings = replace(app.settings, shared_dir=tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="shared folder"):
        async with app.worker():
            raise AssertionError("never entered")


@pytest.mark.parametrize("kind", ["sqlite"])
async def test_files_need_the_shared_folder_of_the_database(clean_url: str, tmp_path: Path) -> None:
    app = application(clean_url, tmp_path)
    async with app:
        with pytest.raises(Invalid, match="no server or worker has started on this database yet"):
            await app.submit(Process(["true"], files={"a": b""}))
        async with app.worker():
            await (await app.submit(Process(["true"], files={"a": b""}))).result(timeout=PATIENCE)
    other = application(clean_url, tmp_path / "other")
    async with other:
        with pytest.raises(Invalid, match=r"cannot be reached from here: .*has no id of a shared folder"):
            await other.submit(Process(["true"], files={"a": b""}))


async def test_waiting_outlasts_a_database_that_is_away(
    holdfast_test: TestInstallation, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning when it goes away, one when it is back. Who waits when the application closes gets an error."""
    app = application()
    async with holdfast_test(app, worker=False):
        job = await app.submit("greet", name="Ada")
        heads, failures = app.store.events.heads, iter(range(3))

        async def away(ids: Sequence[str]) -> Mapping[str, Head]:
            if next(failures, None) is not None:
                raise StoreUnreachable("no route")
            await app.store.jobs.cancel(job.id)
            return await heads(ids)

        monkeypatch.setattr(app.store.events, "heads", away)
        assert (await job.wait()).status is Status.CANCELLED
        assert [event.seq async for event in job.follow(after=1)] == [2]
        assert [line.message for line in caplog.records if "database" in line.message] == [
            "cannot reach the database (no route); retrying for up to 15 minutes",
            "the database is back",
        ]
        heads_watch = HeadWatch(app.store)
        left = asyncio.create_task(heads_watch.after(job.id, "default", 1_000_000))
        await asyncio.sleep(0)  # It waits now.
        await heads_watch.close()
        with pytest.raises(Invalid, match="was closed while"):
            await left


def test_test_moves_the_clock(tmp_path: Path) -> None:
    """Proves G3: a delayed job and a retry run at once, and a job that runs meanwhile keeps its lease."""
    app = application()
    began = tmp_path / "began"

    @app.function(max_attempts=2, timeout=3600)
    async def fails_once(ctx: Context) -> int:
        if ctx.attempt == 1:
            ctx.retry(after=86_400)
        return ctx.attempt

    @app.function()
    async def runs_on(ctx: Context) -> str | None:
        began.touch()
        await ctx.cancel.requested_async()
        return ctx.cancel.reason

    installation = TestInstallation(tmp_path / "holdfast")
    before = app.settings
    with installation(app) as jobs:
        running = jobs.submit("runs_on")
        delayed = jobs.submit(app_function(app, "greet").with_options(delay=3600), name="Ada")
        with pytest.raises(TimeoutError):
            delayed.wait(timeout=0.3)
        assert delayed.refresh().status is Status.QUEUED
        installation.clock.advance(hours=1)
        assert delayed.result(timeout=PATIENCE) == "hello Ada, attempt 1"
        retried = jobs.submit("fails_once")
        while retried.refresh().record.attempts == 0 or retried.status is not Status.QUEUED:
            retried.explain()  # Reason: the refresh is the signal; this only spaces the questions.
        installation.clock.advance(days=2)
        assert retried.result(timeout=PATIENCE) == 2
        assert (began.exists(), running.refresh().record.attempt) == (True, 1)
        running.cancel()
        assert running.wait(timeout=PATIENCE).status is Status.CANCELLED
    assert app.settings is before


def app_function(app: Holdfast, name: str) -> Function[..., Any, Any]:
    found = app.functions.get(name)
    assert found is not None
    return Function(found)


TEN_LINES = """
from holdfast import Context, Holdfast
app = Holdfast()
@app.function(queue="mail")
async def greet(name: str, ctx: Context) -> str:
    return f"hello {name}"
def test_a_greeting(holdfast_test):
    with holdfast_test(app) as jobs:
        assert jobs.submit(greet, name="Ada").result(timeout=60) == "hello Ada"
"""


def test_ten_lines_test_an_application(tmp_path: Path) -> None:
    """Proves G3: with the plugin that pytest finds by its entry point, and nothing else."""
    assert len(TEN_LINES.strip().splitlines()) <= 10
    (tmp_path / "test_greeting.py").write_text(TEN_LINES)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_greeting.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert "1 passed" in done.stdout, done.stdout + done.stderr


async def test_application_is_opened_once(holdfast_test: TestInstallation) -> None:
    app = application()
    async with holdfast_test(app, worker=False) as opened:
        assert opened is app
        job = await app.submit("greet", name="Ada")
        with pytest.raises(Invalid, match="is open already"):
            await app.__aenter__()
        with pytest.raises(Conflict):
            await job.release()
        await asyncio.gather(*(app.job(job.id).refresh() for _ in range(3)))
    with pytest.raises(Invalid, match="is not open"):
        await app.submit("greet", name="Ada")
