"""Failed starts: recorded once, with the reason, and handled by the job's retry policy."""

import json
import sqlite3
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from holdfast.model import Job, Status
from tests.support.docker_engine import DockerEngine
from tests.support.in_process_workers import InProcessWorkers, eventually

UNUSABLE: list[tuple[dict[str, Any], str, str]] = [
    ({"user": "4294967296"}, "contract_violation", "spec.user"),
    ({"user": "²"}, "contract_violation", "spec.user"),
    ({"command": 7}, "contract_violation", "spec.command"),
    ({"env": {"A=B": "c"}}, "contract_violation", "spec.env"),
]
UNUSABLE_IN_A_CONTAINER: list[tuple[dict[str, Any], str, str]] = [
    *UNUSABLE[:3],
    ({"cpus": 1e300}, "contract_violation", "spec.cpus"),
    ({"cpus": 4096}, "start_failed", "CPUs"),
    ({"memory": "1"}, "start_failed", "memory"),
    ({"network": "no-such-network"}, "start_failed", "no-such-network"),
    ({"network": "container:nobody"}, "start_failed", "nobody"),
    ({"user": "nosuchuser"}, "command_missing", "nosuchuser"),
    ({"user": "+0"}, "contract_violation", "spec.user"),
]
"""What a spec may ask for past the checks of a submit, or what only the engine refuses."""


async def change_spec(workers: InProcessWorkers, job: Job, **spec: Any) -> None:
    """Change what a job asks for past all checks, as a program with the database can."""
    await change(workers, job, "spec", {**job.spec, **spec})


async def change(workers: InProcessWorkers, job: Job, column: str, value: Any) -> None:
    url, text = workers.settings.url, json.dumps(value)
    if url.startswith("sqlite"):
        with sqlite3.connect(url.removeprefix("sqlite:///")) as connection:
            changed = connection.execute(f"UPDATE specs SET {column} = ? WHERE id = ?", (text, job.id)).rowcount
        connection.close()
        assert changed == 1
        return
    database = await asyncpg.connect(url)
    done = await database.execute(f"UPDATE holdfast.specs SET {column} = $1 WHERE id = $2", text, job.id)
    assert done == "UPDATE 1"
    await database.close()


async def assert_failed_once(workers: InProcessWorkers, job: Job, code: str, words: str) -> None:
    failed = await workers.ended(job, Status.FAILED)
    assert failed.error is not None
    assert (failed.error.code, failed.attempt) == (code, 1), failed.error
    assert words.lower() in failed.error.message.lower()
    assert await workers.events(job, "lease") == []


@pytest.fixture
def broken_secret(workers: InProcessWorkers, tmp_path: Path) -> None:
    """A secret that cannot be read: its file is a folder. No runner expects that."""
    (tmp_path / "secrets" / "KEY").mkdir(parents=True)
    workers.set(secrets_dir=tmp_path / "secrets")


@pytest.mark.usefixtures("broken_secret")
async def test_an_unexpected_error_at_the_start_fails_the_attempt_with_its_reason(workers: InProcessWorkers) -> None:
    """By the retry policy, without an adoption. Proves R12."""
    once = await workers.sh("true", secrets=["KEY"])
    twice = await workers.sh("true", secrets=["KEY"], max_attempts=2, retry={"on": ["failed"], "base": 0.1, "cap": 0.1})
    async with workers.worker():
        await assert_failed_once(workers, once, "start_failed", "IsADirectoryError")
        failed = await workers.ended(twice, Status.FAILED)
    assert failed.attempt == 2
    assert await workers.events(twice, "lease") == []


@pytest.mark.usefixtures("broken_secret")
async def test_an_unexpected_error_at_the_start_of_a_container_fails_the_attempt(
    workers: InProcessWorkers, docker: DockerEngine
) -> None:
    """Proves R12."""
    job = await workers.container("true", secrets=["KEY"])
    async with workers.worker():
        await assert_failed_once(workers, job, "start_failed", "IsADirectoryError")


async def test_a_spec_that_no_host_can_use_fails_at_the_start_once(workers: InProcessWorkers) -> None:
    """A job that came past the checks of a submit. Proves R12."""
    jobs = [await workers.sh("true") for _ in UNUSABLE]
    for job, (spec, _, _) in zip(jobs, UNUSABLE, strict=True):
        await change_spec(workers, job, **spec)
    async with workers.worker():
        for job, (_, code, words) in zip(jobs, UNUSABLE, strict=True):
            await assert_failed_once(workers, job, code, words)


async def test_a_container_that_no_engine_can_make_fails_at_the_start_once(
    workers: InProcessWorkers, docker: DockerEngine
) -> None:
    """Proves R12."""
    jobs = [await workers.container("true") for _ in UNUSABLE_IN_A_CONTAINER]
    for job, (spec, _, _) in zip(jobs, UNUSABLE_IN_A_CONTAINER, strict=True):
        await change_spec(workers, job, **spec)
    async with workers.worker():
        for job, (_, code, words) in zip(jobs, UNUSABLE_IN_A_CONTAINER, strict=True):
            await assert_failed_once(workers, job, code, words)


async def test_a_backoff_that_no_database_can_keep_is_cut(workers: InProcessWorkers) -> None:
    """Of a policy that came past the checks of a submit: the job is queued again, and not stuck. Proves R12."""
    job = await workers.sh("exit 3", max_attempts=3)
    await change(workers, job, "policy", {"retry": {"base": 1e300, "cap": 1e300}})
    async with workers.worker():

        async def look() -> Job | None:
            found = await workers.get(job)
            return found if found.status is Status.QUEUED and found.attempts == 1 else None

        queued = await eventually(look, "it is queued again")
    assert queued.available_at is not None
    assert queued.available_at.year > 2030
    assert await workers.events(job, "lease") == []
