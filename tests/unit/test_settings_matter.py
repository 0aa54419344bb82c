"""Every setting changes something: it is read outside of the settings, and those that were once ignored have effect."""

import ast
import dataclasses
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast import Holdfast, config
from holdfast.config import Settings
from holdfast.model import Job
from tests.support.service import service_in_process
from tests.support.store_harness import StoreHarness

SOURCE = Path(holdfast.__file__).parent
DERIVED = {"url": "database_url", "shared": "shared_dir", "state": "state_dir", "job_defaults": "max_attempts"}
"""Properties of the settings, each with the setting that it depends on."""
THROUGH_DEFAULTS = {"max_attempts", "backoff_base", "backoff_cap", "stop_grace"}
"""Reach every submit as `Settings.job_defaults`: tested below."""
THROUGH_CEILINGS = {"docker_memory_max", "docker_cpus_max", "docker_pids_max"}
"""Reach every submit as `Settings.ceilings`: tested in test_privileges.py."""

REFUSALS = {"auth_off_as_root"}
"""Decides in `config` itself whether the settings are accepted at all; its own tests are with that check."""

LIMITS = {
    *("process_memory", "process_pids", "file_size", "folder_size"),
    *("process_memory_max", "process_pids_max", "file_size_max", "folder_size_max"),
}
"""Reach the runners as `Settings.attempt_limits`: test_limits.py."""


def _read_outside() -> set[str]:
    """The names that are read as an attribute of something called settings, anywhere but in `config`."""
    found = set()
    for path in SOURCE.rglob("*.py"):
        if path.parent.name == "config":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                owner = ast.unparse(node.value)
                if owner.rpartition(".")[2].lstrip("_") in ("settings", "loaded"):
                    found.add(node.attr)
    return found


def test_every_setting_is_read_by_something() -> None:
    read = _read_outside()
    derived = {DERIVED[name] for name in read & DERIVED.keys()}
    reached = read | derived | (THROUGH_DEFAULTS if "job_defaults" in read else set())
    reached |= THROUGH_CEILINGS if "ceilings" in read else set()
    reached |= LIMITS if "attempt_limits" in read else set()
    unread = {field.name for field in dataclasses.fields(Settings)} - reached - REFUSALS
    assert unread == set()


async def _by(way: str, harness: StoreHarness, tmp_path: Path, job: dict[str, Any], settings: Settings) -> Job:
    if way == "http":
        chosen = {name: getattr(settings, name) for name in THROUGH_DEFAULTS}
        async with service_in_process(harness.url, tmp_path / "data", **chosen) as service, service.client() as client:
            answer = await client.post("/v1/jobs", json=job)
            assert answer.status_code == 201, answer.text
            return await harness.store.jobs.get(answer.json()["id"])
    app = Holdfast(harness.url)
    app.settings = settings
    app.function(name="f")(lambda: None)
    async with app:
        if set(job) == {"runner", "spec"}:
            return (await app.submit("f")).record
        return await app.store.jobs.submit(job)


@pytest.mark.parametrize("way", ["http", "app"])
async def test_retries_and_the_stop_are_set_for_jobs_that_do_not_say(
    harness: StoreHarness, way: str, tmp_path: Path
) -> None:
    environment = {"HOLDFAST_MAX_ATTEMPTS": "3", "HOLDFAST_BACKOFF_BASE": "2", "HOLDFAST_BACKOFF_CAP": "40"}
    settings = config.load({"database_url": harness.url}, {**environment, "HOLDFAST_STOP_GRACE": "11"})
    plain: dict[str, Any] = {"runner": "function", "spec": {"name": "f"}}
    job = await _by(way, harness, tmp_path, plain, settings)
    assert (job.max_attempts, job.policy.retry.base, job.policy.retry.cap, job.policy.stop_grace) == (3, 2, 40, 11)
    some = await _by(way, harness, tmp_path, {**plain, "retry": {"on": ["timed_out"]}}, settings)
    assert (some.policy.retry.base, some.policy.retry.cap, some.policy.retry.on) == (2, 40, ("timed_out",))
    own = {**plain, "max_attempts": 1, "retry": {"base": 7, "cap": 8}}
    said = await _by(way, harness, tmp_path, own, settings)
    assert (said.max_attempts, said.policy.retry.base, said.policy.retry.cap) == (1, 7, 8)
