"""Containers whose worker dies, stops or exits: another worker adopts them, and nothing runs twice."""

import signal
from collections.abc import Iterator
from typing import Any

import pytest

from holdfast.model import Cause, Job, Status
from holdfast.runner.base import ContainerLimits, Identity
from holdfast.runner.docker import runner as docker_runner
from holdfast.runner.docker.container_config import name_of
from holdfast.runner.docker.runner import DockerRunner
from holdfast.runner.state_folder import StateFolder
from holdfast.worker.upkeep import Upkeep
from tests.support.crashing_worker import Hook
from tests.support.docker_engine import DockerEngine, Record, api
from tests.support.in_process_workers import PATIENCE, InProcessWorkers, eventually
from tests.support.worker_processes import WorkerProcesses

LINES = 16
CHATTY = f"""
n=1
say() {{ echo "out $n"; echo "err $n" >&2; n=$((n + 1)); }}
while [ $n -le 8 ]; do say; done
while [ $n -le {LINES} ]; do sleep $PACE; say; done
echo kept > output/kept
printf 'last out'; printf 'last err' >&2
"""
STEPS = [
    "prepared", "created", "confirmed", "spawned", "started", "shipped", "exited", "collected", "gathered",
    "classified", "finished", "removed",
]  # fmt: skip
CALLS = ["engine create", "engine put", "engine start", "engine remove"]
"""Steps that belong to no job: a worker dies at the first such call, whichever job it is for."""
SLOW: Any = {"lease_ttl": 60.0, "heartbeat_interval": 1.0, "adopt_backoff": 0.1}


async def chatty(workers: InProcessWorkers, *, pace: float = 0.1, **fields: Any) -> Job:
    return await workers.container(CHATTY, env={"PACE": str(pace)}, **fields)


async def chatty_for(processes: WorkerProcesses, step: str) -> Job:
    """Submit a job for a worker that is killed at a step; its output must last until the worker ships it."""
    return await chatty(processes, pace=1.0 if step == "shipped" else 0.1, queue=step)


async def assert_whole(processes: WorkerProcesses, job: Job, what: str = "", *, first: int = 1) -> None:
    ended = await processes.ended(job, Status.SUCCEEDED)
    assert (ended.attempts, ended.attempt) == (1, 1), what
    for stream, word in (("stdout", "out"), ("stderr", "err")):
        expected = [f"{word} {n}" for n in range(first if word == "out" else 1, LINES + 1)] + [f"last {word}"]
        assert await processes.log(job, stream) == expected, f"{what}: {stream}"
    (last,) = await processes.store.attempts.list(job.id)
    with processes.artifacts.open(job.id, last.attempt, last.token, "kept").content as kept:
        assert kept.read() == b"kept\n", what
    await processes.assert_true(job)


def assert_ran_once(record: Record, *jobs: Job) -> None:
    assert {job.id: record.runs(job.id) for job in jobs} == {job.id: 1 for job in jobs}


@pytest.fixture
def record(docker_engine: DockerEngine) -> Iterator[Record]:
    with docker_engine.recorded() as record:
        yield record


async def sweep(processes: WorkerProcesses, docker: DockerEngine, times: int = 1) -> None:
    """Sweep several times, as a worker does once a minute."""
    async with api(docker) as engine:
        runner = DockerRunner(
            engine, processes.installation, limits=ContainerLimits(), log_cap=1 << 20, state=processes.settings.state
        )
        await runner.check()
        locks = StateFolder(processes.host("sweeper")).locks(processes.installation)
        chores = Upkeep(
            processes.store, "sweeper", processes.settings, locks=locks, runners=[runner], held=lambda _: False
        )  # fmt: skip
        for _ in range(times):
            await chores.sweep()


async def test_worker_killed_at_any_step_costs_nothing(
    processes: WorkerProcesses, docker_for_processes: DockerEngine, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also between create and start: one attempt, one start. Proves R2, R3, R4, L13, L19, R10, R16."""
    survivor = processes.start({"other": 1}, **SLOW)
    jobs = {step: await chatty_for(processes, step) for step in STEPS}
    victims = {
        step: processes.start({step: 1}, Hook(step=step, do="kill", job=job.id), adopts=False, **SLOW)
        for step, job in jobs.items()
    }
    for step, victim in victims.items():
        assert await victim.dead() == -signal.SIGKILL, step
    for step, job in jobs.items():
        await assert_whole(processes, job, step)
        assert await processes.statuses(job) == ["queued", "running", "succeeded"], step
    for call in CALLS:
        jobs[call] = await chatty(processes, queue=call)
        victim = processes.start({call: 1}, Hook(step=call, do="kill"), adopts=False, **SLOW)
        assert await victim.dead() == -signal.SIGKILL, call
    for call in CALLS:
        await assert_whole(processes, jobs[call], call)
    assert_ran_once(record, *jobs.values())

    async def over() -> bool:
        return docker_for_processes.docker("ps", "-q") == ""

    await eventually(over, "nothing runs any more")
    (its_id,) = [worker.worker for worker in await processes.store.workers.list() if worker.pid == survivor.pid]

    async def removed_by_the_survivor() -> bool:
        """Return the containers that a surviving worker must remove."""
        names = docker_for_processes.containers()
        left = [job for job in jobs.values() if any(job.id in name for name in names)]
        return its_id not in [(await processes.store.attempts.list(job.id))[-1].worker for job in left]

    await eventually(removed_by_the_survivor, "the survivor removes what it ended")
    monkeypatch.setattr(docker_runner, "GRACE_SECONDS", -1.0)
    await sweep(processes, docker_for_processes, 2)
    assert (docker_for_processes.containers(), docker_for_processes.volumes()) == ([], [])


async def test_adopter_killed_at_any_step_costs_nothing(
    processes: WorkerProcesses, docker_for_processes: DockerEngine, record: Record
) -> None:
    """Proves L3, R3, R10."""
    script = f"while [ ! -e go ]; do sleep 0.1; done; {CHATTY}"
    job = await processes.container(f"echo 'out 0'; {script}", env={"PACE": "0.1"}, queue="chain")
    for step in ("started", "found", "adopted", "shipped"):
        victim = processes.start({"chain": 1}, Hook(step=step, do="kill"), adopt_backoff=0.1)
        assert await victim.dead() == -signal.SIGKILL, step
    processes.start({"chain": 1}, adopt_backoff=0.1)
    (name,) = docker_for_processes.containers()
    docker_for_processes.docker("exec", "-u", "65532", name, "touch", "/holdfast/attempt/work/go")
    await assert_whole(processes, job, first=0)
    assert await processes.leases(job, "adopted") == ["adopted"] * 4
    assert_ran_once(record, job)


async def test_worker_stopped_at_any_step_changes_nothing_when_it_wakes(
    processes: WorkerProcesses, docker_for_processes: DockerEngine, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container that a woken worker created and may not start is swept. Proves L15, L6, R16."""
    jobs = {step: await chatty_for(processes, step) for step in [*STEPS, *CALLS]}
    victims = await processes.start_and_stop(
        {step: Hook(step=step, do="stop", job=job.id if step in STEPS else None) for step, job in jobs.items()}
    )
    processes.start({"other": 1})
    for step, job in jobs.items():
        await assert_whole(processes, job, step)
    before = {step: await processes.get(job) for step, job in jobs.items()}
    for victim in victims.values():
        victim.signal(signal.SIGCONT)
    again = {step: await chatty(processes, queue=step) for step in jobs}
    for step, job in again.items():
        await assert_whole(processes, job, f"{step} again")
    for step, job in jobs.items():
        assert await processes.get(job) == before[step], step
    assert_ran_once(record, *jobs.values(), *again.values())
    assert not any("Traceback" in victim.log for victim in victims.values())

    async def only_created() -> bool:
        return set(docker_for_processes.docker("ps", "-a", "--format", "{{.State}}").split()) <= {"created"}

    await eventually(only_created, "all that ran is removed")
    monkeypatch.setattr(docker_runner, "GRACE_SECONDS", -1.0)
    await sweep(processes, docker_for_processes, 2)
    assert (docker_for_processes.containers(), docker_for_processes.volumes()) == ([], [])


async def test_end_without_a_worker_is_collected_and_the_timeout_still_applies(
    processes: WorkerProcesses, docker_for_processes: DockerEngine, record: Record
) -> None:
    """Proves R2, R3, R8."""
    quick = await processes.container("echo up; sleep 1; echo done")
    limited = await processes.container("echo up; sleep 600", timeout=3, stop_grace=0.2)
    failing = await processes.container("echo up; sleep 1; exit 7")
    victim = processes.start({"default": 3}, **SLOW)
    for job in (quick, limited, failing):
        await processes.wait_for_log(job, "up")
    victim.kill()

    async def all_ended() -> bool:
        return docker_for_processes.docker("ps", "-q") == ""

    await eventually(all_ended, "all end by themselves")
    processes.start({"default": 3}, **SLOW)
    await processes.ended(quick, Status.SUCCEEDED)
    assert await processes.log(quick) == ["up", "done"]
    assert (await processes.ended(failing, Status.FAILED)).exit_code == 7
    await processes.ended(limited, Status.TIMED_OUT)
    (attempt,) = await processes.store.attempts.list(limited.id)
    assert (attempt.cause, attempt.exit_code) == (Cause.TIMED_OUT, 124)
    assert_ran_once(record, quick, limited, failing)


async def test_a_worker_that_leaves_hands_over_and_the_next_adopts_at_once(
    workers: InProcessWorkers, docker: DockerEngine, record: Record
) -> None:
    """Proves C9, R3, L3: also without a free slot, and without the queue."""
    workers.set(lease_ttl=4 * PATIENCE)  # Nobody waits for the lease to expire within this test.
    job = await chatty(workers, pace=0.5)
    async with workers.worker():
        await workers.wait_for_log(job, "out 9")

    async def leases() -> list[str]:
        return [str(event.data["lease"]) for event in await workers.events(job, "lease")]

    assert await leases() == ["handed_over"]
    async with workers.worker({"other": 1}):

        async def adopted() -> bool:
            return await leases() == ["handed_over", "adopted"]

        await eventually(adopted, "it is adopted")
        ended = await workers.ended(job, Status.SUCCEEDED)
    assert await workers.log(job) == [f"out {n}" for n in range(1, LINES + 1)] + ["last out"]
    assert ended.attempts == 1
    assert_ran_once(record, job)


async def test_adopter_carries_out_a_pending_stop_request(workers: InProcessWorkers, docker: DockerEngine) -> None:
    """Proves C1, C5."""
    job = await workers.container("echo up; sleep 600", stop_grace=0.2)
    async with workers.worker():
        await workers.wait_for_log(job, "up")
    await workers.store.jobs.cancel(job.id)
    async with workers.worker():
        await workers.ended(job, Status.CANCELLED)
    phases = [event.data["cancel"] for event in await workers.events(job, "cancel")]
    assert phases == ["requested", "signalled", "dead"]
    assert docker.containers() == []


async def test_foreign_container_with_our_name_fails_the_start(workers: InProcessWorkers, docker: DockerEngine) -> None:
    """It is neither adopted nor touched. Proves R1."""
    job = await workers.container("echo hi", hold=True)
    name = name_of(Identity(await workers.store.installation(), job.id, 1))
    docker.docker("create", "--name", name, "holdfast-test:1", "true")
    await workers.store.jobs.release(job.id)
    async with workers.worker():
        ended = await workers.ended(job, Status.FAILED)
    assert ended.error is not None
    assert name in ended.error.message
    assert docker.containers() == [name]
    docker.docker("rm", name)
