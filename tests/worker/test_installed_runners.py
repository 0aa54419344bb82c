"""Runners that were installed: who may submit their jobs, and attempts that die with their worker."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.errors import ConfigError
from holdfast.model import FUNCTION_DOMAIN, Claimable, Phase, Role, Status
from tests.support.in_process_workers import InProcessWorkers, eventually
from tests.support.plugins import distribution, installed, runner_module
from tests.support.service import error_of, service_in_process

TOOLS = """
[tools.greet]
runner = "shout"
[tools.greet.spec]
text = "cat request.json"
[tools.greet.inputs]
type = "object"
"""
SHOUT = {"shout": "shout_runner:DESCRIPTOR"}
BRIEF = Claimable(queue="default", capability="brief", domain=FUNCTION_DOMAIN)


@pytest.fixture
def shout(tmp_path: Path) -> Iterator[None]:
    """A runner `shout`, as careful as the defaults of a descriptor; and `brief`, whose attempts die with the worker."""
    folder = tmp_path / "lib"
    distribution(folder, "holdfast-shout", SHOUT, runner_module("shout"))
    brief = runner_module("brief", "adoptable=False")
    distribution(folder, "holdfast-brief", {"brief": "brief_runner:DESCRIPTOR"}, brief)
    with installed(folder):
        yield


@pytest.mark.usefixtures("shout")
async def test_jobs_of_an_installed_runner_are_for_admins_and_tools(workers: InProcessWorkers, tmp_path: Path) -> None:
    """Proves I1, O8."""
    (tmp_path / "tools.toml").write_text(TOOLS)
    url = workers.settings.url
    job = {"runner": "shout", "spec": {"text": "echo hi"}}
    shared = workers.settings.shared
    async with service_in_process(url, tmp_path / "api", tools=tmp_path / "tools.toml", shared_dir=shared) as service:
        async with service.client(await service.token(Role.SUBMITTER)) as client:
            refused = await client.post("/v1/jobs", json=job)
            assert (refused.status_code, error_of(refused)["code"]) == (403, "forbidden")
            bulk = await client.post("/v1/jobs/bulk", json={"jobs": [job]})
            assert bulk.status_code == 403
            unknown = await client.post("/v1/jobs", json={**job, "runner": "shoot"})
            assert (unknown.status_code, error_of(unknown)["details"]["field"]) == (422, "runner")
            assert "known are function, process, docker, brief, shout" in unknown.text
            greeted = (await client.post("/v1/jobs", json={"tool": "greet", "inputs": {"n": 1}})).json()["id"]
        async with service.client() as admin:
            wrong = await admin.post("/v1/jobs", json={**job, "spec": {"text": 1}})
            assert (wrong.status_code, error_of(wrong)["details"]["field"]) == (422, "spec.text")
            said = (await admin.post("/v1/jobs", json=job)).json()["id"]
    async with workers.worker() as worker:
        assert {"shout", "brief"} <= set(worker.capabilities.available)
        await workers.ended(greeted, Status.SUCCEEDED)
        await workers.ended(said, Status.SUCCEEDED)
    assert await workers.log(said) == ["hi"]
    assert await workers.log(greeted) == ['{"n":1}']


@pytest.mark.usefixtures("shout")
async def test_with_allow_raw_fields_are_still_for_admins_unless_declared_open(
    workers: InProcessWorkers, tmp_path: Path
) -> None:
    """Proves I1."""
    async with (
        service_in_process(workers.settings.url, tmp_path / "api", allow_raw=True) as service,
        service.client(await service.token(Role.SUBMITTER)) as client,
    ):
        answer = await client.post("/v1/jobs", json={"runner": "shout", "spec": {"text": "true"}})
    assert (answer.status_code, error_of(answer)["details"]["field"]) == (403, "spec.text")


async def test_a_job_of_a_runner_that_no_worker_has_is_explained(workers: InProcessWorkers, tmp_path: Path) -> None:
    distribution(tmp_path / "lib", "holdfast-shout", SHOUT, runner_module("shout"))
    with installed(tmp_path / "lib"):
        job = await workers.submit(runner="shout", spec={"text": "true"})

    async def reason() -> str | None:
        found = await workers.store.explain.job(job.id)
        return next((one.message for one in found.reasons if "shout" in one.message), None)

    async with workers.worker():
        assert "can run shout" in await eventually(reason, "the worker is known")
    assert (await workers.get(job)).runner == "shout"


@pytest.mark.usefixtures("shout")
async def test_an_attempt_that_cannot_be_adopted_starts_with_its_claim(workers: InProcessWorkers) -> None:
    """As a function does: any worker may settle it once its own is dead."""
    job = await workers.submit(runner="brief", spec={"text": "sleep 60"}, max_attempts=2)
    async with workers.worker() as worker:
        await workers.running(job)
        (attempt,) = await workers.store.attempts.list(job.id)
        assert (attempt.domain, attempt.phase) == (FUNCTION_DOMAIN, Phase.STARTED)
        assert worker.capabilities.domain_of("brief") == FUNCTION_DOMAIN
        assert str(worker.capabilities.domain_of("shout")).startswith("shout@host:")


@pytest.mark.usefixtures("shout")
async def test_a_leaving_worker_requeues_what_would_die_with_it(workers: InProcessWorkers) -> None:
    """After the grace of functions; an attempt that ends within it is kept."""
    workers.set(drain_grace=3.0)
    quick = await workers.submit(runner="brief", spec={"text": "echo up; sleep 1"})
    slow = await workers.submit(runner="brief", spec={"text": "echo up; sleep 60"})
    async with workers.worker():
        for job in (quick, slow):
            await eventually(lambda job=job: workers.log(job), "it runs")  # type: ignore[misc]
    assert (await workers.get(quick)).status is Status.SUCCEEDED
    left = await workers.get(slow)
    assert (left.status, left.attempts) == (Status.QUEUED, 0)
    (attempt,) = await workers.store.attempts.list(slow.id)
    assert str(attempt.cause) == "drained"
    attempts = workers.settings.state / "attempts"
    assert not [path for path in attempts.rglob(f"{slow.id}.*") if (path / "spec").exists()], "its remains are gone"


@pytest.mark.usefixtures("shout")
async def test_a_dead_workers_attempt_that_cannot_be_adopted_is_lost(workers: InProcessWorkers) -> None:
    """A worker without the runner settles it as well."""
    job = await workers.submit(runner="brief", spec={"text": "true"}, on_lost="fail")
    (lease,) = (await workers.store.leases.claim("dead", [BRIEF], slots=1, ttl=0.01)).claimed
    assert lease.adoption.phase is Phase.STARTED
    async with workers.worker():
        lost = await workers.ended(job, Status.FAILED)
    assert lost.error is not None
    assert lost.error.code == "lost"


async def test_two_runners_with_one_domain_are_refused(workers: InProcessWorkers, tmp_path: Path) -> None:
    """A worker that has only one of them would adopt attempts of the other."""
    same = "def _domain_in(self, domain):\n        return domain\n\n    def command"
    modules = {file: text.replace("def command", same) for file, text in runner_module("shout").items()}
    distribution(tmp_path / "lib", "holdfast-shout", SHOUT, modules)
    with installed(tmp_path / "lib"), pytest.raises(ConfigError, match="process and shout have the same domain"):
        async with workers.worker():
            pass
