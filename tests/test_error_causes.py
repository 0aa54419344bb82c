"""What the error of a job says: the file that broke the contract, the task and its last error line, the need's own
error, the caller's reason, the developer's own SQL file."""

import asyncio
from collections.abc import Mapping

import pytest

from holdfast.errors import one_line
from holdfast.model import Cause, Job, Outcome, Status
from tests.engine import Daemon
from tests.rig import Rig
from tests.stage import Stage

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


async def message_of(stage: Stage, job: Job) -> str:
    error = (await stage.get(job)).error
    assert error is not None
    return error.message


async def test_dependant_shows_the_error_of_the_job_that_it_needs(stage: Stage) -> None:
    """Proves G7, N6: and along a chain the first job that failed, without growing."""
    chain = [await stage.submit()]
    for _ in range(6):
        chain.append(await stage.submit(needs=[chain[-1].id]))
    (lease,) = await stage.claim()
    await stage.fail(lease, "exit code 3: no such table")
    cause = f"needs job {chain[0].id}, which failed: exit code 3: no such table"
    messages = [await message_of(stage, job) for job in chain[1:]]
    assert messages[0] == cause
    assert messages[1:] == [f"needs job {need.id}, which failed: {cause}" for need in chain[1:-1]]


async def test_error_of_a_need_is_one_bounded_line(stage: Stage) -> None:
    """Proves G7."""
    root = await stage.submit()
    child = await stage.submit(needs=[root.id])
    (lease,) = await stage.claim()
    await stage.fail(lease, "\x1b[31mred\x1b[0m\nsecond line " + "x" * 3000)
    message = await message_of(stage, child)
    assert message.startswith(f"needs job {root.id}, which failed: red second line xxx")
    assert message.isprintable()
    assert len(message) < 600


async def test_stop_of_a_running_job_shows_the_reason_of_the_caller(rig: Rig) -> None:
    """Proves G7, C1: for processes and functions."""

    @rig.functions.add
    async def sleepy() -> None:
        await asyncio.Event().wait()

    jobs = [await rig.sh("sleep 600"), await rig.submit("sleepy"), await rig.sh("sleep 600"), await rig.sh("sleep 600")]
    process, function, interrupted, silent = jobs
    async with rig.worker():
        for job in jobs:
            await rig.running(job)
        await rig.store.jobs.cancel(process.id, reason="wrong\ncustomer")
        await rig.store.jobs.cancel(function.id, reason="wrong customer")
        await rig.store.jobs.interrupt(interrupted.id, reason="lunch")
        await rig.store.jobs.cancel(silent.id)
        ended = [(await rig.ended(job)).error for job in jobs]
    assert [error and error.message for error in ended] == [
        "cancelled by request: wrong customer",
        "cancelled by request: wrong customer",
        "interrupted by request: lunch",
        "cancelled by request",
    ]
    attempt = (await rig.store.attempts.list(process.id))[-1]
    assert attempt.error is not None
    assert attempt.error.message == "cancelled by request: wrong customer"
    last = (await rig.events(process, "status"))[-1]
    assert last.data["message"] == "cancelled by request: wrong customer"


async def test_stop_of_a_container_shows_the_reason_of_the_caller(rig: Rig, dock: Daemon) -> None:
    """Proves G7, C1."""
    job = await rig.box("sleep 600", stop_grace=1)
    async with rig.worker():
        await rig.running(job)
        await rig.store.jobs.cancel(job.id, reason="wrong customer")
        ended = await rig.ended(job, Status.CANCELLED)
    assert ended.error is not None
    assert ended.error.message == "cancelled by request: wrong customer"


async def test_stop_that_meets_a_retry_shows_the_reason_of_the_caller(stage: Stage) -> None:
    """Proves G7, C1: and one that waits, is paused or is deleted by force."""
    names = ("cancel", "interrupt", "delete", "waiting")
    jobs = {name: await stage.submit() for name in names[:3]}
    after = await stage.submit(needs=[jobs["delete"].id])
    leases = {lease.id: lease for lease in await stage.claim()}
    jobs["waiting"] = await stage.submit()
    store = stage.store.jobs
    await store.cancel(jobs["cancel"].id, reason="wrong customer")
    await store.interrupt(jobs["interrupt"].id, reason="lunch")
    await store.delete(jobs["delete"].id, force=True, reason="never wanted")
    await store.cancel(jobs["waiting"].id, reason="too late")
    for name in names[:3]:
        await stage.finish(leases[jobs[name].id], Outcome.requeued(Cause.EXIT))
    assert {name: await message_of(stage, job) for name, job in jobs.items()} == {
        "cancel": "cancelled by request: wrong customer",
        "interrupt": "interrupted by request: lunch",
        "delete": "cancelled by request: never wanted",
        "waiting": "cancelled before it started: too late",
    }
    cause = f"needs job {jobs['delete'].id}, which was cancelled: never wanted"
    assert await message_of(stage, after) == cause
    await store.cancel(jobs["interrupt"].id, reason="not today")
    assert await message_of(stage, jobs["interrupt"]) == "cancelled: not today"


async def test_reason_belongs_to_the_request_that_decides(stage: Stage) -> None:
    """Proves G7, C1: a resume forgets it, and a stronger request without one has none."""
    resumed, stronger = await stage.submit(), await stage.submit()
    first = {lease.id: lease for lease in await stage.claim()}
    for job in (resumed, stronger):
        await stage.store.jobs.interrupt(job.id, reason="lunch")
    await stage.finish(first[resumed.id], Outcome.requeued(Cause.EXIT))
    await stage.store.jobs.cancel(stronger.id)
    await stage.finish(first[stronger.id], Outcome.requeued(Cause.EXIT))
    assert await message_of(stage, stronger) == "cancelled by request"
    await stage.store.jobs.resume(resumed.id)
    (lease,) = await stage.claim()
    await stage.store.jobs.cancel(resumed.id)
    await stage.finish(lease, Outcome.requeued(Cause.EXIT))
    assert await message_of(stage, resumed) == "cancelled by request"


async def test_own_error_of_a_job_does_not_get_the_reason(stage: Stage) -> None:
    """Proves G7: the exit came first, and decides."""
    job = await stage.submit()
    (lease,) = await stage.claim()
    await stage.store.jobs.cancel(job.id, reason="wrong customer")
    await stage.fail(lease, "exit code 3")
    assert await message_of(stage, job) == "exit code 3"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a\tb\r\nc", "a b c"),
        ("\x1b[1;31mError\x1b[0m: \x1b]0;title\x07x", "Error: x"),
        ("\x00\x1b\u202e", ""),
        ("x" * 50, "x" * 19 + "…"),
    ],
)
def test_text_of_others_becomes_one_safe_line(text: str, line: str) -> None:
    """Proves G7."""
    assert one_line(text, 20) == line
