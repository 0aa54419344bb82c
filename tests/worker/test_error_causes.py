"""What the error of a job says: the file that broke the contract, the task and its last error line, the need's own
error, the caller's reason, the developer's own SQL file."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from holdfast.errors import one_line
from holdfast.model import Cause, Job, Outcome, Status
from holdfast.worker.last_error import LastError
from tests.support.docker_engine import IMAGE, DockerEngine
from tests.support.in_process_workers import InProcessWorkers
from tests.support.store_harness import StoreHarness
from tests.support.worker_processes import WorkerProcesses

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


async def errors_of(workers: InProcessWorkers, jobs: Mapping[str, Job]) -> dict[str, str]:
    """Wait for jobs that fail, and return what each says of it."""
    found = {}
    async with workers.worker({"default": 3}):
        for name, job in jobs.items():
            ended = await workers.ended(job, Status.FAILED)
            assert ended.error is not None
            found[name] = ended.error.message
    return found


async def test_violation_of_the_contract_names_the_file_and_the_rule(workers: InProcessWorkers) -> None:
    """Proves G7, R13."""
    workers.set(artifact_max_bytes=100_000)
    name = "touch \"output/$(printf 'a\\nb')\""
    expected = {**VIOLATIONS, name: "output/a\\nb has a name with characters that cannot be printed"}
    jobs = {script: await workers.sh(script) for script in expected}
    jobs["demanded"] = await workers.command("true", spec={"require_result": True})
    expected["demanded"] = "result.json is missing; this job must leave one (require_result)"
    assert await errors_of(workers, jobs) == expected


async def test_violation_in_a_container_names_the_file_and_the_rule(
    workers: InProcessWorkers, docker: DockerEngine
) -> None:
    """Proves G7, R13."""
    workers.set(artifact_max_bytes=100_000)
    jobs = {script: await workers.container(script) for script in VIOLATIONS}
    assert await errors_of(workers, jobs) == VIOLATIONS


async def test_secret_in_the_name_of_a_file_is_masked(
    workers: InProcessWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proves G7, R19."""
    monkeypatch.setenv("HOLDFAST_SECRET_TOKEN", "open-sesame-42")
    workers.set(artifact_max_bytes=100)
    large = await workers.sh('head -c 200 /dev/zero > "output/x-$TOKEN"', secrets=["TOKEN"])
    link = await workers.sh('ln -s x "output/x-$TOKEN"', secrets=["TOKEN"])
    assert await errors_of(workers, {"large": large}) == {
        "large": "with output/x-*** the output is larger than 100 bytes"
    }
    async with workers.worker():
        await workers.ended(link, Status.SUCCEEDED)
    (event,) = await workers.events(link, "artifacts")
    assert event.data == {"skipped": [{"path": "output/x-***", "reason": "is a symbolic link"}]}


FAILS = "echo out; echo first >&2; printf 'boom \\033[1mhere\\033[0m %s\\n\\n' \"$TOKEN\" >&2; exit 3"


async def test_exit_code_comes_with_the_last_error_line(
    workers: InProcessWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proves G7, R19: masked, bounded, without control characters; also when the line is beyond the log's cap."""
    monkeypatch.setenv("HOLDFAST_SECRET_TOKEN", "open-sesame-42")
    workers.set(log_max_bytes=1000)
    capped = "seq 1 1000; echo beyond >&2; exit 4"
    jobs = {
        "plain": await workers.sh(FAILS, secrets=["TOKEN"]),
        "no line end": await workers.sh("printf last >&2; exit 5"),
        "silent": await workers.sh("echo out; exit 6"),
        "signal": await workers.sh("echo dying >&2; kill -SEGV $$"),
        "capped": await workers.sh(capped),
        "long": await workers.sh("head -c 100000 /dev/zero | tr '\\0' x >&2; echo >&2; exit 7"),
        "reported": await workers.sh(
            """echo err >&2; printf '{"version":1,"error":{"message":"own"}}' > result.json; exit 8"""
        ),
    }
    found = await errors_of(workers, jobs)
    assert len(found.pop("long")) < 400
    assert found == {
        "plain": "exit code 3: boom here ***",
        "no line end": "exit code 5: last",
        "silent": "exit code 6",
        "signal": "ended by signal 11: dying",
        "capped": "exit code 4: beyond",
        "reported": "own",
    }


async def test_exit_code_of_a_container_comes_with_the_last_error_line(
    workers: InProcessWorkers, docker: DockerEngine
) -> None:
    """Proves G7."""
    assert await errors_of(workers, {"job": await workers.container(FAILS)}) == {"job": "exit code 3: boom here"}


def tasks(*scripts: str) -> list[dict[str, Any]]:
    return [{"name": f"step {n}", "command": ["sh", "-c", script]} for n, script in enumerate(scripts)]


async def test_error_of_a_pipeline_names_the_task_and_its_last_error_line(workers: InProcessWorkers) -> None:
    """Proves G7, P1: the lines of an earlier task are not the failing one's."""
    silent = ("echo before >&2", "exit 4")
    jobs = {
        "loud": await workers.submit(runner="process", spec={}, tasks=tasks("echo before >&2", FAILS)),
        "silent": await workers.submit(runner="process", spec={}, tasks=tasks(*silent)),
    }
    assert await errors_of(workers, jobs) == {
        "loud": "task step 1: exit code 3: boom here",
        "silent": "task step 1: exit code 4",
    }
    slow = await workers.submit(runner="process", spec={}, tasks=tasks("true", "sleep 600"), timeout=8)
    unwanted = await workers.submit(runner="process", spec={}, tasks=tasks("echo here; sleep 600"))
    async with workers.worker():
        await workers.wait_for_log(unwanted, "here")
        await workers.store.jobs.cancel(unwanted.id)
        stopped = await workers.ended(unwanted, Status.CANCELLED)
        late = await workers.ended(slow, Status.TIMED_OUT)
    assert [job.error and job.error.message for job in (late, stopped)] == [
        "task step 1: ran longer than 8 seconds",
        "cancelled by request",
    ]


async def test_error_of_a_pipeline_in_a_container_names_the_task(
    workers: InProcessWorkers, docker: DockerEngine
) -> None:
    """Proves G7, P1."""
    job = await workers.submit(runner="docker", spec={"image": IMAGE}, tasks=tasks("true", FAILS))
    assert await errors_of(workers, {"job": job}) == {"job": "task step 1: exit code 3: boom here"}


async def test_adopter_knows_the_last_error_line_that_its_predecessor_shipped(processes: WorkerProcesses) -> None:
    """Proves G7, L3."""
    slow: Any = {"lease_ttl": 60.0, "heartbeat_interval": 1.0, "adopt_backoff": 0.1}
    gate = processes.folder / "gate"
    script = f"echo boom >&2; while [ ! -e {gate} ]; do sleep 0.05; done; exit 3"
    single = await processes.sh(script)
    pipeline = await processes.submit(runner="process", spec={}, tasks=tasks("true", script))
    victim = processes.start({"default": 2}, **slow)
    for job in (single, pipeline):
        await processes.wait_for_log(job, "boom", "stderr")
    victim.kill()
    gate.touch()
    processes.start({"default": 2}, **slow)
    messages = [(await processes.ended(job, Status.FAILED)).error for job in (single, pipeline)]
    assert [error and error.message for error in messages] == ["exit code 3: boom", "task step 1: exit code 3: boom"]


def test_error_of_psql_is_the_line_that_says_what_is_wrong() -> None:
    """Proves G7: not the ones after it that show where."""
    heard = LastError()
    heard.add_lines(
        None, ["psql:a.sql:1: NOTICE:  x", "psql:a.sql:2: ERROR:  no column", "LINE 1: SELECT x", "    ^", ""]
    )
    assert heard.line(None) == "psql:a.sql:2: ERROR: no column"
    heard.add_lines(None, ["DETAIL:  y", "make: *** [all] Error 3"])
    assert heard.line(None) == "make: *** [all] Error 3"
    heard.add_lines("next", [])
    assert (heard.line("next"), heard.line(None)) == (None, None)


async def message_of(harness: StoreHarness, job: Job) -> str:
    error = (await harness.get(job)).error
    assert error is not None
    return error.message


async def test_dependant_shows_the_error_of_the_job_that_it_needs(harness: StoreHarness) -> None:
    """Proves G7, N6: and along a chain the first job that failed, without growing."""
    chain = [await harness.submit()]
    for _ in range(6):
        chain.append(await harness.submit(needs=[chain[-1].id]))
    (lease,) = await harness.claim()
    await harness.fail(lease, "exit code 3: no such table")
    cause = f"needs job {chain[0].id}, which failed: exit code 3: no such table"
    messages = [await message_of(harness, job) for job in chain[1:]]
    assert messages[0] == cause
    assert messages[1:] == [f"needs job {need.id}, which failed: {cause}" for need in chain[1:-1]]


async def test_error_of_a_need_is_one_bounded_line(harness: StoreHarness) -> None:
    """Proves G7."""
    root = await harness.submit()
    child = await harness.submit(needs=[root.id])
    (lease,) = await harness.claim()
    await harness.fail(lease, "\x1b[31mred\x1b[0m\nsecond line " + "x" * 3000)
    message = await message_of(harness, child)
    assert message.startswith(f"needs job {root.id}, which failed: red second line xxx")
    assert message.isprintable()
    assert len(message) < 600


async def test_stop_of_a_running_job_shows_the_reason_of_the_caller(workers: InProcessWorkers) -> None:
    """Proves G7, C1: for processes and functions."""

    @workers.functions.add
    async def sleepy() -> None:
        await asyncio.Event().wait()

    jobs = [
        await workers.sh("sleep 600"),
        await workers.submit("sleepy"),
        await workers.sh("sleep 600"),
        await workers.sh("sleep 600"),
    ]
    process, function, interrupted, silent = jobs
    async with workers.worker():
        for job in jobs:
            await workers.running(job)
        await workers.store.jobs.cancel(process.id, reason="wrong\ncustomer")
        await workers.store.jobs.cancel(function.id, reason="wrong customer")
        await workers.store.jobs.interrupt(interrupted.id, reason="lunch")
        await workers.store.jobs.cancel(silent.id)
        ended = [(await workers.ended(job)).error for job in jobs]
    assert [error and error.message for error in ended] == [
        "cancelled by request: wrong customer",
        "cancelled by request: wrong customer",
        "interrupted by request: lunch",
        "cancelled by request",
    ]
    attempt = (await workers.store.attempts.list(process.id))[-1]
    assert attempt.error is not None
    assert attempt.error.message == "cancelled by request: wrong customer"
    last = (await workers.events(process, "status"))[-1]
    assert last.data["message"] == "cancelled by request: wrong customer"


async def test_stop_of_a_container_shows_the_reason_of_the_caller(
    workers: InProcessWorkers, docker: DockerEngine
) -> None:
    """Proves G7, C1."""
    job = await workers.container("sleep 600", stop_grace=1)
    async with workers.worker():
        await workers.running(job)
        await workers.store.jobs.cancel(job.id, reason="wrong customer")
        ended = await workers.ended(job, Status.CANCELLED)
    assert ended.error is not None
    assert ended.error.message == "cancelled by request: wrong customer"


async def test_stop_that_meets_a_retry_shows_the_reason_of_the_caller(harness: StoreHarness) -> None:
    """Proves G7, C1: and one that waits, is paused or is deleted by force."""
    names = ("cancel", "interrupt", "delete", "waiting")
    jobs = {name: await harness.submit() for name in names[:3]}
    after = await harness.submit(needs=[jobs["delete"].id])
    leases = {lease.id: lease for lease in await harness.claim()}
    jobs["waiting"] = await harness.submit()
    store = harness.store.jobs
    await store.cancel(jobs["cancel"].id, reason="wrong customer")
    await store.interrupt(jobs["interrupt"].id, reason="lunch")
    await store.delete(jobs["delete"].id, force=True, reason="never wanted")
    await store.cancel(jobs["waiting"].id, reason="too late")
    for name in names[:3]:
        await harness.finish(leases[jobs[name].id], Outcome.requeued(Cause.EXIT))
    assert {name: await message_of(harness, job) for name, job in jobs.items()} == {
        "cancel": "cancelled by request: wrong customer",
        "interrupt": "interrupted by request: lunch",
        "delete": "cancelled by request: never wanted",
        "waiting": "cancelled before it started: too late",
    }
    cause = f"needs job {jobs['delete'].id}, which was cancelled: never wanted"
    assert await message_of(harness, after) == cause
    await store.cancel(jobs["interrupt"].id, reason="not today")
    assert await message_of(harness, jobs["interrupt"]) == "cancelled: not today"


async def test_reason_belongs_to_the_request_that_decides(harness: StoreHarness) -> None:
    """Proves G7, C1: a resume forgets it, and a stronger request without one has none."""
    resumed, stronger = await harness.submit(), await harness.submit()
    first = {lease.id: lease for lease in await harness.claim()}
    for job in (resumed, stronger):
        await harness.store.jobs.interrupt(job.id, reason="lunch")
    await harness.finish(first[resumed.id], Outcome.requeued(Cause.EXIT))
    await harness.store.jobs.cancel(stronger.id)
    await harness.finish(first[stronger.id], Outcome.requeued(Cause.EXIT))
    assert await message_of(harness, stronger) == "cancelled by request"
    await harness.store.jobs.resume(resumed.id)
    (lease,) = await harness.claim()
    await harness.store.jobs.cancel(resumed.id)
    await harness.finish(lease, Outcome.requeued(Cause.EXIT))
    assert await message_of(harness, resumed) == "cancelled by request"


async def test_own_error_of_a_job_does_not_get_the_reason(harness: StoreHarness) -> None:
    """Proves G7: the exit came first, and decides."""
    job = await harness.submit()
    (lease,) = await harness.claim()
    await harness.store.jobs.cancel(job.id, reason="wrong customer")
    await harness.fail(lease, "exit code 3")
    assert await message_of(harness, job) == "exit code 3"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a\tb\r\nc", "a b c"),
        ("\x1b[1;31mError\x1b[0m: \x1b]0;title\x07x", "Error: x"),
        ("\x00\x1b\u202e", ""),
        ("x" * 50, "x" * 19 + "…"),
    ],
)
def test_external_text_becomes_one_safe_line(text: str, line: str) -> None:
    """Proves G7."""
    assert one_line(text, 20) == line
