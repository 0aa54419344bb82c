"""Starts that fail: once, with the reason, by the job's own rules, whatever the error was."""

import json
import sqlite3
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from holdfast.model import Job, Status
from tests.support.engine import Daemon
from tests.support.in_process_worker import Rig, eventually

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


async def change_spec(rig: Rig, job: Job, **spec: Any) -> None:
    """Change what a job asks for past all checks, as a program with the database can."""
    await change(rig, job, "spec", {**job.spec, **spec})


async def change(rig: Rig, job: Job, column: str, value: Any) -> None:
    url, text = rig.settings.url, json.dumps(value)
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


async def assert_failed_once(rig: Rig, job: Job, code: str, words: str) -> None:
    failed = await rig.ended(job, Status.FAILED)
    assert failed.error is not None
    assert (failed.error.code, failed.attempt) == (code, 1), failed.error
    assert words.lower() in failed.error.message.lower()
    assert await rig.events(job, "lease") == []


@pytest.fixture
def broken_secret(rig: Rig, tmp_path: Path) -> None:
    """A secret that cannot be read: its file is a folder. No runner expects that."""
    (tmp_path / "secrets" / "KEY").mkdir(parents=True)
    rig.set(secrets_dir=tmp_path / "secrets")


@pytest.mark.usefixtures("broken_secret")
async def test_an_unexpected_error_at_the_start_fails_the_attempt_with_its_reason(rig: Rig) -> None:
    """By the retry policy, without an adoption. Proves R12."""
    once = await rig.sh("true", secrets=["KEY"])
    twice = await rig.sh("true", secrets=["KEY"], max_attempts=2, retry={"on": ["failed"], "base": 0.1, "cap": 0.1})
    async with rig.worker():
        await assert_failed_once(rig, once, "start_failed", "IsADirectoryError")
        failed = await rig.ended(twice, Status.FAILED)
    assert failed.attempt == 2
    assert await rig.events(twice, "lease") == []


@pytest.mark.usefixtures("broken_secret")
async def test_an_unexpected_error_at_the_start_of_a_container_fails_the_attempt(rig: Rig, dock: Daemon) -> None:
    """Proves R12."""
    job = await rig.box("true", secrets=["KEY"])
    async with rig.worker():
        await assert_failed_once(rig, job, "start_failed", "IsADirectoryError")


async def test_a_spec_that_no_host_can_use_fails_at_the_start_once(rig: Rig) -> None:
    """A job that came past the checks of a submit. Proves R12."""
    jobs = [await rig.sh("true") for _ in UNUSABLE]
    for job, (spec, _, _) in zip(jobs, UNUSABLE, strict=True):
        await change_spec(rig, job, **spec)
    async with rig.worker():
        for job, (_, code, words) in zip(jobs, UNUSABLE, strict=True):
            await assert_failed_once(rig, job, code, words)


async def test_a_container_that_no_engine_can_make_fails_at_the_start_once(rig: Rig, dock: Daemon) -> None:
    """Proves R12."""
    jobs = [await rig.box("true") for _ in UNUSABLE_IN_A_CONTAINER]
    for job, (spec, _, _) in zip(jobs, UNUSABLE_IN_A_CONTAINER, strict=True):
        await change_spec(rig, job, **spec)
    async with rig.worker():
        for job, (_, code, words) in zip(jobs, UNUSABLE_IN_A_CONTAINER, strict=True):
            await assert_failed_once(rig, job, code, words)


async def test_a_backoff_that_no_database_can_keep_is_cut(rig: Rig) -> None:
    """Of a policy that came past the checks of a submit: the job is queued again, and not stuck. Proves R12."""
    job = await rig.sh("exit 3", max_attempts=3)
    await change(rig, job, "policy", {"retry": {"base": 1e300, "cap": 1e300}})
    async with rig.worker():

        async def look() -> Job | None:
            found = await rig.get(job)
            return found if found.status is Status.QUEUED and found.attempts == 1 else None

        queued = await eventually(look, "it is queued again")
    assert queued.available_at is not None
    assert queued.available_at.year > 2030
    assert await rig.events(job, "lease") == []
