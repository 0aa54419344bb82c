"""`holdfast worker`: its arguments, its exit codes, and its row in the store."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.cli.queue_option import parse_queues
from holdfast.cli.worker_processes import divide
from holdfast.errors import ConfigError
from holdfast.model import Status
from tests.support.in_process_workers import InProcessWorkers, eventually

APP = """
from holdfast import Holdfast

app = Holdfast()

@app.function()
def greet(name: str) -> str:
    return f"hello {name}"
"""


def holdfast(*arguments: str, cwd: Path, **env: str) -> "subprocess.CompletedProcess[str]":
    program = [sys.executable, "-m", "holdfast.cli.main", *arguments]
    known = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
    return subprocess.run(program, cwd=cwd, env=known | env, capture_output=True, text=True, timeout=120, check=False)


def test_queues_with_their_slots() -> None:
    """Proves O3."""
    assert parse_queues("default:4, heavy:1,mail") == {"default": 4, "heavy": 1, "mail": 1}
    with pytest.raises(ConfigError) as refused:
        parse_queues("a:0,b:x,,c:1,c:2,:3")
    assert len(refused.value.problems) == 5


@given(
    st.dictionaries(st.sampled_from("abcde"), st.integers(1, 40), min_size=1), st.integers(1, 12)
)  # fmt: skip
def test_slots_are_divided_evenly_and_none_is_lost(queues: dict[str, int], processes: int) -> None:
    if processes > sum(queues.values()):
        with pytest.raises(ConfigError):
            divide(queues, processes)
        return
    shares = divide(queues, processes)
    assert len(shares) == processes
    assert all(shares)
    for queue, slots in queues.items():
        own = [share.get(queue, 0) for share in shares]
        assert (sum(own), max(own) - min(own) <= 1) == (slots, True)


def test_process_exits_if_its_parent_died_before_it_started() -> None:
    program = [sys.executable, "-m", "holdfast.cli.worker_process", "1", "1", "--queue", "a:1", "--worker-id", "w"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")


def test_worker_starts_without_the_packages_that_it_does_not_need() -> None:
    """Web framework and Docker client take several times as long to import as all else.

    A process that deletes jobs may need the client, but not before it deletes one.
    """
    program = (
        "import sys, holdfast.cli.worker_command\n"
        "from holdfast.assemble import containers_of\n"
        "from holdfast.config import Settings\n"
        "assert containers_of(Settings(docker_host='unix:///nowhere'), 'installation') is not None\n"
        "print(*sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    unneeded = {"fastapi", "pydantic", "jsonschema", "prometheus_client", "aiohttp", "aiodocker", "httpx"}
    assert not unneeded & {*done.stdout.split()}


async def test_once_runs_the_queued_jobs_and_exits(workers: InProcessWorkers, tmp_path: Path) -> None:
    """Proves O3, L2: two slots, never three at once."""
    (tmp_path / "greetings.py").write_text(APP)
    spans = tmp_path / "spans"
    script = f"echo + >> {spans}; sleep 0.2; echo - >> {spans}"
    jobs = [await workers.sh(script) for _ in range(6)]
    greeting = await workers.submit("greet", inputs={"name": "you"})
    elsewhere = await workers.sh("true", queue="other")
    later = await workers.sh("true", available_at="2099-01-01T00:00:00Z")
    done = holdfast(
        "worker", "--once", "--queue", "default:2", "--app", "greetings:app", "--worker-id", "mine",
        cwd=tmp_path, HOLDFAST_DATABASE_URL=workers.settings.url, HOLDFAST_PROCESS_USER="root",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for job in jobs:
        assert (await workers.get(job)).status is Status.SUCCEEDED
    assert (await workers.get(greeting)).result == "hello you"
    assert [(await workers.get(job)).status for job in (elsewhere, later)] == [Status.QUEUED] * 2
    running = 0
    for mark in spans.read_text().split():
        running += 1 if mark == "+" else -1
        assert running <= 2
    (attempt,) = await workers.store.attempts.list(jobs[0].id)
    assert attempt.worker == "mine"
    assert await workers.store.workers.list() == []


async def test_live_worker_has_a_row_with_its_settings(workers: InProcessWorkers) -> None:
    """Proves L14."""
    job = await workers.sh("sleep 30", stop_grace=0)
    async with workers.worker({"default": 3, "heavy": 1}) as worker:
        await workers.running(job)

        async def row() -> bool:
            (found,) = await workers.store.workers.list()
            return found.live and found.jobs == (job.id,) and dict(found.queues) == {"default": 3, "heavy": 1}

        await eventually(row, "the worker's row shows its job")
        (found,) = await workers.store.workers.list()
        assert (found.worker, found.pid, "process" in found.capabilities) == (worker.id, os.getpid(), True)
        await workers.store.jobs.cancel(job.id)
        await workers.ended(job, Status.CANCELLED)


async def test_worker_drained_through_the_store_exits(workers: InProcessWorkers) -> None:
    """The process goes on and is adopted by the next worker. Proves C9."""
    job = await workers.sh("echo up; sleep 2; echo end")
    async with workers.worker() as worker:
        await workers.wait_for_log(job, "up")
        await workers.store.workers.drain(worker.id)

        async def gone() -> bool:
            return await workers.store.workers.list() == []

        await eventually(gone, "it leaves")
        assert (await workers.get(job)).status is Status.RUNNING
    async with workers.worker():
        ended = await workers.ended(job, Status.SUCCEEDED)
    assert (await workers.log(job), ended.attempts) == (["up", "end"], 1)


@pytest.mark.parametrize(
    ("arguments", "env", "code", "text"),
    [
        (["--queue", "a:0"], {}, 2, "1 to 10000 slots"),
        (["--app", "no_such_module"], {}, 2, "--app no_such_module"),
        (["--app", "os:path"], {}, 2, "not a Holdfast"),
        (["--processes", "0"], {}, 2, "--processes"),
        ([], {"HOLDFAST_PROCESSES": "x"}, 2, "(env var: 'HOLDFAST_PROCESSES'): 'x' is not a valid"),
        (["--processes", "6"], {}, 2, "--processes 6 is more than the 4 slots of --queue"),
        (["--processes", "2", "--app", "no_such_module"], {}, 2, "--app no_such_module"),
        (["--processes", "2"], {"HOLDFAST_DATABASE_URL": "postgresql://127.0.0.1:1/none"}, 3, "cannot reach Postgres"),
        (["--processes", "2"], {"HOLDFAST_DATABASE_URL": "sqlite:///empty.db"}, 4, "holdfast migrate"),
        ([], {"HOLDFAST_HEARTBEAT_INTERVAL": "50", "HOLDFAST_LEASE_TTL": "x"}, 2, "HOLDFAST_LEASE_TTL is 'x'"),
        ([], {"HOLDFAST_HEARTBEAT_INTERVAL": "50"}, 2, "at most a third"),
        ([], {"HOLDFAST_DATABASE_URL": "postgresql://127.0.0.1:1/none"}, 3, "cannot reach Postgres"),
        ([], {"HOLDFAST_DATABASE_URL": "sqlite:///empty.db"}, 4, "holdfast migrate"),
    ],
)
def test_invalid_settings_are_reported_in_one_line(
    tmp_path: Path, arguments: list[str], env: dict[str, str], code: int, text: str
) -> None:
    """Proves L5, O2, O3."""
    done = holdfast("worker", *arguments, cwd=tmp_path, HOLDFAST_PROCESS_USER="root", **env)
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.count(text) == 1
    assert "Traceback" not in done.stderr
