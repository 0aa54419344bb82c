"""What the error of a job says: the file that broke the contract, the task and its last error line, the need's own
error, the caller's reason, the developer's own SQL file."""

from collections.abc import Mapping

import pytest

from holdfast.model import Job, Status
from tests.engine import Daemon
from tests.rig import Rig

VIOLATIONS = {
    "rmdir output; ln -s /etc output": "output is a symbolic link; it must be a folder",
    "ln -s /etc/passwd result.json": "result.json is a symbolic link; it must be a regular file",
    "mkfifo result.json": "result.json is a FIFO; it must be a regular file",
    "mkdir result.json": "result.json is a folder; it must be a regular file",
    "head -c 1048577 /dev/zero > result.json": "result.json is larger than 1048576 bytes",
    "head -c 200000 /dev/zero > output/x": "with output/x the output is larger than 100000 bytes",
    "printf '{' > result.json": "result.json cannot be read: Input data was truncated",
    """printf '{"version":2}' > result.json""": "result.json has version 2; this holdfast reads version 1",
    """printf '{"version":1,"rows":2}' > result.json""": (
        "result.json cannot be read: Object contains unknown field `rows`"
    ),
    """printf '{"version":1,"error":{"message":3}}' > result.json""": (
        "result.json cannot be read: Expected `str`, got `int` - at `$.error.message`"
    ),
}


async def errors_of(rig: Rig, jobs: Mapping[str, Job]) -> dict[str, str]:
    """Wait for jobs that fail, and return what each says of it."""
    found = {}
    async with rig.worker({"default": 3}):
        for name, job in jobs.items():
            ended = await rig.ended(job, Status.FAILED)
            assert ended.error is not None
            found[name] = ended.error.message
    return found


async def test_violation_of_the_contract_names_the_file_and_the_rule(rig: Rig) -> None:
    """Proves G7, R13."""
    rig.set(artifact_max_bytes=100_000)
    name = "touch \"output/$(printf 'a\\nb')\""
    expected = {**VIOLATIONS, name: "output/a\\nb has a name with characters that cannot be printed"}
    jobs = {script: await rig.sh(script) for script in expected}
    jobs["demanded"] = await rig.command("true", spec={"require_result": True})
    expected["demanded"] = "result.json is missing; this job must leave one (require_result)"
    assert await errors_of(rig, jobs) == expected


async def test_violation_in_a_container_names_the_file_and_the_rule(rig: Rig, dock: Daemon) -> None:
    """Proves G7, R13."""
    rig.set(artifact_max_bytes=100_000)
    jobs = {script: await rig.box(script) for script in VIOLATIONS}
    assert await errors_of(rig, jobs) == VIOLATIONS


async def test_secret_in_the_name_of_a_file_is_masked(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Proves G7, R19."""
    monkeypatch.setenv("HOLDFAST_SECRET_TOKEN", "open-sesame-42")
    rig.set(artifact_max_bytes=100)
    large = await rig.sh('head -c 200 /dev/zero > "output/x-$TOKEN"', secrets=["TOKEN"])
    link = await rig.sh('ln -s x "output/x-$TOKEN"', secrets=["TOKEN"])
    assert await errors_of(rig, {"large": large}) == {"large": "with output/x-*** the output is larger than 100 bytes"}
    async with rig.worker():
        await rig.ended(link, Status.SUCCEEDED)
    (event,) = await rig.events(link, "artifacts")
    assert event.data == {"skipped": [{"path": "output/x-***", "reason": "is a symbolic link"}]}
